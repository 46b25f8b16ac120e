package proxy

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// GapBuckets is how many buckets Gaps has, the last one without a bound.
const GapBuckets = 24

// GapBound is the upper bound of a bucket of Gaps: powers of two from 16.4 us on, as
// the kernel programs have them.
func GapBound(i int) time.Duration { return 1 << (14 + i) }

// Gaps are the times between the parts of streams that have arrived from an engine:
// with an engine that sends each token at once, those between tokens. It is a value.
type Gaps struct {
	Count [GapBuckets]uint64
	Sum   time.Duration
	// Chunks are those that have arrived from the first token on, several of which may
	// have come as one part.
	Chunks uint64
}

// gapCounts counts Gaps. Shards add to it from their goroutines, without allocation;
// it lives as long as its Replica. The zero value is empty.
type gapCounts struct {
	count  [GapBuckets]atomic.Uint64
	sum    atomic.Int64
	chunks atomic.Uint64
}

func (g *gapCounts) add(d time.Duration) {
	g.count[gapBucket(d)].Add(1)
	g.sum.Add(int64(max(d, 0)))
}

// gapBucket is the first whose bound is above d.
func gapBucket(d time.Duration) int {
	return min(bits.Len64(uint64(max(d, 0))>>14), GapBuckets-1)
}

func (g *gapCounts) read() (out Gaps) {
	for i := range g.count {
		out.Count[i] = g.count[i].Load()
	}
	out.Sum, out.Chunks = time.Duration(g.sum.Load()), g.chunks.Load()
	return out
}

// Gaps are those of the streams that userspace has copied from the replica. Those of
// the kernel's part of a stream are in the kernel's counters.
func (r *Replica) Gaps() Gaps { return r.gaps.read() }
