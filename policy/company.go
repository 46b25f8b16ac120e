package policy

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// A company is by how many seconds a first token comes later for each request that is
// at the replica with it. Engines compute in steps, and each has one token more of
// every sequence that is generated: who comes waits for the step that runs, and has
// its first token at the end of another that carries them all. It is the slope of a
// line through what first tokens were late, over how many requests were there, so that
// what all of them are late by, which the Speed is learned with, is not in it.
//
// Where few requests are the line is steeper than where many are. Were each replica
// taken for what is seen there, the fuller ones would seem the better: so all that serve
// the same are taken for the median of them, which ShareSpeeds finds.
//
// A Standing has one. Any goroutine may use it; it allocates nothing. The zero value
// knows nothing, and says 0.
type company struct {
	each atomic.Uint64 // bits of what suppose was told

	mu sync.Mutex // guards the rest
	// samples is how many first tokens there were, of which old ones count less; the
	// means are theirs, of requests and of seconds, and the sums are about those.
	samples             float64
	requests, late      float64
	requests2, together float64
	// rough is how far first tokens are off the line.
	rough float64
}

const (
	// companyMemory is after how many first tokens one has a third of its weight left.
	companyMemory = 500
	// companyRough is over how many rough is taken, and companyClip how many times it
	// one may be off.
	companyRough = 32
	companyClip  = 3
	// tellingCompany is how far, in squares of requests, the numbers of requests must
	// have been from their mean to tell anything.
	tellingCompany = 32
	// firstCompany is how many tokens of a prompt take as long as what a request is
	// taken to delay others by while nothing is known of it.
	firstCompany = 8
)

// add takes a first token which came so many seconds late where so many requests were
// and nothing was to be computed before it. A short prompt takes as long as short.
func (k *company) add(requests, late, short float64) {
	if !(math.Abs(late) < MostTTFT) || !(short >= fastest && short < MostTTFT) || !(requests >= 0 && requests < 1e6) {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.samples == 0 {
		k.rough, k.late, k.requests = short, min(max(late, -short), short), requests
	}
	line := k.late + k.slopeLocked()*(requests-k.requests)
	off := min(max(late-line, -companyClip*k.rough), companyClip*k.rough)
	k.rough = max(k.rough+(math.Abs(off)-k.rough)/companyRough, short/100)
	late = line + off
	const fade = 1 - 1.0/companyMemory
	k.samples = k.samples*fade + 1
	x, y := requests-k.requests, late-k.late
	k.requests += x / k.samples
	k.late += y / k.samples
	k.requests2 = k.requests2*fade + x*(requests-k.requests)
	k.together = k.together*fade + x*(late-k.late)
}

// slopeLocked is what was seen here alone.
func (k *company) slopeLocked() float64 {
	if !(k.requests2 > 0) {
		return 0
	}
	return k.together / k.requests2
}

// suppose says by how much each request delays a first token at replicas like this one.
func (k *company) suppose(usual float64) {
	if usual >= 0 && usual < MostTTFT {
		k.each.Store(math.Float64bits(usual))
	}
}

// seen is what was seen here alone, and false while that is little.
func (k *company) seen() (slope float64, ok bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.slopeLocked(), k.samples >= EnoughSamples && k.requests2 >= tellingCompany
}

// get is what suppose was told last, 0 when that was nothing.
func (k *company) get() float64 { return math.Float64frombits(k.each.Load()) }

// A habit is how many requests are at a replica on average over some seconds, as those meet
// it who come later. How many are there just now says little of that where conversations
// pause. Any goroutine may use it; it allocates nothing and waits for nobody. The zero value
// knows nothing, and says 0.
type habit struct {
	at   atomic.Int64  // when something was last added, in Unix nanoseconds
	mean atomic.Uint64 // bits of the number
}

const (
	// habitMemory is after how long what was added of requests has a third of its weight
	// left, and busyMemory so of work: what takes seconds is much of a shorter time.
	habitMemory = 10 * time.Second
	busyMemory  = 100 * time.Second
	// habitStep is how long after something was added nothing more is.
	habitStep = 20 * time.Millisecond
	// habitLate is how late one may be to tell, beside others that are not.
	habitLate = time.Second
)

// next is for how many nanoseconds what is told at now counts, +Inf when nothing was told
// before, and false when it does not count: something else was just told.
func (h *habit) next(now time.Time) (passed float64, ok bool) {
	at, before := now.UnixNano(), h.at.Load()
	passed = float64(at - before)
	if before != 0 && passed < float64(habitStep) && passed > -float64(habitLate) || !h.at.CompareAndSwap(before, at) {
		return 0, false
	}
	if before == 0 {
		passed = math.Inf(1)
	}
	return max(passed, 0), true // the clock may have been set back
}

// move lets x count for so long.
func (h *habit) move(x, passed float64, memory time.Duration) {
	mean := h.get()
	h.mean.Store(math.Float64bits(mean + (x-mean)/(1+float64(memory)/passed)))
}

// add takes how many are there at now, unless something was added just before. Decisions
// are made at random times, at which there are as many as on average.
func (h *habit) add(requests float64, now time.Time) {
	if passed, ok := h.next(now); ok {
		h.move(requests, passed, habitMemory)
	}
}

func (h *habit) get() float64 { return math.Float64frombits(h.mean.Load()) }

// A busy is which part of the last minutes a replica has had something to compute, as far as
// this agent sees. Any
// goroutine may use it; it allocates nothing and waits for nobody. The zero value has had
// nothing, and says 0.
type busy struct {
	habit
	worked atomic.Int64 // until something was last added, in nanoseconds
}

// mostUnseen is for how many nanoseconds others' requests are taken to have been there that
// are there now.
const mostUnseen = float64(time.Second)

// add takes for how long the backlog has had something to compute until now, and whether
// others' requests are there now, of which nobody tells what they compute, unless something
// was added just before. Both are mostly at the same time, so that the longer of them counts.
func (b *busy) add(backlog *Backlog, others bool, now time.Time) {
	passed, ok := b.next(now)
	if !ok {
		return
	}
	worked := int64(backlog.Worked(now))
	own := float64(worked - b.worked.Swap(worked))
	if math.IsInf(passed, 1) {
		return // nothing is known of before
	}
	if others {
		own = max(own, min(passed, mostUnseen))
	}
	if passed > 0 {
		b.move(min(max(own/passed, 0), 1), passed, busyMemory)
	}
}
