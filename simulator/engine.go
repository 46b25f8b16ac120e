package simulator

import (
	"container/heap"
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
	// Prompt are the tokens of the prompt, and Said those that are generated,
	// but for the last one: at least Output-1. An engine with a cache needs
	// them.
	Prompt, Said []uint32
	// Adapter and Salt keep its blocks apart from those of the same tokens.
	// NoRead: it takes nothing from the cache.
	Adapter, Salt string
	NoRead        bool
	// Stops: it ends with what is said, not because a limit is reached, which
	// the engine knows beforehand.
	Stops bool
	// Uncached and Cached are the tokens of the prompt, which the caller fills
	// in for an engine without a cache; another does so at the start. Output
	// is how many tokens are generated: at least 1.
	Uncached, Cached, Output int
	// Slow multiplies the engine's times for this sequence; 0 is 1.
	Slow float64

	// The times, set by Engine. Start is when the prefill began and the
	// sequence took one of the engine's slots, First when its first token is
	// ready; they stand once it has started. End is when its last one is, and
	// the slot is free again; it moves when the sequence is preempted.
	Start, First, End time.Duration

	state    State
	perToken time.Duration
	serial   uint64
	// Token from is ready at the time at, the later ones in its pace. Before
	// that the prompt and all tokens before it are computed.
	from int
	at   time.Duration
	// next is the token at which the engine looks at it again, due when that
	// is ready, place its index in the engine's heap.
	next  int
	due   time.Duration
	place int

	// What belongs to the cache: the names of its full blocks, its blocks or
	// its place in the tree, how many blocks others can find, and how many
	// more it has.
	names  []BlockName
	blocks []int32
	node   *radixNode
	shared int
	own    int

	// wake and slot belong to the caller of Engine and are not touched by it.
	wake chan struct{}
	slot int
}

// State is how far an engine is with a sequence. The zero value is one that has
// its turn before it.
type State uint8

const (
	// Waiting has no room in the engine yet, or none any more: one that Engine's
	// Changed returns has been preempted, and begins anew later.
	Waiting State = iota
	// Prefilling has room, and its prompt is computed, or after a preemption all
	// that it had.
	Prefilling
	// Decoding has its first token.
	Decoding
	// Ended has all its tokens, or has left.
	Ended
)

// State returns how far the engine is with it, up to the engine's last call.
func (s *Sequence) State() State { return s.state }

// Ready returns when output token k, counted from 0, is ready, and false while
// that is not known: the sequence waits for its turn.
func (s *Sequence) Ready(k int) (time.Duration, bool) {
	if k < s.from {
		return 0, true
	}
	return s.at + time.Duration(k-s.from)*s.perToken, s.state != Waiting
}

// Ended reports whether all of it has been generated.
func (s *Sequence) Ended() bool { return s.state == Ended }

// slowed returns how long takes what an engine at its own pace does in d.
func (s *Sequence) slowed(d time.Duration) time.Duration {
	if s.Slow == 0 {
		return d
	}
	return time.Duration(float64(d) * s.Slow)
}

// prompt is how many tokens the prompt has.
func (s *Sequence) prompt() int {
	if s.Prompt != nil {
		return len(s.Prompt)
	}
	return s.Uncached + s.Cached
}

// tokenAt returns token i, the prompt's first.
func (s *Sequence) tokenAt(i int) uint32 {
	if i < len(s.Prompt) {
		return s.Prompt[i]
	}
	return s.Said[i-len(s.Prompt)]
}

// appendTokens appends the tokens from one to before another.
func (s *Sequence) appendTokens(dst []uint32, from, to int) []uint32 {
	for i := from; i < to; i++ {
		dst = append(dst, s.tokenAt(i))
	}
	return dst
}

// made is how many tokens have been generated at time t.
func (s *Sequence) made(t time.Duration) int {
	switch {
	case s.state == Waiting || t < s.at:
		return s.from
	case s.perToken == 0:
		return max(s.next, s.from)
	}
	return min(s.from+1+int((t-s.at)/s.perToken), s.Output)
}

