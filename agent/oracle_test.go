package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/inferrail/inferrail/proxy"
	"github.com/inferrail/inferrail/proxy/prompt"
)

// letters is a tokenizer for tests: a token for each byte of what a request says,
// messages or prompt, and one for the template.
func letters(template uint32, body []byte) (ids []uint32, ok bool) {
	var m map[string]json.RawMessage
	if json.Unmarshal(body, &m) != nil {
		return nil, false
	}
	text := m["messages"]
	if text == nil {
		text = m["prompt"]
	}
	if s := ""; json.Unmarshal(text, &s) == nil {
		text = json.RawMessage(s)
	}
	ids = append(ids, template)
	for _, b := range text {
		ids = append(ids, uint32(b))
	}
	return append(ids, uint32(len(m["tools"]))), text != nil
}

// verifyLetters follows prompts as an engine does whose template is 1.
func verifyLetters(p *prompt.Prompt, _ prompt.Kind, body []byte, _ time.Time) {
	ids, ok := letters(1, body)
	p.IDs = ids
	if !ok {
		p.Reason = prompt.Malformed
	}
}

// fakeEngine is an engine that answers checks, lists models and tells tokens as
// some kind of engine does.
type fakeEngine struct {
	*httptest.Server

	mu       sync.Mutex // guards the rest
	kind     string     // as config has it, vllm-old, sglang-old, or nothing of the kind
	template uint32     // 1 agrees with verifyLetters
	status   int        // of what tells tokens, when it is not 200
	health   int        // likewise of /health
	hang     bool
	answer   string // instead of tokens
	cards    string
	asked    []string // the pages
	auth     string   // that the last one brought
}

func startFake(t *testing.T, kind string) *fakeEngine {
	t.Helper()
	e := &fakeEngine{kind: kind, template: 1, cards: `{"id":"m","root":"/models/m"}`}
	e.Server = httptest.NewServer(http.HandlerFunc(e.serve))
	t.Cleanup(e.Close)
	return e
}

// set changes the engine.
func (e *fakeEngine) set(change func(e *fakeEngine)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	change(e)
}

func (e *fakeEngine) pages() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.asked)
}

