package proxy

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/policy"
)

// explain asks where a completions request would go.
func (c *cacher) explain(body string) *Decision {
	c.t.Helper()
	d, err := c.s.Explain("/v1/completions", nil, []byte(body))
	if err != nil {
		c.t.Fatal(err)
	}
	return d
}

// quietly is a fleet of simulators that is asked one request after another, so that
// what an explanation says is still so when the request comes.
func quietly(t *testing.T, n int) *cacher {
	t.Helper()
	var urls []string
	for range n {
		urls = append(urls, startSim(t).URL())
	}
	return newCacher(t, nil, urls...)
}

// Whatever the policy, a request goes where the explanation says, is expected to
// find there what it says, and the terms that are told add up to the costs.
func TestExplainedAsServed(t *testing.T) {
	c := quietly(t, 4)
	for _, name := range policy.Names() {
		p, err := policy.New(name, nil)
		if err != nil {
			t.Fatal(err)
		}
		c.change(func(m *Model) { m.Policy = p })
		for i := range 12 {
			// The second half of the conversations continue the first, so that there is
			// something to find.
			body := completion(words(40+8*(i%6))+fmt.Sprint(name, i%6)+words(100*(i/6)), `"max_tokens":1`)
			d := c.explain(body)
			least, sum := math.Inf(1), 0.0
			tied := 0
			for _, r := range d.Replicas {
				sum = 0
				for _, term := range r.Terms {
					sum += float64(term.Value)
				}
				if math.Abs(sum-float64(r.Cost)) > 1e-9*max(1, math.Abs(sum)) {
					t.Errorf("%s: the terms of %s add up to %v: %+v", name, r.Replica, sum, r)
				}
				least = min(least, float64(r.Cost))
			}
			for _, r := range d.Replicas {
				if float64(r.Cost) == least {
					tied++
				}
			}
			if len(d.Replicas) != 4 || d.Policy != name || !d.Exact || d.PromptTokens < 40 || d.Blocks != d.PromptTokens/4 || d.BlockSize != 4 {
				t.Fatalf("%s: %+v", name, d)
			}
			got := strings.Fields(c.ask(body))
			random := strings.Contains(d.Reason, "tie") || name == "random" || name == "p2c"
			if got[0] != "200" || got[1] != d.Winner && !random {
				t.Errorf("%s, request %d: explained to go to %s (%s, %d tied), served %v", name, i, d.Winner, d.Reason, tied, got)
			}
			at := slices.IndexFunc(d.Replicas, func(r Considered) bool { return r.Replica == got[1] })
			if at < 0 || fmt.Sprint(d.Replicas[at].CachedTokens) != got[2] {
				t.Errorf("%s, request %d: explained %+v, served %v", name, i, d.Replicas, got)
			}
		}
	}
}

// counters are all numbers that the server tells of itself.
func counters(t *testing.T, s *Server) string {
	t.Helper()
	registry := prometheus.NewRegistry()
	registry.MustRegister(s)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	for _, f := range families {
		for _, m := range f.Metric {
			var v any = m.Counter.GetValue()
			switch f.GetType() {
			case dto.MetricType_GAUGE:
				v = m.Gauge.GetValue()
			case dto.MetricType_HISTOGRAM:
				v = m.Histogram.GetSampleCount()
			}
			fmt.Fprintln(&out, f.GetName(), m.Label, v)
		}
	}
	return out.String()
}

