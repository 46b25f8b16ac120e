package prompt

import (
	"bytes"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/ardanlabs/jinja"
)

// member is a member of a request's body that bears on its prompt, or on
// whether the engine takes the request at all for its prompt's sake. All other
// members can change without the prompt changing.
type member uint8

const (
	memberMessages member = iota
	memberTools
	memberToolChoice
	memberReasoningEffort
	memberAddGenerationPrompt
	memberContinueFinalMessage
	memberAddSpecialTokens
	memberDocuments
	memberTemplate
	memberTemplateKwargs
	memberMediaKwargs
	memberProcessorKwargs
	memberTruncate
	memberCacheSalt
	memberTransfer
	memberPrompt
	memberPromptEmbeds
	memberSuffix
	memberInstructions
	memberSystem
	memberInput
	members
)

var memberNames = [members]string{
	memberMessages:             "messages",
	memberTools:                "tools",
	memberToolChoice:           "tool_choice",
	memberReasoningEffort:      "reasoning_effort",
	memberAddGenerationPrompt:  "add_generation_prompt",
	memberContinueFinalMessage: "continue_final_message",
	memberAddSpecialTokens:     "add_special_tokens",
	memberDocuments:            "documents",
	memberTemplate:             "chat_template",
	memberTemplateKwargs:       "chat_template_kwargs",
	memberMediaKwargs:          "media_io_kwargs",
	memberProcessorKwargs:      "mm_processor_kwargs",
	memberTruncate:             "truncate_prompt_tokens",
	memberCacheSalt:            "cache_salt",
	memberTransfer:             "kv_transfer_params",
	memberPrompt:               "prompt",
	memberPromptEmbeds:         "prompt_embeds",
	memberSuffix:               "suffix",
	memberInstructions:         "instructions",
	memberSystem:               "system",
	memberInput:                "input",
}

// memberOf maps a name to its member.
var memberOf = func() map[string]member {
	m := make(map[string]member, members)
	for i, name := range memberNames {
		m[name] = member(i)
	}
	return m
}()

// bears states which members each kind of request has. The engine ignores the
// others on that route. Of requests that are not followed it states what stands
// for the prompt.
var bears = [...]uint32{
	Other: bits(memberMessages, memberTools, memberInstructions, memberSystem, memberInput,
		memberPrompt, memberCacheSalt),
	Chat: bits(memberMessages, memberTools, memberToolChoice, memberReasoningEffort,
		memberAddGenerationPrompt, memberContinueFinalMessage, memberAddSpecialTokens,
		memberDocuments, memberTemplate, memberTemplateKwargs, memberMediaKwargs,
		memberProcessorKwargs, memberTruncate, memberCacheSalt, memberTransfer),
	Completion: bits(memberPrompt, memberPromptEmbeds, memberSuffix,
		memberAddSpecialTokens, memberTruncate, memberCacheSalt, memberMediaKwargs,
		memberProcessorKwargs),
	Tokenize: bits(memberMessages, memberTools, memberAddGenerationPrompt,
		memberContinueFinalMessage, memberAddSpecialTokens, memberTemplate,
		memberTemplateKwargs, memberMediaKwargs, memberProcessorKwargs, memberPrompt),
}

func bits(of ...member) (set uint32) {
	for _, m := range of {
		set |= 1 << m
	}
	return set
}

// span is where a member's value lies in the body. The zero value is a member
// that the body does not have.
type span struct{ start, end int }

// outline is what one pass over the top level of a body finds, without reading
// the values. It lives as long as the body does and is one goroutine's. Two
// bodies of one kind whose spans hold the same bytes have the same prompt from
// the same model.
type outline struct {
	kind   Kind
	body   []byte
	spans  [members]span
	effort effort
	made   *int // decoder.made of its members
	// memory is where values are made; nil for memory of their own.
	memory *values
}

