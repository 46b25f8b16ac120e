package index

import (
	"math/bits"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"
)

// lane is one membership of the table: a slot at a tier. Index hands them out
// densely, so that sets of lanes are short.
type lane uint16

// table says of each block which lanes reach it. It holds what the trees enter:
// a lane that has a block has every block before it in the chain too, so along
// any chain the sets only shrink.
//
// newTable makes it; it lives as long as its Index. enter and leave may be
// called from any goroutine, and wait for each other where two blocks are in
// one shard. match and bytes may too, and wait for nothing: the whole state
// that they read is published by single stores, so a writer that is stopped
// between two of them is one that has not gone on yet. doc.go says why it is
// built in this way.
type table struct {
	seed   [2]uint64
	shards *[shards]shard
	// parts is what readers see of the shards. It lies apart from what writers
	// write at each change.
	parts [shards]atomic.Pointer[part]
	size  atomic.Int64
	// paused is called between the steps of a change and of a look-up. Tests
	// set it, before anything else is done; only a build for the race detector
	// has the calls.
	paused func()
}

// shards is how many parts of the table can be changed at a time.
const shards = 128

// shard is what writers know of one part of the table.
type shard struct {
	mu     sync.Mutex                  // guards what follows and the changing of the part
	blocks int                         // in the part
	taken  int                         // words handed out at least once: the first ones
	used   int                         // words that are handed out
	free   [classes]uint32             // word sets given back, by class: 1 + the first one's place
	_      [128 - 8*4 - 4*classes]byte // so that no two share a line
}

// part is the blocks of one shard, and the larger sets of lanes. It has a
// size for good: when it gets too small or too large, its content goes into
// another part, and this one stays as it is for those who still read it.
type part struct {
	groups []group
	words  []uint64 // 2^class of them are a set of lanes, see laneset.go
}

// group is two cache lines of blocks, which is what processors fetch together.
// A block is in the group that its hash names, or in the next ones behind it
// that had room.
//
// control has a byte for each entry, from the lowest on, the tag of the block
// that is there or 0, and above them how many blocks have passed this group by
// for want of room: while there are none, a block that is not here is nowhere.
type group struct {
	control uint64
	entries [groupEntries]entry
}

const (
	groupEntries = 5
	passedShift  = 8 * groupEntries
)

// entry is one block and its lanes. Its words are read without the mutex: the
// block is that of hi and lo if the set has the same version before and after
// these were read, as a set begins another version when its entry is given up.
type entry struct {
	hi, lo uint64
	set    laneSet
}

// A part has between half and all of maxBlocks in a group, or is one group, or
// none.
// These leave room enough that few blocks are passed by.
const maxBlocks = 4

func newTable() *table {
	t := &table{seed: [2]uint64{rand.Uint64(), rand.Uint64()}, shards: new([shards]shard)}
	for i := range t.parts {
		t.parts[i].Store(&noBlocks)
	}
	return t
}

// noBlocks is the part of any shard that has none. It has a group, so that
// readers need not ask.
var noBlocks = part{groups: make([]group, 1)}

// bytes is the memory that blocks take in the table: all of it but the 18 KB
// that it has when there are none.
func (t *table) bytes() int64 { return t.size.Load() }

// pause is a place between two steps.
func (t *table) pause() {
	if raceDetector && t.paused != nil {
		t.paused()
	}
}

// place is where a block belongs: the shard in its lowest bits, the tag above
// them, the group in the upper half. Nobody who chooses prompts knows the
// seed, so nobody can choose ones that all belong in one place.
func (t *table) place(h Hash) uint64 {
	hi, lo := bits.Mul64(h.Hi^t.seed[0], h.Lo^t.seed[1])
	return hi ^ lo
}

func shardAt(place uint64) int { return int(place % shards) }

// tagAt is never 0.
func tagAt(place uint64) uint64 { return 1 + (place>>8&0xffff)*0xff>>16 }

// groupAt is the group of a block among n.
func groupAt(place uint64, n int) int { return int(place >> 32 * uint64(n) >> 32) }

// tagged is where in a control word a tag is: the highest bit of its byte. A
// byte above one that is may be shown too.
func tagged(control, tag uint64) uint64 {
	const lowest = 1<<0 | 1<<8 | 1<<16 | 1<<24 | 1<<32
	x := control ^ tag*lowest
	return (x - lowest) &^ x & (lowest << 7)
}

// entryAt is the entry to which a bit of tagged belongs.
func entryAt(tagged uint64) int { return bits.TrailingZeros64(tagged) / 8 }

// find returns the entry of a block, whose shard is locked, and the group it is
// in; nil if it has none.
func (p *part) find(h Hash, place uint64) (*entry, int) {
	at, tag := groupAt(place, len(p.groups)), tagAt(place)
	for range p.groups {
		g := &p.groups[at]
		for found := tagged(g.control, tag); found != 0; found &= found - 1 {
			if e := &g.entries[entryAt(found)]; e.hi == h.Hi && e.lo == h.Lo && e.set.count() > 0 {
				return e, at
			}
		}
		if g.control>>passedShift == 0 {
			break
		}
		if at++; at == len(p.groups) {
			at = 0
		}
	}
	return nil, 0
}

// touch reads where a block is, or would be, so that it is in the processor's
// cache when it is entered or leaves soon. Several are read at the same time. What
// it returns says nothing.
func (t *table) touch(h Hash) uint64 {
	place := t.place(h)
	p := t.parts[shardAt(place)].Load()
	if len(p.groups) == 0 {
		return 0
	}
	return atomic.LoadUint64((*uint64)(&p.groups[groupAt(place, len(p.groups))].control))
}

