package agent

import (
	"encoding/json"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/simulator"
)

// postPrompt asks /debug/prompt.
func postPrompt(t *testing.T, a *Agent, path, body string, fields ...string) (status int, text string) {
	t.Helper()
	return postPage(t, a, "/debug/prompt"+path, body, fields...)
}

// reported is what /debug/prompt answers.
func reported(t *testing.T, a *Agent, path, body string) (r promptReport) {
	t.Helper()
	status, text := postPrompt(t, a, "?path="+path, body)
	if status != 200 {
		t.Fatalf("status %d: %s", status, text)
	}
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	return r
}

func TestPromptReport(t *testing.T) {
	engine := startEngine(t, 0, "m")
	c := testConfig(engine)
	c.Models = []ModelConfig{{Name: "m", Aliases: []string{"short"}, Tokenizer: "builtin:sim", BlockSize: 4}}
	a := startAgent(t, c)
	defer stopped(t, a)
	eventually(t, func() bool {
		got := promptPage(t, a)
		return got.State == "exact" && len(got.Probes) == 1 // so that only responses can show what follows
	}, func() string { return "m is not followed" })
	const chat, text = "/v1/chat/completions", "/v1/completions"

	// A chat: its text, its tokens and the hashes of its blocks, which are those
	// that the ids have by themselves. An alias is the same model.
	body := `{"model":"short","messages":[{"role":"user","content":"One two three <b>four</b> five"}]}`
	got := reported(t, a, chat, body)
	if !got.Exact || got.Model != "m" || got.Reason != "exact" || got.Why != "" || got.Path != chat || got.BlockSize != 4 || len(got.Sequences) != 1 {
		t.Fatalf("%+v", got)
	}
	if want := "<|user|>\nOne two three <b>four</b> five\n<|assistant|>\n"; got.Rendered == nil || *got.Rendered != want {
		t.Errorf("rendered %v, want %q", got.Rendered, want)
	}
	ids := got.Sequences[0].IDs
	if len(ids) < 8 || got.PromptTokens == nil || *got.PromptTokens != len(ids) {
		t.Errorf("%v tokens, ids %v", got.PromptTokens, ids)
	}
	hashes := func(root index.Hash, ids []uint32) []string {
		return hexOf(index.AppendTokens(nil, root, ids, 4))
	}
	if want := hashes(index.Root("m", "", nil), ids); !slices.Equal(got.Sequences[0].Hashes, want) || len(want) != len(ids)/4 {
		t.Errorf("hashes %v, want %v", got.Sequences[0].Hashes, want)
	}
	// It is what requests get.
	told, _ := askWhole(t, a, "Hello!")
	same := reported(t, a, chat, `{"model":"m","max_tokens":1,"messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"Hello!"}]}`)
	if told != fmt.Sprint(*same.PromptTokens) {
		t.Errorf("a request has %q tokens, the page says %d", told, *same.PromptTokens)
	}
	// A request with its beginning has left a part of it in the cache.
	if n := len(same.Sequences[0].IDs) - 1; len(same.Replicas) != 1 || same.Replicas[0].CachedTokens != n/4*4 || same.Replicas[0].Cache != "approximate" ||
		same.Replicas[0].Blocks["gpu"] < n/4 {
		t.Errorf("of a prompt of %d tokens that was just computed there are %+v", n+1, same.Replicas)
	}
	if len(got.Replicas) != 1 || got.Replicas[0].CachedTokens != 0 {
		t.Errorf("of another prompt there are %+v", got.Replicas)
	}
	// With tools and calls, and text that the template has made of JSON.
	called := reported(t, a, chat, `{"tools":[{"type":"function","function":{"name":"f"}}],"messages":[{"role":"user","content":"\u0041 \u00fc"},`+
		`{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"a\": [1, \"\u00fc\"]}"}}]}]}`)
	if want := `<|user|>
A ü
<|assistant|>

<|call|>f {"a": [1, "ü"]}
<|assistant|>
`; !called.Exact || called.Rendered == nil || !strings.HasSuffix(*called.Rendered, want) || !strings.HasPrefix(*called.Rendered, "<|tools|>\n{") {
		t.Errorf("with tools: %+v", called)
	}
	// A salt sets the hashes apart, and nothing else.
	salted := reported(t, a, chat, strings.Replace(body, "{", `{"cache_salt":"s",`, 1))
	if !slices.Equal(salted.Sequences[0].IDs, ids) || !slices.Equal(salted.Sequences[0].Hashes, hashes(index.Root("m", "", []byte("s")), ids)) {
		t.Errorf("with a salt: %+v", salted)
	}
	// Of several prompts each is a sequence. One model needs no name.
	two := reported(t, a, text, `{"prompt":["One two three four","five"]}`)
	if len(two.Sequences) != 2 || *two.PromptTokens != len(two.Sequences[0].IDs)+len(two.Sequences[1].IDs) || two.Rendered != nil || two.RenderedWhy == "" {
		t.Errorf("two prompts: %+v", two)
	}
	if got := reported(t, a, text, `{"model":"m","prompt":[5,6,7,8,9]}`); !slices.Equal(got.Sequences[0].IDs, []uint32{5, 6, 7, 8, 9}) || len(got.Sequences[0].Hashes) != 1 {
		t.Errorf("ids: %+v", got)
	}

	approximate := func(path, body, reason, why string) {
		t.Helper()
		got := reported(t, a, path, body)
		if got.Exact || got.PromptTokens != nil || got.Reason != reason || !strings.Contains(got.Why, why) || got.BlockSize != index.TextBlock {
			t.Errorf("%+v; want %s: %s", got, reason, why)
			return
		}
		for _, s := range got.Sequences {
			if len(s.IDs) > 0 || !slices.Equal(s.Hashes, hexOf(index.AppendText(nil, index.Root("m", "", nil), []byte(s.Text)))) {
				t.Errorf("%s: %+v", reason, s)
			}
		}
	}
	long := strings.Repeat("What is in this picture? ", 40)
	approximate(chat, `{"messages":[{"role":"user","content":[{"type":"text","text":"`+long+`"},{"type":"image_url","image_url":{"url":"http://x"}}]}]}`, "media", "images")
	approximate(chat, `{"messages":3}`, "malformed", "refuse")
	approximate("/v1/responses", `{"input":"`+long+`"}`, "route", "/v1/chat/completions and /v1/completions")

	// Every reason has its sentence.
	for reason, sentence := range reasonSentences {
		if (sentence == "") != (reason == 0) {
			t.Errorf("reason %d has the sentence %q", reason, sentence)
		}
	}

	if err := engine.SetFaults(simulator.Faults{Tokenizer: "token"}); err != nil {
		t.Fatal(err)
	}
	for range usageMost {
		askWhole(t, a, "Hello!")
	}
	eventually(t, func() bool { return promptPage(t, a).State == "demoted" }, func() string { return "m is not demoted" })
	approximate(chat, body, "demoted", "so did 8 of its last 8 responses")
	// To compare it with the engine's, the text is shown all the same.
	if got := reported(t, a, chat, body); got.Rendered == nil || *got.Rendered != "<|user|>\nOne two three <b>four</b> five\n<|assistant|>\n" {
		t.Errorf("a demoted model's text: %+v", got)
	}
}

