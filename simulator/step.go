package simulator

import (
	"container/heap"
	"math"
	"slices"
	"sort"
	"time"
)

// step is what an engine computes at one time. The zero value is none.
type step struct {
	on bool
	// chunks are the parts of prompts in it.
	chunks []chunk
	// decodes: it is a round, in which each sequence that decodes has one token.
	// Rounds are many if nothing else happens in them; 0 if it is none.
	rounds int64
	// members are how many decode in its first round.
	members int64
	// It began at begin, its first round takes base, and each of the others drift more
	// than the one before it.
	begin, base, drift int64
	// tells: its end is to be seen, for there is something to pass on.
	tells bool
}

// chunk is so many tokens of a sequence's prompt, behind others, computed in one step.
type chunk struct {
	s             *Sequence
	run           int
	before, count int
}

// after returns when so many rounds of the step are over.
func (p *step) after(k int64) int64 { return p.begin + k*p.base + p.drift*(k*(k-1)/2) }

// over is how many rounds of it are over at a time.
func (p *step) over(at int64) int64 {
	if !p.on || p.rounds == 0 || at < p.after(1) {
		return 0
	}
	return int64(sort.Search(int(p.rounds), func(k int) bool { return p.after(int64(k)+1) > at }))
}

// end returns when all of it is over.
func (p *step) end() int64 { return p.after(max(1, p.rounds)) }

// A move is what an engine does next.
type move uint8

const (
	nothing move = iota
	planning
	finishing
	turning // of sequences that decode apart
)

// upcoming returns what the engine does next, and when.
func (e *Engine) upcoming() (int64, move) {
	at, what := int64(math.MaxInt64), nothing
	if e.current.on {
		at, what = e.current.end(), finishing
		if e.unplanned {
			// The next step is planned when this one has begun, so that who comes at
			// the same time is in it.
			return min(at, e.current.begin+picoseconds), planning
		}
	}
	if e.apart {
		for _, q := range []*turns{&e.ends, &e.grows} {
			if q.Len() > 0 && q.top() <= at {
				at, what = q.top(), turning
			}
		}
	}
	return at, what
}

// Advance does what is to be done up to time t.
func (e *Engine) Advance(t time.Duration) {
	limit := int64(t) * picoseconds
	for {
		at, what := e.upcoming()
		if what == nothing || at > limit {
			break
		}
		e.clock = max(e.clock, at)
		switch what {
		case planning:
			e.unplanned = false
			e.following = e.plan()
			e.stretch()
		case finishing:
			e.finish()
			e.resume()
		case turning:
			e.turn()
			e.resume()
		}
	}
	e.clock = max(e.clock, limit)
}

// resume begins the next step if none runs and there is something to do.
func (e *Engine) resume() {
	if e.current.on {
		return
	}
	if e.current = e.following; !e.current.on {
		e.current = e.plan()
	}
	e.following = step{}
	if e.current.on {
		e.start()
	}
}

// start lets the current step begin.
func (e *Engine) start() {
	e.brake()
	p := &e.current
	p.begin = e.clock
	work := 0.0 // microseconds
	for _, c := range p.chunks {
		if c.s.run != c.run || c.s.state != Prefilling {
			continue // it has left since this was planned
		}
		n, before := float64(c.count), float64(c.before)
		us := e.latency.A*n + e.latency.B*n*(before+n/2)
		if c.before == c.s.target-c.s.todo {
			us += e.latency.D + e.latency.Load*float64(c.s.loaded)/1000
			if c.s.from == 0 {
				c.s.Start = up(e.clock)
			}
			e.changed = append(e.changed, c.s)
		}
		work += us * c.s.slow()
	}
	scale := func(us float64) int64 { return int64(math.Round(us * e.by * picosecondsUS)) }
	p.base, p.drift = scale(work), 0
	if len(p.chunks) > 0 {
		p.base = max(p.base, scale(float64(e.latency.Least)/1000))
	}
	if p.rounds > 0 {
		e.round++
		e.context += e.members
		for _, s := range e.joining {
			s.member = true
			e.members++
			e.context += e.holds(s)
			if s.Timed {
				e.timed++
				if e.gaps != nil {
					e.joined = append(e.joined, s)
				}
			}
		}
		clear(e.joining)
		e.joining = e.joining[:0]
		p.members = e.members
		if e.members > 0 {
			slow := e.slowest()
			read := scale(slow * e.latency.Read / 1000)
			p.base = max(p.base, scale(slow*float64(e.latency.PerToken)/1000)) + read*e.context + scale(slow*e.latency.Sequence/1000)*e.members
			p.drift = read * e.members
		}
	}
	e.unplanned = e.ahead
	if !e.ahead {
		e.stretch()
	}
}

