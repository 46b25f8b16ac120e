package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/inferrail/inferrail/simulator"
)

// TestDatapathSlowTokens: tokens come further apart than it takes keep-alive to
// give a silent peer up. The sockets hear nothing of the tokens that the kernel
// carries, yet their probes are answered.
func TestDatapathSlowTokens(t *testing.T) {
	t.Parallel()
	l := newLab(t, labOptions{})
	s := l.sim(simulator.Config{ZeroLatency: true})
	n := l.start("packet", []string{s.URL()})
	const clients = 10
	var wait sync.WaitGroup
	for k := range clients {
		wait.Go(func() {
			r := simulator.Raw{Seed: uint64(k), Chunks: 3, Max: 300, IntervalUS: 4_000_000}
			c, err := l.open(n.addr, r, 0)
			if err == nil {
				defer c.Close()
				c.SetReadDeadline(time.Now().Add(30 * time.Second))
				if err = c.head(); err == nil {
					err = c.rest()
				}
			}
			if err != nil {
				t.Errorf("client %d: %v", k, err)
			}
		})
	}
	l.eventually(20*time.Second, func() bool { return s.Running() == clients }, func() string { return "not all have begun" })
	n.quickProbes(1, 1, 2)
	wait.Wait()
	if d := n.settled(); d.Kernel.Ended != clients || len(d.Kernel.Pauses) > 0 {
		t.Errorf("the kernel did not carry all of it: %+v", d)
	}
}

// TestDatapathClientVanishes: a client's host is cut off while the kernel
// carries its response. Nothing tells the agent but the silence.
func TestDatapathClientVanishes(t *testing.T) {
	t.Parallel()
	for _, interval := range []time.Duration{50 * time.Millisecond, 4 * time.Second} {
		t.Run(interval.String(), func(t *testing.T) {
			t.Parallel()
			l := newLab(t, labOptions{})
			s := l.sim(simulator.Config{ZeroLatency: true})
			n := l.start("packet", []string{s.URL()})
			const clients = 5
			for k := range clients {
				c, err := l.open(n.addr, simulator.Raw{Seed: uint64(k), Chunks: 10000, Max: 300, IntervalUS: interval.Microseconds()}, 0)
				l.check(err)
				defer c.Close()
				l.check(c.head())
			}
			n.carried(clients)
			n.quickProbes(1, 1, 3)
			l.nftAt(l.client, `table inet gone {
				chain in { type filter hook input priority filter; policy drop; }
				chain out { type filter hook output priority filter; policy drop; }
			}`)
			took := l.eventually(10*time.Second, func() bool { return s.Running() == 0 },
				func() string { return fmt.Sprintf("the engine still generates for %d: %+v", s.Running(), n.datapath()) })
			t.Logf("noticed after %v", took)
			l.eventually(20*time.Second, func() bool {
				d := n.datapath()
				return d.Running == 0 && d.Now.Armed+d.Now.Active+d.Now.Paused+d.Now.Ended == 0
			}, func() string { return fmt.Sprintf("left over: %+v", n.datapath()) })
		})
	}
}

