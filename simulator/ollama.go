package simulator

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Ollama is what only Ollama is told when it starts, in its environment.
type Ollama struct {
	// KeepAlive is for how long an idle model stays in memory; below 0 is for ever.
	KeepAlive time.Duration `yaml:"keep_alive" name:"keep-alive" default:"5m" help:"How long Ollama keeps an idle model in memory, OLLAMA_KEEP_ALIVE; negative is for ever."`
	// MaxQueue is how many requests may wait for a model that is being loaded.
	MaxQueue int `yaml:"max_queue" name:"max-queue" default:"512" help:"Most requests that wait for Ollama to load a model, OLLAMA_MAX_QUEUE; more are refused."`
}

func (o *Ollama) complete() {
	setDefault(&o.KeepAlive, 5*time.Minute)
	setDefault(&o.MaxQueue, 512)
}

func (o *Ollama) check() error {
	if o.MaxQueue < 1 {
		return fmt.Errorf("max-queue must be at least 1, got %d", o.MaxQueue)
	}
	return nil
}

// ollamaVersion is the release whose behaviour is simulated.
const ollamaVersion = "0.33.0"

func ollamaFace() *face {
	return &face{
		parsers: map[string]parser{
			"/api/chat":            parseOllamaChat,
			"/api/generate":        parseOllamaGenerate,
			"/api/embed":           parseOllamaEmbed,
			"/api/embeddings":      parseOllamaEmbeddings,
			"/v1/chat/completions": parseOllamaOpenAIChat,
			"/v1/completions":      parseOllamaOpenAICompletion,
			"/v1/embeddings":       parseOllamaOpenAIEmbeddings,
		},
		mount: ollamaRoutes,
		appendError: func(dst []byte, path string, e *apiError) []byte {
			if strings.HasPrefix(path, "/v1/") {
				return append(appendOllamaOpenAIError(dst, e), '\n')
			}
			return appendOllamaError(dst, e)
		},
		failure: http.StatusInternalServerError,
		noRoute: func(w http.ResponseWriter, _ *http.Request, allowed []string) {
			w.Header().Set("Content-Type", "text/plain")
			status, text := http.StatusNotFound, "404 page not found"
			if allowed != nil {
				status, text = http.StatusMethodNotAllowed, "405 method not allowed"
			}
			w.WriteHeader(status)
			_, _ = w.Write([]byte(text))
		},
		// It knows no keys.
		authorized:   func(*http.Request, string) bool { return true },
		unauthorized: func(http.ResponseWriter, *http.Request) {},
		gate:         ollamaGate,
		admit:        admitOllama,
	}
}

// ollamaGate turns pages of other sites away, and requests by a name that is not
// this machine's.
func ollamaGate(s *Server, w http.ResponseWriter, r *http.Request) bool {
	if origin := r.Header.Get("Origin"); origin != "" && origin != "http://"+r.Host && origin != "https://"+r.Host {
		if !ollamaOrigin(origin) {
			w.WriteHeader(http.StatusForbidden)
			return true
		}
		w.Header().Set("Access-Control-Allow-Origin", origin)
		if r.Method == http.MethodOptions {
			w.Header().Set("Access-Control-Allow-Methods", "GET,POST,PUT,PATCH,DELETE,HEAD,OPTIONS")
			w.WriteHeader(http.StatusNoContent)
			return true
		}
	}
	if !s.ollamaHost(r.Host) {
		w.WriteHeader(http.StatusForbidden)
		return true
	}
	w.Header().Set("Content-Type", ollamaType)
	if strings.HasPrefix(r.URL.Path, "/v1/") {
		w.Header().Set("Content-Type", "application/json")
	}
	return false
}

const ollamaType = "application/json; charset=utf-8"

// ollamaOrigin reports whether pages of an origin may ask.
func ollamaOrigin(origin string) bool {
	scheme, rest, _ := strings.Cut(origin, "://")
	switch scheme {
	case "app", "file", "tauri", "vscode-webview", "vscode-file":
		return true
	case "http", "https":
		host, _, err := net.SplitHostPort(rest)
		if err != nil {
			host = rest
		}
		return slices.Contains([]string{"localhost", "127.0.0.1", "0.0.0.0"}, host)
	}
	return false
}

// ollamaHost reports whether a request by a host's name is for a server that only
// this machine reaches, or it can be reached by others.
func (s *Server) ollamaHost(host string) bool {
	if at, err := netip.ParseAddrPort(s.Addr()); err != nil || !at.Addr().IsLoopback() {
		return true
	}
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	if ip, err := netip.ParseAddr(strings.Trim(host, "[]")); err == nil {
		return ip.IsLoopback() || ip.IsPrivate() || ip.IsUnspecified()
	}
	host = strings.ToLower(host)
	return host == "" || host == "localhost" || strings.HasSuffix(host, ".localhost") ||
		strings.HasSuffix(host, ".local") || strings.HasSuffix(host, ".internal")
}

