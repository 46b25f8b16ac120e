package index

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
)

// plainTable is what a table does, without any of the ways that make it fast.
type plainTable map[Hash]map[lane]bool

func (t plainTable) enter(h Hash, l lane) {
	if t[h] == nil {
		t[h] = map[lane]bool{}
	}
	t[h][l] = true
}

func (t plainTable) leave(h Hash, l lane) {
	delete(t[h], l)
	if len(t[h]) == 0 {
		delete(t, h)
	}
}

func (t plainTable) match(depth []int32, chain []Hash) {
	for i, h := range chain {
		for l := range t[h] {
			if int(l) < len(depth) && (i == 0 || int(depth[l]) == i) {
				depth[l] = int32(i + 1)
			}
		}
	}
}

// chains is a family of chains, some of which begin alike, and how many blocks
// of each every lane has: changes keep to what a tree may hold.
type chains struct {
	random *rand.Rand
	parent map[Hash]Hash
	blocks []Hash
	chains [][]Hash
	lanes  []lane
	held   map[lane]map[Hash]int // how many blocks below it are held, too
	model  plainTable
}

// newChains has n chains of up to length blocks, for lanes.
func newChains(r *rand.Rand, n, length int, lanes []lane) *chains {
	c := &chains{random: r, parent: map[Hash]Hash{}, lanes: lanes, held: map[lane]map[Hash]int{}, model: plainTable{}}
	for _, l := range lanes {
		c.held[l] = map[Hash]int{}
	}
	for i := range n {
		var chain []Hash
		if i > 0 && r.IntN(4) > 0 {
			from := c.chains[r.IntN(i)]
			chain = slices.Clone(from[:r.IntN(len(from)+1)])
		}
		for want := len(chain) + 1 + r.IntN(length); len(chain) < want; {
			h := Hash{r.Uint64(), r.Uint64()}
			if r.IntN(10) == 0 {
				// Half of it is as in another one.
				if len(c.blocks) > 0 {
					h.Hi = c.blocks[r.IntN(len(c.blocks))].Hi
				}
			}
			if len(chain) > 0 {
				c.parent[h] = chain[len(chain)-1]
			}
			chain = append(chain, h)
			c.blocks = append(c.blocks, h)
		}
		c.chains = append(c.chains, chain)
	}
	return c
}

// change is one call of enter or leave.
type change struct {
	enter bool
	hash  Hash
	lane  lane
}

// next draws a change that keeps each lane's blocks reached from the first one:
// the first block missing of a chain enters, or one leaves that no other is
// behind of. It is noted as made.
func (c *chains) next() (change, bool) {
	l := c.lanes[c.random.IntN(len(c.lanes))]
	held := c.held[l]
	chain := c.chains[c.random.IntN(len(c.chains))]
	n := 0
	for n < len(chain) {
		if _, ok := held[chain[n]]; !ok {
			break
		}
		n++
	}
	if n < len(chain) && c.random.IntN(9) > 3 {
		h := chain[n]
		held[h] = 0
		if parent, ok := c.parent[h]; ok {
			held[parent]++
		}
		c.model.enter(h, l)
		return change{true, h, l}, true
	}
	if n > 0 && held[chain[n-1]] == 0 {
		h := chain[n-1]
		delete(held, h)
		if parent, ok := c.parent[h]; ok {
			held[parent]--
		}
		c.model.leave(h, l)
		return change{false, h, l}, true
	}
	return change{}, false
}

func (g change) make(t *table) {
	if g.enter {
		t.enter(g.hash, g.lane)
	} else {
		t.leave(g.hash, g.lane)
	}
}

// someLanes are n lanes below bound, in random order.
func someLanes(r *rand.Rand, n, bound int) []lane {
	var lanes []lane
	for _, l := range r.Perm(bound)[:n] {
		lanes = append(lanes, lane(l))
	}
	return lanes
}

// prompt is a chain of the family, or what begins like one.
func (c *chains) prompt() []Hash {
	chain := c.chains[c.random.IntN(len(c.chains))]
	chain = chain[:c.random.IntN(len(chain)+1)]
	if c.random.IntN(3) == 0 {
		chain = append(slices.Clone(chain), Hash{c.random.Uint64(), 1}, Hash{c.random.Uint64(), 2})
	}
	return chain
}

