package proxy

import (
	"fmt"
	"strings"
	"testing"
)

func TestCheckLines(t *testing.T) {
	f := func(head string, ok bool) {
		t.Helper()
		if why := checkLines([]byte(head)); (why == "") != ok {
			t.Errorf("%q: %q", head, why)
		}
	}
	f("GET / HTTP/1.1\r\nHost: x\r\n\r\n", true)
	f("GET / HTTP/1.1\nHost: x\r\n\r\n", false)
	f("GET / HTTP/1.1\r\nHost: x\n\r\n", false)
	f("GET / HTTP/1.1\r\nHost: x\ry\r\n\r\n", false)
	f("GET / HTTP/1.1\r\nA: x\r\n y\r\n\r\n", false)
	f("GET / HTTP/1.1\r\nA: x\r\n\ty\r\n\r\n", false)
	f("GET / HTTP/1.1\r\n\r", false)
}

// TestFieldOf: whose business a field is, however it is written and however long.
func TestFieldOf(t *testing.T) {
	f := func(name string, want field) {
		t.Helper()
		for _, name := range []string{name, strings.ToLower(name), strings.ToUpper(name)} {
			if got := fieldOf([]byte(name)); got != want {
				t.Errorf("%s: %d, want %d", name, got, want)
			}
		}
	}
	f("X-Inferrail-Budget-Ms", fieldBudget)
	f("X-Inferrail-Budget-Msx", fieldOwn)
	f("X-Inferrail-Prompt-Tokens", fieldOwn)
	f("X-Inferrail-Whatever-Somebody-May-Think-Of", fieldOwn)
	f("Access-Control-Allow-Credentials", fieldCORS)
	f("Access-Control-Allow-Private-Network", fieldCORS)
	f("X-Ratelimit-Remaining-Requests-Of-The-Day", fieldLimit)
	f("Transfer-Encoding", fieldTransferEncoding)
	f("Transfer-Encoding-Of-Another-Kind", fieldOther)
	f("Proxy-Authorization", fieldHop)
	f(strings.Repeat("x", 10000), fieldOther)
	f("X", fieldOther)
	f("", fieldOther)
}

func TestRequestHead(t *testing.T) {
	replica, err := NewReplica(0, "e", "http://engine:8000/base/")
	if err != nil {
		t.Fatal(err)
	}
	f := func(in, want string) {
		t.Helper()
		var h requestHead
		if why := h.read([]byte(in + "\r\n")); why != "" {
			t.Errorf("%q: %s", in, why)
			return
		}
		got := string(h.appendTo(nil, asEngine{method: []byte("POST"), target: []byte("/v1/x?y"), replica: replica, id: []byte("id"), length: 7}))
		want = "POST /base/v1/x?y HTTP/1.1\r\nHost: engine:8000\r\n" + want + "x-request-id: id\r\nContent-Length: 7\r\n\r\n"
		if got != want {
			t.Errorf("%q:\ngot  %q\nwant %q", in, got, want)
		}
	}
	f("Host: x\r\n", "")
	f("host: x\r\nCONTENT-length: 3\r\nExpect: 100-continue\r\nX-Request-Id: a\r\n", "")
	// Spelling, order, repetition and odd values are the client's business.
	f("accept: a\r\nX-y:  b \r\nAccept: c\r\nEmpty:\r\n", "accept: a\r\nX-y: b\r\nAccept: c\r\nEmpty: \r\n")
	f("Cookie: a=b;c\r\nAuthorization: Bearer k\r\n", "Cookie: a=b;c\r\nAuthorization: Bearer k\r\n")
	f("Connection: close, X-Mine\r\nx-mine: 1\r\nX-Other: 2\r\n", "X-Other: 2\r\n")
	f("Connection: keep-alive\r\nKeep-Alive: 5\r\nTE: trailers\r\nUpgrade: h2c\r\nProxy-Connection: x\r\nTrailer: a\r\n", "")
	f("Proxy-Authorization: Basic k\r\n", "")
	f("Transfer-Encoding: Chunked\r\n", "")
	// What is the agent's own is not for engines, nor what looks like it.
	f("X-Inferrail-Budget-Ms: 5\r\nx-inferrail-priority: a\r\nX-Inferrail-Replica: e\r\nX-Inferrail-Something-That-Is-Rather-Long: 1\r\n", "")

	bad := func(in string) {
		t.Helper()
		var h requestHead
		if h.read([]byte(in+"\r\n")) == "" {
			t.Errorf("%q is taken", in)
		}
	}
	bad("Content-Length: 3\r\nTransfer-Encoding: chunked\r\n")
	bad("Content-Length: 3\r\ncontent-length: 3\r\n")
	bad("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n")
	bad("Transfer-Encoding: gzip, chunked\r\n")
	bad("Transfer-Encoding: identity\r\n")
	bad("Content Length: 3\r\n")
	bad(strings.Repeat("Connection: a\r\n", 5))
	bad("Expect: 100-continue\r\nExpect: x\r\n")
}

