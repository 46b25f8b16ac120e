package agent

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"github.com/inferrail/inferrail/proxy"
)

// ObservabilityConfig says where traces go.
type ObservabilityConfig struct {
	// OTLPEndpoint is the base URL of a collector that takes OTLP over HTTP, such as
	// http://127.0.0.1:4318. When it is empty, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT and
	// OTEL_EXPORTER_OTLP_ENDPOINT count, and when they are too, no request is traced.
	OTLPEndpoint string `yaml:"otlp_endpoint"`
	// TraceSampleRatio is the part of the requests without a traceparent that are
	// traced; 1 is all. Of those with one, those are that it says are sampled.
	TraceSampleRatio float64 `yaml:"trace_sample_ratio"`
}

func (c *Config) validateObservability(p *problems) {
	o := &c.Observability
	if !(o.TraceSampleRatio >= 0 && o.TraceSampleRatio <= 1) {
		p.add("observability.trace_sample_ratio", "%v is outside 0 to 1; 1 traces all", o.TraceSampleRatio)
	}
	if o.OTLPEndpoint != "" {
		if why := badCollector(o.OTLPEndpoint); why != "" {
			p.add("observability.otlp_endpoint", "%s", why)
		}
	}
}

// badCollector is why a URL is none of a collector, "" where it may be.
func badCollector(text string) string {
	u, err := url.Parse(text)
	switch {
	case err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "":
		return fmt.Sprintf("%q is not the URL of a collector, such as http://127.0.0.1:4318", text)
	case u.User != nil:
		// It would be shown with the configuration.
		return fmt.Sprintf("%q holds a password; give it in OTEL_EXPORTER_OTLP_HEADERS", u.Redacted())
	case u.RawQuery != "" || u.Fragment != "":
		return fmt.Sprintf("%q has more than scheme, host, port and path", u.Scheme+"://"+u.Host+"...")
	}
	return ""
}

// collector is the URL that spans are sent to, "" for none, and what has named it.
func (o *ObservabilityConfig) collector() (endpoint, by string) {
	const all, traces = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
	switch {
	case o.OTLPEndpoint != "":
		endpoint = strings.TrimSuffix(o.OTLPEndpoint, "/")
		if !strings.HasSuffix(endpoint, tracesPath) {
			endpoint += tracesPath
		}
		return endpoint, "observability.otlp_endpoint"
	case strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true"), os.Getenv("OTEL_TRACES_EXPORTER") == "none":
		return "", ""
	case os.Getenv(traces) != "":
		return os.Getenv(traces), traces
	case os.Getenv(all) != "":
		return strings.TrimSuffix(os.Getenv(all), "/") + tracesPath, all
	}
	return "", ""
}

// tracesPath is where a collector takes spans.
const tracesPath = "/v1/traces"

// How spans are sent: so many traced requests wait to be made spans of, which go together
// when there are so many, or after so long; and so many wait at most while a collector is
// slow or does not take any. Then it is left alone for a while, which doubles up to a
// bound, and what it does not take at so many tries is dropped.
const (
	tracesQueue    = 256
	tracesBatch    = 512
	tracesEvery    = time.Second
	tracesMost     = 8192
	tracesPatience = time.Second
	tracesPause    = 30 * time.Second
	tracesTries    = 3
	tracesTimeout  = 10 * time.Second
	tracesAtEnd    = 2 * time.Second
)

// traces sends the requests that are traced to a collector, while one is configured. It
// belongs to an Agent, which configures it at the start and by reloads, and closes it.
// Metrics may be collected from any goroutine. The zero value needs log and proxy, and
// sends nothing.
type traces struct {
	log   *slog.Logger
	proxy *proxy.Server

	sent, dropped atomic.Uint64 // spans

	mu     sync.Mutex // guards the rest
	sender *spanSender
}

// configure makes it send where cfg says from now on. What waits for the collector
// before is sent, for a while.
func (t *traces) configure(cfg ObservabilityConfig) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	wanted := proxy.TracesWanted{Ratio: cfg.TraceSampleRatio}
	endpoint, by := cfg.collector()
	old := t.sender
	switch {
	case endpoint == "":
		t.proxy.SetTraces(nil, wanted)
		t.sender = nil
	case old != nil && old.endpoint == endpoint:
		t.proxy.SetTraces(old.requests, wanted)
		return nil
	default:
		if why := badCollector(endpoint); why != "" {
			return fmt.Errorf("%s: %s", by, why)
		}
		s, err := newSpanSender(t, endpoint, cfg.OTLPEndpoint != "")
		if err != nil {
			return fmt.Errorf("%s: no spans can be sent to %s: %w", by, endpoint, err)
		}
		t.proxy.SetTraces(s.requests, wanted)
		t.sender = s
		t.log.Info("traces are sent", "endpoint", endpoint, "by", by, "sample_ratio", cfg.TraceSampleRatio)
		if cfg.OTLPEndpoint == "" && cmp.Or(os.Getenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"), os.Getenv("OTEL_EXPORTER_OTLP_PROTOCOL")) == "grpc" {
			t.log.Warn("traces are sent over HTTP, not gRPC as OTEL_EXPORTER_OTLP_PROTOCOL says; name a port that takes it, mostly 4318", "endpoint", endpoint)
		}
	}
	old.close()
	return nil
}

// close sends what is there, for a while. No request may be on its way any more.
func (t *traces) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sender.close()
	t.sender = nil
}

