package simulator

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/http"
	"testing"
)

// FuzzRequest: whatever the body, the answer is a well-formed refusal or a
// request within the limits whose answer is well formed.
func FuzzRequest(f *testing.F) {
	for _, body := range []string{
		`{"inputs":"a b","parameters":{"max_new_tokens":3,"details":true,"best_of":2,"do_sample":true,"stop":["a"],"grammar":{"type":"json","value":{"properties":{}}}},"stream":true}`,
		`{"messages":[{"role":"user","content":"hi"}],"n":2,"max_tokens":3}`,
		`{"prompt":["a",[1,2]],"stream":true,"stream_options":{"include_usage":true}}`,
		`{"prompt":"x","vllm_xargs":{"sim":{"token_bytes":3},"sim_raw":{"chunks":1,"max":2}}}`,
		`{"model":"\ud800","prompt":"\ud83d\ude00"}`, `{"max_tokens":1e99}`, `[`, `null`, "\xff",
		`{"input":[{"role":"user","content":"x"},{"type":"function_call_output","output":"y"}],"tools":[{"type":"function","name":"f"}],"text":{"format":{"type":"json_object"}}}`,
		`{"model":"sim","max_tokens":5,"messages":[{"role":"user","content":[{"type":"text","text":"x"}]}],"tools":[{"name":"f","input_schema":{}}],"tool_choice":{"type":"any"}}`,
		`{"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f","parameters":{"properties":{"a":{"enum":[1,2]}}}}}],"stop":["a"]}`,
		`{"messages":[{"role":"assistant","content":[{"type":"text","text":"a"}],"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"a\":1.0}"}}]}],"tools":[{"type":"function","function":{"name":"f"}}],"chat_template_kwargs":{"k":null},"continue_final_message":true,"add_generation_prompt":false}`,
		`{"text_1":"a","text_2":["b"],"query":"q","documents":["d"],"input":"x","dimensions":3}`,
	} {
		f.Add([]byte(body))
	}
	var configs []*Config
	for _, engine := range engines {
		cfg := &Config{Engine: engine, MaxModelLen: 500}
		if err := cfg.complete(); err != nil {
			f.Fatal(err)
		}
		configs = append(configs, cfg)
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, cfg := range configs {
			face := cfg.face()
			for path, parse := range face.parsers {
				r, err := parse(cfg, body)
				if err == nil && r.refused != nil {
					err = r.refused
				}
				if defect := model().Defect(); defect != "" {
					t.Fatalf("%s: %s", path, defect)
				}
				if err != nil {
					e, ok := errors.AsType[*apiError](err)
					if !ok || http.StatusText(e.status) == "" || !json.Valid(face.appendError(nil, path, e)) {
						t.Fatalf("%s %s refused with %v", cfg.Engine, path, err)
					}
					continue
				}
				checkAnswers(t, cfg, path, r)
			}
		}
	})
}

// checkAnswers checks that what answers a request, whole and in pieces, is JSON.
func checkAnswers(t *testing.T, cfg *Config, path string, r *request) {
	if r.api != plain && (len(r.prompts) == 0 || r.n < 1 || len(r.prompts)*r.n > maxChoices || r.output < 1 || r.output > cfg.MaxModelLen) {
		t.Fatalf("%s %s accepted %+v", cfg.Engine, path, r)
	}
	r.faults, r.output = Faults{}, min(r.output, 3)
	answer := newAnswer(cfg, r, "id", 1)
	if whole := answer.appendBody(nil, 0); !json.Valid(whole) {
		t.Fatalf("%s %s answered %s", cfg.Engine, path, whole)
	}
	if !r.api.generates() {
		return
	}
	stream := answer.appendOpening(answer.appendPrelude(nil))
	for i := range answer.choices {
		for range answer.choices[i].seq.Output {
			stream = answer.appendToken(stream, i)
		}
	}
	for line := range bytes.Lines(answer.appendClosing(stream)) {
		data, ok := bytes.CutPrefix(line, []byte("data: "))
		if ok && string(data) != "[DONE]\n" && !json.Valid(data) {
			t.Fatalf("%s %s streamed %s", cfg.Engine, path, line)
		}
	}
}
