package proxy

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"strconv"
	"strings"
	"sync"
	"time"
)

// maxStreams bounds the requests that run at once on one HTTP/2 connection.
const maxStreams = 250

// earlyBody is the most bytes of a body that are read from a stream before the
// loop has seen the request's head and not refused it.
const earlyBody = 16 << 10

// loopTransport makes the client that brings HTTP/2 requests to the loop, each
// on a pair of its own, which is used again for others.
func (s *Server) loopTransport() *http.Transport {
	t := &http.Transport{
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			end, err := s.pair("http2", true, nil, nil)
			if err != nil {
				return nil, &pairError{err}
			}
			return end, nil
		},
		Protocols:             new(http.Protocols),
		DisableCompression:    true,
		MaxIdleConnsPerHost:   128,
		IdleConnTimeout:       30 * time.Second,
		ExpectContinueTimeout: time.Minute,
		// Beside the engine's head, the proxy's own fields.
		MaxResponseHeaderBytes: 2 * maxEngineHead,
		WriteBufferSize:        2 << 10,
	}
	t.Protocols.SetHTTP1(true)
	return t
}

// pairError says that the loop could not be reached.
type pairError struct{ error }

// http2Proxy passes the requests of HTTP/2 streams to the loop. There is one
// for a server, called from every stream's goroutine.
type http2Proxy struct {
	s     *Server
	proxy httputil.ReverseProxy
}

func newHTTP2Proxy(s *Server) *http2Proxy {
	p := &http2Proxy{s: s}
	p.proxy = httputil.ReverseProxy{
		Transport:     s.inside,
		FlushInterval: -1, // at once
		BufferPool:    copyBuffers{},
		ErrorLog:      slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
		ErrorHandler:  p.failed,
		Rewrite: func(r *httputil.ProxyRequest) {
			// The loop decides what passes, as for every client.
			r.Out.Header = r.In.Header.Clone()
			r.Out.URL.Scheme, r.Out.URL.Host = "http", "loop"
			r.Out.URL.RawQuery = r.In.URL.RawQuery
			delete(r.Out.Header, streamField)
			if s.traces.Load() != nil {
				how := streamClear
				if r.In.TLS != nil {
					how = streamTLS
				}
				r.Out.Header[streamField] = []string{how + " " + r.In.RemoteAddr}
			}
			if n := r.In.ContentLength; (n < 0 || n > earlyBody) && r.In.Header["Expect"] == nil {
				// What the loop refuses by its head alone is not read.
				r.Out.Header.Set("Expect", "100-continue")
			}
		},
	}
	return p
}

// copySize is how much of an answer is passed on at once.
const copySize = 4 << 10

// copyBuffers lends the buffers that bodies are copied through. The zero value
// is ready.
type copyBuffers struct{}

var copies = sync.Pool{New: func() any { return new([copySize]byte) }}

func (copyBuffers) Get() []byte  { return copies.Get().(*[copySize]byte)[:] }
func (copyBuffers) Put(b []byte) { copies.Put((*[copySize]byte)(b)) }

// ServeHTTP implements http.Handler.
func (p *http2Proxy) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	switch {
	case r.Method == http.MethodConnect:
		answerHTTP2(rw, r, notFound, "CONNECT is not supported: the agent is no forward proxy.")
		return
	case strings.ContainsFunc(r.RequestURI, func(c rune) bool { return c <= ' ' || c == 0x7f }):
		answerHTTP2(rw, r, badRequest, "The request's path holds a space or a control character.")
		return
	}
	w := &streamWriter{ResponseWriter: rw, control: http.NewResponseController(rw)}
	// The loop's own clock is more precise. But what it cuts then is not seen
	// by a Write that waits for the client.
	w.limit = p.s.limits.Load().StallTimeout + lingerTime
	w.stalled = time.AfterFunc(w.limit, func() { w.control.SetWriteDeadline(past) })
	w.stalled.Stop()
	defer w.stalled.Stop()
	p.proxy.ServeHTTP(w, r)
}

// failed answers a request for which the loop has no answer.
func (p *http2Proxy) failed(rw http.ResponseWriter, r *http.Request, err error) {
	var unreached *pairError
	switch {
	case errors.As(err, &unreached) && unreached.error != ErrClosed:
		p.s.log.Warn("an HTTP/2 request cannot be served", "error", err)
		answerHTTP2(rw, r, noReplica, "The agent has no descriptors left to serve the request.")
	case r.Context().Err() != nil, errors.As(err, &unreached), errors.Is(err, errCut):
		panic(http.ErrAbortHandler)
	default:
		answerHTTP2(rw, r, badRequest, "The request is not valid: "+err.Error()+".")
	}
}

// answerHTTP2 answers a request that does not come to the loop.
func answerHTTP2(rw http.ResponseWriter, r *http.Request, f failure, message string) {
	body := appendError(nil, f, message, "")
	h := rw.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	if id := r.Header.Get("X-Request-Id"); wellFormedID([]byte(id)) {
		h.Set("X-Request-Id", id)
	}
	if failureTable[f].status == http.StatusServiceUnavailable {
		h.Set("Retry-After", "1")
	}
	rw.WriteHeader(failureTable[f].status)
	if r.Method != http.MethodHead {
		rw.Write(body)
	}
}

