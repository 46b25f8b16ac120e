package virtual

import (
	"slices"
	"testing"

	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/simulator"
	"github.com/inferrail/inferrail/simulator/workload"
)

// What an agent predicts of the slots of llama.cpp is what they find, but for part of a
// block and for who has to wait for one; and to go by it is no worse than to go by numbers
// of requests.
func TestServeSlots(t *testing.T) {
	for _, name := range []string{"w1", "w2", "w3", "w4"} {
		w, err := workload.Generate(workload.Options{Name: name, Seed: 3, Requests: 400})
		if err != nil {
			t.Fatal(err)
		}
		cfg := simulator.Config{Engine: "llamacpp", Profile: "h100-llama-8b", MaxModelLen: 100_000}
		mean := map[string]float64{}
		for _, p := range []policy.Policy{policy.NewCostModel(), policy.LeastRequest{}} {
			s := &scene{workload: w, policy: p, fleet: Fleet{Engines: slices.Repeat([]simulator.Config{cfg}, 8)}}
			o := s.serve(t)
			right := 0
			for k := range o.Records {
				r := &o.Records[k]
				if r.Cached/16*16 == r.PredictedCached {
					right++
				}
			}
			t.Logf("%s, %s: %d of %d predictions are right", name, p.Name(), right, len(o.Records))
			if right*100 < 93*len(o.Records) {
				t.Errorf("%s, %s: %d of %d predictions are right", name, p.Name(), right, len(o.Records))
			}
			mean[p.Name()] = workload.Summarize(o.Records, w, workload.SummaryOptions{Replicas: 8}).TTFT.Mean
		}
		if mean["cost_model"] > 1.05*mean["least_request"] { // where little is shared, chance has its part
			t.Errorf("%s: the mean time to first token is %v", name, mean)
		}
	}
}
