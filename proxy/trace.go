package proxy

import (
	"encoding/hex"
	"math/rand/v2"
	"strings"
	"time"
)

// Trace is one request as spans are made of it: that of the request itself, and two for
// each attempt, of choosing a replica and of asking it. It is made for a sampled request
// only, belongs to its exchange until the request is over, and then to who receives it.
// Nothing of it is what a prompt or an answer says.
type Trace struct {
	// ID is the trace's, Span the one of the request, and Parent that of the client, zero
	// where the trace begins here. State is the client's tracestate, and Flags are those
	// of the traceparent that goes on.
	ID           TraceID
	Span, Parent SpanID
	State        string
	Flags        byte
	// Began is when the request's first byte was there, Read when all of it was, First
	// when its first token was, Offered when its answer was offered to the kernel, and
	// Ended when it was over. What was not seen is zero.
	Began, Read, First, Offered, Ended time.Time

	// Route is the Path without what is a name in it, "" for a path that is not served.
	Method, Path, Route, RequestID string
	// Client is host and port of who asks, Version that of HTTP, such as 1.1. TLS, Stream
	// and Exact say what they are named after.
	Client, Version    string
	TLS, Stream, Exact bool
	// Asked is the name of the model that the request has, Model that of the one it is
	// for, "" where the request did not come so far; Key is the name of the API key.
	Asked, Model, Key string
	Class             string
	// MaxTokens bounds the answer, 0 where nothing does. PromptTokens is how long the
	// prompt is, PromptTook how long it took to find out, and Why why it is not Exact.
	MaxTokens, PromptTokens int
	PromptTook              time.Duration
	Why                     string
	RequestBytes            int64

	// Status is what the client was answered with, 0 for nothing; Outcome as in the
	// metric inferrail_requests_total, Blame whose fault it is, and Cause what is known
	// of it beyond that.
	Status         int
	Outcome, Blame string
	Cause          string
	// Tier carried the answer, and TierWhy says why not a better one; "" where none did.
	// KernelBytes are those that userspace has not seen.
	Tier, TierWhy string
	KernelBytes   uint64
	// What the engine has counted, below 0 where it has told nothing.
	InputTokens, OutputTokens, CachedTokens int64

	Attempts []TraceAttempt
}

// TraceAttempt is one attempt in a Trace.
type TraceAttempt struct {
	// Route and Client are the spans of choosing and of asking.
	Route, Client SpanID
	// Choosing is when a replica was looked for first, Chosen when there was one or the
	// request was refused, Held for how long of that it was held back, Sent when the
	// engine was given the request, Resent when it was once more because it had closed the
	// connection, FirstByte when its answer began and Ended when the attempt was over.
	// Each is zero where it did not come so far.
	Choosing, Chosen, Sent, Resent, FirstByte, Ended time.Time
	Held                                             time.Duration
	// Replica is the one that was chosen, "" for none, and Addr its host:port.
	Replica, Addr string
	// Decision is what it was chosen from, which WorkOut completes; nil where it did not
	// come so far.
	Decision *Decision
	// Cached is how many tokens were expected there, below 0 where that is not known.
	Cached int
	// Status is the engine's, and Outcome how the attempt ended, as in the metric
	// inferrail_retries_total; "ok" for the one whose answer was passed on.
	Status         int
	Outcome, Cause string
}

// TraceID and SpanID are W3C's. The zero value is none.
type (
	TraceID [16]byte
	SpanID  [8]byte
)

// TracesWanted says which requests are traced. It is a value.
type TracesWanted struct {
	// Ratio is the part of requests without a traceparent that is: 1 is all. What others
	// have begun goes by what they have drawn.
	Ratio float64
}

// traces is where traced requests go to. Immutable.
type traces struct {
	TracesWanted
	to chan<- *Trace
}

// SetTraces sends, from now on, the requests that are wanted to a channel when they are
// over; nil ends it. What the channel has no room for is dropped and counted: no request
// waits. The receiver may keep what it gets.
func (s *Server) SetTraces(to chan<- *Trace, wanted TracesWanted) {
	if to == nil {
		s.traces.Store(nil)
		return
	}
	s.traces.Store(&traces{wanted, to})
}

// beginTrace decides whether the request is traced, by its head alone. Health checks
// are not.
func (x *exchange) beginTrace() {
	t := x.c.s.traces.Load()
	if t == nil || x.route == routeHealth {
		return
	}
	c := parseTraceparent(x.head.traceparent)
	if c.ok && !c.sampled() || !c.ok && !(rand.Float64() < t.Ratio) {
		return
	}
	x.trace = &Trace{ID: c.id, Parent: c.parent, Span: newSpanID(), Flags: c.flags&knownFlags | flagSampled, Began: x.began,
		RequestID: string(x.id), Method: string(x.method), Path: string(x.path[:min(len(x.path), maxTracedPath)]),
		InputTokens: -1, OutputTokens: -1, CachedTokens: -1}
	if !c.ok {
		x.trace.ID = newTraceID()
	}
	x.traceClient()
	switch x.route {
	case routeUnknown:
	case routeModel:
		x.trace.Route = modelPrefix + "{model}"
	default:
		x.trace.Route = x.trace.Path
	}
}

