package index

import "time"

// shadow is what a slot's engine is taken to hold, from the requests that were
// sent to it: a model of the engine's block pool, as exact as what is seen of
// requests allows. The mutex of the slot guards it, save for beyond.
//
// It follows vLLM's rules:
//
//   - One block of the pool is reserved.
//   - What a request uses is pinned. A hit on a block that nobody uses takes it
//     out of the queue of what can be evicted.
//   - A request takes memory that holds nothing that can be hit, and when there
//     is none, that of the block which was given back first.
//   - A request that ends gives back its blocks from the last to the first, so
//     the end of a prompt is evicted before its beginning.
//   - A prompt of which all is cached computes its last block again, which makes
//     a second copy that takes memory and is evicted on its own. A block is
//     cached while there is a copy; hits go to the oldest.
//   - What is behind the last full block, and what is generated, takes memory
//     while the request runs. The full blocks of it are cached; their hashes
//     are not known (answer.go).
//
// And SGLang's, where the config says AfterPrefill: what a request computes can
// be hit when its prefill has ended, copies are given back, as many tokens as
// are wanted are evicted at once, and by whole nodes of the radix tree.
//
// Requests that an engine has no memory for wait there, and here memory is
// taken that is not there: free is below 0 then, and what is given back is
// evicted at once.
//
// Where the config says Sequences, it follows llama.cpp's rules instead, which know
// nothing of memory or blocks (sequence.go).
//
// Memory is counted in tokens, so that blocks of text can be weighed by the
// tokens that they stand for.
type shadow struct {
	block int64 // tokens in a block
	size  int64 // tokens of memory, in all
	free  int64 // tokens of memory that hold nothing that can be hit
	radix bool  // SGLang's rules

	queue   list // what no request uses; the first is evicted first
	copies  map[ref]copies
	ends    map[ref]struct{} // SGLang: the last blocks of nodes that have others below
	answers answers
	counted int64 // bytes of all this that the arena was told of

	asked   int64     // tokens of memory that claims which wait for events want
	wanted  int64     // tokens of memory that they have, or want, and events do not tell of
	awaited []awaited // what events must confirm, the first due first
	due     int       // those before it have been seen to
	silent  int       // of them so many in a row were not confirmed, and nothing else was told

	generating generating
	sequences  sequences

	pressed time.Time // when free was below 0 last
}

// copies are the further copies of a block, the oldest first. Each is a spare
// record whose hash has kindCopy and the next one.
type copies struct {
	first, last ref
	evicted     bool // the copy that the block's own record stood for is not there any more
}

// What spare records stand for is in their hashes: Hi is the kind. Lo is the next
// copy of the block, or the number of the answer that it is of, 0 for none.
const (
	kindCopy = 1 + iota
	kindAnswer
)

// textTokens is how many tokens a block of text is taken to stand for: about 4
// bytes each.
const textTokens = TextBlock / 4

// resize follows s.config: a smaller capacity evicts.
func (sh *shadow) resize(s *slot) {
	block := int64(max(s.config.BlockSize, 1))
	blocks := int64(max(s.config.Capacity, 0))
	if !s.config.AfterPrefill {
		blocks = max(blocks-1, 0)
	}
	if sh.block != block && sh.size != sh.free {
		// Index forgets before another block size comes; but what is held must
		// never be weighed by another than it was taken for.
		block = sh.block
	}
	sh.block, sh.radix = block, s.config.AfterPrefill
	sh.free += blocks*block - sh.size
	sh.size = blocks * block
	sh.sequences.resize(sh, &s.tree, s.config.Sequences)
	sh.settle(s)
}

// reset forgets everything; the tree is emptied by the caller.
func (sh *shadow) reset(s *slot) {
	sh.queue = list{}
	sh.copies, sh.ends = nil, nil
	sh.answers.reset()
	sh.sequences.reset()
	sh.asked, sh.wanted, sh.awaited, sh.due, sh.silent = 0, 0, nil, 0, 0
	sh.free = sh.size
	sh.generating = generating{mean: sh.generating.mean, rate: sh.generating.rate, quiet: sh.generating.quiet}
	sh.pressed = time.Time{}
	sh.account(&s.tree)
}

// abandon gives up what was guessed: the slot is Exact now.
func (sh *shadow) abandon(s *slot) {
	t := &s.tree
	for x := sh.queue.first; x != 0; x = sh.queue.first {
		t.unlink(&sh.queue, x)
	}
	var spares []ref
	for r := t.following(t.top); r != t.top; r = t.following(r) {
		if t.isSpare(r) {
			spares = append(spares, r)
		}
	}
	for _, r := range spares {
		t.drop(r)
	}
	t.clear(guessed, expected, pinned)
	sh.reset(s)
}

