package simulator

import (
	"bytes"
	"context"
	"net"
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

// listener accepts conns.
type listener struct{ *net.TCPListener }

func (l listener) Accept() (net.Conn, error) {
	c, err := l.AcceptTCP()
	if err != nil {
		return nil, err
	}
	return &conn{TCPConn: c}, nil
}
