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
	// where the trace begins here. State is the client's tracestate.
	ID           TraceID
	Span, Parent SpanID
	State        string
	// Began is when the request's first byte was there, Read when all of it was, First
	// when its first token was, zero when that was not seen, and Ended when it was over.
	Began, Read, First, Ended time.Time

	Method, Path, RequestID string
	// Client is host and port of who asks; HTTP10, Stream and Exact say what they are
	// named after.
	Client                string
	HTTP10, Stream, Exact bool
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
	// engine was given the request, FirstByte when its answer began and Ended when the
	// attempt was over. Each is zero where it did not come so far.
	Choosing, Chosen, Sent, FirstByte, Ended time.Time
	Held                                     time.Duration
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
	id, parent, sampled, ok := parseTraceparent(x.head.traceparent)
	if ok && !sampled || !ok && !(rand.Float64() < t.Ratio) {
		return
	}
	x.trace = &Trace{ID: id, Parent: parent, Span: newSpanID(), Began: x.began, RequestID: string(x.id),
		Method: string(x.method), Path: string(x.path), HTTP10: x.http10, InputTokens: -1, OutputTokens: -1, CachedTokens: -1}
	if !ok {
		x.trace.ID = newTraceID()
	} else {
		x.trace.State = string(x.head.tracestate)
	}
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
	if len(x.body) == 0 || t.RequestBytes > 0 {
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

// traceAnswer tells the trace how an attempt went, whose answer has begun if f is none.
func (x *exchange) traceAnswer(f failure) {
	a := x.tracing()
	if a == nil {
		return
	}
	now := time.Now()
	if a.Chosen.IsZero() {
		a.Chosen = now // it was refused
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

// endTrace hands the trace over when the request is over.
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
	if addr := x.c.tcp.RemoteAddr(); addr != nil {
		t.Client = addr.String()
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
	x.traceBody()
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
		t.First = x.prefill.Sent.Add(time.Duration(x.observed * float64(time.Second)))
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

// parseTraceparent reads a traceparent of W3C's Trace Context. Later versions may have
// more behind what this one has.
func parseTraceparent(text []byte) (id TraceID, parent SpanID, sampled, ok bool) {
	const size = 55
	if len(text) < size || text[2] != '-' || text[35] != '-' || text[52] != '-' || !lowerHex(text[:2]) ||
		text[0] == 'f' && text[1] == 'f' || text[0] == '0' && text[1] == '0' && len(text) > size || len(text) > size && text[size] != '-' {
		return id, parent, false, false
	}
	var flags [1]byte
	for _, part := range []struct{ to, from []byte }{{id[:], text[3:35]}, {parent[:], text[36:52]}, {flags[:], text[53:55]}} {
		if !lowerHex(part.from) {
			return TraceID{}, SpanID{}, false, false
		}
		hex.Decode(part.to, part.from)
	}
	if id == (TraceID{}) || parent == (SpanID{}) {
		return TraceID{}, SpanID{}, false, false
	}
	return id, parent, flags[0]&1 != 0, true
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
// span that asks it.
func appendTraceparent(dst []byte, id TraceID, parent SpanID) []byte {
	dst = append(dst, "traceparent: 00-"...)
	dst = append(hex.AppendEncode(dst, id[:]), '-')
	return append(append(hex.AppendEncode(dst, parent[:]), "-01"...), crlf...)
}
