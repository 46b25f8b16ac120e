package bpf

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand"
	"net"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// TestMain runs the tests in a network namespace of their own, so that the
// programs see no other traffic.
func TestMain(m *testing.M) {
	if os.Getenv("INFERRAIL_IN_NETNS") == "" && os.Getuid() == 0 {
		cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
		cmd.Env = append(os.Environ(), "INFERRAIL_IN_NETNS=1")
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
		if err := cmd.Run(); err != nil {
			var exit *exec.ExitError
			if errors.As(err, &exit) {
				os.Exit(exit.ExitCode())
			}
			fmt.Fprintln(os.Stderr, "cannot make a network namespace:", err)
			os.Exit(m.Run())
		}
		os.Exit(0)
	}
	if lo, err := netlink.LinkByName("lo"); err == nil {
		netlink.LinkSetUp(lo)
	}
	os.Exit(m.Run())
}

// needBPF skips the test where BPF cannot be loaded, and fails it there when
// INFERRAIL_NEED_BPF says that it must be.
func needBPF(t *testing.T) {
	t.Helper()
	p, err := ebpf.NewProgram(probeSpec())
	if err == nil {
		p.Close()
		return
	}
	if os.Getenv("INFERRAIL_NEED_BPF") == "1" {
		t.Fatalf("BPF is needed here and cannot be loaded: %v", err)
	}
	t.Skipf("BPF cannot be loaded: %v", err)
}

