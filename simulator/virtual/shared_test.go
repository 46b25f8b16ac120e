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
// without end would; what is longer than an engine has room for fails, too.
func TestSharedOfWorkloads(t *testing.T) {
	cfg := reference()
	cfg.BlockSize, cfg.NumGPUBlocks, cfg.MaxModelLen = 16, 6001, 96000
	engines := slices.Repeat([]simulator.Config{cfg}, 3)
	f := func(name string, fleet Fleet, change func(w *workload.Workload)) *workload.Comparison {
		t.Helper()
		w, err := workload.Generate(workload.Options{Name: name, Seed: 1, Rate: 10, Requests: 150})
		if err != nil {
			t.Fatal(err)
		}
		if change != nil {
			change(w)
		}
		fleet.Events, fleet.Hold, fleet.Pieces = true, 50*time.Millisecond, 50*time.Millisecond
		p := &Plan{Seeds: []uint64{1, 2}, Policies: []string{"cost_model"}, Workloads: []*workload.Workload{w}, Engine: "some", Fleet: fleet}
		c, err := p.Compare(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	c := f("w6", Fleet{Engines: engines}, nil)
	if s, want := c.Shared, &c.Runs[0]; s.TTFT != want.TTFT || s.E2E != want.E2E || s.HitRate != 0 || s.Spread.TTFTMean != want.Spread.TTFTMean {
		t.Errorf("with nothing to share: %+v, want %+v", s, want)
	}
	c = f("w3", Fleet{Engines: engines, Agents: 2, Prewarm: 100 * time.Millisecond,
		Throttles: []workload.Throttle{{Engine: 0, Factor: 2, At: time.Second, Until: 5 * time.Second}},
		Admission: Admission{Mode: "absolute", Budget: time.Millisecond}}, nil)
	if s := c.Shared; s.Policy != "shared" || s.Failed+s.Refused > 0 || s.Requests != 150 || s.HitRate != c.Infinite || s.Spread.Runs != 2 {
		t.Errorf("it finds %v, want %v: %+v", s.HitRate, c.Infinite, s)
	}
	c = f("w6", Fleet{Engines: engines}, func(w *workload.Workload) { w.Requests[70].Parts = []workload.Part{{ID: 1, Tokens: 97_000}} })
	if c.Shared.Failed != 1 || c.Runs[0].Failed != 1 {
		t.Errorf("of a prompt that is too long %d and %d fail", c.Shared.Failed, c.Runs[0].Failed)
	}
	if c = f("w1", Fleet{Engines: []simulator.Config{cfg, {Engine: "llamacpp"}}}, nil); c.Shared != nil {
		t.Errorf("engines share single tokens: %+v", c.Shared)
	}
}
