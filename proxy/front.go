package proxy

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// This file and http2.go serve clients that do not speak HTTP/1.x in the
// clear. Routing, limits and errors exist once, in the loop of conn.go; so such
// a client is brought to it by a pair of connected sockets: one end is a conn
// like any other, the other end is fed by what understands the client.
//
//	TLS     front.serveHTTP1, which decrypts and encrypts
//	HTTP/2  Server.serveHTTP2, where each stream is a request on a pair

// socket is what a conn is served over: a client's *net.TCPConn, or the loopEnd
// of a pair. SetLinger(0) has the next Close end it with a reset.
type socket interface {
	net.Conn
	syscall.Conn
	CloseWrite() error
	SetLinger(sec int) error
}

// errCut is what reading a frontEnd ends with when the loop has cut the answer:
// what was read must not pass for all of it.
var errCut = errors.New("the answer was cut")

// loopEnd is the loop's end of a pair. It belongs to its conn, which closes it.
type loopEnd struct {
	*net.UnixConn
	resets bool
	cut    *atomic.Bool // shared with the frontEnd
	onCut  func()       // may be nil
	client net.Addr     // nil where it is not always the same one
}

// SetLinger makes Close a reset. Sockets of a pair know none, so the other end
// is told by cut.
func (e *loopEnd) SetLinger(int) error {
	e.resets = true
	return nil
}

// Close closes the end, and calls onCut if that is a reset.
func (e *loopEnd) Close() error {
	if e.resets {
		e.cut.Store(true)
		if e.onCut != nil {
			e.onCut()
		}
	}
	return e.UnixConn.Close()
}

// from is the address of the client, nil where the connection does not say it.
func (c *conn) from() net.Addr {
	if end, ok := c.tcp.(*loopEnd); ok {
		return end.client
	}
	return c.tcp.RemoteAddr()
}

// frontEnd is the other end of a pair. Whoever called Server.pair closes it.
type frontEnd struct {
	*net.UnixConn
	cut *atomic.Bool // shared with the loopEnd
}

// Read returns io.EOF when the loop has ended the connection in order, though
// it may have left bytes unread, and errCut when it has reset it.
func (e *frontEnd) Read(p []byte) (int, error) {
	n, err := e.UnixConn.Read(p)
	return n, e.ending(err)
}

// ending returns what an error of reading means.
func (e *frontEnd) ending(err error) error {
	switch {
	case err == nil:
	case e.cut.Load():
		return errCut
	case errors.Is(err, unix.ECONNRESET):
		return io.EOF
	}
	return err
}

// Write drops what the loop does not read any more: it has answered, and the
// answer is still there to be read.
func (e *frontEnd) Write(p []byte) (int, error) {
	n, err := e.UnixConn.Write(p)
	if errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) {
		return len(p), nil
	}
	return n, err
}

// pair opens a connection to the loop. why says in one word why its responses
// are copied. pooled: it waits for requests until it is closed. onCut is called
// on the conn's goroutine when it is reset. client is whose requests it brings, nil where
// each may be another's.
func (s *Server) pair(why string, pooled bool, onCut func(), client net.Addr) (*frontEnd, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("socketpair: %w", err)
	}
	near, err := unixConn(fds[0])
	if err != nil {
		unix.Close(fds[1])
		return nil, err
	}
	far, err := unixConn(fds[1])
	if err != nil {
		near.Close()
		return nil, err
	}
	cut := new(atomic.Bool)
	c, err := newConn(s, &loopEnd{UnixConn: near, cut: cut, onCut: onCut, client: client})
	if err != nil {
		near.Close()
		far.Close()
		return nil, err
	}
	c.paired, c.pooled = true, pooled
	c.entered, c.why = true, why // no TCP socket for the kernel to know
	s.mu.Lock()
	if s.sealed || s.ctx.Err() != nil {
		s.mu.Unlock()
		near.Close()
		far.Close()
		return nil, ErrClosed
	}
	s.conns[c] = struct{}{}
	s.paired++
	s.running.Add(1)
	s.mu.Unlock()
	go func() {
		defer s.running.Done()
		c.serve()
	}()
	return &frontEnd{UnixConn: far, cut: cut}, nil
}

