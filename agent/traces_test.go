package agent

import (
	"compress/gzip"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	coltrace "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	common "go.opentelemetry.io/proto/otlp/common/v1"
	otlp "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/inferrail/inferrail/bpf"
	"github.com/inferrail/inferrail/simulator"
)

// collector takes OTLP over HTTP, as one that users run does. Its methods may be called
// from any goroutine.
type collector struct {
	*httptest.Server
	t *testing.T

	mu       sync.Mutex // guards the rest
	spans    []*otlp.Span
	resource map[string]string
	head     http.Header
	asked    int
	ill      http.HandlerFunc // what it does instead of taking spans; nil for nothing
}

func startCollector(t *testing.T) *collector {
	t.Helper()
	c := &collector{t: t}
	c.Server = httptest.NewServer(http.HandlerFunc(c.take))
	t.Cleanup(c.Close)
	return c
}

func (c *collector) take(w http.ResponseWriter, r *http.Request) {
	if r.Method == "GET" {
		// An agent on this machine looks for engines.
		http.NotFound(w, r)
		return
	}
	c.mu.Lock()
	ill := c.ill
	c.asked++
	c.mu.Unlock()
	if ill != nil {
		ill(w, r)
		return
	}
	from := io.Reader(r.Body)
	if r.Header.Get("Content-Encoding") == "gzip" {
		var err error
		if from, err = gzip.NewReader(r.Body); err != nil {
			c.t.Error(err)
			return
		}
	}
	body, err := io.ReadAll(from)
	req := new(coltrace.ExportTraceServiceRequest)
	if err == nil {
		err = proto.Unmarshal(body, req)
	}
	if err != nil || r.Method != "POST" || r.URL.Path != "/v1/traces" || r.Header.Get("Content-Type") != "application/x-protobuf" {
		c.t.Errorf("%s %s of %s: %v", r.Method, r.URL, r.Header.Get("Content-Type"), err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.head = r.Header
	for _, rs := range req.ResourceSpans {
		c.resource = map[string]string{}
		for _, kv := range rs.Resource.Attributes {
			c.resource[kv.Key] = shownValue(kv.Value)
		}
		for _, ss := range rs.ScopeSpans {
			c.spans = append(c.spans, ss.Spans...)
		}
	}
}

func (c *collector) fallIll(ill http.HandlerFunc) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ill = ill
}

func (c *collector) got() ([]*otlp.Span, int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.spans), c.asked
}

// requests waits for the spans of n requests, and forgets them.
func (c *collector) requests(n int) []*otlp.Span {
	c.t.Helper()
	whole := func() (servers int) {
		list, _ := c.got()
		for _, s := range list {
			if s.Kind == otlp.Span_SPAN_KIND_SERVER {
				servers++
			}
		}
		return servers
	}
	eventually(c.t, func() bool { return whole() >= n }, func() string { return fmt.Sprintf("%d requests were traced, want %d", whole(), n) })
	c.mu.Lock()
	defer c.mu.Unlock()
	list := c.spans
	c.spans = nil
	return list
}

func shownValue(v *common.AnyValue) string {
	switch v := v.Value.(type) {
	case *common.AnyValue_StringValue:
		return v.StringValue
	case *common.AnyValue_BoolValue:
		return fmt.Sprint(v.BoolValue)
	case *common.AnyValue_IntValue:
		return fmt.Sprint(v.IntValue)
	case *common.AnyValue_DoubleValue:
		return fmt.Sprint(v.DoubleValue)
	}
	return fmt.Sprint(v)
}

// attribute is the value of one of a span's, "" for none.
func attributeOf(s *otlp.Span, key string) string {
	for _, kv := range s.Attributes {
		if kv.Key == key {
			return shownValue(kv.Value)
		}
	}
	return ""
}

var (
	// What is another number each time.
	measured = regexp.MustCompile(`(_ms|seconds|\.port|\.cost|\.time_to_first_chunk|request_id|\.prefill|\.wait)$`)
	ports    = regexp.MustCompile(`127\.0\.0\.1:\d+`)
)

