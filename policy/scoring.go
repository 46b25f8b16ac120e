package policy

import "math"

// scoring is the work of one CostModel.score on all candidates, part by part, on its
// stack: what most of them cost, and what there is besides. begin makes it ready.
type scoring struct {
	// The prefill counts own times, and so many times more for each request that is there
	// and is not decoded; each token of it costs so much besides as toll says. The
	// candidate's Company costs so many times what it is.
	own, request, company float64
	toll

	tokens  int32
	pressed float32

	// costs is the sum of all costs, and weighed that of all requests by the time for
	// a token. They are no numbers when one of those is none.
	costs, weighed float64
	// least is the bits of the least cost: numbers that are not below zero are in the
	// order of their bits, and of others the first bit is set. It is not that of costs
	// that scoreFours has set.
	least int64
	// inFlight has the bits of all requests: it is below zero when one of them is.
	inFlight int32

	// special has bits for the candidates of the latest part whose costs may lack
	// something: who has a part of the prompt in lower tiers, takes a part of its share
	// or has a full KV cache. A byte is for four of them, whose bits are in either half.
	// complete adds what is lacking, and leaves no bit.
	special [scoredBlocks]uint64
	// busiest is the most requests, weighed, that one has of those in a block, of
	// whichever part, that are as far behind a multiple of 4. Where one is overloaded,
	// these are searched and not all.
	busiest [scoredBlocks][4]float64
}

// Candidates are scored in parts of so many blocks of so many.
const (
	scoredBlocks = 16
	scoredBlock  = 32
	scoredPart   = scoredBlocks * scoredBlock
)

// infinite is the bits of +Inf.
const infinite = int64(0x7ff0_0000_0000_0000)

// begin makes it ready for r.
func (s *scoring) begin(m *CostModel, r *Request, t toll) {
	s.tokens, s.pressed, s.least = int32(max(r.Tokens, 0)), float32(m.KVLimit), infinite
	s.company = m.Company
	s.own, s.toll, s.request = m.OwnWork, t, m.Crowd
}

// part sets the costs of a part of the candidates, without what is special.
func (s *scoring) part(candidates []Candidate, costs []float64) {
	costs = costs[:len(candidates)]
	done := 0
	if inFours && len(candidates) >= 4 {
		done = len(candidates) &^ 3
		scoreFours(s, &candidates[0], &costs[0], done)
	}
	for done < len(candidates) {
		k := done / scoredBlock
		end := min((k+1)*scoredBlock, len(candidates))
		most, special := s.block(candidates[done:end], costs[done:end])
		s.special[k] |= special << (done % scoredBlock * 2)
		for lane := range s.busiest[k] {
			s.busiest[k][lane] = max(s.busiest[k][lane], most)
		}
		done = end
	}
}

// As variables they are read once for a block, as constants once for each candidate.
var (
	half       = 0.5
	wholeShare = float32(1)
)

// block sets the costs of a block of candidates, or of what is left of one behind a
// multiple of 4, without what is special, and returns the most requests, weighed, that one
// has, and the bits of the special ones. Where scoreFours does not do the same it is most
// of what a decision takes, so it has few operations for each, and no branch that is hard
// to foretell. No product is fused with a sum, which float64 sees to: so the same numbers
// have the same cost to the bit, whoever computes it.
func (s *scoring) block(candidates []Candidate, costs []float64) (most float64, special uint64) {
	costs = costs[:len(candidates)]
	tokens, own, toll, request, company, pressed := s.tokens, s.own, s.toll, s.request, s.company, s.pressed
	half, share := half, wholeShare
	all := float64(tokens)
	halfAll := half * all
	total, weighed, least, inFlight := s.costs, s.weighed, s.least, s.inFlight
	busiest := int64(0)
	for i := range candidates {
		c := &candidates[i]
		cached := min(c.Cached, tokens)
		held, a := float64(cached), c.Speed.A
		uncached := all - held
		fill := float64(uncached*(a+float64(c.Speed.B*(halfAll+half*held)))) + c.Speed.D
		requests := float64(c.InFlight)
		times := own + float64(request*(requests-float64(c.Decoding)))
		cost := float64(times*fill) + float64(toll.each(c)*uncached) + float64(company*float64(c.Company)) + c.Wait
		costs[i] = cost
		total += cost
		inFlight |= c.InFlight
		w := float64(a * requests)
		weighed += w
		busiest = max(busiest, int64(math.Float64bits(w)))
		if c.CachedGPU >= cached && !(c.KV > pressed && c.Queued > 0) && c.Share >= share {
			least = min(least, int64(math.Float64bits(cost)))
			continue
		}
		// A share of 0, which stands for 1, comes here as well.
		special |= 1 << ((uint(i)/4*8 + uint(i)%4) & 63)
	}
	s.costs, s.weighed, s.least, s.inFlight = total, weighed, least, inFlight
	return math.Float64frombits(uint64(busiest)), special
}
