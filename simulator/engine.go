package simulator

import (
	"slices"
	"time"
)

// Latency is how long an engine's work takes. The zero value does everything
// at once.
type Latency struct {
	// A, B and D, in microseconds, give the prefill time of a prompt of u
	// uncached and c cached tokens: A·u + B·u·(c+u/2) + D.
	A, B, D float64
	// PerToken is the time from one output token to the next.
	PerToken time.Duration
}

// Prefill returns how long a prompt takes from its turn to its first token.
func (l Latency) Prefill(uncached, cached int) time.Duration {
	u, c := float64(uncached), float64(cached)
	us := l.A*u + l.B*u*(c+u/2) + l.D
	return time.Duration(us * float64(time.Microsecond))
}

// Sequence is one generation: a prompt and the tokens that follow it. The
// caller owns the memory, fills the first fields and passes it to
// Engine.Arrive; it must stay in place until Engine.Depart.
type Sequence struct {
	// Uncached and Cached are the tokens of the prompt, Output is how many
	// tokens are generated: at least 1.
	Uncached, Cached, Output int
	// Slow multiplies the engine's times for this sequence; 0 is 1.
	Slow float64

	// The plan, set by Engine. Start is when the prefill begins and the
	// sequence takes one of the engine's slots, First when its first token is
	// ready, End when its last one is and the slot is free again. Until Start
	// has come Depart of another sequence may move all three earlier, never
	// later.
	Start, First, End time.Duration

	perToken time.Duration
	serial   uint64

	// wake belongs to the caller of Depart and is not touched by Engine.
	wake chan struct{}
}

// Token returns when output token k, counted from 0, is ready.
func (s *Sequence) Token(k int) time.Duration {
	return s.First + time.Duration(k)*s.perToken
}

// slowed returns how long takes what an engine at its own pace does in d.
func (s *Sequence) slowed(d time.Duration) time.Duration {
	if s.Slow == 0 {
		return d
	}
	return time.Duration(float64(d) * s.Slow)
}

// Engine plans what a continuously batching engine does: prompts are prefilled
// one after the other in the order of their arrival, then decode side by side
// at a fixed pace, and at most MaxSequences are between the start of their
// prefill and their last token.
//
// It does no I/O, reads no clock and is not safe for concurrent use. Times
// count from any fixed instant and must not decrease from call to call.
type Engine struct {
	latency      Latency
	maxSequences int

	serial uint64
	// live are the sequences that have not departed, in the order of arrival,
	// which is also that of Start and of First.
	live []*Sequence
	// busyUntil are, in ascending order, the latest ends of planned
	// sequences, at most maxSequences of them: when it is full, the next
	// sequence must wait for the first.
	busyUntil []time.Duration
	// prefillFree is when the last planned prefill is over.
	prefillFree time.Duration
}

// NewEngine returns an idle engine. maxSequences must be at least 1.
func NewEngine(l Latency, maxSequences int) *Engine {
	return &Engine{latency: l, maxSequences: maxSequences}
}

// Arrive takes s in at time t and plans it.
func (e *Engine) Arrive(s *Sequence, t time.Duration) {
	e.serial++
	s.serial, s.perToken = e.serial, s.slowed(e.latency.PerToken)
	e.live = append(e.live, s)
	e.plan(s, t)
}

// Depart takes s out at time t, whether its answer is complete or its client
// has left, and appends to moved the sequences that have an earlier plan now.
func (e *Engine) Depart(s *Sequence, t time.Duration, moved []*Sequence) []*Sequence {
	i, found := slices.BinarySearchFunc(e.live, s, func(a, b *Sequence) int {
		return int(a.serial) - int(b.serial)
	})
	if !found {
		panic("BUG: a sequence departed that is not in the engine")
	}
	e.live = slices.Delete(e.live, i, i+1)
	if s.End <= t {
		return moved
	}

	waiting := e.waiting(t)
	// Whoever started last has the prefill until its First; if that was s, it
	// gives up its turn now.
	e.prefillFree = t
	if waiting > 0 {
		e.prefillFree = max(t, e.live[waiting-1].First)
	}
	if waiting == len(e.live) && s.Start <= t {
		if k, ok := slices.BinarySearch(e.busyUntil, s.End); ok {
			e.busyUntil = slices.Delete(e.busyUntil, k, k+1)
		}
		return moved
	}
	e.busyUntil = e.busyUntil[:0]
	for _, l := range e.live[:waiting] {
		if l.End > t {
			e.busyUntil = append(e.busyUntil, l.End)
		}
	}
	slices.Sort(e.busyUntil)
	for _, l := range e.live[waiting:] {
		before := l.Start
		e.plan(l, t)
		if l.Start != before {
			moved = append(moved, l)
		}
	}
	return moved
}

// plan sets the times of s, the last of those planned so far.
func (e *Engine) plan(s *Sequence, t time.Duration) {
	s.Start = max(t, e.prefillFree)
	if len(e.busyUntil) == e.maxSequences {
		s.Start = max(s.Start, e.busyUntil[0])
		e.busyUntil = slices.Delete(e.busyUntil, 0, 1)
	}
	s.First = s.Start + s.slowed(e.latency.Prefill(s.Uncached, s.Cached))
	s.End = s.Token(s.Output - 1)
	e.prefillFree = s.First
	k, _ := slices.BinarySearch(e.busyUntil, s.End)
	e.busyUntil = slices.Insert(e.busyUntil, k, s.End)
}

// waiting returns the index of the first live sequence that has not started
// at time t.
func (e *Engine) waiting(t time.Duration) int {
	i, _ := slices.BinarySearchFunc(e.live, t, func(s *Sequence, t time.Duration) int {
		if s.Start <= t {
			return -1
		}
		return 1
	})
	return i
}

// Load is what an engine reports of itself at one instant.
type Load struct {
	// Running have a slot; Waiting do not yet.
	Running, Waiting int
	// Tokens are held for the running sequences: prompts and what has been
	// generated.
	Tokens int
}

// Load returns the load at time t.
func (e *Engine) Load(t time.Duration) Load {
	started := e.waiting(t)
	l := Load{Waiting: len(e.live) - started}
	for _, s := range e.live[:started] {
		if s.End <= t {
			continue
		}
		l.Running++
		l.Tokens += s.Uncached + s.Cached
		if t >= s.First {
			l.Tokens++
			if s.perToken > 0 {
				l.Tokens += int((t - s.First) / s.perToken)
			}
		}
	}
	return l
}
