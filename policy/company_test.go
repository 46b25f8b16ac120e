package policy

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// typicalPrompt is about what a prompt of a thousand tokens takes in these tests.
const typicalPrompt = 0.035

// A first token is late by the rest of a step and by another one, in which each sequence
// takes its time. What each takes is found though the steps' own time is not known, and
// changes; and one absurd time, or a few, hardly change it.
func TestCompanyLearns(t *testing.T) {
	for seed := range uint64(8) {
		rng := rand.New(rand.NewPCG(seed, 11))
		each := []float64{1e-4, 5e-4, 2e-3}[seed%3]
		var k company
		add := func(n int, level float64) {
			for range n {
				requests := float64(1 + rng.IntN(30))
				step := 6e-3 + each*requests
				k.add(requests, level+step*(0.5+rng.Float64()), typicalPrompt)
			}
		}
		near := func(what string, part float64) {
			t.Helper()
			if got, ok := k.seen(); !ok || math.Abs(got-each) > part*each {
				t.Errorf("seed %d: %v makes each %v, which takes %v", seed, what, got, each)
			}
		}
		add(2000, -0.004)
		near("a step", 0.25)
		before, _ := k.seen()
		k.add(30, 60, typicalPrompt)
		if got, _ := k.seen(); math.Abs(got-before) > 0.05*each {
			t.Errorf("seed %d: one absurd first token makes %v of %v", seed, got, before)
		}
		add(2000, 0.006)
		near("another level", 0.25)
	}
}

// What is only chance is hardly anything, and so is what is always the same.
func TestCompanyOfNothing(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 12))
	var none, chance, same company
	if none.get() != 0 {
		t.Errorf("nothing is known, and it says %v", none.get())
	}
	for range 1000 {
		chance.add(float64(rng.IntN(20)), 4e-3*rng.NormFloat64(), typicalPrompt)
		same.add(7, 5e-3, typicalPrompt)
	}
	if got, _ := chance.seen(); math.Abs(got) > 1e-4 {
		t.Errorf("chance alone makes it %v", got)
	}
	if got, ok := same.seen(); ok {
		t.Errorf("always the same makes it %v", got)
	}
}

// Replicas that have seen little take what others have seen, and one that nobody has
// asked the same.
func TestCompanyIsShared(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 13))
	now := time.Unix(1000, 0)
	standings := make([]Standing, 5)
	var peers []*Peer
	for i := range standings {
		s := &standings[i]
		peers = append(peers, &Peer{Standing: s, Models: []string{"m"}})
		for range []int{400, 400, 400, 5, 0}[i] {
			n := float64(1 + rng.IntN(20))
			s.company.add(n, 1e-3*n+4e-3*rng.Float64(), typicalPrompt)
		}
		// Three quarters of what is asked are cached.
		s.lengths.Add(4000)
		s.prompts.Add(1000)
	}
	for range 10 {
		ShareSpeeds(peers, now)
	}
	for i := range standings {
		var c Candidate
		standings[i].Describe(&c, 3, 0, now)
		// Each takes 1 ms. It meets 3, and 9 others 0.3 · 3 and 2 · 3.
		if got := float64(c.Company); math.Abs(got-65e-3) > 13e-3 {
			t.Errorf("replica %d: they make %v later, want 65 ms", i, got)
		}
	}
	ShareSpeeds(nil, now)
}

// Whatever is added, and supposed, it is a time.
func TestCompanyIsATime(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 14))
	odd := []float64{0, -1, 1, 1e-300, 1e300, math.Inf(1), math.Inf(-1), math.NaN(), 5e-3, 60}
	any := func() float64 { return odd[rng.IntN(len(odd))] }
	for range 2000 {
		var k company
		for range 1 + rng.IntN(60) {
			switch rng.IntN(4) {
			case 0:
				k.suppose(any())
			default:
				k.add(any(), any(), any())
			}
			if got := k.get(); !(got >= 0 && got <= MostTTFT) {
				t.Fatalf("it is %v: %+v", got, &k)
			}
			k.seen()
		}
	}
}

// What is usual is what was there for some time, however often one looks; one moment is
// little of it.
func TestHabit(t *testing.T) {
	var h habit
	now := time.Unix(1000, 0)
	for i := range 600 {
		now = now.Add(100 * time.Millisecond)
		for range 1 + i%2*5 {
			h.add(float64(i%2*6), now)
		}
	}
	if got := h.get(); math.Abs(got-3) > 0.2 {
		t.Errorf("0 and 6 by turns are usually %v", got)
	}
	for range 600 {
		now = now.Add(100 * time.Millisecond)
		h.add(1, now)
	}
	if got := h.get(); math.Abs(got-1) > 0.1 {
		t.Errorf("a minute of 1 is usually %v", got)
	}
	// After an hour without decisions what is there now is all that is known.
	now = now.Add(time.Hour)
	h.add(5, now)
	if got := h.get(); math.Abs(got-5) > 0.1 {
		t.Errorf("after an hour it is %v", got)
	}
	if n := testing.AllocsPerRun(100, func() { now = now.Add(time.Second); h.add(1, now) }); n > 0 {
		t.Errorf("it allocates %v times", n)
	}
}

// A replica that is slower than others counts for those who follow, and one that is hardly
// slower does not.
func TestFollowersAtSlowReplicas(t *testing.T) {
	now := time.Unix(1000, 0)
	standings := make([]Standing, 4)
	var peers []*Peer
	for i := range standings {
		s := &standings[i]
		peers = append(peers, &Peer{Standing: s, Models: []string{"m"}})
		s.Calibration.SetPrior(Speed{A: []float64{30e-6, 33e-6, 36e-6, 120e-6}[i]})
		s.lengths.Add(4000)
		s.prompts.Add(1000)
	}
	shareCompany(peers, func(p *Peer) string { return p.Models[0] })
	for i := range standings {
		var c Candidate
		standings[i].Describe(&c, 0, 0, now)
		if slow := i == 3; (c.Company > 0) != slow {
			t.Errorf("replica %d: what follows is delayed by %v", i, c.Company)
		}
	}
}
