package policy

import "math"

// Choice is what Choose has decided.
type Choice struct {
	// Index is that of the candidate, -1 when there is none.
	Index int
	// Cost is the candidate's.
	Cost float64
	// Reason is a few words for people.
	Reason string
}

// Choose lets p give the candidates their costs, which it leaves in costs (as many
// as candidates, the caller's memory), and chooses the one with the least. Of
// those within the slack of a policy that has one it prefers the one that has most
// of the prompt in its cache, so that a conversation does not flap between two that
// are as good; of equals the less loaded one; then one by Request.Rand, each with
// the same probability. When none should be chosen it takes the least loaded one. It
// allocates nothing.
func Choose(p Policy, r *Request, candidates []Candidate, costs []float64) Choice {
	if len(candidates) == 0 {
		return Choice{Index: -1, Reason: "no candidate"}
	}
	costs = costs[:len(candidates)]
	slack := p.Score(r, candidates, costs)
	least := math.Inf(1)
	for _, c := range costs {
		if c < least {
			least = c
		}
	}
	best, ties, rand := -1, uint64(0), r.Rand
	for i := range candidates {
		if !(costs[i] <= least+slack) {
			continue
		}
		if best >= 0 {
			switch a, b := &candidates[i], &candidates[best]; {
			case slack > 0 && a.Cached != b.Cached:
				if a.Cached > b.Cached {
					best, ties = i, 1
				}
				continue
			case a.load() != b.load():
				if a.load() < b.load() {
					best, ties = i, 1
				}
				continue
			}
		}
		ties++
		rand += 0x9e3779b97f4a7c15
		if mix(rand)%ties == 0 {
			best = i
		}
	}
	if best < 0 {
		best = 0
	}
	if ties > 1 {
		return Choice{Index: best, Cost: costs[best], Reason: "least cost, tie"}
	}
	return Choice{Index: best, Cost: costs[best], Reason: "least cost"}
}

// mix is the finaliser of splitmix64 (Steele, Lea, Flood 2014).
func mix(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}
