package bench

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/inferrail/inferrail/simulator"
	"github.com/inferrail/inferrail/simulator/workload"
)

func TestRivals(t *testing.T) {
	f := func(policies, contestants, want string) {
		t.Helper()
		rivals, err := rivalsOf(strings.Fields(policies), strings.Fields(contestants))
		var got []string
		for _, r := range rivals {
			got = append(got, r.name)
		}
		if err != nil {
			got = []string{err.Error()}
		}
		if s := strings.Join(got, " "); s != want {
			t.Errorf("%q and %q: %s, want %s", policies, contestants, s, want)
		}
	}
	f("round_robin cost_model", "", "round_robin cost_model")
	f("cost_model", "nginx sglang-router", "cost_model nginx sglang-router")
	f("", "haproxy-leastconn", "haproxy-leastconn")
	f("a b a", "", "a is named twice")
	f("", "", "no policy and no contestant: nothing to compare")
	f("a", "envoy", "--contestants envoy: there are nginx, nginx-least-conn, haproxy, haproxy-leastconn, sglang-router, vllm-router")
}

func TestContestSetsEngines(t *testing.T) {
	f := func(want string, set ...string) {
		t.Helper()
		c := Contest{Asking: Asking{Timeout: 1, MaxAtOnce: 1, MaxLag: 1, MaxBusy: 1}, Policies: []string{"sticky"}, Replicas: 1, Seeds: 1, Attempts: 1, Set: set, KVBlocks: 100}
		_, err := c.check()
		got := c.engines()
		if err != nil {
			got = "error: " + err.Error()
		}
		if !strings.HasPrefix(got, want) {
			t.Errorf("%q: %s, want %s", set, got, want)
		}
	}
	f("vllm, 100 blocks of 16 tokens")
	f("sglang, 200 blocks of 1 tokens, engine=sglang, num_gpu_blocks_override=200, block_size=1", "engine=sglang", "num_gpu_blocks_override=200", "block_size=1")
	f("error: --set block_size: want KEY=VALUE", "block_size")
	f("error: the engines' block_sizes=1: ", "block_sizes=1")
	f("error: the engines' block_size=many: ", "block_size=many")
	c := Contest{Simulated: simulator.Config{PrefillA: 1}, Set: []string{"prefill_b=0.5", "time_per_output_token=3ms"}}
	if err := c.set(&c.Simulated); err != nil || c.Simulated.PrefillA != 1 || c.Simulated.PrefillB != 0.5 || c.Simulated.TimePerOutputToken != 3*time.Millisecond {
		t.Errorf("%+v, %v", c.Simulated, err)
	}
}

func TestParseCounters(t *testing.T) {
	f := func(in string, queried, hit float64) {
		t.Helper()
		if got := parseCounters([]byte(in)); got != (counters{queried, hit}) {
			t.Errorf("%q: %+v, want %v and %v", in, got, queried, hit)
		}
	}
	f("", 0, 0)
	f("# TYPE vllm:prefix_cache_queries_total counter\n"+
		`vllm:prefix_cache_queries_total{engine="0",model_name="a}b"} 100`+"\n"+`vllm:prefix_cache_queries_total{engine="1"} 1.5e2`+"\n"+
		`vllm:prefix_cache_hits_total{engine="0"} 30`+"\n"+`vllm:other{x="y"} 7`+"\n", 250, 30)
	f(`sglang:prompt_tokens_total{a="b"} 10`+"\n"+`sglang:cached_tokens_total{cache_source="device"} 4`+"\n", 10, 4)
	f(`vllm:prefix_cache_hits_total{engine="0"} many`+"\n"+`vllm:prefix_cache_hits_total{`, 0, 0)
}

