package agent

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/proxy"
)

// postPage posts a body to an admin page.
func postPage(t *testing.T, a *Agent, page, body string, fields ...string) (status int, text string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), "POST", "http://"+a.AdminAddr().String()+page, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for _, field := range fields {
		name, value, _ := strings.Cut(field, ": ")
		if name == "Host" {
			req.Host = value
		}
		req.Header.Set(name, value)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(answer)
}

func explained(t *testing.T, a *Agent, body string, fields ...string) (e Explanation) {
	t.Helper()
	status, text := postPage(t, a, "/explain", body, fields...)
	if status != 200 {
		t.Fatalf("status %d: %s", status, text)
	}
	if err := json.Unmarshal([]byte(text), &e); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	return e
}

// The way of one conversation through the pages: it goes where the explanation says,
// the second turn is expected where the first was, a replica that is down is named
// with the reason, and the predictions tell what became of it all.
func TestExplainPage(t *testing.T) {
	second := startEngine(t, 0, "m")
	c := testConfig(startEngine(t, 0, "m"), second)
	c.Models = []ModelConfig{{Name: "m", Aliases: []string{"short"}, Tokenizer: "builtin:sim", BlockSize: 4, Policy: "cost_model",
		Shadows: []ShadowConfig{{Policy: "round_robin"}, {Policy: "least_request", Name: "idle"}}}}
	a := startAgent(t, c)
	running := true
	defer func() {
		if running {
			stopped(t, a)
		}
	}()
	eventually(t, func() bool { return promptPage(t, a).State == "exact" }, func() string { return "m is not followed" })
	// The prompt is so long that what is cached of it decides, also when the machine stood
	// still while the first request was observed.
	hello := strings.Repeat("Hello! ", 1000)
	body := fmt.Sprintf(`{"model":"short","max_tokens":1,"messages":[{"role":"system","content":"Be brief."},{"role":"user","content":%q}]}`, hello)
	e := explained(t, a, body)
	if e.Model != "m" || e.Policy != "cost_model" || !e.Exact || e.Path != "/v1/chat/completions" || e.Winner == "" || len(e.Replicas) != 2 || len(e.Shadows) != 2 || e.WhyApproximate != "" {
		t.Fatalf("%+v", e)
	}
	askWhole(t, a, hello)
	var rows predictionsReport
	eventually(t, func() bool {
		status, text := page(t, a, "/debug/predictions?model=short")
		if err := json.Unmarshal([]byte(text), &rows); status != 200 || err != nil {
			t.Fatalf("%d, %v: %s", status, err, text)
		}
		return len(rows.Predictions) == 1
	}, func() string { return "there is no prediction" })
	first := rows.Predictions[0]
	if first.Model != "m" || first.Policy != "cost_model" || first.Outcome != "ok" || !first.Exact || first.PromptTokens != e.PromptTokens ||
		first.CachedPredicted == nil || *first.CachedPredicted != 0 || first.PredictedMS == nil || first.RequestID == "" {
		t.Errorf("%+v", first)
	}
	again := explained(t, a, body)
	at := func(id string) proxy.Considered {
		i := slices.IndexFunc(again.Replicas, func(r proxy.Considered) bool { return r.Replica == id })
		if i < 0 {
			t.Fatalf("%s is not in %+v", id, again.Replicas)
		}
		return again.Replicas[i]
	}
	if again.Winner != first.Replica || at(first.Replica).CachedTokens != (e.PromptTokens-1)/4*4 || at(first.Replica).Blocks["gpu"] < again.Blocks-1 {
		t.Errorf("after a request to %s: %+v", first.Replica, again)
	}

	var policies struct{ Models []policyReport }
	status, text := page(t, a, "/debug/policy")
	if err := json.Unmarshal([]byte(text), &policies); status != 200 || err != nil || len(policies.Models) != 1 {
		t.Fatalf("%d, %v: %s", status, err, text)
	}
	if m := policies.Models[0]; m.Policy != "cost_model" || len(m.Weights) != len(policy.Weights("cost_model")) || m.Replicas != 2 || len(m.Shadows) != 2 ||
		m.Shadows[0].Name != "round_robin" || m.Shadows[1].Name != "idle" || m.Shadows[1].Policy != "least_request" || m.Shadows[1].Decisions != 1 {
		t.Errorf("%+v", policies)
	}

	second.Close()
	eventually(t, func() bool { up, _ := a.Replicas(); return up == 1 }, func() string { return "the closed engine stays up" })
	again = explained(t, a, body)
	if r := at("r1"); !strings.HasPrefix(r.Excluded, "it is down: GET /health: ") || !math.IsInf(float64(r.Cost), 1) || again.Winner != "r0" {
		t.Errorf("of a replica that is down: %+v", again)
	}

	// A prompt that is not followed says so in a sentence.
	e = explained(t, a, `{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://x"}}]}]}`)
	if e.Exact || e.Why != "media" || !strings.Contains(e.WhyApproximate, "images") {
		t.Errorf("%+v", e)
	}
	status, text = postPage(t, a, "/explain?path=/v1/embeddings", `{"input":"x"}`)
	if status != 200 || !strings.Contains(text, `"path": "/v1/embeddings"`) {
		t.Errorf("%d %s", status, text)
	}

	// The numbers of a stream of requests: limits, filters, and nothing where nothing
	// is known.
	for range 5 {
		askWhole(t, a, hello)
	}
	summary := func(query string) predictionsReport {
		t.Helper()
		var out predictionsReport
		status, text := page(t, a, "/debug/predictions"+query)
		if err := json.Unmarshal([]byte(text), &out); status != 200 || err != nil {
			t.Fatalf("%d, %v: %s", status, err, text)
		}
		return out
	}
	eventually(t, func() bool { return len(summary("").Predictions) == 6 }, func() string { return "six requests are not all there" })
	if got := summary("?limit=2"); len(got.Predictions) != 2 || len(got.Summary) == 0 {
		t.Errorf("%+v", got)
	}
	if got := summary("?replica=r0&limit=0"); len(got.Predictions) != 0 || len(got.Summary) != 1 || len(got.Calibrations) != 1 || got.Summary[0].Replica != "r0" {
		t.Errorf("%+v", got)
	}
	if got := summary("?model=absent"); len(got.Predictions) != 0 || len(got.Summary) != 0 {
		t.Errorf("%+v", got)
	}
	for _, bad := range []string{"x", "-1", "1e3", "99999999999999999999"} {
		if status, text := page(t, a, "/debug/predictions?limit="+bad); status != 400 || !strings.Contains(text, "is not a number") {
			t.Errorf("limit=%s: %d %s", bad, status, text)
		}
	}
	running = false
	stopped(t, a)
}

