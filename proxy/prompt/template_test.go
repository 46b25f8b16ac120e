package prompt

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
		shared = "../../../shared"
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
			return jsonNumber(tok.String())
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
	compiled := map[string]*template{}
	failed := map[string]int{}
	for _, c := range cases {
		tmpl, ok := compiled[c.Template]
		if !ok {
			source, err := os.ReadFile(filepath.Join(folder, c.Template+".jinja"))
			if err != nil {
				t.Fatal(err)
			}
			if tmpl, err = compileTemplate(string(source)); err != nil {
				t.Errorf("%s: %v", c.Template, err)
			}
			compiled[c.Template] = tmpl
		}
		if tmpl == nil {
			continue
		}
		if tmpl.contentFormat() != c.Format && !laterOpenAI[c.Template] {
			t.Errorf("%s: content format %q, want %q", c.Template, tmpl.contentFormat(), c.Format)
		}
		vars := variables(t, c.Context)
		text, err := tmpl.render(vars, corpusNow)
		switch {
		case errors.Is(err, errUnfollowed):
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
