package bpf

import (
	"sync/atomic"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// EngineCounters is what the kernel carried from one engine since it was first
// entered, summed over CPUs.
type EngineCounters struct {
	Slot                                  int
	Packets, Bytes, Chunks, Splices, Ends uint64
	// StreamNanos is the time from first to last packet, over streams that
	// ended in the kernel. GapNanos is the sum of all gaps between packets.
	StreamNanos, GapNanos uint64
	// Gaps counts gaps between packets of one stream; bucket i holds those
	// below GapBound(i), the last one the rest.
	Gaps             [gapBuckets]uint64
	Refusals, Pauses map[string]uint64
}

// GapBound is the upper bound of a bucket of EngineCounters.Gaps in
// nanoseconds: powers of two from 16.4 us.
func GapBound(i int) uint64 { return 1 << (14 + i) }

// Counters reads the counters of every engine entered so far.
func (s *Splicer) Counters() ([]EngineCounters, error) {
	var all []EngineCounters
	var slot uint32
	cpus := make([]engineStats, ebpf.MustPossibleCPU())
	it := s.engines.Iterate()
	for it.Next(&slot, &cpus) {
		if slot == selfTestSlot {
			continue
		}
		c := EngineCounters{Slot: int(slot), Refusals: map[string]uint64{}, Pauses: map[string]uint64{}}
		for _, st := range cpus {
			c.Packets += st.Packets
			c.Bytes += st.Bytes
			c.Chunks += st.Chunks
			c.Splices += st.Splices
			c.Ends += st.Ends
			c.StreamNanos += st.StreamNs
			c.GapNanos += st.GapNs
			for i, n := range st.Gaps {
				c.Gaps[i] += n
			}
			for i := 1; i < whyMax; i++ {
				if st.Refusals[i] > 0 {
					c.Refusals[Why(i).String()] += st.Refusals[i]
				}
				if st.Pauses[i] > 0 {
					c.Pauses[Why(i).String()] += st.Pauses[i]
				}
			}
		}
		all = append(all, c)
	}
	return all, it.Err()
}

// Census counts the splices joined now, by state, and the connections.
type Census struct {
	Armed, Active, Paused, Ended int
	// Stalled are active splices whose client has owed an acknowledgement for
	// more than ten seconds.
	Stalled int
	// Connections are the entered sockets, Closing those that userspace has
	// closed and the kernel has not forgotten.
	Connections, Closing int
	// Wakeups counts events that reached userspace since start.
	Wakeups uint64
}

const stallNanos = 10_000_000_000

// Census looks at every splice.
func (s *Splicer) Census() (c Census) {
	var now unix.Timespec
	unix.ClockGettime(unix.CLOCK_MONOTONIC, &now)
	for i := range s.live {
		p := s.live[i].Load()
		if p == nil {
			continue
		}
		w := atomic.LoadUint64(&p.m.word)
		switch wordState(w) {
		case stateArmed, stateClaimed:
			c.Armed++
		case stateActive:
			c.Active++
		case statePaused:
			c.Paused++
		case stateDone, stateFolding, stateEnded:
			c.Ended++
		}
		if s := wordState(w); s == stateActive || s == stateDone {
			owed := wordNext(w)-p.m.eStart != atomic.LoadUint32(&p.m.una)-p.m.cStart
			last := max(atomic.LoadUint64(&p.m.ackNs), atomic.LoadUint64(&p.m.firstNs))
			if owed && uint64(now.Nano()) > last+stallNanos {
				c.Stalled++
			}
		}
	}
	s.mu.Lock()
	c.Closing = len(s.closing)
	c.Connections = len(s.conns) - 1 - s.freeConns.len()
	s.mu.Unlock()
	c.Wakeups = s.wakeups.Load()
	return c
}
