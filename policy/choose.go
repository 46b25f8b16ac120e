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
	if !(slack > 0) {
		slack = 0
	}
	var d draw
	d.lowest(costs, slack)
	if d.least == math.Inf(1) {
		for i := range costs {
			costs[i] = d.least // NaN, too
		}
		d = draw{least: d.least, bar: d.least, many: true}
		i, _ := d.best(candidates, costs, r.Rand)
		return Choice{Index: i, Cost: costs[i], Reason: ReasonExcluded}
	}
	if slack > 0 && r.Tokens > 0 {
		d.steps = cachedSteps / float64(r.Tokens)
	}
	i, ties := d.best(candidates, costs, r.Rand)
	switch {
	case costs[i] > d.least:
		return Choice{Index: i, Cost: costs[i], Reason: ReasonSlack}
	case ties > 1:
		return Choice{Index: i, Cost: costs[i], Reason: ReasonTie}
	}
	return Choice{Index: i, Cost: costs[i], Reason: ReasonLeast}
}

// draw is the work of one Choose, on its stack. The zero value is ready for lowest.
type draw struct {
	least, bar float64
	// steps is how many of cachedSteps a token is.
	steps float64
	// near has all candidates that cost bar at most, and maybe others, in their
	// order: usually few. many: there are more than it has room for, and it is not
	// used.
	near [24]int32
	n    int
	many bool
}

// lowest finds the least cost, and what lies within slack above it. +Inf does not,
// whatever the slack.
func (d *draw) lowest(costs []float64, slack float64) {
	d.least, d.bar = math.Inf(1), math.MaxFloat64
	for i, c := range costs {
		if !(c <= d.bar) {
			continue
		}
		if d.n == len(d.near) {
			d.many = true
			d.least = min(d.least, lowest(costs[i:]))
			d.bar = min(d.least+slack, math.MaxFloat64)
			return
		}
		if c < d.least {
			d.least, d.bar = c, min(c+slack, math.MaxFloat64)
		}
		d.near[d.n] = int32(i)
		d.n++
	}
}

// best chooses among the candidates that cost bar at most, of which there is one:
// the one with most cached, then the least loaded, then one of those that are left,
// which it counts.
func (d *draw) best(candidates []Candidate, costs []float64, rand uint64) (index, ties int) {
	costs = costs[:len(candidates)]
	n := len(candidates)
	if !d.many {
		n = d.n
	}
	var first, most int
	var least float64
	for k := range n {
		i := d.at(k)
		if !(costs[i] <= d.bar) {
			continue
		}
		c := &candidates[i]
		cached, load := d.cached(c), c.load()
		if ties > 0 && cached == most && load == least {
			ties++
		} else if ties == 0 || cached > most || cached == most && load < least {
			index, first, ties, most, least = i, k, 1, cached, load
		}
	}
	if ties < 2 {
		return index, ties
	}
	// So many of them are passed over.
	skip, _ := bits.Mul64(mix(rand), uint64(ties))
	if ties == n-first {
		return d.at(first + int(skip)), ties
	}
	for k := first; ; k++ {
		i := d.at(k)
		if c := &candidates[i]; costs[i] <= d.bar && c.load() == least && d.cached(c) == most {
			if skip == 0 {
				return i, ties
			}
			skip--
		}
	}
}

// at is the k-th candidate that is looked at.
func (d *draw) at(k int) int {
	if d.many {
		return k
	}
	return int(d.near[k])
}

// cached is how many steps of the prompt the candidate has.
func (d *draw) cached(c *Candidate) int {
	if c.Cached <= 0 || d.steps == 0 {
		return 0
	}
	return int(min(float64(c.Cached)*d.steps, cachedSteps))
}

// lowest is the least cost, +Inf when there is none.
func lowest(costs []float64) float64 {
	// Four at a time: each of them waits only for every fourth before.
	a, b, c, d := math.Inf(1), math.Inf(1), math.Inf(1), math.Inf(1)
	for ; len(costs) >= 4; costs = costs[4:] {
		if costs[0] < a {
			a = costs[0]
		}
		if costs[1] < b {
			b = costs[1]
		}
		if costs[2] < c {
			c = costs[2]
		}
		if costs[3] < d {
			d = costs[3]
		}
	}
	a = min(a, b, c, d)
	for _, cost := range costs {
		if cost < a {
			a = cost
		}
	}
	return a
}

// mix is the finaliser of splitmix64 (Steele, Lea, Flood 2014).
func mix(z uint64) uint64 {
	z += 0x9e3779b97f4a7c15
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}
