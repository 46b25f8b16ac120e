package proxy

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// frameClient is an HTTP/2 client that sends whatever frames a test needs.
type frameClient struct {
	net.Conn
	*http2.Framer
	t      testing.TB
	block  bytes.Buffer
	encode *hpack.Encoder
	told   map[uint32]string
	over   map[uint32]bool
}

func dialFrames(t testing.TB, addr string) *frameClient {
	t.Helper()
	nc, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nc.Close() })
	nc.SetDeadline(time.Now().Add(20 * time.Second))
	c := &frameClient{Conn: nc, Framer: http2.NewFramer(nc, nc), t: t, told: map[uint32]string{}, over: map[uint32]bool{}}
	c.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	c.encode = hpack.NewEncoder(&c.block)
	return c
}

// open sends the preface and takes part in the settings.
func (c *frameClient) open() *frameClient {
	c.t.Helper()
	io.WriteString(c.Conn, http2.ClientPreface)
	if err := c.WriteSettings(); err != nil {
		c.t.Fatal(err)
	}
	return c
}

func (c *frameClient) fields(pairs ...string) []byte {
	c.block.Reset()
	for i := 0; i < len(pairs); i += 2 {
		c.encode.WriteField(hpack.HeaderField{Name: pairs[i], Value: pairs[i+1]})
	}
	return c.block.Bytes()
}

var chat = []string{":method", "POST", ":scheme", "http", ":authority", "x", ":path", "/v1/chat/completions"}

// ask sends a request's head and, unless it is "-", its body.
func (c *frameClient) ask(stream uint32, body string, pairs ...string) {
	c.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: c.fields(pairs...), EndHeaders: true, EndStream: body == ""})
	if body != "" && body != "-" {
		c.WriteData(stream, true, []byte(body))
	}
}

// end reads until stream or the connection has ended, and returns what came of
// the stream in one line: its status, its body, how it was reset, what became
// of the connection. What comes of other streams meanwhile is kept.
func (c *frameClient) end(stream uint32) string {
	c.t.Helper()
	for !c.over[stream] {
		f, err := c.ReadFrame()
		if err != nil {
			return c.told[stream] + c.told[0] + "closed"
		}
		id := f.Header().StreamID
		switch f := f.(type) {
		case *http2.GoAwayFrame:
			c.told[0] += "GOAWAY " + f.ErrCode.String() + " "
			if f.ErrCode != http2.ErrCodeNo {
				return c.told[stream] + c.told[0] // the server closes in a while
			}
		case *http2.SettingsFrame:
			if !f.IsAck() {
				c.WriteSettingsAck()
			}
		case *http2.MetaHeadersFrame:
			if status := f.PseudoValue("status"); status != "" {
				c.told[id] += status + " "
			}
			c.over[id] = f.StreamEnded()
		case *http2.DataFrame:
			c.told[id] += string(f.Data())
			c.over[id] = f.StreamEnded()
		case *http2.RSTStreamFrame:
			c.told[id] += "RST " + f.ErrCode.String()
			c.over[id] = true
		}
	}
	return c.told[stream]
}

