package simulator

import (
	"encoding/json"
	"errors"
	"net/http"
	"testing"
)

// FuzzRequest: whatever the body, the answer is a well-formed refusal or a
// request within the limits whose answer is well formed.
func FuzzRequest(f *testing.F) {
	for _, body := range []string{
		`{"messages":[{"role":"user","content":"hi"}],"n":2,"max_tokens":3}`,
		`{"prompt":["a",[1,2]],"stream":true,"stream_options":{"include_usage":true}}`,
		`{"prompt":"x","vllm_xargs":{"sim":{"token_bytes":3},"sim_raw":{"chunks":1,"max":2}}}`,
		`{"model":"\ud800","prompt":"\ud83d\ude00"}`, `{"max_tokens":1e99}`, `[`, `null`, "\xff",
	} {
		f.Add([]byte(body))
	}
	cfg := Config{MaxModelLen: 500}
	if err := cfg.complete(); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, a := range []api{chat, completions} {
			r, err := parseRequest(&cfg, a, body)
			if err != nil {
				e, ok := errors.AsType[*apiError](err)
				if !ok || http.StatusText(e.status) == "" || !json.Valid(e.appendBody(nil)) {
					t.Fatalf("refused with %v", err)
				}
				continue
			}
			if len(r.prompts) == 0 || r.n < 1 || len(r.prompts)*r.n > maxChoices || r.output < 1 || r.output > cfg.MaxModelLen {
				t.Fatalf("accepted %+v", r)
			}
			r.faults, r.output = Faults{}, min(r.output, 3)
			answer := newAnswer(&cfg, r, "id", 1)
			if whole := answer.appendBody(nil, 0); !json.Valid(whole) {
				t.Fatalf("answered %s", whole)
			}
		}
	})
}
