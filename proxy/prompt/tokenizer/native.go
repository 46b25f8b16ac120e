package tokenizer

import (
	"strings"
	"unicode/utf8"
)

// native is a pipeline of a tokenizer.json that is followed here: added tokens,
// normalizer, pre-tokenizer, byte pair encoding, post-processor. It is built by
// Load; any goroutine may use it.
type native struct {
	// separate are the added tokens that are found before the text is
	// normalized, within those that are only spaces and newlines, which lie in
	// the text and do not separate parts of it that are worth keeping apart.
	// Tokens of one contain no byte of the other's. normalized are those that
	// are found in normalized text.
	separate, within, normalized addedTokens
	// before and after are what the post-processor adds.
	before, after []uint32

	normalizer normalizer
	prefix     prefix
	// One of the two is there.
	bytes    *byteLevel
	sentence *sentence
	// pieces belong to bytes.
	pieces pieces
	// cuts is whether text may be cut after newlines and before spaces.
	cuts bool
	// ids are those of added tokens by their text.
	ids map[string]uint32
}

type normalizer uint8

const (
	asIs normalizer = iota
	composed
	spacesReplaced // by ▁, which sentence does itself
	spacesReplacedAndPrefixed
)

// prefix says which parts of the text the pre-tokenizer puts a ▁ before,
// unless there is a space already.
type prefix uint8

const (
	noPrefix prefix = iota
	firstPrefix
	everyPrefix
)

func (n *native) close() {}

func (n *native) token(text string) (uint32, bool) {
	if id, ok := n.ids[text]; ok {
		return id, true
	}
	if n.sentence != nil {
		return n.sentence.vocabulary.lookup(text)
	}
	if raw, ok := fromByteAlphabet(nil, text); ok {
		return n.bytes.vocabulary.lookup(string(raw))
	}
	return 0, false
}

func (n *native) appendIDs(dst []uint32, text string, special bool, cached *chunks) []uint32 {
	if special {
		dst = append(dst, n.before...)
	}
	from := 0
	for search := n.separate.search(text); ; {
		token, start, end := search.find()
		if from < start {
			dst = n.appendPart(dst, text[from:start], from == 0, cached)
		}
		if token == nil {
			break
		}
		dst = append(dst, token.id)
		from = end
	}
	if special {
		dst = append(dst, n.after...)
	}
	return dst
}

// appendPlain appends the ids of a text in which nothing is an added token. It
// cannot where added tokens are found in parts of the text later on.
func (n *native) appendPlain(dst []uint32, text string, cached *chunks) (_ []uint32, ok bool) {
	if len(n.normalized.tokens) > 0 || len(n.within.tokens) > 0 {
		return dst, false
	}
	return n.appendChunks(dst, text, true, false, cached), true
}

// appendPart appends the ids of the text between two separate added tokens.
// first says that none was before it.
func (n *native) appendPart(dst []uint32, text string, first bool, cached *chunks) []uint32 {
	if len(n.normalized.tokens) == 0 {
		return n.appendChunks(dst, text, first, false, cached)
	}
	text = n.normalize(text)
	from := 0
	for search := n.normalized.search(text); ; {
		token, start, end := search.find()
		if from < start {
			dst = n.appendChunks(dst, text[from:start], first && from == 0, true, cached)
		}
		if token == nil {
			return dst
		}
		dst = append(dst, token.id)
		from = end
	}
}

func (n *native) normalize(text string) string {
	switch n.normalizer {
	case composed:
		return nfc(text)
	case spacesReplaced:
		return strings.ReplaceAll(text, " ", spaceText)
	case spacesReplacedAndPrefixed:
		return spaceText + strings.ReplaceAll(text, " ", spaceText)
	}
	return text
}

// Texts shorter than leastChunk are not asked the cache for: the words in them
// are. Longer ones are cut where the ids on both sides do not depend on each
// other, as soon as a chunk has shortChunk bytes when it ends a line, and as
// soon as it has longChunk bytes when it ends a word.
const (
	leastChunk = 64
	shortChunk = 1 << 10
	longChunk  = 4 << 10
)

// appendChunks appends the ids of a text without separate added tokens, chunk
// by chunk. normal says that it is normalized.
func (n *native) appendChunks(dst []uint32, text string, first, normal bool, cached *chunks) []uint32 {
	prefix := n.prefix == everyPrefix || n.prefix == firstPrefix && first
	if prefix && startsWithSpace(text) {
		prefix = false
	}
	if n.normalizer == spacesReplacedAndPrefixed && !normal {
		prefix = true
	}
	if cached == nil {
		return n.appendText(dst, text, prefix, normal)
	}
	for len(text) > 0 {
		end := n.cut(text)
		dst = n.appendChunk(dst, text[:end], prefix, normal, cached)
		text = text[end:]
		prefix = false
	}
	return dst
}

