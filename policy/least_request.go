package policy

// LeastRequest picks the replica with the fewest requests in flight for its
// share. The zero value is ready.
type LeastRequest struct{}

// Name implements Policy.
func (LeastRequest) Name() string { return "least_request" }

// Score implements Policy.
func (LeastRequest) Score(_ *Request, candidates []Candidate, costs []float64) float64 {
	for i := range candidates {
		costs[i] = candidates[i].load()
	}
	return 0
}