// check counts the blocks of a table, and checks its bookkeeping.
func (t *table) check(tb testing.TB) (blocks int) {
	var size int64
	for i := range t.shards {
		s, p := &t.shards[i], t.parts[i].Load()
		n, used := 0, 0
		passed := make([]int, len(p.groups))
		for at := range p.groups {
			g := &p.groups[at]
			for k := range g.entries {
				e := &g.entries[k]
				tag := uint64(byte(g.control >> (8 * k)))
				if (tag == 0) != (e.set.count() == 0) {
					tb.Fatalf("shard %d, group %d: tag %d of a set of %d lanes", i, at, tag, e.set.count())
				}
				if tag == 0 {
					continue
				}
				place := t.place(Hash{e.hi, e.lo})
				if tag != tagAt(place) || shardAt(place) != i {
					tb.Fatalf("shard %d, group %d: another one's block", i, at)
				}
				for from := groupAt(place, len(p.groups)); from != at; from = (from + 1) % len(p.groups) {
					passed[from]++
				}
				n++
				if e.set.kind() > maxInline {
					used += 1 << e.set.class()
				}
			}
		}
		for at := range p.groups {
			if got := int(p.groups[at].control >> passedShift); got != passed[at] {
				tb.Fatalf("shard %d, group %d: passed by %d, counted %d", i, at, passed[at], got)
			}
		}
		if n != s.blocks || used != s.used {
			tb.Fatalf("shard %d: %d blocks and %d words, counted %d and %d", i, n, used, s.blocks, s.used)
		}
		blocks += n
		size += p.bytes()
	}
	if size != t.bytes() {
		tb.Fatalf("%d bytes are counted as %d", size, t.bytes())
	}
	return blocks
}

func TestTableAgainstModel(t *testing.T) {
	for name, lanes := range map[string]struct{ n, bound int }{
		"one": {1, 1}, "few": {5, 64}, "dense": {64, 64}, "spread": {70, 1000}, "many": {1000, 1000}, "beyond": {90, 9000}, "all": {40, 1 << 16},
	} {
		t.Run(name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(1, uint64(lanes.n)))
			all := someLanes(r, lanes.n, lanes.bound)
			if name == "all" {
				all[0] = 1<<16 - 1
			}
			c := newChains(r, 12, 30, all)
			table := newTable()
			size := int(slices.Max(all)) + 1
			if name == "beyond" {
				size -= 3000
			}
			got, want := make([]int32, size), make([]int32, size)
			for step := range lessUnderRace(t, 30000, 10000) {
				if g, ok := c.next(); ok {
					g.make(table)
					if r.IntN(8) == 0 {
						// What is so already stays so.
						g.make(table)
					}
				}
				if step%50 > 0 {
					continue
				}
				prompt := c.prompt()
				clear(got)
				clear(want)
				table.match(got, prompt)
				c.model.match(want, prompt)
				if !slices.Equal(got, want) {
					t.Fatalf("step %d, %d blocks: got %v, want %v", step, len(prompt), got, want)
				}
			}
			if n := table.check(t); n != len(c.model) {
				t.Errorf("%d blocks, want %d", n, len(c.model))
			}
			for h, set := range c.model {
				for l := range set {
					table.leave(h, l)
				}
			}
			if n := table.check(t); n != 0 {
				t.Errorf("%d blocks when all have left", n)
			}
			if n := table.bytes(); n != 0 {
				t.Errorf("%d bytes when all have left", n)
			}
		})
	}
}

// TestTableBadHashes: hashes that are far from random do no harm.
func TestTableBadHashes(t *testing.T) {
	table, model := newTable(), plainTable{}
	var chain []Hash
	for i := range uint64(2000) {
		chain = append(chain, Hash{0, i}, Hash{i << 40, 7})
	}
	for _, h := range chain {
		table.enter(h, 3)
		model.enter(h, 3)
	}
	var got, want [4]int32
	table.match(got[:], chain)
	model.match(want[:], chain)
	if got != want {
		t.Errorf("got %v, want %v", got, want)
	}
	if n := table.check(t); n != len(model) {
		t.Errorf("%d blocks, want %d", n, len(model))
	}
}

