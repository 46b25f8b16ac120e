package simulator

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"time"

	follow "github.com/inferrail/inferrail/proxy/prompt"
	"github.com/inferrail/inferrail/proxy/prompt/tokenizer"
)

// ollamaMessage is a message as /api/chat has it.
type ollamaMessage struct {
	Role       string            `json:"role"`
	Content    string            `json:"content"`
	Images     []json.RawMessage `json:"images"`
	ToolCalls  []ollamaCall      `json:"tool_calls"`
	ToolName   string            `json:"tool_name"`
	ToolCallID string            `json:"tool_call_id"`
}

type ollamaCall struct {
	ID       string `json:"id"`
	Function struct {
		Name      string          `json:"name"`
		Arguments json.RawMessage `json:"arguments"`
	} `json:"function"`
}

// ollamaCommon is what the bodies of Ollama's own routes have all.
type ollamaCommon struct {
	Model       string          `json:"model"`
	Stream      *bool           `json:"stream"`
	Format      json.RawMessage `json:"format"`
	KeepAlive   *ollamaDuration `json:"keep_alive"`
	Options     map[string]any  `json:"options"`
	Think       json.RawMessage `json:"think"`
	Truncate    *bool           `json:"truncate"`
	Shift       *bool           `json:"shift"`
	Logprobs    bool            `json:"logprobs"`
	TopLogprobs int             `json:"top_logprobs"`
	Debug       bool            `json:"_debug_render_only"`
}

// ollamaDuration is a number of seconds, or a text such as 5m. Below 0 is for ever.
type ollamaDuration time.Duration

// UnmarshalJSON implements json.Unmarshaler.
func (d *ollamaDuration) UnmarshalJSON(text []byte) error {
	var v any
	if err := json.Unmarshal(text, &v); err != nil {
		return err
	}
	switch v := v.(type) {
	case float64:
		*d = ollamaDuration(max(-1, min(v*float64(time.Second), math.MaxInt64/2)))
	case string:
		parsed, err := time.ParseDuration(v)
		if err != nil {
			return ollamaRefusal(http.StatusBadRequest, "%v", err)
		}
		*d = ollamaDuration(parsed)
	default:
		return ollamaRefusal(http.StatusBadRequest, "Unsupported type: '%v'", reflect.TypeOf(v))
	}
	return nil
}

// ollamaOptions are the kinds of the options that there are. Others are warned of and
// ignored, as Ollama does it.
var ollamaOptions = map[string]string{
	"num_ctx": "integer", "num_batch": "integer", "num_gpu": "integer", "main_gpu": "integer", "use_mmap": "boolean", "num_thread": "integer",
	"draft_num_predict": "integer", "num_keep": "integer", "seed": "integer", "num_predict": "integer", "top_k": "integer", "top_p": "float32",
	"min_p": "float32", "typical_p": "float32", "repeat_last_n": "integer", "temperature": "float32", "repeat_penalty": "float32",
	"presence_penalty": "float32", "frequency_penalty": "float32", "stop": "array",
}

