package proxy

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/policy"
)

// ahead is how many prompts the replica has before it.
func (r *rig) ahead(i int) int {
	w, _ := r.replicas[i].standing.Backlog.Ahead(&policy.Speed{}, time.Now())
	return int(w.Prompts)
}

// aheadIs waits until it is so.
func (r *rig) aheadIs(i, want int) {
	r.t.Helper()
	eventually(r.t.(*testing.T), 20*time.Second, fmt.Sprintf("%d prompts are before e%d", want, i), func() bool { return r.ahead(i) == want })
}

// over waits until no request runs, and returns what became of them, the oldest
// first.
func (r *rig) over() []Prediction {
	r.t.Helper()
	eventually(r.t.(*testing.T), 20*time.Second, "all requests are over", func() bool { return r.s.Datapath().Running == 0 })
	all := r.s.Predictions(nil)
	slices.Reverse(all)
	return all
}

// steps is an engine that writes what it is told to, on whatever connection the
// request came.
type steps struct {
	*rawEngine
	asked chan struct{}
	parts chan string
	stop  func()
}

func newSteps(t testing.TB) *steps {
	s := &steps{asked: make(chan struct{}, 100), parts: make(chan string)}
	s.stop = sync.OnceFunc(func() { close(s.parts) })
	s.rawEngine = newRawEngine(t, func(c *engineSide) {
		for c.request() != nil {
			s.asked <- struct{}{}
			for part := range s.parts {
				if part == "die" {
					return
				}
				io.WriteString(c, part)
				if strings.HasSuffix(part, "0\r\n\r\n") {
					break
				}
			}
		}
	})
	t.Cleanup(s.stop) // before the engine is closed
	return s
}

const (
	roleEvent = `data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}` + "\n\n"
	textEvent = `data: {"choices":[{"index":0,"delta":{"content":"a"}}]}` + "\n\n"
	lastChunk = "0\r\n\r\n"
)

// However a client asks, the prompt counts as waited for until the first token is
// there: not the head, and not what comes before it to keep the connection open.
func TestPrefillEndsWithTheFirstToken(t *testing.T) {
	early := []string{": ping\n\n", "event: response.created\ndata: {}\n\n"}
	f := func(name string, joiner func(t *testing.T) Joiner, ask func(t *testing.T, r *rig) (body io.Reader)) {
		t.Run(name, func(t *testing.T) {
			e := newSteps(t)
			r := newRig(t, Limits{}, joiner(t), e.url())
			bodies := make(chan io.Reader, 1)
			go func() { bodies <- ask(t, r) }()
			<-e.asked
			asked := time.Now()
			r.aheadIs(0, 1)
			e.parts <- chunkedHead
			body := <-bodies
			if body == nil {
				t.FailNow()
			}
			for _, event := range early {
				e.parts <- chunk(event)
				if _, err := io.ReadFull(body, make([]byte, len(event))); err != nil {
					t.Fatal(err)
				}
			}
			if n := r.ahead(0); n != 1 {
				t.Errorf("%d prompts are waited for after %q", n, early)
			}
			before := time.Now()
			// Byte by byte, in chunks that end anywhere.
			wire := chunk(roleEvent[:7]) + chunk(roleEvent[7:20]) + chunk(roleEvent[20:])
			for i := range wire {
				e.parts <- wire[i : i+1]
			}
			r.aheadIs(0, 0)
			if n := r.replicas[0].InFlight(); n != 1 {
				t.Errorf("%d requests are in flight", n)
			}
			for range 20 {
				e.parts <- chunk(textEvent)
			}
			e.parts <- lastChunk
			if _, err := io.Copy(io.Discard, body); err != nil {
				t.Error(err)
			}
			p := r.over()[0]
			if least := before.Sub(asked).Seconds(); p.Observed < least || p.Predicted <= 0 {
				t.Errorf("%+v, the first token was sent %v s after the engine was asked", p, least)
			}
		})
	}
	none := func(*testing.T) Joiner { return nil }
	for _, to := range tongues {
		f(to.name, none, func(t *testing.T, r *rig) io.Reader {
			resp, err := r.speak(to).post(t, hello)
			if err != nil {
				t.Error(err)
				return nil
			}
			t.Cleanup(func() { resp.Body.Close() })
			return resp.Body
		})
	}
	raw := func(request string, fields ...string) func(t *testing.T, r *rig) io.Reader {
		return func(t *testing.T, r *rig) io.Reader {
			c := r.dial()
			c.send(request)
			resp, err := http.ReadResponse(c.br, nil)
			if err != nil {
				t.Error(err)
				return nil
			}
			return resp.Body
		}
	}
	f("HTTP/1.0", none, raw(strings.Replace(post(hello), "HTTP/1.1", "HTTP/1.0", 1)))
	f("by the kernel", func(t *testing.T) Joiner { return newFakeKernel(t) }, raw(post(hello)))
	f("usage is taken out", none, func(t *testing.T, r *rig) io.Reader {
		r.s.SetAccess(NewAccess([]*Key{key("k", policy.Rates{InputTokens: 1 << 40})}, nil))
		return raw(post(hello, "Authorization: Bearer K\r\n"))(t, r)
	})
}

