package prompt

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/inferrail/inferrail/proxy/prompt/tokenizer"
)

// The engine's transformers (version 5) loads a tokenizer by its class. The
// general class takes tokenizer.json as it is. Some others take only the
// vocabulary, the merges, the added tokens and the post-processor from it and
// build the rest of the pipeline themselves, whatever the file says.

// generalTypes are the model types whose tokenizers always have the general
// class, whatever class tokenizer_config.json names.
var generalTypes = strings.Fields(`arctic aria bigbird_pegasus canary chameleon chatlm cohere_asr deepseek_ocr
	deepseek_ocr2 deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 deepseek_vl deepseek_vl_hybrid deepseek_vl_v2 ernie4_5
	ernie4_5_moe flex_olmo fuyu glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe glm_image glmasr got_ocr2 gpt_bigcode
	granite granitemoe granitemoehybrid granitemoeshared h2ovl_chat hyperclovax hyperclovax_vlm internlm2 jamba janus
	kimi_k25 kimi_linear kosmos-2 llava llava_next mimo_v2_flash minicpm3 minicpmv minicpmv4_6 minicpmv4_7 minimax_m2
	ministral ministral3 mistral mistral3 mixtral molmo molmo2 nemotron nvfp4 olmo2 olmo3 olmo_hybrid opencua openvla
	paddleocr_vl pegasus_x persimmon phi3 phi3_v phimoe pix2struct pixtral smolvlm stablelm step3_vl step3p5 umt5 vipllava
	voxtral voxtral_realtime
	internlm2 step3p7 unlimited-ocr unlimited_ocr`)

// typeClasses are the classes that transformers has for other model types. It
// takes them when tokenizer_config.json names none.
var typeClasses = map[string]string{}

func init() {
	for class, types := range map[string]string{
		"CohereTokenizer":    "aya_vision cohere cohere2",
		"CodeLlamaTokenizer": "code_llama",
		"GemmaTokenizer":     "diffusion_gemma gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma shieldgemma2 t5gemma zaya",
		"GPT2Tokenizer":      "blip-2 codegen dbrx emu3 gpt2 gpt_neo gptj hyperclovax_vision_v2 instructblip instructblipvideo jais2 opt phi starcoder2",
		"GPTNeoXTokenizer":   "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm",
		"LlamaTokenizer":     "idefics idefics2",
		"Qwen2Tokenizer": "audioflamingo3 colqwen2 cosmos3_omni fun_asr_nano hunyuan_vl internvl lighton_ocr ovis2 qianfan_ocr qwen2 qwen2_5_omni " +
			"qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl qwen3 qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe vibevoice",
		"Qwen3_5Tokenizer": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen4_exp",
	} {
		for _, name := range strings.Fields(types) {
			typeClasses[name] = class
		}
	}
}

