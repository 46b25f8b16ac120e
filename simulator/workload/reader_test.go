package workload

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// The traces that the evaluation is about lie beside the repository, not in it.
func publicTrace(t *testing.T, name string) string {
	t.Helper()
	path := filepath.Join(os.Getenv("INFERRAIL_TRACES"), name)
	if _, err := os.Stat(path); err != nil {
		t.Skip("set INFERRAIL_TRACES to the folder of the public traces")
	}
	return path
}

func TestReadMooncake(t *testing.T) {
	for _, c := range []struct {
		name     string
		requests int
		reuse    float64
	}{{"mooncake_conversation_trace.jsonl", 12031, 0.366}, {"mooncake_synthetic_trace.jsonl", 3993, 0.640}} {
		w, err := Read(publicTrace(t, c.name))
		if err != nil {
			t.Fatal(err)
		}
		seen, blocks, again := map[uint64]bool{}, 0, 0
		for _, r := range w.Requests {
			for _, p := range r.Parts {
				if blocks++; seen[p.ID] {
					again++
				}
				seen[p.ID] = true
			}
		}
		got := float64(again) / float64(blocks)
		if len(w.Requests) != c.requests || got < c.reuse-0.001 || got > c.reuse+0.001 {
			t.Errorf("%s: %d requests, reuse %.3f", c.name, len(w.Requests), got)
		}
	}
}

func TestParse(t *testing.T) {
	f := func(text, want string) {
		t.Helper()
		w, err := ReadOptions{}.Parse(strings.NewReader(text), "file")
		if want != "" {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%q: got %v, want %s", text, err, want)
			}
			return
		}
		if err != nil {
			t.Errorf("%q: %v", text, err)
			return
		}
		r := &w.Requests[len(w.Requests)-1]
		if n := len(r.AppendPrompt(nil)); n != r.Input() {
			t.Errorf("%q: %d tokens, said to be %d", text, n, r.Input())
		}
	}
	f(`{"timestamp": 3, "input_length": 513, "output_length": 1, "hash_ids": [0, 1]}`, "")
	f(`{"timestamp": 3, "input_length": 513, "output_length": 1, "hash_ids": [0]}`, "file: line 1: 513 tokens are 2 blocks of 512, but there are 1 hash_ids")
	f(`{"timestamp": -3, "input_length": 5, "output_length": 1, "hash_ids": [0]}`, "line 1: the timestamp -3")
	const request = `{"timestamp": 3, "input_length": 5, "output_length": 1, "hash_ids": [7]}` + "\n"
	f("\n\r\n"+request+"\n\n"+request, "")
	f("\n"+request+"{", "line 3: ")
	f(`[{"id":"a","conversations":[{"from":"human","value":"Hello, you!"},{"from":"gpt","value":"Yes?"},{"from":"human","value":"Bye"}]}]`, "")
	f(`[{"id":"a","conversations":[{"from":"human","value":"Hello"},{"from":"gpt","value":"Yes?"}]},`, "conversation 2: ")
	f(`[{"id":"a","conversations":[{"from":"human","value":"Hello"},{"from":"nobody","value":"Yes?"}]}]`, `conversation 1: nobody known speaks as "nobody"`)
	f(`[]`, "there is no request in it")
	f(`[1]`, "conversation 1: ")
	f(`{"conversations":[{"from":"human","value":"Hello"},{"from":"gpt","value":"Yes?"}]}`+"\n", "")
	const decision = `{"model":"m","prompt_tokens":1200,"prompt":{"arrived":"2026-01-02T03:04:05Z","session":"ab","every":512,"hashes":["00000000000000ff","ffffffffffffffff"]},"outcome":{"output_tokens":7,"prompt_tokens":null}}` + "\n"
	f(decision, "")
	f(decision+strings.Replace(decision, `"m"`, `"other"`, 1), `a workload is of one model; say which of these: "m" (1 requests), "other" (1 requests)`)
	f(strings.Replace(decision, "00ff", "00fg", 1), `line 1: the hash "00000000000000fg" is no number`)
	f(strings.Replace(decision, `"every":512`, `"every":0`, 1), "line 1: prompt.every is 0")
	f(`{"model":"m","prompt_tokens":1200,"outcome":{}}`, "line 1: the decision has no hashes")
	f("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n", "")
	f("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n", "")
	f("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808\n", "line 2")
	f("TIMESTAMP,ContextTokens,GeneratedTokens\nnow,4808,1\n", `line 2: "now" is no time`)
	f("TIMESTAMP,ContextTokens,GeneratedTokens\n", "there is no request in it")
	f("", "this is no trace")
	f("hello", "this is no trace")
}

func TestReadAzure(t *testing.T) {
	w, err := Read(publicTrace(t, "azure2023_code.csv"))
	if err != nil {
		t.Fatal(err)
	}
	if n := len(w.Requests); n != 8819 || w.Requests[0].At != 0 || w.Requests[1].At != 52*time.Millisecond {
		t.Errorf("%d requests, the second at %v", n, w.Requests[1].At)
	}
}
