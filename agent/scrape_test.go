package agent

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/inferrail/inferrail/simulator"
)

// paged is an engine whose pages a test writes. A page that it was given none of
// it does not have.
type paged struct {
	*httptest.Server

	mu    sync.Mutex // guards what follows
	pages map[string]string
	asked map[string]int
	hang  map[string]bool
	late  map[string]time.Duration
	codes map[string]int
}

// startPaged starts an engine that serves the model m.
func startPaged(t *testing.T) *paged {
	t.Helper()
	e := &paged{pages: map[string]string{"/health": "", "/v1/models": `{"data":[{"id":"m","root":"org/m"}]}`},
		asked: map[string]int{}, hang: map[string]bool{}, late: map[string]time.Duration{}, codes: map[string]int{}}
	e.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		e.mu.Lock()
		text, ok := e.pages[r.URL.Path]
		hang, late, code := e.hang[r.URL.Path], e.late[r.URL.Path], e.codes[r.URL.Path]
		e.asked[r.URL.Path]++
		e.mu.Unlock()
		if hang {
			<-r.Context().Done()
			return
		}
		select {
		case <-time.After(late):
		case <-r.Context().Done():
		}
		if code != 0 {
			w.WriteHeader(code)
			return
		}
		if !ok {
			http.NotFound(w, r)
			return
		}
		fmt.Fprint(w, text)
	}))
	t.Cleanup(e.Close)
	return e
}

func (e *paged) set(page, text string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.pages[page] = text
}

// delay lets a page come late, and status answers it with a status; 0 does not.
func (e *paged) delay(page string, d time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.late[page] = d
}

func (e *paged) status(page string, code int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.codes[page] = code
}

func (e *paged) count(page string) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.asked[page]
}

// vllmPage is what a vLLM tells that was started then, and whose ranks have
// counted so many tokens.
func vllmPage(started float64, block, blocks int, caching string, tokens ...int) string {
	var out strings.Builder
	if started > 0 {
		fmt.Fprintf(&out, "process_start_time_seconds %v\n", started)
	}
	for rank, n := range tokens {
		fmt.Fprintf(&out, "vllm:cache_config_info{block_size=\"%d\",enable_prefix_caching=\"%s\",engine=\"%d\",num_gpu_blocks=\"%d\"} 1.0\n", block, caching, rank, blocks*len(tokens))
		fmt.Fprintf(&out, "vllm:prompt_tokens_total{engine=\"%d\",model_name=\"m\"} %d\n", rank, n)
	}
	return out.String()
}

// caches renders what is known of the members' caches: id: capacity x block.
func (s *stage) caches() string {
	s.fleet.mu.Lock()
	defer s.fleet.mu.Unlock()
	var out []string
	for _, m := range s.fleet.members {
		text := fmt.Sprintf("%s: %dx%d", m.id, m.cache.slot.Capacity, m.cache.slot.BlockSize)
		if m.cache.uncached {
			text += " off"
		}
		if m.cache.slot.AfterPrefill {
			text += " after prefill"
		}
		if m.restarts > 0 {
			text += fmt.Sprintf(" restarted %d", m.restarts)
		}
		out = append(out, text)
	}
	return strings.Join(out, ", ")
}

func (s *stage) expectCaches(want string) {
	s.Helper()
	var got string
	eventually(s.T, func() bool { got = s.caches(); return got == want }, func() string {
		return fmt.Sprintf("the caches are %q, want %q", got, want)
	})
}

// rooms are how many tokens of sequences that run together the members' caches have room
// for, as far as it is known.
func (s *stage) rooms() (tokens []int) {
	s.fleet.mu.Lock()
	defer s.fleet.mu.Unlock()
	for _, m := range s.fleet.members {
		tokens = append(tokens, m.replica.Standing().Room())
	}
	return tokens
}

func (s *stage) blocks(model string) []int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.published.Models[model].Blocks
}

