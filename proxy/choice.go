package proxy

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/inferrail/inferrail/policy"
)

// choose picks a replica that has not failed the request and takes a place
// there; when all are full, it lines up at one that has room.
func (x *exchange) choose() failure {
	// The fleet may have changed since the request was read.
	if now := x.c.s.fleet.Load().Models[x.model.Name]; now != nil {
		x.model = now
	}
	for {
		r, full := x.pick(false)
		if r == nil && full {
			if r, _ = x.pick(true); r == nil {
				x.message = fmt.Sprintf("Every engine that serves the model `%s` has as many requests as it may; try again.", x.model.Name)
				return overloaded
			}
			switch f := x.lineUp(r); f {
			case none:
				return none
			case overloaded:
				continue // the line filled up meanwhile, or there is a better place
			default:
				return f
			}
		}
		if r == nil && len(x.tried) > 0 {
			x.tried = x.tried[:0] // what was left has gone from the fleet meanwhile
			continue
		}
		if r == nil {
			x.message = fmt.Sprintf("No engine that serves the model `%s` is available.", x.model.Name)
			return noReplica
		}
		x.evacuated = r.gate.evacuations.Load()
		if r.gate.enter(x.c) {
			x.replica = r
			return none
		}
		// Others were faster, so this ends.
	}
}

// pick asks the policy for one of the replicas that have not failed the
// request: of those with a free place, or of those with room in their line.
// full reports that there are some, but none of that kind.
func (x *exchange) pick(line bool) (r *Replica, full bool) {
	x.candidates, x.places = x.candidates[:0], x.places[:0]
	now := time.Now()
	for _, r := range x.model.Replicas {
		if slices.Contains(x.tried, r) {
			continue
		}
		if line && !r.gate.roomy() || !line && !r.gate.free() {
			full = true
			continue
		}
		x.places = append(x.places, r)
		x.candidates = append(x.candidates, policy.Candidate{
			Slot: r.Slot, InFlight: r.InFlight() + r.Pending(), Share: r.warmth.share(now)})
	}
	var p policy.Policy = policy.LeastRequest{}
	if x.model.Policy != nil {
		p = x.model.Policy
	}
	x.asked = policy.Request{Rand: rand.Uint64()}
	if i, _ := p.Pick(&x.asked, x.candidates); i >= 0 && i < len(x.places) {
		return x.places[i], full
	}
	return nil, full
}

// lineUp waits for the request's turn at r. It returns overloaded when it has
// to be chosen for anew.
func (x *exchange) lineUp(r *Replica) failure {
	c := x.c
	c.expect(x.until)
	x.evacuated = r.gate.evacuations.Load()
	if !r.gate.queue(c) {
		return overloaded
	}
	for !c.place.admitted.Load() {
		f := c.wait(queueTimeout)
		if f == none {
			// After expect no news is lost; what came before it is looked for.
			c.expect(x.until)
			if r.gate.evacuations.Load() != x.evacuated && x.otherThan(r) {
				f = overloaded
			}
		}
		if f != none && r.gate.unqueue(c) {
			return f
		}
	}
	x.replica = r
	return none
}

// elsewhere reports whether another replica could take the request now.
func (x *exchange) elsewhere() bool { return x.otherThan(x.replica) }

func (x *exchange) otherThan(here *Replica) bool {
	model := x.model
	if now := x.c.s.fleet.Load().Models[model.Name]; now != nil {
		model = now
	}
	return slices.ContainsFunc(model.Replicas, func(r *Replica) bool {
		return r != here && !slices.Contains(x.tried, r) && (r.gate.free() || r.gate.roomy())
	})
}

// sentAway reports that the replica has failed its health check while the
// request waits for its first byte, and that there is another one for it.
func (x *exchange) sentAway() bool {
	r := x.replica
	return r != nil && r.gate.evacuations.Load() != x.evacuated && x.elsewhere()
}
