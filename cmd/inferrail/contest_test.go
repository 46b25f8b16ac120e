package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/inferrail/inferrail/bench"
	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/simulator"
	"github.com/inferrail/inferrail/simulator/virtual"
	"github.com/inferrail/inferrail/simulator/workload"
)

// contest is one of `inferrail bench compare`, whose engines and agents are the program as it is used.
func contest(t *testing.T, name string, rate float64, requests, replicas int, policies ...string) *bench.Contest {
	return &bench.Contest{
		Traffic: bench.Traffic{Workload: name, Rate: rate, Requests: requests, Speed: 1, TTFTLimit: 2 * time.Second, TPOTLimit: 100 * time.Millisecond},
		// Whether the machine keeps up is not what is tested.
		Asking:   bench.Asking{Stream: true, Exact: true, Timeout: time.Minute, MaxAtOnce: 1000, MaxLag: time.Hour, MaxBusy: 2},
		Policies: policies, Seeds: 1, Seed: 1, Attempts: 1, Replicas: replicas, Datapath: "copy",
		Engine: "vllm", KVBlocks: 4000, BlockSize: 16, MaxSeqs: 64, Events: true,
		JSON:    filepath.Join(t.TempDir(), "comparison.json"),
		Program: []string{asUsed(t)},
		Stdout:  new(bytes.Buffer), Stderr: new(bytes.Buffer),
	}
}

// run runs a contest and returns what it has written.
func runContest(t *testing.T, c *bench.Contest) (comparison workload.Comparison) {
	t.Helper()
	if err := c.Run(t.Context()); err != nil {
		t.Fatalf("%v\n%s\n%s", err, c.Stdout, c.Stderr)
	}
	b, err := os.ReadFile(c.JSON)
	if err == nil {
		err = json.Unmarshal(b, &comparison)
	}
	if err != nil {
		t.Fatal(err)
	}
	return comparison
}

// A comparison gives each policy the same requests, and fresh engines: what requests
// were told of the caches is what all engines have counted, who count what is computed ahead
// too, if anything is.
func TestContest(t *testing.T) {
	t.Parallel()
	c := contest(t, "w1", 40, 80, 2, "round_robin", "cost_model")
	c.Seeds, c.Plot, c.Records = 2, filepath.Join(t.TempDir(), "charts"), filepath.Join(t.TempDir(), "records")
	c.Routing = "prewarm: off"
	c.Simulated = simulator.Config{PrefillA: 5, PrefillD: 500, TimePerOutputToken: 500 * time.Microsecond}
	comparison := runContest(t, c)
	if comparison.Face != "http" || comparison.Replicas != 2 || !slices.Equal(comparison.Seeds, []uint64{1, 2}) || len(comparison.Runs) != 2 || len(comparison.All) != 4 {
		t.Fatalf("%+v", comparison)
	}
	for i, policy := range []string{"round_robin", "cost_model"} {
		median, runs := comparison.Runs[i], comparison.All[2*i:2*i+2]
		if median.Policy != policy || median.Spread.Runs != 2 {
			t.Errorf("medians %+v", median)
		}
		for _, s := range runs {
			if s.Policy != policy || s.Requests != 80 || s.Failed+s.Refused != 0 || len(s.Failures) != 0 {
				t.Errorf("%+v", s)
			}
			if len(s.Replicas) != 2 || s.Replicas[0]+s.Replicas[1] != 80 {
				t.Errorf("%s: requests of the replicas %v", policy, s.Replicas)
			}
			if math.Abs(s.HitRate-s.EngineHitRate) > 1e-9 {
				t.Errorf("%s: %v were cached by what answers say, %v by the engines' counters", policy, s.HitRate, s.EngineHitRate)
			}
			if s.HitRate < 0.2 || s.TTFT.P50 <= 0 || s.E2E.P50 < s.TTFT.P50 || s.Prediction <= 0 || s.Good <= 0 {
				t.Errorf("%+v", s)
			}
		}
	}
	if got := c.Stdout.(*bytes.Buffer).String(); !strings.Contains(got, "round_robin") || !strings.Contains(got, "cost_model") {
		t.Errorf("table %s", got)
	}
	for _, name := range []string{"round_robin-1", "round_robin-2", "cost_model-1", "cost_model-2"} {
		lines, err := os.ReadFile(filepath.Join(c.Records, name+".jsonl"))
		if n := bytes.Count(lines, []byte("\n")); err != nil || n != 80 {
			t.Errorf("%s: %d records, %v", name, n, err)
		}
	}
	if charts, err := filepath.Glob(filepath.Join(c.Plot, "*.svg")); err != nil || len(charts) == 0 {
		t.Errorf("charts %v, %v", charts, err)
	}
	// The seed that comes second begins with the second policy.
	progress := c.Stderr.(*bytes.Buffer).String()
	for _, line := range []string{"[1/4] round_robin, seed 1", "[2/4] cost_model, seed 1", "[3/4] cost_model, seed 2", "[4/4] round_robin, seed 2"} {
		if !strings.Contains(progress, line+": first token") {
			t.Errorf("no %q in\n%s", line, progress)
		}
	}
}

