package simulator

import (
	"encoding/json/jsontext"
	"net/http"
	"strconv"
	"time"
)

// ollamaDialect writes the answers of Ollama. A request has one of its own, which
// its exchange uses from one goroutine at a time.
type ollamaDialect struct {
	// model is its name as the request has it, which is how answers name it, and
	// name as it is known.
	model, name string
	// openAI: the route is one of OpenAI's. chat: there are messages. raw: the
	// prompt is no chat. embed: nothing is generated. single: of one vector.
	openAI, chat, raw, embed, single bool
	// What the model is loaded with and for how long; unloads: it is taken out of
	// memory.
	options   runnerOptions
	keepAlive *time.Duration
	unloads   bool
	// limit is num_predict, -1 for none, keep num_keep. truncate cuts what is too
	// long for the context, shift what is generated beyond it.
	limit, keep     int
	truncate, shift bool
	// created, when not 0, stands as the time in every line.
	created int64

	// loaded is when the model was in memory, in the engine's time.
	loaded time.Duration
	// opened: the role was told, which the first chunk does.
	opened bool
}

// head implements dialect.
func (d *ollamaDialect) head(h http.Header, a *answer) {
	switch {
	case d.openAI && a.req.stream:
		h.Set("Content-Type", "text/event-stream")
	case d.openAI:
		h.Set("Content-Type", "application/json")
	case a.req.stream:
		h.Set("Content-Type", "application/x-ndjson")
	default:
		h.Set("Content-Type", ollamaType)
	}
}

// appendPart implements dialect.
func (d *ollamaDialect) appendPart(dst []byte, a *answer, m moment, _ int) []byte {
	switch m {
	case atToken:
		return d.appendToken(dst, a)
	case atClosing:
		return d.appendClosing(dst, a)
	case atFailure:
		if d.openAI {
			// Its layer for OpenAI's routes takes the line for a chunk with nothing
			// in it, and that is the end.
			d.model = ""
			return append(d.appendChunk(dst, a, appendEmpty, nil), "\n\n"...)
		}
		return append(appendOllamaError(dst, a.failed), '\n')
	}
	return dst
}

// appendEmpty appends an empty text.
func appendEmpty(dst []byte) []byte { return append(dst, '"', '"') }

// appendToken appends what the next token has to show.
func (d *ollamaDialect) appendToken(dst []byte, a *answer) []byte {
	c := &a.choices[0]
	k := c.sent
	c.sent++
	if c.call != nil {
		// A call is held back until it is whole.
		if k < c.seq.Output-1 || c.finish != "tool_calls" {
			return dst
		}
		return d.appendDelta(dst, a, appendEmpty, c)
	}
	if c.token(k) == "" {
		return dst
	}
	return d.appendDelta(dst, a, func(dst []byte) []byte {
		return append(c.appendEscaped(append(dst, '"'), k), '"')
	}, nil)
}

// appendDelta appends a line or event with a text, a JSON string that text appends,
// or with the call of a choice.
func (d *ollamaDialect) appendDelta(dst []byte, a *answer, text func([]byte) []byte, call *choice) []byte {
	start := len(dst)
	if d.openAI {
		dst = d.appendChunk(dst, a, text, call)
		return append(escapeHTML(dst, start), "\n\n"...)
	}
	dst = d.appendLine(dst, a, text, call)
	return append(escapeHTML(dst, start), `,"done":false}`+"\n"...)
}

// appendLine appends the beginning of a line, up to its text.
func (d *ollamaDialect) appendLine(dst []byte, a *answer, text func([]byte) []byte, call *choice) []byte {
	dst = appendString(append(dst, `{"model":`...), d.model)
	dst = append(dst, `,"created_at":"`...)
	now := time.Now()
	if d.created != 0 {
		now = time.Unix(d.created, 0)
	}
	dst = now.UTC().AppendFormat(dst, time.RFC3339Nano)
	switch {
	case d.embed:
		return append(dst, '"')
	case !d.chat:
		return text(append(dst, `","response":`...))
	}
	dst = text(append(dst, `","message":{"role":"assistant","content":`...))
	if call != nil {
		dst = append(dst, `,"tool_calls":[{"id":"`...)
		dst = append(dst, d.callID(call)...)
		dst = append(dst, `","function":{"index":0,"name":`...)
		dst = appendString(dst, call.call.Name)
		dst = append(dst, `,"arguments":`...)
		dst = append(dst, compact(jsontext.Value(call.text()))...)
		dst = append(dst, "}}]"...)
	}
	return append(dst, '}')
}

