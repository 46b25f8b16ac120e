package proxy

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/index/kvevent"
	"github.com/inferrail/inferrail/policy"
)

// prewarmRig is a piecesRig whose idle engines compute ahead what many prompts begin with,
// in pieces of 512 tokens. Engine 0 holds the system prompt.
type prewarmRig struct {
	*piecesRig
	release chan struct{} // closed when the requests that hang are to be answered
}

// system is the system prompt, of 1,300 tokens, of which 1,024 are worth computing ahead.
var system = long("system")

func newPrewarmRig(t testing.TB, engines int) *prewarmRig {
	t.Helper()
	r := &prewarmRig{newPiecesRig(t, engines), make(chan struct{})}
	r.known(5 * time.Millisecond)
	r.change(func(m *Model) { m.Pieces, m.Prewarming = policy.Pieces{}, policy.Prewarming{Length: 1e-6} })
	r.engines[0].store(r.ids(system))
	r.engines[0].does(func(c *engineSide, a *askedOf) bool {
		if strings.Contains(a.body, "hangs") {
			<-r.release
		}
		return false
	})
	t.Cleanup(r.unblock)
	return r
}

// known says what a token is taken to cost, whatever it does.
func (r *prewarmRig) known(d time.Duration) {
	for i, e := range r.engines {
		e.each.Store(0)
		r.replicas[i].standing.Calibration.SetPrior(policy.Speed{A: d.Seconds(), D: 1e-7})
	}
}

func (r *prewarmRig) unblock() {
	select {
	case <-r.release:
	default:
		close(r.release)
	}
}

// busy lets engine 0 compute, until unblock, a prompt of which it holds all but the last
// 600 tokens: that is 3 s, and those that come meanwhile are taken to wait for it.
func (r *prewarmRig) busy() *client {
	r.t.Helper()
	r.engines[0].store(r.ids("hangs " + words(3000)))
	n := len(r.engines[0].all())
	c := r.begins("busy", completion("hangs "+words(3600), `"stream":true`))
	eventually(r.t.(*testing.T), 20*time.Second, "it hangs", func() bool { return len(r.engines[0].all()) > n })
	return c
}

// asks sends so many requests with the system prompt, each of which has another end, and
// returns who has answered and what was predicted to be cached there.
func (r *prewarmRig) asks(n int) (answers []string) {
	r.t.Helper()
	for i := range n {
		c := r.begins(fmt.Sprint("q", i), completion(system+fmt.Sprint(i, " is the question")))
		resp, _ := c.answer()
		answers = append(answers, fmt.Sprint(resp.StatusCode, " ", resp.Header.Get("X-Inferrail-Replica"), " ", resp.Header.Get(cachedTokens)))
		c.Close()
	}
	return answers
}

// ahead is how many tokens an engine was asked for ahead, each time.
func (e *piecesEngine) ahead() (tokens []int) {
	for _, a := range e.all() {
		if a.ahead {
			tokens = append(tokens, len(a.ids))
		}
	}
	return tokens
}

// firstAhead is the first of these requests.
func (e *piecesEngine) firstAhead() (first askedOf) {
	all := e.all()
	if i := slices.IndexFunc(all, func(a askedOf) bool { return a.ahead }); i >= 0 {
		first = all[i]
	}
	return first
}

// loses lets requests lose by what engine 1 lacks as much as it takes to compute it there. The
// client is one whose request keeps engine 0 busy.
func (r *prewarmRig) loses() *client {
	r.t.Helper()
	hangs := r.busy()
	for _, a := range r.asks(4) {
		if a != "200 e0 1300" {
			r.t.Errorf("answered by %s", a)
		}
	}
	return hangs
}

// outcomes are how many requests were computed ahead by what came of them.
func (r *prewarmRig) outcomes(outcome string) int {
	return int(counted(r.s.stats.prewarms, func(name, value string) bool { return name == "outcome" && value == outcome }))
}

// computes waits until engine 1 was asked for these numbers of tokens, in this order, and is done
// with them.
func (r *prewarmRig) computes(tokens ...int) {
	r.t.Helper()
	eventually(r.t.(*testing.T), 20*time.Second, fmt.Sprintf("%v tokens are computed ahead", tokens), func() bool {
		return slices.Equal(r.engines[1].ahead(), tokens) && !r.replicas[1].ahead.busy.Load()
	})
}

