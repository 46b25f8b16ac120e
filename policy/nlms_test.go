package policy

import (
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"time"
)

// dio is DIO as its description has it, with a replica's history in place of a
// state: y, the tokens and milliseconds of each response.
type dio struct {
	tokens, ms []float64
}

// learned plays the history again.
func (d *dio) learned() (fast, slow, b, ewma float64) {
	fast, slow, b = 0.1, 0.1, 50
	for i, n := range d.tokens {
		y := d.ms[i]
		e := y - ((0.8*fast+0.2*slow)*n + b)
		fast += 0.1 * e / n
		slow += 0.01 * e / n
		b += 0.005 * e
		fast, slow, b = math.Max(fast, 0.1), math.Max(slow, 0.1), math.Max(b, 0.1)
		if i == 0 {
			ewma = y
		} else {
			ewma = 0.9*ewma + 0.1*y
		}
	}
	return fast, slow, b, ewma
}

// score is S for a request of prompt tokens of which the replica c, with pending
// requests, has cached ones.
func (d *dio) score(prompt, maxTokens int, large, tiers bool, c *Candidate) float64 {
	n := float64(maxTokens)
	if maxTokens == 0 {
		n = 64
	}
	n += math.Max(1, float64(prompt))
	fast, slow, b, ewma := d.learned()
	y := (0.8*fast+0.2*slow)*n + b
	s := y
	if len(d.tokens) == 0 {
		s += float64(c.InFlight) / 8 * y
	} else {
		s += float64(c.InFlight) / 8 * ewma
	}
	if tiers && large && !c.Large {
		return math.Inf(1)
	}
	if tiers && !large && c.Large {
		s += 500
	}
	if c.VRAMTotal != 0 {
		if 0 < c.VRAMFree && c.VRAMFree < 2400 && n > 1000 {
			return math.Inf(1)
		}
		if c.VRAMFree < 4096 {
			s += 1000 * (1 - float64(c.VRAMFree)/float64(c.VRAMTotal))
		}
	}
	s += 800*float64(c.KV) + 50*float64(c.Queued) - 150*float64(c.HitRate)
	// In place of the 200 ms: the prefill that is saved.
	s -= 1000 * (c.Speed.Time(Prefill(prompt, 0)) - c.Speed.Time(Prefill(prompt-int(c.Cached), int(c.Cached))))
	return s
}

func TestNLMSIsDIO(t *testing.T) {
	p, _ := New("nlms", nil)
	rng := rand.New(rand.NewPCG(6, 12))
	excluded, tiered := 0, 0
	for n := range 3000 {
		r := &Request{Tokens: rng.IntN(6000), Output: rng.IntN(3) * rng.IntN(1000)}
		cs := make([]Candidate, 1+rng.IntN(8))
		learned := make([]dio, len(cs))
		tiers := false
		for i := range cs {
			c := &cs[i]
			var f Filter
			for range rng.IntN(3) * rng.IntN(12) {
				tokens, ms := 1+rng.IntN(5000), rng.Float64()*20e3
				learned[i].tokens = append(learned[i].tokens, float64(tokens))
				learned[i].ms = append(learned[i].ms, ms)
				f.Observe(tokens, ms/1e3)
			}
			c.Filter = f.State()
			c.InFlight, c.Queued = rng.Int32N(20), rng.Int32N(4)
			c.KV, c.HitRate = rng.Float32(), float32(rng.Float64())
			c.Large = rng.IntN(6) == 0
			tiers = tiers || c.Large
			if rng.IntN(2) == 0 {
				c.VRAMTotal, c.VRAMFree = 24e3, float32(rng.IntN(6))*1e3
			}
			c.Speed = Speed{rng.Float64() * 1e-4, rng.Float64() * 1e-9, rng.Float64() * 0.01}
			c.Cached = rng.Int32N(int32(r.Tokens) + 1)
		}
		output := r.Output
		if output == 0 {
			output = 64
		}
		large := max(r.Tokens, 1)+output >= 4096
		costs := make([]float64, len(cs))
		p.Score(r, cs, costs)
		for i := range cs {
			want := learned[i].score(r.Tokens, r.Output, large, tiers, &cs[i])
			if math.IsInf(want, 1) {
				excluded++
			}
			if !about(costs[i], want) && math.Abs(costs[i]-want) > 1e-6 {
				t.Fatalf("%d: %v, and DIO %v: %+v of %+v", n, costs[i], want, cs[i], r)
			}
		}
		if tiers {
			tiered++
		}
	}
	if excluded < 100 || tiered < 100 {
		t.Errorf("%d were excluded, and %d fleets had tiers", excluded, tiered)
	}
}

