package agent

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"flag"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/inferrail/inferrail/bpf"
	"github.com/inferrail/inferrail/index/kvevent"
	"github.com/inferrail/inferrail/proxy"
	"github.com/inferrail/inferrail/simulator"
)

// carriedSample shows what the kernel's counters would, on machines that have no
// packet tier.
type carriedSample struct{}

func (carriedSample) Describe(chan<- *prometheus.Desc) {}

func (carriedSample) Collect(ch chan<- prometheus.Metric) {
	collectCarried(ch, bpf.Census{}, map[string]*bpf.EngineCounters{"r0": {
		Refusals: map[string]uint64{bpf.Why(1).String(): 1}, Pauses: map[string]uint64{bpf.Why(1).String(): 1}}})
}

// everything is an agent with all that has metrics, after some traffic: keys and a
// limit, TLS, discovery, KV events, exact prompts, admission, shadows, a decision log,
// a replica that fails, and two slow ones, for which requests are held back and where long
// prompts are computed in pieces, and what many begin with ahead.
func everything(t *testing.T) *Agent {
	t.Helper()
	events := newGoPublisher(t, kvevent.VLLM)
	broken := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/health":
		case "/v1/models":
			io.WriteString(w, `{"data":[{"id":"m"}]}`)
		default:
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	t.Cleanup(broken.Close)
	e, err := simulator.Start(simulator.Config{ServedModelName: []string{"m"}, ZeroLatency: true, EnablePromptTokensDetails: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })

	const free = "tcp://127.0.0.1:0"
	var slow [2]*simulator.Server
	for i := range slow {
		if slow[i], err = simulator.Start(simulator.Config{ServedModelName: []string{"slow", "common"}, KVEvents: simulator.KVEvents{Endpoint: free, ReplayEndpoint: free}}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { slow[i].Close() })
	}

	c := testConfig(e, slow[0], slow[1])
	c.Replicas[0].KVEvents = KVEventsConfig{Endpoint: "tcp://" + events.events, ReplayEndpoint: "tcp://" + events.replay}
	c.Replicas = append(c.Replicas, ReplicaConfig{ID: "broken", URL: broken.URL})
	c.Models = []ModelConfig{{Name: "m", Tokenizer: "builtin:sim", Policy: "round_robin", Shadows: []ShadowConfig{{Policy: "lmetric"}}},
		{Name: "slow", Tokenizer: "builtin:sim", Policy: "cost_model", Hold: leastHold, Pieces: leastPieces},
		{Name: "common", Tokenizer: "builtin:sim", Policy: "cost_model", Hold: durationOff, Pieces: durationOff, Prewarm: leastPrewarm}}
	// What was observed is not forgotten while the rest is waited for.
	c.Routing.Admission.Budget, c.Routing.Admission.Window = time.Minute, 10*time.Minute
	c.Discovery.DNS = []DNSConfig{{Name: "localhost", Port: 1}}
	c.Decisions = DecisionsConfig{File: filepath.Join(t.TempDir(), "decisions.jsonl"), Sample: 1}
	hash := func(key string) string { sum := sha256.Sum256([]byte(key)); return hex.EncodeToString(sum[:]) }
	c.Server.APIKeys = []KeyConfig{{Name: "team", SHA256: hash("team-key")}, {Name: "limited", SHA256: hash("limited-key"), RequestsPerMinute: 1}}
	c.Server.TLS = tlsFiles(t)
	c.Server.TLS.Listen = "127.0.0.1:0"
	cert, key := pemPair(t, "a", time.Now().Add(time.Hour))
	write(t, c.Server.TLS.CertFile, cert)
	write(t, c.Server.TLS.KeyFile, key)

	a := startAgent(t, c)
	t.Cleanup(func() { stopped(t, a) })
	eventually(t, func() bool { return promptPage(t, a).State == "exact" }, func() string { return "m is not followed" })
	events.do("send 3")
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}
	send := func(key, path, body string) int {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), "POST", "http://"+a.Addr().String()+path, strings.NewReader(body))
		if err != nil {
			t.Error(err)
			return 0
		}
		req.Header.Set("Authorization", "Bearer "+key)
		resp, err := client.Do(req)
		if err != nil {
			t.Error(err)
			return 0
		}
		defer resp.Body.Close()
		io.Copy(io.Discard, resp.Body)
		return resp.StatusCode
	}
	chat := func(more string) string {
		return `{"model":"m","max_tokens":3,` + more + `"messages":[{"role":"user","content":"Tell me of the sea and of the ships, and of those who sail."}]}`
	}
	for range 60 { // one in 16 decisions is timed
		send("team-key", "/v1/chat/completions", chat(`"stream":true,`))
		send("team-key", "/v1/chat/completions", chat(`"stream":true,"stream_options":{"include_usage":true},`))
		send("team-key", "/v1/chat/completions", chat(""))
	}
	// Several long prompts at once: some keep the engines busy, and others are held. And
	// many that begin as one before them, which one engine has cached.
	lacks := func() string {
		for _, name := range []string{"inferrail_held_seconds_count", `inferrail_pieces_total{model="slow",outcome="computed"}`,
			`inferrail_prewarm_total{model="common",outcome="computed"}`} {
			if len(series(t, a, name)) == 0 {
				return name
			}
		}
		return ""
	}
	for round := 0; lacks() != ""; round++ {
		if round == 10 {
			t.Fatalf("no request makes %s", lacks())
		}
		var together sync.WaitGroup
		for i := range 4 {
			together.Go(func() {
				prompt := fmt.Sprint(round, i, strings.Repeat(" the sea and the ships", 1000))
				send("team-key", "/v1/completions", fmt.Sprintf(`{"model":"slow","stream":true,"max_tokens":2,"prompt":%q}`, prompt))
			})
		}
		together.Wait()
		begin := fmt.Sprint("all ", round, strings.Repeat(" begin with this", 1000))
		ask := func(end string) {
			send("team-key", "/v1/completions", fmt.Sprintf(`{"model":"common","stream":true,"max_tokens":2,"prompt":%q}`, begin+end))
		}
		ask("")
		for i := range 4 { // a fifth would compute it at the other engine itself
			together.Go(func() { ask(fmt.Sprint(" ", i, strings.Repeat(" and go on", 200))) })
		}
		together.Wait()
		time.Sleep(200 * time.Millisecond)
	}
	for range 3 {
		send("limited-key", "/v1/chat/completions", chat(""))
	}
	send("wrong-key", "/v1/chat/completions", chat(""))
	send("team-key", "/nowhere", "{}")
	return a
}

