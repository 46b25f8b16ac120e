package simulator

import (
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestTGI compares whole answers of TGI byte for byte.
func TestTGI(t *testing.T) {
	testAnswers(t, "testdata/tgi", Config{Engine: "tgi", ZeroLatency: true, Created: 1700000000, ServedModelName: []string{"m"},
		MaxModelLen: 1000, DefaultOutputTokens: 3, APIKey: "k"})
}

// TestTGIIsFull: more than so many choices at one time are refused, in a stream
// with its only event, and counted.
func TestTGIIsFull(t *testing.T) {
	s, c := start(t, Config{Engine: "tgi", MaxConcurrentRequests: 2, TimePerOutputToken: time.Hour}), client(t)
	body := `{"inputs":"x","parameters":{"max_new_tokens":2,"do_sample":true}}`
	leave := make([]func() error, 2)
	for i := range leave {
		leave[i] = post(t, c, s, "/generate_stream", body).Body.Close
	}
	eventually(t, 20*time.Second, "both are there", func() bool { return s.Stats().Ranks[0].Sequences == 2 })
	const full = `{"error":"Model is overloaded","error_type":"overloaded"}`
	if res := post(t, c, s, "/generate", body); res.StatusCode != http.StatusTooManyRequests || string(readAll(t, res)) != full {
		t.Errorf("a third is answered with %s", res.Status)
	}
	if res := post(t, c, s, "/generate_stream", body); res.StatusCode != http.StatusOK || string(readAll(t, res)) != "data: "+full+"\n\n" {
		t.Errorf("a third stream is answered with %s", res.Status)
	}
	page := get(t, c, s, "/metrics")
	hasLines(t, page, `tgi_request_failure{err="overloaded"} 2`, "tgi_request_count 4")
	// The best of two takes two places.
	if err := leave[0](); err != nil {
		t.Fatal(err)
	}
	eventually(t, 20*time.Second, "one is left", func() bool { return s.Running() == 1 })
	if res := post(t, c, s, "/generate", strings.Replace(body, "max_new", `best_of":2,"max_new`, 1)); res.StatusCode != http.StatusTooManyRequests {
		t.Errorf("two more for one that left: %s", res.Status)
	}
	if err := leave[1](); err != nil {
		t.Fatal(err)
	}
}

// TestTGITells: the headers say how long what took, and the page of metrics
// counts it.
func TestTGITells(t *testing.T) {
	s, c := start(t, Config{Engine: "tgi", PrefillD: 20000, TimePerOutputToken: 10 * time.Millisecond}), client(t)
	res := post(t, c, s, "/generate", `{"inputs":"one two three","parameters":{"max_new_tokens":4}}`)
	readAll(t, res)
	number := func(name string) float64 {
		v, err := strconv.ParseFloat(res.Header.Get(name), 64)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		return v
	}
	// 20 ms, and three times 10.
	if ms := number("x-inference-time"); ms < 49 || ms > number("x-total-time") || number("x-compute-time") < 0.049 || number("x-time-per-token") < 12 {
		t.Errorf("times of %v", res.Header)
	}
	if number("x-prompt-tokens") != 3 || number("x-generated-tokens") != 4 || number("x-compute-characters") != 13 {
		t.Errorf("numbers of %v", res.Header)
	}
	eventually(t, 20*time.Second, "it is counted", func() bool { return s.Finished() == 1 })
	page := get(t, c, s, "/metrics")
	hasLines(t, page, "tgi_request_success 1", "tgi_request_generated_tokens_sum 4", "tgi_request_input_length_sum 3",
		"tgi_request_inference_duration_count 1", "tgi_queue_size 0", `tgi_batch_inference_count{method="prefill"} 1`)
}

// hasLines checks that a page of metrics has whole lines.
func hasLines(t *testing.T, page string, lines ...string) {
	t.Helper()
	for _, line := range lines {
		name, _, _ := strings.Cut(line, " ")
		if strings.Contains("\n"+page, "\n"+line+"\n") {
			continue
		}
		at := strings.Index(page, "\n"+name)
		t.Errorf("no %q, but %.60q", line, page[max(0, at):])
	}
}
