// Package simulator is a model of LLM engines: behind HTTP it is the only fake
// upstream of this project's tests, and what `inferrail sim` serves.
//
//	engine.go   Engine, Sequence: when each token comes. No I/O, no clock, no goroutine
//	text.go     what the model says and how many tokens a text has
//	request.go  one API request as vLLM understands and refuses it
//	answer.go   the bytes of an answer: SSE events, bodies, error bodies
//	fault.go    misbehaviour a test can ask for, and raw bodies
//	exchange.go one request's way through the server, top to bottom
//	server.go   Server: routes, Start, Close, counters
//	config.go   Config: flags, named as vLLM's where one exists
//	metrics.go  the /metrics page
//	conn.go     the accepted connection: resets and split writes
package simulator
