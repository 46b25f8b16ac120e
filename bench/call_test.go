package bench

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
)

func TestCallAndAnswerAreNumbered(t *testing.T) {
	f := func(n uint32) {
		t.Helper()
		r, length, err := parseRequest(newCall().with(n))
		if err != nil || length == 0 || string(r.path) != "/v1/chat/completions" {
			t.Fatalf("%d: %+v, %d, %v", n, r, length, err)
		}
		var body struct {
			Seed     uint32
			Messages []struct{ Role, Content string }
		}
		if err := json.Unmarshal(r.body, &body); err != nil || body.Seed != n || len(body.Messages) != 4 {
			t.Errorf("%d: %+v, %v in %s", n, body, err, r.body)
		}
		if seed, ok := member(r.body, `"seed":`); !ok || seed != int(n) {
			t.Errorf("%d: the engine reads seed %d, %v", n, seed, ok)
		}
		if len(r.body) < 900 || len(r.body) > 1200 {
			t.Errorf("a request of %d bytes", len(r.body))
		}

		a, length, err := parseAnswer(newAnswer().with(n))
		if err != nil || length == 0 || a.status != 200 || a.close {
			t.Fatalf("%d: %+v, %d, %v", n, a, length, err)
		}
		var answer struct{ ID, Object string }
		if err := json.Unmarshal(a.body, &answer); err != nil || answer.ID != fmt.Sprintf("chatcmpl-%d", n) || answer.Object != "chat.completion" {
			t.Errorf("%d: %+v, %v in %s", n, answer, err, a.body)
		}
		if len(a.body) < 400 || len(a.body) > 600 {
			t.Errorf("an answer of %d bytes", len(a.body))
		}
	}
	f(100_000_000)
	f(123_456_789)
	f(999_999_999)
}

func TestParseAnswer(t *testing.T) {
	f := func(in string, want answered, body string) {
		t.Helper()
		// Every shorter piece is not enough, and the bytes after it are not its own.
		for i := range len(in) {
			if _, n, err := parseAnswer([]byte(in[:i])); n != 0 || err != nil {
				t.Errorf("%q: %d, %v", in[:i], n, err)
			}
		}
		for _, more := range []string{"", "HTTP/1.1 "} {
			got, n, err := parseAnswer([]byte(in + more))
			if err != nil || n != len(in) || got.status != want.status || got.close != want.close || string(got.body) != body {
				t.Errorf("%q: %+v (%q), %d, %v", in+more, got, got.body, n, err)
			}
		}
	}
	f("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", answered{status: 200}, "hello")
	f("HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\nConnection: Close\r\n\r\n", answered{status: 429, close: true}, "")
	f("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nA\r\n, everyone\r\n0\r\n\r\n", answered{status: 200}, "hello, everyone")
	f("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", answered{status: 200}, "")

	fail := func(in, want string) {
		t.Helper()
		if _, n, err := parseAnswer([]byte(in)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.100q: %d, %v", in, n, err)
		}
	}
	fail("HTTP/1.0 200 OK\r\n\r\n", "not an HTTP/1.1 response")
	fail("HTTP/1.1 ok\r\n\r\n", "not an HTTP/1.1 response")
	fail("HTTP/1.1 xyz\r\n\r\n", "not an HTTP/1.1 response")
	fail("HTTP/1.1 200 OK\r\n\r\nuntil the end", `content-length ""`)
	fail("HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n", `content-length "-1"`)
	fail("HTTP/1.1 200 OK\r\ncontent-length: 99999999\r\n\r\n", `content-length "99999999"`)
	fail("HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n", `transfer-encoding "gzip"`)
	fail("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nx\r\n", `chunk size "x"`)
	fail("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nfffffff\r\n", `chunk size "fffffff"`)
	fail("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nabc\r\n", `a chunk ends with "c\r"`)
	fail("HTTP/1.1 200 "+strings.Repeat("x", 9<<10), "a response head over")
}

func FuzzParseAnswer(f *testing.F) {
	f.Add([]byte("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"))
	f.Add([]byte("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n2\r\n!!\r\n0\r\n\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		before := bytes.Clone(b)
		a, n, err := parseAnswer(b)
		if n < 0 || n > len(b) || len(a.body) > n || err != nil && n != 0 {
			t.Errorf("%d of %d bytes, a body of %d, %v", n, len(b), len(a.body), err)
		}
		if n == 0 && !bytes.Equal(b, before) {
			t.Error("the buffer was changed before the answer was whole")
		}
		if n > 0 && !bytes.Equal(b[n:], before[n:]) {
			t.Error("the bytes after the answer were changed")
		}
	})
}
