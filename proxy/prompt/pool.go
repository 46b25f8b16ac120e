package prompt

import (
	"sync"
	"sync/atomic"
	"time"
)

// Pool reads prompts for the proxy, from any goroutine. Small ones that take
// little time, larger ones that the model remembers as a whole, and those that
// are approximate in any case are read on the caller's goroutine, others by its
// workers, so that a few huge prompts do not take all processors from the
// streams; a prompt that has to wait too long is approximate. The zero value is
// of no use; NewPool makes one.
type Pool struct {
	maxWait time.Duration
	jobs    chan *job
	closing chan struct{}
	workers sync.WaitGroup
	size    int // workers
	busy    atomic.Int64
	// prompts are those that nobody has. What one holds is bounded by
	// keptMemory, how many there are by what was in use at a time.
	prompts sync.Pool
	// follow and brief are Model.Follow and Model.followBriefly; tests hold them
	// up.
	follow, brief follower
}

// follower follows a prompt.
type follower func(m *Model, p *Prompt, kind Kind, body []byte, now time.Time)

const (
	// inlineBytes is the size of a body up to which it is followed on the
	// caller's goroutine: about a millisecond at most, if nothing of it was
	// seen before, which other goroutines can wait for.
	inlineBytes = 32 << 10
	// queuedPerWorker bounds the queue. What is behind more than this would be
	// late in any case.
	queuedPerWorker = 32
	// keptMemory is the most memory of a Prompt that is used again.
	keptMemory = 1 << 20
)

// job is one large prompt on its way through the workers. The goroutine that
// has moved state away from what the other one waits for owns the Prompt.
type job struct {
	model  *Model
	kind   Kind
	body   []byte
	now    time.Time
	prompt *Prompt
	state  atomic.Int32
	done   chan struct{} // closed when the state is jobDone
}

// The states of a job. The worker moves it from queued to begun and to done,
// the caller whose patience ends from queued or begun to abandoned.
const (
	jobQueued int32 = iota
	jobBegun
	jobDone
	jobAbandoned
)

// NewPool returns a Pool with so many workers, at least one. maxWait bounds the
// time a caller waits for one of them. Close ends it.
func NewPool(workers int, maxWait time.Duration) *Pool {
	workers = max(1, workers)
	p := &Pool{maxWait: maxWait, jobs: make(chan *job, workers*queuedPerWorker), closing: make(chan struct{}), size: workers,
		follow: (*Model).Follow, brief: (*Model).followBriefly}
	p.prompts.New = func() any { return new(Prompt) }
	for range workers {
		p.workers.Go(p.work)
	}
	return p
}

// Read follows a prompt; m may be nil. The Prompt is the caller's until Put.
// late reports that a worker still reads body: it must not be changed or used
// again for anything else.
func (p *Pool) Read(m *Model, kind Kind, body []byte, now time.Time) (_ *Prompt, late bool) {
	prompt := p.prompts.Get().(*Prompt)
	switch {
	case len(body) <= inlineBytes:
		read(p.brief, m, prompt, kind, body, now)
		if prompt.Reason != TooLarge {
			return prompt, false
		}
	case m == nil || kind == Other || len(body) > maxFollowed:
		read(p.follow, m, prompt, kind, body, now)
		return prompt, false
	case p.recall(m, prompt, kind, body, now):
		return prompt, false
	}
	timer := time.NewTimer(p.maxWait)
	defer timer.Stop()
	j := &job{model: m, kind: kind, body: body, now: now, prompt: prompt, done: make(chan struct{})}
	select {
	case p.jobs <- j:
	default:
		approximate(m, prompt, kind, body, QueueFull)
		return prompt, false
	}
	select {
	case <-j.done:
		return prompt, false
	case <-timer.C:
	}
	switch {
	case j.state.CompareAndSwap(jobQueued, jobAbandoned):
		// No worker will touch it. It stays in the queue until one comes by.
		j.model, j.body, j.prompt = nil, nil, nil
	case j.state.CompareAndSwap(jobBegun, jobAbandoned):
		// The worker gives back the Prompt that it is writing.
		prompt, late = p.prompts.Get().(*Prompt), true
	default:
		<-j.done
		return prompt, false
	}
	approximate(m, prompt, kind, body, Late)
	return prompt, late
}

// Put gives a Prompt back.
func (p *Pool) Put(prompt *Prompt) {
	if prompt.memory() <= keptMemory {
		p.prompts.Put(prompt)
	}
}

// Close waits for the workers to end. They finish what is queued first. A large
// prompt that is read later is approximate.
func (p *Pool) Close() {
	close(p.closing)
	p.workers.Wait()
}

// PoolStats is how much the workers have to do at one time.
type PoolStats struct {
	// Workers there are and Busy of them; Queued prompts wait for one.
	Workers, Busy, Queued int
}

// Stats may be called from any goroutine.
func (p *Pool) Stats() PoolStats {
	return PoolStats{Workers: p.size, Busy: int(p.busy.Load()), Queued: len(p.jobs)}
}

// work is one worker.
func (p *Pool) work() {
	for {
		select {
		case j := <-p.jobs:
			p.do(j)
			continue
		default:
		}
		select {
		case j := <-p.jobs:
			p.do(j)
		case <-p.closing:
			if len(p.jobs) == 0 {
				return
			}
		}
	}
}

// do follows the prompt of a job, if somebody still wants it. Once begun it goes
// on even when nobody does: what it finds out is in the cache then.
func (p *Pool) do(j *job) {
	if !j.state.CompareAndSwap(jobQueued, jobBegun) {
		return
	}
	p.busy.Add(1)
	defer p.busy.Add(-1)
	read(p.follow, j.model, j.prompt, j.kind, j.body, j.now)
	if j.state.CompareAndSwap(jobBegun, jobDone) {
		close(j.done)
	} else {
		p.Put(j.prompt)
	}
}

// recall is Model.recall, which a panic ends without a prompt. Whoever follows
// the prompt then meets it again.
func (p *Pool) recall(m *Model, prompt *Prompt, kind Kind, body []byte, now time.Time) (known bool) {
	defer func() {
		if recover() != nil {
			known = false
		}
	}()
	return m.recall(prompt, kind, body, now)
}

// read follows a prompt on this goroutine. A panic in it is a defect of this
// program, which must cost no more than the one prompt.
func read(follow follower, m *Model, prompt *Prompt, kind Kind, body []byte, now time.Time) {
	defer func() {
		if recover() != nil {
			approximate(m, prompt, kind, body, Failed)
		}
	}()
	follow(m, prompt, kind, body, now)
}

// approximate is Model.Approximate, without a text if that panics.
func approximate(m *Model, prompt *Prompt, kind Kind, body []byte, reason Reason) {
	defer func() {
		if recover() != nil {
			prompt.reset()
			prompt.Reason = Failed
		}
	}()
	m.Approximate(prompt, kind, body, reason)
}

// memory is how much the prompt keeps for its next use.
func (p *Prompt) memory() int {
	return 4*cap(p.IDs) + 8*(cap(p.Ends)+cap(p.TextEnds)) + cap(p.Text) + cap(p.Salt) +
		cap(p.scratch.key) + cap(p.scratch.text) + p.scratch.values.memory()
}
