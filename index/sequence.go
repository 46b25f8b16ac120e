package index

import (
	"encoding/binary"
	"time"
)

// sequences are the caches of an engine that has one for each sequence that it can run
// at a time and shares none of them: llama.cpp's slots, and Ollama's. Each keeps what
// it has computed last. It is a part of the shadow, which knows such an engine by
// nothing else; the mutex of the slot guards it. The zero value has none.
//
//   - A request gets the free cache that has the longest beginning of its prompt, if
//     that is more than a tenth of it, else the one that has been free for the longest
//     time. What that had beyond is lost.
//   - What it has is not found by others until the request has ended.
//   - While none is free requests wait, and those that came first get what becomes
//     free.
//
// Blocks are held as guessed while the cache is free, once for each that has them, and
// pinned while a request runs there or waits.
type sequences struct {
	all    []sequence
	line   []sequenced // that wait, the first to come first
	clock  uint64
	serial uint64 // of the last claim
}

// sequence is one of an engine's caches.
type sequence struct {
	chain  []ref  // what it holds, or is to hold, from the first block on
	hit    int    // how many of them were there before who has it
	answer uint32 // the number of the answer behind that, 0 for none
	used   uint64 // when it was given back, by the clock; 0 is never
	by     uint64 // the serial of the claim that has it, 0 when it is free
}

// sequenced is a claim that waits for a cache.
type sequenced struct {
	serial uint64
	chain  []ref
}

// mostSequences is how many caches an engine is believed to have.
const mostSequences = 1 << 12

// similarity is the part of a prompt that a cache must begin with to be preferred to
// the oldest one: llama.cpp's --slot-prompt-similarity.
const similarity = 0.1

// some: the engine has such caches.
func (q *sequences) some() bool { return len(q.all) > 0 }

// reset forgets all. What is held is the caller's.
func (q *sequences) reset() {
	clear(q.all)
	q.line = nil
}

// resize makes room for so many more; fewer there are only after a reset.
func (q *sequences) resize(sh *shadow, t *tree, n int) {
	n = min(max(n, 0), mostSequences)
	if n < len(q.all) {
		q.all = q.all[:n]
	}
	for i := len(q.all); i < n; i++ {
		q.all = append(q.all, sequence{})
		q.pass(sh, t, i)
	}
}

// size is the memory that they take, in bytes.
func (q *sequences) size() (n int64) {
	const each, eachRef = 56, 4
	for i := range q.all {
		n += each + eachRef*int64(cap(q.all[i].chain))
	}
	for i := range q.line {
		n += each + eachRef*int64(cap(q.line[i].chain))
	}
	return n
}

// common is how many blocks the one begins with and the other.
func common(a, b []ref) int {
	n := 0
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}

// claim gives a request the cache that the engine will, or lets it wait.
func (q *sequences) claim(s *slot, c *Claim, p *Prompt, now time.Time) {
	sh, t := &s.shadow, &s.tree
	q.serial++
	c.kind, c.serial, c.root, c.text, c.rest = sequential, q.serial, p.Root, len(p.IDs) == 0, -1
	c.began = now.UnixNano()
	sh.generating.silent.add(c.began)

	chain, r := make([]ref, 0, len(p.Chain)), ref(0)
	for _, h := range p.Chain {
		x := t.add(r, h)
		if x == 0 {
			break // there is no memory for it in the index
		}
		t.hold(x, pinned)
		chain, r = append(chain, x), x
	}
	n, tokens, block := len(p.Chain), len(p.Chain), 1
	if !c.text {
		block, tokens = max(p.Block, 1), len(p.IDs)
		if len(chain) == n {
			c.rest = int32(max(tokens-n*block, 0))
			c.sum = sumOf(p.parent(n), p.IDs[tokens-int(c.rest):])
		}
	}

	best, longest, oldest := -1, 0, -1
	for i := range q.all {
		o := &q.all[i]
		if o.by != 0 {
			continue
		}
		if n := common(o.chain, chain); n > 0 || o.answer != 0 {
			n += q.answered(sh, o, p, n)
			if n > longest && float64(n*block) > similarity*float64(tokens) {
				best, longest = i, n
			}
		}
		if oldest < 0 || o.used <= q.all[oldest].used {
			oldest = i
		}
	}
	if best < 0 {
		best = oldest
	}
	if best < 0 {
		q.line = append(q.line, sequenced{c.serial, chain})
		sh.pressed = now // what it will find is not known
		return
	}
	o := &q.all[best]
	most := len(p.Chain)
	if !c.text {
		most = min(most, (tokens-1)/block)
	}
	n = common(o.chain, chain)
	told := q.answered(sh, o, p, n)
	c.told = int32(min(told, max(most-n, 0)))
	c.hit = int32(min(n, most)) + c.told
	q.give(sh, t, best, sequenced{c.serial, chain})
	o.hit = int(c.hit)
}

