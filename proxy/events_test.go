package proxy

import (
	"bytes"
	"encoding/json"
	"math/rand/v2"
	"strings"
	"testing"
)

func TestAskUsage(t *testing.T) {
	f := func(body, want string) {
		t.Helper()
		c, err := scanCall([]byte(body))
		if err != nil {
			t.Errorf("%s: %v", body, err)
			return
		}
		var edits []edit
		if e, ok := askUsage([]byte(body), &c); ok {
			edits = append(edits, e)
		}
		pieces, length := cut(nil, []byte(body), edits)
		got := string(bytes.Join(pieces, nil))
		if got != want || length != len(want) || !json.Valid([]byte(got)) {
			t.Errorf("%s: got %s, want %s", body, got, want)
		}
		if again, err := scanCall([]byte(got)); err != nil {
			t.Errorf("%s: %v", got, err)
		} else if e, ok := askUsage([]byte(got), &again); ok {
			t.Errorf("%s: asked twice, with %+v", got, e)
		}
	}
	same := func(body string) {
		t.Helper()
		f(body, body)
	}
	f(`{"stream":true}`, `{"stream_options":{"include_usage":true},"stream":true}`)
	f("\n { \"stream\" : true }", "\n {\"stream_options\":{\"include_usage\":true}, \"stream\" : true }")
	f(`{"stream":true,"stream_options":null}`, `{"stream":true,"stream_options":{"include_usage":true}}`)
	f(`{"stream_options":{},"stream":true}`, `{"stream_options":{"include_usage":true},"stream":true}`)
	f(`{"stream_options":{ },"stream":true}`, `{"stream_options":{"include_usage":true },"stream":true}`)
	f(`{"stream":true,"stream_options":{"x":[1]}}`, `{"stream":true,"stream_options":{"include_usage":true,"x":[1]}}`)
	f(`{"stream":true,"stream_options":{"x":1,"include_usage": false ,"y":{}}}`, `{"stream":true,"stream_options":{"x":1,"include_usage": true ,"y":{}}}`)
	f(`{"stream":true,"stream_options":{"include_usage":null}}`, `{"stream":true,"stream_options":{"include_usage":true}}`)
	f(`{"stream":true,"stream_options":{"include_usage":0}}`, `{"stream":true,"stream_options":{"include_usage":true}}`)
	f(`{"stream":true,"stream_options":{"include_usage":"No"}}`, `{"stream":true,"stream_options":{"include_usage":true}}`)
	f(`{"stream":true,"stream_options":{"include_usage":true,"include_usage":false}}`, `{"stream":true,"stream_options":{"include_usage":true,"include_usage":true}}`)
	f(`{"stream":true,"stream_options":{"include_usage":true},"stream_options":{}}`, `{"stream":true,"stream_options":{"include_usage":true},"stream_options":{"include_usage":true}}`)
	same(`{"stream":true,"stream_options":{"include_usage":true}}`)
	same(`{"stream":true,"stream_options":{"include_usage":1}}`)
	same(`{"stream":true,"stream_options":{"include_usage":"yes"}}`)
	same(`{"stream":true,"stream_options":{"include_usage":{}}}`)
	same(`{"stream":true,"stream_options":"include_usage"}`)
	same(`{"stream":true,"stream_options":[{}]}`)
	same(`{"stream":true,"stream_options":true}`)
	same(`{"stream":false}`)
	same(`{}`)
	same(`{"stream":false,"stream_options":{}}`)
}

