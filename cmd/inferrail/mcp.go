package main

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/inferrail/inferrail/agent"
)

type mcpCommand struct {
	adminPort
	Listen       string `placeholder:"ADDR" help:"Speak Streamable HTTP at http://ADDR/mcp, such as 127.0.0.1:9091, instead of the standard input and output."`
	ListenToken  string `placeholder:"TOKEN" env:"INFERRAIL_MCP_TOKEN" help:"The token that clients over HTTP must send. Required when ADDR is not on loopback."`
	ListenTokens string `name:"listen-token-file" placeholder:"FILE" env:"INFERRAIL_MCP_TOKEN_FILE" help:"The file that holds it."`
}

// Help is shown below the flags.
func (*mcpCommand) Help() string {
	return `Lets assistants ask a running agent by the Model Context Protocol: how the fleet is, which models there are, how long a prompt would
take where, where it would go and why. All tools only read; none sends a prompt to an engine. As a command of an assistant:

  inferrail mcp --admin http://127.0.0.1:9090`
}

const (
	// toolTimeout bounds one call of a tool.
	toolTimeout = 30 * time.Second
	// mostListed bounds the replicas, models and decisions that an answer lists, and
	// usuallyListed is how many there are when the caller does not say.
	mostListed, usuallyListed = 200, 20
	// mostCalled bounds the body of a call over HTTP, and a line over the standard input:
	// a prompt may be in it.
	mostCalled = 16 << 20
	// mostCounted bounds the tokens of a prompt of which only the number is known.
	mostCounted = 1 << 20
)

// Run serves until the client has gone, or a signal comes.
func (c *mcpCommand) Run(ctx context.Context, e *env) error {
	ctx, cancel := e.interrupted(ctx)
	defer cancel()
	if _, err := c.address("", nil); err != nil {
		return err
	}
	if _, err := c.token(); err != nil {
		return err
	}
	if c.Listen != "" {
		return c.serveHTTP(ctx, e)
	}
	if c.ListenToken != "" || c.ListenTokens != "" {
		return errors.New("a token for clients is of use with --listen only")
	}
	in := io.NopCloser(e.stdin)
	if e.stdin == nil {
		in = os.Stdin
	}
	err := c.server().Run(ctx, &mcp.IOTransport{Reader: in, Writer: unclosed{e.stdout}, MaxLineLength: mostCalled})
	if ctx.Err() != nil || errors.Is(err, io.EOF) {
		return nil // asked to end
	}
	return err
}

// unclosed is a writer that is not the transport's to close.
type unclosed struct{ io.Writer }

// Close implements io.Closer.
func (unclosed) Close() error { return nil }

// serveHTTP serves at an address. Every call is whole by itself: there are no sessions.
func (c *mcpCommand) serveHTTP(ctx context.Context, e *env) error {
	token, err := secret(c.ListenToken, c.ListenTokens, "--listen-token-file")
	if err != nil {
		return err
	}
	if host, _, err := net.SplitHostPort(c.Listen); err != nil {
		return fmt.Errorf("--listen %q is not host:port; want such as 127.0.0.1:9091", c.Listen)
	} else if ip, err := netip.ParseAddr(host); token == "" && host != "localhost" && (err != nil || !ip.IsLoopback()) {
		return fmt.Errorf("--listen %s is not on loopback, so clients must have a token: INFERRAIL_MCP_TOKEN or --listen-token-file", c.Listen)
	}
	l, err := net.Listen("tcp", c.Listen)
	if err != nil {
		return err
	}
	one := c.server()
	mux := http.NewServeMux()
	mux.Handle("/mcp", mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return one },
		&mcp.StreamableHTTPOptions{Stateless: true, JSONResponse: true, MaxRequestBodyBytes: mostCalled}))
	server := &http.Server{
		Handler:           guardMCP(token, mux),
		ReadHeaderTimeout: 10 * time.Second,
		ReadTimeout:       time.Minute,
		WriteTimeout:      2 * time.Minute,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    16 << 10,
	}
	fmt.Fprintf(e.stdout, "listening  http://%s/mcp\n", l.Addr())
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	select {
	case err := <-served:
		return err
	case <-ctx.Done():
	}
	patience, end := context.WithTimeout(context.Background(), 5*time.Second)
	defer end()
	if server.Shutdown(patience) != nil {
		_ = server.Close()
	}
	<-served
	return nil
}