// callID names a call, as call_ and eight letters and digits.
func (d *ollamaDialect) callID(c *choice) string {
	const letters = "abcdefghijklmnopqrstuvwxyz0123456789"
	id := []byte("call_")
	n := c.voice.seed + 2
	for range 8 {
		n += golden
		id = append(id, letters[mix(n)%uint64(len(letters))])
	}
	return string(id)
}

// appendChunk appends an event of OpenAI's stream, but for what ends it.
func (d *ollamaDialect) appendChunk(dst []byte, a *answer, text func([]byte) []byte, call *choice) []byte {
	dst = d.appendEvent(dst, a)
	if !d.chat {
		dst = text(append(dst, `"choices":[{"text":`...))
		return d.appendTextEnd(dst, a, "")
	}
	dst = d.appendFields(dst)
	dst = append(dst, `"choices":[{"index":0,"delta":{`...)
	if !d.opened {
		d.opened = true
		dst = append(dst, `"role":"assistant",`...)
	}
	dst = text(append(dst, `"content":`...))
	if call != nil {
		dst = d.appendOpenAICall(append(dst, ','), call)
	}
	return append(dst, `},"finish_reason":null}]}`...)
}

// appendEvent appends the beginning of an event.
func (d *ollamaDialect) appendEvent(dst []byte, a *answer) []byte {
	return d.appendStart(append(dst, "data: "...), a, true)
}

// appendStart appends the beginning of an OpenAI object.
func (d *ollamaDialect) appendStart(dst []byte, a *answer, chunk bool) []byte {
	id, object := `{"id":"cmpl-`, "text_completion"
	if d.chat {
		if id, object = `{"id":"chatcmpl-`, "chat.completion"; chunk {
			object = "chat.completion.chunk"
		}
	}
	// They are drawn from a few hundred, so that different answers may have one.
	dst = strconv.AppendUint(append(dst, id...), hashText(a.id)%999, 10)
	dst = append(append(append(dst, `","object":"`...), object...), `","created":`...)
	dst = strconv.AppendInt(dst, a.created, 10)
	return append(dst, ',')
}

// appendFields appends who has answered.
func (d *ollamaDialect) appendFields(dst []byte) []byte {
	dst = appendString(append(dst, `"model":`...), d.model)
	return append(dst, `,"system_fingerprint":"fp_ollama",`...)
}

// appendTextEnd appends what follows the text of a completion's chunk.
func (d *ollamaDialect) appendTextEnd(dst []byte, a *answer, finish string) []byte {
	dst = append(dst, `,"index":0,"finish_reason":`...)
	if finish == "" {
		dst = append(dst, "null"...)
	} else {
		dst = append(append(append(dst, '"'), finish...), '"')
	}
	dst = d.appendFields(append(dst, "}],"...))
	dst = dst[:len(dst)-1]
	if a.req.usage {
		dst = append(dst, `,"usage":{"prompt_tokens":0,"completion_tokens":0,"total_tokens":0}`...)
	}
	return append(dst, '}')
}

func (d *ollamaDialect) appendOpenAICall(dst []byte, c *choice) []byte {
	dst = append(dst, `"tool_calls":[{"id":"`...)
	dst = append(dst, d.callID(c)...)
	dst = append(dst, `","index":0,"type":"function","function":{"name":`...)
	dst = appendString(dst, c.call.Name)
	dst = append(dst, `,"arguments":`...)
	dst = appendString(dst, string(compact(jsontext.Value(c.text()))))
	return append(dst, "}}]"...)
}

// doneReason is why the choice ended, in Ollama's words.
func (c *choice) doneReason() string {
	if c.finish == "tool_calls" {
		return "stop"
	}
	return c.finish
}

// held is what a call that was cut off has said, which is shown at the end.
func (c *choice) held() string {
	if c.call == nil || c.finish == "tool_calls" {
		return ""
	}
	return `{"name": "` + c.call.Name + `", "arguments": ` + c.text()
}

