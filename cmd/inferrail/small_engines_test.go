package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/inferrail/inferrail/simulator"
)

// small is an agent in front of simulated engines that are neither vLLM nor SGLang.
type small struct {
	t           *testing.T
	engines     []*simulator.Server
	addr, admin string
}

// newSmall starts an engine of each configuration, and an agent that is told in yaml
// what is particular about them: %s stands for each engine's URL.
func newSmall(t *testing.T, yaml string, configs ...simulator.Config) *small {
	t.Helper()
	s := &small{t: t}
	var urls []any
	for _, cfg := range configs {
		e, err := simulator.Start(cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = e.Close() })
		s.engines = append(s.engines, e)
		urls = append(urls, e.URL())
	}
	p := start(t, agentArgs("--datapath", "copy", "--config", file(t, "inferrail.yaml", fmt.Sprintf(yaml, urls...)))...)
	s.addr, s.admin = p.expect(`(?m)^listening  ([^,]+),`), p.expect(`admin (http://\S+)`)
	p.expect(fmt.Sprintf(`(?m)^replicas   (%d of %[1]d)`, len(configs)))
	t.Cleanup(func() {
		p.signals <- syscall.SIGTERM
		p.exit(0)
	})
	return s
}

// ask posts a body to a path of the agent.
func (s *small) ask(path, body string) (*http.Response, string) {
	s.t.Helper()
	resp, err := http.Post("http://"+s.addr+path, "application/json", strings.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		s.t.Fatalf("POST %s: status %d, %v: %s", path, resp.StatusCode, err, text)
	}
	return resp, string(text)
}

// smallFleet is what the agent says of itself.
type smallFleet struct {
	Replicas []struct {
		ID      string
		KVCache struct {
			Engine    string
			Blocks    int
			BlockSize int `json:"block_size"`
			Sequences int
			State     string
		} `json:"kv_cache"`
		Load struct {
			State, Page      string
			Running, Waiting int
			Foreign          int
			VRAMFree         float64 `json:"vram_free_mb"`
		}
	}
	Models []struct {
		Name    string
		Prompts struct {
			State, Why string
			Probes     []struct{ Result, Via string }
		}
	}
}

// fleet waits until the agent says of itself what is wanted.
func (s *small) fleet(what string, holds func(f *smallFleet) bool) *smallFleet {
	s.t.Helper()
	var page []byte
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		resp, err := http.Get(s.admin + "/debug/fleet")
		if err != nil {
			s.t.Fatal(err)
		}
		page, err = io.ReadAll(resp.Body)
		resp.Body.Close()
		var f smallFleet
		if err == nil {
			err = json.Unmarshal(page, &f)
		}
		if err != nil {
			s.t.Fatal(err)
		}
		if holds(&f) {
			return &f
		}
	}
	s.t.Fatalf("not within a minute: %s\n%s", what, page)
	return nil
}

// metric returns a line's value on the agent's page of metrics.
func (s *small) metric(name string) float64 {
	s.t.Helper()
	resp, err := http.Get(s.admin + "/metrics")
	if err != nil {
		s.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	for line := range strings.SplitSeq(string(text), "\n") {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			v, err := strconv.ParseFloat(value, 64)
			if err != nil {
				s.t.Fatal(err)
			}
			return v
		}
	}
	s.t.Fatalf("no metric %s", name)
	return 0
}

// long is a chat of a few hundred tokens.
func long(model, more string, stream bool) string {
	return fmt.Sprintf(`{"model":%q,"stream":%v,"max_tokens":3,"messages":[{"role":"system","content":%q},{"role":"user","content":%q}]}`,
		model, stream, strings.Repeat("Be brief in all that you say. ", 20), more)
}

