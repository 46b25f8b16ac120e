package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/simulator"
)

// vllmLoad is what a vLLM of one rank, or of several, tells of its load: of each
// rank how many run and how many wait.
func vllmLoad(ranks ...[2]int) string {
	page := vllmPage(1000, 16, 500, "True", make([]int, len(ranks))...)
	for i, r := range ranks {
		page += fmt.Sprintf("vllm:num_requests_running{engine=\"%d\",model_name=\"m\"} %d.0\nvllm:num_requests_waiting{engine=\"%d\",model_name=\"m\"} %d.0\nvllm:kv_cache_usage_perc{engine=\"%d\",model_name=\"m\"} 0.5\n",
			i, r[0], i, r[1], i)
	}
	return page
}

// loads renders what is known of the members' loads: id: running+waiting, or ?
// where there is no report that may be used.
func (s *stage) loads() string {
	s.fleet.mu.Lock()
	defer s.fleet.mu.Unlock()
	var out []string
	now := time.Now()
	for _, m := range s.fleet.members {
		text := "?"
		if l := m.replica.Load(); l.Fresh(now) {
			text = fmt.Sprintf("%d+%d", l.Running, l.Waiting)
			if l.Uncounted {
				text = fmt.Sprintf("%v of %v MB", l.VRAMFree, l.VRAMTotal)
			}
			if l.WaitingTokens >= 0 {
				text += fmt.Sprintf(" %d tokens", l.WaitingTokens)
			}
		}
		out = append(out, m.id+": "+text)
	}
	return strings.Join(out, ", ")
}

func (s *stage) expectLoads(want string) {
	s.Helper()
	var got string
	eventually(s.T, func() bool { got = s.loads(); return got == want }, func() string {
		text, _ := json.MarshalIndent(s.fleet.status(""), "", " ")
		return fmt.Sprintf("the loads are %q, want %q\n%s", got, want, text)
	})
}

// expectLoadState waits until /debug/fleet says of a member's load what is wanted:
// the state, and a part of why.
func (s *stage) expectLoadState(id, state, why string) {
	s.Helper()
	var got loadStatus
	eventually(s.T, func() bool {
		s.fleet.mu.Lock()
		defer s.fleet.mu.Unlock()
		for _, m := range s.fleet.members {
			if m.id == id {
				got = m.loadStatusLocked(time.Now())
			}
		}
		return got.State == state && strings.Contains(got.Why, why)
	}, func() string { return fmt.Sprintf("the load of %s is %+v, want %s: %s", id, got, state, why) })
}

