package tokenizer

import (
	"math/bits"
	"math/rand/v2"
	"slices"
	"sync"
	"unsafe"

	"github.com/zeebo/xxh3"
)

// Cache holds the token ids of texts seen before, by the exact text. All
// Tokenizers of a process share one. It may be used from any goroutine. It
// holds no more than its bytes, texts and ids and its own books included; what
// has not been asked for longest goes first. A nil Cache holds nothing.
//
// Texts lie in shards by their hash, each behind a mutex. A shard writes its
// entries one behind the other into segments, large pieces of memory without a
// pointer in them: the garbage collector sees a few thousand objects however
// many texts there are, and an entry costs 24 bytes beside its text and ids,
// and about 18 in the shard's table. When the shard is full, the segment that
// was begun first gives way. What was asked for since it was written is moved
// to the front of it, the rest is forgotten and room for new entries, so that
// what is in use stays and a hit costs no more than setting a bit.
//
// A hash is only where to look: the text is compared as a whole, so texts made
// to collide cost their own entries and no right answer.
type Cache struct {
	seed   uint64
	shift  int // a hash's bits above it are its shard
	shards []shard
}

// Sizes of a Cache. Entries above a quarter of a segment have one of their
// own; those above a quarter of a shard are not kept.
const (
	leastCache   = 64 << 10
	mostShards   = 64
	leastShard   = 4 << 20
	mostSegment  = 64 << 10
	segmentParts = 16 // segments of a shard, if they are not smaller than that
)

// NewCache returns a Cache of so many bytes. Below 64 KiB it holds nothing.
func NewCache(bytes int64) *Cache {
	c := &Cache{seed: rand.Uint64(), shift: 64}
	if bytes < leastCache {
		return c
	}
	n := 1
	for n < mostShards && bytes/int64(2*n) >= leastShard {
		n *= 2
	}
	c.shift = 64 - bits.Len(uint(n-1))
	c.shards = make([]shard, n)
	for i := range c.shards {
		c.shards[i].limit = int(bytes/int64(n)) - int(unsafe.Sizeof(shard{}))
		c.shards[i].segment = min(mostSegment, c.shards[i].limit/segmentParts) / 4
	}
	return c
}

// CacheStats is what a Cache holds and what it was asked for.
type CacheStats struct {
	// Entries are texts, Bytes all the memory that the cache has taken.
	Entries, Bytes int64
	// Hits and Misses count questions, Evictions texts that made room.
	Hits, Misses, Evictions int64
}

// Stats may be called from any goroutine. The numbers of different shards are
// not of the same instant.
func (c *Cache) Stats() CacheStats {
	var sum CacheStats
	if c == nil {
		return sum
	}
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		sum.Entries += int64(s.entries)
		sum.Bytes += int64(s.bytes)
		sum.Hits += s.hits
		sum.Misses += s.misses
		sum.Evictions += s.evictions
		s.mu.Unlock()
	}
	return sum
}

// Append appends what Put has noted for the same owner, variant and text, if
// that is still there. It allocates nothing where dst has room.
func (c *Cache) Append(dst []uint32, owner uint32, variant uint8, text string) (_ []uint32, ok bool) {
	if c == nil || len(c.shards) == 0 {
		return dst, false
	}
	return c.appendAt(dst, c.hash(owner, variant, text), owner, variant, text)
}

// appendAt is Append for the key's hash.
func (c *Cache) appendAt(dst []uint32, hash uint64, owner uint32, variant uint8, text string) (_ []uint32, ok bool) {
	s := &c.shards[hash>>c.shift]
	for {
		s.mu.Lock()
		_, e := s.findLocked(hash)
		if e == nil || !e.is(owner, variant, text) {
			s.misses++
			s.mu.Unlock()
			return dst, false
		}
		ids := e.ids()
		if cap(dst)-len(dst) >= len(ids) {
			dst = append(dst, ids...)
			e[entryKind] |= visited
			s.hits++
			s.mu.Unlock()
			return dst, true
		}
		// Nobody else waits while this caller's memory grows.
		n := len(ids)
		s.mu.Unlock()
		dst = slices.Grow(dst, n)
	}
}

