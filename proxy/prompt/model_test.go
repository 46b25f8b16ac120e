package prompt

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/inferrail/inferrail/proxy/prompt/template"
	"github.com/inferrail/inferrail/proxy/prompt/tokenizer"
)

// bytesTokenizer is a tokenizer.json whose tokens are single bytes.
func bytesTokenizer() string {
	vocabulary := map[string]int{}
	next := 0
	for b := range 256 {
		r := rune(b)
		if b <= ' ' || b >= 127 && b <= 160 || b == 173 {
			r = rune(256 + next)
			next++
		}
		vocabulary[string(r)] = b
	}
	data, err := json.Marshal(map[string]any{
		"version": "1.0", "truncation": nil, "padding": nil, "added_tokens": []any{}, "normalizer": nil,
		"pre_tokenizer":  map[string]any{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
		"post_processor": nil,
		"decoder":        map[string]any{"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
		"model": map[string]any{"type": "BPE", "dropout": nil, "unk_token": nil, "continuing_subword_prefix": nil,
			"end_of_word_suffix": nil, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
			"vocab": vocabulary, "merges": []any{}},
	})
	if err != nil {
		panic(err)
	}
	return string(data)
}

// directory writes a model's files: pairs of name and content.
func directory(t testing.TB, files ...string) string {
	t.Helper()
	dir := t.TempDir()
	for i := 0; i < len(files); i += 2 {
		path := filepath.Join(dir, files[i])
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(files[i+1]), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

const (
	fast    = `{"tokenizer_class":"PreTrainedTokenizerFast"}`
	hello   = `{"messages":[{"role":"user","content":"hi"}]}`
	toolled = `{"messages":[{"role":"user","content":"hi"}],"tools":[{"function":{"name":"f"}}]}`
)

// TestTemplatesOfADirectory: which template renders a chat, and with which
// special tokens.
func TestTemplatesOfADirectory(t *testing.T) {
	f := func(plain, tools string, files ...string) {
		t.Helper()
		m, err := Load(Source{Tokenizer: directory(t, append(files, "tokenizer.json", bytesTokenizer())...)})
		if err != nil {
			t.Errorf("%v: %v", files, err)
			return
		}
		defer m.Close()
		for body, want := range map[string]string{hello: plain, toolled: tools} {
			var p Prompt
			m.Follow(&p, Chat, []byte(body), epoch)
			got := p.Reason.String()
			if p.Reason == Exact {
				got = ""
				for _, id := range p.IDs {
					text := string(rune(id))
					for _, special := range []string{"<b>", "<B>", "<e>", "<i>"} {
						// The engine adds those that have a name.
						if of, ok := m.tokenizer.Token(special); ok && of == id {
							text = special
						}
					}
					got += text
				}
			}
			if got != want {
				t.Errorf("%v\n%s: got %q, want %q", files, body, got, want)
			}
		}
	}
	f("file", "file", "chat_template.jinja", "file", "tokenizer_config.json", `{"chat_template":"config"}`)
	f("config", "config", "tokenizer_config.json", `{"chat_template":"config"}`)
	f("d", "t", "tokenizer_config.json", `{"chat_template":[{"name":"default","template":"d"},{"name":"tool_use","template":"t"}]}`)
	f("d", "d", "tokenizer_config.json", `{"chat_template":[{"name":"default","template":"d"},{"name":"rag","template":"t"}]}`)
	f("no_template", "no_template", "tokenizer_config.json", `{"chat_template":[{"name":"rag","template":"t"}]}`)
	f("file", "t", "chat_template.jinja", "file", "additional_chat_templates/tool_use.jinja", "t")
	f("no_template", "no_template", "additional_chat_templates/rag.jinja", "t", "tokenizer_config.json", `{"chat_template":"config"}`)
	f("p", "config", "chat_template.json", `{"chat_template":"p"}`, "preprocessor_config.json", "{}", "tokenizer_config.json", `{"chat_template":"config"}`)
	f("bad_template", "bad_template", "chat_template.json", `{"chat_template":"p"}`, "tokenizer_config.json", `{"chat_template":"config"}`)
	f("same", "same", "chat_template.json", `{"chat_template":"same"}`, "tokenizer_config.json", `{"chat_template":"same"}`)
	f("p", "no_template", "chat_template.json", `{"chat_template":"p"}`, "processor_config.json", "{}")
	f("no_template", "no_template")
	f("no_template", "no_template", "config.json", `{"model_type":"paligemma"}`)
	f("bad_template", "bad_template", "chat_template.jinja", "{% for %}")
	f("engine_renders", "engine_renders", "config.json", `{"architectures":["DeepseekV32ForCausalLM"]}`, "chat_template.jinja", "x")

	const tokens = "{{ bos_token }}|{{ eos_token }}|{{ image_token }}"
	f("<b>|<e>|<i>", "<b>|<e>|<i>", "chat_template.jinja", tokens, "tokenizer_config.json",
		`{"bos_token":"<b>","eos_token":{"__type":"AddedToken","content":"<e>"},"image_token":"<i>","added_tokens_decoder":{}}`)
	f("<b>|<e>|<i>", "<b>|<e>|<i>", "chat_template.jinja", tokens, "tokenizer_config.json",
		`{"bos_token":"<b>","eos_token":"<e>","extra_special_tokens":{"image_token":"<i>"},"added_tokens_decoder":{}}`)
	f("<B>|<e>|", "<B>|<e>|", "chat_template.jinja", tokens, "tokenizer_config.json", `{"bos_token":"<b>","eos_token":"<e>"}`,
		"special_tokens_map.json", `{"bos_token":{"content":"<B>"}}`)
	f("|<e>|", "|<e>|", "chat_template.jinja", tokens, "tokenizer_config.json", `{"bos_token":null,"eos_token":"<e>"}`)
	f("bad_template", "bad_template", "chat_template.jinja", tokens, "tokenizer_config.json", `{"tokenizer_class":"Qwen2Tokenizer","eos_token":"<e>"}`)
	f("|<e>|", "|<e>|", "chat_template.jinja", tokens, "tokenizer_config.json", `{"tokenizer_class":"PreTrainedTokenizerFast","eos_token":"<e>"}`)
}

// TestDescribe: what Load tells people, and what it refuses.
func TestDescribe(t *testing.T) {
	f := func(want string, exact bool, source Source) {
		t.Helper()
		m, err := Load(source)
		got, gotExact := "", false
		if err != nil {
			got = "error: " + err.Error()
		} else {
			got, gotExact = m.Describe()
			m.Close()
		}
		if source.Tokenizer != "" {
			got = strings.ReplaceAll(got, source.Tokenizer, "DIR")
		}
		if !strings.Contains(got, want) || gotExact != exact {
			t.Errorf("got %q, %v, want %q, %v", got, gotExact, want, exact)
		}
	}
	model := func(files ...string) Source {
		return Source{Tokenizer: directory(t, append([]string{"tokenizer.json", bytesTokenizer(), "tokenizer_config.json", fast}, files...)...)}
	}
	with := func(s Source, change func(*Source)) Source { change(&s); return s }

	f("approximate: no tokenizer is configured", false, Source{})
	f("exact: that of the simulated engine, chat template, contents as string", true, Source{Tokenizer: "builtin:sim"})
	f("native, chat template, contents as string", true, model("chat_template.jinja", "x"))
	f("completions exact", false, model())
	f("chats approximate: the model's files have no chat template", false, model())
	f("chats approximate: the engine uses a template of its own for clip", false, model("config.json", `{"model_type":"clip"}`))
	f("chats approximate: the engine renders chats of InklingForCausalLM", false, model("config.json", `{"architectures":["InklingForCausalLM"]}`))
	f("chats approximate: gpt-oss: the tokenizer lacks the token", false, model("config.json", `{"model_type":"gpt_oss"}`))
	f("approximate: the engine tokenizes this model by code of its own", false, model("config.json", `{"architectures":["MoonshotKimiaForCausalLM"]}`))
	f("approximate: the files in DIR do not tell whether the engine uses Mistral's tokenizer", false, model("tekken.json", "{}"))
	f("approximate: the files in DIR do not tell whether the engine uses Mistral's tokenizer", false, Source{Tokenizer: directory(t, "tekken.json", "{}", "model.safetensors", "")})
	f("native, chat template", true, model("tekken.json", "{}", "model.safetensors", "", "chat_template.jinja", "x"))
	f("approximate: tokenizer: DIR/tekken.json", false, model("tekken.json", "{}", "consolidated.safetensors", ""))
	f("approximate: the engine uses a SentencePiece model", false, model("tokenizer.model.v3", "", "consolidated.safetensors", ""))
	f("approximate: there is neither tokenizer.json nor tekken.json in DIR", false, Source{Tokenizer: directory(t, "config.json", "{}")})

	f("error: tokenizer", false, Source{Tokenizer: "/nowhere/at/all"})
	f("config.json is no JSON object (wrong at byte 1): fetch the model's files again", false, model("config.json", "{"))
	f("tokenizer_config.json is no JSON object", false, model("tokenizer_config.json", "[]"))
	f("error: tokenizer: DIR/tokenizer.json", false, model("tokenizer.json", "{"))
	f(`error: content format "list": use auto, string or openai`, false, with(model(), func(s *Source) { s.ContentFormat = "list" }))
	f("error: template kwargs", false, with(model(), func(s *Source) { s.TemplateKwargs = "[1]" }))
	f("chat_template is not for templates; remove it", false, with(model(), func(s *Source) { s.TemplateKwargs = `{"chat_template":"x"}` }))
	f("error: chat template: open /nowhere", false, with(model(), func(s *Source) { s.Template = "/nowhere" }))
	own := filepath.Join(directory(t, "own.jinja", "{% for message in messages %}{% for c in message.content %}{% endfor %}{% endfor %}"), "own.jinja")
	f("chat template, contents as openai", true, with(model(), func(s *Source) { s.Template = own }))
	f("chat template, contents as string", true, with(model(), func(s *Source) { s.Template, s.ContentFormat = own, "string" }))
}

// A model that is demoted is approximate, by its rendered text, until that is
// taken back. What needs no tokenizer stays exact.
func TestDemotedModel(t *testing.T) {
	m, err := Load(Source{Tokenizer: directory(t, "tokenizer.json", bytesTokenizer(), "chat_template.jinja", "<{{ messages[0].content }}>")})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	f := func(kind Kind, body string, want Reason, text string) {
		t.Helper()
		var p Prompt
		m.Follow(&p, kind, []byte(body), epoch)
		if p.Reason != want || string(p.Text) != text {
			t.Errorf("%s: got %v %q, want %v %q", body, p.Reason, p.Text, want, text)
		}
	}
	f(Chat, hello, Exact, "")
	m.Demote("gpu-0 counted 5 tokens, 4 were expected")
	f(Chat, hello, Demoted, "<hi>")
	f(Completion, `{"prompt":"a"}`, Demoted, "a")
	f(Completion, `{"prompt":[1]}`, Exact, "")
	if how, exact := m.Describe(); exact || how != "approximate: gpu-0 counted 5 tokens, 4 were expected" {
		t.Errorf("described as %q, %v", how, exact)
	}
	m.Demote("")
	f(Chat, hello, Exact, "")
	f(Other, `{"input":"x"}`, Route, "x")
}

// A prompt that comes again is remembered, for as long as its template's clock
// allows.
func TestClockOfTemplates(t *testing.T) {
	f := func(source string, want clock) {
		t.Helper()
		compiled, err := template.Compile(source)
		if err != nil {
			t.Errorf("%s: %v", source, err)
		} else if got := clockOf(compiled, source); got != want {
			t.Errorf("%s: got %d, want %d", source, got, want)
		}
	}
	f(`x`, clockUnused)
	f(`{{ strftime_now("%d %b %Y") }}`, clockDay)
	f(`{{ strftime_now('%-d. %B') }}{{ strftime_now ("%Y") }}`, clockDay)
	f(`{{ strftime_now("%H:%M") }}`, clockSecond)
	f(`{{ strftime_now("%Y") }}{{ strftime_now("%c") }}`, clockSecond)
	f(`{{ strftime_now(format) }}`, clockSecond)
	f(`{{ strftime_now("%Y" ~ x) }}`, clockSecond)

	m, err := Load(Source{
		Tokenizer: directory(t, "tokenizer.json", bytesTokenizer(), "chat_template.jinja", `{{ strftime_now("%d") }}`),
		Cache:     tokenizer.NewCache(1 << 20),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	for day := range 3 {
		for range 4 {
			var p Prompt
			m.Follow(&p, Chat, []byte(hello), time.Date(2026, 7, 4+day, 9, 0, 0, 0, time.UTC))
			if want := fmt.Sprintf("[48 %d]", '4'+day); p.Reason != Exact || fmt.Sprint(p.IDs) != want {
				t.Fatalf("day %d: got %v %v, want %s", day, p.Reason, p.IDs, want)
			}
		}
	}
}

// TestRepositoryTellsTheClass: of a distillate that an engine loads by its name
// transformers takes the file as it is, of the same files in a directory it does
// not.
func TestRepositoryTellsTheClass(t *testing.T) {
	cache := t.TempDir()
	snapshot := filepath.Join(cache, "models--deepseek-ai--DeepSeek-R1-Distill-Llama-8B/snapshots/0123")
	if err := os.MkdirAll(snapshot, 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, snapshot, "config.json", map[string]any{"model_type": "llama"})
	write(t, snapshot, "tokenizer_config.json", map[string]any{"tokenizer_class": "LlamaTokenizerFast"})
	if err := os.WriteFile(filepath.Join(snapshot, "tokenizer.json"), []byte(bytesTokenizer()), 0o600); err != nil {
		t.Fatal(err)
	}
	f := func(name string, want bool) {
		t.Helper()
		m, err := Load(Source{Tokenizer: name, HubCache: cache})
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		var p Prompt
		m.Follow(&p, Completion, []byte(`{"prompt":"ab"}`), epoch)
		if got := p.Reason == Exact && slices.Equal(p.IDs, []uint32{'a', 'b'}); got != want {
			t.Errorf("%s: %v, ids %d; as in the file: want %v", name, p.Reason, p.IDs, want)
		}
	}
	f("deepseek-ai/DeepSeek-R1-Distill-Llama-8B@0123", true)
	f(snapshot, false)
}