// slowest returns the factor of the slowest sequence that decodes.
func (e *Engine) slowest() float64 {
	slow := 1.0
	if e.slowed > 0 {
		first := true
		for _, s := range e.running {
			if s.member && (first || s.slow() > slow) {
				slow, first = s.slow(), false
			}
		}
	}
	return slow
}

// steady reports that the next steps are as the current one, as long as no sequence
// has its turn.
func (e *Engine) steady() bool {
	p := &e.current
	if p.rounds == 0 || p.members != e.members || len(p.chunks) > 0 || p.tells || len(e.prefilling)+len(e.fresh)+len(e.joining) > 0 {
		return false
	}
	if e.ahead && (e.following.rounds == 0 || len(e.following.chunks) > 0 || e.following.tells) {
		return false
	}
	return len(e.waiting) == 0 || e.stuck || len(e.running) >= e.maxSequences
}

// stretch makes one step of all the rounds up to the next in which something happens.
// Of an engine that plans ahead the last of them is the following step, for with its
// beginning the one after it is planned.
func (e *Engine) stretch() {
	if e.apart || e.members == 0 || !e.steady() {
		return
	}
	last := int64(math.MaxInt64)
	if e.ends.Len() > 0 {
		last = e.ends.top()
	}
	if e.grows.Len() > 0 {
		last = min(last, e.grows.top()-1)
	}
	p := &e.current
	rounds := last - e.round
	if !e.ahead {
		rounds++
	}
	if rounds <= 1 || last == math.MaxInt64 {
		return
	}
	p.rounds = rounds
	if e.slow != 0 {
		// Rounds that begin after the engine is throttled are not of this step.
		p.rounds = max(1, 1+p.over(int64(e.slowAt)*picoseconds-1))
		p.rounds = min(p.rounds, rounds)
	}
	e.planned = e.round + p.rounds - 1
	if e.ahead {
		e.planned++
	}
}

// cut ends the current step with the round that runs, if it is one of many, because
// what follows may have to be another.
func (e *Engine) cut() {
	p := &e.current
	if p.rounds <= 1 {
		return
	}
	k := p.over(e.clock)
	if k == p.rounds {
		k-- // it ends now
	}
	e.passed(p, k)
	p.begin, p.base = p.after(k), p.base+p.drift*k
	e.round += k
	e.done += k
	e.context += e.members * k
	e.waited += k
	p.rounds = 1
	e.planned = e.round
	switch {
	case !e.ahead:
	case e.clock < p.begin+picoseconds:
		// What follows it is not planned yet.
		e.following, e.unplanned = step{}, true
	default:
		e.planned++
	}
}

// finish ends the current step.
func (e *Engine) finish() {
	p := e.current
	e.passed(&p, p.rounds)
	e.counts.Steps += int(max(1, p.rounds))
	e.done += p.rounds
	if p.rounds > 1 {
		e.round += p.rounds - 1
		e.context += e.members * (p.rounds - 1)
		e.waited += p.rounds - 1
	}
	e.current = step{} // so that Made counts right
	for e.ends.Len() > 0 && !e.apart && e.ends.top() <= e.done {
		e.stop(e.ends.queue[0], true)
	}
	for _, c := range p.chunks {
		s := c.s
		if s.run != c.run || s.state != Prefilling {
			continue
		}
		computed := c.before + c.count
		if e.cache != nil {
			e.cache.computed(s, computed)
			e.stuck = false
		}
		if computed == s.target {
			e.generates(s)
		}
	}
	e.passOn()
}

// generates lets s have its first token, or after a preemption its next one.
func (e *Engine) generates(s *Sequence) {
	e.prefilling = slices.DeleteFunc(e.prefilling, func(o *Sequence) bool { return o == s })
	s.state = Decoding
	e.resumed(s)
	if s.from == 0 {
		s.First = up(e.clock)
	}
	if s.from == s.Output-1 {
		e.stop(s, true)
		return
	}
	e.changed = append(e.changed, s)
	switch {
	case e.apart:
		s.joined = max(1, e.clock)
		s.pace = max(1, int64(math.Round(float64(e.latency.PerToken)*e.by*s.slow()*picoseconds)))
		e.eligible++
		e.ends.add(s, s.joined+int64(s.Output-1-s.from)*s.pace, 0)
		e.await(s, s.from)
	case !e.ahead:
		e.fresh = append(e.fresh, s)
	}
}

