package tokenizer

import (
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"unicode/utf8"
)

// golden is what testdata/golden.py has written about one model: the token ids
// that transformers 4 and 5 give, as engines of either time do. vLLM 0.32 does
// as transformers 5.
type golden struct {
	Package, SHA256 string
	Versions        []goldenVersion
	// Strings are the ids of goldenStrings.
	Strings       []goldenIDs
	Conversations []struct {
		Text   string
		SHA256 string
		IDs    goldenIDs
	}
}

// goldenVersion is what a version of transformers makes of the tokenizer.json
// while it loads it, because of the tokenizer_class beside it: parts that it
// puts in place of the file's.
type goldenVersion struct {
	Transformers, Tokenizers string
	Parts, Model             map[string]json.RawMessage
}

func (v goldenVersion) changes() int { return len(v.Parts) + len(v.Model) }

// goldenIDs are the ids of a text by version 0, without and with special
// tokens, and by version 1 unless they are the same.
type goldenIDs [][]uint32

func (ids goldenIDs) by(version int, special bool) []uint32 {
	i := 0
	if special {
		i = 1
	}
	if version == 1 && len(ids) == 4 {
		i += 2
	}
	return ids[i]
}

func readGolden(t testing.TB, name string, into any) {
	t.Helper()
	f, err := os.Open("testdata/golden/" + name + ".json.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err == nil {
		err = json.NewDecoder(z).Decode(into)
	}
	if err != nil {
		t.Fatalf("%s: %v", f.Name(), err)
	}
}

