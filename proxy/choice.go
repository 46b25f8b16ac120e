package proxy

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"
)

// choose picks a replica that has not failed the request and takes a place
// there; when all are full, it lines up at one that has room. A request that is
// refused by admission, or finds all lines full, waits in the model's room if there
// is one.
func (x *exchange) choose() failure {
	defer x.leaveRoom(false)
	f := overloaded
	x.moved = false
	for {
		if !x.follow() && x.room != nil {
			return x.noReplica()
		}
		if x.mayTry() {
			again := false
			switch f, again = x.tryPlace(); {
			case again:
				continue
			case f == none:
				x.message = ""
				return none
			case f == noReplica && (x.room == nil || x.holding.over), f != overloaded && f != overBudget && f != noReplica:
				return f
			}
		}
		if f := x.stay(f); f != none {
			return f
		}
	}
}

func (x *exchange) noReplica() failure {
	x.message = fmt.Sprintf("No engine that serves the model `%s` is available.", x.model.Name)
	return noReplica
}

// mayTry reports that nobody who waits in the model's room comes first: who is in
// there has been called, and a request that was taken once has had its turn.
func (x *exchange) mayTry() bool {
	return x.room != nil || !x.taken.IsZero() || x.state().room.passes(x.class.Rank, x.budget)
}

// tryPlace takes a place at a replica, or in its line and waits there. again
// reports that others were faster, or that there is a better place by now.
func (x *exchange) tryPlace() (f failure, again bool) {
	if x.room != nil {
		x.lookAgain() // what replicas hold may have changed
	}
	x.retryAfter = 0
	r, full := x.pick(false)
	hold, line := r != nil && x.mustHold(), r == nil && full
	if hold && x.piecing == nil && x.crowdedOut() {
		return x.allFull(), false
	}
	if line {
		if r, _ = x.pick(true); r == nil {
			x.displaces = true
			r, _ = x.pick(true)
			x.displaces = false
		}
		switch {
		case r != nil:
		case len(x.tried) > 0 && x.attempts <= 1:
			x.tried = x.tried[:0] // who has failed to compute a piece is better than to wait
			return none, true
		case (x.holding.over || x.piecing != nil) && x.attempts <= 1:
			f := x.holdBack() // it was taken, or has begun, and waits on for a place
			return f, f == none
		default:
			return x.allFull(), false
		}
	}
	if r == nil && len(x.tried) > 0 {
		x.tried = x.tried[:0] // what was left has gone from the fleet meanwhile
		return none, true
	}
	if r == nil {
		return x.noReplica(), false
	}
	if f := x.grant(line, hold); f != none {
		return f, false
	}
	if hold {
		f := x.holdBack()
		return f, f == none
	}
	if line {
		f := x.lineUp(r)
		if f == overloaded {
			// The line filled up meanwhile, it had to give way, or there is a
			// better place.
			x.moved = true
			return none, true
		}
		return f, false
	}
	x.evacuated = r.gate.evacuations.Load()
	if !r.gate.enter(x.c) {
		return none, true // others were faster, so this ends
	}
	x.replica = r
	x.promise()
	x.leaveRoom(true)
	if x.moved && r.gate.free() {
		// Several places may have become free for one call.
		x.c.s.lines.callFirst()
	}
	return none, false
}

// allFull says that there is no place for the request, and when there should be.
func (x *exchange) allFull() failure {
	x.retryAfter = x.model.placeIn()
	x.message = fmt.Sprintf("Every engine that serves the model `%s` has as many requests as it may; try again in %s.",
		x.model.Name, appendReset(nil, x.retryAfter))
	return overloaded
}

// placeIn is when a replica of the model is expected to be done with one of its
// requests, if they take as long as the last ones did: a second at least, and up to
// as long again, so that not all who are told come back at one moment.
func (m *Model) placeIn() time.Duration {
	d := max(time.Second, m.placesIn(1))
	return d + rand.N(d)
}

// placesIn is when the model's replicas are expected to be done with n of their requests;
// 0 while nothing is known.
func (m *Model) placesIn(n int64) time.Duration {
	ends := 0.0 // requests a second
	for _, r := range m.Replicas {
		if stay := r.stays.Get(); stay > 0 {
			ends += float64(r.InFlight()) / stay
		}
	}
	if !(ends > 0) {
		return 0
	}
	return durationOf(float64(n) / ends)
}

// full reports that none of the model's replicas has a place.
func (m *Model) full() bool {
	for _, r := range m.Replicas {
		if r.gate.free() {
			return false
		}
	}
	return true
}

