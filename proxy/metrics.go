package proxy

import (
	"cmp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/inferrail/inferrail/policy"
)

// stats are the server's counters. Any goroutine may add to them.
type stats struct {
	accepted, running, replays atomic.Int64
	logged, unlogged           atomic.Int64

	totals totals

	mu    sync.Mutex // guards tiers
	tiers map[TierCount]uint64

	requests    *prometheus.CounterVec // model, outcome, status, blame
	retries     *prometheus.CounterVec // model, reason
	tokens      *prometheus.CounterVec // model, kind
	keyRequests *prometheus.CounterVec // key, outcome
	keyTokens   *prometheus.CounterVec // key, kind
	limited     *prometheus.CounterVec // key, limit
	unknown     *prometheus.CounterVec // model
	prompts     *prometheus.CounterVec // model, outcome
	promptTime  *prometheus.HistogramVec
	cached      *prometheus.CounterVec // model, kind
	lookupTime  *prometheus.HistogramVec
	firstByte   *prometheus.HistogramVec
	duration    *prometheus.HistogramVec
	admissions  *prometheus.CounterVec // model, verdict
	heldTime    *prometheus.HistogramVec
	pieces      *prometheus.CounterVec
	prewarms    *prometheus.CounterVec // model, outcome
	prewarmed   *prometheus.CounterVec // model

	decisions        *prometheus.CounterVec   // model, policy, reason
	decisionTime     *prometheus.HistogramVec // model
	firstToken       *prometheus.HistogramVec // model
	observedTime     *prometheus.HistogramVec // model
	predictedTime    *prometheus.HistogramVec // model
	predictionRatio  *prometheus.HistogramVec // model
	decisionsDropped prometheus.Counter
	tracesDropped    prometheus.Counter
}

// TierCount is how many responses went by one tier for one reason.
type TierCount struct {
	Tier   string `json:"tier"`   // packet or copy
	Reason string `json:"reason"` // why not a better tier; empty for packet
	Count  uint64 `json:"count"`
}

// Datapath is what has carried the responses so far. GET /debug/datapath shows
// it.
type Datapath struct {
	Responses []TierCount `json:"responses"`
	// Wakeups is how often userspace was woken for a response after its
	// request was sent: for its head, by a socket while relaying, and by the
	// kernel programs. Responses that still run count.
	Wakeups      uint64 `json:"wakeups"`
	CopiedChunks uint64 `json:"copied_chunks"`
	CopiedBytes  uint64 `json:"copied_bytes"`
	KernelChunks uint64 `json:"kernel_chunks"`
	KernelBytes  uint64 `json:"kernel_bytes"`
	// KernelPackets may each hold several packets of the wire.
	KernelPackets uint64 `json:"kernel_packets"`
	// Replays is how often a request was sent again because a reused
	// connection had died.
	Replays     int64 `json:"replays"`
	Connections int   `json:"connections"`
	Running     int64 `json:"running"`
}