// Engines are slow from when it is said until when it is said.
func TestThrottle(t *testing.T) {
	var mu sync.Mutex // guards told
	var told []string
	engine := func(name string) string {
		s := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			mu.Lock()
			defer mu.Unlock()
			if _, after, ok := strings.Cut(string(body), `"slow":`); ok {
				told = append(told, name+" "+strings.FieldsFunc(after, func(r rune) bool { return r == ',' || r == '}' })[0])
			}
		}))
		t.Cleanup(s.Close)
		return s.URL
	}
	urls := []string{engine("e0"), engine("e1")}
	err := throttle(t.Context(), []workload.Throttle{
		{Engine: 1, At: 20 * time.Millisecond, Until: 60 * time.Millisecond, Factor: 5},
		{Engine: 0, At: 40 * time.Millisecond, Factor: 2},
		{Engine: 7, At: 0, Factor: 9},
	}, urls, time.Now())
	if got := strings.Join(told, ", "); err != nil || got != "e1 5, e0 2, e1 1" {
		t.Errorf("%s, %v", got, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := throttle(ctx, []workload.Throttle{{At: time.Hour, Factor: 2}}, urls, time.Now()); err != nil {
		t.Errorf("a run that ends before: %v", err)
	}
	err = throttle(t.Context(), []workload.Throttle{{Factor: 2}}, []string{"http://127.0.0.1:1"}, time.Now())
	if err == nil || !strings.Contains(err.Error(), "cannot make engine 0 slow") {
		t.Errorf("without an engine: %v", err)
	}
}

// The engines run in a process of their own, and end with their standard input.
func TestSimulators(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	s, err := startSimulators(t.Context(), []string{self}, t.TempDir(), 2, simulator.Config{ServedModelName: []string{contestModel}})
	if err != nil {
		t.Fatal(err)
	}
	for _, url := range s.urls {
		page, err := exchangeOnce(t.Context(), "GET", url+"/v1/models", nil)
		if err != nil || !strings.Contains(string(page), `"id":"sim"`) {
			t.Errorf("%s: %q, %v", url, page, err)
		}
		if err := slow(t.Context(), url, 3); err != nil {
			t.Error(err)
		}
		if page, err := exchangeOnce(t.Context(), "GET", url+"/sim/faults", nil); err != nil || !strings.Contains(string(page), `"slow":3`) {
			t.Errorf("%s: %q, %v", url, page, err)
		}
		if c, err := readCounters(t.Context(), url); err != nil || c != (counters{}) {
			t.Errorf("counters of an engine that was not asked: %+v, %v", c, err)
		}
	}
	s.stop()
	if _, err := exchangeOnce(t.Context(), "GET", s.urls[0]+"/health", nil); err == nil {
		t.Error("it still answers")
	}
	_, err = startSimulators(t.Context(), []string{self}, t.TempDir(), 2, simulator.Config{MaxNumSeqs: -1})
	if err == nil || !strings.Contains(err.Error(), "max-num-seqs must be at least 1") {
		t.Errorf("an engine that cannot be: %v", err)
	}
}

// Proxies of others pass requests on, choosing as they are told.
func TestRivalsOfOthers(t *testing.T) {
	for _, r := range others() {
		if r.prepare != nil {
			continue // from PyPI
		}
		t.Run(r.name, func(t *testing.T) {
			program, _, _ := strings.Cut(r.name, "-")
			if _, err := exec.LookPath(program); err != nil {
				t.Skip(err)
			}
			var urls []string
			hits := make([]int, 2)
			var mu sync.Mutex // guards hits
			for i := range hits {
				s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
					mu.Lock()
					hits[i]++
					mu.Unlock()
					time.Sleep(20 * time.Millisecond)
					fmt.Fprint(w, `{"data":[{"id":"sim"}]}`)
				}))
				t.Cleanup(s.Close)
				urls = append(urls, s.URL)
			}
			g, err := (&Contest{}).startRival(t.Context(), &r, t.TempDir(), urls)
			if err != nil {
				t.Fatal(err)
			}
			defer g.stop()
			// At the same time, so that both engines are needed by any rule.
			var asked sync.WaitGroup
			for range 8 {
				asked.Go(func() {
					if _, err := exchangeOnce(t.Context(), "GET", g.url+"/v1/models", nil); err != nil {
						t.Error(err)
					}
				})
			}
			asked.Wait()
			mu.Lock()
			defer mu.Unlock()
			if hits[0] < 1 || hits[1] < 1 || hits[0]+hits[1] < 9 {
				t.Errorf("requests went to %v", hits)
			}
		})
	}
}

