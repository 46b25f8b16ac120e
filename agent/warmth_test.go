package agent

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/crc64"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/simulator"
)

// savedFile is what a fleet of two engines saves.
func savedFile(t *testing.T) []byte {
	t.Helper()
	a, b, silent := startPaged(t), startPaged(t), startPaged(t)
	a.set("/metrics", vllmPage(1000, 16, 100, "True", 50))
	b.set("/metrics", vllmPage(0, 16, 100, "True", 50, 60))
	s := newStage(t, nil, ReplicaConfig{ID: "a", URL: a.URL}, ReplicaConfig{ID: "b", URL: b.URL}, ReplicaConfig{ID: "silent", URL: silent.URL})
	file := filepath.Join(t.TempDir(), "snapshot")
	if err := s.fleet.save(file); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	list, err := os.ReadDir(filepath.Dir(file))
	if err != nil || len(list) != 1 {
		t.Errorf("the directory holds %v (%v)", list, err)
	}
	return data
}

// What is saved names each slot and its engine's process; engines that tell
// nothing of theirs are left out.
func TestSavedFile(t *testing.T) {
	data := savedFile(t)
	head, slots, err := parseWarmth(data)
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, s := range slots {
		ids = append(ids, s.Replica)
	}
	if got := strings.Join(ids, " "); got != "a b/0 b/1" || head.Names["m"] != "m" {
		t.Errorf("saved are %s, and the names %v", got, head.Names)
	}
	if s := slots[2]; s.Rank != 1 || s.Model != "m" || s.Block != 16 || s.Started != 0 || s.Counts["vllm:prompt_tokens_total"] != 60 || len(s.held) == 0 {
		t.Errorf("%+v", s)
	}
}

// A file that is cut short, damaged or of something else is known as such.
func TestDamagedFile(t *testing.T) {
	data := savedFile(t)
	f := func(data []byte, want string) {
		t.Helper()
		_, slots, err := parseWarmth(data)
		if err == nil || !strings.Contains(err.Error(), want) || slots != nil {
			t.Errorf("%d slots and %v, want %s", len(slots), err, want)
		}
	}
	for n := range data {
		f(data[:n], "cut short")
	}
	for i := range data {
		broken := bytes.Clone(data)
		broken[i] ^= 0x10
		switch {
		case i < len(warmMagic)-1:
			f(broken, "no snapshot")
		case i == len(warmMagic)-1:
			f(broken, "another version")
		default:
			f(broken, "checksum")
		}
	}
	f(nil, "no snapshot")
	f([]byte("replicas: []\n# something else\n"), "no snapshot")
	signed := func(body string) []byte {
		text := []byte(warmMagic + body)
		return binary.BigEndian.AppendUint64(text, crc64.Checksum(text, warmTable))
	}
	f(signed(""), "a length")
	f(signed("\xff\xff\xff\xff\xff\xff\xff\xff\x7f{}"), "a length")
	f(signed("\x02[]"), "cannot unmarshal")
	f(signed("\x02{}\x02{}"), "a length")
}

