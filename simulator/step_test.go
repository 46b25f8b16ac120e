package simulator

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// TestEngineAgainstSteps compares random histories with a model that takes one step
// after the other, and knows nothing of rounds, queues and stretches: every time of
// every sequence, and what each has at any moment, must be the same.
func TestEngineAgainstSteps(t *testing.T) {
	for seed := range uint64(500) {
		r := rand.New(rand.NewPCG(seed, 1))
		e := NewEngine(Latency{
			A: []float64{0, 100, 333.3}[r.IntN(3)], B: []float64{0, 1.7}[r.IntN(2)], D: []float64{0, 5000}[r.IntN(2)],
			PerToken: time.Duration(r.IntN(4)) * 3333333, Read: []float64{0, 777.7, 12345}[r.IntN(3)], Sequence: []float64{0, 99999}[r.IntN(2)],
			Least: time.Duration(r.IntN(2)) * 2222222,
		}, 1+r.IntN(6))
		e.budget = []int{0, 7, 16, 64}[r.IntN(4)]
		e.long = []int{0, 0, 5}[r.IntN(3)]
		e.ahead = r.IntN(2) == 0
		e.first = !e.ahead && r.IntN(2) == 0
		e.mixed = r.IntN(2) == 0
		e.whole = r.IntN(4) == 0
		e.patient = r.IntN(4) == 0
		if e.budget > 0 {
			e.budget = max(e.budget, e.maxSequences) // as vLLM demands
		}
		m := &plainEngine{latency: e.latency, batching: e.batching, most: e.maxSequences}
		var live []*Sequence
		now := time.Duration(0)
		for act := range 50 {
			// Now and then two things happen at the same time, or when a step ends.
			switch r.IntN(5) {
			case 0:
			case 1:
				if next, ok := e.Token(); ok {
					if next < now {
						t.Fatalf("seed %d: at %v the next token is at %v", seed, now, next)
					}
					now = next
				}
			default:
				now += time.Duration(r.IntN(60_000_000))
			}
			switch {
			case len(live) > 0 && r.IntN(4) == 0:
				k := r.IntN(len(live))
				e.Depart(live[k], now)
				m.depart(live[k], now)
				live = slices.Delete(live, k, k+1)
			case r.IntN(20) == 0:
				by, at := 0.5+2*r.Float64(), now+time.Duration(r.IntN(50_000_000))
				e.Advance(now)
				e.Slow(by, at)
				m.run(int64(now) * picoseconds)
				m.brake()
				m.slow, m.slowAt = by, int64(at)*picoseconds
			default:
				s := &Sequence{Uncached: r.IntN(40), Cached: r.IntN(10), Output: 1 + r.IntN(60), Stops: r.IntN(2) == 0}
				if r.IntN(8) == 0 {
					s.Slow = 0.5 + 2*r.Float64()
				}
				live = append(live, s)
				e.Arrive(s, now)
				m.arrive(s, now)
			}
			// It makes no difference when it is looked at.
			if r.IntN(2) == 0 {
				now += time.Duration(r.IntN(30_000_000))
				e.Advance(now)
			}
			m.run(int64(now) * picoseconds)
			for i, s := range live {
				if got, want := describeSequence(s, e.Made(s)), m.describe(s); got != want {
					t.Fatalf("seed %d act %d at %v, sequence %d: %s, want %s\n%+v %+v", seed, act, now, i, got, want, e.latency, e.batching)
				}
			}
		}
		now += 10 * time.Hour
		e.Advance(now)
		m.run(int64(now) * picoseconds)
		for i, s := range live {
			if got, want := describeSequence(s, e.Made(s)), m.describe(s); got != want || s.state != Ended {
				t.Fatalf("seed %d at the end, sequence %d: %s, want %s\n%+v %+v", seed, i, got, want, e.latency, e.batching)
			}
		}
		if e.members != 0 || e.context != 0 || e.eligible != 0 || e.slowed != 0 || len(e.grows.queue)+len(e.ends.queue)+len(e.running) != 0 {
			t.Fatalf("seed %d: something is left: %+v", seed, e)
		}
	}
}

