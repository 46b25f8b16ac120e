package policy

import (
	"container/heap"
	"math"
	"math/rand/v2"
)

// engineModel is what an engine is like in a replay. Times are in seconds.
type engineModel struct {
	speed  Speed
	blocks int     // of the prefix cache
	token  float64 // what decoding takes for one, of all sequences at once
	// press is how much longer a prefill takes for each sequence that is decoded
	// beside it, and stall how fast decoding goes on meanwhile, 1 as ever. 0 and 1
	// leave interference out.
	press, stall float64
	// noise is by how much a prefill is longer or shorter than that, by chance: the
	// standard deviation of its logarithm.
	noise float64
	// kv is how many tokens the sequences that run may have together; 0 is no
	// bound.
	kv int
	// budget, when above 0, makes it work in steps of so many tokens at most, as
	// engines do: one of each sequence that is decoded, and of prompts in the order
	// of their arrival, of which long ones take several steps and short ones are
	// done together. A step takes base, and read for each sequence that is decoded,
	// and what its part of the prompts takes. token, press and stall have no part in
	// it.
	budget     int
	base, read float64
}

// reference is the engine that the numbers of other policies were found with: its
// cache is of 2 M tokens, and decoding is in nobody's way.
var reference = engineModel{speed: Speed{60e-6, 1e-9, 5e-3}, blocks: 4000, token: 0.020, stall: 1}

// engine is one replica in virtual time: it prefills prompts in the order of their
// arrival, one at a time, and decodes all others meanwhile. The cache has a
// prompt's blocks from when it arrives, which is the same as from its prefill on
// for all that come after it.
type engine struct {
	engineModel
	slow     float64 // how many times longer all takes
	chance   *rand.Rand
	cache    *lru
	queue    []*visit // the first is being prefilled once it is started
	started  bool
	ends     float64 // of its prefill
	now      float64
	decoding ends
	progress float64 // tokens that a sequence decoded from the start on would have
	kvUsed   int

	first, done func(j *visit, at float64)
}

// visit is a request at an engine.
type visit struct {
	*arrival
	index    int
	cached   int
	arrives  float64
	decoding int     // sequences beside its prefill
	end      float64 // of its decoding, in the engine's progress
	whole    bool    // its client sees no first token
	// In steps: it has been begun with, so much of it is computed, and is in the
	// present step.
	begun       bool
	have, chunk int
	view        *view
	entry       Entry
}

func newEngine(m engineModel, ids int, first, done func(*visit, float64)) *engine {
	return &engine{engineModel: m, slow: 1, chance: rand.New(rand.NewPCG(3, 3)), cache: newLRU(m.blocks, ids), first: first, done: done}
}

// cached is how much of the prompt the engine has.
func (e *engine) cached(a *arrival) int { return e.cache.match(a.full()) * traceBlock }

// prefill is how long one prompt takes here now.
func (e *engine) prefill(input, cached, decoding int) float64 {
	return e.speed.Time(Prefill(input-cached, cached)) * e.slow * (1 + e.press*float64(decoding))
}

// wait is how long the prefills take that are queued.
func (e *engine) wait() float64 {
	wait := 0.0
	for i, j := range e.queue {
		if i == 0 && e.started {
			wait += max(e.ends-e.now, 0)
		} else {
			wait += e.prefill(j.input, j.cached, len(e.decoding))
		}
	}
	return wait
}

// arrive adds a request at e.now.
func (e *engine) arrive(j *visit) {
	j.arrives = e.now
	j.cached = e.cached(j.arrival)
	e.cache.add(j.full())
	e.queue = append(e.queue, j)
	e.begin()
}

// begin starts the first prefill of the queue, if it may.
func (e *engine) begin() {
	if e.started || len(e.queue) == 0 {
		return
	}
	if e.budget > 0 {
		e.plan()
		return
	}
	j := e.queue[0]
	if e.kv > 0 && len(e.decoding) > 0 && e.kvUsed+j.input+j.output > e.kv {
		return
	}
	e.kvUsed += j.input + j.output
	j.decoding = len(e.decoding)
	e.started, e.ends = true, e.now+e.prefill(j.input, j.cached, j.decoding)*math.Exp(e.noise*e.chance.NormFloat64())
}

// rate is how many tokens a second each sequence gets.
func (e *engine) rate() float64 {
	if e.started {
		return e.stall / (e.token * e.slow)
	}
	return 1 / (e.token * e.slow)
}

