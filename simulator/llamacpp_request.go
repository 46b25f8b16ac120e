package simulator

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"fmt"
	"net/http"
	"strings"
	"time"
	"unicode/utf8"

	follow "github.com/inferrail/inferrail/proxy/prompt"
	"github.com/inferrail/inferrail/proxy/prompt/tokenizer"
)

// llamaBody is the part of a body that is understood. A null is the same as
// nothing. What changes only how the model draws its words, such as a temperature,
// is taken and shown; the words are the seed's all the same.
type llamaBody struct {
	Messages            *[]message     `json:"messages"`
	Tools               jsontext.Value `json:"tools"`
	ToolChoice          jsontext.Value `json:"tool_choice"`
	Prompt              jsontext.Value `json:"prompt"`
	N                   *int           `json:"n"`
	NCompletions        *int           `json:"n_cmpl"`
	NPredict            *int           `json:"n_predict"`
	MaxTokens           *int           `json:"max_tokens"`
	MaxCompletionTokens *int           `json:"max_completion_tokens"`
	Stop                jsontext.Value `json:"stop"`
	ResponseFormat      jsontext.Value `json:"response_format"`
	Schema              jsontext.Value `json:"json_schema"`
	Stream              *bool          `json:"stream"`
	StreamOptions       *struct {
		IncludeUsage *bool `json:"include_usage"`
	} `json:"stream_options"`
	CachePrompt  *bool `json:"cache_prompt"`
	ReturnTokens *bool `json:"return_tokens"`
	Progress     *bool `json:"return_progress"`
	Timings      *bool `json:"timings_per_token"`
	Slot         *int  `json:"id_slot"`
	PingS        *int  `json:"sse_ping_interval"`
	xargs
	Others others `json:",embed"`
}

// llamaRefused change an answer in ways that the simulated engine has not.
var llamaRefused = []string{"n_probs", "logprobs", "top_logprobs", "post_sampling_probs", "grammar", "grammar_lazy", "lora", "logit_bias",
	"response_fields", "n_indent", "n_cache_reuse", "echo", "suffix", "best_of", "functions", "function_call", "verbose",
	"continue_final_message", "reasoning_control", "input_prefix", "input_suffix", "input_extra"}

// llamaShape is how a route of llama.cpp shows its answers.
type llamaShape uint8

const (
	llamaNative llamaShape = iota
	llamaOpenAI
	llamaChat
)

// readLlama reads a body, and what it says beside its prompt.
func readLlama(cfg *Config, shape llamaShape, body []byte) (*llamaBody, *request, error) {
	var b llamaBody
	if err := unmarshalLlama(body, &b); err != nil {
		return nil, nil, err
	}
	if err := b.Others.refuse(llamaRefused...); err != nil {
		return nil, nil, err
	}
	if v := string(b.Others["t_max_predict_ms"]); v != "-1" {
		if err := b.Others.refuse("t_max_predict_ms"); err != nil {
			return nil, nil, err
		}
	}
	set := func(p *bool) bool { return p != nil && *p }
	d := &llamaDialect{shape: shape, settings: b.Others, limit: -1, slot: -1, stream: set(b.Stream),
		returnTokens: set(b.ReturnTokens), progress: set(b.Progress), timings: set(b.Timings), ping: 30 * time.Second}
	r := &request{api: completions, n: 1, stream: set(b.Stream), opens: withStart, dialect: d}
	if shape == llamaChat {
		r.api = chat
	}
	r.usage = b.StreamOptions != nil && set(b.StreamOptions.IncludeUsage)
	r.noRead = b.CachePrompt != nil && !*b.CachePrompt
	for _, n := range []*int{b.NCompletions, b.N} {
		if n != nil {
			r.n = *n
			break
		}
	}
	if r.n < 1 || r.n > cfg.MaxNumSeqs {
		return nil, nil, llamaField("n_cmpl", "Value must be between 1 <= value <= %d, but got %d", cfg.MaxNumSeqs, r.n)
	}
	for name, n := range map[string]*int{"n_predict": b.NPredict, "max_completion_tokens": b.MaxCompletionTokens, "max_tokens": b.MaxTokens} {
		if n != nil && *n < -1 {
			return nil, nil, llamaField(name, "Value must be between -1 <= value <= 2147483647, but got %d", *n)
		}
	}
	for _, n := range []*int{b.NPredict, b.MaxCompletionTokens, b.MaxTokens} {
		if n != nil {
			d.limit = *n
			break
		}
	}
	if d.limit == 0 {
		return nil, nil, badParameter("n_predict", "The simulated engine does not support `n_predict` 0.")
	}
	if d.limit < 0 {
		// Within a limit the model goes on to it in any case.
		if err := b.Others.refuse("ignore_eos"); err != nil {
			return nil, nil, err
		}
	}
	if b.PingS != nil {
		if *b.PingS < -1 {
			return nil, nil, llamaField("sse_ping_interval", "Value must be between -1 <= value <= 2147483647, but got %d", *b.PingS)
		}
		d.ping = time.Duration(max(0, *b.PingS)) * time.Second
	}
	if b.Slot != nil {
		if d.slot = *b.Slot; d.slot < -1 {
			d.slot = -1
		}
		if d.slot >= cfg.MaxNumSeqs {
			d.slot = -1 // no such slot: any of them
		}
	}
	var err error
	if r.stop, err = readStop("stop", b.Stop); err != nil {
		return nil, nil, err
	}
	d.stop = r.stop
	if len(b.Schema) > 0 && b.Schema.Kind() != 'n' {
		if r.form, err = newForm("json_schema", b.Schema); err != nil {
			return nil, nil, err
		}
	} else if r.form, err = readForm(b.ResponseFormat, nil); err != nil {
		return nil, nil, err
	}
	return &b, r, b.xargs.apply(cfg, r)
}

