package workload

import "strings"

// A prompt of parts with roles is a chat, and has beside the words of its parts what
// the simulated model's template, proxy/prompt/simulated.go, and the JSON of tools and
// calls put around them. Here stands the same template in tokens, so that a request
// has in virtual time the very tokens that its body has over HTTP.

// chat reports that the prompt is one of messages and not plain text.
func (r *Request) chat() bool { return len(r.Parts) > 0 && r.Parts[0].Role != "" }

// frame is what stands around the words of something.
type frame struct{ before, after []uint32 }

func newFrame(before, after string) frame { return frame{tokenIDs(before), tokenIDs(after)} }

func (f *frame) tokens() int { return len(f.before) + len(f.after) }

var (
	systemFrame    = newFrame("<|system|>\n", "\n")
	userFrame      = newFrame("<|user|>\n", "\n")
	assistantFrame = newFrame(opening, "\n")
	toolFrame      = newFrame("<|tool|>\n", "\n")
	openingTokens  = tokenIDs(opening)
	toolsTokens    = tokenIDs("<|tools|>\n")
)

// opening is what a chat ends with, for the model to go on from.
const opening = "<|assistant|>\n"

// messageFrame is that of a message.
func messageFrame(role string) *frame {
	switch role {
	case "system":
		return &systemFrame
	case "assistant":
		return &assistantFrame
	case "tool":
		return &toolFrame
	}
	return &userFrame
}

// toolWords is how many words describe a tool: the definitions of tools are cut into
// so many of that size, of which the last has what is left. The JSON around each takes
// another 83 tokens.
const toolWords = 100

func toolsIn(tokens int) int { return (max(tokens, 1) + toolWords - 1) / toolWords }

// toolName is the name of the tool k of a list: a word, so that it is one token with
// the space behind it. Up to 4,096 tools have names of their own.
func toolName(k int) string {
	const odd = 1237
	return strings.TrimSpace(words[k*odd&(1<<wordBits-1)].text)
}

// A tool as the template writes it, and as it stands in a body: JSON with a space
// behind each comma and colon.
func toolBefore(k int) string {
	return `{"type": "function", "function": {"name": "` + toolName(k) + `", "description": "`
}

const toolAfter = `", "parameters": {"type": "object", "properties": {"for": {"type": "string"}}, "required": ["for"]}}}`

// callOf is the call that the part of number id is the result of, of one of so many
// tools. It is as long for all.
func callOf(id uint64, tools int) (name, about string) {
	v := newVoice(id)
	return toolName(int(uint64(v) % uint64(tools))), strings.TrimSpace(v.at(0).text)
}

func callText(name, about string) string {
	return "<|call|>" + name + ` {"for": "` + about + `"}` + "\n"
}

var (
	toolAfterTokens = tokenIDs(toolAfter + "\n")
	toolBeforeCount = len(tokenIDs(toolBefore(0)))
	callCount       = len(tokenIDs(callText("word", "word")))
)

// calls is how many tools the message k calls: as many as there are results behind
// it.
func (r *Request) calls(k int) int {
	n := 0
	if r.Parts[k].Role == "assistant" {
		for k++; k < len(r.Parts) && r.Parts[k].Role == "tool"; k++ {
			n++
		}
	}
	return n
}

// tools is how many tools there are to be called; a chat that defines none calls one
// all the same.
func (r *Request) tools() int {
	if r.Parts[0].Role == "tools" {
		return toolsIn(r.Parts[0].Tokens)
	}
	return 1
}

// overhead is how many tokens stand around the words of part k.
func (r *Request) overhead(k int) int {
	p := &r.Parts[k]
	if p.Role == "tools" {
		return len(toolsTokens) + toolsIn(p.Tokens)*(toolBeforeCount+len(toolAfterTokens))
	}
	return messageFrame(p.Role).tokens() + r.calls(k)*callCount
}

// appendMessage appends the tokens of part k of a chat.
func (r *Request) appendMessage(dst []uint32, k int) []uint32 {
	p := &r.Parts[k]
	if p.Role == "tools" {
		dst = append(dst, toolsTokens...)
		v, n := newVoice(p.ID), 0
		for tool := range toolsIn(p.Tokens) {
			dst = append(dst, tokenIDs(toolBefore(tool))...)
			for end := min(n+toolWords, p.Tokens); n < end; n++ {
				dst = append(dst, v.at(n).id)
			}
			dst = append(dst, toolAfterTokens...)
		}
		return dst
	}
	f := messageFrame(p.Role)
	dst = append(dst, f.before...)
	dst = appendTokens(dst, p.ID, p.Tokens)
	dst = append(dst, f.after...)
	for c := range r.calls(k) {
		dst = append(dst, tokenIDs(callText(callOf(r.Parts[k+1+c].ID, r.tools())))...)
	}
	return dst
}
