package proxy

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/inferrail/inferrail/policy"
)

// lockedBuffer is a log that a test reads.
type lockedBuffer struct {
	mu  sync.Mutex // guards buf
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// Nothing of a prompt or an answer is in the log, at any level and whatever
// goes wrong, unless it is asked for; and nothing ever in what traces are made of. The engine sends back what it is sent, in
// every place of a response.
func TestPromptsAreNotLogged(t *testing.T) {
	answers := []string{
		"%s\r\n\r\n",
		"HTTP/1.1 %s\r\n\r\n",
		"HTTP/1.1 200 OK\r\n%s\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: %s\r\n\r\n",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: %s\r\n\r\n",
		"HTTP/1.1 500 %s\r\nContent-Length: 0\r\n\r\n",
		"HTTP/1.1 503 Busy\r\nContent-Length: 5000\r\n\r\n%s",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%s\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n%s",
	}
	requests := []string{
		post(`{"model":"m","messages":[{"content":"xyzzy"}]}`),
		post(`{"model":"m","messages":[{"content":"xyzzy`),
		post(`{"model":"absent","prompt":"xyzzy"}`),
		post(`{"model":5,"prompt":"xyzzy"}`),
		post(`xyzzy`),
		"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyzzy\r\n\r\n",
		"xyzzy\r\n\r\n",
	}
	for _, asked := range []bool{false, true} {
		for i, answer := range answers {
			e := newRawEngine(t, func(c *engineSide) {
				if req := c.request(); req != nil {
					body, _ := io.ReadAll(req.Body)
					fmt.Fprintf(c, answer, body)
				}
			})
			var said lockedBuffer
			log := slog.New(slog.NewTextHandler(&said, &slog.HandlerOptions{Level: slog.LevelDebug}))
			s := New(Limits{MaxAttempts: 1, LogPrompts: asked, IdleTimeout: 50 * time.Millisecond}, nil, log)
			replica, err := NewReplica(0, "e0", e.url())
			if err != nil {
				t.Fatal(err)
			}
			m := &Model{Name: "m", Policy: policy.LeastRequest{}, Replicas: []*Replica{replica}}
			s.SetFleet(&Fleet{Models: map[string]*Model{"m": m}, Listed: []*Model{m}})
			traces := make(chan *Trace, len(requests))
			s.SetTraces(traces, TracesWanted{Ratio: 1})
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			served := make(chan error, 1)
			go func() { served <- s.Serve(l) }()
			for j, request := range requests {
				if i > 0 && j > 0 {
					break // the other requests get no further than to the proxy
				}
				c, err := net.Dial("tcp", l.Addr().String())
				if err != nil {
					t.Fatal(err)
				}
				c.SetDeadline(time.Now().Add(10 * time.Second))
				io.WriteString(c, request)
				io.Copy(io.Discard, c)
				c.Close()
			}
			s.Shutdown(t.Context())
			<-served
			replica.Close()
			if !strings.Contains(said.String(), "failure=") && !strings.Contains(said.String(), "msg=request") {
				t.Errorf("answer %d: nothing is logged: %s", i, &said)
			}
			if len(traces) == 0 {
				t.Errorf("answer %d: nothing is traced", i)
			}
			for len(traces) > 0 {
				trace := <-traces
				text := fmt.Sprintf("%+v", *trace)
				for _, a := range trace.Attempts {
					text += fmt.Sprintf(" %+v", a.Decision)
				}
				if strings.Contains(text, "xyzzy") {
					t.Errorf("answer %d: the trace says %s", i, text)
				}
				if !asked && trace.Outcome == "engine_died" && !strings.Contains(said.String(), "trace_id="+hex.EncodeToString(trace.ID[:])) {
					t.Errorf("answer %d: the log does not name the trace %x:\n%s", i, trace.ID, &said)
				}
			}
			if logged := strings.Contains(said.String(), "xyzzy"); logged != asked {
				t.Errorf("answer %d, asked %v: the log says\n%s", i, asked, &said)
			}
		}
	}
}
