package proxy

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"golang.org/x/sys/unix"

	"github.com/inferrail/inferrail/policy"
)

// rawEngine is an engine of one test: it accepts connections and gives each to
// serve, which writes whatever bytes the test needs. It is for misbehaviour on
// the wire; how real engines behave is the simulator's.
type rawEngine struct {
	t     testing.TB
	l     net.Listener
	serve func(c *engineSide)

	mu    sync.Mutex
	conns []*net.TCPConn
	wg    sync.WaitGroup
}

// engineSide is one connection seen from the engine.
type engineSide struct {
	*net.TCPConn
	br *bufio.Reader
	n  int // which connection it is, from 0
}

func newRawEngine(t testing.TB, serve func(c *engineSide)) *rawEngine {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	e := &rawEngine{t: t, l: l, serve: serve}
	e.wg.Go(func() {
		for n := 0; ; n++ {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			c := nc.(*net.TCPConn)
			e.mu.Lock()
			e.conns = append(e.conns, c)
			e.mu.Unlock()
			e.wg.Go(func() {
				defer c.Close()
				serve(&engineSide{c, bufio.NewReader(c), n})
			})
		}
	})
	t.Cleanup(e.close)
	return e
}

func (e *rawEngine) url() string { return "http://" + e.l.Addr().String() }

// accepted is how many connections there were.
func (e *rawEngine) accepted() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.conns)
}

func (e *rawEngine) close() {
	e.l.Close()
	e.mu.Lock()
	for _, c := range e.conns {
		c.Close()
	}
	e.mu.Unlock()
	e.wg.Wait()
}

// request reads one request, or returns nil at the connection's end.
func (c *engineSide) request() *http.Request {
	r, err := http.ReadRequest(c.br)
	if err != nil {
		return nil
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	return r
}

// waitClosed returns how long it took from now on until the proxy closed the
// connection.
func (c *engineSide) waitClosed() time.Duration {
	began := time.Now()
	io.Copy(io.Discard, c.br)
	return time.Since(began)
}

// fixed is a whole response with a Content-Length.
func fixed(body string) string {
	return fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
}

const chunkedHead = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"

func chunk(data string) string { return fmt.Sprintf("%x\r\n%s\r\n", len(data), data) }

// answering returns a serve function that answers every request alike.
func answering(response string) func(*engineSide) {
	return func(c *engineSide) {
		for c.request() != nil {
			io.WriteString(c, response)
		}
	}
}

// rig is a server with one model "m" (alias "alias") on some engines.
type rig struct {
	t        testing.TB
	s        *Server
	addr     string
	replicas []*Replica
	down     sync.Once
}

func newRig(t testing.TB, limits Limits, joiner Joiner, engines ...string) *rig {
	t.Helper()
	checkLeaks(t)
	r := &rig{t: t}
	r.s = New(limits, joiner, slog.New(slog.NewTextHandler(testWriter{t}, nil)))
	m := &Model{Name: "m", Aliases: []string{"alias"}, Created: 7, Policy: policy.LeastRequest{}}
	for i, url := range engines {
		replica, err := NewReplica(i, fmt.Sprint("e", i), url)
		if err != nil {
			t.Fatal(err)
		}
		r.replicas = append(r.replicas, replica)
	}
	m.Replicas = r.replicas
	r.s.SetFleet(&Fleet{Models: map[string]*Model{"m": m, "alias": m}, Listed: []*Model{m}})
	lc := net.ListenConfig{}
	lc.SetMultipathTCP(false)
	l, err := lc.Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r.addr = l.Addr().String()
	served := make(chan error, 1)
	go func() { served <- r.s.Serve(l) }()
	t.Cleanup(func() {
		r.shutdown(5 * time.Second)
		if err := <-served; err != ErrClosed {
			t.Errorf("Serve returned %v", err)
		}
	})
	return r
}

func (r *rig) shutdown(d time.Duration) (err error) {
	r.down.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), d)
		defer cancel()
		err = r.s.Shutdown(ctx)
		for _, replica := range r.replicas {
			if n := replica.InFlight(); n != 0 {
				r.t.Errorf("replica %s still counts %d requests", replica.ID, n)
			}
			w, _ := replica.standing.Backlog.Ahead(&policy.Speed{}, time.Now())
			if replica.standing.Promised() != (policy.Work{}) || w != (policy.Work{}) || replica.Pending() != 0 {
				r.t.Errorf("replica %s still has %+v before it, and %d in line", replica.ID, w, replica.Pending())
			}
			replica.Close()
		}
	})
	return err
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Log(strings.TrimSpace(string(p)))
	return len(p), nil
}

