package tokenizer

import "strings"

// pieces are rules that cut text into the pieces within which tokens are
// merged. Each is one regular expression of a pre-tokenizer, followed by hand:
// what a backtracking matcher would find first and longest. Every code point
// is in a piece. The zero value is no rule.
//
// In all of them the end of a piece depends only on the text from its beginning
// on, and they look at most one code point beyond it, to see whether a run of
// spaces goes on.
type pieces struct {
	rule rule
	// digits is how many numbers in a row are one piece; 0 is any number of them.
	// A rule of gpt2Words has 0 or 1.
	digits int
	// marks counts marks among the letters (words).
	marks bool
	// contractions, of cased words, appends 's, 't, 're and so on to them.
	contractions bool
}

type rule uint8

const (
	// gpt2Words: ' ?\p{L}+' and its like, each with one space before it.
	gpt2Words rule = iota + 1
	// words: any one code point but a newline, letter or number goes with the
	// letters after it. GPT-4, Llama 3, Qwen.
	plainWords
	// casedWords: as words, but a piece goes from upper to lower case and not
	// back. GPT-4o and what came after it.
	casedWords
	// deepseekWords: numbers first, then Chinese and Japanese, then the rest.
	deepseekWords
)

// String tells people which rule it is.
func (p pieces) String() string {
	switch {
	case p.rule == gpt2Words:
		return "GPT-2"
	case p.rule == plainWords && p.marks:
		return "Qwen 3.5"
	case p.rule == plainWords && p.digits == 1:
		return "Qwen"
	case p.rule == plainWords:
		return "Llama 3"
	case p.rule == casedWords && p.contractions:
		return "o200k"
	case p.rule == casedWords:
		return "Mistral"
	}
	return "DeepSeek"
}

// knownPatterns are the regular expressions that are followed.
var knownPatterns = map[string]pieces{
	// GPT-2; ByteLevel with use_regex.
	`'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`: {rule: gpt2Words},
	// Qwen 2 to 3.
	`(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`: {rule: plainWords, digits: 1},
	// Llama 3, GLM 4, Phi 4.
	`(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`: {rule: plainWords, digits: 3},
	// Qwen 3.5.
	`(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`: {rule: plainWords, digits: 1, marks: true},
	// GPT-4o, gpt-oss, Llama 4.
	`[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`: {rule: casedWords, digits: 3, contractions: true},
	// Mistral Nemo and later.
	`[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`: {rule: casedWords, digits: 1},
}

// end returns the end of the piece that begins at s[i:], which is not empty.
func (p pieces) end(s string, i int) int {
	switch p.rule {
	case plainWords:
		return p.endPlain(s, i)
	case casedWords:
		return p.endCased(s, i)
	case gpt2Words:
		return p.endGPT2(s, i)
	default:
		return endDeepseek(s, i)
	}
}

// contraction returns the length of a contraction such as 's at s[i:], in any
// case, or 0.
func contraction(s string, i int) int {
	if i+1 >= len(s) || s[i] != '\'' {
		return 0
	}
	var second byte
	switch s[i+1] | 0x20 {
	case 's', 't', 'm', 'd':
		return 2
	case 'r', 'v':
		second = 'e'
	case 'l':
		second = 'l'
	default:
		if strings.HasPrefix(s[i+1:], "ſ") { // folds to s
			return 1 + len("ſ")
		}
		return 0
	}
	if i+2 < len(s) && s[i+2]|0x20 == second {
		return 3
	}
	return 0
}

// endNumbers is \p{N} so often.
func endNumbers(s string, i, most int) int {
	for k := 0; most == 0 || k < most; k++ {
		c, n := classAt(s, i)
		if n == 0 || c&classNumber == 0 {
			break
		}
		i += n
	}
	return i
}

// endNewlines is [\r\n]*, or with slash [\r\n/]*.
func endNewlines(s string, i int, slash bool) int {
	for i < len(s) && (s[i] == '\n' || s[i] == '\r' || slash && s[i] == '/') {
		i++
	}
	return i
}

// endSpaces is \s*[\r\n]+|\s+(?!\S)|\s+ where s[i:] begins with a space: up to
// the last newline of the run of spaces, or else all but the last space if
// something follows. What is in the classes of end counts as the end of s.
func endSpaces(s string, i int, end class) int {
	newline, last, k := 0, i, i
	for {
		c, n := classAt(s, k)
		if c&classSpace == 0 {
			switch {
			case newline > 0:
				return newline
			case n == 0 || c&end != 0 || last == i:
				return k
			}
			return last
		}
		last = k
		k += n
		if c&classNewline != 0 {
			newline = k
		}
	}
}

func (p pieces) endPlain(s string, i int) int {
	letters, wordless := classLetter, classLetter|classNumber|classSpace
	if p.marks {
		letters |= classMark
		wordless |= classMark
	}
	if n := contraction(s, i); n > 0 {
		return i + n
	}
	// [^\r\n\p{L}\p{N}]?\p{L}+
	c, n := classAt(s, i)
	if c&classLetter != 0 {
		return skip(s, i+n, letters)
	}
	if c&(classNumber|classNewline) == 0 {
		if k := skip(s, i+n, letters); k > i+n {
			return k
		}
		if c&letters != 0 { // a mark
			return i + n
		}
	}
	if c&classNumber != 0 {
		return endNumbers(s, i, p.digits)
	}
	//  ?[^\s\p{L}\p{N}]+[\r\n]*
	j := i
	if s[i] == ' ' {
		j++
	}
	if k := skipNot(s, j, wordless); k > j {
		return endNewlines(s, k, false)
	}
	return endSpaces(s, i, 0)
}

