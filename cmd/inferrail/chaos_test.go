package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/inferrail/inferrail/bpf"
)

// TestChaos is an agent in front of three simulated engines, each a process of
// its own, that are killed, hung, made to flap and slowed down at random while
// clients send 300 requests a second, streams among them. At any time at least
// one engine is well, so no request may fail before it is answered; one whose
// engine dies in mid-answer must be seen to have broken. Afterwards the agent
// holds no more memory, goroutines and sockets than before.
//
// It lasts for INFERRAIL_CHAOS (20s), in each tier. The seed is
// INFERRAIL_CHAOS_SEED, else drawn and told.
//
//	make soak
func TestChaos(t *testing.T) {
	length := 20 * time.Second
	if s := os.Getenv("INFERRAIL_CHAOS"); s != "" {
		var err error
		if length, err = time.ParseDuration(s); err != nil {
			t.Fatalf("INFERRAIL_CHAOS: %v", err)
		}
	} else if testing.Short() {
		t.Skip("20 seconds a tier")
	}
	seed := rand.Uint64()
	if s := os.Getenv("INFERRAIL_CHAOS_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatalf("INFERRAIL_CHAOS_SEED: %v", err)
		}
	}
	for _, tier := range []string{"copy", "packet"} {
		t.Run(tier, func(t *testing.T) {
			if tier == "packet" {
				if err := bpf.Probe(); err != nil && os.Getenv("INFERRAIL_NEED_BPF") != "1" {
					t.Skip(err)
				}
			}
			t.Logf("INFERRAIL_CHAOS=%v INFERRAIL_CHAOS_SEED=%d", length, seed)
			newChaos(t, tier, seed).run(length)
		})
	}
}

// chaos is one run of TestChaos.
type chaos struct {
	*testing.T
	rng     *rand.Rand
	engines []*chaosEngine
	agent   *child
	url     string // of the agent
	admin   string

	sent, answered, broken, left, late, failed atomic.Int64
	running                                    sync.WaitGroup
	client                                     *http.Client
}

// chaosEngine is one simulated engine. Only the goroutine that makes trouble
// uses it.
type chaosEngine struct {
	id, port string
	child    *child
}

// child is a process of this test. It is ended by its id.
type child struct {
	t     *testing.T
	cmd   *exec.Cmd
	out   *output
	ended chan struct{}
}

func startChild(t *testing.T, args ...string) *child {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := &child{t: t, cmd: exec.Command(self, args...), out: new(output), ended: make(chan struct{})}
	c.cmd.Env = append(os.Environ(), "INFERRAIL_RUN=1")
	c.cmd.Stdout, c.cmd.Stderr = c.out, c.out
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = c.cmd.Wait()
		close(c.ended)
	}()
	return c
}

func (c *child) signal(s os.Signal) { _ = c.cmd.Process.Signal(s) }

// end ends the process, hung or not, and waits for it.
func (c *child) end() {
	c.signal(syscall.SIGKILL)
	<-c.ended
}

func newChaos(t *testing.T, tier string, seed uint64) *chaos {
	c := &chaos{T: t, rng: rand.New(rand.NewPCG(seed, 1))}
	var config bytes.Buffer
	fmt.Fprintf(&config, "listen: 127.0.0.1:%s\nadmin_listen: 127.0.0.1:%s\ndatapath: {mode: %s, interfaces: [lo]}\nreplicas:\n",
		freePort(t), freePort(t), tier)
	for i := range 3 {
		e := &chaosEngine{id: fmt.Sprint("e", i), port: freePort(t)}
		c.engines = append(c.engines, e)
		fmt.Fprintf(&config, "- {id: %s, url: \"http://127.0.0.1:%s\"}\n", e.id, e.port)
		c.startEngine(e)
	}
	file := filepath.Join(t.TempDir(), "inferrail.yaml")
	if err := os.WriteFile(file, config.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(config.String(), "\n")
	c.url = "http://" + strings.TrimPrefix(lines[0], "listen: ")
	c.admin = "http://" + strings.TrimPrefix(lines[1], "admin_listen: ")
	c.agent = startChild(t, "agent", "--config", file)
	t.Cleanup(func() {
		c.agent.end()
		for _, e := range c.engines {
			e.child.end()
		}
		if t.Failed() {
			text := c.agent.out.String()
			t.Logf("the end of the agent's log:\n%s", text[max(0, len(text)-8000):])
		}
	})
	c.client = &http.Client{Timeout: 2 * time.Minute, Transport: &http.Transport{MaxIdleConnsPerHost: 1000}}
	c.awaitUp(len(c.engines))
	return c
}

func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	return port
}

func (c *chaos) startEngine(e *chaosEngine) {
	e.child = startChild(c.T, "sim", "--port", e.port, "--served-model-name", "m",
		"--prefill-a", "1", "--prefill-d", "2000", "--time-per-output-token", "2ms")
}

