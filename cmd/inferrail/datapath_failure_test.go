package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/inferrail/inferrail/simulator"
)

// departures are the ways in which a client leaves.
var departures = []string{"fin", "rst", "half close", "in the head", "in the request"}

// leave lets a client ask for a long response and leave after about the time
// given. It returns when the client has left.
func (n *node) leave(how string, after time.Duration, seed uint64) (left time.Time, err error) {
	r := simulator.Raw{Seed: seed, Chunks: 5000, Max: 400, IntervalUS: 4000}
	if how == "in the request" {
		c, err := n.l.dial(n.addr)
		if err != nil {
			return left, err
		}
		fmt.Fprintf(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
		time.Sleep(after)
		return time.Now(), c.Close()
	}
	s, err := n.l.open(n.addr, r, 0)
	if err != nil {
		return left, err
	}
	if how == "in the head" {
		// Also before the engine has heard of the request.
		time.Sleep(after / 20)
		return time.Now(), s.Close()
	}
	if err := s.head(); err != nil {
		return left, err
	}
	s.SetReadDeadline(time.Now().Add(after))
	if _, err := io.Copy(io.Discard, s.body); !errors.Is(err, os.ErrDeadlineExceeded) {
		return left, fmt.Errorf("a response without an end ended: %v", err)
	}
	left = time.Now()
	switch how {
	case "rst":
		s.SetLinger(0)
		return left, s.Close()
	case "half close":
		// The agent takes it for leaving and says so by a reset.
		s.CloseWrite()
		s.SetReadDeadline(time.Now().Add(2 * time.Second))
		if _, err := io.Copy(io.Discard, s.TCPConn); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			err = fmt.Errorf("half closed, then: %v", err)
			s.Close()
			return left, err
		}
	}
	return left, s.Close()
}

// TestDatapathClientsLeave: clients leave in every phase and in every way. The
// engine is told at once, and nothing is left of them.
func TestDatapathClientsLeave(t *testing.T) {
	l := newLab(t, labOptions{races: true})
	s := l.sim(simulator.Config{ZeroLatency: true})
	n := l.start("packet", []string{s.URL()})
	// What an agent makes once stays: the baseline comes after a first load.
	n.load(n.addr, 10, 2, 10*time.Second, func(k, i int) simulator.Raw {
		return simulator.Raw{Seed: 1, Chunks: 10, Max: 100, IntervalUS: 1000}
	})
	base := n.settled()
	goroutines, files := n.metric("go_goroutines"), n.files()

	// One by one, to see how long the engine's slot stays taken.
	for _, how := range departures[:4] {
		var slow int
		var worst time.Duration
		for i := range 10 {
			left, err := n.leave(how, 60*time.Millisecond, uint64(i))
			if err != nil {
				t.Errorf("%s: %v", how, err)
				break
			}
			l.eventually(20*time.Second, func() bool { return s.Running() == 0 }, func() string {
				return how + ": the engine still generates"
			})
			took := time.Since(left)
			worst = max(worst, took)
			if took > 100*time.Millisecond {
				slow++
			}
		}
		t.Logf("%s: the engine was told within %v", how, worst)
		// One may be late because the machine is busy.
		if slow > 1 {
			t.Errorf("%s: the engine was told after more than 100 ms %d times, at worst after %v", how, slow, worst)
		}
	}

	// Hundreds together.
	var wait sync.WaitGroup
	var gone atomic.Int64
	for k := range 40 {
		wait.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(k), 1))
			for i := range 10 {
				how := departures[rnd.IntN(len(departures))]
				if _, err := n.leave(how, time.Duration(rnd.IntN(200))*time.Millisecond, uint64(k*100+i)); err != nil {
					t.Errorf("%s: %v", how, err)
					return
				}
				gone.Add(1)
			}
		})
	}
	wait.Wait()
	l.eventually(20*time.Second, func() bool { return s.Running() == 0 }, func() string {
		return fmt.Sprintf("the engine still generates for %d clients that have left", s.Running())
	})
	d := n.datapath()
	if gone.Load() != 400 || d.Kernel.Splices < base.Kernel.Splices+150 {
		t.Errorf("%d clients left, only %d splices among them: %+v", gone.Load(), d.Kernel.Splices-base.Kernel.Splices, d)
	}
	if s.Aborted() < 200 {
		t.Errorf("the engine saw only %d clients leave", s.Aborted())
	}
	// Idle engine connections go after 4 s, what the kernel remembers of a
	// connection closed in order after 60 s more.
	l.eventually(15*time.Second, func() bool {
		d = n.datapath()
		idle := d.Now.Armed + d.Now.Active + d.Now.Paused + d.Now.Ended
		return idle == 0 && d.Running == 0 && d.Connections == 0 &&
			d.Now.Connections <= base.Now.Connections+base.Now.Closing && d.Now.Closing <= base.Now.Connections
	}, func() string { return fmt.Sprintf("left over: %+v; at the start %+v", d, base) })
	var g float64
	l.eventually(10*time.Second, func() bool { g = n.metric("go_goroutines"); return g <= goroutines+2 },
		func() string { return fmt.Sprintf("%v goroutines, %v at the start", g, goroutines) })
	l.eventually(10*time.Second, func() bool { return n.files() <= files },
		func() string { return fmt.Sprintf("%d open files, %d at the start", n.files(), files) })
	if g := n.metric("inferrail_requests_total", `outcome="client_left"`); g < 300 {
		t.Errorf("%v requests are counted as left by their client", g)
	}
}

