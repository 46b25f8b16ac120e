package simulator

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

// LlamaCPP is what only llama.cpp's server is told when it starts; the names are
// its own. The zero value is a server as it starts without any.
type LlamaCPP struct {
	Metrics    bool `yaml:"metrics" name:"metrics" help:"llama.cpp shows /metrics."`
	NoSlots    bool `yaml:"no_slots" name:"no-slots" help:"llama.cpp does not show /slots."`
	Embeddings bool `yaml:"embeddings" name:"embeddings" help:"llama.cpp answers /v1/embeddings."`
}

// llamacppBuild is the build whose behaviour is simulated.
const llamacppBuild = "b10621-c1d0e7a0"

func llamacppFace() *face {
	return &face{
		server: "llama.cpp",
		parsers: map[string]parser{
			"/v1/chat/completions": parseLlamaChat,
			"/chat/completions":    parseLlamaChat,
			"/v1/completions":      parseLlamaCompletion(llamaOpenAI),
			"/completions":         parseLlamaCompletion(llamaNative),
			"/completion":          parseLlamaCompletion(llamaNative),
			"/v1/embeddings":       parseLlamaEmbeddings(llamaOpenAI),
			"/embeddings":          parseLlamaEmbeddings(llamaNative),
			"/embedding":           parseLlamaEmbeddings(llamaNative),
			"/apply-template":      parseApplyTemplate,
		},
		mount:       llamacppRoutes,
		appendError: func(dst []byte, _ string, e *apiError) []byte { return appendLlamaError(dst, e) },
		noRoute: func(w http.ResponseWriter, _ *http.Request, _ []string) {
			w.Header().Del("Allow") // its framework has none for it
			writeJSON(w, http.StatusNotFound, []byte(`{"error":{"message":"File Not Found","type":"not_found_error","code":404}}`))
		},
		authorized: func(r *http.Request, key string) bool {
			given := r.Header.Get("Authorization")
			if given == "" {
				given = r.Header.Get("X-Api-Key")
			}
			return slices.Contains(llamacppPublic, r.URL.Path) || strings.HasPrefix(r.URL.Path, "/sim/") || strings.TrimPrefix(given, "Bearer ") == key
		},
		unauthorized: func(w http.ResponseWriter, _ *http.Request) {
			writeJSON(w, http.StatusUnauthorized, []byte(`{"error":{"message":"Invalid API Key","type":"authentication_error","code":401}}`))
		},
		failure: http.StatusInternalServerError,
		gate:    llamacppGate,
	}
}

// llamacppPublic are the paths that ask for no key.
var llamacppPublic = []string{"/health", "/v1/health", "/models", "/v1/models", "/"}

// llamacppGate answers all requests while the model is loaded.
func llamacppGate(s *Server, w http.ResponseWriter, r *http.Request) bool {
	w.Header().Set("Access-Control-Allow-Origin", r.Header.Get("Origin"))
	w.Header().Set("Content-Type", llamaType)
	switch {
	case r.Method == http.MethodOptions:
		w.Header().Set("Access-Control-Allow-Credentials", "true")
		w.Header().Set("Access-Control-Allow-Methods", "GET, POST")
		w.Header().Set("Access-Control-Allow-Headers", "*")
		w.Header().Set("Content-Type", "text/html")
		return true
	case time.Since(s.current().began) < s.cfg.LoadTime:
		writeJSON(w, http.StatusServiceUnavailable, []byte(`{"error":{"message":"Loading model","type":"unavailable_error","code":503}}`))
		return true
	}
	return false
}

// llamacppRoutes adds its other paths.
func llamacppRoutes(s *Server, on route) {
	healthy := s.healthy(func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, []byte(`{"status":"ok"}`))
	})
	on("GET", "/health", healthy)
	on("GET", "/v1/health", healthy)
	on("GET", "/models", s.llamaModels)
	on("GET", "/v1/models", s.llamaModels)
	on("GET", "/props", s.llamaProps, "POST")
	on("GET", "/slots", s.telling(s.llamaSlots))
	on("POST", "/slots/{id}", func(w http.ResponseWriter, r *http.Request) {
		s.refuse(w, r, llamaUnsupported("This server does not support slots action. Start it with `--slot-save-path`"))
	})
	on("GET", "/metrics", s.telling(s.llamaMetrics))
	on("POST", "/tokenize", s.infer(s.llamaTokenize))
	on("POST", "/detokenize", s.infer(s.llamaDetokenize))
	on("GET", "/lora-adapters", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, http.StatusOK, []byte("[]")) })

	// What the model cannot do is refused in its words, what only the simulated
	// engine lacks by name.
	refused := func(message string, paths ...string) {
		for _, path := range paths {
			on("POST", path, func(w http.ResponseWriter, r *http.Request) { s.refuse(w, r, llamaUnsupported(message)) })
		}
	}
	refused("Infill is not supported by this model: prefix token is missing. suffix token is missing. middle token is missing. ", "/infill")
	refused("This server does not support reranking. Start it with `--reranking`", "/rerank", "/reranking", "/v1/rerank", "/v1/reranking")
	refused("The current model does not support audio input.", "/audio/transcriptions", "/v1/audio/transcriptions")
	for _, path := range []string{"/responses", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions/control",
		"/chat/completions/input_tokens", "/v1/chat/completions/input_tokens", "/responses/input_tokens", "/v1/responses/input_tokens"} {
		refused("The simulated engine does not support `"+path+"` of llama.cpp.", path)
	}
}

