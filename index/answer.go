package index

import (
	"sync/atomic"
)

// answer is what a request has generated behind its prompt. The engine holds it
// in full blocks as it holds prompts, but nobody has told its tokens, so it has
// no hashes: the conversation's next turn shows them. Until then it is known by
// the prompt that it follows.
type answer struct {
	parent Hash   // of the prompt's last full block, or the prompt's root
	sum    uint64 // of the prompt's tokens behind that
	rest   int32  // how many those are
	blocks int32  // how many full blocks are still there, from the first on
	last   ref    // the last of them, which is evicted before the others

	// Numbers of others that follow the same prompt, 0 for none. The newest is
	// in the table: the next turn is more likely to go on from it.
	newer, older uint32
}

// answers are a slot's. The mutex of the slot guards them, save for behind,
// which may be called at any time. The zero value has none, and is believed.
type answers struct {
	all   []answer // by number, less 1
	free  []uint32 // numbers that can be used again
	table atomic.Pointer[answerTable]

	// score is how often counting answers has been right, less how often it
	// has been wrong, between -doubt and doubt.
	score   int8
	doubted atomic.Bool
}

// doubt is how often more counting answers must be wrong than right until it is
// not done any more, and twice that is how often it must be right until it is
// done again. Templates that strip what the model has thought are wrong each
// time, so it is done with within four turns; one client that edits what was
// said is not enough for that, nor is one that does not to go back.
const doubt = 4

// answerTable finds answers by the last full block of their prompt. One writer
// changes it while others read: a reader may miss what is being changed, or see
// the size of another answer for a moment.
type answerTable struct {
	cells      []answerCell // a power of two
	used, live int          // the writer's
}

type answerCell struct {
	key    atomic.Uint64 // of parent; 0 is free, gone was used
	sum    atomic.Uint64
	size   atomic.Uint64 // rest<<32 | blocks
	number uint32        // the writer's
}

const (
	gone       = 1
	cellBytes  = 32
	eachAnswer = 56 + 4
)

func answerKey(parent Hash) uint64 { return parent.Lo | 2 }

// sumOf names the tokens behind the last full block.
func sumOf(parent Hash, ids []uint32) uint64 { return Next(parent, ids).Hi }

// parent is what names the blocks before the one at a depth.
func (p *Prompt) parent(depth int) Hash {
	if depth == 0 {
		return p.Root
	}
	return p.Chain[depth-1]
}

// some: there may be answers. It takes no lock.
func (a *answers) some() bool { return a.table.Load() != nil }

// behind tells how many full blocks of a prompt are known to be an answer, when
// depth full blocks of it are held without. It takes no lock.
func (a *answers) behind(p *Prompt, depth int) int {
	if a.doubted.Load() {
		return 0
	}
	_, n := a.find(p, depth)
	return n
}

// find is behind, believed or not, and returns the cell.
func (a *answers) find(p *Prompt, depth int) (*answerCell, int) {
	t := a.table.Load()
	if t == nil || depth >= len(p.Chain) || p.Block < 1 || depth == 0 && p.Root == (Hash{}) {
		return nil, 0
	}
	parent := p.parent(depth)
	key := answerKey(parent)
	start := depth * p.Block
	mask := uint64(len(t.cells) - 1)
	for i := key * spread >> 32; ; i++ {
		c := &t.cells[i&mask]
		switch c.key.Load() {
		case 0:
			return nil, 0
		case key:
			size := c.size.Load()
			end := start + int(size>>32)
			// The prompt must go on behind the one that was answered.
			if end < len(p.IDs) && sumOf(parent, p.IDs[start:end]) == c.sum.Load() {
				return c, min(int(uint32(size)), len(p.Chain)-depth)
			}
		}
	}
}

