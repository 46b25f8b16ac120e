package simulator

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	follow "github.com/inferrail/inferrail/proxy/prompt"
)

// api is what an inference route asks for.
type api uint8

const (
	chat api = iota
	completions
	responses
	messages
	transcription
	translation
	embeddings
	pooling
	classification
	scores
	reranking
	// plain routes have their answer at once; the engine has no part in it.
	plain
)

// generates reports whether the engine makes tokens for it.
func (a api) generates() bool { return a <= translation }

// maxChoices bounds how many choices one request may ask for, over all its
// prompts.
const maxChoices = 1024

// parser reads the JSON body of a request to an inference route. The error, if
// any, is an *apiError.
type parser func(cfg *Config, body []byte) (*request, error)

// request is one API request, understood and checked. It lives as long as its
// exchange.
type request struct {
	api     api
	prompts []prompt
	// n is the number of choices for each prompt, output the most tokens of
	// each choice, finish why one ends there that nothing ends before.
	n      int
	output int
	finish string
	// stop are the texts that end a choice, call what it may call and form
	// what it must be.
	stop []string
	call *call
	form *form
	// endless: a choice ends at a limit only.
	endless bool
	// stopsWhole: a choice ends with the token that ends in a stop text, and
	// both are said.
	stopsWhole bool
	// adapter is the LoRA adapter asked for, if any. noRead: nothing is taken from
	// the cache.
	adapter string
	salt    *string
	noRead  bool

	// tokenIDs: the answer shows the ids of its tokens and of the prompt's.
	stream, usage, continuousUsage, tokenIDs bool

	// dialect, when not nil, writes the answer. opens is when a stream's head is
	// sent.
	dialect dialect
	// rid is the client's name of it, for SGLang; id is what vLLM calls it that
	// has no header for that.
	rid, id string
	// model is what the answer has as its model; empty is the engine's.
	model string
	// loads: the engine has no part in it, but face.admit has.
	loads bool
	// refused is why nothing of it is done though it could be read; only an
	// engine with face.refusesInStream has such.
	refused *apiError
	// defect is what an answer that is not streamed turns out to be.
	defect *apiError
	opens  opens

	// The parts of an answer that only one API has.
	responses *responsesBody
	audio     *audio
	pooled    *pooled
	body      []byte // of a plain one

	faults Faults
	// ownFaults: they are the request's, not the server's.
	ownFaults bool
	raw       *Raw
	say       uint64 // the number of a text to be said, 0 for none
}

// xargs are the extensions that any request may carry.
type xargs struct {
	Xargs *struct {
		Sim *Faults `json:"sim"`
		Raw *Raw    `json:"sim_raw"`
		// Say is the number of a text of package workload, which the answer is the
		// beginning of.
		Say uint64 `json:"sim_say"`
	} `json:"vllm_xargs"`
}

// apply gives r its own faults, or a raw body.
func (x *xargs) apply(cfg *Config, r *request) error {
	r.faults = cfg.Faults
	if x.Xargs == nil {
		return nil
	}
	if x.Xargs.Sim != nil {
		r.faults, r.ownFaults = *x.Xargs.Sim, true
		if err := r.faults.checkRequest(); err != nil {
			return badParameter("vllm_xargs", "%v", err)
		}
	}
	r.say = x.Xargs.Say
	r.raw = x.Xargs.Raw
	if r.raw != nil {
		if err := r.raw.check(); err != nil {
			return badParameter("vllm_xargs", "%v", err)
		}
	}
	return nil
}

// others are the members of a body that have no field of their own. Unknown
// ones are ignored, as vLLM does.
type others map[string]jsontext.Value

// refuse reports the first of names that is there and asks for something:
// what would change the answer must not be ignored.
func (o others) refuse(names ...string) error {
	for _, name := range names {
		switch string(o[name]) {
		case "", "null", "false", "[]", "{}", `""`, "0":
		default:
			return badParameter(name, "The simulated engine does not support `%s`.", name)
		}
	}
	return nil
}