// answered is how many blocks of the prompt, behind the n that a cache has, are its
// answer to the prompt before.
func (q *sequences) answered(sh *shadow, o *sequence, p *Prompt, n int) int {
	if o.answer == 0 || n != len(o.chain) {
		return 0
	}
	a := &sh.answers.all[o.answer-1]
	start := n * p.Block
	end := start + int(a.rest)
	if end >= len(p.IDs) || a.parent != p.parent(n) || sumOf(a.parent, p.IDs[start:end]) != a.sum {
		return 0
	}
	return min(int(a.blocks), len(p.Chain)-n)
}

// give gives a cache to a claim: what it held is lost, but for what the claim has too.
func (q *sequences) give(sh *shadow, t *tree, i int, w sequenced) {
	o := &q.all[i]
	q.silence(sh, o)
	o.hit = common(o.chain, w.chain)
	for k := len(o.chain) - 1; k >= 0; k-- {
		t.release(o.chain[k], guessed)
	}
	o.chain, o.by = w.chain, w.serial
}

// silence forgets the answer in a cache.
func (q *sequences) silence(sh *shadow, o *sequence) {
	if o.answer != 0 {
		sh.answers.remove(o.answer)
		o.answer = 0
	}
}

// pass gives a cache that is free to who waits for one.
func (q *sequences) pass(sh *shadow, t *tree, i int) {
	if len(q.line) == 0 {
		return
	}
	w := q.line[0]
	q.line[0] = sequenced{}
	if q.line = q.line[1:]; len(q.line) == 0 {
		q.line = nil
	}
	q.give(sh, t, i, w)
}

// end ends a claim. Its request has generated so many tokens; computed: all of its
// prompt was, and else only what was there before is known to be: of one that has
// waited, without what was an answer.
func (q *sequences) end(s *slot, c *Claim, generated int, computed bool) {
	sh, t := &s.shadow, &s.tree
	for i := range q.line {
		if w := &q.line[i]; w.serial == c.serial {
			// The engine has more caches than is known, or had no time for it.
			unpinAll(t, w.chain)
			q.line = append(q.line[:i], q.line[i+1:]...)
			return
		}
	}
	for i := range q.all {
		o := &q.all[i]
		if o.by != c.serial {
			continue
		}
		chain := o.chain
		if !computed {
			o.chain = chain[:min(o.hit, len(chain))]
		}
		for _, r := range o.chain {
			t.hold(r, guessed)
		}
		unpinAll(t, chain)
		q.clock++
		o.by, o.used = 0, q.clock
		if computed && generated > 1 && c.rest >= 0 {
			// The last token is not computed. No engine has more than its memory.
			full := (int64(c.rest) + min(int64(generated)-1, sh.size)) / sh.block
			parent := c.root
			if n := len(o.chain); n > 0 {
				parent = t.hash(o.chain[n-1])
			}
			if full > 0 && parent != (Hash{}) {
				o.answer = sh.answers.add(answer{parent: parent, sum: c.sum, rest: c.rest, blocks: int32(min(full, 1<<30))})
			}
		}
		q.pass(sh, t, i)
		return
	}
}

// unpinAll gives up what a claim has pinned.
func unpinAll(t *tree, chain []ref) {
	for k := len(chain) - 1; k >= 0; k-- {
		t.release(chain[k], pinned)
	}
}

