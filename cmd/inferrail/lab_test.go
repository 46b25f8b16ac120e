package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/inferrail/inferrail/bpf"
	"github.com/inferrail/inferrail/simulator"
)

// The process's first thread is kept for TestMain, which stays at home. /proc/net is
// that thread's, whoever reads it, and unlike others it cannot end: a goroutine that
// enters a network namespace there and never unlocks it, as those do that start agents
// in a lab, would leave this process with the sockets of that namespace for good.
func init() { runtime.LockOSThread() }

// TestMain lets the test binary be the agent: with INFERRAIL_RUN=1 it runs the
// command line like the real one, race detector included.
func TestMain(m *testing.M) {
	// Children of a benchmark have an environment without our variables: they are known
	// by their command, where a test has flags.
	if os.Getenv("INFERRAIL_RUN") == "1" || len(os.Args) > 1 && !strings.HasPrefix(os.Args[1], "-") {
		runtime.UnlockOSThread() // as the program has it
		signals := make(chan os.Signal, 2)
		signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
		os.Exit(run(&env{args: os.Args[1:], stdout: os.Stdout, stderr: os.Stderr, signals: signals}))
	}
	status := m.Run()
	if dir := builtIn.Load(); dir != nil {
		os.RemoveAll(*dir)
	}
	os.Exit(status)
}

// lab is three hosts in network namespaces: a client, the proxy with an agent,
// and engines. A wire may stand between them that delays, loses and reorders.
//
//	client 10.9.1.2 ---- 10.9.1.1 proxy 10.9.2.1 ---- 10.9.2.2 engine
//	       fd09:1::2     fd09:1::1     fd09:2::1      fd09:2::2
//
// Sockets of client and engine are made in their namespace and used from
// ordinary goroutines; the agent is a process of its own.
type lab struct {
	t                     *testing.T
	client, proxy, engine netns.NsHandle
	router                netns.NsHandle // with labOptions.pathMTU
	o                     labOptions
	stderr                *bytes.Buffer
}

type labOptions struct {
	delay                time.Duration // one way, on the client's wire
	loss, reorder        float64       // of packets, on every hop
	clientMTU, engineMTU int
	noOffload            bool // single packets on the wires, no GSO
	pathMTU              int  // a router before the client sends no larger packets
	// races lets the agent have the race detector in it, where this test has. The tests
	// that do make the agent join, part and end connections in all ways and many at once;
	// what the others ask of it one at a time would only be slower.
	races bool
}

// needLab skips a test that cannot have namespaces, or BPF, here; where
// INFERRAIL_NEED_BPF says that it must, it fails.
func needLab(t *testing.T) {
	t.Helper()
	var why string
	if os.Getuid() != 0 {
		why = "network namespaces need root"
	} else if err := bpf.Probe(); err != nil {
		why = err.Error()
	}
	switch {
	case why == "":
	case os.Getenv("INFERRAIL_NEED_BPF") == "1":
		t.Fatal("needed here: ", why)
	default:
		t.Skip(why)
	}
}

func newLab(t *testing.T, o labOptions) *lab {
	t.Helper()
	needLab(t)
	l := &lab{t: t, o: o, stderr: new(bytes.Buffer)}
	wire := o.delay > 0 || o.loss > 0 || o.reorder > 0
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	home, err := netns.Get()
	l.check(err)
	defer home.Close()
	defer netns.Set(home)
	for _, h := range []*netns.NsHandle{&l.client, &l.proxy, &l.engine} {
		*h, err = netns.New()
		l.check(err)
		lo, err := netlink.LinkByName("lo")
		l.check(err)
		l.check(netlink.LinkSetUp(lo))
		// Nothing here is a duplicate address; do not wait to find out.
		os.WriteFile("/proc/sys/net/ipv6/conf/default/accept_dad", []byte("0"), 0o644)
	}
	if o.pathMTU > 0 {
		l.route(o.pathMTU)
	} else {
		l.join(l.client, "c0", l.proxy, "p0", "1", o.clientMTU, wire)
	}
	l.join(l.engine, "e0", l.proxy, "p1", "2", o.engineMTU, o.loss > 0 || o.reorder > 0)
	t.Cleanup(func() {
		l.client.Close()
		l.proxy.Close()
		l.engine.Close()
		if t.Failed() && l.stderr.Len() > 0 {
			t.Logf("agent's log:\n%s", l.stderr)
		}
	})
	return l
}