// The first token may come with the head, and with the whole answer.
func TestPrefillEndsWithTheHead(t *testing.T) {
	f := func(name, wire string, open bool) {
		t.Run(name, func(t *testing.T) {
			e := newSteps(t)
			r := newRig(t, Limits{}, nil, e.url())
			c := r.dial()
			c.send(post(hello))
			<-e.asked
			e.parts <- wire
			if open {
				r.aheadIs(0, 0)
				if r.replicas[0].InFlight() != 1 {
					t.Error("it is not in flight")
				}
				e.parts <- chunk(textEvent) + lastChunk
			}
			c.answer()
			if p := r.over()[0]; p.Observed < 0 {
				t.Errorf("%+v", p)
			}
		})
	}
	f("head and token", chunkedHead+chunk(roleEvent), true)
	f("head, comment and token", chunkedHead+chunk(": x\n\n")+chunk(roleEvent), true)
	f("all", chunkedHead+chunk(roleEvent)+chunk(textEvent)+lastChunk, false)
}

// An answer that is whole when the prompt is computed tells how long that took; one that
// is generated meanwhile does not.
func TestPrefillEndsWithTheAnswer(t *testing.T) {
	f := func(path, body string, tells bool) {
		t.Helper()
		e := newRawEngine(t, answering("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"))
		r := newRig(t, Limits{}, nil, e.url())
		c := r.dial()
		c.send(to(path, body, ""))
		c.expects(200, "{}")
		p, samples := r.over()[0], r.replicas[0].Calibration().Estimate().Samples
		if (p.Observed >= 0) != tells || (samples > 0) != tells {
			t.Errorf("%s %s: observed %v, %d samples", path, body, p.Observed, samples)
		}
	}
	f("/v1/embeddings", `{"model":"m","input":"hello"}`, true)
	f("/score", `{"model":"m","text_1":"hello","text_2":"you"}`, true)
	f("/v1/completions", `{"model":"m","prompt":"hello","max_tokens":1}`, true)
	f("/v1/completions", `{"model":"m","prompt":"hello","max_tokens":2}`, false)
	f("/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"hello"}]}`, false)
	f("/tokenize", `{"model":"m","prompt":"hello"}`, false)
}

// An engine that refuses what it would only have to compute has computed nothing.
func TestPrefillRefused(t *testing.T) {
	for _, path := range []string{"/v1/embeddings", "/v1/completions"} {
		e := newRawEngine(t, answering(status(400, "no")))
		r := newRig(t, Limits{}, nil, e.url())
		c := r.dial()
		c.send(to(path, `{"model":"m","input":"hello","prompt":"hello","max_tokens":1}`, ""))
		c.expects(400, "no")
		s := &r.replicas[0].standing
		if p := r.over()[0]; p.Observed >= 0 || s.Calibration.Estimate().Samples != 0 || s.Filter.State().Samples != 0 {
			t.Errorf("%s: observed %v, %d samples, %d answers", path, p.Observed, s.Calibration.Estimate().Samples, s.Filter.State().Samples)
		}
	}
}

// What does not end with a first token is waited for no longer, and teaches
// nothing.
func TestPrefillThatFails(t *testing.T) {
	whole := false
	f := func(name string, do func(e *steps, c *client)) {
		t.Run(name, func(t *testing.T) {
			e := newSteps(t)
			r := newRig(t, Limits{MaxAttempts: 1}, nil, e.url())
			r.replicas[0].failures.Store(1)
			c := r.dial()
			c.send(post(hello))
			<-e.asked
			r.aheadIs(0, 1)
			do(e, c)
			all := r.over()
			if n := r.replicas[0].failures.Load(); n == 0 && strings.Contains(name, "in the stream") {
				t.Error("the engine is taken to serve again")
			}
			if len(all) != 1 || all[0].Observed >= 0 || r.ahead(0) != 0 {
				t.Errorf("%+v, %d are waited for", all, r.ahead(0))
			}
			s := &r.replicas[0].standing
			if n := s.Calibration.Estimate().Samples; n != 0 {
				t.Errorf("%d samples", n)
			}
			// A whole answer tells how long one takes.
			if n := s.Filter.State().Samples; n > 0 && !whole || n != 1 && whole {
				t.Errorf("%d answers are learned from", n)
			}
		})
	}
	f("an error in the stream", func(e *steps, c *client) {
		e.parts <- chunkedHead
		e.parts <- chunk(`data: {"error":{"message":"no"}}`+"\n\n") + chunk("data: [DONE]\n\n") + lastChunk
		c.answer()
	})
	f("a stream without events", func(e *steps, c *client) {
		e.parts <- chunkedHead + chunk(": ping\n\n") + lastChunk
		c.answer()
	})
	f("refused", func(e *steps, c *client) {
		e.parts <- status(400, "no")
		e.stop()
		c.answer()
	})
	f("refused by a stream", func(e *steps, c *client) {
		e.parts <- strings.Replace(chunkedHead, "200 OK", "422 x", 1) + chunk(textEvent) + lastChunk
		c.answer()
	})
	f("the engine dies", func(e *steps, c *client) { e.parts <- "die" })
	f("the engine dies behind the head", func(e *steps, c *client) {
		e.parts <- chunkedHead
		e.parts <- "die"
	})
	f("the client leaves", func(e *steps, c *client) {
		c.Close()
		e.stop()
	})
	f("the client leaves behind the head", func(e *steps, c *client) {
		e.parts <- chunkedHead
		if _, err := readHead(c); err != nil {
			e.t.Error(err)
		}
		c.Close()
		e.stop()
	})
	whole = true
	f("an answer that is no stream", func(e *steps, c *client) {
		e.parts <- fixed("{}")
		e.stop()
		c.answer()
	})
}

// A request that was given up at one replica is before that one no more while the
// next one has it. Both are turns of their own.
func TestPrefillMovesWithTheRequest(t *testing.T) {
	bad, good := newSteps(t), newSteps(t)
	r := newRig(t, Limits{}, nil, bad.url(), good.url()).ordered()
	turns := &turnsTold{}
	r.change(func(m *Model) { m.Policy = turns })
	c := r.dial()
	c.send(post(hello))
	<-bad.asked
	r.aheadIs(0, 1)
	bad.parts <- status(503, "")
	bad.stop()
	<-good.asked
	if a, b := r.ahead(0), r.ahead(1); a != 0 || b != 1 {
		t.Errorf("%d and %d are waited for", a, b)
	}
	good.parts <- chunkedHead + chunk(textEvent) + lastChunk
	c.answer()
	all := r.over()
	if len(all) != 1 || all[0].Replica != "e1" || all[0].Observed < 0 || all[0].Attempts != 2 {
		t.Errorf("%+v", all)
	}
	if got := turns.take(); !slices.Equal(got, []uint64{1, 2}) {
		t.Errorf("turns %v", got)
	}
}

// change publishes the model with a change made.
func (r *rig) change(f func(m *Model)) {
	m := *r.s.fleet.Load().Listed[0]
	f(&m)
	r.s.SetFleet(&Fleet{Models: map[string]*Model{"m": &m, "alias": &m}, Listed: []*Model{&m}})
}

// turnsTold is inOrder and notes the turns.
type turnsTold struct {
	inOrder
	mu  sync.Mutex // guards all
	all []uint64
}

func (p *turnsTold) Score(r *policy.Request, candidates []policy.Candidate, costs []float64) float64 {
	p.mu.Lock()
	p.all = append(p.all, r.Turn)
	p.mu.Unlock()
	return p.inOrder.Score(r, candidates, costs)
}

func (p *turnsTold) take() []uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.all
}

