package index

// Hash names a block: its tokens and every token before it, under a salt. It
// is a key inside one process and its snapshots, no promise to others. The
// zero value names nothing.
type Hash struct{ Hi, Lo uint64 }

// Root is what a chain begins with: prompts that differ in the model, the
// LoRA adapter or the cache_salt share no block.
func Root(model, adapter string, salt []byte) Hash { return Hash{} }

// AppendTokens appends the hashes of the full blocks of ids: the tokens behind
// the last full block have none, as engines reuse no part of a block.
func AppendTokens(dst []Hash, root Hash, ids []uint32, block int) []Hash { return dst }

// TextBlock is the size in bytes of the blocks of a prompt of which the tokens
// are not known.
const TextBlock = 256

// AppendText appends the hashes of the full blocks of TextBlock bytes of text.
// They are never equal to hashes of tokens.
func AppendText(dst []Hash, root Hash, text []byte) []Hash { return dst }