// ollamaRoutes adds its other paths.
func ollamaRoutes(s *Server, on route) {
	on("GET", "/", s.healthy(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		_, _ = w.Write([]byte("Ollama is running"))
	}), "HEAD")
	on("GET", "/api/version", s.healthy(func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, []byte(`{"version":"`+ollamaVersion+`"}`))
	}), "HEAD")
	on("GET", "/api/status", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, []byte(`{"cloud":{"disabled":false,"source":"none"}}`))
	})
	on("GET", "/api/tags", s.ollamaTags, "HEAD")
	on("GET", "/api/ps", s.telling(s.ollamaResident))
	on("POST", "/api/show", s.ollamaShow)
	on("POST", "/api/pull", s.ollamaPull)
	on("GET", "/v1/models", s.ollamaModels)
	on("GET", "/v1/models/{model...}", s.ollamaModels)
	for _, path := range []string{"POST /api/create", "POST /api/copy", "DELETE /api/delete", "POST /api/push", "POST /api/blobs/{digest}",
		"HEAD /api/blobs/{digest}", "POST /api/me", "POST /api/signout", "POST /v1/responses", "POST /v1/messages", "POST /v1/audio/transcriptions"} {
		method, path, _ := strings.Cut(path, " ")
		on(method, path, func(w http.ResponseWriter, r *http.Request) {
			s.refuse(w, r, ollamaRefusal(http.StatusBadRequest, "the simulated engine does not support %s", path))
		})
	}
}

// ollamaRefusal is an error of Ollama.
func ollamaRefusal(status int, format string, args ...any) *apiError {
	return &apiError{status: status, message: fmt.Sprintf(format, args...)}
}

// appendOllamaError appends a body that says e.
func appendOllamaError(dst []byte, e *apiError) []byte {
	return append(appendHTML(append(dst, `{"error":`...), e.message), '}')
}

// appendOllamaOpenAIError appends one of the routes that are like OpenAI's.
func appendOllamaOpenAIError(dst []byte, e *apiError) []byte {
	kind := "api_error"
	switch e.status {
	case http.StatusBadRequest:
		kind = "invalid_request_error"
	case http.StatusNotFound:
		kind = "not_found_error"
	}
	dst = appendHTML(append(dst, `{"error":{"message":`...), e.message)
	return append(dst, `,"type":"`+kind+`","param":null,"code":null}}`...)
}

// appendHTML appends a text as a JSON string in which HTML is safe, as the standard
// library of Go writes it.
func appendHTML(dst []byte, text string) []byte {
	start := len(dst)
	return escapeHTML(appendString(dst, text), start)
}

// escapeHTML escapes what appendHTML does in what was appended from a place on.
func escapeHTML(dst []byte, from int) []byte {
	for i := from; i < len(dst); i++ {
		var with string
		n := 1
		switch {
		case dst[i] == '<':
			with = `\u003c`
		case dst[i] == '>':
			with = `\u003e`
		case dst[i] == '&':
			with = `\u0026`
		case dst[i] == 0xe2 && i+2 < len(dst) && dst[i+1] == 0x80 && dst[i+2]&^1 == 0xa8:
			with, n = `\u202`+string("89"[dst[i+2]&1]), 3
		default:
			continue
		}
		dst = append(dst[:i], append([]byte(with), dst[i+n:]...)...)
		i += len(with) - 1
	}
	return dst
}

// ollamaName is the name by which a model is known: with its tag, and without the
// registry and the namespace that are understood.
func ollamaName(raw string) (name string, valid bool) {
	name = strings.TrimSpace(raw)
	at := strings.LastIndexByte(name, ':')
	if at < 0 || at < strings.LastIndexByte(name, '/') {
		name += ":latest"
	} else if at == len(name)-1 {
		return "", false
	}
	name = strings.TrimPrefix(strings.TrimPrefix(name, "registry.ollama.ai/"), "library/")
	for _, part := range strings.FieldsFunc(name, func(r rune) bool { return r == '/' || r == ':' }) {
		for i, r := range part {
			letter := r == '_' || r >= '0' && r <= '9' || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z'
			if !letter && (i == 0 || r != '-' && r != '.') {
				return "", false
			}
		}
	}
	return name, name != ":latest" && !strings.HasPrefix(name, "/") && !strings.Contains(name, "//")
}