func describeSequence(s *Sequence, made int) string {
	text := fmt.Sprintf("state %d, %d made", s.state, made)
	if s.state != Waiting {
		text += fmt.Sprintf(", start %v", s.Start)
	}
	if s.state >= Decoding {
		text += fmt.Sprintf(", first %v, end %v", s.First, s.End)
	}
	return text
}

// plainEngine takes one step after the other. Its times are picoseconds.
type plainEngine struct {
	latency Latency
	batching
	most    int
	clock   int64
	all     []*plainSequence // in the order of their coming
	current []plainWork
	on      bool
	begin   int64
	end     int64
	// next is the step that is planned, if there is one.
	next    []plainWork
	planned bool
	by      float64
	slow    float64
	slowAt  int64
	waited  int
}

type plainSequence struct {
	s       *Sequence
	state   State
	planned int // tokens of the prompt
	steps   int // that decode it and are planned
	made    int
	start   int64
	first   int64
	end     int64
}

// plainWork is what a step does for one sequence: tokens of its prompt, or none to
// decode it.
type plainWork struct {
	q             *plainSequence
	before, count int
	decode, last  bool
}

func (m *plainEngine) find(s *Sequence) *plainSequence {
	for _, q := range m.all {
		if q.s == s {
			return q
		}
	}
	return nil
}

func (m *plainEngine) describe(s *Sequence) string {
	q := m.find(s)
	text := fmt.Sprintf("state %d, %d made", q.state, q.made)
	if q.state != Waiting {
		text += fmt.Sprintf(", start %v", up(q.start))
	}
	if q.state >= Decoding {
		text += fmt.Sprintf(", first %v, end %v", up(q.first), up(q.end))
	}
	return text
}

func (m *plainEngine) brake() {
	if m.by == 0 {
		m.by = 1
	}
	if m.slow != 0 && m.clock >= m.slowAt {
		m.by, m.slow = m.slow, 0
	}
}

func (m *plainEngine) arrive(s *Sequence, t time.Duration) {
	m.run(int64(t) * picoseconds)
	m.all = append(m.all, &plainSequence{s: s, planned: s.Cached})
	m.resume()
	m.run(int64(t) * picoseconds)
}

func (m *plainEngine) depart(s *Sequence, t time.Duration) {
	m.run(int64(t) * picoseconds)
	m.find(s).state = Ended
	m.resume()
	m.run(int64(t) * picoseconds)
}

// run lets time pass.
func (m *plainEngine) run(until int64) {
	for m.on {
		if m.ahead && !m.planned && min(m.begin+picoseconds, m.end) <= until {
			m.clock = max(m.clock, min(m.begin+picoseconds, m.end))
			m.next, m.planned = m.plan(), true
		}
		if m.end > until {
			break
		}
		m.clock = m.end
		for _, w := range m.current {
			q := w.q
			if q.state == Ended {
				continue
			}
			if w.decode {
				q.made++
			} else if w.last {
				q.made, q.first, q.state = 1, m.clock, Decoding
			}
			if q.made == q.s.Output {
				q.state, q.end = Ended, m.clock
			}
		}
		m.on = false
		m.resume()
	}
	m.clock = max(m.clock, until)
}

