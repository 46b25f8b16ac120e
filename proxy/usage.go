package proxy

import (
	"bytes"
	"math"

	"github.com/inferrail/inferrail/policy"
)

// usage is what an engine counted for one request. It is a value; the zero
// value counts nothing.
type usage struct {
	// prompt includes cached, the part of it that the engine had already.
	prompt, completion, cached uint64
	// cachedTold: the engine has said what cached is. It may be 0 then, too.
	cachedTold bool
	// partial: the engine has said nothing of the prompt. The last event of a
	// stream of the messages API may name the answer's tokens alone.
	partial bool
}

// charge is what a request has cost for which reserved was reserved.
func (u usage) charge(reserved policy.Charge) policy.Charge {
	c := policy.Charge{
		Input:  int64(min(u.prompt, math.MaxInt64)),
		Output: int64(min(u.completion, math.MaxInt64)),
	}
	if u.partial {
		c.Input = reserved.Input
	}
	return c
}

// findUsage looks for what an engine has counted in the last bytes of a
// response, chunk framing included: the last "usage" object that holds token
// counts, else llama.cpp's last "timings". Reading the tail only costs the same
// for a stream of any length. Text that an engine has generated cannot pass for
// it: in a JSON string its quotes have backslashes.
//
// All of these are understood:
//
//   - prompt_tokens and completion_tokens, cached prompt tokens in
//     prompt_tokens_details: chat and completions
//   - prompt_tokens and total_tokens, or total_tokens alone: embeddings, rerank
//   - input_tokens and output_tokens, cached ones in input_tokens_details: the
//     responses API and transcriptions
//   - the same with cache_read_input_tokens and cache_creation_input_tokens,
//     which are not in input_tokens: the messages API
//   - prompt_n, cache_n and predicted_n of timings: llama.cpp
func findUsage(tail []byte) (u usage, ok bool) {
	var scratch [2 * TailBytes]byte
	tail = unframe(scratch[:0], tail)
	rest := tail
	for {
		var object []byte
		if object, rest = lastObject(rest, `"usage"`); object == nil {
			break
		}
		found, ok := readUsage(object)
		if !ok {
			continue
		}
		if !found.partial {
			return complete(found, tail), true
		}
		// An earlier one may have the rest.
		for object, rest = lastObject(rest, `"usage"`); object != nil; object, rest = lastObject(rest, `"usage"`) {
			if first, ok := readUsage(object); ok && !first.partial {
				found.prompt, found.cached, found.cachedTold, found.partial = first.prompt, first.cached, first.cachedTold, false
				break
			}
		}
		return complete(found, tail), true
	}
	return lastTimings(tail)
}

// complete adds what llama.cpp's timings know beyond its usage.
func complete(u usage, tail []byte) usage {
	if u.cached > 0 && !u.partial {
		return u
	}
	if t, ok := lastTimings(tail); ok {
		u.cached, u.cachedTold = max(u.cached, t.cached), u.cachedTold || t.cachedTold
		if u.partial {
			u.prompt, u.partial = t.prompt, false
		}
		u.cached = min(u.cached, u.prompt)
	}
	return u
}

func lastTimings(tail []byte) (usage, bool) {
	for {
		var object []byte
		if object, tail = lastObject(tail, `"timings"`); object == nil {
			return usage{}, false
		}
		if u, ok := readTimings(object); ok {
			return u, true
		}
	}
}

// lastIndex is bytes.LastIndex, which looks at one byte after another, where
// bytes.Index looks at 32 at a time: of a text that occurs seldom it takes an eighth.
func lastIndex(b, text []byte) int {
	last := -1
	for from := 0; ; from = last + 1 {
		i := bytes.Index(b[from:], text)
		if i < 0 {
			return last
		}
		last = from + i
	}
}

// lastObject returns b from the last object on that is the value of the member
// quoted, and what comes before that member. A nil object means there is none.
func lastObject(b []byte, quoted string) (object, before []byte) {
	for {
		i := lastIndex(b, []byte(quoted))
		if i < 0 {
			return nil, nil
		}
		value := skipSpace(b[i+len(quoted):])
		b = b[:i]
		if i > 0 && b[i-1] == '\\' || len(value) == 0 || value[0] != ':' {
			continue
		}
		if value = skipSpace(value[1:]); len(value) > 0 && value[0] == '{' {
			return value, b
		}
	}
}