// join lays a cable between two hosts: a veth pair, or two with a wire between.
func (l *lab) join(far netns.NsHandle, farName string, near netns.NsHandle, nearName, net string, mtu int, impaired bool) {
	l.t.Helper()
	if mtu == 0 {
		mtu = 1500
	}
	if !impaired {
		l.veth(far, farName, near, nearName, mtu)
	} else {
		middle, err := netns.New()
		l.check(err)
		l.t.Cleanup(func() { middle.Close() })
		l.veth(far, farName, middle, "wa", mtu)
		l.veth(near, nearName, middle, "wb", mtu)
		delay := l.o.delay
		if farName == "e0" {
			delay = 0
		}
		l.impair(middle, delay)
	}
	l.address(far, farName, net, "2")
	l.address(near, nearName, net, "1")
}

// route puts a router between client and proxy, whose link to the client, at
// 10.9.3.2 and fd09:3::2 then, carries only small packets. Neither end knows.
func (l *lab) route(mtu int) {
	l.t.Helper()
	router, err := netns.New()
	l.check(err)
	l.t.Cleanup(func() { router.Close() })
	l.router = router
	os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o644)
	os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0o644)
	l.o.noOffload = true
	l.veth(router, "r0", l.proxy, "p0", 1500)
	l.veth(router, "r1", l.client, "c0", 1500)
	l.address(l.proxy, "p0", "1", "1")
	l.address(router, "r0", "1", "fe")
	l.address(router, "r1", "3", "fe")
	l.address(l.client, "c0", "3", "2")
	l.check(netns.Set(router))
	link, err := netlink.LinkByName("r1")
	l.check(err)
	l.check(netlink.LinkSetMTU(link, mtu))
	for _, h := range []struct {
		ns      netns.NsHandle
		to, via string
	}{{l.proxy, "3", "1"}, {l.client, "1", "3"}} {
		l.check(netns.Set(h.ns))
		for _, r := range [][2]string{
			{"10.9." + h.to + ".0/24", "10.9." + h.via + ".254"},
			{"fd09:" + h.to + "::/64", "fd09:" + h.via + "::fe"},
		} {
			dst, err := netlink.ParseIPNet(r[0])
			l.check(err)
			l.check(netlink.RouteAdd(&netlink.Route{Dst: dst, Gw: net.ParseIP(r[1])}))
		}
	}
}

func (l *lab) veth(a netns.NsHandle, aName string, b netns.NsHandle, bName string, mtu int) {
	l.t.Helper()
	l.check(netns.Set(a))
	l.check(netlink.LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: aName, MTU: mtu}, PeerName: bName, PeerNamespace: netlink.NsFd(b),
	}))
	for _, end := range []struct {
		ns   netns.NsHandle
		name string
	}{{a, aName}, {b, bName}} {
		l.check(netns.Set(end.ns))
		link, err := netlink.LinkByName(end.name)
		l.check(err)
		l.check(netlink.LinkSetMTU(link, mtu))
		if l.o.noOffload || aName != "c0" && aName != "e0" || bName == "wa" {
			offloadsOff(l.t, end.name)
		}
		l.check(netlink.LinkSetUp(link))
	}
}

func (l *lab) address(ns netns.NsHandle, name, net, host string) {
	l.t.Helper()
	l.check(netns.Set(ns))
	link, err := netlink.LinkByName(name)
	l.check(err)
	number, err := strconv.ParseInt(host, 16, 32)
	l.check(err)
	for _, a := range []string{fmt.Sprintf("10.9.%s.%d/24", net, number), "fd09:" + net + "::" + host + "/64"} {
		addr, err := netlink.ParseAddr(a)
		l.check(err)
		addr.Flags = unix.IFA_F_NODAD
		l.check(netlink.AddrAdd(link, addr))
	}
}

