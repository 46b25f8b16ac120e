package proxy

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/bits"
	"strconv"

	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/proxy/prompt"
)

// memberKind is the kind of a member's value.
type memberKind uint8

const (
	memberMissing memberKind = iota
	memberNull
	memberString
	memberObject
	memberOther
)

// kindOf returns the kind of the value that begins with b.
func kindOf(b byte) memberKind {
	switch b {
	case '"':
		return memberString
	case '{':
		return memberObject
	case 'n':
		return memberNull
	}
	return memberOther
}

// call is what routing and limits need of a request body. scanCall fills it;
// it points into the body and allocates nothing. Of several members with one
// name the last counts.
type call struct {
	// model is the kind of the member "model", memberOther for an object;
	// start and end enclose its value in the body, quotes included.
	model      memberKind
	start, end int
	// escaped: the name holds a backslash.
	escaped bool
	// form: the body is a form, and what start and end enclose is the name
	// itself.
	form bool
	// stream: the member "stream" is the literal true.
	stream bool

	// options is the kind of the member "stream_options"; optionsStart and
	// optionsEnd enclose its value. usageStart and usageEnd enclose the value
	// of "include_usage" in it; without one both are 0.
	options                  memberKind
	optionsStart, optionsEnd int
	usageStart, usageEnd     int

	// limits are the numbers that bound the answer, each 0 when it is missing
	// or no number above 0.
	limits [countLimits]int64
	// beams: "use_beam_search" is asked for. scored, logprobs and echo: so are
	// "prompt_logprobs", "logprobs" and "echo".
	beams, scored, logprobs, echo bool
	// What tells which conversation it is, where in the body: "messages" or "input",
	// an array; "prompt_cache_key", "user" and "safety_identifier", strings; and
	// "system" or "instructions", whatever they are.
	messages, cacheKey, user, safety, system span
	// text are the bytes of all strings in the body, member names included;
	// numbers is how many numbers it holds, media how many images and the like.
	text, numbers, media int
}

// span is a part of a body, quotes included. An empty one is not there.
type span struct{ start, end int }

func (s span) of(body []byte) []byte { return body[s.start:s.end] }

// The members of a call that bound its answer.
const (
	limitCompletion = iota // max_completion_tokens
	limitTokens            // max_tokens
	limitOutput            // max_output_tokens
	limitChoices           // n
	countLimits
)

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
	// text, numbers and media count what was passed, as in call.
	text, numbers, media int
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
		if err := s.rest(); err != nil {
			return c, err
		}
		return c, errNotObject
	}
	s.i++
	s.depth = 1
	for more := s.first(); more; {
		name, err := s.member()
		if err != nil {
			return c, err
		}
		start, first, escaped := s.i, s.peek(), false
		switch {
		case first == '"':
			escaped, err = s.str()
		case first == '{' && name == "stream_options":
			c.usageStart, c.usageEnd, err = s.streamOptions()
		default:
			err = s.value()
		}
		if err != nil {
			return c, err
		}
		switch name {
		case "model":
			c.start, c.end, c.escaped = start, s.i, escaped
			if c.model = kindOf(first); c.model == memberObject {
				c.model = memberOther
			}
		case "stream":
			c.stream = first == 't'
		case "stream_options":
			c.options, c.optionsStart, c.optionsEnd = kindOf(first), start, s.i
			if first != '{' {
				c.usageStart, c.usageEnd = 0, 0
			}
		case "max_completion_tokens":
			c.limits[limitCompletion] = limitOf(s.b[start:s.i])
		case "max_tokens":
			c.limits[limitTokens] = limitOf(s.b[start:s.i])
		case "max_output_tokens":
			c.limits[limitOutput] = limitOf(s.b[start:s.i])
		case "n":
			c.limits[limitChoices] = limitOf(s.b[start:s.i])
		case "use_beam_search":
			c.beams = !declines(s.b[start:s.i])
		case "echo":
			c.echo = !declines(s.b[start:s.i])
		case "prompt_logprobs":
			c.scored = first != 'n'
		case "logprobs":
			c.logprobs = first != 'n'
		case "messages", "input":
			if first == '[' {
				c.messages = span{start, s.i}
			}
		case "prompt_cache_key":
			c.cacheKey = text(first, start, s.i)
		case "user":
			c.user = text(first, start, s.i)
		case "safety_identifier":
			c.safety = text(first, start, s.i)
		case "system", "instructions":
			c.system = span{start, s.i}
		}
		if more, err = s.next(); err != nil {
			return c, err
		}
	}
	c.text, c.numbers, c.media = s.text, s.numbers, s.media
	return c, s.rest()
}

// text is where a string is, if it is one and not empty.
func text(first byte, start, end int) span {
	if first != '"' || end-start <= 2 {
		return span{}
	}
	return span{start, end}
}

// streamOptions skips an object and returns where the value of its last member
// "include_usage" is, or 0 and 0.
func (s *scanner) streamOptions() (start, end int, err error) {
	s.i++
	s.depth++
	for more := s.first(); more; {
		name, err := s.member()
		if err != nil {
			return 0, 0, err
		}
		from := s.i
		if err := s.value(); err != nil {
			return 0, 0, err
		}
		if name == "include_usage" {
			start, end = from, s.i
		}
		if more, err = s.next(); err != nil {
			return 0, 0, err
		}
	}
	s.depth--
	return start, end, nil
}

// first, behind the brace that opens an object, reports whether there is a
// member. It skips the brace that closes one without.
func (s *scanner) first() bool {
	s.space()
	if s.peek() == '}' {
		s.i++
		return false
	}
	return true
}

