package proxy

import "bytes"

// edit replaces the bytes from start to end of a request body by text. With
// start == end it inserts.
type edit struct {
	start, end int
	text       []byte
}

// cut appends to dst the pieces of body with edits made, for one vectored
// write, and returns how long they are together. Edits do not overlap; they
// may come in any order, and cut sorts them.
func cut(dst [][]byte, body []byte, edits []edit) (pieces [][]byte, length int) {
	for i := range edits {
		for j := i; j > 0 && edits[j].start < edits[j-1].start; j-- {
			edits[j], edits[j-1] = edits[j-1], edits[j]
		}
	}
	from := 0
	piece := func(p []byte) {
		if len(p) > 0 {
			dst = append(dst, p)
			length += len(p)
		}
	}
	for _, e := range edits {
		piece(body[from:e.start])
		piece(e.text)
		from = e.end
	}
	piece(body[from:])
	return dst, length
}

var (
	usageMember  = []byte(`"include_usage":true`)
	usageComma   = []byte(`"include_usage":true,`)
	usageOptions = []byte(`{"include_usage":true}`)
	usageStream  = []byte(`"stream_options":{"include_usage":true},`)
	literalTrue  = []byte("true")
)

// askUsage returns the edit that lets the answer to a streamed chat or
// completions request end with its usage. ok is false when nothing is to be
// changed: the client has asked for it itself, or what it asks for is of a
// type that engines refuse. Nothing else of the body changes, and no member
// comes to stand there twice.
//
// A client that wants continuous_usage_stats but no usage gets the former with
// it: engines heed it only together with include_usage.
func askUsage(body []byte, c *call) (e edit, ok bool) {
	switch c.options {
	case memberMissing:
		at := bytes.IndexByte(body, '{') + 1
		// There is another member: the body asks for a stream.
		return edit{at, at, usageStream}, c.stream
	case memberNull:
		return edit{c.optionsStart, c.optionsEnd, usageOptions}, c.stream
	case memberObject:
		if c.usageEnd > 0 {
			return edit{c.usageStart, c.usageEnd, literalTrue}, c.stream && declines(body[c.usageStart:c.usageEnd])
		}
		at := c.optionsStart + 1
		if skipSpace(body[at:])[0] == '}' {
			return edit{at, at, usageMember}, c.stream
		}
		return edit{at, at, usageComma}, c.stream
	}
	return edit{}, false
}

// declines reports whether engines take a JSON value for false. Those in
// Python take more than the literal for it (pydantic's lax mode).
func declines(value []byte) bool {
	var lower [len(`"false"`)]byte
	if len(value) > len(lower) {
		return false
	}
	for i, b := range value {
		if b >= 'A' && b <= 'Z' {
			b |= 0x20
		}
		lower[i] = b
	}
	switch string(lower[:len(value)]) {
	case "null", "false", "0", "0.0", "-0", "-0.0", `"0"`, `"off"`, `"f"`, `"false"`, `"n"`, `"no"`:
		return true
	}
	return false
}

// maxUsageEvent is how many bytes of an event are held back at most. A usage
// chunk has some hundreds.
const maxUsageEvent = 64 << 10

// usageFilter takes the usage chunk out of a stream of server-sent events whose
// client did not ask for it (askUsage did): each event whose data is a JSON
// object in which "choices" is an empty array and "usage" an object. That is
// what vLLM, SGLang, TGI and llama.cpp add for include_usage. All other bytes
// pass unchanged.
//
// What include_usage changes elsewhere stays in, for rewriting events would
// cost more than it is worth, and clients ignore members that they do not know:
// an engine that puts usage into a chunk with choices (Ollama's completions,
// older llama.cpp), or "usage":null into all of them (OpenAI). And what an engine moves from the last chunk to the usage chunk
// goes with it: llama.cpp its timings, vLLM its system_fingerprint.
//
// One response's relay owns it, gives it the body without chunk framing, and
// uses it on one goroutine at a time. It holds back only the bytes of an event
// that may still be the usage chunk, at most maxUsageEvent of them: normally
// the first members of one event, until its choices begin. The zero value is
// ready for a response.
//
// A comment within the usage chunk goes with it; one before it stays.
type usageFilter struct {
	// usage is what the chunk that was taken out said; found tells that there
	// was one that could be read.
	usage usage
	found bool

	held []byte // of the event at hand, while verdict is undecided

	verdict verdict
	line    lineState
	// matched counts the bytes of "data" that the line at hand began with.
	matched int
	// afterCR: the last byte was a CR, so that an LF belongs to it. swallow:
	// the CR ended an event that was taken out.
	afterCR, swallow bool

	data chunkState
}

// verdict is what is known of the event at hand.
type verdict uint8

const (
	undecided verdict = iota // it may be the usage chunk
	passes                   // it is not
)

