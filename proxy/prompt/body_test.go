package prompt

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
)

// bodies makes request bodies of all shapes that a client may send, from a
// seed: the same seed makes the same bodies.
type bodies struct{ *rand.Rand }

func newBodies(seed uint64) *bodies { return &bodies{rand.New(rand.NewPCG(seed, 1))} }

// chance is true in n of 100 cases.
func (b *bodies) chance(n int) bool { return b.IntN(100) < n }

func pickOf[T any](b *bodies, list ...T) T { return list[b.IntN(len(list))] }

// alphabet are what texts are made of: words, and what templates and
// tokenizers are known to stumble over.
var alphabet = []string{
	"the", "quick", "brown", "fox", "Please", "answer", "in", "42", "3.14159", "2026-11-30", "I'm", "we'LL", "don't", "naïve", "Zürich",
	"你好", "世界", "こんにちは", "안녕", "हिन्दी", "مرحبا", "🤷🏽‍♀️", "👩‍👩‍👧‍👦", "e\u0301", "ﬁ", "Ⅷ", "\u00a0", "\u200b", "\ufeff", "\u2028",
	" ", "  ", "\n", "\n\n", "\t", "\r\n", "   \n ", ".", ",", "!?", "...", "--", "==", "()", "{}", "[]", "{{ x }}", "{% if %}", "{# c #}", "</s>", "<s>", "<bos>",
	"<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start|>", "<|end|>", "<|endoftext|>", "<think>", "</think>", "<think>\n\n</think>\n\n", "[INST]", "[/INST]", "<|im_", "<tool_call>", "</tool_response>",
	"<｜User｜>", "<end_of_turn>", "<start_of_turn>", "func main() {\n\treturn x[1:]\n}", "a_b_c", "camelCase", "HTTP", "\\", "\"", "'", "&amp;", "<b>", "%s", "x", "0", "00000000", "aaaaaaaaaaaaaaaaaaaa", "————", "\x7f", "\u0000", "\x1b[0m",
}

func (b *bodies) text() string {
	n := b.IntN(12)
	if b.chance(5) {
		n = b.IntN(400)
	}
	var s strings.Builder
	for range n {
		s.WriteString(alphabet[b.IntN(len(alphabet))])
		if b.chance(60) {
			s.WriteByte(' ')
		}
	}
	return s.String()
}

// object keeps the order of its members, as a client's JSON has one.
type object []jsonField

type jsonField struct {
	name  string
	value any
}

func (o object) MarshalJSON() ([]byte, error) {
	var s strings.Builder
	s.WriteByte('{')
	for i, m := range o {
		if i > 0 {
			s.WriteByte(',')
		}
		name, _ := json.Marshal(m.name)
		value, err := json.Marshal(m.value)
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(&s, "%s:%s", name, value)
	}
	s.WriteByte('}')
	return []byte(s.String()), nil
}

func (b *bodies) content() any {
	switch {
	case b.chance(72):
		return b.text()
	case b.chance(8):
		return nil
	}
	parts := []any{}
	for range b.IntN(4) {
		switch {
		case b.chance(85):
			parts = append(parts, object{{"type", "text"}, {"text", b.text()}})
		case b.chance(40):
			parts = append(parts, b.text())
		case b.chance(50):
			parts = append(parts, object{{"type", "input_text"}, {"text", b.text()}})
		default:
			parts = append(parts, object{{"type", "refusal"}, {"refusal", b.text()}})
		}
	}
	return parts
}

func (b *bodies) value(depth int) any {
	switch n := b.IntN(10); {
	case n < 3:
		return b.text()
	case n < 4:
		return b.IntN(100000) - 50000
	case n < 5:
		return pickOf[any](b, 0.5, 1e-7, 1e22, 1.0, 123456789.125, json.Number("1.0"), json.Number("1e3"), json.Number("-0.0"), json.Number("12345678901234567890"))
	case n < 6:
		return pickOf[any](b, true, false, nil)
	case n < 8 && depth > 0:
		list := []any{}
		for range b.IntN(4) {
			list = append(list, b.value(depth-1))
		}
		return list
	case depth > 0:
		o := object{}
		for i := range b.IntN(4) {
			o = append(o, jsonField{fmt.Sprintf("%s%d", pickOf(b, "a", "z", "key", "ü", "name"), i), b.value(depth - 1)})
		}
		return o
	}
	return "leaf"
}

func (b *bodies) schema(depth int) any {
	kinds := []string{"string", "integer", "number", "boolean"}
	if depth == 0 || b.chance(50) {
		o := object{{"type", pickOf(b, kinds...)}}
		if b.chance(50) {
			o = append(o, jsonField{"description", b.text()})
		}
		if b.chance(20) {
			o = append(o, jsonField{"enum", []any{"a", "b", b.text()}})
		}
		if b.chance(20) {
			o = append(o, jsonField{"default", b.value(0)})
		}
		if b.chance(10) {
			o[0].value = []any{"string", "null"}
		}
		if b.chance(10) {
			o = append(o, jsonField{"nullable", true})
		}
		return o
	}
	if b.chance(25) {
		return object{{"type", "array"}, {"items", b.schema(depth - 1)}, {"description", b.text()}}
	}
	if b.chance(10) {
		return object{{"anyOf", []any{b.schema(0), b.schema(0)}}}
	}
	properties := object{}
	required := []any{}
	for i := range b.IntN(4) {
		name := fmt.Sprintf("%s_%d", pickOf(b, "city", "unit", "zone", "älter"), i)
		properties = append(properties, jsonField{name, b.schema(depth - 1)})
		if b.chance(50) {
			required = append(required, name)
		}
	}
	o := object{{"type", "object"}, {"properties", properties}}
	if b.chance(70) {
		o = append(o, jsonField{"required", required})
	}
	if b.chance(20) {
		o = append(o, jsonField{"additionalProperties", false})
	}
	return o
}

