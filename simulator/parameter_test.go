package simulator

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"
)

// ownFields are the members that requestBody has fields for.
func ownFields() map[string]bool {
	names := map[string]bool{"vllm_xargs": true}
	for field := range reflect.TypeFor[requestBody]().Fields() {
		names[strings.Split(field.Tag.Get("json"), ",")[0]] = true
	}
	return names
}

// TestParametersAreDecided: of each parameter that vLLM knows it is decided what
// becomes of it.
func TestParametersAreDecided(t *testing.T) {
	list, err := os.ReadFile("testdata/vllm/parameters.txt")
	if err != nil {
		t.Fatal(err)
	}
	own, n := ownFields(), 0
	for line := range strings.Lines(string(list)) {
		name := strings.Fields(line)[1]
		if _, ok := parameters[name]; !ok && !own[name] {
			t.Errorf("nothing is decided about %s", strings.TrimSpace(line))
		}
		n++
	}
	if n < 100 {
		t.Errorf("vLLM has only %d parameters", n)
	}
	for name := range parameters {
		if own[name] {
			t.Errorf("%s has a field and is in the table", name)
		}
	}
}

// something is a value that asks for something, for parameters that do not take
// a number.
var something = map[string]string{
	"reasoning_effort": `"high"`, "truncation_side": `"left"`, "user": `"u"`, "session_id": `"s"`, "suffix": `"x"`, "chat_template": `"x"`,
	"kv_transfer_params": `{"a":1}`, "ec_transfer_params": `{"a":1}`, "chat_template_kwargs": `{"a":1}`, "media_io_kwargs": `{"a":1}`,
	"mm_processor_kwargs": `{"a":1}`, "documents": `[{}]`, "add_generation_prompt": `true`, "continue_final_message": `false`,
	"json_schema": `"{}"`, "regex": `"a"`, "ebnf": `"a"`, "stop_regex": `"a"`,
}

// TestParameters: what is harmless changes nothing, what is not supported is
// refused by name, and so is what is out of bounds; what nobody knows is ignored.
func TestParameters(t *testing.T) {
	for engine, table := range map[string][]map[string]parameter{"vllm": {parameters}, "sglang": {parameters, sglangParameters}} {
		s, c := start(t, Config{Engine: engine, ZeroLatency: true, Created: 1, NoEnablePrefixCaching: true}), client(t)
		bodies := map[string]string{
			"/v1/chat/completions": `{"messages":[{"role":"user","content":"x"}],"max_tokens":3%s}`,
			"/v1/completions":      `{"prompt":"x","max_tokens":3%s}`,
		}
		for path, body := range bodies {
			ask := func(member string) (int, []byte) {
				t.Helper()
				res := post(t, c, s, path, fmt.Sprintf(body, member))
				return res.StatusCode, readAll(t, res)
			}
			_, plainly := ask("")
			f := func(name, value string, want int) {
				t.Helper()
				status, got := ask(fmt.Sprintf(`,%q:%s`, name, value))
				switch {
				case status != want:
					t.Errorf("%s %s %s: %s is answered with %d %s, want %d", engine, path, name, value, status, got, want)
				case status == http.StatusOK && !bytes.Equal(got, plainly):
					t.Errorf("%s %s %s: %s changes the answer to %s", engine, path, name, value, got)
				case status != http.StatusOK && !strings.Contains(string(got), name):
					t.Errorf("%s %s %s: %s is refused without its name: %s", engine, path, name, value, got)
				}
			}
			for _, list := range table {
				for name := range list {
					p, _ := (&Config{Engine: engine}).parameter(name)
					value, ok := something[name]
					if !ok {
						value = "1"
					}
					want := http.StatusBadRequest
					if p.harmless != "" {
						want = http.StatusOK
					}
					f(name, value, want)
					f(name, "null", http.StatusOK)
					if p.within != nil {
						f(name, fmt.Sprint(p.within.low-1), http.StatusBadRequest)
						f(name, `"x"`, http.StatusBadRequest)
					}
				}
			}
			f("nobody_knows", `{"this":1}`, http.StatusOK)
			f("store", `true`, http.StatusOK)
			f("top_p", "0", http.StatusBadRequest)
			f("temperature", "0", http.StatusOK)
			f("stream_interval", "1", http.StatusOK)
			f("stream_interval", "0", http.StatusBadRequest)
			f("stream_interval", `2,"stream":true`, http.StatusBadRequest)
			if engine == "vllm" {
				f("cache_salt", `""`, http.StatusBadRequest)
				f("priority", "0", http.StatusOK)
			}
		}
	}
}

// TestRequestID: the header names a request, else the body does, and an answer
// that has no end of its own goes on to the limit.
func TestRequestID(t *testing.T) {
	s, c := start(t, Config{ZeroLatency: true, MaxModelLen: 40, DefaultOutputTokens: 3}), client(t)
	const body = `{"messages":[{"role":"user","content":"x"}],"request_id":"mine","ignore_eos":true}`
	if got := string(readAll(t, post(t, c, s, "/v1/chat/completions", body))); !strings.Contains(got, `"chatcmpl-test"`) ||
		!strings.Contains(got, `"finish_reason":"length"`) || !strings.Contains(got, `"total_tokens":40`) {
		t.Error(got)
	}
	res, err := c.Post(s.URL()+"/v1/chat/completions", "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if got := string(readAll(t, res)); !strings.Contains(got, `"chatcmpl-mine"`) {
		t.Error(got)
	}
}

// TestVLLMIsFull: more sequences than it may have at one time are refused with a
// status upon which routers go elsewhere, and counted.
func TestVLLMIsFull(t *testing.T) {
	s, c := start(t, Config{MaxNumQueuedReqs: 2, TimePerOutputToken: time.Hour}), client(t)
	body := post(t, c, s, "/v1/completions", `{"prompt":"x","max_tokens":2,"n":2,"stream":true}`).Body
	eventually(t, 20*time.Second, "both are there", func() bool { return s.Stats().Ranks[0].Sequences == 2 })
	res := post(t, c, s, "/v1/completions", `{"prompt":"x"}`)
	if got := string(readAll(t, res)); res.StatusCode != http.StatusServiceUnavailable || !strings.Contains(got, `"type":"Service Unavailable","param":null,"code":503`) {
		t.Errorf("%s: %s", res.Status, got)
	}
	hasLines(t, get(t, c, s, "/metrics"), `vllm:admission_rejections_total{reason="max_num_queued_reqs"} 1`, `vllm:admission_rejections_total{reason="max_num_queued_tokens"} 0`)
	if err := body.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, 20*time.Second, "they have left", func() bool { return s.Running() == 0 })
	body = post(t, c, s, "/v1/completions", `{"prompt":"x","max_tokens":2,"stream":true}`).Body
	if err := body.Close(); err != nil {
		t.Fatal(err)
	}
}
