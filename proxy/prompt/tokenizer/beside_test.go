package tokenizer

import (
	"compress/gzip"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// besideFile is what testdata/beside.py writes.
type besideFile struct {
	Texts []string
	Bases map[string]map[string]json.RawMessage
	Cases []struct {
		Base  string
		Added json.RawMessage `json:"added_tokens"`
		Post  json.RawMessage `json:"post_processor"`
		Files map[string]json.RawMessage
		Class string
		IDs   [][][]uint32 // of the texts without special tokens, and with them
	}
}

// TestFilesBesideAsTransformers: what transformers makes of random settings
// beside a tokenizer.json is followed, or refused, but never mistaken.
// INFERRAIL_BESIDE names another file of the script's.
func TestFilesBesideAsTransformers(t *testing.T) {
	path := "testdata/beside.json.gz"
	if other := os.Getenv("INFERRAIL_BESIDE"); other != "" {
		path = other
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	unzipped, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var all besideFile
	if err := json.NewDecoder(unzipped).Decode(&all); err != nil {
		t.Fatal(err)
	}
	followed, wrong := 0, 0
	for i, c := range all.Cases {
		dir := t.TempDir()
		whole := map[string]json.RawMessage{}
		for name, v := range all.Bases[c.Base] {
			if name != "specials" {
				whole[name] = v
			}
		}
		whole["added_tokens"], whole["post_processor"] = c.Added, c.Post
		files := map[string]any{"tokenizer.json": whole}
		for name, v := range c.Files {
			files[name] = v
		}
		for name, content := range files {
			data, err := json.Marshal(content)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		tok, err := Load(dir, Options{})
		if c.IDs == nil {
			continue // the engine does not start with it
		}
		if err != nil {
			if !errors.Is(err, ErrUnrecognised) {
				t.Errorf("case %d: %s loads, but not here: %v", i, c.Class, err)
			}
			continue
		}
		followed++
	texts:
		for k, text := range all.Texts {
			for special := range 2 {
				if got, want := tok.Append(nil, text, special == 1), c.IDs[special][k]; !slices.Equal(got, want) {
					if wrong++; wrong < 10 {
						t.Errorf("case %d, %s, class %s: %q, special tokens %v: got %v, want %v\nadded %s\nbeside %s",
							i, c.Base, c.Class, text, special == 1, got, want, c.Added, c.Files)
					}
					break texts
				}
			}
		}
		tok.Close()
	}
	t.Logf("%d of %d followed, %d wrong", followed, len(all.Cases), wrong)
	if followed < len(all.Cases)/3 {
		t.Errorf("only %d of %d are followed", followed, len(all.Cases))
	}
}