// TestDatapathClientsCloseAtTheEnd: clients close as soon as they have the last
// byte, as most command-line clients do. They have not left early, and their
// tokens are counted.
func TestDatapathClientsCloseAtTheEnd(t *testing.T) {
	t.Parallel()
	l := newLab(t, labOptions{})
	s := l.sim(simulator.Config{PrefillA: 0.1, TimePerOutputToken: time.Millisecond})
	n := l.start("packet", []string{s.URL()})
	const clients, each = 40, 10
	var wait sync.WaitGroup
	for k := range clients {
		wait.Go(func() {
			for i := range each {
				c, err := l.dial(n.addr)
				if err != nil {
					t.Error(err)
					return
				}
				body := `{"model":"sim","max_tokens":12,"stream":true,"stream_options":{"include_usage":true},"messages":[{"role":"user","content":"x"}]}`
				c.SetDeadline(time.Now().Add(10 * time.Second))
				fmt.Fprintf(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
				if _, _, err := readUsage(bufio.NewReader(c)); err != nil {
					t.Errorf("client %d, response %d: %v", k, i, err)
				}
				c.Close()
			}
		})
	}
	wait.Wait()
	l.eventually(20*time.Second, func() bool { return n.datapath().Running == 0 }, func() string { return "requests still run" })
	ok, all := n.metric("inferrail_requests_total", `outcome="ok"`), n.metric("inferrail_requests_total")
	if ok != clients*each || all != ok {
		t.Errorf("%v of %v requests ended well, want %d: %v were left", ok, all, clients*each, n.metric("inferrail_requests_total", `outcome="client_left"`))
	}
	if tokens := n.metric("inferrail_tokens_total", `kind="completion"`); tokens != 12*clients*each {
		t.Errorf("%v tokens are counted, want %d", tokens, 12*clients*each)
	}
	if d := n.datapath(); d.Kernel.Ended < clients*each/2 {
		t.Errorf("the kernel carried too few: %+v", d)
	}
}

// TestDatapathPausingClients: clients with small buffers that stop reading now
// and then get their bytes all the same.
func TestDatapathPausingClients(t *testing.T) {
	t.Parallel()
	l := newLab(t, labOptions{})
	s := l.sim(simulator.Config{ZeroLatency: true})
	n := l.start("packet", []string{s.URL()})
	var wait sync.WaitGroup
	for k := range 30 {
		wait.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(k), 2))
			r := simulator.Raw{Seed: uint64(k), Chunks: 300, Max: 3000, IntervalUS: 2000}
			c, err := l.open(n.addr, r, 4096)
			if err == nil {
				defer c.Close()
				c.SetReadDeadline(time.Now().Add(30 * time.Second))
				err = c.head()
			}
			for range 4 {
				if err == nil {
					err = c.read(1 + rnd.IntN(40000))
				}
				time.Sleep(300 * time.Millisecond)
			}
			if err == nil {
				err = c.rest()
			}
			if err != nil {
				t.Errorf("client %d: %v", k, err)
			}
		})
	}
	wait.Wait()
	d := n.settled()
	t.Logf("%+v", d)
	if d.Kernel.Bytes < 30*300*1500/4 {
		t.Errorf("the kernel carried too little: %+v", d)
	}
}

