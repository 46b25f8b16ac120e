package index

import (
	"math/bits"
	"sync/atomic"
)

// Tier is where an engine keeps a block. Choosing weighs the slower ones.
type Tier uint8

// The tiers, from the fastest on.
const (
	GPU Tier = iota
	CPU
	Disk
	Remote
	Tiers = 4
)

// reason is why a tree keeps a block. Reasons are counted: there may be several
// copies of a block, and several requests that compute it.
type reason uint8

const (
	// The first Tiers reasons are the tiers: the engine's events have said so.

	// guessed: the shadow takes the engine to hold it, on the GPU.
	guessed = reason(Tiers) + iota
	// expected: a request that computes it was sent, and no event has said so
	// yet. It counts as on the GPU.
	expected
	// pinned: a request uses it. That keeps the record, but by itself the block
	// is not held.
	pinned
	reasons
)

// The state of a record: the lowest bits say for each tier whether it is
// reached, then come flags, and then a count for each reason. When a count is
// at its largest, tree.more has what is beyond it.
const (
	reachedBits  = 1<<Tiers - 1
	spareBit     = 1 << 4    // it is a spare record
	branchBit    = 1 << 5    // it is in tree.branches
	listedBit    = 1 << 6    // it is in a list of the tree's user
	leafBit      = 1 << 7    // it is in tree.leaves
	forkBit      = 1 << 8    // another has come below it when there was one already
	textBit      = 1 << 9    // the shadow's: it is a block of text
	sharedBit    = 1 << 10   // the shadow's: others than the one who added it have used it
	comingBit    = sharedBit // where events tell: it is counted in shadow.wanted
	leavingBit   = 1 << 11   // it is in tree.leaving
	reasonsShift = 12
	toldBits     = 1<<21 - 1<<reasonsShift // the counts of the tiers
	otherBits    = 1<<32 - 1<<21
)

var (
	countShift = [reasons]uint8{12, 15, 17, 19, 21, 23, 27}
	countMax   = [reasons]uint32{7, 3, 3, 3, 3, 15, 31}
)

// heldBits gives, for the state of a record, the tiers at which it is held: each
// one at which there is a reason, and the slower ones. What is leaving the GPU
// does not count there.
func heldBits(state uint32) uint32 {
	const (
		toldGPU = 7 << 12
		onGPU   = toldGPU | 3<<21 | 15<<23
		onCPU   = 3 << 15
		onDisk  = 3 << 17
		remote  = 3 << 19
	)
	if state&leavingBit != 0 {
		state &^= toldGPU
	}
	switch {
	case state&onGPU != 0:
		return 0b1111
	case state&onCPU != 0:
		return 0b1110
	case state&onDisk != 0:
		return 0b1100
	case state&remote != 0:
		return 0b1000
	}
	return 0
}

// tree is what one slot's engine holds: a record for each block, below the
// block before it. A record lives while there is a reason for it or others are
// below it. What is reached from a root through held blocks is entered in the
// table, for each tier and the faster ones together; what hangs below a block
// that is not held is kept, and enters when that block is held again.
//
// It is guarded by the mutex of its slot. Index makes it.
//
// A record is found as the first one below its parent, or by its hash among the
// branches. So a chain needs no map, and walking one that is there already
// reads its records in order.
type tree struct {
	arena    *arena
	lanes    *lanes
	lane     laneByTier
	chunks   []*chunk // of the arena, as far as this tree knows it
	top      ref      // what the roots are below; it is no block
	free     ref      // records to use, linked by next
	freed    int      // how many
	records  int      // how many are in use, top aside
	leaves   list     // those that giveUp may take
	leaving  list     // those that do not count on the GPU any more
	branches branches
	more     map[uint64]uint32 // by ref<<8 | reason
	blocks   [reasons]int      // how many have the reason
	// makeRoom gives up some blocks of this or another tree, and returns how
	// many. It is called with the slot's mutex held.
	makeRoom func() int
	credit   int // how many may come for those that were given up
	// dropped is told of each record that goes.
	dropped func(ref)
	fetched uint64 // nothing; it keeps what fetch reads from being left out
}

