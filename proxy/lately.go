package proxy

import (
	"slices"
	"sync"
	"time"
)

// latelyKept is how many first tokens a lately keeps.
const latelyKept = 64

// lately keeps when the last first tokens have come, and after how long. Whoever sees
// a first token adds it, without allocation; it lives as long as its Replica. The zero
// value has none.
type lately struct {
	mu   sync.Mutex // guards the rest
	at   [latelyKept]time.Time
	took [latelyKept]time.Duration
	n    uint64 // that were added
}

func (l *lately) add(now time.Time, took time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.at[l.n%latelyKept], l.took[l.n%latelyKept] = now, took
	l.n++
}

// FirstTokens are the times to first token of a replica's last streams.
type FirstTokens struct {
	// Count is how many came since the time that was asked for, of the last 64;
	// without any the others are 0.
	Count         int
	Median, Worst time.Duration
}

// FirstTokens are those that have come since a time, as clients have waited for them.
func (r *Replica) FirstTokens(since time.Time) FirstTokens { return r.lately.since(since) }

func (l *lately) since(t time.Time) FirstTokens {
	var room [latelyKept]time.Duration
	took := room[:0]
	l.mu.Lock()
	for i := range min(l.n, latelyKept) {
		if !l.at[i].Before(t) {
			took = append(took, l.took[i])
		}
	}
	l.mu.Unlock()
	if len(took) == 0 {
		return FirstTokens{}
	}
	slices.Sort(took)
	return FirstTokens{len(took), took[(len(took)-1)/2], took[(len(took)*99+99)/100-1]}
}
