package policy

import "sync/atomic"

// board holds a few numbers that are replaced together. One goroutine at a time
// may write, which its owner sees to; any may read, at any time, without waiting
// for the one that writes. The zero value holds zeros.
//
// There are two copies, of which readers take the one that the version names. The
// other is written, and then named; so a reader tries again only when two writings
// have come in between.
type board struct {
	version atomic.Uint64
	copies  [2]boardNumbers
}

type boardNumbers [12]atomic.Uint64

// set writes the i-th number: mostly it is what it was, and to read it takes a tenth of
// the time.
func (n *boardNumbers) set(i int, v uint64) {
	if n[i].Load() != v {
		n[i].Store(v)
	}
}

// begin returns the copy to write to. What it holds is old: all that is read must
// be written.
func (b *board) begin() *boardNumbers { return &b.copies[(b.version.Load()+1)&1] }

// end shows to readers what was written since begin.
func (b *board) end() { b.version.Add(1) }

// read copies the first len(dst) numbers.
func (b *board) read(dst []uint64) {
	for {
		v := b.version.Load()
		from := &b.copies[v&1]
		for i := range dst {
			dst[i] = from[i].Load()
		}
		if b.version.Load() == v {
			return
		}
	}
}
