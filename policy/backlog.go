package policy

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// Backlog is what this agent has sent to one replica to prefill and has no first
// byte of. It lives as long as the replica; its methods may be called from any
// goroutine and allocate nothing. The zero value is empty.
//
// Engines prefill one thing after another, mostly in the order of arrival, and do
// not pause while something waits. So the time between two first bytes is what the
// prompts in between have taken, if the later of them waited all that time:
//
//   - The present interval begins when a prompt comes to a replica that has nothing
//     to do, or with the first byte before. It ends with a first byte before which
//     no other is due: then what was done in it is an Observation.
//   - A streamed prompt whose first byte has not come is not done, even if one that
//     was sent later has been answered: the engine may order them otherwise, or
//     work on several at a time. It stays, and the interval goes on until it is
//     answered as well, for only both together tell anything. After overtakers
//     prompts the interval ends nevertheless.
//   - A prompt whose answer does not stream is done when a streamed one that was
//     sent after it has been answered. Without one it is taken to be done when it
//     has had its turn for as long as was expected. When it really was is not known, and so nothing is
//     concluded from a prompt that came when it may have been over, or not yet.
//   - Nothing is concluded either from an interval in which a prompt was taken out
//     that may have been begun, nor while others' prompts wait at the replica.
//   - Prompts whose first bytes come within oneStep were computed together.
//
// Times that go backwards from call to call are taken for the latest that was seen.
type Backlog struct {
	count atomic.Int64 // of prompts in the list
	view  board        // what Ahead reads, see showLocked

	mu sync.Mutex // guards the rest, and writing the above
	// Times are in nanoseconds after epoch, which is when the first prompt came and
	// is not written after that. latest is the last time that was seen.
	started bool
	epoch   time.Time
	latest  int64

	// The prompts that are not done, in the order of Enter. streams counts those
	// among them that stream, spans sums up the span of the others.
	first, last *Entry
	since       int64 // there was always one in it
	worked      int64 // how long there was one until then
	sum         amount
	streams     int
	spans       int64
	serial      uint64 // of the last one

	// The present interval. done is the work of the finished prompts that were
	// finished in it, expected how long it should take without those that stream,
	// passed the last serial that had a first byte in it, turn when the first in
	// the list had its turn. void: nothing can be concluded from it.
	begin, turn int64
	heard       int64 // when the last first byte came
	done        amount
	finished    int
	expected    int64
	passed      uint64
	void        bool

	// held is an interval that has ended and is not told of, because others may
	// have been computed together with it.
	held struct {
		is, void          bool
		begin, first, end int64
		work              amount
		decoding          int
		last              uint64 // serial of the one that ended it
	}

	// Until doubt the replica may still compute what counts as done. When doubtful
	// leaves, which is nil or in, it does not. At busy it was known what it did.
	busy      int64
	doubt     int64
	doubtful  *Entry
	disturbed bool // others' prompts wait there
	// disorder is more than 0 while some were overtaken in the last first bytes.
	disorder int
}

const (
	// oneStep is within what time the first bytes of prompts come that were
	// computed in one batch.
	oneStep = int64(2 * time.Millisecond)
	// overtakers is how many prompts may be prefilled before others that were sent
	// earlier until the interval is ended without those.
	overtakers = 16
	// inOrder is how many first bytes in the order of arrival show that the engine
	// keeps to it.
	inOrder = 64
	// longest is how many seconds a prompt may be expected to take.
	longest = 3600
)

// Entry is one request's place in a Backlog. Its owner keeps it in place from
// Enter until Leave. The zero value is in none.
type Entry struct {
	in         *Backlog // nil: in none
	done       bool     // in, but not in the list any more
	streams    bool
	prev, next *Entry
	serial     uint64
	work       amount
	span       int64 // how long it should take, for what does not stream
}

