package workload

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// The traces that the evaluation is about lie beside the repository, not in it.
func publicTrace(t *testing.T, name string) string {
	t.Helper()
	path := filepath.Join(os.Getenv("INFERRAIL_TRACES"), name)
	if _, err := os.Stat(path); err != nil {
		t.Skip("set INFERRAIL_TRACES to the folder of the public traces")
	}
	return path
}

func TestReadMooncake(t *testing.T) {
	for _, c := range []struct {
		name     string
		requests int
		reuse    float64
	}{{"mooncake_conversation_trace.jsonl", 12031, 0.366}, {"mooncake_synthetic_trace.jsonl", 3993, 0.640}} {
		w, err := (ReadOptions{}).Read(publicTrace(t, c.name))
		if err != nil {
			t.Fatal(err)
		}
		seen, blocks, again := map[uint64]bool{}, 0, 0
		for _, r := range w.Requests {
			for _, p := range r.Parts {
				if blocks++; seen[p.ID] {
					again++
				}
				seen[p.ID] = true
			}
		}
		got := float64(again) / float64(blocks)
		if len(w.Requests) != c.requests || got < c.reuse-0.001 || got > c.reuse+0.001 {
			t.Errorf("%s: %d requests, reuse %.3f", c.name, len(w.Requests), got)
		}
	}
}

func TestParse(t *testing.T) {
	f := func(text, want string) {
		t.Helper()
		w, err := ReadOptions{}.Parse(strings.NewReader(text), "file")
		if want != "" {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%q: got %v, want %s", text, err, want)
			}
			return
		}
		if err != nil {
			t.Errorf("%q: %v", text, err)
			return
		}
		r := &w.Requests[len(w.Requests)-1]
		if n := len(r.AppendPrompt(nil)); n != r.Input() {
			t.Errorf("%q: %d tokens, said to be %d", text, n, r.Input())
		}
	}
	f(`{"timestamp": 3, "input_length": 513, "output_length": 1, "hash_ids": [0, 1]}`, "")
	f(`{"timestamp": 3, "input_length": 513, "output_length": 1, "hash_ids": [0]}`, "file: line 1: 513 tokens are 2 blocks of 512, but there are 1 hash_ids")
	f(`{"timestamp": -3, "input_length": 5, "output_length": 1, "hash_ids": [0]}`, "line 1: the timestamp -3")
	const request = `{"timestamp": 3, "input_length": 5, "output_length": 1, "hash_ids": [7]}` + "\n"
	f("\n\r\n"+request+"\n\n"+request, "")
	f("\n"+request+"{", "line 3: ")
	f(`[{"id":"a","conversations":[{"from":"human","value":"Hello, you!"},{"from":"gpt","value":"Yes?"},{"from":"human","value":"Bye"}]}]`, "")
	f(`[{"id":"a","conversations":[{"from":"human","value":"Hello"},{"from":"gpt","value":"Yes?"}]},`, "conversation 2: ")
	f(`[{"id":"a","conversations":[{"from":"human","value":"Hello"},{"from":"nobody","value":"Yes?"}]}]`, `conversation 1: nobody known speaks as "nobody"`)
	f(`[]`, "there is no request in it")
	f(`[1]`, "conversation 1: ")
	f(`{"conversations":[{"from":"human","value":"Hello"},{"from":"gpt","value":"Yes?"}]}`+"\n", "")
	const decision = `{"model":"m","prompt_tokens":1200,"prompt":{"arrived":"2026-01-02T03:04:05Z","session":"ab","every":512,"hashes":["00000000000000ff","ffffffffffffffff"]},"outcome":{"output_tokens":7,"prompt_tokens":null}}` + "\n"
	f(decision, "")
	f(decision+strings.Replace(decision, `"m"`, `"other"`, 1), `a workload is of one model; say with --trace-model which of these: "m" (1 requests), "other" (1 requests)`)
	f(strings.Replace(decision, "00ff", "00fg", 1), `line 1: the hash "00000000000000fg" is no number`)
	f(strings.Replace(decision, `"every":512`, `"every":0`, 1), "line 1: prompt.every is 0")
	f(`{"model":"m","prompt_tokens":1200,"outcome":{}}`, "none of the decisions has hashes")
	f(`{"model":"m","prompt_tokens":1200,"outcome":{}}`+"\n"+decision, "")
	f("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n", "")
	f("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n", "")
	f("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808\n", "line 2")
	f("TIMESTAMP,ContextTokens,GeneratedTokens\nnow,4808,1\n", `line 2: "now" is no time`)
	f("TIMESTAMP,ContextTokens,GeneratedTokens\n", "there is no request in it")
	f("", "the file is empty")
	f("hello", "this is no trace")
}