func (e *fakeEngine) serve(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	e.mu.Lock()
	kind, template, status, health, hang, answer, cards := e.kind, e.template, e.status, e.health, e.hang, e.answer, e.cards
	if r.Method == "POST" {
		e.asked = append(e.asked, r.URL.Path)
		e.auth = r.Header.Get("Authorization")
	}
	e.mu.Unlock()
	switch r.URL.Path {
	case "/health":
		if health != 0 {
			w.WriteHeader(health)
		}
		return
	case "/v1/models":
		fmt.Fprintf(w, `{"object":"list","data":[%s]}`, cards)
		return
	}
	if hang {
		<-r.Context().Done()
		return
	}
	ids, ok := letters(template, body)
	list, _ := json.Marshal(ids)
	if len(ids) == 0 {
		list = []byte("[]")
	}
	named := strings.Contains(string(body), `"model":"`)
	switch route := kind + " " + r.URL.Path; {
	case status != 0:
		w.WriteHeader(status)
	case answer != "":
		fmt.Fprint(w, answer)
	case route == "vllm-no-tools /v1/chat/completions/render" && strings.Contains(string(body), `"tools"`):
		w.WriteHeader(400)
	case (route == "vllm /v1/chat/completions/render" || route == "vllm-no-tools /v1/chat/completions/render") && named:
		fmt.Fprintf(w, `{"request_id":"chatcmpl-1","token_ids":%s,"sampling_params":{}}`, list)
	case (route == "vllm /v1/completions/render" || route == "vllm-no-tools /v1/completions/render") && named:
		fmt.Fprintf(w, `[{"request_id":"cmpl-1","token_ids":%s}]`, list)
	case slices.Contains([]string{"vllm-old /tokenize", "vllm-no-tools /tokenize", "sglang /tokenize"}, route) && named:
		fmt.Fprintf(w, `{"count":%d,"max_model_len":4096,"tokens":%s,"token_strs":null}`, len(ids), list)
	case route == "sglang-old /tokenize":
		if !ok || strings.Contains(string(body), `"messages"`) {
			w.WriteHeader(400)
			return
		}
		fmt.Fprintf(w, `{"count":%d,"max_model_len":4096,"tokens":%s}`, len(ids), list)
	case route == "llamacpp /apply-template":
		fmt.Fprintf(w, `{"prompt":%q}`, body)
	case route == "llamacpp /tokenize":
		// What it does not know it ignores.
		var asked struct {
			Content      *string
			AddSpecial   bool `json:"add_special"`
			ParseSpecial bool `json:"parse_special"`
		}
		if json.Unmarshal(body, &asked) != nil || asked.Content == nil {
			fmt.Fprint(w, `{"tokens":[]}`)
			return
		}
		text := []byte(*asked.Content)
		if !strings.HasPrefix(*asked.Content, "{") {
			text, _ = json.Marshal(map[string]string{"prompt": *asked.Content})
		}
		ids, _ = letters(template, text)
		if !asked.AddSpecial || !asked.ParseSpecial {
			ids = ids[1:]
		}
		list, _ = json.Marshal(ids)
		fmt.Fprintf(w, `{"tokens":%s}`, list)
	case route == "tgi /chat_tokenize", route == "tgi /tokenize":
		if r.URL.Path == "/tokenize" {
			var asked struct{ Inputs *string }
			if json.Unmarshal(body, &asked) != nil || asked.Inputs == nil {
				w.WriteHeader(422)
				return
			}
			text, _ := json.Marshal(map[string]string{"prompt": *asked.Inputs})
			ids, _ = letters(template, text)
		}
		var tokens []string
		for _, id := range ids {
			tokens = append(tokens, fmt.Sprintf(`{"id":%d,"text":"x","start":0,"stop":1}`, id))
		}
		all := "[" + strings.Join(tokens, ",") + "]"
		if r.URL.Path == "/chat_tokenize" {
			all = `{"tokenize_response":` + all + `,"templated_text":"x"}`
		}
		fmt.Fprint(w, all)
	default:
		w.WriteHeader(404)
		fmt.Fprint(w, `{"detail":"Not Found"}`)
	}
}

