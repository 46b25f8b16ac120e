package proxy

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/big"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// tongue is one way for a client to speak to the proxy.
type tongue struct {
	name      string
	tls, http string // tls: "" or "tls"; http: "1" or "2"
}

var tongues = []tongue{
	{"plain HTTP/1.1", "", "1"},
	{"h2c", "", "2"},
	{"TLS HTTP/1.1", "tls", "1"},
	{"TLS HTTP/2", "tls", "2"},
}

// certificate is made once for all tests; clients do not check its name.
var certificate = sync.OnceValue(func() tls.Certificate {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		panic(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
})

// listenTLS has the rig's server serve TLS as well, and returns where.
func (r *rig) listenTLS() string {
	r.t.Helper()
	return r.listen("127.0.0.1:0", func(l net.Listener) error {
		return r.s.ServeTLS(l, &tls.Config{Certificates: []tls.Certificate{certificate()}})
	})
}

func (r *rig) listen(addr string, serve func(net.Listener) error) string {
	r.t.Helper()
	lc := net.ListenConfig{}
	lc.SetMultipathTCP(false)
	l, err := lc.Listen(context.Background(), "tcp", addr)
	if err != nil {
		r.t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- serve(l) }()
	r.t.Cleanup(func() {
		r.shutdown(5 * time.Second)
		if err := <-served; err != ErrClosed {
			r.t.Errorf("serving %s returned %v", l.Addr(), err)
		}
	})
	return l.Addr().String()
}

// speaker is a client of net/http that speaks a tongue.
type speaker struct {
	*http.Client
	url string
}

// speak returns a client that speaks to.
func (r *rig) speak(to tongue) speaker {
	r.t.Helper()
	t := &http.Transport{Protocols: new(http.Protocols), DisableCompression: true, MaxIdleConnsPerHost: 100,
		ExpectContinueTimeout: 10 * time.Second}
	url := "http://" + r.addr
	if to.tls != "" {
		url = "https://" + r.listenTLS()
		t.TLSClientConfig = &tls.Config{InsecureSkipVerify: true}
	}
	t.Protocols.SetHTTP1(to.http == "1")
	t.Protocols.SetHTTP2(to.http == "2" && to.tls != "")
	t.Protocols.SetUnencryptedHTTP2(to.http == "2" && to.tls == "")
	r.t.Cleanup(t.CloseIdleConnections)
	return speaker{&http.Client{Transport: t, Timeout: 30 * time.Second}, url}
}

func (c speaker) post(t testing.TB, body string) (*http.Response, error) {
	t.Helper()
	return c.do(t, http.MethodPost, "/v1/chat/completions", strings.NewReader(body), http.Header{"Content-Type": {"application/json"}})
}

func (c speaker) do(t testing.TB, method, path string, body io.Reader, h http.Header) (*http.Response, error) {
	t.Helper()
	req, err := http.NewRequest(method, c.url+path, body)
	if err != nil {
		t.Fatal(err)
	}
	for name, values := range h {
		req.Header[name] = values
	}
	return c.Do(req)
}

// told is what a client is told that all tongues must tell alike.
func told(resp *http.Response, body []byte) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d\n", resp.StatusCode)
	var names []string
	for name := range resp.Header {
		switch name {
		case "Connection", "Keep-Alive", "Transfer-Encoding", "Date", "X-Inferrail-Predicted-Ms":
		default:
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		fmt.Fprintf(&b, "%s: %q\n", name, resp.Header[name])
	}
	for name, values := range resp.Trailer {
		fmt.Fprintf(&b, "trailer %s: %q\n", name, values)
	}
	if len(body) > 200 {
		fmt.Fprintf(&b, "%d bytes, %q..., sum %d", len(body), body[:100], sum(body))
	} else {
		fmt.Fprintf(&b, "%q", body)
	}
	return b.String()
}

// storyEngine answers by what the request's user field asks for.
func storyEngine(c *engineSide) {
	for {
		req := c.request()
		if req == nil {
			return
		}
		body, _ := io.ReadAll(req.Body)
		switch req.Header.Get("Story") {
		case "chunks":
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Inferrail-Cached-Tokens: 7\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n"+
				chunk("data: 1\n\n")+chunk("data: 2\n\n")+"0\r\nX-Sum: 5\r\n\r\n")
		case "until close":
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n"+strings.Repeat("abc", 50_000))
			return
		case "no type":
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>")
		case "204":
			io.WriteString(c, "HTTP/1.1 204 No Content\r\n\r\n")
		case "503":
			io.WriteString(c, "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\nX-A: 1\r\nX-A: 2\r\n\r\nno")
		case "early hints":
			io.WriteString(c, "HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"+fixed("{}"))
		case "fields":
			var names []string
			for name, values := range req.Header {
				names = append(names, fmt.Sprint(name, values))
			}
			slices.Sort(names)
			io.WriteString(c, fixed(req.Method+" "+req.RequestURI+" "+strings.Join(names, " ")))
		case "large":
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n")
			for i := range 1 << 10 {
				io.WriteString(c, chunk(strings.Repeat(string(rune('a'+i%26)), 32<<10)))
			}
			io.WriteString(c, "0\r\n\r\n")
		case "nonsense":
			io.WriteString(c, "no HTTP at all\r\n\r\n")
			return
		default:
			io.WriteString(c, fixed(fmt.Sprintf(`{"got":%d,"sum":%d}`, len(body), sum(body))))
		}
	}
}