func newStats() *stats {
	seconds := []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600}
	return &stats{
		tiers: map[TierCount]uint64{},
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "inferrail_requests_total",
			Help: "Requests finished, by model, how they ended, the class of the status that was answered, none if there was none, and who is to blame."}, []string{"model", "outcome", "status", "blame"}),
		retries: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "inferrail_retries_total",
			Help: "Attempts that failed and were followed by another, by model and why they failed."}, []string{"model", "reason"}),
		tokens: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "inferrail_tokens_total",
			Help: "Tokens as the engines' usage counted them: prompt, completion, and cached, which is a part of prompt. Of streams that told no usage, their chunks: completion_chunks."}, []string{"model", "kind"}),
		keyRequests: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "inferrail_key_requests_total",
			Help: "Requests finished, by API key and how they ended."}, []string{"key", "outcome"}),
		keyTokens: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "inferrail_key_tokens_total",
			Help: "Tokens by API key; kinds as in inferrail_tokens_total."}, []string{"key", "kind"}),
		limited: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "inferrail_key_limited_total",
			Help: "Requests refused with status 429, by API key and by the limit that had too little left; of several each counts."}, []string{"key", "limit"}),
		unknown: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "inferrail_responses_without_usage_total",
			Help: "Responses that ended well and told no usage."}, []string{"model"}),
		prompts: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "inferrail_prompts_total",
			Help: "Prompts read, by model and whether their tokens are known: exact, or why they are not."}, []string{"model", "outcome"}),
		promptTime: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "inferrail_prompt_seconds",
			Help:    "Time that a request waited for its prompt to be rendered and tokenized.",
			Buckets: []float64{.00001, .000025, .00005, .0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1}}, []string{"model"}),
		cached: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "inferrail_prompt_cached_tokens_total",
			Help: "Prompt tokens that engines had cached: predicted and actual, of responses that tell the latter, so that both can be compared; unverified are those predicted of the others."}, []string{"model", "kind"}),
		lookupTime: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "inferrail_index_lookup_seconds",
			Help:    "Time to hash a request's prompt and to look up what every engine holds of it.",
			Buckets: []float64{.0000005, .000001, .0000025, .000005, .00001, .000025, .00005, .0001, .00025, .001, .01}}, []string{"model"}),
		firstByte: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "inferrail_time_to_first_byte_seconds",
			Help: "From the end of the request to the engine's response head.", Buckets: seconds}, []string{"model"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "inferrail_request_duration_seconds",
			Help: "From the first byte of the request to the end of the response.", Buckets: seconds}, []string{"model"}),
		admissions: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "inferrail_admissions_total",
			Help: "Requests that admission has judged, by what it has said last: why one was taken, or refused (requests are late, too much waits, predicted too late)."}, []string{"model", "verdict"}),
		heldTime: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "inferrail_held_seconds",
			Help: "Time that requests were held back in the agent until a replica was nearly free, of those that were.", Buckets: seconds}, []string{"model"}),
		pieces: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "inferrail_pieces_total",
			Help: "Pieces of long prompts that engines were asked to compute before the request itself, by model and what came of it: computed, or why not."}, []string{"model", "outcome"}),
		prewarms: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "inferrail_prewarm_total",
			Help: "Requests that asked idle engines to compute what prompts begin with ahead, by model and what came of it: computed, or why not."}, []string{"model", "outcome"}),
		prewarmed: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "inferrail_prewarmed_tokens_total",
			Help: "Tokens that idle engines have computed ahead, because many prompts begin with them."}, []string{"model"}),
		decisions: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "inferrail_decisions_total",
			Help: "Replicas chosen, by model, by the policy that has chosen and why. A request that is tried again is chosen for again."}, []string{"model", "policy", "reason"}),
		decisionTime: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "inferrail_decision_seconds",
			Help:    "Time to look at all replicas of a model and to choose one; one in 16 is measured.",
			Buckets: []float64{.00000025, .0000005, .000001, .0000025, .000005, .00001, .000025, .0001, .001, .01}}, []string{"model"}),
		firstToken: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "inferrail_time_to_first_token_seconds",
			Help: "Of answers that tell it: from the end of the request, with all that it waited in the agent, to the first token.", Buckets: seconds}, []string{"model"}),
		observedTime: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "inferrail_observed_time_to_first_token_seconds",
			Help: "Of the same answers: from sending the request to the engine to the first token, which is what is predicted.", Buckets: seconds}, []string{"model"}),
		predictedTime: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "inferrail_predicted_time_to_first_token_seconds",
			Help: "What was predicted of the requests in inferrail_observed_time_to_first_token_seconds.", Buckets: seconds}, []string{"model"}),
		predictionRatio: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "inferrail_prediction_ratio",
			Help:    "Time to first token as it was seen over what was predicted: above 1, it took longer.",
			Buckets: []float64{.1, .25, .5, .67, .8, .9, 1, 1.1, 1.25, 1.5, 2, 4, 10}}, []string{"model"}),
		tracesDropped: prometheus.NewCounter(prometheus.CounterOpts{Name: "inferrail_traces_dropped_total",
			Help: "Traced requests whose spans were not sent, because others waited to be."}),
		decisionsDropped: prometheus.NewCounter(prometheus.CounterOpts{Name: "inferrail_decision_log_dropped_total",
			Help: "Decisions that were to be logged and were not, because the log was too slow."}),
	}
}

// forget drops the series of a model that is not served any more.
func (s *stats) forget(model string) {
	labels := prometheus.Labels{"model": model}
	for _, v := range []*prometheus.CounterVec{s.requests, s.retries, s.tokens, s.unknown, s.prompts, s.cached, s.decisions, s.admissions, s.pieces,
		s.prewarms, s.prewarmed} {
		v.DeletePartialMatch(labels)
	}
	for _, v := range []*prometheus.HistogramVec{s.promptTime, s.lookupTime, s.firstByte, s.duration, s.heldTime,
		s.decisionTime, s.firstToken, s.observedTime, s.predictedTime, s.predictionRatio} {
		v.DeletePartialMatch(labels)
	}
}