// laneByTier is a tree's lane for each tier that it uses. It is one word, so that
// Look has all of them at once, without the mutex: 16 bits for each tier, 0 where it
// is not used, and else the lane plus 1.
type laneByTier struct{ packed atomic.Uint64 }

func (l *laneByTier) of(tier Tier) (of lane, ok bool) {
	n := uint16(l.packed.Load() >> (16 * tier))
	return lane(n - 1), n != 0
}

// set gives a tier, which has none, a lane.
func (l *laneByTier) set(tier Tier, of lane) { l.packed.Add((uint64(of) + 1) << (16 * tier)) }

// list is records in an order, the oldest first. A record is in one list at
// most. The zero value is empty.
type list struct {
	first, last ref
	n           int
}

// moreBytes is about what an entry of tree.more takes.
const moreBytes = 32

func (t *tree) at(r ref) *record { return &t.chunks[r/chunkRecords][r%chunkRecords] }

// init makes the tree ready. Its top is there from now on, past the bound if
// need be.
func (t *tree) init(a *arena, l *lanes) {
	t.arena, t.lanes = a, l
	t.free, t.chunks = a.take(true)
	t.freed = batchRecords
	t.top = t.alloc()
	t.records = 0
	t.at(t.top).state = reachedBits
	t.useLane(GPU)
}

// useLane makes the lane of a tier, if there is one left, and enters what is
// reached at it.
func (t *tree) useLane(tier Tier) {
	if _, ok := t.lane.of(tier); ok {
		return
	}
	l, ok := t.lanes.take()
	if !ok {
		return
	}
	for r := t.following(t.top); r != t.top; r = t.following(r) {
		if rec := t.at(r); rec.state&(1<<tier) != 0 {
			t.arena.table.enter(rec.hash(), l)
		}
	}
	t.lane.set(tier, l)
}

// following is the record behind r in the order in which parents come before
// what is below them; the top comes after the last.
func (t *tree) following(r ref) ref {
	rec := t.at(r)
	if rec.child != 0 {
		return rec.child
	}
	for r != t.top {
		if rec.next != 0 {
			return rec.next
		}
		r = rec.parent
		rec = t.at(r)
	}
	return t.top
}

// find returns the record of a block below a parent, 0 if there is none.
// parent is the record of the block before it, 0 for the first of a chain.
func (t *tree) find(parent ref, h Hash) ref {
	if parent == 0 {
		parent = t.top
	}
	c := t.at(parent).child
	if c == 0 {
		return 0
	}
	rec := t.at(c)
	if rec.hash() != h || rec.state&spareBit != 0 {
		if c = t.branches.find(t, h); c == 0 {
			return 0
		}
		if rec = t.at(c); rec.parent != parent {
			return 0
		}
	}
	t.renew(c)
	return c
}

// add returns the record of a block, made if there is none. parent is the
// record of the block before it, 0 for the first of a chain. It is held for no
// reason yet; a caller that does not hold it must drop it. 0 means that the
// memory of the index is used up, and that nothing could be given up for it.
//
// Making one may give up others of the tree, but none that is pinned, and
// neither the parent nor what is before it.
func (t *tree) add(parent ref, h Hash) ref {
	if r := t.find(parent, h); r != 0 {
		return r
	}
	r := t.room(parent)
	if r == 0 {
		return 0
	}
	t.at(r).setHash(h)
	t.hang(r, parent)
	return r
}

// spareRecord makes a record that stands for memory of the engine only: a
// second copy of the block at, or one whose hash is not known. It hangs below
// at, which lives as long. It can be put into lists and is given back by drop.
// As add, it may return 0.
func (t *tree) spareRecord(at ref) ref {
	r := t.room(at)
	if r == 0 {
		return 0
	}
	t.at(r).state = spareBit
	t.hang(r, at)
	return r
}

