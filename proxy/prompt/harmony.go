package prompt

import (
	"bytes"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/ardanlabs/jinja"

	"github.com/inferrail/inferrail/proxy/prompt/template"
	"github.com/inferrail/inferrail/proxy/prompt/tokenizer"
)

// harmony renders the chats of gpt-oss as vLLM does: vLLM makes Harmony
// messages of the request and the openai_harmony library renders them. It
// follows a vLLM with its defaults, where VLLM_SYSTEM_START_DATE and
// VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS are not set and which runs no tool
// server. newHarmony makes it; it is immutable.
type harmony struct {
	tokenizer *tokenizer.Tokenizer
	ids       map[string]uint32
}

// harmonyTokens are the special tokens that a prompt may hold.
var harmonyTokens = []string{"<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"}

func newHarmony(t *tokenizer.Tokenizer) (*harmony, error) {
	ids, missing := tokenIDs(t, harmonyTokens)
	if missing != "" {
		return nil, fmt.Errorf("gpt-oss: the tokenizer lacks the token %s", missing)
	}
	return &harmony{t, ids}, nil
}

// harmonyMessage is a message of the conversation after the preamble. Of
// instructions and parts one is used.
type harmonyMessage struct {
	kind harmonyKind
	// name is the tool that is called, or that has answered.
	name string
	// texts are encoded each on its own.
	texts []string
}

type harmonyKind uint8

const (
	harmonyUser harmonyKind = iota
	harmonyDeveloper
	harmonyPreamble // what the assistant says before it calls a tool
	harmonyAnalysis
	harmonyFinal
	harmonyCall
	harmonyResult
)

func (h *harmony) render(dst *Prompt, r *chatRequest, now time.Time) Reason {
	var s script
	if reason := h.script(&s, r, now); reason != Exact {
		return reason
	}
	return s.encode(dst, h.tokenizer, h.ids)
}

// script spells the chat out.
func (h *harmony) script(s *script, r *chatRequest, now time.Time) Reason {
	effort := "medium"
	switch r.reasoningEffort {
	case "":
	case "low", "medium", "high":
		effort = r.reasoningEffort
	default:
		return Malformed
	}
	tools, messages := r.functions(), r.messages

	// The first message, if it is the system's, becomes the instructions.
	instructions, instructed := "", false
	if role := messages[0].role; role == "system" || role == "developer" {
		var reason Reason
		if instructions, instructed, reason = messages[0].flatText(); reason != Exact {
			return reason
		}
		messages = messages[1:]
	}

	s.system(effort, now, len(tools) > 0)
	if instructions != "" || len(tools) > 0 {
		var b []byte
		if instructed {
			b = append(b, "# Instructions\n\n"...)
			b = append(b, instructions...)
		}
		if len(tools) > 0 {
			if instructed {
				b = append(b, "\n\n"...)
			}
			var reason Reason
			if b, reason = appendHarmonyTools(b, tools); reason != Exact {
				return reason
			}
		}
		s.developer(string(b))
	}

	conversation, reason := harmonyMessages(messages)
	if reason != Exact {
		return reason
	}
	// Thoughts that led to an answer are dropped once it was given.
	answered := -1
	for i, m := range conversation {
		if m.kind == harmonyFinal {
			answered = i
		}
	}
	for i, m := range conversation {
		if m.kind == harmonyAnalysis && i < answered {
			continue
		}
		s.harmonyMessage(m)
	}
	s.token("<|start|>")
	s.text("assistant")
	return Exact
}

// system renders the message that says what the model is.
func (s *script) system(effort string, now time.Time, tools bool) {
	text := "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\nCurrent date: " +
		now.Format("2006-01-02") + "\n\nReasoning: " + effort +
		"\n\n# Valid channels: analysis, commentary, final. Channel must be included for every message."
	if tools {
		text += "\nCalls to these tools must go to the commentary channel: 'functions'."
	}
	s.token("<|start|>")
	s.text("system")
	s.token("<|message|>")
	s.text(text)
	s.token("<|end|>")
}

func (s *script) developer(text string) {
	s.token("<|start|>")
	s.text("developer")
	s.token("<|message|>")
	s.text(text)
	s.token("<|end|>")
}