// noModelLabel is the label of what has no model, or one that is not served any more: what
// clients ask for makes no series, and those of a model that has left do not come back
// with its last requests.
const noModelLabel = "none"

func (x *exchange) modelLabel() string {
	if x.model == nil {
		return noModelLabel
	}
	return x.c.s.modelLabel(x.model)
}

func (s *Server) modelLabel(m *Model) string {
	if is := s.fleet.Load().Models[m.Name]; is == nil || is.Name != m.Name {
		return noModelLabel
	}
	return m.Name
}

// keyLabel is the name of the key that the request came with, "" for none and for one
// that is not known any more.
func (x *exchange) keyLabel() string {
	if x.key == nil || !x.c.s.access.Load().known[x.key.Name] {
		return ""
	}
	return x.key.Name
}

// forgetKey drops the series of an API key that is not known any more.
func (s *stats) forgetKey(name string) {
	for _, v := range []*prometheus.CounterVec{s.keyRequests, s.keyTokens, s.limited} {
		v.DeletePartialMatch(prometheus.Labels{"key": name})
	}
}

// finished counts an exchange that is over. Once it does not run any more all of
// it is counted.
func (s *stats) finished(x *exchange, f failure, u usage, known bool, now time.Time) {
	defer s.running.Add(-1)
	model := x.modelLabel()
	key := x.keyLabel()
	s.totals.ended(f, x.passed, x.status)
	s.requests.WithLabelValues(model, f.label(), statusClass(x.status), failureTable[f].blame.String()).Inc()
	if key != "" {
		s.keyRequests.WithLabelValues(key, f.label()).Inc()
	}
	if x.verdict != "" {
		s.admissions.WithLabelValues(model, x.verdict).Inc()
	}
	if x.holding.took > 0 {
		s.heldTime.WithLabelValues(model).Observe(x.holding.took.Seconds())
	}
	if x.followed {
		s.prompts.WithLabelValues(model, x.promptReason.String()).Inc()
		s.promptTime.WithLabelValues(model).Observe(x.promptTook.Seconds())
	}
	if x.lookedUp {
		s.lookupTime.WithLabelValues(model).Observe(x.lookupTook.Seconds())
	}
	if !x.passed {
		return
	}
	tier := TierCount{Tier: "copy", Reason: x.why}
	if x.packet {
		tier.Tier = "packet"
	}
	s.mu.Lock()
	s.tiers[tier]++
	s.mu.Unlock()

	x.observe(s.firstByte.WithLabelValues(model), x.ttfb)
	if f == none {
		x.observe(s.duration.WithLabelValues(model), now.Sub(x.began))
	}
	if x.status != 200 {
		return
	}
	if known {
		s.totals.promptTokens.Add(u.prompt)
		s.totals.cachedTokens.Add(u.cached)
		s.totals.generatedTokens.Add(u.completion)
	} else if x.call.stream {
		s.totals.generatedTokens.Add(x.relay.frames.Chunks + x.kernel.Chunks)
	}
	count := func(kind string, n uint64) {
		s.tokens.WithLabelValues(model, kind).Add(float64(n))
		if key != "" {
			s.keyTokens.WithLabelValues(key, kind).Add(float64(n))
		}
	}
	switch {
	case known:
		count("prompt", u.prompt)
		count("completion", u.completion)
		count("cached", u.cached)
	case x.call.stream:
		// As good as can be told: a chunk is a token or more.
		count("completion_chunks", x.relay.frames.Chunks+x.kernel.Chunks)
		s.unknown.WithLabelValues(model).Inc()
	case f == none:
		s.unknown.WithLabelValues(model).Inc()
	}
}

// statusClass is the class of a status that was answered, as metrics have it.
func statusClass(status int) string {
	if c := status / 100; c >= 2 && c <= 5 {
		return statusClasses[c-1]
	}
	return statusClasses[0]
}

var statusClasses = [...]string{"none", "2xx", "3xx", "4xx", "5xx"}

// limits are the limits of keys as metrics have them.
var limits = [...]string{"requests", "input_tokens", "output_tokens"}

// overRate counts a request that a key's limits refuse.
func (s *stats) overRate(key string, q *policy.Quotas) {
	if key == "" {
		return
	}
	for i, quota := range [...]*policy.Quota{&q.Requests, &q.Input, &q.Output} {
		if quota.Short {
			s.limited.WithLabelValues(key, limits[i]).Inc()
		}
	}
}

