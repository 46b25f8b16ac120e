package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"golang.org/x/sys/unix"

	"github.com/inferrail/inferrail/bpf"
)

// TestAbuse is one agent that hostile clients and hostile engines do their
// worst to, one after the other, while an ordinary client goes on. That one
// never gets an error or waits long; the agent stays small while it is abused,
// and holds nothing more afterwards.
func TestAbuse(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("two minutes")
	}
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		t.Fatal(err)
	}
	lim.Cur = lim.Max
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		t.Fatal(err)
	}
	t.Run("copy", func(t *testing.T) {
		a := newAbuse(t, "copy")
		a.answers(int(lim.Max))
		a.run("heads byte by byte", func(t *testing.T) { a.loris(t, 2000, "GET / HTTP/1.1\r\nHost: x\r\nA: ") })
		a.run("bodies byte by byte", func(t *testing.T) {
			a.loris(t, 2000, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "+freeKey+"\r\nContent-Length: 900000\r\n\r\n{")
		})
		a.run("handshakes that stop", a.handshakes)
		a.run("guessed keys", a.guesses)
		a.run("HTTP/2 streams without a window", a.windowless)
		a.run("HTTP/2 streams that are reset", a.rapidReset)
		a.run("HTTP/2 heads without an end", a.continuations)
		a.run("HTTP/2 settings and pings", a.pings)
	})
	t.Run("packet", func(t *testing.T) {
		if err := bpf.Probe(); err != nil && os.Getenv("INFERRAIL_NEED_BPF") != "1" {
			t.Skip(err)
		}
		newAbuse(t, "packet").answers(int(lim.Max))
	})
}

// answers is the abuse in which the datapath has a part.
func (a *abuse) answers(files int) {
	a.run("idle connections", func(t *testing.T) { a.idle(t, min(10_000, files/2-500)) })
	a.run("clients that do not read", a.deaf)
	a.run("clients that leave a large answer", a.leavers)
	a.run("pipelines without an end", a.pipelines)
	a.run("endless answers", a.endless)
	a.run("more requests than may wait", a.crowd)
}

// abuse is what TestAbuse is done to.
type abuse struct {
	*testing.T
	listen, secure string
	admin          admin
	agent          *child
	narrow         *narrowEngine
	hostile        *hostileEngine
	before         footprint
}

// Times are short, so that their end is seen.
const (
	abuseRead  = 3 * time.Second // for heads and bodies
	abuseStall = 3 * time.Second
)

func newAbuse(t *testing.T, tier string) *abuse {
	dir := t.TempDir()
	a := &abuse{T: t, listen: "127.0.0.1:" + freePort(t), secure: "127.0.0.1:" + freePort(t), admin: admin("http://127.0.0.1:" + freePort(t)),
		narrow: &narrowEngine{}, hostile: &hostileEngine{}}
	certFile, keyFile := writeCertificate(t, dir)
	simPort := freePort(t)
	program := asUsed(t)
	startChild(t, program, "sim", "--port", simPort, "--served-model-name", "m", "--prefill-a", "1", "--prefill-d", "1000", "--time-per-output-token", "1ms")
	file := filepath.Join(dir, "inferrail.yaml")
	config := fmt.Sprintf(`listen: %s
admin_listen: %s
datapath: {mode: %s, interfaces: [lo]}
health: {ejection_failures: 1000000}
replicas:
- {id: good, url: "http://127.0.0.1:%s"}
- {id: narrow, url: "http://%s", models: [narrow], max_concurrency: %d, max_pending: %d}
- {id: hostile, url: "http://%s", models: [hostile]}
- {id: hoarder, url: "http://%s"}
server:
  head_timeout: %v
  body_timeout: %v
  stall_timeout: %v
  max_connections: 20000
  tls: {listen: %q, cert_file: %s, key_file: %s}
  api_keys: [{name: free, sha256: %s}]
`, a.listen, strings.TrimPrefix(string(a.admin), "http://"), tier, simPort, serveTCP(t, a.narrow.serve), narrowWidth, narrowLine,
		serveTCP(t, a.hostile.serve), serveTCP(t, a.hostile.serve), abuseRead, abuseRead, abuseStall, a.secure, certFile, keyFile, sha256Hex(freeKey))
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	a.agent = startChild(t, program, "agent", "--config", file)
	t.Cleanup(func() {
		if t.Failed() {
			text := a.agent.out.String()
			t.Logf("the end of the agent's log:\n%s", text[max(0, len(text)-8000):])
		}
	})
	if !a.admin.awaitMetric(t, time.Minute, func(v float64) bool { return v == 3 }, "inferrail_replica_up") {
		t.Fatalf("the replicas do not come up:\n%s", a.agent.out)
	}
	return a
}

// serveTCP has serve handle each connection to an address, until the test ends.
func serveTCP(t *testing.T, serve func(c net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var running sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	running.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			running.Go(func() {
				defer c.Close()
				defer context.AfterFunc(ctx, func() { c.Close() })()
				serve(c)
			})
		}
	})
	t.Cleanup(func() {
		cancel()
		l.Close()
		running.Wait()
	})
	return l.Addr().String()
}

