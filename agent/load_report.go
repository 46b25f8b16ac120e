package agent

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// loadStatus is what /debug/fleet shows of what an engine tells of its load. What
// is not known is not there.
type loadStatus struct {
	// State is ok while there is a report that may be used; else what has become
	// of the last attempt, and Why says more.
	State string `json:"state"`
	Why   string `json:"why,omitempty"`
	// Page was read last, for the report that is AgeMS old; TookMS is what the
	// engine lately takes to answer.
	Page   string `json:"page,omitempty"`
	AgeMS  *int64 `json:"age_ms,omitempty"`
	TookMS int64  `json:"took_ms,omitempty"`

	Running       *int     `json:"running,omitempty"`
	Waiting       *int     `json:"waiting,omitempty"`
	WaitingTokens *int     `json:"waiting_tokens,omitempty"`
	KV            *float64 `json:"kv_usage,omitempty"`
	HitRate       *float64 `json:"hit_rate,omitempty"`
	VRAMFree      *float64 `json:"vram_free_mb,omitempty"`
	// Of others than this agent.
	Foreign        *int `json:"foreign,omitempty"`
	ForeignWaiting *int `json:"foreign_waiting,omitempty"`

	// Reports are all looks, by what became of them.
	Reports map[string]uint64 `json:"reports"`
}

func (m *member) loadStatusLocked(now time.Time) loadStatus {
	w := &m.server.load
	out := loadStatus{State: w.outcome.String(), Why: m.loadWhy, Page: w.page, Reports: map[string]uint64{}}
	for o, n := range m.reports {
		if n > 0 {
			out.Reports[loadOutcome(o).String()] = n
		}
	}
	l := m.replica.Load()
	switch {
	case l.Fresh(now):
		out.State = reportOK.String()
	case len(out.Reports) == 0:
		out.State, out.Why = "unknown", "it was not asked yet"
		return out
	case out.State == reportOK.String():
		// The last was good, if not of this member.
		if out.State = "old"; out.Why != "" {
			out.State = reportUnreadable.String()
		}
		return out
	default:
		return out
	}
	age := now.Sub(l.Asked).Milliseconds()
	out.AgeMS, out.TookMS = &age, w.took.Milliseconds()
	foreign, waiting := l.Foreign()
	if !l.Uncounted {
		out.Running, out.Waiting = &l.Running, &l.Waiting
		out.Foreign, out.ForeignWaiting = &foreign, &waiting
	}
	if l.KVTold {
		out.KV = &l.KV
	}
	if l.HitsTold {
		out.HitRate = &l.HitRate
	}
	if l.WaitingTokens >= 0 {
		out.WaitingTokens = &l.WaitingTokens
	}
	if l.VRAMTotal > 0 {
		out.VRAMFree = &l.VRAMFree
	}
	return out
}

// loadMetrics are the metrics of what engines tell of their load, of what the agent
// has sent them and of how fast they have proved to be. They are read when the page
// is asked for.
type loadMetrics struct{ fleet *fleet }

