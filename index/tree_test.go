package index

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// newTree returns a tree of its own, in an index of a size.
func newTree(t testing.TB, limit int64) *tree {
	t.Helper()
	x := New(Config{MaxBytes: limit})
	x.Join(0, SlotConfig{Model: "m", BlockSize: 16, Capacity: 1 << 30})
	return &x.at(0).tree
}

// wood is a set of blocks that prompts may have, some as the beginning of
// others: block i is below before[i], -1 for the first of a chain.
type wood struct {
	before []int
	hash   []Hash
}

func newWood(r *rand.Rand, n int) *wood {
	w := &wood{}
	for i := range n {
		before, parent := -1, Root("m", "", nil)
		switch k := r.IntN(20); {
		case i > 0 && k < 12:
			before = i - 1
		case i > 0 && k < 17:
			before = r.IntN(i)
		case i > 0 && k < 19:
			before = 0 // which becomes one with many below it
		}
		if before >= 0 {
			parent = w.hash[before]
		}
		w.before = append(w.before, before)
		w.hash = append(w.hash, Next(parent, []uint32{uint32(i)}))
	}
	return w
}

// path is the chain of blocks that ends with block i.
func (w *wood) path(i int) []int {
	var path []int
	for ; i >= 0; i = w.before[i] {
		path = append(path, i)
	}
	slices.Reverse(path)
	return path
}

func (w *wood) chain(i int) []Hash {
	var chain []Hash
	for _, b := range w.path(i) {
		chain = append(chain, w.hash[b])
	}
	return chain
}

// plainTree is what a tree should hold: the count of each reason of each block.
type plainTree map[int]*[reasons]int

func (p plainTree) heldAt(b int, tier Tier) bool {
	n := p[b]
	if n == nil {
		return false
	}
	sum := n[guessed] + n[expected]
	for t := range tier + 1 {
		sum += n[t]
	}
	return sum > 0
}

// depth counts the leading blocks of a path that are held.
func (p plainTree) depth(path []int, tier Tier) (n int) {
	for n < len(path) && p.heldAt(path[n], tier) {
		n++
	}
	return n
}

// checkTree compares everything that can be seen of a tree.
func checkTree(t *testing.T, tr *tree, w *wood, p plainTree, spares map[ref]int) {
	t.Helper()
	// The records: those with a reason and all before them.
	kept := map[int]bool{}
	var blocks [reasons]int
	for b, n := range p {
		for why, n := range n {
			if n > 0 {
				blocks[why]++
				for _, b := range w.path(b) {
					kept[b] = true
				}
			}
		}
	}
	for _, at := range spares {
		if at >= 0 {
			for _, b := range w.path(at) {
				kept[b] = true
			}
		}
	}
	if tr.blocks != blocks {
		t.Fatalf("blocks by reason: got %v, want %v", tr.blocks, blocks)
	}
	if want := len(kept) + len(spares); tr.records != want {
		t.Fatalf("%d records, want %d", tr.records, want)
	}
	refs := make([]ref, len(w.before))
	for b := range w.before {
		parent := ref(0)
		if before := w.before[b]; before >= 0 {
			if parent = refs[before]; parent == 0 {
				continue
			}
		}
		r := tr.find(parent, w.hash[b])
		refs[b] = r
		if (r != 0) != kept[b] {
			t.Fatalf("block %d: record %d, want one: %v", b, r, kept[b])
		}
		if r == 0 {
			continue
		}
		if tr.hash(r) != w.hash[b] || tr.parent(r) != parent || tr.isSpare(r) {
			t.Fatalf("block %d: record %d is another's", b, r)
		}
		for why := range reasons {
			want := 0
			if p[b] != nil {
				want = p[b][why]
			}
			if got := tr.holds(r, why); got != want {
				t.Fatalf("block %d is held %d times for %d, want %d", b, got, why, want)
			}
		}
	}
	// The leaves that may go.
	listed := map[ref]bool{}
	for r := tr.leaves.first; r != 0; r = tr.after(r) {
		listed[r] = true
	}
	if len(listed) != tr.leaves.n {
		t.Fatalf("%d leaves are listed, and counted %d", len(listed), tr.leaves.n)
	}
	for r := tr.following(tr.top); r != tr.top; r = tr.following(r) {
		told, other := 0, 0
		for why := range reasons {
			if why < Tiers {
				told += tr.holds(r, why)
			} else {
				other += tr.holds(r, why)
			}
		}
		if want := tr.at(r).child == 0 && told > 0 && other == 0 && !tr.isSpare(r) && !tr.linked(nil, r); want != listed[r] {
			t.Fatalf("record %d is among the leaves: %v, want %v", r, listed[r], want)
		}
	}
	// The lanes.
	depth := make([]int32, tr.lanes.n.Load())
	for b := range w.before {
		path, chain := w.path(b), w.chain(b)
		clear(depth)
		tr.arena.table.match(depth, chain)
		for tier := range Tier(Tiers) {
			l, ok := tr.lane.of(tier)
			if !ok {
				continue
			}
			if got, want := int(depth[l]), p.depth(path, tier); got != want {
				t.Fatalf("path to %d at tier %d: %d blocks reached, want %d", b, tier, got, want)
			}
		}
	}
}

