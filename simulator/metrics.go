package simulator

import (
	"maps"
	"math"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics is what /metrics shows, under the engine's names and in vLLM's
// buckets. Its methods may be called from any goroutine.
type metrics struct {
	registry *prometheus.Registry
	ranks    []*rankMetrics
	p        *process
}

// rankMetrics are the series of one rank.
type rankMetrics struct {
	prompt, generation        prometheus.Counter
	success                   *prometheus.CounterVec // only vLLM's
	firstToken, betweenTokens prometheus.Histogram
	// values are read from the engine when the page is asked for, unless they
	// are hidden.
	values []metricValue
	hidden *atomic.Bool
	// taken, when not nil, counts a request whose choices have entered the
	// engine. The server's mutex is held.
	taken func(a *answer)
	// done, when not nil, counts a choice that is over, and whether all of it
	// was sent. The server's mutex is held.
	done func(x *exchange, c *choice, complete bool)
	// refused, when not nil, counts a request that was not taken.
	refused func(e *apiError)
	// slots are llama.cpp's, which has no others of the above.
	slots *llamaSlots
}

type metricValue struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	of   func(e *Engine, l Load) float64
}

func newMetrics(p *process) *metrics {
	m := &metrics{registry: prometheus.NewRegistry(), p: p}
	for _, r := range p.ranks {
		var rm *rankMetrics
		switch p.s.cfg.Engine {
		case "sglang":
			rm = m.sglang(r)
		case "tgi":
			rm = m.tgi(r)
		case "llamacpp":
			rm = m.llamacpp(r)
		case "ollama":
			rm = m.ollama(r)
		default:
			rm = m.vllm(r)
		}
		m.ranks = append(m.ranks, rm)
	}
	m.registry.MustRegister(m)
	return m
}

// used is the part of the cache that sequences have.
func used(e *Engine, _ Load) float64 {
	n, of := e.cache.usage()
	return float64(n) / float64(of)
}

// vllm makes and registers vLLM's series.
func (m *metrics) vllm(r *rank) *rankMetrics {
	cfg := &m.p.s.cfg
	number := strconv.Itoa(r.number)
	labels := prometheus.Labels{"engine": number, "model_name": cfg.ServedModelName[0]}
	rm := &rankMetrics{
		success: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "vllm:request_success_total",
			Help: "Count of requests by the reason they ended.", ConstLabels: labels}, []string{"finished_reason"}),
	}
	rm.counters("vllm:", labels)
	m.registry.MustRegister(rm.prompt, rm.generation, rm.firstToken, rm.betweenTokens)
	for _, reason := range []string{"stop", "length", "abort", "error", "repetition"} {
		rm.success.WithLabelValues(reason)
	}
	m.registry.MustRegister(rm.success)
	rm.value("vllm:num_requests_running", "Number of requests in the running batch.", labels, prometheus.GaugeValue,
		func(_ *Engine, l Load) float64 { return float64(l.Running) })
	rm.value("vllm:num_requests_waiting", "Number of requests waiting to be processed.", labels, prometheus.GaugeValue,
		func(_ *Engine, l Load) float64 { return float64(l.Waiting) })
	if r.number == 0 {
		rejected := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "vllm:admission_rejections_total",
			Help: "Number of requests rejected at admission."}, []string{"reason"})
		for _, reason := range []string{"max_num_queued_reqs", "max_num_queued_tokens"} {
			rejected.WithLabelValues(reason)
		}
		m.registry.MustRegister(rejected)
		rm.refused = func(e *apiError) {
			if e.status == http.StatusServiceUnavailable && e.kind == "Service Unavailable" {
				rejected.WithLabelValues("max_num_queued_reqs").Inc()
			}
		}
	}
	rm.value("vllm:kv_cache_usage_perc", "KV cache usage, 1 is full.", labels, prometheus.GaugeValue, used)
	rm.value("vllm:prefix_cache_queries_total", "Prefix cache queries, in number of queried tokens.", labels, prometheus.CounterValue,
		func(e *Engine, _ Load) float64 { return float64(e.counts.Queried) })
	rm.value("vllm:prefix_cache_hits_total", "Prefix cache hits, in number of cached tokens.", labels, prometheus.CounterValue,
		func(e *Engine, _ Load) float64 { return float64(e.counts.Hit) })
	rm.value("vllm:num_preemptions_total", "Cumulative number of preemptions.", labels, prometheus.CounterValue,
		func(e *Engine, _ Load) float64 { return float64(e.counts.Preempted) })
	shares := "True"
	if cfg.NoEnablePrefixCaching {
		shares = "False"
	}
	info := prometheus.Labels{
		"engine": number, "block_size": strconv.Itoa(cfg.BlockSize), "num_gpu_blocks": strconv.Itoa(cfg.NumGPUBlocks),
		"num_gpu_blocks_override": strconv.Itoa(cfg.NumGPUBlocks), "enable_prefix_caching": shares,
		"prefix_caching_hash_algo": "sha256", "cache_dtype": "auto", "gpu_memory_utilization": "0.9",
		"sliding_window": "None", "kv_cache_size_tokens": strconv.Itoa(cfg.BlockSize * cfg.NumGPUBlocks),
	}
	rm.value("vllm:cache_config_info", "Information of the cache configuration.", info, prometheus.GaugeValue,
		func(*Engine, Load) float64 { return 1 })
	if r.number == 0 {
		rm.value("process_start_time_seconds", "Start time of the process since unix epoch in seconds.", nil, prometheus.GaugeValue,
			func(*Engine, Load) float64 { return float64(m.p.began.UnixMilli()) / 1e3 })
	}
	return rm
}