func TestRequestID(t *testing.T) {
	f := func(id string, ok bool) {
		t.Helper()
		var h requestHead
		h.read([]byte("X-Request-ID: " + id + "\r\n\r\n"))
		if (string(h.id) == id) != ok {
			t.Errorf("%q gives %q", id, h.id)
		}
	}
	f("a", true)
	f("Az09._:-", true)
	f(strings.Repeat("x", 128), true)
	f(strings.Repeat("x", 129), false)
	f("a b", false)
	f("a/b", false)
	f("é", false)
}

func TestResponseHead(t *testing.T) {
	to := asClient{keepAlive: true, id: []byte("id"), replica: "e0"}
	f := func(in string, to asClient, want string) {
		t.Helper()
		var h responseHead
		if err := h.read([]byte(in)); err != nil {
			t.Errorf("%q: %v", in, err)
			return
		}
		if got := string(h.appendTo(nil, to)); got != want {
			t.Errorf("%q:\ngot  %q\nwant %q", in, got, want)
		}
	}
	ours := "x-request-id: id\r\nx-inferrail-replica: e0\r\n"
	f("HTTP/1.1 200 OK\r\nserver: uvicorn\r\ndate: D\r\ncontent-type: a; b\r\ncontent-length: 5\r\nset-cookie: a=b; Path=/\r\nSet-Cookie: c\r\n\r\n", to,
		"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ndate: D\r\ncontent-type: a; b\r\nset-cookie: a=b; Path=/\r\nSet-Cookie: c\r\n"+ours+"Content-Length: 5\r\n\r\n")
	f("HTTP/1.1 429 Slow down, please\r\nRetry-After: 3\r\nContent-Length: 0\r\n\r\n", to,
		"HTTP/1.1 429 Slow down, please\r\nRetry-After: 3\r\n"+ours+"Content-Length: 0\r\n\r\n")
	f("HTTP/1.1 200 \r\ntransfer-encoding: chunked\r\nTrailer: X\r\nConnection: close, X-Hop\r\nX-Hop: 1\r\nkeep-alive: 5\r\nX-Request-Id: theirs\r\n\r\n", to,
		"HTTP/1.1 200 \r\nTrailer: X\r\n"+ours+"Transfer-Encoding: chunked\r\n\r\n")
	f("HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n", to, "HTTP/1.1 204 No Content\r\n"+ours+"\r\n")
	f("HTTP/1.0 200 OK\r\n\r\n", asClient{id: []byte("id"), replica: "e0"}, "HTTP/1.1 200 OK\r\n"+ours+"Connection: close\r\n\r\n")
	f("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X\r\n\r\n", asClient{http10: true, id: []byte("id"), replica: "e0"},
		"HTTP/1.1 200 OK\r\n"+ours+"Connection: close\r\n\r\n")
	f("HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n", asClient{http10: true, keepAlive: true, id: []byte("id"), replica: "e0"},
		"HTTP/1.1 200 OK\r\n"+ours+"Content-Length: 1\r\nConnection: keep-alive\r\n\r\n")
}