// soon is when an engine must know that its client has left. A machine that is
// busy with the race detector is given more time.
var soon = func() time.Duration {
	if raceDetector {
		return time.Second
	}
	return 100 * time.Millisecond
}()

func sum(p []byte) uint32 { return crc32.ChecksumIEEE(p) }

// TestTongues: the same requests get the same answers in every tongue.
func TestTongues(t *testing.T) {
	big := `{"model":"m","x":"` + strings.Repeat("x", 64<<20-40) + `"}`
	type request struct {
		method, path string
		header       http.Header
		body         string
		unsized      bool // no Content-Length
	}
	ask := func(story string) request {
		return request{"POST", "/v1/chat/completions", http.Header{"Story": {story}, "X-Request-Id": {"id-1"}}, hello, false}
	}
	stories := []struct {
		name string
		request
		status int
	}{
		{"fixed", ask(""), 200},
		{"unsized body", request{"POST", "/v1/chat/completions", nil, hello, true}, 200},
		{"chunks and a trailer", ask("chunks"), 200},
		{"body until close", ask("until close"), 200},
		{"32 MiB answered", ask("large"), 200},
		{"no content type", ask("no type"), 200},
		{"no body", ask("204"), 204},
		{"the engine refuses", ask("503"), 503},
		{"interim", ask("early hints"), 200},
		{"fields", request{"POST", "/v1/chat/completions?a=b;c&d=%2F", http.Header{
			"Story": {"fields"}, "X-Request-Id": {"id-1"}, "Authorization": {"Bearer k"}, "X-Forwarded-For": {"1.2.3.4"},
			"Forwarded": {"for=me"}, "X-Inferrail-Budget-Ms": {"5"}, "Accept-Encoding": {"br"}, "Cookie": {"a=b"}, "User-Agent": {"me"}}, hello, false}, 200},
		{"not HTTP", ask("nonsense"), 502},
		{"models", request{"GET", "/v1/models", http.Header{"X-Request-Id": {"id-1"}}, "", false}, 200},
		{"HEAD of models", request{"HEAD", "/v1/models", http.Header{"X-Request-Id": {"id-1"}}, "", false}, 200},
		{"OPTIONS", request{"OPTIONS", "/v1/models", http.Header{"X-Request-Id": {"id-1"}}, "", false}, 0},
		{"unknown path", request{"GET", "/nowhere", http.Header{"X-Request-Id": {"id-1"}}, "", false}, 404},
		{"wrong method", request{"GET", "/v1/chat/completions", http.Header{"X-Request-Id": {"id-1"}}, "", false}, 405},
		{"not JSON", request{"POST", "/v1/chat/completions", http.Header{"X-Request-Id": {"id-1"}}, "{", false}, 400},
		{"empty", request{"POST", "/v1/chat/completions", http.Header{"X-Request-Id": {"id-1"}}, "", false}, 400},
		{"unknown model", request{"POST", "/v1/chat/completions", http.Header{"X-Request-Id": {"id-1"}}, `{"model":"x"}`, false}, 404},
		{"Expect", request{"POST", "/v1/chat/completions", http.Header{"Expect": {"100-continue"}}, hello, false}, 200},
		{"64 MiB", request{"POST", "/v1/chat/completions", nil, big, false}, 200},
		{"8 MiB, unsized", request{"POST", "/v1/chat/completions", nil, big[:8<<20] + "\"}", true}, 200},
		{"too large", request{"POST", "/v1/chat/completions", http.Header{"X-Request-Id": {"id-1"}, "Expect": {"100-continue"}}, big + strings.Repeat(" ", 100), false}, 413},
		{"head too large", request{"POST", "/v1/chat/completions", http.Header{"A": {strings.Repeat("a", 16<<10)}}, hello, false}, 431},
	}
	e := newRawEngine(t, storyEngine)
	r := newRig(t, Limits{}, nil, e.url())
	var speakers []speaker
	for _, to := range tongues {
		speakers = append(speakers, r.speak(to))
	}
	for _, s := range stories {
		t.Run(s.name, func(t *testing.T) {
			var want string
			for i, c := range speakers {
				var body io.Reader
				if s.body != "" {
					body = strings.NewReader(s.body)
				}
				if s.unsized {
					body = struct{ io.Reader }{body}
				}
				resp, err := c.do(t, s.method, s.path, body, s.header)
				if err != nil && s.status == 431 && tongues[i].http == "2" {
					continue // the client was told the limit and keeps to it
				}
				if err != nil {
					t.Fatalf("%s: %v", tongues[i].name, err)
				}
				got, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				if err != nil {
					t.Errorf("%s: the body ends with %v", tongues[i].name, err)
				}
				if s.status != 0 && resp.StatusCode != s.status {
					t.Errorf("%s: got %d %q", tongues[i].name, resp.StatusCode, got)
				}
				if s.header.Get("X-Request-Id") == "" {
					if resp.Header.Get("X-Request-Id") == "" && resp.StatusCode != 431 {
						t.Errorf("%s: no request id", tongues[i].name)
					}
					resp.Header.Del("X-Request-Id")
				}
				if resp.Header.Get("X-Inferrail-Predicted-Ms") != "" {
					// What is expected is learned from each answer.
					resp.Header.Set("X-Inferrail-Predicted-Ms", "some")
				}
				if now := told(resp, got); want == "" {
					want = now
				} else if now != want {
					t.Errorf("%s tells\n%s\nplain HTTP/1.1\n%s", tongues[i].name, now, want)
				}
			}
		})
	}
}