func newSplicer(t *testing.T, o Options) *Splicer {
	t.Helper()
	needBPF(t)
	s, err := Load(o)
	if err != nil {
		var ve *ebpf.VerifierError
		if errors.As(err, &ve) {
			t.Fatalf("%+v", ve)
		}
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// relayed is a client and an engine with a proxy's two sockets between them.
type relayed struct {
	s         *Splicer
	client, c *net.TCPConn // the client's own socket, and the proxy's
	engine, e *net.TCPConn
	cid, eid  uint32
}

func pair(t *testing.T, network, addr string) (dialed, accepted *net.TCPConn) {
	t.Helper()
	ln, err := net.Listen(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	d, err := net.Dial(network, ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	a, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close(); a.Close() })
	return d.(*net.TCPConn), a.(*net.TCPConn)
}

func fd(t *testing.T, c *net.TCPConn) (n int) {
	t.Helper()
	rc, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	rc.Control(func(f uintptr) { n = int(f) })
	return n
}

func newRelayed(t *testing.T, s *Splicer, network, addr string) *relayed {
	t.Helper()
	r := &relayed{s: s}
	r.client, r.c = pair(t, network, addr)
	r.e, r.engine = pair(t, network, addr)
	var why string
	if r.cid, why = s.Enter(fd(t, r.c), -1); why != "" {
		t.Fatal("client not entered: ", why)
	}
	if r.eid, why = s.Enter(fd(t, r.e), 7); why != "" {
		t.Fatal("engine not entered: ", why)
	}
	return r
}

// copyRest copies what the kernel leaves of a response of so many bytes: once it has
// left something, all that it has not carried. The kernel does so when packets come
// late or twice, as on a machine that stands still at times. The function it returns
// ends it, and reports whether it has copied anything.
func (r *relayed) copyRest(t *testing.T, p *Splice, length int) (end func() bool) {
	stop, done := make(chan struct{}), make(chan bool, 1)
	engine, client := fd(t, r.e), fd(t, r.c)
	go func() {
		left := false
		for b := make([]byte, 4096); ; {
			select {
			case <-stop:
				done <- left
				return
			case <-time.After(2 * time.Millisecond):
			}
			if n, _, _ := unix.Recvfrom(engine, b[:1], unix.MSG_PEEK|unix.MSG_DONTWAIT); n <= 0 {
				continue
			}
			if _, _, _, h := p.Take(); h != Here {
				continue
			}
			left = true
			for rest := length - int(p.Stats().Bytes); rest > 0; {
				n, err := r.e.Read(b[:min(len(b), rest)])
				if err != nil {
					break // the engine's side has failed, and the client's will tell
				}
				rest -= n
				for out := b[:n]; len(out) > 0; {
					switch n, err := unix.SendmsgN(client, out, nil, nil, unix.MSG_EOR); {
					case err == nil:
						out = out[n:]
					case errors.Is(err, unix.EAGAIN):
						time.Sleep(time.Millisecond)
					default:
						t.Errorf("to the client: %v", err)
						done <- left
						return
					}
				}
			}
		}
	}()
	return func() bool { close(stop); return <-done }
}

func write(t *testing.T, c net.Conn, s string) {
	t.Helper()
	if _, err := io.WriteString(c, s); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, c net.Conn, want string) {
	t.Helper()
	b := make([]byte, len(want))
	c.SetReadDeadline(time.Now().Add(5 * time.Second))
	n, err := io.ReadFull(c, b)
	if err != nil || string(b) != want {
		t.Fatalf("read %q, %v; want %q", b[:n], err, want)
	}
}

func quiet(t *testing.T, c net.Conn) {
	t.Helper()
	c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	var b [64]byte
	if n, err := c.Read(b[:]); n > 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("unexpected %q, %v", b[:n], err)
	}
}

// TestSpliceOneResponse follows one chunked response: the request and the head
// pass through userspace, the body does not, and both connections go on.
func TestSpliceOneResponse(t *testing.T) {
	for _, v := range []struct {
		name, network, addr string
		o                   Options
	}{
		{"IPv4", "tcp4", "127.0.0.1:0", Options{}},
		{"IPv6", "tcp6", "[::1]:0", Options{}},
		{"bounded loop", "tcp4", "127.0.0.1:0", Options{BoundedLoop: true}},
	} {
		t.Run(v.name, func(t *testing.T) {
			s := newSplicer(t, v.o)
			if err := s.Attach(1, false, true); err != nil {
				t.Fatal(err)
			}
			r := newRelayed(t, s, v.network, v.addr)
			for round := range 5 {
				settled := make(chan bool, 8)
				p, why := s.Join(r.cid, r.eid, func() { settled <- true })
				if p == nil {
					t.Fatal(why)
				}
				write(t, r.client, "request")
				read(t, r.c, "request")
				write(t, r.e, "request")
				read(t, r.engine, "request")
				write(t, r.engine, "head")
				read(t, r.e, "head")
				write(t, r.c, "HEAD")
				if !p.Arm(0, 0, false) {
					t.Fatal("not armed")
				}
				read(t, r.client, "HEAD")
				var sent bytes.Buffer
				for i := range 20 {
					chunk := fmt.Sprintf("%x\r\n%s\r\n", 100+i, bytes.Repeat([]byte{'a' + byte(i)}, 100+i))
					sent.WriteString(chunk)
					write(t, r.engine, chunk)
					read(t, r.client, chunk)
				}
				write(t, r.engine, "0\r\n\r\n")
				sent.WriteString("0\r\n\r\n")
				read(t, r.client, "0\r\n\r\n")
				st := p.Stats()
				if st.Packets != 21 || st.Chunks != 21 {
					t.Fatalf("round %d: the kernel carried %+v", round, st)
				}
				select {
				case <-settled:
				case <-time.After(3 * time.Second):
					t.Fatalf("round %d: not settled: %+v", round, *p.m)
				}
				if _, _, _, h := p.Take(); h != Ended {
					t.Fatalf("held by %d", h)
				}
				got := p.AppendTail(nil)
				want := sent.Bytes()[sent.Len()-tailBytes:]
				if !bytes.Equal(got, want) {
					t.Fatalf("tail\n%q\nwant\n%q", got, want)
				}
				p.Part()
				quiet(t, r.e)
				quiet(t, r.client)
			}
			// Both connections still work by themselves, in both directions.
			write(t, r.c, "after")
			read(t, r.client, "after")
			write(t, r.engine, "after")
			read(t, r.e, "after")
		})
	}
}

// TestSpliceRandomChunks sends responses in writes that cut the framing
// anywhere, with a userspace that copies what the kernel does not take.
func TestSpliceRandomChunks(t *testing.T) {
	s := newSplicer(t, Options{})
	if err := s.Attach(1, false, true); err != nil {
		t.Fatal(err)
	}
	r := newRelayed(t, s, "tcp4", "127.0.0.1:0")
	rnd := rand.New(rand.NewSource(1))
	carried := uint64(0)
	for round := range 200 {
		var body bytes.Buffer
		for range 1 + rnd.Intn(30) {
			n := 1 + rnd.Intn(3000)
			fmt.Fprintf(&body, "%x\r\n", n)
			data := make([]byte, n)
			for i := range data {
				data[i] = "0\r\n\r\nabc"[rnd.Intn(8)]
			}
			body.Write(data)
			body.WriteString("\r\n")
		}
		body.WriteString("0\r\nx: y\r\n\r\n")
		settled := make(chan bool, 64)
		p, _ := s.Join(r.cid, r.eid, func() { settled <- true })
		if round%20 != 19 { // those are only copied
			p.Arm(0, 0, false)
		}
		go func() {
			rnd := rand.New(rand.NewSource(int64(round)))
			b := body.Bytes()
			for len(b) > 0 {
				n := min(len(b), 1+rnd.Intn(2000))
				r.engine.Write(b[:n])
				b = b[n:]
				if rnd.Intn(3) > 0 {
					time.Sleep(time.Duration(rnd.Intn(300)) * time.Microsecond)
				}
			}
		}()
		rest := r.copyRest(t, p, body.Len())
		got := make(chan []byte)
		go func() {
			b := make([]byte, body.Len())
			r.client.SetReadDeadline(time.Now().Add(5 * time.Second))
			n, err := io.ReadFull(r.client, b)
			if err != nil {
				t.Errorf("round %d: %v after %d of %d bytes; %+v", round, err, n, len(b), *p.m)
			}
			got <- b
		}()
		select {
		case b := <-got:
			if !bytes.Equal(b, body.Bytes()) {
				t.Fatalf("round %d: body differs", round)
			}
		case <-time.After(6 * time.Second):
			t.Fatal("stuck")
		}
		copied := rest()
		carried += p.Stats().Bytes
		for !p.Settled() {
			<-settled
		}
		if _, _, _, h := p.Take(); h != Ended && !copied {
			t.Fatalf("round %d: held by %d: %+v", round, h, *p.m)
		}
		p.Part()
	}
	t.Logf("carried %d bytes", carried)
	if carried == 0 {
		t.Error("nothing was carried")
	}
}

// TestSocketState: what the kernel says of a connection decides when its
// number corrections end.
func TestSocketState(t *testing.T) {
	s := newSplicer(t, Options{})
	if err := s.Attach(1, false, true); err != nil {
		t.Fatal(err)
	}
	r := newRelayed(t, s, "tcp4", "127.0.0.1:0")
	f := func(want uint32) {
		t.Helper()
		var got uint32
		for range 100 {
			if got = s.socketState(r.cid); got == want {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
		t.Errorf("state %d, want %d", got, want)
	}
	f(1) // ESTABLISHED
	r.client.CloseWrite()
	f(8) // CLOSE_WAIT
	r.c.CloseWrite()
	f(0)
	// The proxy closes first: TIME_WAIT is its.
	r2 := newRelayed(t, s, "tcp6", "[::1]:0")
	r.cid = r2.cid
	f(1)
	r2.c.CloseWrite()
	f(5) // FIN_WAIT2
	r2.client.Close()
	f(6)                      // TIME_WAIT
	s.conns[r2.cid].shift = 1 // as if it had been spliced
	s.Leave(r2.cid)
	s.sweepClosing()
	if c := s.Census(); c.Closing != 1 {
		t.Errorf("%d closing connections, want the one in TIME_WAIT", c.Closing)
	}
}

// TestFull: when ids run out connections and responses are refused with a
// reason, and ids that come back serve again.
func TestFull(t *testing.T) {
	s := newSplicer(t, Options{MaxSplices: 2}) // one splice, three connections
	if err := s.Attach(1, false, true); err != nil {
		t.Fatal(err)
	}
	r := newRelayed(t, s, "tcp4", "127.0.0.1:0")
	p, why := s.Join(r.cid, r.eid, func() {})
	if p == nil {
		t.Fatal(why)
	}
	if q, why := s.Join(r.cid, r.eid, func() {}); q != nil || why != WhyFull {
		t.Fatalf("a second splice of one: %v, %q", q, why)
	}
	p.Part()
	if p, why = s.Join(r.cid, r.eid, func() {}); p == nil {
		t.Fatal("after Part: ", why)
	}
	p.Part()
	_, third := pair(t, "tcp4", "127.0.0.1:0")
	id, why := s.Enter(fd(t, third), -1)
	if id == 0 {
		t.Fatal(why)
	}
	_, fourth := pair(t, "tcp4", "127.0.0.1:0")
	if none, why := s.Enter(fd(t, fourth), -1); none != 0 || why != WhyFull {
		t.Fatalf("a fourth connection of three: %d, %q", none, why)
	}
	s.Leave(id)
	if id, why := s.Enter(fd(t, fourth), -1); id == 0 {
		t.Fatal("after Leave: ", why)
	}
}

// TestUnseen: a connection that was made before the programs watched is never
// spliced.
func TestUnseen(t *testing.T) {
	s := newSplicer(t, Options{})
	_, early := pair(t, "tcp4", "127.0.0.1:0")
	if err := s.Attach(1, false, true); err != nil {
		t.Fatal(err)
	}
	if id, why := s.Enter(fd(t, early), -1); id != 0 || why != WhyUnseen {
		t.Errorf("entered as %d, %q", id, why)
	}
	_, late := pair(t, "tcp4", "127.0.0.1:0")
	if id, why := s.Enter(fd(t, late), -1); id == 0 {
		t.Error(why)
	}
}
