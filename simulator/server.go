package simulator

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Server is a simulated engine behind HTTP. Start makes one, Close ends it.
// Its methods may be called from any goroutine.
type Server struct {
	cfg      Config
	face     *face
	began    time.Time
	http     http.Server
	listener *listener

	vocabulary *vocabulary
	faults     atomic.Pointer[faultSet]

	// restart is held while the process is replaced, mu guards which it is and
	// what its ranks say that it guards.
	restart sync.Mutex
	mu      sync.Mutex
	process *process
	// exchanges are those that SGLang can be asked to abort, *exchange to nothing.
	exchanges sync.Map
	// connections are the open ones, *conn to nothing.
	connections sync.Map

	running, aborted, finished, accepted, splits atomic.Int64
	// admitted are the choices that face.admit has let in.
	admitted atomic.Int64

	// cancel ends the contexts of all requests, and closes closed. served counts
	// the accept loop, the open connections and who follows a throttle.
	cancel context.CancelFunc
	closed <-chan struct{}
	served sync.WaitGroup
}

// Start makes a server and listens. It reports every value of cfg that cannot
// be used.
func Start(cfg Config) (*Server, error) {
	cfg.ServedModelName = slices.Clone(cfg.ServedModelName)
	if err := cfg.complete(); err != nil {
		return nil, fmt.Errorf("simulated engine: %w", err)
	}
	address := net.JoinHostPort(cfg.Host, strconv.Itoa(cfg.Port))
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("simulated engine: %w", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	s := &Server{
		cfg: cfg, face: cfg.face(), began: time.Now(), cancel: cancel, closed: ctx.Done(),
		listener:   newListener(l.(*net.TCPListener)),
		vocabulary: newVocabulary(),
	}
	if err := s.SetFaults(cfg.Faults); err != nil {
		panic("BUG: faults that were checked: " + err.Error())
	}
	if s.process, err = newProcess(s); err != nil {
		cancel()
		_ = s.listener.Close()
		return nil, fmt.Errorf("simulated engine: %w", err)
	}
	s.throttle()
	s.http = http.Server{
		Handler:     s.handler(),
		BaseContext: func(net.Listener) context.Context { return ctx },
		ConnContext: withConn,
		ConnState:   s.connState,
		IdleTimeout: time.Duration(cfg.TimeoutKeepAliveS) * time.Second,
		ErrorLog:    log.New(io.Discard, "", 0),
	}
	s.served.Go(func() { _ = s.http.Serve(s.listener) })
	return s, nil
}

// Close stops listening, drops every connection and waits until all of the
// server's goroutines have ended.
func (s *Server) Close() error {
	s.cancel()
	err := s.http.Close()
	// Close before Serve has begun does not reach the listener.
	if lerr := s.listener.Close(); !errors.Is(lerr, net.ErrClosed) {
		err = errors.Join(err, lerr)
	}
	s.served.Wait()
	s.restart.Lock()
	defer s.restart.Unlock()
	s.current().close()
	return err
}

// Addr is the address the server listens on, as host:port.
func (s *Server) Addr() string { return s.listener.Addr().String() }

// URL is the address as clients write it.
func (s *Server) URL() string { return "http://" + s.Addr() }

// Running is the number of requests to inference routes that were taken and
// whose answer is not over. Those that the engine has no part in, such as
// /tokenize, are not counted, here and below.
func (s *Server) Running() int { return int(s.running.Load()) }

// Finished is the number of answers sent to their end.
func (s *Server) Finished() int { return int(s.finished.Load()) }

// Aborted is the number of answers that were not sent to their end: the client
// left, or a fault broke them off.
func (s *Server) Aborted() int { return int(s.aborted.Load()) }

// Accepted is the number of connections accepted since the start.
func (s *Server) Accepted() int { return int(s.accepted.Load()) }

// Load is the load of all ranks now. A server without latency, whose engine is
// always done at once, counts the answers being sent as running.
func (s *Server) Load() Load {
	s.mu.Lock()
	defer s.mu.Unlock()
	var l Load
	for _, r := range s.process.ranks {
		one := r.engine.Load(s.now())
		s.process.settle(r, s.now())
		l.Running, l.Waiting, l.Tokens = l.Running+one.Running, l.Waiting+one.Waiting, l.Tokens+one.Tokens
	}
	if s.cfg.ZeroLatency {
		l.Running = s.Running()
	}
	return l
}

// connState follows the connections: Close waits for their goroutines.
// net/http calls it with StateNew from the accept loop and with StateClosed as
// the last act of a connection's goroutine.
func (s *Server) connState(c net.Conn, state http.ConnState) {
	switch state {
	case http.StateNew:
		s.accepted.Add(1)
		s.served.Add(1)
		s.connections.Store(c, nil)
	case http.StateClosed:
		s.connections.Delete(c)
		s.served.Done()
	}
}

// now is the engine's time.
func (s *Server) now() time.Duration { return time.Since(s.began) }

// created is the time that answers carry.
func (s *Server) created() int64 {
	if s.cfg.Created != 0 {
		return s.cfg.Created
	}
	return time.Now().Unix()
}

// nextSplit returns a seed for cutting the writes of one answer.
func (s *Server) nextSplit() uint64 { return 1 | mix(s.cfg.Seed+uint64(s.splits.Add(1))) }

// requestID returns the client's X-Request-Id, what else the client calls the
// request, or a new number.
func requestID(r *http.Request, called string) string {
	if id := r.Header.Get("X-Request-Id"); id != "" {
		return id
	}
	if called != "" {
		return called
	}
	return fmt.Sprintf("%016x", rand.Uint64())
}

// handler returns the routes: the engine's, and those under /sim.
func (s *Server) handler() http.Handler {
	routes := map[string]map[string]http.HandlerFunc{} // by path and method
	on := func(method, path string, h http.HandlerFunc, more ...string) {
		if routes[path] == nil {
			routes[path] = map[string]http.HandlerFunc{}
		}
		for _, method := range append(more, method) {
			routes[path][method] = h
		}
	}
	for path, parse := range s.face.parsers {
		on("POST", path, s.infer(parse))
	}
	s.face.mount(s, on)
	on("POST", "/sim/raw", s.raw)
	on("POST", "/sim/restart", s.postRestart)
	on("GET", "/sim/faults", s.getFaults)
	on("POST", "/sim/faults", s.postFaults)
	on("PATCH", "/sim/faults", s.patchFaults)
	on("GET", "/sim/stats", s.getStats)
	mux := http.NewServeMux()
	for path, handlers := range routes {
		allowed := slices.Sorted(maps.Keys(handlers))
		if path == "/" {
			path = "/{$}"
		}
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			s.face.sign(w)
			h := handlers[r.Method]
			own := strings.HasPrefix(path, "/sim/") // no engine's
			switch {
			case s.face.gate != nil && !own && s.face.gate(s, w, r):
			case !own && s.cfg.APIKey != "" && !s.face.authorized(r, s.cfg.APIKey):
				s.face.unauthorized(w, r)
			case h == nil:
				w.Header().Set("Allow", strings.Join(allowed, ", "))
				s.face.noRoute(w, r, allowed)
			default:
				h(w, r)
			}
		})
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		s.face.sign(w)
		if s.face.gate == nil || !s.face.gate(s, w, r) {
			s.face.noRoute(w, r, nil)
		}
	})
	return mux
}

