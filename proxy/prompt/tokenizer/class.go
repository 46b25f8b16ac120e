package tokenizer

import (
	"path"
	"slices"
	"strings"
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
	modernbert modernbert-decoder nystromformer step3p7 unlimited-ocr unlimited_ocr`)

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
		"RobertaTokenizer":   "bart bridgetower clap data2vec-text florence2 ibert led lilt longformer mega mra mvp roberta roberta-prelayernorm",
		"CLIPTokenizer":      "aimv2 clip clipseg groupvit omdet-turbo oneformer owlv2 owlvit sam3 sam3_video xclip",
		"WhisperTokenizer":   "whisper",
		"DebertaTokenizer":   "deberta",
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

// otherClasses build pipelines that are not followed: their names without the
// Tokenizer at their ends. A name that transformers does not know stands for the general class.
var otherClasses = strings.Fields(`
	Albert Bart Barthez Bartpho BertGeneration BertJapanese Bert Bertweet BigBird BioGpt BlenderbotSmall
	Blenderbot ByT5 CLIP CTRL Camembert Canine Clvp CodeGen CodeLlama Cohere CpmAnt Cpm DPRContextEncoder
	DPRQuestionEncoder DPRReader Deberta DebertaV2 Dia DistilBert Esm Esmc FSMT FastSpeech2Conformer Flaubert
	Funnel GPTNeoXJapanese GPTNeoX GPTSw3 Herbert LED Lasr LayoutLMv2 LayoutLMv3 LayoutXLM Luke Lxmert M2M100
	MBart50 MBart MLuke MPNet Marian MarkupLM Mgpstr MobileBert Mvp MyT5 Nllb Nougat OpenAIGPT PLBart Pegasus
	Perceiver Phobert Pop2Piano ProphetNet Rag Reformer RemBert RoCBert RoFormer Roberta SeamlessM4T Siglip2
	Siglip Speech2Text SpeechT5 Splinter T5 Tapas Tipsv2 Udop VideoPrism Vits Wav2Vec2CTC Wav2Vec2PhonemeCTC
	Whisper XGLM XLMRoberta XLM XLNet`)

// generalNames are the repositories, in lower case, whose tokenizers transformers
// gives the general class because it knows that the files there name a wrong one.
var generalNames = strings.Fields(`deepseek-ai/deepseek-r1-distill-llama-* deepseek-ai/deepseek-coder-*
	allenai/dolma2-tokenizer google/umt5-small naver-clova-ix/donut-* salesforce/blip2-opt-* salesforce/blip2-flan-t5-*
	salesforce/instructblip-flan-t5-* stepfun-ai/step-3.7-*`)

// Class is the class that transformers gives the tokenizer of a model of that
// type, whose files name a class: "" for the general one. Each may be "".
// repository is the name that the engine loads the model by, "" for a directory.
func Class(modelType, named, repository string) string {
	if slices.ContainsFunc(generalNames, func(pattern string) bool {
		ok, _ := path.Match(pattern, strings.ToLower(repository))
		return ok
	}) {
		return ""
	}
	named = strings.TrimSuffix(named, "Fast")
	own := typeClasses[modelType]
	switch {
	case named == "":
		return own
	case slices.Contains(generalTypes, modelType):
		return ""
	case own != "" && own != named && slices.Contains(wrongTypes, modelType):
		return own
	case named == "PreTrainedTokenizer", named == "TokenizersBackend", named == "PythonBackend":
		return ""
	}
	return named
}

// followedClasses are those whose pipelines are built here as they do.
var followedClasses = []string{"GPT2Tokenizer", "GemmaTokenizer", "LlamaTokenizer", "Qwen2Tokenizer", "Qwen3_5Tokenizer"}

// builds tells whether a class builds a pipeline of its own, and whether that is
// followed.
func builds(class string) (own, followed bool) {
	if slices.Contains(followedClasses, class) {
		return true, true
	}
	switch class {
	case "MistralCommonBackend", "SentencePieceBackend", "BertTokenizerLegacy":
		return true, false
	}
	short, ok := strings.CutSuffix(class, "Tokenizer")
	return ok && slices.Contains(otherClasses, short), false
}