// unmarshalLlama reads a body as llama.cpp does: what is no JSON is the server's
// failure there.
func unmarshalLlama(body []byte, into any) error {
	err := unmarshal(body, into)
	if e := asLlamaParse(err); e != nil {
		return e
	}
	return err
}

// asLlamaParse makes of a syntax error what llama.cpp answers.
func asLlamaParse(err error) error {
	if err == nil || !strings.Contains(err.Error(), "invalid JSON") {
		return nil
	}
	return &apiError{status: http.StatusInternalServerError, kind: "server_error", param: "", message: "[json.exception.parse_error.101] parse error: " + err.Error()}
}

func llamaField(name, format string, args ...any) *apiError {
	return badParameter(name, "Field '%s': %s", name, fmt.Sprintf(format, args...))
}

// limitLlama decides how many tokens are generated at most: a context that is full
// ends the answer, whatever was asked for.
func limitLlama(cfg *Config, r *request) error {
	longest := 0
	for i := range r.prompts {
		longest = max(longest, r.prompts[i].tokens)
	}
	if longest >= cfg.MaxModelLen {
		return llamaExceeded(longest, cfg.MaxModelLen)
	}
	d := r.dialect.(*llamaDialect)
	left := cfg.MaxModelLen - longest
	r.output, r.finish = d.limit, "length"
	switch {
	case d.limit > left, d.limit < 0 && (cfg.DefaultOutputTokens > left || r.call != nil || r.form != nil):
		r.output, d.cut = left, true
	case d.limit < 0:
		r.output, r.finish = cfg.DefaultOutputTokens, "stop"
	}
	return nil
}

// parseLlamaChat reads the body of POST /v1/chat/completions.
func parseLlamaChat(cfg *Config, body []byte) (*request, error) {
	b, r, err := readLlama(cfg, llamaChat, body)
	if err != nil {
		return nil, err
	}
	text, err := b.render()
	if err != nil {
		return nil, err
	}
	r.prompts = []prompt{chatPrompt(follow.Chat, body, text)}
	var tools []tool
	if b.Tools.Kind() != '[' || strings.Trim(string(b.Tools), "[ \t\r\n]") != "" {
		if tools, err = readTools(b.Tools); err != nil {
			return nil, err
		}
	}
	if string(b.ToolChoice) == `"auto"` && tools == nil {
		b.ToolChoice = nil
	}
	answered := false
	if m := *b.Messages; len(m) > 0 {
		answered = m[len(m)-1].Role == "tool"
	}
	if r.call, err = chooseTool(tools, b.ToolChoice, answered); err != nil {
		return nil, err
	}
	return r, limitLlama(cfg, r)
}

// render returns the simulator's view of the messages.
func (b *llamaBody) render() (string, error) {
	if b.Messages == nil {
		return "", badParameter("messages", "'messages' is required")
	}
	for _, m := range *b.Messages {
		for _, kind := range []string{"image_url", "input_audio", "video_url"} {
			if m.Content.Kind() == '[' && strings.Contains(string(m.Content), `"`+kind+`"`) {
				return "", &apiError{status: http.StatusInternalServerError, kind: "server_error", param: "", message: strings.Split(kind, "_")[0] + " input is not supported - hint: if this is unexpected, you may need to provide the mmproj"}
			}
		}
	}
	return renderChat(&requestBody{Messages: b.Messages, Tools: b.Tools})
}