func portOf(t *testing.T, s *simulator.Server) int {
	t.Helper()
	_, port, err := net.SplitHostPort(s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.Atoi(port)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// queued is how many bytes a host's sockets hold for a port.
func (l *lab) queued(list []socket, port int) (tx, rx int) {
	suffix := fmt.Sprintf(":%04X", port)
	for _, s := range list {
		if strings.HasSuffix(s.local, suffix) || strings.HasSuffix(s.remote, suffix) {
			tx, rx = tx+s.tx, rx+s.rx
		}
	}
	return tx, rx
}

// TestDatapathStalledClient: a client that does not read blocks its engine,
// costs little memory in agent and kernel, and disturbs nobody. When it reads
// again after ten seconds it gets every byte: the engine's probes of the closed
// window were answered all the while.
func TestDatapathStalledClient(t *testing.T) {
	t.Parallel()
	for tier, stall := range map[string]time.Duration{"packet": 10 * time.Second, "copy": 3 * time.Second} {
		t.Run(tier, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, labOptions{})
			s := l.sim(simulator.Config{ZeroLatency: true})
			n := l.start(tier, []string{s.URL()})
			port := portOf(t, s)
			n.load(n.addr, 4, 4, 10*time.Second, func(k, i int) simulator.Raw {
				return simulator.Raw{Seed: uint64(k), Chunks: 20, Max: 20000, IntervalUS: 300}
			})
			before := n.memory()
			// 32 MiB, in pieces that come one by one as long as they can.
			r := simulator.Raw{Seed: 7, Chunks: 2048, Max: 32768, IntervalUS: 200}
			c, err := l.open(n.addr, r, 0)
			l.check(err)
			defer c.Close()
			l.check(c.head())
			l.check(c.read(1000))
			began := time.Now()

			// The engine is blocked when its socket's queue does not shrink.
			var tx int
			l.eventually(20*time.Second, func() bool {
				first, _ := l.queued(l.sockets(l.engine), port)
				time.Sleep(500 * time.Millisecond)
				tx, _ = l.queued(l.sockets(l.engine), port)
				return tx > 0 && tx == first
			}, func() string { return "the engine is not blocked" })
			// A handler of one of those before ends behind its answer.
			l.eventually(20*time.Second, func() bool { return s.Running() == 1 },
				func() string { return fmt.Sprintf("%d requests run at the engine", s.Running()) })
			// Others go on.
			if good := n.load(n.addr, 10, 5, 5*time.Second, func(k, i int) simulator.Raw {
				return simulator.Raw{Seed: uint64(k*10 + i), Chunks: 20, Max: 400, IntervalUS: 1000}
			}); good != 50 {
				t.Errorf("%d of 50 responses beside the stalled one", good)
			}
			if grown := n.memory() - before; grown > 8<<20 {
				t.Errorf("the agent grew by %d KiB", grown>>10)
			}
			toClient, _ := l.queued(l.sockets(l.proxy), 8080)
			_, fromEngine := l.queued(l.sockets(l.proxy), port)
			t.Logf("blocked after %v: %d bytes queued at the engine, %d and %d in the agent's sockets; %+v",
				time.Since(began), tx, fromEngine, toClient, n.datapath())
			// Two sockets' buffers, and what is on its way to the client.
			limit := 4 << 20
			if tier == "packet" {
				limit = 1 << 20
				l.eventually(20*time.Second, func() bool { return n.datapath().Now.Active == 1 },
					func() string {
						return fmt.Sprintf("the kernel does not carry the stalled response alone: %+v", n.datapath())
					})
			}
			if toClient+fromEngine > limit {
				t.Errorf("%d and %d bytes are queued in the agent's sockets", fromEngine, toClient)
			}

			time.Sleep(time.Until(began.Add(stall)))
			c.SetReadDeadline(time.Now().Add(time.Minute))
			began = time.Now()
			// More than the client's own socket can hold.
			err = c.read(16 << 20)
			t.Logf("16 MiB took %v when reading again", time.Since(began))
			if err == nil {
				err = c.rest()
			}
			if err != nil {
				t.Errorf("when reading again: %v", err)
			}
			t.Logf("all took %v", time.Since(began))
			l.eventually(20*time.Second, func() bool { return s.Running() == 0 }, func() string { return "the engine is not done" })
		})
	}
}