// reasons is how many responses were copied for which reason.
func (r *rig) reasons() map[string]uint64 {
	m := map[string]uint64{}
	for _, t := range r.s.Datapath().Responses {
		m[t.Reason] += t.Count
	}
	return m
}

// TestTonguesAreCounted: with a kernel datapath the reason says what was in its
// way, and each client connection counts once.
func TestTonguesAreCounted(t *testing.T) {
	release := make(chan struct{})
	letGo := sync.OnceFunc(func() { close(release) })
	defer letGo()
	e := newRawEngine(t, func(c *engineSide) {
		for c.request() != nil {
			io.WriteString(c, chunkedHead+chunk("x"))
			<-release
			io.WriteString(c, "0\r\n\r\n")
		}
	})
	r := newRig(t, Limits{}, newFakeKernel(t), e.url())
	var bodies []io.ReadCloser
	for _, to := range tongues[1:] {
		resp, err := r.speak(to).post(t, hello)
		if err != nil {
			t.Fatal(err)
		}
		bodies = append(bodies, resp.Body)
	}
	if n := r.s.Datapath().Connections; n != 3 {
		t.Errorf("%d connections are counted", n)
	}
	letGo()
	for _, b := range bodies {
		io.Copy(io.Discard, b)
		b.Close()
	}
	eventually(t, 20*time.Second, "all are counted", func() bool {
		m := r.reasons()
		return m["http2"] == 2 && m["tls"] == 1
	})
}

