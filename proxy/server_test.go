package proxy

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"
)

func TestOneRequest(t *testing.T) {
	got := make(chan *http.Request, 10)
	e := newRawEngine(t, func(c *engineSide) {
		for {
			req := c.request()
			if req == nil {
				return
			}
			got <- req
			io.WriteString(c, fixed(`{"ok":true}`))
		}
	})
	r := newRig(t, Limits{}, nil, e.url())
	c := r.dial()
	for range 3 {
		c.send(post(hello, "X-Request-Id: me-1\r\n", "Authorization: Bearer k\r\n", "Connection: keep-alive\r\n"))
		resp, body := c.answer()
		if resp.StatusCode != 200 || body != `{"ok":true}` {
			t.Fatalf("got %d %q", resp.StatusCode, body)
		}
		if id := resp.Header.Get("x-request-id"); id != "me-1" {
			t.Errorf("x-request-id is %q", id)
		}
		if id := resp.Header.Get("x-inferrail-replica"); id != "e0" {
			t.Errorf("x-inferrail-replica is %q", id)
		}
		req := <-got
		sent, _ := io.ReadAll(req.Body)
		if string(sent) != hello || req.Host != e.l.Addr().String() || req.URL.Path != "/v1/chat/completions" ||
			req.Header.Get("X-Request-Id") != "me-1" || req.Header.Get("Authorization") != "Bearer k" || req.Header.Get("Connection") != "" {
			t.Errorf("the engine got %+v %q", req, sent)
		}
	}
	if n := e.accepted(); n != 1 {
		t.Errorf("three requests used %d engine connections", n)
	}
}

func TestRequestIDIsMade(t *testing.T) {
	e := newRawEngine(t, func(c *engineSide) {
		for {
			req := c.request()
			if req == nil {
				return
			}
			io.WriteString(c, fixed(req.Header.Get("X-Request-Id")))
		}
	})
	r := newRig(t, Limits{}, nil, e.url())
	c := r.dial()
	seen := map[string]bool{}
	for range 3 {
		c.send(post(hello, "X-Request-Id: not/well formed\r\n"))
		resp, body := c.answer()
		id := resp.Header.Get("x-request-id")
		if id != body || len(id) != 32 || seen[id] {
			t.Errorf("the engine got %q, the client %q", body, id)
		}
		seen[id] = true
	}
}

func TestAliasIsRewritten(t *testing.T) {
	e := newRawEngine(t, func(c *engineSide) {
		for {
			req := c.request()
			if req == nil {
				return
			}
			body, _ := io.ReadAll(req.Body)
			io.WriteString(c, fixed(string(body)))
		}
	})
	r := newRig(t, Limits{}, nil, e.url())
	c := r.dial()
	f := func(in, want string) {
		t.Helper()
		c.send(post(in))
		if resp, got := c.answer(); resp.StatusCode != 200 || got != want {
			t.Errorf("%s: the engine got %s", in, got)
		}
	}
	f(`{"model":"m","x": 1 }`, `{"model":"m","x": 1 }`)
	f(`{"a":[ ], "model" : "alias" ,"x": 1 }`, `{"a":[ ], "model" : "m" ,"x": 1 }`)
	f(`{"model":"\u0061lias"}`, `{"model":"m"}`)
	f(`{"model":"alias","model":"alias"}`, `{"model":"alias","model":"m"}`)
	f(`{"x":1}`, `{"x":1}`)
	f(`{"model":null}`, `{"model":null}`)
	f(`{"model":""}`, `{"model":""}`)
}