// traceClient tells the trace who asks, and how.
func (x *exchange) traceClient() {
	t, c := x.trace, x.c
	t.Version = "1.1"
	if x.http10 {
		t.Version = "1.0"
	}
	t.TLS = c.why == "tls"
	if addr := c.from(); addr != nil {
		t.Client = addr.String()
	}
	for f := (fields{rest: x.head.raw}); f.next(); {
		switch fieldOf(f.name) {
		case fieldTracestate:
			if t.Parent == (SpanID{}) {
				continue
			}
			// Several are one list (RFC 9110 section 5.3).
			if t.State != "" && len(f.value) > 0 {
				t.State += ","
			}
			t.State += string(f.value)
		case fieldOwn:
			// Only serveHTTP2 opens such connections, and it lets none of a client's pass.
			if c.pooled && strings.EqualFold(string(f.name), streamField) {
				kind, client, _ := strings.Cut(string(f.value), " ")
				t.Version, t.TLS, t.Client = "2", kind == streamTLS, client
			}
		}
	}
}

// How the loop is told, of a stream of HTTP/2, who asks: whether by TLS or in the clear,
// and the client's address.
const (
	streamField = "X-Inferrail-Stream"
	streamTLS   = "h2"
	streamClear = "h2c"
)

// maxTracedPath is how much is told of a request's path.
const maxTracedPath = 512

// traceID is the id of the trace that the request belongs to, "" for none. It may be one
// that is not sampled.
func (x *exchange) traceID() string {
	if x.trace != nil {
		return hex.EncodeToString(x.trace.ID[:])
	}
	if c := parseTraceparent(x.head.traceparent); c.ok {
		return hex.EncodeToString(c.id[:])
	}
	return ""
}

// traceAttempt adds an attempt to the trace, if there is one: a replica is looked for.
func (x *exchange) traceAttempt() {
	if x.trace != nil {
		x.traceBody()
		x.trace.Attempts = append(x.trace.Attempts, TraceAttempt{Route: newSpanID(), Choosing: time.Now(), Cached: -1})
	}
}

// traceBody tells the trace of the request's body, as long as it is there.
func (x *exchange) traceBody() {
	t := x.trace
	if t == nil || len(x.body) == 0 || t.RequestBytes > 0 {
		return
	}
	t.RequestBytes = int64(len(x.body))
	if x.call.model == memberString {
		name := x.call.name(x.body)
		t.Asked = strings.ToValidUTF8(string(name[:min(len(name), maxTracedName)]), "")
	}
}

// maxTracedName is how much is told of the name that a request has for its model.
const maxTracedName = 256

// tracing returns the last attempt of the trace, nil when there is none.
func (x *exchange) tracing() *TraceAttempt {
	if x.trace == nil || len(x.trace.Attempts) == 0 {
		return nil
	}
	return &x.trace.Attempts[len(x.trace.Attempts)-1]
}

// traceDecision tells the trace what the replica was chosen from.
func (x *exchange) traceDecision() {
	a := x.tracing()
	if a == nil {
		return
	}
	a.Decision = new(Decision)
	x.tell(a.Decision)
	x.tellShadows(a.Decision)
	a.Chosen, a.Held = time.Now(), x.holding.took
	a.Client, a.Replica, a.Addr = newSpanID(), x.replica.ID, x.replica.Addr
}

// traceSent tells the trace that the engine is given the request.
func (x *exchange) traceSent() {
	switch a := x.tracing(); {
	case a == nil:
	case a.Sent.IsZero():
		a.Sent = time.Now()
	default:
		a.Resent = time.Now()
	}
}

// traceAnswer tells the trace how an attempt went, whose answer has begun if f is none.
func (x *exchange) traceAnswer(f failure) {
	a := x.tracing()
	if a == nil {
		return
	}
	now := time.Now()
	if a.Chosen.IsZero() {
		a.Chosen = now // it was refused
		if x.decision != nil && (x.asked.Rand != 0 || x.asked.Turn != 0) {
			a.Decision = new(Decision)
			x.tell(a.Decision)
			a.Decision.Reason = f.label()
		}
	} else {
		a.Cached = x.predicted
		if x.ttfb > 0 {
			a.FirstByte = x.sent.Add(x.ttfb)
		}
		if f == none {
			a.Status = x.response.status
		}
	}
	a.Ended, a.Outcome = now, none.label()
	if f != none || x.unavailable {
		a.Outcome = x.outcome(f)
	}
	if x.cause != nil {
		a.Cause = x.cause.Error()
	}
}