// Engine is what a continuously batching engine does: prompts are prefilled
// one after the other in the order of their arrival, then decode side by side
// at a fixed pace, and at most so many are between the start of their prefill
// and their last token. One for which the cache has no room waits, and those
// behind it do; one that runs and needs more than there is makes the engine
// preempt the last that started, which begins anew later.
//
// It does no I/O, reads no clock and is not safe for concurrent use. Times
// count from any fixed instant and must not decrease from call to call.
type Engine struct {
	latency      Latency
	maxSequences int
	// cache is nil for an engine that has room for all and reuses nothing.
	cache cache
	// batches: all that wait are looked up before the first of them is
	// prefilled, as SGLang does it.
	batches bool
	// ahead: a step is scheduled while the one before it runs, as vLLM does it
	// unless told otherwise. So there is room for a token before the one before
	// it is known, and for one too many when a sequence stops by itself.
	ahead bool

	serial uint64
	now    time.Duration
	// waiting are in the order of their turns, running in that of their
	// start. steps are those running, the one to be looked at next first.
	waiting, running []*Sequence
	steps            steps
	// prefillFree is when the last prefill is over; none starts before hold.
	prefillFree, hold time.Duration
	// stuck: there was no room for the first that waits, and nothing has
	// changed since.
	stuck bool
	// changed are those that have started, been preempted or ended.
	changed []*Sequence
	// told is what the cache tells of itself and the engine has passed on, which
	// it does with the output of a step: what is pending, at the time tell.
	told, pending []Change
	tell          time.Duration

	// by multiplies all times from the moment slowAt on, in which it becomes slow.
	by, slow float64
	slowAt   time.Duration

	counts Counts
}

// Counts are what an engine has counted since it began.
type Counts struct {
	// Queried are the tokens of the prompts that were looked up in the cache, and
	// Hit those that were found there; what is computed again after a preemption is
	// in neither.
	Queried, Hit int
	// Preempted is how often a sequence was.
	Preempted int
}

// Counts returns what the engine has counted up to its last call.
func (e *Engine) Counts() Counts { return e.counts }

// Usage returns how many blocks of the cache sequences have, of how many: 0 of 0
// without a cache.
func (e *Engine) Usage() (used, of int) {
	if e.cache == nil {
		return 0, 0
	}
	return e.cache.usage()
}

// Slow makes all that begins from the time at on take so many times as long as an
// engine takes that is not throttled: 1 is none, and what a later call says stands.
func (e *Engine) Slow(by float64, at time.Duration) {
	e.brake()
	e.slow, e.slowAt = by, at
}

// brake lets the throttle of the present moment stand.
func (e *Engine) brake() {
	if e.slow != 0 && e.now >= e.slowAt {
		e.by, e.slow = e.slow, 0
	}
}

// paced returns how long takes what an engine that is not throttled does in d.
func (e *Engine) paced(d time.Duration) time.Duration {
	if e.by == 0 {
		return d
	}
	return time.Duration(float64(d) * e.by)
}

// NewEngine returns an idle engine without a cache. maxSequences must be at
// least 1.
func NewEngine(l Latency, maxSequences int) *Engine {
	return &Engine{latency: l, maxSequences: maxSequences}
}

// Fits reports whether the engine ever has room for a sequence with so many
// tokens, generated ones included.
func (e *Engine) Fits(tokens int) bool {
	if e.cache == nil {
		return true
	}
	_, most := e.cache.size()
	return tokens <= most
}

// Arrive takes s in at time t. There must be room for it in an engine with
// nothing else to do.
func (e *Engine) Arrive(s *Sequence, t time.Duration) {
	e.Advance(t)
	e.brake()
	e.serial++
	s.serial, s.perToken, s.state = e.serial, s.slowed(e.paced(e.latency.PerToken)), Waiting
	e.waiting = append(e.waiting, s)
	e.Advance(t)
}

// Depart takes s out at time t, whether its answer is complete or its client
// has left.
func (e *Engine) Depart(s *Sequence, t time.Duration) {
	e.Advance(t)
	switch s.state {
	case Waiting:
		if i := slices.Index(e.waiting, s); i >= 0 {
			e.waiting = slices.Delete(e.waiting, i, i+1)
			if i == 0 {
				e.stuck = false
			}
		}
	case Prefilling, Decoding:
		e.stop(s, false)
		e.collect()
	}
	s.state = Ended
	e.Advance(t)
}

// Next returns when the engine has something to do again, and false when it
// has nothing to do before another call.
func (e *Engine) Next() (time.Duration, bool) {
	next, ok := e.nextAdmission()
	if len(e.steps) > 0 && (!ok || e.steps[0].due <= next) {
		next, ok = e.steps[0].due, true
	}
	if len(e.pending) > 0 && (!ok || e.tell <= next) {
		next, ok = e.tell, true
	}
	return next, ok
}

func (e *Engine) nextAdmission() (time.Duration, bool) {
	if len(e.waiting) == 0 || e.stuck || len(e.running) == e.maxSequences {
		return 0, false
	}
	return max(e.prefillFree, e.hold, e.now), true
}

