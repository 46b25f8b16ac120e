/* A path to a client that takes only smaller packets says so by ICMP, to the
 * address and about the sequence number of a packet the engine has sent. The
 * client's socket does not know that number. Only the engine can cut its bytes
 * anew, so the message is made one about the engine's own connection. */
#pragma once

#define ICMP_UNREACHABLE 3
#define ICMP_FRAG_NEEDED 4
#define ICMPV6_TOO_BIG 2
#define ICMPV6 58

/* A message that asks for less is not passed on: what an engine believes of the
 * path to the agent holds for all its connections there, and any client can
 * send one. */
#define LEAST_MTU4 1200
#define LEAST_MTU6 1280

/* struct too_big is a message as on the wire behind its IP header, up to the
 * sequence number of the packet it is about. */
struct too_big4 {
	__u8 type, code;
	__be16 check;
	__be16 unused, mtu;
	struct iphdr ip;
	__be16 source, dest;
	__be32 seq;
};
struct too_big6 {
	__u8 type, code;
	__be16 check;
	__be32 mtu;
	struct ipv6hdr ip;
	__be16 source, dest;
	__be32 seq;
};

/* carried_at finds the splice that carried the byte seq of the connection t,
 * as the client counts, and whose client may still miss it; and the conns. */
static __always_inline struct splice *carried_at(struct tuple *t, __u32 seq, struct conn **client, struct conn **e)
{
	struct conn *c = find_flow(t, 0);
	if (!c || (c->flags & CONN_ENGINE))
		return 0;
	*client = c;
	__u32 sid = c->splice;
	struct splice *s = sid ? bpf_map_lookup_elem(&splices, &sid) : 0;
	if (!s)
		return 0;
	__u64 w = load(s);
	if (!carrying(STATE(w)) || seq - s->c_start >= NEXT(w) - s->e_start)
		return 0;
	__u32 eid = s->engine;
	*e = bpf_map_lookup_elem(&conns, &eid);
	return *e ? s : 0;
}

/* sum_words adds words to a one's complement sum. */
static __always_inline __u64 sum_words(const void *p, int words, __u64 sum)
{
	const __u32 *w = p;
#pragma unroll
	for (int i = 0; i < words; i++)
		sum += w[i];
	return sum;
}

/* update_sum changes an Internet checksum for words that were and words that
 * are, given as sums (RFC 1624). */
static __always_inline __u16 update_sum(__u16 check, __u64 was, __u64 now)
{
	__u32 c = fold_sum((__u64)fold_sum(now) + (__u32)~fold_sum(was));
	c = (c & 0xffff) + (c >> 16) + (__u16)~check;
	c = (c & 0xffff) + (c >> 16);
	c = (c & 0xffff) + (c >> 16);
	return ~c;
}

/* smaller_path notes what the path takes: larger segments pause the splice
 * until the engine has understood. */
static __always_inline void smaller_path(struct splice *s, __u32 mtu, __u32 headers)
{
	if (s->ts)
		headers += HEAD_TS - HEAD_PLAIN;
	if (mtu > headers && mtu - headers < s->mss)
		s->mss = mtu - headers;
	s->refused = WHY_PMTU;
}

/* pass_on sends the message to the engine. */
static __noinline int pass_on(struct __sk_buff *skb, __u32 l3, struct conn *e)
{
	struct packet p = { .l3 = l3 };
	__u32 engine = e->engine;
	struct refusals *st = bpf_map_lookup_elem(&engines, &engine);
	if (st)
		st->pauses[WHY_PMTU]++;
	return redirect(skb, &p, e);
}

/* own_packet makes a message about a packet of the client's socket one that
 * the socket recognises: it is about the number on the wire. */
static __noinline int own_packet(struct __sk_buff *skb, struct conn *c, __u32 check_off, __u32 seq_off)
{
	__u16 check;
	__be32 seq, now;
	__u32 sid = c->splice;
	struct splice *s = sid ? bpf_map_lookup_elem(&splices, &sid) : 0;
	__u32 shift = top(s, c, s ? load(s) : 0);
	if (!shift)
		return TC_NEXT;
	if (bpf_skb_load_bytes(skb, check_off, &check, 2) || bpf_skb_load_bytes(skb, seq_off, &seq, 4))
		return TC_NEXT;
	now = bpf_htonl(local_ack(c, shift, bpf_ntohl(seq)));
	check = update_sum(check, seq, now);
	bpf_skb_store_bytes(skb, seq_off, &now, 4, BPF_F_RECOMPUTE_CSUM);
	bpf_skb_store_bytes(skb, check_off, &check, 2, BPF_F_RECOMPUTE_CSUM);
	skb->mark = mark;
	return TC_NEXT;
}

