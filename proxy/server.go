package proxy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Limits bound what one client or engine can take of the agent. Of each field
// zero means the default that is named.
type Limits struct {
	// IdleTimeout is how long a client connection may stay without a request:
	// 2 minutes.
	IdleTimeout time.Duration
	// HeadTimeout is how long a request's head may take from its first byte:
	// 10 seconds.
	HeadTimeout time.Duration
	// BodyTimeout is how long a request's body may take to arrive, and an
	// answer of the agent's own to be taken: 2 minutes.
	BodyTimeout time.Duration
	// RequestTimeout is how long the first byte of an engine's answer may
	// take, from the end of the request: 10 minutes. An answer may last longer.
	RequestTimeout time.Duration
	// StallTimeout is how long a client may take nothing of an answer that
	// waits for it: 10 minutes.
	StallTimeout time.Duration
	// MaxHeadBytes bounds a request's head: 16 KiB.
	MaxHeadBytes int
	// MaxBodyBytes bounds a request's body: 64 MiB.
	MaxBodyBytes int64
	// ConnectTimeout is how long connecting to an engine may take, the look-up
	// of its name included: 5 seconds.
	ConnectTimeout time.Duration
	// UpstreamIdle is how long an unused engine connection is kept: 4 seconds,
	// below the 5 after which uvicorn closes one.
	UpstreamIdle time.Duration
	// MaxAttempts is how often a request is tried, the first time included,
	// as long as none of an answer has reached the client: 3.
	MaxAttempts int
	// Backoff is the pause before a replica is tried again that has failed the
	// request before: 25 ms. It doubles each time.
	Backoff time.Duration
	// MaxConns bounds the connections of clients: no bound. MaxBuffered bounds
	// the memory of all request bodies together: 2 GiB.
	MaxConns    int
	MaxBuffered int64
	// LogPrompts writes the body of each request to the log. Otherwise nothing
	// that a request says is logged.
	LogPrompts bool
}

func (l Limits) withDefaults() Limits {
	duration := func(d *time.Duration, value time.Duration) {
		if *d <= 0 {
			*d = value
		}
	}
	duration(&l.IdleTimeout, 2*time.Minute)
	duration(&l.HeadTimeout, 10*time.Second)
	duration(&l.BodyTimeout, 2*time.Minute)
	duration(&l.RequestTimeout, 10*time.Minute)
	duration(&l.StallTimeout, 10*time.Minute)
	duration(&l.ConnectTimeout, 5*time.Second)
	duration(&l.UpstreamIdle, 4*time.Second)
	duration(&l.Backoff, 25*time.Millisecond)
	if l.MaxAttempts <= 0 {
		l.MaxAttempts = 3
	}
	if l.MaxBuffered <= 0 {
		l.MaxBuffered = 2 << 30
	}
	if l.MaxHeadBytes <= 0 {
		l.MaxHeadBytes = 16 << 10
	}
	if l.MaxBodyBytes <= 0 {
		l.MaxBodyBytes = 64 << 20
	}
	return l
}

// Server accepts client connections and serves their requests from the fleet
// it was last given. Make it with New, give it a fleet, call Serve for each
// listener, and end it with Shutdown. All methods may be called from any
// goroutine.
type Server struct {
	// CopyReason says in one word why there is no Joiner; it labels the
	// responses that are copied for that. Set it before Serve. Empty means
	// "off".
	CopyReason string
	// LameDuck is how long, during Shutdown, a connection without a request
	// may still begin one, which is answered as the connection's last: a
	// client that reuses connections learns so that it must open another.
	// 0: such connections are closed at once, with the requests on their way.
	// Set it before Serve.
	LameDuck time.Duration

	limits   atomic.Pointer[Limits]
	joiner   Joiner
	log      *slog.Logger
	instance string // tells it from all others
	fleet    atomic.Pointer[Fleet]
	lines    lines
	rooms    rooms
	waits    waits
	// state is that of models without one.
	state  ModelState
	access atomic.Pointer[Access]
	// classes is never nil.
	classes atomic.Pointer[Classes]
	// prompts is nil until SetPrompts.
	prompts atomic.Pointer[prompts]
	// cache is nil until SetIndex.
	cache atomic.Pointer[cache]
	// decisionLog is nil as long as none is wanted.
	decisionLog atomic.Pointer[decisionLog]
	// traces is nil as long as none are wanted.
	traces    atomic.Pointer[traces]
	prewarmer prewarmer
	journal   journal
	recent    recent
	shards    []*shard
	stats     *stats
	// inside brings the requests of HTTP/2 streams to the loop; streams uses it.
	inside  *http.Transport
	streams *http2Proxy

	buffered atomic.Int64 // bytes that hold request bodies
	draining atomic.Bool
	drains   chan struct{} // closed when draining is set
	// ctx ends when Shutdown cuts what is left.
	ctx    context.Context
	cancel context.CancelFunc

	mu        sync.Mutex // guards the rest
	conns     map[*conn]struct{}
	paired    int // of conns are ends of pairs
	fronts    map[*front]struct{}
	sealed    bool // no pair may be opened
	listeners map[net.Listener]struct{}
	running   sync.WaitGroup // of the connections' goroutines and Serve
	fronting  sync.WaitGroup // of those goroutines that may open pairs
	accepting sync.WaitGroup // of Serve, until its listener is closed
	stopped   chan struct{}  // closed when Shutdown has finished; nil before it
}