// awaitUp waits until n replicas take requests as the agent sees it.
func (c *chaos) awaitUp(n int) {
	c.Helper()
	for began := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		up := 0
		page, err := c.page("/metrics")
		if err == nil {
			up = int(sumMetric(c.T, page, "inferrail_replica_up"))
		}
		if up >= n {
			return
		}
		if time.Since(began) > time.Minute {
			fleet, _ := c.page("/debug/fleet")
			c.Fatalf("%d of %d replicas are up: %v\n%s", up, n, err, fleet)
		}
	}
}

func (c *chaos) page(path string) (string, error) {
	client := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Get(c.admin + path)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return string(body), err
}

// footprint is what the agent holds when it is idle.
type footprint struct {
	rss, goroutines, files int
}

func (c *chaos) footprint() footprint {
	c.Helper()
	page, err := c.page("/metrics")
	if err != nil {
		c.Fatal(err)
	}
	return footprint{
		rss:        int(sumMetric(c.T, page, "process_resident_memory_bytes")),
		goroutines: int(sumMetric(c.T, page, "go_goroutines")),
		files:      int(sumMetric(c.T, page, "process_open_fds")),
	}
}

const chaosRate = 300 // requests a second

func (c *chaos) run(length time.Duration) {
	idle := c.footprint()
	// What a warm agent holds is what it must not exceed later.
	c.load(length / 5)
	warm := c.footprint()
	if c.failed.Load() > 0 || c.broken.Load() > 0 {
		c.Fatalf("without trouble %d requests failed and %d broke", c.failed.Load(), c.broken.Load())
	}
	ctx, stop := context.WithCancel(context.Background())
	var trouble sync.WaitGroup
	trouble.Go(func() { c.trouble(ctx) })
	for begin, last := time.Now(), time.Now(); time.Since(begin) < length; {
		c.load(min(length, 5*time.Second))
		if time.Since(last) > 20*time.Second {
			last = time.Now()
			c.report()
		}
	}
	stop()
	trouble.Wait()
	c.running.Wait()
	c.report()
	c.client.CloseIdleConnections()

	if c.answered.Load() < int64(length.Seconds()*chaosRate/2) || c.left.Load() == 0 {
		c.Errorf("too little happened")
	}
	// The agent keeps idle engine connections for four seconds.
	var now footprint
	for began := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		now = c.footprint()
		if now.goroutines <= idle.goroutines+3 && now.files <= idle.files+3 {
			break
		}
		if time.Since(began) > 30*time.Second {
			stacks, _ := c.page("/debug/pprof/goroutine?debug=1")
			c.Errorf("left behind: %+v before, %+v after\n%s", idle, now, stacks[:min(len(stacks), 20000)])
			break
		}
	}
	c.Logf("footprint: idle %+v, warm %+v, afterwards %+v", idle, warm, now)
	if now.rss > warm.rss+warm.rss/4+32<<20 {
		c.Errorf("the agent holds %d MiB, and held %d when it was warm", now.rss>>20, warm.rss>>20)
	}
	page, err := c.page("/metrics")
	if err != nil {
		c.Fatal(err)
	}
	for _, name := range []string{"inferrail_replica_requests_running", "inferrail_replica_requests_pending", "inferrail_requests_running", "inferrail_buffered_bytes"} {
		if n := sumMetric(c.T, page, name); n != 0 {
			c.Errorf("%s is %v for ever", name, n)
		}
	}
	for _, line := range strings.Split(page, "\n") {
		if strings.HasPrefix(line, "inferrail_retries_total") || strings.HasPrefix(line, "inferrail_requests_total") || strings.HasPrefix(line, "inferrail_responses_total") {
			c.Log(line)
		}
	}
}

func (c *chaos) report() {
	c.Logf("%d sent: %d answered, %d broke with their engine, %d clients left, %d waited over a second, %d failed",
		c.sent.Load(), c.answered.Load(), c.broken.Load(), c.left.Load(), c.late.Load(), c.failed.Load())
}

// load sends requests at the rate for a time. It does not wait for answers.
func (c *chaos) load(length time.Duration) {
	tick := time.NewTicker(time.Second / chaosRate)
	defer tick.Stop()
	for until := time.Now().Add(length); time.Now().Before(until); <-tick.C {
		n := c.sent.Add(1)
		c.running.Go(func() { c.request(n) })
	}
}