// isSpare: the record was made by spareRecord.
func (t *tree) isSpare(r ref) bool { return t.at(r).state&spareBit != 0 }

// hash is the block's, zero of a spare record.
func (t *tree) hash(r ref) Hash { return t.at(r).hash() }

// parent is the record of the block before it, or the one that a spare record
// was made for; 0 if there is none.
func (t *tree) parent(r ref) ref {
	if p := t.at(r).parent; p != t.top {
		return p
	}
	return 0
}

// room returns a record that is not used, keeping the one that it is for.
func (t *tree) room(keep ref) ref {
	if t.free != 0 && !t.arena.full() {
		return t.alloc()
	}
	// When the bound is reached, the table and this tree have the memory of what
	// was given up, but no less of it. So one is given up for one that comes, and
	// two when it is passed.
	if t.arena.full() {
		if t.credit == 0 {
			t.credit = t.giveWay(keep)
			if t.arena.over() {
				t.credit = (t.credit + 1) / 2
			}
		}
		if t.credit == 0 {
			return 0
		}
		t.credit--
	}
	for t.free == 0 {
		if first, chunks := t.arena.take(false); first != 0 {
			t.chunks = chunks
			t.free, t.freed = first, batchRecords
		} else if t.giveWay(keep) == 0 {
			return 0
		}
	}
	return t.alloc()
}

// giveWay calls makeRoom, while a record stays.
func (t *tree) giveWay(keep ref) int {
	if t.makeRoom == nil {
		return 0
	}
	if keep != 0 {
		t.raise(keep, pinned)
		defer t.lower(keep, pinned)
	}
	return t.makeRoom()
}

// fetch reads what the table has of a block that comes or goes soon.
func (t *tree) fetch(h Hash) { t.fetched += t.arena.table.touch(h) }

// fetchAtOnce is how many blocks are fetched before the first of them comes or
// goes: so many are on their way at the same time, and are still there then.
const fetchAtOnce = 32

// alloc takes one of the free records, of which there are some.
func (t *tree) alloc() ref {
	r := t.free
	rec := t.at(r)
	t.free = rec.next
	t.freed--
	t.records++
	*rec = record{}
	return r
}

// discard makes a record a free one.
func (t *tree) discard(r ref) {
	rec := t.at(r)
	rec.next = t.free
	t.free = r
	t.records--
	if t.freed++; t.freed < 2*batchRecords {
		return
	}
	t.giveBack()
}

// giveBack gives a batch of the free records to the arena.
func (t *tree) giveBack() {
	first, last := t.free, t.at(t.free)
	for range batchRecords - 1 {
		last = t.at(last.next)
	}
	t.free, last.next = last.next, 0
	t.freed -= batchRecords
	t.arena.giveBack(first)
}

// hang puts a record below a parent: first if it is alone, else behind the first,
// so that the first stays the one to be found without the branches.
func (t *tree) hang(r, parent ref) {
	if parent == 0 {
		parent = t.top
	}
	rec, p := t.at(r), t.at(parent)
	rec.parent = parent
	if p.child == 0 {
		p.child = r
		t.relist(parent)
		return
	}
	first := t.at(p.child)
	if (rec.state|first.state)&spareBit == 0 {
		p.state |= forkBit
	}
	rec.prev, rec.next = p.child, first.next
	if first.next != 0 {
		t.at(first.next).prev = r
	}
	first.next = r
	if rec.state&spareBit == 0 {
		rec.state |= branchBit
		t.branches.insert(t, r)
	}
}

// count is how often there is a reason.
func (t *tree) count(r ref, state uint32, why reason) uint32 {
	n := state >> countShift[why] & countMax[why]
	if n == countMax[why] {
		n += t.more[uint64(r)<<8|uint64(why)]
	}
	return n
}

// raise adds one to the count of a reason, and reports whether it is the first.
func (t *tree) raise(r ref, why reason) bool {
	rec := t.at(r)
	n := rec.state >> countShift[why] & countMax[why]
	if n < countMax[why] {
		rec.state += 1 << countShift[why]
		if n == 0 {
			t.relist(r)
		}
		return n == 0
	}
	t.raiseBeyond(r, why, 1)
	return false
}