// unixConn takes fd over.
func unixConn(fd int) (*net.UnixConn, error) {
	f := os.NewFile(uintptr(fd), "pair")
	defer f.Close()
	nc, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	return nc.(*net.UnixConn), nil
}

// front is one TLS client and the goroutine that serves it: handshake, then
// HTTP/2 or the pumping of HTTP/1.x. The goroutine closes tcp; Shutdown may reset
// it at any time, and the loop may hurry its end.
type front struct {
	s   *Server
	tcp *net.TCPConn

	mu          sync.Mutex // guards the rest
	handshaking bool
	cut         bool // the loop has reset its end
}

// ServeTLS is Serve for clients that speak TLS. config needs a certificate or
// GetCertificate, which is asked at each handshake; TLS 1.2 is the least that is
// spoken. HTTP/2 and HTTP/1.1 are offered unless config.NextProtos is set.
func (s *Server) ServeTLS(l net.Listener, config *tls.Config) error {
	if len(config.Certificates) == 0 && config.GetCertificate == nil && config.GetConfigForClient == nil {
		l.Close()
		return fmt.Errorf("listener %s: TLS needs a certificate", l.Addr())
	}
	config = config.Clone()
	config.MinVersion = max(config.MinVersion, tls.VersionTLS12)
	if config.NextProtos == nil {
		config.NextProtos = []string{"h2", "http/1.1"}
	}
	return s.accept(l, func(tcp *net.TCPConn) {
		// Not vital. Without it the kernel takes up to tcp_wmem.
		if raw, err := tcp.SyscallConn(); err == nil {
			_ = raw.Control(func(fd uintptr) {
				_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, clientQueue)
			})
		}
		f := &front{s: s, tcp: tcp, handshaking: true}
		s.mu.Lock()
		s.fronts[f] = struct{}{}
		s.running.Add(1)
		s.fronting.Add(1)
		s.mu.Unlock()
		go func() {
			defer s.running.Done()
			defer s.fronting.Done()
			f.serve(config)
		}()
	}, func(*net.TCPConn) {}) // before the handshake nothing can be said
}

func (f *front) serve(config *tls.Config) {
	defer func() {
		f.tcp.Close()
		f.s.mu.Lock()
		delete(f.s.fronts, f)
		f.s.mu.Unlock()
	}()
	f.tcp.SetDeadline(time.Now().Add(f.s.limits.Load().HeadTimeout))
	tc := tls.Server(f.tcp, config)
	if err := tc.HandshakeContext(f.s.ctx); err != nil {
		f.refuse(err)
		return
	}
	f.mu.Lock()
	f.handshaking = false
	f.mu.Unlock()
	f.tcp.SetDeadline(time.Time{})
	if tc.ConnectionState().NegotiatedProtocol == "h2" {
		f.s.serveHTTP2(tc)
		return
	}
	f.serveHTTP1(tc)
}

// refuse tells a client that speaks HTTP without TLS what is wrong. The TLS
// library has told all others.
func (f *front) refuse(err error) {
	var record tls.RecordHeaderError
	if !errors.As(err, &record) || record.Conn == nil {
		return
	}
	switch start := string(record.RecordHeader[:]); {
	case strings.HasPrefix(start, "GET "), strings.HasPrefix(start, "POST "), strings.HasPrefix(start, "PUT "),
		strings.HasPrefix(start, "HEAD "), start == "OPTIO", start == "PRI *", start == "PATCH", start == "DELET":
	default:
		return
	}
	body := appendError(nil, badRequest, "This port speaks TLS: use https.", "")
	fmt.Fprintf(f.tcp, "HTTP/1.1 400 %s\r\nServer: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s",
		http.StatusText(http.StatusBadRequest), product, len(body), body)
	if f.tcp.CloseWrite() == nil {
		f.tcp.SetReadDeadline(time.Now().Add(lingerTime))
		io.CopyN(io.Discard, f.tcp, lingerBytes)
	}
}