// TestDatapathIdle: connections that were spliced and then idle for longer than
// keep-alive takes to give up can be used again, on both sides: probes and
// their answers are corrected as data is.
func TestDatapathIdle(t *testing.T) {
	t.Parallel()
	l := newLab(t, labOptions{})
	config := filepath.Join(t.TempDir(), "agent.yaml")
	l.check(os.WriteFile(config, []byte("server:\n  upstream_idle: 30s\n"), 0o600))
	s := l.sim(simulator.Config{ZeroLatency: true, TimeoutKeepAliveS: 60})
	n := l.start("packet", []string{s.URL()}, "--config", config)
	const clients = 10
	var conns []net.Conn
	var readers []*bufio.Reader
	for range clients {
		c, err := l.dial(n.addr)
		l.check(err)
		defer c.Close()
		conns, readers = append(conns, c), append(readers, bufio.NewReader(c))
	}
	round := func(i int) {
		var wait sync.WaitGroup
		for k := range clients {
			wait.Go(func() {
				// More than a window, so that uncorrected numbers are far off.
				r := simulator.Raw{Seed: uint64(k*10 + i), Chunks: 60, Max: 8000, IntervalUS: 2000}
				conns[k].SetDeadline(time.Now().Add(5 * time.Second))
				err := ask(conns[k], r)
				if err == nil {
					err = receive(readers[k], r)
				}
				if err != nil {
					t.Errorf("round %d, client %d: %v", i, k, err)
				}
			})
		}
		wait.Wait()
	}
	// The connections to the engine that requests use, not those of checks.
	pool := func() (list []string) {
		port := fmt.Sprintf(":%04X", portOf(t, s))
		for _, s := range l.sockets(l.proxy) {
			if s.state == established && strings.HasSuffix(s.remote, port) {
				list = append(list, s.local)
			}
		}
		return list
	}
	for i := range 3 {
		round(i)
	}
	before := pool()
	ended := n.datapath().Kernel.Ended
	n.quickProbes(1, 1, 2)
	time.Sleep(8 * time.Second)
	round(3)
	kept := 0
	for _, local := range pool() {
		if slices.Contains(before, local) {
			kept++
		}
	}
	d := n.settled()
	if kept < clients || d.Replays > 0 {
		t.Errorf("of the engine connections %v only %d outlived the idle time: %+v", before, kept, d)
	}
	if d.Kernel.Ended < ended+clients*8/10 || ended < clients*2 {
		t.Errorf("the kernel carried too little: %+v", d)
	}
}

// TestDatapathTenMinutes: streams with a token every other second, for as long
// as INFERRAIL_SOAK says and ten minutes at most, against keep-alive as it really is.
func TestDatapathTenMinutes(t *testing.T) {
	soak := os.Getenv("INFERRAIL_SOAK")
	if soak == "" {
		t.Skip("INFERRAIL_SOAK is not set (make soak)")
	}
	length, err := time.ParseDuration(soak)
	if err != nil {
		t.Fatalf("INFERRAIL_SOAK: %v", err)
	}
	length = min(length, 10*time.Minute)
	l := newLab(t, labOptions{})
	s := l.sim(simulator.Config{ZeroLatency: true})
	n := l.start("packet", []string{s.URL()})
	const clients = 50
	good := n.load(n.addr, clients, 1, length+time.Minute, func(k, i int) simulator.Raw {
		gap := 2 * time.Second
		if k%2 == 1 {
			gap = 100 * time.Second // beyond what one silent probe takes
		}
		return simulator.Raw{Seed: uint64(k), Chunks: max(1, int(length/gap)), Max: 400, IntervalUS: gap.Microseconds()}
	})
	if d := n.settled(); good != clients || d.Kernel.Ended < clients*9/10 {
		t.Errorf("%d of %d responses, %+v", good, clients, d)
	}
}

