package proxy

import (
	"bytes"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// TestStaleConnection: the engine closes its idle connection just as it is
// used again. The request is sent once more, on a new one.
func TestStaleConnection(t *testing.T) {
	var requests atomic.Int64
	e := newRawEngine(t, func(c *engineSide) {
		if c.request() == nil {
			return
		}
		requests.Add(1)
		io.WriteString(c, fixed("ok"))
		// The next request arrives, and is answered by a close.
		c.br.Peek(1)
		if c.n%2 == 0 {
			c.SetLinger(0)
		}
	})
	r := newRig(t, Limits{}, nil, e.url())
	c := r.dial()
	for i := range 6 {
		c.send(post(hello))
		if resp, body := c.answer(); resp.StatusCode != 200 || body != "ok" {
			t.Fatalf("request %d: %d %q", i, resp.StatusCode, body)
		}
	}
	if n := r.s.Datapath().Replays; n != 5 {
		t.Errorf("%d replays", n)
	}
	if n := requests.Load(); n != 6 {
		t.Errorf("%d requests were answered", n)
	}
}

// TestReplayIsFree: a reused connection that dies before the first byte of a
// response does not count as an attempt; any other death does.
func TestReplayIsFree(t *testing.T) {
	f := func(name, second string, connections int) {
		t.Run(name, func(t *testing.T) {
			e := newRawEngine(t, func(c *engineSide) {
				if c.request() == nil {
					return
				}
				if c.n > 0 || second == "new" {
					return
				}
				io.WriteString(c, fixed("ok"))
				if c.request() != nil {
					io.WriteString(c, second)
				}
			})
			r := newRig(t, Limits{MaxAttempts: 2, Backoff: time.Millisecond}, nil, e.url())
			c := r.dial()
			if second != "new" {
				c.send(post(hello))
				c.answer()
			}
			c.send(post(hello))
			resp, body := c.answer()
			if resp.StatusCode != 502 || !strings.Contains(body, "BadGatewayError") {
				t.Errorf("got %d %s", resp.StatusCode, body)
			}
			if n := e.accepted(); n != connections {
				t.Errorf("%d connections", n)
			}
			// The client's connection goes on.
			c.send("GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
			if resp, _ := c.answer(); resp.StatusCode != 200 {
				t.Errorf("afterwards %d", resp.StatusCode)
			}
		})
	}
	f("new", "new", 2)
	f("nothing", "", 3)
	f("one byte", "H", 2)
	f("half a head", "HTTP/1.1 200 OK\r\n", 2)
	f("interim", "HTTP/1.1 103 Early Hints\r\n\r\n", 2)
}

// TestIdleConnections: one the engine closes, one with bytes nobody asked for,
// and one that has been idle too long are not used, nor kept open.
func TestIdleConnections(t *testing.T) {
	f := func(name string, limit time.Duration, idle func(c *engineSide)) {
		t.Run(name, func(t *testing.T) {
			closed := make(chan struct{}, 2)
			e := newRawEngine(t, func(c *engineSide) {
				if c.request() == nil {
					return
				}
				io.WriteString(c, fixed("ok"))
				idle(c)
				c.waitClosed()
				closed <- struct{}{}
			})
			r := newRig(t, Limits{UpstreamIdle: limit}, nil, e.url())
			c := r.dial()
			for range 2 {
				c.send(post(hello))
				if resp, body := c.answer(); resp.StatusCode != 200 || body != "ok" {
					t.Fatalf("got %d %q", resp.StatusCode, body)
				}
				select {
				case <-closed:
				case <-time.After(time.Second):
					t.Fatal("the connection stays open")
				}
			}
			if n := r.s.Datapath().Replays; n != 0 {
				t.Errorf("%d replays", n)
			}
		})
	}
	f("closed", time.Minute, func(c *engineSide) { c.CloseWrite() })
	f("unasked bytes", time.Minute, func(c *engineSide) { io.WriteString(c, "HTTP/1.1 408 x\r\n\r\n") })
	f("too long", 50*time.Millisecond, func(c *engineSide) {})
}

// TestEngineHeads: what the client is told when an engine's answer cannot be
// passed on.
func TestEngineHeads(t *testing.T) {
	f := func(name, response string, status int) {
		t.Run(name, func(t *testing.T) {
			e := newRawEngine(t, func(c *engineSide) {
				c.request()
				io.WriteString(c, response)
				c.CloseWrite()
				c.waitClosed()
			})
			r := newRig(t, Limits{}, nil, e.url())
			c := r.dial()
			c.send(post(hello))
			resp, body := c.answer()
			if resp.StatusCode != status || status == 502 && !strings.Contains(body, `"code":502`) {
				t.Errorf("got %d %q", resp.StatusCode, body)
			}
		})
	}
	f("nothing", "", 502)
	f("not HTTP", "SSH-2.0-OpenSSH\r\n\r\n", 502)
	f("too large", "HTTP/1.1 200 OK\r\nA: "+strings.Repeat("a", 70000)+"\r\n\r\n", 502)
	f("large", "HTTP/1.1 200 OK\r\nA: "+strings.Repeat("a", 40000)+"\r\nContent-Length: 0\r\n\r\n", 200)
	f("switching", "HTTP/1.1 101 Switching Protocols\r\n\r\n", 502)
	f("interim for ever", strings.Repeat("HTTP/1.1 102 Processing\r\n\r\n", 20), 502)
	f("interim", "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 200)
	f("bad chunk at once", chunkedHead+"xyz\r\n", 502)
	f("no body", "HTTP/1.1 204 No Content\r\n\r\n", 204)
	f("more than its length", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nabcd", 200)
	f("an error of its own", "HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\n\r\n{}", 429)
}

// TestEngineBreaks: an answer that breaks off must not pass for a whole one,
// whatever its framing.
func TestEngineBreaks(t *testing.T) {
	f := func(name, response string, reset bool, outcome string) {
		t.Run(name, func(t *testing.T) {
			e := newRawEngine(t, func(c *engineSide) {
				c.request()
				head, rest, _ := strings.Cut(response, "\r\n\r\n")
				io.WriteString(c, head+"\r\n\r\n")
				time.Sleep(20 * time.Millisecond)
				io.WriteString(c, rest)
				time.Sleep(20 * time.Millisecond)
				if reset {
					c.SetLinger(0)
				}
			})
			r := newRig(t, Limits{}, nil, e.url())
			c := r.dial()
			c.send(post(hello))
			// Either a reset, or a body without its end that tells why.
			all, err := io.ReadAll(c.br)
			_, told, _ := bytes.Cut(all, []byte(`data: {"error":{"message":"The engine's answer `))
			if whole := strings.HasSuffix(response, "\n\n\r\n"); whole != (told != nil) {
				t.Errorf("the client got %q", all)
			}
			if err == nil && (told == nil || bytes.Contains(all, []byte("\r\n0\r\n"))) {
				t.Errorf("the client got %q and a clean end", all)
			}
			eventually(t, 20*time.Second, "the failure is counted", func() bool { return r.outcome(outcome) == 1 })
		})
	}
	f("events, FIN", chunkedHead+chunk("data: x\n\n"), false, "engine_broke")
	f("half an event, FIN", chunkedHead+chunk("data: x\n"), false, "engine_broke")
	f("chunked, FIN", chunkedHead+chunk("x"), false, "engine_broke")
	f("chunked, RST", chunkedHead+chunk("x"), true, "engine_broke")
	f("within a chunk", chunkedHead+"5\r\nhel", false, "engine_broke")
	f("before the last CRLF", chunkedHead+"0\r\n", false, "engine_broke")
	f("fixed, FIN", "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", false, "engine_broke")
	f("fixed, RST", "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", true, "engine_broke")
	f("until close, RST", "HTTP/1.1 200 OK\r\n\r\nabc", true, "engine_broke")
	f("bad framing", chunkedHead+chunk("x")+"zzz", false, "engine_framing")
}

func TestUntilClose(t *testing.T) {
	e := newRawEngine(t, func(c *engineSide) {
		c.request()
		io.WriteString(c, "HTTP/1.0 200 OK\r\n\r\n")
		for range 3 {
			time.Sleep(5 * time.Millisecond)
			io.WriteString(c, "part")
		}
	})
	r := newRig(t, Limits{}, nil, e.url())
	c := r.dial()
	c.send(post(hello))
	if resp, body := c.answer(); body != "partpartpart" || !resp.Close {
		t.Errorf("got %q, close %v", body, resp.Close)
	}
	c.closed()
}

func TestConnecting(t *testing.T) {
	f := func(name, url string, limits Limits, status int, kind string) {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, limits, nil, url)
			c := r.dial()
			c.send(post(hello))
			began := time.Now()
			resp, body := c.answer()
			if resp.StatusCode != status || !strings.Contains(body, kind) {
				t.Errorf("got %d %s", resp.StatusCode, body)
			}
			if id := resp.Header.Get("X-Inferrail-Replica"); id != "e0" {
				t.Errorf("replica %q", id)
			}
			if d := time.Since(began); d > 2*time.Second {
				t.Errorf("after %v", d)
			}
		})
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	refused := l.Addr().String()
	l.Close()
	f("refused", "http://"+refused, Limits{}, 502, "BadGatewayError")
	f("no such name", "http://no-such-host.invalid:80", Limits{ConnectTimeout: time.Second}, 502, "BadGatewayError")

	// A listener whose queue is full answers no more SYNs.
	full := fullListener(t)
	f("no answer", "http://"+full, Limits{ConnectTimeout: 200 * time.Millisecond}, 504, "GatewayTimeoutError")

	t.Run("client leaves", func(t *testing.T) {
		r := newRig(t, Limits{}, nil, "http://"+full)
		c := r.dial()
		c.send(post(hello))
		eventually(t, 20*time.Second, "it is in flight", func() bool { return r.replicas[0].InFlight() == 1 })
		c.Close()
		eventually(t, 100*time.Millisecond, "the exchange ends", func() bool { return r.replicas[0].InFlight() == 0 })
	})

	t.Run("by name", func(t *testing.T) {
		e := newRawEngine(t, answering(fixed("ok")))
		_, port, _ := net.SplitHostPort(e.l.Addr().String())
		r := newRig(t, Limits{}, nil, "http://localhost:"+port)
		c := r.dial()
		c.send(post(hello))
		if resp, body := c.answer(); resp.StatusCode != 200 || body != "ok" {
			t.Errorf("got %d %q", resp.StatusCode, body)
		}
	})
}

func TestRequestTimeout(t *testing.T) {
	e := newRawEngine(t, func(c *engineSide) {
		c.request()
		io.WriteString(c, "HTTP/1.1 200")
		c.waitClosed()
	})
	r := newRig(t, Limits{RequestTimeout: 100 * time.Millisecond}, nil, e.url())
	c := r.dial()
	c.send(post(hello))
	if resp, body := c.answer(); resp.StatusCode != 504 || !strings.Contains(body, "GatewayTimeoutError") {
		t.Errorf("got %d %s", resp.StatusCode, body)
	}
	eventually(t, 20*time.Second, "it is counted", func() bool { return r.outcome("engine_timeout") == 1 })
}

// TestEarlyRefusal: an engine that answers before it has read a large body is
// heard, and its connection not used again.
func TestEarlyRefusal(t *testing.T) {
	e := newRawEngine(t, func(c *engineSide) {
		c.br.Peek(1)
		io.WriteString(c, "HTTP/1.1 413 Too Large\r\nContent-Length: 4\r\n\r\nlong")
		time.Sleep(100 * time.Millisecond)
	})
	r := newRig(t, Limits{}, nil, e.url())
	c := r.dial()
	for range 2 {
		c.send(post(`{"a":"` + strings.Repeat("x", 16<<20) + `"}`))
		if resp, body := c.answer(); resp.StatusCode != 413 || body != "long" {
			t.Errorf("got %d %q", resp.StatusCode, body)
		}
	}
	if n := e.accepted(); n != 2 {
		t.Errorf("%d connections", n)
	}
}

// TestDeadEngineIsIsolated: one engine that hangs takes nothing from requests
// to another.
func TestDeadEngineIsIsolated(t *testing.T) {
	hung := newRawEngine(t, func(c *engineSide) { c.waitClosed() })
	good := newRawEngine(t, answering(fixed("ok")))
	r := newRig(t, Limits{}, nil, hung.url(), good.url())
	// One request hangs; least in flight then takes the other engine.
	var stuck []*client
	for r.replicas[0].InFlight() == 0 {
		c := r.dial()
		c.send(post(hello))
		stuck = append(stuck, c)
		time.Sleep(5 * time.Millisecond)
	}
	c := r.dial()
	for range 100 {
		c.send(post(hello))
		if resp, _ := c.answer(); resp.StatusCode != 200 || resp.Header.Get("X-Inferrail-Replica") != "e1" {
			t.Fatalf("got %d from %s", resp.StatusCode, resp.Header.Get("X-Inferrail-Replica"))
		}
	}
	for _, c := range stuck {
		c.Close()
	}
}
