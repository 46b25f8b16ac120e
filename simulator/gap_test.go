package simulator

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// TestGapsAgainstTokens: what an engine that jumps counts between tokens is what one sees
// who looks at each token as it comes, in random histories of all engines in little room:
// sequences that begin, leave, are preempted and throttled.
func TestGapsAgainstTokens(t *testing.T) {
	preempted, counted := 0, 0
	for seed := range uint64(100) {
		for _, engine := range engines {
			cfg := Config{Engine: engine, BlockSize: 4, NumGPUBlocks: 40, MaxNumSeqs: 4, MaxNumBatchedTokens: 16, ChunkedPrefillSize: 16,
				MaxBatchPrefillTokens: 32, PrefillA: 1000, TimePerOutputToken: 10 * time.Millisecond, KVReadNS: 1000 * float64(seed%3), NoAsyncScheduling: seed%2 == 0}
			history := func(advance func(e *Engine, until time.Duration, all []*Sequence)) (*Gaps, *Engine) {
				e, err := cfg.NewEngine()
				if err != nil {
					t.Fatal(err)
				}
				g := new(Gaps)
				e.Measure(g)
				r := rand.New(rand.NewPCG(seed, 3))
				var all []*Sequence
				now := time.Duration(0)
				for range 40 {
					now += time.Duration(r.IntN(120_000_000))
					advance(e, now, all)
					switch r.IntN(8) {
					case 0:
						if len(all) > 0 {
							e.Depart(all[r.IntN(len(all))], now)
						}
					case 1:
						e.Slow(1+float64(r.IntN(3)), now+time.Duration(r.IntN(20_000_000)))
					default:
						s := &Sequence{Prompt: make([]uint32, 1+r.IntN(30)), Output: 1 + r.IntN(60), Stops: r.IntN(2) == 0, Timed: r.IntN(4) > 0, Slow: float64(r.IntN(3))}
						for i := range s.Prompt {
							s.Prompt[i] = r.Uint32N(2) * uint32(i%5/4)
						}
						s.Said = make([]uint32, s.Output)
						if e.Fits(len(s.Prompt) + s.Output) {
							all = append(all, s)
							e.Arrive(s, now)
						}
					}
				}
				advance(e, now+time.Hour, all)
				return g, e
			}
			got, e := history(func(e *Engine, until time.Duration, _ []*Sequence) { e.Advance(until) })
			preempted += e.Counts().Preempted

			var want []time.Duration
			made, last := map[*Sequence]int{}, map[*Sequence]time.Duration{}
			history(func(e *Engine, until time.Duration, all []*Sequence) {
				look := func(now time.Duration) {
					e.Advance(now)
					for _, s := range all {
						for made[s] < e.Made(s) {
							if made[s]++; made[s] > 1 && s.Timed {
								want = append(want, now-last[s])
							}
							last[s] = now
						}
					}
				}
				before := time.Duration(-1)
				for at, ok := e.Token(); ok && at <= until; at, ok = e.Token() {
					if at <= before {
						t.Fatalf("%s, seed %d: at %v the next token, or the end of a step, is at %v", engine, seed, before, at)
					}
					before = at
					look(at)
				}
				look(until)
			})
			slices.Sort(want)
			counted += len(want)
			name := fmt.Sprintf("%s, seed %d", engine, seed)
			if got.Count() != len(want) {
				t.Fatalf("%s: %d times between tokens, want %d", name, got.Count(), len(want))
			}
			if len(want) == 0 {
				continue
			}
			sum := time.Duration(0)
			for _, d := range want {
				sum += d
			}
			near := func(what string, got, want, by time.Duration) {
				if d := got - want; d > by || d < -by {
					t.Errorf("%s: %s is %v, want %v", name, what, got, want)
				}
			}
			near("the mean", got.Mean(), sum/time.Duration(len(want)), 2)
			near("the longest", got.Longest(), want[len(want)-1], 2)
			percents := []int{0, 1, 50, 90, 99, 100}
			for i, q := range got.Quantiles(percents...) {
				near(fmt.Sprint("percentile ", percents[i]), q, want[max(1, (len(want)*percents[i]+99)/100)-1], 502)
			}
		}
	}
	if preempted < 100 || counted < 50_000 {
		t.Errorf("only %d were preempted, and %d times counted", preempted, counted)
	}
}

// Times that grow are counted each where it belongs, as if they were added one by one.
func TestGapsThatGrow(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		var one, many Gaps
		for range 3 {
			gap, times, weight := r.Int64N(1<<r.IntN(34)), 1+r.Int64N(200), r.Int64N(4)
			drift := r.Int64N(1<<r.IntN(24)) - 1
			if drift < 0 {
				drift = -min(gap/times, 1000)
			}
			many.add(gap, drift, times, weight)
			for k := range times {
				one.add(gap+k*drift, 0, 1, weight)
			}
		}
		percents := []int{1, 10, 50, 90, 99, 100}
		if got, want := many.Quantiles(percents...), one.Quantiles(percents...); !slices.Equal(got, want) || many.Count() != one.Count() || many.Longest() != one.Longest() || many.Mean() != one.Mean() {
			t.Fatalf("%v of %d, mean %v; want %v of %d, mean %v", got, many.Count(), many.Mean(), want, one.Count(), one.Mean())
		}
	}
	var none Gaps
	if got := none.Quantiles(50, 99); none.Count() != 0 || none.Mean() != 0 || none.Longest() != 0 || !slices.Equal(got, []time.Duration{0, 0}) {
		t.Errorf("%v of none", got)
	}
}
