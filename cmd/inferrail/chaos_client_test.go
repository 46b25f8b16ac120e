package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"time"

	"github.com/inferrail/inferrail/simulator"
)

// chaosClient is one way to speak to the agent.
type chaosClient struct {
	http.Client
	name, url string
	part      int // in a hundred, of the requests
	close     bool
}

// The keys that clients have. Answers to the second are counted, and for that
// the agent filters its streams.
const freeKey, countedKey = "key-free", "key-counted"

// bodyManners are the ways in which a request's body is sent.
var bodyManners = []string{"body with a length", "chunked body", "body after 100 Continue"}

func newChaosClients(c *chaos) []*chaosClient {
	client := func(name, url string, part int, two bool) *chaosClient {
		t := &http.Transport{
			MaxIdleConnsPerHost: 1000,
			TLSClientConfig:     &tls.Config{InsecureSkipVerify: true},
			Protocols:           new(http.Protocols),
			// So that a body is sent only when the agent asks for it.
			ExpectContinueTimeout: time.Minute,
		}
		if two {
			t.Protocols.SetHTTP2(true)
			t.Protocols.SetUnencryptedHTTP2(true)
		} else {
			t.Protocols.SetHTTP1(true)
		}
		return &chaosClient{Client: http.Client{Timeout: 2 * time.Minute, Transport: t}, name: name, url: url, part: part}
	}
	list := []*chaosClient{
		client("kept connection", "http://"+c.listen, 60, false),
		client("new connection", "http://"+c.listen, 15, false),
		client("h2c", "http://"+c.listen, 10, true),
		client("TLS", "https://"+c.secure, 8, false),
		client("TLS and HTTP/2", "https://"+c.secure, 7, true),
	}
	list[1].close = true
	return list
}

// chaosRequests are the kinds of requests, and how many in a hundred are of
// that kind.
var chaosRequests = []struct {
	name string
	part int
	send func(r *chaosRequest)
}{
	{"stream", 55, (*chaosRequest).stream},
	{"stream with usage", 5, (*chaosRequest).streamUsage},
	{"long stream", 2, (*chaosRequest).streamLong},
	{"whole answer", 20, (*chaosRequest).whole},
	{"large request", 1, (*chaosRequest).large},
	{"client that leaves", 5, (*chaosRequest).leave},
	{"client that leaves early", 5, (*chaosRequest).leaveEarly},
	{"models list", 2, (*chaosRequest).models},
	{"refused request", 5, (*chaosRequest).refused},
}

// chaosRequest is one request. One goroutine uses it.
type chaosRequest struct {
	*chaos
	n      int
	rng    *rand.Rand
	client *chaosClient
	key    string
	model  string
	manner string // in which the body is sent
	began  time.Time
	harms  []int64 // of each engine, at the beginning
}

// request sends one request.
func (c *chaos) request(n int) {
	r := &chaosRequest{chaos: c, n: n, rng: rand.New(rand.NewPCG(c.seed, uint64(n))),
		key: freeKey, model: "m", manner: bodyManners[0], began: time.Now()}
	for _, e := range c.engines {
		r.harms = append(r.harms, e.harms.Load())
	}
	for k, i := r.rng.IntN(100), 0; r.client == nil; i++ {
		if k -= c.clients[i].part; k < 0 {
			r.client = c.clients[i]
		}
	}
	if r.rng.IntN(4) == 0 {
		r.key = countedKey
		c.tally.add("counted")
	}
	if r.rng.IntN(8) == 0 {
		r.model = "alias"
		c.tally.add("alias")
	}
	if r.rng.IntN(4) == 0 {
		r.manner = bodyManners[r.rng.IntN(len(bodyManners))]
	}
	c.tally.add(r.manner)
	c.tally.add(r.client.name)
	for k, i := r.rng.IntN(100), 0; k >= 0; i++ {
		kind := &chaosRequests[i]
		if k -= kind.part; k < 0 {
			c.tally.add(kind.name)
			kind.send(r)
		}
	}
}

func (r *chaosRequest) fail(resp *http.Response, format string, args ...any) {
	if r.tally.add("failed") > 20 {
		return
	}
	who := ""
	if resp != nil {
		who = " at " + resp.Header.Get("X-Inferrail-Replica")
	}
	r.Errorf("%s: request %d (%s)%s, after %v: %s", time.Now().Format(time.StampMilli), r.n, r.client.name, who,
		time.Since(r.began).Round(time.Millisecond), fmt.Sprintf(format, args...))
}