// scan finds the members that bear on the prompt of a request of that kind. It
// reports Malformed for what is no JSON object, as far as it has to look.
func (o *outline) scan(kind Kind, body []byte) Reason {
	*o = outline{kind: kind, body: body}
	if !utf8.Valid(body) {
		return Malformed
	}
	i := skipSpace(body, 0)
	if bytes.HasPrefix(body, bom) {
		i = skipSpace(body, len(bom))
	}
	if i >= len(body) || body[i] != '{' {
		return Malformed
	}
	i = skipSpace(body, i+1)
	if i < len(body) && body[i] == '}' {
		return end(body, i+1)
	}
	for {
		if i >= len(body) || body[i] != '"' {
			return Malformed
		}
		start := i
		if i = skipString(body, i); i < 0 {
			return Malformed
		}
		m, ok := memberNamed(body[start:i])
		if i = skipSpace(body, i); i >= len(body) || body[i] != ':' {
			return Malformed
		}
		start = skipSpace(body, i+1)
		if i = skipValue(body, start); i < 0 || !maybeValue(body[start:i]) {
			return Malformed
		}
		if ok && bears[kind]&(1<<m) != 0 {
			o.spans[m] = span{start, i}
		}
		if i = skipSpace(body, i); i >= len(body) {
			return Malformed
		}
		switch body[i] {
		case '}':
			return end(body, i+1)
		case ',':
			i = skipSpace(body, i+1)
		default:
			return Malformed
		}
	}
}

var bom = []byte("\ufeff")

func end(body []byte, i int) Reason {
	if skipSpace(body, i) != len(body) {
		return Malformed
	}
	return Exact
}

// memberNamed looks up a quoted key.
func memberNamed(quoted []byte) (m member, ok bool) {
	if bytes.IndexByte(quoted, '\\') < 0 {
		m, ok = memberOf[string(quoted[1:len(quoted)-1])]
		return m, ok
	}
	d := decoder{text: string(quoted)}
	key, ok := d.string()
	if !ok {
		return 0, false
	}
	m, ok = memberOf[key]
	return m, ok
}

func skipSpace(b []byte, i int) int {
	for i < len(b) && isBlank(b[i]) {
		i++
	}
	return i
}

// skipString returns the end of the string that begins at i, or -1.
func skipString(b []byte, i int) int {
	for i++; ; {
		n := bytes.IndexByte(b[i:], '"')
		if n < 0 {
			return -1
		}
		i += n
		slashes := 0
		for b[i-1-slashes] == '\\' {
			slashes++
		}
		i++
		if slashes%2 == 0 {
			return i
		}
	}
}

// skipValue returns the end of the value that begins at i, or -1. It pairs
// brackets only as far as finding that end needs; whoever decodes the value
// finds what else is wrong with it.
func skipValue(b []byte, i int) int {
	start, depth := i, 0
	for i < len(b) {
		switch c := b[i]; c {
		case '"':
			if i = skipString(b, i); i < 0 {
				return -1
			}
			if depth == 0 {
				return i
			}
			continue
		case '{', '[':
			depth++
		case '}', ']':
			if depth == 0 {
				return nonEmpty(start, i)
			}
			if depth--; depth == 0 {
				return i + 1
			}
		case ',', ' ', '\n', '\t', '\r':
			if depth == 0 {
				return nonEmpty(start, i)
			}
		}
		i++
	}
	return -1
}

// maybeValue tells values from words that are none. It looks only at those
// without brackets or quotes.
func maybeValue(raw []byte) bool {
	if strings.IndexByte("\"{[", raw[0]) >= 0 {
		return true
	}
	// Most are these, which the decoder would make values of.
	switch string(raw) {
	case "true", "false", "null":
		return true
	}
	if plainNumber(raw) {
		return true
	}
	d := decoder{text: keyText(raw)}
	_, ok := d.decode()
	return ok
}