// offloadsOff makes an interface carry packets as a wire would: no larger than
// its MTU, with checksums.
func offloadsOff(t *testing.T, name string) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	type value struct{ cmd, _ uint32 }
	type request struct {
		name [unix.IFNAMSIZ]byte
		data *value
		_    [16]byte
	}
	for _, cmd := range []uint32{unix.ETHTOOL_STXCSUM, unix.ETHTOOL_STSO, unix.ETHTOOL_SGSO, unix.ETHTOOL_SGRO} {
		v := &value{cmd: cmd}
		r := request{data: v}
		copy(r.name[:], name)
		// What an interface does not have it cannot switch off.
		unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&r)))
	}
}

// impair copies packets between the two interfaces of a namespace.
func (l *lab) impair(ns netns.NsHandle, delay time.Duration) {
	l.t.Helper()
	l.check(netns.Set(ns))
	open := func(name string) int {
		link, err := netlink.LinkByName(name)
		l.check(err)
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(htons(unix.ETH_P_ALL)))
		l.check(err)
		l.check(unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: htons(unix.ETH_P_ALL), Ifindex: link.Attrs().Index}))
		l.check(unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1))
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 32<<20)
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 200_000})
		return fd
	}
	a, b := open("wa"), open("wb")
	stop := make(chan struct{})
	var wait sync.WaitGroup
	for i, d := range [][2]int{{a, b}, {b, a}} {
		rnd := rand.New(rand.NewSource(int64(i + 1)))
		type packet struct {
			at   time.Time
			data []byte
		}
		queue := make(chan packet, 1<<16)
		wait.Go(func() {
			for p := range queue {
				time.Sleep(time.Until(p.at))
				unix.Write(d[1], p.data)
			}
		})
		wait.Go(func() {
			defer close(queue)
			buf := make([]byte, 1<<17)
			for {
				n, err := unix.Read(d[0], buf)
				select {
				case <-stop:
					return
				default:
				}
				if err != nil {
					continue
				}
				if n > 60 && rnd.Float64() < l.o.loss {
					continue
				}
				data := bytes.Clone(buf[:n])
				if n > 60 && rnd.Float64() < l.o.reorder {
					wait.Go(func() {
						time.Sleep(delay + 2*time.Millisecond)
						unix.Write(d[1], data)
					})
					continue
				}
				if delay == 0 {
					unix.Write(d[1], data)
					continue
				}
				queue <- packet{time.Now().Add(delay), data}
			}
		})
	}
	l.t.Cleanup(func() {
		close(stop)
		wait.Wait()
		unix.Close(a)
		unix.Close(b)
	})
}

func htons(x uint16) uint16 { return x<<8 | x>>8 }

func (l *lab) check(err error) {
	l.t.Helper()
	if err != nil {
		l.t.Fatal(err)
	}
}

// in runs f with the calling thread in a namespace. Sockets f makes stay there.
func (l *lab) in(ns netns.NsHandle, f func()) {
	runtime.LockOSThread()
	home, err := netns.Get()
	if err != nil {
		panic(err)
	}
	if err := netns.Set(ns); err != nil {
		panic(err)
	}
	f()
	if err := netns.Set(home); err != nil {
		return // the thread is lost to others, as it stays locked
	}
	home.Close()
	runtime.UnlockOSThread()
}

// sim starts a simulated engine on the engine host.
func (l *lab) sim(c simulator.Config) *simulator.Server {
	l.t.Helper()
	if c.Host == "" {
		c.Host = "10.9.2.2"
	}
	var s *simulator.Server
	var err error
	l.in(l.engine, func() { s, err = simulator.Start(c) })
	l.check(err)
	l.t.Cleanup(func() { s.Close() })
	return s
}

