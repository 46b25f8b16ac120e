package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// asked connects a client over a transport.
func asked(t *testing.T, transport mcp.Transport) (context.Context, *mcp.ClientSession) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	session, err := mcp.NewClient(&mcp.Implementation{Name: "test", Version: "1"}, nil).Connect(ctx, transport, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = session.Close() })
	return ctx, session
}

// call calls a tool and reads its answer, or returns the text of its error.
func call(t *testing.T, ctx context.Context, session *mcp.ClientSession, tool string, args map[string]any, answer any) (failed string) {
	t.Helper()
	result, err := session.CallTool(ctx, &mcp.CallToolParams{Name: tool, Arguments: args})
	if err != nil {
		t.Fatalf("%s: %v", tool, err)
	}
	text := ""
	for _, c := range result.Content {
		if c, ok := c.(*mcp.TextContent); ok {
			text += c.Text
		}
	}
	if result.IsError {
		return text
	}
	structured, err := json.Marshal(result.StructuredContent)
	if err == nil {
		err = json.Unmarshal(structured, answer)
	}
	if err != nil {
		t.Fatalf("%s: %v in %s", tool, err, structured)
	}
	return ""
}

// An assistant runs the program as its command, and asks it of an agent with three
// engines: who serves what, how long a prompt would take, where it would go, and, after
// it was sent, what became of it.
func TestMCPOverStdio(t *testing.T) {
	p := start(t, agentArgs("--sim", "3", "--datapath", "copy")...)
	addr, admin := p.expect(`listening  ([^,]+),`), p.expect(`admin (http://\S+)`)
	p.expect(`replicas   (3 of 3)`)

	cmd := exec.Command(thisTest(), "mcp", "--admin", admin)
	cmd.Env = append(os.Environ(), "INFERRAIL_RUN=1")
	var said output
	cmd.Stderr = &said
	ctx, session := asked(t, &mcp.CommandTransport{Command: cmd})

	tools, err := session.ListTools(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, tool := range tools.Tools {
		if a := tool.Annotations; a == nil || !a.ReadOnlyHint || a.OpenWorldHint == nil || *a.OpenWorldHint {
			t.Errorf("%s is not told to read only: %+v", tool.Name, a)
		}
	}
	list, err := json.MarshalIndent(tools.Tools, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	golden(t, filepath.Join("testdata", "mcp", "tools.json"), append(list, '\n'))

	var fleet fleetAnswer
	if failed := call(t, ctx, session, "fleet_status", nil, &fleet); failed != "" || fleet.Health != "ok" || len(fleet.Replicas) != 3 || fleet.States["up"] != 3 || fleet.Datapath != "copy" {
		t.Errorf("fleet_status: %s %+v", failed, fleet)
	}
	fleet = fleetAnswer{}
	if failed := call(t, ctx, session, "fleet_status", map[string]any{"limit": 1, "model": "sim", "state": "up"}, &fleet); failed != "" || len(fleet.Replicas) != 1 || fleet.Unlisted != 2 {
		t.Errorf("fleet_status of one: %s %+v", failed, fleet)
	}
	var models modelsAnswer
	if failed := call(t, ctx, session, "models", map[string]any{}, &models); failed != "" || len(models.Models) != 1 || models.Models[0].Name != "sim" || models.Models[0].Prompts != "exact" || models.Models[0].Replicas != 3 {
		t.Errorf("models: %s %+v", failed, models)
	}

	prompt := strings.Repeat("Tell me more of it. ", 100)
	var route routeAnswer
	if failed := call(t, ctx, session, "route_prompt", map[string]any{"model": "sim", "prompt": prompt, "system": "Be brief.", "session": "s"}, &route); failed != "" ||
		!route.Exact || route.PromptTokens < 100 || len(route.Replicas) != 3 || route.Replicas[0].Replica != route.Winner || route.PredictedMS == nil {
		t.Errorf("route_prompt: %s %+v", failed, route)
	}
	// It goes there, and what it left in the cache is counted.
	body := fmt.Sprintf(`{"model":"sim","max_tokens":1,"messages":[{"role":"system","content":"Be brief."},{"role":"user","content":%q}]}`, prompt)
	resp, err := http.Post("http://"+addr+"/v1/chat/completions", "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	_ = resp.Body.Close()
	served := resp.Header.Get("x-inferrail-replica")
	var request map[string]any
	if err := json.Unmarshal([]byte(body), &request); err != nil {
		t.Fatal(err)
	}
	var explained explainAnswer
	if failed := call(t, ctx, session, "explain", map[string]any{"request": request}, &explained); failed != "" || explained.Winner != served || explained.Blocks == 0 ||
		explained.Replicas[0].CachedTokens == 0 || len(explained.Replicas[0].Terms) == 0 {
		t.Errorf("explain, served by %s: %s %+v", served, failed, explained)
	}
	route = routeAnswer{}
	if failed := call(t, ctx, session, "predict_latency", map[string]any{"model": "sim", "prompt_tokens": 5000}, &route); failed != "" || route.PromptTokens != 5000 || !route.Exact ||
		slices.ContainsFunc(route.Replicas, func(c candidate) bool { return c.CachedTokens > 0 || c.ExpectedMS == nil }) {
		t.Errorf("predict_latency: %s %+v", failed, route)
	}
	var decisions decisionsAnswer
	if failed := call(t, ctx, session, "recent_decisions", map[string]any{"model": "sim"}, &decisions); failed != "" || len(decisions.Decisions) != 1 || decisions.Decisions[0].Winner != served {
		t.Errorf("recent_decisions: %s %+v", failed, decisions)
	}

	// What cannot be answered says what to do.
	f := func(tool string, args map[string]any, want string) {
		t.Helper()
		var any map[string]any
		if failed := call(t, ctx, session, tool, args, &any); !strings.Contains(failed, want) {
			t.Errorf("%s %v: %q; want %q", tool, args, failed, want)
		}
	}
	f("route_prompt", map[string]any{"model": "other", "prompt": "x"}, "those served are sim")
	f("route_prompt", map[string]any{"model": "sim", "prompt": ""}, "want the text of a user")
	f("predict_latency", map[string]any{"model": "sim"}, "want either prompt, a text, or prompt_tokens")
	f("predict_latency", map[string]any{"model": "sim", "prompt_tokens": 1 << 30}, "want 1 to 1048576")
	f("predict_latency", map[string]any{"model": "", "prompt": "x"}, "the tool models lists those")
	f("fleet_status", map[string]any{"state": "sideways"}, "none of up, down, ejected")
	f("fleet_status", map[string]any{"model": "other"}, "the tool models lists those")
	f("fleet_status", map[string]any{"limit": "many"}, "limit")
	f("explain", map[string]any{"request": map[string]any{"model": "other"}}, "those served are sim")
	f("explain", map[string]any{"request": map[string]any{"model": "sim"}, "path": "/nowhere"}, "/nowhere")

	// The agent goes: the client is told, and the server lives on.
	p.signals <- syscall.SIGTERM
	p.exit(0)
	f("fleet_status", nil, "cannot ask the agent at "+admin)
	if err := session.Close(); err != nil {
		t.Errorf("it does not end with its input: %v", err)
	}
	if text := said.String(); text != "" {
		t.Errorf("it says %q", text)
	}
}

// Over HTTP each call stands by itself, and only who may call is answered.
func TestMCPOverHTTP(t *testing.T) {
	p := start(t, agentArgs("--sim", "1", "--datapath", "copy")...)
	admin := p.expect(`admin (http://\S+)`)
	p.expect(`replicas   (1 of 1)`)
	open := start(t, "mcp", "--admin", admin, "--listen", "127.0.0.1:0")
	at := open.expect(`listening  (http://\S+)`)
	ctx, session := asked(t, &mcp.StreamableClientTransport{Endpoint: at, DisableStandaloneSSE: true})
	var fleet fleetAnswer
	if failed := call(t, ctx, session, "fleet_status", nil, &fleet); failed != "" || len(fleet.Replicas) != 1 {
		t.Errorf("fleet_status: %s %+v", failed, fleet)
	}

	const initialize = `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"t","version":"1"}}}`
	post := func(url string, field, value string) (status int, body string) {
		t.Helper()
		req, err := http.NewRequest(http.MethodPost, url, strings.NewReader(initialize))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Accept", "application/json, text/event-stream")
		if field == "Host" {
			req.Host = value
		} else if field != "" {
			req.Header.Set(field, value)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(text)
	}
	f := func(url, field, value string, want int, text string) {
		t.Helper()
		if status, body := post(url, field, value); status != want || !strings.Contains(body, text) {
			t.Errorf("%s: %s: status %d, %q; want %d, %q", field, value, status, body, want, text)
		}
	}
	f(at, "", "", 200, `"serverInfo"`)
	f(at, "Origin", strings.TrimSuffix(at, "/mcp"), 200, `"serverInfo"`)
	f(at, "Origin", "http://evil.example", 403, "other web sites")
	f(at, "Origin", "null", 403, "other web sites")
	f(at, "Sec-Fetch-Site", "cross-site", 403, "other web sites")
	f(at, "Host", "evil.example", 403, "Host")

	closed := start(t, "mcp", "--admin", admin, "--listen", "127.0.0.1:0", "--listen-token-file", file(t, "token", "open sesame\n"))
	at = closed.expect(`listening  (http://\S+)`)
	f(at, "", "", 401, "Authorization: Bearer TOKEN")
	f(at, "Authorization", "Bearer open", 401, "Authorization: Bearer TOKEN")
	f(at, "Authorization", "Basic open sesame", 401, "Authorization: Bearer TOKEN")
	f(at, "Authorization", "bearer open sesame", 200, `"serverInfo"`)
	for _, q := range []*process{open, closed} {
		q.signals <- os.Interrupt
		q.exit(0)
	}
}

// A signal ends it, though its input stays open.
func TestMCPEndsWithASignal(t *testing.T) {
	cmd := exec.Command(thisTest(), "mcp")
	cmd.Env = append(os.Environ(), "INFERRAIL_RUN=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	var out output
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := launch(cmd); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	// It answers, so the signal finds it at work.
	if _, err := io.WriteString(in, `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"t","version":"1"}}}`+"\n"); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(20 * time.Second); !strings.Contains(out.String(), "serverInfo"); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("no answer: %s", &out)
		}
	}
	_ = cmd.Process.Signal(syscall.SIGTERM)
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("%v: %s", err, &out)
		}
	case <-time.After(20 * time.Second):
		_ = cmd.Process.Kill()
		t.Errorf("it does not end: %s", &out)
	}
}

func TestMCPFlags(t *testing.T) {
	f := func(want string, args ...string) {
		t.Helper()
		p := start(t, append([]string{"mcp"}, args...)...)
		p.exit(1)
		if got := p.stderr.String(); !strings.Contains(got, want) || p.stdout.String() != "" {
			t.Errorf("%v: %q, want %q", args, got, want)
		}
	}
	f("--admin \"ftp://x\" is not a URL", "--admin", "ftp://x")
	f("is not on loopback, so clients must have a token", "--listen", "0.0.0.0:0")
	f("is not on loopback, so clients must have a token", "--listen", ":0")
	f("is not on loopback, so clients must have a token", "--listen", "example.com:0")
	f("is not host:port", "--listen", "9091")
	f("with --listen only", "--listen-token", "x")
	f("--listen-token-file: open /nowhere", "--listen", "127.0.0.1:0", "--listen-token-file", "/nowhere")
	f("--token and --token-file are both given", "--token", "x", "--token-file", "/nowhere")
}

// golden compares with a file, which -rewrite writes anew.
func golden(t *testing.T, path string, got []byte) {
	t.Helper()
	if rewriting() {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s is not what there is now; go test -run %s -rewrite ./cmd/inferrail writes it anew:\n%s", path, t.Name(), got)
	}
}

// rewriting is datadriven's flag.
func rewriting() bool {
	return slices.Contains(os.Args, "-rewrite") || slices.Contains(os.Args, "-rewrite=true")
}
