/* The parts of the kernel's TCP socket that the programs read, relocated at
 * load (CO-RE), so that one object serves every kernel from 5.15 on. */
#pragma once

#include <linux/in6.h>

struct rb_root {
	void *rb_node;
} __attribute__((preserve_access_index));

struct tcp_options_received {
	__u32 ts_recent;
	__u16 tstamp_ok : 1, sack_ok : 3, snd_wscale : 4, rcv_wscale : 4;
} __attribute__((preserve_access_index));

struct tcp_sock {
	__u32 rcv_nxt, copied_seq;
	__u32 snd_una, snd_nxt, write_seq, snd_wnd;
	__u32 mss_cache;
	__u32 tsoffset;
	__u64 bytes_received;
	struct rb_root out_of_order_queue;
	struct tcp_options_received rx_opt;
} __attribute__((preserve_access_index));

struct net_device {
	int ifindex;
} __attribute__((preserve_access_index));

struct dst_entry {
	struct net_device *dev;
} __attribute__((preserve_access_index));

struct rtable {
	__u8 rt_gw_family; /* 0 when the destination is on the link */
	__be32 rt_gw4;
} __attribute__((preserve_access_index));

struct rt6_info {
	struct in6_addr rt6i_gateway; /* zero when it is on the link */
} __attribute__((preserve_access_index));

struct sock {
	struct dst_entry *sk_dst_cache;
} __attribute__((preserve_access_index));

/* Since 6.7 a route may ask for timestamps in microseconds. */
struct tcp_sock___usec {
	__u8 tcp_usec_ts : 1;
} __attribute__((preserve_access_index));

/* find_socket looks a conn's socket up. The caller releases it. */
static __always_inline struct bpf_sock *find_socket(struct __sk_buff *skb, struct conn *c)
{
	struct bpf_sock_tuple t = {};
	if (c->flags & CONN_SOCK_V6) {
		__builtin_memcpy(t.ipv6.saddr, c->sock.remote, 16);
		__builtin_memcpy(t.ipv6.daddr, c->sock.local, 16);
		t.ipv6.sport = c->sock.rport;
		t.ipv6.dport = c->sock.lport;
		return bpf_skc_lookup_tcp(skb, &t, sizeof(t.ipv6), BPF_F_CURRENT_NETNS, 0);
	}
	t.ipv4.saddr = c->sock.remote[3];
	t.ipv4.daddr = c->sock.local[3];
	t.ipv4.sport = c->sock.rport;
	t.ipv4.dport = c->sock.lport;
	return bpf_skc_lookup_tcp(skb, &t, sizeof(t.ipv4), BPF_F_CURRENT_NETNS, 0);
}