// guardMCP lets through who may call: who has the token or, where there is none, processes
// that ask for loopback by address, for which web pages in a browser do not count. The
// handler itself refuses other names at loopback too.
func guardMCP(token string, next http.Handler) http.Handler {
	want := sha256.Sum256([]byte(token))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if origin := r.Header.Get("Origin"); origin != "" {
			if u, err := url.Parse(origin); err != nil || u.Host == "" || u.Host != r.Host {
				http.Error(w, "requests of other web sites are refused", http.StatusForbidden)
				return
			}
		}
		if r.Header.Get("Sec-Fetch-Site") == "cross-site" {
			http.Error(w, "requests of other web sites are refused", http.StatusForbidden)
			return
		}
		scheme, got, _ := strings.Cut(r.Header.Get("Authorization"), " ")
		is := sha256.Sum256([]byte(strings.TrimSpace(got)))
		if token != "" && (!strings.EqualFold(scheme, "bearer") || subtle.ConstantTimeCompare(is[:], want[:]) != 1) {
			w.Header().Set("WWW-Authenticate", `Bearer realm="inferrail mcp"`)
			http.Error(w, "the token that inferrail mcp was given is wanted: Authorization: Bearer TOKEN", http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
}

const mcpInstructions = `inferrail routes OpenAI requests to LLM engines, each to the replica where its first token is expected soonest.
These tools ask one running agent. fleet_status is the place to begin when something is slow or fails; route_prompt and explain tell where
a request would go; predict_latency tells the expected time to the first token on each replica. Nothing is sent to an engine. Times are in
milliseconds, shares between 0 and 1. A number that is left out is not known.`

// server returns one with all tools. It may be called for by any number of clients.
func (c *mcpCommand) server() *mcp.Server {
	server := mcp.NewServer(&mcp.Implementation{Name: "inferrail", Title: "inferrail", Version: agent.Version()}, &mcp.ServerOptions{Instructions: mcpInstructions})
	addTool(server, "fleet_status", "Fleet status", "How the agent and its replicas are: health with reasons, the datapath, traffic of the last minute, and replicas with load, KV cache use, hit rate and time to first token, those first that want looking at.", c.fleetStatus)
	addTool(server, "models", "Models", "The models that are served: aliases, policy, replicas, and whether their prompts are followed exactly, or why not.", c.models)
	addTool(server, "predict_latency", "Predict latency", "The expected time to the first token of a prompt, or of so many tokens of which none is cached, on each replica of a model.", c.predictLatency)
	addTool(server, "route_prompt", "Route a prompt", "Where a prompt would go now and why, with the alternatives. Nothing is sent.", c.routePrompt)
	addTool(server, "explain", "Explain a request", "What becomes of the whole body of an OpenAI request: prompt tokens, per replica what is cached, waiting and computing times and all terms of its cost, admission, the winner, and what shadow policies would choose. Nothing is sent.", c.explain)
	addTool(server, "recent_decisions", "Recent decisions", "The last requests: where each went and why, what was predicted, and what came of it. The newest first.", c.recentDecisions)
	return server
}

// addTool adds one that only reads. Its errors are told to the caller as those of the
// tool.
func addTool[In, Out any](server *mcp.Server, name, title, description string, call func(context.Context, In) (Out, error)) {
	closed := false
	mcp.AddTool(server, &mcp.Tool{
		Name: name, Title: title, Description: description,
		Annotations: &mcp.ToolAnnotations{Title: title, ReadOnlyHint: true, IdempotentHint: true, OpenWorldHint: &closed, DestructiveHint: &closed},
	}, func(ctx context.Context, _ *mcp.CallToolRequest, in In) (*mcp.CallToolResult, Out, error) {
		ctx, end := context.WithTimeout(ctx, toolTimeout)
		defer end()
		out, err := call(ctx, in)
		return nil, out, err
	})
}

// limit is how many rows are listed.
func limit(asked int) int {
	if asked <= 0 {
		return usuallyListed
	}
	return min(asked, mostListed)
}

// known is a number, or nil when it is infinite or none.
func known(v float64) *float64 {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return nil
	}
	v = math.Round(1000*v) / 1000
	return &v
}

// The questions and answers of the tools. What jsonschema says is for their callers.
type (
	fleetQuestion struct {
		Model string `json:"model,omitempty" jsonschema:"only replicas of this model, by its name"`
		State string `json:"state,omitempty" jsonschema:"only replicas in this state: up, down, ejected, joining or leaving"`
		Limit int    `json:"limit,omitempty" jsonschema:"how many replicas are listed, 20 by default and 200 at most"`
	}
	fleetAnswer struct {
		Health      string         `json:"health" jsonschema:"ok, degraded, not ready or draining"`
		Reasons     []string       `json:"reasons" jsonschema:"why it is not ok"`
		Version     string         `json:"version"`
		UpSeconds   float64        `json:"up_seconds"`
		Datapath    string         `json:"datapath" jsonschema:"packet: the kernel carries answers; copy: userspace does"`
		DatapathWhy string         `json:"datapath_why"`
		KernelShare *float64       `json:"kernel_share,omitempty" jsonschema:"of the answers so far, carried by the kernel"`
		Requests    *float64       `json:"requests_per_s,omitempty" jsonschema:"in the last minute, as what follows"`
		Failed      *float64       `json:"failed_per_s,omitempty"`
		Refused     *float64       `json:"refused_per_s,omitempty"`
		P50         *float64       `json:"first_token_p50_ms,omitempty"`
		P99         *float64       `json:"first_token_p99_ms,omitempty" jsonschema:"at most"`
		HitRate     *float64       `json:"hit_rate,omitempty" jsonschema:"share of prompt tokens that were cached"`
		Running     int64          `json:"running" jsonschema:"requests now"`
		Waiting     int            `json:"waiting" jsonschema:"requests that wait in the agent now"`
		States      map[string]int `json:"states" jsonschema:"replicas by state"`
		Replicas    []fleetReplica `json:"replicas"`
		Unlisted    int            `json:"unlisted" jsonschema:"replicas that were asked for and are not listed, by the limit"`
		Failures    []string       `json:"failures" jsonschema:"the last requests that have failed"`
	}
	fleetReplica struct {
		ID        string   `json:"id"`
		State     string   `json:"state"`
		Why       string   `json:"why,omitempty"`
		Engine    string   `json:"engine,omitempty"`
		Running   int      `json:"running" jsonschema:"this agent's requests there"`
		Pending   int      `json:"pending" jsonschema:"this agent's requests in line for it"`
		Waiting   *int     `json:"engine_waiting,omitempty" jsonschema:"what the engine says that waits there"`
		KV        *float64 `json:"kv_use,omitempty" jsonschema:"share of its KV cache in use"`
		HitRate   *float64 `json:"hit_rate,omitempty"`
		Cache     string   `json:"cache,omitempty" jsonschema:"how well its cache is known: exact, approximate, repairing or mismatched"`
		BacklogMS float64  `json:"backlog_ms" jsonschema:"until the prompts that were sent there are computed"`
		P50       *float64 `json:"first_token_p50_ms,omitempty"`
		P99       *float64 `json:"first_token_p99_ms,omitempty"`
		Prefill   float64  `json:"prefill_tokens_per_s,omitempty" jsonschema:"as it has proved to compute prompts"`
		Tokens    float64  `json:"tokens_per_s"`
	}

	modelsQuestion struct {
		Limit int `json:"limit,omitempty" jsonschema:"how many models are listed, 20 by default and 200 at most"`
	}
	modelsAnswer struct {
		Models   []servedModel `json:"models"`
		Unlisted int           `json:"unlisted"`
	}
	servedModel struct {
		Name      string   `json:"name"`
		Aliases   []string `json:"aliases"`
		Policy    string   `json:"policy"`
		Replicas  int      `json:"replicas" jsonschema:"that take its requests now"`
		Prompts   string   `json:"prompts" jsonschema:"exact, approximate, demoted or loading"`
		Why       string   `json:"why,omitempty" jsonschema:"why not exact"`
		Tokenizer string   `json:"tokenizer,omitempty"`
		BlockSize int      `json:"block_size,omitempty" jsonschema:"tokens in a block of the KV cache"`
	}

	latencyQuestion struct {
		Model        string `json:"model" jsonschema:"the name or an alias"`
		Prompt       string `json:"prompt,omitempty" jsonschema:"the text of a user; this or prompt_tokens is wanted"`
		PromptTokens int    `json:"prompt_tokens,omitempty" jsonschema:"or how many tokens a prompt has, of which none is cached"`
		Limit        int    `json:"limit,omitempty" jsonschema:"how many replicas are listed, 20 by default and 200 at most"`
	}
	routeQuestion struct {
		Model   string `json:"model" jsonschema:"the name or an alias"`
		Prompt  string `json:"prompt" jsonschema:"the text of a user"`
		System  string `json:"system,omitempty" jsonschema:"a system prompt before it"`
		Session string `json:"session,omitempty" jsonschema:"the session that it belongs to"`
		Limit   int    `json:"limit,omitempty" jsonschema:"how many replicas are listed, 20 by default and 200 at most"`
	}
	routeAnswer struct {
		Model        string      `json:"model"`
		Policy       string      `json:"policy"`
		Winner       string      `json:"winner" jsonschema:"the replica; empty when there is none"`
		Reason       string      `json:"reason"`
		PredictedMS  *float64    `json:"predicted_ms,omitempty" jsonschema:"to the first token"`
		PromptTokens int         `json:"prompt_tokens"`
		Exact        bool        `json:"exact" jsonschema:"the number of tokens is known and not guessed"`
		Why          string      `json:"why_approximate,omitempty"`
		Refused      bool        `json:"refused" jsonschema:"it would be refused now, for its budget"`
		Waits        string      `json:"waits,omitempty" jsonschema:"it would wait in the agent, and for what"`
		Replicas     []candidate `json:"replicas" jsonschema:"the winner first, then by the expected time to the first token"`
		Unlisted     int         `json:"unlisted"`
	}
	candidate struct {
		Replica      string   `json:"replica"`
		Excluded     string   `json:"excluded,omitempty" jsonschema:"why it is not to be chosen"`
		ExpectedMS   *float64 `json:"expected_ms,omitempty" jsonschema:"to the first token: waiting and computing"`
		WaitMS       *float64 `json:"wait_ms,omitempty"`
		PrefillMS    *float64 `json:"prefill_ms,omitempty"`
		CachedTokens int      `json:"cached_tokens" jsonschema:"of the prompt, that need not be computed there"`
		CacheExact   bool     `json:"cache_exact"`
		InFlight     int      `json:"in_flight"`
		Cost         *float64 `json:"cost,omitempty" jsonschema:"in the policy's measure"`
		Terms        []term   `json:"terms,omitempty" jsonschema:"that add up to the cost"`
	}
	term struct {
		Name  string   `json:"name"`
		Value *float64 `json:"value,omitempty" jsonschema:"left out when it is infinite"`
	}

	explainQuestion struct {
		Request map[string]any    `json:"request" jsonschema:"the body of the request, with model, and messages or prompt"`
		Path    string            `json:"path,omitempty" jsonschema:"/v1/chat/completions by default"`
		Headers map[string]string `json:"headers,omitempty" jsonschema:"fields of the request, such as x-session-id, x-inferrail-class or x-inferrail-budget-ms"`
		Limit   int               `json:"limit,omitempty" jsonschema:"how many replicas are listed, 20 by default and 200 at most"`
	}
	explainAnswer struct {
		routeAnswer
		Blocks    int            `json:"blocks" jsonschema:"whole blocks of the prompt"`
		BlockSize int            `json:"block_size"`
		BudgetMS  float64        `json:"budget_ms,omitempty"`
		Admission string         `json:"admission,omitempty"`
		Shadows   []shadowChoice `json:"shadows" jsonschema:"what other policies would choose"`
	}
	shadowChoice struct {
		Policy      string   `json:"policy"`
		Winner      string   `json:"winner"`
		Same        bool     `json:"same"`
		PredictedMS *float64 `json:"predicted_ms,omitempty"`
	}

	decisionsQuestion struct {
		Model  string `json:"model,omitempty" jsonschema:"only those of this model, by its name"`
		Failed bool   `json:"failed,omitempty" jsonschema:"only requests that have failed or were refused"`
		Limit  int    `json:"limit,omitempty" jsonschema:"how many are listed, 20 by default and 200 at most"`
	}
	decisionsAnswer struct {
		Decisions []decisionRow `json:"decisions"`
		Kept      uint64        `json:"kept" jsonschema:"decisions that were kept so far, of made"`
		Made      uint64        `json:"made"`
	}
	decisionRow struct {
		Time         time.Time `json:"time"`
		RequestID    string    `json:"request_id"`
		Model        string    `json:"model"`
		Policy       string    `json:"policy"`
		Winner       string    `json:"winner" jsonschema:"empty when it was refused"`
		Reason       string    `json:"reason"`
		PromptTokens int       `json:"prompt_tokens"`
		CachedTokens int       `json:"cached_tokens" jsonschema:"that were expected there"`
		PredictedMS  *float64  `json:"predicted_ms,omitempty"`
		FirstTokenMS *float64  `json:"first_token_ms,omitempty" jsonschema:"as it was seen"`
		Outcome      string    `json:"outcome" jsonschema:"running while it is not over"`
		Status       int       `json:"status,omitempty"`
		Attempts     int       `json:"attempts,omitempty"`
		Disagreed    []string  `json:"disagreed,omitempty" jsonschema:"shadow policies that would have chosen another replica"`
	}
)

func (c *mcpCommand) fleetStatus(ctx context.Context, q fleetQuestion) (out fleetAnswer, err error) {
	s, err := (&statusCommand{adminPort: c.adminPort}).look(ctx)
	if err != nil {
		return out, err
	}
	o, t := &s.Overview, s.traffic()
	if q.State != "" {
		if _, ok := o.States[q.State]; !ok {
			return out, fmt.Errorf("state %q is none of up, down, ejected, joining, leaving", q.State)
		}
	}
	number := -1
	if q.Model != "" {
		if number = slices.IndexFunc(o.Models, func(m agent.ModelOverview) bool { return m.Name == q.Model }); number < 0 {
			return out, fmt.Errorf("model %q is not served; the tool models lists those that are", q.Model)
		}
	}
	out = fleetAnswer{Health: s.Health, Reasons: o.Degraded, Version: o.Version, UpSeconds: math.Round(o.Time.Sub(o.Started).Seconds()),
		Datapath: o.Tier, DatapathWhy: o.TierWhy, Requests: known(t.requests), Failed: known(t.failed), Refused: known(t.refused),
		P50: known(t.firstToken), P99: known(t.worst), HitRate: known(t.hits), Running: o.Running, Waiting: o.Waiting, States: o.States,
		Replicas: []fleetReplica{}, Failures: []string{}}
	var kernel, all uint64
	for _, r := range s.Datapath.Responses {
		if all += r.Count; r.Tier == "packet" {
			kernel += r.Count
		}
	}
	if all > 0 {
		out.KernelShare = known(float64(kernel) / float64(all))
	}
	for _, f := range s.Failures {
		out.Failures = append(out.Failures, f.line())
	}
	for _, r := range byUrgency(o.Replicas) {
		if q.State != "" && r.State != q.State || number >= 0 && !slices.Contains(r.Models, number) {
			continue
		}
		if len(out.Replicas) == limit(q.Limit) {
			out.Unlisted++
			continue
		}
		out.Replicas = append(out.Replicas, fleetReplica{r.ID, r.State, r.Why, r.Engine, r.Running, r.Pending, r.EngineWaiting, r.KV, r.HitRate, r.Cache,
			r.BacklogMS, r.FirstTokenP50MS, r.FirstTokenP99MS, r.PrefillTokensPerS, r.TokensPerS})
	}
	return out, nil
}

func (c *mcpCommand) models(ctx context.Context, q modelsQuestion) (out modelsAnswer, err error) {
	var fleet struct {
		Models []struct {
			Name     string   `json:"name"`
			Aliases  []string `json:"aliases"`
			Policy   string   `json:"policy"`
			Replicas []string `json:"replicas"`
			Prompts  struct {
				State     string `json:"state"`
				Why       string `json:"why"`
				Tokenizer string `json:"tokenizer"`
				BlockSize int    `json:"block_size"`
			} `json:"prompts"`
		} `json:"models"`
	}
	if err := c.read(ctx, inquiry{path: "debug/fleet"}, &fleet); err != nil {
		return out, err
	}
	out.Models = []servedModel{}
	for _, m := range fleet.Models {
		if len(out.Models) == limit(q.Limit) {
			out.Unlisted++
			continue
		}
		out.Models = append(out.Models, servedModel{m.Name, slices.Concat([]string{}, m.Aliases), m.Policy, len(m.Replicas), m.Prompts.State, m.Prompts.Why, m.Prompts.Tokenizer, m.Prompts.BlockSize})
	}
	return out, nil
}

func (c *mcpCommand) predictLatency(ctx context.Context, q latencyQuestion) (out routeAnswer, err error) {
	switch {
	case q.Model == "":
		return out, errNoModel
	case (q.Prompt == "") == (q.PromptTokens == 0):
		return out, errors.New("want either prompt, a text, or prompt_tokens, a number")
	case q.PromptTokens < 0 || q.PromptTokens > mostCounted:
		return out, fmt.Errorf("prompt_tokens is %d; want 1 to %d", q.PromptTokens, mostCounted)
	case q.Prompt != "":
		return c.routePrompt(ctx, routeQuestion{Model: q.Model, Prompt: q.Prompt, Limit: q.Limit})
	}
	// Tokens in an order that nobody has sent.
	ids := make([]int, q.PromptTokens)
	for i := range ids {
		ids[i] = 1000 + rand.IntN(20000)
	}
	x, err := c.ask1(ctx, "/v1/completions", nil, map[string]any{"model": q.Model, "prompt": ids, "max_tokens": 1})
	if err != nil {
		return out, err
	}
	return routeOf(x, q.Limit, false), nil
}

func (c *mcpCommand) routePrompt(ctx context.Context, q routeQuestion) (out routeAnswer, err error) {
	if q.Model == "" {
		return out, errNoModel
	}
	if q.Prompt == "" {
		return out, errors.New("prompt is empty; want the text of a user")
	}
	type message struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	}
	messages := []message{{"user", q.Prompt}}
	if q.System != "" {
		messages = slices.Insert(messages, 0, message{"system", q.System})
	}
	header := http.Header{}
	if q.Session != "" {
		header.Set("X-Session-Id", q.Session)
	}
	x, err := c.ask1(ctx, "/v1/chat/completions", header, map[string]any{"model": q.Model, "messages": messages})
	if err != nil {
		return out, err
	}
	return routeOf(x, q.Limit, false), nil
}