// readOllama reads what the requests of all routes have: the model, and what it is
// loaded and generates with. notFound says in a route's words that there is no such
// model, and nobody that none was named.
func readOllama(cfg *Config, a api, b *ollamaCommon, notFound, nobody *apiError) (*request, *ollamaDialect, error) {
	if b.TopLogprobs < 0 || b.TopLogprobs > 20 {
		return nil, nil, ollamaRefusal(http.StatusBadRequest, "top_logprobs must be between 0 and 20")
	}
	name, there, err := cfg.ollamaModel(b.Model)
	switch {
	case errors.Is(err, errNoModel):
		return nil, nil, nobody
	case err != nil:
		return nil, nil, err
	case !there:
		return nil, nil, notFound
	}
	for what, asked := range map[string]bool{"logprobs": b.Logprobs, "_debug_render_only": b.Debug} {
		if asked {
			return nil, nil, ollamaRefusal(http.StatusBadRequest, "the simulated engine does not support %s", what)
		}
	}
	switch think := string(b.Think); think {
	case "", "null", "false":
	case "true", `"high"`, `"medium"`, `"low"`, `"max"`:
		return nil, nil, ollamaRefusal(http.StatusBadRequest, "%q does not support thinking", b.Model)
	default:
		if think[0] == '"' {
			return nil, nil, ollamaRefusal(http.StatusBadRequest, `invalid think value: %s (must be "high", "medium", "low", "max", true, or false)`, think)
		}
		return nil, nil, ollamaRefusal(http.StatusBadRequest, `think must be a boolean or string ("high", "medium", "low", "max", true, or false)`)
	}
	d := &ollamaDialect{model: b.Model, name: name, created: cfg.Created, limit: -1, keep: 4, shift: b.Shift == nil || *b.Shift,
		truncate: b.Truncate == nil || *b.Truncate,
		options:  runnerOptions{context: cfg.MaxModelLen, batch: 512, gpu: -1, noShift: b.Shift != nil && !*b.Shift}}
	if b.KeepAlive != nil {
		k := time.Duration(*b.KeepAlive)
		d.keepAlive = &k
	}
	r := &request{api: a, n: 1, finish: "stop", opens: withToken, dialect: d, stream: b.Stream == nil || *b.Stream}
	if err := d.set(cfg, r, b.Options); err != nil {
		return nil, nil, err
	}
	return r, d, nil
}

// set takes the options.
func (d *ollamaDialect) set(cfg *Config, r *request, options map[string]any) error {
	for name, value := range options {
		kind, known := ollamaOptions[name]
		if !known || value == nil {
			continue
		}
		number, isNumber := value.(float64)
		_, isBool := value.(bool)
		list, isList := value.([]any)
		if kind == "integer" && !isNumber || kind == "float32" && !isNumber || kind == "boolean" && !isBool || kind == "array" && !isList {
			return ollamaRefusal(http.StatusInternalServerError, "option %q must be of type %s", name, kind)
		}
		n := int(max(math.MinInt32, min(number, math.MaxInt32)))
		switch name {
		case "num_ctx":
			d.options.context, d.options.contextAsked = min(max(n, 4), cfg.MaxModelLen), true
		case "num_batch":
			d.options.batch, d.options.batchAsked = n, true
		case "num_gpu":
			d.options.gpu = n
		case "num_thread":
			d.options.thread = n
		case "draft_num_predict":
			d.options.draft = n
		case "main_gpu":
			d.options.mainGPU = fmt.Sprint(n)
		case "use_mmap":
			d.options.mmap = fmt.Sprint(value)
		case "num_keep":
			d.keep = n
		case "num_predict":
			d.limit = max(n, -1)
		case "stop":
			for _, v := range list {
				text, ok := v.(string)
				if !ok {
					return ollamaRefusal(http.StatusInternalServerError, "option %q must be of an array of strings", name)
				}
				if text != "" {
					r.stop = append(r.stop, text)
				}
			}
		}
	}
	if d.limit == 0 {
		return ollamaRefusal(http.StatusBadRequest, "the simulated engine does not support num_predict 0")
	}
	return nil
}

// form reads what the answer must look like.
func (b *ollamaCommon) form() (*form, error) {
	switch text := strings.TrimSpace(string(b.Format)); {
	case text == "" || text == "null" || text == `""`:
		return nil, nil
	case text == `"json"`:
		return newForm("format", anyObject)
	case text[0] == '{':
		return newForm("format", []byte(text))
	default:
		return nil, ollamaRefusal(http.StatusInternalServerError, `invalid format: %q; expected "json" or a valid JSON Schema object`, text)
	}
}

// modelNotFound and modelUnpulled are how routes say that a model is not there.
func modelNotFound(name string) *apiError {
	return ollamaRefusal(http.StatusNotFound, "model '%s' not found", name)
}

func modelUnpulled(name string) *apiError {
	return ollamaRefusal(http.StatusNotFound, "model %q not found, try pulling it first", name)
}

