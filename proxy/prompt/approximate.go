package prompt

import (
	"bytes"
	"encoding/binary"
)

// maxApproximate bounds the text that stands for a prompt. The longest contexts
// are shorter; what is beyond it makes no difference to where a request goes.
const maxApproximate = 4 << 20

// Approximate fills p without rendering or tokenizing, for the reason. The text
// of a longer conversation begins with the text of the shorter one.
func (m *Model) Approximate(p *Prompt, kind Kind, body []byte, reason Reason) {
	p.reset()
	p.Reason = reason
	var o outline
	if o.scan(kind, body) != Exact {
		// Nothing is known of the body but its bytes.
		p.addText(body)
		p.endText()
		return
	}
	if salt, wrong := o.salt(p.Salt); wrong == Exact {
		p.Salt = salt
	}
	o.approximate(p)
}

// approximate writes role and content of the messages, or the prompts, to
// p.Text. Tools come first, as most templates put them there.
func (o *outline) approximate(p *Prompt) {
	p.Text, p.TextEnds = p.Text[:0], p.TextEnds[:0]
	if o.kind == Completion || o.kind == Tokenize && !o.isChat() {
		o.approximatePrompts(p)
		return
	}
	for _, m := range []member{memberTools, memberInstructions, memberSystem} {
		if !o.null(m) {
			p.addContent(o.raw(m))
			p.addText([]byte("\n\n"))
		}
	}
	for _, m := range []member{memberMessages, memberInput, memberPrompt} {
		raw := o.raw(m)
		if len(raw) == 0 || raw[0] != '[' {
			p.addContent(raw)
			continue
		}
		for w := (walker{raw: raw}); ; {
			message, ok := w.element()
			if !ok {
				break
			}
			p.addMessage(message)
		}
	}
	p.endText()
}

// approximatePrompts writes each prompt as a sequence: a text, or the ids.
func (o *outline) approximatePrompts(p *Prompt) {
	raw := o.raw(memberPrompt)
	if len(raw) == 0 || raw[0] != '[' {
		p.addContent(raw)
		p.endText()
		return
	}
	if ids, ok := plainIDs(raw); ok {
		p.addIDs(ids)
		p.endText()
		return
	}
	for w := (walker{raw: raw}); ; {
		prompt, ok := w.element()
		if !ok {
			return
		}
		if ids, ok := plainIDs(prompt); ok {
			p.addIDs(ids)
		} else {
			p.addContent(prompt)
		}
		p.endText()
	}
}

func (p *Prompt) addMessage(raw []byte) {
	if len(raw) == 0 || raw[0] != '{' {
		p.addContent(raw)
		p.addText([]byte("\n\n"))
		return
	}
	var role, content, calls []byte
	for w := (walker{raw: raw}); ; {
		key, value, ok := w.member()
		if !ok {
			break
		}
		switch string(key) {
		case `"role"`:
			role = value
		case `"content"`:
			content = value
		case `"tool_calls"`:
			calls = value
		}
	}
	p.addContent(role)
	p.addText([]byte("\n"))
	if len(content) > 0 && content[0] == '[' {
		for w := (walker{raw: content}); ; {
			part, ok := w.element()
			if !ok {
				break
			}
			p.addPart(part)
		}
	} else {
		p.addContent(content)
	}
	p.addContent(calls)
	p.addText([]byte("\n\n"))
}

// addPart writes a part's text, or all of a part that has none.
func (p *Prompt) addPart(raw []byte) {
	text := raw
	if len(raw) > 0 && raw[0] == '{' {
		for w := (walker{raw: raw}); ; {
			key, value, ok := w.member()
			if !ok {
				break
			}
			if string(key) == `"text"` {
				text = value
			}
		}
	}
	p.addContent(text)
	p.addText([]byte("\n"))
}

// addContent writes what a string holds, nothing for null, and other values as
// they are.
func (p *Prompt) addContent(raw []byte) {
	if string(raw) == "null" {
		return
	}
	if len(raw) > 1 && raw[0] == '"' {
		if bytes.IndexByte(raw, '\\') < 0 {
			p.addText(raw[1 : len(raw)-1])
			return
		}
		d := decoder{text: string(raw[:min(len(raw), 2*maxApproximate)])}
		if text, ok := d.string(); ok {
			p.addText([]byte(text))
			return
		}
	}
	p.addText(raw)
}

func (p *Prompt) addIDs(ids []uint32) {
	for _, id := range ids {
		if len(p.Text)+4 > maxApproximate {
			return
		}
		p.Text = binary.LittleEndian.AppendUint32(p.Text, id)
	}
}

func (p *Prompt) addText(text []byte) {
	p.Text = append(p.Text, text[:min(len(text), maxApproximate-len(p.Text))]...)
}

func (p *Prompt) endText() { p.TextEnds = append(p.TextEnds, len(p.Text)) }

// walker goes through the elements of an array or the members of an object
// without decoding them, as far as it is well-formed. The zero value with the
// array or object is at its beginning.
type walker struct {
	raw []byte
	pos int
}

// element returns the array's next element.
func (w *walker) element() (value []byte, ok bool) {
	if w.pos == 0 {
		w.pos = skipSpace(w.raw, 1)
	} else if w.pos = skipSpace(w.raw, w.pos); w.pos >= len(w.raw) || w.raw[w.pos] != ',' {
		return nil, false
	} else {
		w.pos = skipSpace(w.raw, w.pos+1)
	}
	end := skipValue(w.raw, w.pos)
	if end < 0 {
		w.pos = len(w.raw)
		return nil, false
	}
	value = w.raw[w.pos:end]
	w.pos = end
	return value, true
}

// member returns the object's next member; the key is quoted.
func (w *walker) member() (key, value []byte, ok bool) {
	key, ok = w.element()
	if !ok || key[0] != '"' {
		return nil, nil, false
	}
	w.pos = skipSpace(w.raw, w.pos)
	if w.pos >= len(w.raw) || w.raw[w.pos] != ':' {
		return nil, nil, false
	}
	w.pos = skipSpace(w.raw, w.pos+1)
	end := skipValue(w.raw, w.pos)
	if end < 0 {
		return nil, nil, false
	}
	value = w.raw[w.pos:end]
	w.pos = end
	return key, value, true
}
