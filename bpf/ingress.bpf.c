//go:build ignore

/* ingress sees every packet that arrives at an interface the agent watches.
 * It takes over armed responses, carries the packets of active ones to the
 * client and the client's acknowledgements to the engine, and corrects the
 * sequence numbers of whatever goes to the proxy's own sockets. */

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_core_read.h>

#include "splice.h"
#include "socket.h"
#include "packet.h"
#include "flow.h"
#include "frames.h"

char LICENSE[] SEC("license") = "Dual MIT/GPL";

#define TCP_ESTABLISHED 1

static __always_inline int swap(struct splice *s, __u64 *w, __u64 to)
{
	__u64 seen = __sync_val_compare_and_swap(&s->word, *w, to);
	if (seen == *w) {
		*w = to;
		return 1;
	}
	*w = seen;
	return 0;
}

static __always_inline __u64 load(struct splice *s)
{
	return *(volatile __u64 *)&s->word;
}

static __always_inline void count_refusal(struct splice *s, __u32 engine, __u32 why, int pause)
{
	s->refused = why;
	struct refusals *st = bpf_map_lookup_elem(&engines, &engine);
	if (!st || why >= WHY_MAX)
		return;
	if (pause)
		st->pauses[why]++;
	else
		st->refusals[why]++;
}

/* fold ends a splice whose bytes the client has all acknowledged: shifts move
 * into the conns, and from here on nobody needs the splice's numbers. Whoever
 * wins the swap to FOLDING does it; until the word leaves FOLDING all readers
 * use the splice's own numbers, which do not change. */
static __noinline void fold(struct splice *s, struct conn *c, struct conn *e)
{
	__u64 w = load(s);
	__u32 state = STATE(w);
	if (state != PAUSED && state != DONE)
		return;
	/* The caller may have looked at an earlier word: more may have been
	 * carried since. A full barrier goes with reading una: pause and the
	 * client's acknowledgement each write first and read then, so that one of
	 * the two sees both. */
	__u32 len = NEXT(w) - s->e_start;
	if (__sync_fetch_and_add(&s->una, 0) - s->c_start != len)
		return;
	if (!swap(s, &w, WITH_STATE(w, FOLDING)))
		return;
	c->shift = c->base + len;
	e->shift = s->e_base + len;
	swap(s, &w, WITH_STATE(w, state == DONE ? ENDED : OFF));
	struct event *ev = bpf_ringbuf_reserve(&events, sizeof(*ev), 0);
	if (!ev)
		return; /* userspace sweeps for settled splices too */
	ev->splice = c->splice;
	ev->generation = s->generation;
	ev->word = w;
	bpf_ringbuf_submit(ev, 0);
}

/* check_stale looks, just before the kernel stops carrying, whether the engine's
 * socket is as it was at the start. A packet that was refused on one CPU may
 * have been on its way to the socket while another CPU started with the one
 * before it; its bytes would surface in a later response. */
static __noinline void check_stale(struct __sk_buff *skb, struct splice *s, struct conn *e)
{
	struct bpf_sock *ek = find_socket(skb, e);
	if (!ek)
		return;
	struct tcp_sock *te = bpf_skc_to_tcp_sock(ek);
	if (te && (te->rcv_nxt != s->e_start - s->e_base || te->out_of_order_queue.rb_node))
		s->stale = 1;
	bpf_sk_release(ek);
}

/* pause hands the rest of the response to userspace. Nothing is lost: the
 * packet at hand goes to the engine's socket, corrected by all that was
 * carried, so that the socket sees the first byte that was not. */
static __noinline __u64 pause(struct __sk_buff *skb, struct splice *s, struct conn *e, __u64 w, __u32 why)
{
	if (STATE(w) == ACTIVE)
		check_stale(skb, s, e);
	for (int i = 0; i < 4 && STATE(w) == ACTIVE; i++) {
		if (swap(s, &w, WITH_STATE(w, PAUSED))) {
			count_refusal(s, e->engine, why, 1);
			__u32 cid = s->client;
			struct conn *c = bpf_map_lookup_elem(&conns, &cid);
			if (c)
				fold(s, c, e);
			w = load(s);
			break;
		}
	}
	return w;
}

