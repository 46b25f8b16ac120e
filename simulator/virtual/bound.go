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
// A prompt takes the time that its engine needs to compute it, at its own pace, and
// prompts are computed one after the other in the order in which they come; decoding is
// in nobody's way, what a step takes at least is shared by all prompts in it, and there
// is no limit to what runs. So it is below what any choice
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
		best, first := 0, never
		for i := range f.Engines {
			l := &latencies[i]
			if at := max(max(free[i], q.At)+work(l, input-cached, cached), q.At+l.Prefill(input-cached, cached)); at < first {
				best, first = i, at
			}
		}
		took := latencies[best].Prefill(input-cached, cached)
		free[best] = max(free[best], q.At) + work(&latencies[best], input-cached, cached)
		records[k] = workload.Record{
			Index: k, Scheduled: q.At, Sent: q.At, First: first, Input: input, Cached: cached, Output: q.Output, Replica: best, Computed: took,
			End: first + time.Duration(max(q.Output-1, 0))*latencies[best].PerToken,
		}
	}
	return records
}

// work is what of a prompt's time no other prompt can share.
func work(l *simulator.Latency, uncached, cached int) time.Duration {
	return simulator.Latency{A: l.A, B: l.B, D: l.D}.Prefill(uncached, cached)
}

// latencies are the times of each engine, with what slows it for good. What is wrong with
// how an engine is set up, Serve tells.
func (f *Fleet) latencies() []simulator.Latency {
	configs, _ := f.configs()
	list := make([]simulator.Latency, len(configs))
	for i := range configs {
		list[i] = configs[i].Latency()
	}
	for _, t := range f.Throttles {
		if t.At == 0 && t.Until == 0 && t.Engine >= 0 && t.Engine < len(list) {
			l := &list[t.Engine]
			l.A, l.B, l.D = t.Factor*l.A, t.Factor*l.B, t.Factor*l.D
			l.PerToken, l.Least = time.Duration(t.Factor*float64(l.PerToken)), time.Duration(t.Factor*float64(l.Least))
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
	works := make([]float64, len(records))
	sum, n := 0.0, 0
	for k := range records {
		r := &records[k]
		alone, least := never, never
		for i := range latencies {
			l := &latencies[i]
			alone = min(alone, l.Prefill(r.Input-r.Cached, r.Cached))
			least = min(least, work(l, r.Input-r.Cached, r.Cached))
		}
		works[k] = least.Seconds()
		if r.Scheduled >= warm {
			sum += alone.Seconds()
			n++
		}
	}
	if n == 0 {
		return 0
	}
	return time.Duration(max(sum, shortestFirst(records, works, float64(len(latencies)), warm)) / float64(n) * float64(time.Second))
}

// shortestFirst is the sum of the times of the requests from warm on, in seconds, at one
// engine that is so many times as fast and always computes the one of which the least is
// left. Those before are left out, as if they took no time.
func shortestFirst(records []workload.Record, works []float64, times float64, warm time.Duration) (sum float64) {
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
		heap.Push(&left, leftJob{works[k], at})
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
