package simulator

import (
	"net/http"
	"strconv"
	"time"
)

// llamaDialect writes the answers of llama.cpp. A request has one of its own, which
// its exchange uses from one goroutine at a time, and the page of slots reads; what
// both use is not changed once the request is read.
type llamaDialect struct {
	shape llamaShape
	// limit is n_predict, -1 for none. cut: the context is full before.
	limit int
	cut   bool
	stop  []string
	// settings are what the request says beside what is understood.
	settings others
	// slot is the one asked for, -1 for any.
	slot                                    int
	stream, returnTokens, progress, timings bool
	// ping is after how long without an event a comment keeps the connection
	// open; 0 is never.
	ping time.Duration

	// told is how much of the prompt a stream has told to be processed, and
	// progressAt when more is.
	told int
}

// llamaBatch is how many tokens of a prompt are computed at a time.
const llamaBatch = 2048

// head implements dialect.
func (d *llamaDialect) head(h http.Header, a *answer) {
	if a.req.stream {
		h.Set("Content-Type", "text/event-stream")
		return
	}
	h.Set("Content-Type", llamaType)
}

// appendPart implements dialect.
func (d *llamaDialect) appendPart(dst []byte, a *answer, m moment, i int) []byte {
	start := len(dst)
	switch m {
	case atPrelude:
		if d.progress {
			d.told = a.choices[0].cached
			dst = d.appendProgress(dst, a)
		}
	case atInterim:
		if c := &a.choices[0]; d.progress && d.told < c.tokens && c.sent == 0 && a.clock >= d.progressDue(a) {
			d.told = min(d.told+llamaBatch, c.tokens)
			dst = d.appendProgress(dst, a)
		} else {
			dst = append(dst, ":\n\n"...)
		}
	case atOpening:
		for c := &a.choices[0]; d.progress && d.told < c.tokens; {
			d.told = min(d.told+llamaBatch, c.tokens)
			dst = d.appendProgress(dst, a)
		}
		if d.shape == llamaChat {
			for i := range a.choices {
				dst = d.appendChunk(dst, a, i)
				dst = append(dst, `"delta":{"role":"assistant","content":null}}`...)
				dst = d.appendChunkEnd(dst, a)
			}
		}
	case atToken:
		dst = d.appendToken(dst, a, i)
	case atClosing:
		dst = d.appendClosing(dst, a)
	case atFailure:
		dst = append(dst, "data: "...)
		dst = appendLlamaError(dst, a.failed)
		dst = append(dst, "\n\n"...)
	}
	if len(dst) > start || m == atPrelude || m == atInterim {
		d.schedule(a)
	}
	return dst
}

// schedule decides when the stream says something again, though no token comes.
func (d *llamaDialect) schedule(a *answer) {
	a.interim = 0
	if d.ping > 0 {
		a.interim = a.clock + d.ping
	}
	if c := &a.choices[0]; d.progress && c.sent == 0 && d.told < c.tokens {
		if due := d.progressDue(a); a.interim == 0 || due < a.interim {
			a.interim = due
		}
	}
}

// progressDue is when the next batch of the prompt is computed: the prefill is
// taken to be equally fast all along.
func (d *llamaDialect) progressDue(a *answer) time.Duration {
	c := &a.choices[0]
	part := float64(min(d.told+llamaBatch, c.tokens)-c.cached) / float64(max(c.tokens-c.cached, 1))
	return c.began + time.Duration(part*float64(c.computed-c.began))
}

// appendProgress appends the event that tells how far the prompt is.
func (d *llamaDialect) appendProgress(dst []byte, a *answer) []byte {
	c := &a.choices[0]
	switch d.shape {
	case llamaChat:
		dst = d.appendChunk(dst, a, 0)
		dst = append(dst, `"delta":{"role":"assistant","content":null}}`...)
		dst = d.appendChunkFields(dst, a)
	case llamaOpenAI:
		dst = d.appendText(dst, a, 0)
		dst = append(dst, `"","index":0,"logprobs":null,"finish_reason":null}`...)
		dst = d.appendChunkFields(dst, a)
	default:
		dst = d.appendNative(dst, a, 0)
		dst = append(dst, `"","tokens":[0],"stop":false`...)
		dst = d.appendCounts(dst, a, 0)
	}
	dst = append(dst, `,"prompt_progress":{"total":`...)
	dst = strconv.AppendInt(dst, int64(c.tokens), 10)
	dst = append(dst, `,"cache":`...)
	dst = strconv.AppendInt(dst, int64(c.cached), 10)
	dst = append(dst, `,"processed":`...)
	dst = strconv.AppendInt(dst, int64(d.told), 10)
	dst = append(dst, `,"time_ms":`...)
	dst = strconv.AppendInt(dst, int64(max(0, a.clock-c.began)/time.Millisecond), 10)
	return append(dst, "}}\n\n"...)
}

