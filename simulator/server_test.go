package simulator

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// start returns a server that ends with the test.
func start(t testing.TB, cfg Config) *Server {
	t.Helper()
	s, err := Start(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return s
}

// client returns a client with connections of its own, closed with the test.
func client(t testing.TB) *http.Client {
	transport := &http.Transport{MaxIdleConnsPerHost: 1000}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: time.Minute}
}

func post(t testing.TB, c *http.Client, s *Server, path, body string) *http.Response {
	t.Helper()
	req, err := http.NewRequest("POST", s.URL()+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Id", "test")
	res, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { res.Body.Close() })
	return res
}

func readAll(t testing.TB, res *http.Response) []byte {
	t.Helper()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatalf("after %d bytes: %v", len(body), err)
	}
	return body
}

// eventually waits until what holds.
func eventually(t testing.TB, within time.Duration, what string, holds func() bool) {
	t.Helper()
	deadline := time.Now().Add(within)
	for !holds() {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", within, what)
		}
		time.Sleep(100 * time.Microsecond)
	}
}

// TestHTTP compares whole answers byte for byte.
func TestHTTP(t *testing.T) {
	testAnswers(t, "testdata/http", Config{ZeroLatency: true, Created: 1700000000, ServedModelName: []string{"m", "alias"},
		MaxModelLen: 1000, DefaultOutputTokens: 3, APIKey: "k"})
}

// testAnswers runs the exchanges in a folder, each file with a server of its
// own. The chunked answers are shown as the chunks that arrived, one a line.
func testAnswers(t *testing.T, folder string, cfg Config) {
	datadriven.Walk(t, folder, func(t *testing.T, path string) {
		s := start(t, cfg)
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			target, headers := d.CmdArgs[0].Key, ""
			if v := d.CmdArgs[0].Vals; len(v) > 0 {
				target += "=" + v[0]
			}
			for _, arg := range d.CmdArgs[1:] {
				headers += arg.Key + ": " + arg.Vals[0] + "\r\n"
			}
			if !d.HasArg("Authorization") {
				headers += "Authorization: Bearer k\r\n"
			}
			return latency.ReplaceAllString(rawExchange(t, s, fmt.Sprintf("%s %s HTTP/1.1\r\nHost: sim\r\nX-Request-Id: r\r\n%sContent-Length: %d\r\nConnection: close\r\n\r\n%s",
				d.Cmd, target, headers, len(d.Input), d.Input)), `"e2e_latency":#`)
		})
	})
}

// rawExchange sends the bytes of one request and returns the status, the
// headers that matter and the body.
func rawExchange(t *testing.T, s *Server, request string) string {
	t.Helper()
	c, err := net.Dial("tcp", s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.WriteString(c, request); err != nil {
		t.Fatal(err)
	}
	res := bufio.NewReader(c)
	var out strings.Builder
	chunked := false
	for i := 0; ; i++ {
		line, err := res.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		line = strings.TrimSpace(line)
		if line == "" {
			break
		}
		name, value, _ := strings.Cut(line, ": ")
		switch {
		case i == 0 || name == "Content-Type" || name == "Allow" || name == "Server":
			out.WriteString(line + "\n")
		case name == "Transfer-Encoding":
			chunked = value == "chunked"
		}
	}
	for chunked {
		var size int
		if _, err := fmt.Fscanf(res, "%x\r\n", &size); err != nil {
			t.Fatal(err)
		}
		chunk := make([]byte, size+2)
		if _, err := io.ReadFull(res, chunk); err != nil {
			t.Fatal(err)
		}
		if size == 0 {
			return out.String()
		}
		if !strings.HasSuffix(string(chunk), "\n\n\r\n") {
			t.Fatalf("a chunk that is not one event: %q", chunk)
		}
		out.Write(chunk[:size-1])
	}
	body, err := io.ReadAll(res)
	if err != nil {
		t.Fatal(err)
	}
	return out.String() + string(body) + "\n"
}

// parsed is a chunk or a body as an OpenAI client reads it.
type parsed struct {
	ID, Object, Model string
	Choices           []struct {
		Index          int
		Text           string
		Delta, Message struct {
			Role    string
			Content string
		}
		FinishReason *string `json:"finish_reason"`
	}
	Usage *struct {
		PromptTokens     int `json:"prompt_tokens"`
		CompletionTokens int `json:"completion_tokens"`
		TotalTokens      int `json:"total_tokens"`
	}
}

// parseStream reads server-sent events as the official clients do.
func parseStream(t testing.TB, r io.Reader) (events []parsed) {
	t.Helper()
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 4<<20)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		switch {
		case lines.Text() == "":
		case !ok:
			t.Fatalf("not an event: %q", lines.Text())
		case data == "[DONE]":
			if lines.Scan(); lines.Text() != "" || lines.Scan() {
				t.Fatalf("after the end: %q", lines.Text())
			}
			return events
		default:
			var p parsed
			if err := json.Unmarshal([]byte(data), &p); err != nil {
				t.Fatalf("%q: %v", data, err)
			}
			events = append(events, p)
		}
	}
	t.Fatalf("no [DONE] after %d events: %v", len(events), lines.Err())
	return nil
}

