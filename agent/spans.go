package agent

import (
	"cmp"
	"context"
	"math"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	semconv "go.opentelemetry.io/otel/semconv/v1.41.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/inferrail/inferrail/proxy"
)

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

// spanMaker makes spans of traced requests. It is used on one goroutine.
type spanMaker struct {
	tracer trace.Tracer
	made   []sdktrace.ReadOnlySpan // in the order of their ends
}

func newSpanMaker() *spanMaker {
	m := &spanMaker{}
	provider := sdktrace.NewTracerProvider(sdktrace.WithSampler(sdktrace.AlwaysSample()), sdktrace.WithIDGenerator(spanIDs{}),
		sdktrace.WithSpanProcessor((*spanCollector)(m)), sdktrace.WithResource(ownResource()))
	m.tracer = provider.Tracer("github.com/inferrail/inferrail", trace.WithSchemaURL(semconv.SchemaURL))
	return m
}

// take takes the oldest spans, n at most.
func (m *spanMaker) take(n int) []sdktrace.ReadOnlySpan {
	n = min(n, len(m.made))
	batch := slices.Clone(m.made[:n])
	m.made = slices.Delete(m.made, 0, n)
	return batch
}

// putBack puts spans before the others, that were taken.
func (m *spanMaker) putBack(batch []sdktrace.ReadOnlySpan) {
	m.made = slices.Insert(m.made, 0, batch...)
}

// spanCollector is the spanMaker as its provider sees it.
type spanCollector spanMaker

// OnStart implements sdktrace.SpanProcessor.
func (*spanCollector) OnStart(context.Context, sdktrace.ReadWriteSpan) {}

// OnEnd implements sdktrace.SpanProcessor.
func (c *spanCollector) OnEnd(s sdktrace.ReadOnlySpan) { c.made = append(c.made, s) }

// Shutdown implements sdktrace.SpanProcessor.
func (*spanCollector) Shutdown(context.Context) error { return nil }

// ForceFlush implements sdktrace.SpanProcessor.
func (*spanCollector) ForceFlush(context.Context) error { return nil }

// start starts a span of a request's trace, whose parent is in ctx.
func (m *spanMaker) start(ctx context.Context, r *proxy.Trace, id proxy.SpanID, name string, kind trace.SpanKind, at time.Time, list attributes) (context.Context, trace.Span) {
	own := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID(r.ID), SpanID: trace.SpanID(id)})
	ctx = context.WithValue(ctx, spanIDKey{}, own)
	return m.tracer.Start(ctx, name, trace.WithSpanKind(kind), trace.WithTimestamp(at), trace.WithAttributes(list...))
}

// attributes are those of a span. What the request or an engine has named is made valid
// UTF-8: a collector would take none of the spans that come with another text.
type attributes []attribute.KeyValue

// maxText is how much is told of a text.
const maxText = 512

func plainText(text string) string {
	return strings.ToValidUTF8(text[:min(len(text), maxText)], "\uFFFD")
}

// text adds one that is not empty.
func (a *attributes) text(key attribute.Key, value string) {
	if value != "" {
		*a = append(*a, key.String(plainText(value)))
	}
}

// number adds one that is known, which those below 0 are not.
func (a *attributes) number(key attribute.Key, value int64) {
	if value >= 0 {
		*a = append(*a, key.Int64(value))
	}
}

// positive adds one above 0.
func (a *attributes) positive(key attribute.Key, value int64) {
	if value > 0 {
		a.number(key, value)
	}
}

// real adds one that is finite.
func (a *attributes) real(key attribute.Key, value float64) {
	if !math.IsInf(value, 0) && !math.IsNaN(value) {
		*a = append(*a, key.Float64(value))
	}
}

func (a *attributes) truth(key attribute.Key, value bool) { *a = append(*a, key.Bool(value)) }

// address adds the two parts of a host:port.
func (a *attributes) address(host, port attribute.Key, text string) {
	h, p, err := net.SplitHostPort(text)
	if err != nil {
		return
	}
	a.text(host, h)
	if n, err := strconv.ParseUint(p, 10, 16); err == nil {
		a.positive(port, int64(n))
	}
}

// method adds the request's, and returns how it is called in names of spans: names that
// a client can make up would be without bound.
func (a *attributes) method(r *proxy.Trace) string {
	switch r.Method {
	case "GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT":
		a.text(semconv.HTTPRequestMethodKey, r.Method)
		return r.Method
	}
	a.text(semconv.HTTPRequestMethodKey, "_OTHER")
	a.text(semconv.HTTPRequestMethodOriginalKey, r.Method)
	return "HTTP"
}

// spansOf is how many spans a request has.
func spansOf(r *proxy.Trace) uint64 {
	n := 1 + len(r.Attempts)
	for i := range r.Attempts {
		if r.Attempts[i].Replica != "" {
			n++
		}
	}
	return uint64(n)
}