// fill gives a request its prompt, cut as Ollama cuts what is too long, and decides
// how much is generated.
func (d *ollamaDialect) fill(cfg *Config, r *request, p prompt, body []byte) error {
	context := d.options.context
	if p.tokens > context-1 {
		switch {
		case !d.truncate:
			return &apiError{status: http.StatusBadRequest, message: string(appendLlamaError(nil, llamaExceeded(p.tokens, context)))}
		case !d.shift:
			return ollamaRefusal(http.StatusBadRequest, "the prompt is longer than the context length currently available to the model; "+
				"shorten the prompt, adjust the context length in settings, or use a model with a longer context length")
		}
		p = d.cut(p)
	}
	r.prompts = []prompt{p}
	var x xargs
	if err := unmarshal(body, &x); err != nil {
		return err
	}
	if err := x.apply(cfg, r); err != nil {
		return err
	}
	if r.say != 0 {
		r.call = nil // Ollama knows no tool_choice that says so
	}
	left := context - p.tokens
	r.output = d.limit
	switch {
	case d.limit > left && d.shift:
		return ollamaRefusal(http.StatusBadRequest, "the simulated engine does not support to shift its context: num_predict must be at most %d, what is left of num_ctx %d, or shift false", left, context)
	case d.limit > left:
		r.output, r.finish = left, "length"
	case d.limit > 0:
		r.finish = "length"
	case r.call != nil || r.form != nil:
		r.output, r.finish = left, "length"
	default:
		// Nothing limits it: the model ends where it likes.
		r.output = min(cfg.DefaultOutputTokens, left)
	}
	return nil
}

// cut leaves out tokens behind the first ones that are kept, so that about half of
// the context is free again.
func (d *ollamaDialect) cut(p prompt) prompt {
	context := d.options.context
	ids := p.ids()
	keep := d.keep
	if keep < 0 {
		keep = len(ids)
	}
	keep = max(0, min(keep, context-1))
	limit := context - max((context-keep)/2, 1)
	ids = slices.Concat(ids[:keep], ids[len(ids)-(limit-keep):])
	p.given, p.tokens = ids, len(ids)
	return p
}

// ollamaChat is the body of POST /api/chat.
type ollamaChat struct {
	ollamaCommon
	Messages []ollamaMessage `json:"messages"`
	Tools    json.RawMessage `json:"tools"`
}

// parseOllamaChat reads the body of POST /api/chat.
func parseOllamaChat(cfg *Config, body []byte) (*request, error) {
	var b ollamaChat
	if err := unmarshalOllama(body, &b); err != nil {
		return nil, err
	}
	return b.request(cfg, body, false)
}

// request returns the request that b is. openAI: it came by a route like OpenAI's.
func (b *ollamaChat) request(cfg *Config, body []byte, openAI bool) (*request, error) {
	r, d, err := readOllama(cfg, chat, &b.ollamaCommon, modelNotFound(b.Model), ollamaRefusal(http.StatusBadRequest, "model is required"))
	if err != nil {
		return nil, err
	}
	d.openAI, d.chat = openAI, true
	if len(b.Messages) == 0 {
		return d.loadOnly(r)
	}
	for i := range b.Messages {
		m := &b.Messages[i]
		m.Role = strings.ToLower(m.Role)
		if len(m.Images) > 0 {
			return nil, ollamaRefusal(http.StatusBadRequest, "the simulated engine does not support images")
		}
	}
	if r.form, err = b.form(); err != nil {
		return nil, err
	}
	var tools []tool
	if len(b.Tools) > 0 && strings.Trim(string(b.Tools), "[ \t\r\n]") != "" {
		if tools, err = readTools([]byte(b.Tools)); err != nil {
			return nil, err
		}
	}
	if r.call, err = chooseTool(tools, nil, b.Messages[len(b.Messages)-1].Role == "tool"); err != nil {
		return nil, err
	}
	if r.call != nil {
		r.form = nil
	}
	p := b.prompt(b.Messages)
	if d.truncate {
		p = b.shorten(p, d.options.context)
	}
	return r, d.fill(cfg, r, p, body)
}

// shorten leaves out messages from the first on until the rest has room, but the
// system's and the last.
func (b *ollamaChat) shorten(p prompt, context int) prompt {
	for i := 1; p.tokens > context && i < len(b.Messages); i++ {
		var kept []ollamaMessage
		for _, m := range b.Messages[:i] {
			if m.Role == "system" {
				kept = append(kept, m)
			}
		}
		p = b.prompt(append(kept, b.Messages[i:]...))
	}
	return p
}

