package policy

import "math"

// LMetric multiplies two numbers (Zhang et al., "Simple is Better: Multiplication
// May Be All You Need for LLM Request Scheduling", arXiv 2603.15202):
//
//	cost = (uncached tokens ahead + uncached tokens of this prompt) · (requests in flight + 1)
//
// in tokens, the second factor for the replica's share. There is nothing to tune:
// a weight of either factor would change no decision. Of a prompt that is cached
// whole one token is computed all the same, so that a replica is not free of cost
// however many it generates. It does not know how fast replicas are: a slow one
// draws as much as a fast one until its queue grows. Use it where nothing can be
// learned of them, and as the one to beat. The zero value is ready.
type LMetric struct{}

// Name implements Policy.
func (LMetric) Name() string { return "lmetric" }

// Score implements Policy.
func (LMetric) Score(r *Request, candidates []Candidate, costs []float64) float64 {
	for i := range candidates {
		c := &candidates[i]
		tokens := float64(max(max(r.Tokens, 0)-max(int(c.Cached), 0), 1))
		if c.Ahead.Tokens > 0 {
			tokens += c.Ahead.Tokens
		}
		costs[i] = tokens * c.load()
		if math.IsNaN(costs[i]) {
			costs[i] = math.Inf(1)
		}
	}
	return 0
}