// drain ends a connection that has not come to a request. HTTP/2 is told by
// GOAWAY and a conn of the loop by closeIdle.
func (f *front) drain() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.handshaking {
		f.tcp.SetDeadline(time.Now().Add(f.s.LameDuck))
	}
}

// reset ends the connection at once, and without TLS's close_notify: the client
// must not take what it has for all there is.
func (f *front) reset() {
	f.tcp.SetLinger(0)
	f.tcp.Close()
}

// cutOff is called when the loop has reset its end. What the loop sent before is
// still passed on, to a client that takes it; then download ends and the
// connection is reset.
func (f *front) cutOff() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.cut = true
	f.tcp.SetWriteDeadline(time.Now().Add(goodbye))
}

// awaitWrite gives the client its time to take what is written next.
func (f *front) awaitWrite() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.cut {
		// The loop's own clock is more precise; this one is for when it has
		// nothing more to send.
		f.tcp.SetWriteDeadline(time.Now().Add(f.s.limits.Load().StallTimeout + lingerTime))
	}
}

// serveHTTP1 pumps between the client and a conn of the loop until both
// directions have ended.
func (f *front) serveHTTP1(tc *tls.Conn) {
	end, err := f.s.pair("tls", false, f.cutOff, f.tcp.RemoteAddr())
	if err != nil {
		if err != ErrClosed {
			f.s.log.Warn("a TLS connection cannot be served", "error", err)
		}
		f.reset()
		return
	}
	uploaded := make(chan struct{})
	go func() {
		defer close(uploaded)
		upload(end, tc)
	}()
	if f.download(tc, end) == io.EOF {
		// The client may still be sending: closing with unread bytes would
		// take the answer away.
		f.tcp.SetReadDeadline(time.Now().Add(lingerTime))
		if tc.CloseWrite() == nil {
			f.tcp.CloseWrite()
		}
	} else {
		f.reset()
		end.Close()
	}
	<-uploaded
	end.Close()
}

// idleRead is the buffer that a TLS connection holds while its client sends
// nothing.
const idleRead = 4 << 10

// upload passes on what the client sends. The loop takes its end, in whatever
// way it ends, as the client's leaving.
func upload(end *frontEnd, tc *tls.Conn) {
	buf := make([]byte, idleRead)
	for {
		n, err := tc.Read(buf)
		if n > 0 {
			if _, err := end.Write(buf[:n]); err != nil {
				return // closed by serveHTTP1
			}
		}
		if err != nil {
			end.CloseWrite()
			return
		}
	}
}

var pumps = sync.Pool{New: func() any { return new([32 << 10]byte) }}

// download passes on what the loop sends, each read at once, and returns io.EOF
// at its end in order. It holds a buffer only while there is something.
func (f *front) download(tc *tls.Conn, end *frontEnd) error {
	raw, err := end.SyscallConn()
	if err != nil {
		return err
	}
	var p *[32 << 10]byte
	var n int
	var errno syscall.Errno
	try := func(fd uintptr) (done bool) {
		p = pumps.Get().(*[32 << 10]byte)
		if n, errno = recv(int(fd), p[:], 0); errno == unix.EAGAIN {
			pumps.Put(p)
			return false
		}
		return true
	}
	for {
		if err := raw.Read(try); err != nil {
			return err
		}
		if errno != 0 || n == 0 {
			pumps.Put(p)
			if errno != 0 {
				return end.ending(errno)
			}
			return end.ending(io.EOF)
		}
		f.awaitWrite()
		_, err := tc.Write(p[:n])
		pumps.Put(p)
		if err != nil {
			return err
		}
	}
}
