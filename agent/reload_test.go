package agent

import (
	"bufio"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/simulator"
)

func TestDifferenceStories(t *testing.T) {
	datadriven.Walk(t, filepath.Join("testdata", "difference"), func(t *testing.T, path string) {
		var inUse Config
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			c := DefaultConfig()
			if err := c.ParseConfig([]byte(d.Input)); err != nil {
				d.Fatalf(t, "%v", err)
			}
			if err := c.Validate(); err != nil {
				d.Fatalf(t, "%v", err)
			}
			if d.Cmd == "in-use" {
				inUse = c
				return "in use\n"
			}
			asked := differences(&inUse, &c)
			keepStarted(&c, &inUse)
			applied := differences(&inUse, &c)
			var out strings.Builder
			for _, d := range asked {
				note := ""
				if !contains(applied, d.path) {
					note = " (after a restart)"
				}
				fmt.Fprintf(&out, "%s: %s -> %s%s\n", d.path, d.old, d.new, note)
			}
			if len(applied) > len(asked) {
				d.Fatalf(t, "more is applied than was asked for: %v", applied)
			}
			if out.Len() == 0 {
				return "nothing\n"
			}
			return out.String()
		})
	})
}

// live is an agent that follows a file.
type live struct {
	*testing.T
	*Agent
	file   string
	config Config // without what the file says
	said   lines
	hangup chan os.Signal
}

func followed(t *testing.T, config Config, text string) *live {
	t.Helper()
	l := &live{T: t, config: config, file: filepath.Join(t.TempDir(), "inferrail.yaml"), hangup: make(chan os.Signal, 1)}
	write(t, l.file, []byte(text))
	c, err := l.load()
	if err != nil {
		t.Fatal(err)
	}
	if l.Agent, err = Start(t.Context(), c, l.said.logger()); err != nil {
		t.Fatal(err)
	}
	l.Follow(Source{File: l.file, Load: l.load, Hangup: l.hangup})
	t.Cleanup(func() {
		stopped(t, l.Agent)
		if t.Failed() {
			t.Logf("the agent said:\n%s", &l.said)
		}
	})
	return l
}

func (l *live) load() (Config, error) {
	c := l.config
	c.Replicas = append([]ReplicaConfig{}, c.Replicas...)
	return c, c.ReadConfig(l.file)
}

// says waits for a line of the log that holds all of the parts.
func (l *live) says(parts ...string) {
	l.Helper()
	eventually(l.T, func() bool {
		for line := range strings.Lines(l.said.String()) {
			all := true
			for _, part := range parts {
				all = all && strings.Contains(line, part)
			}
			if all {
				return true
			}
		}
		return false
	}, func() string { return fmt.Sprintf("no line with %q", parts) })
}

// inUse waits until what the file says is in use, whatever made the agent load
// it: the beginning, a signal or the next look at the file.
func (l *live) inUse() {
	l.Helper()
	want, err := l.load()
	if err != nil {
		l.Fatal(err)
	}
	var left []difference
	eventually(l.T, func() bool {
		l.reloads.mu.Lock() // held while one is applied
		defer l.reloads.mu.Unlock()
		left = differences(l.cfg.Load(), &want)
		return len(left) == 0
	}, func() string { return fmt.Sprintf("not in use: %v", left) })
}

func (l *live) ready(want string) {
	l.Helper()
	var got string
	eventually(l.T, func() bool { _, got = page(l.T, l.Agent, "/readyz"); return got == want }, func() string {
		return fmt.Sprintf("readyz says %q, want %q", got, want)
	})
}

func (l *live) metric(want string) {
	l.Helper()
	if _, body := page(l.T, l.Agent, "/metrics"); !strings.Contains(body, "\n"+want+"\n") {
		l.Errorf("the metrics lack %q", want)
	}
}

// post sends a body of n bytes and returns the status.
func (l *live) post(n int) int {
	l.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}
	body := fmt.Sprintf(`{"model":"m","max_tokens":1,"prompt":"%s"}`, strings.Repeat("x", n))
	resp, err := client.Post("http://"+l.Addr().String()+"/v1/completions", "application/json", strings.NewReader(body))
	if err != nil {
		l.Fatal(err)
	}
	resp.Body.Close()
	return resp.StatusCode
}