// FuzzSavedFile: whatever the file holds, reading it does no harm.
func FuzzSavedFile(f *testing.F) {
	f.Add([]byte("\x02{}\x02{}\x00"))
	f.Add([]byte(`{}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		text := append([]byte(warmMagic), body...)
		_, slots, _ := parseWarmth(binary.BigEndian.AppendUint64(text, crc64.Checksum(text, warmTable)))
		l := life{started: 5}
		for _, s := range slots {
			_ = s.holds(&l, 100)
		}
	})
}

// Whether an engine still holds what it did is told by its process and counts.
func TestWhatStillHolds(t *testing.T) {
	lifeOf := func(page string) *life {
		r := readMetrics(appendPoints(nil, []byte(page)))
		var l life
		l.next(&r)
		return &l
	}
	f := func(saved, now string, rank int, want string) {
		t.Helper()
		was := lifeOf(saved)
		w := warmSlot{Rank: rank, Block: 16, Started: was.started, Counts: map[string]float64{}}
		counts := was.countsOf(rank)
		for i, known := range counts.known {
			if known {
				w.Counts[familyNames[i]] = counts.value[i]
			}
		}
		got := ""
		if err := w.holds(lifeOf(now), 100); err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	p := func(started float64, tokens ...int) string { return vllmPage(started, 16, 100, "True", tokens...) }
	f(p(1000, 50), p(1000, 50), -1, "")
	f(p(1000, 0), p(1000, 0), -1, "")
	f(p(1000, 50), p(1000, 90), -1, "")
	f(p(1000, 50), p(1000, 49), -1, "it counts less than before: it has restarted")
	f(p(1000, 50), p(1001, 90), -1, "it is another process")
	f(p(1000, 50), p(0, 90), -1, "it is another process")
	f(p(1000, 50), "process_start_time_seconds 1000\n", -1, "it does not tell vllm:prompt_tokens_total any more")
	f(p(1000, 50), p(1000, 50+1601), -1, "it has read more than its cache holds since")
	// Without a start, only counts tell; where there are none nothing does.
	f(p(0, 50, 60), p(0, 50, 60), 1, "")
	f(p(0, 50, 60), p(0, 50, 59), 1, "it counts less than before: it has restarted")
	f(p(0, 50, 60), p(0, 49, 60), 1, "")
	f(p(0, 0, 0), p(0, 0, 0), 1, "it tells nothing that would show a restart")
}

// A file that cannot be used is told of, and the fleet starts without.
func TestUnusableFiles(t *testing.T) {
	dir := t.TempDir()
	bad := filepath.Join(dir, "bad")
	if err := os.WriteFile(bad, []byte("nothing of the kind, but long enough"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{bad, dir, filepath.Join(dir, "absent")} {
		s := newStage(t, nil, ReplicaConfig{ID: "a", URL: startPaged(t).URL})
		s.fleet.load(file, 1<<20, time.Now())
		s.fleet.mu.Lock()
		if s.fleet.warm != nil {
			t.Errorf("%s was used", file)
		}
		s.fleet.mu.Unlock()
	}
	if _, _, err := readWarmth(bad, 10); err == nil || !strings.Contains(err.Error(), "larger than") {
		t.Errorf("a large file: %v", err)
	}
}

// cachedOf sends a prompt through the agent and returns how many tokens of it the
// agent predicts to be cached, and how many were.
func cachedOf(t *testing.T, a *Agent, text string) (predicted string, actual int) {
	t.Helper()
	body := fmt.Sprintf(`{"model":"m","max_tokens":2,"prompt":%q}`, text)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}
	resp, err := client.Post("http://"+a.Addr().String()+"/v1/completions", "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var answer struct {
		Usage struct {
			// SGLang leaves it out when there are none.
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		} `json:"usage"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil || resp.StatusCode != 200 {
		t.Fatalf("status %d, %+v, %v", resp.StatusCode, answer, err)
	}
	return resp.Header.Get("x-inferrail-cached-tokens"), answer.Usage.Details.Cached
}

// story is a text of some hundred tokens, another for each n.
func story(n int) string {
	return strings.Repeat(fmt.Sprintf("Once upon a time there was a story with the number %d. ", n), 40)
}

// What the engines hold is known at once when the agent was started anew, unless
// they were too, or the file is no good.
func TestWarmRestart(t *testing.T) {
	engine, err := simulator.Start(simulator.Config{ServedModelName: []string{"m"}, ZeroLatency: true, EnablePromptTokensDetails: true, NumGPUBlocks: 2000})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { engine.Close() })
	file := filepath.Join(t.TempDir(), "snapshot")
	c := DefaultConfig()
	c.Listen, c.AdminListen, c.Datapath.Mode = "127.0.0.1:0", "127.0.0.1:0", "copy"
	c.Index.Snapshot = file
	c.Models = []ModelConfig{{Name: "m", Tokenizer: "builtin:sim"}}
	c.Replicas = []ReplicaConfig{{ID: "a", URL: engine.URL()}}
	start := func() *Agent {
		a := startAgent(t, c)
		eventually(t, func() bool { return promptPage(t, a).State == "exact" }, func() string { return "prompts are not followed" })
		return a
	}
	expect := func(a *Agent, text string, known bool) {
		t.Helper()
		predicted, actual := cachedOf(t, a, text)
		if known && (predicted != strconv.Itoa(actual) || actual == 0) || !known && predicted != "0" {
			t.Errorf("%s tokens are predicted, and %d were cached; want it known: %v", predicted, actual, known)
		}
	}
	a := start()
	expect(a, story(1), false)
	expect(a, story(1), true)
	stopped(t, a)

	a = start()
	if _, err := os.Stat(file); !os.IsNotExist(err) {
		t.Errorf("the file is still there: %v", err)
	}
	expect(a, story(1), true)
	expect(a, story(2), false)
	stopped(t, a)

	// A damaged file.
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	data[len(data)/2] ^= 1
	if err := os.WriteFile(file, data, 0o600); err != nil {
		t.Fatal(err)
	}
	a = start()
	expect(a, story(1), false)
	stopped(t, a)

	// The engine is another one.
	port := portOf(t, strings.TrimPrefix(engine.URL(), "http://"))
	engine.Close()
	if engine, err = simulator.Start(simulator.Config{Port: port, ServedModelName: []string{"m"}, ZeroLatency: true, EnablePromptTokensDetails: true, NumGPUBlocks: 2000}); err != nil {
		t.Fatal(err)
	}
	a = start()
	expect(a, story(1), false)
	expect(a, story(1), true)
	stopped(t, a)
}

// Each rank has a cache of its own: what is predicted of the one that a request
// was sent to is what it finds.
func TestRanksCaches(t *testing.T) {
	for _, kind := range []string{"vllm", "sglang"} {
		engine, err := simulator.Start(simulator.Config{Engine: kind, ServedModelName: []string{"m"}, ZeroLatency: true,
			EnablePromptTokensDetails: true, NumGPUBlocks: 2000, DataParallelSize: 3})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { engine.Close() })
		c := DefaultConfig()
		c.Listen, c.AdminListen, c.Datapath.Mode = "127.0.0.1:0", "127.0.0.1:0", "copy"
		c.Routing.DefaultPolicy = "random" // whatever they have cached, all are asked
		c.Models = []ModelConfig{{Name: "m", Tokenizer: "builtin:sim"}}
		c.Replicas = []ReplicaConfig{{ID: "a", URL: engine.URL()}}
		a := startAgent(t, c)
		eventually(t, func() bool { return promptPage(t, a).State == "exact" }, func() string { return "prompts are not followed" })
		served := map[string]bool{}
		for i := range 60 {
			body := fmt.Sprintf(`{"model":"m","max_tokens":2,"prompt":%q}`, story(i%7))
			resp, err := http.Post("http://"+a.Addr().String()+"/v1/completions", "application/json", strings.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			var answer struct {
				Usage struct {
					Details struct {
						Cached int `json:"cached_tokens"`
					} `json:"prompt_tokens_details"`
				} `json:"usage"`
			}
			err = json.NewDecoder(resp.Body).Decode(&answer)
			resp.Body.Close()
			if err != nil || resp.StatusCode != 200 {
				t.Fatalf("status %d, %v", resp.StatusCode, err)
			}
			served[resp.Header.Get("x-inferrail-replica")] = true
			if got := resp.Header.Get("x-inferrail-cached-tokens"); got != strconv.Itoa(answer.Usage.Details.Cached) {
				t.Errorf("%s: request %d at %s: %s tokens are predicted and %d were cached", kind, i, resp.Header.Get("x-inferrail-replica"), got, answer.Usage.Details.Cached)
			}
		}
		if len(served) != 3 || !served["a/0"] || !served["a/2"] {
			t.Errorf("%s: served by %v", kind, served)
		}
		stopped(t, a)
	}
}

// An engine that was started anew while the agent runs has nothing: the first
// answer that comes from it is predicted so.
func TestRestartedEngineHasNothing(t *testing.T) {
	config := simulator.Config{ServedModelName: []string{"m"}, ZeroLatency: true, EnablePromptTokensDetails: true, NumGPUBlocks: 2000}
	engine, err := simulator.Start(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { engine.Close() })
	c := DefaultConfig()
	c.Listen, c.AdminListen, c.Datapath.Mode = "127.0.0.1:0", "127.0.0.1:0", "copy"
	c.Health.Interval = 50 * time.Millisecond
	c.Models = []ModelConfig{{Name: "m", Tokenizer: "builtin:sim"}}
	c.Replicas = []ReplicaConfig{{ID: "a", URL: engine.URL()}}
	a := startAgent(t, c)
	defer func() { stopped(t, a) }()
	eventually(t, func() bool { return promptPage(t, a).State == "exact" }, func() string { return "prompts are not followed" })
	config.Port = portOf(t, strings.TrimPrefix(engine.URL(), "http://"))
	for range 3 {
		cachedOf(t, a, story(1))
		if predicted, actual := cachedOf(t, a, story(1)); predicted != strconv.Itoa(actual) || actual == 0 {
			t.Errorf("%s tokens are predicted, and %d were cached", predicted, actual)
		}
		engine.Close()
		eventually(t, func() bool { up, _ := a.Replicas(); return up == 0 }, func() string { return "the engine is not found to be down" })
		if engine, err = simulator.Start(config); err != nil {
			t.Fatal(err)
		}
		eventually(t, func() bool { up, _ := a.Replicas(); return up == 1 }, func() string { return "the engine is not found to be up" })
		if predicted, actual := cachedOf(t, a, story(1)); predicted != "0" || actual != 0 {
			t.Errorf("after the restart %s tokens are predicted, and %d were cached", predicted, actual)
		}
	}
}

// A slot that is known exactly goes on where its events were followed to: what
// the engine has taken in while there was no agent is known too.
func TestWarmRestartOfEvents(t *testing.T) {
	for _, kind := range []string{"vllm", "sglang"} {
		t.Run(kind, func(t *testing.T) {
			any := "tcp://127.0.0.1:0"
			engine, err := simulator.Start(simulator.Config{Engine: kind, ServedModelName: []string{"m"}, ZeroLatency: true, EnablePromptTokensDetails: true,
				NumGPUBlocks: 300, KVEvents: simulator.KVEvents{Endpoint: any, ReplayEndpoint: any}})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { engine.Close() })
			c := DefaultConfig()
			c.Listen, c.AdminListen, c.Datapath.Mode = "127.0.0.1:0", "127.0.0.1:0", "copy"
			c.Index.Snapshot = filepath.Join(t.TempDir(), "snapshot")
			c.Models = []ModelConfig{{Name: "m", Tokenizer: "builtin:sim"}}
			c.Replicas = []ReplicaConfig{{ID: "a", URL: engine.URL()}}
			start := func() *Agent {
				a := startAgent(t, c)
				exact := func() bool {
					st := a.fleet.index.Stats(nil)
					return promptPage(t, a).State == "exact" && len(st) == 1 && st[0].State == index.Exact
				}
				eventually(t, exact, func() string { return fmt.Sprintf("%+v", a.fleet.index.Stats(nil)) })
				return a
			}
			// expect waits for the events of what went before.
			expect := func(a *Agent, n int) {
				t.Helper()
				predicted, actual := "", 0
				eventually(t, func() bool {
					predicted, actual = cachedOf(t, a, story(n))
					return predicted == strconv.Itoa(actual)
				}, func() string {
					return fmt.Sprintf("%s tokens are predicted of %d, and %d were cached", predicted, n, actual)
				})
			}
			direct := func(n int) {
				t.Helper()
				resp, err := http.Post(engine.URL()+"/v1/completions", "application/json", strings.NewReader(fmt.Sprintf(`{"model":"m","max_tokens":2,"prompt":%q}`, story(n))))
				if err != nil || resp.StatusCode != 200 {
					t.Fatal(err)
				}
				resp.Body.Close()
			}
			a := start()
			for n := range 3 {
				expect(a, n)
			}
			before := a.fleet.index.Stats(nil)[0].Blocks[index.GPU]
			stopped(t, a)
			direct(5)
			a = start()
			a.fleet.mu.Lock()
			stats := a.fleet.members[0].subscriber.standing().stats
			a.fleet.mu.Unlock()
			if now := a.fleet.index.Stats(nil)[0].Blocks[index.GPU]; before == 0 || now <= before {
				t.Errorf("it knows %d blocks, and knew %d", now, before)
			}
			if stats.Batches == 0 || stats.Batches >= stats.Next {
				t.Errorf("%d batches of %d were fetched; those from before the restart were known", stats.Batches, stats.Next)
			}
			predicted, actual := cachedOf(t, a, story(5))
			if predicted != strconv.Itoa(actual) || actual == 0 {
				t.Errorf("%s tokens are predicted, and %d were cached", predicted, actual)
			}
			for n := range 3 {
				expect(a, n)
			}
			stopped(t, a)
		})
	}
}

// Where no snapshot can be written is told before one is wanted.
func TestSnapshotPlaces(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	f := func(snapshot, want string) {
		t.Helper()
		c := DefaultConfig()
		c.Replicas = []ReplicaConfig{{URL: "http://gpu:8000"}}
		c.Index.Snapshot = snapshot
		err := c.Check()
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", snapshot, err, want)
		}
	}
	f(file, "")
	f(filepath.Join(dir, "new"), "")
	f(dir, "is there and is not a file")
	f(filepath.Join(dir, "none", "new"), "no such file")
	f(filepath.Join(file, "new"), "not a directory")
	if os.Getuid() != 0 { // who may write anywhere
		if err := os.Chmod(dir, 0o500); err != nil {
			t.Fatal(err)
		}
		f(filepath.Join(dir, "new"), "no file can be made")
	}
}