// While a connection is being opened the prompt counts as well: those that are
// chosen for meanwhile must not all go to the same replica.
func TestPrefillIsPromised(t *testing.T) {
	r := newRig(t, Limits{ConnectTimeout: time.Hour}, nil, "http://"+fullListener(t))
	is := func(want int) {
		t.Helper()
		eventually(t, 20*time.Second, fmt.Sprintf("%d prompts are before it", want), func() bool {
			var c policy.Candidate
			r.replicas[0].describe(&c, time.Now())
			return int(c.Ahead.Prompts) == want && int(c.InFlight) == want && c.Decoding == 0 && (c.Wait > 0) == (want > 0)
		})
	}
	a, b := r.dial(), r.dial()
	a.send(post(hello))
	is(1)
	b.send(post(hello))
	is(2)
	a.Close()
	is(1)
	b.Close()
	is(0)
	if w := r.replicas[0].standing.Promised(); w != (policy.Work{}) {
		t.Errorf("%+v is left", w)
	}
}

// A request that is sent again, because the connection had died, is there once, and
// teaches nothing: how much of the time was the first one's is not known.
func TestPrefillSentAgain(t *testing.T) {
	asked := make(chan struct{}, 2)
	free := make(chan struct{})
	e := newRawEngine(t, func(c *engineSide) {
		if c.request() == nil {
			return
		}
		if c.n == 0 {
			io.WriteString(c, chunkedHead+chunk(textEvent)+lastChunk)
			c.request()
			return
		}
		asked <- struct{}{}
		<-free
		io.WriteString(c, chunkedHead+chunk(textEvent)+lastChunk)
	})
	r := newRig(t, Limits{}, nil, e.url())
	c := r.dial()
	c.send(post(hello))
	c.answer()
	r.over()
	samples := r.replicas[0].standing.Calibration.Estimate().Samples
	c.send(post(hello))
	<-asked
	if n := r.ahead(0); n != 1 {
		t.Errorf("%d are waited for", n)
	}
	close(free)
	c.answer()
	r.over()
	if n := r.replicas[0].standing.Calibration.Estimate().Samples; n != samples || r.s.Datapath().Replays != 1 {
		t.Errorf("%d samples, %d before; %d replays", n, samples, r.s.Datapath().Replays)
	}
}