// add makes the spans of a request.
func (m *spanMaker) add(r *proxy.Trace) {
	ctx := context.Background()
	if r.Parent != (proxy.SpanID{}) {
		state, _ := trace.ParseTraceState(r.State) // one that is malformed is left out
		ctx = trace.ContextWithRemoteSpanContext(ctx, trace.NewSpanContext(trace.SpanContextConfig{
			TraceID: trace.TraceID(r.ID), SpanID: trace.SpanID(r.Parent), TraceFlags: trace.TraceFlags(r.Flags), TraceState: state, Remote: true}))
	}
	var list attributes
	name := list.method(r)
	if r.Route != "" {
		name += " " + r.Route
	}
	list.request(r)
	ctx, span := m.start(ctx, r, r.Span, name, trace.SpanKindServer, r.Began, list)
	for i := range r.Attempts {
		m.addAttempt(ctx, r, i)
	}
	event := func(name string, at time.Time, list attributes) {
		if !at.IsZero() {
			span.AddEvent(name, trace.WithTimestamp(at), trace.WithAttributes(list...))
		}
	}
	event("request read", r.Read, nil)
	event("first token", r.First, attributes{attribute.Float64("inferrail.ttft_seconds", r.First.Sub(r.Began).Seconds())})
	event("offered to the kernel", r.Offered, nil)
	switch {
	case r.Outcome == "client_left":
		event("client gone", r.Ended, nil)
		span.SetAttributes(semconv.ErrorTypeKey.String(r.Outcome))
	case r.Outcome != "ok":
		span.SetAttributes(semconv.ErrorTypeKey.String(r.Outcome))
		// What the client has done wrong is no error of a server.
		if r.Blame != "client" {
			span.SetStatus(codes.Error, plainText(cmp.Or(r.Cause, r.Outcome)))
		}
	case r.Status >= 500:
		span.SetAttributes(semconv.ErrorTypeKey.String(strconv.Itoa(r.Status)))
		span.SetStatus(codes.Error, "")
	}
	span.End(trace.WithTimestamp(r.Ended))
}

// operations are gen_ai.operation.name by path.
var operations = map[string]string{
	"/v1/chat/completions": "chat", "/v1/chat/completions/batch": "chat", "/v1/messages": "chat", "/v1/responses": "chat",
	"/v1/completions": "text_completion", "/generate": "text_completion", "/generate_stream": "text_completion",
	"/inference/v1/generate": "text_completion",
	"/v1/embeddings":         "embeddings", "/v2/embed": "embeddings",
}

// request adds what is told of a request as a whole.
func (a *attributes) request(r *proxy.Trace) {
	a.text(semconv.URLPathKey, r.Path)
	a.text(semconv.HTTPRouteKey, r.Route)
	scheme := "http"
	if r.TLS {
		scheme = "https"
	}
	a.text(semconv.URLSchemeKey, scheme)
	a.text(semconv.NetworkProtocolVersionKey, r.Version)
	a.address(semconv.ClientAddressKey, semconv.ClientPortKey, r.Client)
	a.positive(semconv.HTTPResponseStatusCodeKey, int64(r.Status))
	a.positive(semconv.HTTPRequestBodySizeKey, r.RequestBytes)
	if op := operations[r.Route]; op != "" {
		a.text(semconv.GenAIOperationNameKey, op)
		a.text(semconv.GenAIProviderNameKey, "inferrail")
		if r.Stream {
			a.truth(semconv.GenAIRequestStreamKey, true)
		}
	}
	a.text(semconv.GenAIRequestModelKey, cmp.Or(r.Asked, r.Model))
	if r.Tier != "" && r.Status == 200 {
		a.text(semconv.GenAIResponseModelKey, r.Model)
	}
	a.positive(semconv.GenAIRequestMaxTokensKey, int64(r.MaxTokens))
	a.number(semconv.GenAIUsageInputTokensKey, r.InputTokens)
	a.number(semconv.GenAIUsageOutputTokensKey, r.OutputTokens)
	a.number(semconv.GenAIUsageCacheReadInputTokensKey, r.CachedTokens)
	if !r.First.IsZero() {
		a.real(semconv.GenAIResponseTimeToFirstChunkKey, r.First.Sub(r.Began).Seconds())
	}
	a.text("inferrail.request_id", r.RequestID)
	a.text("inferrail.outcome", r.Outcome)
	a.text("inferrail.api_key", r.Key)
	a.text("inferrail.class", r.Class)
	a.text("inferrail.tier", r.Tier)
	a.text("inferrail.tier_reason", r.TierWhy)
	a.positive("inferrail.kernel_bytes", int64(min(r.KernelBytes, math.MaxInt64)))
	if len(r.Attempts) == 0 {
		return
	}
	a.number("inferrail.attempts", int64(len(r.Attempts)))
	a.number("inferrail.prompt.tokens", int64(r.PromptTokens))
	a.truth("inferrail.prompt.exact", r.Exact)
	a.text("inferrail.prompt.why", r.Why)
	a.real("inferrail.prompt.seconds", r.PromptTook.Seconds())
}

