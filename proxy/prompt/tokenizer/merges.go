package tokenizer

import (
	"cmp"
	"math"
	"math/bits"
	"slices"
	"sync"
)

// merges is the table of a byte pair encoding: which two adjacent tokens
// become which one, and which pair comes first. It is built once and then read
// from any goroutine. The zero value merges nothing.
//
// It is a hash table with open addressing, at most half full. A pair that is
// not in it, which most are, costs one cache line.
type merges struct {
	keys  []uint64 // first token's id << 32 | second's, or noPair
	ranks []uint32 // of the key at the same place
	shift uint8
	// results are the ids of the merged tokens by rank.
	results []uint32
}

const noPair = math.MaxUint64

// noRank is the rank of a pair that is not merged: the last of all.
const noRank = math.MaxUint32

// newMerges returns a table with room for n pairs.
func newMerges(n int) merges {
	size := 1 << max(4, bits.Len(uint(2*n)))
	m := merges{keys: make([]uint64, size), ranks: make([]uint32, size), shift: uint8(64 - bits.Len(uint(size-1)))}
	for i := range m.keys {
		m.keys[i] = noPair
	}
	m.results = make([]uint32, 0, n)
	return m
}

// add appends a pair of the next rank. A pair that is there already takes the
// later rank, as in the tokenizers library.
func (m *merges) add(a, b, result uint32) {
	m.set(a, b, uint32(len(m.results)))
	m.results = append(m.results, result)
}

// set gives a pair a rank that results has, or will have.
func (m *merges) set(a, b, rank uint32) {
	key := uint64(a)<<32 | uint64(b)
	i := key * 0x9e3779b97f4a7c15 >> m.shift
	for m.keys[i] != key && m.keys[i] != noPair {
		i = (i + 1) & uint64(len(m.keys)-1)
	}
	m.keys[i] = key
	m.ranks[i] = rank
}

// rank returns the rank of a pair, or noRank.
func (m *merges) rank(a, b uint32) uint32 {
	key := uint64(a)<<32 | uint64(b)
	for i := key * 0x9e3779b97f4a7c15 >> m.shift; ; i = (i + 1) & uint64(len(m.keys)-1) {
		switch m.keys[i] {
		case key:
			return m.ranks[i]
		case noPair:
			return noRank
		}
	}
}

// smallWord is how many symbols appendMerged merges by looking through all of
// them again and again, which takes the square of their number.
const smallWord = 64

// appendMerged merges symbols, the ids of a word's smallest tokens, until no
// two adjacent ones can be merged: always the pair of the lowest rank, and of
// several the leftmost. It appends what is left. symbols are overwritten.
func (m *merges) appendMerged(dst, symbols []uint32) []uint32 {
	if len(symbols) > smallWord {
		return m.appendLong(dst, symbols)
	}
	var ranks [smallWord]uint32
	n := len(symbols)
	for i := 0; i+1 < n; i++ {
		ranks[i] = m.rank(symbols[i], symbols[i+1])
	}
	for n > 1 {
		at, least := 0, uint32(noRank)
		for i, r := range ranks[:n-1] {
			if r < least {
				at, least = i, r
			}
		}
		if least == noRank {
			break
		}
		symbols[at] = m.results[least]
		copy(symbols[at+1:n], symbols[at+2:n])
		copy(ranks[at:n-1], ranks[at+1:n-1])
		n--
		if at > 0 {
			ranks[at-1] = m.rank(symbols[at-1], symbols[at])
		}
		if at+1 < n {
			ranks[at] = m.rank(symbols[at], symbols[at+1])
		}
	}
	return append(dst, symbols[:n]...)
}

// longWord is the memory that merging a long word takes. The pool keeps it.
//
// A heap of all pairs would spend most of its time on the cache misses of its
// log n steps. Here pairs of equal rank share a list of positions, and only
// ranks are in a heap: of those there are few, even in hostile text.
type longWord struct {
	// next and previous are positions of the neighbours that are left, pairs the
	// ranks of what is at a position and what is next to it.
	next, previous []int32
	pairs          []uint32
	lists          []positions
	// of is the list of a rank plus one, or 0.
	of []int32
	// ranks are those that have a list: a heap.
	ranks []uint32
	// spare are indexes of lists that are not in use.
	spare []int32
}

