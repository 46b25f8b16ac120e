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
)

// api is one of the two generating routes.
type api uint8

const (
	chat api = iota
	completions
)

// maxChoices bounds how many choices one request may ask for, over all its
// prompts.
const maxChoices = 1024

// request is one API request, understood and checked. It lives as long as its
// exchange.
type request struct {
	api     api
	prompts []prompt
	// n is the number of choices for each prompt, output the number of tokens
	// of each choice, finish why it ends there.
	n      int
	output int
	finish string

	stream, usage, continuousUsage bool

	faults Faults
	raw    *Raw
}

// prompt is what the model is asked to continue.
type prompt struct {
	tokens int
	hash   uint64
}

// requestBody is the part of a body that is understood; other members are
// ignored, as vLLM ignores unknown ones. A null is the same as nothing.
type requestBody struct {
	Model               *string        `json:"model"`
	Messages            *[]message     `json:"messages"`
	Tools               jsontext.Value `json:"tools"`
	Prompt              jsontext.Value `json:"prompt"`
	N                   *int           `json:"n"`
	MaxTokens           *int           `json:"max_tokens"`
	MaxCompletionTokens *int           `json:"max_completion_tokens"`
	Stream              *bool          `json:"stream"`
	StreamOptions       *struct {
		IncludeUsage         *bool `json:"include_usage"`
		ContinuousUsageStats *bool `json:"continuous_usage_stats"`
	} `json:"stream_options"`
	Xargs *struct {
		Sim *Faults `json:"sim"`
		Raw *Raw    `json:"sim_raw"`
	} `json:"vllm_xargs"`
}

type message struct {
	Role    string         `json:"role"`
	Content jsontext.Value `json:"content"`
}

// parseRequest reads the body of a generating request. The error, if any, is
// an *apiError.
func parseRequest(cfg *Config, a api, body []byte) (*request, error) {
	var b requestBody
	if err := unmarshal(body, &b); err != nil {
		return nil, err
	}
	if err := checkModel(cfg, b.Model); err != nil {
		return nil, err
	}
	r := &request{api: a, n: 1, faults: cfg.Faults}
	var err error
	if a == chat {
		var text string
		text, err = renderChat(&b)
		r.prompts = []prompt{textPrompt(text)}
	} else {
		r.prompts, err = completionPrompts(b.Prompt)
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
	if o := b.StreamOptions; o != nil {
		if !r.stream {
			return nil, badParameter("stream_options", "Stream options can only be defined when `stream=True`.")
		}
		r.usage = o.IncludeUsage != nil && *o.IncludeUsage
		r.continuousUsage = r.usage && o.ContinuousUsageStats != nil && *o.ContinuousUsageStats
	}
	if x := b.Xargs; x != nil {
		if x.Sim != nil {
			r.faults = *x.Sim
		}
		r.raw = x.Raw
	}
	if err := r.faults.check(); err != nil {
		return nil, badParameter("vllm_xargs", "%v", err)
	}
	if r.raw != nil {
		if err := r.raw.check(); err != nil {
			return nil, badParameter("vllm_xargs", "%v", err)
		}
	}
	return r, r.limitOutput(cfg, &b)
}

// limitOutput decides how many tokens are generated and checks that they have
// room beside the longest prompt.
func (r *request) limitOutput(cfg *Config, b *requestBody) error {
	name, asked := "max_tokens", b.MaxTokens
	if r.api == chat && b.MaxCompletionTokens != nil {
		name, asked = "max_completion_tokens", b.MaxCompletionTokens
	}
	longest := 0
	for _, p := range r.prompts {
		longest = max(longest, p.tokens)
	}
	left := cfg.MaxModelLen - longest
	if left < 1 {
		return badParameter("input_tokens", "This model's maximum context length is %d tokens. "+
			"However, your prompt has %d input tokens, which leaves no room for output. Please shorten it.",
			cfg.MaxModelLen, longest)
	}
	r.finish = "length"
	switch {
	case asked != nil:
		r.output = *asked
	case r.api == completions:
		r.output = min(16, left)
	case cfg.DefaultOutputTokens <= left:
		r.output, r.finish = cfg.DefaultOutputTokens, "stop"
	default:
		r.output = left
	}
	if r.output < 1 {
		return badParameter(name, "%s must be at least 1, got %d.", name, r.output)
	}
	if r.output > left {
		return badParameter("input_tokens", "This model's maximum context length is %d tokens. "+
			"However, %d output tokens were requested and the prompt has %d input tokens. Please ask for less or shorten the prompt.",
			cfg.MaxModelLen, r.output, longest)
	}
	return nil
}

func checkModel(cfg *Config, model *string) error {
	if model == nil || *model == "" || slices.Contains(cfg.ServedModelName, *model) {
		return nil
	}
	return &apiError{http.StatusNotFound, "NotFoundError", "model", fmt.Sprintf("The model `%s` does not exist.", *model)}
}

// renderChat renders tools and messages with a template of the simulator's
// own.
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
			return "", &apiError{http.StatusBadRequest, "Bad Request", fmt.Sprintf("messages.%d.content", i),
				fmt.Sprintf("1 validation error: %v", err)}
		}
		text.WriteString("<|" + m.Role + "|>\n" + content + "\n")
	}
	text.WriteString("<|assistant|>\n")
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

// completionPrompts reads the four forms of a prompt: a text, a list of texts,
// a list of token ids, a list of such lists.
func completionPrompts(v jsontext.Value) ([]prompt, error) {
	wrong := &apiError{http.StatusBadRequest, "Bad Request", "prompt",
		"1 validation error: prompt must be a string, a list of strings, a list of token ids or a list of such lists, and not empty"}
	switch v.Kind() {
	case jsontext.KindInvalid, 'n':
		return nil, missing("prompt")
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

func textPrompt(text string) prompt { return prompt{countTokens(text), hashText(text)} }

func idsPrompt(ids []int) prompt {
	var text []byte
	for _, id := range ids {
		text = append(strconv.AppendInt(text, int64(id), 10), ' ')
	}
	return prompt{len(ids), hashText(string(text))}
}

// lenient reads JSON as Python does: the last of several equal names counts.
var lenient = jsontext.AllowDuplicateNames(true)

// unmarshal reads a body. Its messages are made here: those of the JSON
// package name Go types and change from process to process.
func unmarshal(body []byte, into any) error {
	err := json.Unmarshal(body, into, lenient)
	if err == nil {
		return nil
	}
	e := &apiError{http.StatusBadRequest, "Bad Request", "", "1 validation error: invalid JSON"}
	if syntactic, ok := errors.AsType[*jsontext.SyntacticError](err); ok {
		e.message = fmt.Sprintf("1 validation error: invalid JSON at byte %d", syntactic.ByteOffset)
	} else if semantic, ok := errors.AsType[*json.SemanticError](err); ok {
		e.param = strings.ReplaceAll(strings.TrimPrefix(string(semantic.JSONPointer), "/"), "/", ".")
		where := e.param
		if where == "" {
			where = "the body"
		}
		e.message = fmt.Sprintf("1 validation error: %s has a value of the wrong type or range", where)
	}
	return e
}

// apiError is a refusal in vLLM's shape.
type apiError struct {
	status               int
	kind, param, message string
}

func (e *apiError) Error() string { return e.message }

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
	return &apiError{http.StatusBadRequest, "BadRequestError", param, fmt.Sprintf(format, args...)}
}

func missing(field string) *apiError {
	return &apiError{http.StatusBadRequest, "Bad Request", field, "1 validation error: field required: " + field}
}