// Nothing is changed by explaining: no counter, no place, no turn, nothing that is
// known of caches, and no key is charged.
func TestExplainChangesNothing(t *testing.T) {
	c := quietly(t, 3)
	shadow := &policy.Shadow{Policy: policy.LeastRequest{}}
	state := &ModelState{}
	c.change(func(m *Model) { m.Policy, m.Shadows, m.State = policy.RoundRobin{}, []*policy.Shadow{shadow}, state })
	c.ask(completion(words(40)))
	eventually(t, 20*time.Second, "the client's connection is gone", func() bool { return c.s.Datapath().Connections == 0 })
	k := key("k", policy.Rates{Requests: 10, InputTokens: 1000})
	c.s.SetAccess(NewAccess([]*Key{k}, nil))
	look := func() string {
		held := ""
		for r := range c.replicas {
			held += fmt.Sprint(c.holds(r, words(40)), c.replicas[r].InFlight(), c.replicas[r].Pending(), " ")
		}
		return fmt.Sprint(counters(t, c.s), held, shadow.Regret(), state.turns.Load(), k.left().Requests.Remaining, len(c.s.Predictions(nil)), c.index.Stats(nil)[0].Claims)
	}
	before := look()
	var winners []string
	for range 20 {
		d, err := c.s.Explain("/v1/completions", http.Header{"X-Api-Key": {"K"}}, []byte(completion(words(40))))
		if err != nil {
			t.Fatal(err)
		}
		if len(d.Shadows) != 1 || d.Shadows[0].Policy != "least_request" {
			t.Fatalf("shadows %+v", d.Shadows)
		}
		winners = append(winners, d.Winner)
	}
	if after := look(); after != before {
		t.Errorf("before:\n%safter:\n%s", before, after)
	}
	if len(slices.Compact(winners)) != 1 {
		t.Errorf("a turn was taken: %v", winners)
	}
}

