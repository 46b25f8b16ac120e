package policy

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// An engine that works in steps lets a prompt wait for those that are under way while it
// generates: what the Speed does not have of that is learned apart from how it is
// when the engine is idle, and so both are foretold.
func TestSendingLearnsLateness(t *testing.T) {
	for seed := range uint64(5) {
		rng := rand.New(rand.NewPCG(seed, 1))
		var s Standing
		s.Calibration.SetPrior(Speed{A: 30e-6, B: 1e-10, D: 2e-3})
		now := time.Unix(1000, 0)
		// send sends a prompt beside so many others that are generated, and returns how
		// far off it was foretold.
		send := func(inside int, times float64) float64 {
			r := Request{Tokens: 50 + rng.IntN(3000)}
			var c Candidate
			s.Describe(&c, inside, 0, now)
			foretold := TTFT(&r, &c)
			var p Sending
			p.Promise(&s, r.Tokens, 1, 0)
			p.Foretell(&r, &c)
			p.Expect(&s, true, true, now)
			took := 30e-6*float64(r.Tokens) + 4e-3
			if inside > 0 {
				took += 8e-3 + 6e-3*rng.Float64()
			}
			took *= times
			now = now.Add(time.Duration(took * 1e9))
			p.First(inside+1, 0, true, now)
			p.Leave(now)
			now = now.Add(time.Second)
			return foretold/took - 1
		}
		for range 300 {
			send(0, 1)
			send(20, 1)
		}
		idle, busy := 0.0, 0.0
		for range 100 {
			idle += send(0, 1) / 100
			busy += send(20, 1) / 100
		}
		if math.Abs(idle) > 0.05 || math.Abs(busy) > 0.05 {
			t.Errorf("seed %d: an idle engine is foretold %.0f %% off, a busy one %.0f %%", seed, 100*idle, 100*busy)
		}
		var c Candidate
		s.Describe(&c, 20, 0, now)
		was := TTFT(&Request{Tokens: 1000}, &c)
		send(20, 300)
		s.Describe(&c, 20, 0, now)
		if off := TTFT(&Request{Tokens: 1000}, &c)/was - 1; math.Abs(off) > 0.01 {
			t.Errorf("seed %d: one absurd first token changes what is foretold by %.1f %%", seed, 100*off)
		}
	}
}

// A Lateness is near the median of what was seen, whatever it is, and a number.
func FuzzLateness(f *testing.F) {
	f.Add(0.02, 0.01, 0.005)
	f.Add(1e-6, 3600.0, 0.0)
	f.Add(math.Inf(1), math.NaN(), -1.0)
	f.Fuzz(func(t *testing.T, took, foretold, short float64) {
		var l Lateness
		sound := took > 0 && took < 3600 && foretold > 0 && foretold < 3600 && short > 0 && short < 3600
		for range 5000 {
			l.Add(took, foretold, short)
		}
		got := l.Get()
		if !(math.Abs(got) < MostTTFT) {
			t.Fatalf("%v after %v, foretold %v", got, took, foretold)
		}
		if sound && (got < min(took-foretold, 0)-1e-9 || got > max(took-foretold, 0)+1e-9) {
			t.Errorf("%v after %v, foretold %v", got, took, foretold)
		}
	})
}