// TestTreeAgainstModel: after any sequence of changes a tree holds what counts
// kept in a map say.
func TestTreeAgainstModel(t *testing.T) {
	for seed := range uint64(lessUnderRace(t, 25, 8)) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 1))
			w := newWood(r, 10+r.IntN(120))
			tr := newTree(t, 0)
			p := plainTree{}
			refs := map[int]ref{}
			spares := map[ref]int{}
			tiers := 1 + r.IntN(Tiers)
			why := func() reason {
				if k := r.IntN(8); k < 3 {
					return guessed + reason(k)
				}
				return reason(r.IntN(tiers))
			}
			// gone forgets the refs of records that should not be there any more.
			gone := func() {
				for b := range refs {
					keep := false
					for o, n := range p {
						keep = keep || *n != [reasons]int{} && slices.Contains(w.path(o), b)
					}
					for _, at := range spares {
						keep = keep || at >= 0 && slices.Contains(w.path(at), b)
					}
					if !keep {
						delete(refs, b)
					}
				}
			}
			for step := range 300 {
				b := r.IntN(len(w.before))
				switch k := r.IntN(100); {
				case k < 40: // hold some blocks up to b, perhaps often
					y, often, some := why(), 1, r.IntN(3) == 0
					if r.IntN(10) == 0 {
						often = 1 + r.IntN(200)
					}
					parent := ref(0)
					for _, b := range w.path(b) {
						parent = tr.add(parent, w.hash[b])
						refs[b] = parent
						if some && r.IntN(2) == 0 {
							continue
						}
						if p[b] == nil {
							p[b] = &[reasons]int{}
						}
						for range often {
							p[b][y]++
							tr.hold(parent, y)
						}
					}
					tr.drop(parent)
					gone()
				case k < 80: // release blocks in any order
					y := why()
					blocks := r.Perm(len(w.before))[:r.IntN(len(w.before))]
					for _, b := range blocks {
						at, ok := refs[b]
						if !ok {
							continue
						}
						had := p[b] != nil && p[b][y] > 0
						if tr.release(at, y) != had {
							t.Fatalf("release of block %d for %d: want %v", b, y, had)
						}
						if had {
							p[b][y]--
							gone()
						}
					}
				case k < 84:
					y := why()
					tr.clear(y)
					for _, n := range p {
						n[y] = 0
					}
					gone()
				case k < 92: // a spare record, below a block or none
					at := ref(0)
					below := -1
					if o, ok := refs[b]; ok {
						at, below = o, b
					}
					s := tr.spareRecord(at)
					if !tr.isSpare(s) || tr.parent(s) != at {
						t.Fatalf("spare record %d", s)
					}
					spares[s] = below
				case k < 98:
					for s := range spares {
						tr.drop(s)
						delete(spares, s)
						break
					}
					gone()
				case k < 99:
					tr.empty()
					clear(p)
					clear(refs)
					clear(spares)
				}
				if step%10 == 0 {
					checkTree(t, tr, w, p, spares)
				}
			}
			checkTree(t, tr, w, p, spares)
			tr.close()
			if n := tr.arena.table.bytes() + tr.arena.maps.Load(); n != 0 {
				t.Errorf("%d bytes are left", n)
			}
			if n := len(tr.arena.spare)*batchRecords + batchRecords; n != len(tr.arena.chunks)*chunkRecords {
				t.Errorf("%d records of %d chunks are left", n, len(tr.arena.chunks))
			}
		})
	}
}

// TestTreeLists: lists keep the order in which a slice has it.
func TestTreeLists(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	tr := newTree(t, 0)
	var l list
	var want, out []ref
	for range 40 {
		out = append(out, tr.spareRecord(0))
	}
	for range 5000 {
		switch {
		case len(out) > 0 && r.IntN(2) == 0:
			i := r.IntN(len(out))
			at := out[i]
			out = slices.Delete(out, i, i+1)
			if r.IntN(2) == 0 {
				tr.push(&l, at)
				want = append(want, at)
			} else {
				k, before := r.IntN(len(want)+1), ref(0)
				if k > 0 {
					before = want[k-1]
				}
				tr.enlist(&l, at, before)
				want = slices.Insert(want, k, at)
			}
		case len(want) > 0:
			i := r.IntN(len(want))
			tr.unlink(&l, want[i])
			out = append(out, want[i])
			want = slices.Delete(want, i, i+1)
		}
		var got []ref
		for at := l.first; at != 0; at = tr.after(at) {
			got = append(got, at)
		}
		if !slices.Equal(got, want) || l.n != len(want) {
			t.Fatalf("got %v (%d), want %v", got, l.n, want)
		}
		for _, at := range out {
			if tr.linked(&l, at) {
				t.Fatalf("%d is out and in the list", at)
			}
		}
		for _, at := range want {
			if !tr.linked(&l, at) {
				t.Fatalf("%d is in the list and out", at)
			}
		}
	}
}

