/* How a splice changes its state, and gives back what it holds (doc.go). */
#pragma once

static __always_inline int swap(struct splice *s, __u64 *w, __u64 to)
{
	__u64 seen = __sync_val_compare_and_swap(&s->word, *w, to);
	if (seen == *w) {
		*w = to;
		return 1;
	}
	*w = seen;
	return 0;
}

static __always_inline __u64 load(struct splice *s)
{
	return *(volatile __u64 *)&s->word;
}

static __always_inline void count_refusal(struct splice *s, __u32 engine, __u32 why, int pause)
{
	s->refused = why;
	struct refusals *st = bpf_map_lookup_elem(&engines, &engine);
	if (!st || why >= WHY_MAX)
		return;
	if (pause)
		st->pauses[why]++;
	else
		st->refusals[why]++;
}

/* fold ends a splice whose bytes the client has all acknowledged: shifts move
 * into the conns, and from here on nobody needs the splice's numbers. Whoever
 * wins the swap to FOLDING does it; until the word leaves FOLDING all readers
 * use the splice's own numbers, which do not change. */
static __noinline void fold(struct splice *s, struct conn *c, struct conn *e)
{
	__u64 w = load(s);
	__u32 state = STATE(w);
	if (state != PAUSED && state != DONE)
		return;
	/* The caller may have looked at an earlier word: more may have been
	 * carried since. A full barrier goes with reading una: pause and the
	 * client's acknowledgement each write first and read then, so that one of
	 * the two sees both. */
	__u32 len = NEXT(w) - s->e_start;
	if (__sync_fetch_and_add(&s->una, 0) - s->c_start != len)
		return;
	if (!swap(s, &w, WITH_STATE(w, FOLDING)))
		return;
	c->shift = c->base + len;
	e->shift = s->e_base + len;
	swap(s, &w, WITH_STATE(w, state == DONE ? ENDED : OFF));
	struct event *ev = bpf_ringbuf_reserve(&events, sizeof(*ev), 0);
	if (!ev)
		return; /* userspace sweeps for settled splices too */
	ev->splice = c->splice;
	ev->generation = s->generation;
	ev->word = w;
	bpf_ringbuf_submit(ev, 0);
}

/* check_stale looks, just before the kernel stops carrying, whether the engine's
 * socket is as it was at the start. A packet that was refused on one CPU may
 * have been on its way to the socket while another CPU started with the one
 * before it; its bytes would surface in a later response. */
static __noinline void check_stale(struct __sk_buff *skb, struct splice *s, struct conn *e)
{
	struct bpf_sock *ek = find_socket(skb, e);
	if (!ek)
		return;
	struct tcp_sock *te = bpf_skc_to_tcp_sock(ek);
	if (te && (te->rcv_nxt != s->e_start - s->e_base || te->out_of_order_queue.rb_node))
		s->stale = 1;
	bpf_sk_release(ek);
}

/* pause hands the rest of the response to userspace. Nothing is lost: the
 * packet at hand goes to the engine's socket, corrected by all that was
 * carried, so that the socket sees the first byte that was not. */
static __noinline __u64 pause(struct __sk_buff *skb, struct splice *s, struct conn *e, __u64 w, __u32 why)
{
	if (STATE(w) == ACTIVE)
		check_stale(skb, s, e);
	for (int i = 0; i < 4 && STATE(w) == ACTIVE; i++) {
		if (swap(s, &w, WITH_STATE(w, PAUSED))) {
			count_refusal(s, e->engine, why, 1);
			__u32 cid = s->client;
			struct conn *c = bpf_map_lookup_elem(&conns, &cid);
			if (c)
				fold(s, c, e);
			w = load(s);
			break;
		}
	}
	return w;
}

static __always_inline __u32 milliseconds(void)
{
	return bpf_ktime_get_ns() / 1000000;
}

/* forward_clock notes that the timestamp v is sent in c's name and returns the
 * latest one sent so far: a receiver drops what seems to come from the past
 * (PAWS, RFC 7323). */
static __always_inline __u32 forward_clock(struct conn *c, __u32 v)
{
	if (!c->ts_known || before(c->ts_floor, v)) {
		c->ts_floor = v;
		c->ts_known = 1;
	}
	return c->ts_floor;
}
