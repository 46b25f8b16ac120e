package bench

import "math/bits"

// histogram counts durations in microseconds: exactly below 1,024 us, with a
// relative error under 1/64 above, in constant memory. It is not safe for
// concurrent use. The zero value is empty.
type histogram struct {
	buckets [exactBuckets + 22*64]uint64
	count   uint64
	max     uint64
}

const exactBuckets = 1024

// record counts one duration. Negative ones, which a clock read on two CPUs
// can show, count as 0; anything over an hour lands in the last bucket.
func (h *histogram) record(us int64) {
	v := uint64(max(us, 0))
	h.buckets[bucketOf(v)]++
	h.count++
	h.max = max(h.max, v)
}

// quantile returns the smallest recorded value, rounded down to its bucket,
// that at least the fraction q of all values do not exceed; 0 when empty.
func (h *histogram) quantile(q float64) uint64 {
	want := uint64(q * float64(h.count))
	if float64(want) < q*float64(h.count) || want == 0 {
		want++
	}
	seen := uint64(0)
	for i, n := range h.buckets {
		seen += n
		if seen >= want {
			return lowestIn(i)
		}
	}
	return 0
}

func (h *histogram) summary() Latency {
	return Latency{P50: h.quantile(.5), P99: h.quantile(.99), P999: h.quantile(.999), Max: h.max}
}

func bucketOf(v uint64) int {
	if v < exactBuckets {
		return int(v)
	}
	octave := bits.Len64(v) - 1 // at least 10
	i := exactBuckets + (octave-10)*64 + int(v>>(octave-6)&63)
	return min(i, len(histogram{}.buckets)-1)
}

func lowestIn(bucket int) uint64 {
	if bucket < exactBuckets {
		return uint64(bucket)
	}
	bucket -= exactBuckets
	octave := bucket/64 + 10
	return 1<<octave + uint64(bucket%64)<<(octave-6)
}
