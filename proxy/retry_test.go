package proxy

import (
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/inferrail/inferrail/policy"
)

// inOrder is a policy that takes the first replica there is.
type inOrder struct{}

func (inOrder) Name() string { return "in_order" }

func (inOrder) Score(_ *policy.Request, candidates []policy.Candidate, costs []float64) float64 {
	for i := range candidates {
		costs[i] = float64(i)
	}
	return 0
}

// ordered makes the rig choose replicas in their order.
func (r *rig) ordered() *rig {
	m := *r.s.fleet.Load().Listed[0]
	m.Policy = inOrder{}
	r.s.SetFleet(&Fleet{Models: map[string]*Model{"m": &m, "alias": &m}, Listed: []*Model{&m}})
	return r
}

// refusing is a URL at which nobody listens.
func refusing(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return "http://" + l.Addr().String()
}

// status is a whole response that has a body.
func status(code int, text string) string {
	return fmt.Sprintf("HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n%s", code, len(text), text)
}

// TestRetry: whatever keeps one engine from answering, the client is answered
// by the next.
func TestRetry(t *testing.T) {
	f := func(name string, bad func(c *engineSide)) {
		t.Run(name, func(t *testing.T) {
			url := refusing(t)
			if bad != nil {
				url = newRawEngine(t, bad).url()
			}
			good := newRawEngine(t, answering(fixed("ok")))
			r := newRig(t, Limits{Backoff: time.Hour}, nil, url, good.url())
			var told atomic.Int64
			r.replicas[0].OnFailure = func(n int, cause error) {
				if cause == nil {
					t.Error("no cause is told")
				}
				told.Store(int64(n))
			}
			r.ordered()
			c := r.dial()
			for i := range 3 {
				c.send(post(hello))
				resp, body := c.answer()
				if resp.StatusCode != 200 || body != "ok" || resp.Header.Get("X-Inferrail-Replica") != "e1" {
					t.Fatalf("got %d %q from %s", resp.StatusCode, body, resp.Header.Get("X-Inferrail-Replica"))
				}
				if told.Load() != int64(i+1) {
					t.Errorf("after %d failures, %d in a row were told", i+1, told.Load())
				}
			}
			if a, b := r.replicas[0].Failures(), r.replicas[1].Failures(); a != 3 || b != 0 {
				t.Errorf("%d and %d failures in a row", a, b)
			}
			if n := r.retries(); n != 3 {
				t.Errorf("%d retries are counted", n)
			}
		})
	}
	f("nobody listens", nil)
	f("closes at once", func(*engineSide) {})
	f("resets at once", func(c *engineSide) { c.SetLinger(0) })
	f("closes after the request", func(c *engineSide) { c.request() })
	f("resets after the request", func(c *engineSide) { c.request(); c.SetLinger(0) })
	f("half a head", func(c *engineSide) { c.request(); io.WriteString(c, "HTTP/1.1 200 OK\r\nConte") })
	f("not HTTP", func(c *engineSide) { c.request(); io.WriteString(c, "SSH-2.0-x\r\n\r\n") })
	f("a head and no chunk", answering(chunkedHead+"not a size\r\n"))
	f("a head, a chunk and no other", answering(chunkedHead+chunk("data: 1\n\n")+"not a size\r\n"))
	f("502", answering(status(502, "{}")))
	f("503", answering(status(503, "{}")))
	f("504", answering(status(504, "{}")))
	// What vLLM's server answers once its engine process has gone.
	const dead = `{"error":{"message":"EngineCore encountered an issue. See stack trace (above) for the root cause.","type":"InternalServerError","param":null,"code":500}}`
	f("500 of a dead engine", answering(status(500, dead)))
	f("500 of an engine that ends", answering(status(500, `{"error":{"message":"cannot schedule new futures after shutdown","type":"InternalServerError","param":null,"code":500}}`)))
	f("500 of a dead engine, the body later", func(c *engineSide) {
		for c.request() != nil {
			head, body, _ := strings.Cut(status(500, dead), "\r\n\r\n")
			for _, piece := range []string{head + "\r\n\r\n", body[:40], body[40:]} {
				io.WriteString(c, piece)
				time.Sleep(5 * time.Millisecond)
			}
		}
	})
	f("500 that breaks off", func(c *engineSide) {
		c.request()
		io.WriteString(c, "HTTP/1.1 500 x\r\nContent-Length: 100\r\n\r\nno")
	})
	f("503 without an end", func(c *engineSide) {
		c.request()
		io.WriteString(c, "HTTP/1.1 503 x\r\n\r\nno")
		c.waitClosed()
	})
}

