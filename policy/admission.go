package policy

import (
	"fmt"
	"math"
	"slices"
	"sync"
	"time"
)

// AdmissionMode is how Admission decides.
type AdmissionMode uint8

const (
	// RankOnly takes all: replicas are ranked, and that is it.
	RankOnly AdmissionMode = iota
	// Empirical compares with the budget what requests have taken lately.
	Empirical
	// Absolute compares what the request is predicted to take. It is for
	// diagnosis: predictions that rank replicas well are off by as much as they
	// say (mean errors of 90 to 130 % were reported of such models), so it refuses
	// a good part of a load that the other modes finish in time.
	Absolute
)

var admissionModes = [...]string{RankOnly: "rank_only", Empirical: "empirical", Absolute: "absolute"}

func (m AdmissionMode) String() string { return admissionModes[m] }

// AdmissionModes are the names of the modes, the default first.
func AdmissionModes() []string { return []string{"empirical", "rank_only", "absolute"} }

// ParseAdmissionMode reads the name of a mode.
func ParseAdmissionMode(name string) (AdmissionMode, error) {
	if i := slices.Index(admissionModes[:], name); i >= 0 {
		return AdmissionMode(i), nil
	}
	return 0, fmt.Errorf("no admission mode %q; want one of %v", name, AdmissionModes())
}

// AdmissionRules are what an Admission decides by. The zero value takes all.
type AdmissionRules struct {
	Mode AdmissionMode
	// Percentile, between 0 and 1, is which of the times observed is compared with
	// the budget, and Window how long one counts: 0 is 0.9, and 30 s.
	Percentile float64
	Window     time.Duration
}

// Admission decides whether requests of a model are taken, by the time to first
// token that their clients grant. It lives as long as the model is configured so;
// its methods may be called from any goroutine and allocate nothing, but State. The
// zero value takes all.
//
// In the empirical mode a percentile of the times observed is compared with the
// request's budget. When it is above, and for a window after it was, requests are
// late. Then one that would have to wait is refused, unless it would wait for a
// small part of its budget only, as it is predicted, and what was observed in the
// last second was in time from when it was taken on, so that this can be believed. So
//
//   - an idle fleet takes whatever comes, and one whose load has gone takes requests
//     again within a second: the estimate cannot lock itself shut;
//   - a fleet that has more to do than it can has all the time something to do, and
//     does not let itself be flooded each time that it has worked off what was late;
//   - predictions decide only where they are borne out. When requests are not late,
//     they refuse only what is hopeless by far: a pile that has come up faster than
//     first tokens could tell of it.
//
// One request a second is taken in any case, so that there is something to observe,
// unless nothing was observed since the one before: what cannot be served does not
// pile up.
type Admission struct {
	mu sync.Mutex // guards the rest
	admissionMemory
}

// admissionMemory is all that an Admission knows, so that it can be copied whole. It
// is a part of one; the zero value knows nothing and takes all.
type admissionMemory struct {
	rules AdmissionRules
	// at, took and served are a ring of the latest observations, in nanoseconds;
	// those that are too old are skipped. served is the part of took since the request
	// was taken.
	at, took, served [admissionSamples]int64
	n, next          int
	// Up to lateUntil requests are late whose budget is at most lateBudget.
	lateUntil  time.Time
	lateBudget time.Duration
	// trickled is when a request was taken in spite of all. observed: something was
	// observed since.
	trickled time.Time
	observed bool
	refused  uint64
}

const (
	// admissionSamples is how many of the latest observations count.
	admissionSamples = 256
	// leastSamples is how many there are to be before they can refuse anything.
	leastSamples = 10
	// lately is for how long what was observed proves that predictions hold.
	lately = time.Second
	// trickleEvery is the time between requests that are taken in spite of all.
	trickleEvery = time.Second
	// While requests are late, one may wait for its budget divided by soonPart;
	// otherwise for hopeless times its budget.
	soonPart = 4
	hopeless = 4
	// leastRetry is the shortest time after which somebody is told to come again.
	leastRetry = time.Second
)

// NewAdmission returns an Admission that has observed nothing.
func NewAdmission(r AdmissionRules) *Admission {
	a := &Admission{}
	a.SetRules(r)
	return a
}

// SetRules changes the rules. What was observed stays.
func (a *Admission) SetRules(r AdmissionRules) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.rules = r
}

func (r *AdmissionRules) percentile() float64 {
	if r.Percentile > 0 && r.Percentile < 1 {
		return r.Percentile
	}
	return 0.9
}

func (r *AdmissionRules) window() time.Duration {
	if r.Window > 0 {
		return r.Window
	}
	return 30 * time.Second
}

// Observe takes the time to first token of a request that was answered, and how much
// of it that had waited until it was taken: none if it was taken at once. Requests
// that wait long are late, but that tells nothing of predictions, which are about
// what comes then.
func (a *Admission) Observe(now time.Time, ttft, waited time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.at[a.next], a.took[a.next], a.served[a.next] = now.UnixNano(), int64(ttft), int64(ttft-waited)
	a.next = (a.next + 1) % admissionSamples
	a.n = min(a.n+1, admissionSamples)
	a.observed = true
}

// Verdict is what Admission says of a request.
type Verdict struct {
	// Refuse: it should not be taken now. RetryAfter is when there is expected to
	// be room for it: at least a second.
	Refuse     bool
	RetryAfter time.Duration
	// Over: it is expected to take longer than its budget.
	Over bool
	// Reason is a few words for people, one of a few constants.
	Reason string
}

