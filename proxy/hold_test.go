package proxy

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/inferrail/inferrail/policy"
)

// holdingRig is a waitingRig whose replicas take any number of requests, compute so many
// tokens a second, and hold requests back.
type holdingRig struct{ *waitingRig }

func newHoldingRig(t *testing.T, engines int, tokensPerSecond float64) *holdingRig {
	r := &holdingRig{newWaitingRig(t, Waiting{}, engines)}
	for _, replica := range r.replicas {
		replica.SetBounds(0, 0)
		replica.standing.Calibration.SetPrior(policy.Speed{A: 1 / tokensPerSecond})
	}
	r.change(func(m *Model) { m.Holding, m.Policy = policy.Holding{Lead: 0.05}, policy.NewCostModel() })
	return r
}

// slowly is how many tokens a second an engine computes in stories in which nothing
// happens of itself: a prompt of 9,000 takes 15 minutes.
const slowly = 10

// ofSize is a request with a prompt of about so many tokens, of its own.
func ofSize(id string, tokens int, fields ...string) string {
	return post(`{"model":"m","stream":true,"messages":[{"role":"user","content":"`+id+strings.Repeat(" abc", tokens)+`"}]}`,
		append(fields, "X-Request-Id: "+id+"\r\n")...)
}

// asks sends a prompt, and waits until so many are held back.
func (r *holdingRig) asks(held int64, id string, tokens int, fields ...string) *client {
	r.t.Helper()
	c := r.dial()
	c.send(ofSize(id, tokens, fields...))
	r.holds(held)
	return c
}

func (r *holdingRig) state() *ModelState { return r.s.fleet.Load().Models["m"].State }

func (r *holdingRig) holds(n int64) {
	r.t.Helper()
	eventually(r.t.(*testing.T), 20*time.Second, fmt.Sprintf("%d are held", n), func() bool {
		return r.s.rooms.waiting.Load() == n && r.state().held.waiting.Load() == n
	})
}

// measured is of how many models it was measured how long requests were held.
func (r *holdingRig) measured() int {
	ch := make(chan prometheus.Metric, 10)
	r.s.stats.heldTime.Collect(ch)
	return len(ch)
}

// busy sends a long prompt to each replica.
func (r *holdingRig) busy() (cs []*client) {
	r.t.Helper()
	for i := range r.replicas {
		cs = append(cs, r.asks(0, fmt.Sprint("busy", i), 9000))
		eventually(r.t.(*testing.T), 20*time.Second, "the engine has it", func() bool { return len(r.order()) == i+1 })
	}
	return cs
}

