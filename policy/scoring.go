package policy

import "math"

// scoring is the work of one CostModel.score on all candidates, block by block, on its
// stack: what most of them cost, and what there is besides. begin makes it ready.
type scoring struct {
	// The prefill counts own times, and so many times more for each sequence that is
	// decoded and for each request; each token of it costs so much besides.
	tokens                       int32
	own, each, decoding, request float64
	// The candidate's Company costs so many times what it is.
	company float64
	pressed float32

	// costs is the sum of all costs, and weighed that of all requests by the time for
	// a token. They are no numbers when one of those is none.
	costs, weighed float64
	// least is the bits of the least cost: numbers that are not below zero are in the
	// order of their bits, and of others the first bit is set.
	least int64
	// inFlight has the bits of all requests: it is below zero when one of them is.
	inFlight int32

	// special is how many candidates of the latest block have costs that lack
	// something: they have a part of the prompt in lower tiers, take a part of their
	// share or have a full KV cache. few are their places, if it has room for all.
	special int
	few     [16]int32
}

// scoredBlocks is in how many blocks candidates are scored. Where one of them is
// overloaded, a block is searched and not all of them.
const scoredBlocks = 8

// infinite is the bits of +Inf.
const infinite = int64(0x7ff0_0000_0000_0000)

// begin makes it ready for r.
func (s *scoring) begin(m *CostModel, r *Request, each float64) {
	s.tokens, s.pressed, s.least = int32(max(r.Tokens, 0)), float32(m.KVLimit), infinite
	// What times says, in requests instead of a crowd.
	s.company = m.Company
	s.own, s.each, s.decoding, s.request = m.OwnWork, each, m.Interference-m.Crowd, m.Crowd
}

// As variables they are read once for a block, as constants once for each candidate.
var (
	half       = 0.5
	wholeShare = float32(1)
)

// block sets the costs of a block of candidates, without what is special, and returns
// the bits of the most requests, weighed, that one has. It is most of what a decision
// takes, so it has few operations for each, and no branch that is hard to foretell.
func (s *scoring) block(candidates []Candidate, costs []float64) (most int64) {
	costs = costs[:len(candidates)]
	tokens, own, each, decoding, request, company, pressed := s.tokens, s.own, s.each, s.decoding, s.request, s.company, s.pressed
	half, share := half, wholeShare
	all := float64(tokens)
	halfAll := half * all
	total, weighed, least, inFlight := s.costs, s.weighed, s.least, s.inFlight
	s.special = 0
	for i := range candidates {
		c := &candidates[i]
		cached := min(c.Cached, tokens)
		held, a := float64(cached), c.Speed.A
		uncached := all - held
		fill := uncached*(a+c.Speed.B*(halfAll+half*held)) + c.Speed.D
		requests := float64(c.InFlight)
		cost := (own+decoding*float64(c.Decoding)+request*requests)*fill + each*uncached + company*float64(c.Company) + c.Wait
		costs[i] = cost
		total += cost
		inFlight |= c.InFlight
		w := a * requests
		weighed += w
		most = max(most, int64(math.Float64bits(w)))
		if c.CachedGPU >= cached && !(c.KV > pressed && c.Queued > 0) && c.Share >= share {
			least = min(least, int64(math.Float64bits(cost)))
			continue
		}
		// A share of 0, which stands for 1, comes here as well.
		s.few[uint(s.special)%uint(len(s.few))] = int32(i)
		s.special++
	}
	s.costs, s.weighed, s.least, s.inFlight = total, weighed, least, inFlight
	return most
}
