package agent

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/simulator"
)

// randomConfig is base with other policies, shadows, bounds and whatever else may
// change while requests run. Some replicas and, seldom, the model are left out.
func randomConfig(base *Config, rng *rand.Rand) Config {
	c := *base
	names := policy.Names()
	some := func() string { return names[rng.IntN(len(names))] }
	c.Replicas = nil
	for _, r := range base.Replicas {
		if rng.IntN(5) == 0 {
			continue
		}
		r.MaxConcurrency, r.MaxPending = rng.IntN(4), rng.IntN(4)
		if r.MaxConcurrency == 0 {
			r.MaxPending = 0
		}
		c.Replicas = append(c.Replicas, r)
	}
	if len(c.Replicas) == 0 {
		c.Replicas = base.Replicas[:1]
	}
	m := ModelConfig{Name: "m", Tokenizer: "builtin:sim", BlockSize: 4, Policy: some()}
	if m.Policy == policy.Default {
		m.Weights = Weights{"own_work": float64(rng.IntN(4))}
	}
	for i := range rng.IntN(3) {
		m.Shadows = append(m.Shadows, ShadowConfig{Policy: some(), Name: fmt.Sprint("shadow-", i)})
	}
	m.Admission.Mode = policy.AdmissionModes()[rng.IntN(3)]
	m.Admission.Budget = time.Duration(rng.IntN(3)) * 10 * time.Millisecond
	m.Queue = QueueConfig{Max: rng.IntN(6), Timeout: time.Duration(1+rng.IntN(50)) * time.Millisecond}
	c.Models = []ModelConfig{m}
	c.Classes = []ClassConfig{{"gold", 0}, {"batch", 9}}[:rng.IntN(3)]
	c.Decisions.Sample = []float64{0, .5, 1}[rng.IntN(3)]
	c.Decisions.Prompts = []string{"", promptHashes}[rng.IntN(2)]
	c.Decisions.MaxBytes, c.Decisions.Keep = leastDecisions, rng.IntN(3)
	c.Retry.MaxAttempts = 1 + rng.IntN(3)
	return c
}

// TestReloadChaos: the configuration changes all the time, an engine dies and comes
// back, clients come and leave. Everybody gets an end; and when all is quiet, nothing
// counts a request any more, and what has left the fleet is released.
func TestReloadChaos(t *testing.T) {
	engine := func(port int) *simulator.Server {
		s, err := simulator.Start(simulator.Config{Port: port, ServedModelName: []string{"m"}, PrefillD: 2000, TimePerOutputToken: time.Millisecond, MaxNumSeqs: 2})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		return s
	}
	mortal := engine(0)
	base := testConfig(engine(0), engine(0), mortal)
	base.Decisions.File = filepath.Join(t.TempDir(), "decisions")
	base.Health.Timeout = time.Second
	a := startAgent(t, base)
	running := true
	defer func() {
		if running {
			stopped(t, a)
		}
	}()
	rng := rand.New(rand.NewPCG(1, 1))
	over := make(chan struct{})
	var about, clients sync.WaitGroup
	about.Go(func() {
		for {
			select {
			case <-over:
				return
			case <-time.After(10 * time.Millisecond):
			}
			if err := a.Reload(randomConfig(&base, rng)); err != nil {
				t.Error(err)
				return
			}
		}
	})
	about.Go(func() {
		for _, path := range []string{"/metrics", "/debug/fleet", "/debug/predictions", "/debug/policy", "/debug/prewarm", "/readyz"} {
			select {
			case <-over:
				return
			default:
				page(t, a, path)
			}
		}
		mortal.Close()
		for range 20 {
			page(t, a, "/metrics")
			postPage(t, a, "/explain", `{"model":"m","prompt":"a b c d e f g"}`, "X-Inferrail-Budget-Ms: 5")
		}
		engine(portOf(t, mortal.Addr()))
	})
	var whole, refused atomic.Int64
	transport := &http.Transport{MaxIdleConnsPerHost: 20}
	defer transport.CloseIdleConnections()
	for i := range 12 {
		clients.Go(func() {
			rng := rand.New(rand.NewPCG(2, uint64(i)))
			for range 25 {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				body := fmt.Sprintf(`{"model":"m","prompt":"%s","stream":%v,"max_tokens":%d}`, strings.Repeat("a ", rng.IntN(200)), rng.IntN(3) > 0, 1+rng.IntN(10))
				req, err := http.NewRequestWithContext(ctx, "POST", "http://"+a.Addr().String()+"/v1/completions", strings.NewReader(body))
				if err != nil {
					t.Error(err)
				}
				req.Header.Set("X-Inferrail-Priority", []string{"gold", "batch", ""}[rng.IntN(3)])
				if rng.IntN(4) == 0 {
					time.AfterFunc(time.Duration(rng.IntN(20))*time.Millisecond, cancel)
				}
				resp, err := transport.RoundTrip(req)
				if err == nil {
					_, err = io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
					switch {
					case err != nil:
					case resp.StatusCode == 200:
						whole.Add(1)
					case resp.StatusCode == 503 && resp.Header.Get("Retry-After") != "":
						refused.Add(1)
					case resp.StatusCode != 404 && resp.StatusCode != 502:
						t.Errorf("status %d, %v", resp.StatusCode, resp.Header)
					}
				}
				if ctx.Err() == context.DeadlineExceeded {
					t.Errorf("a client waits for ever: %v", err)
				}
				cancel()
			}
		})
	}
	clients.Wait()
	close(over)
	about.Wait()
	if err := a.Reload(base); err != nil {
		t.Fatal(err)
	}
	transport.CloseIdleConnections()

	left := regexp.MustCompile(`(?m)^inferrail_(requests_running|requests_waiting|buffered_bytes|client_connections|replica_requests_running|replica_requests_pending|replica_backlog_tokens|replica_backlog_seconds)(\{[^}]*\})? ([^0].*|0.+)$`)
	var metrics string
	eventually(t, func() bool { _, metrics = page(t, a, "/metrics"); return !left.MatchString(metrics) },
		func() string { return fmt.Sprint("left: ", left.FindAllString(metrics, -1)) })
	a.fleet.mu.Lock()
	members := append(append([]*member{}, a.fleet.members...), a.fleet.leaving...)
	if len(a.fleet.leaving) > 0 {
		t.Errorf("%d replicas are still leaving", len(a.fleet.leaving))
	}
	a.fleet.mu.Unlock()
	for _, m := range members {
		speed := policy.Speed{}
		if w, _ := m.replica.Backlog().Ahead(&speed, time.Now()); w != (policy.Work{}) {
			t.Errorf("%s has %+v before it", m.id, w)
		}
	}
	for _, s := range a.fleet.index.Stats(nil) {
		if s.Claims != 0 {
			t.Errorf("slot %d has %d claims", s.Slot, s.Claims)
		}
	}
	running = false
	stopped(t, a)
	t.Logf("%d whole answers, %d refused, %d reloads", whole.Load(), refused.Load(), a.reloads.applied)
	if whole.Load() < 20 || refused.Load() == 0 || a.reloads.applied < 10 {
		t.Error("too little happened")
	}
	for _, d := range loggedDecisions(t, base.Decisions.File) {
		if d.Winner == "" || (len(d.Replicas) == 0) != (d.Prompt != nil) || d.Outcome == nil {
			t.Errorf("%+v", d)
		}
	}
}
