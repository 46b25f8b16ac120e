// Package proxy is the data plane: it takes OpenAI requests from clients,
// chooses an engine for each and passes the engine's answer on.
//
// # The way of one request
//
//	accept      server.go    one goroutine a connection
//	await       conn.go      idle deadline; the first byte of a request
//	read        conn.go      head deadline, fasthttp's parser; size check; 100-continue; body deadline
//	permit      exchange.go  path (route.go), method and API key (access.go), before the body is read
//	parse       exchange.go  openai.go, or form.go, finds the model in one pass over the body
//	classify    class.go     whose it is, its class, and the time to first token it is granted
//	prompt      prompt.go    package prompt renders and tokenizes it as the engine will
//	look up     cache.go     how much of it each replica holds in its cache (package index)
//	describe    candidate.go what a policy may know of it (session.go) and of each replica
//	choose      choice.go    policy.Policy picks a replica, policy.Admission takes the request or not,
//	                         and it takes a place at the replica's gate (gate.go), or waits (room.go),
//	                         or is held back until a replica is nearly free (hold.go)
//	begin       piece.go     of a long prompt the replica computes a piece, and it is chosen anew
//	connect     upstream.go  an idle connection that looks alive, or a new one (lookup.go: where)
//	claim       cache.go     what the replica will hold, taken back if it does not answer
//	expect      prefill.go   the work that it is comes before the replica
//	send        attempt.go   head and body in one write
//	first byte  attempt.go   the response's head; head.go says what passes
//	relay       relay.go     the body: copied by a shard's goroutine, or carried by the kernel
//	first token prefill.go   seen by first_token.go in the body: what it tells is learned
//	finish      exchange.go  one deferred call: release, count
//
// What is told of a choice is in decision.go; journal.go keeps what became of the last
// ones, recent.go what they were chosen from, and trace.go what spans are made of.
// metrics.go counts; totals.go, lately.go and gaps.go what a screen of the fleet shows.
//
// prewarm.go asks idle replicas to compute ahead what requests have lost by, on a goroutine of
// the server's own; prewarm_report.go tells of it.
//
// prompt_hashes.go says what a prompt shares with others and nothing of what it says.
// explain.go goes the same way up to choose, for a request that is only asked about.
//
// From choose to first byte is one attempt. One that fails is followed by
// another, at another replica, until the client has been sent a byte.
//
// Clients that speak TLS or HTTP/2 are brought to that same way by pairs of
// sockets (front.go, http2.go): one end is a connection like any other, and the
// other end decrypts, or turns a stream into a request. Their answers are copied.
//
// failure.go has one table of everything that can go wrong: what the client is
// told, and whose fault it is.
//
// # Threads
//
// A connection's goroutine waits for the head of a response on Go's netpoller
// (conn.recvEngine), so that one wake-up brings it, and for everything else in
// conn.wait. All that may concern it meanwhile (its client has left, the relay
// has ended, a place has become free, the server stops) calls conn.wake, which
// ends either.
//
// Bodies are relayed by shards (shard.go): one goroutine and one epoll set for
// every two cores, which also see clients leave.
//
// Nothing blocks in a system call of its own, and what runs for every response
// makes its calls without telling the scheduler (RawSyscall): they never block,
// and a call that the scheduler is told of wakes its monitor from deep sleep.
// Large bodies are read and written like all others: moving them by splice(2)
// through a pipe was tried and cost as much.
//
// # Who owns what
//
//   - The client's descriptor belongs to its connection's goroutine, which alone
//     reads and closes it. From relay.start until relay.finished or relay.stop
//     the relay writes to it, and nobody else does.
//   - A TLS client's connection belongs to its front's goroutine, which closes it;
//     Shutdown may reset it. Each end of a pair is
//     closed by its side: the loop's end by its connection's goroutine.
//   - An engine's descriptor belongs to the exchange that dialled it or took it
//     from the idle stack, until it is closed or put back. From relay.start until
//     finished or stop the relay reads it, unless the kernel carries the response.
//   - Locks are taken in this order: Server.mu, relay.mu, watch.mu, conn.mu, and conn.mu
//     before the mu of conn.cw, whose ready function runs without it. gate.mu is taken
//     with none of them held and may be followed by conn.mu, and so are room.mu and
//     parking.mu; lines.mu, rooms.mu, waits.mu and addresses.mu are held alone.
//   - Buffers for request bodies and heads come from pools, at the latest
//     returned when the relay starts: a stream that lasts for an hour holds its
//     connection's small read buffer and the tail of its body.
//
// A Splice belongs to the relay. It is parted after it has settled, or before
// both sockets are closed.
package proxy