func TestStreamSaysWhatIsExpected(t *testing.T) {
	cfg := Config{ZeroLatency: true, Seed: 7, Created: 1}
	s, c := start(t, cfg), client(t)
	f := func(path, body string) {
		t.Helper()
		want, err := Expect(cfg, path, []byte(body))
		if err != nil {
			t.Fatal(err)
		}
		got := make([]string, len(want))
		tokens, ended := 0, 0
		var usage *parsed
		for _, e := range parseStream(t, post(t, c, s, path, body).Body) {
			if e.Usage != nil && len(e.Choices) == 0 {
				usage = &e
			}
			for _, choice := range e.Choices {
				piece := choice.Delta.Content + choice.Text
				got[choice.Index] += piece
				if piece != "" {
					tokens++
				}
				if choice.FinishReason != nil {
					ended++
				}
			}
		}
		if !slices.Equal(got, want) {
			t.Fatalf("%s %s:\ngot  %q\nwant %q", path, body, got, want)
		}
		if ended != len(want) {
			t.Fatalf("%s %s: %d choices ended of %d", path, body, ended, len(want))
		}
		if usage == nil || usage.Usage.CompletionTokens != tokens || usage.Usage.TotalTokens != usage.Usage.PromptTokens+tokens {
			t.Fatalf("%s %s: %d tokens, usage %+v", path, body, tokens, usage)
		}
		whole, err := ExpectBody(cfg, path, "test", []byte(body))
		if err != nil {
			t.Fatal(err)
		}
		if got := readAll(t, post(t, c, s, path, body)); !bytes.Equal(got, whole) {
			t.Fatalf("%s %s:\ngot  %q\nwant %q", path, body, got, whole)
		}
	}
	const tail = `"stream":true,"stream_options":{"include_usage":true}`
	f("/v1/chat/completions", `{"messages":[{"role":"user","content":"hello"}],`+tail+`}`)
	f("/v1/chat/completions", `{"messages":[{"role":"user","content":null}],"max_tokens":1,`+tail+`}`)
	f("/v1/chat/completions", `{"messages":[{"role":"user","content":[{"type":"text","text":"hi"},{"type":"image_url","image_url":{"url":"data:x"}}]}],"n":3,"max_completion_tokens":5,"max_tokens":9,`+tail+`}`)
	f("/v1/completions", `{"prompt":"once upon a time",`+tail+`}`)
	f("/v1/completions", `{"prompt":["a","b"],"n":2,"max_tokens":4,`+tail+`}`)
	f("/v1/completions", `{"prompt":[1,2,3],"max_tokens":200,`+tail+`}`)
	f("/v1/completions", `{"prompt":[[1,2,3],[4]],"max_tokens":2,`+tail+`}`)
	f("/v1/completions", `{"prompt":"padded","max_tokens":50,"vllm_xargs":{"sim":{"token_bytes":10,"token_bytes_max":5000,"split_writes":true}},`+tail+`}`)
}

