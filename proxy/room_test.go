package proxy

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/inferrail/inferrail/policy"
)

// waitingRig is a rig whose replicas have one place each and no line. Its engines
// note who has come, and hold every answer back until release.
type waitingRig struct {
	*rig
	release chan struct{}
	mu      sync.Mutex
	came    []string // the ids of requests
}

func newWaitingRig(t *testing.T, w Waiting, engines int) *waitingRig {
	r := &waitingRig{release: make(chan struct{}, 100)}
	var urls []string
	for range engines {
		urls = append(urls, newRawEngine(t, func(c *engineSide) {
			for req := c.request(); req != nil; req = c.request() {
				r.mu.Lock()
				r.came = append(r.came, req.Header.Get("X-Request-Id"))
				r.mu.Unlock()
				if _, ok := <-r.release; !ok {
					return
				}
				io.WriteString(c, fixed("ok"))
			}
		}).url())
	}
	r.rig = newRig(t, Limits{}, nil, urls...)
	t.Cleanup(func() { close(r.release) })
	for _, replica := range r.replicas {
		replica.SetBounds(1, 0)
	}
	r.change(func(m *Model) { m.Waiting, m.State = w, &ModelState{} })
	return r
}

// asks sends a request of an id, with more fields, and waits until so many wait in
// the room.
func (r *waitingRig) asks(waiting int64, id string, fields ...string) *client {
	r.t.Helper()
	c := r.dial()
	c.send(post(`{"model":"m"}`, append(fields, "X-Request-Id: "+id+"\r\n")...))
	r.waiting(waiting)
	return c
}

func (r *waitingRig) waiting(n int64) {
	r.t.Helper()
	eventually(r.t.(*testing.T), 20*time.Second, fmt.Sprintf("%d wait", n), func() bool {
		return r.s.rooms.waiting.Load() == n && r.s.fleet.Load().Models["m"].State.room.waiting.Load() == n
	})
}

// busy sends a request that takes the first replica's place.
func (r *waitingRig) busy() *client {
	r.t.Helper()
	c := r.asks(0, "busy")
	eventually(r.t.(*testing.T), 20*time.Second, "the engine has it", func() bool { return len(r.order()) == 1 })
	return c
}

func (r *waitingRig) order() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.came)
}

// serves lets the engines answer, and expects that they had the requests in this
// order.
func (r *waitingRig) serves(order ...string) {
	r.t.Helper()
	for range order {
		r.release <- struct{}{}
	}
	eventually(r.t.(*testing.T), 20*time.Second, "all have come", func() bool { return len(r.order()) >= len(order) })
	if got := r.order(); !slices.Equal(got, order) {
		r.t.Errorf("served %v, want %v", got, order)
	}
}

func (c *client) expects(status int, text string) *http.Response {
	c.t.Helper()
	resp, body := c.answer()
	if resp.StatusCode != status || !strings.Contains(body, text) {
		c.t.Errorf("got %d %s, want %d and %q", resp.StatusCode, body, status, text)
	}
	return resp
}