// A file that changes is applied; one that is bad is not, whatever is wrong
// with it; and a stream that runs goes on through all of it.
func TestFileIsFollowed(t *testing.T) {
	t.Parallel()
	l := followed(t, testConfig(slowEngine(t)), "server: {max_body_bytes: 1KiB}\n")
	stream := bufio.NewReader(ask(t, l.Agent, 40).Body)
	if _, err := stream.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	if got := l.post(2000); got != 413 {
		t.Fatalf("a large body has status %d", got)
	}
	l.metric(`inferrail_config_reloads_total{outcome="applied"} 0`)

	write(t, l.file, []byte("server: {max_body_bytes: 1MiB}\n"))
	l.says("configuration changed", "key=server.max_body_bytes", "old=1KiB", "new=1MiB")
	l.ready("ok\n")
	if got := l.post(2000); got != 200 {
		t.Errorf("under the new limit a body has status %d", got)
	}

	write(t, l.file, []byte("server: {max_body_bytes: 0, idle_timeout: soon}\nlisten: 1\n"))
	l.ready("degraded: config: 3 problems, the last good one is in use\n")
	l.says("configuration: server.max_body_bytes: 0 is below 1")
	l.says(`configuration: server.idle_timeout: \"soon\" is not a duration`)
	l.says("configuration: listen: is 1; want text")
	l.metric(`inferrail_config_reloads_total{outcome="applied"} 1`)
	l.metric(`inferrail_config_reloads_total{outcome="rejected"} 1`)
	l.metric(`inferrail_config_last_reload_successful 0`)
	if got := l.post(2000); got != 200 {
		t.Errorf("under the last good configuration a body has status %d", got)
	}
	write(t, l.file, []byte("server: [\n"))
	l.hangup <- syscall.SIGHUP
	l.ready("degraded: config: 1 problem, the last good one is in use\n")
	l.says("configuration: ", "not YAML")
	if err := os.Remove(l.file); err != nil {
		t.Fatal(err)
	}
	l.hangup <- syscall.SIGHUP
	l.says("configuration: ", "no such file")

	write(t, l.file, []byte("server: {max_body_bytes: 1MiB}\n"))
	l.ready("ok\n")
	l.says("the configuration says what is in use")
	l.metric(`inferrail_config_last_reload_successful 1`)

	rest, err := io.ReadAll(stream)
	if err != nil || !strings.HasSuffix(string(rest), "data: [DONE]\n\n") {
		t.Errorf("the stream was cut: %v, %q", err, rest)
	}
}

// A ConfigMap's file is a link into a directory that is exchanged as a whole,
// by a link too.
func TestConfigMapIsFollowed(t *testing.T) {
	t.Parallel()
	l := followed(t, testConfig(startEngine(t, 0, "m")), "server: {max_body_bytes: 1KiB}\n")
	dir := filepath.Dir(l.file)
	swap := func(version, text string) {
		t.Helper()
		if err := os.Mkdir(filepath.Join(dir, version), 0o755); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, version, filepath.Base(l.file)), []byte(text))
		link := filepath.Join(dir, "..data_tmp")
		if err := os.Symlink(version, link); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(link, filepath.Join(dir, "..data")); err != nil {
			t.Fatal(err)
		}
	}
	swap("..1", "server: {max_body_bytes: 1KiB}\n")
	if err := os.Remove(l.file); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join("..data", filepath.Base(l.file)), l.file); err != nil {
		t.Fatal(err)
	}
	l.inUse()
	swap("..2", "server: {max_body_bytes: 1MiB}\n")
	if err := os.RemoveAll(filepath.Join(dir, "..1")); err != nil {
		t.Fatal(err)
	}
	l.says("configuration changed", "key=server.max_body_bytes", "old=1KiB", "new=1MiB")
	swap("..3", "server: {max_body_bytes: nothing}\n")
	l.ready("degraded: config: 1 problem, the last good one is in use\n")
}

