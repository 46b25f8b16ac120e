package agent

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	semconv "go.opentelemetry.io/otel/semconv/v1.41.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/inferrail/inferrail/proxy"
)

// ObservabilityConfig says where traces go.
type ObservabilityConfig struct {
	// OTLPEndpoint is the base URL of a collector that takes OTLP over HTTP, such as
	// http://127.0.0.1:4318. When it and OTEL_EXPORTER_OTLP_ENDPOINT (or
	// OTEL_EXPORTER_OTLP_TRACES_ENDPOINT) are empty, no request is traced.
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
	if o.OTLPEndpoint == "" {
		return
	}
	u, err := url.Parse(o.OTLPEndpoint)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		p.add("observability.otlp_endpoint", "%q is not the URL of a collector, such as http://127.0.0.1:4318", o.OTLPEndpoint)
	}
}

// endpointGiven tells whether there is a collector.
func (o *ObservabilityConfig) endpointGiven() bool {
	return o.OTLPEndpoint != "" || os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT") != "" || os.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") != ""
}

// How spans are sent: so many traced requests wait for it at most, so many go together
// or after so long, and a collector that does not take them is left alone for a while,
// during which they are dropped.
const (
	tracesQueue    = 1024
	tracesBatch    = 128
	tracesEvery    = time.Second
	tracesTimeout  = 5 * time.Second
	tracesPatience = 5 * time.Second
	tracesAtEnd    = 2 * time.Second
)

// traces makes spans of traced requests and sends them, on one goroutine that
// newTraces starts and close ends. Nobody waits for it.
type traces struct {
	log      *slog.Logger
	endpoint string
	requests chan *proxy.Trace
	closing  chan struct{}
	done     chan struct{} // closed when the goroutine has ended
	ctx      context.Context
	cancel   context.CancelFunc

	sent, failed atomic.Uint64 // spans

	// The goroutine's own.
	tracer   trace.Tracer
	exporter sdktrace.SpanExporter
	batch    []sdktrace.ReadOnlySpan
	ailing   bool      // the last try has failed, and that was told
	retry    time.Time // when to try again
}

// newTraces makes none when there is no collector.
func newTraces(cfg ObservabilityConfig, log *slog.Logger) (*traces, error) {
	if !cfg.endpointGiven() {
		return nil, nil
	}
	t := &traces{log: log, requests: make(chan *proxy.Trace, tracesQueue), closing: make(chan struct{}), done: make(chan struct{})}
	t.endpoint = cmp.Or(cfg.OTLPEndpoint, os.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"), os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT"))
	t.ctx, t.cancel = context.WithCancel(context.Background())
	options := []otlptracehttp.Option{otlptracehttp.WithTimeout(tracesTimeout),
		otlptracehttp.WithRetry(otlptracehttp.RetryConfig{Enabled: false})}
	if cfg.OTLPEndpoint != "" {
		options = append(options, otlptracehttp.WithEndpointURL(strings.TrimSuffix(cfg.OTLPEndpoint, "/")+"/v1/traces"))
	}
	var err error
	if t.exporter, err = otlptracehttp.New(t.ctx, options...); err != nil {
		t.cancel()
		return nil, fmt.Errorf("observability.otlp_endpoint %s: %w", t.endpoint, err)
	}
	provider := sdktrace.NewTracerProvider(sdktrace.WithSampler(sdktrace.AlwaysSample()), sdktrace.WithIDGenerator(spanIDs{}),
		sdktrace.WithSpanProcessor((*spanBatch)(t)), sdktrace.WithResource(ownResource()))
	t.tracer = provider.Tracer("github.com/inferrail/inferrail")
	go t.run()
	return t, nil
}

// ownResource is what the agent is, to a collector.
func ownResource() *resource.Resource {
	attributes := []attribute.KeyValue{semconv.ServiceName("inferrail")}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		attributes = append(attributes, semconv.ServiceVersion(info.Main.Version))
	}
	host, err := os.Hostname()
	if err == nil {
		attributes = append(attributes, semconv.HostName(host), semconv.ServiceInstanceID(host+":"+strconv.Itoa(os.Getpid())))
	}
	if node := os.Getenv("NODE_NAME"); node != "" {
		attributes = append(attributes, semconv.K8SNodeName(node))
	}
	if pod := os.Getenv("POD_NAME"); pod != "" {
		attributes = append(attributes, semconv.K8SPodName(pod))
	}
	r := resource.NewWithAttributes(semconv.SchemaURL, attributes...)
	// What the environment says of it counts more.
	if named, err := resource.New(context.Background(), resource.WithFromEnv()); err == nil {
		if merged, err := resource.Merge(r, named); err == nil {
			return merged
		}
	}
	return r
}

