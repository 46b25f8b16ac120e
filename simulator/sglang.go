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
)

func sglangFace() *face {
	parsers := openAIParsers()
	parsers["/generate"] = parseGenerate
	return uvicorn(&face{parsers: parsers, mount: sglangRoutes, appendError: appendSGLangError})
}

// sglangRoutes adds SGLang's own paths.
func sglangRoutes(s *Server, on route) {
	sharedRoutes(s, on)
	fine := s.healthy(func(http.ResponseWriter, *http.Request) {})
	on("GET", "/health_generate", fine)
	on("POST", "/v1/tokenize", s.infer(s.tokenize))
	on("POST", "/v1/detokenize", s.infer(s.detokenize))
	on("GET", "/server_info", s.serverInfo)
	on("GET", "/get_server_info", s.serverInfo)
	on("GET", "/model_info", s.modelInfo)
	on("GET", "/get_model_info", s.modelInfo)
	on("GET", "/v1/loads", s.telling(s.loads))
	on("GET", "/get_load", s.telling(s.oldLoads))
	on("POST", "/flush_cache", s.flushCache, "GET")
	on("POST", "/abort_request", s.abortRequest)
	on("PUT", "/generate", s.infer(parseGenerate))
}

// appendSGLangError appends an error: that of the native route has its message
// only, and of the OpenAI routes only responses has an object of its own.
func appendSGLangError(dst []byte, path string, e *apiError) []byte {
	switch {
	case path == "/generate":
		dst = appendString(append(dst, `{"error":{"message":`...), e.message)
		return append(dst, "}}"...)
	case strings.HasPrefix(path, "/v1/responses"), strings.HasPrefix(path, "/v1/messages"):
		return appendVLLMError(dst, path, e)
	}
	dst = appendString(append(dst, `{"object":"error","message":`...), e.message)
	dst = appendString(append(dst, `,"type":`...), e.kind)
	dst = append(dst, `,"param":`...)
	if e.param == "" {
		dst = append(dst, "null"...)
	} else {
		dst = appendString(dst, e.param)
	}
	return fmt.Appendf(dst, `,"code":%d}`, e.status)
}

// modelInfo serves GET /get_model_info.
func (s *Server) modelInfo(w http.ResponseWriter, _ *http.Request) {
	name := appendString(nil, s.cfg.ServedModelName[0])
	writeJSON(w, http.StatusOK, fmt.Appendf(nil, `{"model_path":%s,"tokenizer_path":%s,"is_generation":true,`+
		`"preferred_sampling_params":null,"weight_version":"default","has_image_understanding":false,"has_audio_understanding":false}`, name, name))
}

// oldLoads serves GET /get_load, which went before /v1/loads.
func (s *Server) oldLoads(w http.ResponseWriter, _ *http.Request) {
	type load struct {
		Rank    int `json:"dp_rank"`
		All     int `json:"num_reqs"`
		Waiting int `json:"num_waiting_reqs"`
		Tokens  int `json:"num_tokens"`
	}
	loads := []load{}
	for i, r := range s.Stats().Ranks {
		loads = append(loads, load{i, r.Running + r.Waiting, r.Waiting, r.Tokens + r.WaitingTokens})
	}
	writeJSON(w, http.StatusOK, appendJSON(nil, loads))
}

// abortRequest serves POST /abort_request: the requests whose id begins with rid,
// or all of them, end with what they have.
func (s *Server) abortRequest(w http.ResponseWriter, r *http.Request) {
	body, err := readBody(w, r)
	var b struct {
		ID  string `json:"rid"`
		All bool   `json:"abort_all"`
	}
	if err == nil {
		err = unmarshal(body, &b)
	}
	if err != nil {
		s.refuse(w, r, err)
		return
	}
	s.exchanges.Range(func(x, _ any) bool {
		if x := x.(*exchange); b.All || b.ID != "" && strings.HasPrefix(x.req.rid, b.ID) {
			x.abort()
		}
		return true
	})
}

