package policy

import "time"

// Admission decides whether requests of a model are taken, by the time to first
// token that their clients grant. It lives as long as the model is configured so;
// its methods may be called from any goroutine. The zero value takes all.
type Admission struct{}

// Observe takes the time to first token of a request that was answered.
func (a *Admission) Observe(now time.Time, ttft time.Duration) {}

// Verdict is what Admission says of a request.
type Verdict struct {
	// Refuse: it should not be taken now. RetryAfter is when there is expected to
	// be room for it.
	Refuse     bool
	RetryAfter time.Duration
	// Over: it is expected to take longer than its budget.
	Over bool
	// Reason is a few words for people.
	Reason string
}

// Admit decides. predicted is the expected time to first token at the best
// replica, wait the part of it before its own prefill begins, budget what is
// granted: 0 is no bound.
func (a *Admission) Admit(now time.Time, predicted, wait, budget time.Duration) Verdict {
	return Verdict{}
}
