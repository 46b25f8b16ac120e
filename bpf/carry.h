/* Carrying a packet to the other end, and counting it. */
#pragma once

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