func (c *mcpCommand) explain(ctx context.Context, q explainQuestion) (out explainAnswer, err error) {
	header := http.Header{}
	for name, value := range q.Headers {
		if !strings.EqualFold(name, "authorization") { // of the admin port, here
			header.Set(name, value)
		}
	}
	x, err := c.ask1(ctx, cmp.Or(q.Path, "/v1/chat/completions"), header, q.Request)
	if err != nil {
		return out, err
	}
	out = explainAnswer{routeAnswer: routeOf(x, q.Limit, true), Blocks: x.Blocks, BlockSize: x.BlockSize, BudgetMS: x.BudgetMS, Admission: x.Admission, Shadows: []shadowChoice{}}
	for _, s := range x.Shadows {
		out.Shadows = append(out.Shadows, shadowChoice{s.Policy, s.Winner, s.Same, known(float64(s.PredictedMS))})
	}
	return out, nil
}

func (c *mcpCommand) recentDecisions(ctx context.Context, q decisionsQuestion) (out decisionsAnswer, err error) {
	var recent recentDecisions
	if err := c.read(ctx, inquiry{path: "debug/decisions"}, &recent); err != nil {
		return out, err
	}
	out = decisionsAnswer{Decisions: []decisionRow{}, Kept: recent.Kept, Made: recent.Made}
	for _, r := range slices.Backward(recent.Decisions) {
		if len(out.Decisions) == limit(q.Limit) {
			break
		}
		if q.Model != "" && r.Model != q.Model || q.Failed && !r.failed() {
			continue
		}
		row := decisionRow{Time: r.Time, RequestID: r.RequestID, Model: r.Model, Policy: r.Policy, Winner: r.Winner, Reason: r.Reason, PromptTokens: r.PromptTokens,
			CachedTokens: r.CachedTokens, PredictedMS: r.PredictedMS, Outcome: "running", Disagreed: r.Disagreed}
		if o := r.Outcome; o != nil {
			row.Outcome, row.Status, row.Attempts, row.FirstTokenMS = o.Outcome, o.Status, o.Attempts, o.FirstTokenMS
		}
		out.Decisions = append(out.Decisions, row)
	}
	return out, nil
}