// close sends what is there, for a while, and ends the goroutine. A nil one has nothing.
func (t *traces) close() {
	if t == nil {
		return
	}
	timer := time.AfterFunc(tracesAtEnd, t.cancel)
	defer timer.Stop()
	close(t.closing)
	<-t.done
	t.cancel()
	_ = t.exporter.Shutdown(context.Background()) // closes idle connections
}

func (t *traces) run() {
	defer close(t.done)
	tick := time.NewTicker(tracesEvery)
	defer tick.Stop()
	for {
		select {
		case r := <-t.requests:
			t.add(r)
			if len(t.batch) >= tracesBatch {
				t.send()
			}
		case <-tick.C:
			t.send()
		case <-t.closing:
			for {
				select {
				case r := <-t.requests:
					t.add(r)
				default:
					t.send()
					return
				}
			}
		}
	}
}

// send sends the batch, if there is one. What fails is counted and dropped.
func (t *traces) send() {
	n := uint64(len(t.batch))
	if n == 0 {
		return
	}
	defer func() {
		clear(t.batch)
		t.batch = t.batch[:0]
	}()
	if time.Now().Before(t.retry) {
		t.failed.Add(n)
		return
	}
	ctx, cancel := context.WithTimeout(t.ctx, tracesTimeout)
	defer cancel()
	if err := t.exporter.ExportSpans(ctx, t.batch); err != nil {
		t.failed.Add(n)
		t.retry = time.Now().Add(tracesPatience)
		if !t.ailing {
			t.ailing = true
			t.log.Warn("traces cannot be sent, and are dropped until they can", "endpoint", t.endpoint, "why", err)
		}
		return
	}
	t.sent.Add(n)
	if t.ailing {
		t.ailing = false
		t.log.Info("traces are sent again", "endpoint", t.endpoint)
	}
}

// spanIDs gives spans the ids that the proxy has drawn, which their context holds.
type spanIDs struct{}

// spanIDKey is under which it does.
type spanIDKey struct{}

// NewIDs implements sdktrace.IDGenerator.
func (spanIDs) NewIDs(ctx context.Context) (trace.TraceID, trace.SpanID) {
	c := ctx.Value(spanIDKey{}).(trace.SpanContext)
	return c.TraceID(), c.SpanID()
}

// NewSpanID implements sdktrace.IDGenerator.
func (spanIDs) NewSpanID(ctx context.Context, _ trace.TraceID) trace.SpanID {
	return ctx.Value(spanIDKey{}).(trace.SpanContext).SpanID()
}

// spanBatch collects the spans of a traces as they end.
type spanBatch traces

// OnStart implements sdktrace.SpanProcessor.
func (*spanBatch) OnStart(context.Context, sdktrace.ReadWriteSpan) {}

// OnEnd implements sdktrace.SpanProcessor.
func (b *spanBatch) OnEnd(s sdktrace.ReadOnlySpan) { b.batch = append(b.batch, s) }

// Shutdown implements sdktrace.SpanProcessor.
func (*spanBatch) Shutdown(context.Context) error { return nil }

// ForceFlush implements sdktrace.SpanProcessor.
func (*spanBatch) ForceFlush(context.Context) error { return nil }

// start starts a span of a request's trace, whose parent is in ctx; zero times are
// those of the fallback.
func (t *traces) start(ctx context.Context, r *proxy.Trace, id proxy.SpanID, name string, kind trace.SpanKind, at time.Time, attributes []attribute.KeyValue) (context.Context, trace.Span) {
	own := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID(r.ID), SpanID: trace.SpanID(id)})
	ctx = context.WithValue(ctx, spanIDKey{}, own)
	return t.tracer.Start(ctx, name, trace.WithSpanKind(kind), trace.WithTimestamp(at), trace.WithAttributes(attributes...))
}

