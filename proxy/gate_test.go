package proxy

import (
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// gateModel is a gate as one would first think of it: two lists, and a rule
// that is applied again and again until nothing moves.
type gateModel struct {
	concurrency, room int
	inside, line      []*conn
}

func (m *gateModel) settle() {
	for len(m.line) > 0 && (m.concurrency == 0 || len(m.inside) < m.concurrency) {
		m.inside = append(m.inside, m.line[0])
		m.line = m.line[1:]
	}
}

// TestGateAgainstModel plays random histories to a gate and to the model.
func TestGateAgainstModel(t *testing.T) {
	_, tcp := pair(t)
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 1))
		var g gate
		m := &gateModel{}
		var idle []*conn
		for range 12 {
			idle = append(idle, &conn{tcp: tcp, nudge: make(chan struct{}, 1)})
		}
		take := func(list *[]*conn) *conn {
			i := rng.IntN(len(*list))
			c := (*list)[i]
			*list = slices.Delete(*list, i, i+1)
			return c
		}
		for step := range 300 {
			switch k := rng.IntN(7); {
			case k == 0:
				m.concurrency, m.room = rng.IntN(5), rng.IntN(5)
				g.bound(m.concurrency, m.room)
				m.settle()
			case k <= 2 && len(idle) > 0:
				c := take(&idle)
				free := (m.concurrency == 0 || len(m.inside) < m.concurrency) && len(m.line) == 0
				if g.free() != free {
					t.Fatalf("seed %d, step %d: free is %v", seed, step, !free)
				}
				if got := g.enter(c); got != free {
					t.Fatalf("seed %d, step %d: enter is %v", seed, step, got)
				}
				if free {
					m.inside = append(m.inside, c)
				} else {
					idle = append(idle, c)
				}
			case k == 3 && len(idle) > 0:
				c := take(&idle)
				roomy := len(m.line) < m.room
				if got := g.queue(c); got != roomy {
					t.Fatalf("seed %d, step %d: queue is %v", seed, step, got)
				}
				if roomy {
					m.line = append(m.line, c)
					m.settle()
				} else {
					idle = append(idle, c)
				}
			case k == 4 && len(m.line) > 0:
				c := take(&m.line)
				if !g.unqueue(c) {
					t.Fatalf("seed %d, step %d: it is not in line", seed, step)
				}
				idle = append(idle, c)
			case k == 5 && len(m.inside) > 0:
				c := take(&m.inside)
				if g.unqueue(c) {
					t.Fatalf("seed %d, step %d: it is inside and in line", seed, step)
				}
				if rng.IntN(2) == 0 {
					g.answered(c)
				}
				g.leave(c)
				idle = append(idle, c)
				m.settle()
			case k == 6 && len(m.inside) > 0:
				g.answered(m.inside[rng.IntN(len(m.inside))])
			}
			if int(g.inside.Load()) != len(m.inside) || int(g.pending.Load()) != len(m.line) {
				t.Fatalf("seed %d, step %d: %d inside and %d in line, want %d and %d",
					seed, step, g.inside.Load(), g.pending.Load(), len(m.inside), len(m.line))
			}
			i := 0
			for ticket := range g.line.All() {
				if m.line[i] != ticket.Value {
					t.Fatalf("seed %d, step %d: the line is in another order", seed, step)
				}
				i++
			}
			waiting := 0
			for c := g.waiting; c != nil; c = c.place.next {
				waiting++
				if !slices.Contains(m.inside, c) {
					t.Fatalf("seed %d, step %d: one that is not inside waits for its first byte", seed, step)
				}
			}
			if waiting > len(m.inside) {
				t.Fatalf("seed %d, step %d: %d wait", seed, step, waiting)
			}
		}
	}
}

// TestGateUnderRaces: never more than the bounds, whoever comes, waits, gives
// up and leaves at the same time.
func TestGateUnderRaces(t *testing.T) {
	const concurrency, room = 3, 4
	_, tcp := pair(t)
	var g gate
	g.bound(concurrency, room)
	var inside, most, served, gaveUp, displaced atomic.Int64
	visit := func(c *conn) {
		n := inside.Add(1)
		for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
		}
		if served.Add(1)%16 == 0 {
			time.Sleep(50 * time.Microsecond) // so that others have to wait
		}
		inside.Add(-1)
		g.leave(c)
	}
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(i), 2))
			c := &conn{tcp: tcp, nudge: make(chan struct{}, 1)}
			for range 1000 {
				p := &c.place
				p.ticket.Class, p.ticket.Tenant, p.ticket.Tokens = rng.IntN(3), string(rune('a'+rng.IntN(3))), rng.IntN(5000)
				switch {
				case g.enter(c):
					visit(c)
				case g.queue(c):
					for !p.admitted.Load() {
						gave := p.displaced.Load()
						if (gave || rng.IntN(8) == 0) && g.unqueue(c) {
							if gave {
								displaced.Add(1)
							}
							gaveUp.Add(1)
							break
						}
						time.Sleep(time.Microsecond)
					}
					if c.place.admitted.Load() {
						visit(c)
					}
				}
				if p := g.pending.Load(); p > room {
					t.Errorf("%d in line", p)
				}
			}
		})
	}
	wg.Wait()
	if most.Load() > concurrency || g.inside.Load() != 0 || g.pending.Load() != 0 || g.waiting != nil {
		t.Errorf("at most %d inside; at the end %d inside, %d in line", most.Load(), g.inside.Load(), g.pending.Load())
	}
	if served.Load() < 1000 || gaveUp.Load() == 0 || displaced.Load() == 0 {
		t.Errorf("too little happened: %d served, %d gave up, %d of them gave way", served.Load(), gaveUp.Load(), displaced.Load())
	}
}

func TestWarmth(t *testing.T) {
	now := time.Unix(1000, 0)
	var r Replica
	f := func(after time.Duration, want float64) {
		t.Helper()
		if got := r.warmth.share(now.Add(after)); got < want-1e-9 || got > want+1e-9 {
			t.Errorf("after %v: %v, want %v", after, got, want)
		}
	}
	f(0, 1)
	r.SlowStart(now, 10*time.Second)
	f(-time.Second, 0.1)
	f(0, 0.1)
	f(5*time.Second, 0.55)
	f(10*time.Second, 1)
	f(0, 1) // once warm, always warm
	r.SlowStart(now, 0)
	f(0, 1)
}

// pair is a TCP connection.
func pair(t *testing.T) (client, server *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	s, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(); s.Close() })
	return c.(*net.TCPConn), s.(*net.TCPConn)
}
