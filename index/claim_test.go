package index

import (
	"math/rand/v2"
	"sync"
	"testing"
	"time"
)

// turns makes the prompts of a conversation, each with its chain.
func turns(r *rand.Rand, n, tokens, block int) []*Prompt {
	root := Root("m", "", nil)
	var prompts []*Prompt
	var ids []uint32
	for range n {
		ids = append(ids, randomIDs(r, tokens)...)
		said := ids[:len(ids):len(ids)]
		prompts = append(prompts, &Prompt{Root: root, IDs: said, Block: block, Chain: AppendTokens(nil, root, said, block)})
	}
	return prompts
}

// TestUndoUnderRaces: engines that are followed exactly refuse all prompts that they are
// sent. The records of one slot's blocks go to the other's, which touches them alone.
func TestUndoUnderRaces(t *testing.T) {
	x := New(Config{})
	var slots sync.WaitGroup
	for slot := range 2 {
		x.Join(slot, SlotConfig{Model: "m", BlockSize: 4, Capacity: 1 << 20})
		x.SetState(slot, Exact, "")
		r := rand.New(rand.NewPCG(1, uint64(slot)))
		prompts := turns(r, 40, 4*9, 4)
		slots.Go(func() {
			var claims [4]Claim
			for range 300 {
				for i := range claims {
					x.Claim(&claims[i], slot, prompts[r.IntN(len(prompts))], time.Unix(1000, 0))
				}
				for i := range claims {
					x.Undo(&claims[i])
				}
			}
		})
	}
	slots.Wait()
	for _, s := range x.Stats(nil) {
		if s.Claims != 0 || s.Blocks != ([Tiers]int{}) {
			t.Errorf("slot %d has %d claims, and %v blocks", s.Slot, s.Claims, s.Blocks)
		}
	}
}

// TestReadersOfAnswers: look-ups ask for answers while claims add, show, evict
// and forget them.
func TestReadersOfAnswers(t *testing.T) {
	x := New(Config{})
	x.Join(0, SlotConfig{Model: "m", BlockSize: 4, Capacity: 200})
	r := rand.New(rand.NewPCG(1, 1))
	var talks [][]*Prompt
	for range 8 {
		talks = append(talks, turns(r, 6, 25, 4))
	}
	var readers sync.WaitGroup
	stop := make(chan struct{})
	for i := range 2 {
		readers.Add(1)
		go func() {
			defer readers.Done()
			r := rand.New(rand.NewPCG(2, uint64(i)))
			var l Lookup
			for {
				select {
				case <-stop:
					return
				default:
				}
				talk := talks[r.IntN(len(talks))]
				p := talk[r.IntN(len(talk))]
				x.Look(&l, p)
				if h := l.Held(0); int(h[GPU]) > len(p.Chain) || p.Cached(h) >= len(p.IDs) {
					t.Errorf("held %v of %d blocks", h, len(p.Chain))
					return
				}
			}
		}()
	}
	now := time.Unix(1000, 0)
	for range 2000 {
		talk := talks[r.IntN(len(talks))]
		for i, p := range talk {
			var c Claim
			x.Claim(&c, 0, p, now)
			x.Prefilled(&c, now)
			if r.IntN(10) == 0 {
				x.Undo(&c)
			}
			x.Release(&c, 1+r.IntN(20), now)
			if i > r.IntN(10) {
				break
			}
		}
		if r.IntN(200) == 0 {
			x.Forget(0)
		}
	}
	close(stop)
	readers.Wait()
	s := x.lock(0)
	defer s.unlock()
	checkShadow(t, s)
}