// dial connects from the client host.
func (l *lab) dial(addr string) (*net.TCPConn, error) {
	var c net.Conn
	var err error
	l.in(l.client, func() { c, err = net.DialTimeout("tcp", addr, 10*time.Second) })
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

// nft loads a ruleset on the proxy host.
func (l *lab) nft(rules string) {
	l.t.Helper()
	l.nftAt(l.proxy, rules)
}

func (l *lab) nftAt(host netns.NsHandle, rules string) {
	l.t.Helper()
	if _, err := exec.LookPath("nft"); err != nil {
		l.t.Skip("nft is not installed")
	}
	cmd := exec.Command("nft", "-f", "-")
	cmd.Stdin = strings.NewReader(rules)
	var out []byte
	var err error
	l.in(host, func() { out, err = cmd.CombinedOutput() })
	if err != nil {
		l.t.Fatalf("nft: %v\n%s", err, out)
	}
}

// node is an agent running on the proxy host.
type node struct {
	l    *lab
	cmd  *exec.Cmd
	done chan error
	addr string
}

// start runs an agent with the given replicas and waits until it serves.
func (l *lab) start(tier string, engines []string, args ...string) *node {
	l.t.Helper()
	n := &node{l: l, done: make(chan error, 1), addr: "10.9.1.1:8080"}
	args = append([]string{"agent", "--listen", ":8080", "--admin-listen", "127.0.0.1:9090", "--datapath", tier}, args...)
	for i, e := range engines {
		args = append(args, "--replica", fmt.Sprintf("e%d=%s", i, e))
	}
	program := thisTest()
	if !l.o.races {
		program = asUsed(l.t)
	}
	n.cmd = exec.Command(program, args...)
	n.cmd.Env = append(os.Environ(), "INFERRAIL_RUN=1", "GORACE=halt_on_error=1")
	n.cmd.Stdout = io.Discard
	n.cmd.Stderr = l.stderr
	n.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	go func() {
		// Pdeathsig follows the thread that started the process.
		runtime.LockOSThread()
		err := netns.Set(l.proxy)
		if err == nil {
			err = n.cmd.Start()
		}
		started <- err
		if err == nil {
			n.done <- n.cmd.Wait()
		}
	}()
	l.check(<-started)
	l.t.Cleanup(func() { n.stop() })
	deadline := time.Now().Add(20 * time.Second)
	for {
		if body, err := n.get("/readyz"); err == nil && body.status == 200 {
			return n
		}
		select {
		case err := <-n.done:
			n.cmd = nil
			l.t.Fatalf("agent ended: %v\n%s", err, l.stderr)
		default:
		}
		if time.Now().After(deadline) {
			l.t.Fatalf("agent is not ready\n%s", l.stderr)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// stop drains the agent. It fails the test if the agent does not end well.
func (n *node) stop() {
	if n.cmd == nil {
		return
	}
	n.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case err := <-n.done:
		if err != nil {
			n.l.t.Errorf("agent ended with %v", err)
		}
	case <-time.After(20 * time.Second):
		n.l.t.Error("agent does not drain")
		n.cmd.Process.Signal(syscall.SIGQUIT)
		<-n.done
	}
	n.cmd = nil
}

// kill ends the agent by SIGKILL.
func (n *node) kill() {
	n.cmd.Process.Kill()
	<-n.done
	n.cmd = nil
}

type page struct {
	status int
	body   []byte
}

// get reads an admin page.
func (n *node) get(path string) (page, error) {
	var c net.Conn
	var err error
	n.l.in(n.l.proxy, func() { c, err = net.DialTimeout("tcp", "127.0.0.1:9090", 10*time.Second) })
	if err != nil {
		return page{}, err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(5 * time.Second))
	tr := &http.Transport{DisableKeepAlives: true, DialContext: func(context.Context, string, string) (net.Conn, error) { return c, nil }}
	resp, err := (&http.Client{Transport: tr}).Get("http://127.0.0.1:9090" + path)
	if err != nil {
		return page{}, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return page{resp.StatusCode, b}, err
}

// datapathPage is what the tests look at in GET /debug/datapath.
type datapathPage struct {
	Tier, Reason string
	Interfaces   []string
	Now          struct{ Armed, Active, Paused, Ended, Stalled, Connections, Closing int }
	Kernel       struct {
		Splices, Ended, Packets, Bytes, Chunks uint64
		Pauses, Refusals                       map[string]uint64
	}
	Wakeups, Chunks  uint64
	Replays, Running int
	Connections      int // of clients
}

func (n *node) datapath() datapathPage {
	n.l.t.Helper()
	p, err := n.get("/debug/datapath")
	n.l.check(err)
	var d datapathPage
	if err := json.Unmarshal(p.body, &d); err != nil {
		n.l.t.Fatalf("%v in %s", err, p.body)
	}
	return d
}

// settled is the page once no request runs any more: a client has the last byte
// of its response before the agent has counted it.
func (n *node) settled() (d datapathPage) {
	n.l.t.Helper()
	n.l.eventually(20*time.Second, func() bool {
		d = n.datapath()
		return d.Running == 0 && d.Now.Armed+d.Now.Active+d.Now.Paused+d.Now.Ended == 0
	}, func() string { return fmt.Sprintf("left over: %+v", d) })
	return d
}

// memory is the agent's resident memory in bytes.
func (n *node) memory() int {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", n.cmd.Process.Pid))
	for line := range strings.Lines(string(b)) {
		var kb int
		if _, err := fmt.Sscanf(line, "VmRSS: %d kB", &kb); err == nil {
			return kb << 10
		}
	}
	return 0
}

// files is how many descriptors the agent has open.
func (n *node) files() int {
	n.l.t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", n.cmd.Process.Pid))
	n.l.check(err)
	return len(entries)
}

// metric is the sum of the samples of a metric whose labels contain all of the
// given parts, such as `kind="prompt"`.
func (n *node) metric(name string, labels ...string) float64 {
	n.l.t.Helper()
	p, err := n.get("/metrics")
	n.l.check(err)
	return sumMetric(n.l.t, string(p.body), name, labels...)
}

func sumMetric(t *testing.T, page, name string, labels ...string) (sum float64) {
	t.Helper()
	for line := range strings.Lines(page) {
		sample, value, ok := strings.Cut(strings.TrimSpace(line), " ")
		if full, _, _ := strings.Cut(sample, "{"); !ok || full != name {
			continue
		}
		if slices.ContainsFunc(labels, func(l string) bool { return !strings.Contains(sample, l) }) {
			continue
		}
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		sum += v
	}
	return sum
}

// socket is a line of a network namespace's TCP table.
type socket struct {
	local, remote string // address:port as the kernel prints them
	state         int
	tx, rx        int // bytes queued
}

const established = 1

// sockets lists the TCP sockets of a host.
func (l *lab) sockets(ns netns.NsHandle) (list []socket) {
	l.t.Helper()
	var tables [2][]byte
	var errs [2]error
	l.in(ns, func() {
		for i, name := range []string{"tcp", "tcp6"} {
			tables[i], errs[i] = os.ReadFile("/proc/thread-self/net/" + name)
		}
	})
	for i, table := range tables {
		l.check(errs[i])
		for line := range strings.Lines(string(table)) {
			var s socket
			var at int
			if _, err := fmt.Sscanf(strings.TrimSpace(line), "%d: %s %s %X %X:%X", &at, &s.local, &s.remote, &s.state, &s.tx, &s.rx); err == nil {
				list = append(list, s)
			}
		}
	}
	return list
}

// quickProbes gives the agent's open connections a keep-alive of seconds
// instead of minutes: idle, interval, and how many unanswered probes are the
// end. It reaches into the process, so that the agent needs no knob for it.
func (n *node) quickProbes(idle, interval, count int) {
	n.l.t.Helper()
	pid := n.cmd.Process.Pid
	process, err := unix.PidfdOpen(pid, 0)
	n.l.check(err)
	defer unix.Close(process)
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	n.l.check(err)
	changed := 0
	for _, e := range entries {
		if name, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, e.Name())); !strings.HasPrefix(name, "socket:") {
			continue
		}
		theirs, err := strconv.Atoi(e.Name())
		n.l.check(err)
		fd, err := unix.PidfdGetfd(process, theirs, 0)
		if err != nil {
			continue // closed meanwhile
		}
		if on, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE); err == nil && on == 1 {
			for option, value := range map[int]int{unix.TCP_KEEPINTVL: interval, unix.TCP_KEEPCNT: count, unix.TCP_KEEPIDLE: idle} {
				if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, option, value); err != nil {
					n.l.t.Error(err)
				}
			}
			changed++
		}
		unix.Close(fd)
	}
	if changed == 0 {
		n.l.t.Fatal("the agent has no connection with keep-alive")
	}
}