func (b *bodies) tools() []any {
	list := []any{}
	for i := range 1 + b.IntN(3) {
		f := object{{"name", fmt.Sprintf("tool_%d", i)}}
		switch {
		case b.chance(80):
			f = append(f, jsonField{"description", b.text()})
		case b.chance(30):
			f = append(f, jsonField{"description", nil})
		}
		if b.chance(90) {
			f = append(f, jsonField{"parameters", b.schema(2)})
		}
		if b.chance(15) {
			f = append(f, jsonField{"strict", b.chance(50)})
		}
		if b.chance(10) {
			f = append(f, jsonField{"extra", b.value(1)})
		}
		t := object{{"type", "function"}, {"function", f}}
		if b.chance(10) {
			t = object{{"function", f}, {"type", "function"}}
		}
		list = append(list, t)
	}
	return list
}

func (b *bodies) messages() []any {
	list := []any{}
	if b.chance(50) {
		list = append(list, object{{"role", pickOf(b, "system", "system", "system", "developer")}, {"content", b.content()}})
	}
	calls := 0
	for range 1 + b.IntN(5) {
		if b.chance(93) {
			u := object{{"role", "user"}, {"content", b.content()}}
			if b.chance(5) {
				u = append(u, jsonField{"name", "ann"})
			}
			list = append(list, u)
		}
		if b.chance(60) {
			a := object{{"role", "assistant"}}
			if b.chance(90) {
				a = append(a, jsonField{"content", b.content()})
			}
			if b.chance(20) {
				a = append(a, jsonField{pickOf(b, "reasoning", "reasoning_content"), b.text()})
			}
			if b.chance(20) {
				made := []any{}
				for range 1 + b.IntN(2) {
					arguments, _ := json.Marshal(object{{"city", b.text()}, {"n", b.value(1)}})
					text := string(arguments)
					if b.chance(8) {
						text = pickOf(b, "", "{}", " {\"a\": 1} ", "null", "[1]", "not json")
					}
					made = append(made, object{{"id", fmt.Sprintf("call%05d", calls)}, {"type", "function"},
						{"function", object{{"name", "tool_0"}, {"arguments", text}}}})
					calls++
				}
				a = append(a, jsonField{"tool_calls", made})
				list = append(list, a)
				for i := range made {
					list = append(list, object{{"role", "tool"}, {"tool_call_id", fmt.Sprintf("call%05d", calls-len(made)+i)}, {"content", b.content()}})
				}
				continue
			}
			if b.chance(3) {
				a = append(a, jsonField{"tool_calls", []any{}})
			}
			list = append(list, a)
		}
	}
	return list
}

// chat is a body for /v1/chat/completions.
func (b *bodies) chat(model string) []byte { return marshal(b.chatObject(model)) }

func marshal(o object) []byte {
	body, err := json.Marshal(o)
	if err != nil {
		panic(err)
	}
	return body
}

func (b *bodies) chatObject(model string) object {
	o := object{{"model", model}, {"messages", b.messages()}}
	if b.chance(30) {
		o = append(o, jsonField{"tools", b.tools()})
		if b.chance(20) {
			o = append(o, jsonField{"tool_choice", pickOf(b, "none", "auto")})
		}
	}
	if b.chance(15) {
		o = append(o, jsonField{"chat_template_kwargs", pickOf(b, object{{"enable_thinking", false}}, object{{"enable_thinking", true}, {"thinking", true}}, object{}, object{{"unknown", 1}})})
	}
	if b.chance(8) {
		o = append(o, jsonField{"reasoning_effort", pickOf(b, "low", "medium", "high", "none")})
	}
	if b.chance(8) {
		o = append(o, jsonField{"add_generation_prompt", false})
		if b.chance(50) {
			o = append(o, jsonField{"continue_final_message", true})
		}
	}
	if b.chance(5) {
		o = append(o, jsonField{"add_special_tokens", b.chance(50)})
	}
	if b.chance(4) {
		o = append(o, jsonField{"documents", []any{object{{"title", b.text()}, {"text", b.text()}}}})
	}
	if b.chance(4) {
		o = append(o, jsonField{"cache_salt", "pepper"})
	}
	for range b.IntN(3) {
		o = append(o, pickOf(b, jsonField{"temperature", 0.5}, jsonField{"max_tokens", 5}, jsonField{"seed", 1}, jsonField{"user", "x"}, jsonField{"n", 1}, jsonField{"stop", []string{"x"}}))
	}
	return o
}

// completion is a body for /v1/completions.
func (b *bodies) completion(model string) []byte { return marshal(b.completionObject(model)) }

func (b *bodies) completionObject(model string) object {
	ids := func() []any {
		list := []any{}
		for range 1 + b.IntN(20) {
			list = append(list, b.IntN(1000))
		}
		return list
	}
	var prompt any
	switch n := b.IntN(10); {
	case n < 6:
		prompt = "x" + b.text()
	case n < 8:
		list := []any{}
		for range 1 + b.IntN(3) {
			list = append(list, "y"+b.text())
		}
		prompt = list
	case n < 9:
		prompt = ids()
	default:
		prompt = []any{ids(), ids()}
	}
	o := object{{"model", model}, {"prompt", prompt}}
	if b.chance(20) {
		o = append(o, jsonField{"add_special_tokens", b.chance(50)})
	}
	if b.chance(10) {
		o = append(o, jsonField{"suffix", nil})
	}
	if b.chance(5) {
		o = append(o, jsonField{"echo", true})
	}
	return o
}
