package policy

import (
	"math"
	"slices"
	"sync"
)

// Shadow is a policy beside the live one: it chooses among the same candidates
// without effect. It lives as long as it is configured for a model with the same
// weights; its methods may be called from any goroutine and, but for Regret,
// allocate nothing. It counts how it would have done. The zero value has no
// policy; give it one before it is used.
type Shadow struct {
	Policy Policy
	// Label is what people call it; the policy's name when it is empty.
	Label string

	mu     sync.Mutex // guards the rest
	regret Regret
	// last are the latest differences that were observed, the newest in place of
	// the oldest.
	last [256]float32
}

// Regret is how a Shadow has done, in seconds of time to first token: above 0, the
// shadow's choices would have been better than the live ones. It is a value; the
// zero value has decided nothing.
//
// What it cannot tell: nobody has seen what the shadow's choice would have taken.
// Predicted compares two predictions, so it favours whatever policy minimises what
// TTFT predicts, which is what cost_model does. Observed is Predicted, of the
// decisions compared, plus how far the model was off at the live choice: where
// predictions are too low on average, every shadow that disagrees looks better than
// it is, so that Error has to be looked at beside it. Neither knows that the
// shadow, were it live, would have left other caches and queues behind: a policy
// that looks best for one request may be bad for all. Only traffic that it decides
// tells that.
type Regret struct {
	// Decisions is how many there were, Agreed in how many it chose as the live
	// policy did.
	Decisions, Agreed uint64
	// Predicted is the sum of what the live policy's choice was expected to take
	// less what the shadow's was: PredictedBetter, where the shadow's was less, less
	// PredictedWorse.
	Predicted, PredictedBetter, PredictedWorse float64
	// Compared is how many first tokens were seen of decisions, and Observed the sum
	// of what the live choice has taken less what the shadow's would have, by the
	// replica's calibrated speed; nothing where both are the same. It is
	// ObservedBetter less ObservedWorse.
	Compared                                uint64
	Observed, ObservedBetter, ObservedWorse float64
	// Error is the sum of what the live choices have taken less what they were
	// expected to, of the decisions compared in which the shadow chose another one:
	// so much of Observed is not to its credit.
	Error float64
	// Low, Median and High are the tenth, fiftieth and ninetieth percentile of the
	// last differences of which Observed is the sum, of at most 256 decisions.
	Low, Median, High float64
}

// Name is what people call it, on pages and in metrics.
func (s *Shadow) Name() string {
	if s.Label != "" {
		return s.Label
	}
	return s.Policy.Name()
}

// Judge lets the shadow decide, beside the live choice. It returns its own for
// Settle, -1 when there is no candidate. costs is scratch, as in Choose. Nothing is
// counted when live is no candidate.
func (s *Shadow) Judge(r *Request, candidates []Candidate, live int, costs []float64) (chosen int) {
	chosen = Choose(s.Policy, r, candidates, costs).Index
	if chosen < 0 || live < 0 || live >= len(candidates) {
		return chosen
	}
	better := 0.0
	if chosen != live {
		better = bounded(TTFT(r, &candidates[live]) - TTFT(r, &candidates[chosen]))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.regret.Decisions++
	if chosen == live {
		s.regret.Agreed++
	}
	if better > 0 {
		s.regret.PredictedBetter += better
	} else {
		s.regret.PredictedWorse -= better
	}
	return chosen
}

// Settle tells what the live choice has taken: observed seconds to the first
// token, of which expected was predicted, where the shadow's choice was expected to
// take shadow. same: it is the live choice.
func (s *Shadow) Settle(observed, expected, shadow float64, same bool) {
	better, off := 0.0, 0.0
	if !same {
		better, off = bounded(observed-shadow), bounded(observed-expected)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last[s.regret.Compared%uint64(len(s.last))] = float32(better)
	s.regret.Compared++
	s.regret.Error += off
	if better > 0 {
		s.regret.ObservedBetter += better
	} else {
		s.regret.ObservedWorse -= better
	}
}

// Regret is how it has done.
func (s *Shadow) Regret() Regret {
	s.mu.Lock()
	r, last := s.regret, s.last
	s.mu.Unlock()
	r.Predicted = r.PredictedBetter - r.PredictedWorse
	r.Observed = r.ObservedBetter - r.ObservedWorse
	if n := int(min(r.Compared, uint64(len(last)))); n > 0 {
		sorted := last[:n]
		slices.Sort(sorted)
		at := func(percent int) float64 { return float64(sorted[(n-1)*percent/100]) }
		r.Low, r.Median, r.High = at(10), at(50), at(90)
	}
	return r
}

// mostRegret bounds what one decision adds to a sum, in seconds: it is about as long
// as a first token is waited for at all. Without a bound a single absurd prediction
// would be all that a sum tells for ever.
const mostRegret = 600

// bounded is a difference of times within mostRegret, none where that is no number:
// what is not known is to nobody's credit.
func bounded(seconds float64) float64 {
	if math.IsNaN(seconds) {
		return 0
	}
	return min(max(seconds, -mostRegret), mostRegret)
}
