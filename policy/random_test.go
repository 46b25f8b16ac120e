package policy

import (
	"math"
	"math/rand/v2"
	"testing"
)

// Two that differ are drawn, each pair as often as another one.
func TestP2CDrawsEveryPair(t *testing.T) {
	const n, requests = 6, 30000
	cs := slotted(2, 3, 5, 8, 13, 21)
	pairs := map[[2]int]int{}
	costs := make([]float64, n)
	rng := rand.New(rand.NewPCG(6, 8))
	for range requests {
		P2C{}.Score(&Request{Rand: rng.Uint64()}, cs, costs)
		var drawn []int
		for i, c := range costs {
			if !math.IsInf(c, 1) {
				drawn = append(drawn, i)
			}
		}
		if len(drawn) != 2 {
			t.Fatalf("drawn: %v", drawn)
		}
		pairs[[2]int(drawn)]++
	}
	const want = requests / (n * (n - 1) / 2)
	if len(pairs) != n*(n-1)/2 {
		t.Errorf("%d pairs", len(pairs))
	}
	for pair, got := range pairs {
		if got < want*9/10 || got > want*11/10 {
			t.Errorf("%v was drawn %d times, not %d", pair, got, want)
		}
	}
}

// Of those drawn the less loaded one is chosen: with one replica more loaded than the
// next all along, the most loaded is never chosen and the least whenever it is drawn.
func TestP2CChoosesTheLessLoaded(t *testing.T) {
	const n, requests = 5, 20000
	cs := slotted(0, 1, 2, 3, 4)
	for i := range cs {
		cs[i].InFlight = Count(10 * i)
	}
	got, costs := make([]int, n), make([]float64, n)
	rng := rand.New(rand.NewPCG(6, 9))
	for range requests {
		got[Choose(P2C{}, &Request{Rand: rng.Uint64()}, cs, costs).Index]++
	}
	for i, count := range got {
		// Of the pairs, those in which all others are more loaded.
		want := requests * (n - 1 - i) / (n * (n - 1) / 2)
		if count < want-600 || count > want+600 || want == 0 && count > 0 {
			t.Errorf("chosen %v: %d should have %d", got, i, want)
		}
	}
}

// Keys differ little in their bits, as slots do when there are no keys; draws must
// not show it.
func TestDrawsAreIndependent(t *testing.T) {
	const n, requests = 4, 40000
	cs := make([]Candidate, n)
	for i := range cs {
		cs[i].Slot = i
	}
	// In how many draws one candidate is above another one, in two that follow.
	var above [n][n]int
	costs := make([]float64, n)
	for rand := range uint64(requests) {
		Random{}.Score(&Request{Rand: rand}, cs, costs)
		for i := range n {
			for k := range n {
				if costs[i] > costs[k] {
					above[i][k]++
				}
			}
		}
	}
	for i := range n {
		for k := range n {
			if d := above[i][k] - requests/2; i != k && (d > 600 || d < -600) {
				t.Errorf("%d is above %d in %d of %d", i, k, above[i][k], requests)
			}
		}
	}
}
