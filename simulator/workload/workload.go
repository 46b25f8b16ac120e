package workload

import "time"

// Workload is a list of requests, in the order in which they come. It is made by a
// reader or a generator and not changed afterwards; several runs share it. The zero
// value asks nothing.
type Workload struct {
	// Name is for people.
	Name string
	// Block is how many tokens the blocks have of which the source tells what is
	// shared, 0 when it does not say. An engine's blocks should not be larger.
	Block    int
	Requests []Request
	// Throttles are what happens to the engines meanwhile, in the order of time.
	Throttles []Throttle
}

// Throttle makes an engine Factor times slower from At until Until; an Until of 0 is
// never. Those of one engine that overlap are multiplied. An engine that a fleet does not
// have is nobody's.
type Throttle struct {
	Engine    int
	At, Until time.Duration
	Factor    float64
}

// FactorAt is how many times slower throttles make an engine from that time on, until the
// next of them begins or ends.
func FactorAt(throttles []Throttle, engine int, at time.Duration) float64 {
	factor := 1.0
	for _, t := range throttles {
		if t.Engine == engine && t.At <= at && (t.Until == 0 || at < t.Until) {
			factor *= t.Factor
		}
	}
	return factor
}

// Request is one request.
type Request struct {
	// At is when it comes, from the workload's beginning.
	At time.Duration
	// Session numbers the conversation it belongs to, from 1 on; 0 is none. Turn
	// counts its requests from 0.
	Session, Turn int
	// Parts are the prompt: all with roles, which is a chat, or all without.
	Parts []Part
	// Output is how many tokens are generated, at least 1, and Answer the number of
	// the part that they are in later prompts, 0 when they are in none.
	Output int
	Answer uint64
	// Tenant is whose it is, from 0 on.
	Tenant int
}

// Part is so many tokens of a prompt. The first tokens of parts with equal numbers and
// roles are equal, whatever their lengths.
type Part struct {
	ID uint64
	// Tokens are those of the text itself, without what the template of a chat puts
	// around it.
	Tokens int
	// Role is who says it in a chat: "system", "user", "assistant", "tool", or
	// "tools" for the definitions of tools, which come first; "" is plain text. A tool
	// answers the call that the assistant has made before it.
	Role string
}

// Input is how many tokens the prompt has, with those of the chat template.
func (r *Request) Input() int {
	n := 0
	for i := range r.Parts {
		n += r.Parts[i].Tokens
	}
	if r.chat() {
		for i := range r.Parts {
			n += r.overhead(i)
		}
		n += len(openingTokens)
	}
	return n
}

// AppendPrompt appends the tokens of the prompt: those that the body of AppendBody has
// for the simulated model.
func (r *Request) AppendPrompt(dst []uint32) []uint32 {
	if !r.chat() {
		for i := range r.Parts {
			dst = appendTokens(dst, r.Parts[i].ID, r.Parts[i].Tokens)
		}
		return dst
	}
	for i := range r.Parts {
		dst = r.appendMessage(dst, i)
	}
	return append(dst, openingTokens...)
}

// Say is the number of the part that the answer to request index is. An answer without
// a number is like no other of the same workload.
func (r *Request) Say(index int) uint64 {
	if r.Answer == 0 {
		return 1<<63 | uint64(index)
	}
	return r.Answer
}

// AppendAnswer appends the tokens that are generated.
func (r *Request) AppendAnswer(dst []uint32, index int) []uint32 {
	return appendTokens(dst, r.Say(index), r.Output)
}
