package proxy

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// FuzzServe sends the same bytes to our serve loop, with an engine behind it
// that echoes, and to net/http's with a handler that does the same, and
// compares what comes back: each answer's status, the body of those that are
// well, and whether the connection goes on.
//
// Where they differ we refuse and net/http does not, or the other way round.
// Each kind has its reason below; anything else is a failure. What must not
// happen, and has no reason, is that both accept a request and see different
// bodies or a different number of requests: that is smuggling.
func FuzzServe(f *testing.F) {
	for _, seed := range serveSeeds {
		f.Add([]byte(seed))
	}
	ours, theirs := startBoth(f)
	f.Fuzz(func(t *testing.T, input []byte) {
		if bytes.Contains(input, []byte("HEAD")) || bytes.Contains(input, []byte("CONNECT")) || len(input) > 16<<10 {
			t.Skip() // the answers' framing depends on the method
		}
		compareServers(t, ours, theirs, input)
	})
}

var serveSeeds = []string{
	"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
	"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n",
	"GET /health HTTP/1.0\r\n\r\n",
	"GET /health HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\nGET /health HTTP/1.0\r\n\r\n",
	"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n",
	"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
	"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 7\r\n\r\n{\"a\":1}POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
	"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1;a=b\r\n}\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n",
	"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nA: b\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n",
	"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
	"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
	"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: +2\r\n\r\n{}",
	"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2, 2\r\n\r\n{}",
	"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n",
	"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
	"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
	"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
	"POST /v1/completions HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
	"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\n{}\r\n0\r\n\r\n",
	"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n",
	"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}0\r\n\r\n\r\n",
	"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nContent-Length: 5\r\n\r\n",
	"GET /health HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n",
	"GET /health HTTP/1.1\nHost: x\n\n",
	"GET /health HTTP/1.1\r\n\r\n",
	"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
	"GET /health HTTP/1.1\r\nHost: x\r\nA\x00: b\r\n\r\n",
	"GET /health HTTP/1.1\r\nHost: x\r\nA: b\rc\r\n\r\n",
	"GET  /health HTTP/1.1\r\nHost: x\r\n\r\n",
	"GET /health HTTP/1.1 \r\nHost: x\r\n\r\n",
	"G\x00T /health HTTP/1.1\r\nHost: x\r\n\r\n",
	"GET /health HTTP/1.2\r\nHost: x\r\n\r\n",
	"GET /health HTTP/2.0\r\nHost: x\r\n\r\n",
	"GET http://a/health HTTP/1.1\r\nHost: x\r\n\r\n",
	"GET health HTTP/1.1\r\nHost: x\r\n\r\n",
	"GET /%zz HTTP/1.1\r\nHost: x\r\n\r\n",
	"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
	"\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n",
	"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
	"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: x\r\nContent-Length: 2\r\n\r\n{}",
	"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\n\r\n{}",
	"GET /health HTTP/1.1\r\nHo",
	"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabcGET /health HTTP/1.1\r\nHost: x\r\n\r\n",
}

// startBoth starts the two servers and returns their addresses.
func startBoth(f *testing.F) (ours, theirs string) {
	const quick = 60 * time.Millisecond
	serve := func(h http.HandlerFunc) string {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			f.Fatal(err)
		}
		s := &http.Server{Handler: h, ReadTimeout: quick, IdleTimeout: quick, MaxHeaderBytes: 16 << 10,
			DisableGeneralOptionsHandler: true, ErrorLog: log.New(io.Discard, "", 0)}
		go s.Serve(l)
		f.Cleanup(func() { s.Close() })
		return l.Addr().String()
	}
	echo := func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		w.Header().Set("Content-Length", fmt.Sprint(len(body)))
		w.Write(body)
	}
	m := &Model{Name: "m"}
	fleet := &Fleet{Models: map[string]*Model{"m": m}, Listed: []*Model{m}}
	theirs = serve(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		_, path := originForm([]byte(r.RequestURI))
		route, _ := routeOf(path)
		x := &exchange{body: body}
		switch {
		case r.Method == "OPTIONS" && (route != routeUnknown || r.RequestURI == "*"):
			w.WriteHeader(204)
		case route == routeUnknown:
			w.WriteHeader(404)
		case route < routeModels && r.Method != "POST", route >= routeModels && r.Method != "GET" && r.Method != "HEAD":
			w.WriteHeader(405)
		case route == routeHealth:
		case route == routeModels:
			w.Write(appendModels(nil, fleet.Listed, nil))
		default:
			if failed := x.findModel(fleet); failed != none {
				w.WriteHeader(failureTable[failed].status)
				return
			}
			echo(w, r)
		}
	})
	replica, err := NewReplica(0, "e", "http://"+serve(echo))
	if err != nil {
		f.Fatal(err)
	}
	m.Replicas = []*Replica{replica}
	s := New(Limits{IdleTimeout: quick, HeadTimeout: quick, BodyTimeout: quick, UpstreamIdle: quick / 2}, nil, nil)
	s.SetFleet(fleet)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		f.Fatal(err)
	}
	go s.Serve(l)
	f.Cleanup(func() {
		s.Shutdown(f.Context())
		replica.Close()
	})
	return l.Addr().String(), theirs
}