// over ends what hangs, and expects that nothing is left of anything.
func (r *prewarmRig) over() {
	r.t.Helper()
	r.unblock()
	eventually(r.t.(*testing.T), 20*time.Second, "nothing is computed ahead", func() bool {
		return !slices.ContainsFunc(r.replicas, func(replica *Replica) bool { return replica.ahead.busy.Load() })
	})
	r.settled()
}

// state is how replica 1 stands to what is computed ahead.
func (r *prewarmRig) state() string {
	return r.s.Prewarm(r.s.fleet.Load().Models["m"], time.Now()).Replicas[1].State
}

// aWhile is long enough for several rounds of the prewarmer.
const aWhile = 4 * prewarmEvery

// Requests with one system prompt go where it is cached, though that engine is busy and
// another one idles. When they have lost as much by that as it takes to compute the prompt
// there, it is, once; and the next request goes there and finds it.
func TestPrewarm(t *testing.T) {
	r := newPrewarmRig(t, 2)
	r.replicas[1].SetKey("secret")
	r.replicas[1].SetRank(3)
	inFlight := -1
	r.engines[1].does(func(c *engineSide, a *askedOf) bool {
		if a.ahead && len(a.ids) == pieceTokens {
			inFlight = r.replicas[1].InFlight()
		}
		return false
	})
	var before PrewarmReport
	r.replicas[1].ahead.until.Store(math.MaxInt64) // until we have looked
	hangs := r.loses()
	before = r.s.Prewarm(r.s.fleet.Load().Models["m"], time.Now())
	r.replicas[1].ahead.until.Store(0)
	r.computes(512, 1300)
	if a := r.asks(1); a[0] != "200 e1 1300" {
		t.Errorf("then by %s", a)
	}
	time.Sleep(aWhile)
	if r.s.fleet.Load().Models["m"].State.prefixes.Pending(time.Now()) {
		t.Error("the prewarmer goes on to look for something to do")
	}
	after := r.s.Prewarm(r.s.fleet.Load().Models["m"], time.Now())
	r.unblock()
	hangs.answer()
	r.over()

	if a, b := r.engines[0].ahead(), r.engines[1].ahead(); a != nil || len(b) != 2 {
		t.Errorf("the engines were asked for %v and %v", a, b)
	}
	if inFlight != 1 {
		t.Errorf("meanwhile %d were in flight", inFlight)
	}
	a := r.engines[1].firstAhead()
	ids := r.ids(system)
	want := `{"model":"m","max_tokens":1,"temperature":0,"stream":false,"prompt":[` + strings.Trim(strings.ReplaceAll(fmt.Sprint(ids[:512]), " ", ","), "[]") + "]}"
	h := a.header
	if a.path != "/v1/completions" || a.body != want || h.Get("Content-Type") != "application/json" || h.Get("Authorization") != "Bearer secret" ||
		h.Get("X-Data-Parallel-Rank") != "3" {
		t.Errorf("it was asked %s %v %.100s", a.path, h, a.body)
	}
	if n := r.outcomes(prewarmComputed); n != 2 {
		t.Errorf("%d are counted", n)
	}
	if n := counted(r.s.stats.prewarmed, func(name, value string) bool { return value == "m" }); n != 1300 {
		t.Errorf("%v tokens are counted", n)
	}
	if len(before.Prefixes) == 0 || before.Prefixes[0].Tokens != 1300 || before.Prefixes[0].Asked < 3 || before.Replicas[1].State != "pauses" {
		t.Fatalf("before: %+v", before)
	}
	if l := before.Prefixes[0].Replicas; l[0].LostMS != 0 || l[0].HeldTokens != 1300 || l[0].ComputeMS != 0 || l[1].LostMS < 6500 || l[1].HeldTokens != 0 || l[1].ComputeMS < 6500 {
		t.Errorf("before: %+v", l)
	}
	r.index.SetState(1, index.Repairing, "")
	if x := r.s.Prewarm(r.s.fleet.Load().Models["m"], time.Now()).Replicas; x[0].Why != "" || x[1].State != "left out" || !strings.Contains(x[1].Why, "not known exactly") {
		t.Errorf("with a cache that is not known: %+v", x)
	}
	r.index.SetState(1, index.Exact, "")
	r.change(func(m *Model) { m.Prewarming = policy.Prewarming{} })
	if x := r.s.Prewarm(r.s.fleet.Load().Models["m"], time.Now()).Replicas[0]; x.State != "left out" || !strings.Contains(x.Why, "off") {
		t.Errorf("where it is off: %+v", x)
	}
	i := slices.IndexFunc(after.Prefixes, func(p PrewarmPrefix) bool { return p.Key == before.Prefixes[0].Key })
	if l := after.Prefixes[i].Replicas[1]; l.LostMS != 0 || l.HeldTokens != 1300 || after.Replicas[1].State != "ready" {
		t.Errorf("after: %+v", after)
	}
}