// requestBody is the part of a body that is understood. A null is the same as
// nothing.
type requestBody struct {
	Model               *string        `json:"model"`
	Messages            *[]message     `json:"messages"`
	Tools               jsontext.Value `json:"tools"`
	ToolChoice          jsontext.Value `json:"tool_choice"`
	Prompt              jsontext.Value `json:"prompt"`
	N                   *int           `json:"n"`
	MaxTokens           *int           `json:"max_tokens"`
	MaxCompletionTokens *int           `json:"max_completion_tokens"`
	MinTokens           *int           `json:"min_tokens"`
	Stop                jsontext.Value `json:"stop"`
	ResponseFormat      jsontext.Value `json:"response_format"`
	StructuredOutputs   jsontext.Value `json:"structured_outputs"`
	Stream              *bool          `json:"stream"`
	ReturnTokenIDs      *bool          `json:"return_token_ids"`
	CacheSalt           *string        `json:"cache_salt"`
	StreamOptions       *struct {
		IncludeUsage         *bool `json:"include_usage"`
		ContinuousUsageStats *bool `json:"continuous_usage_stats"`
	} `json:"stream_options"`
	xargs
	IgnoreEOS      *bool   `json:"ignore_eos"`
	StreamInterval *int    `json:"stream_interval"`
	RequestID      *string `json:"request_id"`
	LoRAPath       *string `json:"lora_path"`
	RID            *string `json:"rid"`
	Others         others  `json:",embed"`
}

type message struct {
	Role       string         `json:"role"`
	Content    jsontext.Value `json:"content"`
	ToolCalls  jsontext.Value `json:"tool_calls"`
	ToolCallID string         `json:"tool_call_id"`
}

// parseRequest reads the body of a request to chat or completions. The error,
// if any, is an *apiError.
func parseRequest(cfg *Config, a api, body []byte) (*request, error) {
	var b requestBody
	if err := unmarshal(body, &b); err != nil {
		return nil, err
	}
	if err := checkModel(cfg, b.Model); err != nil {
		return nil, err
	}
	r := &request{api: a, n: 1, adapter: cfg.adapter(b.Model)}
	if cfg.sglang() {
		// It takes any name, and echoes it.
		if r.model = "default"; b.Model != nil {
			r.model = *b.Model
		}
		if b.RID != nil {
			r.rid = *b.RID
		}
		if b.LoRAPath != nil && *b.LoRAPath != "" {
			if r.adapter = cfg.adapter(b.LoRAPath); r.adapter == "" {
				return nil, badParameter("lora_path", "The following requested LoRA adapters are not loaded: {'%s'}", *b.LoRAPath)
			}
		}
	} else if b.RequestID != nil {
		r.id = *b.RequestID
	}
	var err error
	if a == chat {
		var text string
		if text, err = renderChat(&b); err == nil {
			r.prompts = []prompt{chatPrompt(follow.Chat, body, text)}
		}
	} else {
		r.prompts, err = readPrompts("prompt", b.Prompt)
	}
	if err != nil {
		return nil, err
	}
	if b.N != nil {
		r.n = *b.N
	}
	if r.n < 1 || r.n > maxChoices/len(r.prompts) {
		return nil, badParameter("n", "n times the number of prompts must be between 1 and %d, got %d times %d.",
			maxChoices, r.n, len(r.prompts))
	}
	if b.Stream != nil {
		r.stream = *b.Stream
	}
	r.tokenIDs = b.ReturnTokenIDs != nil && *b.ReturnTokenIDs
	if r.salt = b.CacheSalt; r.salt != nil && *r.salt == "" && !cfg.sglang() {
		return nil, invalid("cache_salt", "Parameter 'cache_salt' must be a non-empty string if provided.")
	}
	if o := b.StreamOptions; o != nil {
		if !r.stream {
			return nil, badParameter("stream_options", "Stream options can only be defined when `stream=True`.")
		}
		r.usage = o.IncludeUsage != nil && *o.IncludeUsage
		r.continuousUsage = r.usage && o.ContinuousUsageStats != nil && *o.ContinuousUsageStats
	}
	if err := b.xargs.apply(cfg, r); err != nil {
		return nil, err
	}
	if err := b.shape(cfg, r); err != nil {
		return nil, err
	}
	name, asked := "max_tokens", b.MaxTokens
	if a == chat && b.MaxCompletionTokens != nil {
		name, asked = "max_completion_tokens", b.MaxCompletionTokens
	}
	r.endless = b.IgnoreEOS != nil && *b.IgnoreEOS
	return r, r.limitOutput(cfg, name, asked, b.MinTokens)
}

