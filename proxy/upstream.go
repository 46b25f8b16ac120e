package proxy

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"
)

// upstream is a replica's idle connections. The zero value has none.
type upstream struct {
	mu     sync.Mutex // guards the rest
	idle   []*engineConn
	timer  *time.Timer // runs sweep while there are idle ones
	closed bool
}

// NewReplica makes the endpoint of an engine at rawURL, for example
// http://10.0.0.10:8000 or http://host:8000/prefix.
func NewReplica(slot int, id string, rawURL string) (*Replica, error) {
	u, err := url.Parse(rawURL)
	if err != nil {
		return nil, fmt.Errorf("replica %s: %w", id, err)
	}
	switch {
	case u.Scheme != "http":
		return nil, fmt.Errorf("replica %s: the URL %q does not start with http://", id, rawURL)
	case u.Hostname() == "":
		return nil, fmt.Errorf("replica %s: the URL %q names no host", id, rawURL)
	case u.User != nil || u.RawQuery != "" || u.Fragment != "":
		return nil, fmt.Errorf("replica %s: the URL %q has more than host, port and path", id, rawURL)
	case id == "" || strings.ContainsFunc(id, func(r rune) bool { return r < ' ' || r > '~' }):
		return nil, fmt.Errorf("replica %q: an id is printable ASCII", id)
	}
	port, err := strconv.ParseUint(cmp.Or(u.Port(), "80"), 10, 16)
	if err != nil {
		return nil, fmt.Errorf("replica %s: the URL %q has no port between 0 and 65535", id, rawURL)
	}
	return &Replica{
		Slot:      slot,
		ID:        id,
		key:       xxh3.HashString(id),
		Addr:      net.JoinHostPort(u.Hostname(), strconv.FormatUint(port, 10)),
		Host:      u.Host,
		BasePath:  strings.TrimRight(u.EscapedPath(), "/"),
		addresses: newAddresses(u.Hostname(), uint16(port)),
	}, nil
}

// Close closes the replica's idle connections. Those in use are closed when
// their exchange ends.
func (r *Replica) Close() {
	u := &r.upstream
	u.mu.Lock()
	u.closed = true
	idle := u.idle
	u.idle = nil
	if u.timer != nil {
		u.timer.Stop()
	}
	u.mu.Unlock()
	for _, e := range idle {
		e.close()
	}
	r.addresses.close()
}

// engineConn is one connection to an engine. It is owned by the exchange that
// dialled it or took it from the idle stack, until that one closes it or puts
// it back.
//
// The head of a response is waited for on Go's netpoller (conn.recvEngine),
// which wakes the exchange's goroutine itself; its body is relayed by the shard
// that w is a watch of.
type engineConn struct {
	s       *Server
	replica *Replica
	fd      int      // file's
	file    *os.File // owns fd
	raw     syscall.RawConn
	w       *watch
	// relayed: w may still be armed for a relay.
	relayed bool

	// What recvEngine reads with: try is recv, made once.
	try   func(fd uintptr) (done bool)
	p     []byte
	n     int
	errno syscall.Errno

	// handle names the socket to the kernel programs; when it is 0, why says
	// why it never can be spliced.
	handle uint32
	why    string
	// reused: it has served a request before.
	reused bool
	idled  time.Time
}

// close closes the connection in order: the engine reads what was sent.
func (e *engineConn) close() {
	if e.s.joiner != nil {
		e.s.joiner.Leave(e.handle)
	}
	e.w.forget()
	e.file.Close()
}

func (e *engineConn) recv(fd uintptr) (done bool) {
	e.n, e.errno = recv(int(fd), e.p, 0)
	return e.errno != syscall.EAGAIN
}