// tree shows spans below their parents, in the order of their beginnings.
func tree(t *testing.T, spans []*otlp.Span) string {
	t.Helper()
	slices.SortStableFunc(spans, func(a, b *otlp.Span) int { return int(int64(a.StartTimeUnixNano) - int64(b.StartTimeUnixNano)) })
	ids := map[string]bool{}
	for _, s := range spans {
		if ids[string(s.SpanId)] {
			t.Errorf("the span %x is there twice", s.SpanId)
		}
		ids[string(s.SpanId)] = true
	}
	var b strings.Builder
	var show func(parent string, indent string)
	line := func(indent string, list []*common.KeyValue) {
		terms := "" // of whom they were shown
		for _, kv := range list {
			// Which terms a cost has is the policy's business.
			if of, _, ok := strings.Cut(kv.Key, ".term."); ok {
				if of != terms {
					fmt.Fprintf(&b, "%s%s.term.* = ...\n", indent, of)
				}
				terms = of
				continue
			}
			value := ports.ReplaceAllString(shownValue(kv.Value), "127.0.0.1:PORT")
			if measured.MatchString(kv.Key) {
				value = "..."
			}
			fmt.Fprintf(&b, "%s%s = %s\n", indent, kv.Key, value)
		}
	}
	shown := 0
	one := func(s *otlp.Span, indent string) {
		shown++
		fmt.Fprintf(&b, "%s%s (%s)", indent, s.Name, strings.ToLower(strings.TrimPrefix(s.Kind.String(), "SPAN_KIND_")))
		if s.Status.GetCode() == otlp.Status_STATUS_CODE_ERROR {
			fmt.Fprintf(&b, " error: %s", ports.ReplaceAllString(s.Status.Message, "127.0.0.1:PORT"))
		}
		b.WriteString("\n")
		line(indent+"    ", s.Attributes)
		if s.EndTimeUnixNano < s.StartTimeUnixNano {
			t.Errorf("%s ends before it begins", s.Name)
		}
		for _, e := range s.Events {
			fmt.Fprintf(&b, "%s    event: %s\n", indent, e.Name)
			if e.TimeUnixNano < s.StartTimeUnixNano || e.TimeUnixNano > s.EndTimeUnixNano {
				t.Errorf("%s of %s is not within it", e.Name, s.Name)
			}
			line(indent+"        ", e.Attributes)
		}
		show(string(s.SpanId), indent+"  ")
	}
	show = func(parent, indent string) {
		for _, s := range spans {
			if string(s.ParentSpanId) == parent {
				one(s, indent)
			}
		}
	}
	for _, s := range spans {
		if !ids[string(s.ParentSpanId)] {
			if len(s.ParentSpanId) > 0 {
				fmt.Fprintf(&b, "below %x of trace %x, with %q\n", s.ParentSpanId, s.TraceId, s.TraceState)
			}
			one(s, "")
		}
	}
	if shown != len(spans) {
		t.Errorf("%d of %d spans are shown", shown, len(spans))
	}
	return b.String()
}

