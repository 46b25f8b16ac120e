package proxy

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/inferrail/inferrail/proxy/prompt"
	"github.com/inferrail/inferrail/proxy/prompt/tokenizer"
	"github.com/inferrail/inferrail/simulator"
)

// follower is a rig whose model's prompts are followed.
type follower struct {
	*rig
	model  *prompt.Model
	pool   *prompt.Pool
	checks *promptChecks
}

// promptChecks notes what it is told.
type promptChecks struct {
	mu      sync.Mutex // guards the rest
	counted []string   // ours and theirs
	sampled []sampledPrompt
}

type sampledPrompt struct {
	model, replica string
	kind           prompt.Kind
	body           string
	ids            []uint32
}

func (p *promptChecks) Counted(m *Model, r *Replica, ours, theirs int, id []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.counted = append(p.counted, fmt.Sprintf("%s %s %d %d", m.Name, r.ID, ours, theirs))
}

func (p *promptChecks) Sampled(m *Model, r *Replica, kind prompt.Kind, body []byte, ids []uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sampled = append(p.sampled, sampledPrompt{m.Name, r.ID, kind, string(body), slices.Clone(ids)})
}

func (p *promptChecks) told() (counted []string, sampled []sampledPrompt) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.counted), slices.Clone(p.sampled)
}

// newFollower returns a rig whose model's prompts are followed by the
// simulator's tokenizer; all responses are sampled. An empty template is the
// simulator's.
func newFollower(t testing.TB, limits Limits, template string, workers int, wait time.Duration, engines ...string) *follower {
	t.Helper()
	return newJoinedFollower(t, limits, nil, template, workers, wait, engines...)
}