func (e *fakeEngine) oracle(t *testing.T, engine string) *oracle {
	t.Helper()
	r, err := proxy.NewReplica(0, "gpu-0", e.URL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	return &oracle{client: &http.Client{}, replica: r, key: "secret", engine: engine}
}

// Whatever the engine, and whether or not it is known which, its tokens are
// found, and one of another template is found out.
func TestOracleAsksEachEngine(t *testing.T) {
	f := func(kind, labels string, want outcome, way, what string) {
		t.Helper()
		for label := range strings.FieldsSeq(labels) {
			e := startFake(t, kind)
			o := e.oracle(t, strings.TrimPrefix(label, "unknown"))
			c := o.probeAll(t.Context(), verifyLetters, "m")
			if c.outcome != want || c.way != way || !strings.Contains(c.what, what) {
				t.Errorf("%s as %s: %v by %q: %s; want %v by %q: %s", kind, label, c.outcome, c.way, c.what, want, way, what)
			}
			if e.auth != "Bearer secret" {
				t.Errorf("%s was asked with %q", kind, e.auth)
			}
			if want != agrees {
				continue
			}
			e.set(func(e *fakeEngine) { e.template = 2 })
			c = e.oracle(t, strings.TrimPrefix(label, "unknown")).probeAll(t.Context(), verifyLetters, "m")
			if c.outcome != differs {
				t.Errorf("%s as %s with another template: %v: %s", kind, label, c.outcome, c.what)
			}
		}
	}
	all := "compared: chat, conversation, parts, odd text, tools, completion"
	f("vllm", "vllm unknown", agrees, "render", all)
	f("vllm-old", "vllm unknown sglang", agrees, "tokenize", all)
	// It refuses what its chats would refuse, and has another page that does not.
	f("vllm-no-tools", "vllm unknown", agrees, "render", all)
	f("sglang", "sglang unknown", agrees, "tokenize", all)
	f("sglang-old", "sglang unknown", agrees, "tokenize", "compared: completion; not compared: chat (the engine does not take it)")
	f("llamacpp", "llamacpp unknown", agrees, "apply-template", all)
	f("tgi", "tgi unknown", agrees, "chat_tokenize", all)
	f("ollama", "unknown", unable, "", "the engine has no page that tells tokens")
	f("vllm", "tgi", unable, "", "the engine has no page that tells tokens")
}

// An Ollama that is known to be one is not asked what it does not have.
func TestOracleDoesNotAskOllama(t *testing.T) {
	e := startFake(t, "ollama")
	if c := e.oracle(t, "ollama").probeAll(t.Context(), verifyLetters, "m"); c.outcome != unable || len(e.pages()) > 0 {
		t.Errorf("%v: %s; asked %v", c.outcome, c.what, e.pages())
	}
}

// A probe that fails is no disagreement.
func TestOracleFailures(t *testing.T) {
	f := func(change func(*fakeEngine), want outcome, what string) {
		t.Helper()
		e := startFake(t, "vllm")
		e.set(change)
		c := e.oracle(t, "vllm").probeAll(t.Context(), verifyLetters, "m")
		if c.outcome != want || !strings.Contains(c.what, what) {
			t.Errorf("%v: %s; want %v: %s", c.outcome, c.what, want, what)
		}
	}
	f(func(e *fakeEngine) { e.status = 401 }, failed, "status 401; give the engine's api_key")
	f(func(e *fakeEngine) { e.status = 429 }, failed, "status 429")
	f(func(e *fakeEngine) { e.status = 500 }, failed, "status 500")
	f(func(e *fakeEngine) { e.status = 503 }, failed, "status 503")
	f(func(e *fakeEngine) { e.status = 302 }, failed, "status 302")
	f(func(e *fakeEngine) { e.status = 400 }, unable, "does not take it")
	f(func(e *fakeEngine) { e.status = 403 }, unable, "no page")
	f(func(e *fakeEngine) { e.status = 405 }, unable, "no page")
	f(func(e *fakeEngine) { e.status = 501 }, unable, "no page")
	f(func(e *fakeEngine) { e.answer = "oops" }, failed, "not JSON")
	f(func(e *fakeEngine) { e.answer = `{"token_ids":[1,` }, failed, "not JSON")
	f(func(e *fakeEngine) { e.answer = `{"token_ids":[-1]}` }, unable, "no page")
	f(func(e *fakeEngine) { e.answer = `{"token_ids":[1.5]}` }, unable, "no page")
	f(func(e *fakeEngine) { e.answer = `{"tokens":{}}` }, unable, "no page")
	f(func(e *fakeEngine) { e.answer = `[]` }, unable, "no page")
	f(func(e *fakeEngine) { e.answer = `null` }, unable, "no page")
	f(func(e *fakeEngine) { e.answer = `{"token_ids":[` + strings.Repeat("1,", maxTokensBody/2) + `1]}` }, failed, "larger than 16MiB")

	e := startFake(t, "vllm")
	o := e.oracle(t, "vllm")
	e.set(func(e *fakeEngine) { e.hang = true })
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if c := o.probeAll(ctx, verifyLetters, "m"); c.outcome != failed || !strings.Contains(c.what, "no answer in time") {
		t.Errorf("silent: %v: %s", c.outcome, c.what)
	}
	e.set(func(e *fakeEngine) { e.hang = false })
	e.CloseClientConnections()
	e.Close()
	if c := o.probeAll(t.Context(), verifyLetters, "m"); c.outcome != failed || strings.Contains(c.what, "127.0.0.1") {
		t.Errorf("gone: %v: %s", c.outcome, c.what)
	}
}

// What is asked about twice: a difference that is gone by then is none.
func TestOracleAsksTwice(t *testing.T) {
	e := startFake(t, "vllm")
	o := e.oracle(t, "vllm")
	n := 0
	c := o.compare(t.Context(), func(p *prompt.Prompt, kind prompt.Kind, body []byte, now time.Time) {
		verifyLetters(p, kind, body, now)
		if n++; n == 1 { // as if the day had changed between the two
			p.IDs = append(p.IDs, 7)
		}
	}, request{kind: prompt.Chat, body: []byte(`{"messages":[]}`)}, "m")
	if c.outcome != agrees || n != 2 {
		t.Errorf("%v after %d: %s", c.outcome, n, c.what)
	}
}

// Prompts that are not followed are not sent.
func TestOracleSendsOnlyWhatIsFollowed(t *testing.T) {
	e := startFake(t, "vllm")
	c := e.oracle(t, "").probeAll(t.Context(), func(p *prompt.Prompt, _ prompt.Kind, _ []byte, _ time.Time) {
		p.Reason = prompt.BadTemplate
	}, "m")
	if c.outcome != unable || !strings.Contains(c.what, "bad_template") || len(e.pages()) > 0 {
		t.Errorf("%v: %s; asked %v", c.outcome, c.what, e.pages())
	}
}

func TestSplitBody(t *testing.T) {
	f := func(body, want, tokenize string) {
		t.Helper()
		m, err := splitBody([]byte(body), "the <model>")
		if err != nil {
			t.Fatal(err)
		}
		if got := string(m.join()); got != want {
			t.Errorf("%s: got %s", body, got)
		}
		kind := prompt.Chat
		if m["messages"] == nil {
			kind = prompt.Completion
		}
		_, got := tokenizeRequest(kind, m)
		if string(got) != tokenize {
			t.Errorf("%s: /tokenize is asked %s", body, got)
		}
	}
	f(`{"model":"alias","messages":[{"b": 1, "a":"<\ud800>"}],"stream":true}`,
		`{"messages":[{"b": 1, "a":"<\ud800>"}],"model":"the \u003cmodel\u003e","stream":true}`,
		`{"model":"the \u003cmodel\u003e","messages":[{"b": 1, "a":"<\ud800>"}]}`)
	f(`{"messages":[1],"messages":[2],"tools":null,"documents":[],"add_generation_prompt":false}`,
		`{"add_generation_prompt":false,"documents":[],"messages":[2],"model":"the \u003cmodel\u003e","tools":null}`,
		`{"model":"the \u003cmodel\u003e","messages":[2],"tools":null,"add_generation_prompt":false}`)
	f(`{"prompt": "x"}`, `{"model":"the \u003cmodel\u003e","prompt":"x"}`, `{"model":"the \u003cmodel\u003e","prompt":"x"}`)
	f(`{"prompt":["x"]}`, `{"model":"the \u003cmodel\u003e","prompt":["x"]}`, ``)
	for _, bad := range []string{``, `null`, `[]`, `"x"`, `{`, `{} {}`} {
		if m, err := splitBody([]byte(bad), "m"); err == nil {
			t.Errorf("%q became %s", bad, m.join())
		}
	}
}

func TestFirstDifference(t *testing.T) {
	f := func(ours, theirs []uint32, want string) {
		t.Helper()
		if got := firstDifference(ours, theirs, false); got != want {
			t.Errorf("%v, %v: got %q", ours, theirs, got)
		}
	}
	f(nil, nil, "")
	f([]uint32{1, 2}, []uint32{1, 2}, "")
	f([]uint32{1, 2, 3}, []uint32{1, 9, 3}, "token 1 is 9 where 2 was expected (3 tokens, expected 3)")
	f([]uint32{1, 2}, []uint32{1}, "token 1 is the end where 2 was expected (1 tokens, expected 2)")
	if got, want := firstDifference([]uint32{1, 7, 9}, []uint32{1, 8}, true), "token 1 is another one (2 tokens, expected 3)"; got != want {
		t.Errorf("of what is private it tells %q", got)
	}
	f(nil, []uint32{5}, "token 0 is 5 where the end was expected (1 tokens, expected 0)")
}

// The probes are what they are meant to be.
func TestProbesAreRequests(t *testing.T) {
	for _, p := range probes {
		if !json.Valid([]byte(p.body)) {
			t.Errorf("%s is not JSON", p.name)
		}
	}
}