// appendToken appends the event of the next token of choice i, if it has any text.
func (d *llamaDialect) appendToken(dst []byte, a *answer, i int) []byte {
	c := &a.choices[i]
	k := c.sent
	last := k == c.seq.Output-1
	c.sent++
	switch d.shape {
	case llamaChat:
		switch {
		case c.call != nil:
			dst = d.appendChunk(dst, a, i)
			dst = append(dst, `"delta":{"tool_calls":[{"index":0`...)
			if k == 0 {
				dst = append(dst, `,"id":`...)
				dst = appendString(dst, d.callID(c))
				dst = append(dst, `,"type":"function","function":{"name":`...)
				dst = appendString(dst, c.call.Name)
			} else {
				dst = append(dst, `,"function":{"arguments":"`...)
				dst = append(c.appendEscaped(dst, k), '"')
			}
			dst = append(dst, "}}]}}"...)
		case c.token(k) == "":
			return dst
		default:
			dst = d.appendChunk(dst, a, i)
			dst = append(dst, `"delta":{"content":"`...)
			dst = c.appendEscaped(dst, k)
			dst = append(dst, `"}}`...)
		}
		dst = d.appendChunkFields(dst, a)
	case llamaOpenAI:
		dst = d.appendText(dst, a, i)
		dst = append(dst, '"')
		dst = c.appendEscaped(dst, k)
		dst = append(dst, `","index":`...)
		dst = strconv.AppendInt(dst, int64(i), 10)
		dst = append(dst, `,"logprobs":null,"finish_reason":null}`...)
		dst = d.appendChunkFields(dst, a)
	default:
		dst = d.appendNative(dst, a, i)
		dst = append(dst, '"')
		dst = c.appendEscaped(dst, k)
		dst = append(dst, `","tokens":[`...)
		dst = strconv.AppendInt(dst, int64(c.id(k)), 10)
		dst = append(dst, `],"stop":false`...)
		dst = d.appendCounts(dst, a, i)
	}
	// What ends with a stop text knows it before it is shown.
	if d.timings || last && c.stopped != "" {
		dst = d.appendTimings(dst, a, c, k+1)
	}
	return append(dst, "}\n\n"...)
}

// id returns the number of token k.
func (c *choice) id(k int) int {
	if c.script == nil || c.stopped != "" {
		return int(c.voice.word(k).id)
	}
	return tokenID(c.script[k])
}

func (d *llamaDialect) callID(c *choice) string { return llamaID(c.voice.seed + 2) }

// llamaID returns an id of 32 letters and digits that stands for a number.
func llamaID(n uint64) string {
	const letters = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
	id := make([]byte, 32)
	for i := range id {
		n += golden
		id[i] = letters[mix(n)%uint64(len(letters))]
	}
	return string(id)
}

// appendClosing appends the events of the end: for each choice a final one, and what
// it has used, if that was asked for.
func (d *llamaDialect) appendClosing(dst []byte, a *answer) []byte {
	for i := range a.choices {
		c := &a.choices[i]
		switch d.shape {
		case llamaChat:
			dst = d.appendChunkOf(dst, a, i, c.finish)
			dst = append(dst, `"delta":{}}`...)
			dst = d.appendChunkFields(dst, a)
			if a.req.usage {
				dst = append(dst, "}\n\n"+`data: {"choices":[`...)
				dst = d.appendChunkFields(dst, a)
				dst = append(dst, `,"usage":`...)
				dst = d.appendUsage(dst, a, c.seq.Output)
			}
			dst = d.appendTimings(dst, a, c, c.seq.Output)
		case llamaOpenAI:
			dst = d.appendText(dst, a, i)
			dst = append(dst, `"","index":`...)
			dst = strconv.AppendInt(dst, int64(i), 10)
			dst = append(dst, `,"logprobs":null,"finish_reason":"`...)
			dst = append(dst, c.finish...)
			dst = append(dst, `"}`...)
			dst = d.appendChunkFields(dst, a)
			dst = append(dst, `,"usage":`...)
			dst = d.appendUsage(dst, a, c.seq.Output)
			dst = d.appendTimings(dst, a, c, c.seq.Output)
		default:
			dst = append(dst, "data: "...)
			dst = d.appendFinal(dst, a, i, 0)
			dst = append(dst, "\n\n"...)
			continue
		}
		dst = append(dst, "}\n\n"...)
	}
	if d.shape != llamaNative {
		dst = append(dst, done...)
	}
	return dst
}

