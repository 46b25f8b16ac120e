package index

import "time"

// Claim is what one request has made of a slot's blocks. It lies in the
// request, and is used by one goroutine at a time. The zero value claims
// nothing; the methods do nothing with it then.
//
// The prompt's memory is gone while its answer is streamed. So of its blocks the
// claim has only the last, from which the others are found upwards.
type Claim struct {
	slot   int32 // +1
	epoch  uint32
	kind   claimKind
	tail   ref    // of the blocks it has pinned the last, or the copy of that
	hit    int32  // blocks that it has found cached; of them
	told   int32  // the last were counted, or would have been, as an answer
	held   int32  // blocks that it has pinned
	added  int32  // the last of those, which were not there before; and those to come
	rest   int32  // tokens behind the last full block; -1 when they are not known
	own    int64  // tokens of memory it has beside the blocks'
	ahead  ref    // a spare record below the last block: of those to come, in SGLang's shadow, or where events tell
	asked  int64  // tokens of memory, of a claim whose blocks events tell of; of them
	wants  int64  // so many are not told of
	began  int64  // Unix nanoseconds, when it was made, if the shadow has it; and
	first  int64  // when the engine has begun to answer
	serial uint64 // in shadow.sequences
	text   bool
	root   Hash   // of the chain
	sum    uint64 // of the tokens behind the last full block
}

// claimKind says what the claim's blocks are pinned for.
type claimKind uint8

const (
	_ claimKind = iota
	// running: the shadow has the request in its pool.
	running
	// computing: that too, but what the request computes cannot be hit yet.
	computing
	// awaiting: events are to tell of the blocks that the request has added.
	awaiting
	// followed: they have, or are about to.
	followed
	// sequential: the shadow has a cache for the request, or it waits for one.
	sequential
)

// How long events that tell of a block are waited for, from when the engine has
// begun to answer, or has failed to. An engine publishes what it has scheduled
// with the output of that step, which is before its first byte; what takes time
// are queues, and a rank that is being repaired is not waited for. Until then a
// block that never comes is counted where it is not; afterwards one that comes
// late is not counted where it is, which costs as much.
const eventsWithin = 2 * time.Second

// awaited are blocks that events have to confirm by a time: so many from the tail
// upwards, each of them pinned.
type awaited struct {
	due  int64 // Unix nanoseconds
	tail ref
	n    int32
}

// Claim says that the prompt has been sent to a slot: its blocks are about to
// be there. A claim on a slot that is not known is void.
func (x *Index) Claim(c *Claim, slot int, p *Prompt, now time.Time) {
	*c = Claim{}
	s := x.lock(slot)
	if s == nil {
		return
	}
	defer s.unlock()
	s.shadow.expire(s, now)
	c.slot, c.epoch = int32(slot)+1, s.epoch
	s.claims++
	switch {
	case s.state == Exact:
		s.shadow.await(s, c, p, now)
	case s.shadow.sequences.some():
		s.shadow.sequences.claim(s, c, p, now)
	default:
		s.shadow.claim(s, c, p, now)
	}
	s.shadow.account(&s.tree)
	s.foresee()
}

// claimed returns the slot of a claim with its mutex held, nil if the claim is
// void.
func (x *Index) claimed(c *Claim) *slot {
	if c.slot == 0 {
		return nil
	}
	s := x.lock(int(c.slot) - 1)
	if s == nil {
		return nil
	}
	if s.epoch != c.epoch {
		s.unlock()
		return nil
	}
	return s
}

// Prefilled says that the engine has begun to answer.
func (x *Index) Prefilled(c *Claim, now time.Time) {
	s := x.claimed(c)
	if s == nil {
		return
	}
	defer s.unlock()
	s.begun(c, now)
}

// TryPrefilled is Prefilled where that takes no time worth speaking of. It reports
// false, and has done nothing, where another one changes the slot just now, or the
// prompt has brought many blocks: then Prefilled is for a goroutine that nobody
// waits for.
func (x *Index) TryPrefilled(c *Claim, now time.Time) bool {
	const many = 256
	s := x.at(int(c.slot) - 1)
	if c.slot == 0 || s == nil {
		return true // it is void
	}
	if c.added > many || !s.mu.TryLock() {
		return false
	}
	defer s.unlock()
	if !s.gone && s.epoch == c.epoch {
		s.begun(c, now)
	}
	return true
}

