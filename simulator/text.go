package simulator

import (
	"bytes"
	"encoding/json/jsontext"
	"strconv"
	"strings"
	"sync"

	"github.com/inferrail/inferrail/proxy/prompt/tokenizer"
	"github.com/inferrail/inferrail/simulator/workload"
)

// nextToken returns the length in bytes of the first token of text, which must
// not be empty. The agent has the same tokenizer, as builtin:sim.
func nextToken(text string) int {
	n, _ := tokenizer.NextSim(text)
	return n
}

// countTokens returns how many tokens text has.
func countTokens(text string) int {
	n := 0
	for text != "" {
		text = text[nextToken(text):]
		n++
	}
	return n
}

// tokenID returns the number of a token.
func tokenID(token string) int {
	_, id := tokenizer.NextSim(token)
	return int(id)
}

// tokenIDs returns the numbers of the tokens of text.
func tokenIDs(text string) []int {
	ids := []int{}
	for text != "" {
		n, id := tokenizer.NextSim(text)
		ids = append(ids, int(id))
		text = text[n:]
	}
	return ids
}

// tokensOf returns the tokens of text.
func tokensOf(text string) []string {
	var tokens []string
	for text != "" {
		n := nextToken(text)
		tokens = append(tokens, text[:n])
		text = text[n:]
	}
	return tokens
}

// vocabulary is which token a number stands for, as far as this server has
// told anybody: the model's own words and what it has tokenised. Of tokens that
// share a number it is the one told last. Its methods may be called from any
// goroutine.
type vocabulary struct {
	mu    sync.Mutex // guards texts
	texts map[int]string
}

func newVocabulary() *vocabulary {
	v := &vocabulary{texts: map[int]string{}}
	for _, w := range words {
		v.texts[tokenID(w.text)] = w.text
	}
	return v
}

// learn notes the tokens of text.
func (v *vocabulary) learn(text string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, t := range tokensOf(text) {
		v.texts[tokenID(t)] = strings.Clone(t)
	}
}

// text returns the text of token ids. A number that stands for no token known
// is shown as such.
func (v *vocabulary) text(ids []int) string {
	v.mu.Lock()
	defer v.mu.Unlock()
	var b strings.Builder
	for _, id := range ids {
		if t, ok := v.texts[id]; ok {
			b.WriteString(t)
		} else {
			b.WriteString("<|" + strconv.Itoa(id) + "|>")
		}
	}
	return b.String()
}

// words is what the model can say. Each is exactly one token when it begins at
// a token boundary, and ends at one, so that a generated text has as many
// tokens as were generated. Some need escaping in JSON.
var words = makeWords("a ", "an ", "and ", "are ", "as ", "at ", "back ", "be ", "by ", "can ", "case ", "down ", "each ",
	"end ", "far ", "few ", "find ", "first ", "for ", "from ", "good ", "half ", "hand ", "has ", "have ", "here ",
	"high ", "how ", "in ", "is ", "it ", "kind ", "large ", "last ", "left ", "line ", "long ", "made ", "more ",
	"most ", "move ", "much ", "near ", "next ", "no ", "not ", "now ", "of ", "on ", "one ", "open ", "or ", "part ",
	"point ", "read ", "same ", "say ", "side ", "small ", "so ", "some ", "such ", "take ", "than ", "that ", "the ",
	"then ", "there ", "this ", "time ", "to ", "turn ", "two ", "up ", "use ", "very ", "way ", "well ", "what ",
	"when ", "which ", "will ", "with ", "word ", "work ", "year ", "7 ", "42 ", "2026 ", ", ", "that, ", "so. ",
	"\n", "\t", "end.", "\"", "yes\"", "\\", "{", "}", "été ", "größe ", "日本 ", "é ", "🙂 ")

// word is one token: as text, as it stands inside a JSON string, and its number.
type word struct {
	text, escaped string
	id            uint32
}

func makeWords(texts ...string) []word {
	var ws []word
	for _, t := range texts {
		// A mark is a token of its own, as is the space after it.
		for t != "" {
			n := nextToken(t)
			if nextToken(t[:n]+"a") != n {
				panic("BUG: a word runs into the next one: " + strconv.Quote(t))
			}
			quoted, err := jsontext.AppendQuote(nil, t[:n])
			if err != nil {
				panic("BUG: a word is not UTF-8: " + strconv.Quote(t))
			}
			ws = append(ws, word{t[:n], string(quoted[1 : len(quoted)-1]), uint32(tokenID(t[:n]))})
			t = t[n:]
		}
	}
	return ws
}