// What only a restart can change is reported and left.
func TestReloadKeepsWhatNeedsARestart(t *testing.T) {
	l := followed(t, testConfig(startEngine(t, 0, "m")), "")
	addr := l.Addr().String()
	write(t, l.file, []byte("listen: 127.0.0.1:1\ndatapath: {mode: packet}\nretry: {max_attempts: 7}\n"))
	l.hangup <- syscall.SIGHUP
	l.says("level=WARN", "restart", "key=listen", "in_use=127.0.0.1:0", "new=127.0.0.1:1")
	l.says("level=WARN", "restart", "key=datapath.mode", "in_use=copy", "new=packet")
	l.says("level=INFO", "configuration changed", "key=retry.max_attempts", "old=3", "new=7")
	if l.Addr().String() != addr || l.post(1) != 200 {
		t.Error("it does not serve where it did")
	}

	// With a file of its own the admin port would be on loopback after a
	// restart. Now it is not, and must not lose its token.
	l.reloads.mu.Lock()
	public := *l.cfg.Load()
	public.AdminListen, public.AdminTokenSHA256 = "0.0.0.0:0", hashOf("right")
	l.cfg.Store(&public)
	l.reloads.mu.Unlock()
	c := public
	c.AdminListen, c.AdminTokenSHA256 = "127.0.0.1:0", ""
	if err := l.Reload(c); err == nil || !strings.Contains(err.Error(), "restart") || !strings.Contains(err.Error(), "admin_token_sha256") {
		t.Errorf("the token is taken away from a public port: %v", err)
	}
}

func TestReloadChangesTheAdminToken(t *testing.T) {
	l := followed(t, testConfig(startEngine(t, 0, "m")), "")
	status := func(token string) int {
		return adminAnswer(t, l.Agent, "/metrics", "Authorization: Bearer "+token).StatusCode
	}
	f := func(text, token string, want int) {
		t.Helper()
		write(t, l.file, []byte(text))
		l.hangup <- syscall.SIGHUP
		var got int
		eventually(t, func() bool { got = status(token); return got == want }, func() string {
			return fmt.Sprintf("status %d, want %d", got, want)
		})
	}
	f("admin_token_sha256: "+hashOf("one"), "", 401)
	if got := status("one"); got != 200 {
		t.Errorf("status %d with the token", got)
	}
	f("admin_token_sha256: "+hashOf("two"), "one", 401)
	f("# none\n", "", 200)
	for _, hash := range []string{hashOf("one"), hashOf("two")} {
		if strings.Contains(l.said.String(), hash) {
			t.Error("the log shows a hash")
		}
	}
}

// The key that a file holds is read again when the file changes.
func TestKeyFileIsFollowed(t *testing.T) {
	t.Parallel()
	c := testConfig(startEngine(t, 0, "m"))
	key := filepath.Join(t.TempDir(), "key")
	write(t, key, []byte("sk-one\n"))
	c.Replicas[0].APIKeyFile = key
	l := followed(t, c, "")
	write(t, key, nil)
	l.ready("degraded: config: 1 problem, the last good one is in use\n")
	l.says("replicas[0].api_key_file: ", "is empty")
	write(t, key, []byte("sk-two\n"))
	l.ready("ok\n")
	if strings.Contains(l.said.String(), "sk-") {
		t.Error("the log shows a key")
	}
}

// Requests, admin pages and health checks go on while the configuration is
// replaced again and again. The race detector watches.
func TestReloadUnderLoad(t *testing.T) {
	a := startAgent(t, testConfig(startEngine(t, 0, "m")))
	clients := callersOf(a.Addr().String(), 1, 1)
	var pages sync.WaitGroup
	pages.Go(func() {
		for !clients.stop.Load() {
			page(t, a, "/readyz")
			page(t, a, "/metrics")
		}
	})
	for i := range 50 {
		c := *a.cfg.Load()
		c.Replicas = append([]ReplicaConfig{}, c.Replicas...)
		c.Health.Interval = time.Duration(10+i) * time.Millisecond
		c.Server.MaxBodyBytes = Bytes(1<<20 + i)
		c.Server.APIKeys = nil
		if i%3 == 0 {
			c.Listen = ""
		}
		if err := a.Reload(c); (err != nil) != (i%3 == 0) {
			t.Errorf("reload %d: %v", i, err)
		}
		clients.more(t, 5)
	}
	clients.end(t)
	pages.Wait()
	stopped(t, a)
	if err := a.Reload(*a.cfg.Load()); err == nil {
		t.Error("an agent that has stopped takes a configuration")
	}
}