static __always_inline __u32 milliseconds(void)
{
	return bpf_ktime_get_ns() / 1000000;
}

/* forward_clock notes that the timestamp v is sent in c's name and returns the
 * latest one sent so far: a receiver drops what seems to come from the past
 * (PAWS, RFC 7323). */
static __always_inline __u32 forward_clock(struct conn *c, __u32 v)
{
	if (!c->ts_known || before(c->ts_floor, v)) {
		c->ts_floor = v;
		c->ts_known = 1;
	}
	return c->ts_floor;
}

/* segment_of is the payload of one packet on the wire, when the kernel has
 * merged several. */
static __always_inline __u32 segment_of(struct __sk_buff *skb, struct packet *p)
{
	__u32 gso = skb->gso_size;
	return gso && gso < p->len ? gso : p->len;
}

#define AF_INET 2
#define AF_INET6 10

/* note_hop notes where the socket of c sends its packets, to spare the packets
 * that are carried a route look-up each. */
static __noinline void note_hop(struct conn *c, struct tcp_sock *t)
{
	c->hop_family = 0;
	if (c->flags & (CONN_LOOPBACK | CONN_LAYER3) || c->wire.remote[3] != c->sock.remote[3])
		return;
	struct dst_entry *dst = BPF_CORE_READ((struct sock *)t, sk_dst_cache);
	if (!dst || BPF_CORE_READ(dst, dev, ifindex) != c->ifindex)
		return;
	c->hop_generation = route_generation;
	if (c->flags & CONN_V6) {
		struct in6_addr gw = BPF_CORE_READ((struct rt6_info *)dst, rt6i_gateway);
		__u32 *a = gw.in6_u.u6_addr32;
		__builtin_memcpy(c->hop, a[0] | a[1] | a[2] | a[3] ? a : c->wire.remote, 16);
		c->hop_family = AF_INET6;
		return;
	}
	__u8 family = BPF_CORE_READ((struct rtable *)dst, rt_gw_family);
	if (family == 0)
		c->hop[0] = c->wire.remote[3];
	else if (family == AF_INET)
		c->hop[0] = BPF_CORE_READ((struct rtable *)dst, rt_gw4);
	else
		return;
	c->hop_family = AF_INET;
}

/* look decides from the kernel's own sockets whether the packet may be the
 * first one carried, and fills in what carrying needs. The splice is CLAIMED.
 * frames_why is what its framing had to say, which means something only if the
 * packet is the next one.
 *
 * Why no byte can be overtaken: userspace arms only after it has written all
 * it read to the client's socket, and takes the splice back, by a swap of the
 * same word, before it reads again. CLAIMED holds userspace off. So while this
 * function looks, userspace holds nothing, and what it checks stays true: the
 * engine's socket has delivered every byte before this packet (copied_seq ==
 * rcv_nxt == seq, nothing queued out of order) and this packet has not been
 * given to it. The packet's bytes follow the client socket's write_seq. */