// TestTonguesStream: each event arrives before the engine sends the next, and
// the head before the first.
func TestTonguesStream(t *testing.T) {
	for _, to := range tongues {
		t.Run(to.name, func(t *testing.T) {
			next := make(chan struct{})
			last := sync.OnceFunc(func() { close(next) })
			defer last()
			e := newRawEngine(t, func(c *engineSide) {
				if c.request() == nil {
					return
				}
				io.WriteString(c, chunkedHead)
				for range next {
					io.WriteString(c, chunk("data: token\n\n"))
				}
				io.WriteString(c, "0\r\n\r\n")
				c.request()
			})
			r := newRig(t, Limits{}, nil, e.url())
			resp, err := r.speak(to).post(t, hello)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			var took []time.Duration
			buf := make([]byte, 100)
			for range 100 {
				began := time.Now()
				next <- struct{}{}
				n, err := io.ReadAtLeast(resp.Body, buf, len("data: token\n\n"))
				if err != nil || string(buf[:n]) != "data: token\n\n" {
					t.Fatalf("got %q, %v", buf[:n], err)
				}
				took = append(took, time.Since(began))
			}
			last()
			if rest, err := io.ReadAll(resp.Body); err != nil || len(rest) > 0 {
				t.Errorf("ends with %q, %v", rest, err)
			}
			slices.Sort(took)
			t.Logf("an event takes %v, at most %v", took[len(took)/2], took[len(took)-1])
		})
	}
}

// TestTonguesCutAnswer: an answer that the engine breaks off is never taken for
// complete, whatever its framing.
func TestTonguesCutAnswer(t *testing.T) {
	for name, begin := range map[string]string{
		"chunks":      chunkedHead + chunk("data: 1\n\n"),
		"fixed":       "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nabc",
		"until close": "HTTP/1.1 200 OK\r\n\r\nabc",
	} {
		for _, to := range tongues {
			t.Run(name+" over "+to.name, func(t *testing.T) {
				got := make(chan struct{})
				goOn := sync.OnceFunc(func() { close(got) })
				defer goOn()
				e := newRawEngine(t, func(c *engineSide) {
					if c.request() == nil {
						return
					}
					io.WriteString(c, begin)
					<-got
					c.SetLinger(0)
				})
				r := newRig(t, Limits{}, nil, e.url())
				resp, err := r.speak(to).post(t, hello)
				if err != nil {
					t.Fatal(err)
				}
				defer resp.Body.Close()
				if _, err := io.ReadFull(resp.Body, make([]byte, 3)); err != nil {
					t.Fatal(err)
				}
				goOn()
				if _, err := io.ReadAll(resp.Body); err == nil {
					t.Error("the cut answer ends like a whole one")
				}
				if to.http == "2" && err != nil && !strings.Contains(err.Error(), "INTERNAL_ERROR") {
					t.Errorf("the stream ends with %v", err)
				}
				eventually(t, 20*time.Second, "it is counted", func() bool { return r.outcome("engine_broke") == 1 })
			})
		}
	}
}

// TestTonguesCutAnswerArrives: what the engine sent before it broke off comes to
// the client, in every tongue: the cut does not overtake it.
func TestTonguesCutAnswerArrives(t *testing.T) {
	for _, to := range tongues {
		t.Run(to.name, func(t *testing.T) {
			e := newRawEngine(t, func(c *engineSide) {
				if c.request() != nil {
					io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nabc")
				}
			})
			s := newRig(t, Limits{}, nil, e.url()).speak(to)
			for i := range 100 {
				resp, err := s.post(t, hello)
				if err != nil {
					t.Fatalf("answer %d has no head: %v", i, err)
				}
				body, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				if string(body) != "abc" || err == nil {
					t.Fatalf("answer %d: %q, %v", i, body, err)
				}
			}
		})
	}
}

