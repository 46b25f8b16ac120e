package tokenizer

// Tokenizer turns text into token ids. It is immutable but for its caches and
// may be used from any goroutine until it is closed.
type Tokenizer struct {
	pipeline pipeline
	// kind tells people what it is, as in "byte-level BPE (o200k), native".
	kind string
	// number tells its entries in the cache from those of other tokenizers.
	number uint32
	cached *chunks // nil for none
	// most is how many bytes of text it takes at a time, 0 for any number.
	most int
}

// pipeline is what is behind a Tokenizer: a native one, the library of hf.go,
// or the simulator's.
type pipeline interface {
	// appendIDs appends the ids of text. Added tokens in it are recognised.
	// special adds what the post-processor adds: the beginning of a sequence.
	// cached, when not nil, is asked for the ids of a part of text first.
	appendIDs(dst []uint32, text string, special bool, cached *chunks) []uint32
	// token returns the id of an added token or of a token of the vocabulary.
	token(text string) (uint32, bool)
	close()
}

// plainPipeline is a pipeline that may be able to encode text without looking
// for added tokens in it. cached is as for appendIDs.
type plainPipeline interface {
	appendPlain(dst []uint32, text string, cached *chunks) (_ []uint32, ok bool)
}

// Options of Load.
type Options struct {
	// Cache holds the ids of texts seen before; nil for none.
	Cache *Cache
	// Repository is the name org/name that the engine loads the model by; empty
	// when it loads a directory. transformers knows some names.
	Repository string
	// Tekken takes tekken.json where there is a tokenizer.json too.
	Tekken bool
}

// Append appends the ids of text to dst. special adds what the engine adds
// with add_special_tokens: such as <|begin_of_text|>.
func (t *Tokenizer) Append(dst []uint32, text string, special bool) []uint32 {
	return t.pipeline.appendIDs(dst, text, special, t.cached)
}

// AppendPlain appends the ids of text, in which nothing is an added token: a
// "<|end|>" that a user has written is encoded like any other text. ok is false
// when the tokenizer cannot do so.
func (t *Tokenizer) AppendPlain(dst []uint32, text string) (_ []uint32, ok bool) {
	p, ok := t.pipeline.(plainPipeline)
	if !ok {
		return dst, false
	}
	return p.appendPlain(dst, text, t.cached)
}

// Takes reports whether the tokenizer takes texts of so many bytes: all that it
// takes take under a second, or a few on a machine that is busy.
func (t *Tokenizer) Takes(bytes int) bool { return t.most == 0 || bytes <= t.most }

// Token returns the id of one token by its text, such as <|im_start|>.
func (t *Tokenizer) Token(text string) (id uint32, ok bool) { return t.pipeline.token(text) }

// Kind tells people what the tokenizer is.
func (t *Tokenizer) Kind() string { return t.kind }

// Close releases it. Only the library of hf.go holds more than memory.
func (t *Tokenizer) Close() { t.pipeline.close() }
