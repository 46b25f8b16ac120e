package simulator

import "math"

// slotCache is the KV cache of llama.cpp and of Ollama: so many slots, each of which
// keeps the tokens that it has computed last, until it computes others.
//
// A sequence gets the free slot with the longest common prefix, if that is more than
// a tenth of its prompt, else the one that has been free for the longest time; what
// the slot held beyond the prefix is lost. Nothing is shared between slots, and
// nothing is told.
type slotCache struct {
	// context is how many tokens a slot has room for.
	context int
	shares  bool
	slots   []cacheSlot
	clock   uint64
}

type cacheSlot struct {
	// tokens and adapter are what it has computed; of a busy one, what it has found.
	tokens  []uint32
	adapter string
	// user is who has it, nil for nobody; room is what that has taken. used is when
	// it was last released, by the cache's clock, 0 if never.
	user *Sequence
	room int
	used uint64
}

// similarity is the part of a prompt that a slot must begin with to be preferred:
// llama.cpp's --slot-prompt-similarity.
const similarity = 0.1

func newSlotCache(slots, context int, shares bool) *slotCache {
	return &slotCache{context: context, shares: shares, slots: make([]cacheSlot, slots)}
}

// common is how many of the first so many tokens of s the slot begins with.
func (c *cacheSlot) common(s *Sequence, tokens int) int {
	if c.adapter != s.Adapter {
		return 0
	}
	n := 0
	for n < len(c.tokens) && n < tokens && c.tokens[n] == s.tokenAt(n) {
		n++
	}
	return n
}

func (c *slotCache) admit(s *Sequence, tokens, _ int) (int, bool) {
	best, longest, oldest := -1, 0, -1
	for i := range c.slots {
		slot := &c.slots[i]
		if slot.user != nil {
			continue
		}
		if n := slot.common(s, tokens); n > longest && float64(n) > similarity*float64(tokens) {
			best, longest = i, n
		}
		// Of those released at the same time it is the last.
		if oldest < 0 || slot.used <= c.slots[oldest].used {
			oldest = i
		}
	}
	if best < 0 {
		if best = oldest; best < 0 {
			return 0, false
		}
		longest = c.slots[best].common(s, tokens)
	}
	if !c.shares || s.NoRead {
		longest = 0
	}
	// The last token is computed in any case, for what comes after it.
	cached := min(longest, tokens-1)
	slot := &c.slots[best]
	slot.tokens, slot.adapter, slot.user, slot.room = slot.tokens[:cached], s.Adapter, s, tokens
	s.slot, s.shared = best, cached
	return cached, true
}

// computed notes how far the prompt is, so that one who leaves leaves that behind.
func (c *slotCache) computed(s *Sequence, tokens int) { s.shared = tokens }

func (c *slotCache) grow(s *Sequence, room, _ int) bool {
	c.slots[s.slot].room = max(c.slots[s.slot].room, room)
	return true
}

// release lets the slot keep what was computed; whether its answer is whole makes no
// difference.
func (c *slotCache) release(s *Sequence, tokens int, _ bool) {
	if tokens < s.prompt() || s.state == Prefilling {
		tokens = s.shared
	}
	slot := &c.slots[s.slot]
	for i := len(slot.tokens); i < tokens; i++ {
		slot.tokens = append(slot.tokens, s.tokenAt(i))
	}
	c.clock++
	slot.user, slot.room, slot.used = nil, 0, c.clock
	s.shared = 0
}

func (c *slotCache) reset() bool {
	for i := range c.slots {
		if c.slots[i].user != nil {
			return false
		}
	}
	for i := range c.slots {
		c.slots[i].tokens = nil
	}
	return true
}

// size has no blocks: room is a slot's from its beginning on.
func (c *slotCache) size() (block, most int) { return math.MaxInt32, c.context }

// usage counts tokens.
func (c *slotCache) usage() (used, of int) {
	for i := range c.slots {
		if s := c.slots[i].user; s != nil {
			used += c.slots[i].room
		}
	}
	return used, len(c.slots) * c.context
}

func (c *slotCache) take() []Change { return nil }

func (c *slotCache) tells() bool { return false }