// TestTLSCutHasNoCloseNotify: the TLS client sees a reset.
func TestTLSCutHasNoCloseNotify(t *testing.T) {
	got := make(chan struct{})
	goOn := sync.OnceFunc(func() { close(got) })
	defer goOn()
	e := newRawEngine(t, func(c *engineSide) {
		if c.request() == nil {
			return
		}
		io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\nabc")
		<-got
		c.SetLinger(0)
	})
	r := newRig(t, Limits{}, nil, e.url())
	c, err := tls.Dial("tcp", r.listenTLS(), &tls.Config{InsecureSkipVerify: true})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(20 * time.Second))
	io.WriteString(c, post(hello))
	var seen bytes.Buffer
	buf := make([]byte, 100)
	for !bytes.Contains(seen.Bytes(), []byte("abc")) {
		n, err := c.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		seen.Write(buf[:n])
	}
	goOn()
	if _, err := c.Read(buf); err == nil || err == io.EOF {
		t.Errorf("the connection ends with %v", err)
	}
}

// TestTonguesClientLeaves: the engine is told within 100 ms, in whatever phase.
func TestTonguesClientLeaves(t *testing.T) {
	for phase, begin := range map[string]string{
		"before the head": "",
		"after the head":  chunkedHead,
		"within the body": chunkedHead + chunk("x"),
	} {
		for _, to := range tongues {
			t.Run(phase+" over "+to.name, func(t *testing.T) {
				reached := make(chan struct{})
				left := make(chan time.Time, 1)
				noticed := make(chan time.Duration, 1)
				e := newRawEngine(t, func(c *engineSide) {
					c.request()
					io.WriteString(c, begin)
					close(reached)
					at := <-left
					c.SetReadDeadline(time.Now().Add(5 * time.Second))
					io.Copy(io.Discard, c.br)
					noticed <- time.Since(at)
				})
				r := newRig(t, Limits{}, nil, e.url())
				c := r.speak(to)
				ctx, cancel := context.WithCancel(context.Background())
				defer cancel()
				req, err := http.NewRequestWithContext(ctx, "POST", c.url+"/v1/chat/completions", strings.NewReader(hello))
				if err != nil {
					t.Fatal(err)
				}
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					resp, err := c.Do(req)
					if err == nil {
						io.Copy(io.Discard, resp.Body)
						resp.Body.Close()
					}
				}()
				<-reached
				time.Sleep(10 * time.Millisecond)
				left <- time.Now()
				cancel()
				if d := <-noticed; d > soon {
					t.Errorf("the engine's connection closed after %v", d)
				}
				<-ended
				eventually(t, 20*time.Second, "it is counted", func() bool { return r.outcome("client_left") == 1 })
			})
		}
	}
}

// TestTLSClientLeaves: however a TLS client leaves, with requests waiting behind
// the running one or not, the engine is told within 100 ms.
func TestTLSClientLeaves(t *testing.T) {
	for how, leave := range map[string]func(*tls.Conn){
		"closes":       func(c *tls.Conn) { c.Close() },
		"half closes":  func(c *tls.Conn) { c.CloseWrite() },
		"says nothing": func(c *tls.Conn) { c.NetConn().Close() },
		"resets": func(c *tls.Conn) {
			c.NetConn().(*net.TCPConn).SetLinger(0)
			c.NetConn().Close()
		},
	} {
		for what, behind := range map[string]string{"alone": "", "a request behind": post(hello), "much behind": post(hello, "A: "+strings.Repeat("a", 9000)+"\r\n")} {
			t.Run(how+", "+what, func(t *testing.T) {
				reached := make(chan struct{})
				left := make(chan time.Time, 1)
				noticed := make(chan time.Duration, 1)
				e := newRawEngine(t, func(c *engineSide) {
					c.request()
					io.WriteString(c, chunkedHead+chunk("x"))
					close(reached)
					at := <-left
					c.SetReadDeadline(time.Now().Add(5 * time.Second))
					io.Copy(io.Discard, c.br)
					noticed <- time.Since(at)
				})
				r := newRig(t, Limits{}, nil, e.url())
				c, err := tls.Dial("tcp", r.listenTLS(), &tls.Config{InsecureSkipVerify: true})
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				io.WriteString(c, post(hello)+behind)
				<-reached
				c.SetDeadline(time.Now().Add(20 * time.Second))
				c.Read(make([]byte, 1)) // so that closing does not always reset
				time.Sleep(10 * time.Millisecond)
				left <- time.Now()
				leave(c)
				if d := <-noticed; d > soon {
					t.Errorf("the engine's connection closed after %v", d)
				}
			})
		}
	}
}

