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
	t.Parallel()
	l := newLab(t, labOptions{})
	s := l.sim(simulator.Config{ZeroLatency: true})
	n := l.start("packet", []string{s.URL()})
	good := n.load(n.addr, 50, 60, 20*time.Second, func(k, i int) simulator.Raw {
		return simulator.Raw{Seed: uint64(k*1000 + i), Chunks: 40, Max: 600, IntervalUS: 300, Split: i%3 == 0}
	})
	d := n.settled()
	t.Logf("%d responses, %+v", good, d)
	if d.Kernel.Bytes == 0 || d.Kernel.Ended < uint64(good)/2 {
		t.Errorf("the kernel carried too little: %+v", d)
	}
	page, err := n.get("/metrics")
	l.check(err)
	for _, want := range []string{
		fmt.Sprintf("inferrail_kernel_packets_total{replica=\"e0\"} %d\n", d.Kernel.Packets),
		fmt.Sprintf("inferrail_kernel_splices_total{replica=\"e0\"} %d\n", d.Kernel.Splices),
		fmt.Sprintf("inferrail_kernel_responses_ended_total{replica=\"e0\"} %d\n", d.Kernel.Ended),
		// One gap less than packets in each splice.
		fmt.Sprintf("inferrail_inter_token_seconds_count{replica=\"e0\",tier=\"packet\"} %d\n", d.Kernel.Packets-d.Kernel.Splices),
		"inferrail_kernel_refusals_total{",
		"inferrail_kernel_stream_seconds_total{",
		"inferrail_datapath_tier{tier=\"packet\"} 1\n",
	} {
		if !bytes.Contains(page.body, []byte(want)) {
			t.Errorf("/metrics lacks %s", want)
		}
	}
}

// TestDatapathKeepAlive: ten thousand responses over few client and engine
// connections, so that each is spliced hundreds of times and engine
// connections serve many clients.
func TestDatapathKeepAlive(t *testing.T) {
	t.Parallel()
	l := newLab(t, labOptions{})
	s := l.sim(simulator.Config{ZeroLatency: true})
	n := l.start("packet", []string{s.URL()})
	const connections, each = 50, 200
	good := n.load(n.addr, connections, each, 20*time.Second, func(k, i int) simulator.Raw {
		return simulator.Raw{Seed: uint64(k*1000 + i), Chunks: 8, Max: 300, IntervalUS: 250}
	})
	if good != connections*each {
		t.Errorf("%d of %d responses", good, connections*each)
	}
	d := n.settled()
	if d.Kernel.Ended < connections*each/2 {
		t.Errorf("the kernel ended only %d of %d responses: %+v", d.Kernel.Ended, connections*each, d)
	}
	if a := s.Accepted(); a > 3*connections {
		t.Errorf("%d engine connections for %d client connections: they are not shared", a, connections)
	}
	t.Logf("%d engine connections, %+v", s.Accepted(), d)
}

// TestDatapathVariants forces each way to attach and to loop, and each family.
func TestDatapathVariants(t *testing.T) {
	t.Parallel()
	for _, v := range []struct {
		name, engine, addr string
		args               []string
	}{
		{"clsact", "10.9.2.2", "10.9.1.1:8080", []string{"--datapath-hook", "clsact"}},
		{"bounded loop", "10.9.2.2", "10.9.1.1:8080", []string{"--datapath-loop", "bounded"}},
		{"clsact and bounded loop", "10.9.2.2", "10.9.1.1:8080", []string{"--datapath-hook", "clsact", "--datapath-loop", "bounded"}},
		{"named interfaces", "10.9.2.2", "10.9.1.1:8080", []string{"--iface", "p*"}},
		{"IPv6", "fd09:2::2", "[fd09:1::1]:8080", nil},
	} {
		t.Run(v.name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, labOptions{})
			s := l.sim(simulator.Config{ZeroLatency: true, Host: v.engine})
			n := l.start("packet", []string{s.URL()}, v.args...)
			good := n.load(v.addr, 20, 20, 20*time.Second, func(k, i int) simulator.Raw {
				r := simulator.Raw{Seed: uint64(k*1000 + i), Chunks: 40, Max: 900, IntervalUS: 300}
				if i%4 == 3 {
					r.Length = "fixed"
				}
				return r
			})
			d := n.settled()
			if good != 400 || d.Kernel.Ended < 200 {
				t.Errorf("%d of 400 responses, %+v", good, d)
			}
		})
	}
}