// begun says that the engine has begun to answer a claim on the slot, whose mutex
// is held.
func (s *slot) begun(c *Claim, now time.Time) {
	s.shadow.prefilled(s, c, now)
	s.shadow.account(&s.tree)
	s.foresee()
}

// Found says how many of the prompt's tokens the engine has found in its cache,
// where it tells. It decides whether answers go on to be counted, and is called
// before Release or Undo.
func (x *Index) Found(c *Claim, tokens int) {
	s := x.claimed(c)
	if s == nil {
		return
	}
	defer s.unlock()
	// Fewer blocks than what is cached without the answer say nothing of that.
	if found := int64(tokens) / s.shadow.block; c.told > 0 && found >= int64(c.hit-c.told) {
		s.shadow.answers.proved(found >= int64(c.hit))
	}
	c.told = 0
}

// Release says that the request has ended, after the engine has generated so
// many tokens; -1 when that is not known. It voids the claim.
func (x *Index) Release(c *Claim, generated int, now time.Time) {
	s := x.claimed(c)
	if s != nil {
		if generated > 0 || c.kind == awaiting {
			s.shadow.prefilled(s, c, now)
		}
		s.shadow.ended(s, c, generated, now.UnixNano())
		switch c.kind {
		case running:
			s.shadow.release(s, c, generated, now)
		case computing:
			s.shadow.undo(s, c)
		case followed:
			s.shadow.unfollow(&s.tree, c)
		case sequential:
			s.shadow.sequences.end(s, c, generated, c.first != 0)
		}
		s.shadow.settle(s)
		s.foresee()
		s.unlock()
	}
	*c = Claim{}
}

// Undo takes the claim back: the engine has refused the request, or failed
// before it answered. It voids the claim.
func (x *Index) Undo(c *Claim) {
	s := x.claimed(c)
	if s != nil {
		switch c.kind {
		case running, computing:
			s.shadow.undo(s, c)
		case awaiting:
			s.shadow.unawait(&s.tree, c.tail, c.added)
			s.shadow.unfollow(&s.tree, c)
		case followed:
			s.shadow.unfollow(&s.tree, c)
		case sequential:
			s.shadow.sequences.end(s, c, 0, false)
		}
		s.shadow.ended(s, c, 0, 0)
		s.shadow.settle(s)
		s.foresee()
		s.unlock()
	}
	*c = Claim{}
}

// mostSilent is how many requests in a row an engine may answer and tell nothing,
// of them or of others, until it is not believed to tell anything.
const mostSilent = 4

// Silent is why a slot's predictions are not to be believed when its engine tells
// nothing.
const Silent = "the engine answers requests, and publishes no KV events of what it computes"

// Expire gives up what events should have told by now. It is called about each
// second; claims do it for their slot, too. It returns the slots that are Exact and
// whose engines tell nothing any more: they are not to be believed, as Audit says
// from then on until they tell something.
func (x *Index) Expire(now time.Time) (silent []int) {
	for number := range *x.slots.Load() {
		if s := x.lock(number); s != nil {
			s.shadow.expire(s, now)
			s.shadow.account(&s.tree)
			s.foresee()
			if s.state == Exact && s.shadow.silent >= mostSilent {
				s.audit.Why = Silent
				silent = append(silent, number)
			}
			s.unlock()
		}
	}
	return silent
}

// cached is the record of a block below r, if the engine is taken to have it.
func (sh *shadow) cached(t *tree, r ref, h Hash) ref {
	q := t.find(r, h)
	if q != 0 && heldBits(t.at(q).state)&(1<<GPU) != 0 {
		return q
	}
	return 0
}