// After whatever has happened, nothing is left at any replica: rig.shutdown looks.
func TestPrefillChaos(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var mu sync.Mutex // guards rng
	roll := func(n int) int {
		mu.Lock()
		defer mu.Unlock()
		return rng.IntN(n)
	}
	engine := func(c *engineSide) {
		for c.request() != nil {
			switch roll(12) {
			case 0:
				return
			case 1:
				io.WriteString(c, status(503, "busy"))
			case 2:
				io.WriteString(c, status(400, "no"))
			case 3:
				io.WriteString(c, chunkedHead)
				return
			case 4:
				io.WriteString(c, chunkedHead+chunk(textEvent))
				return
			case 5:
				io.WriteString(c, chunkedHead+chunk(`data: {"error":{}}`+"\n\n")+lastChunk)
			case 6:
				io.WriteString(c, fixed("{}"))
			default:
				io.WriteString(c, chunkedHead)
				time.Sleep(time.Duration(roll(3)) * time.Millisecond)
				io.WriteString(c, chunk(": x\n\n")+chunk(roleEvent))
				time.Sleep(time.Duration(roll(3)) * time.Millisecond)
				io.WriteString(c, chunk(textEvent)+lastChunk)
			}
		}
	}
	var urls []string
	for range 3 {
		urls = append(urls, newRawEngine(t, engine).url())
	}
	r := newRig(t, Limits{Backoff: time.Millisecond}, newFakeKernel(t), urls...)
	costs, err := policy.New("cost_model", nil)
	if err != nil {
		t.Fatal(err)
	}
	other, err := policy.New("sticky", nil)
	if err != nil {
		t.Fatal(err)
	}
	shadow := &policy.Shadow{Policy: other}
	r.change(func(m *Model) { m.Policy, m.Shadows, m.State = costs, []*policy.Shadow{shadow}, &ModelState{} })
	for _, replica := range r.replicas {
		replica.SetBounds(3, 4)
	}
	var clients sync.WaitGroup
	for range 12 {
		clients.Go(func() {
			for range 40 {
				c := r.dial()
				body := hello
				if roll(4) == 0 {
					body = strings.Replace(hello, "true", "false", 1)
				}
				c.send(post(body))
				if roll(4) > 0 {
					resp, err := http.ReadResponse(c.br, nil)
					if err == nil && roll(4) > 0 {
						io.Copy(io.Discard, resp.Body)
					}
				}
				c.Close()
				if roll(20) == 0 {
					r.replicas[roll(3)].Evacuate()
				}
			}
		})
	}
	clients.Wait()
	// A client may have left before its connection was seen.
	eventually(t, 20*time.Second, "all connections are over", func() bool {
		return r.s.stats.accepted.Load() == 12*40 && r.s.Datapath().Connections == 0
	})
	observed := 0
	for _, p := range r.over() {
		if p.Observed >= 0 {
			observed++
		}
	}
	for i := range r.replicas {
		if n := r.ahead(i); n != 0 {
			t.Errorf("%d prompts are left before e%d", n, i)
		}
	}
	g := shadow.Regret()
	turns := r.s.fleet.Load().Listed[0].State.turns.Load()
	if observed < 50 || g.Compared != uint64(observed) || g.Decisions < g.Compared || turns < g.Decisions {
		t.Errorf("%d first tokens were seen, the shadow has %+v, there were %d turns", observed, g, turns)
	}
}

