package prompt

import (
	"errors"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/ardanlabs/jinja"

	"github.com/inferrail/inferrail/proxy/prompt/template"
)

// render renders a chat as the engine does: its template, the variables that
// the engine passes to it, and the cut after the final message that is to be
// continued. The text is valid until p is used again.
func (m *Model) render(p *Prompt, r *chatRequest, now time.Time) (string, Reason) {
	kwargs, reason := m.variables(r)
	if reason != Exact {
		return "", reason
	}
	t := m.plain
	if tools := kwargs["tools"]; !tools.IsNone() {
		if t = m.withTools; t == nil {
			return "", NoTemplate
		}
	}
	messages, reason := r.conversation(t.format)
	if reason != Exact {
		return "", reason
	}
	if t.foldsDeveloper && slices.ContainsFunc(r.messages, func(m *message) bool { return m.role == "developer" }) {
		if messages, reason = foldDeveloper(messages); reason != Exact {
			return "", reason
		}
	}
	vars := make(map[string]jinja.Value, len(t.special)+len(kwargs)+1)
	for name, token := range t.special {
		vars[name] = token
	}
	for name, v := range kwargs {
		switch {
		case name == "tools" || name == "documents" || name == "add_generation_prompt":
			vars[name] = v
		case !t.Uses(name):
		case name == "messages" || name == "conversations" || name == "compiled_template":
			return "", Malformed // given twice
		default:
			vars[name] = v
		}
	}
	var final string
	if r.continueFinalMessage {
		if final, reason = markFinal(messages); reason != Exact {
			return "", reason
		}
		if !strings.Contains(t.source, "content") {
			return "", RenderFailed
		}
	}
	vars["messages"] = jinja.NewList(messages)
	render := t.Append
	if r.brief {
		render = t.AppendBriefly
	}
	rendered, err := render(p.scratch.text[:0], vars, now)
	p.scratch.text = rendered
	switch {
	case errors.Is(err, template.ErrLong):
		return "", TooLarge
	case errors.Is(err, template.ErrUnfollowed):
		return "", Unfollowed
	case err != nil:
		r.refusal = err.Error()
		return "", RenderFailed
	}
	if r.continueFinalMessage {
		return cutFinal(keyText(rendered), final)
	}
	return keyText(rendered), Exact
}

// variables are the template variables that come from the engine's settings,
// the request's kwargs and its members, the later ones first.
func (m *Model) variables(r *chatRequest) (map[string]jinja.Value, Reason) {
	vars := make(map[string]jinja.Value, 8)
	for name, v := range m.kwargs.Data {
		vars[name] = v
	}
	if !r.tools.IsNone() {
		vars["tools"] = r.tools
	}
	thinks := false
	if r.kwargs.IsDict() {
		given := r.kwargs.AsDict()
		thinks = given.Has("enable_thinking")
		if template := given.Data["chat_template"]; !isNull(template) {
			return nil, RequestTemplate
		}
		for name, v := range given.Data {
			if v.IsNone() || isString(v, "auto") {
				continue
			}
			switch name {
			case "tokenize":
				if v.IsTruthy() {
					return nil, Unfollowed // renders and tokenizes in one
				}
			case "conversation", "model_config", "tokenizer", "self":
				return nil, Malformed // given twice
			case "return_assistant_tokens_mask":
				if v.IsTruthy() {
					return nil, Malformed
				}
			case "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs":
				// For the tokenizer, which is not asked that way.
			default:
				vars[name] = v
			}
		}
	}
	vars["add_generation_prompt"] = jinja.NewBool(r.addGenerationPrompt)
	delete(vars, "continue_final_message")
	if !r.documents.IsNone() {
		vars["documents"] = r.documents
	}
	if r.reasoningEffort != "" {
		vars["reasoning_effort"] = jinja.NewString(r.reasoningEffort)
		if !thinks {
			vars["enable_thinking"] = jinja.NewBool(r.reasoningEffort != "none")
		}
	}
	for _, name := range []string{"tools", "documents"} {
		v, ok := vars[name]
		switch {
		case !ok:
			vars[name] = jinja.None()
		case v.IsNone(), isListOfObjects(v):
		case !v.IsTruthy() && (v.IsDict() || v.IsString()):
			// Python finds nothing in them that is no object.
			if name == "tools" {
				vars[name] = jinja.NewList(nil)
			}
		default:
			return nil, Malformed
		}
	}
	return vars, Exact
}