// shape reads what the choices must look like.
func (b *requestBody) shape(cfg *Config, r *request) error {
	if err := b.Others.check(cfg); err != nil {
		return err
	}
	if b.StreamInterval != nil && (*b.StreamInterval < 1 || *b.StreamInterval > 1 && r.stream) {
		return badParameter("stream_interval", "stream_interval must be 1, for the simulated engine has an event for each token, got %d.", *b.StreamInterval)
	}
	var err error
	if r.stop, err = readStop("stop", b.Stop); err != nil {
		return err
	}
	if r.form, err = readForm(b.ResponseFormat, b.StructuredOutputs); err != nil {
		return err
	}
	if r.api != chat {
		return nil
	}
	tools, err := readTools(b.Tools)
	if err != nil {
		return err
	}
	answered := false
	if m := *b.Messages; len(m) > 0 {
		answered = m[len(m)-1].Role == "tool"
	}
	r.call, err = chooseTool(tools, b.ToolChoice, answered)
	return err
}

// readStop reads the texts that end a choice: one or a list.
func readStop(name string, v jsontext.Value) ([]string, error) {
	var one string
	var list []string
	switch v.Kind() {
	case jsontext.KindInvalid, 'n':
		return nil, nil
	case '"':
		if json.Unmarshal(v, &one) == nil {
			list = []string{one}
		}
	case '[':
		if json.Unmarshal(v, &list) != nil {
			list = []string{""}
		}
	default:
		list = []string{""}
	}
	if slices.Contains(list, "") {
		return nil, badParameter(name, "%s must be a string or a list of strings, none of them empty.", name)
	}
	return list, nil
}

// limitOutput decides how many tokens are generated at most and checks that
// they have room beside the longest prompt. name is that of the parameter
// asked.
func (r *request) limitOutput(cfg *Config, name string, asked, least *int) error {
	left, err := r.room(cfg)
	if err != nil {
		return err
	}
	r.finish = "length"
	switch {
	case asked != nil:
		r.output = *asked
	case r.api == completions:
		r.output = min(16, left)
	case r.call != nil || r.form != nil || r.endless:
		r.output = left
	case cfg.DefaultOutputTokens <= left:
		r.output, r.finish = cfg.DefaultOutputTokens, "stop"
	default:
		r.output = left
	}
	if r.output < 1 {
		return badParameter(name, "%s must be at least 1, got %d.", name, r.output)
	}
	if least != nil {
		if *least < 0 || asked != nil && *least > *asked {
			return badParameter("min_tokens", "min_tokens must be between 0 and max_tokens, got %d.", *least)
		}
		r.output = max(r.output, *least)
	}
	if r.output > left {
		return badParameter("input_tokens", "This model's maximum context length is %d tokens. "+
			"However, %d output tokens were requested and the prompt has %d input tokens. Please ask for less or shorten the prompt.",
			cfg.MaxModelLen, r.output, cfg.MaxModelLen-left)
	}
	return nil
}

// room returns how many tokens can follow the longest prompt.
func (r *request) room(cfg *Config) (int, error) {
	longest := 0
	for i := range r.prompts {
		longest = max(longest, r.prompts[i].tokens)
	}
	left := cfg.MaxModelLen - longest
	if left < 1 {
		return 0, badParameter("input_tokens", "This model's maximum context length is %d tokens. "+
			"However, your prompt has %d input tokens, which leaves no room for output. Please shorten it.",
			cfg.MaxModelLen, longest)
	}
	return left, nil
}