// readUsage reads a usage object at the start of b. ok is false when it is not
// whole or counts nothing.
func readUsage(b []byte) (u usage, ok bool) {
	s := scanner{b: b}
	var prompt, completion, total, cached, read, created count
	answerAlone := false // as the messages API does
	s.i, s.depth = 1, 1
	for more := s.first(); more; {
		name, err := s.quoted()
		if err != nil {
			return usage{}, false
		}
		start := s.i
		switch string(name) {
		case `"prompt_tokens_details"`, `"input_tokens_details"`:
			cached.or(s.details())
		}
		s.i = start
		if s.value() != nil {
			return usage{}, false
		}
		value := b[start:s.i]
		switch string(name) {
		case `"prompt_tokens"`, `"input_tokens"`:
			prompt.read(value)
		case `"completion_tokens"`, `"output_tokens"`:
			completion.read(value)
			answerAlone = string(name) == `"output_tokens"`
		case `"total_tokens"`:
			total.read(value)
		case `"cache_read_input_tokens"`:
			read.read(value)
		case `"cache_creation_input_tokens"`:
			created.read(value)
		}
		if more, err = s.next(); err != nil {
			return usage{}, false
		}
	}
	switch {
	case !prompt.there && !completion.there && !total.there:
		return usage{}, false
	case !prompt.there && !total.there:
		return usage{completion: completion.n, partial: true}, answerAlone
	case !prompt.there:
		prompt.n = total.n - min(total.n, completion.n)
	case !completion.there && !total.there:
		return usage{}, false
	case !completion.there:
		completion.n = total.n - min(total.n, prompt.n)
	}
	cached.or(read)
	cached.n = min(cached.n, prompt.n+read.n+created.n)
	return usage{prompt: prompt.n + read.n + created.n, completion: completion.n, cached: cached.n, cachedTold: cached.there}, true
}

// details returns cached_tokens of the object that comes next.
func (s *scanner) details() (cached count) {
	if s.peek() != '{' {
		return cached
	}
	depth := s.depth
	defer func() { s.depth = depth }()
	s.i++
	s.depth++
	for more := s.first(); more; {
		name, err := s.quoted()
		start := s.i
		if err != nil || s.value() != nil {
			return count{}
		}
		if string(name) == `"cached_tokens"` {
			cached.read(s.b[start:s.i])
		}
		if more, err = s.next(); err != nil {
			return count{}
		}
	}
	return cached
}

// readTimings reads a timings object at the start of b.
func readTimings(b []byte) (u usage, ok bool) {
	s := scanner{b: b}
	var prompt, cached, predicted count
	s.i, s.depth = 1, 1
	for more := s.first(); more; {
		name, err := s.quoted()
		start := s.i
		if err != nil || s.value() != nil {
			return usage{}, false
		}
		value := b[start:s.i]
		switch string(name) {
		case `"prompt_n"`:
			prompt.read(value)
		case `"cache_n"`:
			cached.read(value)
		case `"predicted_n"`:
			predicted.read(value)
		}
		if more, err = s.next(); err != nil {
			return usage{}, false
		}
	}
	u = usage{prompt: prompt.n + cached.n, completion: predicted.n, cached: cached.n, cachedTold: cached.there}
	return u, prompt.there && predicted.there
}

// quoted skips a member's name and colon, up to its value, and returns the name
// as it stands, in quotes.
func (s *scanner) quoted() (name []byte, err error) {
	start := s.i
	if _, err := s.str(); err != nil {
		return nil, err
	}
	name = s.b[start:s.i]
	s.space()
	if s.peek() != ':' {
		return nil, syntaxError(s.i)
	}
	s.i++
	s.space()
	return name, nil
}

// count is a number of tokens that an engine may have given.
type count struct {
	n     uint64
	there bool
}

// read takes a JSON value if it is a whole number that can be a count.
func (c *count) read(value []byte) {
	if len(value) > 9 {
		return // no prompt or answer has so many
	}
	n := uint64(0)
	for _, b := range value {
		if b < '0' || b > '9' {
			return
		}
		n = n*10 + uint64(b-'0')
	}
	*c = count{n, true}
}

// or takes other if nothing is there.
func (c *count) or(other count) {
	if !c.there {
		*c = other
	}
}

// unframe appends the end of a body to dst, as far as it fits, without the
// chunk framing that stands in it. An engine may end a chunk anywhere, within a
// number too. JSON and events hold no line of hexadecimal digits alone that
// ends in CRLF on both sides.
func unframe(dst, tail []byte) []byte {
	if !bytes.Contains(tail, crlf) {
		return tail
	}
	tail = tail[len(tail)-min(len(tail), cap(dst)):]
	for {
		i := bytes.Index(tail, crlf)
		if i < 0 {
			return append(dst, tail...)
		}
		end := i + 2
		for end < len(tail) {
			if _, ok := hexDigit(tail[end]); !ok {
				break
			}
			end++
		}
		if end > i+2 && bytes.HasPrefix(tail[end:], crlf) {
			dst = append(dst, tail[:i]...)
			tail = tail[end+2:]
			continue
		}
		dst = append(dst, tail[:i+2]...)
		tail = tail[i+2:]
	}
}

func skipSpace(b []byte) []byte {
	return bytes.TrimLeft(b, " \t\r\n")
}