// generateBody is the body of POST /generate. Members that decide how tokens are
// drawn are checked and else without effect, as is what only tells the engine
// how to do its work.
type generateBody struct {
	Text      jsontext.Value  `json:"text"`
	IDs       jsontext.Value  `json:"input_ids"`
	Sampling  *samplingBody   `json:"sampling_params"`
	RID       jsontext.Value  `json:"rid"`
	Stream    *bool           `json:"stream"`
	LoRA      *string         `json:"lora_path"`
	ExtraKey  *string         `json:"extra_key"`
	Logprob   *bool           `json:"return_logprob"`
	Hidden    *bool           `json:"return_hidden_states"`
	Image     jsontext.Value  `json:"image_data"`
	Audio     jsontext.Value  `json:"audio_data"`
	Video     jsontext.Value  `json:"video_data"`
	Embeds    jsontext.Value  `json:"input_embeds"`
	Session   jsontext.Value  `json:"session_params"`
	Processor *jsontext.Value `json:"custom_logit_processor"`
	xargs
}

type samplingBody struct {
	MaxNewTokens *int           `json:"max_new_tokens"`
	MinNewTokens *int           `json:"min_new_tokens"`
	N            *int           `json:"n"`
	Stop         jsontext.Value `json:"stop"`
	NoStopTrim   *bool          `json:"no_stop_trim"`
	Temperature  *float64       `json:"temperature"`
	TopP         *float64       `json:"top_p"`
	TopK         *int           `json:"top_k"`
	MinP         *float64       `json:"min_p"`
	Frequency    *float64       `json:"frequency_penalty"`
	Presence     *float64       `json:"presence_penalty"`
	Repetition   *float64       `json:"repetition_penalty"`
	JSONSchema   *string        `json:"json_schema"`
	IgnoreEOS    *bool          `json:"ignore_eos"`
	Others       others         `json:",embed"`
}

// samplingKnown are the members of sampling_params that change nothing here.
var samplingKnown = []string{"skip_special_tokens", "spaces_between_special_tokens", "sampling_seed", "stream_interval", "custom_params"}

// generated is the dialect of /generate.
type generated struct {
	// many: there are several prompts or choices, and the answer is a list.
	many bool
	said [][]byte // of each choice, escaped, in a stream
	ids  [][]byte
}

// parseGenerate reads the body of POST /generate.
func parseGenerate(cfg *Config, body []byte) (*request, error) {
	var b generateBody
	if err := unmarshal(body, &b); err != nil {
		return nil, err
	}
	how := &generated{}
	r := &request{api: completions, n: 1, dialect: how, stream: b.Stream != nil && *b.Stream}
	if err := b.xargs.apply(cfg, r); err != nil {
		return nil, err
	}
	has := func(v jsontext.Value) bool { return len(v) > 0 && v.Kind() != 'n' }
	for name, there := range map[string]bool{"return_logprob": b.Logprob != nil && *b.Logprob, "return_hidden_states": b.Hidden != nil && *b.Hidden,
		"image_data": has(b.Image), "audio_data": has(b.Audio), "video_data": has(b.Video), "input_embeds": has(b.Embeds),
		"session_params": has(b.Session), "custom_logit_processor": b.Processor != nil} {
		if there {
			return nil, badParameter(name, "The simulated engine does not support `%s`.", name)
		}
	}
	if has(b.RID) {
		if json.Unmarshal(b.RID, &r.rid) != nil {
			return nil, badParameter("rid", "The simulated engine does not support a list as `rid`.")
		}
	}
	r.salt = b.ExtraKey
	if b.LoRA != nil {
		if r.adapter = cfg.adapter(b.LoRA); r.adapter == "" && *b.LoRA != "" {
			return nil, badParameter("lora_path", "The following requested LoRA adapters are not loaded: {'%s'}", *b.LoRA)
		}
	}
	var err error
	switch {
	case has(b.Text) == has(b.IDs):
		return nil, badParameter("", "Either text, input_ids or input_embeds should be provided.")
	case has(b.Text):
		r.prompts, err = readPrompts("text", b.Text)
		how.many = b.Text.Kind() == '['
	default:
		r.prompts, err = readPrompts("input_ids", b.IDs)
		how.many = strings.HasPrefix(strings.Join(strings.Fields(string(b.IDs)), ""), "[[")
	}
	if err != nil {
		return nil, err
	}
	p := b.Sampling
	if p == nil {
		p = &samplingBody{}
	}
	if err := p.apply(cfg, r); err != nil {
		if e := asAPIError(err); r.stream && e.kind == "ValueError" {
			r.prompts, r.refused = nil, e
			return r, nil
		}
		return nil, err
	}
	how.many = how.many || r.n > 1
	how.said, how.ids = make([][]byte, len(r.prompts)*r.n), make([][]byte, len(r.prompts)*r.n)
	return r, nil
}