// claim runs a request in the pool: it pins what is cached of its prompt, and
// takes memory for the others.
func (sh *shadow) claim(s *slot, c *Claim, p *Prompt, now time.Time) {
	t := &s.tree
	c.kind = running
	if sh.radix {
		c.kind = computing
	}
	n := len(p.Chain)
	text := len(p.IDs) == 0
	most, cost := n, int64(textTokens)
	c.rest, c.text, c.root = -1, text, p.Root
	if !text {
		most, cost = min(n, (len(p.IDs)-1)/max(p.Block, 1)), sh.block
		c.rest = int32(max(len(p.IDs)-n*p.Block, 0))
		c.sum = sumOf(p.parent(n), p.IDs[len(p.IDs)-int(c.rest):])
	}

	// What is cached is pinned before anything is evicted.
	r, i, extra := ref(0), 0, int64(0)
	for i < most {
		q := sh.cached(t, r, p.Chain[i])
		if q == 0 {
			break
		}
		rec := t.at(q)
		if rec.state&(countMax[guessed]<<countShift[guessed]) == 0 {
			// Events have told of it, and the shadow has not.
			sh.guess(t, q, text)
			extra += cost
		}
		rec.state |= sharedBit
		sh.pin(t, sh.instance(q))
		r, i = q, i+1
	}
	if cell, behind := sh.answers.find(p, i); cell != nil {
		c.told = int32(min(behind, most-i))
		if !sh.answers.doubted.Load() {
			r, i = sh.show(s, cell.number, p, r, i, most)
		} else {
			c.hit = c.told
		}
	}
	hit := i
	c.hit += int32(hit)
	sh.cut(t, r)

	sh.generate(s, now)
	c.began = now.UnixNano()
	sh.generating.silent.add(c.began)
	part := sh.blocks(int64(c.rest)) * sh.block
	spare := int64(0)
	if sh.block > 1 {
		// A page more than the tokens take.
		spare = sh.block - (part - int64(max(c.rest, 0)))
	}
	sh.take(s, cost*int64(n-hit)+extra+part, spare, now)
	c.own = part
	if sh.radix {
		c.tail, c.held = r, int32(hit)
		c.own += cost * int64(n-hit)
		sh.foresee(t, c, p.Chain[hit:])
		return
	}
	for ; i < n; i++ {
		if (i-hit)%fetchAtOnce == 0 {
			for _, h := range p.Chain[i:min(i+fetchAtOnce, n)] {
				t.fetch(h)
			}
		}
		q := t.add(r, p.Chain[i])
		if q == 0 {
			// There is no memory for it in the index. The engine has it.
			c.own += cost * int64(n-i)
			c.rest = -1
			break
		}
		switch held := t.holds(q, guessed) > 0; {
		case held && i == n-1 && i == most && hit == most:
			// All of the prompt is cached, and its last block computed again.
			if x := sh.copyOf(t, q); x != 0 {
				t.hold(x, pinned)
				c.tail = x
			} else {
				sh.pin(t, sh.instance(q))
				c.own += cost
			}
		case held:
			// It was out of reach, and is so no longer.
			t.at(q).state |= sharedBit
			sh.pin(t, sh.instance(q))
			sh.free += cost
		default:
			sh.guess(t, q, text)
			t.hold(q, pinned)
		}
		r = q
	}
	if c.tail == 0 {
		c.tail = r
	}
	c.held, c.added = int32(i), int32(i-hit)
}

// foresee keeps the records of the blocks that a request has begun to compute.
// Nothing is to be said of them yet: others may compute the same, and what is
// there of them already can be evicted.
func (sh *shadow) foresee(t *tree, c *Claim, chain []Hash) {
	r := c.tail
	for _, h := range chain {
		q := t.add(r, h)
		if q == 0 {
			c.rest = -1
			break
		}
		r = q
		c.added++
	}
	if c.added > 0 {
		if c.ahead = t.spareRecord(r); c.ahead == 0 {
			t.drop(r)
			c.added, c.rest = 0, -1
		}
	}
}