// ownFamilies gathers what the agent shows of its own, by name.
func ownFamilies(t *testing.T, list ...prometheus.Collector) map[string]*dto.MetricFamily {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	for _, c := range list {
		if err := registry.Register(c); err != nil {
			t.Fatal(err)
		}
	}
	all, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	own := map[string]*dto.MetricFamily{}
	for _, f := range all {
		if strings.HasPrefix(f.GetName(), "inferrail_") {
			own[f.GetName()] = f
		}
	}
	return own
}

// described are the names of all metrics that collectors say they have.
func described(list []prometheus.Collector) []string {
	ch := make(chan *prometheus.Desc)
	go func() {
		defer close(ch)
		for _, c := range list {
			c.Describe(ch)
		}
	}()
	var names []string
	name := regexp.MustCompile(`fqName: "(inferrail_[^"]*)"`)
	for d := range ch {
		if m := name.FindStringSubmatch(d.String()); m != nil {
			names = append(names, m[1])
		}
	}
	return names
}

func labelsOf(f *dto.MetricFamily) (names []string) {
	for _, l := range f.Metric[0].Label {
		names = append(names, l.GetName())
	}
	return names
}

// TestMetrics: a metric that is renamed, gets another type or other labels breaks
// dashboards and alerts, so that it has to be seen. All that the code describes is
// there, what labels say is among what they may say, and agent/METRICS.md tells it.
func TestMetrics(t *testing.T) {
	a := everything(t)
	all := append(a.collectors(), carriedSample{})
	var got map[string]*dto.MetricFamily
	missing := func() (list []string) {
		got = ownFamilies(t, all...)
		for _, name := range described(a.collectors()) {
			if got[name] == nil {
				list = append(list, name)
			}
		}
		return list
	}
	eventually(t, func() bool { return len(missing()) == 0 }, func() string { return fmt.Sprintf("not seen: %v", missing()) })

	names := slices.Sorted(maps.Keys(got))
	var text strings.Builder
	for _, name := range names {
		f := got[name]
		for _, m := range f.Metric {
			if len(m.Label) != len(f.Metric[0].Label) {
				t.Errorf("%s has series with other labels than others", name)
			}
		}
		fmt.Fprintf(&text, "%s %s {%s}\n    %s\n", name, strings.ToLower(f.GetType().String()), strings.Join(labelsOf(f), ","), f.GetHelp())
		if counter := f.GetType() == dto.MetricType_COUNTER; counter != strings.HasSuffix(name, "_total") {
			t.Errorf("%s is a %v", name, f.GetType())
		}
	}
	datadriven.RunTest(t, "testdata/metrics.txt", func(t *testing.T, d *datadriven.TestData) string { return text.String() })

	// In OpenMetrics a counter's family has its name without the ending.
	bare := map[string]string{}
	for _, name := range names {
		family := strings.TrimSuffix(name, "_total")
		if other := bare[family]; other != "" {
			t.Errorf("%s and %s are one family", name, other)
		}
		bare[family] = name
	}

	values := labelValues()
	for name, labels := range values {
		f := got[name]
		if f == nil {
			t.Errorf("there are values for the labels of %s, which is no metric", name)
			continue
		}
		for label, may := range labels {
			if !slices.Contains(labelsOf(f), label) {
				t.Errorf("there are values for %s of %s, which has no such label", label, name)
			}
			for _, m := range f.Metric {
				for _, l := range m.Label {
					if l.GetName() == label && !slices.Contains(may, l.GetValue()) {
						t.Errorf("%s has %s=%q, which is none of %q", name, label, l.GetValue(), may)
					}
				}
			}
		}
	}
	for _, name := range names {
		for _, label := range labelsOf(got[name]) {
			if values[name][label] == nil && freeLabels[label] == "" && name != "inferrail_build_info" {
				t.Errorf("nothing bounds %s of %s", label, name)
			}
		}
	}

	want := metricsPage(got, values)
	const file = "METRICS.md"
	if f := flag.Lookup("rewrite"); f != nil && f.Value.String() == "true" {
		if err := os.WriteFile(file, want, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if is, err := os.ReadFile(file); err != nil || !bytes.Equal(is, want) {
		t.Errorf("%s is not what the code says (%v); make it anew with: go generate ./agent", file, err)
	}
}

// freeLabels are labels whose values are names, and why there are not too many.
var freeLabels = map[string]string{
	"replica": "the replicas of the fleet; the series of one leave with it",
	"model":   "the models that are served, and `none` for requests that reach none: no series is made for a model that nobody serves, and those of a model leave with it",
	"key":     "the names of `server.api_keys`; the series of one leave with it",
	"class":   "the classes of the configuration",
	"source":  "the sources of discovery in the configuration",
	"policy":  "of shadows: the names that the configuration gives them",
}

// labelValues are the values of all other labels.
func labelValues() map[string]map[string][]string {
	all := proxy.LabelValues()
	// The kernel's reasons come on top of the proxy's.
	responses := all["inferrail_responses_total"]
	responses["reason"] = slices.Concat(responses["reason"], []string{copyForced, copyUnavailable}, bpf.SocketWhys(), bpf.Whys())
	slices.Sort(responses["reason"])
	responses["reason"] = slices.Compact(responses["reason"])
	// A shadow has a name of its own if the configuration gives it one.
	delete(all["inferrail_shadow_decisions_total"], "policy")

	var states, outcomes []string
	for _, s := range standings {
		states = append(states, s.String())
	}
	for o := range loadOutcomes {
		outcomes = append(outcomes, o.String())
	}
	tiers := []string{"packet", "copy"}
	maps.Copy(all, map[string]map[string][]string{
		"inferrail_config_reloads_total":       {"outcome": {"applied", "rejected"}},
		"inferrail_datapath_tier":              {"tier": tiers},
		"inferrail_inter_token_seconds":        {"tier": tiers},
		"inferrail_index_entries":              {"tier": slices.Concat(tierNames[:], []string{"guessed", "expected"})},
		"inferrail_index_slots":                {"state": indexStates[:]},
		"inferrail_index_state":                {"state": indexStates[:]},
		"inferrail_kernel_pauses_total":        {"reason": bpf.Whys()},
		"inferrail_kernel_refusals_total":      {"reason": bpf.Whys()},
		"inferrail_kernel_splices_joined":      {"state": {"armed", "active", "paused", "ended", "stalled"}},
		"inferrail_kv_events_total":            {"kind": {"stored", "removed", "cleared", "unknown"}},
		"inferrail_prompt_cache_lookups_total": {"result": {"hit", "miss"}},
		"inferrail_prompt_checks_total":        {"source": {fromProbe, fromSample, fromUsage}, "result": {resultAgree, resultDisagree, resultFailed}},
		"inferrail_replica_engine_requests":    {"state": {"running", "waiting"}},
		"inferrail_replica_load_reports_total": {"outcome": outcomes},
		"inferrail_replica_state":              {"state": states},
	})
	return all
}

// metricAlerts are what people usually want to be told of.
var metricAlerts = map[string]string{
	"inferrail_requests_total":                       "`sum(rate(inferrail_requests_total{blame=~\"engine|agent\"}[5m])) / sum(rate(inferrail_requests_total[5m])) > 0.01`",
	"inferrail_time_to_first_token_seconds":          "`histogram_quantile(0.99, sum by (le, model) (rate(inferrail_time_to_first_token_seconds_bucket[5m]))) > 5`",
	"inferrail_inter_token_seconds":                  "`histogram_quantile(0.99, sum by (le, replica) (rate(inferrail_inter_token_seconds_bucket[5m]))) > 0.5`",
	"inferrail_replica_up":                           "`inferrail_replica_up == 0` for 1m",
	"inferrail_replica_ejections_total":              "`increase(inferrail_replica_ejections_total[15m]) > 3`",
	"inferrail_replica_restarts_total":               "`increase(inferrail_replica_restarts_total[15m]) > 0`",
	"inferrail_replica_load_age_seconds":             "`inferrail_replica_load_age_seconds > 10` for 1m",
	"inferrail_discovery_up":                         "`inferrail_discovery_up == 0` for 5m",
	"inferrail_certificate_expiry_timestamp_seconds": "`inferrail_certificate_expiry_timestamp_seconds - time() < 7 * 86400`",
	"inferrail_config_last_reload_successful":        "`inferrail_config_last_reload_successful == 0`",
	"inferrail_decision_log_failed_total":            "`increase(inferrail_decision_log_failed_total[15m]) > 0`",
	"inferrail_prompt_demoted":                       "`inferrail_prompt_demoted == 1` for 5m",
	"inferrail_index_state":                          "`inferrail_index_state{state=~\"repairing|mismatched\"} == 1` for 1m",
	"inferrail_kv_events_lost_batches_total":         "`increase(inferrail_kv_events_lost_batches_total[15m]) > 0`",
	"inferrail_requests_waiting":                     "`sum by (model) (inferrail_requests_waiting) > 100` for 1m",
	"inferrail_key_limited_total":                    "`sum by (key) (rate(inferrail_key_limited_total[5m])) > 1`",
	"inferrail_datapath_tier":                        "`inferrail_datapath_tier{tier=\"copy\"} == 1`, where the packet tier is meant to be",
	"inferrail_retries_total":                        "`sum by (reason) (rate(inferrail_retries_total[5m])) > 1`",
}

// metricsPage is agent/METRICS.md.
func metricsPage(all map[string]*dto.MetricFamily, values map[string]map[string][]string) []byte {
	var out bytes.Buffer
	out.WriteString(`# Metrics

GET /metrics on the admin port: OpenMetrics for who asks for it, else the text format of Prometheus. This page is made from the
code (` + "`go generate ./agent`" + `), and a test fails when it is out of date. There are those of the Go runtime and of the process beside
(` + "`go_*`, among them `go_sched_gomaxprocs_threads`, and `process_*`" + `).

How many series there are is bounded by what is configured and served:

| label | values |
|---|---|
`)
	for _, label := range slices.Sorted(maps.Keys(freeLabels)) {
		fmt.Fprintf(&out, "| `%s` | %s |\n", label, freeLabels[label])
	}
	out.WriteString("| others | the words of the program that are listed below |\n")
	groups := []struct{ title, prefixes string }{
		{"Requests", "inferrail_requests inferrail_request_ inferrail_responses inferrail_retries inferrail_replays inferrail_tokens inferrail_time_ inferrail_inter_ inferrail_client_ inferrail_buffered inferrail_key_"},
		{"Decisions and admission", "inferrail_decision inferrail_admission inferrail_held_ inferrail_observed_ inferrail_predict inferrail_shadow"},
		{"Prompts", "inferrail_prompt"},
		{"What engines have in their caches", "inferrail_index inferrail_kv_"},
		{"Replicas", "inferrail_replica inferrail_discovery"},
		{"Datapath", "inferrail_datapath inferrail_kernel inferrail_relay"},
		{"Traces", "inferrail_trace"},
		{"The agent", "inferrail_"},
	}
	told := map[string]bool{}
	for _, g := range groups {
		fmt.Fprintf(&out, "\n## %s\n\n| name | type | labels | meaning |\n|---|---|---|---|\n", g.title)
		var list []string
		for _, name := range slices.Sorted(maps.Keys(all)) {
			if !told[name] && slices.ContainsFunc(strings.Fields(g.prefixes), func(p string) bool { return strings.HasPrefix(name, p) }) {
				told[name] = true
				list = append(list, name)
				f := all[name]
				var labels []string
				for _, l := range labelsOf(f) {
					labels = append(labels, "`"+l+"`")
				}
				fmt.Fprintf(&out, "| `%s` | %s | %s | %s |\n", name, strings.ToLower(f.GetType().String()), strings.Join(labels, ", "), f.GetHelp())
			}
		}
		for _, name := range list {
			for _, label := range slices.Sorted(maps.Keys(values[name])) {
				var words []string
				for _, v := range values[name][label] {
					words = append(words, "`"+cmp.Or(v, `""`)+"`")
				}
				fmt.Fprintf(&out, "\n`%s` of `%s` is one of %s.\n", label, name, strings.Join(words, ", "))
			}
		}
	}
	out.WriteString("\n## What to be told of\n\nNumbers are where to begin.\n\n| metric | alert |\n|---|---|\n")
	for _, name := range slices.Sorted(maps.Keys(metricAlerts)) {
		fmt.Fprintf(&out, "| `%s` | %s |\n", name, strings.ReplaceAll(metricAlerts[name], "|", `\|`))
	}
	return out.Bytes()
}

// Who asks for OpenMetrics gets it, old scrapers get the text format, and either may
// ask for it packed.
func TestMetricsFormats(t *testing.T) {
	a := startAgent(t, testConfig(startEngine(t, 0, "m")))
	defer stopped(t, a)
	io.Copy(io.Discard, ask(t, a, 3).Body)
	f := func(accept, encoding, kind, packed, end string) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), "GET", "http://"+a.AdminAddr().String()+"/metrics", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Accept", accept)
		req.Header.Set("Accept-Encoding", encoding)
		resp, err := http.DefaultTransport.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		var body io.Reader = resp.Body
		if packed == "gzip" {
			if body, err = gzip.NewReader(resp.Body); err != nil {
				t.Fatal(err)
			}
		}
		text, err := io.ReadAll(body)
		if err != nil || !strings.HasPrefix(resp.Header.Get("Content-Type"), kind) || resp.Header.Get("Content-Encoding") != packed ||
			!strings.Contains(string(text), `inferrail_replica_up{replica="r0"} 1`) || strings.HasSuffix(string(text), "# EOF\n") != (end != "") {
			t.Errorf("%s, %s: %v, %v, ends in %q", accept, encoding, err, resp.Header, text[max(0, len(text)-30):])
		}
	}
	f("", "identity", "text/plain; version=0.0.4", "", "")
	f("text/plain;version=0.0.4", "gzip", "text/plain; version=0.0.4", "gzip", "")
	f("application/openmetrics-text;version=1.0.0,text/plain;q=0.5", "gzip", "application/openmetrics-text", "gzip", "# EOF")
	f("application/openmetrics-text", "identity", "application/openmetrics-text", "", "# EOF")
}