// resume begins a step if none runs.
func (m *plainEngine) resume() {
	for !m.on {
		if !m.planned || len(m.next) == 0 {
			m.next = m.plan()
		}
		m.current, m.next, m.planned = m.next, nil, false
		if len(m.current) == 0 {
			return
		}
		m.on, m.begin = true, m.clock
		m.brake()
		work, decoding, tokens, slow := 0.0, int64(0), int64(0), 0.0
		for _, w := range m.current {
			q := w.q
			if q.state == Ended {
				continue
			}
			factor := 1.0
			if q.s.Slow != 0 {
				factor = q.s.Slow
			}
			if w.decode {
				decoding++
				tokens += int64(q.s.Uncached + q.s.Cached + q.made)
				slow = max(slow, factor)
				continue
			}
			n, c := float64(w.count), float64(w.before)
			us := m.latency.A*n + m.latency.B*n*(c+n/2)
			if w.before == q.s.Cached {
				q.start = m.clock
				us += m.latency.D
			}
			work += us * factor
		}
		round := func(us float64) int64 { return int64(math.Round(us * m.by * 1e6)) }
		if slices.ContainsFunc(m.current, func(w plainWork) bool { return !w.decode }) {
			work = max(work, float64(m.latency.Least)/1000)
		}
		m.end = m.begin + round(work)
		if decoding > 0 {
			m.end = m.begin + max(round(work), round(slow*float64(m.latency.PerToken)/1000)) +
				round(slow*m.latency.Read/1000)*tokens + round(slow*m.latency.Sequence/1000)*decoding
		}
	}
}

// plan decides what a step does.
func (m *plainEngine) plan() (work []plainWork) {
	budget := m.budget
	if budget == 0 {
		budget = math.MaxInt
	}
	running, waiting := 0, 0
	var decode []*plainSequence
	for _, q := range m.all {
		switch {
		case q.state == Waiting:
			waiting++
		case q.state != Ended:
			running++
			done := q.planned == q.s.Uncached+q.s.Cached
			if !m.ahead && q.state != Decoding || !done {
				continue
			}
			// One that may stop is decoded until its last token is there.
			if 1+q.steps < q.s.Output || m.ahead && q.s.Stops {
				decode = append(decode, q)
			}
		}
	}
	prompts := func(budget int) {
		for pass := range 2 {
			for _, q := range m.all {
				left := q.s.Uncached + q.s.Cached - q.planned
				begins := q.state == Waiting
				if budget <= 0 || q.state == Ended || begins != (pass == 1) || !begins && left == 0 {
					continue
				}
				if begins && running == m.most {
					return
				}
				n := left
				if m.long > 0 && running+waiting > 1 {
					n = min(n, m.long)
				}
				n = min(n, budget)
				if m.whole && begins {
					if n = left; n > budget && slices.ContainsFunc(work, func(w plainWork) bool { return !w.decode }) {
						return
					}
				}
				if begins {
					q.state, running, waiting = Prefilling, running+1, waiting-1
				}
				work = append(work, plainWork{q: q, before: q.planned, count: n, last: n == left})
				q.planned += n
				budget -= n
			}
		}
	}
	if m.first {
		ready := !m.patient || len(decode) == 0 || m.waited >= 20 || float64(waiting) >= math.Ceil(0.3*float64(running))
		if ready {
			if m.mixed {
				prompts(max(1, budget-len(decode)))
			} else {
				prompts(budget)
			}
		}
		if len(work) > 0 {
			m.waited = 0
			if !m.mixed {
				return work
			}
		}
	}
	if len(decode) > 0 {
		m.waited++
	}
	for _, q := range decode {
		q.steps++
		work = append(work, plainWork{q: q, decode: true})
	}
	if !m.first {
		prompts(budget - len(decode))
	}
	return work
}

