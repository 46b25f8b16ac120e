package workload

import (
	"math"
	"slices"
	"testing"
	"time"
)

func TestCurves(t *testing.T) {
	const ms = time.Millisecond
	var records []Record
	for i := range 1000 {
		// Out of order, as they come when they are over.
		k := time.Duration(i * 7 % 1000)
		records = append(records, Record{Scheduled: k * 100 * ms, First: k*100*ms + (k+1)*ms, Predicted: 2 * (k + 1) * ms})
	}
	records = append(records, Record{Scheduled: 5 * ms, Failure: "refused"}, Record{Scheduled: 6 * ms})
	c := NewCurves(records, 0)
	if len(c.TTFT) != len(Parts) || c.TTFT[0] != 1 || c.TTFT[25] != 500 || c.TTFT[len(c.TTFT)-1] != 1000 || !slices.IsSorted(c.TTFT) {
		t.Errorf("times to first token %v", c.TTFT)
	}
	if i := slices.Index(Parts, 0.99); c.TTFT[i] != 990 {
		t.Errorf("p99 %v, want 990", c.TTFT[i])
	}
	requests := 0
	for i, w := range c.Windows {
		requests += w.Requests
		// A window's mean is that of its middle, to a request: 1 ms more every 100 ms.
		if middle := w.Seconds*10 + float64(w.Requests+1)/2; math.Abs(w.TTFT-middle) > 1.1 {
			t.Errorf("window %d %+v: want a mean of %.1f", i, w, middle)
		}
	}
	if len(c.Windows) != curveWindows || requests != 1000 {
		t.Errorf("%d requests in %d windows", requests, len(c.Windows))
	}
	if len(c.Predicted) != curvePairs || c.Predicted[0] != [2]float64{2, 1} {
		t.Errorf("%d predictions, %v", len(c.Predicted), c.Predicted)
	}
	for _, p := range c.Predicted {
		if p[0] != 2*p[1] {
			t.Errorf("a prediction of one request is with another's time: %v", p)
		}
	}
	if c := NewCurves(records, 50*time.Second); c.Windows[0].Seconds != 50 || c.TTFT[0] != 501 {
		t.Errorf("what is to be left out is not: %v", c)
	}
}

func TestCurvesOfLittle(t *testing.T) {
	if c := NewCurves(nil, 0); c != nil {
		t.Errorf("curves of nothing: %+v", c)
	}
	if c := NewCurves([]Record{{Scheduled: time.Second, Failure: "reset"}}, 0); c != nil {
		t.Errorf("curves of a failure: %+v", c)
	}
	c := NewCurves([]Record{{Scheduled: time.Second, First: 2 * time.Second}}, 0)
	if len(c.Windows) != 1 || c.Windows[0] != (Window{1, 1, 1000}) || c.TTFT[0] != 1000 || c.Predicted != nil {
		t.Errorf("curves of one request: %+v", c)
	}
}

func TestMarks(t *testing.T) {
	marks := Marks([]Throttle{{Engine: 2, At: 30 * time.Second, Until: time.Minute, Factor: 8}, {Engine: 0, At: 40 * time.Second, Factor: 1.5}})
	want := []Mark{{30, "replica 2 is 8x slower"}, {40, "replica 0 is 1.5x slower"}, {60, "replica 2 is as before"}}
	if !slices.Equal(marks, want) {
		t.Errorf("%v, want %v", marks, want)
	}
	if marks := Marks(nil); marks != nil {
		t.Errorf("%v of nothing", marks)
	}
}
