package proxy

import (
	"math"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/inferrail/inferrail/policy"
)

// prefill is the computing of a request's prompt at one replica, from sending it
// until its first token. It is part of an exchange and used by its goroutine alone,
// for one attempt after another; entry must not move while it is in a backlog. The
// zero value is in none.
type prefill struct {
	entry policy.Entry
	// promised is what it is expected to be to the replica to, which will have it
	// before it in a moment: it has been chosen, but there is no connection yet. nil
	// when that is over.
	to       *Replica
	promised policy.Work
	// at is the replica in whose backlog entry is, nil for none; sent is since when.
	at   *Replica
	sent time.Time
	// cached is how many of the prompt's tokens are taken to be in the engine's
	// cache, and work what there is to compute besides.
	cached int
	work   policy.Work
	// streams: a stream is asked for, whose first token can be seen, or an answer that is
	// whole when the prompt is computed.
	streams bool
	// sequences is how many prompts there are. exact: cached is known from the
	// engine's own events, or it must be nothing.
	sequences int
	exact     bool
	// again: the request was sent twice, on another connection the second time.
	again bool
	// first is how long the first token has taken since sent, 0 when it is not
	// there, or not known to be.
	first time.Duration
	// seen is what the first token has told of the replica's speed, and kept until
	// the end of the answer if waits is set: the engine will tell what it had cached.
	seen  policy.Observation
	waits bool
}

// promises are what requests will be to a replica that are going to be sent there,
// so that those which are chosen for meanwhile know of them. Any goroutine may call
// its methods. The zero value is none.
type promises struct{ prompts, tokens, attention atomic.Int64 }

// add adds w, times 1 or -1.
func (s *promises) add(w policy.Work, sign int64) {
	s.tokens.Add(sign * int64(w.Tokens))
	s.attention.Add(sign * int64(w.Attention))
	s.prompts.Add(sign * int64(w.Prompts))
}

func (s *promises) get() policy.Work {
	if s.prompts.Load() == 0 {
		return policy.Work{}
	}
	return policy.Work{Prompts: float64(s.prompts.Load()), Tokens: float64(max(s.tokens.Load(), 0)), Attention: float64(max(s.attention.Load(), 0))}
}

// promise begins a prefill, at the replica where the request has its place.
func (x *exchange) promise() {
	p := &x.prefill
	*p = prefill{cached: x.picked(), sequences: x.sequences()}
	if w := x.workWith(p.cached); w.Prompts > 0 {
		p.to, p.promised = x.replica, w
		p.to.promises.add(w, 1)
	}
}

// redeem ends what promise has begun.
func (p *prefill) redeem() {
	if p.to != nil {
		p.to.promises.add(p.promised, -1)
		p.to = nil
	}
}

// expectPrefill enters the request, which is about to be sent to the replica, in what the
// replica has before it.
func (x *exchange) expectPrefill() {
	p, now := &x.prefill, time.Now()
	if p.at != nil {
		p.at.backlog.Leave(&p.entry, now)
		p.again = true
	}
	defer p.redeem()
	p.at, p.sent = x.replica, now
	p.exact = x.call.uncached(x.path)
	if b := x.blocks; b != nil && !p.exact {
		_, p.exact = b.at(x.replica)
	}
	p.work = x.workWith(p.cached)
	if p.work == (policy.Work{}) {
		p.at = nil // nothing is to be computed
		return
	}
	if r := x.replica; r.disturbed.Load() && !r.load.Load().Fresh(now) {
		r.disturbed.Store(false)
		r.backlog.Disturbed(false) // nobody tells that any more
	}
	p.streams = x.call.stream || string(x.path) == "/generate_stream" || x.prefillsOnly()
	speed := x.replica.calibration.Speed()
	x.replica.backlog.Enter(&p.entry, p.work, p.streams, now, speed.Time(p.work))
	x.replica.calibration.Sent()
	x.replica.prompts.add(p.work.Tokens)
}

