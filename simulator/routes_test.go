package simulator

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"mime/multipart"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestStreamsOfOtherRoutes: what comes in pieces is what comes as a whole.
func TestStreamsOfOtherRoutes(t *testing.T) {
	// The whole bodies are those of an empty cache.
	cfg := Config{ZeroLatency: true, Seed: 3, Created: 1, NoEnablePrefixCaching: true}
	s, c := start(t, cfg), client(t)
	f := func(path, body string) {
		t.Helper()
		var want []string
		for _, stream := range []string{"false", "true"} {
			full := strings.Replace(body, "{", `{"stream":`+stream+`,`, 1)
			texts, err := Expect(cfg, path, []byte(full))
			if err != nil {
				t.Fatal(err)
			}
			if want = append(want, texts...); want[0] != texts[0] {
				t.Fatalf("%s %s: %q whole, %q in pieces", path, body, want[0], texts[0])
			}
			whole, err := ExpectBody(cfg, path, "test", []byte(full))
			if err != nil {
				t.Fatal(err)
			}
			got := readAll(t, post(t, c, s, path, full))
			if !bytes.Equal(got, whole) {
				t.Fatalf("%s %s:\ngot  %s\nwant %s", path, full, got, whole)
			}
			if stream == "false" {
				continue
			}
			said := ""
			for line := range strings.SplitSeq(string(got), "\n") {
				data, ok := strings.CutPrefix(line, "data: ")
				if !ok || data == "[DONE]" {
					continue
				}
				var e struct {
					Type  string
					Delta json.RawMessage
				}
				if err := json.Unmarshal([]byte(data), &e); err != nil {
					t.Fatalf("%q: %v", data, err)
				}
				var text string
				var delta struct {
					Text        string
					PartialJSON string `json:"partial_json"`
				}
				if json.Unmarshal(e.Delta, &text) != nil {
					_ = json.Unmarshal(e.Delta, &delta)
				}
				said += text + delta.Text + delta.PartialJSON
			}
			if said != want[0] {
				t.Errorf("%s %s: the pieces say %q, want %q", path, body, said, want[0])
			}
		}
	}
	const tool = `{"type":"object","properties":{"city":{"type":"string"},"days":{"type":"integer"}}}`
	f("/v1/responses", `{"input":"once upon a time"}`)
	f("/v1/responses", `{"input":"once upon a time","max_output_tokens":3}`)
	f("/v1/responses", `{"input":"weather?","tools":[{"type":"function","name":"f","parameters":`+tool+`}]}`)
	f("/v1/responses", `{"input":"x","stop":["e"]}`)
	f("/v1/responses", `{"input":"x","text":{"format":{"type":"json_schema","name":"n","schema":`+tool+`}}}`)
	f("/v1/messages", `{"model":"sim","max_tokens":20,"messages":[{"role":"user","content":"hi"}]}`)
	f("/v1/messages", `{"model":"sim","max_tokens":200,"messages":[{"role":"user","content":"hi"}],"tools":[{"name":"f","input_schema":`+tool+`}]}`)
	f("/v1/messages", `{"model":"sim","max_tokens":200,"messages":[],"stop_sequences":["e","a"]}`)
}