// add makes the spans of a request.
func (t *traces) add(r *proxy.Trace) {
	ctx := context.Background()
	if r.Parent != (proxy.SpanID{}) {
		state, _ := trace.ParseTraceState(r.State) // one that is malformed is left out
		ctx = trace.ContextWithRemoteSpanContext(ctx, trace.NewSpanContext(trace.SpanContextConfig{
			TraceID: trace.TraceID(r.ID), SpanID: trace.SpanID(r.Parent), TraceFlags: trace.FlagsSampled, TraceState: state, Remote: true}))
	}
	ctx, span := t.start(ctx, r, r.Span, r.Method+" "+r.Path, trace.SpanKindServer, r.Began, requestAttributes(r))
	for i := range r.Attempts {
		t.addAttempt(ctx, r, &r.Attempts[i])
	}
	if !r.First.IsZero() {
		span.AddEvent("first token", trace.WithTimestamp(r.First), trace.WithAttributes(
			attribute.Float64("inferrail.ttft_seconds", r.First.Sub(r.Began).Seconds())))
	}
	if r.Outcome != "ok" {
		span.SetAttributes(semconv.ErrorTypeKey.String(r.Outcome))
		// What the client has done wrong, or left, is no error of a server.
		if r.Blame != "client" {
			span.SetStatus(codes.Error, cmp.Or(r.Cause, r.Outcome))
		}
	} else if r.Status >= 500 {
		span.SetAttributes(semconv.ErrorTypeKey.String(strconv.Itoa(r.Status)))
		span.SetStatus(codes.Error, "")
	}
	span.End(trace.WithTimestamp(r.Ended))
}

// operations are gen_ai.operation.name by path.
var operations = map[string]string{
	"/v1/chat/completions": "chat", "/v1/messages": "chat", "/v1/responses": "chat", "/api/chat": "chat",
	"/v1/completions": "text_completion", "/generate": "text_completion", "/api/generate": "text_completion",
	"/v1/embeddings": "embeddings", "/api/embed": "embeddings", "/api/embeddings": "embeddings",
}

func requestAttributes(r *proxy.Trace) []attribute.KeyValue {
	list := []attribute.KeyValue{
		semconv.HTTPRequestMethodKey.String(r.Method), semconv.URLPath(r.Path), semconv.HTTPRoute(r.Path), semconv.URLScheme("http"),
		attribute.String("inferrail.request_id", r.RequestID), attribute.String("inferrail.outcome", r.Outcome),
		attribute.Int("inferrail.attempts", len(r.Attempts)), semconv.GenAIRequestStream(r.Stream),
	}
	text := func(key attribute.Key, value string) {
		if value != "" {
			list = append(list, key.String(value))
		}
	}
	number := func(key attribute.Key, value int64, known bool) {
		if known {
			list = append(list, key.Int64(value))
		}
	}
	if host, port, err := net.SplitHostPort(r.Client); err == nil {
		text(semconv.ClientAddressKey, host)
		if n, err := strconv.Atoi(port); err == nil {
			number(semconv.ClientPortKey, int64(n), true)
		}
	}
	number(semconv.HTTPResponseStatusCodeKey, int64(r.Status), r.Status != 0)
	number("http.request.body.size", r.RequestBytes, r.RequestBytes > 0)
	if op := operations[r.Path]; op != "" {
		text(semconv.GenAIOperationNameKey, op)
		text(semconv.GenAIProviderNameKey, "inferrail")
	}
	text(semconv.GenAIRequestModelKey, cmp.Or(r.Asked, r.Model))
	text(semconv.GenAIResponseModelKey, r.Model)
	number(semconv.GenAIRequestMaxTokensKey, int64(r.MaxTokens), r.MaxTokens > 0)
	number(semconv.GenAIUsageInputTokensKey, r.InputTokens, r.InputTokens >= 0)
	number(semconv.GenAIUsageOutputTokensKey, r.OutputTokens, r.OutputTokens >= 0)
	number(semconv.GenAIUsageCacheReadInputTokensKey, r.CachedTokens, r.CachedTokens >= 0)
	text("inferrail.api_key", r.Key)
	text("inferrail.class", r.Class)
	text("inferrail.tier", r.Tier)
	text("inferrail.tier_reason", r.TierWhy)
	number("inferrail.kernel_bytes", int64(r.KernelBytes), r.KernelBytes > 0)
	if len(r.Attempts) > 0 {
		number("inferrail.prompt.tokens", int64(r.PromptTokens), true)
		list = append(list, attribute.Bool("inferrail.prompt.exact", r.Exact), attribute.Float64("inferrail.prompt.seconds", r.PromptTook.Seconds()))
		text("inferrail.prompt.why", r.Why)
	}
	return list
}

