package prompt

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/ardanlabs/jinja"

	"github.com/inferrail/inferrail/proxy/prompt/template"
	"github.com/inferrail/inferrail/proxy/prompt/tokenizer"
)

// mistral renders the chats of models with a tekken.json as vLLM does, which
// has mistral_common validate, normalise and encode them. newMistral makes it;
// it is immutable.
type mistral struct {
	tokenizer *tokenizer.Tokenizer
	info      tokenizer.Tekken
	ids       map[string]uint32
	// thinks says that the tokenizer has [THINK] and [/THINK].
	thinks bool
	// effort is the reasoning effort of requests that have none.
	effort string
}

// newMistral returns the renderer for a tokenizer. Of the engine's defaults for
// chat_template_kwargs the reasoning effort counts. Its error tells people why
// the chats cannot be followed.
func newMistral(t *tokenizer.Tokenizer, kwargs *jinja.Dict) (*mistral, error) {
	info, ok := t.Tekken()
	if !ok {
		return nil, errors.New("mistral: only models with a tekken.json are followed")
	}
	m := &mistral{tokenizer: t, info: info, effort: info.DefaultEffort}
	if effort := kwargs.Data["reasoning_effort"]; effort.IsString() {
		m.effort = effort.AsString()
	} else if !isNull(effort) {
		return nil, errors.New("mistral: the reasoning_effort in the template kwargs is no string")
	}
	names := strings.Fields("<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]")
	if info.Version < 3 {
		return nil, fmt.Errorf("mistral: chats of tekken.json version v%d are not followed", info.Version)
	}
	if info.Version >= 7 {
		names = append(names, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]")
	}
	if info.Version >= 11 {
		names = append(names, "[ARGS]", "[CALL_ID]")
	}
	if info.Version >= 13 {
		_, begin := t.Token("[THINK]")
		_, end := t.Token("[/THINK]")
		if m.thinks = begin && end; m.thinks {
			names = append(names, "[THINK]", "[/THINK]")
		}
	}
	if info.Version >= 15 {
		names = append(names, "[MODEL_SETTINGS]", "[/MODEL_SETTINGS]")
	}
	var missing string
	if m.ids, missing = tokenIDs(t, names); missing != "" {
		return nil, fmt.Errorf("mistral: the tokenizer lacks the token %s", missing)
	}
	return m, nil
}

func (m *mistral) render(dst *Prompt, r *chatRequest, now time.Time) Reason {
	var s script
	if reason := m.script(&s, r); reason != Exact {
		return reason
	}
	return s.encode(dst, m.tokenizer, m.ids)
}

// turn is a message as mistral_common has it, and what a run of messages of one
// role becomes. The zero value is an empty one of no role.
type turn struct {
	role   string
	chunks []chunk
	calls  []call
	// given says that there is a content: not "", but maybe a list of "".
	given bool
	// id is the call that a tool's turn answers.
	id string
	// prefix is an assistant's turn that goes on.
	prefix bool
}

// chunk is a text, or a thought.
type chunk struct {
	text    string
	thought bool
	open    bool // of a thought that has not ended
}

// script spells the chat out.
func (m *mistral) script(s *script, r *chatRequest) Reason {
	if !r.kwargs.IsNone() || m.info.Version >= 15 && !m.info.Settings {
		return Malformed
	}
	last := r.messages[len(r.messages)-1].role
	if r.addGenerationPrompt && last == "assistant" || r.continueFinalMessage && last != "assistant" {
		return Malformed
	}
	turns := make([]turn, len(r.messages))
	for i, message := range r.messages {
		var reason Reason
		if turns[i], reason = m.turn(message); reason != Exact {
			return reason
		}
	}
	turns[len(turns)-1].prefix = r.continueFinalMessage
	if !m.valid(turns) {
		return Malformed
	}
	tools := r.functions()
	for _, f := range tools {
		if !isMistralName(f.name) {
			return Malformed
		}
	}
	settings := ""
	if len(m.info.Efforts) > 0 {
		effort := r.reasoningEffort
		if effort == "" {
			effort = m.effort
		}
		if !slices.Contains(m.info.Efforts, effort) {
			return Malformed
		}
		settings = `{"reasoning_effort": "` + effort + `"}`
	}

	system := ""
	if m.info.Version < 7 {
		system = systemPrompt(turns)
	}
	turns = m.merge(turns)
	return m.spell(s, turns, system, tools, settings)
}

