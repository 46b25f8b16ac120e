package proxy

import (
	"fmt"
	"strconv"
	"time"

	"github.com/inferrail/inferrail/index"
)

// PromptHashes say what a prompt shares with others, and how it belongs to a
// conversation, but nothing of what it says: who has the same text can tell that it is
// the same, and nobody else anything. They are part of a Decision.
type PromptHashes struct {
	// Arrived is when the request came, which may be long before the decision.
	Arrived time.Time `json:"arrived"`
	// Session stands for the conversation, 0 where none is known.
	Session PrefixHash `json:"session,omitzero"`
	// Every is how many tokens lie between two hashes, each of which stands for all of
	// the prompt up to there; 0 where there are none. Of a prompt that is not exact it
	// is an estimate. Blocks of another size, as another engine or agent may have, give
	// other hashes.
	Every  int          `json:"every"`
	Hashes []PrefixHash `json:"hashes"`
}

// PrefixHash is a hash that JSON has as 16 hexadecimal digits.
type PrefixHash uint64

// MarshalText implements encoding.TextMarshaler.
func (h PrefixHash) MarshalText() ([]byte, error) {
	return fmt.Appendf(nil, "%016x", uint64(h)), nil
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (h *PrefixHash) UnmarshalText(text []byte) error {
	n, err := strconv.ParseUint(string(text), 16, 64)
	*h = PrefixHash(n)
	return err
}

// hashEvery is how many tokens lie between two of PromptHashes, or as few more as
// blocks are whole then: enough to tell conversations and documents apart, at a
// thirtieth of what every block's hash would take.
const hashEvery = 512

// promptHashes are those of the request. Of several prompts they are those of the first.
func (x *exchange) promptHashes() *PromptHashes {
	h := &PromptHashes{Arrived: x.began, Session: PrefixHash(x.sessionKey())}
	b := x.blocks
	if b == nil || len(b.prompts) == 0 {
		return h
	}
	p := &b.prompts[0]
	block := index.TextBlock / bytesPerToken
	if p.IDs != nil {
		block = max(p.Block, 1)
	}
	blocks := (hashEvery + block - 1) / block
	if n := len(p.Chain) / blocks; n > 0 {
		h.Every, h.Hashes = blocks*block, make([]PrefixHash, n)
		for i := range h.Hashes {
			h.Hashes[i] = PrefixHash(p.Chain[(i+1)*blocks-1].Lo)
		}
	}
	return h
}
