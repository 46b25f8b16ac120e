package tokenizer

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// settings are what lies beside a tokenizer.json and bears on what transformers
// 5, and so vLLM, makes of that file while it loads it. The zero value changes
// nothing.
type settings struct {
	// modelType is that of config.json; tokenizerClass that of either file.
	modelType, tokenizerClass string
	legacy                    bool
	addPrefixSpace            *bool
	// added are added tokens that take the place of the file's of the same text.
	// more are those that are added unless they are there, and named those that
	// have a name, such as eos_token: null for none, missing for what the class
	// has.
	added, more []fileToken
	named       map[string]jsontext.Value
}

// namedTokens are the names of special tokens, in transformers' order.
var namedTokens = []string{"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}

// classTokens are the special tokens that a class has unless it is told others.
var classTokens = map[string]map[string]string{
	"LlamaTokenizer":   {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
	"GemmaTokenizer":   {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"},
	"Qwen2Tokenizer":   {"eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
	"Qwen3_5Tokenizer": {"eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
}

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

// readSettings reads config.json and tokenizer_config.json in a model's
// directory.
func readSettings(dir string) (s settings, err error) {
	var model struct {
		ModelType      string  `json:"model_type"`
		TokenizerClass *string `json:"tokenizer_class"`
	}
	if _, err := readJSON(filepath.Join(dir, "config.json"), &model); err != nil {
		return settings{}, err
	}
	var tokenizer struct {
		TokenizerClass     string                    `json:"tokenizer_class"`
		AutoMap            jsontext.Value            `json:"auto_map"`
		Legacy             *bool                     `json:"legacy"`
		AddPrefixSpace     *bool                     `json:"add_prefix_space"`
		AddedTokensDecoder map[string]*settingsToken `json:"added_tokens_decoder"`
		Additional         jsontext.Value            `json:"additional_special_tokens"`
		Extra              jsontext.Value            `json:"extra_special_tokens"`
	}
	if _, err := readJSON(filepath.Join(dir, "tokenizer_config.json"), &tokenizer); err != nil {
		return settings{}, err
	}
	s.modelType, s.tokenizerClass = model.ModelType, tokenizer.TokenizerClass
	if s.tokenizerClass == "" && model.TokenizerClass != nil {
		s.tokenizerClass = *model.TokenizerClass
	}
	if !isNull(tokenizer.AutoMap) {
		s.tokenizerClass = "" // code beside the model
	}
	s.legacy = tokenizer.Legacy != nil && *tokenizer.Legacy
	s.addPrefixSpace = tokenizer.AddPrefixSpace
	ids := make([]string, 0, len(tokenizer.AddedTokensDecoder))
	for id := range tokenizer.AddedTokensDecoder {
		ids = append(ids, id)
	}
	slices.SortFunc(ids, func(a, b string) int { // as numbers
		if len(a) != len(b) {
			return len(a) - len(b)
		}
		return strings.Compare(a, b)
	})
	for _, id := range ids {
		if t := tokenizer.AddedTokensDecoder[id]; t != nil {
			s.added = append(s.added, t.fileToken)
		}
	}
	for _, list := range []jsontext.Value{tokenizer.Additional, tokenizer.Extra} {
		var more []*settingsToken
		if list.Kind() == '[' && json.Unmarshal(list, &more) == nil {
			for _, t := range more {
				if t != nil {
					s.more = append(s.more, t.fileToken)
				}
			}
		}
	}
	_, err = readJSON(filepath.Join(dir, "tokenizer_config.json"), &s.named)
	return s, err
}

// settingsToken is a token of tokenizer_config.json: an object, or its text.
type settingsToken struct{ fileToken }

func (t *settingsToken) UnmarshalJSONFrom(d *jsontext.Decoder) error {
	if d.PeekKind() == '"' {
		t.Special = true
		return json.UnmarshalDecode(d, &t.Content)
	}
	return json.UnmarshalDecode(d, &t.fileToken)
}

// notNumbers are what Python writes into JSON for numbers that JSON does not
// have.
var notNumbers = regexp.MustCompile(`([:\[,]\s*)-?(?:Infinity|NaN)\b`)

// readJSON reads a file that may be missing.
func readJSON(path string, to any) (ok bool, err error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	} else if err != nil {
		return false, fmt.Errorf("tokenizer: %w", err)
	}
	if err := json.Unmarshal(notNumbers.ReplaceAll(data, []byte("${1}null")), to, jsontext.AllowDuplicateNames(true)); err != nil {
		return false, fmt.Errorf("tokenizer: %s: %w", path, err)
	}
	return true, nil
}

// Class is the class that transformers loads a tokenizer by, "" for the general
// one, from the model_type of config.json and the class that
// tokenizer_config.json names.
func Class(modelType, named string) string {
	named = strings.TrimSuffix(named, "Fast")
	general := named == "PreTrainedTokenizer" || named == "TokenizersBackend" || named == "PythonBackend"
	own := typeClasses[modelType]
	switch {
	case named == "":
		return own
	case slices.Contains(generalTypes, modelType):
		return ""
	case own != "" && own != named && slices.Contains(wrongTypes, modelType):
		return own
	case general:
		return ""
	}
	return named
}

// keeps returns an error unless transformers takes the tokenizer.json as it is:
// the library of hf.go can be given nothing else.
func (s *settings) keeps(data []byte) error {
	class := Class(s.modelType, s.tokenizerClass)
	if slices.Contains(otherClasses, class) || slices.Contains(builtClasses, class) {
		return unrecognised("transformers builds another pipeline from it for the class %s", class)
	}
	var in struct {
		Added []fileToken `json:"added_tokens"`
	}
	if err := json.Unmarshal(data, &in, jsontext.AllowDuplicateNames(true)); err != nil {
		return err
	}
	f := file{added: slices.Clone(in.Added)}
	s.addTokens(&f, class)
	if !slices.EqualFunc(f.added, in.Added, func(a, b fileToken) bool {
		a.ID, b.ID = 0, 0
		return a == b
	}) {
		return unrecognised("transformers adds tokens to it, or changes those that it adds")
	}
	return nil
}

// builtClasses are those of which apply builds the pipeline.
var builtClasses = []string{"LlamaTokenizer", "GemmaTokenizer", "Qwen2Tokenizer", "Qwen3_5Tokenizer", "GPT2Tokenizer"}

// apply changes a tokenizer.json as transformers does. It fails for a class
// that builds a pipeline which is not followed.
func (s *settings) apply(f *file) error {
	class := Class(s.modelType, s.tokenizerClass)
	if slices.Contains(otherClasses, class) {
		return unrecognised("the pipeline that transformers builds for the class %s", class)
	}
	no, yes := false, true
	bytes := func(p pieces) {
		f.normalizer = &fileNormalizer{Type: "NFC"}
		prefix := s.addPrefixSpace != nil && *s.addPrefixSpace
		pattern := pattern{Regex: new(p.pattern())}
		f.preTokenizer = &filePreTokenizer{Type: "Sequence", PreTokenizers: []*filePreTokenizer{
			{Type: "Split", Pattern: pattern, Behavior: "Isolated"},
			{Type: "ByteLevel", AddPrefixSpace: &prefix, UseRegex: &no},
		}}
		f.model.UnkToken, f.model.FuseUnk = nil, false
		f.model.ByteFallback, f.model.IgnoreMerges = false, false
	}
	switch class {
	case "LlamaTokenizer":
		scheme := "first"
		switch {
		case s.addPrefixSpace != nil && !*s.addPrefixSpace:
			scheme = "never"
		case s.legacy:
			scheme = "always"
		}
		f.normalizer = nil
		f.preTokenizer = &filePreTokenizer{Type: "Metaspace", Replacement: spaceText, PrependScheme: scheme, Split: &no}
		f.model.UnkToken, f.model.FuseUnk = nil, true
		f.model.ByteFallback, f.model.IgnoreMerges = true, false
	case "GemmaTokenizer":
		space, spaceless, unknown := " ", spaceText, "<unk>"
		f.normalizer = &fileNormalizer{Type: "Replace", Pattern: pattern{String: &space}, Content: spaceless}
		f.preTokenizer = &filePreTokenizer{Type: "Split", Pattern: pattern{String: &space}, Behavior: "MergedWithPrevious"}
		f.model.UnkToken, f.model.FuseUnk = &unknown, true
		f.model.ByteFallback, f.model.IgnoreMerges = true, false
	case "Qwen2Tokenizer":
		bytes(pieces{rule: plainWords, digits: 1})
	case "Qwen3_5Tokenizer":
		bytes(pieces{rule: plainWords, digits: 1, marks: true})
	case "GPT2Tokenizer":
		f.normalizer = nil
		f.preTokenizer = &filePreTokenizer{Type: "ByteLevel", AddPrefixSpace: &no, UseRegex: &yes}
		f.model.UnkToken, f.model.FuseUnk = nil, false
		f.model.ByteFallback, f.model.IgnoreMerges = false, false
	}
	if slices.Contains(builtClasses, class) && len(s.added) > 0 {
		f.added = nil // the class starts without the file's
	}
	s.addTokens(f, class)
	return nil
}

// addTokens adds the tokens that a class has and the settings name.
func (s *settings) addTokens(f *file, class string) {
	at := make(map[string]int, len(f.added))
	for i, t := range f.added {
		at[t.Content] = i
	}
	add := func(t fileToken, replace bool) {
		i, ok := at[t.Content]
		switch {
		case t.Content == "":
		case !ok:
			at[t.Content] = len(f.added)
			f.added = append(f.added, t)
		case replace:
			f.added[i] = t
		}
	}
	for _, t := range s.added {
		add(t, true)
	}
	for _, name := range namedTokens {
		t := settingsToken{fileToken{Content: classTokens[class][name], Special: true}}
		if v, ok := s.named[name]; ok {
			t = settingsToken{}
			if !isNull(v) && json.Unmarshal(v, &t) != nil {
				continue // it is of no form that transformers loads
			}
		}
		add(t.fileToken, false)
	}
	for _, t := range s.more {
		add(t, false)
	}
}

// pattern is the regular expression that p follows.
func (p pieces) pattern() string {
	for pattern, other := range knownPatterns {
		if other == p {
			return pattern
		}
	}
	panic("tokenizer: no pattern is followed by these rules")
}