// series are the lines of the page of metrics that contain a text.
func series(t *testing.T, a *Agent, text string) (lines []string) {
	t.Helper()
	_, body := page(t, a, "/metrics")
	for line := range strings.Lines(body) {
		if strings.HasPrefix(line, "inferrail_") && strings.Contains(line, text) {
			lines = append(lines, line)
		}
	}
	return lines
}

// What clients send makes no series: names of models that nobody serves, keys that
// nobody knows, paths, methods, classes and ids.
func TestMetricsUnderAttack(t *testing.T) {
	a := startAgent(t, testConfig(startEngine(t, 0, "m")))
	defer stopped(t, a)
	client := &http.Client{Timeout: 30 * time.Second}
	attack := func(i int) {
		t.Helper()
		for _, to := range []struct{ method, path, body string }{
			{"POST", "/v1/chat/completions", fmt.Sprintf(`{"model":"m%d","messages":[]}`, i)},
			{"POST", "/v1/completions", fmt.Sprintf(`{"model":"m","prompt":"x%d","max_tokens":1}`, i)},
			{"POST", fmt.Sprintf("/v1/path%d", i), "{}"},
			{"GET", fmt.Sprintf("/v1/models/m%d", i), ""},
			{fmt.Sprintf("METHOD%d", i), "/v1/completions", ""},
		} {
			req, err := http.NewRequestWithContext(t.Context(), to.method, "http://"+a.Addr().String()+to.path, strings.NewReader(to.body))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Authorization", fmt.Sprint("Bearer key", i))
			req.Header.Set("x-inferrail-priority", fmt.Sprint("class", i))
			req.Header.Set("x-request-id", fmt.Sprint("id", i))
			req.Header.Set("x-session-id", fmt.Sprint("session", i))
			resp, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		}
	}
	finished := uint64(0)
	rounds := func(from, n int) int {
		for i := range n {
			attack(from + i)
		}
		finished += uint64(5 * n)
		eventually(t, func() bool { return a.proxy.Totals().Finished == finished }, func() string {
			return fmt.Sprintf("of %d requests are counted: %+v", finished, a.proxy.Totals())
		})
		return len(series(t, a, ""))
	}
	first, before := rounds(0, 40), 40
	// One decision in 16 is timed, drawn at random: then there are the series of that.
	for len(series(t, a, "inferrail_decision_seconds")) == 0 {
		first, before = rounds(before, 20), before+20
	}
	if second := rounds(before, 200); second > first {
		t.Errorf("there are %d series, and after 1000 requests more %d", first, second)
	}
	for _, text := range []string{"m1", "key1", "path1", "class1", "id1", "METHOD"} {
		if found := series(t, a, text); len(found) > 0 {
			t.Errorf("a client has made %q", found)
		}
	}
}

