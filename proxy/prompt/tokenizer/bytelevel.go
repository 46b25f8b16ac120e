package tokenizer

import (
	"fmt"
	"math"
)

// byteLevel is a byte pair encoding whose smallest tokens are the 256 bytes.
// It is built once; any goroutine may use it.
type byteLevel struct {
	merges merges
	bytes  [256]uint32
	// vocabulary holds texts as they are in a prompt, not in the library's
	// alphabet for bytes.
	vocabulary *vocabulary
	// whole takes a piece that is a token as that token, whatever its merges
	// would give.
	whole bool
	words *words
}

// newRankedBytes returns the encoding of a rank file, as tiktoken reads them:
// ranks[i] are the bytes of the token of rank and id i, and two adjacent tokens
// are merged in the order of the rank of what they become.
func newRankedBytes(ranks []string) (*byteLevel, error) {
	size := 0
	for _, text := range ranks {
		size += len(text)
	}
	if int64(len(ranks)) > math.MaxInt32 || size > math.MaxInt32 {
		return nil, fmt.Errorf("%d tokens of %d bytes are too many", len(ranks), size)
	}
	m := &byteLevel{vocabulary: newVocabulary(len(ranks), size), whole: true, words: newWords()}
	for i, text := range ranks {
		if !m.vocabulary.add([]byte(text), uint32(i)) {
			return nil, fmt.Errorf("tokens of ranks before %d and %d are both %q", i, i, text)
		}
	}
	if err := m.findBytes(); err != nil {
		return nil, err
	}
	// All ways to split a token in two others are merges of that token's rank.
	// Among them any order will do: two adjacent pairs that become the same
	// token are told apart by their place only when they are the same pair, or
	// else overlap nothing of the other.
	var pairs [][3]uint32
	for i, text := range ranks {
		for k := 1; k < len(text); k++ {
			a, ok := m.vocabulary.lookup(text[:k])
			if !ok {
				continue
			}
			if b, ok := m.vocabulary.lookup(text[k:]); ok {
				pairs = append(pairs, [3]uint32{a, b, uint32(i)})
			}
		}
	}
	m.merges = newMerges(len(pairs))
	m.merges.results = make([]uint32, len(ranks))
	for i := range m.merges.results {
		m.merges.results[i] = uint32(i)
	}
	for _, p := range pairs {
		m.merges.set(p[0], p[1], p[2])
	}
	return m, nil
}

// findBytes looks the 256 bytes up.
func (m *byteLevel) findBytes() error {
	for b := range m.bytes {
		id, ok := m.vocabulary.lookup(string([]byte{byte(b)}))
		if !ok {
			return fmt.Errorf("the vocabulary has no token for the byte 0x%02x", b)
		}
		m.bytes[b] = id
	}
	return nil
}

// appendPiece appends the ids of one piece of the pre-tokenizer.
func (m *byteLevel) appendPiece(dst []uint32, piece string) []uint32 {
	if len(piece) == 1 {
		// With no merge, and with whole as well, it is the byte's own token.
		return append(dst, m.bytes[piece[0]])
	}
	if len(piece) > longestWord {
		return m.appendUnseen(dst, piece)
	}
	dst, at, ok := m.words.append(dst, piece)
	if ok {
		return dst
	}
	start := len(dst)
	dst = m.appendUnseen(dst, piece)
	m.words.put(at, piece, dst[start:])
	return dst
}

// appendUnseen is appendPiece without the cache of words.
func (m *byteLevel) appendUnseen(dst []uint32, piece string) []uint32 {
	if m.whole {
		if id, ok := m.vocabulary.lookup(piece); ok {
			return append(dst, id)
		}
	}
	var small [longestWord]uint32
	symbols := small[:0]
	if len(piece) > len(small) {
		symbols = make([]uint32, 0, len(piece))
	}
	for i := range len(piece) {
		symbols = append(symbols, m.bytes[piece[i]])
	}
	return m.merges.appendMerged(dst, symbols)
}

// byteOfRune is the byte that a letter of the library's alphabet for bytes
// stands for, less one; 0 is no letter of it. Printable bytes stand for
// themselves, the others are counted from U+0100 on.
var byteOfRune = func() (of [0x180]uint16) {
	others := 0x100
	for b := range 0x100 {
		if b >= '!' && b <= '~' || b >= 0xa1 && b <= 0xac || b >= 0xae {
			of[b] = uint16(b) + 1
		} else {
			of[others] = uint16(b) + 1
			others++
		}
	}
	return of
}()

// fromByteAlphabet appends the bytes that the letters of text stand for. It
// fails when one stands for none.
func fromByteAlphabet[Text string | []byte](dst []byte, text Text) (_ []byte, ok bool) {
	for _, r := range string(text) {
		if int(r) >= len(byteOfRune) || byteOfRune[r] == 0 {
			return dst, false
		}
		dst = append(dst, byte(byteOfRune[r]-1))
	}
	return dst, true
}
