package virtual

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/simulator"
	"github.com/inferrail/inferrail/simulator/workload"
)

// reference is the engine that the numbers of other programs were found with: prompts
// one after the other, a cache of 4,000 blocks, and decoding in nobody's way.
func reference() simulator.Config {
	return simulator.Config{Profile: "reference", MaxModelLen: 4000 * 512}
}

// figures are those of a row in the table of another program.
type figures struct{ hit, p50, p99, mean float64 }

// near compares got with want, of which 0 is not known, and says by how much they differ.
func (f figures) near(t *testing.T, what string, want, by figures) {
	t.Helper()
	compare := func(which string, got, want, by float64) {
		if want > 0 && math.Abs(got/want-1) > by {
			t.Errorf("%s: %s is %.4g, want %.4g within %.0f %%", what, which, got, want, 100*by)
		}
	}
	compare("hit rate", f.hit, want.hit, by.hit)
	compare("median", f.p50, want.p50, by.p50)
	compare("99th percentile", f.p99, want.p99, by.p99)
	compare("mean", f.mean, want.mean, by.mean)
}

func figuresOf(s *workload.Summary) figures {
	return figures{s.HitRate, s.TTFT.P50, s.TTFT.P99, s.TTFT.Mean}
}

// inTurns is round robin as that program had it. RoundRobin begins its rounds at
// other places now and then.
type inTurns struct{ policy.RoundRobin }

func (inTurns) Score(r *policy.Request, candidates []policy.Candidate, costs []float64) float64 {
	for i := range candidates {
		costs[i] = 1
	}
	costs[(r.Turn-1)%uint64(len(candidates))] = 0
	return 0
}

// TestReplayOfReference: the numbers that another program has found with a simpler
// engine, for eight replicas on the Mooncake traces, are found again, by agents that have
// to learn how fast the engines are, and follow their events. That program counts blocks
// that are not full among those that could be cached.
func TestReplayOfReference(t *testing.T) {
	withoutRace(t)
	fleet := &Fleet{Engines: slices.Repeat([]simulator.Config{reference()}, 8), Events: true, EventLag: time.Millisecond}
	conversation, synthetic := readPacked(t, "conversation"), readPacked(t, "synthetic")
	by := figures{0.06, 0.05, 0.08, 0.05}
	serve := func(t *testing.T, fleet *Fleet, w *workload.Workload, p policy.Policy) workload.Summary {
		t.Parallel()
		o, err := fleet.Serve(t.Context(), w, p, Options{})
		if err != nil {
			t.Fatal(err)
		}
		s := workload.Summarize(o.Records, w, workload.SummaryOptions{Replicas: 8})
		t.Logf("%s, %s: %+v", w.Name, p.Name(), figuresOf(&s))
		return s
	}
	slow := *fleet
	slow.Throttles = []workload.Throttle{{Factor: 2}}
	f := func(w *workload.Workload, p policy.Policy, want figures) {
		t.Run(w.Name+" "+p.Name(), func(t *testing.T) {
			s := serve(t, fleet, w, p)
			if s.Failed > 0 || s.Hotspot > 1.1 {
				t.Errorf("%d have failed, the hotspot is %.2f", s.Failed, s.Hotspot)
			}
			figuresOf(&s).near(t, w.Name+", "+p.Name(), want, by)
		})
	}
	f(conversation, inTurns{}, figures{.100, 649, 13165, 1577})
	f(synthetic, inTurns{}, figures{.166, 1092, 27915, 2362})
	f(conversation, policy.LeastRequest{}, figures{.095, 792, 13113, 1650})
	f(conversation.Faster(1.8), policy.LeastRequest{}, figures{.099, 1355, 15495, 2632})
	f(conversation, policy.LMetric{}, figures{.287, 315, 7856, 762})
	f(conversation.Faster(1.8), policy.LMetric{}, figures{.270, 393, 9432, 892})
	f(synthetic, policy.LMetric{}, figures{.585, 36, 4703, 502})

	// The default is at least as good as the best of that table, but for what learning
	// costs it.
	g := func(name string, fleet *Fleet, w *workload.Workload, most figures, hotspot float64) {
		t.Run(w.Name+name, func(t *testing.T) {
			s := serve(t, fleet, w, policy.NewCostModel())
			if most.mean > 0 && s.TTFT.Mean > 1.03*most.mean || s.TTFT.P99 > 1.08*most.p99 || s.HitRate < 0.97*most.hit {
				t.Errorf("the default has %+v, want at least %+v", figuresOf(&s), most)
			}
			if s.Hotspot > hotspot {
				t.Errorf("the hotspot is %.2f, want at most %v", s.Hotspot, hotspot)
			}
		})
	}
	g("", fleet, conversation, figures{.296, 0, 7507, 729}, 1.06)
	g("", fleet, conversation.Faster(1.8), figures{.279, 0, 7734, 797}, 1.06)
	g("", fleet, synthetic, figures{.624, 0, 4330, 464}, 1.08)
	g(", one twice as slow", &slow, conversation, figures{p99: 7664}, 1.2)
}

// TestReplayOfBounds: what no choice can be better than is what was found elsewhere.
func TestReplayOfBounds(t *testing.T) {
	withoutRace(t)
	fleet := &Fleet{Engines: slices.Repeat([]simulator.Config{reference()}, 8)}
	f := func(w *workload.Workload, want figures, infinite, blocks float64) {
		t.Helper()
		c := NewChains(w, 512, 0)
		records := fleet.Bound(w, c)
		s := workload.Summarize(records, w, workload.SummaryOptions{Replicas: 8})
		figuresOf(&s).near(t, w.Name, want, figures{0, 0.08, 0.02, 0.01})
		if got := c.Infinite(); math.Abs(got-infinite) > 0.001 {
			t.Errorf("%s: a cache that never forgets has %.4f, want %.4f", w.Name, got, infinite)
		}
		if least := milliseconds(fleet.Least(records, 0)); least > s.TTFT.Mean || least < s.TTFT.Mean/2 {
			t.Errorf("%s: the least mean is %.0f ms, the bound %.0f", w.Name, least, s.TTFT.Mean)
		}
		if s.HitRate != c.Infinite() || c.Ceiling(c.blocks) != c.Infinite() || c.Pooled(c.blocks) != c.Infinite() {
			t.Errorf("%s: with room for all, hits are %v, %v and %v of %v", w.Name, s.HitRate, c.Ceiling(c.blocks), c.Pooled(c.blocks), c.Infinite())
		}
		// Of blocks, those that are not full among them.
		known, seen, all := map[uint64]bool{}, 0, 0
		for i := range w.Requests {
			for _, p := range w.Requests[i].Parts {
				all++
				if known[p.ID] {
					seen++
				}
				known[p.ID] = true
			}
		}
		if got := float64(seen) / float64(all); math.Abs(got-blocks) > 0.0005 {
			t.Errorf("%s: %.4f of all blocks were seen before, want %.4f", w.Name, got, blocks)
		}
	}
	conversation, synthetic := readPacked(t, "conversation"), readPacked(t, "synthetic")
	f(conversation, figures{p50: 229, p99: 6983, mean: 627}, 0.3734, 0.366)
	f(conversation.Faster(1.8), figures{p50: 264, p99: 7113, mean: 657}, 0.3734, 0.366)
	f(synthetic, figures{p50: 31, p99: 4228, mean: 412}, 0.6504, 0.640)
}