func TestPredictionSummary(t *testing.T) {
	p := func(replica string, predicted, observed float64, cachedPredicted, cachedActual int) proxy.Prediction {
		return proxy.Prediction{Replica: replica, Model: "m", Predicted: predicted, Observed: observed, CachedPredicted: cachedPredicted, CachedActual: cachedActual}
	}
	f := func(rows []proxy.Prediction, want string) {
		t.Helper()
		text, err := json.Marshal(summarize(rows))
		if err != nil || string(text) != want {
			t.Errorf("%s, %v\nwant %s", text, err, want)
		}
	}
	f(nil, `[]`)
	f([]proxy.Prediction{p("a", 1, -1, -1, -1), p("a", math.Inf(1), 1, 5, -1)},
		`[{"replica":"a","model":"m","decisions":2,"compared":0,"bias":null,"median_error":null,"p90_error":null,"cached_compared":0,"cached_predicted_tokens":0,"cached_actual_tokens":0}]`)
	// One outlier moves neither the bias nor the median.
	f([]proxy.Prediction{p("b", 1, 1.1, 16, 16), p("a", 1, 2, 8, 0), p("a", 2, 2, 0, 4), p("a", 1, 100, -1, 7)},
		`[{"replica":"a","model":"m","decisions":3,"compared":3,"bias":2,"median_error":0.5,"p90_error":0.5,"cached_compared":2,"cached_predicted_tokens":8,"cached_actual_tokens":4},`+
			`{"replica":"b","model":"m","decisions":1,"compared":1,"bias":1.1,"median_error":0.091,"p90_error":0.091,"cached_compared":1,"cached_predicted_tokens":16,"cached_actual_tokens":16}]`)
}

// Bad input is told what to do, who may not see the page does not, and bodies that
// do not arrive take no more than their places.
func TestExplainPageRefuses(t *testing.T) {
	a := startAgent(t, testConfig(startEngine(t, 0, "m"), startEngine(t, 0, "n")))
	defer stopped(t, a)
	eventually(t, func() bool { return len(a.Models()) == 2 }, func() string { return fmt.Sprint(a.Models()) })
	f := func(query, body string, status int, says string, fields ...string) {
		t.Helper()
		if got, text := postPage(t, a, "/explain"+query, body, fields...); got != status || !strings.Contains(text, says) {
			t.Errorf("%s: %d %.300q, want %d %q", query, got, text, status, says)
		}
	}
	const good = `{"model":"m","messages":[]}`
	f("?path=/metrics", good, 400, "status 404 (Not Found)")
	f("?path=/health", good, 400, "try /v1/chat/completions")
	f("", ``, 400, "status 400 (Bad Request)")
	f("", `[]`, 400, "not a JSON object")
	f("", `{"model":5}`, 400, "must be a string")
	f("", `{"messages":[]}`, 400, "names no model")
	f("", `{"model":"absent"}`, 400, "status 404 (Not Found): The model `absent` does not exist; those served are m, n")
	f("", strings.Repeat(" ", maxPromptReport)+good, 413, "larger than 8MiB")
	f("", good, 403, "other web sites", "Origin: http://evil.example.com")
	f("", good, 403, "asked for by address", "Host: evil.example.com")
	f("", good, 200, `"model": "m"`)
	f("", good, 200, `"model": "m"`, "Cookie: a=b", "Accept-Encoding: gzip", "x-session-id: s")
	f("", good, 400, "status 415", "Content-Encoding: gzip")
	if status, text := page(t, a, "/explain"); status != 405 || !strings.HasPrefix(text, explainUsage) {
		t.Errorf("GET: %d %q", status, text)
	}

	var slow []net.Conn
	post := func() {
		c, err := net.Dial("tcp", a.AdminAddr().String())
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(c, "POST /explain HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
		slow = append(slow, c)
	}
	for range promptReports {
		post()
	}
	status := func() int {
		got, _ := postPage(t, a, "/explain", good)
		return got
	}
	eventually(t, func() bool {
		if status() == 503 {
			return true
		}
		post()
		return false
	}, func() string { return "any number are answered at one time" })
	for _, c := range slow {
		c.Close()
	}
	eventually(t, func() bool { return status() == 200 }, func() string { return "the places are never free again" })
}