static __noinline __u32 look(struct __sk_buff *skb, struct packet *p, struct splice *s, struct conn *c, __u32 frames_why)
{
	__u32 segment = segment_of(skb, p);
	__u32 why = WHY_SOCKET;
	__u32 eid = s->engine;
	struct conn *e = bpf_map_lookup_elem(&conns, &eid);
	if (!e)
		return why;
	struct bpf_sock *ek = find_socket(skb, e);
	if (!ek)
		return why;
	struct bpf_sock *ck = find_socket(skb, c);
	if (!ck) {
		bpf_sk_release(ek);
		return why;
	}
	struct tcp_sock *te = bpf_skc_to_tcp_sock(ek), *tc = bpf_skc_to_tcp_sock(ck);
	if (!te || !tc || ek->state != TCP_ESTABLISHED || ck->state != TCP_ESTABLISHED)
		goto out;
	why = WHY_ORDER;
	if (te->rcv_nxt != p->seq - e->shift)
		goto out;
	why = WHY_UNREAD;
	if (te->copied_seq != te->rcv_nxt)
		goto out;
	why = WHY_HELD;
	if (te->out_of_order_queue.rb_node)
		goto out;
	why = WHY_REQUEST;
	if (te->snd_una != te->write_seq)
		goto out;
	why = WHY_OWED;
	if (c->split && before(tc->snd_una, c->bound))
		goto out;
	why = WHY_TIMESTAMPS;
	__u32 ts = BPF_CORE_READ_BITFIELD(te, rx_opt.tstamp_ok);
	if (ts != BPF_CORE_READ_BITFIELD(tc, rx_opt.tstamp_ok) || ts != p->ts)
		goto out;
	if (bpf_core_field_exists(((struct tcp_sock___usec *)0)->tcp_usec_ts)) {
		struct tcp_sock___usec *ue = (void *)te, *uc = (void *)tc;
		if (BPF_CORE_READ_BITFIELD(ue, tcp_usec_ts) || BPF_CORE_READ_BITFIELD(uc, tcp_usec_ts))
			goto out;
	}
	s->c_snd_scale = BPF_CORE_READ_BITFIELD(tc, rx_opt.snd_wscale);
	s->c_rcv_scale = BPF_CORE_READ_BITFIELD(tc, rx_opt.rcv_wscale);
	s->e_snd_scale = BPF_CORE_READ_BITFIELD(te, rx_opt.snd_wscale);
	s->e_rcv_scale = BPF_CORE_READ_BITFIELD(te, rx_opt.rcv_wscale);
	s->sack = BPF_CORE_READ_BITFIELD(te, rx_opt.sack_ok) != 0;
	why = WHY_MSS;
	if (segment > tc->mss_cache)
		goto out;
	why = frames_why;
	if (why)
		goto out;
	s->mss = tc->mss_cache;
	s->e_base = e->shift;
	s->e_start = p->seq;
	s->c_start = tc->write_seq + c->shift;
	s->c_rcv = tc->rcv_nxt;
	s->e_snd = te->snd_nxt;
	s->una = s->c_start;
	s->e_due = 0;
	/* The client may still owe acknowledgements of the socket's own bytes;
	 * the first one that covers them all is the socket's. All below the old
	 * bound is acknowledged, so nobody needs it while it changes. */
	c->due = tc->snd_una != tc->write_seq;
	*(volatile __u32 *)&c->split = 0;
	*(volatile __u32 *)&c->base = c->shift;
	*(volatile __u32 *)&c->bound = tc->write_seq;
	*(volatile __u32 *)&c->split = 1;
	__u32 w = tc->snd_wnd >> (s->e_rcv_scale & 15);
	s->window = w > 65535 ? 65535 : w;
	s->ts = ts;
	/* The engine's clock continues the client connection's from here on, or
	 * from the last timestamp an earlier splice has sent on it. */
	__u32 now = milliseconds();
	__u32 clock = forward_clock(c, now + tc->tsoffset);
	s->ts_out = clock - bpf_ntohl(p->head.tsval);
	s->e_clock = te->tsoffset;
	s->ts_back = te->tsoffset; /* until the client's first timestamp is seen */
	s->ts_back_known = 0;
	s->ts_client = tc->rx_opt.ts_recent;
	forward_clock(e, now + te->tsoffset);
	note_hop(c, tc);
	note_hop(e, te);
	why = WHY_NONE;
out:
	bpf_sk_release(ck);
	bpf_sk_release(ek);
	return why;
}

