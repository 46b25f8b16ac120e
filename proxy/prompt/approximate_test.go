package prompt

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
)

// TestApproximate: what stands for prompts that are not followed.
func TestApproximate(t *testing.T) {
	f := func(kind Kind, body string, want ...string) {
		t.Helper()
		var p Prompt
		var m *Model
		m.Approximate(&p, kind, []byte(body), Media)
		var got []string
		start := 0
		for _, end := range p.TextEnds {
			got = append(got, string(p.Text[start:end]))
			start = end
		}
		if fmt.Sprintf("%q", got) != fmt.Sprintf("%q", want) || p.Reason != Media {
			t.Errorf("%s: got %q, want %q", body, got, want)
		}
	}
	f(Chat, `{"messages":[{"role":"system","content":"s"},{"content":"a\nb","role":"user"}]}`, "system\ns\n\nuser\na\nb\n\n")
	f(Chat, `{"tools":[{"x":1}],"messages":[{"role":"user","content":"a"}]}`, `[{"x":1}]`+"\n\nuser\na\n\n")
	f(Chat, `{"messages":[{"role":"user","content":[{"type":"text","text":"a\u00e9"},{"type":"image_url","image_url":{"url":"u"}},"b"]}]}`,
		"user\naé\n"+`{"type":"image_url","image_url":{"url":"u"}}`+"\nb\n\n\n")
	f(Chat, `{"messages":[{"role":"assistant","content":null,"tool_calls":[{"id":1}]}]}`, "assistant\n"+`[{"id":1}]`+"\n\n")
	f(Chat, `{"messages":[5,"x",{"role":1}]}`, "5\n\nx\n\n1\n\n\n")
	f(Chat, `{"messages":"x"}`, "x")
	f(Chat, `{}`, "")
	f(Chat, `not JSON`, "not JSON")
	f(Completion, `{"prompt":"a\tb"}`, "a\tb")
	f(Completion, `{"prompt":["a","b"]}`, "a", "b")
	f(Completion, `{"prompt":[1,258]}`, "\x01\x00\x00\x00\x02\x01\x00\x00")
	f(Completion, `{"prompt":[[1],[2]]}`, "\x01\x00\x00\x00", "\x02\x00\x00\x00")
	f(Completion, `{"prompt":[]}`)
	f(Tokenize, `{"prompt":"a"}`, "a")
	f(Tokenize, `{"messages":[{"role":"user","content":"a"}]}`, "user\na\n\n")
	f(Other, `{"instructions":"i","input":[{"role":"user","content":[{"type":"input_text","text":"a"}]}]}`, "i\n\nuser\na\n\n\n")
	f(Other, `{"system":[{"type":"text","text":"s"}],"messages":[{"role":"user","content":"a"}]}`, `[{"type":"text","text":"s"}]`+"\n\nuser\na\n\n")
	f(Other, `{"input":"a"}`, "a")
}

// A longer conversation begins with the text of the shorter one.
func TestApproximateGoesOn(t *testing.T) {
	var messages []string
	var last []byte
	for i := range 20 {
		messages = append(messages, fmt.Sprintf(`{"role":"user","content":"turn %d"}`, i))
		var p Prompt
		var m *Model
		m.Follow(&p, Chat, []byte(`{"messages":[`+strings.Join(messages, ", ")+`],"tools":[{"a":1}]}`), epoch)
		if p.Reason != NoTokenizer || !bytes.HasPrefix(p.Text, last) || len(p.Text) == len(last) {
			t.Fatalf("%v: %q does not go on from %q", p.Reason, p.Text, last)
		}
		last = p.Text
	}
}

// What stands for a prompt is bounded, and the salt is kept.
func TestApproximateBounds(t *testing.T) {
	body := []byte(`{"cache_salt":"s","messages":[{"role":"user","content":"` + strings.Repeat(`\n`, 3*maxApproximate) + `"}]}`)
	var p Prompt
	var m *Model
	m.Approximate(&p, Chat, body, TooLarge)
	if len(p.Text) != maxApproximate || string(p.Salt) != "s" || len(p.TextEnds) != 1 {
		t.Errorf("got %d bytes, salt %q, ends %v", len(p.Text), p.Salt, p.TextEnds)
	}
	m.Follow(&p, Completion, []byte(`{"prompt":[1,2],"cache_salt":"x"}`), epoch)
	if p.Reason != Exact || len(p.IDs) != 2 || string(p.Salt) != "x" {
		t.Errorf("token ids need no tokenizer: got %v %v", p.Reason, p.IDs)
	}
}