// What an engine has for a cache is known when it takes its first request, and
// followed from then on; what is configured comes first.
func TestCachesAreLearned(t *testing.T) {
	vllm, sglang, llama, other, silent := startPaged(t), startPaged(t), startPaged(t), startPaged(t), startPaged(t)
	vllm.set("/metrics", vllmPage(1000, 16, 500, "True", 0))
	sglang.set("/server_info", `{"page_size":64,"dp_size":1,"disable_radix_cache":false,"internal_states":[{"memory_usage":{"token_capacity":6400}}]}`)
	llama.set("/props", `{"default_generation_settings":{"n_ctx":1600},"total_slots":2}`)
	other.set("/metrics", vllmPage(1000, 16, 700, "True", 0))
	s := newStage(t, nil, ReplicaConfig{ID: "vllm", URL: vllm.URL}, ReplicaConfig{ID: "sglang", URL: sglang.URL},
		ReplicaConfig{ID: "llama", URL: llama.URL}, ReplicaConfig{ID: "other", URL: other.URL, KVBlocks: 33}, ReplicaConfig{ID: "silent", URL: silent.URL})
	// At once: the first check has looked.
	if got, want := s.caches(), "vllm: 500x16, sglang: 100x64 after prefill, llama: 200x16, other: 33x16, silent: 16384x16"; got != want {
		t.Errorf("the caches are %q, want %q", got, want)
	}
	if got := s.blocks("m"); !slices.Equal(got, []int{16, 64}) {
		t.Errorf("the blocks have %v tokens", got)
	}
	// What is only supposed is no room, and slots share none.
	if got, want := s.rooms(), []int{500 * 16, 100 * 64, 0, 33 * 16, 0}; !slices.Equal(got, want) {
		t.Errorf("there is room for %v tokens, want %v", got, want)
	}
	vllm.set("/metrics", vllmPage(1000, 32, 250, "True", 0))
	other.set("/metrics", vllmPage(1000, 32, 250, "False", 0))
	s.expectCaches("vllm: 250x32, sglang: 100x64 after prefill, llama: 200x16, other: 33x32 off, silent: 16384x16")
	if got := s.blocks("m"); !slices.Equal(got, []int{32, 16, 64}) {
		t.Errorf("the blocks have %v tokens", got)
	}
	// An engine whose page is gone for a while keeps what it has.
	vllm.set("/metrics", "")
	asked := vllm.count("/metrics")
	eventually(t, func() bool { return vllm.count("/metrics") > asked+1 }, func() string { return "it is not asked" })
	s.expectCaches("vllm: 250x32, sglang: 100x64 after prefill, llama: 200x16, other: 33x32 off, silent: 16384x16")

	c := *s.fleet.cfg.Load()
	c.Index.DefaultCapacity = 99
	c.Models = []ModelConfig{{Name: "m", BlockSize: 128}}
	c.Replicas = slices.Clone(c.Replicas)
	c.Replicas[0].KVBlocks, c.Replicas[4].Engine = 77, "sglang"
	if err := s.fleet.reconfigure(&c); err != nil {
		t.Fatal(err)
	}
	s.expectCaches("vllm: 77x128, sglang: 100x128 after prefill, llama: 200x128, other: 33x128 off, silent: 99x128 after prefill")
	if got, want := s.rooms(), []int{77 * 128, 100 * 64, 0, 33 * 128, 0}; !slices.Equal(got, want) {
		t.Errorf("there is room for %v tokens, want %v", got, want)
	}
	// What events tell outweighs that.
	s.fleet.learnBlock(s.fleet.members[0], 8)
	s.expectCaches("vllm: 77x8, sglang: 100x128 after prefill, llama: 200x128, other: 33x128 off, silent: 99x128 after prefill")
}