// sawFirstToken counts how long the client of x has waited for its first token.
func (s *stats) sawFirstToken(x *exchange, took time.Duration) {
	s.totals.firstTokens[latencyBucket(took)].Add(1)
	x.observe(s.firstToken.WithLabelValues(x.modelLabel()), took)
}

// observe tells a histogram how long something took, and with it the trace, if it is one
// that a collector gets.
func (x *exchange) observe(h prometheus.Observer, took time.Duration) {
	if with, ok := h.(prometheus.ExemplarObserver); ok && x.trace != nil {
		with.ObserveWithExemplar(took.Seconds(), prometheus.Labels{"trace_id": x.traceID()})
		return
	}
	h.Observe(took.Seconds())
}

// cachedTokens counts what was predicted of a response's prompt beside what the
// engine has told.
func (s *stats) cachedTokens(model string, predicted, actual int, told bool) {
	if !told {
		s.cached.WithLabelValues(model, "unverified").Add(float64(predicted))
		return
	}
	s.cached.WithLabelValues(model, "predicted").Add(float64(predicted))
	s.cached.WithLabelValues(model, "actual").Add(float64(actual))
}

// Load is how many requests have begun and not finished, and how many of them wait in
// the agent for a place at a replica or for their turn.
func (s *Server) Load() (running int64, waiting int) {
	for _, n := range s.waits.all() {
		waiting += n
	}
	return s.stats.running.Load(), waiting
}

// Connections is how many connections of clients are open.
func (s *Server) Connections() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns) - s.paired + len(s.fronts)
}

// Datapath returns the counters of the datapath.
func (s *Server) Datapath() Datapath {
	t := s.stats
	d := Datapath{
		Responses: []TierCount{},
		Replays:   t.replays.Load(),
		Running:   t.running.Load(),
	}
	s.mu.Lock()
	d.Connections = len(s.conns) - s.paired + len(s.fronts)
	for c := range s.conns {
		c.x.relay.count()
	}
	s.mu.Unlock()
	for _, sh := range s.shards {
		n := &sh.counts
		d.Wakeups += n.wakeups.Load()
		d.CopiedChunks += n.chunks.Load()
		d.CopiedBytes += n.bytes.Load()
		d.KernelChunks += n.kernelChunks.Load()
		d.KernelBytes += n.kernelBytes.Load()
		d.KernelPackets += n.kernelPackets.Load()
	}
	t.mu.Lock()
	for tier, n := range t.tiers {
		tier.Count = n
		d.Responses = append(d.Responses, tier)
	}
	t.mu.Unlock()
	slices.SortFunc(d.Responses, func(a, b TierCount) int {
		return cmp.Or(strings.Compare(b.Tier, a.Tier), strings.Compare(a.Reason, b.Reason))
	})
	return d
}

var (
	descResponses = prometheus.NewDesc("inferrail_responses_total",
		"Responses passed on, by the tier that carried them and why not a better one.", []string{"tier", "reason"}, nil)
	descWakeups = prometheus.NewDesc("inferrail_relay_wakeups_total",
		"Wake-ups of userspace for a response after its request was sent.", nil, nil)
	descChunks = prometheus.NewDesc("inferrail_relay_chunks_total",
		"Chunks of response bodies passed on.", []string{"tier"}, nil)
	descBytes = prometheus.NewDesc("inferrail_relay_bytes_total",
		"Bytes of response bodies passed on, framing included.", []string{"tier"}, nil)
	descReplays = prometheus.NewDesc("inferrail_replays_total",
		"Requests sent again because a reused engine connection had died.", nil, nil)
	descConns = prometheus.NewDesc("inferrail_client_connections",
		"Open client connections.", nil, nil)
	descRunning = prometheus.NewDesc("inferrail_requests_running",
		"Requests begun and not finished.", nil, nil)
	descAccepted = prometheus.NewDesc("inferrail_client_connections_accepted_total",
		"Client connections accepted.", nil, nil)
	descWaiting = prometheus.NewDesc("inferrail_requests_waiting",
		"Requests that wait to be taken, or in line at a replica, by model and class.", []string{"model", "class"}, nil)
	descPercentile = prometheus.NewDesc("inferrail_admission_observed_seconds",
		"The percentile of the observed times to first token that admission goes by; nothing where none was observed lately.", []string{"model"}, nil)
	descBudget = prometheus.NewDesc("inferrail_admission_budget_seconds",
		"The time to first token that requests are granted that do not say; 0 is no bound.", []string{"model"}, nil)
	descBuffered = prometheus.NewDesc("inferrail_buffered_bytes",
		"Memory that holds the bodies of requests.", nil, nil)
	descShadowDecisions = prometheus.NewDesc("inferrail_shadow_decisions_total",
		"Decisions that a shadow policy was asked for beside the live one, and whether it agreed.", []string{"model", "policy", "agreed"}, nil)
	descShadowRegret = prometheus.NewDesc("inferrail_shadow_regret_seconds_total",
		"Time to first token by which a shadow policy's choices were better, and worse, than the live ones: better less worse is the regret of not having it. Both predicted, or against what the live choice was observed to take.",
		[]string{"model", "policy", "kind", "direction"}, nil)
)