// member skips a member's name and colon, up to its value, and returns the
// name if it is one of those that matter.
func (s *scanner) member() (name string, err error) {
	start := s.i
	escaped, err := s.str()
	if err != nil {
		return "", err
	}
	name = memberName(s.b[start:s.i], escaped)
	s.space()
	if s.peek() != ':' {
		return "", syntaxError(s.i)
	}
	s.i++
	s.space()
	return name, nil
}

// next skips the comma behind a member, or the brace that closes the object.
func (s *scanner) next() (more bool, err error) {
	s.space()
	switch s.peek() {
	case ',':
		s.i++
		s.space()
		return true, nil
	case '}':
		s.i++
		return false, nil
	}
	return false, syntaxError(s.i)
}

// memberName returns which member of interest a name is, or "". quoted
// includes its quotes and is valid JSON.
func memberName(quoted []byte, escaped bool) string {
	if escaped {
		// Six bytes an escaped character at most; longer names are others.
		if len(quoted) > 2+6*len("max_completion_tokens") {
			return ""
		}
		var s string
		_ = json.Unmarshal(quoted, &s)
		return interesting([]byte(s))
	}
	return interesting(quoted[1 : len(quoted)-1])
}

func interesting(name []byte) string {
	switch string(name) {
	case "model":
		return "model"
	case "stream":
		return "stream"
	case "stream_options":
		return "stream_options"
	case "include_usage":
		return "include_usage"
	case "max_completion_tokens":
		return "max_completion_tokens"
	case "max_tokens":
		return "max_tokens"
	case "max_output_tokens":
		return "max_output_tokens"
	case "n":
		return "n"
	case "use_beam_search":
		return "use_beam_search"
	case "echo":
		return "echo"
	case "prompt_logprobs":
		return "prompt_logprobs"
	case "logprobs":
		return "logprobs"
	case "messages":
		return "messages"
	case "input":
		return "input"
	case "prompt_cache_key":
		return "prompt_cache_key"
	case "user":
		return "user"
	case "safety_identifier":
		return "safety_identifier"
	case "system":
		return "system"
	case "instructions":
		return "instructions"
	}
	return ""
}

// uncached reports whether engines compute all of the prompt, whatever they have
// cached: for the probabilities of its tokens. Those of what is cached are not
// known any more. In chats, echo alone asks for them (vLLM).
func (c *call) uncached(path []byte) bool {
	return c.scored || c.echo && (c.logprobs || promptKind(path) == prompt.Chat)
}

// mostTokens bounds what a request is taken to ask for, so that products of
// two such numbers do not overflow.
const mostTokens = 1 << 30

// limitOf returns a JSON value as a number between 1 and mostTokens, 0 when it
// is none above 0. Engines take 1e3 and 1000.0 for 1000.
func limitOf(value []byte) int64 {
	if b := value[0]; b < '0' || b > '9' {
		return 0
	}
	n := int64(0)
	for _, b := range value {
		if b < '0' || b > '9' {
			f, err := strconv.ParseFloat(string(value), 64)
			if err != nil && !errors.Is(err, strconv.ErrRange) {
				return 0
			}
			return int64(min(f, mostTokens))
		}
		n = min(n*10+int64(b-'0'), mostTokens)
	}
	return n
}

// usualAnswer is how many tokens an answer is taken to have whose length the
// request does not bound.
const usualAnswer = 256

// mediaTokens is what an image, a recording or another file is taken to cost.
// Vision models make between some hundred and two thousand tokens of a picture,
// whatever its file's size is.
const mediaTokens = 1024

// estimate returns what the call is taken to cost before an engine has counted
// it: for its input a token for every four bytes of text, the rule of thumb of
// OpenAI's documentation for English, and one for every number, which is how
// prompts of token ids are sent; for its output what the request allows, for
// each choice it asks for. A list of prompts counts as one prompt; settling
// makes up for it. generates is false for calls whose answer is no
// generated text, such as embeddings.
func (c *call) estimate(generates bool) policy.Charge {
	e := policy.Charge{Input: int64(c.text)/4 + int64(c.numbers) + int64(c.media)*mediaTokens}
	if !generates {
		return e
	}
	e.Output = usualAnswer
	for _, which := range [...]int{limitCompletion, limitTokens, limitOutput} {
		if n := c.limits[which]; n > 0 {
			e.Output = n
			break
		}
	}
	e.Output *= max(c.limits[limitChoices], 1)
	return e
}

// longString is how many bytes a string must have to be looked at for whether
// it is a file in base64 and no text.
const longString = 1 << 10

// isMedia reports whether the content of a long JSON string is a file: a data
// URI, or base64, in which no space can be.
func isMedia(s []byte) bool {
	if bytes.HasPrefix(s, []byte("data:")) {
		return true
	}
	for _, b := range s[:longString/2] {
		switch {
		case b >= 'a' && b <= 'z', b >= 'A' && b <= 'Z', b >= '0' && b <= '9',
			b == '+', b == '/', b == '-', b == '_', b == '=', b == '\\':
		default:
			return false
		}
	}
	return true
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
	start := s.i
	for {
		s.i += plain(s.b[s.i:])
		if s.i == len(s.b) {
			return escaped, syntaxError(s.i)
		}
		switch s.b[s.i] {
		case '"':
			if n := s.i - start; n < longString || !isMedia(s.b[start:s.i]) {
				s.text += n
			} else {
				s.media++
			}
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
	s.numbers++
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
		if !key.Allows(m.Name) && !key.Allows(name) {
			return
		}
		if !first {
			dst = append(dst, ',')
		}
		first = false
		dst = appendCard(dst, m, name)
	}
	for _, m := range models {
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