// What the template says when it refuses a chat, and how a model without a
// tokenizer is told.
func TestPromptReportTellsWhy(t *testing.T) {
	template := t.TempDir() + "/chat.jinja"
	write(t, template, []byte("{% if messages[0].role != 'user' %}{{ raise_exception('Begin with the user!') }}{% endif %}{{ messages[0].content }}"))
	c := testConfig(startEngine(t, 0, "m"), startEngine(t, 0, "other"))
	c.Models = []ModelConfig{{Name: "m", Tokenizer: "builtin:sim", ChatTemplate: template}, {Name: "other", Tokenizer: "none"}}
	a := startAgent(t, c)
	defer stopped(t, a)
	eventually(t, func() bool { return promptPage(t, a).State != "loading" && promptPage(t, a).State != "" }, func() string { return "m is not loaded" })
	got := reported(t, a, "/v1/chat/completions", `{"model":"m","messages":[{"role":"system","content":"x"}]}`)
	if got.Reason != "render_failed" || got.Rendered != nil || !strings.Contains(got.Why, "Begin with the user!") {
		t.Errorf("%+v", got)
	}
	eventually(t, func() bool { return len(a.Models()) == 2 }, func() string { return fmt.Sprint(a.Models()) })
	got = reported(t, a, "/v1/chat/completions", `{"model":"other","messages":[{"role":"user","content":"x"}]}`)
	if got.Reason != "no_tokenizer" || got.Why != "no tokenizer, by configuration" || got.RenderedWhy != "the model has no chat template" {
		t.Errorf("%+v", got)
	}
}