// TestTonguesStalledClient: what is held for a client that takes nothing stays
// bounded, it is cut at StallTimeout, and that is what is counted.
func TestTonguesStalledClient(t *testing.T) {
	for _, to := range tongues {
		t.Run(to.name, func(t *testing.T) {
			closed := make(chan int, 1)
			e := newRawEngine(t, func(c *engineSide) {
				if c.request() == nil {
					return
				}
				io.WriteString(c, chunkedHead)
				data, n := chunk(strings.Repeat("x", 60_000)), 0
				for {
					if _, err := io.WriteString(c, data); err != nil {
						closed <- n
						return
					}
					n += len(data)
				}
			})
			r := newRig(t, Limits{StallTimeout: 300 * time.Millisecond}, nil, e.url())
			resp, err := r.speak(to).post(t, hello)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			select {
			case n := <-closed:
				if n > 24<<20 {
					t.Errorf("the engine got rid of %d bytes", n)
				}
			case <-time.After(20 * time.Second):
				t.Fatal("the engine's connection stays open")
			}
			eventually(t, 20*time.Second, "it is counted", func() bool { return r.outcome("client_stalled") == 1 })
			if _, err := io.Copy(io.Discard, resp.Body); err == nil {
				t.Error("the cut answer ends like a whole one")
			}
		})
	}
}

// TestTonguesRefuseEarly: a request whose head is refused is answered while its
// body is still to come, and the body is not waited for.
func TestTonguesRefuseEarly(t *testing.T) {
	for _, to := range tongues {
		t.Run(to.name, func(t *testing.T) {
			r := newRig(t, Limits{MaxBodyBytes: 1 << 20}, nil, newRawEngine(t, storyEngine).url())
			c := r.speak(to)
			body, feed := io.Pipe()
			defer feed.Close()
			req, err := http.NewRequest("POST", c.url+"/v1/chat/completions", body)
			if err != nil {
				t.Fatal(err)
			}
			req.ContentLength = 2 << 20
			resp, err := c.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			got, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			if resp.StatusCode != 413 || !bytes.Contains(got, []byte("RequestEntityTooLargeError")) {
				t.Errorf("got %d %q", resp.StatusCode, got)
			}
		})
	}
}

// TestTonguesRefuseWithinBody: a body that turns out too large is answered while
// it is still being sent.
func TestTonguesRefuseWithinBody(t *testing.T) {
	for _, to := range tongues {
		t.Run(to.name, func(t *testing.T) {
			r := newRig(t, Limits{MaxBodyBytes: 256 << 10}, nil, newRawEngine(t, storyEngine).url())
			body, feed := io.Pipe()
			fed := make(chan struct{})
			go func() {
				defer close(fed)
				for piece := bytes.Repeat([]byte(" "), 16<<10); ; time.Sleep(time.Millisecond) {
					if _, err := feed.Write(piece); err != nil {
						return // answered, and so given up
					}
				}
			}()
			resp, err := r.speak(to).do(t, "POST", "/v1/chat/completions", body, nil)
			if err != nil {
				t.Error(err)
			} else {
				got, _ := io.ReadAll(resp.Body)
				resp.Body.Close()
				if resp.StatusCode != 413 || !bytes.Contains(got, []byte("RequestEntityTooLargeError")) {
					t.Errorf("got %d %q", resp.StatusCode, got)
				}
			}
			body.Close()
			<-fed
		})
	}
}