func (s *script) harmonyMessage(m harmonyMessage) {
	assistant := func(channel string) {
		s.text("assistant")
		s.token("<|channel|>")
		s.text(channel)
	}
	end := "<|end|>"
	s.token("<|start|>")
	switch m.kind {
	case harmonyUser:
		s.text("user")
	case harmonyDeveloper:
		s.text("developer")
	case harmonyPreamble:
		assistant("commentary")
	case harmonyAnalysis:
		assistant("analysis")
	case harmonyFinal:
		assistant("final")
	case harmonyCall:
		// The library puts the recipient behind the channel and marks the
		// format with <|constrain|>; vLLM writes the header anew, as the model
		// was trained.
		s.text("assistant to=functions." + m.name)
		s.token("<|channel|>")
		s.text("commentary json")
		end = "<|call|>"
	case harmonyResult:
		s.text("functions." + m.name)
		s.token("<|channel|>")
		s.text("commentary")
		s.text(" to=assistant")
	}
	s.token("<|message|>")
	for _, text := range m.texts {
		s.text(text)
	}
	s.token(end)
}

// harmonyMessages makes Harmony messages of those behind the instructions.
func harmonyMessages(messages []*message) (out []harmonyMessage, _ Reason) {
	// A result names its call by id; the last call of an id counts, wherever it
	// is.
	names := map[string]string{}
	for _, m := range messages {
		if m.role != "assistant" && m.fields.Data["tool_calls"].IsNone() {
			return nil, Malformed
		}
		calls, reason := m.readCalls()
		if reason != Exact {
			return nil, reason
		}
		for _, c := range calls {
			names[c.id] = c.name
		}
	}

	for _, m := range messages {
		switch m.role {
		case "user":
			texts, reason := harmonyTexts(m.fields.Data["content"])
			if reason != Exact {
				return nil, reason
			}
			out = append(out, harmonyMessage{kind: harmonyUser, texts: texts})
		case "system", "developer":
			text, there, reason := m.flatText()
			if reason != Exact {
				return nil, reason
			}
			if there {
				out = append(out, harmonyMessage{kind: harmonyDeveloper, texts: []string{"# Instructions\n\n" + text}})
			}
		case "tool":
			text, _, reason := m.flatText()
			if reason != Exact {
				return nil, reason
			}
			// Without an id "" is looked up, and null is never found.
			name, id := "", m.fields.Data["tool_call_id"]
			switch {
			case id.IsUndefined():
				name = names[""]
			case id.IsString():
				name = names[id.AsString()]
			case !id.IsNone():
				return nil, Malformed
			}
			out = append(out, harmonyMessage{kind: harmonyResult, name: name, texts: []string{text}})
		case "assistant":
			var reason Reason
			if out, reason = appendHarmonyAssistant(out, m); reason != Exact {
				return nil, reason
			}
		default:
			return nil, Malformed
		}
	}
	return out, Exact
}

func appendHarmonyAssistant(out []harmonyMessage, m *message) ([]harmonyMessage, Reason) {
	var thoughts []harmonyMessage
	switch v := m.fields.Data["reasoning"]; {
	case v.IsString():
		if v.AsString() != "" {
			thoughts = []harmonyMessage{{kind: harmonyAnalysis, texts: []string{v.AsString()}}}
		}
	case !isNull(v):
		return nil, Malformed
	}
	calls, reason := m.readCalls()
	if reason != Exact {
		return nil, reason
	}
	if len(calls) > 0 {
		text, _, reason := m.flatText()
		if reason != Exact {
			return nil, reason
		}
		if text != "" {
			out = append(out, harmonyMessage{kind: harmonyPreamble, texts: []string{text}})
		}
		out = append(out, thoughts...)
		for _, c := range calls {
			// vLLM refuses to write a header with the text of a special token.
			if _, after, ok := strings.Cut(c.name, "<|"); ok && strings.Contains(after, "|>") {
				return nil, Unfollowed
			}
			out = append(out, harmonyMessage{kind: harmonyCall, name: c.name, texts: []string{c.arguments}})
		}
		return out, Exact
	}

	out = append(out, thoughts...)
	texts, reason := harmonyTexts(m.fields.Data["content"])
	if reason != Exact {
		return nil, reason
	}
	// What begins with an empty text is no answer, whatever follows.
	if len(texts) > 0 && texts[0] != "" {
		out = append(out, harmonyMessage{kind: harmonyFinal, texts: texts})
	}
	return out, Exact
}

// flatText is a message's content as one text. there is false when it has
// none.
func (m *message) flatText() (text string, there bool, _ Reason) {
	content := m.fields.Data["content"]
	switch {
	case content.IsString():
		return content.AsString(), true, Exact
	case isNull(content), m.readOnce:
		// vLLM looks for text in lists only.
		return "", false, Exact
	case !content.IsList():
		return "", false, Malformed
	}
	var b strings.Builder
	for _, part := range elements(content) {
		if !part.IsDict() {
			// Whether strings count depends on what else is in the list.
			return "", false, Unfollowed
		}
		v := field(part, "text")
		switch {
		case v.IsString():
			b.WriteString(v.AsString())
			there = true
		case !isNull(v):
			return "", false, Malformed
		}
	}
	return b.String(), there, Exact
}