// A request may have its model rewritten as well, whatever comes first.
func TestCutComposesEdits(t *testing.T) {
	for _, body := range []string{
		`{"model":"alias","stream":true,"stream_options":{"include_usage":false},"z":1}`,
		`{"stream_options":{"include_usage":false},"stream":true,"model":"alias"}`,
		`{"stream":true,"model":"alias"}`,
	} {
		c, err := scanCall([]byte(body))
		if err != nil {
			t.Fatal(err)
		}
		e, ok := askUsage([]byte(body), &c)
		if !ok {
			t.Fatal(body)
		}
		var buf [5][]byte
		edits := [2]edit{{c.start, c.end, []byte(`"name"`)}, e}
		pieces, length := cut(buf[:0], []byte(body), edits[:])
		got := bytes.Join(pieces, nil)
		var v struct {
			Model   string
			Stream  bool
			Options struct {
				Usage bool `json:"include_usage"`
			} `json:"stream_options"`
		}
		if err := json.Unmarshal(got, &v); err != nil || v.Model != "name" || !v.Stream || !v.Options.Usage || length != len(got) {
			t.Errorf("%s: got %s, %d bytes, %v", body, got, length, err)
		}
		raw := []byte(body)
		if n := testing.AllocsPerRun(100, func() {
			e, _ := askUsage(raw, &c)
			edits := [2]edit{{c.start, c.end, usageMember}, e}
			cut(buf[:0], raw, edits[:])
		}); n > 0 {
			t.Errorf("%v allocations", n)
		}
	}
}

// streamParts are events of engines. taken marks those that go.
var streamParts = []struct {
	text  string
	taken bool
}{
	{text: "data: {\"id\":\"1\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\n"},
	{text: "data: {\"choices\":[{\"delta\":{\"content\":\"\\\"choices\\\":[],\\\"usage\\\":{\"}}],\"usage\":{\"prompt_tokens\":1}}\n\n"},
	{text: "data: {\"choices\":[{\"delta\":{}}],\"usage\":null}\n\n"},
	{text: "data: {\"choices\":[],\"usage\":null}\n\n"},
	{text: "data: {\"choices\":[],\"prompt_filter_results\":[{\"usage\":{}}]}\n\n"},
	{text: "data: {\"x\":{\"choices\":[],\"usage\":{}}}\n\n"},
	{text: "data: {\"choices\":[],\"usage\":[]}\n\n"},
	{text: "data: {\"choices\":[],\"usage\":{}\n\n"},
	{text: "data: {\"choices\":[],\"usage\":{}}}\n\n"},
	{text: "data: {\"choices\":[],,\"usage\":{}}\n\n"},
	{text: "data: {\"choices\":[],\"usage\":{\"a\":tru}}\n\n"},
	{text: "data: [{\"choices\":[],\"usage\":{}}]\n\n"},
	{text: "data: {\"error\":{\"message\":\"x\"}}\n\n"},
	{text: "datax: {\"choices\":[],\"usage\":{}}\n\n"},
	{text: "dat\n\n"},
	{text: "data\n\n"},
	{text: "event: ping\nid: 7\nretry: 3\n\n"},
	{text: ": ping\n\n"},
	{text: ":\r\n\r\n"},
	{text: "\n"},
	{text: "\r\n"},
	{text: "data: {\"choices\":[]\r\ndata:,\"usage\":null}\r\n\r\n"},
	{text: "data: [DONE]\n\n"},
	{text: "data: [DONE]\r\n\r\n"},
	// vLLM, SGLang, TGI, llama.cpp.
	{taken: true, text: "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"total_tokens\":9,\"completion_tokens\":4},\"system_fingerprint\":\"vllm-1\"}\n\n"},
	{taken: true, text: "data: {\"id\":\"1\",\"object\":\"chat.completion.chunk\",\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"total_tokens\":9,\"completion_tokens\":4,\"prompt_tokens_details\":null,\"reasoning_tokens\":0}}\n\n"},
	{taken: true, text: "data:{\"object\":\"chat.completion.chunk\",\"id\":\"\",\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":4,\"total_tokens\":9}}\n\n"},
	{taken: true, text: "data: {\"choices\":[],\"created\":1,\"usage\":{\"completion_tokens\":4,\"prompt_tokens\":5,\"total_tokens\":9},\"timings\":{\"prompt_n\":1,\"predicted_n\":4,\"cache_n\":4}}\n\n"},
	{taken: true, text: "data: { \"usage\" : {\"prompt_tokens\":5,\"completion_tokens\":4} , \"x\\\"\" : -1.5e3, \"choices\" : [ ] } \r\n\r\n"},
	{taken: true, text: "id: 1\nevent: x\ndata: {\"choices\":[],\ndata:  \"usage\":{\"prompt_tokens\":5,\ndata: \"completion_tokens\":4}}\n\n"},
	{taken: true, text: "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":4}}\r\r"},
	{taken: true, text: "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":4}}\n: ping\n\n"},
	{taken: true, text: "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":4}}\n\r\n"},
	{taken: true, text: "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":4}}\r\n\n"},
}