// TestPrefilledAtOnce: TryPrefilled waits for nobody, and leaves long prompts to
// others, which costs nothing but the time.
func TestPrefilledAtOnce(t *testing.T) {
	x := New(Config{})
	x.Join(0, SlotConfig{Model: "m", BlockSize: 4, Capacity: 4000, AfterPrefill: true})
	now := time.Unix(1000, 0)
	held := func(p *Prompt) int {
		var l Lookup
		x.Look(&l, p)
		return int(l.Held(0)[GPU])
	}
	prompts := turns(rand.New(rand.NewPCG(1, 1)), 2, 800, 4)
	short, long := prompts[0], prompts[1] // by 200 blocks, and with 200 more
	other := turns(rand.New(rand.NewPCG(2, 2)), 1, 1600, 4)[0]

	var c Claim
	x.Claim(&c, 0, short, now)
	s := x.lock(0)
	if x.TryPrefilled(&c, now) {
		t.Error("done under another one's lock")
	}
	s.unlock()
	if n := held(short); n != 0 {
		t.Errorf("%d blocks are held before it was told", n)
	}
	if !x.TryPrefilled(&c, now) || held(short) != len(short.Chain) {
		t.Errorf("%d blocks are held", held(short))
	}
	var more, all Claim
	if x.Claim(&more, 0, long, now); !x.TryPrefilled(&more, now) || held(long) != len(long.Chain) {
		t.Errorf("%d blocks are held of a prompt of which the first were known", held(long))
	}
	if x.Claim(&all, 0, other, now); x.TryPrefilled(&all, now) || held(other) != 0 {
		t.Errorf("%d blocks of a long prompt are held", held(other))
	}
	x.Prefilled(&all, now)
	if held(other) != len(other.Chain) {
		t.Errorf("%d blocks are held", held(other))
	}
	x.Forget(0)
	if void := (Claim{}); !x.TryPrefilled(&void, now) || !x.TryPrefilled(&more, now) || held(short) != 0 {
		t.Error("a claim that is void is left to others")
	}
}

// TestClaimsAllocateNothing beside the records, which an index that is full has.
func TestClaimsAllocateNothing(t *testing.T) {
	withoutRace(t)
	for _, c := range []SlotConfig{
		{Model: "m", BlockSize: 16, Capacity: 2000},
		{Model: "m", BlockSize: 16, Capacity: 2000, AfterPrefill: true},
	} {
		for _, state := range []State{Approximate, Exact} {
			x := New(Config{})
			x.Join(0, c)
			x.SetState(0, state, "")
			prompts := turns(rand.New(rand.NewPCG(1, 1)), 8, 1000, 16)
			now := time.Unix(1000, 0)
			cycle := func() {
				for _, p := range prompts {
					var c Claim
					x.Claim(&c, 0, p, now)
					x.Prefilled(&c, now)
					x.Found(&c, 0)
					x.Release(&c, 100, now)
					now = now.Add(100 * time.Millisecond)
				}
			}
			for range 20 {
				cycle()
			}
			if allocs := testing.AllocsPerRun(50, cycle); allocs >= 1 {
				t.Errorf("%+v, state %d: %v allocations in %d claims", c, state, allocs, len(prompts))
			}
		}
	}
}

// BenchmarkClaim is one request of 512 blocks, all of which but the last are
// cached, from Claim to Release.
func BenchmarkClaim(b *testing.B) {
	x := New(Config{})
	x.Join(0, SlotConfig{Model: "m", BlockSize: 16, Capacity: 16384})
	p := turns(rand.New(rand.NewPCG(1, 1)), 1, 512*16+5, 16)[0]
	now := time.Unix(1000, 0)
	b.ReportAllocs()
	for b.Loop() {
		var c Claim
		x.Claim(&c, 0, p, now)
		x.Prefilled(&c, now)
		x.Release(&c, 100, now)
	}
}

// BenchmarkClaimNew is one request of 512 blocks that are all new, in a cache
// that is full.
func BenchmarkClaimNew(b *testing.B) {
	x := New(Config{})
	x.Join(0, SlotConfig{Model: "m", BlockSize: 16, Capacity: 16384})
	r := rand.New(rand.NewPCG(1, 1))
	var prompts []*Prompt
	for range 64 {
		prompts = append(prompts, turns(r, 1, 512*16+5, 16)...)
	}
	now := time.Unix(1000, 0)
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		var c Claim
		x.Claim(&c, 0, prompts[i%len(prompts)], now)
		x.Prefilled(&c, now)
		x.Release(&c, 100, now)
		i++
	}
}

