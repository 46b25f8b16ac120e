package proxy

import (
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/inferrail/inferrail/proxy/prompt"
)

// PromptChecks is told what engines have made of prompts that were followed
// exactly. Its methods are called on requests' goroutines and must not block;
// their arguments are valid during the call only.
type PromptChecks interface {
	// Counted: the engine counted theirs tokens of a prompt where ours were
	// followed. Called for every response that tells its usage.
	Counted(m *Model, r *Replica, ours, theirs int, requestID []byte)
	// Sampled: the replica was sent this body, and ids were followed. Called
	// for one in sampleOneIn responses.
	Sampled(m *Model, r *Replica, kind prompt.Kind, body []byte, ids []uint32)
}

// sampleOneIn is how many responses there are for one whose prompt is checked
// token by token.
const sampleOneIn = 1000

// prompts is what a Server follows prompts with. Immutable.
type prompts struct {
	pool   *prompt.Pool
	checks PromptChecks // nil for none
	oneIn  uint32       // responses for one that is sampled
}

// SetPrompts lets requests' prompts be followed from now on, by the Prompts of
// their Model. The pool must outlive the server. checks may be nil.
func (s *Server) SetPrompts(pool *prompt.Pool, checks PromptChecks) {
	s.prompts.Store(&prompts{pool, checks, sampleOneIn})
}

// promptKind returns what rules the prompt of a request to path follows.
func promptKind(path []byte) prompt.Kind {
	switch string(path) {
	case "/v1/chat/completions":
		return prompt.Chat
	case "/v1/completions":
		return prompt.Completion
	}
	return prompt.Other
}

// PromptKind returns what rules the prompt of a request to path follows. ok is
// false for a path whose requests have no prompt to follow.
func PromptKind(path string) (kind prompt.Kind, ok bool) {
	r, _ := routeOf([]byte(path))
	return promptKind([]byte(path)), r == routeGenerate || r == routeAnswer
}

// readPrompt follows the request's prompt, if it is one of which an engine
// fills its KV cache. It cannot fail.
func (x *exchange) readPrompt() {
	p := x.c.s.prompts.Load()
	if p == nil || x.route != routeGenerate && x.route != routeAnswer {
		return
	}
	began := time.Now()
	x.prompt, x.bodyShared = p.pool.Read(x.model.Prompts, promptKind(x.path), x.body, began)
	x.promptTook = time.Since(began)
	x.promptReason, x.promptTokens = x.prompt.Reason, 0
	x.followed = true
	// As long as the engine is waited for it is held as the body is. What a
	// worker that is late holds is the pool's, which has few.
	if n := x.prompt.Memory(); n > smallBody {
		x.held += n
		x.c.s.buffered.Add(n)
	}
	if x.promptReason == prompt.Exact {
		x.promptTokens = x.prompt.Tokens()
		if x.mayBeChat() {
			return // the client would be told what is not so
		}
		x.extra = append(x.extra, "x-inferrail-prompt-tokens: "...)
		x.extra = append(strconv.AppendInt(x.extra, int64(x.promptTokens), 10), "\r\n"...)
	}
}

// mayBeChat reports that it is a completion of which an engine would make a chat, with
// other tokens.
func (x *exchange) mayBeChat() bool {
	return promptKind(x.path) == prompt.Completion &&
		slices.ContainsFunc(x.model.Replicas, func(r *Replica) bool { return r.allChats.Load() })
}

// samplePrompt lets a prompt that an engine has taken be checked, now and then.
func (x *exchange) samplePrompt() {
	if x.followed && x.promptReason == prompt.Exact && x.status == http.StatusOK {
		if p := x.c.s.prompts.Load(); p.checks != nil && rand.Uint32N(p.oneIn) == 0 {
			p.checks.Sampled(x.model, x.replica, promptKind(x.path), x.body, x.prompt.IDs)
		}
	}
}

// comparePrompt compares what was followed with what the engine has counted.
func (x *exchange) comparePrompt(u usage) {
	if x.followed && x.promptReason == prompt.Exact && !u.partial && !(promptKind(x.path) == prompt.Completion && x.replica.allChats.Load()) {
		if p := x.c.s.prompts.Load(); p.checks != nil {
			p.checks.Counted(x.model, x.replica, x.promptTokens, int(min(u.prompt, 1<<30)), x.id)
		}
	}
}

// putPrompt gives the prompt's memory back.
func (x *exchange) putPrompt() {
	if x.prompt != nil {
		x.c.s.prompts.Load().pool.Put(x.prompt)
		x.prompt = nil
	}
}
