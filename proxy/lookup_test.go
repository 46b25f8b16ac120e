package proxy

import (
	"context"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// nameServer answers questions for an address of any name by 127.0.0.1, as long
// as it is not mute.
type nameServer struct {
	resolver *net.Resolver // which asks it
	mute     atomic.Bool
	asked    atomic.Int64
}

func newNameServer(t *testing.T) *nameServer {
	n := &nameServer{}
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		var b [512]byte
		for {
			k, from, err := pc.ReadFrom(b[:])
			if err != nil {
				return
			}
			var m dnsmessage.Message
			if m.Unpack(b[:k]) != nil || len(m.Questions) != 1 {
				continue
			}
			n.asked.Add(1)
			if n.mute.Load() {
				continue
			}
			q := m.Questions[0]
			m.Header.Response, m.Header.Authoritative = true, true
			m.Additionals = nil
			if q.Type == dnsmessage.TypeA {
				m.Answers = []dnsmessage.Resource{{
					Header: dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: q.Class, TTL: 1},
					Body:   &dnsmessage.AResource{A: [4]byte{127, 0, 0, 1}},
				}}
			}
			out, err := m.Pack()
			if err != nil {
				t.Error(err)
				return
			}
			pc.WriteTo(out, from)
		}
	}()
	n.resolver = &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		nc, err := new(net.Dialer).DialContext(ctx, "udp", pc.LocalAddr().String())
		if err == nil {
			// A look-up that is given up would go on for seconds.
			context.AfterFunc(ctx, func() { nc.Close() })
		}
		return nc, err
	}}
	t.Cleanup(func() {
		pc.Close()
		<-done
	})
	return n
}

// of has the names of the rig's replicas looked up by n.
func (n *nameServer) of(r *rig) *rig {
	for _, replica := range r.replicas {
		replica.addresses.mu.Lock() // seen by whoever looks a name up next
		replica.addresses.resolver = n.resolver
		replica.addresses.mu.Unlock()
	}
	return r
}

// named is the engine's URL with a name in it.
func (e *rawEngine) named() string {
	return strings.Replace(e.url(), "127.0.0.1", "engine.test", 1)
}

// age makes what is known of the replica's address old.
func (r *Replica) age() {
	r.addresses.mu.Lock()
	defer r.addresses.mu.Unlock()
	r.addresses.until = time.Now().Add(-time.Second)
}

// TestName: an engine is found by its name, whose address may change.
func TestName(t *testing.T) {
	names := newNameServer(t)
	e := newRawEngine(t, func(c *engineSide) {
		if c.request() != nil {
			io.WriteString(c, strings.Replace(fixed("ok"), "\r\n\r\n", "\r\nConnection: close\r\n\r\n", 1))
		}
	})
	r := names.of(newRig(t, Limits{ConnectTimeout: 10 * time.Second}, nil, e.named()))
	c := r.dial()
	ask := func() {
		t.Helper()
		c.send(post(hello))
		if resp, body := c.answer(); resp.StatusCode != 200 || body != "ok" {
			t.Fatalf("got %d %q", resp.StatusCode, body)
		}
	}
	ask()
	asked := names.asked.Load()
	ask()
	if names.asked.Load() != asked {
		t.Error("the name was looked up for every connection")
	}
	r.replicas[0].age()
	ask()
	eventually(t, 20*time.Second, "the name is looked up again", func() bool { return names.asked.Load() > asked })

	// A name server that does not answer keeps no request waiting.
	names.mute.Store(true)
	r.replicas[0].age()
	began := time.Now()
	for range 3 {
		ask()
	}
	if d := time.Since(began); d > 3*time.Second {
		t.Errorf("three requests took %v", d)
	}
}

// TestNameUnknown: while a name is looked up the client is watched, and a
// look-up that takes too long, or fails, is the engine's fault.
func TestNameUnknown(t *testing.T) {
	names := newNameServer(t)
	names.mute.Store(true)
	t.Run("the client leaves", func(t *testing.T) {
		r := names.of(newRig(t, Limits{ConnectTimeout: time.Minute}, nil, "http://engine.test:1"))
		c := r.dial()
		c.send(post(hello))
		eventually(t, 20*time.Second, "the name is asked for", func() bool { return names.asked.Load() > 0 })
		c.Close()
		eventually(t, 20*time.Second, "it ends", func() bool { return r.outcome("client_left") == 1 })
	})
	t.Run("no answer", func(t *testing.T) {
		good := newRawEngine(t, answering(fixed("ok")))
		r := names.of(newRig(t, Limits{ConnectTimeout: 100 * time.Millisecond}, nil, "http://engine.test:1", good.url()).ordered())
		c := r.dial()
		c.send(post(hello))
		if resp, body := c.answer(); resp.StatusCode != 200 || body != "ok" {
			t.Errorf("got %d %q", resp.StatusCode, body)
		}
		if n := r.replicas[0].Failures(); n != 1 {
			t.Errorf("%d failures", n)
		}
	})
	t.Run("the replica leaves", func(t *testing.T) {
		r := names.of(newRig(t, Limits{ConnectTimeout: time.Minute}, nil, "http://engine.test:1"))
		before := names.asked.Load()
		c := r.dial()
		c.send(post(hello))
		eventually(t, 20*time.Second, "the name is asked for", func() bool { return names.asked.Load() > before })
		r.replicas[0].Close()
		if resp, body := c.answer(); resp.StatusCode != 502 {
			t.Errorf("got %d %q", resp.StatusCode, body)
		}
	})
}

// TestAddresses: of several addresses one that does not answer leaves time for
// the next.
func TestAddresses(t *testing.T) {
	silent := netip.MustParseAddrPort(fullListener(t))
	good := newRawEngine(t, answering(fixed("ok")))
	r := newRig(t, Limits{ConnectTimeout: 400 * time.Millisecond, MaxAttempts: 1}, nil, good.url())
	a := r.replicas[0].addresses
	a.mu.Lock()
	a.known = append([]netip.AddrPort{silent}, a.known...)
	a.mu.Unlock()
	c := r.dial()
	c.send(post(hello))
	if resp, body := c.answer(); resp.StatusCode != 200 || body != "ok" {
		t.Errorf("got %d %q", resp.StatusCode, body)
	}
}
