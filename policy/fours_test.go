package policy

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// needFours skips a test where nothing is done in fours.
func needFours(t testing.TB) {
	t.Helper()
	if !inFours {
		t.Skip("this processor has no AVX2")
	}
}

// What is found of costs in fours is what one finds who looks at each.
func TestFoursOfCosts(t *testing.T) {
	needFours(t)
	rng := rand.New(rand.NewPCG(9, 2))
	for k := range 6000 {
		n := k % 71
		if k%50 == 49 {
			n = rng.IntN(3 * 64 * nearWords)
		}
		costs := make([]float64, n)
		for i := range costs {
			costs[i] = math.Floor(100*rng.Float64()) / 10
			switch x := rng.IntN(12); {
			case k%3 == 1 && x == 0, k%3 == 2 && x > 0:
				costs[i] = []float64{math.NaN(), -math.NaN(), math.Inf(1), math.Inf(-1), -1, math.MaxFloat64}[rng.IntN(1+rng.IntN(6))]
			}
		}
		least := math.Inf(1)
		for _, cost := range costs {
			if cost < least {
				least = cost
			}
		}
		if got := lowest(costs); got != least {
			t.Fatalf("the least of %v is %v", costs, got)
		}
		slack := []float64{0, 0.3, 5, math.MaxFloat64}[rng.IntN(4)]
		var f finalists
		f.lowest(costs, slack)
		var near []int32
		for i, cost := range costs {
			if cost <= min(least+slack, math.MaxFloat64) {
				near = append(near, int32(i))
			}
		}
		if f.least != least || f.many != (len(near) > len(f.near)) || !f.many && !slices.Equal(f.near[:f.n], near) {
			t.Fatalf("%v with slack %v: found %+v, want %v and %v", costs, slack, f, least, near)
		}
	}
}

// A fleet that is alike in all is seen to be so, and one that differs anywhere is not.
func TestFoursSeeWhatIsAlike(t *testing.T) {
	needFours(t)
	for n := 2; n <= 70; n++ {
		cs, costs := make([]Candidate, n), make([]float64, n)
		for i := range cs {
			cs[i] = Candidate{Cached: 7, InFlight: 3, Share: 0.5, Slot: i, Key: uint64(i), KV: float32(i), Company: float32(i), Decoding: int32(i), CachedGPU: int32(i), CachedCPU: int32(i)}
			costs[i] = 2
		}
		if !indifferent(cs, costs) {
			t.Fatalf("%d that are alike differ", n)
		}
		for at := range n {
			for what, c := range map[string]Candidate{"cached": {Cached: 8, InFlight: 3, Share: 0.5}, "requests": {Cached: 7, InFlight: 4, Share: 0.5}, "share": {Cached: 7, InFlight: 3, Share: 0.25}} {
				was := cs[at]
				if cs[at] = c; indifferent(cs, costs) {
					t.Errorf("%d of %d differs by its %s, and is not seen", at, n, what)
				}
				cs[at] = was
			}
			if costs[at] = math.Nextafter(2, 3); indifferent(cs, costs) {
				t.Errorf("%d of %d costs more, and is not seen", at, n)
			}
			costs[at] = 2
		}
		for _, cost := range []float64{math.Inf(1), math.NaN()} {
			for i := range costs {
				costs[i] = cost
			}
			if indifferent(cs, costs) {
				t.Errorf("%d that cost %v are taken for ones to choose among", n, cost)
			}
		}
	}
}
