package prompt

import (
	"github.com/ardanlabs/jinja"

	"github.com/inferrail/inferrail/proxy/prompt/tokenizer"
)

// script is a prompt as a renderer by code spells it out: special tokens, and
// texts which are encoded each on its own and in which nothing is special. The
// zero value is empty. One goroutine uses it, for one prompt.
type script struct {
	pieces []piece
}

// piece is a special token by its name, or a text.
type piece struct {
	text  string
	token bool
}

func (s *script) token(name string) { s.pieces = append(s.pieces, piece{text: name, token: true}) }

func (s *script) text(text string) {
	if text != "" {
		s.pieces = append(s.pieces, piece{text: text})
	}
}

// encode appends the ids of the script to dst. ids holds those of its special
// tokens. A tokenizer that cannot encode a text without finding special tokens
// in it gives a Reason.
func (s *script) encode(dst *Prompt, t *tokenizer.Tokenizer, ids map[string]uint32) Reason {
	for _, p := range s.pieces {
		if p.token {
			dst.IDs = append(dst.IDs, ids[p.text])
			continue
		}
		var ok bool
		if dst.IDs, ok = t.AppendPlain(dst.IDs, p.text); !ok {
			return Unfollowed
		}
	}
	return Exact
}

// tokenIDs returns the ids of special tokens, or the name of one that the
// tokenizer does not have.
func tokenIDs(t *tokenizer.Tokenizer, names []string) (ids map[string]uint32, missing string) {
	ids = make(map[string]uint32, len(names))
	for _, name := range names {
		id, ok := t.Token(name)
		if !ok {
			return nil, name
		}
		ids[name] = id
	}
	return ids, ""
}

// field returns a member of a JSON object, undefined when v is no object or has
// no such member.
func field(v jinja.Value, key string) jinja.Value {
	if !v.IsDict() {
		return jinja.Undefined()
	}
	m, ok := v.AsDict().Get(key)
	if !ok {
		return jinja.Undefined()
	}
	return m
}

// elements returns those of a JSON array, none for anything else.
func elements(v jinja.Value) []jinja.Value {
	if !v.IsList() {
		return nil
	}
	return v.AsList().Items
}

// call is a tool call of an assistant's message.
type call struct{ id, name, arguments string }

// readCalls reads the tool calls of a message, whatever its role.
func (m *message) readCalls() (calls []call, _ Reason) {
	for _, v := range elements(m.fields.Data["tool_calls"]) {
		if kind := field(v, "type"); kind.IsString() && kind.AsString() != "function" {
			return nil, Unfollowed
		}
		function := field(v, "function")
		id, name, arguments := field(v, "id"), field(function, "name"), field(function, "arguments")
		if !id.IsString() || !name.IsString() || !arguments.IsString() {
			return nil, Malformed
		}
		calls = append(calls, call{id.AsString(), name.AsString(), arguments.AsString()})
	}
	return calls, Exact
}

// function is a tool that the model may call.
type function struct {
	name, description string
	parameters        jinja.Value // an object, or None
}

// functions are the tools of the request.
func (r *chatRequest) functions() (list []function) {
	for _, tool := range elements(r.tools) {
		f := field(tool, "function")
		description := ""
		if v := field(f, "description"); v.IsString() {
			description = v.AsString()
		}
		list = append(list, function{field(f, "name").AsString(), description, field(f, "parameters")})
	}
	return list
}