// turn reads a message.
func (m *mistral) turn(message *message) (t turn, _ Reason) {
	t.role = message.role
	content := message.fields.Data["content"]
	switch {
	case content.IsString():
		t.chunks = []chunk{{text: content.AsString()}}
		t.given = content.AsString() != ""
	case message.readOnce:
		// By the time that mistral_common reads the parts, vLLM has read them
		// and there are none left.
	case content.IsList():
		for _, part := range elements(content) {
			kind := field(part, "type")
			text, thought := field(part, "text"), field(part, "thinking")
			switch {
			case isString(kind, "text") && text.IsString():
				t.chunks = append(t.chunks, chunk{text: text.AsString()})
			case isString(kind, "thinking") && thought.IsString():
				closed := field(part, "closed")
				if !closed.IsUndefined() && !closed.IsBool() {
					return t, Malformed
				}
				t.chunks = append(t.chunks, chunk{text: thought.AsString(), thought: true, open: closed.IsBool() && !closed.AsBool()})
			default:
				return t, Malformed
			}
		}
		t.given = len(t.chunks) > 0
	case message.role != "assistant" || !isNull(content):
		return t, Malformed
	}

	thinks := slices.ContainsFunc(t.chunks, func(c chunk) bool { return c.thought })
	switch message.role {
	case "user":
		if thinks {
			return t, Malformed
		}
	case "system", "developer":
		t.role = "system"
		if thinks && (!m.thinks || m.info.Version >= 15) {
			return t, Malformed
		}
	case "tool":
		id, name := message.fields.Data["tool_call_id"], message.fields.Data["name"]
		if thinks || !id.IsString() || !isNull(name) && !(name.IsString() && isMistralName(name.AsString())) {
			return t, Malformed
		}
		if t.id = lastNine(id.AsString()); !m.validID(t.id) {
			return t, Malformed
		}
	case "assistant":
		if reasoning := message.fields.Data["reasoning"]; !isNull(reasoning) {
			if thinks || !reasoning.IsString() {
				return t, Malformed
			}
			thinks = true
			t.chunks = slices.Insert(t.chunks, 0, chunk{text: reasoning.AsString(), thought: true})
		}
		if thinks && !m.thinks {
			return t, Malformed
		}
		var reason Reason
		if t.calls, reason = message.readCalls(); reason != Exact {
			return t, reason
		}
		for i := range t.calls {
			c := &t.calls[i]
			if c.id = lastNine(c.id); !m.validID(c.id) || !isMistralName(c.name) {
				return t, Malformed
			}
			if c.arguments, reason = mistralArguments(c.arguments); reason != Exact {
				return t, reason
			}
		}
		if m.info.Version < 7 && t.given == (len(t.calls) > 0) {
			return t, Malformed
		}
	default:
		return t, Malformed
	}
	return t, Exact
}

// lastNine shortens the id of a tool call as vLLM does.
func lastNine(id string) string {
	for n := utf8.RuneCountInString(id); n > 9; n-- {
		_, size := utf8.DecodeRuneInString(id)
		id = id[size:]
	}
	return id
}

func (m *mistral) validID(id string) bool {
	if m.info.Version >= 13 {
		return id != "" && id != "null"
	}
	return len(id) == 9 && isMistralName(id) && !strings.ContainsAny(id, "_-\n")
}

// isMistralName reports whether a function may have the name. Python's $ lets a
// newline follow.
func isMistralName(name string) bool {
	name = strings.TrimSuffix(name, "\n")
	if name == "" || len(name) > 64 {
		return false
	}
	for _, c := range []byte(name) {
		if c != '_' && c != '-' && (c < '0' || c > '9') && (c|0x20 < 'a' || c|0x20 > 'z') {
			return false
		}
	}
	return true
}

// mistralArguments normalises the arguments of a call: vLLM makes an empty
// object of what is no JSON object.
func mistralArguments(arguments string) (string, Reason) {
	v, ok, reason := decodeLoose(arguments)
	if reason != Exact {
		return "", reason
	}
	if !ok || !v.IsDict() {
		return "{}", Exact
	}
	b, ok := appendPythonJSON(nil, v)
	if !ok {
		return "", Unfollowed
	}
	return string(b), Exact
}

