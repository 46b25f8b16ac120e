package policy

import (
	"math"
	"math/bits"
)

// Choice is what Choose has decided. It is a value.
type Choice struct {
	// Index is that of the candidate, -1 when there is none.
	Index int
	// Cost is the candidate's, +Inf when all are excluded.
	Cost float64
	// Reason is a few words for people, one of the Reason constants.
	Reason string
}

// What a Choice was made by.
const (
	// ReasonNone: there was no candidate.
	ReasonNone = "no candidate"
	// ReasonLeast: it costs less than all others.
	ReasonLeast = "least cost"
	// ReasonTie: it was drawn from several that are as good in everything.
	ReasonTie = "least cost, tie"
	// ReasonSlack: others cost less, by less than the slack, and it has more of the
	// prompt cached or is less loaded.
	ReasonSlack = "within slack of the least cost"
	// ReasonExcluded: none should be chosen, and it is the least loaded.
	ReasonExcluded = "all excluded, least loaded"
)

// cachedSteps is how finely Choose tells apart how much of a prompt is cached: in
// sixteenths of it. A first block that all prompts share, or a few tokens of a
// template, are no reason to prefer a replica that is busier; the turns of a
// conversation before this one are.
const cachedSteps = 16

// Choose lets p give the candidates their costs, which it leaves in costs (as many
// as candidates, the caller's memory), and chooses the one with the least. Of
// those within the slack of a policy that has one it prefers the one that has most
// of the prompt in its cache, so that a conversation does not flap between two that
// are as good; of equals the less loaded one; then one by Request.Rand, each with
// the same probability. When all costs are +Inf or NaN it takes the least loaded
// one: a request is better served badly than not at all. It may be called from any
// goroutine and allocates nothing.
func Choose(p Policy, r *Request, candidates []Candidate, costs []float64) Choice {
	if len(candidates) == 0 {
		return Choice{Index: -1, Reason: ReasonNone}
	}
	costs = costs[:len(candidates)]
	slack := p.Score(r, candidates, costs)
	least := math.Inf(1)
	for _, c := range costs {
		if c < least {
			least = c
		}
	}
	if least == math.Inf(1) {
		for i := range costs {
			costs[i] = math.Inf(1) // NaN, too
		}
		i, _ := best(candidates, costs, least, 0, r.Rand)
		return Choice{Index: i, Cost: costs[i], Reason: ReasonExcluded}
	}
	bar, steps := least, 0.0
	if slack > 0 {
		// An excluded one is not within any slack.
		bar = min(least+slack, math.MaxFloat64)
		if r.Tokens > 0 {
			steps = cachedSteps / float64(r.Tokens)
		}
	}
	i, ties := best(candidates, costs, bar, steps, r.Rand)
	switch {
	case costs[i] > least:
		return Choice{Index: i, Cost: costs[i], Reason: ReasonSlack}
	case ties > 1:
		return Choice{Index: i, Cost: costs[i], Reason: ReasonTie}
	}
	return Choice{Index: i, Cost: costs[i], Reason: ReasonLeast}
}

// best chooses among the candidates that cost bar at most, of which there is one:
// the one with most cached, in steps for each token, then the least loaded, then
// one of those that are left, which it counts.
func best(candidates []Candidate, costs []float64, bar, steps float64, rand uint64) (index, ties int) {
	index = -1
	var most, least float64
	for i, cost := range costs {
		if !(cost <= bar) {
			continue
		}
		c := &candidates[i]
		cached, load := c.cachedIn(steps), c.load()
		switch {
		case index < 0 || cached > most || cached == most && load < least:
			index, ties, most, least = i, 1, cached, load
		case cached == most && load == least:
			ties++
		}
	}
	if ties < 2 {
		return index, ties
	}
	// So many of them are passed over.
	skip, _ := bits.Mul64(mix(rand), uint64(ties))
	for i := index; ; i++ {
		c := &candidates[i]
		if costs[i] <= bar && c.load() == least && c.cachedIn(steps) == most {
			if skip == 0 {
				return i, ties
			}
			skip--
		}
	}
}

// cachedIn is how much is cached in whole steps, of which there are so many for
// each token.
func (c *Candidate) cachedIn(steps float64) float64 {
	if steps == 0 {
		return 0
	}
	return math.Floor(min(max(float64(c.Cached), 0)*steps, cachedSteps))
}

// mix is the finaliser of splitmix64 (Steele, Lea, Flood 2014).
func mix(z uint64) uint64 {
	z += 0x9e3779b97f4a7c15
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}