// TestTraceStories: what a collector is told of requests of all kinds.
func TestTraceStories(t *testing.T) {
	engine, err := simulator.Start(simulator.Config{ServedModelName: []string{"m"}, ZeroLatency: true, EnablePromptTokensDetails: true})
	if err != nil {
		t.Fatal(err)
	}
	defer engine.Close()
	slow := slowEngine(t)
	c := startCollector(t)
	agents := map[string]*Agent{}
	start := func(name string, cfg Config) *Agent {
		cfg.Observability = ObservabilityConfig{OTLPEndpoint: c.URL, TraceSampleRatio: 1}
		cfg.Models = []ModelConfig{{Name: "m", Aliases: []string{"alias"}, Tokenizer: "builtin:sim", Policy: "cost_model"}}
		a := startAgent(t, cfg)
		t.Cleanup(func() { stopped(t, a) })
		agents[name] = a
		return a
	}
	start("", testConfig(engine))
	eventually(t, func() bool { return promptPage(t, agents[""]).State == "exact" }, func() string { return "m is not followed" })
	start("slow", testConfig(slow))
	dying := startEngine(t, 0, "m")
	mortal := testConfig(dying)
	mortal.Server.UpstreamIdle = time.Minute
	start("dying", mortal)
	strict := testConfig(slow)
	strict.Routing.Admission.Mode, strict.Routing.Admission.Budget = "absolute", time.Millisecond
	start("strict", strict)
	limited := testConfig(engine)
	sum := sha256.Sum256([]byte("key"))
	limited.Server.APIKeys = []KeyConfig{{Name: "team", SHA256: hex.EncodeToString(sum[:]), RequestsPerMinute: 1}}
	start("limited", limited)
	secured := testConfig(engine)
	secured.Server.TLS = tlsFiles(t)
	cert, key := pemPair(t, "a", time.Now().Add(time.Hour))
	write(t, secured.Server.TLS.CertFile, cert)
	write(t, secured.Server.TLS.KeyFile, key)
	start("tls", secured)

	datadriven.RunTest(t, "testdata/traces.txt", func(t *testing.T, d *datadriven.TestData) string {
		var to, field, path, http2, leaves string
		fails := 0
		method, body := "POST", d.Input
		for _, arg := range d.CmdArgs {
			value := strings.Join(arg.Vals, ",")
			switch arg.Key {
			case "to":
				to = value
			case "method":
				method = value
			case "traceparent":
				field = value
			case "path":
				path = value
			case "http2":
				http2 = "yes"
			case "quiet":
			case "leaves":
				leaves = "yes"
			case "fails":
				d.ScanArgs(t, "fails", &fails)
			default:
				d.Fatalf(t, "unknown argument %s", arg.Key)
			}
		}
		a := agents[to]
		if fails > 0 {
			if err := dying.SetFaults(simulator.Faults{CloseBeforeHead: "fin", FailRequests: fails}); err != nil {
				t.Fatal(err)
			}
		}
		transport := &http.Transport{DisableKeepAlives: http2 == "", TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, Protocols: new(http.Protocols)}
		transport.Protocols.SetHTTP1(http2 == "")
		transport.Protocols.SetUnencryptedHTTP2(http2 != "" && to != "tls")
		transport.Protocols.SetHTTP2(http2 != "" && to == "tls")
		defer transport.CloseIdleConnections()
		scheme := "http://"
		if to == "tls" {
			scheme = "https://"
		}
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, method, scheme+a.Addr().String()+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		if to == "limited" {
			req.Header.Set("Authorization", "Bearer key")
		}
		if field != "" {
			req.Header.Set("Traceparent", field)
			req.Header["Tracestate"] = []string{"vendor=1", "other=2"}
		}
		resp, err := transport.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		if leaves == "" {
			io.Copy(io.Discard, resp.Body)
		} else {
			resp.Body.Read(make([]byte, 1))
			cancel()
		}
		resp.Body.Close()
		spans := c.requests(1)
		if d.HasArg("quiet") {
			return ""
		}
		return tree(t, spans)
	})
	c.mu.Lock()
	defer c.mu.Unlock()
	if host, _ := os.Hostname(); c.resource["service.name"] != "inferrail" || c.resource["host.name"] != host || c.resource["service.instance.id"] == "" {
		t.Errorf("the spans are of %v", c.resource)
	}
}

