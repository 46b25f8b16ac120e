package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/inferrail/inferrail/simulator"
)

// TestDatapathInterfacesComeAndGo: an interface that matches a glob is attached
// to when it comes, each time, and clients behind it are carried to.
func TestDatapathInterfacesComeAndGo(t *testing.T) {
	t.Parallel()
	for _, hook := range []string{"tcx", "clsact"} {
		t.Run(hook, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, labOptions{})
			s := l.sim(simulator.Config{ZeroLatency: true})
			n := l.start("packet", []string{s.URL()}, "--iface", "x*", "--iface", "p1", "--datapath-hook", hook)
			attached := func(name string) bool { return slices.Contains(n.datapath().Interfaces, name) }
			load := func(addr string) int {
				return n.load(addr, 10, 5, 10*time.Second, func(k, i int) simulator.Raw {
					return simulator.Raw{Seed: uint64(k*10 + i), Chunks: 40, Max: 400, IntervalUS: 500}
				})
			}
			// No pattern names p0.
			if good := load(n.addr); good != 50 {
				t.Errorf("%d of 50 responses by an interface that is not watched", good)
			}
			if d := n.datapath(); attached("p0") || d.Kernel.Splices > 0 {
				t.Errorf("an interface that no pattern names is used: %+v", d)
			}
			for round := range 2 {
				before := n.datapath().Kernel.Ended
				l.in(l.client, func() {
					l.join(l.client, "y0", l.proxy, "x0", "3", 0, false)
					l.check(netns.Set(l.client))
				})
				l.eventually(20*time.Second, func() bool { return attached("x0") },
					func() string { return fmt.Sprintf("x0 is not attached to: %+v", n.datapath()) })
				good := load("10.9.3.1:8080")
				if d := n.settled(); good != 50 || d.Kernel.Ended < before+40 {
					t.Errorf("round %d: %d of 50 responses, %d ended in the kernel", round, good, d.Kernel.Ended-before)
				}
				// Once while the kernel carries a response over it.
				c, err := l.open("10.9.3.1:8080", simulator.Raw{Chunks: 10000, Max: 100, IntervalUS: 5000}, 0)
				l.check(err)
				l.check(c.head())
				n.carried(1)
				l.in(l.proxy, func() {
					link, err := netlink.LinkByName("x0")
					l.check(err)
					l.check(netlink.LinkDel(link))
				})
				l.eventually(20*time.Second, func() bool { return !attached("x0") },
					func() string { return fmt.Sprintf("x0 is still listed: %+v", n.datapath()) })
				// Nothing reaches its client any more, nor comes from it: that
				// is left to keep-alive.
				n.quickProbes(1, 1, 2)
				l.eventually(10*time.Second, func() bool { return s.Running() == 0 },
					func() string { return "the engine still generates for a client that cannot be reached" })
				c.SetLinger(0)
				c.Close()
			}
			if good := load(n.addr); good != 50 {
				t.Errorf("%d of 50 responses afterwards", good)
			}
		})
	}
}

// tunnel joins two hosts by a device without link-layer headers on each, and a
// process that copies packets between the two.
func (l *lab) tunnel(a netns.NsHandle, aName string, b netns.NsHandle, bName, network string) {
	l.t.Helper()
	open := func(ns netns.NsHandle, name, host string) (fd int) {
		l.in(ns, func() {
			var err error
			if fd, err = unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0); err != nil {
				l.t.Skipf("no TUN devices here: %v", err)
			}
			request, err := unix.NewIfreq(name)
			l.check(err)
			request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
			l.check(unix.IoctlIfreq(fd, unix.TUNSETIFF, request))
			l.address(ns, name, network, host)
			link, err := netlink.LinkByName(name)
			l.check(err)
			l.check(netlink.LinkSetUp(link))
		})
		return fd
	}
	ends := [2]int{open(a, aName, "2"), open(b, bName, "1")}
	stop := make(chan struct{})
	var wait sync.WaitGroup
	for i := range ends {
		from, to := ends[i], ends[1-i]
		wait.Go(func() {
			buf := make([]byte, 1<<16)
			for {
				fds := []unix.PollFd{{Fd: int32(from), Events: unix.POLLIN}}
				n, err := unix.Poll(fds, 100)
				select {
				case <-stop:
					return
				default:
				}
				if err != nil || n == 0 {
					continue
				}
				if n, err = unix.Read(from, buf); err == nil {
					unix.Write(to, buf[:n])
				}
			}
		})
	}
	l.t.Cleanup(func() {
		close(stop)
		wait.Wait()
		unix.Close(ends[0])
		unix.Close(ends[1])
	})
}