// Advance does what is to be done up to time t.
func (e *Engine) Advance(t time.Duration) {
	for {
		next, ok := e.Next()
		if !ok || next > t {
			break
		}
		e.now = max(e.now, next)
		switch {
		case len(e.pending) > 0 && e.tell <= next:
			e.passOn()
		case len(e.steps) > 0 && e.steps[0].due <= next:
			// What ends now makes room for what starts now.
			e.step(e.steps[0])
			e.collect()
		default:
			e.admit()
			e.collect()
		}
	}
	e.now = max(e.now, t)
}

// collect takes what the cache tells of itself. It is passed on with the next
// output of any sequence.
func (e *Engine) collect() {
	if e.cache == nil {
		return
	}
	changes := e.cache.take()
	if len(changes) == 0 {
		return
	}
	next := never
	for _, s := range e.running {
		switch {
		case s.at > e.now:
			next = min(next, s.at)
		case s.perToken == 0:
			next = e.now
		default:
			next = min(next, s.at+((e.now-s.at)/s.perToken+1)*s.perToken)
		}
	}
	if len(e.running) == 0 {
		next = e.now
	}
	if len(e.pending) == 0 || next < e.tell {
		e.tell = next
	}
	e.pending = append(e.pending, changes...)
}

// passOn passes on all that the cache has told.
func (e *Engine) passOn() {
	e.told = append(append(e.told, e.pending...), e.cache.take()...)
	e.pending = e.pending[:0]
}

// Told returns what the cache has told of itself since it was last called.
func (e *Engine) Told() []Change {
	told := e.told
	e.told = nil
	return told
}

// Reset empties the cache. It reports false, and does nothing, while sequences
// have room there.
func (e *Engine) Reset() bool {
	if !e.cache.reset() {
		return false
	}
	e.passOn()
	return true
}

// never is later than any time.
const never = time.Duration(1<<63 - 1)

// Changed appends the sequences that have started, have their first token, were
// preempted or have ended since it was last called, perhaps more than once. One
// whose first token is its last is not told of before it has ended.
func (e *Engine) Changed(dst []*Sequence) []*Sequence {
	dst = append(dst, e.changed...)
	clear(e.changed)
	e.changed = e.changed[:0]
	return dst
}

// admit starts the first sequence that waits, or all for which there is room
// if the engine batches.
func (e *Engine) admit() {
	batch := len(e.running)
	end := e.now
	e.brake()
	for len(e.waiting) > 0 && len(e.running) < e.maxSequences {
		s := e.waiting[0]
		uncached, cached := s.Uncached, s.Cached
		if e.cache != nil {
			tokens := s.prompt() + s.from
			var ok bool
			if cached, ok = e.cache.admit(s, tokens); !ok {
				e.stuck = true
				break
			}
			uncached = tokens - cached
			if s.from == 0 {
				s.Uncached, s.Cached = uncached, cached
			}
		}
		if s.from == 0 {
			s.Start = e.now
			if !s.NoRead {
				e.counts.Queried += s.prompt()
				e.counts.Hit += s.Cached
			}
		}
		e.waiting = slices.Delete(e.waiting, 0, 1)
		e.running = append(e.running, s)
		end += s.slowed(e.paced(e.latency.Prefill(uncached, cached)))
		s.at, s.state, s.next = end, Prefilling, s.from
		e.changed = append(e.changed, s)
		if !e.batches {
			break
		}
	}
	for _, s := range e.running[batch:] {
		s.at = end
		if s.from == 0 {
			s.First = end
		}
		s.End, _ = s.Ready(s.Output - 1)
		if e.ahead {
			s.next-- // the token after the first is scheduled at once
		}
		e.schedule(s)
	}
	e.prefillFree = end
}

// schedule decides when to look at s again: at token next or at the first
// after it with which something changes.
func (e *Engine) schedule(s *Sequence) {
	last := s.Output - 1
	if e.cache == nil && s.next > s.from {
		s.next = last
	}
	// Token next is computed when it is ready. Something changes if a block
	// begins with it, or is full with it.
	if s.next > s.from && s.next < last {
		block, _ := e.cache.size()
		for at := s.prompt(); s.next < last && (at+s.next)%block != 0 && (at+s.next+1)%block != 0; {
			s.next++
		}
	}
	s.due, _ = s.Ready(s.next)
	heap.Push(&e.steps, s)
}

