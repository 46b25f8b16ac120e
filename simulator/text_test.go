package simulator

import (
	"encoding/json"
	"testing"
)

func TestGeneratedTextTokenisesBack(t *testing.T) {
	said := map[string]bool{}
	for seed := range uint64(50) {
		v := newVoice(seed, textPrompt("prompt"), 0)
		text := v.text(300)
		list := tokensOf("<|assistant|>\n" + text)
		list = list[countTokens("<|assistant|>\n"):]
		if len(list) != 300 {
			t.Fatalf("seed %d: 300 tokens became %d", seed, len(list))
		}
		for k, token := range list {
			if token != v.word(k).text {
				t.Fatalf("seed %d: token %d is %q, generated %q", seed, k, token, v.word(k).text)
			}
			said[token] = true
			var decoded string
			if err := json.Unmarshal([]byte(`"`+v.word(k).escaped+`"`), &decoded); err != nil || decoded != token {
				t.Fatalf("%q escaped as %q: %v", token, v.word(k).escaped, err)
			}
		}
	}
	for _, w := range words {
		if !said[w.text] {
			t.Errorf("%q is never said", w.text)
		}
	}
	a, b := newVoice(1, textPrompt("p"), 0), newVoice(1, textPrompt("p"), 1)
	if a.text(20) == b.text(20) || a.text(20) == newVoice(2, textPrompt("p"), 0).text(20) || a.text(20) == newVoice(1, textPrompt("q"), 0).text(20) {
		t.Error("another choice, seed or prompt says the same")
	}
}

// TestTokenAllocatesNothing: thousands of streams share two cores with what is
// being tested.
func TestTokenAllocatesNothing(t *testing.T) {
	cfg := Config{}
	if err := cfg.complete(); err != nil {
		t.Fatal(err)
	}
	r, err := parseRequest(&cfg, chat, []byte(`{"messages":[],"max_tokens":1000,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}`))
	if err != nil {
		t.Fatal(err)
	}
	a := newAnswer(&cfg, r, "id", 1)
	buf := a.appendToken(make([]byte, 0, 4096), 0)
	if n := testing.AllocsPerRun(500, func() { buf = a.appendToken(buf[:0], 0) }); n != 0 {
		t.Errorf("%v allocations a token", n)
	}
}
