package prompt

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// rawJSON is a value as it is spelt in a body.
type rawJSON string

// oddNumbers are numbers that languages read or write in different ways.
var oddNumbers = []string{"0", "-0", "1", "-1", "2", "1.0", "-0.0", "0.0", "1e3", "1E+2", "1e-7", "1e22", "1e23", "123456789012345678", "9007199254740993",
	"12345678901234567890", "-9223372036854775808", "9223372036854775808", "123456789012345678901234567890", "1e400", "-1e400", "1e-400", "5e-324",
	"0.1", "100000.0", "1e15", "1e16", "1e17", "123456789.123456789", "0.30000000000000004", "3.14", "NaN", "Infinity", "-Infinity", "1.7976931348623157e308"}

// oddStrings are texts that mean something somewhere.
var oddStrings = []string{"", " ", "\n", "auto", "none", "null", "true", "user", "system", "assistant", "tool", "developer", "function", "text", "0", "required",
	"x-anthropic-billing-header: a\nb", "x-anthropic-billing-header", "CONTINUE_FINAL_MESSAGE_TAG ", "CONTINUE_FINAL_MESSAGE_TAG", "\u001c", "\u0085", "\u2028", "\ufeff", "😀", "a\u0000b",
	" x ", "x\n\n", "\u00a0x\u00a0", "<think>", "</think>x", "a</think>", "<think>\nr\n</think>\n\nx", "{}", "{\"a\": 1}", "[]", "<tool_response>", "<tool_response>x</tool_response>", "<__media__>", "<image>",
	"<|channel|>final<|message|>x", "functions.f", "<|channel|>analysis<|message|>"}

func (b *bodies) oddValue() any {
	switch b.IntN(12) {
	case 0, 1:
		return nil
	case 2, 3, 4:
		return pickOf(b, oddStrings...)
	case 5:
		return []any{}
	case 6:
		return object{}
	case 7:
		return rawJSON(pickOf(b, oddNumbers...))
	case 8:
		return b.chance(50)
	case 9:
		return []any{b.oddValue()}
	case 10:
		return object{{pickOf(b, "a", "type", "text", "name", "content"), b.oddValue()}}
	}
	return b.value(2)
}

