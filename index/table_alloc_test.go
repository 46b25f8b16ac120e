package index

import (
	"math/rand/v2"
	"testing"
)

// TestTableAllocatesNothing: neither looking up does, nor changing what is there.
func TestTableAllocatesNothing(t *testing.T) {
	withoutRace(t)
	r := rand.New(rand.NewPCG(1, 1))
	table := newTable()
	var chain []Hash
	for i := range 512 {
		h := Hash{r.Uint64(), r.Uint64()}
		chain = append(chain, h)
		for l := lane(i); l < 3000; l += 7 {
			table.enter(h, l)
		}
		for l := range lane(i % 4) {
			table.enter(h, l)
		}
	}
	depth := make([]int32, 3000)
	if n := testing.AllocsPerRun(100, func() { table.match(depth, chain) }); n != 0 {
		t.Errorf("match: %v allocations", n)
	}
	if n := testing.AllocsPerRun(100, func() {
		for _, h := range chain {
			table.enter(h, 2999)
			table.leave(h, 2999)
		}
	}); n != 0 {
		t.Errorf("enter and leave: %v allocations", n)
	}
}