// TestDatapathLostWindowUpdate: a client's window opens again, and the packets
// that say so are lost. Only the engine's probe of the window, answered by the
// client itself, lets the response go on.
func TestDatapathLostWindowUpdate(t *testing.T) {
	t.Parallel()
	l := newLab(t, labOptions{})
	s := l.sim(simulator.Config{ZeroLatency: true})
	n := l.start("packet", []string{s.URL()})
	r := simulator.Raw{Seed: 3, Chunks: 400, Max: 8000, IntervalUS: 1000}
	c, err := l.open(n.addr, r, 16<<10)
	l.check(err)
	defer c.Close()
	n.carried(1)
	// The window is closed when the kernel has nothing more to carry.
	var carried uint64
	l.eventually(20*time.Second, func() bool {
		before := n.datapath().Kernel.Bytes
		time.Sleep(500 * time.Millisecond)
		carried = n.datapath().Kernel.Bytes
		return carried > 0 && carried == before
	}, func() string { return "the window does not close" })
	l.nftAt(l.client, `table inet lossy {
		chain out { type filter hook output priority filter; policy drop; }
	}`)
	// All that the client's socket holds.
	var got bytes.Buffer
	c.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
	if _, err := got.ReadFrom(c); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("while its acknowledgements are lost the client reads: %v", err)
	}
	if d := n.datapath(); d.Kernel.Bytes > carried+64<<10 || d.Now.Active != 1 {
		t.Errorf("the window was not closed: %d bytes carried, then %+v", carried, d)
	}
	l.nftAt(l.client, "delete table inet lossy")
	// Probes are about as far apart as the window was closed long.
	began := time.Now()
	c.SetReadDeadline(time.Now().Add(10 * time.Second))
	if err := receive(bufio.NewReader(io.MultiReader(&got, c)), r); err != nil {
		t.Errorf("after the window has opened: %v", err)
	}
	t.Logf("the response went on and ended after %v: %+v", time.Since(began), n.datapath())
}

