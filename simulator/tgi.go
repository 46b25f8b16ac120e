package simulator

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"

	follow "github.com/inferrail/inferrail/proxy/prompt"
)

// tgiVersion is the release of Text Generation Inference whose behaviour is
// simulated.
const tgiVersion = "3.3.6"

// tgiFingerprint is what its OpenAI answers carry as system_fingerprint.
const tgiFingerprint = tgiVersion + "-native"

// TGI's limits, as they are unless it is told otherwise.
const (
	tgiConcurrent = 128
	tgiBestOf     = 2
	tgiStops      = 4
	tgiPrompts    = 4
)

func tgiFace() *face {
	return &face{
		parsers: map[string]parser{
			"/":                    parseTGIAs(tgiCompat),
			"/generate":            parseTGIAs(tgiGenerate),
			"/generate_stream":     parseTGIAs(tgiStream),
			"/v1/chat/completions": parseTGIChat,
			"/v1/completions":      parseTGICompletion,
			"/invocations":         parseTGIInvocation,
		},
		mount:       tgiRoutes,
		appendError: func(dst []byte, _ string, e *apiError) []byte { return appendTGIError(dst, e) },
		failure:     http.StatusFailedDependency,

		refusesInStream: true,
		admit: func(x *exchange) (func(), error) {
			n := int64(len(x.choices))
			if x.s.admitted.Add(n) > int64(x.s.cfg.MaxConcurrentRequests) {
				x.s.admitted.Add(-n)
				return nil, &apiError{status: http.StatusTooManyRequests, kind: "overloaded", message: "Model is overloaded"}
			}
			return func() { x.s.admitted.Add(-n) }, nil
		},
		noRoute: func(w http.ResponseWriter, _ *http.Request, allowed []string) {
			if allowed == nil {
				w.WriteHeader(http.StatusNotFound)
			} else {
				w.WriteHeader(http.StatusMethodNotAllowed)
			}
		},
		// It compares keys without regard to case.
		authorized: func(r *http.Request, key string) bool {
			switch {
			case r.Method != http.MethodPost, r.URL.Path == "/chat_tokenize":
				return true
			}
			return strings.EqualFold(r.Header.Get("Authorization"), "Bearer "+key)
		},
		unauthorized: func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) },
	}
}

// tgiRoutes adds TGI's own paths.
func tgiRoutes(s *Server, on route) {
	well := s.healthy(func(http.ResponseWriter, *http.Request) {})
	on("GET", "/", well)
	on("GET", "/health", well)
	on("GET", "/ping", well)
	on("GET", "/metrics", s.telling(s.metricsPage))
	on("POST", "/tokenize", s.infer(s.tgiTokenize))
	on("POST", "/chat_tokenize", s.infer(s.tgiChatTokenize))
	on("GET", "/v1/models", func(w http.ResponseWriter, _ *http.Request) {
		name := appendString(nil, s.cfg.ServedModelName[0])
		writeJSON(w, http.StatusOK, fmt.Appendf(nil, `{"object":"list","data":[{"id":%s,"object":"model","created":0,"owned_by":%s}]}`, name, name))
	})
	on("GET", "/info", s.tgiInfo)
}

// tgiInfo serves GET /info.
func (s *Server) tgiInfo(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, fmt.Appendf(nil, `{"model_id":%s,"model_sha":null,"model_pipeline_tag":"text-generation",`+
		`"max_concurrent_requests":%d,"max_best_of":%d,"max_stop_sequences":%d,"max_input_tokens":%d,"max_total_tokens":%d,`+
		`"validation_workers":2,"max_client_batch_size":%d,"router":"text-generation-router","version":"%s","sha":null,"docker_label":null}`,
		appendString(nil, s.cfg.ServedModelName[0]), s.cfg.MaxConcurrentRequests, tgiBestOf, tgiStops, s.cfg.MaxInputTokens, s.cfg.MaxModelLen,
		tgiPrompts, tgiVersion))
}

// appendTGIError appends the body of an error. The kind is TGI's own, unless a
// fault has made it.
func appendTGIError(dst []byte, e *apiError) []byte {
	kind := e.kind
	if strings.HasSuffix(kind, "Error") || kind == "Bad Request" {
		switch e.status {
		case http.StatusFailedDependency:
			kind = "generation"
		case http.StatusTooManyRequests:
			kind = "overloaded"
		case http.StatusInternalServerError:
			kind = "incomplete_generation"
		case http.StatusServiceUnavailable:
			kind = "healthcheck"
		default:
			kind = "validation"
		}
	}
	dst = appendString(append(dst, `{"error":`...), e.message)
	dst = appendString(append(dst, `,"error_type":`...), kind)
	return append(dst, '}')
}

// tgiRoute is which of TGI's routes answers.
type tgiRoute uint8

const (
	tgiGenerate tgiRoute = iota
	tgiStream
	tgiCompat
	tgiChat
	tgiCompletion
)

// tgiAnswer is the dialect of TGI: what its answers need beside the request.
type tgiAnswer struct {
	route tgiRoute
	// details: the answer tells of each token. logprobs: a chat does.
	details, logprobs bool
	// before stands before the text when the prompt is to be shown too.
	before     string
	characters int
	model      string
	seed       *uint64
}