// TestEmbeddings: the two encodings agree, vectors have length 1, and a text
// and its token ids are the same to every server.
func TestEmbeddings(t *testing.T) {
	one, two, c := start(t, Config{ZeroLatency: true, Seed: 1}), start(t, Config{ZeroLatency: true, Seed: 2}), client(t)
	get := func(s *Server, body string) (vectors [][]float32) {
		t.Helper()
		var answer struct {
			Data []struct{ Embedding json.RawMessage }
		}
		if err := json.Unmarshal(readAll(t, post(t, c, s, "/v1/embeddings", body)), &answer); err != nil {
			t.Fatal(err)
		}
		for _, d := range answer.Data {
			var v []float32
			var packed string
			if json.Unmarshal(d.Embedding, &packed) == nil {
				raw, err := base64.StdEncoding.DecodeString(packed)
				if err != nil {
					t.Fatal(err)
				}
				for ; len(raw) > 0; raw = raw[4:] {
					v = append(v, math.Float32frombits(binary.LittleEndian.Uint32(raw)))
				}
			} else if err := json.Unmarshal(d.Embedding, &v); err != nil {
				t.Fatal(err)
			}
			vectors = append(vectors, v)
		}
		return vectors
	}
	want := get(one, `{"input":["good morning","good evening","zebra"]}`)
	if len(want) != 3 || len(want[0]) != vectorSize {
		t.Fatalf("%d vectors of %d", len(want), len(want[0]))
	}
	dot := func(a, b []float32) (sum float64) {
		for i := range a {
			sum += float64(a[i]) * float64(b[i])
		}
		return sum
	}
	for _, v := range want {
		if math.Abs(dot(v, v)-1) > 1e-5 {
			t.Errorf("a length of %v", math.Sqrt(dot(v, v)))
		}
	}
	if dot(want[0], want[1]) < dot(want[0], want[2])+0.2 {
		t.Errorf("texts that share a word are as far apart (%v) as others (%v)", dot(want[0], want[1]), dot(want[0], want[2]))
	}
	ids, err := json.Marshal([][]int{tokenIDs("good morning"), tokenIDs("good evening"), tokenIDs("zebra")})
	if err != nil {
		t.Fatal(err)
	}
	for _, body := range []string{`{"input":["good morning","good evening","zebra"],"encoding_format":"base64"}`, `{"input":` + string(ids) + `}`} {
		if got := get(two, body); !slices.EqualFunc(got, want, slices.Equal) {
			t.Errorf("%s differs", body)
		}
	}
	// The engine times what it pools: a prompt takes its prefill.
	eventually(t, 10*time.Second, "the one answer is counted", func() bool { return one.Finished() == 1 && one.Running() == 0 })
}

// TestDetokenize: the way there and back, on one server and any text.
func TestDetokenize(t *testing.T) {
	s, c := start(t, Config{ZeroLatency: true}), client(t)
	for _, text := range []string{"", "Hello, world!\n", "größe 日本 🙂 naïve", strings.Repeat("incomprehensibilities ", 20), `"\{}`} {
		body, err := json.Marshal(map[string]string{"prompt": text})
		if err != nil {
			t.Fatal(err)
		}
		var tokens struct{ Tokens json.RawMessage }
		if err := json.Unmarshal(readAll(t, post(t, c, s, "/tokenize", string(body))), &tokens); err != nil {
			t.Fatal(err)
		}
		var back struct{ Prompt string }
		if err := json.Unmarshal(readAll(t, post(t, c, s, "/detokenize", fmt.Sprintf(`{"tokens":%s}`, tokens.Tokens))), &back); err != nil {
			t.Fatal(err)
		}
		if back.Prompt != text {
			t.Errorf("%q became %q", text, back.Prompt)
		}
	}
}

// multipartForm returns a form as clients send it, and its content type.
func multipartForm(t *testing.T, file []byte, fields ...string) (string, string) {
	t.Helper()
	var body bytes.Buffer
	form := multipart.NewWriter(&body)
	if file != nil {
		part, err := form.CreateFormFile("file", "speech.wav")
		if err != nil {
			t.Fatal(err)
		}
		part.Write(file)
	}
	for i := 0; i+1 < len(fields); i += 2 {
		if err := form.WriteField(fields[i], fields[i+1]); err != nil {
			t.Fatal(err)
		}
	}
	if err := form.Close(); err != nil {
		t.Fatal(err)
	}
	return body.String(), form.FormDataContentType()
}