// show makes of an answer, which a prompt has from i on behind r, blocks of the
// tree, as far as the prompt shows it: the first are pinned, and one that the
// request computes again, at most, stays where it is in the queue. It returns the
// last that is pinned and where the prompt goes on.
func (sh *shadow) show(s *slot, number uint32, p *Prompt, r ref, i, most int) (ref, int) {
	t := &s.tree
	a := sh.answers.all[number-1]
	sh.answers.remove(number)
	if sh.radix && r != 0 {
		sh.end(r)
	}
	// They are in the queue from the last to the first.
	shown := min(int(a.blocks), len(p.Chain)-i)
	hidden := a
	hidden.blocks -= int32(shown)
	// What is behind what is used, in the radix tree's node, counts as used.
	refresh := sh.radix && i < most
	x := a.last
	for range hidden.blocks {
		next := t.after(x)
		if refresh {
			t.unlink(&sh.queue, x)
			t.push(&sh.queue, x)
		}
		x = next
	}
	again := ref(0) // stands where the one is that is computed again
	for n := shown; n > 0; n-- {
		next := t.after(x)
		if i+n > most {
			again = x
		} else {
			t.unlink(&sh.queue, x)
			t.drop(x)
			sh.free += sh.block
		}
		x = next
	}
	q, last, pins := r, r, 0
	for n := range shown {
		if q = t.add(q, p.Chain[i+n]); q == 0 {
			break
		}
		there := t.holds(q, guessed) > 0
		if again != 0 && i+n >= most {
			if !there {
				sh.guess(t, q, false)
				t.replace(&sh.queue, again, q)
				if refresh {
					t.unlink(&sh.queue, q)
					t.push(&sh.queue, q)
				}
				t.drop(again)
				again = 0
				if sh.radix && hidden.blocks > 0 {
					sh.end(q)
				}
			}
			break
		}
		if !there {
			sh.guess(t, q, false)
			sh.free -= sh.block
		}
		t.at(q).state |= sharedBit
		sh.pin(t, sh.instance(q))
		last, pins = q, pins+1
	}
	if again != 0 {
		t.at(again).setHash(Hash{Hi: kindAnswer})
	}
	if hidden.blocks > 0 {
		// Prompts that go on behind this one may show the others.
		hidden.parent, hidden.rest = p.parent(i+shown), 0
		hidden.sum = sumOf(hidden.parent, nil)
		number := sh.answers.add(hidden)
		for x, n := hidden.last, hidden.blocks; n > 0; n-- {
			t.at(x).setHash(Hash{kindAnswer, uint64(number)})
			x = t.after(x)
		}
	}
	return last, i + pins
}

// end says that a node of the radix tree ends with a block which others follow.
func (sh *shadow) end(r ref) {
	if sh.ends == nil {
		sh.ends = map[ref]struct{}{}
	}
	sh.ends[r] = struct{}{}
}

// cut says that a prompt has been found in the radix tree as far as a block. If
// that is inside a node, it becomes two, and what is behind counts as used, too.
func (sh *shadow) cut(t *tree, r ref) {
	if _, ok := sh.ends[r]; ok || !sh.radix || r == 0 {
		return
	}
	below := sh.below(t, r)
	if below == 0 {
		return
	}
	sh.end(r)
	last := below
	for {
		next := sh.below(t, last)
		if _, ok := sh.ends[last]; ok || next == 0 {
			break
		}
		last = next
	}
	for x := last; x != r; x = t.parent(x) {
		if t.linked(&sh.queue, x) {
			t.unlink(&sh.queue, x)
			t.push(&sh.queue, x)
		}
	}
}

// below is a block behind r which is in the radix tree. Inside a node there is
// one at most.
func (sh *shadow) below(t *tree, r ref) ref {
	for x := t.at(r).child; x != 0; x = t.at(x).next {
		if !t.isSpare(x) && t.holds(x, guessed) > 0 {
			return x
		}
	}
	return 0
}

// prefilled says that what the claim's request was to compute is there.
func (sh *shadow) prefilled(s *slot, c *Claim, now time.Time) {
	t := &s.tree
	if c.began != 0 && c.first == 0 {
		c.first = now.UnixNano()
		sh.generating.silent.remove(c.began)
		sh.generating.streams.add(c.first)
	}
	switch c.kind {
	case computing:
		c.kind = running
		if c.added == 0 {
			return
		}
		c.tail = t.parent(c.ahead)
		// The last block that the tree has already is where a node ends now.
		r := c.tail
		for n := c.added; n > 0 && t.holds(r, guessed) == 0; n-- {
			r = t.parent(r)
		}
		sh.cut(t, r)
		if r != c.tail && r != 0 {
			sh.end(r)
		}
		cost := sh.block
		if c.text {
			cost = textTokens
		}
		r = c.tail
		for range c.added {
			if t.holds(r, guessed) == 0 {
				sh.guess(t, r, c.text)
			} else {
				// Another request has been faster, and this one's copy is
				// given back.
				sh.free += cost
			}
			c.own -= cost
			sh.pin(t, r)
			r = t.parent(r)
		}
		c.held += c.added
		t.drop(c.ahead)
		c.ahead = 0
	case awaiting:
		c.kind = followed
		// From now on it has a block for what it generates, and events tell of
		// the others.
		sh.want(c, sh.block)
		if c.added == 0 {
			return
		}
		t.stay(c.tail)
		if sh.radix {
			r := c.tail
			for range c.added {
				sh.comes(t, r)
				sh.expect(t, r)
				r = t.parent(r)
			}
		}
		a := awaited{now.Add(eventsWithin).UnixNano(), c.tail, c.added}
		if sh.confirmed(t, a) {
			sh.unawait(t, c.tail, c.added)
			return
		}
		if sh.due == len(sh.awaited) {
			sh.awaited, sh.due = sh.awaited[:0], 0
		}
		sh.awaited = append(sh.awaited, a)
	}
}