// tgiParameters are those of the native routes. Temperature, top_k, top_p,
// typical_p, do_sample, repetition_penalty, frequency_penalty and seed are
// checked and else without effect: how a text is drawn does not change that it
// is one, and the model's is drawn from its own seed.
type tgiParameters struct {
	BestOf              *int           `json:"best_of"`
	Temperature         *float64       `json:"temperature"`
	RepetitionPenalty   *float64       `json:"repetition_penalty"`
	FrequencyPenalty    *float64       `json:"frequency_penalty"`
	TopK                *int           `json:"top_k"`
	TopP                *float64       `json:"top_p"`
	TypicalP            *float64       `json:"typical_p"`
	DoSample            bool           `json:"do_sample"`
	MaxNewTokens        *uint32        `json:"max_new_tokens"`
	ReturnFullText      *bool          `json:"return_full_text"`
	Stop                []string       `json:"stop"`
	Truncate            *uint32        `json:"truncate"`
	Watermark           bool           `json:"watermark"`
	Details             bool           `json:"details"`
	DecoderInputDetails bool           `json:"decoder_input_details"`
	Seed                *uint64        `json:"seed"`
	TopNTokens          *uint32        `json:"top_n_tokens"`
	Grammar             jsontext.Value `json:"grammar"`
	AdapterID           *string        `json:"adapter_id"`
}

// readTGI reads a body as serde does: what is no JSON and what has the wrong
// types are told apart, in words and not as JSON.
func readTGI(body []byte, into any) error {
	err := unmarshal(body, into)
	if err == nil {
		return nil
	}
	e := asAPIError(err)
	problem := strings.TrimPrefix(e.message, "1 validation error: ")
	if strings.HasPrefix(problem, "invalid JSON") {
		return &apiError{status: http.StatusBadRequest, message: "Failed to parse the request body as JSON: " + problem, text: true}
	}
	return undeserializable(problem)
}

func undeserializable(problem string) *apiError {
	return &apiError{status: http.StatusUnprocessableEntity, message: "Failed to deserialize the JSON body into the target type: " + problem, text: true}
}

// tgiInvalid is a refusal by TGI's validation.
func tgiInvalid(format string, args ...any) *apiError {
	return &apiError{status: http.StatusUnprocessableEntity, kind: "validation", message: "Input validation error: " + fmt.Sprintf(format, args...)}
}

// parseTGIAs returns the parser of a native route.
func parseTGIAs(route tgiRoute) parser {
	return func(cfg *Config, body []byte) (*request, error) {
		var b struct {
			Inputs     *string        `json:"inputs"`
			Parameters *tgiParameters `json:"parameters"`
			Stream     *bool          `json:"stream"`
			xargs
		}
		if err := readTGI(body, &b); err != nil {
			return nil, err
		}
		if b.Inputs == nil {
			return nil, undeserializable("missing field `inputs`")
		}
		p := b.Parameters
		if p == nil {
			p = &tgiParameters{DoSample: true}
		}
		how := &tgiAnswer{route: route, details: p.Details, model: cfg.ServedModelName[0], characters: utf8.RuneCountInString(*b.Inputs)}
		r := &request{api: completions, n: 1, stream: route == tgiStream || route == tgiCompat && b.Stream != nil && *b.Stream, dialect: how}
		if err := b.xargs.apply(cfg, r); err != nil {
			return nil, err
		}
		if p.ReturnFullText != nil && *p.ReturnFullText {
			how.before = *b.Inputs
		}
		return r.orRefused(p.apply(cfg, r, how, []prompt{textPrompt(*b.Inputs)}))
	}
}

// orRefused returns the request, or what becomes of it when TGI's validation
// refuses it: a stream has begun by then, and says so itself.
func (r *request) orRefused(err error) (*request, error) {
	if err == nil {
		return r, nil
	}
	if e := asAPIError(err); e.kind == "validation" && e.status == http.StatusUnprocessableEntity && r.stream {
		r.prompts, r.refused = nil, e
		return r, nil
	}
	return nil, err
}

// apply checks the parameters and gives r what they ask for, in the order of
// TGI's validation.
func (p *tgiParameters) apply(cfg *Config, r *request, how *tgiAnswer, prompts []prompt) error {
	switch {
	case p.Watermark:
		return badParameter("watermark", "The simulated engine does not support `watermark`.")
	case p.DecoderInputDetails && !r.stream:
		return badParameter("decoder_input_details", "The simulated engine does not support `decoder_input_details`.")
	case p.TopNTokens != nil && *p.TopNTokens > 0:
		return badParameter("top_n_tokens", "The simulated engine does not support `top_n_tokens`.")
	}
	if err := p.sampling(r); err != nil {
		return err
	}
	if len(p.Stop) > tgiStops {
		return tgiInvalid("`stop` supports up to %d stop sequences. Given: %d", tgiStops, len(p.Stop))
	}
	r.stop, r.stopsWhole = slices.DeleteFunc(slices.Clone(p.Stop), func(s string) bool { return s == "" }), true
	if p.Seed != nil {
		how.seed = p.Seed
	} else if p.samples() {
		how.seed = new(mix(cfg.Seed ^ prompts[0].hash))
	}
	if p.AdapterID != nil {
		r.adapter = cfg.adapter(p.AdapterID)
	}
	for i := range prompts {
		if err := p.size(cfg, r, &prompts[i]); err != nil {
			return err
		}
	}
	r.prompts = prompts
	if r.call == nil && r.form == nil {
		form, err := readTGIGrammar(p.Grammar)
		if err != nil {
			return err
		}
		r.form = form
	}
	return nil
}

// samples reports whether tokens are drawn at random.
func (p *tgiParameters) samples() bool {
	return p.DoSample || p.Temperature != nil || p.TopK != nil || p.TopP != nil || p.TypicalP != nil
}