// add enters an answer and returns its number, which is not 0.
func (a *answers) add(n answer) uint32 {
	n.newer, n.older = 0, 0
	var number uint32
	if last := len(a.free) - 1; last >= 0 {
		number = a.free[last]
		a.free = a.free[:last]
		a.all[number-1] = n
	} else {
		a.all = append(a.all, n)
		number = uint32(len(a.all))
	}
	t := a.table.Load()
	if t == nil || 4*(t.used+1) > 3*len(t.cells) {
		t = a.rebuild(t)
	}
	key := answerKey(n.parent)
	size := uint64(n.rest)<<32 | uint64(n.blocks)
	mask := uint64(len(t.cells) - 1)
	for i := key * spread >> 32; ; i++ {
		c := &t.cells[i&mask]
		switch k := c.key.Load(); {
		case k == 0:
			c.sum.Store(n.sum)
			c.size.Store(size)
			c.number = number
			c.key.Store(key)
			t.used++
			t.live++
			return number
		case k == key && c.sum.Load() == n.sum && int32(c.size.Load()>>32) == n.rest:
			a.all[c.number-1].newer, a.all[number-1].older = number, c.number
			c.number = number
			c.size.Store(size)
			return number
		}
	}
}

// rebuild makes a table with room for as many again.
func (a *answers) rebuild(old *answerTable) *answerTable {
	n := 16
	if old != nil {
		for n < 3*(old.live+1) {
			n *= 2
		}
	}
	t := &answerTable{cells: make([]answerCell, n)}
	mask := uint64(n - 1)
	if old != nil {
		for j := range old.cells {
			o := &old.cells[j]
			key := o.key.Load()
			if key == 0 || key == gone {
				continue
			}
			i := key * spread >> 32
			for t.cells[i&mask].key.Load() != 0 {
				i++
			}
			c := &t.cells[i&mask]
			c.sum.Store(o.sum.Load())
			c.size.Store(o.size.Load())
			c.number = o.number
			c.key.Store(key)
			t.used++
		}
	}
	t.live = t.used
	a.table.Store(t)
	return t
}

// cell is that of an answer which is the newest of its prompt.
func (a *answers) cell(number uint32) (*answerTable, *answerCell) {
	t := a.table.Load()
	key := answerKey(a.all[number-1].parent)
	mask := uint64(len(t.cells) - 1)
	for i := key * spread >> 32; ; i++ {
		if c := &t.cells[i&mask]; c.number == number && c.key.Load() == key {
			return t, c
		}
	}
}

// shrink says that the last block of an answer has been evicted, and which is
// the last now.
func (a *answers) shrink(number uint32, last ref) {
	n := &a.all[number-1]
	n.blocks--
	n.last = last
	if n.blocks == 0 {
		a.remove(number)
		return
	}
	if n.newer == 0 {
		_, c := a.cell(number)
		c.size.Store(uint64(n.rest)<<32 | uint64(n.blocks))
	}
}

// remove forgets an answer. Its blocks are the caller's.
func (a *answers) remove(number uint32) {
	n := &a.all[number-1]
	switch {
	case n.newer != 0:
		a.all[n.newer-1].older = n.older
	case n.older != 0:
		_, c := a.cell(number)
		c.number = n.older
		c.size.Store(uint64(n.rest)<<32 | uint64(a.all[n.older-1].blocks))
	default:
		t, c := a.cell(number)
		c.key.Store(gone)
		t.live--
	}
	if n.older != 0 {
		a.all[n.older-1].newer = n.newer
	}
	*n = answer{}
	a.free = append(a.free, number)
}

// reset forgets all answers, and keeps how far they are believed: that depends
// on the model's template.
func (a *answers) reset() {
	a.all, a.free = nil, nil
	a.table.Store(nil)
}

// size is the memory that the answers take.
func (a *answers) size() int64 {
	n := int64(eachAnswer * cap(a.all))
	if t := a.table.Load(); t != nil {
		n += int64(cellBytes * len(t.cells))
	}
	return n
}

// proved says whether counting an answer has been right, or would have been.
func (a *answers) proved(right bool) {
	if right {
		a.score = min(a.score+1, doubt)
	} else {
		a.score = max(a.score-1, -doubt)
	}
	switch a.score {
	case doubt:
		a.doubted.Store(false)
	case -doubt:
		a.doubted.Store(true)
	}
}
