package virtual

import (
	"slices"
	"time"

	"github.com/inferrail/inferrail/policy"
)

// mustHold reports that the request that the candidates were described for is to be held
// back: others are, or every candidate has enough before it.
func (a *agent) mustHold() bool {
	if !a.holding.Holds() {
		return false
	}
	return a.held.Len() > 0 || !slices.ContainsFunc(a.candidates, func(c policy.Candidate) bool { return a.holding.Free(&c) })
}

// heldAhead is how many seconds those that are held keep each replica busy.
func (a *agent) heldAhead() float64 { return a.heldWork / float64(len(a.slots)) }

// hold holds back a request, for which a replica was chosen, until one is free.
func (a *agent) hold(v *visit) {
	least := float64(policy.MostTTFT)
	for i := range a.candidates {
		least = min(least, a.prefill(v, i))
	}
	// It is looked up again when it is sent.
	v.prompts = slices.Clone(a.prompts)
	for i := range v.prompts {
		p := &v.prompts[i]
		p.Chain = slices.Clone(p.Chain)
	}
	foretold := a.candidates[v.choice].Wait + a.heldAhead()
	v.prefill = least
	v.holds++
	v.heldAs = policy.Ticket[*visit]{Value: v, Tokens: len(v.seq.Prompt), Key: a.holding.Key(v.came.Sub(start).Seconds(), least)}
	a.held.Push(&v.heldAs)
	a.heldWork += least
	a.run.after(seconds(a.holding.Longest(foretold, least)), note{kind: noteHeld, visit: v, engine: v.holds})
	a.release()
}

// prefill is how long the prompt of v takes at the replica that candidate i was
// described of.
func (a *agent) prefill(v *visit, i int) float64 {
	c := &a.candidates[i]
	return c.Speed.Time(policy.Prefill(v.asked.Tokens-int(c.Cached), int(c.Cached)))
}

// release sends those that are held, in their order, while a replica is free, and comes
// again when the next one should be.
func (a *agent) release() {
	for a.held.Len() > 0 {
		free, next := a.nearlyFree(a.run.clock())
		if free {
			a.let(a.held.Peek().Value)
			continue
		}
		at := a.run.now + max(next, leastRound)
		if a.releases <= a.run.now || at < a.releases {
			a.releases = at
			a.run.after(at-a.run.now, note{kind: noteRelease, agent: a})
		}
		return
	}
}

// let sends one that is held.
func (a *agent) let(v *visit) {
	now := a.run.clock()
	a.held.Take(&v.heldAs)
	a.heldWork -= v.prefill
	if a.held.Len() == 0 {
		a.heldWork = 0 // not what rounding leaves
	}
	a.describe(v, now)
	v.prompts = nil
	v.expected += now.Sub(v.came).Seconds()
	a.send(v, now)
}

// leastRound is the least time between two looks that no token has called for, and
// mostRound the most.
const (
	leastRound = time.Millisecond
	mostRound  = 50 * time.Millisecond
)

// nearlyFree reports that a replica takes more, and how long it takes until the next one
// should.
func (a *agent) nearlyFree(now time.Time) (free bool, next time.Duration) {
	next = mostRound
	for i := range a.slots {
		s := &a.slots[i]
		var c policy.Candidate
		s.standing.Describe(&c, s.inFlight, 0, now)
		if a.holding.Free(&c) {
			return true, 0
		}
		next = min(next, seconds(a.holding.Next(&c)))
	}
	return false, next
}
