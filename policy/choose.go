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

// Reasons are all that a Choice may have of a candidate that was chosen.
func Reasons() []string { return []string{ReasonLeast, ReasonTie, ReasonSlack, ReasonExcluded} }

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
	slack = min(slack, math.MaxFloat64)
	if indifferent(candidates, costs) {
		i, _ := bits.Mul64(mix(r.Rand), uint64(len(costs)))
		return Choice{Index: int(i), Cost: costs[i], Reason: ReasonTie}
	}
	var f finalists
	f.lowest(costs, slack)
	if f.least == math.Inf(1) {
		for i := range costs {
			costs[i] = f.least // NaN, too
		}
		f = finalists{least: f.least, bar: f.least, many: true}
		i, _ := f.best(candidates, costs, r.Rand)
		return Choice{Index: i, Cost: costs[i], Reason: ReasonExcluded}
	}
	if slack > 0 && r.Tokens > 0 {
		f.steps = cachedSteps / float64(r.Tokens)
	}
	i, ties := f.best(candidates, costs, r.Rand)
	switch {
	case costs[i] > f.least:
		return Choice{Index: i, Cost: costs[i], Reason: ReasonSlack}
	case ties > 1:
		return Choice{Index: i, Cost: costs[i], Reason: ReasonTie}
	}
	return Choice{Index: i, Cost: costs[i], Reason: ReasonLeast}
}

// indifferent reports that there are several and no difference between them, as in a fleet
// that idles. Where it does not see that there is none, best makes the same choice.
func indifferent(candidates []Candidate, costs []float64) bool {
	costs = costs[:len(candidates)]
	if len(candidates) < 2 || !(costs[0] < math.Inf(1)) {
		return false
	}
	from := 0
	if inFours && len(candidates) >= 4 {
		n := len(candidates) &^ 3
		if !alikeFours(&candidates[0], &costs[0], n) {
			return false
		}
		from = n
	}
	cost, both, share := costs[0], candidates[0].both(), candidates[0].Share
	for i := from; i < len(candidates); i++ {
		c := &candidates[i]
		if costs[i] != cost || c.both() != both || c.Share != share {
			return false
		}
	}
	return true
}

// both is Cached and InFlight, which lie together, so that one load reads them.
func (c *Candidate) both() uint64 { return uint64(uint32(c.Cached)) | uint64(uint32(c.InFlight))<<32 }

// finalists is the work of one Choose, on its stack. The zero value is ready for lowest.
type finalists struct {
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
func (f *finalists) lowest(costs []float64, slack float64) {
	if inFours {
		f.lowestInFours(costs, slack)
		return
	}
	f.least = low(costs[:min(len(costs), 32)])
	f.bar = min(f.least+slack, math.MaxFloat64)
	// Four at a time, of which mostly none is near.
	i := 0
	for ; i+3 < len(costs); i += 4 {
		if bar := f.bar; costs[i] <= bar || costs[i+1] <= bar || costs[i+2] <= bar || costs[i+3] <= bar {
			for k := range 4 {
				f.add(costs, i+k, slack)
			}
			if f.many {
				f.least = min(f.least, lowest(costs[i:]))
				f.bar = min(f.least+slack, math.MaxFloat64)
				return
			}
		}
	}
	for ; i < len(costs); i++ {
		f.add(costs, i, slack)
	}
}

// nearWords is how many words of bits nearFours sets at most.
const nearWords = 8

// lowestInFours is lowest where the processor does it in fours: at first the least cost of
// all, and then what is near.
func (f *finalists) lowestInFours(costs []float64, slack float64) {
	f.least = lowest(costs)
	f.bar = min(f.least+slack, math.MaxFloat64)
	var words [nearWords]uint64
	from := 0
	for n := 0; len(costs)-from >= 4; from += n {
		n = min(len(costs)-from, len(words)*64) &^ 3
		nearFours(&costs[from], n, f.bar, &words)
		for k, near := range words[:(n+63)/64] {
			for ; near != 0 && !f.many; near &= near - 1 {
				f.add(costs, from+k*64+bits.TrailingZeros64(near), slack)
			}
		}
	}
	for i := from; i < len(costs); i++ {
		f.add(costs, i, slack)
	}
}

// low is one of the costs, or +Inf: the least one if none is below zero or NaN.
func low(costs []float64) float64 {
	// Numbers that are not below zero are in the order of their bits.
	least, other := infinite, infinite
	for ; len(costs) > 1; costs = costs[2:] {
		least = min(least, int64(math.Float64bits(costs[0])))
		other = min(other, int64(math.Float64bits(costs[1])))
	}
	least = min(least, other)
	if x := math.Float64frombits(uint64(least)); x < math.Inf(1) {
		return x
	}
	return math.Inf(1)
}

// add looks at the i-th.
func (f *finalists) add(costs []float64, i int, slack float64) {
	cost := costs[i]
	if !(cost <= f.bar) {
		return
	}
	if cost < f.least {
		f.least, f.bar = cost, min(cost+slack, math.MaxFloat64)
	}
	if f.n == len(f.near) {
		f.many = true
		return
	}
	f.near[f.n] = int32(i)
	f.n++
}

// best chooses among the candidates that cost bar at most, of which there is one:
// the one with most cached, then the least loaded, then one of those that are left,
// which it counts.
func (f *finalists) best(candidates []Candidate, costs []float64, rand uint64) (index, ties int) {
	costs = costs[:len(candidates)]
	n, many, bar := len(candidates), f.many, f.bar
	if !many {
		n = f.n
	}
	var first, most int
	var least float64
	b := &candidates[0] // the best so far, when there are ties
	for k := range n {
		i := k
		if !many {
			i = int(f.near[k])
		}
		if !(costs[i] <= bar) {
			continue
		}
		c := &candidates[i]
		if ties > 0 && c.InFlight == b.InFlight && c.Cached == b.Cached && c.Share == b.Share {
			ties++ // as all are in a fleet that idles
			continue
		}
		cached, load := f.cached(c), c.load()
		if ties > 0 && cached == most && load == least {
			ties++
		} else if ties == 0 || cached > most || cached == most && load < least {
			b, index, first, ties, most, least = c, i, k, 1, cached, load
		}
	}
	if ties < 2 {
		return index, ties
	}
	// So many of them are passed over.
	skip, _ := bits.Mul64(mix(rand), uint64(ties))
	if ties == n-first {
		return f.at(first + int(skip)), ties
	}
	for k := first; ; k++ {
		i := f.at(k)
		if c := &candidates[i]; costs[i] <= f.bar && c.load() == least && f.cached(c) == most {
			if skip == 0 {
				return i, ties
			}
			skip--
		}
	}
}

// at is the k-th candidate that is looked at.
func (f *finalists) at(k int) int {
	if f.many {
		return k
	}
	return int(f.near[k])
}

// cached is how many steps of the prompt the candidate has.
func (f *finalists) cached(c *Candidate) int {
	if c.Cached <= 0 || f.steps == 0 {
		return 0
	}
	return int(min(float64(c.Cached)*f.steps, cachedSteps))
}

// lowest is the least cost, +Inf when there is none.
func lowest(costs []float64) float64 {
	least := math.Inf(1)
	if n := len(costs) &^ 3; inFours && n > 0 {
		least, costs = leastFours(&costs[0], n), costs[n:]
	}
	for _, cost := range costs {
		if cost < least {
			least = cost
		}
	}
	return least
}

// mix is the finaliser of splitmix64 (Steele, Lea, Flood 2014).
func mix(z uint64) uint64 {
	z += 0x9e3779b97f4a7c15
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}