// Any stream of events, split at any bytes, must come out as it would without
// the usage chunks.
func TestUsageFilterAnySplit(t *testing.T) {
	for seed := range uint64(3000) {
		r := rand.New(rand.NewPCG(seed, 9))
		var in, want strings.Builder
		taken := false
		ended := byte(0)
		for range 1 + r.IntN(6) {
			p := streamParts[r.IntN(len(streamParts))]
			if ended == '\r' && p.text[0] == '\n' {
				continue // that would be one line's end
			}
			in.WriteString(p.text)
			ended = p.text[len(p.text)-1]
			if p.taken {
				taken = true
			} else {
				want.WriteString(p.text)
			}
		}
		var f usageFilter
		var got []byte
		for rest := in.String(); rest != ""; {
			n := 1 + r.IntN(min(len(rest), 1+r.IntN(200)))
			got = f.Append(got, []byte(rest[:n]))
			rest = rest[n:]
		}
		got = f.Flush(got)
		if string(got) != want.String() {
			t.Fatalf("seed %d: %q\ngot  %q\nwant %q", seed, in.String(), got, want.String())
		}
		if f.found != taken || taken && (f.usage.prompt != 5 || f.usage.completion != 4) {
			t.Fatalf("seed %d: %q: found %v %+v", seed, in.String(), f.found, f.usage)
		}
	}
}

// What cannot be the usage chunk must not wait for the bytes that follow.
func TestUsageFilterHoldsBackLittle(t *testing.T) {
	f := func(in, held string) {
		t.Helper()
		var f usageFilter
		passed := f.Append(nil, []byte(in))
		if string(passed)+held != in {
			t.Errorf("%q: passed on %q", in, passed)
		}
		if rest := f.Flush(nil); string(rest) != held {
			t.Errorf("%q: held %q", in, rest)
		}
	}
	f("", "")
	f(": pi", "")
	f(": ping\n", "")
	f("data", "data")
	f("da7", "da7")
	f("data: ", "data: ")
	f("data: [DON", "")
	f(`data: {"id":"1","choices":`, `data: {"id":"1","choices":`)
	f(`data: {"id":"1","choices":[`, `data: {"id":"1","choices":[`)
	f(`data: {"id":"1","choices":[{`, "")
	f(`data: {"choices":[],"usage":n`, "")
	f(`data: {"choices":[],"usage":{"x":1`, `data: {"choices":[],"usage":{"x":1`)
	f(`data: {"choices":[]}`, "")
	f(`data: {"usage":{}}`, "")
	f("event: x\n", "event: x\n")
	f("data: x\n\ndata: {", "data: {")
	f("data: {\"choices\":[{}]}\n", "")
	f("data: {\"choices\":[{}]}\n\n", "")
	f(`data: "choices":[],`, "")
}

func TestUsageFilterIsBounded(t *testing.T) {
	var f usageFilter
	in := "data: {\"x\":\"" + strings.Repeat("a", 3*maxUsageEvent) + "\",\"choices\":[],\"usage\":{}}\n\n"
	var got []byte
	for i := 0; i < len(in); i += 1000 {
		got = f.Append(got, []byte(in[i:min(i+1000, len(in))]))
		if len(f.held) > maxUsageEvent || cap(f.held) > 2*maxUsageEvent {
			t.Fatalf("%d bytes held", len(f.held))
		}
	}
	if got = f.Flush(got); string(got) != in {
		t.Errorf("%d bytes came out, want %d", len(got), len(in))
	}
	// And the next event is looked at again.
	if got := f.Append(nil, []byte("data: {\"choices\":[],\"usage\":{}}\n\n")); len(got) > 0 {
		t.Errorf("passed on %q", got)
	}
}

