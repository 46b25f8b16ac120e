package tokenizer

import (
	"hash/maphash"
	"strings"
	"sync/atomic"
)

// words holds the ids of words that have been encoded before, by their exact
// text. Any goroutine may use it, without waiting. It holds a fixed number of
// words: a new one takes the place of another whose hash is alike.
type words struct {
	seed maphash.Seed
	// slots come in pairs: a word is in either of the two of its hash.
	slots [1 << 15]atomic.Pointer[word]
}

// word is one word of the cache. It never changes.
type word struct {
	text string
	ids  []uint32
}

// longestWord is how many bytes a word may have to be kept, so that the cache
// is bounded in bytes as well.
const longestWord = 128

func newWords() *words { return &words{seed: maphash.MakeSeed()} }

// append appends the ids of text when it is there. When it is not, at is where
// put is to put it.
func (w *words) append(dst []uint32, text string) (_ []uint32, at uint32, ok bool) {
	at = uint32(maphash.String(w.seed, text)) & uint32(len(w.slots)-2)
	for i := at; i < at+2; i++ {
		if e := w.slots[i].Load(); e != nil && e.text == text {
			return append(dst, e.ids...), at, true
		}
	}
	return dst, at, false
}

// put notes the ids of text, both copied. The word before it moves over.
func (w *words) put(at uint32, text string, ids []uint32) {
	e := &word{text: strings.Clone(text), ids: append(make([]uint32, 0, len(ids)), ids...)}
	if first := w.slots[at].Swap(e); first != nil {
		w.slots[at+1].Store(first)
	}
}