// decodeLoose decodes a text that may be JSON; ok is false when it is none. It
// cannot be followed when it holds what we print otherwise than Python.
func decodeLoose(text string) (v jinja.Value, ok bool, _ Reason) {
	d := decoder{text: text}
	v, ok = d.decode()
	if d.odd == Exact || d.odd == TooLarge {
		return v, ok, d.odd
	}
	// Something odd in what is no JSON does not matter, but reading may have
	// ended where Python goes on: at brackets that nest too deeply.
	if ok || d.pos < len(text) && (text[d.pos] == '{' || text[d.pos] == '[') {
		return v, ok, Unfollowed
	}
	return v, false, Exact
}

// followers are the roles that may come after each.
var followers = map[string][]string{
	"system":    {"user", "assistant", "system"},
	"user":      {"assistant", "system", "user"},
	"assistant": {"assistant", "user", "tool"},
	"tool":      {"assistant", "tool", "user"},
}

// valid reports whether mistral_common takes the order of the messages.
func (m *mistral) valid(turns []turn) bool {
	last := turns[len(turns)-1]
	if len(turns) == 1 && last.role != "user" && last.role != "system" ||
		len(turns) > 1 && last.role == "assistant" && !last.prefix {
		return false
	}
	for i := range turns[1:] {
		if !slices.Contains(followers[turns[i].role], turns[i+1].role) {
			return false
		}
	}
	// Before an assistant speaks again its calls must have been answered. The
	// first message is left out: it is never a call that anything may follow
	// but its own turn.
	if m.info.Version < 11 {
		open := 0
		for _, t := range turns[1:] {
			switch t.role {
			case "tool":
				open--
			case "assistant":
				if open != 0 {
					return false
				}
				open = len(t.calls)
			}
		}
		return true
	}
	asked, answered := map[string]bool{}, map[string]bool{}
	for _, t := range turns[1:] {
		switch t.role {
		case "tool":
			if answered[t.id] || !asked[t.id] {
				return false
			}
			answered[t.id] = true
		case "assistant":
			if len(asked) != len(answered) {
				return false
			}
			clear(asked)
			clear(answered)
			for _, c := range t.calls {
				if asked[c.id] {
					return false
				}
				asked[c.id] = true
			}
		}
	}
	return true
}

// systemPrompt is what the system's messages say together, where they have no
// place of their own.
func systemPrompt(turns []turn) string {
	var prompts []string
	for _, t := range turns {
		if t.role == "system" && t.given {
			prompts = append(prompts, joinText(joinChunks([]turn{t}, "\n\n")))
		}
	}
	return strings.Join(prompts, "\n\n")
}

// merge makes one turn of neighbours of one role. The system's messages and
// the answers of tools stay apart; answers go in the order of the calls.
func (m *mistral) merge(turns []turn) (merged []turn) {
	join := "\n\n"
	if m.info.Version >= 15 {
		join = ""
	}
	var calls []string // since tools have last answered
	for len(turns) > 0 {
		n, role := 1, turns[0].role
		for n < len(turns) && turns[n].role == role {
			n++
		}
		run := turns[:n]
		turns = turns[n:]
		switch role {
		case "system", "tool":
			if role == "system" && m.info.Version < 7 {
				continue
			}
			start := len(merged)
			for _, t := range run {
				t.chunks = joinChunks([]turn{t}, join)
				merged = append(merged, t)
			}
			if role == "tool" {
				if m.info.Version >= 11 {
					sortAnswers(merged[start:], calls)
				}
				calls = calls[:0]
			}
		case "user", "assistant":
			t := turn{role: role, chunks: joinChunks(run, join)}
			for _, one := range run {
				t.calls = append(t.calls, one.calls...)
				t.prefix = t.prefix || one.prefix
			}
			for _, c := range t.calls {
				calls = append(calls, c.id)
			}
			merged = append(merged, t)
		}
	}
	if len(merged) == 0 || m.info.Version < 7 && merged[0].role != "user" {
		merged = slices.Insert(merged, 0, turn{role: "user"})
	}
	return merged
}