/* redirect sends the rewritten packet to the other end of c. */
static __always_inline int redirect(struct __sk_buff *skb, struct packet *p, struct conn *c)
{
	skb->mark = mark;
	/* Within the loopback device the packet is where it has to be, and keeps
	 * the route it came with, which a redirected one would have to find again
	 * against the checks for martians. */
	if (c->flags & CONN_LOOPBACK && skb->ifindex == c->ifindex)
		return TC_NEXT;
	if (c->flags & CONN_LAYER3)
		return bpf_redirect(c->ifindex, 0);
	if (p->l3 == 0) {
		/* From a device without a link-layer header to one with. */
		__be16 proto = skb->protocol;
		struct ethhdr eth = { .h_proto = proto };
		if (bpf_skb_change_head(skb, ETH_LEN, 0) ||
		    bpf_skb_store_bytes(skb, 0, &eth, ETH_LEN, 0))
			return TC_DROP;
	}
	if (c->flags & CONN_LOOPBACK) {
		/* The loopback device's address is all zeros. */
		__u8 zero[12] = {};
		if (bpf_skb_store_bytes(skb, 0, zero, sizeof(zero), 0))
			return TC_DROP;
		return bpf_redirect(c->ifindex, BPF_F_INGRESS);
	}
	if (c->hop_family && c->hop_generation == route_generation) {
		struct bpf_redir_neigh hop = { .nh_family = c->hop_family };
		__builtin_memcpy(hop.ipv6_nh, c->hop, 16);
		return bpf_redirect_neigh(c->ifindex, &hop, sizeof(hop), 0);
	}
	return bpf_redirect_neigh(c->ifindex, 0, 0, 0);
}

/* to_client makes an engine's packet one of the client's connection. If that
 * fails half-way, which takes a lack of memory, the packet is lost as on a bad
 * wire, and sent again. */
static __noinline int to_client(struct __sk_buff *skb, struct packet *p, struct splice *s, struct conn *c)
{
	struct tcp_head h = p->head;
	h.flags &= ~FIN; /* the end is userspace's; the engine will repeat it */
	h.source = c->wire.lport;
	h.dest = c->wire.rport;
	h.seq = bpf_htonl(p->seq - s->e_start + s->c_start);
	h.ack = bpf_htonl(s->c_rcv);
	h.window = bpf_htons(rescale(bpf_ntohs(h.window), s->e_snd_scale, s->c_rcv_scale));
	if (p->ts) {
		__u32 v = bpf_ntohl(h.tsval) + s->ts_out;
		h.tsval = bpf_htonl(v);
		h.tsecr = bpf_htonl(s->ts_back_known ? bpf_ntohl(h.tsecr) - s->ts_back : s->ts_client);
		forward_clock(c, v);
	}
	if (write_headers(skb, p, &h, &c->wire)) {
		s->refused = WHY_WRITE;
		return TC_DROP;
	}
	return redirect(skb, p, c);
}

/* MOST_FAST is how far a client may push the engine connection's clock ahead of
 * its socket's: so far that no honest one gets there soon, and half as far as
 * would be taken for the past. */
#define MOST_FAST (1u << 30)

