package proxy

import (
	"net/http"
	"time"

	"github.com/inferrail/inferrail/policy"
)

// promise begins a prefill, at the replica where the request has its place.
func (x *exchange) promise() {
	if i := x.choice.Index; x.piecing == nil && i >= 0 && i < len(x.candidates) {
		x.replica.standing.Settled(&x.asked, x.candidates, i)
		x.noteLost(i)
	}
	x.prefill.Promise(&x.replica.standing, x.asked.Tokens, x.sequences(), x.picked())
}

// expectPrefill enters the request, which is about to be sent to the replica, in what the
// replica has before it.
func (x *exchange) expectPrefill() {
	p, now := &x.prefill, time.Now()
	exact := x.call.uncached(x.path)
	if b := x.blocks; b != nil && !exact {
		_, exact = b.at(x.replica)
	}
	p.Tokens = x.asked.Tokens
	if i := x.choice.Index; i >= 0 && i < len(x.candidates) && x.places[i] == x.replica {
		p.Foretell(&x.asked, &x.candidates[i])
	}
	p.Expect(&x.replica.standing, x.call.stream || string(x.path) == "/generate_stream" || x.prefillsOnly(), exact, now)
}

// firstToken notes that the first token was there at now. It tells those who learn
// from it.
func (x *exchange) firstToken(now time.Time) {
	p := &x.prefill
	if !p.Waited() || x.response.status != http.StatusOK {
		return
	}
	took, ok := p.First(x.replica.InFlight(), x.replica.Pending(), x.tellsCached(), now)
	if !ok {
		return
	}
	x.observed = took.Seconds()
	if v := x.piecing; v.sent() {
		// What others would have done is known of what was sent last alone.
		x.judged = x.judged[:0]
		if v.foretold() {
			x.observed = now.Sub(v.began).Seconds() // so is what was foretold
		}
	}
	waited := now.Sub(x.sent)
	x.replica.lately.add(now, waited)
	x.c.s.stats.sawFirstToken(x, waited)
	// One that grants any time may have waited in line for as long as it took, behind
	// those who do not.
	if a := x.model.Admission; a != nil && x.budget > 0 {
		a.Observe(now, now.Sub(x.sent), x.taken.Sub(x.sent))
	}
	for i := range x.judged {
		j := &x.judged[i]
		j.shadow.Settle(x.observed, x.expected, j.expected, j.same)
	}
	x.judged = x.judged[:0]
	x.c.s.rooms.call()
}

// prefillsOnly reports that the engine is done with the request as soon as it has
// computed the prompt: it generates nothing, or a single token.
func (x *exchange) prefillsOnly() bool {
	switch string(x.path) {
	case "/v1/embeddings", "/v2/embed", "/encode", "/pooling", "/classify", "/v1/classify",
		"/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank":
		return true
	}
	return !x.call.stream && x.route == routeGenerate && x.asked.Output == 1
}

// prefilledWhole notes that an answer has come that is no stream: the prompt is
// computed. How long that took can be told only from one that has nothing else.
func (x *exchange) prefilledWhole(now time.Time) {
	if x.prefill.Streams && x.prefillsOnly() {
		x.firstToken(now)
	}
	if x.response.status == http.StatusOK {
		x.prefill.Whole(now)
	}
	x.leaveBacklog(now)
}

// tellsCached reports that the end of the answer is expected to tell how much of
// the prompt the engine had cached.
func (x *exchange) tellsCached() bool {
	return x.replica.standing.TellsCached() && (x.asksUsage || x.call.usageEnd > 0 || x.route == routeAnswer)
}

// leaveBacklog takes the request out of what the replica has before it. It may be
// called at any time.
func (x *exchange) leaveBacklog(now time.Time) { x.prefill.Leave(now) }

// learn learns what the end of an answer has told: u, if known.
func (x *exchange) learn(f failure, u usage, known bool, now time.Time) {
	r, p := x.replica, &x.prefill
	if r == nil || p.Sent.IsZero() {
		return
	}
	if x.passed {
		r.stays.Add(now.Sub(p.Sent).Seconds())
	}
	if f == none && x.passed && x.status == http.StatusOK && !x.relay.tokenless() && x.computes() {
		n := policy.Total(&x.asked)
		if known && !u.partial {
			n = int(min(u.prompt, 1<<30) + min(u.completion, 1<<30))
		}
		p.Learn(&r.standing, n, now)
	}
	p.Told(&r.standing, u.prompt, u.cached, known && u.cachedTold && !u.partial)
}