// blocks is how many blocks so many tokens take.
func (sh *shadow) blocks(tokens int64) int64 { return (max(tokens, 0) + sh.block - 1) / sh.block }

// release ends a request that has generated so many tokens.
func (sh *shadow) release(s *slot, c *Claim, generated int, now time.Time) {
	t := &s.tree
	tail := c.tail
	if tail != 0 && t.isSpare(tail) {
		tail = t.parent(tail)
	}
	// The last token that was generated is not computed.
	if generated > 0 {
		// No engine has more than its memory, whatever it tells.
		behind := int64(max(c.rest, 0)) + min(int64(generated)-1, sh.size)
		full := behind / sh.block
		more := sh.blocks(behind) - sh.blocks(int64(c.rest))
		for range more {
			sh.take(s, sh.block, 0, now) // one after the other, as it was generated
		}
		c.own += more * sh.block

		// The blocks are made before any is put into the queue: making one may
		// evict another.
		last, n := ref(0), int64(0)
		for ; n < full; n++ {
			x := t.spareRecord(tail)
			if x == 0 {
				break
			}
			t.at(x).setHash(Hash{kindAnswer, uint64(last)})
			last = x
		}
		if n > 0 {
			if sh.radix && tail != 0 {
				sh.end(tail)
			}
			number := uint32(0)
			parent := c.root
			if tail != 0 {
				parent = t.hash(tail)
			}
			if c.rest >= 0 && parent != (Hash{}) {
				number = sh.answers.add(answer{parent: parent, sum: c.sum, rest: c.rest, blocks: int32(n), last: last})
			}
			for x := last; x != 0; {
				next := ref(t.hash(x).Lo)
				t.at(x).setHash(Hash{kindAnswer, uint64(number)})
				t.push(&sh.queue, x)
				x = next
			}
			c.own -= n * sh.block
		}
	}
	sh.giveBack(t, c, c.held)
}

// giveBack unpins so many of a claim's blocks from its tail on, and its own
// memory.
func (sh *shadow) giveBack(t *tree, c *Claim, n int32) {
	sh.free += c.own
	c.own = 0
	r := c.tail
	for ; n > 0; n-- {
		x := r
		if t.isSpare(x) {
			r = t.parent(x)
		} else {
			x = sh.instance(x)
		}
		next := t.parent(r)
		sh.unpin(t, x)
		r = next
	}
	c.tail = r
}

// undo takes back what the claim has added, unless others have used it since.
func (sh *shadow) undo(s *slot, c *Claim) {
	t := &s.tree
	if c.ahead != 0 {
		t.drop(c.ahead)
	}
	for ; c.kind == running && c.added > 0; c.added-- {
		x := c.tail
		if t.isSpare(x) {
			c.tail = t.parent(t.parent(x))
		} else {
			c.tail = t.parent(x)
			x = sh.instance(x)
		}
		c.held--
		switch {
		case t.holds(x, pinned) > 1:
			sh.unpin(t, x)
		case t.isSpare(x) && sh.instance(t.parent(x)) != x:
			sh.lose(t, x)
		case t.isSpare(x) || t.at(x).state&sharedBit != 0:
			sh.unpin(t, x)
		default:
			sh.lose(t, x)
			t.release(x, pinned)
		}
	}
	sh.giveBack(t, c, c.held)
}

