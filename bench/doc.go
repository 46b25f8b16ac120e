// Package bench measures inferrail beside its peers. This file tells how; the
// README says how to run it and results/ holds what was found.
//
// # Datapath
//
// Datapath (inferrail bench datapath) asks what it costs to pass a streamed
// answer on. Many clients each read a stream of 200-byte chunks at a fixed
// rate from one engine, through one contestant: nothing but a forwarding
// kernel (direct), the agent's packet tier, its copy tier, nginx, haproxy.
// One process plays all clients (client.go) and one the engine (engine.go);
// each is one thread on epoll with raw system calls, so that little of what is
// measured is the measuring.
//
//	client host          proxy host            engine host
//	[client]--veth--[toclient  toengine]--veth--[engine]     three network namespaces
//
// Each measurement gets fresh namespaces and fresh processes. The namespaces
// have no name: they are gone with the last thread that lives in them, however
// the benchmark ends. The machine's own network is not touched.
//
// CPU is the scheduler's exact run time (schedstat) of every thread of client,
// engine and contestant plus all kworkers and ksoftirqds, over the chunks the
// clients received. Work in softirqs runs mostly on the time of whoever sent
// the packet, so a contestant that hands its work to the kernel is charged for
// it through its neighbours. Subtracting what direct costs leaves the price of
// the contestant.
//
// Latency is the time from just before the engine's send to just after the
// client's receive, on one clock, in every chunk. The client checks each byte:
// chunked framing, the stream a chunk belongs to, its place in the stream, the
// filling, the end. A wrong byte or a lost connection fails the benchmark.
//
// Responses end after a number of chunks, and the next request follows on the
// same connection, so that starting a response is part of the price. First
// responses are shortened by different amounts: ends are spread evenly over
// time from the start.
//
// Wake-ups are counted the same way for every contestant: voluntary context
// switches of all its threads, each of which is followed by a wake-up. One may
// handle many chunks, because the engine sends in bursts, one a millisecond.
// The agent also reports a count of its own: the times userspace was woken to
// read from an engine, against the chunks of the same responses (GET
// /debug/datapath; a response is counted when it ends).
//
// Memory is VmHWM summed over the contestant's processes. Pages shared between
// nginx's processes count more than once; socket buffers are not in it.
//
// Other load is what the machine's CPUs were busy with besides the above, or
// what the hypervisor took from them, whichever is more. A
// measurement with too much of it is repeated, at most twice and within the
// time limit; the quietest attempt is kept, and marked when it is still noisy.
// Contestants are interleaved and start in a different order each repetition.
// Figures are medians over the repetitions that were quiet, or over all where
// none was.
//
// # Gateway
//
// Gateway (inferrail bench gateway) asks what a contestant adds to a small
// request that is answered at once and in one piece: a chat of a kilobyte
// (call.go), an answer of half of that. The hosts, the engine, the accounting
// and the contestants are those above; beside them stand the routers of PyPI
// (router.go), in round-robin mode. Every contestant chooses between two
// engines, which are two ports of one process. nginx buffers answers, as it
// does by default; all keep their connections.
//
// The caller (caller.go) has two ways to load a contestant.
//
// In the open loop calls are due at the times of a Poisson process that is
// fixed beforehand: the same for every contestant in a repetition. A call does
// not wait for earlier ones; it takes an idle connection or opens another.
// Latency is the time from when a call was due to the end of its answer, so a
// contestant that stalls pays for every call that was due meanwhile. What is
// added is the difference to direct at the same rate in the same repetition,
// for each percentile by itself.
//
// In the closed loop 64 connections call again as soon as they are answered.
// That finds the most a contestant can do beside caller and engine on the
// machine, and what a second of CPU of its own is worth (per core). Peak memory
// is read after it.
//
// A contestant is started once a repetition and measured at each rate in turn,
// the closed loop last. Each answer is compared byte by byte with the one that
// the call's number makes the engine give. The agent must answer every call
// rightly, or the benchmark fails; a peer that does not, or that cannot be
// installed or started, is a line that says so.
//
// # Evaluation
//
// Evaluation (inferrail bench report) asks what choosing is worth. It is a list of
// commands (experiment.go), each of which writes a comparison of policies as
// JSON: simulate in virtual time, bench compare over HTTP. The report
// (evaluation_report.go, report.md.tmpl) is a function of these files alone: its
// tables, its targets (target.go) and its charts (charts.go). So what it says can be
// checked without running anything, and a number can be made again by the command that
// stands beside it.
//
// Charts are drawn on svg.go, over scale.go, in the colours and the order of
// palette.go: graph.go has two axes, bars.go columns of bars, replica_chart.go a
// column for each replica.
//
// Demo (demo.go) is three policies that serve the same sessions side by side, for
// people to watch.
package bench
