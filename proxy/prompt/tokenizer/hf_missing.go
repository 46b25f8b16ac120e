//go:build !hftokenizers

package tokenizer

import "errors"

// loadLibrary is what hf.go has, in a binary without the library.
func loadLibrary([]byte) (pipeline, error) {
	return nil, errors.New("this inferrail has been built without the Hugging Face tokenizers library: build one that has it by make build TOKENIZERS=hf")
}
