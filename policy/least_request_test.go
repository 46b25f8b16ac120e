package policy

import "testing"

// pick chooses by LeastRequest.
func pick(r *Request, cs []Candidate) (int, string) {
	c := Choose(LeastRequest{}, r, cs, make([]float64, len(cs)))
	return c.Index, c.Reason
}

func TestLeastRequest(t *testing.T) {
	f := func(inFlight []int, rand uint64, want int, reason string) {
		t.Helper()
		var cs []Candidate
		for i, n := range inFlight {
			cs = append(cs, Candidate{Slot: 10 + i, InFlight: Count(n)})
		}
		i, why := pick(&Request{Rand: rand}, cs)
		if i != want || why != reason {
			t.Errorf("%v: picked %d (%s), want %d (%s)", inFlight, i, why, want, reason)
		}
	}
	f(nil, 1, -1, "no candidate")
	f([]int{7}, 1, 0, "least cost")
	f([]int{3, 1, 2}, 1, 1, "least cost")
	f([]int{3, 2, 1}, 1, 2, "least cost")
	f([]int{0, 1, 2}, 1, 0, "least cost")
}

// Ties must be shared evenly: idle replicas that are never picked stay idle.
func TestLeastRequestTies(t *testing.T) {
	cs := []Candidate{{InFlight: 1}, {InFlight: 0}, {InFlight: 0}, {InFlight: 5}, {InFlight: 0}}
	counts := make([]int, len(cs))
	const n = 30000
	for r := range uint64(n) {
		i, why := pick(&Request{Rand: mix(r)}, cs)
		if why != "least cost, tie" {
			t.Fatal(why)
		}
		counts[i]++
	}
	for i, c := range cs {
		want := 0
		if c.InFlight == 0 {
			want = n / 3
		}
		if d := counts[i] - want; d < -n/60 || d > n/60 {
			t.Errorf("picked %v: candidate %d should have %d", counts, i, want)
		}
	}
}

// The same seed must give the same decision, or none can be replayed.
func TestLeastRequestReplays(t *testing.T) {
	cs := make([]Candidate, 64)
	for r := range uint64(1000) {
		a, _ := pick(&Request{Rand: r}, cs)
		b, _ := pick(&Request{Rand: r}, cs)
		if a != b {
			t.Fatalf("seed %d: %d, then %d", r, a, b)
		}
	}
}

func TestLeastRequestAllocatesNothing(t *testing.T) {
	cs := make([]Candidate, 256)
	r := &Request{Rand: 1}
	costs := make([]float64, len(cs))
	var p Policy = LeastRequest{}
	if n := testing.AllocsPerRun(100, func() { Choose(p, r, cs, costs) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// BenchmarkLeastRequest256 picks among 256 idle replicas, the worst case: all
// tie. go test -bench LeastRequest ./policy
func BenchmarkLeastRequest256(b *testing.B) {
	cs := make([]Candidate, 256)
	b.ReportAllocs()
	for i := range b.N {
		pick(&Request{Rand: uint64(i)}, cs)
	}
}

// TestSlowStart: a replica that takes part of its share is as loaded as one
// with so many times its requests.
func TestSlowStart(t *testing.T) {
	f := func(cold Candidate, warm int32, want int) {
		t.Helper()
		i, _ := pick(&Request{}, []Candidate{cold, {InFlight: warm}})
		if i != want {
			t.Errorf("%+v beside one with %d in flight: picked %d", cold, warm, i)
		}
	}
	f(Candidate{InFlight: 0, Share: 0.1}, 8, 1)
	f(Candidate{InFlight: 0, Share: 0.1}, 10, 0)
	f(Candidate{InFlight: 1, Share: 0.5}, 2, 1)
	f(Candidate{InFlight: 1, Share: 0.5}, 4, 0)
	f(Candidate{InFlight: 3, Share: 1}, 4, 0)
	f(Candidate{InFlight: 3}, 4, 0)
}
