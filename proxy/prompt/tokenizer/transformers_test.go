package tokenizer

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// What transformers 5 makes of a tokenizer.json because of the files beside it.
func TestSettingsChangeTheFile(t *testing.T) {
	dir := t.TempDir()
	write := func(name, content string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	load := func(file, config, tokenizerConfig string) *Tokenizer {
		t.Helper()
		write("tokenizer.json", file)
		write("config.json", config)
		write("tokenizer_config.json", tokenizerConfig)
		tok, err := Load(dir, Options{})
		if err != nil {
			t.Fatal(err)
		}
		return tok
	}
	same := func(got, want *Tokenizer, text string, equal bool) {
		t.Helper()
		a, b := got.Append(nil, text, true), want.Append(nil, text, true)
		if slices.Equal(a, b) != equal {
			t.Errorf("%q: got %v beside %v, want equal: %v", text, a, b, equal)
		}
	}
	// A Llama tokenizer is built anew by its class: spaces before the text, and
	// parts after added tokens, are treated in another way.
	all := toyPipelines()
	legacy := all["llama2"].json(t)
	config := func(legacy, prefix string) string {
		return fmt.Sprintf(`{"tokenizer_class":"LlamaTokenizerFast","legacy":%s,"add_prefix_space":%s}`, legacy, prefix)
	}
	const text = " the<s>the"
	same(load(legacy, `{"model_type":"llama"}`, config("true", "null")), all["always"].load(t), text, true)
	same(load(legacy, `{"model_type":"llama"}`, config("false", "true")), all["first"].load(t), text, true)
	never := all["never"]
	never.postProcessor = ""
	same(load(legacy, `{"model_type":"llama"}`, config("false", "false")), never.load(t), text, true)
	same(load(legacy, `{"model_type":"llama"}`, config("false", "null")), all["llama2"].load(t), text, false)
	same(load(legacy, `{}`, config("false", "null")), all["first"].load(t), text, true)
	// Other models keep the file.
	same(load(legacy, `{"limit":[0.0,Infinity],"model_type":"phi3","x":-Infinity}`, config("false", "null")), all["llama2"].load(t), text, true)
	same(load(legacy, `{"model_type":"llama"}`, `{"tokenizer_class":"PreTrainedTokenizerFast"}`), all["llama2"].load(t), text, true)
	// Qwen's class has its own pattern.
	qwen := all["Qwen, NFC, whole"]
	qwen.ignoreMerges, qwen.postProcessor = false, ""
	same(load(all["Llama 3"].json(t), `{"model_type":"qwen2"}`, `{"tokenizer_class":"LlamaTokenizerFast"}`), qwen.load(t), "123 e\u0301", true)
	// Added tokens take the flags of the settings, and named ones are added.
	tok := load(all["gpt2"].json(t), `{"model_type":"x"}`, `{"tokenizer_class":"PreTrainedTokenizerFast","eos_token":"<|eot|>","bos_token":{"content":"<s>","rstrip":true},
		"additional_special_tokens":["<x>"],"added_tokens_decoder":{"9":{"content":"<|im_end|>","lstrip":true,"rstrip":false,"normalized":false,"single_word":false,"special":true}}}`)
	ids := tok.Append(nil, "<s> <|im_end|><|eot|><x>", false)
	var want []uint32
	for _, text := range []string{"<s>", "<|im_end|>", "<|eot|>", "<x>"} {
		id, ok := tok.Token(text)
		if !ok {
			t.Errorf("%q has no id", text)
		}
		want = append(want, id)
	}
	if !slices.Equal(ids, want) {
		t.Errorf("got %v, want %v", ids, want)
	}
	write("config.json", "{")
	if _, err := Load(dir, Options{}); err == nil {
		t.Error("a config.json that is no JSON is no error")
	}
}

func TestLoadAgreesWithTransformers(t *testing.T) {
	o := startOracle(t)
	f := func(model, modelType, settings string) {
		t.Helper()
		t.Run(model+" "+modelType, func(t *testing.T) {
			path := modelPath(t, model)
			dir := t.TempDir()
			for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
				data, err := os.ReadFile(filepath.Join(filepath.Dir(path), name))
				if err != nil {
					t.Fatal(err)
				}
				if name == "tokenizer_config.json" && settings != "" {
					data = []byte(settings)
				}
				if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(`{"model_type":"`+modelType+`"}`), 0o600); err != nil {
				t.Fatal(err)
			}
			tok, err := Load(dir, Options{})
			if err != nil {
				t.Fatal(err)
			}
			o.ask(map[string]any{"directory": dir}, new([]int))
			r := rand.New(rand.NewPCG(21, 22))
			texts := append(randomTexts(r, 1500), " a", "<s> a</s> b", "▁a", "</s>x", "<|x|>y", "", " ")
			o.agrees(t, tok, texts, true)
			o.agrees(t, tok, texts, false)
		})
	}
	f("qwen3", "qwen3", "")
	f("llama3_1", "llama", "")
	f("gptoss", "gpt_oss", "")
	f("deepseek_v3", "deepseek_v3", "")
	f("gemma3", "gemma3_text", "")
	f("llama2", "llama", "")
	f("llama2", "mistral", "")
	f("llama2", "phi3", "")
	f("llama2", "llama", `{"tokenizer_class":"LlamaTokenizer","legacy":false,"unk_token":"<unk>","bos_token":"<s>","eos_token":"</s>"}`)
	f("llama2", "llama", `{"tokenizer_class":"LlamaTokenizerFast","add_prefix_space":false,"additional_special_tokens":["<|x|>"],"pad_token":"<pad>"}`)
	f("llama2", "llama", `{"tokenizer_class":"PreTrainedTokenizerFast","eos_token":"<|x|>","bos_token":{"__type":"AddedToken","content":"<s>","lstrip":true,"rstrip":true,"normalized":true,"single_word":false}}`)
	f("llama2", "llama", `{"tokenizer_class":"LlamaTokenizer","legacy":true,"added_tokens_decoder":{"1":{"content":"<s>","lstrip":true,"rstrip":true,"normalized":true,"single_word":false,"special":true},"32000":{"content":"<|x|>","lstrip":false,"rstrip":true,"normalized":false,"single_word":false,"special":true}}}`)
	f("llama3_1", "qwen2", `{"tokenizer_class":"LlamaTokenizerFast"}`)
	f("qwen3", "qwen3_5", `{"tokenizer_class":"Qwen2Tokenizer"}`)
}