// TestDatapathLoopback: client, agent and engine on one host.
func TestDatapathLoopback(t *testing.T) {
	t.Parallel()
	l := newLab(t, labOptions{})
	l.client, l.engine = l.proxy, l.proxy
	s := l.sim(simulator.Config{ZeroLatency: true, Host: "127.0.0.1"})
	n := l.start("packet", []string{s.URL()})
	for _, addr := range []string{"127.0.0.1:8080", "10.9.1.1:8080"} {
		good := n.load(addr, 20, 20, 20*time.Second, func(k, i int) simulator.Raw {
			return simulator.Raw{Seed: uint64(k*1000 + i), Chunks: 40, Max: 900, IntervalUS: 300}
		})
		if d := n.settled(); good != 400 || d.Kernel.Ended < 200 {
			t.Errorf("%s: %d of 400 responses, %+v", addr, good, d)
		}
	}
}

// TestDatapathEngineBehindLoopback: the engine is on the agent's host, the
// client is not.
func TestDatapathEngineBehindLoopback(t *testing.T) {
	t.Parallel()
	l := newLab(t, labOptions{})
	l.engine = l.proxy
	for _, host := range []string{"127.0.0.1", "10.9.2.1"} {
		t.Run(host, func(t *testing.T) {
			s := l.sim(simulator.Config{ZeroLatency: true, Host: host})
			n := l.start("packet", []string{s.URL()})
			good := n.load(n.addr, 20, 20, 20*time.Second, func(k, i int) simulator.Raw {
				return simulator.Raw{Seed: uint64(k*1000 + i), Chunks: 40, Max: 900, IntervalUS: 300}
			})
			if d := n.settled(); good != 400 || d.Kernel.Ended < 200 {
				t.Errorf("%d of 400 responses, %+v", good, d)
			}
			n.stop()
		})
	}
}

// TestDatapathBehindDNAT: clients reach the agent through a redirected port,
// and a firewall drops what connection tracking thinks invalid.
func TestDatapathBehindDNAT(t *testing.T) {
	t.Parallel()
	l := newLab(t, labOptions{})
	l.nft(`table inet lab {
		chain nat { type nat hook prerouting priority dstnat; tcp dport 80 redirect to :8080; }
		chain in { type filter hook input priority filter; ct state invalid counter drop; }
	}`)
	s := l.sim(simulator.Config{ZeroLatency: true})
	n := l.start("packet", []string{s.URL()})
	for _, addr := range []string{"10.9.1.1:80", "[fd09:1::1]:80"} {
		good := n.load(addr, 20, 10, 20*time.Second, func(k, i int) simulator.Raw {
			return simulator.Raw{Seed: uint64(k*1000 + i), Chunks: 40, Max: 400, IntervalUS: 500}
		})
		if good != 200 {
			t.Errorf("%s: %d of 200 responses", addr, good)
		}
	}
	// The engine is reached over IPv4, so IPv6 clients are copied to.
	d := n.settled()
	if d.Kernel.Ended < 100 {
		t.Errorf("the kernel ended only %d responses: %+v", d.Kernel.Ended, d)
	}
}

// TestDatapathMTU: the engine's network carries 9,000 bytes, the client's 1,500.
func TestDatapathMTU(t *testing.T) {
	t.Parallel()
	l := newLab(t, labOptions{clientMTU: 1500, engineMTU: 9000, noOffload: true})
	s := l.sim(simulator.Config{ZeroLatency: true})
	n := l.start("packet", []string{s.URL()})
	good := n.load(n.addr, 20, 10, 30*time.Second, func(k, i int) simulator.Raw {
		return simulator.Raw{Seed: uint64(k*1000 + i), Chunks: 30, Max: 20000, IntervalUS: 1000}
	})
	d := n.settled()
	if good != 200 || d.Kernel.Bytes < 200*30*10000/2 {
		t.Errorf("%d of 200 responses, %+v", good, d)
	}
	t.Logf("%+v", d)
}

