package tokenizer

import (
	"hash/maphash"
	"math/bits"
	"unsafe"
)

// vocabulary finds a token's id by its text. It is built once and then read
// from any goroutine. Texts lie in one piece of memory, and a lookup allocates
// nothing.
type vocabulary struct {
	seed  maphash.Seed
	texts []byte
	// ends[i] is where the text of the i-th token ends, ids[i] is its id.
	ends, ids []uint32
	// slots are indexes of tokens plus one, by the hash of their text.
	slots []uint32
}

// newVocabulary returns one with room for n tokens whose texts take so many
// bytes. It grows beyond both.
func newVocabulary(n, bytes int) *vocabulary {
	v := &vocabulary{seed: maphash.MakeSeed(), texts: make([]byte, 0, bytes), ends: make([]uint32, 0, n), ids: make([]uint32, 0, n)}
	v.slots = make([]uint32, 1<<max(4, bits.Len(uint(2*n))))
	return v
}

func (v *vocabulary) len() int { return len(v.ids) }

func (v *vocabulary) text(i int) []byte {
	start := uint32(0)
	if i > 0 {
		start = v.ends[i-1]
	}
	return v.texts[start:v.ends[i]]
}

// slot is where text is, or the empty slot where it belongs.
func (v *vocabulary) slot(text string) uint64 {
	mask := uint64(len(v.slots) - 1)
	for i := maphash.String(v.seed, text) & mask; ; i = (i + 1) & mask {
		if n := v.slots[i]; n == 0 || string(v.text(int(n-1))) == text {
			return i
		}
	}
}

// add adds a token. One of the same text is replaced: added is false then.
func (v *vocabulary) add(text []byte, id uint32) (added bool) {
	if 2*(len(v.ids)+1) > len(v.slots) {
		v.grow()
	}
	i := v.slot(view(text))
	if n := v.slots[i]; n != 0 {
		v.ids[n-1] = id
		return false
	}
	v.texts = append(v.texts, text...)
	v.ends = append(v.ends, uint32(len(v.texts)))
	v.ids = append(v.ids, id)
	v.slots[i] = uint32(len(v.ids))
	return true
}

func (v *vocabulary) grow() {
	v.slots = make([]uint32, 2*len(v.slots))
	mask := uint64(len(v.slots) - 1)
	for n := range v.ids {
		i := maphash.Bytes(v.seed, v.text(n)) & mask
		for v.slots[i] != 0 {
			i = (i + 1) & mask
		}
		v.slots[i] = uint32(n + 1)
	}
}

// lookup returns the id of the token that is text.
func (v *vocabulary) lookup(text string) (id uint32, ok bool) {
	n := v.slots[v.slot(text)]
	if n == 0 {
		return 0, false
	}
	return v.ids[n-1], true
}

func (v *vocabulary) lookupBytes(text []byte) (id uint32, ok bool) { return v.lookup(view(text)) }

// view is text as a string while nobody changes it.
func view(text []byte) string { return unsafe.String(unsafe.SliceData(text), len(text)) }