// Engines of all kinds tell their load, each rank its own, and are asked again and
// again.
func TestLoadsAreTold(t *testing.T) {
	vllm, ranks, sglang, older, llama, slots, tgi := startPaged(t), startPaged(t), startPaged(t), startPaged(t), startPaged(t), startPaged(t), startPaged(t)
	ollama := startPaged(t)
	vllm.set("/metrics", vllmLoad([2]int{3, 1}))
	ranks.set("/metrics", vllmLoad([2]int{1, 0}, [2]int{2, 7}))
	sglang.set("/v1/loads", `{"loads":[{"dp_rank":0,"num_running_reqs":5,"num_waiting_reqs":2,"num_waiting_uncached_tokens":900,"token_usage":0.5}]}`)
	older.set("/metrics", "sglang:num_running_reqs{model_name=\"m\"} 4.0\nsglang:num_queue_reqs{model_name=\"m\"} 1.0\n")
	llama.set("/metrics", "llamacpp:requests_processing 2\nllamacpp:requests_deferred 3\n")
	slots.set("/slots", `[{"is_processing":true},{"is_processing":false}]`)
	tgi.set("/metrics", "tgi_batch_current_size 6\ntgi_queue_size 1\n")
	ollama.set("/api/ps", `{"models":[{"name":"m:latest","size_vram":4294967296}]}`)
	s := newStage(t, nil,
		ReplicaConfig{ID: "vllm", URL: vllm.URL}, ReplicaConfig{ID: "ranks", URL: ranks.URL},
		ReplicaConfig{ID: "sglang", URL: sglang.URL, Engine: "sglang"}, ReplicaConfig{ID: "older", URL: older.URL},
		ReplicaConfig{ID: "llama", URL: llama.URL}, ReplicaConfig{ID: "slots", URL: slots.URL, Engine: "llamacpp"},
		ReplicaConfig{ID: "tgi", URL: tgi.URL}, ReplicaConfig{ID: "ollama", URL: ollama.URL, VRAM: 24 << 30, Tier: "large"})
	// The first check tells it: it is known before the first request.
	const others = ", sglang: 5+2 900 tokens, older: 4+1, llama: 2+3, slots: 1+0, tgi: 6+1, ollama: 20480 of 24576 MB"
	s.expectLoads("vllm: 3+1, ranks/0: 1+0, ranks/1: 2+7" + others)
	vllm.set("/metrics", vllmLoad([2]int{0, 0}))
	ranks.set("/metrics", vllmLoad([2]int{9, 1}, [2]int{0, 0}))
	s.expectLoads("vllm: 0+0, ranks/0: 9+1, ranks/1: 0+0" + others)
	// What is wrong with one rank is not with the other.
	ranks.set("/metrics", strings.Replace(vllmLoad([2]int{8, 1}, [2]int{4, 4}), "} 8.0", "} NaN", 1))
	s.expectLoadState("ranks/0", "unreadable", "vllm:num_requests_running is NaN")
	s.expectLoads("vllm: 0+0, ranks/0: ?, ranks/1: 4+4" + others)
	// Who tells nothing of his cache is not said to have an empty one.
	for _, m := range s.fleet.members {
		if m.id == "ranks/0" {
			continue // what it told last is old
		}
		want := m.id == "vllm" || m.id == "ranks/1" || m.id == "sglang"
		if l := m.replica.Load(); l != nil && l.KVTold != want {
			t.Errorf("%s tells how full its cache is: %v", m.id, l.KVTold)
		}
		s.fleet.mu.Lock()
		status, row := m.loadStatusLocked(time.Now()), m.overviewLocked(nil, "", time.Now())
		s.fleet.mu.Unlock()
		if status.KV != nil != want || row.KV != nil != want || status.HitRate != nil || row.HitRate != nil {
			t.Errorf("%s: %+v, %+v", m.id, status, row)
		}
	}
	for _, m := range s.fleet.members {
		if m.replica.Large() != (m.id == "ollama") {
			t.Errorf("%s is for large requests: %v", m.id, m.replica.Large())
		}
	}
	if n, requests := s.member("ollama").server.load.page, ollama.count("/metrics"); n != "/api/ps" || requests > 0 {
		t.Errorf("Ollama was asked for %s, and %d times for metrics", n, requests)
	}
}

// Ollama writes a line to its log for each request. Without vram there is nothing
// that it could tell.
func TestOllamaIsNotAskedInVain(t *testing.T) {
	e := startPaged(t)
	e.set("/api/ps", `{"models":[]}`)
	s := newStage(t, nil, ReplicaConfig{ID: "a", URL: e.URL, Engine: "ollama"})
	s.expectLoadState("a", "absent", "does not tell how many requests")
	s.fleet.look(t.Context(), s.fleet.servers[0], nil)
	if n := e.count("/api/ps"); n > 0 {
		t.Errorf("it was asked %d times", n)
	}
}