// TestDatapathEngineBreaks: when an engine breaks off in the middle, its client
// sees a broken response, never one that looks whole.
func TestDatapathEngineBreaks(t *testing.T) {
	t.Parallel()
	for _, tier := range []string{"packet", "copy"} {
		t.Run(tier, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, labOptions{})
			s := l.sim(simulator.Config{ZeroLatency: true})
			n := l.start(tier, []string{s.URL()})
			var wait sync.WaitGroup
			const clients = 40
			for k := range clients {
				wait.Go(func() {
					// Of a large enough body, so that its length is worth
					// carrying.
					r := simulator.Raw{Seed: uint64(k), Chunks: 60, Max: 2000, IntervalUS: 3000, BreakAfter: 20 + k%5,
						Break: []string{"fin", "rst"}[k%2], Length: []string{"chunked", "fixed"}[k/2%2]}
					c, err := l.open(n.addr, r, 0)
					if err == nil {
						defer c.Close()
						c.SetReadDeadline(time.Now().Add(10 * time.Second))
						err = c.head()
					}
					if err != nil {
						t.Errorf("client %d: %v", k, err)
						return
					}
					b, err := io.ReadAll(c.body)
					if !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, syscall.ECONNRESET) {
						t.Errorf("client %d (%s, %s): %d bytes, then %v", k, r.Break, r.Length, len(b), err)
					}
					// Where an event may stand, one tells what has happened.
					told := bytes.LastIndex(b, []byte(`data: {"error":{"message":"The engine's answer broke off."`))
					if told > 0 && !bytes.HasSuffix(b[:told], []byte("\n\n")) && !bytes.HasSuffix(b[:told], []byte("\r\n\r\n")) {
						t.Errorf("client %d: an event within another: %q", k, b[max(0, told-20):])
					}
					if told >= 0 {
						b = b[:told]
					}
					if !bytes.HasPrefix(simulator.AppendRaw(nil, r), b) {
						t.Errorf("client %d (%s, %s): wrong bytes", k, r.Break, r.Length)
					}
				})
			}
			wait.Wait()
			l.eventually(20*time.Second, func() bool { return n.metric("inferrail_requests_total", `outcome="engine_broke"`) == clients },
				func() string {
					return fmt.Sprintf("%v of %d are counted as broken", n.metric("inferrail_requests_total", `outcome="engine_broke"`), clients)
				})
			d := n.datapath()
			if tier == "packet" && d.Kernel.Splices < clients*8/10 {
				t.Errorf("the kernel carried too few of them: %+v", d)
			}
			t.Logf("%+v", d)
			if good := n.load(n.addr, 20, 3, 10*time.Second, func(k, i int) simulator.Raw {
				return simulator.Raw{Seed: uint64(k*10 + i), Chunks: 20, Max: 400, IntervalUS: 500}
			}); good != 60 {
				t.Errorf("%d of 60 responses afterwards", good)
			}
			// A client has its last byte before the agent has settled it.
			l.eventually(20*time.Second, func() bool {
				d = n.datapath()
				return d.Now.Armed+d.Now.Active+d.Now.Paused+d.Now.Ended == 0 && d.Running == 0
			}, func() string { return fmt.Sprintf("left over: %+v", d) })
		})
	}
}

// remains lists what agents have left pinned for the proxy host's namespace,
// and the filters that are attached there.
func (l *lab) remains() (pins, filters []string) {
	l.t.Helper()
	var ns unix.Stat_t
	l.check(unix.Fstat(int(l.proxy), &ns))
	root := fmt.Sprintf("/sys/fs/bpf/inferrail/net-%d", ns.Ino)
	filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err == nil && path != root {
			pins = append(pins, path[len(root)+1:])
		}
		return nil
	})
	h, err := netlink.NewHandleAt(l.proxy)
	l.check(err)
	defer h.Close()
	links, err := h.LinkList()
	l.check(err)
	for _, link := range links {
		for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
			list, _ := h.FilterList(link, parent)
			for _, f := range list {
				if b, ok := f.(*netlink.BpfFilter); ok {
					filters = append(filters, link.Attrs().Name+" "+b.Name)
				}
			}
		}
	}
	return pins, filters
}

