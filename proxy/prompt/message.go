package prompt

import (
	"strings"

	"github.com/ardanlabs/jinja"
)

// message is one validated message of a chat. Whoever renders the chat may
// change its values.
type message struct {
	role  string
	value jinja.Value
	// fields is the object that value is. On the chat route reasoning_content is
	// renamed to reasoning, as the engine does. Tool calls have the order of
	// keys that the engine's models give them and string arguments.
	fields *jinja.Dict
	// calls are the tool calls of an assistant; nil for none.
	calls []jinja.Value
	// readOnce says that the engine holds the parts of the content in an iterator,
	// which can be read once and is no list.
	readOnce bool
	made     *int // decoder.made for its calls' arguments
}

// checkMessage validates a message as the engine does. vLLM describes messages
// by a union of typed dictionaries: one per role, as OpenAI has them, and one
// of its own for any role. pydantic takes the one of which more fields are
// there, and of equals the one of the role. That decides which content parts
// may occur; extra fields are kept by both.
func checkMessage(v jinja.Value, tokenize bool) (*message, Reason) {
	if !v.IsDict() {
		return nil, Malformed
	}
	fields := v.AsDict()
	if m := plainMessage(v, fields); m != nil {
		return m, Exact
	}
	if fields.Has("author") {
		return nil, Unfollowed // may be a Harmony message
	}
	role, _ := fields.Get("role")
	if !role.IsString() {
		return nil, Malformed
	}
	m := &message{role: role.AsString(), value: v, fields: fields}
	if !tokenize {
		m.renameReasoning()
	}
	if reason := m.listCalls(tokenize); reason != Exact {
		return nil, reason
	}

	typed, typedFields := m.typed()
	custom, customFields := m.custom()
	switch {
	case !typed && !custom:
		return nil, Malformed
	case typed && (!custom || typedFields >= customFields):
		if tokenize && m.hasLazyList() {
			// pydantic may fail where it reads lists late within this route's
			// union of models.
			return nil, m.media(Unfollowed)
		}
		if !m.typedParts() {
			return nil, m.media(Malformed)
		}
		m.readOnce = m.fields.Data["content"].IsList()
		if calls := m.fields.Data["tool_calls"]; m.role == "assistant" && calls.IsList() {
			for _, call := range calls.AsList().Items {
				if !validCall(call) {
					return nil, Malformed
				}
			}
		}
	default:
		m.orderTools()
	}
	if reason := m.media(Exact); reason != Exact {
		return nil, reason
	}
	if calls := m.fields.Data["tool_calls"]; m.role == "assistant" && calls.IsList() {
		m.calls = calls.AsList().Items
		for i, call := range m.calls {
			m.calls[i] = orderCall(call.AsDict())
		}
	}
	return m, Exact
}

// plainMessage is a message of a role and a text, as nearly all are, nil when it
// is something else. Both models fit it, with two fields each.
func plainMessage(v jinja.Value, fields *jinja.Dict) *message {
	if len(fields.Keys) != 2 {
		return nil
	}
	role, content := fields.Data["role"], fields.Data["content"]
	if !role.IsString() || !content.IsString() {
		return nil
	}
	switch role.AsString() {
	case "system", "user", "assistant":
		return &message{role: role.AsString(), value: v, fields: fields}
	}
	return nil
}

// hasLazyList reports whether the message has a list that OpenAI's models have
// pydantic read only when it is used.
func (m *message) hasLazyList() bool {
	for _, name := range []string{"content", "tool_calls"} {
		if v := m.fields.Data[name]; v.IsList() || name == "content" && v.IsDict() {
			return true
		}
	}
	return false
}

func (m *message) renameReasoning() {
	old, ok := m.fields.Get("reasoning_content")
	if !ok {
		return
	}
	delete(m.fields.Data, "reasoning_content")
	for i, key := range m.fields.Keys {
		if key == "reasoning_content" {
			m.fields.Keys = append(m.fields.Keys[:i:i], m.fields.Keys[i+1:]...)
			break
		}
	}
	if !old.IsNone() && isNull(m.fields.Data["reasoning"]) {
		m.fields.Set("reasoning", old)
	}
}