// abuseMost is how many bytes the agent may take, whatever is done to it. It
// takes about half of them.
const abuseMost = 400 << 20

// run has the agent abused beside an ordinary client.
func (a *abuse) run(name string, do func(t *testing.T)) {
	a.Run(name, func(t *testing.T) {
		if a.before.rss == 0 {
			a.before = a.admin.footprint(t)
		}
		ctx, stop := context.WithCancel(t.Context())
		var others sync.WaitGroup
		var took []time.Duration
		var peak footprint
		others.Go(func() { took = a.ordinary(ctx, t) })
		others.Go(func() {
			for ctx.Err() == nil {
				now := a.admin.footprint(t)
				peak = footprint{max(peak.rss, now.rss), max(peak.goroutines, now.goroutines), max(peak.files, now.files)}
				select {
				case <-ctx.Done():
				case <-time.After(200 * time.Millisecond):
				}
			}
		})
		do(t)
		stop()
		others.Wait()
		now := a.admin.awaitIdle(t, a.before)
		slices.Sort(took)
		p50, p99 := took[len(took)/2], took[len(took)*99/100]
		t.Logf("%d ordinary requests, p50 %v, p99 %v; the agent: %+v before, at most %+v, %+v after", len(took),
			p50.Round(10*time.Microsecond), p99.Round(10*time.Microsecond), a.before, peak, now)
		if p99 > 10*time.Second {
			t.Errorf("an ordinary request takes %v", p99)
		}
		if peak.rss > abuseMost {
			t.Errorf("the agent takes %d MiB, may %d", peak.rss>>20, abuseMost>>20)
		}
	})
}

// ordinary is a client that sends 50 requests a second. It returns how long
// each took.
func (a *abuse) ordinary(ctx context.Context, t *testing.T) []time.Duration {
	client := http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 100}, Timeout: 30 * time.Second}
	defer client.CloseIdleConnections()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	var mu sync.Mutex // guards took
	var took []time.Duration
	var running sync.WaitGroup
	for n := 0; n == 0 || ctx.Err() == nil; n++ {
		running.Go(func() {
			began := time.Now()
			req, err := http.NewRequest("POST", "http://"+a.listen+"/v1/chat/completions",
				strings.NewReader(`{"model":"m","max_tokens":5,"stream":true,"messages":[{"role":"user","content":"hi"}]}`))
			if err != nil {
				t.Error(err)
				return
			}
			req.Header.Set("Authorization", "Bearer "+freeKey)
			resp, err := client.Do(req)
			if err != nil {
				t.Errorf("an ordinary request: %v", err)
				return
			}
			defer resp.Body.Close()
			text, err := io.ReadAll(resp.Body)
			if err != nil || resp.StatusCode != 200 || !bytes.HasSuffix(text, []byte("data: [DONE]\n\n")) {
				t.Errorf("an ordinary request: %d, %v, %s", resp.StatusCode, err, text)
			}
			mu.Lock()
			defer mu.Unlock()
			took = append(took, time.Since(began))
		})
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
	running.Wait()
	if len(took) == 0 {
		return []time.Duration{0}
	}
	return took
}