var (
	engineRequestsDesc = prometheus.NewDesc("inferrail_replica_engine_requests",
		"Requests that the engine has, of this agent and of others, running and waiting, as it told last.", []string{"replica", "state"}, nil)
	foreignRequestsDesc = prometheus.NewDesc("inferrail_replica_foreign_requests",
		"Requests that the engine has of others than this agent, as far as it tells.", []string{"replica"}, nil)
	kvUsageDesc = prometheus.NewDesc("inferrail_replica_kv_usage_ratio",
		"How full the engine's KV cache is with sequences that run, as it told last.", []string{"replica"}, nil)
	hitRateDesc = prometheus.NewDesc("inferrail_replica_cache_hit_ratio",
		"Share of prompt tokens that the engine has found in its cache lately.", []string{"replica"}, nil)
	loadAgeDesc = prometheus.NewDesc("inferrail_replica_load_age_seconds",
		"Age of the engine's last report of its load.", []string{"replica"}, nil)
	loadReportsDesc = prometheus.NewDesc("inferrail_replica_load_reports_total",
		"Times that the engine was asked for its load, by what became of it.", []string{"replica", "outcome"}, nil)
	prefillTokenDesc = prometheus.NewDesc("inferrail_replica_prefill_token_seconds",
		"Estimated time that the replica takes for each token of a prompt that is not cached.", []string{"replica"}, nil)
	prefillPairDesc = prometheus.NewDesc("inferrail_replica_prefill_attention_seconds",
		"Estimated time that it takes for each such token and token before it.", []string{"replica"}, nil)
	prefillPromptDesc = prometheus.NewDesc("inferrail_replica_prefill_prompt_seconds",
		"Estimated time that it takes for each prompt, whatever its length.", []string{"replica"}, nil)
	prefillSamplesDesc = prometheus.NewDesc("inferrail_replica_prefill_samples",
		"Observations that the estimates are made of; with none they are those of the other replicas.", []string{"replica"}, nil)
	backlogTokensDesc = prometheus.NewDesc("inferrail_replica_backlog_tokens",
		"Tokens that are not cached of the prompts that were sent to the replica and are not computed yet.", []string{"replica"}, nil)
	backlogSecondsDesc = prometheus.NewDesc("inferrail_replica_backlog_seconds",
		"Estimated time until those are computed.", []string{"replica"}, nil)

	loadDescs = []*prometheus.Desc{engineRequestsDesc, foreignRequestsDesc, kvUsageDesc, hitRateDesc, loadAgeDesc, loadReportsDesc,
		prefillTokenDesc, prefillPairDesc, prefillPromptDesc, prefillSamplesDesc, backlogTokensDesc, backlogSecondsDesc}
)

// Describe implements prometheus.Collector.
func (loadMetrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range loadDescs {
		ch <- d
	}
}

// Collect implements prometheus.Collector. A replica that has left has no series,
// and one whose load is not known has none of it.
func (x loadMetrics) Collect(ch chan<- prometheus.Metric) {
	type row struct {
		*member
		reports [loadOutcomes]uint64
	}
	x.fleet.mu.Lock()
	var rows []row
	for _, m := range x.fleet.members {
		rows = append(rows, row{m, m.reports})
	}
	x.fleet.mu.Unlock()
	now := time.Now()
	for _, m := range rows {
		gauge := func(desc *prometheus.Desc, v float64, labels ...string) {
			ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, v, append([]string{m.id}, labels...)...)
		}
		for o, n := range m.reports {
			ch <- prometheus.MustNewConstMetric(loadReportsDesc, prometheus.CounterValue, float64(n), m.id, loadOutcome(o).String())
		}
		if l := m.replica.Load(); l != nil {
			gauge(loadAgeDesc, now.Sub(l.Asked).Seconds())
			if l.Fresh(now) && !l.Uncounted {
				gauge(engineRequestsDesc, float64(l.Running), "running")
				gauge(engineRequestsDesc, float64(l.Waiting), "waiting")
				foreign, _ := l.Foreign()
				gauge(foreignRequestsDesc, float64(foreign))
			}
			if l.Fresh(now) && l.KVTold {
				gauge(kvUsageDesc, l.KV)
			}
			if l.Fresh(now) && l.HitsTold {
				gauge(hitRateDesc, l.HitRate)
			}
		}
		e := m.replica.Calibration().Estimate()
		gauge(prefillTokenDesc, e.Speed.A)
		gauge(prefillPairDesc, e.Speed.B)
		gauge(prefillPromptDesc, e.Speed.D)
		gauge(prefillSamplesDesc, float64(e.Samples))
		work, wait := m.replica.Backlog().Ahead(&e.Speed, now)
		gauge(backlogTokensDesc, work.Tokens)
		gauge(backlogSecondsDesc, wait)
	}
}
