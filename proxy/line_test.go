package proxy

import (
	"io"
	"testing"
	"time"
)

// lined is a rig of two replicas, one place and a line of ten at each, chosen
// in their order. Each engine holds its answers back until release.
func lined(t *testing.T) (r *rig, release [2]chan struct{}) {
	var urls []string
	for i := range release {
		release[i] = make(chan struct{}, 10)
		e := newRawEngine(t, func(c *engineSide) {
			for c.request() != nil {
				if _, ok := <-release[i]; !ok {
					return
				}
				io.WriteString(c, fixed("ok"))
			}
		})
		urls = append(urls, e.url())
	}
	r = newRig(t, Limits{}, nil, urls...).ordered()
	t.Cleanup(func() {
		for i := range release {
			close(release[i])
		}
	})
	for _, replica := range r.replicas {
		replica.SetBounds(1, 10)
	}
	return r, release
}

// publish makes the model's replicas these.
func (r *rig) publish(replicas ...*Replica) {
	m := *r.s.fleet.Load().Models["m"]
	m.Replicas = replicas
	r.s.SetFleet(&Fleet{Models: map[string]*Model{"m": &m, "alias": &m}, Listed: []*Model{&m}})
}

// ask sends one request, and waits until the replicas have so many inside and
// in line.
func (r *rig) ask(want ...int) *client {
	r.t.Helper()
	c := r.dial()
	c.send(post(hello))
	r.places(want...)
	return c
}

func (r *rig) places(want ...int) {
	r.t.Helper()
	t := r.t.(*testing.T)
	eventually(t, 5*time.Second, "inside and in line as wanted", func() bool {
		for i, replica := range r.replicas {
			if replica.InFlight() != want[2*i] || replica.Pending() != want[2*i+1] {
				return false
			}
		}
		return true
	})
}

// TestLine: a request does not stay in line where it has no business when there
// is a better place for it.
func TestLine(t *testing.T) {
	full := func(t *testing.T) (*rig, [2]chan struct{}, []*client) {
		r, release := lined(t)
		a := r.ask(1, 0, 0, 0)
		b := r.ask(1, 0, 1, 0)
		c := r.ask(1, 1, 1, 0)
		return r, release, []*client{a, b, c}
	}
	answered := func(t *testing.T, clients ...*client) {
		t.Helper()
		for i, c := range clients {
			if resp, body := c.answer(); resp.StatusCode != 200 || body != "ok" {
				t.Errorf("client %d: %d %q", i, resp.StatusCode, body)
			}
		}
	}
	t.Run("the replica fails its health check", func(t *testing.T) {
		r, release, clients := full(t)
		r.publish(r.replicas[1])
		r.replicas[0].Evacuate()
		// The one that has its place there moves as well.
		r.places(0, 0, 1, 2)
		for range 3 {
			release[1] <- struct{}{}
		}
		answered(t, clients...)
	})
	t.Run("the replica leaves the fleet", func(t *testing.T) {
		r, release, clients := full(t)
		r.publish(r.replicas[1])
		r.places(1, 0, 1, 1) // its place it keeps
		release[0] <- struct{}{}
		release[1] <- struct{}{}
		release[1] <- struct{}{}
		answered(t, clients...)
	})
	t.Run("the replica leaves, and another comes only later", func(t *testing.T) {
		r, release := lined(t)
		r.publish(r.replicas[0])
		a := r.ask(1, 0, 0, 0)
		b := r.ask(1, 1, 0, 0)
		r.publish()
		r.publish(r.replicas[1])
		r.places(1, 0, 1, 0)
		release[0] <- struct{}{}
		release[1] <- struct{}{}
		answered(t, a, b)
	})
	t.Run("another replica joins", func(t *testing.T) {
		r, release := lined(t)
		r.publish(r.replicas[0])
		a := r.ask(1, 0, 0, 0)
		b := r.ask(1, 1, 0, 0)
		r.publish(r.replicas...)
		r.places(1, 0, 1, 0)
		release[0] <- struct{}{}
		release[1] <- struct{}{}
		answered(t, a, b)
	})
	t.Run("a place becomes free elsewhere", func(t *testing.T) {
		r, release, clients := full(t)
		release[1] <- struct{}{}
		answered(t, clients[1])
		r.places(1, 0, 1, 0)
		release[0] <- struct{}{}
		release[1] <- struct{}{}
		answered(t, clients[0], clients[2])
	})
	t.Run("two places become free at once", func(t *testing.T) {
		r, release := lined(t)
		for _, replica := range r.replicas {
			replica.SetBounds(2, 10)
		}
		r.ask(1, 0, 0, 0)
		r.ask(2, 0, 0, 0)
		b := []*client{r.ask(2, 0, 1, 0), r.ask(2, 0, 2, 0)}
		r.ask(2, 1, 2, 0)
		r.ask(2, 2, 2, 0)
		release[1] <- struct{}{}
		release[1] <- struct{}{}
		answered(t, b...)
		r.places(2, 0, 2, 0)
	})
}

// TestLastAttemptStays: a request that may not be tried again waits on when its
// replica fails its health check: it has nowhere to go.
func TestLastAttemptStays(t *testing.T) {
	r, release := lined(t)
	l := *r.s.limits.Load()
	l.MaxAttempts = 1
	r.s.SetLimits(l)
	c := r.ask(1, 0, 0, 0)
	r.publish(r.replicas[1])
	r.replicas[0].Evacuate()
	release[0] <- struct{}{}
	if resp, body := c.answer(); resp.StatusCode != 200 || body != "ok" {
		t.Errorf("got %d %q", resp.StatusCode, body)
	}
}
