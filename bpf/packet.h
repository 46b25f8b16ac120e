/* Reading and rewriting one TCP packet. */
#pragma once

#define FIN 1
#define SYN 2
#define RST 4
#define PSH 8
#define ACK 16
#define URG 32

#define ETH_LEN 14

/* The TCP header without options, and the timestamp option as Linux and
 * everybody else sends it: NOP NOP TS. */
struct tcp_head {
	__be16 source, dest;
	__be32 seq, ack;
	__u8 doff; /* upper four bits */
	__u8 flags;
	__be16 window, check, urgent;
	__u8 nop1, nop2, kind, length;
	__be32 tsval, tsecr;
};
#define HEAD_PLAIN 20
#define HEAD_TS 32

/* struct packet is a parsed packet. It lives on the stack of one run. */
struct packet {
	struct tuple tuple;   /* remote is the other host, whatever the direction */
	struct tcp_head head; /* as it came */
	__u32 l3, l4;         /* offsets of the IP and TCP headers */
	__u32 v6;
	__u32 seq, ack;
	__u32 hlen; /* TCP header with options */
	__u32 len;  /* payload */
	__u32 ts;   /* the timestamp option is where it is expected */
};

static __always_inline int before(__u32 a, __u32 b)
{
	return (__s32)(a - b) < 0;
}

/* read_packet fills p, and says whether the packet is TCP that can be looked
 * at: not a fragment, no VLAN tag in front, no IPv6 extension header. l3 is
 * the length of the link-layer header. */
static __always_inline int read_packet(struct __sk_buff *skb, __u32 l3, int inbound, struct packet *p)
{
	__u32 total;
	if (skb->vlan_present)
		return 0;
	__builtin_memset(p, 0, sizeof(*p));
	p->l3 = l3;
	__u32 *source = inbound ? p->tuple.remote : p->tuple.local;
	__u32 *dest = inbound ? p->tuple.local : p->tuple.remote;
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		struct iphdr ip;
		if (bpf_skb_load_bytes(skb, l3, &ip, sizeof(ip)))
			return 0;
		if (ip.protocol != IPPROTO_TCP || (ip.frag_off & bpf_htons(0x3fff)))
			return 0;
		p->l4 = l3 + ip.ihl * 4;
		total = l3 + bpf_ntohs(ip.tot_len);
		source[2] = dest[2] = bpf_htonl(0xffff);
		source[3] = ip.saddr;
		dest[3] = ip.daddr;
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr ip;
		if (bpf_skb_load_bytes(skb, l3, &ip, sizeof(ip)))
			return 0;
		if (ip.nexthdr != IPPROTO_TCP)
			return 0;
		p->v6 = 1;
		p->l4 = l3 + sizeof(ip);
		total = p->l4 + bpf_ntohs(ip.payload_len);
		__builtin_memcpy(source, &ip.saddr, 16);
		__builtin_memcpy(dest, &ip.daddr, 16);
	} else {
		return 0;
	}
	if (bpf_skb_load_bytes(skb, p->l4, &p->head, HEAD_PLAIN))
		return 0;
	p->hlen = p->head.doff >> 4 << 2;
	if (p->hlen < HEAD_PLAIN)
		return 0;
	/* Packets merged beyond 64 KiB (BIG TCP) have no length in the header. */
	if (skb->gso_segs > 1 && skb->len > 65535)
		total = skb->len;
	if (total > skb->len || total < p->l4 + p->hlen)
		return 0;
	p->len = total - p->l4 - p->hlen;
	p->seq = bpf_ntohl(p->head.seq);
	p->ack = bpf_ntohl(p->head.ack);
	p->tuple.rport = inbound ? p->head.source : p->head.dest;
	p->tuple.lport = inbound ? p->head.dest : p->head.source;
	if (p->hlen >= HEAD_TS) {
		if (bpf_skb_load_bytes(skb, p->l4 + HEAD_PLAIN, &p->head.nop1, HEAD_TS - HEAD_PLAIN))
			return 0;
		p->ts = p->head.nop1 == 1 && p->head.nop2 == 1 && p->head.kind == 8 && p->head.length == 10;
	}
	return 1;
}

/* write_head replaces the TCP header by h, keeping the checksum right. It
 * comes before every other change of the packet: it puts the checksum that the
 * packet came with back first. */
