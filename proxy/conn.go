package proxy

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/valyala/fasthttp"
	"golang.org/x/sys/unix"
)

// conn is one client connection and the goroutine that serves it: await, read,
// exchange, repeat. The goroutine alone reads the client and alone closes it;
// while a response is relayed a shard's goroutine writes to the client's
// descriptor, which is why relay.stop comes before close.
//
// While a request runs the goroutine waits in wait, for news of any kind, or in
// recvEngine, for an engine's bytes. Whoever has news calls wake, which ends
// either. A shard watches whether the client leaves, so that this is noticed in
// whatever phase; what a client sends meanwhile stays in its socket.
type conn struct {
	s   *Server
	tcp socket // the client's, or the end of a pair
	in  clientReader
	fd  int // tcp's, valid until the goroutine closes it
	br  *bufio.Reader
	h   fasthttp.RequestHeader
	x   exchange

	// handle names the client's socket to the kernel programs; when it is 0,
	// why says why its responses are never spliced.
	entered bool
	handle  uint32
	why     string

	place place

	// paired: tcp is the end of a pair, not a connection that was accepted.
	// pooled: the other end keeps it for requests to come, and closes it.
	paired, pooled bool

	// headBy is when the first request's head must be there, if its first
	// bytes were waited for already.
	headBy time.Time

	// until is the time given to expect. alarm wakes the goroutine at alarmAt,
	// which may be earlier: the next wait sets it anew.
	until, alarmAt time.Time
	alarm          *time.Timer

	// nudge holds one piece of news that wake has left since expect.
	nudge chan struct{}

	mu      sync.Mutex  // guards the rest
	left    bool        // the shard saw the client leave
	idle    bool        // no request has begun
	cut     bool        // the server wants the connection gone now
	reading *engineConn // the goroutine is in recvEngine
	broken  bool        // and wake has ended that

	readBy time.Time // the deadline of tcp's reads
	cw     *watch    // of fd; nil until first needed
	wanted uint32    // what cw is armed for
}

// smallReader is the size of a connection's first read buffer. One that needs
// more, up to Limits.MaxHeadBytes, gets a larger one.
const smallReader = 4 << 10

func newConn(s *Server, tcp socket) (*conn, error) {
	raw, err := tcp.SyscallConn()
	if err != nil {
		return nil, err
	}
	c := &conn{s: s, tcp: tcp, nudge: make(chan struct{}, 1)}
	c.in.raw, c.in.try = raw, c.in.recv
	c.br = bufio.NewReaderSize(&c.in, smallReader)
	c.x.c = c
	if err := raw.Control(func(fd uintptr) { c.fd = int(fd) }); err != nil {
		return nil, err
	}
	// Not vital. Without it the kernel takes up to tcp_wmem. A pair has no
	// such option and takes less.
	_ = unix.SetsockoptInt(c.fd, unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, clientQueue)
	return c, nil
}

// clientQueue bounds what the kernel holds for a client beyond what is on its
// way there.
const clientQueue = 256 << 10

// clientReader reads a client's socket as its net.TCPConn would, deadlines
// included, but with calls that the scheduler does not know of: one that it
// knows of would wake its monitor, which costs more than the reading.
type clientReader struct {
	raw   syscall.RawConn
	try   func(fd uintptr) (done bool) // recv, made once
	p     []byte
	n     int
	errno syscall.Errno
}

func (r *clientReader) Read(p []byte) (int, error) {
	r.p = p
	err := r.raw.Read(r.try)
	r.p = nil
	switch {
	case err != nil:
		return 0, err
	case r.errno != 0:
		return 0, r.errno
	case r.n == 0 && len(p) > 0:
		return 0, io.EOF
	}
	return r.n, nil
}

func (r *clientReader) recv(fd uintptr) (done bool) {
	r.n, r.errno = recv(int(fd), r.p, 0)
	return r.errno != syscall.EAGAIN
}

func (c *conn) serve() {
	defer c.close()
	for first := !c.paired; c.await(); first = false {
		if first && c.prefaced() {
			c.serveHTTP2()
			return
		}
		if !c.x.run() {
			if !c.x.reset && (c.x.unread || c.unread()) {
				c.linger()
			}
			return
		}
	}
}