// sampling checks what decides how tokens are drawn.
func (p *tgiParameters) sampling(r *request) error {
	within := func(v *float64) bool { return v == nil || *v > 0 && *v < 1 }
	best := 1
	if p.BestOf != nil {
		best = *p.BestOf
	}
	switch {
	case best != 1 && r.stream:
		return tgiInvalid("`best_of` != 1 is not supported when streaming tokens")
	case p.DecoderInputDetails:
		return tgiInvalid("`decoder_input_details` == true is not supported when streaming tokens")
	case best > tgiBestOf || best < 0:
		return tgiInvalid("`best_of` must be > 0 and <= %d. Given: %d", tgiBestOf, best)
	case best > 1 && !p.samples():
		return tgiInvalid("you must use sampling when `best_of` is > 1")
	case p.Temperature != nil && *p.Temperature <= 0:
		return tgiInvalid("`temperature` must be strictly positive")
	case p.RepetitionPenalty != nil && *p.RepetitionPenalty <= 0:
		return tgiInvalid("`repetition_penalty` must be strictly positive")
	case p.FrequencyPenalty != nil && !(*p.FrequencyPenalty >= -2 && *p.FrequencyPenalty <= 2):
		return tgiInvalid("`frequency_penalty` must be >= -2.0 and <= 2.0")
	case !within(p.TopP):
		return tgiInvalid("`top_p` must be > 0.0 and < 1.0")
	case !within(p.TypicalP):
		return tgiInvalid("`typical_p` must be > 0.0 and < 1.0")
	case p.TopK != nil && *p.TopK <= 0:
		return tgiInvalid("`top_k` must be strictly positive")
	case p.MaxNewTokens != nil && *p.MaxNewTokens == 0:
		return tgiInvalid("`max_new_tokens` must be strictly positive")
	case best > 1 && p.Seed != nil:
		return tgiInvalid("`seed` must not be set when `best_of` > 1")
	}
	r.n = max(1, best)
	return nil
}

// tgiChunk is how many tokens TGI reserves room for at a time.
const tgiChunk = 1024

// size cuts a prompt to what is asked, and decides how many tokens follow it.
func (p *tgiParameters) size(cfg *Config, r *request, of *prompt) error {
	if of.tokens == 0 {
		return tgiInvalid("`inputs` cannot be empty")
	}
	if p.Truncate != nil {
		most := int(*p.Truncate)
		if most == 0 || most > cfg.MaxInputTokens {
			return tgiInvalid("`truncate` must be strictly positive and less than %d. Given: %d", cfg.MaxInputTokens, most)
		}
		if of.tokens > most {
			of.given, of.tokens = of.ids()[of.tokens-most:], most
		}
	}
	left := cfg.MaxModelLen - of.tokens
	r.finish, r.output = "length", left
	if p.MaxNewTokens != nil {
		asked := int(min(*p.MaxNewTokens, math.MaxInt32))
		if reserved := min(asked, tgiChunk); reserved > left {
			return tgiInvalid("`inputs` tokens + `max_new_tokens` must be <= %d. Given: %d `inputs` tokens and %d `max_new_tokens`",
				cfg.MaxModelLen, of.tokens, reserved)
		}
		// What is asked beyond the room is cut.
		r.output = min(asked, left)
	} else if cfg.DefaultOutputTokens <= left && r.call == nil && r.form == nil && len(p.Grammar) == 0 {
		r.output, r.finish = cfg.DefaultOutputTokens, "stop"
	}
	if of.tokens > cfg.MaxInputTokens {
		return tgiInvalid("`inputs` must have less than %d tokens. Given: %d", cfg.MaxInputTokens, of.tokens)
	}
	return nil
}

// readTGIGrammar reads a grammar: {"type":"json","value":…}, nil without one.
func readTGIGrammar(v jsontext.Value) (*form, error) {
	if len(v) == 0 || v.Kind() == 'n' {
		return nil, nil
	}
	var g struct {
		Type  string         `json:"type"`
		Value jsontext.Value `json:"value"`
	}
	if json.Unmarshal(v, &g, lenient) != nil || len(g.Value) == 0 {
		return nil, undeserializable("a grammar must be an object with a type and a value")
	}
	schema := g.Value
	switch g.Type {
	case "json", "json_object":
		if schema.Kind() == '"' {
			var text string
			if json.Unmarshal(schema, &text) != nil || !jsontext.Value(text).IsValid() {
				return nil, tgiInvalid("grammar is not valid: it is not JSON")
			}
			schema = jsontext.Value(text)
		}
	case "json_schema":
		var b struct {
			Schema jsontext.Value `json:"schema"`
		}
		if json.Unmarshal(schema, &b, lenient) != nil || len(b.Schema) == 0 {
			return nil, undeserializable("missing field `schema`")
		}
		schema = b.Schema
	case "regex":
		return nil, badParameter("grammar", "The simulated engine does not support `grammar` of the type regex.")
	default:
		return nil, undeserializable("unknown variant `" + g.Type + "`, expected one of `json`, `json_object`, `regex`, `json_schema`")
	}
	var members map[string]jsontext.Value
	if json.Unmarshal(schema, &members, lenient) != nil {
		return nil, tgiInvalid("grammar is not supported")
	}
	if _, ok := members["properties"]; !ok {
		return nil, tgiInvalid("grammar is not valid: Grammar must have a 'properties' field")
	}
	return newForm("grammar", schema)
}

