package policy

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// turns asks for the turns from first on, and returns the slots they go to.
func turns(cs []Candidate, first, count uint64) (slots []int) {
	costs := make([]float64, len(cs))
	for turn := first; turn < first+count; turn++ {
		slots = append(slots, cs[Choose(RoundRobin{}, &Request{Turn: turn, Rand: mix(turn)}, cs, costs).Index].Slot)
	}
	return slots
}

// slotted are candidates with these slots.
func slotted(slots ...int) (cs []Candidate) {
	for _, s := range slots {
		cs = append(cs, Candidate{Slot: s, Key: mix(uint64(s))})
	}
	return cs
}

// In every round each has one turn, wherever the counter stands and whatever else the
// candidates are, and in the next rounds in the same order.
func TestRoundRobinIsStrict(t *testing.T) {
	rng := rand.New(rand.NewPCG(6, 6))
	for n := 1; n < 20; n++ {
		var cs []Candidate
		for i := range n {
			cs = append(cs, Candidate{Slot: 3 + i*i, InFlight: rng.Int32N(100), Cached: rng.Int32N(10)})
		}
		rng.Shuffle(n, func(i, j int) { cs[i], cs[j] = cs[j], cs[i] })
		for range 4 {
			block := uint64(n) * rounds
			first := rng.Uint64N(1<<40) * block
			got := turns(cs, first, block)
			once := slices.Sorted(slices.Values(got[:n]))
			for i, slot := range once {
				if want := 3 + i*i; slot != want {
					t.Fatalf("a round from %d on among %d: %v", first, n, once)
				}
			}
			for round := range slices.Chunk(got, n) {
				if !slices.Equal(round, got[:n]) {
					t.Fatalf("rounds %v and %v", got[:n], round)
				}
			}
		}
	}
}

// The order in which candidates stand makes no difference.
func TestRoundRobinGoesBySlot(t *testing.T) {
	cs := slotted(1, 4, 5, 9, 12)
	want := turns(cs, 0, 500)
	rng := rand.New(rand.NewPCG(6, 7))
	for range 20 {
		rng.Shuffle(len(cs), func(i, j int) { cs[i], cs[j] = cs[j], cs[i] })
		if got := turns(cs, 0, 500); !slices.Equal(got, want) {
			t.Fatalf("%v, then %v", want, got)
		}
	}
}

// Every order there is comes as often as another.
func TestRoundRobinShuffles(t *testing.T) {
	const orders = 24 // of 4
	cs := slotted(0, 1, 2, 3)
	seen := map[[4]int]int{}
	for block := range uint64(orders * 500) {
		seen[[4]int(turns(cs, block*4*rounds, 4))]++
	}
	for order, n := range seen {
		if len(seen) != orders || n < 400 || n > 600 {
			t.Fatalf("%d orders; %v comes %d times, not 500", len(seen), order, n)
		}
	}
}

// One replica fails every request, which is then tried again among the others. The
// attempts are in step with the turns, and yet each of those has its share.
func TestRoundRobinBesideOneThatFails(t *testing.T) {
	for _, n := range []int{2, 3, 4, 5} {
		for dead := range n {
			got, turn := make([]int, n), uint64(0)
			requests := 300 * n * rounds
			for range requests {
				place := turnOf(turn, uint64(n))
				if turn++; place == dead {
					if place = turnOf(turn, uint64(n-1)); place >= dead {
						place++
					}
					turn++
				}
				got[place]++
			}
			for place, count := range got {
				want := requests / (n - 1)
				if place == dead {
					want = 0
				}
				if count < want*90/100 || count > want*110/100 {
					t.Errorf("%d replicas of which %d fails: they have answered %v", n, dead, got)
					break
				}
			}
		}
	}
}