func checkModel(cfg *Config, model *string) error {
	if cfg.sglang() || model == nil || *model == "" || slices.Contains(cfg.ServedModelName, *model) || slices.Contains(cfg.LoRAModules, *model) {
		return nil
	}
	return &apiError{status: http.StatusNotFound, kind: "NotFoundError", param: "model", message: fmt.Sprintf("The model `%s` does not exist. Valid aliases: %s.",
		*model, strings.Join(cfg.ServedModelName, ", "))}
}

// adapter returns the LoRA adapter that goes by the name of a model, if one does.
func (c *Config) adapter(model *string) string {
	if model == nil {
		return ""
	}
	name := *model
	if c.sglang() {
		// The adapter may stand behind the model.
		if _, adapter, ok := strings.Cut(name, ":"); ok {
			name = adapter
		}
	}
	if slices.Contains(c.LoRAModules, name) {
		return name
	}
	return ""
}

// distort makes the prompts what an engine with the fault computes instead.
func (r *request) distort() {
	for i := range r.prompts {
		r.prompts[i].distort(r.faults.Tokenizer)
	}
}

// renderChat renders tools and messages as the simulator sees them, whatever
// they are.
func renderChat(b *requestBody) (string, error) {
	if b.Messages == nil {
		return "", missing("messages")
	}
	var text strings.Builder
	if len(b.Tools) > 0 && b.Tools.Kind() != 'n' {
		text.WriteString("<|tools|>\n")
		text.Write(b.Tools)
		text.WriteString("\n")
	}
	for i, m := range *b.Messages {
		content, err := contentText(m.Content)
		if err != nil {
			return "", &apiError{status: http.StatusBadRequest, kind: "Bad Request", param: fmt.Sprintf("body.messages.%d.content", i), message: fmt.Sprintf("1 validation error: %v", err)}
		}
		text.WriteString("<|" + m.Role + "|>\n" + content + "\n")
		if len(m.ToolCalls) > 0 && m.ToolCalls.Kind() != 'n' {
			text.WriteString("<|tool_calls|>\n" + string(m.ToolCalls) + "\n")
		}
	}
	text.WriteString(opening)
	return text.String(), nil
}

// contentText returns a message's content as one text: a string as it is, the
// text parts of a list joined by newlines, nothing for null.
func contentText(v jsontext.Value) (string, error) {
	switch v.Kind() {
	case jsontext.KindInvalid, 'n':
		return "", nil
	case '"':
		var s string
		err := json.Unmarshal(v, &s)
		return s, err
	case '[':
		var parts []struct {
			Type string  `json:"type"`
			Text *string `json:"text"`
		}
		if err := json.Unmarshal(v, &parts, lenient); err != nil {
			return "", errors.New("a content part must be an object with a type and, for type text, a text")
		}
		var texts []string
		for _, p := range parts {
			if p.Text != nil {
				texts = append(texts, *p.Text)
			} else {
				texts = append(texts, "<|"+p.Type+"|>")
			}
		}
		return strings.Join(texts, "\n"), nil
	}
	return "", errors.New("content must be a string, a list or null")
}

