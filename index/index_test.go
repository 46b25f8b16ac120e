package index

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/inferrail/inferrail/index/kvevent"
)

// tell makes a slot hold a chain on the GPU, as far as there is memory.
func tell(x *Index, number int, chain []Hash) int {
	s := x.lock(number)
	if s == nil {
		return 0
	}
	defer s.unlock()
	last := ref(0)
	for i, h := range chain {
		if last = s.tree.add(last, h); last == 0 {
			return i
		}
		if s.tree.holds(last, reason(GPU)) == 0 {
			s.tree.hold(last, reason(GPU))
		}
	}
	return len(chain)
}

func held(x *Index, number int, chain []Hash) Held {
	var l Lookup
	x.Look(&l, &Prompt{Chain: chain})
	return l.Held(number)
}

func conversation(i, blocks int) []Hash {
	return AppendTokens(nil, Root("m", fmt.Sprint(i), nil), numbers(16*blocks), 16)
}

func TestLookTiers(t *testing.T) {
	x := New(Config{})
	c := SlotConfig{Model: "m", BlockSize: 16, Capacity: 100}
	x.Join(2, c)
	x.Join(5, c)
	chain := conversation(0, 10)
	f := func(number int, want Held) {
		t.Helper()
		if got := held(x, number, chain); got != want {
			t.Errorf("slot %d: %v, want %v", number, got, want)
		}
	}
	f(2, Held{})
	hold := func(number int, from, to int, why reason) {
		s := x.lock(number)
		defer s.unlock()
		last := ref(0)
		for i, h := range chain[:to] {
			last = s.tree.add(last, h)
			if i >= from {
				s.tree.hold(last, why)
			}
		}
	}
	hold(2, 0, 3, reason(GPU))
	f(2, Held{3, 3, 3, 3})
	// A slower tier goes on where the faster one ends.
	hold(2, 3, 5, reason(Disk))
	f(2, Held{3, 3, 5, 5})
	hold(2, 2, 4, reason(CPU))
	f(2, Held{3, 4, 5, 5})
	hold(2, 6, 7, reason(GPU))
	f(2, Held{3, 4, 5, 5})
	hold(2, 5, 6, expected)
	f(2, Held{3, 4, 7, 7})
	// Another slot, and those that are none.
	f(5, Held{})
	hold(5, 0, 10, guessed)
	f(5, Held{10, 10, 10, 10})
	for _, number := range []int{-1, 0, 3, 6, 1 << 40} {
		f(number, Held{})
	}
	x.Forget(2)
	f(2, Held{})
	hold(2, 0, 1, reason(Remote))
	f(2, Held{0, 0, 0, 1})
	x.Leave(2)
	f(2, Held{})
	x.Join(2, c)
	f(2, Held{})
	// Of another model nothing is the same.
	c.Model = "n"
	x.Join(5, c)
	f(5, Held{})
	if st := x.Stats(nil); len(st) != 2 || st[0].Slot != 2 || st[1].Slot != 5 || st[1].Guessed != 0 {
		t.Errorf("stats: %+v", st)
	}
}

// TestLookWhileALaneIsMade: a lane that has come since Look does not make the
// slower tier hold less.
func TestLookWhileALaneIsMade(t *testing.T) {
	x := New(Config{})
	x.Join(0, SlotConfig{Model: "m", BlockSize: 16, Capacity: 100})
	chain := conversation(0, 4)
	tell(x, 0, chain[:3])
	var l Lookup
	x.Look(&l, &Prompt{Chain: chain})
	s := x.lock(0)
	r := s.tree.find(0, chain[0])
	s.tree.hold(r, reason(CPU))
	s.unlock()
	if got, want := l.Held(0), (Held{3, 3, 3, 3}); got != want {
		t.Errorf("got %v, want %v", got, want)
	}
	x.Look(&l, &Prompt{Chain: chain})
	if got, want := l.Held(0), (Held{3, 3, 3, 3}); got != want {
		t.Errorf("looked up again: got %v, want %v", got, want)
	}
}