// raiseMore adds n to the count of a reason, which is not 0.
func (t *tree) raiseMore(r ref, why reason, n uint32) {
	rec := t.at(r)
	room := min(n, countMax[why]-rec.state>>countShift[why]&countMax[why])
	rec.state += room << countShift[why]
	t.raiseBeyond(r, why, n-room)
}

// raiseBeyond adds n to a count that is at the largest that the record has.
func (t *tree) raiseBeyond(r ref, why reason, n uint32) {
	if n == 0 {
		return
	}
	if t.more == nil {
		t.more = map[uint64]uint32{}
	}
	key := uint64(r)<<8 | uint64(why)
	had := t.more[key]
	if t.more[key] = had + n; had == 0 {
		t.arena.count(moreBytes)
	}
}

// lower takes one from the count of a reason, which is not 0, and reports
// whether it was the last.
func (t *tree) lower(r ref, why reason) bool {
	rec := t.at(r)
	n := rec.state >> countShift[why] & countMax[why]
	if n == countMax[why] {
		key := uint64(r)<<8 | uint64(why)
		if more := t.more[key]; more > 1 {
			t.more[key] = more - 1
			return false
		} else if more == 1 {
			delete(t.more, key)
			t.arena.count(-moreBytes)
			return false
		}
	}
	rec.state -= 1 << countShift[why]
	if n == 1 {
		t.relist(r)
	}
	return n == 1
}

// zero makes the count of a reason 0, and reports whether it was not.
func (t *tree) zero(r ref, why reason) bool {
	rec := t.at(r)
	n := rec.state >> countShift[why] & countMax[why]
	if n == countMax[why] {
		if key := uint64(r)<<8 | uint64(why); t.more[key] != 0 {
			delete(t.more, key)
			t.arena.count(-moreBytes)
		}
	}
	rec.state &^= countMax[why] << countShift[why]
	t.relist(r)
	return n != 0
}

// hold adds a reason for a block.
func (t *tree) hold(r ref, why reason) {
	if why < Tiers {
		if _, ok := t.lane.of(Tier(why)); !ok {
			t.useLane(Tier(why))
		}
	}
	if !t.raise(r, why) {
		return
	}
	if t.at(r).state&spareBit != 0 {
		return
	}
	t.blocks[why]++
	if why != pinned {
		t.reach(r)
	}
}

// release takes away a reason once, and the record with its last one. Then
// those before it go too for which there is no reason and which it alone was
// below. It reports whether the reason was there.
func (t *tree) release(r ref, why reason) bool {
	if t.at(r).state>>countShift[why]&countMax[why] == 0 {
		return false
	}
	if t.lower(r, why) && t.at(r).state&spareBit == 0 {
		t.blocks[why]--
		if why != pinned {
			t.unreach(r)
		}
		t.drop(r)
	}
	return true
}

// holds tells how often there is a reason.
func (t *tree) holds(r ref, why reason) int { return int(t.count(r, t.at(r).state, why)) }

// moveSpare hangs the oldest spare record of one block below another.
func (t *tree) moveSpare(from, to ref) {
	r := t.at(from).child
	for r != 0 && !t.isSpare(r) {
		r = t.at(r).next
	}
	if r == 0 {
		return
	}
	t.takeOut(r)
	rec := t.at(r)
	rec.prev, rec.next = 0, 0
	t.hang(r, to)
	t.relist(from)
	t.relist(to)
}

// takeOut takes a record out of those below its parent.
func (t *tree) takeOut(r ref) {
	rec := t.at(r)
	if rec.prev != 0 {
		t.at(rec.prev).next = rec.next
	} else {
		t.at(rec.parent).child = rec.next
	}
	if rec.next != 0 {
		t.at(rec.next).prev = rec.prev
	}
}