// llamaUnsupported is an error of llama.cpp for what it cannot do as it was
// started.
func llamaUnsupported(message string) *apiError {
	return &apiError{status: http.StatusNotImplemented, kind: "not_supported_error", message: message}
}

// llamaExceeded is the error of a prompt that leaves no room to answer. It says
// how large the two are, in what an apiError has as its parameter.
func llamaExceeded(tokens, context int) *apiError {
	return &apiError{status: http.StatusBadRequest, kind: llamaExceededKind, param: fmt.Sprintf(`,"n_prompt_tokens":%d,"n_ctx":%d`, tokens, context), message: fmt.Sprintf("request (%d tokens) exceeds the available context size (%d tokens), try increasing it", tokens, context)}
}

const llamaExceededKind = "exceed_context_size_error"

// llamaKinds are the types that an error has by its status.
var llamaKinds = map[int]string{
	http.StatusBadRequest:         "invalid_request_error",
	http.StatusUnauthorized:       "authentication_error",
	http.StatusForbidden:          "permission_error",
	http.StatusNotFound:           "not_found_error",
	http.StatusNotImplemented:     "not_supported_error",
	http.StatusServiceUnavailable: "unavailable_error",
}

// appendLlamaError appends a body that says e.
func appendLlamaError(dst []byte, e *apiError) []byte {
	kind, known := llamaKinds[e.status]
	if !known {
		kind = "server_error"
	}
	dst = append(dst, `{"error":{"code":`...)
	dst = strconv.AppendInt(dst, int64(e.status), 10)
	dst = append(dst, `,"message":`...)
	dst = appendString(dst, e.message)
	dst = append(dst, `,"type":"`...)
	if e.kind == llamaExceededKind {
		dst = append(dst, llamaExceededKind+`"`...)
		dst = append(dst, e.param...)
	} else {
		dst = append(append(dst, kind...), '"')
	}
	return append(dst, "}}"...)
}

// llamaType is the type of all but streams and the page of metrics.
const llamaType = "application/json; charset=utf-8"

// llamaModel is the card of the model. Requests may name any: there is only one.
func (s *Server) llamaModel() []byte {
	out := appendString([]byte(`{"id":`), s.cfg.ServedModelName[0])
	out = append(out, `,"aliases":[`...)
	for i, name := range s.cfg.ServedModelName {
		if i > 0 {
			out = append(out, ',')
		}
		out = appendString(out, name)
	}
	return fmt.Appendf(out, `],"tags":[],"object":"model","created":%d,"owned_by":"llamacpp","meta":{"vocab_type":2,"n_vocab":128256,"n_ctx":%d,`+
		`"n_ctx_train":%[2]d,"n_embd":4096,"n_params":8030261312,"size":4912898048,"ftype":"Q4_K - Medium"}}`, s.created(), s.cfg.MaxModelLen)
}

// llamaModels serves GET /v1/models: in the shape of OpenAI's list, and in one
// like that of Ollama's tags.
func (s *Server) llamaModels(w http.ResponseWriter, _ *http.Request) {
	name := appendString(nil, s.cfg.ServedModelName[0])
	out := fmt.Appendf(nil, `{"models":[{"name":%s,"model":%[1]s,"modified_at":"","size":"","digest":"","type":"model","description":"","tags":[""],`+
		`"capabilities":["completion"],"parameters":"","details":{"parent_model":"","format":"gguf","family":"","families":[""],"parameter_size":"",`+
		`"quantization_level":""}}],"object":"list","data":[`, name)
	writeJSON(w, http.StatusOK, append(append(out, s.llamaModel()...), "]}"...))
}

// llamaProps serves GET /props: how the server was started.
func (s *Server) llamaProps(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodPost {
		s.refuse(w, r, llamaUnsupported("This server does not support changing global properties. Start it with `--props`"))
		return
	}
	out := []byte(`{"default_generation_settings":{"params":`)
	out = appendLlamaSettings(out, &llamaDialect{limit: -1}, true)
	out = fmt.Appendf(out, `,"n_ctx":%d},"total_slots":%d,"model_alias":`, s.cfg.MaxModelLen, s.cfg.MaxNumSeqs)
	out = appendString(out, s.cfg.ServedModelName[0])
	out = append(out, `,"model_ftype":"Q4_K - Medium","model_path":`...)
	out = appendString(out, "/models/"+s.cfg.ServedModelName[0]+".gguf")
	out = fmt.Appendf(out, `,"modalities":{"vision":false,"video":false,"audio":false},"media_marker":"<__media__>","endpoint_slots":%v,`+
		`"endpoint_props":false,"endpoint_metrics":%v,"ui":false,"ui_settings":{},"chat_template":"builtin:sim","chat_template_caps":{},`+
		`"bos_token":"","eos_token":"","build_info":"`+llamacppBuild+`","is_sleeping":false,"cors_proxy_enabled":false}`,
		!s.cfg.LlamaCPP.NoSlots, s.cfg.LlamaCPP.Metrics)
	writeJSON(w, http.StatusOK, out)
}
