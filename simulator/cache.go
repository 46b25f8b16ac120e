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
	// admit makes sure that there is room for so many tokens of s, and takes it for
	// those that need not be computed and the first so many that must be. It returns
	// how many need not be. Without room it changes nothing and reports false.
	admit(s *Sequence, tokens, first int) (cached int, ok bool)
	// computed says that so many of the tokens admitted have been computed.
	computed(s *Sequence, tokens int)
	// grow takes more room, so that there is room for so many tokens of s, of which
	// those known are computed or about to be. Without room it changes nothing and
	// reports false.
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
	// take returns what has changed since it was last called, and tells reports
	// whether anything has.
	take() []Change
	tells() bool
}

// BlockName is an engine's own name for a block: a digest of its tokens and of
// all before them.
type BlockName [32]byte

// Change is one thing that a cache tells of itself: that it holds blocks, no
// longer does, or is empty. Who calls Engine.Told reads it; nobody alters it.
type Change struct {
	Kind  kvevent.Kind
	Names []BlockName
	// Parent is the block before the first of Names; without HasParent that is
	// the first of a prompt. Only what is stored has it, and Tokens.
	Parent    BlockName
	HasParent bool
	Tokens    []uint32
	// Medium is "GPU", or the host tier's name; "" when all of it is cleared.
	Medium string
	// Adapter and Salt set the blocks apart from others of the same tokens.
	Adapter, Salt string
}

// The media that caches tell of.
const (
	mediumGPU  = "GPU"
	mediumHost = "CPU_PINNED" // of SGLang
	mediumCPU  = "CPU"        // of vLLM
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
func (n naming) stored(s *Sequence, from, to int, medium string) Change {
	c := Change{Kind: kvevent.Stored, Names: slices.Clone(s.names[from:to]), Medium: medium, Adapter: s.Adapter, Salt: s.Salt,
		Tokens: s.appendTokens(make([]uint32, 0, (to-from)*n.block), from*n.block, to*n.block)}
	if from > 0 {
		c.Parent, c.HasParent = s.names[from-1], true
	}
	return c
}

func ceilDiv(a, b int) int { return (a + b - 1) / b }
