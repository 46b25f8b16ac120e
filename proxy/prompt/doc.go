// Package prompt turns the body of a request into the token ids that the
// engine will compute for it, or says why it cannot.
//
// A token that differs from the engine's costs every cache hit behind it. So
// the package follows an engine step by step, vLLM where engines differ:
//
//	body -> members      which parts of the body bear on the prompt     request.go
//	     -> messages     normalised as vLLM does before the template    message.go
//	     -> text         the model's Jinja template with its variables  template/, variables.go
//	     -> ids          the tokenizer, chunk by chunk from a cache     tokenizer/
//
// Where the engine uses no template, a renderer (renderer.go) makes the ids of
// the messages: harmony.go, mistral.go, with what both need in script.go. A
// prompt that comes again as a whole skips all this (memo.go). JSON and the
// values that templates see are value.go.
//
// source.go finds a model's files, files.go reads from them what the
// engine would, model.go puts it together, and reason.go names why something
// cannot be followed. approximate.go writes what stands for the ids then.
// simulated.go is the simulated engine's model. rendered.go shows people the text.
//
// What cannot be followed is never an error to the client: the Prompt is then
// marked with a Reason and holds text in place of ids, which still tells
// which prompts begin alike.
//
// A Model holds what one served model's prompts need. It is loaded once from
// the files that the engine loads (Load) and may be used by any goroutine. A
// Pool reads prompts for the proxy: small ones on the caller's goroutine, large
// ones on its workers, and none for longer than it may.
//
// The package downloads nothing and asks no engine anything; the agent checks
// a Model against its engines and demotes it when they disagree.
package prompt