// sglang makes and registers SGLang's series.
func (m *metrics) sglang(r *rank) *rankMetrics {
	cfg := &m.p.s.cfg
	labels := prometheus.Labels{"model_name": cfg.ServedModelName[0], "engine_type": "unified", "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
	if cfg.DataParallelSize > 1 {
		labels["dp_rank"] = strconv.Itoa(r.number)
	}
	rm := &rankMetrics{}
	rm.counters("sglang:", labels)
	m.registry.MustRegister(rm.prompt, rm.generation, rm.firstToken, rm.betweenTokens)
	counter := func(name, help string) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Name: "sglang:" + name, Help: help, ConstLabels: labels})
		m.registry.MustRegister(c)
		return c
	}
	requests := counter("num_requests_total", "Number of requests processed.")
	aborted := counter("num_aborted_requests_total", "Number of requests aborted.")
	latency := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "sglang:e2e_request_latency_seconds", Help: "Histogram of End-to-end request latency in seconds",
		ConstLabels: labels, Buckets: []float64{.1, .2, .4, .6, .8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400, 600, 1200, 1800, 2400}})
	queue := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "sglang:queue_time_seconds", Help: "Histogram of queueing time in seconds.",
		ConstLabels: labels, Buckets: []float64{0, .1, .2, .5, 1, 2, 3, 4, 5, 10, 15, 20, 30, 40, 50, 60, 70, 80, 90, 100, 200, 300, 400, 500, 600, 700, 800, 900, 1000, 1200, 1400, 1600, 1800, 2000, 2500, 3000}})
	m.registry.MustRegister(latency, queue)
	rm.done = func(x *exchange, c *choice, complete bool) {
		if !complete {
			aborted.Inc()
			return
		}
		requests.Inc()
		latency.Observe((x.s.now() - x.arrived).Seconds())
		queue.Observe((c.seq.Start - x.arrived).Seconds())
	}
	gauge := func(name, help string, of func(*Engine, Load) float64) {
		rm.value("sglang:"+name, help, labels, prometheus.GaugeValue, of)
	}
	gauge("num_running_reqs", "The number of running requests.", func(_ *Engine, l Load) float64 { return float64(l.Running) })
	gauge("num_queue_reqs", "The number of requests in the waiting queue.", func(_ *Engine, l Load) float64 { return float64(l.Waiting) })
	gauge("token_usage", "The token usage.", used)
	gauge("num_used_tokens", "The number of used tokens.", func(e *Engine, _ Load) float64 {
		n, _ := e.cache.usage()
		return float64(n * cfg.BlockSize)
	})
	gauge("max_total_num_tokens", "Maximum total number of tokens.", func(*Engine, Load) float64 { return float64(cfg.NumGPUBlocks * cfg.BlockSize) })
	gauge("page_size", "The page size.", func(*Engine, Load) float64 { return float64(cfg.BlockSize) })
	gauge("context_len", "The context length.", func(*Engine, Load) float64 { return float64(cfg.MaxModelLen) })
	gauge("num_pages", "The number of pages.", func(*Engine, Load) float64 { return float64(cfg.NumGPUBlocks) })
	gauge("cache_hit_rate", "The prefix cache hit rate.", func(e *Engine, _ Load) float64 { return float64(e.counts.Hit) / float64(max(1, e.counts.Queried)) })
	rm.value("sglang:num_retracted_requests_total", "Total number of retracted requests.", labels, prometheus.CounterValue,
		func(e *Engine, _ Load) float64 { return float64(e.counts.Preempted) })
	from := maps.Clone(labels)
	from["cache_source"] = "device"
	rm.value("sglang:cached_tokens_total", "Number of cached prompt tokens.", from, prometheus.CounterValue,
		func(e *Engine, _ Load) float64 { return float64(e.counts.Hit) })
	return rm
}

