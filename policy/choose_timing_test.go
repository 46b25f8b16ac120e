package policy

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

func timedSets(n, sets int, tiers, pressed float64) [][]Candidate {
	r := rand.New(rand.NewPCG(1, uint64(n)))
	out := make([][]Candidate, sets)
	for s := range out {
		cs := make([]Candidate, n)
		for i := range cs {
			c := &cs[i]
			c.Speed = DefaultSpeed
			c.Speed.A *= 0.8 + 0.4*r.Float64()
			c.Exact = true
			c.Share = 1
			c.Slot = i
			c.Key = r.Uint64()
			if r.IntN(4) == 0 {
				c.Cached = r.IntN(8000)
				c.CachedGPU, c.CachedCPU = c.Cached, c.Cached
				if r.Float64() < tiers {
					c.CachedGPU = r.IntN(c.Cached + 1)
				}
			}
			c.InFlight = 16 + r.IntN(32)
			c.Decoding = r.IntN(c.InFlight + 1)
			c.Wait = r.Float64() * 0.3
			c.KV = r.Float64() * 0.9
			if r.Float64() < pressed {
				c.KV, c.Queued = 0.99, 3
			}
		}
		out[s] = cs
	}
	return out
}

func BenchmarkChoose(b *testing.B) {
	for _, p := range []Policy{NewCostModel(), LeastRequest{}} {
		for _, mix := range []string{"plain", "pressed", "tiers", "idle"} {
			for _, n := range []int{8, 64, 256, 1000} {
				b.Run(fmt.Sprintf("%s/%s/%d", p.Name(), mix, n), func(b *testing.B) {
					tiers, pressed := 0., 0.
					if mix == "pressed" {
						pressed = .03
					}
					if mix == "tiers" {
						tiers = .1
					}
					sets := timedSets(n, 64, tiers, pressed)
					if mix == "idle" {
						for _, s := range sets {
							for i := range s {
								s[i] = Candidate{Share: 1, Speed: DefaultSpeed}
							}
						}
					}
					costs := make([]float64, n)
					b.ReportAllocs()
					r := Request{Tokens: 8000}
					b.ResetTimer()
					for i := range b.N {
						r.Rand = uint64(i)
						Choose(p, &r, sets[i%64], costs)
					}
				})
			}
		}
	}
}
