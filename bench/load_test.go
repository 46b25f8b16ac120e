package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/inferrail/inferrail/simulator/workload"
)

// loadOf asks a server so many times, once every period, for answers of so many tokens.
func loadOf(t *testing.T, handler http.HandlerFunc, requests, output int, period time.Duration) *load {
	t.Helper()
	s := httptest.NewServer(handler)
	t.Cleanup(s.Close)
	t.Cleanup(s.CloseClientConnections)
	return loadAt(t, s.URL, requests, output, period)
}

func loadAt(t *testing.T, url string, requests, output int, period time.Duration) *load {
	t.Helper()
	e, err := newEndpoint(EndpointOptions{URL: url}, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.close)
	w := &workload.Workload{Name: t.Name()}
	for i := range requests {
		w.Requests = append(w.Requests, workload.Request{At: time.Duration(i) * period, Output: output,
			Parts: []workload.Part{{ID: uint64(i), Tokens: 10}}})
	}
	return &load{endpoint: e, workload: w, most: 10_000, body: func(dst []byte, i int) (string, []byte, error) {
		return "/v1/completions", fmt.Appendf(dst, `{"prompt":"request %d"}`, i), nil
	}}
}

func (l *load) mustRun(t *testing.T) *loaded {
	t.Helper()
	result, err := l.run(t.Context(), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if n := len(result.records); n != len(l.workload.Requests) {
		t.Fatalf("%d records of %d requests", n, len(l.workload.Requests))
	}
	return result
}

// beginStream begins an answer.
func beginStream(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "text/event-stream")
	w.WriteHeader(http.StatusOK)
	_ = http.NewResponseController(w).Flush()
}

// say sends an event.
func say(w http.ResponseWriter, data string) {
	fmt.Fprintf(w, "data: %s\n\n", data)
	_ = http.NewResponseController(w).Flush()
}

const aToken = `{"choices":[{"index":0,"text":"word ","finish_reason":null}]}`

// end sends what an answer of so many tokens ends with.
func end(w http.ResponseWriter, tokens int) {
	say(w, fmt.Sprintf(`{"choices":[],"usage":{"prompt_tokens":12,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":8}}}`, tokens))
	say(w, "[DONE]")
}

// timed is a server with first tokens after a time and the next ones in its pace. It
// sleeps until instants, so that what is late is not the more so with each token.
func timed(first, gap time.Duration, tokens int) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		at := time.Now().Add(first)
		_, _ = io.Copy(io.Discard, r.Body)
		beginStream(w)
		for i := range tokens {
			time.Sleep(time.Until(at.Add(time.Duration(i) * gap)))
			say(w, aToken)
		}
		end(w, tokens)
	}
}

// medianOf is the median of what f says of the records.
func medianOf(records []workload.Record, f func(r *workload.Record) time.Duration) time.Duration {
	var all []time.Duration
	for i := range records {
		all = append(all, f(&records[i]))
	}
	slices.Sort(all)
	return all[len(all)/2]
}

func ttftOf(r *workload.Record) time.Duration { return r.First - r.Scheduled }
func lagOf(r *workload.Record) time.Duration  { return r.Sent - r.Scheduled }

// What a server of known timing takes is what is measured: never less, and on a machine
// with nothing else to do hardly more. A busy one may have several tries.
func TestLoadMeasuresKnownTimes(t *testing.T) {
	const first, gap, tokens = 80 * time.Millisecond, 20 * time.Millisecond, 11
	l := loadOf(t, timed(first, gap, tokens), 60, tokens, 10*time.Millisecond)
	for try := 1; ; try++ {
		again := load{endpoint: l.endpoint, workload: l.workload, body: l.body, most: l.most}
		result := again.mustRun(t)
		for _, r := range result.records {
			if r.Failure != "" || r.Output != tokens || r.Input != 12 || r.Cached != 8 || len(r.Gaps) != tokens-1 {
				t.Fatalf("%+v", r)
			}
			if r.Sent < r.Scheduled || r.First < r.Sent+first || r.End < r.Sent+first+(tokens-1)*gap {
				t.Errorf("early: %+v", r)
			}
		}
		// The nearest of 60 answers: what is added by design is added to all of them.
		nearest := func(what string, want time.Duration, f func(r *workload.Record) time.Duration) time.Duration {
			least := time.Hour
			for i := range result.records {
				off := f(&result.records[i]) - want
				least = min(least, max(off, -off))
			}
			t.Logf("%s: %v off at least, the median is %v", what, least, medianOf(result.records, f))
			return least
		}
		ttft := nearest("to the first token", first, ttftOf)
		lag := nearest("sent late", 0, lagOf)
		tpot := nearest("a token", gap, func(r *workload.Record) time.Duration { return (r.End - r.First) / (tokens - 1) })
		between := nearest("a gap", gap, func(r *workload.Record) time.Duration { return r.Gaps[3] })
		if ttft < 2*time.Millisecond && tpot < time.Millisecond/2 && between < time.Millisecond && lag < time.Millisecond {
			return
		}
		if try == 8 {
			t.Fatal("never near what the server took")
		}
	}
}

