package agent

import (
	"fmt"
	"math"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/inferrail/inferrail/index"
)

// indexReport is what /debug/index shows.
type indexReport struct {
	Bytes    int64 `json:"bytes"`
	MaxBytes int64 `json:"max_bytes"`
	Entries  int64 `json:"entries"` // blocks, counted at each slot
	Resets   int64 `json:"resets"`
	// States are how many slots are in each.
	States map[string]int `json:"states"`
	Slots  []slotReport   `json:"slots"`
}

// slotReport is one slot of it.
type slotReport struct {
	Slot    int    `json:"slot"`
	Replica string `json:"replica"`
	Rank    int    `json:"rank"`
	Model   string `json:"model"`
	State   string `json:"state"`
	// Why it is in no better state.
	Why string `json:"why,omitempty"`
	// Since when its events are followed as they are.
	Since  time.Time     `json:"since"`
	Events *eventsReport `json:"events"` // nil when the engine is not known to publish any

	BlocksByTier map[string]int `json:"blocks_by_tier"`
	Guessed      int            `json:"guessed"`
	Expected     int            `json:"expected"`
	Capacity     int            `json:"capacity"`
	BlockSize    int            `json:"block_size"`
	Bytes        int64          `json:"bytes"`
	Claims       int            `json:"claims"`
	Resets       int            `json:"resets"`
	Prediction   prediction     `json:"prediction"`
}

// prediction is what was predicted of cached tokens beside what the engine has
// told, of the responses in which it has.
type prediction struct {
	Requests  int64 `json:"requests"`
	Predicted int64 `json:"predicted_tokens"`
	Actual    int64 `json:"actual_tokens"`
	// Error sums how far each was off, Over and Under count those that were.
	Error int64 `json:"error_tokens"`
	Over  int64 `json:"over"`
	Under int64 `json:"under"`
}

// eventsReport is how one publisher is followed.
type eventsReport struct {
	Endpoint  string  `json:"endpoint"`
	Replay    string  `json:"replay_endpoint,omitempty"`
	Snapshot  string  `json:"snapshot_endpoint,omitempty"`
	Topic     string  `json:"topic,omitempty"`
	Connected bool    `json:"connected"`
	Next      uint64  `json:"next_sequence"`
	LagMS     float64 `json:"lag_ms"`
	Batches   uint64  `json:"batches"`
	Stored    uint64  `json:"stored"`
	Removed   uint64  `json:"removed"`
	Cleared   uint64  `json:"cleared"`
	Unknown   uint64  `json:"unknown"`
	Gaps      uint64  `json:"gaps"`
	Replays   uint64  `json:"replays"`
	// Unanswered are requests, for replays and snapshots, without an answer.
	Unanswered uint64 `json:"unanswered"`
	// Trouble is why the last of them has failed.
	Trouble   string `json:"trouble,omitempty"`
	Snapshots uint64 `json:"snapshots"`
	Resets    uint64 `json:"resets"`
	Lost      uint64 `json:"lost_batches"`
	Malformed uint64 `json:"malformed"`
}

// indexStates are the states of slots as pages and metrics name them.
var indexStates = [...]string{
	index.Approximate: "approximate",
	index.Exact:       "exact",
	index.Repairing:   "repairing",
	index.Mismatched:  "mismatched",
}

// tierNames are the tiers likewise.
var tierNames = [index.Tiers]string{index.GPU: "gpu", index.CPU: "cpu", index.Disk: "disk", index.Remote: "remote"}

// indexReport tells what is known of all members' caches.
func (f *fleet) indexReport() indexReport {
	f.mu.Lock()
	bySlot := map[int]*member{}
	ranks, models, ids := map[int]int{}, map[int]string{}, map[int]string{}
	for _, list := range [][]*member{f.leaving, f.members} {
		for _, m := range list {
			slot := m.replica.Slot
			bySlot[slot], ids[slot], models[slot] = m, m.id, m.cache.slot.Model
			ranks[slot] = m.dataParallelRank()
		}
	}
	f.mu.Unlock()

	total := f.index.Totals()
	out := indexReport{Bytes: total.Bytes, MaxBytes: total.Limit, Entries: total.Entries, Resets: total.Resets,
		States: map[string]int{}, Slots: []slotReport{}}
	for _, name := range indexStates {
		out.States[name] = 0
	}
	for _, st := range f.index.Stats(nil) {
		m := bySlot[st.Slot]
		if m == nil {
			continue // it has left since
		}
		row := slotReport{
			Slot: st.Slot, Replica: ids[st.Slot], Rank: ranks[st.Slot], Model: models[st.Slot],
			State: indexStates[st.State], Why: st.Why, BlocksByTier: map[string]int{},
			Guessed: st.Guessed, Expected: st.Expected, Capacity: st.Capacity, BlockSize: st.Block,
			Bytes: st.Bytes, Claims: st.Claims, Resets: st.Resets,
		}
		for tier, n := range st.Blocks {
			row.BlocksByTier[tierNames[tier]] = n
		}
		a := &st.Audited
		row.Prediction = prediction{a.Responses, a.Predicted, a.Actual, a.Error, a.Over, a.Under}
		row.Since, row.Events = m.subscriber.report()
		out.States[row.State]++
		out.Slots = append(out.Slots, row)
	}
	return out
}