// adopt takes what events have told as guesses: the slot is not Exact any more.
// In which order the engine would evict it is not known; the end of a chain goes
// before its beginning.
func (sh *shadow) adopt(s *slot) {
	t := &s.tree
	for r := t.lowest(t.top); r != t.top; {
		if rec := t.at(r); rec.state&spareBit == 0 && t.holds(r, reason(GPU)) > 0 {
			sh.put(s, r, false)
		}
		on := t.at(r).next
		if r = t.at(r).parent; on != 0 {
			r = t.lowest(on)
		}
	}
	sh.settle(s)
}

// put takes a block to be held, unless it is already, and to be evicted after all
// that are in the queue. Those below it must have been put before.
func (sh *shadow) put(s *slot, r ref, text bool) {
	t := &s.tree
	if t.holds(r, guessed) > 0 {
		return
	}
	sh.guess(t, r, text)
	sh.free -= sh.cost(t, r)
	if t.holds(r, pinned) == 0 {
		t.push(&sh.queue, r)
	}
}

// giveUp evicts the block that is next in turn, and reports whether there was
// one.
func (sh *shadow) giveUp(s *slot) bool {
	if sh.queue.first == 0 {
		return sh.sequences.giveUp(sh, &s.tree)
	}
	sh.evict(s, sh.queue.first)
	sh.account(&s.tree)
	return true
}

// beyond adds to what a slot holds of a prompt's full blocks what was
// generated behind them. It takes no lock.
func (sh *shadow) beyond(p *Prompt, h *Held) {
	depth := int(h[GPU])
	if n := sh.answers.behind(p, depth); n > 0 {
		for tier := range h {
			h[tier] = max(h[tier], int32(depth+n))
		}
	}
}

// account tells the arena what is held beside records.
func (sh *shadow) account(t *tree) {
	// What a map takes for an entry of few bytes, about.
	const each = 40
	n := sh.answers.size() + int64(each*(len(sh.copies)+len(sh.ends))) + 24*int64(cap(sh.awaited)) + sh.sequences.size()
	if n != sh.counted {
		t.arena.count(n - sh.counted)
		sh.counted = n
	}
}

// cost is the memory of a block, in tokens.
func (sh *shadow) cost(t *tree, r ref) int64 {
	if t.at(r).state&textBit != 0 {
		return textTokens
	}
	return sh.block
}

// guess takes a block to be held that was not.
func (sh *shadow) guess(t *tree, r ref, text bool) {
	rec := t.at(r)
	rec.state &^= textBit | sharedBit
	if text {
		rec.state |= textBit
	}
	t.hold(r, guessed)
}

// unguess takes it not to be held any more, and forgets it if nothing else is to
// be said of it.
func (sh *shadow) unguess(t *tree, r ref) {
	delete(sh.ends, r)
	t.release(r, guessed)
}

// instance is the record of the copy of a block that hits go to: its own, or a
// spare one.
func (sh *shadow) instance(r ref) ref {
	if len(sh.copies) > 0 {
		if c, ok := sh.copies[r]; ok && c.evicted {
			return c.first
		}
	}
	return r
}

// pin keeps a copy of a block: one more request uses it. A claim of what is cached
// does little else than this and unpin. So where nothing else changes than the
// count and the queue, they change only these.
func (sh *shadow) pin(t *tree, x ref) {
	rec := t.at(x)
	if rec.state&listedBit != 0 {
		t.cut(&sh.queue, x)
		rec.state &^= listedBit
	}
	if rec.state&(countMax[pinned]<<countShift[pinned]|leafBit|spareBit) != 0 {
		t.hold(x, pinned)
		return
	}
	rec.state += 1 << countShift[pinned]
	t.blocks[pinned]++
}

// unpin ends what pin began. What nobody uses any more is put at the end of the
// queue; it is guessed or spare, so it stays in the tree.
func (sh *shadow) unpin(t *tree, x ref) {
	rec := t.at(x)
	if rec.state>>countShift[pinned]&countMax[pinned] != 1 {
		t.release(x, pinned)
		return
	}
	rec.state += listedBit - 1<<countShift[pinned]
	if rec.state&spareBit == 0 {
		t.blocks[pinned]--
	}
	t.link(&sh.queue, x, sh.queue.last)
}

// copyOf makes a further copy of a block, 0 if there is no room for it.
func (sh *shadow) copyOf(t *tree, r ref) ref {
	x := t.spareRecord(r)
	if x == 0 {
		return 0
	}
	sh.linkCopy(t, r, x)
	return x
}

