package bench

import (
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Addresses inside the benchmark's own network namespaces.
const (
	engineAddr   = "10.77.2.2:8000"
	engineAddr2  = "10.77.2.2:8001" // the same engine, for contestants that choose
	proxyAddr    = "10.77.1.1:8080"
	proxyPort    = "8080"
	clientDevice = "toclient" // on the proxy host
	engineDevice = "toengine" // on the proxy host
)

// network is three hosts in a row: client, proxy, engine. It is made for one
// measurement and closed after the last process in it has ended.
type network struct {
	client, proxy, engine *host
}

// newNetwork makes and joins the hosts. forward lets the proxy host's kernel
// pass packets on, for a contestant that is nothing else.
func newNetwork(forward bool) (n *network, err error) {
	n = &network{}
	defer func() {
		if err != nil {
			n.close()
		}
	}()
	for _, h := range []**host{&n.client, &n.proxy, &n.engine} {
		if *h, err = newHost(); err != nil {
			return n, err
		}
	}
	if err := n.proxy.join(clientDevice, "10.77.1.1/24", n.client, "eth0", "10.77.1.2/24"); err != nil {
		return n, err
	}
	if err := n.proxy.join(engineDevice, "10.77.2.1/24", n.engine, "eth0", "10.77.2.2/24"); err != nil {
		return n, err
	}
	if err := n.client.route("10.77.1.1"); err != nil {
		return n, err
	}
	if err := n.engine.route("10.77.2.1"); err != nil {
		return n, err
	}
	value := "0"
	if forward {
		value = "1"
	}
	return n, n.proxy.do(func() error {
		return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte(value), 0)
	})
}

// close waits for the hosts' threads. The kernel removes namespaces and
// devices with the last user.
func (n *network) close() {
	for _, h := range []*host{n.client, n.proxy, n.engine} {
		if h != nil {
			h.close()
		}
	}
}

// host is a network namespace without a name, held by a thread that lives in
// it. Whatever the thread starts or opens is in the namespace. close ends the
// thread, and with it, by PR_SET_PDEATHSIG, the processes it has started. All
// methods but close may be called from any goroutine.
type host struct {
	work chan func()
	done chan struct{}
	ns   *os.File // for handing devices over; owned by the host
}

func newHost() (*host, error) {
	h := &host{work: make(chan func()), done: make(chan struct{})}
	started := make(chan error)
	onNewThread(func() {
		defer close(h.done)
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			started <- fmt.Errorf("cannot make a network namespace: %w", err)
			return
		}
		ns, err := os.Open("/proc/thread-self/ns/net")
		h.ns = ns
		started <- err
		if err != nil {
			return
		}
		for f := range h.work {
			f()
		}
	})
	if err := <-started; err != nil {
		<-h.done
		return nil, err
	}
	err := h.do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.LinkSetUp(lo)
	})
	if err != nil {
		h.close()
		return nil, fmt.Errorf("lo: %w", err)
	}
	return h, nil
}

// onNewThread runs f on a goroutine whose thread ends with it. The process's
// first thread cannot end and is passed over.
func onNewThread(f func()) {
	chosen := make(chan struct{})
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			onNewThread(f)
			runtime.UnlockOSThread()
			close(chosen)
			return
		}
		close(chosen)
		f() // The thread stays locked, so the runtime ends it.
	}()
	<-chosen
}

func (h *host) close() {
	close(h.work)
	<-h.done
	h.ns.Close()
}

// do runs f on the host's thread. A host that is nil is the machine itself.
func (h *host) do(f func() error) error {
	if h == nil {
		return f()
	}
	result := make(chan error, 1)
	h.work <- func() { result <- f() }
	return <-result
}

// join makes a pair of devices between two hosts.
func (h *host) join(name, addr string, peer *host, peerName, peerAddr string) error {
	err := h.do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = name
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: peerName, PeerNamespace: netlink.NsFd(peer.ns.Fd())})
	})
	if err == nil {
		err = errors.Join(h.up(name, addr), peer.up(peerName, peerAddr))
	}
	if err != nil {
		return fmt.Errorf("devices %s and %s: %w", name, peerName, err)
	}
	return nil
}

func (h *host) up(name, addr string) error {
	return h.do(func() error {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		a, err := netlink.ParseAddr(addr)
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(link, a); err != nil {
			return err
		}
		return netlink.LinkSetUp(link)
	})
}

// route sets the host's default gateway.
func (h *host) route(gateway string) error {
	return h.do(func() error {
		if err := netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP(gateway)}); err != nil {
			return fmt.Errorf("default route over %s: %w", gateway, err)
		}
		return nil
	})
}

// dial connects from the host. The connection may be used on any thread.
func (h *host) dial(d *net.Dialer, addr string) (conn net.Conn, err error) {
	err = h.do(func() error {
		conn, err = d.Dial("tcp4", addr)
		return err
	})
	return conn, err
}