// TestBound: however much engines tell, the index holds no more than it may,
// what came last is there, and a slot that lost some says so.
func TestBound(t *testing.T) {
	const limit = 3 << 20
	x := New(Config{MaxBytes: limit})
	for number := range 4 {
		x.Join(number, SlotConfig{Model: "m", BlockSize: 16, Capacity: 1 << 20})
		s := x.lock(number)
		s.state = Exact
		s.unlock()
	}
	r := rand.New(rand.NewPCG(1, 1))
	check := func() {
		t.Helper()
		if got := x.Totals().Bytes; got > limit+chunkBytes {
			t.Fatalf("%d bytes, the bound is %d", got, limit)
		}
	}
	// The first slot takes it all, in long chains and short.
	for i := range 700 {
		chain := conversation(i, 1+r.IntN(200))
		if n := tell(x, 0, chain); n != len(chain) {
			t.Fatalf("only %d of %d blocks were taken", n, len(chain))
		}
		check()
		if got := held(x, 0, chain); int(got[GPU]) != len(chain) {
			t.Fatalf("of the %d blocks that came last %d are held", len(chain), got[GPU])
		}
	}
	st := x.Stats(nil)
	if st[0].State != Approximate || st[0].Why != "index.max_bytes is too small" || st[1].State != Exact {
		t.Errorf("the slot that lost blocks is %v (%s), another one %v", st[0].State, st[0].Why, st[1].State)
	}
	// The others get their share of it.
	for i := range 700 {
		number := 1 + i%3
		chain := conversation(-1-i, 1+r.IntN(200))
		if n := tell(x, number, chain); n != len(chain) {
			t.Fatalf("only %d of %d blocks were taken", n, len(chain))
		}
		check()
	}
	st = x.Stats(nil)
	for _, a := range st {
		for _, b := range st {
			if a.Blocks[GPU] > 2*b.Blocks[GPU] {
				t.Errorf("slot %d has %d blocks, slot %d %d", a.Slot, a.Blocks[GPU], b.Slot, b.Blocks[GPU])
			}
		}
	}
	// What is asked for again and again outlives what is not.
	dear := conversation(1<<30, 100)
	for i := range 400 {
		tell(x, 0, dear)
		tell(x, 0, conversation(1<<20+i, 100))
	}
	if got := held(x, 0, dear); got[GPU] != 100 {
		t.Errorf("of blocks in use %d are left", got[GPU])
	}
	// A slot that begins anew is whole again.
	x.Forget(0)
	if st := x.Stats(nil); st[0].State != Exact || st[0].Resets != 1 {
		t.Errorf("after Forget the slot is %v", st[0].State)
	}
	for number := range 4 {
		x.Leave(number)
	}
	if got := x.Totals(); got.Entries != 0 || got.Slots != 0 || x.table.bytes() > 0 || x.arena.maps.Load() != 0 {
		t.Errorf("after all have left: %+v", got)
	}
}

// TestBoundEvents: so it is when events tell of nothing but prompts of one block,
// for which every map has its largest share.
func TestBoundEvents(t *testing.T) {
	limit := int64(lessUnderRace(t, 8<<20, 2<<20))
	x := New(Config{MaxBytes: limit})
	x.Join(0, SlotConfig{Model: "m", BlockSize: 2, Capacity: 1 << 20})
	x.SetState(0, Exact, "")
	most := int64(0)
	for i := range uint64(lessUnderRace(t, 150_000, 40_000)) {
		x.Apply(0, []kvevent.Event{{
			Kind: kvevent.Stored, Hashes: []uint64{i * spread}, Tokens: []uint32{uint32(i), 7},
			BlockSize: 2, Group: -1, AdapterID: -1,
		}}, time.Time{})
		most = max(most, x.Totals().Bytes)
	}
	if most > limit+chunkBytes || most < limit*7/8 {
		t.Errorf("up to %d bytes were held, the bound is %d", most, limit)
	}
	st := x.Stats(nil)[0]
	if st.State != Approximate || st.Blocks[GPU] < int(limit/120) {
		t.Errorf("%+v", st)
	}
	if n := x.at(0).told.names.n; n != st.Blocks[GPU] {
		t.Errorf("%d names of %d blocks", n, st.Blocks[GPU])
	}
	x.Untell(0)
	if st := x.Stats(nil)[0]; st.State != Exact || st.Blocks[GPU] != 0 {
		t.Errorf("when all is told anew: %+v", st)
	}
}

// TestBoundTooSmall: a bound that permits nothing is no reason to fail.
func TestBoundTooSmall(t *testing.T) {
	x := New(Config{MaxBytes: 1})
	for number := range 200 {
		x.Join(number, SlotConfig{Model: "m", BlockSize: 16, Capacity: 100})
		tell(x, number, conversation(number, 20))
	}
	if got := x.Totals().Bytes; got > 1<<20 {
		t.Errorf("%d bytes", got)
	}
	for number := range 200 {
		x.Leave(number)
	}
}

