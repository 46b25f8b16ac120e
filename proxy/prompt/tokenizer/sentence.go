package tokenizer

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// sentence is a byte pair encoding as SentencePiece trains them: its smallest
// tokens are code points, or the bytes of a code point that has no token, and
// the space is ▁, a code point like others. It is built once; any goroutine
// may use it.
type sentence struct {
	merges     merges
	vocabulary *vocabulary
	ascii      [utf8.RuneSelf]uint32 // the token of a code point, or noToken
	fallback   [256]uint32           // the tokens of bytes
	space      uint32                // the token ▁
	// beforeSpace are the code points that some merge has just before a ▁, and
	// afterNewline those that some has just after a newline. Where no merge has
	// two code points side by side, no token spans them, and the text can be
	// cut between them: that makes words.
	beforeSpace, afterNewline map[rune]bool
	words                     *words
}

const (
	noToken   = 1<<32 - 1
	spaceRune = '▁'
	spaceText = "▁"
)

// prepare looks up what sentence needs to know of its vocabulary and merges.
func (m *sentence) prepare() error {
	var ok bool
	if m.space, ok = m.vocabulary.lookup(spaceText); !ok {
		return fmt.Errorf("the vocabulary has no token %q", spaceText)
	}
	isFallback := make(map[uint32]bool, 256)
	for b := range m.fallback {
		text := fmt.Sprintf("<0x%02X>", b)
		if m.fallback[b], ok = m.vocabulary.lookup(text); !ok {
			return fmt.Errorf("the vocabulary has no token %q for a byte", text)
		}
		isFallback[m.fallback[b]] = true
	}
	for b := range m.ascii {
		if m.ascii[b], ok = m.vocabulary.lookup(string(rune(b))); !ok {
			m.ascii[b] = noToken
		}
	}
	// What a token of a byte stands for is not its text: were it merged, the
	// code points beside each other in texts would say nothing.
	for i, key := range m.merges.keys {
		if key != noPair && (isFallback[uint32(key>>32)] || isFallback[uint32(key)] || isFallback[m.merges.results[m.merges.ranks[i]]]) {
			return fmt.Errorf("the merges have a token of a byte in them")
		}
	}
	merged := make(map[uint32]bool, len(m.merges.results))
	for _, id := range m.merges.results {
		merged[id] = true
	}
	m.beforeSpace, m.afterNewline = make(map[rune]bool), make(map[rune]bool)
	for i, id := range m.vocabulary.ids {
		if !merged[id] {
			continue
		}
		last := utf8.RuneError
		for k, r := range string(m.vocabulary.text(i)) {
			if k > 0 && r == spaceRune && last != spaceRune {
				m.beforeSpace[last] = true
			}
			if k > 0 && last == '\n' {
				m.afterNewline[r] = true
			}
			last = r
		}
	}
	return nil
}

// appendText appends the ids of text, in which spaces and ▁ are the same.
// prefix puts a space before it.
func (m *sentence) appendText(dst []uint32, text string, prefix bool) []uint32 {
	for len(text) > 0 {
		end := m.wordEnd(text)
		word := text[:end]
		text = text[end:]
		if prefix || len(word) > longestWord {
			dst = m.appendUnseen(dst, word, prefix)
			prefix = false
			continue
		}
		var at wordPlace
		var ok bool
		if dst, at, ok = m.words.append(dst, word); ok {
			continue
		}
		start := len(dst)
		dst = m.appendUnseen(dst, word, false)
		m.words.put(at, word, dst[start:])
	}
	return dst
}

// wordEnd is the end of the first word of text, which is not empty.
func (m *sentence) wordEnd(text string) int {
	last := rune(spaceRune)
	for i, r := range text {
		if r == ' ' {
			r = spaceRune
		}
		if i > 0 && (r == spaceRune && last != spaceRune && !m.beforeSpace[last] ||
			last == '\n' && r != '\n' && !m.afterNewline[r]) {
			return i
		}
		last = r
	}
	return len(text)
}

// appendUnseen appends the ids of one word without the cache of words.
func (m *sentence) appendUnseen(dst []uint32, word string, prefix bool) []uint32 {
	var small [smallWord]uint32
	symbols := small[:0]
	if prefix {
		symbols = append(symbols, m.space)
	}
	for i := 0; i < len(word); {
		b := word[i]
		if b < utf8.RuneSelf {
			i++
			switch id := m.ascii[b]; {
			case b == ' ':
				symbols = append(symbols, m.space)
			case id != noToken:
				symbols = append(symbols, id)
			default:
				symbols = append(symbols, m.fallback[b])
			}
			continue
		}
		_, n := utf8.DecodeRuneInString(word[i:])
		if id, ok := m.vocabulary.lookup(word[i : i+n]); ok {
			symbols = append(symbols, id)
		} else {
			for _, b := range []byte(word[i : i+n]) {
				symbols = append(symbols, m.fallback[b])
			}
		}
		i += n
	}
	return m.merges.appendMerged(dst, symbols)
}

// startsWithSpace tells whether text, once spaces are ▁, begins with one.
func startsWithSpace(text string) bool {
	return strings.HasPrefix(text, " ") || strings.HasPrefix(text, spaceText)
}