// TestNoRetry: what says something about the request is passed on as it is,
// and counts for the engine.
func TestNoRetry(t *testing.T) {
	f := func(code int, text string) {
		bad := newRawEngine(t, answering(status(code, text)))
		good := newRawEngine(t, answering(fixed("ok")))
		r := newRig(t, Limits{}, nil, bad.url(), good.url()).ordered()
		c := r.dial()
		c.send(post(hello))
		if resp, body := c.answer(); resp.StatusCode != code || body != text {
			t.Errorf("%d: got %d %.80q", code, resp.StatusCode, body)
		}
		if good.accepted() != 0 || r.replicas[0].Failures() != 0 {
			t.Errorf("%d: was taken for the engine's failure", code)
		}
	}
	for _, code := range []int{200, 400, 404, 422, 429, 500, 501} {
		f(code, "no")
	}
	f(500, "")
	f(500, strings.Repeat("no", 1<<16))
	f(500, `{"error":{"message":"What does 'EngineCore encountered an issue' mean?"}}`)
	f(400, `{"error":{"message":"EngineCore encountered an issue."}}`)
}

// TestAttemptsEnd: attempts are bounded, a lone replica is tried again after
// pauses that double, and its last answer is the client's.
func TestAttemptsEnd(t *testing.T) {
	t.Run("a lone replica", func(t *testing.T) {
		e := newRawEngine(t, answering(status(503, "busy")))
		r := newRig(t, Limits{MaxAttempts: 4, Backoff: 20 * time.Millisecond}, nil, e.url())
		c := r.dial()
		began := time.Now()
		c.send(post(hello))
		if resp, body := c.answer(); resp.StatusCode != 503 || body != "busy" {
			t.Errorf("got %d %q", resp.StatusCode, body)
		}
		// Half of 20, 40 and 80 ms at least.
		if d := time.Since(began); d < 70*time.Millisecond {
			t.Errorf("four attempts took %v", d)
		}
		if e.accepted() != 4 || r.retries() != 3 {
			t.Errorf("%d connections, %d retries", e.accepted(), r.retries())
		}
	})
	t.Run("all fail", func(t *testing.T) {
		r := newRig(t, Limits{Backoff: time.Millisecond}, nil, refusing(t), refusing(t), refusing(t))
		c := r.dial()
		c.send(post(hello))
		if resp, body := c.answer(); resp.StatusCode != 502 || !strings.Contains(body, "BadGatewayError") {
			t.Errorf("got %d %q", resp.StatusCode, body)
		}
		for _, replica := range r.replicas {
			if replica.Failures() != 1 {
				t.Errorf("%s was tried %d times", replica.ID, replica.Failures())
			}
		}
	})
	t.Run("the deadline", func(t *testing.T) {
		r := newRig(t, Limits{MaxAttempts: 9, Backoff: 200 * time.Millisecond, RequestTimeout: 300 * time.Millisecond}, nil, refusing(t))
		c := r.dial()
		began := time.Now()
		c.send(post(hello))
		if resp, _ := c.answer(); resp.StatusCode != 502 {
			t.Errorf("got %d", resp.StatusCode)
		}
		if d := time.Since(began); d > 2*time.Second {
			t.Errorf("took %v", d)
		}
	})
	t.Run("the client leaves in a pause", func(t *testing.T) {
		r := newRig(t, Limits{Backoff: time.Minute}, nil, refusing(t))
		c := r.dial()
		c.send(post(hello))
		eventually(t, 20*time.Second, "it pauses", func() bool { return r.retries() == 1 })
		c.Close()
		eventually(t, 20*time.Second, "it ends", func() bool { return r.outcome("client_left") == 1 })
	})
}

// TestEvacuation: when a replica fails its health check, the requests that
// wait there for a first byte go to another; those that have one stay, and so
// do those that have nowhere to go.
func TestEvacuation(t *testing.T) {
	hold := make(chan struct{})
	hung := newRawEngine(t, func(c *engineSide) {
		if req := c.request(); req != nil && req.Header.Get("Want") == "stream" {
			io.WriteString(c, chunkedHead+chunk("begun"))
			<-hold
			io.WriteString(c, chunk("done")+"0\r\n\r\n")
			return
		}
		c.waitClosed()
	})
	good := newRawEngine(t, answering(fixed("ok")))
	r := newRig(t, Limits{}, nil, hung.url(), good.url()).ordered()
	stream := r.dial()
	stream.send(post(hello, "Want: stream\r\n"))
	var waiting []*client
	for range 5 {
		c := r.dial()
		c.send(post(hello))
		waiting = append(waiting, c)
	}
	eventually(t, 20*time.Second, "all are there", func() bool { return hung.accepted() == 6 })

	fleet := r.s.fleet.Load()
	alone := *fleet.Listed[0]
	alone.Replicas = alone.Replicas[:1]
	r.s.SetFleet(&Fleet{Models: map[string]*Model{"m": &alone}, Listed: []*Model{&alone}})
	r.replicas[0].Evacuate()
	time.Sleep(20 * time.Millisecond)
	if n := r.replicas[0].InFlight(); n != 6 {
		t.Fatalf("%d of 6 stay where there is no other place", n)
	}
	r.s.SetFleet(fleet)
	r.replicas[0].Evacuate()
	for _, c := range waiting {
		if resp, body := c.answer(); resp.StatusCode != 200 || body != "ok" {
			t.Errorf("got %d %q", resp.StatusCode, body)
		}
	}
	close(hold)
	if resp, body := stream.answer(); resp.StatusCode != 200 || body != "begundone" {
		t.Errorf("the stream: %d %q", resp.StatusCode, body)
	}
}

