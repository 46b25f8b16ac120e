package virtual

import (
	"slices"
	"time"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/simulator/workload"
)

// Chains are the blocks that the requests of a workload have, of one size: what any
// cache could hold of them. NewChains makes them; nothing changes them afterwards.
type Chains struct {
	// of are the full blocks of each prompt and what is computed of its answer, by
	// number: equal numbers name equal prefixes. Of the first asked an engine can have
	// taken them from its cache; the last token of a prompt is always computed.
	of    [][]int32
	asked []int
	// blocks is how many there are, each of size tokens.
	blocks, size int
	// Of the requests from the one on hits count, whose prompts have so many tokens.
	from, tokens int
}

// NewChains finds the blocks of a workload, of so many tokens each. What comes before
// warm fills caches, and is not counted.
func NewChains(w *workload.Workload, size int, warm time.Duration) *Chains {
	c := &Chains{of: make([][]int32, len(w.Requests)), asked: make([]int, len(w.Requests)), size: size}
	numbers := map[index.Hash]int32{}
	var ids []uint32
	var hashes []index.Hash
	for k := range w.Requests {
		q := &w.Requests[k]
		ids = q.AppendPrompt(ids[:0])
		n := len(ids)
		if q.At < warm {
			c.from = k + 1
		} else {
			c.tokens += n
		}
		c.asked[k] = max(n-1, 0) / size
		ids = q.AppendAnswer(ids, k)
		ids = ids[:max(n, len(ids)-1)] // the last token is not computed
		hashes = index.AppendTokens(hashes[:0], root, ids, size)
		blocks := make([]int32, len(hashes))
		for i, h := range hashes {
			number, known := numbers[h]
			if !known {
				number = int32(len(numbers))
				numbers[h] = number
			}
			blocks[i] = number
		}
		c.of[k] = slices.Clip(blocks)
	}
	c.blocks = len(numbers)
	return c
}

// rate is the hit rate when so many blocks were found.
func (c *Chains) rate(found int) float64 {
	if c.tokens == 0 {
		return 0
	}
	return float64(found) * float64(c.size) / float64(c.tokens)
}

// Infinite returns the hit rate of a cache that has whatever any request has left
// before: as a part of all prompts' tokens. No choice, and no size of caches, can have
// more.
func (c *Chains) Infinite() float64 {
	found := 0
	for _, n := range c.seen()[c.from:] {
		found += n
	}
	return c.rate(found)
}

// seen returns how many leading blocks of each request were in one before.
func (c *Chains) seen() []int {
	known, found := make([]bool, c.blocks), make([]int, len(c.of))
	for k, blocks := range c.of {
		n := 0
		for n < c.asked[k] && known[blocks[n]] {
			n++
		}
		found[k] = n
		for _, b := range blocks {
			known[b] = true
		}
	}
	return found
}
