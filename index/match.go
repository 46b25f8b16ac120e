package index

import (
	"math/bits"
	"sync/atomic"
)

// found is what the table has of one block at the moment of looking. The zero
// value is a block that no lane has.
type found struct {
	part    *part
	entry   *entry
	set     laneSet
	holders uint64 // of set
}

// probes is how many blocks are looked up at a time. Their places in memory do
// not depend on each other, so that their cache misses overlap.
const probes = 7

// laneWords bounds the lanes that are matched at a time, 64 for each word.
const laneWords = 32

// tries is how often one look-up begins anew in places that change under it.
// Then it takes what it sees.
const tries = 16

// matching is one look-up. It lives on the stack of match.
//
// Along the chain sets only shrink, so all blocks between two whose sets have
// the same number of lanes have the same set: a segment. The blocks at which
// segments end are searched for, and only there are sets read.
type matching struct {
	table *table
	chain []Hash
	depth []int32
	base  int // the first lane matched
	words int // so many, of 64 lanes each
	tries int
	start int // the first block of the segment that is looked at
	// last are the lanes that had block reached-1, and are not known to have
	// more. So nothing that was seen of a lane is lost, whatever changes
	// meanwhile, and no lane gets a depth at which it was not seen.
	last    [laneWords]uint64
	reached int
	read    [laneWords]uint64 // a set read, for the next last
	// Of findMany, which finds them cleared already.
	places [probes]uint64
	groups [probes]*group
}

// match sets depth[l], for each lane l that has the first block of the chain, to
// the number of leading blocks it has. The others are left as they are; so are
// lanes beyond len(depth). It allocates nothing. What has been entered before
// it is called, and does not leave before it returns, is found.
func (t *table) match(depth []int32, chain []Hash) {
	if len(chain) == 0 {
		return
	}
	for base := 0; base < len(depth); base += 64 * laneWords {
		m := matching{table: t, chain: chain, depth: depth, base: base, tries: tries}
		m.words = min(laneWords, (len(depth)-base+63)/64)
		if !m.run() {
			break
		}
	}
}

// run does the look-up. It reports whether any lane has the first block.
func (m *matching) run() bool {
	end := len(m.chain)
	first := m.find(0)
	last := first
	if end > 1 {
		last = m.find(end - 1)
	}
	for first.set != 0 && m.lanes(&first).version() != first.set.version() {
		if m.tries--; m.tries < 0 {
			return true
		}
		first = m.find(0)
	}
	if first.set == 0 {
		return false
	}
	m.last, m.reached = m.read, 1
	if end > 1 && first.holders != last.holders {
		m.narrow(0, end-1, &first, &last)
	}
	m.ends(end, last)
	for i, lanes := range m.last[:m.words] {
		m.reach(i, lanes)
	}
	return true
}

// narrow finds the ends of segments between two blocks. The first of them is
// held, and by others than the second.
func (m *matching) narrow(from, to int, a, b *found) {
	if to-from == 1 {
		m.ends(to, *a)
		return
	}
	step := (to - from + probes) / (probes + 1)
	var at [probes]found
	n := (to - from - 1) / step
	m.findMany(&at, n, from+step, step)
	for i := range n {
		if next := &at[i]; a.holders != next.holders {
			m.narrow(from, from+step, a, next)
			a = next
			if a.set == 0 {
				return
			}
		} else {
			a = next
		}
		from += step
	}
	if a.holders != b.holders {
		m.narrow(from, to, a, b)
	}
}

// ends is told that a segment ends before block end, and what was found of the
// block before that.
func (m *matching) ends(end int, a found) {
	for {
		if a.set == 0 {
			return
		}
		now := m.lanes(&a)
		if now == a.set {
			break
		}
		if m.tries--; m.tries < 0 {
			if now.version() == a.set.version() {
				break
			}
			return
		}
		// Other lanes have it now, which may have changed anywhere in the
		// segment: those that left, too, are to get the depth they have.
		from := m.start
		a = m.find(end - 1)
		if begin := m.find(from); from < end-1 && begin.set != 0 && begin.holders != a.holders {
			m.narrow(from, end-1, &begin, &a)
		}
	}
	for i := range m.words {
		m.reach(i, m.last[i]&^m.read[i])
		m.last[i] = m.read[i]
	}
	m.reached, m.start = end, end
}