// plainNumber reports whether raw is digits, perhaps with a sign before and a
// fraction behind them.
func plainNumber(raw []byte) bool {
	raw = bytes.TrimPrefix(raw, []byte("-"))
	whole, fraction, point := bytes.Cut(raw, []byte("."))
	if point && len(fraction) == 0 || len(whole) == 0 || whole[0] == '0' && len(whole) > 1 {
		return false
	}
	for _, digits := range [][]byte{whole, fraction} {
		for _, c := range digits {
			if !isDigit(c) {
				return false
			}
		}
	}
	return true
}

func nonEmpty(start, i int) int {
	if start == i {
		return -1
	}
	return i
}

// has reports whether the body has the member, null included.
func (o *outline) has(m member) bool { return o.spans[m].end > 0 }

// raw is a member's bytes; empty when there is none.
func (o *outline) raw(m member) []byte { return o.body[o.spans[m].start:o.spans[m].end] }

// null reports whether the member is absent or null.
func (o *outline) null(m member) bool {
	return !o.has(m) || string(o.raw(m)) == "null"
}

// value decodes a member. Without one it is None. What is decoded shares the
// body's memory.
func (o *outline) value(m member) (jinja.Value, Reason) {
	if !o.has(m) {
		return jinja.None(), Exact
	}
	d := decoder{text: keyText(o.raw(m)), memory: o.memory, made: o.made}
	v, ok := d.decode()
	if !ok && d.odd != Unfollowed && d.odd != TooLarge {
		return v, Malformed
	}
	return v, d.odd
}

// flag decodes a boolean as pydantic does when it is lenient: null is none.
func (o *outline) flag(m member, otherwise bool) (bool, Reason) {
	if !o.has(m) {
		return otherwise, Exact
	}
	v, reason := o.value(m)
	if reason != Exact {
		return false, reason
	}
	switch {
	case v.IsBool():
		return v.AsBool(), Exact
	case v.IsInt() && (v.AsInt() == 0 || v.AsInt() == 1):
		return v.AsInt() == 1, Exact
	case v.IsFloat() && (v.AsFloat() == 0 || v.AsFloat() == 1):
		return v.AsFloat() == 1, Exact
	case v.IsString():
		switch strings.ToLower(v.AsString()) {
		case "1", "on", "t", "true", "y", "yes":
			return true, Exact
		case "0", "off", "f", "false", "n", "no":
			return false, Exact
		}
	}
	return false, Malformed
}

// truthy is whether Python counts a member's value as true, as it stands.
func (o *outline) truthy(m member) bool {
	v, _ := o.value(m)
	return v.IsTruthy()
}

// isChat tells which of its two forms a request of Tokenize has.
func (o *outline) isChat() bool {
	return o.kind == Chat || o.kind == Tokenize && o.has(memberMessages)
}

// refusal is why the engine does not compute the prompt that the other members
// give, Exact when it does.
func (o *outline) refusal() Reason {
	switch {
	case !o.null(memberTruncate):
		return Truncated
	case !o.null(memberPromptEmbeds) && string(o.raw(memberPromptEmbeds)) != "[]":
		return Embeds
	}
	if !o.null(memberTemplate) {
		return RequestTemplate
	}
	for _, m := range []member{memberMediaKwargs, memberProcessorKwargs} {
		if v, reason := o.value(m); reason != Exact {
			return reason
		} else if v.IsTruthy() || !v.IsNone() && !v.IsDict() {
			return Malformed
		}
	}
	if v, reason := o.value(memberTransfer); reason != Exact {
		return reason
	} else if v.IsDict() {
		if ids, ok := v.AsDict().Get("prompt_token_ids"); ok && !ids.IsNone() {
			return Unfollowed
		}
	} else if !v.IsNone() {
		return Malformed
	}
	return Exact
}

// salt appends the request's cache_salt to dst.
func (o *outline) salt(dst []byte) ([]byte, Reason) {
	const refused = "@/\\\x00"
	if raw := o.raw(memberCacheSalt); plainString(raw) && len(raw) <= 128 && !bytes.ContainsAny(raw, refused) {
		return append(dst, raw[1:len(raw)-1]...), Exact
	}
	v, reason := o.value(memberCacheSalt)
	switch {
	case reason != Exact:
		return dst, reason
	case v.IsNone():
		return dst, Exact
	case !v.IsString(), v.AsString() == "", utf8.RuneCountInString(v.AsString()) > 128,
		strings.ContainsAny(v.AsString(), refused):
		return dst, Malformed
	}
	return append(dst, v.AsString()...), Exact
}