// drop gives a record back for which there is no reason and which nothing is
// below, or a spare one, and does nothing to others.
func (t *tree) drop(r ref) {
	if rec := t.at(r); rec.state&spareBit != 0 && rec.child == 0 {
		for why := range reasons {
			t.zero(r, why)
		}
	}
	for r != t.top {
		rec := t.at(r)
		if rec.state>>reasonsShift != 0 || rec.child != 0 {
			return
		}
		parent := rec.parent
		t.unhang(r)
		r = parent
		if t.at(r).state&spareBit != 0 {
			return
		}
	}
}

// unhang takes a record that nothing is below out of the tree.
func (t *tree) unhang(r ref) {
	rec := t.at(r)
	if t.dropped != nil {
		t.dropped(r)
	}
	if rec.state&branchBit != 0 {
		t.branches.remove(t, r)
	}
	t.takeOut(r)
	parent := rec.parent
	t.discard(r)
	if p := t.at(parent); p.child == 0 {
		t.relist(parent)
		// It was in use no later than what was below it, and goes next, unless
		// other prompts went on from it.
		if p.state&forkBit == 0 {
			t.next(parent)
		}
		p.state &^= forkBit
	}
}

// clear takes reasons away from all blocks.
func (t *tree) clear(whys ...reason) {
	some := 0
	for _, why := range whys {
		some += t.blocks[why]
	}
	if some == 0 {
		return
	}
	// From below upwards, so that what is dropped has nothing below it any more.
	for r, on, ahead := t.lowest(t.top), ref(0), t.fetchUp(0); r != t.top; r = on {
		if on = t.above(r); r == ahead {
			ahead = t.fetchUp(r)
		}
		rec := t.at(r)
		if rec.state&spareBit != 0 {
			continue
		}
		lost := false
		for _, why := range whys {
			if t.zero(r, why) {
				t.blocks[why]--
				lost = lost || why != pinned
			}
		}
		if lost {
			t.unreach(r)
		}
		if rec.state>>reasonsShift == 0 && rec.child == 0 {
			t.unhang(r)
		}
	}
}

// above is the record behind r in the order in which what is below a record comes
// before it; the top comes last.
func (t *tree) above(r ref) ref {
	rec := t.at(r)
	if rec.next != 0 {
		return t.lowest(rec.next)
	}
	return rec.parent
}

// fetchUp fetches a few of those from r on in that order, or from the first on
// for 0, and returns the first that it has not.
func (t *tree) fetchUp(r ref) ref {
	if r == 0 {
		r = t.lowest(t.top)
	}
	for n := 0; n < fetchAtOnce && r != t.top; n++ {
		t.fetch(t.hash(r))
		r = t.above(r)
	}
	return r
}

// lowest is the first of the records at and below r that comes when what is
// below a record comes before it.
func (t *tree) lowest(r ref) ref {
	for c := t.at(r).child; c != 0; c = t.at(r).child {
		r = c
	}
	return r
}

// empty drops everything. No list may be used any more that had records of it.
func (t *tree) empty() {
	// First the reasons, so that none is put among the leaves meanwhile.
	for r := t.following(t.top); r != t.top; r = t.following(r) {
		t.at(r).state &^= toldBits | otherBits | leafBit | leavingBit
	}
	t.leaves, t.leaving = list{}, list{}
	for r, on, ahead := t.lowest(t.top), ref(0), t.fetchUp(0); r != t.top; r = on {
		if on = t.above(r); r == ahead {
			ahead = t.fetchUp(r)
		}
		rec := t.at(r)
		t.leave(rec, rec.state&reachedBits)
		t.unhang(r)
	}
	t.arena.count(-moreBytes * int64(len(t.more)))
	t.more = nil
	t.blocks = [reasons]int{}
}