// Bad input is told what to do, and what may not be seen is not.
func TestPromptReportRefuses(t *testing.T) {
	a := startAgent(t, testConfig(startEngine(t, 0, "m"), startEngine(t, 0, "n")))
	defer stopped(t, a)
	eventually(t, func() bool { return len(a.Models()) == 2 }, func() string { return fmt.Sprint(a.Models()) })
	f := func(path, body string, status int, says string, fields ...string) {
		t.Helper()
		if got, text := postPrompt(t, a, path, body, fields...); got != status || !strings.Contains(text, says) {
			t.Errorf("%s: %d %.300q, want %d %q", path, got, text, status, says)
		}
	}
	const chat = "?path=/v1/chat/completions"
	f("", `{"model":"m"}`, 400, `"" is no path of requests that generate; POST the body`)
	f("?path=/metrics", `{"model":"m"}`, 400, `"/metrics" is no path`)
	f("?path=/v1/models", `{"model":"m"}`, 400, "is no path")
	f("?path=/v1/embeddings", `{"model":"m"}`, 400, "is no path")
	f(chat, ``, 400, "no JSON object")
	f(chat, `[]`, 400, "no JSON object")
	f(chat, `{"model":5}`, 400, "no JSON object")
	f(chat, `{"messages":[]}`, 400, "names no model; those served are m, n")
	f(chat, `{"model":"absent"}`, 400, `the model "absent" is not served; those served are m, n`)
	f(chat, `{"model":"`+strings.Repeat("a", 5000)+`"}`, 400, "is not served")
	f(chat, strings.Repeat(" ", maxPromptReport)+`{"model":"m"}`, 413, "larger than 8MiB")
	f(chat, `{"model":"m","messages":[]}`, 403, "other web sites", "Origin: http://evil.example.com")
	f(chat, `{"model":"m","messages":[]}`, 403, "asked for by address", "Host: evil.example.com")
	f(chat, `{"model":"m","messages":[]}`, 200, `"model":"m"`)
	if status, text := page(t, a, "/debug/prompt"); status != 405 || !strings.HasPrefix(text, promptReportUsage) {
		t.Errorf("GET: %d %q", status, text)
	}

	// Bodies that do not arrive take no more than their places. One of them may be
	// refused because a request of the test has a place just then; so there is one
	// more each time that the test still finds a place.
	var slow []net.Conn
	post := func() {
		c, err := net.Dial("tcp", a.AdminAddr().String())
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(c, "POST /debug/prompt%s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{", chat)
		slow = append(slow, c)
	}
	for range promptReports {
		post()
	}
	status := func() int {
		got, _ := postPrompt(t, a, chat, `{"model":"m","messages":[]}`)
		return got
	}
	eventually(t, func() bool {
		if status() == 503 {
			return true
		}
		post()
		return false
	}, func() string { return "any number are answered at one time" })
	for _, c := range slow {
		c.Close()
	}
	eventually(t, func() bool { return status() == 200 }, func() string { return "the places are never free again" })
}
