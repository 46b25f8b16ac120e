package proxy

import (
	"encoding/hex"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
)

func TestParseTraceparent(t *testing.T) {
	const id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
	f := func(in, want string) {
		t.Helper()
		got := "none"
		if c := parseTraceparent([]byte(in)); c.ok {
			got = hex.EncodeToString(c.id[:]) + " " + hex.EncodeToString(c.parent[:]) + " " + hex.EncodeToString([]byte{c.flags})
		} else if c != (traceContext{}) {
			t.Errorf("%q is not ok and says %+v", in, c)
		}
		if got != want {
			t.Errorf("%q: %s, want %s", in, got, want)
		}
	}
	f("00-"+id+"-"+parent+"-01", id+" "+parent+" 01")
	f("00-"+id+"-"+parent+"-00", id+" "+parent+" 00")
	f("00-"+id+"-"+parent+"-ff", id+" "+parent+" ff")
	// A later version may have more.
	f("cc-"+id+"-"+parent+"-01", id+" "+parent+" 01")
	f("cc-"+id+"-"+parent+"-01-what-else", id+" "+parent+" 01")
	f("cc-"+id+"-"+parent+"-01.what-else", "none")
	f("00-"+id+"-"+parent+"-01-what-else", "none")
	f("00-"+id+"-"+parent+"-01-", "none")
	f("ff-"+id+"-"+parent+"-01", "none")
	f("0-"+id+"-"+parent+"-01", "none")
	f("", "none")
	f("00", "none")
	f("00-"+id+"-"+parent, "none")
	f("00-"+id+"-"+parent+"-1", "none")
	f("00-"+strings.ToUpper(id)+"-"+parent+"-01", "none")
	f("00-"+id+"-"+strings.ToUpper(parent)+"-01", "none")
	f("00-"+id+"-"+parent+"-0X", "none")
	f("00-"+strings.Repeat("0", 32)+"-"+parent+"-01", "none")
	f("00-"+id+"-"+strings.Repeat("0", 16)+"-01", "none")
	f("00_"+id+"-"+parent+"-01", "none")
	f("00-"+id+"_"+parent+"-01", "none")
	f("00-"+id+"-"+parent+"_01", "none")
	f("00-"+id[1:]+"-"+parent+"0-01", "none")
}

// What is no traceparent is none, whatever it is, and what is one says what it is made of.
func FuzzTraceparent(f *testing.F) {
	f.Add([]byte("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"))
	f.Add([]byte("01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-x"))
	f.Fuzz(func(t *testing.T, text []byte) {
		c := parseTraceparent(text)
		if !c.ok {
			return
		}
		trace := Trace{ID: c.id, Flags: c.flags, Attempts: []TraceAttempt{{Client: c.parent}}}
		want := "traceparent: 00" + string(text[2:55]) + "\r\n"
		if got := string(trace.appendTraceparent(nil)); got != want {
			t.Errorf("%q becomes %q", text, got)
		}
	})
}

// TestTraceContext: whose child the engine's span is. What is not traced passes as it
// came; a trace that the caller has begun goes on as it says; and what is malformed
// begins a trace, or none.
func TestTraceContext(t *testing.T) {
	heads := make(chan http.Header, 1)
	e := newRawEngine(t, func(c *engineSide) {
		for {
			r := c.request()
			if r == nil {
				return
			}
			heads <- r.Header
			io.WriteString(c, fixed("{}"))
		}
	})
	r := newRig(t, Limits{}, nil, e.url())
	got := make(chan *Trace, 1)
	const id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
	const theirs = "traceparent: 00-" + id + "-" + parent
	// want are what the engine gets: ID, CLIENT and so on stand for the trace's own.
	f := func(ratio float64, traced bool, want []string, fields ...string) {
		t.Helper()
		r.s.SetTraces(got, TracesWanted{Ratio: ratio})
		c := r.dial()
		lines := ""
		for _, field := range fields {
			lines += field + "\r\n"
		}
		c.send(post(hello, lines))
		if resp, _ := c.answer(); resp.StatusCode != 200 {
			t.Fatalf("status %d", resp.StatusCode)
		}
		c.Close()
		head := <-heads
		var trace *Trace
		if traced {
			select {
			case trace = <-got:
			case <-time.After(20 * time.Second):
				t.Fatalf("%q at %v is not traced", fields, ratio)
			}
			for i := range want {
				want[i] = strings.NewReplacer("ID", hex.EncodeToString(trace.ID[:]), "CLIENT", hex.EncodeToString(trace.Attempts[0].Client[:])).Replace(want[i])
			}
			if trace.Span == (SpanID{}) || trace.Attempts[0].Route == (SpanID{}) || trace.Attempts[0].Client == (SpanID{}) || trace.ID == (TraceID{}) {
				t.Errorf("%+v has no ids", trace)
			}
		}
		var is []string
		for _, name := range []string{"Traceparent", "Tracestate", "Baggage"} {
			for _, value := range head[name] {
				is = append(is, strings.ToLower(name)+": "+value)
			}
		}
		if !slices.Equal(is, want) {
			t.Errorf("%q at %v: the engine gets\n%q, want\n%q", fields, ratio, is, want)
		}
		if !traced {
			return
		}
		if continued := trace.Parent != (SpanID{}); continued != (hex.EncodeToString(trace.ID[:]) == id) || continued && hex.EncodeToString(trace.Parent[:]) != parent {
			t.Errorf("%q: the parent is %x in %x", fields, trace.Parent, trace.ID)
		}
	}
	f(0, false, nil)
	f(1, true, []string{"traceparent: 00-ID-CLIENT-01"})
	f(0, true, []string{"traceparent: 00-" + id + "-CLIENT-01", "tracestate: a=1", "tracestate: b=2", "baggage: user=7"},
		theirs+"-01", "tracestate: a=1", "baggage: user=7", "tracestate: b=2")
	f(0, true, []string{"traceparent: 00-" + id + "-CLIENT-03"}, theirs+"-03")
	f(0, true, []string{"traceparent: 00-" + id + "-CLIENT-03"}, theirs+"-ff")
	// The caller has drawn that it is not traced.
	f(1, false, []string{"traceparent: 00-" + id + "-" + parent + "-00", "tracestate: a=1"}, theirs+"-00", "tracestate: a=1")
	f(0, false, []string{"traceparent: nonsense", "tracestate: a=1"}, "traceparent: nonsense", "tracestate: a=1")
	f(1, true, []string{"traceparent: 00-ID-CLIENT-01", "baggage: user=7"}, "traceparent: nonsense", "tracestate: a=1", "baggage: user=7")
	f(1, true, []string{"traceparent: 00-ID-CLIENT-01"}, theirs+"-01", theirs+"-01")
	f(1, true, []string{"traceparent: 00-ID-CLIENT-01"}, "Connection: traceparent, tracestate", "tracestate: a=1")
	f(1, true, []string{"traceparent: 00-ID-CLIENT-01"}, "X-Inferrail-Stream: h2 1.2.3.4:5")
	select {
	case trace := <-got:
		t.Errorf("%+v was traced too", trace)
	default:
	}
}

