package simulator

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestFaults(t *testing.T) {
	s, c := start(t, Config{ZeroLatency: true}), client(t)
	// f returns what a stream of ten tokens delivers and how it ends.
	f := func(fault string) (events int, err error) {
		t.Helper()
		res := post(t, c, s, "/v1/completions", `{"prompt":"x","max_tokens":10,"stream":true,"vllm_xargs":{"sim":`+fault+`}}`)
		body, err := io.ReadAll(res.Body)
		return bytes.Count(body, []byte("data: {")), err
	}
	if n, err := f(`{"break":"fin","break_after":4}`); n != 4 || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("fin: %d events, %v", n, err)
	}
	if n, err := f(`{"break":"fin","break_after":10}`); n != 10 || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("fin at the end: %d events, %v", n, err)
	}
	if _, err := f(`{"break":"rst","break_after":4}`); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("rst: %v", err)
	}
	if n, err := f(`{"break":"fin","break_after":11}`); n != 10 || err != nil {
		t.Errorf("beyond the end: %d events, %v", n, err)
	}

	began := time.Now()
	readAll(t, post(t, c, s, "/v1/completions", `{"prompt":"x","vllm_xargs":{"sim":{"head_delay_us":50000}}}`))
	if d := time.Since(began); d < 50*time.Millisecond {
		t.Errorf("delayed head after %v", d)
	}

	res := post(t, c, s, "/v1/completions", `{"prompt":"x","max_tokens":10,"stream":true,"vllm_xargs":{"sim":{"break":"stall","break_after":2}}}`)
	lines := bufio.NewReader(res.Body)
	for range 4 {
		if _, err := lines.ReadString('\n'); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(20 * time.Millisecond)
	// The handlers of those before end behind their answers.
	eventually(t, 20*time.Second, "the stalled one runs", func() bool { return s.Running() == 1 })
	res.Body.Close()
	eventually(t, 20*time.Second, "stalled one gone", func() bool { return s.Running() == 0 })

	for _, size := range []int{10, 5000, 3 << 20} {
		body := fmt.Sprintf(`{"messages":[],"vllm_xargs":{"sim":{"body_bytes":%d}}}`, size)
		res := post(t, c, s, "/v1/chat/completions", body)
		got := readAll(t, res)
		if len(got) < size || size > 1000 && len(got) != size || int64(len(got)) != res.ContentLength || !json.Valid(got) {
			t.Errorf("body of %d bytes, asked for %d, Content-Length %d", len(got), size, res.ContentLength)
		}
	}
	res = post(t, c, s, "/v1/chat/completions", `{"messages":[],"vllm_xargs":{"sim":{"break":"fin","break_after":100}}}`)
	if got, err := io.ReadAll(res.Body); len(got) != 100 || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("body cut after %d bytes, %v", len(got), err)
	}
}

