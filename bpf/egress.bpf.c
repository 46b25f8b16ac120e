//go:build ignore

/* egress sees every packet that leaves by an interface the agent watches. It
 * corrects the sequence numbers of what the proxy's own sockets send, and
 * notes how new connections look on the wire. */

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>

#include "splice.h"
#include "packet.h"
#include "flow.h"

char LICENSE[] SEC("license") = "Dual MIT/GPL";

/* No window is larger than 1 GiB (RFC 7323): a socket that sends what lies so
 * far above the bound has had all below it acknowledged. */
#define MOST_OUTSTANDING (1u << 30)

static __always_inline int note_wire(struct __sk_buff *skb, struct packet *p)
{
	__u64 cookie = bpf_get_socket_cookie(skb);
	if (cookie) {
		struct wire wire = { .tuple = p->tuple, .ifindex = skb->ifindex };
		/* The first hook a packet meets is the one to send by. */
		bpf_map_update_elem(&wires, &cookie, &wire, BPF_NOEXIST);
	}
	/* The kernel opens this tuple anew, so whatever had it is gone: also a
	 * connection of an agent that was killed, which nobody has left. */
	find_flow(&p->tuple, 1);
	return TC_NEXT;
}

/* release ends the kernel's carrying for good. Userspace stops a splice before it
 * closes a socket, so an end that leaves under one comes from the kernel, which
 * closes the sockets of an agent that was killed, or one whose other end has
 * not answered its probes. The engine may answer it by
 * ending the response in order, and the client must not take that for the whole
 * of it. */
static __noinline __u64 release(struct splice *s, __u64 w)
{
	for (int i = 0; i < 16; i++) {
		__u32 state = STATE(w), to = PAUSED;
		if (state == ARMED)
			to = OFF;
		else if (state != ACTIVE && state != CLAIMED)
			break;
		if (state == CLAIMED) { /* another CPU is at it, for nanoseconds */
			w = *(volatile __u64 *)&s->word;
			continue;
		}
		__u64 seen = __sync_val_compare_and_swap(&s->word, w, WITH_STATE(w, to));
		if (seen == w)
			return WITH_STATE(w, to);
		w = seen;
	}
	return w;
}

static __always_inline int egress(struct __sk_buff *skb, __u32 l3)
{
	if (skb->mark == mark)
		return TC_NEXT;
	struct packet p;
	if (!read_packet(skb, l3, 0, &p))
		return TC_NEXT;
	if (p.head.flags & SYN)
		return note_wire(skb, &p);
	struct conn *c = find_flow(&p.tuple, 0);
	if (!c)
		return TC_NEXT;
	__u32 sid = c->splice;
	struct splice *s = sid ? bpf_map_lookup_elem(&splices, &sid) : 0;
	__u64 w = s ? *(volatile __u64 *)&s->word : 0;
	if (s && p.head.flags & (FIN | RST))
		w = release(s, w);
	int live = s && carrying(STATE(w));
	if (!live && !c->shift)
		return TC_NEXT;

	__u32 blocks = 0; /* what to add to the edges of SACK blocks */
	struct tcp_head h = p.head;
	if (p.ts && c->ts_known && before(bpf_ntohl(h.tsval), c->ts_floor))
		h.tsval = bpf_htonl(c->ts_floor); /* the remote end must not see time run backwards */

	if (!(c->flags & CONN_ENGINE)) {
		__u32 shift = live ? c->base + NEXT(w) - s->e_start : c->shift;
		__u32 above = p.seq - c->bound;
		if (c->split && (__s32)above < 0) {
			/* From before the last splice: sent again, or a keep-alive
			 * probe. Either way the answer is the socket's. */
			shift = c->base;
			c->due = 1;
		} else if (c->split && !live && above > MOST_OUTSTANDING) {
			c->split = 0;
		}
		if (live && before(s->c_rcv, p.ack))
			s->c_rcv = p.ack;
		h.seq = bpf_htonl(p.seq + shift);
	} else {
		blocks = live ? s->e_base + NEXT(w) - s->e_start : c->shift;
		__u32 ack = p.ack + blocks;
		if (live) {
			/* Nothing is acknowledged to the engine that the client does
			 * not have: the engine holds the only copy. */
			__u32 una = s->una - s->c_start + s->e_start;
			if (before(una, ack))
				ack = una;
			if (STATE(w) == ACTIVE) {
				h.window = bpf_htons(s->window);
				if (!p.len && before(p.seq, s->e_snd))
					s->e_due = 1; /* a keep-alive probe */
			}
		}
		if (h.flags & ACK)
			h.ack = bpf_htonl(ack);
	}
	write_head(skb, &p, &h);
	struct sack sk = {};
	if (blocks && find_sack(skb, &p, &sk)) {
		for (int i = 0; i < 8; i++) {
			__be32 x;
			if (i >= sk.edges)
				break;
			if (bpf_skb_load_bytes(skb, sk.off + i * 4, &x, 4) ||
			    write_edge(skb, &p, sk.off + i * 4, x, bpf_htonl(bpf_ntohl(x) + blocks)))
				return TC_NEXT;
		}
	}
	skb->mark = mark;
	return TC_NEXT;
}

SEC("tc") int egress_ethernet(struct __sk_buff *skb)
{
	return egress(skb, ETH_LEN);
}

SEC("tc") int egress_layer3(struct __sk_buff *skb)
{
	return egress(skb, 0);
}