// TestDatapathUsage: the agent counts the tokens that engines say they used,
// exactly, though it does not read what the kernel carries.
func TestDatapathUsage(t *testing.T) {
	t.Parallel()
	for _, tier := range []string{"packet", "copy"} {
		t.Run(tier, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, labOptions{})
			s := l.sim(simulator.Config{PrefillA: 0.1, TimePerOutputToken: 2 * time.Millisecond})
			n := l.start(tier, []string{s.URL()})
			const connections, each = 20, 8
			var prompt, completion atomic.Int64
			var wait sync.WaitGroup
			for k := range connections {
				wait.Go(func() {
					c, err := l.dial(n.addr)
					if err != nil {
						t.Error(err)
						return
					}
					defer c.Close()
					br := bufio.NewReader(c)
					for i := range each {
						streamed := i%4 != 3
						fault := []string{`{}`, `{"split_writes":true}`, `{"token_bytes":700}`, `{"body_bytes":60000,"split_writes":true}`}[(k+i)%4]
						body := fmt.Sprintf(`{"model":"sim","max_tokens":%d,"stream":%v,"messages":[{"role":"user","content":%q}],"vllm_xargs":{"sim":%s}`,
							1+(k*7+i*13)%50, streamed, strings.Repeat("word ", 1+(k*3+i)%40), fault)
						if streamed {
							body += `,"stream_options":{"include_usage":true}`
						}
						body += "}"
						c.SetDeadline(time.Now().Add(10 * time.Second))
						fmt.Fprintf(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
						p, g, err := readUsage(br)
						if err != nil {
							t.Errorf("connection %d, response %d: %v", k, i, err)
							return
						}
						prompt.Add(p)
						completion.Add(g)
					}
				})
			}
			wait.Wait()
			engine := l.fetch(s.URL() + "/metrics")
			for _, c := range []struct {
				kind, name string
				clients    int64
			}{
				{"prompt", "vllm:prompt_tokens_total", prompt.Load()},
				{"completion", "vllm:generation_tokens_total", completion.Load()},
			} {
				var agent float64
				// An exchange is counted just after its last byte was sent.
				l.eventually(20*time.Second, func() bool {
					agent = n.metric("inferrail_tokens_total", `kind="`+c.kind+`"`)
					return agent == float64(c.clients)
				}, func() string { return fmt.Sprintf("%s tokens: clients saw %d, the agent %v", c.kind, c.clients, agent) })
				if e := sumMetric(t, engine, c.name); e != agent || e == 0 {
					t.Errorf("%s tokens: the engine counts %v, the agent %v", c.kind, e, agent)
				}
			}
			if w := n.metric("inferrail_responses_without_usage_total"); w != 0 {
				t.Errorf("usage was not found in %v responses", w)
			}
			d := n.settled()
			t.Logf("%+v", d)
			if tier == "packet" && d.Kernel.Ended < connections*each/2 {
				t.Errorf("the kernel carried too few: %+v", d)
			}
		})
	}
}

// readUsage reads a response, streamed or not, and returns its usage.
func readUsage(br *bufio.Reader) (prompt, completion int64, err error) {
	resp, err := http.ReadResponse(br, &http.Request{Method: "POST"})
	if err != nil {
		return 0, 0, err
	}
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != 200 {
		return 0, 0, fmt.Errorf("status %d: %v, %.300s", resp.StatusCode, err, text)
	}
	parts := []string{string(text)}
	if strings.HasPrefix(parts[0], "data: ") {
		parts = strings.Split(parts[0], "\n\n")
		if len(parts) < 3 || parts[len(parts)-2] != "data: [DONE]" || parts[len(parts)-1] != "" {
			return 0, 0, fmt.Errorf("a stream ends with %.300q", text[max(0, len(text)-300):])
		}
		parts = []string{strings.TrimPrefix(parts[len(parts)-3], "data: ")}
	}
	var page struct {
		Usage *struct {
			Prompt     int64 `json:"prompt_tokens"`
			Completion int64 `json:"completion_tokens"`
		}
	}
	if err := json.Unmarshal([]byte(parts[0]), &page); err != nil || page.Usage == nil {
		return 0, 0, fmt.Errorf("no usage (%v) in %.300s", err, parts[0])
	}
	return page.Usage.Prompt, page.Usage.Completion, nil
}

// fetch reads a page of the engine from the proxy host.
func (l *lab) fetch(url string) string {
	l.t.Helper()
	dial := func(_ context.Context, _, addr string) (c net.Conn, err error) {
		l.in(l.proxy, func() { c, err = net.DialTimeout("tcp", addr, 5*time.Second) })
		return c, err
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: dial}, Timeout: 5 * time.Second}
	resp, err := client.Get(url)
	l.check(err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	l.check(err)
	return string(b)
}