// A replica that is no candidate is named with the reason, and a request that would
// have to wait is told to.
func TestExplainNamesWhoIsFull(t *testing.T) {
	release := make(chan struct{})
	defer close(release)
	e := newRawEngine(t, func(s *engineSide) {
		if s.request() != nil {
			<-release
			io.WriteString(s, fixed("{}"))
		}
	})
	r := newRig(t, Limits{}, nil, e.url(), e.url())
	r.replicas[0].SetBounds(1, 0)
	r.replicas[1].SetBounds(2, 5)
	explain := func() *Decision {
		t.Helper()
		d, err := r.s.Explain("/v1/chat/completions", nil, []byte(hello))
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	if d := explain(); d.Winner == "" || d.Waits != "" || d.Exact || d.Why == "" {
		t.Errorf("at first: %+v", d)
	}
	var clients []*client
	fill := func(n int) {
		t.Helper()
		for range n {
			c := r.dial()
			c.send(post(hello))
			clients = append(clients, c)
		}
		eventually(t, 20*time.Second, "requests are at their engines", func() bool {
			return r.replicas[0].InFlight()+r.replicas[1].InFlight() == len(clients)
		})
	}
	fill(2)
	d := explain()
	if d.Winner != "e1" || d.Waits != "" {
		t.Errorf("with a place left: %+v", d)
	}
	at := slices.IndexFunc(d.Replicas, func(r Considered) bool { return r.Replica == "e0" })
	if at < 0 || !strings.Contains(d.Replicas[at].Excluded, "as many requests as it may") || d.Replicas[at].InFlight != 1 {
		t.Errorf("a full replica: %+v", d.Replicas)
	}
	fill(1)
	if d := explain(); d.Winner != "e1" || d.Waits != "in the line of e1" {
		t.Errorf("when all are full and one has a line: %+v", d)
	}
	r.replicas[1].SetBounds(2, 0)
	if d := explain(); d.Winner != "" || !strings.Contains(d.Reason, "503") || len(d.Replicas) != 2 {
		t.Errorf("when all are full: %+v", d)
	}
	r.s.SetFleet(&Fleet{Models: map[string]*Model{"m": {Name: "m"}}, Listed: []*Model{{Name: "m"}}})
	if d := explain(); d.Winner != "" || !strings.Contains(d.Reason, "no replica") || len(d.Replicas) != 0 {
		t.Errorf("without replicas: %+v", d)
	}
	text, err := json.Marshal(explain())
	if err != nil || !json.Valid(text) {
		t.Errorf("%v in %s", err, text)
	}
	for _, c := range clients {
		c.Close()
	}
	eventually(t, 20*time.Second, "nothing is in flight", func() bool { return r.replicas[0].InFlight()+r.replicas[1].InFlight() == 0 })
}

// What would be refused is told with its status, whatever the body is.
func TestExplainRefuses(t *testing.T) {
	r := newRig(t, Limits{MaxBodyBytes: 1000}, nil, newRawEngine(t, answering(fixed("{}"))).url())
	r.s.SetAccess(NewAccess([]*Key{key("k", policy.Rates{}, "other")}, nil))
	f := func(path string, header http.Header, body string, status int, says string) {
		t.Helper()
		d, err := r.s.Explain(path, header, []byte(body))
		refusal := (*Refusal)(nil)
		if !errors.As(err, &refusal) || refusal.Status != status || !strings.Contains(refusal.Message, says) || refusal.Message == "" || d != nil {
			t.Errorf("%s %v %.40q: %+v, %v; want %d %q", path, header, body, d, err, status, says)
		}
	}
	const chat = "/v1/chat/completions"
	f("", nil, hello, 404, "try /v1/chat/completions")
	f("/metrics", nil, hello, 404, "")
	f("/v1/models", nil, hello, 404, "")
	f("/health", nil, hello, 404, "")
	f(chat, nil, "", 400, "not a JSON object")
	f(chat, nil, "[]", 400, "")
	f(chat, nil, `{"model":5}`, 400, "")
	f(chat, nil, `{"model":"m"`, 400, "not valid JSON")
	f(chat, nil, `{"model":"absent"}`, 404, "`absent` does not exist")
	f(chat, nil, `{"a":"`+strings.Repeat("x", 1000)+`"}`, 413, "at most 1000")
	f(chat, nil, strings.Repeat("[", 100000), 413, "")
	f(chat, http.Header{"X-Api-Key": {"wrong"}}, hello, 401, "")
	f(chat, http.Header{"X-Api-Key": {"K"}}, hello, 403, "")
	f(chat, http.Header{"Content-Encoding": {"gzip"}}, hello, 415, "")
	f(chat, http.Header{"X Y": {"1"}}, hello, 400, "")
	f("/v1/audio/transcriptions", http.Header{"Content-Type": {"multipart/form-data; boundary=x"}}, hello, 400, "")
	for _, body := range []string{hello, `{"model":"m"}`, `{"model":"m","messages":{}}`, `{"model":"m","max_tokens":1e300,"n":-7}`,
		"{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"\xff\xfe\"}]}"} {
		for _, path := range []string{chat, "/v1/completions", "/v1/embeddings", "/v1/messages", "/tokenize"} {
			if d, err := r.s.Explain(path, nil, []byte(body)); err != nil || d.Winner != "e0" {
				t.Errorf("%s %q: %+v, %v", path, body, d, err)
			}
		}
	}
	if n := r.s.buffered.Load(); n != 0 {
		t.Errorf("%d bytes are still held", n)
	}
}

// Of several prompts in one request, blocks are those of all.
func TestExplainSeveralPrompts(t *testing.T) {
	c := quietly(t, 2)
	body := `{"prompt":["` + words(20) + `","` + words(33) + `"],"max_tokens":1}`
	c.ask(body)
	d := c.explain(body)
	var blocks []int
	for _, r := range d.Replicas {
		blocks = append(blocks, r.Blocks["gpu"])
	}
	// The engine keeps what it has generated too, but not in these blocks.
	slices.Sort(blocks)
	if d.PromptTokens != 53 || d.Blocks != 5+8 || !slices.Equal(blocks, []int{0, 13}) {
		t.Errorf("%+v", d)
	}
}

// A decision that is logged says what came of it, and nothing of the prompt.
func TestDecisionsAreSent(t *testing.T) {
	c := newCacher(t, nil, scripted(t), scripted(t))
	shadow := &policy.Shadow{Policy: backwards{}}
	c.change(func(m *Model) { m.Shadows = []*policy.Shadow{shadow} })
	to := make(chan *Decision, 3)
	c.s.SetDecisions(to, DecisionsWanted{Sample: 1})
	const usage = "Do: usage \"prompt_tokens\":23,\"completion_tokens\":1,\"prompt_tokens_details\":{\"cached_tokens\":20}\r\n"
	c.ask(completion(words(23)+"secret"), "x-request-id: mine\r\n", usage)
	d := <-to
	if d.WorkOut(); d.RequestID != "mine" || d.Winner != "e0" || d.Model != "m" || d.Policy != "in_order" || len(d.Replicas) != 2 || d.Outcome == nil ||
		d.Outcome.Outcome != "ok" || d.Outcome.Status != 200 || d.Outcome.Attempts != 1 || d.Outcome.FirstTokenMS != nil || d.Outcome.CachedTokens == nil ||
		*d.Outcome.CachedTokens != 20 || d.Replicas[1].Cost != 1 || len(d.Replicas[1].Terms) != 1 || len(d.Shadows) != 1 || d.Shadows[0].Winner != "e1" || d.Shadows[0].Same {
		text, _ := json.Marshal(d)
		t.Errorf("%s", text)
	}
	text, err := json.Marshal(d)
	if err != nil || strings.Contains(string(text), "secret") || strings.Contains(string(text), "a a") {
		t.Errorf("%v: %s", err, text)
	}
	// One that fails at one replica has the decision of its last attempt.
	c.ask(completion(words(23)), "Do: die\r\n")
	if d = <-to; d.Outcome == nil || d.Outcome.Outcome != "engine_died" || d.Outcome.Attempts != 3 {
		t.Errorf("%+v, %+v", d, d.Outcome)
	}
	// Nobody waits for a log that takes nothing.
	for range 5 {
		c.ask(completion(words(4)))
	}
	if n := value(t, c.s.stats.decisionsDropped); n != 2 || len(to) != 3 {
		t.Errorf("%v are dropped, %d wait", n, len(to))
	}
	c.s.SetDecisions(nil, DecisionsWanted{Sample: 1})
	<-to
	c.ask(completion(words(4)))
	if len(to) != 2 {
		t.Error("a decision is sent that nobody wants")
	}
	rows := c.s.Predictions(nil)
	if len(rows) != 8 || rows[7].RequestID != "mine" || rows[7].CachedActual != 20 || rows[7].Observed >= 0 || rows[7].Predicted < 0 ||
		rows[7].Replica != "e0" || rows[6].Outcome != "engine_died" || rows[6].Attempts != 3 || rows[0].CachedActual != -1 {
		t.Errorf("%+v", rows)
	}
}

func value(t *testing.T, c prometheus.Counter) float64 {
	t.Helper()
	var pb dto.Metric
	if err := c.Write(&pb); err != nil {
		t.Fatal(err)
	}
	return pb.Counter.GetValue()
}

// backwards chooses the last replica.
type backwards struct{}

func (backwards) Name() string { return "backwards" }
func (backwards) Score(_ *policy.Request, candidates []policy.Candidate, costs []float64) float64 {
	for i := range candidates {
		costs[i] = -float64(i)
	}
	return 0
}

// A number that JSON does not have survives it.
func TestNumber(t *testing.T) {
	f := func(n float64, text string) {
		t.Helper()
		got, err := json.Marshal(Number(n))
		if err != nil || string(got) != text {
			t.Errorf("%v is %s, %v; want %s", n, got, err, text)
		}
		var back Number
		if err := json.Unmarshal(got, &back); err != nil || float64(back) != n && !(text == "null" && math.IsInf(float64(back), 1)) {
			t.Errorf("%s is read as %v, %v", got, back, err)
		}
	}
	f(0, "0")
	f(-1.5, "-1.5")
	f(1e300, "1e+300")
	f(math.Inf(1), "null")
	f(math.Inf(-1), "null")
	f(math.NaN(), "null")
}

// Two shadows of one name are two series, and both sums only grow.
func TestShadowMetrics(t *testing.T) {
	r := newRig(t, Limits{}, nil, newRawEngine(t, answering(fixed("{}"))).url())
	m := *r.s.fleet.Load().Listed[0]
	m.Shadows = []*policy.Shadow{{Policy: policy.LeastRequest{}}, {Policy: policy.LeastRequest{}}, {Policy: policy.LeastRequest{}, Label: "third"}}
	r.s.SetFleet(&Fleet{Models: map[string]*Model{"m": &m}, Listed: []*Model{&m}})
	c := r.dial()
	c.send(post(hello))
	c.answer()
	m.Shadows[0].Settle(3, 1, 1, false)
	m.Shadows[0].Settle(1, 1, 4, false)
	all := counters(t, r.s)
	for _, want := range []string{
		`inferrail_shadow_decisions_total [name:"agreed" value:"yes" name:"model" value:"m" name:"policy" value:"least_request#2"] 1`,
		`inferrail_shadow_decisions_total [name:"agreed" value:"yes" name:"model" value:"m" name:"policy" value:"third"] 1`,
		`inferrail_shadow_regret_seconds_total [name:"direction" value:"better" name:"kind" value:"observed" name:"model" value:"m" name:"policy" value:"least_request"] 2`,
		`inferrail_shadow_regret_seconds_total [name:"direction" value:"worse" name:"kind" value:"observed" name:"model" value:"m" name:"policy" value:"least_request"] 3`,
		`inferrail_decisions_total [name:"model" value:"m" name:"policy" value:"least_request" name:"reason" value:"least cost"] 1`,
	} {
		if !strings.Contains(strings.ReplaceAll(all, "  ", " "), want) {
			t.Errorf("no %s in\n%s", want, all)
		}
	}
}

// Explaining while requests run and the fleet changes.
func TestExplainUnderLoad(t *testing.T) {
	c := quietly(t, 3)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range 60 {
			if d, err := c.s.Explain("/v1/completions", nil, []byte(completion(words(20+i)))); err != nil || d.Winner == "" {
				t.Errorf("%+v, %v", d, err)
			}
			c.index.Join(c.replicas[0].Slot, index.SlotConfig{Model: "base", BlockSize: 4, Capacity: 1000})
		}
	}()
	for i := range 60 {
		conn := c.dial()
		conn.send(to("/v1/completions", completion(words(20+i), `"max_tokens":1`)))
		if resp, _ := conn.answer(); resp.StatusCode != 200 {
			t.Errorf("status %d", resp.StatusCode)
		}
		conn.Close()
		c.change(func(m *Model) { m.Created++ })
	}
	<-done
	// The admin port outlives the server.
	c.shutdown(20 * time.Second)
	if d, err := c.s.Explain("/v1/completions", nil, []byte(completion(words(20)))); err != nil || d.Winner == "" {
		t.Errorf("after the end: %+v, %v", d, err)
	}
}

