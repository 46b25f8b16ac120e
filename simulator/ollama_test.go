package simulator

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

// postOllama sends a body to an Ollama and returns the answer's members.
func postOllama(t *testing.T, s *Server, path, body string) map[string]any {
	t.Helper()
	resp, err := http.Post(s.URL()+path, "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("POST %s: status %d, %v: %s", path, resp.StatusCode, err, text)
	}
	var answer map[string]any
	if err := json.Unmarshal(text, &answer); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	return answer
}

// resident returns the models that an Ollama has in memory.
func resident(t *testing.T, s *Server) []any {
	t.Helper()
	resp, err := http.Get(s.URL() + "/api/ps")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var page struct {
		Models []any `json:"models"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&page); err != nil {
		t.Fatal(err)
	}
	return page.Models
}

// TestOllamaLoads: the first request loads the model and tells how long that took,
// the next one finds it, and it stays for as long as the last request has said.
func TestOllamaLoads(t *testing.T) {
	const load = 500 * time.Millisecond
	s, err := Start(Config{Engine: "ollama", LoadTime: load, TimePerOutputToken: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	took := func(keepAlive string) time.Duration {
		t.Helper()
		answer := postOllama(t, s, "/api/chat", `{"model":"sim","stream":false,"keep_alive":`+keepAlive+`,"options":{"num_predict":2},"messages":[{"role":"user","content":"hi"}]}`)
		loaded, total := answer["load_duration"].(float64), answer["total_duration"].(float64)
		if rest := answer["prompt_eval_duration"].(float64) + answer["eval_duration"].(float64); total < loaded+rest {
			t.Errorf("all of it took %v, its parts %v and %v", total, loaded, rest)
		}
		return time.Duration(loaded)
	}
	if n := resident(t, s); len(n) != 0 {
		t.Errorf("in memory before anybody has asked: %v", n)
	}
	if d := took(`-1`); d < load {
		t.Errorf("the first request has loaded the model in %v", d)
	}
	if n := resident(t, s); len(n) != 1 {
		t.Errorf("in memory: %v", n)
	} else if at, err := time.Parse(time.RFC3339Nano, n[0].(map[string]any)["expires_at"].(string)); err != nil || time.Until(at) < 24*time.Hour {
		t.Errorf("it expires at %v, %v", at, err)
	}
	if d := took(`"1h"`); d >= load {
		t.Errorf("the second request has waited for the model for %v", d)
	}
	if d := took(`0`); d >= load {
		t.Errorf("the third request has waited for the model for %v", d)
	}
	waitFor(t, func() bool { return len(resident(t, s)) == 0 })
	if d := took(`"20ms"`); d < load {
		t.Errorf("after it was unloaded it was there in %v", d)
	}
	waitFor(t, func() bool { return len(resident(t, s)) == 0 })
}

// TestOllamaReloads: a model that is loaded with another context has nothing of what
// was computed before.
func TestOllamaReloads(t *testing.T) {
	s, err := Start(Config{Engine: "ollama", ZeroLatency: true})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	prompt := strings.Repeat("word ", 100)
	ask := func(options string) {
		t.Helper()
		answer := postOllama(t, s, "/api/generate", `{"model":"sim","stream":false,"raw":true,"prompt":"`+prompt+`","options":{"num_predict":1`+options+`}}`)
		if n := answer["prompt_eval_count"]; n != 100.0 {
			t.Errorf("%v tokens of the prompt are counted", n)
		}
	}
	hits := func() int {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.process.ranks[0].engine.Counts().Hit
	}
	ask("")
	ask("")
	first := hits()
	if first == 0 {
		t.Error("the same prompt was computed twice")
	}
	ask(`,"num_ctx":4096`)
	if n := hits(); n != first {
		t.Errorf("%d tokens outlive the model that computed them", n-first)
	}
	ask(`,"num_ctx":4096`)
	if n := hits(); n == first {
		t.Error("the model was loaded again for the same context")
	}
}
