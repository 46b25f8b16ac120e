package virtual

import (
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/simulator"
	"github.com/inferrail/inferrail/simulator/workload"
)

// Where replicas idle nothing is held: all is as without.
func TestHoldIdle(t *testing.T) {
	w, err := workload.Generate(workload.Options{Name: "w2", Rate: 0.5, Requests: 200, Longest: 2000})
	if err != nil {
		t.Fatal(err)
	}
	s := &scene{workload: w, policy: policy.NewCostModel(), fleet: Fleet{Engines: slices.Repeat([]simulator.Config{reference()}, 8), Events: true}}
	want := s.serve(t)
	s.fleet.Hold = 100 * time.Millisecond
	got := s.serve(t)
	if !reflect.DeepEqual(got, want) {
		t.Error("holding makes a difference")
	}
}

// Of requests that come at once before one replica the shortest is served first, and
// the long one does not wait for those that come much later.
func TestHoldShortestFirst(t *testing.T) {
	w := &workload.Workload{Name: "burst"}
	ask := func(at time.Duration, tokens int) {
		id := uint64(len(w.Requests) + 1)
		w.Requests = append(w.Requests, workload.Request{At: at, Parts: []workload.Part{{ID: id, Tokens: tokens}}, Output: 1})
	}
	ask(0, 30_000) // 2.3 s
	ask(time.Millisecond, 30_000)
	for i := range 400 { // 65 ms each, more than there is time for until the 23rd second
		ask(time.Duration(2+50*i)*time.Millisecond, 1000)
	}
	s := &scene{workload: w, policy: policy.NewCostModel(), fleet: Fleet{Engines: []simulator.Config{reference()}}}
	order := func() (long, short time.Duration, last time.Duration) {
		o := s.serve(t)
		for i, r := range o.Records {
			if i > 1 {
				short += (r.First - r.Sent) / 400
			}
			last = max(last, r.First)
		}
		return o.Records[1].First, short, last
	}
	_, shortBefore, lastBefore := order()
	s.fleet.Hold = 100 * time.Millisecond
	long, short, last := order()
	if long < 10*time.Second || long > 25*time.Second {
		t.Errorf("the long one is served at %v", long)
	}
	if short > shortBefore-900*time.Millisecond {
		t.Errorf("short ones wait for %v, without holding %v", short, shortBefore)
	}
	if last > lastBefore+20*time.Millisecond {
		t.Errorf("the last is served at %v, without holding %v", last, lastBefore)
	}
}

// What is held was taken before: requests that admission refuses wait beside it, and come
// to be held or are refused. Nobody is lost.
func TestHoldAdmission(t *testing.T) {
	w := &workload.Workload{Name: "crowd"}
	for i := range 300 {
		w.Requests = append(w.Requests, workload.Request{At: time.Duration(i) * 50 * time.Millisecond, Parts: []workload.Part{{ID: uint64(i + 1), Tokens: 500 + 7919*i%6000}}, Output: 5})
	}
	s := &scene{workload: w, policy: policy.NewCostModel(), fleet: Fleet{
		Engines: []simulator.Config{reference(), reference()}, Hold: 50 * time.Millisecond,
		Admission: Admission{Mode: "absolute", Budget: 2 * time.Second, Queue: 5, Timeout: time.Second},
	}}
	served, refused := 0, 0
	for i, r := range s.serve(t).Records {
		switch {
		case r.Failure == workload.Refused && r.First == 0:
			refused++
		case r.Failure == "" && r.First > r.Sent && r.End >= r.First:
			served++
		default:
			t.Errorf("request %d: %+v", i, r)
		}
	}
	// Both together do a good two thirds of what is asked.
	if served < 150 || refused < 30 {
		t.Errorf("%d are served, %d refused", served, refused)
	}
}

// On recorded conversations holding and pieces bring the mean near the bound, and cost the
// slowest hardly anything.
func TestHoldNearBound(t *testing.T) {
	withoutRace(t)
	f := func(w *workload.Workload, most float64) {
		t.Helper()
		fleet := Fleet{Engines: slices.Repeat([]simulator.Config{reference()}, 8), Events: true, EventLag: time.Millisecond, Lag: 250 * time.Microsecond}
		bound := workload.Summarize(fleet.Bound(w, NewChains(w, 512, 0)), w, workload.SummaryOptions{Replicas: 8})
		run := func() workload.Summary {
			o, err := fleet.Serve(t.Context(), w, policy.NewCostModel(), Options{})
			if err != nil {
				t.Fatal(err)
			}
			return workload.Summarize(o.Records, w, workload.SummaryOptions{Replicas: 8})
		}
		without := run()
		fleet.Hold, fleet.Pieces = 50*time.Millisecond, 500*time.Millisecond
		got := run()
		t.Logf("%s: mean %.3f times the bound, without both %.3f; p99 %.0f and %.0f", w.Name, got.TTFT.Mean/bound.TTFT.Mean, without.TTFT.Mean/bound.TTFT.Mean, got.TTFT.P99, without.TTFT.P99)
		if got.TTFT.Mean > most*bound.TTFT.Mean || got.TTFT.Mean > without.TTFT.Mean || got.TTFT.P99 > 1.05*without.TTFT.P99 {
			t.Errorf("%s: mean %.0f and p99 %.0f, without both %.0f and %.0f; the bound is %.0f", w.Name, got.TTFT.Mean, got.TTFT.P99, without.TTFT.Mean, without.TTFT.P99, bound.TTFT.Mean)
		}
	}
	conversation := readPacked(t, "conversation")
	f(conversation, 1.15)
	f(conversation.Faster(1.8), 1.15)
}
