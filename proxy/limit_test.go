package proxy

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/simulator"
)

// key makes an API key whose text is its name in capitals.
func key(name string, rates policy.Rates, models ...string) *Key {
	return &Key{Name: name, Hash: sha256.Sum256([]byte(strings.ToUpper(name))), Models: models, Budget: policy.NewBudget(rates, time.Now())}
}

// left is what a key has left to use.
func (k *Key) left() policy.Quotas { return k.Budget.Quotas(time.Now()) }

// TestKeys: who may ask for what.
func TestKeys(t *testing.T) {
	var told http.Header
	e := newRawEngine(t, func(c *engineSide) {
		for {
			req := c.request()
			if req == nil {
				return
			}
			told = req.Header
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nx-ratelimit-remaining-requests: 99\r\n\r\nok")
		}
	})
	r := newRig(t, Limits{}, nil, e.url())
	r.s.SetAccess(NewAccess([]*Key{key("all", policy.Rates{}), key("other", policy.Rates{}, "x"), key("alias", policy.Rates{}, "alias")}, nil))
	c := r.dial()
	f := func(request string, status int, text string) *http.Response {
		t.Helper()
		c.send(request)
		resp, body := c.answer()
		if resp.StatusCode != status || !strings.Contains(body, text) {
			t.Errorf("%.120q: got %d %s", request, resp.StatusCode, body)
		}
		return resp
	}
	get := func(path, fields string) string { return "GET " + path + " HTTP/1.1\r\nHost: x\r\n" + fields + "\r\n" }

	f(get("/health", ""), 200, "")
	if resp := f(get("/v1/models", ""), 401, "AuthenticationError"); resp.Header.Get("WWW-Authenticate") != "Bearer" {
		t.Error("no WWW-Authenticate")
	}
	f(get("/nothing", ""), 401, "") // who may not ask learns nothing
	f(get("/v1/models", "Authorization: Bearer ALL\r\n"), 200, `"id":"m"`)
	f(get("/v1/models", "authorization: bearer ALL\r\n"), 200, `"id":"m"`)
	f(get("/v1/models", "x-api-key: ALL\r\n"), 200, `"id":"m"`)
	f(get("/v1/models", "Authorization: Bearer all\r\n"), 401, "")
	f(get("/v1/models", "Authorization: Basic ALL\r\n"), 401, "")
	f(get("/v1/models", "Authorization: Bearer ALL\r\nAuthorization: Bearer OTHER\r\n"), 401, "")
	f(get("/v1/models", "Authorization: Bearer OTHER\r\n"), 200, `"data":[]`)
	f(get("/v1/models/m", "Authorization: Bearer OTHER\r\n"), 404, "")
	f(post(hello), 401, "")
	f(post(hello, "Authorization: Bearer OTHER\r\n"), 403, "The API key `other` may not be used for the model `m`.")
	// A key may be for a model by an alias of it.
	f(post(hello, "Authorization: Bearer ALIAS\r\n"), 403, "")
	f(post(`{"model":"alias"}`, "Authorization: Bearer ALIAS\r\n"), 200, "ok")
	f(get("/v1/models", "Authorization: Bearer ALIAS\r\n"), 200, `"data":[{"id":"alias"`)
	f(get("/v1/models/alias", "Authorization: Bearer ALIAS\r\n"), 200, "")
	f(post(hello, "Authorization: Bearer ALL\r\nx-api-key: ALL\r\n"), 200, "ok")
	if told.Get("Authorization") != "" || told.Get("X-Api-Key") != "" {
		t.Errorf("the engine was told the client's key: %v", told)
	}
	r.replicas[0].SetKey("engine's")
	f(post(hello, "Authorization: Bearer ALL\r\n"), 200, "ok")
	if told.Get("Authorization") != "Bearer engine's" {
		t.Errorf("the engine was told %v", told)
	}
	// Without keys of the agent's own the client's goes to the engine that has
	// none set.
	r.s.SetAccess(nil)
	f(post(hello, "Authorization: Bearer mine\r\n"), 200, "ok")
	if told.Get("Authorization") != "Bearer engine's" {
		t.Errorf("the engine was told %v", told)
	}
	r.replicas[0].SetKey("")
	f(post(hello, "Authorization: Bearer mine\r\n"), 200, "ok")
	if told.Get("Authorization") != "Bearer mine" {
		t.Errorf("the engine was told %v", told)
	}

	// A large body is not read from one who may not send it.
	r.s.SetAccess(NewAccess([]*Key{key("all", policy.Rates{})}, nil))
	c = r.dial()
	c.send("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50000000\r\n\r\n{")
	if resp, _ := c.answer(); resp.StatusCode != 401 || !resp.Close {
		t.Errorf("got %d, close %v", resp.StatusCode, resp.Close)
	}
	c = r.dial()
	c.send("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n")
	if resp, _ := c.answer(); resp.StatusCode != 401 {
		t.Errorf("was asked to go on: %d", resp.StatusCode)
	}
}