// eventually waits for a condition and returns how long that took. The test
// fails when it does not come in time; what tells then what is instead.
func (l *lab) eventually(limit time.Duration, condition func() bool, what func() string) time.Duration {
	l.t.Helper()
	start := time.Now()
	for !condition() {
		if time.Since(start) > limit {
			l.t.Errorf("after %v: %s", limit, what())
			break
		}
		time.Sleep(2 * time.Millisecond)
	}
	return time.Since(start)
}

// stream is one response that a client of the lab reads at its own pace. It
// belongs to one goroutine.
type stream struct {
	*net.TCPConn
	raw  simulator.Raw
	br   *bufio.Reader
	body io.Reader
	got  []byte
}

// open asks for a response on a new connection. Its head is not read yet.
// receive, when not 0, bounds the client's receive buffer.
func (l *lab) open(addr string, r simulator.Raw, receive int) (*stream, error) {
	d := net.Dialer{Timeout: 10 * time.Second, Control: func(_, _ string, c syscall.RawConn) (err error) {
		if receive > 0 {
			c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, receive) })
		}
		return err
	}}
	var c net.Conn
	var err error
	l.in(l.client, func() { c, err = d.Dial("tcp", addr) })
	if err != nil {
		return nil, err
	}
	s := &stream{TCPConn: c.(*net.TCPConn), raw: r}
	if err := ask(s, r); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// head reads the head of the response.