// partFrom makes the tree an empty one, at once however much it held, and returns
// another tree that holds that and is the caller's alone, to be closed. It returns
// nil, and has dropped everything, when the tree has no second lane to go on with.
// No list may be used any more that had records of it.
func (t *tree) partFrom() *tree {
	if !t.lanes.some() {
		t.empty()
		return nil
	}
	old := &tree{
		arena: t.arena, lanes: t.lanes, chunks: t.chunks, top: t.top, free: t.free, freed: t.freed,
		records: t.records, branches: t.branches, more: t.more,
	}
	old.lane.packed.Store(t.lane.packed.Swap(0))
	t.leaves, t.leaving, t.branches, t.more = list{}, list{}, branches{}, nil
	t.blocks, t.credit = [reasons]int{}, 0
	t.init(t.arena, t.lanes)
	return old
}

// close gives everything back. The tree cannot be used any more. It does nothing to
// none.
func (t *tree) close() {
	if t == nil {
		return
	}
	t.empty()
	t.branches.close(t)
	t.discard(t.top)
	// Batches were taken whole and given back whole, so whole ones are left.
	for t.freed > 0 {
		t.giveBack()
	}
	for tier := range Tier(Tiers) {
		if l, ok := t.lane.of(tier); ok {
			t.lanes.giveBack(l)
		}
	}
	t.lane.packed.Store(0)
}

// reach enters a block and what is below it in the lanes at which they are
// reached now, the block before those below it.
func (t *tree) reach(start ref) {
	for r := start; ; {
		rec := t.at(r)
		gained := heldBits(rec.state) & t.at(rec.parent).state &^ rec.state & reachedBits
		if gained != 0 && rec.state&spareBit == 0 {
			rec.state |= gained
			t.enter(rec, gained)
			if rec.child != 0 {
				r = rec.child
				continue
			}
		}
		for r != start && rec.next == 0 {
			r = rec.parent
			rec = t.at(r)
		}
		if r == start {
			return
		}
		r = rec.next
	}
}

// unreach takes a block and what is below it out of the lanes at which they are
// reached no more, those below it before the block.
func (t *tree) unreach(start ref) {
	rec := t.at(start)
	lost := rec.state & reachedBits &^ heldBits(rec.state)
	if lost == 0 {
		return
	}
	for r := start; ; {
		if c := t.reached(t.at(r).child, lost); c != 0 {
			r = c
			continue
		}
		for {
			rec := t.at(r)
			t.leave(rec, rec.state&lost)
			rec.state &^= lost
			if r == start {
				return
			}
			if c := t.reached(rec.next, lost); c != 0 {
				r = c
				break
			}
			r = rec.parent
		}
	}
}

// reached is the first of the records from r on, below one parent, that is
// reached at one of the tiers.
func (t *tree) reached(r ref, tiers uint32) ref {
	for r != 0 && t.at(r).state&tiers == 0 {
		r = t.at(r).next
	}
	return r
}

func (t *tree) enter(rec *record, tiers uint32) {
	for ; tiers != 0; tiers &= tiers - 1 {
		if l, ok := t.lane.of(Tier(bits.TrailingZeros32(tiers))); ok {
			t.arena.table.enter(rec.hash(), l)
		}
	}
}

func (t *tree) leave(rec *record, tiers uint32) {
	for ; tiers != 0; tiers &= tiers - 1 {
		if l, ok := t.lane.of(Tier(bits.TrailingZeros32(tiers))); ok {
			t.arena.table.leave(rec.hash(), l)
		}
	}
}

// relist puts a record into leaves, or takes it out, as it is now: those are in
// it that nothing is below but what is leaving, that are held for what events have
// told and for nothing else, and that are in no other list. The order is that in
// which they were last told of or asked for.
func (t *tree) relist(r ref) {
	rec := t.at(r)
	if rec.state&leavingBit != 0 && rec.state>>countShift[GPU]&countMax[GPU] == 0 {
		rec.state &^= leavingBit
		t.cut(&t.leaving, r)
	}
	if p := t.at(rec.parent); p.state&toldBits != 0 && p.state&leavingBit == 0 && (p.state&leafBit != 0) == stays(rec) {
		t.relist(rec.parent)
	}
	is := rec.state&leafBit != 0
	should := rec.state&toldBits != 0 && rec.state&(otherBits|spareBit|listedBit|leavingBit) == 0 && !t.staysBelow(rec)
	switch {
	case is && !should:
		rec.state &^= leafBit
		t.cut(&t.leaves, r)
	case should && !is:
		rec.state |= leafBit
		t.link(&t.leaves, r, t.leaves.last)
	}
}

