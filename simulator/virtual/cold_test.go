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

// TestReplayOfColdFleet: a fleet of which nothing is known yet is served well from its first
// second on, however slow it is. In the first 400 requests behind system prompts the 99th
// percentile is that of those few that come before anything is learned, and lmetric, which
// needs to know no speed, must not be better at them.
func TestReplayOfColdFleet(t *testing.T) {
	withoutRace(t)
	// The same traffic before engines so many times as slow, in so many times the time, is
	// the same to who knows that.
	for _, slow := range []float64{0.5, 1, 5} {
		fleet := &Fleet{Engines: slices.Repeat([]simulator.Config{{Profile: "h200-qwen-32b"}}, 4), Events: true, EventLag: time.Millisecond, Lag: 250 * time.Microsecond}
		for i := range fleet.Engines {
			fleet.Throttles = append(fleet.Throttles, workload.Throttle{Engine: i, Factor: slow})
		}
		const seeds = 6
		sum := 0.0
		for seed := uint64(1); seed <= seeds; seed++ {
			w, err := workload.Generate(workload.Options{Name: "w1", Seed: seed, Rate: 20, Requests: 400})
			if err != nil {
				t.Fatal(err)
			}
			w = w.Faster(1 / slow)
			p99 := func(p policy.Policy) float64 {
				o, err := fleet.Serve(t.Context(), w, p, Options{Seed: seed})
				if err != nil {
					t.Fatal(err)
				}
				s := workload.Summarize(o.Records, w, workload.SummaryOptions{Replicas: 4})
				return s.TTFT.P99
			}
			sum += math.Log(p99(policy.NewCostModel()) / p99(policy.LMetric{}))
		}
		ratio := math.Exp(sum / seeds)
		t.Logf("engines %v times as slow: %.2f times lmetric's 99th percentile", slow, ratio)
		if ratio > 1.05 {
			t.Errorf("engines %v times as slow: the 99th percentile is %.2f times that of lmetric", slow, ratio)
		}
	}
}
