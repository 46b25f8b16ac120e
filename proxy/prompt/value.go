package prompt

import (
	"encoding/binary"
	"math"
	mathbits "math/bits"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/ardanlabs/jinja"

	"github.com/inferrail/inferrail/proxy/prompt/template"
)

// maxValueDepth bounds how deeply values may nest. Python's own bound is near a
// thousand; templates that print values stop being followed long before.
const maxValueDepth = 256

// maxDigits is how long a whole number may be for Python to read it.
const maxDigits = 4300

// decoder reads JSON into the values that templates work with, as Python's
// json module reads it: the order of keys is kept, of equal keys the last one's
// value counts in the first one's place, and NaN is a number. One goroutine uses
// it for one text. Strings without escapes share the text's memory. The zero
// value with a text is ready.
type decoder struct {
	text string
	pos  int
	// memory is where values are made; nil for memory of their own.
	memory *values
	// odd is set when the text is JSON but cannot be followed: Unfollowed for
	// values that nest too deeply, TooLarge for more of them than are followed,
	// Malformed for halves of surrogate pairs, which no tokenizer takes, and for
	// whole numbers longer than Python reads.
	odd Reason
	// made counts the values of all decoders that share it; nil for none others.
	made *int
}

// maxValues is how many values are made of one body: a chat of 50,000 messages
// has a third. A value takes up to a hundred times the memory of its text.
const maxValues = 1 << 19

// decode reads a whole text. ok is false when it is not JSON.
func (d *decoder) decode() (v jinja.Value, ok bool) {
	d.space()
	if v, ok = d.value(0); !ok {
		return v, false
	}
	d.space()
	return v, d.pos == len(d.text)
}

func (d *decoder) value(depth int) (v jinja.Value, ok bool) {
	if d.made == nil {
		d.made = new(int)
	}
	if *d.made++; *d.made > maxValues {
		d.note(TooLarge)
		return v, false
	}
	if d.pos >= len(d.text) {
		return v, false
	}
	switch c := d.text[d.pos]; c {
	case '"':
		s, ok := d.string()
		return stringValue(s), ok
	case '{':
		return d.object(depth)
	case '[':
		return d.array(depth)
	case 't':
		return jinja.NewBool(true), d.literal("true")
	case 'f':
		return jinja.NewBool(false), d.literal("false")
	case 'n':
		return jinja.None(), d.literal("null")
	case 'N':
		return jinja.NewFloat(math.NaN()), d.literal("NaN")
	case 'I':
		return jinja.NewFloat(math.Inf(1)), d.literal("Infinity")
	default:
		if c == '-' && strings.HasPrefix(d.text[d.pos:], "-I") {
			return jinja.NewFloat(math.Inf(-1)), d.literal("-Infinity")
		}
		return d.number()
	}
}

func (d *decoder) object(depth int) (v jinja.Value, ok bool) {
	if depth == maxValueDepth {
		d.note(Unfollowed)
		return v, false
	}
	if d.memory != nil {
		v = d.memory.dict()
	} else {
		v = jinja.NewDict()
	}
	dict := v.AsDict()
	d.pos++
	d.space()
	if d.accept('}') {
		return v, true
	}
	for {
		if d.pos >= len(d.text) || d.text[d.pos] != '"' {
			return v, false
		}
		key, ok := d.string()
		if !ok {
			return v, false
		}
		d.space()
		if !d.accept(':') {
			return v, false
		}
		d.space()
		member, ok := d.value(depth + 1)
		if !ok {
			return v, false
		}
		before := len(dict.Data)
		dict.Data[key] = member
		if len(dict.Data) > before {
			dict.Keys = append(dict.Keys, key)
		}
		d.space()
		if d.accept('}') {
			return v, true
		}
		if !d.accept(',') {
			return v, false
		}
		d.space()
	}
}

