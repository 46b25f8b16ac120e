package proxy

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/inferrail/inferrail/policy"
)

// dice are random numbers for several goroutines, of one seed.
type dice struct {
	mu  sync.Mutex // guards rng
	rng *rand.Rand
}

func newDice(seed uint64) *dice { return &dice{rng: rand.New(rand.NewPCG(seed, 1))} }

// roll is a number below n.
func (d *dice) roll(n int) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.rng.IntN(n)
}

func (d *dice) pause(most int) { time.Sleep(time.Duration(d.roll(most)) * time.Millisecond) }

// chaoticEngine is an engine that does something else each time, most of it wrong.
func chaoticEngine(d *dice) func(*engineSide) {
	const absurd = `data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":999999999999999,"prompt_tokens_details":{"cached_tokens":999999999999999}}}` + "\n\n"
	return func(c *engineSide) {
		for c.request() != nil {
			d.pause(4)
			switch d.roll(20) {
			case 0:
				return
			case 1:
				c.SetLinger(0)
				return
			case 2:
				io.WriteString(c, status(503, "busy"))
			case 3:
				io.WriteString(c, status(400, "no"))
			case 4:
				io.WriteString(c, status(500, `{"error":{"message":"EngineCore encountered an issue"}}`))
			case 5:
				io.WriteString(c, chunkedHead)
				return
			case 6:
				io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
				return
			case 7:
				io.WriteString(c, chunkedHead+chunk(": only\n\n")+chunk(": comments\n\n")+lastChunk)
			case 8:
				io.WriteString(c, chunkedHead+chunk(textEvent))
				return
			case 9:
				io.WriteString(c, chunkedHead+chunk(textEvent)+"nonsense")
				return
			case 10:
				io.WriteString(c, chunkedHead+chunk(`data: {"error":{}}`+"\n\n")+lastChunk)
			case 11:
				io.WriteString(c, strings.Repeat("HTTP/1.1 103 Early Hints\r\nX: y\r\n\r\n", d.roll(20))+fixed("{}"))
			case 12:
				io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\nuntil the end")
				return
			case 13:
				io.WriteString(c, "HTTP/1.1 20")
				return
			case 14:
				io.WriteString(c, chunkedHead+chunk(textEvent)+chunk(absurd)+lastChunk)
			case 15:
				io.WriteString(c, fixed(`{"usage":{"prompt_tokens":5,"completion_tokens":3,"total_tokens":8}}`))
			default:
				io.WriteString(c, chunkedHead)
				d.pause(3)
				io.WriteString(c, chunk(roleEvent))
				for range d.roll(5) {
					d.pause(3)
					io.WriteString(c, chunk(textEvent))
				}
				io.WriteString(c, lastChunk)
			}
		}
	}
}

// chaos is a server whose engines, clients and configuration do as they like, all
// at the same time.
type chaos struct {
	*cacher
	*dice
	dialled          atomic.Int64
	answers, refused atomic.Int64
	shadows          []*policy.Shadow
	mu               sync.Mutex // guards faults
	faults           []string
}

const (
	chaosPlaces = 3 // at a replica
	chaosLine   = 4
	chaosRoom   = 6
)

// wrong notes what should not be.
func (c *chaos) wrong(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.faults) < 10 {
		c.faults = append(c.faults, fmt.Sprintf(format, args...))
	}
}

// request is a random one, as a client writes it.
func (c *chaos) request(version string) string {
	fields := []string{"X-Inferrail-Replica: mine\r\n"}
	if c.roll(2) == 0 {
		fields = append(fields, fmt.Sprintf("X-Inferrail-Priority: %s\r\n", []string{"batch", "gold", "royal"}[c.roll(3)]))
	}
	if c.roll(2) == 0 {
		fields = append(fields, fmt.Sprintf("X-Inferrail-Budget-Ms: %s\r\n", []string{"0", "1", "50", "1e400", "99999999999999999999"}[c.roll(5)]))
	}
	if c.roll(2) == 0 {
		fields = append(fields, fmt.Sprintf("Authorization: Bearer %s\r\n", []string{"A", "B", "C"}[c.roll(3)]))
	}
	if c.roll(4) == 0 {
		fields = append(fields, "X-Session-Id: "+strings.Repeat("s", c.roll(2000))+"\r\n")
	}
	text := words(c.roll(60))
	body := fmt.Sprintf(`{"model":"%s","prompt":"%s","stream":%v,"max_tokens":%d}`, []string{"m", "alias"}[c.roll(2)], text, c.roll(4) > 0, c.roll(100))
	return strings.Replace(to("/v1/completions", body, fields...), "HTTP/1.1", version, 1)
}

