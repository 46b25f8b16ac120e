package policy

import "math"

// Random chooses any replica, each with the same probability; one that takes part
// of its share, with that part of it. Its costs are times drawn for each candidate
// from Request.Rand, and the first wins. It needs no state, which makes it what
// other policies have to be better than. The zero value is ready.
type Random struct{}

// Name implements Policy.
func (Random) Name() string { return "random" }

// Score implements Policy.
func (Random) Score(r *Request, candidates []Candidate, costs []float64) float64 {
	seed, alike := r.seed(), true
	for i := range candidates {
		costs[i] = draw(seed, &candidates[i])
		alike = alike && candidates[i].share() == 1
	}
	if alike {
		return 0 // the same one is the first in a race
	}
	for i := range candidates {
		costs[i] = race(seed, &candidates[i])
	}
	return 0
}

// P2C, the power of two choices, draws two different replicas and takes the less
// loaded one: the cost of the two is their requests in flight for their share, and
// no other one is chosen (Mitzenmacher, "The Power of Two Choices in Randomized
// Load Balancing", 2001). Where several agents send to the same replicas it does not
// herd as least_request does: they do not all go to the one that was idle when they
// looked. It does not know of caches. The zero value is ready.
type P2C struct{}

// Name implements Policy.
func (P2C) Name() string { return "p2c" }

// Score implements Policy.
func (P2C) Score(r *Request, candidates []Candidate, costs []float64) float64 {
	seed := r.seed()
	first, second := -1, -1
	for i := range candidates {
		costs[i] = draw(seed, &candidates[i])
		switch {
		case first < 0 || costs[i] < costs[first]:
			first, second = i, first
		case second < 0 || costs[i] < costs[second]:
			second = i
		}
	}
	for i := range candidates {
		if i == first || i == second {
			costs[i] = candidates[i].load()
		} else {
			costs[i] = math.Inf(1)
		}
	}
	return 0
}

// seed is what draws for the request begin with. It is another number than those
// by which Choose breaks ties.
func (r *Request) seed() uint64 { return mix(r.Rand ^ 0xd1b54a32d192ed03) }

// draw is a number from 0 to below 1 that belongs to the seed and the candidate,
// wherever that stands among the others. It is as good as independent of other
// seeds' and other candidates' if seed is a hash.
func draw(seed uint64, c *Candidate) float64 {
	id := c.Key
	if id == 0 {
		id = uint64(c.Slot)
	}
	return float64(mix(seed+id)>>11) * 0x1p-53
}

// race is when the candidate comes first, if it comes as often as its share says:
// of several, each is the first with the probability of its part of their shares.
func race(seed uint64, c *Candidate) float64 {
	return -math.Log1p(-draw(seed, c)) / c.share()
}

// share is how much of its share the candidate takes: above 0, and 1 at most.
func (c *Candidate) share() float64 {
	if c.Share > 0 && c.Share < 1 {
		return float64(c.Share)
	}
	return 1
}
