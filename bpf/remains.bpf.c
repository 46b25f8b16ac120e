//go:build ignore

/* remains is run by userspace, not attached: it says whether the kernel still
 * knows the socket of a closed connection, TIME_WAIT included, so that its id
 * can be used again. Also the smallest program that shows whether BPF of this
 * kind can be loaded at all. */

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>

#include "splice.h"
#include "socket.h"

char LICENSE[] SEC("license") = "Dual MIT/GPL";

/* The conn's id is the packet's first word behind the Ethernet header. Returns
 * the state of its socket, 0 when there is none. */
SEC("tc") int remains(struct __sk_buff *skb)
{
	__u32 id;
	if (bpf_skb_load_bytes(skb, ETH_HLEN, &id, sizeof(id)))
		return 0;
	struct conn *c = bpf_map_lookup_elem(&conns, &id);
	if (!c)
		return 0;
	struct bpf_sock *sk = find_socket(skb, c);
	if (!sk)
		return 0;
	/* A listener on the local port is not this connection. */
	int state = sk->state == BPF_TCP_LISTEN ? 0 : sk->state;
	bpf_sk_release(sk);
	return state;
}
