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
// each is one thread on epoll (poller.go) with raw system calls, so that little of
// what is measured is the measuring. Latencies go into a histogram (histogram.go).
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
// # Workloads
//
// A Trial (inferrail bench run, trial.go) asks one gateway or engine for a
// workload of package simulator/workload; a Contest (inferrail bench compare,
// contest.go) does so with each way to choose among simulated engines (rival.go):
// the agent under each policy, and proxies and routers of others. Which workload it is
// says traffic.go, who is asked endpoint.go; simulators.go has the engines of a Contest,
// progress.go the bar.
//
// The load (load.go) is an open loop. Requests are due at times that are fixed
// beforehand. Each has a goroutine of its own (exchange.go) from when it is due,
// whatever has become of those before it; its body has been made before. One
// goroutine on a thread of its own keeps the schedule (pacer.go). Latency counts
// from when a request was due, so a server that falls behind is seen to, and so
// is the harness where it was late itself: how late each request was sent is
// recorded. Nobody waits for a connection. A request beyond --max-at-once is not
// sent and has failed.
//
// The first token is the first event with something that the model said, not the
// first byte or the role; the last is the last of these. How many tokens there
// are, and how many were cached, is what the engine says in usage; which replica
// has answered, and what was foretold, is what the agent says in the response's
// head. Where no agent does, engines are told apart by their fingerprints.
//
// Each run of a Contest has fresh engines, in one process beside the load's, a
// fresh gateway, and the same requests at the same times, so that caches are cold
// and equally so. Simulated engines say what the workload has as the answer, and
// the next turn of a conversation finds it in the cache. Rivals take turns in who
// is first. Engines that a workload throttles are made slow when it says so. What
// the engines have counted is read at the end, beside what answers said.
//
// A run is doubtful when one in a hundred requests was sent more than --max-lag
// late, when requests were not sent, when the CPUs were busier than --max-busy, or
// when a hypervisor took more than 5 % of them. A Contest makes such a run again.
// What is still doubtful is marked in the table and in the JSON, and the command
// then fails.
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
// Plot (plot.go) draws a JSON that was written before. Demo (demo.go) is three policies
// that serve the same sessions side by side, for people to watch.
package bench
