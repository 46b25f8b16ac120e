package tokenizer

import "unicode/utf8"

// Sim returns the tokenizer of the simulated engine, "builtin:sim". A
// boundary depends only on the text to its left, so a text that goes on leaves
// all tokens but the last as they are, and what was generated has the same
// tokens when it comes back in a prompt. It has no added tokens and adds
// nothing to a sequence.
func Sim() *Tokenizer {
	return &Tokenizer{pipeline: sim{}, kind: "that of the simulated engine"}
}

// sim is Sim's pipeline. Cutting and hashing a text costs about what asking a
// cache for it does, so it asks none.
type sim struct{}

func (sim) appendIDs(dst []uint32, text string, special bool, cached *chunks) []uint32 {
	for text != "" {
		n, id := NextSim(text)
		dst = append(dst, id)
		text = text[n:]
	}
	return dst
}

func (sim) token(text string) (uint32, bool) {
	if text == "" {
		return 0, false
	}
	n, id := NextSim(text)
	return id, n == len(text)
}

func (sim) close() {}

// SimVocabulary is the number of Sim's token ids, a round figure of the size
// that real models have.
const SimVocabulary = 128000

// longestSim is the most runes that one of Sim's tokens has.
const longestSim = 6

// NextSim returns the length in bytes and the id of the first of Sim's tokens
// in text, which must not be empty. A token ends after a space, a control
// character or a punctuation mark of ASCII, and after longestSim runes.
// Different tokens may share an id.
func NextSim(text string) (n int, id uint32) {
	for range longestSim {
		c := text[n]
		if c < utf8.RuneSelf {
			n++
			letter := c|0x20 >= 'a' && c|0x20 <= 'z'
			digit := c >= '0' && c <= '9'
			if !letter && !digit {
				break
			}
		} else {
			_, size := utf8.DecodeRuneInString(text[n:])
			n += size
		}
		if n == len(text) {
			break
		}
	}
	// FNV-1a.
	h := uint64(14695981039346656037)
	for i := range n {
		h = (h ^ uint64(text[i])) * 1099511628211
	}
	return n, uint32(h % SimVocabulary)
}
