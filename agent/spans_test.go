package agent

import (
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/inferrail/inferrail/proxy"
)

// aTrace is a request that was tried twice.
func aTrace() *proxy.Trace {
	at := time.Unix(1700000000, 0)
	return &proxy.Trace{ID: proxy.TraceID{1}, Span: proxy.SpanID{2}, Began: at, Ended: at.Add(time.Second), Method: "POST", Path: "/v1/chat/completions",
		Route: "/v1/chat/completions", Status: 200, Outcome: "ok", Blame: "nobody", Tier: "copy", InputTokens: -1, OutputTokens: -1, CachedTokens: -1,
		Attempts: []proxy.TraceAttempt{
			{Route: proxy.SpanID{3}, Client: proxy.SpanID{4}, Choosing: at, Chosen: at, Ended: at, Replica: "r0", Addr: "a:1", Outcome: "engine_died", Cached: -1},
			{Route: proxy.SpanID{5}, Choosing: at, Chosen: at, Ended: at, Outcome: "no_replica", Cached: -1}}}
}

// What a client or an engine makes up spoils no span: collectors take no text that is
// not UTF-8, and none without bound; names of spans are few.
func TestSpansOfHostileRequests(t *testing.T) {
	m := newSpanMaker()
	r := aTrace()
	bad := "\xff\xfe" + strings.Repeat("x", 10000)
	r.Method, r.Path, r.Route, r.Asked, r.Cause, r.Client, r.State, r.Parent = "BR\xffEW", bad, "", bad, bad, bad, bad, proxy.SpanID{9}
	r.Outcome, r.Blame = "engine_broke", "engine"
	r.Attempts[0].Cause, r.Attempts[0].Addr = bad, "[::1]:99999"
	m.add(r)
	if len(m.made) != 4 {
		t.Fatalf("%d spans, want 4", len(m.made))
	}
	for _, s := range m.made {
		if len(s.Name()) > 10 || !utf8.ValidString(s.Status().Description) || len(s.Status().Description) > 2*maxText {
			t.Errorf("%q: %.100q", s.Name(), s.Status().Description)
		}
		for _, kv := range s.Attributes() {
			if text := kv.Value.String(); !utf8.ValidString(text) || len(text) > 2*maxText {
				t.Errorf("%s of %s: %d bytes, %.40q", kv.Key, s.Name(), len(text), text)
			}
		}
		if s.SpanContext().TraceID() != [16]byte{1} {
			t.Errorf("%s is of trace %s", s.Name(), s.SpanContext().TraceID())
		}
	}
}

// BenchmarkSpans is what the spans of a request cost that was tried once.
func BenchmarkSpans(b *testing.B) {
	m, r := newSpanMaker(), aTrace()
	r.Attempts = r.Attempts[:1]
	b.ReportAllocs()
	for b.Loop() {
		m.add(r)
		clear(m.made)
		m.made = m.made[:0]
	}
}