// TestHTTP2Smuggling: what would read as something else in HTTP/1.1 gets a clean
// error and never reaches an engine.
func TestHTTP2Smuggling(t *testing.T) {
	e := newRawEngine(t, storyEngine)
	r := newRig(t, Limits{}, nil, e.url())
	f := func(name, want, body string, pairs ...string) {
		t.Helper()
		got := dialFrames(t, r.addr).open()
		got.ask(1, body, pairs...)
		told := got.end(1)
		told = strings.TrimPrefix(strings.TrimPrefix(told, "RST "), "GOAWAY ")
		if !strings.HasPrefix(told, want) {
			t.Errorf("%s: got %q, want %q", name, told, want)
		}
		if n := e.accepted(); n > 0 {
			t.Fatalf("%s: the engine has %d connections", name, n)
		}
	}
	with := func(pairs ...string) []string { return append(append([]string{}, chat...), pairs...) }
	path := func(p string) []string {
		return []string{":method", "POST", ":scheme", "http", ":authority", "x", ":path", p}
	}
	const protocol = "PROTOCOL_ERROR" // of the stream, or of the connection

	f("CRLF in a value", protocol, hello, with("a", "b\r\nTransfer-Encoding: chunked")...)
	f("LF in a value", protocol, hello, with("a", "b\nc: d")...)
	f("NUL in a value", protocol, hello, with("a", "b\x00")...)
	f("CRLF in a name", protocol, hello, with("a\r\nb", "c")...)
	f("a space in a name", protocol, hello, with("a b", "c")...)
	f("a colon in a name", protocol, hello, with("a:b", "c")...)
	f("an upper-case name", protocol, hello, with("A", "b")...)
	f("a pseudo-field after the fields", protocol, hello, with("a", "b", ":path", "/")...)
	f("two paths", protocol, hello, with(":path", "/v1/models")...)
	f("no method", protocol, hello, ":scheme", "http", ":authority", "x", ":path", "/")
	f("Connection", "400", hello, with("connection", "x-request-id")...)
	f("Transfer-Encoding", "400", hello, with("transfer-encoding", "chunked")...)
	f("Upgrade", "400", hello, with("upgrade", "h2c")...)
	f("Proxy-Connection", "400", hello, with("proxy-connection", "close")...)
	f("TE", "400", hello, with("te", "chunked")...)
	f("CRLF in the path", protocol, hello, path("/v1/chat/completions HTTP/1.1\r\nA: b")...)
	f("a space in the path", "400", hello, path("/v1/chat/completions HTTP/1.1")...)
	f("a space in the query", "400", hello, path("/v1/chat/completions?a HTTP/1.1")...)
	f("a relative path", protocol, hello, path("v1/chat/completions")...)
	f("an empty path", protocol, hello, path("")...)
	f("a path of another server", protocol, hello, path("http://other/nowhere")...)
	f("CRLF in the authority", protocol, hello, ":method", "POST", ":scheme", "http", ":authority", "x\r\nA: b", ":path", "/v1/chat/completions")
	f("a space in the method", "400", hello, ":method", "POST /v1/chat/completions HTTP/1.1", ":scheme", "http", ":authority", "x", ":path", "/")
	f("CONNECT", "404", "", ":method", "CONNECT", ":authority", "other:443")
	f("a body that is longer than it says", protocol, hello, with("content-length", "5")...)
	f("a body that is shorter than it says", "400", hello, with("content-length", "500")...)
	f("a negative length", "", hello, with("content-length", "-1")...)
	f("lengths that contradict", protocol, hello, with("content-length", "3", "content-length", fmt.Sprint(len(hello)))...)
	f("a head that is too large", "431", hello, with("a", strings.Repeat("a", 9<<10), "b", strings.Repeat("b", 9<<10))...)

	// The rig itself works.
	c := dialFrames(t, r.addr).open()
	c.ask(1, hello, with("te", "trailers", "content-length", fmt.Sprint(len(hello)))...)
	if told := c.end(1); !strings.HasPrefix(told, "200 ") {
		t.Errorf("a good request gets %q", told)
	}
}

// TestHTTP2Preface: it may arrive in pieces or with more behind it, and what
// only begins like it is HTTP/1.x.
func TestHTTP2Preface(t *testing.T) {
	r := newRig(t, Limits{HeadTimeout: 2 * time.Second}, nil, newRawEngine(t, storyEngine).url())
	c := dialFrames(t, r.addr)
	for _, b := range []byte(http2.ClientPreface) {
		c.Conn.Write([]byte{b})
		time.Sleep(time.Millisecond)
	}
	c.WriteSettings()
	c.ask(1, hello, chat...)
	if told := c.end(1); !strings.HasPrefix(told, "200 ") {
		t.Errorf("in pieces: %q", told)
	}

	c = dialFrames(t, r.addr)
	var all bytes.Buffer
	c.Framer = http2.NewFramer(&all, c.Conn)
	c.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	all.WriteString(http2.ClientPreface)
	c.WriteSettings()
	c.ask(1, hello, chat...)
	c.Conn.Write(all.Bytes())
	c.Framer = http2.NewFramer(c.Conn, c.Conn)
	c.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	if told := c.end(1); !strings.HasPrefix(told, "200 ") {
		t.Errorf("at once: %q", told)
	}

	for request, status := range map[string]int{
		"P":                                               408,
		"PRI * HTTP/2.0\r\n\r\nSM\r\n\r":                  400,
		"PRI * HTTP/2.0\r\n\r\nSN\r\n\r\n":                400,
		"PRI * HTTP/1.1\r\nHost: x\r\n\r\n":               400,
		"PUT /v1/models HTTP/1.1\r\nHost: x\r\n\r\n":      405,
		"PROPFIND /v1/models HTTP/1.1\r\nHost: x\r\n\r\n": 405,
	} {
		c := r.dial()
		c.send(request)
		if resp, _ := c.answer(); resp.StatusCode != status {
			t.Errorf("%q gets %d", request, resp.StatusCode)
		}
	}

	// The upgrade from HTTP/1.1 (RFC 9113 took it out) is not taken up.
	plain := r.dial()
	plain.send(post(hello, "Connection: Upgrade, HTTP2-Settings\r\n", "Upgrade: h2c\r\n", "HTTP2-Settings: AAMAAABkAAQAAP__\r\n"))
	if resp, _ := plain.answer(); resp.StatusCode != 200 || resp.Header.Get("Upgrade") != "" {
		t.Errorf("an upgrade gets %d", resp.StatusCode)
	}
}