// step does what comes with token next of s: it is ready, and unless it is the
// last one, it is computed for the one after it.
func (e *Engine) step(s *Sequence) {
	tokens := s.prompt() + s.next
	if e.cache != nil && s.next == s.from {
		e.cache.prefilled(s, tokens)
		e.stuck = false
	}
	if s.next == s.from {
		s.state = Decoding
		if s.next < s.Output-1 {
			e.changed = append(e.changed, s)
		}
	}
	if s.next == s.Output-1 {
		e.stop(s, true)
		if e.cache != nil {
			e.passOn()
		}
		return
	}
	if e.cache != nil && s.next >= s.from {
		// Its token is the output of a step.
		e.passOn()
	}
	room, grows := tokens+1, e.cache != nil
	if e.ahead {
		room++
		grows = grows && (s.Stops || s.next+2 < s.Output)
	}
	for grows && !e.cache.grow(s, room, tokens+1) {
		victim := e.victim()
		e.preempt(victim)
		if victim == s {
			return
		}
	}
	e.stuck = false
	heap.Pop(&e.steps)
	s.next++
	e.schedule(s)
}

// victim returns the running sequence that gives up its room: vLLM's last,
// SGLang's with the fewest tokens generated, and of these the longest prompt.
func (e *Engine) victim() *Sequence {
	victim := e.running[len(e.running)-1]
	if !e.batches {
		return victim
	}
	for _, s := range e.running {
		a, b := s.made(e.now), victim.made(e.now)
		if a < b || a == b && s.prompt() > victim.prompt() {
			victim = s
		}
	}
	return victim
}

// preempt sends a running sequence back to the queue's beginning.
func (e *Engine) preempt(s *Sequence) {
	e.counts.Preempted++
	made := min(s.made(e.now), s.Output-1)
	e.leave(s)
	e.cache.release(s, s.prompt()+made, true)
	s.from, s.state = made, Waiting
	e.waiting = slices.Insert(e.waiting, 0, s)
	// Nobody starts in the step that preempts.
	e.hold, e.stuck = e.now+e.latency.PerToken, false
	e.changed = append(e.changed, s)
}

// stop ends a running sequence. whole: all of it has been generated.
func (e *Engine) stop(s *Sequence, whole bool) {
	made := s.made(e.now)
	if whole {
		made = s.Output
	}
	// Of who has left nothing more comes into vLLM's cache, and what SGLang has
	// not finished to compute does not.
	drop := !whole && (!e.batches || e.now < s.at)
	e.leave(s)
	if e.cache != nil {
		// The last token is known but has not been computed.
		e.cache.release(s, s.prompt()+max(0, made-1), drop)
	}
	s.state = Ended
	e.stuck = false
	e.changed = append(e.changed, s)
}

// leave takes s from those that run, and hands the prefill over if s has it.
func (e *Engine) leave(s *Sequence) {
	e.running = slices.DeleteFunc(e.running, func(other *Sequence) bool { return other == s })
	heap.Remove(&e.steps, s.place)
	if s.at > e.now && !slices.ContainsFunc(e.running, func(other *Sequence) bool { return other.at > e.now }) {
		e.prefillFree = e.now
	}
}

// Load is what an engine reports of itself at one instant.
type Load struct {
	// Running have a slot; Waiting do not yet.
	Running, Waiting int
	// Tokens are held for the running sequences: prompts and what has been
	// generated.
	Tokens int
	// WaitingTokens are those of the prompts that wait. What of them is cached is
	// found out when they begin.
	WaitingTokens int
}

// Load returns the load at time t.
func (e *Engine) Load(t time.Duration) Load {
	e.Advance(t)
	l := Load{Running: len(e.running), Waiting: len(e.waiting)}
	for _, s := range e.running {
		l.Tokens += s.prompt() + s.made(t)
	}
	for _, s := range e.waiting {
		l.WaitingTokens += s.prompt()
	}
	return l
}

// steps is a heap of running sequences: by the time they are due, and those
// first that end with it, for they make room.
type steps []*Sequence

func (h steps) Len() int { return len(h) }

func (h steps) Less(i, j int) bool {
	a, b := h[i], h[j]
	if a.due != b.due {
		return a.due < b.due
	}
	if last := a.next == a.Output-1; last != (b.next == b.Output-1) {
		return last
	}
	return a.serial < b.serial
}

func (h steps) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].place, h[j].place = i, j
}

func (h *steps) Push(x any) {
	s := x.(*Sequence)
	s.place = len(*h)
	*h = append(*h, s)
}

func (h *steps) Pop() any {
	old := *h
	s := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return s
}