// ErrClosed is what Serve returns after Shutdown.
var ErrClosed = errors.New("the server is shut down")

// New makes a server that serves nothing yet. A nil joiner means that every
// response is copied. It panics when the process can open no more descriptors.
func New(limits Limits, joiner Joiner, log *slog.Logger) *Server {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	s := &Server{
		joiner:    joiner,
		log:       log,
		instance:  strconv.FormatUint(rand.Uint64(), 16),
		stats:     newStats(),
		recent:    recent{began: time.Now()},
		conns:     map[*conn]struct{}{},
		fronts:    map[*front]struct{}{},
		drains:    make(chan struct{}),
		listeners: map[net.Listener]struct{}{},
	}
	s.inside = s.loopTransport()
	s.streams = newHTTP2Proxy(s)
	s.SetLimits(limits)
	s.SetAccess(nil)
	s.SetClasses(nil)
	s.fleet.Store(&Fleet{})
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.prewarmer = newPrewarmer(s)
	// Half of the cores relay: fewer shards copy in larger batches. One for
	// every core costs twice the CPU a chunk on a machine with two, though a
	// chunk in the middle of a burst then waits half as long.
	for range max(1, runtime.GOMAXPROCS(0)/2) {
		sh, err := newShard()
		if err != nil {
			panic(fmt.Sprintf("proxy.New: %v", err))
		}
		s.shards = append(s.shards, sh)
	}
	s.running.Go(s.prewarmer.run)
	return s
}

// SetFleet publishes what requests can be routed to from now on. Exchanges
// that have begun keep what they chose, but those in line at a replica choose
// anew when it is gone or there is a free place elsewhere.
func (s *Server) SetFleet(f *Fleet) {
	old := s.fleet.Swap(f)
	s.lines.callAll()
	s.rooms.call()
	s.prewarmer.wake()
	for _, m := range old.Listed {
		// Adapters come and go; what was counted of those that went goes too.
		if f.Models[m.Name] == nil {
			s.stats.forget(m.Name)
		}
	}
}

// SetLimits changes the limits. Requests that have begun may keep the old ones.
func (s *Server) SetLimits(l Limits) {
	l = l.withDefaults()
	s.limits.Store(&l)
}

// SetAccess says from now on who may send requests; nil lets anybody.
func (s *Server) SetAccess(a *Access) {
	if a == nil {
		a = &Access{}
	}
	old := s.access.Swap(a)
	if old == nil {
		return
	}
	for name := range old.known {
		if !a.known[name] {
			s.stats.forgetKey(name)
		}
	}
}

// shardOf spreads descriptors over the shards.
func (s *Server) shardOf(fd int) *shard { return s.shards[fd%len(s.shards)] }

// Serve accepts connections from l until Shutdown, and closes l. l must yield
// *net.TCPConn, with Multipath TCP off: an MPTCP socket cannot be spliced.
// Clients speak HTTP/1.x, or HTTP/2 from their first byte on.
func (s *Server) Serve(l net.Listener) error {
	return s.accept(l, func(tcp *net.TCPConn) {
		c, err := newConn(s, tcp)
		if err != nil {
			tcp.Close()
			return
		}
		s.mu.Lock()
		s.conns[c] = struct{}{}
		s.running.Add(1)
		s.mu.Unlock()
		go func() {
			defer s.running.Done()
			c.serve()
		}()
	}, turnAway)
}