// Nothing is asked of a replica that has something else to do or of which anything is amiss,
// nor while requests wait; and when that is over it is. What requests have lost is the
// model's, and outlives what is published of it.
func TestPrewarmWaits(t *testing.T) {
	swap := func(f func(r *prewarmRig, on bool)) func(r *prewarmRig) func() {
		return func(r *prewarmRig) func() {
			f(r, true)
			return func() { f(r, false) }
		}
	}
	count := func(on bool) int64 {
		if on {
			return 1
		}
		return -1
	}
	tests := []struct {
		name string
		// amiss makes it so, and returns what ends it.
		amiss func(r *prewarmRig) func()
	}{
		{"it has a prompt to prefill", func(r *prewarmRig) func() {
			r.engines[1].store(r.ids("elsewhere " + words(3000)))
			over := make(chan struct{})
			r.engines[1].does(func(c *engineSide, a *askedOf) bool {
				if !a.ahead {
					<-over
				}
				return false
			})
			c := r.begins("elsewhere", completion("elsewhere "+words(3600), `"stream":true`))
			eventually(r.t.(*testing.T), 20*time.Second, "it is there", func() bool { return r.replicas[1].InFlight() == 1 })
			return func() { close(over); c.answer() }
		}},
		{"it has a full cache", func(r *prewarmRig) func() {
			r.replicas[1].SetLoad(&policy.Load{KV: 0.95, Until: time.Now().Add(time.Hour)})
			return func() { r.replicas[1].SetLoad(nil) }
		}},
		{"its events were lost", swap(func(r *prewarmRig, on bool) {
			if r.index.SetState(1, index.Exact, ""); on {
				r.index.SetState(1, index.Repairing, "")
			}
		})},
		{"it has failed", swap(func(r *prewarmRig, on bool) { r.replicas[1].failures.Add(count(on)) })},
		{"it warms up", func(r *prewarmRig) func() {
			r.replicas[1].SlowStart(time.Now(), time.Hour)
			return func() { r.replicas[1].SlowStart(time.Now().Add(-time.Hour), time.Second) }
		}},
		{"it takes a number of requests and has no line", swap(func(r *prewarmRig, on bool) {
			if r.replicas[1].SetBounds(0, 0); on {
				r.replicas[1].SetBounds(9, 0)
			}
		})},
		{"it has as many as it may", swap(func(r *prewarmRig, on bool) {
			r.replicas[1].SetBounds(1, 1)
			if g := &r.replicas[1].gate; on {
				g.enterAlone(nil)
			} else {
				g.leaveAlone()
			}
		})},
		{"its engine refuses pieces", swap(func(r *prewarmRig, on bool) { r.replicas[1].takesWhole.Store(on) })},
		{"its engine makes chats of all", swap(func(r *prewarmRig, on bool) { r.replicas[1].SetAllChats(on) })},
		{"it has left", swap(func(r *prewarmRig, on bool) {
			r.change(func(m *Model) {
				if m.Replicas = r.replicas; on {
					m.Replicas = r.replicas[:1]
				}
			})
		})},
		{"the model is not prewarmed", swap(func(r *prewarmRig, on bool) {
			r.change(func(m *Model) {
				if m.Prewarming.Length = 1e-6; on {
					m.Prewarming.Length = 0
				}
			})
		})},
		{"a request waits in the room", swap(func(r *prewarmRig, on bool) { r.s.fleet.Load().Models["m"].State.room.waiting.Add(count(on)) })},
		{"a request is held back", swap(func(r *prewarmRig, on bool) { r.s.fleet.Load().Models["m"].State.held.waiting.Add(count(on)) })},
		{"a request is parked", func(r *prewarmRig) func() {
			c := &conn{s: r.s}
			r.replicas[0].parked.enter(c)
			return func() { r.replicas[0].parked.leave(c) }
		}},
		{"bodies take all memory", swap(func(r *prewarmRig, on bool) { r.s.buffered.Add(count(on) * (2<<30 - 1000)) })},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := newPrewarmRig(t, 2)
			r.replicas[1].ahead.until.Store(math.MaxInt64)
			r.loses()
			end := tt.amiss(r)
			r.replicas[1].ahead.until.Store(0)
			time.Sleep(aWhile)
			if n := r.engines[1].ahead(); n != nil {
				t.Errorf("it was asked for %v", n)
			}
			end()
			if strings.HasPrefix(tt.name, "it has a prompt") {
				r.over()
				return // who was foretold to take so long is learned to be fast: nothing may be due any more
			}
			r.computes(512, 1300)
			r.over()
		})
	}
}