// listCalls makes a list of tool_calls that are something else, as Python's
// list does on the chat route. What is not empty then holds strings, which no
// model takes.
func (m *message) listCalls(tokenize bool) Reason {
	calls, ok := m.fields.Get("tool_calls")
	if !ok || calls.IsNone() || calls.IsList() {
		return Exact
	}
	switch {
	case tokenize:
		return Unfollowed
	case (calls.IsString() || calls.IsDict()) && !calls.IsTruthy():
		m.fields.Set("tool_calls", jinja.NewList(nil))
		return Exact
	}
	return Malformed
}

// typed reports whether the message fits OpenAI's model of its role, and how
// many of that model's fields it has. Parts of the content and tool calls are
// not looked at: pydantic reads them later.
func (m *message) typed() (fits bool, fields int) {
	content, hasContent := m.fields.Get("content")
	// An empty object is an iterable without parts.
	listed := content.IsString() || content.IsList() || content.IsDict() && !content.IsTruthy()
	named, nameFits := m.optionalString("name", false)
	count := 1
	for _, has := range []bool{hasContent, named} {
		if has {
			count++
		}
	}
	switch m.role {
	case "system", "developer", "user":
		return listed && nameFits, count
	case "function":
		return named && nameFits && hasContent && (content.IsString() || content.IsNone()), count
	case "tool":
		id, idFits := m.optionalString("tool_call_id", false)
		if !named {
			count++
		}
		return listed && id && idFits, count
	case "assistant":
	default:
		return false, 0
	}
	refusal, refusalFits := m.optionalString("refusal", true)
	calls, hasCalls := m.fields.Get("tool_calls")
	for _, has := range []bool{refusal, hasCalls} {
		if has {
			count++
		}
	}
	fits = nameFits && refusalFits && !(hasCalls && !calls.IsList()) && (!hasContent || listed || content.IsNone())
	for _, nested := range [][]string{{"audio", "id"}, {"function_call", "arguments", "name"}} {
		v, ok := m.fields.Get(nested[0])
		if !ok {
			continue
		}
		count++
		if v.IsNone() {
			continue
		}
		for _, name := range nested[1:] {
			if !v.IsDict() || !v.AsDict().Data[name].IsString() {
				return false, 0
			}
			count++
		}
	}
	return fits, count
}

// custom reports whether the message fits vLLM's own model, and how many fields
// it has in it, those of parts and tool calls included.
func (m *message) custom() (fits bool, fields int) {
	count := 1
	content, hasContent := m.fields.Get("content")
	if hasContent {
		count++
		if content.IsList() {
			for _, part := range content.AsList().Items {
				fits, n := customPart(part)
				if !fits {
					return false, 0
				}
				count += n
			}
		} else if !content.IsString() {
			return false, 0
		}
	}
	for _, field := range []struct {
		name     string
		nullable bool
	}{{"name", false}, {"tool_call_id", true}, {"reasoning", true}, {"task", true}} {
		has, fits := m.optionalString(field.name, field.nullable)
		if !fits {
			return false, 0
		}
		if has {
			count++
		}
	}
	if calls, ok := m.fields.Get("tool_calls"); ok {
		count++
		if calls.IsList() {
			for _, call := range calls.AsList().Items {
				if !validCall(call) {
					return false, 0
				}
				count += 5
			}
		} else if !calls.IsNone() {
			return false, 0
		}
	}
	if tools, ok := m.fields.Get("tools"); ok {
		count++
		if tools.IsList() {
			for _, tool := range tools.AsList().Items {
				fits, n := customTool(tool)
				if !fits {
					return false, 0
				}
				count += n
			}
		} else if !tools.IsNone() {
			return false, 0
		}
	}
	return true, count
}

func (m *message) optionalString(name string, nullable bool) (has, fits bool) {
	v, has := m.fields.Get(name)
	return has, !has || v.IsString() || nullable && v.IsNone()
}