func TestResponseHeadFraming(t *testing.T) {
	f := func(fieldLines string, want bodyKind, length uint64, wantClose bool) {
		t.Helper()
		var h responseHead
		if err := h.read([]byte(fieldLines + "\r\n")); err != nil {
			t.Errorf("%q: %v", fieldLines, err)
		} else if h.body != want || h.length != length || h.close != wantClose {
			t.Errorf("%q: body %d, length %d, close %v", fieldLines, h.body, h.length, h.close)
		}
	}
	f("HTTP/1.1 200 OK\r\nContent-Length: 12\r\n", bodyFixed, 12, false)
	f("HTTP/1.1 200 OK\r\nContent-Length: 12\r\nConnection: close\r\n", bodyFixed, 12, true)
	f("HTTP/1.0 200 OK\r\nContent-Length: 12\r\n", bodyFixed, 12, true)
	f("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n", bodyChunked, 0, false)
	f("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n", bodyChunked, 0, true)
	f("HTTP/1.1 200 OK\r\n", bodyUntilClose, 0, true)
	f("HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n", bodyNone, 0, false)
	f("HTTP/1.1 100 Continue\r\n", bodyNone, 0, false)

	bad := func(head string) {
		t.Helper()
		var h responseHead
		if err := h.read([]byte(head + "\r\n")); err == nil {
			t.Errorf("%q is taken: %+v", head, h)
		}
	}
	bad("HTTP/1.1 20 OK\r\n")
	bad("HTTP/1.1 2000 OK\r\n")
	bad("ICY 200 OK\r\n")
	bad("HTTP/1.1\r\n")
	bad("HTTP/1.1  200 OK\r\n")
	bad("\r\nHTTP/1.1 200 OK\r\n")
	bad("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\n")
	bad("HTTP/1.1 200 OK\r\nContent-Length: -5\r\n")
	bad("HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n")
	bad("HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n")
	bad("HTTP/1.1 200 OK\r\nA: b\r\n c\r\n")
	bad("HTTP/1.1 200 OK\nContent-Length: 5\r\n")
	bad("HTTP/1.1 200 OK\r\nNo colon\r\n")
}

func TestOriginForm(t *testing.T) {
	f := func(uri, wantTarget, wantPath string) {
		t.Helper()
		if target, path := originForm([]byte(uri)); string(target) != wantTarget || string(path) != wantPath {
			t.Errorf("%s: %s, %s", uri, target, path)
		}
	}
	f("/v1/models", "/v1/models", "/v1/models")
	f("/v1/models?a=/b?c", "/v1/models?a=/b?c", "/v1/models")
	f("http://host:1/v1/models?x", "/v1/models?x", "/v1/models")
	f("http://host", "/", "/")
	f("/a#b", "/a", "/a")
}

func TestNewReplica(t *testing.T) {
	f := func(url, want string) {
		t.Helper()
		r, err := NewReplica(3, "id", url)
		if err != nil {
			t.Errorf("%s: %v", url, err)
			return
		}
		if got := fmt.Sprint(r.Slot, " ", r.Addr, " ", r.Host, " ", r.BasePath); got != want {
			t.Errorf("%s: %q", url, got)
		}
	}
	f("http://10.0.0.1:8000", "3 10.0.0.1:8000 10.0.0.1:8000 ")
	f("http://host", "3 host:80 host ")
	f("http://host:9/a/b/", "3 host:9 host:9 /a/b")
	f("http://[::1]:8000/", "3 [::1]:8000 [::1]:8000 ")

	bad := func(id, url string) {
		t.Helper()
		if r, err := NewReplica(0, id, url); err == nil {
			t.Errorf("%q %s is taken: %+v", id, url, r)
		}
	}
	bad("a", "")
	bad("a", "host:8000")
	bad("a", "https://host")
	bad("a", "http://")
	bad("a", "http://u:p@host")
	bad("a", "http://host?x")
	bad("a", "http://host:port")
	bad("a", "http://host:65536")
	bad("a\r\n", "http://host")
	bad("", "http://host")
}
