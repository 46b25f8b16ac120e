package proxy

import (
	"sync"
	"sync/atomic"
	"time"
)

// gate counts the requests at one replica and bounds them. A request is let in
// (enter), or lines up for its turn (queue), and calls leave once after it was
// let in. The zero value bounds nothing. Its methods may be called from any
// goroutine.
//
// The bounds hold under any race: a place that becomes free is handed to the
// first in line while the gate is locked, and is never free in between.
type gate struct {
	// Read by anybody, changed under mu.
	inside      atomic.Int64 // requests let in that have not left
	pending     atomic.Int64 // requests in line
	concurrency atomic.Int64 // most requests inside; 0 is no bound
	room        atomic.Int64 // most requests in line
	evacuations atomic.Uint64

	mu   sync.Mutex // guards the rest
	line []*conn
	// waiting are the requests inside that have no first byte yet, a list
	// through conn.place.
	waiting *conn
}

// place is a connection's place at the gate of the replica that its request is
// at. The gate's mu guards it, but for admitted.
type place struct {
	// admitted: the line has let the request in.
	admitted atomic.Bool
	waits    bool // it is in gate.waiting, between the next two
	next     *conn
	previous *conn
}

// bound sets the bounds. Those inside or in line beyond them may stay.
func (g *gate) bound(concurrency, room int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.concurrency.Store(int64(concurrency))
	g.room.Store(int64(room))
	g.admitLocked()
}

// free reports that a request would be let in, and roomy that it could at
// least line up. Both may be out of date at once: enter and queue decide.
func (g *gate) free() bool {
	most := g.concurrency.Load()
	return (most <= 0 || g.inside.Load() < most) && g.pending.Load() == 0
}

func (g *gate) roomy() bool { return g.pending.Load() < g.room.Load() }

// enter lets the request of c in, unless the replica is full or others are in
// line.
func (g *gate) enter(c *conn) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.free() {
		return false
	}
	g.letInLocked(c)
	return true
}

// queue lines the request of c up, unless the line is full. A wake-up tells
// when place.admitted is set, which may be at once.
func (g *gate) queue(c *conn) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.roomy() {
		return false
	}
	c.place.admitted.Store(false)
	g.line = append(g.line, c)
	g.pending.Add(1)
	g.admitLocked()
	return true
}

// admitLocked hands free places to the first in line.
func (g *gate) admitLocked() {
	for len(g.line) > 0 {
		if most := g.concurrency.Load(); most > 0 && g.inside.Load() >= most {
			return
		}
		c := g.line[0]
		g.line[0] = nil
		g.line = g.line[1:]
		g.pending.Add(-1)
		g.letInLocked(c)
		c.place.admitted.Store(true)
		c.wake()
	}
	g.line = nil
}

func (g *gate) letInLocked(c *conn) {
	g.inside.Add(1)
	p := &c.place
	p.waits, p.previous, p.next = true, nil, g.waiting
	if g.waiting != nil {
		g.waiting.place.previous = c
	}
	g.waiting = c
}

// unqueue takes the request of c out of the line. It reports false when its
// turn has come meanwhile: then it is inside, and has to leave.
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

// answered: the request of c, which is inside, has its first byte.
func (g *gate) answered(c *conn) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.answeredLocked(c)
}

func (g *gate) answeredLocked(c *conn) {
	p := &c.place
	if !p.waits {
		return
	}
	if p.previous != nil {
		p.previous.place.next = p.next
	} else {
		g.waiting = p.next
	}
	if p.next != nil {
		p.next.place.previous = p.previous
	}
	p.waits, p.previous, p.next = false, nil, nil
}

// leave ends the stay of c's request, which was let in.
func (g *gate) leave(c *conn) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.answeredLocked(c)
	if g.inside.Add(-1) < 0 {
		panic("BUG: a request left a replica twice")
	}
	g.admitLocked()
}

// evacuate wakes every request that waits for its first byte or its turn; each
// looks whether there is another place for it.
func (g *gate) evacuate() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.evacuations.Add(1)
	for c := g.waiting; c != nil; c = c.place.next {
		c.wake()
	}
	for _, c := range g.line {
		c.wake()
	}
}

// callFirst wakes the first in line, callAll everybody in it; each looks
// whether there is a better place for it.
func (g *gate) callFirst() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.line) > 0 {
		g.line[0].wake()
	}
}

func (g *gate) callAll() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, c := range g.line {
		c.wake()
	}
}

// warmth is how much of its share a replica that has come back takes. The zero
// value is a warm one. Its methods may be called from any goroutine.
type warmth struct {
	start atomic.Pointer[slowStart] // nil: it is warm
}

// slowStart is immutable.
type slowStart struct {
	from   time.Time
	length time.Duration
}

// leastShare is what a replica takes in the moment it comes back.
const leastShare = 0.1

func (w *warmth) begin(from time.Time, length time.Duration) {
	w.start.Store(&slowStart{from, length})
}

// share grows from leastShare to 1 in a straight line.
func (w *warmth) share(now time.Time) float64 {
	s := w.start.Load()
	if s == nil {
		return 1
	}
	passed := now.Sub(s.from)
	if passed >= s.length {
		w.start.CompareAndSwap(s, nil) // unless another has begun
		return 1
	}
	return leastShare + (1-leastShare)*float64(max(passed, 0))/float64(s.length)
}