// file returns the tokenizer.json as a version of transformers has it.
func (v goldenVersion) file(t testing.TB, data []byte) []byte {
	t.Helper()
	if v.changes() == 0 {
		return data
	}
	put := func(data []byte, parts map[string]json.RawMessage) []byte {
		var file map[string]json.RawMessage
		if err := json.Unmarshal(data, &file); err != nil {
			t.Fatal(err)
		}
		for k, part := range parts {
			file[k] = part
		}
		data, err := json.Marshal(file)
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	data = put(data, v.Parts)
	if len(v.Model) > 0 {
		var file struct{ Model json.RawMessage }
		if err := json.Unmarshal(data, &file); err != nil {
			t.Fatal(err)
		}
		data = put(data, map[string]json.RawMessage{"model": put(file.Model, v.Model)})
	}
	return data
}

// eachGolden loads every model as every version has it, and has test check
// texts and their ids. load gets the tokenizer.json.
func eachGolden(t *testing.T, load func(t *testing.T, data []byte) *Tokenizer, test func(t *testing.T, k *Tokenizer, text string, special bool, want []uint32)) {
	var texts []string
	readGolden(t, "strings", &texts)
	for _, model := range npmModels {
		data := tokenizerJSON(t, model)
		var g golden
		readGolden(t, model, &g)
		if sum := sha256.Sum256(data); hex.EncodeToString(sum[:]) != g.SHA256 {
			t.Fatalf("%s: tokenizer.json has SHA-256 %x, the goldens are of %s", g.Package, sum, g.SHA256)
		}
		if len(texts) < 200 || len(g.Strings) != len(texts) || len(g.Conversations) < 60 || len(g.Versions) != 2 {
			t.Fatalf("%s: ids of %d of %d strings, %d conversations, %d versions", model, len(g.Strings), len(texts), len(g.Conversations), len(g.Versions))
		}
		differ := slices.ContainsFunc(g.Strings, func(ids goldenIDs) bool { return len(ids) == 4 })
		if differ && g.Versions[0].changes()+g.Versions[1].changes() == 0 {
			t.Fatalf("%s: two versions give different ids by the same file", model)
		}
		for i, version := range g.Versions {
			if i == 1 && version.changes() == 0 && g.Versions[0].changes() == 0 {
				continue // the same file, and by goldenIDs the same ids
			}
			t.Run(model+"/"+version.Transformers, func(t *testing.T) {
				k := load(t, version.file(t, data))
				defer k.Close()
				for _, special := range []bool{false, true} {
					for n, text := range texts {
						test(t, k, text, special, g.Strings[n].by(i, special))
					}
					for _, c := range g.Conversations {
						if sum := sha256.Sum256([]byte(c.Text)); hex.EncodeToString(sum[:]) != c.SHA256 {
							t.Fatalf("the text of a conversation has SHA-256 %x, not %s", sum, c.SHA256)
						}
						test(t, k, c.Text, special, c.IDs.by(i, special))
					}
					if t.Failed() {
						return
					}
				}
			})
		}
	}
}

// wantIDs reports the first id that differs.
func wantIDs(t testing.TB, name string, got, want []uint32, text string) {
	t.Helper()
	if slices.Equal(got, want) {
		return
	}
	i := 0
	for i < min(len(got), len(want)) && got[i] == want[i] {
		i++
	}
	around := func(ids []uint32) []uint32 { return ids[max(0, i-3):min(len(ids), i+6)] }
	shown := text
	if len(shown) > 120 {
		shown = shown[:120]
	}
	t.Errorf("%s: %d ids, want %d; the %dth is another: ... %d ..., want ... %d ...\nof %+q (%d bytes)",
		name, len(got), len(want), i, around(got), around(want), shown, len(text))
}

// The ids of every golden text are those of the engine: encoded at once, put
// together from the cache, and when the cache has seen another part of it.
func TestGolden(t *testing.T) {
	var cache *Cache
	var plain *Tokenizer
	load := func(t *testing.T, data []byte) *Tokenizer {
		var err error
		if plain, err = loadJSON(data, Options{}); err != nil {
			t.Fatal(err)
		}
		cache = NewCache(64 << 20)
		return newTokenizer(plain.pipeline, plain.kind, Options{Cache: cache}) // to load takes longest
	}
	var dst []uint32
	eachGolden(t, load, func(t *testing.T, cached *Tokenizer, text string, special bool, want []uint32) {
		half := len(text) / 2
		for half < len(text) && !utf8.RuneStart(text[half]) {
			half++
		}
		name := fmt.Sprintf("special %v", special)
		wantIDs(t, name, plain.Append(dst[:0], text, special), want, text)
		cached.Append(dst[:0], text[:half], special)
		for _, seen := range []string{", half seen", ", seen"} {
			dst = append(dst[:0], 7)
			dst = cached.Append(dst, text, special)
			wantIDs(t, name+seen, dst[1:], want, text)
		}
	})
}

// A directory is loaded as transformers 5 and vLLM 0.32 load it.
func TestGoldenDirectory(t *testing.T) {
	var texts []string
	readGolden(t, "strings", &texts)
	modelTypes := map[string]string{"qwen3": "qwen3", "llama3_1": "llama", "gptoss": "gpt_oss", "deepseek_v3": "deepseek_v3", "gemma3": "gemma3_text", "llama2": "llama"}
	for _, model := range npmModels {
		t.Run(model, func(t *testing.T) {
			data := tokenizerJSON(t, model)
			packages, err := packages(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			config, err := os.ReadFile(filepath.Join(packagePath(packages, model), "models/tokenizer_config.json"))
			if err != nil {
				t.Fatal(err)
			}
			dir := t.TempDir()
			for name, content := range map[string][]byte{"tokenizer.json": data, "tokenizer_config.json": config, "config.json": fmt.Appendf(nil, `{"model_type": %q}`, modelTypes[model])} {
				if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			k, err := Load(dir, Options{})
			if err != nil {
				t.Fatal(err)
			}
			defer k.Close()
			var g golden
			readGolden(t, model, &g)
			for _, special := range []bool{false, true} {
				for i, text := range texts {
					wantIDs(t, fmt.Sprintf("special %v", special), k.Append(nil, text, special), g.Strings[i].by(1, special), text)
				}
				for _, c := range g.Conversations {
					wantIDs(t, fmt.Sprintf("special %v", special), k.Append(nil, c.Text, special), c.IDs.by(1, special), c.Text)
				}
			}
		})
	}
}