// valueError is a refusal by SGLang itself. Of a stream it is told there.
func valueError(format string, args ...any) *apiError {
	return &apiError{status: http.StatusBadRequest, kind: "ValueError", message: fmt.Sprintf(format, args...)}
}

// apply checks the parameters and gives r what they ask for.
func (p *samplingBody) apply(cfg *Config, r *request) error {
	for _, name := range slices.Sorted(mapKeys(p.Others)) {
		if slices.Contains(samplingKnown, name) {
			continue
		}
		known := []string{"regex", "ebnf", "structural_tag", "stop_token_ids", "stop_regex", "logit_bias"}
		if !slices.Contains(known, name) {
			return valueError("Unexpected keyword argument '%s'", name)
		}
		if err := p.Others.refuse(name); err != nil {
			return err
		}
	}
	within := func(v *float64, from, to float64) bool { return v == nil || *v >= from && *v <= to }
	switch {
	case !within(p.Temperature, 0, math.MaxFloat64):
		return valueError("temperature must be a non-negative finite number, got %v.", *p.Temperature)
	case !within(p.TopP, math.SmallestNonzeroFloat64, 1):
		return valueError("top_p must be in (0, 1], got %v.", *p.TopP)
	case !within(p.MinP, 0, 1):
		return valueError("min_p must be in [0, 1], got %v.", *p.MinP)
	case p.TopK != nil && *p.TopK < 1 && *p.TopK != -1:
		return valueError("top_k must be -1 (disable) or at least 1, got %d.", *p.TopK)
	case !within(p.Frequency, -2, 2):
		return valueError("frequency_penalty must be in [-2, 2], got %v.", *p.Frequency)
	case !within(p.Presence, -2, 2):
		return valueError("presence_penalty must be in [-2, 2], got %v.", *p.Presence)
	case !within(p.Repetition, math.SmallestNonzeroFloat64, 2):
		return valueError("repetition_penalty must be in (0, 2] (1.0 = no penalty), got %v.", *p.Repetition)
	}
	if p.N != nil {
		r.n = *p.N
	}
	if r.n < 1 || r.n > maxChoices/len(r.prompts) {
		return valueError("n times the number of prompts must be between 1 and %d, got %d times %d.", maxChoices, r.n, len(r.prompts))
	}
	var err error
	if r.stop, err = readStop("stop", p.Stop); err != nil {
		return err
	}
	if p.NoStopTrim != nil && *p.NoStopTrim && len(r.stop) > 0 {
		return badParameter("no_stop_trim", "The simulated engine does not support `no_stop_trim`.")
	}
	if p.JSONSchema != nil {
		if !jsontext.Value(*p.JSONSchema).IsValid() {
			return valueError("json_schema is not JSON")
		}
		if r.form, err = newForm("json_schema", jsontext.Value(*p.JSONSchema)); err != nil {
			return err
		}
	}
	longest := 0
	for i := range r.prompts {
		longest = max(longest, r.prompts[i].tokens)
	}
	if longest >= cfg.MaxModelLen {
		return valueError("The input (%d tokens) is longer than the model's context length (%d tokens).", longest, cfg.MaxModelLen)
	}
	// Without a limit it is 128 tokens, or as many as there is room for.
	left := cfg.MaxModelLen - longest
	r.finish, r.output = "length", min(128, left)
	if p.MaxNewTokens != nil {
		r.output = *p.MaxNewTokens
	}
	least := 0
	if p.MinNewTokens != nil {
		least = *p.MinNewTokens
	}
	switch {
	case r.output < 0:
		return valueError("max_new_tokens must be at least 0, got %d.", r.output)
	case r.output == 0:
		return badParameter("max_new_tokens", "The simulated engine generates at least one token, `max_new_tokens` 0 is not supported.")
	case least < 0 || least > r.output:
		return valueError("min_new_tokens must be in [0, max_new_tokens(%d)], got %d.", r.output, least)
	case r.output > left:
		return valueError("Requested token count exceeds the model's maximum context length of %d tokens. You requested a total of %d tokens: "+
			"%d tokens from the input messages and %d tokens for the completion. Please reduce the number of tokens in the input messages or the completion to fit within the limit.",
			cfg.MaxModelLen, longest+r.output, longest, r.output)
	}
	return nil
}

// mapKeys returns the names of the members.
func mapKeys(o others) func(func(string) bool) {
	return func(yield func(string) bool) {
		for name := range o {
			if !yield(name) {
				return
			}
		}
	}
}