/* to_engine makes a client's acknowledgement one of the engine's connection. */
static __noinline int to_engine(struct __sk_buff *skb, struct packet *p, struct splice *s, struct conn *e, __u32 len)
{
	struct tcp_head h = p->head;
	__u32 shift = s->c_start - s->e_start;
	h.source = e->wire.lport;
	h.dest = e->wire.rport;
	h.seq = bpf_htonl(s->e_snd);
	h.ack = bpf_htonl(p->ack - shift);
	__u32 window = rescale(bpf_ntohs(h.window), s->c_snd_scale, s->e_rcv_scale);
	s->window = window;
	h.window = bpf_htons(window);
	if (p->ts) {
		__u32 v = bpf_ntohl(h.tsval);
		if (!s->ts_back_known) {
			s->ts_back = forward_clock(e, milliseconds() + s->ts_back) - v;
			s->ts_back_known = 1;
		}
		v += s->ts_back;
		/* A client that lets its clock jump must not make the engine take all
		 * that comes later on this connection, for others, for old. */
		if (before(milliseconds() + s->e_clock + MOST_FAST, v))
			v = e->ts_floor;
		h.tsval = bpf_htonl(v);
		h.tsecr = bpf_htonl(bpf_ntohl(h.tsecr) - s->ts_out);
		forward_clock(e, v);
	}
	if (write_headers(skb, p, &h, &e->wire)) {
		s->refused = WHY_WRITE;
		return TC_DROP;
	}
	if (p->hlen > (p->ts ? HEAD_TS : HEAD_PLAIN)) {
		/* Blocks of carried bytes mean something to the engine, others not. */
		struct sack sk = {};
		int keep = s->sack && find_sack(skb, p, &sk);
		for (int i = 0; i < 8; i++) {
			__be32 x;
			if (!keep || i >= sk.edges)
				break;
			if (bpf_skb_load_bytes(skb, sk.off + i * 4, &x, 4) ||
			    bpf_ntohl(x) - s->c_start > len)
				keep = 0;
		}
		if (!keep && blank_options(skb, p))
			return TC_DROP;
		for (int i = 0; i < 8; i++) {
			__be32 x;
			if (!keep || i >= sk.edges)
				break;
			if (bpf_skb_load_bytes(skb, sk.off + i * 4, &x, 4) ||
			    write_edge(skb, p, sk.off + i * 4, x, bpf_htonl(bpf_ntohl(x) - shift)))
				return TC_DROP;
		}
	}
	return redirect(skb, p, e);
}

/* engine_local gives the packet to the engine conn's own socket: its stream
 * continues where the kernel stopped carrying. */
static __noinline int engine_local(struct __sk_buff *skb, struct packet *p, struct splice *s, struct conn *e, __u64 w)
{
	__u32 shift = e->shift;
	if (s && carrying(STATE(w)))
		shift = s->e_base + NEXT(w) - s->e_start;
	if (!shift)
		return TC_NEXT;
	struct tcp_head h = p->head;
	h.seq = bpf_htonl(p->seq - shift);
	write_head(skb, p, &h);
	skb->mark = mark;
	return TC_NEXT;
}

/* keep_tail copies the last bytes of the payload into the splice's ring.
 * Positions follow from the bytes' offsets alone, so that two CPUs with copies
 * of one packet write the same. */
static __noinline void keep_tail(struct __sk_buff *skb, __u32 id, __u32 end_off, __u32 end, __u32 len)
{
	struct tail *t = bpf_map_lookup_elem(&tails, &id);
	if (!t)
		return;
	__u32 n = len > TAIL ? TAIL : len;
	__u32 at = (end_off - n) & (TAIL - 1);
	__u32 first = TAIL - at;
	if (first > n)
		first = n;
	__u32 rest = n - first;
	/* The masks say what holds already in a way the verifier understands. */
	if (first > 0 && first <= TAIL)
		bpf_skb_load_bytes(skb, end - n, &t->bytes[at & (TAIL - 1)], first);
	if (rest > 0 && rest <= TAIL)
		bpf_skb_load_bytes(skb, end - rest, &t->bytes[0], rest);
}

/* count_packet counts in the splice: userspace sums up by engine when the
 * response is over, which spares every packet a look-up. */
static __always_inline void count_packet(struct splice *s, __u32 len, __u32 chunks, int first, int ended)
{
	__u64 now = bpf_ktime_get_ns();
	__u64 gap = now - s->last_ns;
	s->last_ns = now;
	s->bytes += len;
	s->packets++;
	s->chunks += chunks;
	if (s->packets == 1)
		s->first_ns = s->ack_ns = now;
	if (ended)
		s->ends++;
	if (first) {
		s->starts++;
		return;
	}
	s->gap_ns += gap;
	/* The bucket is the number of bits of the gap in units of 16.4 us. */
	__u64 units = gap >> 14;
	__u32 x = units >> 32 ? ~0u : (__u32)units, b = 0;
	if (x >> 16)
		x >>= 16, b += 16;
	if (x >> 8)
		x >>= 8, b += 8;
	if (x >> 4)
		x >>= 4, b += 4;
	if (x >> 2)
		x >>= 2, b += 2;
	if (x >> 1)
		x >>= 1, b += 1;
	b += x;
	if (b >= GAP_BUCKETS)
		b = GAP_BUCKETS - 1;
	s->gaps[b & 31]++;
}