func TestTotal(t *testing.T) {
	f := func(tokens, output, want int) {
		t.Helper()
		if got := Total(&Request{Tokens: tokens, Output: output}); got != want {
			t.Errorf("%d and %d: %d, want %d", tokens, output, got, want)
		}
	}
	f(0, 0, 65)
	f(100, 0, 164)
	f(100, 1, 101)
	f(100, 900, 1000)
	f(-5, -5, 65)
	f(1<<17, 0, 1<<17)
	f(100, 1<<17, 1<<17)
	f(math.MaxInt, math.MaxInt, 1<<17)
	f(math.MinInt, math.MinInt, 65)
}

// What cannot be teaches nothing, and nobody's extremes break it.
func TestFilterTakesNoNonsense(t *testing.T) {
	var f Filter
	want := f.Observe(1000, 0.5)
	if want.Samples != 1 || want != f.State() {
		t.Errorf("%+v", want)
	}
	for _, seconds := range []float64{math.NaN(), math.Inf(1), math.Inf(-1), -1, 1e9} {
		if got := f.Observe(1000, seconds); got != want {
			t.Errorf("%v seconds: %+v", seconds, got)
		}
	}
	for _, tokens := range []int{0, -1, math.MinInt} {
		if got := f.Observe(tokens, 1); got != want {
			t.Errorf("%d tokens: %+v", tokens, got)
		}
	}
	for range 1000 {
		f.Observe(math.MaxInt, MostTTFT)
		f.Observe(1, MostTTFT)
		f.Observe(1, 0)
	}
	s := f.State()
	for _, x := range []float64{s.Fast, s.Slow, s.Offset} {
		if !(x >= 0.1) || math.IsInf(x, 1) {
			t.Errorf("%+v", s)
		}
	}
	if !(s.Mean >= 0) || math.IsInf(s.Mean, 1) {
		t.Errorf("%+v", s)
	}
}

// The filter follows a replica that becomes slow, and forgets.
func TestFilterFollows(t *testing.T) {
	var f Filter
	rng := rand.New(rand.NewPCG(6, 13))
	expected := func(n float64) float64 { s := f.State(); return s.predict(n) }
	feed := func(count int, slope float64) {
		for range count {
			n := 200 + rng.IntN(2000)
			f.Observe(n, (slope*float64(n)+50)/1e3)
		}
	}
	feed(300, 2)
	if got := expected(1000); got < 1900 || got > 2200 {
		t.Errorf("of 2,050 ms %v", got)
	}
	feed(40, 6)
	if got := expected(1000); got < 4500 {
		t.Errorf("of 6,050 ms %v, 40 responses later", got)
	}
	feed(300, 2)
	if got := expected(1000); got > 2300 {
		t.Errorf("of 2,050 ms again %v", got)
	}
}

// While one writes, readers see states that there have been, never a part of one
// and a part of another, and never an older one after a newer one.
func TestFilterIsReadWhole(t *testing.T) {
	var f Filter
	var mu sync.Mutex // guards states
	states := map[int]FilterState{0: {}}
	stop := make(chan struct{})
	var readers, writers sync.WaitGroup
	seen := make([]map[int]FilterState, 2)
	for i := range seen {
		seen[i] = map[int]FilterState{}
		readers.Go(func() {
			last := 0
			for {
				s := f.State()
				if s.Samples < last {
					t.Errorf("%d samples after %d", s.Samples, last)
					return
				}
				last = s.Samples
				if was, ok := seen[i][last]; ok && was != s {
					t.Errorf("%+v and %+v", was, s)
					return
				}
				seen[i][last] = s
				select {
				case <-stop:
					return
				default:
				}
			}
		})
	}
	for w := range 2 {
		writers.Go(func() {
			rng := rand.New(rand.NewPCG(6, uint64(w)))
			for range 2000 {
				s := f.Observe(1+rng.IntN(4000), rng.Float64()*10)
				mu.Lock()
				states[s.Samples] = s
				mu.Unlock()
			}
		})
	}
	writers.Wait()
	close(stop)
	readers.Wait()
	if len(states) != 4001 {
		t.Errorf("%d states", len(states))
	}
	for i := range seen {
		for samples, s := range seen[i] {
			if states[samples] != s {
				t.Fatalf("read %+v; there was %+v", s, states[samples])
			}
		}
	}
}

func TestFilterAllocatesNothing(t *testing.T) {
	var f Filter
	if n := testing.AllocsPerRun(100, func() { f.Observe(100, 0.1); f.State() }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// A wall clock's second is a thousand of the filter's milliseconds.
func TestFilterUnits(t *testing.T) {
	var f Filter
	f.Observe(1000, (1500 * time.Millisecond).Seconds())
	if s := f.State(); s.Mean != 1500 {
		t.Errorf("%+v", s)
	}
}