// memberNamesOf are what an object like o may have as members.
func memberNamesOf(o object) []string {
	has := func(name string) bool {
		return slices.ContainsFunc(o, func(m jsonField) bool { return m.name == name })
	}
	switch {
	case has("messages"):
		return []string{"tools", "tool_choice", "documents", "reasoning_effort", "add_generation_prompt", "continue_final_message", "add_special_tokens",
			"chat_template_kwargs", "response_format", "parallel_tool_calls", "functions", "metadata", "store", "include_reasoning", "prompt", "logprobs", "stream",
			"guided_json", "mm_processor_kwargs", "media_io_kwargs", "kv_transfer_params", "truncate_prompt_tokens", "cache_salt", "chat_template", "max_tokens", "user", "echo", "structured_outputs", "thinking"}
	case has("prompt"):
		return []string{"suffix", "add_special_tokens", "echo", "truncate_prompt_tokens", "cache_salt", "prompt_embeds", "messages", "response_format", "stream", "n", "best_of"}
	case has("role"):
		return []string{"content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "refusal", "audio", "function_call", "task", "tools", "recipient", "channel", "content_type", "prefix", "thinking", "role", "annotations"}
	case has("type"):
		return []string{"text", "type", "name", "closed", "thinking", "refusal", "uuid", "extra", "cache_control", "prompt_cache_breakpoint", "id", "function", "index", "defer_loading", "description", "annotations"}
	case has("arguments"):
		return []string{"name", "arguments", "description", "type"}
	case has("name"):
		return []string{"description", "parameters", "strict", "defer_loading", "type", "return", "response", "name"}
	}
	return []string{"enable_thinking", "thinking", "a", "reasoning_effort", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "bos_token", "eos_token", "date_string", "tools_in_user_message", "custom_tools", "builtin_tools", "model_identity", "tokenize", "messages", "preserve_thinking", "truncation", "return_dict", "keep_all_reasoning", "strftime_now", "raise_exception", "loop", "namespace", "xml_tools", "x", "role", "content"}
}

func (b *bodies) text1() string {
	if b.chance(50) {
		return pickOf(b, oddStrings...)
	}
	return b.text()
}

// likely is a value that fits the name more often than not.
func (b *bodies) likely(name string) any {
	if b.chance(25) {
		return b.oddValue()
	}
	switch name {
	case "role":
		return pickOf(b, "user", "assistant", "system", "developer", "tool", "function", "latest_reminder", "custom", "")
	case "content":
		return b.content()
	case "tools":
		return b.tools()
	case "tool_choice":
		return pickOf[any](b, "auto", "none", "required", object{{"type", "function"}, {"function", object{{"name", "tool_0"}}}}, object{{"function", object{{"name", "tool_1"}}}}, nil)
	case "documents":
		list := []any{}
		for range b.IntN(3) {
			list = append(list, object{{pickOf(b, "title", "text", "id"), b.text1()}, {"text", b.text1()}})
		}
		return list
	case "reasoning_effort":
		return pickOf(b, "none", "minimal", "low", "medium", "high", "xhigh", "max")
	case "add_generation_prompt", "continue_final_message", "add_special_tokens", "strict", "defer_loading", "enable_thinking", "thinking", "closed",
		"tools_in_user_message", "parallel_tool_calls", "include_reasoning", "stream", "preserve_thinking", "keep_all_reasoning", "echo":
		return pickOf[any](b, true, false, true, false, "true", "off", rawJSON("1"), rawJSON("0.0"), nil)
	case "chat_template_kwargs":
		o := object{}
		for range b.IntN(3) {
			name := pickOf(b, memberNamesOf(object{})...)
			o = append(o, jsonField{name, b.likely(name)})
		}
		return o
	case "tool_calls":
		list := []any{}
		for range b.IntN(3) {
			list = append(list, object{{"id", pickOf(b, "", "call1", "call-with-a-long-id-0000000000", "é", "functions.f:0", "123456789")}, {"type", "function"},
				{"function", object{{"name", pickOf(b, "tool_0", "", "functions.f", "é\n")}, {"arguments", pickOf(b, "{}", "", `{"a": 1.0, "b": 1e400, "c": 12345678901234567890}`, `{"a":"\ud83d\ude00","a":2}`, `{"ü":[null,true]}`, "[1]", `"x"`, "{", "NaN", `{"a": NaN}`, `{"a":-0.0,"b":-0}`)}}}})
		}
		return list
	case "function_call":
		return object{{"name", "f"}, {"arguments", "{}"}}
	case "audio":
		return object{{"id", "x"}}
	case "parameters":
		return b.schema(2)
	case "response_format":
		return pickOf[any](b, object{{"type", "json_object"}}, object{{"type", "text"}}, object{{"type", "json_schema"}, {"json_schema", object{{"name", "s"}, {"schema", object{{"type", "object"}}}}}})
	case "prompt":
		return "x" + b.text1()
	case "prompt_cache_breakpoint":
		return object{{"mode", "explicit"}}
	case "metadata":
		return object{{"a", "b"}}
	case "type":
		return pickOf(b, "text", "input_text", "output_text", "thinking", "refusal", "function", "tool_reference", "custom")
	case "max_tokens", "n":
		return 1
	}
	return b.text1()
}

// mutated is a value with some change somewhere in it. depth is how far down
// it may be.
func (b *bodies) mutated(v any, depth int) any {
	switch v := v.(type) {
	case object:
		if len(v) > 0 && depth > 0 && b.chance(75) {
			out := slices.Clone(v)
			i := b.IntN(len(out))
			if out[i].name == "model" {
				return v
			}
			if b.chance(30) {
				out[i].value = b.likely(out[i].name)
			} else {
				out[i].value = b.mutated(out[i].value, depth-1)
			}
			return out
		}
		out := slices.Clone(v)
		switch b.IntN(6) {
		case 0, 1, 2:
			name := pickOf(b, memberNamesOf(v)...)
			out = slices.Insert(out, b.IntN(len(out)+1), jsonField{name, b.likely(name)})
		case 3:
			b.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
		case 4:
			if len(out) > 0 {
				i := b.IntN(len(out))
				if out[i].name != "model" {
					out = slices.Delete(out, i, i+1)
				}
			}
		default:
			if len(out) > 0 {
				i := b.IntN(len(out))
				if out[i].name != "model" {
					out = append(out, jsonField{out[i].name, b.likely(out[i].name)}) // twice
				}
			}
		}
		return out
	case []any:
		if len(v) > 0 && depth > 0 && b.chance(85) {
			out := slices.Clone(v)
			i := b.IntN(len(out))
			out[i] = b.mutated(out[i], depth-1)
			return out
		}
		out := slices.Clone(v)
		switch {
		case len(out) > 0 && b.chance(40):
			i := b.IntN(len(out))
			return slices.Delete(out, i, i+1)
		case len(out) > 0 && b.chance(60):
			return append(out, out[b.IntN(len(out))])
		case len(out) > 1 && b.chance(50):
			i := b.IntN(len(out) - 1)
			out[i], out[i+1] = out[i+1], out[i]
			return out
		}
		return append(out, b.oddValue())
	case string:
		if b.chance(60) {
			i := b.IntN(len(v) + 1)
			return strings.ToValidUTF8(v[:i]+b.text1()+v[i:], "\ufffd")
		}
	}
	return b.oddValue()
}

// appendOdd appends a value with blanks and escapes where JSON allows them.
func (b *bodies) appendOdd(dst []byte, v any, odd int) []byte {
	blank := func() {
		if b.chance(odd / 4) {
			dst = append(dst, pickOf(b, " ", "\n", "\t", "\r\n", "    ")...)
		}
	}
	switch v := v.(type) {
	case rawJSON:
		return append(dst, v...)
	case string:
		return b.appendOddString(dst, v, odd)
	case object:
		dst = append(dst, '{')
		for i, m := range v {
			if i > 0 {
				dst = append(dst, ',')
			}
			blank()
			dst = b.appendOddString(dst, m.name, odd/4)
			blank()
			dst = append(dst, ':')
			blank()
			dst = b.appendOdd(dst, m.value, odd)
			blank()
		}
		return append(dst, '}')
	case []any:
		dst = append(dst, '[')
		for i, item := range v {
			if i > 0 {
				dst = append(dst, ',')
			}
			blank()
			dst = b.appendOdd(dst, item, odd)
			blank()
		}
		return append(dst, ']')
	}
	text, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return append(dst, text...)
}

func (b *bodies) appendOddString(dst []byte, s string, odd int) []byte {
	dst = append(dst, '"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\' || b.chance(odd) && r == '/':
			dst = append(dst, '\\', byte(r))
		case r == '\n' && b.chance(50):
			dst = append(dst, `\n`...)
		case r < ' ' || b.chance(odd):
			if r > 0xffff {
				r -= 0x10000
				dst = fmt.Appendf(dst, `\u%04x\u%04X`, 0xd800+r>>10, 0xdc00+r&0x3ff)
			} else {
				dst = fmt.Appendf(dst, pickOf(b, `\u%04x`, `\u%04X`), r)
			}
		default:
			dst = append(dst, string(r)...)
		}
	}
	return append(dst, '"')
}

// oddly changes a body, and spells it in another way.
func (b *bodies) oddly(o object) []byte {
	for range b.IntN(4) {
		o = b.mutated(o, 7).(object)
	}
	odd := 0
	if b.chance(40) {
		odd = pickOf(b, 4, 20, 100)
	}
	return b.appendOdd(nil, o, odd)
}

// growing is a conversation that gets longer by turns.
type growing struct {
	head     object
	messages []any
}

func (b *bodies) turn(g *growing) []byte {
	if len(g.messages) == 0 {
		g.head = object{{"model", "m"}}
		if b.chance(40) {
			g.head = append(g.head, jsonField{"tools", b.tools()})
		}
		g.messages = b.messages()
	} else {
		g.messages = append(g.messages, object{{"role", "assistant"}, {"content", b.text() + b.text()}}, object{{"role", "user"}, {"content", b.text() + b.text()}})
		if b.chance(30) {
			g.messages = append(g.messages, b.messages()...)
		}
	}
	return b.appendOdd(nil, append(slices.Clone(g.head), jsonField{"messages", g.messages}), 0)
}