// TestClaimsInAnyOrder: whatever requests do, with whatever state and memory, the
// shadow's counts are right, and nothing is left when all is over.
func TestClaimsInAnyOrder(t *testing.T) {
	for seed := range uint64(lessUnderRace(t, 40, 8)) {
		r := rand.New(rand.NewPCG(seed, 9))
		config := Config{}
		if seed%2 == 0 {
			config.MaxBytes = 3*chunkBytes + int64(r.IntN(200000))
		}
		x := New(config)
		slots := []SlotConfig{
			{Model: "m", BlockSize: 1, Capacity: 50 + r.IntN(3000)},
			{Model: "m", BlockSize: 4, Capacity: 50 + r.IntN(3000), AfterPrefill: true},
		}
		for i, c := range slots {
			x.Join(i, c)
		}
		var talks [][]uint32
		claims := make([]struct {
			Claim
			slot int
			ids  []uint32
		}, 12)
		now := time.Unix(1000, 0)
		var l Lookup
		for step := range 2000 {
			now = now.Add(time.Duration(r.IntN(300)) * time.Millisecond)
			c := &claims[r.IntN(len(claims))]
			generated := -1 + r.IntN(40)
			switch k := r.IntN(100); {
			case k < 40:
				x.Release(&c.Claim, generated, now)
				c.slot = r.IntN(2)
				c.ids = randomIDs(r, 1+r.IntN(100))
				if len(talks) > 0 && r.IntN(4) > 0 {
					old := talks[r.IntN(len(talks))]
					c.ids = append(old[:r.IntN(len(old)+1):len(old)], randomIDs(r, r.IntN(30))...)
				}
				p := Prompt{Root: Root("m", "", nil), IDs: c.ids, Block: slots[c.slot].BlockSize}
				if r.IntN(10) == 0 {
					// Nobody has text and tokens of one name, but the
					// counts must not hang on that.
					p.IDs, p.Block = nil, TextBlock
				}
				p.Chain = AppendTokens(nil, p.Root, c.ids, slots[c.slot].BlockSize)
				x.Look(&l, &p)
				h := l.Held(c.slot)
				if int(h[GPU]) > len(p.Chain) {
					t.Fatalf("held %v of %d blocks", h, len(p.Chain))
				}
				x.Claim(&c.Claim, c.slot, &p, now)
			case k < 60:
				x.Prefilled(&c.Claim, now)
				x.Found(&c.Claim, r.IntN(100))
			case k < 80:
				x.Release(&c.Claim, generated, now)
				if talks = append(talks, append(c.ids, randomIDs(r, max(generated, 0))...)); len(talks) > 30 {
					talks = talks[1:]
				}
			case k < 90:
				x.Undo(&c.Claim)
			case k < 94:
				i := r.IntN(2)
				slots[i].Capacity = 50 + r.IntN(3000)
				x.Join(i, slots[i])
			case k < 97:
				x.SetState(r.IntN(2), State(r.IntN(4)), "")
			case k < 98:
				x.Forget(r.IntN(2))
			default:
				x.Expire(now)
			}
			if raceDetector && step%8 != 0 {
				continue
			}
			for i := range slots {
				s := x.lock(i)
				want := int64(0)
				for j := range claims {
					if c := &claims[j].Claim; int(c.slot) == i+1 && c.epoch == s.epoch {
						want += c.own
					}
				}
				if own := checkShadow(t, s); own != want {
					t.Fatalf("%d tokens of memory are nobody's", own-want)
				}
				s.unlock()
			}
		}
		for i := range claims {
			if seed%4 == 0 {
				break // They are void when guesses are given up.
			}
			x.Release(&claims[i].Claim, 1, now)
		}
		x.Expire(now.Add(eventsWithin))
		for i := range slots {
			s := x.lock(i)
			checkShadow(t, s)
			if n := s.tree.blocks[pinned] + s.tree.blocks[expected] + s.claims; n != 0 && seed%4 != 0 {
				t.Errorf("%d blocks are pinned and %d expected, with %d claims", s.tree.blocks[pinned], s.tree.blocks[expected], s.claims)
			}
			s.unlock()
			// Guesses are given up, and events have told nothing.
			x.SetState(i, Repairing, "")
			x.SetState(i, Exact, "")
			if n := s.tree.records; n != 0 {
				t.Errorf("seed %d: %d records are left", seed, n)
			}
		}
	}
}