// accept gives the connections of l to start, which takes them over and does
// not wait for them. During Shutdown it gives it those that are queued, and
// ends: one that was accepted is not lost. Those that are too many are told so
// by refuse, which must not wait for them either.
func (s *Server) accept(l net.Listener, start, refuse func(*net.TCPConn)) error {
	admit := func(tcp *net.TCPConn) {
		s.stats.accepted.Add(1)
		if s.crowded() {
			s.stats.requests.WithLabelValues("none", tooManyConns.label(), statusClass(failureTable[tooManyConns].status), failureTable[tooManyConns].blame.String()).Inc()
			refuse(tcp)
			tcp.Close()
			return
		}
		start(tcp)
	}
	s.mu.Lock()
	if s.draining.Load() {
		s.mu.Unlock()
		l.Close()
		return ErrClosed
	}
	s.listeners[l] = struct{}{}
	s.running.Add(1)
	s.accepting.Add(1)
	s.mu.Unlock()
	defer s.accepting.Done()
	defer l.Close()
	defer s.running.Done()
	defer func() {
		s.mu.Lock()
		delete(s.listeners, l)
		s.mu.Unlock()
	}()
	var pause time.Duration
	for {
		nc, err := l.Accept()
		if err != nil {
			if s.draining.Load() {
				acceptQueued(l, admit)
				return ErrClosed
			}
			if errors.Is(err, net.ErrClosed) {
				return err
			}
			// Out of descriptors, or a client gone before it was accepted.
			pause = min(max(2*pause, 5*time.Millisecond), time.Second)
			s.log.Warn("accept failed", "listener", l.Addr().String(), "error", err, "retry_in", pause)
			select {
			case <-time.After(pause):
			case <-s.ctx.Done():
				return ErrClosed
			}
			continue
		}
		pause = 0
		tcp, ok := nc.(*net.TCPConn)
		if !ok {
			nc.Close()
			return fmt.Errorf("listener %s yields %T, not *net.TCPConn", l.Addr(), nc)
		}
		admit(tcp)
	}
}

// crowded reports that there are as many client connections as there may be.
func (s *Server) crowded() bool {
	most := s.limits.Load().MaxConns
	if most <= 0 {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns)-s.paired+len(s.fronts) >= most
}