// An engine that has a page, and then none, or one that cannot be read, tells of no
// load; it is not taken to be idle. When the page is back, so is the load.
func TestLoadsThatCannotBeRead(t *testing.T) {
	e, good := startPaged(t), startPaged(t)
	page := vllmLoad([2]int{3, 1})
	e.set("/metrics", page)
	good.set("/metrics", page)
	c := DefaultConfig()
	c.Health.Interval = 10 * time.Millisecond
	c.Load = LoadConfig{Interval: 10 * time.Millisecond, Timeout: time.Second, MaxAge: 200 * time.Millisecond}
	c.Replicas = []ReplicaConfig{{ID: "a", URL: e.URL}, {ID: "good", URL: good.URL}}
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	s := newStageOf(t, &c)
	for _, bad := range []struct{ page, state, why string }{
		{strings.Replace(page, "vllm:num_requests_waiting", "vllm:num_requests_hiding", 1), "unreadable", "it lacks vllm:num_requests_waiting"},
		{strings.Replace(page, "} 3.0", "} NaN", 1), "unreadable", "vllm:num_requests_running is NaN"},
		{strings.Replace(page, "} 3.0", "} -3.0", 1), "unreadable", "vllm:num_requests_running is -3"},
		{strings.Replace(page, "} 3.0", "} 1e308", 1), "unreadable", "vllm:num_requests_running is 1e+308"},
		{strings.Replace(page, "} 0.5", "} 2", 1), "unreadable", "vllm:kv_cache_usage_perc is 2"},
		{"<html>It works!</html>\n", "unreadable", "nothing of an engine that is known"},
		{"", "unreadable", "nothing of an engine that is known"},
		{strings.Repeat("x", maxScrape), "unreadable", "it has 8MiB or more"},
	} {
		s.expectLoads("a: 3+1, good: 3+1")
		e.set("/metrics", bad.page)
		s.expectLoadState("a", bad.state, bad.why)
		s.expectLoads("a: ?, good: 3+1")
		e.set("/metrics", page)
	}
	s.expectLoads("a: 3+1, good: 3+1")
	e.status("/metrics", http.StatusServiceUnavailable)
	s.expectLoadState("a", "refused", "status 503")
	e.status("/metrics", 0)
	s.expectLoads("a: 3+1, good: 3+1")
	e.status("/metrics", http.StatusFound) // nobody is followed to where he points
	s.expectLoadState("a", "absent", "status 302")
	e.status("/metrics", http.StatusNotFound)
	s.expectLoadState("a", "absent", "status 404")
	s.expectLoads("a: ?, good: 3+1")
}

// An engine that does not speak HTTP at that port, or closes it, is one whose load
// is not known.
func TestLoadOfNoEngine(t *testing.T) {
	for what, want := range map[string]loadOutcome{"": reportRefused, "\x16\x03\x01 this is not HTTP\r\n\r\n": reportUnreadable,
		"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf": reportRefused} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		served := make(chan struct{})
		go func() {
			defer close(served)
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				_, _ = c.Read(make([]byte, 4096))
				_, _ = c.Write([]byte(what))
				c.Close()
			}
		}()
		e := startPaged(t)
		s := newStage(t, nil, ReplicaConfig{ID: "a", URL: e.URL, Models: []string{"m"}}, ReplicaConfig{ID: "b", URL: "http://" + l.Addr().String(), Models: []string{"m"}})
		m := s.member("b")
		_, err = s.fleet.readPages(t.Context(), m, "", "")
		if got := outcomeOf(err); got != want {
			t.Errorf("%q: %v (%v), want %v", what, got, err, want)
		}
		l.Close()
		<-served
		if _, err = s.fleet.readPages(t.Context(), m, "", ""); outcomeOf(err) != reportRefused {
			t.Errorf("closed: %v (%v)", outcomeOf(err), err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Nanosecond)
		defer cancel()
		if _, err = s.fleet.readPages(ctx, m, "", ""); outcomeOf(err) != reportTimeout {
			t.Errorf("late: %v (%v)", outcomeOf(err), err)
		}
	}
}

// SGLang's page for routers is asked for first, and its metrics where there is none.
// When the page that was used is gone, the other is used.
func TestLoadPageIsChosen(t *testing.T) {
	e := startPaged(t)
	metrics := "sglang:num_running_reqs{model_name=\"m\"} 4.0\nsglang:num_queue_reqs{model_name=\"m\"} 1.0\n"
	loads := `{"loads":[{"dp_rank":0,"num_running_reqs":5,"num_waiting_reqs":2,"num_waiting_uncached_tokens":900}]}`
	e.set("/metrics", metrics)
	s := newStage(t, nil, ReplicaConfig{ID: "a", URL: e.URL, Engine: "sglang"})
	s.expectLoads("a: 4+1")
	// Not each time, but now and then, it is asked for the other.
	asked, n := e.count("/v1/loads"), e.count("/metrics")
	eventually(t, func() bool { return e.count("/metrics") >= n+3 }, func() string { return "it is not asked for its metrics" })
	if now := e.count("/v1/loads"); now != asked {
		t.Errorf("it was asked %d times more for a page that it does not have", now-asked)
	}
	e.set("/v1/loads", loads)
	server := s.fleet.servers[0]
	server.busy.Lock()
	server.load.chosen = server.load.chosen.Add(-loadChoice)
	server.busy.Unlock()
	s.expectLoads("a: 5+2 900 tokens")
	e.status("/v1/loads", http.StatusNotFound)
	s.expectLoads("a: 4+1")
	e.status("/metrics", http.StatusNotFound)
	s.expectLoadState("a", "absent", "GET /metrics: status 404")
}

