package policy

import (
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
)

// shadowed is a decision between one replica that has the prompt and waits, and one
// that has nothing and is idle.
func shadowed() (*Request, []Candidate) {
	speed := Speed{A: 1e-3}
	return &Request{Tokens: 1000}, []Candidate{
		{Slot: 0, Key: 1, Cached: 1000, Wait: 3, Speed: speed},
		{Slot: 1, Key: 2, Speed: speed, InFlight: 5},
	}
}

// leastWait chooses the least wait: of shadowed, the second.
type leastWait struct{}

func (leastWait) Name() string { return "least_wait" }
func (leastWait) Score(_ *Request, candidates []Candidate, costs []float64) float64 {
	for i := range candidates {
		costs[i] = candidates[i].Wait
	}
	return 0
}

func TestShadow(t *testing.T) {
	r, candidates := shadowed()
	costs := make([]float64, 2)
	s := &Shadow{Policy: leastWait{}}
	if got := s.Regret(); got != (Regret{}) {
		t.Errorf("before any decision: %+v", got)
	}
	// The live policy takes the first, 3 s; the shadow would have taken 1 s.
	live, other := TTFT(r, &candidates[0]), TTFT(r, &candidates[1])
	if s.Judge(r, candidates, 0, costs) != 1 {
		t.Fatal("the shadow takes the one that waits")
	}
	// It has taken half a second more than was expected: that is the model's error,
	// not to the shadow's credit.
	s.Settle(live+0.5, live, other, false)
	// Then they agree, and the live choice being slow says nothing.
	if s.Judge(r, candidates, 1, costs) != 1 {
		t.Fatal("the shadow has changed its mind")
	}
	s.Settle(60, other, other, true)
	got := s.Regret()
	want := Regret{Decisions: 2, Agreed: 1, Predicted: live - other, PredictedBetter: live - other,
		Compared: 2, Observed: live + 0.5 - other, ObservedBetter: live + 0.5 - other, Error: 0.5}
	got.Low, got.Median, got.High = 0, 0, 0
	near := func(a, b float64) bool { return math.Abs(a-b) < 1e-6 }
	if got.Decisions != want.Decisions || got.Agreed != want.Agreed || got.Compared != want.Compared ||
		!near(got.Predicted, want.Predicted) || !near(got.PredictedBetter, want.PredictedBetter) || got.PredictedWorse != 0 ||
		!near(got.Observed, want.Observed) || !near(got.ObservedBetter, want.ObservedBetter) || got.ObservedWorse != 0 || !near(got.Error, want.Error) {
		t.Errorf("got %+v\nwant %+v", got, want)
	}

	// A shadow that does worse loses what it would have cost, and both sums only
	// grow, which counters must.
	s = &Shadow{Policy: LeastRequest{}}
	s.Judge(r, candidates, 1, costs) // it takes the one without requests, which waits
	s.Settle(other, other, live, false)
	if got := s.Regret(); !near(got.Predicted, other-live) || !near(got.PredictedWorse, live-other) || got.PredictedBetter != 0 ||
		!near(got.Observed, other-live) || !near(got.ObservedWorse, live-other) || got.Error != 0 {
		t.Errorf("a worse shadow: %+v", got)
	}
}

// What is no number is to nobody's credit, and what is no decision is not counted.
func TestShadowKeepsItsSums(t *testing.T) {
	r, candidates := shadowed()
	s := &Shadow{Policy: leastWait{}}
	costs := make([]float64, 2)
	for _, live := range []int{-1, 2} {
		if s.Judge(r, candidates, live, costs) != 1 {
			t.Error("the shadow does not choose")
		}
	}
	if s.Judge(r, nil, -1, nil) != -1 {
		t.Error("the shadow chooses among none")
	}
	if got := s.Regret(); got != (Regret{}) {
		t.Errorf("no decision is counted: %+v", got)
	}
	nan := math.NaN()
	s.Settle(nan, 1, 1, false)
	s.Settle(1, nan, nan, false)
	got := s.Regret()
	for _, sum := range []float64{got.Predicted, got.Observed, got.Error, got.Low, got.Median, got.High} {
		if sum != 0 {
			t.Errorf("%+v", got)
		}
	}

	// One absurd prediction counts for no more than a request that is given up.
	s = &Shadow{Policy: leastWait{}}
	for _, bad := range []float64{math.Inf(1), math.MaxFloat64} {
		candidates[0].Wait = bad
		s.Judge(r, candidates, 0, costs)
		s.Settle(bad, 1, 1, false)
		s.Settle(1, bad, bad, false)
	}
	if got := s.Regret(); got.Predicted != 2*mostRegret || got.ObservedBetter != 2*mostRegret || got.ObservedWorse != 2*mostRegret || got.Error != 0 {
		t.Errorf("%+v", got)
	}
}

// The percentiles against a plain slice of the same history.
func TestShadowPercentiles(t *testing.T) {
	s := &Shadow{Policy: leastWait{}}
	random := rand.New(rand.NewPCG(1, 2))
	var all []float64
	for range 1000 {
		x := float64(float32(random.NormFloat64()))
		s.Settle(x, 0, 0, false)
		all = append(all, x)
		last := slices.Clone(all[max(len(all)-len(s.last), 0):])
		slices.Sort(last)
		got := s.Regret()
		for _, p := range []struct{ got, percent float64 }{{got.Low, 10}, {got.Median, 50}, {got.High, 90}} {
			if want := last[int(float64(len(last)-1)*p.percent/100)]; p.got != want {
				t.Fatalf("after %d: percentile %v is %v, want %v", len(all), p.percent, p.got, want)
			}
		}
	}
}

func TestShadowFromManyGoroutines(t *testing.T) {
	r, candidates := shadowed()
	s := &Shadow{Policy: leastWait{}}
	var wg sync.WaitGroup
	for live := range 4 {
		wg.Go(func() {
			costs := make([]float64, 2)
			for range 500 {
				chosen := s.Judge(r, candidates, live%2, costs)
				s.Settle(1, 1, 1, chosen == live%2)
				s.Regret()
			}
		})
	}
	wg.Wait()
	if got := s.Regret(); got.Decisions != 2000 || got.Agreed != 1000 || got.Compared != 2000 {
		t.Errorf("%+v", got)
	}
}

func TestShadowAllocatesNothing(t *testing.T) {
	r, candidates := shadowed()
	s, costs := &Shadow{Policy: leastWait{}}, make([]float64, 2)
	if n := testing.AllocsPerRun(100, func() {
		s.Judge(r, candidates, 0, costs)
		s.Settle(1, 1, 1, false)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
