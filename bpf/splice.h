/* What the programs and userspace share: connections, splices, and why a
 * packet was not carried. doc.go tells how they work together. */
#pragma once

/* enum why is the reason of a refusal or a pause, and an index into the
 * counters of struct refusals. Why in why.go has the same order. */
enum why {
	WHY_NONE,
	WHY_SOCKET,     /* a socket was not found or not established */
	WHY_UNREAD,     /* the engine's socket holds bytes userspace has not read */
	WHY_ORDER,      /* the packet is not the next one for the engine's socket */
	WHY_HELD,       /* the engine's socket holds bytes out of order */
	WHY_REQUEST,    /* the request is not acknowledged yet */
	WHY_TIMESTAMPS, /* timestamps on one side only, or in microseconds */
	WHY_OPTIONS,    /* TCP options other than timestamps */
	WHY_MSS,        /* a segment larger than the client's path takes */
	WHY_FLAGS,      /* FIN, RST or URG */
	WHY_GAP,        /* bytes are missing before this packet */
	WHY_FRAMES,     /* broken chunked framing */
	WHY_LARGE,      /* a chunk too large to count */
	WHY_LOOP,       /* more frames in a packet than the loop may walk */
	WHY_SURPLUS,    /* bytes after the end of the body */
	WHY_OWED,       /* the client owes acknowledgements from before an earlier splice */
	WHY_RACE,       /* another CPU changed the splice at the same moment */
	WHY_WRITE,      /* the packet could not be rewritten */
	WHY_PMTU,       /* the client's path reported a smaller MTU */
	WHY_MAX = 24,
};

/* struct tuple is the address pair of a connection, network byte order, IPv4
 * as ::ffff:a.b.c.d. Go mirror: tuple. */
struct tuple {
	__u32 remote[4], local[4];
	__u16 rport, lport;
};

enum {
	CONN_ENGINE = 1,   /* the remote end is an engine; otherwise a client */
	CONN_V6 = 2,       /* IPv6 on the wire */
	CONN_LOOPBACK = 4, /* packets go to the loopback device's ingress */
	CONN_LAYER3 = 8,   /* the device has no link-layer header */
	CONN_CLOSED = 16,  /* userspace has closed it; the kernel may not be done */
	CONN_SOCK_V6 = 32, /* IPv6 on the socket */
};

/* Cache lines are laid out by who writes them: the engine's packets and the
 * client's acknowledgements of one stream are often handled by two CPUs. */
#define LINE __attribute__((aligned(64)))

/* struct conn is one TCP socket of the proxy. Userspace writes it before the
 * flow exists and sets CONN_CLOSED and splice later; the programs write shift,
 * when a splice is settled, and what follows it. Go mirror: conn. */
struct conn {
	struct tuple wire; /* as seen at the hooks */
	__u32 flags;
	__u32 ifindex; /* the device packets to the remote end leave by */
	__u32 engine;  /* slot of the engine, for struct refusals */
	__u32 splice;  /* index of the splice it takes part in, 0 none */
	__u32 shift;   /* bytes that passed the socket by in settled splices */

	/* A client's socket may still have to send bytes from before the last
	 * splice again: those below bound (socket numbers) keep the shift they
	 * were first sent with, base. */
	__u32 split; /* bound and base are set */

	LINE struct tuple sock; /* as the socket has it: differs from wire under NAT */
	__u32 bound, base;
	__u32 due;   /* the next acknowledgement belongs to the socket */
	__u32 early; /* the client may have bytes the socket has yet to send */

	LINE __u32 ts_floor; /* latest timestamp sent in the socket's name */
	__u32 ts_known;      /* ts_floor is set */
	/* Where packets to the remote end go first, as the socket's route said
	 * when route_generation was hop_generation. hop_family 0: not known. */
	__u32 hop_family, hop_generation;
	__u32 hop[4];
};

/* The word of a splice holds its whole moving state, so that one
 * compare-and-swap changes it consistently:
 * state:3 | step:4 | left:25 | next:32, from the lowest bit. */
enum state {
	OFF,      /* userspace holds the response; shifts are in the conns */
	ARMED,    /* the programs may take it with the next packet */
	CLAIMED,  /* a program is looking at the sockets */
	ACTIVE,   /* the kernel carries it */
	PAUSED,   /* userspace holds it; carried bytes are not all acknowledged */
	DONE,     /* carried to its end; not all acknowledged */
	FOLDING,  /* all acknowledged; shifts move into the conns */
	ENDED,    /* carried to its end, acknowledged, shifts are in the conns */
};
#define WORD(state, step, left, next) \
	((__u64)(state) | (__u64)(step) << 3 | (__u64)(left) << 7 | (__u64)(next) << 32)
#define STATE(w) ((__u32)(w) & 7)
#define STEP(w) ((__u32)(w) >> 3 & 15)
#define LEFT(w) ((__u32)(w) >> 7)
#define NEXT(w) ((__u32)((w) >> 32))
#define WITH_STATE(w, state) (((w) & ~7ull) | (state))

/* In these states sequence numbers are corrected from the splice; in all
 * others by the conns' shift alone. */
static __always_inline int carrying(__u32 state)
{
	return state >= ACTIVE && state <= FOLDING;
}

#define GAP_BUCKETS 24

/* struct splice is one response on its way from an engine to a client. "Wire"
 * numbers are what the remote end sees, "socket" numbers what the proxy's
 * kernel sees. Go mirror: splice. */