// One engine that hangs, and one that is slow, delay nobody.
func TestHangingEngineDelaysNoLoad(t *testing.T) {
	const n = 32
	hangs, slow := startPaged(t), startPaged(t)
	hangs.hang["/metrics"] = true
	slow.set("/metrics", vllmLoad([2]int{1, 1}))
	slow.delay("/metrics", 300*time.Millisecond)
	replicas := []ReplicaConfig{{ID: "hangs", URL: hangs.URL}, {ID: "slow", URL: slow.URL}}
	var others []*paged
	for i := range n - 2 {
		e := startPaged(t)
		e.set("/metrics", vllmLoad([2]int{i, 1}))
		others = append(others, e)
		replicas = append(replicas, ReplicaConfig{ID: fmt.Sprint("r", i), URL: e.URL})
	}
	c := DefaultConfig()
	c.Replicas = replicas
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	s := newStageOf(t, &c)
	before := make([]int, len(others))
	for i, e := range others {
		before[i] = e.count("/metrics")
	}
	hung := hangs.count("/metrics")
	began := time.Now()
	eventually(t, func() bool {
		return !slices.ContainsFunc(others, func(e *paged) bool { return e.count("/metrics") < before[slices.Index(others, e)]+10 })
	}, func() string { return "some are not asked" })
	took := time.Since(began)
	t.Logf("ten reports of each of %d engines in %v", len(others), took)
	if asked := hangs.count("/metrics") - hung; asked > int(took/(100*time.Millisecond))+2 {
		t.Errorf("the one that hangs was asked %d times in %v", asked, took)
	}
	// Nor does the slow one grow old, for all that its reports take.
	s.expectLoadState("slow", "ok", "")
	s.expectLoadState("hangs", "timeout", "no answer in time")
	want := []string{"hangs: ?", "slow: 1+1"}
	for i := range others {
		want = append(want, fmt.Sprintf("r%d: %d+1", i, i))
	}
	s.expectLoads(strings.Join(want, ", "))
}

// An engine is asked less often while it has nothing to do, and ten times a second
// again as soon as the agent has sent it something.
func TestIdleEnginesAreAskedLess(t *testing.T) {
	c := LoadConfig{Interval: 100 * time.Millisecond, Timeout: time.Second, MaxAge: time.Second}
	now := time.Now()
	f := func(w loadWatch, own bool, want time.Duration) {
		t.Helper()
		s := &server{load: w}
		s.load.at = now
		if got := s.loadDueLocked(&c, own, now).Sub(now); got != want {
			t.Errorf("own traffic %v, %+v: after %v, want %v", own, w, got, want)
		}
	}
	f(loadWatch{}, false, 750*time.Millisecond)
	f(loadWatch{}, true, 100*time.Millisecond)
	f(loadWatch{busy: now.Add(-time.Second)}, false, 100*time.Millisecond)
	f(loadWatch{busy: now.Add(-idleAfter)}, false, 750*time.Millisecond)
	// Its page takes it long to make.
	f(loadWatch{took: 5 * time.Millisecond}, true, 100*time.Millisecond)
	f(loadWatch{took: 30 * time.Millisecond}, true, 300*time.Millisecond)
	f(loadWatch{took: 100 * time.Millisecond}, true, 650*time.Millisecond)
	f(loadWatch{took: 100 * time.Millisecond}, false, 650*time.Millisecond)
	f(loadWatch{took: time.Minute}, true, 100*time.Millisecond)
	// It fails.
	f(loadWatch{outcome: reportTimeout, failures: 1}, true, 200*time.Millisecond)
	f(loadWatch{outcome: reportRefused, failures: 100}, true, loadRetry)
	f(loadWatch{outcome: reportAbsent, failures: 1}, true, loadProbe)
	f(loadWatch{outcome: reportAbsent, failures: 1}, false, scrapeRarely)
	// What it tells does not change with each request.
	f(loadWatch{slow: true}, true, 750*time.Millisecond)
	// With an interval that is longer than all that.
	c = LoadConfig{Interval: time.Minute, MaxAge: 2 * time.Minute}
	f(loadWatch{}, false, time.Minute)
	f(loadWatch{outcome: reportAbsent, failures: 1}, true, time.Minute)
	f(loadWatch{outcome: reportRefused, failures: 1}, true, time.Minute)
}

