package policy

// Term is a part of a candidate's cost.
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
