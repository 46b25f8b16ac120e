package virtual

import (
	"container/heap"
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

// latencies are the times of each engine, with what slows it for good.
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
	for _, t := range f.Throttles {
		if t.At == 0 && t.Until == 0 && t.Engine >= 0 && t.Engine < len(list) {
			l := &list[t.Engine]
			l.A, l.B, l.D, l.PerToken = t.Factor*l.A, t.Factor*l.B, t.Factor*l.D, time.Duration(t.Factor*float64(l.PerToken))
		}
	}
	return list
}

// Least returns a time that the mean time to first token of the requests from warm on
// is never below, whoever chooses and in whatever order engines compute, as long as they
// compute one prompt after another or share themselves among them: records are those of
// Bound. It is the greater of two.
//
//   - Each prompt takes at least its own time at the fastest engine with all in its cache
//     that was there to be.
//   - All engines together are not better than one that is as fast as all of them, which
//     can imitate them; and that one has the least sum of times when it always computes the
//     prompt of which the least is left (Schrage 1968).
func (f *Fleet) Least(records []workload.Record, warm time.Duration) time.Duration {
	latencies := f.latencies()
	own := make([]float64, len(records))
	sum, n := 0.0, 0
	for k := range records {
		r := &records[k]
		least := never
		for i := range latencies {
			least = min(least, latencies[i].Prefill(r.Input-r.Cached, r.Cached))
		}
		own[k] = least.Seconds()
		if r.Scheduled >= warm {
			sum += own[k]
			n++
		}
	}
	if n == 0 {
		return 0
	}
	return time.Duration(max(sum, shortestFirst(records, own, float64(len(latencies)), warm)) / float64(n) * float64(time.Second))
}

// shortestFirst is the sum of the times of the requests from warm on, in seconds, at one
// engine that is so many times as fast and always computes the one of which the least is
// left. Those before are left out, as if they took no time.
func shortestFirst(records []workload.Record, own []float64, times float64, warm time.Duration) (sum float64) {
	var left leastLeft
	now := 0.0
	work := func(until float64) {
		for len(left) > 0 && now < until {
			j := &left[0]
			d := j.left / times
			if now+d > until {
				j.left -= (until - now) * times
				break
			}
			now += d
			sum += now - j.came
			heap.Pop(&left)
		}
		now = max(now, until)
	}
	for k := range records {
		if records[k].Scheduled < warm {
			continue
		}
		at := records[k].Scheduled.Seconds()
		work(at)
		heap.Push(&left, leftJob{own[k], at})
	}
	for len(left) > 0 {
		work(now + left[0].left/times + 1)
	}
	return sum
}

// leftJob is a prompt that is not computed, of which so many seconds are left.
type leftJob struct{ left, came float64 }

// leastLeft is a heap of them.
type leastLeft []leftJob

func (h leastLeft) Len() int           { return len(h) }
func (h leastLeft) Less(i, j int) bool { return h[i].left < h[j].left }
func (h leastLeft) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *leastLeft) Push(x any)        { *h = append(*h, x.(leftJob)) }
func (h *leastLeft) Pop() any {
	old := *h
	j := old[len(old)-1]
	*h = old[:len(old)-1]
	return j
}