func TestReadAzure(t *testing.T) {
	w, err := (ReadOptions{}).Read(publicTrace(t, "azure2023_code.csv"))
	if err != nil {
		t.Fatal(err)
	}
	if n := len(w.Requests); n != 8819 || w.Requests[0].At != 0 || w.Requests[1].At != 52*time.Millisecond {
		t.Errorf("%d requests, the second at %v", n, w.Requests[1].At)
	}
}

// A conversation's requests are its answers. What was said first by the same words is
// the same, whoever says it.
func TestReadShareGPT(t *testing.T) {
	conversations := []string{
		`{"id": "x_0", "conversations": [
			{"from": "human", "value": "Summarize the main ideas"},
			{"from": "gpt", "value": "Here are some: one, two."},
			{"from": "human", "value": "größer"},
			{"from": "gpt", "value": "ok"}]}`,
		`{"id": "x_1", "conversations": [
			{"from": "gpt", "value": "a page that was cut off"},
			{"from": "human", "value": ""},
			{"from": "gpt", "value": "goes on"},
			{"from": "human", "value": "without an answer"}]}`,
		`{"id": "x_2", "more": {"a": [1, 2]}, "conversations": []}`,
		`{"id": "x_3", "conversations": [
			{"from": "system", "value": "s"},
			{"from": "human", "value": "Summarize the main ideas"},
			{"from": "gpt", "value": "x"}]}`,
	}
	for _, text := range []string{"[" + strings.Join(conversations, ",\n") + "]\n", strings.Join(conversations, "\n")} {
		w, err := ReadOptions{Rate: 0.5, Seed: 3}.Parse(strings.NewReader(text), "f")
		if err != nil {
			t.Fatal(err)
		}
		if len(w.Requests) != 4 {
			t.Fatalf("%+v", w.Requests)
		}
		by := map[int][]Request{}
		for _, r := range w.Requests {
			by[r.Session] = append(by[r.Session], r)
		}
		var first, second, third []Request
		for _, list := range by {
			switch {
			case len(list) == 2:
				first = list
			case list[0].Parts[0].Role == "assistant":
				second = list
			default:
				third = list
			}
		}
		// "Summar", "ize ", "the ", "main ", "ideas"; "Here ", "are ", "some:", " ", "one,", " ", "two."
		if r := first[0]; len(r.Parts) != 1 || r.Parts[0].Tokens != 5 || r.Output != 7 || r.Turn != 0 || r.Parts[0].Role != "user" {
			t.Errorf("%+v", r)
		}
		r := first[1]
		if len(r.Parts) != 3 || r.Parts[0] != first[0].Parts[0] || r.Parts[1] != first[0].answer() || r.Parts[2].Tokens != 1 || r.Output != 1 || r.Turn != 1 ||
			r.At < first[0].At+7*25*time.Millisecond {
			t.Errorf("%+v", r)
		}
		if r := second[0]; len(r.Parts) != 1 || r.Parts[0].Tokens != 6 || r.Output != 2 {
			t.Errorf("%+v", r)
		}
		if r := third[0]; len(r.Parts) != 2 || r.Parts[1].ID != first[0].Parts[0].ID || r.Parts[0].Role != "system" {
			t.Errorf("%+v", r)
		}
	}
}