// Nothing is asked for where nothing is to be prewarmed, where prompts are none that others
// may find, and of what one request alone has lost by.
func TestPrewarmOfNothing(t *testing.T) {
	quiet := func(t *testing.T, prepare func(r *prewarmRig), ask func(r *prewarmRig)) {
		t.Helper()
		r := newPrewarmRig(t, 2)
		prepare(r)
		r.busy()
		ask(r)
		time.Sleep(aWhile)
		if a, b := r.engines[0].ahead(), r.engines[1].ahead(); a != nil || b != nil {
			t.Errorf("the engines were asked for %v and %v", a, b)
		}
		r.over()
	}
	nothing, four := func(*prewarmRig) {}, func(r *prewarmRig) { r.asks(4) }
	each := func(n int, members ...string) func(r *prewarmRig) {
		return func(r *prewarmRig) {
			for i := range n {
				c := r.begins("x", completion(system+fmt.Sprint(i, " is the question"), members...))
				c.answer()
				c.Close()
			}
		}
	}
	t.Run("off", func(t *testing.T) {
		quiet(t, func(r *prewarmRig) { r.change(func(m *Model) { m.Prewarming = policy.Prewarming{} }) }, four)
	})
	t.Run("no state", func(t *testing.T) {
		quiet(t, func(r *prewarmRig) { r.change(func(m *Model) { m.State = nil }) }, func(r *prewarmRig) {
			r.asks(4)
			r.change(func(m *Model) { m.State = &ModelState{} })
		})
	})
	t.Run("one request", func(t *testing.T) { quiet(t, func(r *prewarmRig) { r.known(time.Millisecond) }, each(1)) })
	t.Run("scored", func(t *testing.T) { quiet(t, nothing, each(4, `"prompt_logprobs":1`)) })
	t.Run("salted", func(t *testing.T) {
		quiet(t, nothing, func(r *prewarmRig) {
			each(4, `"cache_salt":"s"`)(r)
			if n := len(r.s.Prewarm(r.s.fleet.Load().Models["m"], time.Now()).Prefixes); n > 1 {
				t.Errorf("%d prefixes are remembered, not only that of what hangs", n)
			}
		})
	})
	t.Run("cached thereabouts", func(t *testing.T) {
		quiet(t, func(r *prewarmRig) {
			r.index.SetState(0, index.Repairing, "")
		}, four)
	})
}

