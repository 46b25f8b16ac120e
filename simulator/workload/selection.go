package workload

import (
	"cmp"
	"slices"
	"time"
)

// order puts the requests in the order of time, and numbers conversations and their
// requests in it.
func (w *Workload) order() {
	slices.SortStableFunc(w.Requests, func(a, b Request) int { return cmp.Compare(a.At, b.At) })
	numbers, turns := map[int]int{0: 0}, []int{0}
	for i := range w.Requests {
		r := &w.Requests[i]
		n, ok := numbers[r.Session]
		if !ok {
			n = len(turns)
			numbers[r.Session], turns = n, append(turns, 0)
		}
		if r.Session = n; n > 0 {
			r.Turn = turns[n]
			turns[n]++
		}
	}
}

// before is how many requests come before a time.
func (w *Workload) before(at time.Duration) int {
	n, _ := slices.BinarySearchFunc(w.Requests, at, func(r Request, at time.Duration) int { return cmp.Compare(r.At, at) })
	return n
}

// Faster returns the workload so many times as fast, which is above 0: the same
// requests, closer to one another.
func (w *Workload) Faster(times float64) *Workload {
	if times == 1 {
		return w
	}
	out := *w
	out.Requests, out.Throttles = slices.Clone(w.Requests), slices.Clone(w.Throttles)
	scale := func(at *time.Duration) { *at = time.Duration(min(float64(*at)/times, float64(longestTime))) }
	for i := range out.Requests {
		scale(&out.Requests[i].At)
	}
	for i := range out.Throttles {
		scale(&out.Throttles[i].At)
		scale(&out.Throttles[i].Until)
	}
	return &out
}

// Window returns the requests that come from a time on and before another, which is
// the end when it is 0. Their times count from the first of the two.
func (w *Workload) Window(from, to time.Duration) *Workload {
	first, end := w.before(from), len(w.Requests)
	if to > 0 {
		end = max(w.before(to), first)
	}
	out := *w
	out.Requests, out.Throttles = slices.Clone(w.Requests[first:end]), nil
	for i := range out.Requests {
		out.Requests[i].At -= from
	}
	for _, t := range w.Throttles {
		if t.Until > 0 && t.Until <= from || to > 0 && t.At >= to {
			continue
		}
		t.At = max(t.At-from, 0)
		if t.Until > 0 {
			t.Until -= from
		}
		out.Throttles = append(out.Throttles, t)
	}
	return &out
}

// Limit returns the first n requests.
func (w *Workload) Limit(n int) *Workload {
	out := *w
	out.Requests = w.Requests[:min(max(n, 0), len(w.Requests))]
	return &out
}

// OnlyEvery returns every n-th conversation, whole, and of the requests that belong to
// none every n-th: a workload of an n-th of the rate. Of an n below 2 that is all.
func (w *Workload) OnlyEvery(n int) *Workload {
	if n < 2 {
		return w
	}
	out := *w
	out.Requests = nil
	alone := 0
	for _, r := range w.Requests {
		which := r.Session - 1
		if r.Session == 0 {
			which = alone
			alone++
		}
		if which%n == 0 {
			out.Requests = append(out.Requests, r)
		}
	}
	return &out
}

// Shorter returns the workload with answers of at most n tokens, which is above 0, as if
// each request asked for no more. Later prompts have what they have.
func (w *Workload) Shorter(n int) *Workload {
	out := *w
	out.Requests = slices.Clone(w.Requests)
	for i := range out.Requests {
		out.Requests[i].Output = min(out.Requests[i].Output, n)
	}
	return &out
}
