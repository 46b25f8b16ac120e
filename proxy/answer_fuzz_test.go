package proxy

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// FuzzAnswer lets an engine answer with the bytes at hand and then close, and
// compares what a client gets through the proxy with what net/http reads from
// the same bytes. An answer that net/http cannot read, or that breaks off, must
// not reach the client as a whole one; one that both take must be the same. We
// may be stricter: an engine that cannot be understood is answered for by 502,
// or its answer is cut.
func FuzzAnswer(f *testing.F) {
	for _, seed := range []string{
		fixed("ok"),
		chunkedHead + chunk("one") + chunk("two") + "0\r\n\r\n",
		chunkedHead + "3;x=y\r\none\r\n0\r\nTrailer: t\r\n\r\n",
		chunkedHead + "3\r\none\r\n",
		chunkedHead + "3\r\nonetwo\r\n0\r\n\r\n",
		chunkedHead + "0x3\r\none\r\n0\r\n\r\n",
		chunkedHead + "-3\r\none\r\n0\r\n\r\n",
		chunkedHead + "3\none\n0\n\n",
		chunkedHead + "fffffffffffffffff\r\n",
		"HTTP/1.1 200 OK\r\n\r\nuntil close",
		"HTTP/1.0 200 OK\r\n\r\nuntil close",
		"HTTP/1.0 200 OK\r\nContent-Length: 4\r\n\r\nabcd",
		"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort",
		"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nmore than that",
		"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok",
		"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
		"HTTP/1.1 200 OK\r\nContent-Length: +2\r\n\r\nok",
		"HTTP/1.1 200 OK\r\nContent-Length: 2, 2\r\n\r\nok",
		"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: identity\r\n\r\nok",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding : chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
		"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
		"HTTP/1.1 204 No Content\r\n\r\n",
		"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\nhello",
		"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n",
		"HTTP/1.1 100 Continue\r\n\r\n" + fixed("ok"),
		"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n" + fixed("ok"),
		"HTTP/1.1 101 Switching Protocols\r\n\r\n",
		"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok",
		"HTTP/1.1  200 OK\r\nContent-Length: 2\r\n\r\nok",
		"HTTP/1.1 20 OK\r\nContent-Length: 2\r\n\r\nok",
		"HTTP/1.1 2000 OK\r\nContent-Length: 2\r\n\r\nok",
		"HTTP/2.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
		"HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
		"HTTP/1.1 200 OK\r\nA: b\r\n c\r\nContent-Length: 2\r\n\r\nok",
		"HTTP/1.1 200 OK\r\nA b: c\r\nContent-Length: 2\r\n\r\nok",
		"HTTP/1.1 200 OK\r\nA: b\x00c\r\nContent-Length: 2\r\n\r\nok",
		"HTTP/1.1 200 OK\r\nConnection: close, A\r\nA: b\r\nContent-Length: 2\r\n\r\nok",
		"SSH-2.0-x\r\n\r\n", "", "H", "HTTP/1.1 200 OK\r\n",
	} {
		f.Add([]byte(seed))
	}
	answers := make(chan []byte, 1)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		f.Fatal(err)
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			if req, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
				io.Copy(io.Discard, req.Body)
				c.Write(<-answers)
			}
			c.Close()
		}
	}()
	replica, err := NewReplica(0, "e", "http://"+l.Addr().String())
	if err != nil {
		f.Fatal(err)
	}
	m := &Model{Name: "m", Replicas: []*Replica{replica}}
	s := New(Limits{MaxAttempts: 1, UpstreamIdle: time.Millisecond, RequestTimeout: 5 * time.Second}, nil, nil)
	s.SetFleet(&Fleet{Models: map[string]*Model{"m": m}, Listed: []*Model{m}})
	front, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		f.Fatal(err)
	}
	go s.Serve(front)
	f.Cleanup(func() {
		s.Shutdown(f.Context())
		replica.Close()
		l.Close()
	})

	f.Fuzz(func(t *testing.T, answer []byte) {
		if len(answer) > 32<<10 {
			t.Skip()
		}
		answers <- answer
		c, err := net.Dial("tcp", front.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(10 * time.Second))
		io.WriteString(c, strings.Replace(post(hello), "\r\n\r\n", "\r\nConnection: close\r\n\r\n", 1))
		ours := readAnswer(c)
		theirs := readAnswer(bytes.NewReader(answer))
		switch {
		case ours.status == 502 && strings.Contains(ours.body, "BadGatewayError"):
			// Refused. What both must understand is an answer as engines give it.
			if bytes.Equal(answer, []byte(fixed("ok"))) {
				t.Fatalf("%q is refused: %s", answer, ours.body)
			}
		case ours.err != nil:
			// Cut.
			if theirs.err == nil && len(theirs.body) > len(ours.body) && !strings.HasPrefix(theirs.body, ours.body) {
				t.Fatalf("%q: the client got %q of %q", answer, ours.body, theirs.body)
			}
		case theirs.err != nil:
			t.Fatalf("%q: the client got a whole answer, %d %q; net/http says %v", answer, ours.status, ours.body, theirs.err)
		case ours.status != theirs.status || ours.body != theirs.body:
			t.Fatalf("%q: the client got %d %q; net/http reads %d %q", answer, ours.status, ours.body, theirs.status, theirs.body)
		}
	})
}

// readAnswer is what a client makes of bytes: err is not nil when they are no
// answer, or not a whole one.
func readAnswer(r io.Reader) (a struct {
	status int
	body   string
	err    error
}) {
	br := bufio.NewReaderSize(r, maxEngineHead)
	req := &http.Request{Method: "POST"}
	for range 20 {
		resp, err := http.ReadResponse(br, req)
		if err != nil {
			a.err = err
			return a
		}
		body, err := io.ReadAll(resp.Body)
		a.status, a.body, a.err = resp.StatusCode, string(body), err
		switch {
		case resp.StatusCode == 101:
			a.err = errors.New("switched")
		case resp.StatusCode >= 100 && resp.StatusCode < 200:
			continue
		case resp.StatusCode < 100:
			a.err = fmt.Errorf("status %d", resp.StatusCode)
		}
		return a
	}
	a.err = errors.New("interim answers without end")
	return a
}
