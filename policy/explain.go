package policy

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