// tgiSampling returns the native parameters that OpenAI's stand for.
func (b *tgiBody) parameters() *tgiParameters {
	p := &tgiParameters{DoSample: true, Temperature: b.Temperature, TopP: b.TopP, FrequencyPenalty: b.FrequencyPenalty,
		RepetitionPenalty: b.RepetitionPenalty, MaxNewTokens: b.MaxTokens, Seed: b.Seed, Details: true}
	if b.MaxTokens == nil {
		p.MaxNewTokens = b.MaxCompletionTokens
	}
	if b.Temperature != nil && *b.Temperature == 0 {
		p.DoSample, p.Temperature = false, nil
	}
	if b.Stop != nil {
		p.Stop = *b.Stop
	}
	if b.Model != nil && *b.Model != "tgi" {
		p.AdapterID = b.Model
	}
	return p
}

// tgiBody is the body of TGI's OpenAI routes. It has no other members: the
// engine ignores what it does not know, and n and logit_bias, which it knows.
type tgiBody struct {
	Model               *string        `json:"model"`
	Messages            *[]message     `json:"messages"`
	Prompt              jsontext.Value `json:"prompt"`
	FrequencyPenalty    *float64       `json:"frequency_penalty"`
	PresencePenalty     *float64       `json:"presence_penalty"`
	RepetitionPenalty   *float64       `json:"repetition_penalty"`
	Logprobs            *bool          `json:"logprobs"`
	TopLogprobs         *uint32        `json:"top_logprobs"`
	MaxTokens           *uint32        `json:"max_tokens"`
	MaxCompletionTokens *uint32        `json:"max_completion_tokens"`
	Stop                *[]string      `json:"stop"`
	Stream              bool           `json:"stream"`
	Seed                *uint64        `json:"seed"`
	Temperature         *float64       `json:"temperature"`
	TopP                *float64       `json:"top_p"`
	Suffix              *string        `json:"suffix"`
	Tools               jsontext.Value `json:"tools"`
	ToolPrompt          *string        `json:"tool_prompt"`
	ToolChoice          jsontext.Value `json:"tool_choice"`
	ResponseFormat      jsontext.Value `json:"response_format"`
	StreamOptions       *struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
	xargs
}

// parseTGIChat reads the body of POST /v1/chat/completions.
func parseTGIChat(cfg *Config, body []byte) (*request, error) {
	var b tgiBody
	if err := readTGI(body, &b); err != nil {
		return nil, err
	}
	if b.Messages == nil {
		return nil, undeserializable("missing field `messages`")
	}
	for i, m := range *b.Messages {
		if none := func(v jsontext.Value) bool { return len(v) == 0 || v.Kind() == 'n' }; none(m.Content) && none(m.ToolCalls) {
			return nil, undeserializable(fmt.Sprintf("messages[%d]: data did not match any variant of untagged enum MessageBody", i))
		}
	}
	how := &tgiAnswer{route: tgiChat, details: true, logprobs: b.Logprobs != nil && *b.Logprobs, model: cfg.ServedModelName[0]}
	if b.Model != nil && *b.Model != "tgi" {
		how.model = *b.Model
	}
	r := &request{api: chat, n: 1, stream: b.Stream, usage: b.StreamOptions != nil && b.StreamOptions.IncludeUsage, dialect: how}
	if err := b.xargs.apply(cfg, r); err != nil {
		return nil, err
	}
	p := b.parameters()
	if b.TopLogprobs != nil && *b.TopLogprobs > 0 {
		return nil, badParameter("top_logprobs", "The simulated engine does not support `top_logprobs`.")
	}
	if b.PresencePenalty != nil {
		// So the engine makes one of the other.
		p.RepetitionPenalty = new(*b.PresencePenalty + 2)
	}
	text, err := renderChat(&requestBody{Messages: b.Messages, Tools: b.Tools})
	if err != nil {
		return nil, undeserializable(asAPIError(err).message)
	}
	if b.ToolPrompt != nil && *b.ToolPrompt != "" && len(b.Tools) > 0 {
		return nil, badParameter("tool_prompt", "The simulated engine does not support `tool_prompt`.")
	}
	how.characters = utf8.RuneCountInString(text)
	if err := b.tools(r); err != nil {
		return nil, err
	}
	if r.call == nil {
		p.Grammar = b.ResponseFormat
	}
	r, err = r.orRefused(p.apply(cfg, r, how, []prompt{chatPrompt(follow.Chat, body, text)}))
	if err == nil && r.call != nil && r.refused == nil {
		arguments := r.call.pick(newVoice(cfg.Seed, r.prompts[0], 0)).arguments(newVoice(cfg.Seed, r.prompts[0], 0))
		if countTokens(string(arguments)) >= r.output {
			r.defect = &apiError{status: http.StatusUnprocessableEntity, kind: "tool_error",
				message: "Tool error: Failed to parse generated text: EOF while parsing an object"}
		}
	}
	return r, err
}

// tools reads what a chat may call.
func (b *tgiBody) tools(r *request) error {
	wrong := func(problem string) error {
		return &apiError{status: http.StatusUnprocessableEntity, kind: "tool_error", message: "Tool error: " + problem}
	}
	if len(b.Tools) == 0 || b.Tools.Kind() == 'n' {
		return nil
	}
	if len(b.ResponseFormat) > 0 && b.ResponseFormat.Kind() != 'n' {
		return wrong("Grammar and tools are mutually exclusive")
	}
	var list []struct {
		Function *tool `json:"function"`
	}
	if json.Unmarshal(b.Tools, &list, lenient) != nil || slices.ContainsFunc(list, func(t struct {
		Function *tool `json:"function"`
	}) bool {
		return t.Function == nil || t.Function.Name == ""
	}) {
		return undeserializable("tools must be a list of objects with a type and a function that has a name")
	}
	var tools []tool
	for _, t := range list {
		tools = append(tools, *t.Function)
	}
	choice := b.ToolChoice
	if choice.Kind() == '"' {
		var name string
		_ = json.Unmarshal(choice, &name)
		if !slices.Contains([]string{"none", "auto", "required"}, name) {
			choice = append(appendString([]byte(`{"function":{"name":`), name), "}}"...)
		}
	}
	if len(tools) == 0 {
		choice = nil
	}
	m := *b.Messages
	var err error
	if r.call, err = chooseTool(tools, choice, len(m) > 0 && m[len(m)-1].Role == "tool"); err != nil {
		return wrong(asAPIError(err).message)
	}
	return nil
}

