package agent

import (
	"testing"

	"github.com/inferrail/inferrail/policy"
)

// A replica of which nothing is learned yet is taken to be as fast as those that
// serve its model, or else as all.
func TestSpeedsAreShared(t *testing.T) {
	a, b, c := startEngine(t, 0, "m"), startEngine(t, 0, "m", "n"), startEngine(t, 0, "n")
	d := startEngine(t, 0, "else")
	s := newStage(t, nil, ReplicaConfig{ID: "a", URL: a.URL()}, ReplicaConfig{ID: "b", URL: b.URL()},
		ReplicaConfig{ID: "c", URL: c.URL()}, ReplicaConfig{ID: "d", URL: d.URL()})
	s.expect("else=d m=a,b n=b,c")
	teach := func(id string, perToken float64) {
		for i := range 200 {
			w := policy.Prefill(500+100*(i%20), 0)
			s.member(id).replica.Calibration().Observe(policy.Observation{Work: w, Seconds: perToken*w.Tokens + 0.01})
		}
	}
	teach("a", 100e-6)
	teach("c", 400e-6)
	s.fleet.shareSpeeds()
	f := func(id string, perToken float64) {
		t.Helper()
		speed := s.member(id).replica.Calibration().Speed()
		w := policy.Prefill(1000, 0)
		if got, want := speed.Time(w), perToken*1000+0.01; got < 0.9*want || got > 1.1*want {
			t.Errorf("%s is expected to take %v for %v tokens, want %v", id, got, w.Tokens, want)
		}
	}
	f("a", 100e-6)
	f("b", 100e-6) // as the one that serves the first of its models
	f("c", 400e-6)
	f("d", 250e-6) // the median of both
}
