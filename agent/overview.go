package agent

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/inferrail/inferrail/proxy"
)

// The fleet is looked at every overviewStep, and what is seen is kept for
// overviewKept steps: five minutes.
const (
	overviewStep = 2 * time.Second
	overviewKept = 150
	// overviewLately is how far back the first tokens of a replica are looked at.
	overviewLately = time.Minute
)

// overview is what GET /debug/overview answers, made for a screen that is drawn anew
// every second or two: the fleet as a whole, its last minutes, and a short row for
// each replica. Numbers that are not known are null or left out.
//
// ?after=T leaves out the history up to T, a row's first number; ?replicas=0 leaves out
// the replicas.
type overview struct {
	Time    time.Time `json:"time"`
	Started time.Time `json:"started"`
	Version string    `json:"version"`
	// Tier is the datapath's, packet or copy, and TierWhy why it is that one.
	Tier    string `json:"tier"`
	TierWhy string `json:"tier_why"`
	// Degraded names, as /readyz does, what is not as it should be; the first 20.
	Degraded []string `json:"degraded"`
	Draining bool     `json:"draining,omitempty"`
	// States counts the replicas by state, Running and Waiting the requests that are
	// begun, and that wait in the agent; Connections are those of clients.
	States      map[string]int `json:"states"`
	Running     int64          `json:"running"`
	Waiting     int            `json:"waiting"`
	Connections int            `json:"connections"`
	// Models are the names that replicas' rows number, with the policy that chooses.
	Models []overviewModel `json:"models"`
	// History has one row for each StepS seconds, the oldest first, and Columns names
	// its numbers.
	StepS   float64      `json:"step_s"`
	Columns []string     `json:"columns"`
	History [][]*float64 `json:"history"`

	Replicas []overviewReplica `json:"replicas,omitempty"`
}

// Overview, ModelOverview and ReplicaOverview are its types for programs that read the
// page.
type (
	Overview        = overview
	ModelOverview   = overviewModel
	ReplicaOverview = overviewReplica
)

type overviewModel struct {
	Name     string `json:"name"`
	Policy   string `json:"policy"`
	Replicas int    `json:"replicas"` // that may be chosen now
	Waiting  int    `json:"waiting"`
}

// overviewReplica is one replica of it. What engines tell (Engine*, KV, HitRate) is
// there while it is no older than load.max_age.
type overviewReplica struct {
	ID     string `json:"id"`
	Engine string `json:"engine,omitempty"` // as configured, or as it has told
	State  string `json:"state"`
	Why    string `json:"why,omitempty"`
	Models []int  `json:"models"` // of overview.Models
	// Running and Pending are this agent's requests there and in line for it, Share is
	// the part of its share that it takes.
	Running int     `json:"running"`
	Pending int     `json:"pending"`
	Share   float64 `json:"share"`

	EngineRunning *int     `json:"engine_running,omitempty"`
	EngineWaiting *int     `json:"engine_waiting,omitempty"`
	KV            *float64 `json:"kv,omitempty"`
	HitRate       *float64 `json:"hit_rate,omitempty"`
	// Cache is how well it is known what it has in its cache: exact, approximate,
	// repairing or mismatched.
	Cache string `json:"cache,omitempty"`
	// BacklogMS is the estimated time until the prompts that were sent there are
	// computed.
	BacklogMS float64 `json:"backlog_ms"`
	// FirstTokens of the last minute were seen, at most 64, half of them within
	// FirstTokenP50MS.
	FirstTokens     int      `json:"first_tokens"`
	FirstTokenP50MS *float64 `json:"first_token_p50_ms,omitempty"`
	FirstTokenP99MS *float64 `json:"first_token_p99_ms,omitempty"`
	// PrefillTokensPerS is how many tokens of a prompt it computes a second, as it has
	// proved to; left out while nothing was learned of it.
	PrefillTokensPerS float64 `json:"prefill_tokens_per_s,omitempty"`
	// TokensPerS are chunks of streams, with most engines tokens, and KernelShare the
	// part of them that the kernel has carried; both of the last steps.
	TokensPerS  float64  `json:"tokens_per_s"`
	KernelShare *float64 `json:"kernel_share,omitempty"`
}

// historyColumns are the numbers of a row of the history: of the step that ends at t,
// but for the last three, which are so at t. first_token_* and hit_rate are null when
// there was nothing to tell them from. What engines tell when an answer ends, hit_rate
// and prompt_tokens_per_s, they tell of few streams: asked_tokens_per_s and
// expected_hit_rate are what the agent knows and expects of prompts itself.
var historyColumns = []string{"t", "requests_per_s", "failed_per_s", "refused_per_s", "left_per_s", "retries_per_s",
	"first_token_p50_ms", "first_token_p99_ms", "first_tokens_per_s", "tokens_per_s", "kernel_tokens_per_s", "prompt_tokens_per_s", "hit_rate", "asked_tokens_per_s", "expected_hit_rate",
	"running", "waiting", "up"}