struct splice {
	/* Written by userspace before it arms. */
	__u32 client, engine; /* conns */
	__u32 fixed;          /* framing: Content-Length, not chunked */
	__u32 generation;     /* tells events of an earlier use apart */
	/* Written by a claiming program before it sets ACTIVE. */
	__u32 e_base;  /* the engine conn's shift before the splice */
	__u32 c_start; /* client wire number of the first carried byte */
	__u32 e_start; /* engine wire number of it */
	__u32 e_snd;   /* sequence number the engine gets with each acknowledgement */
	__u32 c_rcv;   /* acknowledgement the client gets with each packet */
	__u32 mss;     /* largest segment for the client's path */
	__u32 ts_out;  /* engine's clock -> client connection's */
	__u32 ts_back; /* client's clock -> engine connection's */
	__u32 ts_client; /* the client's last timestamp before ts_back is known */
	__u32 e_clock;   /* what the engine's socket adds to its clock */
	__u8 ts;         /* both connections use timestamps */
	__u8 ts_back_known;
	__u8 sack; /* the engine understands SACK */
	__u8 pad;
	__u8 c_snd_scale, c_rcv_scale, e_snd_scale, e_rcv_scale;

	/* Written with each of the engine's packets. */
	LINE __u64 word;
	__u64 bytes, packets, chunks;
	__u64 first_ns, last_ns; /* since boot */
	__u64 gap_ns;            /* sum of all gaps between packets */
	__u32 starts, ends;
	/* gaps[i] counts gaps of less than 2^i * 16.4 us, the last one the rest;
	 * what is beyond GAP_BUCKETS only rounds up to a power of two. */
	__u32 gaps[32];

	/* Written with each of the client's. */
	LINE __u64 ack_ns; /* since boot, coarse */
	__u32 una;    /* client wire: acknowledged so far */
	__u32 window; /* the client's window as the engine is told it */
	__u32 e_due;  /* the engine's next bare segment belongs to its socket */

	/* Written when something is unusual. */
	__u32 refused; /* the last enum why */
	__u32 stale;   /* the engine's socket got bytes that were carried too */
};

/* struct wire is how a connection looks at the hooks, noted when its SYN or
 * SYN-ACK leaves. Go mirror: wire. */
struct wire {
	struct tuple tuple;
	__u32 ifindex;
};

/* struct event tells userspace that a splice has settled. Go mirror: event. */
struct event {
	__u32 splice, generation;
	__u64 word;
};

/* struct refusals counts, a copy a CPU, why packets of one engine could not
 * start a splice, and why splices paused. Go mirror: refusals. */
struct refusals {
	__u64 refusals[WHY_MAX], pauses[WHY_MAX];
};

/* TAIL is how many bytes of a response's end are kept (proxy.TailBytes). The
 * second half is never addressed: it lets the verifier see that a copy from
 * any position stays inside. */
#define TAIL 1024
struct tail {
	__u8 bytes[2 * TAIL];
};

/* Connections by id. Key: id from 1. Value: struct conn. Written by userspace
 * (all of it, while no flow leads there) and ingress (shift, ts_floor); read
 * by every program. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1 << 15);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct conn);
} conns SEC(".maps");

/* Splices by id. Key: id from 1. Value: struct splice. Written by userspace
 * and ingress through the word's compare-and-swap; read by every program. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1 << 14);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct splice);
} splices SEC(".maps");

/* The last bytes of each response, a ring addressed by the byte's offset in
 * the splice. Key: splice id. Written by ingress; read by userspace. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1 << 14);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct tail);
} tails SEC(".maps");

/* struct bucket is one cache line of the table of flows: id in the upper half
 * of a slot, the tuple's hash in the lower, 0 when it is free. A generic hash
 * map costs three lines a look-up, which with thousands of streams are never in
 * a cache: with it this was the dearest part of a run. Go mirror: bucket. */
#define BUCKET 8
struct bucket {
	__u64 slots[BUCKET];
};

/* Which connection a packet belongs to (flow.h). Key: hash of struct tuple as
 * on the wire. Value: struct bucket. Written by userspace, and by egress when a
 * new SYN uses the tuple of a connection that is gone; read by every program. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1 << 14);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct bucket);
} flows SEC(".maps");

/* How new connections leave. Key: socket cookie (a listener's child inherits
 * that of its SYN-ACK). Value: struct wire. Written by egress; read by
 * userspace when a connection is entered. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1 << 15);
	__type(key, __u64);
	__type(value, struct wire);
} wires SEC(".maps");

/* Where new connections arrive. Key: struct tuple of a SYN or SYN-ACK as on
 * the wire. Value: ifindex. Written by ingress; read by userspace: a
 * connection whose remote end was never seen at an ingress hook is not
 * spliced. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1 << 15);
	__type(key, struct tuple);
	__type(value, __u32);
} arrivals SEC(".maps");

/* Settled splices. Value: struct event. Written by ingress; read by userspace. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} events SEC(".maps");

/* Refusals and pauses by engine. Key: slot. Value: struct refusals. Entries are
 * made and read by userspace; written by ingress. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_HASH);
	__uint(max_entries, 4096);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct refusals);
} engines SEC(".maps");

/* Rewritten packets carry this mark, so that hooks they meet later leave them
 * alone. Each agent has its own, so that two agents can be chained. */
volatile const __u32 mark = 0x1f5a0001;

/* The number of buckets of flows less one, and what makes their hash another
 * one for each agent, so that no client can aim at a bucket. */
volatile const __u32 flow_mask = (1 << 14) - 1;
volatile const __u32 flow_seed = 1;

/* Whether the kernel has bpf_loop (5.17). */
volatile const __u8 use_bpf_loop = 1;

/* Counts changes of routes and interfaces, from 1. Written by userspace. With
 * each the next hops that were noted are void, and looked up for every packet. */
volatile __u32 route_generation SEC(".data") = 1;

#define TC_NEXT (-1) /* TCX_NEXT; to a clsact filter it means the same */
#define TC_DROP 2    /* TCX_DROP */