// A replica that leaves takes its series with it, counters too, and so do a model that
// nobody serves any more and a key that is not known any more, also while a request is
// still there.
func TestSeriesLeave(t *testing.T) {
	gone := startEngine(t, 0, "other")
	c := testConfig(startEngine(t, 0, "m"), gone)
	hash := sha256.Sum256([]byte("k"))
	c.Server.APIKeys = []KeyConfig{{Name: "leaves", SHA256: hex.EncodeToString(hash[:])}, {Name: "stays", SHA256: strings.Repeat("0", 64)}}
	a := startAgent(t, c)
	defer stopped(t, a)
	begin := func(n int) *http.Response {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), "POST", "http://"+a.Addr().String()+"/v1/completions",
			strings.NewReader(fmt.Sprintf(`{"model":"other","prompt":"x","stream":true,"max_tokens":%d}`, n)))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer k")
		resp, err := http.DefaultTransport.RoundTrip(req)
		if err != nil || resp.StatusCode != 200 {
			t.Fatalf("%v, %v", resp, err)
		}
		t.Cleanup(func() { resp.Body.Close() })
		return resp
	}
	io.Copy(io.Discard, begin(2).Body)
	names := []string{`="r1"`, `="other"`, `="leaves"`}
	for _, name := range names {
		eventually(t, func() bool { return len(series(t, a, name)) > 0 }, func() string { return "there are no series of " + name })
	}
	last := begin(5)
	c.Replicas = c.Replicas[:1]
	c.Server.APIKeys = c.Server.APIKeys[1:]
	if err := a.Reload(c); err != nil {
		t.Fatal(err)
	}
	io.Copy(io.Discard, last.Body)
	for _, name := range names {
		eventually(t, func() bool { return len(series(t, a, name)) == 0 }, func() string { return fmt.Sprintf("left: %q", series(t, a, name)) })
	}
	if len(series(t, a, `="r0"`)) == 0 {
		t.Error("the series of the other replica have left too")
	}
}

