package tokenizer

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// mergeDumbly is what appendMerged does, by its definition.
func mergeDumbly(m *merges, symbols []uint32) []uint32 {
	symbols = slices.Clone(symbols)
	for {
		at, least := -1, uint32(noRank)
		for i := 0; i+1 < len(symbols); i++ {
			if r := m.rank(symbols[i], symbols[i+1]); r < least {
				at, least = i, r
			}
		}
		if at < 0 {
			return symbols
		}
		symbols = slices.Replace(symbols, at, at+2, m.results[least])
	}
}

// Merges whose ranks are in no order, as those of some models are, over short
// and long words.
func TestMergesAreLowestRankFirst(t *testing.T) {
	r := rand.New(rand.NewPCG(11, 12))
	for range 600 {
		letters := 1 + r.IntN(4)
		texts := []string{}
		of := map[string]uint32{}
		for i := range letters {
			texts = append(texts, string(rune('a'+i)))
			of[texts[i]] = uint32(i)
		}
		type pair struct{ a, b, result uint32 }
		var pairs []pair
		for range r.IntN(40) {
			a, b := r.IntN(len(texts)), r.IntN(len(texts))
			joined := texts[a] + texts[b]
			if _, ok := of[joined]; !ok {
				of[joined] = uint32(len(texts))
				texts = append(texts, joined)
			}
			pairs = append(pairs, pair{uint32(a), uint32(b), of[joined]})
		}
		r.Shuffle(len(pairs), func(i, j int) { pairs[i], pairs[j] = pairs[j], pairs[i] })
		m := newMerges(len(pairs))
		for _, p := range pairs {
			m.add(p.a, p.b, p.result)
		}
		for range 8 {
			word := make([]uint32, 1+r.IntN(200))
			same := r.IntN(2) == 0
			for i := range word {
				if word[i] = uint32(r.IntN(letters)); same {
					word[i] = word[0]
				}
			}
			want := mergeDumbly(&m, word)
			if got := m.appendMerged(nil, slices.Clone(word)); !slices.Equal(got, want) {
				t.Fatalf("%v with %v: got %v, want %v", word, pairs, got, want)
			}
			if len(word) > 1 {
				if got := m.appendLong(nil, slices.Clone(word)); !slices.Equal(got, want) {
					t.Fatalf("%v with %v: long: got %v, want %v", word, pairs, got, want)
				}
			}
		}
	}
}

// The tokens of a rank file are the pairs that give them.
func TestRankedBytes(t *testing.T) {
	ranks := []string{"ab", "bc"}
	for b := range 256 {
		ranks = append(ranks, string([]byte{byte(b)}))
	}
	ranks = append(ranks, "abc", "aaaa", "aa")
	m, err := newRankedBytes(ranks)
	if err != nil {
		t.Fatal(err)
	}
	f := func(piece string, want ...string) {
		t.Helper()
		var got []string
		for _, id := range m.appendPiece(nil, piece) {
			got = append(got, ranks[id])
		}
		if !slices.Equal(got, want) {
			t.Errorf("%q: got %q, want %q", piece, got, want)
		}
	}
	f("a", "a")
	f("abc", "abc")
	f("xbc", "x", "bc")
	f("xabc", "x", "abc")
	f("aaaaa", "aaaa", "a")
	f("aaa", "aa", "a")
	if _, err := newRankedBytes(append(ranks, "ab")); err == nil {
		t.Error("a token that is there twice is no error")
	}
	if _, err := newRankedBytes(ranks[:100]); err == nil {
		t.Error("a byte without a token is no error")
	}
}