// TestDatapathFarClient: with a round trip of 60 ms and a token every 10 ms the
// client never owes nothing, and the kernel takes over all the same: userspace
// reads little more than the head.
func TestDatapathFarClient(t *testing.T) {
	t.Parallel()
	l := newLab(t, labOptions{delay: 30 * time.Millisecond})
	s := l.sim(simulator.Config{})
	n := l.start("packet", []string{s.URL()})
	good := n.load(n.addr, 25, 4, 30*time.Second, func(k, i int) simulator.Raw {
		return simulator.Raw{Seed: uint64(k*1000 + i), Chunks: 60, Max: 300, IntervalUS: 10000}
	})
	d := n.settled()
	t.Logf("%+v", d)
	if good != 100 || d.Kernel.Ended < 98 {
		t.Errorf("%d of 100 responses, %d ended in the kernel", good, d.Kernel.Ended)
	}
	// One or two reads, and one wake-up for the end.
	if d.Wakeups > 3*100 {
		t.Errorf("userspace was woken %d times for 100 responses", d.Wakeups)
	}
}

// TestDatapathLoss: half a percent of packets lost and some overtaken on every
// hop. No byte may be wrong, nothing may hang, and the kernel must not take
// much longer than userspace would.
func TestDatapathLoss(t *testing.T) {
	took := map[string]time.Duration{}
	for _, tier := range []string{"copy", "packet"} {
		l := newLab(t, labOptions{loss: 0.005, reorder: 0.005, noOffload: true})
		s := l.sim(simulator.Config{ZeroLatency: true})
		n := l.start(tier, []string{s.URL()})
		start := time.Now()
		good := n.load(n.addr, 40, 20, 60*time.Second, func(k, i int) simulator.Raw {
			return simulator.Raw{Seed: uint64(k*1000 + i), Chunks: 60, Max: 800, IntervalUS: 1000}
		})
		took[tier] = time.Since(start)
		d := n.settled()
		t.Logf("%s: %d responses in %v, %+v", tier, good, took[tier], d)
		if good != 800 {
			t.Errorf("%s: %d of 800 responses", tier, good)
		}
		if tier == "packet" && d.Kernel.Bytes == 0 {
			t.Error("the kernel carried nothing")
		}
		n.stop()
	}
	if took["packet"] > 2*took["copy"] {
		t.Errorf("the packet tier took %v, the copy tier %v", took["packet"], took["copy"])
	}
}

// TestDatapathSmallPath: a router on the way to the client takes smaller
// packets than either end knows, and says so about packets the kernel carried.
// With copied answers among them it also says so about the agent's own.
func TestDatapathSmallPath(t *testing.T) {
	t.Parallel()
	for _, v := range []struct {
		name, engine, addr string
		copied             bool
	}{
		{"IPv4", "10.9.2.2", "10.9.1.1:8080", false},
		{"IPv6", "fd09:2::2", "[fd09:1::1]:8080", false},
		{"copied answers too", "10.9.2.2", "10.9.1.1:8080", true},
	} {
		t.Run(v.name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, labOptions{pathMTU: 1380})
			s := l.sim(simulator.Config{ZeroLatency: true, Host: v.engine})
			n := l.start("packet", []string{s.URL()})
			good := n.load(v.addr, 5, 10, 20*time.Second, func(k, i int) simulator.Raw {
				if v.copied && i%3 == 1 {
					return simulator.Raw{Seed: uint64(k*1000 + i), Chunks: 1, Max: 15000, Length: "fixed"}
				}
				// The first event is copied, and what comes with it. What is larger than the path tells the
				// agent's socket of it, and then the rest is copied too.
				return simulator.Raw{Seed: uint64(k*1000 + i), Chunks: 12, Max: 6000, First: 200, IntervalUS: 20000}
			})
			d := n.settled()
			if good != 50 {
				t.Errorf("%d of 50 responses, %+v", good, d)
			}
			if !v.copied && (d.Kernel.Pauses["pmtu"] == 0 || d.Kernel.Bytes < 50*12*3000/2) {
				t.Errorf("the engine was not told, or too little was carried: %+v", d)
			}
		})
	}
}