// endTrace hands the trace over when the request is over, and all else is done that wants
// to know of it: after giveBack, and after traceBody.
func (x *exchange) endTrace(f failure, u usage, known bool, now time.Time) {
	t := x.trace
	if t == nil {
		return
	}
	x.trace = nil
	t.Ended, t.Status, t.Outcome, t.Blame = now, x.status, f.label(), failureTable[f].blame.String()
	if x.cause != nil && f != none {
		t.Cause = x.cause.Error()
	}
	if x.sent.After(x.began) {
		t.Read = x.sent
	}
	t.Stream, t.Exact = x.call.stream, x.followed && x.promptReason.String() == "exact"
	if x.followed && !t.Exact {
		t.Why = x.promptReason.String()
	}
	if x.key != nil {
		t.Key = x.key.Name
	}
	if x.class != nil {
		t.Class = x.class.Name
	}
	if x.model != nil {
		t.Model = x.model.Name
	}
	t.PromptTokens, t.PromptTook, t.MaxTokens = x.asked.Tokens, x.promptTook, x.asked.Output
	if known {
		t.InputTokens, t.OutputTokens = int64(min(u.prompt, 1<<53)), int64(min(u.completion, 1<<53))
		if u.partial {
			t.InputTokens = -1
		}
		if u.cachedTold {
			t.CachedTokens = int64(min(u.cached, 1<<53))
		}
	}
	if x.observed >= 0 && !x.prefill.Sent.IsZero() {
		from := x.prefill.Sent
		if v := x.piecing; v.foretold() {
			from = v.began
		}
		t.First = from.Add(time.Duration(x.observed * float64(time.Second)))
	}
	if x.passed {
		if t.Tier, t.TierWhy = "copy", x.why; x.packet {
			t.Tier = "packet"
		}
		t.KernelBytes = x.kernel.Bytes
		if n := len(t.Attempts); n > 0 {
			t.Attempts[n-1].Ended = now
			if f != none {
				t.Attempts[n-1].Outcome = f.label()
			}
		}
	}
	to := x.c.s.traces.Load()
	if to == nil {
		return
	}
	select {
	case to.to <- t:
	default:
		x.c.s.stats.tracesDropped.Inc()
	}
}

func newTraceID() (id TraceID) {
	for id == (TraceID{}) {
		for i, u := 0, [2]uint64{rand.Uint64(), rand.Uint64()}; i < len(id); i++ {
			id[i] = byte(u[i/8] >> (i % 8 * 8))
		}
	}
	return id
}

func newSpanID() (id SpanID) {
	for id == (SpanID{}) {
		for i, u := 0, rand.Uint64(); i < len(id); i++ {
			id[i] = byte(u >> (i * 8))
		}
	}
	return id
}

// traceContext is what a traceparent says; if it is not ok, it says nothing.
type traceContext struct {
	id     TraceID
	parent SpanID
	flags  byte
	ok     bool
}

func (c *traceContext) sampled() bool { return c.flags&flagSampled != 0 }

// The flags of a traceparent. The second says that the trace's id is random, and is
// passed on with it.
const (
	flagSampled = 1
	flagRandom  = 2
	knownFlags  = flagSampled | flagRandom
)

// parseTraceparent reads a traceparent of W3C's Trace Context. Later versions may have
// more behind what this one has.
func parseTraceparent(text []byte) (c traceContext) {
	const size = 55
	if len(text) < size || text[2] != '-' || text[35] != '-' || text[52] != '-' || !lowerHex(text[:2]) ||
		text[0] == 'f' && text[1] == 'f' || text[0] == '0' && text[1] == '0' && len(text) > size || len(text) > size && text[size] != '-' {
		return traceContext{}
	}
	var flags [1]byte
	if !lowerHex(text[3:35]) || !lowerHex(text[36:52]) || !lowerHex(text[53:55]) {
		return traceContext{}
	}
	hex.Decode(c.id[:], text[3:35])
	hex.Decode(c.parent[:], text[36:52])
	hex.Decode(flags[:], text[53:55])
	if c.id == (TraceID{}) || c.parent == (SpanID{}) {
		return traceContext{}
	}
	c.flags, c.ok = flags[0], true
	return c
}

func lowerHex(text []byte) bool {
	for _, c := range text {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

// appendTraceparent appends the field that makes the engine's spans children of the
// last attempt's.
func (t *Trace) appendTraceparent(dst []byte) []byte {
	parent := &t.Attempts[len(t.Attempts)-1].Client
	dst = append(dst, "traceparent: 00-"...)
	dst = append(hex.AppendEncode(dst, t.ID[:]), '-')
	dst = append(hex.AppendEncode(dst, parent[:]), '-')
	return append(hex.AppendEncode(dst, []byte{t.Flags}), crlf...)
}