// prompt returns that of some messages: what the agent makes of the same chat by
// OpenAI's route.
func (b *ollamaChat) prompt(list []ollamaMessage) prompt {
	type function struct {
		Name      string `json:"name"`
		Arguments string `json:"arguments"`
	}
	type call struct {
		ID       string   `json:"id"`
		Type     string   `json:"type"`
		Function function `json:"function"`
	}
	type said struct {
		Role    string `json:"role"`
		Content string `json:"content"`
		Calls   []call `json:"tool_calls,omitempty"`
	}
	whole := struct {
		Messages []said          `json:"messages"`
		Tools    json.RawMessage `json:"tools,omitempty"`
	}{Tools: b.Tools}
	if string(whole.Tools) == "null" {
		whole.Tools = nil
	}
	for _, m := range list {
		s := said{Role: m.Role, Content: m.Content}
		for _, c := range m.ToolCalls {
			s.Calls = append(s.Calls, call{c.ID, "function", function{c.Function.Name, string(c.Function.Arguments)}})
		}
		whole.Messages = append(whole.Messages, s)
	}
	body, err := json.Marshal(whole)
	if err != nil {
		panic("BUG: cannot write a chat: " + err.Error())
	}
	var read requestBody
	text := ""
	if unmarshal(body, &read) == nil {
		text, _ = renderChat(&read)
	}
	return chatPrompt(follow.Chat, body, text)
}

// loadOnly makes of a request with nothing to do one that loads the model, or takes
// it out of memory.
func (d *ollamaDialect) loadOnly(r *request) (*request, error) {
	r.api, r.stream, r.loads = plain, false, true
	d.unloads = d.keepAlive != nil && *d.keepAlive == 0
	return r, nil
}

// ollamaGenerate is the body of POST /api/generate.
type ollamaGenerate struct {
	ollamaCommon
	Prompt   string            `json:"prompt"`
	Suffix   string            `json:"suffix"`
	System   string            `json:"system"`
	Template string            `json:"template"`
	Context  []int             `json:"context"`
	Raw      bool              `json:"raw"`
	Images   []json.RawMessage `json:"images"`
}

// parseOllamaGenerate reads the body of POST /api/generate.
func parseOllamaGenerate(cfg *Config, body []byte) (*request, error) {
	var b ollamaGenerate
	if err := unmarshalOllama(body, &b); err != nil {
		return nil, err
	}
	return b.request(cfg, body, false)
}

func (b *ollamaGenerate) request(cfg *Config, body []byte, openAI bool) (*request, error) {
	r, d, err := readOllama(cfg, completions, &b.ollamaCommon, modelNotFound(b.Model), modelNotFound(b.Model))
	if err != nil {
		return nil, err
	}
	d.openAI, d.raw = openAI, b.Raw
	switch {
	case b.Raw && (b.Template != "" || b.System != "" || len(b.Context) > 0):
		return nil, ollamaRefusal(http.StatusBadRequest, "raw mode does not support template, system, or context")
	case b.Suffix != "":
		return nil, ollamaRefusal(http.StatusBadRequest, "registry.ollama.ai/library/%s does not support insert", d.name)
	case b.Template != "":
		return nil, ollamaRefusal(http.StatusBadRequest, "the simulated engine does not support template")
	case len(b.Images) > 0:
		return nil, ollamaRefusal(http.StatusBadRequest, "the simulated engine does not support images")
	case b.Prompt == "":
		return d.loadOnly(r)
	}
	if r.form, err = b.form(); err != nil {
		return nil, err
	}
	if b.Raw {
		return r, d.fill(cfg, r, textPrompt(b.Prompt), body)
	}
	chat := ollamaChat{Messages: []ollamaMessage{{Role: "user", Content: b.Prompt}}}
	if b.System != "" {
		chat.Messages = slices.Insert(chat.Messages, 0, ollamaMessage{Role: "system", Content: b.System})
	}
	p := chat.prompt(chat.Messages)
	if d.truncate {
		p = chat.shorten(p, d.options.context)
	}
	if len(b.Context) > 0 {
		for _, id := range b.Context {
			if id < 0 || id >= tokenizer.SimVocabulary {
				return nil, ollamaRefusal(http.StatusBadRequest, "context holds %d, which is no token of the model", id)
			}
		}
		ids := slices.Concat(b.Context, p.ids())
		p = idsPrompt(ids)
	}
	return r, d.fill(cfg, r, p, body)
}

