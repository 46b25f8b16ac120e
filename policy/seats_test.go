package policy

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// A replica with one seat, whose answers take a second: who comes second waits for the
// first one's answer, which is no slowness of the replica.
func TestSeats(t *testing.T) {
	start := time.Unix(1000, 0)
	at := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	var s Standing
	s.SetSequences(1, false, start)
	describe := func(inside, ms int) (c Candidate) {
		s.Describe(&c, inside, 0, at(ms))
		return c
	}
	send := func(ms int) *Sending {
		p := new(Sending)
		p.Promise(&s, 1000, 1, 0)
		p.Expect(&s, true, true, at(ms))
		return p
	}
	first := send(0)
	first.First(1, 0, false, at(100))
	if c := describe(1, 100); c.Decoding != 1 || c.Wait != 0.1 {
		t.Errorf("with an answer under way for 100 ms: %+v", c)
	}
	second, third := send(200), send(300)
	if c := describe(3, 300); c.Decoding != 1 || c.Ahead.Prompts != 2 || c.Ahead.Tokens != 2000 || math.Abs(c.Wait-0.9) > 1e-9 {
		t.Errorf("with two in line since an answer is under way for 300 ms: %+v", c)
	}
	if o := s.Own(3, at(300)); o.Waiting != 2 || o.Tokens != 2000 {
		t.Errorf("of its own: %+v", o)
	}
	first.Leave(at(1000))
	second.First(2, 0, false, at(1100))
	second.Leave(at(2000))
	third.First(1, 0, false, at(2100))
	third.Leave(at(3000))
	if c := describe(0, 3000); c.Wait != 0 || c.Ahead != (Work{}) || c.Decoding != 0 {
		t.Errorf("when all are over: %+v", c)
	}
	// All three prompts took 100 ms, and not up to 1,800.
	if e := s.Calibration.Estimate(); e.Samples != 3 || math.Abs(e.Speed.Time(Prefill(1000, 0))-0.1) > 0.01 {
		t.Errorf("a prompt is taken to last %v s, by %d samples", e.Speed.Time(Prefill(1000, 0)), e.Samples)
	}
	// One in line takes as long as answers did, with one under way for 10 ms.
	send(4000)
	if c := describe(1, 4010); math.Abs(c.Wait-1) > 0.2 {
		t.Errorf("the wait is %v s, and answers take a second", c.Wait)
	}
}

// A supposed number grows when that many run that should not; a told one does not, as
// then it is an end that is seen late.
func TestSeatsAreMore(t *testing.T) {
	for _, supposed := range []bool{false, true} {
		now := time.Unix(1000, 0)
		var s Standing
		s.SetSequences(1, supposed, now)
		for range 10 {
			var batch [3]Sending
			for i := range batch {
				batch[i].Promise(&s, 100, 1, 0)
				batch[i].Expect(&s, true, true, now)
			}
			for i := range batch {
				now = now.Add(10 * time.Millisecond)
				batch[i].First(3, 0, false, now)
			}
			for i := range batch {
				now = now.Add(100 * time.Millisecond)
				batch[i].Leave(now)
			}
		}
		want := 1
		if supposed {
			want = 3
		}
		if got := s.Sequences(); got != want {
			t.Errorf("supposed %v: %d sequences, want %d", supposed, got, want)
		}
		s.SetSequences(1, supposed, now)
		if got := s.Sequences(); got != want {
			t.Errorf("supposed %v, and told again: %d sequences, want %d", supposed, got, want)
		}
	}
}

// Whatever comes and goes, in whatever order, those have seats who came first, never
// more than there are, and nothing is left when all are over.
func TestSeatsAgainstList(t *testing.T) {
	type one struct {
		p Sending
		n int
	}
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 3))
		now := time.Unix(1000, 0)
		var s Standing
		limit := 1 + r.IntN(5)
		s.SetSequences(limit, false, now)
		var list, seatedWant []*one // in the order of arrival; with seats
		grant := func() {
			for _, o := range list {
				if slices.Contains(seatedWant, o) {
					continue
				}
				taken := 0
				for _, q := range seatedWant {
					taken += q.n
				}
				if limit > 0 && taken > 0 && taken+o.n > limit {
					return
				}
				seatedWant = append(seatedWant, o)
			}
		}
		for step := range 300 {
			now = now.Add(time.Duration(r.IntN(50)) * time.Millisecond)
			switch k := r.IntN(10); {
			case k < 4 && step < 200:
				o := &one{n: 1 + r.IntN(7)/6}
				o.p.Promise(&s, 100, o.n, 0)
				if limit == 0 {
					o.n = 0 // who comes while there is no limit is not counted
				}
				o.p.Expect(&s, r.IntN(2) == 0, true, now)
				list = append(list, o)
			case k < 5:
				limit = r.IntN(6)
				s.SetSequences(limit, false, now)
			case len(list) > 0:
				i := r.IntN(len(list))
				o := list[i]
				if slices.Contains(seatedWant, o) && r.IntN(2) == 0 {
					o.p.First(len(list), 0, r.IntN(2) == 0, now)
				}
				o.p.Leave(now)
				list = slices.Delete(list, i, i+1)
				seatedWant = slices.DeleteFunc(seatedWant, func(q *one) bool { return q == o })
			}
			grant()
			waits := 0.0
			for _, o := range list {
				got, want := o.p.seating.state != inLine, slices.Contains(seatedWant, o)
				if got != want {
					t.Fatalf("seed %d, step %d: a request of %d, limit %d, has a seat: %v, want %v", seed, step, o.n, limit, got, want)
				}
				if !want {
					waits += float64(o.n)
				}
			}
			if work, wait := s.seats.ahead(0, now); limit > 0 && (work.Prompts != waits || !(wait >= 0)) {
				t.Fatalf("seed %d, step %d: %v prompts in line for %v s, want %v", seed, step, work.Prompts, wait, waits)
			}
		}
		for _, o := range list {
			o.p.Leave(now)
		}
		t1 := &s.seats
		if t1.first != nil || t1.last != nil || t1.taken != 0 || t1.sum != 0 || t1.wanted != 0 || t1.work != (amount{}) || s.Backlog.count.Load() != 0 {
			t.Fatalf("seed %d: something is left: %d taken, %d wanted", seed, t1.taken, t1.wanted)
		}
	}
}