// head implements dialect.
func (g *generated) head(h http.Header, a *answer) {
	if a.req.stream {
		h.Set("Content-Type", "text/event-stream; charset=utf-8")
	} else {
		h.Set("Content-Type", "application/json")
	}
}

// appendPart implements dialect. Each event has all that was said so far.
func (g *generated) appendPart(dst []byte, a *answer, m moment, i int) []byte {
	switch m {
	case atToken:
		c := &a.choices[i]
		if c.sent > 0 {
			g.ids[i] = append(g.ids[i], ',')
		}
		g.said[i] = c.appendEscaped(g.said[i], c.sent)
		g.ids[i] = c.appendID(g.ids[i], c.sent)
		c.sent++
		dst = g.appendObject(append(dst, "data: "...), a, i)
		dst = append(dst, "\n\n"...)
	case atFailure:
		if a.aborted {
			for i := range a.choices {
				dst = append(g.appendObject(append(dst, "data: "...), a, i), "\n\n"...)
			}
		} else {
			dst = appendSGLangError(append(dst, "data: "...), "/generate", a.failed)
			dst = append(dst, "\n\n"...)
		}
		dst = append(dst, done...)
	case atClosing:
		dst = append(dst, done...)
	}
	return dst
}

// appendWhole implements dialect.
func (g *generated) appendWhole(dst []byte, a *answer, pad int) []byte {
	if g.many {
		dst = append(dst, '[')
	}
	for i := range a.choices {
		c := &a.choices[i]
		if i > 0 {
			dst = append(dst, ',')
		}
		g.said[i], g.ids[i] = g.said[i][:0], g.ids[i][:0]
		n := c.seq.Output
		if a.aborted {
			n = c.made
		}
		for k := range n {
			if k > 0 {
				g.ids[i] = append(g.ids[i], ',')
			}
			g.said[i] = c.appendEscaped(g.said[i], k)
			g.ids[i] = c.appendID(g.ids[i], k)
		}
		c.sent = n
		g.said[i] = appendX(g.said[i], pad)
		dst, pad = g.appendObject(dst, a, i), 0
	}
	if g.many {
		dst = append(dst, ']')
	}
	return dst
}

// appendObject appends what there is of choice i.
func (g *generated) appendObject(dst []byte, a *answer, i int) []byte {
	c := &a.choices[i]
	dst = append(append(append(dst, `{"text":"`...), g.said[i]...), `","output_ids":[`...)
	dst = append(append(dst, g.ids[i]...), `],"meta_info":{"id":`...)
	if g.many {
		dst = appendString(dst, a.id+"_"+strconv.Itoa(i))
	} else {
		dst = appendString(dst, a.id)
	}
	dst = append(dst, `,"finish_reason":`...)
	whole := c.sent == c.seq.Output
	switch {
	case a.aborted && !whole:
		dst = append(dst, `{"type":"abort","message":"Abort before prefill or during decode","status_code":null,"err_type":null}`...)
	case !whole:
		dst = append(dst, "null"...)
	case c.finish == "length":
		dst = append(strconv.AppendInt(append(dst, `{"type":"length","length":`...), int64(c.sent), 10), '}')
	case c.stopped != "":
		dst = append(appendString(append(dst, `{"type":"stop","matched":`...), c.stopped), '}')
	default:
		dst = append(c.appendID(append(dst, `{"type":"stop","matched":`...), c.sent-1), '}')
	}
	dst = strconv.AppendInt(append(dst, `,"prompt_tokens":`...), int64(c.tokens), 10)
	dst = append(dst, `,"weight_version":"default","total_retractions":0,"completion_tokens":`...)
	dst = strconv.AppendInt(dst, int64(c.sent), 10)
	dst = strconv.AppendInt(append(dst, `,"cached_tokens":`...), int64(c.cached), 10)
	if whole || a.aborted {
		dst = append(dst, `,"e2e_latency":`...)
		dst = strconv.AppendFloat(dst, (a.clock - a.arrived).Seconds(), 'f', -1, 64)
	}
	dst = append(dst, '}')
	if g.many && a.req.stream {
		dst = strconv.AppendInt(append(dst, `,"index":`...), int64(i), 10)
	}
	return append(dst, '}')
}

// appendID appends the number of token k.
func (c *choice) appendID(dst []byte, k int) []byte {
	id := uint32(0)
	if c.script == nil || c.stopped != "" {
		id = c.voice.word(k).id
	} else if c.script[k] != "" {
		id = uint32(tokenID(c.script[k]))
	}
	return strconv.AppendUint(dst, uint64(id), 10)
}
