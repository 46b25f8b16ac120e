// Package tokenizer turns text into token ids exactly as the Hugging Face
// tokenizers library does for the same tokenizer.json, and mistral_common for
// the same tekken.json.
//
// A tokenizer.json describes a pipeline: added tokens, normalizer,
// pre-tokenizer, model, post-processor. Load follows it natively when it
// recognises every part of it, and otherwise hands the file to that library
// itself, in binaries built with the tag hftokenizers (see hf.go).
package tokenizer