// staysBelow: something is below a record that is not leaving.
func (t *tree) staysBelow(rec *record) bool {
	for c := rec.child; c != 0; {
		below := t.at(c)
		if stays(below) {
			return true
		}
		c = below.next
	}
	return false
}

// stays: a record keeps the block before it from being a leaf.
func stays(rec *record) bool {
	switch {
	case rec.state&(otherBits|spareBit) != 0:
		return true
	case rec.state&toldBits != 0:
		return rec.state&leavingBit == 0
	}
	return rec.child != 0
}

// maxPassed is how many leaves that are not what is looked for are passed over.
const maxPassed = 64

// foresee makes n blocks be leaving: the leaves that have not been told of or
// asked for for the longest time, and what is before those when they are gone.
// The first of them stay until they are gone; what came last is taken back first.
func (t *tree) foresee(n int) {
	for t.leaving.n > n {
		r := t.leaving.last
		rec := t.at(r)
		t.cut(&t.leaving, r)
		rec.state &^= leavingBit
		t.reach(r)
		t.relist(r)
		t.next(r)
		t.relist(rec.parent)
	}
	passed := 0
	for r := t.leaves.first; r != 0 && t.leaving.n < n; r = t.leaves.first {
		rec := t.at(r)
		t.cut(&t.leaves, r)
		if rec.state>>countShift[GPU]&countMax[GPU] == 0 {
			// It is held elsewhere only.
			t.link(&t.leaves, r, t.leaves.last)
			if passed++; passed == maxPassed {
				break
			}
			continue
		}
		rec.state = rec.state&^leafBit | leavingBit
		t.link(&t.leaving, r, t.leaving.last)
		t.unreach(r)
		// What is before it was used no later.
		t.relist(rec.parent)
		t.next(rec.parent)
	}
}

// stay takes a block that is leaving not to be so, nor those before it: it is in
// use.
func (t *tree) stay(r ref) {
	for rec := t.at(r); rec.state&leavingBit != 0; rec = t.at(r) {
		rec.state &^= leavingBit
		t.cut(&t.leaving, r)
		if t.zero(r, expected) {
			t.blocks[expected]--
		}
		t.reach(r)
		t.relist(r)
		r = rec.parent
		t.relist(r)
	}
}

// renew makes a leaf the last of them, and does nothing to others.
func (t *tree) renew(r ref) {
	if t.at(r).state&leafBit != 0 && t.leaves.last != r {
		t.cut(&t.leaves, r)
		t.link(&t.leaves, r, t.leaves.last)
	}
}

// next makes a leaf the first of them, and does nothing to others.
func (t *tree) next(r ref) {
	if t.at(r).state&leafBit != 0 && t.leaves.first != r {
		t.cut(&t.leaves, r)
		t.link(&t.leaves, r, 0)
	}
}

// giveUp drops the leaf that has not been told of or asked for for the longest
// time, of those that are held for no other reason than that events have told
// so. It reports whether there was one.
func (t *tree) giveUp() bool {
	t.foresee(0)
	r := t.leaves.first
	if r == 0 {
		return false
	}
	for why := range reason(Tiers) {
		if t.zero(r, why) {
			t.blocks[why]--
		}
	}
	t.unreach(r)
	t.drop(r)
	return true
}

// push puts a record at the end of a list, enlist behind another or at the beginning,
// replace where another is, and unlink takes it out.
func (t *tree) push(l *list, r ref) { t.enlist(l, r, l.last) }

func (t *tree) enlist(l *list, r, before ref) {
	rec := t.at(r)
	rec.state |= listedBit
	t.relist(r)
	t.link(l, r, before)
}

