package tokenizer

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// longText is random text of about so many bytes: lines, words and what is
// hostile to them.
func longText(r *rand.Rand, size int) string {
	var b strings.Builder
	odd := randomTexts(r, 20)
	for b.Len() < size {
		switch r.IntN(6) {
		case 0:
			b.WriteString(odd[r.IntN(len(odd))])
		case 1:
			b.WriteString([]string{"\n", "\n\n", " \n", "\n ", "\r\n", "\n\t", "<|im_end|>\n", "\n1", "\n你", "\n\u0301", "\n<s>", "a \n\nb", "\n▁x", "x\n가"}[r.IntN(14)])
		default:
			for range r.IntN(30) {
				b.WriteString([]string{"the ", "quick", " brown", " fox", " doesn't", " 12", "There ", "theory", "x y", "."}[r.IntN(10)])
			}
		}
	}
	return b.String()
}

// Text that is encoded chunk by chunk has the ids that it has as a whole, and
// text that goes on has the same chunks.
func TestChunksAgreeWithWhole(t *testing.T) {
	for name, y := range toyPipelines() {
		t.Run(name, func(t *testing.T) {
			tok := y.load(t)
			n := tok.pipeline.(*native)
			r := rand.New(rand.NewPCG(13, 14))
			cut := 0
			for range 15 {
				text := longText(r, 2000+r.IntN(30_000))
				cached := &chunks{cache: NewCache(1 << 20), of: 1}
				want := n.appendIDs(nil, text, true, nil)
				for range 2 {
					if got := n.appendIDs(nil, text, true, cached); !slices.Equal(got, want) {
						t.Fatalf("%q: with chunks the ids are others", text)
					}
				}
				first := n.cut(text)
				if first == len(text) {
					continue
				}
				cut++
				// Two code points more than the chunk are enough to cut it.
				more := first
				for range 2 {
					_, size := utf8.DecodeRuneInString(text[more:])
					more += size
				}
				if more < len(text) {
					if again := n.cut(text[:more]); again != first && again != more {
						t.Fatalf("%q ends at %d, and alone at %d", text[:more], first, again)
					}
				}
			}
			if cut == 0 && !y.across {
				t.Error("no text has been cut")
			}
		})
	}
}

// Wherever text may be cut, the ids of both sides are those of the whole.
func TestCutsAreExact(t *testing.T) {
	for name, y := range toyPipelines() {
		t.Run(name, func(t *testing.T) {
			y.merges = 400
			n := y.load(t).pipeline.(*native)
			r := rand.New(rand.NewPCG(15, 16))
			cuts := 0
			check := func(text string, i int) {
				cuts++
				normal := false
				got := n.appendText(nil, text[:i], true, normal)
				got = n.appendText(got, text[i:], false, normal)
				if want := n.appendText(nil, text, true, normal); !slices.Equal(got, want) {
					t.Fatalf("cut between %q and %q: got %v, want %v", text[:i], text[i:], got, want)
				}
			}
			for range 600 {
				text := longText(r, 60)
				for i := 1; i < len(text); i++ {
					switch {
					case text[i-1] == '\n' && n.cutsAfterNewline(text, i), text[i] == ' ' && n.cutsBeforeSpace(text, i):
						check(text, i)
					}
				}
			}
			if cuts < 100 && !y.across {
				t.Errorf("only %d cuts", cuts)
			}
		})
	}
}

// What has been seen is encoded without allocating.
func TestAppendAlloc(t *testing.T) {
	withoutRace(t)
	for name, y := range toyPipelines() {
		t.Run(name, func(t *testing.T) {
			if y.across {
				return // its words are as long as its tokens make them
			}
			tok := y.load(t)
			text := strings.Repeat("The quick brown fox, it doesn't care 12.\n", 20) + "<|im_end|>"
			if n := tok.pipeline.(*native); n.normalizer == spacesReplacedAndPrefixed || n.prefix != noPrefix {
				text = " " + text
			}
			ids := tok.Append(nil, text, true)
			if got := testing.AllocsPerRun(50, func() { ids = tok.Append(ids[:0], text, true) }); got > 0 {
				t.Errorf("%v allocations", got)
			}
		})
	}
}

func TestToken(t *testing.T) {
	f := func(tok *Tokenizer, text string, want bool) {
		t.Helper()
		id, ok := tok.Token(text)
		if ok != want {
			t.Errorf("%q: got %v", text, ok)
		}
		if ids := tok.Append(nil, strings.NewReplacer("Ġ", " ").Replace(text), false); ok && !slices.Equal(ids, []uint32{id}) {
			t.Errorf("%q is %d, and encoded %v", text, id, ids)
		}
	}
	bytes := toyPipelines()["gpt2"].load(t)
	f(bytes, "<|im_start|>", true)
	f(bytes, "Ġthe", true)
	f(bytes, "a", true)
	f(bytes, " the", false)
	f(bytes, "no such token", false)
	points := toyPipelines()["gemma"].load(t)
	f(points, "<|im_end|>", true)
	f(points, "▁the", true)
	f(points, "no such token", false)
}

// Any goroutine may encode: the race detector looks on.
func TestTokenizerConcurrently(t *testing.T) {
	tok := toyPipelines()["gpt2"].load(t)
	r := rand.New(rand.NewPCG(17, 18))
	texts := randomTexts(r, 200)
	var want [][]uint32
	for _, text := range texts {
		want = append(want, tok.Append(nil, text, false))
	}
	done := make(chan int)
	for range 4 {
		go func() {
			bad := 0
			for i, text := range texts {
				if !slices.Equal(tok.Append(nil, text, false), want[i]) {
					bad++
				}
			}
			done <- bad
		}()
	}
	for range 4 {
		if bad := <-done; bad > 0 {
			t.Errorf("%d texts have other ids", bad)
		}
	}
}

// No text makes any pipeline panic, or depend on its chunks or its caches.
func FuzzAppend(f *testing.F) {
	for _, text := range []string{"", "Hello, world", "\xff\xc3", "▁ ▁\n\nx", "<|im_start|>user\nhi<|im_end|>", "e\u0301\u0316'ſ", toyText} {
		f.Add(text, uint8(3))
	}
	var tokenizers []*native
	for _, y := range toyPipelines() {
		tokenizers = append(tokenizers, y.load(f).pipeline.(*native))
	}
	f.Fuzz(func(t *testing.T, text string, repeat uint8) {
		text = strings.Repeat(text, 1+int(repeat))
		for _, n := range tokenizers {
			want := n.appendIDs(nil, text, true, nil)
			if !utf8.ValidString(text) {
				continue // to be encoded, it need not be the same in parts
			}
			if got := n.appendIDs(nil, text, true, &chunks{cache: NewCache(1 << 20)}); !slices.Equal(got, want) {
				t.Errorf("%q: with chunks the ids are others", text)
			}
		}
	})
}
