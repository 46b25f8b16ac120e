package policy

import (
	"sync"
	"sync/atomic"
	"time"
)

// seats are the sequences that a replica runs at the same time, where those are few:
// llama.cpp and Ollama have so many slots, and who finds none waits until somebody's
// answer is over, which takes far longer than any prefill. That is no slowness: a
// prompt enters the replica's Backlog when it gets a seat, and before that it is in
// line here, in the order of arrival.
//
// It belongs to a Standing; its methods may be called from any goroutine and allocate
// nothing. The zero value has no limit, and nobody waits.
type seats struct {
	limit atomic.Int32 // 0: none, or not known

	mu sync.Mutex // guards the rest
	// supposed: nobody has told the limit. More have been seen to run since over, 0 when
	// they do not; beyond is how often they did for long, less how often who was in line
	// began only when there was a seat.
	supposed bool
	over     int64
	beyond   int
	taken    int
	// sum is when those were taken that are, in nanoseconds after epoch, summed up.
	epoch time.Time
	sum   int64
	// The line, the work in it, and how many seats it takes.
	first, last *Sending
	work        amount
	wanted      int
	// stay is how long a seat is taken, in seconds.
	stay RecentMean
}

// seating is what a Sending has of seats. The mutex of those guards it.
type seating struct {
	state      seatState
	n          int   // seats that it takes, or waits for
	at         int64 // since when it has them, after seats.epoch
	prev, next *Sending
	queued     bool // it has been in line
}

type seatState uint8

const (
	unseated seatState = iota
	inLine
	seated
)

// beyondLimit is how often more must have run than was supposed, for a part of an
// answer, until one seat more is supposed. An end that is seen after the next one's
// first token is over sooner.
const (
	beyondLimit = 4
	beyondPart  = 4
)

// set says how many seats there are, 0 for no limit; supposed when that is a guess,
// which is corrected by what is seen.
func (t *seats) set(s *Standing, limit int, supposed bool, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if now := int(t.limit.Load()); supposed == t.supposed && (now == limit || supposed && limit > 0 && now > limit) {
		return // it is known, or has proved to be more
	}
	t.supposed, t.over, t.beyond = supposed, 0, 0
	t.limit.Store(Count(max(limit, 0)))
	t.grantLocked(s, now)
}

// enter gives p a seat, and lets it into the backlog, or puts it in line.
func (t *seats) enter(s *Standing, p *Sending, now time.Time) {
	if t.limit.Load() == 0 {
		s.begin(p, now)
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.epoch.IsZero() {
		t.epoch = now
	}
	p.seating = seating{state: inLine, n: max(p.Sequences, 1), prev: t.last}
	if t.last != nil {
		t.last.seating.next = p
	} else {
		t.first = p
	}
	t.last = p
	t.work.add(amountOf(p.work))
	t.wanted += p.seating.n
	t.grantLocked(s, now)
	p.seating.queued = p.seating.state == inLine
}

// grantLocked gives seats to those in line for whom there are some. Who wants more than
// there are gets them when all are free.
func (t *seats) grantLocked(s *Standing, now time.Time) {
	for p := t.first; p != nil; p = t.first {
		limit := int(t.limit.Load())
		if limit > 0 && t.taken > 0 && t.taken+p.seating.n > limit {
			return
		}
		t.unlinkLocked(p)
		t.seatLocked(p, now)
		s.begin(p, now)
	}
}

func (t *seats) seatLocked(p *Sending, now time.Time) {
	p.seating.state, p.seating.at = seated, int64(now.Sub(t.epoch))
	t.taken += p.seating.n
	t.sum += p.seating.at * int64(p.seating.n)
}

func (t *seats) unlinkLocked(p *Sending) {
	e := &p.seating
	if e.prev != nil {
		e.prev.seating.next = e.next
	} else {
		t.first = e.next
	}
	if e.next != nil {
		e.next.seating.prev = e.prev
	} else {
		t.last = e.prev
	}
	e.prev, e.next = nil, nil
	t.work.sub(amountOf(p.work))
	t.wanted -= e.n
}

// began notes that the replica has begun with p: that it has its first token.
func (t *seats) began(s *Standing, p *Sending, now time.Time) {
	if t.limit.Load() == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case p.seating.state == inLine:
		// The replica has more seats than is known, or another's answer is over there
		// and not here yet.
		t.unlinkLocked(p)
		t.seatLocked(p, now)
		if t.over == 0 && t.taken > int(t.limit.Load()) {
			t.over = p.seating.at
		}
	case p.seating.queued:
		t.beyond = max(t.beyond-1, 0)
	}
}

// leave takes p out, of the backlog as well. answered: the replica has had its time
// for it.
func (t *seats) leave(s *Standing, p *Sending, answered bool, now time.Time) {
	if p.seating.n == 0 { // there was no limit
		s.Backlog.Leave(&p.entry, now)
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	s.Backlog.Leave(&p.entry, now)
	switch e := &p.seating; e.state {
	case inLine:
		t.unlinkLocked(p)
	case seated:
		if stay := t.stay.Get(); t.supposed && t.over != 0 && float64(int64(now.Sub(t.epoch))-t.over)*beyondPart > stay*1e9 {
			t.over = 0
			if t.beyond++; t.beyond >= beyondLimit {
				t.beyond = 0
				t.limit.Add(1)
			}
		}
		t.taken -= e.n
		switch {
		case t.taken <= int(t.limit.Load()):
			t.over = 0
		case t.over == 0:
			t.over = int64(now.Sub(t.epoch))
		}
		t.sum -= e.at * int64(e.n)
		if stay := int64(now.Sub(t.epoch)) - e.at; answered && stay > 0 {
			t.stay.Add(float64(stay) / 1e9)
		}
	}
	p.seating = seating{}
	t.grantLocked(s, now)
}

// ahead is what is in line, and how long, in seconds, one that comes now waits for a
// seat: until all of those in line and others, of whom nothing else is known, have had
// theirs, and one of them is free. Answers are taken to be as long as they were lately,
// or as those that are generated have already taken.
func (t *seats) ahead(others int, now time.Time) (w Work, wait float64) {
	limit := int(t.limit.Load())
	if limit == 0 {
		return Work{}, 0
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	stay := t.stay.Get()
	if t.taken > 0 {
		stay = max(stay, float64(int64(now.Sub(t.epoch))-t.sum/int64(t.taken))/1e9)
	}
	if before := t.taken + t.wanted + others - limit + 1; before > 0 {
		wait = float64(before) * stay / float64(limit)
	}
	return t.work.work(), wait
}