/* follow walks over the packet's bytes from next on, where w says the framing
 * stands. */
static __always_inline void follow(struct walk *walk, struct packet *p, struct splice *s, __u64 w, __u32 next)
{
	walk->c.off = p->l4 + p->hlen + (next - p->seq);
	walk->c.end = p->l4 + p->hlen + p->len;
	walk->c.step = STEP(w);
	walk->c.left = LEFT(w) & MAX_LEFT;
	walk->c.fixed = s->fixed;
	frames(walk);
}

/* MOST_CARRIED is how much one splice may carry, so that sequence numbers
 * inside it can be compared. It pauses then, and goes on when armed again. */
#define MOST_CARRIED (1u << 30)

static __noinline int from_engine(struct __sk_buff *skb, struct packet *p, struct conn *e)
{
	__u32 id = e->splice;
	struct splice *s = id ? bpf_map_lookup_elem(&splices, &id) : 0;
	if (!s)
		return engine_local(skb, p, 0, e, 0);
	__u32 cid = s->client;
	struct conn *c = bpf_map_lookup_elem(&conns, &cid);
	if (!c)
		return engine_local(skb, p, 0, e, 0);

	__u64 w = load(s);
	__u32 state = STATE(w);
	__u32 flags = p->head.flags;
	__u32 why = flags & (FIN | SYN | RST | URG) ? WHY_FLAGS : WHY_NONE;
	if (!why && (p->odd || p->hlen != (p->ts ? HEAD_TS : HEAD_PLAIN)))
		why = WHY_OPTIONS;
	__u32 starting = state == ARMED && p->len;

	if (starting) {
		if (!why && !swap(s, &w, WITH_STATE(w, CLAIMED)))
			return engine_local(skb, p, s, e, w);
		if (why) {
			count_refusal(s, e->engine, why, 0);
			return engine_local(skb, p, s, e, w);
		}
	} else {
		if (!carrying(state))
			return engine_local(skb, p, s, e, w);
		if (!why && (p->ts != 0) != (s->ts != 0))
			why = WHY_TIMESTAMPS;
		if (!p->len) {
			if (why && state == ACTIVE)
				w = pause(skb, s, e, w, why);
			/* The engine's window updates and probes are the client's,
			 * whose answer tells the true window; the answer to a probe
			 * of our own socket is the socket's. */
			if (why || state != ACTIVE || before(p->seq + 1, s->e_start))
				return engine_local(skb, p, s, e, w);
			if (s->e_due) {
				s->e_due = 0;
				return engine_local(skb, p, s, e, w);
			}
			return to_client(skb, p, s, c);
		}
	}

	__u32 next = starting ? p->seq : NEXT(w);
	__u32 end = p->seq + p->len;
	if (!starting && (!before(next, end) || state != ACTIVE)) {
		/* Bytes carried before, which the client may have lost, or what
		 * follows them and is userspace's. A retransmission may hold both
		 * after a pause, or come merged with a FIN: it is the client's all
		 * the same, because the bytes behind the border are those its own
		 * connection sends or will send. */
		int carried = before(p->seq, next) && !before(p->seq, s->e_start) &&
			      !p->odd && segment_of(skb, p) <= s->mss && (!why || why == WHY_FLAGS) &&
			      !(flags & (SYN | RST | URG));
		if (carried && before(next, end)) {
			/* Only bytes of this response: what follows its end is not
			 * the client's. */
			struct walk walk = { .skb = skb };
			follow(&walk, p, s, w, next);
			carried = state == PAUSED && !walk.c.fail && walk.c.off == walk.c.end;
			if (carried)
				c->early = 1;
		}
		if (carried)
			return to_client(skb, p, s, c);
		if (why && state == ACTIVE)
			w = pause(skb, s, e, w, why);
		return engine_local(skb, p, s, e, w);
	}
	if (!starting && !why) {
		if (before(next, p->seq))
			why = WHY_GAP;
		else if (before(p->seq, s->e_start))
			why = WHY_ORDER;
		else if (segment_of(skb, p) > s->mss)
			why = WHY_MSS;
		else if (end - s->e_start > MOST_CARRIED)
			why = WHY_LARGE;
	}

	struct walk walk = { .skb = skb };
	if (!why) {
		follow(&walk, p, s, w, next);
		why = walk.c.fail;
		if (!why && walk.c.off < walk.c.end)
			why = WHY_SURPLUS;
	}
	if (starting)
		why = look(skb, p, s, c, why);
	if (why) {
		if (starting) {
			swap(s, &w, WITH_STATE(w, ARMED));
			count_refusal(s, e->engine, why, 0);
		} else {
			w = pause(skb, s, e, w, why);
		}
		return engine_local(skb, p, s, e, w);
	}
	__u32 ended = walk.c.step == STEP_END;
	keep_tail(skb, id, end - s->e_start, walk.c.end, end - next);
	if (ended && !starting)
		check_stale(skb, s, e);
	if (!swap(s, &w, WORD(ended ? DONE : ACTIVE, walk.c.step, walk.c.left, end))) {
		/* Another CPU was faster: with a copy of this packet, or with a
		 * pause. In both cases the new word says whose the packet is. */
		count_refusal(s, e->engine, WHY_RACE, 0);
		if (carrying(STATE(w)) && !before(NEXT(w), end))
			return to_client(skb, p, s, c);
		/* The engine's socket may not see new bytes of an active splice. */
		w = pause(skb, s, e, w, WHY_RACE);
		return engine_local(skb, p, s, e, w);
	}
	count_packet(s, end - next, walk.c.chunks, starting, ended);
	return to_client(skb, p, s, c);
}