// A key that keeps its name keeps what it has used, and loses it with its name.
func TestKeysAreReloaded(t *testing.T) {
	l := followed(t, testConfig(startEngine(t, 0, "m")), "")
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}
	status := func(key string) int {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), "POST", "http://"+l.Addr().String()+"/v1/completions",
			strings.NewReader(`{"model":"m","max_tokens":1,"prompt":"x"}`))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+key)
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.StatusCode
	}
	reload := func(text string) {
		t.Helper()
		write(t, l.file, []byte(text))
		l.hangup <- syscall.SIGHUP
		l.inUse()
	}
	f := func(key string, want int) {
		t.Helper()
		if got := status(key); got != want {
			t.Errorf("with key %q: status %d, want %d", key, got, want)
		}
	}
	entry := func(name, key string) string {
		return fmt.Sprintf("server: {api_keys: [{name: %s, sha256: %s, requests_per_minute: 1}]}\n", name, strings.ToUpper(hashOf(key)))
	}
	f("", 200)
	reload(entry("a", "one"))
	f("", 401)
	f("two", 401)
	f("one", 200)
	f("one", 429)
	reload(entry("a", "two")) // another secret, the same key
	f("one", 401)
	f("two", 429)
	reload(entry("b", "two"))
	f("two", 200)
	reload("# none\n")
	f("", 200)
}

// A replica that is added serves, one that is removed finishes its stream and
// takes no more; nobody sees a failure.
func TestReplicasAreReloaded(t *testing.T) {
	first, second := slowEngine(t), startEngine(t, 0, "m")
	entry := func(id, url string) string { return "replicas: [{id: " + id + ", url: " + url + "}]\n" }
	l := followed(t, testConfig(), entry("first", first.URL()))
	stream := bufio.NewReader(ask(t, l.Agent, 20).Body)
	if _, err := stream.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	clients := callersOf(l.Addr().String(), 1, 1)
	write(t, l.file, []byte(entry("second", second.URL())))
	l.hangup <- syscall.SIGHUP
	l.says("configuration changed", "key=replicas[first]", "new=(absent)")
	l.says("configuration changed", "key=replicas[second]", "new=(present)")
	eventually(t, func() bool {
		resp := ask(t, l.Agent, 1)
		io.Copy(io.Discard, resp.Body)
		return resp.Header.Get("x-inferrail-replica") == "second"
	}, func() string { return "the new replica gets no request" })
	l.ready("ok\n")
	clients.end(t)
	rest, err := io.ReadAll(stream)
	if err != nil || !strings.HasSuffix(string(rest), "data: [DONE]\n\n") {
		t.Errorf("the stream was cut: %v, %q", err, rest)
	}
}