// TestTreeRemovesInAnyOrder: a long chain, or many blocks below one, are removed
// in any order in time that grows as their number does. If it grew as its square,
// this would take an hour.
func TestTreeRemovesInAnyOrder(t *testing.T) {
	n := lessUnderRace(t, 200_000, 10_000)
	r := rand.New(rand.NewPCG(1, 1))
	order := make([]int, n)
	for i := range order {
		order[i] = i
	}
	orders := map[string]func(){
		"first to last": func() { slices.Sort(order) },
		"last to first": func() { slices.Sort(order); slices.Reverse(order) },
		"random":        func() { r.Shuffle(n, func(i, j int) { order[i], order[j] = order[j], order[i] }) },
	}
	for shape, parent := range map[string]func(before ref, i int) ref{
		"chain": func(before ref, i int) ref { return before },
		"fan":   func(before ref, i int) ref { return 0 },
		"tree": func(before ref, i int) ref {
			if i%100 == 0 {
				return 0
			}
			return before
		},
	} {
		for name, sort := range orders {
			tr := newTree(t, 0)
			refs := make([]ref, n)
			last := ref(0)
			for i := range refs {
				last = tr.add(parent(last, i), Hash{uint64(i), r.Uint64()})
				tr.hold(last, reason(GPU))
				refs[i] = last
			}
			sort()
			start := time.Now()
			for _, i := range order {
				if !tr.release(refs[i], reason(GPU)) {
					t.Fatalf("%s, %s: block %d is not held", shape, name, i)
				}
			}
			if d := time.Since(start); d > time.Minute {
				t.Errorf("%s, %s: it took %v", shape, name, d)
			}
			if tr.records != 0 || tr.arena.table.bytes() != 0 {
				t.Errorf("%s, %s: %d records are left", shape, name, tr.records)
			}
		}
	}
}

// TestTreeGivesUp: the end of the chain goes first that was told of or asked for
// the longest time ago, then what is before it; what other prompts go on from
// outlives what hung below it, and what requests use stays.
func TestTreeGivesUp(t *testing.T) {
	tr := newTree(t, 0)
	names := map[Hash]string{}
	refs := map[string]ref{}
	tell := func(parent string, blocks ...string) {
		last := refs[parent]
		for _, name := range blocks {
			h := Next(Root("m", "", nil), []uint32{uint32(name[0]), uint32(name[1])})
			names[h] = name
			last = tr.add(last, h)
			if tr.holds(last, reason(GPU)) == 0 {
				tr.hold(last, reason(GPU))
			}
			refs[name] = last
		}
	}
	f := func(n int, want ...string) {
		t.Helper()
		var got []string
		for range n {
			before := map[string]bool{}
			for r := tr.following(tr.top); r != tr.top; r = tr.following(r) {
				before[names[tr.hash(r)]] = true
			}
			if !tr.giveUp() {
				got = append(got, "nothing")
				break
			}
			for r := tr.following(tr.top); r != tr.top; r = tr.following(r) {
				delete(before, names[tr.hash(r)])
			}
			for name := range before {
				got = append(got, name)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("got %v, want %v", got, want)
		}
	}
	tell("", "s0", "s1")
	tell("s1", "a0", "a1")
	tell("s1", "b0", "b1")
	tell("", "c0", "c1")
	f(1, "a1")
	// Asked for again, what is left of the first comes after the others.
	tell("", "s0", "s1", "a0")
	f(2, "b1", "b0")
	// What a request uses stays.
	tr.hold(refs["c1"], pinned)
	f(1, "a0")
	tr.release(refs["c1"], pinned)
	// The prefix of two, alone now, has been used as late as they; the other
	// chain, of which a request has just ended, later.
	tell("", "d0")
	f(6, "s1", "s0", "c1", "c0", "d0", "nothing")
}

func TestTreeAllocatesNothing(t *testing.T) {
	withoutRace(t)
	tr := newTree(t, 0)
	chain := conversation(0, 512)
	refs := make([]ref, len(chain))
	var l list
	walk(tr, refs, chain)
	for _, r := range refs {
		tr.hold(r, reason(GPU))
	}
	allocs := testing.AllocsPerRun(100, func() {
		walk(tr, refs, chain)
		for _, r := range refs {
			tr.hold(r, guessed)
			tr.push(&l, r)
		}
		for _, r := range refs {
			tr.unlink(&l, r)
			tr.release(r, guessed)
		}
		tr.drop(tr.spareRecord(refs[7]))
	})
	if allocs != 0 {
		t.Errorf("%v allocations", allocs)
	}
}