// parseTGICompletion reads the body of POST /v1/completions.
func parseTGICompletion(cfg *Config, body []byte) (*request, error) {
	var b tgiBody
	if err := readTGI(body, &b); err != nil {
		return nil, err
	}
	var texts []string
	var one string
	switch {
	case b.Prompt == nil:
		return nil, undeserializable("missing field `prompt`")
	case json.Unmarshal(b.Prompt, &one) == nil:
		texts = []string{one}
	case json.Unmarshal(b.Prompt, &texts) != nil:
		return nil, undeserializable("prompt must be a string or a list of strings")
	case len(texts) == 0:
		return nil, undeserializable("Empty array detected. Do not use an empty array for the prompt.")
	}
	switch {
	case b.Suffix != nil:
		return nil, &apiError{status: http.StatusUnprocessableEntity, kind: "suffix not supported",
			message: "Suffix is not supported and can be achieved by preprocessing the prompt."}
	case len(texts) > tgiPrompts:
		return nil, &apiError{status: http.StatusUnprocessableEntity, kind: "batch size exceeded",
			message: fmt.Sprintf("Number of prompts exceeds the maximum allowed batch size of %d", tgiPrompts)}
	}
	how := &tgiAnswer{route: tgiCompletion, details: true, model: cfg.ServedModelName[0]}
	r := &request{api: completions, n: 1, stream: b.Stream, dialect: how}
	if err := b.xargs.apply(cfg, r); err != nil {
		return nil, err
	}
	var prompts []prompt
	for _, text := range texts {
		how.characters += utf8.RuneCountInString(text)
		prompts = append(prompts, textPrompt(text))
	}
	return r.orRefused(b.parameters().apply(cfg, r, how, prompts))
}

// parseTGIInvocation reads the body of POST /invocations, which is one of the
// other routes' bodies.
func parseTGIInvocation(cfg *Config, body []byte) (*request, error) {
	var b struct {
		Inputs   jsontext.Value `json:"inputs"`
		Messages jsontext.Value `json:"messages"`
		Prompt   jsontext.Value `json:"prompt"`
	}
	if err := readTGI(body, &b); err != nil {
		return nil, err
	}
	switch {
	case b.Inputs != nil:
		return parseTGIAs(tgiCompat)(cfg, body)
	case b.Messages != nil:
		return parseTGIChat(cfg, body)
	case b.Prompt != nil:
		return parseTGICompletion(cfg, body)
	}
	return nil, undeserializable("data did not match any variant of untagged enum SagemakerRequest")
}

// tgiToken is a token of a text and where it stands there, in bytes.
type tgiToken struct {
	ID    int    `json:"id"`
	Text  string `json:"text"`
	Start int    `json:"start"`
	Stop  int    `json:"stop"`
}

// tgiTokens returns the tokens of a prompt. Where they are not those of its text
// they are told without it, as TGI does where it cannot tell.
func (s *Server) tgiTokens(p prompt, x *xargs) []tgiToken {
	how := s.faults.Load().peek().Tokenizer
	if x.Xargs != nil && x.Xargs.Sim != nil {
		how = x.Xargs.Sim.Tokenizer
	}
	s.vocabulary.learn(p.text)
	p.distort(how)
	tokens := []tgiToken{}
	if p.given != nil {
		for _, id := range p.given {
			tokens = append(tokens, tgiToken{ID: id})
		}
		return tokens
	}
	at := 0
	for _, t := range tokensOf(p.text) {
		tokens = append(tokens, tgiToken{tokenID(t), strings.ToValidUTF8(t, "\ufffd"), at, at + len(t)})
		at += len(t)
	}
	return tokens
}

// tgiTokenize reads the body of POST /tokenize, which is answered at once.
func (s *Server) tgiTokenize(cfg *Config, body []byte) (*request, error) {
	var b struct {
		Inputs *string `json:"inputs"`
		xargs
	}
	if err := readTGI(body, &b); err != nil {
		return nil, err
	}
	if b.Inputs == nil {
		return nil, undeserializable("missing field `inputs`")
	}
	r := &request{api: plain, body: appendJSON(nil, s.tgiTokens(textPrompt(*b.Inputs), &b.xargs))}
	return r, b.xargs.apply(cfg, r)
}

// tgiChatTokenize reads the body of POST /chat_tokenize, which is answered at
// once.
func (s *Server) tgiChatTokenize(cfg *Config, body []byte) (*request, error) {
	var b tgiBody
	if err := readTGI(body, &b); err != nil {
		return nil, err
	}
	if b.Messages == nil {
		return nil, undeserializable("missing field `messages`")
	}
	text, err := renderChat(&requestBody{Messages: b.Messages, Tools: b.Tools})
	if err != nil {
		return nil, undeserializable(asAPIError(err).message)
	}
	r := &request{api: plain, body: appendJSON(nil, struct {
		Tokens []tgiToken `json:"tokenize_response"`
		Text   string     `json:"templated_text"`
	}{s.tgiTokens(chatPrompt(follow.Chat, body, text), &b.xargs), text})}
	return r, b.xargs.apply(cfg, r)
}

