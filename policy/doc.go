// Package policy decides where a request goes and whether it is taken. It does
// no I/O, starts no goroutine and reads no clock: time and randomness are
// arguments, so that a decision can be replayed.
//
//	candidates ──► Policy.Score ──► a cost each ──► Choose ──► the replica
//	    ▲                                             │
//	    │ Speed, Backlog.Wait, Load                   ▼
//	    │                                   Admission: now, later, or not
//	    │                                             │
//	    └── Calibration ◄── Backlog.First ◄── Backlog.Enter
//
// A Request is what is known of the request and a Candidate what is known of a
// replica, at one moment; the caller (package proxy, and the simulator in virtual
// time) fills them. Every Policy gives each candidate a cost, and Choose, which is
// the same for all, takes the least: so any two policies can be compared on the
// same candidates, live or in the shadow of another.
//
// What it costs to prefill a prompt is linear in Work, with the coefficients of a
// Speed. A Backlog knows the Work that a replica has before it, a Calibration finds
// its Speed from first bytes: when a request is sent, its Work enters the Backlog; when
// its first token is there, it leaves, and what it took since those before it were
// done is an Observation.
//
// Who reads this for the first time goes by policy.go, choose.go and cost_model.go, and
// has seen what a decision is. Each of testdata's folders tells stories of one part in
// plain text. Package simulator/virtual serves whole traces by it, and is where the
// weights come from.
//
//	policy.go        Request, Candidate, Policy
//	choose.go        Choose: least cost, ties, slack
//	cost_model.go    the default: expected time to first token; scoring.go is its loop
//	choose_amd64.s, scoring_amd64.s
//	                 what takes most of a decision, four candidates at a time;
//	                 fours_amd64.go says what that is
//	work.go          Work and Speed
//	seats.go         seats: the few sequences that an engine runs at a time, and who waits for one
//	room.go          room: the KV cache that sequences share, and who waits to fit into it
//	backlog.go       Backlog: prompts sent and not answered yet
//	calibration.go   Calibration: Speed, from first bytes
//	standing.go      Standing: what an agent knows of a replica, as a candidate
//	sending.go       Sending: a prompt's way to its first token, and what it teaches
//	company.go       by how much first tokens come later for each request beside them,
//	                 and how many those usually are
//	peer.go          Peer: replicas whose speeds are taken to be alike
//	board.go         what a backlog and a calibration show to readers that do not wait
//	load.go          Load: what an engine says of itself
//	hit_rate.go      HitRate: how much of what it looked for it had cached
//	least_request.go, round_robin.go, random.go, hashing.go, kv_aware.go, lmetric.go,
//	nlms.go          the other policies; registry.go names them all
//	explain.go       the terms of a cost
//	shadow.go        policies beside the live one, and their regret
//	admission.go     whether a request is taken, separate from where it goes
//	queue.go         the order of those that wait: classes, and tenants in turn
//	holding.go       what is held back until a replica is nearly free, shortest first
//	pieces.go        what is computed in pieces, so that others need not wait for all of it
//	prewarming.go    what replicas that have nothing to prefill compute ahead
//	budget.go        what an API key may use
package policy