// Observation is what a first byte has told of a replica's speed: so much Work
// took so many seconds.
type Observation struct {
	Work    Work
	Seconds float64
	// Decoding is how many sequences were generated meanwhile.
	Decoding int
	// Own: the prompt that had its first byte when this was told is a part of it, so
	// that Work may be corrected by what is known of that one later. Else it is about
	// prompts before it.
	Own bool
}

// Enter adds a prompt that is about to be sent. streams: its first byte will come
// with its first token; otherwise nothing tells when its prefill is over but later
// ones, or that it has had its turn for the seconds that it should take by itself.
func (b *Backlog) Enter(e *Entry, w Work, streams bool, now time.Time, seconds float64) {
	if in := e.in; in != nil {
		in.Leave(e, now)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.started {
		b.started, b.epoch = true, now
	}
	t := b.tickLocked(now)
	b.pruneLocked(t)
	b.serial++
	*e = Entry{in: b, streams: streams, serial: b.serial, work: amountOf(w), prev: b.last}
	if seconds > 0 {
		e.span = int64(min(seconds, longest) * 1e9)
	}
	if b.last == nil {
		b.since = t
		b.startLocked(t)
		b.void = b.disturbed || t < b.doubt
		if t >= b.doubt {
			b.busy = t
		}
		b.first = e
	} else {
		if b.streams == 0 && t-b.begin > b.expected/2 {
			b.void = true // it may be idle already
		}
		b.last.next = e
	}
	b.last = e
	b.sum.add(e.work)
	if streams {
		b.streams++
	} else {
		b.spans += e.span
		b.expected += e.span
	}
	b.showLocked()
}

// First tells that e's first token is there, and how many sequences the replica
// generates. ok is false when nothing can be concluded; o may be about first bytes
// that came before this one, and were not told of yet.
func (b *Backlog) First(e *Entry, decoding int, now time.Time) (o Observation, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if e.in != b || e.done {
		return Observation{}, false
	}
	t := b.tickLocked(now)
	b.heard = t
	for before := b.first; before != e; {
		next := before.next
		if !before.streams {
			b.finishLocked(before, t)
		}
		before = next
	}
	b.finishLocked(e, t)
	b.void = b.void || !e.streams
	b.passed = max(b.passed, e.serial)

	h := &b.held
	if h.is && (b.begin > h.end || t-h.first > oneStep) {
		o, ok = b.releaseLocked(0)
	}
	overtaken := b.overtakenLocked()
	if overtaken {
		b.disorder = inOrder
	} else if b.disorder > 0 {
		b.disorder--
	}
	if overtaken && b.finished < overtakers {
		b.showLocked()
		return o, ok
	}
	if !h.is {
		h.is, h.void, h.begin, h.first, h.work = true, false, b.begin, t, amount{}
	}
	h.void, h.end, h.decoding, h.last = h.void || b.void, t, decoding, e.serial
	h.work.add(b.done)
	b.startLocked(t)
	// One that does not stream may have been done long ago, and the next be begun.
	b.void, b.busy, b.doubt, b.doubtful = b.disturbed || !e.streams, t, 0, nil
	b.pruneLocked(t)
	if b.first == nil && !ok {
		o, ok = b.releaseLocked(e.serial) // no other was computed with it
	}
	b.showLocked()
	return o, ok
}

// Leave takes e out, if it is in: the request has ended, or failed. It may be
// called at any time and more than once.
func (b *Backlog) Leave(e *Entry, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if e.in != b {
		return
	}
	defer b.showLocked()
	t := b.tickLocked(now)
	b.pruneLocked(t)
	if e.done {
		if b.doubtful == e {
			b.doubt, b.doubtful = 0, nil
		}
		*e = Entry{}
		return
	}
	// Of an engine that keeps to the order, none is begun that is behind a streamed
	// one.
	begun := b.disorder > 0
	if !begun {
		before := b.first
		for before != e && !before.streams {
			before = before.next
		}
		begun = before == e
	}
	wasFirst := e == b.first
	b.unlinkLocked(e, t)
	if begun {
		b.void = true
		if e.streams {
			// The engine may not notice at once that nobody waits any more.
			b.doubt, b.doubtful = max(b.doubt, t+2*e.span), nil
		}
		if wasFirst {
			b.startLocked(t)
		}
	}
	*e = Entry{}
}

// Disturbed tells whether others' prompts wait at the replica, as its report says:
// until it is told otherwise, nothing is concluded from first bytes.
func (b *Backlog) Disturbed(yes bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.disturbed = yes
	b.void = b.void || yes
}

// Ahead is the work that is not done at now, how many prompts it is made of, and
// how long it will take at speed s, of which what has passed since the present one
// began is taken off. It waits for nobody, unless a prompt has come due.
//
// What has passed is taken off the one that is first, but not more than its own
// time. Where others have overtaken some, what has passed since the interval began
// beyond the time of those that are done was spent on those that were overtaken.
//
// When all of it should have been done long ago, by so many seconds, and nothing was
// heard meanwhile, it is taken to last as many more: a prompt may be longer than was
// thought, the replica have become slow, or hang. As long as others are answered, one
// that is not keeps nobody waiting.
func (b *Backlog) Ahead(s *Speed, now time.Time) (w Work, wait float64) {
	if b.count.Load() == 0 {
		return Work{}, 0
	}
	var v [12]uint64
	t := int64(now.Sub(b.epoch))
	if b.view.read(v[:]); t >= int64(v[10]) {
		b.mu.Lock()
		b.pruneLocked(t)
		b.showLocked()
		b.view.read(v[:])
		b.mu.Unlock()
	}
	present, later, done := amountAt(v[0:]), amountAt(v[3:]), amountAt(v[6:])
	passed := float64(max(t-int64(v[9]), 0)) / 1e9
	present.add(done)
	own := s.Time(amountAt(v[0:]).work())
	rest := s.Time(later.work())
	left := s.Time(present.work()) - passed
	wait = rest + min(max(left, 0), own)
	if own > 0 && int64(v[10]) == math.MaxInt64 { // the first streams
		silent := float64(t-int64(v[11]))/1e9 - own
		wait += max(min(-left, silent)-rest, 0)
	}
	all := amountAt(v[0:])
	all.add(later)
	return all.work(), wait
}

// Worked is how long there was something to prefill until now, of all the time.
func (b *Backlog) Worked(now time.Time) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.started {
		return 0
	}
	t := b.tickLocked(now)
	if b.pruneLocked(t); b.first == nil {
		b.showLocked()
		return time.Duration(b.worked)
	}
	return time.Duration(b.worked + max(t-b.since, 0))
}