// head implements dialect.
func (t *tgiAnswer) head(h http.Header, a *answer) {
	set := func(name string, value int) { h.Set(name, strconv.Itoa(value)) }
	h.Set("X-Compute-Type", "gpu+optimized")
	set("X-Compute-Characters", t.characters)
	if a.req.stream {
		h.Set("Content-Type", "text/event-stream")
		h.Set("Cache-Control", "no-cache")
		h.Set("X-Accel-Buffering", "no")
		return
	}
	h.Set("Content-Type", "application/json")
	var total, queue, inference, each, prompt, generated int
	for i := range a.choices {
		c := &a.choices[i]
		n := c.seq.Output
		total += int((a.clock - a.arrived).Milliseconds())
		queue += int((c.began - a.arrived).Milliseconds())
		inference += int((a.clock - c.began).Milliseconds())
		each += int((a.clock - c.began).Milliseconds()) / max(n, 1)
		prompt, generated = prompt+c.tokens, generated+n
		if t.route != tgiCompletion {
			break // the best is the first
		}
	}
	if t.route != tgiCompletion {
		h.Set("X-Compute-Time", strconv.FormatFloat((a.clock-a.arrived).Seconds(), 'g', -1, 64))
	}
	set("X-Total-Time", total)
	set("X-Validation-Time", 0)
	set("X-Queue-Time", queue)
	set("X-Inference-Time", inference)
	set("X-Time-Per-Token", each)
	set("X-Prompt-Tokens", prompt)
	set("X-Generated-Tokens", generated)
}

// appendPart implements dialect.
func (t *tgiAnswer) appendPart(dst []byte, a *answer, m moment, i int) []byte {
	switch m {
	case atToken:
		dst = t.appendToken(dst, a, i)
	case atFailure:
		dst = t.appendFailure(dst, a.failed)
		fallthrough
	case atClosing:
		if t.route == tgiChat || t.route == tgiCompletion {
			dst = append(dst, done...)
		}
	}
	return dst
}

// appendFailure appends the event of an error.
func (t *tgiAnswer) appendFailure(dst []byte, e *apiError) []byte {
	dst = append(dst, "data: "...)
	if t.route == tgiChat || t.route == tgiCompletion {
		dst = appendString(append(dst, `{"error":{"message":`...), e.message)
		dst = append(dst, `,"http_status_code":422}}`...)
	} else {
		dst = appendTGIError(dst, e)
	}
	return append(dst, "\n\n"...)
}

// appendToken appends the events of the next token of choice i.
func (t *tgiAnswer) appendToken(dst []byte, a *answer, i int) []byte {
	c := &a.choices[i]
	k := c.sent
	c.sent++
	last := c.sent == c.seq.Output
	switch t.route {
	case tgiChat:
		return t.appendChatToken(dst, a, c, k, last)
	case tgiCompletion:
		dst = a.appendTGIStart(append(dst, "data: "...), "text_completion")
		if last {
			dst = t.appendModel(dst)
		}
		dst = fmt.Appendf(dst, `,"choices":[{"index":%d,"text":"`, i)
		dst = c.appendEscaped(dst, k)
		dst = append(dst, `","logprobs":null,"finish_reason":"`...)
		if !last {
			dst = append(dst, `"}]`...)
			dst = t.appendModel(dst)
			return append(dst, "}\n\n"...)
		}
		dst = append(dst, c.tgiReason(false)...)
		dst = append(dst, `"}],"usage":`...)
		return append(appendTGIUsage(dst, c.tokens, c.sent), "}\n\n"...)
	}
	dst = append(dst, `data: {"index":`...)
	dst = strconv.AppendInt(dst, int64(c.sent), 10)
	dst = c.appendTGIToken(append(dst, `,"token":`...), k)
	if !last {
		return append(dst, ",\"generated_text\":null,\"details\":null}\n\n"...)
	}
	dst = appendString(append(dst, `,"generated_text":`...), t.before+c.text())
	dst = append(dst, `,"details":`...)
	if !t.details {
		return append(dst, "null}\n\n"...)
	}
	dst = append(dst, `{"finish_reason":"`...)
	dst = append(dst, c.tgiReason(false)...)
	dst = append(dst, `","generated_tokens":`...)
	dst = strconv.AppendInt(dst, int64(c.sent), 10)
	dst = t.appendSeed(dst)
	return fmt.Appendf(dst, ",\"input_length\":%d}}\n\n", c.tokens)
}

// appendChatToken appends the events of token k of a chat. What is called is
// told with the first piece of the arguments.
func (t *tgiAnswer) appendChatToken(dst []byte, a *answer, c *choice, k int, last bool) []byte {
	if c.call == nil || k > 0 || last {
		dst = a.appendTGIStart(append(dst, "data: "...), "chat.completion.chunk")
		dst = t.appendModel(dst)
		dst = append(dst, `,"choices":[{"index":0,"delta":{"role":"assistant",`...)
		if c.call == nil {
			dst = append(dst, `"content":"`...)
			dst = c.appendEscaped(dst, k)
			dst = append(dst, `"}`...)
		} else {
			dst = append(dst, `"tool_calls":[{"index":0,"id":"0","type":"function","function":{"name":`...)
			if k <= 1 {
				dst = appendString(dst, c.call.Name)
			} else {
				dst = append(dst, "null"...)
			}
			dst = append(dst, `,"arguments":"`...)
			dst = c.appendEscaped(dst, k)
			dst = append(dst, `"}}]}`...)
		}
		dst = append(dst, `,"logprobs":`...)
		dst = t.appendLogprobs(dst, c, k, k+1)
		dst = append(dst, `,"finish_reason":`...)
		if last {
			dst = append(append(append(dst, '"'), c.tgiReason(true)...), '"')
		} else {
			dst = append(dst, "null"...)
		}
		dst = append(dst, "}],\"usage\":null}\n\n"...)
	}
	if last && a.req.usage {
		dst = a.appendTGIStart(append(dst, "data: "...), "chat.completion.chunk")
		dst = t.appendModel(dst)
		dst = append(dst, `,"choices":[],"usage":`...)
		dst = append(appendTGIUsage(dst, c.tokens, c.sent), "}\n\n"...)
	}
	return dst
}