// addAttempt makes the two spans of a request's i-th attempt.
func (m *spanMaker) addAttempt(ctx context.Context, r *proxy.Trace, i int) {
	a := &r.Attempts[i]
	_, route := m.start(ctx, r, a.Route, "route", trace.SpanKindInternal, a.Choosing, routeAttributes(a))
	if a.Held > 0 {
		route.AddEvent("sent on after being held back", trace.WithTimestamp(a.Chosen), trace.WithAttributes(
			attribute.Float64("inferrail.held_seconds", a.Held.Seconds())))
	}
	if a.Replica == "" {
		route.SetAttributes(semconv.ErrorTypeKey.String(a.Outcome))
		if a.Outcome != "client_left" {
			route.SetStatus(codes.Error, a.Outcome)
		}
	}
	route.End(trace.WithTimestamp(a.Chosen))
	if a.Replica == "" {
		return
	}
	var list attributes
	name := list.method(r)
	list.text(semconv.URLFullKey, "http://"+a.Addr+r.Path)
	list.text("inferrail.replica", a.Replica)
	list.address(semconv.ServerAddressKey, semconv.ServerPortKey, a.Addr)
	list.positive(semconv.HTTPRequestResendCountKey, int64(i))
	list.positive(semconv.HTTPResponseStatusCodeKey, int64(a.Status))
	sent := a.Sent
	if sent.IsZero() {
		sent = a.Chosen // no connection was had
	}
	_, client := m.start(ctx, r, a.Client, name, trace.SpanKindClient, sent, list)
	if !a.Resent.IsZero() {
		client.AddEvent("sent again: the connection was closed", trace.WithTimestamp(a.Resent))
	}
	if !a.FirstByte.IsZero() {
		client.AddEvent("first byte", trace.WithTimestamp(a.FirstByte))
	}
	switch {
	case a.Outcome != "ok":
		client.SetAttributes(semconv.ErrorTypeKey.String(a.Outcome))
		if a.Outcome != "client_left" {
			client.SetStatus(codes.Error, plainText(cmp.Or(a.Cause, a.Outcome)))
		}
	case a.Status >= 400:
		client.SetAttributes(semconv.ErrorTypeKey.String(strconv.Itoa(a.Status)))
		client.SetStatus(codes.Error, "")
	}
	client.End(trace.WithTimestamp(a.Ended))
}

// routeAttributes tells why a request went where it went: the costs of the replica that
// was chosen and of the one that comes next, term by term.
func routeAttributes(a *proxy.TraceAttempt) (list attributes) {
	list.text("inferrail.outcome", a.Outcome)
	d := a.Decision
	if d == nil {
		return list
	}
	d.WorkOut()
	list.text("inferrail.policy", d.Policy)
	list.text("inferrail.reason", d.Reason)
	list.text("inferrail.admission", d.Admission)
	list.number("inferrail.prompt.tokens", int64(d.PromptTokens))
	list.real("inferrail.predicted_ms", float64(d.PredictedMS))
	list.number("inferrail.predicted_cached_tokens", int64(a.Cached))
	list.positive("inferrail.pieces", int64(d.Pieces))
	candidates, excluded := 0, 0
	var winner, next *proxy.Considered
	for i := range d.Replicas {
		c := &d.Replicas[i]
		switch {
		case c.Replica == a.Replica:
			winner = c
		case c.Excluded != "":
			excluded++
			continue
		case next == nil || c.Cost < next.Cost:
			next = c
		}
		candidates++
	}
	list.number("inferrail.candidates", int64(candidates))
	list.number("inferrail.excluded", int64(excluded))
	list.considered("winner", winner)
	list.considered("next", next)
	for _, s := range d.Shadows {
		list.text(attribute.Key("inferrail.shadow."+plainText(s.Policy)), s.Winner)
	}
	return list
}

// considered adds what a replica would have cost, term by term.
func (a *attributes) considered(as string, c *proxy.Considered) {
	if c == nil {
		return
	}
	prefix := "inferrail." + as
	a.text(attribute.Key(prefix), c.Replica)
	key := func(name string) attribute.Key { return attribute.Key(prefix + "." + name) }
	a.number(key("cached_tokens"), int64(c.CachedTokens))
	a.real(key("wait_ms"), float64(c.WaitMS))
	a.real(key("prefill_ms"), float64(c.PrefillMS))
	a.real(key("cost"), float64(c.Cost))
	for _, term := range c.Terms {
		a.real(key("term."+strings.ReplaceAll(term.Name, " ", "_")), float64(term.Value))
	}
}

// ownResource is what the agent is, to a collector.
func ownResource() *resource.Resource {
	attributes := []attribute.KeyValue{semconv.ServiceName("inferrail"), semconv.ServiceVersion(thisBuild.version)}
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
	if named, err := resource.New(context.Background(), resource.WithTelemetrySDK(), resource.WithFromEnv()); err == nil {
		if merged, err := resource.Merge(r, resource.NewSchemaless(named.Attributes()...)); err == nil {
			return merged
		}
	}
	return r
}