// parseLlamaCompletion returns the parser of POST /completion or /v1/completions.
func parseLlamaCompletion(shape llamaShape) parser {
	return func(cfg *Config, body []byte) (*request, error) {
		b, r, err := readLlama(cfg, shape, body)
		if err != nil {
			return nil, err
		}
		if r.prompts, err = readLlamaPrompts("prompt", b.Prompt); err != nil {
			return nil, err
		}
		if len(r.prompts)*r.n > maxChoices {
			return nil, badParameter("prompt", "prompt must be at most %d prompts, got %d", maxChoices/r.n, len(r.prompts))
		}
		return r, limitLlama(cfg, r)
	}
}

// readLlamaPrompts reads the prompts in the member name: a text, a list of token
// ids and texts that are one prompt together, or a list of such.
func readLlamaPrompts(name string, v jsontext.Value) ([]prompt, error) {
	wrong := badParameter(name, "%q must be a string, a list of tokens, a list of mixed strings & tokens, or a list of prompts, and not empty", name)
	switch v.Kind() {
	case jsontext.KindInvalid:
		return nil, badParameter(name, "[json.exception.out_of_range.403] key '%s' not found", name)
	case '{':
		return nil, badParameter(name, "The simulated engine does not support a multimodal `%s`.", name)
	case '"':
		p, ok := mixedPrompt([]jsontext.Value{v})
		if !ok {
			return nil, wrong
		}
		return []prompt{p}, nil
	case '[':
		var list []jsontext.Value
		if json.Unmarshal(v, &list) != nil || len(list) == 0 {
			return nil, wrong
		}
		numbers := false
		for _, item := range list {
			numbers = numbers || item.Kind() == '0'
		}
		if numbers {
			p, ok := mixedPrompt(list)
			if !ok {
				return nil, wrong
			}
			return []prompt{p}, nil
		}
		var prompts []prompt
		for _, item := range list {
			parts := []jsontext.Value{item}
			if item.Kind() == '[' && json.Unmarshal(item, &parts) != nil {
				return nil, wrong
			}
			p, ok := mixedPrompt(parts)
			if !ok {
				return nil, wrong
			}
			prompts = append(prompts, p)
		}
		return prompts, nil
	}
	return nil, wrong
}

// mixedPrompt returns the prompt of texts and token ids one after another.
func mixedPrompt(parts []jsontext.Value) (prompt, bool) {
	var all strings.Builder
	ids, onlyText := []int{}, true
	for _, part := range parts {
		var text string
		var id int
		switch {
		case part.Kind() == '"' && json.Unmarshal(part, &text) == nil:
			all.WriteString(text)
			ids = append(ids, tokenIDs(text)...)
		case part.Kind() == '0' && json.Unmarshal(part, &id) == nil && id >= 0 && id < tokenizer.SimVocabulary:
			onlyText = false
			ids = append(ids, id)
		default:
			return prompt{}, false
		}
	}
	if len(ids) == 0 {
		return prompt{}, false
	}
	if onlyText && len(parts) == 1 {
		return textPrompt(all.String()), true
	}
	return idsPrompt(ids), true
}

// parseLlamaEmbeddings returns the parser of POST /v1/embeddings or /embeddings.
func parseLlamaEmbeddings(shape llamaShape) parser {
	return func(cfg *Config, body []byte) (*request, error) {
		if !cfg.LlamaCPP.Embeddings {
			return nil, llamaUnsupported("This server does not support embeddings. Start it with `--embeddings`")
		}
		var b struct {
			Input    jsontext.Value `json:"input"`
			Content  jsontext.Value `json:"content"`
			Encoding *string        `json:"encoding_format"`
			xargs
			Others others `json:",embed"`
		}
		if err := unmarshalLlama(body, &b); err != nil {
			return nil, err
		}
		if err := b.Others.refuse("dimensions"); err != nil {
			return nil, err
		}
		if v := string(b.Others["embd_normalize"]); v != "2" {
			if err := b.Others.refuse("embd_normalize"); err != nil {
				return nil, err
			}
		}
		name, input := "input", b.Input
		d := &llamaDialect{shape: shape}
		if len(input) == 0 {
			name, input, d.shape = "content", b.Content, llamaNative
		}
		if len(input) == 0 {
			return nil, badParameter("input", `"input" or "content" must be provided`)
		}
		r := &request{api: embeddings, n: 1, output: 1, finish: "stop", pooled: &pooled{}, noRead: true, dialect: d}
		switch deref(b.Encoding) {
		case "", "float":
		case "base64":
			r.pooled.base64 = true
		default:
			return nil, badParameter("encoding_format", "The format to return the embeddings in. Can be either float or base64")
		}
		var err error
		if r.prompts, err = readLlamaPrompts(name, input); err != nil {
			return nil, err
		}
		for i := range r.prompts {
			p := &r.prompts[i]
			if p.tokens > cfg.MaxModelLen {
				return nil, llamaExceeded(p.tokens, cfg.MaxModelLen)
			}
			r.pooled.vectors = append(r.pooled.vectors, embed(p.ids(), vectorSize))
		}
		return r, b.xargs.apply(cfg, r)
	}
}