// ask sends one request on a connection of its own and returns all that comes
// back and how the connection ends.
func ask(t *testing.T, s *Server, path, body string) (string, error) {
	t.Helper()
	c, err := net.Dial("tcp", s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: sim\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", path, len(body), body)
	got, err := io.ReadAll(c)
	return string(got), err
}

// TestAnswersThatFail: what keeps a request from a whole answer, asked for by
// the request, by the server's configuration and while it runs.
func TestAnswersThatFail(t *testing.T) {
	const stream, body = `"max_tokens":3,"stream":true`, `"max_tokens":3`
	const event = `data: {"error":{"message":"The simulated engine was told to fail with status 500.","type":"InternalServerError","param":null,"code":500}}` + "\n\n\r\n"
	for _, c := range []struct {
		fault  string
		f      Faults
		tail   string
		begins string
		ends   string
		err    error
	}{
		{`{"status":503}`, Faults{Status: 503}, body, "HTTP/1.1 503 Service Unavailable\r\n", `"type":"ServiceUnavailableError","param":null,"code":503}}`, nil},
		{`{"status":502}`, Faults{Status: 502}, stream, "HTTP/1.1 502 Bad Gateway\r\n", `"type":"BadGatewayError","param":null,"code":502}}`, nil},
		{`{"status":429}`, Faults{Status: 429}, body, "HTTP/1.1 429 Too Many Requests\r\n", `"type":"TooManyRequestsError","param":null,"code":429}}`, nil},
		{`{"status":500}`, Faults{Status: 500}, body, "HTTP/1.1 500 Internal Server Error\r\n", `"type":"InternalServerError","param":null,"code":500}}`, nil},
		{`{"close_before_head":"fin"}`, Faults{CloseBeforeHead: "fin"}, body, "", "", nil},
		{`{"close_before_head":"rst"}`, Faults{CloseBeforeHead: "rst"}, stream, "", "", syscall.ECONNRESET},
		{`{"garbage":true}`, Faults{Garbage: true}, body, garbage, garbage, nil},
		{`{"break":"chunk","break_after":1}`, Faults{Break: "chunk", BreakAfter: 1}, stream, "HTTP/1.1 200 OK\r\n", "}\n\n\r\n" + badChunk, nil},
		{`{"break":"chunk","break_after":9}`, Faults{Break: "chunk", BreakAfter: 9}, body, "HTTP/1.1 200 OK\r\n", "\r\n9\r\n{\"id\":\"cm\r\n" + badChunk, nil},
		{`{"break":"error","break_after":1}`, Faults{Break: "error", BreakAfter: 1}, stream, "HTTP/1.1 200 OK\r\n", event + "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n", nil},
		{`{"break":"error"}`, Faults{Break: "error"}, body, "HTTP/1.1 500 Internal Server Error\r\n", `"code":500}}`, nil},
		{`{"length_excess":7}`, Faults{LengthExcess: 7}, body, "HTTP/1.1 200 OK\r\n", `"metrics":null}`, nil},
	} {
		check := func(how string, s *Server, xargs string) {
			t.Helper()
			got, err := ask(t, s, "/v1/completions", `{"prompt":"x",`+c.tail+xargs+`}`)
			if !errors.Is(err, c.err) || !strings.HasPrefix(got, c.begins) || !strings.HasSuffix(got, c.ends) || c.begins == "" && got != "" {
				t.Errorf("%s by %s: %q, %v", c.fault, how, got, err)
			}
			if c.f.LengthExcess > 0 {
				head, sent, _ := strings.Cut(got, "\r\n\r\n")
				if want := fmt.Sprintf("Content-Length: %d\r\n", len(sent)+7); !strings.Contains(head, want) {
					t.Errorf("%s by %s: no %q in %q", c.fault, how, want, head)
				}
			}
			eventually(t, 20*time.Second, "the request is over", func() bool { return s.Running() == 0 && s.Load() == Load{} })
		}
		// A file of faults is the same as that text in a request.
		s := start(t, Config{ZeroLatency: true})
		check("request", s, `,"vllm_xargs":{"sim":`+c.fault+`}`)
		if got, err := ask(t, s, "/v1/completions", `{"prompt":"x"}`); err != nil || !strings.HasSuffix(got, `"metrics":null}`) {
			t.Errorf("after %s: %q, %v", c.fault, got, err)
		}
		if res := post(t, client(t), s, "/sim/faults", c.fault); res.StatusCode != 200 {
			t.Fatalf("%s: %s", c.fault, readAll(t, res))
		}
		if s.Faults() != c.f {
			t.Errorf("%s became %+v", c.fault, s.Faults())
		}
		check("run time", s, "")
		check("configuration", start(t, Config{ZeroLatency: true, Faults: c.f}), "")
	}
}

// TestSomeRequestsFail: the first ones find a server that fails, those after
// them one that does not, and those with faults of their own are not counted.
func TestSomeRequestsFail(t *testing.T) {
	s, c := start(t, Config{ZeroLatency: true}), client(t)
	if err := s.SetFaults(Faults{Status: 503, FailRequests: 2}); err != nil {
		t.Fatal(err)
	}
	var got []int
	for _, body := range []string{`{"prompt":"x"}`, `{"prompt":"x","vllm_xargs":{"sim":{"status":500}}}`, `{"prompt":"x"}`, `{"prompt":"x"}`} {
		got = append(got, post(t, c, s, "/v1/completions", body).StatusCode)
	}
	if want := []int{503, 500, 503, 200}; fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%v, want %v", got, want)
	}
	// An answer is counted behind its last byte.
	eventually(t, 20*time.Second, "3 are aborted and one is finished", func() bool { return s.Aborted() == 3 && s.Finished() == 1 })
}

