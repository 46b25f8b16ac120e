package simulator

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	follow "github.com/inferrail/inferrail/proxy/prompt"
)

// agentIDs are those that the agent expects for a body, nil if it follows the
// prompt not.
func agentIDs(t *testing.T, kind follow.Kind, body string) []int {
	t.Helper()
	m, err := follow.Load(follow.Source{Tokenizer: "builtin:sim"})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	var p follow.Prompt
	m.Follow(&p, kind, []byte(body), time.Time{})
	switch {
	case p.Reason == follow.Unfollowed && kind == follow.Tokenize:
		return nil
	case p.Reason != follow.Exact:
		t.Fatalf("%s: the agent follows it not: %v", body, p.Reason)
	}
	ids := []int{}
	for _, id := range p.IDs {
		ids = append(ids, int(id))
	}
	return ids
}

// answered mirrors what is looked at in answers of several routes.
type answered struct {
	Usage struct {
		Prompt int `json:"prompt_tokens"`
	} `json:"usage"`
	PromptIDs []int `json:"prompt_token_ids"`
	Choices   []struct {
		Message struct {
			Content string `json:"content"`
		} `json:"message"`
		Text      string `json:"text"`
		PromptIDs []int  `json:"prompt_token_ids"`
		IDs       []int  `json:"token_ids"`
	} `json:"choices"`
	Tokens []int `json:"tokens"`
	Count  int   `json:"count"`
	IDs    []int `json:"token_ids"`
}

func asked(t *testing.T, s *Server, path, body string) (a answered) {
	t.Helper()
	res := post(t, client(t), s, path, body)
	text := readAll(t, res)
	if err := json.Unmarshal(text, &a); err != nil || res.StatusCode != 200 {
		t.Fatalf("%s %s: %d %s", path, body, res.StatusCode, text)
	}
	return a
}

// TestChatsCountAsTheAgentDoes: for whatever a chat may hold, the engine has
// the ids that the agent expects, on every route that shows them.
func TestChatsCountAsTheAgentDoes(t *testing.T) {
	s := start(t, Config{ZeroLatency: true})
	f := func(members string) {
		t.Helper()
		body := `{"max_tokens":2,"return_token_ids":true,` + members + `}`
		want := agentIDs(t, follow.Chat, body)
		a := asked(t, s, "/v1/chat/completions", body)
		if !slices.Equal(a.PromptIDs, want) || a.Usage.Prompt != len(want) {
			t.Errorf("%s: %d tokens %v, want %v", members, a.Usage.Prompt, a.PromptIDs, want)
		}
		if r := asked(t, s, "/v1/chat/completions/render", body); !slices.Equal(r.IDs, want) {
			t.Errorf("%s: rendered %v, want %v", members, r.IDs, want)
		}
		body = `{` + members + `}`
		want = agentIDs(t, follow.Tokenize, body)
		if want == nil {
			return // vLLM reads some messages otherwise on this route
		}
		if a := asked(t, s, "/tokenize", body); !slices.Equal(a.Tokens, want) || a.Count != len(want) {
			t.Errorf("%s: tokenised %v, want %v", members, a.Tokens, want)
		}
	}
	const tools = `"tools":[{"function":{"parameters":{"b":{"type":"string"},"a":1.50},"description":"Grüße & <b>","name":"f"},"type":"function"}]`
	f(`"messages":[{"role":"user","content":"hi"}]`)
	f(`"messages":[{"role":"system","content":""},{"role":"user","content":"größe \ud83d\ude42 \u0041\n"}]`)
	f(`"messages":[{"role":"user","content":[{"type":"text","text":"one"},{"text":"two","type":"text"}]}]`)
	f(`"messages":[{"role":"user","content":"x"}],"add_generation_prompt":false`)
	f(`"messages":[{"role":"user","content":"x"},{"role":"assistant","content":"I say"}],"add_generation_prompt":false,"continue_final_message":true`)
	f(`"messages":[{"role":"user","content":"x"}],` + tools)
	f(`"messages":[{"role":"user","content":"x"}],"tool_choice":"none",` + tools)
	f(`"messages":[{"role":"user","content":"x"},{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"b\":\"v\", \"a\":[1,2.0,null]}"}}]},{"role":"tool","tool_call_id":"1","content":"done"}],` + tools)
	f(`"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"unknown":true}`)
}

// TestTurnsContinue: a conversation's next prompt begins with the ids of the
// one before and of what was generated, so that all of it is in the engine's
// cache.
func TestTurnsContinue(t *testing.T) {
	s := start(t, Config{ZeroLatency: true})
	r := rand.New(rand.NewPCG(1, 2))
	messages := `{"role":"system","content":"be brief"}`
	var before []int
	for turn := range 20 {
		messages += fmt.Sprintf(`,{"role":"user","content":"turn %d%s"}`, turn, strings.Repeat(" and", r.IntN(30)))
		body := fmt.Sprintf(`{"messages":[%s],"max_tokens":%d,"return_token_ids":true}`, messages, 1+r.IntN(40))
		a := asked(t, s, "/v1/chat/completions", body)
		if len(a.PromptIDs) < len(before) || !slices.Equal(a.PromptIDs[:len(before)], before) {
			t.Fatalf("turn %d: %v does not begin with %v", turn, a.PromptIDs, before)
		}
		before = append(a.PromptIDs, a.Choices[0].IDs...)
		said, err := json.Marshal(a.Choices[0].Message.Content)
		if err != nil {
			t.Fatal(err)
		}
		messages += `,{"role":"assistant","content":` + string(said) + `}`
	}
	if len(before) < 500 {
		t.Errorf("only %d tokens in the end", len(before))
	}
}

// TestCompletionsCountAsTheAgentDoes: texts, ids and lists of them.
func TestCompletionsCountAsTheAgentDoes(t *testing.T) {
	s := start(t, Config{ZeroLatency: true})
	for _, prompt := range []string{`"once upon a time"`, `"größe \ud83d\ude42"`, `[1,2,3]`, `["a","bc de"]`, `[[1,2],[3]]`} {
		body := `{"prompt":` + prompt + `,"max_tokens":1,"return_token_ids":true}`
		want := agentIDs(t, follow.Completion, body)
		var got []int
		a := asked(t, s, "/v1/completions", body)
		for _, c := range a.Choices {
			got = append(got, c.PromptIDs...)
		}
		if !slices.Equal(got, want) || a.Usage.Prompt != len(want) {
			t.Errorf("%s: %d tokens %v, want %v", prompt, a.Usage.Prompt, got, want)
		}
	}
}