// The same, with an engine.
func TestTrafficWakesTheAsking(t *testing.T) {
	var mu sync.Mutex
	var asked []time.Time // guarded by mu
	h := startHangable(t)
	inner := h.Config.Handler
	h.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/metrics" {
			mu.Lock()
			asked = append(asked, time.Now())
			mu.Unlock()
			fmt.Fprint(w, vllmLoad([2]int{0, 0}))
			return
		}
		inner.ServeHTTP(w, r)
	})
	c := testConfig()
	c.Replicas = []ReplicaConfig{{ID: "a", URL: h.URL}}
	a := startAgent(t, c)
	defer stopped(t, a)
	count := func() int {
		mu.Lock()
		defer mu.Unlock()
		return len(asked)
	}
	// Its first checks are over.
	n := count()
	eventually(t, func() bool { return count() > n }, func() string { return "it is not asked" })
	n = count()
	began := time.Now()
	eventually(t, func() bool { return count() >= n+3 }, func() string { return "it is not asked" })
	if d := time.Since(began); d < 1200*time.Millisecond {
		t.Errorf("an idle engine was asked three times in %v", d)
	}
	answers := make(chan *http.Response, 1)
	go func() { answers <- ask(t, a, 3) }()
	eventually(t, func() bool { return h.asked.Load() == 1 }, func() string { return "the request does not arrive" })
	n = count()
	eventually(t, func() bool {
		mu.Lock()
		defer mu.Unlock()
		for i := n; i+3 < len(asked); i++ {
			if asked[i+3].Sub(asked[i]) < 600*time.Millisecond {
				return true
			}
		}
		return false
	}, func() string { return "it is asked no more often while a request is there" })
	close(h.answer)
	if status, _ := answered(t, answers); status != 200 {
		t.Errorf("status %d", status)
	}
	s := &stage{T: t, fleet: a.fleet}
	l := s.member("a").replica.Load()
	if r, w := l.Foreign(); r != 0 || w != 0 {
		t.Errorf("the agent's own request is others': %d, %d, of %+v", r, w, l)
	}
	if _, body := page(t, a, "/metrics"); !strings.Contains(body, `inferrail_replica_load_reports_total{outcome="ok",replica="a"}`) ||
		!strings.Contains(body, `inferrail_replica_engine_requests{replica="a",state="running"} 0`) ||
		!strings.Contains(body, `inferrail_replica_prefill_token_seconds{replica="a"}`) {
		t.Errorf("the metrics lack what is known of the load: %s", body)
	}
}

// What other agents send to an engine is foreign to this one, and its own is not.
func TestOthersTrafficIsForeign(t *testing.T) {
	engine, err := simulator.Start(simulator.Config{ServedModelName: []string{"m"}, MaxNumSeqs: 4})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { engine.Close() })
	one, other := startAgent(t, testConfig(engine)), startAgent(t, testConfig(engine))
	defer stopped(t, one)
	defer stopped(t, other)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	hold := func(a *Agent, n int) {
		for range n {
			body := `{"model":"m","stream":true,"max_tokens":30000,"ignore_eos":true,"messages":[{"role":"user","content":"hi"}]}`
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+a.Addr().String()+"/v1/chat/completions", strings.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { resp.Body.Close() })
		}
	}
	hold(one, 3)
	hold(other, 5)
	foreign := func(a *Agent) string {
		s := &stage{T: t, fleet: a.fleet}
		l := s.member("r0").replica.Load()
		r, w := l.Foreign()
		return fmt.Sprintf("%d of %d+%d are others', %d of them wait", r, l.Running, l.Waiting, w)
	}
	got := ""
	eventually(t, func() bool { got = foreign(one); return got == "5 of 4+4 are others', 4 of them wait" }, func() string { return got })
	eventually(t, func() bool { got = foreign(other); return got == "3 of 4+4 are others', 0 of them wait" }, func() string { return got })
	cancel()
	eventually(t, func() bool { got = foreign(one); return got == "0 of 0+0 are others', 0 of them wait" }, func() string { return got })
}

