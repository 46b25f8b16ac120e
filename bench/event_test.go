package bench

import (
	"bufio"
	"encoding/json/v2"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/iotest"
)

// tell reads all of a stream and tells what its events are.
func tell(r io.Reader, begun bool) string {
	e := events{r: bufio.NewReaderSize(r, 16)}
	var told []string
	for {
		event, err := e.next(begun)
		switch {
		case errors.Is(err, io.EOF):
			return strings.Join(append(told, "end"), ", ")
		case errors.Is(err, errGarbage):
			return strings.Join(append(told, "garbage"), ", ")
		case errors.Is(err, errErrorEvent):
			return strings.Join(append(told, "error"), ", ")
		case err != nil:
			return strings.Join(append(told, err.Error()), ", ")
		}
		var is []string
		if event.token {
			is = append(is, "token")
		}
		if event.finished {
			is = append(is, "finished")
		}
		if u := event.usage; u != nil {
			is = append(is, fmt.Sprintf("%d+%d tokens, %d cached", u.Input, u.Output, u.cached()))
		}
		if event.done {
			is = append(is, "done")
		}
		if is == nil {
			is = []string{"nothing"}
		}
		told = append(told, strings.Join(is, " "))
	}
}

func TestEvents(t *testing.T) {
	f := func(in, want string) {
		t.Helper()
		for _, begun := range []bool{false, true} {
			if got := tell(strings.NewReader(in), begun); got != want {
				t.Errorf("begun %v: %q is %s, want %s", begun, in, got, want)
			}
			if got := tell(iotest.OneByteReader(strings.NewReader(in)), begun); got != want {
				t.Errorf("begun %v, byte by byte: %q is %s, want %s", begun, in, got, want)
			}
		}
	}
	one := func(json, want string) {
		t.Helper()
		f("data: "+json+"\n\n", want+", end")
	}
	f("", "end")
	f("\n\r\n: a comment\n\nevent: message\nid: 7\nretry: 10\n", "end")
	f("data: [DONE]\n\n", "done, end")
	f("data:[DONE]\r\n\r\n", "done, end")
	f("data: [DONE]", "done, end") // the last line has no end

	// vLLM: the role comes first, and is no token.
	one(`{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}`, "nothing")
	one(`{"choices":[{"index":0,"delta":{"content":"a"},"logprobs":null,"finish_reason":null,"token_ids":null}]}`, "token")
	one(`{"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": null}]}`, "token") // as Python writes it
	one(`{"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"length"}]}`, "token finished")
	one(`{"choices":[{"index":0,"delta":{"content":""},"finish_reason":"stop"}]}`, "finished")
	one(`{"choices":[{"index":0,"delta":{"reasoning":"a"}}]}`, "token")
	one(`{"choices":[{"index":0,"delta":{"content":null,"reasoning_content":"a"}}]}`, "token")
	one(`{"choices":[{"index":0,"delta":{"content":null,"tool_calls":[{"index":0,"function":{"arguments":"{"}}]}}]}`, "token")
	one(`{"choices":[{"index":0,"text":"a","finish_reason":null}]}`, "token")
	one(`{"choices":[{"index":0,"text":"","finish_reason":"length"}]}`, "finished")
	one(`{"choices":[{"index":0,"text":""},{"index":1,"text":"b"}]}`, "token")
	one(`{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":7}}`, "5+7 tokens, 0 cached")
	one(`{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":4}}}`, "5+7 tokens, 4 cached")
	one(`{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":7,"prompt_tokens_details":null}}`, "5+7 tokens, 0 cached")
	one(`{"choices":[{"delta":{"content":"a"}}],"usage":{"prompt_tokens":5,"completion_tokens":1}}`, "token 5+1 tokens, 0 cached")
	one(`{"choices":[{"delta":{"content":"a"}}],"usage":null}`, "token")
	// What a text quotes is not what the event says.
	one(`{"choices":[{"delta":{"content":"","x":"\"content\":\"a\""}}]}`, "nothing")
	one(`{"choices":[{"delta":{"content":"\"finish_reason\":\"stop\" \"usage\":{} \"error\":1"}}]}`, "token")
	f("data: {\"choices\":[{\"text\":\""+strings.Repeat("long ", 1000)+"\"}]}\n\n", "token, end")

	f(`data: {"error":{"message":"out of memory"}}`+"\n\n", "error")
	f("data: {\"choices\":[\n\n", "garbage")
	f("data: \n\n", "garbage")
	f("data: [1]\n\n", "garbage")
	f("data: null x\n\n", "garbage")
	f("<html>\n", "garbage")
	f(`{"choices":[]}`+"\n", "garbage")
}

// A line that never ends is not held for ever.
func TestEventsAreBounded(t *testing.T) {
	endless := io.MultiReader(strings.NewReader("data: "), &repeat{'x'})
	if got := tell(endless, true); got != "garbage" {
		t.Errorf("a line without an end is %s", got)
	}
}

type repeat struct{ b byte }

func (r *repeat) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = r.b
	}
	return len(p), nil
}

// What is taken for a token without being parsed is one when it is parsed.
func FuzzPlainToken(f *testing.F) {
	f.Add(`{"choices":[{"delta":{"content":"a"},"finish_reason":null}]}`)
	f.Add(`{"choices":[{"text": "a"}],"usage":null}`)
	f.Add(`{"choices":[{"text":""}],"x":"\"content\":\"a\""}`)
	f.Add(`{"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}`)
	f.Fuzz(func(t *testing.T, text string) {
		if !plainToken([]byte(text)) {
			return
		}
		// Of JSON in which what looks like a token's text is where a token has it.
		var v struct {
			Choices []struct {
				Delta *struct {
					Content *string `json:"content"`
				} `json:"delta"`
				Text *string `json:"text"`
			} `json:"choices"`
		}
		if json.Unmarshal([]byte(text), &v) != nil || len(v.Choices) != 1 || strings.Count(text, `"content"`)+strings.Count(text, `"text"`) != 1 {
			return
		}
		c := v.Choices[0]
		if (c.Delta == nil || c.Delta.Content == nil) && c.Text == nil {
			return
		}
		if e, err := parseEvent([]byte(text)); err == nil && (!e.token || e.finished || e.usage != nil) {
			t.Errorf("%q is taken for a token, and is %+v", text, e)
		}
	})
}