// readPrompts reads the four forms of the prompts in the member name: a text, a list of texts,
// a list of token ids, a list of such lists.
func readPrompts(name string, v jsontext.Value) ([]prompt, error) {
	wrong := &apiError{status: http.StatusBadRequest, kind: "Bad Request", param: "body." + name,
		message: "1 validation error: " + name + " must be a string, a list of strings, a list of token ids or a list of such lists, and not empty"}
	switch v.Kind() {
	case jsontext.KindInvalid, 'n':
		return nil, missing(name)
	case '"':
		var s string
		if json.Unmarshal(v, &s) != nil || s == "" {
			return nil, wrong
		}
		return []prompt{textPrompt(s)}, nil
	case '[':
		var ids []int
		if json.Unmarshal(v, &ids) == nil && len(ids) > 0 {
			return []prompt{idsPrompt(ids)}, nil
		}
		var list []jsontext.Value
		if json.Unmarshal(v, &list) != nil || len(list) == 0 || len(list) > maxChoices {
			return nil, wrong
		}
		var prompts []prompt
		for _, item := range list {
			var text string
			ids = nil
			switch {
			case json.Unmarshal(item, &text) == nil && text != "":
				prompts = append(prompts, textPrompt(text))
			case json.Unmarshal(item, &ids) == nil && len(ids) > 0:
				prompts = append(prompts, idsPrompt(ids))
			default:
				return nil, wrong
			}
		}
		return prompts, nil
	}
	return nil, wrong
}

// lenient reads JSON as Python does: the last of several equal names counts.
var lenient = jsontext.AllowDuplicateNames(true)

// unmarshal reads a body. Its messages are made here: those of the JSON
// package name Go types and change from process to process.
func unmarshal(body []byte, into any, options ...json.Options) error {
	err := json.Unmarshal(body, into, append(options, lenient)...)
	if err == nil {
		return nil
	}
	e := &apiError{status: http.StatusBadRequest, kind: "Bad Request", param: "body", message: "1 validation error: invalid JSON"}
	if syntactic, ok := errors.AsType[*jsontext.SyntacticError](err); ok {
		e.message = fmt.Sprintf("1 validation error: invalid JSON at byte %d", syntactic.ByteOffset)
		e.param = fmt.Sprintf("body.%d", syntactic.ByteOffset)
	} else if semantic, ok := errors.AsType[*json.SemanticError](err); ok {
		where := "the body"
		if semantic.JSONPointer != "" {
			where = strings.ReplaceAll(strings.TrimPrefix(string(semantic.JSONPointer), "/"), "/", ".")
			e.param = "body." + where
		}
		e.message = fmt.Sprintf("1 validation error: %s has a value of the wrong type or range", where)
		if errors.Is(err, json.ErrUnknownName) {
			e.message = fmt.Sprintf("1 validation error: %s is unknown", where)
		}
	}
	return e
}

// apiError is a refusal in vLLM's shape.
type apiError struct {
	status               int
	kind, param, message string
	// text: the message is all that the answer has, and it is not JSON.
	text bool
}

func (e *apiError) Error() string { return e.message }

// appendError appends the body that says e in a's shape. vLLM checks types
// before it knows of Anthropic's shape.
func (a api) appendError(dst []byte, e *apiError) []byte {
	if a != messages || e.kind == "Bad Request" {
		return e.appendBody(dst)
	}
	dst = append(dst, `{"type":"error","error":{"type":`...)
	dst = appendString(dst, e.kind)
	dst = append(dst, `,"message":`...)
	dst = appendString(dst, e.message)
	return append(dst, "}}"...)
}

// appendBody appends the body of the answer: the member code is the status.
func (e *apiError) appendBody(dst []byte) []byte {
	dst = append(dst, `{"error":{"message":`...)
	dst = appendString(dst, e.message)
	dst = append(dst, `,"type":`...)
	dst = appendString(dst, e.kind)
	dst = append(dst, `,"param":`...)
	if e.param == "" {
		dst = append(dst, "null"...)
	} else {
		dst = appendString(dst, e.param)
	}
	dst = append(dst, `,"code":`...)
	dst = strconv.AppendInt(dst, int64(e.status), 10)
	return append(dst, "}}"...)
}

func badParameter(param, format string, args ...any) *apiError {
	return &apiError{status: http.StatusBadRequest, kind: "BadRequestError", param: param, message: fmt.Sprintf(format, args...)}
}

func missing(field string) *apiError {
	return &apiError{status: http.StatusBadRequest, kind: "Bad Request", param: "body." + field, message: "1 validation error: field required: " + field}
}