// naiveFilter takes the usage chunks out of a whole stream, line by line.
func naiveFilter(in []byte) (out []byte) {
	var event, data []byte
	lines := 0
	end := func() {
		if !naiveUsageChunk(data) || lines == 0 {
			out = append(out, event...)
		}
		event, data, lines = nil, nil, 0
	}
	for len(in) > 0 {
		i := bytes.IndexAny(in, "\r\n")
		if i < 0 {
			i = len(in)
		}
		line := in[:i]
		n := i
		if n < len(in) {
			n++
			if in[i] == '\r' && n < len(in) && in[n] == '\n' {
				n++
			}
		}
		if len(line) > 0 && line[0] == ':' && len(event) == 0 {
			out = append(out, in[:n]...)
			in = in[n:]
			continue
		}
		event = append(event, in[:n]...)
		in = in[n:]
		if len(line) == 0 {
			end()
			continue
		}
		if value, ok := bytes.CutPrefix(line, []byte("data:")); ok {
			if lines++; lines > 1 {
				data = append(data, '\n')
			}
			data = append(data, bytes.TrimPrefix(value, []byte(" "))...)
		}
	}
	end()
	return out
}

// naiveUsageChunk asks encoding/json.
func naiveUsageChunk(data []byte) bool {
	if !json.Valid(data) {
		return false
	}
	d := json.NewDecoder(bytes.NewReader(data))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return false
	}
	choices, usage := false, false
	for d.More() {
		name, err := d.Token()
		var value json.RawMessage
		if err != nil || d.Decode(&value) != nil {
			return false
		}
		switch name {
		case "choices":
			if len(value) < 2 || value[0] != '[' || strings.TrimSpace(string(value[1:len(value)-1])) != "" {
				return false
			}
			choices = true
		case "usage":
			if value[0] != '{' {
				return false
			}
			usage = true
		}
	}
	return choices && usage
}

// FuzzUsageFilter compares the filter with one that sees the whole stream.
func FuzzUsageFilter(f *testing.F) {
	for _, p := range streamParts {
		f.Add([]byte(p.text), uint64(1))
		f.Add([]byte(p.text+streamParts[0].text+p.text[:len(p.text)-1]), uint64(2))
	}
	f.Fuzz(func(t *testing.T, in []byte, seed uint64) {
		if len(in) > maxUsageEvent/2 || bytes.Contains(in, []byte(`\`)) {
			// A member's name with an escape in it is another to the filter;
			// no engine writes such.
			return
		}
		r := rand.New(rand.NewPCG(seed, 1))
		var filter usageFilter
		var got []byte
		for rest := in; len(rest) > 0; {
			n := 1 + r.IntN(len(rest))
			got = filter.Append(got, rest[:n])
			rest = rest[n:]
		}
		got = filter.Flush(got)
		if want := naiveFilter(in); !bytes.Equal(got, want) {
			t.Fatalf("%q\ngot  %q\nwant %q", in, got, want)
		}
	})
}

func TestUsageFilterDoesNotAllocate(t *testing.T) {
	var f usageFilter
	event := []byte("data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"},\"logprobs\":null}]}\n\n")
	dst := f.Append(make([]byte, 0, 4096), event)
	if n := testing.AllocsPerRun(100, func() {
		dst = f.Append(dst[:0], event[:30])
		dst = f.Append(dst, event[30:])
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// BenchmarkUsageFilter is the cost of one token's event.
// go test -bench UsageFilter ./proxy
func BenchmarkUsageFilter(b *testing.B) {
	event := []byte("data: {\"id\":\"chatcmpl-0123456789abcdef\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"},\"logprobs\":null,\"finish_reason\":null,\"token_ids\":null}]}\n\n")
	var f usageFilter
	var dst []byte
	b.ReportAllocs()
	b.SetBytes(int64(len(event)))
	for b.Loop() {
		dst = f.Append(dst[:0], event)
	}
}