// TestEngineInLittleRoom: with a cache that holds a few sequences, of any engine, random
// histories come to their end: everybody who stays has all tokens, nobody waits for ever,
// and nothing is in use afterwards. When the engine is looked at makes no difference.
func TestEngineInLittleRoom(t *testing.T) {
	preempted := 0
	for seed := range uint64(300) {
		for _, engine := range engines {
			cfg := Config{Engine: engine, BlockSize: 4, NumGPUBlocks: 24, MaxNumSeqs: 4, MaxNumBatchedTokens: 16, ChunkedPrefillSize: 16,
				MaxBatchPrefillTokens: 32, PrefillA: 1000, TimePerOutputToken: 10 * time.Millisecond, KVReadNS: 1000, NoAsyncScheduling: seed%2 == 0}
			if engine == "vllm" || engine == "sglang" {
				cfg.HostBlocks = int(seed%3) * 20
			}
			first, err := cfg.NewEngine()
			if err != nil {
				t.Fatal(err)
			}
			second, _ := cfg.NewEngine() // is looked at all the time
			history := func(e *Engine, often bool) string {
				r := rand.New(rand.NewPCG(seed, 1))
				glances := rand.New(rand.NewPCG(seed, 2))
				var all []*Sequence
				now := time.Duration(0)
				for range 40 {
					for until := now + time.Duration(r.IntN(60_000_000)); now < until; {
						if now = until; often {
							now -= time.Duration(glances.Int64N(int64(until-now) + 1))
							if glances.IntN(3) > 0 {
								now = until
							}
							e.Load(now)
						}
					}
					if len(all) > 0 && r.IntN(5) == 0 {
						e.Depart(all[r.IntN(len(all))], now)
						continue
					}
					s := &Sequence{Prompt: make([]uint32, 1+r.IntN(30)), Output: 1 + r.IntN(30), Stops: r.IntN(2) == 0}
					for i := range s.Prompt {
						s.Prompt[i] = r.Uint32N(2) * uint32(i%5/4)
					}
					s.Said = make([]uint32, s.Output)
					if e.cache != nil && !e.Fits(len(s.Prompt)+s.Output) {
						continue
					}
					all = append(all, s)
					e.Arrive(s, now)
				}
				steps := 0
				for next, ok := e.Next(); ok; next, ok = e.Next() {
					if steps++; steps > 100_000 {
						t.Fatalf("%s, seed %d: it goes on for ever at %v", engine, seed, next)
					}
					e.Advance(next)
				}
				text := fmt.Sprintf("%+v\n", e.Counts())
				for i, s := range all {
					if !s.Ended() || e.Made(s) > s.Output || s.End > 0 && e.Made(s) != s.Output {
						t.Errorf("%s, seed %d: sequence %d is in state %v with %d of %d tokens", engine, seed, i, s.State(), e.Made(s), s.Output)
					}
					text += fmt.Sprintf("%d: %d cached, %v %v %v\n", i, s.Cached, s.Start, s.First, s.End)
				}
				if used, _ := e.Usage(); used != 0 || e.members != 0 || e.context != 0 || e.eligible != 0 || len(e.running)+len(e.waiting) != 0 {
					t.Errorf("%s, seed %d: %d blocks are in use at the end, %d members", engine, seed, used, e.members)
				}
				if !e.Reset() {
					t.Errorf("%s, seed %d: the cache cannot be emptied", engine, seed)
				}
				preempted += e.Counts().Preempted
				return text
			}
			if a, b := history(first, false), history(second, true); a != b {
				t.Fatalf("%s, seed %d: looked at seldom\n%soften\n%s", engine, seed, a, b)
			}
		}
	}
	if preempted < 100 {
		t.Errorf("only %d were preempted", preempted)
	}
}

// BenchmarkEngine is how long an engine takes for a token of an answer, with blocks of 16
// and 64 that decode at a time.
func BenchmarkEngine(b *testing.B) {
	e, err := Config{Profile: "h100-llama-8b"}.NewEngine()
	if err != nil {
		b.Fatal(err)
	}
	r := rand.New(rand.NewPCG(1, 1))
	now, tokens := time.Duration(0), 0
	ask := func() {
		s := &Sequence{Prompt: make([]uint32, 512), Said: make([]uint32, 300), Output: 100 + r.IntN(200)}
		for i := range s.Prompt {
			s.Prompt[i] = r.Uint32()
		}
		e.Arrive(s, now)
	}
	for range 64 {
		ask()
	}
	b.ReportAllocs()
	for tokens < b.N {
		now, _ = e.Next()
		e.Advance(now)
		for _, s := range e.Changed(nil) {
			if s.Ended() {
				tokens += s.Output
				ask()
			}
		}
	}
	b.ReportMetric(now.Seconds()/b.Elapsed().Seconds(), "times-real")
}
