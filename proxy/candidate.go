package proxy

import (
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/inferrail/inferrail/policy"
)

// decision is the memory in which a request's replica is chosen. An exchange takes
// one from the pool for its first choice and gives it back with its other buffers:
// candidates are large, and connections that only wait have none.
type decision struct {
	candidates []policy.Candidate
	places     []*Replica
	costs      []float64
}

var decisions = sync.Pool{New: func() any { return new(decision) }}

// pick asks the policy for one of the replicas that have not failed the
// request: of those with a free place, or of those with room in their line.
// full reports that there are some, but none of that kind. Until the next call
// candidates, places and costs are those of x.choice.
func (x *exchange) pick(line bool) (r *Replica, full bool) {
	x.takeDecision()
	x.describe()
	now, learns, begun := time.Now(), x.model.learns(), false
	x.pickedAt = now
	for _, r := range x.model.Replicas {
		if len(x.tried) > 0 && slices.Contains(x.tried, r) {
			continue
		}
		if line && !x.mayLineUp(r) || !line && !r.gate.free() {
			full = true
			continue
		}
		x.places = append(x.places, r)
		n := len(x.candidates)
		x.candidates = slices.Grow(x.candidates, 1)[:n+1]
		c := &x.candidates[n]
		r.describe(c, now)
		if x.piecing != nil {
			x.piecing.rest.Apart(&r.standing, c)
		}
		begun = begun || c.Begun > 0
		if learns {
			c.Filter = r.standing.Filter.State()
		}
		if b := x.blocks; b != nil {
			var found cached
			found, c.Exact = b.at(r)
			c.Cached, c.CachedGPU, c.CachedCPU = policy.Count(found.any), policy.Count(found.gpu), policy.Count(found.cpu)
		}
		r.standing.Fit(c, &x.asked)
	}
	x.asked.Begun = begun
	x.costs = slices.Grow(x.costs, len(x.candidates))[:len(x.candidates)]
	x.choice = policy.Choose(x.policy(), &x.asked, x.candidates, x.costs)
	if x.choseIn = 0; x.asked.Rand%timedOneIn == 0 {
		x.choseIn = time.Since(now)
	}
	if i := x.choice.Index; i >= 0 {
		x.expected = policy.TTFT(&x.asked, &x.candidates[i])
		return x.places[i], full
	}
	return nil, full
}

// expectAnew says what is expected at now of the replica that was picked, after the
// request has waited for its turn there.
func (x *exchange) expectAnew(now time.Time) {
	if x.choice.Index < 0 {
		return
	}
	c := &x.candidates[x.choice.Index]
	was := *c
	r := x.places[x.choice.Index]
	r.describe(c, now)
	if x.piecing != nil {
		x.piecing.rest.Apart(&r.standing, c)
	}
	c.Cached, c.CachedGPU, c.CachedCPU, c.Exact, c.Filter = was.Cached, was.CachedGPU, was.CachedCPU, was.Exact, was.Filter
	r.standing.Fit(c, &x.asked)
	x.expected = policy.TTFT(&x.asked, c)
}

// timedOneIn is how many decisions there are for one that is timed: reading the
// clock can take as long as a decision.
const timedOneIn = 16

// state is what the model's decisions share.
func (x *exchange) state() *ModelState {
	if x.model.State == nil {
		return &x.c.s.state
	}
	return x.model.State
}

// describe fills what a policy may know of the request. It is another decision
// for each attempt.
func (x *exchange) describe() {
	if !x.turned {
		x.turned = true
		x.asked.Rand, x.asked.Turn = rand.Uint64(), x.state().turns.Add(1)
	}
	if x.described {
		return
	}
	x.described = true
	x.asked.Tokens = x.promptSize()
	x.asked.Output = x.answerSize()
	if x.asked.Own = 0; x.model.goesOn() {
		x.asked.Own = x.ownTokens()
	}
	x.asked.Prefix, x.asked.Session = x.prefixKey(), 0
	if x.model.bySession() {
		x.asked.Session = x.sessionKey()
	}
}