// An engine that has no page is asked rarely, and one that does not answer it
// serves all the same.
func TestPagesThatAreNotThere(t *testing.T) {
	absent, hangs := startPaged(t), startPaged(t)
	hangs.hang["/metrics"] = true
	s := newStage(t, nil, ReplicaConfig{ID: "absent", URL: absent.URL}, ReplicaConfig{ID: "hangs", URL: hangs.URL})
	s.expect("m=absent,hangs")
	s.expectCaches("absent: 16384x16, hangs: 16384x16")
	began := time.Now()
	eventually(t, func() bool { return absent.count("/metrics") >= 3 }, func() string { return "it is asked no more" })
	// After one and two seconds and their tenths.
	if took := time.Since(began); took < 2*time.Second {
		t.Errorf("it was asked three times in %v", took)
	}
}

// An engine's data-parallel ranks are replicas of their own.
func TestRanksAreReplicas(t *testing.T) {
	e, fixed := startPaged(t), startPaged(t)
	e.set("/metrics", vllmPage(1000, 16, 500, "True", 5, 5))
	s := newStage(t, nil, ReplicaConfig{ID: "a", URL: e.URL, MaxConcurrency: 7}, ReplicaConfig{ID: "b", URL: fixed.URL, DataParallel: 3})
	// Both ranks have been checked when the start is over.
	if got := s.models(); got != "m=a/0,a/1,b/0,b/1,b/2" {
		t.Errorf("the fleet is %q", got)
	}
	s.expectCaches("a/0: 500x16, a/1: 500x16, b/0: 16384x16, b/1: 16384x16, b/2: 16384x16")

	// One rank has lost its cache.
	e.set("/metrics", vllmPage(1000, 16, 500, "True", 6, 1))
	s.expectCaches("a/0: 500x16, a/1: 500x16 restarted 1, b/0: 16384x16, b/1: 16384x16, b/2: 16384x16")
	// The engine comes back with more of them, and then as one.
	e.set("/metrics", vllmPage(1200, 16, 500, "True", 0, 0, 0))
	s.expectCaches("a/0: 500x16 restarted 1, a/1: 500x16 restarted 2, a/2: 500x16, b/0: 16384x16, b/1: 16384x16, b/2: 16384x16")
	s.expect("m=a/0,a/1,a/2,b/0,b/1,b/2")
	e.set("/metrics", vllmPage(1300, 16, 500, "True", 0))
	s.expect("m=a,b/0,b/1,b/2")

	// The configuration has the last word.
	c := *s.fleet.cfg.Load()
	c.Replicas = slices.Clone(c.Replicas)
	c.Replicas[0].DataParallel, c.Replicas[1].DataParallel = 2, 1
	if err := s.fleet.reconfigure(&c); err != nil {
		t.Fatal(err)
	}
	s.expect("m=a/0,a/1,b")
	s.fleet.mu.Lock()
	servers := len(s.fleet.servers)
	s.fleet.mu.Unlock()
	if servers != 2 {
		t.Errorf("there are %d servers", servers)
	}
}

// A rank's name that is taken is told, and the others join.
func TestRankNamesClash(t *testing.T) {
	e, other := startPaged(t), startPaged(t)
	c := DefaultConfig()
	c.Replicas = []ReplicaConfig{{ID: "a", URL: e.URL, DataParallel: 2}, {ID: "a/1", URL: other.URL}}
	if err := c.Validate(); err == nil || !strings.Contains(err.Error(), `replicas[0].data_parallel: rank 1 would be called "a/1", as replicas[1].id is`) {
		t.Errorf("the error is %v", err)
	}
	e.set("/metrics", vllmPage(1000, 16, 500, "True", 5, 5))
	s := newStage(t, nil, ReplicaConfig{ID: "a", URL: e.URL}, ReplicaConfig{ID: "a/1", URL: other.URL})
	s.expect("m=a/0,a/1")
}

