package policy

// CostModel is the default policy: expected time to first token, in seconds. The
// zero value weighs nothing; NewCostModel returns one with its weights.
type CostModel struct {
}

// Name implements Policy.
func (*CostModel) Name() string { return "cost_model" }

// Score implements Policy.
func (m *CostModel) Score(r *Request, candidates []Candidate, costs []float64) float64 {
	for i := range candidates {
		c := &candidates[i]
		costs[i] = c.Wait + 2*c.Speed.Time(Prefill(r.Tokens-c.Cached, c.Cached))
	}
	return 0
}

// TTFT is the time to first token that is expected of the candidate, in seconds,
// whatever the policy: its wait, the prefill of what is not cached, the load from
// slower tiers and what decoding takes of it.
func TTFT(r *Request, c *Candidate) float64 {
	return c.Wait + c.Speed.Time(Prefill(r.Tokens-c.Cached, c.Cached))
}
