package agent

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/inferrail/inferrail/simulator"
)

// testConfig is an agent on free ports in front of the engines, with quick
// health checks, in the copy tier.
func testConfig(engines ...*simulator.Server) Config {
	c := DefaultConfig()
	c.Listen, c.AdminListen = "127.0.0.1:0", "127.0.0.1:0"
	c.Datapath.Mode = "copy"
	c.Health.Interval = 10 * time.Millisecond
	for i, e := range engines {
		c.Replicas = append(c.Replicas, ReplicaConfig{ID: fmt.Sprintf("r%d", i), URL: e.URL()})
	}
	return c
}

func startAgent(t *testing.T, c Config) *Agent {
	t.Helper()
	a, err := Start(t.Context(), c, testLog(t))
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// stopped ends an agent whose requests are over.
func stopped(t *testing.T, a *Agent) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := a.Stop(ctx); err != nil {
		t.Error(err)
	}
}

// ask sends a chat request that streams n tokens.
func ask(t *testing.T, a *Agent, n int) *http.Response {
	t.Helper()
	body := fmt.Sprintf(`{"model":"m","stream":true,"max_tokens":%d,"messages":[{"role":"user","content":"hi"}]}`, n)
	// A client of its own: no connection is shared between requests.
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}
	resp, err := client.Post("http://"+a.Addr().String()+"/v1/chat/completions", "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	return resp
}

// page gets an admin page.
func page(t *testing.T, a *Agent, path string) (int, string) {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 10 * time.Second}
	resp, err := client.Get("http://" + a.AdminAddr().String() + path)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

func TestAgentServes(t *testing.T) {
	a := startAgent(t, testConfig(startEngine(t, 0, "m"), startEngine(t, 0, "m")))
	defer stopped(t, a)
	resp := ask(t, a, 5)
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != 200 || !strings.HasSuffix(string(body), "data: [DONE]\n\n") {
		t.Fatalf("status %d, %v, body %q", resp.StatusCode, err, body)
	}
	if r := resp.Header.Get("x-inferrail-replica"); r != "r0" && r != "r1" {
		t.Errorf("answered by %q", r)
	}
	if got := fmt.Sprint(a.Models()); got != "[m]" {
		t.Errorf("models %s", got)
	}
	if tier, reason := a.Tier(); tier != "copy" || reason == "" {
		t.Errorf("tier %q for the reason %q", tier, reason)
	}
}

func TestAdminPages(t *testing.T) {
	second := startEngine(t, 0, "m")
	a := startAgent(t, testConfig(startEngine(t, 0, "m"), second))
	defer stopped(t, a)
	if _, err := io.ReadAll(ask(t, a, 3).Body); err != nil {
		t.Fatal(err)
	}

	f := func(path string, status int, contains ...string) {
		t.Helper()
		got, body := page(t, a, path)
		if got != status {
			t.Errorf("%s: status %d, want %d", path, got, status)
		}
		for _, want := range contains {
			if !strings.Contains(body, want) {
				t.Errorf("%s lacks %q:\n%s", path, want, body)
			}
		}
	}
	f("/healthz", 200, "ok")
	f("/readyz", 200, "ok")
	f("/metrics", 200, `inferrail_replica_up{replica="r0"} 1`, "go_goroutines", "process_open_fds")
	f("/debug/fleet", 200, `"id": "r0"`, `"policy": "cost_model"`, `"up": true`)
	f("/debug/datapath", 200, `"tier": "copy"`, `"reason":`, `"wakeups":`, `"wakeups_per_1000_chunks":`)
	f("/", 200, "<title>inferrail</title>")
	f("/nowhere", 404)
	var counts struct {
		Chunks *uint64 `json:"chunks"`
	}
	// What ends an answer is counted just after the client has it all.
	eventually(t, func() bool {
		_, body := page(t, a, "/debug/datapath")
		if err := json.Unmarshal([]byte(body), &counts); err != nil || counts.Chunks == nil {
			t.Fatalf("%v in %s", err, body)
		}
		return *counts.Chunks > 0
	}, func() string { return "the answer's chunks are not counted" })
	for _, path := range []string{"/debug/fleet", "/debug/datapath"} {
		if _, body := page(t, a, path); !json.Valid([]byte(body)) {
			t.Errorf("%s is not JSON: %s", path, body)
		}
	}

	second.Close()
	eventually(t, func() bool { up, _ := a.Replicas(); return up == 1 }, func() string { return "the closed engine stays up" })
	f("/readyz", 200, "degraded: replica r1 is down (GET /health: ")
	f("/metrics", 200, `inferrail_replica_up{replica="r1"} 0`)
}

