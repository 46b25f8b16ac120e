package agent

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/inferrail/inferrail/simulator"
)

// TestSoak runs mixed traffic, clients that leave and engines that restart
// against one agent, for INFERRAIL_SOAK (3s) in the tier
// INFERRAIL_SOAK_DATAPATH (copy). Every answer is checked, and afterwards
// nothing may be left behind: no request in flight, no goroutine, no
// descriptor, no memory.
//
//	make soak SOAK=10m
func TestSoak(t *testing.T) {
	length := 3 * time.Second
	if s := os.Getenv("INFERRAIL_SOAK"); s != "" {
		var err error
		if length, err = time.ParseDuration(s); err != nil {
			t.Fatalf("INFERRAIL_SOAK: %v", err)
		}
	}
	goroutines, files := runtime.NumGoroutine(), openFiles(t)

	s := &soak{T: t}
	var engines []*soakEngine
	for i := range 3 {
		engines = append(engines, &soakEngine{server: startSoakEngine(t, 0, uint64(i)), seed: uint64(i)})
	}
	c := testConfig(engines[0].server, engines[1].server, engines[2].server)
	if mode := os.Getenv("INFERRAIL_SOAK_DATAPATH"); mode != "" {
		c.Datapath.Mode = mode
	}
	a := startAgent(t, c)
	tier, reason := a.Tier()
	t.Logf("%v in the %s tier (%s)", length, tier, reason)
	s.url = "http://" + a.Addr().String()

	ctx, cancel := context.WithTimeout(t.Context(), length)
	defer cancel()
	var running sync.WaitGroup
	for i := range 24 {
		running.Go(func() { s.client(ctx, rand.New(rand.NewPCG(uint64(i), 1))) })
	}
	running.Go(func() { s.restarts(ctx, engines, length) })
	report := time.NewTicker(10 * time.Second)
	defer report.Stop()
	warm := time.After(length / 4)
	var heap uint64
	for over := false; !over; {
		select {
		case <-warm:
			heap = liveHeap()
		case <-report.C:
			t.Logf("%d answers, %d left, %d refused, %d ended by restarts, heap %d KiB",
				s.answers.Load(), s.left.Load(), s.refused.Load(), s.cut.Load(), liveHeap()>>10)
		case <-ctx.Done():
			over = true
		}
	}
	running.Wait()

	if s.answers.Load() < 20 || s.left.Load() == 0 || s.refused.Load() == 0 {
		t.Errorf("too little happened: %d answers, %d clients left, %d refused",
			s.answers.Load(), s.left.Load(), s.refused.Load())
	}
	if s.restarted.Load() == 0 {
		t.Error("no engine was restarted")
	}
	for _, e := range engines {
		eventually(t, func() bool { return e.server.Running() == 0 }, func() string {
			return fmt.Sprintf("an engine still generates for %d", e.server.Running())
		})
	}
	for _, m := range a.fleet.members {
		eventually(t, func() bool { return m.replica.InFlight() == 0 }, func() string {
			return fmt.Sprintf("%s has %d requests in flight for ever", m.cfg.ID, m.replica.InFlight())
		})
	}
	if now := liveHeap(); now > heap+16<<20 {
		t.Errorf("the heap grew from %d to %d KiB", heap>>10, now>>10)
	}
	stopped(t, a)
	for _, e := range engines {
		e.server.Close()
	}
	eventually(t, func() bool { return runtime.NumGoroutine() <= goroutines }, func() string {
		stacks := make([]byte, 1<<20)
		return fmt.Sprintf("%d goroutines before, %d after:\n%s", goroutines, runtime.NumGoroutine(), stacks[:runtime.Stack(stacks, true)])
	})
	eventually(t, func() bool { return openFiles(t) <= files }, func() string {
		return fmt.Sprintf("%d descriptors before, %d after", files, openFiles(t))
	})
}

// soak is the traffic of TestSoak. Any goroutine may use it.
type soak struct {
	*testing.T
	url string

	answers, left, refused, cut, restarted atomic.Int64
	// epoch is odd while an engine is restarted. A request during which it
	// did not change, and was even, has no excuse.
	epoch atomic.Int64
}

type soakEngine struct {
	server *simulator.Server
	seed   uint64
}

func startSoakEngine(t *testing.T, port int, seed uint64) *simulator.Server {
	server, err := simulator.Start(simulator.Config{
		Port: port, ServedModelName: []string{"m"}, Seed: seed,
		PrefillA: 1, PrefillD: 1000, TimePerOutputToken: 2 * time.Millisecond,
	})
	if err != nil {
		t.Error(err)
		return nil
	}
	return server
}