static __always_inline int write_head(struct __sk_buff *skb, struct packet *p, struct tcp_head *h)
{
	__s64 diff;
	if (p->ts) {
		diff = bpf_csum_diff((void *)&p->head, HEAD_TS, (void *)h, HEAD_TS, 0);
		if (bpf_skb_store_bytes(skb, p->l4, h, HEAD_TS, 0))
			return -1;
	} else {
		diff = bpf_csum_diff((void *)&p->head, HEAD_PLAIN, (void *)h, HEAD_PLAIN, 0);
		if (bpf_skb_store_bytes(skb, p->l4, h, HEAD_PLAIN, 0))
			return -1;
	}
	return bpf_l4_csum_replace(skb, p->l4 + 16, 0, diff, 0);
}

/* write_addresses makes the packet one from `to->local` to `to->remote`. */
static __always_inline int write_addresses(struct __sk_buff *skb, struct packet *p, const struct tuple *to)
{
	__s64 diff;
	__be32 was[8], now[8];
	if (p->v6) {
		__builtin_memcpy(was, p->tuple.remote, 16);
		__builtin_memcpy(was + 4, p->tuple.local, 16);
		__builtin_memcpy(now, to->local, 16);
		__builtin_memcpy(now + 4, to->remote, 16);
		diff = bpf_csum_diff(was, 32, now, 32, 0);
		if (bpf_skb_store_bytes(skb, p->l3 + 8, now, 32, 0))
			return -1;
	} else {
		was[0] = p->tuple.remote[3];
		was[1] = p->tuple.local[3];
		now[0] = to->local[3];
		now[1] = to->remote[3];
		diff = bpf_csum_diff(was, 8, now, 8, 0);
		if (bpf_skb_store_bytes(skb, p->l3 + 12, now, 8, 0))
			return -1;
		if (bpf_l3_csum_replace(skb, p->l3 + 10, 0, diff, 0))
			return -1;
	}
	return bpf_l4_csum_replace(skb, p->l4 + 16, 0, diff, BPF_F_PSEUDO_HDR);
}

/* Where the SACK option's edges are, and how many. Linux and everybody else
 * sends NOP NOP SACK right after the timestamps. */
struct sack {
	__u32 off, edges;
};

static __always_inline int find_sack(struct __sk_buff *skb, struct packet *p, struct sack *s)
{
	__u32 off = p->ts ? HEAD_TS : HEAD_PLAIN;
	if (p->hlen < off + 12)
		return 0;
	__u8 o[4];
	if (bpf_skb_load_bytes(skb, p->l4 + off, o, 4))
		return 0;
	if (o[0] != 1 || o[1] != 1 || o[2] != 5 || o[3] < 10 || o[3] > 34 || (o[3] - 2) & 7)
		return 0;
	if (off + 2 + o[3] > p->hlen)
		return 0;
	s->off = p->l4 + off + 4;
	s->edges = (o[3] - 2) >> 2;
	return 1;
}

static __always_inline int write_edge(struct __sk_buff *skb, struct packet *p, __u32 off, __be32 was, __be32 now)
{
	if (was == now)
		return 0;
	if (bpf_skb_store_bytes(skb, off, &now, 4, 0))
		return -1;
	return bpf_l4_csum_replace(skb, p->l4 + 16, was, now, 4);
}

/* blank_options turns everything behind the timestamps into NOPs. */
static __always_inline int blank_options(struct __sk_buff *skb, struct packet *p)
{
	__u32 off = p->ts ? HEAD_TS : HEAD_PLAIN;
	for (int i = 0; i < 10; i++) {
		if (off + 4 > p->hlen)
			break;
		__be32 was;
		if (bpf_skb_load_bytes(skb, p->l4 + off, &was, 4) ||
		    write_edge(skb, p, p->l4 + off, was, 0x01010101))
			return -1;
		off += 4;
	}
	return 0;
}

/* rescale converts a window field between two window scales; what does not
 * fit is cut, never enlarged. */
static __always_inline __u32 rescale(__u32 field, __u32 from, __u32 to)
{
	__u32 w = field << (from & 15) >> (to & 15);
	return w > 65535 ? 65535 : w;
}