// parseOllamaEmbed reads the body of POST /api/embed.
func parseOllamaEmbed(cfg *Config, body []byte) (*request, error) {
	type EmbedRequest struct {
		ollamaCommon
		Input      any `json:"input"`
		Dimensions int `json:"dimensions"`
	}
	var b EmbedRequest
	if err := unmarshalOllama(body, &b); err != nil {
		return nil, err
	}
	r, d, err := readOllama(cfg, embeddings, &b.ollamaCommon, modelUnpulled(b.Model), modelNotFound(b.Model))
	if err != nil {
		return nil, err
	}
	var texts []string
	switch input := b.Input.(type) {
	case nil:
	case string:
		if input != "" {
			texts = []string{input}
		}
	case []any:
		for _, v := range input {
			text, ok := v.(string)
			if !ok {
				return nil, ollamaRefusal(http.StatusBadRequest, "invalid input type")
			}
			texts = append(texts, text)
		}
	default:
		return nil, ollamaRefusal(http.StatusBadRequest, "invalid input type")
	}
	if len(texts) == 0 {
		d.embed = true
		return d.loadOnly(r)
	}
	return d.vectors(cfg, r, texts, b.Dimensions, body)
}

// vectors gives a request the vectors that it is answered with.
func (d *ollamaDialect) vectors(cfg *Config, r *request, texts []string, dimensions int, body []byte) (*request, error) {
	if len(texts) > maxChoices {
		return nil, ollamaRefusal(http.StatusBadRequest, "the simulated engine does not support more than %d inputs", maxChoices)
	}
	if dimensions <= 0 || dimensions > vectorSize {
		dimensions = vectorSize
	}
	r.stream, r.output, r.pooled = false, 1, &pooled{}
	for _, text := range texts {
		p := textPrompt(text)
		if p.tokens > d.options.context {
			if !d.truncate {
				return nil, ollamaRefusal(http.StatusBadRequest, "the input length exceeds the context length")
			}
			p = idsPrompt(p.ids()[:d.options.context])
		}
		if p.tokens == 0 {
			p = idsPrompt([]int{0}) // the model makes something of nothing
		}
		r.prompts = append(r.prompts, p)
		r.pooled.vectors = append(r.pooled.vectors, embed(p.ids(), dimensions))
	}
	var x xargs
	if err := unmarshal(body, &x); err != nil {
		return nil, err
	}
	return r, x.apply(cfg, r)
}

// parseOllamaEmbeddings reads the body of POST /api/embeddings.
func parseOllamaEmbeddings(cfg *Config, body []byte) (*request, error) {
	type EmbeddingRequest struct {
		ollamaCommon
		Prompt string `json:"prompt"`
	}
	var b EmbeddingRequest
	if err := unmarshalOllama(body, &b); err != nil {
		return nil, err
	}
	r, d, err := readOllama(cfg, embeddings, &b.ollamaCommon, modelUnpulled(b.Model), ollamaRefusal(http.StatusBadRequest, "model is required"))
	if err != nil {
		return nil, err
	}
	d.single = true
	if b.Prompt == "" {
		d.embed = true
		return d.loadOnly(r)
	}
	return d.vectors(cfg, r, []string{b.Prompt}, 0, body)
}

// ollamaOpenAI is what the bodies of the routes like OpenAI's have. What Ollama does
// not know of them it ignores, as tool_choice, n and max_completion_tokens.
type ollamaOpenAI struct {
	Model         string          `json:"model"`
	Stream        bool            `json:"stream"`
	StreamOptions *ollamaUsage    `json:"stream_options"`
	MaxTokens     *int            `json:"max_tokens"`
	Stop          any             `json:"stop"`
	Logprobs      json.RawMessage `json:"logprobs"`
	TopLogprobs   int             `json:"top_logprobs"`
}

type ollamaUsage struct {
	IncludeUsage bool `json:"include_usage"`
}

