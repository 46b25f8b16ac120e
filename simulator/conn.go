package simulator

import (
	"bytes"
	"context"
	"net"
	"sync"
	"time"
)

// conn is an accepted connection. net/http owns and closes it; the goroutine
// that serves its requests is the only one that writes to it and that calls
// the other methods.
type conn struct {
	*net.TCPConn
	// split, when not 0, is the state of the random numbers that cut writes.
	split uint64
}

type connKey struct{}

// withConn is http.Server.ConnContext: it lets a handler find its connection.
func withConn(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

func connOf(ctx context.Context) *conn { return ctx.Value(connKey{}).(*conn) }

// Write writes p, in several pieces if writes are to be cut. Nagle's algorithm
// is off, so that each piece is sent in a segment of its own unless the window
// is closed.
func (c *conn) Write(p []byte) (int, error) {
	if c.split == 0 {
		return c.TCPConn.Write(p)
	}
	written := 0
	for len(p) > 0 {
		c.split += golden
		r := mix(c.split)
		n := 1 + int(r%uint64(min(len(p), 1500)))
		if end := bytes.Index(p, []byte("0\r\n\r\n")); end >= 0 && r>>32&1 == 0 {
			n = end + len("0\r\n\r\n")
		}
		m, err := c.TCPConn.Write(p[:n])
		written += m
		if err != nil {
			return written, err
		}
		p = p[n:]
	}
	return written, nil
}

// resetOnClose makes the close of the connection a reset.
func (c *conn) resetOnClose() { _ = c.SetLinger(0) }

// reset resets the connection. It may be called from any goroutine.
func (c *conn) reset() {
	c.resetOnClose()
	_ = c.Close()
}

// listener accepts conns at one address, and none while it refuses. net/http's
// accept loop calls Accept; the other methods may be called from any
// goroutine.
type listener struct {
	addr   *net.TCPAddr
	closed chan struct{}
	// changed holds a token when the time to which connections are refused
	// has been set anew.
	changed chan struct{}

	// mu guards tcp, which is nil while connections are refused, and until,
	// the time to which they are.
	mu    sync.Mutex
	tcp   *net.TCPListener
	until time.Time
}

func newListener(l *net.TCPListener) *listener {
	return &listener{addr: l.Addr().(*net.TCPAddr), tcp: l, closed: make(chan struct{}), changed: make(chan struct{}, 1)}
}

func (l *listener) Addr() net.Addr { return l.addr }

func (l *listener) Accept() (net.Conn, error) {
	for {
		tcp, err := l.listening()
		if err != nil {
			return nil, err
		}
		c, err := tcp.AcceptTCP()
		if err == nil {
			return &conn{TCPConn: c}, nil
		}
		l.mu.Lock()
		refuses := l.tcp != tcp
		l.mu.Unlock()
		if !refuses {
			return nil, err
		}
	}
}

// listening waits until connections are not refused and returns the listener
// that takes them. The port may be somebody else's by then: it waits on until
// it is free.
func (l *listener) listening() (*net.TCPListener, error) {
	for {
		l.mu.Lock()
		select {
		case <-l.closed:
			l.mu.Unlock()
			return nil, net.ErrClosed
		default:
		}
		wait := time.Until(l.until)
		if l.tcp == nil && wait <= 0 {
			// An error leaves it nil.
			l.tcp, _ = net.ListenTCP("tcp", l.addr)
			wait = 10 * time.Millisecond
		}
		tcp := l.tcp
		l.mu.Unlock()
		if tcp != nil {
			return tcp, nil
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-l.changed:
		case <-l.closed:
		}
		timer.Stop()
	}
}

// refuse stops listening for d from now on; 0 ends that. Connections that are
// open stay so.
func (l *listener) refuse(d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.until = time.Now().Add(d)
	if d > 0 && l.tcp != nil {
		_ = l.tcp.Close()
		l.tcp = nil
	}
	select {
	case l.changed <- struct{}{}:
	default:
	}
}

func (l *listener) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.closed:
		return net.ErrClosed
	default:
	}
	close(l.closed)
	if l.tcp == nil {
		return nil
	}
	return l.tcp.Close()
}
