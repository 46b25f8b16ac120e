package proxy

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/bits"
)

// memberKind is the kind of the top-level member "model".
type memberKind uint8

const (
	memberMissing memberKind = iota
	memberNull
	memberString
	memberOther
)

// call is what routing needs of a request body. scanCall fills it; it points
// into the body and allocates nothing.
type call struct {
	// model is the kind of the member "model"; start and end enclose its value
	// in the body, quotes included. Of several the last counts.
	model      memberKind
	start, end int
	// escaped: the name holds a backslash.
	escaped bool
	// form: the body is a form, and what start and end enclose is the name
	// itself.
	form bool
	// stream: the last member "stream" is the literal true.
	stream bool
}

// name returns the model's name. It aliases body unless the name is escaped.
// Only for memberString.
func (c *call) name(body []byte) []byte {
	if c.form {
		return body[c.start:c.end]
	}
	if !c.escaped {
		return body[c.start+1 : c.end-1]
	}
	var s string
	// The scanner has accepted the value, so this cannot fail.
	_ = json.Unmarshal(body[c.start:c.end], &s)
	return []byte(s)
}

// maxDepth bounds the nesting of a body. It is encoding/json's bound.
const maxDepth = 10000

var (
	errNotObject = errors.New("the body is not a JSON object")
	errDepth     = fmt.Errorf("the body is nested deeper than %d levels", maxDepth)
)

// syntaxError is where a body stops being JSON.
type syntaxError int

func (e syntaxError) Error() string {
	return fmt.Sprintf("the body is not valid JSON at byte %d", int(e))
}

// scanCall checks that body is one JSON object (RFC 8259, whole) and finds in
// it what routing needs, in one pass.
func scanCall(body []byte) (call, error) {
	s := scanner{b: body}
	c, err := s.call()
	if err != nil {
		return call{}, err
	}
	return c, nil
}

// scanner walks over JSON text. It keeps one bit a level of nesting: set for
// an object.
type scanner struct {
	b     []byte
	i     int
	depth int
	open  [maxDepth/64 + 1]uint64
}

func (s *scanner) call() (c call, err error) {
	s.space()
	if s.peek() != '{' {
		if s.i == len(s.b) {
			return c, errNotObject
		}
		if err := s.value(); err != nil {
			return c, err
		}
		s.space()
		if s.i != len(s.b) {
			return c, syntaxError(s.i)
		}
		return c, errNotObject
	}
	s.i++
	s.depth = 1
	s.space()
	if s.peek() == '}' {
		s.i++
		return c, s.rest()
	}
	for {
		key := s.i
		escaped, err := s.str()
		if err != nil {
			return c, err
		}
		name := memberName(s.b[key:s.i], escaped)
		s.space()
		if s.peek() != ':' {
			return c, syntaxError(s.i)
		}
		s.i++
		s.space()
		start, first := s.i, s.peek()
		if first == '"' {
			escaped, err = s.str()
		} else {
			escaped, err = false, s.value()
		}
		if err != nil {
			return c, err
		}
		switch name {
		case "model":
			c.start, c.end, c.escaped = start, s.i, escaped
			switch first {
			case '"':
				c.model = memberString
			case 'n':
				c.model = memberNull
			default:
				c.model = memberOther
			}
		case "stream":
			c.stream = first == 't'
		}
		s.space()
		switch s.peek() {
		case ',':
			s.i++
			s.space()
		case '}':
			s.i++
			return c, s.rest()
		default:
			return c, syntaxError(s.i)
		}
	}
}

// memberName returns which member of interest a key is. quoted includes its
// quotes and is valid JSON.
func memberName(quoted []byte, escaped bool) string {
	if escaped {
		// Six bytes an escaped character at most; longer keys are others.
		if len(quoted) > 2+6*len("stream") {
			return ""
		}
		var s string
		_ = json.Unmarshal(quoted, &s)
		quoted = append(append([]byte{'"'}, s...), '"')
	}
	switch string(quoted) {
	case `"model"`:
		return "model"
	case `"stream"`:
		return "stream"
	}
	return ""
}

// rest checks that nothing but white space follows.
func (s *scanner) rest() error {
	s.space()
	if s.i != len(s.b) {
		return syntaxError(s.i)
	}
	return nil
}

// peek returns the byte at hand, 0 at the end. A NUL byte is valid nowhere
// that peek is used.
func (s *scanner) peek() byte {
	if s.i < len(s.b) {
		return s.b[s.i]
	}
	return 0
}

func (s *scanner) space() {
	for s.i < len(s.b) {
		switch s.b[s.i] {
		case ' ', '\t', '\r', '\n':
			s.i++
		default:
			return
		}
	}
}

// value skips one value, however deep, without recursion.
func (s *scanner) value() error {
	base := s.depth
	for {
		// A value starts here.
		var err error
		switch b := s.peek(); b {
		case '{', '[':
			if s.depth == maxDepth {
				return errDepth
			}
			s.i++
			s.set(s.depth, b == '{')
			s.depth++
			s.space()
			if s.peek() == closing(b) {
				s.i++
				s.depth--
				break
			}
			if b == '{' {
				if err := s.key(); err != nil {
					return err
				}
			}
			continue
		case '"':
			_, err = s.str()
		case 't':
			err = s.literal("true")
		case 'f':
			err = s.literal("false")
		case 'n':
			err = s.literal("null")
		default:
			err = s.number()
		}
		if err != nil {
			return err
		}
		// A value has ended: close what it closes.
		for {
			if s.depth == base {
				return nil
			}
			object := s.isObject(s.depth - 1)
			s.space()
			b := s.peek()
			if b == ',' {
				s.i++
				s.space()
				if object {
					if err := s.key(); err != nil {
						return err
					}
				}
				break
			}
			if object && b != '}' || !object && b != ']' {
				return syntaxError(s.i)
			}
			s.i++
			s.depth--
		}
	}
}