// Put notes ids under an owner, a variant and a text. All is copied. Owners
// tell apart whose ids they are, variants what else bears on them.
func (c *Cache) Put(owner uint32, variant uint8, text string, ids []uint32) {
	if c == nil || len(c.shards) == 0 {
		return
	}
	c.putAt(c.hash(owner, variant, text), owner, variant, text, ids)
}

// putAt is Put for the key's hash.
func (c *Cache) putAt(hash uint64, owner uint32, variant uint8, text string, ids []uint32) {
	s := &c.shards[hash>>c.shift]
	if len(text) > s.limit || len(ids) > s.limit {
		return
	}
	size := entryText + len(ids) + (len(text)+3)/4
	if 4*size > s.limit/4 {
		return
	}
	var own []uint32 // a single's memory, for which nobody else has to wait
	if size > s.segment/4 {
		own = make([]uint32, size)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if at, e := s.findLocked(hash); e != nil {
		if e.is(owner, variant, text) {
			e[entryKind] |= visited
			return
		}
		// Another text of the same hash gives way: one that is made to
		// collide must not keep another out for good.
		s.removeLocked(at)
		s.evictions++
	}
	s.makeSlotLocked()
	number := s.roomLocked(size, own)
	seg := &s.segments[number]
	e := entry(seg.words[seg.used:][:size])
	e[entryHash], e[entryHash+1] = uint32(hash), uint32(hash>>32)
	e[entryOwner], e[entryKind] = owner, uint32(variant)
	e[entryTextLen], e[entryIDs] = uint32(len(text)), uint32(len(ids))
	copy(e[entryText:], ids)
	copy(e.text(), text)
	s.insertLocked(slot{uint32(hash), number + 1, uint32(seg.used)})
	seg.used += size
}

// hash is of the key: what is hostile cannot know the seed.
func (c *Cache) hash(owner uint32, variant uint8, text string) uint64 {
	const spread = 0x9e3779b97f4a7c15
	return xxh3.HashStringSeed(text, c.seed^(uint64(owner)<<8|uint64(variant))*spread)
}

// entry is one text with its ids, as it lies in a segment.
type entry []uint32

// The words of an entry. The ids begin at entryText and the text follows them.
const (
	entryHash    = 0 // two of them
	entryOwner   = 2
	entryKind    = 3 // the variant, and visited
	entryTextLen = 4
	entryIDs     = 5
	entryText    = 6
)

// visited in an entry's kind: it was asked for since it was written or moved.
const visited = 1 << 8

func (e entry) hash() uint64 { return uint64(e[entryHash]) | uint64(e[entryHash+1])<<32 }

func (e entry) ids() []uint32 { return e[entryText : entryText+e[entryIDs]] }

// size is how many words it takes.
func (e entry) size() int { return entryText + int(e[entryIDs]) + (int(e[entryTextLen])+3)/4 }

// text is the memory of the text.
func (e entry) text() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(e[entryText+e[entryIDs]:]))), e[entryTextLen])
}

// is reports whether it answers for the key.
func (e entry) is(owner uint32, variant uint8, text string) bool {
	return e[entryOwner] == owner && e[entryKind]&^visited == uint32(variant) &&
		int(e[entryTextLen]) == len(text) && string(e.text()) == text
}

// shard is a part of a Cache. Its methods need mu held.
type shard struct {
	mu sync.Mutex // guards all below but limit and segment

	limit   int // bytes
	segment int // words of one

	// table finds entries by their hashes: linear probing, a power of two.
	table    []slot
	segments []segment
	// order are the numbers of the segments in use, that which was begun first
	// in front; entries are written to the last one that is not a single's.
	// unused are numbers without memory.
	order, unused []uint32

	entries, bytes          int
	hits, misses, evictions int64
}

// slot is an entry's place: its segment's number plus 1, 0 for a free slot, and
// where in it. tag is the lower half of the hash.
type slot struct{ tag, segment, at uint32 }

const slotBytes = int(unsafe.Sizeof(slot{}))

