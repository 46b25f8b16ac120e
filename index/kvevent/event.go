package kvevent

// Kind is what an event says.
type Kind uint8

const (
	// Stored: blocks are in the cache now.
	Stored Kind = iota + 1
	// Removed: they are not any more.
	Removed
	// Cleared: nothing is, on the GPU.
	Cleared
	// Unknown is an event of a later engine. It is passed over.
	Unknown
)

// Event is one event of a batch. What it holds is the decoder's, and is valid
// until its next batch.
type Event struct {
	Kind Kind
	// Hashes are the engine's names for the blocks, in the order of the prompt.
	// Longer ones are their last 8 bytes, big-endian, as vLLM shortens them.
	// Signed ones are cast.
	Hashes []uint64
	// Parent is the block before the first; without HasParent it is the first
	// of a prompt.
	Parent    uint64
	HasParent bool
	// Tokens are the ids of all blocks. Without any, the blocks must have been
	// told already.
	Tokens    []uint32
	BlockSize int
	// Medium is in lower case: gpu, cpu, cpu_pinned, disk, ...; empty is gpu.
	Medium string
	// Adapter is the name of the LoRA adapter; AdapterID, when it is not -1, is
	// its number, which is all that older engines tell.
	Adapter   string
	AdapterID int64
	// Extra are the extra keys of each block, as far as the last that has any,
	// without the adapter's name and the cache_salt. Salt is that, in the first
	// blocks of a prompt.
	Extra [][]Key
	Salt  string
	// Group is the KV cache group, -1 when not told; Spec is its kind.
	Group int
	Spec  string
	// Locality and Ownership tell shared tiers apart.
	Locality, Ownership string
}

// Key is one extra key of a block: what else its content depends on.
type Key struct {
	// Text is a string's; of anything else, Digest stands for what it holds.
	Text   string
	Digest uint64
}

// Batch is what one message holds.
type Batch struct {
	Time   float64 // seconds since 1970, by the engine's clock
	Events []Event
	Passed int // events of unknown kinds, which are not among them
	Rank   int // -1 when not told
	// Publisher is the id that a publisher with snapshots gives itself.
	Publisher [16]byte
}