// TestChurn: slots, adapters and blocks come and go for long, and the memory
// stays as it was after the first round.
func TestChurn(t *testing.T) {
	x := New(Config{})
	r := rand.New(rand.NewPCG(1, 1))
	adapter := 0
	round := func() int64 {
		for number := range 20 {
			x.Join(number, SlotConfig{Model: "m", BlockSize: 16, Capacity: 1000})
		}
		for range 40 {
			number := r.IntN(20)
			switch r.IntN(8) {
			case 0:
				x.Leave(number)
			case 1:
				x.Forget(number)
			default:
				adapter++
				chain := conversation(adapter, 50)
				tell(x, number, chain)
				if s := x.lock(number); s != nil {
					// It loses others, in no order.
					var told []ref
					for at := s.tree.following(s.tree.top); at != s.tree.top; at = s.tree.following(at) {
						told = append(told, at)
					}
					r.Shuffle(len(told), func(i, j int) { told[i], told[j] = told[j], told[i] })
					for _, at := range told[:max(0, len(told)-200)] {
						// It may have gone with another.
						if s.tree.at(at).state>>reasonsShift != 0 {
							s.tree.release(at, reason(GPU))
						}
					}
					s.unlock()
				}
			}
		}
		return x.arena.made.Load() + x.arena.maps.Load()
	}
	for range 20 {
		round()
	}
	first := round()
	for i := range lessUnderRace(t, 100, 30) {
		if got := round(); got > first+2*chunkBytes {
			t.Fatalf("round %d: %d bytes, %d after the first rounds", i, got, first)
		}
	}
	for number := range 20 {
		x.Leave(number)
	}
	if got := x.arena.maps.Load(); got != 0 {
		t.Errorf("%d bytes of maps are left", got)
	}
	// One that is forgotten goes on with another lane before it gives back the first.
	if lanes := x.lanes.n.Load(); lanes != 21 {
		t.Errorf("there have been %d lanes, for 20 slots at once", lanes)
	}
}

// TestForgettingHoldsNobodyUp: while what a slot has held is dropped, which may be
// a million blocks, requests claim there and slots join.
func TestForgettingHoldsNobodyUp(t *testing.T) {
	if !raceDetector {
		t.Skip("only a build for the race detector can stop in the middle of a change")
	}
	for what, forget := range map[string]func(x *Index){
		"forget":        func(x *Index) { x.Forget(0) },
		"leave":         func(x *Index) { x.Leave(0) },
		"another model": func(x *Index) { x.Join(0, SlotConfig{Model: "other", BlockSize: 16, Capacity: 1000}) },
	} {
		t.Run(what, func(t *testing.T) {
			x := New(Config{})
			x.Join(0, SlotConfig{Model: "m", BlockSize: 16, Capacity: 1000})
			tell(x, 0, conversation(1, 50))
			stopped := false
			x.table.paused = func() {
				x.table.paused = nil
				stopped = true
				done := make(chan struct{})
				go func() {
					defer close(done)
					var c Claim
					x.Claim(&c, 0, &Prompt{}, time.Unix(1, 0))
					x.Release(&c, 0, time.Unix(2, 0))
					x.Join(1, SlotConfig{Model: "m", BlockSize: 16, Capacity: 1000})
				}()
				select {
				case <-done:
				case <-time.After(10 * time.Second):
					t.Error("a claim and a slot that joins wait until all is dropped")
				}
			}
			forget(x)
			if entries := x.Totals().Entries; !stopped || entries != 0 || x.table.bytes() != 0 {
				t.Errorf("there are %d entries and %d bytes of the table left", entries, x.table.bytes())
			}
		})
	}
}