// plan decides what the next step computes, and takes room for it.
func (e *Engine) plan() step {
	budget := e.budget
	if budget == 0 {
		budget = math.MaxInt
	}
	var p step
	if e.apart {
		if len(e.prefilling) == 0 {
			e.admit(&p, 1, 1)
		}
		return p
	}
	if e.first {
		most := budget
		if e.mixed {
			most = max(1, budget-e.eligible-len(e.fresh))
		}
		if e.ready() {
			e.prompts(&p, most)
		}
		if p.on {
			e.waited = 0
			if !e.mixed {
				return p
			}
		}
	}
	preempted := e.counts.Preempted
	budget -= e.decode(&p)
	if !e.first {
		e.prefill(&p, &budget)
		// Nobody starts in the step that preempts.
		if e.counts.Preempted == preempted {
			e.admit(&p, budget, math.MaxInt)
		}
	}
	p.tells = e.cache != nil && e.cache.tells()
	return p
}

// ready reports whether prompts are computed before the next token of those that
// decode is: always, unless the engine is patient.
func (e *Engine) ready() bool {
	const part, tokens = 0.3, 20 // TGI's waiting_served_ratio and max_waiting_tokens
	return !e.patient || e.eligible+len(e.fresh) == 0 || e.waited >= tokens ||
		float64(len(e.waiting)) >= math.Ceil(part*float64(len(e.running)))
}

// prompts plans a step of prompts alone.
func (e *Engine) prompts(p *step, budget int) {
	e.prefill(p, &budget)
	e.admit(p, budget, math.MaxInt)
	p.tells = e.cache != nil && e.cache.tells()
}

// decode plans a round, if any sequence decodes, and returns how many do.
func (e *Engine) decode(p *step) int {
	q := e.planned + 1
	last := e.eligible
	if e.ahead {
		// Those whose last token is being computed are not in it, unless the engine
		// cannot know that it is the last.
		last -= e.ends.count(q-1, func(s *Sequence) bool { return !s.Stops })
	}
	n := last + len(e.fresh)
	if n == 0 {
		return 0
	}
	e.planned = q
	p.on, p.rounds = true, 1
	e.waited++
	for _, s := range e.fresh {
		s.joined = q
		e.eligible++
		if s.from < s.Output-1 {
			e.ends.add(s, q+int64(s.Output-2-s.from), s.serial)
		}
		e.await(s, s.from)
		e.joining = append(e.joining, s)
	}
	clear(e.fresh)
	e.fresh = e.fresh[:0]
	for e.grows.Len() > 0 && e.grows.top() <= q {
		s := e.grows.queue[0]
		i := s.from + int(q-s.joined)
		e.stuck = false
		if e.grow(s, i) {
			e.await(s, i+1)
		}
	}
	return n
}

// grow takes the room for token i of s, which is computed next, from others if need
// be. It reports false when s itself had to give way.
func (e *Engine) grow(s *Sequence, i int) bool {
	room := s.prompt() + i + 1
	known := room
	if e.ahead {
		known-- // the token itself is not yet
	}
	return e.take(s, room, known)
}

// take takes room for so many tokens of s.
func (e *Engine) take(s *Sequence, room, known int) bool {
	for e.cache != nil && !e.cache.grow(s, room, known) {
		victim := e.victim()
		e.preempt(victim)
		if victim == s {
			return false
		}
	}
	return true
}

// await decides when the cache is to be looked at for s again: with token i, or the
// first after it that begins a block, or is the last in one.
func (e *Engine) await(s *Sequence, i int) {
	e.grows.remove(s)
	last := s.Output - 2
	if e.ahead && s.Stops {
		last++
	}
	if e.cache == nil || e.reserves {
		return
	}
	block, _ := e.cache.size()
	at := s.prompt() + i
	next := i + (block-at%block)%block
	if !e.ahead && at%block != 0 {
		next = i + (block - 1 - at%block)
	}
	if next > last {
		return
	}
	key := s.joined + int64(next-s.from)
	if e.apart {
		key = s.joined + int64(next-s.from)*s.pace
	}
	e.grows.add(s, key, s.serial)
}

// turn does what is next where sequences decode apart.
func (e *Engine) turn() {
	if e.ends.Len() > 0 && e.ends.top() <= e.clock {
		e.stop(e.ends.queue[0], true)
	} else {
		s := e.grows.queue[0]
		i := s.from + int((e.clock-s.joined)/s.pace)
		e.stuck = false
		if e.grow(s, i) {
			e.await(s, i+1)
		}
	}
	e.passOn()
}

// prefill plans the next chunks of the prompts that have begun.
func (e *Engine) prefill(p *step, budget *int) {
	for k := 0; k < len(e.prefilling) && *budget > 0; k++ {
		s := e.prefilling[k]
		n := e.most(s.target-s.planned, *budget)
		if n == 0 {
			continue
		}
		if !e.take(s, s.planned+n, s.planned+n) {
			// It was the last that started, so none is behind it.
			return
		}
		e.chunk(p, s, n)
		*budget -= n
	}
}