// abort closes the connection with a reset, which an engine takes as its
// client's leaving even if it is not reading.
func (e *engineConn) abort() {
	_ = unix.SetsockoptLinger(e.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	e.close()
}

// take returns an idle connection that looks alive, the one used last, or nil.
func (r *Replica) take() *engineConn {
	u := &r.upstream
	for {
		u.mu.Lock()
		n := len(u.idle)
		if n == 0 {
			u.mu.Unlock()
			return nil
		}
		e := u.idle[n-1]
		u.idle[n-1] = nil
		u.idle = u.idle[:n-1]
		u.mu.Unlock()
		if e.silent() {
			e.reused = true
			return e
		}
		e.close()
	}
}

// put keeps a connection whose response was read to its end.
func (e *engineConn) put() {
	if e.relayed {
		// An end of the connection would be reported for ever; of this, once.
		e.relayed = false
		if e.w.arm(unix.EPOLLONESHOT, nil) != nil {
			e.close()
			return
		}
	}
	u := &e.replica.upstream
	e.idled = time.Now()
	u.mu.Lock()
	if u.closed {
		u.mu.Unlock()
		e.close()
		return
	}
	u.idle = append(u.idle, e)
	if len(u.idle) == 1 {
		every := min(e.s.limits.Load().UpstreamIdle, sweepEvery)
		if u.timer == nil {
			u.timer = time.AfterFunc(every, func() { e.replica.sweep(e.s) })
		} else {
			u.timer.Reset(every)
		}
	}
	u.mu.Unlock()
}

// sweepEvery is how often idle connections are looked at. Being told of each
// by epoll would cost every request a system call.
const sweepEvery = 200 * time.Millisecond

// sweep closes connections that have been idle for too long, and those that
// the engine has closed or written to: an idle one has nothing to read.
func (r *Replica) sweep(s *Server) {
	u := &r.upstream
	now, limit := time.Now(), s.limits.Load().UpstreamIdle
	u.mu.Lock()
	var old []*engineConn
	u.idle = slices.DeleteFunc(u.idle, func(e *engineConn) bool {
		if now.Sub(e.idled) < limit && e.silent() {
			return false
		}
		old = append(old, e)
		return true
	})
	if len(u.idle) > 0 && !u.closed {
		u.timer.Reset(min(limit, sweepEvery))
	}
	u.mu.Unlock()
	for _, e := range old {
		e.close()
	}
}

// silent reports that an idle connection has nothing to read: neither an end
// nor bytes that nobody asked for.
func (e *engineConn) silent() bool {
	var b [1]byte
	_, errno := recv(e.fd, b[:], unix.MSG_PEEK)
	return errno == unix.EAGAIN
}

// dial opens a connection to the replica for the exchange of c, which watches
// its client meanwhile. cause is what connecting failed with.
func (c *conn) dial(r *Replica, until time.Time) (e *engineConn, f failure, cause error) {
	limit := time.Now().Add(c.s.limits.Load().ConnectTimeout)
	if limit.After(until) {
		limit = until
	}
	addrs, f, cause := c.find(r, limit)
	for i, addr := range addrs {
		// One that does not answer leaves the others their share of the time.
		share := time.Until(limit) / time.Duration(len(addrs)-i)
		e, f, cause = c.dialAddr(r, addr, time.Now().Add(share))
		if f == none || f == clientLeft || f == shutDown || f == engineDown {
			break
		}
	}
	return e, f, cause
}

// engineBuffer bounds what the kernel holds of a response that is copied while
// its client takes nothing; left to itself it takes up to tcp_rmem, 32 MiB on
// many hosts. It is enough for 100 MB/s from an engine 2 ms away.
const engineBuffer = 256 << 10

func (c *conn) dialAddr(r *Replica, addr netip.AddrPort, limit time.Time) (*engineConn, failure, error) {
	var sa unix.Sockaddr
	family := unix.AF_INET
	if addr.Addr().Is4() || addr.Addr().Is4In6() {
		sa = &unix.SockaddrInet4{Port: int(addr.Port()), Addr: addr.Addr().Unmap().As4()}
	} else {
		family = unix.AF_INET6
		six := &unix.SockaddrInet6{Port: int(addr.Port()), Addr: addr.Addr().As16()}
		if zone := addr.Addr().Zone(); zone != "" {
			if iface, err := net.InterfaceByName(zone); err == nil {
				six.ZoneId = uint32(iface.Index)
			}
		}
		sa = six
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, noSocket, fmt.Errorf("socket: %w", err)
	}
	// From here on the descriptor belongs to e.
	e := &engineConn{s: c.s, replica: r, fd: fd, file: os.NewFile(uintptr(fd), "engine"), w: c.s.shardOf(fd).watch(fd)}
	e.try = e.recv
	// It fails when the netpoller has not taken the descriptor.
	if err = e.file.SetReadDeadline(time.Time{}); err == nil {
		e.raw, err = e.file.SyscallConn()
	}
	if err != nil {
		e.close()
		return nil, noSocket, fmt.Errorf("watch a socket: %w", err)
	}
	for _, o := range [...]struct{ level, name, value int }{
		{unix.IPPROTO_TCP, unix.TCP_NODELAY, 1},
		{unix.SOL_SOCKET, unix.SO_RCVBUF, engineBuffer},
		{unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
		{unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, 15},
		{unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, 15},
		{unix.IPPROTO_TCP, unix.TCP_KEEPCNT, 9},
	} {
		if err := unix.SetsockoptInt(fd, o.level, o.name, o.value); err != nil {
			e.close()
			return nil, connectFailed, fmt.Errorf("setsockopt: %w", err)
		}
	}
	if c.s.joiner != nil {
		if size := c.s.joiner.Segment(family == unix.AF_INET6); size > 0 {
			// Not vital: larger segments are copied instead of carried.
			_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_MAXSEG, size)
		}
	}
	err = unix.Connect(fd, sa)
	for err == unix.EINPROGRESS || err == unix.EINTR {
		switch f := c.waitEngine(e, unix.EPOLLOUT, limit); f {
		case none:
		case engineTimeout:
			e.close()
			return nil, connectTimeout, fmt.Errorf("connect %s: timed out", addr)
		default:
			e.close()
			return nil, f, nil
		}
		var code int
		if code, err = unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR); err == nil && code != 0 {
			err = unix.Errno(code)
		}
		if err == nil {
			// No error may also mean that nothing has happened yet.
			if _, err = unix.Getpeername(fd); err == unix.ENOTCONN {
				err = unix.EINPROGRESS
			}
		}
	}
	if err != nil {
		e.close()
		if err == unix.EADDRNOTAVAIL || err == unix.EAGAIN {
			return nil, noSocket, fmt.Errorf("connect %s: %w: no local port is free", addr, err)
		}
		if err == unix.ETIMEDOUT {
			return nil, connectTimeout, fmt.Errorf("connect %s: %w", addr, err)
		}
		return nil, connectFailed, fmt.Errorf("connect %s: %w", addr, err)
	}
	if c.s.joiner != nil {
		e.handle, e.why = c.s.joiner.Enter(fd, r.Slot)
	}
	return e, none, nil
}

// waitEngine waits until the engine's socket shows one of events, the client
// leaves, limit passes (engineTimeout), or the replica is given up and the
// request has another one to go to (engineDown). It may return none early: callers
// try and wait again.
func (c *conn) waitEngine(e *engineConn, events uint32, limit time.Time) failure {
	c.expect(limit)
	if c.x.sentAway() {
		return engineDown
	}
	if err := e.w.armWake(events|unix.EPOLLRDHUP, c); err != nil {
		return engineDied
	}
	return c.wait(engineTimeout)
}
