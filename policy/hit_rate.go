package policy

import (
	"math"
	"time"
)

// hitsFor is how long a token that was looked for counts in a HitRate.
const hitsFor = 10 * time.Second

// HitRate is which part of the tokens an engine has looked for lately was in its
// cache, from counters that only grow while it lives. Who reads the engine's load
// keeps one for it, on one goroutine. The zero value has seen nothing.
type HitRate struct {
	at                    time.Time
	lastHits, lastQueries float64
	hits, queries         float64 // lately
	rate                  float64
}

// Rate is what Next has returned last.
func (h *HitRate) Rate() float64 { return h.rate }

// Next takes the counts of now: tokens found, and looked for.
func (h *HitRate) Next(hits, queries float64, now time.Time) float64 {
	if !h.at.IsZero() && hits >= h.lastHits && queries >= h.lastQueries {
		keep := math.Exp(-max(now.Sub(h.at).Seconds(), 0) / hitsFor.Seconds())
		h.hits = h.hits*keep + hits - h.lastHits
		h.queries = h.queries*keep + queries - h.lastQueries
		if h.queries > 1e-3 {
			h.rate = min(h.hits/h.queries, 1)
		}
	} else if !h.at.IsZero() {
		*h = HitRate{} // another process
	}
	h.at, h.lastHits, h.lastQueries = now, hits, queries
	return h.rate
}