// report returns since when the events are followed as they are, and how; nil
// when they are not known to be published.
func (s *subscriber) report() (since time.Time, _ *eventsReport) {
	is, c := s.standing(), &s.counts
	if is.from.events.isZero() {
		return is.since, nil
	}
	st := &is.stats
	return is.since, &eventsReport{
		Endpoint: is.from.events.String(), Replay: is.from.replay.String(), Snapshot: is.from.snapshot.String(), Topic: is.from.topic,
		Connected: is.connected, Next: st.Next, LagMS: math.Round(st.Lag.Seconds()*1e5) / 100,
		Batches: st.Batches, Stored: c.stored.Load(), Removed: c.removed.Load(), Cleared: c.cleared.Load(), Unknown: st.Passed,
		Gaps: st.Gaps, Replays: st.Replays, Unanswered: st.Unanswered, Trouble: is.trouble, Snapshots: st.Snapshots, Resets: st.Resets,
		Lost: st.Lost, Malformed: c.malformed.Load(),
	}
}

// index shows what is known of the engines' KV caches: of all replicas, or of
// those that ?replica= and ?state= name.
func (ad *admin) index(w http.ResponseWriter, r *http.Request) {
	replica, state := r.URL.Query().Get("replica"), r.URL.Query().Get("state")
	if state != "" && !slices.Contains(indexStates[:], state) {
		http.Error(w, fmt.Sprintf("state %q is unknown; want one of %s", state, strings.Join(indexStates[:], ", ")), http.StatusBadRequest)
		return
	}
	report := ad.agent.fleet.indexReport()
	report.Slots = slices.DeleteFunc(report.Slots, func(s slotReport) bool {
		return replica != "" && s.Replica != replica || state != "" && s.State != state
	})
	ad.write(w, report)
}

// unwell is how long the events of a replica may be other than whole before
// /readyz tells: after a restart or a gap they are within a moment.
const unwell = 10 * time.Second

// ailment says in a few words what is wrong with events that are published.
func (s *subscriber) ailment(now time.Time) string {
	is := s.standing()
	if is.from.events.isZero() || is.state == index.Exact || now.Sub(is.since) < unwell {
		return ""
	}
	return "its KV events are not followed exactly (" + is.why + ")"
}

var (
	indexEntriesDesc = prometheus.NewDesc("inferrail_index_entries",
		"Blocks that engines hold as their events say, by tier; guessed and expected are those known from requests alone.", []string{"tier"}, nil)
	indexBytesDesc = prometheus.NewDesc("inferrail_index_bytes",
		"Memory that the index of KV caches takes.", nil, nil)
	indexSlotsDesc = prometheus.NewDesc("inferrail_index_slots",
		"Engine endpoints whose KV cache is known in such a way.", []string{"state"}, nil)
	indexStateDesc = prometheus.NewDesc("inferrail_index_state",
		"1 for the state in which the replica's KV cache is known, 0 for the others.", []string{"replica", "state"}, nil)
	indexResetsDesc = prometheus.NewDesc("inferrail_index_resets_total",
		"Times that what was known of a replica's KV cache was forgotten, because its engine had restarted.", []string{"replica"}, nil)
	predictionsDesc = prometheus.NewDesc("inferrail_index_predictions_total",
		"Responses in which the replica's engine has told how many tokens it has found in its cache, where that was predicted.", []string{"replica"}, nil)
	predictedDesc = prometheus.NewDesc("inferrail_index_predicted_tokens_total",
		"Cached tokens that were predicted for these responses.", []string{"replica"}, nil)
	predictedActualDesc = prometheus.NewDesc("inferrail_index_actual_tokens_total",
		"Cached tokens that the engine has found in these responses.", []string{"replica"}, nil)
	predictedErrorDesc = prometheus.NewDesc("inferrail_index_error_tokens_total",
		"How far the predictions of these responses were off, each either way.", []string{"replica"}, nil)
	eventsDesc = prometheus.NewDesc("inferrail_kv_events_total",
		"KV events of a replica that were taken in.", []string{"replica", "kind"}, nil)
	eventGapsDesc = prometheus.NewDesc("inferrail_kv_events_gaps_total",
		"Times that batches of KV events were missing.", []string{"replica"}, nil)
	eventReplaysDesc = prometheus.NewDesc("inferrail_kv_events_replays_total",
		"Times that a publisher of KV events was asked for batches again.", []string{"replica"}, nil)
	eventUnansweredDesc = prometheus.NewDesc("inferrail_kv_events_unanswered_total",
		"Requests to a publisher of KV events, for batches or for a snapshot, that it has not answered.", []string{"replica"}, nil)
	eventSnapshotsDesc = prometheus.NewDesc("inferrail_kv_events_snapshots_total",
		"Times that all that an engine holds was taken from a snapshot.", []string{"replica"}, nil)
	eventLostDesc = prometheus.NewDesc("inferrail_kv_events_lost_batches_total",
		"Batches of KV events that could not be had again.", []string{"replica"}, nil)
	eventMalformedDesc = prometheus.NewDesc("inferrail_kv_events_malformed_total",
		"Messages of a publisher of KV events that could not be read.", []string{"replica"}, nil)
	eventLagDesc = prometheus.NewDesc("inferrail_kv_events_lag_seconds",
		"Time from the making of the batch of KV events that was taken in last until that, by the clocks of both nodes.", []string{"replica"}, nil)
)

