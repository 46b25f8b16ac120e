package bench

import (
	"bufio"
	"bytes"
	"encoding/json/v2"
	"errors"
	"fmt"
	"io"
	"strings"
)

// events reads an answer that is streamed as server-sent events. One goroutine uses
// it, for one answer; what an event points to is valid until the next call.
type events struct {
	r *bufio.Reader
	// long is a line that is longer than r's buffer.
	long []byte
}

// event is one of an answer's. The zero value says nothing.
type event struct {
	// token: it brings a part of what is generated. finished: the choice ends with
	// it. done: no event follows.
	token, finished, done bool
	usage                 *tokens
	// fingerprint is which engine and configuration it says that it is of, if it was
	// read in full.
	fingerprint string
}

// tokens is how an engine has counted.
type tokens struct {
	Input   int `json:"prompt_tokens"`
	Output  int `json:"completion_tokens"`
	Details *struct {
		Cached int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

func (t *tokens) cached() int {
	if t.Details == nil {
		return 0
	}
	return t.Details.Cached
}

// answerPart is a piece of an answer, or a whole one, of any of the APIs.
type answerPart struct {
	Choices []struct {
		Delta   said    `json:"delta"`
		Message said    `json:"message"`
		Text    string  `json:"text"`
		Reason  *string `json:"finish_reason"`
	} `json:"choices"`
	Usage       *tokens `json:"usage"`
	Fingerprint string  `json:"system_fingerprint"`
	Error       any     `json:"error"`
}

// said is what a message or a part of one says. Engines have two names for what a
// model thinks.
type said struct {
	Content          string `json:"content"`
	Reasoning        string `json:"reasoning"`
	ReasoningContent string `json:"reasoning_content"`
	Refusal          string `json:"refusal"`
	ToolCalls        []any  `json:"tool_calls"`
}

func (s *said) anything() bool {
	return s.Content != "" || s.Reasoning != "" || s.ReasoningContent != "" || s.Refusal != "" || len(s.ToolCalls) > 0
}

// maxEvent bounds what is held of one event.
const maxEvent = 4 << 20

var (
	// errGarbage is the error of what is no answer.
	errGarbage = errors.New("not an answer")
	// errErrorEvent is that of an engine that has told of an error in a stream.
	errErrorEvent = errors.New("the engine has told of an error")
)

// next returns the next event. Before the first token each is read in full, and later
// any that is not plainly a token. io.EOF is the end of the body, where no
// event may follow.
func (e *events) next(begun bool) (event, error) {
	for {
		line, err := e.line()
		if err != nil {
			return event{}, err
		}
		data, ok := bytes.CutPrefix(line, []byte("data:"))
		if !ok {
			// Comments, the names of events, and what separates them.
			if len(line) == 0 || line[0] == ':' || bytes.HasPrefix(line, []byte("event:")) ||
				bytes.HasPrefix(line, []byte("id:")) || bytes.HasPrefix(line, []byte("retry:")) {
				continue
			}
			return event{}, fmt.Errorf("%w: a line %.100q", errGarbage, line)
		}
		data = bytes.TrimSpace(data)
		switch {
		case string(data) == "[DONE]":
			return event{done: true}, nil
		case begun && plainToken(data):
			return event{token: true}, nil
		}
		return parseEvent(data)
	}
}

// plainToken reports whether an event is seen to be a token and nothing else without
// being parsed. None of what it looks for can stand inside a JSON string, where quotes
// are escaped.
func plainToken(data []byte) bool {
	has := func(key string) bool {
		i := bytes.Index(data, []byte(key))
		if i < 0 {
			return false
		}
		rest := bytes.TrimLeft(data[i+len(key):], " ")
		return len(rest) > 1 && rest[0] == '"' && rest[1] != '"'
	}
	if len(data) == 0 || data[len(data)-1] != '}' || !has(`"content":`) && !has(`"text":`) {
		return false
	}
	if bytes.Contains(data, []byte(`"usage":`)) && !bytes.Contains(data, []byte(`"usage":null`)) {
		return false
	}
	return !has(`"finish_reason":`) && !bytes.Contains(data, []byte(`"error":`))
}

func parseEvent(data []byte) (event, error) {
	p, err := parsePart(data)
	if err != nil {
		return event{}, err
	}
	return p.event(), nil
}

func (p *answerPart) event() event {
	e := event{usage: p.Usage, fingerprint: p.Fingerprint}
	for i := range p.Choices {
		c := &p.Choices[i]
		e.token = e.token || c.Text != "" || c.Delta.anything() || c.Message.anything()
		e.finished = e.finished || c.Reason != nil && *c.Reason != ""
	}
	return e
}

func parsePart(data []byte) (p answerPart, err error) {
	if err := json.Unmarshal(data, &p); err != nil {
		return p, fmt.Errorf("%w: %v in %.200q", errGarbage, err, data)
	}
	if p.Error != nil {
		return p, fmt.Errorf("%w: %.300s", errErrorEvent, strings.ReplaceAll(string(data), "\n", " "))
	}
	return p, nil
}

// line returns the next line without its end, which the body's end stands for.
func (e *events) line() ([]byte, error) {
	e.long = e.long[:0]
	for {
		part, err := e.r.ReadSlice('\n')
		switch {
		case err == nil && len(e.long) == 0:
			return bytes.TrimRight(part, "\r\n"), nil
		case err == nil:
			e.long = append(e.long, part...)
			return bytes.TrimRight(e.long, "\r\n"), nil
		case errors.Is(err, bufio.ErrBufferFull):
			if e.long = append(e.long, part...); len(e.long) > maxEvent {
				return nil, fmt.Errorf("%w: a line over %d bytes: %.100q", errGarbage, maxEvent, e.long)
			}
		case errors.Is(err, io.EOF) && len(part)+len(e.long) > 0:
			return bytes.TrimRight(append(e.long, part...), "\r\n"), nil
		default:
			return nil, err
		}
	}
}
