package proxy

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// Quantiles of counted times against those of the sorted list: within a tenth and a
// little, from a millisecond on.
func TestLatencies(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	for range 50 {
		var counted, before Latencies
		for range 20 {
			before[latencyBucket(time.Duration(random.Int64N(int64(time.Minute))))]++
		}
		counted = before
		var list []time.Duration
		for range 1 + random.IntN(400) {
			d := time.Duration(float64(time.Millisecond) * (1 + random.ExpFloat64()*float64(random.IntN(20_000))))
			list = append(list, d)
			counted[latencyBucket(d)]++
		}
		slices.Sort(list)
		fresh := counted.Since(&before)
		if fresh.Count() != uint64(len(list)) {
			t.Fatalf("%d of %d are counted", fresh.Count(), len(list))
		}
		for _, q := range []float64{.01, .5, .9, .99, 1} {
			want := list[max(int(q*float64(len(list))+.999999)-1, 0)]
			if got := fresh.Quantile(q); float64(got) < .88*float64(want) || float64(got) > 1.13*float64(want) {
				t.Errorf("%v of %d: %v, want about %v", q, len(list), got, want)
			}
		}
	}
	if got := (&Latencies{}).Quantile(.5); got != 0 {
		t.Errorf("%v of none", got)
	}
}

func TestLatencyBuckets(t *testing.T) {
	if b := latencyBucket(-time.Second); b != 0 {
		t.Errorf("bucket %d", b)
	}
	if b := latencyBucket(1 << 62); b != latencyBuckets-1 {
		t.Errorf("bucket %d of the longest", b)
	}
	for i := range latencyBuckets - 1 {
		end := latencyBound(i)
		if below, at := latencyBucket(end-time.Microsecond), latencyBucket(end); below != i || at != i+1 {
			t.Errorf("bucket %d ends at %v, below which is %d and from which is %d", i, end, below, at)
		}
	}
}

func TestGapBuckets(t *testing.T) {
	f := func(d time.Duration, want int) {
		t.Helper()
		if got := gapBucket(d); got != want {
			t.Errorf("%v: bucket %d, want %d", d, got, want)
		}
	}
	f(-1, 0)
	f(0, 0)
	for i := range GapBuckets - 1 {
		f(GapBound(i)-1, i)
		f(GapBound(i), i+1)
	}
	f(1<<62, GapBuckets-1)
}

// A replica's first tokens against a plain list.
func TestLately(t *testing.T) {
	var l lately
	var all []time.Duration
	began := time.Unix(1000, 0)
	random := rand.New(rand.NewPCG(5, 6))
	for i := range 3 * latelyKept {
		took := time.Duration(random.Int64N(int64(time.Second)))
		all = append(all, took)
		l.add(began.Add(time.Duration(i)*time.Second), took)
		since := max(i-random.IntN(2*latelyKept), 0)
		want := slices.Clone(all[max(since, len(all)-latelyKept):])
		slices.Sort(want)
		got := l.since(began.Add(time.Duration(since) * time.Second))
		if got.Count != len(want) || got.Median != want[(len(want)-1)/2] || got.Worst != want[(99*len(want)+99)/100-1] {
			t.Fatalf("after %d, since %d: %+v of %v", i, since, got, want)
		}
	}
	if got := l.since(began.Add(time.Hour)); got != (FirstTokens{}) {
		t.Errorf("%+v of none", got)
	}
}

// The times between the parts of a stream are counted from its first token on, and
// that allocates nothing.
func TestGapsOfAStream(t *testing.T) {
	r := relay{counts: new(counts), gaps: new(gapCounts), prefills: true}
	var room scratch
	accept := func(text string) {
		t.Helper()
		if _, f := r.accept([]byte(text), &room); f != none {
			t.Fatal(f.label())
		}
	}
	accept(chunk(": wait\n\n"))
	if g := r.gaps.read(); g != (Gaps{}) {
		t.Errorf("%+v before the first token", g)
	}
	token := chunk("data: {}\n\n")
	accept(token)
	time.Sleep(5 * time.Millisecond)
	accept(token + token)
	g := r.gaps.read()
	n := uint64(0)
	for i, k := range g.Count {
		if n += k; k > 0 && GapBound(i) < 5*time.Millisecond {
			t.Errorf("a gap below %v", GapBound(i))
		}
	}
	if n != 1 || g.Chunks != 3 || g.Sum < 5*time.Millisecond {
		t.Errorf("%d gaps in %+v", n, g)
	}
	// What the kernel has carried in between is no gap of userspace.
	r.lastAt = 0
	accept(token)
	if got := r.gaps.read(); got.Count != g.Count || got.Chunks != 4 {
		t.Errorf("%+v", got)
	}
	part := []byte(token)
	if n := testing.AllocsPerRun(100, func() { r.accept(part, &room) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
