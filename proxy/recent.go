package proxy

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/inferrail/inferrail/policy"
)

// recent keeps the last decisions with what they were chosen from, for people to look
// at. Not every decision is kept: of a small fleet with little traffic all are, and
// beyond that as many as recentIdle lets through, or recentWatched while somebody
// looks. A decision that is not kept costs reading two words. It lives as long as its
// Server, which makes it; its methods may be called from any goroutine.
type recent struct {
	began   time.Time    // times below are counted from here
	watched atomic.Int64 // until when somebody looks
	due     atomic.Int64 // when all that was kept so far is paid for
	taken   atomic.Uint64

	mu     sync.Mutex // guards the rest, and what entries say it guards
	list   []*recentEntry
	weight int // of list
	number uint64
	seq    uint64
}

// recentEntry is one decision in a recent. An exchange holds the one of its last
// attempt until it is over.
type recentEntry struct {
	number, attempt uint64
	decision        *Decision // immutable: what was decided, and nothing worked out
	cached          int       // tokens at the winner

	seq     uint64           // guarded by recent.mu
	outcome *DecisionOutcome // likewise; what it points to is immutable
}

// What is kept is counted in rows: recentBase for a decision, and one for each of its
// candidates, of which one takes half a kilobyte.
const (
	recentDecisions = 200
	recentRows      = 32 << 10 // in all, whose memory is some 16 MB
	recentBase      = 64
	recentBurst     = 16 << 10 // that come at once after a pause
	recentIdle      = 1 << 10  // rows a second
	recentWatched   = 16 << 10 // rows a second, while somebody looks
	recentWatch     = 15 * time.Second
)

func rowsOf(candidates int) int { return recentBase + candidates }

// takes draws whether a decision among so many candidates is kept.
func (r *recent) takes(now time.Time, candidates int) bool {
	at, rate := int64(now.Sub(r.began)), int64(recentIdle)
	if at < r.watched.Load() {
		rate = recentWatched
	}
	cost, burst := int64(rowsOf(candidates))*int64(time.Second)/rate, recentBurst*int64(time.Second)/rate
	for {
		due := r.due.Load()
		next := max(due, at) + min(cost, burst)
		if next > at+burst {
			return false
		}
		if r.due.CompareAndSwap(due, next) {
			return true
		}
	}
}

// watch says that somebody looks.
func (r *recent) watch(now time.Time) {
	at := int64(now.Sub(r.began))
	if until := r.watched.Swap(at + int64(recentWatch)); until < at {
		r.due.Store(0) // what the slower rate owes is forgiven
	}
}

// enter adds a decision and returns its entry. The last attempt's is over.
func (r *recent) enter(d *Decision, attempt, cached int, last *recentEntry, why string) *recentEntry {
	e := &recentEntry{attempt: uint64(attempt), decision: d, cached: cached}
	r.mu.Lock()
	defer r.mu.Unlock()
	if last != nil && last.outcome == nil {
		r.endLocked(last, &DecisionOutcome{Outcome: why, Attempts: attempt - 1, Seconds: d.Time.Sub(last.decision.Time).Seconds()})
	}
	r.number++
	r.seq++
	e.number, e.seq = r.number, r.seq
	r.list = append(r.list, e)
	r.weight += rowsOf(len(d.candidates))
	drop := 0
	for len(r.list)-drop > recentDecisions || r.weight > recentRows && len(r.list)-drop > 1 {
		r.weight -= rowsOf(len(r.list[drop].decision.candidates))
		drop++
	}
	r.list = slices.Delete(r.list, 0, drop)
	return e
}

// end tells what came of a decision.
func (r *recent) end(e *recentEntry, out *DecisionOutcome) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.endLocked(e, out)
}

func (r *recent) endLocked(e *recentEntry, out *DecisionOutcome) {
	r.seq++
	e.seq, e.outcome = r.seq, out
}

// RecentDecision is one of the last decisions, without what it was chosen from. It is
// a value.
type RecentDecision struct {
	// ID numbers the decisions that were kept, from 1 on. One that is chosen for
	// again, because the replica has failed it, has another.
	ID uint64 `json:"id"`
	// Seq is that of the last change: a decision has one when it is made and another
	// when its request is over.
	Seq       uint64    `json:"seq"`
	Time      time.Time `json:"time"`
	RequestID string    `json:"request_id"`
	Path      string    `json:"path"`
	Model     string    `json:"model"`
	Policy    string    `json:"policy"`
	Class     string    `json:"class,omitempty"`
	// Attempt is 1 for the first choice of a request; 0 is for a request that was
	// refused, which has no Winner.
	Attempt uint64 `json:"attempt"`
	// Candidates is how many replicas it was chosen from.
	Candidates   int     `json:"candidates"`
	Winner       string  `json:"winner"`
	Reason       string  `json:"reason"`
	Admission    string  `json:"admission,omitempty"`
	PromptTokens int     `json:"prompt_tokens"`
	Exact        bool    `json:"exact"`
	CachedTokens int     `json:"cached_tokens"` // that the winner is expected to have
	PredictedMS  Number  `json:"predicted_ms"`
	BudgetMS     float64 `json:"budget_ms,omitempty"`
	// Disagreed are the shadow policies that would have chosen another replica.
	Disagreed []string `json:"disagreed,omitempty"`
	// Outcome is null as long as the request is not over.
	Outcome *DecisionOutcome `json:"outcome"`
}