// TestRequestsPerMinute: when the requests are used up, the client is told how
// long to wait, and a request that no engine has answered is given back.
func TestRequestsPerMinute(t *testing.T) {
	e := newRawEngine(t, answering(fixed("ok")))
	r := newRig(t, Limits{}, nil, e.url())
	k := key("k", policy.Rates{Requests: 3})
	r.s.SetAccess(NewAccess([]*Key{k}, nil))
	c := r.dial()
	for i := range 4 {
		c.send(post(hello, "Authorization: Bearer K\r\n"))
		resp, body := c.answer()
		h := resp.Header
		if i < 3 {
			if resp.StatusCode != 200 || h.Get("X-Ratelimit-Limit-Requests") != "3" || h.Get("X-Ratelimit-Remaining-Requests") != fmt.Sprint(2-i) {
				t.Fatalf("request %d: %d %v", i, resp.StatusCode, h)
			}
			continue
		}
		if resp.StatusCode != 429 || !strings.Contains(body, "RateLimitError") || h.Get("X-Ratelimit-Remaining-Requests") != "0" {
			t.Errorf("one too many: %d %s %v", resp.StatusCode, body, h)
		}
		if s := h.Get("Retry-After"); s != "20" && s != "19" {
			t.Errorf("retry after %q seconds", s)
		}
	}
	eventually(t, 20*time.Second, "it is counted", func() bool { return r.outcome("over_rate") == 1 })
	k.Budget.SetRates(policy.Rates{Requests: 1000}, time.Now())
	before := k.left().Requests.Remaining
	r.s.SetFleet(&Fleet{Models: map[string]*Model{"m": {Name: "m"}}})
	c.send(post(hello, "Authorization: Bearer K\r\n"))
	if resp, _ := c.answer(); resp.StatusCode != 503 {
		t.Errorf("got %d", resp.StatusCode)
	}
	eventually(t, 20*time.Second, "a request without an engine is given back", func() bool { return k.left().Requests.Remaining >= before })
}

// TestTokensPerMinute: tokens are reserved, and settled by what the engine has
// counted, of streams too whose client has not asked for it. What the client
// gets is what it would have got.
func TestTokensPerMinute(t *testing.T) {
	cfg := simulator.Config{ServedModelName: []string{"m"}, ZeroLatency: true, Created: 7}
	sim, err := simulator.Start(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer sim.Close()
	const prompt = `"messages":[{"role":"user","content":"tell me"}]`
	f := func(name, path, body string, want policy.Charge) {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, Limits{}, nil, sim.URL())
			k := key("k", policy.Rates{InputTokens: 1 << 40, OutputTokens: 1 << 40})
			r.s.SetAccess(NewAccess([]*Key{k}, nil))
			c := r.dial()
			c.send(strings.Replace(post(body, "X-Request-Id: same\r\nAuthorization: Bearer K\r\n"), "/v1/chat/completions", path, 1))
			resp, got := c.answer()
			expected, err := simulator.ExpectBody(cfg, path, "same", []byte(body))
			if err != nil {
				t.Fatal(err)
			}
			// vLLM tells its fingerprint in the usage chunk when there is one.
			whole := fingerprint.ReplaceAllString(string(expected), "")
			if got = fingerprint.ReplaceAllString(got, ""); resp.StatusCode != 200 || got != whole {
				t.Errorf("%d, got\n%s\nwant\n%s", resp.StatusCode, got, whole)
			}
			counts := func(kind string) int64 {
				return int64(counted(r.s.stats.keyTokens, func(name, value string) bool { return name == "kind" && value == kind }))
			}
			eventually(t, 20*time.Second, fmt.Sprintf("%+v are counted", want), func() bool {
				return policy.Charge{Input: counts("prompt"), Output: counts("completion")} == want
			})
			// The budget has filled up again a little.
			if q := k.left(); q.Output.Remaining < q.Output.Limit-want.Output {
				t.Errorf("%d of %d are left", q.Output.Remaining, q.Output.Limit)
			}
		})
	}
	ask := func(rest string) string { return `{"model":"m",` + prompt + rest + `}` }
	const chat, text = "/v1/chat/completions", "/v1/completions"
	input := int64(simulatorPrompt(t, cfg, chat, ask(`,"max_tokens":7`)))
	f("whole", chat, ask(`,"max_tokens":7`), policy.Charge{Input: input, Output: 7})
	f("stream", chat, ask(`,"max_tokens":7,"stream":true`), policy.Charge{Input: input, Output: 7})
	f("stream with usage", chat, ask(`,"max_tokens":7,"stream":true,"stream_options":{"include_usage":true}`), policy.Charge{Input: input, Output: 7})
	f("stream without", chat, ask(`,"max_tokens":7,"stream":true,"stream_options":{"include_usage":false}`), policy.Charge{Input: input, Output: 7})
	f("null options", chat, ask(`,"stream":true,"max_tokens":300,"stream_options":null`), policy.Charge{Input: input, Output: 300})
	f("no options", chat, ask(`,"stream":true,"max_tokens":3,"stream_options":{}`), policy.Charge{Input: input, Output: 3})
	f("two choices", chat, ask(`,"stream":true,"max_tokens":5,"n":2`), policy.Charge{Input: input, Output: 10})
	f("text", text, `{"model":"m","prompt":[1,2,3],"stream":true,"max_tokens":4}`, policy.Charge{Input: 3, Output: 4})
}

