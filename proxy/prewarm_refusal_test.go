package proxy

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/inferrail/inferrail/policy"
)

// A prefix that an engine refuses, as it is too long there, is not asked for again, but others
// are.
func TestPrewarmRefusesOnePrefix(t *testing.T) {
	for _, code := range []int{400, 413, 422} {
		t.Run(fmt.Sprint(code), func(t *testing.T) {
			r := newPrewarmRig(t, 2)
			bad := "bad " + words(1300)
			r.engines[0].store(r.ids(bad))
			r.engines[1].does(func(c *engineSide, a *askedOf) bool {
				if a.ahead && a.ids[0] == r.ids(bad)[0] {
					io.WriteString(c, status(code, "no"))
					c.Close()
					return true
				}
				return false
			})
			r.busy()
			for i := range 4 {
				r.begins("bad", completion(bad+fmt.Sprint(i, " is the question"))).answer()
			}
			eventually(t, 20*time.Second, "it is asked", func() bool { return len(r.engines[1].ahead()) == 1 && !r.replicas[1].ahead.busy.Load() })
			if s := r.state(); s != "pauses" {
				t.Errorf("it %s", s)
			}
			r.computesOthers(t)
		})
	}
}

// computesOthers asks for what begins otherwise than what the engine has refused first, which
// it is then let compute.
func (r *prewarmRig) computesOthers(t *testing.T) {
	t.Helper()
	r.asks(4)
	r.replicas[1].ahead.until.Store(0)
	time.Sleep(aWhile)
	if n := r.engines[1].ahead(); !slices.Equal(n, []int{512, 512, 1300}) {
		t.Errorf("it was asked for %v, and %s", n, r.state())
	}
	r.over()
}

// An engine that does not know an adapter goes on to compute what prompts of its base begin
// with.
func TestPrewarmWithoutAdapter(t *testing.T) {
	r := newPrewarmRig(t, 2)
	m := *r.s.fleet.Load().Listed[0]
	lora := m
	lora.Name, lora.Parent, lora.State = "lora", "m", &ModelState{}
	r.s.SetFleet(&Fleet{Models: map[string]*Model{"m": &m, "lora": &lora}, Listed: []*Model{&lora, &m}})
	r.engines[1].does(func(c *engineSide, a *askedOf) bool {
		if a.ahead && strings.Contains(a.body, `"lora"`) {
			io.WriteString(c, status(404, "no"))
			c.Close()
			return true
		}
		return false
	})
	r.busy()
	for i := range 4 {
		r.begins("q", completion(system+fmt.Sprint("lora ", i), `"model":"lora"`)).answer()
	}
	eventually(t, 20*time.Second, "it is asked", func() bool { return len(r.engines[1].ahead()) == 1 && !r.replicas[1].ahead.busy.Load() })
	r.computesOthers(t)
}

// An engine that refuses whatever it is asked for is not asked for ever.
func TestPrewarmRefusesAll(t *testing.T) {
	r := newPrewarmRig(t, 2)
	r.engines[1].does(func(c *engineSide, a *askedOf) bool {
		if a.ahead {
			io.WriteString(c, status(400, "no"))
			c.Close()
		}
		return a.ahead
	})
	r.busy()
	for i := range prewarmRefusals {
		if s := r.state(); s == "refuses" {
			t.Errorf("after %d it refuses", i)
		}
		prompt := fmt.Sprint("all", i, " ") + words(1300)
		r.engines[0].store(r.ids(prompt))
		r.replicas[1].ahead.until.Store(0)
		for k := range 4 {
			r.begins("q", completion(prompt+fmt.Sprint(k, " is the question"))).answer()
		}
		eventually(t, 20*time.Second, "it is asked", func() bool { return r.outcomes(prewarmRefused) == i+1 && !r.replicas[1].ahead.busy.Load() })
	}
	if s := r.state(); s != "refuses" {
		t.Errorf("it %s", s)
	}
	r.over()
}

// Who would wait for a place, or be refused, because something is computed ahead does not:
// that ends then.
func TestPrewarmGivesWay(t *testing.T) {
	r := newPrewarmRig(t, 2)
	left := make(chan struct{})
	r.engines[1].does(func(c *engineSide, a *askedOf) bool {
		if a.ahead {
			c.waitClosed()
			close(left)
			c.Close()
		}
		return a.ahead
	})
	r.replicas[1].SetBounds(1, 1)
	r.loses()
	eventually(t, 20*time.Second, "it hangs", func() bool { return len(r.engines[1].ahead()) == 1 })
	r.replicas[1].ahead.until.Store(math.MaxInt64) // and is not asked again
	r.replicas[0].SetBounds(1, 1)                  // it is full
	for i := range 3 {
		c := r.begins(fmt.Sprint("q", i), completion("short"))
		if resp, _ := c.answer(); resp.StatusCode != 200 || resp.Header.Get("X-Inferrail-Replica") != "e1" {
			t.Errorf("request %d: %d from %s", i, resp.StatusCode, resp.Header.Get("X-Inferrail-Replica"))
		}
	}
	<-left
	if n := r.outcomes(prewarmStopped); n != 1 || r.replicas[1].Failures() != 0 {
		t.Errorf("%d were stopped, and it has %d failures", n, r.replicas[1].Failures())
	}
	r.over()
}

// Who grants less time than a piece takes is not refused because of one.
func TestPrewarmGivesWayToBudget(t *testing.T) {
	for _, mode := range []policy.AdmissionMode{policy.RankOnly, policy.Absolute} {
		r := newPrewarmRig(t, 2)
		r.change(func(m *Model) { m.Admission = policy.NewAdmission(policy.AdmissionRules{Mode: mode}) })
		r.engines[1].does(func(c *engineSide, a *askedOf) bool {
			if a.ahead {
				c.waitClosed()
				c.Close()
			}
			return a.ahead
		})
		r.loses()
		eventually(t, 20*time.Second, "it hangs", func() bool { return len(r.engines[1].ahead()) == 1 })
		r.replicas[1].ahead.until.Store(math.MaxInt64) // and is not asked again
		ask := func(budget int) string {
			c := r.begins("q", completion("short"), fmt.Sprintf("X-Inferrail-Budget-Ms: %d\r\n", budget))
			resp, _ := c.answer()
			return fmt.Sprint(resp.StatusCode, " ", resp.Header.Get("X-Inferrail-Replica"), " ", resp.Header.Get("X-Inferrail-Over-Budget"))
		}
		if mode == policy.Absolute {
			if a := ask(1); !strings.HasPrefix(a, "503") { // which is too little in any case
				t.Errorf("mode %v: %s", mode, a)
			}
			if n := r.outcomes(prewarmStopped); n != 0 {
				t.Errorf("mode %v: %d were stopped", mode, n)
			}
		}
		if a := ask(1000); a != "200 e1 false" {
			t.Errorf("mode %v: %s", mode, a)
		}
		eventually(t, 20*time.Second, "it has ended", func() bool { return r.outcomes(prewarmStopped) == 1 })
		r.over()
	}
}