// appendClosing appends the last line, or OpenAI's last events.
func (d *ollamaDialect) appendClosing(dst []byte, a *answer) []byte {
	c := &a.choices[0]
	start := len(dst)
	held := func(dst []byte) []byte { return appendString(dst, c.held()) }
	switch {
	case !d.openAI:
		dst = d.appendLine(dst, a, held, nil)
		dst = escapeHTML(dst, start)
		dst = d.appendDone(dst, a)
		return append(dst, '\n')
	case d.chat:
		if !d.opened || c.held() != "" {
			dst = append(d.appendChunk(dst, a, held, nil), "\n\n"...)
		}
		dst = d.appendEvent(dst, a)
		dst = d.appendFields(dst)
		dst = append(dst, `"choices":[{"index":0,"delta":{},"finish_reason":"`...)
		dst = append(dst, c.finish...)
		dst = append(dst, `"}]}`+"\n\n"...)
		if a.req.usage {
			dst = d.appendEvent(dst, a)
			dst = d.appendFields(dst)
			dst = d.appendUsage(append(dst, `"choices":[],`...), c)
			dst = append(dst, "}\n\n"...)
		}
	default:
		dst = d.appendEvent(dst, a)
		dst = held(append(dst, `"choices":[{"text":`...))
		dst = append(d.appendTextEnd(dst, a, c.finish), "\n\n"...)
		if a.req.usage {
			dst = d.appendEvent(dst, a)
			dst = d.appendFields(append(dst, `"choices":[],`...))
			dst = d.appendUsage(dst, c)
			dst = append(dst, "}\n\n"...)
		}
	}
	return append(escapeHTML(dst, start), done...)
}

// appendUsage appends the member usage. All of the prompt counts, cached or not.
func (d *ollamaDialect) appendUsage(dst []byte, c *choice) []byte {
	dst = append(dst, `"usage":{"prompt_tokens":`...)
	dst = strconv.AppendInt(dst, int64(c.tokens), 10)
	dst = append(dst, `,"completion_tokens":`...)
	dst = strconv.AppendInt(dst, int64(c.seq.Output), 10)
	dst = append(dst, `,"total_tokens":`...)
	return append(strconv.AppendInt(dst, int64(c.tokens+c.seq.Output), 10), '}')
}

// appendDone appends the end of the last line: what was done and how long it took.
// prompt_eval_count is all of the prompt, what was cached included: Ollama adds up
// what llama.cpp has cached and computed. The times are those of what was computed.
func (d *ollamaDialect) appendDone(dst []byte, a *answer) []byte {
	c := &a.choices[0]
	dst = append(dst, `,"done":true,"done_reason":"`...)
	dst = append(append(dst, c.doneReason()...), '"')
	if !d.chat && !d.raw {
		dst = append(dst, `,"context":[`...)
		for _, id := range c.seq.Prompt {
			dst = append(strconv.AppendUint(dst, uint64(id), 10), ',')
		}
		for k := range c.seq.Output {
			dst = append(strconv.AppendInt(dst, int64(c.id(k)), 10), ',')
		}
		dst = append(dst[:len(dst)-1], ']')
	}
	prompt, predicted := c.took(a, c.seq.Output)
	dst = appendNonzero(dst, "total_duration", int64(a.clock-a.arrived))
	dst = appendNonzero(dst, "load_duration", int64(d.loaded-a.arrived))
	dst = appendNonzero(dst, "prompt_eval_count", int64(c.tokens))
	dst = appendNonzero(dst, "prompt_eval_duration", int64(prompt))
	dst = appendNonzero(dst, "eval_count", int64(c.seq.Output))
	dst = appendNonzero(dst, "eval_duration", int64(predicted))
	return append(dst, '}')
}

// appendNonzero appends a member, if it is above 0.
func appendNonzero(dst []byte, name string, value int64) []byte {
	if value <= 0 {
		return dst
	}
	dst = append(append(append(dst, `,"`...), name...), `":`...)
	return strconv.AppendInt(dst, value, 10)
}