// plainString reports whether raw is a string of ASCII, not empty, that stands
// for itself.
func plainString(raw []byte) bool {
	n := len(raw) - 1
	if n < 2 || raw[0] != '"' || raw[n] != '"' {
		return false
	}
	for _, c := range raw[1:n] {
		if c < ' ' || c > '~' || c == '"' || c == '\\' {
			return false
		}
	}
	return true
}

// chatRequest is a chat as the engine holds it when it has validated the body:
// the input of whatever renders it. One goroutine uses it while it follows one
// prompt; a renderer may change its values. The zero value is not useful; see
// outline.chat.
type chatRequest struct {
	// memory is where a renderer may make values.
	memory *values
	// messages are objects that have a role; see checkMessage.
	messages []*message
	// tools is the list that templates see, or None: type, function with name,
	// description, parameters, and strict or defer_loading where given.
	tools jinja.Value
	// toolChoice is "none", "auto", "required", or "" for null and "function"
	// for a named one.
	toolChoice string
	// reasoningEffort is "" when the request gives none.
	reasoningEffort string
	// documents is a list of objects or None.
	documents jinja.Value
	// kwargs is chat_template_kwargs, an object or None.
	kwargs jinja.Value

	brief                bool // it may take little time only; see effort
	addGenerationPrompt  bool
	continueFinalMessage bool
	addSpecialTokens     bool

	// refusal is what the template has raised, for people.
	refusal string
}

// chat decodes and validates a chat, as the engine's request models do.
func (o *outline) chat() (r *chatRequest, reason Reason) {
	r = &chatRequest{brief: o.effort.brief, memory: o.memory}
	if r.memory == nil {
		r.memory = new(values)
	}
	for _, flag := range []struct {
		to        *bool
		m         member
		otherwise bool
	}{
		{&r.addGenerationPrompt, memberAddGenerationPrompt, true},
		{&r.continueFinalMessage, memberContinueFinalMessage, false},
		{&r.addSpecialTokens, memberAddSpecialTokens, false},
	} {
		if *flag.to, reason = o.flag(flag.m, flag.otherwise); reason != Exact {
			return nil, reason
		}
	}
	if r.continueFinalMessage && r.addGenerationPrompt ||
		o.truthy(memberContinueFinalMessage) && o.truthy(memberAddGenerationPrompt) {
		return nil, Malformed
	}
	if r.kwargs, reason = o.value(memberTemplateKwargs); reason != Exact {
		return nil, reason
	} else if !r.kwargs.IsNone() && !r.kwargs.IsDict() {
		return nil, Malformed
	}
	if r.documents, reason = o.documents(); reason != Exact {
		return nil, reason
	}
	if r.reasoningEffort, reason = o.reasoningEffort(); reason != Exact {
		return nil, reason
	}
	if r.tools, reason = o.tools(); reason != Exact {
		return nil, reason
	}
	if r.toolChoice, reason = o.toolChoice(r.tools); reason != Exact {
		return nil, reason
	}
	list, reason := o.value(memberMessages)
	if reason != Exact {
		return nil, reason
	}
	if !list.IsList() || list.AsList().Len() == 0 {
		return nil, Malformed
	}
	r.messages = make([]*message, 0, list.AsList().Len())
	for _, v := range list.AsList().Items {
		m, reason := checkMessage(v, o.kind == Tokenize)
		if reason != Exact {
			return nil, reason
		}
		m.made = o.made
		r.messages = append(r.messages, m)
	}
	return r, Exact
}

// calls reports whether the chat calls tools or answers calls.
func (r *chatRequest) calls() bool {
	return slices.ContainsFunc(r.messages, func(m *message) bool { return m.calls != nil || m.role == "tool" })
}