// request sends one request: most are streams, and some clients leave.
func (c *chaos) request(n int64) {
	rng := rand.New(rand.NewPCG(uint64(n), 3))
	tokens := 1 + rng.IntN(30)
	stream, leave := rng.IntN(4) > 0, rng.IntN(20) == 0
	body := fmt.Sprintf(`{"model":"m","max_tokens":%d,"stream":%v,"messages":[{"role":"user","content":"request %d"}]}`, tokens, stream, n)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, "POST", c.url+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		c.Error(err)
		return
	}
	// net/http would send it again by itself.
	req.GetBody = nil
	began := time.Now()
	resp, err := c.client.Do(req)
	if err != nil {
		c.fail(n, began, "no answer: %v", err)
		return
	}
	defer resp.Body.Close()
	if time.Since(began) > time.Second {
		c.late.Add(1)
	}
	if resp.StatusCode != 200 {
		text, _ := io.ReadAll(resp.Body)
		c.fail(n, began, "status %d: %s", resp.StatusCode, text)
		return
	}
	switch {
	case leave:
		var b [64]byte
		_, _ = resp.Body.Read(b[:])
		cancel()
		c.left.Add(1)
	case stream:
		c.stream(n, began, tokens, resp.Body)
	default:
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			c.broken.Add(1)
			return
		}
		var answer struct {
			Usage struct {
				Tokens int `json:"completion_tokens"`
			}
		}
		if err := json.Unmarshal(text, &answer); err != nil || answer.Usage.Tokens != tokens {
			c.fail(n, began, "%d tokens asked for, got %q", tokens, text)
			return
		}
		c.answered.Add(1)
	}
}

// stream reads an answer to its end, or to where it broke: then there is an
// error, as an event or from the connection.
func (c *chaos) stream(n int64, began time.Time, tokens int, body io.Reader) {
	got, done, told := 0, false, false
	r := bufio.NewReader(body)
	for {
		line, err := r.ReadString('\n')
		switch {
		case strings.HasPrefix(line, `data: {"error":`):
			told = true
		case strings.HasPrefix(line, "data: [DONE]"):
			done = true
		case strings.Contains(line, `"delta":{"content":`):
			got++
		}
		if errors.Is(err, io.EOF) && done && got == tokens && !told {
			c.answered.Add(1)
			return
		}
		if errors.Is(err, io.EOF) {
			c.fail(n, began, "a clean end after %d of %d tokens, done %v, told %v", got, tokens, done, told)
			return
		}
		if err != nil {
			c.broken.Add(1)
			return
		}
	}
}

func (c *chaos) fail(n int64, began time.Time, format string, args ...any) {
	if c.failed.Add(1) <= 20 {
		c.Errorf("request %d, after %v: %s", n, time.Since(began).Round(time.Millisecond), fmt.Sprintf(format, args...))
	}
}

// trouble troubles one engine, or two, and lets all recover before the next.
func (c *chaos) trouble(ctx context.Context) {
	for ctx.Err() == nil {
		first := c.rng.IntN(len(c.engines))
		victims := []*chaosEngine{c.engines[first]}
		if c.rng.IntN(3) == 0 {
			victims = append(victims, c.engines[(first+1)%len(c.engines)])
		}
		var wg sync.WaitGroup
		for _, e := range victims {
			rng := rand.New(rand.NewPCG(c.rng.Uint64(), 2))
			wg.Go(func() { c.harm(e, rng) })
		}
		wg.Wait()
		c.awaitUp(len(c.engines))
	}
}

// harm does one kind of harm to an engine and undoes it.
func (c *chaos) harm(e *chaosEngine, rng *rand.Rand) {
	span := func(least, most time.Duration) { time.Sleep(least + rand.N(most-least)) }
	kind := rng.IntN(5)
	switch kind {
	case 0: // killed
		e.child.end()
		span(200*time.Millisecond, 3*time.Second)
		c.startEngine(e)
	case 1: // hung: its socket still accepts
		e.child.signal(syscall.SIGSTOP)
		span(time.Second, 6*time.Second)
		e.child.signal(syscall.SIGCONT)
	case 2: // flapping
		for range 3 {
			e.child.end()
			span(20*time.Millisecond, 300*time.Millisecond)
			c.startEngine(e)
			span(50*time.Millisecond, time.Second)
		}
	case 3: // hung, then killed
		e.child.signal(syscall.SIGSTOP)
		span(time.Second, 4*time.Second)
		e.child.end()
		c.startEngine(e)
	case 4: // slow
		c.fault(e, `{"head_delay_us":400000}`)
		span(time.Second, 4*time.Second)
		c.fault(e, `{}`)
	}
}

// fault sets what the engine does wrong.
func (c *chaos) fault(e *chaosEngine, body string) {
	client := http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Post("http://127.0.0.1:"+e.port+"/sim/faults", "application/json", strings.NewReader(body))
	if err != nil {
		c.Errorf("%s: %v", e.id, err)
		return
	}
	defer resp.Body.Close()
	if resp.StatusCode >= 300 {
		text, _ := io.ReadAll(resp.Body)
		c.Errorf("%s: POST /sim/faults: %d %s", e.id, resp.StatusCode, text)
	}
}