func (d *decoder) array(depth int) (v jinja.Value, ok bool) {
	if depth == maxValueDepth {
		d.note(Unfollowed)
		return v, false
	}
	if d.memory == nil {
		d.memory = new(values)
	}
	d.pos++
	d.space()
	if d.accept(']') {
		return jinja.NewList(nil), true
	}
	// Arrays within this one put theirs behind and take them off again.
	first := len(d.memory.items)
	for {
		item, ok := d.value(depth + 1)
		if !ok {
			return v, false
		}
		d.memory.items = append(d.memory.items, item)
		d.space()
		if d.accept(']') {
			items := slices.Clone(d.memory.items[first:])
			d.memory.items = d.memory.items[:first]
			return jinja.NewList(items), true
		}
		if !d.accept(',') {
			return v, false
		}
		d.space()
	}
}

// number reads what Python's json reads: an integer, or a float when it has a
// fraction or an exponent.
func (d *decoder) number() (v jinja.Value, ok bool) {
	start, integer := d.pos, true
	d.accept('-')
	switch first := d.pos; {
	case d.digits() == 0, d.text[first] == '0' && d.pos > first+1:
		return v, false
	}
	if d.pos+1 < len(d.text) && d.text[d.pos] == '.' && isDigit(d.text[d.pos+1]) {
		integer = false
		d.pos++
		d.digits()
	}
	if d.pos < len(d.text) && d.text[d.pos]|0x20 == 'e' {
		at := d.pos
		d.pos++
		if !d.accept('-') {
			d.accept('+')
		}
		if d.digits() == 0 {
			d.pos = at
		} else {
			integer = false
		}
	}
	number := d.text[start:d.pos]
	if integer && len(strings.TrimPrefix(number, "-")) > maxDigits {
		d.note(Malformed)
		return jinja.NewInt(0), true
	}
	return template.Number(number), true
}

func (d *decoder) digits() int {
	start := d.pos
	for d.pos < len(d.text) && isDigit(d.text[d.pos]) {
		d.pos++
	}
	return d.pos - start
}

func isDigit(c byte) bool { return c >= '0' && c <= '9' }

// string reads a string that begins at d.pos.
func (d *decoder) string() (s string, ok bool) {
	d.pos++
	start := d.pos
	d.pos += plain(d.text[start:])
	if d.pos < len(d.text) && d.text[d.pos] == '"' {
		d.pos++
		return d.text[start : d.pos-1], true
	}
	// What escapes stand for is never longer than they are. Words of eight bytes
	// are written as a whole, so there is room for one more.
	if d.memory == nil {
		d.memory = new(values)
	}
	out := d.memory.room(len(d.text) - start + 8)
	n := copy(out, d.text[start:d.pos])
	text, pos := d.text, d.pos
	for pos < len(text) {
		switch c := text[pos]; {
		case c == '"':
			d.pos = pos + 1
			d.memory.took(n)
			return keyText(out[:n:n]), true
		case c != '\\':
			return "", false // a control character
		}
		if pos+1 < len(text) && shortEscapes[text[pos+1]] != 0 {
			out[n] = shortEscapes[text[pos+1]]
			n++
			pos += 2
			if pos < len(text) && text[pos] == '\\' {
				continue // as in lines that are indented
			}
		} else {
			d.pos = pos
			escaped, ok := d.escape(out[:n])
			if !ok {
				return "", false
			}
			n, pos = len(escaped), d.pos
		}
		for pos+8 <= len(text) {
			word := loadWord(text[pos:])
			binary.LittleEndian.PutUint64(out[n:], word)
			special := specialBytes(word)
			if special != 0 {
				k := mathbits.TrailingZeros64(special) / 8
				n += k
				pos += k
				break
			}
			n += 8
			pos += 8
		}
		for pos < len(text) && text[pos] >= 0x20 && text[pos] != '"' && text[pos] != '\\' {
			out[n] = text[pos]
			n++
			pos++
		}
	}
	return "", false
}

