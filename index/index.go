package index

import (
	"sync"
	"sync/atomic"
)

// Config bounds an Index.
type Config struct {
	// MaxBytes is the memory that it may hold, in all.
	MaxBytes int64
}

// Index knows what every engine holds. New makes it; its methods may be called
// from any goroutine.
type Index struct {
	config Config
	table  *table

	mu    sync.Mutex // guards the changing of slots and lanes
	slots atomic.Pointer[[]*slot]
}

// slot is one engine endpoint.
type slot struct {
	mu     sync.Mutex // guards what follows
	config SlotConfig
	state  State
	why    string
	tree   tree
	shadow shadow
	told   told
}

// SlotConfig is what the index is told of an engine.
type SlotConfig struct {
	// Model names the base model in the roots of the engine's chains: what
	// Root was given for the prompts that go there.
	Model string
	// BlockSize is how many tokens a block of the engine's KV cache has.
	BlockSize int
	// Capacity is how many blocks the engine's KV cache has.
	Capacity int
	// AfterPrefill: what a request computes can be reused when its prefill has
	// ended, as SGLang has it. Else it can be as soon as it is scheduled, as
	// vLLM has it.
	AfterPrefill bool
}

// State is how well the index knows a slot.
type State uint8

const (
	// Approximate: only the requests that went there are known.
	Approximate State = iota
	// Exact: the engine's events are whole.
	Exact
	// Repairing: events have been lost, and are being fetched. What is known
	// is kept, and requests are counted on as if it were approximate.
	Repairing
	// Mismatched: the engine's counts have differed from the predictions.
	Mismatched
)

// New returns an empty index.
func New(c Config) *Index {
	x := &Index{config: c, table: newTable()}
	x.slots.Store(&[]*slot{})
	return x
}

// Join begins to know a slot, which is Approximate at first, or changes what is
// known of its engine: what is held under another model or block size is
// forgotten, and a smaller capacity evicts.
func (x *Index) Join(slot int, c SlotConfig) {}

// Leave forgets a slot, and frees what it held. Claims on it become void.
func (x *Index) Leave(slot int) {}

// Forget empties a slot: its engine has restarted. Claims on it become void.
func (x *Index) Forget(slot int) {}

// SetState says how well a slot is known from now on, and why, for people. A
// slot that becomes Exact gives up what was guessed; one that becomes
// Approximate or Mismatched keeps what events have told as guesses.
func (x *Index) SetState(slot int, s State, why string) {}

// Prompt is what the index needs of a prompt. The caller owns its memory, and
// may reuse it after each call.
type Prompt struct {
	// Chain are the hashes of the full blocks of Block tokens, or of TextBlock
	// bytes of text.
	Chain []Hash
	// IDs are its tokens, and nil when only its text is known.
	IDs   []uint32
	Block int
}

// Cached is how many tokens the engine will take from its cache, when it holds
// so much of the prompt: full blocks, and never the prompt's last token, which
// is computed in any case (vLLM's and SGLang's rule). Of text it is unknown, 0.
func (p *Prompt) Cached(h Held) int {
	if len(p.IDs) == 0 || p.Block < 1 {
		return 0
	}
	return min(int(h[Tiers-1]), (len(p.IDs)-1)/p.Block) * p.Block
}

// Held is how many leading blocks of a prompt a slot holds, by tier: in that
// one and the faster ones together. So the numbers do not fall.
type Held [Tiers]int32

// Lookup is the answer for one prompt at all slots, and the memory for it. A
// request keeps one and uses it again; it is not for several goroutines. The
// zero value is ready for Look.
type Lookup struct {
	prompt *Prompt
	slots  []*slot
	depth  []int32 // by lane
}

// Look finds what every slot holds of the prompt, which must stay as it is while
// l is asked. It waits for no writer and allocates only to grow l.
func (x *Index) Look(l *Lookup, p *Prompt) {}

// Held is what a slot holds of the prompt looked up.
func (l *Lookup) Held(slot int) Held { return Held{} }