// client is one raw client connection.
type client struct {
	*net.TCPConn
	t  testing.TB
	br *bufio.Reader
}

func (r *rig) dial() *client {
	r.t.Helper()
	c, err := net.Dial("tcp", r.addr)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(20 * time.Second))
	return &client{c.(*net.TCPConn), r.t, bufio.NewReader(c)}
}

func (c *client) send(s string) {
	c.t.Helper()
	if _, err := io.WriteString(c.TCPConn, s); err != nil {
		c.t.Fatalf("send: %v", err)
	}
}

// answer reads one response with its whole body.
func (c *client) answer() (*http.Response, string) {
	c.t.Helper()
	return c.answerTo(http.MethodPost)
}

func (c *client) answerTo(method string) (*http.Response, string) {
	c.t.Helper()
	resp, err := http.ReadResponse(c.br, &http.Request{Method: method})
	if err != nil {
		c.t.Fatalf("read the response: %v", err)
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		c.t.Fatalf("read the response's body: %v (have %q)", err, body)
	}
	return resp, string(body)
}

// closed reads until the connection's end and fails when anything comes.
func (c *client) closed() {
	c.t.Helper()
	rest, err := io.ReadAll(c.br)
	if len(rest) > 0 {
		c.t.Fatalf("after the answer came %q", rest)
	}
	if err != nil && !strings.Contains(err.Error(), "reset") {
		c.t.Fatalf("the connection stays open: %v", err)
	}
}

// post is a request to the chat completions.
func post(body string, fields ...string) string {
	return fmt.Sprintf("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%s\r\n%s",
		len(body), strings.Join(fields, ""), body)
}

const hello = `{"model":"m","messages":[{"role":"user","content":"hello"}],"stream":true}`

// checkLeaks fails the test when goroutines or descriptors are left behind at
// its end.
func checkLeaks(t testing.TB) {
	t.Helper()
	if _, fuzzing := t.(*testing.F); fuzzing {
		return // its workers start goroutines of their own
	}
	goroutines, fds := runtime.NumGoroutine(), openFDs(t)
	t.Cleanup(func() {
		for began := time.Now(); ; time.Sleep(5 * time.Millisecond) {
			g, f := runtime.NumGoroutine(), openFDs(t)
			if g <= goroutines && f <= fds {
				return
			}
			if time.Since(began) > 20*time.Second {
				buf := make([]byte, 1<<20)
				t.Errorf("leaked: %d goroutines before, %d after; %d descriptors before, %d after\n%s",
					goroutines, g, fds, f, buf[:runtime.Stack(buf, true)])
				return
			}
		}
	})
}

func openFDs(t testing.TB) int {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// eventually waits until ok holds.
func eventually(t *testing.T, limit time.Duration, what string, ok func() bool) {
	t.Helper()
	for began := time.Now(); !ok(); time.Sleep(time.Millisecond) {
		if time.Since(began) > limit {
			t.Fatalf("not within %v: %s", limit, what)
		}
	}
}

// outcome is how many exchanges ended with an outcome.
func (r *rig) outcome(label string) float64 {
	return counted(r.s.stats.requests, func(name, value string) bool { return name == "outcome" && value == label })
}

// retries is how many retries the metrics count.
func (r *rig) retries() int {
	return int(counted(r.s.stats.retries, func(name, _ string) bool { return name == "reason" }))
}

// counted sums the counters that have a label which is wanted.
func counted(vec *prometheus.CounterVec, wanted func(name, value string) bool) (n float64) {
	ch := make(chan prometheus.Metric, 100)
	vec.Collect(ch)
	close(ch)
	for m := range ch {
		var pb dto.Metric
		m.Write(&pb)
		for _, l := range pb.Label {
			if wanted(l.GetName(), l.GetValue()) {
				n += pb.Counter.GetValue()
			}
		}
	}
	return n
}

// fullListener is the address of a listener whose queue of connections is full.
func fullListener(t *testing.T) string {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(sa.(*unix.SockaddrInet4).Port))
	for range 8 {
		c, err := net.DialTimeout("tcp", addr, 200*time.Millisecond)
		if err != nil {
			return addr
		}
		t.Cleanup(func() { c.Close() })
	}
	t.Fatal("the queue never fills")
	return ""
}