// An engine that does not do what it is asked for is asked again when that may help, and is not
// blamed: its clients' requests go there as ever.
func TestPrewarmFails(t *testing.T) {
	tests := []struct {
		name, answer   string // and then the connection is closed
		outcome, state string
	}{
		{"a key is missing", status(401, "no"), prewarmRefused, "refuses"},
		{"a key is wrong", status(403, "no"), prewarmRefused, "refuses"},
		{"it is no such path", status(404, "no"), prewarmRefused, "refuses"},
		{"it was too slow to send", status(408, "no"), prewarmUnavailable, "pauses"},
		{"too many requests", status(429, "no"), prewarmUnavailable, "pauses"},
		{"it is broken", status(500, "no"), prewarmUnavailable, "pauses"},
		{"it is elsewhere", status(302, "no"), prewarmUnavailable, "pauses"},
		{"it closes", "", prewarmFailed, "pauses"},
		{"it talks nonsense", "xyzzy\r\n\r\n", prewarmFailed, "pauses"},
		{"it talks and talks", fixed(strings.Repeat("a", maxEngineHead+2*mostPieceAnswer)), prewarmFailed, "pauses"},
		{"its head has no end", "HTTP/1.1 200 OK\r\nX: " + strings.Repeat("a", maxEngineHead+2*mostPieceAnswer), prewarmFailed, "pauses"},
		{"its answer breaks off", "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", prewarmFailed, "pauses"},
		{"it is never there yet", strings.Repeat("HTTP/1.1 102 Wait\r\n\r\n", 20), prewarmFailed, "pauses"},
		{"it hangs", "hangs", prewarmTimeout, "pauses"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := newPrewarmRig(t, 2)
			var said lockedBuffer
			r.s.log = slog.New(slog.NewTextHandler(&said, &slog.HandlerOptions{Level: slog.LevelDebug}))
			if tt.answer == "hangs" {
				r.s.prewarmer.within, r.s.prewarmer.longer = 50*time.Millisecond, 0
			}
			r.engines[1].does(func(c *engineSide, a *askedOf) bool {
				switch {
				case !a.ahead:
					return false
				case tt.answer == "hangs":
					c.waitClosed()
				default:
					io.WriteString(c, tt.answer)
				}
				c.Close()
				return true
			})
			r.loses()
			eventually(t, 20*time.Second, "it has failed", func() bool { return r.outcomes(tt.outcome) == 1 && !r.replicas[1].ahead.busy.Load() })
			time.Sleep(aWhile)
			if n := len(r.engines[1].ahead()); n != 1 || r.state() != tt.state || r.replicas[1].Failures() != 0 {
				t.Errorf("it was asked %d times, %s, and has %d failures", n, r.state(), r.replicas[1].Failures())
			}
			// One that has begun to answer may have computed it: its events tell, or time.
			begun, want := strings.HasPrefix(tt.answer, "HTTP/1.1 200 OK\r\nContent-Length"), 0
			if begun = begun || strings.HasPrefix(tt.answer, "HTTP/1.1 200 OK\r\nContent-Type"); begun {
				want = 512 / 4
			}
			if n := r.holds(1, system); n != want {
				t.Errorf("it is taken to hold %d blocks, want %d", n, want)
			}
			if n := strings.Count(said.String(), "level=WARN"); n != strings.Count(tt.state, "refuses") {
				t.Errorf("%d warnings: %s", n, &said)
			}
			if strings.Contains(said.String(), "xyzzy") {
				t.Errorf("the log has what the engine has said: %s", &said)
			}

			r.engines[1].does(func(c *engineSide, a *askedOf) bool { return false })
			if tt.state == "refuses" {
				r.replicas[1].SetKey("") // the one that it has
				time.Sleep(aWhile)
				if n := len(r.engines[1].ahead()); n != 1 {
					t.Errorf("it was asked %d times", n)
				}
				r.replicas[1].SetKey("another")
			} else {
				r.replicas[1].ahead.until.Store(0) // it has waited for long enough
			}
			if begun {
				r.computes(512, 1300)
			} else {
				r.computes(512, 512, 1300)
			}
			r.over()
		})
	}

	t.Run("nobody listens", func(t *testing.T) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
		r := newPrewarmRig(t, 2)
		r.replicas[1].Addr = l.Addr().String() // which only what is asked ahead goes by
		r.loses()
		eventually(t, 20*time.Second, "it has failed", func() bool { return r.outcomes(prewarmFailed) == 1 })
		if r.state() != "pauses" || r.replicas[1].Failures() != 0 {
			t.Errorf("it %s, and has %d failures", r.state(), r.replicas[1].Failures())
		}
		r.over()
	})
	t.Run("what it has computed is gone", func(t *testing.T) {
		r := newPrewarmRig(t, 2)
		r.engines[1].does(func(c *engineSide, a *askedOf) bool {
			if a.ahead {
				text := r.engines[1].usage(a)
				r.index.Apply(1, []kvevent.Event{{Kind: kvevent.Cleared}}, time.Now())
				io.WriteString(c, fixed(text))
			}
			return a.ahead
		})
		r.loses()
		r.computes(512)
		time.Sleep(aWhile)
		r.computes(512)
		for _, lost := range r.s.fleet.Load().Models["m"].State.prefixes.All(time.Now()) {
			if lost.IDs != nil && len(lost.At) > 0 {
				t.Errorf("what has paid for what is gone counts again: %+v", lost.At)
			}
		}
		r.over()
	})
}