// ollamaModel returns the name of the model that a request means. All names are of
// the same model.
func (c *Config) ollamaModel(raw string) (name string, there bool, err error) {
	if strings.TrimSpace(raw) == "" {
		return "", false, errNoModel
	}
	name, valid := ollamaName(raw)
	if !valid {
		return "", false, ollamaRefusal(http.StatusBadRequest, "invalid model name")
	}
	for _, served := range c.ServedModelName {
		if own, _ := ollamaName(served); strings.EqualFold(own, name) {
			return own, true, nil
		}
	}
	return name, false, nil
}

// errNoModel is a request that names none; what is said of it differs from route to
// route.
var errNoModel = errors.New("model is required")

// Sizes of the model: those of Llama 3.1 8B in 4 bits, and what its cache takes for
// a token.
const (
	ollamaFile     = 4920753328
	ollamaOverhead = 512 << 20
	ollamaToken    = 2 * 32 * 8 * 128 * 2
)

// ollamaDetails is the member details of a model.
const ollamaDetails = `{"parent_model":"","format":"gguf","family":"llama","families":["llama"],"parameter_size":"8.0B","quantization_level":"Q4_K_M"}`

const ollamaCapabilities = `["completion","tools"]`

// digest is the name of the model's file.
func (c *Config) digest() string {
	var b strings.Builder
	h := hashText(c.ServedModelName[0])
	for range 4 {
		h = mix(h + golden)
		fmt.Fprintf(&b, "%016x", h)
	}
	return b.String()
}

// modified is when the model was got.
func (s *Server) modified() string {
	t := s.current().began
	if s.cfg.Created != 0 {
		t = time.Unix(s.cfg.Created, 0).UTC()
	}
	return t.Format(time.RFC3339Nano)
}

// ollamaTags serves GET /api/tags.
func (s *Server) ollamaTags(w http.ResponseWriter, _ *http.Request) {
	out := []byte(`{"models":[`)
	details := strings.TrimSuffix(ollamaDetails, "}") + fmt.Sprintf(`,"context_length":%d,"embedding_length":4096}`, s.cfg.MaxModelLen)
	for i, served := range s.cfg.ServedModelName {
		if i > 0 {
			out = append(out, ',')
		}
		name, _ := ollamaName(served)
		shown := appendHTML(nil, name)
		out = fmt.Appendf(out, `{"name":%s,"model":%[1]s,"modified_at":"%s","size":%d,"digest":"%s","details":%s,"capabilities":`+ollamaCapabilities+`}`,
			shown, s.modified(), ollamaFile, s.cfg.digest(), details)
	}
	writeJSON(w, http.StatusOK, append(out, "]}"...))
}

// ollamaResident serves GET /api/ps: what is in memory, not what there is to do.
func (s *Server) ollamaResident(w http.ResponseWriter, _ *http.Request) {
	out := []byte(`{"models":[`)
	if m, ok := s.current().runner.resident(); ok {
		name := appendHTML(nil, m.name)
		size := ollamaFile + ollamaOverhead + m.options.context*s.cfg.MaxNumSeqs*ollamaToken
		out = fmt.Appendf(out, `{"name":%s,"model":%[1]s,"size":%d,"digest":"%s","details":`+ollamaDetails+`,"expires_at":"%s","size_vram":%[2]d,"context_length":%[5]d}`,
			name, size, s.cfg.digest(), m.expires.Format(time.RFC3339Nano), m.options.context)
	}
	writeJSON(w, http.StatusOK, append(out, "]}"...))
}

// ollamaBody reads the body of a request to a page.
func (s *Server) ollamaBody(w http.ResponseWriter, r *http.Request, into any) bool {
	body, err := readBody(w, r)
	if err == nil {
		err = unmarshalOllama(body, into)
	}
	if err != nil {
		s.refuse(w, r, err)
	}
	return err == nil
}

// ollamaShow serves POST /api/show.
func (s *Server) ollamaShow(w http.ResponseWriter, r *http.Request) {
	var b struct {
		Model, Name, System string
	}
	if !s.ollamaBody(w, r, &b) {
		return
	}
	if b.Model == "" {
		b.Model = b.Name
	}
	name, there, err := s.cfg.ollamaModel(b.Model)
	switch {
	case errors.Is(err, errNoModel):
		err = ollamaRefusal(http.StatusBadRequest, "model is required")
	case err == nil && !there:
		err = ollamaRefusal(http.StatusNotFound, "model '%s' not found", name)
	}
	if err != nil {
		s.refuse(w, r, err)
		return
	}
	out := []byte(`{"modelfile":`)
	out = appendHTML(out, "# Modelfile generated by \"ollama show\"\n# To build a new Modelfile based on this, replace FROM with:\n# FROM "+name+"\n\nFROM /root/.ollama/models/blobs/sha256-"+s.cfg.digest()+"\n")
	out = append(out, `,"template":"{{ .Prompt }}"`...)
	if b.System != "" {
		out = appendHTML(append(out, `,"system":`...), b.System)
	}
	out = fmt.Appendf(out, `,"details":`+ollamaDetails+`,"model_info":{"general.architecture":"llama","general.file_type":15,"general.parameter_count":8030261312,`+
		`"general.quantization_version":2,"llama.attention.head_count":32,"llama.attention.head_count_kv":8,"llama.block_count":32,"llama.context_length":%d,`+
		`"llama.embedding_length":4096,"llama.vocab_size":128256},"capabilities":`+ollamaCapabilities+`,"modified_at":"%s"}`, s.cfg.MaxModelLen, s.modified())
	writeJSON(w, http.StatusOK, out)
}

