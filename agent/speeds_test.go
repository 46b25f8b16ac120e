package agent

import (
	"strings"
	"testing"
	"time"

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

// A replica that has proved to be slow, and of which nothing was heard since, is
// supposed to be as fast as the others, for one request at a time.
func TestSlowReplicaIsTriedAgain(t *testing.T) {
	a, b := startEngine(t, 0, "m"), startEngine(t, 0, "m")
	s := newStage(t, nil, ReplicaConfig{ID: "a", URL: a.URL()}, ReplicaConfig{ID: "b", URL: b.URL()})
	s.expect("m=a,b")
	teach := func(id string, n int, perToken float64) {
		for i := range n {
			w := policy.Prefill(500+100*(i%20), 0)
			s.member(id).replica.Calibration().Observe(policy.Observation{Work: w, Seconds: perToken*w.Tokens + 0.01})
		}
	}
	expect := func(when string, perToken float64) {
		t.Helper()
		speed := s.member("a").replica.Calibration().Speed()
		if got, want := speed.Time(policy.Prefill(1000, 0)), perToken*1000+0.01; got < 0.8*want || got > 1.25*want {
			t.Errorf("%s: it is expected to take %v, want %v", when, got, want)
		}
	}
	teach("a", 100, 1000e-6)
	teach("b", 100, 100e-6)
	s.fleet.shareSpeeds()
	teach("b", policy.Unobserved-1, 100e-6)
	s.fleet.shareSpeeds()
	expect("too early", 1000e-6)
	teach("b", 1, 100e-6)
	var under policy.Entry
	backlog := s.member("a").replica.Backlog()
	backlog.Enter(&under, policy.Prefill(1000, 0), true, time.Now(), 1)
	s.fleet.shareSpeeds()
	expect("a request is there already", 1000e-6)
	backlog.Leave(&under, time.Now())
	s.fleet.shareSpeeds()
	expect("tried again", 100e-6)
	teach("a", 1, 1000e-6)
	s.fleet.shareSpeeds()
	expect("slow still", 1000e-6)
}

// Of replicas none of whose answers stream it is known all the same which are slow.
func TestSpeedsOfWholeAnswers(t *testing.T) {
	a, b, c := startEngine(t, 0, "m"), startEngine(t, 0, "m"), startEngine(t, 0, "m")
	s := newStage(t, nil, ReplicaConfig{ID: "a", URL: a.URL()}, ReplicaConfig{ID: "b", URL: b.URL()}, ReplicaConfig{ID: "c", URL: c.URL()})
	s.expect("m=a,b,c")
	for range 100 {
		for id, seconds := range map[string]float64{"a": 1, "b": 1.3, "c": 4} {
			s.member(id).replica.Filter().Observe(1000, seconds)
		}
	}
	s.fleet.shareSpeeds()
	f := func(id string, times float64) {
		t.Helper()
		if got, want := s.member(id).replica.Calibration().Speed().A, times*policy.DefaultSpeed.A; got < 0.99*want || got > 1.01*want {
			t.Errorf("%s takes %v for a token, want %v", id, got, want)
		}
	}
	f("a", 1)
	f("b", 1)
	f("c", 4/1.3)
}

// A replica that has become slower, or as fast as before again, is told of once.
func TestChangesOfSpeedAreTold(t *testing.T) {
	engine := startEngine(t, 0, "m")
	c := DefaultConfig()
	c.Replicas = []ReplicaConfig{{ID: "a", URL: engine.URL()}}
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	log := &lines{}
	s := newStageOf(t, &c, func(f *fleet) { f.log = log.logger() })
	s.expect("m=a")
	expect := func(when string, n int, perToken float64, slower, faster int) {
		t.Helper()
		for i := range n {
			w := policy.Prefill(500+100*(i%20), 0)
			s.member("a").replica.Calibration().Observe(policy.Observation{Work: w, Seconds: perToken*w.Tokens + 0.01})
			s.fleet.shareSpeeds()
		}
		for text, want := range map[string]int{"replica has become slower": slower, "replica has become faster": faster} {
			if got := strings.Count(log.String(), text); got != want {
				t.Errorf("%s: %q is told %d times, want %d:\n%s", when, text, got, want, log)
			}
		}
	}
	expect("what it is like at first", 100, 100e-6, 0, 0)
	expect("hardly slower", 100, 120e-6, 0, 0)
	expect("throttled", 100, 500e-6, 1, 0)
	expect("no longer", 100, 100e-6, 1, 1)
}