func (s *stream) head() error {
	// No read-ahead beyond what the caller takes: how much a client leaves in
	// its socket is what some tests are about.
	s.br = bufio.NewReaderSize(s.TCPConn, 16)
	resp, err := http.ReadResponse(s.br, &http.Request{Method: "POST"})
	if err != nil {
		return fmt.Errorf("head: %w", err)
	}
	if resp.StatusCode != 200 {
		text, _ := io.ReadAll(resp.Body)
		return fmt.Errorf("status %d: %s", resp.StatusCode, text)
	}
	s.body = resp.Body
	return nil
}

// read reads n bytes of the body.
func (s *stream) read(n int) error {
	at := len(s.got)
	s.got = append(s.got, make([]byte, n)...)
	k, err := io.ReadFull(s.body, s.got[at:])
	s.got = s.got[:at+k]
	return err
}

// rest reads the body to its end and compares it with what was asked for.
func (s *stream) rest() error {
	b, err := io.ReadAll(s.body)
	s.got = append(s.got, b...)
	if err != nil {
		return fmt.Errorf("body after %d bytes: %w", len(s.got), err)
	}
	want := simulator.AppendRaw(nil, s.raw)
	if !bytes.Equal(s.got, want) {
		return fmt.Errorf("body of %d bytes differs from the %d expected", len(s.got), len(want))
	}
	return nil
}

// carried waits until the kernel carries at least so many responses.
func (n *node) carried(active int) {
	n.l.t.Helper()
	n.l.eventually(10*time.Second, func() bool { return n.datapath().Now.Active >= active },
		func() string { return fmt.Sprintf("not %d responses in the kernel: %+v", active, n.datapath()) })
}