// harmonyTexts are the texts of a content, encoded each on its own. A part that
// is no text counts as an empty one.
func harmonyTexts(content jinja.Value) (texts []string, _ Reason) {
	if content.IsString() {
		return []string{content.AsString()}, Exact
	}
	for _, part := range elements(content) {
		text := field(part, "text")
		switch {
		case text.IsString():
			texts = append(texts, text.AsString())
		case part.IsDict() && text.IsUndefined():
			texts = append(texts, "")
		default:
			return nil, Malformed
		}
	}
	return texts, Exact
}

// appendHarmonyTools appends the section that declares the functions.
func appendHarmonyTools(b []byte, tools []function) (_ []byte, reason Reason) {
	b = append(b, "# Tools\n\n## functions\n\nnamespace functions {\n\n"...)
	for _, f := range tools {
		for line := range strings.Lines(f.description) {
			if bare, ok := strings.CutSuffix(line, "\n"); ok {
				line = strings.TrimSuffix(bare, "\r")
			}
			b = append(b, "// "...)
			b = append(b, line...)
			b = append(b, '\n')
		}
		b = append(b, "type "...)
		b = append(b, f.name...)
		if isNull(f.parameters) {
			b = append(b, " = () => any;\n\n"...)
			continue
		}
		b = append(b, " = (_: "...)
		t := typeScript{b: b}
		t.schema(f.parameters, "", 0)
		if t.reason != Exact {
			return t.b, t.reason
		}
		b = append(t.b, ") => any;\n\n"...)
	}
	return append(b, "} // namespace functions"...), Exact
}

// typeScript writes JSON schemas as the types that gpt-oss is shown. It is made
// for one schema.
type typeScript struct {
	b      []byte
	reason Reason // why a schema cannot be followed
}

// maxSchemaDepth is how deep a schema may be: the engine's library gives up
// somewhat above.
const maxSchemaDepth = 100

func (t *typeScript) add(parts ...string) {
	for _, part := range parts {
		t.b = append(t.b, part...)
	}
}

// schema writes a type at an indent.
func (t *typeScript) schema(schema jinja.Value, indent string, depth int) {
	if depth > maxSchemaDepth {
		t.reason = Unfollowed
		return
	}
	if oneOf := field(schema, "oneOf"); oneOf.IsList() {
		for _, variant := range elements(oneOf) {
			t.add("\n", indent, " | ")
			t.nullable(variant, indent+"   ", depth)
			comment := " // "
			if m := field(variant, "description"); m.IsString() {
				t.add(comment, m.AsString())
				comment = " "
			}
			if m := field(variant, "default"); !m.IsUndefined() {
				t.add(comment)
				// Here the library writes the default of an enumeration as
				// JSON, elsewhere as it is.
				if m.IsString() && !enumerated(variant) {
					t.add(`default: "`, m.AsString(), `"`)
				} else {
					t.add("default: ")
					t.json(m, depth)
				}
			}
		}
		return
	}

	kind := field(schema, "type")
	if kind.IsList() {
		any := false
		for _, m := range elements(kind) {
			if !m.IsString() {
				continue
			}
			name := m.AsString()
			if name == "integer" {
				name = "number"
			}
			if any {
				t.add(" | ")
			}
			t.add(name)
			any = true
		}
		if any {
			return
		}
	}
	if !kind.IsString() {
		t.add("any")
		return
	}
	switch kind.AsString() {
	case "object":
		t.object(schema, indent, depth)
	case "string":
		any := false
		for _, m := range elements(field(schema, "enum")) {
			if !m.IsString() {
				continue
			}
			if any {
				t.add(" | ")
			}
			t.add(`"`, m.AsString(), `"`)
			any = true
		}
		if !any {
			t.add("string")
		}
	case "number", "integer":
		t.add("number")
	case "boolean":
		t.add("boolean")
	case "array":
		if m := field(schema, "items"); !m.IsUndefined() {
			t.schema(m, indent, depth+1)
			t.add("[]")
		} else {
			t.add("Array<any>")
		}
	default:
		t.add("any")
	}
}

// nullable writes a type, and that it may be null where it says so.
func (t *typeScript) nullable(schema jinja.Value, indent string, depth int) {
	start := len(t.b)
	t.schema(schema, indent, depth+1)
	if m := field(schema, "nullable"); m.IsBool() && m.AsBool() && !bytes.Contains(t.b[start:], []byte("null")) {
		t.add(" | null")
	}
}

