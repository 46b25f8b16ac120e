package policy

import "time"

// Term is a part of a candidate's cost. It is a value.
type Term struct {
	Name  string
	Value float64
}

// Explainer is a Policy whose costs are sums of terms.
type Explainer interface {
	// AppendTerms appends the terms of candidate i's cost, whose sum it is. One
	// that is excluded has a term that says why, of +Inf.
	AppendTerms(dst []Term, r *Request, candidates []Candidate, i int) []Term
}

// AppendTerms appends the terms of the cost that p gives candidate i: a single one,
// called cost, of a policy that is no Explainer. cost is what Score has given it.
func AppendTerms(dst []Term, p Policy, r *Request, candidates []Candidate, i int, cost float64) []Term {
	if e, ok := p.(Explainer); ok {
		return e.AppendTerms(dst, r, candidates, i)
	}
	return append(dst, Term{"cost", cost})
}

// Foresee is what Admit would say now, without effect.
func (a *Admission) Foresee(now time.Time, predicted, wait, budget time.Duration) Verdict {
	a.mu.Lock()
	b := Admission{admissionMemory: a.admissionMemory}
	a.mu.Unlock()
	return b.Admit(now, predicted, wait, budget)
}
