// Package virtual serves a workload in virtual time: engines of package simulator
// behind an agent that knows, predicts, chooses and learns with the code of packages
// index and policy. Nothing sleeps, no socket is opened, and the same seed gives the
// same run. Hours of traffic take seconds.
//
//	fleet.go     Fleet: the engines, and the agents before them
//	run.go       Fleet.Serve: a loop over what happens, in the order of time
//	agent.go     one agent: what the proxy does for a request, and the agent around it
//	hold.go      agents that hold requests back until a replica is nearly free
//	piece.go     long prompts that are computed in pieces
//	prewarm.go   prefixes that engines compute ahead while they have nothing to prefill
//	chains.go    Chains: which blocks requests have, and a cache that never forgets
//	ceiling.go   the most hits of all caches together: an oracle
//	bound.go     the times that policies are measured by, and a proven least
//	shared.go    the default policy where all engines find what any of them was asked for
//	compare.go   Plan: a workload under several policies, with several seeds
//	capacity.go  how much a fleet can serve
//	table.go     a comparison for people
//
// What a request meets is what it meets over HTTP, but for what has to do with bytes
// and connections: its tokens are looked up in the index under the engines' own hashes,
// replicas are described, one is chosen, the request claims its blocks and its place,
// the engine schedules it, and its first token and its end teach the agent. Engines tell
// of their load each 100 ms and of their caches as it changes. There are no retries, as
// nothing fails: a request is served, refused by admission, or longer than its engine
// has room for.
package virtual