// broke: an answer has broken off, as the client can tell. That is right if
// its engine was harmed meanwhile.
func (r *chaosRequest) broke(resp *http.Response, why any) {
	for i, e := range r.engines {
		if e.id == resp.Header.Get("X-Inferrail-Replica") && (r.harms[i]%2 != 0 || e.harms.Load() != r.harms[i]) {
			r.tally.add("broken")
			return
		}
	}
	r.fail(resp, "it broke, and its engine was well: %v", why)
}

func (r *chaosRequest) answered() {
	r.tally.add("answered")
	if d := time.Since(r.began); d > 5*time.Second {
		r.tally.add("answered after more than 5 s")
	}
}

// do sends a request. nil when there is no answer; then that is told.
func (r *chaosRequest) do(ctx context.Context, method, path, body string) *http.Response {
	var reader io.Reader = strings.NewReader(body)
	if r.manner == bodyManners[1] && body != "" {
		reader = io.MultiReader(reader) // whose length is not known
	}
	req, err := http.NewRequestWithContext(ctx, method, r.client.url+path, reader)
	if err != nil {
		r.fail(nil, "%v", err)
		return nil
	}
	req.Close = r.client.close
	if r.manner == bodyManners[2] && body != "" {
		req.Header.Set("Expect", "100-continue")
	}
	req.Header.Set("Authorization", "Bearer "+r.key)
	req.Header.Set("X-Request-Id", fmt.Sprintf("%x-%d", r.seed, r.n))
	if r.ending.Load() && r.manner != bodyManners[1] {
		req.Header.Set("Idempotency-Key", fmt.Sprint(r.n))
	} else {
		req.GetBody = nil // net/http would send it again by itself
	}
	resp, err := r.client.Do(req)
	if err != nil {
		if ctx.Err() == nil {
			r.fail(nil, "no answer: %v", err)
		}
		return nil
	}
	return resp
}

// generate sends a request for so many tokens and expects it to be taken.
func (r *chaosRequest) generate(ctx context.Context, tokens int, prompt, more string) (*http.Response, string) {
	body := fmt.Sprintf(`{"model":%q,"max_tokens":%d,"messages":[{"role":"user","content":%q}]%s}`, r.model, tokens, prompt, more)
	resp := r.do(ctx, "POST", "/v1/chat/completions", body)
	if resp != nil && resp.StatusCode != 200 {
		defer resp.Body.Close()
		text, _ := io.ReadAll(resp.Body)
		r.fail(resp, "status %d: %s", resp.StatusCode, text)
		return nil, ""
	}
	return resp, body
}

func (r *chaosRequest) prompt() string { return fmt.Sprintf("request %d of %x", r.n, r.seed) }

// expected is the text of the answer to a request.
func (r *chaosRequest) expected(body string) string {
	body = strings.Replace(body, `"alias"`, `"m"`, 1)
	texts, err := simulator.Expect(chaosSim, "/v1/chat/completions", []byte(body))
	if err != nil || len(texts) != 1 {
		r.fail(nil, "what is the answer to %s? %v", body, err)
		return ""
	}
	return texts[0]
}

func (r *chaosRequest) stream() { r.streamOf(1+r.rng.IntN(30), "") }
func (r *chaosRequest) streamUsage() {
	r.streamOf(1+r.rng.IntN(30), `,"stream_options":{"include_usage":true}`)
}
func (r *chaosRequest) streamLong() { r.streamOf(500+r.rng.IntN(1000), "") }

// streamOf reads a stream to its end, or to where it broke: then there is an
// error, as an event or from the connection.
func (r *chaosRequest) streamOf(tokens int, options string) {
	resp, body := r.generate(context.Background(), tokens, r.prompt(), `,"stream":true`+options)
	if resp == nil {
		return
	}
	defer resp.Body.Close()
	var text strings.Builder
	got, usage, done, told := 0, 0, false, ""
	lines := bufio.NewReader(resp.Body)
	for {
		line, err := lines.ReadBytes('\n')
		data, isData := bytes.CutPrefix(bytes.TrimRight(line, "\r\n"), []byte("data: "))
		switch {
		case !isData:
			if len(bytes.TrimSpace(line)) > 0 && err == nil {
				r.fail(resp, "a line %q", line)
				return
			}
		case err != nil: // half a line
		case string(data) == "[DONE]":
			done = true
		case bytes.HasPrefix(data, []byte(`{"error":`)):
			told = string(data)
		default:
			var event struct {
				Choices []struct{ Delta struct{ Content string } }
				Usage   *struct {
					Tokens int `json:"completion_tokens"`
				}
			}
			if err := json.Unmarshal(data, &event); err != nil {
				r.fail(resp, "an event %q: %v", data, err)
				return
			}
			if len(event.Choices) > 0 && event.Choices[0].Delta.Content != "" {
				got++
				text.WriteString(event.Choices[0].Delta.Content)
			}
			if event.Usage != nil {
				usage += event.Usage.Tokens
			}
		}
		switch {
		case err == nil:
			continue
		case !errors.Is(err, io.EOF):
			r.broke(resp, err)
		case told != "":
			r.broke(resp, told)
		case !done || got != tokens:
			r.fail(resp, "a clean end after %d of %d tokens, done %v", got, tokens, done)
		case usage != 0 && options == "":
			r.fail(resp, "usage of %d tokens that was not asked for", usage)
		case usage != tokens && options != "":
			r.fail(resp, "usage says %d of %d tokens", usage, tokens)
		case text.String() != r.expected(body):
			r.fail(resp, "the answer to another question: %.200q", &text)
		default:
			r.answered()
		}
		return
	}
}