// An answer is over when its choice is, though the last tokens have no text, such as the
// one that ends it.
func TestLoadMeasuresToTheEnd(t *testing.T) {
	const silent = 60 * time.Millisecond
	result := loadOf(t, func(w http.ResponseWriter, _ *http.Request) {
		beginStream(w)
		say(w, aToken)
		time.Sleep(silent)
		say(w, `{"choices":[{"text":"","finish_reason":"stop"}]}`)
		time.Sleep(time.Second)
		end(w, 3)
	}, 3, 3, time.Millisecond).mustRun(t)
	for _, r := range result.records {
		// The first token may be seen late.
		if r.Output != 3 || len(r.Gaps) != 0 || r.First > r.End || r.End-r.Sent < silent {
			t.Errorf("%+v", r)
		}
	}
	// A busy machine may hold up one, and what was added by design is added to all.
	if !slices.ContainsFunc(result.records, func(r workload.Record) bool { return r.End-r.First < time.Second }) {
		t.Errorf("none was over before its stream was: %+v", result.records)
	}
}

// A server that serves one request after another and takes longer for each than there
// is time between two falls behind. Latency is counted from when requests were due, so
// it grows with each by as much as the server falls behind with it; who would wait for
// an answer before the next request would find the same time for all.
func TestLoadShowsWhoFallsBehind(t *testing.T) {
	const service, period, requests = 20 * time.Millisecond, 10 * time.Millisecond, 40
	var mu sync.Mutex // guards free, here and most
	var free time.Time
	here, most := 0, 0
	result := loadOf(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		mu.Lock()
		if now := time.Now(); free.Before(now) {
			free = now
		}
		free = free.Add(service)
		at := free
		here++
		most = max(most, here)
		mu.Unlock()
		time.Sleep(time.Until(at))
		mu.Lock()
		here--
		mu.Unlock()
		beginStream(w)
		say(w, aToken)
		end(w, 1)
	}, requests, 1, period).mustRun(t)
	// A busy machine may swap neighbours on their way, so the halves are looked at.
	half := func(records []workload.Record, from int) {
		t.Helper()
		var got, want time.Duration
		for i, r := range records {
			if r.Failure != "" {
				t.Fatalf("%+v", r)
			}
			got += ttftOf(&r)
			want += service + time.Duration(from+i)*(service-period)
		}
		got, want = got/time.Duration(len(records)), want/time.Duration(len(records))
		if got < want || got > 2*want+time.Second {
			t.Errorf("from request %d on the mean time to the first token is %v, and by what the server does %v", from, got, want)
		}
	}
	half(result.records[:requests/2], 0)
	half(result.records[requests/2:], requests/2)
	// They were sent all the same: half of them wait for the server at its worst.
	if most < requests/3 {
		t.Errorf("at most %d requests were at the server at one time", most)
	}
}

// blocking is a client that does not read the answer to one request.
type blocking struct {
	http.RoundTripper
	which   string
	release chan struct{}
}

func (b *blocking) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := b.RoundTripper.RoundTrip(r)
	if err == nil && r.Header.Get("X-Session-Id") == b.which {
		resp.Body = &blockedBody{resp.Body, b.release}
	}
	return resp, err
}

type blockedBody struct {
	io.ReadCloser
	release chan struct{}
}

func (b *blockedBody) Read(p []byte) (int, error) {
	<-b.release
	return b.ReadCloser.Read(p)
}

// Who does not read its answer holds up nobody else.
func TestLoadWithABlockedClient(t *testing.T) {
	const requests = 30
	var served sync.WaitGroup
	served.Add(requests - 1)
	l := loadOf(t, func(w http.ResponseWriter, r *http.Request) {
		beginStream(w)
		blocked := r.Header.Get("X-Session-Id") == "1"
		for range 5 {
			if blocked {
				// More than the kernel holds for who does not read, so that the server waits
				// for the client.
				say(w, `{"choices":[{"text":"`+strings.Repeat("x", 2<<20)+`"}]}`)
			} else {
				say(w, aToken)
			}
		}
		end(w, 5)
		if !blocked {
			served.Done()
		}
	}, requests, 5, 10*time.Millisecond)
	l.workload.Requests[0].Session = 1
	release := make(chan struct{})
	l.endpoint.client.Transport = &blocking{l.endpoint.client.Transport, "1", release}
	go func() {
		served.Wait()
		close(release)
	}()
	result := l.mustRun(t)
	for i, r := range result.records {
		if r.Failure != "" || r.Output != 5 {
			t.Errorf("request %d: %+v", i, r)
		}
		if i > 0 && r.End > result.records[0].First {
			t.Errorf("request %d was over at %v, after the blocked one went on at %v", i, r.End, result.records[0].First)
		}
	}
}

