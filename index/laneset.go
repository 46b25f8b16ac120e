package index

import (
	"math/bits"
	"sync/atomic"
)

// laneSet is the lanes of one block: up to three of them, or where in the words
// of the part more are, as a list or, where that takes no more room, a bitmap.
// It is changed by the shard's writer and read by anybody. The zero value has
// no lanes.
//
// Bits 48 to 50 tell which it is: the number of lanes that follow, each of 16
// bits, in ascending order; or a kind below. Above them is a version, which
// changes when the words or the entry of the set are given to another.
type laneSet uint64

const (
	kindShift    = 48
	versionShift = 51

	maxInline = 3
	// listed and mapped sets have the number of their lanes less one in bits 32
	// to 47, the class of their words in bits 28 to 31, and the first one's
	// place below. Of a class there are 2^class words. A list has four lanes in
	// a word, and a map bit l%64 of word l/64 for each lane l.
	listed = 4
	mapped = 5

	lanesShift = 32
	wordsShift = 28
	classes    = 11 // the largest has 1,024 words: all lanes there can be
)

func (s laneSet) kind() uint64    { return uint64(s) >> kindShift & 7 }
func (s laneSet) version() uint64 { return uint64(s) >> versionShift }
func (s laneSet) class() int      { return int(s >> wordsShift & 0xf) }
func (s laneSet) first() int      { return int(s & (1<<wordsShift - 1)) }

// count is how many lanes are in the set.
func (s laneSet) count() int {
	if k := s.kind(); k <= maxInline {
		return int(k)
	}
	return 1 + int(s>>lanesShift&0xffff)
}

// holders is what is the same of two sets that have the same lanes: of larger
// ones only how many there are, which will do when one is part of the other.
func (s laneSet) holders() uint64 {
	if s.kind() <= maxInline {
		return uint64(s) << (64 - versionShift) >> (64 - versionShift)
	}
	return 7<<kindShift | uint64(s)>>lanesShift&0xffff
}

// inlineLane is lane i of a set that has it in itself.
func (s laneSet) inlineLane(i uint64) lane { return lane(s >> (16 * i)) }

func (s *laneSet) load() laneSet       { return laneSet(atomic.LoadUint64((*uint64)(s))) }
func (s *laneSet) store(value laneSet) { atomic.StoreUint64((*uint64)(s), uint64(value)) }

// inline returns the set with n lanes instead, in the same version.
func (s laneSet) inline(n, lanes uint64) laneSet {
	return s>>versionShift<<versionShift | laneSet(n<<kindShift|lanes)
}

// next returns the set in the next version.
func (s laneSet) next() laneSet { return s + 1<<versionShift }

// dead returns what follows when the entry is given up.
func (s laneSet) dead() laneSet { return s.inline(0, 0).next() }

// outside returns a set with other words, whose number of lanes is n.
func (s laneSet) outside(kind uint64, n, class, first int) laneSet {
	return s.inline(kind, uint64(n-1)<<lanesShift|uint64(class)<<wordsShift|uint64(first)).next()
}

// classFor is the class that has at least n words.
func classFor(n int) int { return bits.Len(uint(n - 1)) }

// bestFor is the kind and the class for so many lanes, of which last is the
// highest.
func bestFor(n int, last lane) (kind uint64, class int) {
	list, mapping := classFor((n+3)/4), classFor(int(last)/64+1)
	if mapping <= list {
		return mapped, mapping
	}
	return listed, list
}

// take hands out words of a class, if the part has room for them.
func (s *shard) take(p *part, class int) (first int, ok bool) {
	if s.free[class] != 0 {
		first = int(s.free[class] - 1)
		s.free[class] = uint32(p.words[first])
	} else if first = s.taken; first+1<<class <= len(p.words) {
		s.taken += 1 << class
	} else {
		return 0, false
	}
	s.used += 1 << class
	return first, true
}

// give takes the words of a set back. What comes after is in the first.
func (s *shard) give(p *part, set laneSet) {
	first, class := set.first(), set.class()
	atomic.StoreUint64(&p.words[first], uint64(s.free[class]))
	s.free[class] = uint32(first + 1)
	s.used -= 1 << class
}

// move returns a set of another part as it is to be in a new one, which nobody
// else sees yet and which has room.
func (s *shard) move(from, to *part, set laneSet) laneSet {
	if set.kind() <= maxInline {
		return set
	}
	first, _ := s.take(to, set.class())
	copy(to.words[first:first+1<<set.class()], from.words[set.first():])
	return set.outside(set.kind(), set.count(), set.class(), first)
}

// listedLane is lane i of a listed set.
func (p *part) listedLane(set laneSet, i int) lane {
	return lane(p.words[set.first()+i/4] >> (i % 4 * 16))
}

// setListed makes l lane i of the listed set at first.
func (p *part) setListed(first, i int, l lane) {
	word, shift := &p.words[first+i/4], i%4*16
	atomic.StoreUint64(word, *word&^(0xffff<<shift)|uint64(l)<<shift)
}

// setMapped puts l into the mapped set at first.
func (p *part) setMapped(first int, l lane) {
	word := &p.words[first+int(l/64)]
	atomic.StoreUint64(word, *word|1<<(l%64))
}

