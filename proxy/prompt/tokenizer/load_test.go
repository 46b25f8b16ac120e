package tokenizer

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// loadJSON is fromJSON of a file that nothing lies beside.
func loadJSON(data []byte, o Options) (*Tokenizer, error) {
	t, _, err := fromJSON(data, settings{}, o)
	return t, err
}

// Whatever is not followed exactly is told by the part's name, and left to the
// library; what is no tokenizer.json at all is an error.
func TestFromJSONIsStrict(t *testing.T) {
	base := toyPipelines()["gpt2"].json(t)
	sentence := toyPipelines()["gemma"].json(t)
	f := func(file, old, new, want string) {
		t.Helper()
		changed := strings.Replace(file, old, new, 1)
		if changed == file {
			t.Fatalf("%s is not in the file", old)
		}
		_, err := loadJSON([]byte(changed), Options{})
		if !errors.Is(err, ErrUnrecognised) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %s unrecognised", new, err, want)
		}
	}
	if _, err := loadJSON([]byte(base), Options{}); err != nil {
		t.Fatal(err)
	}
	f(base, `"version":"1.0"`, `"version":"2.0"`, "version")
	f(base, `"version":"1.0"`, `"version":"1.0","later":1`, `member "later"`)
	f(base, `"truncation":null`, `"truncation":{"max_length":5}`, "truncation")
	f(base, `"padding":null`, `"padding":{}`, "padding")
	f(base, `"normalizer":null`, `"normalizer":{"type":"Lowercase"}`, "normalizer")
	f(base, `"normalizer":null`, `"normalizer":{"type":"NFC","later":true}`, "normalizer")
	f(base, `"normalizer":null`, `"normalizer":{"type":"Sequence","normalizers":[{"type":"NFC"},{"type":"Strip"}]}`, "normalizer")
	f(base, `"normalizer":null`, `"normalizer":`+replaceSpaces, "normalizer")
	f(base, `"add_prefix_space":false`, `"add_prefix_space":true`, "pre_tokenizer")
	f(base, `"use_regex":true`, `"use_regex":false`, "pre_tokenizer")
	f(base, `"type":"ByteLevel"`, `"type":"Whitespace"`, "pre_tokenizer")
	f(base, `"pre_tokenizer":`+byteLevelOnly, `"pre_tokenizer":`+split(`\p{N}+|.`), "pattern")
	f(base, `"pre_tokenizer":`+byteLevelOnly, `"pre_tokenizer":`+splits(`\p{N}{1,3}`, `\s+`, `.`), "pre_tokenizer")
	f(base, `"pre_tokenizer":`+byteLevelOnly, `"pre_tokenizer":null`, "pre_tokenizer")
	f(base, `"post_processor":null`, `"post_processor":{"type":"RobertaProcessing"}`, "post_processor")
	f(base, `"post_processor":null`, `"post_processor":{"type":"TemplateProcessing","single":[],"pair":[],"special_tokens":{}}`, "post_processor")
	const bos = `{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"!","type_id":0}},{"Sequence":{"id":"A","type_id":0}}],"pair":[],"special_tokens":{"!":{"id":"!","ids":[0],"tokens":["!"]}}}`
	f(base, `"post_processor":null`, `"post_processor":{"type":"Sequence","processors":[`+bos+`,`+bos+`]}`, "several in a row")
	f(base, `"type":"BPE"`, `"type":"WordPiece"`, "model type")
	f(base, `"dropout":null`, `"dropout":0.1`, "dropout")
	f(base, `"continuing_subword_prefix":null`, `"continuing_subword_prefix":"##"`, "continuing_subword_prefix")
	f(base, `"end_of_word_suffix":null`, `"end_of_word_suffix":"</w>"`, "end_of_word_suffix")
	f(base, `"ignore_merges":false`, `"ignore_merges":false,"later":1`, "model member")
	f(base, `"added_tokens":[`, `"added_tokens":[{"id":1,"content":"<s>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true},`, "added token")
	f(base, `"Ā":`, `"ĀĀĀ":`, "byte 0x00")
	f(sentence, `"byte_fallback":true`, `"byte_fallback":false`, "byte_fallback")
	f(sentence, `"ignore_merges":false`, `"ignore_merges":true`, "ignore_merges")
	f(sentence, `"normalizer":`+replaceSpaces, `"normalizer":null`, "pre_tokenizer")
	f(sentence, `"\u003c0x41\u003e":`, `"\u003c0x4\u003e":`, "<0x41>")

	g := func(file, want string) {
		t.Helper()
		_, err := loadJSON([]byte(file), Options{})
		if err == nil || errors.Is(err, ErrUnrecognised) || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60s: got %v, want an error with %q", file, err, want)
		}
	}
	g("", "EOF")
	g("[]", "no JSON object")
	g(`{"version":"1.0"}`, "no model")
	g(base[:len(base)-1], "EOF")
	g(base[:len(base)/2], "EOF")
	g(base+"{}", "more after")
	g(strings.Replace(base, `"merges":[`, `"merges":[["nosuch","a"],`, 1), "not in the vocabulary")
	g(strings.Replace(base, `"merges":[`, `"merges":["a b c",`, 1), "two tokens")
	g(strings.Replace(base, `"merges":[`, `"merges":[["a","b","c"],`, 1), "more than two")
	g(strings.Replace(base, `"merges":[`, `"merges":[7,`, 1), "no pair")
	g(strings.Replace(base, `"merges":[`, `"merges":[[1,2],`, 1), "no pair")
	g(strings.Replace(base, `"vocab":{`, `"vocab":{"a":-1,`, 1), "the id of")
	g(strings.Replace(base, `"vocab":{`, `"vocab":{"a":1.5,`, 1), "the id of")
	g(strings.Replace(base, `"vocab":{`, `"vocab":{"a":"b",`, 1), "the id of")
	g(strings.Replace(base, `"vocab":{`, `"vocab":{"a":5000000000,`, 1), "the id of")
	g(strings.Replace(base, `"vocab":{`, `"vocab":{"a":1,`, 1), "twice")
}

