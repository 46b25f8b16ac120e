package proxy

import (
	"sync"
	"sync/atomic"
	"time"
)

// gate counts the requests at one replica and bounds them. A request is let in
// (enter), or lines up for its turn (queue), and has left when leave was
// called. The zero value bounds nothing. Its methods may be called from any
// goroutine.
//
// The bounds hold under any race: a place that becomes free is handed to the
// first in line while the gate is locked, and is never free in between.
type gate struct {
	inside  atomic.Int64 // requests let in and not left
	pending atomic.Int64 // requests in line

	mu          sync.Mutex // guards the rest, and every change of the two above
	concurrency int        // most requests inside; 0 is no bound
	room        int        // most requests in line
	line        []*conn
	// waiting are the requests inside that have no first byte yet, a list
	// through conn.waitNext. evacuations counts how often they were sent away.
	waiting     *conn
	evacuations atomic.Uint64
}

// bound sets the bounds. Those inside or in line beyond them may stay.
func (g *gate) bound(concurrency, room int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.concurrency, g.room = concurrency, room
	g.admitLocked()
}

func (g *gate) freeLocked() bool {
	return g.concurrency <= 0 || int(g.inside.Load()) < g.concurrency
}

// enter lets a request in, unless the replica is full or others are in line.
func (g *gate) enter() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.freeLocked() || len(g.line) > 0 {
		return false
	}
	g.inside.Add(1)
	return true
}

// queue lines c up, unless the line is full; admitted then tells of its turn,
// with a wake-up. It may have come at once.
func (g *gate) queue(c *conn) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.line) >= g.room {
		return false
	}
	c.admitted.Store(false)
	g.line = append(g.line, c)
	g.pending.Add(1)
	g.admitLocked()
	return true
}

// admitLocked hands free places to the first in line.
func (g *gate) admitLocked() {
	for len(g.line) > 0 && g.freeLocked() {
		c := g.line[0]
		g.line[0] = nil
		g.line = g.line[1:]
		g.pending.Add(-1)
		g.inside.Add(1)
		c.admitted.Store(true)
		c.wake()
	}
	if len(g.line) == 0 {
		g.line = nil
	}
}

// unqueue takes c out of the line. It reports false when its turn has come
// meanwhile: then c is inside, and has to leave.
func (g *gate) unqueue(c *conn) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	for i, other := range g.line {
		if other == c {
			g.line = append(g.line[:i], g.line[i+1:]...)
			g.pending.Add(-1)
			return true
		}
	}
	return false
}

// leave ends a request's stay inside.
func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.inside.Add(-1) < 0 {
		panic("BUG: a request left a replica twice")
	}
	g.admitLocked()
}

// full reports that a request would neither be let in nor lined up. It is out
// of date at once: enter and queue decide.
func (g *gate) full() (inside, line bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	inside = !g.freeLocked() || len(g.line) > 0
	return inside, inside && len(g.line) >= g.room
}

// await adds c, which is inside, to those that have no first byte yet, and
// returns the number of evacuations so far.
func (g *gate) await(c *conn) uint64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	c.waitPrev, c.waitNext = nil, g.waiting
	if g.waiting != nil {
		g.waiting.waitPrev = c
	}
	g.waiting = c
	return g.evacuations.Load()
}

// answered takes c out of those that wait.
func (g *gate) answered(c *conn) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if c.waitPrev != nil {
		c.waitPrev.waitNext = c.waitNext
	} else {
		g.waiting = c.waitNext
	}
	if c.waitNext != nil {
		c.waitNext.waitPrev = c.waitPrev
	}
	c.waitPrev, c.waitNext = nil, nil
}

// evacuate wakes every request that waits for its first byte or its turn; each
// looks whether it has a better place to go to.
func (g *gate) evacuate() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.evacuations.Add(1)
	for c := g.waiting; c != nil; c = c.waitNext {
		c.wake()
	}
	for _, c := range g.line {
		c.wake()
	}
}

// warmth is how much of its share a replica that has come back takes. The zero
// value is a warm one.
type warmth struct {
	from, length atomic.Int64 // nanoseconds since 1970; nanoseconds
}

// leastShare is what a replica takes in the moment it comes back.
const leastShare = 0.1

// share grows from leastShare to 1 in a straight line.
func (w *warmth) share(now time.Time) float64 {
	length := w.length.Load()
	if length <= 0 {
		return 1
	}
	passed := now.UnixNano() - w.from.Load()
	if passed >= length {
		w.length.Store(0)
		return 1
	}
	return leastShare + (1-leastShare)*float64(max(passed, 0))/float64(length)
}