// The kernel and the proxy count times between tokens in the same buckets, so that one
// histogram can tell both.
func TestGapsAreOneHistogram(t *testing.T) {
	var kernel bpf.EngineCounters
	if len(kernel.Gaps) != proxy.GapBuckets {
		t.Fatalf("%d buckets in the kernel, %d in the proxy", len(kernel.Gaps), proxy.GapBuckets)
	}
	for i := range proxy.GapBuckets {
		if k, p := bpf.GapBound(i), proxy.GapBound(i); int64(k) != int64(p) {
			t.Errorf("bucket %d ends at %d in the kernel, at %d in the proxy", i, k, p)
		}
	}
	counts := make([]uint64, proxy.GapBuckets)
	for i := range counts {
		counts[i] = 1
	}
	var m dto.Metric
	if err := gapHistogram(counts, 3, "r", "copy").Write(&m); err != nil {
		t.Fatal(err)
	}
	h := m.Histogram
	if h.GetSampleCount() != proxy.GapBuckets || h.GetSampleSum() != 3 || len(h.Bucket) != len(gapBounds) {
		t.Fatal(h)
	}
	for i, b := range h.Bucket {
		if b.GetUpperBound() != proxy.GapBound(gapBounds[i]).Seconds() || b.GetCumulativeCount() != uint64(gapBounds[i]+1) {
			t.Errorf("%v", b)
		}
	}
}