/* top is the shift of what a client's socket sends and gets acknowledged now. */
static __always_inline __u32 top(struct splice *s, struct conn *c, __u64 w)
{
	return s && carrying(STATE(w)) ? c->base + NEXT(w) - s->e_start : c->shift;
}

/* local_ack translates a number the client acknowledges into the client
 * conn's socket space. Inside the carried range the socket has nothing: the
 * number becomes the range's begin. */
static __always_inline __u32 local_ack(struct conn *c, __u32 shift, __u32 x)
{
	if (!c->split)
		return x - shift;
	__u32 off = x - c->bound - c->base;
	if ((__s32)off <= 0)
		return x - c->base;
	if (off <= shift - c->base)
		return c->bound;
	return x - shift;
}

static __noinline int client_local(struct __sk_buff *skb, struct packet *p, struct splice *s, struct conn *c, __u64 w)
{
	__u32 shift = top(s, c, w);
	if (!shift || !(p->head.flags & ACK))
		return TC_NEXT;
	struct tcp_head h = p->head;
	__u32 ack = local_ack(c, shift, p->ack);
	if (c->early) {
		/* The client got bytes of a spanning retransmission before the
		 * socket has sent them; a socket ignores acknowledgements of
		 * what it has not sent. */
		struct bpf_sock *ck = find_socket(skb, c);
		if (ck) {
			struct tcp_sock *tc = bpf_skc_to_tcp_sock(ck);
			if (tc) {
				__u32 sent = tc->snd_nxt;
				if (before(sent, ack))
					ack = sent;
				else if (before(c->bound, sent) && tc->snd_una == sent)
					c->early = 0;
			}
			bpf_sk_release(ck);
		}
	}
	h.ack = bpf_htonl(ack);
	write_head(skb, p, &h);
	struct sack sk = {};
	if (p->hlen > HEAD_PLAIN + 8 && find_sack(skb, p, &sk)) {
		for (int i = 0; i < 8; i++) {
			__be32 x;
			if (i >= sk.edges)
				break;
			if (bpf_skb_load_bytes(skb, sk.off + i * 4, &x, 4) ||
			    write_edge(skb, p, sk.off + i * 4, x, bpf_htonl(local_ack(c, shift, bpf_ntohl(x)))))
				return TC_DROP;
		}
	}
	skb->mark = mark;
	return TC_NEXT;
}

