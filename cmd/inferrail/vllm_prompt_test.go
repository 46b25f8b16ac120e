package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// talker makes requests that vLLM takes, from a seed.
type talker struct{ *rand.Rand }

// scraps are what texts are made of: what templates and tokenizers stumble over.
var scraps = []string{"the", " river", "Zürich", " don't", "I'LL", " 12345678", "3.14", "你好世界", "مرحبا", "👩‍👩‍👧", "e\u0301", "\u00a0", " ", "  ", "\n", "\n\n\t", "\r\n",
	"<|im_start|>", "<|im_end|>", "<think>", "</think>", "\n</think>\n\n", "<tool_call>", "{{ x }}", "{%", "func f() {\n\treturn x[1:]\n}", "\"quoted\"", "\\", "&amp;", "....", "</tool_response>"}

func (k talker) text() string {
	var s strings.Builder
	s.WriteString("Say")
	for range 1 + k.IntN(12) {
		s.WriteString(scraps[k.IntN(len(scraps))])
	}
	return s.String()
}

func (k talker) content() any {
	if k.IntN(4) > 0 {
		return k.text()
	}
	return []any{map[string]any{"type": "text", "text": k.text()}, map[string]any{"type": "text", "text": k.text()}}
}

// messages are a conversation of some turns, with calls of tools if it has any.
func (k talker) messages(tools bool) (list []any) {
	if k.IntN(2) == 0 {
		list = append(list, map[string]any{"role": "system", "content": k.content()})
	}
	for range k.IntN(4) {
		list = append(list, map[string]any{"role": "user", "content": k.content()})
		answer := map[string]any{"role": "assistant", "content": k.text()}
		if k.IntN(3) == 0 {
			answer["reasoning"] = k.text()
		}
		if !tools || k.IntN(2) == 0 {
			list = append(list, answer)
			continue
		}
		id := fmt.Sprint("call_", k.IntN(100))
		answer["tool_calls"] = []any{map[string]any{"id": id, "type": "function", "function": map[string]any{
			"name": "f", "arguments": fmt.Sprintf(`{"a": %d, "b":%q}`, k.IntN(100), k.text())}}}
		list = append(list, answer, map[string]any{"role": "tool", "tool_call_id": id, "content": k.content()},
			map[string]any{"role": "assistant", "content": k.text()})
	}
	return append(list, map[string]any{"role": "user", "content": k.content()})
}

// chat and completion are requests for two tokens, answered with the ids that
// vLLM has made of the prompt.
func (k talker) chat() map[string]any {
	body := map[string]any{"model": []string{"tiny", "tiny-alias"}[k.IntN(2)], "max_tokens": 2, "temperature": 0, "return_token_ids": true}
	tools := k.IntN(3) == 0
	if tools {
		body["tools"] = []any{map[string]any{"type": "function", "function": map[string]any{"name": "f", "description": k.text(),
			"parameters": map[string]any{"type": "object", "properties": map[string]any{"a": map[string]any{"type": "integer"}, "b": map[string]any{"type": "string"}}, "required": []any{"a"}}}}}
		body["tool_choice"] = []string{"auto", "none"}[k.IntN(2)]
	}
	body["messages"] = k.messages(tools)
	switch k.IntN(6) {
	case 0:
		body["chat_template_kwargs"] = map[string]any{"enable_thinking": k.IntN(2) == 0}
	case 1:
		body["add_generation_prompt"] = false
	case 2:
		if !tools {
			body["messages"] = append(body["messages"].([]any), map[string]any{"role": "assistant", "content": "It is " + k.text()})
			body["add_generation_prompt"], body["continue_final_message"] = false, true
		}
	}
	return body
}

func (k talker) completion() map[string]any {
	body := map[string]any{"model": "tiny", "max_tokens": 2, "temperature": 0, "return_token_ids": true}
	switch k.IntN(4) {
	case 0:
		body["prompt"] = k.text()
	case 1:
		body["prompt"] = []any{k.text(), k.text(), k.text()}
	case 2:
		body["prompt"] = []any{k.IntN(1000), k.IntN(100000), 151644, 198}
	default:
		body["prompt"] = []any{[]any{1, 2, 3, k.IntN(1000)}, []any{k.IntN(1000)}}
	}
	if k.IntN(3) == 0 {
		body["add_special_tokens"] = k.IntN(2) == 0
	}
	return body
}