// TestHTTP2Streams: many streams at once on few connections, each with its own
// answer; more than maxStreams on one are refused. One that leaves does not
// disturb the others.
func TestHTTP2Streams(t *testing.T) {
	const conns = 4
	release := make(chan struct{})
	letGo := sync.OnceFunc(func() { close(release) })
	defer letGo()
	var waiting atomic.Int64
	e := newRawEngine(t, func(c *engineSide) {
		for {
			req := c.request()
			if req == nil {
				return
			}
			io.WriteString(c, chunkedHead+chunk("data: "+req.Header.Get("Story")+"\n\n"))
			waiting.Add(1)
			<-release
			if _, err := io.WriteString(c, chunk("data: end\n\n")+"0\r\n\r\n"); err != nil {
				return
			}
		}
	})
	r := newRig(t, Limits{}, nil, e.url())
	var clients []*frameClient
	for n := range conns {
		c := dialFrames(t, r.addr).open()
		c.WriteWindowUpdate(0, 1<<20)
		for i := range uint32(maxStreams) {
			c.ask(2*i+1, hello, append(append([]string{}, chat...), "story", fmt.Sprint(n, ".", i))...)
		}
		clients = append(clients, c)
	}
	eventually(t, 20*time.Second, "all streams have begun", func() bool { return waiting.Load() == conns*maxStreams })
	if n := r.s.Datapath().Connections; n != conns {
		t.Errorf("%d connections are counted", n)
	}
	clients[0].ask(2*maxStreams+1, hello, chat...)
	if told := clients[0].end(2*maxStreams + 1); told != "RST REFUSED_STREAM" {
		t.Errorf("one stream too many gets %q", told)
	}
	clients[1].WriteRSTStream(1, http2.ErrCodeCancel)
	eventually(t, 20*time.Second, "the stream that left is over", func() bool { return r.outcome("client_left") == 1 })
	letGo()
	var wg sync.WaitGroup
	for n, c := range clients {
		wg.Go(func() {
			for i := range uint32(maxStreams) {
				if n == 1 && i == 0 {
					continue // it left
				}
				want := fmt.Sprintf("200 data: %d.%d\n\ndata: end\n\n", n, i)
				if told := c.end(2*i + 1); told != want {
					t.Errorf("stream %d of connection %d gets %q, want %q", i, n, told, want)
				}
			}
		})
	}
	wg.Wait()
}

// TestHTTP2ClientLeaves: a stream that is reset, or whose connection ends,
// leaves nobody generating for it.
func TestHTTP2ClientLeaves(t *testing.T) {
	for how, leave := range map[string]func(c *frameClient){
		"resets the stream": func(c *frameClient) { c.WriteRSTStream(1, http2.ErrCodeCancel) },
		"closes":            func(c *frameClient) { c.Close() },
		"resets": func(c *frameClient) {
			c.Conn.(*net.TCPConn).SetLinger(0)
			c.Close()
		},
	} {
		t.Run(how, func(t *testing.T) {
			reached := make(chan struct{})
			left := make(chan time.Time, 1)
			noticed := make(chan time.Duration, 1)
			e := newRawEngine(t, func(c *engineSide) {
				c.request()
				io.WriteString(c, chunkedHead+chunk("x"))
				close(reached)
				c.SetReadDeadline(time.Now().Add(5 * time.Second))
				io.Copy(io.Discard, c.br)
				noticed <- time.Since(<-left)
			})
			r := newRig(t, Limits{}, nil, e.url())
			c := dialFrames(t, r.addr).open()
			c.ask(1, hello, chat...)
			<-reached
			left <- time.Now()
			leave(c)
			if d := <-noticed; d > soon {
				t.Errorf("the engine's connection closed after %v", d)
			}
			eventually(t, 20*time.Second, "it is counted", func() bool { return r.outcome("client_left") == 1 })
		})
	}
}

