package bpf

import (
	"math/rand"
	"net/netip"
	"testing"
)

// TestFlows compares the table with a plain map over a random history, and
// what the programs find with both.
func TestFlows(t *testing.T) {
	s := newSplicer(t, Options{MaxSplices: 64})
	rnd := rand.New(rand.NewSource(1))
	model := map[tuple]uint32{}
	addr := func() netip.AddrPort {
		a := netip.AddrFrom4([4]byte{10, 0, 0, byte(rnd.Intn(3))})
		if rnd.Intn(2) == 0 {
			a = netip.AddrFrom16([16]byte{0xfd, 15: byte(rnd.Intn(3))})
		}
		return netip.AddrPortFrom(a, uint16(rnd.Intn(8)))
	}
	find := func(w tuple) uint32 {
		h := s.flowHash(&w)
		for _, slot := range s.bucket(h).slots {
			if id := uint32(slot >> 32); id != 0 && uint32(slot) == h && s.conns[id].wire == w {
				return id
			}
		}
		return 0
	}
	full := 0
	for range 20000 {
		id := uint32(1 + rnd.Intn(len(s.conns)-1))
		s.mu.Lock()
		if rnd.Intn(3) == 0 {
			s.dropFlowLocked(id)
			if model[s.conns[id].wire] == id {
				delete(model, s.conns[id].wire)
			}
		} else {
			s.dropFlowLocked(id)
			if model[s.conns[id].wire] == id {
				delete(model, s.conns[id].wire)
			}
			s.conns[id].wire = newTuple(addr(), addr())
			if s.putFlowLocked(id) {
				model[s.conns[id].wire] = id
			} else {
				full++
			}
		}
		s.mu.Unlock()
		w := newTuple(addr(), addr())
		if got := find(w); got != model[w] {
			t.Fatalf("%s leads to %d, want %d", w, got, model[w])
		}
	}
	if full > 200 {
		t.Errorf("a bucket was full %d times of 20,000 at a quarter of the slots", full)
	}
	n := 0
	for i := range s.flows {
		for _, slot := range s.flows[i].slots {
			if slot != 0 {
				n++
			}
		}
	}
	if n != len(model) {
		t.Errorf("%d slots in use, want %d", n, len(model))
	}
}
