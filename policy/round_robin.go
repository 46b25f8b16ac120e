package policy

import (
	"math"
	"slices"
)

// RoundRobin gives each replica its turn: of the candidates, which have an order by
// their slots, the one at Request.Turn modulo their number. It costs nothing to
// choose that one, and 1 to choose another. It knows neither load nor caches: it is
// there to compare with, and for replicas and requests that are all alike.
//
// Which of them are candidates changes in step with the turns when one fails and the
// request is tried again among the others: that takes the turn of whoever comes next,
// so that in an order which never changed it would come next for ever and be left
// out. So the order is shuffled, by the number of candidates and Turn, after rounds
// rounds: seldom, so as to be what others call round robin, in step with periodic
// traffic where it is. Among candidates that stay the same each has exactly one turn
// a round.
//
// A replica that takes part of its share takes that part of its turns. The rest go
// to the others, by their shares, at random. The zero value is ready.
type RoundRobin struct{}

// rounds is after how many rounds there is another order.
const rounds = 256

// Name implements Policy.
func (RoundRobin) Name() string { return "round_robin" }

// Score implements Policy.
func (RoundRobin) Score(r *Request, candidates []Candidate, costs []float64) float64 {
	if len(candidates) == 0 {
		return 0
	}
	slot := slotAt(candidates, costs, turnOf(r.Turn, uint64(len(candidates))))
	passes := false
	for i := range candidates {
		c := &candidates[i]
		costs[i] = 1
		if c.Slot == slot {
			costs[i] = 0
			passes = draw(r.seed(), c) >= c.share()
		}
	}
	if passes && len(candidates) > 1 {
		for i := range candidates {
			if costs[i] == 0 {
				costs[i] = math.Inf(1)
			} else {
				costs[i] = race(r.seed(), &candidates[i])
			}
		}
	}
	return 0
}

// turnOf is the place, of n, whose turn it is: shuffled by exchanging it with its
// partner in a few random pairings, or not (Hoang, Morris, Rogaway, "An Enciphering
// Scheme Based on a Card Shuffle", 2012).
func turnOf(turn, n uint64) int {
	place := turn % n
	key := mix(mix(n) + turn/n/rounds)
	for range 8 {
		key = mix(key)
		partner := (key%n + n - place) % n
		if mix(key^max(place, partner))&1 == 0 {
			place = partner
		}
	}
	return int(place)
}

// slotAt is the slot at a place in the order of the candidates' slots. scratch has
// room for all of them.
func slotAt(candidates []Candidate, scratch []float64, place int) int {
	ordered := true
	for i := 1; i < len(candidates); i++ {
		if candidates[i].Slot < candidates[i-1].Slot {
			ordered = false
			break
		}
	}
	if ordered {
		return candidates[place].Slot
	}
	// Slots are small numbers, which a float64 holds exactly.
	scratch = scratch[:len(candidates)]
	for i := range candidates {
		scratch[i] = float64(candidates[i].Slot)
	}
	slices.Sort(scratch)
	return int(scratch[place])
}
