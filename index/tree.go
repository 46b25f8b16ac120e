package index

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

// reason is why a tree holds a block.
type reason uint8

const (
	// The first Tiers reasons are the tiers: the engine's events have said so.
	// They are counted, as engines may hold a block several times.

	// guessed: the shadow takes the engine to hold it, on the GPU.
	guessed = reason(Tiers) + iota
	// expected: a request that computes it was sent, and no event has said so
	// yet. It counts as on the GPU.
	expected
	reasons
)

// ref is a record of a tree. It is valid until the tree drops it; 0 is none.
type ref uint32

// tree is what one slot's engine holds: a record for each block, below the
// block before it. A record lives while there is a reason for it or others are
// below it. What is reached from a root through held blocks is entered in the
// table, for each tier and the faster ones together; what hangs below a block
// that is not held is kept, and enters when that block is held again.
//
// It is guarded by the mutex of its slot. Index makes it.
type tree struct {
	table   *table
	lanes   func(Tier) (lane, bool) // of the slot; false for a tier it has not used
	records []record                // by ref; the first is no record
	byHash  map[Hash]ref
	free    []ref
	blocks  [Tiers]int // blocks held by tier
}

// record is one block of a tree, or a spare one.
type record struct {
	hash          Hash
	parent, child ref // child is the first of those below it
	next, prev    ref // among those below its parent
	after, before ref // in the list that it is in
	held          [reasons]uint16
	reached       [Tiers]bool
	spare         bool
}

// list is records in an order, the oldest first. A record is in one list at
// most. The zero value is empty.
type list struct {
	first, last ref
	n           int
}

// find returns the record of a block, 0 if there is none.
func (t *tree) find(h Hash) ref { return t.byHash[h] }

// add returns the record of a block, made if there is none. parent is the
// record of the block before it, 0 for the first of a chain. It is held for no
// reason yet; a caller that does not hold it must drop it. 0 means that the
// memory of the index is used up, and that nothing could be given up for it.
func (t *tree) add(parent ref, h Hash) ref { panic("not yet") }

// spareRecord makes a record that stands for memory of the engine only: a
// second copy of the block at, or one whose hash is not known. It can be put
// into lists and is given back by drop.
func (t *tree) spareRecord(at ref) ref { panic("not yet") }

// hold adds a reason for a block, once more for a tier.
func (t *tree) hold(r ref, why reason) { panic("not yet") }

// release takes away a reason, once for a tier, and the record with its last
// one. It reports whether the reason was there.
func (t *tree) release(r ref, why reason) bool { panic("not yet") }

// holds tells how often there is a reason.
func (t *tree) holds(r ref, why reason) int { panic("not yet") }

// drop gives a record back for which there is no reason and which nothing is
// below, or a spare one, and does nothing to others.
func (t *tree) drop(r ref) { panic("not yet") }

// clear takes a reason away from all blocks.
func (t *tree) clear(why reason) { panic("not yet") }

// push puts a record at the end of a list, pushFront at its beginning, and
// unlink takes it out.
func (t *tree) push(l *list, r ref)      { panic("not yet") }
func (t *tree) pushFront(l *list, r ref) { panic("not yet") }
func (t *tree) unlink(l *list, r ref)    { panic("not yet") }