// has reports whether a lane is in a set, and where in a listed one.
func (p *part) has(set laneSet, l lane) (at int, ok bool) {
	switch kind := set.kind(); kind {
	case listed:
		for i := range set.count() {
			if p.listedLane(set, i) == l {
				return i, true
			}
		}
	case mapped:
		return 0, int(l/64) < 1<<set.class() && p.words[set.first()+int(l/64)]>>(l%64)&1 != 0
	default:
		for i := range kind {
			if set.inlineLane(i) == l {
				return int(i), true
			}
		}
	}
	return 0, false
}

// join puts a lane into the set of an entry. If the part has no room for it,
// it returns how many words are needed, and else 0.
func (t *table) join(s *shard, p *part, e *entry, l lane) (words int) {
	set := e.set
	if _, ok := p.has(set, l); ok {
		return 0
	}
	n, last := set.count(), l
	switch set.kind() {
	case listed:
		if n < 4<<set.class() {
			p.setListed(set.first(), n, l)
			t.pause()
			e.set.store(set + 1<<lanesShift)
			t.pause()
			return 0
		}
		for i := range n {
			last = max(last, p.listedLane(set, i))
		}
	case mapped:
		if int(l/64) < 1<<set.class() {
			p.setMapped(set.first(), l)
			t.pause()
			e.set.store(set + 1<<lanesShift)
			t.pause()
			return 0
		}
	case maxInline:
		last = max(last, set.inlineLane(maxInline-1))
	default:
		var below uint64
		for below < uint64(n) && set.inlineLane(below) < l {
			below++
		}
		lanes := uint64(set) & (1<<kindShift - 1)
		under := lanes & (1<<(16*below) - 1)
		e.set.store(set.inline(uint64(n)+1, under|uint64(l)<<(16*below)|(lanes&^under)<<16))
		t.pause()
		return 0
	}
	kind, class := bestFor(n+1, last)
	if set.kind() == mapped {
		kind, class = mapped, classFor(int(l)/64+1)
	}
	first, ok := s.take(p, class)
	if !ok {
		return 1 << class
	}
	for i := range 1 << class {
		atomic.StoreUint64(&p.words[first+i], 0)
		t.pause()
	}
	switch {
	case kind == mapped && set.kind() == mapped:
		for i := range 1 << set.class() {
			atomic.StoreUint64(&p.words[first+i], p.words[set.first()+i])
		}
		p.setMapped(first, l)
	case kind == mapped:
		for i := range n {
			if set.kind() == listed {
				p.setMapped(first, p.listedLane(set, i))
			} else {
				p.setMapped(first, set.inlineLane(uint64(i)))
			}
		}
		p.setMapped(first, l)
	default:
		for i := range n {
			if set.kind() == listed {
				p.setListed(first, i, p.listedLane(set, i))
			} else {
				p.setListed(first, i, set.inlineLane(uint64(i)))
			}
		}
		p.setListed(first, n, l)
	}
	t.pause()
	e.set.store(set.outside(kind, n+1, class, first))
	t.pause()
	if set.kind() > maxInline {
		s.give(p, set)
		t.pause()
	}
	return 0
}

// quit takes a lane out of the set of an entry, unless it is the only one: then
// the entry is to be removed. If the part has no room for what that takes, it
// returns how many words are needed, and else 0.
func (t *table) quit(s *shard, p *part, e *entry, l lane) (words int) {
	set := e.set
	at, ok := p.has(set, l)
	if !ok {
		return 0
	}
	n := set.count()
	switch {
	case n == 1:
		return 0
	case set.kind() <= maxInline:
		lanes := uint64(set) & (1<<kindShift - 1)
		under := lanes & (1<<(16*at) - 1)
		e.set.store(set.inline(uint64(n)-1, under|lanes>>16&^(1<<(16*at)-1)))
		t.pause()
		return 0
	case n == maxInline:
		// One less than what a set has when words are taken for it, so that one
		// lane that comes and goes does not take and give words each time.
		e.set.store(set.inline(maxInline-1, p.others(set, l)).next())
		t.pause()
	case set.kind() == listed:
		// A copy, as no single store takes a lane out of a list.
		class := classFor((n + 2) / 4)
		first, ok := s.take(p, class)
		if !ok {
			return 1 << class
		}
		for i := range n {
			if i < at {
				p.setListed(first, i, p.listedLane(set, i))
			} else if i > at {
				p.setListed(first, i-1, p.listedLane(set, i))
			}
		}
		t.pause()
		e.set.store(set.outside(listed, n-1, class, first))
		t.pause()
	default:
		// The number first: it is never more than what the map has. See match.
		e.set.store(set - 1<<lanesShift)
		t.pause()
		word := &p.words[set.first()+int(l/64)]
		atomic.StoreUint64(word, *word&^(1<<(l%64)))
		t.pause()
		return 0
	}
	s.give(p, set)
	t.pause()
	return 0
}

// others are the two lanes besides l of a set that has words, as an inline set
// has them.
func (p *part) others(set laneSet, l lane) (lanes uint64) {
	n := 0
	add := func(other lane) {
		if other != l {
			lanes |= uint64(other) << (16 * n)
			n++
		}
	}
	if set.kind() == mapped {
		for i, word := range p.words[set.first():][:1<<set.class()] {
			for ; word != 0; word &= word - 1 {
				add(lane(64*i + bits.TrailingZeros64(word)))
			}
		}
		return lanes
	}
	for i := range set.count() {
		add(p.listedLane(set, i))
	}
	if lanes&0xffff > lanes>>16 {
		lanes = lanes>>16 | lanes<<16&(1<<32-1)
	}
	return lanes
}
