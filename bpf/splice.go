package bpf

import (
	"runtime"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Splice is one response's pairing of a client and an engine connection. It is
// made by Join, used by one goroutine at a time, and dead after Part; a call of
// changed that has begun by then may still come.
type Splice struct {
	s  *Splicer
	id uint32
	m  *splice
	// changed is called from the Splicer's goroutines when the splice settled.
	changed func()
	// armed: the word may have been changed by a program since userspace last
	// looked.
	armed bool
	// step and left are the framing state userspace knows of.
	step, left uint32
}

// Holder says who has the rest of the response.
type Holder uint8

const (
	Here   Holder = iota // userspace may read from the engine
	Kernel               // the kernel carries it
	Ended                // the kernel has carried it to its end
)

// Join pairs two entered connections for one response. It returns nil and the
// reason when they cannot be. changed is called when what the kernel carried has been
// acknowledged to its end; it must not block.
func (s *Splicer) Join(client, engine uint32, changed func()) (*Splice, string) {
	c, e := &s.conns[client], &s.conns[engine]
	if (c.flags^e.flags)&connV6 != 0 {
		return nil, WhyFamily
	}
	s.mu.Lock()
	id, ok := s.freeSplices.take()
	s.generation++
	generation := s.generation
	s.mu.Unlock()
	if !ok {
		return nil, WhyFull
	}
	m := &s.splices[id]
	*m = splice{client: client, engine: engine, generation: generation}
	p := &Splice{s: s, id: id, m: m, changed: changed}
	s.live[id].Store(p)
	atomic.StoreUint32(&c.splice, id)
	atomic.StoreUint32(&e.splice, id)
	return p, ""
}

// Arm offers the rest of the response to the kernel. step and left are the
// framing state after the last byte read; fixed says that the body has a
// Content-Length, of which left is the rest. The caller has written all it has
// read to the client's socket. False, and nothing done: not now.
func (p *Splice) Arm(step uint8, left uint64, fixed bool) bool {
	w := atomic.LoadUint64(&p.m.word)
	if left > maxLeft || wordState(w) != stateOff {
		return false
	}
	p.step, p.left = uint32(step), uint32(left)
	p.m.fixed = 0
	if fixed {
		p.m.fixed = 1
	}
	// Only userspace moves a word out of OFF. next stays, for AppendTail.
	atomic.StoreUint64(&p.m.word, word(stateArmed, p.step, p.left, wordNext(w)))
	p.armed = true
	return true
}

// Take takes an armed response back, if the kernel has not taken it over, and
// says who holds the rest. carried says that the kernel has moved the framing
// state, to step and left; otherwise it is as the caller left it.
func (p *Splice) Take() (step uint8, left uint64, carried bool, h Holder) {
	for p.armed {
		w := atomic.LoadUint64(&p.m.word)
		switch wordState(w) {
		case stateArmed:
			if atomic.CompareAndSwapUint64(&p.m.word, w, withState(w, stateOff)) {
				p.armed = false
			}
		case stateActive:
			return 0, 0, false, Kernel
		case stateDone, stateEnded:
			return 0, 0, false, Ended
		case statePaused, stateOff:
			p.armed = false
			p.step, p.left = wordStep(w), wordLeft(w)
			return uint8(p.step), uint64(p.left), true, Here
		default: // a program is at it, for nanoseconds
			runtime.Gosched()
		}
	}
	return uint8(p.step), uint64(p.left), false, Here
}

// Stop freezes the splice: the kernel carries no new byte afterwards.
func (p *Splice) Stop() {
	for {
		w := atomic.LoadUint64(&p.m.word)
		to := uint64(stateOff)
		switch wordState(w) {
		case stateArmed:
		case stateActive:
			to = statePaused
		case stateClaimed:
			runtime.Gosched()
			continue
		default:
			return
		}
		if atomic.CompareAndSwapUint64(&p.m.word, w, withState(w, to)) {
			return
		}
	}
}

// Settled reports that the client has acknowledged everything carried.
func (p *Splice) Settled() bool {
	switch wordState(atomic.LoadUint64(&p.m.word)) {
	case stateOff, stateArmed, stateClaimed, stateEnded:
		return true
	}
	return false
}

func (p *Splice) settledUnseen() bool {
	return wordState(atomic.LoadUint64(&p.m.word)) == stateEnded
}

// Stats is what the kernel counted for one response.
type Stats struct {
	Bytes, Packets, Chunks uint64
	Refused                Why
	// Stale: the engine's socket may hold bytes that were carried as well. It
	// must not be read or used again.
	Stale       bool
	First, Last time.Duration // since boot, zero when nothing was carried
	// Stalled is for how long the client has kept the response from going on:
	// by acknowledging nothing of what it owes, or by a window of zero.
	Stalled time.Duration
}

// Stats returns the counters so far.
func (p *Splice) Stats() Stats {
	m := p.m
	return Stats{
		Bytes:   atomic.LoadUint64(&m.bytes),
		Packets: atomic.LoadUint64(&m.packets),
		Chunks:  atomic.LoadUint64(&m.chunks),
		Refused: Why(atomic.LoadUint32(&m.refused)),
		Stale:   atomic.LoadUint32(&m.stale) != 0,
		First:   time.Duration(m.firstNs),
		Last:    time.Duration(m.lastNs),
		Stalled: m.stalled(),
	}
}

// stalled reports for how long a client has held the response up.
func (m *splice) stalled() time.Duration {
	w := atomic.LoadUint64(&m.word)
	state := wordState(w)
	if state != stateActive && state != stateDone && state != statePaused {
		return 0
	}
	owed := wordNext(w)-m.eStart != atomic.LoadUint32(&m.una)-m.cStart
	// After a pause the window is for what userspace sends.
	if !owed && (state == statePaused || atomic.LoadUint32(&m.window) != 0) {
		return 0
	}
	var now unix.Timespec
	unix.ClockGettime(unix.CLOCK_MONOTONIC, &now)
	last := max(atomic.LoadUint64(&m.ackNs), atomic.LoadUint64(&m.firstNs))
	return max(0, time.Duration(now.Nano())-time.Duration(last))
}

// AppendTail appends the last bytes the kernel carried since it last took
// over, at most 1024 of them.
func (p *Splice) AppendTail(dst []byte) []byte {
	w := atomic.LoadUint64(&p.m.word)
	if atomic.LoadUint64(&p.m.packets) == 0 {
		return dst
	}
	n := wordNext(w) - p.m.eStart
	at := n % tailBytes
	t := &p.s.tails[p.id].bytes
	if n >= tailBytes {
		dst = append(dst, t[at:tailBytes]...)
	}
	return append(dst, t[:at]...)
}

// Part ends the pairing. Unless the splice is settled both sockets must be
// closed next, by reset.
func (p *Splice) Part() {
	c, e := &p.s.conns[p.m.client], &p.s.conns[p.m.engine]
	p.Stop()
	for {
		w := atomic.LoadUint64(&p.m.word)
		state := wordState(w)
		if state == stateFolding {
			runtime.Gosched()
			continue
		}
		if state != statePaused && state != stateDone {
			break
		}
		if atomic.CompareAndSwapUint64(&p.m.word, w, withState(w, stateFolding)) {
			n := wordNext(w) - p.m.eStart
			atomic.StoreUint32(&c.shift, c.base+n)
			atomic.StoreUint32(&e.shift, p.m.eBase+n)
			atomic.StoreUint64(&p.m.word, withState(w, stateEnded))
			break
		}
	}
	atomic.StoreUint32(&c.splice, 0)
	atomic.StoreUint32(&e.splice, 0)
	p.s.mu.Lock()
	p.s.live[p.id].Store(nil)
	p.s.carried[e.engine].add(p.m)
	p.s.freeSplices.put(p.id)
	p.s.mu.Unlock()
}