func (a *abuse) dial(t *testing.T) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp", a.listen)
	if err != nil {
		t.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(time.Minute))
	return c.(*net.TCPConn)
}

// each runs f for n clients at once and waits for all.
func each(n int, f func(i int)) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { f(i) })
	}
	wg.Wait()
}

// idle: connections that ask nothing.
func (a *abuse) idle(t *testing.T, n int) {
	conns := make([]net.Conn, n)
	for i := range n {
		conns[i] = a.dial(t)
	}
	if !a.admin.awaitMetric(t, 20*time.Second, func(v float64) bool { return int(v) >= n }, "inferrail_client_connections") {
		t.Errorf("%v of %d connections are there", a.admin.metric(t, "inferrail_client_connections"), n)
	}
	time.Sleep(2 * time.Second) // for the ordinary client to be measured beside them
	for _, c := range conns {
		c.Close()
	}
}

// loris: clients that send a byte now and then are told so when their time is
// over.
func (a *abuse) loris(t *testing.T, n int, begin string) {
	var told, late atomic.Int64
	began := time.Now()
	each(n, func(i int) {
		c, err := net.Dial("tcp", a.listen)
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		c.SetDeadline(began.Add(time.Minute))
		done := make(chan struct{})
		go func() {
			defer close(done)
			io.WriteString(c, begin)
			for range 100 {
				if _, err := io.WriteString(c, "a"); err != nil {
					return
				}
				time.Sleep(300 * time.Millisecond)
			}
		}()
		text, _ := io.ReadAll(c)
		if bytes.HasPrefix(text, []byte("HTTP/1.1 408 ")) {
			told.Add(1)
		}
		if time.Since(began) > 10*abuseRead {
			late.Add(1)
		}
		c.Close()
		<-done
	})
	if told.Load() < int64(n)*9/10 || late.Load() > 0 {
		t.Errorf("%d of %d clients are told that they are too slow, %d only after %v", told.Load(), n, late.Load(), 10*abuseRead)
	}
}

// handshakes: TLS clients that never finish their handshake.
func (a *abuse) handshakes(t *testing.T) {
	each(1000, func(i int) {
		c, err := net.Dial("tcp", a.secure)
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(10 * abuseRead))
		io.WriteString(c, "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[:i%12])
		if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error("the connection is not closed")
		}
	})
}

// post is a request of a key that is known.
func abusePost(body string) string {
	return fmt.Sprintf("POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n%s", freeKey, len(body), body)
}

// deaf: clients that do not read what they have asked for are cut.
func (a *abuse) deaf(t *testing.T) {
	each(200, func(i int) {
		secure := i%4 == 3
		var c net.Conn
		var err error
		if secure {
			c, err = tls.Dial("tcp", a.secure, &tls.Config{InsecureSkipVerify: true})
		} else {
			c, err = net.Dial("tcp", a.listen)
		}
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(time.Minute))
		io.WriteString(c, abusePost([]string{`{"model":"hostile","prompt":"large"}`, `{"model":"hostile","prompt":"stream"}`}[i/4%2]))
		if !closedSoon(c, 30*time.Second) {
			t.Errorf("client %d is not cut", i)
		}
	})
}

// closedSoon waits until the other end has closed the connection, without
// reading.
func closedSoon(c net.Conn, patience time.Duration) bool {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		return false
	}
	for began := time.Now(); time.Since(began) < patience; time.Sleep(50 * time.Millisecond) {
		gone := false
		if err := raw.Control(func(fd uintptr) {
			info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
			gone = err != nil || info.State != unix.BPF_TCP_ESTABLISHED
		}); err != nil || gone {
			return true
		}
	}
	return false
}

