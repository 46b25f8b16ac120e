package policy

import (
	"fmt"
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
	// A clock that is set back changes nothing, and counts from there.
	now = now.Add(-time.Hour)
	h.add(100, now)
	if got := h.get(); math.Abs(got-5) > 0.1 {
		t.Errorf("when the clock is set back it is %v", got)
	}
	h.add(6, now.Add(time.Hour))
	if got := h.get(); math.Abs(got-6) > 0.1 {
		t.Errorf("an hour after that it is %v", got)
	}
	if n := testing.AllocsPerRun(100, func() { now = now.Add(time.Second); h.add(1, now) }); n > 0 {
		t.Errorf("it allocates %v times", n)
	}
}

// A replica is busy for the part of the time in which it has something to compute, streamed
// or not: prompts of this agent, or as far as is known, of others. What it has had minutes ago
// is forgotten, and one moment, as the first or after an hour, is little.
func TestBusy(t *testing.T) {
	start := time.Unix(1000, 0)
	// Requests come at random, and each is asked for just before it enters. A tick of two
	// milliseconds is often enough.
	f := func(name string, want float64, each float64, streams bool, seconds func(at time.Duration) float64, load func(s *Standing, at time.Duration, now time.Time)) {
		t.Helper()
		var s Standing
		var c Candidate
		rng := rand.New(rand.NewPCG(1, 15))
		type prompt struct {
			Entry
			ends time.Duration
		}
		var running []*prompt
		free := time.Duration(0)
		next := time.Duration(0)
		for at := time.Duration(0); at < 10*time.Minute; at += 2 * time.Millisecond {
			now := start.Add(at)
			for len(running) > 0 && running[0].ends <= at {
				if streams {
					s.Backlog.First(&running[0].Entry, 0, now)
				}
				s.Backlog.Leave(&running[0].Entry, now)
				running = running[1:]
			}
			if at < next {
				continue
			}
			next = at + time.Duration(rng.ExpFloat64()*each*float64(time.Second))
			if load != nil {
				load(&s, at, now)
			}
			s.Describe(&c, 0, 0, now)
			s.Describe(&c, 0, 0, now.Add(-time.Microsecond)) // one that is late to ask
			if x := seconds(at) * rng.ExpFloat64(); x > 0 && rng.IntN(4) == 0 {
				free = max(free, at) + time.Duration(x*float64(time.Second))
				p := &prompt{ends: free}
				s.Backlog.Enter(&p.Entry, Prefill(1000, 0), streams, now, x)
				running = append(running, p)
			}
		}
		if got := float64(c.Busy); math.Abs(got-want) > 0.1 {
			t.Errorf("%s: it is busy for %v of the time, want %v", name, got, want)
		}
	}
	nothing := func(time.Duration) float64 { return 0 }
	always := func(x float64) func(time.Duration) float64 { return func(time.Duration) float64 { return x } }
	for _, streams := range []bool{true, false} {
		f(fmt.Sprint("nothing ", streams), 0, 0.1, streams, nothing, nil)
		f(fmt.Sprint("one of four for half a second, ten a second come ", streams), 1, 0.1, streams, always(0.5), nil)
		f(fmt.Sprint("one of four for half a second, one a second comes ", streams), 0.125, 1, streams, always(0.5), nil)
		f(fmt.Sprint("one of four for a tenth, twenty a second come ", streams), 0.5, 0.05, streams, always(0.1), nil)
		f(fmt.Sprint("five minutes ago ", streams), 0.05, 0.1, streams, func(at time.Duration) float64 {
			if at < 5*time.Minute {
				return 0.3
			}
			return 0
		}, nil)
	}
	others := func(there func(second int) bool) func(s *Standing, at time.Duration, now time.Time) {
		return func(s *Standing, at time.Duration, now time.Time) {
			l := Load{WaitingTokens: -1, Told: now, Until: now.Add(time.Minute)}
			if there(int(at / time.Second)) {
				l.Running = 4
			}
			s.SetLoad(&l)
		}
	}
	f("others half of the time", 0.5, 0.1, true, nothing, others(func(second int) bool { return second%2 == 0 }))
	f("others all the time", 1, 0.1, true, nothing, others(func(int) bool { return true }))

	var s Standing
	var c Candidate
	s.SetLoad(&Load{Running: 4, Waiting: 4, WaitingTokens: -1, Told: start, Until: start.Add(24 * time.Hour)})
	if s.Describe(&c, 0, 0, start); c.Busy != 0 {
		t.Errorf("who sees a busy replica for the first time says %v", c.Busy)
	}
	if s.Describe(&c, 0, 0, start.Add(time.Hour)); !(c.Busy < 0.01) {
		t.Errorf("who has not looked for an hour and sees others says %v", c.Busy)
	}
	s.SetLoad(nil)
	if s.Describe(&c, 0, 0, start.Add(-time.Hour)); !(c.Busy < 0.01) {
		t.Errorf("when the clock is set back it is %v", c.Busy)
	}
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
