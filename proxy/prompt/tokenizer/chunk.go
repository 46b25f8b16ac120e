package tokenizer

// Cache holds the token ids of texts seen before, by the exact text. All
// Tokenizers of a process share one. It may be used from any goroutine. It
// holds no more than its bytes, texts and ids and its own books included; what
// has not been asked for longest goes first.
type Cache struct{}

// NewCache returns a Cache of so many bytes.
func NewCache(bytes int64) *Cache { return &Cache{} }

// chunks is the cache as one tokenizer's pipeline sees it. A pipeline cuts
// the text where the ids on both sides do not depend on each other, and asks
// for each part.
type chunks struct {
	cache *Cache
	of    uint32 // Tokenizer.number
}

// append appends the ids of text if they are known. variant tells apart texts
// that have other ids in other places, such as at the start of a sequence.
func (c *chunks) append(dst []uint32, text string, variant uint8) (_ []uint32, ok bool) {
	return dst, false
}

// put notes the ids of text. Both are copied.
func (c *chunks) put(text string, variant uint8, ids []uint32) {}