// TestDatapathKilled: the agent is killed while the kernel carries 200
// responses. Their clients and the engine hear of it at once, the next agent
// works at once beside what was left, and in the end nothing is.
func TestDatapathKilled(t *testing.T) {
	for _, hook := range []string{"tcx", "clsact"} {
		t.Run(hook, func(t *testing.T) {
			l := newLab(t, labOptions{})
			s := l.sim(simulator.Config{ZeroLatency: true})
			n := l.start("packet", []string{s.URL()}, "--datapath-hook", hook)
			const clients = 200
			ended := make(chan error, clients)
			var begun atomic.Int64
			for k := range clients {
				go func() {
					c, err := l.open(n.addr, simulator.Raw{Seed: uint64(k), Chunks: 5000, Max: 300, IntervalUS: 40000}, 0)
					if err == nil {
						defer c.Close()
						c.SetReadDeadline(time.Now().Add(20 * time.Second))
						err = c.head()
					}
					if err != nil {
						ended <- fmt.Errorf("client %d did not come so far: %w", k, err)
						return
					}
					begun.Add(1)
					_, err = io.Copy(io.Discard, c.body)
					ended <- err
				}()
			}
			l.eventually(20*time.Second, func() bool { return begun.Load() == clients },
				func() string { return fmt.Sprintf("%d of %d responses have begun", begun.Load(), clients) })
			n.carried(clients * 95 / 100)
			killed := time.Now()
			n.kill()
			for range clients {
				select {
				case err := <-ended:
					if !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, syscall.ECONNRESET) {
						t.Errorf("a client sees %v", err)
					}
				case <-time.After(time.Until(killed.Add(10 * time.Second))):
					t.Fatal("a client does not see the end")
				}
			}
			told := time.Since(killed)
			l.eventually(20*time.Second, func() bool { return s.Running() == 0 },
				func() string { return fmt.Sprintf("the engine generates for %d", s.Running()) })
			engineTold := time.Since(killed)
			t.Logf("clients were told within %v, the engine within %v", told, engineTold)
			if told > time.Second || engineTold > 1500*time.Millisecond {
				t.Errorf("clients were told within %v, the engine within %v", told, engineTold)
			}
			if pins, filters := l.remains(); len(pins)+len(filters) == 0 {
				t.Error("the killed agent has left no programs: its sockets were closed with wrong numbers")
			}

			quick := func(k, i int) simulator.Raw {
				return simulator.Raw{Seed: uint64(k*10 + i), Chunks: 30, Max: 400, IntervalUS: 500}
			}
			for _, expect := range []struct {
				which string
				found int
			}{{"second", 1}, {"third", 1}} {
				n = l.start("packet", []string{s.URL()}, "--datapath-hook", hook)
				if d := n.datapath(); d.Tier != "packet" {
					t.Errorf("the %s agent: %+v", expect.which, d)
				}
				good := n.load(n.addr, 20, 10, 10*time.Second, quick)
				if d := n.settled(); good != 200 || d.Kernel.Ended < 150 {
					t.Errorf("the %s agent: %d of 200 responses, %+v", expect.which, good, d)
				}
				n.stop()
				if found := strings.Count(l.stderr.String(), "programs of a killed agent found"); found != expect.found {
					t.Errorf("the %s agent: remains found %d times", expect.which, found)
				}
				if pins, filters := l.remains(); len(pins)+len(filters) > 0 {
					t.Errorf("the %s agent leaves behind: pins %v, filters %v", expect.which, pins, filters)
				}
			}
		})
	}
}