// await waits for the first byte of a request. Empty lines before one are
// skipped (RFC 9112 section 2.2).
func (c *conn) await() bool {
	c.mu.Lock()
	if c.cut {
		c.mu.Unlock()
		return false
	}
	c.idle = !c.pooled
	patience := c.s.limits.Load().IdleTimeout
	if c.s.draining.Load() {
		// The last answer did not say yet that the connection closes.
		patience = min(patience, c.s.LameDuck)
	}
	switch until := time.Now().Add(patience); {
	case c.pooled:
		c.readUntilLocked(time.Time{})
	case c.readBy.After(until) || until.Sub(c.readBy) > patience/8:
		// Not for every request: setting a deadline costs about as much as
		// reading one.
		c.readUntilLocked(until)
	}
	c.mu.Unlock()
	var b []byte
	var err error
	for range 32 {
		if b, err = c.br.Peek(1); err != nil && c.beganLate() {
			b, err = c.br.Peek(1)
		}
		if err != nil || b[0] != '\r' && b[0] != '\n' {
			break
		}
		c.br.Discard(1)
	}
	c.mu.Lock()
	c.idle = false
	c.mu.Unlock()
	return err == nil
}

// beganLate reports whether a request began just when the server told idle
// connections to close: it is served. The read deadline is good again then.
func (c *conn) beganLate() bool {
	var b [1]byte
	if n, _ := recv(c.fd, b[:], unix.MSG_PEEK); n <= 0 || !c.s.draining.Load() {
		return false
	}
	c.readUntil(time.Now().Add(c.s.limits.Load().HeadTimeout))
	return true
}

// readHead reads one request head under an absolute deadline, so that a client
// that drips bytes cannot extend it. why refines the failure.
func (c *conn) readHead() (f failure, why string) {
	until := c.headBy
	if until.IsZero() {
		until = time.Now().Add(c.s.limits.Load().HeadTimeout)
	}
	c.headBy = time.Time{}
	seen, n, timed := 0, 0, false
	for {
		b, _ := c.br.Peek(c.br.Buffered())
		if seen == 0 && len(b) > 0 && (b[0] < 'A' || b[0] > 'z') {
			return badRequest, "this is not HTTP"
		}
		from := max(seen-3, 0)
		if i := bytes.Index(b[from:], crlfcrlf); i >= 0 {
			n = from + i + 4
			break
		}
		// A line that ends in LF alone would let this wait for an end that
		// the client believes to have sent.
		for i := max(seen, 1); i < len(b); i++ {
			if b[i] == '\n' && b[i-1] != '\r' {
				return badRequest, "a line of the request's head does not end in CRLF"
			}
		}
		seen = len(b)
		if seen >= c.s.limits.Load().MaxHeadBytes {
			return headTooLarge, ""
		}
		if !timed {
			// Not earlier: most heads are there in one piece, and a timer
			// costs about as much as reading one.
			timed = true
			c.readUntil(until)
		}
		if seen == c.br.Size() {
			c.br = bufio.NewReaderSize(c.br, max(c.s.limits.Load().MaxHeadBytes, 2*smallReader))
			seen = 0
			if _, err := c.br.Peek(1); err != nil {
				return c.readFailure(err), ""
			}
			continue
		}
		if _, err := c.br.Peek(seen + 1); err != nil {
			return c.readFailure(err), ""
		}
	}
	if n > c.s.limits.Load().MaxHeadBytes {
		return headTooLarge, ""
	}
	head, _ := c.br.Peek(n)
	if why := checkLines(head); why != "" {
		return badRequest, why
	}
	c.h.Reset()
	c.h.DisableNormalizing()
	if err := c.h.Read(c.br); err != nil {
		return badRequest, ""
	}
	return none, ""
}

// readFailure maps an error of reading the client.
func (c *conn) readFailure(err error) failure {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.cut {
			return shutDown
		}
		return readTimeout
	}
	return clientLeft
}

// readBody reads the whole body into buf and returns it. size is the
// Content-Length, or -1 for a chunked body.
func (c *conn) readBody(buf []byte, size int64) ([]byte, failure) {
	if size < 0 || size > int64(c.br.Buffered()) {
		c.readUntil(time.Now().Add(c.s.limits.Load().BodyTimeout))
	}
	if size < 0 {
		return c.readChunks(buf)
	}
	return c.readData(buf, size)
}

// readData appends the next n bytes to buf, which grows with what arrives, not
// with what is announced.
func (c *conn) readData(buf []byte, n int64) ([]byte, failure) {
	for n > 0 {
		if len(buf) == cap(buf) {
			buf = slices.Grow(buf, int(min(n, int64(max(cap(buf), smallBody)))))
			if !c.hold(int64(cap(buf))) {
				return buf, buffersFull
			}
		}
		k, err := c.br.Read(buf[len(buf):min(int64(cap(buf)), int64(len(buf))+n)])
		buf = buf[:len(buf)+k]
		n -= int64(k)
		if err != nil {
			return buf, c.readFailure(err)
		}
	}
	return buf, none
}

// hold counts size bytes as held by the request's body, and reports false when
// all bodies together hold too much and this is no small one.
func (c *conn) hold(size int64) bool {
	more := size - c.x.held
	c.x.held = size
	return c.s.buffered.Add(more) <= c.x.limits.MaxBuffered || size <= smallBody
}