// TestTableStopped: a look-up between any two steps of a change ends, and finds
// what was before or what is after.
func TestTableStopped(t *testing.T) {
	if !raceDetector {
		t.Skip("only a build for the race detector can be stopped")
	}
	for _, lanes := range []struct{ n, bound int }{{6, 6}, {9, 900}, {40, 64}, {40, 400}, {30, 3000}} {
		t.Run(fmt.Sprintf("%d of %d", lanes.n, lanes.bound), func(t *testing.T) {
			r := rand.New(rand.NewPCG(2, uint64(lanes.bound)))
			c := newChains(r, 4, 12, someLanes(r, lanes.n, lanes.bound))
			table := newTable()
			var prompt []Hash
			before, after, got := make([]int32, lanes.bound), make([]int32, lanes.bound), make([]int32, lanes.bound)
			stops, inside := 0, false
			table.paused = func() {
				if inside {
					return
				}
				inside = true
				defer func() { inside = false }()
				stops++
				clear(got)
				table.match(got, prompt)
				if !slices.Equal(got, before) && !slices.Equal(got, after) {
					t.Fatalf("got %v, want %v or %v", got, before, after)
				}
			}
			for range 4000 {
				prompt = c.chains[r.IntN(len(c.chains))]
				clear(before)
				clear(after)
				c.model.match(before, prompt)
				g, ok := c.next()
				if !ok {
					continue
				}
				c.model.match(after, prompt)
				g.make(table)
			}
			table.check(t)
			if stops < 4000 {
				t.Errorf("only %d stops", stops)
			}
		})
	}
}

// TestTableReused: a look-up is stopped between any two of its steps while
// blocks that it does not ask for come and go in the very entries and words
// that it is reading. It finds what was there before, after, or when the block
// that makes room for them had left.
func TestTableReused(t *testing.T) {
	if !raceDetector {
		t.Skip("only a build for the race detector can be stopped")
	}
	r := rand.New(rand.NewPCG(3, 3))
	for _, bound := range []int{3, 12, 64, 900} {
		t.Run(fmt.Sprint(bound), func(t *testing.T) {
			lanes := someLanes(r, min(bound, 12), bound)
			for round := range 300 {
				table, model := newTable(), plainTable{}
				// All blocks are in one shard, so that they take each other's place.
				var pool []Hash
				for len(pool) < 12 {
					if h := (Hash{r.Uint64(), r.Uint64()}); shardAt(table.place(h)) == 5 {
						pool = append(pool, h)
					}
				}
				chain := pool[:1+r.IntN(4)]
				for i, h := range chain {
					for _, l := range lanes[:len(lanes)-i*len(lanes)/5] {
						table.enter(h, l)
						model.enter(h, l)
					}
				}
				// The asked-for block behind which the others come and go leaves, its
				// entry is taken by others with other lanes, and it returns.
				stop, at := r.IntN(60), 0
				others := pool[len(chain):]
				before, between, after, got := make([]int32, bound), make([]int32, bound), make([]int32, bound), make([]int32, bound)
				model.match(before, chain)
				gone := chain[len(chain)-1]
				returns := r.IntN(2) == 0
				table.paused = func() {
					if at++; at-1 != stop {
						return
					}
					table.paused = nil
					had := slices.Sorted(maps.Keys(model[gone]))
					for _, l := range had {
						table.leave(gone, l)
						model.leave(gone, l)
					}
					model.match(between, chain)
					for i, h := range others {
						for _, l := range lanes[i%len(lanes):] {
							table.enter(h, l)
						}
					}
					if returns {
						for i, h := range others {
							for _, l := range lanes[i%len(lanes):] {
								table.leave(h, l)
							}
						}
						for _, l := range had[:len(had)/2] {
							table.enter(gone, l)
							model.enter(gone, l)
						}
					}
				}
				table.match(got, chain)
				model.match(after, chain)
				for l := range got {
					if want := []int32{before[l], between[l], after[l]}; !slices.Contains(want, got[l]) {
						t.Fatalf("round %d, stopped at %d of %d, lane %d: got %d, want one of %v", round, stop, at, l, got[l], want)
					}
				}
				table.paused = nil
				table.check(t)
			}
		})
	}
}