var fingerprint = regexp.MustCompile(`,"system_fingerprint":"[^"]*"`)

// simulatorPrompt is how many tokens the simulator's prompt has.
func simulatorPrompt(t *testing.T, cfg simulator.Config, path, body string) uint64 {
	t.Helper()
	whole, err := simulator.ExpectBody(cfg, path, "x", []byte(body))
	if err != nil {
		t.Fatal(err)
	}
	u, ok := findUsage(whole[max(0, len(whole)-TailBytes):])
	if !ok {
		t.Fatalf("no usage in %s", whole)
	}
	return u.prompt
}

// TestTokensRunOut: a limit refuses what would exceed it, input and output each
// by its own.
func TestTokensRunOut(t *testing.T) {
	e := newRawEngine(t, answering(fixed(`{"usage":{"prompt_tokens":40,"completion_tokens":10}}`)))
	r := newRig(t, Limits{}, nil, e.url())
	k := key("k", policy.Rates{InputTokens: 100, OutputTokens: 1000})
	r.s.SetAccess(NewAccess([]*Key{k}, nil))
	c := r.dial()
	status := func(body string) int {
		t.Helper()
		c.send(post(body, "Authorization: Bearer K\r\n"))
		resp, _ := c.answer()
		eventually(t, 20*time.Second, "nothing runs", func() bool { return r.s.Datapath().Running == 0 })
		return resp.StatusCode
	}
	if got := status(`{"model":"m","max_tokens":900}`); got != 200 {
		t.Fatal(got)
	}
	if q := k.left(); q.Input.Remaining > 61 || q.Output.Remaining < 990 {
		t.Errorf("left after the first: %+v", q)
	}
	if got := status(`{"model":"m","max_tokens":999}`); got != 429 {
		t.Errorf("more output than there is: %d", got)
	}
	if got := status(`{"model":"m","max_tokens":10}`); got != 200 {
		t.Error(got)
	}
	if got := status(`{"model":"m","max_tokens":10,"x":"` + strings.Repeat("word ", 100) + `"}`); got != 429 {
		t.Errorf("more input than there is: %d", got)
	}
}