// appendWhole implements dialect.
func (t *tgiAnswer) appendWhole(dst []byte, a *answer, pad int) []byte {
	text := func(c *choice, pad int) string { return t.before + c.text() + string(appendX(nil, pad)) }
	switch t.route {
	case tgiChat:
		return t.appendChat(dst, a, pad)
	case tgiCompletion:
		dst = a.appendTGIStart(dst, "text_completion")
		dst = append(t.appendModel(dst), `,"choices":[`...)
		prompt, output := 0, 0
		for i := range a.choices {
			c := &a.choices[i]
			if i > 0 {
				dst = append(dst, ',')
			}
			dst = appendString(fmt.Appendf(dst, `{"index":%d,"text":`, i), text(c, pad))
			dst = fmt.Appendf(dst, `,"logprobs":null,"finish_reason":"%s"}`, c.tgiReason(true))
			prompt, output, pad = prompt+c.tokens, output+c.seq.Output, 0
		}
		return append(appendTGIUsage(append(dst, `],"usage":`...), prompt, output), '}')
	}
	if t.route == tgiCompat {
		dst = append(dst, '[')
	}
	dst = appendString(append(dst, `{"generated_text":`...), text(&a.choices[0], pad))
	if t.details {
		dst = append(dst, `,"details":{`...)
		dst = t.appendDetails(dst, &a.choices[0])
		if len(a.choices) > 1 {
			dst = append(dst, `,"best_of_sequences":[`...)
			for i := range a.choices[1:] {
				c := &a.choices[1+i]
				if i > 0 {
					dst = append(dst, ',')
				}
				dst = appendString(append(dst, `{"generated_text":`...), text(c, 0))
				dst = append(t.appendDetails(append(dst, ','), c), '}')
			}
			dst = append(dst, ']')
		}
		dst = append(dst, '}')
	}
	dst = append(dst, '}')
	if t.route == tgiCompat {
		dst = append(dst, ']')
	}
	return dst
}

// appendChat appends the body of a chat.
func (t *tgiAnswer) appendChat(dst []byte, a *answer, pad int) []byte {
	c := &a.choices[0]
	dst = a.appendTGIStart(dst, "chat.completion")
	dst = append(t.appendModel(dst), `,"choices":[{"index":0,"message":{"role":"assistant",`...)
	if c.call == nil {
		dst = appendString(append(dst, `"content":`...), c.text()+string(appendX(nil, pad)))
	} else {
		dst = appendString(append(dst, `"tool_calls":[{"id":"0","type":"function","function":{"description":null,"name":`...), c.call.Name)
		dst = appendString(append(dst, `,"arguments":`...), c.text())
		dst = append(dst, `}}]`...)
	}
	dst = t.appendLogprobs(append(dst, `},"logprobs":`...), c, 0, c.seq.Output)
	dst = fmt.Appendf(dst, `,"finish_reason":"%s"}],"usage":`, c.tgiReason(true))
	return append(appendTGIUsage(dst, c.tokens, c.seq.Output), '}')
}

// appendDetails appends the members that tell of all tokens of a choice.
func (t *tgiAnswer) appendDetails(dst []byte, c *choice) []byte {
	dst = fmt.Appendf(dst, `"finish_reason":"%s","generated_tokens":%d`, c.tgiReason(false), c.seq.Output)
	dst = append(t.appendSeed(dst), `,"prefill":[],"tokens":[`...)
	for k := range c.seq.Output {
		if k > 0 {
			dst = append(dst, ',')
		}
		dst = c.appendTGIToken(dst, k)
	}
	return append(dst, ']')
}

// appendLogprobs appends how likely the tokens from one to before another are,
// or null when that was not asked.
func (t *tgiAnswer) appendLogprobs(dst []byte, c *choice, from, to int) []byte {
	if !t.logprobs {
		return append(dst, "null"...)
	}
	dst = append(dst, `{"content":[`...)
	for k := from; k < to; k++ {
		if k > from {
			dst = append(dst, ',')
		}
		dst = append(dst, `{"token":"`...)
		dst = c.appendEscaped(dst, k)
		dst = c.appendLogprob(append(dst, `","logprob":`...))
		dst = append(dst, `,"top_logprobs":[]}`...)
	}
	return append(dst, "]}"...)
}

func (t *tgiAnswer) appendSeed(dst []byte) []byte {
	dst = append(dst, `,"seed":`...)
	if t.seed == nil {
		return append(dst, "null"...)
	}
	return strconv.AppendUint(dst, *t.seed, 10)
}

func (t *tgiAnswer) appendModel(dst []byte) []byte {
	dst = appendString(append(dst, `,"model":`...), t.model)
	return append(dst, `,"system_fingerprint":"`+tgiFingerprint+`"`...)
}

// appendTGIStart appends what begins an OpenAI object.
func (a *answer) appendTGIStart(dst []byte, object string) []byte {
	dst = append(append(append(dst, `{"object":"`...), object...), `","id":"","created":`...)
	return strconv.AppendInt(dst, a.created, 10)
}