// What admission will say is foreseen, and so is where a request waits.
func TestExplainAdmission(t *testing.T) {
	c := quietly(t, 2)
	c.change(func(m *Model) { m.Admission = policy.NewAdmission(policy.AdmissionRules{Mode: policy.Absolute}) })
	c.s.SetClasses(NewClasses([]Class{{Name: "batch", Rank: 9}}))
	body := completion(words(4000), `"max_tokens":1`)
	explain := func(fields ...string) (*Decision, error) {
		header := http.Header{}
		for i := 0; i < len(fields); i += 2 {
			header.Set(fields[i], fields[i+1])
		}
		return c.s.Explain("/v1/completions", header, []byte(body))
	}
	d, err := explain("x-inferrail-budget-ms", "1", "x-inferrail-priority", "batch")
	if err != nil || !d.Refused || d.Admission == "" || d.RetryAfterMS < 1000 || d.BudgetMS != 1 || d.Winner == "" || d.Waits != "" || d.Class != "batch" {
		t.Errorf("a budget of a millisecond: %+v, %v", d, err)
	}
	if got := c.ask(body, "x-inferrail-budget-ms: 1\r\n"); !strings.HasPrefix(got, "503 ") {
		t.Errorf("the request was answered %s", got)
	}
	c.change(func(m *Model) { m.Waiting.Max = 1 })
	if d, err := explain("x-inferrail-budget-ms", "1"); err != nil || !d.Refused || d.Waits != "in the queue of m" || d.Class != DefaultClass {
		t.Errorf("with a queue: %+v, %v", d, err)
	}
	d, err = explain("x-inferrail-budget-ms", "3600000")
	if err != nil || d.Refused || d.Waits != "" || d.RetryAfterMS != 0 {
		t.Errorf("a budget of an hour: %+v, %v", d, err)
	}
	if got := strings.Fields(c.ask(body, "x-inferrail-budget-ms: 3600000\r\n")); got[0] != "200" {
		t.Errorf("the request was answered %s", got)
	}
	refusal := (*Refusal)(nil)
	if d, err := explain("x-inferrail-budget-ms", "soon"); !errors.As(err, &refusal) || refusal.Status != 400 || !strings.Contains(refusal.Message, "x-inferrail-budget-ms") {
		t.Errorf("a budget that is none: %+v, %v", d, err)
	}
}