// indexMetrics is the metrics of the index and of KV events. A replica that has
// left has none.
type indexMetrics struct{ fleet *fleet }

// Describe implements prometheus.Collector.
func (indexMetrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		indexEntriesDesc, indexBytesDesc, indexSlotsDesc, indexStateDesc, indexResetsDesc,
		predictionsDesc, predictedDesc, predictedActualDesc, predictedErrorDesc, eventsDesc, eventGapsDesc,
		eventReplaysDesc, eventUnansweredDesc, eventSnapshotsDesc, eventLostDesc, eventMalformedDesc, eventLagDesc,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (x indexMetrics) Collect(ch chan<- prometheus.Metric) {
	f := x.fleet
	gauge := func(desc *prometheus.Desc, value float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, labels...)
	}
	count := func(desc *prometheus.Desc, value uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(value), labels...)
	}
	f.mu.Lock()
	members := map[int]*member{}
	for _, m := range f.members {
		members[m.replica.Slot] = m
	}
	f.mu.Unlock()

	gauge(indexBytesDesc, float64(f.index.Totals().Bytes))
	entries := map[string]int{"guessed": 0, "expected": 0}
	for _, name := range tierNames {
		entries[name] = 0
	}
	var slots [len(indexStates)]int
	for _, st := range f.index.Stats(nil) {
		m := members[st.Slot]
		if m == nil {
			continue
		}
		entries["guessed"] += st.Guessed
		entries["expected"] += st.Expected
		for tier, n := range st.Blocks {
			entries[tierNames[tier]] += n
		}
		slots[st.State]++
		for state, name := range indexStates {
			value := 0.0
			if index.State(state) == st.State {
				value = 1
			}
			gauge(indexStateDesc, value, m.id, name)
		}
		count(indexResetsDesc, uint64(st.Resets), m.id)
		if a := &st.Audited; a.Responses > 0 {
			count(predictionsDesc, uint64(a.Responses), m.id)
			count(predictedDesc, uint64(a.Predicted), m.id)
			count(predictedActualDesc, uint64(a.Actual), m.id)
			count(predictedErrorDesc, uint64(a.Error), m.id)
		}
	}
	for name, n := range entries {
		gauge(indexEntriesDesc, float64(n), name)
	}
	for state, n := range slots {
		gauge(indexSlotsDesc, float64(n), indexStates[state])
	}
	for _, m := range members {
		is, c := m.subscriber.standing(), &m.subscriber.counts
		if is.from.events.isZero() && is.stats.Batches == 0 {
			continue // it publishes none
		}
		st := &is.stats
		count(eventsDesc, c.stored.Load(), m.id, "stored")
		count(eventsDesc, c.removed.Load(), m.id, "removed")
		count(eventsDesc, c.cleared.Load(), m.id, "cleared")
		count(eventsDesc, st.Passed, m.id, "unknown")
		count(eventGapsDesc, st.Gaps, m.id)
		count(eventReplaysDesc, st.Replays, m.id)
		count(eventUnansweredDesc, st.Unanswered, m.id)
		count(eventSnapshotsDesc, st.Snapshots, m.id)
		count(eventLostDesc, st.Lost, m.id)
		count(eventMalformedDesc, c.malformed.Load(), m.id)
		gauge(eventLagDesc, st.Lag.Seconds(), m.id)
	}
}
