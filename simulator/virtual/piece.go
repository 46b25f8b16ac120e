package virtual

import (
	"time"

	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/simulator/workload"
)

// course is how far a visit's prompt has been computed in pieces. It is a part of the
// visit. The zero value is before any piece.
type course struct {
	// of is the visit of whose prompt this one is a piece; nil for all others.
	of *visit
	// rest is what it has left, and where; cuts how many pieces there were.
	rest policy.Rest
	cuts int
	// predicted is what was to be in the cache when it was sent last, and found what the
	// first piece has found there.
	predicted, found int
}

// cut is how many tokens of the prompt are sent next, where the replica that was chosen is
// one that it is cut for; 0 for the request itself.
func (a *agent) cut(v *visit) int {
	if c := &a.candidates[v.choice]; v.of == nil && c.Exact && v.cuts < policy.MostPieces {
		return a.pieces.Cut(&v.asked, c, a.run.configs[v.choice].BlockSize)
	}
	return 0
}

// foresee notes what is expected of the request before anything of it is sent: cached
// tokens in the cache, and its first token when v.expected says.
func (v *visit) foresee(cached int) {
	if v.predicted = cached; v.cuts == 0 {
		v.record.Predicted, v.record.PredictedCached = seconds(v.expected), cached
	}
}

// stay says that what is behind the first n tokens of the prompt is left to compute at the
// replica that was chosen.
func (a *agent) stay(v *visit, n int) {
	c := &a.candidates[v.choice]
	left := c.Speed.Time(policy.Prefill(v.asked.Tokens-n, n))
	v.rest.Stay(&a.slots[v.choice].standing, left, a.pieces.Key(v.came.Sub(start).Seconds(), left))
}

// sendPiece sends the first n tokens of the prompt to the replica that was chosen, as a
// request for one token.
func (a *agent) sendPiece(v *visit, n int, now time.Time) {
	i := v.choice
	size := a.run.sizeOf[i]
	v.foresee(a.prompts[size].Cached(a.looks[size].Held(i)))
	v.cuts++
	a.stay(v, n)
	piece := &visit{
		request: &workload.Request{At: v.request.At, Output: 1, Parts: v.request.Parts}, record: &workload.Record{},
		agent: a, came: v.came, taken: v.taken, choice: i, expected: v.expected, course: course{of: v}, stored: v.stored,
	}
	piece.seq.Prompt, piece.seq.Output = v.seq.Prompt[:n], 1
	a.look(piece)
	a.send(piece, now)
}

// goOn is called when a piece has been computed: the request of which it is one is chosen
// for anew.
func (a *agent) goOn(piece *visit) {
	v, now := piece.of, a.run.clock()
	if v.cuts == 1 {
		v.found = piece.record.Cached
	}
	v.record.Computed += piece.record.Computed
	v.stored = max(v.stored, len(piece.seq.Prompt)) // for who has a store
	a.again(v, now)
}

// again chooses for a request that has begun.
func (a *agent) again(v *visit, now time.Time) {
	a.describe(v, now)
	if a.mustHold() {
		a.hold(v)
	} else {
		a.send(v, now)
	}
}

// park lets a request wait until those that have begun at its replica before it are done,
// or there is a better one.
func (a *agent) park(v *visit) { a.parked = append(a.parked, v) }

// unpark chooses again for those that are parked.
func (a *agent) unpark() {
	parked := a.parked
	a.parked = nil
	for _, v := range parked {
		a.again(v, a.run.clock())
	}
}