// reply is one answer as the comparison sees it.
type reply struct {
	status int
	body   string
	close  bool
}

func exchangeBytes(t *testing.T, addr string, input []byte) (replies []reply) {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(5 * time.Second))
	go c.Write(input)
	br := bufio.NewReader(c)
	for {
		resp, err := http.ReadResponse(br, nil)
		if err != nil {
			if strings.Contains(err.Error(), "timeout") {
				t.Fatalf("%q: the server hangs", input)
			}
			return replies
		}
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatalf("%q: an answer breaks off: %v", input, err)
		}
		if resp.StatusCode == 100 {
			continue
		}
		replies = append(replies, reply{resp.StatusCode, string(body), resp.Close})
	}
}

// refusals are the statuses of a request that could not be read.
func (r reply) refused() bool {
	switch r.status {
	case 400, 408, 413, 417, 431, 501, 505:
		return r.close
	}
	return false
}

func compareServers(t *testing.T, ours, theirs string, input []byte) {
	a, b := exchangeBytes(t, ours, input), exchangeBytes(t, theirs, input)
	for i := 0; i < len(a) || i < len(b); i++ {
		var x, y reply
		if i < len(a) {
			x = a[i]
		}
		if i < len(b) {
			y = b[i]
		}
		switch {
		case x.status == y.status && x.close == y.close && (x.status != 200 || x.body == y.body):
		case x.refused() && (y.status == 0 || y.refused()):
			// net/http answers a request that does not arrive in time, or
			// whose body is malformed, by closing; and other refusals with
			// other statuses.
			return
		case x.refused():
			// Stricter on purpose, because engines and proxies differ in how
			// they read these: bare LF, folded fields, spaces around names,
			// Content-Length with Transfer-Encoding or twice, a second Host,
			// versions other than 1.0 and 1.1, control characters.
			return
		case y.refused():
			// net/http checks what is no matter of framing and what we leave
			// to the engine: the URL's escapes, the Host field's characters,
			// a request target that is no path; and empty lines before a
			// request, which RFC 9112 wants ignored.
			if !lenient(input) {
				t.Fatalf("%q: net/http refuses request %d with %d, we answer %d %q", input, i, y.status, x.status, x.body)
			}
			return
		default:
			t.Fatalf("%q: answer %d: ours %+v, net/http's %+v", input, i, x, y)
		}
		if x.close {
			return
		}
	}
}

// lenient reports whether the input holds one of the things that net/http
// refuses and we do not.
func lenient(input []byte) bool {
	if bytes.IndexAny(input, "\r\n") == 0 || bytes.Contains(input, []byte("\n\r\n\r")) || bytes.Contains(input, []byte("\n\n")) {
		return true
	}
	for line := range bytes.SplitSeq(input, []byte("\r\n")) {
		name, value, ok := bytes.Cut(line, []byte(":"))
		odd := func(r rune) bool {
			return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '.' || r == '-' || r == ':')
		}
		if ok && bytes.EqualFold(name, []byte("host")) && bytes.IndexFunc(bytes.TrimSpace(value), odd) >= 0 {
			return true
		}
		if i := bytes.Index(line, []byte(" HTTP/1.")); i >= 0 && bytes.ContainsAny(line[:i], "%:[#\\*\"<>^`{|}?") {
			return true
		}
	}
	return false
}