// appendChunk appends the beginning of a chunk of choice i.
func (d *llamaDialect) appendChunk(dst []byte, a *answer, i int) []byte {
	return d.appendChunkOf(dst, a, i, "")
}

func (d *llamaDialect) appendChunkOf(dst []byte, _ *answer, i int, finish string) []byte {
	dst = append(dst, `data: {"choices":[{"finish_reason":`...)
	if finish == "" {
		dst = append(dst, "null"...)
	} else {
		dst = append(append(append(dst, '"'), finish...), '"')
	}
	dst = append(dst, `,"index":`...)
	dst = strconv.AppendInt(dst, int64(i), 10)
	return append(dst, ',')
}

// appendText appends the beginning of a chunk of a completion, up to its text.
func (d *llamaDialect) appendText(dst []byte, _ *answer, _ int) []byte {
	return append(dst, `data: {"choices":[{"text":`...)
}

// appendChunkFields appends what follows the choices of a chunk.
func (d *llamaDialect) appendChunkFields(dst []byte, a *answer) []byte {
	dst = append(dst, `],"created":`...)
	dst = strconv.AppendInt(dst, a.created, 10)
	if d.shape == llamaChat {
		dst = d.appendID(dst, a)
	}
	dst = append(dst, `,"model":`...)
	dst = appendString(dst, a.model)
	dst = append(dst, `,"system_fingerprint":"`+llamacppBuild+`","object":"`...)
	if d.shape == llamaChat {
		return append(dst, `chat.completion.chunk"`...)
	}
	dst = append(dst, `text_completion"`...)
	return d.appendID(dst, a)
}

func (d *llamaDialect) appendChunkEnd(dst []byte, a *answer) []byte {
	dst = d.appendChunkFields(dst, a)
	return append(dst, "}\n\n"...)
}

// appendID appends the member id. It stands for the request's own, if it has one.
func (d *llamaDialect) appendID(dst []byte, a *answer) []byte {
	dst = append(dst, `,"id":"chatcmpl-`...)
	return append(append(dst, llamaID(hashText(a.id))...), '"')
}

// appendNative appends the beginning of an event of /completion, up to its content.
func (d *llamaDialect) appendNative(dst []byte, _ *answer, i int) []byte {
	dst = append(dst, `data: {"index":`...)
	dst = strconv.AppendInt(dst, int64(i), 10)
	return append(dst, `,"content":`...)
}

// appendCounts appends what an event of /completion counts.
func (d *llamaDialect) appendCounts(dst []byte, a *answer, i int) []byte {
	c := &a.choices[i]
	dst = append(dst, `,"id_slot":`...)
	dst = strconv.AppendInt(dst, int64(c.slot), 10)
	dst = append(dst, `,"tokens_predicted":`...)
	dst = strconv.AppendInt(dst, int64(c.sent), 10)
	dst = append(dst, `,"tokens_evaluated":`...)
	return strconv.AppendInt(dst, int64(c.tokens), 10)
}

// appendUsage appends the usage of so many tokens.
func (d *llamaDialect) appendUsage(dst []byte, a *answer, output int) []byte {
	dst = append(dst, `{"completion_tokens":`...)
	dst = strconv.AppendInt(dst, int64(output), 10)
	prompt := a.choices[0].tokens
	dst = append(dst, `,"prompt_tokens":`...)
	dst = strconv.AppendInt(dst, int64(prompt), 10)
	dst = append(dst, `,"total_tokens":`...)
	dst = strconv.AppendInt(dst, int64(prompt+output), 10)
	dst = append(dst, `,"prompt_tokens_details":{"cached_tokens":`...)
	dst = strconv.AppendInt(dst, int64(a.choices[0].cached), 10)
	return append(dst, "}}"...)
}

