package proxy

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
)

// What prompts share can be seen in the log, and nothing of what they say.
func TestPromptHashes(t *testing.T) {
	c := newCacher(t, nil, scripted(t), scripted(t))
	to := make(chan *Decision, 1)
	c.s.SetDecisions(to, DecisionsWanted{Sample: 1, Hashes: true})
	ask := func(body string, fields ...string) *Decision {
		t.Helper()
		c.ask(body, fields...)
		d := <-to
		if d.WorkOut(); d.Prompt == nil || d.Replicas != nil || d.Winner != "e0" || d.Outcome == nil || d.Prompt.Arrived.After(d.Time) || d.Prompt.Arrived.IsZero() {
			t.Fatalf("%+v", d)
		}
		return d
	}
	const usage = "Do: usage \"prompt_tokens\":1301,\"completion_tokens\":7\r\n"
	d := ask(completion(words(1300)+"secret"), usage)
	if h := d.Prompt; h.Every != 512 || len(h.Hashes) != 2 || h.Hashes[0] == h.Hashes[1] || h.Hashes[0] == 0 || h.Session == 0 ||
		d.Outcome.PromptTokens == nil || *d.Outcome.PromptTokens != 1301 || d.Outcome.OutputTokens == nil || *d.Outcome.OutputTokens != 7 {
		t.Errorf("%+v, %+v", h, d.Outcome)
	}
	text, err := json.Marshal(d)
	if err != nil || strings.Contains(string(text), "secret") || strings.Contains(string(text), `"replicas"`) ||
		!strings.Contains(string(text), fmt.Sprintf(`"every":512,"hashes":["%016x","%016x"]`, uint64(d.Prompt.Hashes[0]), uint64(d.Prompt.Hashes[1]))) {
		t.Errorf("%v: %s", err, text)
	}
	var back Decision
	if err := json.Unmarshal(text, &back); err != nil || !slices.Equal(back.Prompt.Hashes, d.Prompt.Hashes) || back.Prompt.Session != d.Prompt.Session {
		t.Errorf("%v: %+v", err, back.Prompt)
	}

	f := func(body string, want int) {
		t.Helper()
		h := ask(body).Prompt
		n := 0
		for n < min(len(h.Hashes), 2) && h.Hashes[n] == d.Prompt.Hashes[n] {
			n++
		}
		if n != want {
			t.Errorf("%d hashes are the same, want %d: %v and %v", n, want, h.Hashes, d.Prompt.Hashes)
		}
	}
	f(completion(words(1300)+"other"), 2)
	f(completion(words(1024)), 2)
	f(completion(words(1023)+"b "), 1)
	f(completion(words(511)), 0)
	f(completion("b "+words(1200)), 0)
	f(`{"prompt":["`+words(1024)+`","`+words(2000)+`"]}`, 2)
	if h := ask(completion(words(511))).Prompt; h.Every != 0 || h.Hashes != nil {
		t.Errorf("%+v", h)
	}
	// Engines whose blocks are not parts of 512.
	c.change(func(m *Model) { m.Blocks = []int{100} })
	if h := ask(completion(words(1300))).Prompt; h.Every != 600 || len(h.Hashes) != 2 {
		t.Errorf("%+v", h)
	}
	c.change(func(m *Model) { m.Blocks = []int{784} })
	if h := ask(completion(words(1600))).Prompt; h.Every != 784 || len(h.Hashes) != 2 {
		t.Errorf("%+v", h)
	}
}

// A sample has conversations whole, and always the same.
func TestSampledConversations(t *testing.T) {
	c := newCacher(t, nil, scripted(t))
	to := make(chan *Decision, 1)
	c.s.SetDecisions(to, DecisionsWanted{Sample: 0.3, Hashes: true})
	taken, sessions := 0, map[PrefixHash]bool{}
	const conversations = 300
	for k := range conversations {
		first := -1
		for turn := range 3 {
			c.askAt("/v1/chat/completions", fmt.Sprintf(`{"messages":[{"role":"user","content":"%d"}%s]}`, k, strings.Repeat(`,{"role":"assistant","content":"a"},{"role":"user","content":"b"}`, turn)))
			if first < 0 {
				first = len(to)
			}
			if len(to) != first {
				t.Fatalf("conversation %d is torn apart", k)
			}
			if len(to) > 0 {
				sessions[(<-to).Prompt.Session] = true
			}
		}
		taken += first
	}
	if taken < conversations*2/10 || taken > conversations*4/10 || len(sessions) != taken {
		t.Errorf("%d of %d conversations with %d sessions", taken, conversations, len(sessions))
	}
}