// TestTonguesDrain: running streams finish, idle connections close, and
// nothing is left.
func TestTonguesDrain(t *testing.T) {
	for _, to := range tongues {
		t.Run(to.name, func(t *testing.T) {
			release := make(chan struct{})
			letGo := sync.OnceFunc(func() { close(release) })
			defer letGo()
			e := newRawEngine(t, func(c *engineSide) {
				for c.request() != nil {
					io.WriteString(c, chunkedHead+chunk("first "))
					<-release
					io.WriteString(c, chunk("last")+"0\r\n\r\n")
				}
			})
			r := newRig(t, Limits{}, nil, e.url())
			c := r.speak(to)
			idle := r.speak(to)
			if resp, err := idle.do(t, "GET", "/v1/models", nil, nil); err != nil {
				t.Fatal(err)
			} else {
				io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
			resp, err := c.post(t, hello)
			if err != nil {
				t.Fatal(err)
			}
			down := make(chan error, 1)
			go func() {
				ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
				defer cancel()
				down <- r.s.Shutdown(ctx)
			}()
			eventually(t, 10*time.Second, "the idle connection closes", func() bool { return r.s.Datapath().Connections == 1 })
			letGo()
			body, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if err != nil || string(body) != "first last" {
				t.Errorf("the running stream ends with %q, %v", body, err)
			}
			if err := <-down; err != nil {
				t.Errorf("Shutdown returned %v", err)
			}
		})
	}
}

// TestTonguesShutdownCuts: at the deadline what runs is cut, visibly.
func TestTonguesShutdownCuts(t *testing.T) {
	for _, to := range tongues {
		t.Run(to.name, func(t *testing.T) {
			e := newRawEngine(t, func(c *engineSide) {
				if c.request() != nil {
					io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\nabc")
					c.waitClosed()
				}
			})
			r := newRig(t, Limits{}, nil, e.url())
			resp, err := r.speak(to).post(t, hello)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			if err := r.shutdown(50 * time.Millisecond); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("Shutdown returned %v", err)
			}
			if _, err := io.ReadAll(resp.Body); err == nil {
				t.Error("the cut answer ends like a whole one")
			}
		})
	}
}

// TestTLSHandshake: what is not a handshake ends with a clear answer or at
// HeadTimeout.
func TestTLSHandshake(t *testing.T) {
	r := newRig(t, Limits{HeadTimeout: time.Second}, nil)
	addr := r.listenTLS()
	dial := func(begin string) *client {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		c.SetDeadline(time.Now().Add(20 * time.Second))
		io.WriteString(c, begin)
		return &client{c.(*net.TCPConn), t, nil}
	}
	silent, half := dial(""), dial("\x16\x03\x01\x02\x00\x01")
	plain, other := dial(post(hello)), dial("ssh-2.0 nonsense that is no TLS")
	read := func(c *client) string {
		b, _ := io.ReadAll(c.TCPConn)
		return string(b)
	}
	if got := read(plain); !strings.HasPrefix(got, "HTTP/1.1 400") || !strings.Contains(got, "use https") {
		t.Errorf("plain HTTP gets %q", got)
	}
	if got := read(other); strings.Contains(got, "HTTP") {
		t.Errorf("nonsense gets %q", got)
	}
	if got := read(silent); got != "" {
		t.Errorf("silence gets %q", got)
	}
	if got := read(half); got != "" {
		t.Errorf("half a hello gets %q", got)
	}
	if _, err := tls.Dial("tcp", addr, &tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS11}); err == nil {
		t.Error("TLS 1.1 is spoken")
	}
	eventually(t, 20*time.Second, "all connections close", func() bool { return r.s.Datapath().Connections == 0 })
}

