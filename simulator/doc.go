// Package simulator is a model of LLM engines: behind HTTP it is the only fake
// upstream of this project's tests, and what `inferrail sim` serves.
//
//	engine.go     Engine, Sequence: when each token comes. No I/O, no clock, no goroutine
//	step.go       what each of an engine's steps computes, and how long it takes
//	gap.go        Gaps: how long it is from one token to the next
//	cache.go      what engines keep of prompts, and how they name it; as pure as the engine
//	block.go      vLLM's pool of blocks
//	radix.go      SGLang's tree of pages, and TGI's
//	slots.go      the slots of llama.cpp and Ollama
//	text.go       what the model says and which tokens a text has
//	prompt.go     what the model continues; chats by the agent's own code
//	request.go    one API request as vLLM understands and refuses it: chat, completions
//	parameter.go  what becomes of the parameters of a request: honoured, harmless, refused
//	form.go       JSON that follows a schema
//	tool.go       calls of tools
//	responses.go  the Responses API
//	messages.go   Anthropic's Messages API
//	pooling.go    embeddings, classes, scores, reranking
//	audio.go      transcriptions and translations
//	tokenize.go   tokens of a text and back
//	answer.go     the bytes of an answer: SSE events, bodies, error bodies
//	fault.go      misbehaviour a test can ask for, and raw bodies
//	stats.go      what a server has counted, whatever its engine
//	face.go       what differs from engine to engine over HTTP
//	vllm.go       vLLM's routes and pages; sglang.go and tgi.go theirs, with their native APIs
//	llamacpp_*.go llama.cpp's requests, answers and slots; ollama_*.go Ollama's
//	exchange.go   one request's way through the server, top to bottom
//	process.go    what a restart makes anew: ranks, their engines and publishers
//	publisher.go  KV cache events: batches, replay, snapshots
//	socket.go     the ZeroMQ sockets for them
//	server.go     Server: Start, Close, counters
//	profile.go    GPUs and models: what an engine on them takes, and holds
//	config.go     Config: flags, named as vLLM's where one exists
//	metrics.go    the /metrics page
//	conn.go       the accepted connections: resets, split writes, refusals
package simulator