// giveUp forgets the last block of the cache that has been free for the longest time,
// and reports whether there was one.
func (q *sequences) giveUp(sh *shadow, t *tree) bool {
	oldest := -1
	for i := range q.all {
		if o := &q.all[i]; o.by == 0 && len(o.chain) > 0 && (oldest < 0 || o.used < q.all[oldest].used) {
			oldest = i
		}
	}
	if oldest < 0 {
		return false
	}
	o := &q.all[oldest]
	q.silence(sh, o)
	last := len(o.chain) - 1
	r := o.chain[last]
	o.chain = o.chain[:last]
	t.release(r, guessed)
	return true
}

// In a snapshot sequences are how many there are, and of each when it was given back,
// how many blocks it holds and the numbers of their records; then whether there is an answer, and of that the sum and length of the tokens before
// it and how many blocks it has. What requests have is not in it.

// appendSnapshot appends them.
func (q *sequences) appendSnapshot(dst []byte, sh *shadow, number func(ref) uint32) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(q.all)))
	for i := range q.all {
		o := &q.all[i]
		chain := o.chain
		if o.by != 0 {
			chain = nil
		}
		dst = binary.AppendUvarint(dst, o.used)
		dst = binary.AppendUvarint(dst, uint64(len(chain)))
		for _, r := range chain {
			dst = binary.AppendUvarint(dst, uint64(number(r)))
		}
		if o.answer == 0 {
			dst = append(dst, 0)
			continue
		}
		a := &sh.answers.all[o.answer-1]
		dst = append(dst, 1)
		dst = binary.LittleEndian.AppendUint64(dst, a.parent.Hi)
		dst = binary.LittleEndian.AppendUint64(dst, a.parent.Lo)
		dst = binary.LittleEndian.AppendUint64(dst, a.sum)
		dst = binary.AppendUvarint(dst, uint64(a.rest))
		dst = binary.AppendUvarint(dst, uint64(a.blocks))
	}
	return dst
}

// restoredSequence is one as a snapshot has it.
type restoredSequence struct {
	used   uint64
	chain  []ref
	answer answer // of no blocks: none
}

// readSequences reads what appendSnapshot has written. Chains end where they make no
// sense, or where there was no memory for what follows.
func readSequences(d *snapshotReader, t *tree, record func(uint32) ref, isGuessed func(ref) bool) (all []restoredSequence) {
	for range d.number(uint64(len(d.rest))) {
		o := restoredSequence{used: d.number(1 << 62)}
		before, whole := ref(0), true
		for range d.number(uint64(len(d.rest))) {
			r := record(uint32(d.number(1<<32 - 1)))
			if whole = whole && isGuessed(r) && t.parent(r) == before; whole {
				o.chain, before = append(o.chain, r), r
			}
		}
		if d.number(1) == 1 {
			a := answer{parent: Hash{d.fixed(), d.fixed()}, sum: d.fixed(), rest: int32(d.number(1<<31 - 1)), blocks: int32(d.number(1 << 30))}
			if whole {
				o.answer = a
			}
		}
		all = append(all, o)
	}
	return all
}

// restore enters what readSequences has read. Of the records in order, which are held
// as guessed, nothing else is held.
func (q *sequences) restore(sh *shadow, t *tree, all []restoredSequence, order []ref) {
	held := map[ref]int{}
	for i, from := range all[:min(len(all), len(q.all))] {
		o := &q.all[i]
		o.chain, o.used = from.chain, from.used
		q.clock = max(q.clock, o.used)
		for _, r := range o.chain {
			held[r]++
			for t.holds(r, guessed) < held[r] {
				t.hold(r, guessed)
			}
		}
		if a := from.answer; a.blocks > 0 {
			o.answer = sh.answers.add(a)
		}
	}
	for _, r := range order {
		if t.isSpare(r) {
			t.drop(r)
			continue
		}
		for n := t.holds(r, guessed); n > held[r]; n-- {
			t.release(r, guessed)
		}
	}
}