// RecentDecisions are the last decisions that were kept, and how many there were.
type RecentDecisions struct {
	// Seq is that of the last change of any: who asks for what came after it misses
	// none, but those that too much has come after.
	Seq uint64 `json:"seq"`
	// Kept counts the decisions that were kept so far, of Made.
	Kept uint64 `json:"kept"`
	Made uint64 `json:"made"`
	// Decisions are in the order of their IDs, at most 200.
	Decisions []RecentDecision `json:"decisions"`
}

// RecentDecisions returns those of the last decisions that have changed after a Seq;
// 0 is all. To ask keeps more of them for the next 15 seconds.
func (s *Server) RecentDecisions(after uint64) RecentDecisions {
	r := &s.recent
	r.watch(time.Now())
	r.mu.Lock()
	defer r.mu.Unlock()
	if after > r.seq {
		after = 0 // it is another process's
	}
	out := RecentDecisions{Seq: r.seq, Kept: r.number, Made: r.taken.Load(), Decisions: []RecentDecision{}}
	for _, e := range r.list {
		if e.seq <= after {
			continue
		}
		d := e.decision
		row := RecentDecision{e.number, e.seq, d.Time, d.RequestID, d.Path, d.Model, d.Policy, d.Class, e.attempt, len(d.candidates), d.Winner, d.Reason,
			d.Admission, d.PromptTokens, d.Exact, e.cached, d.PredictedMS, d.BudgetMS, nil, e.outcome}
		for _, s := range d.Shadows {
			if !s.Same {
				row.Disagreed = append(row.Disagreed, s.Policy)
			}
		}
		out.Decisions = append(out.Decisions, row)
	}
	return out
}

// RecentDecision returns one of the last decisions as Explain would have told it; nil
// when it is not kept, or not any more. A request is asked for by its id when number
// is 0: of several decisions the last is returned.
func (s *Server) RecentDecision(number uint64, requestID string) *Decision {
	r := &s.recent
	r.watch(time.Now())
	r.mu.Lock()
	var found *recentEntry
	var outcome *DecisionOutcome
	for _, e := range r.list {
		if number != 0 && e.number == number || number == 0 && e.decision.RequestID == requestID {
			found, outcome = e, e.outcome
		}
	}
	r.mu.Unlock()
	if found == nil {
		return nil
	}
	d := *found.decision
	d.Replicas, d.Outcome = slices.Clone(d.Replicas), outcome
	d.WorkOut()
	return &d
}

// noteRecent keeps the decision that was made just now, perhaps. Candidates, places
// and what shadows have judged are those of the choice.
func (x *exchange) noteRecent() {
	r, v := &x.c.s.recent, &x.noted
	r.taken.Add(1)
	last := v.recent
	if v.recent = nil; last == nil && !r.takes(x.pickedAt, len(x.candidates)) {
		return
	}
	d := new(Decision)
	x.tell(d)
	x.tellShadows(d)
	cached := 0
	if i := x.choice.Index; i >= 0 && i < len(x.candidates) {
		cached = int(x.candidates[i].Cached)
	}
	v.recent = r.enter(d, x.attempts, cached, last, v.lastFailed)
}

// noteRefused keeps a request that no replica was chosen for, perhaps.
func (x *exchange) noteRefused(f failure) {
	r := &x.c.s.recent
	r.taken.Add(1)
	if !r.takes(time.Now(), len(x.candidates)) {
		return
	}
	d := new(Decision)
	if x.choice = (policy.Choice{Index: -1}); x.decision != nil {
		x.tell(d)
	} else {
		x.tellRequest(d)
	}
	d.Reason, d.Refused, d.RetryAfterMS = f.label(), true, float64(x.retryAfter.Milliseconds())
	e := r.enter(d, 0, 0, nil, "")
	r.end(e, &DecisionOutcome{Outcome: f.label(), Status: x.status, Seconds: time.Since(x.began).Seconds()})
}