func isListOfObjects(v jinja.Value) bool {
	return v.IsList() && !slices.ContainsFunc(v.AsList().Items, func(item jinja.Value) bool { return !item.IsDict() })
}

// foldDeveloper makes system messages of the developer's and one of all system
// messages, at the front, unless there is only the first.
func foldDeveloper(messages []jinja.Value) ([]jinja.Value, Reason) {
	var system []string
	var rest []jinja.Value
	folds := false
	for i, v := range messages {
		d := v.AsDict()
		role := d.Data["role"].AsString()
		if role == "developer" {
			d.Set("role", jinja.NewString("system"))
			delete(d.Data, "tools")
			d.Keys = slices.DeleteFunc(d.Keys, func(key string) bool { return key == "tools" })
		} else if role != "system" {
			rest = append(rest, v)
			continue
		}
		folds = folds || i > 0
		text, ok := systemText(d.Data["content"])
		if !ok {
			return nil, Malformed
		}
		if text != "" {
			system = append(system, text)
		}
	}
	if !folds {
		return messages, Exact
	}
	merged := jinja.NewDict()
	merged.AsDict().Set("role", jinja.NewString("system"))
	merged.AsDict().Set("content", jinja.NewString(strings.Join(system, "\n\n")))
	return append([]jinja.Value{merged}, rest...), Exact
}

func systemText(content jinja.Value) (text string, ok bool) {
	if content.IsString() {
		return content.AsString(), true
	}
	var texts []string
	for _, part := range content.AsList().Items {
		if text, ok := part.AsDict().Get("text"); ok {
			if !text.IsString() {
				return "", false
			}
			texts = append(texts, text.AsString())
		}
	}
	return strings.Join(texts, "\n"), true
}

// finalTag marks where the final message ends, so that what the template puts
// behind it can be cut off. It is transformers' and ends with a space, which
// tells whether the template trims contents.
const finalTag = "CONTINUE_FINAL_MESSAGE_TAG "

// markFinal puts the tag behind the final message's text.
func markFinal(messages []jinja.Value) (final string, reason Reason) {
	last := messages[len(messages)-1].AsDict()
	content := last.Data["content"]
	if content.IsString() {
		final = content.AsString()
		last.Set("content", jinja.NewString(final+finalTag))
		return final, Exact
	}
	parts := content.AsList().Items
	for i := len(parts) - 1; i >= 0; i-- {
		part := parts[i].AsDict()
		if text, ok := part.Get("text"); ok {
			if !text.IsString() {
				return "", RenderFailed
			}
			part.Set("text", jinja.NewString(text.AsString()+finalTag))
			return text.AsString(), Exact
		}
	}
	return "", RenderFailed
}

// cutFinal cuts the rendered text at the tag. A template that drops the final
// message, or a part of it, is an error, as in transformers.
func cutFinal(text, final string) (string, Reason) {
	tag := strings.TrimSuffix(finalTag, " ")
	at := strings.LastIndex(text, tag)
	if at < 0 || !strings.Contains(text, strings.TrimFunc(final, isPythonSpace)) {
		return "", RenderFailed
	}
	if strings.HasPrefix(text[at:], finalTag) {
		return text[:at], Exact
	}
	return strings.TrimRightFunc(text[:at], isPythonSpace), Exact
}

// isPythonSpace is what Python's str.strip takes away.
func isPythonSpace(r rune) bool { return unicode.IsSpace(r) || r >= 0x1c && r <= 0x1f }
