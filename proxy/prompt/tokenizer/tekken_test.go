package tokenizer

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

const tekkenPattern = `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`

// tekkenOf makes a tekken.json of tokens behind the 256 bytes, and of changes
// to it.
func tekkenOf(t *testing.T, tokens []string, change func(file map[string]any)) []byte {
	t.Helper()
	var vocab []map[string]any
	for i := range 256 {
		vocab = append(vocab, map[string]any{"rank": i, "token_bytes": []byte{byte(i)}})
	}
	for i, token := range tokens {
		vocab = append(vocab, map[string]any{"rank": 256 + i, "token_bytes": []byte(token)})
	}
	file := map[string]any{
		"vocab": vocab,
		"config": map[string]any{"pattern": tekkenPattern, "default_vocab_size": 100 + len(vocab),
			"default_num_special_tokens": 100, "version": "v3"},
	}
	if change != nil {
		change(file)
	}
	data, err := json.Marshal(file)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestTekkenFindsNoSpecialTokensInText(t *testing.T) {
	p, err := loadTekken(tekkenOf(t, []string{"he", "ll", "hell", "hello", " w"}, nil))
	if err != nil {
		t.Fatal(err)
	}
	tok := newTokenizer(p, "tekken", Options{Cache: NewCache(1 << 20)})
	f := func(text string, special bool, want ...uint32) {
		t.Helper()
		for range 2 {
			if got := tok.Append(nil, text, special); !slices.Equal(got, want) {
				t.Errorf("%q: got %v, want %v", text, got, want)
			}
		}
	}
	f("", false)
	f("", true, 1)
	f("hello", false, 100+259)
	f("hell", true, 1, 100+258)
	f("hello w", false, 100+259, 100+260)
	f("<s>", true, 1, 100+'<', 100+'s', 100+'>')
	f("é", false, 100+0xc3, 100+0xa9)

	g := func(token string, want uint32, there bool) {
		t.Helper()
		if id, ok := tok.Token(token); ok != there || ok && id != want {
			t.Errorf("%q: got %d, %v, want %d, %v", token, id, ok, want, there)
		}
	}
	g("[INST]", 3, true)
	g("<SPECIAL_20>", 20, true)
	g("<SPECIAL_99>", 99, true)
	g("<SPECIAL_100>", 0, false)
	g("hello", 100+259, true)
	g("hellos", 0, false)
	if info, ok := tok.Tekken(); !ok || info.Version != 3 {
		t.Errorf("got %+v, %v", info, ok)
	}
}

// dumbTekken merges a piece as tiktoken describes it: the whole piece if it is
// a token, or else the pair whose bytes have the lowest rank, the leftmost of
// equals, until there is none.
func dumbTekken(ranks map[string]uint32, piece string) (ids []uint32) {
	if rank, ok := ranks[piece]; ok {
		return []uint32{rank}
	}
	parts := strings.Split(piece, "")
	for {
		at, least := -1, uint32(math.MaxUint32)
		for i := range parts[1:] {
			if rank, ok := ranks[parts[i]+parts[i+1]]; ok && rank < least {
				at, least = i, rank
			}
		}
		if at < 0 {
			break
		}
		parts = slices.Replace(parts, at, at+2, parts[at]+parts[at+1])
	}
	for _, part := range parts {
		ids = append(ids, ranks[part])
	}
	return ids
}

// Vocabularies at random hold tokens that no merge makes, and tokens that
// several pairs make.
func TestTekkenMergesAsTiktoken(t *testing.T) {
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 1))
		word := func(most int) string {
			b := make([]byte, 1+r.IntN(most))
			for i := range b {
				b[i] = "abc"[r.IntN(3)]
			}
			return string(b)
		}
		ranks := map[string]uint32{}
		for i := range 256 {
			ranks[string([]byte{byte(i)})] = uint32(i)
		}
		var tokens []string
		for range 4 + r.IntN(40) {
			token := word(2 + r.IntN(5))
			if _, ok := ranks[token]; !ok {
				ranks[token] = uint32(256 + len(tokens))
				tokens = append(tokens, token)
			}
		}
		p, err := loadTekken(tekkenOf(t, tokens, nil))
		if err != nil {
			t.Fatal(err)
		}
		for range 60 {
			text := word(1 + r.IntN(200))
			want := dumbTekken(ranks, text)
			for i := range want {
				want[i] += 100
			}
			if got := p.appendIDs(nil, text, false, nil); !slices.Equal(got, want) {
				t.Fatalf("seed %d: %q with %q: got %v, want %v", seed, text, tokens, got, want)
			}
		}
	}
}

func TestLoadTekkenSaysWhatItDoesNotTake(t *testing.T) {
	f := func(want string, change func(file map[string]any)) {
		t.Helper()
		_, err := loadTekken(tekkenOf(t, []string{"ab"}, change))
		if err == nil && want != "" || err != nil && (want == "" || !strings.Contains(err.Error(), want)) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	config := func(key string, value any) func(map[string]any) {
		return func(file map[string]any) { file["config"].(map[string]any)[key] = value }
	}
	both := func(changes ...func(map[string]any)) func(map[string]any) {
		return func(file map[string]any) {
			for _, change := range changes {
				change(file)
			}
		}
	}
	special := func(tokens ...string) func(map[string]any) {
		return func(file map[string]any) {
			list := []map[string]any{}
			for i, token := range tokens {
				list = append(list, map[string]any{"rank": i, "token_str": token, "is_control": true})
			}
			file["special_tokens"] = list
		}
	}
	settings := func(values []string, fallback any) func(map[string]any) {
		return func(file map[string]any) {
			file["model_settings_builder"] = map[string]any{"reasoning_effort": map[string]any{"values": values, "default": fallback}}
		}
	}
	f("", nil)
	f("", config("default_vocab_size", 356)) // cuts the vocabulary
	f("", both(config("version", "v11"), special("<s>", "</s>")))
	f("", both(config("version", "v15"), special("<s>"), settings([]string{"none", "high"}, "none")))
	f("unknown version", config("version", "v4"))
	f("unknown version", config("version", "3"))
	f("unknown pattern", config("pattern", `\w+`))
	f("no special_tokens", config("version", "v11"))
	f("no special token <s>", special("</s>"))
	f("twice", special("<s>", "<s>"))
	f("special_tokens of", config("default_num_special_tokens", -1))
	f("special_tokens of", both(config("default_num_special_tokens", 1), special("<s>", "</s>")))
	f("does not fit", config("default_vocab_size", 358))
	f("does not fit", config("default_vocab_size", 300))
	f("has rank 3", func(file map[string]any) { file["vocab"].([]map[string]any)[256]["rank"] = 3 })
	f("not that byte", func(file map[string]any) { file["vocab"].([]map[string]any)[7]["token_bytes"] = []byte{8} })
	f("both", func(file map[string]any) { file["vocab"].([]map[string]any)[256]["token_bytes"] = []byte{8} })
	f("model_settings_builder in version", settings([]string{"none"}, "none"))
	f("is none of its values", both(config("version", "v15"), special("<s>"), settings([]string{"none"}, "low")))
	for _, data := range []string{"", "[]", `{"vocab":1}`, `{"config":{"version":"v3"}}`} {
		if p, err := loadTekken([]byte(data)); err == nil {
			t.Errorf("%q is taken: %v", data, fmt.Sprint(p))
		}
	}
}