func appendTGIUsage(dst []byte, prompt, output int) []byte {
	return fmt.Appendf(dst, `{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}`, prompt, output, prompt+output)
}

// appendTGIToken appends token k as an object.
func (c *choice) appendTGIToken(dst []byte, k int) []byte {
	dst = c.appendID(append(dst, `{"id":`...), k)
	dst = append(dst, `,"text":"`...)
	dst = c.appendEscaped(dst, k)
	dst = c.appendLogprob(append(dst, `","logprob":`...))
	return append(dst, `,"special":false}`...)
}

// appendLogprob appends the logarithm of how likely a token is: the voice draws
// its words evenly, and what must be said is certain.
func (c *choice) appendLogprob(dst []byte) []byte {
	if c.script != nil {
		return append(dst, "0.0"...)
	}
	return strconv.AppendFloat(dst, -math.Log(float64(len(words))), 'f', -1, 32)
}

// tgiReason is why the choice ended, in OpenAI's words or TGI's.
func (c *choice) tgiReason(openAI bool) string {
	switch {
	case c.finish == "length":
		return "length"
	case c.stopped != "":
		return "stop_sequence"
	case openAI:
		return "stop"
	}
	return "eos_token"
}

// tgi makes TGI's series. Its exporter knows a family from its first value on:
// before the first request there are none.
func (m *metrics) tgi(r *rank) *rankMetrics {
	cfg := &m.p.s.cfg
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "tgi_" + name, Help: help}, labels)
		m.registry.MustRegister(c)
		return c
	}
	histogram := func(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
		h := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "tgi_" + name, Help: help, Buckets: buckets}, labels)
		m.registry.MustRegister(h)
		return h
	}
	times := prometheus.ExponentialBuckets(0.00015, 1.5, 35)
	part := func(of int) (buckets []float64) {
		for i := range 100 {
			buckets = append(buckets, float64(of)/100*float64(i+1))
		}
		return buckets
	}
	count := counter("request_count", "Total number of requests")
	success := counter("request_success", "Number of successful requests")
	failed := counter("request_failure", "Number of failed requests", "err")
	batches := counter("batch_inference_count", "Inference calls per method (prefill or decode)", "method")
	batched := counter("batch_inference_success", "Number of successful inference calls per method (prefill or decode)", "method")
	total := histogram("request_duration", "Total time spent processing the request", times)
	validation := histogram("request_validation_duration", "Time spent validating the request", times)
	queue := histogram("request_queue_duration", "Time spent in the queue per request", times)
	inference := histogram("request_inference_duration", "Request inference duration", times)
	perToken := histogram("request_mean_time_per_token_duration", "Mean time per token per request", times)
	length := histogram("request_input_length", "Input token length per request", part(cfg.MaxInputTokens))
	asked := histogram("request_max_new_tokens", "Maximum new tokens per request", part(cfg.MaxModelLen))
	generated := histogram("request_generated_tokens", "Generated tokens per request", part(cfg.MaxModelLen))

	rm := &rankMetrics{hidden: new(atomic.Bool)}
	rm.counters("tgi_", nil) // no part of the page
	rm.hidden.Store(true)
	gauge := func(name, help string, of func(*Engine, Load) float64) {
		rm.value("tgi_"+name, help, nil, prometheus.GaugeValue, of)
	}
	gauge("queue_size", "Current queue size", func(_ *Engine, l Load) float64 { return float64(l.Waiting) })
	gauge("batch_current_size", "Current batch size", func(_ *Engine, l Load) float64 { return float64(l.Running) })
	gauge("batch_current_max_tokens", "Maximum tokens for the current batch", func(e *Engine, _ Load) float64 {
		used, _ := e.Usage()
		return float64(used * cfg.BlockSize)
	})
	rm.taken = func(a *answer) {
		n := len(a.choices)
		if n == 0 {
			return // a text is cut into tokens
		}
		rm.hidden.Store(false)
		if t, ok := a.req.dialect.(*tgiAnswer); ok && t.route >= tgiChat {
			n++ // the route counts, and what generates for it does
		}
		count.WithLabelValues().Add(float64(n))
		for i := range a.choices {
			length.WithLabelValues().Observe(float64(a.choices[i].tokens))
			asked.WithLabelValues().Observe(float64(min(a.req.output, tgiChunk)))
		}
	}
	rm.done = func(x *exchange, c *choice, complete bool) {
		now, seq := x.s.now(), &c.seq
		if !complete {
			if x.reason == "error" {
				failed.WithLabelValues("generation").Inc()
			}
			return
		}
		success.WithLabelValues().Inc()
		seconds := func(h *prometheus.HistogramVec, d time.Duration) { h.WithLabelValues().Observe(d.Seconds()) }
		seconds(total, now-x.arrived)
		seconds(validation, 0)
		seconds(queue, seq.Start-x.arrived)
		seconds(inference, now-seq.Start)
		seconds(perToken, (now-seq.Start)/time.Duration(seq.Output))
		generated.WithLabelValues().Observe(float64(seq.Output))
		for _, of := range []*prometheus.CounterVec{batches, batched} {
			of.WithLabelValues("prefill").Inc()
			of.WithLabelValues("decode").Add(float64(seq.Output - 1))
		}
	}
	rm.refused = func(e *apiError) {
		if e.text || e.status == http.StatusFailedDependency {
			return // it never came so far, or is over and was counted
		}
		rm.hidden.Store(false)
		count.WithLabelValues().Inc()
		kind := "validation"
		if e.status == http.StatusTooManyRequests {
			kind = "overloaded"
		}
		failed.WithLabelValues(kind).Inc()
	}
	return rm
}
