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
		// Three quarters of what is asked are cached, a tenth of that elsewhere, too.
		s.lengths.Add(4000)
		s.prompts.Add(1000)
		s.settled.Add(2700)
	}
	for range 10 {
		ShareSpeeds(peers, now)
	}
	for i := range standings {
		var c Candidate
		standings[i].Describe(&c, 3, 0, now)
		// Each takes 1 ms. It meets 3, and 20.25 others 0.3 · 3 and 2 · 3.
		if got := float64(c.Company); math.Abs(got-143e-3) > 28e-3 {
			t.Errorf("replica %d: they make %v later, want 143 ms", i, got)
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
			h.add(float64(i%2*6), now, habitMemory)
		}
	}
	if got := h.get(); math.Abs(got-3) > 0.2 {
		t.Errorf("0 and 6 by turns are usually %v", got)
	}
	for range 600 {
		now = now.Add(100 * time.Millisecond)
		h.add(1, now, habitMemory)
	}
	if got := h.get(); math.Abs(got-1) > 0.1 {
		t.Errorf("a minute of 1 is usually %v", got)
	}
	// After an hour without decisions what is there now is all that is known.
	now = now.Add(time.Hour)
	h.add(5, now, habitMemory)
	if got := h.get(); math.Abs(got-5) > 0.1 {
		t.Errorf("after an hour it is %v", got)
	}
	// A clock that is set back changes nothing, and counts from there.
	now = now.Add(-time.Hour)
	h.add(100, now, habitMemory)
	if got := h.get(); math.Abs(got-5) > 0.1 {
		t.Errorf("when the clock is set back it is %v", got)
	}
	h.add(6, now.Add(time.Hour), habitMemory)
	if got := h.get(); math.Abs(got-6) > 0.1 {
		t.Errorf("an hour after that it is %v", got)
	}
	if n := testing.AllocsPerRun(100, func() { now = now.Add(time.Second); h.add(1, now, habitMemory) }); n > 0 {
		t.Errorf("it allocates %v times", n)
	}
}

// A replica is busy for the part of the time in which it has something to compute: prompts
// of this agent, or others' that wait there. What it has had minutes ago is forgotten.
func TestBusy(t *testing.T) {
	// at is called for each moment at which something is asked, in order.
	f := func(name string, want float64, at func(s *Standing, second int, now time.Time)) {
		t.Helper()
		var s Standing
		var c Candidate
		rng, now := rand.New(rand.NewPCG(1, 15)), time.Unix(1000, 0)
		for i := range 3000 {
			moment := now.Add(time.Duration(i)*200*time.Millisecond + time.Duration(rng.Int64N(int64(200*time.Millisecond))))
			at(&s, i/5, moment)
			s.Describe(&c, 0, 0, moment)
			s.Describe(&c, 0, 0, moment.Add(-time.Microsecond)) // one that is late to ask
		}
		if got := float64(c.Busy); math.Abs(got-want) > 0.06 {
			t.Errorf("%s: it is busy for %v of the time, want %v", name, got, want)
		}
	}
	// A prompt is computed in each second that is computing.
	compute := func(computing func(second int) bool) func(s *Standing, second int, now time.Time) {
		var e *Entry
		return func(s *Standing, second int, now time.Time) {
			if yes := computing(second); yes && e == nil {
				e = new(Entry)
				s.Backlog.Enter(e, Prefill(1000, 0), true, now, 1)
			} else if !yes && e != nil {
				s.Backlog.Leave(e, now)
				e = nil
			}
		}
	}
	f("nothing", 0, compute(func(int) bool { return false }))
	f("one second of four", 0.25, compute(func(second int) bool { return second%4 == 3 }))
	f("all the time", 1, compute(func(int) bool { return true }))
	f("five minutes ago", 0.05, compute(func(second int) bool { return second < 300 }))
	others := func(waiting func(second int) int) func(s *Standing, second int, now time.Time) {
		return func(s *Standing, second int, now time.Time) {
			s.SetLoad(&Load{Running: 4, Waiting: waiting(second), WaitingTokens: -1, Told: now, Until: now.Add(time.Minute)})
		}
	}
	f("others wait half of the time", 0.5, others(func(second int) int { return second % 2 }))
	f("others run and none waits", 0, others(func(int) int { return 0 }))
}

// What a choice decides for later ones is cached where it went and nowhere else: nothing of
// what several have. Of requests with many candidates one in eight tells, and it costs no
// memory.
func TestSettled(t *testing.T) {
	f := func(chosen int, want float64, cached ...int32) {
		t.Helper()
		var s Standing
		candidates := make([]Candidate, len(cached))
		for i := range candidates {
			candidates[i].Cached = cached[i]
		}
		s.Settled(&Request{Tokens: 1000}, candidates, chosen)
		if got := s.settled.Get(); got != want {
			t.Errorf("of %v the one at %d has %v alone, want %v", cached, chosen, got, want)
		}
	}
	f(0, 0, 0, 0)
	f(0, 900, 900, 0)
	f(0, 700, 900, 200, 100)
	f(1, 0, 900, 200, 100)
	f(1, 0, 800, 800, 100)
	f(0, 600, 5000, 400) // more than there is of the prompt is not of it
	f(0, 50, 50)

	var s Standing
	many := make([]Candidate, 100)
	many[3].Cached = 400
	for rand := range uint64(80) {
		s.Settled(&Request{Tokens: 1000, Rand: rand}, many[:], 3+int(rand%8))
	}
	if got := s.settled.Get(); got != 400 {
		t.Errorf("those that tell have %v alone, want 400", got)
	}
	if n := testing.AllocsPerRun(100, func() { s.Settled(&Request{Tokens: 1000}, many, 3) }); n != 0 {
		t.Errorf("%v allocations", n)
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
		s.settled.Add(2000)
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
