package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/inferrail/inferrail/simulator"
)

// TestDatapathSeesFirstTokens: what the kernel carries is not seen by the agent, but
// the first token is, when it comes and not with the head.
func TestDatapathSeesFirstTokens(t *testing.T) {
	const prefill = 40 * time.Millisecond
	l := newLab(t, labOptions{})
	s := l.sim(simulator.Config{PrefillA: 1, PrefillD: float64(prefill.Microseconds()), TimePerOutputToken: 3 * time.Millisecond})
	n := l.start("packet", []string{s.URL()})
	c, err := l.dial(n.addr)
	l.check(err)
	defer c.Close()
	br := bufio.NewReader(c)
	const requests = 6
	var seen []float64 // by the client, in milliseconds
	for i := range requests {
		body := fmt.Sprintf(`{"model":"sim","stream":true,"max_tokens":40,"messages":[{"role":"user","content":"request %d"}]}`, i)
		c.SetDeadline(time.Now().Add(20 * time.Second))
		began := time.Now()
		_, err := fmt.Fprintf(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
		l.check(err)
		resp, err := http.ReadResponse(br, &http.Request{Method: "POST"})
		l.check(err)
		if _, err := io.ReadFull(resp.Body, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		seen = append(seen, float64(time.Since(began))/1e6)
		_, err = io.Copy(io.Discard, resp.Body)
		l.check(err)
	}
	if d := n.settled(); d.Kernel.Bytes == 0 {
		t.Errorf("the kernel has carried nothing: %+v", d)
	}
	p, err := n.get("/debug/predictions")
	l.check(err)
	var page struct {
		Predictions []struct {
			ObservedMS *float64 `json:"observed_ms"`
		} `json:"predictions"`
	}
	l.check(json.Unmarshal(p.body, &page))
	if len(page.Predictions) != requests {
		t.Fatalf("%s", p.body)
	}
	for i, p := range page.Predictions { // the newest first
		most := seen[requests-1-i]
		if p.ObservedMS == nil || *p.ObservedMS < float64(prefill.Milliseconds()) || *p.ObservedMS > most {
			t.Errorf("prediction %d: %v ms are observed, the prefill takes %v, and the client had it after %.1f ms", i, p.ObservedMS, prefill, most)
		}
	}
}
