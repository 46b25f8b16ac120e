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

/* struct packet is a parsed packet. It lives on the stack of one run. ip and
 * head lie as on the wire, IPv4 in the second half of ip, so that both are read
 * and written in one call each: helper calls are what a run is made of. */
struct packet {
	struct tuple tuple;   /* remote is the other host, whatever the direction */
	__u32 ip[10];
	struct tcp_head head; /* as it came */
	__u32 l3, l4;         /* offsets of the IP and TCP headers */
	__u32 v6;
	__u32 seq, ack;
	__u32 hlen; /* TCP header with options */
	__u32 len;  /* payload */
	__u32 ts;   /* the timestamp option is where it is expected */
	__u32 odd;  /* a first fragment, IP options or extension headers: its numbers
		     * are corrected as all others', but it is not carried */
};
#define V4 20
#define V6 40

/* read_odd_head reads the TCP header that is not where it mostly is. */
static __noinline int read_odd_head(struct __sk_buff *skb, struct packet *p)
{
	p->odd = 1;
	__builtin_memset(&p->head.nop1, 0, HEAD_TS - HEAD_PLAIN);
	return bpf_skb_load_bytes(skb, p->l4, &p->head, HEAD_TS) &&
	       bpf_skb_load_bytes(skb, p->l4, &p->head, HEAD_PLAIN);
}

/* skip_extensions finds the TCP header behind IPv6 extension headers; packets
 * merged beyond 64 KiB have one too. Returns 0 when there is none. */
static __noinline __u32 skip_extensions(struct __sk_buff *skb, __u32 off, __u32 next)
{
	for (int i = 0; i < 3; i++) {
		__u8 b[4];
		if (next == IPPROTO_TCP)
			return off;
		if (next != 0 && next != 43 && next != 44 && next != 60)
			return 0;
		if (bpf_skb_load_bytes(skb, off, b, 4))
			return 0;
		if (next == 44 && (b[2] || b[3] & 0xf8))
			return 0; /* not the first fragment */
		off += next == 44 ? 8 : (b[1] + 1) * 8;
		next = b[0];
	}
	return next == IPPROTO_TCP ? off : 0;
}

static __always_inline int before(__u32 a, __u32 b)
{
	return (__s32)(a - b) < 0;
}

/* read_packet fills p, and says whether the packet is TCP that can be looked
 * at: not a later fragment, no VLAN tag in front. l3 is the length of the link-layer header. */
static __always_inline int read_packet(struct __sk_buff *skb, __u32 l3, int inbound, struct packet *p)
{
	__u32 total;
	if (skb->vlan_present)
		return 0;
	__builtin_memset(&p->head.nop1, 0, HEAD_TS - HEAD_PLAIN);
	p->l3 = l3;
	p->odd = 0;
	__u32 *source = inbound ? p->tuple.remote : p->tuple.local;
	__u32 *dest = inbound ? p->tuple.local : p->tuple.remote;
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		struct iphdr *ip = (void *)&p->ip[5];
		if (bpf_skb_load_bytes(skb, l3, ip, V4 + HEAD_TS) &&
		    bpf_skb_load_bytes(skb, l3, ip, V4 + HEAD_PLAIN))
			return 0;
		if (ip->protocol != IPPROTO_TCP || (ip->frag_off & bpf_htons(0x1fff)))
			return 0;
		p->v6 = 0;
		p->l4 = l3 + V4;
		total = l3 + bpf_ntohs(ip->tot_len);
		source[0] = source[1] = dest[0] = dest[1] = 0;
		source[2] = dest[2] = bpf_htonl(0xffff);
		source[3] = ip->saddr;
		dest[3] = ip->daddr;
		p->odd = (ip->frag_off & bpf_htons(0x2000)) != 0;
		if (ip->ihl != 5) {
			p->l4 = l3 + ip->ihl * 4;
			if (p->l4 < l3 + V4 || read_odd_head(skb, p))
				return 0;
		}
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr *ip = (void *)p->ip;
		if (bpf_skb_load_bytes(skb, l3, ip, V6 + HEAD_TS) &&
		    bpf_skb_load_bytes(skb, l3, ip, V6 + HEAD_PLAIN))
			return 0;
		p->v6 = 1;
		p->l4 = l3 + V6;
		total = p->l4 + bpf_ntohs(ip->payload_len);
		__builtin_memcpy(source, &ip->saddr, 16);
		__builtin_memcpy(dest, &ip->daddr, 16);
		if (ip->nexthdr != IPPROTO_TCP) {
			p->l4 = skip_extensions(skb, p->l4, ip->nexthdr);
			if (!p->l4 || read_odd_head(skb, p))
				return 0;
		}
	} else {
		return 0;
	}
	p->hlen = p->head.doff >> 4 << 2;
	if (p->hlen < HEAD_PLAIN)
		return 0;
	/* Packets merged beyond 64 KiB (BIG TCP) have no length in the header. */
	if (skb->len > 65535 && skb->gso_segs > 1)
		total = skb->len;
	if (total > skb->len || total < p->l4 + p->hlen)
		return 0;
	p->len = total - p->l4 - p->hlen;
	p->seq = bpf_ntohl(p->head.seq);
	p->ack = bpf_ntohl(p->head.ack);
	p->tuple.rport = inbound ? p->head.source : p->head.dest;
	p->tuple.lport = inbound ? p->head.dest : p->head.source;
	p->ts = p->hlen >= HEAD_TS && p->head.nop1 == 1 && p->head.nop2 == 1 &&
		p->head.kind == 8 && p->head.length == 10;
	return 1;
}

