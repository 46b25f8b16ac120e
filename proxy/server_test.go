package proxy

import (
	"io"
	"net/http"
	"strings"
	"testing"
)

func TestOneRequest(t *testing.T) {
	e := newRawEngine(t, answering(fixed(`{"ok":true}`)))
	r := newRig(t, Limits{}, nil, e.url())
	c := r.dial()
	for range 3 {
		c.send(post(hello, "X-Request-Id: me-1\r\n"))
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
	}
	if n := e.accepted(); n != 1 {
		t.Errorf("three requests used %d engine connections", n)
	}
}

func TestStream(t *testing.T) {
	stream := chunk("data: 1\n\n") + chunk("data: 2\n\n") + "0\r\n\r\n"
	e := newRawEngine(t, func(c *engineSide) {
		for c.request() != nil {
			io.WriteString(c, chunkedHead)
			for _, part := range strings.SplitAfter(stream, "\n") {
				io.WriteString(c, part)
			}
		}
	})
	r := newRig(t, Limits{}, nil, e.url())
	c := r.dial()
	for range 3 {
		c.send(post(hello))
		resp, body := c.answer()
		if resp.StatusCode != 200 || body != "data: 1\n\ndata: 2\n\n" {
			t.Fatalf("got %d %q", resp.StatusCode, body)
		}
	}
	if n := e.accepted(); n != 1 {
		t.Errorf("three requests used %d engine connections", n)
	}
	_ = http.MethodGet
}