// An engine that has started anew has nothing in its cache.
func TestRestartsAreSeen(t *testing.T) {
	e := startPaged(t)
	e.set("/metrics", vllmPage(1000, 16, 500, "True", 100))
	s := newStage(t, nil, ReplicaConfig{ID: "a", URL: e.URL})
	s.expectCaches("a: 500x16")
	// Nor need it have blocks of the size that its events told.
	s.fleet.learnBlock(s.fleet.members[0], 8)
	s.expectCaches("a: 500x8")
	e.set("/metrics", vllmPage(1100, 16, 500, "True", 200))
	s.expectCaches("a: 500x16 restarted 1")
	e.set("/metrics", vllmPage(0, 16, 500, "True", 150))
	s.expectCaches("a: 500x16 restarted 2")
}

// Of an engine that tells nothing of its process, a long outage is a restart, and
// a short one is not.
func TestOutages(t *testing.T) {
	silent, vllm := startPaged(t), startPaged(t)
	vllm.set("/metrics", vllmPage(1000, 16, 500, "True", 100))
	s := newStage(t, nil, ReplicaConfig{ID: "silent", URL: silent.URL}, ReplicaConfig{ID: "vllm", URL: vllm.URL})
	outage := func(d time.Duration) {
		s.fleet.mu.Lock()
		defer s.fleet.mu.Unlock()
		now := time.Now()
		for _, m := range s.fleet.members {
			m.wentDown = now.Add(-d)
			s.fleet.cameUpLocked(m, now)
			s.fleet.cameUpLocked(m, now.Add(time.Hour)) // it was not down since
		}
	}
	outage(longOutage - time.Second)
	s.expectCaches("silent: 16384x16, vllm: 500x16")
	outage(longOutage)
	s.expectCaches("silent: 16384x16 restarted 1, vllm: 500x16")
}

// Where several processes answer at one URL nothing is concluded, and that is
// told; nor do ranks come and go with each look.
func TestSeveralProcesses(t *testing.T) {
	e := startPaged(t)
	pages := []string{vllmPage(1000, 16, 500, "True", 100), vllmPage(1200, 16, 500, "True", 5)}
	e.set("/metrics", pages[0])
	s := newStage(t, nil, ReplicaConfig{ID: "a", URL: e.URL})
	look := func(i int) {
		t.Helper()
		e.set("/metrics", pages[i%2])
		s.fleet.look(t.Context(), s.fleet.servers[0], nil)
	}
	for i := range 4 {
		look(i)
	}
	eventually(t, func() bool {
		return strings.Contains(strings.Join(s.fleet.ailments(), "; "), "what replica a has in its cache is unknown (several processes answer at "+e.URL)
	}, func() string { return fmt.Sprint(s.fleet.ailments()) })
	before := s.caches()
	for i := range 4 {
		look(i)
	}
	if got := s.caches(); got != before {
		t.Errorf("the caches were %q and are %q", before, got)
	}
}

// What simulated engines tell is read as what real ones do.
func TestSimulatorsCaches(t *testing.T) {
	start := func(c simulator.Config) string {
		t.Helper()
		c.ServedModelName, c.ZeroLatency = []string{"m"}, true
		server, err := simulator.Start(c)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { server.Close() })
		return server.URL()
	}
	s := newStage(t, nil,
		ReplicaConfig{ID: "vllm", URL: start(simulator.Config{BlockSize: 32, NumGPUBlocks: 500})},
		ReplicaConfig{ID: "ranks", URL: start(simulator.Config{BlockSize: 16, NumGPUBlocks: 300, DataParallelSize: 2})},
		ReplicaConfig{ID: "off", URL: start(simulator.Config{NumGPUBlocks: 300, NoEnablePrefixCaching: true})},
		ReplicaConfig{ID: "sglang", URL: start(simulator.Config{Engine: "sglang", BlockSize: 16, NumGPUBlocks: 400})},
		ReplicaConfig{ID: "both", URL: start(simulator.Config{Engine: "sglang", BlockSize: 16, NumGPUBlocks: 400, DataParallelSize: 2})})
	s.expectCaches("vllm: 500x32, ranks/0: 300x16, ranks/1: 300x16, off: 300x16 off, sglang: 400x16 after prefill, both/0: 400x16 after prefill, both/1: 400x16 after prefill")
}
