package proxy

import "bytes"

// firstToken finds where in a stream of server-sent events the first token is
// there. A response's relay owns it, and gives it the body without chunk framing,
// under the relay's mu. The zero value is at the beginning of a stream.
//
// Engines send other things first, some of them with the head. They do not count:
//
//   - comments, which keep the connection open (vLLM and llama.cpp, when asked to)
//   - the messages API's "ping", and the responses API's "response.created",
//     "response.queued" and "response.in_progress", which vLLM sends before anything
//     is computed
//   - chunks that tell how far the prefill is (llama.cpp's prompt_progress)
//
// A chat's chunk that has the role and no text does: vLLM, SGLang and llama.cpp
// send it when the first token is there, TGI has none. An event is looked at when
// it is over.
type firstToken struct {
	// start holds the first bytes of the line at hand, size counts all of them.
	start [40]byte
	size  int
	// afterCR: the last byte was a CR, so that an LF belongs to it.
	afterCR bool
	// data: the event at hand has some. early: it comes before the first token.
	// failed: it is an error, or the end of the stream.
	data, early, failed bool
	// matched counts the bytes of progressMember that the last bytes match.
	matched int
	// total counts the bytes of the event.
	total int
}

// sighting is what firstToken has found.
type sighting uint8

const (
	notYet sighting = iota
	tokenThere
	// tokenNever: the stream has failed, or ended, without one.
	tokenNever
)

// progressMember is in a chunk of llama.cpp that tells how far the prefill is. In a
// text that was generated its quotes would have backslashes.
const progressMember = `"prompt_progress"`

// longestEvent is how long an event is waited for to end.
const longestEvent = 64 << 10

// findFramed is find for bytes with their framing, of which f is the state at the
// first of them.
func (t *firstToken) findFramed(f Frames, p []byte) sighting {
	for len(p) > 0 && !f.Ended() {
		n, data, err := f.run(p)
		if err != nil {
			return notYet
		}
		if data {
			if s := t.find(p[:n]); s != notYet {
				return s
			}
		}
		p = p[n:]
	}
	return notYet
}

// find takes the next bytes of the body.
func (t *firstToken) find(p []byte) sighting {
	for len(p) > 0 {
		if t.afterCR {
			t.afterCR = false
			if p[0] == '\n' {
				p = p[1:]
				continue
			}
		}
		i := bytes.IndexAny(p, "\r\n")
		if i < 0 {
			i = len(p)
		}
		t.add(p[:i])
		if t.size > 0 && !isField(t.start[0]) {
			return tokenThere
		}
		if i == len(p) {
			break
		}
		t.afterCR = p[i] == '\r'
		p = p[i+1:]
		if t.size > 0 {
			t.endLine()
			continue
		}
		if s := t.endEvent(); s != notYet {
			return s
		}
	}
	if t.total > longestEvent {
		return tokenThere
	}
	return notYet
}

// isField reports whether a line may be one of an event, by its first byte: a
// comment, data, event, id or retry. A body of other lines is no stream of events:
// its first bytes are all that there is to go by.
func isField(b byte) bool { return b == ':' || b == 'd' || b == 'e' || b == 'i' || b == 'r' }

// add takes bytes of the line at hand.
func (t *firstToken) add(p []byte) {
	if t.size < len(t.start) {
		copy(t.start[t.size:], p)
	}
	t.size += len(p)
	t.total += len(p)
	for len(p) > 0 && t.matched < len(progressMember) {
		if t.matched == 0 {
			i := bytes.IndexByte(p, progressMember[0])
			if i < 0 {
				return
			}
			p = p[i:]
		}
		switch p[0] {
		case progressMember[t.matched]:
			t.matched++
		case progressMember[0]:
			t.matched = 1
		default:
			t.matched = 0
		}
		p = p[1:]
	}
}

var (
	eventField = []byte("event:")
	dataField  = []byte("data:")
)

// endLine looks at the line at hand, which is over.
func (t *firstToken) endLine() {
	line := t.start[:min(t.size, len(t.start))]
	whole := t.size <= len(t.start)
	if name, ok := bytes.CutPrefix(line, eventField); ok && whole {
		switch string(bytes.TrimPrefix(name, []byte(" "))) {
		case "ping", "response.created", "response.queued", "response.in_progress":
			t.early = true
		case "error", "response.failed":
			t.failed = true
		}
	}
	if value, ok := bytes.CutPrefix(line, dataField); ok {
		t.data = true
		value = bytes.TrimPrefix(value, []byte(" "))
		t.early = t.early || t.matched == len(progressMember)
		t.failed = t.failed || bytes.HasPrefix(value, []byte(`{"error":`)) || whole && string(value) == "[DONE]"
	}
	t.size, t.matched = 0, 0
}

// endEvent looks at the event at hand, which is over, and makes t ready for the
// next one.
func (t *firstToken) endEvent() sighting {
	data, early, failed := t.data, t.early, t.failed
	*t = firstToken{afterCR: t.afterCR}
	switch {
	case failed:
		return tokenNever
	case data && !early:
		return tokenThere
	}
	return notYet
}
