package proxy

import (
	"math"
	"math/bits"
	"sync/atomic"
	"time"
)

// totals are sums over all models since the start, for rates that are worked out
// often: the metrics have the same by model. Any goroutine may add to them. The zero
// value is nothing.
type totals struct {
	finished, failed, refused, left, retried    atomic.Uint64
	promptTokens, cachedTokens, generatedTokens atomic.Uint64
	askedTokens, expectedTokens                 atomic.Uint64
	firstTokens                                 [latencyBuckets]atomic.Uint64
}

// Totals are sums over all models since the start. It is a value.
type Totals struct {
	// Finished are the requests that are over. Of these Failed ended badly through an
	// engine's or the agent's fault, but those that were Refused for want of a place or
	// of time, or by a limit; and Left were left by their clients.
	Finished, Failed, Refused, Left uint64
	// Retried counts attempts that were followed by another.
	Retried uint64
	// PromptTokens and GeneratedTokens are as engines have told them when a response
	// had ended, and CachedTokens those of the prompts that they had cached.
	PromptTokens, CachedTokens, GeneratedTokens uint64
	// AskedTokens are those of the prompts that were followed, of requests that are over,
	// and ExpectedTokens those of them that were expected in the engine's cache: engines
	// tell nothing of most streams.
	AskedTokens, ExpectedTokens uint64
	// FirstTokens are the times to first token.
	FirstTokens Latencies
}

// latencyBuckets is how many buckets Latencies has: four to each doubling, from 1 ms
// to 18 minutes.
const latencyBuckets = 4*20 + 2

// Latencies counts times by how long they are. It is a value.
type Latencies [latencyBuckets]uint64

// latencyBucket is the one for d: the first holds what is below a millisecond.
func latencyBucket(d time.Duration) int {
	us := uint64(max(d, 0) / time.Microsecond)
	if us < 1024 {
		return 0
	}
	e := bits.Len64(us) - 1 // 10 for 1024 us and up
	return min(1+4*(e-10)+int(us>>(e-2)&3), latencyBuckets-1)
}

// latencyBound is where a bucket ends.
func latencyBound(i int) time.Duration {
	e, quarter := i/4, i%4
	return time.Duration(float64(4+quarter) / 4 * math.Ldexp(1024, e) * float64(time.Microsecond))
}

// Since are those that were added after an earlier state.
func (l Latencies) Since(earlier *Latencies) Latencies {
	for i := range l {
		l[i] -= earlier[i]
	}
	return l
}

// Count is how many there are.
func (l *Latencies) Count() (n uint64) {
	for _, k := range l {
		n += k
	}
	return n
}

// Quantile is about the time that the part q of all does not exceed, within a tenth
// from a millisecond on; 0 of none.
func (l *Latencies) Quantile(q float64) time.Duration {
	n := l.Count()
	if n == 0 {
		return 0
	}
	rank, seen := uint64(math.Ceil(q*float64(n))), uint64(0)
	for i, k := range l {
		if seen += k; k > 0 && seen >= rank {
			low := time.Duration(0)
			if i > 0 {
				low = latencyBound(i - 1)
			}
			return (low + latencyBound(i)) / 2
		}
	}
	return latencyBound(len(l) - 1)
}

// Totals returns the sums so far.
func (s *Server) Totals() Totals {
	t := &s.stats.totals
	out := Totals{
		Finished: t.finished.Load(), Failed: t.failed.Load(), Refused: t.refused.Load(), Left: t.left.Load(), Retried: t.retried.Load(),
		PromptTokens: t.promptTokens.Load(), CachedTokens: t.cachedTokens.Load(), GeneratedTokens: t.generatedTokens.Load(),
		AskedTokens: t.askedTokens.Load(), ExpectedTokens: t.expectedTokens.Load(),
	}
	for i := range out.FirstTokens {
		out.FirstTokens[i] = t.firstTokens[i].Load()
	}
	return out
}

// ended counts a request that is over.
func (t *totals) ended(f failure, passed bool, status int) {
	t.finished.Add(1)
	switch row := &failureTable[f]; {
	case f == overRate, f == overBudget, f == overloaded, f == queueTimeout:
		t.refused.Add(1)
	case f == clientLeft, f == clientStalled:
		t.left.Add(1)
	case row.blame == byEngine, row.blame == byAgent, passed && status >= 500:
		t.failed.Add(1)
	}
}
