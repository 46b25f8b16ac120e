package workload

// The text of a part is words of the simulated model's tokenizer, "builtin:sim" of the
// agent and the simulator, whose rule is stated here and checked there: a token ends
// after a space, a control character or a mark of ASCII, and after six letters; its
// number is FNV-1a of its bytes modulo vocabulary. A word is four lower-case letters
// and a space, so it is one token wherever it stands behind the end of another.

// vocabulary is how many numbers tokens have.
const vocabulary = 128000

// longest is how many letters a token has at most.
const longest = 6

// words are all that there are: two syllables each.
var words = makeWords()

// wordBits is how many random bits choose one of words.
const wordBits = 12

// word is one of words, with the space behind it and its number as a token.
type word struct {
	text string
	id   uint32
}

func makeWords() *[1 << wordBits]word {
	const consonants, vowels = "bcdfghjklmnprstv", "aeio"
	ws := new([1 << wordBits]word)
	for k := range ws {
		text := string([]byte{consonants[k&15], vowels[k>>4&3], consonants[k>>6&15], vowels[k>>10&3], ' '})
		ws[k] = word{text, tokenID(text)}
	}
	return ws
}

// voice is the words of one part, from the first on.
type voice uint64

func newVoice(id uint64) voice { return voice(mix(id)) }

// at returns word k.
func (v voice) at(k int) *word {
	return &words[mix(uint64(v)+uint64(k)*golden)>>(64-wordBits)]
}

// Word returns token k of the part of number id: its text, which is a word and the
// space behind it, and its number.
func Word(id uint64, k int) (text string, token uint32) {
	w := newVoice(id).at(k)
	return w.text, w.id
}

// appendText appends tokens from up to to, without it, of the part of number id.
func appendText(dst []byte, id uint64, from, to int) []byte {
	v := newVoice(id)
	for k := from; k < to; k++ {
		dst = append(dst, v.at(k).text...)
	}
	return dst
}

func appendTokens(dst []uint32, id uint64, n int) []uint32 {
	v := newVoice(id)
	for k := range n {
		dst = append(dst, v.at(k).id)
	}
	return dst
}

// nextToken returns the length of the first token of text, which is ASCII and not
// empty.
func nextToken(text string) int {
	for n := range min(longest, len(text)) {
		c := text[n]
		letter := c|0x20 >= 'a' && c|0x20 <= 'z'
		digit := c >= '0' && c <= '9'
		if !letter && !digit {
			return n + 1
		}
	}
	return min(longest, len(text))
}

func tokenID(token string) uint32 {
	h := uint64(14695981039346656037)
	for i := range len(token) {
		h = (h ^ uint64(token[i])) * 1099511628211
	}
	return uint32(h % vocabulary)
}

// tokenIDs returns the numbers of the tokens of text, which is ASCII.
func tokenIDs(text string) []uint32 {
	var ids []uint32
	for text != "" {
		n := nextToken(text)
		ids = append(ids, tokenID(text[:n]))
		text = text[n:]
	}
	return ids
}

const golden = 0x9e3779b97f4a7c15

// mix is the finaliser of splitmix64 (Steele, Lea, Flood 2014).
func mix(z uint64) uint64 {
	z += golden
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}