// segment is memory for entries. A single holds one large entry and has just
// its size.
type segment struct {
	words  []uint32
	used   int
	single bool
}

// segmentBytes is what the shard's lists take for each.
const segmentBytes = int(unsafe.Sizeof(segment{})) + 8

// findLocked returns the slot and the entry of a hash, or nil. No two entries have
// the same one.
func (s *shard) findLocked(hash uint64) (int, entry) {
	if len(s.table) == 0 {
		return 0, nil
	}
	mask := len(s.table) - 1
	for i := int(uint32(hash)) & mask; ; i = (i + 1) & mask {
		slot := s.table[i]
		if slot.segment == 0 {
			return 0, nil
		}
		if slot.tag != uint32(hash) {
			continue
		}
		if e := entry(s.segments[slot.segment-1].words[slot.at:]); e.hash() == hash {
			return i, e
		}
	}
}

// insertLocked puts a slot into the table, which has a free one.
func (s *shard) insertLocked(new slot) {
	mask := len(s.table) - 1
	i := int(new.tag) & mask
	for s.table[i].segment != 0 {
		i = (i + 1) & mask
	}
	s.table[i] = new
	s.entries++
}

// removeLocked frees slot i and closes the gap, so that findLocked may stop at the
// first free one. What the entry leaves in its segment belongs to nobody.
func (s *shard) removeLocked(i int) {
	s.entries--
	mask := len(s.table) - 1
	for j := i; ; {
		s.table[i] = slot{}
		for {
			j = (j + 1) & mask
			if s.table[j].segment == 0 {
				return
			}
			// It may move to i if its search begins there or before.
			if home := int(s.table[j].tag) & mask; (j-home)&mask >= (j-i)&mask {
				break
			}
		}
		s.table[i] = s.table[j]
		i = j
	}
}

// makeSlotLocked sees to it that the table has room for one more entry and
// stays sparse enough. It may take a quarter of the shard.
func (s *shard) makeSlotLocked() {
	if 4*s.entries < 3*len(s.table) {
		return
	}
	n := max(64, 2*len(s.table))
	if n*slotBytes > s.limit/4 {
		for tries := 0; 4*s.entries >= 3*len(s.table); tries++ {
			s.recycleLocked(tries)
		}
		return
	}
	for s.bytes+n*slotBytes > s.limit {
		s.dropLocked()
	}
	old := s.table
	s.table = make([]slot, n)
	s.bytes += (n - len(old)) * slotBytes
	s.entries = 0
	for _, slot := range old {
		if slot.segment != 0 {
			s.insertLocked(slot)
		}
	}
}

// roomLocked returns the number of a segment with room for so many words: one
// of those that are shared, or own.
func (s *shard) roomLocked(size int, own []uint32) uint32 {
	if own != nil {
		for s.bytes+4*size+segmentBytes > s.limit {
			s.dropLocked()
		}
		return s.beginLocked(segment{words: own, single: true})
	}
	for tries := 0; ; tries++ {
		if last, ok := s.openLocked(); ok && len(s.segments[last].words)-s.segments[last].used >= size {
			return last
		}
		if s.bytes+4*s.segment+segmentBytes <= s.limit {
			return s.beginLocked(segment{words: make([]uint32, s.segment)})
		}
		s.recycleLocked(tries)
	}
}

// openLocked returns the segment that entries are written to, if there is one.
func (s *shard) openLocked() (number uint32, ok bool) {
	for _, number := range slices.Backward(s.order) {
		if !s.segments[number].single {
			return number, true
		}
	}
	return 0, false
}

// beginLocked puts a segment into use.
func (s *shard) beginLocked(new segment) uint32 {
	var number uint32
	if n := len(s.unused); n > 0 {
		number, s.unused = s.unused[n-1], s.unused[:n-1]
	} else {
		number = uint32(len(s.segments))
		s.segments = append(s.segments, segment{})
	}
	s.segments[number] = new
	s.order = append(s.order, number)
	s.bytes += 4*len(new.words) + segmentBytes
	return number
}

