package tokenizer

import "errors"

// Load reads the tokenizer of a model's directory.
func Load(dir string, o Options) (*Tokenizer, error) { return nil, errors.New("not yet") }