// counters makes the series that vLLM and SGLang both show.
func (rm *rankMetrics) counters(prefix string, labels prometheus.Labels) {
	first := []float64{.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560}
	between := []float64{.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80}
	if prefix == "sglang:" {
		first = []float64{.1, .2, .4, .6, .8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400}
		between = []float64{.002, .004, .006, .008, .01, .015, .02, .025, .03, .035, .04, .06, .08, .1, .2, .4, .6, .8, 1, 2, 4, 6, 8}
	}
	rm.prompt = prometheus.NewCounter(prometheus.CounterOpts{Name: prefix + "prompt_tokens_total",
		Help: "Number of prefill tokens processed.", ConstLabels: labels})
	rm.generation = prometheus.NewCounter(prometheus.CounterOpts{Name: prefix + "generation_tokens_total",
		Help: "Number of generation tokens processed.", ConstLabels: labels})
	rm.firstToken = prometheus.NewHistogram(prometheus.HistogramOpts{Name: prefix + "time_to_first_token_seconds",
		Help: "Time to first token in seconds.", ConstLabels: labels, Buckets: first})
	rm.betweenTokens = prometheus.NewHistogram(prometheus.HistogramOpts{Name: prefix + "inter_token_latency_seconds",
		Help: "Time between output tokens in seconds.", ConstLabels: labels, Buckets: between})
}

// value adds a series that is read from the engine.
func (rm *rankMetrics) value(name, help string, labels prometheus.Labels, kind prometheus.ValueType, of func(*Engine, Load) float64) {
	rm.values = append(rm.values, metricValue{prometheus.NewDesc(name, help, nil, labels), kind, of})
}

// Describe implements prometheus.Collector for what is read from the engines.
func (m *metrics) Describe(to chan<- *prometheus.Desc) {
	for _, rm := range m.ranks {
		for _, v := range rm.values {
			to <- v.desc
		}
	}
}

// Collect implements prometheus.Collector: all of it shows the same instant.
func (m *metrics) Collect(to chan<- prometheus.Metric) {
	var out []prometheus.Metric
	s := m.p.s
	s.mu.Lock()
	now := s.now()
	for i, r := range m.p.ranks {
		l := r.engine.Load(now)
		m.p.settle(r, now)
		if s.cfg.ZeroLatency && len(m.ranks) == 1 {
			l.Running = s.Running()
		}
		if hidden := m.ranks[i].hidden; hidden != nil && hidden.Load() {
			continue
		}
		for _, v := range m.ranks[i].values {
			out = append(out, prometheus.MustNewConstMetric(v.desc, v.kind, v.of(r.engine, l)))
		}
	}
	s.mu.Unlock()
	for _, metric := range out {
		to <- metric
	}
}

// arrived counts the prompts of a new request. The server's mutex is held.
func (m *metrics) arrived(a *answer, r *rank) {
	rm := m.ranks[r.number]
	rm.prompt.Add(float64(a.promptTokens()))
	if rm.taken != nil {
		rm.taken(a)
	}
}