// What is under way when its replica leaves, its model goes or is not prewarmed any more, or
// the agent shuts down, ends then.
func TestPrewarmEnds(t *testing.T) {
	publish := func(r *prewarmRig, f func(m *Model)) func() {
		m := r.s.fleet.Load().Models["m"]
		r.change(f)
		return func() { r.change(func(now *Model) { *now = *m }) }
	}
	tests := []struct {
		name string
		end  func(r *prewarmRig) (back func())
	}{
		{"the replica leaves", func(r *prewarmRig) func() {
			return publish(r, func(m *Model) { m.Replicas = r.replicas[:1] })
		}},
		{"it is off", func(r *prewarmRig) func() {
			return publish(r, func(m *Model) { m.Prewarming = policy.Prewarming{} })
		}},
		{"the model goes", func(r *prewarmRig) func() {
			f := r.s.fleet.Load()
			r.s.SetFleet(&Fleet{})
			return func() { r.s.SetFleet(f) }
		}},
	}
	// hang lets engine 1 hang when it is asked ahead, and returns what is closed when it is
	// left.
	hang := func(r *prewarmRig) (left chan struct{}) {
		left = make(chan struct{})
		r.engines[1].does(func(c *engineSide, a *askedOf) bool {
			if a.ahead {
				c.waitClosed()
				c.Close()
				close(left)
			}
			return a.ahead
		})
		r.loses()
		eventually(r.t.(*testing.T), 20*time.Second, "it hangs", func() bool { return len(r.engines[1].ahead()) == 1 })
		time.Sleep(aWhile)
		if n := len(r.engines[1].ahead()); n != 1 || r.replicas[1].InFlight() != 1 || r.state() != "computes" {
			r.t.Errorf("asked %d times, %d are in flight, it %s", n, r.replicas[1].InFlight(), r.state())
		}
		return left
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := newPrewarmRig(t, 2)
			left := hang(r)
			back := tt.end(r)
			<-left
			eventually(t, 20*time.Second, "it has ended", func() bool { return r.replicas[1].InFlight() == 0 && r.outcomes(prewarmStopped) == 1 })
			r.engines[1].does(func(c *engineSide, a *askedOf) bool { return false })
			back()
			r.computes(512, 512, 1300)
			r.over()
		})
	}
	t.Run("the agent shuts down", func(t *testing.T) {
		r := newPrewarmRig(t, 2)
		left := hang(r)
		down := make(chan error, 1)
		go func() {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			down <- r.s.Shutdown(ctx)
		}()
		<-left // though a client's request goes on
		r.unblock()
		if err := <-down; err != nil {
			t.Error(err)
		}
		r.settled()
	})
}

// What many prompts of an adapter begin with is not what those of its base do, and is asked for
// by its name.
func TestPrewarmAdapter(t *testing.T) {
	r := newPrewarmRig(t, 2)
	for _, e := range r.engines {
		r.index.Apply(e.slot, []kvevent.Event{{Kind: kvevent.Cleared}}, time.Now())
		e.mu.Lock()
		e.adapter, e.holds = "a", map[uint64]bool{}
		e.mu.Unlock()
	}
	m := *r.s.fleet.Load().Listed[0]
	lora := m
	lora.Name, lora.Adapter, lora.Parent, lora.State = "lora", "a", "m", &ModelState{}
	r.s.SetFleet(&Fleet{Models: map[string]*Model{"m": &m, "lora": &lora}, Listed: []*Model{&lora, &m}})
	r.engines[0].store(r.ids(system))
	r.engines[0].store(r.ids("hangs " + words(3000)))
	r.begins("busy", completion("hangs "+words(3600), `"model":"lora"`, `"stream":true`))
	eventually(t, 20*time.Second, "it hangs", func() bool { return len(r.engines[0].all()) == 1 })
	for i := range 4 {
		r.begins("q", completion(system+fmt.Sprint(i, " is the question"), `"model":"lora"`)).answer()
	}
	r.computes(512, 1300)
	if body := r.engines[1].firstAhead().body; !strings.HasPrefix(body, `{"model":"lora",`) {
		t.Errorf("it was asked %.100s", body)
	}
	if n := len(m.State.prefixes.All(time.Now())); n != 0 {
		t.Errorf("the base has %d prefixes", n)
	}
	if n := counted(r.s.stats.prewarmed, func(name, value string) bool { return value == "lora" }); n != 1300 {
		t.Errorf("%v tokens are counted", n)
	}
	r.over()
}