// promptSize is how many tokens the prompt has, as far as that can be told, but not
// more than an engine would take: of a longer one it computes nothing.
func (x *exchange) promptSize() int {
	if !x.computes() {
		return 0
	}
	n := int64(0)
	switch {
	case x.promptTokens > 0:
		n = int64(x.promptTokens)
	case x.blocks != nil:
		n = int64(x.blocks.tokens)
	case x.prompt != nil && len(x.prompt.Text) > 0:
		n = int64(len(x.prompt.Text)) / bytesPerToken
	case x.call.form:
		n = int64(len(x.body)) / bytesPerSound
	default:
		n = x.call.estimate(false).Input
	}
	if most := x.model.MaxModelLen; most > 0 {
		n = min(n, most*int64(max(x.sequences(), 1)))
	}
	return int(min(max(n, 1), math.MaxInt32))
}

// bytesPerSound is what a token of a sound file is taken to have: 30 seconds are
// 1,500 tokens to Whisper, and some 500 KB compressed or 1 MB not.
const bytesPerSound = 512

// computes reports that an engine has to compute something of the model for the
// request. Counting tokens is none of it.
func (x *exchange) computes() bool {
	switch string(x.path) {
	case "/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize", "/v1/messages/count_tokens",
		"/v1/chat/completions/render", "/v1/completions/render", "/v1/messages/render", "/v1/responses/render":
		return false
	}
	return true
}

// sequences is how many prompts the request has, as far as that is known.
func (x *exchange) sequences() int {
	if x.blocks != nil {
		return x.blocks.sequences()
	}
	return 1
}

// answerSize is how many tokens the answer may have, 0 when that is not limited.
func (x *exchange) answerSize() int {
	for _, which := range [...]int{limitCompletion, limitTokens, limitOutput} {
		if n := x.call.limits[which]; n > 0 {
			return int(min(n, policy.MostOutput))
		}
	}
	return 0
}

// describe fills c with what is known of the replica at now, whatever the request
// is, but for its Filter, which few ask for. It waits for nobody for long, and allocates nothing.
func (r *Replica) describe(c *policy.Candidate, now time.Time) {
	r.standing.Describe(c, r.InFlight(), r.Pending(), now)
	c.Slot, c.Key = r.Slot, r.key
	c.Share, c.Large = float32(r.warmth.share(now)), r.large.Load()
}

// takeDecision makes candidates, places and costs empty.
func (x *exchange) takeDecision() {
	if x.decision == nil {
		x.decision = decisions.Get().(*decision)
		x.candidates, x.places, x.costs = x.decision.candidates, x.decision.places, x.decision.costs
	}
	x.candidates, x.places, x.costs = x.candidates[:0], x.places[:0], x.costs[:0]
	x.choice = policy.Choice{Index: -1}
}

// putDecision gives their memory back.
func (x *exchange) putDecision() {
	if x.decision == nil {
		return
	}
	clear(x.places)
	*x.decision = decision{x.candidates, x.places[:0], x.costs}
	decisions.Put(x.decision)
	x.decision, x.candidates, x.places, x.costs = nil, nil, nil, nil
}

// picked is how many of the prompt's tokens the replica that was picked has cached.
func (x *exchange) picked() int {
	if i := x.choice.Index; i >= 0 && i < len(x.candidates) {
		return int(x.candidates[i].Cached)
	}
	return 0
}

// decided is called when the request has its place at the replica that was picked:
// policies beside the live one are asked for theirs.
func (x *exchange) decided() {
	x.judged = x.judged[:0]
	live := x.choice.Index
	for _, s := range x.model.Shadows {
		j := judgement{shadow: s, chosen: s.Judge(&x.asked, x.candidates, live, x.costs)}
		if j.chosen < 0 {
			continue
		}
		j.expected = policy.TTFT(&x.asked, &x.candidates[j.chosen])
		j.same = j.chosen == live
		x.judged = append(x.judged, j)
	}
}

// judgement is what a shadow has decided, and the time to first token that is
// expected where it would have sent the request.
type judgement struct {
	shadow   *policy.Shadow
	chosen   int
	expected float64
	same     bool
}