func closing(open byte) byte {
	if open == '{' {
		return '}'
	}
	return ']'
}

func (s *scanner) set(level int, object bool) {
	if object {
		s.open[level/64] |= 1 << (level % 64)
	} else {
		s.open[level/64] &^= 1 << (level % 64)
	}
}

func (s *scanner) isObject(level int) bool { return s.open[level/64]>>(level%64)&1 == 1 }

// key skips a member's name and colon, up to its value.
func (s *scanner) key() error {
	if _, err := s.str(); err != nil {
		return err
	}
	s.space()
	if s.peek() != ':' {
		return syntaxError(s.i)
	}
	s.i++
	s.space()
	return nil
}

// str skips a string and reports whether it holds a backslash.
func (s *scanner) str() (escaped bool, err error) {
	if s.peek() != '"' {
		return false, syntaxError(s.i)
	}
	s.i++
	for {
		s.i += plain(s.b[s.i:])
		if s.i == len(s.b) {
			return escaped, syntaxError(s.i)
		}
		switch s.b[s.i] {
		case '"':
			s.i++
			return escaped, nil
		case '\\':
			escaped = true
			s.i++
			switch s.peek() {
			case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
				s.i++
			case 'u':
				s.i++
				for range 4 {
					if _, ok := hexDigit(s.peek()); !ok {
						return escaped, syntaxError(s.i)
					}
					s.i++
				}
			default:
				return escaped, syntaxError(s.i)
			}
		default: // a control character
			return escaped, syntaxError(s.i)
		}
	}
}

// plain returns how many bytes at the start of b are neither a quote, a
// backslash nor a control character. Eight at a time: prompts and images are
// nearly all of a body.
func plain(b []byte) int {
	const ones, tops = 0x0101010101010101, 0x8080808080808080
	n := 0
	for ; n+8 <= len(b); n += 8 {
		x := binary.LittleEndian.Uint64(b[n:])
		q, e := x^ones*'"', x^ones*'\\'
		// The lowest bit set marks the first such byte; borrows can only
		// mark bytes above it.
		if m := ((x-ones*0x20)&^x | (q-ones)&^q | (e-ones)&^e) & tops; m != 0 {
			return n + bits.TrailingZeros64(m)/8
		}
	}
	for ; n < len(b); n++ {
		if c := b[n]; c < 0x20 || c == '"' || c == '\\' {
			break
		}
	}
	return n
}

func (s *scanner) literal(want string) error {
	for i := range len(want) {
		if s.peek() != want[i] {
			return syntaxError(s.i)
		}
		s.i++
	}
	return nil
}

func (s *scanner) number() error {
	if s.peek() == '-' {
		s.i++
	}
	if s.peek() == '0' {
		s.i++
	} else if !s.digits() {
		return syntaxError(s.i)
	}
	if s.peek() == '.' {
		s.i++
		if !s.digits() {
			return syntaxError(s.i)
		}
	}
	if b := s.peek(); b == 'e' || b == 'E' {
		s.i++
		if b := s.peek(); b == '+' || b == '-' {
			s.i++
		}
		if !s.digits() {
			return syntaxError(s.i)
		}
	}
	return nil
}

func (s *scanner) digits() bool {
	start := s.i
	for s.i < len(s.b) && s.b[s.i] >= '0' && s.b[s.i] <= '9' {
		s.i++
	}
	return s.i > start
}

// appendJSONString appends s as a JSON string. Bytes that are not UTF-8 become
// U+FFFD.
func appendJSONString(dst []byte, s string) []byte {
	for i := range len(s) {
		if c := s[i]; c < 0x20 || c == '"' || c == '\\' || c >= 0x7f {
			b, _ := json.Marshal(s) // strings always marshal
			return append(dst, b...)
		}
	}
	dst = append(append(dst, '"'), s...)
	return append(dst, '"')
}

// appendModels appends the body of GET /v1/models: those that key may be used
// for.
func appendModels(dst []byte, models []*Model, key *Key) []byte {
	dst = append(dst, `{"object":"list","data":[`...)
	first := true
	card := func(m *Model, name string) {
		if !first {
			dst = append(dst, ',')
		}
		first = false
		dst = appendCard(dst, m, name)
	}
	for _, m := range models {
		if !key.Allows(m.Name) {
			continue
		}
		card(m, m.Name)
		for _, alias := range m.Aliases {
			card(m, alias)
		}
	}
	return append(dst, "]}"...)
}

func appendCard(dst []byte, m *Model, id string) []byte {
	owner := m.OwnedBy
	if owner == "" {
		owner = "inferrail"
	}
	dst = append(dst, `{"id":`...)
	dst = appendJSONString(dst, id)
	dst = fmt.Appendf(dst, `,"object":"model","created":%d,"owned_by":`, m.Created)
	dst = appendJSONString(dst, owner)
	dst = append(dst, `,"root":`...)
	dst = appendJSONString(dst, cmp.Or(m.Root, m.Name))
	dst = append(dst, `,"parent":`...)
	if m.Parent == "" {
		dst = append(dst, "null"...)
	} else {
		dst = appendJSONString(dst, m.Parent)
	}
	if m.MaxModelLen != 0 {
		dst = fmt.Appendf(dst, `,"max_model_len":%d`, m.MaxModelLen)
	}
	return append(dst, '}')
}