// sortAnswers sorts the answers of tools by the last call of their id, those
// without one to the end, and then by the last answer of that id.
func sortAnswers(answers []turn, calls []string) {
	called, answered := map[string]int{}, map[string]int{}
	for i, id := range calls {
		called[id] = i
	}
	for i, t := range answers {
		answered[t.id] = i
	}
	place := func(t turn) int {
		if i, ok := called[t.id]; ok {
			return i
		}
		return math.MaxInt
	}
	slices.SortStableFunc(answers, func(a, b turn) int {
		if c := place(a) - place(b); place(a) != place(b) {
			return c
		}
		return answered[a.id] - answered[b.id]
	})
}

// joinChunks joins the texts of turns, up to the next thought: those of one
// turn by a separator, those of several by an empty line. Empty texts leave no
// trace.
func joinChunks(turns []turn, join string) (out []chunk) {
	var text []string
	flush := func() {
		if len(text) > 0 {
			out = append(out, chunk{text: strings.Join(text, "")})
			text = nil
		}
	}
	for _, t := range turns {
		separator := "\n\n"
		if len(text) == 0 {
			separator = join
		}
		for _, c := range t.chunks {
			switch {
			case c.thought:
				flush()
				out = append(out, c)
			case c.text != "":
				if len(text) > 0 {
					text = append(text, separator)
				}
				text = append(text, c.text)
				separator = join
			}
		}
	}
	flush()
	return out
}

// joinText is the text of chunks that are all text.
func joinText(chunks []chunk) string {
	if len(chunks) == 0 {
		return ""
	}
	return chunks[0].text
}

// spell spells out the turns.
func (m *mistral) spell(s *script, turns []turn, system string, tools []function, settings string) Reason {
	first, last := -1, -1
	for i, t := range turns {
		if t.role == "user" {
			if last = i; first < 0 {
				first = i
			}
		}
	}
	tooled := last
	if m.info.Version >= 13 {
		tooled = first
	}
	s.token("<s>")
	for i, t := range turns {
		switch t.role {
		case "system":
			s.token("[SYSTEM_PROMPT]")
			s.chunks(t.chunks)
			s.token("[/SYSTEM_PROMPT]")
		case "user":
			if i == tooled && len(tools) > 0 {
				b, ok := appendMistralTools(nil, tools)
				if !ok {
					return Unfollowed
				}
				s.token("[AVAILABLE_TOOLS]")
				s.text(string(b))
				s.token("[/AVAILABLE_TOOLS]")
			}
			if i == tooled && settings != "" {
				s.token("[MODEL_SETTINGS]")
				s.text(settings)
				s.token("[/MODEL_SETTINGS]")
			}
			s.token("[INST]")
			text := joinText(t.chunks)
			if i == last && system != "" {
				text = system + "\n\n" + text
			}
			s.text(text)
			s.token("[/INST]")
		case "tool":
			if reason := m.answer(s, t); reason != Exact {
				return reason
			}
		case "assistant":
			if len(t.chunks) == 0 && len(t.calls) == 0 || m.info.Version < 7 && len(t.chunks) > 0 && len(t.calls) > 0 {
				return Malformed
			}
			if len(t.chunks) == 1 && !t.chunks[0].thought {
				s.text(strings.TrimRight(t.chunks[0].text, " "))
			} else {
				s.chunks(t.chunks)
			}
			m.calls(s, t.calls)
			if !t.prefix {
				s.token("</s>")
			}
		}
	}
	return Exact
}

func (s *script) chunks(chunks []chunk) {
	for _, c := range chunks {
		if c.thought {
			s.token("[THINK]")
		}
		s.text(c.text)
		if c.thought && !c.open {
			s.token("[/THINK]")
		}
	}
}

// calls spells out the calls of an assistant's turn.
func (m *mistral) calls(s *script, calls []call) {
	switch {
	case len(calls) == 0:
	case m.info.Version < 11:
		s.token("[TOOL_CALLS]")
		b := []byte{'['}
		for i, c := range calls {
			if i > 0 {
				b = append(b, ", "...)
			}
			b = append(b, `{"name": `...)
			b = appendSerdeString(b, c.name)
			b = append(b, `, "arguments": `...)
			b = append(b, c.arguments...)
			b = append(b, `, "id": `...)
			b = append(appendSerdeString(b, c.id), '}')
		}
		s.text(string(append(b, ']')))
	default:
		for _, c := range calls {
			s.token("[TOOL_CALLS]")
			s.text(c.name)
			if m.info.Version < 13 {
				s.token("[CALL_ID]")
				s.text(c.id)
			}
			s.token("[ARGS]")
			s.text(c.arguments)
		}
	}
}

