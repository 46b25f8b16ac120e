package agent

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// manyReplicas is a fleet of n replicas behind one server, which answers each at an
// address of its own: what it costs to tell of them does not depend on what they do.
func manyReplicas(t testing.TB, n int) Config {
	t.Helper()
	listener, err := net.Listen("tcp4", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/v1/models":
			io.WriteString(w, `{"object":"list","data":[{"id":"m","object":"model","created":1,"owned_by":"x"}]}`)
		case r.URL.Path == "/metrics":
			io.WriteString(w, "vllm:num_requests_running{model_name=\"m\"} 3\nvllm:num_requests_waiting{model_name=\"m\"} 1\nvllm:kv_cache_usage_perc{model_name=\"m\"} 0.25\n")
		case r.Method == http.MethodPost:
			w.Header().Set("Content-Type", "text/event-stream")
			for range 4 {
				io.WriteString(w, "data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n")
				w.(http.Flusher).Flush()
			}
			io.WriteString(w, "data: [DONE]\n\n")
		case r.URL.Path != "/health":
			http.NotFound(w, r)
		}
	})}
	go server.Serve(listener)
	t.Cleanup(func() { server.Close() })
	c := DefaultConfig()
	c.Listen, c.AdminListen = "127.0.0.1:0", "127.0.0.1:0"
	c.Datapath.Mode = "copy"
	c.Health.Interval, c.Health.Timeout = time.Minute, 10*time.Second
	c.Load.Interval, c.Load.MaxAge = 2*time.Second, time.Minute
	c.Models = []ModelConfig{{Name: "m", Policy: "round_robin"}}
	for i := range n {
		c.Replicas = append(c.Replicas, ReplicaConfig{ID: fmt.Sprintf("gpu-%04d", i), Engine: "vllm",
			URL: fmt.Sprintf("http://127.1.%d.%d:%d", i/200, 1+i%200, listener.Addr().(*net.TCPAddr).Port)})
	}
	return c
}

func overviewPage(t testing.TB, a *Agent, query string) (o overview) {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}
	resp, err := client.Get("http://" + a.AdminAddr().String() + "/debug/overview" + query)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &o); err != nil || resp.StatusCode != 200 {
		t.Fatalf("status %d, %v in %s", resp.StatusCode, err, text)
	}
	return o
}

// What has happened is in the row that is made then, and in none later; the replicas'
// rows tell who did it.
func TestOverview(t *testing.T) {
	a := startAgent(t, testConfig(startEngine(t, 0, "m"), startEngine(t, 0, "m")))
	defer stopped(t, a)
	a.stop() // its own looks
	a.following.Wait()
	at := a.history.lastAt
	tick := func() (row map[string]float64) {
		t.Helper()
		at = at.Add(2 * time.Second)
		a.lookOver(at)
		rows := a.history.since(0)
		row = map[string]float64{}
		for i, v := range rows[len(rows)-1] {
			if v != nil {
				row[historyColumns[i]] = *v
			}
		}
		if len(rows[len(rows)-1]) != len(historyColumns) {
			t.Fatalf("a row of %d numbers for %d columns", len(rows[len(rows)-1]), len(historyColumns))
		}
		return row
	}
	tick()
	for range 4 {
		if _, err := io.ReadAll(ask(t, a, 5).Body); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, func() bool { return a.proxy.Totals().Finished == 4 }, func() string { return "not all are counted" })
	o := overviewPage(t, a, "")
	row := tick()
	if row["requests_per_s"] != 2 || row["first_tokens_per_s"] != 2 || row["failed_per_s"] != 0 || row["up"] != 2 || row["running"] != 0 {
		t.Errorf("%v", row)
	}
	if _, ok := row["first_token_p50_ms"]; !ok || row["first_token_p99_ms"] < row["first_token_p50_ms"] || row["tokens_per_s"] < 8 || row["prompt_tokens_per_s"] != 0 {
		t.Errorf("%v", row)
	}
	if row = tick(); row["requests_per_s"] != 0 || row["tokens_per_s"] != 0 {
		t.Errorf("%v of an idle step", row)
	}
	if _, ok := row["first_token_p50_ms"]; ok {
		t.Errorf("%v of an idle step", row)
	}
	if len(o.Replicas) != 2 || o.States["up"] != 2 || o.Tier != "copy" || len(o.Models) != 1 || o.Models[0].Replicas != 2 || len(o.Degraded) != 0 {
		t.Fatalf("%+v", o)
	}
	first := 0
	for _, r := range o.Replicas {
		first += r.FirstTokens
		if r.State != "up" || len(r.Models) != 1 || r.Share != 1 || r.FirstTokens > 0 && (r.FirstTokenP50MS == nil || *r.FirstTokenP99MS < *r.FirstTokenP50MS) {
			t.Errorf("%+v", r)
		}
	}
	if first != 4 {
		t.Errorf("%d first tokens at %+v", first, o.Replicas)
	}
	rows := a.history.since(0)
	last := *rows[len(rows)-1][0]
	if o := overviewPage(t, a, fmt.Sprintf("?replicas=0&after=%.3f", last)); len(o.History) != 0 || o.Replicas != nil {
		t.Errorf("%+v", o)
	}
	if status, _ := page(t, a, "/debug/overview?after=x"); status != 400 {
		t.Errorf("status %d", status)
	}
	// Only the last five minutes stay.
	for range 2 * overviewKept {
		tick()
	}
	if rows := a.history.since(0); len(rows) != overviewKept || *rows[0][0] >= *rows[1][0] {
		t.Errorf("%d rows", len(rows))
	}
}

// What a fleet of a thousand costs to look at.
func BenchmarkOverview1000(b *testing.B) { benchmarkPage(b, "/debug/overview") }

// BenchmarkMetrics1000 is a scrape of a fleet of a thousand that has served.
func BenchmarkMetrics1000(b *testing.B) { benchmarkPage(b, "/metrics") }

func benchmarkPage(b *testing.B, path string) {
	c := manyReplicas(b, 1000)
	a, err := Start(b.Context(), c, testLog(b))
	if err != nil {
		b.Fatal(err)
	}
	client := &http.Client{}
	for range 2000 {
		resp, err := client.Post("http://"+a.Addr().String()+"/v1/chat/completions", "application/json",
			strings.NewReader(`{"model":"m","stream":true,"max_tokens":4,"messages":[{"role":"user","content":"hi"}]}`))
		if err != nil {
			b.Fatal(err)
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
	for name, fields := range map[string][]string{"plain": {"Accept-Encoding", "identity"}, "gzip": {"Accept-Encoding", "gzip"},
		"openmetrics": {"Accept", "application/openmetrics-text", "Accept-Encoding", "identity"}} {
		b.Run(name, func(b *testing.B) {
			size := int64(0)
			for b.Loop() {
				req, _ := http.NewRequest("GET", "http://"+a.AdminAddr().String()+path, nil)
				for i := 0; i < len(fields); i += 2 {
					req.Header.Set(fields[i], fields[i+1])
				}
				resp, err := client.Do(req)
				if err != nil {
					b.Fatal(err)
				}
				size, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
			b.ReportMetric(float64(size), "B/page")
		})
	}
	if err := a.Stop(b.Context()); err != nil {
		b.Error(err)
	}
}