// TestRefusals: what is answered without an engine. After a request that was
// read the connection goes on, after one that could not be read it closes.
func TestRefusals(t *testing.T) {
	r := newRig(t, Limits{MaxBodyBytes: 1000, MaxHeadBytes: 8192, HeadTimeout: time.Second}, nil)
	f := func(request string, status int, kind, field string, goesOn bool) {
		t.Helper()
		c := r.dial()
		c.send(request)
		resp, body := c.answerTo(strings.SplitN(request, " ", 2)[0])
		if resp.StatusCode != status || !strings.Contains(body, kind) {
			t.Errorf("%.80q: got %d %s, want %d %s", request, resp.StatusCode, body, status, kind)
		}
		if status >= 400 && resp.ContentLength > 0 && !strings.HasPrefix(request, "HEAD") && !strings.Contains(body, fmt.Sprintf(`"code":%d`, status)) {
			t.Errorf("%.80q: the error body is %s", request, body)
		}
		if name, value, ok := strings.Cut(field, ": "); ok && resp.Header.Get(name) != value {
			t.Errorf("%.80q: %s is %q", request, name, resp.Header.Get(name))
		}
		if resp.Header.Get("X-Request-Id") == "" {
			t.Errorf("%.80q: no request id", request)
		}
		if resp.Close == goesOn {
			t.Errorf("%.80q: close is %v", request, resp.Close)
		}
		if !goesOn {
			c.closed()
			return
		}
		c.send("GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
		if resp, _ := c.answer(); resp.StatusCode != 200 {
			t.Errorf("%.80q: afterwards %d", request, resp.StatusCode)
		}
	}
	get := func(line string) string { return line + " HTTP/1.1\r\nHost: x\r\n\r\n" }

	f(get("GET /"), 404, "NotFoundError", "", true)
	f(get("GET /v1/models/"), 404, "NotFoundError", "", true)
	f(get("GET /v1/chat/completions"), 405, "MethodNotAllowedError", "Allow: POST, OPTIONS", true)
	f(get("GET /v1/audio/translations"), 405, "MethodNotAllowedError", "Allow: POST, OPTIONS", true)
	f(get("DELETE /v1/models"), 405, "MethodNotAllowedError", "Allow: GET, HEAD, OPTIONS", true)
	f(get("DELETE /v1/models/m"), 405, "MethodNotAllowedError", "Allow: GET, HEAD, OPTIONS", true)
	f(get("HEAD /v1/completions"), 405, "", "Allow: POST, OPTIONS", true)
	f(get("OPTIONS /v1/completions"), 204, "", "Allow: POST, OPTIONS", true)
	f(get("OPTIONS /v1/nothing"), 404, "NotFoundError", "", true)
	f(get("OPTIONS *"), 204, "", "", true)
	f(get("GET /v1/models/m"), 200, `"id":"m","object":"model"`, "Content-Type: application/json", true)
	f(get("GET /v1/models/%6D"), 200, `"id":"m","object":"model"`, "", true)
	f(get("GET /v1/models/alias"), 200, `"id":"alias"`, "", true)
	f(get("GET /v1/models/other"), 404, "The model `other` does not exist.", "", true)
	f(get("GET /v1/models/%zz"), 404, "NotFoundError", "", true)
	f(get("GET /health"), 200, "", "", true)
	f(get("HEAD /health"), 200, "", "", true)
	f(get("GET /v1/models?x=y"), 200, `"id":"alias"`, "Content-Type: application/json", true)
	f(get("GET http://any/v1/models"), 200, `"id":"m"`, "", true)
	f(get("HEAD /v1/models"), 200, "", "", true)
	f("GET /health HTTP/1.0\r\n\r\n", 200, "", "", false)
	f("GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 200, "", "", false)
	f("\r\n\r\n"+get("GET /health"), 200, "", "", true)

	f(post(``), 400, "BadRequestError", "", true)
	f(post(`[]`), 400, "BadRequestError", "", true)
	f(post(`{"model":"m"`), 400, "at byte 12", "", true)
	f(post(`{"model":7}`), 400, `"param":"model"`, "", true)
	f(post(`{"model":"nope"}`), 404, "The model `nope` does not exist.", "", true)
	f(post(`{"model":"m"}`), 503, "ServiceUnavailableError", "Retry-After: 1", true)

	f("GET /health HTTP/1.1\r\n\r\n", 400, "BadRequestError", "", false)
	f("GET /health HTTP/2.0\r\nHost: x\r\n\r\n", 400, "Only HTTP/1.1 and HTTP/1.0", "", false)
	f("PRI * HTTP/2.0\r\n\r\n", 400, "BadRequestError", "", false)
	f("GET /health\r\n\r\n", 400, "BadRequestError", "", false)
	f("\x16\x03\x01\x02", 400, "this is not HTTP", "", false)
	f("GET /health HTTP/1.1\nHost: x\n\n", 400, "CRLF", "", false)
	f("GET /health HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n", 400, "folded", "", false)
	f("GET /health HTTP/1.1\r\nHost: x\r\nA : b\r\n\r\n", 400, "BadRequestError", "", false)
	f("GET /health HTTP/1.1\r\nHost: x\r\nA: b\x00\r\n\r\n", 400, "BadRequestError", "", false)
	f("GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400, "BadRequestError", "", false)
	f("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\n{}", 400, "BadRequestError", "", false)
	f("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, "more than once", "", false)
	f("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -2\r\n\r\n", 400, "BadRequestError", "", false)
	f("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2x\r\n\r\n", 400, "BadRequestError", "", false)
	f("POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 400, "BadRequestError", "", false)
	f("POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "BadRequestError", "", false)
	f("POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}xx", 400, "BadRequestError", "", false)
	f("POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 200-ok\r\n\r\n", 417, "ExpectationFailedError", "", false)

	f("GET /health HTTP/1.1\r\nHost: x\r\nA: "+strings.Repeat("b", 9000)+"\r\n\r\n", 431, "RequestHeaderFieldsTooLargeError", "", false)
	f("GET /"+strings.Repeat("b", 9000), 431, "RequestHeaderFieldsTooLargeError", "", false)
	f("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n"+strings.Repeat(" ", 1001), 413, "at most 1000", "", false)
	f("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\nExpect: 100-continue\r\n\r\n", 413, "at most 1000", "", false)
	f("POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3e9\r\n"+strings.Repeat(" ", 1001), 413, "too large", "", false)
}

func TestLargeHeadIsTaken(t *testing.T) {
	e := newRawEngine(t, answering(fixed("ok")))
	r := newRig(t, Limits{}, nil, e.url())
	c := r.dial()
	for range 3 {
		c.send(post(hello, "A: "+strings.Repeat("a", 7000)+"\r\n", "B: "+strings.Repeat("b", 7000)+"\r\n"))
		if resp, body := c.answer(); resp.StatusCode != 200 || body != "ok" {
			t.Fatalf("got %d %q", resp.StatusCode, body)
		}
	}
}

func TestChunkedRequest(t *testing.T) {
	lengths := make(chan int64, 4)
	e := newRawEngine(t, func(c *engineSide) {
		for {
			req := c.request()
			if req == nil {
				return
			}
			lengths <- req.ContentLength
			body, _ := io.ReadAll(req.Body)
			io.WriteString(c, fixed(string(body)))
		}
	})
	r := newRig(t, Limits{}, nil, e.url())
	c := r.dial()
	for range 2 {
		c.send("POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b\r\n{\"mod\r\n")
		c.send("8\r\nel\":\"m\"}\r\n0\r\nTrailer-Field: x\r\n\r\n")
		if _, body := c.answer(); body != `{"model":"m"}` {
			t.Errorf("the engine got %q", body)
		}
		if n := <-lengths; n != int64(len(`{"model":"m"}`)) {
			t.Errorf("with length %d", n)
		}
	}
}

func TestContinue(t *testing.T) {
	e := newRawEngine(t, answering(fixed("ok")))
	r := newRig(t, Limits{}, nil, e.url())
	c := r.dial()
	for _, expect := range []string{"Expect: 100-continue\r\n", "expect: 100-Continue\r\n"} {
		request := post(hello, expect)
		head, body, _ := strings.Cut(request, "\r\n\r\n")
		c.send(head + "\r\n\r\n")
		line, err := c.br.ReadString('\n')
		if err != nil || line != "HTTP/1.1 100 Continue\r\n" {
			t.Fatalf("got %q %v", line, err)
		}
		c.br.ReadString('\n')
		c.send(body)
		if resp, body := c.answer(); resp.StatusCode != 200 || body != "ok" {
			t.Fatalf("got %d %q", resp.StatusCode, body)
		}
	}
}

func TestPipelining(t *testing.T) {
	e := newRawEngine(t, func(c *engineSide) {
		for {
			req := c.request()
			if req == nil {
				return
			}
			id := req.Header.Get("X-Request-Id")
			io.WriteString(c, chunkedHead)
			time.Sleep(5 * time.Millisecond)
			io.WriteString(c, chunk(id)+"0\r\n\r\n")
		}
	})
	r := newRig(t, Limits{}, nil, e.url())
	f := func(n, size int) {
		t.Helper()
		c := r.dial()
		var all strings.Builder
		for i := range n {
			all.WriteString(post(hello, fmt.Sprintf("X-Request-Id: %d\r\n", i), "A: "+strings.Repeat("a", size)+"\r\n"))
		}
		go io.WriteString(c.TCPConn, all.String())
		for i := range n {
			if resp, body := c.answer(); resp.StatusCode != 200 || body != fmt.Sprint(i) {
				t.Fatalf("answer %d of %d is %d %q", i, n, resp.StatusCode, body)
			}
		}
	}
	f(5, 10)
	// More than the read buffer holds, so that it is full while a response is
	// waited for.
	f(20, 3000)
}

func TestHTTP10(t *testing.T) {
	e := newRawEngine(t, func(c *engineSide) {
		for {
			req := c.request()
			if req == nil {
				return
			}
			if req.Header.Get("Want") == "fixed" {
				io.WriteString(c, fixed("ok"))
				continue
			}
			io.WriteString(c, chunkedHead)
			for range 3 {
				time.Sleep(2 * time.Millisecond)
				io.WriteString(c, "5;x\r\nhel")
				time.Sleep(2 * time.Millisecond)
				io.WriteString(c, "lo\r\n")
			}
			io.WriteString(c, "0\r\nA: b\r\n\r\n")
		}
	})
	r := newRig(t, Limits{}, nil, e.url())
	request := func(fields string) string {
		return fmt.Sprintf("POST /v1/completions HTTP/1.0\r\nContent-Length: 2\r\n%s\r\n{}", fields)
	}
	c := r.dial()
	c.send(request("Connection: keep-alive\r\nWant: fixed\r\n"))
	if resp, body := c.answer(); body != "ok" || resp.Header.Get("Connection") != "keep-alive" {
		t.Errorf("got %q, Connection %q", body, resp.Header.Get("Connection"))
	}
	// A chunked answer reaches it decoded, ended by the connection's end.
	c.send(request("Connection: keep-alive\r\n"))
	all, err := io.ReadAll(c.br)
	if err != nil {
		t.Fatal(err)
	}
	head, body, _ := strings.Cut(string(all), "\r\n\r\n")
	if body != "hellohellohello" || strings.Contains(head, "chunked") || !strings.Contains(head, "\r\nConnection: close") {
		t.Errorf("got %q", all)
	}
}

func TestDeadlines(t *testing.T) {
	limits := Limits{IdleTimeout: 150 * time.Millisecond, HeadTimeout: 150 * time.Millisecond, BodyTimeout: 150 * time.Millisecond}
	e := newRawEngine(t, answering(fixed("ok")))
	r := newRig(t, limits, nil, e.url())
	// drip sends the text byte by byte: progress extends nothing.
	drip := func(c *client, text string) {
		go func() {
			for i := range len(text) {
				if _, err := io.WriteString(c.TCPConn, text[i:i+1]); err != nil {
					return
				}
				time.Sleep(20 * time.Millisecond)
			}
		}()
	}
	took := func(began time.Time) {
		t.Helper()
		if d := time.Since(began); d < 100*time.Millisecond || d > time.Second {
			t.Errorf("after %v", d)
		}
	}

	c, began := r.dial(), time.Now()
	c.closed()
	took(began)

	c = r.dial()
	c.send(post(hello))
	c.answer()
	began = time.Now()
	c.closed()
	took(began)

	c, began = r.dial(), time.Now()
	drip(c, post(hello))
	if resp, _ := c.answer(); resp.StatusCode != 408 || !resp.Close {
		t.Errorf("got %d", resp.StatusCode)
	}
	took(began)

	for _, head := range []string{"Content-Length: 1000", "Transfer-Encoding: chunked"} {
		c, began = r.dial(), time.Now()
		c.send("POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + head + "\r\n\r\n")
		drip(c, "3e8\r\n"+strings.Repeat(" ", 100))
		if resp, _ := c.answer(); resp.StatusCode != 408 || !resp.Close {
			t.Errorf("got %d", resp.StatusCode)
		}
		took(began)
	}
}

func TestChunkSize(t *testing.T) {
	f := func(line string, size int64, ok bool) {
		t.Helper()
		if got, gotOK := chunkSize([]byte(line)); gotOK != ok || ok && got != size {
			t.Errorf("%q: %d %v", line, got, gotOK)
		}
	}
	f("0", 0, true)
	f("1fF", 0x1ff, true)
	f("000a", 10, true)
	f("5;a=b", 5, true)
	f("5 ", 5, true)
	f("5\t;a", 5, true)
	f("", 0, false)
	f(";a", 0, false)
	f(" 5", 0, false)
	f("5x", 0, false)
	f("5 5", 0, false)
	f("0x5", 0, false)
	f("-5", 0, false)
	f("+5", 0, false)
	f("ffffffffffffffff", 0, false)
	f("7fffffffffffffff", 0, false)
}

// TestAnnouncedBodiesCostNothing: memory is taken for what arrives.
func TestAnnouncedBodiesCostNothing(t *testing.T) {
	r := newRig(t, Limits{}, nil)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for _, head := range []string{"Content-Length: 60000000\r\n\r\n", "Transfer-Encoding: chunked\r\n\r\n3938700\r\n"} {
		for range 20 {
			r.dial().send("POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + head + "{")
		}
	}
	eventually(t, 20*time.Second, "all have begun", func() bool { return r.s.Datapath().Running == 40 })
	time.Sleep(10 * time.Millisecond)
	runtime.ReadMemStats(&after)
	if grown := int64(after.TotalAlloc) - int64(before.TotalAlloc); grown > 40<<20 {
		t.Errorf("40 announced bodies cost %d MiB", grown>>20)
	}
	r.shutdown(0)
}

// TestShutdown: idle connections close at once, running exchanges finish and
// say that the connection closes, nothing new is taken.
func TestShutdown(t *testing.T) {
	goOn := make(chan struct{})
	e := newRawEngine(t, func(c *engineSide) {
		for c.request() != nil {
			if c.n == 0 {
				io.WriteString(c, chunkedHead+chunk("begun"))
				<-goOn
				io.WriteString(c, chunk("done")+"0\r\n\r\n")
				continue
			}
			<-goOn
			io.WriteString(c, fixed("late"))
		}
	})
	r := newRig(t, Limits{}, nil, e.url())
	idle, streaming, waiting := r.dial(), r.dial(), r.dial()
	idle.send("GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
	idle.answer()
	streaming.send(post(hello))
	if _, err := streaming.br.Peek(1); err != nil {
		t.Fatal(err)
	}
	waiting.send(post(hello))
	eventually(t, 20*time.Second, "both requests are at the engine", func() bool { return e.accepted() == 2 })

	down := make(chan error, 1)
	go func() { down <- r.shutdown(10 * time.Second) }()
	idle.closed()
	if c, err := net.Dial("tcp", r.addr); err == nil {
		c.Close()
		t.Error("a connection is accepted")
	}
	select {
	case err := <-down:
		t.Fatalf("Shutdown returned early: %v", err)
	default:
	}
	close(goOn)
	if _, body := streaming.answer(); body != "begundone" {
		t.Errorf("the stream is %q", body)
	}
	if resp, body := waiting.answer(); body != "late" || !resp.Close {
		t.Errorf("got %q, close %v", body, resp.Close)
	}
	streaming.closed()
	waiting.closed()
	if err := <-down; err != nil {
		t.Errorf("Shutdown: %v", err)
	}
}

// TestShutdownCuts: when the time for finishing has passed, whatever phase an
// exchange is in ends, and Shutdown returns.
func TestShutdownCuts(t *testing.T) {
	hold := make(chan struct{})
	defer close(hold)
	e := newRawEngine(t, func(c *engineSide) {
		req := c.request()
		if req != nil && req.Header.Get("Want") == "stream" {
			io.WriteString(c, chunkedHead+chunk("begun"))
		}
		<-hold
	})
	r := newRig(t, Limits{}, nil, e.url())
	var clients []*client
	for _, request := range []string{
		"POST /v1/comp",
		"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{",
		post(hello),
		post(hello, "Want: stream\r\n"),
	} {
		c := r.dial()
		c.send(request)
		clients = append(clients, c)
	}
	eventually(t, 20*time.Second, "all have begun", func() bool { return e.accepted() == 2 && r.s.Datapath().Running == 4 })
	began := time.Now()
	if err := r.shutdown(50 * time.Millisecond); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Shutdown: %v", err)
	}
	if d := time.Since(began); d > time.Second {
		t.Errorf("Shutdown took %v", d)
	}
	for i, c := range clients {
		resp, err := http.ReadResponse(c.br, nil)
		if err != nil {
			t.Errorf("client %d was told nothing: %v", i, err)
			continue
		}
		_, err = io.ReadAll(resp.Body)
		begun := i == len(clients)-1
		if begun && (resp.StatusCode != 200 || err == nil) || !begun && (resp.StatusCode != 503 || err != nil) {
			t.Errorf("client %d was told %d, %v", i, resp.StatusCode, err)
		}
	}
}

// TestLastAnswerIsNotLost: bytes the client has sent beyond its last request
// must not turn the close into a reset that takes the answer away.
func TestLastAnswerIsNotLost(t *testing.T) {
	e := newRawEngine(t, answering(fixed(strings.Repeat("x", 200_000))))
	r := newRig(t, Limits{}, nil, e.url())
	for range 20 {
		c := r.dial()
		c.send(post(hello, "Connection: close\r\n") + strings.Repeat("more", 10_000))
		if _, body := c.answer(); len(body) != 200_000 {
			t.Fatalf("%d bytes", len(body))
		}
	}
}

func TestIPv6(t *testing.T) {
	l, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		t.Skip("no IPv6 here: ", err)
	}
	e := newRawEngine(t, answering(fixed("four")))
	_, port, _ := net.SplitHostPort(l.Addr().String())
	go func() {
		defer l.Close()
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		if _, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
			io.WriteString(c, fixed("six"))
		}
	}()
	r := newRig(t, Limits{}, nil, "http://[::1]:"+port, e.url())
	bodies := map[string]bool{}
	for range 50 {
		c := r.dial()
		c.send(post(hello))
		resp, body := c.answer()
		bodies[body] = true
		c.Close()
		if bodies["six"] {
			break
		}
		if resp.StatusCode != 200 {
			t.Fatalf("got %d", resp.StatusCode)
		}
	}
	if !bodies["six"] {
		t.Error("the engine on IPv6 was never used")
	}
}

func TestServeRefusesOtherListeners(t *testing.T) {
	checkLeaks(t)
	s := New(Limits{}, nil, nil)
	defer s.Shutdown(context.Background())
	l, err := net.Listen("unix", t.TempDir()+"/socket")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	c, err := net.Dial("unix", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := <-done; err == nil || !strings.Contains(err.Error(), "not *net.TCPConn") {
		t.Errorf("Serve returned %v", err)
	}
}

// TestShutdownLameDuck: for LameDuck a connection without a request may still
// begin one, and is told that it was the last; so is one whose answer had
// begun before. Who stays silent is closed then.
func TestShutdownLameDuck(t *testing.T) {
	goOn := make(chan struct{})
	e := newRawEngine(t, func(c *engineSide) {
		for c.request() != nil {
			io.WriteString(c, chunkedHead+chunk("begun"))
			<-goOn
			io.WriteString(c, chunk("done")+"0\r\n\r\n")
		}
	})
	r := newRig(t, Limits{}, nil, e.url())
	r.s.LameDuck = 500 * time.Millisecond
	silent, idle, streaming := r.dial(), r.dial(), r.dial()
	for _, c := range []*client{silent, idle} {
		c.send("GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
		c.answer()
	}
	streaming.send(post(hello))
	if _, err := streaming.br.Peek(1); err != nil {
		t.Fatal(err)
	}

	began := time.Now()
	down := make(chan error, 1)
	go func() { down <- r.shutdown(10 * time.Second) }()
	eventually(t, 20*time.Second, "the server drains", func() bool { return r.s.draining.Load() })
	idle.send("GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
	if resp, _ := idle.answer(); resp.StatusCode != 200 || !resp.Close {
		t.Errorf("status %d, close %v", resp.StatusCode, resp.Close)
	}
	idle.closed()
	close(goOn)
	if resp, body := streaming.answer(); body != "begundone" || resp.Close {
		t.Errorf("the stream is %q, close %v", body, resp.Close)
	}
	streaming.send("GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
	if resp, _ := streaming.answer(); resp.StatusCode != 200 || !resp.Close {
		t.Errorf("after the stream: status %d, close %v", resp.StatusCode, resp.Close)
	}
	silent.closed()
	if waited := time.Since(began); waited < r.s.LameDuck {
		t.Errorf("an idle connection is closed after %v", waited)
	}
	if err := <-down; err != nil {
		t.Error(err)
	}
}

// What waits in the accept queue when the server shuts down is served.
func TestShutdownServesTheQueue(t *testing.T) {
	s := New(Limits{}, nil, nil)
	s.LameDuck = 5 * time.Second
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	// Nobody accepts yet: the listener's deadline has passed.
	l.(*net.TCPListener).SetDeadline(past)
	var queued []net.Conn
	for range 5 {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		io.WriteString(c, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
		queued = append(queued, c)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	eventually(t, 20*time.Second, "the listener is served", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.listeners) == 1
	})
	if err := s.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-served; err != ErrClosed {
		t.Errorf("Serve: %v", err)
	}
	for _, c := range queued {
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Error(err)
			continue
		}
		if resp.StatusCode != 200 || !resp.Close {
			t.Errorf("status %d, close %v", resp.StatusCode, resp.Close)
		}
	}
}

// TestConnectionMemory: a connection, with its exchange, is allocated as one piece of
// 4 KB; one byte more would take 20 % more of each of 10,000 that wait.
func TestConnectionMemory(t *testing.T) {
	if n := unsafe.Sizeof(conn{}); n > 4096 {
		t.Errorf("a connection has %d bytes", n)
	}
}
