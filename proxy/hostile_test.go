package proxy

import (
	"fmt"
	"io"
	"net"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestTenThousandIdleConnections: thousands of connections that ask nothing cost a bounded
// amount of memory each, and do not keep others from being served.
func TestTenThousandIdleConnections(t *testing.T) {
	n := 10_000
	var lim unix.Rlimit
	unix.Getrlimit(unix.RLIMIT_NOFILE, &lim)
	lim.Cur = lim.Max
	unix.Setrlimit(unix.RLIMIT_NOFILE, &lim)
	if most := (int(lim.Cur) - 200) / 2; n > most {
		t.Logf("%d files may be open: %d connections instead of %d", lim.Cur, most, n)
		n = most
	}
	e := newRawEngine(t, answering(fixed("ok")))
	r := newRig(t, Limits{}, nil, e.url())
	before := memory()
	conns := make([]net.Conn, 0, n)
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	for range n {
		c, err := net.Dial("tcp", r.addr)
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
	}
	eventually(t, 20*time.Second, "all are accepted", func() bool { return r.s.Datapath().Connections == n })
	each := (memory() - before) / uint64(n)
	t.Logf("%d bytes a connection, both ends", each)
	if each > 32<<10 {
		t.Errorf("an idle connection costs %d bytes", each)
	}
	c := r.dial()
	c.send(post(hello))
	if resp, _ := c.answer(); resp.StatusCode != 200 {
		t.Errorf("beside them: %d", resp.StatusCode)
	}
}

// memory is what the heap and the stacks hold.
func memory() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapInuse + m.StackInuse
}

// TestConnectionsAreBounded: one that is too many is told so, and its place is
// free again when another leaves.
func TestConnectionsAreBounded(t *testing.T) {
	e := newRawEngine(t, answering(fixed("ok")))
	r := newRig(t, Limits{MaxConns: 3}, nil, e.url())
	var clients []*client
	for range 3 {
		clients = append(clients, r.dial())
	}
	eventually(t, 20*time.Second, "three are there", func() bool { return r.s.Datapath().Connections == 3 })
	one := r.dial()
	if resp, body := one.answer(); resp.StatusCode != 503 || resp.Header.Get("Retry-After") == "" || !strings.Contains(body, "as many connections as it may") {
		t.Errorf("one too many: %d %q", resp.StatusCode, body)
	}
	one.closed()
	if n := r.outcome("too_many_connections"); n != 1 {
		t.Errorf("%v are counted", n)
	}
	clients[0].Close()
	eventually(t, 20*time.Second, "one has left", func() bool { return r.s.Datapath().Connections == 2 })
	again := r.dial()
	again.send(post(hello))
	if resp, _ := again.answer(); resp.StatusCode != 200 {
		t.Errorf("afterwards: %d", resp.StatusCode)
	}
}

// TestBodiesAreBounded: bodies that arrive slowly and together hold more than
// they may are refused; small requests are served all the same, and the memory
// is given back.
func TestBodiesAreBounded(t *testing.T) {
	e := newRawEngine(t, answering(fixed("ok")))
	r := newRig(t, Limits{MaxBuffered: 4 << 20, BodyTimeout: 20 * time.Second}, nil, e.url())
	var slow []*client
	for range 3 {
		c := r.dial()
		c.send(fmt.Sprintf("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n", 8<<20))
		c.send(strings.Repeat("x", 1<<20))
		slow = append(slow, c)
	}
	eventually(t, 20*time.Second, "they hold 3 MiB", func() bool { return r.s.buffered.Load() >= 3<<20 })
	go io.WriteString(slow[0].TCPConn, strings.Repeat("x", 3<<20))
	if resp, body := slow[0].answer(); resp.StatusCode != 503 || !strings.Contains(body, "as many request bodies as it may") {
		t.Errorf("too much: %d %q", resp.StatusCode, body)
	}
	c := r.dial()
	c.send(post(hello))
	if resp, _ := c.answer(); resp.StatusCode != 200 {
		t.Errorf("beside them: %d", resp.StatusCode)
	}
	for _, c := range slow {
		c.Close()
	}
	eventually(t, 20*time.Second, "all is given back", func() bool { return r.s.buffered.Load() == 0 })
}