// A load that begins late says so: it is in the lag and in all latencies.
func TestLoadOwnsUpToItsLag(t *testing.T) {
	const late = 150 * time.Millisecond
	l := loadOf(t, timed(10*time.Millisecond, time.Millisecond, 2), 20, 2, 10*time.Millisecond)
	result, err := l.run(t.Context(), time.Now().Add(-late))
	if err != nil {
		t.Fatal(err)
	}
	for i, r := range result.records {
		if want := late - r.Scheduled; r.Sent-r.Scheduled < want || r.First-r.Scheduled < want+10*time.Millisecond {
			t.Errorf("request %d was sent %v late and had its first token after %v, want at least %v of lag", i, r.Sent-r.Scheduled, r.First-r.Scheduled, want)
		}
	}
}

// Whatever a server does, each request has an end, and is counted under the right name.
func TestLoadCountsFailures(t *testing.T) {
	token := func(w http.ResponseWriter) { beginStream(w); say(w, aToken) }
	hangUp := func(w http.ResponseWriter, reset bool) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			panic(err)
		}
		if reset {
			_ = conn.(*net.TCPConn).SetLinger(0)
		}
		conn.Close()
	}
	hang := func(r *http.Request) { <-r.Context().Done() }
	ways := []struct {
		want string
		do   http.HandlerFunc
	}{
		{"", timed(0, 0, 3)},
		{"", func(w http.ResponseWriter, _ *http.Request) { // no end but that of the choice
			token(w)
			say(w, `{"choices":[{"text":"","finish_reason":"length"}]}`)
		}},
		{"", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprint(w, `{"choices":[{"message":{"content":"in one piece"}}],"usage":{"prompt_tokens":3,"completion_tokens":4}}`)
		}},
		{"refused", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Retry-After", "1")
			http.Error(w, `{"error":{"message":"later"}}`, http.StatusServiceUnavailable)
		}},
		{"refused", func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "too many", http.StatusTooManyRequests) }},
		{"status 503", func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "gone", http.StatusServiceUnavailable) }},
		{"status 500", func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "oops", http.StatusInternalServerError) }},
		{"status 307", func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/elsewhere", http.StatusTemporaryRedirect)
		}},
		{"connection closed", func(w http.ResponseWriter, _ *http.Request) { hangUp(w, false) }},
		{"connection reset", func(w http.ResponseWriter, _ *http.Request) { hangUp(w, true) }},
		{"cut off", func(w http.ResponseWriter, _ *http.Request) { token(w); hangUp(w, false) }},
		{"cut off", func(w http.ResponseWriter, _ *http.Request) { token(w); hangUp(w, true) }},
		{"cut off", func(w http.ResponseWriter, _ *http.Request) { token(w) }}, // ends well, but says nothing of it
		{"garbage", func(w http.ResponseWriter, _ *http.Request) { token(w); say(w, `{"choices":`) }},
		{"garbage", func(w http.ResponseWriter, _ *http.Request) { token(w); fmt.Fprint(w, "<html>\n") }},
		{"garbage", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "<html>\n") }},
		{"error event", func(w http.ResponseWriter, _ *http.Request) {
			token(w)
			say(w, `{"error":{"message":"the engine has died","code":500}}`)
		}},
		{"no token", func(w http.ResponseWriter, _ *http.Request) { beginStream(w); end(w, 0) }},
		{"timeout", func(_ http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body); hang(r) }},
		{"timeout", func(w http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body); token(w); hang(r) }},
	}
	l := loadOf(t, func(w http.ResponseWriter, r *http.Request) {
		var i int
		body, _ := io.ReadAll(r.Body)
		if _, err := fmt.Sscanf(string(body), `{"prompt":"request %d"`, &i); err != nil {
			panic(err)
		}
		ways[i].do(w, r)
	}, len(ways), 3, time.Millisecond)
	l.endpoint.timeout = 3 * time.Second
	// The server sees no connection that it has broken before, so that none is tried again.
	l.endpoint.client.Transport.(*http.Transport).DisableKeepAlives = true
	result := l.mustRun(t)
	want := map[string]int{}
	for i, way := range ways {
		if way.want != "" {
			want[way.want]++
		}
		if got := result.records[i].Failure; got != way.want {
			t.Errorf("way %d: %q, want %q: %s", i, got, way.want, result.why[got])
		}
		if way.want != "" && result.why[way.want] == "" {
			t.Errorf("nothing tells more of %q", way.want)
		}
	}
	if sent, over, failed := l.sent.Load(), l.over.Load(), l.failed.Load(); int(sent) != len(ways) || over != sent || int(failed) != len(ways)-3 {
		t.Errorf("%d sent, %d over, %d failed", sent, over, failed)
	}
}