/* fold_sum brings a sum of 32-bit words to the 32 bits that the checksum
 * helpers take. */
static __always_inline __u32 fold_sum(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	return (sum & 0xffffffff) + (sum >> 32);
}

/* swap_head puts h in the place of p->head and returns the difference for the
 * checksum. Words that did not change add ones' complement zero. */
static __always_inline __u32 swap_head(struct packet *p, const struct tcp_head *h)
{
	__u32 *was = (void *)&p->head, *now = (void *)h;
	__u64 sum = 0;
#pragma unroll
	for (int i = 0; i < HEAD_TS / 4; i++) {
		sum += (__u64)(__u32)~was[i] + now[i];
		was[i] = now[i];
	}
	return fold_sum(sum);
}

/* write_head replaces the packet's TCP header by h, keeping the checksum
 * right. It comes before every other change of the packet: it puts the
 * checksum that the packet came with back first. */
static __always_inline int write_head(struct __sk_buff *skb, struct packet *p, const struct tcp_head *h)
{
	__u32 diff = swap_head(p, h);
	if (p->ts ? bpf_skb_store_bytes(skb, p->l4, &p->head, HEAD_TS, 0)
		  : bpf_skb_store_bytes(skb, p->l4, &p->head, HEAD_PLAIN, 0))
		return -1;
	return bpf_l4_csum_replace(skb, p->l4 + 16, 0, diff, 0);
}

/* write_headers makes the packet one from `to->local` to `to->remote`, with h
 * as its TCP header. As write_head it comes before other changes. */
static __always_inline int write_headers(struct __sk_buff *skb, struct packet *p, const struct tcp_head *h, const struct tuple *to)
{
	__u32 diff = swap_head(p, h);
	__u64 sum = 0;
	long err;
	if (p->v6) {
		/* source and destination are the last eight words */
#pragma unroll
		for (int i = 0; i < 4; i++) {
			sum += (__u64)(__u32)~p->ip[2 + i] + to->local[i];
			sum += (__u64)(__u32)~p->ip[6 + i] + to->remote[i];
			p->ip[2 + i] = to->local[i];
			p->ip[6 + i] = to->remote[i];
		}
		err = p->ts ? bpf_skb_store_bytes(skb, p->l3, p->ip, V6 + HEAD_TS, 0)
			    : bpf_skb_store_bytes(skb, p->l3, p->ip, V6 + HEAD_PLAIN, 0);
		/* BPF_F_PSEUDO_HDR below takes the difference out of a checksum the
		 * device has summed over the packet, as IPv4 needs it, whose header
		 * has a checksum of its own. Here it must stay in. */
		bpf_csum_update(skb, fold_sum(sum));
	} else {
		struct iphdr *ip = (void *)&p->ip[5];
		sum = (__u64)(__u32)~ip->saddr + to->local[3];
		sum += (__u64)(__u32)~ip->daddr + to->remote[3];
		ip->saddr = to->local[3];
		ip->daddr = to->remote[3];
		/* RFC 1624: the new checksum is the complement of the complement
		 * of the old one plus the difference. */
		__u32 c = fold_sum(sum);
		c = (c & 0xffff) + (c >> 16) + (__u16)~ip->check;
		c = (c & 0xffff) + (c >> 16);
		c = (c & 0xffff) + (c >> 16);
		ip->check = ~c;
		err = p->ts ? bpf_skb_store_bytes(skb, p->l3, ip, V4 + HEAD_TS, 0)
			    : bpf_skb_store_bytes(skb, p->l3, ip, V4 + HEAD_PLAIN, 0);
	}
	if (err)
		return -1;
	/* Apart, because a packet whose checksum the hardware completes carries
	 * only the addresses' part of it so far. */
	if (bpf_l4_csum_replace(skb, p->l4 + 16, 0, fold_sum(sum), BPF_F_PSEUDO_HDR))
		return -1;
	return bpf_l4_csum_replace(skb, p->l4 + 16, 0, diff, 0);
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