func (o *outline) documents() (jinja.Value, Reason) {
	v, reason := o.value(memberDocuments)
	if reason != Exact || v.IsNone() {
		return v, reason
	}
	if !v.IsList() {
		return v, Malformed
	}
	for _, document := range v.AsList().Items {
		if !document.IsDict() {
			return v, Malformed
		}
		for _, field := range document.AsDict().Data {
			if !field.IsString() {
				return v, Malformed
			}
		}
	}
	return v, Exact
}

func (o *outline) reasoningEffort() (string, Reason) {
	v, reason := o.value(memberReasoningEffort)
	if reason != Exact || v.IsNone() {
		return "", reason
	}
	if v.IsString() {
		switch s := v.AsString(); s {
		case "none", "minimal", "low", "medium", "high", "xhigh", "max":
			return s, Exact
		}
	}
	return "", Malformed
}

// tools decodes tools into what the engine makes of them for templates: the
// fields that its models have, in their order, with null where a description or
// parameters are lacking.
func (o *outline) tools() (jinja.Value, Reason) {
	v, reason := o.value(memberTools)
	if reason != Exact || v.IsNone() {
		return v, reason
	}
	if !v.IsList() || v.AsList().Len() == 0 && o.kind == Chat {
		return v, Malformed
	}
	out := make([]jinja.Value, 0, v.AsList().Len())
	for _, tool := range v.AsList().Items {
		dumped, reason := dumpTool(tool)
		if reason != Exact {
			return v, reason
		}
		out = append(out, dumped)
	}
	return jinja.NewList(out), Exact
}

func dumpTool(tool jinja.Value) (dumped jinja.Value, reason Reason) {
	if !tool.IsDict() {
		return tool, Malformed
	}
	outer := tool.AsDict()
	if kind, ok := outer.Get("type"); ok && !isString(kind, "function") {
		return tool, Malformed
	}
	function, _ := outer.Get("function")
	if !function.IsDict() {
		return tool, Malformed
	}
	inner := function.AsDict()
	to := jinja.NewDict()
	name, _ := inner.Get("name")
	if !name.IsString() {
		return tool, Malformed
	}
	to.AsDict().Set("name", name)
	description := inner.Data["description"]
	if !isNull(description) && !description.IsString() {
		return tool, Malformed
	}
	to.AsDict().Set("description", orNone(description))
	parameters := inner.Data["parameters"]
	if !isNull(parameters) && !parameters.IsDict() {
		return tool, Malformed
	}
	to.AsDict().Set("parameters", orNone(parameters))

	strict, lazy, innerLazy := inner.Data["strict"], outer.Data["defer_loading"], inner.Data["defer_loading"]
	for _, flag := range []jinja.Value{strict, lazy, innerLazy} {
		if !isNull(flag) && !flag.IsBool() {
			return tool, Unfollowed
		}
	}
	if !isNull(strict) {
		to.AsDict().Set("strict", strict)
	}
	if isNull(innerLazy) {
		innerLazy = lazy
	}
	if !isNull(innerLazy) {
		to.AsDict().Set("defer_loading", innerLazy)
	}
	dumped = jinja.NewDict()
	dumped.AsDict().Set("type", jinja.NewString("function"))
	dumped.AsDict().Set("function", to)
	if !isNull(lazy) {
		dumped.AsDict().Set("defer_loading", lazy)
	}
	return dumped, Exact
}

func (o *outline) toolChoice(tools jinja.Value) (string, Reason) {
	if !o.has(memberToolChoice) {
		if tools.IsNone() {
			return "none", Exact
		}
		return "auto", Exact
	}
	v, reason := o.value(memberToolChoice)
	switch {
	case reason != Exact || v.IsNone():
		return "", reason
	case isString(v, "none"):
		return "none", Exact
	case tools.IsNone():
		return "", Malformed
	case isString(v, "auto"), isString(v, "required"):
		return v.AsString(), Exact
	case !v.IsDict():
		return "", Malformed
	}
	if kind, ok := v.AsDict().Get("type"); ok && !isString(kind, "function") {
		return "", Malformed
	}
	function, _ := v.AsDict().Get("function")
	if !function.IsDict() {
		return "", Malformed
	}
	name := function.AsDict().Data["name"]
	for _, tool := range tools.AsList().Items {
		if name.IsString() && tool.AsDict().Data["function"].AsDict().Data["name"].Equals(name) {
			return "function", Exact
		}
	}
	return "", Malformed
}