// TestDatapathEngineRestarts: the engine comes back behind the same address
// while connections to it are pooled, after an end in order and after one that
// nobody heard of.
func TestDatapathEngineRestarts(t *testing.T) {
	t.Parallel()
	for _, silent := range []bool{false, true} {
		t.Run(fmt.Sprintf("silent=%v", silent), func(t *testing.T) {
			t.Parallel()
			l := newLab(t, labOptions{races: true})
			config := simulator.Config{ZeroLatency: true}
			s := l.sim(config)
			config.Port, config.Host = portOf(t, s), "10.9.2.2"
			n := l.start("packet", []string{s.URL()})
			load := func(k, i int) simulator.Raw {
				return simulator.Raw{Seed: uint64(k*10 + i), Chunks: 20, Max: 400, IntervalUS: 1000}
			}
			for round := range 2 {
				if good := n.load(n.addr, 20, 5, 10*time.Second, load); good != 100 {
					t.Errorf("round %d: %d of 100 responses before the restart", round, good)
				}
				accepted := s.Accepted()
				if silent {
					l.nft(fmt.Sprintf(`table inet cut {
						chain in { type filter hook input priority filter; ip saddr 10.9.2.2 tcp sport %d drop; }
					}`, config.Port))
				}
				s.Close()
				if silent {
					time.Sleep(50 * time.Millisecond)
				} else {
					time.Sleep(time.Duration(round) * 1500 * time.Millisecond)
				}
				if s = l.sim(config); s == nil {
					return
				}
				if silent {
					l.nft("delete table inet cut")
				}
				l.eventually(15*time.Second, func() bool { p, err := n.get("/readyz"); return err == nil && p.status == 200 },
					func() string { return "the agent does not take the engine back" })
				// A status other than 200 fails.
				if good := n.load(n.addr, 20, 5, 10*time.Second, load); good != 100 {
					t.Errorf("round %d: %d of 100 responses after the restart", round, good)
				}
				t.Logf("round %d: %d connections before, %d after, %d replays", round, accepted, s.Accepted(), n.datapath().Replays)
			}
			if d := n.settled(); d.Kernel.Ended < 250 || silent && d.Replays == 0 {
				t.Errorf("%+v", d)
			}
		})
	}
}

// TestDatapathDrains: a signal lets running responses finish, refuses new
// clients, and the agent ends well.
func TestDatapathDrains(t *testing.T) {
	t.Parallel()
	l := newLab(t, labOptions{races: true})
	s := l.sim(simulator.Config{ZeroLatency: true})
	n := l.start("packet", []string{s.URL()})
	const clients = 60
	results := make(chan error, clients)
	var begun atomic.Int64
	for k := range clients {
		go func() {
			c, err := l.open(n.addr, simulator.Raw{Seed: uint64(k), Chunks: 200, Max: 400, IntervalUS: 20000}, 0)
			if err == nil {
				defer c.Close()
				c.SetReadDeadline(time.Now().Add(30 * time.Second))
				if err = c.head(); err == nil {
					begun.Add(1)
					err = c.rest()
				}
			}
			results <- err
		}()
	}
	idle, err := l.dial(n.addr)
	l.check(err)
	defer idle.Close()
	l.eventually(20*time.Second, func() bool { return begun.Load() == clients && n.datapath().Connections == clients+1 },
		func() string {
			return fmt.Sprintf("%d of %d responses have begun: %+v", begun.Load(), clients, n.datapath())
		})
	n.carried(clients * 9 / 10)
	n.cmd.Process.Signal(syscall.SIGTERM)
	var refusal error
	l.eventually(20*time.Second, func() bool {
		c, err := l.dial(n.addr)
		if err == nil {
			c.Close()
		}
		refusal = err
		// One that is in line when the agent stops to listen is reset.
		return err != nil && !errors.Is(err, syscall.ECONNRESET)
	}, func() string { return fmt.Sprint("a draining agent takes connections: ", refusal) })
	if !errors.Is(refusal, syscall.ECONNREFUSED) {
		t.Errorf("a draining agent answers a new client with: %v", refusal)
	}
	if d := n.datapath(); d.Now.Active < clients/2 {
		t.Errorf("the responses do not go on in the kernel: %+v", d)
	}
	// It had some seconds to ask once more.
	idle.SetReadDeadline(time.Now().Add(5 * time.Second))
	if _, err := idle.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("an idle connection is told: %v", err)
	}
	for range clients {
		if err := <-results; err != nil {
			t.Error(err)
		}
	}
	select {
	case err := <-n.done:
		if err != nil {
			t.Errorf("the agent ended with %v", err)
		}
		n.cmd = nil
	case <-time.After(20 * time.Second):
		t.Error("the agent does not end when its last response has")
	}
	if pins, _ := l.remains(); len(pins) > 0 {
		t.Errorf("left behind: %v", pins)
	}
}