// counted is what an answer of vLLM's tells of its prompt: how many tokens it has
// counted, and the ids of each sequence.
func counted(t *testing.T, r reply) (tokens int, sequences [][]uint32) {
	t.Helper()
	type part struct {
		Usage *struct {
			Prompt int `json:"prompt_tokens"`
		}
		IDs     []uint32 `json:"prompt_token_ids"`
		Choices []struct {
			Index int
			IDs   []uint32 `json:"prompt_token_ids"`
		}
	}
	parts := []string{r.body}
	if strings.HasPrefix(r.header.Get("Content-Type"), "text/event-stream") {
		parts = nil
		for line := range strings.SplitSeq(r.body, "\n") {
			if data, ok := strings.CutPrefix(line, "data: "); ok && data != "[DONE]" {
				parts = append(parts, data)
			}
		}
	}
	byChoice := map[int][]uint32{}
	for _, text := range parts {
		var p part
		if err := json.Unmarshal([]byte(text), &p); err != nil {
			t.Fatalf("%v: %s", err, text)
		}
		if p.Usage != nil {
			tokens = p.Usage.Prompt
		}
		if p.IDs != nil {
			byChoice[0] = p.IDs
		}
		for _, c := range p.Choices {
			if c.IDs != nil {
				byChoice[c.Index] = c.IDs
			}
		}
	}
	for i := range len(byChoice) {
		sequences = append(sequences, byChoice[i])
	}
	return tokens, sequences
}

// followedPrompts is what an agent says of how tiny's prompts are followed.
type followedPrompts struct {
	State, Why, Tokenizer string
	Probes                []followedProbe
}

func (g *guard) prompts() (f followedPrompts) {
	g.t.Helper()
	var page struct {
		Models []struct {
			Name    string
			Prompts followedPrompts
		}
	}
	if err := json.Unmarshal(g.page("/debug/fleet"), &page); err != nil {
		g.t.Fatal(err)
	}
	for _, m := range page.Models {
		if m.Name == "tiny" {
			return m.Prompts
		}
	}
	return f
}

// followedProbe is one replica's.
type followedProbe struct{ Result, Via, What string }

// awaitPrompts waits until they are so, and probed with that result.
func (g *guard) awaitPrompts(t *testing.T, state, result string) (f followedPrompts) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(50 * time.Millisecond) {
		f = g.prompts()
		other := slices.IndexFunc(f.Probes, func(p followedProbe) bool { return p.Result != result })
		if f.State == state && len(f.Probes) > 0 && other < 0 {
			return f
		}
		if time.Now().After(end) {
			t.Fatalf("tiny is %+v; want it %s and the probes: %s", f, state, result)
		}
	}
}

// askPrompts sends n requests through the agent and compares what it tells with
// what vLLM does. When exact is false it must tell nothing. vLLM refuses to go on
// with a few of the messages that it should continue: their template cuts them.
func (g *guard) askPrompts(t *testing.T, k talker, n int, exact bool) {
	t.Helper()
	refused := 0
	for i := range n {
		path, body := "/v1/chat/completions", k.chat()
		if i%4 == 3 {
			path, body = "/v1/completions", k.completion()
		}
		if k.IntN(3) == 0 {
			body["stream"], body["stream_options"] = true, map[string]any{"include_usage": true}
		}
		text, err := json.Marshal(body)
		if err != nil {
			t.Fatal(err)
		}
		r := pose(t, g.client, g.url, question{path: path, body: string(text)})
		if r.status == 400 && body["continue_final_message"] != nil {
			refused++
			continue
		}
		if r.status != 200 {
			t.Errorf("request %d: %d %s\n%s", i, r.status, r.body, text)
			continue
		}
		told := r.header.Get("x-inferrail-prompt-tokens")
		if ids, ok := body["prompt"].([]any); !exact && !(ok && fmt.Sprintf("%T", ids[0]) != "string") {
			if told != "" {
				t.Errorf("request %d: %s tokens are told by an agent that does not know: %s", i, told, text)
			}
			continue
		}
		tokens, sequences := counted(t, r)
		if told != fmt.Sprint(tokens) {
			t.Errorf("request %d: %q tokens are told, vLLM counts %d: %s", i, told, tokens, text)
		}
		// The page follows the same body once more.
		looked, err := tryPose(t.Context(), g.client, g.admin, question{path: "/debug/prompt?path=" + path, body: string(text)})
		if err != nil {
			t.Fatal(err)
		}
		var page struct {
			Sequences []struct{ IDs []uint32 }
		}
		if err := json.Unmarshal([]byte(looked.body), &page); err != nil {
			t.Fatalf("%v: %s", err, looked.body)
		}
		var ours [][]uint32
		for _, s := range page.Sequences {
			ours = append(ours, s.IDs)
		}
		if len(ours) == 0 || !slices.EqualFunc(ours, sequences, slices.Equal) {
			t.Errorf("request %d: vLLM computes\n%v, and not\n%v\nof %s", i, sequences, ours, text)
		}
	}
	if refused > n/10 {
		t.Errorf("vLLM refuses %d of %d requests", refused, n)
	}
}