func (t *tree) replace(l *list, old, r ref) {
	t.enlist(l, r, old)
	t.unlink(l, old)
}

func (t *tree) unlink(l *list, r ref) {
	t.cut(l, r)
	t.at(r).state &^= listedBit
	t.relist(r)
}

// link puts a record behind another of a list, or at its beginning for 0.
func (t *tree) link(l *list, r, before ref) {
	rec := t.at(r)
	if rec.before = before; before != 0 {
		b := t.at(before)
		rec.after, b.after = b.after, r
	} else {
		rec.after, l.first = l.first, r
	}
	if rec.after != 0 {
		t.at(rec.after).before = r
	} else {
		l.last = r
	}
	l.n++
}

// cut takes a record out of a list.
func (t *tree) cut(l *list, r ref) {
	rec := t.at(r)
	if rec.before != 0 {
		t.at(rec.before).after = rec.after
	} else {
		l.first = rec.after
	}
	if rec.after != 0 {
		t.at(rec.after).before = rec.before
	} else {
		l.last = rec.before
	}
	rec.before, rec.after = 0, 0
	l.n--
}

// after is the record behind r in its list, 0 for the last.
func (t *tree) after(r ref) ref { return t.at(r).after }

// linked: the record is in the list, which is the only one that it may be in.
func (t *tree) linked(_ *list, r ref) bool { return t.at(r).state&listedBit != 0 }

// branches finds the records of a tree that were not alone below their parent
// when they were made, by their hash. It is a table with open addressing. The
// zero value is empty.
type branches struct {
	cells []ref
	n     int
}

// home is the cell that a hash should be in. Like the table's places, nobody who
// chooses prompts knows it.
func (b *branches) home(t *tree, h Hash) uint32 {
	return uint32((t.arena.table.place(h) >> 32) * uint64(len(b.cells)) >> 32)
}

func (b *branches) find(t *tree, h Hash) ref {
	if b.n == 0 {
		return 0
	}
	for i := b.home(t, h); ; {
		r := b.cells[i]
		if r == 0 || t.at(r).hash() == h {
			return r
		}
		if i++; i == uint32(len(b.cells)) {
			i = 0
		}
	}
}

// insert adds a record whose hash is not there. The cells are never more than
// three quarters full.
func (b *branches) insert(t *tree, r ref) {
	if 4*(b.n+1) > 3*len(b.cells) {
		b.resize(t, max(8, len(b.cells)*3/2))
	}
	b.put(t, r)
	b.n++
}

func (b *branches) put(t *tree, r ref) {
	i := b.home(t, t.at(r).hash())
	for b.cells[i] != 0 {
		if i++; i == uint32(len(b.cells)) {
			i = 0
		}
	}
	b.cells[i] = r
}

func (b *branches) resize(t *tree, size int) {
	old := b.cells
	b.cells = make([]ref, size)
	for _, r := range old {
		if r != 0 {
			b.put(t, r)
		}
	}
	t.arena.count(4 * int64(len(b.cells)-len(old)))
}

// remove takes out a record that is there, and moves those behind it up.
func (b *branches) remove(t *tree, r ref) {
	size := uint32(len(b.cells))
	i := b.home(t, t.at(r).hash())
	for b.cells[i] != r {
		if i++; i == size {
			i = 0
		}
	}
	for j := i; ; {
		if j++; j == size {
			j = 0
		}
		o := b.cells[j]
		if o == 0 {
			break
		}
		// It may move to i unless its home is behind i, up to j.
		if home := b.home(t, t.at(o).hash()); (j+size-home)%size >= (j+size-i)%size {
			b.cells[i] = o
			i = j
		}
	}
	b.cells[i] = 0
	if b.n--; size > 64 && 8*b.n < int(size) {
		b.resize(t, int(size)/4)
	}
}

// close gives the memory back.
func (b *branches) close(t *tree) {
	t.arena.count(-4 * int64(len(b.cells)))
	*b = branches{}
}