// history keeps the last rows, which one goroutine of the Agent makes. Its methods may
// be called from any goroutine; the zero value has none.
type history struct {
	mu   sync.Mutex // guards the rest
	rows [overviewKept][]*float64
	n    int

	// The goroutine's own.
	last   proxy.Totals
	lastAt time.Time
}

// flow is what a member's streams have come to, as the history's goroutine has seen it
// last.
type flow struct {
	copied, kernel       uint64 // chunks, since the start
	perSecond, perKernel float64
}

// keepHistory is the goroutine.
func (a *Agent) keepHistory() {
	tick := time.NewTicker(overviewStep)
	defer tick.Stop()
	a.history.last, a.history.lastAt = a.proxy.Totals(), time.Now()
	for {
		select {
		case <-tick.C:
			a.lookOver(time.Now())
		case <-a.stopping.Done():
			return
		}
	}
}

// lookOver makes a row of what has changed since the one before.
func (a *Agent) lookOver(now time.Time) {
	h := &a.history
	seconds := now.Sub(h.lastAt).Seconds()
	if !(seconds > 0) {
		return
	}
	is, was := a.proxy.Totals(), h.last
	h.last, h.lastAt = is, now
	copied, kernel := a.fleet.flows(a.datapath.chunks(), seconds)
	up, _ := a.fleet.upCount()
	running, waiting := a.proxy.Load()

	row := make([]*float64, 0, len(historyColumns))
	add := func(v float64) { row = append(row, &v) }
	rate := func(is, was uint64) { add(thousandths(float64(is-was) / seconds)) }
	add(thousandths(float64(now.UnixMilli()) / 1000))
	rate(is.Finished, was.Finished)
	rate(is.Failed, was.Failed)
	rate(is.Refused, was.Refused)
	rate(is.Left, was.Left)
	rate(is.Retried, was.Retried)
	tokens := is.FirstTokens.Since(&was.FirstTokens)
	if n := tokens.Count(); n > 0 {
		add(inMS(tokens.Quantile(.5)))
		add(inMS(tokens.Quantile(.99)))
	} else {
		row = append(row, nil, nil)
	}
	rate(tokens.Count(), 0)
	rate(copied+kernel, 0)
	rate(kernel, 0)
	rate(is.PromptTokens, was.PromptTokens)
	if prompt := is.PromptTokens - was.PromptTokens; prompt > 0 {
		add(thousandths(float64(is.CachedTokens-was.CachedTokens) / float64(prompt)))
	} else {
		row = append(row, nil)
	}
	rate(is.AskedTokens, was.AskedTokens)
	if asked := is.AskedTokens - was.AskedTokens; asked > 0 {
		add(thousandths(float64(is.ExpectedTokens-was.ExpectedTokens) / float64(asked)))
	} else {
		row = append(row, nil)
	}
	add(float64(running))
	add(float64(waiting))
	add(float64(up))

	h.mu.Lock()
	defer h.mu.Unlock()
	h.rows[h.n%overviewKept] = row
	h.n++
}

func inMS(d time.Duration) float64 { return thousandths(float64(d) / float64(time.Millisecond)) }

// since returns the rows that are later than t, the oldest first. They are not changed
// any more.
func (h *history) since(t float64) [][]*float64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := [][]*float64{}
	for i := max(h.n-overviewKept, 0); i < h.n; i++ {
		if row := h.rows[i%overviewKept]; *row[0] > t {
			out = append(out, row)
		}
	}
	return out
}

// flows brings up to date what the members' streams come to: kernel has, by slot, what
// the kernel has carried of them. It returns what has been added in all.
func (f *fleet) flows(kernel map[int]uint64, seconds float64) (copiedNow, kernelNow uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, list := range [][]*member{f.members, f.leaving} {
		for _, m := range list {
			copied := m.replica.Gaps().Chunks
			carried := kernel[m.replica.Slot]
			w := &m.flow
			moreCopied, moreCarried := copied-w.copied, carried-min(w.kernel, carried)
			w.copied, w.kernel = copied, carried
			// About the last three steps.
			w.perSecond += (float64(moreCopied+moreCarried)/seconds - w.perSecond) / 2
			w.perKernel += (float64(moreCarried)/seconds - w.perKernel) / 2
			copiedNow += moreCopied
			kernelNow += moreCarried
		}
	}
	return copiedNow, kernelNow
}