func TestReadDecisions(t *testing.T) {
	line := func(second, session, tokens, told, output string, hashes ...string) string {
		return `{"time":"2026-01-02T03:04:09Z","model":"m","exact":true,"prompt_tokens":` + tokens + `,"prompt":{"arrived":"2026-01-02T03:04:` + second + `Z","session":"` + session +
			`","every":512,"hashes":["` + strings.Join(hashes, `","`) + `"]},"outcome":{"output_tokens":` + output + `,"prompt_tokens":` + told + "}}\n"
	}
	text := line("07.5", "b", "1100", "null", "20", "000000000000000a", "ffffffffffffff0b") +
		line("05", "a", "600", "600", "5", "000000000000000a") +
		line("09", "a", "1600", "1700", "null", "000000000000000a", "000000000000000c", "000000000000000d") +
		// An estimate that was too long: the engine has counted fewer.
		line("10", "", "9999", "700", "1", "000000000000000a", "000000000000000c") +
		`{"model":"m","prompt_tokens":0,"prompt":{"arrived":"2026-01-02T03:04:11Z","every":512,"hashes":null},"outcome":{}}`
	w, err := ReadOptions{}.Parse(strings.NewReader(text), "f")
	if err != nil {
		t.Fatal(err)
	}
	if w.Block != 512 || len(w.Requests) != 4 {
		t.Fatalf("%+v", w)
	}
	f := func(i int, at time.Duration, session, turn, output int, tokens ...int) {
		t.Helper()
		r := w.Requests[i]
		var got []int
		for _, p := range r.Parts {
			got = append(got, p.Tokens)
		}
		if r.At != at || r.Session != session || r.Turn != turn || r.Output != output || !slices.Equal(got, tokens) {
			t.Errorf("request %d: %+v", i, r)
		}
	}
	f(0, 0, 1, 0, 5, 512, 88)
	f(1, 2500*time.Millisecond, 2, 0, 20, 512, 512, 76)
	f(2, 4*time.Second, 1, 1, 1, 512, 512, 512, 164)
	f(3, 5*time.Second, 0, 0, 1, 512, 188)
	id := func(i, k int) uint64 { return w.Requests[i].Parts[k].ID }
	if id(0, 0) != id(1, 0) || id(0, 0) != id(2, 0) || id(1, 1) == id(2, 1) || id(3, 1) == id(2, 1) || id(0, 1) == id(1, 2) {
		t.Errorf("%+v", w.Requests)
	}

	// An agent without the tokenizer takes four bytes for a token; here it is three. Of
	// one answer the engine has not told.
	rough := strings.ReplaceAll(line("05", "a", "1200", "1600", "5", "0a", "0b")+line("06", "b", "600", "800", "5", "0a")+line("07", "b", "900", "null", "5", "0a"),
		`"model":"m",`, `"model":"m","exact":false,`)
	rough = strings.ReplaceAll(rough, `"exact":true,`, "")
	w, err = ReadOptions{}.Parse(strings.NewReader(rough), "f")
	if err != nil || len(w.Requests) != 3 || w.Block != 683 {
		t.Fatalf("%v: %+v", err, w)
	}
	f(0, 0, 1, 0, 5, 683, 683, 234)
	f(1, time.Second, 2, 0, 5, 683, 117)
	f(2, 2*time.Second, 2, 1, 5, 683, 517)

	several := strings.Replace(text, `"m"`, `"other"`, 1)
	w, err = ReadOptions{Model: "m"}.Parse(strings.NewReader(several), "f")
	if err != nil || len(w.Requests) != 3 || w.Requests[0].Session != 1 {
		t.Errorf("%v: %+v", err, w)
	}
	if _, err := (ReadOptions{Model: "none"}).Parse(strings.NewReader(several), "f"); err == nil || !strings.Contains(err.Error(), `say with --trace-model which of these: "m" (4 requests), "other" (1 requests)`) {
		t.Error(err)
	}
}

func TestGzip(t *testing.T) {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	if _, err := z.Write([]byte(`{"timestamp": 3, "input_length": 5, "output_length": 1, "hash_ids": [7]}`)); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	packed := b.Bytes()
	if w, err := (ReadOptions{}).Parse(bytes.NewReader(packed), "f"); err != nil || len(w.Requests) != 1 {
		t.Errorf("%v: %+v", err, w)
	}
	for n := range len(packed) {
		if _, err := (ReadOptions{}).Parse(bytes.NewReader(packed[:n]), "f.gz"); err == nil {
			t.Errorf("%d bytes of a packed file are read", n)
		}
	}
	if _, err := (ReadOptions{}).Read(filepath.Join(t.TempDir(), "none")); err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Error(err)
	}
}

