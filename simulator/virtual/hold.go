package virtual

import (
	"slices"
	"time"

	"github.com/inferrail/inferrail/policy"
)

// hold takes a request that is sent when a replica is nearly free for it, which may be
// at once.
func (a *agent) hold(v *visit) {
	a.fill(v, a.run.clock())
	least := float64(policy.MostTTFT)
	for i := range a.candidates {
		least = min(least, a.prefill(v, i))
	}
	// They are looked up again each time that a replica is chosen.
	v.prompts = slices.Clone(a.prompts)
	for i := range v.prompts {
		p := &v.prompts[i]
		p.Chain = slices.Clone(p.Chain)
	}
	a.holding.Hold(v, a.run.now.Seconds(), least)
	a.release()
}

// prefill is how long the prompt of v takes at the replica that candidate i was
// described of.
func (a *agent) prefill(v *visit, i int) float64 {
	c := &a.candidates[i]
	return c.Speed.Time(policy.Prefill(v.asked.Tokens-int(c.Cached), int(c.Cached)))
}

// release sends those that are held and whose replicas are nearly free, and comes again
// when the next replica should be.
func (a *agent) release() {
	h := &a.holding
	if h.Len() == 0 {
		return
	}
	now := a.run.clock()
	if free, _ := a.nearlyFree(now); free {
		h.Begin(len(a.slots))
		for v, ok := h.Next(); ok; v, ok = h.Next() {
			a.describe(v, now)
			if h.Place(v.choice, a.candidates[v.choice].Wait, a.prefill(v, v.choice)) {
				v.prompts, v.taken = nil, now
				v.expected += now.Sub(v.came).Seconds()
				a.send(v, now)
			}
		}
		if h.Len() == 0 {
			return
		}
	}
	_, next := a.nearlyFree(now)
	at := a.run.now + max(next, leastRound)
	if a.releases <= a.run.now || at < a.releases {
		a.releases = at
		a.run.after(at-a.run.now, note{kind: noteRelease, agent: a})
	}
}

// leastRound is the least time between two rounds that no token has called for, and
// mostRound the most.
const (
	leastRound = time.Millisecond
	mostRound  = 50 * time.Millisecond
)

// nearlyFree reports that a replica has less than the lead before it, and how long it
// takes until the next one should.
func (a *agent) nearlyFree(now time.Time) (free bool, next time.Duration) {
	next = mostRound
	for i := range a.slots {
		s := &a.slots[i]
		var c policy.Candidate
		s.standing.Describe(&c, s.inFlight, 0, now)
		if c.Wait < a.holding.Lead {
			free = true
		} else {
			next = min(next, seconds(c.Wait-a.holding.Lead))
		}
	}
	return free, next
}