// lineState is where in a line of an event the next byte stands.
type lineState uint8

const (
	lineStart lineState = iota
	lineName            // within a field's name
	lineSpace           // behind "data:", where one space may be
	lineData            // within data
	lineOther           // within another field
	lineComment
)

// Append appends to dst what can be passed on now that p has come.
func (f *usageFilter) Append(dst, p []byte) []byte {
	for i := 0; i < len(p); {
		if f.verdict == passes && f.line != lineStart {
			// Nothing but the end of the line matters.
			k := bytes.IndexAny(p[i:], "\r\n")
			if k < 0 {
				f.afterCR = false
				return append(dst, p[i:]...)
			}
			dst = append(dst, p[i:i+k]...)
			i += k
			if k > 0 {
				f.afterCR = false
			}
		}
		dst = f.step(dst, p[i])
		i++
	}
	return dst
}

// Flush appends to dst what is held at the end of the stream. The filter is
// then as good as new but for what it has found.
func (f *usageFilter) Flush(dst []byte) []byte {
	if !f.takeOut() {
		dst = append(dst, f.held...)
	}
	f.next()
	return dst
}

// next makes the filter ready for the next event.
func (f *usageFilter) next() {
	held := f.held[:0]
	if cap(held) > keepRest {
		held = nil
	}
	*f = usageFilter{usage: f.usage, found: f.found, held: held}
}

// step takes one byte.
func (f *usageFilter) step(dst []byte, b byte) []byte {
	if f.afterCR {
		f.afterCR = false
		if b == '\n' {
			// The second half of a line's end that has been dealt with.
			switch {
			case f.swallow:
				f.swallow = false
				return dst
			case f.verdict == undecided && len(f.held) > 0:
				return f.hold(dst, b)
			}
			return append(dst, b)
		}
		f.swallow = false
	}
	if b == '\r' || b == '\n' {
		f.afterCR = b == '\r'
		return f.endLine(dst, b)
	}
	switch f.line {
	case lineStart:
		switch {
		case b == ':' && len(f.held) == 0:
			// A comment before an event is none of its business.
			f.line = lineComment
			return append(dst, b)
		case b == ':':
			f.line = lineComment
		case b == 'd':
			f.line, f.matched = lineName, 1
		default:
			f.line = lineOther
		}
	case lineName:
		const data = "data"
		switch {
		case f.matched < len(data) && b == data[f.matched]:
			f.matched++
		case f.matched == len(data) && b == ':':
			f.line = lineSpace
		default:
			f.line = lineOther
		}
	case lineSpace:
		f.line = lineData
		if b != ' ' && !f.data.step(b) {
			f.verdict = passes
		}
	case lineData:
		if !f.data.step(b) {
			f.verdict = passes
		}
	case lineComment:
		if len(f.held) == 0 {
			return append(dst, b)
		}
	}
	return f.hold(dst, b)
}

// endLine takes the byte that ends a line, which may end an event.
func (f *usageFilter) endLine(dst []byte, b byte) []byte {
	switch f.line {
	case lineStart:
		out := f.verdict == undecided && f.takeOut()
		if !out {
			dst = append(append(dst, f.held...), b)
		}
		f.next()
		f.afterCR = b == '\r'
		f.swallow = out && f.afterCR
		return dst
	case lineComment:
		f.line = lineStart
		if len(f.held) == 0 {
			return append(dst, b)
		}
		return f.hold(dst, b)
	case lineSpace, lineData:
		// Lines of data are joined by LF.
		if !f.data.step('\n') {
			f.verdict = passes
		}
	}
	f.line = lineStart
	return f.hold(dst, b)
}

// hold keeps b back, or passes it on with all that was held when the event is
// known to pass.
func (f *usageFilter) hold(dst []byte, b byte) []byte {
	if f.verdict == undecided {
		if len(f.held) < maxUsageEvent {
			f.held = append(f.held, b)
			return dst
		}
		f.verdict = passes
	}
	dst = append(append(dst, f.held...), b)
	f.held = f.held[:0]
	return dst
}

// takeOut reports whether the event that is held, and over, is the usage chunk,
// and remembers what it says.
func (f *usageFilter) takeOut() bool {
	if !f.data.choices || !f.data.usage || f.data.at != chunkEnd {
		return false
	}
	data := eventData(f.held)
	if !isUsageChunk(data) {
		return false
	}
	if u, ok := findUsage(data); ok {
		f.usage, f.found = u, true
	}
	return true
}

// chunkState follows the JSON of an event far enough to say early that it is
// not the usage chunk. It takes invalid JSON for valid at times, never the
// other way round; isUsageChunk has the last word.
type chunkState struct {
	at      chunkPlace
	depth   int  // of the value at hand
	escaped bool // the last byte in a string was a backslash
	// name holds the first bytes of the name at hand, n counts all of them.
	name [8]byte
	n    int
	// choices and usage were there, as the usage chunk has them.
	choices, usage bool
}