// Whatever is read is an error or a workload that can be served.
func FuzzParse(f *testing.F) {
	f.Add([]byte("{\"timestamp\": 3, \"input_length\": 513, \"output_length\": 1, \"hash_ids\": [0, 1]}\n"))
	f.Add([]byte("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2024-05-10 00:00:00.009930+00:00,2162,5\n"))
	f.Add([]byte(`[{"id":"a","conversations":[{"from":"human","value":"Hello, you!"},{"from":"gpt","value":"Yes?"},{"from":"human","value":"Bye"}]}]`))
	f.Add([]byte(`{"model":"m","prompt_tokens":1200,"prompt":{"arrived":"2026-01-02T03:04:05Z","session":"ab","every":512,"hashes":["00000000000000ff"]},"outcome":{"output_tokens":7}}`))
	f.Add([]byte("\x1f\x8b\x08\x00\x00\x00\x00\x00"))
	f.Fuzz(func(t *testing.T, data []byte) {
		w, err := ReadOptions{}.Parse(bytes.NewReader(data), "f")
		if err != nil {
			if w != nil {
				t.Error("a workload and an error")
			}
			return
		}
		last := time.Duration(0)
		for i := range w.Requests {
			r := &w.Requests[i]
			if r.At < last || r.At > longestTime || r.Output < 1 || len(r.Parts) == 0 {
				t.Fatalf("request %d: %+v", i, r)
			}
			last = r.At
			for _, p := range r.Parts {
				if p.Tokens < 1 || p.Tokens > mostTokens {
					t.Fatalf("request %d: %+v", i, r)
				}
			}
			if n := r.Input(); n < 1<<16 && len(r.AppendPrompt(nil)) != n {
				t.Fatalf("request %d has not the %d tokens that it says", i, n)
			}
		}
	})
}

// The files that rotation has left of a decision log, in whatever order they are
// named, some packed and one just begun, are read as the log that they were.
func TestReadRotatedDecisions(t *testing.T) {
	directory := t.TempDir()
	write := func(name string, text []byte) string {
		t.Helper()
		file := filepath.Join(directory, name)
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	var whole bytes.Buffer
	var parts [3]bytes.Buffer
	for i := range 30 {
		line := fmt.Sprintf(`{"model":"m","prompt_tokens":1100,"exact":%v,"prompt":{"arrived":"2026-01-02T03:04:%02dZ","session":"s%d","every":512,"hashes":["00000000000000%02x","%016x"]},"outcome":{"output_tokens":7,"prompt_tokens":%d}}`+"\n",
			i%2 == 0, i, i%4, i%3, i, 1100+i)
		whole.WriteString(line)
		parts[i/10].WriteString(line)
	}
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	z.Write(parts[0].Bytes())
	z.Close()
	oldest, old, last := write("log.jsonl.2.gz", packed.Bytes()), write("log.jsonl.1", parts[1].Bytes()), write("log.jsonl", parts[2].Bytes())
	write("log.jsonl.new", nil)
	want, err := ReadOptions{}.Read(write("whole", whole.Bytes()))
	if err != nil {
		t.Fatal(err)
	}
	f := func(paths ...string) {
		t.Helper()
		got, err := ReadOptions{}.Read(paths...)
		if err != nil {
			t.Fatal(err)
		}
		if got.Block != want.Block || len(got.Requests) != len(want.Requests) {
			t.Fatalf("%v: %d requests in blocks of %d, want %d of %d", paths, len(got.Requests), got.Block, len(want.Requests), want.Block)
		}
		for i := range want.Requests {
			g, w := got.Requests[i], want.Requests[i]
			if g.At != w.At || g.Session != w.Session || g.Turn != w.Turn || g.Output != w.Output || len(g.Parts) != len(w.Parts) || g.Parts[0] != w.Parts[0] {
				t.Fatalf("%v: request %d is %+v, want %+v", paths, i, g, w)
			}
		}
	}
	f(oldest, old, last)
	f(last, old, oldest)
	f(filepath.Join(directory, "log.jsonl*"))
	f(last, filepath.Join(directory, "log.jsonl*"), old) // each once

	fails := func(want string, paths ...string) {
		t.Helper()
		if w, err := (ReadOptions{}).Read(paths...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %+v, %v, want %q", paths, w, err, want)
		}
	}
	fails("none that the pattern matches", filepath.Join(directory, "nothing*"))
	fails("no such file", last, filepath.Join(directory, "nothing"))
	fails("other: it is no decision log", last, write("other", []byte(`{"hash_ids":[1],"timestamp":0}`)))
	fails("broken: line 2", last, write("broken", append(bytes.Clone(parts[0].Bytes()[:bytes.IndexByte(parts[0].Bytes(), '\n')+1]), "{}x\n"...)))
	fails("there is no request", write("empty1", nil), write("empty2", []byte("\n")))
	fails("no file")
	// What is being written, or what a killed agent has left, may end within a line.
	f(oldest, old, write("torn", append(bytes.Clone(parts[2].Bytes()), `{"model":"m","prompt_tokens":11`...)))
	// A name with the signs of a pattern is a name first.
	f(write("log[1].jsonl", whole.Bytes()))
}