// addAttempt makes the two spans of an attempt.
func (t *traces) addAttempt(ctx context.Context, r *proxy.Trace, a *proxy.TraceAttempt) {
	_, route := t.start(ctx, r, a.Route, "route", trace.SpanKindInternal, a.Choosing, routeAttributes(a))
	if a.Held > 0 {
		route.AddEvent("sent on after being held back", trace.WithTimestamp(a.Chosen), trace.WithAttributes(
			attribute.Float64("inferrail.held_seconds", a.Held.Seconds())))
	}
	if a.Replica == "" {
		route.SetStatus(codes.Error, a.Outcome)
	}
	route.End(trace.WithTimestamp(a.Chosen))
	if a.Replica == "" {
		return
	}
	list := []attribute.KeyValue{semconv.HTTPRequestMethodKey.String(r.Method), semconv.URLFull("http://" + a.Addr + r.Path),
		attribute.String("inferrail.replica", a.Replica)}
	if host, port, err := net.SplitHostPort(a.Addr); err == nil {
		list = append(list, semconv.ServerAddress(host))
		if n, err := strconv.Atoi(port); err == nil {
			list = append(list, semconv.ServerPort(n))
		}
	}
	if a.Status != 0 {
		list = append(list, semconv.HTTPResponseStatusCode(a.Status))
	}
	sent := a.Sent
	if sent.IsZero() {
		sent = a.Chosen // no connection was had
	}
	_, client := t.start(ctx, r, a.Client, r.Method, trace.SpanKindClient, sent, list)
	if !a.FirstByte.IsZero() {
		client.AddEvent("first byte", trace.WithTimestamp(a.FirstByte))
	}
	if a.Outcome != "ok" {
		client.SetAttributes(semconv.ErrorTypeKey.String(a.Outcome))
		client.SetStatus(codes.Error, cmp.Or(a.Cause, a.Outcome))
	}
	client.End(trace.WithTimestamp(a.Ended))
}

// routeAttributes tells why a request went where it went: the costs of the replica that
// was chosen and of the one that comes next, term by term.
func routeAttributes(a *proxy.TraceAttempt) []attribute.KeyValue {
	d := a.Decision
	if d == nil {
		return []attribute.KeyValue{attribute.String("inferrail.outcome", a.Outcome)}
	}
	d.WorkOut()
	list := []attribute.KeyValue{attribute.String("inferrail.policy", d.Policy), attribute.String("inferrail.reason", d.Reason),
		attribute.String("inferrail.winner", d.Winner), attribute.Int("inferrail.prompt.tokens", d.PromptTokens),
		attribute.Float64("inferrail.predicted_ms", float64(d.PredictedMS))}
	if a.Cached >= 0 {
		list = append(list, attribute.Int("inferrail.predicted_cached_tokens", a.Cached))
	}
	if d.Admission != "" {
		list = append(list, attribute.String("inferrail.admission", d.Admission))
	}
	candidates, excluded := 0, 0
	var winner, next *proxy.Considered
	for i := range d.Replicas {
		c := &d.Replicas[i]
		switch {
		case c.Excluded != "":
			excluded++
			continue
		case c.Replica == d.Winner:
			winner = c
		case next == nil || c.Cost < next.Cost:
			next = c
		}
		candidates++
	}
	list = append(list, attribute.Int("inferrail.candidates", candidates), attribute.Int("inferrail.excluded", excluded))
	terms := func(of string, c *proxy.Considered) {
		if c == nil {
			return
		}
		list = append(list, attribute.Float64("inferrail."+of+".cost", float64(c.Cost)), attribute.Int("inferrail."+of+".cached_tokens", c.CachedTokens),
			attribute.Float64("inferrail."+of+".wait_ms", float64(c.WaitMS)), attribute.Float64("inferrail."+of+".prefill_ms", float64(c.PrefillMS)))
		for _, term := range c.Terms {
			list = append(list, attribute.Float64("inferrail."+of+".term."+strings.ReplaceAll(term.Name, " ", "_"), float64(term.Value)))
		}
	}
	terms("chosen", winner)
	if next != nil {
		list = append(list, attribute.String("inferrail.next", next.Replica))
	}
	terms("next", next)
	for _, s := range d.Shadows {
		list = append(list, attribute.String("inferrail.shadow."+s.Policy, s.Winner))
	}
	return slices.Clip(list)
}

var (
	tracesSentDesc   = prometheus.NewDesc("inferrail_trace_spans_sent_total", "Spans that the collector has taken.", nil, nil)
	tracesFailedDesc = prometheus.NewDesc("inferrail_trace_spans_failed_total", "Spans that the collector has not taken.", nil, nil)
)

// Describe implements prometheus.Collector.
func (t *traces) Describe(ch chan<- *prometheus.Desc) {
	ch <- tracesSentDesc
	ch <- tracesFailedDesc
}

// Collect implements prometheus.Collector.
func (t *traces) Collect(ch chan<- prometheus.Metric) {
	ch <- prometheus.MustNewConstMetric(tracesSentDesc, prometheus.CounterValue, float64(t.sent.Load()))
	ch <- prometheus.MustNewConstMetric(tracesFailedDesc, prometheus.CounterValue, float64(t.failed.Load()))
}
