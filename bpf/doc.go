// Package bpf lets the kernel carry a streamed response from an engine's
// connection to a client's, packet by packet, without waking the proxy. It
// holds the programs (one .bpf.c each, with a header for each thing they know)
// and their typed Go handles, and is the only place that knows cilium/ebpf.
//
// # How a response is spliced
//
// Client and engine connections are ordinary TCP sockets of the proxy, C and
// E. Userspace reads the head of a response and writes its own to the client;
// then it arms the splice. The next engine packet that finds E quiet is not
// given to E: ingress puts C's addresses, ports and numbers into its headers
// and sends it to the client. The client's acknowledgements go the other way.
// So flow control, loss recovery and pacing are between client and engine, and
// nothing of the stream is held here.
//
//	        engine's packet                       client's packet
//	               |                                     |
//	 ingress: E's flow, splice active?     ingress: C's flow, a bare
//	    |yes                   |no         acknowledgement of carried bytes?
//	    v                      v                |yes             |no
//	rewrite as C's,      number corrected,      v                v
//	to the client        to E's socket    rewrite as E's,   number corrected,
//	                                      to the engine     to C's socket
//
// Bytes that were carried never pass through C's and E's sockets. Each socket
// has a shift, the count of those bytes: egress adds it to what the socket
// sends about them and ingress takes it off what arrives, for as long as the
// connection lives. A connection can be spliced any number of times, and an
// engine's connection may serve another client next.
//
// # States
//
// One 64-bit word a splice holds its state, the framing position and the next
// engine byte; every change is one compare-and-swap (enum state in splice.h).
//
//	OFF -> ARMED        userspace, when all it has read is written to C
//	ARMED -> OFF        userspace, before it reads from E
//	ARMED -> CLAIMED    a program with a candidate packet; it looks at E and C
//	CLAIMED -> ARMED    not now; counted with the reason (enum why)
//	CLAIMED -> ACTIVE   or DONE, if the body ends in this packet
//	ACTIVE -> DONE      the end of the body was carried
//	ACTIVE -> PAUSED    anything unusual: the packet goes to E, userspace goes on
//	PAUSED -> FOLDING -> OFF     the client has acknowledged all that was carried
//	DONE -> FOLDING -> ENDED     likewise; an event tells userspace
//
// Why no byte can overtake another is written at look in start.h. Below
// the boundary, C's write_seq at the start, the client's socket goes on owning
// its bytes, so that the client need not be quiet (conn.split). Nothing is
// acknowledged to the engine that the client does not have, because the engine
// holds the only copy (egress).
//
// # Maps
//
// Each map is described where it is declared, in splice.h: key, value, writer,
// reader. mirror.go has the Go side of the structs and checks their sizes at
// load.
//
// # Kernels
//
// Linux 5.15 with BTF, CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON. tcx needs 6.6;
// before, the same programs are clsact filters that the agent attaches.
// bpf_loop needs 5.17; Options.BoundedLoop does without.
package bpf
