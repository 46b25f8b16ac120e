package policy

import (
	"math"
	"testing"
)

func TestLMetric(t *testing.T) {
	f := func(tokens int, c Candidate, want float64) {
		t.Helper()
		costs := []float64{-1}
		LMetric{}.Score(&Request{Tokens: tokens}, []Candidate{c}, costs)
		if costs[0] != want {
			t.Errorf("%d tokens at %+v: %v, want %v", tokens, c, costs[0], want)
		}
	}
	f(1000, Candidate{}, 1000)
	f(1000, Candidate{Cached: 400}, 600)
	f(1000, Candidate{Cached: 400, InFlight: 2}, 1800)
	f(1000, Candidate{Cached: 400, InFlight: 2, Ahead: Work{Tokens: 100}}, 2100)
	f(1000, Candidate{InFlight: 2, Share: 0.5}, 6000)
	// One token is always computed.
	f(1000, Candidate{Cached: 1000}, 1)
	f(1000, Candidate{Cached: 1000, InFlight: 9}, 10)
	f(1000, Candidate{Cached: 5000}, 1)
	// A prompt whose length is not known goes where least is ahead.
	f(0, Candidate{InFlight: 1, Ahead: Work{Tokens: 99}}, 200)
	f(1000, Candidate{Cached: -7}, 1000)
	f(1000, Candidate{Ahead: Work{Tokens: math.NaN()}}, 1000)
	f(1000, Candidate{Ahead: Work{Tokens: -5}}, 1000)
	f(1000, Candidate{Ahead: Work{Tokens: math.Inf(1)}}, math.Inf(1))
	f(math.MaxInt, Candidate{Cached: math.MinInt32}, math.MaxInt)
	f(math.MinInt, Candidate{Cached: math.MaxInt32}, 1)
}
