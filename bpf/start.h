/* Whether a packet may be the first one carried. */
#pragma once

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
	if (!te || !tc || ek->state != BPF_TCP_ESTABLISHED || ck->state != BPF_TCP_ESTABLISHED)
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