// await expects of an engine whose events are known the blocks that it does not
// have yet.
func (sh *shadow) await(s *slot, c *Claim, p *Prompt, now time.Time) {
	t := &s.tree
	c.kind = awaiting
	r, i := ref(0), 0
	for ; i < len(p.Chain); i++ {
		// What others have been sent to compute is awaited again: they may be
		// refused.
		q := t.find(r, p.Chain[i])
		if q == 0 || t.holds(q, reason(GPU)) == 0 || t.at(q).state&leavingBit != 0 {
			break
		}
		r = q
	}
	c.hit = int32(i)
	for ; i < len(p.Chain); i++ {
		q := t.add(r, p.Chain[i])
		if q == 0 {
			break
		}
		t.hold(q, pinned)
		if !sh.radix {
			sh.expect(t, q)
		} else if rec := t.at(q); t.holds(q, reason(GPU)) == 0 && rec.state&comingBit == 0 {
			rec.state |= comingBit
			sh.wanted += sh.block
		}
		r = q
		c.added++
	}
	// What is in use is no leaf.
	if c.tail = r; r != 0 {
		c.ahead = t.spareRecord(r)
	}
	// Blocks that are expected are counted as such.
	rest := int64(max(len(p.IDs)-len(p.Chain)*max(p.Block, 1), 0))
	sh.want(c, sh.blocks(rest)*sh.block)

	c.asked = int64(max(len(p.IDs)-int(c.hit)*p.Block, 0))
	if sh.asked += c.asked; sh.asked > sh.size {
		sh.pressed = now
	}
}

// want notes how much memory a claim's request has, or is to have, of which no
// events tell.
func (sh *shadow) want(c *Claim, tokens int64) {
	sh.wanted += tokens - c.wants
	c.wants = tokens
}

// comes ends that a block is wanted: it is there, or expected, or will not come.
func (sh *shadow) comes(t *tree, r ref) {
	if rec := t.at(r); sh.wanted > 0 && rec.state&comingBit != 0 && t.holds(r, guessed) == 0 {
		rec.state &^= comingBit
		sh.wanted -= sh.block
	}
}

// unfollow ends a claim whose blocks events tell of.
func (sh *shadow) unfollow(t *tree, c *Claim) {
	sh.want(c, 0)
	if c.ahead == 0 {
		return
	}
	r := t.parent(c.ahead)
	// One that nothing else holds goes with it, and may be another slot's at once.
	stays := t.at(r).state>>reasonsShift != 0
	t.drop(c.ahead)
	if stays {
		t.renew(r)
	}
}

// expect takes a block to be on its way, if it is not there.
func (sh *shadow) expect(t *tree, r ref) {
	if heldBits(t.at(r).state)&(1<<GPU) == 0 {
		t.hold(r, expected)
	}
}

// unawait gives up so many blocks from the tail upwards, save those that other
// requests are to compute too.
func (sh *shadow) unawait(t *tree, tail ref, n int32) {
	for r := tail; n > 0; n-- {
		next := t.parent(r)
		if t.holds(r, pinned) == 1 {
			sh.comes(t, r)
			t.release(r, expected)
		}
		if t.holds(r, guessed) > 0 {
			sh.unpin(t, r) // The slot has become approximate since.
		} else {
			t.release(r, pinned)
		}
		r = next
	}
}

// confirmed: events have told of all of its blocks.
func (sh *shadow) confirmed(t *tree, a awaited) bool {
	r := a.tail // which is told of last
	for n := a.n; n > 0; n-- {
		if t.holds(r, expected) > 0 {
			return false
		}
		r = t.parent(r)
	}
	return true
}

// expire gives up what is due, and awaits no longer what has come.
func (sh *shadow) expire(s *slot, now time.Time) {
	for at := now.UnixNano(); sh.due < len(sh.awaited); sh.due++ {
		a := sh.awaited[sh.due]
		if !sh.confirmed(&s.tree, a) {
			if a.due > at {
				break
			}
			sh.silent++
		}
		sh.unawait(&s.tree, a.tail, a.n)
	}
	if sh.due > len(sh.awaited)/2 {
		sh.awaited = sh.awaited[:copy(sh.awaited, sh.awaited[sh.due:])]
		sh.due = 0
	}
}