// The reasons of a Verdict.
const (
	reasonNoBudget  = "no budget"
	reasonRankOnly  = "rank only"
	reasonInTime    = "in time"
	reasonFew       = "few observations"
	reasonIdle      = "begins at once"
	reasonSoon      = "begins soon"
	reasonTrickle   = "trickle"
	reasonLate      = "requests are late"
	reasonHopeless  = "too much waits"
	reasonPredicted = "predicted too late"
)

// AdmissionReasons are all that a Verdict may have.
func AdmissionReasons() []string {
	return []string{reasonNoBudget, reasonRankOnly, reasonInTime, reasonFew, reasonIdle, reasonSoon, reasonTrickle,
		reasonLate, reasonHopeless, reasonPredicted}
}

// Admit decides. predicted is the expected time to first token at the best
// replica, wait the part of it before its own prefill begins, budget what is
// granted: 0 is no bound.
func (a *Admission) Admit(now time.Time, predicted, wait, budget time.Duration) Verdict {
	if budget <= 0 {
		return Verdict{Reason: reasonNoBudget}
	}
	v := Verdict{Over: predicted > budget}
	a.mu.Lock()
	defer a.mu.Unlock()
	switch a.rules.Mode {
	case Empirical:
		v.Reason, v.Refuse = a.judgeLocked(now, wait, budget)
		// By then what is there now is done, and no more of it is lately. Hardly
		// anybody is taken before who would have to wait.
		v.RetryAfter = wait + lately
	case Absolute:
		v.Reason = reasonInTime
		if v.Refuse = v.Over; v.Refuse {
			v.Reason, v.RetryAfter = reasonPredicted, max(predicted-budget, leastRetry)
		}
	default:
		v.Reason = reasonRankOnly
	}
	if !v.Refuse {
		v.RetryAfter = 0
		return v
	}
	// All who are refused now would come back at one moment, and most for nothing:
	// multiples of the golden ratio spread them over as long a time again.
	a.refused++
	_, part := math.Modf(float64(a.refused) * math.Phi)
	v.RetryAfter += time.Duration(part * float64(v.RetryAfter))
	return v
}

func (a *Admission) judgeLocked(now time.Time, wait, budget time.Duration) (reason string, refuse bool) {
	all, late := a.countLocked(now, a.rules.window(), budget, &a.took)
	if all < leastSamples {
		return reasonFew, false
	}
	if a.aboveLocked(all, late) && (budget >= a.lateBudget || !now.Before(a.lateUntil)) {
		a.lateUntil, a.lateBudget = now.Add(a.rules.window()), budget
	}
	reason = reasonLate
	switch guarded := now.Before(a.lateUntil) && budget <= a.lateBudget; {
	case wait <= 0:
		return reasonIdle, false
	case !guarded && wait/hopeless <= budget:
		return reasonInTime, false
	case !guarded:
		reason = reasonHopeless
	case wait <= budget/soonPart:
		if all, late := a.countLocked(now, lately, budget, &a.served); all > 0 && !a.aboveLocked(all, late) {
			return reasonSoon, false
		}
	}
	if a.observed && now.Sub(a.trickled) >= trickleEvery {
		a.trickled, a.observed = now, false
		return reasonTrickle, false
	}
	return reason, true
}

// aboveLocked tells whether the percentile of so many observations is above the
// budget that late of them were.
func (a *Admission) aboveLocked(all, late int) bool {
	return float64(late) > (1-a.rules.percentile())*float64(all)+1e-9
}

// countLocked counts the observations of a time up to now, and those that took
// longer than the budget.
func (a *Admission) countLocked(now time.Time, window, budget time.Duration, took *[admissionSamples]int64) (all, late int) {
	from := now.UnixNano() - int64(window)
	for i, at := range a.at[:a.n] {
		if at >= from {
			all++
			if took[i] > int64(budget) {
				late++
			}
		}
	}
	return all, late
}

// AdmissionState is what an Admission knows.
type AdmissionState struct {
	Mode string
	// Percentile is which one is observed, between 0 and 1, and Window over what
	// time.
	Percentile float64
	Window     time.Duration
	// Observed is that percentile of the times to first token, and Samples of how
	// many; both are 0 when there is none.
	Observed time.Duration
	Samples  int
	// LateFor is for how long still requests are taken to be late whose budget is at
	// most LateBudget, even where Observed is below that by now; 0 when they are not.
	LateFor, LateBudget time.Duration
}

// State is what it knows at a time.
func (a *Admission) State(now time.Time) AdmissionState {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := AdmissionState{Mode: a.rules.Mode.String(), Percentile: a.rules.percentile(), Window: a.rules.window()}
	if late := a.lateUntil.Sub(now); late > 0 && a.rules.Mode == Empirical {
		s.LateFor, s.LateBudget = late, a.lateBudget
	}
	var times []time.Duration
	for i, at := range a.at[:a.n] {
		if at >= now.UnixNano()-int64(s.Window) {
			times = append(times, time.Duration(a.took[i]))
		}
	}
	if s.Samples = len(times); s.Samples > 0 {
		slices.Sort(times)
		// The smallest of which at least that part is not above.
		i := int(math.Ceil(s.Percentile*float64(s.Samples)-1e-9)) - 1
		s.Observed = times[min(max(i, 0), s.Samples-1)]
	}
	return s
}
