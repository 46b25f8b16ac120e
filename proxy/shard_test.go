package proxy

import (
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestEventsOfTheForgotten: what the kernel told of a descriptor before it was
// forgotten does not reach the one that has its place now.
func TestEventsOfTheForgotten(t *testing.T) {
	s, err := newShard()
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	fd := func(c *net.TCPConn) (n int) {
		raw, err := c.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		raw.Control(func(fd uintptr) { n = int(fd) })
		return n
	}
	a, b := pair(t)
	old := s.watch(fd(a))
	if err := old.arm(unix.EPOLLRDHUP, func(*watch, uint32) {}); err != nil {
		t.Fatal(err)
	}
	slot, gen := old.slot, old.gen
	old.forget()
	told := false
	w := s.watch(fd(b))
	if w.slot != slot {
		t.Fatalf("the place is not used again: %d, then %d", slot, w.slot)
	}
	if err := w.arm(unix.EPOLLRDHUP, func(*watch, uint32) { told = true }); err != nil {
		t.Fatal(err)
	}
	s.dispatch(slot, gen, unix.EPOLLRDHUP)
	if told {
		t.Error("it was told of the other's end")
	}
	s.dispatch(slot, w.gen, unix.EPOLLRDHUP)
	if !told {
		t.Error("it is not told of its own")
	}
	w.forget()
}

// TestEventAfterTheEnd: news of a client that comes when its connection has been
// closed touches no descriptor: its number may be another's.
func TestEventAfterTheEnd(t *testing.T) {
	r := newRig(t, Limits{}, nil)
	_, tcp := pair(t)
	c, err := newConn(r.s, tcp)
	if err != nil {
		t.Fatal(err)
	}
	c.expect(time.Now().Add(time.Minute))
	w := c.cw
	c.close()
	c.onClient(w, unix.EPOLLRDHUP)
	if c.cw != nil {
		t.Error("a closed descriptor is watched")
	}
}