// TestTableReaders: while writers change all that they may, what stays is found
// in full by readers, and nothing is found that never was.
func TestTableReaders(t *testing.T) {
	for _, lanes := range []int{8, 60, 700} {
		t.Run(fmt.Sprint(lanes), func(t *testing.T) {
			table := newTable()
			r := rand.New(rand.NewPCG(4, uint64(lanes)))
			var chain []Hash
			for range 100 {
				chain = append(chain, Hash{r.Uint64(), r.Uint64()})
			}
			// An even lane has a number of blocks for good. An odd one's changes
			// between none and its limit.
			limit := make([]int, lanes)
			for l := range limit {
				limit[l] = 1 + r.IntN(len(chain))
				if l%2 == 0 {
					for _, h := range chain[:limit[l]] {
						table.enter(h, lane(l))
					}
				}
			}
			var writers, readers sync.WaitGroup
			var done atomic.Bool
			for w := range 3 {
				writers.Go(func() {
					r := rand.New(rand.NewPCG(5, uint64(w)))
					held := make([]int, lanes)
					var other []Hash
					for range 3000 {
						l := 1 + 2*(3*r.IntN((lanes/2+2)/3)+w)
						if l < lanes {
							if n := r.IntN(limit[l] + 1); r.IntN(50) == 0 {
								for ; held[l] < n; held[l]++ {
									table.enter(chain[held[l]], lane(l))
								}
								for ; held[l] > n; held[l]-- {
									table.leave(chain[held[l]-1], lane(l))
								}
							} else if held[l] > 0 && r.IntN(2) == 0 {
								held[l]--
								table.leave(chain[held[l]], lane(l))
							} else if held[l] < limit[l] {
								table.enter(chain[held[l]], lane(l))
								held[l]++
							}
						}
						// Others take and give entries.
						if len(other) < 500 || r.IntN(2) == 0 {
							other = append(other, Hash{r.Uint64(), r.Uint64()})
							table.enter(other[len(other)-1], lane(r.IntN(lanes))/2*2)
						} else if i := r.IntN(len(other)); true {
							for l := 0; l < lanes; l += 2 {
								table.leave(other[i], lane(l))
							}
							other[i] = other[len(other)-1]
							other = other[:len(other)-1]
						}
					}
				})
			}
			for range 2 {
				readers.Go(func() {
					depth := make([]int32, lanes)
					for looks := 0; looks < 100 || !done.Load(); looks++ {
						clear(depth)
						table.match(depth, chain)
						for l, d := range depth {
							if int(d) > limit[l] || l%2 == 0 && int(d) != limit[l] {
								t.Errorf("lane %d: %d blocks of %d", l, d, limit[l])
								return
							}
						}
					}
				})
			}
			writers.Wait()
			done.Store(true)
			readers.Wait()
			table.check(t)
			depth := make([]int32, lanes)
			table.match(depth, chain)
			for l, d := range depth {
				if l%2 == 0 && int(d) != limit[l] {
					t.Errorf("lane %d: %d blocks in the end, want %d", l, d, limit[l])
				}
			}
		})
	}
}

// TestTableFlat: as many blocks come as go, always others. The memory stays.
func TestTableFlat(t *testing.T) {
	r := rand.New(rand.NewPCG(6, 6))
	table := newTable()
	type entered struct {
		h     Hash
		lanes []lane
	}
	var held []entered
	var most int64
	steps := lessUnderRace(t, 60000, 15000)
	for step := range steps {
		e := entered{Hash{r.Uint64(), r.Uint64()}, someLanes(r, 1+r.IntN(9), 300)}
		for _, l := range e.lanes {
			table.enter(e.h, l)
		}
		held = append(held, e)
		if len(held) > 3000 {
			i := r.IntN(len(held))
			for _, l := range held[i].lanes {
				table.leave(held[i].h, l)
			}
			held[i] = held[len(held)-1]
			held = held[:len(held)-1]
		}
		if step == steps/3 {
			most = table.bytes()
		}
	}
	if now := table.bytes(); now > most+most/4 {
		t.Errorf("%d bytes after much change, %d before", now, most)
	}
	table.check(t)
}

// FuzzTable makes changes and look-ups from bytes.
func FuzzTable(f *testing.F) {
	f.Add([]byte("abcdefghijklmnop"), uint16(5))
	f.Add([]byte{0, 1, 2, 3, 128, 129, 130, 131, 255, 254, 253}, uint16(999))
	f.Add([]byte{}, uint16(0))
	f.Fuzz(func(t *testing.T, data []byte, spread uint16) {
		table, model := newTable(), plainTable{}
		var chain []Hash
		for i := range uint64(16) {
			chain = append(chain, Hash{i, i * i})
		}
		depth := map[lane]int{}
		got, want := make([]int32, 40000), make([]int32, 40000)
		for i, b := range data {
			l := lane(b&15) * lane(spread)
			if d := depth[l]; b < 192 && d < len(chain) {
				table.enter(chain[d], l)
				model.enter(chain[d], l)
				depth[l]++
			} else if d > 0 {
				table.leave(chain[d-1], l)
				model.leave(chain[d-1], l)
				depth[l]--
			}
			if i%16 == 0 || i == len(data)-1 {
				clear(got)
				clear(want)
				table.match(got, chain[:1+b%16])
				model.match(want, chain[:1+b%16])
				if !slices.Equal(got, want) {
					t.Fatalf("after %d changes: got and want differ", i)
				}
			}
		}
		if n := table.check(t); n != len(model) {
			t.Fatalf("%d blocks, want %d", n, len(model))
		}
	})
}