// common returns what a body of Ollama's own would have in its place.
func (b *ollamaOpenAI) common() ollamaCommon {
	c := ollamaCommon{Model: b.Model, Stream: &b.Stream, Options: map[string]any{}, TopLogprobs: b.TopLogprobs}
	switch stop := b.Stop.(type) {
	case string:
		c.Options["stop"] = []any{stop}
	case []any:
		c.Options["stop"] = stop
	}
	if b.MaxTokens != nil {
		c.Options["num_predict"] = float64(*b.MaxTokens)
	}
	v := string(b.Logprobs)
	c.Logprobs = v != "" && v != "null" && v != "false" && v != "0"
	return c
}

// parseOllamaOpenAIChat reads the body of POST /v1/chat/completions.
func parseOllamaOpenAIChat(cfg *Config, body []byte) (*request, error) {
	type ChatCompletionRequest struct {
		ollamaOpenAI
		Messages []struct {
			Role       string          `json:"role"`
			Content    json.RawMessage `json:"content"`
			ToolCallID string          `json:"tool_call_id"`
			ToolCalls  []struct {
				ID       string `json:"id"`
				Function struct {
					Name      string `json:"name"`
					Arguments string `json:"arguments"`
				} `json:"function"`
			} `json:"tool_calls"`
		} `json:"messages"`
		Tools          json.RawMessage `json:"tools"`
		ResponseFormat *struct {
			Type       string `json:"type"`
			JSONSchema *struct {
				Schema json.RawMessage `json:"schema"`
			} `json:"json_schema"`
		} `json:"response_format"`
		ReasoningEffort string `json:"reasoning_effort"`
		Reasoning       *struct {
			Effort string `json:"effort"`
		} `json:"reasoning"`
	}
	var b ChatCompletionRequest
	if err := unmarshalOllama(body, &b); err != nil {
		return nil, err
	}
	if len(b.Messages) == 0 {
		return nil, ollamaRefusal(http.StatusBadRequest, "[] is too short - 'messages'")
	}
	chat := ollamaChat{ollamaCommon: b.common(), Tools: b.Tools}
	for _, m := range b.Messages {
		var calls []ollamaCall
		for _, c := range m.ToolCalls {
			call := ollamaCall{ID: c.ID}
			call.Function.Name, call.Function.Arguments = c.Function.Name, json.RawMessage(c.Function.Arguments)
			if !json.Valid(call.Function.Arguments) {
				return nil, ollamaRefusal(http.StatusBadRequest, "invalid tool call arguments")
			}
			calls = append(calls, call)
		}
		contents, err := ollamaContents(m.Content, calls != nil)
		if err != nil {
			return nil, err
		}
		// Each part of a content is a message of its own.
		for _, text := range contents {
			chat.Messages = append(chat.Messages, ollamaMessage{Role: m.Role, Content: text})
		}
		if calls != nil {
			last := &chat.Messages[len(chat.Messages)-1]
			last.ToolCalls, last.ToolCallID = calls, m.ToolCallID
		}
	}
	effort := b.ReasoningEffort
	if b.Reasoning != nil {
		effort = b.Reasoning.Effort
	}
	switch effort {
	case "", "none":
	case "minimal", "low", "medium", "high", "max", "xhigh", "ultra":
		chat.Think = json.RawMessage("true")
	default:
		return nil, ollamaRefusal(http.StatusBadRequest, `invalid reasoning value: %q (must be "minimal", "low", "medium", "high", "xhigh", "ultra", "max", or "none")`, effort)
	}
	if f := b.ResponseFormat; f != nil {
		switch strings.ToLower(strings.TrimSpace(f.Type)) {
		case "json_object":
			chat.Format = json.RawMessage(`"json"`)
		case "json_schema":
			if f.JSONSchema != nil {
				chat.Format = f.JSONSchema.Schema
			}
		}
	}
	r, err := chat.request(cfg, body, true)
	if err == nil {
		r.usage = b.StreamOptions != nil && b.StreamOptions.IncludeUsage
	}
	return r, err
}