// TestPlaces: as many requests as a replica may have are sent, as many as may
// wait do, the next is refused at once, and a free place goes to the first in
// line.
func TestPlaces(t *testing.T) {
	release := make(chan struct{})
	e := newRawEngine(t, func(c *engineSide) {
		for c.request() != nil {
			<-release
			io.WriteString(c, fixed("ok"))
		}
	})
	r := newRig(t, Limits{}, nil, e.url())
	r.replicas[0].SetBounds(2, 3)
	var clients []*client
	for i := range 5 {
		c := r.dial()
		c.send(post(hello))
		clients = append(clients, c)
		eventually(t, 20*time.Second, "it has its place", func() bool {
			return r.replicas[0].InFlight() == min(i+1, 2) && r.replicas[0].Pending() == max(i-1, 0)
		})
	}
	one := r.dial()
	one.send(post(hello))
	if resp, body := one.answer(); resp.StatusCode != 503 || resp.Header.Get("Retry-After") == "" || !strings.Contains(body, "as many requests as it may") {
		t.Errorf("one too many: %d %q", resp.StatusCode, body)
	}
	clients[3].Close() // gives up its place in line
	eventually(t, 20*time.Second, "its place is free", func() bool { return r.replicas[0].Pending() == 2 })
	close(release)
	for _, i := range []int{0, 1, 2, 4} {
		if resp, body := clients[i].answer(); resp.StatusCode != 200 || body != "ok" {
			t.Errorf("client %d: %d %q", i, resp.StatusCode, body)
		}
	}
	if n := e.accepted(); n > 2 {
		t.Errorf("the engine saw %d connections", n)
	}
}

// TestManyAttempts: however many attempts there may be, the pauses between them
// stay pauses.
func TestManyAttempts(t *testing.T) {
	var urls []string
	for range 45 {
		urls = append(urls, refusing(t))
	}
	r := newRig(t, Limits{MaxAttempts: 100, Backoff: 20 * time.Millisecond}, nil, urls...)
	c := r.dial()
	c.send(post(hello))
	if resp, _ := c.answer(); resp.StatusCode != 502 {
		t.Errorf("got %d", resp.StatusCode)
	}
	if n := r.retries(); n != 99 {
		t.Errorf("%d retries", n)
	}
}

// TestNoTimeLeft: a replica that a request reaches when its time is over is not
// asked, and not blamed.
func TestNoTimeLeft(t *testing.T) {
	good := newRawEngine(t, answering(fixed("ok")))
	r := newRig(t, Limits{RequestTimeout: 200 * time.Millisecond}, nil, "http://"+fullListener(t), good.url()).ordered()
	c := r.dial()
	c.send(post(hello))
	if resp, _ := c.answer(); resp.StatusCode != 504 {
		t.Errorf("got %d", resp.StatusCode)
	}
	if n := r.replicas[1].Failures(); n != 0 || good.accepted() != 0 {
		t.Errorf("the other replica has %d failures and %d connections", n, good.accepted())
	}
}

