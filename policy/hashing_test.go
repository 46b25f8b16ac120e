package policy

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// hashed are a policy that hashes and the request that it hashes a key of.
var hashed = []struct {
	name string
	ask  func(key uint64) *Request
}{
	{"prefix_hash", func(key uint64) *Request { return &Request{Prefix: key, Session: mix(key)} }},
	{"sticky", func(key uint64) *Request { return &Request{Session: key, Prefix: mix(key)} }},
	{"sticky", func(key uint64) *Request { return &Request{Prefix: key} }},
}

// home is the slot of the replica that is chosen.
func home(p Policy, r *Request, cs []Candidate) int {
	return cs[Choose(p, r, cs, make([]float64, len(cs))).Index].Slot
}

// When a replica goes, only what was there moves, and evenly; when one comes, what
// moves moves there, and is its share.
func TestHashingMovesLittle(t *testing.T) {
	const n, keys = 8, 4000
	for _, h := range hashed {
		p, _ := New(h.name, nil)
		rng := rand.New(rand.NewPCG(6, 10))
		all := slotted(0, 1, 2, 3, 4, 5, 6, 7)
		less := slices.Delete(slices.Clone(all), 3, 4)
		got, moved := make([]int, n), make([]int, n)
		for range keys {
			r := h.ask(rng.Uint64())
			r.Rand = rng.Uint64()
			full, fewer := home(p, r, all), home(p, r, less)
			got[full]++
			if full != 3 && fewer != full {
				t.Fatalf("%s: with 3 gone %d moves to %d", h.name, full, fewer)
			}
			if full == 3 {
				moved[fewer]++
			}
		}
		for s := range n {
			if got[s] < keys/n*80/100 || got[s] > keys/n*120/100 {
				t.Errorf("%s: of %d keys they have %v", h.name, keys, got)
				break
			}
			if want := got[3] / (n - 1); s != 3 && (moved[s] < want/2 || moved[s] > want*3/2) {
				t.Errorf("%s: %d go from 3: %v", h.name, got[3], moved)
				break
			}
		}
	}
}

// The order of a key is found by taking away who has it, again and again; the
// choice must be the first in it that is not over the bound.
func TestHashingIsBounded(t *testing.T) {
	for _, h := range hashed {
		rng := rand.New(rand.NewPCG(6, 11))
		passed := 0
		for n := range 3000 {
			bound, spare := 1+rng.Float64(), float64(rng.IntN(6))
			p, err := New(h.name, map[string]float64{"bound": bound, "spare": spare})
			if err != nil {
				t.Fatal(err)
			}
			r := h.ask(rng.Uint64())
			cs := slotted(rng.Perm(20)[:1+rng.IntN(9)]...)
			var order []int
			for left := slices.Clone(cs); len(left) > 0; {
				slot := home(p, r, left)
				order = append(order, slot)
				left = slices.DeleteFunc(left, func(c Candidate) bool { return c.Slot == slot })
			}
			loads, requests, shares := map[int]float64{}, 0.0, 0.0
			for i := range cs {
				c := &cs[i]
				c.InFlight = rng.Int32N(1 + rng.Int32N(20))
				share := 1.0
				if rng.IntN(4) == 0 {
					c.Share = 0.1 + 0.8*rng.Float32()
					share = float64(c.Share)
				}
				loads[c.Slot] = float64(c.InFlight+1) / share
				requests += float64(c.InFlight + 1)
				shares += share
			}
			want := -1
			for i, slot := range order {
				if l := loads[slot]; l <= spare+1 || l <= bound*requests/shares {
					want = slot
					if i > 0 {
						passed++
					}
					break
				}
			}
			if got := home(p, r, cs); got != want {
				t.Fatalf("%s %d: chose %d, want %d: order %v, loads %v, bound %v of %v, spare %v", h.name, n, got, want, order, loads, bound, requests/shares, spare)
			}
		}
		if passed < 100 {
			t.Errorf("%s: only %d passed on", h.name, passed)
		}
	}
}

// However the prefixes are distributed, nobody gets more than bound times the mean,
// beyond one request and the spare.
func TestHashingSpreadsAHotPrefix(t *testing.T) {
	for _, h := range hashed {
		p, _ := New(h.name, map[string]float64{"bound": 1.25, "spare": 0})
		cs := slotted(0, 1, 2, 3, 4)
		for range 500 {
			i := Choose(p, h.ask(42), cs, make([]float64, len(cs))).Index
			cs[i].InFlight++
		}
		for i := range cs {
			if cs[i].InFlight > 126 {
				t.Errorf("%s: %d of 500 at %d", h.name, cs[i].InFlight, i)
			}
		}
	}
}

// Without anything to hash by the load decides.
func TestHashingWithoutAKey(t *testing.T) {
	for _, name := range []string{"prefix_hash", "sticky"} {
		p, _ := New(name, nil)
		cs := slotted(0, 1, 2)
		cs[0].InFlight, cs[2].InFlight = 2, 1
		if got := home(p, &Request{}, cs); got != 1 {
			t.Errorf("%s: chose %d", name, got)
		}
	}
	// prefix_hash does not go by sessions.
	p, _ := New("prefix_hash", nil)
	cs := slotted(0, 1, 2)
	cs[0].InFlight, cs[2].InFlight = 1, 1
	for session := range uint64(20) {
		if got := home(p, &Request{Session: session}, cs); got != 1 {
			t.Errorf("session %d: chose %d", session, got)
		}
	}
}