// What the library is given must be what transformers takes.
func TestLibraryGetsTheFileAsItIs(t *testing.T) {
	const unigram = `{"version":"1.0","added_tokens":[{"id":0,"content":"<s>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],"model":{"type":"Unigram","vocab":[["<s>",0.0],["a",-1.0]],"unk_id":0}}`
	f := func(want bool, config, tokenizerConfig string) {
		t.Helper()
		dir := t.TempDir()
		for name, text := range map[string]string{"config.json": config, "tokenizer_config.json": tokenizerConfig} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		s, err := readSettings(dir, "")
		if err != nil {
			t.Fatal(err)
		}
		_, changed, err := fromJSON([]byte(unigram), s, Options{})
		if !errors.Is(err, ErrUnrecognised) || changed == want {
			t.Errorf("%s, %s: taken as it is: %v, %v, want %v", config, tokenizerConfig, !changed, err, want)
		}
	}
	f(true, `{"model_type":"x"}`, `{"tokenizer_class":"PreTrainedTokenizerFast","bos_token":"<s>"}`)
	f(true, `{"model_type":"phi3"}`, `{"tokenizer_class":"LlamaTokenizer","bos_token":"<s>"}`)
	f(false, `{"model_type":"llama"}`, `{"tokenizer_class":"LlamaTokenizer"}`)
	f(false, `{"model_type":"t5"}`, `{"tokenizer_class":"T5TokenizerFast"}`)
	f(false, `{"model_type":"x"}`, `{"eos_token":"</s>"}`)
	f(false, `{"model_type":"x"}`, `{"added_tokens_decoder":{"0":{"content":"<s>","lstrip":true}}}`)
}