// spanSender makes spans of traced requests and sends them to one collector, on two
// goroutines of its own, which newSpanSender starts and close ends: one makes them, and
// one at a time sends a batch. Nobody waits for either.
type spanSender struct {
	traces   *traces
	endpoint string
	requests chan *proxy.Trace
	closing  chan struct{}
	done     chan struct{} // closed when both goroutines have ended
	ctx      context.Context
	cancel   context.CancelFunc
	exporter sdktrace.SpanExporter
	spans    *spanMaker

	// The rest belongs to the first goroutine. While sending is not nil it holds the batch
	// on its way, and the second goroutine will say on answers what became of it.
	sending []sdktrace.ReadOnlySpan
	answers chan error
	tries   int
	ailing  bool // the last try has failed, and that was told
	pause   time.Duration
	retry   time.Time // when to try again
}

// newSpanSender makes one that counts in t. given: the endpoint is the configuration's,
// and not of the environment, which the exporter reads itself, with all else that
// variables say of how to send.
func newSpanSender(t *traces, endpoint string, given bool) (*spanSender, error) {
	s := &spanSender{traces: t, endpoint: endpoint, requests: make(chan *proxy.Trace, tracesQueue), closing: make(chan struct{}),
		done: make(chan struct{}), answers: make(chan error, 1), spans: newSpanMaker()}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	// What fails is tried again here, where it keeps nobody waiting.
	options := []otlptracehttp.Option{otlptracehttp.WithRetry(otlptracehttp.RetryConfig{Enabled: false})}
	if given {
		options = append(options, otlptracehttp.WithEndpointURL(endpoint))
	}
	var err error
	if s.exporter, err = otlptracehttp.New(s.ctx, options...); err != nil {
		s.cancel()
		return nil, err
	}
	go s.run()
	return s, nil
}

// close sends what is there, for a while, and ends the goroutines. A nil one has nothing.
func (s *spanSender) close() {
	if s == nil {
		return
	}
	timer := time.AfterFunc(tracesAtEnd, s.cancel)
	defer timer.Stop()
	close(s.closing)
	<-s.done
	s.cancel()
	_ = s.exporter.Shutdown(context.Background())
}

func (s *spanSender) run() {
	defer close(s.done)
	tick := time.NewTicker(tracesEvery)
	defer tick.Stop()
	for {
		select {
		case r := <-s.requests:
			s.take(r)
			if len(s.spans.made) >= tracesBatch {
				s.send()
			}
		case err := <-s.answers:
			s.answered(err)
			if len(s.spans.made) >= tracesBatch {
				s.send()
			}
		case <-tick.C:
			s.send()
		case <-s.closing:
			s.end()
			return
		}
	}
}

// take makes the spans of a request, unless too many wait.
func (s *spanSender) take(r *proxy.Trace) {
	if len(s.spans.made) >= tracesMost {
		s.traces.dropped.Add(spansOf(r))
		return
	}
	s.spans.add(r)
}

// send sends the spans that wait, if none are on their way and the collector is not left
// alone.
func (s *spanSender) send() {
	if s.sending != nil || time.Now().Before(s.retry) {
		return
	}
	if len(s.spans.made) > 0 {
		s.start(s.spans.take(tracesBatch))
	}
}

// start has a batch sent.
func (s *spanSender) start(batch []sdktrace.ReadOnlySpan) {
	s.sending = batch
	go func() {
		ctx, cancel := context.WithTimeout(s.ctx, tracesTimeout)
		defer cancel()
		s.answers <- s.exporter.ExportSpans(ctx, batch)
	}()
}

// answered is told what became of the batch that was on its way.
func (s *spanSender) answered(err error) {
	batch, log := s.sending, s.traces.log
	s.sending = nil
	if err == nil {
		s.traces.sent.Add(uint64(len(batch)))
		s.tries, s.pause, s.retry = 0, 0, time.Time{}
		if s.ailing {
			s.ailing = false
			log.Info("traces are sent again", "endpoint", s.endpoint)
		}
		return
	}
	if !s.ailing && s.ctx.Err() == nil {
		s.ailing = true
		log.Warn("traces cannot be sent; they are dropped when too many wait", "endpoint", s.endpoint, "why", err)
	}
	s.pause = min(max(2*s.pause, tracesPatience), tracesPause)
	s.retry = time.Now().Add(s.pause)
	if s.tries++; s.tries < tracesTries && len(batch)+len(s.spans.made) <= tracesMost {
		s.spans.putBack(batch)
		return
	}
	// It may be that this batch is what the collector does not take.
	s.tries = 0
	s.traces.dropped.Add(uint64(len(batch)))
}

// end sends all that is there, as long as close lets it.
func (s *spanSender) end() {
	for len(s.requests) > 0 {
		s.take(<-s.requests)
	}
	for {
		if s.sending != nil {
			s.answered(<-s.answers)
		}
		if len(s.spans.made) == 0 {
			return
		}
		if s.ailing || s.ctx.Err() != nil {
			s.traces.dropped.Add(uint64(len(s.spans.made)))
			return
		}
		s.start(s.spans.take(tracesBatch))
	}
}

var (
	tracesSentDesc    = prometheus.NewDesc("inferrail_trace_spans_sent_total", "Spans that the collector has taken.", nil, nil)
	tracesDroppedDesc = prometheus.NewDesc("inferrail_trace_spans_dropped_total", "Spans that were dropped because the collector has not taken them in time.", nil, nil)
)

// Describe implements prometheus.Collector.
func (t *traces) Describe(ch chan<- *prometheus.Desc) {
	ch <- tracesSentDesc
	ch <- tracesDroppedDesc
}

// Collect implements prometheus.Collector.
func (t *traces) Collect(ch chan<- prometheus.Metric) {
	ch <- prometheus.MustNewConstMetric(tracesSentDesc, prometheus.CounterValue, float64(t.sent.Load()))
	ch <- prometheus.MustNewConstMetric(tracesDroppedDesc, prometheus.CounterValue, float64(t.dropped.Load()))
}
