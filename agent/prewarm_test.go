package agent

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/inferrail/inferrail/proxy"
	"github.com/inferrail/inferrail/simulator"
)

// prewarmed is an agent with two engines that tell of their caches, of one model.
type prewarmed struct {
	t   *testing.T
	a   *Agent
	cfg Config
	log lockedBuffer
}

// lockedBuffer is a log that a test reads.
type lockedBuffer struct {
	mu   sync.Mutex // guards text
	text strings.Builder
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// newPrewarmed starts it. key is what the engines want to be sent.
func newPrewarmed(t *testing.T, key string) *prewarmed {
	t.Helper()
	const free = "tcp://127.0.0.1:0"
	var engines []*simulator.Server
	for range 2 {
		e, err := simulator.Start(simulator.Config{ServedModelName: []string{"m"}, APIKey: key,
			KVEvents: simulator.KVEvents{Endpoint: free, ReplayEndpoint: free}, EnablePromptTokensDetails: true})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { e.Close() })
		engines = append(engines, e)
	}
	p := &prewarmed{t: t, cfg: testConfig(engines...)}
	p.cfg.Models = []ModelConfig{{Name: "m", Tokenizer: "builtin:sim"}}
	for i := range p.cfg.Replicas {
		p.cfg.Replicas[i].Models = []string{"m"} // also where the list is not shown without the key
	}
	p.cfg.Routing.Hold, p.cfg.Routing.Pieces, p.cfg.Routing.Prewarm = durationOff, durationOff, leastPrewarm
	var err error
	if p.a, err = Start(t.Context(), p.cfg, slog.New(slog.NewTextHandler(&p.log, nil))); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stopped(t, p.a)
		if t.Failed() {
			t.Log(p.log.String())
		}
	})
	eventually(t, func() bool { return strings.Count(p.log.String(), "is known exactly, by its KV events") == 2 },
		func() string { return "the caches are not known exactly" })
	return p
}

// ask sends a completions request, and returns who has answered and how many tokens were
// predicted to be cached there.
func (p *prewarmed) ask(key, prompt string) (replica, cached string) {
	req, err := http.NewRequestWithContext(p.t.Context(), "POST", "http://"+p.a.Addr().String()+"/v1/completions",
		strings.NewReader(fmt.Sprintf(`{"model":"m","stream":true,"max_tokens":2,"prompt":%q}`, prompt)))
	if err != nil {
		p.t.Error(err)
		return "", ""
	}
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}
	resp, err := client.Do(req)
	if err != nil {
		p.t.Error(err)
		return "", ""
	}
	defer resp.Body.Close()
	io.Copy(io.Discard, resp.Body)
	if resp.StatusCode != 200 {
		p.t.Errorf("status %d", resp.StatusCode)
	}
	return resp.Header.Get("X-Inferrail-Replica"), resp.Header.Get("X-Inferrail-Cached-Tokens")
}

// burst sends several requests at once that begin as one before them: as many as go where that
// is cached, and enough that it is worth it to have it at the other engine too. round tells
// their beginning from others'. It returns who has it.
func (p *prewarmed) burst(key string, round int) (system, holder string) {
	system = fmt.Sprint("all ", round, strings.Repeat(" begin with this", 1000))
	holder, _ = p.ask(key, system)
	var together sync.WaitGroup
	for i := range 4 {
		together.Go(func() { p.ask(key, system+fmt.Sprint(" ", i, strings.Repeat(" and go on", 200))) })
	}
	together.Wait()
	return system, holder
}

// report is what the page says of the model.
func (p *prewarmed) report() (r proxy.PrewarmReport) {
	p.t.Helper()
	status, text := page(p.t, p.a, "/debug/prewarm?model=m")
	var list []proxy.PrewarmReport
	if err := json.Unmarshal([]byte(text), &list); err != nil || status != 200 || len(list) != 1 {
		p.t.Fatalf("status %d, %v: %s", status, err, text)
	}
	return list[0]
}

// counted reports whether /metrics has a series that says more than nothing.
func (p *prewarmed) counted(what string) bool {
	for _, line := range series(p.t, p.a, what) {
		if !strings.HasSuffix(strings.TrimSpace(line), " 0") {
			return true
		}
	}
	return false
}

// Two engines as they are: what a burst of requests begins with is computed at the one that
// does not have it, by the time that the next burst comes; until it is off.
func TestPrewarm(t *testing.T) {
	p := newPrewarmed(t, "")
	const computed = `inferrail_prewarm_total{model="m",outcome="computed"}`
	// Once all is as fast as was learned. On a busy machine a request may have computed it.
	for round := 0; !p.counted(computed); round++ {
		if round == 10 {
			t.Fatalf("nothing was computed ahead: %+v", p.report())
		}
		p.burst("", round)
		time.Sleep(200 * time.Millisecond)
	}
	eventually(t, func() bool {
		r := p.report()
		return len(r.Prefixes) > 0 && r.Replicas[0].State == "ready" && r.Replicas[1].State == "ready"
	}, func() string { return fmt.Sprintf("%+v", p.report()) })
	r := p.report()
	for _, at := range r.Prefixes[0].Replicas {
		if at.HeldTokens < r.Prefixes[0].Tokens-512 {
			t.Errorf("not all have it: %+v", r)
		}
	}
	if r.PieceMS != 20 || !p.counted("inferrail_prewarmed_tokens_total") {
		t.Errorf("it takes %v ms; tokens are counted: %v", r.PieceMS, p.counted("inferrail_prewarmed_tokens_total"))
	}
	if status, text := page(t, p.a, "/debug/prewarm?model=x"); status != 200 || strings.TrimSpace(text) != "[]" {
		t.Errorf("of no model: %d %s", status, text)
	}

	off := p.cfg
	off.Routing.Prewarm = durationOff
	if err := p.a.Reload(off); err != nil {
		t.Fatal(err)
	}
	before := series(t, p.a, computed)
	p.burst("", 100)
	time.Sleep(200 * time.Millisecond)
	if r := p.report(); r.PieceMS != 0 || len(series(t, p.a, computed)) != 1 || series(t, p.a, computed)[0] != before[0] {
		t.Errorf("off: %v ms, %q and before %q", r.PieceMS, series(t, p.a, computed), before)
	}
}

// Engines that want a key of their clients are not asked again, and the log says what to do;
// when the agent has the key, they are.
func TestPrewarmWithKeys(t *testing.T) {
	p := newPrewarmed(t, "secret")
	const warning = "refuses to compute prompts ahead"
	rounds := 0
	until := func(what string, ok func() bool) {
		t.Helper()
		for last := rounds + 10; !ok(); rounds++ {
			if rounds == last {
				t.Fatalf("not %s: %+v", what, p.report())
			}
			p.burst("secret", rounds)
			time.Sleep(200 * time.Millisecond)
		}
	}
	until("refused", func() bool { return strings.Contains(p.log.String(), warning) })
	if !strings.Contains(p.log.String(), "api_key") {
		t.Error("nothing says what to do")
	}
	with := p.cfg
	with.Replicas = append([]ReplicaConfig{}, with.Replicas...)
	for i := range with.Replicas {
		with.Replicas[i].APIKey = "secret"
	}
	if err := p.a.Reload(with); err != nil {
		t.Fatal(err)
	}
	until("computed", func() bool { return p.counted(`inferrail_prewarm_total{model="m",outcome="computed"}`) })
	if n := strings.Count(p.log.String(), warning); n > 2 {
		t.Errorf("%d warnings of two engines", n)
	}
}