// overview looks at everything once, without the history.
func (a *Agent) overview(replicas bool) overview {
	now := time.Now()
	tier, why := a.Tier()
	running, waiting := a.proxy.Load()
	out := overview{
		Time: now, Started: a.started, Version: thisBuild.version, Tier: tier, TierWhy: why, Degraded: a.degraded(), Draining: a.draining.Load(),
		States: map[string]int{"leaving": 0}, Running: running, Waiting: waiting, Connections: a.proxy.Connections(),
		StepS: overviewStep.Seconds(), Columns: historyColumns, Models: []overviewModel{},
	}
	if n := len(out.Degraded); n > 20 {
		out.Degraded = append(slices.Clip(out.Degraded[:20]), fmt.Sprintf("and %d more", n-20))
	} else if n == 0 {
		out.Degraded = []string{}
	}
	for _, s := range standings {
		out.States[s.String()] = 0
	}
	a.fleet.overviewOf(&out, replicas, now)
	return out
}

func (f *fleet) overviewOf(out *overview, replicas bool, now time.Time) {
	caches := map[int]string{}
	if replicas {
		for _, st := range f.index.Stats(nil) {
			caches[st.Slot] = indexStates[st.State]
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	number := map[string]int{}
	for i, m := range f.snapshot.Listed {
		number[m.Name] = i
		row := overviewModel{Name: m.Name, Policy: policyName(m.Policy), Replicas: len(m.Replicas)}
		if m.State != nil {
			row.Waiting = m.State.Waiting()
		}
		out.Models = append(out.Models, row)
	}
	for _, m := range f.members {
		out.States[m.vitals.standing.String()]++
	}
	out.States["leaving"] = len(f.leaving)
	if !replicas {
		return
	}
	out.Replicas = make([]overviewReplica, 0, len(f.members)+len(f.leaving))
	for _, m := range f.members {
		out.Replicas = append(out.Replicas, m.overviewLocked(number, caches[m.replica.Slot], now))
	}
	for _, m := range f.leaving {
		row := m.overviewLocked(number, caches[m.replica.Slot], now)
		row.State, row.Why = "leaving", ""
		out.Replicas = append(out.Replicas, row)
	}
}

func (m *member) overviewLocked(models map[string]int, cache string, now time.Time) overviewReplica {
	r := m.replica
	row := overviewReplica{ID: m.id, Engine: m.engine(), State: m.vitals.standing.String(), Why: m.reason(), Models: []int{},
		Running: r.InFlight(), Pending: r.Pending(), Share: thousandths(r.Share(now)), Cache: cache, TokensPerS: thousandths(m.flow.perSecond)}
	for _, c := range m.models {
		if i, ok := models[c.ID]; ok {
			row.Models = append(row.Models, i)
		}
	}
	if l := r.Load(); l.Fresh(now) && !l.Uncounted {
		row.EngineRunning, row.EngineWaiting = &l.Running, &l.Waiting
		if kv := thousandths(l.KV); l.KVTold {
			row.KV = &kv
		}
		if hits := thousandths(l.HitRate); l.HitsTold {
			row.HitRate = &hits
		}
	}
	e := r.Calibration().Estimate()
	if e.Samples > 0 && e.Speed.A > 0 {
		row.PrefillTokensPerS = math.Round(1 / e.Speed.A)
	}
	_, wait := r.Backlog().Ahead(&e.Speed, now)
	row.BacklogMS = thousandths(wait * 1000)
	if t := r.FirstTokens(now.Add(-overviewLately)); t.Count > 0 {
		median, worst := inMS(t.Median), inMS(t.Worst)
		row.FirstTokens, row.FirstTokenP50MS, row.FirstTokenP99MS = t.Count, &median, &worst
	}
	if row.TokensPerS > 0 {
		share := thousandths(m.flow.perKernel / m.flow.perSecond)
		row.KernelShare = &share
	}
	return row
}

// overview answers without blanks: it is asked for often, and is long.
func (ad *admin) overview(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	after := 0.0
	if text := query.Get("after"); text != "" {
		var err error
		if after, err = strconv.ParseFloat(text, 64); err != nil {
			http.Error(w, fmt.Sprintf("after=%.40q is not a number, such as the first of a row of the history", text), http.StatusBadRequest)
			return
		}
	}
	out := ad.agent.overview(query.Get("replicas") != "0")
	out.History = ad.agent.history.since(after)
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(out); err != nil {
		ad.agent.log.Warn("cannot write an admin page", "error", err)
	}
}