func TestNotReadyWithoutReplicas(t *testing.T) {
	engine := startEngine(t, 0, "m")
	c := testConfig(engine)
	engine.Close()
	a := startAgent(t, c)
	defer stopped(t, a)
	if status, body := page(t, a, "/readyz"); status != 503 || !strings.Contains(body, "none of 1 replicas") {
		t.Errorf("status %d: %s", status, body)
	}
	if status, _ := page(t, a, "/healthz"); status != 200 {
		t.Errorf("healthz has status %d", status)
	}
}

// slowEngine needs ten seconds for an answer of 100 tokens.
func slowEngine(t *testing.T) *simulator.Server {
	t.Helper()
	server, err := simulator.Start(simulator.Config{ServedModelName: []string{"m"}, TimePerOutputToken: 100 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close() })
	return server
}

func TestSignalDrains(t *testing.T) {
	before := runtime.NumGoroutine()
	engine := slowEngine(t)
	a := startAgent(t, testConfig(engine))
	body := bufio.NewReader(ask(t, a, 8).Body)
	if _, err := body.ReadString('\n'); err != nil { // the answer has begun
		t.Fatal(err)
	}
	signals := make(chan os.Signal, 2)
	ended := make(chan error, 1)
	go func() { ended <- a.Run(signals) }()
	signals <- syscall.SIGTERM

	// While it drains it says so, and takes no new connection.
	eventually(t, func() bool { return a.draining.Load() }, func() string { return "the signal is not heeded" })
	if status, said := page(t, a, "/readyz"); status != 503 || !strings.Contains(said, "draining") {
		t.Errorf("readyz while draining: %d %s", status, said)
	}
	eventually(t, func() bool {
		c, err := net.Dial("tcp", a.Addr().String())
		if err == nil {
			c.Close()
		}
		return err != nil
	}, func() string { return "new connections are still accepted" })

	rest, err := io.ReadAll(body)
	if err != nil || !strings.HasSuffix(string(rest), "data: [DONE]\n\n") {
		t.Errorf("the running answer was cut: %v, %q", err, rest)
	}
	if err := <-ended; err != nil {
		t.Errorf("Run: %v", err)
	}
	engine.Close()
	eventually(t, func() bool { return runtime.NumGoroutine() <= before }, func() string {
		stacks := make([]byte, 1<<20)
		return fmt.Sprintf("%d goroutines before, %d after:\n%s", before, runtime.NumGoroutine(), stacks[:runtime.Stack(stacks, true)])
	})
}

func TestSecondSignalCuts(t *testing.T) {
	engine := slowEngine(t)
	a := startAgent(t, testConfig(engine))
	body := bufio.NewReader(ask(t, a, 100).Body)
	if _, err := body.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	signals := make(chan os.Signal, 2)
	ended := make(chan error, 1)
	go func() { ended <- a.Run(signals) }()
	signals <- syscall.SIGINT
	signals <- syscall.SIGINT
	select {
	case err := <-ended:
		if err == nil || !strings.Contains(err.Error(), "requests were cut") {
			t.Errorf("Run: %v", err)
		}
	case <-time.After(5 * time.Second):
		t.Fatal("the second signal is not heeded")
	}
	if rest, err := io.ReadAll(body); err == nil {
		t.Errorf("a cut answer looks complete: %q", rest)
	}
	eventually(t, func() bool { return engine.Running() == 0 }, func() string { return "the engine still generates" })
}