// mayLineUp reports that there is room in the replica's line, or, if the request
// looks for it, that one in it has to make room.
func (x *exchange) mayLineUp(r *Replica) bool {
	return r.gate.roomy() || x.displaces && r.gate.yields(x.c)
}

// grant asks whether the request is taken, to go to the replica that was picked: to
// its line, after those that are held back, or at once. It is asked once.
func (x *exchange) grant(line, hold bool) failure {
	if !x.taken.IsZero() {
		return none
	}
	now := x.pickedAt
	if a := x.model.Admission; a != nil && x.computes() {
		wait := x.candidates[x.choice.Index].Wait
		sooner := x.giveWay(now)
		wait, x.expected = wait-sooner, x.expected-sooner
		if hold {
			ahead := x.heldAhead()
			wait, x.expected = wait+ahead, x.expected+ahead
		}
		v := a.Admit(now, durationOf(x.expected), waitOf(wait, line), x.budget)
		x.verdict = v.Reason
		if v.Refuse {
			x.retryAfter = v.RetryAfter
			x.message = fmt.Sprintf("Requests to the model `%s` take longer to their first token than the %v that this one grants; try again in %s.",
				x.model.Name, x.budget, appendReset(nil, v.RetryAfter))
			return overBudget
		}
	}
	x.taken, x.retryAfter = now, 0
	return none
}

// waitOf is what admission is told of a wait of so many seconds; line: there is one
// whatever they are, as it does not begin at once.
func waitOf(seconds float64, line bool) time.Duration {
	wait := durationOf(seconds)
	if line {
		return max(wait, 1)
	}
	return wait
}

// stay waits in the model's room until the request may try again; f is why it could
// not be taken. It returns f when there is no room to wait, or the time for it is
// over.
func (x *exchange) stay(f failure) failure {
	c, joined := x.c, false
	if x.room != nil {
		x.room.pass(c, f == overBudget)
	} else {
		if !x.joinRoom() {
			x.crowded("As many requests for the model `%s` wait as may; try again in %s.")
			return f
		}
		joined = true
	}
	for {
		now, m := time.Now(), x.room
		if !now.Before(x.until) {
			x.message = ""
			return queueTimeout
		}
		if !now.Before(x.leaveBy) {
			x.crowded("Requests for the model `%s` that go first have not left this one a place; try again in %s.")
			return f
		}
		first, until := m.first(c), x.leaveBy
		if first {
			until = earlier(until, now.Add(roomTick))
		}
		c.expect(until)
		// After expect no news is lost; what came before it is looked for.
		switch {
		case c.place.displaced.Load():
			x.crowded("As many requests for the model `%s` wait as may, and others go first; try again in %s.")
			return f
		case m.called(c), joined && first:
			return none
		}
		if f := c.wait(none); f != none {
			x.message = ""
			return f
		}
		if now := time.Now(); first && !now.Before(until) && now.Before(x.leaveBy) {
			m.renew()
			return none
		}
	}
}

// crowded tells a request that was not tried, because others go first, that, and
// when those that wait now will have been computed and, where they wait for places, will
// have them. One that was tried has been told already.
func (x *exchange) crowded(format string) {
	if x.message != "" {
		return
	}
	rate := 0.0 // tokens a second
	for _, r := range x.model.Replicas {
		if s := r.standing.Calibration.Speed(); s.A > 0 {
			rate += 1 / s.A
		}
	}
	d := time.Second
	if rate > 0 {
		d = max(d, durationOf(float64(x.state().room.tokens())/rate))
	}
	if x.model.full() {
		d = max(d, x.model.placesIn(x.state().room.waiting.Load()))
	}
	// Not all who are told so come back at one moment.
	x.retryAfter = d + rand.N(d)
	x.message = fmt.Sprintf(format, x.model.Name, appendReset(nil, x.retryAfter))
}

// joinRoom enters the model's room, if there is place.
func (x *exchange) joinRoom() bool {
	m, w := &x.state().room, &x.model.Waiting
	if w.Max <= 0 {
		return false
	}
	x.describe()
	x.c.place.ticket.Tokens, x.c.place.ticket.Key = x.uncached(), 0
	x.c.s.rooms.enter(m) // before it is in, so that no news is lost
	if !m.join(x.c, w.Max) {
		x.c.s.rooms.leave(m)
		return false
	}
	timeout := w.Timeout
	if timeout <= 0 {
		timeout = defaultWaiting
	}
	x.room, x.leaveBy = m, earlier(x.until, time.Now().Add(timeout))
	x.waitsAs = x.waitKey()
	x.c.s.waits.add(x.waitsAs, 1)
	return true
}