// TestVLLMPrompts: an agent that is told nothing but where a vLLM is follows its
// prompts, token for token. Then one with another template takes its place; and
// then the agent is told of the template. INFERRAIL_TOKENIZERS is a folder with a
// folder of tokenizer files for each model.
func TestVLLMPrompts(t *testing.T) {
	bin, tokenizers := os.Getenv("INFERRAIL_VLLM"), os.Getenv("INFERRAIL_TOKENIZERS")
	if bin == "" || tokenizers == "" {
		t.Skip("INFERRAIL_VLLM and INFERRAIL_TOKENIZERS name no folders with vLLM and tokenizers (make test-vllm)")
	}
	p := &place{t: t, bin: bin, model: filepath.Join(t.TempDir(), "qwen")}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	if err := command(ctx, ".", filepath.Join(bin, "python"), "testdata/vllm/model.py", p.model, filepath.Join(tokenizers, "tokenizer-qwen3", "models")); err != nil {
		t.Fatal(err)
	}
	template, config := filepath.Join(t.TempDir(), "chat.jinja"), filepath.Join(t.TempDir(), "inferrail.yaml")
	if err := os.WriteFile(template, []byte("{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"), 0o600); err != nil {
		t.Fatal(err)
	}
	configure := func(format string, args ...any) {
		t.Helper()
		if err := os.WriteFile(config+".new", fmt.Appendf(nil, format, args...), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(config+".new", config); err != nil {
			t.Fatal(err)
		}
	}
	tools := []string{"--enable-auto-tool-choice", "--tool-call-parser", "hermes"}
	k := talker{rand.New(rand.NewPCG(1, 2))}

	v := p.vllm(t, tools...)
	configure("replicas: [{id: own, url: %q}]\nhealth: {timeout: 10s}\n", v.url)
	g := p.agent(t, "copy", nil, "--config", config)
	if f := g.awaitPrompts(t, "exact", "agrees"); f.Tokenizer != p.model || f.Probes[0].What != "compared: chat, conversation, parts, odd text, tools, completion" {
		t.Errorf("tiny is followed as %+v", f)
	}
	g.askPrompts(t, k, 100, true)
	agreed := g.metric("inferrail_prompt_checks_total", `source="usage"`, `result="agree"`)
	if differed := g.metric("inferrail_prompt_checks_total", `result="disagree"`); differed != 0 || agreed == 0 {
		t.Errorf("%v of the comparisons agree, %v do not", agreed, differed)
	}
	if f := g.prompts(); f.State != "exact" {
		t.Errorf("tiny is %+v", f)
	}
	v.kill()

	v = p.vllm(t, append(tools, "--chat-template", template)...)
	configure("replicas: [{id: other, url: %q}]\nhealth: {timeout: 10s}\n", v.url)
	f := g.awaitPrompts(t, "demoted", "differs")
	const why = `replica other has other tokens: in the probe "chat" token `
	if !strings.HasPrefix(f.Why, why) {
		t.Errorf("the reason is %q", f.Why)
	}
	if page := string(g.page("/readyz")); !strings.Contains(page, "degraded: the prompts of tiny are approximate ("+why) {
		t.Errorf("readyz says %q", page)
	}
	if n := g.metric("inferrail_prompt_demoted", `model="tiny"`); n != 1 {
		t.Errorf("the metric is %v", n)
	}
	g.askPrompts(t, k, 12, false)

	configure("replicas: [{id: other, url: %q}]\nhealth: {timeout: 10s}\nmodels: [{name: tiny, chat_template: %q}]\n", v.url, template)
	g.awaitPrompts(t, "exact", "agrees")
	g.askPrompts(t, k, 40, true)
	if n := g.metric("inferrail_prompt_demoted", `model="tiny"`); n != 0 {
		t.Errorf("the metric is still %v", n)
	}
}
