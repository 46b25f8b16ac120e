package policy

import "time"

// Load is what an engine, or a rank of it, has told of its load at one time. The
// agent makes one for each report and publishes it; it is immutable.
type Load struct {
	// Asked and Told are when the agent asked for it and when it had the answer.
	Asked, Told time.Time
	// Running and Waiting are the requests in the batch and before it.
	Running, Waiting int
	// WaitingTokens is how many uncached tokens those that wait have together, -1
	// when the engine does not say.
	WaitingTokens int
	// KV is how full the KV cache is with sequences that run, 0 to 1.
	KV float64
	// HitRate is the share of prompt tokens found in the cache lately, 0 to 1.
	HitRate float64
	// VRAMFree and VRAMTotal are as in Candidate.
	VRAMFree, VRAMTotal float64
	// Own and OwnWaiting are how many requests this agent had there, and had no
	// first byte of: the larger number of when it asked and when it was told. What
	// the engine counts beyond them is others'.
	Own, OwnWaiting int
}

// Foreign is what the engine had beyond the agent's own: requests in all, and
// those of them that waited. l may be nil: nothing is known then.
func (l *Load) Foreign() (requests, waiting int) {
	if l == nil {
		return 0, 0
	}
	return max(l.Running+l.Waiting-l.Own, 0), max(l.Waiting-l.OwnWaiting, 0)
}