// visit is one client: it asks, and leaves when it likes. Whoever stays is answered,
// or told by the end of the connection that there will be no more of an answer.
func (c *chaos) visit() {
	version := "HTTP/1.1"
	if c.roll(6) == 0 {
		version = "HTTP/1.0"
	}
	nc, err := net.Dial("tcp", c.addr)
	if err != nil {
		if !c.s.draining.Load() {
			c.wrong("%v", err)
		}
		return
	}
	defer nc.Close()
	c.dialled.Add(1)
	nc.SetDeadline(time.Now().Add(20 * time.Second))
	conn := &client{nc.(*net.TCPConn), c.t, bufio.NewReader(nc)}
	for range 1 + c.roll(3) {
		if _, err := io.WriteString(conn.TCPConn, c.request(version)); err != nil {
			return // the answer before has ended it
		}
		switch c.roll(10) {
		case 0:
			c.pause(5)
			return
		case 1:
			c.pause(5)
			conn.SetLinger(0)
			return
		case 2:
			conn.CloseWrite()
		}
		resp, err := http.ReadResponse(conn.br, nil)
		if err != nil {
			c.ended(err)
			return
		}
		c.seen(resp)
		if c.roll(8) == 0 {
			return
		}
		if _, err := io.Copy(io.Discard, resp.Body); err != nil {
			c.ended(err)
			return
		}
		if resp.Close {
			return
		}
	}
}

// ended: a connection is over, or a time was.
func (c *chaos) ended(err error) {
	if t, ok := err.(interface{ Timeout() bool }); ok && t.Timeout() {
		c.wrong("a client waits for ever: %v", err)
	}
}

func (c *chaos) seen(resp *http.Response) {
	c.answers.Add(1)
	switch {
	case resp.StatusCode == 503:
		c.refused.Add(1)
		if resp.Header.Get("X-Inferrail-Replica") == "" && resp.Header.Get("Retry-After") == "" {
			c.wrong("a 503 without a Retry-After: %v", resp.Header)
		}
	case resp.StatusCode/100 == 2, resp.StatusCode == 400, resp.StatusCode == 401, resp.StatusCode == 404, resp.StatusCode == 429,
		resp.StatusCode == 500, resp.StatusCode == 502, resp.StatusCode == 504:
	default:
		c.wrong("status %d", resp.StatusCode)
	}
	if v := resp.Header.Values("X-Inferrail-Replica"); len(v) > 1 || len(v) == 1 && v[0] == "mine" {
		c.wrong("replica %q", v)
	}
}

// stream is visit over HTTP/2.
func (c *chaos) stream(client speaker) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, client.url+"/v1/completions",
		strings.NewReader(fmt.Sprintf(`{"prompt":"%s","stream":%v}`, words(c.roll(60)), c.roll(2) == 0)))
	if err != nil {
		c.wrong("%v", err)
		return
	}
	req.Header.Set("X-Inferrail-Budget-Ms", "50")
	req.Header.Set("Authorization", "Bearer A")
	if c.roll(3) == 0 {
		time.AfterFunc(time.Duration(c.roll(8))*time.Millisecond, cancel)
	}
	resp, err := client.Do(req)
	if err == nil {
		c.seen(resp)
		_, err = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
	if err != nil && ctx.Err() == context.DeadlineExceeded {
		c.wrong("a stream waits for ever: %v", err)
	}
}

