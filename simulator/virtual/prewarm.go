package virtual

import (
	"time"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/simulator/workload"
)

// noteWarm notes what the request, which is about to be sent to the replica that was
// chosen, would have cost less had another one held as much of its prompt.
func (a *agent) noteWarm(v *visit, now time.Time) {
	if !a.prewarming.On() {
		return
	}
	p := &a.prompts[a.run.sizeOf[v.choice]]
	n := min(int(a.candidates[v.choice].Cached)/p.Block, len(p.Chain))
	if n > 0 {
		a.prefixes.Chosen(&v.asked, a.candidates, a.costs, v.choice, p.Chain[n-1].Lo, p.IDs, n*p.Block, now)
	}
}

// prewarm lets replicas that have nothing to prefill compute what is worth it.
func (a *agent) prewarm() {
	if !a.prewarming.On() || a.held.Len() > 0 || len(a.parked) > 0 || a.room.Len() > 0 {
		return
	}
	now := a.run.clock()
	for i := range a.slots {
		s, c := &a.slots[i], &a.candidates[i]
		*c = policy.Candidate{}
		s.standing.Describe(c, s.inFlight, 0, now)
		c.Slot, c.Key, c.Exact = i, a.run.keys[i], true
		if s.warming || !a.prewarming.Idle(c) {
			continue
		}
		for x, ok := a.prefixes.Due(c, now); ok && !a.sendAhead(x, i, now); x, ok = a.prefixes.Due(c, now) {
			// It has all of that one, and none of its losses count any more.
		}
	}
}

// sendAhead sends the next piece of a prefix to a replica, as a request for one token. It
// returns false if that lacks none of it.
func (a *agent) sendAhead(x policy.Prefix, i int, now time.Time) bool {
	v := &visit{
		request: &workload.Request{At: a.run.now, Output: 1}, record: &workload.Record{}, agent: a, came: now, taken: now, choice: i,
		ahead: &x,
	}
	v.seq.Prompt, v.seq.Output = x.IDs, 1
	a.look(v)
	size := a.run.sizeOf[i]
	c := &a.candidates[i]
	l, p := &a.looks[size], &a.prompts[size]
	if !l.Exact(i) {
		return true // until it is told of again
	}
	// All the blocks, also the last, of which an engine computes a token for each request.
	held := int(l.Held(i)[index.Tiers-1]) * p.Block
	if !a.prefixes.Holds(x.Key, c.Key, held) {
		return false
	}
	if n := a.prewarming.Cut(len(x.IDs), held, c, a.run.configs[i].BlockSize); n < len(x.IDs) {
		v.seq.Prompt = x.IDs[:n]
		a.look(v)
	}
	c.Cached = policy.Count(held)
	c.CachedGPU, c.CachedCPU = c.Cached, c.Cached
	a.slots[i].warming = true
	a.sendWhole(v, now)
	return true
}

// unwarmed notes that a replica has no room for a piece of a prefix, nor for more of it: it
// is not asked again before as much was lost anew.
func (a *agent) unwarmed(v *visit) {
	a.slots[v.engine].warming = false
	a.prefixes.Holds(v.ahead.Key, a.run.keys[v.engine], len(v.ahead.IDs))
}

// warmed notes that a replica has computed a piece of a prefix ahead.
func (a *agent) warmed(v *visit) {
	s, n := &a.slots[v.engine], len(v.seq.Prompt)
	s.warming = false
	a.prefixes.Holds(v.ahead.Key, a.run.keys[v.engine], n)
	if v.request.At >= a.run.warm {
		a.run.ahead[v.engine] += n - v.record.Cached
	}
}