// customPart reports whether a content part fits one of the many models of
// parts that vLLM has, and how many fields the best of them finds in it. Most
// fields of some of them are optional, so that nearly any object fits.
func customPart(part jinja.Value) (fits bool, fields int) {
	if part.IsString() {
		return true, 0
	}
	if !part.IsDict() {
		return false, 0
	}
	d := part.AsDict()
	if d.Has("uuid") {
		fields = 1
	}
	kind, typed := d.Get("type")
	name, named := d.Get("name")
	if n, fits := textPart(d); fits {
		fields = max(fields, n)
	}
	switch {
	case isString(kind, "refusal") && d.Data["refusal"].IsString():
		fields = max(fields, 2)
	case isString(kind, "thinking") && d.Data["thinking"].IsString():
		closed, ok := d.Get("closed")
		switch {
		case !ok:
			fields = max(fields, 2)
		case closed.IsBool():
			fields = max(fields, 3)
		}
	case (!typed || isString(kind, "tool_reference")) && (!named || name.IsString()):
		n := 0
		for _, has := range []bool{typed, named} {
			if has {
				n++
			}
		}
		fields = max(fields, n)
	}
	return true, fields
}

// textPart reports whether a part fits OpenAI's model of a text, and how many of
// its fields it has.
func textPart(d *jinja.Dict) (fields int, fits bool) {
	if !isString(d.Data["type"], "text") || !d.Data["text"].IsString() {
		return 0, false
	}
	point, ok := d.Get("prompt_cache_breakpoint")
	if !ok {
		return 2, true
	}
	if !point.IsDict() || !isString(point.AsDict().Data["mode"], "explicit") {
		return 0, false
	}
	ttl, ok := point.AsDict().Get("ttl")
	if !ok {
		return 4, true
	}
	return 5, isString(ttl, "30m") || isString(ttl, "12h")
}

// typedParts reports whether all parts of the content fit OpenAI's model of the
// message's role.
func (m *message) typedParts() bool {
	content := m.fields.Data["content"]
	if !content.IsList() {
		return true
	}
	for _, part := range content.AsList().Items {
		if !part.IsDict() {
			return false
		}
		d := part.AsDict()
		if _, fits := textPart(d); fits {
			continue
		}
		if m.role != "assistant" || !isString(d.Data["type"], "refusal") || !d.Data["refusal"].IsString() {
			return false
		}
	}
	return true
}

// validCall reports whether v is a call of a function as the engine takes it.
func validCall(v jinja.Value) bool {
	if !v.IsDict() {
		return false
	}
	call := v.AsDict()
	function := call.Data["function"]
	return call.Data["id"].IsString() && isString(call.Data["type"], "function") && function.IsDict() &&
		function.AsDict().Data["arguments"].IsString() && function.AsDict().Data["name"].IsString()
}

// orderCall gives a call the order of keys that the engine's models give it.
func orderCall(call *jinja.Dict) jinja.Value {
	function := reorder(call.Data["function"].AsDict(), "arguments", "name")
	call.Set("function", function)
	return reorder(call, "id", "function", "type")
}

// orderTools does the same to the tools that a developer's message brings.
func (m *message) orderTools() {
	tools := m.fields.Data["tools"]
	if !tools.IsList() {
		return
	}
	items := tools.AsList().Items
	for i, tool := range items {
		function := reorder(tool.AsDict().Data["function"].AsDict(), "name", "description", "parameters", "strict")
		tool.AsDict().Set("function", function)
		items[i] = reorder(tool.AsDict(), "function", "type")
	}
}

func reorder(d *jinja.Dict, first ...string) jinja.Value {
	v := jinja.NewDict()
	to := v.AsDict()
	for _, key := range first {
		if member, ok := d.Get(key); ok {
			to.Set(key, member)
		}
	}
	for _, key := range d.Keys {
		if !to.Has(key) {
			to.Set(key, d.Data[key])
		}
	}
	return v
}

// customTool is what custom needs to know of a tool of a developer's message.
func customTool(v jinja.Value) (fits bool, fields int) {
	if !v.IsDict() || !isString(v.AsDict().Data["type"], "function") {
		return false, 0
	}
	function := v.AsDict().Data["function"]
	if !function.IsDict() || !function.AsDict().Data["name"].IsString() {
		return false, 0
	}
	count := 3
	for name, fits := range map[string]func(jinja.Value) bool{
		"description": jinja.Value.IsString,
		"parameters":  jinja.Value.IsDict,
		"strict":      func(v jinja.Value) bool { return v.IsBool() || v.IsNone() },
	} {
		if v, ok := function.AsDict().Get(name); ok {
			if !fits(v) {
				return false, 0
			}
			count++
		}
	}
	return true, count
}