// A contestant that cannot be started says why.
func TestRivalThatEnds(t *testing.T) {
	r := &rival{name: "broken", command: func(setup) ([]string, error) { return []string{"sh", "-c", "echo no such option; exit 3"}, nil }}
	_, err := (&Contest{}).startRival(t.Context(), r, t.TempDir(), nil)
	if err == nil || !strings.Contains(err.Error(), "broken did not start") || !strings.Contains(err.Error(), "no such option") {
		t.Errorf("error %v", err)
	}
}

// What a machine was too slow for shows.
func TestDoubts(t *testing.T) {
	a := Asking{MaxAtOnce: 5, MaxLag: 10 * time.Millisecond, MaxBusy: 0.9}
	f := func(l *loaded, want ...string) {
		t.Helper()
		got := a.doubts(l)
		if len(got) != len(want) {
			t.Fatalf("%q, want %d doubts", got, len(want))
		}
		for i := range want {
			if !strings.Contains(got[i], want[i]) {
				t.Errorf("%q, want %q in it", got[i], want[i])
			}
		}
	}
	lag := func(ms ...time.Duration) *loaded {
		l := &loaded{busy: 0.5}
		for _, d := range ms {
			l.records = append(l.records, workload.Record{Scheduled: time.Second, Sent: time.Second + d*time.Millisecond, Failure: "timeout"})
		}
		return l
	}
	f(lag(0, 1, 10))
	f(lag(0, 1, 11), "one in a hundred requests over 11.0 ms after it was due, the limit is 10ms")
	late := make([]time.Duration, 200)
	late[7], late[8] = 50, 50
	f(lag(late...))
	late[9] = 50
	f(lag(late...), "sent too late")
	f(&loaded{busy: 0.93}, "CPUs were 93 % busy, the limit is 90 %")
	f(&loaded{stolen: 0.2}, "the hypervisor took 20 %")
	f(&loaded{records: []workload.Record{{Failure: tooMany}, {Failure: tooMany}}}, "2 requests were not sent, because 5 were on their way already")
}

// The table shows the spread over the seeds, every failure and every doubt.
func TestComparisonTable(t *testing.T) {
	run := func(policy string, p50, p99 float64, failed int, doubts ...string) workload.Summary {
		return workload.Summary{Policy: policy, Requests: 100, Failed: failed, TTFT: workload.Quantiles{P50: p50, P99: p99, Mean: p50 + 5},
			HitRate: 0.5, EngineHitRate: 0.48, Hotspot: 1.25, Good: 0.9, Doubts: doubts}
	}
	all := []workload.Summary{run("a", 10, 100, 0), run("a", 30, 300, 2), run("a", 20, 200, 0), run("b", 7, 70, 0, "too slow")}
	c := workload.Comparison{Workload: "w", Replicas: 3, Engine: "vllm", Limits: workload.Limits{TTFT: 2000, TPOT: 100}, Seeds: []uint64{1, 2, 3},
		All: all, Runs: []workload.Summary{workload.Medians(all[:3]), workload.Medians(all[3:])}}
	var out bytes.Buffer
	if err := writeComparison(&out, &c); err != nil {
		t.Fatal(err)
	}
	want := filepath.Join("testdata", "contest.txt")
	if os.Getenv("REWRITE") != "" {
		if err := os.WriteFile(want, out.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	golden, err := os.ReadFile(want)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(out.Bytes(), golden) {
		t.Errorf("got\n%s\nwant (REWRITE=1 writes it)\n%s", &out, golden)
	}
}