// positions are where pairs of one rank are, or were: they may be stale. They
// come in no order until the list's first turn. Those that come later, while it
// is used up or has to wait for a lower rank, are in a heap.
type positions struct {
	early  []int32
	late   []int32
	used   int
	sorted bool
}

var longWords sync.Pool

func (m *merges) appendLong(dst, symbols []uint32) []uint32 {
	w, _ := longWords.Get().(*longWord)
	if w == nil {
		w = new(longWord)
	}
	n := len(symbols)
	if len(w.of) < len(m.results) {
		w.of = make([]int32, len(m.results))
	}
	w.next = slices.Grow(w.next[:0], n)[:n]
	w.previous = slices.Grow(w.previous[:0], n)[:n]
	w.pairs = slices.Grow(w.pairs[:0], n)[:n]
	w.pairs[n-1] = noRank
	for i := range n {
		w.next[i], w.previous[i] = int32(i+1), int32(i-1)
	}
	w.next[n-1] = -1
	for i := 0; i+1 < n; i++ {
		w.push(m.rank(symbols[i], symbols[i+1]), int32(i))
	}
	for {
		i, rank := w.first()
		if rank == noRank {
			break
		}
		if w.pairs[i] != rank {
			continue
		}
		j := w.next[i]
		result := m.results[rank]
		symbols[i] = result
		after := w.next[j]
		w.next[i] = after
		w.pairs[i], w.pairs[j] = noRank, noRank
		if after >= 0 {
			w.previous[after] = i
			w.push(m.rank(result, symbols[after]), i)
		}
		if before := w.previous[i]; before >= 0 {
			w.push(m.rank(symbols[before], result), before)
		}
	}
	for i := int32(0); i >= 0; i = w.next[i] {
		dst = append(dst, symbols[i])
	}
	if n <= 64<<10 {
		longWords.Put(w)
	}
	return dst
}

// push notes that the pair at a position has a rank.
func (w *longWord) push(rank uint32, position int32) {
	w.pairs[position] = rank
	if rank == noRank {
		return
	}
	list := w.of[rank] - 1
	if list < 0 {
		if n := len(w.spare); n > 0 {
			list, w.spare = w.spare[n-1], w.spare[:n-1]
		} else {
			list, w.lists = int32(len(w.lists)), append(w.lists, positions{})
		}
		w.of[rank] = list + 1
		w.ranks = heapPush(w.ranks, rank)
	}
	if l := &w.lists[list]; l.sorted {
		l.late = heapPush(l.late, position)
	} else {
		l.early = append(l.early, position)
	}
}

// first takes the leftmost position of the lowest rank off. The rank is noRank
// when there is none.
func (w *longWord) first() (position int32, rank uint32) {
	for len(w.ranks) > 0 {
		rank = w.ranks[0]
		l := &w.lists[w.of[rank]-1]
		if !l.sorted {
			slices.Sort(l.early)
			l.sorted = true
		}
		switch {
		case l.used < len(l.early) && (len(l.late) == 0 || l.early[l.used] <= l.late[0]):
			l.used++
			return l.early[l.used-1], rank
		case len(l.late) > 0:
			position, l.late = heapPop(l.late)
			return position, rank
		}
		*l = positions{early: l.early[:0], late: l.late[:0]}
		w.spare = append(w.spare, w.of[rank]-1)
		w.of[rank] = 0
		_, w.ranks = heapPop(w.ranks)
	}
	return 0, noRank
}

// heapPush adds to a heap whose least element is the first.
func heapPush[T cmp.Ordered](heap []T, x T) []T {
	i := len(heap)
	heap = append(heap, x)
	for i > 0 && heap[(i-1)/2] > x {
		heap[i] = heap[(i-1)/2]
		i = (i - 1) / 2
	}
	heap[i] = x
	return heap
}

// heapPop takes the least element off.
func heapPop[T cmp.Ordered](heap []T) (T, []T) {
	least, n := heap[0], len(heap)-1
	last := heap[n]
	heap = heap[:n]
	for i := 0; n > 0; {
		c := 2*i + 1
		if c+1 < n && heap[c+1] < heap[c] {
			c++
		}
		if c >= n || heap[c] >= last {
			heap[i] = last
			break
		}
		heap[i] = heap[c]
		i = c
	}
	return least, heap
}
