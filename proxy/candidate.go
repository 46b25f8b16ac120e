package proxy

import (
	"math/rand/v2"
	"slices"
	"time"

	"github.com/inferrail/inferrail/policy"
)

// pick asks the policy for one of the replicas that have not failed the
// request: of those with a free place, or of those with room in their line.
// full reports that there are some, but none of that kind.
func (x *exchange) pick(line bool) (r *Replica, full bool) {
	x.candidates, x.places = x.candidates[:0], x.places[:0]
	now := time.Now()
	for _, r := range x.model.Replicas {
		if slices.Contains(x.tried, r) {
			continue
		}
		if line && !r.gate.roomy() || !line && !r.gate.free() {
			full = true
			continue
		}
		x.places = append(x.places, r)
		c := policy.Candidate{Slot: r.Slot, InFlight: r.InFlight() + r.Pending(), Share: r.warmth.share(now)}
		if b := x.blocks; b != nil {
			found := b.at(r)
			c.Cached, c.CachedGPU, c.CachedCPU = found.any, found.gpu, found.any
		}
		x.candidates = append(x.candidates, c)
	}
	x.asked = policy.Request{Rand: rand.Uint64()}
	if x.blocks != nil {
		x.asked.Tokens = x.blocks.tokens
	}
	x.costs = slices.Grow(x.costs[:0], len(x.candidates))
	x.choice = policy.Choose(x.policy(), &x.asked, x.candidates, x.costs[:len(x.candidates)])
	x.choseIn = time.Since(now)
	if x.choice.Index >= 0 {
		x.expected = policy.TTFT(&x.asked, &x.candidates[x.choice.Index])
		return x.places[x.choice.Index], full
	}
	return nil, full
}
