package simulator

import (
	"context"
	"encoding/json/v2"
	"errors"
	"fmt"
	"io"
	"log"
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

// routes are the paths that generate.
var routes = map[string]api{"/v1/chat/completions": chat, "/v1/completions": completions}

// Server is a simulated engine behind HTTP. Start makes one, Close ends it.
// Its methods may be called from any goroutine.
type Server struct {
	cfg      Config
	latency  Latency
	began    time.Time
	metrics  *metrics
	http     http.Server
	listener net.Listener

	// mu guards the engine, the plans of the sequences in it, and moved, which
	// is memory for Depart's result.
	mu     sync.Mutex
	engine *Engine
	moved  []*Sequence

	running, aborted, finished, accepted, splits atomic.Int64

	// cancel ends the contexts of all requests. served counts the accept loop
	// and the open connections.
	cancel context.CancelFunc
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
		cfg: cfg, latency: cfg.latency(), began: time.Now(), cancel: cancel,
		listener: listener{l.(*net.TCPListener)},
		engine:   NewEngine(cfg.latency(), cfg.MaxNumSeqs),
	}
	s.metrics = newMetrics(s)
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
	return err
}

// Addr is the address the server listens on, as host:port.
func (s *Server) Addr() string { return s.listener.Addr().String() }

// URL is the address as clients write it.
func (s *Server) URL() string { return "http://" + s.Addr() }

// Running is the number of generating requests that were taken and whose
// answer is not over.
func (s *Server) Running() int { return int(s.running.Load()) }

// Finished is the number of answers sent to their end.
func (s *Server) Finished() int { return int(s.finished.Load()) }

// Aborted is the number of answers that were not sent to their end: the client
// left, or a fault broke them off.
func (s *Server) Aborted() int { return int(s.aborted.Load()) }

// Accepted is the number of connections accepted since the start.
func (s *Server) Accepted() int { return int(s.accepted.Load()) }

// Load is the engine's load now. A server without latency, whose engine is
// always done at once, counts the answers being sent as running.
func (s *Server) Load() Load {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.engine.Load(s.now())
	if s.cfg.ZeroLatency {
		l.Running = s.Running()
	}
	return l
}

// connState follows the connections: Close waits for their goroutines.
// net/http calls it with StateNew from the accept loop and with StateClosed as
// the last act of a connection's goroutine.
func (s *Server) connState(_ net.Conn, state http.ConnState) {
	switch state {
	case http.StateNew:
		s.accepted.Add(1)
		s.served.Add(1)
	case http.StateClosed:
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

// requestID returns the client's X-Request-Id or a new number.
func requestID(r *http.Request) string {
	if id := r.Header.Get("X-Request-Id"); id != "" {
		return id
	}
	return fmt.Sprintf("%016x", rand.Uint64())
}

// handler returns the routes.
func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	on := func(method, path string, h http.HandlerFunc) {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Server", "uvicorn")
			switch {
			case s.cfg.APIKey != "" && strings.HasPrefix(path, "/v1/") && r.Header.Get("Authorization") != "Bearer "+s.cfg.APIKey:
				writeJSON(w, http.StatusUnauthorized, []byte(`{"error":"Unauthorized"}`))
			case r.Method != method:
				w.Header().Set("Allow", method)
				writeError(w, &apiError{http.StatusMethodNotAllowed, "Method Not Allowed", "", "Method Not Allowed"})
			default:
				h(w, r)
			}
		})
	}
	for path, a := range routes {
		on("POST", path, s.generate(a))
	}
	on("GET", "/v1/models", s.models)
	on("GET", "/health", func(http.ResponseWriter, *http.Request) {})
	on("GET", "/version", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, []byte(`{"version":"`+version+`"}`))
	})
	on("GET", "/metrics", promhttp.HandlerFor(s.metrics.registry, promhttp.HandlerOpts{}).ServeHTTP)
	on("POST", "/tokenize", s.tokenize)
	on("POST", "/sim/raw", s.raw)
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Server", "uvicorn")
		writeError(w, &apiError{http.StatusNotFound, "Not Found", "", "Not Found"})
	})
	return mux
}

// models serves GET /v1/models.
func (s *Server) models(w http.ResponseWriter, _ *http.Request) {
	created := strconv.FormatInt(s.created(), 10)
	out := []byte(`{"object":"list","data":[`)
	for i, name := range s.cfg.ServedModelName {
		if i > 0 {
			out = append(out, ',')
		}
		out = append(out, `{"id":`...)
		out = appendString(out, name)
		out = append(out, `,"object":"model","created":`+created+`,"owned_by":"vllm","root":`...)
		out = appendString(out, s.cfg.ServedModelName[0])
		out = append(out, `,"parent":null,"max_model_len":`+strconv.Itoa(s.cfg.MaxModelLen)+
			`,"permission":[{"id":"modelperm-`+fmt.Sprintf("%016x", hashText(name))+
			`","object":"model_permission","created":`+created+`,"allow_create_engine":false,"allow_sampling":true,`+
			`"allow_logprobs":true,"allow_search_indices":false,"allow_view":true,"allow_fine_tuning":false,`+
			`"organization":"*","group":null,"is_blocking":false}]}`...)
	}
	writeJSON(w, http.StatusOK, append(out, `]}`...))
}

// tokenize serves POST /tokenize.
func (s *Server) tokenize(w http.ResponseWriter, r *http.Request) {
	body, err := readBody(w, r)
	if err != nil {
		writeError(w, err)
		return
	}
	out, err := tokenize(&s.cfg, body)
	if err != nil {
		writeError(w, err)
		return
	}
	writeJSON(w, http.StatusOK, out)
}

// tokenize returns the body of the answer to a request of /tokenize.
func tokenize(cfg *Config, body []byte) ([]byte, error) {
	var b struct {
		requestBody
		Prompt          *string `json:"prompt"`
		ReturnTokenStrs *bool   `json:"return_token_strs"`
	}
	if err := unmarshal(body, &b); err != nil {
		return nil, err
	}
	if err := checkModel(cfg, b.Model); err != nil {
		return nil, err
	}
	var text string
	switch {
	case b.Prompt != nil:
		text = *b.Prompt
	default:
		var err error
		if text, err = renderChat(&b.requestBody); err != nil {
			return nil, err
		}
	}
	answer := struct {
		Count       int      `json:"count"`
		MaxModelLen int      `json:"max_model_len"`
		Tokens      []int    `json:"tokens"`
		TokenStrs   []string `json:"token_strs"`
	}{MaxModelLen: cfg.MaxModelLen, Tokens: []int{}}
	if b.ReturnTokenStrs != nil && *b.ReturnTokenStrs {
		answer.TokenStrs = []string{}
	}
	for text != "" {
		n := nextToken(text)
		answer.Tokens = append(answer.Tokens, tokenID(text[:n]))
		if answer.TokenStrs != nil {
			answer.TokenStrs = append(answer.TokenStrs, strings.ToValidUTF8(text[:n], "\ufffd"))
		}
		text = text[n:]
	}
	answer.Count = len(answer.Tokens)
	return json.Marshal(&answer, json.FormatNilSliceAsNull(true))
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

func writeError(w http.ResponseWriter, err error) {
	e, ok := errors.AsType[*apiError](err)
	if !ok {
		e = &apiError{http.StatusInternalServerError, "InternalServerError", "", err.Error()}
	}
	writeJSON(w, e.status, e.appendBody(nil))
}

func writeJSON(w http.ResponseWriter, status int, body []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = w.Write(body)
}
