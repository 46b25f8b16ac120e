package simulator

import (
	"context"
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

// routes are the paths of inference whose answer is a function of the body.
var routes = map[string]parser{
	"/v1/chat/completions":      parseAs(chat, parseRequest),
	"/v1/completions":           parseAs(completions, parseRequest),
	"/v1/responses":             parseResponses,
	"/v1/messages":              parseMessages,
	"/v1/messages/count_tokens": parseCountTokens,
	"/v1/embeddings":            parseAs(embeddings, parsePooling),
	"/pooling":                  parseAs(pooling, parsePooling),
	"/classify":                 parseAs(classification, parsePooling),
	"/score":                    parseScore,
	"/v1/score":                 parseScore,
	"/rerank":                   parseRerank,
	"/v1/rerank":                parseRerank,
	"/v2/rerank":                parseRerank,
}

// parseAs returns the parser of one of several routes that are read alike.
func parseAs(a api, parse func(*Config, api, []byte) (*request, error)) parser {
	return func(cfg *Config, body []byte) (*request, error) { return parse(cfg, a, body) }
}

// Server is a simulated engine behind HTTP. Start makes one, Close ends it.
// Its methods may be called from any goroutine.
type Server struct {
	cfg      Config
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
	// connections are the open ones, *conn to nothing.
	connections sync.Map

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
		cfg: cfg, began: time.Now(), cancel: cancel,
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
	on := func(method, path string, h http.HandlerFunc, more ...string) {
		methods := append([]string{method}, more...)
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Server", "uvicorn")
			switch {
			case s.cfg.APIKey != "" && (strings.HasPrefix(path, "/v1/") || strings.HasPrefix(path, "/v2/")) && r.Header.Get("Authorization") != "Bearer "+s.cfg.APIKey:
				writeJSON(w, http.StatusUnauthorized, []byte(`{"error":"Unauthorized"}`))
			case !slices.Contains(methods, r.Method):
				w.Header().Set("Allow", strings.Join(methods, ", "))
				writeDetail(w, http.StatusMethodNotAllowed)
			default:
				h(w, r)
			}
		})
	}
	for path, parse := range routes {
		on("POST", path, s.infer(parse))
	}
	on("POST", "/tokenize", s.infer(s.tokenize))
	on("POST", "/detokenize", s.infer(s.detokenize))
	on("POST", "/v1/chat/completions/render", s.render(chat))
	on("POST", "/v1/completions/render", s.render(completions))
	on("POST", "/v1/audio/transcriptions", s.speech(transcription))
	on("POST", "/v1/audio/translations", s.speech(translation))
	on("GET", "/v1/responses/{id}", getResponse)
	on("POST", "/v1/responses/{id}/cancel", getResponse)
	on("GET", "/v1/models", s.models)
	on("GET", "/health", s.healthy(func(http.ResponseWriter, *http.Request) {}))
	on("GET", "/ping", s.healthy(func(http.ResponseWriter, *http.Request) {}), "POST")
	on("GET", "/version", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, []byte(`{"version":"`+version+`"}`))
	})
	on("GET", "/load", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, fmt.Appendf(nil, `{"server_load":%d}`, s.Running()))
	})
	if s.cfg.sglang() {
		on("GET", "/server_info", s.serverInfo)
		on("GET", "/get_server_info", s.serverInfo)
		on("GET", "/v1/loads", s.healthy(s.loads))
		on("POST", "/flush_cache", s.flushCache, "GET")
	} else {
		on("GET", "/server_info", s.info)
		on("GET", "/kv_event_sources", s.eventSources)
		on("POST", "/reset_prefix_cache", s.resetCache)
	}
	on("GET", "/metrics", s.healthy(func(w http.ResponseWriter, r *http.Request) {
		promhttp.HandlerFor(s.current().metrics.registry, promhttp.HandlerOpts{}).ServeHTTP(w, r)
	}))
	mux.HandleFunc("POST /sim/restart", s.postRestart)
	on("POST", "/sim/raw", s.raw)
	mux.HandleFunc("GET /sim/faults", s.getFaults)
	mux.HandleFunc("POST /sim/faults", s.postFaults)
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Server", "uvicorn")
		writeDetail(w, http.StatusNotFound)
	})
	return mux
}

