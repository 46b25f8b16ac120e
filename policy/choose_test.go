package policy

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// priced is a Policy whose costs are given.
type priced struct {
	costs []float64
	slack float64
}

func (*priced) Name() string { return "priced" }

func (p *priced) Score(_ *Request, _ []Candidate, costs []float64) float64 {
	copy(costs, p.costs)
	return p.slack
}

// asGood are the candidates that Choose may take, by what its comment says, and
// whether it should not take any of them.
func asGood(r *Request, cs []Candidate, costs []float64, slack float64) (indexes []int, excluded bool) {
	least := math.Inf(1)
	for _, c := range costs {
		if c < least {
			least = c
		}
	}
	excluded = math.IsInf(least, 1)
	for i, c := range costs {
		near := c == least || slack > 0 && c <= least+math.Min(slack, math.MaxFloat64) && c <= math.MaxFloat64
		if near || excluded {
			indexes = append(indexes, i)
		}
	}
	keep := func(better func(a, b *Candidate) bool) {
		all := slices.Clone(indexes)
		indexes = slices.DeleteFunc(indexes, func(i int) bool {
			return slices.ContainsFunc(all, func(k int) bool { return better(&cs[k], &cs[i]) })
		})
	}
	if slack > 0 && !excluded && r.Tokens > 0 {
		sixteenths := func(c *Candidate) float64 {
			return math.Floor(math.Min(math.Max(float64(c.Cached), 0)*(16/float64(r.Tokens)), 16))
		}
		keep(func(a, b *Candidate) bool { return sixteenths(a) > sixteenths(b) })
	}
	load := func(c *Candidate) float64 {
		n := math.Max(float64(c.InFlight), 0) + 1
		if c.Share > 0 && c.Share < 1 {
			n /= float64(c.Share)
		}
		return n
	}
	keep(func(a, b *Candidate) bool { return load(a) < load(b) })
	return indexes, excluded
}

// Choose beside the plain reading of its comment, over costs of all kinds: numbers,
// many alike, below zero, and none at all.
func TestChooseReference(t *testing.T) {
	rng := rand.New(rand.NewPCG(6, 5))
	reasons := map[string]int{}
	for range 15000 {
		cs := make([]Candidate, 1+rng.IntN(1+rng.IntN(80)))
		p := &priced{slack: []float64{0, 0.01, 0.5, 3, math.Inf(1), math.NaN(), -1}[rng.IntN(7)]}
		steps, odd := []float64{1, 3, 1000}[rng.IntN(3)], rng.IntN(4)
		for i := range cs {
			cs[i] = Candidate{Slot: i, InFlight: rng.Int32N(4), Cached: rng.Int32N(2) * rng.Int32N(1000), Share: []float32{0, 1, 0.5}[rng.IntN(3)]}
			cost := math.Floor(rng.Float64()*steps)/steps - 0.2
			switch x := rng.IntN(4); {
			case odd == 1 && x == 0, odd == 2:
				cost = []float64{math.NaN(), math.Inf(1)}[rng.IntN(2)]
			case odd == 3 && x == 0:
				cost = []float64{math.MaxFloat64, -math.MaxFloat64, math.Inf(-1)}[rng.IntN(3)]
			}
			p.costs = append(p.costs, cost)
		}
		r := &Request{Rand: rng.Uint64(), Tokens: rng.IntN(3) * 500}
		good, excluded := asGood(r, cs, p.costs, p.slack)
		costs := make([]float64, len(cs)+3)
		got := Choose(p, r, cs, costs)
		if !slices.Contains(good, got.Index) {
			t.Fatalf("%v with slack %v: chose %+v, want one of %v\n%+v", p.costs, p.slack, got, good, cs)
		}
		want := ReasonLeast
		switch cost := p.costs[got.Index]; {
		case excluded:
			want = ReasonExcluded
		case slices.ContainsFunc(p.costs, func(c float64) bool { return c < cost }):
			want = ReasonSlack
		case len(good) > 1:
			want = ReasonTie
		}
		if got.Reason != want || got.Cost != costs[got.Index] || excluded != math.IsInf(got.Cost, 1) {
			t.Fatalf("%+v of %v with slack %v: %+v, want %s", cs, p.costs, p.slack, got, want)
		}
		reasons[want]++
	}
	if len(reasons) != 4 {
		t.Errorf("not every reason came up: %v", reasons)
	}
}

// Of those that are as good each is taken as often as another, be there few of them
// or many, in one piece or not.
func TestChooseTakesEachTieAsOften(t *testing.T) {
	f := func(candidates int, tie func(i int) bool) {
		t.Helper()
		cs, p := make([]Candidate, candidates), &priced{}
		ties := 0
		for i := range cs {
			p.costs = append(p.costs, 1)
			if tie(i) {
				p.costs[i] = 0
				ties++
			}
		}
		counts, costs := make([]int, candidates), make([]float64, candidates)
		const each = 1000
		for k := range each * ties {
			counts[Choose(p, &Request{Rand: uint64(k)}, cs, costs).Index]++
		}
		for i, n := range counts {
			if !tie(i) && n > 0 || tie(i) && (n < each*8/10 || n > each*12/10) {
				t.Errorf("%d of %d candidates tie: %d is taken %d times", ties, candidates, i, n)
			}
		}
	}
	all := func(int) bool { return true }
	f(2, all)
	f(24, all)
	f(25, all)
	f(300, all)
	f(300, func(i int) bool { return i%3 == 1 })
	f(300, func(i int) bool { return i == 7 || i == 299 })
	f(300, func(i int) bool { return i >= 100 })
}

// The order of the candidates makes no difference but to which of equals is taken.
func TestChooseOrder(t *testing.T) {
	rng := rand.New(rand.NewPCG(6, 6))
	m := NewCostModel()
	for range 5000 {
		r := soundRequest(rng)
		cs := soundCandidates(rng, r.Tokens)
		cs = cs[:min(len(cs), mostCounted)] // of more, own work goes by some that lie together
		costs := make([]float64, len(cs))
		slack := m.Score(r, cs, costs)
		good, _ := asGood(r, cs, costs, slack)
		perm := rng.Perm(len(cs))
		moved := make([]Candidate, len(cs))
		for i, k := range perm {
			moved[i] = cs[k]
		}
		// The slot of a candidate is where it was.
		if c := Choose(m, r, moved, costs); !slices.Contains(good, moved[c.Index].Slot) {
			t.Fatalf("%+v: %+v in another order, %v in this one", cs, c, good)
		}
	}
}

func TestChooseAllocatesNothing(t *testing.T) {
	rng := rand.New(rand.NewPCG(6, 7))
	costs := make([]float64, 1000)
	for _, p := range every(t) {
		for _, n := range []int{1, 24, 300} {
			cs := make([]Candidate, 0, n)
			for len(cs) < n {
				cs = append(cs, soundCandidates(rng, 5000)...)
			}
			r := &Request{Tokens: 5000}
			if a := testing.AllocsPerRun(20, func() { r.Rand++; Choose(p, r, cs[:n], costs) }); a != 0 {
				t.Errorf("%s: %v allocations among %d", p.Name(), a, n)
			}
		}
	}
}