// took returns how long the prompt and n tokens after it took.
func (c *choice) took(a *answer, n int) (prompt, predicted time.Duration) {
	if n == 0 || c.computed < c.began {
		return 0, 0
	}
	return c.computed - c.began, max(0, a.clock-c.computed)
}

// appendTimings appends the member timings of a choice with n tokens.
func (d *llamaDialect) appendTimings(dst []byte, a *answer, c *choice, n int) []byte {
	prompt, predicted := c.took(a, n)
	dst = append(dst, `,"timings":{"cache_n":`...)
	dst = strconv.AppendInt(dst, int64(c.cached), 10)
	dst = appendRate(dst, "prompt", c.tokens-c.cached, prompt)
	dst = appendRate(dst, "predicted", n, predicted)
	return append(dst, '}')
}

// appendRate appends how long so many tokens took, in the words of timings.
func appendRate(dst []byte, name string, n int, took time.Duration) []byte {
	ms := float64(took) / float64(time.Millisecond)
	each, rate := 0.0, 0.0
	if n > 0 {
		each = ms / float64(n)
	}
	if ms > 0 {
		rate = 1e3 / ms * float64(n)
	}
	dst = append(append(append(dst, `,"`...), name...), `_n":`...)
	dst = strconv.AppendInt(dst, int64(n), 10)
	for _, m := range []struct {
		name  string
		value float64
	}{{"ms", ms}, {"per_token_ms", each}, {"per_second", rate}} {
		dst = append(append(append(append(append(dst, `,"`...), name...), '_'), m.name...), `":`...)
		dst = appendDouble(dst, m.value)
	}
	return dst
}

// appendDouble appends a number that is seen to be no integer.
func appendDouble(dst []byte, v float64) []byte {
	start := len(dst)
	dst = strconv.AppendFloat(dst, v, 'g', -1, 64)
	for _, b := range dst[start:] {
		if b == '.' || b == 'e' {
			return dst
		}
	}
	return append(dst, ".0"...)
}

// appendFinal appends the last event of /completion, or its body.
func (d *llamaDialect) appendFinal(dst []byte, a *answer, i, pad int) []byte {
	c := &a.choices[i]
	dst = append(dst, `{"index":`...)
	dst = strconv.AppendInt(dst, int64(i), 10)
	dst = append(dst, `,"content":"`...)
	newLine := false
	for k := range c.seq.Output {
		newLine = newLine || c.token(k) == "\n"
		if !a.req.stream {
			dst = c.appendEscaped(dst, k)
		}
	}
	dst = append(appendX(dst, pad), `","tokens":[`...)
	for k := 0; d.returnTokens && !a.req.stream && k < c.seq.Output; k++ {
		if k > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendInt(dst, int64(c.id(k)), 10)
	}
	dst = append(dst, `],"id_slot":`...)
	dst = strconv.AppendInt(dst, int64(c.slot), 10)
	dst = append(dst, `,"stop":true,"model":`...)
	dst = appendString(dst, a.model)
	dst = append(dst, `,"tokens_predicted":`...)
	dst = strconv.AppendInt(dst, int64(c.seq.Output), 10)
	dst = append(dst, `,"tokens_evaluated":`...)
	dst = strconv.AppendInt(dst, int64(c.tokens), 10)
	dst = append(dst, `,"generation_settings":`...)
	dst = appendLlamaSettings(dst, d, false)
	dst = append(dst, `,"prompt":`...)
	dst = appendString(dst, a.req.prompts[i/a.req.n].text)
	dst = append(dst, `,"has_new_line":`...)
	dst = strconv.AppendBool(dst, newLine)
	dst = append(dst, `,"truncated":`...)
	dst = strconv.AppendBool(dst, d.cut && c.finish == "length")
	dst = append(dst, `,"stop_type":"`...)
	dst = append(dst, d.stopType(c)...)
	dst = append(dst, `","stopping_word":`...)
	dst = appendString(dst, c.stopped)
	dst = append(dst, `,"tokens_cached":`...)
	dst = strconv.AppendInt(dst, int64(c.tokens+c.seq.Output-1), 10)
	dst = d.appendTimings(dst, a, c, c.seq.Output)
	return append(dst, '}')
}

