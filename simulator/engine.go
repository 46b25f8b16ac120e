package simulator

import (
	"math"
	"slices"
	"time"
)

// Latency is how long an engine's work takes. The zero value does everything
// at once.
//
// One step computes p tokens of prompts and one token of each of n sequences that
// decode and hold k tokens together. It takes
//
//	max(Least, PerToken, A·p + B·pairs + D·begun + Load·loaded) + Read·k + Sequence·n
//
// where the terms of decoding, PerToken too, are there only if n is not 0. Pairs are
// each of the p tokens with every token before it, begun the prompts of which it is
// the first step, loaded the tokens that come from the host's memory.
type Latency struct {
	// A, B and D, in microseconds, give the prefill time of a prompt of u
	// uncached and c cached tokens: A·u + B·u·(c+u/2) + D.
	A, B, D float64
	// PerToken is what a step takes in which few sequences decode: the time to read
	// the model's weights.
	PerToken time.Duration
	// Least is what any step takes: that time again, for an engine that is to be so
	// exact. Then the prefill time of a short prompt is not the above, but this.
	Least time.Duration
	// Read is what it takes to read one token of the KV cache, and Sequence what each
	// sequence that decodes adds, in nanoseconds.
	Read, Sequence float64
	// Load is what it takes to bring one token back from the host, in nanoseconds.
	Load float64
}

// Prefill returns how long the prompt of a request takes that is alone and computed in
// one step, from its turn to its first token.
func (l Latency) Prefill(uncached, cached int) time.Duration {
	u, c := float64(uncached), float64(cached)
	return max(l.Least, time.Duration(math.Ceil(math.Round((l.A*u+l.B*u*(c+u/2)+l.D)*picosecondsUS)/picoseconds)))
}

// The engine counts picoseconds, so that the time of many steps is the same whether
// they are added one by one or all at once. picoseconds are one nanosecond,
// picosecondsUS one microsecond.
const (
	picoseconds   = 1000
	picosecondsUS = 1000 * picoseconds
)

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
	// Slot is the one of llama.cpp's that it must have, counted from 1; 0 is any.
	Slot int
	// Slow multiplies what its prompt takes, and what the steps take in which it
	// decodes; 0 is 1.
	Slow float64
	// Timed: the times between its tokens are counted, by an engine that measures.
	Timed bool

	// The times, set by Engine. Start is when the first step began that computes
	// its prompt, First when its first token is ready, and End when its last one is.
	Start, First, End time.Duration

	state State
	// serial is in the order of the latest starts.
	serial uint64
	// from is how many tokens it had when it last began, or all when it has ended.
	from int
	// target is how many tokens must be computed before the next one is generated,
	// todo how many of them were not cached, and planned how many are computed or
	// will be by the steps that are planned.
	target, todo, planned int
	// run counts how often it has begun.
	run int
	// joined is the first round in which it decodes, 0 before that is planned. In an
	// engine whose sequences decode apart, joined is when its first token came.
	joined int64
	// member: it is among those that the engine reckons with in a round.
	member bool
	// pace is the time from one token to the next where sequences decode apart.
	pace int64
	// token is when it had its first token, or the last one before it was preempted.
	token int64
	// grows and ends are its places in the engine's queues.
	grows, ends turn

	// What belongs to the cache: the names of its full blocks, its blocks or
	// its place in the tree or slot, how many blocks others can find, how many
	// more it has, how many have been copied to the host, and how many tokens have
	// come from there.
	names  []BlockName
	blocks []int32
	node   *radixNode
	slot   int
	shared int
	own    int

	offloaded, loaded int

	// watch belongs to the caller of Engine and is not touched by it.
	watch *watch
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

// Ended reports whether all of it has been generated, or it has left.
func (s *Sequence) Ended() bool { return s.state == Ended }