static __noinline int too_big4(struct __sk_buff *skb, __u32 l3)
{
	struct iphdr outer;
	struct too_big4 m, n;
	if (bpf_skb_load_bytes(skb, l3, &outer, sizeof(outer)) || outer.ihl != 5 ||
	    bpf_skb_load_bytes(skb, l3 + V4, &m, sizeof(m)))
		return TC_NEXT;
	if (m.type != ICMP_UNREACHABLE || m.code != ICMP_FRAG_NEEDED || m.ip.protocol != IPPROTO_TCP || m.ip.ihl != 5)
		return TC_NEXT;
	struct tuple t = { .remote = { 0, 0, bpf_htonl(0xffff), m.ip.daddr },
			   .local = { 0, 0, bpf_htonl(0xffff), m.ip.saddr },
			   .rport = m.dest, .lport = m.source };
	struct conn *c = 0, *e = 0;
	struct splice *s = carried_at(&t, bpf_ntohl(m.seq), &c, &e);
	if (!s)
		return c ? own_packet(skb, c, l3 + V4 + 2, l3 + V4 + sizeof(m) - 4) : TC_NEXT;
	smaller_path(s, bpf_ntohs(m.mtu), V4 + HEAD_PLAIN);
	if (bpf_ntohs(m.mtu) < LEAST_MTU4)
		return TC_NEXT;
	n = m;
	n.ip.saddr = e->wire.remote[3];
	n.ip.daddr = e->wire.local[3];
	n.source = e->wire.rport;
	n.dest = e->wire.lport;
	n.seq = bpf_htonl(bpf_ntohl(m.seq) - s->c_start + s->e_start);
	n.ip.check = update_sum(m.ip.check, sum_words(&m.ip.saddr, 2, 0), sum_words(&n.ip.saddr, 2, 0));
	n.check = update_sum(m.check, sum_words(&m.ip, 7, 0), sum_words(&n.ip, 7, 0));
	__be32 was[2] = { outer.saddr, outer.daddr };
	outer.saddr = e->wire.local[3];
	outer.daddr = e->wire.remote[3];
	outer.check = update_sum(outer.check, sum_words(was, 2, 0), sum_words(&outer.saddr, 2, 0));
	if (bpf_skb_store_bytes(skb, l3, &outer, sizeof(outer), BPF_F_RECOMPUTE_CSUM) ||
	    bpf_skb_store_bytes(skb, l3 + V4, &n, sizeof(n), BPF_F_RECOMPUTE_CSUM))
		return TC_DROP;
	return pass_on(skb, l3, e);
}

static __noinline int too_big6(struct __sk_buff *skb, __u32 l3)
{
	struct too_big6 m;
	if (bpf_skb_load_bytes(skb, l3 + V6, &m, sizeof(m)))
		return TC_NEXT;
	if (m.type != ICMPV6_TOO_BIG || m.ip.nexthdr != IPPROTO_TCP)
		return TC_NEXT;
	struct tuple t = { .rport = m.dest, .lport = m.source };
	__builtin_memcpy(t.remote, &m.ip.daddr, 16);
	__builtin_memcpy(t.local, &m.ip.saddr, 16);
	struct conn *c = 0, *e = 0;
	struct splice *s = carried_at(&t, bpf_ntohl(m.seq), &c, &e);
	if (!s)
		return c ? own_packet(skb, c, l3 + V6 + 2, l3 + V6 + sizeof(m) - 4) : TC_NEXT;
	smaller_path(s, bpf_ntohl(m.mtu), V6 + HEAD_PLAIN);
	if (bpf_ntohl(m.mtu) < LEAST_MTU6)
		return TC_NEXT;
	/* Everything that changes is covered by the message's checksum, the outer
	 * addresses through the pseudo header. */
	__u32 outer[8];
	if (bpf_skb_load_bytes(skb, l3 + 8, outer, sizeof(outer)))
		return TC_NEXT;
	__u64 was = sum_words(outer, 8, sum_words(&m.ip.saddr, 10, 0));
	__builtin_memcpy(&m.ip.saddr, e->wire.remote, 16);
	__builtin_memcpy(&m.ip.daddr, e->wire.local, 16);
	m.source = e->wire.rport;
	m.dest = e->wire.lport;
	m.seq = bpf_htonl(bpf_ntohl(m.seq) - s->c_start + s->e_start);
	__builtin_memcpy(outer, e->wire.local, 16);
	__builtin_memcpy(outer + 4, e->wire.remote, 16);
	m.check = update_sum(m.check, was, sum_words(outer, 8, sum_words(&m.ip.saddr, 10, 0)));
	if (bpf_skb_store_bytes(skb, l3 + 8, outer, sizeof(outer), BPF_F_RECOMPUTE_CSUM) ||
	    bpf_skb_store_bytes(skb, l3 + V6, &m, sizeof(m), BPF_F_RECOMPUTE_CSUM))
		return TC_DROP;
	return pass_on(skb, l3, e);
}

/* too_big handles a packet that is not TCP. */
static __always_inline int too_big(struct __sk_buff *skb, __u32 l3)
{
	__u8 proto;
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		if (!bpf_skb_load_bytes(skb, l3 + 9, &proto, 1) && proto == IPPROTO_ICMP)
			return too_big4(skb, l3);
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		if (!bpf_skb_load_bytes(skb, l3 + 6, &proto, 1) && proto == ICMPV6)
			return too_big6(skb, l3);
	}
	return TC_NEXT;
}
