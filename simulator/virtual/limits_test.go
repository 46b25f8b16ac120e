package virtual

import (
	"math"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/simulator"
	"github.com/inferrail/inferrail/simulator/workload"
)

// tiny draws a workload of few blocks of a token, so that all that a cache could keep can
// be tried.
func tiny(rng *rand.Rand) *workload.Workload {
	w := &workload.Workload{}
	for k := range 3 + rng.IntN(7) {
		q := workload.Request{At: time.Duration(k) * time.Second, Output: 1}
		for depth := range 1 + rng.IntN(4) {
			q.Parts = append(q.Parts, workload.Part{ID: uint64(1 + depth*2 + rng.IntN(2)), Tokens: 1})
		}
		w.Requests = append(w.Requests, q)
	}
	return w
}

// mostHits tries whatever a cache of so many blocks could keep after each request, with a
// part of a prompt being found only with all before it, and returns the most hits.
func mostHits(c *Chains, room int) int {
	best := map[uint32]int{0: 0} // by what is kept
	for k, blocks := range c.of {
		next := map[uint32]int{}
		for kept, hits := range best {
			for i := range c.asked[k] {
				if kept>>blocks[i]&1 == 0 {
					break
				}
				hits++
			}
			have := kept
			for _, b := range blocks {
				have |= 1 << b
			}
			// All parts of what it has now.
			for part := have; ; part = (part - 1) & have {
				if bits.OnesCount32(part) <= room {
					if was, known := next[part]; !known || hits > was {
						next[part] = hits
					}
				}
				if part == 0 {
					break
				}
			}
		}
		best = next
	}
	most := 0
	for _, hits := range best {
		most = max(most, hits)
	}
	return most
}

// The ceiling is what the best of all choices has, of which none is left out.
func TestCeilingIsTheMost(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	below := 0
	for range lessUnderRace(t, 150, 20) {
		w := tiny(rng)
		c := NewChains(w, 1, 0)
		if c.blocks > 12 {
			continue
		}
		for room := range c.blocks + 1 {
			got, want := c.Ceiling(room), c.rate(mostHits(c, room))
			if got != want {
				t.Fatalf("%v, %v with room for %d: %v, want %v", c.of, c.asked, room, got, want)
			}
			if lru := c.Pooled(room); lru > got {
				t.Fatalf("%v with room for %d: what was used last has %v, and the most is %v", c.of, room, lru, got)
			} else if lru < got {
				below++
			}
		}
	}
	if below == 0 {
		t.Error("to know the future is of no use")
	}
}

// What comes in the beginning fills caches and is not counted.
func TestChainsWarm(t *testing.T) {
	ask := func(at time.Duration, ids ...uint64) workload.Request {
		q := workload.Request{At: at, Output: 1}
		for _, id := range ids {
			q.Parts = append(q.Parts, workload.Part{ID: id, Tokens: 10})
		}
		return q
	}
	w := &workload.Workload{Requests: []workload.Request{ask(0, 1, 2, 9), ask(time.Second, 1, 2, 9), ask(2*time.Second, 1, 3, 9)}}
	f := func(warm time.Duration, want float64) {
		t.Helper()
		c := NewChains(w, 10, warm)
		if c.Infinite() != want || c.Ceiling(100) != want || c.Pooled(100) != want {
			t.Errorf("warm for %v: %v, %v and %v, want %v", warm, c.Infinite(), c.Ceiling(100), c.Pooled(100), want)
		}
	}
	f(0, 30.0/90) // the last token of a prompt is computed, and with it its block
	f(time.Second, 30.0/60)
	f(1500*time.Millisecond, 10.0/30)
	f(time.Hour, 0)
}

// Real runs with requests far enough apart to be looked up in the order in which they
// come have fewer hits than the ceiling, whoever chooses, and one cache of all capacity
// that is used by one engine has as many as Pooled says.
func TestCeilingOfRuns(t *testing.T) {
	for _, name := range []string{"w1", "w2", "w4"} {
		w, err := workload.Generate(workload.Options{Name: name, Rate: 0.05, Requests: 80, Seed: 3, Longest: 3000, Output: 20})
		if err != nil {
			t.Fatal(err)
		}
		w.Requests = slices.Clone(w.Requests)
		for i := range w.Requests {
			w.Requests[i].At = time.Duration(i) * time.Minute
		}
		const size = 16
		cfg := reference()
		cfg.BlockSize, cfg.NumGPUBlocks, cfg.MaxModelLen = size, 601, 600*size
		chains := NewChains(w, size, 0)
		most := chains.Ceiling(3 * 600)
		for _, p := range []policy.Policy{policy.RoundRobin{}, policy.LMetric{}, policy.NewCostModel()} {
			s := &scene{workload: w, policy: p, fleet: Fleet{Engines: slices.Repeat([]simulator.Config{cfg}, 3), Events: true}}
			sum := workload.Summarize(s.serve(t).Records, w, workload.SummaryOptions{Replicas: 3})
			if sum.HitRate > most {
				t.Errorf("%s, %s: %v of the tokens were cached, at most %v can be", name, p.Name(), sum.HitRate, most)
			}
		}
		s := &scene{workload: w, policy: policy.RoundRobin{}, fleet: Fleet{Engines: []simulator.Config{cfg}}}
		got := workload.Summarize(s.serve(t).Records, w, workload.SummaryOptions{}).HitRate
		// The blocks of the one that runs are in use, and not to be given up.
		if want := chains.Pooled(600); math.Abs(got-want) > 0.01 {
			t.Errorf("%s: one engine has %v, a cache of its size %v", name, got, want)
		}
	}
}

