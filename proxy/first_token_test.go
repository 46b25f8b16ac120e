package proxy

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
)

// firstIn feeds a stream in pieces of n bytes, framed in chunks of m, or without
// framing when m is 0, and returns what was found and how many bytes of the stream
// were given until then.
func firstIn(stream string, n, m int) (s sighting, at int) {
	var t firstToken
	if m == 0 {
		for ; at < len(stream) && s == notYet; at += min(n, len(stream)-at) {
			s = t.find([]byte(stream[at:min(at+n, len(stream))]))
		}
		return s, at
	}
	var wire []byte
	for i := 0; i < len(stream); i += m {
		wire = append(wire, chunk(stream[i:min(i+m, len(stream))])...)
	}
	wire = append(wire, "0\r\n\r\n"...)
	var f Frames
	for i := 0; i < len(wire) && s == notYet; i += n {
		p := wire[i:min(i+n, len(wire))]
		s = t.findFramed(f, p)
		var data []byte
		data, _, _ = f.Decode(nil, p)
		at += len(data)
	}
	return s, at
}

// Each stream is written with a | where the first token is there, or an ! where it
// is clear that there will be none; without either that stays open.
func TestFirstToken(t *testing.T) {
	f := func(story string) {
		t.Helper()
		stream := strings.NewReplacer("|", "", "!", "").Replace(story)
		want, at := notYet, len(stream)
		if i := strings.IndexAny(story, "|!"); i >= 0 {
			want, at = tokenThere, i
			if story[i] == '!' {
				want = tokenNever
			}
		}
		for _, m := range []int{0, 1, 3, 7, 1000} {
			for n := 1; n <= len(stream)+1; n += 1 + n/4 {
				s, got := firstIn(stream, n, m)
				// It is found in the piece that has the byte which ends the event.
				if s != want || n == 1 && got != at || got < at {
					t.Fatalf("%q in pieces of %d, chunks of %d: %d after %d bytes, want %d after %d", stream, n, m, s, got, want, at)
				}
			}
		}
	}
	const role = `data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}` + "\n\n"
	f(role + "|data: {}\n\n")
	f("data: {}\r\n\r|\ndata: {}\r\n\r\n")
	f("data: {}\r\r|data")
	f("data:{\"a\":1}\n\n|")
	f("event: message_start\ndata: {}\n\n|event: ping\ndata: {}\n\n")
	f("id: 7\nretry: 3\n\ndata: x\n\n|")
	f("data: a\ndata: b\n\n|")
	f("data: {}") // it is not over
	f("\n\n\ndata: {}\n\n|")

	// What comes before.
	f(": keep-alive\n\n: keep-alive\n\n" + role + "|")
	f(":\n\n:\r\n\r\ndata: {}\n\n|")
	f("event: ping\ndata: {\"type\": \"ping\"}\n\nevent: message_start\ndata: {}\n\n|")
	f("event: response.created\ndata: {\"type\":\"response.created\"}\n\nevent: response.in_progress\ndata: {}\n\nevent: response.output_item.added\ndata: {}\n\n|")
	f("data: {}\nevent: response.queued\n\ndata: {}\n\n|")
	f(`data: {"choices":[{"delta":{"role":"assistant","content":null}}],"prompt_progress":{"total":9,"processed":4}}` + "\n\n" + role + "|")
	f(`data: {"a":"\"prompt_progress\":"}` + "\n\n|") // a text about it
	f(`data: {"a":"prompt_progress`)
	f(`data: ""prompt_progress"` + "\n\n" + `data: "prompt_progres"` + "\n\n|")

	// There will be none.
	f(`data: {"error":{"message":"no"}}` + "\n\n!data: [DONE]\n\n")
	f("data: {\"error\": \"x\"}\n\n!")
	f(": ping\n\nevent: error\ndata: {\"type\":\"error\"}\n\n!data: {}\n\n")
	f("event: response.created\ndata: {}\n\nevent: response.failed\ndata: {}\n\n!")
	f("data: [DONE]\n\n!")

	// Not what the head has announced: its first bytes are all there is.
	f("{|\"done\":false}\n")
	f("<|html>")
}

// An event that does not end does not keep the kernel waiting for ever.
func TestFirstTokenIsBounded(t *testing.T) {
	var ft firstToken
	p := bytes.Repeat([]byte("a"), 1<<10)
	if s := ft.find([]byte("data: ")); s != notYet {
		t.Fatal(s)
	}
	for n := 0; ; n += len(p) {
		if s := ft.find(p); s == tokenThere {
			break
		} else if n > longestEvent {
			t.Fatalf("%d after %d bytes", s, n)
		}
	}
}

func TestFirstTokenDoesNotAllocate(t *testing.T) {
	var wire []byte
	for i := range 20 {
		wire = append(wire, chunk(fmt.Sprintf(": ping %d\n\n", i))...)
	}
	wire = append(wire, chunk("data: {\"choices\":[]}\n\n")...)
	if n := testing.AllocsPerRun(100, func() {
		var ft firstToken
		if ft.findFramed(Frames{}, wire) != tokenThere {
			t.Error("not found")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// BenchmarkFirstToken is what is looked at of a stream whose first event is vLLM's.
func BenchmarkFirstToken(b *testing.B) {
	wire := []byte(chunk(`data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null,"prompt_text":null}` + "\n\n"))
	for b.Loop() {
		var ft firstToken
		if ft.findFramed(Frames{}, wire) != tokenThere {
			b.Fatal("not found")
		}
	}
}

// naiveFirst looks at a whole body as at lines and events.
func naiveFirst(body string) sighting {
	body = strings.ReplaceAll(strings.ReplaceAll(body, "\r\n", "\n"), "\r", "\n")
	lines := strings.Split(body, "\n")
	rest := lines[len(lines)-1] // it has no end
	early, failed, data := false, false, false
	for _, line := range lines[:len(lines)-1] {
		if line == "" {
			if failed {
				return tokenNever
			} else if data && !early {
				return tokenThere
			}
			early, failed, data = false, false, false
			continue
		}
		if !isField(line[0]) {
			return tokenThere
		}
		if name, ok := strings.CutPrefix(line, "event:"); ok {
			switch strings.TrimPrefix(name, " ") {
			case "ping", "response.created", "response.queued", "response.in_progress":
				early = true
			case "error", "response.failed":
				failed = true
			}
		}
		if value, ok := strings.CutPrefix(line, "data:"); ok {
			value = strings.TrimPrefix(value, " ")
			data = true
			early = early || strings.Contains(line, progressMember)
			failed = failed || strings.HasPrefix(value, `{"error":`) || value == "[DONE]"
		}
	}
	if rest != "" && !isField(rest[0]) {
		return tokenThere
	}
	return notYet
}

func FuzzFirstToken(f *testing.F) {
	f.Add(": x\n\ndata: {}\r\n\r\n", uint8(3))
	f.Add("event: ping\rdata: {}\r\revent: response.in_progress\ndata: [DONE]\n\n", uint8(1))
	f.Add("data: {\"a\":\"\",\"prompt_progress\":{}}\n\ndata: {\"error\":1}\n\n", uint8(2))
	f.Add("data:[DONE]\n\nx", uint8(9))
	f.Fuzz(func(t *testing.T, body string, piece uint8) {
		want := naiveFirst(body)
		for _, n := range []int{int(piece)%17 + 1, len(body) + 1} {
			for _, m := range []int{0, n%5 + 1} {
				if got, _ := firstIn(body, n, m); got != want {
					t.Fatalf("%q in pieces of %d, chunks of %d: %d, want %d", body, n, m, got, want)
				}
			}
		}
	})
}