func (r *chaosRequest) whole() { r.wholeOf(r.prompt()) }

// large is larger than what sockets hold, so that an engine that hangs leaves
// it half sent.
func (r *chaosRequest) large() {
	r.wholeOf(r.prompt() + strings.Repeat(" lorem ipsum", (256<<10+r.rng.IntN(256<<10))/12))
}

func (r *chaosRequest) wholeOf(prompt string) {
	tokens := 1 + r.rng.IntN(30)
	resp, body := r.generate(context.Background(), tokens, prompt, "")
	if resp == nil {
		return
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		r.broke(resp, err)
		return
	}
	var answer struct {
		Choices []struct{ Message struct{ Content string } }
		Usage   struct {
			Tokens int `json:"completion_tokens"`
		}
	}
	switch err := json.Unmarshal(text, &answer); {
	case err != nil || len(answer.Choices) != 1 || answer.Usage.Tokens != tokens:
		r.fail(resp, "%d tokens asked for, got %q", tokens, text)
	case answer.Choices[0].Message.Content != r.expected(body):
		r.fail(resp, "the answer to another question: %.200q", text)
	default:
		r.answered()
	}
}

// leave ends the connection, or the stream, in mid-answer.
func (r *chaosRequest) leave() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	resp, _ := r.generate(ctx, 1+r.rng.IntN(2000), r.prompt(), `,"stream":true`)
	if resp == nil {
		return
	}
	defer resp.Body.Close()
	b := make([]byte, 1+r.rng.IntN(2000))
	_, _ = io.ReadFull(resp.Body, b)
	r.tally.add("left")
}

// leaveEarly does so when the request is on its way.
func (r *chaosRequest) leaveEarly() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(r.rng.IntN(8000))*time.Microsecond)
	defer cancel()
	if resp, _ := r.generate(ctx, 1+r.rng.IntN(2000), r.prompt(), fmt.Sprintf(`,"stream":%v`, r.rng.IntN(2) == 0)); resp != nil {
		_, _ = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
	r.tally.add("left")
}

func (r *chaosRequest) models() {
	resp := r.do(context.Background(), "GET", "/v1/models", "")
	if resp == nil {
		return
	}
	defer resp.Body.Close()
	if text, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != 200 || !bytes.Contains(text, []byte(`"id":"m"`)) {
		r.fail(resp, "models: %d, %v, %s", resp.StatusCode, err, text)
		return
	}
	r.answered()
}

// refused is a request that must not reach an engine.
func (r *chaosRequest) refused() {
	f := func(status int, key, path, body, want string) {
		if key != "" {
			r.key = key
		}
		resp := r.do(context.Background(), "POST", path, body)
		if resp == nil {
			return
		}
		defer resp.Body.Close()
		if text, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != status || !bytes.Contains(text, []byte(want)) {
			r.fail(resp, "want %d %q, got %d, %v, %s", status, want, resp.StatusCode, err, text)
			return
		}
		r.answered()
	}
	switch r.rng.IntN(4) {
	case 0:
		f(404, "", "/v1/chat/completions", `{"model":"absent","messages":[]}`, "does not exist")
	case 1:
		f(401, "guessed", "/v1/chat/completions", `{"model":"m","messages":[]}`, "API key")
	case 2:
		f(400, "", "/v1/completions", `{"model":"m"`, "BadRequestError")
	case 3:
		f(404, "", "/v1/absent", `{"model":"m"}`, "nothing at this path")
	}
}
