package prompt

import (
	"fmt"
	"time"
)

// Rendered returns the text that the model's template makes of a chat, for
// people to look at, whether or not the model is demoted. Without a text, why is
// a sentence that tells why there is none. It is slower than Follow and may be
// called from any goroutine.
func (m *Model) Rendered(kind Kind, body []byte, now time.Time) (text, why string) {
	defer func() {
		if what := recover(); what != nil {
			text, why = "", fmt.Sprintf("rendering it has failed: %v", what)
		}
	}()
	var o outline
	switch reason := o.scan(kind, body); {
	case reason != Exact:
		return "", "the body is no request that an engine takes"
	case !o.isChat():
		return "", "a completion's prompt is not rendered"
	case m == nil:
		return "", "the model has no chat template"
	case m.code != nil && (kind == Chat || m.codeTokenizes):
		return "", "chats of this model are made of token ids, not of text"
	case m.plain == nil && m.chatWhy != "":
		return "", m.chatWhy
	case m.plain == nil:
		return "", "the model has no chat template"
	}
	var p Prompt // whose memory nobody else uses, so that the text stays
	o.memory, o.made = &p.scratch.values, &p.scratch.made
	r, reason := o.chat()
	if reason == Exact {
		text, reason = m.render(&p, r, now)
	}
	switch {
	case reason == Exact:
		return text, ""
	case r != nil && r.refusal != "":
		return "", "the chat template does not take the messages: " + r.refusal
	}
	return "", "it is not rendered: " + reason.String()
}
