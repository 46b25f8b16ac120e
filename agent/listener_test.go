package agent

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// lines is a log that a test reads.
type lines struct {
	mu  sync.Mutex // guards buf
	buf bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

func (l *lines) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

// callers send requests to an address without a pause until they are stopped,
// and never repeat one.
type callers struct {
	served, last atomic.Int64 // answers, and those that said that they were a connection's last
	failures     chan error
	stop         atomic.Bool
	done         sync.WaitGroup
}

func callersOf(addr string, each, reusing int) *callers {
	c := &callers{failures: make(chan error, 100)}
	for range each {
		c.done.Go(func() { c.call(addr, false) })
	}
	for range reusing {
		c.done.Go(func() { c.call(addr, true) })
	}
	return c
}

func (c *callers) call(addr string, reuse bool) {
	var nc net.Conn
	var br *bufio.Reader
	defer func() {
		if nc != nil {
			nc.Close()
		}
	}()
	for !c.stop.Load() {
		if nc == nil {
			var err error
			if nc, err = net.Dial("tcp", addr); err != nil {
				c.fail(err)
				continue
			}
			nc.SetDeadline(time.Now().Add(time.Minute))
			br = bufio.NewReader(nc)
		}
		closes, err := c.one(nc, br)
		switch {
		case err != nil:
			c.fail(err)
		case closes:
			c.last.Add(1)
		}
		if err != nil || closes || !reuse {
			// With a reset: a port in TIME_WAIT for each call would exhaust them.
			nc.(*net.TCPConn).SetLinger(0)
			nc.Close()
			nc = nil
		}
	}
}

func (c *callers) one(nc net.Conn, br *bufio.Reader) (closes bool, err error) {
	if _, err := fmt.Fprintf(nc, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		return false, err
	}
	resp, err := http.ReadResponse(br, nil)
	if err != nil {
		return false, err
	}
	resp.Body.Close()
	if resp.StatusCode != 200 {
		return false, fmt.Errorf("status %d", resp.StatusCode)
	}
	c.served.Add(1)
	return resp.Close, nil
}

func (c *callers) fail(err error) {
	select {
	case c.failures <- err:
	default:
		time.Sleep(time.Millisecond)
	}
}

// more waits until n further requests are served.
func (c *callers) more(t *testing.T, n int64) {
	t.Helper()
	until := c.served.Load() + n
	for end := time.Now().Add(time.Minute); c.served.Load() < until; time.Sleep(time.Millisecond) {
		if time.Now().After(end) || len(c.failures) > 10 {
			t.Fatalf("%d requests are served, %d failed", c.served.Load(), len(c.failures))
		}
	}
}

func (c *callers) end(t *testing.T) {
	t.Helper()
	c.stop.Store(true)
	c.done.Wait()
	close(c.failures)
	for err := range c.failures {
		t.Errorf("after %d requests: %v", c.served.Load(), err)
	}
}

// One agent takes over from another, and a third from that, while clients open
// connections without a pause and others reuse theirs. None sees a failure.
func TestTakeOver(t *testing.T) {
	engine := startEngine(t, 0, "m")
	config := testConfig(engine)
	var said lines
	start := func() *Agent {
		t.Helper()
		a, err := Start(t.Context(), config, said.logger())
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	a := start()
	config.Listen, config.AdminListen = a.Addr().String(), a.AdminAddr().String()
	clients := callersOf(config.Listen, 3, 3)
	// Whoever asks whether the node is ready hears that it is.
	var asking sync.WaitGroup
	asking.Go(func() {
		client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: time.Minute}
		for !clients.stop.Load() {
			resp, err := client.Get("http://" + config.AdminListen + "/readyz")
			if err != nil {
				clients.fail(err)
				continue
			}
			body, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			if string(body) != "ok\n" {
				clients.fail(fmt.Errorf("readyz: %s", body))
			}
		}
	})
	for range 3 {
		clients.more(t, 500)
		next := start()
		if next.Addr().String() != config.Listen {
			t.Fatalf("the second agent listens on %s", next.Addr())
		}
		clients.more(t, 500)

		before := clients.last.Load()
		signals := make(chan os.Signal, 1)
		signals <- syscall.SIGTERM
		if err := a.Run(signals); err != nil {
			t.Errorf("the first agent: %v", err)
		}
		clients.more(t, 500)
		if clients.last.Load() == before {
			t.Error("no client that reuses its connection was told to close it")
		}
		a = next
	}
	clients.stop.Store(true)
	asking.Wait()
	clients.end(t)
	stopped(t, a)
	if got := strings.Count(said.String(), "taking over its socket"); got != 6 { // with the admin port
		t.Errorf("%d sockets were said to be taken over, want 6:\n%s", got, &said)
	}
	if c, err := net.Dial("tcp", config.Listen); err == nil {
		c.Close()
		t.Error("the last agent has stopped, and somebody still listens")
	}
}

// An agent that comes when the first does not hand over any more listens for
// itself.
func TestAgentAfterAnother(t *testing.T) {
	config := testConfig(startEngine(t, 0, "m"))
	a := startAgent(t, config)
	config.Listen = a.Addr().String()
	stopped(t, a)
	b := startAgent(t, config)
	defer stopped(t, b)
	if status, _ := page(t, b, "/readyz"); status != 200 {
		t.Errorf("status %d", status)
	}
	ask(t, b, 1)
}

// A process that is no agent may share the port when it is of the same user
// and wants to; otherwise the port is in use.
func TestSharePort(t *testing.T) {
	var said lines
	share := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error { return sharePort(c) }}
	other, err := share.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	l, err := openListener(t.Context(), other.Addr().String(), said.logger())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	defer l.close()
	if !strings.Contains(said.String(), "another process of this user listens there too") {
		t.Errorf("nothing is said of the other process: %s", &said)
	}

	alone, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer alone.Close()
	if l, err := openListener(t.Context(), alone.Addr().String(), said.logger()); !errors.Is(err, syscall.EADDRINUSE) {
		if err == nil {
			l.close()
			l.Close()
		}
		t.Errorf("a port that is in use gives %v", err)
	}

	// Who comes after an agent can share with it, too.
	c := testConfig(startEngine(t, 0, "m"))
	a := startAgent(t, c)
	defer stopped(t, a)
	third, err := share.Listen(t.Context(), "tcp", a.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	third.Close()
}

// What answers at the name must hand over two sockets, or it is left alone.
func TestTakeOverFromNonsense(t *testing.T) {
	f := func(answer func(c *net.UnixConn), want string) {
		t.Helper()
		free, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		addr := free.Addr().String()
		free.Close()
		impostor, err := net.ListenUnix("unix", askedAt(addr))
		if err != nil {
			t.Fatal(err)
		}
		var answered sync.WaitGroup
		answered.Go(func() {
			if c, err := impostor.AcceptUnix(); err == nil {
				answer(c)
				c.Close()
			}
		})
		var said lines
		l, err := openListener(t.Context(), addr, said.logger())
		impostor.Close()
		answered.Wait()
		if err != nil {
			t.Fatal(err)
		}
		l.close()
		l.Close()
		if !strings.Contains(said.String(), want) {
			t.Errorf("got %q, want %q", &said, want)
		}
	}
	pass := func(c *net.UnixConn, files ...*os.File) {
		var fds []int
		for _, file := range files {
			fds = append(fds, int(file.Fd()))
		}
		c.WriteMsgUnix([]byte{0}, unix.UnixRights(fds...), nil)
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	f(func(*net.UnixConn) {}, "cannot take over")
	f(func(c *net.UnixConn) { c.Write([]byte("x")) }, "got 0 sockets, want 2")
	f(func(c *net.UnixConn) { pass(c, null) }, "got 1 sockets, want 2")
	f(func(c *net.UnixConn) { pass(c, null, null) }, "cannot take over")
}