// leavers: engines stop at once when the client of a large answer has left.
func (a *abuse) leavers(t *testing.T) {
	each(100, func(i int) {
		c, err := net.Dial("tcp", a.listen)
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(time.Minute))
		io.WriteString(c, abusePost(`{"model":"hostile","prompt":"large"}`))
		if _, err := io.CopyN(io.Discard, c, 1<<20); err != nil {
			t.Errorf("client %d: %v", i, err)
		}
	})
	a.engineFree(t)
}

// pipelines: clients that send request after request and read nothing are cut,
// whoever answers.
func (a *abuse) pipelines(t *testing.T) {
	each(60, func(i int) {
		c, err := net.Dial("tcp", a.listen)
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(time.Minute))
		text := strings.Repeat([]string{
			"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
			"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", // without a key
			abusePost(`{"model":"m","prompt":"x","max_tokens":1}`),
		}[i%3], 100)
		for {
			if _, err := io.WriteString(c, text); err != nil {
				if errors.Is(err, os.ErrDeadlineExceeded) {
					t.Errorf("client %d is not cut", i)
				}
				return
			}
		}
	})
}

// windowless: streams whose clients let nothing be sent are reset, and their
// engines told.
func (a *abuse) windowless(t *testing.T) {
	each(10, func(i int) {
		c, err := net.Dial("tcp", a.listen)
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(time.Minute))
		f := http2.NewFramer(c, c)
		io.WriteString(c, http2.ClientPreface)
		f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
		const streams = 50
		for k := range uint32(streams) {
			f.WriteHeaders(http2.HeadersFrameParam{StreamID: 2*k + 1, EndHeaders: true, BlockFragment: headerBlock(
				":method", "POST", ":path", "/v1/completions", ":scheme", "http", ":authority", "x", "authorization", "Bearer "+freeKey)})
			f.WriteData(2*k+1, true, []byte(`{"model":"hostile","prompt":"large"}`))
		}
		for reset := 0; reset < streams; {
			frame, err := f.ReadFrame()
			if err != nil {
				t.Errorf("%d of %d streams are reset: %v", reset, streams, err)
				return
			}
			switch frame := frame.(type) {
			case *http2.RSTStreamFrame:
				reset++
			case *http2.SettingsFrame:
				if !frame.IsAck() {
					f.WriteSettingsAck()
				}
			}
		}
	})
	a.engineFree(t)
}

// engineFree waits until the hostile engine answers nobody.
func (a *abuse) engineFree(t *testing.T) {
	for began := time.Now(); a.hostile.running.Load() > 0; time.Sleep(5 * time.Millisecond) {
		if time.Since(began) > 5*time.Second {
			t.Errorf("the engine still sends %d answers", a.hostile.running.Load())
			return
		}
	}
}

// guesses: thousands of requests with keys that are not known.
func (a *abuse) guesses(t *testing.T) {
	each(50, func(i int) {
		c, err := net.Dial("tcp", a.listen)
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(time.Minute))
		r := bufio.NewReader(c)
		for k := range 200 {
			fmt.Fprintf(c, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer guess-%d-%d\r\nContent-Length: 2\r\n\r\n{}", i, k)
			resp, err := http.ReadResponse(r, &http.Request{Method: "POST"})
			if err != nil {
				t.Errorf("guess %d of client %d: %v", k, i, err)
				return
			}
			if io.Copy(io.Discard, resp.Body); resp.StatusCode != 401 {
				t.Errorf("guess %d of client %d: status %d", k, i, resp.StatusCode)
			}
		}
	})
}

// framer opens an HTTP/2 connection.
func (a *abuse) framer(t *testing.T) (*http2.Framer, net.Conn) {
	c, err := net.Dial("tcp", a.listen)
	if err != nil {
		t.Error(err)
		return nil, nil
	}
	c.SetDeadline(time.Now().Add(time.Minute))
	f := http2.NewFramer(c, c)
	io.WriteString(c, http2.ClientPreface)
	f.WriteSettings()
	return f, c
}

