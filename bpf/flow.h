/* The table of flows. splicer's Go side (flow.go) has the same hash. */
#pragma once

static __always_inline __u32 mix(__u32 h, __u32 x)
{
	h = (h ^ x) * 0x9e3779b1;
	return h ^ h >> 15;
}

static __always_inline __u32 flow_hash(const struct tuple *t)
{
	__u32 h = flow_seed;
#pragma unroll
	for (int i = 0; i < 4; i++)
		h = mix(mix(h, t->remote[i]), t->local[i]);
	return mix(h, t->rport | (__u32)t->lport << 16);
}

static __always_inline int same_tuple(const struct tuple *a, const struct tuple *b)
{
	__u32 different = (a->rport ^ b->rport) | (a->lport ^ b->lport);
#pragma unroll
	for (int i = 0; i < 4; i++)
		different |= (a->remote[i] ^ b->remote[i]) | (a->local[i] ^ b->local[i]);
	return !different;
}

/* find_flow returns the connection of a packet. With forget its entry is
 * removed, and the result means nothing. */
static __noinline struct conn *find_flow(const struct tuple *t, int forget)
{
	__u32 h = flow_hash(t), key = h & flow_mask;
	struct bucket *b = bpf_map_lookup_elem(&flows, &key);
	if (!b)
		return 0;
	for (int i = 0; i < BUCKET; i++) {
		__u64 slot = *(volatile __u64 *)&b->slots[i];
		__u32 id = slot >> 32;
		if (!id || (__u32)slot != h)
			continue;
		struct conn *c = bpf_map_lookup_elem(&conns, &id);
		if (!c || !same_tuple(&c->wire, t))
			continue;
		if (forget)
			__sync_val_compare_and_swap(&b->slots[i], slot, 0);
		return c;
	}
	return 0;
}