// ollamaContents returns the texts of a content. calls: the message calls tools, and
// need not say anything.
func ollamaContents(v json.RawMessage, calls bool) ([]string, error) {
	wrong := ollamaRefusal(http.StatusBadRequest, "invalid message format")
	var text string
	switch {
	case len(v) > 0 && v[0] == '"' && json.Unmarshal(v, &text) == nil:
		return []string{text}, nil
	case len(v) > 0 && v[0] == '[':
		var parts []struct {
			Type string  `json:"type"`
			Text *string `json:"text"`
		}
		if json.Unmarshal(v, &parts) != nil {
			return nil, wrong
		}
		var texts []string
		for _, p := range parts {
			switch {
			case p.Type == "text" && p.Text != nil:
				texts = append(texts, *p.Text)
			case p.Type == "image_url" || p.Type == "input_audio":
				return nil, ollamaRefusal(http.StatusBadRequest, "the simulated engine does not support %s", p.Type)
			default:
				return nil, wrong
			}
		}
		if len(texts) == 0 && calls {
			texts = []string{""}
		}
		return texts, nil
	case calls && (len(v) == 0 || string(v) == "null"):
		return []string{""}, nil
	}
	kind := "<nil>"
	if len(v) > 0 {
		switch v[0] {
		case '{':
			kind = "map[string]interface {}"
		case 't', 'f':
			kind = "bool"
		case 'n':
		default:
			kind = "float64"
		}
	}
	return nil, ollamaRefusal(http.StatusBadRequest, "invalid message content type: %s", kind)
}

// parseOllamaOpenAICompletion reads the body of POST /v1/completions, whose prompt
// Ollama takes for what a user says in a chat.
func parseOllamaOpenAICompletion(cfg *Config, body []byte) (*request, error) {
	type CompletionRequest struct {
		ollamaOpenAI
		Prompt string `json:"prompt"`
		Suffix string `json:"suffix"`
	}
	var b CompletionRequest
	if err := unmarshalOllama(body, &b); err != nil {
		return nil, err
	}
	if list, ok := b.Stop.([]any); ok {
		for _, v := range list {
			if _, ok := v.(string); !ok {
				return nil, ollamaRefusal(http.StatusBadRequest, "invalid type for 'stop' field: %T", v)
			}
		}
	}
	g := ollamaGenerate{ollamaCommon: b.common(), Prompt: b.Prompt, Suffix: b.Suffix}
	r, err := g.request(cfg, body, true)
	if err == nil {
		r.usage = b.StreamOptions != nil && b.StreamOptions.IncludeUsage
	}
	return r, err
}

// parseOllamaOpenAIEmbeddings reads the body of POST /v1/embeddings.
func parseOllamaOpenAIEmbeddings(cfg *Config, body []byte) (*request, error) {
	type EmbedRequest struct {
		Model      string `json:"model"`
		Input      any    `json:"input"`
		Dimensions int    `json:"dimensions"`
		Encoding   string `json:"encoding_format"`
	}
	var b EmbedRequest
	if err := unmarshalOllama(body, &b); err != nil {
		return nil, err
	}
	if b.Encoding != "" && !strings.EqualFold(b.Encoding, "float") && !strings.EqualFold(b.Encoding, "base64") {
		return nil, ollamaRefusal(http.StatusBadRequest, "Invalid value for 'encoding_format' = %s. Supported values: ['float', 'base64'].", b.Encoding)
	}
	var texts []string
	switch input := b.Input.(type) {
	case string:
		texts = []string{input}
	case []any:
		for _, v := range input {
			text, ok := v.(string)
			if !ok {
				return nil, ollamaRefusal(http.StatusBadRequest, "invalid input type")
			}
			texts = append(texts, text)
		}
	}
	if len(texts) == 0 {
		return nil, ollamaRefusal(http.StatusBadRequest, "invalid input")
	}
	c := ollamaCommon{Model: b.Model}
	r, d, err := readOllama(cfg, embeddings, &c, modelUnpulled(b.Model), modelNotFound(b.Model))
	if err != nil {
		return nil, err
	}
	d.openAI = true
	r, err = d.vectors(cfg, r, texts, b.Dimensions, body)
	if err == nil {
		r.pooled.base64 = strings.EqualFold(b.Encoding, "base64")
	}
	return r, err
}
