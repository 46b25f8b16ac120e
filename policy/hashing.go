package policy

import "math"

// PrefixHash sends prompts that begin alike to the same replica, by nothing but a
// hash: of all agents the same way, with no knowledge of caches, and without state.
// A replica's cost is a number from 0 to 1 drawn from Request.Prefix and its Key
// (rendezvous hashing: Thaler, Ravishankar 1998). So when a replica goes, only what
// it had is spread, evenly, and comes back with it; when one comes, only what
// becomes its own moves.
//
// A replica over its bound costs 1 more: the prompt passes to the next in the order
// that its hash gives them (bounded loads: Mirrokni, Thorup, Zadimoghaddam 2018).
// It is over when its requests in flight, with this one and for its share, are more
// than bound times the mean, and it has more than spare of them.
//
//	bound  1.25  times the mean load that a replica takes, 1 or more
//	spare  4     requests in flight that a replica takes in any case: engines
//	             generate a few as fast as one, so a mean of nearly none is no bound
//
// The mean time to first token is, in times of that of least_request, by bound
// (inferrail simulate --profile reference --replicas 8 --rate 40 --requests 2000):
//
//	               1.1    1.25   1.5    2     3
//	--workload w1  0.81   0.75   0.74   0.72  0.74
//	--workload w4  0.80   1.02   1.67   3.7   7.7    hot documents under heavy load
//
// while spare, from 0 to 8, makes no difference of 5 %. A prompt that is not known
// goes to the least loaded. It suits replicas whose
// caches cannot be seen, and agents that must agree without talking. The zero value
// has no bound that makes sense: New returns one that has.
type PrefixHash struct {
	bound bound
}

var prefixHashWeights = []weight{
	{"bound", 1.25, 1, math.Inf(1)},
	{"spare", 4, 0, math.Inf(1)},
}

func newPrefixHash(w []float64) Policy { return &PrefixHash{bound{w[0], w[1]}} }

// Name implements Policy.
func (*PrefixHash) Name() string { return "prefix_hash" }

// Score implements Policy.
func (p *PrefixHash) Score(r *Request, candidates []Candidate, costs []float64) float64 {
	rendezvous(r.Prefix, p.bound, candidates, costs)
	return 0
}

// Sticky keeps a session with one replica: that which Request.Session and the
// replica's Key give it, as in PrefixHash. It leaves it only while that is gone or
// over its bound, always for the same next one, and comes back to it afterwards. A
// request of no known session goes by its prefix, and one of which that is not known
// either to the least loaded.
//
//	bound  1.25  times the mean load that a replica takes, 1 or more
//	spare  4     requests in flight that a replica takes in any case
//
// A greater bound keeps more sessions where they are, and lets those that are many
// requests at once wait for each other. Of the mean time to first token of
// least_request it takes, in the same runs, 0.86, 0.80, 0.78 and 0.78 with 1.1, 1.25, 1.5
// and 2 for w2, and 0.17, 0.14, 0.11 and 0.09 for w3. It suits conversations where the caches
// cannot be seen. Unlike prefix_hash it spreads sessions that begin with the same
// system prompt. The zero value has no
// bound that makes sense: New returns one that has.
type Sticky struct {
	bound bound
}

var stickyWeights = []weight{
	{"bound", 1.25, 1, math.Inf(1)},
	{"spare", 4, 0, math.Inf(1)},
}

func newSticky(w []float64) Policy { return &Sticky{bound{w[0], w[1]}} }

// Name implements Policy.
func (*Sticky) Name() string { return "sticky" }

// Score implements Policy.
func (p *Sticky) Score(r *Request, candidates []Candidate, costs []float64) float64 {
	key := r.Session
	if key == 0 {
		key = r.Prefix
	}
	rendezvous(key, p.bound, candidates, costs)
	return 0
}

// bound is how much load a replica takes before it passes requests on.
type bound struct {
	times, spare float64
}

// over is the most load that the bound allows one of the candidates. The least
// loaded of them has never more.
func (b bound) over(candidates []Candidate) float64 {
	var requests, shares float64
	for i := range candidates {
		requests += float64(max(candidates[i].InFlight, 0)) + 1
		shares += candidates[i].share()
	}
	return max(b.times*requests/shares, b.spare+1)
}

// rendezvous sets each candidate's cost to its place in the order of key, between
// 0 and 1, and 1 more where it is over its bound; without a key, to its load.
func rendezvous(key uint64, b bound, candidates []Candidate, costs []float64) {
	if key == 0 {
		for i := range candidates {
			costs[i] = candidates[i].load()
		}
		return
	}
	seed, over := mix(key), b.over(candidates)
	for i := range candidates {
		c := &candidates[i]
		costs[i] = draw(seed, c)
		if c.load() > over {
			costs[i]++
		}
	}
}
