package simulator

import (
	"encoding/json/jsontext"
	"strconv"
	"time"
)

// answer writes the bytes of one response, key by key as vLLM orders them. It
// belongs to one exchange and is used by its goroutine only. No method
// allocates once its buffer has grown.
type answer struct {
	req         *request
	choices     []choice
	head        []byte // `{"id":…,"object":…,"created":…,"model":…,"choices":[`
	fingerprint string
}

// choice is one generation of an answer.
type choice struct {
	seq    Sequence
	voice  voice
	tokens int // of its prompt
	sent   int // tokens written
	// first is the plan's First as last read, wrote when the last token was
	// written.
	first, wrote time.Duration
}

func newAnswer(cfg *Config, r *request, id string, created int64) *answer {
	a := &answer{req: r, choices: make([]choice, 0, len(r.prompts)*r.n), fingerprint: cfg.fingerprint()}
	for _, p := range r.prompts {
		for i := range r.n {
			c := choice{voice: newVoice(cfg.Seed, p, i), tokens: p.tokens}
			c.voice.pad, c.voice.padMax = r.faults.TokenBytes, r.faults.TokenBytesMax
			c.seq = Sequence{Uncached: p.tokens, Output: r.output}
			a.choices = append(a.choices, c)
		}
	}
	idPrefix, object := "chatcmpl-", "chat.completion"
	if r.api == completions {
		idPrefix, object = "cmpl-", "text_completion"
	} else if r.stream {
		object = "chat.completion.chunk"
	}
	a.head = append(a.head, `{"id":`...)
	a.head = appendString(a.head, idPrefix+id)
	a.head = append(a.head, `,"object":"`...)
	a.head = append(a.head, object...)
	a.head = append(a.head, `","created":`...)
	a.head = strconv.AppendInt(a.head, created, 10)
	a.head = append(a.head, `,"model":`...)
	a.head = appendString(a.head, cfg.ServedModelName[0])
	a.head = append(a.head, `,"choices":[`...)
	return a
}

// appendRole appends the event that opens choice i of a chat.
func (a *answer) appendRole(dst []byte, i int) []byte {
	dst = a.appendEvent(dst)
	dst = append(dst, `{"index":`...)
	dst = strconv.AppendInt(dst, int64(i), 10)
	dst = append(dst, `,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]`...)
	if a.req.continuousUsage {
		dst = append(dst, `,"usage":`...)
		dst = appendUsage(dst, a.choices[i].tokens, 0)
	}
	return append(dst, ",\"prompt_token_ids\":null,\"prompt_text\":null}\n\n"...)
}

// appendToken appends the event of the next token of choice i and counts it as
// sent. The last token's event is the one that says why the choice ended.
func (a *answer) appendToken(dst []byte, i int) []byte {
	c := &a.choices[i]
	last := c.sent == a.req.output-1
	dst = a.appendEvent(dst)
	dst = append(dst, `{"index":`...)
	dst = strconv.AppendInt(dst, int64(i), 10)
	if a.req.api == chat {
		dst = append(dst, `,"delta":{"content":"`...)
		dst = c.voice.appendEscaped(dst, c.sent)
		dst = append(dst, `"}`...)
	} else {
		dst = append(dst, `,"text":"`...)
		dst = c.voice.appendEscaped(dst, c.sent)
		dst = append(dst, '"')
	}
	dst = append(dst, `,"logprobs":null,"finish_reason":`...)
	if last {
		dst = append(dst, '"')
		dst = append(dst, a.req.finish...)
		dst = append(dst, '"')
	} else {
		dst = append(dst, "null"...)
	}
	switch {
	case a.req.api == completions:
		dst = append(dst, `,"stop_reason":null,"prompt_token_ids":null`...)
	case last:
		dst = append(dst, `,"stop_reason":null`...)
	}
	dst = append(dst, `,"token_ids":null}]`...)
	c.sent++
	if a.req.continuousUsage {
		dst = append(dst, `,"usage":`...)
		dst = appendUsage(dst, c.tokens, c.sent)
	}
	if last && !a.req.usage {
		dst = a.appendFingerprint(dst)
	}
	return append(dst, "}\n\n"...)
}

// appendUsageEvent appends the event that counts the tokens of all choices.
func (a *answer) appendUsageEvent(dst []byte) []byte {
	dst = a.appendEvent(dst)
	dst = append(dst, `],"usage":`...)
	dst = appendUsage(dst, a.promptTokens(), a.outputTokens())
	dst = a.appendFingerprint(dst)
	return append(dst, "}\n\n"...)
}

// done is the event that ends every stream.
const done = "data: [DONE]\n\n"

func (a *answer) appendEvent(dst []byte) []byte {
	dst = append(dst, "data: "...)
	return append(dst, a.head...)
}

func (a *answer) appendFingerprint(dst []byte) []byte {
	dst = append(dst, `,"system_fingerprint":"`...)
	dst = append(dst, a.fingerprint...)
	return append(dst, '"')
}

// appendBody appends the body of an answer that is not streamed: every field
// is there, nulls included. pad x's lengthen the first choice's text.
func (a *answer) appendBody(dst []byte, pad int) []byte {
	dst = append(dst, a.head...)
	for i := range a.choices {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(dst, `{"index":`...)
		dst = strconv.AppendInt(dst, int64(i), 10)
		if a.req.api == chat {
			dst = append(dst, `,"message":{"role":"assistant","content":"`...)
		} else {
			dst = append(dst, `,"text":"`...)
		}
		for k := range a.req.output {
			dst = a.choices[i].voice.appendEscaped(dst, k)
		}
		if i == 0 {
			dst = appendX(dst, pad)
		}
		if a.req.api == chat {
			dst = append(dst, `","refusal":null,"annotations":null,"audio":null,"function_call":null,"reasoning":null}`...)
		} else {
			dst = append(dst, '"')
		}
		dst = append(dst, `,"logprobs":null,"finish_reason":"`...)
		dst = append(dst, a.req.finish...)
		dst = append(dst, `","stop_reason":null,"token_ids":null`...)
		if a.req.api == completions {
			dst = append(dst, `,"prompt_logprobs":null,"prompt_token_ids":null`...)
		}
		dst = append(dst, `,"routed_experts":null}`...)
	}
	dst = append(dst, `],"service_tier":null`...)
	dst = a.appendFingerprint(dst)
	dst = append(dst, `,"usage":`...)
	dst = appendUsage(dst, a.promptTokens(), len(a.choices)*a.req.output)
	dst = append(dst[:len(dst)-1], `,"prompt_tokens_details":null,"completion_tokens_details":null}`...)
	if a.req.api == chat {
		dst = append(dst, `,"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null`...)
	}
	return append(dst, `,"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}`...)
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