// linkCopy makes a spare record below a block be its newest copy.
func (sh *shadow) linkCopy(t *tree, r, x ref) {
	t.at(x).setHash(Hash{Hi: kindCopy})
	if sh.copies == nil {
		sh.copies = map[ref]copies{}
	}
	c := sh.copies[r]
	if c.first == 0 {
		c.first = x
	} else {
		t.at(c.last).setHash(Hash{kindCopy, uint64(x)})
	}
	c.last = x
	sh.copies[r] = c
}

// unlinkCopy takes a copy out of those of its block, and does nothing to other
// records. It reports whether it was the last of the block.
func (sh *shadow) unlinkCopy(t *tree, x ref) bool {
	h := t.hash(x)
	if h.Hi != kindCopy || !t.isSpare(x) {
		return false
	}
	r, next := t.parent(x), ref(h.Lo)
	c := sh.copies[r]
	before := ref(0)
	// Nearly always it is the first or the second: the oldest that nobody uses.
	for y := c.first; y != x; y = ref(t.hash(y).Lo) {
		before = y
	}
	if before == 0 {
		c.first = next
	} else {
		t.at(before).setHash(Hash{kindCopy, uint64(next)})
	}
	if c.last == x {
		c.last = before
	}
	if c.first != 0 {
		sh.copies[r] = c
		return false
	}
	delete(sh.copies, r)
	return c.evicted
}

// lose takes away a copy that is in no list: its memory is free.
func (sh *shadow) lose(t *tree, x ref) {
	if t.isSpare(x) {
		sh.free += sh.block
		r := t.parent(x)
		last := sh.unlinkCopy(t, x)
		t.drop(x)
		if last {
			sh.unguess(t, r)
		}
		return
	}
	sh.free += sh.cost(t, x)
	if c, ok := sh.copies[x]; ok {
		c.evicted = true
		sh.copies[x] = c
		return
	}
	sh.unguess(t, x)
}

// evict takes the memory of what is in the queue.
func (sh *shadow) evict(s *slot, x ref) {
	t := &s.tree
	next := t.after(x)
	t.unlink(&sh.queue, x)
	if h := t.hash(x); t.isSpare(x) && h.Hi == kindAnswer && h.Lo != 0 {
		// The blocks of an answer are side by side in the queue, the last first.
		sh.answers.shrink(uint32(h.Lo), next)
	}
	s.doubt(x)
	sh.lose(t, x)
}

// evictNode takes the memory of the node of the radix tree that is next in turn.
// The blocks of a node have been used together, so they are in the queue
// together, and a block that is not an end has only what is in its node below it.
func (sh *shadow) evictNode(s *slot) {
	t := &s.tree
	x := sh.queue.first
	if t.isSpare(x) {
		h := t.hash(x)
		for x != 0 && t.isSpare(x) && t.hash(x) == h {
			sh.evict(s, x)
			x = sh.queue.first
		}
		return
	}
	for {
		r := t.parent(x)
		_, end := sh.ends[r]
		on := r != 0 && t.linked(&sh.queue, r) && !end
		sh.evict(s, x)
		if !on {
			return
		}
		x = r
	}
}

// take makes a number of tokens' memory be in use. spare is how much more of it
// must be free for SGLang to evict nothing.
func (sh *shadow) take(s *slot, tokens, spare int64, now time.Time) {
	if !sh.radix {
		for n := 0; sh.free < tokens && sh.queue.first != 0; n++ {
			if n%fetchAtOnce == 0 {
				sh.fetchNext(&s.tree, (tokens-sh.free)/sh.block)
			}
			sh.evict(s, sh.queue.first)
		}
	} else if want := tokens + spare; sh.free < want {
		// SGLang evicts as much as it wants to be free, not what is short.
		for enough := sh.free + want; sh.free < enough && sh.queue.first != 0; {
			sh.evictNode(s)
		}
	}
	sh.free -= tokens
	if sh.free < 0 {
		sh.pressed = now
	}
}

// fetchNext fetches the first blocks of the queue, n of them and a few at most.
func (sh *shadow) fetchNext(t *tree, n int64) {
	x := sh.queue.first
	for range min(n+1, fetchAtOnce) {
		if x == 0 {
			return
		}
		rec := t.at(x)
		t.fetch(rec.hash())
		x = rec.after
	}
}

// settle evicts while more memory is in use than there is.
func (sh *shadow) settle(s *slot) {
	for sh.free < 0 && sh.queue.first != 0 {
		sh.evict(s, sh.queue.first)
	}
	sh.account(&s.tree)
}