// TestHang: a request that is never answered counts as running until its
// client leaves.
func TestHang(t *testing.T) {
	s := start(t, Config{ZeroLatency: true, Faults: Faults{Hang: true}})
	c, err := net.Dial("tcp", s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	io.WriteString(c, "POST /v1/completions HTTP/1.1\r\nHost: sim\r\nContent-Length: 14\r\n\r\n{\"prompt\":\"x\"}")
	eventually(t, 20*time.Second, "it runs", func() bool { return s.Running() == 1 })
	c.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	if n, err := c.Read(make([]byte, 1)); n > 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%d bytes, %v", n, err)
	}
	c.Close()
	eventually(t, 20*time.Second, "it does not", func() bool { return s.Running() == 0 && s.Aborted() == 1 })
}

func TestHealthFails(t *testing.T) {
	s, c := start(t, Config{ZeroLatency: true}), client(t)
	get := func(path string, want int) {
		t.Helper()
		res, err := c.Get(s.URL() + path)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		if res.StatusCode != want {
			t.Errorf("%s: %d, want %d", path, res.StatusCode, want)
		}
	}
	pages := []string{"/health", "/ping", "/metrics"}
	for _, p := range pages {
		get(p, 200)
	}
	if err := s.SetFaults(Faults{HealthStatus: 503}); err != nil {
		t.Fatal(err)
	}
	for _, p := range pages {
		get(p, 503)
	}
	get("/v1/models", 200)
	if err := s.SetFaults(Faults{HealthHang: true}); err != nil {
		t.Fatal(err)
	}
	hasty := &http.Client{Transport: c.Transport, Timeout: 50 * time.Millisecond}
	for _, p := range pages {
		if res, err := hasty.Get(s.URL() + p); err == nil {
			res.Body.Close()
			t.Errorf("%s is answered with %d", p, res.StatusCode)
		}
	}
}

// TestRefuse: for a while nobody is let in, while those inside stay.
func TestRefuse(t *testing.T) {
	s, c := start(t, Config{ZeroLatency: true}), client(t)
	readAll(t, post(t, c, s, "/v1/completions", `{"prompt":"x"}`)) // an open connection
	dial := func() error {
		conn, err := net.Dial("tcp", s.Addr())
		if err == nil {
			conn.Close()
		}
		return err
	}
	if err := s.SetFaults(Faults{RefuseMS: 3600000}); err != nil {
		t.Fatal(err)
	}
	if err := dial(); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Fatalf("dialled: %v", err)
	}
	readAll(t, post(t, c, s, "/v1/completions", `{"prompt":"x"}`))
	if s.Accepted() != 1 {
		t.Errorf("%d connections", s.Accepted())
	}
	if err := s.SetFaults(Faults{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, 10*time.Second, "it listens", func() bool { return dial() == nil })

	if err := s.SetFaults(Faults{RefuseMS: 50}); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	eventually(t, 10*time.Second, "it listens by itself", func() bool { return dial() == nil })
	if d := time.Since(began); d < 45*time.Millisecond {
		t.Errorf("it listened after %v", d)
	}
	// A server that refuses can be closed.
	if err := s.SetFaults(Faults{RefuseMS: 3600000}); err != nil {
		t.Fatal(err)
	}
}

func TestSlow(t *testing.T) {
	s, c := start(t, Config{PrefillD: 1000, TimePerOutputToken: time.Millisecond}), client(t)
	began := time.Now()
	readAll(t, post(t, c, s, "/v1/completions", `{"prompt":"x","max_tokens":11,"stream":true,"vllm_xargs":{"sim":{"slow":20}}}`))
	if d := time.Since(began); d < 220*time.Millisecond {
		t.Errorf("twenty times as slow: %v, want 220 ms", d)
	}
}

