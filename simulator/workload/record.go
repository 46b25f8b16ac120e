package workload

import "time"

// Record is how one request of a workload was served. Times are from the workload's
// beginning. Whoever serves the request fills it; the zero value is a request that
// was not sent.
type Record struct {
	// Index is the request's place in the workload.
	Index int
	// Scheduled is when it was to be sent, and Sent when it was. Latencies count
	// from Scheduled: who sends late has to answer for it.
	Scheduled, Sent time.Duration
	// First and End are when the first and the last token came. They are 0 when none
	// did.
	First, End time.Duration
	// Input and Output are tokens, and Cached what of the prompt the engine says it
	// had in its cache.
	Input, Cached, Output int
	// Predicted is the time to first token that the agent has foretold, 0 when it
	// has not, and PredictedCached what it took to be cached.
	Predicted       time.Duration
	PredictedCached int
	// Replica is who served it, from 0 on, -1 when nobody is known to have.
	Replica int
	// Computed is how long the replica's engine took for its prefill, without what it
	// waited; 0 where that is not known.
	Computed time.Duration
	// Failure says why it was not served to its end, "" when it was: "refused" of
	// one that admission did not take, else what happened.
	Failure string
	// Gaps are the times between tokens, nil where only the ends are known.
	Gaps []time.Duration
}
