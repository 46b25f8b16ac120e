package simulator

import (
	"bufio"
	"encoding/json"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"
)

// latency is a time that is never the same.
var latency = regexp.MustCompile(`"e2e_latency":[-+0-9.e]+`)

// TestSGLang compares whole answers of SGLang byte for byte, but for how long
// they took.
func TestSGLang(t *testing.T) {
	testAnswers(t, "testdata/sglang", Config{Engine: "sglang", ZeroLatency: true, Created: 1700000000, ServedModelName: []string{"m"},
		MaxModelLen: 1000, DefaultOutputTokens: 3, BlockSize: 4})
}

// TestAbort: what is aborted ends with what it has, in the middle of a stream and
// before the first token, and others go on.
func TestAbort(t *testing.T) {
	s, c := start(t, Config{Engine: "sglang", TimePerOutputToken: time.Hour, MaxNumSeqs: 2}), client(t)
	const body = `{"text":"x","rid":"RID","sampling_params":{"max_new_tokens":9},"stream":STREAM}`
	ask := func(rid, stream string) *http.Response {
		return post(t, c, s, "/generate", strings.NewReplacer("RID", rid, "STREAM", stream).Replace(body))
	}
	stream := bufio.NewReader(ask("a-1", "true").Body)
	if line, err := stream.ReadString('\n'); err != nil || !strings.Contains(line, `"finish_reason":null`) {
		t.Fatalf("%q, %v", line, err)
	}
	other := ask("b", "true")
	whole := make(chan []byte)
	go func() { whole <- readAll(t, ask("a-2", "false")) }() // waits for a place
	eventually(t, 20*time.Second, "all are there", func() bool { return s.Running() == 3 })
	if res := post(t, c, s, "/abort_request", `{"rid":"a-"}`); res.StatusCode != http.StatusOK {
		t.Fatal(res.Status)
	}
	var rest strings.Builder
	if _, err := stream.WriteTo(&rest); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(rest.String(), `"finish_reason":{"type":"abort"`) || !strings.HasSuffix(rest.String(), "data: [DONE]\n\n") {
		t.Errorf("the stream ends with %q", &rest)
	}
	var got struct {
		Text string `json:"text"`
		Meta struct {
			ID     string
			Finish struct{ Type string } `json:"finish_reason"`
			Tokens int                   `json:"completion_tokens"`
		} `json:"meta_info"`
	}
	if text := <-whole; json.Unmarshal(text, &got) != nil || got.Text != "" || got.Meta.ID != "a-2" || got.Meta.Finish.Type != "abort" || got.Meta.Tokens != 0 {
		t.Errorf("the one that waited is %s", text)
	}
	eventually(t, 20*time.Second, "one runs on", func() bool { return s.Running() == 1 && s.Load().Running == 1 })
	post(t, c, s, "/abort_request", `{"abort_all":true}`)
	if text := readAll(t, other); !strings.Contains(string(text), `{"type":"abort"`) {
		t.Errorf("the last ends with %s", text)
	}
}