// acceptQueued accepts what waits at a listener that is about to be closed,
// which would reset it.
func acceptQueued(l net.Listener, start func(*net.TCPConn)) {
	t, ok := l.(*net.TCPListener)
	if !ok {
		return
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return
	}
	// The bound is for a queue that another process fills and empties too.
	for range maxQueued {
		fd := -1
		if err := raw.Control(func(l uintptr) {
			fd, _, err = unix.Accept4(int(l), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
		}); err != nil || fd < 0 {
			return
		}
		f := os.NewFile(uintptr(fd), "client")
		nc, err := net.FileConn(f)
		f.Close()
		if err != nil {
			continue
		}
		start(nc.(*net.TCPConn))
	}
}

// maxQueued is more than a listener's queue holds, net.core.somaxconn.
const maxQueued = 1 << 16

// turnAway answers a connection that is one too many. It does not wait for a
// request or for the client to take the answer.
func turnAway(tcp *net.TCPConn) {
	body := appendError(nil, tooManyConns, "", "")
	tcp.SetWriteDeadline(time.Now().Add(time.Millisecond))
	fmt.Fprintf(tcp, "HTTP/1.1 503 Service Unavailable\r\nServer: %s\r\nContent-Type: application/json\r\n"+
		"Content-Length: %d\r\nRetry-After: 1\r\nConnection: close\r\n\r\n%s", product, len(body), body)
	// The request may be there already: closing with unread bytes would reset
	// the connection and take the answer away.
	tcp.CloseWrite()
	var scratch [4 << 10]byte
	tcp.SetReadDeadline(time.Now().Add(time.Millisecond))
	tcp.Read(scratch[:])
}

func (s *Server) remove(c *conn) {
	s.mu.Lock()
	delete(s.conns, c)
	if c.paired {
		s.paired--
	}
	s.mu.Unlock()
}

// Shutdown stops accepting, closes connections without a request after
// LameDuck, and lets exchanges that have begun finish, their connections closing
// after them. When
// ctx ends, what is left is cut and ctx's error returned. Every goroutine of
// the server has ended when it returns. Replicas are closed by their owner,
// afterwards.
func (s *Server) Shutdown(ctx context.Context) error {
	s.mu.Lock()
	if s.stopped != nil {
		stopped := s.stopped
		s.mu.Unlock()
		<-stopped
		return nil
	}
	s.stopped = make(chan struct{})
	s.draining.Store(true)
	close(s.drains)
	for l := range s.listeners {
		// Serve closes it, after it has accepted what is queued.
		if t, ok := l.(*net.TCPListener); ok && t.SetDeadline(past) == nil {
			continue
		}
		l.Close()
	}
	s.mu.Unlock()
	s.accepting.Wait()
	s.mu.Lock()
	for c := range s.conns {
		c.closeIdle()
	}
	for f := range s.fronts {
		f.drain()
	}
	s.mu.Unlock()
	defer close(s.stopped)

	finished := make(chan struct{})
	go func() {
		s.fronting.Wait()
		s.mu.Lock()
		s.sealed = true
		s.mu.Unlock()
		s.inside.CloseIdleConnections()
		s.running.Wait()
		close(finished)
	}()
	var err error
	select {
	case <-finished:
	case <-ctx.Done():
		err = ctx.Err()
		s.cancel()
		s.mu.Lock()
		for c := range s.conns {
			c.cutNow()
		}
		for f := range s.fronts {
			f.reset()
		}
		s.mu.Unlock()
		<-finished
	}
	s.cancel()
	for _, sh := range s.shards {
		sh.close()
	}
	return err
}

// requestDone writes a line for a request that is over, of which the engine has
// counted u. The level is debug.
func (s *Server) requestDone(x *exchange, f failure, u usage) {
	if !s.log.Enabled(s.ctx, slog.LevelDebug) {
		return
	}
	args := []any{"request_id", string(x.id), "method", string(x.method), "path", string(x.path),
		"status", x.status, "outcome", f.label(), "seconds", time.Since(x.began).Seconds()}
	if id := x.traceID(); id != "" {
		args = append(args, "trace_id", id)
	}
	if x.key != nil {
		args = append(args, "key", x.key.Name)
	}
	if x.model != nil {
		args = append(args, "model", x.model.Name)
	}
	if x.followed {
		args = append(args, "prompt", x.promptReason.String(), "prompt_tokens", x.promptTokens, "prompt_seconds", x.promptTook.Seconds())
	}
	if x.predicted >= 0 {
		args = append(args, "cached_tokens", x.predicted)
	}
	if u.cachedTold {
		args = append(args, "engine_cached_tokens", u.cached)
	}
	if x.replica != nil {
		args = append(args, "replica", x.replica.ID, "first_byte_seconds", x.ttfb.Seconds(), "attempts", x.attempts)
	}
	s.log.Debug("request", args...)
}

// failed reports a failure that is not the client's fault, at most once a
// second: an engine that is down fails every request.
func (s *Server) failed(x *exchange, f failure, cause error) {
	now := time.Now().UnixNano()
	last := s.stats.logged.Load()
	if now-last < int64(time.Second) || !s.stats.logged.CompareAndSwap(last, now) {
		s.stats.unlogged.Add(1)
		return
	}
	args := []any{"failure", f.label(), "blame", failureTable[f].blame.String(), "request_id", string(x.id)}
	if x.model != nil {
		args = append(args, "model", x.model.Name)
	}
	if x.replica != nil {
		args = append(args, "replica", x.replica.ID)
	}
	if id := x.traceID(); id != "" {
		args = append(args, "trace_id", id)
	}
	if x.verdict != "" && f == overBudget {
		args = append(args, "admission", x.verdict)
	}
	if cause != nil {
		args = append(args, "error", cause)
	}
	if n := s.stats.unlogged.Swap(0); n > 0 {
		args = append(args, "others_not_logged", n)
	}
	s.log.Warn("exchange failed", args...)
}