// parseApplyTemplate reads the body of POST /apply-template, which is answered at
// once with the text that a chat of it would have as its prompt.
func parseApplyTemplate(cfg *Config, body []byte) (*request, error) {
	b, _, err := readLlama(cfg, llamaChat, body)
	if err != nil {
		return nil, err
	}
	text, err := b.render()
	if err != nil {
		return nil, err
	}
	if followed, why := model().Rendered(follow.Chat, body, time.Time{}); why == "" {
		text = followed
	}
	r := &request{api: plain, dialect: &llamaDialect{}}
	r.body = append(appendString([]byte(`{"prompt":`), text), '}')
	return r, b.xargs.apply(cfg, r)
}

// llamaTokenize reads the body of POST /tokenize, which is answered at once. The
// model has no token that begins a text, so that add_special changes nothing.
func (s *Server) llamaTokenize(cfg *Config, body []byte) (*request, error) {
	var b struct {
		Content jsontext.Value `json:"content"`
		Pieces  *bool          `json:"with_pieces"`
		xargs
	}
	if err := unmarshalLlama(body, &b); err != nil {
		return nil, err
	}
	out := []byte(`{"tokens":[`)
	if len(b.Content) > 0 {
		parts := []jsontext.Value{b.Content}
		if b.Content.Kind() == '[' {
			parts = nil
			_ = json.Unmarshal(b.Content, &parts)
		}
		n := 0
		for _, part := range parts {
			var text string
			var id int
			switch {
			case part.Kind() == '"' && json.Unmarshal(part, &text) == nil:
			case part.Kind() == '0' && json.Unmarshal(part, &id) == nil:
				text = s.vocabulary.text([]int{id})
			default:
				return nil, badParameter("content", "content must be a string or a list of strings and tokens")
			}
			s.vocabulary.learn(text)
			for _, piece := range tokensOf(text) {
				if n++; n > 1 {
					out = append(out, ',')
				}
				if b.Pieces == nil || !*b.Pieces {
					out = fmt.Appendf(out, "%d", tokenID(piece))
					continue
				}
				out = fmt.Appendf(out, `{"id":%d,"piece":`, tokenID(piece))
				if utf8.ValidString(piece) {
					out = append(appendString(out, piece), '}')
					continue
				}
				out = append(out, '[')
				for i := range len(piece) {
					if i > 0 {
						out = append(out, ',')
					}
					out = fmt.Appendf(out, "%d", piece[i])
				}
				out = append(out, "]}"...)
			}
		}
	}
	r := &request{api: plain, body: append(out, "]}"...), dialect: &llamaDialect{}}
	return r, b.xargs.apply(cfg, r)
}

// llamaDetokenize reads the body of POST /detokenize, which is answered at once.
func (s *Server) llamaDetokenize(cfg *Config, body []byte) (*request, error) {
	var b struct {
		Tokens []int `json:"tokens"`
		xargs
	}
	if err := unmarshalLlama(body, &b); err != nil {
		return nil, err
	}
	for _, id := range b.Tokens {
		if id < 0 || id >= tokenizer.SimVocabulary {
			return nil, badParameter("tokens", "token id %d is not between 0 and %d", id, tokenizer.SimVocabulary-1)
		}
	}
	r := &request{api: plain, dialect: &llamaDialect{}}
	r.body = append(appendString([]byte(`{"content":`), s.vocabulary.text(b.Tokens)), '}')
	return r, b.xargs.apply(cfg, r)
}