func newJoinedFollower(t testing.TB, limits Limits, joiner Joiner, template string, workers int, wait time.Duration, engines ...string) *follower {
	t.Helper()
	source := prompt.Source{Tokenizer: "builtin:sim", Cache: tokenizer.NewCache(1 << 20)}
	if template != "" {
		source.Template = filepath.Join(t.TempDir(), "template")
		if err := os.WriteFile(source.Template, []byte(template), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	f := &follower{pool: prompt.NewPool(workers, wait), checks: &promptChecks{}}
	t.Cleanup(f.pool.Close) // after the server
	var err error
	if f.model, err = prompt.Load(source); err != nil {
		t.Fatal(err)
	}
	f.rig = newRig(t, limits, joiner, engines...)
	f.follow(f.model)
	f.s.prompts.Store(&prompts{f.pool, f.checks, 1})
	return f
}

// follow makes the model's prompts those of m, as the agent does: by another
// Model in another Fleet.
func (f *follower) follow(m *prompt.Model) {
	model := *f.s.fleet.Load().Listed[0]
	model.Prompts = m
	f.s.SetFleet(&Fleet{Models: map[string]*Model{"m": &model, "alias": &model}, Listed: []*Model{&model}})
}

// outcomes is how many prompts there were of a reason.
func (f *follower) outcomes(reason prompt.Reason) int {
	return int(counted(f.s.stats.prompts, func(name, value string) bool { return name == "outcome" && value == reason.String() }))
}

func startSim(t testing.TB) *simulator.Server {
	t.Helper()
	sim, err := simulator.Start(simulator.Config{ServedModelName: []string{"m"}, ZeroLatency: true, Created: 7})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { sim.Close() })
	return sim
}

// to is a request to any path.
func to(path, body string, fields ...string) string {
	return strings.Replace(post(body, fields...), "/v1/chat/completions", path, 1)
}

const promptTokens = "X-Inferrail-Prompt-Tokens"

// TestPromptTokens: what the answer's head says before the engine has counted
// is what the engine counts, and whoever checks is told of both.
func TestPromptTokens(t *testing.T) {
	r := newFollower(t, Limits{}, "", 1, time.Minute, startSim(t).URL())
	f := func(name, path, body string, tokens int) {
		t.Run(name, func(t *testing.T) {
			before, _ := r.checks.told()
			c := r.dial()
			c.send(to(path, body))
			resp, answer := c.answer()
			if resp.StatusCode != http.StatusOK {
				t.Fatalf("%d: %s", resp.StatusCode, answer)
			}
			if got := resp.Header[promptTokens]; len(got) != 1 || tokens > 0 && got[0] != strconv.Itoa(tokens) {
				t.Errorf("the head says %q", got)
			}
			ours := resp.Header.Get(promptTokens)
			eventually(t, 20*time.Second, "it is compared", func() bool {
				counted, _ := r.checks.told()
				return len(counted) > len(before)
			})
			counted, sampled := r.checks.told()
			if got, want := counted[len(before):], []string{"m e0 " + ours + " " + ours}; !slices.Equal(got, want) {
				t.Errorf("counted %q, want %q", got, want)
			}
			var p prompt.Prompt
			r.model.Follow(&p, promptKind([]byte(path)), []byte(body), time.Now())
			if s := sampled[len(sampled)-1]; s.model != "m" || s.replica != "e0" || s.body != body || !slices.Equal(s.ids, p.IDs) || len(s.ids) == 0 {
				t.Errorf("sampled %+v", s)
			}
		})
	}
	const chat, text = "/v1/chat/completions", "/v1/completions"
	const hi = `"messages":[{"role":"user","content":"tell me"}]`
	f("chat", chat, `{"model":"m",`+hi+`}`, 0)
	f("alias", chat, `{"model":"alias",`+hi+`}`, 0)
	f("no model", chat, `{`+hi+`}`, 0)
	f("choices", chat, `{"model":"m","n":3,`+hi+`}`, 0)
	f("large", chat, `{"model":"m","messages":[{"role":"user","content":"`+strings.Repeat("word ", 20_000)+`"}]}`, 0)
	const usage = `,"stream":true,"stream_options":{"include_usage":true`
	f("stream", chat, `{"model":"m",`+hi+usage+`}}`, 0)
	f("stream of choices", chat, `{"model":"m","n":3,`+hi+usage+`}}`, 0)
	f("usage all along", chat, `{"model":"m",`+hi+usage+`,"continuous_usage_stats":true}}`, 0)
	f("ids", text, `{"model":"m","prompt":[1,2,3]}`, 3)
	f("prompts", text, `{"model":"m","prompt":["one two ","three "]}`, 3)
	f("lists of ids", text, `{"model":"m","prompt":[[1,2],[3]]}`, 3)
	f("prompts all along", text, `{"model":"m","prompt":["one two ","three "],"n":2`+usage+`,"continuous_usage_stats":true}}`, 3)
	f("stream of text", text, `{"model":"m","prompt":"one two "`+usage+`}}`, 2)
	eventually(t, 20*time.Second, "all are counted", func() bool { return r.outcomes(prompt.Exact) == 13 })
}

// TestPromptTokensOnOtherAnswers: all answers to a request whose prompt was
// followed say how many tokens it has, and only the agent says it.
func TestPromptTokensOnOtherAnswers(t *testing.T) {
	const body = `{"model":"m","prompt":"one two "}`
	f := func(name, answer, want string, status int) {
		t.Run(name, func(t *testing.T) {
			url := newRawEngine(t, answering(answer)).url()
			if answer == "" {
				url = refusing(t)
			}
			r := newFollower(t, Limits{MaxAttempts: 1}, "", 1, time.Minute, url)
			c := r.dial()
			c.send(to("/v1/completions", body))
			resp, _ := c.answer()
			if got := strings.Join(resp.Header[promptTokens], " "); resp.StatusCode != status || got != want {
				t.Errorf("%d, %q", resp.StatusCode, got)
			}
			c.send(to("/v1/responses", body))
			if resp, _ = c.answer(); resp.Header[promptTokens] != nil {
				t.Errorf("without a prompt that is followed: %q", resp.Header[promptTokens])
			}
			r.shutdown(20 * time.Second)
			// Nothing was answered with a usage, and only what is answered well
			// is sampled.
			counted, sampled := r.checks.told()
			if len(counted) != 0 || (len(sampled) == 1) != (status == 200) {
				t.Errorf("counted %q, sampled %v", counted, sampled)
			}
		})
	}
	f("no usage", fixed("{}"), "2", 200)
	f("the engine's own", "HTTP/1.1 200 OK\r\nX-Inferrail-Prompt-Tokens: 7\r\nContent-Length: 2\r\n\r\n{}", "2", 200)
	f("refused by the engine", status(400, `{"usage":{"prompt_tokens":9,"total_tokens":9}}`), "2", 400)
	f("no engine", "", "2", 502)
}

// TestPromptTokensHTTP2: as for HTTP/1.1.
func TestPromptTokensHTTP2(t *testing.T) {
	r := newFollower(t, Limits{}, "", 1, time.Minute, startSim(t).URL())
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	transport := &http.Transport{Protocols: &protocols}
	defer transport.CloseIdleConnections()
	for _, stream := range []string{"false", "true"} {
		body := `{"prompt":"one two three ","stream":` + stream + `}`
		resp, err := (&http.Client{Transport: transport, Timeout: 20 * time.Second}).Post("http://"+r.addr+"/v1/completions", "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		if resp.ProtoMajor != 2 || resp.Header.Get(promptTokens) != "3" {
			t.Errorf("%s %+v", resp.Proto, resp.Header)
		}
	}
}

// TestPromptReasons: a prompt that is not followed is counted by why, says
// nothing in the answer's head, and reaches the engine all the same. What has no
// prompt is not counted.
func TestPromptReasons(t *testing.T) {
	e := newRawEngine(t, func(c *engineSide) {
		for {
			req := c.request()
			if req == nil {
				return
			}
			body, _ := io.ReadAll(req.Body)
			io.WriteString(c, fixed(string(body)))
		}
	})
	r := newFollower(t, Limits{}, "", 1, time.Minute, e.url())
	f := func(path, body string, want prompt.Reason) {
		t.Helper()
		before := r.outcomes(want)
		c := r.dial()
		c.send(to(path, body))
		resp, echo := c.answer()
		if resp.StatusCode != http.StatusOK || resp.Header[promptTokens] != nil || echo != body {
			t.Errorf("%s %.80s: %d, %v, %.80s", path, body, resp.StatusCode, resp.Header, echo)
		}
		eventually(t, 20*time.Second, fmt.Sprintf("%s %.80s is counted as %v", path, body, want), func() bool { return r.outcomes(want) == before+1 })
	}
	const chat, text = "/v1/chat/completions", "/v1/completions"
	message := func(content string) string {
		return `{"model":"m","messages":[{"role":"user","content":` + content + `}]}`
	}
	f("/v1/responses", `{"input":"x"}`, prompt.Route)
	f("/v1/messages", message(`"x"`), prompt.Route)
	f(chat, message(`[{"type":"image_url","image_url":{"url":"data:x"}}]`), prompt.Media)
	f(chat, message(`5`), prompt.Malformed)
	f(chat, `{}`, prompt.Malformed)
	f(chat, `{"chat_template":"x","messages":[{"role":"user","content":"x"}]}`, prompt.RequestTemplate)
	f(text, `{"prompt":"x","truncate_prompt_tokens":5}`, prompt.Truncated)
	f(text, `{"prompt_embeds":"x"}`, prompt.Embeds)
	f(text, `{"prompt":"x","suffix":"y"}`, prompt.Unfollowed)
	r.follow(nil)
	f(chat, message(`"x"`), prompt.NoTokenizer)
	f(chat, message(`"`+strings.Repeat("word ", 100_000)+`"`), prompt.NoTokenizer)

	eventually(t, 20*time.Second, "all are over", func() bool { return r.s.Datapath().Running == 0 })
	all := func() int {
		return int(counted(r.s.stats.prompts, func(name, _ string) bool { return name == "outcome" }))
	}
	before := all()
	for _, path := range []string{"/v1/embeddings", "/tokenize", "/v1/models"} {
		request := to(path, `{"input":"x"}`)
		if path == "/v1/models" {
			request = "GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
		}
		c := r.dial()
		c.send(request)
		c.answer()
	}
	eventually(t, 20*time.Second, "all are over", func() bool { return r.s.Datapath().Running == 0 })
	if n := all(); n != before {
		t.Errorf("%d requests without a prompt have one", n-before)
	}
	if n := r.s.buffered.Load(); n != 0 {
		t.Errorf("%d bytes are still held", n)
	}
}

// slowTemplate takes the square of the number of messages: half a second for
// slowBody.
const slowTemplate = "{% for m in messages %}{% for n in messages %}{% if m is none %}x{% endif %}{% endfor %}{% endfor %}x"

// slowBody is a body of which nothing but its last message is different.
func slowBody(last int) string {
	const message = `{"role":"user","content":"x"},`
	return `{"model":"m","messages":[` + strings.Repeat(message, 1200) + fmt.Sprintf(`{"role":"user","content":"%020d"}]}`, last)
}

// TestPromptLate: a request does not wait for its prompt for longer than it may,
// and what a worker still reads is not used for another one.
func TestPromptLate(t *testing.T) {
	var mu sync.Mutex
	bodies := map[string]bool{}
	e := newRawEngine(t, func(c *engineSide) {
		for {
			req := c.request()
			if req == nil {
				return
			}
			body, _ := io.ReadAll(req.Body)
			mu.Lock()
			bodies[string(body)] = true
			mu.Unlock()
			io.WriteString(c, fixed("{}"))
		}
	})
	r := newFollower(t, Limits{}, slowTemplate, 2, time.Millisecond, e.url())
	c := r.dial()
	// While the workers read the first, their buffers are not those of the next:
	// the race detector would tell.
	for i := range 20 {
		body := slowBody(i)
		c.send(post(body))
		resp, _ := c.answer()
		if resp.StatusCode != http.StatusOK || resp.Header[promptTokens] != nil {
			t.Errorf("request %d: %d, %v", i, resp.StatusCode, resp.Header)
		}
		mu.Lock()
		if !bodies[body] {
			t.Errorf("request %d has reached the engine as another", i)
		}
		mu.Unlock()
	}
	eventually(t, 20*time.Second, "all are counted as late", func() bool { return r.outcomes(prompt.Late) == 20 })
	// A small one waits for nobody.
	c.send(post(`{"messages":[{"role":"user","content":"x"}]}`))
	if resp, _ := c.answer(); resp.Header.Get(promptTokens) != "1" {
		t.Errorf("a small one: %v", resp.Header)
	}
	if counted, sampled := r.checks.told(); len(counted) != 0 || len(sampled) != 1 {
		t.Errorf("counted %q, %d sampled", counted, len(sampled))
	}
}

// TestPromptShutdown: a server ends while prompts wait for workers, and its
// requests are answered.
func TestPromptShutdown(t *testing.T) {
	e := newRawEngine(t, answering(fixed("{}")))
	r := newFollower(t, Limits{}, slowTemplate, 1, 100*time.Millisecond, e.url())
	var clients sync.WaitGroup
	for i := range 10 {
		c := r.dial()
		c.send(post(slowBody(i)))
		clients.Go(func() {
			if resp, _ := c.answer(); resp.StatusCode != http.StatusOK {
				t.Errorf("%d", resp.StatusCode)
			}
		})
	}
	eventually(t, 20*time.Second, "a worker is busy", func() bool { return r.pool.Stats().Busy > 0 || r.outcomes(prompt.Late) > 0 })
	if err := r.shutdown(20 * time.Second); err != nil {
		t.Error(err)
	}
	clients.Wait()
}

// TestPromptQueueFull: when more prompts wait than the workers can read in time,
// further ones do not.
func TestPromptQueueFull(t *testing.T) {
	e := newRawEngine(t, answering(fixed("{}")))
	r := newFollower(t, Limits{}, slowTemplate, 1, 50*time.Millisecond, e.url())
	clients := make([]*client, 60)
	for i := range clients {
		clients[i] = r.dial()
	}
	sent := 0
	eventually(t, 60*time.Second, "the queue is full", func() bool {
		var all sync.WaitGroup
		for _, c := range clients {
			sent++
			c.SetDeadline(time.Now().Add(20 * time.Second))
			body := slowBody(sent)
			all.Go(func() {
				c.send(post(body))
				if resp, _ := c.answer(); resp.StatusCode != http.StatusOK || resp.Header[promptTokens] != nil {
					t.Errorf("%d, %v", resp.StatusCode, resp.Header)
				}
			})
		}
		all.Wait()
		return r.outcomes(prompt.QueueFull) > 0
	})
	eventually(t, 20*time.Second, "each is counted", func() bool {
		return r.outcomes(prompt.QueueFull)+r.outcomes(prompt.Late) == sent
	})
}

// TestPromptRetry: a request that several engines are asked is followed once,
// and of its engines the one that has answered is told.
func TestPromptRetry(t *testing.T) {
	bad := newRawEngine(t, answering(status(503, "busy")))
	good := newRawEngine(t, answering(fixed(`{"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}`)))
	r := newFollower(t, Limits{}, "", 1, time.Minute, bad.url(), good.url())
	r.ordered()
	c := r.dial()
	const body = `{"model":"m","prompt":"one two "}`
	c.send(to("/v1/completions", body))
	resp, _ := c.answer()
	if resp.StatusCode != 200 || !slices.Equal(resp.Header[promptTokens], []string{"2"}) {
		t.Errorf("%d, %v", resp.StatusCode, resp.Header)
	}
	r.shutdown(20 * time.Second)
	counted, sampled := r.checks.told()
	if r.retries() != 1 || r.outcomes(prompt.Exact) != 1 || !slices.Equal(counted, []string{"m e1 2 3"}) ||
		len(sampled) != 1 || sampled[0].replica != "e1" || sampled[0].body != body {
		t.Errorf("%d retries, %d prompts, counted %q, sampled %+v", r.retries(), r.outcomes(prompt.Exact), counted, sampled)
	}
}

// TestPromptAborted: what an engine has counted by the time that a client leaves
// may be a part, and is not compared.
func TestPromptAborted(t *testing.T) {
	e := newRawEngine(t, func(c *engineSide) {
		if c.request() == nil {
			return
		}
		io.WriteString(c, chunkedHead+chunk("data: {\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":1,\"total_tokens\":8}}\n\n"))
		c.waitClosed()
	})
	r := newFollower(t, Limits{}, "", 1, time.Minute, e.url())
	c := r.dial()
	c.send(post(hello))
	head, err := readHead(c)
	if err != nil || !strings.Contains(strings.ToLower(head), "x-inferrail-prompt-tokens: ") {
		t.Fatalf("%v %s", err, head)
	}
	c.Close()
	eventually(t, 20*time.Second, "it is over", func() bool { return r.outcomes(prompt.Exact) == 1 })
	if counted, _ := r.checks.told(); len(counted) != 0 {
		t.Errorf("counted %q", counted)
	}
}

// TestPromptMemory: while an engine is waited for, a prompt counts for the memory
// that requests hold, and for none afterwards.
func TestPromptMemory(t *testing.T) {
	asked, answer := make(chan struct{}), make(chan struct{})
	e := newRawEngine(t, func(c *engineSide) {
		for c.request() != nil {
			asked <- struct{}{}
			<-answer
			io.WriteString(c, fixed("{}"))
		}
	})
	r := newFollower(t, Limits{}, "", 1, time.Minute, e.url())
	c := r.dial()
	body := `{"messages":[{"role":"user","content":"` + strings.Repeat("a ", 500_000) + `"}]}`
	for range 2 {
		c.send(post(body))
		<-asked
		// Each two bytes are a token, which has four.
		if n := r.s.buffered.Load(); n < int64(3*len(body)) {
			t.Errorf("%d bytes are held", n)
		}
		answer <- struct{}{}
		if resp, _ := c.answer(); resp.Header.Get(promptTokens) == "" {
			t.Errorf("%v", resp.Header)
		}
		eventually(t, 20*time.Second, "nothing is held", func() bool { return r.s.buffered.Load() == 0 })
	}
}

// TestPromptModelReplaced: a request keeps to the model that it began with, and
// later ones have the new one.
func TestPromptModelReplaced(t *testing.T) {
	asked, answer := make(chan struct{}), make(chan struct{})
	e := newRawEngine(t, func(c *engineSide) {
		for c.request() != nil {
			asked <- struct{}{}
			<-answer
			io.WriteString(c, fixed(`{"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}`))
		}
	})
	r := newFollower(t, Limits{}, "one {{ messages[0].content }} ", 1, time.Minute, e.url())
	other := filepath.Join(t.TempDir(), "template")
	if err := os.WriteFile(other, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	m, err := prompt.Load(prompt.Source{Tokenizer: "builtin:sim", Template: other})
	if err != nil {
		t.Fatal(err)
	}
	c := r.dial()
	var told bytes.Buffer
	for range 2 {
		c.send(post(hello))
		<-asked
		r.follow(m)
		answer <- struct{}{}
		resp, _ := c.answer()
		fmt.Fprintln(&told, resp.Header.Get(promptTokens))
	}
	if told.String() != "2\n1\n" {
		t.Errorf("%q", told.String())
	}
}