// TestMany: slots come, go, fill and look at the same time, within a bound.
func TestMany(t *testing.T) {
	const limit = 2 << 20
	x := New(Config{MaxBytes: limit})
	config := SlotConfig{Model: "m", BlockSize: 16, Capacity: 1000}
	chains := make([][]Hash, 300)
	for i := range chains {
		chains[i] = conversation(i, 1+i%90)
	}
	var writers, readers sync.WaitGroup
	stop := make(chan struct{})
	for i := range 2 {
		readers.Go(func() {
			r := rand.New(rand.NewPCG(uint64(i), 2))
			var l Lookup
			var st []SlotStats
			for {
				select {
				case <-stop:
					return
				default:
				}
				chain := chains[r.IntN(len(chains))]
				x.Look(&l, &Prompt{Chain: chain})
				for number := range 9 {
					h := l.Held(number)
					for tier := range h {
						if h[tier] < 0 || int(h[tier]) > len(chain) || tier > 0 && h[tier] < h[tier-1] {
							t.Errorf("slot %d holds %v of %d blocks", number, h, len(chain))
							return
						}
					}
				}
				st = x.Stats(st[:0])
				if n := x.Totals(); n.Bytes > limit+chunkBytes*2 {
					t.Errorf("%d bytes", n.Bytes)
					return
				}
			}
		})
	}
	for i := range 4 {
		writers.Go(func() {
			r := rand.New(rand.NewPCG(uint64(i), 3))
			for range 600 {
				number := r.IntN(8)
				chain := chains[r.IntN(len(chains))]
				switch r.IntN(12) {
				case 0:
					x.Leave(number)
				case 1:
					x.Forget(number)
				case 2:
					if s := x.lock(number); s != nil {
						s.tree.clear(reason(r.IntN(Tiers)))
						s.unlock()
					}
				case 3:
					x.Join(number, config)
				case 4:
					x.SetState(number, State(r.IntN(4)), "")
				case 5:
					x.Expire(time.Unix(int64(r.IntN(100)), 0))
				case 6:
					if data := x.AppendSnapshot(nil, number); len(data) > 0 {
						x.Forget(number)
						if err := x.Restore(number, data); err != nil && !strings.Contains(err.Error(), "already") && !strings.Contains(err.Error(), "no such slot") {
							t.Error(err)
						}
					}
				case 7, 8:
					var c Claim
					at := time.Unix(int64(r.IntN(100)), 0)
					x.Claim(&c, number, &Prompt{Chain: chain}, at)
					if r.IntN(2) == 0 {
						x.Prefilled(&c, at)
					}
					if r.IntN(2) == 0 {
						x.Undo(&c)
					} else {
						x.Release(&c, r.IntN(100)-1, at)
					}
				default:
					if s := x.lock(number); s != nil {
						why := reason(r.IntN(Tiers))
						last := ref(0)
						for _, h := range chain {
							at := s.tree.add(last, h)
							if at == 0 {
								break
							}
							s.tree.hold(at, why)
							last = at
						}
						s.unlock()
					}
				}
			}
		})
	}
	writers.Wait()
	close(stop)
	readers.Wait()
	// The lanes are what the trees say.
	for number := range 8 {
		s := x.lock(number)
		if s == nil {
			continue
		}
		for _, chain := range chains {
			var want int32
			last := ref(0)
			for _, h := range chain {
				if last = s.tree.find(last, h); last == 0 || heldBits(s.tree.at(last).state)&1 == 0 {
					break
				}
				want++
			}
			if got := held(x, number, chain); got[GPU] != want {
				t.Errorf("slot %d holds %d of a chain, its tree %d", number, got[GPU], want)
			}
		}
		s.unlock()
	}
	for number := range 8 {
		x.Leave(number)
	}
	if n := x.table.bytes() + x.arena.maps.Load() + x.Totals().Entries; n != 0 {
		t.Errorf("after all have left: %d", n)
	}
}

// TestDoubt: when events have lost something or proved wrong, what they told goes
// with the guess, and the cache is not taken for larger than it is.
func TestDoubt(t *testing.T) {
	for _, state := range []State{Approximate, Mismatched} {
		x := New(Config{})
		x.Join(0, SlotConfig{Model: "m", BlockSize: 16, Capacity: 101})
		x.SetState(0, Exact, "")
		first, second := conversation(1, 60), conversation(2, 60)
		tell(x, 0, first)
		x.SetState(0, Repairing, "")
		if h := held(x, 0, first); h[GPU] != 60 {
			t.Errorf("while events are fetched %d blocks are held of 60 that were told", h[GPU])
		}
		x.SetState(0, state, "why")
		var c Claim
		x.Claim(&c, 0, &Prompt{Chain: second, IDs: numbers(16*60 + 1), Block: 16}, time.Time{})
		x.Prefilled(&c, time.Time{})
		x.Release(&c, 0, time.Time{})
		total := held(x, 0, first)[GPU] + held(x, 0, second)[GPU]
		if total > 100 || total < 90 {
			t.Errorf("state %v: %d blocks are held of a cache of 100", state, total)
		}
	}
}