// streamWriter writes the answer of one stream, on the stream's goroutine.
type streamWriter struct {
	http.ResponseWriter
	control *http.ResponseController
	limit   time.Duration
	stalled *time.Timer // runs while a write may wait for the client
}

// WriteHeader passes a final head on, at once unless the body's length is
// known. Interim ones are the loop's asking for the body.
func (w *streamWriter) WriteHeader(status int) {
	if status < 200 {
		return
	}
	h := w.Header()
	if _, ok := h["Content-Type"]; !ok {
		h["Content-Type"] = nil // not to be guessed
	}
	w.ResponseWriter.WriteHeader(status)
	if _, ok := h["Content-Length"]; !ok {
		w.FlushError()
	}
}

func (w *streamWriter) Write(p []byte) (int, error) {
	w.stalled.Reset(w.limit)
	defer w.stalled.Stop()
	return w.ResponseWriter.Write(p)
}

// FlushError is called by http.ResponseController.
func (w *streamWriter) FlushError() error {
	w.stalled.Reset(w.limit)
	defer w.stalled.Stop()
	return w.control.Flush()
}

// serveHTTP2 serves one HTTP/2 connection until it ends, and closes nc. No
// stream's handler runs when it returns. The caller is counted in fronting.
func (s *Server) serveHTTP2(nc net.Conn) {
	defer nc.Close()
	limits := s.limits.Load()
	// Each handler holds busy for reading. One may be started when the
	// connection has ended already.
	var busy sync.RWMutex
	over := false // busy guards it
	var known, ended sync.Once
	isKnown, hasEnded := make(chan struct{}), make(chan struct{})
	h := &http.Server{
		Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			busy.RLock()
			defer busy.RUnlock()
			if over {
				return
			}
			s.streams.ServeHTTP(rw, r)
		}),
		MaxHeaderBytes: limits.MaxHeadBytes,
		IdleTimeout:    limits.IdleTimeout,
		ErrorLog:       slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
		Protocols:      new(http.Protocols),
		HTTP2:          &http.HTTP2Config{MaxConcurrentStreams: maxStreams, WriteByteTimeout: limits.StallTimeout},
		ConnState: func(_ net.Conn, state http.ConnState) {
			switch state {
			case http.StateActive:
				known.Do(func() { close(isKnown) })
			case http.StateClosed:
				ended.Do(func() { close(hasEnded) })
			}
		},
	}
	h.Protocols.SetHTTP2(true)
	h.Protocols.SetUnencryptedHTTP2(true)
	h.Serve(&oneConn{nc}) // returns when it has asked for another

	// A server that is told to shut down tells only connections that it knows
	// to speak HTTP/2.
	select {
	case <-isKnown:
	case <-hasEnded:
	case <-s.drains:
		select {
		case <-isKnown:
		case <-time.After(lingerTime):
			nc.Close()
		}
	}
	select {
	case <-hasEnded:
	case <-s.drains:
		// GOAWAY is sent, and not waited for what runs.
		over, cancel := context.WithCancel(s.ctx)
		cancel()
		h.Shutdown(over)
	}
	select {
	case <-hasEnded:
	case <-s.ctx.Done():
		nc.Close()
		<-hasEnded
	}
	busy.Lock() // waits for them
	over = true
	busy.Unlock()
}

// oneConn is a listener that has one connection, for a server that is to serve
// no other.
type oneConn struct{ nc net.Conn }

// Accept implements net.Listener.
func (l *oneConn) Accept() (net.Conn, error) {
	nc := l.nc
	if l.nc = nil; nc == nil {
		return nil, net.ErrClosed
	}
	return nc, nil
}

// Close implements net.Listener. The connection is its server's.
func (l *oneConn) Close() error { return nil }

// Addr implements net.Listener. Nobody asks.
func (l *oneConn) Addr() net.Addr { return &net.TCPAddr{} }

// preface is what an HTTP/2 client begins with (RFC 9113 section 3.4).
var preface = []byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")

// prefaced reports whether the client opens with HTTP/2's preface. It waits
// only while what the client has sent may become one.
func (c *conn) prefaced() bool {
	for n := 1; n <= len(preface); n++ {
		if c.br.Buffered() < n && c.headBy.IsZero() {
			c.headBy = time.Now().Add(c.s.limits.Load().HeadTimeout)
			c.readUntil(c.headBy)
		}
		b, err := c.br.Peek(n)
		if err != nil || b[n-1] != preface[n-1] {
			return false
		}
	}
	return true
}

// serveHTTP2 serves a connection that is prefaced, on its goroutine.
func (c *conn) serveHTTP2() {
	c.s.mu.Lock()
	if c.s.draining.Load() {
		c.s.mu.Unlock()
		return
	}
	c.s.fronting.Add(1)
	c.s.mu.Unlock()
	defer c.s.fronting.Done()
	early, _ := c.br.Peek(c.br.Buffered())
	early = bytes.Clone(early)
	c.br = bufio.NewReaderSize(nil, 16)
	c.s.serveHTTP2(&prefacedConn{socket: c.tcp, early: early})
}

// prefacedConn is a connection of which some bytes were read already. One
// goroutine reads it.
type prefacedConn struct {
	socket
	early []byte
}

func (p *prefacedConn) Read(b []byte) (int, error) {
	if len(p.early) > 0 {
		n := copy(b, p.early)
		p.early = p.early[n:]
		return n, nil
	}
	return p.socket.Read(b)
}
