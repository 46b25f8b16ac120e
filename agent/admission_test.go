package agent

import (
	"testing"
	"time"

	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/proxy"
)

// TestGrants: a model is granted what it says, and otherwise what all are; what was
// observed of it outlives a reload that changes the rules.
func TestGrants(t *testing.T) {
	config := func(text string) *Config {
		t.Helper()
		c := DefaultConfig()
		if err := c.ParseConfig([]byte("replicas: [{url: http://gpu:8000}]\n" + text)); err != nil {
			t.Fatal(err)
		}
		if err := c.Validate(); err != nil {
			t.Fatal(err)
		}
		return &c
	}
	old := config(`
routing: {admission: {budget: 5s}, queue: {max: 9}}
models: [{name: m, admission: {percentile: 50}, queue: {timeout: 1s}, hold: 20ms, pieces: 200ms, prewarm: 50ms}]`)
	p := policy.NewCostModel()
	m, other := &proxy.Model{Name: "m", Policy: p}, &proxy.Model{Name: "other", Policy: p}
	old.grant(m, nil)
	old.grant(other, nil)
	now := time.Now()
	m.Admission.Observe(now, time.Second, 0)
	if s := m.Admission.State(now); s.Mode != "empirical" || s.Percentile != 0.5 || s.Window != 30*time.Second || s.Samples != 1 {
		t.Errorf("m: %+v", s)
	}
	if m.Budget != 5*time.Second || m.Waiting != (proxy.Waiting{Max: 9, Timeout: time.Second}) {
		t.Errorf("m: budget %v, %+v", m.Budget, m.Waiting)
	}
	if s := other.Admission.State(now); s.Percentile != 0.9 || other.Waiting.Timeout != 10*time.Second {
		t.Errorf("other: %+v, %+v", s, other.Waiting)
	}
	if m.Holding.Lead != 0.02 || other.Holding.Lead != 0.05 {
		t.Errorf("held: %+v, other %+v", m.Holding, other.Holding)
	}
	if m.Pieces.Length != 0.2 || other.Pieces.Length != 0.5 {
		t.Errorf("in pieces: %+v, other %+v", m.Pieces, other.Pieces)
	}
	if m.Prewarming.Length != 0.05 || other.Prewarming.Length != 0.1 {
		t.Errorf("ahead: %+v, other %+v", m.Prewarming, other.Prewarming)
	}
	blind := &proxy.Model{Name: "m", Policy: policy.LeastRequest{}}
	if old.grant(blind, nil); blind.Pieces != (policy.Pieces{}) {
		t.Errorf("least_request, which weighs nothing that has begun, has pieces: %+v", blind.Pieces)
	}

	if blind.Prewarming.On() {
		t.Errorf("least_request, whose costs are no times, has something computed ahead: %+v", blind.Prewarming)
	}

	next := &proxy.Model{Name: "m", Policy: p}
	config("routing: {admission: {mode: absolute, window: 10s}, hold: 1s, pieces: 2s}\nmodels: [{name: m, hold: off, pieces: off, prewarm: off}]").grant(next, m)
	if s := next.Admission.State(now); s.Mode != "absolute" || s.Window != 10*time.Second || s.Samples != 1 {
		t.Errorf("after the reload: %+v", s)
	}
	if next.Holding.Holds() {
		t.Errorf("after the reload: held %+v", next.Holding)
	}
	if next.Pieces != (policy.Pieces{}) {
		t.Errorf("after the reload: in pieces %+v", next.Pieces)
	}
	if next.Prewarming.On() {
		t.Errorf("after the reload: ahead %+v", next.Prewarming)
	}
	if next.Budget != 0 || next.Waiting.Max != 0 {
		t.Errorf("after the reload: budget %v, %+v", next.Budget, next.Waiting)
	}
}
