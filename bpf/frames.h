/* HTTP/1.1 body framing across packets. The steps have the numbers of
 * proxy.Step; a test runs both parsers over the same bytes. */
#pragma once

enum step {
	STEP_SIZE_START,   /* first digit of a chunk size */
	STEP_SIZE,         /* further digits */
	STEP_EXT,          /* after the digits, up to the line's LF */
	STEP_DATA,         /* chunk data, `left` bytes */
	STEP_DATA_CR,      /* CR after the data */
	STEP_DATA_LF,      /* LF after that CR */
	STEP_TRAILER,      /* first byte of a trailer line */
	STEP_TRAILER_LINE, /* inside a trailer line */
	STEP_TRAILER_LF,   /* LF of the empty line that ends the body */
	STEP_END,          /* the body is over */
};

/* MAX_LEFT is the largest chunk, or rest of a body, that the word of a splice
 * can count down: 32 MiB. */
#define MAX_LEFT ((1u << 25) - 1)

/* struct cursor walks over the payload of one packet. */
struct cursor {
	__u32 off, end; /* next byte and end, from the packet's start */
	__u32 step, left;
	__u32 fixed;  /* a Content-Length body: no framing after the data */
	__u32 chunks; /* size lines completed in this packet */
	__u32 fail;   /* a reason, when the framing cannot be followed */
};

/* frame_run consumes what is left of the current data and then up to eight
 * bytes of framing. It is a global function, so that the verifier checks it
 * once however often a packet's loop calls it. Returns 1 when the walk ends. */
__attribute__((noinline)) int frame_run(struct __sk_buff *skb, struct cursor *c)
{
	if (!c)
		return 1;
	__u32 off = c->off, end = c->end, step = c->step, left = c->left;
	if (off >= end || step == STEP_END)
		return 1;
	if (step == STEP_DATA) {
		__u32 n = end - off;
		if (n > left)
			n = left;
		off += n;
		left -= n;
		if (!left)
			step = c->fixed ? STEP_END : STEP_DATA_CR;
		if (off >= end || step == STEP_END)
			goto out;
	}
	__u64 window = 0;
	__u8 *b = (__u8 *)&window;
	__u32 n = end - off;
	if (n > 8)
		n = 8;
	if (n == 0 || bpf_skb_load_bytes(skb, off, b, n)) {
		c->fail = WHY_FRAMES;
		return 1;
	}
#pragma unroll
	for (int i = 0; i < 8; i++) {
		if (i >= n || step == STEP_DATA || step == STEP_END)
			break;
		__u8 x = b[i];
		off++;
		switch (step) {
		case STEP_SIZE_START:
		case STEP_SIZE: {
			__u32 d;
			if (x >= '0' && x <= '9')
				d = x - '0';
			else if ((x | 32) >= 'a' && (x | 32) <= 'f')
				d = (x | 32) - 'a' + 10;
			else if (step == STEP_SIZE && (x == '\r' || x == ';' || x == ' ' || x == '\t')) {
				step = STEP_EXT;
				continue;
			} else {
				c->fail = WHY_FRAMES;
				return 1;
			}
			if (left > (MAX_LEFT >> 4)) {
				c->fail = WHY_LARGE;
				return 1;
			}
			left = step == STEP_SIZE_START ? d : left << 4 | d;
			step = STEP_SIZE;
			break;
		}
		case STEP_EXT:
			if (x == '\n') {
				step = left ? STEP_DATA : STEP_TRAILER;
				c->chunks++;
			}
			break;
		case STEP_DATA_CR:
		case STEP_DATA_LF:
			if (x != (step == STEP_DATA_CR ? '\r' : '\n')) {
				c->fail = WHY_FRAMES;
				return 1;
			}
			step = step == STEP_DATA_CR ? STEP_DATA_LF : STEP_SIZE_START;
			left = 0;
			break;
		case STEP_TRAILER:
			if (x == '\n') {
				c->fail = WHY_FRAMES;
				return 1;
			}
			step = x == '\r' ? STEP_TRAILER_LF : STEP_TRAILER_LINE;
			break;
		case STEP_TRAILER_LINE:
			if (x == '\n')
				step = STEP_TRAILER;
			break;
		case STEP_TRAILER_LF:
			if (x != '\n') {
				c->fail = WHY_FRAMES;
				return 1;
			}
			step = STEP_END;
			break;
		}
	}
out:
	c->off = off;
	c->step = step;
	c->left = left;
	return off >= end || step == STEP_END;
}

struct walk {
	struct __sk_buff *skb;
	struct cursor c;
};

static long frame_loop(__u32 i, struct walk *w)
{
	return frame_run(w->skb, &w->c) != 0;
}

/* BOUNDED_RUNS is how many times a packet's framing may be advanced on
 * kernels without bpf_loop (before 5.17): a packet of more than about 85
 * chunks pauses the splice there. */
#define BOUNDED_RUNS 256
#define LOOP_RUNS (1 << 15)

/* frames walks w->c to the end of the packet or of the body. */
static __always_inline void frames(struct walk *w)
{
	/* A packet of one token needs no more than these. */
	for (int i = 0; i < 4; i++)
		if (frame_run(w->skb, &w->c))
			return;
	if (use_bpf_loop) {
		bpf_loop(LOOP_RUNS, frame_loop, w, 0);
	} else {
		for (int i = 0; i < BOUNDED_RUNS; i++)
			if (frame_run(w->skb, &w->c))
				break;
	}
	if (!w->c.fail && w->c.off < w->c.end && w->c.step != STEP_END)
		w->c.fail = WHY_LOOP;
}
