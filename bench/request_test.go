package bench

import (
	"encoding/json"
	"strings"
	"testing"
)

func TestParseRequestSuccess(t *testing.T) {
	f := func(in, method, path, body string) {
		t.Helper()
		for i := range len(in) {
			if _, n, err := parseRequest([]byte(in[:i])); n != 0 || err != nil {
				t.Fatalf("%q: %d, %v", in[:i], n, err)
			}
		}
		for _, after := range []string{"", "GET / HTTP/1.1\r\n"} {
			r, n, err := parseRequest([]byte(in + after))
			if n != len(in) || err != nil || string(r.method) != method || string(r.path) != path || string(r.body) != body {
				t.Errorf("%q: %q %q %q, %d of %d bytes, %v", in, r.method, r.path, r.body, n, len(in), err)
			}
		}
	}
	f("GET /health HTTP/1.1\r\n\r\n", "GET", "/health", "")
	f("GET /health HTTP/1.1\r\nHost: x\r\n\r\n", "GET", "/health", "")
	f("POST / HTTP/1.1\r\nHost: x\r\ncontent-length: 2\r\n\r\n{}", "POST", "/", "{}")
	f("POST / HTTP/1.1\r\nContent-LENGTH:  0 \r\nA: b\r\n\r\n", "POST", "/", "")
	f("POST / HTTP/1.1\r\nX-Content-Length: 9\r\nContent-Length: 1\r\n\r\n\n", "POST", "/", "\n")
}

func TestParseRequestFailure(t *testing.T) {
	f := func(in, wantErr string) {
		t.Helper()
		if _, n, err := parseRequest([]byte(in)); n != 0 || err == nil || !strings.Contains(err.Error(), wantErr) {
			t.Errorf("%q: %d, %v", in, n, err)
		}
	}
	f("GET / HTTP/1.0\r\n\r\n", "not an HTTP/1.1 request")
	f("GET /\r\n\r\n", "not an HTTP/1.1 request")
	f("\r\n\r\n", "not an HTTP/1.1 request")
	f("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", "Content-Length only")
	f("POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", "content-length")
	f("POST / HTTP/1.1\r\nContent-Length: 999999\r\n\r\n", "content-length")
	f(strings.Repeat("x", maxRequest+1), "head over")
}

func TestRequestIsWhatTheEngineReads(t *testing.T) {
	for _, want := range []uint32{1, 200, 99_999_999} {
		b := appendRequest([]byte("kept"), 2999, want)
		r, n, err := parseRequest(b[4:])
		if err != nil || n != len(b)-4 {
			t.Fatalf("%q: %d, %v", b, n, err)
		}
		if !json.Valid(r.body) {
			t.Errorf("not JSON: %s", r.body)
		}
		id, ok1 := member(r.body, `"seed":`)
		tokens, ok2 := member(r.body, `"max_tokens":`)
		if !ok1 || !ok2 || id != 2999 || tokens != int(want) {
			t.Errorf("%s: %d %v, %d %v", r.body, id, ok1, tokens, ok2)
		}
	}
}

func FuzzRequest(f *testing.F) {
	f.Add(appendRequest(nil, 1, 2))
	f.Add([]byte("GET /v1/models HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, n, err := parseRequest(b)
		if n < 0 || n > len(b) || err != nil && n != 0 || len(r.body) > n {
			t.Fatalf("%d of %d bytes, %v", n, len(b), err)
		}
		if n > 0 {
			member(r.body, `"seed":`)
			if _, again, err := parseRequest(b[:n]); again != n || err != nil {
				t.Fatalf("%d bytes, alone %d, %v", n, again, err)
			}
		}
	})
}
