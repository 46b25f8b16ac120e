package proxy

import (
	"maps"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/inferrail/inferrail/policy"
)

// Waiting bounds the requests of a model that wait instead of being refused. The
// zero value is that none waits.
type Waiting struct {
	// Max is how many wait at one time, and Timeout for how long one waits.
	Max     int
	Timeout time.Duration
}

// room is where requests of one model wait. A ModelState has two: one for those that
// cannot be taken now, because every replica and its line is full or admission refuses
// them, and one for those that were taken and are held back (hold.go). Any goroutine may
// call its methods. The zero value is empty.
//
// One request at a time is called to try again: the first in the order of
// policy.Queue, whenever there is news (call), and roomTick after it has tried
// last, or earlier. When admission refuses it, those are called in turn that grant more
// time than it does; otherwise a request that grants hardly any would hold up all.
type room struct {
	waiting atomic.Int64 // in queue; mostly 0

	mu    sync.Mutex // guards the rest
	queue policy.Queue[*conn]
	// on is who was called and has not looked yet. bar is the largest budget that
	// admission has refused since the last news.
	on  *conn
	bar time.Duration
	// moving are on their way from here to a line, or are being chosen for. Until they
	// are there nobody is called, or the next could be in line first.
	moving int
	// work is how long those in queue take that are held.
	work time.Duration
	// patient is as much as any of those in queue grants, or more: mostly it tells
	// that none is to be looked for among them.
	patient time.Duration
}

// roomTick is the time after which the first in a room tries again without news.
const roomTick = 50 * time.Millisecond

// patience is a budget, to compare it with others: 0 is the largest.
func patience(budget time.Duration) time.Duration {
	if budget == 0 {
		return math.MaxInt64
	}
	return budget
}

// passes reports that a newcomer may be tried before those that wait: of a class as
// good as its own wait only some that grant less time, and are refused for that.
func (m *room) passes(class int, budget time.Duration) bool {
	if m.waiting.Load() == 0 {
		return true
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.moving > 0 {
		return false
	}
	if m.patient <= m.bar && m.patient < patience(budget) {
		return true
	}
	for t := range m.queue.All() {
		if t.Class > class {
			return true
		}
		if b := patience(t.Value.x.budget); b >= patience(budget) || b > m.bar {
			return false
		}
	}
	return true
}

// join lets the request of c wait, unless most do and none of them has to make
// room. A wake-up tells that it is called, or that place.displaced is set.
func (m *room) join(c *conn, most int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := &c.place
	if n := m.queue.Len(); n >= most {
		var t *policy.Ticket[*conn]
		if n == most && n > 0 {
			t = m.queue.Yields(p.ticket.Class, p.ticket.Tenant)
		}
		if t == nil {
			return false
		}
		m.queue.Remove(t)
		m.waiting.Add(-1)
		t.Value.place.displaced.Store(true)
		t.Value.wake()
	}
	p.displaced.Store(false)
	p.ticket.Value = c
	if m.queue.Len() == 0 {
		m.patient = 0
	}
	m.patient = max(m.patient, patience(c.x.budget))
	m.queue.Push(&p.ticket)
	m.work += c.x.holding.prefill
	m.waiting.Add(1)
	return true
}

// leave takes the request of c out, and has the first of the others try; served: it
// has been taken. It reports false when it was out already, because it had to give
// way.
func (m *room) leave(c *conn, served bool) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	in := m.takeOutLocked(c, served)
	m.callLocked()
	return in
}

// move takes the request of c out, which goes to a line and calls moved when it is
// there, or has found it full.
func (m *room) move(c *conn) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.moving++
	m.waiting.Add(1) // as far as newcomers are concerned
	m.takeOutLocked(c, true)
}

func (m *room) moved() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.moving--
	m.waiting.Add(-1)
	m.callLocked()
}

func (m *room) takeOutLocked(c *conn, served bool) (in bool) {
	if m.on == c {
		m.on = nil
	}
	t := &c.place.ticket
	if in = t.Queued(); in {
		if served {
			m.queue.Take(t)
		} else {
			m.queue.Remove(t)
		}
		m.work -= c.x.holding.prefill
		m.waiting.Add(-1)
	}
	return in
}

// call has the first try again: there is news.
func (m *room) call() {
	if m.waiting.Load() == 0 {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.callLocked()
}

func (m *room) callLocked() {
	m.bar = 0
	if t := m.queue.Peek(); t != nil && m.moving == 0 {
		m.on = t.Value
		m.on.wake()
	}
}

// pass tells that the request of c has been tried in vain: refused by admission,
// or else because all is full.
func (m *room) pass(c *conn, refused bool) {
	if !refused {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.bar = max(m.bar, c.x.budget)
	if m.on != nil || m.moving > 0 || m.patient <= m.bar {
		return // there is news already, or soon, or nobody grants more
	}
	for t := range m.queue.All() {
		if patience(t.Value.x.budget) > m.bar {
			m.on = t.Value
			m.on.wake()
			return
		}
	}
	m.patient = m.bar
}

// called reports that the request of c was called to try again, which it must do
// then.
func (m *room) called(c *conn) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.on != c {
		return false
	}
	m.on = nil
	return true
}

// first reports that nobody is before the request of c.
func (m *room) first(c *conn) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	t := m.queue.Peek()
	return t != nil && t.Value == c && m.moving == 0
}

// takeTurn lets the request of c be chosen for, if nobody is before it; nobody else is
// called until endTurn.
func (m *room) takeTurn(c *conn) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	t := m.queue.Peek()
	if t == nil || t.Value != c || m.moving > 0 {
		return false
	}
	m.moving++
	return true
}

func (m *room) endTurn() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.moving--
	m.callLocked()
}

// worked is how long those in it take that are held.
func (m *room) worked() time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.work
}

// tokens is how many have to be computed for those that wait.
func (m *room) tokens() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.queue.Tokens()
}

// renew begins another round: the first tries again.
func (m *room) renew() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.bar = 0
}

// rooms are those in which requests wait. A Server has one; any goroutine may call
// its methods. The zero value knows of none.
type rooms struct {
	waiting atomic.Int64 // requests in all rooms; mostly 0

	mu   sync.Mutex // guards open
	open map[*room]int
}

// enter notes that a request is going to wait in m. leave is called when it does
// not any more.
func (r *rooms) enter(m *room) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.open == nil {
		r.open = map[*room]int{}
	}
	r.open[m]++
	r.waiting.Add(1)
}

func (r *rooms) leave(m *room) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.open[m]--; r.open[m] == 0 {
		delete(r.open, m)
	}
	r.waiting.Add(-1)
}

// call has the first in each room try again: a request has ended or has its first
// token, or the fleet has changed.
func (r *rooms) call() {
	if r.waiting.Load() == 0 {
		return
	}
	r.mu.Lock()
	open := slices.Collect(maps.Keys(r.open))
	r.mu.Unlock()
	for _, m := range open {
		m.call()
	}
}

// waits counts the requests that wait, in lines and rooms, by model and class. The
// zero value is none; any goroutine may use it.
type waits struct {
	mu     sync.Mutex // guards counts
	counts map[waitKey]int
}

type waitKey struct{ model, class string }

func (w *waits) add(k waitKey, n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.counts == nil {
		w.counts = map[waitKey]int{}
	}
	if w.counts[k] += n; w.counts[k] == 0 {
		delete(w.counts, k)
	}
}

// all is a copy.
func (w *waits) all() map[waitKey]int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return maps.Clone(w.counts)
}