// A pipe in the place of the file would be waited for for ever, and the agent
// would not stop.
func TestPipeInThePlaceOfTheFile(t *testing.T) {
	t.Parallel()
	c := testConfig(startEngine(t, 0, "m"))
	key := filepath.Join(t.TempDir(), "key")
	write(t, key, []byte("sk-one\n"))
	c.Replicas[0].APIKeyFile = key
	l := followed(t, c, "retry: {max_attempts: 7}\n")
	pipe := func(name string) {
		t.Helper()
		if err := os.Remove(name); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Mkfifo(name, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	pipe(l.file)
	l.hangup <- syscall.SIGHUP
	l.says("configuration: ", "inferrail.yaml is not a regular file")
	if err := os.Remove(l.file); err != nil {
		t.Fatal(err)
	}
	write(t, l.file, []byte("retry: {max_attempts: 8}\n"))
	l.ready("ok\n")
	pipe(key)
	l.ready("degraded: config: 1 problem, the last good one is in use\n")
	l.says("replicas[0].api_key_file: ", "is not a regular file")
	// The engine is checked with the key that it had.
	for range 5 {
		l.fleet.mu.Lock()
		m := l.fleet.members[0]
		m.stale = true
		l.fleet.mu.Unlock()
		eventually(t, func() bool {
			l.fleet.mu.Lock()
			defer l.fleet.mu.Unlock()
			return !m.stale && m.vitals.failedChecks == 0
		}, func() string { return "its checks fail" })
	}
	l.ready("degraded: config: 1 problem, the last good one is in use\n")
	if got := l.post(1); got != 200 {
		t.Errorf("status %d", got)
	}
}

// A configuration that came through a pipe is read once. The files that it
// names are followed, and a hangup takes nothing away.
func TestConfigurationThroughAPipe(t *testing.T) {
	engine := startEngine(t, 0, "m")
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	var written sync.WaitGroup
	written.Go(func() { write(t, pipe, []byte("retry: {max_attempts: 7}\n")) })
	c := testConfig(engine)
	if err := c.ReadConfig(pipe); err != nil {
		t.Fatal(err)
	}
	written.Wait()
	l := &live{T: t, file: pipe, hangup: make(chan os.Signal, 1)}
	var err error
	if l.Agent, err = Start(t.Context(), c, l.said.logger()); err != nil {
		t.Fatal(err)
	}
	defer stopped(t, l.Agent)
	l.Follow(Source{File: pipe, Hangup: l.hangup, Load: func() (Config, error) { panic("it is read again") }})
	l.says("cannot be loaded again", "not a regular file")
	l.hangup <- syscall.SIGHUP
	l.says("the configuration says what is in use")
	l.ready("ok\n")
}

// Whatever the configuration says of the caches may change at any time, while
// requests run. What is known in the end is what was never configured otherwise.
func TestCachesAreConfiguredAnew(t *testing.T) {
	const ranks = 2
	any := "tcp://127.0.0.1:0"
	engine, err := simulator.Start(simulator.Config{ServedModelName: []string{"m", "n"}, ZeroLatency: true, EnablePromptTokensDetails: true,
		NumGPUBlocks: 300, DataParallelSize: ranks, KVEvents: simulator.KVEvents{Endpoint: any, ReplayEndpoint: any, BufferSteps: 1 << 20}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { engine.Close() })
	c := DefaultConfig()
	c.Listen, c.AdminListen, c.Datapath.Mode = "127.0.0.1:0", "127.0.0.1:0", "copy"
	c.Models = []ModelConfig{{Name: "m", Tokenizer: "builtin:sim"}}
	c.Replicas = []ReplicaConfig{{ID: "a", URL: engine.URL()}}
	a := startAgent(t, c)
	defer func() { stopped(t, a) }()

	stop := make(chan struct{})
	var asking sync.WaitGroup
	for worker := range 2 {
		asking.Go(func() {
			client := &http.Client{Timeout: patience}
			for n := worker; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				body := fmt.Sprintf(`{"max_tokens":2,"prompt":%q}`, story(n%9))
				resp, err := client.Post("http://"+a.Addr().String()+"/v1/completions", "application/json", strings.NewReader(body))
				if err != nil {
					t.Error(err)
					return
				}
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
		})
	}
	r := rand.New(rand.NewPCG(7, 52))
	for range 25 {
		n := c
		k := &KVEventsConfig{}
		switch r.IntN(4) {
		case 0:
			k.Mode = kvEventsOff
		case 1:
			k.Endpoint = "tcp://127.0.0.1:9" // nobody publishes there
		case 2:
			k.Mode = "auto"
		}
		n.Models = []ModelConfig{{Name: []string{"m", "n"}[r.IntN(2)], Tokenizer: "builtin:sim", BlockSize: []int{0, 16, 32, 1}[r.IntN(4)]}}
		n.Replicas = []ReplicaConfig{{ID: []string{"a", "b"}[r.IntN(2)], URL: engine.URL(), KVEvents: *k, DataParallel: r.IntN(3), KVBlocks: []int{0, 1, 5, 300}[r.IntN(4)]}}
		n.Index.DefaultCapacity = 1 + r.IntN(1000)
		if err := a.Reload(n); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(r.IntN(200)) * time.Millisecond)
	}
	close(stop)
	asking.Wait()
	if err := a.Reload(c); err != nil {
		t.Fatal(err)
	}
	known := func() bool {
		exact := 0
		for _, st := range a.fleet.index.Stats(nil) {
			if st.State == index.Exact && st.Block == 16 && st.Capacity == 300 && st.Claims == 0 {
				exact++
			}
		}
		return exact == ranks && a.fleet.index.Totals().Slots == ranks && promptPage(t, a).State == "exact"
	}
	eventually(t, known, func() string { return fmt.Sprintf("%+v", a.fleet.index.Stats(nil)) })
	for n := range 9 {
		// An answer's events may come behind it.
		predicted, actual := "", 0
		eventually(t, func() bool {
			predicted, actual = cachedOf(t, a, story(n))
			return predicted == fmt.Sprint(actual) && actual > 0
		}, func() string { return fmt.Sprintf("%s tokens are predicted, and %d were cached", predicted, actual) })
	}
}
