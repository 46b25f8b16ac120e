package simulator

import (
	"crypto/sha256"
	"encoding/binary"
	"slices"

	"github.com/inferrail/inferrail/index/kvevent"
)

// cache is the memory that an engine computes sequences in, and what of it can
// be used again: vLLM's blocks or SGLang's pages. Engine calls it.
//
// Its methods count a sequence's tokens from the first of the prompt on; the
// generated ones follow. A sequence that was admitted must be released.
type cache interface {
	// admit takes room for so many tokens of s, and returns how many of them
	// need not be computed. Without room it changes nothing and reports false.
	admit(s *Sequence, tokens int) (cached int, ok bool)
	// prefilled says that all the tokens admitted have been computed.
	prefilled(s *Sequence, tokens int)
	// grow takes room for one token more, so that there is room for so many of
	// s, of which those known are computed or about to be. Without room it
	// changes nothing and reports false.
	grow(s *Sequence, room, known int) bool
	// release gives back the room of s, of which so many tokens have been
	// computed. drop: what is not in the cache yet is not to come into it.
	release(s *Sequence, tokens int, drop bool)
	// reset forgets all that can be used again. It reports false, and does
	// nothing, while a sequence has room.
	reset() bool
	// size returns how many tokens a block has, and one sequence at most.
	size() (block, most int)
	// usage returns how many blocks sequences have, of how many.
	usage() (used, of int)
	// take returns what has changed since it was last called.
	take() []change
}

// blockName is an engine's own name for a block: a digest of its tokens and of
// all before them.
type blockName [32]byte

// change is one thing that a cache tells of itself. It is not altered after it
// was taken.
type change struct {
	kind  kvevent.Kind
	names []blockName
	// parent is the block before the first of names; without hasParent that is
	// the first of a prompt.
	parent    blockName
	hasParent bool
	tokens    []uint32
	medium    string
	// adapter and salt set the blocks apart from others of the same tokens.
	adapter, salt string
}

// The media that caches tell of.
const (
	mediumGPU  = "GPU"
	mediumHost = "CPU_PINNED"
)

// naming is how an engine names its blocks.
type naming struct {
	block  int // tokens
	sglang bool
}

// extend names the full blocks of the first so many tokens of s. It may be
// called for several sequences at a time.
func (n naming) extend(s *Sequence, tokens int) {
	full := tokens / n.block
	if len(s.names) >= full {
		return
	}
	s.names = slices.Grow(s.names, full-len(s.names))
	var buf []byte
	for i := len(s.names); i < full; i++ {
		buf = buf[:0]
		switch {
		case i > 0:
			buf = append(buf, s.names[i-1][:]...)
		case n.sglang && s.Salt != "":
			seed := sha256.Sum256([]byte("sglang-cache-salt-v1\x00" + s.Salt))
			buf = append(buf, seed[:]...)
		case !n.sglang:
			buf = append(append(buf, s.Salt...), 0)
		}
		if !n.sglang {
			// SGLang keeps adapters apart without naming their blocks so.
			buf = append(append(buf, s.Adapter...), 0)
		}
		for k := i * n.block; k < (i+1)*n.block; k++ {
			buf = binary.LittleEndian.AppendUint32(buf, s.tokenAt(k))
		}
		s.names = append(s.names, sha256.Sum256(buf))
	}
}

// stored returns the change that says that blocks of s from one to before
// another are held.
func (n naming) stored(s *Sequence, from, to int, medium string) change {
	c := change{kind: kvevent.Stored, names: slices.Clone(s.names[from:to]), medium: medium, adapter: s.Adapter, salt: s.Salt,
		tokens: s.appendTokens(make([]uint32, 0, (to-from)*n.block), from*n.block, to*n.block)}
	if from > 0 {
		c.parent, c.hasParent = s.names[from-1], true
	}
	return c
}

func ceilDiv(a, b int) int { return (a + b - 1) / b }