// answer spells out what a tool has answered.
func (m *mistral) answer(s *script, t turn) Reason {
	text := joinText(t.chunks)
	s.token("[TOOL_RESULTS]")
	switch {
	case m.info.Version < 7:
		// JSON is taken as such, anything else as a string.
		v := jinja.NewDict()
		if text != "" {
			var ok bool
			var reason Reason
			if v, ok, reason = decodeLoose(text); reason != Exact {
				return reason
			}
			if !ok {
				v = jinja.NewString(text)
			}
		}
		b, ok := appendPythonJSON([]byte(`{"content": `), v)
		if !ok {
			return Unfollowed
		}
		b = append(b, `, "call_id": `...)
		s.text(string(append(appendSerdeString(b, t.id), '}')))
	case m.info.Version < 13:
		s.text(t.id)
		s.token("[TOOL_CONTENT]")
		s.text(text)
	default:
		s.text(text)
	}
	s.token("[/TOOL_RESULTS]")
	return Exact
}

// appendMistralTools appends the tools as mistral_common dumps them.
func appendMistralTools(b []byte, tools []function) (_ []byte, ok bool) {
	b = append(b, '[')
	for i, f := range tools {
		if i > 0 {
			b = append(b, ", "...)
		}
		b = append(b, `{"type": "function", "function": {"name": `...)
		b = appendSerdeString(b, f.name)
		b = append(b, `, "description": `...)
		b = appendSerdeString(b, f.description)
		b = append(b, `, "parameters": `...)
		parameters := f.parameters
		if isNull(parameters) {
			parameters = jinja.NewDict()
		}
		if b, ok = appendPythonJSON(b, parameters); !ok {
			return b, false
		}
		b = append(b, "}}"...)
	}
	return append(b, ']'), true
}

// appendPythonJSON appends a value as Python's json.dumps does with
// ensure_ascii=False. ok is false for what is no JSON.
func appendPythonJSON(b []byte, v jinja.Value) (_ []byte, ok bool) {
	switch {
	case v.IsNone():
		return append(b, "null"...), true
	case v.IsBool():
		return strconv.AppendBool(b, v.AsBool()), true
	case v.IsInt():
		return strconv.AppendInt(b, v.AsInt(), 10), true
	case v.IsFloat():
		return appendPythonFloat(b, v.AsFloat()), true
	case v.IsString():
		return appendSerdeString(b, v.AsString()), true
	case v.IsList():
		b = append(b, '[')
		for i, item := range elements(v) {
			if i > 0 {
				b = append(b, ", "...)
			}
			if b, ok = appendPythonJSON(b, item); !ok {
				return b, false
			}
		}
		return append(b, ']'), true
	case v.IsDict():
		b = append(b, '{')
		dict := v.AsDict()
		for i, key := range dict.OrderedKeys() {
			if i > 0 {
				b = append(b, ", "...)
			}
			b = append(appendSerdeString(b, key), ": "...)
			item, _ := dict.Get(key)
			if b, ok = appendPythonJSON(b, item); !ok {
				return b, false
			}
		}
		return append(b, '}'), true
	}
	digits, ok := template.Digits(v)
	return append(b, digits...), ok
}

// appendPythonFloat appends a number as Python's json.dumps does.
func appendPythonFloat(b []byte, f float64) []byte {
	switch {
	case math.IsNaN(f):
		return append(b, "NaN"...)
	case math.IsInf(f, 1):
		return append(b, "Infinity"...)
	case math.IsInf(f, -1):
		return append(b, "-Infinity"...)
	}
	if a := math.Abs(f); a != 0 && (a < 1e-4 || a >= 1e16) {
		return strconv.AppendFloat(b, f, 'e', -1, 64)
	}
	start := len(b)
	b = strconv.AppendFloat(b, f, 'f', -1, 64)
	if !slices.Contains(b[start:], '.') {
		b = append(b, ".0"...)
	}
	return b
}