// restarts restarts one engine after another, eight times in all.
func (s *soak) restarts(ctx context.Context, engines []*soakEngine, length time.Duration) {
	for i := 0; ; i++ {
		select {
		case <-ctx.Done():
			return
		case <-time.After(length / 8):
		}
		e := engines[i%len(engines)]
		_, port, err := net.SplitHostPort(e.server.Addr())
		if err != nil {
			s.Error(err)
			return
		}
		var n int
		fmt.Sscan(port, &n)
		s.epoch.Add(1)
		e.server.Close()
		server := startSoakEngine(s.T, n, e.seed)
		if server == nil {
			return
		}
		e.server = server
		s.restarted.Add(1)
		s.epoch.Add(1)
	}
}

// client sends requests of all kinds over one keep-alive connection, or a few.
func (s *soak) client(ctx context.Context, rng *rand.Rand) {
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, Timeout: 30 * time.Second}
	for ctx.Err() == nil {
		before := s.epoch.Load()
		var err error
		switch n := rng.IntN(10); {
		case n < 6:
			err = s.stream(client, 1+rng.IntN(40), -1)
		case n < 7:
			err = s.whole(client, 1+rng.IntN(40))
		case n < 9:
			err = s.stream(client, 200, rng.IntN(20))
		default:
			err = s.refuse(client)
		}
		if err == nil {
			continue
		}
		if before%2 == 0 && s.epoch.Load() == before {
			s.Error(err)
			return
		}
		s.cut.Add(1)
	}
}

func (s *soak) post(client *http.Client, body string) (*http.Response, error) {
	return client.Post(s.url+"/v1/chat/completions", "application/json", strings.NewReader(body))
}

const prompt = `"messages":[{"role":"user","content":"hi"}]`

// stream reads an answer of n tokens, or leaves after some lines of it.
func (s *soak) stream(client *http.Client, n, leaveAfter int) error {
	resp, err := s.post(client, fmt.Sprintf(`{"model":"m","stream":true,"max_tokens":%d,"stream_options":{"include_usage":true},%s}`, n, prompt))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != 200 {
		return fmt.Errorf("stream: status %d", resp.StatusCode)
	}
	var usage struct {
		Usage *struct {
			CompletionTokens int `json:"completion_tokens"`
		}
	}
	tokens, done := 0, false
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			if lines.Text() != "" {
				return fmt.Errorf("stream: line %q", lines.Text())
			}
			continue
		}
		if leaveAfter == 0 {
			s.left.Add(1)
			return nil
		}
		leaveAfter--
		if data == "[DONE]" {
			done = true
			break
		}
		if err := json.Unmarshal([]byte(data), &usage); err != nil {
			return fmt.Errorf("stream: %w in %q", err, data)
		}
		if strings.Contains(data, `"delta":{"content":`) {
			tokens++
		}
	}
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		return fmt.Errorf("stream: %w", err)
	}
	if !done || tokens != n || usage.Usage == nil || usage.Usage.CompletionTokens != n {
		return fmt.Errorf("stream: done %v, %d of %d tokens, usage %+v", done, tokens, n, usage.Usage)
	}
	s.answers.Add(1)
	return nil
}

// whole reads an answer that is not streamed.
func (s *soak) whole(client *http.Client, n int) error {
	resp, err := s.post(client, fmt.Sprintf(`{"model":"m","max_tokens":%d,%s}`, n, prompt))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	var answer struct {
		Usage struct {
			CompletionTokens int `json:"completion_tokens"`
		}
	}
	if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil {
		return fmt.Errorf("whole: %w", err)
	}
	if resp.StatusCode != 200 || answer.Usage.CompletionTokens != n {
		return fmt.Errorf("whole: status %d, usage %+v, want %d", resp.StatusCode, answer.Usage, n)
	}
	s.answers.Add(1)
	return nil
}

// refuse asks for a model that is not there.
func (s *soak) refuse(client *http.Client) error {
	resp, err := s.post(client, `{"model":"absent",`+prompt+`}`)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != 404 || !strings.Contains(string(body), "does not exist") {
		return fmt.Errorf("refuse: status %d, %v, %s", resp.StatusCode, err, body)
	}
	s.refused.Add(1)
	return nil
}

func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

func liveHeap() uint64 {
	runtime.GC()
	runtime.GC() // what pools held is gone after the second
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
