package policy

import (
	"math"
	"slices"
)

// RoundRobin gives each replica its turn: the candidates in the order of their
// slots, the one at Request.Turn modulo their number. It costs nothing to choose
// that one, and 1 to choose another. It knows neither load nor caches: it is there
// to compare with, and for replicas and requests that are all alike.
//
// Which of them are candidates can change from one decision to the next, in step
// with the turns: every third fails, say, and is tried again among those that are
// left. Then the same one of those would be hit each time. So after rounds rounds
// the order begins at another place, drawn from their number and Turn. Among
// candidates that stay the same each still has exactly one turn a round.
//
// A replica that takes part of its share takes that part of its turns. The rest go
// to the others, by their shares, at random. The zero value is ready.
type RoundRobin struct{}

// rounds is after how many rounds the order begins elsewhere.
const rounds = 16

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

// turnOf is the place in the order of n whose turn it is.
func turnOf(turn, n uint64) int {
	first := mix(mix(n)+turn/n/rounds) % n
	return int((first + turn%n) % n)
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