// TestUsageIsTakenOut: an answer of any framing reaches the client without the
// chunk that it has not asked for, one client of HTTP/1.0 among them.
func TestUsageIsTakenOut(t *testing.T) {
	const first = "data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n"
	const last = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":1}}\n\n"
	const done = "data: [DONE]\n\n"
	const events = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
	f := func(name, response string, http10 bool) {
		t.Run(name, func(t *testing.T) {
			e := newRawEngine(t, func(c *engineSide) {
				req := c.request()
				body, _ := io.ReadAll(req.Body)
				if !bytes.Contains(body, []byte(`"include_usage":true`)) {
					t.Errorf("the engine was sent %s", body)
				}
				for _, part := range strings.SplitAfter(response, "\r\n\r\n") {
					io.WriteString(c, part)
					time.Sleep(time.Millisecond)
				}
			})
			r := newRig(t, Limits{}, nil, e.url())
			r.s.SetAccess(NewAccess([]*Key{key("k", policy.Rates{OutputTokens: 1e6})}, nil))
			c := r.dial()
			request := post(hello, "Authorization: Bearer K\r\n")
			if http10 {
				request = strings.Replace(request, "HTTP/1.1", "HTTP/1.0", 1)
			}
			c.send(request)
			resp, body := c.answer()
			if resp.StatusCode != 200 || body != first+done {
				t.Errorf("got %d %q", resp.StatusCode, body)
			}
			if chunked := len(resp.TransferEncoding) > 0; chunked == http10 {
				t.Errorf("transfer encoding %q", resp.TransferEncoding)
			}
		})
	}
	chunked := events + "Transfer-Encoding: chunked\r\n\r\n" + chunk(first) + chunk(last[:20]) + chunk(last[20:]) + chunk(done) + "0\r\n\r\n"
	f("chunked", chunked, false)
	f("chunked, HTTP/1.0", chunked, true)
	f("in one piece", events+fmt.Sprintf("Content-Length: %d\r\n\r\n", len(first+last+done))+first+last+done, false)
	f("until close", events+"\r\n"+first+last+done, false)
	f("until close, HTTP/1.0", events+"\r\n"+first+last+done, true)
}

// TestScriptsOfPages: what scripts of web pages may do.
func TestScriptsOfPages(t *testing.T) {
	e := newRawEngine(t, answering("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nAccess-Control-Allow-Origin: *\r\nVary: Accept\r\n\r\nok"))
	r := newRig(t, Limits{}, nil, e.url())
	c := r.dial()
	f := func(request string, status int, origin string) http.Header {
		t.Helper()
		c.send(request)
		resp, _ := c.answer()
		if got := strings.Join(resp.Header.Values("Access-Control-Allow-Origin"), " and "); resp.StatusCode != status || got != origin {
			t.Errorf("%.100q: %d, allowed is %q", request, resp.StatusCode, got)
		}
		return resp.Header
	}
	const page = "Origin: https://chat.example.org\r\n"
	preflight := "OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + page +
		"Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization,content-type\r\n\r\n"

	// Off: what the engine says passes.
	f(post(hello, page), 200, "*")
	f(preflight, 204, "")

	r.s.SetAccess(NewAccess([]*Key{key("k", policy.Rates{})}, []string{"*"}))
	h := f(preflight, 204, "*")
	if h.Get("Access-Control-Allow-Methods") == "" || h.Get("Access-Control-Allow-Headers") != "authorization,content-type" {
		t.Errorf("preflight: %v", h)
	}
	f(post(hello, page), 401, "*") // the script may read what is wrong
	h = f(post(hello, page, "Authorization: Bearer K\r\n"), 200, "*")
	if !strings.Contains(h.Get("Access-Control-Expose-Headers"), "x-request-id") || h.Get("Vary") != "Accept" {
		t.Errorf("answer: %v", h)
	}
	f(post(hello, "Authorization: Bearer K\r\n"), 200, "")

	r.s.SetAccess(NewAccess(nil, []string{"https://chat.example.org"}))
	f(preflight, 204, "https://chat.example.org")
	f(post(hello, page), 200, "https://chat.example.org")
	f(post(hello, "Origin: https://evil.example.org\r\n"), 200, "")
	f(strings.Replace(preflight, "chat.", "evil.", 1), 204, "")
}

// TestBuffersAreCounted: a request whose body is in a buffer that has served
// another one counts like any other.
func TestBuffersAreCounted(t *testing.T) {
	release := make(chan struct{})
	e := newRawEngine(t, func(c *engineSide) {
		for c.request() != nil {
			<-release
			io.WriteString(c, fixed("ok"))
		}
	})
	r := newRig(t, Limits{}, nil, e.url())
	c := r.dial()
	for range 3 {
		c.send(post(hello))
		eventually(t, 20*time.Second, "it is at the engine", func() bool { return r.replicas[0].InFlight() == 1 })
		if n := r.s.buffered.Load(); n < int64(len(hello)) || n > smallBody {
			t.Errorf("%d bytes are counted", n)
		}
		release <- struct{}{}
		c.answer()
		eventually(t, 20*time.Second, "it is over", func() bool { return r.replicas[0].InFlight() == 0 })
	}
	if n := r.s.buffered.Load(); n != 0 {
		t.Errorf("%d bytes are counted at the end", n)
	}
}