// Overdue is how many times as long as all that is ahead should take at speed s it has
// taken at now, without a first token: 0 when nothing is, or when it cannot be told, for
// what is first does not stream. What came later than the first was not begun at once,
// so that it is rather more.
func (b *Backlog) Overdue(s *Speed, now time.Time) float64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.first == nil || !b.first.streams {
		return 0
	}
	all := b.sum
	all.add(b.done)
	return float64(max(b.tickLocked(now)-b.begin, 0)) / 1e9 / s.Time(all.work())
}

// showLocked writes what Ahead reads: what is computed at present, or was
// overtaken; what comes after it; what is done in the interval; when that began,
// when the first in the list is due, and since when nothing was heard.
func (b *Backlog) showLocked() {
	n := b.view.begin()
	var present amount
	due := int64(math.MaxInt64)
	count := int64(0)
	if b.first != nil {
		present = b.first.work
		for e := b.first.next; e != nil && e.serial < b.passed; e = e.next {
			present.add(e.work)
		}
		if !b.first.streams {
			due = b.dueLocked()
		}
		count = 1
	}
	later := b.sum
	later.sub(present)
	present.put(n, 0)
	later.put(n, 3)
	b.done.put(n, 6)
	n.set(9, uint64(b.begin))
	n.set(10, uint64(due))
	n.set(11, uint64(max(b.begin, b.heard)))
	b.view.end()
	if b.count.Load() != count {
		b.count.Store(count)
	}
}