// mediaKeys mark a part as media when it has no type, and are the types of
// such parts.
var mediaKeys = []string{"image_url", "image_pil", "image_embeds", "audio_embeds", "video_embeds",
	"prompt_embeds", "audio_url", "input_audio", "video_url"}

// media is Media or Embeds when the content holds any, else otherwise.
func (m *message) media(otherwise Reason) Reason {
	content := m.fields.Data["content"]
	if !content.IsList() {
		return otherwise
	}
	for _, part := range content.AsList().Items {
		if !part.IsDict() {
			continue
		}
		d := part.AsDict()
		kind := d.Data["type"]
		if isString(kind, "input_image") {
			return Media
		}
		for _, key := range mediaKeys {
			if isString(kind, key) || d.Has(key) && (isNull(kind) || !isNull(d.Data["uuid"])) {
				if key == "prompt_embeds" {
					return Embeds
				}
				return Media
			}
		}
	}
	return otherwise
}

// conversation makes of the messages what the engine hands to the template:
// contents joined or as a list of parts, by the template's content format, and
// only the fields that the engine passes on.
func (r *chatRequest) conversation(format string) ([]jinja.Value, Reason) {
	out := make([]jinja.Value, 0, len(r.messages))
	for _, m := range r.messages {
		v, reason := m.normalise(format == "openai", r.memory)
		if reason != Exact {
			return nil, reason
		}
		out = append(out, v)
	}
	return out, Exact
}

func (m *message) normalise(wrap bool, memory *values) (jinja.Value, Reason) {
	content, reason := m.content(wrap, memory)
	if reason != Exact {
		return content, reason
	}
	if len(m.fields.Keys) == 2 && m.fields.Keys[0] == "role" && m.fields.Keys[1] == "content" && m.role != "developer" {
		// Nothing but the content may change in most messages.
		m.fields.Data["content"] = content
		return m.value, Exact
	}
	v := jinja.NewDict()
	to := v.AsDict()
	to.Set("role", jinja.NewString(m.role))
	to.Set("content", content)
	switch m.role {
	case "assistant":
		if len(m.calls) > 0 {
			calls, reason := callsWithObjects(m.calls, m.made)
			if reason != Exact {
				return v, reason
			}
			to.Set("tool_calls", calls)
		}
		if reasoning := m.fields.Data["reasoning"]; !isNull(reasoning) {
			if !reasoning.IsString() {
				return v, Unfollowed
			}
			to.Set("reasoning", reasoning)
			to.Set("reasoning_content", reasoning)
		}
	case "tool":
		if id, ok := m.fields.Get("tool_call_id"); ok {
			to.Set("tool_call_id", id)
		}
	}
	for _, name := range []string{"name", "task"} {
		if field := m.fields.Data[name]; field.IsString() {
			to.Set(name, field)
		}
	}
	if m.role == "developer" {
		to.Set("tools", orNone(m.fields.Data["tools"]))
	}
	return v, Exact
}

// billing begins a line that a client puts into system messages and that
// changes with every request. The engine drops it, so that prompts begin alike.
const billing = "x-anthropic-billing-header"

// withoutBilling drops the line. keep is false when nothing else is there.
func withoutBilling(text string) (rest string, keep bool) {
	if !strings.HasPrefix(text, billing) {
		return text, true
	}
	_, rest, _ = strings.Cut(text, "\n")
	return rest, rest != ""
}