func (t *typeScript) object(schema jinja.Value, indent string, depth int) {
	if m := field(schema, "description"); m.IsString() {
		t.add(indent, "// ", m.AsString(), "\n")
	}
	t.add("{\n")
	if m := field(schema, "properties"); m.IsDict() {
		required := map[string]bool{}
		for _, m := range elements(field(schema, "required")) {
			if m.IsString() {
				required[m.AsString()] = true
			}
		}
		properties := m.AsDict()
		for _, name := range properties.OrderedKeys() {
			property, _ := properties.Get(name)
			mark := "?"
			if required[name] {
				mark = ""
			}
			t.property(name, mark, property, indent, depth)
		}
	}
	t.add(indent, "}")
}

func (t *typeScript) property(name, mark string, property jinja.Value, indent string, depth int) {
	description := field(property, "description")
	oneOf, value := field(property, "oneOf"), field(property, "default")
	if m := field(property, "title"); m.IsString() {
		t.add(indent, "// ", m.AsString(), "\n", indent, "//\n")
	}
	if oneOf.IsUndefined() && description.IsString() {
		t.add(indent, "// ", description.AsString(), "\n")
	}
	if m := elements(field(property, "examples")); len(m) > 0 {
		t.add(indent, "// Examples:\n")
		for _, example := range m {
			if example.IsString() {
				t.add(indent, `// - "`, example.AsString(), "\"\n")
			}
		}
	}
	if oneOf.IsList() {
		t.variants(name, mark, property, elements(oneOf), indent, depth)
		return
	}
	t.add(indent, name, mark, ": ")
	t.nullable(property, indent+"    ", depth)
	t.add(",")
	if oneOf.IsUndefined() && !value.IsUndefined() {
		t.add(" // ")
		t.value(property, value, depth)
	}
	t.add("\n")
}

// variants writes a property that is one of several types. Its description goes
// above it, unless that of the first type says the same.
func (t *typeScript) variants(name, mark string, property jinja.Value, variants []jinja.Value, indent string, depth int) {
	description, above := field(property, "description"), false
	same := func(variant jinja.Value) bool {
		m := field(variant, "description")
		return m.IsString() && description.IsString() && m.AsString() == description.AsString()
	}
	if description.IsString() && (len(variants) == 0 || !same(variants[0])) {
		t.add(indent, "// ", description.AsString(), "\n")
		above = true
	}
	if m := field(property, "default"); !m.IsUndefined() {
		t.add(indent, "// ")
		t.value(property, m, depth)
		t.add("\n")
	}
	t.add(indent, name, mark, ":\n")
	for i, variant := range variants {
		t.add(indent, " | ")
		t.nullable(variant, indent+"   ", depth)
		comment := " // "
		if m := field(variant, "description"); !(i == 0 && above) && m.IsString() && !same(variant) {
			t.add(comment, m.AsString())
			comment = " "
		}
		if m := field(variant, "default"); !m.IsUndefined() {
			t.add(comment)
			t.value(variant, m, depth)
		}
		t.add("\n")
	}
	t.add(indent, ",\n")
}

// value writes the default of a schema.
func (t *typeScript) value(schema, value jinja.Value, depth int) {
	t.add("default: ")
	switch {
	case !value.IsString():
		t.json(value, depth)
	case enumerated(schema):
		t.add(value.AsString())
	default:
		t.add(`"`, value.AsString(), `"`)
	}
}

func enumerated(schema jinja.Value) bool { return len(elements(field(schema, "enum"))) > 0 }

// json writes a value as Rust's serde_json does, compactly.
func (t *typeScript) json(v jinja.Value, depth int) {
	switch {
	case depth > maxSchemaDepth:
		t.reason = Unfollowed
	case v.IsNone():
		t.add("null")
	case v.IsBool():
		t.b = strconv.AppendBool(t.b, v.AsBool())
	case v.IsInt():
		t.b = strconv.AppendInt(t.b, v.AsInt(), 10)
	case v.IsFloat():
		var ok bool
		if t.b, ok = appendSerdeFloat(t.b, v.AsFloat()); !ok {
			t.reason = Unfollowed
		}
	case v.IsString():
		t.b = appendSerdeString(t.b, v.AsString())
	case v.IsList():
		t.add("[")
		for i, item := range elements(v) {
			if i > 0 {
				t.add(",")
			}
			t.json(item, depth+1)
		}
		t.add("]")
	case v.IsDict():
		t.add("{")
		dict := v.AsDict()
		for i, key := range dict.OrderedKeys() {
			if i > 0 {
				t.add(",")
			}
			t.b = appendSerdeString(t.b, key)
			t.add(":")
			item, _ := dict.Get(key)
			t.json(item, depth+1)
		}
		t.add("}")
	default:
		t.huge(v)
	}
}

