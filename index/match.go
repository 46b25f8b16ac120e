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

// tries is how often one look-up looks again at what has changed under it. Then
// it takes what it sees.
const tries = 256

// matching is one look-up. It lives on the stack of match.
//
// Along the chain sets only shrink, so all blocks between two whose sets have
// the same number of lanes have the same set: a segment. The blocks at which
// segments end are searched for, and only there are sets read: that of the
// first block of each segment, and that of the last, which must not have less.
// So whatever changes meanwhile, no lane gets a depth that it did not have when
// it was looked at, and one that has not changed gets the depth it has.
type matching struct {
	table *table
	chain []Hash
	depth []int32
	base  int // the first lane matched
	words int // so many, of 64 lanes each
	tries int
	start int     // the first block of the segment that is looked at
	first laneSet // what was found of it
	// last are the lanes that had block reached-1, and are not known to have
	// more or to have no more.
	last    [laneWords]uint64
	reached int
	read    [laneWords]uint64 // a set read, for the next last
}

// match sets depth[l], for each lane l that has the first block of the chain, to
// the number of leading blocks it has. The others are left as they are; so are
// lanes beyond len(depth). It allocates nothing.
//
// What writers do meanwhile is seen or not, lane by lane: a lane that has
// changed gets the depth before or after that, or one between them.
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
	first := m.find(0)
	if first.set == 0 {
		return false
	}
	m.begin(0, &first)
	last, end := first, len(m.chain)-1
	if end > 0 {
		last = m.find(end)
		if first.set != 0 && first.holders != last.holders {
			m.narrow(0, end, &first, &last)
		}
	}
	m.ends(end+1, &last, &found{})
	return true
}

// narrow finds the ends of segments between two blocks. The first of them is
// held, and by others than the second.
func (m *matching) narrow(from, to int, a, b *found) {
	if to-from == 1 {
		m.ends(to, a, b)
		return
	}
	step := (to - from + probes) / (probes + 1)
	var at [probes]found
	n := (to - from - 1) / step
	m.findMany(at[:n], from+step, step)
	for i := range n {
		next := &at[i]
		if a.holders != next.holders {
			if step == 1 {
				m.ends(from+1, a, next)
			} else {
				m.narrow(from, from+step, a, next)
			}
			if next.set == 0 {
				return
			}
		}
		a, from = next, from+step
	}
	if a.holders != b.holders {
		m.narrow(from, to, a, b)
	}
}

// begin is told that a segment begins at a block, and what was found of that.
// Lanes that have the block before it only have no more than that.
func (m *matching) begin(at int, f *found) {
	for f.set != 0 && m.lanes(f).version() != f.set.version() {
		if m.tries--; m.tries < 0 {
			return
		}
		*f = m.find(at)
	}
	if f.set == 0 {
		clear(m.read[:m.words])
	}
	m.advance(at + 1)
	m.start, m.first = at, f.set
}

// ends is told that a segment ends before block end, what was found of the block
// before that, and what of this one.
func (m *matching) ends(end int, a, b *found) {
	if m.start < end-1 {
		if m.covers(a) {
			m.advance(end)
		} else {
			m.again(end, *a)
		}
	}
	m.begin(end, b)
}

// again looks at a segment anew: lanes have left in it since it was looked at,
// or a writer is in the middle of a change, and a set has one more than its
// number. A look-up waits for no writer to go on, so it takes what does not
// change between two looks.
func (m *matching) again(end int, a found) {
	for m.start < end-1 {
		from, to := m.find(m.start), m.find(end-1)
		m.tries--
		if m.tries < 0 || from.set == m.first && to.set == a.set && from.holders == to.holders {
			m.advance(end)
			return
		}
		m.begin(m.start, &from)
		if from.set != 0 && from.holders != to.holders {
			m.narrow(m.start, end-1, &from, &to)
		}
		if m.start < end-1 && m.covers(&to) {
			m.advance(end)
			return
		}
		a = to
	}
}

// covers reads the lanes that have the last block of a segment, and reports
// whether all that have its first one are among them.
func (m *matching) covers(f *found) bool {
	if f.set == 0 || m.lanes(f).version() != f.set.version() {
		clear(m.read[:m.words]) // it may be another block's
	}
	for i, lanes := range m.last[:m.words] {
		if lanes&^m.read[i] != 0 {
			return false
		}
	}
	return true
}

// advance makes what was read the lanes that have the block before at. Others
// have no more than what was reached.
func (m *matching) advance(at int) {
	for i := range m.words {
		m.reach(i, m.last[i]&^m.read[i])
		m.last[i] = m.read[i]
	}
	m.reached = at
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

// findMany looks for the blocks at from and each step behind it, as many as to
// has. That is zero at first.
func (m *matching) findMany(to []found, from, step int) {
	t, chain := m.table, m.chain
	var places [probes]uint64
	var groups [probes]*group
	var parts [probes]*part
	if len(to) > probes {
		return
	}
	for i, at := 0, from; i < len(to); i, at = i+1, at+step {
		place := t.place(chain[at])
		p := t.parts[shardAt(place)].Load()
		// Both lines of all groups are on their way before the first is needed.
		g := &p.groups[groupAt(place, len(p.groups))]
		atomic.LoadUint64(&g.control)
		atomic.LoadUint64(&g.entries[groupEntries/2].lo)
		places[i], groups[i], parts[i] = place, g, p
	}
	for i, at := 0, from; i < len(to); i, at = i+1, at+step {
		// Most are what the first tag says. So much of look is here.
		g, h := groups[i], &chain[at]
		control := atomic.LoadUint64(&g.control)
		if some := tagged(control, tagAt(places[i])); some != 0 {
			e := &g.entries[entryAt(some)]
			set := e.set.load()
			t.pause()
			if atomic.LoadUint64(&e.hi) == h.Hi && atomic.LoadUint64(&e.lo) == h.Lo && set.kind() > 0 {
				t.pause()
				if e.set.load() == set {
					to[i] = found{parts[i], e, set, set.holders()}
					continue
				}
			}
		} else if control>>passedShift == 0 {
			continue
		}
		to[i] = t.look(parts[i], h, places[i])
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