// TestDatapathLayer3: the client, the engine or both are reached over devices
// whose packets begin with the IP header.
func TestDatapathLayer3(t *testing.T) {
	t.Parallel()
	for _, v := range []struct {
		name           string
		client, engine bool // by which way the device stands
		listen, agent  string
	}{
		{name: "client", client: true, agent: "10.9.5.1:8080", listen: "10.9.2.2"},
		{name: "engine", engine: true, agent: "10.9.1.1:8080", listen: "10.9.6.2"},
		{name: "both", client: true, engine: true, agent: "10.9.5.1:8080", listen: "10.9.6.2"},
		{name: "client, IPv6", client: true, agent: "[fd09:5::1]:8080", listen: "fd09:2::2"},
		{name: "engine, IPv6", engine: true, agent: "[fd09:1::1]:8080", listen: "fd09:6::2"},
	} {
		t.Run(v.name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, labOptions{})
			if v.client {
				l.tunnel(l.client, "tc", l.proxy, "tp0", "5")
			}
			if v.engine {
				l.tunnel(l.engine, "te", l.proxy, "tp1", "6")
			}
			s := l.sim(simulator.Config{ZeroLatency: true, Host: v.listen})
			n := l.start("packet", []string{s.URL()})
			good := n.load(v.agent, 20, 10, 20*time.Second, func(k, i int) simulator.Raw {
				return simulator.Raw{Seed: uint64(k*1000 + i), Chunks: 40, Max: 900, IntervalUS: 500}
			})
			d := n.settled()
			if good != 200 || d.Kernel.Ended < 150 {
				t.Errorf("%d of 200 responses, %+v", good, d)
			}
			for name, wanted := range map[string]bool{"tp0": v.client, "tp1": v.engine} {
				if wanted && !slices.Contains(d.Interfaces, name) {
					t.Errorf("%s is not attached to: %v", name, d.Interfaces)
				}
			}
		})
	}
}

// once runs an agent on the proxy host that is expected to fail, as a user, and
// returns its exit status and what it said.
func (l *lab) once(user *syscall.Credential, args ...string) (status int, said string) {
	l.t.Helper()
	cmd := l.command(user, args...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	l.in(l.proxy, func() { l.check(cmd.Start()) })
	timer := time.AfterFunc(15*time.Second, func() { cmd.Process.Kill() })
	defer timer.Stop()
	err := cmd.Wait()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		l.t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), out.String()
}