// models serves GET /v1/models.
func (s *Server) models(w http.ResponseWriter, _ *http.Request) {
	created := strconv.FormatInt(s.created(), 10)
	out := []byte(`{"object":"list","data":[`)
	for i, name := range slices.Concat(s.cfg.ServedModelName, s.cfg.LoRAModules) {
		if i > 0 {
			out = append(out, ',')
		}
		out = append(out, `{"id":`...)
		out = appendString(out, name)
		out = append(out, `,"object":"model","created":`+created+`,"owned_by":"`+s.cfg.Engine+`","root":`...)
		out = appendString(out, s.cfg.ServedModelName[0])
		out = append(out, `,"parent":`...)
		if i < len(s.cfg.ServedModelName) {
			out = append(out, `null,"max_model_len":`+strconv.Itoa(s.cfg.MaxModelLen)...)
		} else {
			out = append(appendString(out, s.cfg.ServedModelName[0]), `,"max_model_len":null`...)
		}
		out = append(out, `,"permission":[{"id":"modelperm-`+fmt.Sprintf("%016x", hashText(name))+
			`","object":"model_permission","created":`+created+`,"allow_create_engine":false,"allow_sampling":true,`+
			`"allow_logprobs":true,"allow_search_indices":false,"allow_view":true,"allow_fine_tuning":false,`+
			`"organization":"*","group":null,"is_blocking":false}]}`...)
	}
	writeJSON(w, http.StatusOK, append(out, `]}`...))
}

// info serves GET /server_info, which vLLM has in its development mode only:
// the configuration, as a text or as JSON.
func (s *Server) info(w http.ResponseWriter, r *http.Request) {
	type parallel struct {
		DataParallelSize int `json:"data_parallel_size"`
	}
	config := struct {
		Model     string   `json:"model"`
		MaxLen    int      `json:"max_model_len"`
		MaxSeqs   int      `json:"max_num_seqs"`
		BlockSize int      `json:"block_size"`
		Blocks    int      `json:"num_gpu_blocks"`
		Parallel  parallel `json:"parallel_config"`
	}{s.cfg.ServedModelName[0], s.cfg.MaxModelLen, s.cfg.MaxNumSeqs, s.cfg.BlockSize, s.cfg.NumGPUBlocks, parallel{s.cfg.DataParallelSize}}
	var shown any = config
	switch format := r.URL.Query().Get("config_format"); format {
	case "", "text":
		shown = fmt.Sprintf("model=%s, max_model_len=%d, max_num_seqs=%d, block_size=%d, num_gpu_blocks=%d",
			config.Model, config.MaxLen, config.MaxSeqs, config.BlockSize, config.Blocks)
	case "json":
	default:
		writeError(w, &apiError{http.StatusBadRequest, "Bad Request", "query.config_format", "1 validation error: config_format must be text or json"})
		return
	}
	writeJSON(w, http.StatusOK, appendJSON(nil, struct {
		Config any            `json:"vllm_config"`
		Env    map[string]any `json:"vllm_env"`
		System map[string]any `json:"system_env"`
	}{Config: shown}))
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

// writeDetail answers what has no route in the words of the framework beneath
// vLLM.
func writeDetail(w http.ResponseWriter, status int) {
	writeJSON(w, status, fmt.Appendf(nil, `{"detail":"%s"}`, http.StatusText(status)))
}

func writeError(w http.ResponseWriter, err error) { writeFailure(w, plain, err) }

// writeFailure answers with an error in the shape of an API.
func writeFailure(w http.ResponseWriter, a api, err error) {
	e, ok := errors.AsType[*apiError](err)
	if !ok {
		e = &apiError{http.StatusInternalServerError, "InternalServerError", "", err.Error()}
	}
	writeJSON(w, e.status, a.appendError(nil, e))
}

func writeJSON(w http.ResponseWriter, status int, body []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = w.Write(body)
}