// TestPrewarmUnderRaces: engines that misbehave in every way, clients that leave, replicas that
// come and go. At the end nothing is left of what was computed ahead.
func TestPrewarmUnderRaces(t *testing.T) {
	r := newPrewarmRig(t, 3)
	r.unblock()
	r.s.prewarmer.within, r.s.prewarmer.longer = 60*time.Millisecond, 0
	for i, replica := range r.replicas {
		r.engines[i].each.Store(0)
		replica.standing.Calibration.SetPrior(policy.Speed{A: 1e-5, D: 1e-7})
	}
	for _, e := range r.engines {
		e.does(func(c *engineSide, a *askedOf) bool {
			if time.Sleep(time.Duration(rand.IntN(3000)) * time.Microsecond); !a.ahead {
				e.store(r.ids(strings.TrimSuffix(strings.TrimPrefix(a.body, `{"prompt":"`), `"}`)))
				return false
			}
			switch rand.IntN(8) {
			case 0:
				c.Close()
			case 1:
				io.WriteString(c, status(503, "busy"))
			case 2:
				io.WriteString(c, status(400+rand.IntN(30), "no"))
			case 3:
				c.waitClosedWithin(200 * time.Millisecond)
				c.Close()
			case 4:
				io.WriteString(c, "HTTP/1.1 100 Continue\r\n\r\n"+fixed(e.usage(a)))
			default:
				return false
			}
			return true
		})
	}
	all := r.replicas
	over := make(chan struct{})
	var watched sync.WaitGroup
	watched.Go(func() {
		for {
			select {
			case <-over:
				return
			case <-time.After(10 * time.Millisecond):
			}
			n := 2 + rand.IntN(2)
			r.change(func(m *Model) {
				m.Replicas, m.Prewarming.Length = all[:n], 1e-6
				if rand.IntN(10) == 0 {
					m.Prewarming.Length = 0
				}
			})
			for _, gone := range all[n:] {
				gone.Evacuate()
			}
			for _, replica := range all {
				replica.ahead.refuses.Store(false)
				replica.ahead.until.Store(0)
			}
			r.s.Prewarm(r.s.fleet.Load().Models["m"], time.Now())
		}
	})
	var clients sync.WaitGroup
	for i := range 12 {
		clients.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(i), 3))
			for k := range 80 {
				c := r.begins(fmt.Sprint(i, "-", k), completion(fmt.Sprint("w", k, " ")+words(2000)+fmt.Sprint(i, " ")+words(rng.IntN(600))))
				if rng.IntN(8) > 0 {
					c.SetReadDeadline(time.Now().Add(60 * time.Second))
					if resp, err := http.ReadResponse(c.br, nil); err != nil {
						t.Errorf("no answer: %v", err)
					} else {
						io.Copy(io.Discard, resp.Body)
					}
				}
				c.Close()
			}
		})
	}
	clients.Wait()
	time.Sleep(aWhile)
	close(over)
	watched.Wait()
	r.over()
	said := map[string]int{}
	for _, outcome := range prewarmOutcomes {
		said[outcome] = r.outcomes(outcome)
	}
	t.Logf("%v", said)
	if said[prewarmComputed] == 0 || said[prewarmComputed] == len(r.engines[0].ahead())+len(r.engines[1].ahead())+len(r.engines[2].ahead()) {
		t.Errorf("what came of it: %v", said)
	}
}
