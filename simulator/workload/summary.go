package workload

import (
	"math"
	"slices"
	"time"
)

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

// Summary is what the records of one run say. Of requests that were not served to their
// end only Requests, Rate, Good and the counts of failures know.
type Summary struct {
	Policy   string `json:"policy"`
	Requests int    `json:"requests"`
	// Failed were not served to their end, but for those that are Refused: admission
	// did not take them.
	Failed  int `json:"failed"`
	Refused int `json:"refused"`
	// Seconds is how long the run took to the last token, and Rate how many requests
	// were scheduled in a second as long as some were.
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
	// HitRate is what part of all prompts' tokens nobody had to compute: what was
	// cached without Ahead, the part that engines have computed while nobody waited for
	// it. Ceiling is the most that any choice could have had with caches of this size, by
	// the oracle of package virtual, 0 where it was not asked.
	HitRate float64 `json:"hit_rate"`
	Ahead   float64 `json:"ahead,omitzero"`
	Ceiling float64 `json:"ceiling,omitzero"`
	// EngineHitRate is the hit rate by the engines' own counters, which know of warm-up,
	// of failed requests and of what was computed ahead too; 0 where they were not asked.
	EngineHitRate float64 `json:"engine_hit_rate,omitzero"`
	// Hotspot is the work of the busiest replica over the mean of all: tokens that
	// were not cached, and those that were computed ahead.
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
	// Failures counts those that failed or were refused by why.
	Failures map[string]int `json:"failures,omitempty"`
	// Doubts are why its figures should not be relied on, such as a machine that was
	// too slow for the load.
	Doubts []string `json:"doubts,omitempty"`
	// Curves are for charts, nil where nobody has made them. A median has those of one
	// of its runs.
	Curves *Curves `json:"curves,omitempty"`
	// Spread is set of the medians of several runs.
	Spread Spread `json:"spread,omitzero"`
}

