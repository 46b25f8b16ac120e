package bench

import (
	"math/rand/v2"
	"slices"
	"testing"
)

func TestHistogramAgainstSortedValues(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, spread := range []int64{10, 1000, 100_000, 3_000_000_000} {
		var h histogram
		var values []int64
		for range 10_000 {
			v := rng.Int64N(spread)
			values = append(values, v)
			h.record(v)
		}
		slices.Sort(values)
		for _, q := range []float64{0, 0.001, 0.5, 0.9, 0.99, 0.999, 1} {
			// The smallest value that q of all do not exceed.
			i := 0
			for float64(i+1) < q*float64(len(values)) {
				i++
			}
			got, want := int64(h.quantile(q)), values[i]
			if got > want || float64(want-got) > float64(want)/64 {
				t.Errorf("spread %d: quantile %v is %d, want %d", spread, q, got, want)
			}
			if want < exactBuckets && got != want {
				t.Errorf("spread %d: quantile %v is %d, want exactly %d", spread, q, got, want)
			}
		}
		if h.max != uint64(values[len(values)-1]) {
			t.Errorf("spread %d: max %d, want %d", spread, h.max, values[len(values)-1])
		}
	}
}

func TestHistogramEdges(t *testing.T) {
	var h histogram
	if got := h.quantile(.5); got != 0 {
		t.Errorf("empty: %d", got)
	}
	h.record(-5)
	if h.count != 1 || h.quantile(1) != 0 || h.max != 0 {
		t.Errorf("a negative duration is not 0: %d %d", h.quantile(1), h.max)
	}
	h.record(1 << 62)
	if got := h.quantile(1); got != lowestIn(len(h.buckets)-1) {
		t.Errorf("a value beyond the last bucket: %d", got)
	}
	for i := range h.buckets {
		if got := bucketOf(lowestIn(i)); got != i {
			t.Fatalf("bucket %d begins at %d, which is in bucket %d", i, lowestIn(i), got)
		}
	}
}