// The least mean is what an engine as fast as all has that is stepped in small pieces,
// always at the prompt of which the least is left; and no order of prompts at one engine
// has less.
func TestLeast(t *testing.T) {
	rng := rand.New(rand.NewPCG(2, 2))
	cfg := reference()
	for range 40 {
		w := &workload.Workload{}
		at := time.Duration(0)
		for k := range 2 + rng.IntN(5) {
			at += time.Duration(rng.IntN(200)) * time.Millisecond
			w.Requests = append(w.Requests, workload.Request{At: at, Output: 1, Parts: []workload.Part{{ID: uint64(k + 1), Tokens: 100 + rng.IntN(5000)}}})
		}
		n := 1 + rng.IntN(3)
		f := &Fleet{Engines: slices.Repeat([]simulator.Config{cfg}, n)}
		records := f.Bound(w, NewChains(w, 512, 0))
		const step = 1e-5
		left, sum, own, over := make([]float64, len(records)), 0.0, 0.0, 0
		for k := range records {
			left[k] = records[k].Computed.Seconds()
			own += left[k]
		}
		for now := 0.0; over < len(records); now += step {
			best := -1
			for k := range records {
				if records[k].Scheduled.Seconds() <= now && left[k] > 0 && (best < 0 || left[k] < left[best]) {
					best = k
				}
			}
			if best < 0 {
				continue
			}
			if left[best] -= step * float64(n); left[best] <= 0 {
				sum += now + step - records[best].Scheduled.Seconds()
				over++
			}
		}
		got := f.Least(records, 0).Seconds() * float64(len(records))
		if want := max(sum, own); math.Abs(got-want) > 5*step*float64(len(records)) {
			t.Fatalf("%d engines, %+v: the sum is %v, want %v", n, w.Requests, got, want)
		}
		if n > 1 {
			continue
		}
		order := make([]int, len(records))
		for i := range order {
			order[i] = i
		}
		permutations(order, 0, func() {
			now, sum := 0.0, 0.0
			for _, k := range order {
				now = max(now, records[k].Scheduled.Seconds()) + records[k].Computed.Seconds()
				sum += now - records[k].Scheduled.Seconds()
			}
			if sum < got-1e-6 {
				t.Fatalf("%+v in the order %v: the sum is %v, the least was %v", w.Requests, order, sum, got)
			}
		})
	}
}

// permutations calls f with each order of list.
func permutations(list []int, from int, f func()) {
	if from == len(list) {
		f()
		return
	}
	for i := from; i < len(list); i++ {
		list[from], list[i] = list[i], list[from]
		permutations(list, from+1, f)
		list[from], list[i] = list[i], list[from]
	}
}

// A fleet's bound is what it does itself when nothing is shared, all cost the same and
// each request goes to an idle engine; one engine that is slow for good is slow there,
// too.
func TestBoundOfFleets(t *testing.T) {
	w := &workload.Workload{}
	for k := range 40 {
		w.Requests = append(w.Requests, workload.Request{At: time.Duration(k) * 100 * time.Millisecond, Output: 3, Parts: []workload.Part{{ID: uint64(k + 1), Tokens: 2000}}})
	}
	f := func(slow float64, replicas int) {
		t.Helper()
		fleet := Fleet{Engines: slices.Repeat([]simulator.Config{reference()}, replicas)}
		for i := range replicas {
			fleet.Throttles = append(fleet.Throttles, workload.Throttle{Engine: i, Factor: slow})
		}
		o := (&scene{workload: w, policy: policy.LeastRequest{}, fleet: fleet}).serve(t)
		for k, b := range fleet.Bound(w, NewChains(w, 512, 0)) {
			if r := o.Records[k]; r.First != b.First || r.End != b.End || r.Computed != b.Computed {
				t.Fatalf("%v times slower, request %d: served from %v to %v, the bound is %v to %v", slow, k, r.First, r.End, b.First, b.End)
			}
		}
	}
	f(1, 4)
	f(2, 6)
}