// content is the content for the template: one string, or a list of parts when
// they are wrapped.
func (m *message) content(wrap bool, memory *values) (jinja.Value, Reason) {
	content := m.fields.Data["content"]
	var parts []jinja.Value
	switch {
	case content.IsString():
		text := content.AsString()
		keep := true
		if m.role == "system" {
			text, keep = withoutBilling(text)
		}
		if !wrap || !wraps(m.role) {
			if len(text) == len(content.AsString()) {
				return content, Exact // which needs no memory
			}
			return jinja.NewString(text), Exact
		}
		if keep {
			parts = []jinja.Value{wrapText(memory, jinja.NewString(text), nil)}
		}
		return jinja.NewList(parts), Exact
	case content.IsList():
		parts = content.AsList().Items
	}

	var texts []string
	var wrapped []jinja.Value
	plain := true
	for _, part := range parts {
		text, kind, reason := m.part(part)
		switch {
		case reason != Exact:
			return content, reason
		case kind == partSkipped:
			continue
		case !wrap:
			// What is empty or null leaves no line, anything but a text fails.
			if text.IsTruthy() {
				if !text.IsString() {
					return content, Malformed
				}
				texts = append(texts, text.AsString())
			}
		case kind == partReference:
			plain = false
			v := jinja.NewDict()
			v.AsDict().Set("type", jinja.NewString("tool_reference"))
			v.AsDict().Set("name", text)
			wrapped = append(wrapped, v)
		default:
			var extra *jinja.Dict
			if part.IsDict() {
				extra = part.AsDict()
			}
			wrapped = append(wrapped, wrapText(memory, text, extra))
			if m.role == "tool" {
				if !text.IsString() {
					return content, Malformed
				}
				texts = append(texts, text.AsString())
			}
		}
	}
	if wrap && (m.role != "tool" || !plain) {
		return jinja.NewList(wrapped), Exact
	}
	return jinja.NewString(strings.Join(texts, "\n")), Exact
}

// wraps reports whether contents of a role are lists when the template wants
// lists. Those of tools are joined, unless they refer to tools.
func wraps(role string) bool { return role != "tool" }

// wrapText is a text part for the template: with the fields that the part has
// beyond those that the engine knows of.
func wrapText(memory *values, text jinja.Value, part *jinja.Dict) jinja.Value {
	v := memory.dict()
	to := v.AsDict()
	to.Set("type", textValue)
	to.Set("text", text)
	if part == nil {
		return v
	}
	for _, key := range part.Keys {
		if !knownPartField(key) {
			to.Set(key, part.Data[key])
		}
	}
	return v
}

// knownPartField reports whether a field belongs to one of the engine's models
// of content parts.
func knownPartField(name string) bool {
	switch name {
	case "audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil", "image_url",
		"input_audio", "name", "prompt_cache_breakpoint", "refusal", "text", "thinking", "type", "uuid",
		"video_embeds", "video_url":
		return true
	}
	return false
}

type partKind uint8

const (
	partText partKind = iota
	partReference
	partSkipped
)

// part is the text of one content part.
func (m *message) part(part jinja.Value) (text jinja.Value, kind partKind, reason Reason) {
	if part.IsString() {
		if m.role == "system" {
			s, keep := withoutBilling(part.AsString())
			if !keep {
				return part, partSkipped, Exact
			}
			part = jinja.NewString(s)
		}
		return part, partText, Exact
	}
	d := part.AsDict()
	if !isNull(d.Data["uuid"]) || !d.Data["type"].IsString() {
		return part, partText, Malformed
	}
	field := "text"
	switch d.Data["type"].AsString() {
	case "text":
	case "input_text", "output_text":
	case "thinking":
		field = "thinking"
	case "refusal":
		field = "refusal"
	case "tool_reference":
		return orNone(d.Data["name"]), partReference, Exact
	default:
		return part, partText, Malformed
	}
	text = orNone(d.Data[field])
	if text.IsNone() && (field == "refusal" || isString(d.Data["type"], "text")) {
		return text, partSkipped, Exact
	}
	if m.role == "system" && text.IsString() && isString(d.Data["type"], "text") {
		s, keep := withoutBilling(text.AsString())
		if !keep {
			return text, partSkipped, Exact
		}
		text = jinja.NewString(s)
	}
	return text, partText, Exact
}

// callsWithObjects is the tool calls with arguments as objects, as templates
// want them. Arguments that are no JSON object count as an empty one.
func callsWithObjects(calls []jinja.Value, made *int) (jinja.Value, Reason) {
	out := make([]jinja.Value, 0, len(calls))
	for _, call := range calls {
		v := reorder(call.AsDict())
		function := reorder(call.AsDict().Data["function"].AsDict())
		arguments := jinja.NewDict()
		if text := function.AsDict().Data["arguments"].AsString(); text != "" {
			d := decoder{text: text, made: made}
			parsed, ok := d.decode()
			if d.odd != Exact {
				return v, d.odd
			}
			if ok && parsed.IsDict() {
				arguments = parsed
			}
		}
		function.AsDict().Set("arguments", arguments)
		v.AsDict().Set("function", function)
		out = append(out, v)
	}
	return jinja.NewList(out), Exact
}