// What the engine says at the end about its cache counts, where its cache is not
// known from events: the index takes prompts for cached that the engine has lost.
func TestPrefillLearnsWhatWasCached(t *testing.T) {
	const perToken = 100 * time.Microsecond
	c := newCacher(t, nil, newRawEngine(t, func(c *engineSide) {
		for {
			r := c.request()
			if r == nil {
				return
			}
			var n int
			fmt.Sscan(r.Header.Get("Tokens"), &n)
			io.WriteString(c, chunkedHead)
			time.Sleep(time.Duration(n) * perToken)
			io.WriteString(c, chunk(textEvent)+chunk(fmt.Sprintf(`data: {"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":1,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":0}}}`+"\n\n", n, n+1))+lastChunk)
		}
	}).url())
	r := c.replicas[0]
	sizes := []int{100, 800, 400, 200}
	for i := range 48 {
		n := sizes[i%len(sizes)]
		conn := c.dial()
		conn.send(to("/v1/completions", completion(words(n), `"stream":true`, `"stream_options":{"include_usage":true}`), fmt.Sprintf("Tokens: %d\r\n", n)))
		conn.answer()
		conn.Close()
		if p := c.over()[i]; i >= 1+len(sizes) && (p.CachedPredicted < n-4 || p.CachedActual != 0) {
			t.Fatalf("request %d: %+v", i, p)
		}
	}
	if !r.standing.TellsCached() {
		t.Fatal("that the engine tells what it had cached is not noticed")
	}
	speed := r.standing.Calibration.Speed()
	small, large := speed.Time(policy.Prefill(100, 0)), speed.Time(policy.Prefill(800, 0))
	if most := 800 * perToken.Seconds(); large < most/2 || large > 4*most || small > large/2 {
		t.Errorf("100 and 800 tokens are taken to last %.0f and %.0f ms", small*1e3, large*1e3)
	}
}