// Whatever is asked about, there is a decision or a refusal that says something, in
// JSON that is valid, and nothing is held afterwards.
func FuzzExplain(f *testing.F) {
	r := newRig(f, Limits{MaxBodyBytes: 1 << 16}, nil, newRawEngine(f, answering(fixed("{}"))).url(), newRawEngine(f, answering(fixed("{}"))).url())
	for _, body := range []string{hello, "", "{}", `{"model":"m","prompt":["a","b"]}`, `{"model":"alias","n":1e400}`, `{"messages":[[[[`,
		`{"model":"m","messages":[{"role":"user"},{"role":7}]}`, "{\"model\":\"\\ud800\"}", `{"prompt_cache_key":"x","user":{}}`} {
		for _, path := range []string{"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/audio/transcriptions", "", "/"} {
			f.Add(path, "x-session-id", "7", body)
		}
	}
	f.Add("/v1/chat/completions", "Content-Encoding", "gzip", hello)
	f.Add("/v1/chat/completions", "x-inferrail-budget-ms", "-1", hello)
	f.Add("/v1/chat/completions", "x\r\ny", "\n\n", hello)
	f.Add("/v1/chat/completions", "Content-Length", "5", hello)
	f.Fuzz(func(t *testing.T, path, name, value, body string) {
		d, err := r.s.Explain(path, http.Header{name: {value}}, []byte(body))
		refusal := (*Refusal)(nil)
		switch {
		case err == nil && d.Winner == "":
			t.Errorf("two idle replicas, and nowhere to go: %+v", d)
		case err == nil:
			if text, err := json.Marshal(d); err != nil || !json.Valid(text) {
				t.Errorf("%v in %s", err, text)
			}
		case !errors.As(err, &refusal) || refusal.Status < 400 || refusal.Status > 499 || refusal.Message == "" || d != nil:
			t.Errorf("%+v, %v", d, err)
		}
		if n := r.s.buffered.Load(); n != 0 {
			t.Errorf("%d bytes are held", n)
		}
	})
}