// FuzzHTTP2Request: what an HTTP/2 request makes an engine see is what the same
// request makes it see over HTTP/1.1.
func FuzzHTTP2Request(f *testing.F) {
	for _, seed := range [][3]string{
		{"", "a", "b"},
		{"?a=b&c=%2F;d", "x-inferrail-budget-ms", "5"},
		{"?a b", "a", "b c"},
		{"?\r\nA: b", "a", "b\r\nc: d"},
		{"?a#b", "connection", "close"},
		{"#b", "content-length", "3"},
		{"%2e", "transfer-encoding", "chunked"},
		{"?\xff", "a", "\xff"},
		{"?%zz", "x-request-id", "me 1"},
		{"?a=%", "te", "trailers"},
		{"?", "cookie", "a=b"},
		{"", "expect", "100-continue"},
		{"", "expect", "0"},
		{"", "forwarded", "for=me"},
		{"", "keep-alive", "1"},
		{"", "host", "other"},
		{"", "a", " b "},
		{"", "", "b"},
	} {
		f.Add(seed[0], seed[1], seed[2])
	}
	e := newRawEngine(f, storyEngine)
	r := newRig(f, Limits{}, nil, e.url())
	f.Fuzz(func(t *testing.T, query, name, value string) {
		switch name {
		case "story", "x-request-id", "host": // sent already
			return
		}
		if len(query)+len(name)+len(value) > 4000 || name == "user-agent" && value == "" {
			return
		}
		c := dialFrames(t, r.addr).open()
		defer c.Close()
		c.ask(1, hello, ":method", "POST", ":scheme", "http", ":authority", "x", ":path", "/v1/chat/completions"+query,
			"story", "fields", "x-request-id", "id-1", name, value)
		two, ok := strings.CutPrefix(c.end(1), "200 ")
		if !ok {
			return
		}
		nc, err := net.Dial("tcp", r.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		nc.SetDeadline(time.Now().Add(10 * time.Second))
		length := fmt.Sprintf("Content-Length: %d\r\n", len(hello))
		if name == "content-length" {
			length = ""
		}
		fmt.Fprintf(nc, "POST /v1/chat/completions%s HTTP/1.1\r\nHost: x\r\nStory: fields\r\nx-request-id: id-1\r\nConnection: close\r\n%s%s: %s\r\n\r\n%s",
			query, length, name, value, hello)
		answer, _ := io.ReadAll(nc)
		_, one, _ := strings.Cut(string(answer), "\r\n\r\n")
		if one, two = strings.ToLower(one), strings.ToLower(two); one != two {
			t.Errorf("%q %q: %q\nHTTP/1.1 made the engine see %q\nHTTP/2 %q", query, name, value, one, two)
		}
	})
}

// TestHTTP2Flood: floods end the connection that they come on, and leave
// nothing behind.
func TestHTTP2Flood(t *testing.T) {
	e := newRawEngine(t, func(c *engineSide) {
		if c.request() != nil {
			c.waitClosed()
		}
	})
	for name, flood := range map[string]func(c *frameClient) error{
		"streams that are reset at once": func(c *frameClient) error {
			for i := uint32(1); i < 40_000; i += 2 {
				c.ask(i, "-", chat...)
				if err := c.WriteRSTStream(i, http2.ErrCodeCancel); err != nil {
					return err
				}
			}
			return io.EOF // it may have kept up
		},
		"continuations without end": func(c *frameClient) error {
			c.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: c.fields(chat...)})
			for range 100_000 {
				if err := c.WriteContinuation(1, false, c.fields("a", strings.Repeat("a", 1000))); err != nil {
					return err
				}
			}
			return errors.New(c.end(1))
		},
		"pings whose answers are not read": func(c *frameClient) error {
			for range 10_000_000 {
				if err := c.WritePing(false, [8]byte{}); err != nil {
					return err
				}
			}
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, Limits{}, nil, e.url())
			c := dialFrames(t, r.addr).open()
			c.SetDeadline(time.Now().Add(10 * time.Second))
			if err := flood(c); err == nil {
				t.Error("the connection lasts")
			}
			c.Close()
			eventually(t, 10*time.Second, "nothing is left", func() bool {
				return r.replicas[0].InFlight() == 0 && r.s.Datapath().Connections == 0
			})
		})
	}
}

// TestHTTP2IdleTimeout: a connection without a stream is closed, one with a
// stream is not.
func TestHTTP2IdleTimeout(t *testing.T) {
	release := make(chan struct{})
	letGo := sync.OnceFunc(func() { close(release) })
	defer letGo()
	e := newRawEngine(t, func(c *engineSide) {
		if c.request() != nil {
			<-release
			io.WriteString(c, fixed("late"))
		}
	})
	r := newRig(t, Limits{IdleTimeout: time.Second}, nil, e.url())
	busy := dialFrames(t, r.addr).open()
	busy.ask(1, hello, chat...)
	idle := dialFrames(t, r.addr).open()
	if told := idle.end(1); told != "GOAWAY NO_ERROR closed" {
		t.Errorf("the idle connection ends with %q", told)
	}
	letGo()
	if told := busy.end(1); told != "200 late" {
		t.Errorf("the busy connection gets %q", told)
	}
}