// patience is how many segments in a row may keep all that was asked for; the
// next one gives up a quarter in any case, so that no Put waits for long.
const patience = 8

// recycleLocked makes the segment that was begun first the last one, without
// what was not asked for. A single that was not is given up. tries counts the
// segments that this was done to for the same Put.
func (s *shard) recycleLocked(tries int) {
	number := s.order[0]
	seg := &s.segments[number]
	if seg.single {
		s.dropLocked()
		return
	}
	copy(s.order, s.order[1:])
	s.order[len(s.order)-1] = number
	end := seg.used
	seg.used = 0
	keep := len(seg.words)
	if tries >= patience {
		keep = keep * 3 / 4
	}
	s.moveLocked(number, end, number, keep)
}

// dropLocked gives up the memory of the segment that was begun first, unless
// that holds what was asked for since: a single is then put behind the others,
// and smaller entries go to the open segment, or if they have no room there
// their own becomes the open one. As nothing in it counts as asked for then,
// calling it again gives up memory in the end.
func (s *shard) dropLocked() {
	number := s.order[0]
	seg := &s.segments[number]
	if seg.single {
		copy(s.order, s.order[1:])
		if e := entry(seg.words); e[entryKind]&visited != 0 && s.placeLocked(number, 0) >= 0 {
			e[entryKind] &^= visited
			s.order[len(s.order)-1] = number
			return
		}
	} else {
		used := 0
		for at := 0; at < seg.used; {
			e := entry(seg.words[at:])
			if e[entryKind]&visited != 0 {
				used += e.size()
			}
			at += e.size()
		}
		open, _ := s.openLocked()
		if used > 0 && (open == number || s.segments[open].used+used > len(s.segments[open].words)) {
			s.recycleLocked(0)
			return
		}
		copy(s.order, s.order[1:])
		s.moveLocked(number, seg.used, open, len(s.segments[open].words))
	}
	s.order = s.order[:len(s.order)-1]
	if seg.single {
		s.moveLocked(number, seg.used, number, 0)
	}
	s.bytes -= 4*len(seg.words) + segmentBytes
	*seg = segment{}
	s.unused = append(s.unused, number)
}

// moveLocked takes the entries out of the first end words of a segment. Those
// that were asked for since they were written go to another, or to the front
// of the same one, while that has less than limit words in use.
func (s *shard) moveLocked(from uint32, end int, to uint32, limit int) {
	source, target := &s.segments[from], &s.segments[to]
	for at := 0; at < end; {
		e := entry(source.words[at:])
		size := e.size()
		if i := s.placeLocked(from, at); i >= 0 {
			if e[entryKind]&visited != 0 && target.used+size <= limit {
				e[entryKind] &^= visited
				copy(target.words[target.used:], e[:size])
				s.table[i].segment, s.table[i].at = to+1, uint32(target.used)
				target.used += size
			} else {
				s.removeLocked(i)
				s.evictions++
			}
		}
		at += size
	}
}

// placeLocked returns the slot of the entry that lies there, or -1 if it has
// none any more.
func (s *shard) placeLocked(number uint32, at int) int {
	mask := len(s.table) - 1
	for i := int(s.segments[number].words[at+entryHash]) & mask; s.table[i].segment != 0; i = (i + 1) & mask {
		if s.table[i].segment == number+1 && s.table[i].at == uint32(at) {
			return i
		}
	}
	return -1
}

// chunks is the cache as one tokenizer's pipeline sees it. A pipeline cuts
// the text where the ids on both sides do not depend on each other, and asks
// for each part.
type chunks struct {
	cache *Cache
	of    uint32 // Tokenizer.number
}

// append appends the ids of text if they are known. variant tells apart texts
// that have other ids in other places, such as at the start of a sequence; it
// is below 128, as those above are for who calls Cache.Put.
func (c *chunks) append(dst []uint32, text string, variant uint8) (_ []uint32, ok bool) {
	return c.cache.Append(dst, c.of, variant, text)
}

// put notes the ids of text. Both are copied.
func (c *chunks) put(text string, variant uint8, ids []uint32) {
	c.cache.Put(c.of, variant, text, ids)
}