func TestAudio(t *testing.T) {
	s, c := start(t, Config{ZeroLatency: true, Created: 1700000000}), client(t)
	f := func(path string, file []byte, fields ...string) (int, string) {
		t.Helper()
		body, kind := multipartForm(t, file, fields...)
		req, err := http.NewRequest("POST", s.URL()+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", kind)
		req.Header.Set("X-Request-Id", "r")
		res, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		return res.StatusCode, string(readAll(t, res))
	}
	wav := WAV(1.5, 1)
	expect := func(got string, status int, want string, wantStatus int) {
		t.Helper()
		if got != want || status != wantStatus {
			t.Errorf("%d %s\nwant %d %s", status, got, wantStatus, want)
		}
	}
	status, whole := f("/v1/audio/transcriptions", wav, "model", "sim")
	var answer struct {
		Text  string
		Usage struct {
			Type    string
			Seconds int
		}
	}
	if err := json.Unmarshal([]byte(whole), &answer); err != nil || status != 200 || answer.Usage.Seconds != 2 || answer.Usage.Type != "duration" || countTokens(answer.Text) != 5 {
		t.Errorf("%d %s", status, whole)
	}
	quoted := string(appendString(nil, answer.Text))
	status, got := f("/v1/audio/transcriptions", wav, "response_format", "text")
	expect(got, status, whole, 200)
	status, got = f("/v1/audio/transcriptions", wav, "response_format", "verbose_json")
	if status != 200 || !strings.HasPrefix(got, `{"duration":"1.5","language":"en","text":`+quoted+`,"segments":[{"id":0,"avg_logprob":-0.25,`) {
		t.Errorf("%d %s", status, got)
	}
	status, got = f("/v1/audio/translations", wav, "model", "sim", "prompt", "again")
	if status != 200 || got == whole || strings.Contains(got, "usage") {
		t.Errorf("%d %s", status, got)
	}
	if _, other := f("/v1/audio/transcriptions", WAV(1.5, 2)); other == whole {
		t.Error("two recordings say the same")
	}

	status, got = f("/v1/audio/transcriptions", wav, "stream", "true", "stream_include_usage", "true")
	events := strings.SplitAfter(got, "\n\n")
	text := ""
	for _, e := range events[:len(events)-3] {
		var chunk struct {
			ID, Object, Model string
			Choices           []struct {
				Delta struct{ Content string }
			}
		}
		if err := json.Unmarshal([]byte(strings.TrimPrefix(e, "data: ")), &chunk); err != nil || chunk.Object != "transcription.chunk" || chunk.ID != "transcribe-r" {
			t.Fatalf("%q: %v", e, err)
		}
		text += chunk.Choices[0].Delta.Content
	}
	if status != 200 || text != answer.Text || !strings.HasSuffix(got, `"choices":[],"usage":{"prompt_tokens":75,"total_tokens":80,"completion_tokens":5}}`+"\n\n"+done) {
		t.Errorf("%d %s", status, got)
	}

	status, got = f("/v1/audio/transcriptions", wav, "model", "other")
	expect(got, status, `{"error":{"message":"The model `+"`other`"+` does not exist. Valid aliases: sim.","type":"NotFoundError","param":"model","code":404}}`, 404)
	refuse := func(want string, wantStatus int, file []byte, fields ...string) {
		t.Helper()
		status, got := f("/v1/audio/transcriptions", file, fields...)
		if status != wantStatus || !strings.Contains(got, want) {
			t.Errorf("%q: %d %s, want %d %s", fields, status, got, wantStatus, want)
		}
	}
	refuse("field required: file", 400, nil, "model", "sim")
	refuse("not 'str'", 422, nil, "file", "text")
	refuse("unsupported audio", 400, []byte{})
	refuse("Currently only support", 400, wav, "response_format", "srt")
	refuse("doesn't support streaming", 400, wav, "response_format", "verbose_json", "stream", "true")
	refuse("Stream options", 400, wav, "stream_include_usage", "true")
	refuse("stream must be", 400, wav, "stream", "perhaps")
	refuse("hotwords", 400, wav, "hotwords", "a")
	refuse("max_completion_tokens", 400, wav, "max_completion_tokens", "0")
	refuse("valid JSON", 400, wav, "vllm_xargs", "{")
	refuse("told to fail", 503, wav, "vllm_xargs", `{"sim":{"status":503}}`)
	if res := post(t, c, s, "/v1/audio/transcriptions", "{}"); res.StatusCode != 400 {
		t.Errorf("JSON is answered with %d", res.StatusCode)
	}
	body, kind := multipartForm(t, wav)
	res, err := c.Post(s.URL()+"/v1/audio/transcriptions", kind, strings.NewReader(body[:len(body)-20]))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if b, _ := io.ReadAll(res.Body); res.StatusCode != 400 || !bytes.Contains(b, []byte("not a whole multipart form")) {
		t.Errorf("half a form is answered with %d %s", res.StatusCode, b)
	}
}