// A prompt costs 300 ms whatever its length, a token 50 ms. Nothing comes early, and on
// a machine that has the time nothing comes late; a busy one may have several tries.
func TestTimes(t *testing.T) {
	cfg := Config{PrefillD: 300000, TimePerOutputToken: 50 * time.Millisecond}
	s, c := start(t, cfg), client(t)
	const late, tries = 150 * time.Millisecond, 8
	answers := 0
	for try := 1; ; try++ {
		var off []time.Duration
		began := time.Now()
		after := func(want time.Duration) {
			t.Helper()
			d := time.Since(began) - want
			if d < 0 {
				t.Errorf("%v early for %v", -d, want)
			}
			off = append(off, d)
		}
		res := post(t, c, s, "/v1/chat/completions", `{"messages":[],"max_tokens":5,"stream":true}`)
		after(0) // the head
		lines := bufio.NewReader(res.Body)
		for events := []time.Duration{300, 300, 350, 400, 450, 500}; len(events) > 0; {
			line, err := lines.ReadString('\n')
			if err != nil {
				t.Fatal(err)
			}
			if strings.HasPrefix(line, "data: {") {
				after(events[0] * time.Millisecond)
				events = events[1:]
			}
		}
		readAll(t, res)
		began = time.Now()
		readAll(t, post(t, c, s, "/v1/chat/completions", `{"messages":[],"max_tokens":5}`))
		after(500 * time.Millisecond)
		if answers += 2; slices.Max(off) <= late {
			break
		}
		if try == tries {
			t.Fatalf("in none of %d tries all came in time; in the last they came so late: %v", tries, off)
		}
	}
	// An engine that holds the head back answers with it and the first token.
	began := time.Now()
	post(t, c, s, "/v1/chat/completions", `{"messages":[],"max_tokens":1,"stream":true,"vllm_xargs":{"sim":{"head_with_token":true}}}`)
	if d := time.Since(began); d < 300*time.Millisecond {
		t.Errorf("held head after %v, want 300 ms", d)
	}
	eventually(t, 20*time.Second, "all finished", func() bool { return s.Finished() == answers+1 && s.Running() == 0 && s.Aborted() == 0 })
}

