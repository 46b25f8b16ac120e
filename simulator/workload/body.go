package workload

import (
	"encoding/json/jsontext"
	"strconv"
)

// BodyOptions say what a body has beside its request.
type BodyOptions struct {
	Model string
	// Index is the request's in its workload.
	Index int
	// Stream asks for a stream that ends with its usage.
	Stream bool
	// Exact asks for exactly as many tokens as the request says, with members that
	// vLLM and SGLang have and OpenAI has not.
	Exact bool
	// Say tells a simulated engine to say what the request's answer is, so that later
	// prompts go on with it. Other engines do not look at it.
	Say bool
}

// Path is the route that the request's body is for.
func (r *Request) Path() string {
	if r.chat() {
		return "/v1/chat/completions"
	}
	return "/v1/completions"
}

// AppendBody appends the body of an API request that asks for r: a chat, or where its
// parts have no roles a completion. For the simulated model its prompt has exactly
// the tokens of AppendPrompt.
func AppendBody(dst []byte, r *Request, o BodyOptions) []byte {
	dst = append(dst, `{"model":`...)
	dst, _ = jsontext.AppendQuote(dst, o.Model) // the error is of what is no UTF-8, which it mends
	if r.chat() {
		dst = r.appendMessages(dst)
	} else {
		dst = append(dst, `,"prompt":"`...)
		for i := range r.Parts {
			dst = appendText(dst, r.Parts[i].ID, 0, r.Parts[i].Tokens)
		}
		dst = append(dst, '"')
	}
	dst = append(dst, `,"max_tokens":`...)
	dst = strconv.AppendInt(dst, int64(r.Output), 10)
	if o.Exact {
		dst = append(dst, `,"min_tokens":`...)
		dst = strconv.AppendInt(dst, int64(r.Output), 10)
		dst = append(dst, `,"ignore_eos":true`...)
	}
	if o.Stream {
		dst = append(dst, `,"stream":true,"stream_options":{"include_usage":true}`...)
	}
	if o.Say {
		dst = append(dst, `,"vllm_xargs":{"sim_say":`...)
		dst = strconv.AppendUint(dst, r.Say(o.Index), 10)
		dst = append(dst, '}')
	}
	return append(dst, '}')
}

// appendMessages appends the members tools and messages of a chat. The model is asked
// not to call tools by itself: when it does so is the workload's choice.
func (r *Request) appendMessages(dst []byte) []byte {
	parts := r.Parts
	if t := &parts[0]; t.Role == "tools" {
		dst = append(dst, `,"tools":[`...)
		n := 0
		for tool := range toolsIn(t.Tokens) {
			if tool > 0 {
				dst = append(dst, ',')
			}
			dst = append(dst, toolBefore(tool)...)
			end := min(n+toolWords, t.Tokens)
			dst = appendText(dst, t.ID, n, end)
			n = end
			dst = append(dst, toolAfter...)
		}
		dst = append(dst, `],"tool_choice":"none"`...)
	}
	dst = append(dst, `,"messages":[`...)
	for i := range parts {
		p := &parts[i]
		if p.Role == "tools" {
			continue
		}
		if dst[len(dst)-1] != '[' {
			dst = append(dst, ',')
		}
		dst = append(dst, `{"role":"`...)
		dst = append(dst, p.Role...)
		if p.Role == "tool" {
			dst = append(dst, `","tool_call_id":"`...)
			dst = appendCallID(dst, p.ID)
		}
		dst = append(dst, `","content":"`...)
		dst = appendText(dst, p.ID, 0, p.Tokens)
		dst = append(dst, '"')
		for c := range r.calls(i) {
			if c == 0 {
				dst = append(dst, `,"tool_calls":[`...)
			} else {
				dst = append(dst, ',')
			}
			id := parts[i+1+c].ID
			name, about := callOf(id, r.tools())
			dst = append(dst, `{"id":"`...)
			dst = appendCallID(dst, id)
			dst = append(dst, `","type":"function","function":{"name":"`...)
			dst = append(dst, name...)
			dst = append(dst, `","arguments":"{\"for\": \"`...)
			dst = append(dst, about...)
			dst = append(dst, `\"}"}}`...)
		}
		if r.calls(i) > 0 {
			dst = append(dst, ']')
		}
		dst = append(dst, '}')
	}
	return append(dst, ']')
}

// appendCallID appends the id of the call that the part of number id is the result of.
func appendCallID(dst []byte, id uint64) []byte {
	return strconv.AppendUint(append(dst, "call_"...), id, 36)
}