// stopType is why a choice ended.
func (d *llamaDialect) stopType(c *choice) string {
	switch {
	case c.stopped != "":
		return "word"
	case c.finish == "length":
		return "limit"
	}
	return "eos"
}

// appendWhole implements dialect.
func (d *llamaDialect) appendWhole(dst []byte, a *answer, pad int) []byte {
	switch {
	case a.req.api == plain:
		dst = append(dst, a.req.body...)
		for range pad {
			dst = append(dst, ' ')
		}
		return dst
	case a.req.pooled != nil:
		dst = d.appendVectors(dst, a)
		for range pad {
			dst = append(dst, ' ')
		}
		return dst
	case d.shape == llamaNative:
		if len(a.choices) == 1 {
			return d.appendFinal(dst, a, 0, pad)
		}
		dst = append(dst, '[')
		for i := range a.choices {
			if i > 0 {
				dst, pad = append(dst, ','), 0
			}
			dst = d.appendFinal(dst, a, i, pad)
		}
		return append(dst, ']')
	}
	dst = append(dst, `{"choices":[`...)
	for i := range a.choices {
		c := &a.choices[i]
		if i > 0 {
			dst, pad = append(dst, ','), 0
		}
		if d.shape == llamaOpenAI {
			dst = append(dst, `{"text":"`...)
			dst = c.appendWholeText(dst, pad)
			dst = append(dst, `","index":`...)
			dst = strconv.AppendInt(dst, int64(i), 10)
			dst = append(dst, `,"logprobs":null,"finish_reason":"`...)
			dst = append(dst, c.finish...)
			dst = append(dst, `"}`...)
			continue
		}
		dst = append(dst, `{"finish_reason":"`...)
		dst = append(dst, c.finish...)
		dst = append(dst, `","index":`...)
		dst = strconv.AppendInt(dst, int64(i), 10)
		dst = append(dst, `,"message":{"role":"assistant","content":`...)
		if c.call == nil {
			dst = append(dst, '"')
			dst = c.appendWholeText(dst, pad)
			dst = append(dst, `"}}`...)
			continue
		}
		dst = append(dst, `null,"tool_calls":[{"type":"function","function":{"name":`...)
		dst = appendString(dst, c.call.Name)
		dst = append(dst, `,"arguments":`...)
		dst = appendString(dst, c.text())
		dst = append(dst, `},"id":`...)
		dst = appendString(dst, d.callID(c))
		dst = append(dst, "}]}}"...)
	}
	dst = append(dst, `],"created":`...)
	dst = strconv.AppendInt(dst, a.created, 10)
	dst = append(dst, `,"model":`...)
	dst = appendString(dst, a.model)
	dst = append(dst, `,"system_fingerprint":"`+llamacppBuild+`","object":"`...)
	if d.shape == llamaChat {
		dst = append(dst, "chat.completion"...)
	} else {
		dst = append(dst, "text_completion"...)
	}
	dst = append(dst, `","usage":`...)
	// It is that of the first.
	dst = d.appendUsage(dst, a, a.choices[0].seq.Output)
	dst = d.appendID(dst, a)
	dst = d.appendTimings(dst, a, &a.choices[0], a.choices[0].seq.Output)
	return append(dst, '}')
}

// appendWholeText appends all of the text as it stands inside a JSON string, and pad
// x's.
func (c *choice) appendWholeText(dst []byte, pad int) []byte {
	for k := range c.seq.Output {
		dst = c.appendEscaped(dst, k)
	}
	return appendX(dst, pad)
}