func TestLookAllocatesNothing(t *testing.T) {
	withoutRace(t)
	x := New(Config{})
	chain := conversation(0, 512)
	for number := range 64 {
		x.Join(number, SlotConfig{Model: "m", BlockSize: 16, Capacity: 1000})
		tell(x, number, chain[:8*number+1])
	}
	var l Lookup
	p := Prompt{Chain: chain}
	sum := 0
	allocs := testing.AllocsPerRun(100, func() {
		x.Look(&l, &p)
		for number := range 64 {
			sum += int(l.Held(number)[GPU])
		}
	})
	if allocs != 0 {
		t.Errorf("%v allocations", allocs)
	}
	if want := 101 * (8*63*32 + 64); sum != want {
		t.Errorf("%d blocks in all, want %d", sum, want)
	}
}

// TestBoundClaims: claims are kept within the bound too. Those in flight keep
// what they use, and when that is all there is, they go on without the rest.
func TestBoundClaims(t *testing.T) {
	const limit = 1 << 20
	x := New(Config{MaxBytes: limit})
	x.Join(0, SlotConfig{Model: "m", BlockSize: 16, Capacity: 1 << 20})
	x.Join(1, SlotConfig{Model: "m", BlockSize: 16, Capacity: 1 << 20, AfterPrefill: true})
	x.Join(2, SlotConfig{Model: "m", BlockSize: 16, Capacity: 1 << 20})
	x.SetState(2, Exact, "")
	r := rand.New(rand.NewPCG(1, 1))
	now := time.Unix(1000, 0)
	for _, most := range []int{3, 1000} {
		var claims []*Claim
		for i := range 3000 {
			now = now.Add(200 * time.Millisecond)
			for len(claims) >= most || len(claims) > 0 && r.IntN(3) == 0 {
				k := r.IntN(len(claims))
				switch r.IntN(3) {
				case 0:
					x.Prefilled(claims[k], now)
				case 1:
					x.Prefilled(claims[k], now)
					x.Release(claims[k], r.IntN(50), now)
					claims = append(claims[:k], claims[k+1:]...)
				case 2:
					x.Undo(claims[k])
					claims = append(claims[:k], claims[k+1:]...)
				}
			}
			chain := conversation(r.IntN(400), 1+r.IntN(100))
			c := new(Claim)
			claims = append(claims, c)
			number := i % 3
			x.Claim(c, number, &Prompt{Chain: chain, IDs: numbers(16*len(chain) + 3), Block: 16}, now)
			if got := x.Totals().Bytes; got > limit+chunkBytes {
				t.Fatalf("%d bytes, the bound is %d", got, limit)
			}
			if most == 3 && number == 0 {
				if h := held(x, number, chain); int(h[GPU]) < len(chain) {
					t.Fatalf("of %d blocks that were sent %d are held", len(chain), h[GPU])
				}
			}
		}
		for _, c := range claims {
			x.Undo(c)
		}
		x.Expire(now.Add(time.Hour))
		for number := range 3 {
			s := x.lock(number)
			if s.tree.blocks[pinned] != 0 || s.tree.blocks[expected] != 0 || s.claims != 0 {
				t.Errorf("slot %d has %v and %d claims after all have ended", number, s.tree.blocks, s.claims)
			}
			for r := s.tree.following(s.tree.top); r != s.tree.top; r = s.tree.following(r) {
				if rec := s.tree.at(r); rec.child == 0 && rec.state>>reasonsShift == 0 && !s.tree.isSpare(r) {
					t.Errorf("slot %d has a record for no reason", number)
				}
			}
			s.unlock()
		}
	}
	for number := range 3 {
		x.Forget(number)
	}
	if got := x.Totals(); got.Entries != 0 || x.table.bytes() != 0 {
		t.Errorf("after all is forgotten: %+v", got)
	}
}

// TestCachedBlocks beside the rule: whole blocks, and never the last token.
func TestCachedBlocks(t *testing.T) {
	for _, block := range []int{1, 3, 16} {
		for tokens := range 50 {
			p := &Prompt{IDs: make([]uint32, tokens), Block: block}
			for held := range 60 {
				want := 0
				for k := 1; k <= held && k*block < tokens; k++ {
					want = k * block
				}
				if got := p.CachedBlocks(int32(held)); got != want {
					t.Errorf("%d blocks of %d held of %d tokens: %d are cached, want %d", held, block, tokens, got, want)
				}
			}
		}
	}
	if n := (&Prompt{}).CachedBlocks(3) + (&Prompt{IDs: make([]uint32, 9)}).CachedBlocks(3); n != 0 {
		t.Errorf("%d are cached of prompts that have no blocks", n)
	}
}