// Spread is how far the runs are apart of which a Summary has the medians: the least
// and the most of some measures.
type Spread struct {
	Runs     int        `json:"runs"`
	TTFTMean [2]float64 `json:"ttft_mean"`
	TTFTP50  [2]float64 `json:"ttft_p50"`
	TTFTP99  [2]float64 `json:"ttft_p99"`
	E2EMean  [2]float64 `json:"e2e_mean"`
	HitRate  [2]float64 `json:"hit_rate"`
	Hotspot  [2]float64 `json:"hotspot"`
	Goodput  [2]float64 `json:"goodput"`
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
	// Bound is what policies are measured by: every replica holds all that was ever
	// computed, and the earliest that is free serves.
	Bound *Summary `json:"bound,omitempty"`
	// Shared is the default policy where all engines find what was in any request before, in
	// whole blocks, and have room for all; nil where nobody asked, or engines share single
	// tokens. What lies between it and the Bound is mostly not for policies to change: engines
	// decode beside their prompts.
	Shared *Summary `json:"shared,omitempty"`
	// Least is the mean time to first token, in milliseconds, that is proven to be the
	// least of all, where Bound is a mark to measure by; 0 where it was not asked.
	Least float64 `json:"least_ttft,omitzero"`
	// Infinite is the hit rate of a cache that never forgets, and Pooled that of one that
	// is as large as all caches together and gives up what was used the longest time ago,
	// as they do. Where Ceiling has what nobody can pass, Pooled has what caches would have
	// that lose nothing by being several. Both are 0 where nobody asked.
	Infinite float64 `json:"infinite_hit_rate,omitzero"`
	Pooled   float64 `json:"pooled_hit_rate,omitzero"`
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

// SummaryOptions are what a Summary needs to know beside the records.
type SummaryOptions struct {
	Policy string
	// Replicas is how many there are. With 0 they are those that the records name.
	Replicas int
	Limits   Limits
	// Ahead is how many tokens each replica has computed ahead from Warm on; nil is none.
	Ahead []int
	// Warm leaves out the requests that were scheduled before.
	Warm time.Duration
}

// Summarize makes the summary of a run of w, whose records may be in any order. A
// record of no failure and no output was not sent. A request of w that has no record
// was not sent either.
func Summarize(records []Record, w *Workload, o SummaryOptions) Summary {
	s := Summary{Policy: o.Policy, Replicas: make([]int, o.Replicas)}
	var ttft, tpot, itl, e2e, lag, ratio, off []float64
	var work []float64
	var input, cached, good int
	var last, scheduled time.Duration
	fail := func(why string) {
		if s.Failures == nil {
			s.Failures = map[string]int{}
		}
		s.Failures[why]++
		if why == Refused {
			s.Refused++
		} else {
			s.Failed++
		}
	}
	sent := make([]bool, len(w.Requests))
	for i := range records {
		r := &records[i]
		if !r.sent() {
			continue
		}
		if r.Index >= 0 && r.Index < len(sent) {
			sent[r.Index] = true
		}
		if r.Scheduled < o.Warm {
			continue
		}
		s.Requests++
		scheduled, last = max(scheduled, r.Scheduled), max(last, r.Scheduled, r.End)
		if r.Failure != "" {
			fail(r.Failure)
			continue
		}
		first := milliseconds(r.First - r.Scheduled)
		ttft, e2e = append(ttft, first), append(e2e, milliseconds(r.End-r.Scheduled))
		lag = append(lag, milliseconds(max(r.Sent-r.Scheduled, 0)))
		each := 0.0
		if r.Output > 1 {
			each = milliseconds(r.End-r.First) / float64(r.Output-1)
			tpot = append(tpot, each)
		}
		for _, g := range r.Gaps {
			itl = append(itl, milliseconds(g))
		}
		if (o.Limits.TTFT <= 0 || first <= o.Limits.TTFT) && (o.Limits.TPOT <= 0 || each <= o.Limits.TPOT) {
			good++
		}
		input, cached = input+r.Input, cached+r.Cached
		if r.Replica >= 0 {
			for len(s.Replicas) <= r.Replica {
				s.Replicas = append(s.Replicas, 0)
			}
			for len(work) < len(s.Replicas) {
				work = append(work, 0)
			}
			s.Replicas[r.Replica]++
			work[r.Replica] += float64(r.Input - r.Cached)
		}
		if observed := (r.First - r.Sent).Seconds(); r.Predicted > 0 && observed > 0 {
			predicted := r.Predicted.Seconds()
			ratio = append(ratio, predicted/observed)
			off = append(off, math.Abs(predicted-observed)/observed)
		}
	}
	for i, was := range sent {
		if at := w.Requests[i].At; !was && at >= o.Warm {
			s.Requests++
			scheduled = max(scheduled, at)
			fail("not sent")
		}
	}
	if s.Requests == 0 {
		return s
	}
	if asked := (scheduled - o.Warm).Seconds(); asked > 0 {
		s.Rate = float64(s.Requests) / asked
	}
	s.Seconds = max(last-o.Warm, 0).Seconds()
	if s.Seconds > 0 {
		s.Goodput = float64(good) / s.Seconds
	}
	s.Good = float64(good) / float64(s.Requests)
	s.TTFT, s.TPOT, s.ITL = QuantilesOf(ttft), QuantilesOf(tpot), QuantilesOf(itl)
	s.E2E, s.Lag = QuantilesOf(e2e), QuantilesOf(lag)
	for len(s.Replicas) < len(o.Ahead) {
		s.Replicas = append(s.Replicas, 0)
	}
	for len(work) < len(o.Ahead) {
		work = append(work, 0)
	}
	ahead := 0
	for i, n := range o.Ahead {
		ahead, work[i] = ahead+n, work[i]+float64(n)
	}
	if input > 0 {
		s.HitRate, s.Ahead = float64(cached-ahead)/float64(input), float64(ahead)/float64(input)
	}
	s.Hotspot = hotspot(work, len(s.Replicas))
	s.Prediction, s.PredictionError = median(ratio), median(off)
	return s
}

// Refused is the Failure of a request that admission has not taken.
const Refused = "refused"

// sent reports that the record is of a request that was sent.
func (r *Record) sent() bool { return r.Failure != "" || r.Output > 0 }

// hotspot is the most of work over the mean of n, 0 when there is none.
func hotspot(work []float64, n int) float64 {
	most, all := 0.0, 0.0
	for _, w := range work {
		most, all = max(most, w), all+w
	}
	if all == 0 {
		return 0
	}
	return most * float64(n) / all
}

// QuantilesOf returns the quantiles of values, which it sorts. A quantile is one of the
// values, by nearest rank: the least that so many parts of all are not above. Of no
// values all are 0.
func QuantilesOf(values []float64) Quantiles {
	if len(values) == 0 {
		return Quantiles{}
	}
	slices.Sort(values)
	sum := 0.0
	for _, v := range values {
		sum += v
	}
	at := func(percent int) float64 {
		return values[(len(values)*percent+99)/100-1]
	}
	return Quantiles{Mean: sum / float64(len(values)), P50: at(50), P90: at(90), P99: at(99), Max: values[len(values)-1]}
}

// median sorts values and returns the one in their middle, or the mean of the two that
// are; 0 when there are none.
func median(values []float64) float64 {
	n := len(values)
	if n == 0 {
		return 0
	}
	slices.Sort(values)
	return values[n/2]/2 + values[(n-1)/2]/2
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// Medians returns the medians of at least one run of a policy, each measure by itself,
// and how far they are apart. Doubts are those of any run.
func Medians(runs []Summary) Summary {
	out := Summary{Policy: runs[0].Policy}
	all := make([]float64, len(runs))
	middle := func(of func(*Summary) float64) float64 {
		for i := range runs {
			all[i] = of(&runs[i])
		}
		return median(all)
	}
	for k, m := range out.measures() {
		*m = middle(func(s *Summary) float64 { return *s.measures()[k] })
	}
	for k, c := range out.counts() {
		*c = int(math.Round(middle(func(s *Summary) float64 { return float64(*s.counts()[k]) })))
	}
	why := map[string]int{}
	for i := range runs {
		for len(out.Replicas) < len(runs[i].Replicas) {
			out.Replicas = append(out.Replicas, 0)
		}
		for w := range runs[i].Failures {
			why[w] = 0
		}
		for _, doubt := range runs[i].Doubts {
			if !slices.Contains(out.Doubts, doubt) {
				out.Doubts = append(out.Doubts, doubt)
			}
		}
	}
	for k := range out.Replicas {
		out.Replicas[k] = int(math.Round(middle(func(s *Summary) float64 {
			if k >= len(s.Replicas) {
				return 0
			}
			return float64(s.Replicas[k])
		})))
	}
	for w := range why {
		if n := math.Round(middle(func(s *Summary) float64 { return float64(s.Failures[w]) })); n > 0 {
			if out.Failures == nil {
				out.Failures = map[string]int{}
			}
			out.Failures[w] = int(n)
		}
	}
	if len(runs) > 1 {
		out.Spread.Runs = len(runs)
		for k, ends := range out.Spread.ends() {
			middle(func(s *Summary) float64 { return *s.spreading()[k] }) // which sorts
			*ends = [2]float64{all[0], all[len(all)-1]}
		}
	}
	return out
}

// measures are all that are numbers.
func (s *Summary) measures() []*float64 {
	list := []*float64{&s.Seconds, &s.Rate, &s.HitRate, &s.Ahead, &s.EngineHitRate, &s.Ceiling, &s.Hotspot, &s.Goodput, &s.Good, &s.Prediction, &s.PredictionError}
	for _, q := range []*Quantiles{&s.TTFT, &s.TPOT, &s.ITL, &s.E2E, &s.Lag} {
		list = append(list, &q.Mean, &q.P50, &q.P90, &q.P99, &q.Max)
	}
	return list
}

func (s *Summary) counts() []*int { return []*int{&s.Requests, &s.Failed, &s.Refused} }

// spreading are the measures that a Spread is of, and ends where it has them.
func (s *Summary) spreading() []*float64 {
	return []*float64{&s.TTFT.Mean, &s.TTFT.P50, &s.TTFT.P99, &s.E2E.Mean, &s.HitRate, &s.Hotspot, &s.Goodput}
}

func (s *Spread) ends() []*[2]float64 {
	return []*[2]float64{&s.TTFTMean, &s.TTFTP50, &s.TTFTP99, &s.E2EMean, &s.HitRate, &s.Hotspot, &s.Goodput}
}