// TestHostileRequests: what would cost much is refused early, in bounded time,
// with an error that says why.
func TestHostileRequests(t *testing.T) {
	e := newRawEngine(t, answering(fixed("ok")))
	r := newRig(t, Limits{HeadTimeout: 200 * time.Millisecond, BodyTimeout: 300 * time.Millisecond, MaxBodyBytes: 1 << 20}, nil, e.url())
	f := func(name, request string, status int, text string) {
		t.Run(name, func(t *testing.T) {
			c := r.dial()
			go io.WriteString(c, request)
			resp, body := c.answer()
			if resp.StatusCode != status || !strings.Contains(body, text) {
				t.Errorf("got %d %q", resp.StatusCode, body)
			}
		})
	}
	head := "POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
	f("endless headers", head+strings.Repeat("A: b\r\n", 100_000), 431, "header section is too large")
	f("an endless line", head+"A: "+strings.Repeat("b", 1_000_000), 431, "header section is too large")
	f("an endless request line", "GET /"+strings.Repeat("a", 1_000_000), 431, "header section is too large")
	f("a head that stops", head, 408, "did not arrive in time")
	f("a body that stops", head+"Content-Length: 10\r\n\r\n{", 408, "did not arrive in time")
	f("a chunked body that stops", head+"Transfer-Encoding: chunked\r\n\r\n5\r\n{", 408, "did not arrive in time")
	f("deep JSON", post(strings.Repeat(`{"a":`, 20_000)), 400, "nested deeper than")
	f("deep arrays", post(`{"model":"m","x":`+strings.Repeat("[", 20_000)), 400, "nested deeper than")
	f("a huge number", post(`{"model":"m","n":`+strings.Repeat("9", 900_000)+`}`), 200, "ok")
	f("gzip", post(hello, "Content-Encoding: gzip\r\n"), 415, "compressed request body")
	f("br twice", post(hello, "Content-Encoding: br, gzip\r\n"), 415, "compressed request body")
	f("identity", post(hello, "Content-Encoding: identity\r\n"), 200, "ok")
	f("too large", head+"Content-Length: 2000000\r\n\r\n", 413, "at most 1048576")
	f("too large in chunks", head+"Transfer-Encoding: chunked\r\n\r\n"+strings.Repeat("10000\r\n"+strings.Repeat("x", 65536)+"\r\n", 20), 413, "too large")
	f("a chunk of 16 exabytes", head+"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n", 400, "")
	f("a chunk of 2 GiB", head+"Transfer-Encoding: chunked\r\n\r\n7fffffff\r\n", 413, "too large")
	f("endless trailers", head+"Transfer-Encoding: chunked\r\n\r\n0\r\n"+strings.Repeat("a: b\r\n", 100_000), 431, "")
	f("an endless chunk extension", head+"Transfer-Encoding: chunked\r\n\r\n1;"+strings.Repeat("x", 100_000), 431, "")
	if e.accepted() > 2 {
		t.Errorf("%d connections were made to the engine", e.accepted())
	}
}

// TestDrip: a byte now and then does not extend a deadline.
func TestDrip(t *testing.T) {
	e := newRawEngine(t, answering(fixed("ok")))
	r := newRig(t, Limits{HeadTimeout: 300 * time.Millisecond, BodyTimeout: 300 * time.Millisecond}, nil, e.url())
	for _, before := range []string{"", "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"} {
		c := r.dial()
		c.send(before)
		began := time.Now()
		done := make(chan struct{})
		go func() {
			defer close(done)
			for time.Since(began) < 10*time.Second {
				if _, err := io.WriteString(c.TCPConn, "a"); err != nil {
					return
				}
				time.Sleep(20 * time.Millisecond)
			}
		}()
		if resp, _ := c.answer(); resp.StatusCode != 408 {
			t.Errorf("got %d", resp.StatusCode)
		}
		<-done
		if d := time.Since(began); d > 5*time.Second {
			t.Errorf("it lasted %v", d)
		}
	}
}