// slotsOf returns the slots of a rank of llama.cpp, nil of others.
func (m *metrics) slotsOf(r *rank) *llamaSlots { return m.ranks[r.number].slots }

// ended counts a choice that is over, by why it has ended. The server's mutex
// is held.
func (m *metrics) ended(x *exchange, c *choice, complete bool) {
	rm := m.ranks[x.rank.number]
	if rm.success != nil {
		reason := x.reason
		if complete {
			reason = c.reason()
		}
		rm.success.WithLabelValues(reason).Inc()
	}
	if rm.done != nil {
		rm.done(x, c, complete)
	}
}

// refused counts a request that was not taken.
func (m *metrics) refused(e *apiError) {
	if of := m.ranks[0].refused; of != nil {
		of(e)
	}
}

// token counts a token of c that was written at time now.
func (m *metrics) token(x *exchange, c *choice, now time.Duration) {
	rm := m.ranks[x.rank.number]
	rm.generation.Inc()
	if c.sent == 1 {
		rm.firstToken.Observe((now - x.arrived).Seconds())
	} else {
		rm.betweenTokens.Observe((now - c.wrote).Seconds())
	}
	c.wrote = now
}

// whole counts the tokens of an answer that is not streamed.
func (m *metrics) whole(x *exchange) {
	if !x.req.api.generates() {
		return
	}
	rm := m.ranks[x.rank.number]
	x.s.mu.Lock()
	defer x.s.mu.Unlock()
	for i := range x.choices {
		seq := &x.choices[i].seq
		rm.generation.Add(float64(seq.Output))
		rm.firstToken.Observe((seq.First - x.arrived).Seconds())
		for range seq.Output - 1 {
			rm.betweenTokens.Observe((seq.End - seq.First).Seconds() / float64(seq.Output-1))
		}
	}
}

// loads serves SGLang's GET /v1/loads, of all ranks or of dp_rank. What include
// asks for beside the core is left out.
func (s *Server) loads(w http.ResponseWriter, r *http.Request) {
	type load struct {
		Rank          int     `json:"dp_rank"`
		Running       int     `json:"num_running_reqs"`
		Waiting       int     `json:"num_waiting_reqs"`
		WaitingTokens int     `json:"num_waiting_uncached_tokens"`
		Used          int     `json:"num_used_tokens"`
		Total         int     `json:"num_total_tokens"`
		MaxTokens     int     `json:"max_total_num_tokens"`
		MaxRunning    int     `json:"max_running_requests"`
		Usage         float64 `json:"token_usage"`
		HitRate       float64 `json:"cache_hit_rate"`
	}
	out := struct {
		Timestamp string `json:"timestamp"`
		Version   string `json:"version"`
		Loads     []load `json:"loads"`
	}{time.Now().UTC().Format("2006-01-02T15:04:05.000000+00:00"), sglangVersion, []load{}}
	cfg := &s.cfg
	which := r.URL.Query().Get("dp_rank")
	s.mu.Lock()
	now := s.now()
	for _, rank := range s.process.ranks {
		l := rank.engine.Load(now)
		s.process.settle(rank, now)
		if which != "" && which != strconv.Itoa(rank.number) {
			continue
		}
		if cfg.ZeroLatency && len(s.process.ranks) == 1 {
			l.Running = s.Running()
		}
		blocks, of := rank.engine.cache.usage()
		tokens := blocks * cfg.BlockSize
		round := func(v float64) float64 { return math.Round(v*1e4) / 1e4 }
		out.Loads = append(out.Loads, load{rank.number, l.Running, l.Waiting, l.WaitingTokens, tokens, tokens + l.WaitingTokens,
			of * cfg.BlockSize, cfg.MaxNumSeqs, round(float64(blocks) / float64(max(of, 1))),
			round(float64(rank.engine.counts.Hit) / float64(max(rank.engine.counts.Queried, 1)))})
	}
	s.mu.Unlock()
	writeJSON(w, http.StatusOK, appendJSON(nil, out))
}
