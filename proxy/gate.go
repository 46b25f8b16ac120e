package proxy

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/inferrail/inferrail/policy"
)

// gate counts the requests at one replica and bounds them. A request is let in
// (enter), or lines up for its turn (queue), and calls leave once after it was
// let in. The zero value bounds nothing. Its methods may be called from any
// goroutine.
//
// The line is ordered by class and tenant. When it is full, one that should wait
// less than another may take its place (policy.Queue.Yields); the other one is
// called, to look elsewhere.
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
	line policy.Queue[*conn]
	// alone ends what enterAlone has let in, nil when there is nothing.
	alone func()
	// waiting are the requests inside that have no first byte yet, a list
	// through conn.place.
	waiting *conn
}

// place is a connection's place at the gate of the replica that its request is
// at, or in the room of its model, one at a time. The mu of the gate or the room
// guards it, but for admitted and displaced, while the request is there.
type place struct {
	// admitted: the line has let the request in.
	admitted atomic.Bool
	// ticket is its place in the line, or in the room. Its class, tenant and tokens
	// are set before; displaced: it had to give way there.
	ticket    policy.Ticket[*conn]
	displaced atomic.Bool
	waits     bool // it is in gate.waiting, between the next two
	next      *conn
	previous  *conn
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

// lineless reports that it is bounded, and nobody may line up.
func (g *gate) lineless() bool { return g.concurrency.Load() > 0 && g.room.Load() <= 0 }

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

// enterAlone lets in what is no client's request, of which there is one at most, unless the
// replica is full or others are in line. end is called, while the gate is locked, when one
// lines up for its place. leaveAlone ends its stay.
func (g *gate) enterAlone(end func()) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.free() {
		return false
	}
	g.inside.Add(1)
	g.alone = end
	return true
}

// endAlone ends what enterAlone has let in. It reports whether there is anything.
func (g *gate) endAlone() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.alone != nil {
		g.alone()
	}
	return g.alone != nil
}

func (g *gate) leaveAlone() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.alone = nil
	g.leaveLocked()
}

// queue lines the request of c up, unless the line is full and nobody in it has to
// make room. A wake-up tells when place.admitted is set, which may be at once, or
// place.displaced.
func (g *gate) queue(c *conn) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	p := &c.place
	if !g.roomy() {
		t := g.yieldsLocked(c)
		if t == nil {
			return false
		}
		g.line.Remove(t)
		g.pending.Add(-1)
		t.Value.place.displaced.Store(true)
		t.Value.wake()
	}
	p.admitted.Store(false)
	p.displaced.Store(false)
	p.ticket.Value = c
	g.line.Push(&p.ticket)
	g.pending.Add(1)
	if g.admitLocked(); g.alone != nil && g.line.Len() > 0 {
		g.alone()
	}
	return true
}

// yields reports that one in line would have to make room for the request of c.
func (g *gate) yields(c *conn) bool {
	if g.pending.Load() == 0 {
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.yieldsLocked(c) != nil
}

// yieldsLocked is who makes room in a full line, nil for nobody. There is none to
// make where there is no line.
func (g *gate) yieldsLocked(c *conn) *policy.Ticket[*conn] {
	if room := g.room.Load(); room <= 0 || int64(g.line.Len()) > room {
		return nil // the line has become shorter: who is in stays
	}
	return g.line.Yields(c.place.ticket.Class, c.place.ticket.Tenant)
}

// admitLocked hands free places to the first in line.
func (g *gate) admitLocked() {
	for g.line.Len() > 0 {
		if most := g.concurrency.Load(); most > 0 && g.inside.Load() >= most {
			return
		}
		c := g.line.Pop().Value
		g.pending.Add(-1)
		g.letInLocked(c)
		c.place.admitted.Store(true)
		c.wake()
	}
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

// unqueue takes the request of c out of the line, in which it is unless it had to
// give way. It reports false when its turn has come meanwhile: then it is inside,
// and has to leave.
func (g *gate) unqueue(c *conn) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.line.Remove(&c.place.ticket) {
		g.pending.Add(-1)
		return true
	}
	return c.place.displaced.Swap(false)
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
	g.leaveLocked()
}

func (g *gate) leaveLocked() {
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
	for t := range g.line.All() {
		t.Value.wake()
	}
}

// callFirst wakes the first in line, callAll everybody in it; each looks
// whether there is a better place for it.
func (g *gate) callFirst() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if t := g.line.Peek(); t != nil {
		t.Value.wake()
	}
}

func (g *gate) callAll() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for t := range g.line.All() {
		t.Value.wake()
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
