package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/inferrail/inferrail/agent"
)

// explainOf runs inferrail explain with a request on its standard input.
func explainOf(t *testing.T, request string, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	var out, said output
	status = run(&env{args: append([]string{"explain"}, args...), stdin: strings.NewReader(request), stdout: &out, stderr: &said})
	return status, out.String(), said.String()
}

// A person asks where a conversation would go, sends it, and asks again.
func TestExplain(t *testing.T) {
	p := start(t, agentArgs("--sim", "2", "--datapath", "copy")...)
	addr, admin := p.expect(`listening  ([^,]+),`), p.expect(`admin (http://\S+)`)
	p.expect(`replicas   (2 of 2)`)
	request := fmt.Sprintf(`{"model":"sim","max_tokens":1,"messages":[{"role":"user","content":%q}]}`, strings.Repeat("Tell me more. ", 50))

	status, stdout, stderr := explainOf(t, request, "--admin", admin)
	if status != 0 || stderr != "" {
		t.Fatalf("status %d: %s", status, stderr)
	}
	for _, want := range []string{"model      sim, policy ", " tokens, exact; ", " whole blocks of 16\n", "sim-0", "sim-1", "\nwinner     sim-", "first token expected in "} {
		if !strings.Contains(stdout, want) {
			t.Errorf("no %q in\n%s", want, stdout)
		}
	}

	resp, err := http.Post("http://"+addr+"/v1/chat/completions", "application/json", strings.NewReader(request))
	if err != nil {
		t.Fatal(err)
	}
	io.Copy(io.Discard, resp.Body)
	resp.Body.Close()
	served := resp.Header.Get("x-inferrail-replica")
	// As a file, for a program; the address may lack its scheme.
	status, stdout, stderr = explainOf(t, "", "--json", "--admin", strings.TrimPrefix(admin, "http://"), "-H", "x-session-id: a: b", file(t, "request.json", request))
	var x agent.Explanation
	if err := json.Unmarshal([]byte(stdout), &x); err != nil || status != 0 || stderr != "" {
		t.Fatalf("%v, status %d: %s%s", err, status, stdout, stderr)
	}
	if x.Winner != served || !x.Exact || len(x.Replicas) != 2 {
		t.Errorf("served by %s, explained %+v", served, x)
	}
	for _, r := range x.Replicas {
		if (r.CachedTokens > 0) != (r.Replica == served) {
			t.Errorf("%s has %d tokens cached; %s has served", r.Replica, r.CachedTokens, served)
		}
	}
	_, stdout, _ = explainOf(t, request, "--admin", admin)
	if !strings.Contains(stdout, "blocks held: ") || !strings.Contains(stdout, " gpu") || !strings.Contains(stdout, "* ") {
		t.Errorf("the second time:\n%s", stdout)
	}

	f := func(request, says string, args ...string) {
		t.Helper()
		status, stdout, stderr := explainOf(t, request, append(args, "--admin", admin)...)
		if status != 1 || stdout != "" || !strings.Contains(stderr, says) {
			t.Errorf("%q %q: status %d, %q, %q; want %q", request, args, status, stdout, stderr, says)
		}
	}
	f("", "the standard input is empty; try inferrail explain < request.json")
	f("{", "the body is not valid JSON at byte 1")
	f(`{"model":"absent"}`, "those served are sim")
	f(request, "try /v1/chat/completions", "--path", "/metrics")
	f(request, `--header "nonsense" is not NAME: VALUE`, "--header", "nonsense")
	f("", "cannot read the request: open /nowhere", "/nowhere")

	p.signals <- nil
	p.exit(0)
}

// Whoever answers, a person is told what to do.
func TestExplainAdvises(t *testing.T) {
	f := func(admin, says string, args ...string) {
		t.Helper()
		status, stdout, stderr := explainOf(t, `{"model":"m"}`, append(args, "--admin", admin)...)
		if status != 1 || stdout != "" || !strings.Contains(stderr, says) || strings.Contains(stderr, "%!") {
			t.Errorf("%s: status %d, %q, %q; want %q", admin, status, stdout, stderr, says)
		}
	}
	answer := func(status int, text string) string {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Authorization") == "Bearer right" {
				status, text = 200, "no JSON"
			}
			w.Header().Set("Location", "/elsewhere")
			w.WriteHeader(status)
			io.WriteString(w, text)
		}))
		t.Cleanup(s.Close)
		return s.URL
	}
	gone := httptest.NewServer(http.NotFoundHandler())
	gone.Close()
	f(gone.URL, "cannot ask the agent at "+gone.URL)
	f(gone.URL, "connection refused; does it run")
	f("ftp://x", `--admin "ftp://x" is not a URL; want such as http://127.0.0.1:9090`)
	f("http://", "is not a URL")
	f("://", "is not a URL")
	f(answer(401, "x"), "wants its admin token: INFERRAIL_ADMIN_TOKEN or --token")
	f(answer(401, "x"), "has answered what is no explanation", "--token", "right")
	f(answer(404, "x"), "is that the agent's admin_listen?")
	f(answer(403, "not from here"), "not from here (status 403")
	f(answer(503, "2 prompts are being looked at; try again"), "try again (status 503")
	f(answer(307, ""), "(status 307")
	f(answer(200, "<html>"), "has answered what is no explanation")
	f(answer(200, ""), "has answered what is no explanation")

	t.Setenv("INFERRAIL_ADMIN_TOKEN", "right")
	f(answer(401, "x"), "has answered what is no explanation")
}
