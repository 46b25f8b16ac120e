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
			x.Claim(&c, 0, p, Held{}, now)
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

// TestClaimsAllocateNothing beside the records, which an index that is full has.
func TestClaimsAllocateNothing(t *testing.T) {
	if raceDetector {
		t.Skip("the race detector allocates")
	}
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
					x.Claim(&c, 0, p, Held{}, now)
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
		x.Claim(&c, 0, p, Held{}, now)
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
		x.Claim(&c, 0, prompts[i%len(prompts)], Held{}, now)
		x.Prefilled(&c, now)
		x.Release(&c, 100, now)
		i++
	}
}