// What there is to compute: of several sequences each by itself, and not more than
// there is.
func TestPrefillWork(t *testing.T) {
	f := func(tokens, sequences, cached int, want policy.Work) {
		t.Helper()
		p := &policy.Sending{Tokens: tokens, Sequences: sequences}
		if got := p.Work(cached); got != want {
			t.Errorf("%d tokens in %d sequences, %d cached: %+v, want %+v", tokens, sequences, cached, got, want)
		}
	}
	f(0, 1, 0, policy.Work{})
	f(100, 1, 0, policy.Prefill(100, 0))
	f(100, 1, 40, policy.Prefill(60, 40))
	f(100, 1, 200, policy.Prefill(0, 100))
	f(100, 2, 40, policy.Work{Prompts: 2, Tokens: 60, Attention: 2 * policy.Prefill(30, 20).Attention})
}

// TestFirstTokenWakesNobody: while a response goes on, the exchange's goroutine is
// not woken to tell of its first token, unless that takes long.
func TestFirstTokenWakesNobody(t *testing.T) {
	kv := index.New(index.Config{})
	kv.Join(0, index.SlotConfig{Model: "m", BlockSize: 16, Capacity: 10_000, AfterPrefill: true})
	root := index.Root("m", "", nil)
	for _, blocks := range []int{0, 10, 1000} {
		r, err := NewReplica(0, "e", "http://127.0.0.1:1")
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		c := &conn{s: &Server{stats: newStats()}, nudge: make(chan struct{}, 1)}
		c.s.fleet.Store(&Fleet{})
		x := &c.x
		x.c, x.relay.c, x.replica, x.model, x.cache = c, c, r, &Model{Name: "m"}, &cache{index: kv}
		x.response.status, x.asked.Tokens, x.observed = 200, 100, -1
		x.call.stream, x.path = true, []byte("/v1/completions")
		if blocks > 0 {
			ids := make([]uint32, 16*blocks+1)
			for i := range ids {
				ids[i] = uint32(blocks + i)
			}
			x.claims = x.oneClaim[:]
			kv.Claim(&x.claims[0], 0, &index.Prompt{Root: root, IDs: ids, Block: 16, Chain: index.AppendTokens(nil, root, ids, 16)}, time.Now())
		}
		x.prefill.Cached = 0
		x.expectPrefill()

		l := &x.relay
		l.mu.Lock()
		l.state, l.prefilled, l.firstAt = relaying, true, x.prefill.Sent.Add(time.Second)
		l.unlock()
		told, woken := x.observed > 0, len(c.nudge) > 0
		if long := blocks > 100; told == long || woken != long || l.prefilled != long {
			t.Errorf("%d blocks: told %v, woken %v, left to the exchange %v", blocks, told, woken, l.prefilled)
		}
		x.takePrefilled()
		if w, _ := r.standing.Backlog.Ahead(&policy.DefaultSpeed, time.Now()); w.Prompts != 0 || !(x.observed > 0) || l.prefilled {
			t.Errorf("%d blocks: %v ahead, %v observed", blocks, w, x.observed)
		}
	}
}