// readChunks appends a chunked body's data to buf and drops its trailer.
// fasthttp's parser allocates a chunk as large as the client says it will be,
// so the few lines of framing are read here, as strictly.
func (c *conn) readChunks(buf []byte) ([]byte, failure) {
	for {
		line, f := c.readLine()
		if f != none {
			return buf, f
		}
		size, ok := chunkSize(line)
		if !ok {
			return buf, badRequest
		}
		if size > c.s.limits.Load().MaxBodyBytes-int64(len(buf)) {
			return buf, bodyTooLarge
		}
		if size == 0 {
			break
		}
		if buf, f = c.readData(buf, size); f != none {
			return buf, f
		}
		end, err := c.br.Peek(2)
		if err != nil {
			return buf, c.readFailure(err)
		}
		if !bytes.Equal(end, crlf) {
			return buf, badRequest
		}
		c.br.Discard(2)
	}
	for left := c.s.limits.Load().MaxHeadBytes; left > 0; {
		line, f := c.readLine()
		if f != none {
			return buf, f
		}
		if len(line) == 0 {
			return buf, none
		}
		if bytes.IndexByte(line, ':') <= 0 || line[0] == ' ' || line[0] == '\t' {
			return buf, badRequest
		}
		left -= len(line)
	}
	return buf, headTooLarge
}

// readLine returns the next line of chunked framing without its CRLF. It is
// valid until the next read.
func (c *conn) readLine() ([]byte, failure) {
	line, err := c.br.ReadSlice('\n')
	switch {
	case err == bufio.ErrBufferFull:
		return nil, headTooLarge
	case err != nil:
		return nil, c.readFailure(err)
	}
	line, ok := bytes.CutSuffix(line, crlf)
	if !ok || bytes.IndexByte(line, '\r') >= 0 {
		return nil, badRequest
	}
	return line, none
}

// chunkSize reads the line before a chunk: hexadecimal digits, and extensions
// that are ignored.
func chunkSize(line []byte) (size int64, ok bool) {
	i := 0
	for ; i < len(line); i++ {
		d, hex := hexDigit(line[i])
		if !hex {
			break
		}
		if size >= maxChunk>>4 {
			return 0, false
		}
		size = size<<4 | int64(d)
	}
	rest := bytes.TrimLeft(line[i:], " \t")
	return size, i > 0 && (len(rest) == 0 || rest[0] == ';')
}

// readUntil lets the next reads of the client last until a time; wake does not
// end them.
func (c *conn) readUntil(until time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.cut {
		c.readUntilLocked(until)
	}
}

func (c *conn) readUntilLocked(until time.Time) {
	c.readBy = until
	c.tcp.SetReadDeadline(until)
}

// expect lets the next wait, or recvEngine, last until a time and forgets
// earlier wake-ups. Who is going to call wake is set up after it.
func (c *conn) expect(until time.Time) {
	c.until = until
	select {
	case <-c.nudge:
	default:
	}
	if c.alarm == nil {
		c.alarm = time.AfterFunc(time.Until(until), c.wake)
		c.alarmAt = until
	} else if c.alarmAt.After(until) || !time.Now().Before(c.alarmAt) {
		c.alarm.Reset(time.Until(until))
		c.alarmAt = until
	}
	c.mu.Lock()
	if c.wanted&unix.EPOLLRDHUP == 0 && !c.left {
		c.watchClientLocked(c.wanted | unix.EPOLLRDHUP)
	}
	c.mu.Unlock()
}

// wake ends the goroutine's wait. It may be called from anywhere, even late,
// when the goroutine has gone on already, and says only that there may be news.
// The caller should hold no lock that the goroutine needs next.
func (c *conn) wake() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.wakeLocked()
}

func (c *conn) wakeLocked() {
	select {
	case c.nudge <- struct{}{}:
	default:
	}
	if c.reading != nil && !c.broken {
		c.broken = true
		c.reading.file.SetReadDeadline(past)
	}
}

var past = time.Unix(1, 0)

// wait waits for news: none when wake was called since expect, clientLeft when
// the client has left or half closed, shutDown when the server wants the
// connection gone, and timeout when the time given to expect has passed.
func (c *conn) wait(timeout failure) failure {
	c.mu.Lock()
	news := c.newsLocked()
	c.mu.Unlock()
	if news != none {
		return news
	}
	<-c.nudge // by the alarm at the latest
	return c.news(timeout)
}

// news is what a goroutine that was woken has to know.
func (c *conn) news(timeout failure) failure {
	c.mu.Lock()
	defer c.mu.Unlock()
	f := c.newsLocked()
	if f == none && !time.Now().Before(c.until) {
		f = timeout
	}
	return f
}