// A replica goes while a request waits in the line of another: what is written down
// of the decision is whom it was made among.
func TestDecisionOfAnotherFleet(t *testing.T) {
	r, release := lined(t)
	records := make(chan *Decision, 10)
	r.s.SetDecisions(records, DecisionsWanted{Sample: 1})
	r.ask(1, 0, 0, 0)
	r.ask(1, 0, 1, 0)
	c := r.ask(1, 1, 1, 0)
	r.publish(r.replicas[0])
	for range 2 {
		release[0] <- struct{}{}
	}
	release[1] <- struct{}{}
	c.expects(200, "ok")
	r.over()
	for range 3 {
		d := <-records
		d.WorkOut()
		if len(d.Replicas) != 2 || d.Winner == "" {
			t.Errorf("%+v", d)
		}
	}
}

// TestTellAllocates: what a request does for a decision that is logged takes as many
// pieces of memory for many replicas as for few. The rest is WorkOut's.
func TestTellAllocates(t *testing.T) {
	withoutRace(t)
	for _, n := range []int{3, 256} {
		x := hundreds(t, n)
		x.cache = &cache{index: index.New(index.Config{})}
		x.pick(false)
		x.replica = x.places[x.choice.Index]
		if allocs := testing.AllocsPerRun(50, func() { x.tell(new(Decision)) }); allocs > 5 {
			t.Errorf("%d replicas: %v allocations", n, allocs)
		}
		d := new(Decision)
		x.tell(d)
		if d.WorkOut(); d.Replicas[n-1].Blocks["gpu"] == 0 {
			t.Errorf("%d replicas: %+v of what the last one holds", n, d.Replicas[n-1].Blocks)
		}
	}
}