func TestHold(t *testing.T) {
	t.Run("nobody while a replica idles", func(t *testing.T) {
		r := newHoldingRig(t, 3, slowly)
		cs := r.busy()
		r.serves("busy0", "busy1", "busy2")
		for _, c := range cs {
			c.expects(200, "ok")
		}
		if n := r.measured(); n != 0 {
			t.Errorf("%d series of times that requests were held", n)
		}
	})
	t.Run("nobody while all that there is fits into a step", func(t *testing.T) {
		r := newHoldingRig(t, 1, slowly)
		for i := range 4 {
			r.asks(0, fmt.Sprint(i), 1000)
			eventually(t, 20*time.Second, "the engine has it", func() bool { return len(r.order()) == i+1 })
		}
		r.serves("0", "1", "2", "3")
	})
	t.Run("the shortest first, one at a time", func(t *testing.T) {
		r := newHoldingRig(t, 1, slowly)
		cs := r.busy()
		cs = append(cs, r.asks(1, "long", 27000), r.asks(2, "short", 9000), r.asks(3, "middle", 15000))
		for i, id := range []string{"busy0", "short", "middle", "long"} {
			eventually(t, 20*time.Second, id+" is served", func() bool { return len(r.order()) == i+1 && r.order()[i] == id })
			r.holds(int64(3 - i))
			r.release <- struct{}{}
		}
		for _, c := range cs {
			c.expects(200, "ok")
		}
	})
	t.Run("an engine of others that idles takes it at once", func(t *testing.T) {
		r := newHoldingRig(t, 2, slowly)
		both := r.replicas
		r.change(func(m *Model) { m.Replicas = both[:1] })
		r.asks(0, "busy", 9000)
		eventually(t, 20*time.Second, "the engine has it", func() bool { return len(r.order()) == 1 })
		r.asks(1, "long", 15000)
		r.asks(2, "short", 9000)
		r.change(func(m *Model) { m.Replicas = both })
		r.holds(1)
		r.serves("busy", "short", "long")
	})
	t.Run("better classes first, and tenants in turn", func(t *testing.T) {
		r := newHoldingRig(t, 1, slowly)
		r.s.SetClasses(NewClasses([]Class{{"interactive", 0}, {"batch", 10}}))
		gold := key("gold", policy.Rates{})
		gold.Class = "interactive"
		r.s.SetAccess(NewAccess([]*Key{key("a", policy.Rates{}), key("b", policy.Rates{}), gold}, nil))
		as := func(key string) string { return "Authorization: Bearer " + key + "\r\n" }
		r.asks(0, "busy", 9000, as("A"))
		eventually(t, 20*time.Second, "the engine has it", func() bool { return len(r.order()) == 1 })
		r.asks(1, "a1", 9000, as("A"))
		r.asks(2, "batch", 8500, as("B"), "X-Inferrail-Priority: batch\r\n")
		r.asks(3, "a2", 9000, as("A"))
		r.asks(4, "b1", 27000, as("B"))
		r.asks(5, "interactive", 27000, as("GOLD"))
		r.serves("busy", "interactive", "a1", "a2", "b1", "batch")
	})
	t.Run("a client leaves", func(t *testing.T) {
		r := newHoldingRig(t, 1, slowly)
		r.busy()
		a := r.asks(1, "a", 9000)
		r.asks(2, "b", 15000)
		a.Close()
		r.holds(1)
		if work, want := r.state().held.worked(), 1500*time.Second; work < want-150*time.Second || work > want+150*time.Second {
			t.Errorf("those that are held take %v, want about %v", work, want)
		}
		r.serves("busy0", "b")
	})
	t.Run("the deadline of requests", func(t *testing.T) {
		r := newHoldingRig(t, 1, slowly)
		r.busy()
		r.s.SetLimits(Limits{RequestTimeout: 60 * time.Millisecond})
		r.dial().sends(ofSize("a", 9000)).expects(503, "turn did not come in time")
		r.holds(0)
		if r.state().held.worked() != 0 {
			t.Error("it still counts")
		}
	})
	t.Run("whose budget would be over", func(t *testing.T) {
		r := newHoldingRig(t, 1, slowly)
		r.busy()
		r.asks(1, "patient", 9000)
		r.asks(1, "late", 9000, "x-inferrail-budget-ms: 1000\r\n")
		eventually(t, 20*time.Second, "it is sent at once", func() bool { return slices.Equal(r.order(), []string{"busy0", "late"}) })
	})
	t.Run("for as long as was foretold, when nothing is heard of engines", func(t *testing.T) {
		r := newHoldingRig(t, 1, 100_000)
		r.asks(0, "hangs", 20_000)  // 0.2 s, it is thought
		c := r.asks(1, "a", 20_000) // is foretold to wait so long, and lets later ones pass for a second
		began := time.Now()
		eventually(t, 20*time.Second, "it is sent", func() bool { return r.replicas[0].InFlight() == 2 })
		if d := time.Since(began); d > 15*time.Second {
			t.Errorf("after %v", d)
		}
		r.release <- struct{}{}
		r.release <- struct{}{}
		c.expects(200, "ok")
	})
	t.Run("one that has failed is not held again", func(t *testing.T) {
		r := newHoldingRig(t, 2, slowly)
		both := r.replicas
		r.change(func(m *Model) { m.Replicas = both[:1] })
		r.asks(0, "first", 9000)
		eventually(t, 20*time.Second, "an engine has it", func() bool { return len(r.order()) == 1 })
		r.change(func(m *Model) { m.Replicas = both[1:] })
		c := r.asks(0, "second", 9000)
		eventually(t, 20*time.Second, "the other one has this one", func() bool { return len(r.order()) == 2 })
		r.change(func(m *Model) { m.Replicas = both[:1] })
		both[1].Evacuate()
		eventually(t, 20*time.Second, "both are at one", func() bool { return both[0].InFlight() == 2 })
		r.holds(0)
		for range 3 {
			r.release <- struct{}{}
		}
		c.expects(200, "ok")
	})
	t.Run("a replica leaves, and all", func(t *testing.T) {
		r := newHoldingRig(t, 2, slowly)
		both := r.replicas
		r.busy()
		a := r.asks(1, "a", 9000)
		r.change(func(m *Model) { m.Replicas = both[:1] })
		r.holds(1)
		r.s.SetFleet(&Fleet{})
		a.expects(503, "No engine that serves")
		r.serves("busy0", "busy1")
	})
	t.Run("not any more", func(t *testing.T) {
		r := newHoldingRig(t, 1, slowly)
		r.busy()
		r.asks(1, "a", 9000)
		r.asks(2, "b", 9000)
		r.change(func(m *Model) { m.Holding = policy.Holding{} })
		r.holds(0)
		eventually(t, 20*time.Second, "all are there", func() bool { return r.replicas[0].InFlight() == 3 })
	})
	t.Run("shutdown lets them finish", func(t *testing.T) {
		r := newHoldingRig(t, 1, slowly)
		c, a := r.busy()[0], r.asks(1, "a", 9000)
		done := make(chan error)
		go func() { done <- r.shutdown(20 * time.Second) }()
		eventually(t, 20*time.Second, "it drains", r.s.draining.Load)
		r.serves("busy0", "a")
		c.expects(200, "ok")
		a.expects(200, "ok")
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Run("shutdown cuts them", func(t *testing.T) {
		r := newHoldingRig(t, 1, slowly)
		r.busy()
		a := r.asks(1, "a", 9000)
		done := make(chan error)
		go func() { done <- r.shutdown(50 * time.Millisecond) }()
		a.expects(503, "stopping")
		<-done
	})
	t.Run("not more than there are places for", func(t *testing.T) {
		r := newHoldingRig(t, 1, slowly)
		r.replicas[0].SetBounds(2, 0)
		cs := r.busy()
		cs = append(cs, r.asks(1, "a", 9000))
		r.dial().sends(ofSize("b", 9000)).expects(503, "as many requests as it may")
		r.replicas[0].SetBounds(2, 1)
		cs = append(cs, r.asks(2, "c", 9000))
		r.dial().sends(ofSize("d", 9000)).expects(503, "as many requests as it may")
		r.places(1, 0)
		r.serves("busy0", "a", "c")
		for _, c := range cs {
			c.expects(200, "ok")
		}
	})
	t.Run("who has no place when it is to go waits on", func(t *testing.T) {
		r := newHoldingRig(t, 1, 100_000)
		r.replicas[0].SetBounds(2, 0)
		r.asks(0, "hangs", 20_000)
		eventually(t, 20*time.Second, "the engine has it", func() bool { return len(r.order()) == 1 })
		c := r.asks(1, "a", 20_000)
		r.replicas[0].SetBounds(1, 0)
		// It is not to be held for longer than 1.2 s, and is.
		time.Sleep(2 * time.Second)
		r.holds(1)
		r.serves("hangs", "a")
		c.expects(200, "ok")
	})
	t.Run("where all places are taken it goes to a line", func(t *testing.T) {
		r := newHoldingRig(t, 1, slowly)
		r.replicas[0].SetBounds(2, 5)
		r.busy()
		r.asks(1, "a", 9000)
		r.replicas[0].SetBounds(1, 5)
		r.s.rooms.call()
		r.holds(0)
		r.places(1, 1)
		r.serves("busy0", "a")
	})
	t.Run("what admission is told of", func(t *testing.T) {
		r := newHoldingRig(t, 1, slowly)
		r.busy()
		r.asks(1, "a", 9000) // 900 s behind 900 s
		r.change(func(m *Model) { m.Admission = policy.NewAdmission(policy.AdmissionRules{Mode: policy.Absolute}) })
		refused := func(ms string) {
			t.Helper()
			r.dial().sends(ofSize("b", 9000, "x-inferrail-budget-ms: "+ms+"\r\n")).expects(503, "take longer")
		}
		refused("2100000")
		r.asks(2, "c", 9000, "x-inferrail-budget-ms: 3600000\r\n")
	})
	t.Run("what is told of it", func(t *testing.T) {
		r := newHoldingRig(t, 1, slowly)
		log := make(chan *Decision, 10)
		r.s.SetDecisions(log, DecisionsWanted{Sample: 1})
		explain := func() *Decision {
			t.Helper()
			d, err := r.s.Explain("/v1/chat/completions", nil, []byte(`{"model":"m","messages":[{"role":"user","content":"`+strings.Repeat(" abc", 9000)+`"}]}`))
			if err != nil {
				t.Fatal(err)
			}
			return d
		}
		if d := explain(); d.Waits != "" || d.Winner != "e0" {
			t.Errorf("before: %+v", d)
		}
		r.busy()
		r.asks(1, "a", 9000)
		if n := r.state().Held(); n != 1 {
			t.Errorf("%d are held", n)
		}
		if n := r.s.waits.all()[waitKey{"m", DefaultClass}]; n != 1 {
			t.Errorf("%d wait", n)
		}
		if d := explain(); !strings.Contains(d.Waits, "until a replica has less than 50ms") || d.Winner != "e0" || d.Refused {
			t.Errorf("held: waits %q, winner %q", d.Waits, d.Winner)
		}
		r.serves("busy0", "a")
		for range 2 {
			d := <-log
			if held := d.HeldMS > 0; held != (d.RequestID == "a") {
				t.Errorf("%s was held for %v ms", d.RequestID, d.HeldMS)
			}
		}
		eventually(t, 20*time.Second, "it is measured", func() bool { return r.measured() == 1 })
	})
}

// TestHoldUnderRaces: engines that compute one prompt after another, of which one dies
// and comes back, and clients of which some leave. Nobody is lost, or held while an
// engine has nothing to do, and at the end nobody is held.
func TestHoldUnderRaces(t *testing.T) {
	const rate = 200_000 // tokens a second
	var computing [3]atomic.Int64
	var urls []string
	for i := range computing {
		var one sync.Mutex
		urls = append(urls, newRawEngine(t, func(c *engineSide) {
			for req := c.request(); req != nil; req = c.request() {
				n, _ := io.Copy(io.Discard, req.Body)
				computing[i].Add(1)
				one.Lock()
				time.Sleep(time.Duration(n/4) * time.Second / rate)
				one.Unlock()
				computing[i].Add(-1)
				if _, err := io.WriteString(c, fixed("ok")); err != nil {
					return
				}
			}
		}).url())
	}
	r := newRig(t, Limits{}, nil, urls...)
	state := &ModelState{}
	for _, replica := range r.replicas {
		replica.standing.Calibration.SetPrior(policy.Speed{A: 1.0 / rate})
	}
	all := slices.Clone(r.replicas)
	r.change(func(m *Model) {
		m.Holding, m.Policy, m.State = policy.Holding{Lead: 0.02}, policy.NewCostModel(), state
	})
	over := make(chan struct{})
	var watched sync.WaitGroup
	watched.Go(func() {
		idle := 0
		for up := true; ; {
			select {
			case <-over:
				return
			case <-time.After(20 * time.Millisecond):
			}
			if rand.IntN(10) == 0 {
				up = !up
				n := 3
				if !up {
					n = 2
				}
				r.change(func(m *Model) { m.Replicas = all[:n] })
			}
			// For as long as 5 s an engine may have nothing to do only on a machine that
			// has no time for it.
			if idle++; computing[0].Load() > 0 && computing[1].Load() > 0 || state.Held() == 0 {
				idle = 0
			}
			if idle > 250 {
				t.Error("requests are held, and an engine has nothing to do")
				return
			}
		}
	})
	var asked, answered, left, held atomic.Int64
	var clients sync.WaitGroup
	for i := range 24 {
		clients.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(i), 1))
			for k := range 12 {
				c := r.dial()
				c.send(ofSize(fmt.Sprint(i, "-", k), 100+rng.IntN(20_000)))
				asked.Add(1)
				if state.Held() > 0 {
					held.Add(1)
				}
				if rng.IntN(8) == 0 {
					time.Sleep(time.Duration(rng.IntN(100)) * time.Millisecond)
					c.Close()
					left.Add(1)
					continue
				}
				c.SetReadDeadline(time.Now().Add(60 * time.Second))
				resp, err := http.ReadResponse(c.br, nil)
				if err != nil {
					t.Errorf("no answer: %v", err)
					return
				}
				io.Copy(io.Discard, resp.Body)
				if resp.StatusCode == 200 {
					answered.Add(1)
				} else {
					t.Errorf("status %d", resp.StatusCode)
				}
				c.Close()
			}
		})
	}
	clients.Wait()
	close(over)
	watched.Wait()
	eventually(t, 20*time.Second, "all is over", func() bool { return r.s.stats.running.Load() == 0 })
	if state.Held() != 0 || r.s.rooms.waiting.Load() != 0 || state.held.worked() != 0 || state.held.moving != 0 || len(r.s.waits.all()) != 0 {
		t.Errorf("at the end %d are held, of %v", state.Held(), state.held.worked())
	}
	if asked.Load() != answered.Load()+left.Load() || held.Load() < 20 {
		t.Errorf("of %d that asked %d were answered and %d have left; %d met others that were held", asked.Load(), answered.Load(), left.Load(), held.Load())
	}
}