// ollamaPull serves POST /api/pull: of a model that is there all layers are, and of
// another there is no registry.
func (s *Server) ollamaPull(w http.ResponseWriter, r *http.Request) {
	var b struct {
		Model, Name string
		Stream      *bool
	}
	if !s.ollamaBody(w, r, &b) {
		return
	}
	if b.Model == "" {
		b.Model = b.Name
	}
	name, there, err := s.cfg.ollamaModel(b.Model)
	if err != nil {
		s.refuse(w, r, ollamaRefusal(http.StatusBadRequest, "invalid model name"))
		return
	}
	digest := s.cfg.digest()
	lines := []string{`{"status":"pulling manifest"}`,
		fmt.Sprintf(`{"status":"pulling %s","digest":"sha256:%s","total":%d,"completed":%[3]d}`, digest[:12], digest, ollamaFile),
		`{"status":"verifying sha256 digest"}`, `{"status":"writing manifest"}`, `{"status":"success"}`}
	missing := ollamaRefusal(http.StatusInternalServerError, "pull model manifest: the simulated engine has no registry to pull %s from", name)
	if !there {
		lines = append(lines[:1], string(appendOllamaError(nil, missing)))
	}
	if b.Stream != nil && !*b.Stream {
		if !there {
			s.refuse(w, r, missing)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		writeJSON(w, http.StatusOK, []byte(lines[len(lines)-1]))
		return
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	c := http.NewResponseController(w)
	for _, line := range lines {
		if _, err := w.Write([]byte(line + "\n")); err != nil || c.Flush() != nil {
			return
		}
	}
}

// ollamaModels serves GET /v1/models, and the one that is named.
func (s *Server) ollamaModels(w http.ResponseWriter, r *http.Request) {
	created := s.current().began.Unix()
	if s.cfg.Created != 0 {
		created = s.cfg.Created
	}
	card := func(dst []byte, name string) []byte {
		owner := "library"
		if parts := strings.Split(name, "/"); len(parts) > 1 {
			owner = parts[len(parts)-2]
		}
		dst = appendHTML(append(dst, `{"id":`...), name)
		dst = append(dst, `,"object":"model","created":`...)
		dst = strconv.AppendInt(dst, created, 10)
		dst = appendHTML(append(dst, `,"owned_by":`...), owner)
		return append(dst, '}')
	}
	if asked := r.PathValue("model"); asked != "" {
		name, there, err := s.cfg.ollamaModel(asked)
		switch {
		case err == nil && !there:
			err = ollamaRefusal(http.StatusNotFound, "model '%s' not found", name)
		case err == nil:
			writeJSON(w, http.StatusOK, append(card(nil, asked), '\n'))
			return
		}
		s.refuse(w, r, err)
		return
	}
	out := []byte(`{"object":"list","data":[`)
	for i, served := range s.cfg.ServedModelName {
		if i > 0 {
			out = append(out, ',')
		}
		name, _ := ollamaName(served)
		out = card(out, name)
	}
	writeJSON(w, http.StatusOK, append(out, "]}\n"...))
}

// unmarshalOllama reads a body as Go's standard library does, which is what Ollama
// is written in: names of members match in any case.
func unmarshalOllama(body []byte, into any) error {
	if len(body) == 0 {
		return ollamaRefusal(http.StatusBadRequest, "missing request body")
	}
	if err := json.Unmarshal(body, into); err != nil {
		if e, ok := errors.AsType[*apiError](err); ok {
			return e
		}
		return ollamaRefusal(http.StatusBadRequest, "%s", ollamaTypes.Replace(err.Error()))
	}
	return nil
}

// ollamaTypes are the names of types in errors as they are in Ollama.
var ollamaTypes = strings.NewReplacer("ollamaChat.", "ChatRequest.", "ollamaGenerate.", "GenerateRequest.",
	"ollamaCommon.", "", "simulator.ollamaMessage", "api.Message")

// ollama makes what the page of metrics would show, which there is not.
func (m *metrics) ollama(*rank) *rankMetrics {
	rm := &rankMetrics{}
	rm.counters("", nil)
	return rm
}
