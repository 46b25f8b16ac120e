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
#include "state.h"
#include "start.h"
#include "carry.h"

char LICENSE[] SEC("license") = "Dual MIT/GPL";

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