type chunkPlace uint8

const (
	chunkBegin   chunkPlace = iota
	chunkName               // before a member's name, or the end
	chunkInName             // within it
	chunkColon              // before the colon
	chunkValue              // before a value
	chunkChoices            // within the array of choices, which must be empty
	chunkString             // within a string, depth levels within the value
	chunkScalar             // within a number or literal of the object itself
	chunkNested             // within the value, outside of strings
	chunkComma              // behind a value
	chunkEnd
)

// step takes one byte and reports whether this can still be the usage chunk.
func (c *chunkState) step(b byte) bool {
	space := b == ' ' || b == '\t' || b == '\n' || b == '\r'
	switch c.at {
	case chunkBegin:
		if space {
			return true
		}
		c.at = chunkName
		return b == '{'
	case chunkName:
		switch {
		case space, b == ',': // a misplaced comma is not noticed here
		case b == '"':
			c.at, c.n, c.escaped = chunkInName, 0, false
		case b == '}':
			c.at = chunkEnd
			return c.choices && c.usage
		default:
			return false
		}
	case chunkInName:
		switch {
		case b == '"' && !c.escaped:
			c.at = chunkColon
			return true
		case c.n < len(c.name):
			c.name[c.n] = b
		}
		c.n++
		c.escaped = b == '\\' && !c.escaped
	case chunkColon:
		if b == ':' {
			c.at = chunkValue
			return true
		}
		return space
	case chunkValue:
		if space {
			return true
		}
		switch c.member() {
		case "choices":
			c.at = chunkChoices
			return b == '['
		case "usage":
			if b != '{' {
				return false
			}
			c.usage = true
		}
		switch b {
		case '"':
			c.at, c.depth, c.escaped = chunkString, 0, false
		case '{', '[':
			c.at, c.depth = chunkNested, 1
		default:
			c.at = chunkScalar
		}
	case chunkChoices:
		if b == ']' {
			c.choices, c.at = true, chunkComma
			return true
		}
		return space
	case chunkString:
		switch {
		case c.escaped:
			c.escaped = false
		case b == '\\':
			c.escaped = true
		case b == '"' && c.depth == 0:
			c.at = chunkComma
		case b == '"':
			c.at = chunkNested
		}
	case chunkNested:
		switch b {
		case '"':
			c.at, c.escaped = chunkString, false
		case '{', '[':
			c.depth++
		case '}', ']':
			if c.depth--; c.depth == 0 {
				c.at = chunkComma
			}
		}
	case chunkScalar, chunkComma:
		switch {
		case b == ',':
			c.at = chunkName
		case b == '}':
			c.at = chunkEnd
			return c.choices && c.usage
		case c.at == chunkComma:
			return space
		}
	case chunkEnd:
		return space
	}
	return true
}

func (c *chunkState) member() string {
	if c.n > len(c.name) {
		return ""
	}
	switch string(c.name[:c.n]) {
	case "choices":
		return "choices"
	case "usage":
		return "usage"
	}
	return ""
}

// isUsageChunk reports whether data is a JSON object in which "choices" is an
// empty array and "usage" an object.
func isUsageChunk(data []byte) bool {
	s := scanner{b: data}
	s.space()
	if s.peek() != '{' {
		return false
	}
	s.i++
	s.depth = 1
	choices, usage := false, false
	for more := s.first(); more; {
		name, err := s.quoted()
		start := s.i
		if err != nil || s.value() != nil {
			return false
		}
		value := data[start:s.i]
		switch string(name) {
		case `"choices"`:
			if value[0] != '[' || skipSpace(value[1:])[0] != ']' {
				return false
			}
			choices = true
		case `"usage"`:
			if value[0] != '{' {
				return false
			}
			usage = true
		}
		if more, err = s.next(); err != nil {
			return false
		}
	}
	return choices && usage && s.rest() == nil
}

// eventData returns the data of an event, its lines joined by LF. It aliases
// event when that has one line of data.
func eventData(event []byte) (data []byte) {
	lines := 0
	for len(event) > 0 {
		line := event
		if i := bytes.IndexAny(event, "\r\n"); i >= 0 {
			line, event = event[:i], event[i+1:]
		} else {
			event = nil
		}
		value, ok := bytes.CutPrefix(line, []byte("data:"))
		if !ok {
			continue
		}
		value = bytes.TrimPrefix(value, []byte(" "))
		if lines++; lines == 1 {
			data = value[:len(value):len(value)]
		} else {
			data = append(append(data, '\n'), value...)
		}
	}
	return data
}