func headerBlock(fields ...string) []byte {
	var b bytes.Buffer
	e := hpack.NewEncoder(&b)
	for i := 0; i < len(fields); i += 2 {
		e.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1]})
	}
	return b.Bytes()
}

// rapidReset: streams that are opened and reset, as fast as can be.
func (a *abuse) rapidReset(t *testing.T) {
	each(10, func(i int) {
		f, c := a.framer(t)
		if f == nil {
			return
		}
		defer c.Close()
		go io.Copy(io.Discard, c)
		body := []byte(`{"model":"m","max_tokens":100,"prompt":"x"}`)
		for stream := uint32(1); stream < 20_000; stream += 2 {
			f.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, EndHeaders: true, BlockFragment: headerBlock(
				":method", "POST", ":path", "/v1/completions", ":scheme", "http", ":authority", "x", "authorization", "Bearer "+freeKey)})
			f.WriteData(stream, true, body)
			if f.WriteRSTStream(stream, http2.ErrCodeCancel) != nil {
				return // the server has enough
			}
		}
	})
}

// continuations: a head that goes on for ever is refused, and soon.
func (a *abuse) continuations(t *testing.T) {
	each(20, func(i int) {
		f, c := a.framer(t)
		if f == nil {
			return
		}
		defer c.Close()
		go io.Copy(io.Discard, c)
		f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: headerBlock(":method", "GET", ":path", "/", ":scheme", "http")})
		more := headerBlock("x-more", strings.Repeat("a", 8000))
		for n := 0; ; n++ {
			if f.WriteContinuation(1, false, more) != nil {
				return
			}
			if n == 10_000 {
				t.Error("80 MB of a head are taken")
				return
			}
		}
	})
}

// pings: frames that want an answer, from clients that read none. Pings are
// answered one by one, so their sender is cut; settings all at once.
func (a *abuse) pings(t *testing.T) {
	each(20, func(i int) {
		f, c := a.framer(t)
		if f == nil {
			return
		}
		defer c.Close()
		pings := i%2 == 0
		for n := range 300_000 {
			var err error
			if pings {
				err = f.WritePing(false, [8]byte{byte(n)})
			} else {
				err = f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: uint32(n)})
			}
			if errors.Is(err, os.ErrDeadlineExceeded) {
				t.Error("a client that floods the agent is neither cut nor read")
			}
			if err != nil {
				return
			}
		}
		if pings {
			t.Error("all pings are taken, and none of the answers was")
		}
	})
}

// endless: engines that answer without an end, at the wrong place.
func (a *abuse) endless(t *testing.T) {
	for _, how := range []string{"head", "line", "interim", "chunk extension", "trailer"} {
		each(20, func(i int) {
			c, err := net.Dial("tcp", a.listen)
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			c.SetDeadline(time.Now().Add(time.Minute))
			io.WriteString(c, abusePost(fmt.Sprintf(`{"model":"hostile","prompt":%q}`, how)))
			resp, err := http.ReadResponse(bufio.NewReader(c), &http.Request{Method: "POST"})
			switch {
			case err != nil:
				t.Errorf("endless %s: %v", how, err)
			case how == "chunk extension" || how == "trailer":
				// It is passed on as it is, for the client to judge.
				if _, err := io.CopyN(io.Discard, resp.Body, 1<<20); err == nil {
					t.Errorf("endless %s: is taken for a body", how)
				}
			case resp.StatusCode != 502:
				t.Errorf("endless %s: status %d", how, resp.StatusCode)
			}
		})
	}
}

// hostileEngine answers as its prompt says.
type hostileEngine struct{ running atomic.Int64 }

