package virtual

import (
	"time"

	"github.com/inferrail/inferrail/simulator"
	"github.com/inferrail/inferrail/simulator/workload"
)

// Bound returns how the requests of a workload would be served by engines of which each
// has in its cache whatever any was ever asked for, when the one that would be done
// first takes each: the reference bound that policies are measured by. chains are those
// of w in the engines' blocks.
//
// A prompt takes the time that its engine needs for it alone, at its own pace, and
// prompts are computed one after the other in the order in which they come; decoding is
// in nobody's way, and there is no limit to what runs. So it is below what any choice
// can reach in the mean for all but contrived workloads, though not a proven bound: who
// knew the sizes of all prompts to come could keep long ones out of the way of short
// ones. Least is proven.
func (f *Fleet) Bound(w *workload.Workload, chains *Chains) []workload.Record {
	records, seen := make([]workload.Record, len(w.Requests)), chains.seen()
	free := make([]time.Duration, len(f.Engines))
	latencies := f.latencies()
	for k := range w.Requests {
		q := &w.Requests[k]
		input, cached := q.Input(), seen[k]*chains.size
		best, first, took := 0, never, time.Duration(0)
		for i := range f.Engines {
			took := latencies[i].Prefill(input-cached, cached)
			if at := max(free[i], q.At) + took; at < first {
				best, first = i, at
			}
		}
		took = latencies[best].Prefill(input-cached, cached)
		free[best] = first
		records[k] = workload.Record{
			Index: k, Scheduled: q.At, Sent: q.At, First: first, Input: input, Cached: cached, Output: q.Output, Replica: best, Computed: took,
			End: first + time.Duration(max(q.Output-1, 0))*latencies[best].PerToken,
		}
	}
	return records
}

// latencies are the times of each engine.
func (f *Fleet) latencies() []simulator.Latency {
	list := make([]simulator.Latency, len(f.Engines))
	for i := range f.Engines {
		c := &f.Engines[i]
		l := simulator.Latency{A: c.PrefillA, B: c.PrefillB, D: c.PrefillD, PerToken: c.TimePerOutputToken}
		if l.A == 0 && l.B == 0 && l.D == 0 {
			l.A, l.B, l.D = 60, 0.002, 5000
		}
		list[i] = l
	}
	return list
}
