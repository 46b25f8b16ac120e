package simulator

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

func vllmFace() *face {
	return uvicorn(&face{parsers: openAIParsers(), mount: vllmRoutes, appendError: appendVLLMError, admit: admitVLLM})
}

// admitVLLM refuses a request where there are too many already.
func admitVLLM(x *exchange) (func(), error) {
	n, most := int64(len(x.choices)), int64(x.s.cfg.MaxNumQueuedReqs)
	if x.s.admitted.Add(n) > most && most > 0 {
		x.s.admitted.Add(-n)
		return nil, &apiError{status: http.StatusServiceUnavailable, kind: "Service Unavailable",
			message: "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."}
	}
	return func() { x.s.admitted.Add(-n) }, nil
}

// versioned reports whether a path is one that asks for the key.
func versioned(path string) bool {
	return strings.HasPrefix(path, "/v1/") || strings.HasPrefix(path, "/v2/")
}

// appendVLLMError appends an error in the shape of the API that the path is of.
func appendVLLMError(dst []byte, path string, e *apiError) []byte {
	a := plain
	if strings.HasPrefix(path, "/v1/messages") {
		a = messages
	}
	return a.appendError(dst, e)
}

// openAIParsers are the paths of inference that vLLM and SGLang have.
func openAIParsers() map[string]parser {
	return map[string]parser{
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
}

// parseAs returns the parser of one of several routes that are read alike.
func parseAs(a api, parse func(*Config, api, []byte) (*request, error)) parser {
	return func(cfg *Config, body []byte) (*request, error) { return parse(cfg, a, body) }
}

// vllmRoutes adds vLLM's own paths.
func vllmRoutes(s *Server, on route) {
	sharedRoutes(s, on)
	on("POST", "/v1/chat/completions/render", s.render(chat))
	on("POST", "/v1/completions/render", s.render(completions))
	on("GET", "/version", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, []byte(`{"version":"`+version+`"}`))
	})
	on("GET", "/load", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, fmt.Appendf(nil, `{"server_load":%d}`, s.Running()))
	})
	on("GET", "/server_info", s.info)
	on("GET", "/kv_event_sources", s.eventSources)
	on("POST", "/reset_prefix_cache", s.resetCache)
}

// sharedRoutes adds what vLLM and SGLang both have.
func sharedRoutes(s *Server, on route) {
	on("POST", "/tokenize", s.infer(s.tokenize))
	on("POST", "/detokenize", s.infer(s.detokenize))
	on("POST", "/v1/audio/transcriptions", s.speech(transcription))
	on("POST", "/v1/audio/translations", s.speech(translation))
	on("GET", "/v1/responses/{id}", getResponse)
	on("POST", "/v1/responses/{id}/cancel", getResponse)
	on("GET", "/v1/models", s.models)
	on("GET", "/health", s.healthy(func(http.ResponseWriter, *http.Request) {}))
	on("GET", "/ping", s.healthy(func(http.ResponseWriter, *http.Request) {}), "POST")
	on("GET", "/metrics", s.telling(s.metricsPage))
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
		writeError(w, &apiError{status: http.StatusBadRequest, kind: "Bad Request", param: "query.config_format", message: "1 validation error: config_format must be text or json"})
		return
	}
	writeJSON(w, http.StatusOK, appendJSON(nil, struct {
		Config any            `json:"vllm_config"`
		Env    map[string]any `json:"vllm_env"`
		System map[string]any `json:"system_env"`
	}{Config: shown}))
}