// TestHTTP2DrainWithinBody: a stream that was opened before the drain is served
// though its body comes later.
func TestHTTP2DrainWithinBody(t *testing.T) {
	r := newRig(t, Limits{}, nil, newRawEngine(t, storyEngine).url())
	c := dialFrames(t, r.addr).open()
	c.ask(1, "-", chat...)
	eventually(t, 20*time.Second, "the stream is open", func() bool { return r.s.stats.running.Load() == 1 })
	down := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		down <- r.s.Shutdown(ctx)
	}()
	for {
		f, err := c.ReadFrame()
		if err != nil {
			t.Fatal(err)
		}
		if _, ok := f.(*http2.GoAwayFrame); ok {
			break
		}
	}
	c.WriteData(1, true, []byte(hello))
	if told := c.end(1); !strings.HasPrefix(told, "200 ") {
		t.Errorf("got %q", told)
	}
	c.Close()
	if err := <-down; err != nil {
		t.Errorf("Shutdown returned %v", err)
	}
}

// TestHTTP2SlowBody: a body that does not arrive in time is refused as it is
// over HTTP/1.1.
func TestHTTP2SlowBody(t *testing.T) {
	r := newRig(t, Limits{BodyTimeout: 200 * time.Millisecond}, nil, newRawEngine(t, storyEngine).url())
	c := dialFrames(t, r.addr).open()
	c.ask(1, "-", chat...)
	c.WriteData(1, false, []byte(`{"model"`))
	if told := c.end(1); !strings.HasPrefix(told, "408 ") || !strings.Contains(told, "RequestTimeoutError") {
		t.Errorf("got %q", told)
	}
}

// TestHTTP2StreamsAreReused: requests one after another use one pair, and one
// connection to the engine.
func TestHTTP2StreamsAreReused(t *testing.T) {
	e := newRawEngine(t, storyEngine)
	r := newRig(t, Limits{}, nil, e.url())
	c := r.speak(tongues[1])
	for range 50 {
		resp, err := c.post(t, hello)
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			t.Fatalf("got %d", resp.StatusCode)
		}
	}
	if n := e.accepted(); n > 5 {
		t.Errorf("50 requests took %d connections to the engine", n)
	}
	r.s.mu.Lock()
	n := r.s.paired
	r.s.mu.Unlock()
	if n > 5 {
		t.Errorf("50 requests took %d pairs", n)
	}
}

// TestPairFails: without descriptors for a pair the client is told so.
func TestPairFails(t *testing.T) {
	r := newRig(t, Limits{}, nil, newRawEngine(t, storyEngine).url())
	r.s.inside.DialContext = func(context.Context, string, string) (net.Conn, error) {
		return nil, &pairError{fmt.Errorf("socketpair: %w", error(http.ErrNotSupported))}
	}
	resp, err := r.speak(tongues[3]).do(t, "POST", "/v1/chat/completions", strings.NewReader(hello), http.Header{"X-Request-Id": {"id-1"}})
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(resp.Body)
	resp.Body.Close()
	if resp.StatusCode != 503 || resp.Header.Get("Retry-After") == "" || resp.Header.Get("X-Request-Id") != "id-1" ||
		!bytes.Contains(body, []byte(`"code":503`)) {
		t.Errorf("got %d %v %q", resp.StatusCode, resp.Header, body)
	}
}

// TestCertificateIsAskedFor: each handshake gets the certificate of its time.
func TestCertificateIsAskedFor(t *testing.T) {
	r := newRig(t, Limits{}, nil)
	var asked atomic.Int64
	addr := r.listen("127.0.0.1:0", func(l net.Listener) error {
		return r.s.ServeTLS(l, &tls.Config{GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			asked.Add(1)
			c := certificate()
			return &c, nil
		}})
	})
	for range 3 {
		c, err := tls.Dial("tcp", addr, &tls.Config{InsecureSkipVerify: true})
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
	}
	if asked.Load() != 3 {
		t.Errorf("asked %d times", asked.Load())
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := r.s.ServeTLS(l, &tls.Config{}); err == nil || err == ErrClosed {
		t.Errorf("without a certificate ServeTLS returned %v", err)
	}
}