// TestClientLeaves: the slot of a client that leaves is free with the end of the step,
// for the one that waits and in every count.
func TestClientLeaves(t *testing.T) {
	s := start(t, Config{PrefillD: 1000, TimePerOutputToken: 50 * time.Millisecond, MaxNumSeqs: 1})
	// leave sends a request on a connection of its own.
	leave := func(body string) net.Conn {
		t.Helper()
		conn, err := net.Dial("tcp", s.Addr())
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(conn, "POST /v1/completions HTTP/1.1\r\nHost: sim\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
		return conn
	}
	for _, body := range []string{`{"prompt":"x","max_tokens":20000,"stream":true}`, `{"prompt":"x","max_tokens":20000}`} {
		first := leave(body)
		eventually(t, 20*time.Second, "first runs", func() bool { return s.Load().Running == 1 })
		second := leave(`{"prompt":"y","max_tokens":1}`)
		eventually(t, 20*time.Second, "second waits", func() bool { return s.Load().Waiting == 1 })
		began := time.Now()
		first.Close()
		status, err := bufio.NewReader(second).ReadString('\n')
		if err != nil || !strings.Contains(status, "200") {
			t.Fatalf("%q, %v", status, err)
		}
		if d := time.Since(began); d > 20*time.Second { // the first has 1000 s to go
			t.Errorf("the next answer came after %v", d)
		}
		second.Close()
		eventually(t, 20*time.Second, "nothing left", func() bool { return s.Running() == 0 && s.Load() == Load{} })
	}
	if s.Aborted() != 2 || s.Finished() != 2 {
		t.Errorf("aborted %d, finished %d, want 2 and 2", s.Aborted(), s.Finished())
	}
}

// TestClientReadsNothing: a client that reads nothing and then leaves does not
// keep the server in its write.
func TestClientReadsNothing(t *testing.T) {
	s := start(t, Config{ZeroLatency: true})
	conn, err := net.Dial("tcp", s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	const body = `{"prompt":"x","stream":true,"max_tokens":30000,"vllm_xargs":{"sim":{"token_bytes":10000}}}`
	fmt.Fprintf(conn, "POST /v1/completions HTTP/1.1\r\nHost: sim\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	c, last := client(t), ""
	generated := func() string {
		res, err := c.Get(s.URL() + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		_, rest, _ := strings.Cut(string(readAll(t, res)), "\nvllm:generation_tokens_total")
		line, _, _ := strings.Cut(rest, "\n")
		return line[strings.LastIndexByte(line, ' ')+1:]
	}
	eventually(t, 10*time.Second, "the server is blocked", func() bool {
		time.Sleep(50 * time.Millisecond)
		before := last
		last = generated()
		return last != "0" && last == before
	})
	if s.Running() != 1 || last == "30000" {
		t.Fatalf("running %d after %v tokens, want one in the middle of its answer", s.Running(), last)
	}
	// It leaves with a FIN, so that no reset ends the write.
	if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	eventually(t, 20*time.Second, "aborted", func() bool { return s.Running() == 0 && s.Aborted() == 1 })
}

// TestLongTokens: an event longer than net/http's buffer is still one chunk.
func TestLongTokens(t *testing.T) {
	s := start(t, Config{ZeroLatency: true})
	const body = `{"prompt":"x","stream":true,"max_tokens":3,"vllm_xargs":{"sim":{"token_bytes":100000}}}`
	got := rawExchange(t, s, fmt.Sprintf("POST /v1/completions HTTP/1.1\r\nHost: sim\r\nContent-Length: %d\r\n\r\n%s", len(body), body))
	if n := strings.Count(got, "data: "); n != 4 || len(got) < 300000 {
		t.Errorf("%d events in %d bytes", n, len(got))
	}
}

// TestManyLeave: a thousand streams, cut at once, leave nothing behind.
func TestManyLeave(t *testing.T) {
	before := runtime.NumGoroutine()
	// Faster ones would take a busy machine all its time, and leave it none to
	// begin and to end them.
	s, err := Start(Config{PrefillD: 1, TimePerOutputToken: 250 * time.Millisecond, MaxNumSeqs: 2000})
	if err != nil {
		t.Fatal(err)
	}
	const body = `{"prompt":"x","stream":true,"max_tokens":10000}`
	conns := make([]net.Conn, 1000)
	for i := range conns {
		if conns[i], err = net.Dial("tcp", s.Addr()); err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(conns[i], "POST /v1/completions HTTP/1.1\r\nHost: sim\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	}
	eventually(t, time.Minute, "all run", func() bool { return s.Load().Running == len(conns) })
	for _, c := range conns[:500] {
		c.Close()
	}
	eventually(t, time.Minute, "half run", func() bool { return s.Running() == 500 && s.Load().Running == 500 })
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if s.Running() != 0 || s.Aborted() != len(conns) {
		t.Errorf("running %d, aborted %d", s.Running(), s.Aborted())
	}
	for _, c := range conns[500:] {
		c.Close()
	}
	eventually(t, 20*time.Second, "no goroutine left", func() bool { return runtime.NumGoroutine() <= before })
}

func TestIdleConnectionIsClosed(t *testing.T) {
	s := start(t, Config{ZeroLatency: true, TimeoutKeepAliveS: 1})
	conn, err := net.Dial("tcp", s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	io.WriteString(conn, "GET /health HTTP/1.1\r\nHost: sim\r\n\r\n")
	began := time.Now()
	conn.SetReadDeadline(began.Add(5 * time.Second))
	got, err := io.ReadAll(conn)
	if d := time.Since(began); err != nil || d < 900*time.Millisecond || !strings.HasPrefix(string(got), "HTTP/1.1 200") || !strings.HasSuffix(string(got), "\r\n\r\n") {
		t.Errorf("%q, %v after %v", got, err, d)
	}
}

func TestMetrics(t *testing.T) {
	s, c := start(t, Config{PrefillD: 1, TimePerOutputToken: time.Hour, BlockSize: 10, NumGPUBlocks: 10}), client(t)
	readAll(t, post(t, c, s, "/v1/completions", `{"prompt":"one two three","max_tokens":1}`))
	post(t, c, s, "/v1/completions", `{"prompt":[1,2,3,4,5,6,7,8,9],"stream":true}`)
	eventually(t, 20*time.Second, "the first token of the second", func() bool { return s.Load().Tokens == 10 })
	eventually(t, 20*time.Second, "its event", func() bool {
		res, err := c.Get(s.URL() + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		page := string(readAll(t, res))
		if !strings.Contains(page, `vllm:generation_tokens_total{engine="0",model_name="sim"} 2`) {
			return false
		}
		for _, want := range []string{
			`vllm:num_requests_running{engine="0",model_name="sim"} 1`,
			`vllm:num_requests_waiting{engine="0",model_name="sim"} 0`,
			`vllm:kv_cache_usage_perc{engine="0",model_name="sim"} 0.2222222222222222`,
			`vllm:prompt_tokens_total{engine="0",model_name="sim"} 12`,
			`vllm:request_success_total{engine="0",finished_reason="length",model_name="sim"} 1`,
			`vllm:time_to_first_token_seconds_count{engine="0",model_name="sim"} 2`,
			`vllm:inter_token_latency_seconds_bucket{engine="0",model_name="sim",le="0.025"} 0`,
			`vllm:prefix_cache_queries_total{engine="0",model_name="sim"} 12`,
			`vllm:cache_config_info{block_size="10",`,
			`process_start_time_seconds `,
		} {
			if !strings.Contains(page, want+"\n") && !strings.Contains(page, "\n"+want) {
				t.Fatalf("no %s in\n%s", want, page)
			}
		}
		return true
	})
}

func TestManyStreams(t *testing.T) {
	cfg := Config{PrefillD: 10, TimePerOutputToken: 5 * time.Millisecond, MaxNumSeqs: 1000}
	s, c := start(t, cfg), client(t)
	var all sync.WaitGroup
	for i := range 200 {
		all.Go(func() {
			body := fmt.Sprintf(`{"messages":[{"role":"user","content":"%d"}],"max_tokens":20,"stream":true}`, i)
			want, err := Expect(cfg, "/v1/chat/completions", []byte(body))
			if err != nil {
				t.Error(err)
				return
			}
			res, err := c.Post(s.URL()+"/v1/chat/completions", "application/json", strings.NewReader(body))
			if err != nil {
				t.Error(err)
				return
			}
			defer res.Body.Close()
			got := ""
			for _, e := range parseStream(t, res.Body) {
				got += e.Choices[0].Delta.Content
			}
			if got != want[0] {
				t.Errorf("got %q, want %q", got, want[0])
			}
		})
	}
	all.Wait()
	eventually(t, 20*time.Second, "all finished", func() bool { return s.Finished() == 200 && s.Load() == Load{} })
}

func TestConfigFailure(t *testing.T) {
	f := func(cfg Config, want string) {
		t.Helper()
		s, err := Start(cfg)
		if err == nil {
			s.Close()
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	f(Config{Port: 70000}, "port must be between 0 and 65535, got 70000")
	f(Config{MaxNumSeqs: -1}, "max-num-seqs must be at least 1, got -1")
	f(Config{MaxModelLen: 1, BlockSize: -1}, "block-size")
	f(Config{PrefillA: -1}, "prefill-a")
	f(Config{TimePerOutputToken: -1}, "time-per-output-token must not be negative")
	f(Config{Engine: "tgi", HicacheRatio: 2}, "host-blocks and hicache-ratio are for the engines vllm and sglang")
	f(Config{Engine: "sglang", HicacheRatio: -1}, "hicache-ratio must be between 0 and 1000, got -1")
	f(Config{Engine: "tgi", MaxConcurrentRequests: -1}, "max-concurrent-requests must be at least 1")
	f(Config{Engine: "tgi", MaxModelLen: 100, MaxInputTokens: 100}, "max-input-tokens must be between 1 and max-model-len - 1 = 99")
	f(Config{Faults: Faults{Probability: 2}}, "probability must be between 0 and 1")
	f(Config{Faults: Faults{Metrics: "bad"}}, "metrics must be garbage, stale, hang, empty or nan")
	f(Config{Faults: Faults{Break: "bang"}}, `break must be stall, fin, rst, chunk or error, not "bang"`)
	f(Config{Host: "not an address"}, "not an address")
	s := start(t, Config{})
	var port int
	fmt.Sscanf(s.Addr(), "127.0.0.1:%d", &port)
	f(Config{Port: port}, "address already in use")
}
