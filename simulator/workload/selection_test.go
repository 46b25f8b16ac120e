package workload

import (
	"reflect"
	"slices"
	"testing"
	"time"
)

func TestSelection(t *testing.T) {
	s := time.Second
	w := &Workload{Name: "w", Block: 512, Requests: []Request{
		{At: 0, Session: 1}, {At: 1 * s}, {At: 2 * s, Session: 2}, {At: 2 * s}, {At: 3 * s, Session: 1, Turn: 1}, {At: 4 * s}, {At: 6 * s, Session: 3}, {At: 7 * s, Session: 2, Turn: 1}},
		Throttles: []Throttle{{Engine: 0, At: 1 * s, Until: 2 * s, Factor: 2}, {Engine: 1, At: 3 * s, Factor: 3}}}
	before := *w
	before.Requests = slices.Clone(w.Requests)
	at := func(w *Workload) (out []float64) {
		for _, r := range w.Requests {
			out = append(out, r.At.Seconds())
		}
		return out
	}
	f := func(what string, got *Workload, throttles []Throttle, want ...float64) {
		t.Helper()
		if !slices.Equal(at(got), want) || !slices.Equal(got.Throttles, throttles) || got.Block != 512 || got.Name != "w" {
			t.Errorf("%s: %v, %+v", what, at(got), got.Throttles)
		}
		if !reflect.DeepEqual(*w, before) {
			t.Fatalf("%s has changed what it was made from", what)
		}
	}
	f("faster", w.Faster(2), []Throttle{{0, s / 2, s, 2}, {1, 3 * s / 2, 0, 3}}, 0, .5, 1, 1, 1.5, 2, 3, 3.5)
	f("slower", w.Faster(0.5), []Throttle{{0, 2 * s, 4 * s, 2}, {1, 6 * s, 0, 3}}, 0, 2, 4, 4, 6, 8, 12, 14)
	f("as fast", w.Faster(1), w.Throttles, at(w)...)
	f("window", w.Window(2*s, 6*s), []Throttle{{1, s, 0, 3}}, 0, 0, 1, 2)
	f("a window to the end", w.Window(1500*time.Millisecond, 0), []Throttle{{0, 0, s / 2, 2}, {1, 3 * s / 2, 0, 3}}, .5, .5, 1.5, 2.5, 4.5, 5.5)
	f("a window before the beginning", w.Window(0, 1*s), nil, 0)
	f("nothing", w.Window(8*s, 9*s), []Throttle{{1, 0, 0, 3}})
	f("turned round", w.Window(5*s, 2*s), nil)
	f("limit", w.Limit(3), w.Throttles, 0, 1, 2)
	f("no limit", w.Limit(100), w.Throttles, at(w)...)
	f("none", w.Limit(-1), w.Throttles)
	// Of the conversations the first and the third, of the others the first and the third.
	f("every second", w.OnlyEvery(2), w.Throttles, 0, 1, 3, 4, 6)
	f("every", w.OnlyEvery(1), w.Throttles, at(w)...)
	w.Requests[0].Output, w.Requests[1].Output, w.Requests[2].Output = 4, 5, 6
	before.Requests = slices.Clone(w.Requests)
	f("shorter", w.Shorter(5), w.Throttles, at(w)...)
	if got := w.Shorter(5).Requests; got[0].Output != 4 || got[1].Output != 5 || got[2].Output != 5 {
		t.Errorf("shorter answers: %+v", got)
	}
}