// appendVectors appends the body of embeddings.
func (d *llamaDialect) appendVectors(dst []byte, a *answer) []byte {
	if d.shape == llamaNative {
		dst = append(dst, '[')
		for i, v := range a.req.pooled.vectors {
			if i > 0 {
				dst = append(dst, ',')
			}
			dst = append(dst, `{"index":`...)
			dst = strconv.AppendInt(dst, int64(i), 10)
			dst = append(dst, `,"embedding":[`...)
			dst = appendFloats(dst, v)
			dst = append(dst, "]}"...)
		}
		return append(dst, ']')
	}
	dst = appendString(append(dst, `{"model":`...), a.model)
	dst = append(dst, `,"object":"list","usage":{"prompt_tokens":`...)
	dst = strconv.AppendInt(dst, int64(a.promptTokens()), 10)
	dst = append(dst, `,"total_tokens":`...)
	dst = strconv.AppendInt(dst, int64(a.promptTokens()), 10)
	dst = append(dst, `},"data":[`...)
	for i, v := range a.req.pooled.vectors {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(dst, `{"embedding":`...)
		if a.req.pooled.base64 {
			dst = appendBase64(dst, v)
		} else {
			dst = appendFloats(dst, v)
		}
		dst = append(dst, `,"index":`...)
		dst = strconv.AppendInt(dst, int64(i), 10)
		dst = append(dst, `,"object":"embedding"}`...)
	}
	return append(dst, "]}"...)
}

// llamaSettings are the members of generation_settings in their order, with what
// they are when nothing is said. Those that long stands for are left out on pages.
var llamaSettings = []struct {
	name, value string
	long        bool
}{
	{"seed", "4294967295", false}, {"temperature", "0.800000011920929", false}, {"dynatemp_range", "0.0", false},
	{"dynatemp_exponent", "1.0", false}, {"top_k", "40", false}, {"top_p", "0.949999988079071", false},
	{"min_p", "0.05000000074505806", false}, {"top_n_sigma", "-1.0", false}, {"xtc_probability", "0.0", false},
	{"xtc_threshold", "0.10000000149011612", false}, {"typical_p", "1.0", false}, {"repeat_last_n", "64", false},
	{"repeat_penalty", "1.0", false}, {"presence_penalty", "0.0", false}, {"frequency_penalty", "0.0", false},
	{"dry_multiplier", "0.0", false}, {"dry_base", "1.75", false}, {"dry_allowed_length", "2", false},
	{"dry_penalty_last_n", "-1", false}, {"dry_sequence_breakers", `["\n",":","\"","*"]`, true}, {"mirostat", "0", false},
	{"mirostat_tau", "5.0", false}, {"mirostat_eta", "0.10000000149011612", false}, {"stop", "", true}, {"max_tokens", "", false},
	{"n_predict", "", false}, {"n_keep", "0", false}, {"n_discard", "0", false}, {"ignore_eos", "false", false},
	{"stream", "", false}, {"logit_bias", "[]", true}, {"n_probs", "0", false}, {"min_keep", "0", false}, {"grammar", `""`, true},
	{"grammar_lazy", "false", true}, {"grammar_triggers", "[]", true}, {"preserved_tokens", "[]", true},
	{"chat_format", `"Content-only"`, false}, {"reasoning_format", `"none"`, false}, {"reasoning_in_content", "false", false},
	{"samplers", `["penalties","dry","top_n_sigma","top_k","typ_p","top_p","min_p","xtc","temperature"]`, false},
	{"timings_per_token", "", false}, {"post_sampling_probs", "false", false}, {"backend_sampling", "false", false}, {"lora", "[]", false},
}

// appendLlamaSettings appends what a request is generated with. short leaves out
// what pages do not show.
func appendLlamaSettings(dst []byte, d *llamaDialect, short bool) []byte {
	dst = append(dst, '{')
	first := true
	for _, s := range llamaSettings {
		if short && s.long {
			continue
		}
		if !first {
			dst = append(dst, ',')
		}
		first = false
		dst = append(append(append(dst, '"'), s.name...), `":`...)
		given := d.settings[s.name]
		switch {
		case s.name == "n_predict" || s.name == "max_tokens":
			dst = strconv.AppendInt(dst, int64(d.limit), 10)
		case s.name == "stop":
			dst = append(dst, '[')
			for i, text := range d.stop {
				if i > 0 {
					dst = append(dst, ',')
				}
				dst = appendString(dst, text)
			}
			dst = append(dst, ']')
		case s.name == "stream":
			dst = strconv.AppendBool(dst, d.stream)
		case s.name == "timings_per_token":
			dst = strconv.AppendBool(dst, d.timings)
		case len(given) > 0 && given.Kind() != 'n':
			dst = append(dst, given...)
		default:
			dst = append(dst, s.value...)
		}
	}
	return append(dst, '}')
}