// tickLocked returns now, or the latest time seen if that is later.
func (b *Backlog) tickLocked(now time.Time) int64 {
	b.latest = max(b.latest, int64(now.Sub(b.epoch)))
	return b.latest
}

// startLocked begins an interval. Whether it is void is the caller's to say.
func (b *Backlog) startLocked(t int64) {
	b.begin, b.turn, b.expected = t, t, b.spans
	b.done, b.finished, b.passed = amount{}, 0, 0
}

// overtakenLocked reports whether there is one that was sent before another that
// is prefilled.
func (b *Backlog) overtakenLocked() bool { return b.first != nil && b.first.serial < b.passed }

// dueLocked is when the first in the list, which does not stream, is taken to be
// done.
func (b *Backlog) dueLocked() int64 { return b.turn + b.first.span }

// pruneLocked takes out those that are due.
func (b *Backlog) pruneLocked(t int64) {
	for e := b.first; e != nil && !e.streams; e = b.first {
		due := b.dueLocked()
		if due > t {
			return
		}
		b.finishLocked(e, due)
		b.turn = due
		// The replica may be slower than was expected, up to three times.
		b.doubt, b.doubtful = max(b.doubt, due+2*(due-b.busy)), e
	}
}

// finishLocked counts one in the list as done at t.
func (b *Backlog) finishLocked(e *Entry, t int64) {
	b.done.add(e.work)
	b.finished++
	b.unlinkLocked(e, t)
	e.done = true
}

func (b *Backlog) unlinkLocked(e *Entry, t int64) {
	if e.prev != nil {
		e.prev.next = e.next
	} else {
		b.first = e.next
	}
	if e.next != nil {
		e.next.prev = e.prev
	} else {
		b.last = e.prev
	}
	e.prev, e.next = nil, nil
	if b.first == nil {
		b.worked += max(t-b.since, 0)
	}
	b.sum.sub(e.work)
	if e.streams {
		b.streams--
	} else {
		b.spans -= e.span
	}
}

// releaseLocked ends the interval that is held.
func (b *Backlog) releaseLocked(serial uint64) (Observation, bool) {
	h := &b.held
	h.is = false
	if h.void || h.end <= h.begin {
		return Observation{}, false
	}
	return Observation{Work: h.work.work(), Seconds: float64(h.end-h.begin) / 1e9, Decoding: h.decoding, Own: h.last == serial}, true
}

// amount is a Work in whole numbers, so that sums are what they were when as much
// has been taken from them as was added.
type amount struct{ prompts, tokens, attention int64 }

// grain is how many parts one of Work's units has in an amount.
const grain = 16

// amountOf is the amount that is nearest. What is no number, or less than 0, is
// none; and there is a most, so that many of them can be summed up.
func amountOf(w Work) amount {
	f := func(x, most float64) int64 {
		if !(x > 0) {
			return 0
		}
		return int64(math.Round(min(x, most) * grain))
	}
	return amount{f(w.Prompts, 1e6), f(w.Tokens, 1e9), f(w.Attention, 1e14)}
}

func amountAt(n []uint64) amount { return amount{int64(n[0]), int64(n[1]), int64(n[2])} }

func (a *amount) put(n *boardNumbers, at int) {
	n.set(at, uint64(a.prompts))
	n.set(at+1, uint64(a.tokens))
	n.set(at+2, uint64(a.attention))
}

func (a *amount) add(c amount) {
	a.prompts, a.tokens, a.attention = a.prompts+c.prompts, a.tokens+c.tokens, a.attention+c.attention
}

func (a *amount) sub(c amount) {
	a.prompts, a.tokens, a.attention = a.prompts-c.prompts, a.tokens-c.tokens, a.attention-c.attention
}

func (a amount) work() Work {
	return Work{float64(a.prompts) / grain, float64(a.tokens) / grain, float64(a.attention) / grain}
}