// TestEngineSpeaksEarly: what an engine says while it is still being sent the
// request.
func TestEngineSpeaksEarly(t *testing.T) {
	large := post(`{"model":"m","a":"` + strings.Repeat("x", 16<<20) + `"}`)
	f := func(name, want string, status int, serve func(c *engineSide, answered chan struct{})) {
		t.Run(name, func(t *testing.T) {
			answered := make(chan struct{})
			e := newRawEngine(t, func(c *engineSide) { serve(c, answered) })
			r := newRig(t, Limits{RequestTimeout: 5 * time.Second, MaxAttempts: 1}, nil, e.url())
			c := r.dial()
			go io.WriteString(c.TCPConn, large)
			resp, body := c.answer()
			close(answered)
			if resp.StatusCode != status || !strings.Contains(body, want) {
				t.Errorf("got %d %q", resp.StatusCode, body)
			}
		})
	}
	f("an interim response", "ok", 200, func(c *engineSide, _ chan struct{}) {
		c.br.Peek(1)
		io.WriteString(c, "HTTP/1.1 102 Processing\r\n\r\n")
		if c.request() != nil {
			io.WriteString(c, fixed("ok"))
		}
		c.waitClosed()
	})
	f("interim responses in pieces", "ok", 200, func(c *engineSide, _ chan struct{}) {
		c.br.Peek(1)
		io.WriteString(c, "HTTP/1.1 102 Processing\r\n")
		time.Sleep(10 * time.Millisecond)
		io.WriteString(c, "\r\nHTTP/1.1 100 Continue\r\n\r\n")
		if c.request() != nil {
			io.WriteString(c, fixed("ok"))
		}
		c.waitClosed()
	})
	f("a refusal", "too much", 413, func(c *engineSide, _ chan struct{}) {
		c.br.Peek(1)
		io.WriteString(c, status(413, "too much"))
		c.waitClosed()
	})
	f("its end, though it does not close", "closed the connection", 502, func(c *engineSide, answered chan struct{}) {
		c.br.Peek(1)
		c.CloseWrite()
		<-answered
	})
}

// TestFailsOnce: an answer that tells a failure and breaks off as well is one
// failure.
func TestFailsOnce(t *testing.T) {
	e := newRawEngine(t, func(c *engineSide) {
		c.request()
		io.WriteString(c, "HTTP/1.1 503 x\r\nContent-Length: 9\r\n\r\nno")
	})
	r := newRig(t, Limits{MaxAttempts: 1}, nil, e.url())
	c := r.dial()
	c.send(post(hello))
	io.Copy(io.Discard, c.br)
	eventually(t, 20*time.Second, "it is over", func() bool { return r.outcome("engine_broke") == 1 })
	if n := r.replicas[0].Failures(); n != 1 {
		t.Errorf("%d failures are counted", n)
	}
}

// TestEvacuationToOneThatFailed: a request that failed at one replica and waits
// at another, which goes down, returns to the first.
func TestEvacuationToOneThatFailed(t *testing.T) {
	var asked atomic.Int64
	flaky := newRawEngine(t, func(c *engineSide) {
		for c.request() != nil {
			if asked.Add(1) == 1 {
				io.WriteString(c, status(503, "busy"))
			} else {
				io.WriteString(c, fixed("ok"))
			}
		}
	})
	hung := newRawEngine(t, func(c *engineSide) {
		c.request()
		c.waitClosed()
	})
	r := newRig(t, Limits{Backoff: time.Millisecond}, nil, flaky.url(), hung.url()).ordered()
	c := r.dial()
	c.send(post(hello))
	eventually(t, 20*time.Second, "it waits at the other", func() bool { return hung.accepted() == 1 && r.replicas[1].InFlight() == 1 })
	r.replicas[1].Evacuate()
	if resp, body := c.answer(); resp.StatusCode != 200 || body != "ok" {
		t.Errorf("got %d %q", resp.StatusCode, body)
	}
}

// TestStatus500SaysNothing: it is passed on, and neither accuses the engine nor
// acquits it of earlier failures.
func TestStatus500SaysNothing(t *testing.T) {
	e := newRawEngine(t, answering(status(500, "no")))
	r := newRig(t, Limits{}, nil, e.url())
	r.replicas[0].failures.Store(2)
	c := r.dial()
	c.send(post(hello))
	if resp, body := c.answer(); resp.StatusCode != 500 || body != "no" {
		t.Errorf("got %d %q", resp.StatusCode, body)
	}
	eventually(t, 20*time.Second, "it is over", func() bool { return r.replicas[0].InFlight() == 0 })
	if n := r.replicas[0].Failures(); n != 2 {
		t.Errorf("%d failures in a row", n)
	}
}

// TestDepartedModelsAreForgotten: adapters that come and go leave no series.
func TestDepartedModelsAreForgotten(t *testing.T) {
	e := newRawEngine(t, answering(fixed("ok")))
	r := newRig(t, Limits{}, nil, e.url())
	c := r.dial()
	c.send(post(hello))
	c.answer()
	series := func() float64 {
		return counted(r.s.stats.requests, func(name, value string) bool { return name == "model" && value == "m" })
	}
	eventually(t, 20*time.Second, "it is counted", func() bool { return series() == 1 })
	r.s.SetFleet(&Fleet{})
	if series() != 0 {
		t.Error("the model that has left is still counted")
	}
}