// Merges may be strings, and come before the vocabulary.
func TestOldFilesLoad(t *testing.T) {
	tok := toyPipelines()["gpt2"].load(t)
	want := fmt.Sprint(tok.Append(nil, toyText, false))
	f := func(file string) {
		t.Helper()
		tok, err := loadJSON([]byte(file), Options{})
		if err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(tok.Append(nil, toyText, false)); got != want {
			t.Errorf("the ids are others")
		}
	}
	base := toyPipelines()["gpt2"].json(t)
	start := strings.Index(base, `"merges":[`)
	end := start + strings.Index(base[start:], `]]`) + 2
	merges := base[start:end]
	f(strings.Replace(base, merges, `"merges":["`+strings.NewReplacer(`"],["`, `","`, `","`, ` `, `[["`, ``, `"]]`, ``).Replace(strings.TrimPrefix(merges, `"merges":`))+`"]`, 1))
	f(strings.Replace(strings.Replace(base, merges+",", "", 1), `"vocab":{`, merges+`,"vocab":{`, 1))
}

func TestLoadTellsWhatToChange(t *testing.T) {
	f := func(name, content, want string) {
		t.Helper()
		dir := t.TempDir()
		if name != "" {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		_, err := Load(dir, Options{})
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), dir) {
			t.Errorf("got %v, want %q and the directory in it", err, want)
		}
	}
	f("", "", "neither tokenizer.json nor tekken.json")
	f("tokenizer.json", "{", "EOF")
	f("tekken.json", "{", "tekken.json")
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "tokenizer.json"), []byte(toyPipelines()["gpt2"].json(t)), 0o600); err != nil {
		t.Fatal(err)
	}
	tok, err := Load(dir, Options{Cache: NewCache(1 << 20)})
	if err != nil {
		t.Fatal(err)
	}
	if tok.Kind() != "byte-level BPE (GPT-2), native" {
		t.Errorf("it is %q", tok.Kind())
	}
}

// No file makes the loader panic.
func FuzzLoadJSON(f *testing.F) {
	y := toyPipelines()["gpt2"]
	y.merges = 5
	f.Add([]byte(y.json(f)))
	y = toyPipelines()["first"]
	y.merges = 5
	f.Add([]byte(y.json(f)))
	f.Fuzz(func(t *testing.T, data []byte) {
		tok, err := loadJSON(data, Options{})
		if err == nil {
			tok.Append(nil, toyText, true)
		}
	})
}