func (l *lab) command(user *syscall.Credential, args ...string) *exec.Cmd {
	args = append([]string{"agent", "--listen", ":8080", "--admin-listen", "127.0.0.1:9090", "--replica", "http://10.9.2.2:1"}, args...)
	cmd := exec.Command(asUsed(l.t), args...)
	cmd.Env = append(os.Environ(), "INFERRAIL_RUN=1", "GORACE=halt_on_error=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: user}
	cmd.Dir = "/"
	return cmd
}

// nobody has no capability.
var nobody = &syscall.Credential{Uid: 65534, Gid: 65534, NoSetGroups: true}

// TestDatapathForced: a tier that is asked for and cannot be had ends the agent
// with a reason; what is not asked for does without.
func TestDatapathForced(t *testing.T) {
	l := newLab(t, labOptions{})
	for _, v := range []struct {
		name string
		user *syscall.Credential
		args []string
		want []string // words of what is said
	}{
		{"an unknown tier", nil, []string{"--datapath", "warp"}, []string{"datapath", "warp", "auto, packet"}},
		{"an unknown loop", nil, []string{"--datapath", "packet", "--datapath-loop", "nonsense"}, []string{"loop", "nonsense", "bounded"}},
		{"an unknown hook", nil, []string{"--datapath", "packet", "--datapath-hook", "nonsense"}, []string{"hook", "nonsense", "clsact"}},
		{"no privilege", nobody, []string{"--datapath", "packet"}, []string{"datapath packet cannot be had", "CAP_BPF"}},
	} {
		status, said := l.once(v.user, v.args...)
		if status != 1 && status != 2 {
			t.Errorf("%s: exit status %d: %s", v.name, status, said)
		}
		for _, w := range v.want {
			if !strings.Contains(said, w) {
				t.Errorf("%s: %q is not said in: %s", v.name, w, said)
			}
		}
		if strings.Contains(said, "goroutine ") || strings.Count(said, "\n") > 8 {
			t.Errorf("%s: not for people to read: %s", v.name, said)
		}
	}
	if pins, filters := l.remains(); len(pins)+len(filters) > 0 {
		t.Errorf("left behind: pins %v, filters %v", pins, filters)
	}

	t.Run("auto", func(t *testing.T) {
		l := newLab(t, labOptions{})
		s := l.sim(simulator.Config{ZeroLatency: true})
		cmd := l.command(nobody, "--datapath", "auto", "--replica", "e0="+s.URL())
		cmd.Stderr, cmd.Stdout = l.stderr, io.Discard
		started := make(chan error)
		ended := make(chan error, 1)
		go func() {
			runtime.LockOSThread() // it is in another namespace from here on
			err := netns.Set(l.proxy)
			if err == nil {
				err = cmd.Start()
			}
			started <- err
			if err == nil {
				ended <- cmd.Wait()
			}
		}()
		l.check(<-started)
		n := &node{l: l, cmd: cmd, done: ended, addr: "10.9.1.1:8080"}
		t.Cleanup(n.stop)
		l.eventually(10*time.Second, func() bool { p, err := n.get("/readyz"); return err == nil && p.status == 200 },
			func() string { return "the agent does not serve" })
		if good := n.load(n.addr, 10, 5, 10*time.Second, func(k, i int) simulator.Raw {
			return simulator.Raw{Seed: uint64(k*10 + i), Chunks: 20, Max: 400, IntervalUS: 500}
		}); good != 50 {
			t.Errorf("%d of 50 responses", good)
		}
		if d := n.datapath(); d.Tier != "copy" || !strings.Contains(d.Reason, "CAP_BPF") {
			t.Errorf("an agent without privilege: %+v", d)
		}
	})
}

// TestDatapathRouteChanges: the way to the client changes under a stream that
// the kernel carries, and the old one leads nowhere.
func TestDatapathRouteChanges(t *testing.T) {
	t.Parallel()
	l := newLab(t, labOptions{pathMTU: 1500})
	s := l.sim(simulator.Config{ZeroLatency: true})
	n := l.start("packet", []string{s.URL()})
	ip := func(ns netns.NsHandle, args string) {
		t.Helper()
		var out []byte
		var err error
		l.in(ns, func() { out, err = exec.Command("ip", strings.Fields(args)...).CombinedOutput() })
		if err != nil {
			t.Fatalf("ip %s: %v\n%s", args, err, out)
		}
	}
	c, err := l.open(n.addr, simulator.Raw{Seed: 3, Chunks: 40, Max: 300, IntervalUS: 50_000}, 0)
	l.check(err)
	defer c.Close()
	l.check(c.head())
	l.eventually(20*time.Second, func() bool { return n.datapath().Now.Active == 1 }, func() string { return "not carried" })
	ip(l.router, "addr add 10.9.1.253/24 dev r0")
	ip(l.proxy, "route replace 10.9.3.0/24 via 10.9.1.253")
	ip(l.proxy, "neigh replace 10.9.1.254 lladdr 02:00:00:00:00:99 dev p0 nud permanent")
	c.SetReadDeadline(time.Now().Add(10 * time.Second))
	l.check(c.rest())
	if d := n.settled(); d.Kernel.Ended != 1 || len(d.Kernel.Pauses) > 0 {
		t.Errorf("the kernel did not carry on: %+v", d)
	}
}