func (c *conn) newsLocked() failure {
	switch {
	case c.cut:
		return shutDown
	case c.left:
		return clientLeft
	}
	return none
}

// recvEngine reads from an engine's socket, and waits for bytes if there are
// none. woken, which comes without bytes, tells that wake was called since
// expect.
func (c *conn) recvEngine(e *engineConn, p []byte) (n int, errno syscall.Errno, woken bool) {
	c.mu.Lock()
	if len(c.nudge) > 0 || c.newsLocked() != none {
		c.mu.Unlock()
		return 0, 0, true
	}
	c.reading, c.broken = e, false
	c.mu.Unlock()
	e.p = p
	err := e.raw.Read(e.try)
	e.p = nil
	c.mu.Lock()
	broken := c.broken
	c.reading, c.broken = nil, false
	c.mu.Unlock()
	if broken {
		e.file.SetReadDeadline(time.Time{})
	}
	if err != nil {
		return 0, 0, true
	}
	return e.n, e.errno, false
}

// pause waits for d, or until the client leaves.
func (c *conn) pause(d time.Duration) failure {
	for until := time.Now().Add(d); time.Now().Before(until); {
		c.expect(until)
		if f := c.wait(none); f != none {
			return f
		}
	}
	return none
}

// watchClientLocked has the shard watch the client's socket for events; 0 for
// none. c.mu is held.
func (c *conn) watchClientLocked(events uint32) {
	if c.wanted == events {
		return
	}
	if c.cw == nil {
		c.cw = c.s.shardOf(c.fd).watch(c.fd)
	}
	c.wanted = events
	if events == 0 {
		events = unix.EPOLLONESHOT // errors are reported once, whatever is asked for
	}
	if err := c.cw.arm(events, c.onClient); err != nil {
		c.left = true
		c.wakeLocked()
	}
}

// wantWritable has the relay told when the client's socket takes bytes again.
func (c *conn) wantWritable(want bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	events := c.wanted &^ unix.EPOLLOUT
	if want {
		events |= unix.EPOLLOUT
	}
	if c.cw == nil && events == 0 {
		return
	}
	c.watchClientLocked(events)
}

// onClient runs on the shard's goroutine, at times when the connection has been
// closed already.
func (c *conn) onClient(w *watch, events uint32) {
	if events&(unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
		c.mu.Lock()
		if c.cw == w {
			c.left = true
			c.watchClientLocked(0)
			c.wakeLocked()
		}
		c.mu.Unlock()
	}
	if events&unix.EPOLLOUT != 0 {
		c.x.relay.onWritable()
	}
}

// write sends all of p within the time a client has to take an answer.
func (c *conn) write(p []byte) error {
	c.mu.Lock()
	if !c.cut {
		c.tcp.SetWriteDeadline(time.Now().Add(c.s.limits.Load().BodyTimeout))
	}
	c.mu.Unlock()
	_, err := c.tcp.Write(p)
	return err
}

// cutNow makes every wait of the goroutine return, now and from now on.
func (c *conn) cutNow() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cut = true
	c.readUntilLocked(past)
	// Long enough to say goodbye.
	c.tcp.SetWriteDeadline(time.Now().Add(goodbye))
	c.wakeLocked()
}

// goodbye is how long a client has to take an answer once the server wants the
// connection gone.
const goodbye = 500 * time.Millisecond

// closeIdle ends the wait for a request after LameDuck, unless one has begun.
func (c *conn) closeIdle() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.idle {
		c.readUntilLocked(time.Now().Add(c.s.LameDuck))
	}
}

// unread reports whether the client has sent more than was read.
func (c *conn) unread() bool {
	var b [1]byte
	n, _ := recv(c.fd, b[:], unix.MSG_PEEK)
	return n > 0 || c.br.Buffered() > 0
}

// linger lets a client that is still sending read the answer: closing with
// unread bytes would reset the connection and take the answer away.
func (c *conn) linger() {
	if c.tcp.CloseWrite() != nil {
		return
	}
	c.readUntil(time.Now().Add(lingerTime))
	io.CopyN(io.Discard, c.br, lingerBytes)
}

const (
	lingerTime  = time.Second
	lingerBytes = 256 << 10
)

// close ends the connection. No relay runs.
func (c *conn) close() {
	if c.s.joiner != nil {
		c.s.joiner.Leave(c.handle)
	}
	c.mu.Lock()
	if c.cw != nil {
		c.cw.forget()
		c.cw = nil
	}
	c.mu.Unlock()
	if c.alarm != nil {
		c.alarm.Stop()
	}
	c.tcp.Close()
	c.s.remove(c)
}