// uncached is how many tokens of the prompt have to be computed where least have.
func (x *exchange) uncached() int {
	most := 0 // of the prompt that a replica has cached
	if x.blocks != nil {
		for _, r := range x.model.Replicas {
			c, _ := x.blocks.at(r)
			most = max(most, c.any)
		}
	}
	return x.asked.Tokens - most
}

// defaultWaiting is Waiting.Timeout where there is none.
const defaultWaiting = 10 * time.Second

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// leaveRoom leaves the model's room, if the request is in there; served: it has
// been taken.
func (x *exchange) leaveRoom(served bool) {
	if m := x.room; m != nil {
		m.leave(x.c, served)
		x.outOfRoom()
	}
}

func (x *exchange) outOfRoom() {
	m := x.room
	x.room = nil
	if x.holding.turn {
		x.holding.turn = false
		m.endTurn()
	}
	if v := &x.holding; v.in {
		v.in, v.took = false, v.before+time.Since(v.since)
	}
	x.c.s.rooms.leave(m)
	x.c.s.waits.add(x.waitsAs, -1)
}

func (x *exchange) waitKey() waitKey { return waitKey{x.model.Name, x.class.Name} }

// tellBudget tells the client when its first token was expected when the request
// was sent to the engine, or refused; and of its budget, in which it has waited
// before.
func (x *exchange) tellBudget() {
	if !x.computes() || x.choice.Index < 0 {
		return
	}
	expected := durationOf(x.expected)
	x.extra = append(x.extra, "x-inferrail-predicted-ms: "...)
	x.extra = append(strconv.AppendInt(x.extra, expected.Round(time.Millisecond).Milliseconds(), 10), crlf...)
	if x.budget <= 0 {
		return
	}
	waited := time.Since(x.sent)
	if v := x.piecing; v.foretold() {
		waited = v.began.Sub(x.sent)
	} else if at := x.prefill.Sent; !at.IsZero() {
		waited = at.Sub(x.sent)
	}
	x.extra = append(x.extra, "x-inferrail-budget-ms: "...)
	x.extra = append(strconv.AppendInt(x.extra, x.budget.Milliseconds(), 10), crlf...)
	x.extra = append(x.extra, "x-inferrail-over-budget: "...)
	x.extra = append(strconv.AppendBool(x.extra, waited+expected > x.budget), crlf...)
}

// durationOf is a number of seconds, as far as it is one.
func durationOf(seconds float64) time.Duration {
	const most = float64(24 * time.Hour)
	if d := seconds * float64(time.Second); d > 0 {
		return time.Duration(min(d, most))
	}
	return 0
}

// lineUp goes from the room, if the request is in there, to the line of r and waits
// for its turn. It returns overloaded when it has to be chosen for anew.
func (x *exchange) lineUp(r *Replica) failure {
	c, lines := x.c, &x.c.s.lines
	m := x.room
	if m != nil {
		m.move(c)
	}
	lines.add(&r.gate)
	defer lines.done(&r.gate)
	k := x.waitKey()
	c.s.waits.add(k, 1)
	defer c.s.waits.add(k, -1)
	c.place.ticket.Tokens, c.place.ticket.Key = x.asked.Tokens-x.picked(), 0
	c.expect(x.until)
	x.evacuated = r.gate.evacuations.Load()
	lined := r.gate.queue(c)
	if m != nil {
		m.moved()
		x.outOfRoom()
	}
	if !lined {
		return overloaded
	}
	for !c.place.admitted.Load() {
		f := overloaded
		if !c.place.displaced.Load() && !x.betterThan(r) {
			f = c.wait(queueTimeout)
			// After expect no news is lost; what came before it is looked for.
			c.expect(x.until)
		}
		if f != none && r.gate.unqueue(c) {
			return f
		}
	}
	x.replica = r
	now := time.Now()
	if !now.Before(x.until) {
		x.leave()
		return queueTimeout
	}
	x.expectAnew(now)
	x.promise()
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

// follow takes the model as it is in the fleet now. It reports false when it is
// not served any more.
func (x *exchange) follow() bool {
	now := x.c.s.fleet.Load().Models[x.model.Name]
	if now != nil {
		x.model = now
	}
	return now != nil
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