// TestTraceClient: who asks is told by the connection, and not by what a client says of
// itself.
func TestTraceClient(t *testing.T) {
	e := newRawEngine(t, answering(fixed("{}")))
	r := newRig(t, Limits{}, nil, e.url())
	got := make(chan *Trace, 1)
	r.s.SetTraces(got, TracesWanted{Ratio: 1})
	c := r.dial()
	c.send(post(hello, "X-Inferrail-Stream: h2 1.2.3.4:5\r\n"))
	c.answer()
	if trace := <-got; trace.Client != c.LocalAddr().String() || trace.Version != "1.1" || trace.TLS {
		t.Errorf("%+v", trace)
	}
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	transport := &http.Transport{Protocols: protocols}
	defer transport.CloseIdleConnections()
	req, err := http.NewRequestWithContext(t.Context(), "POST", "http://"+r.addr+"/v1/completions", strings.NewReader(hello))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Inferrail-Stream", "h2 1.2.3.4:5")
	resp, err := transport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if trace := <-got; !strings.HasPrefix(trace.Client, "127.0.0.1:") || trace.Version != "2" || trace.TLS {
		t.Errorf("%+v", trace)
	}
	select {
	case trace := <-got:
		t.Errorf("%+v was traced too", trace)
	default:
	}
}

// TestTracesAreNotWaitedFor: who does not take them keeps no request waiting.
func TestTracesAreNotWaitedFor(t *testing.T) {
	e := newRawEngine(t, answering(fixed("{}")))
	r := newRig(t, Limits{}, nil, e.url())
	got := make(chan *Trace, 2)
	r.s.SetTraces(got, TracesWanted{Ratio: 1})
	c := r.dial()
	for range 5 {
		c.send(post(hello))
		c.answer()
	}
	eventually(t, 20*time.Second, "three traces are counted as dropped", func() bool {
		var m dto.Metric
		return r.s.stats.tracesDropped.Write(&m) == nil && m.GetCounter().GetValue() == 3
	})
	if a, b := <-got, <-got; a.ID == b.ID || a.Span == b.Span || a.RequestID == b.RequestID {
		t.Errorf("%+v and %+v", a, b)
	}
}

// TestUntracedRequestsCostNothing: a request that is not drawn allocates what one does
// without a collector.
func TestUntracedRequestsCostNothing(t *testing.T) {
	withoutRace(t)
	count := func(wanted *TracesWanted) float64 {
		return testing.AllocsPerRun(200, steadyExchange(t, func(t testing.TB, url string) *rig {
			r := newPlainRig(t, url)
			if wanted != nil {
				r.s.SetTraces(make(chan *Trace), *wanted)
			}
			return r
		}, post(hello)))
	}
	without, unsampled, sampled := count(nil), count(&TracesWanted{}), count(&TracesWanted{Ratio: 1})
	if unsampled > without {
		t.Errorf("%v allocations, %v without a collector", unsampled, without)
	}
	if sampled <= without {
		t.Errorf("%v allocations though all are traced, %v without a collector: the test sees nothing", sampled, without)
	}
	x := &exchange{c: &conn{s: New(Limits{}, nil, nil)}}
	defer x.c.s.Shutdown(t.Context())
	if n := testing.AllocsPerRun(100, func() {
		x.beginTrace()
		x.traceAttempt()
		x.traceDecision()
		x.traceSent()
		x.traceAnswer(none)
		x.traceBody()
		x.endTrace(none, usage{}, false, time.Time{})
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