// Describe implements prometheus.Collector.
func (s *Server) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descResponses, descWakeups, descChunks, descBytes, descReplays,
		descConns, descRunning, descAccepted, descBuffered, descShadowDecisions, descShadowRegret,
		descWaiting, descPercentile, descBudget} {
		ch <- d
	}
	for _, c := range s.stats.vectors() {
		c.Describe(ch)
	}
}

func (s *stats) vectors() []prometheus.Collector {
	return []prometheus.Collector{s.requests, s.retries, s.tokens, s.keyRequests, s.keyTokens, s.limited, s.unknown, s.prompts, s.promptTime, s.cached, s.lookupTime, s.firstByte, s.duration,
		s.heldTime, s.pieces, s.prewarms, s.prewarmed, s.decisions, s.decisionTime, s.firstToken, s.observedTime, s.predictedTime, s.predictionRatio, s.decisionsDropped, s.tracesDropped, s.admissions}
}

// Collect implements prometheus.Collector.
func (s *Server) Collect(ch chan<- prometheus.Metric) {
	counter := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, v, labels...)
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	d := s.Datapath()
	for _, t := range d.Responses {
		counter(descResponses, float64(t.Count), t.Tier, t.Reason)
	}
	counter(descWakeups, float64(d.Wakeups))
	counter(descChunks, float64(d.CopiedChunks), "copy")
	counter(descChunks, float64(d.KernelChunks), "packet")
	counter(descBytes, float64(d.CopiedBytes), "copy")
	counter(descBytes, float64(d.KernelBytes), "packet")
	counter(descReplays, float64(d.Replays))
	counter(descAccepted, float64(s.stats.accepted.Load()))
	gauge(descConns, float64(d.Connections))
	gauge(descRunning, float64(d.Running))
	gauge(descBuffered, float64(s.buffered.Load()))
	waits, now := s.waits.all(), time.Now()
	for _, m := range s.fleet.Load().Listed {
		// Those that none waits for are told too: a series that comes and goes
		// cannot be added up.
		for _, class := range s.classes.Load().list {
			k := waitKey{m.Name, class.Name}
			gauge(descWaiting, float64(waits[k]), k.model, k.class)
			delete(waits, k)
		}
		if m.Admission == nil {
			continue
		}
		gauge(descBudget, m.Budget.Seconds(), m.Name)
		if a := m.Admission.State(now); a.Samples > 0 {
			gauge(descPercentile, a.Observed.Seconds(), m.Name)
		}
	}
	for k, n := range waits { // of models and classes that have gone
		gauge(descWaiting, float64(n), k.model, k.class)
	}
	for _, c := range s.stats.vectors() {
		c.Collect(ch)
	}
	for _, m := range s.fleet.Load().Listed {
		for _, shadow := range m.ShadowReports() {
			r := &shadow.Regret
			counter(descShadowDecisions, float64(r.Agreed), m.Name, shadow.Name, "yes")
			counter(descShadowDecisions, float64(r.Decisions-r.Agreed), m.Name, shadow.Name, "no")
			counter(descShadowRegret, r.PredictedBetter, m.Name, shadow.Name, "predicted", "better")
			counter(descShadowRegret, r.PredictedWorse, m.Name, shadow.Name, "predicted", "worse")
			counter(descShadowRegret, r.ObservedBetter, m.Name, shadow.Name, "observed", "better")
			counter(descShadowRegret, r.ObservedWorse, m.Name, shadow.Name, "observed", "worse")
		}
	}
}
