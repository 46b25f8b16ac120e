package proxy

import (
	"fmt"
	"slices"
	"time"
)

// choose picks a replica that has not failed the request and takes a place
// there; when all are full, it lines up at one that has room.
func (x *exchange) choose() failure {
	moved := false // it gave up its place in a line for a better one
	for {
		x.follow()
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
				moved = true
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
			x.decided()
			if moved && r.gate.free() {
				// Several places may have become free for one call.
				x.c.s.lines.callFirst()
			}
			return none
		}
		// Others were faster, so this ends.
	}
}

// lineUp waits for the request's turn at r. It returns overloaded when it has
// to be chosen for anew.
func (x *exchange) lineUp(r *Replica) failure {
	c, lines := x.c, &x.c.s.lines
	lines.add(&r.gate)
	defer lines.done(&r.gate)
	c.expect(x.until)
	x.evacuated = r.gate.evacuations.Load()
	if !r.gate.queue(c) {
		return overloaded
	}
	for !c.place.admitted.Load() {
		f := overloaded
		if !x.betterThan(r) {
			f = c.wait(queueTimeout)
			// After expect no news is lost; what came before it is looked for.
			c.expect(x.until)
		}
		if f != none && r.gate.unqueue(c) {
			return f
		}
	}
	x.replica = r
	x.decided()
	if !time.Now().Before(x.until) {
		x.leave()
		return queueTimeout
	}
	return none
}

// betterThan reports that the request should not stay in line at r: another
// replica has a free place, or r is given up and there is another one.
func (x *exchange) betterThan(r *Replica) bool {
	x.follow()
	if x.otherThan(r, (*gate).free) {
		return true
	}
	left := r.gate.evacuations.Load() != x.evacuated || !slices.Contains(x.model.Replicas, r)
	return left && x.otherThan(r, (*gate).roomy)
}

// follow takes the model as it is in the fleet now.
func (x *exchange) follow() {
	if now := x.c.s.fleet.Load().Models[x.model.Name]; now != nil {
		x.model = now
	}
}

// elsewhere reports whether another replica could take the request now.
func (x *exchange) elsewhere() bool {
	x.follow()
	return x.otherThan(x.replica, func(g *gate) bool { return g.free() || g.roomy() })
}

// otherThan reports whether a replica that has not failed the request, other
// than here, has a gate that is fit.
func (x *exchange) otherThan(here *Replica, fit func(*gate) bool) bool {
	return slices.ContainsFunc(x.model.Replicas, func(r *Replica) bool {
		return r != here && !slices.Contains(x.tried, r) && fit(&r.gate)
	})
}

// sentAway reports that the replica has failed its health check while the
// request waits for its first byte, and that it may be sent to another one: to
// one that has failed the request before, too, which is better than a dead one.
func (x *exchange) sentAway() bool {
	r := x.replica
	if r == nil || r.gate.evacuations.Load() == x.evacuated || x.attempts >= x.limits.MaxAttempts {
		return false
	}
	x.follow()
	return slices.ContainsFunc(x.model.Replicas, func(other *Replica) bool {
		return other != r && (other.gate.free() || other.gate.roomy())
	})
}