// isNull reports whether a member is null or not there.
func isNull(v jinja.Value) bool { return v.IsNone() || v.IsUndefined() }

func orNone(v jinja.Value) jinja.Value {
	if v.IsUndefined() {
		return jinja.None()
	}
	return v
}

func isString(v jinja.Value, s string) bool { return v.IsString() && v.AsString() == s }

// completion is the prompts of a completion request: texts, or token ids.
type completion struct {
	texts            []string
	ids              []uint32
	ends             []int
	addSpecialTokens bool
}

// maxPrompts is how many prompts the engine takes in one request.
const maxPrompts = 1024

// completion decodes the prompts.
func (o *outline) completion() (c completion, reason Reason) {
	if c.addSpecialTokens, reason = o.flag(memberAddSpecialTokens, true); reason != Exact {
		return c, reason
	}
	if o.kind == Completion && !o.null(memberSuffix) {
		// An engine that can fill in the middle renders it in a way of its own.
		return c, Unfollowed
	}
	if ids, ok := plainIDs(o.raw(memberPrompt)); ok {
		if o.kind == Tokenize {
			return c, Malformed
		}
		c.ids, c.ends = ids, []int{len(ids)}
		return c, Exact
	}
	v, reason := o.value(memberPrompt)
	if reason != Exact {
		return c, reason
	}
	switch {
	case v.IsString():
		if v.AsString() == "" && o.kind == Completion {
			return c, Malformed
		}
		c.texts = []string{v.AsString()}
		return c, Exact
	case o.kind == Tokenize, !v.IsList():
		return c, Malformed
	}
	items := v.AsList().Items
	if len(items) == 0 || len(items) > maxPrompts {
		return c, Malformed
	}
	for _, item := range items {
		switch {
		case item.IsString() && c.ends == nil && item.AsString() != "":
			c.texts = append(c.texts, item.AsString())
		case item.IsList() && c.texts == nil && item.AsList().Len() > 0:
			for _, id := range item.AsList().Items {
				if !id.IsInt() || id.AsInt() < 0 || id.AsInt() > maxID {
					return c, malformedID(id)
				}
				c.ids = append(c.ids, uint32(id.AsInt()))
			}
			c.ends = append(c.ends, len(c.ids))
		default:
			return c, malformedID(item)
		}
	}
	return c, Exact
}

const maxID = 1<<31 - 1

// malformedID is the reason for an item that is no token id as it stands. The
// engine may take true for 1 and 2.0 for 2.
func malformedID(v jinja.Value) Reason {
	if v.IsBool() || v.IsFloat() || v.IsString() {
		return Unfollowed
	}
	return Malformed
}

// plainIDs reads a flat list of token ids without making values of them.
func plainIDs(raw []byte) (ids []uint32, ok bool) {
	if len(raw) < 3 || raw[0] != '[' {
		return nil, false
	}
	for i := skipSpace(raw, 1); ; i = skipSpace(raw, i+1) {
		start, id := i, uint64(0)
		for i < len(raw) && isDigit(raw[i]) && id <= maxID {
			id = id*10 + uint64(raw[i]-'0')
			i++
		}
		if i == start || id > maxID || raw[start] == '0' && i > start+1 {
			return nil, false
		}
		ids = append(ids, uint32(id))
		i = skipSpace(raw, i)
		if i < len(raw) && raw[i] == ']' {
			return ids, true
		}
		if i >= len(raw) || raw[i] != ',' {
			return nil, false
		}
	}
}
