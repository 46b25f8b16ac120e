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
	for {
		// The fleet may have changed since the request was read, or while it
		// was in line.
		x.model = x.known()
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
	// After expect no news is lost; what came before it is looked for.
	for !c.place.admitted.Load() {
		f := overloaded
		if !x.betterThan(r) {
			if f = c.wait(queueTimeout); f == none {
				c.expect(x.until)
				continue
			}
		}
		if r.gate.unqueue(c) {
			return f
		}
	}
	x.replica = r
	return none
}

// betterThan reports that the request should leave the line at r: another
// replica has a free place, or has room while r takes no more requests or has
// failed its health check.
func (x *exchange) betterThan(r *Replica) bool {
	gone := r.gate.evacuations.Load() != x.evacuated || !slices.Contains(x.known().Replicas, r)
	return x.other(r, true, func(g *gate) bool { return g.free() || gone && g.roomy() })
}

// elsewhere reports whether another replica that has not failed the request
// could take it now.
func (x *exchange) elsewhere() bool { return x.other(x.replica, true, (*gate).open) }

// other reports whether the gate of a replica that is not here is as wanted.
func (x *exchange) other(here *Replica, untried bool, wanted func(*gate) bool) bool {
	return slices.ContainsFunc(x.known().Replicas, func(r *Replica) bool {
		return r != here && !(untried && slices.Contains(x.tried, r)) && wanted(&r.gate)
	})
}

// known is the request's model as the fleet has it now.
func (x *exchange) known() *Model {
	if now := x.c.s.fleet.Load().Models[x.model.Name]; now != nil {
		return now
	}
	return x.model
}

// sentAway reports that the replica has failed its health check while the
// request waits for its first byte, and that there is another one for it: one
// that has failed the request before is still better.
func (x *exchange) sentAway() bool {
	r := x.replica
	return r != nil && r.gate.evacuations.Load() != x.evacuated && x.other(r, false, (*gate).open)
}
