package simulator

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics is what /metrics shows, under vLLM's names and in its buckets. Its
// methods may be called from any goroutine.
type metrics struct {
	registry                     *prometheus.Registry
	prompt, generation           prometheus.Counter
	prefixQueries, prefixHits    prometheus.Counter
	success                      *prometheus.CounterVec
	firstToken, betweenTokens    prometheus.Histogram
	running, waiting, cacheUsage *prometheus.Desc

	s *Server
}

func newMetrics(s *Server) *metrics {
	labels := prometheus.Labels{"engine": "0", "model_name": s.cfg.ServedModelName[0]}
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: "vllm:" + name, Help: help, ConstLabels: labels})
	}
	gauge := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc("vllm:"+name, help, nil, labels)
	}
	m := &metrics{
		s:             s,
		registry:      prometheus.NewRegistry(),
		prompt:        counter("prompt_tokens_total", "Number of prefill tokens processed."),
		generation:    counter("generation_tokens_total", "Number of generation tokens processed."),
		prefixQueries: counter("prefix_cache_queries_total", "Prefix cache queries, in number of queried tokens."),
		prefixHits:    counter("prefix_cache_hits_total", "Prefix cache hits, in number of cached tokens."),
		success: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "vllm:request_success_total",
			Help: "Count of requests by the reason they ended.", ConstLabels: labels}, []string{"finished_reason"}),
		firstToken: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "vllm:time_to_first_token_seconds",
			Help: "Time to first token in seconds.", ConstLabels: labels, Buckets: []float64{.001, .005, .01, .02, .04, .06,
				.08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560}}),
		betweenTokens: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "vllm:inter_token_latency_seconds",
			Help: "Time between output tokens in seconds.", ConstLabels: labels, Buckets: []float64{.01, .025, .05, .075, .1,
				.15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80}}),
		running:    gauge("num_requests_running", "Number of requests in the running batch."),
		waiting:    gauge("num_requests_waiting", "Number of requests waiting to be processed."),
		cacheUsage: gauge("kv_cache_usage_perc", "KV cache usage, 1 is full."),
	}
	for _, reason := range []string{"stop", "length", "abort", "error", "repetition"} {
		m.success.WithLabelValues(reason)
	}
	info := prometheus.NewGauge(prometheus.GaugeOpts{Name: "vllm:cache_config_info", Help: "Information of the cache configuration.",
		ConstLabels: prometheus.Labels{
			"engine": "0", "block_size": strconv.Itoa(s.cfg.BlockSize), "num_gpu_blocks": strconv.Itoa(s.cfg.NumGPUBlocks),
			"num_gpu_blocks_override": strconv.Itoa(s.cfg.NumGPUBlocks), "enable_prefix_caching": "False",
			"prefix_caching_hash_algo": "sha256", "cache_dtype": "auto", "gpu_memory_utilization": "0.9",
			"sliding_window": "None", "kv_cache_size_tokens": strconv.Itoa(s.cfg.BlockSize * s.cfg.NumGPUBlocks),
		}})
	info.Set(1)
	m.registry.MustRegister(m.prompt, m.generation, m.prefixQueries, m.prefixHits, m.success, m.firstToken, m.betweenTokens, info, m)
	return m
}

// Describe implements prometheus.Collector for the gauges.
func (m *metrics) Describe(to chan<- *prometheus.Desc) {
	to <- m.running
	to <- m.waiting
	to <- m.cacheUsage
}

// Collect implements prometheus.Collector: all gauges show the same instant.
func (m *metrics) Collect(to chan<- prometheus.Metric) {
	l := m.s.Load()
	used := min(1, float64(l.Tokens)/float64(m.s.cfg.BlockSize*m.s.cfg.NumGPUBlocks))
	to <- prometheus.MustNewConstMetric(m.running, prometheus.GaugeValue, float64(l.Running))
	to <- prometheus.MustNewConstMetric(m.waiting, prometheus.GaugeValue, float64(l.Waiting))
	to <- prometheus.MustNewConstMetric(m.cacheUsage, prometheus.GaugeValue, used)
}

// arrived counts the prompts of a new request.
func (m *metrics) arrived(a *answer) {
	for i := range a.choices {
		m.prefixQueries.Add(float64(a.choices[i].tokens))
		m.prefixHits.Add(float64(a.choices[i].seq.Cached))
	}
	m.prompt.Add(float64(a.promptTokens()))
}

// token counts a token of c that was written at time now.
func (m *metrics) token(x *exchange, c *choice, now time.Duration) {
	m.generation.Inc()
	if c.sent == 1 {
		m.firstToken.Observe((now - x.arrived).Seconds())
	} else {
		m.betweenTokens.Observe((now - c.wrote).Seconds())
	}
	c.wrote = now
}

// whole counts the tokens of an answer that is not streamed.
func (m *metrics) whole(x *exchange) {
	if !x.req.api.generates() {
		return
	}
	x.s.mu.Lock()
	defer x.s.mu.Unlock()
	for i := range x.choices {
		seq := &x.choices[i].seq
		m.generation.Add(float64(seq.Output))
		m.firstToken.Observe((seq.First - x.arrived).Seconds())
		for range seq.Output - 1 {
			m.betweenTokens.Observe(seq.perToken.Seconds())
		}
	}
}