// rule publishes a random configuration.
func (c *chaos) rule(state **ModelState) {
	names := policy.Names()
	some := func() policy.Policy {
		p, err := policy.New(names[c.roll(len(names))], nil)
		if err != nil {
			c.wrong("%v", err)
		}
		return p
	}
	was := c.s.fleet.Load()
	if len(was.Listed) == 0 || c.roll(10) == 0 {
		*state = &ModelState{} // as the agent does for a model that was gone
	}
	if c.roll(30) == 0 {
		c.s.SetFleet(&Fleet{})
		return
	}
	m := Model{Name: "m", Aliases: []string{"alias"}, Policy: some(), State: *state, CacheName: "base", Blocks: []int{4}, Prompts: c.model,
		Budget:  time.Duration(c.roll(3)) * 20 * time.Millisecond,
		Waiting: Waiting{Max: c.roll(chaosRoom + 1), Timeout: time.Duration(1+c.roll(60)) * time.Millisecond}}
	for range c.roll(3) {
		s := &policy.Shadow{Policy: some()}
		m.Shadows = append(m.Shadows, s)
		c.shadows = append(c.shadows, s)
	}
	if c.roll(3) > 0 {
		m.Admission = policy.NewAdmission(policy.AdmissionRules{Mode: policy.AdmissionMode(c.roll(3)), Percentile: .5, Window: time.Second})
	}
	for _, r := range c.replicas {
		if c.roll(5) > 0 {
			m.Replicas = append(m.Replicas, r)
		} else if c.roll(2) == 0 {
			r.Evacuate()
		}
		if c.roll(3) == 0 {
			r.SetBounds(1+c.roll(chaosPlaces), c.roll(chaosLine+1))
		}
		if c.roll(3) == 0 {
			now := time.Now()
			r.SetLoad(&policy.Load{Asked: now, Told: now, Until: now.Add(20 * time.Millisecond), Running: c.roll(1 << 20), Waiting: c.roll(1 << 20), WaitingTokens: c.roll(1 << 30), KV: 1})
		}
	}
	c.s.SetFleet(&Fleet{Models: map[string]*Model{"m": &m, "alias": &m}, Listed: []*Model{&m}})
	if c.roll(4) == 0 {
		c.s.SetClasses(NewClasses([]Class{{"gold", c.roll(3)}, {"batch", 10}}[:1+c.roll(2)]))
	}
	if c.roll(4) == 0 {
		keys := []*Key{key("a", policy.Rates{}), key("b", policy.Rates{InputTokens: 1e6, OutputTokens: 1e6}), key("c", policy.Rates{})}
		keys[2].Class = "batch"
		c.s.SetAccess(NewAccess(keys[:[...]int{0, 0, 0, 2, 3}[c.roll(5)]], nil))
	}
	if c.roll(4) == 0 {
		c.s.SetLimits(Limits{Backoff: time.Millisecond, RequestTimeout: time.Duration(20+c.roll(2000)) * time.Millisecond, MaxAttempts: 1 + c.roll(4)})
	}
	if c.roll(4) == 0 {
		c.index.Forget(c.replicas[c.roll(len(c.replicas))].Slot)
	}
}