// plan begins a step, if there is something to do.
func (e *engine) plan() {
	if len(e.queue) == 0 && len(e.decoding) == 0 {
		return
	}
	room, took := e.budget-len(e.decoding), e.base+e.read*float64(len(e.decoding))
	for _, j := range e.queue {
		if !j.begun {
			if e.kv > 0 && len(e.decoding) > 0 && e.kvUsed+j.input+j.output > e.kv {
				break
			}
			e.kvUsed += j.input + j.output
			j.begun, j.have, j.decoding = true, j.cached, len(e.decoding)
			took += e.speed.D
		}
		if j.chunk = min(j.input-j.have, room); j.chunk <= 0 {
			break
		}
		room -= j.chunk
		u := float64(j.chunk)
		took += e.speed.A*u + e.speed.B*u*(float64(j.have)+u/2)
	}
	e.started, e.ends = true, e.now+took*e.slow*math.Exp(e.noise*e.chance.NormFloat64())
}

// advanceSteps is advance for an engine that works in steps.
func (e *engine) advanceSteps(t float64) {
	for {
		if !e.started {
			e.plan()
		}
		if !e.started || e.ends > t {
			e.now = max(e.now, t)
			return
		}
		e.now, e.started = e.ends, false
		e.progress++
		for len(e.decoding) > 0 && e.decoding[0].end <= e.progress {
			j := heap.Pop(&e.decoding).(*visit)
			e.kvUsed -= j.input + j.output
			e.done(j, e.now)
		}
		for len(e.queue) > 0 && e.queue[0].chunk > 0 {
			j := e.queue[0]
			j.have, j.chunk = j.have+j.chunk, 0
			if j.have < j.input {
				break
			}
			e.queue = e.queue[1:]
			j.end = e.progress + float64(j.output)
			heap.Push(&e.decoding, j)
			e.first(j, e.now)
		}
	}
}

// advance lets the engine work until the time is t.
func (e *engine) advance(t float64) {
	if e.budget > 0 {
		e.advanceSteps(t)
		return
	}
	for {
		prefill, decode := math.Inf(1), math.Inf(1)
		if e.started {
			prefill = e.ends
		}
		if len(e.decoding) > 0 && e.rate() > 0 {
			decode = e.now + max(e.decoding[0].end-e.progress, 0)/e.rate()
		}
		next := min(prefill, decode)
		if next > t {
			e.progress += (t - e.now) * e.rate()
			e.now = t
			return
		}
		e.progress += (next - e.now) * e.rate()
		e.now = next
		if prefill <= decode {
			j := e.queue[0]
			e.queue, e.started = e.queue[1:], false
			j.end = e.progress + float64(j.output)
			heap.Push(&e.decoding, j)
			e.first(j, e.now)
		} else {
			j := heap.Pop(&e.decoding).(*visit)
			e.kvUsed -= j.input + j.output
			e.done(j, e.now)
		}
		e.begin()
	}
}

// ends are the sequences that are decoded, the first to end first.
type ends []*visit

func (h ends) Len() int           { return len(h) }
func (h ends) Less(a, b int) bool { return h[a].end < h[b].end }
func (h ends) Swap(a, b int)      { h[a], h[b] = h[b], h[a] }
func (h *ends) Push(j any)        { *h = append(*h, j.(*visit)) }
func (h *ends) Pop() any {
	last := len(*h) - 1
	j := (*h)[last]
	*h = (*h)[:last]
	return j
}

// lru is a prefix cache of so many blocks, whose ids are small numbers. Of one
// prompt's blocks the last one is dropped first, as vLLM does.
type lru struct {
	room       int
	next, prev []int32 // the last entry is the ring's head: the one used last follows
	held       []bool
}

func newLRU(room, ids int) *lru {
	c := &lru{room, make([]int32, ids+1), make([]int32, ids+1), make([]bool, ids)}
	c.next[ids], c.prev[ids] = int32(ids), int32(ids)
	return c
}

// match is how many leading blocks it has.
func (c *lru) match(blocks []int32) int {
	for i, b := range blocks {
		if !c.held[b] {
			return i
		}
	}
	return len(blocks)
}

func (c *lru) add(blocks []int32) {
	head := int32(len(c.held))
	for i := len(blocks) - 1; i >= 0; i-- {
		b := blocks[i]
		if c.held[b] {
			c.unlink(b)
		} else {
			c.held[b] = true
			c.room--
		}
		after := c.next[head]
		c.next[head], c.prev[b], c.next[b], c.prev[after] = b, head, after, b
	}
	for c.room < 0 {
		last := c.prev[head]
		c.unlink(last)
		c.held[last] = false
		c.room++
	}
}

func (c *lru) unlink(b int32) {
	c.next[c.prev[b]], c.prev[c.next[b]] = c.next[b], c.prev[b]
}
