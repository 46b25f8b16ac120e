package bench

import (
	"bytes"
	"fmt"
	"strconv"
)

// A call is one small chat request that is answered in one piece. Its number
// is the request's seed, and the answer's id: an answer that is damaged, or
// belongs to another call, therefore shows.

// callNumbers is how many different numbers calls have; they are 9 digits.
const callNumbers = 900_000_000

// numbered is a message with a number in it. One goroutine uses it.
type numbered struct {
	text []byte
	body int // where the body begins
	at   int // where the number is
}

// newNumbered puts a head in front of body, which holds one %d, where the
// number goes.
func newNumbered(head, body string) *numbered {
	body = fmt.Sprintf(body, callNumbers)
	text := fmt.Appendf(nil, "%scontent-length: %d\r\n\r\n%s", head, len(body), body)
	return &numbered{text: text, body: len(text) - len(body), at: bytes.LastIndex(text, strconv.AppendInt(nil, callNumbers, 10))}
}

// with returns the message with number n, valid until the next call.
func (m *numbered) with(n uint32) []byte {
	for i := 8; i >= 0; i-- {
		m.text[m.at+i] = '0' + byte(n%10)
		n /= 10
	}
	return m.text
}

func (m *numbered) bodyLength() int { return len(m.text) - m.body }

// newCall is the request: about a kilobyte, as a chat in its second turn is.
func newCall() *numbered {
	return newNumbered("POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nuser-agent: OpenAI/Python 2.8.0\r\n"+
		"accept: application/json\r\nauthorization: Bearer bench-key\r\ncontent-type: application/json\r\n",
		`{"model":"`+model+`","messages":[`+
			`{"role":"system","content":"You are the assistant of a library. Answer briefly, in the language of the question, and say when you do not know. `+
			`Never invent titles, authors or shelf marks; the catalogue is the only source that counts. Opening hours are 9 to 18 on weekdays."},`+
			`{"role":"user","content":"I am looking for an introduction to operating systems that explains scheduling and virtual memory well. It should not be older than ten years."},`+
			`{"role":"assistant","content":"There are two that fit: a textbook in three parts (virtualisation, concurrency, persistence), and a shorter one that follows a small teaching kernel line by line. Both are on the second floor."},`+
			`{"role":"user","content":"The one with the kernel sounds right. Is it there at the moment, and for how long may I keep it? I would also like to know whether the library has a room with a machine on which I could try the examples."}`+
			`],"temperature":0.7,"top_p":0.95,"max_tokens":128,"seed":%d}`)
}

// newAnswer is the engine's answer: about half a kilobyte of body.
func newAnswer() *numbered {
	return newNumbered("HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: application/json\r\n",
		`{"id":"chatcmpl-%d","object":"chat.completion","created":1700000000,"model":"`+model+`","choices":[{"index":0,`+
			`"message":{"role":"assistant","content":"Yes, one copy is on its shelf now. You may keep it for four weeks and extend that twice. Room 12 has six machines; ask at the desk for a key."},`+
			`"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":201,"completion_tokens":38,"total_tokens":239,"prompt_tokens_details":{"cached_tokens":160}}}`)
}

// answered is an answer as the caller reads it. Its body points into the
// buffer it was parsed from, which chunked framing is taken out of.
type answered struct {
	status int
	close  bool // the connection is not to be used again
	body   []byte
}

// maxAnswer bounds what the caller buffers of an answer.
const maxAnswer = 64 << 10

// parseAnswer reads the answer that b begins with. n is its length, or 0 when
// more bytes are needed.
func parseAnswer(b []byte) (a answered, n int, err error) {
	end := bytes.Index(b, []byte("\r\n\r\n"))
	if end < 0 {
		if len(b) > maxResponseHead {
			return a, 0, fmt.Errorf("a response head over %d bytes: %.200q", maxResponseHead, b)
		}
		return a, 0, nil
	}
	head, rest := b[:end+2], b[end+4:]
	if len(head) < 12 || string(head[:9]) != "HTTP/1.1 " {
		return a, 0, fmt.Errorf("not an HTTP/1.1 response: %.100q", head)
	}
	var ok bool
	if a.status, ok = decimal(head[9:12]); !ok {
		return a, 0, fmt.Errorf("not an HTTP/1.1 response: %.100q", head)
	}
	connection, _ := field(head, "connection")
	a.close = bytes.EqualFold(connection, []byte("close"))
	if v, chunked := field(head, "transfer-encoding"); chunked {
		if !bytes.EqualFold(v, []byte("chunked")) {
			return a, 0, fmt.Errorf("transfer-encoding %.40q", v)
		}
		body, length, err := unchunk(rest)
		if err != nil || length == 0 {
			return a, 0, err
		}
		a.body = body
		return a, end + 4 + length, nil
	}
	v, _ := field(head, "content-length")
	length, ok := decimal(v)
	if !ok || length > maxAnswer {
		return a, 0, fmt.Errorf("content-length %.40q", v)
	}
	if len(rest) < length {
		return a, 0, nil
	}
	a.body = rest[:length]
	return a, end + 4 + length, nil
}

// unchunk returns what the chunks hold that b begins with, and their length; 0
// when more bytes are needed. The body is written over b only when it is whole.
func unchunk(b []byte) (body []byte, n int, err error) {
	// The first pass finds the end, the second moves the data together.
	for range 2 {
		moved, whole := 0, n > 0
		for n = 0; ; {
			line, _, ok := bytes.Cut(b[n:], []byte("\r\n"))
			if !ok {
				return nil, 0, nil
			}
			size, err := strconv.ParseUint(string(line), 16, 31)
			if err != nil || size > maxAnswer {
				return nil, 0, fmt.Errorf("chunk size %.40q", line)
			}
			data := n + len(line) + 2
			n = data + int(size) + 2
			if len(b) < n {
				return nil, 0, nil
			}
			if string(b[n-2:n]) != "\r\n" {
				return nil, 0, fmt.Errorf("a chunk ends with %q", b[n-2:n])
			}
			if size == 0 {
				break
			}
			if whole {
				copy(b[moved:], b[data:data+int(size)])
			}
			moved += int(size)
		}
		body = b[:moved]
	}
	return body, n, nil
}
