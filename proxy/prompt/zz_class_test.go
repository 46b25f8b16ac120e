package prompt

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/inferrail/inferrail/proxy/prompt/tokenizer"
)

func TestZZClass(t *testing.T) {
	root := os.Getenv("INFERRAIL_CLS")
	if root == "" {
		t.Skip()
	}
	dirs, _ := filepath.Glob(root + "/*")
	out := map[string]int{}
	for _, d := range dirs {
		data, err := os.ReadFile(d + "/want.json")
		if err != nil {
			continue
		}
		var w struct {
			Kind, MT, Class, Got, Error string
			Cases                       [][3]json.RawMessage
		}
		if err := json.Unmarshal(data, &w); err != nil {
			t.Fatal(err)
		}
		m, err := Load(Source{Tokenizer: d, Cache: tokenizer.NewCache(1 << 20)})
		label := "native"
		switch {
		case err != nil:
			label = "error " + err.Error()
			label = label[:min(len(label), 0)] + "loaderror"
		case m.tokenizer == nil:
			label = "lacking"
		}
		if w.Error != "" {
			label += " oracle fails"
		}
		if err != nil && w.Error == "" {
			t.Logf("LOADERR %s %s %s %s: %v", d, w.MT, w.Class, w.Got, err)
		}
		if label == "lacking" {
			t.Logf("LACK %s/%s/%s: %.200s", w.Kind, w.Class, w.Got, m.why)
		}
		if label == "native" {
			for _, c := range w.Cases {
				var text string
				var with, without []uint32
				json.Unmarshal(c[0], &text)
				json.Unmarshal(c[1], &with)
				json.Unmarshal(c[2], &without)
				a, b := m.tokenizer.Append(nil, text, true), m.tokenizer.Append(nil, text, false)
				if !slices.Equal(a, with) || !slices.Equal(b, without) {
					label = "WRONG"
					how, _ := m.Describe()
					t.Errorf("WRONG %s kind=%s mt=%s class=%s engine=%s %q:\n got %v\nwant %v\n got %v\nwant %v\n%s", d, w.Kind, w.MT, w.Class, w.Got, text, a, with, b, without, how)
					break
				}
			}
		}
		out[label]++
	}
	t.Log(out)
}
