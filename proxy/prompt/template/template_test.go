package template

import (
	"compress/gzip"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ardanlabs/jinja"
)

// corpusNow is the time at which the corpus and the snippets were rendered.
var corpusNow = time.Date(2026, 7, 4, 9, 5, 3, 0, time.UTC)

// corpusCase is one render of a real template by Python.
type corpusCase struct {
	Template string          `json:"tpl"`
	Case     string          `json:"case"`
	Format   string          `json:"fmt"`
	Context  json.RawMessage `json:"ctx"`
	Out      *string         `json:"out"`
	Err      *string         `json:"err"`
}

// corpus returns the folder of real templates and the renders of them. They
// belong to their models and are not part of the repository.
func corpus(t testing.TB) (folder string, cases []corpusCase) {
	t.Helper()
	shared := os.Getenv("INFERRAIL_SHARED")
	if shared == "" {
		shared = "../../../../shared"
	}
	folder = filepath.Join(shared, "templates")
	f, err := os.Open(filepath.Join(folder, "cases.json.gz"))
	if err != nil {
		t.Skipf("no corpus of chat templates (set INFERRAIL_SHARED to the folder that holds templates/): %v", err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.NewDecoder(z).Decode(&cases); err != nil {
		t.Fatal(err)
	}
	return folder, cases
}

// variables decodes a JSON object as the variables of a template.
func variables(t testing.TB, text []byte) map[string]jinja.Value {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(string(text)))
	d.UseNumber()
	var decode func() jinja.Value
	token := func() json.Token {
		tok, err := d.Token()
		if err != nil {
			t.Fatal(err)
		}
		return tok
	}
	decode = func() jinja.Value {
		switch tok := token().(type) {
		case json.Delim:
			if tok == '[' {
				var items []jinja.Value
				for d.More() {
					items = append(items, decode())
				}
				token()
				return jinja.NewList(items)
			}
			v := jinja.NewDict()
			for d.More() {
				key := token().(string)
				v.AsDict().Set(key, decode())
			}
			token()
			return v
		case json.Number:
			return Number(tok.String())
		case string:
			return jinja.NewString(tok)
		case bool:
			return jinja.NewBool(tok)
		}
		return jinja.None()
	}
	return decode().AsDict().Data
}

// laterOpenAI are the templates whose contents vLLM 0.32 has found out to be
// lists of parts, since it follows them through macros, which the corpus
// does not know yet.
var laterOpenAI = map[string]bool{
	"ard-Qwen3.5-35B-A3B-Q8_0": true, "ard-Qwen3.6-35B-A3B-UD-Q4_K_M": true,
	"hfjs-LiquidAI_LFM2.5-VL-450M": true, "hfjs-Qwen_Qwen3.5-4B": true,
}

func TestTemplateCorpus(t *testing.T) {
	folder, cases := corpus(t)
	compiled := map[string]*Template{}
	failed := map[string]int{}
	for _, c := range cases {
		tmpl, ok := compiled[c.Template]
		if !ok {
			source, err := os.ReadFile(filepath.Join(folder, c.Template+".jinja"))
			if err != nil {
				t.Fatal(err)
			}
			if tmpl, err = Compile(string(source)); err != nil {
				t.Errorf("%s: %v", c.Template, err)
			}
			compiled[c.Template] = tmpl
		}
		if tmpl == nil {
			continue
		}
		if tmpl.ContentFormat() != c.Format && !laterOpenAI[c.Template] {
			t.Errorf("%s: content format %q, want %q", c.Template, tmpl.ContentFormat(), c.Format)
		}
		vars := variables(t, c.Context)
		text, err := tmpl.Render(vars, corpusNow)
		switch {
		case errors.Is(err, ErrUnfollowed):
			t.Errorf("%s/%s: %v", c.Template, c.Case, err)
		case c.Err != nil:
			if err == nil {
				t.Errorf("%s/%s: rendered, want the error %s", c.Template, c.Case, *c.Err)
			}
		case err != nil:
			t.Errorf("%s/%s: %v", c.Template, c.Case, err)
		case text != *c.Out:
			if failed[c.Template]++; failed[c.Template] < 3 {
				t.Errorf("%s/%s:\n got %q\nwant %q", c.Template, c.Case, text, *c.Out)
			}
		}
	}
}

func TestTemplateContentFormat(t *testing.T) {
	f := func(source, want string) {
		t.Helper()
		tmpl, err := Compile(source)
		if err != nil {
			t.Fatal(err)
		}
		if got := tmpl.ContentFormat(); got != want {
			t.Errorf("%q: got %s, want %s", source, got, want)
		}
	}
	f("{% for m in messages %}{{ m.content }}{% endfor %}", "string")
	f("{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}", "openai")
	f("{% for m in messages[1:] %}{% for c in m['content']|list %}{% endfor %}{% endfor %}", "openai")
	f("{% set loop_messages = messages %}{% for m in loop_messages %}{% for c in m.content %}{% endfor %}{% endfor %}", "openai")
	f("{% for m in messages %}{% set content = m.content %}{% for c in content %}{% endfor %}{% endfor %}", "openai")
	f("{% for c in content %}{% endfor %}", "openai")
	f("{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}", "string")
	f("{% for m in others %}{% for c in m.content %}{% endfor %}{% endfor %}", "string")
	// Contents that a macro loops over count when a call passes them to it.
	f("{% macro parts(x) %}{% for c in x %}{% endfor %}{% endmacro %}{% for m in messages %}{{ parts(m.content) }}{% endfor %}", "openai")
	f("{% macro parts(x) %}{% for c in x %}{% endfor %}{% endmacro %}{% for m in messages %}{{ parts(x=m.content) }}{% endfor %}", "openai")
	f("{% macro parts(x) %}{% for c in x %}{% endfor %}{% endmacro %}{% for m in messages %}{{ parts(m.name) }}{% endfor %}", "string")
	f("{% macro parts(content) %}{% for c in content %}{% endfor %}{% endmacro %}{{ parts(s) }}", "string")
	// What the search cannot read ends it.
	f("{% set a, b = messages, 1 %}{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}", "openai")
	f("{% for a, b in messages %}{% endfor %}{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}", "string")
}

func TestTemplateUses(t *testing.T) {
	tmpl, err := Compile("{% for m in messages %}{{ m.x }}{% endfor %}{% if not thinking is defined %}{% set thinking = 1 %}{% endif %}{% set own = thinking %}{{ own }}")
	if err != nil {
		t.Fatal(err)
	}
	f := func(name string, want bool) {
		t.Helper()
		if got := tmpl.Uses(name); got != want {
			t.Errorf("uses %s: %v, want %v", name, got, want)
		}
	}
	f("messages", true)
	f("thinking", true)
	f("m", false)
	f("x", false)
	f("own", false)
	f("tools", false)
	if tmpl.UsesClock() {
		t.Error("the template is said to ask for the time")
	}
	tmpl, err = Compile("{% if date is defined %}{{ date }}{% else %}{{ strftime_now('%Y') }}{% endif %}")
	if err != nil {
		t.Fatal(err)
	}
	if !tmpl.UsesClock() {
		t.Error("the template is not said to ask for the time")
	}
}

// Numbers are written as Python writes what json.loads makes of them.
func TestTemplateNumbers(t *testing.T) {
	tmpl, err := Compile("{{ n }} {{ n|tojson }} {{ [n] }} {{ n is number }} {{ n is integer }}")
	if err != nil {
		t.Fatal(err)
	}
	f := func(number, written, isInteger string) {
		t.Helper()
		text, err := tmpl.Render(map[string]jinja.Value{"n": Number(number)}, corpusNow)
		if want := written + " " + written + " [" + written + "] True " + isInteger; err != nil || text != want {
			t.Errorf("%s: got %q, %v, want %q", number, text, err, want)
		}
	}
	f("0", "0", "True")
	f("-0", "0", "True")
	f("-0.0", "-0.0", "False")
	f("1.0", "1.0", "False")
	f("1e22", "1e+22", "False")
	f("1E5", "100000.0", "False")
	f("1e-07", "1e-07", "False")
	f("0.0001", "0.0001", "False")
	f("1e16", "1e+16", "False")
	f("9007199254740993", "9007199254740993", "True")
	f("9223372036854775807", "9223372036854775807", "True")
	f("9223372036854775808", "9223372036854775808", "True")
	f("-123456789012345678901234567890", "-123456789012345678901234567890", "True")
}

// A variable that replaces a function of the templates is not followed.
func TestTemplateFunctionsGiven(t *testing.T) {
	tmpl, err := Compile("{{ raise_exception('x') }}")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tmpl.Render(nil, corpusNow); err == nil || errors.Is(err, ErrUnfollowed) || err.Error() != "x" {
		t.Errorf("got %v, want x", err)
	}
	vars := map[string]jinja.Value{"raise_exception": jinja.NewString("s")}
	if _, err := tmpl.Render(vars, corpusNow); !errors.Is(err, ErrUnfollowed) {
		t.Errorf("got %v, want it not to be followed", err)
	}
}

// Render is Append with a string of its own.
func (t *Template) Render(vars map[string]jinja.Value, now time.Time) (text string, err error) {
	b, err := t.Append(nil, vars, now)
	return string(b), err
}
