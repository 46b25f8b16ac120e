package template

import (
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// tokenKind is what a token of a template is.
type tokenKind uint8

const (
	tokenEnd       tokenKind = iota
	tokenData                // text outside of tags
	tokenOutput              // {{
	tokenOutputEnd           // }}
	tokenBlock               // {%
	tokenBlockEnd            // %}
	tokenName
	tokenString
	tokenInteger
	tokenFloat
	tokenOperator
)

// token is one token of a template. text is what it stands for: the value of
// a string, the spelling of everything else.
type token struct {
	kind tokenKind
	text string
	line int
}

// lexer cuts a template's source into tokens as Jinja's lexer does with
// trim_blocks and lstrip_blocks on. Compile makes one and is alone in
// using it.
type lexer struct {
	source string
	pos    int
	line   int
	tokens []token
	// lineStart is whether what came before pos ends a line.
	lineStart bool
}

// lex returns the tokens of source, without an end token.
func lex(source string) ([]token, error) {
	if !utf8.ValidString(source) {
		return nil, fmt.Errorf("the template is not valid UTF-8")
	}
	source = strings.ReplaceAll(source, "\r\n", "\n")
	source = strings.ReplaceAll(source, "\r", "\n")
	source = strings.TrimSuffix(source, "\n")
	l := &lexer{source: source, line: 1, lineStart: true}
	for l.pos < len(l.source) {
		if err := l.data(); err != nil {
			return nil, err
		}
	}
	return l.tokens, nil
}

func (l *lexer) fail(format string, args ...any) error {
	return fmt.Errorf("line %d: %s", l.line, fmt.Sprintf(format, args...))
}

func (l *lexer) add(kind tokenKind, text string) {
	l.tokens = append(l.tokens, token{kind, text, l.line})
}

// advance moves to end, which the caller has found behind pos.
func (l *lexer) advance(end int) {
	if end > l.pos {
		l.line += strings.Count(l.source[l.pos:end], "\n")
		l.lineStart = l.source[end-1] == '\n'
		l.pos = end
	}
}

// data reads text up to the next tag, and the tag.
func (l *lexer) data() error {
	start := l.pos
	tag := -1
	for i := start; i+1 < len(l.source); i++ {
		if l.source[i] == '{' && strings.IndexByte("{%#", l.source[i+1]) >= 0 {
			tag = i
			break
		}
	}
	if tag < 0 {
		l.add(tokenData, l.source[start:])
		l.advance(len(l.source))
		return nil
	}
	open := l.source[tag+1]
	inside := tag + 2
	sign := l.signAt(inside)
	if sign != 0 {
		inside++
	}
	l.text(l.source[start:tag], sign, open != '{')
	lineStart := l.lineStart
	l.advance(tag)
	l.lineStart = lineStart

	if open == '%' {
		if end, ok := l.rawTag(inside); ok {
			l.advance(end)
			return l.raw()
		}
	}
	l.advance(inside)
	switch open {
	case '#':
		return l.comment()
	case '%':
		l.add(tokenBlock, "")
		return l.tag(tokenBlockEnd)
	default:
		l.add(tokenOutput, "")
		return l.tag(tokenOutputEnd)
	}
}

func (l *lexer) signAt(i int) byte {
	if i < len(l.source) && (l.source[i] == '-' || l.source[i] == '+') {
		return l.source[i]
	}
	return 0
}

// text adds text that stands before a tag. sign is the tag's; block is whether
// lstrip_blocks applies to it.
func (l *lexer) text(text string, sign byte, block bool) {
	switch {
	case sign == '-':
		text = strings.TrimRightFunc(text, isSpace)
	case sign != '+' && block:
		line := strings.LastIndexByte(text, '\n') + 1
		if (line > 0 || l.lineStart) && strings.TrimLeftFunc(text[line:], isSpace) == "" {
			text = text[:line]
		}
	}
	if text != "" {
		l.add(tokenData, text)
	}
}

// rawTag reports where the tag whose inside begins at i ends, if it is
// {% raw %}. Such a tag does not swallow a line end.
func (l *lexer) rawTag(i int) (end int, ok bool) {
	i = l.space(i)
	if !strings.HasPrefix(l.source[i:], "raw") {
		return 0, false
	}
	i = l.space(i + 3)
	switch {
	case strings.HasPrefix(l.source[i:], "-%}"):
		return l.space(i + 3), true
	case strings.HasPrefix(l.source[i:], "%}"):
		return i + 2, true
	}
	return 0, false
}

// space returns the first position from i on that holds no white space.
func (l *lexer) space(i int) int {
	return len(l.source) - len(strings.TrimLeftFunc(l.source[i:], isSpace))
}

// closing reports where a tag's end at i ends, such as %} with its sign and the
// white space that belongs to it.
func (l *lexer) closing(i int, end string) (int, bool) {
	rest := l.source[i:]
	switch {
	case end != "}}" && strings.HasPrefix(rest, "+"+end):
		return i + 3, true
	case strings.HasPrefix(rest, "-"+end):
		return l.space(i + 3), true
	case strings.HasPrefix(rest, end):
		i += 2
		if end != "}}" && i < len(l.source) && l.source[i] == '\n' {
			i++
		}
		return i, true
	}
	return 0, false
}

func (l *lexer) comment() error {
	for i := l.pos; i < len(l.source); i++ {
		if end, ok := l.closing(i, "#}"); ok {
			l.advance(end)
			return nil
		}
	}
	return l.fail("a comment has no end")
}

func (l *lexer) raw() error {
	for i := l.pos; i < len(l.source); i++ {
		if !strings.HasPrefix(l.source[i:], "{%") {
			continue
		}
		j := i + 2
		sign := l.signAt(j)
		if sign != 0 {
			j++
		}
		j = l.space(j)
		if !strings.HasPrefix(l.source[j:], "endraw") {
			continue
		}
		end, ok := l.closing(l.space(j+len("endraw")), "%}")
		if !ok {
			continue
		}
		l.text(l.source[l.pos:i], sign, true)
		l.advance(end)
		return nil
	}
	return l.fail("a raw block has no end")
}

// operators are Jinja's, longest first.
var operators = []string{"//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<", "=", ".", ":", "|", ",", ";"}

// tag reads tokens up to the tag's end.
func (l *lexer) tag(kind tokenKind) error {
	end := "}}"
	if kind == tokenBlockEnd {
		end = "%}"
	}
	var open []byte
	for l.pos < len(l.source) {
		if len(open) == 0 {
			if after, ok := l.closing(l.pos, end); ok {
				l.add(kind, "")
				l.advance(after)
				return nil
			}
		}
		if after := l.space(l.pos); after > l.pos {
			l.advance(after)
			continue
		}
		rest := l.source[l.pos:]
		c := rest[0]
		if c >= '0' && c <= '9' {
			kind, length := number(rest, l.pos > 0 && l.source[l.pos-1] == '.')
			l.add(kind, strings.ReplaceAll(rest[:length], "_", ""))
			l.advance(l.pos + length)
			continue
		}
		if length := identifier(rest); length > 0 {
			l.add(tokenName, rest[:length])
			l.advance(l.pos + length)
			continue
		}
		if c == '\'' || c == '"' {
			length := quoted(rest)
			if length == 0 {
				return l.fail("a string has no end")
			}
			text, err := unescape(rest[1 : length-1])
			if err != nil {
				return l.fail("%v", err)
			}
			l.add(tokenString, text)
			l.advance(l.pos + length)
			continue
		}
		operator := ""
		for _, o := range operators {
			if strings.HasPrefix(rest, o) {
				operator = o
				break
			}
		}
		switch operator {
		case "":
			return l.fail("unexpected %q", firstRune(rest))
		case "(":
			open = append(open, ')')
		case "[":
			open = append(open, ']')
		case "{":
			open = append(open, '}')
		case ")", "]", "}":
			if len(open) == 0 || open[len(open)-1] != operator[0] {
				return l.fail("unexpected %q", operator)
			}
			open = open[:len(open)-1]
		}
		l.add(tokenOperator, operator)
		l.advance(l.pos + len(operator))
	}
	return l.fail("a tag has no end")
}

func firstRune(s string) string {
	_, size := utf8.DecodeRuneInString(s)
	return s[:size]
}

// identifier returns the length of the name that s begins with, 0 for none.
func identifier(s string) int {
	for i, r := range s {
		if r != '_' && !unicode.IsLetter(r) && !(i > 0 && (unicode.IsDigit(r) || unicode.Is(unicode.Mn, r))) {
			return i
		}
	}
	return len(s)
}

// number returns the kind and length of the number that s begins with.
// afterDot is whether a dot stands before it: a.1.2 are two integers.
func number(s string, afterDot bool) (tokenKind, int) {
	digits := func(i int) int {
		start := i
		for i < len(s) && (s[i] >= '0' && s[i] <= '9' || s[i] == '_' && i > start && i+1 < len(s) && s[i+1] >= '0' && s[i+1] <= '9') {
			i++
		}
		return i
	}
	whole := digits(0)
	if !afterDot {
		end := whole
		if end+1 < len(s) && s[end] == '.' {
			if after := digits(end + 1); after > end+1 {
				end = after
			}
		}
		if end < len(s) && (s[end] == 'e' || s[end] == 'E') {
			i := end + 1
			if i < len(s) && (s[i] == '+' || s[i] == '-') {
				i++
			}
			if after := digits(i); after > i {
				end = after
			}
		}
		if end > whole {
			return tokenFloat, end
		}
	}
	if s[0] == '0' && len(s) > 2 {
		set := map[byte]string{'b': "01", 'o': "01234567", 'x': "0123456789abcdef"}[s[1]|0x20]
		i := 2
		for set != "" && i < len(s) && (strings.IndexByte(set, s[i]|0x20) >= 0 || s[i] >= '0' && s[i] <= '9' && strings.IndexByte(set, s[i]) >= 0) {
			i++
		}
		if set != "" && i > 2 {
			return tokenInteger, i
		}
	}
	if s[0] == '0' {
		i := 0
		for i < len(s) && s[i] == '0' {
			i++
		}
		return tokenInteger, i
	}
	return tokenInteger, whole
}

// quoted returns the length of the string literal that s begins with, 0 when
// it does not end.
func quoted(s string) int {
	for i := 1; i < len(s); i++ {
		switch s[i] {
		case '\\':
			i++
		case s[0]:
			return i + 1
		}
	}
	return 0
}

// unescape resolves the escapes of a string literal as Python's unicode-escape
// codec does.
func unescape(s string) (string, error) {
	if !strings.Contains(s, `\`) {
		return s, nil
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] != '\\' {
			b.WriteByte(s[i])
			continue
		}
		i++
		c := s[i]
		width := 0
		switch c {
		case '\n':
		case '\\', '\'', '"':
			b.WriteByte(c)
		case 'a':
			b.WriteByte('\a')
		case 'b':
			b.WriteByte('\b')
		case 'f':
			b.WriteByte('\f')
		case 'n':
			b.WriteByte('\n')
		case 'r':
			b.WriteByte('\r')
		case 't':
			b.WriteByte('\t')
		case 'v':
			b.WriteByte('\v')
		case '0', '1', '2', '3', '4', '5', '6', '7':
			end := i
			for end < len(s) && end < i+3 && s[end] >= '0' && s[end] <= '7' {
				end++
			}
			n, _ := strconv.ParseUint(s[i:end], 8, 32)
			b.WriteRune(rune(n))
			i = end - 1
		case 'x':
			width = 2
		case 'u':
			width = 4
		case 'U':
			width = 8
		case 'N':
			return "", fmt.Errorf("a string names a character by \\N, which is not followed")
		default:
			if c >= utf8.RuneSelf {
				return "", fmt.Errorf("a string has a backslash before %q, which is not followed", firstRune(s[i:]))
			}
			b.WriteByte('\\')
			b.WriteByte(c)
		}
		if width > 0 {
			if i+width >= len(s) {
				return "", fmt.Errorf("a string has a truncated \\%c escape", c)
			}
			n, err := strconv.ParseUint(s[i+1:i+1+width], 16, 32)
			if err != nil || !utf8.ValidRune(rune(n)) || n > unicode.MaxRune {
				return "", fmt.Errorf("a string has the escape \\%c%s, which is not followed", c, s[i+1:i+1+width])
			}
			b.WriteRune(rune(n))
			i += width
		}
	}
	return b.String(), nil
}

// isSpace is Python's str.isspace for one character.
func isSpace(r rune) bool {
	return unicode.IsSpace(r) || r >= 0x1c && r <= 0x1f
}