// A port at which nobody listens.
func TestLoadWithoutAServer(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	url := "http://" + ln.Addr().String()
	ln.Close()
	for _, r := range loadAt(t, url, 3, 1, time.Millisecond).mustRun(t).records {
		if r.Failure != "connection refused" {
			t.Errorf("%+v", r)
		}
	}
}

// More than may be on their way are not sent, and said to have failed.
func TestLoadIsBounded(t *testing.T) {
	release := make(chan struct{})
	l := loadOf(t, func(w http.ResponseWriter, _ *http.Request) {
		<-release
		beginStream(w)
		say(w, aToken)
		end(w, 1)
	}, 10, 1, time.Millisecond)
	l.most = 4
	go func() {
		for l.failed.Load() < 6 {
			time.Sleep(time.Millisecond)
		}
		close(release)
	}()
	result := l.mustRun(t)
	for i, r := range result.records {
		want := ""
		if i >= 4 {
			want = "too many at once"
		}
		if r.Failure != want {
			t.Errorf("request %d: %q, want %q", i, r.Failure, want)
		}
	}
	if result.mostAtOnce != 4 {
		t.Errorf("%d at once", result.mostAtOnce)
	}
}

// A load that is interrupted gives up what is on its way, and tells of what was sent.
func TestLoadInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var arrived sync.WaitGroup
	arrived.Add(3)
	l := loadOf(t, func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		arrived.Done()
		<-r.Context().Done()
	}, 4, 1, time.Millisecond)
	l.workload.Requests[3].At = time.Hour
	go func() {
		arrived.Wait()
		cancel()
	}()
	result, err := l.run(ctx, time.Now())
	if err != nil || !result.interrupted || len(result.records) != 3 {
		t.Fatalf("%+v, %v", result, err)
	}
	for _, r := range result.records {
		if r.Failure != "interrupted" {
			t.Errorf("%+v", r)
		}
	}
}

// A body that cannot be made ends the load with its error.
func TestLoadWithoutABody(t *testing.T) {
	l := loadOf(t, timed(0, 0, 1), 200, 1, time.Millisecond)
	inner := l.body
	l.body = func(dst []byte, i int) (string, []byte, error) {
		if i == 150 {
			return "", nil, errors.New("no words left")
		}
		return inner(dst, i)
	}
	if _, err := l.run(t.Context(), time.Now()); err == nil || !strings.Contains(err.Error(), "request 150: no words left") {
		t.Errorf("error %v", err)
	}
}

// Those that have served are numbered in the order of their names, however they came.
func TestLoadNamesReplicas(t *testing.T) {
	names := []string{"e10", "e2", "", "e0"}
	l := loadOf(t, func(w http.ResponseWriter, r *http.Request) {
		var i int
		body, _ := io.ReadAll(r.Body)
		_, _ = fmt.Sscanf(string(body), `{"prompt":"request %d"`, &i)
		w.Header().Set("X-Inferrail-Replica", names[i])
		w.Header().Set("X-Inferrail-Predicted-Ms", "250")
		w.Header().Set("X-Inferrail-Cached-Tokens", "160")
		w.Header().Set("X-Inferrail-Begun-Tokens", "64")
		beginStream(w)
		say(w, `{"choices":[{"text":"a"}],"system_fingerprint":"by itself"}`)
		end(w, 1)
	}, len(names), 1, time.Millisecond)
	result := l.mustRun(t)
	if !slices.Equal(result.replicas, []string{"e0", "e2", "e10", "by itself"}) {
		t.Errorf("replicas %q", result.replicas)
	}
	for i, want := range []int{2, 1, 3, 0} {
		r := result.records[i]
		if r.Replica != want || r.Predicted != 250*time.Millisecond || r.PredictedCached != 96 {
			t.Errorf("request %d: %+v, want replica %d", i, r, want)
		}
	}
}

// One that is known and serves nothing keeps its number.
func TestLoadKnowsReplicas(t *testing.T) {
	names := []string{"e2", "another", "e1"}
	l := &load{workload: &workload.Workload{}, replicas: []string{"e0", "e1", "e2"}}
	var asked []*exchange
	for _, name := range names {
		asked = append(asked, &exchange{replica: name})
	}
	result := l.collect(asked)
	var got []int
	for _, r := range result.records {
		got = append(got, r.Replica)
	}
	if !slices.Equal(result.replicas, []string{"e0", "e1", "e2", "another"}) || !slices.Equal(got, []int{2, 3, 1}) {
		t.Errorf("replicas %q, requests are of %v", result.replicas, got)
	}
}