func TestHitRate(t *testing.T) {
	now := time.Unix(1000, 0)
	var h policy.HitRate
	f := func(after time.Duration, hits, queries, want float64) {
		t.Helper()
		now = now.Add(after)
		var c counts
		c.add(vllmHits, hits)
		c.add(vllmQueries, queries)
		if got := nextRate(&h, &c, now); got < want-0.005 || got > want+0.005 {
			t.Errorf("after %v: %v of %v is a rate of %v, want %v", after, hits, queries, got, want)
		}
	}
	f(0, 900, 1000, 0) // of how long ago, is not known
	f(time.Second, 900, 1100, 0)
	f(time.Second, 1000, 1200, 0.525) // half, the later one counting more
	f(time.Second, 1000, 1200, 0.525) // nothing was asked
	f(time.Hour, 1000, 1200, 0.525)
	f(time.Second, 1100, 1300, 1) // what was is long ago
	f(time.Second, 5, 10, 0)      // another process
	f(time.Second, 5, 20, 0)
	var none counts
	if got := nextRate(&h, &none, now); got != 0 {
		t.Errorf("without counts the rate is %v", got)
	}
}

// BenchmarkLoads reads the load of one engine from a page of 300 KB.
func BenchmarkLoads(b *testing.B) {
	page := largePage(b)
	b.SetBytes(int64(len(page)))
	b.ReportAllocs()
	var points []point
	for b.Loop() {
		points = appendPoints(points[:0], page)
		r := readMetrics(points)
		if _, _, why := r.gaugesOf(1, 2); why != "" {
			b.Fatal(why)
		}
	}
}

// What Prometheus's own library writes is read as what it was told, whatever the
// names of models are.
func TestLoadsOfRandomPages(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	odd := []string{"m", `a"b`, `a\`, `a\"`, "a\nb", `{}`, `}`, `",engine="9`, `engine="3"`, "ü", " ", ""}
	for round := range 300 {
		registry := prometheus.NewRegistry()
		vec := func(name string, labels ...string) *prometheus.GaugeVec {
			v := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: "Help with vllm:num_requests_running{engine=\"0\"} 7\nin it."}, labels)
			registry.MustRegister(v)
			return v
		}
		running, waiting, usage := vec("vllm:num_requests_running", "model_name", "engine"), vec("vllm:num_requests_waiting", "engine", "model_name"), vec("vllm:kv_cache_usage_perc", "engine", "model_name")
		for _, name := range []string{"vllm:num_requests_waiting_by_reason", "vllm:num_requests", "vllm:num_requests_runnings", "python_info", "vllm:kv_cache_usage_perc_max"} {
			vec(name, "engine").WithLabelValues("0").Set(1e9)
		}
		buckets := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "vllm:e2e_request_latency_seconds"}, []string{"engine"})
		registry.MustRegister(buckets)
		buckets.WithLabelValues("0").Observe(3)

		ranks := 1 + rng.IntN(12)
		want := make([][2]float64, ranks)
		full := make([]float64, ranks)
		for rank := range ranks {
			for _, i := range rng.Perm(len(odd))[:1+rng.IntN(3)] {
				r, w, u := float64(rng.IntN(1000)), float64(rng.IntN(1000)), rng.Float64()
				engine := strconv.Itoa(rank)
				running.WithLabelValues(odd[i], engine).Set(r)
				waiting.WithLabelValues(engine, odd[i]).Set(w)
				usage.WithLabelValues(engine, odd[i]).Set(u)
				want[rank][0] += r
				want[rank][1] += w
				full[rank] = max(full[rank], u)
			}
		}
		answer := httptest.NewRecorder()
		promhttp.HandlerFor(registry, promhttp.HandlerOpts{}).ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/metrics", nil))
		page := answer.Body.Bytes()
		r := readMetrics(appendPoints(nil, page))
		for rank := range ranks {
			g, _, why := r.gaugesOf(rank, ranks)
			if why != "" || g.running.value != want[rank][0] || g.waiting.value != want[rank][1] || g.usage.value != full[rank] {
				t.Fatalf("round %d, rank %d: %+v %s, want %v and %v, of\n%s", round, rank, g, why, want[rank], full[rank], page)
			}
		}
	}
}
