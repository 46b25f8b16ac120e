package virtual

import (
	"slices"
	"testing"
	"time"

	"github.com/inferrail/inferrail/simulator"
	"github.com/inferrail/inferrail/simulator/workload"
)

// What one engine has computed all find, in whole blocks, and as soon as it was asked for.
func TestShared(t *testing.T) {
	cfg := reference()
	cfg.BlockSize, cfg.NumGPUBlocks, cfg.MaxModelLen = 16, 6001, 96000
	document := workload.Part{ID: 1, Tokens: 1000}
	w := &workload.Workload{Requests: []workload.Request{
		{At: 0, Output: 50, Parts: []workload.Part{document, {ID: 2, Tokens: 100}}},
		{At: time.Millisecond, Output: 50, Parts: []workload.Part{document, {ID: 3, Tokens: 100}}},
		{At: time.Second, Output: 50, Parts: []workload.Part{document, {ID: 2, Tokens: 100}}},
		{At: 2 * time.Second, Output: 50, Parts: []workload.Part{{ID: 4, Tokens: 100}}},
	}}
	f := Fleet{Engines: slices.Repeat([]simulator.Config{cfg}, 4)}
	o, err := f.Shared(t.Context(), w, NewChains(w, 16, 0), Options{})
	if err != nil {
		t.Fatal(err)
	}
	for k, want := range []int{0, 62 * 16, 68 * 16, 0} {
		r := &o.Records[k]
		latency := f.latencies()[r.Replica]
		if r.Cached != want || r.PredictedCached != want || r.Output != 50 || r.Failure != "" {
			t.Errorf("request %d: %+v, want %d tokens cached", k, r, want)
		}
		// The second finds a replica that is idle, though what it finds is being computed.
		if got, want := r.First-r.Scheduled, latency.Prefill(r.Input-want, want); got != want {
			t.Errorf("request %d has its first token after %v, want %v", k, got, want)
		}
	}
	if o.Records[0].Replica == o.Records[1].Replica {
		t.Error("the second waits behind the first")
	}
}

// Where nothing is shared it makes no difference, and where all is it finds what a cache
// without end would, on engines of any kind.
func TestSharedOfWorkloads(t *testing.T) {
	f := func(name string, engines []simulator.Config, check func(c *workload.Comparison)) {
		t.Helper()
		w, err := workload.Generate(workload.Options{Name: name, Seed: 1, Rate: 10, Requests: 150})
		if err != nil {
			t.Fatal(err)
		}
		p := &Plan{Seeds: []uint64{1}, Policies: []string{"cost_model"}, Workloads: []*workload.Workload{w}, Engine: "some",
			Fleet: Fleet{Engines: engines, Agents: 2, Events: true, Hold: 50 * time.Millisecond, Pieces: 100 * time.Millisecond, Prewarm: 100 * time.Millisecond,
				Throttles: []workload.Throttle{{Engine: 0, Factor: 2, At: time.Second, Until: 5 * time.Second}},
				Admission: Admission{Mode: "absolute", Budget: time.Millisecond}}}
		if name == "w6" {
			p.Fleet.Agents, p.Fleet.Pieces, p.Fleet.Admission = 1, 0, Admission{}
		}
		c, err := p.Compare(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if s := c.Shared; s.Policy != "shared" || s.Failed+s.Refused > 0 || s.Requests != 150 {
			t.Errorf("%s: %+v", name, s)
		}
		check(c)
	}
	cfg := reference()
	cfg.BlockSize, cfg.NumGPUBlocks, cfg.MaxModelLen = 16, 6001, 96000
	f("w6", slices.Repeat([]simulator.Config{cfg}, 2), func(c *workload.Comparison) {
		if c.Shared.TTFT != c.Runs[0].TTFT || c.Shared.E2E != c.Runs[0].E2E || c.Shared.HitRate != 0 {
			t.Errorf("with nothing to share: %+v, want %+v", c.Shared, c.Runs[0])
		}
	})
	f("w3", slices.Repeat([]simulator.Config{cfg}, 3), func(c *workload.Comparison) {
		if c.Shared.HitRate != c.Infinite || c.Shared.EngineHitRate < c.Runs[0].EngineHitRate {
			t.Errorf("it finds %v, want %v", c.Shared.HitRate, c.Infinite)
		}
	})
	var kinds []simulator.Config
	for _, engine := range []string{"vllm", "sglang", "tgi", "llamacpp", "ollama"} {
		kinds = append(kinds, simulator.Config{Engine: engine})
	}
	f("w1", kinds, func(c *workload.Comparison) {
		if c.Shared.HitRate < 0.5 {
			t.Errorf("of all kinds: %+v", c.Shared)
		}
	})
}
