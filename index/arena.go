package index

import (
	"sync"
	"sync/atomic"
	"unsafe"
)

// ref is a record of a tree. It is valid until the tree drops it; 0 is none.
type ref uint32

// record is one block of a tree, or a spare one. It has no pointer, so the
// garbage collector passes over all of them, and its fields are such that it
// has no padding.
type record struct {
	hi, lo        [2]uint32 // the hash, zero of a spare one
	parent, child ref       // child is the first of those below it
	next, prev    ref       // among those below its parent
	after, before ref       // in the list that it is in
	name          [2]uint32 // what the engine calls it, if told.names has it
	state         uint32    // see tree.go
}

func (r *record) hash() Hash {
	return Hash{uint64(r.hi[0]) | uint64(r.hi[1])<<32, uint64(r.lo[0]) | uint64(r.lo[1])<<32}
}

func (r *record) setHash(h Hash) {
	r.hi = [2]uint32{uint32(h.Hi), uint32(h.Hi >> 32)}
	r.lo = [2]uint32{uint32(h.Lo), uint32(h.Lo >> 32)}
}

func (r *record) toldName() uint64 { return uint64(r.name[0]) | uint64(r.name[1])<<32 }

func (r *record) setToldName(name uint64) { r.name = [2]uint32{uint32(name), uint32(name >> 32)} }

const (
	// chunkRecords in a chunk are a whole number of pages, so nothing of it is
	// lost to rounding.
	chunkRecords = 2048
	// batchRecords go from the arena to a tree and back at once.
	batchRecords = 64
)

// chunk is a piece of the arena. A ref is its number and a place in it.
type chunk [chunkRecords]record

const (
	chunkBytes  = int64(unsafe.Sizeof(chunk{}))
	recordBytes = int64(unsafe.Sizeof(record{}))
)

// arena is the memory of all trees of an Index, and counts it. Records are
// never given back to the runtime, but go from tree to tree: what one slot
// gives up, another can use. Its methods may be called from any goroutine.
type arena struct {
	limit int64
	table *table
	maps  atomic.Int64 // the bytes of what trees and events have beside records
	made  atomic.Int64 // the bytes of the chunks

	mu     sync.Mutex // guards what follows
	chunks []*chunk   // only ever appended to, so trees may read older copies
	spare  []ref      // of each spare batch the first; the others by next
}

// count adds to what trees hold beside records.
func (a *arena) count(bytes int64) { a.maps.Add(bytes) }

// bytes is all that the index holds.
func (a *arena) bytes() int64 { return a.made.Load() + a.maps.Load() + a.table.bytes() }

// full: no more can be taken than is given up. It is so a little before the
// bound, as maps grow by half at once, and the table may take more for as many
// blocks, by how they come to lie.
func (a *arena) full() bool { return a.limit > 0 && a.bytes() >= a.most() }

// most is what may be held before something must be given up.
func (a *arena) most() int64 { return a.limit - a.limit/16 }

// over: the bound has been passed.
func (a *arena) over() bool { return a.limit > 0 && a.bytes() > a.limit }

// take returns a batch, linked by next, and the chunks in which it may lie. It
// returns none when a further chunk would pass the bound, unless it must.
func (a *arena) take(must bool) (ref, []*chunk) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.spare) == 0 {
		if !must && a.limit > 0 && a.bytes()+chunkBytes > a.most() {
			return 0, nil
		}
		c := new(chunk)
		first := ref(len(a.chunks) * chunkRecords)
		if uint64(first)+chunkRecords > 1<<32-1 {
			return 0, nil
		}
		for i := range c {
			if (i+1)%batchRecords != 0 {
				c[i].next = first + ref(i) + 1
			}
		}
		a.chunks = append(a.chunks, c)
		a.made.Add(chunkBytes)
		// The lowest are taken first. Those of ref 0, which is none, are never.
		for i := chunkRecords - batchRecords; i >= 0; i -= batchRecords {
			if first+ref(i) != 0 {
				a.spare = append(a.spare, first+ref(i))
			}
		}
	}
	last := len(a.spare) - 1
	first := a.spare[last]
	a.spare = a.spare[:last]
	return first, a.chunks
}

// giveBack takes a batch that a tree does not need.
func (a *arena) giveBack(first ref) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.spare = append(a.spare, first)
}