func TestFaultsFailure(t *testing.T) {
	s, c := start(t, Config{}), client(t)
	f := func(body, want string) {
		t.Helper()
		res := post(t, c, s, "/sim/faults", body)
		if got := readAll(t, res); res.StatusCode != 400 || !bytes.Contains(got, []byte(want)) {
			t.Errorf("%s: %d %s, want %s", body, res.StatusCode, got, want)
		}
	}
	f(`{"slow":-1}`, "slow must be")
	f(`{"length_excess":-1}`, "length_excess must be")
	f(`{"close_before_head":"bang"}`, "close_before_head must be")
	f(`{"health_status":200}`, "between 400 and 599")
	f(`{"status":600}`, "between 400 and 599")
	f(`{"fail_requests":-1}`, "fail_requests must not")
	f(`{"refuse_ms":-1}`, "refuse_ms must be")
	f(`{"break":"x"}`, "break must be")
	f(`{"brake":"fin"}`, "brake is unknown")
	f(`[]`, "wrong type")
	if s.Faults() != (Faults{}) {
		t.Errorf("refused faults are there: %+v", s.Faults())
	}
}

// TestRaw: bytes that look like the end of a body arrive whole, however the
// writes are cut, and the connection is used again.
func TestRaw(t *testing.T) {
	s, c := start(t, Config{ZeroLatency: true}), client(t)
	fakes := 0
	for seed := range uint64(40) {
		raw := Raw{Seed: seed, Chunks: 50, Max: 1 + int(seed)*200, Split: seed%2 == 0, Length: []string{"chunked", "fixed", ""}[seed%3]}
		want := AppendRaw(nil, raw)
		fakes += bytes.Count(want, []byte("0\r\n\r\n"))
		inBody, err := json.Marshal(map[string]any{"seed": raw.Seed, "chunks": raw.Chunks, "max": raw.Max, "split": raw.Split, "length": raw.Length})
		if err != nil {
			t.Fatal(err)
		}
		query := fmt.Sprintf("/sim/raw?seed=%d&chunks=%d&max=%d&length=%s&split=%d", raw.Seed, raw.Chunks, raw.Max, raw.Length, 1-seed%2)
		for _, res := range []*http.Response{
			post(t, c, s, query, ""),
			post(t, c, s, "/v1/chat/completions", fmt.Sprintf(`{"messages":[],"vllm_xargs":{"sim_raw":%s}}`, inBody)),
		} {
			if got := readAll(t, res); !bytes.Equal(got, want) {
				t.Fatalf("%+v: %d bytes arrived, want %d", raw, len(got), len(want))
			}
			if fixed := res.ContentLength >= 0; fixed != (raw.Length == "fixed") {
				t.Fatalf("%+v: Content-Length %d", raw, res.ContentLength)
			}
		}
	}
	if fakes < 100 {
		t.Errorf("only %d fake ends", fakes)
	}
	if s.Accepted() != 2 {
		t.Errorf("%d connections, want the two used in turn", s.Accepted())
	}
}

func TestRawFailure(t *testing.T) {
	s, c := start(t, Config{}), client(t)
	f := func(query, want string) {
		t.Helper()
		res := post(t, c, s, "/sim/raw?"+query, "")
		if body := readAll(t, res); res.StatusCode != 400 || !bytes.Contains(body, []byte(want)) {
			t.Errorf("%s: %d %s, want %s", query, res.StatusCode, body, want)
		}
	}
	f("chunks=-1", "chunks")
	f("chunks=two", "chunks")
	f("max=0", "max at least 1")
	f("chunks=1000000&max=1000000", "chunks times max")
	f("length=long", "length must be chunked or fixed")
	f("break=bang", "break must be")
	f("break=error", "no break")
	f("break=chunk&length=fixed", "no break")
	f("interval_us=999999999999", "interval_us")
}