// TestDatapathStallTimeout: a client that takes nothing for longer than it may
// is cut in both tiers, and its engine freed: in the packet tier the engine
// would wait for ever, told by the client's kernel that its window is closed.
func TestDatapathStallTimeout(t *testing.T) {
	t.Parallel()
	for _, tier := range []string{"packet", "copy"} {
		t.Run(tier, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, labOptions{})
			s := l.sim(simulator.Config{ZeroLatency: true})
			file := filepath.Join(t.TempDir(), "config.yaml")
			const stall = 2 * time.Second
			l.check(os.WriteFile(file, []byte(fmt.Sprintf("server: {stall_timeout: %v}\n", stall)), 0o600))
			n := l.start(tier, []string{s.URL()}, "--config", file)
			began := time.Now()
			c, err := l.open(n.addr, simulator.Raw{Seed: 7, Chunks: 4096, Max: 32768, IntervalUS: 200}, 0)
			l.check(err)
			defer c.Close()
			l.check(c.head())
			// One that only waits for its next token is none of these.
			idle, err := l.open(n.addr, simulator.Raw{Seed: 8, Chunks: 2, Max: 300, IntervalUS: 3_000_000}, 0)
			l.check(err)
			defer idle.Close()
			l.check(idle.head())
			l.eventually(20*time.Second, func() bool { return s.Aborted() == 1 },
				func() string { return fmt.Sprintf("%d requests run at the engine; %+v", s.Running(), n.datapath()) })
			if took := time.Since(began); took < stall {
				t.Errorf("it was cut after %v, before the time was over", took)
			}
			l.check(idle.rest())
			if s.Aborted() != 1 {
				t.Errorf("%d were cut", s.Aborted())
			}
		})
	}
}

// TestDatapathSlowClientAtShutdown: an agent that ends leaves answers in its
// sockets' queues, whose numbers the programs have to correct until a slow
// client has them.
func TestDatapathSlowClientAtShutdown(t *testing.T) {
	t.Parallel()
	l := newLab(t, labOptions{delay: 800 * time.Millisecond})
	s := l.sim(simulator.Config{ZeroLatency: true})
	n := l.start("packet", []string{s.URL()})
	c, err := l.open(n.addr, simulator.Raw{Seed: 1, Chunks: 8, Max: 150, IntervalUS: 400000}, 8192)
	l.check(err)
	defer c.Close()
	c.SetReadDeadline(time.Now().Add(30 * time.Second))
	l.check(c.head())
	l.check(c.rest())
	if d := n.datapath(); d.Kernel.Bytes == 0 {
		t.Fatalf("the kernel has carried nothing: %+v", d)
	}
	answer := func(i int) simulator.Raw {
		return simulator.Raw{Seed: uint64(50 + i), Chunks: 1, Max: 16000, Length: "fixed"}
	}
	const more = 4
	for i := range more {
		l.check(ask(c.TCPConn, answer(i)))
	}
	// Nothing runs before they have arrived, either.
	l.eventually(30*time.Second, func() bool { return s.Finished() == 1+more && n.datapath().Running == 0 },
		func() string {
			return fmt.Sprintf("%d of %d answers are given: %+v", s.Finished(), 1+more, n.datapath())
		})
	if tx, _ := l.queued(l.sockets(l.proxy), 8080); tx == 0 {
		t.Fatal("nothing is queued for the client, so nothing is tested")
	}
	n.cmd.Process.Signal(syscall.SIGTERM)
	br := bufio.NewReader(c.TCPConn)
	for i := range more {
		l.check(receive(br, answer(i)))
	}
}
