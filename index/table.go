package index

import "sync"

// lane is one membership of the table: a slot at a tier. Index hands them out
// densely, so that sets of lanes are short.
type lane uint16

// table says of each block which lanes reach it. It holds what the trees enter:
// a lane that has a block has every block before it in the chain too, so along
// any chain the sets only shrink.
type table struct {
	mu    sync.Mutex // guards lanes
	lanes map[Hash]map[lane]bool
}

func newTable() *table { return &table{lanes: map[Hash]map[lane]bool{}} }

// enter adds a lane to a block's set. It is not in it.
func (t *table) enter(h Hash, l lane) {
	t.mu.Lock()
	defer t.mu.Unlock()
	set := t.lanes[h]
	if set == nil {
		set = map[lane]bool{}
		t.lanes[h] = set
	}
	set[l] = true
}

// leave takes a lane out of a block's set. It is in it.
func (t *table) leave(h Hash, l lane) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.lanes[h], l)
	if len(t.lanes[h]) == 0 {
		delete(t.lanes, h)
	}
}

// match sets depth[l], for each lane l that has the first block of the chain, to
// the number of leading blocks it has. The others are left as they are; so are
// lanes beyond len(depth).
func (t *table) match(depth []int32, chain []Hash) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i, h := range chain {
		for l := range t.lanes[h] {
			if int(l) < len(depth) && (i == 0 || int(depth[l]) == i) {
				depth[l] = int32(i + 1)
			}
		}
	}
}

// bytes is the memory that the table holds.
func (t *table) bytes() int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return int64(len(t.lanes)) * 100
}
