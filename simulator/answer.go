package simulator

import (
	"encoding/json/jsontext"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// answer writes the bytes of one response, key by key as vLLM orders them. It
// belongs to one exchange and is used by its goroutine only. For chat and
// completions no method that a stream uses allocates once its buffer has
// grown.
//
// A stream is the prelude, which does not wait for a token, the opening with
// the first token, the tokens and the closing; each is none, one or several
// events.
type answer struct {
	req         *request
	model       string
	id          string
	created     int64
	choices     []choice
	start       []byte // `{"id":…,"object":…,"created":…,"model":…,"choices":[`
	fingerprint string
	// details: usage tells what was cached, as SGLang does it if sglang is set.
	details, sglang bool
	// aborted: somebody else has ended it.
	aborted bool
	// failed is why nothing comes, or nothing more.
	failed *apiError
	// events counts those of a stream of the Responses API.
	events int
	// eventEnd is what ends each event of a stream, once the head is made.
	eventEnd []byte
	// arrived is when the server got the request, in the engine's time, clock
	// when the part that is written next was made.
	arrived, clock time.Duration
	// interim is when a stream says something even without a token, 0 is never.
	// The dialect sets it.
	interim time.Duration
}

// choice is one generation of an answer, or one prompt that is pooled.
type choice struct {
	seq   Sequence
	voice voice
	// script, when not nil, is what is said in place of the voice's words,
	// token by token. A call's first token is the name of what it calls.
	script []string
	call   *tool
	finish string
	// prompt are the ids of its prompt, if the answer shows any.
	prompt []int
	// stopped is the text that ended it.
	stopped string
	tokens  int // of its prompt
	sent    int // tokens written
	made    int // tokens there were when it was aborted
	// cached is how many tokens of its prompt were, shareable how many are in
	// full blocks of a cache.
	cached, shareable int
	// watch is how far the engine is; planned: it has begun, as last read. wrote is
	// when the last token was written.
	watch   *watch
	planned bool
	wrote   time.Duration
	// began is when its prefill did, computed when its first token was ready, as
	// last read.
	began, computed time.Duration
	// slot is that of llama.cpp which it has, as last read.
	slot int
}

// created is how many tokens of the prompt have come into the cache.
func (c *choice) created() int { return max(0, c.shareable-c.cached) }

func newAnswer(cfg *Config, r *request, id string, created int64) *answer {
	a := &answer{req: r, model: cfg.ServedModelName[0], id: id, created: created, details: cfg.EnablePromptTokensDetails,
		sglang: cfg.sglang(), choices: make([]choice, 0, len(r.prompts)*r.n), fingerprint: cfg.fingerprint()}
	if r.adapter != "" {
		a.model = r.adapter
	}
	if r.model != "" {
		a.model = r.model
	}
	for _, p := range r.prompts {
		var ids []uint32
		if r.api != plain {
			ids = p.tokenIDs()
		}
		for i := range r.n {
			c := choice{voice: newVoice(cfg.Seed, p, i), tokens: p.tokens, finish: r.finish}
			c.voice.pad, c.voice.padMax = r.faults.TokenBytes, r.faults.TokenBytesMax
			c.voice.say = r.say
			if r.tokenIDs {
				c.prompt = p.ids()
			}
			c.seq = Sequence{Prompt: ids, Uncached: p.tokens, Output: r.output, Slow: r.faults.Slow, Adapter: r.adapter, NoRead: r.pooled != nil || r.noRead}
			if r.salt != nil {
				c.seq.Salt = *r.salt
			}
			if !cfg.NoEnablePrefixCaching {
				c.shareable = p.tokens - p.tokens%cfg.BlockSize
			}
			c.write(r)
			c.seq.Stops = c.finish != "length"
			c.seq.Said = c.appendSaid(make([]uint32, 0, c.seq.Output-1))
			a.choices = append(a.choices, c)
		}
	}
	idPrefix, object := "chatcmpl-", "chat.completion"
	if r.api == completions {
		idPrefix, object = "cmpl-", "text_completion"
	} else if r.stream {
		object = "chat.completion.chunk"
	}
	a.start = append(a.start, `{"id":`...)
	a.start = appendString(a.start, idPrefix+id)
	a.start = append(a.start, `,"object":"`...)
	a.start = append(a.start, object...)
	a.start = append(a.start, `","created":`...)
	a.start = strconv.AppendInt(a.start, created, 10)
	a.start = append(a.start, `,"model":`...)
	a.start = appendString(a.start, a.model)
	a.start = append(a.start, `,"choices":[`...)
	return a
}

// write decides what the choice says where that is not just the voice's words
// up to the limit.
func (c *choice) write(r *request) {
	whole := "stop"
	switch {
	case r.call != nil:
		c.call = r.call.pick(c.voice)
		c.script = append([]string{""}, tokensOf(string(c.call.arguments(c.voice)))...)
		whole = "tool_calls"
	case r.form != nil:
		c.script = tokensOf(string(r.form.fill(c.voice)))
	case r.stopsWhole:
		if n, stop := c.voice.endsIn(r.output, r.stop); stop != "" {
			c.seq.Output, c.stopped = n, stop
			if n < r.output {
				c.finish = whole
			}
		}
	case len(r.stop) > 0:
		c.script, c.stopped = c.voice.until(r.output, r.stop)
		if c.stopped == "" {
			c.script = nil
		}
	}
	switch {
	case c.script == nil:
	case len(c.script) > r.output:
		c.script = c.script[:r.output]
		c.finish = "length"
	default:
		c.seq.Output, c.finish = len(c.script), whole
	}
}

// appendSaid appends the ids of all tokens but the last. Those of a text that a
// stop text has cut are the ones that were generated.
func (c *choice) appendSaid(dst []uint32) []uint32 {
	for k := range c.seq.Output - 1 {
		switch {
		case c.script == nil || c.stopped != "":
			dst = append(dst, c.voice.word(k).id)
		case c.script[k] != "":
			dst = append(dst, uint32(tokenID(c.script[k])))
		default:
			// A call's first token is the name of what it calls.
			dst = append(dst, uint32(tokenID("\x00"+c.call.Name)))
		}
	}
	return dst
}

// reason is why the choice ended, as the metrics count it.
func (c *choice) reason() string {
	if c.finish == "tool_calls" {
		return "stop"
	}
	return c.finish
}

// text returns all that the choice says.
func (c *choice) text() string {
	if c.script != nil {
		return strings.Join(c.script, "")
	}
	return c.voice.text(c.seq.Output)
}

// token returns token k.
func (c *choice) token(k int) string {
	if c.script != nil {
		return c.script[k]
	}
	return c.voice.word(k).text + string(appendX(nil, c.voice.padding(k)))
}

// appendEscaped appends token k as it stands inside a JSON string.
func (c *choice) appendEscaped(dst []byte, k int) []byte {
	if c.script == nil {
		return c.voice.appendEscaped(dst, k)
	}
	start := len(dst)
	dst = appendString(dst, c.script[k])
	copy(dst[start:], dst[start+1:])
	return dst[:len(dst)-2]
}

// appendStopReason appends what the choice has as stop_reason.
func (c *choice) appendStopReason(dst []byte) []byte {
	if c.stopped == "" {
		return append(dst, "null"...)
	}
	return appendString(dst, c.stopped)
}

// head sets the headers of the answer.
func (a *answer) head(h http.Header) {
	a.eventEnd = twoNewlines
	switch {
	case a.req.dialect != nil:
		if a.req.dialect.head(h, a); h.Get("Content-Type") == "application/x-ndjson" {
			a.eventEnd = twoNewlines[:1]
		}
	case a.req.stream:
		h.Set("Content-Type", "text/event-stream; charset=utf-8")
	default:
		h.Set("Content-Type", "application/json")
	}
}

var twoNewlines = []byte("\n\n")

// appendPrelude appends the events that come before the engine has begun.
func (a *answer) appendPrelude(dst []byte) []byte {
	if a.req.dialect != nil {
		return a.req.dialect.appendPart(dst, a, atPrelude, 0)
	}
	if a.req.api == responses {
		return a.appendResponseCreated(dst)
	}
	return dst
}

// appendOpening appends the events that come right before the first token's.
func (a *answer) appendOpening(dst []byte) []byte {
	if a.req.dialect != nil {
		return a.req.dialect.appendPart(dst, a, atOpening, 0)
	}
	switch a.req.api {
	case chat:
		for i := range a.choices {
			dst = a.appendRole(dst, i)
		}
	case responses:
		return a.appendResponseItem(dst)
	case messages:
		return a.appendMessageStart(dst)
	}
	return dst
}

// appendToken appends the events of the next token of choice i and counts it
// as sent.
func (a *answer) appendToken(dst []byte, i int) []byte {
	if a.req.dialect != nil {
		return a.req.dialect.appendPart(dst, a, atToken, i)
	}
	switch a.req.api {
	case responses:
		return a.appendResponseDelta(dst)
	case messages:
		return a.appendMessageDelta(dst)
	case transcription, translation:
		return a.appendSpeech(dst)
	}
	return a.appendChunk(dst, i)
}

// appendClosing appends the events after the last token's.
func (a *answer) appendClosing(dst []byte) []byte {
	if a.req.dialect != nil {
		return a.req.dialect.appendPart(dst, a, atClosing, 0)
	}
	switch a.req.api {
	case responses:
		return a.appendResponseDone(dst)
	case messages:
		return a.appendMessageStop(dst)
	case transcription, translation:
		return a.appendSpeechEnd(dst)
	}
	if a.req.usage {
		dst = a.appendUsageEvent(dst)
	}
	return append(dst, done...)
}

// done is the event that ends a stream.
const done = "data: [DONE]\n\n"

// appendBody appends the body of an answer that is not streamed. pad x's
// lengthen the first choice's text; where there is none, spaces the body.
func (a *answer) appendBody(dst []byte, pad int) []byte {
	if a.req.dialect != nil {
		return a.req.dialect.appendWhole(dst, a, pad)
	}
	switch a.req.api {
	case chat, completions:
		return a.appendChoices(dst, pad)
	case responses:
		return a.appendResponse(dst, pad)
	case messages:
		return a.appendMessage(dst, pad)
	case transcription, translation:
		return a.appendTranscript(dst, pad)
	case plain:
		dst = append(dst, a.req.body...)
	default:
		dst = a.appendPooled(dst)
	}
	for range pad {
		dst = append(dst, ' ')
	}
	return dst
}

// appendRole appends the event that opens choice i of a chat.
func (a *answer) appendRole(dst []byte, i int) []byte {
	dst = a.appendEvent(dst)
	dst = append(dst, `{"index":`...)
	dst = strconv.AppendInt(dst, int64(i), 10)
	dst = append(dst, `,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]`...)
	if a.req.continuousUsage {
		dst = a.appendUsageSoFar(dst, &a.choices[i])
	}
	dst = a.choices[i].appendPromptIDs(dst)
	return append(dst, ",\"prompt_text\":null}\n\n"...)
}

// appendChunk appends the event of the next token of choice i and counts it as
// sent. The last token's event is the one that says why the choice ended.
func (a *answer) appendChunk(dst []byte, i int) []byte {
	c := &a.choices[i]
	last := c.sent == c.seq.Output-1
	dst = a.appendEvent(dst)
	dst = append(dst, `{"index":`...)
	dst = strconv.AppendInt(dst, int64(i), 10)
	switch {
	case c.call != nil:
		dst = c.appendCallDelta(dst)
	case a.req.api == chat:
		dst = append(dst, `,"delta":{"content":"`...)
		dst = c.appendEscaped(dst, c.sent)
		dst = append(dst, `"}`...)
	default:
		dst = append(dst, `,"text":"`...)
		dst = c.appendEscaped(dst, c.sent)
		dst = append(dst, '"')
	}
	dst = append(dst, `,"logprobs":null,"finish_reason":`...)
	if last {
		dst = append(dst, '"')
		dst = append(dst, c.finish...)
		dst = append(dst, '"')
	} else {
		dst = append(dst, "null"...)
	}
	if last || a.req.api == completions {
		dst = append(dst, `,"stop_reason":`...)
		if last {
			dst = c.appendStopReason(dst)
		} else {
			dst = append(dst, "null"...)
		}
	}
	switch {
	case a.req.api == completions && c.sent == 0:
		dst = c.appendPromptIDs(dst)
	case a.req.api == completions:
		dst = append(dst, `,"prompt_token_ids":null`...)
	}
	dst = a.appendTokenIDs(dst, c, c.sent, c.sent+1)
	dst = append(dst, "}]"...)
	c.sent++
	if a.req.continuousUsage {
		dst = a.appendUsageSoFar(dst, c)
	}
	if last && !a.req.usage {
		dst = a.appendFingerprint(dst)
	}
	return append(dst, "}\n\n"...)
}

// appendUsageSoFar appends what a chunk of choice c has as usage.
func (a *answer) appendUsageSoFar(dst []byte, c *choice) []byte {
	dst = append(dst, `,"usage":`...)
	dst = appendUsage(dst, c.tokens, c.sent)
	if a.req.api == chat {
		dst = append(dst[:len(dst)-1], `,"completion_tokens_details":null}`...)
	}
	return dst
}

// appendUsageEvent appends the event that counts the tokens of all choices.
func (a *answer) appendUsageEvent(dst []byte) []byte {
	dst = a.appendEvent(dst)
	dst = append(dst, `],"usage":`...)
	dst = appendUsage(dst, a.promptTokens(), a.outputTokens())
	c := &a.choices[0]
	switch {
	case !a.details || a.sglang && c.cached == 0:
	case a.req.api == chat && !a.sglang:
		dst = fmt.Appendf(dst[:len(dst)-1], `,"prompt_tokens_details":{"cached_tokens":%d,"created_cache_tokens":%d}}`, c.cached, c.created())
	default:
		dst = fmt.Appendf(dst[:len(dst)-1], `,"prompt_tokens_details":{"cached_tokens":%d}}`, c.cached)
	}
	dst = a.appendFingerprint(dst)
	return append(dst, "}\n\n"...)
}

func (a *answer) appendEvent(dst []byte) []byte {
	dst = append(dst, "data: "...)
	return append(dst, a.start...)
}

func (a *answer) appendFingerprint(dst []byte) []byte {
	dst = append(dst, `,"system_fingerprint":"`...)
	dst = append(dst, a.fingerprint...)
	return append(dst, '"')
}

// appendChoices appends the body of chat or completions: every field is there,
// nulls included.
func (a *answer) appendChoices(dst []byte, pad int) []byte {
	dst = append(dst, a.start...)
	output := 0
	for i := range a.choices {
		c := &a.choices[i]
		output += c.seq.Output
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(dst, `{"index":`...)
		dst = strconv.AppendInt(dst, int64(i), 10)
		if a.req.api == chat {
			dst = append(dst, `,"message":{"role":"assistant","content":`...)
		} else {
			dst = append(dst, `,"text":`...)
		}
		if c.call == nil {
			dst = append(dst, '"')
			for k := range c.seq.Output {
				dst = c.appendEscaped(dst, k)
			}
			if i == 0 {
				dst = appendX(dst, pad)
			}
			dst = append(dst, '"')
		} else {
			dst = append(dst, "null"...)
		}
		if a.req.api == chat {
			dst = append(dst, `,"refusal":null,"annotations":null,"audio":null,"function_call":null`...)
			if c.call != nil {
				dst = c.appendCalls(dst)
			}
			dst = append(dst, `,"reasoning":null}`...)
		}
		dst = append(dst, `,"logprobs":null,"finish_reason":"`...)
		dst = append(dst, c.finish...)
		dst = append(dst, `","stop_reason":`...)
		dst = c.appendStopReason(dst)
		dst = a.appendTokenIDs(dst, c, 0, c.seq.Output)
		if a.req.api == completions {
			dst = append(dst, `,"prompt_logprobs":null`...)
			dst = c.appendPromptIDs(dst)
		}
		dst = append(dst, `,"routed_experts":null}`...)
	}
	dst = append(dst, `],"service_tier":null`...)
	dst = a.appendFingerprint(dst)
	dst = append(dst, `,"usage":`...)
	dst = a.appendBodyUsage(dst, output)
	if a.req.api == chat {
		dst = append(dst, `,"prompt_logprobs":null`...)
		dst = a.choices[0].appendPromptIDs(dst)
		dst = append(dst, `,"prompt_text":null`...)
	}
	return append(dst, `,"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}`...)
}

// appendPromptIDs appends the member prompt_token_ids.
func (c *choice) appendPromptIDs(dst []byte) []byte {
	return appendIDs(append(dst, `,"prompt_token_ids":`...), c.prompt)
}

// appendTokenIDs appends the member token_ids of the tokens from one to before
// another.
func (a *answer) appendTokenIDs(dst []byte, c *choice, from, to int) []byte {
	var ids []int
	if a.req.tokenIDs {
		ids = []int{}
		for k := from; k < to; k++ {
			ids = append(ids, tokenIDs(c.token(k))...)
		}
	}
	return appendIDs(append(dst, `,"token_ids":`...), ids)
}

// appendIDs appends a list of ids, or null when there is none.
func appendIDs(dst []byte, ids []int) []byte {
	if ids == nil {
		return append(dst, "null"...)
	}
	dst = append(dst, '[')
	for i, id := range ids {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendInt(dst, int64(id), 10)
	}
	return append(dst, ']')
}

// appendBodyUsage appends the usage of a body. What was cached is told of the
// last choice.
func (a *answer) appendBodyUsage(dst []byte, output int) []byte {
	c := &a.choices[len(a.choices)-1]
	switch {
	case a.sglang:
		dst = appendUsage(dst, a.promptTokens(), output)
		if a.details && c.cached > 0 {
			dst = fmt.Appendf(dst[:len(dst)-1], `,"prompt_tokens_details":{"cached_tokens":%d}}`, c.cached)
		}
		return dst
	case !a.details:
		return appendFullUsage(dst, a.promptTokens(), output)
	}
	dst = appendUsage(dst, a.promptTokens(), output)
	created := []byte("null")
	if a.req.api == chat {
		created = strconv.AppendInt(nil, int64(c.created()), 10)
	}
	return fmt.Appendf(dst[:len(dst)-1], `,"prompt_tokens_details":{"cached_tokens":%d,"created_cache_tokens":%s,"multimodal_tokens":null},`+
		`"completion_tokens_details":null}`, c.cached, created)
}

// appendFullUsage appends usage with the details that nobody has asked for.
func appendFullUsage(dst []byte, prompt, output int) []byte {
	dst = appendUsage(dst, prompt, output)
	return append(dst[:len(dst)-1], `,"prompt_tokens_details":null,"completion_tokens_details":null}`...)
}

func (a *answer) promptTokens() int {
	n := 0
	for _, p := range a.req.prompts {
		n += p.tokens
	}
	return n
}

func (a *answer) outputTokens() int {
	n := 0
	for i := range a.choices {
		n += a.choices[i].sent
	}
	return n
}

func appendUsage(dst []byte, prompt, output int) []byte {
	dst = append(dst, `{"prompt_tokens":`...)
	dst = strconv.AppendInt(dst, int64(prompt), 10)
	dst = append(dst, `,"total_tokens":`...)
	dst = strconv.AppendInt(dst, int64(prompt+output), 10)
	dst = append(dst, `,"completion_tokens":`...)
	dst = strconv.AppendInt(dst, int64(output), 10)
	return append(dst, '}')
}

// appendString appends s as a JSON string; bytes that are not UTF-8 become
// U+FFFD.
func appendString(dst []byte, s string) []byte {
	dst, _ = jsontext.AppendQuote(dst, s)
	return dst
}