var errNoModel = errors.New("model is missing; the tool models lists those that are served")

// ask1 explains one request.
func (c *mcpCommand) ask1(ctx context.Context, path string, header http.Header, request any) (*agent.Explanation, error) {
	body, err := json.Marshal(request)
	if err != nil {
		return nil, err
	}
	x := &agent.Explanation{}
	return x, c.read(ctx, inquiry{path: "explain", query: url.Values{"path": {path}}, header: header, body: body}, x)
}

// routeOf is the short form of an explanation, with the terms of each cost when they are
// wanted.
func routeOf(x *agent.Explanation, most int, terms bool) routeAnswer {
	out := routeAnswer{Model: x.Model, Policy: x.Policy, Winner: x.Winner, Reason: x.Reason, PredictedMS: known(float64(x.PredictedMS)), PromptTokens: x.PromptTokens,
		Exact: x.Exact, Refused: x.Refused, Waits: x.Waits, Replicas: []candidate{}}
	if !x.Exact {
		out.Why = cmp.Or(x.WhyApproximate, x.Why)
	}
	order := make([]int, len(x.Replicas))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		p, q := &x.Replicas[a], &x.Replicas[b]
		rank := func(winner bool) int {
			if winner {
				return 0
			}
			return 1
		}
		return cmp.Or(cmp.Compare(rank(p.Replica == x.Winner), rank(q.Replica == x.Winner)), cmp.Compare(p.ExpectedMS, q.ExpectedMS))
	})
	for n, i := range order {
		if n == limit(most) {
			out.Unlisted = len(order) - n
			break
		}
		r := &x.Replicas[i]
		row := candidate{Replica: r.Replica, Excluded: r.Excluded, ExpectedMS: known(float64(r.ExpectedMS)), WaitMS: known(float64(r.WaitMS)), PrefillMS: known(float64(r.PrefillMS)),
			CachedTokens: r.CachedTokens, CacheExact: r.CacheExact, InFlight: r.InFlight, Cost: known(float64(r.Cost))}
		if terms {
			for _, t := range r.Terms {
				row.Terms = append(row.Terms, term{t.Name, known(float64(t.Value))})
			}
		}
		out.Replicas = append(out.Replicas, row)
	}
	return out
}