func TestShutdownTimeoutCuts(t *testing.T) {
	c := testConfig(slowEngine(t))
	c.Server.ShutdownTimeout = 200 * time.Millisecond
	a := startAgent(t, c)
	body := bufio.NewReader(ask(t, a, 100).Body)
	if _, err := body.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	signals := make(chan os.Signal, 1)
	signals <- syscall.SIGTERM
	began := time.Now()
	if err := a.Run(signals); err == nil || time.Since(began) > 5*time.Second {
		t.Errorf("Run: %v after %v", err, time.Since(began))
	}
}

func TestStartFailure(t *testing.T) {
	engine := startEngine(t, 0, "m")
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	before := runtime.NumGoroutine()
	f := func(change func(*Config), want string) {
		t.Helper()
		c := testConfig(engine)
		change(&c)
		a, err := Start(t.Context(), c, testLog(t))
		if err == nil {
			stopped(t, a)
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	f(func(c *Config) { c.Replicas = nil }, "replicas: are missing")
	f(func(c *Config) { c.Listen = busy.Addr().String() }, "listen: listen tcp "+busy.Addr().String())
	f(func(c *Config) { c.AdminListen = busy.Addr().String() }, "admin_listen: listen tcp "+busy.Addr().String())
	f(func(c *Config) { c.Listen = "no.such.host.invalid:80" }, "listen: ")
	eventually(t, func() bool { return runtime.NumGoroutine() <= before }, func() string {
		return fmt.Sprintf("%d goroutines before, %d after", before, runtime.NumGoroutine())
	})
}

// The kernel datapath knows plain TCP sockets only, and clients that vanish
// are noticed.
func TestListenerIsPlainTCP(t *testing.T) {
	l, err := openListener(t.Context(), "127.0.0.1:0", testLog(t))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	defer l.close()
	client, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	conn, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	raw, err := conn.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	f := func(level, option, want int) {
		t.Helper()
		var got int
		var optErr error
		if err := raw.Control(func(fd uintptr) { got, optErr = unix.GetsockoptInt(int(fd), level, option) }); err != nil {
			t.Fatal(err)
		}
		if optErr != nil || got != want {
			t.Errorf("socket option %d/%d is %d (%v), want %d", level, option, got, optErr, want)
		}
	}
	f(unix.SOL_SOCKET, unix.SO_PROTOCOL, unix.IPPROTO_TCP)
	f(unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1)
	f(unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, 15)
}

// Without a number of its own, server.max_connections is half of the files that
// the process may open; the other half is for the connections to engines.
func TestMaxConnectionsFollowsTheFileLimit(t *testing.T) {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		t.Fatal(err)
	}
	c := DefaultConfig()
	if got, want := limitsOf(&c).MaxConns, int(min(lim.Cur/2, math.MaxInt32)); got != want {
		t.Errorf("of %d files %d are for connections, want %d", lim.Cur, got, want)
	}
	c.Server.MaxConnections = 7
	if got := limitsOf(&c).MaxConns; got != 7 {
		t.Errorf("got %d, want what was asked for", got)
	}
}

// The agent refuses the connections that are too many, and its answer says who
// it is.
func TestConnectionTooMany(t *testing.T) {
	c := testConfig(startEngine(t, 0, "m"))
	c.Server.MaxConnections = 1
	a := startAgent(t, c)
	defer stopped(t, a)
	first, err := net.Dial("tcp", a.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	// The refusal may come before the request is sent.
	health := func() *http.Response {
		t.Helper()
		c, err := net.Dial("tcp", a.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(10 * time.Second))
		_, _ = io.WriteString(c, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatal(err)
		}
		return resp
	}
	resp := health()
	if server := resp.Header.Get("Server"); resp.StatusCode != 503 || !strings.HasPrefix(server, "inferrail") {
		t.Errorf("status %d by %q", resp.StatusCode, server)
	}
	// A reload raises the number.
	c.Server.MaxConnections = 2
	if err := a.Reload(c); err != nil {
		t.Fatal(err)
	}
	if resp := health(); resp.StatusCode != 200 {
		t.Errorf("status %d", resp.StatusCode)
	}
}
