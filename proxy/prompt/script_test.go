package prompt

import (
	"bufio"
	"compress/gzip"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"
)

// renderedCase is a chat and what the engine has made of it: token ids and the
// same as texts and special tokens in turn, or that it refuses the chat.
type renderedCase struct {
	Body    json.RawMessage
	IDs     []uint32
	Text    []string
	Refused string
	// Unfollowed says that the agent does not follow what the engine takes.
	Unfollowed bool
	// Tokenizer is the variant of the file that a case of Mistral is for.
	Tokenizer string
}

// renderedCases reads a file that a script in testdata has made.
func renderedCases(t *testing.T, path string) (cases []renderedCase) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	in := bufio.NewReader(z)
	for d := json.NewDecoder(in); d.More(); {
		var c renderedCase
		if err := d.Decode(&c); err != nil {
			t.Fatal(err)
		}
		cases = append(cases, c)
	}
	if len(cases) < 300 {
		t.Fatalf("%s has only %d cases", path, len(cases))
	}
	return cases
}

// chatOf decodes the body of a chat as Model.Follow does.
func chatOf(body []byte) (*chatRequest, Reason) {
	var o outline
	if reason := o.scan(Chat, body); reason != Exact {
		return nil, reason
	}
	return o.chat()
}

// spelled is a script as texts and special tokens in turn: a text, empty or
// not, is first and last.
func spelled(s *script) (out []string) {
	text := ""
	for _, p := range s.pieces {
		if p.token {
			out = append(out, text, p.text)
			text = ""
			continue
		}
		text += p.text
	}
	return append(out, text)
}

// difference is where two sequences differ first, for people.
func difference[T comparable](got, want []T) (at int, g, w []T) {
	for at < len(got) && at < len(want) && got[at] == want[at] {
		at++
	}
	return at, got[at:min(len(got), at+8)], want[at:min(len(want), at+8)]
}

func TestScriptLeavesOutEmptyTexts(t *testing.T) {
	var s script
	s.token("<|start|>")
	s.text("")
	s.text("user")
	if got := spelled(&s); !slices.Equal(got, []string{"", "<|start|>", "user"}) {
		t.Fatalf("got %q", got)
	}
}

// Whatever a body holds, a renderer spells it out with tokens that it knows, or
// says why not.
func FuzzCodeRenderers(f *testing.F) {
	for _, body := range []string{
		`{"messages":[{"role":"user","content":"hi"}]}`,
		`{"messages":[{"role":"system","content":[{"type":"text","text":"a"}]},{"role":"user","content":"hi"},{"role":"assistant","content":"x","reasoning":"r"}],"continue_final_message":true,"add_generation_prompt":false}`,
		`{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":null,"tool_calls":[{"id":"abcdefghi","type":"function","function":{"name":"f","arguments":"{\"a\":1e400}"}}]},{"role":"tool","tool_call_id":"abcdefghi","content":"[1,{\"a\":-0.0}]"}],"reasoning_effort":"high"}`,
		`{"messages":[{"role":"user","content":"hi"}],"tools":[{"type":"function","function":{"name":"f","description":"d\r\ne","parameters":{"type":"object","properties":{"p":{"oneOf":[{"type":"string","enum":["a"],"default":"a"},{"type":["null","integer"],"nullable":true,"default":1.5e300}],"description":"d","examples":["e"]}},"required":["p"]}}}]}`,
		`{"messages":[{"role":"assistant","content":[{"type":"thinking","thinking":"t","closed":false},{"type":"text","text":"x"}]},{"role":"user","content":[]}]}`,
	} {
		f.Add([]byte(body))
	}
	mistralTokens := strings.Fields("<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS] " +
		"[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT] [ARGS] [CALL_ID] [THINK] [/THINK] [MODEL_SETTINGS] [/MODEL_SETTINGS]")
	f.Fuzz(func(t *testing.T, body []byte) {
		check := func(name string, s *script, tokens []string, reason Reason) {
			if reason != Exact {
				return
			}
			if len(s.pieces) == 0 || !s.pieces[0].token {
				t.Errorf("%s: %s: no token is first", name, body)
			}
			for _, p := range s.pieces {
				if p.text == "" || p.token && !slices.Contains(tokens, p.text) {
					t.Errorf("%s: %s: piece %+v", name, body, p)
				}
			}
		}
		// A renderer may change the request, so each gets its own.
		if r, reason := chatOf(body); reason == Exact {
			var s script
			check("harmony", &s, harmonyTokens, new(harmony).script(&s, r, harmonyDay))
		}
		for _, variant := range []string{"v3", "v7", "v11", "v13", "v13-think", "v15"} {
			if r, reason := chatOf(body); reason == Exact {
				var s script
				check(variant, &s, mistralTokens, mistralVariant(variant).script(&s, r))
			}
		}
	})
}
