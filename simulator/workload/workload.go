package workload

import "time"

// Workload is a list of requests, in the order in which they come. It is made by a
// reader or a generator and not changed afterwards; several runs share it.
type Workload struct {
	// Name is for people.
	Name string
	// Block is how many tokens the blocks have of which the source tells what is
	// shared, 0 when it does not say. An engine's blocks should not be larger.
	Block    int
	Requests []Request
}

// Request is one request.
type Request struct {
	// At is when it comes, from the workload's beginning.
	At time.Duration
	// Session numbers the conversation it belongs to, from 1 on; 0 is none. Turn
	// counts its requests from 0.
	Session, Turn int
	// Parts are the prompt.
	Parts []Part
	// Output is how many tokens are generated, at least 1, and Answer the number of
	// the part that they are in later prompts, 0 when they are in none.
	Output int
	Answer uint64
	// Tenant is whose it is, from 0 on.
	Tenant int
}

// Part is so many tokens of a prompt. The first tokens of parts with equal numbers
// are equal, whatever their lengths.
type Part struct {
	ID     uint64
	Tokens int
	// Role is who says it in a chat: "system", "user", "assistant", "tool", or
	// "tools" for the definitions of tools; "" is plain text.
	Role string
}

// Input is how many tokens the prompt has.
func (r *Request) Input() int {
	n := 0
	for i := range r.Parts {
		n += r.Parts[i].Tokens
	}
	return n
}

// AppendPrompt appends the tokens of the prompt.
func (r *Request) AppendPrompt(dst []uint32) []uint32 {
	for i := range r.Parts {
		dst = r.Parts[i].appendTokens(dst)
	}
	return dst
}

// AppendAnswer appends the tokens that are generated. An answer without a number is
// like no other of the same workload.
func (r *Request) AppendAnswer(dst []uint32, index int) []uint32 {
	p := Part{ID: r.Answer, Tokens: r.Output}
	if p.ID == 0 {
		p.ID = 1<<63 | uint64(index)
	}
	return p.appendTokens(dst)
}

// vocabulary is from how many tokens those of a part are.
const vocabulary = 1 << 17

func (p *Part) appendTokens(dst []uint32) []uint32 {
	x := mix(p.ID)
	for range p.Tokens {
		x += golden
		dst = append(dst, uint32(mix(x)%vocabulary))
	}
	return dst
}

const golden = 0x9e3779b97f4a7c15

// mix is the finaliser of splitmix64 (Steele, Lea, Flood 2014).
func mix(z uint64) uint64 {
	z += golden
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}