// A contest may be about admission: requests that are refused are told apart from those
// that fail, and are not good.
func TestContestWithAdmission(t *testing.T) {
	c := contest(t, "w6", 100, 60, 1, "cost_model")
	c.Simulated = simulator.Config{PrefillA: 60, PrefillD: 5000, TimePerOutputToken: 200 * time.Microsecond}
	c.Routing, c.Budget = "admission: {mode: absolute}", 300*time.Millisecond
	s := runContest(t, c).Runs[0]
	if s.Refused == 0 || s.Failed != 0 || s.Failures[workload.Refused] != s.Refused || s.Replicas[0] != s.Requests-s.Refused || s.Good > float64(s.Requests-s.Refused)/float64(s.Requests) {
		t.Errorf("%+v", s)
	}
}

// What cannot be run is an error that says what to do.
func TestContestFailure(t *testing.T) {
	f := func(change func(*bench.Contest), want string) {
		t.Helper()
		c := contest(t, "w1", 100, 5, 1, "round_robin")
		change(c)
		if err := c.Run(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	f(func(c *bench.Contest) { c.Policies = []string{"round_robin", "best"} }, `--policies: no policy "best"; there are cost_model`)
	f(func(c *bench.Contest) { c.Policies = []string{"cost_model:own_work=2"} }, "weights are for --routing")
	f(func(c *bench.Contest) { c.JSON = filepath.Join(c.JSON, "none", "a.json") }, "--json: open ")
	f(func(c *bench.Contest) { c.Plot = "/proc/charts" }, "mkdir /proc/charts")
	f(func(c *bench.Contest) { c.Policies = nil }, "nothing to compare")
	f(func(c *bench.Contest) { c.Workload = "w9" }, `there is no workload "w9"`)
	f(func(c *bench.Contest) { c.Replicas = 0 }, "--replicas must be 1 to 64, got 0")
	f(func(c *bench.Contest) { c.Seeds = 0 }, "--seeds and --attempts must be at least 1, got 0 and 1")
	f(func(c *bench.Contest) { c.Profile = "best" }, "--profile: profile must be one of reference, ")
	f(func(c *bench.Contest) { c.MaxLag = 0 }, "--max-lag 0s: want a time above 0")
	f(func(c *bench.Contest) { c.KVBlocks = 20 }, "max-model-len")
	f(func(c *bench.Contest) { c.MaxLag = time.Nanosecond }, "the figures should not be relied on")
}

// Virtual time and HTTP are two ways to the same engines and the same decisions: the
// median time to the first token is the same, and where the policy is one of turns, so is
// who serves what. What is served in virtual time comes when it was sent over HTTP, so
// that the schedule may be kept badly. Each prompt takes long enough that what sockets
// take is little beside it. A first token passes from process to process six times, each
// of which may have to wait for a CPU as long as a request that was due: that much more
// may be the difference.
func TestVirtualTimeAndHTTPAgree(t *testing.T) {
	withoutRace(t)
	const requests, replicas, tries = 150, 5, 6
	const rate = 12
	engine := simulator.Config{PrefillA: 60, PrefillB: 0.002, PrefillD: 120_000, TimePerOutputToken: time.Millisecond,
		NumGPUBlocks: 4000, BlockSize: 16, MaxNumSeqs: 64, MaxModelLen: 32768}
	w, err := workload.Generate(workload.Options{Name: "w1", Seed: 1, Rate: rate, Requests: requests})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"round_robin", "cost_model"} {
		fleet := virtual.Fleet{Events: true, EventLag: time.Millisecond, Lag: 250 * time.Microsecond,
			Hold: 50 * time.Millisecond, Prewarm: 100 * time.Millisecond}
		for i := range replicas {
			one := engine
			one.Seed = uint64(i)
			fleet.Engines = append(fleet.Engines, one)
		}
		p, err := policy.New(name, nil)
		if err != nil {
			t.Fatal(err)
		}
		for try := 1; ; try++ {
			c := contest(t, "w1", rate, requests, replicas, name)
			c.Simulated, c.Records = engine, t.TempDir()
			got := runContest(t, c).Runs[0]
			if got.Requests != requests || got.Failed != 0 {
				t.Fatalf("%d requests, %d failed; %d in virtual time", got.Requests, got.Failed, requests)
			}
			sent := readContestRecords(t, filepath.Join(c.Records, name+"-1.jsonl"))
			slices.SortStableFunc(sent, func(a, b contestRecord) int { return cmp.Compare(a.Sent, b.Sent) })
			asSent := &workload.Workload{Name: w.Name}
			for _, r := range sent {
				q := w.Requests[r.Index]
				q.At = time.Duration(r.Sent * float64(time.Millisecond))
				asSent.Requests = append(asSent.Requests, q)
			}
			outcome, err := fleet.Serve(t.Context(), asSent, p, virtual.Options{Seed: 1})
			if err != nil {
				t.Fatal(err)
			}
			want := workload.Summarize(outcome.Records, asSent, workload.SummaryOptions{Replicas: replicas})
			var ttfts, lags []float64
			same := 0
			for i, r := range sent {
				ttfts, lags = append(ttfts, r.First-r.Sent), append(lags, r.Sent-r.Scheduled)
				if r.Replica == fmt.Sprint("e", outcome.Records[i].Replica) {
					same++
				}
			}
			ttft, lag := workload.QuantilesOf(ttfts), workload.QuantilesOf(lags)
			off, allowed := math.Abs(ttft.P50-want.TTFT.P50), 0.05*want.TTFT.P50+6*lag.P90
			// What passes between tokens comes to the same however late the single one is seen.
			gap := float64(outcome.Gaps.Mean()) / float64(time.Millisecond)
			gapsAgree := math.Abs(got.ITL.Mean-gap) <= 0.1*gap+lag.P90
			t.Logf("%s: the median is %.1f ms over HTTP, %.1f ms in virtual time, %.1f may be between them; mean %.1f and %.1f, p99 %.1f and %.1f; %.2f and %.2f ms between tokens; %.1f and %.1f %% cached; %d of %d by the same replica; sent %.2f ms late (p90)",
				name, ttft.P50, want.TTFT.P50, allowed, ttft.Mean, want.TTFT.Mean, ttft.P99, want.TTFT.P99, got.ITL.Mean, gap, 100*got.HitRate, 100*want.HitRate, same, requests, lag.P90)
			// Two that are sent at nearly the same time may change places.
			if off <= allowed && gapsAgree && (name != "round_robin" || same > requests*3/4) {
				break
			}
			if try == tries {
				t.Errorf("%s: in %d runs virtual time and HTTP did not agree", name, tries)
				break
			}
		}
	}
}

// contestRecord is what this package's tests read of a record that a contest has written.
type contestRecord struct {
	Index     int     `json:"index"`
	Scheduled float64 `json:"scheduled_ms"`
	Sent      float64 `json:"sent_ms"`
	First     float64 `json:"first_ms"`
	Replica   string  `json:"replica"`
}

func readContestRecords(t *testing.T, path string) (records []contestRecord) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(text) {
		var r contestRecord
		if err := json.Unmarshal(line, &r); err != nil {
			t.Fatal(err)
		}
		records = append(records, r)
	}
	return records
}