// appendSerdeString appends a JSON string with the escapes of serde_json, which
// are those of Python's json.dumps with ensure_ascii=False.
func appendSerdeString(b []byte, s string) []byte {
	const hex = "0123456789abcdef"
	b = append(b, '"')
	start := 0
	for i := 0; i < len(s); i++ {
		c := s[i]
		if c >= ' ' && c != '"' && c != '\\' {
			continue
		}
		b = append(b, s[start:i]...)
		start = i + 1
		switch c {
		case '"', '\\':
			b = append(b, '\\', c)
		case '\b':
			b = append(b, '\\', 'b')
		case '\f':
			b = append(b, '\\', 'f')
		case '\n':
			b = append(b, '\\', 'n')
		case '\r':
			b = append(b, '\\', 'r')
		case '\t':
			b = append(b, '\\', 't')
		default:
			b = append(b, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
		}
	}
	return append(append(b, s[start:]...), '"')
}

// appendSerdeFloat appends a number as the engine shows it: Python writes it,
// serde_json reads that, which rounds some numbers with many digits, and writes
// it in its own form. ok is false for what is no JSON number.
func appendSerdeFloat(b []byte, f float64) (_ []byte, ok bool) {
	if math.IsInf(f, 0) || math.IsNaN(f) {
		return b, false
	}
	digits, exponent := decimal(math.Abs(f))
	significand, err := strconv.ParseUint(digits, 10, 64)
	if err != nil {
		return b, false
	}
	// Python's "1.5" is read as 15 with an exponent of -1, "150.0" as 1500 with
	// -1, and "1.5e+16" as 15 with 15.
	exponent -= len(digits) - 1
	read := float64(significand)
	if exponent >= 0 && math.Abs(f) < 1e16 {
		for range exponent + 1 {
			significand *= 10
		}
		read, exponent = float64(significand), -1
	}
	for read != 0 && exponent < -308 {
		read, exponent = read/1e308, exponent+308
	}
	if read != 0 {
		// Not math.Pow10: its large powers are not always the nearest number.
		power, _ := strconv.ParseFloat("1e"+strconv.Itoa(max(exponent, -exponent)), 64)
		if exponent >= 0 {
			read *= power
		} else {
			read /= power
		}
	}

	if math.Signbit(f) {
		b = append(b, '-')
	}
	if read == 0 {
		return append(b, "0.0"...), true
	}
	digits, exponent = decimal(read)
	point := exponent + 1 // digits before the point
	switch {
	case point > 0 && point <= 16:
		if len(digits) <= point {
			b = append(b, digits...)
			for range point - len(digits) {
				b = append(b, '0')
			}
			return append(b, ".0"...), true
		}
		b = append(b, digits[:point]...)
		b = append(b, '.')
		return append(b, digits[point:]...), true
	case point > -5 && point <= 0:
		b = append(b, "0."...)
		for range -point {
			b = append(b, '0')
		}
		return append(b, digits...), true
	}
	b = append(b, digits[0])
	if len(digits) > 1 {
		b = append(b, '.')
		b = append(b, digits[1:]...)
	}
	b = append(b, 'e')
	if exponent > 0 {
		b = append(b, '+')
	}
	return strconv.AppendInt(b, int64(exponent), 10), true
}

// huge writes a whole number that does not fit an int64: serde_json keeps what
// fits a uint64 and makes a float of the rest.
func (t *typeScript) huge(v jinja.Value) {
	digits, ok := template.Digits(v)
	if !ok {
		t.reason = Unfollowed
		return
	}
	if _, err := strconv.ParseUint(digits, 10, 64); err == nil {
		t.add(digits)
		return
	}
	f, err := strconv.ParseFloat(digits, 64)
	if err == nil {
		t.b, ok = appendSerdeFloat(t.b, f)
	}
	if err != nil || !ok {
		t.reason = Unfollowed
	}
}

// decimal returns the shortest digits that tell f from its neighbours, and the
// power of ten of the first one. f is not negative.
func decimal(f float64) (digits string, exponent int) {
	text := strconv.FormatFloat(f, 'e', -1, 64)
	mantissa, power, _ := strings.Cut(text, "e")
	exponent, _ = strconv.Atoi(power)
	whole, fraction, _ := strings.Cut(mantissa, ".")
	return whole + fraction, exponent
}
