package proxy

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

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

// Requests with one system prompt go where it is cached, though that engine is busy and
// another one idles. When they have lost as much by that as it takes to compute the prompt
// there, it is, once; and the next request goes there and finds it.
func TestPrewarm(t *testing.T) {
	r := newPrewarmRig(t, 2)
	hangs := r.busy()
	for _, a := range r.asks(4) {
		if a != "200 e0 1300" {
			t.Errorf("answered by %s", a)
		}
	}
	eventually(t, 20*time.Second, "the system prompt is computed ahead", func() bool {
		return slices.Equal(r.engines[1].ahead(), []int{512, 1024})
	})
	eventually(t, 20*time.Second, "it is over", func() bool { return r.replicas[1].InFlight() == 0 })
	if a := r.asks(1); a[0] != "200 e1 1024" {
		t.Errorf("then by %s", a)
	}
	r.unblock()
	hangs.answer()
	r.settled()
	if n := r.engines[0].ahead(); n != nil {
		t.Errorf("engine 0 was asked for %v", n)
	}
}