// An agent that is told nothing of its engines finds out that they are llama.cpp: what
// they have, what their prompts are, and what they have to do, with metrics or without.
func TestAgentBeforeLlamaCPP(t *testing.T) {
	t.Parallel()
	cfg := simulator.Config{Engine: "llamacpp", MaxModelLen: 4096, MaxNumSeqs: 2, PrefillA: 1, PrefillD: 100, TimePerOutputToken: time.Millisecond}
	with := cfg
	with.LlamaCPP.Metrics = true
	s := newSmall(t, `
models: [{name: sim, tokenizer: "builtin:sim"}]
replicas: [{id: a, url: "%s"}, {id: b, url: "%s"}]
load: {interval: 50ms}
`, with, cfg)
	f := s.fleet("both are known", func(f *smallFleet) bool {
		known := len(f.Models) == 1 && len(f.Models[0].Prompts.Probes) == 2
		for _, r := range f.Replicas {
			known = known && r.KVCache.Engine == "llamacpp" && r.KVCache.Blocks > 0 && r.Load.State == "ok"
		}
		return known
	})
	for i, page := range []string{"/metrics", "/slots"} {
		r := f.Replicas[i]
		if r.Load.Page != page || r.KVCache.State != "approximate" || r.KVCache.Blocks*r.KVCache.BlockSize != 2*4096 || r.KVCache.Sequences != 2 {
			t.Errorf("%s: %+v", r.ID, r)
		}
	}
	for _, p := range f.Models[0].Prompts.Probes {
		if p.Result != "agrees" || p.Via != "apply-template" {
			t.Errorf("probe: %+v", p)
		}
	}

	// A conversation stays where its beginning is.
	first, _ := s.ask("/v1/chat/completions", long("sim", "one", false))
	second, answer := s.ask("/v1/chat/completions", long("sim", "two", false))
	if first.Header.Get("x-inferrail-replica") != second.Header.Get("x-inferrail-replica") {
		t.Error("it has moved")
	}
	var body struct {
		Usage struct {
			Prompt  int `json:"prompt_tokens"`
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
		Timings struct {
			Cached int `json:"cache_n"`
		}
	}
	if err := json.Unmarshal([]byte(answer), &body); err != nil {
		t.Fatal(err)
	}
	if n := body.Usage.Details.Cached; n == 0 || n != body.Timings.Cached {
		t.Errorf("%d tokens were cached, %d say the timings", n, body.Timings.Cached)
	}
	if got := second.Header.Get("x-inferrail-prompt-tokens"); got != strconv.Itoa(body.Usage.Prompt) {
		t.Errorf("the agent has %s tokens, the engine %d", got, body.Usage.Prompt)
	}

	// A stream is passed on as it is: nobody has asked for its usage, so none is there;
	// what llama.cpp tells at its end is, and what it tells of completions anyhow.
	if _, stream := s.ask("/v1/chat/completions", long("sim", "three", true)); strings.Contains(stream, `"usage"`) ||
		strings.Count(stream, `"timings"`) != 1 || !strings.HasSuffix(stream, "data: [DONE]\n\n") {
		t.Errorf("the stream:\n%s", stream)
	}
	if _, stream := s.ask("/v1/completions", `{"model":"sim","prompt":"a b c","stream":true,"max_tokens":2}`); strings.Count(stream, `"usage"`) != 1 ||
		strings.Count(stream, `"timings"`) != 1 {
		t.Errorf("the stream of a completion:\n%s", stream)
	}
	if n := s.metric(`inferrail_prompt_checks_total{result="disagree",source="usage"}`); n != 0 {
		t.Errorf("%v prompts had other tokens", n)
	}
	if n := s.metric(`inferrail_prompt_checks_total{result="agree",source="usage"}`); n < 4 {
		t.Errorf("%v prompts had the same tokens", n)
	}
	status, explained, said := explainOf(t, long("sim", "four", false), "--admin", s.admin)
	if status != 0 || !strings.Contains(explained, " tokens, exact; ") {
		t.Errorf("status %d: %s%s", status, explained, said)
	}

	// What others have sent there counts.
	ctx, leave := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		r, _ := http.NewRequestWithContext(ctx, http.MethodPost, s.engines[0].URL()+"/completion", strings.NewReader(`{"prompt":"a b","n_predict":4000,"n":2}`))
		if resp, err := http.DefaultClient.Do(r); err == nil {
			resp.Body.Close()
		}
	}()
	s.fleet("the first has two running", func(f *smallFleet) bool { return f.Replicas[0].Load.Running == 2 })
	leave()
	<-done
	s.fleet("it has none", func(f *smallFleet) bool { return f.Replicas[0].Load.Running == 0 })
}

