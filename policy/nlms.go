package policy

// FilterState is what nlms has learned of a replica: milliseconds a token, fast
// and slow, an offset, and the mean of what was seen. It is a value; the zero
// value has learned nothing.
type FilterState struct {
	Fast, Slow, Offset, Mean float64
	Samples                  int
}