// TestWhichAreHit: the faults spare some requests first, hit so many, and of
// those that they may hit some by chance.
func TestWhichAreHit(t *testing.T) {
	f := func(faults Faults, want string) {
		t.Helper()
		s := start(t, Config{ZeroLatency: true})
		faults.Status = 503
		if err := s.SetFaults(faults); err != nil {
			t.Fatal(err)
		}
		set, got := s.faults.Load(), ""
		for range want {
			switch may, hit := set.peek().Status != 0, set.take().Status != 0; {
			case hit:
				got += "x"
			case may:
				got += "-"
			default:
				got += "."
			}
		}
		if got != want {
			t.Errorf("%+v: %s, want %s", faults, got, want)
		}
	}
	f(Faults{}, "xxxxx")
	f(Faults{FailRequests: 2}, "xx...")
	f(Faults{AfterRequests: 2}, "..xxx")
	f(Faults{AfterRequests: 1, FailRequests: 2}, ".xx..")
	f(Faults{AfterMS: 3600_000}, ".....")
	f(Faults{ForMS: 3600_000}, "xxxxx")
	// What chance spares is no hit.
	f(Faults{Probability: 0.5, Seed: 1, FailRequests: 3}, "---xx---x.")

	set := faultSet{Faults: Faults{Status: 500, Probability: 0.2}}
	n := 0
	for range 10_000 {
		if set.take().Status != 0 {
			n++
		}
	}
	if n < 1800 || n > 2200 {
		t.Errorf("%d of 10000 are hit with a probability of 0.2", n)
	}
}