func (e *hostileEngine) serve(c net.Conn) {
	r := bufio.NewReader(c)
	for {
		req, err := http.ReadRequest(r)
		if err != nil {
			return
		}
		body, err := io.ReadAll(req.Body)
		if err != nil {
			return
		}
		begin, more := "HTTP/1.1 200 OK\r\n", ""
		switch {
		case req.URL.Path == "/v1/models":
			begin, more = "HTTP/1.1 200 OK\r\n\r\n{\"data\":[", strings.Repeat(`{"id":"a"},`, 1000)
		case req.Method == "GET":
			// A page of its health has no end either.
			begin, more = "HTTP/1.1 200 OK\r\n\r\n", strings.Repeat("ok ", 1000)
		case bytes.Contains(body, []byte(`"large"`)):
			begin, more = "HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\n", strings.Repeat("x", 64<<10)
			e.running.Add(1)
			defer e.running.Add(-1)
		case bytes.Contains(body, []byte(`"stream"`)):
			event := "data: " + strings.Repeat("x", 200) + "\n\n"
			begin, more = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n", fmt.Sprintf("%x\r\n%s\r\n", len(event), event)
		case bytes.Contains(body, []byte(`"head"`)):
			more = strings.Repeat("a: b\r\n", 1000)
		case bytes.Contains(body, []byte(`"line"`)):
			more = strings.Repeat("a", 8000)
		case bytes.Contains(body, []byte(`"interim"`)):
			begin, more = "", strings.Repeat("HTTP/1.1 102 Processing\r\n\r\n", 100)
		case bytes.Contains(body, []byte(`"chunk extension"`)):
			begin, more = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;", strings.Repeat("x", 8000)
		case bytes.Contains(body, []byte(`"trailer"`)):
			begin, more = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", strings.Repeat("a: b\r\n", 1000)
		}
		io.WriteString(c, begin)
		for {
			if _, err := io.WriteString(c, more); err != nil {
				return
			}
		}
	}
}

// What the narrow engine is said to take.
const narrowWidth, narrowLine = 8, 16

// narrowEngine counts the requests that it has at one time.
type narrowEngine struct{ now, most atomic.Int64 }

func (e *narrowEngine) serve(c net.Conn) {
	r := bufio.NewReader(c)
	for {
		req, err := http.ReadRequest(r)
		if err != nil {
			return
		}
		if _, err := io.Copy(io.Discard, req.Body); err != nil {
			return
		}
		if req.Method == "GET" {
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
			continue
		}
		now := e.now.Add(1)
		for most := e.most.Load(); now > most && !e.most.CompareAndSwap(most, now); most = e.most.Load() {
		}
		time.Sleep(time.Duration(rand.IntN(4000)) * time.Microsecond)
		e.now.Add(-1)
		io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
	}
}

// crowd: of far more requests than may run and wait, no more run, and the rest
// are told at once.
func (a *abuse) crowd(t *testing.T) {
	var served, refused atomic.Int64
	each(300, func(i int) {
		c, err := net.Dial("tcp", a.listen)
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(time.Minute))
		r := bufio.NewReader(c)
		for range 30 {
			io.WriteString(c, abusePost(`{"model":"narrow","prompt":"x"}`))
			resp, err := http.ReadResponse(r, &http.Request{Method: "POST"})
			if err != nil {
				t.Errorf("client %d: %v", i, err)
				return
			}
			io.Copy(io.Discard, resp.Body)
			switch {
			case resp.StatusCode == 200:
				served.Add(1)
			case resp.StatusCode == 503 && resp.Header.Get("Retry-After") != "":
				refused.Add(1)
				time.Sleep(time.Duration(rand.IntN(20)) * time.Millisecond)
			default:
				t.Errorf("client %d: status %d, Retry-After %q", i, resp.StatusCode, resp.Header.Get("Retry-After"))
			}
		}
	})
	t.Logf("%d are served, %d refused, at most %d at a time", served.Load(), refused.Load(), a.narrow.most.Load())
	if most := a.narrow.most.Load(); most != narrowWidth {
		t.Errorf("the engine had %d requests at a time, want %d", most, narrowWidth)
	}
	if served.Load() == 0 || refused.Load() == 0 {
		t.Errorf("%d are served and %d refused", served.Load(), refused.Load())
	}
}
