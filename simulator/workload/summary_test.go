package workload

import (
	"encoding/json"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

const ms = time.Millisecond

// near compares what was worked out by hand.
func near(t *testing.T, what string, got, want float64) {
	t.Helper()
	if math.Abs(got-want) > 1e-9*max(1, math.Abs(want)) {
		t.Errorf("%s is %v, want %v", what, got, want)
	}
}

func TestQuantilesOf(t *testing.T) {
	f := func(want Quantiles, values ...float64) {
		t.Helper()
		if got := QuantilesOf(values); got != want {
			t.Errorf("%v: got %+v, want %+v", values, got, want)
		}
	}
	f(Quantiles{})
	f(Quantiles{7, 7, 7, 7, 7}, 7)
	f(Quantiles{2, 1, 3, 3, 3}, 3, 1)
	f(Quantiles{5.5, 5, 9, 10, 10}, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1)
	hundred := make([]float64, 100)
	for i := range hundred {
		hundred[i] = float64(100 - i)
	}
	f(Quantiles{50.5, 50, 90, 99, 100}, hundred...)
	f(Quantiles{51, 51, 91, 100, 101}, append(hundred, 101)...)
}

// A run of two replicas and six requests, of which one comes while all warms up, one
// fails, one is refused and one is never sent.
func TestSummarize(t *testing.T) {
	w := &Workload{Requests: []Request{{At: 0}, {At: 1000 * ms}, {At: 2000 * ms}, {At: 3000 * ms}, {At: 4000 * ms}, {At: 5000 * ms}, {At: 6000 * ms}}}
	records := []Record{
		{Index: 0, Scheduled: 0, Sent: 0, First: 900 * ms, End: 950 * ms, Input: 999, Output: 9, Replica: 1},
		// Sent 10 ms late, first token 100 ms after it was to be sent, then 4 in 60 ms.
		{Index: 1, Scheduled: 1000 * ms, Sent: 1010 * ms, First: 1100 * ms, End: 1160 * ms, Input: 100, Cached: 40, Output: 4, Replica: 0,
			Predicted: 45 * ms, Gaps: []time.Duration{10 * ms, 20 * ms, 30 * ms}},
		{Index: 3, Scheduled: 3000 * ms, Sent: 3000 * ms, First: 3300 * ms, End: 3300 * ms, Input: 300, Cached: 160, Output: 1, Replica: 1, Predicted: 600 * ms},
		{Index: 4, Scheduled: 4000 * ms, Sent: 4000 * ms, Failure: "reset", Input: 5000, Cached: 5000, Replica: 1},
		{Index: 2, Scheduled: 2000 * ms, Sent: 2000 * ms, First: 2200 * ms, End: 6000 * ms, Input: 600, Cached: 0, Output: 39, Replica: 1},
		{Index: 5, Scheduled: 5000 * ms, Sent: 5000 * ms, Failure: Refused, Replica: -1},
		{},
	}
	s := Summarize(records, w, SummaryOptions{Policy: "p", Replicas: 3, Warm: 500 * ms, Limits: Limits{TTFT: 250, TPOT: 50}})
	if s.Policy != "p" || s.Requests != 6 || s.Failed != 2 || s.Refused != 1 || !slices.Equal(s.Replicas, []int{1, 2, 0}) {
		t.Errorf("%+v", s)
	}
	if want := map[string]int{"reset": 1, Refused: 1, "not sent": 1}; !reflect.DeepEqual(s.Failures, want) {
		t.Errorf("failures %v, want %v", s.Failures, want)
	}
	if want := (Quantiles{200, 200, 300, 300, 300}); s.TTFT != want {
		t.Errorf("ttft %+v", s.TTFT)
	}
	if want := (Quantiles{60, 20, 100, 100, 100}); s.TPOT != want {
		t.Errorf("tpot %+v", s.TPOT)
	}
	if want := (Quantiles{20, 20, 30, 30, 30}); s.ITL != want {
		t.Errorf("itl %+v", s.ITL)
	}
	if want := (Quantiles{(160 + 4000 + 300) / 3.0, 300, 4000, 4000, 4000}); s.E2E != want {
		t.Errorf("e2e %+v", s.E2E)
	}
	if want := (Quantiles{10 / 3.0, 0, 10, 10, 10}); s.Lag != want {
		t.Errorf("lag %+v", s.Lag)
	}
	near(t, "seconds", s.Seconds, 5.5)
	near(t, "rate", s.Rate, 6/5.5)
	near(t, "hit rate", s.HitRate, 200.0/1000)
	near(t, "hotspot", s.Hotspot, 740.0/(800.0/3))
	// The first is good, the second has too slow tokens, the third too late a first.
	near(t, "good", s.Good, 1.0/6)
	near(t, "goodput", s.Goodput, 1/5.5)
	// 45 of 90 ms, 600 of 300 ms.
	near(t, "prediction", s.Prediction, 1.25)
	near(t, "prediction error", s.PredictionError, 0.75)

	nobody := Summarize(nil, &Workload{}, SummaryOptions{Replicas: 2})
	if nobody.Requests != 0 || len(nobody.Replicas) != 2 {
		t.Errorf("%+v", nobody)
	}
	if _, err := json.Marshal(nobody); err != nil {
		t.Error(err)
	}
	none := Summarize(make([]Record, 7), w, SummaryOptions{})
	if none.Requests != 7 || none.Failed != 7 || none.Good != 0 {
		t.Errorf("%+v", none)
	}
}

// What was computed ahead is work of its replica, and what is found of it is not saved: of two
// requests behind one beginning the second finds 60 tokens, of which 50 were computed for it.
func TestSummarizeAhead(t *testing.T) {
	w := &Workload{Requests: []Request{{At: 1000 * ms}, {At: 2000 * ms}}}
	records := []Record{
		{Index: 0, Scheduled: 1000 * ms, Sent: 1000 * ms, First: 1100 * ms, End: 1100 * ms, Input: 100, Output: 1, Replica: 0},
		{Index: 1, Scheduled: 2000 * ms, Sent: 2000 * ms, First: 2100 * ms, End: 2100 * ms, Input: 100, Cached: 60, Output: 1, Replica: 1},
	}
	f := func(replicas int, ahead []int, hits, part, hotspot float64) {
		t.Helper()
		s := Summarize(records, w, SummaryOptions{Replicas: replicas, Ahead: ahead})
		near(t, "hit rate", s.HitRate, hits)
		near(t, "ahead", s.Ahead, part)
		near(t, "hotspot", s.Hotspot, hotspot)
		if text, err := json.Marshal(s); err != nil || strings.Contains(string(text), `"ahead"`) != (part > 0) {
			t.Errorf("%v: as JSON %s, error %v", ahead, text, err)
		}
	}
	f(2, nil, 0.3, 0, 100/70.0)
	f(2, []int{0, 0}, 0.3, 0, 100/70.0)
	f(2, []int{0, 50}, 0.05, 0.25, 100/95.0)
	f(2, []int{50, 0}, 0.05, 0.25, 150/95.0)
	// What nobody has asked for after all is lost.
	f(2, []int{0, 90}, -0.15, 0.45, 130/115.0)
	// One that has served nobody is one of the replicas.
	f(0, []int{0, 0, 50}, 0.05, 0.25, 3*100/190.0)
	f(3, []int{0, 50}, 0.05, 0.25, 3*100/190.0)
}

func TestMedians(t *testing.T) {
	runs := []Summary{
		{Policy: "b", Requests: 1, HitRate: 0.5, TTFT: Quantiles{Mean: 10, P99: 100}, Replicas: []int{1, 2}, Failures: map[string]int{"x": 4}, Failed: 4},
		{Policy: "a", HitRate: 0.25, Doubts: []string{"slow"}},
		{Policy: "b", Requests: 3, HitRate: 0.1, TTFT: Quantiles{Mean: 30, P99: 300}, Replicas: []int{5, 6}},
		{Policy: "b", Requests: 2, HitRate: 0.2, TTFT: Quantiles{Mean: 50, P99: 50}, Replicas: []int{3, 4, 5}, Failures: map[string]int{"x": 2, "y": 9}, Failed: 11},
		{Policy: "a", HitRate: 0.75, Doubts: []string{"slow", "late"}},
	}
	of := func(policy string) Summary {
		return Medians(slices.DeleteFunc(slices.Clone(runs), func(s Summary) bool { return s.Policy != policy }))
	}
	got := []Summary{of("b"), of("a")}
	want := []Summary{
		{Policy: "b", Requests: 2, HitRate: 0.2, TTFT: Quantiles{Mean: 30, P99: 100}, Replicas: []int{3, 4, 0}, Failures: map[string]int{"x": 2}, Failed: 4,
			Spread: Spread{Runs: 3, TTFTMean: [2]float64{10, 50}, TTFTP99: [2]float64{50, 300}, HitRate: [2]float64{0.1, 0.5}}},
		{Policy: "a", HitRate: 0.5, Doubts: []string{"slow", "late"}, Spread: Spread{Runs: 2, HitRate: [2]float64{0.25, 0.75}}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

// No number of a summary is forgotten by its medians.
func TestMediansOfAll(t *testing.T) {
	var s Summary
	n := 0
	var fill func(v reflect.Value)
	fill = func(v reflect.Value) {
		switch v.Kind() {
		case reflect.Float64:
			n++
			v.SetFloat(float64(n))
		case reflect.Int:
			n++
			v.SetInt(int64(n))
		case reflect.Struct:
			for i := range v.NumField() {
				if v.Type().Field(i).Name != "Spread" {
					fill(v.Field(i))
				}
			}
		}
	}
	fill(reflect.ValueOf(&s).Elem())
	if got := Medians([]Summary{s}); !reflect.DeepEqual(got, s) {
		t.Errorf("got  %+v\nwant %+v", got, s)
	}
}