func TestRoom(t *testing.T) {
	patient := Waiting{Max: 10, Timeout: 20 * time.Second}
	t.Run("they are served in the order in which they have come", func(t *testing.T) {
		r := newWaitingRig(t, patient, 1)
		cs := []*client{r.busy(), r.asks(1, "a"), r.asks(2, "b"), r.asks(3, "c")}
		r.serves("busy", "a", "b", "c")
		for _, c := range cs {
			c.expects(200, "ok")
		}
	})
	t.Run("better classes first, whatever others name", func(t *testing.T) {
		r := newWaitingRig(t, patient, 1)
		r.s.SetClasses(NewClasses([]Class{{"interactive", 0}, {"batch", 10}}))
		r.busy()
		r.asks(1, "batch", "X-Inferrail-Priority: batch\r\n")
		r.asks(2, "unknown", "X-Inferrail-Priority: royal\r\n")
		r.asks(3, "none")
		r.asks(4, "interactive", "x-inferrail-priority: interactive\r\n")
		r.serves("busy", "interactive", "unknown", "none", "batch")
	})
	t.Run("tenants in turn, and nobody promotes himself", func(t *testing.T) {
		r := newWaitingRig(t, patient, 1)
		r.s.SetClasses(NewClasses([]Class{{"interactive", 0}, {"batch", 10}}))
		gold, low := key("gold", policy.Rates{}), key("low", policy.Rates{})
		gold.Class, low.Class = "interactive", "batch"
		r.s.SetAccess(NewAccess([]*Key{key("a", policy.Rates{}), key("b", policy.Rates{}), gold, low}, nil))
		as := func(key string) string { return "Authorization: Bearer " + key + "\r\n" }
		r.t = t
		c := r.dial()
		c.send(post(`{"model":"m"}`, as("A"), "X-Request-Id: busy\r\n"))
		eventually(t, 20*time.Second, "the engine has it", func() bool { return len(r.order()) == 1 })
		r.asks(1, "a1", as("A"))
		r.asks(2, "low", as("LOW"), "X-Inferrail-Priority: interactive\r\n")
		r.asks(3, "a2", as("A"), "X-Inferrail-Priority: interactive\r\n")
		r.asks(4, "b1", as("B"))
		r.asks(5, "gold", as("GOLD"))
		r.asks(6, "gold-lazily", as("GOLD"), "X-Inferrail-Priority: batch\r\n")
		// Short prompts of one tenant go together: they are less than his share.
		r.serves("busy", "gold", "a1", "a2", "b1", "low", "gold-lazily")
	})
	t.Run("when it is full, who should wait longer gives way", func(t *testing.T) {
		r := newWaitingRig(t, Waiting{Max: 2, Timeout: 20 * time.Second}, 1)
		r.s.SetClasses(NewClasses([]Class{{"interactive", 0}, {"batch", 10}}))
		r.busy()
		r.asks(1, "batch", "X-Inferrail-Priority: batch\r\n")
		late := r.asks(2, "later-batch", "X-Inferrail-Priority: batch\r\n")
		r.asks(2, "even-later", "X-Inferrail-Priority: batch\r\n").expects(503, "wait as may")
		r.asks(2, "default")
		late.expects(503, "others go first")
		r.serves("busy", "default", "batch")
	})
	t.Run("who was never tried is told when what waits will be done", func(t *testing.T) {
		r := newWaitingRig(t, Waiting{Max: 10, Timeout: 20 * time.Second}, 1)
		r.s.SetClasses(NewClasses([]Class{{"batch", 10}}))
		r.replicas[0].standing.Calibration.SetPrior(policy.Speed{A: 1e-3})
		r.busy()
		// 20,000 tokens that go first, at 1,000 a second.
		long := r.dial()
		long.send(post(`{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("a word. ", 10_000) + `"}]}`))
		r.waiting(1)
		r.change(func(m *Model) { m.Waiting.Timeout = 60 * time.Millisecond })
		resp := r.dial().sends(post(`{"model":"m"}`, "X-Inferrail-Priority: batch\r\n")).expects(503, "that go first have not left this one a place; try again in")
		if after, err := strconv.Atoi(resp.Header.Get("Retry-After")); err != nil || after < 20 || after > 41 {
			t.Errorf("Retry-After: %q", resp.Header.Get("Retry-After"))
		}
		r.change(func(m *Model) { m.Waiting.Max = 1 })
		resp = r.dial().sends(post(`{"model":"m"}`, "X-Inferrail-Priority: batch\r\n")).expects(503, "wait as may; try again in")
		if after, err := strconv.Atoi(resp.Header.Get("Retry-After")); err != nil || after < 20 || after > 41 {
			t.Errorf("Retry-After: %q", resp.Header.Get("Retry-After"))
		}
	})
	t.Run("its deadline", func(t *testing.T) {
		r := newWaitingRig(t, Waiting{Max: 2, Timeout: 60 * time.Millisecond}, 1)
		r.busy()
		r.dial().sends(post(hello)).expects(503, "as many requests as it may")
		r.waiting(0)
		eventually(t, 20*time.Second, "it is counted", func() bool { return r.outcome("overloaded") == 1 })
	})
	t.Run("the deadline of requests", func(t *testing.T) {
		r := newWaitingRig(t, patient, 1)
		r.busy()
		r.s.SetLimits(Limits{RequestTimeout: 60 * time.Millisecond})
		r.dial().sends(post(hello)).expects(503, "turn did not come in time")
	})
	t.Run("a client leaves", func(t *testing.T) {
		r := newWaitingRig(t, patient, 1)
		r.busy()
		a := r.asks(1, "a")
		r.asks(2, "b")
		a.Close()
		r.waiting(1)
		r.serves("busy", "b")
	})
	t.Run("a replica joins", func(t *testing.T) {
		r := newWaitingRig(t, patient, 2)
		both := r.replicas
		r.change(func(m *Model) { m.Replicas = both[:1] })
		r.busy()
		r.asks(1, "a")
		r.asks(2, "b")
		r.change(func(m *Model) { m.Replicas = both })
		r.waiting(1)
		r.serves("busy", "a", "b")
	})
	t.Run("all replicas fail and one comes back", func(t *testing.T) {
		r := newWaitingRig(t, patient, 2)
		both := r.replicas
		r.change(func(m *Model) { m.Replicas = both[:1] })
		c := r.busy()
		a := r.asks(1, "a")
		r.change(func(m *Model) { m.Replicas = nil })
		both[0].Evacuate()
		r.release <- struct{}{}
		c.expects(200, "ok")
		r.waiting(1)
		// Who comes now is told at once, and who has waited still does.
		r.change(func(m *Model) { m.Replicas = both[1:] })
		r.waiting(0)
		r.release <- struct{}{}
		a.expects(200, "ok")
	})
	t.Run("the model goes", func(t *testing.T) {
		r := newWaitingRig(t, patient, 1)
		r.busy()
		a, b := r.asks(1, "a"), r.asks(2, "b")
		r.s.SetFleet(&Fleet{})
		a.expects(503, "No engine that serves")
		b.expects(503, "No engine that serves")
	})
	t.Run("shutdown lets them finish", func(t *testing.T) {
		r := newWaitingRig(t, patient, 1)
		c, a := r.busy(), r.asks(1, "a")
		done := make(chan error)
		go func() { done <- r.shutdown(20 * time.Second) }()
		eventually(t, 20*time.Second, "it drains", r.s.draining.Load)
		r.serves("busy", "a")
		c.expects(200, "ok")
		a.expects(200, "ok")
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Run("shutdown cuts them", func(t *testing.T) {
		r := newWaitingRig(t, patient, 1)
		r.busy()
		a := r.asks(1, "a")
		done := make(chan error)
		go func() { done <- r.shutdown(50 * time.Millisecond) }()
		a.expects(503, "stopping")
		if err := <-done; err != context.DeadlineExceeded {
			t.Error(err)
		}
	})
	t.Run("lines at replicas come first", func(t *testing.T) {
		r := newWaitingRig(t, patient, 1)
		r.replicas[0].SetBounds(1, 1)
		r.busy()
		r.asks(0, "in-line")
		r.places(1, 1)
		r.asks(1, "a")
		r.asks(2, "b")
		if n := r.s.waits.all()[waitKey{"m", DefaultClass}]; n != 3 {
			t.Errorf("%d are counted", n)
		}
		r.serves("busy", "in-line", "a", "b")
	})
}

// TestNobodyOvertakes: who goes from the room to a line has its place there before
// the next is called.
func TestNobodyOvertakes(t *testing.T) {
	r := newWaitingRig(t, Waiting{Max: 10, Timeout: 20 * time.Second}, 1)
	g := &r.replicas[0].gate
	r.busy()
	r.asks(1, "a")
	r.asks(2, "b")
	func() {
		g.mu.Lock() // nobody gets into the line
		defer g.mu.Unlock()
		g.room.Store(1)
		r.s.rooms.call()
		m := &r.s.fleet.Load().Models["m"].State.room
		moving := func() int {
			m.mu.Lock()
			defer m.mu.Unlock()
			return m.moving
		}
		eventually(t, 20*time.Second, "one is on its way", func() bool { return moving() == 1 })
		for end := time.Now().Add(20 * time.Millisecond); time.Now().Before(end); time.Sleep(time.Millisecond) {
			r.s.rooms.call()
			if n := moving(); n != 1 || m.passes(DefaultRank, 0) {
				t.Errorf("%d are on their way", n)
				return
			}
		}
	}()
	r.serves("busy", "a", "b")
}

// TestFullIsToldWhenThereIsRoom: when every place is taken, the answer tells when one
// is expected to become free.
func TestFullIsToldWhenThereIsRoom(t *testing.T) {
	r := newWaitingRig(t, Waiting{}, 2)
	cs := []*client{r.busy(), r.asks(0, "too")}
	eventually(t, 20*time.Second, "both are busy", func() bool { return len(r.order()) == 2 })
	after := func(least, most int) {
		t.Helper()
		h := r.dial().sends(post(hello)).expects(503, "as many requests as it may; try again in").Header
		if n, err := strconv.Atoi(h.Get("Retry-After")); err != nil || n < least || n > most {
			t.Errorf("Retry-After: %q, want %d to %d", h.Get("Retry-After"), least, most)
		}
	}
	after(1, 2) // nothing is known
	r.replicas[0].stays.Add(20)
	r.replicas[1].stays.Add(60)
	after(15, 30)
	for range cs {
		r.release <- struct{}{}
	}
	for _, c := range cs {
		c.expects(200, "ok")
	}
	eventually(t, 20*time.Second, "how long they were there is learned", func() bool {
		return r.replicas[0].stays.Get() < 20 && r.replicas[1].stays.Get() < 60
	})
}

// Who finds all places in the queue taken, too, is told when those in it will have theirs.
func TestFullQueueIsToldWhenThereIsRoom(t *testing.T) {
	r := newWaitingRig(t, Waiting{Max: 2, Timeout: time.Minute}, 1)
	cs := []*client{r.busy(), r.asks(1, "first"), r.asks(2, "second")}
	after := func(least, most int) {
		t.Helper()
		h := r.dial().sends(post(hello)).expects(503, "wait as may; try again in").Header
		if n, err := strconv.Atoi(h.Get("Retry-After")); err != nil || n < least || n > most {
			t.Errorf("Retry-After: %q, want %d to %d", h.Get("Retry-After"), least, most)
		}
	}
	after(1, 2) // nothing is known
	r.replicas[0].stays.Add(10)
	after(20, 40)
	for range cs {
		r.release <- struct{}{}
	}
	for _, c := range cs {
		c.expects(200, "ok")
	}
	if d := r.s.RecentDecisions(0); d.Kept < 2 || d.Kept > d.Made {
		t.Errorf("%d decisions are kept of %d", d.Kept, d.Made)
	}
}

// What a request has waited counts for whether it is over its budget.
func TestOverBudgetCountsTheWait(t *testing.T) {
	r := newWaitingRig(t, Waiting{Max: 2, Timeout: time.Minute}, 1)
	busy := r.busy()
	waits := r.asks(1, "waits", "x-inferrail-budget-ms: 10000\r\n")
	late := r.asks(2, "late", "x-inferrail-budget-ms: 200\r\n")
	time.Sleep(250 * time.Millisecond)
	for range 3 {
		r.release <- struct{}{}
	}
	busy.expects(200, "ok")
	f := func(c *client, want string) {
		t.Helper()
		h := c.expects(200, "ok").Header
		if got := h.Get("X-Inferrail-Over-Budget"); got != want {
			t.Errorf("over budget: %q after %s ms foretold of %s, want %q", got, h.Get("X-Inferrail-Predicted-Ms"), h.Get("X-Inferrail-Budget-Ms"), want)
		}
	}
	f(waits, "false")
	f(late, "true")
}

// What waits has the weight of what has to be computed of it, in the model's queue and in a
// replica's line.
func TestWhatWaitsCountsUncachedTokens(t *testing.T) {
	came, release := make(chan struct{}, 10), make(chan struct{})
	defer close(release)
	engine := newRawEngine(t, func(c *engineSide) {
		for req := c.request(); req != nil; req = c.request() {
			if came <- struct{}{}; req.Header.Get("X-Request-Id") != "warm" {
				<-release
			}
			io.WriteString(c, fixed("ok"))
		}
	})
	for _, where := range []string{"queue", "line"} {
		c := newCacher(t, nil, engine.url())
		c.ask(completion(words(400)), "X-Request-Id: warm\r\n")
		<-came
		if got := c.holds(0, words(400)); got != 100 {
			t.Fatalf("%d blocks of the first prompt are held, want 100", got)
		}
		if where == "queue" {
			c.replicas[0].SetBounds(1, 0)
			c.change(func(m *Model) { m.Waiting, m.State = Waiting{Max: 5}, &ModelState{} })
		} else {
			c.replicas[0].SetBounds(1, 5)
		}
		busy, waits := c.dial(), c.dial()
		busy.send(to("/v1/completions", completion("b")))
		<-came
		waits.send(to("/v1/completions", completion(words(480))))
		tokens := func() int {
			if where == "queue" {
				return c.s.fleet.Load().Models["m"].State.room.tokens()
			}
			g := &c.replicas[0].gate
			g.mu.Lock()
			defer g.mu.Unlock()
			return g.line.Tokens()
		}
		eventually(t, 20*time.Second, "the second waits in the "+where, func() bool { return tokens() > 0 })
		if got := tokens(); got != 80 {
			t.Errorf("what waits in the %s counts %d tokens, want 80", where, got)
		}
		release <- struct{}{}
		<-came
		release <- struct{}{}
		busy.answer()
		waits.answer()
	}
}

// slow makes a model's admission believe that requests are late.
func slow(m *Model) {
	m.Admission = policy.NewAdmission(policy.AdmissionRules{Mode: policy.Empirical})
	for range 20 {
		m.Admission.Observe(time.Now(), time.Hour, 0)
	}
	// The request that is taken in any case has been.
	m.Admission.Admit(time.Now(), time.Hour, time.Hour, time.Second)
}

// pending enters a prompt in the replica's backlog, as if another request were
// there, until the end or leave.
func (r *rig) pending(replica *Replica) (leave func()) {
	e := new(policy.Entry)
	replica.standing.Backlog.Enter(e, policy.Prefill(1e6, 0), true, time.Now(), 3600)
	return sync.OnceFunc(func() { replica.standing.Backlog.Leave(e, time.Now()) })
}

// TestAdmissionRefuses: with an honest Retry-After, and what is expected.
func TestAdmissionRefuses(t *testing.T) {
	e := newRawEngine(t, answering("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nx-inferrail-predicted-ms: 7\r\nX-Inferrail-Over-Budget: maybe\r\n\r\nok"))
	r := newRig(t, Limits{}, nil, e.url())
	var said lockedBuffer
	r.s.log = slog.New(slog.NewTextHandler(&said, nil)) // nothing has come yet
	r.change(slow)
	leave := r.pending(r.replicas[0])
	defer leave()
	c := r.dial()
	ask := func(fields ...string) { c.send(post(hello, fields...)) }

	ask("x-inferrail-budget-ms: 1000\r\n")
	h := c.expects(503, "longer to their first token than the 1s that this one grants").Header
	var after int
	fmt.Sscan(h.Get("Retry-After"), &after)
	if after < 10 || len(h.Values("Retry-After")) != 1 || h.Get("Retry-After-Ms") == "" {
		t.Errorf("Retry-After: %v", h)
	}
	if h.Get("X-Inferrail-Over-Budget") != "true" || h.Get("X-Inferrail-Budget-Ms") != "1000" || len(h.Get("X-Inferrail-Predicted-Ms")) < 5 {
		t.Errorf("headers: %v", h)
	}
	eventually(t, 20*time.Second, "it is logged", func() bool {
		return strings.Contains(said.String(), `failure=over_budget blame=agent`) && strings.Contains(said.String(), `model=m admission="requests are late"`)
	})
	// No budget, no refusal.
	ask()
	h = c.expects(200, "ok").Header
	if v := h.Values("X-Inferrail-Predicted-Ms"); len(v) != 1 || len(v[0]) < 5 || h.Get("X-Inferrail-Over-Budget") != "" {
		t.Errorf("headers: %v", h)
	}
	ask("x-inferrail-budget-ms: 0\r\n")
	c.expects(200, "ok")
	// The model's budget is that of who does not say.
	r.change(func(m *Model) { m.Budget = time.Second })
	ask()
	c.expects(503, "")
	ask("x-inferrail-budget-ms: 0\r\n")
	c.expects(200, "ok")
	c.send(strings.Replace(post(hello), "/v1/chat/completions", "/tokenize", 1)) // nothing is computed
	c.expects(200, "ok")
	eventually(t, 20*time.Second, "it is counted", func() bool { return r.outcome("over_budget") == 2 })
	// A replica that has nothing to do takes it.
	leave()
	ask()
	if h := c.expects(200, "ok").Header; h.Get("X-Inferrail-Over-Budget") != "false" || len(h.Values("X-Inferrail-Over-Budget")) != 1 {
		t.Errorf("headers: %v", h)
	}
	verdict := func(want string) float64 {
		return counted(r.s.stats.admissions, func(name, value string) bool { return name == "verdict" && value == want })
	}
	eventually(t, 20*time.Second, "verdicts are counted", func() bool {
		return verdict("requests are late") == 2 && verdict("no budget") == 3 && verdict("begins at once") == 1
	})
}

// TestAdmissionObserves: a request that grants any time says nothing of how long those
// wait who do not: it may have stood back for them.
func TestAdmissionObserves(t *testing.T) {
	const event = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\ndata: [DONE]\n\n"
	e := newRawEngine(t, answering(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n%s", len(event), event)))
	r := newRig(t, Limits{}, nil, e.url())
	a := policy.NewAdmission(policy.AdmissionRules{Mode: policy.Empirical})
	r.change(func(m *Model) { m.Admission = a })
	c := r.dial()
	for _, fields := range []string{"", "x-inferrail-budget-ms: 0\r\n", "x-inferrail-budget-ms: 60000\r\n"} {
		c.send(post(hello, fields))
		c.expects(200, "DONE")
	}
	eventually(t, 20*time.Second, "only the one with a budget is observed", func() bool { return a.State(time.Now()).Samples > 0 })
	if n := a.State(time.Now()).Samples; n != 1 {
		t.Errorf("%d are observed", n)
	}
}

// TestAdmissionWaits: who is refused waits, and holds up nobody who grants more.
func TestAdmissionWaits(t *testing.T) {
	r := newWaitingRig(t, Waiting{Max: 10, Timeout: 20 * time.Second}, 1)
	r.replicas[0].SetBounds(0, 0)
	r.change(slow)
	leave := r.pending(r.replicas[0])
	defer leave()
	const tight = "X-Inferrail-Budget-Ms: 1\r\n"
	a := r.asks(1, "a", tight)
	b := r.asks(2, "b", tight)
	c := r.asks(2, "c")
	r.serves("c")
	c.expects(200, "ok")
	r.asks(3, "d", "X-Inferrail-Budget-Ms: 2\r\n")
	leave() // within a tick they are seen to be able to begin
	for range 3 {
		r.release <- struct{}{}
	}
	a.expects(200, "ok")
	b.expects(200, "ok")
	r.waiting(0)
	eventually(t, 20*time.Second, "all were served", func() bool { return len(r.order()) == 4 })
}

// counting is a policy that counts how often it is asked.
type counting struct {
	policy.LeastRequest
	asked *atomic.Int64
}

func (p counting) Score(r *policy.Request, cs []policy.Candidate, costs []float64) float64 {
	p.asked.Add(1)
	return p.LeastRequest.Score(r, cs, costs)
}

// TestRoomCallsOne: news bring one request of those that wait to its feet, not all.
func TestRoomCallsOne(t *testing.T) {
	const waiting, news = 30, 200
	r := newWaitingRig(t, Waiting{Max: waiting, Timeout: time.Minute}, 1)
	var asked atomic.Int64
	r.change(func(m *Model) {
		slow(m)
		m.Policy = counting{asked: &asked}
	})
	leave := r.pending(r.replicas[0])
	defer leave()
	var cs []*client
	for i := range waiting {
		cs = append(cs, r.asks(int64(i+1), fmt.Sprint("id-", i), "X-Inferrail-Budget-Ms: 1000\r\n"))
	}
	before, began := asked.Load(), time.Now()
	for range news {
		n := asked.Load()
		r.s.rooms.call()
		eventually(t, 20*time.Second, "somebody tries", func() bool { return asked.Load() > n })
	}
	ticks := int64(time.Since(began)/roomTick) + 1
	if n := asked.Load() - before; n > 2*news+2*ticks {
		t.Errorf("for %d news there were %d tries, and %d ticks", news, n, ticks)
	}
	leave()
	for range cs {
		r.release <- struct{}{}
	}
	for _, c := range cs {
		c.expects(200, "ok")
	}
}

// TestAdmissionTimesOut: the answer is the one that it would have had at once.
func TestAdmissionTimesOut(t *testing.T) {
	r := newWaitingRig(t, Waiting{Max: 10, Timeout: 70 * time.Millisecond}, 1)
	r.change(slow)
	defer r.pending(r.replicas[0])()
	resp := r.dial().sends(post(hello, "X-Inferrail-Budget-Ms: 1000\r\n")).expects(503, "that this one grants")
	if resp.Header.Get("Retry-After") == "1" {
		t.Error("it may come again at once")
	}
	eventually(t, 20*time.Second, "it is counted", func() bool { return r.outcome("over_budget") == 1 })
}

// TestLineGivesWay: in a full line who should wait longer makes room, and looks for
// another place.
func TestLineGivesWay(t *testing.T) {
	r, release := lined(t)
	r.s.SetClasses(NewClasses([]Class{{"batch", 10}}))
	for _, replica := range r.replicas {
		replica.SetBounds(1, 1)
	}
	first, second := r.replicas[0], r.replicas[1]
	r.publish(first)
	batch := func() *client {
		c := r.dial()
		c.send(post(hello, "X-Inferrail-Priority: batch\r\n"))
		return c
	}
	busy := r.ask(1, 0, 0, 0)
	low := batch()
	r.places(1, 1, 0, 0)
	batch().expects(503, "as many requests as it may")
	better := r.dial()
	better.send(post(hello))
	low.expects(503, "as many requests as it may")
	r.places(1, 1, 0, 0)
	r.dial().sends(post(hello)).expects(503, "as many requests as it may")
	release[0] <- struct{}{}
	release[0] <- struct{}{}
	busy.expects(200, "ok")
	better.expects(200, "ok")
	r.places(0, 0, 0, 0)

	// There is another replica, whose line has room by then.
	r.publish(first, second)
	busy = r.ask(1, 0, 0, 0)
	other := r.ask(1, 0, 1, 0)
	low = batch()
	r.places(1, 1, 1, 0)
	third := batch()
	r.places(1, 1, 1, 1)
	better = r.dial().sends(post(hello))
	third.maybe503(low)
	r.places(1, 1, 1, 1)
	for range 4 { // all four may be served by the one that is faster
		release[0] <- struct{}{}
		release[1] <- struct{}{}
	}
	busy.expects(200, "ok")
	other.expects(200, "ok")
	better.expects(200, "ok")
}

func (c *client) sends(s string) *client {
	c.t.Helper()
	c.send(s)
	return c
}

// maybe503 expects that one of two clients is refused.
func (c *client) maybe503(other *client) {
	c.t.Helper()
	got := make(chan int, 2)
	for _, c := range []*client{c, other} {
		go func() {
			resp, err := http.ReadResponse(c.br, nil)
			if err != nil {
				got <- 0
				return
			}
			io.Copy(io.Discard, resp.Body)
			got <- resp.StatusCode
		}()
	}
	if status := <-got; status != 503 {
		c.t.Errorf("got %d", status)
	}
}

// TestBudgetField: what is no number of milliseconds is refused.
func TestBudgetField(t *testing.T) {
	f := func(value string, want time.Duration) {
		t.Helper()
		if d, ok := parseBudget([]byte(value)); d != want || !ok {
			t.Errorf("%q: %v %v, want %v", value, d, ok, want)
		}
	}
	f("0", 0)
	f("1", time.Millisecond)
	f("0250", 250*time.Millisecond)
	f("3600000", time.Hour)
	f("3600001", time.Hour)
	f("99999999999999999999999999999999999", time.Hour)
	for _, value := range []string{"", "-1", "1.5", "1e3", "1s", " 1", "+1", "0x10", "\u0661"} {
		if d, ok := parseBudget([]byte(value)); ok {
			t.Errorf("%q is taken for %v", value, d)
		}
	}

	e := newRawEngine(t, answering(fixed("ok")))
	r := newRig(t, Limits{}, nil, e.url())
	c := r.dial()
	for _, fields := range []string{
		"x-inferrail-budget-ms: soon\r\n", "x-inferrail-budget-ms:\r\n", "x-inferrail-budget-ms: 5\r\nX-Inferrail-Budget-Ms: 6\r\n",
	} {
		c.send(post(hello, fields))
		c.expects(400, `"param":"x-inferrail-budget-ms"`)
	}
	c.send(post(hello, "x-inferrail-budget-ms: 5\r\nX-Inferrail-Budget-Ms: 5\r\n"))
	c.expects(200, "ok")
}

// TestClassOf: which class a request has, of those it may have.
func TestClassOf(t *testing.T) {
	k := NewClasses([]Class{{"interactive", 0}, {"batch", 10}})
	f := func(named, keyClass, want string) {
		t.Helper()
		var key *Key
		if keyClass != "no key" {
			key = &Key{Class: keyClass}
		}
		if got := k.of([]byte(named), key); got.Name != want {
			t.Errorf("%q with a key of class %q: %s, want %s", named, keyClass, got.Name, want)
		}
	}
	f("", "no key", "default")
	f("interactive", "no key", "interactive")
	f("royal", "no key", "default")
	f("", "", "default")
	f("interactive", "", "default")
	f("batch", "", "batch")
	f("", "interactive", "interactive")
	f("interactive", "interactive", "interactive")
	f("batch", "interactive", "batch")
	f("royal", "interactive", "default")
	f("", "batch", "batch")
	f("royal", "batch", "batch")
	f("interactive", "batch", "batch")
	f("batch", "gone", "batch")
	f("interactive", "gone", "default")

	if got := NewClasses([]Class{{DefaultClass, 1}}).of(nil, nil); *got != (Class{DefaultClass, 1}) {
		t.Errorf("the default class is %v", got)
	}
}

// TestAdmittedExchangeDoesNotAllocate: what a budget, a class and admission cost is
// no allocation.
func TestAdmittedExchangeDoesNotAllocate(t *testing.T) {
	withoutRace(t)
	n := testing.AllocsPerRun(200, steadyExchange(t, func(t testing.TB, url string) *rig {
		r := newPlainRig(t, url)
		r.s.SetClasses(NewClasses([]Class{{"batch", 10}}))
		r.change(slow)
		return r
	}, post(hello, "x-inferrail-budget-ms: 1000\r\nx-inferrail-priority: batch\r\n")))
	if n > 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestWaitsAreCounted: by model and class, also when there is none to count.
func TestWaitsAreCounted(t *testing.T) {
	r := newWaitingRig(t, Waiting{Max: 10, Timeout: 20 * time.Second}, 1)
	r.s.SetClasses(NewClasses([]Class{{"batch", 10}}))
	r.change(func(m *Model) {
		m.Admission = policy.NewAdmission(policy.AdmissionRules{Mode: policy.Empirical})
		m.Budget = 3 * time.Second
		m.Admission.Observe(time.Now(), 1500*time.Millisecond, 0)
	})
	r.busy()
	r.asks(1, "a", "X-Inferrail-Priority: batch\r\n")
	registry := prometheus.NewRegistry()
	registry.MustRegister(r.s)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, f := range families {
		for _, m := range f.Metric {
			if name := f.GetName(); name == "inferrail_requests_waiting" || strings.HasPrefix(name, "inferrail_admission_") {
				var labels []string
				for _, l := range m.Label {
					labels = append(labels, l.GetValue())
				}
				got = append(got, fmt.Sprint(name, labels, m.Gauge.GetValue()))
			}
		}
	}
	want := []string{
		"inferrail_admission_budget_seconds[m] 3", "inferrail_admission_observed_seconds[m] 1.5",
		"inferrail_requests_waiting[batch m] 1", "inferrail_requests_waiting[default m] 0",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	r.serves("busy", "a")
	r.waiting(0)
}

// TestRoomAgainstModel plays random histories to a room, and looks among all who wait
// for whom it should call, and whether a newcomer may be tried.
func TestRoomAgainstModel(t *testing.T) {
	_, tcp := pair(t)
	budgets := []time.Duration{0, time.Millisecond, 2 * time.Millisecond, time.Second}
	passed, called := 0, 0
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 1))
		var m room
		var in []*conn
		most := len(budgets)
		if seed%2 == 0 {
			most = 1 + rng.IntN(2) // mostly all are alike
		}
		for step := range 200 {
			class, budget := rng.IntN(2), budgets[rng.IntN(most)]
			switch k := rng.IntN(8); {
			case k < 3 && len(in) < 20:
				c := &conn{tcp: tcp, nudge: make(chan struct{}, 1)}
				c.x.budget, c.place.ticket.Class = budget, class
				if m.join(c, 20) {
					in = append(in, c)
				}
			case k == 3 && len(in) > 0:
				i := rng.IntN(len(in))
				m.leave(in[i], rng.IntN(2) == 0)
				in = slices.Delete(in, i, i+1)
			case k == 4:
				m.call()
			case k == 5:
				m.renew()
			case len(in) > 0:
				c := in[rng.IntN(len(in))]
				if m.on != nil && !m.called(c) {
					continue // another one looks first
				}
				if c.x.budget == 0 {
					continue // admission refuses nobody who grants all the time there is
				}
				bar, want := max(m.bar, c.x.budget), (*conn)(nil)
				for t := range m.queue.All() {
					if b := t.Value.x.budget; want == nil && (b == 0 || b > bar) {
						want = t.Value
					}
				}
				m.pass(c, true)
				if m.on != want {
					t.Fatalf("seed %d, step %d: another one is called than should be", seed, step)
				}
				if want != nil {
					called++
				}
			}
			want := true
			for t := range m.queue.All() {
				if t.Class > class {
					break
				}
				if b := t.Value.x.budget; patience(b) >= patience(budget) || patience(b) > m.bar {
					want = false
					break
				}
			}
			if got := m.passes(class, budget); got != want {
				t.Fatalf("seed %d, step %d: a newcomer passes: %v", seed, step, got)
			}
			if want && len(in) > 0 {
				passed++
			}
		}
	}
	if passed < 100 || called < 100 {
		t.Errorf("too little happened: %d have passed, %d were called", passed, called)
	}
}

// TestRoomUnderRaces: whoever comes, is called, gives up, gives way or is taken at
// the same time, there are never more than may wait, and nobody waits uncalled.
func TestRoomUnderRaces(t *testing.T) {
	const most = 5
	_, tcp := pair(t)
	var m room
	var served, gaveWay, refused atomic.Int64
	over := make(chan struct{})
	var news, all sync.WaitGroup
	news.Go(func() {
		for {
			select {
			case <-over:
				return
			default:
				m.call()
				time.Sleep(10 * time.Microsecond)
			}
		}
	})
	for i := range 16 {
		all.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(i), 5))
			c := &conn{tcp: tcp, nudge: make(chan struct{}, 1)}
			for range 500 {
				c.x.budget = []time.Duration{0, time.Millisecond, time.Second}[rng.IntN(3)]
				p := &c.place
				p.ticket.Class, p.ticket.Tenant, p.ticket.Tokens = rng.IntN(3), string(rune('a'+rng.IntN(3))), rng.IntN(5000)
				m.passes(p.ticket.Class, c.x.budget)
				if !m.join(c, most) {
					refused.Add(1)
					continue
				}
				if n := m.waiting.Load(); n > most {
					t.Errorf("%d wait", n)
				}
				called := m.first(c)
				for {
					if p.displaced.Load() {
						if m.leave(c, false) {
							t.Error("one that gave way was still in")
						}
						gaveWay.Add(1)
						break
					}
					if called || m.called(c) {
						if rng.IntN(3) > 0 {
							// It may have had to give way while it was taken.
							m.leave(c, true)
							served.Add(1)
							break
						}
						called = false
						m.pass(c, rng.IntN(2) == 0)
					}
					if rng.IntN(1000) == 0 {
						m.leave(c, false)
						break
					}
					select {
					case <-c.nudge:
					case <-time.After(20 * time.Second):
						t.Error("nobody is called")
						m.leave(c, false)
						return
					}
				}
			}
		})
	}
	all.Wait()
	close(over)
	news.Wait()
	if m.waiting.Load() != 0 || m.queue.Len() != 0 {
		t.Errorf("at the end %d wait", m.queue.Len())
	}
	if served.Load() < 500 || gaveWay.Load() == 0 || refused.Load() == 0 {
		t.Errorf("too little happened: %d served, %d gave way, %d were refused", served.Load(), gaveWay.Load(), refused.Load())
	}
}
