package proxy

import (
	"bytes"

	"github.com/zeebo/xxh3"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/policy"
)

// defaultSessionHeader is what Model.SessionHeader stands for when it is empty.
const defaultSessionHeader = "x-session-id"

// prefixTokens is how much of a prompt's beginning policy.Request.Prefix stands for.
const prefixTokens = 1024

// bySession reports that the model's policy, or one beside it, goes by
// policy.Request.Session.
func (m *Model) bySession() bool { return uses[*policy.Sticky](m) }

// goesOn reports that one of them goes by policy.Request.Own.
func (m *Model) goesOn() bool { return uses[*policy.CostModel](m) }

// learns reports that one of them goes by policy.Candidate.Filter.
func (m *Model) learns() bool { return uses[*policy.NLMS](m) }

// uses reports that the model's policy, or one beside it, is a P.
func uses[P policy.Policy](m *Model) bool {
	if _, ok := m.Policy.(P); ok {
		return true
	}
	for _, s := range m.Shadows {
		if _, ok := s.Policy.(P); ok {
			return true
		}
	}
	return false
}

// prefixKey stands for how the prompt begins, 0 where that is not known. Prompts of
// one model that have their first blocks in common have the same.
func (x *exchange) prefixKey() uint64 {
	if b := x.blocks; b != nil && len(b.prompts) > 0 {
		p := &b.prompts[0]
		n := prefixTokens * bytesPerToken / index.TextBlock
		if p.IDs != nil {
			n = prefixTokens / max(p.Block, 1)
		}
		if n = min(max(n, 1), len(p.Chain)); n > 0 {
			return p.Chain[n-1].Lo
		}
	}
	switch p := x.prompt; {
	case p == nil:
		return 0
	case len(p.IDs) > 0:
		return index.Next(index.Hash{}, p.IDs[:min(len(p.IDs), prefixTokens)]).Lo ^ x.modelKey()
	case len(p.Text) > 0:
		return xxh3.HashSeed(p.Text[:min(len(p.Text), prefixTokens*bytesPerToken)], x.modelKey())
	}
	return 0
}

// modelKey is a hash of the model's name.
func (x *exchange) modelKey() uint64 { return xxh3.HashString(x.model.Name) }

// sessionKey stands for the conversation that the request belongs to, 0 where
// nothing tells that: by the field that is configured; by the body's
// "prompt_cache_key", "user" or "safety_identifier"; else by how the conversation
// began, which is its system prompt and its messages up to the first of the user; else
// by the prompt's beginning.
func (x *exchange) sessionKey() uint64 {
	if value := x.sessionField(); len(value) > 0 {
		return xxh3.HashSeed(value, x.modelKey())
	}
	c := &x.call
	for _, s := range [...]span{c.cacheKey, c.user, c.safety} {
		if s.end > 0 {
			return xxh3.HashSeed(s.of(x.body), x.modelKey())
		}
	}
	if _, end := firstOfUser(x.body, c.messages); end > 0 {
		seed := xxh3.HashSeed(c.system.of(x.body), x.modelKey())
		return xxh3.HashSeed(x.body[c.messages.start:end], seed)
	}
	return x.asked.Prefix
}

// sessionField is the value of the request's field that names its session.
func (x *exchange) sessionField() []byte {
	name := x.model.SessionHeader
	if name == "" {
		name = defaultSessionHeader
	}
	for f := (fields{rest: x.head.raw}); f.next(); {
		if len(f.name) == len(name) && bytes.EqualFold(f.name, []byte(name)) {
			return f.value
		}
	}
	return nil
}

// ownTokens is policy.Request.Own, by what part of the body there is from the first message
// of the user on: what comes before it, and tools, have about as many bytes for a token.
func (x *exchange) ownTokens() int {
	messages := x.call.messages
	start, end := firstOfUser(x.body, messages)
	if end == 0 || !answered(x.body[end:messages.end]) {
		return 0
	}
	return int(int64(x.asked.Tokens) * int64(messages.end-start) / int64(len(x.body)))
}

// answered reports whether what follows a message in an array, of which the rest is valid
// JSON, is from a model: one of the assistant, or what has no role, as the thoughts and calls
// in the input of /v1/responses.
func answered(rest []byte) bool {
	s := scanner{b: rest, depth: 1}
	if s.space(); s.peek() != ',' {
		return false
	}
	s.i++
	if s.space(); s.peek() != '{' {
		return false
	}
	role := s.role()
	return role == nil || string(role) == `"assistant"`
}

// firstOfUser returns where in a body, which is valid JSON, the first message of
// the user begins and ends, of an array of messages; 0 when there is none.
func firstOfUser(body []byte, messages span) (start, end int) {
	if messages.end == 0 {
		return 0, 0
	}
	s := scanner{b: body[:messages.end], i: messages.start + 1, depth: 1}
	for s.space(); s.peek() == '{'; {
		start := s.i
		if string(s.role()) == `"user"` {
			return start, s.i
		}
		if s.space(); s.peek() == ',' {
			s.i++
		}
		s.space()
	}
	return 0, 0
}

// role reads a message, an object of valid JSON, and returns the value of its last "role",
// nil when it has none.
func (s *scanner) role() (role []byte) {
	s.i++
	s.depth++
	for more := s.first(); more; {
		name, err := s.quoted()
		start := s.i
		if err != nil || s.value() != nil {
			s.i = len(s.b)
			return nil
		}
		if string(name) == `"role"` {
			role = s.b[start:s.i]
		}
		if more, err = s.next(); err != nil {
			s.i = len(s.b)
			return nil
		}
	}
	s.depth--
	return role
}