// TestTLSMalformed: a malformed request gets the very answer that it gets
// without TLS.
func TestTLSMalformed(t *testing.T) {
	r := newRig(t, Limits{HeadTimeout: 2 * time.Second}, nil, newRawEngine(t, storyEngine).url())
	addr := r.listenTLS()
	requests := append([]string{
		"GET / HTTP/1.1\r\nHost: x\r\n",  // never ends
		"PRI * HTTP/2.0\r\n\r\nSM\r\n\r", // nor does this
		"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n",
		"\x00\x01",
		"GET /v1/models HTTP/3.0\r\n\r\n",
		post(hello) + post(hello, "Connection: close\r\n"),
		"GET /v1/models HTTP/1.0\r\nx-request-id: a\r\n\r\n",
	}, smuggled...)
	t.Run("each", func(t *testing.T) {
		for i, request := range requests {
			t.Run(fmt.Sprint(i), func(t *testing.T) {
				t.Parallel()
				send := func(c net.Conn) string {
					defer c.Close()
					c.SetDeadline(time.Now().Add(20 * time.Second))
					io.WriteString(c, request)
					got, err := io.ReadAll(c)
					if err != nil || len(got) == 0 {
						t.Errorf("%q ends with %q, %v", request, got, err)
					}
					return withoutVarying(got)
				}
				plain, err := net.Dial("tcp", r.addr)
				if err != nil {
					t.Fatal(err)
				}
				want := send(plain)
				secure, err := tls.Dial("tcp", addr, &tls.Config{InsecureSkipVerify: true})
				if err != nil {
					t.Fatal(err)
				}
				if got := send(secure); got != want {
					t.Errorf("%q over TLS gets\n%s\nwithout\n%s", request, got, want)
				}
			})
		}
	})
}

var smuggled = []string{
	post(hello, "Transfer-Encoding: chunked\r\n"),
	post(hello, "Content-Length: 5\r\n"),
	post(hello, "A : b\r\n"),
	post(hello, "A: b\rc\r\n"),
	post(hello, "A: b\n"),
	"POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
	"POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
}

// withoutVarying takes Date and request ids out of raw answers.
func withoutVarying(p []byte) string {
	var b strings.Builder
	for line := range strings.Lines(string(p)) {
		if !strings.HasPrefix(line, "Date:") && !strings.HasPrefix(line, "x-request-id:") {
			b.WriteString(line)
		}
	}
	return b.String()
}

// TestTLSKeepAlive: many requests, pipelined too, on one TLS connection.
func TestTLSKeepAlive(t *testing.T) {
	r := newRig(t, Limits{}, nil, newRawEngine(t, storyEngine).url())
	addr := r.listenTLS()
	c, err := tls.Dial("tcp", addr, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"http/1.1"}})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(20 * time.Second))
	go io.WriteString(c, strings.Repeat(post(hello), 100)+post(hello, "Connection: close\r\n"))
	all, err := io.ReadAll(c)
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(all), "HTTP/1.1 200"); n != 101 {
		t.Errorf("%d answers", n)
	}
	if n := r.s.stats.accepted.Load(); n != 1 {
		t.Errorf("%d connections were accepted", n)
	}
}

// TestTonguesIPv6: listeners of IPv6 serve every tongue.
func TestTonguesIPv6(t *testing.T) {
	if l, err := net.Listen("tcp", "[::1]:0"); err != nil {
		t.Skip("this machine has no IPv6: ", err)
	} else {
		l.Close()
	}
	r := newRig(t, Limits{}, nil, newRawEngine(t, storyEngine).url())
	plain := r.listen("[::1]:0", r.s.Serve)
	secure := r.listen("[::1]:0", func(l net.Listener) error {
		return r.s.ServeTLS(l, &tls.Config{Certificates: []tls.Certificate{certificate()}})
	})
	for _, to := range tongues {
		c := r.speak(to)
		c.url = "http://" + plain
		if to.tls != "" {
			c.url = "https://" + secure
		}
		resp, err := c.post(t, hello)
		if err != nil {
			t.Fatalf("%s: %v", to.name, err)
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		if resp.StatusCode != 200 {
			t.Errorf("%s: got %d", to.name, resp.StatusCode)
		}
	}
}
