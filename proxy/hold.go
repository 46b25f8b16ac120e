package proxy

import (
	"math"
	"time"

	"github.com/inferrail/inferrail/policy"
)

// holding is what an exchange remembers of being held back by the rule of Model.Holding.
// It is part of the exchange, used on its goroutine. The zero value was not held.
type holding struct {
	// since is when that began, zero when it did not, and until when it ends at the
	// latest. took is how long it lasted, once it is over.
	since, until time.Time
	took         time.Duration
	// before is how long it was held before the last piece of its prompt was sent.
	before time.Duration
	// key is its place in the order, and prefill what it counts for in room.work.
	key     float64
	prefill time.Duration
	// in: the request is in the room. turn: and nobody else is called until it has left.
	// over: it is not to be held any more.
	in, turn, over bool
}

// epoch is what the times in the keys of policy.Holding count from.
var epoch = time.Now()

// leastLook is the least time after which the first that is held looks again without
// news; roomTick is the most.
const leastLook = time.Millisecond

// mustHold reports that the request, for which a replica was just picked, is to be held
// back: others are, or every candidate has enough before it. One that was sent before is
// not, however that ended.
func (x *exchange) mustHold() bool {
	h := x.model.Holding
	if !h.Holds() || x.attempts > 1 || x.holding.over || !x.computes() {
		return false
	}
	if x.state().held.waiting.Load() > 0 {
		return true
	}
	for i := range x.candidates {
		if h.Free(&x.candidates[i]) {
			return false
		}
	}
	return true
}

// crowdedOut reports that those that are held will take all places there are, also in
// lines, so that there is none for the request.
func (x *exchange) crowdedOut() bool {
	places := int64(0)
	for _, r := range x.model.Replicas {
		g := &r.gate
		most := g.concurrency.Load()
		if most <= 0 {
			return false
		}
		places += max(most-g.inside.Load(), 0) + max(g.room.Load()-g.pending.Load(), 0)
	}
	return x.state().held.waiting.Load() >= places
}

// heldAhead is how many seconds those that are held keep each replica busy.
func (x *exchange) heldAhead() float64 {
	m := &x.state().held
	if m.waiting.Load() == 0 {
		return 0
	}
	return m.worked().Seconds() / float64(max(len(x.model.Replicas), 1))
}

// holdBack waits, among those that are held, until the request is to be chosen for
// again: it is the first, and a replica is free; or it was held for as long as it may be.
// Then it stays in the room until it has been promised to a replica, so that the next one
// knows of that. When it comes back from there, because there was no place for it, it
// waits for a while.
func (x *exchange) holdBack() failure {
	c, m := x.c, &x.state().held
	if x.room != m {
		x.leaveRoom(true)
		x.joinHeld(m)
	} else if x.holding.turn {
		x.holding.turn = false
		m.endTurn()
	}
	if x.holding.over {
		x.holding.over, x.holding.until, x.message = false, time.Now().Add(roomTick), ""
	}
	for {
		if !x.follow() {
			return x.noReplica()
		}
		now := time.Now()
		if !now.Before(x.until) {
			x.message = ""
			return queueTimeout
		}
		first, until := m.first(c), earlier(x.holding.until, x.until)
		if first {
			_, next := x.replicaFree(now)
			until = earlier(until, now.Add(next))
		}
		c.expect(until)
		// After expect no news is lost; what came before it is looked for.
		switch {
		case !now.Before(x.holding.until):
			x.holding.over = true
			return none
		case m.first(c) != first:
			continue
		case first && x.nowFree() && m.takeTurn(c):
			if x.nowFree() { // still, and nobody else is chosen for
				x.holding.turn, x.holding.over = true, true
				return none
			}
			m.endTurn()
			continue
		}
		if f := c.wait(none); f != none {
			x.message = ""
			return f
		}
	}
}

func (x *exchange) nowFree() bool {
	free, _ := x.replicaFree(time.Now())
	return free
}

// replicaFree reports that a replica is free for more, and otherwise when the next one
// should be. Where all have as many requests as they may, there may be room in a line.
func (x *exchange) replicaFree(now time.Time) (free bool, next time.Duration) {
	h := x.model.Holding
	next = roomTick
	full, roomy := true, false
	var c policy.Candidate
	for _, r := range x.model.Replicas {
		if !r.gate.free() {
			roomy = roomy || r.gate.roomy()
			continue
		}
		full = false
		if !h.Holds() {
			return true, 0 // not any more, or it waits for a place alone
		}
		r.standing.Describe(&c, r.InFlight(), r.Pending(), now)
		if h.Free(&c) {
			return true, 0
		}
		next = min(next, durationOf(h.Next(&c)))
	}
	return full && roomy, max(next, leastLook)
}

// joinHeld enters the request, which a replica was picked for, among those that are held.
// There is always room: they would be at engines otherwise.
func (x *exchange) joinHeld(m *room) {
	v, h, now := &x.holding, x.model.Holding, time.Now()
	if v.since.IsZero() {
		least, foretold := float64(policy.MostTTFT), x.heldAhead()
		sending := policy.Sending{Tokens: x.asked.Tokens, Sequences: x.sequences()}
		for i := range x.candidates {
			c := &x.candidates[i]
			least = min(least, c.Speed.Time(sending.Work(int(c.Cached))))
		}
		own := least
		if i := x.choice.Index; i >= 0 && i < len(x.candidates) {
			c := &x.candidates[i]
			own = c.Wait + c.Speed.Time(sending.Work(int(c.Cached)))
			foretold += c.Wait
		}
		v.since, v.prefill = now, durationOf(least)
		v.until = now.Add(durationOf(h.Longest(foretold, least)))
		if x.budget > 0 {
			v.until = earlier(v.until, x.sent.Add(x.budget-durationOf(own)))
		}
		v.key = h.Key(x.sent.Sub(epoch).Seconds(), least)
	}
	x.c.place.ticket.Tokens, x.c.place.ticket.Key = x.uncached(), v.key
	x.c.s.rooms.enter(m) // before it is in, so that no news is lost
	m.join(x.c, math.MaxInt)
	x.room, x.waitsAs, v.in = m, x.waitKey(), true
	x.c.s.waits.add(x.waitsAs, 1)
}
