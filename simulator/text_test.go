package simulator

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

func tokens(text string) (list []string) {
	for text != "" {
		n := nextToken(text)
		list = append(list, text[:n])
		text = text[n:]
	}
	return list
}

func TestTokens(t *testing.T) {
	f := func(text string, want ...string) {
		t.Helper()
		if got := tokens(text); !slices.Equal(got, want) {
			t.Errorf("%q: got %q, want %q", text, got, want)
		}
		if n := countTokens(text); n != len(want) {
			t.Errorf("%q: counted %d, want %d", text, n, len(want))
		}
	}
	f("")
	f("a", "a")
	f("hello world", "hello ", "world")
	f("internationalisation", "intern", "ationa", "lisati", "on")
	f("one,two", "one,", "two")
	f("\n\n", "\n", "\n")
	f("größer", "größer")
	f("日本語の文字列です", "日本語の文字", "列です")
	f("a\xff\xfeb c", "a\xff\xfeb ", "c")
}

// FuzzTokens: tokens are the text, and appending leaves all tokens but the
// last as they are.
func FuzzTokens(f *testing.F) {
	f.Add("the quick, brown", " fox")
	f.Add("größe", "日本\xff")
	f.Add("", "x")
	f.Fuzz(func(t *testing.T, left, right string) {
		whole := tokens(left + right)
		if strings.Join(whole, "") != left+right {
			t.Fatalf("%q became %q", left+right, whole)
		}
		// A boundary in the middle of a rune is not one of the text's.
		if !utf8.ValidString(left) {
			return
		}
		part := tokens(left)
		if n := len(part) - 1; n > 0 && !slices.Equal(part[:n], whole[:n]) {
			t.Fatalf("%q: %q, followed by %q: %q", left, part, right, whole)
		}
	})
}

func TestGeneratedTextTokenisesBack(t *testing.T) {
	said := map[string]bool{}
	for seed := range uint64(50) {
		v := newVoice(seed, textPrompt("prompt"), 0)
		text := v.text(300)
		list := tokens("<|assistant|>\n" + text)
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
