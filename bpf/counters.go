package bpf

import (
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
)

// EngineCounters is what the kernel carried from one engine since it was first
// entered.
type EngineCounters struct {
	Slot                                  int
	Packets, Bytes, Chunks, Splices, Ends uint64
	// StreamNanos is the time from first to last packet of each response.
	// GapNanos is the sum of all gaps between packets.
	StreamNanos, GapNanos uint64
	// Gaps counts gaps between packets of one stream; bucket i holds those
	// below GapBound(i), the last one the rest.
	Gaps             [gapBuckets]uint64
	Refusals, Pauses map[string]uint64
}

// GapBound is the upper bound of a bucket of EngineCounters.Gaps in
// nanoseconds: powers of two from 16.4 us.
func GapBound(i int) uint64 { return 1 << (14 + i) }

// add counts what one response was carried.
func (c *EngineCounters) add(m *splice) {
	c.Packets += atomic.LoadUint64(&m.packets)
	c.Bytes += atomic.LoadUint64(&m.bytes)
	c.Chunks += atomic.LoadUint64(&m.chunks)
	c.Splices += uint64(atomic.LoadUint32(&m.starts))
	c.Ends += uint64(atomic.LoadUint32(&m.ends))
	c.StreamNanos += atomic.LoadUint64(&m.lastNs) - atomic.LoadUint64(&m.firstNs)
	c.GapNanos += atomic.LoadUint64(&m.gapNs)
	for i := range c.Gaps {
		c.Gaps[i] += uint64(atomic.LoadUint32(&m.gaps[i]))
	}
}

// Add adds what another has counted.
func (c *EngineCounters) Add(o *EngineCounters) {
	c.Packets += o.Packets
	c.Bytes += o.Bytes
	c.Chunks += o.Chunks
	c.Splices += o.Splices
	c.Ends += o.Ends
	c.StreamNanos += o.StreamNanos
	c.GapNanos += o.GapNanos
	for i, n := range o.Gaps {
		c.Gaps[i] += n
	}
	for why, n := range o.Refusals {
		c.Refusals[why] += n
	}
	for why, n := range o.Pauses {
		c.Pauses[why] += n
	}
}

// Forget begins anew to count what is carried from an engine's slot: another engine
// is going to have it.
func (s *Splicer) Forget(slot int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.carried[uint32(slot)] == nil {
		return nil
	}
	s.carried[uint32(slot)] = &EngineCounters{Slot: slot}
	if err := s.engines.Update(uint32(slot), make([]refusals, ebpf.MustPossibleCPU()), ebpf.UpdateExist); err != nil {
		return fmt.Errorf("forget refusals of engine %d: %w", slot, err)
	}
	return nil
}

// Counters reads the counters of every engine entered so far, responses that
// are still carried included.
func (s *Splicer) Counters() ([]EngineCounters, error) {
	s.mu.Lock()
	bySlot := make(map[uint32]EngineCounters, len(s.carried))
	for slot, c := range s.carried {
		if slot != selfTestSlot {
			bySlot[slot] = *c
		}
	}
	for i := range s.live {
		if p := s.live[i].Load(); p != nil {
			slot := s.conns[p.m.engine].engine
			if c, ok := bySlot[slot]; ok {
				c.add(p.m)
				bySlot[slot] = c
			}
		}
	}
	s.mu.Unlock()

	all := make([]EngineCounters, 0, len(bySlot))
	cpus := make([]refusals, ebpf.MustPossibleCPU())
	for slot, c := range bySlot {
		if err := s.engines.Lookup(slot, &cpus); err != nil {
			return nil, fmt.Errorf("refusals of engine %d: %w", slot, err)
		}
		c.Refusals, c.Pauses = map[string]uint64{}, map[string]uint64{}
		for _, r := range cpus {
			for i := 1; i < whyMax; i++ {
				if n := r.Refusals[i]; n > 0 {
					c.Refusals[Why(i).String()] += n
				}
				if n := r.Pauses[i]; n > 0 {
					c.Pauses[Why(i).String()] += n
				}
			}
		}
		all = append(all, c)
	}
	slices.SortFunc(all, func(a, b EngineCounters) int { return a.Slot - b.Slot })
	return all, nil
}

// Census counts the splices joined now, by state, and the connections.
type Census struct {
	Armed  int `json:"armed"`
	Active int `json:"active"`
	Paused int `json:"paused"`
	Ended  int `json:"ended"`
	// Stalled are splices that their client has held up for more than ten
	// seconds.
	Stalled int `json:"stalled"`
	// Connections are the entered sockets, Closing those that userspace has
	// closed and the kernel has not forgotten.
	Connections int `json:"connections"`
	Closing     int `json:"closing"`
	// Wakeups counts events that reached userspace since start.
	Wakeups uint64 `json:"wakeups"`
}

const stallTime = 10 * time.Second

// Census looks at every splice.
func (s *Splicer) Census() (c Census) {
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
		if p.m.stalled() > stallTime {
			c.Stalled++
		}
	}
	s.mu.Lock()
	c.Closing = len(s.closing)
	c.Connections = len(s.conns) - 1 - s.freeConns.len()
	s.mu.Unlock()
	c.Wakeups = s.wakeups.Load()
	return c
}
