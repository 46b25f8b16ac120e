package workload

// Quantiles are those of one measure, in milliseconds.
type Quantiles struct {
	Mean float64 `json:"mean"`
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P99  float64 `json:"p99"`
	Max  float64 `json:"max"`
}

// Limits are the times to first token and per output token that a request must meet
// to be good, in milliseconds.
type Limits struct {
	TTFT float64 `json:"ttft"`
	TPOT float64 `json:"tpot"`
}

// Summary is what the records of one run say. Of requests that failed only Failed and
// Refused know.
type Summary struct {
	Policy   string `json:"policy"`
	Requests int    `json:"requests"`
	Failed   int    `json:"failed"`
	Refused  int    `json:"refused"`
	// Seconds is how long the run took, and Rate how many requests came in one.
	Seconds float64 `json:"seconds"`
	Rate    float64 `json:"rate"`
	// TTFT is the time to first token, E2E that to the last one, both from when the
	// request was scheduled; TPOT is the mean time between tokens of a request, ITL
	// that between any two; Lag is how late requests were sent.
	TTFT Quantiles `json:"ttft"`
	TPOT Quantiles `json:"tpot"`
	ITL  Quantiles `json:"itl,omitzero"`
	E2E  Quantiles `json:"e2e"`
	Lag  Quantiles `json:"lag,omitzero"`
	// HitRate is what part of all prompts' tokens was cached. Ceiling is the most
	// that any choice could have had with caches of this size, by the oracle of
	// package virtual, 0 where it was not asked.
	HitRate float64 `json:"hit_rate"`
	Ceiling float64 `json:"ceiling,omitzero"`
	// Hotspot is the work of the busiest replica over the mean of all: tokens that
	// were not cached.
	Hotspot float64 `json:"hotspot"`
	// Goodput is how many requests a second met the limits, and Good their part of
	// all, those that failed included.
	Goodput float64 `json:"goodput"`
	Good    float64 `json:"good"`
	// Prediction is the median of the predicted time to first token over the observed
	// one, and PredictionError that of how far it is off, as a part; 0 where nothing
	// was predicted.
	Prediction      float64 `json:"prediction,omitzero"`
	PredictionError float64 `json:"prediction_error,omitzero"`
	// Replicas is how many requests each has served.
	Replicas []int `json:"replicas"`
	// Failures counts those that failed by why.
	Failures map[string]int `json:"failures,omitempty"`
	// Curves are for charts, nil where nobody has made them. A median has those of one
	// of its runs.
	Curves *Curves `json:"curves,omitempty"`
}

// Comparison is what `inferrail simulate` and `inferrail bench compare` write: one
// workload, served under each policy.
type Comparison struct {
	Workload string   `json:"workload"`
	Face     string   `json:"face"` // "virtual" or "http"
	Replicas int      `json:"replicas"`
	Engine   string   `json:"engine"`
	Speed    float64  `json:"speed"` // how many times faster than recorded
	Limits   Limits   `json:"limits"`
	Seeds    []uint64 `json:"seeds"`
	// Runs are the medians over the seeds, one for each policy, and All every run.
	Runs []Summary `json:"runs"`
	All  []Summary `json:"all,omitempty"`
	// Bound is what no policy can be better than: every replica holds all that was
	// ever computed, and the earliest that is free serves.
	Bound *Summary `json:"bound,omitempty"`
	// Infinite is the hit rate of a cache that never forgets.
	Infinite float64 `json:"infinite_hit_rate,omitzero"`
	// Capacity is the highest rate at which each policy keeps the limits.
	Capacity []Capacity `json:"capacity,omitempty"`
	// Marks are what was done to the engines while they served, for charts.
	Marks []Mark `json:"marks,omitempty"`
}

// Mark is something that happens in a run at a time, such as "replica 2 is 8x slower".
type Mark struct {
	Seconds float64 `json:"seconds"`
	What    string  `json:"what"`
}

// Capacity is how much a fleet can serve under one policy.
type Capacity struct {
	Policy string `json:"policy"`
	// Rate is requests a second at which 99 of 100 requests meet the limits, and GPUs
	// how many replicas it would take to serve what the first policy serves.
	Rate float64 `json:"rate"`
	GPUs float64 `json:"gpus"`
}
