package simulator

import (
	"bytes"
	"encoding/json"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/inferrail/inferrail/simulator/workload"
)

// What is asked over HTTP has the tokens that it has in virtual time, and what is said
// is what later prompts go on with.
func TestWorkload(t *testing.T) {
	s, c := start(t, Config{ZeroLatency: true, EnablePromptTokensDetails: true, NumGPUBlocks: 1 << 20, BlockSize: 1}), client(t)
	type answer struct {
		PromptIDs []uint32 `json:"prompt_token_ids"`
		Choices   []struct {
			IDs       []uint32 `json:"token_ids"`
			PromptIDs []uint32 `json:"prompt_token_ids"`
		} `json:"choices"`
		Usage struct {
			Prompt     int `json:"prompt_tokens"`
			Completion int `json:"completion_tokens"`
			Details    struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		} `json:"usage"`
	}
	plain := &workload.Workload{Name: "plain", Requests: []workload.Request{
		{Parts: []workload.Part{{ID: 1, Tokens: 512}, {ID: 2, Tokens: 3}}, Output: 5, Answer: 3},
		{Parts: []workload.Part{{ID: 1, Tokens: 512}, {ID: 2, Tokens: 3}, {ID: 3, Tokens: 5}, {ID: 9, Tokens: 1}}, Output: 1},
	}}
	calls := &workload.Workload{Name: "calls", Requests: []workload.Request{{
		Parts: []workload.Part{{ID: 1, Tokens: 1, Role: "tools"}, {ID: 2, Tokens: 1, Role: "user"}, {ID: 3, Tokens: 4, Role: "assistant"},
			{ID: 4, Tokens: 1, Role: "tool"}, {ID: 5, Tokens: 2, Role: "tool"}, {ID: 3, Tokens: 4, Role: "assistant"}, {ID: 6, Tokens: 1, Role: "user"}}, Output: 2}}}
	workloads := []*workload.Workload{plain, calls}
	for _, name := range workload.Names() {
		w, err := workload.Generate(workload.Options{Name: name, Seed: 7, Requests: 60, Rate: 50})
		if err != nil {
			t.Fatal(err)
		}
		workloads = append(workloads, w)
	}
	for _, w := range workloads {
		var served [][]uint32
		for i := range w.Requests {
			r := &w.Requests[i]
			body := string(workload.AppendBody(nil, r, workload.BodyOptions{Model: "sim", Index: i, Exact: true, Say: true}))
			res := post(t, c, s, r.Path(), strings.TrimSuffix(body, "}")+`,"return_token_ids":true}`)
			text := readAll(t, res)
			var a answer
			if err := json.Unmarshal(text, &a); err != nil || res.StatusCode != 200 {
				t.Fatalf("%s, request %d: %s", w.Name, i, text)
			}
			prompt, said := r.AppendPrompt(nil), r.AppendAnswer(nil, i)
			ids := append(a.PromptIDs, a.Choices[0].PromptIDs...)
			if !slices.Equal(ids, prompt) || !slices.Equal(a.Choices[0].IDs, said) {
				t.Fatalf("%s, request %d: the prompt\n%v is computed as\n%v, and the answer\n%v as\n%v:\n%s", w.Name, i, prompt, ids, said, a.Choices[0].IDs, body)
			}
			if a.Usage.Prompt != r.Input() || a.Usage.Completion != r.Output {
				t.Fatalf("%s, request %d: usage %+v, want %d and %d", w.Name, i, a.Usage, r.Input(), r.Output)
			}
			if most := r.Input() + r.Output; most > 30_000 {
				t.Errorf("%s, request %d has %d tokens", w.Name, i, most)
			}
			// Blocks are of one token, and the last one said is not computed.
			cached := 0
			for _, all := range served {
				n := 0
				for n < min(len(all), len(prompt)-1) && all[n] == prompt[n] {
					n++
				}
				cached = max(cached, n)
			}
			if served != nil && a.Usage.Details.Cached != cached {
				t.Errorf("%s, request %d: %d tokens were cached, %d are shared", w.Name, i, a.Usage.Details.Cached, cached)
			}
			served = append(served, append(prompt, said[:len(said)-1]...))
		}
	}
}

// A text that is read from a file has as many tokens as this model has of it.
func TestWorkloadOfTexts(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	pieces := []string{"a", "Z", "7", " ", "\n", "\t", ".", "_", "-", "\x00", "\x7f", "é", "日", "🙂", "\u2028", "word", "internationalisation", "\\", "\"", "<|", "\u00ad", "ß"}
	var list []map[string]any
	var want []int
	for range 2000 {
		var b strings.Builder
		for range 1 + r.IntN(40) {
			b.WriteString(pieces[r.IntN(len(pieces))])
		}
		text := b.String()
		list = append(list, map[string]any{"conversations": []map[string]string{{"from": "human", "value": text}, {"from": "gpt", "value": "x"}}})
		want = append(want, countTokens(text))
	}
	text, err := json.Marshal(list)
	if err != nil {
		t.Fatal(err)
	}
	w, err := workload.ReadOptions{Rate: 1}.Parse(bytes.NewReader(text), "texts")
	if err != nil {
		t.Fatal(err)
	}
	if len(w.Requests) != len(want) {
		t.Fatalf("%d requests of %d", len(w.Requests), len(want))
	}
	// All begin anew, so that they are in the order of the file.
	for i, r := range w.Requests {
		if r.Parts[0].Tokens != want[i] {
			t.Errorf("%s: %d tokens are read, %d are counted", list[i], r.Parts[0].Tokens, want[i])
		}
	}
}

// Whoever's API an engine has, it takes the bodies, counts the same tokens and says as
// many as it is asked to.
func TestWorkloadOfEngines(t *testing.T) {
	for _, engine := range engines {
		s, c := start(t, Config{ZeroLatency: true, Engine: engine, EnablePromptTokensDetails: true}), client(t)
		for _, name := range []string{"system-prompts", "chat", "agents"} {
			w, err := workload.Generate(workload.Options{Name: name, Seed: 7, Requests: 20, Rate: 50, Output: 20})
			if err != nil {
				t.Fatal(err)
			}
			for i := range w.Requests {
				r := &w.Requests[i]
				res := post(t, c, s, r.Path(), string(workload.AppendBody(nil, r, workload.BodyOptions{Model: "sim", Index: i, Exact: true, Say: true})))
				text := readAll(t, res)
				var a struct {
					Usage struct {
						Prompt     int `json:"prompt_tokens"`
						Completion int `json:"completion_tokens"`
					} `json:"usage"`
				}
				if err := json.Unmarshal(text, &a); err != nil || res.StatusCode != 200 {
					t.Fatalf("%s, %s, request %d: %s", engine, name, i, text)
				}
				if a.Usage.Prompt != r.Input() || a.Usage.Completion != r.Output {
					t.Fatalf("%s, %s, request %d: %+v, want %d and %d", engine, name, i, a.Usage, r.Input(), r.Output)
				}
			}
		}
	}
}
