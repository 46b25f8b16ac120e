package policy

import (
	"math"
	"testing"
	"time"
)

// A replica has room for 20,000 tokens, and an agent whose context takes 11,600 of them has a
// long answer there. Nothing is to be prefilled, and yet the next agent's prompt waits for the
// end of an answer if it does not fit.
func TestRoom(t *testing.T) {
	start := time.Unix(1000, 0)
	at := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	var s Standing
	s.SetRoom(20_000)
	told := &Load{Told: at(0), Until: at(100_000), Running: 1, KV: 0.58, Own: 9}
	s.SetLoad(told)
	describe := func(ms, tokens, cached int) (c Candidate) {
		s.Describe(&c, 1, 0, at(ms))
		before := c.Wait
		c.Cached = Count(cached)
		s.Fit(&c, &Request{Tokens: tokens})
		if math.Abs(c.Wait-before-float64(c.Room)) > 1e-6 {
			t.Errorf("at %d ms a prompt of %d tokens waits %v s, of which %v are for room, and %v if it has that", ms, tokens, c.Wait, c.Room, before)
		}
		return c
	}
	room := func(what string, ms, tokens, cached int, want float64) {
		t.Helper()
		if c := describe(ms, tokens, cached); math.Abs(float64(c.Room)-want) > 0.01 {
			t.Errorf("%s waits %v s for room, want %v", what, c.Room, want)
		}
	}
	answer := func(from, ms int) {
		p := new(Sending)
		p.Promise(&s, 100, 1, 0)
		p.Expect(&s, true, true, at(from))
		p.First(1, 0, false, at(from+100))
		p.Leave(at(from + 100 + ms))
	}
	room("before any answer has ended, one that does not fit", 0, 13_400, 0, 0)
	answer(0, 8000)
	room("one that fits", 9000, 8400, 0, 0)
	room("one that does not by a tenth of all", 9000, 10_400, 0, 8*(0.25+0.1))
	room("one that has more than that cached", 9000, 13_400, 5400, 0)
	for range 100 {
		answer(9000, 0) // pieces, which stay for nothing
	}
	room("one after many pieces", 20_000, 10_400, 0, 8*(0.25+0.1))

	// What has been sent there since takes room, until it is computed and in the report.
	next := new(Sending)
	next.Promise(&s, 6000, 1, 0)
	next.Expect(&s, true, true, at(20_000))
	room("one behind another", 20_000, 4400, 0, 8*(0.25+0.1))
	speed := s.Calibration.Speed()
	half := 20_000 + int(500*speed.Time(Prefill(6000, 0)))
	room("one behind another of which half is computed", half, 4400, 0, 0)
	room("one behind another of which half is computed", half, 7400, 0, 8*(0.25+0.1))
	next.Leave(at(30_000))

	if n := testing.AllocsPerRun(100, func() { var c Candidate; c.KV = 0.9; s.Fit(&c, &Request{Tokens: 10_000}) }); n != 0 {
		t.Errorf("it allocates %v times", n)
	}

	// Nothing is known of an engine that does not tell how large its cache is, or how full, or
	// no more.
	room("when the report is too old, one", 100_001, 13_400, 0, 0)
	silent := *told
	silent.KV, silent.Until = 0, at(200_000)
	s.SetLoad(&silent)
	room("at one that does not tell how full it is, one", 100_001, 13_400, 0, 0)
	full := silent
	full.KV = 1
	s.SetLoad(&full)
	room("when the cache is full, one", 100_001, 2000, 0, 8*(0.25+0.1))
	s.SetRoom(0)
	room("when it is unknown how large it is, one", 100_001, 2000, 0, 0)
}

// What a candidate's Wait is made of is told apart.
func TestRoomIsATerm(t *testing.T) {
	r, cs := &Request{Tokens: 1000}, []Candidate{{Wait: 3, Room: 2, Speed: DefaultSpeed}}
	terms := map[string]float64{}
	for _, term := range NewCostModel().AppendTerms(nil, r, cs, 0) {
		terms[term.Name] = term.Value
	}
	if terms["wait"] != 1 || terms["room"] != 2 {
		t.Errorf("of 3 s of which 2 are for room: %v", terms)
	}
}
