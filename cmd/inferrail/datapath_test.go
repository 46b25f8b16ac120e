package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/inferrail/inferrail/simulator"
)

// ask is one request for a body of random bytes, whose chunks end in what looks
// like the end of a response, on a connection that may have served others.
func ask(w io.Writer, r simulator.Raw) error {
	raw, err := json.Marshal(r)
	if err != nil {
		return err
	}
	body := fmt.Sprintf(`{"model":"sim","stream":true,"messages":[{"role":"user","content":"x"}],"vllm_xargs":{"sim_raw":%s}}`, raw)
	_, err = fmt.Fprintf(w, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	return err
}

// receive reads the answer to ask and compares it byte for byte.
func receive(br *bufio.Reader, r simulator.Raw) error {
	resp, err := http.ReadResponse(br, &http.Request{Method: "POST"})
	if err != nil {
		return fmt.Errorf("head: %w", err)
	}
	got, err := io.ReadAll(resp.Body)
	if err != nil {
		return fmt.Errorf("body after %d bytes: %w", len(got), err)
	}
	if resp.StatusCode != 200 {
		return fmt.Errorf("status %d: %s", resp.StatusCode, got)
	}
	want := simulator.AppendRaw(nil, r)
	if !bytes.Equal(got, want) {
		at := 0
		for at < len(got) && at < len(want) && got[at] == want[at] {
			at++
		}
		return fmt.Errorf("body of %d bytes differs from the %d expected at %d", len(got), len(want), at)
	}
	return nil
}

// load runs responses over keep-alive connections and returns how many came.
func (n *node) load(addr string, connections, each int, patience time.Duration, body func(connection, i int) simulator.Raw) int {
	n.l.t.Helper()
	var good atomic.Int64
	var wait sync.WaitGroup
	for k := range connections {
		wait.Go(func() {
			c, err := n.l.dial(addr)
			if err != nil {
				n.l.t.Error(err)
				return
			}
			defer c.Close()
			br := bufio.NewReader(c)
			for i := range each {
				r := body(k, i)
				c.SetDeadline(time.Now().Add(patience))
				err := ask(c, r)
				if err == nil {
					err = receive(br, r)
				}
				if err != nil {
					n.l.t.Errorf("connection %d (%s), response %d: %v", k, c.LocalAddr(), i, err)
					return
				}
				good.Add(1)
			}
		})
	}
	wait.Wait()
	return int(good.Load())
}

func TestPacketTierByteExact(t *testing.T) {
	l := newLab(t, labOptions{})
	s := l.sim(simulator.Config{ZeroLatency: true})
	n := l.start("packet", []string{s.URL()})
	good := n.load(n.addr, 50, 60, 20*time.Second, func(k, i int) simulator.Raw {
		return simulator.Raw{Seed: uint64(k*1000 + i), Chunks: 40, Max: 600, IntervalUS: 300, Split: i%3 == 0}
	})
	d := n.datapath()
	t.Logf("%d responses, %+v", good, d)
	if d.Kernel.Bytes == 0 || d.Kernel.Ended < uint64(good)/2 {
		t.Errorf("the kernel carried too little: %+v", d)
	}
}