// reach notes that lanes of one word have no more blocks than were reached.
func (m *matching) reach(word int, lanes uint64) {
	for ; lanes != 0; lanes &= lanes - 1 {
		if l := m.base + 64*word + bits.TrailingZeros64(lanes); l < len(m.depth) {
			m.depth[l] = int32(m.reached)
		}
	}
}

// lanes puts the lanes of a block that was found into read, and returns its set
// as it is after that. What was read is of this block if the version is the
// same, and has all lanes that were found if the whole set is.
func (m *matching) lanes(f *found) laneSet {
	read := m.read[:m.words]
	first := m.base / 64
	set := f.set
	if set.kind() == mapped {
		words := f.part.words[set.first():][:1<<set.class()]
		for i := range read {
			read[i] = 0
			if first+i < len(words) {
				read[i] = atomic.LoadUint64(&words[first+i])
			}
		}
	} else {
		clear(read)
		for i := range set.count() {
			l := set.inlineLane(uint64(i))
			if set.kind() == listed {
				l = lane(atomic.LoadUint64(&f.part.words[set.first()+i/4]) >> (i % 4 * 16))
			}
			if word := int(l)/64 - first; word >= 0 && word < len(read) {
				read[word] |= 1 << (l % 64)
			}
		}
	}
	if set.kind() <= maxInline {
		return set
	}
	m.table.pause()
	return f.entry.set.load()
}

// find looks for one block of the chain.
func (m *matching) find(i int) found {
	h := &m.chain[i]
	place := m.table.place(*h)
	p := m.table.parts[shardAt(place)].Load()
	return m.table.look(p, h, place)
}

// findMany looks for n blocks: one at from, and one each step behind it. to is
// zero at first.
func (m *matching) findMany(to *[probes]found, n, from, step int) {
	t := m.table
	places, groups := &m.places, &m.groups
	for i := range n {
		place := t.place(m.chain[from+i*step])
		p := t.parts[shardAt(place)].Load()
		// Both lines of all groups are on their way before the first is needed.
		g := &p.groups[groupAt(place, len(p.groups))]
		atomic.LoadUint64(&g.control)
		atomic.LoadUint64(&g.entries[groupEntries/2].lo)
		places[i], groups[i], to[i].part = place, g, p
	}
	for i := range n {
		// Most are what the first tag says. So much of look is here.
		g, h, f := groups[i], &m.chain[from+i*step], &to[i]
		control := atomic.LoadUint64(&g.control)
		if some := tagged(control, tagAt(places[i])); some != 0 {
			e := &g.entries[entryAt(some)]
			set := e.set.load()
			t.pause()
			if set.count() > 0 && atomic.LoadUint64(&e.hi) == h.Hi && atomic.LoadUint64(&e.lo) == h.Lo {
				t.pause()
				if e.set.load() == set {
					f.entry, f.set, f.holders = e, set, set.holders()
					continue
				}
			}
		} else if control>>passedShift == 0 {
			f.part = nil
			continue
		}
		*f = t.look(f.part, h, places[i])
	}
}

// look is find of the part for those who do not have the shard locked.
func (t *table) look(p *part, h *Hash, place uint64) found {
	at, tag := groupAt(place, len(p.groups)), tagAt(place)
	for range p.groups {
		g := &p.groups[at]
		control := atomic.LoadUint64(&g.control)
		t.pause()
		for some := tagged(control, tag); some != 0; some &= some - 1 {
			e := &g.entries[entryAt(some)]
			if set := t.lookAt(e, h); set != 0 {
				return found{p, e, set, set.holders()}
			}
		}
		if control>>passedShift == 0 {
			break
		}
		if at++; at == len(p.groups) {
			at = 0
		}
	}
	return found{}
}

// lookAt returns the lanes in an entry if it is that of a block, and else 0.
func (t *table) lookAt(e *entry, h *Hash) laneSet {
	set := e.set.load()
	for range tries {
		t.pause()
		if set.count() == 0 || atomic.LoadUint64(&e.hi) != h.Hi {
			return 0
		}
		t.pause()
		if atomic.LoadUint64(&e.lo) != h.Lo {
			return 0
		}
		t.pause()
		now := e.set.load()
		if now.version() == set.version() {
			return now
		}
		// The entry has been given up since, or only the words of its lanes.
		set = now
	}
	return 0
}