// workWith is the work that the request is to an engine that has so many of its
// prompt's tokens cached. Several sequences are taken to be alike.
func (x *exchange) workWith(cached int) policy.Work {
	tokens := x.asked.Tokens
	if tokens == 0 {
		return policy.Work{}
	}
	cached = min(cached, tokens)
	n := max(x.prefill.sequences, 1)
	w := policy.Prefill((tokens-cached)/n, cached/n)
	return policy.Work{Prompts: float64(n), Tokens: float64(tokens - cached), Attention: w.Attention * float64(n)}
}

// firstToken notes that the first token was there at now. It tells those who learn
// from it.
//
// What the replica had cached is a prediction. Where it is known from the engine's
// own events, what is learned of the replica's speed is learned now. So it is where
// the end of the answer will tell no better. Otherwise it is learned then, by what
// the engine says that it had: a prediction that is wrong would make the replica
// look fast, or slow.
func (x *exchange) firstToken(now time.Time) {
	p := &x.prefill
	if p.at == nil || p.first > 0 || x.response.status != http.StatusOK {
		return
	}
	p.first = max(now.Sub(p.sent), 1)
	r := p.at
	x.observed = p.first.Seconds()
	o, ok := r.backlog.First(&p.entry, r.decoding(now), now)
	switch {
	case !ok || p.again:
	case o.Own && x.tellsCached() && !p.exact:
		p.seen, p.waits = o, true
	default:
		r.calibration.Observe(o)
	}
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
	p := &x.prefill
	if p.streams && x.prefillsOnly() {
		x.firstToken(now)
	}
	if p.at != nil && !p.streams && x.response.status == http.StatusOK {
		// Nothing is concluded from this prompt, and so not from what is generated now.
		if o, ok := p.at.backlog.First(&p.entry, 0, now); ok && !o.Own {
			p.at.calibration.Observe(o)
		}
	}
	x.leaveBacklog(now)
}

// tellsCached reports that the end of the answer is expected to tell how much of
// the prompt the engine had cached.
func (x *exchange) tellsCached() bool {
	return x.replica.tellsCached.Load() && (x.asksUsage || x.call.usageEnd > 0 || x.route == routeAnswer)
}

// leaveBacklog takes the request out of what the replica has before it. It may be
// called at any time.
func (x *exchange) leaveBacklog(now time.Time) {
	x.prefill.redeem()
	if p := &x.prefill; p.at != nil {
		p.at.backlog.Leave(&p.entry, now)
		p.at = nil
	}
}

// learn learns what the end of an answer has told: u, if known.
func (x *exchange) learn(f failure, u usage, known bool, now time.Time) {
	r, p := x.replica, &x.prefill
	if r == nil || p.sent.IsZero() {
		return
	}
	if x.passed {
		r.stays.add(now.Sub(p.sent).Seconds())
	}
	if f == none && x.passed && x.status == http.StatusOK && x.computes() && !p.again {
		n := policy.Total(&x.asked)
		if known && !u.partial {
			n = int(min(u.prompt, 1<<30) + min(u.completion, 1<<30))
		}
		r.filter.Observe(n, now.Sub(p.sent).Seconds())
	}
	if known && u.cachedTold && !u.partial && !r.tellsCached.Load() {
		r.tellsCached.Store(true)
	}
	if !p.waits {
		return
	}
	p.waits = false
	if known && u.cachedTold && !u.partial && u.prompt > 0 && p.sequences == 1 {
		// A prompt's tokens may be an estimate, and are one for the next prompt, too:
		// what was cached is measured in them.
		cached := float64(min(u.cached, u.prompt)) / float64(u.prompt) * float64(x.asked.Tokens)
		p.seen.Work = p.seen.Work.Minus(p.work).Plus(x.workWith(int(math.Round(cached))))
	}
	r.calibration.Observe(p.seen)
}

// meanOver is over how many numbers a recentMean is taken.
const meanOver = 16

// recentMean is the mean of the last of some numbers. Any goroutine may use it. The
// zero value has seen none.
type recentMean struct{ bits atomic.Uint64 }

// add takes another number. Of several at once one may be lost.
func (m *recentMean) add(x float64) {
	mean := math.Float64frombits(m.bits.Load())
	if mean == 0 {
		mean = x
	}
	m.bits.Store(math.Float64bits(mean + (x-mean)/meanOver))
}

func (m *recentMean) get() float64 { return math.Float64frombits(m.bits.Load()) }