// most returns how many of so many tokens of one prompt come into a step in which
// there is room for so many.
func (e *Engine) most(tokens, budget int) int {
	if e.long > 0 && len(e.running)+len(e.waiting) > 1 {
		tokens = min(tokens, e.long)
	}
	return min(tokens, budget)
}

// chunk puts the next tokens of a prompt into a step.
func (e *Engine) chunk(p *step, s *Sequence, n int) {
	p.on = true
	p.chunks = append(p.chunks, chunk{s, s.run, s.planned, n})
	s.planned += n
	e.counts.Computed += n
	if e.ahead && s.planned == s.target && (s.from < s.Output-1 || s.Stops) {
		e.fresh = append(e.fresh, s)
	}
}

// admit starts sequences that wait, in their order, as long as there is room and
// budget for them, and at most so many.
func (e *Engine) admit(p *step, budget, most int) {
	if e.apart {
		budget = math.MaxInt
	}
	for ; most > 0 && budget > 0 && len(e.waiting) > 0 && len(e.running) < e.maxSequences && !e.stuck; most-- {
		s := e.waiting[0]
		tokens, cached := s.prompt()+s.from, s.Cached
		s.loaded = 0
		if e.cache != nil {
			first := e.most(tokens, budget)
			if e.whole || e.apart {
				first = tokens
			}
			var ok bool
			if cached, ok = e.cache.admit(s, tokens, first); !ok {
				e.stuck = true
				return
			}
			if e.reserves && !e.cache.grow(s, s.prompt()+s.Output, cached) {
				e.cache.release(s, cached, true)
				e.stuck = true
				return
			}
		}
		n := e.most(tokens-cached, budget)
		if e.whole {
			if tokens-cached > budget && len(p.chunks) > 0 {
				if e.cache != nil {
					e.cache.release(s, 0, true)
				}
				return
			}
			n = tokens - cached
		}
		if s.run == 0 { // what is computed again is not told of
			s.Uncached, s.Cached = tokens-cached, cached
			if !s.NoRead {
				e.counts.Queried += s.prompt()
				e.counts.Hit += cached
			}
		}
		e.serial++
		s.run++
		s.serial, s.state, s.target, s.planned, s.todo = e.serial, Prefilling, tokens, cached, tokens-cached
		if s.slow() != 1 {
			e.slowed++
		}
		e.waiting = slices.Delete(e.waiting, 0, 1)
		e.running = append(e.running, s)
		e.prefilling = append(e.prefilling, s)
		e.chunk(p, s, n)
		budget -= n
	}
}

// turn is a sequence's place in a queue: in the round, or at the time, at. The zero
// value is none.
type turn struct {
	at     int64
	order  uint64
	place  int
	queued bool
}

// turns are sequences that have their turns, the next one first; of those that have
// it at the same time, that with the lowest order.
type turns struct {
	queue []*Sequence
	of    func(*Sequence) *turn
}

func (q *turns) top() int64 { return q.of(q.queue[0]).at }

func (q *turns) add(s *Sequence, at int64, order uint64) {
	*q.of(s) = turn{at: at, order: order}
	heap.Push(q, s)
}

func (q *turns) remove(s *Sequence) {
	if t := q.of(s); t.queued {
		heap.Remove(q, t.place)
	}
}

// count returns how many have their turn at a time before which none has, and are
// counted.
func (q *turns) count(at int64, counts func(*Sequence) bool) int {
	n := 0
	var walk func(i int)
	walk = func(i int) {
		if i >= len(q.queue) || q.of(q.queue[i]).at > at {
			return
		}
		if counts(q.queue[i]) {
			n++
		}
		walk(2*i + 1)
		walk(2*i + 2)
	}
	walk(0)
	return n
}

func (q *turns) Len() int { return len(q.queue) }

func (q *turns) Less(i, j int) bool {
	a, b := q.of(q.queue[i]), q.of(q.queue[j])
	if a.at != b.at {
		return a.at < b.at
	}
	return a.order < b.order
}

func (q *turns) Swap(i, j int) {
	q.queue[i], q.queue[j] = q.queue[j], q.queue[i]
	q.of(q.queue[i]).place, q.of(q.queue[j]).place = i, j
}

func (q *turns) Push(x any) {
	s := x.(*Sequence)
	t := q.of(s)
	t.place, t.queued = len(q.queue), true
	q.queue = append(q.queue, s)
}

func (q *turns) Pop() any {
	last := len(q.queue) - 1
	s := q.queue[last]
	q.queue[last] = nil
	q.queue = q.queue[:last]
	q.of(s).queued = false
	return s
}