// enter adds a lane to a block's set. It is not in it; where it is, nothing
// changes.
func (t *table) enter(h Hash, l lane) {
	place := t.place(h)
	i := shardAt(place)
	s := &t.shards[i]
	s.mu.Lock()
	defer s.mu.Unlock()
	p := t.parts[i].Load()
	e, _ := p.find(h, place)
	if e == nil {
		if p == &noBlocks {
			p = t.rebuild(i, 1, 0)
		} else if n := len(p.groups); s.blocks >= maxBlocks*n {
			p = t.rebuild(i, n+n/4+1, 0)
		}
		t.insert(p, h, place, l)
		s.blocks++
		return
	}
	if words := t.join(s, p, e, l); words > 0 {
		p = t.rebuild(i, len(p.groups), words)
		e, _ = p.find(h, place)
		t.join(s, p, e, l)
	}
}

// insert makes an entry for a block, with one lane. The part has room.
func (t *table) insert(p *part, h Hash, place uint64, l lane) {
	at, tag := groupAt(place, len(p.groups)), tagAt(place)
	for {
		g := &p.groups[at]
		if free := tagged(g.control, 0); free != 0 {
			i := entryAt(free)
			e := &g.entries[i]
			atomic.StoreUint64(&e.hi, h.Hi)
			t.pause()
			atomic.StoreUint64(&e.lo, h.Lo)
			t.pause()
			e.set.store(e.set.inline(1, uint64(l)))
			t.pause()
			atomic.StoreUint64(&g.control, g.control|tag<<(8*i))
			t.pause()
			return
		}
		// Said before the block is there, so that no reader misses it.
		atomic.StoreUint64(&g.control, g.control+1<<passedShift)
		t.pause()
		if at++; at == len(p.groups) {
			at = 0
		}
	}
}

// leave takes a lane out of a block's set. It is in it; where it is not,
// nothing changes.
func (t *table) leave(h Hash, l lane) {
	place := t.place(h)
	i := shardAt(place)
	s := &t.shards[i]
	s.mu.Lock()
	defer s.mu.Unlock()
	p := t.parts[i].Load()
	e, at := p.find(h, place)
	if e == nil {
		return
	}
	words := t.quit(s, p, e, l)
	if words > 0 {
		p = t.rebuild(i, len(p.groups), words)
		e, at = p.find(h, place)
		t.quit(s, p, e, l)
	}
	if e.set.count() == 1 && e.set.inlineLane(0) == l {
		t.remove(p, e, at, place)
		s.blocks--
	}
	n := len(p.groups)
	switch {
	case s.blocks == 0:
		t.rebuild(i, 0, 0)
	case n > 1 && 2*s.blocks < maxBlocks*n || len(p.words) > 64 && 4*s.used < len(p.words):
		t.rebuild(i, min(n, s.blocks/3+1), 0)
	}
}

// remove gives up the entry of a block, which is in the group at.
func (t *table) remove(p *part, e *entry, at int, place uint64) {
	e.set.store(e.set.dead())
	t.pause()
	g := &p.groups[at]
	i := (uintptr(unsafe.Pointer(e)) - uintptr(unsafe.Pointer(&g.entries))) / unsafe.Sizeof(*e)
	atomic.StoreUint64(&g.control, g.control&^(0xff<<(8*i)))
	t.pause()
	for from := groupAt(place, len(p.groups)); from != at; {
		g := &p.groups[from]
		atomic.StoreUint64(&g.control, g.control-1<<passedShift)
		t.pause()
		if from++; from == len(p.groups) {
			from = 0
		}
	}
}

// rebuild puts the blocks of a shard into another part with n groups, and with
// room for a set of so many words more.
func (t *table) rebuild(i, n, words int) *part {
	s, old := &t.shards[i], t.parts[i].Load()
	if used := s.used + words; used > 0 {
		words = used + used/4
	}
	// Growing makes use of all that the allocator gives.
	groups, space := slices.Grow([]group(nil), n), slices.Grow([]uint64(nil), words)
	p := &noBlocks
	if n > 0 {
		p = &part{groups: groups[:cap(groups)], words: space[:cap(space)]}
	}
	s.taken, s.used, s.free = 0, 0, [classes]uint32{}
	for j := range old.groups {
		for control, k := old.groups[j].control, 0; k < groupEntries; k++ {
			if byte(control>>(8*k)) == 0 {
				continue
			}
			e := old.groups[j].entries[k]
			place := t.place(Hash{e.hi, e.lo})
			at := groupAt(place, len(p.groups))
			for {
				g := &p.groups[at]
				if free := tagged(g.control, 0); free != 0 {
					m := entryAt(free)
					g.control |= tagAt(place) << (8 * m)
					g.entries[m] = entry{hi: e.hi, lo: e.lo, set: s.move(old, p, e.set)}
					break
				}
				g.control += 1 << passedShift
				if at++; at == len(p.groups) {
					at = 0
				}
			}
		}
	}
	t.pause()
	t.parts[i].Store(p)
	t.size.Add(p.bytes() - old.bytes())
	t.pause()
	return p
}

// bytes is the memory of a part.
func (p *part) bytes() int64 {
	if p == &noBlocks {
		return 0
	}
	return int64(unsafe.Sizeof(*p)) + int64(len(p.groups))*int64(unsafe.Sizeof(group{})) + int64(len(p.words))*8
}