func (n *native) appendChunk(dst []uint32, text string, prefix, normal bool, cached *chunks) []uint32 {
	if len(text) < leastChunk {
		return n.appendText(dst, text, prefix, normal)
	}
	variant := uint8(0)
	if prefix {
		variant = 1
	}
	dst, ok := cached.append(dst, text, variant)
	if ok {
		return dst
	}
	start := len(dst)
	dst = n.appendText(dst, text, prefix, normal)
	cached.put(text, variant, dst[start:])
	return dst
}

// cut is where the first chunk of text ends. Whether it ends there depends only
// on the chunk and on the two code points after it, so that a text that goes on
// has the same chunks. The cuts are exact, because
//
//   - no added token lies on both sides: those of separate and normalized have
//     been taken out, and those of within have no letter and no number in them;
//   - no code point composes with a newline, or with a space after it;
//   - a pre-tokenizer ends a piece there, and looks no further. For after a
//     newline and before a letter or number: the runs that take newlines take no
//     letter or number, what takes one code point before letters takes no
//     newline, and a run of spaces that ends with a newline is one piece up to
//     it whatever follows, but for GPT-2's rule: there a single newline is one
//     piece. For between an ASCII letter and a space with an ASCII letter after
//     it: no rule takes a space after letters, and none looks at what follows
//     them;
//   - of a sentence's merges none has the code points on both sides of the cut
//     beside each other.
func (n *native) cut(text string) int {
	if !n.cuts {
		return len(text)
	}
	for i := shortChunk; i < len(text); {
		k := strings.IndexByte(text[i:min(len(text), longChunk)], '\n')
		if k < 0 {
			break
		}
		i += k + 1
		if n.cutsAfterNewline(text, i) {
			return i
		}
	}
	for i := longChunk; i < len(text); i++ {
		switch text[i] {
		case '\n':
			if n.cutsAfterNewline(text, i+1) {
				return i + 1
			}
		case ' ':
			if n.cutsBeforeSpace(text, i) {
				return i
			}
		}
	}
	return len(text)
}

// cutsBeforeSpace tells whether text may be cut at i, which is before a space
// and not at the beginning.
func (n *native) cutsBeforeSpace(text string, i int) bool {
	return isASCIILetter(text[i-1]) && i+1 < len(text) && isASCIILetter(text[i+1]) &&
		(n.sentence == nil || !n.sentence.beforeSpace[rune(text[i-1])])
}

func isASCIILetter(b byte) bool { return b|0x20 >= 'a' && b|0x20 <= 'z' }

// cutsAfterNewline tells whether text may be cut at i, which is after a
// newline.
func (n *native) cutsAfterNewline(text string, i int) bool {
	c, size := classAt(text, i)
	if size == 0 || c&(classLetter|classNumber) == 0 {
		return false
	}
	if n.sentence != nil {
		r, _ := utf8.DecodeRuneInString(text[i:])
		return !n.sentence.afterNewline[r]
	}
	if n.pieces.rule == gpt2Words {
		r, _ := utf8.DecodeLastRuneInString(text[:i-1])
		return classOf(r)&classSpace == 0
	}
	return true
}

// appendText appends the ids of a text with no added tokens in it but those of
// within.
func (n *native) appendText(dst []uint32, text string, prefix, normal bool) []uint32 {
	if len(n.within.tokens) == 0 {
		return n.appendModel(dst, text, prefix, normal)
	}
	from := 0
	for search := n.within.search(text); ; {
		token, start, end := search.find()
		if from < start {
			dst = n.appendModel(dst, text[from:start], prefix, normal)
		}
		if token == nil {
			return dst
		}
		dst = append(dst, token.id)
		from = end
	}
}

// appendModel appends the ids of a text with no added tokens in it.
func (n *native) appendModel(dst []uint32, text string, prefix, normal bool) []uint32 {
	if n.sentence != nil {
		return n.sentence.appendText(dst, text, prefix)
	}
	if n.normalizer == composed && !normal {
		text = nfc(text)
	}
	for i := 0; i < len(text); {
		end := n.pieces.end(text, i)
		dst = n.bytes.appendPiece(dst, text[i:end])
		i = end
	}
	return dst
}
