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
// makes of them; testdata/requests.py has asked it. Without a tokenizer the
// rendered text tells whether all variables of the template are the same. What
// the engine takes and Follow does not has the argument "unfollowed".
func TestRequestsAsVLLM(t *testing.T) {
	models := setups(t)
	datadriven.Walk(t, "testdata/requests", func(t *testing.T, path string) {
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
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
			want := d.Expected
			if len(p.IDs) == 0 {
				want = texts(want)
			}
			if got := outcome(&p); got != want {
				return got
			}
			return d.Expected
		})
	})
}

// epoch is the time of tests whose templates do not ask for it.
var epoch = time.Unix(0, 0)

// outcome writes a prompt as testdata/requests.py does.
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

// texts drops the lines of ids.
func texts(want string) string {
	var lines []string
	for _, line := range strings.Split(strings.TrimSuffix(want, "\n"), "\n") {
		if strings.Trim(line, "0123456789 ") == "" {
			continue
		}
		if strings.HasPrefix(line, `"`) {
			var text string
			if json.Unmarshal([]byte(line), &text) == nil {
				line = text
			}
		}
		lines = append(lines, line)
	}
	return strings.Join(lines, "\n") + "\n"
}

// setups are the models that testdata/requests.py has asked, without their
// tokenizer.
func setups(t testing.TB) map[string]*Model {
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
	}
	if err := json.Unmarshal(data, &all); err != nil {
		t.Fatal(err)
	}
	models := map[string]*Model{}
	for name, setup := range all {
		dir := t.TempDir()
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
