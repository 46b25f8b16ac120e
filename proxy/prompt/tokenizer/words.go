package tokenizer

import (
	"encoding/binary"
	"hash/maphash"
	"math/bits"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"unsafe"
)

// words holds the ids of words that have been encoded before, by their exact
// text. Any goroutine may use it, without waiting. It holds a fixed number of
// words: a new one takes the place of another whose hash is alike.
//
// Nearly all words are short. They are found without following a pointer to
// their text or ids: most of what looking one up takes is waiting for memory.
type words struct {
	seed [2]uint64
	long maphash.Seed
	// Slots come in pairs: a word is in either of the two of its hash.
	short     [1 << 15]atomic.Pointer[shortWord]
	longSlots [1 << 13]atomic.Pointer[longWordIDs]
}

// shortWord is a word of at most shortText bytes and few ids. It never changes.
type shortWord struct {
	text          packedText
	ids           [shortIDs]uint32
	length, count uint8
}

const (
	shortText = 16
	shortIDs  = 3
)

// packedText is a short text with zeros behind it. Together with its length it
// says what the text is.
type packedText struct{ low, high uint64 }

// longWordIDs is any other word. It never changes.
type longWordIDs struct {
	text string
	ids  []uint32
}

// longestWord is how many bytes a word may have to be kept, so that the cache
// is bounded in bytes as well.
const longestWord = 128

// wordPlace is where a word belongs.
type wordPlace struct{ short, long uint32 }

func newWords() *words {
	return &words{seed: [2]uint64{rand.Uint64(), rand.Uint64()}, long: maphash.MakeSeed()}
}

// pack returns a text of at most shortText bytes.
func pack(text string) (p packedText) {
	b := unsafe.Slice(unsafe.StringData(text), len(text))
	switch n := len(b); {
	case n > 8:
		p.low = binary.LittleEndian.Uint64(b)
		p.high = binary.LittleEndian.Uint64(b[n-8:]) >> (8 * (16 - n))
	case n == 8:
		p.low = binary.LittleEndian.Uint64(b)
	case n >= 4:
		p.low = uint64(binary.LittleEndian.Uint32(b)) | uint64(binary.LittleEndian.Uint32(b[n-4:]))<<(8*(n-4))
	case n > 0:
		p.low = uint64(b[0]) | uint64(b[n/2])<<(8*(n/2)) | uint64(b[n-1])<<(8*(n-1))
	}
	return p
}

// shortSlot is the first of the two slots of a short text.
func (w *words) shortSlot(p packedText, length int) uint32 {
	high, low := bits.Mul64(p.low^w.seed[0], p.high^w.seed[1]^uint64(length)<<56)
	return uint32(high^low) & uint32(len(w.short)-2)
}

// append appends the ids of text when it is there. When it is not, at is where
// put is to put it.
func (w *words) append(dst []uint32, text string) (_ []uint32, at wordPlace, ok bool) {
	if len(text) <= shortText {
		p := pack(text)
		at.short = w.shortSlot(p, len(text))
		for i := at.short; i < at.short+2; i++ {
			if e := w.short[i].Load(); e != nil && e.text == p && int(e.length) == len(text) {
				if e.count == 1 {
					return append(dst, e.ids[0]), at, true
				}
				return append(dst, e.ids[:e.count]...), at, true
			}
		}
	}
	at.long = uint32(maphash.String(w.long, text)) & uint32(len(w.longSlots)-2)
	for i := at.long; i < at.long+2; i++ {
		if e := w.longSlots[i].Load(); e != nil && e.text == text {
			return append(dst, e.ids...), at, true
		}
	}
	return dst, at, false
}

// put notes the ids of text, both copied. The word before it moves over.
func (w *words) put(at wordPlace, text string, ids []uint32) {
	if len(text) <= shortText && len(ids) <= shortIDs {
		e := &shortWord{text: pack(text), length: uint8(len(text)), count: uint8(len(ids))}
		copy(e.ids[:], ids)
		if first := w.short[at.short].Swap(e); first != nil {
			w.short[at.short+1].Store(first)
		}
		return
	}
	e := &longWordIDs{text: strings.Clone(text), ids: append(make([]uint32, 0, len(ids)), ids...)}
	if first := w.longSlots[at.long].Swap(e); first != nil {
		w.longSlots[at.long+1].Store(first)
	}
}