func (p pieces) endCased(s string, i int) int {
	c, n := classAt(s, i)
	lead := c&(classLetter|classNumber|classNewline) == 0
	if lead {
		if k := endLower(s, i+n); k > 0 {
			return k + p.contraction(s, k)
		}
	}
	if k := endLower(s, i); k > 0 {
		return k + p.contraction(s, k)
	}
	if lead {
		if k := endUpper(s, i+n); k > 0 {
			return k + p.contraction(s, k)
		}
	}
	if k := endUpper(s, i); k > 0 {
		return k + p.contraction(s, k)
	}
	if c&classNumber != 0 {
		return endNumbers(s, i, p.digits)
	}
	//  ?[^\s\p{L}\p{N}]+[\r\n/]*
	j := i
	if s[i] == ' ' {
		j++
	}
	if k := skipNot(s, j, classLetter|classNumber|classSpace); k > j {
		return endNewlines(s, k, true)
	}
	return endSpaces(s, i, 0)
}

func (p pieces) contraction(s string, i int) int {
	if !p.contractions {
		return 0
	}
	return contraction(s, i)
}

// endLower is [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+, or 0.
func endLower(s string, i int) int {
	both := 0 // the end of the last code point of the first run that the second takes too
	k := i
	for {
		c, n := classAt(s, k)
		if n == 0 || c&classUpper == 0 {
			break
		}
		k += n
		if c&classLower != 0 {
			both = k
		}
	}
	if e := skip(s, k, classLower); e > k {
		return e
	}
	// The first run gives back until the second has something to take.
	return both
}

// endUpper is [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*, or 0.
func endUpper(s string, i int) int {
	k := skip(s, i, classUpper)
	if k == i {
		return 0
	}
	return skip(s, k, classLower)
}

// endGPT2 is GPT-2's pattern. With p.digits, a split into single digits comes
// before it, which are the end of the text to it.
func (p pieces) endGPT2(s string, i int) int {
	var stop class
	if p.digits == 1 {
		stop = classNumeric
	}
	c, n := classAt(s, i)
	if c&stop != 0 {
		return i + n
	}
	if s[i] == '\'' && i+1 < len(s) {
		switch s[i+1] {
		case 's', 't', 'm', 'd':
			return i + 2
		case 'r', 'v', 'l':
			if i+2 < len(s) && (s[i+2] == 'e' && s[i+1] != 'l' || s[i+2] == 'l' && s[i+1] == 'l') {
				return i + 3
			}
		}
	}
	j := i
	if s[i] == ' ' {
		j++
	}
	switch c, n = classAt(s, j); {
	case n == 0 || c&stop != 0:
		return j
	case c&classLetter != 0:
		return skipBut(s, j, classLetter, stop)
	case c&classNumber != 0:
		return skipBut(s, j, classNumber, stop)
	case c&classSpace == 0:
		return skipNot(s, j, classLetter|classNumber|classSpace|stop)
	}
	// \s+(?!\S)|\s+
	last, k := i, i
	for {
		c, n := classAt(s, k)
		if c&classSpace == 0 {
			if n == 0 || c&stop != 0 || last == i {
				return k
			}
			return last
		}
		last = k
		k += n
	}
}

// endDeepseek follows three splits one after another: \p{N}{1,3}, then
// [一-龥぀-ゟ゠-ヿ]+, and then a pattern that leaves some code points out, which
// are pieces of their own from one match to the next. Each split sees nothing
// beyond the piece of the one before it.
func endDeepseek(s string, i int) int {
	c, n := classAt(s, i)
	if c&classNumber != 0 {
		return endNumbers(s, i, 3)
	}
	if c&classKana != 0 {
		return skip(s, i+n, classKana)
	}
	if k := endDeepseekRest(s, i); k > 0 {
		return k
	}
	for {
		i += n
		if c, n = classAt(s, i); n == 0 || c&(classNumber|classKana) != 0 || endDeepseekRest(s, i) > 0 {
			return i
		}
	}
}

// endDeepseekRest is the end of a match of the third split at s[i:], or 0.
func endDeepseekRest(s string, i int) int {
	// [!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+
	c, n := classAt(s, i)
	if n == 1 && c&classPunct != 0 {
		k := i + 1
		for k < len(s) && s[k]|0x20 >= 'a' && s[k]|0x20 <= 'z' {
			k++
		}
		if k > i+1 {
			return k
		}
	}
	// [^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+
	if c&(classNewline|classLetter|classPunct) == 0 {
		if k := skipBut(s, i+n, classLetter|classMark, classKana); k > i+n {
			return k
		}
	}
	if k := skipBut(s, i, classLetter|classMark, classKana); k > i {
		return k
	}
	//  ?[\p{P}\p{S}]+[\r\n]*
	j := i
	if s[i] == ' ' {
		j++
	}
	if k := skipBut(s, j, classPunct, classKana); k > j {
		return endNewlines(s, k, false)
	}
	if c&classSpace != 0 {
		return endSpaces(s, i, classNumber|classKana)
	}
	return 0
}
