package tokenizer

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// TestWordsAgainstMap: what the cache of words answers is what was put for
// exactly that text, whatever has been put since; and short words that were put
// just now are there.
func TestWordsAgainstMap(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 9))
	w := newWords()
	model := map[string][]uint32{}
	var texts []string
	hits := 0
	for range 200_000 {
		var text string
		if len(texts) > 0 && r.IntN(3) > 0 {
			text = texts[r.IntN(len(texts))]
		} else {
			b := make([]byte, 1+r.IntN(20))
			for i := range b {
				b[i] = []byte{0, 'a', 'b', 0xff}[r.IntN(4)] // zeros at the end are part of a text
			}
			text = string(b)
		}
		dst := []uint32{7}
		dst, at, ok := w.append(dst, text)
		switch want, known := model[text]; {
		case ok && (!known || !slices.Equal(dst[1:], want)):
			t.Fatalf("%q: %v, want %v, %v", text, dst, want, known)
		case !ok && len(dst) != 1:
			t.Fatalf("%q is not known, but has ids %v", text, dst)
		case ok:
			hits++
		default:
			ids := want
			if !known {
				ids = make([]uint32, 1+r.IntN(5))
				for i := range ids {
					ids[i] = r.Uint32()
				}
				model[text] = ids
				texts = append(texts, text)
			}
			w.put(at, text, ids)
			if dst, _, ok := w.append(nil, text); !ok || !slices.Equal(dst, ids) {
				t.Fatalf("%q was put as %v and is %v, %v", text, ids, dst, ok)
			}
		}
	}
	if hits < 50_000 {
		t.Errorf("only %d hits", hits)
	}
}

// TestPackIsOneToOne: no two short texts are packed alike.
func TestPackIsOneToOne(t *testing.T) {
	r := rand.New(rand.NewPCG(4, 4))
	type packed struct {
		p      packedText
		length int
	}
	seen := map[packed]string{}
	for range 100_000 {
		b := make([]byte, r.IntN(shortText+1))
		for i := range b {
			b[i] = byte(r.IntN(3) * 127)
		}
		key := packed{pack(string(b)), len(b)}
		if other, ok := seen[key]; ok && other != string(b) {
			t.Fatalf("%q and %q", b, other)
		}
		seen[key] = string(b)
		for i := range b { // and each byte is where it belongs
			word := key.p.low
			if i >= 8 {
				word = key.p.high
			}
			if byte(word>>(8*(i%8))) != b[i] {
				t.Fatalf("%q: byte %d", b, i)
			}
		}
	}
}