// An agent before Ollama knows how much memory its models have. Chats are followed
// exactly; completions, of which Ollama makes chats, do not make it doubt that.
func TestAgentBeforeOllama(t *testing.T) {
	t.Parallel()
	cfg := simulator.Config{Engine: "ollama", MaxModelLen: 4096, PrefillA: 1, PrefillD: 100, TimePerOutputToken: time.Millisecond, LoadTime: 50 * time.Millisecond}
	s := newSmall(t, `
models: [{name: "sim:latest", aliases: [sim], tokenizer: "builtin:sim"}]
replicas: [{id: a, url: "%s", vram: 24GiB}, {id: b, url: "%s", vram: 24GiB}]
load: {interval: 50ms}
`, cfg, cfg)
	s.fleet("all memory is free", func(f *smallFleet) bool {
		return f.Replicas[0].Load.VRAMFree == 24<<10 && f.Replicas[1].Load.VRAMFree == 24<<10
	})
	first, _ := s.ask("/v1/chat/completions", long("sim", "one", false))
	second, answer := s.ask("/v1/chat/completions", long("sim", "two", false))
	if a, b := first.Header.Get("x-inferrail-replica"), second.Header.Get("x-inferrail-replica"); a != b {
		t.Errorf("it has moved from %s to %s", a, b)
	}
	if !strings.Contains(answer, `"prompt_tokens":`+second.Header.Get("x-inferrail-prompt-tokens")+",") {
		t.Errorf("the agent has %s tokens, the engine says %s", second.Header.Get("x-inferrail-prompt-tokens"), answer)
	}
	s.fleet("one has the model in memory", func(f *smallFleet) bool {
		return f.Replicas[0].Load.VRAMFree < 20<<10 != (f.Replicas[1].Load.VRAMFree < 20<<10)
	})
	if _, stream := s.ask("/v1/chat/completions", long("sim", "three", true)); strings.Contains(stream, `"usage"`) ||
		!strings.Contains(stream, `"finish_reason":"length"`) || !strings.HasSuffix(stream, "data: [DONE]\n\n") {
		t.Errorf("the stream:\n%s", stream)
	}
	for i := range 20 {
		// How many tokens the chat has that is made of it, is not known.
		resp, _ := s.ask("/v1/completions", fmt.Sprintf(`{"model":"sim","prompt":"word %d","max_tokens":1}`, i))
		if n := resp.Header.Get("x-inferrail-prompt-tokens"); n != "" {
			t.Errorf("the agent has %s tokens of a completion", n)
		}
	}
	f := s.fleet("it follows the model", func(f *smallFleet) bool { return len(f.Models) == 1 })
	if p := f.Models[0].Prompts; p.State != "exact" {
		t.Errorf("prompts are %s: %s", p.State, p.Why)
	}
	if n := s.metric(`inferrail_prompt_checks_total{result="disagree",source="usage"}`); n != 0 {
		t.Errorf("%v prompts had other tokens", n)
	}
	// An error has OpenAI's shape whoever says it.
	resp, err := http.Post("http://"+s.addr+"/v1/chat/completions", "application/json", strings.NewReader(`{"model":"sim","messages":[{"role":"user","content":5}]}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(resp.Body)
	if resp.StatusCode != http.StatusBadRequest || !strings.Contains(string(text), `"invalid_request_error"`) {
		t.Errorf("status %d: %s", resp.StatusCode, text)
	}
}

// Of an Ollama of which the configuration says nothing the agent finds out what it is,
// and that it runs one request at a time; of one that runs more, that too.
func TestAgentFindsOllama(t *testing.T) {
	t.Parallel()
	cfg := simulator.Config{Engine: "ollama", MaxModelLen: 4096, PrefillA: 1, PrefillD: 100, TimePerOutputToken: 5 * time.Millisecond}
	more := cfg
	more.MaxNumSeqs = 3
	s := newSmall(t, `
models: [{name: "sim:latest", aliases: [sim], tokenizer: "builtin:sim"}]
replicas: [{id: a, url: "%s"}, {id: b, url: "%s"}]
routing: {default_policy: least_request}
`, cfg, more)
	s.fleet("both are known", func(f *smallFleet) bool {
		known := true
		for _, r := range f.Replicas {
			known = known && r.KVCache.Engine == "ollama" && r.KVCache.Sequences == 1
		}
		return known
	})
	stop := make(chan struct{})
	var clients sync.WaitGroup
	defer clients.Wait()
	defer close(stop)
	for i := range 8 {
		clients.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				body := fmt.Sprintf(`{"model":"sim","stream":true,"max_tokens":40,"messages":[{"role":"user","content":"client %d"}]}`, i)
				resp, err := http.Post("http://"+s.addr+"/v1/chat/completions", "application/json", strings.NewReader(body))
				if err != nil {
					t.Error(err)
					return
				}
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
		})
	}
	f := s.fleet("the second runs several", func(f *smallFleet) bool { return f.Replicas[1].KVCache.Sequences > 1 })
	if n := f.Replicas[0].KVCache.Sequences; n != 1 {
		t.Errorf("the first runs %d at a time", n)
	}
}

// pythonOllama is the release of Ollama's client for Python that is tested.
const pythonOllama = "0.6.3"

// TestPythonClients lets the clients that others wrote for Ollama, and OpenAI's SDK,
// judge the two engines' faces.
func TestPythonClients(t *testing.T) {
	python := need(t, "python3")
	dir := cached(t, "sdk-ollama-"+pythonOllama+"-openai-"+pythonSDK, func(ctx context.Context, dir string) error {
		if err := command(ctx, dir, python, "-m", "venv", dir); err != nil {
			return err
		}
		return command(ctx, dir, filepath.Join(dir, "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries=1", "--timeout=15",
			"ollama=="+pythonOllama, "openai=="+pythonSDK)
	}, func(ctx context.Context, dir string) error {
		return command(ctx, dir, filepath.Join(dir, "bin/python"), "-c", "import ollama, openai; assert openai.__version__ == '"+pythonSDK+"'")
	})
	llama := simulator.Config{Engine: "llamacpp", ZeroLatency: true, DefaultOutputTokens: 20}
	llama.LlamaCPP.Embeddings = true
	for _, cfg := range []simulator.Config{llama, {Engine: "ollama", ZeroLatency: true, DefaultOutputTokens: 20}} {
		t.Run(cfg.Engine, func(t *testing.T) {
			e, err := simulator.Start(cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer e.Close()
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			cmd := exec.CommandContext(ctx, filepath.Join(dir, "bin/python"), "testdata/sdk/small_engines_test.py")
			cmd.Env = append(os.Environ(), "INFERRAIL_ENGINE="+cfg.Engine, "INFERRAIL_URL="+e.URL(), "PYTHONDONTWRITEBYTECODE=1", "NO_PROXY=*", "no_proxy=*")
			cmd.WaitDelay = time.Second
			var out bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &out
			if err := cmd.Run(); err != nil {
				t.Errorf("%v, %v\n%s", err, ctx.Err(), &out)
			}
			t.Logf("%s", &out)
		})
	}
}