// slow is the factor Slow.
func (s *Sequence) slow() float64 {
	if s.Slow == 0 {
		return 1
	}
	return s.Slow
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

// batching is how an engine makes steps of what there is to do. The zero value
// computes whole prompts of any length beside those that decode.
type batching struct {
	// budget is the most tokens that a step computes; 0 is any number.
	budget int
	// whole: a prompt is computed in one step, which it has for itself if it is
	// longer than the budget.
	whole bool
	// long is the most tokens of one prompt in a step while there are others; 0 is
	// any number.
	long int
	// first: prompts are computed before anything is decoded, which stands still
	// meanwhile; all that wait are looked up before the first of them is computed.
	// mixed: it does not stand still.
	first, mixed bool
	// patient: while some decode, others begin when they are more than a part of
	// those, or have waited for so many tokens.
	patient bool
	// reserves: a sequence begins when there is room for all that it may generate.
	reserves bool
	// ahead: a step is planned while the one before it runs. So there is room for a
	// token before the one before it is known, and for one too many when a sequence
	// stops by itself; and who comes while a step runs misses the next one.
	ahead bool
	// apart: prompts are computed one by one, and each sequence decodes at PerToken,
	// whatever else there is. No real engine does that.
	apart bool
}

// Engine is what a continuously batching engine does. It works in steps: of each, the
// sequences that run have their next tokens at its end, and the prompts of others
// are computed, a long one in several steps, so that each is slowed by the other. At
// most so many sequences run. One for which the cache has no room waits, and those
// behind it do; one that runs and needs more than there is makes the engine
// preempt the last that started, which begins anew later.
//
// A step always has a token for each sequence that decodes; vLLM, which gives its
// budget away in the order of their start, could let the last wait for prompts of
// several steps that started before them.
//
// It does no I/O, reads no clock and is not safe for concurrent use. Times
// count from any fixed instant and must not decrease from call to call. Steps in
// which nothing but the next tokens come are one, so an engine costs nothing while
// nothing changes.
type Engine struct {
	latency      Latency
	maxSequences int
	batching
	// cache is nil for an engine that has room for all and reuses nothing. longest is how many
	// tokens a sequence has there at most, 0 for any number.
	cache   cache
	longest int

	serial uint64
	// clock is the present, in picoseconds.
	clock int64
	// waiting are in the order of their turns, running in that of their
	// start, prefilling those whose prompts are not computed yet.
	waiting, running, prefilling []*Sequence
	// stuck: there was no room for the first that waits, and nothing has
	// changed since.
	stuck bool
	// changed are those that have started, been preempted or ended.
	changed []*Sequence
	// told is what the cache tells of itself and the engine has passed on, which
	// it does at the end of a step.
	told []Change

	// current is the step that runs; following is the one after it, once that is
	// planned. unplanned: it is to be, as soon as time has passed.
	current, following step
	unplanned          bool
	// planned is the last round that is planned, done the last one that is over, and
	// round the one for which members and context stand: how many decode in it, and
	// how many tokens they hold. waited are the rounds since a prompt began.
	planned, done, round int64
	members, context     int64
	waited               int64
	// fresh are those that decode from the next round that is planned on, joining
	// those that do in one that has not begun. eligible are all that decode in
	// rounds that are planned.
	fresh, joining []*Sequence
	eligible       int
	// grows has who needs something of the cache in a round, ends whose last token
	// comes at the end of one.
	grows, ends turns
	slowed      int // of running, those with a factor

	// gaps is nil of an engine that does not measure. token is the end of the last round
	// that is over, joined are the sequences that decode for the first time in the round
	// that runs, and timed is how many of the members are Timed.
	gaps   *Gaps
	token  int64
	joined []*Sequence
	timed  int64

	// by multiplies all times; from the moment slowAt on slow does, if it is not 0.
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
	// Steps counts the steps that are over, and Computed the tokens of prompts that
	// were planned in them, what is computed again included.
	Steps, Computed int
}

// NewEngine returns an idle engine without a cache and without a budget.
// maxSequences must be at least 1.
func NewEngine(l Latency, maxSequences int) *Engine {
	e := &Engine{latency: l, maxSequences: maxSequences, by: 1}
	e.grows.of = func(s *Sequence) *turn { return &s.grows }
	e.ends.of = func(s *Sequence) *turn { return &s.ends }
	return e
}

// DropCache takes the cache from an engine that has not begun with anything: sequences need
// no room then, and of each prompt is cached what the caller says. Fits stays as it is.
func (e *Engine) DropCache() {
	_, e.longest = e.cache.size()
	e.cache, e.told = nil, nil
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

// Slow makes all steps that begin at the time at or later take so many times as long
// as those of an engine that is not throttled: 1 is none. What a later call says
// stands. The time must not have passed.
func (e *Engine) Slow(by float64, at time.Duration) {
	e.brake()
	e.slow, e.slowAt = by, at
	e.cut()
}

// brake lets the throttle of the present moment stand.
func (e *Engine) brake() {
	if e.slow != 0 && e.clock >= int64(e.slowAt)*picoseconds {
		e.by, e.slow = e.slow, 0
	}
}

// Fits reports whether the engine ever has room for a sequence with so many
// tokens, generated ones included.
func (e *Engine) Fits(tokens int) bool {
	most := e.longest
	if e.cache != nil {
		_, most = e.cache.size()
	}
	return most == 0 || tokens <= most
}

// Arrive takes s in at time t. There must be room for it in an engine with
// nothing else to do.
func (e *Engine) Arrive(s *Sequence, t time.Duration) {
	e.Advance(t)
	s.state, s.from, s.run = Waiting, 0, 0
	e.waiting = append(e.waiting, s)
	if len(e.running) < e.maxSequences && !e.stuck {
		e.cut()
	}
	e.resume()
	e.Advance(t)
}

// Depart takes s out at time t, whether its answer is complete or its client
// has left. A step that computes for it goes on to its end.
func (e *Engine) Depart(s *Sequence, t time.Duration) {
	e.Advance(t)
	if s.state == Ended {
		return
	}
	e.cut()
	switch s.state {
	case Waiting:
		if i := slices.Index(e.waiting, s); i >= 0 {
			e.waiting = slices.Delete(e.waiting, i, i+1)
			if i == 0 {
				e.stuck = false
			}
		}
	default:
		e.stop(s, false)
		if !e.current.on {
			e.passOn()
		}
	}
	s.state = Ended
	e.resume()
	e.Advance(t)
}

// Next returns when the engine has something to do again, and false when it
// has nothing to do before another call. That a sequence that decodes has one more
// token is nothing to do; Token says when that is.
func (e *Engine) Next() (time.Duration, bool) {
	at, what := e.upcoming()
	return up(at), what != nothing
}

// Token returns when the next token of any sequence is ready, or the next step is
// over, and false while nothing runs.
func (e *Engine) Token() (time.Duration, bool) {
	if e.apart {
		next := never
		for _, s := range e.running {
			if s.state == Decoding {
				next = min(next, up(s.joined+((e.clock-s.joined)/s.pace+1)*s.pace))
			}
		}
		if at, what := e.upcoming(); what != nothing {
			next = min(next, up(at))
		}
		return next, next != never
	}
	if !e.current.on {
		return 0, false
	}
	k := min(e.current.over(e.clock)+1, max(1, e.current.rounds)) // a step of prompts alone is one
	return up(e.current.after(k)), true
}

// up returns a time in picoseconds as the first nanosecond in which it has come.
func up(at int64) time.Duration { return time.Duration((at + picoseconds - 1) / picoseconds) }

// never is later than any time.
const never = time.Duration(1<<63 - 1)

// Made returns how many tokens of s are ready.
func (e *Engine) Made(s *Sequence) int {
	switch {
	case s.state != Decoding:
		return s.from
	case s.joined == 0:
		return s.from + 1
	case e.apart:
		return min(s.from+1+int((e.clock-s.joined)/s.pace), s.Output)
	}
	return s.from + 1 + int(max(0, e.rounds()-s.joined+1))
}

// rounds is how many rounds are over.
func (e *Engine) rounds() int64 { return e.done + e.current.over(e.clock) }

// Told returns what the cache has told of itself since it was last called.
func (e *Engine) Told() []Change {
	told := e.told
	e.told = nil
	return told
}

// passOn passes on all that the cache has told.
func (e *Engine) passOn() {
	if e.cache != nil {
		e.told = append(e.told, e.cache.take()...)
	}
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

// Changed appends the sequences that have started, have their first token, were
// preempted or have ended since it was last called, perhaps more than once. One
// whose first token is its last is not told of before it has ended.
func (e *Engine) Changed(dst []*Sequence) []*Sequence {
	dst = append(dst, e.changed...)
	clear(e.changed)
	e.changed = e.changed[:0]
	return dst
}

// victim returns the running sequence that gives up its room: vLLM's last,
// SGLang's with the fewest tokens generated, and of these the longest prompt.
func (e *Engine) victim() *Sequence {
	victim := e.running[len(e.running)-1]
	if !e.first {
		return victim
	}
	for _, s := range e.running {
		a, b := e.Made(s), e.Made(victim)
		if a < b || a == b && s.prompt() > victim.prompt() {
			victim = s
		}
	}
	return victim
}

// preempt sends a running sequence back to the queue's beginning.
func (e *Engine) preempt(s *Sequence) {
	e.counts.Preempted++
	made := min(e.Made(s), s.Output-1)
	e.interrupted(s, made)
	e.leave(s)
	e.cache.release(s, s.prompt()+made, true)
	s.from, s.state = made, Waiting
	e.waiting = slices.Insert(e.waiting, 0, s)
	e.changed = append(e.changed, s)
}

// stop ends a running sequence. whole: all of it has been generated.
func (e *Engine) stop(s *Sequence, whole bool) {
	made := e.Made(s)
	if whole {
		made, s.End = s.Output, up(e.clock)
	}
	// Of who has left nothing more comes into vLLM's cache, and what SGLang has
	// not finished to compute does not.
	drop := !whole && (!e.first || s.state == Prefilling)
	e.interrupted(s, made)
	e.leave(s)
	if e.cache != nil {
		// The last token is known but has not been computed.
		e.cache.release(s, s.prompt()+max(0, made-1), drop)
	}
	s.state, s.from = Ended, made
	e.changed = append(e.changed, s)
}

// leave takes s from those that run.
func (e *Engine) leave(s *Sequence) {
	other := func(o *Sequence) bool { return o == s }
	e.running = slices.DeleteFunc(e.running, other)
	if s.state == Prefilling {
		e.prefilling = slices.DeleteFunc(e.prefilling, other)
	}
	e.fresh = slices.DeleteFunc(e.fresh, other)
	e.joining = slices.DeleteFunc(e.joining, other)
	e.grows.remove(s)
	e.ends.remove(s)
	if s.joined != 0 {
		e.eligible--
	}
	if s.member {
		e.members--
		e.context -= e.holds(s)
		if s.Timed {
			e.timed--
		}
	}
	if s.slow() != 1 {
		e.slowed--
	}
	s.member, s.joined = false, 0
	e.stuck = false
}

// holds is how many tokens s holds in the round that has begun last.
func (e *Engine) holds(s *Sequence) int64 {
	return int64(s.prompt()+s.from+1) + e.round - s.joined
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
		l.Tokens += s.prompt() + e.Made(s)
	}
	for _, s := range e.waiting {
		l.WaitingTokens += s.prompt()
	}
	return l
}
