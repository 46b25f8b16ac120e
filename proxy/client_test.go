package proxy

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestClientLeaves: in whatever phase a client leaves, and however, the
// engine's connection closes within 100 ms. newRig checks that no goroutine,
// descriptor or in-flight count is left.
func TestClientLeaves(t *testing.T) {
	leave := map[string]func(c *client){
		"closes": func(c *client) { c.Close() },
		"resets": func(c *client) {
			c.SetLinger(0)
			c.Close()
		},
		"half closes": func(c *client) { c.CloseWrite() },
	}
	phases := []struct {
		name    string
		request string
		begin   string // what the engine sends before the client leaves
		read    bool   // whether the engine reads the request
	}{
		{"while the body is sent on", post(`{"a":"` + strings.Repeat("x", 16<<20) + `"}`), "", false},
		{"before the head", post(hello), "", true},
		{"within the head", post(hello), "HTTP/1.1 200 OK\r\nContent-", true},
		{"after an interim response", post(hello), "HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", true},
		{"after the head", post(hello), chunkedHead, true},
		{"within a chunk", post(hello), chunkedHead + "5\r\nhel", true},
		{"within a fixed body", post(hello), "HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\nabc", true},
		{"within a body until close", post(hello), "HTTP/1.1 200 OK\r\n\r\nabc", true},
		{"with a pipelined request behind", post(hello) + post(hello), chunkedHead + chunk("x"), true},
		{"with the read buffer full", post(hello) + post(hello, "A: "+strings.Repeat("a", 9000)+"\r\n"), chunkedHead + chunk("x"), true},
	}
	for _, p := range phases {
		for how, leave := range leave {
			t.Run(p.name+" "+how, func(t *testing.T) {
				reached := make(chan struct{})
				left := make(chan time.Time, 1)
				noticed := make(chan time.Time, 1)
				e := newRawEngine(t, func(c *engineSide) {
					if p.read {
						c.request()
					} else {
						c.br.Peek(1)
					}
					io.WriteString(c, p.begin)
					close(reached)
					<-left
					c.SetReadDeadline(time.Now().Add(5 * time.Second))
					if _, err := io.Copy(io.Discard, c.br); !errors.Is(err, syscall.ECONNRESET) {
						t.Errorf("the engine's connection ends with %v", err)
					}
					noticed <- time.Now()
				})
				r := newRig(t, Limits{}, nil, e.url())
				c := r.dial()
				sent := make(chan struct{})
				go func() {
					defer close(sent)
					io.WriteString(c.TCPConn, p.request)
				}()
				<-reached
				if p.read {
					<-sent
				}
				time.Sleep(10 * time.Millisecond)
				leave(c)
				at := time.Now()
				left <- at
				limit := 100 * time.Millisecond
				if raceDetector {
					limit = 2 * time.Second // it is slow, and others run beside it
				}
				if d := (<-noticed).Sub(at); d > limit {
					t.Errorf("the engine's connection closed after %v", d)
				}
				c.Close()
				<-sent
			})
		}
	}
}

// TestStalledClient: a client that reads nothing is offered 64 MiB. What the
// agent holds for it stays small and the engine is blocked; when the client
// reads again it gets every byte.
func TestStalledClient(t *testing.T) {
	const total = 64 << 20
	sentSoFar := make(chan int, 1)
	data := bytes.Repeat([]byte("0123456789abcdef"), 4096)
	e := newRawEngine(t, func(c *engineSide) {
		if c.request() == nil {
			return
		}
		io.WriteString(c, chunkedHead)
		n, stalled := 0, false
		for n < total {
			c.SetWriteDeadline(time.Now().Add(500 * time.Millisecond))
			for out := []byte(chunk(string(data))); len(out) > 0; {
				k, err := c.Write(out)
				out = out[k:]
				if err != nil {
					if !stalled {
						stalled = true
						sentSoFar <- n
					}
					c.SetWriteDeadline(time.Now().Add(10 * time.Second))
				}
			}
			n += len(data)
		}
		if !stalled {
			sentSoFar <- n
		}
		io.WriteString(c, "0\r\n\r\n")
		c.request()
	})
	r := newRig(t, Limits{}, nil, e.url())
	c := r.dial()
	c.SetReadBuffer(64 << 10)
	c.send(post(hello))
	n := <-sentSoFar
	if n > 24<<20 {
		t.Errorf("the engine got rid of %d bytes", n)
	}
	if k := r.s.Datapath().Wakeups; k > 20_000 {
		t.Errorf("userspace woke %d times", k)
	}
	r.s.mu.Lock()
	for conn := range r.s.conns {
		conn.x.relay.mu.Lock()
		if k := cap(conn.x.relay.rest); k > 2*readSize {
			t.Errorf("%d bytes are held for it", k)
		}
		conn.x.relay.mu.Unlock()
	}
	r.s.mu.Unlock()
	_, body := c.answer()
	if len(body) != total || body != string(bytes.Repeat(data, total/len(data))) {
		t.Errorf("the client got %d bytes", len(body))
	}
}

// TestStallTimeout: a client that takes nothing for too long is cut off.
func TestStallTimeout(t *testing.T) {
	closed := make(chan time.Duration, 1)
	e := newRawEngine(t, func(c *engineSide) {
		if c.request() == nil {
			return
		}
		io.WriteString(c, chunkedHead)
		data := chunk(strings.Repeat("x", 60000))
		for {
			if _, err := io.WriteString(c, data); err != nil {
				closed <- 0
				return
			}
		}
	})
	r := newRig(t, Limits{StallTimeout: 200 * time.Millisecond}, nil, e.url())
	c := r.dial()
	c.send(post(hello))
	select {
	case <-closed:
	case <-time.After(5 * time.Second):
		t.Fatal("the engine's connection stays open")
	}
	if _, err := io.Copy(io.Discard, c.br); err == nil {
		t.Error("the cut answer ends like a whole one")
	}
}

// TestManyClientsLeave: a thousand streams whose clients leave in the middle.
func TestManyClientsLeave(t *testing.T) {
	e := newRawEngine(t, func(c *engineSide) {
		for c.request() != nil {
			io.WriteString(c, chunkedHead+chunk("x"))
			c.waitClosed()
			return
		}
	})
	r := newRig(t, Limits{}, nil, e.url())
	for range 10 {
		var clients []*client
		for range 100 {
			c := r.dial()
			c.send(post(hello))
			clients = append(clients, c)
		}
		for _, c := range clients {
			if _, err := c.br.Peek(1); err != nil {
				t.Fatal(err)
			}
			c.Close()
		}
	}
	eventually(t, 20*time.Second, "nothing is in flight", func() bool { return r.replicas[0].InFlight() == 0 })
}