// TestThrottle: the engine becomes slow, and fast again, when it is time or when
// so many requests have come, and stays slow through a restart.
func TestThrottle(t *testing.T) {
	s, c := start(t, Config{TimePerOutputToken: time.Millisecond, Faults: Faults{Throttle: 3, AfterRequests: 1, FailRequests: 1}}), client(t)
	for i, want := range []float64{1, 3, 1} {
		readAll(t, post(t, c, s, "/v1/completions", `{"prompt":"x","max_tokens":2}`))
		if got := s.Stats().Throttled; got != want {
			t.Errorf("with request %d it is throttled by %v, want %v", i, got, want)
		}
	}
	set := func(body string) {
		t.Helper()
		if res := post(t, c, s, "/sim/faults", body); res.StatusCode != http.StatusOK {
			t.Fatalf("%s: %s", body, readAll(t, res))
		}
	}
	throttled := func(by float64) func() bool { return func() bool { return s.Stats().Throttled == by } }
	set(`{"throttle":4,"after_ms":50,"for_ms":200}`)
	eventually(t, 20*time.Second, "it is throttled", throttled(4))
	eventually(t, 20*time.Second, "it is not any more", throttled(1))
	set(`{"throttle":5}`)
	if err := s.Restart(); err != nil || !throttled(5)() {
		t.Errorf("after a restart it is throttled by %v, %v", s.Stats().Throttled, err)
	}
	// Work that goes on is slow too: 100 tokens that have begun at a millisecond
	// each are not there before 20 times that.
	set(`{}`)
	res := post(t, c, s, "/v1/completions", `{"prompt":"x","max_tokens":100,"stream":true}`)
	began := time.Now()
	if _, err := io.ReadFull(res.Body, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	set(`{"throttle":20}`)
	left := 100 - time.Since(began).Milliseconds()
	readAll(t, res)
	if d := time.Since(began); left > 20 && d < time.Duration(left)*10*time.Millisecond {
		t.Errorf("all was there after %v", d)
	}
	// Faults that wait for their time keep no server from its end.
	set(`{"throttle":2,"after_ms":3600000}`)
}

// TestFaultsMerge: POST replaces the faults, PATCH changes some of them.
func TestFaultsMerge(t *testing.T) {
	s, c := start(t, Config{ZeroLatency: true}), client(t)
	send := func(method, body string, want Faults) {
		t.Helper()
		req, err := http.NewRequest(method, s.URL()+"/sim/faults", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		res, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		var got Faults
		if err := json.NewDecoder(res.Body).Decode(&got); err != nil || got != want || s.Faults() != want {
			t.Errorf("%s %s: %+v, %v, want %+v", method, body, got, err, want)
		}
	}
	send("POST", `{"slow":2,"metrics":"stale"}`, Faults{Slow: 2, Metrics: "stale"})
	send("PATCH", `{"metrics":"","status":500}`, Faults{Slow: 2, Status: 500})
	send("POST", `{"status":501}`, Faults{Status: 501})
	send("PATCH", `{}`, Faults{Status: 501})
}

// TestMetricsFail: the pages that tell of load are of no use.
func TestMetricsFail(t *testing.T) {
	page := func(s *Server, path string) string { return get(t, client(t), s, path) }
	f := func(engine, path, fault string, check func(before, after string) bool) {
		t.Helper()
		s := start(t, Config{ZeroLatency: true, Engine: engine})
		before := page(s, path)
		if res := post(t, client(t), s, "/sim/faults", fault); res.StatusCode != http.StatusOK {
			t.Fatal(res.Status)
		}
		page(s, path)
		readAll(t, post(t, client(t), s, "/v1/completions", `{"prompt":"a b c"}`))
		if after := page(s, path); !check(before, after) {
			t.Errorf("%s of %s with %s:\n%s", path, engine, fault, after)
		}
	}
	same := func(before, after string) bool { return before == after }
	f("vllm", "/metrics", `{"metrics":"stale"}`, same)
	f("vllm", "/metrics", `{"metrics":"stale","after_ms":3600000}`, func(before, after string) bool { return before != after })
	f("sglang", "/metrics", `{"metrics":"stale"}`, same)
	f("vllm", "/metrics", `{"metrics":"empty"}`, func(_, after string) bool { return after == "" })
	f("vllm", "/metrics", `{"metrics":"garbage"}`, func(_, after string) bool { return !strings.Contains(after, "vllm:") && after != "" })
	f("sglang", "/v1/loads", `{"metrics":"garbage"}`, func(_, after string) bool { return !json.Valid([]byte(after)) })
	f("vllm", "/metrics", `{"metrics":"nan"}`, func(before, after string) bool {
		return strings.Contains(after, "} NaN\n") && !strings.Contains(after, "} 0\n") && strings.Count(before, "\n") == strings.Count(after, "\n")
	})
	f("sglang", "/v1/loads", `{"metrics":"nan"}`, func(_, after string) bool { return strings.Contains(after, `"num_running_reqs":NaN`) })
	f("vllm", "/metrics", `{"metrics_missing":"vllm:num_requests_running,vllm:time_to_first_token_seconds"}`, func(_, after string) bool {
		return !strings.Contains(after, "num_requests_running") && !strings.Contains(after, "time_to_first") &&
			strings.Contains(after, "vllm:num_requests_waiting{") && strings.Contains(after, "vllm:prompt_tokens_total{")
	})

	s := start(t, Config{ZeroLatency: true, Faults: Faults{Metrics: "hang"}})
	c := &http.Client{Timeout: 50 * time.Millisecond}
	if _, err := c.Get(s.URL() + "/metrics"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a page that hangs: %v", err)
	}
	if body := page(s, "/version"); !strings.Contains(body, "version") {
		t.Errorf("another page: %s", body)
	}
}

// TestStats: the same words for each engine.
func TestStats(t *testing.T) {
	// TGI keeps single tokens, and the last one is computed always.
	for engine, want := range map[string]RankStats{"vllm": {HitTokens: 8, BlockSize: 4}, "sglang": {HitTokens: 8, BlockSize: 4}, "tgi": {HitTokens: 9, BlockSize: 1}} {
		s, c := start(t, Config{Engine: engine, DataParallelSize: 1, BlockSize: 4, TimePerOutputToken: time.Millisecond}), client(t)
		const body = `{"prompt":"a b c d e f g h i j","max_tokens":3}`
		for range 2 {
			readAll(t, post(t, c, s, "/v1/completions", body))
		}
		var got Stats
		eventually(t, 20*time.Second, "both are counted", func() bool {
			got = Stats{}
			return json.Unmarshal([]byte(get(t, c, s, "/sim/stats")), &got) == nil && got.Finished == 2
		})
		r := got.Ranks[0]
		if got.Engine != engine || len(got.Ranks) != 1 || r.Sequences != 2 || r.PromptTokens != 20 || r.OutputTokens != 6 ||
			r.Running != 0 || r.QueriedTokens != 20 || r.HitTokens != want.HitTokens || r.BlockSize != want.BlockSize || r.BlocksTotal < 1 || r.Blocks != 0 && engine != "sglang" {
			t.Errorf("%+v", got)
		}
	}
}
