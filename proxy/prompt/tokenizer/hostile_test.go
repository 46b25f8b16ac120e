package tokenizer

import (
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

// hostile are long texts that make a careless tokenizer take the square of
// their length.
func hostile(t testing.TB) map[string]string {
	size := lessUnderRace(t, 4<<20, 4<<16)
	r := rand.New(rand.NewPCG(3, 4))
	fill := func(alphabet string) string {
		b := make([]byte, size)
		for i := range b {
			b[i] = alphabet[r.IntN(len(alphabet))]
		}
		return string(b)
	}
	return map[string]string{
		"one letter":     strings.Repeat("a", size),
		"spaces":         strings.Repeat(" ", size),
		"newlines":       strings.Repeat("\n", size),
		"spaces, letter": strings.Repeat(" ", size) + "x",
		"emoji":          strings.Repeat("😀", size/4),
		"family":         strings.Repeat("👩‍👩‍👧‍👦", size/25),
		"Chinese":        strings.Repeat("你好世界", size/12),
		"marks":          "e" + strings.Repeat("\u0301\u0316", size/4),
		"Hangul parts":   strings.Repeat("\u1100\u1161\u11a8", size/9),
		"one word":       fill("abcdefghijklmnopqrstuvwxyz"),
		"cases":          fill("aA"),
		"digits":         fill("0123456789"),
		"punctuation":    fill("!?.,;:/|-_()[]{}<>#@&*+=~`"),
		"angles":         strings.Repeat("<", size),
		"angles, bars":   strings.Repeat("<|", size/2),
		"quotes":         strings.Repeat("'", size),
		"▁":              strings.Repeat("▁", size/3),
		"added tokens":   strings.Repeat("<|im_start|>", size/12),
		"zeros":          strings.Repeat("\x00", size),
		"half a token":   strings.Repeat("<|im_start", size/10),
		"short lines":    strings.Repeat("x\n", size/2),
		"periodic":       strings.Repeat("abcdefgh", size/8),
		"no UTF-8":       strings.Repeat("\xff\xc3\xe4\xb8", size/4),
	}
}

// What takes the square of a text's length takes hours for these.
func TestHostileTextTakesNoLonger(t *testing.T) {
	texts := hostile(t)
	encode := func(t *testing.T, tok *Tokenizer) {
		for name, text := range texts {
			start := time.Now()
			ids := tok.Append(nil, text, false)
			took := time.Since(start)
			t.Logf("%-16s %8d tokens %6d ms", name, len(ids), took.Milliseconds())
			if took > time.Minute {
				t.Errorf("%s: %d bytes take %v", name, len(text), took)
			}
		}
	}
	for _, name := range []string{"gpt2", "o200k", "deepseek", "gemma", "llama2"} {
		t.Run(name, func(t *testing.T) { encode(t, toyPipelines()[name].load(t)) })
	}
	for _, model := range npmModels {
		t.Run(model, func(t *testing.T) {
			tok, err := loadJSON(tokenizerJSON(t, model), Options{})
			if err != nil {
				t.Fatal(err)
			}
			encode(t, tok)
		})
	}
}

// A chat of many messages, and one of very many.
func TestManyAddedTokensTakeNoLonger(t *testing.T) {
	tok := toyPipelines()["gpt2"].load(t)
	text := strings.Repeat("<|im_start|>user\nhi<|im_end|>\n", 200_000)
	start := time.Now()
	ids := tok.Append(nil, text, false)
	if took := time.Since(start); took > time.Minute {
		t.Errorf("%d tokens take %v", len(ids), took)
	}
}