// wrongTypes are the model types for which typeClasses counts more than what
// tokenizer_config.json names.
var wrongTypes = []string{"qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "hyperclovax_vision_v2"}

// otherClasses build pipelines that are not followed.
var otherClasses = strings.Fields(`AlbertTokenizer BartTokenizer BertTokenizer CamembertTokenizer CLIPTokenizer CodeLlamaTokenizer
	CohereTokenizer DebertaTokenizer DebertaV2Tokenizer FNetTokenizer GPTNeoXTokenizer HerbertTokenizer LayoutLMv3Tokenizer
	MBartTokenizer NllbTokenizer NougatTokenizer PegasusTokenizer ReformerTokenizer RobertaTokenizer SeamlessM4TTokenizer
	Siglip2Tokenizer SiglipTokenizer SplinterTokenizer T5Tokenizer UdopTokenizer WhisperTokenizer XGLMTokenizer
	XLMRobertaTokenizer XLNetTokenizer`)

// class is the tokenizer's class in the engine, "" for the general one.
func (f *files) class() string {
	named := strings.TrimSuffix(f.tokenizerClass, "Fast")
	general := named == "PreTrainedTokenizer" || named == "TokenizersBackend" || named == "PythonBackend"
	own := typeClasses[f.modelType]
	switch {
	case named == "":
		return own
	case slices.Contains(generalTypes, f.modelType):
		return ""
	case own != "" && own != named && slices.Contains(wrongTypes, f.modelType):
		return own
	case general:
		return ""
	}
	return named
}

const (
	byteLevel = `{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":%t}`
	splitting = `{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":%s},"behavior":"Isolated","invert":false},%s]}`
	qwen2     = `"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"`
	qwen35    = `"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"`
)

// parts are what a class puts in the place of a file's, by name; nil for the
// general class. ok is false for a class that is not followed.
func (f *files) parts() (pipeline, model map[string]string, ok bool) {
	bytes := map[string]string{"unk_token": "null", "fuse_unk": "false", "byte_fallback": "false"}
	switch class := f.class(); class {
	case "Qwen2Tokenizer", "Qwen3_5Tokenizer":
		pattern := qwen2
		if class == "Qwen3_5Tokenizer" {
			pattern = qwen35
		}
		return map[string]string{
			"normalizer":    `{"type":"NFC"}`,
			"pre_tokenizer": fmt.Sprintf(splitting, pattern, fmt.Sprintf(byteLevel, false)),
		}, bytes, true
	case "GPT2Tokenizer":
		return map[string]string{"normalizer": "null", "pre_tokenizer": fmt.Sprintf(byteLevel, true)}, bytes, true
	case "GemmaTokenizer":
		return map[string]string{
			"normalizer":    `{"type":"Replace","pattern":{"String":" "},"content":"▁"}`,
			"pre_tokenizer": `{"type":"Split","pattern":{"String":" "},"behavior":"MergedWithPrevious","invert":false}`,
		}, map[string]string{"unk_token": `"<unk>"`, "fuse_unk": "true", "byte_fallback": "true"}, true
	case "LlamaTokenizer":
		scheme := "first"
		switch {
		case f.noPrefixSpace:
			scheme = "never"
		case f.legacy:
			scheme = "always"
		}
		return map[string]string{
			"normalizer":    "null",
			"pre_tokenizer": `{"type":"Metaspace","replacement":"▁","prepend_scheme":"` + scheme + `","split":false}`,
		}, map[string]string{"unk_token": "null", "fuse_unk": "true", "byte_fallback": "true"}, true
	default:
		return nil, nil, !slices.Contains(otherClasses, class)
	}
}

// loadByClass loads tokenizer.json as the engine's class does.
func (f *files) loadByClass(o tokenizer.Options) (*tokenizer.Tokenizer, error) {
	pipeline, model, ok := f.parts()
	if !ok {
		return nil, fmt.Errorf("the engine builds a pipeline of its own for the class %s: %w", f.class(), tokenizer.ErrUnrecognised)
	}
	if pipeline == nil {
		return tokenizer.Load(f.dir, o)
	}
	path := filepath.Join(f.dir, "tokenizer.json")
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("tokenizer: %w", err)
	}
	var inner []byte
	for w := (walker{raw: data}); ; {
		key, value, ok := w.member()
		if !ok {
			break
		}
		if string(key) == `"model"` {
			inner = value
		}
	}
	if len(inner) == 0 || inner[0] != '{' || !changes(data, pipeline) && !changes(inner, model) {
		return tokenizer.Load(f.dir, o)
	}
	pipeline["model"] = string(replaced(inner, model))
	t, err := tokenizer.FromJSON(replaced(data, pipeline), o)
	if err != nil {
		return nil, fmt.Errorf("tokenizer: %s as the engine's class %s has it: %w", path, f.class(), err)
	}
	return t, nil
}

// changes reports whether one of the members has another value in the object.
func changes(raw []byte, with map[string]string) bool {
	seen := 0
	for w := (walker{raw: raw}); ; {
		key, value, ok := w.member()
		if !ok {
			return seen != len(with)
		}
		want, ok := with[strings.Trim(string(key), `"`)]
		if !ok {
			continue
		}
		seen++
		if !sameJSON(string(value), want) {
			return true
		}
	}
}

// sameJSON compares two values, but for what only offsets depend on.
func sameJSON(a, b string) bool {
	plain := strings.NewReplacer(`"trim_offsets":true,`, "", `"trim_offsets":false,`, "", `"trim_offsets": true,`, "", `"trim_offsets": false,`, "")
	x, y := decoder{text: plain.Replace(a)}, decoder{text: plain.Replace(b)}
	v, ok := x.decode()
	w, also := y.decode()
	return ok && also && v.Equals(w)
}

// replaced is the object with other values of members, or with those members
// when it has none.
func replaced(raw []byte, with map[string]string) []byte {
	out := append(make([]byte, 0, len(raw)+1024), '{')
	for name, value := range with {
		out = append(out, `"`+name+`":`+value+`,`...)
	}
	for w := (walker{raw: raw}); ; {
		key, value, ok := w.member()
		if !ok {
			return append(out[:len(out)-1], '}')
		}
		if _, ok := with[strings.Trim(string(key), `"`)]; !ok {
			out = append(append(append(append(out, key...), ':'), value...), ',')
		}
	}
}