// TestTraceOfTheKernel: the answer that the kernel has carried is traced as any other.
func TestTraceOfTheKernel(t *testing.T) {
	if err := bpf.Probe(); err != nil {
		if os.Getenv("INFERRAIL_NEED_BPF") == "1" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	engine, err := simulator.Start(simulator.Config{ServedModelName: []string{"m"}, TimePerOutputToken: 10 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer engine.Close()
	c := startCollector(t)
	cfg := testConfig(engine)
	cfg.Datapath.Mode, cfg.Datapath.Interfaces = "packet", []string{"lo"}
	cfg.Observability = ObservabilityConfig{OTLPEndpoint: c.URL, TraceSampleRatio: 1}
	a := startAgent(t, cfg)
	defer stopped(t, a)
	var span *otlp.Span
	// The first answer on a connection may come too early for the kernel.
	eventually(t, func() bool {
		resp := ask(t, a, 20)
		io.Copy(io.Discard, resp.Body)
		for _, s := range c.requests(1) {
			if s.Kind == otlp.Span_SPAN_KIND_SERVER {
				span = s
			}
		}
		return attributeOf(span, "inferrail.tier") == "packet"
	}, func() string { return fmt.Sprint("never carried by the kernel: ", span) })
	if attributeOf(span, "inferrail.kernel_bytes") == "" || len(span.Events) != 3 || span.Events[2].Name != "offered to the kernel" {
		t.Errorf("%v", span)
	}
}

// TestTracesFollowTheConfiguration: a reload has traces sent elsewhere, to nobody, and
// from where they are wanted again. Decisions name their trace.
func TestTracesFollowTheConfiguration(t *testing.T) {
	one, other := startCollector(t), startCollector(t)
	cfg := testConfig(startEngine(t, 0, "m"))
	file := t.TempDir() + "/decisions"
	cfg.Decisions = DecisionsConfig{File: file, Sample: 1}
	l := followed(t, cfg, "observability: {otlp_endpoint: \""+one.URL+"\", trace_sample_ratio: 1}\n")
	askWhole(t, l.Agent, "Hello!")
	spans := one.requests(1)
	eventually(t, func() bool { return len(loggedDecisions(t, file)) == 1 }, func() string { return "no decision is written" })
	if d := loggedDecisions(t, file)[0]; d.TraceID != hex.EncodeToString(spans[0].TraceId) {
		t.Errorf("the decision is of trace %q, the spans are of %x", d.TraceID, spans[0].TraceId)
	}
	// Metrics tell of one request whose trace there is.
	if text := openMetrics(t, l.Agent); !regexp.MustCompile(`inferrail_request_duration_seconds_bucket\{.*# \{trace_id="` + hex.EncodeToString(spans[0].TraceId) + `"\}`).MatchString(text) {
		t.Error("no duration names its trace")
	}
	before := func(text string) {
		t.Helper()
		write(t, l.file, []byte(text))
		l.inUse()
		askWhole(t, l.Agent, "Hello!")
	}
	before("observability: {otlp_endpoint: \"" + other.URL + "/\", trace_sample_ratio: 1}\n")
	other.requests(1)
	before("observability: {otlp_endpoint: \"" + other.URL + "\"}\n")
	before("{}\n")
	before("observability: {otlp_endpoint: \"" + one.URL + "/v1/traces\", trace_sample_ratio: 1}\n")
	one.requests(1)
	for _, c := range []*collector{one, other} {
		if list, _ := c.got(); len(list) > 0 {
			t.Errorf("traced though none was to be: %v", list)
		}
	}
	// The collector has them before it has answered.
	eventually(t, func() bool { return l.traces.sent.Load() == 9 }, func() string { return fmt.Sprintf("%d spans are counted, want 9", l.traces.sent.Load()) })
	l.metric("inferrail_trace_spans_sent_total 9")
	l.metric("inferrail_trace_spans_dropped_total 0")
	l.metric("inferrail_traces_dropped_total 0")
}

// TestTracesOfTheEnvironment: where spans go, what they are said to be of, and what they
// are sent with, may all be said as for any program that sends some.
func TestTracesOfTheEnvironment(t *testing.T) {
	c := startCollector(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", c.URL)
	t.Setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc,x-tenant=t")
	t.Setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
	t.Setenv("OTEL_SERVICE_NAME", "front")
	t.Setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,service.instance.id=seven")
	t.Setenv("NODE_NAME", "node-7")
	cfg := testConfig(startEngine(t, 0, "m"))
	cfg.Observability.TraceSampleRatio = 1
	a := startAgent(t, cfg)
	askWhole(t, a, "Hello!")
	stopped(t, a) // what is there is sent
	if list, _ := c.got(); len(list) != 3 {
		t.Fatalf("%d spans were sent, want 3", len(list))
	}
	for key, want := range map[string]string{"service.name": "front", "deployment.environment.name": "test", "service.instance.id": "seven", "k8s.node.name": "node-7"} {
		if c.resource[key] != want {
			t.Errorf("%s is %q, want %q", key, c.resource[key], want)
		}
	}
	if c.head.Get("Authorization") != "Bearer abc" || c.head.Get("X-Tenant") != "t" {
		t.Errorf("sent with %v", c.head)
	}

	f := func(name, value, want string) {
		t.Helper()
		t.Setenv(name, value)
		a, err := Start(t.Context(), cfg, testLog(t))
		if err == nil {
			stopped(t, a)
			t.Errorf("%s=%s is taken", name, value)
		} else if err.Error() != want {
			t.Errorf("%s=%s: %v, want %s", name, value, err, want)
		}
	}
	f("OTEL_EXPORTER_OTLP_ENDPOINT", "localhost:4318", `OTEL_EXPORTER_OTLP_ENDPOINT: "localhost:4318/v1/traces" is not the URL of a collector, such as http://127.0.0.1:4318`)
	t.Setenv("OTEL_SDK_DISABLED", "true")
	a = startAgent(t, cfg)
	defer stopped(t, a)
	if a.traces.sender != nil {
		t.Error("OTEL_SDK_DISABLED is not heeded")
	}
}

// TestIllCollector: whatever a collector does, requests are served, the log says it once,
// and so it does when the collector is well again, which then gets what was not too much.
func TestIllCollector(t *testing.T) {
	hung := make(chan struct{})
	for name, ill := range map[string]http.HandlerFunc{
		"closes": func(w http.ResponseWriter, r *http.Request) {
			if nc, _, err := http.NewResponseController(w).Hijack(); err == nil {
				nc.Close()
			}
		},
		"busy": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Retry-After", "1")
			w.WriteHeader(http.StatusServiceUnavailable)
		},
		"refuses": func(w http.ResponseWriter, r *http.Request) { http.Error(w, "no", http.StatusUnauthorized) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := startCollector(t)
			c.fallIll(ill)
			l := followed(t, testConfig(startEngine(t, 0, "m")), "observability: {otlp_endpoint: \""+c.URL+"\", trace_sample_ratio: 1}\n")
			askWhole(t, l.Agent, "Hello!")
			l.says("traces cannot be sent", c.URL)
			eventually(t, func() bool { _, n := c.got(); return n >= 2 }, func() string { return "it is not tried again" })
			askWhole(t, l.Agent, "Hello!")
			c.fallIll(nil)
			l.says("traces are sent again")
			c.requests(1)
			if n := strings.Count(l.said.String(), "traces cannot be sent"); n != 1 {
				t.Errorf("it is told %d times", n)
			}
		})
	}
	t.Run("hangs", func(t *testing.T) {
		t.Parallel()
		c := startCollector(t)
		t.Cleanup(func() { close(hung) })
		c.fallIll(func(w http.ResponseWriter, r *http.Request) {
			select {
			case <-hung:
			case <-r.Context().Done():
			}
		})
		cfg := testConfig(startEngine(t, 0, "m"))
		cfg.Observability = ObservabilityConfig{OTLPEndpoint: c.URL, TraceSampleRatio: 1}
		a := startAgent(t, cfg)
		for range 20 {
			askWhole(t, a, "Hello!")
		}
		eventually(t, func() bool { _, n := c.got(); return n >= 1 }, func() string { return "nothing is sent" })
		stopped(t, a) // within ten seconds
		if n := a.traces.dropped.Load(); n != 60 {
			t.Errorf("%d spans are counted as dropped, want 60", n)
		}
	})
	t.Run("is not there", func(t *testing.T) {
		t.Parallel()
		closed, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		closed.Close()
		l := followed(t, testConfig(startEngine(t, 0, "m")), "observability: {otlp_endpoint: \"http://"+closed.Addr().String()+"\", trace_sample_ratio: 1}\n")
		askWhole(t, l.Agent, "Hello!")
		l.says("traces cannot be sent", "connection refused")
	})
}

// TestSpansAreBounded: a collector that takes nothing for long is not paid for with
// memory.
func TestSpansAreBounded(t *testing.T) {
	tr := &traces{}
	s := &spanSender{traces: tr, spans: newSpanMaker()}
	r := aTrace()
	for range tracesMost {
		s.take(r)
	}
	n := len(s.spans.made)
	if n < tracesMost || n > tracesMost+3 {
		t.Errorf("%d spans wait", n)
	}
	if dropped := tr.dropped.Load(); dropped != uint64(4*tracesMost-n) {
		t.Errorf("%d are counted as dropped of %d that do not wait", dropped, 4*tracesMost-n)
	}
}

// openMetrics gets the metrics in that form.
func openMetrics(t *testing.T, a *Agent) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), "GET", "http://"+a.AdminAddr().String()+"/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Accept", "application/openmetrics-text")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