// appendWhole implements dialect.
func (d *ollamaDialect) appendWhole(dst []byte, a *answer, pad int) []byte {
	start := len(dst)
	switch {
	case a.req.loads:
		dst = d.appendLoaded(dst, a)
	case a.req.pooled != nil:
		dst = d.appendVectors(dst, a)
	default:
		c := &a.choices[0]
		call := c
		text := func(dst []byte) []byte { return append(c.appendWholeText(append(dst, '"'), pad), '"') }
		switch {
		case c.call == nil:
			call = nil
		case c.finish != "tool_calls":
			call, text = nil, func(dst []byte) []byte { return appendString(dst, c.held()) }
		default:
			text = appendEmpty
		}
		if !d.openAI {
			dst = escapeHTML(d.appendLine(dst, a, text, call), start)
			return d.appendDone(dst, a)
		}
		dst = d.appendFields(d.appendStart(dst, a, false))
		if d.chat {
			dst = text(append(dst, `"choices":[{"index":0,"message":{"role":"assistant","content":`...))
			if call != nil {
				dst = d.appendOpenAICall(append(dst, ','), call)
			}
			dst = append(append(append(dst, `},"finish_reason":"`...), c.finish...), `"}],`...)
		} else {
			dst = text(append(dst, `"choices":[{"text":`...))
			dst = append(append(append(dst, `,"index":0,"finish_reason":"`...), c.finish...), `"}],`...)
		}
		dst = append(d.appendUsage(dst, c), "}\n"...)
		return escapeHTML(dst, start)
	}
	for range pad {
		dst = append(dst, ' ')
	}
	return dst
}

// appendLoaded appends the answer to who has only asked for the model.
func (d *ollamaDialect) appendLoaded(dst []byte, a *answer) []byte {
	reason := "load"
	if d.unloads {
		reason = "unload"
	}
	switch {
	case d.single:
		return append(dst, `{"embedding":[]}`...)
	case d.embed:
		dst = appendHTML(append(dst, `{"model":`...), d.model)
		return append(dst, `,"embeddings":[]}`...)
	case d.openAI:
		dst = d.appendFields(d.appendStart(dst, a, false))
		dst = append(dst, `"choices":[{"text":"","index":0,"finish_reason":"`+reason+`"}],"usage":{"prompt_tokens":0,"completion_tokens":0,"total_tokens":0}}`...)
		return append(dst, '\n')
	}
	start := len(dst)
	dst = escapeHTML(d.appendLine(dst, a, appendEmpty, nil), start)
	return append(dst, `,"done":true,"done_reason":"`+reason+`"}`...)
}

// appendVectors appends the body of embeddings.
func (d *ollamaDialect) appendVectors(dst []byte, a *answer) []byte {
	vectors := a.req.pooled.vectors
	switch {
	case d.single:
		return append(appendFloats(append(dst, `{"embedding":`...), vectors[0]), '}')
	case d.openAI:
		dst = append(dst, `{"object":"list","data":[`...)
		for i, v := range vectors {
			if i > 0 {
				dst = append(dst, ',')
			}
			dst = append(dst, `{"object":"embedding","embedding":`...)
			if a.req.pooled.base64 {
				dst = appendBase64(dst, v)
			} else {
				dst = appendFloats(dst, v)
			}
			dst = append(strconv.AppendInt(append(dst, `,"index":`...), int64(i), 10), '}')
		}
		dst = appendHTML(append(dst, `],"model":`...), d.model)
		tokens := int64(a.promptTokens())
		dst = strconv.AppendInt(append(dst, `,"usage":{"prompt_tokens":`...), tokens, 10)
		dst = strconv.AppendInt(append(dst, `,"total_tokens":`...), tokens, 10)
		return append(dst, "}}\n"...)
	}
	dst = appendHTML(append(dst, `{"model":`...), d.model)
	dst = append(dst, `,"embeddings":[`...)
	for i, v := range vectors {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = appendFloats(dst, v)
	}
	dst = append(dst, ']')
	dst = appendNonzero(dst, "total_duration", int64(a.clock-a.arrived))
	dst = appendNonzero(dst, "load_duration", int64(d.loaded-a.arrived))
	return append(appendNonzero(dst, "prompt_eval_count", int64(a.promptTokens())), '}')
}
