package workload

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"
)

// Curves are what a chart draws of one run beyond the numbers of its summary. Times
// are milliseconds, to a tenth. NewCurves makes them; the zero value draws nothing.
type Curves struct {
	// TTFT are the times to first token at each of Parts.
	TTFT []float64 `json:"ttft"`
	// Windows are equal spans of the run, from its beginning to its last request.
	Windows []Window `json:"windows"`
	// Predicted are pairs of the predicted time to first token and the observed one,
	// of some requests that are evenly spread over the run.
	Predicted [][2]float64 `json:"predicted,omitempty"`
}

// Window is one span of a run: of the requests scheduled in it how many there were
// and their mean time to first token.
type Window struct {
	// Seconds is when it begins.
	Seconds  float64 `json:"seconds"`
	Requests int     `json:"requests"`
	TTFT     float64 `json:"ttft"`
}

// Parts are the parts of requests at which Curves.TTFT tells the time that they do not
// exceed: every fiftieth, and more of them towards the end.
var Parts = func() []float64 {
	var parts []float64
	for i := range 50 {
		parts = append(parts, float64(i)/50)
	}
	return append(parts, 0.985, 0.99, 0.995, 0.999, 1)
}()

const (
	curveWindows = 60
	curvePairs   = 150
)

// NewCurves makes the curves of a run whose first drop is left out. It returns nil
// when no request has had a token.
func NewCurves(records []Record, drop time.Duration) *Curves {
	var served []*Record
	for i := range records {
		if r := &records[i]; r.Failure == "" && r.First > 0 && r.Scheduled >= drop {
			served = append(served, r)
		}
	}
	if len(served) == 0 {
		return nil
	}
	slices.SortStableFunc(served, func(a, b *Record) int { return int(a.Scheduled - b.Scheduled) })
	c := &Curves{}

	times := make([]float64, len(served))
	for i, r := range served {
		times[i] = milliseconds(r.First - r.Scheduled)
	}
	sorted := slices.Sorted(slices.Values(times))
	for _, p := range Parts {
		// The smallest that so many do not exceed.
		c.TTFT = append(c.TTFT, tenth(sorted[max(int(math.Ceil(p*float64(len(sorted))))-1, 0)]))
	}

	first, last := served[0].Scheduled, served[len(served)-1].Scheduled
	span := ((last-first)/curveWindows + time.Millisecond).Truncate(time.Millisecond)
	for i, r := range served {
		if begin := first + (r.Scheduled-first)/span*span; len(c.Windows) == 0 || c.Windows[len(c.Windows)-1].Seconds != begin.Seconds() {
			c.Windows = append(c.Windows, Window{Seconds: begin.Seconds()})
		}
		w := &c.Windows[len(c.Windows)-1]
		w.Requests++
		w.TTFT += times[i]
	}
	for i := range c.Windows {
		c.Windows[i].TTFT = tenth(c.Windows[i].TTFT / float64(c.Windows[i].Requests))
	}

	var foretold []int
	for i, r := range served {
		if r.Predicted > 0 {
			foretold = append(foretold, i)
		}
	}
	for i := range min(len(foretold), curvePairs) {
		k := foretold[i*len(foretold)/min(len(foretold), curvePairs)]
		c.Predicted = append(c.Predicted, [2]float64{tenth(milliseconds(served[k].Predicted)), tenth(times[k])})
	}
	return c
}

// Marks are the marks of throttles, in the order of time.
func Marks(throttles []Throttle) []Mark {
	var marks []Mark
	for _, t := range throttles {
		marks = append(marks, Mark{t.At.Seconds(), fmt.Sprintf("replica %d is %gx slower", t.Engine, t.Factor)})
		if t.Until > 0 {
			marks = append(marks, Mark{t.Until.Seconds(), fmt.Sprintf("replica %d is as before", t.Engine)})
		}
	}
	slices.SortStableFunc(marks, func(a, b Mark) int { return cmp.Compare(a.Seconds, b.Seconds) })
	return marks
}

func tenth(v float64) float64 { return math.Round(v*10) / 10 }