// voice is the text of one choice: a function of the engine's seed, the prompt
// and the number of the choice.
type voice struct {
	seed uint64
	// say, when not 0, is the number of the text that is said instead, whoever is
	// asked: a part of package workload.
	say uint64
	// pad and padMax, when not 0, lengthen each token with x's to a length in
	// bytes drawn from pad to padMax.
	pad, padMax int
}

func newVoice(seed uint64, p prompt, choice int) voice {
	return voice{seed: mix(seed ^ mix(p.hash+uint64(choice)))}
}

// at returns the random number of token k.
func (v voice) at(k int) uint64 { return mix(v.seed + uint64(k)*golden) }

func (v voice) word(k int) word {
	if v.say != 0 {
		text, id := workload.Word(v.say, k)
		return word{text, text, id}
	}
	return words[v.at(k)%uint64(len(words))]
}

// padding returns how many x's follow token k.
func (v voice) padding(k int) int {
	size := v.pad
	if v.padMax > v.pad {
		size += int(mix(v.at(k)+1) % uint64(v.padMax-v.pad+1))
	}
	return max(0, size-len(v.word(k).text))
}

// text returns the first n tokens.
func (v voice) text(n int) string {
	var b strings.Builder
	for k := range n {
		b.WriteString(v.word(k).text)
		for range v.padding(k) {
			b.WriteByte('x')
		}
	}
	return b.String()
}

// until returns the first n tokens, cut where the first of the stop texts
// begins, and that stop text, or "" if there is none in them. The token that
// completes it is the last one and counts, though nothing of it may be left.
func (v voice) until(n int, stops []string) (tokens []string, stopped string) {
	var said []byte
	cut := -1
	var starts []int
	for k := range n {
		starts = append(starts, len(said))
		said = appendX(append(said, v.word(k).text...), v.padding(k))
		for _, s := range stops {
			// It can begin no earlier than would have been found before.
			from := max(0, starts[k]-len(s)+1)
			if i := bytes.Index(said[from:], []byte(s)); i >= 0 && (cut < 0 || from+i < cut) {
				cut, stopped = from+i, s
			}
		}
		if cut >= 0 {
			break
		}
	}
	if cut < 0 {
		return nil, ""
	}
	for k, start := range starts {
		end := len(said)
		if k+1 < len(starts) {
			end = starts[k+1]
		}
		tokens = append(tokens, string(said[min(start, cut):min(end, cut)]))
	}
	return tokens, stopped
}

// endsIn returns how many of the first n tokens there are up to the first that
// ends in one of some texts, and that text; n and "" if none does.
func (v voice) endsIn(n int, stops []string) (tokens int, stopped string) {
	if len(stops) == 0 {
		return n, ""
	}
	longest := 0
	for _, s := range stops {
		longest = max(longest, len(s))
	}
	var said []byte
	for k := range n {
		said = appendX(append(said, v.word(k).text...), v.padding(k))
		for _, s := range stops {
			if bytes.HasSuffix(said, []byte(s)) {
				return k + 1, s
			}
		}
		// No more is needed to find the longest.
		said = append(said[:0], said[max(0, len(said)-longest):]...)
	}
	return n, ""
}

// appendEscaped appends token k as it stands inside a JSON string.
func (v voice) appendEscaped(dst []byte, k int) []byte {
	dst = append(dst, v.word(k).escaped...)
	return appendX(dst, v.padding(k))
}

func appendX(dst []byte, n int) []byte {
	const xs = "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
	for n > len(xs) {
		dst = append(dst, xs...)
		n -= len(xs)
	}
	return append(dst, xs[:n]...)
}

// golden is splitmix64's increment: it gives each counter value a fresh draw.
const golden = 0x9e3779b97f4a7c15

// mix is the finaliser of splitmix64 (Steele, Lea, Flood 2014).
func mix(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// hashText is FNV-1a.
func hashText(s string) uint64 {
	h := uint64(14695981039346656037)
	for i := range len(s) {
		h = (h ^ uint64(s[i])) * 1099511628211
	}
	return h
}