// shortEscapes are the bytes that escapes of one letter stand for.
var shortEscapes = [256]byte{'"': '"', '\\': '\\', '/': '/', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t'}

// escape appends what the escape at d.pos stands for.
func (d *decoder) escape(out []byte) (_ []byte, ok bool) {
	if d.pos+1 >= len(d.text) {
		return out, false
	}
	c := d.text[d.pos+1]
	d.pos += 2
	if shortEscapes[c] != 0 {
		return append(out, shortEscapes[c]), true
	}
	if c != 'u' {
		return out, false
	}
	r, ok := hex4(d.text[d.pos:])
	if !ok {
		return out, false
	}
	d.pos += 4
	if r < 0xd800 || r > 0xdfff {
		return utf8.AppendRune(out, r), true
	}
	if r < 0xdc00 && strings.HasPrefix(d.text[d.pos:], `\u`) {
		if low, ok := hex4(d.text[d.pos+2:]); ok && low >= 0xdc00 && low <= 0xdfff {
			d.pos += 6
			return utf8.AppendRune(out, 0x10000+(r-0xd800)<<10+(low-0xdc00)), true
		}
	}
	d.note(Malformed)
	return utf8.AppendRune(out, utf8.RuneError), true
}

func hex4(s string) (r rune, ok bool) {
	if len(s) < 4 {
		return 0, false
	}
	for _, c := range []byte(s[:4]) {
		switch {
		case isDigit(c):
			r = r<<4 | rune(c-'0')
		case c|0x20 >= 'a' && c|0x20 <= 'f':
			r = r<<4 | rune(c|0x20-'a'+10)
		default:
			return 0, false
		}
	}
	return r, true
}

// plain is how many bytes of s stand for themselves: no quote, no backslash, no
// control character. It looks at eight bytes at a time.
func plain(s string) int {
	i := 0
	for ; i+8 <= len(s); i += 8 {
		if special := specialBytes(loadWord(s[i:])); special != 0 {
			return i + mathbits.TrailingZeros64(special)/8
		}
	}
	for i < len(s) && s[i] >= 0x20 && s[i] != '"' && s[i] != '\\' {
		i++
	}
	return i
}

// loadWord is the first eight bytes of s, the first the lowest.
func loadWord(s string) uint64 {
	_ = s[7] // one check for all
	return uint64(s[0]) | uint64(s[1])<<8 | uint64(s[2])<<16 | uint64(s[3])<<24 |
		uint64(s[4])<<32 | uint64(s[5])<<40 | uint64(s[6])<<48 | uint64(s[7])<<56
}

// specialBytes sets the highest bit of the lowest byte of w that does not stand
// for itself. Of those above it nothing is said; without any it is 0.
func specialBytes(w uint64) uint64 {
	const (
		ones  = 0x0101010101010101
		highs = 0x8080808080808080
	)
	quote, slash := w^(ones*'"'), w^(ones*'\\')
	return ((w-ones*0x20)&^w | (quote-ones)&^quote | (slash-ones)&^slash) & highs
}

// stringValue is s as a value. Those that nearly every message has are made
// once.
func stringValue(s string) jinja.Value {
	switch s {
	case "user":
		return userValue
	case "assistant":
		return assistantValue
	case "text":
		return textValue
	}
	return jinja.NewString(s)
}

var userValue, assistantValue, textValue = jinja.NewString("user"), jinja.NewString("assistant"), jinja.NewString("text")

func (d *decoder) literal(word string) bool {
	if !strings.HasPrefix(d.text[d.pos:], word) {
		return false
	}
	d.pos += len(word)
	return true
}

func (d *decoder) accept(c byte) bool {
	if d.pos < len(d.text) && d.text[d.pos] == c {
		d.pos++
		return true
	}
	return false
}

func (d *decoder) space() {
	for d.pos < len(d.text) && isBlank(d.text[d.pos]) {
		d.pos++
	}
}

func isBlank(c byte) bool { return c == ' ' || c == '\n' || c == '\t' || c == '\r' }

func (d *decoder) note(odd Reason) {
	if d.odd == Exact || odd == Malformed {
		d.odd = odd
	}
}
