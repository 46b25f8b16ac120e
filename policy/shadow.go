package policy

// Shadow is a policy beside the live one: it chooses among the same candidates
// without effect. It lives as long as it is configured for a model; its methods
// may be called from any goroutine. It counts how it would have done.
type Shadow struct {
	Policy Policy
}

// Regret is how a Shadow has done, in seconds of time to first token.
type Regret struct {
	// Decisions is how many there were, Agreed in how many it chose as the live
	// policy did.
	Decisions, Agreed uint64
	// Predicted is the sum of what the live policy's choice was expected to take
	// less what the shadow's was: above 0, the shadow would have been better.
	Predicted float64
	// Compared is how many first bytes were seen of decisions, and Observed the sum
	// of what the live choice has taken less what the shadow's would have, by the
	// replica's calibrated speed; nothing where both are the same.
	Compared uint64
	Observed float64
}

// Judge lets the shadow decide, beside the live choice. It returns its own for
// Settle. costs is scratch, as in Choose.
func (s *Shadow) Judge(r *Request, candidates []Candidate, live int, costs []float64) (chosen int) {
	return live
}

// Settle tells what the live choice has taken: observed seconds to the first
// token, where the shadow's choice was expected to take predicted.
func (s *Shadow) Settle(observed, predicted float64, same bool) {}

// Regret is how it has done.
func (s *Shadow) Regret() Regret { return Regret{} }