/* MOST_AHEAD is how far a client's sequence number may be ahead of what its
 * socket has acknowledged: more than any receive buffer. */
#define MOST_AHEAD (1u << 25)

static __noinline int from_client(struct __sk_buff *skb, struct packet *p, struct conn *c)
{
	__u32 id = c->splice;
	struct splice *s = id ? bpf_map_lookup_elem(&splices, &id) : 0;
	if (!s)
		return client_local(skb, p, 0, c, 0);
	__u64 w = load(s);
	if (!carrying(STATE(w)) || !(p->head.flags & ACK))
		return client_local(skb, p, s, c, w);
	__u32 eid = s->engine;
	struct conn *e = bpf_map_lookup_elem(&conns, &eid);
	if (!e)
		return client_local(skb, p, s, c, w);

	__u32 len = NEXT(w) - s->e_start;
	__u32 off = p->ack - s->c_start;
	int in_range = off <= len; /* a negative offset is a large number */
	/* Nothing beyond the range is sent while the kernel carries. And as in the
	 * socket, an acknowledgement counts only with a sequence number that the
	 * client can be at, or one forged packet in two would end the splice. */
	int likely = p->seq + p->len + 1 - s->c_rcv <= MOST_AHEAD;
	int beyond = likely && STATE(w) != ACTIVE && !in_range && (__s32)off > 0;
	in_range = in_range && likely;
	if (in_range || beyond) {
		__u32 una = beyond ? s->c_start + len : p->ack;
		__u32 was = *(volatile __u32 *)&s->una;
		/* Acknowledgements on several CPUs: the highest has to win, or the
		 * splice never settles. */
		for (int i = 0; i < 8 && before(was, una); i++) {
			__u32 seen = __sync_val_compare_and_swap(&s->una, was, una);
			if (seen == was) {
				s->ack_ns = bpf_ktime_get_coarse_ns();
				break;
			}
			was = seen;
		}
	}
	/* Bare acknowledgements of carried bytes are the engine's, except one
	 * that the client's socket waits for, and the client's own probes, which
	 * the socket has to answer. */
	int bare = !p->len && !p->odd && !(p->head.flags & (FIN | SYN | RST | URG)) && !before(p->seq, s->c_rcv);
	int engines_ack = bare && in_range;
	if (c->due && bare && (in_range || beyond)) {
		c->due = 0;
		engines_ack = 0;
	}
	if ((in_range && off == len) || beyond)
		fold(s, c, e);
	if (engines_ack)
		return to_engine(skb, p, s, e, len);
	return client_local(skb, p, s, c, w);
}

#include "pmtu.h"

static __always_inline int ingress(struct __sk_buff *skb, __u32 l3)
{
	if (skb->mark == mark)
		return TC_NEXT;
	struct packet p;
	if (!read_packet(skb, l3, 1, &p))
		return too_big(skb, l3);
	if (p.head.flags & SYN) {
		__u32 ifindex = skb->ifindex;
		bpf_map_update_elem(&arrivals, &p.tuple, &ifindex, BPF_ANY);
		/* Anybody can send a SYN. A flow ends when the kernel answers it
		 * with one of its own (egress). */
		return TC_NEXT;
	}
	struct conn *c = find_flow(&p.tuple, 0);
	if (!c)
		return TC_NEXT;
	if (c->flags & CONN_ENGINE)
		return from_engine(skb, &p, c);
	return from_client(skb, &p, c);
}

SEC("tc") int ingress_ethernet(struct __sk_buff *skb)
{
	return ingress(skb, ETH_LEN);
}

SEC("tc") int ingress_layer3(struct __sk_buff *skb)
{
	return ingress(skb, 0);
}