// TestChaos: whatever clients, engines and the configuration do at the same time,
// everybody gets an end, no bound is exceeded, and afterwards nothing is left of any
// request in what counts them. newCacher looks for goroutines, descriptors, claims of
// the cache and what is before the replicas as well.
func TestChaos(t *testing.T) {
	f := func(name string, seed uint64, kernel, drains bool) {
		t.Run(name, func(t *testing.T) {
			d := newDice(seed)
			var urls []string
			for range 4 {
				urls = append(urls, newRawEngine(t, chaoticEngine(d)).url())
			}
			var joiner Joiner
			if kernel {
				joiner = newFakeKernel(t)
			}
			c := &chaos{cacher: newCacher(t, joiner, urls...), dice: d}
			for _, r := range c.replicas {
				r.SetBounds(chaosPlaces, chaosLine)
			}
			records := make(chan *Decision, 4)
			c.s.SetDecisions(records, DecisionsWanted{Sample: 1})
			h2 := c.speak(tongue{http: "2"})
			state := &ModelState{}
			c.rule(&state)

			waited := int64(0)
			over := make(chan struct{})
			var about, clients sync.WaitGroup
			until := func(f func()) {
				about.Go(func() {
					for {
						select {
						case <-over:
							return
						default:
							f()
						}
					}
				})
			}
			until(func() {
				c.rule(&state)
				c.pause(8)
			})
			until(func() {
				for _, r := range c.replicas {
					if n, p := r.InFlight(), r.Pending(); n > chaosPlaces || p > chaosLine {
						c.wrong("%d inside, %d in line", n, p)
					}
				}
				waited = max(waited, c.s.lines.waiting.Load(), c.s.rooms.waiting.Load())
				c.s.Explain("/v1/completions", http.Header{"X-Inferrail-Budget-Ms": {"5"}}, []byte(`{"prompt":"a a a a a a"}`))
				registry := prometheus.NewPedanticRegistry()
				registry.MustRegister(c.s)
				if _, err := registry.Gather(); err != nil {
					c.wrong("metrics: %v", err)
				}
				c.pause(8)
			})
			told := 0
			about.Go(func() {
				for {
					select {
					case r := <-records:
						r.WorkOut()
						c.s.SetDecisions(records, DecisionsWanted{Sample: 1, Hashes: d.roll(2) == 0})
						told++
						c.pause(3)
					case <-over:
						return
					}
				}
			})
			for i := range 32 {
				clients.Go(func() {
					for range 10 {
						if i%6 == 0 {
							c.stream(h2)
						} else {
							c.visit()
						}
					}
				})
			}
			if drains {
				eventually(t, 20*time.Second, "some are answered", func() bool { return c.answers.Load() > 50 })
				// Requests that have begun are served to their end, which none of them lacks.
				if err := c.shutdown(20 * time.Second); err != nil {
					t.Error(err)
				}
			}
			clients.Wait()
			close(over)
			about.Wait()
			h2.CloseIdleConnections()
			eventually(t, 20*time.Second, "all connections are over", func() bool {
				d := c.s.Datapath()
				return (drains || c.s.stats.accepted.Load() >= c.dialled.Load()) && d.Connections == 0 && d.Running == 0
			})
			for _, what := range c.faults {
				t.Error(what)
			}
			c.counted(state)
			told += len(records)
			var dropped dto.Metric
			c.s.stats.decisionsDropped.Write(&dropped)
			if n := int(c.s.journal.n); told+int(dropped.Counter.GetValue()) != n || n == 0 {
				t.Errorf("of %d decisions %d were told and %v dropped", n, told, dropped.Counter.GetValue())
			}
			for _, s := range c.shadows {
				if g := s.Regret(); g.Compared > g.Decisions || g.Agreed > g.Decisions {
					t.Errorf("a shadow has %+v", g)
				}
			}
			t.Logf("%d answers, %d of them 503, %d decisions, up to %d waiting", c.answers.Load(), c.refused.Load(), c.s.journal.n, waited)
			if c.answers.Load() < 50 || !drains && (c.refused.Load() == 0 || waited == 0) {
				t.Error("too little happened")
			}
		})
	}
	f("copied", 1, false, false)
	f("copied, another history", 2, false, false)
	f("with the kernel", 3, true, false)
	f("the server stops meanwhile", 4, false, true)
}

// counted expects that nothing counts a request any more.
func (c *chaos) counted(states ...*ModelState) {
	c.t.Helper()
	for i, r := range c.replicas {
		if n, p, w := r.InFlight(), r.Pending(), c.ahead(i); n != 0 || p != 0 || w != 0 || r.gate.line.Len() != 0 || r.gate.waiting != nil {
			c.t.Errorf("at %s there are %d inside, %d in line, %d prompts", r.ID, n, p, w)
		}
		if w := r.standing.Promised(); w != (policy.Work{}) {
			c.t.Errorf("%s is promised %+v", r.ID, w)
		}
	}
	s := c.s
	if len(s.lines.gates) != 0 || s.lines.waiting.Load() != 0 || len(s.rooms.open) != 0 || s.rooms.waiting.Load() != 0 || len(s.waits.all()) != 0 {
		c.t.Errorf("still waiting: %d in %d lines, %d in %d rooms, by class %v", s.lines.waiting.Load(), len(s.lines.gates),
			s.rooms.waiting.Load(), len(s.rooms.open), s.waits.all())
	}
	for _, state := range states {
		if m := &state.room; m.waiting.Load() != 0 || m.queue.Len() != 0 {
			c.t.Errorf("in the room are %d", m.queue.Len())
		}
	}
	if n := s.buffered.Load(); n != 0 {
		c.t.Errorf("%d bytes are held", n)
	}
	for _, slot := range c.index.Stats(nil) {
		if slot.Claims != 0 {
			c.t.Errorf("slot %d has %d claims", slot.Slot, slot.Claims)
		}
	}
}