// metricsPage serves GET /metrics.
func (s *Server) metricsPage(w http.ResponseWriter, r *http.Request) {
	promhttp.HandlerFor(s.current().metrics.registry, promhttp.HandlerOpts{}).ServeHTTP(w, r)
}

// raw serves POST /sim/raw.
func (s *Server) raw(w http.ResponseWriter, r *http.Request) {
	if _, err := readBody(w, r); err != nil {
		writeError(w, err)
		return
	}
	raw, err := parseRaw(r.URL.Query())
	if err == nil {
		err = raw.check()
	}
	if err != nil {
		writeError(w, badParameter("", "%v", err))
		return
	}
	s.serve(w, r, &request{raw: &raw})
}

// parseRaw reads the query of /sim/raw. What is absent is one piece of one
// byte, chunked, at once.
func parseRaw(q url.Values) (Raw, error) {
	raw := Raw{Chunks: 1, Max: 1, Length: q.Get("length"), Break: q.Get("break")}
	var errs []error
	number := func(name string, into func(uint64)) {
		if text := q.Get(name); text != "" {
			n, err := strconv.ParseUint(text, 10, 63)
			if err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", name, err))
			}
			into(n)
		}
	}
	number("seed", func(n uint64) { raw.Seed = n })
	number("chunks", func(n uint64) { raw.Chunks = int(n) })
	number("max", func(n uint64) { raw.Max = int(n) })
	number("interval_us", func(n uint64) { raw.IntervalUS = int64(n) })
	number("break_after", func(n uint64) { raw.BreakAfter = int(n) })
	number("split", func(n uint64) { raw.Split = n != 0 })
	return raw, errors.Join(errs...)
}

// writeError answers a request to the simulator itself.
func writeError(w http.ResponseWriter, err error) {
	e := asAPIError(err)
	writeJSON(w, e.status, e.appendBody(nil))
}

// writeJSON answers with a body of the type that is set, or JSON's.
func writeJSON(w http.ResponseWriter, status int, body []byte) {
	if w.Header().Get("Content-Type") == "" {
		w.Header().Set("Content-Type", "application/json")
	}
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = w.Write(body)
}
