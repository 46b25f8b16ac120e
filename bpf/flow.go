package bpf

import (
	"encoding/binary"
	"sync/atomic"
)

// bucket mirrors struct bucket.
type bucket struct {
	slots [8]uint64
}

// flowHash is flow_hash of flow.h.
func (s *Splicer) flowHash(t *tuple) uint32 {
	h := s.flowSeed
	mix := func(x uint32) {
		h = (h ^ x) * 0x9e3779b1
		h ^= h >> 15
	}
	for i := 0; i < 16; i += 4 {
		mix(binary.NativeEndian.Uint32(t.remote[i:]))
		mix(binary.NativeEndian.Uint32(t.local[i:]))
	}
	mix(uint32(binary.NativeEndian.Uint16(t.rport[:])) | uint32(binary.NativeEndian.Uint16(t.lport[:]))<<16)
	return h
}

func (s *Splicer) bucket(h uint32) *bucket { return &s.flows[h&uint32(len(s.flows)-1)] }

// putFlowLocked leads packets of conn id's tuple to it, whoever had them
// before, and reports false when their bucket is full.
func (s *Splicer) putFlowLocked(id uint32) bool {
	t := &s.conns[id].wire
	h := s.flowHash(t)
	b := s.bucket(h)
	free := -1
	for i := range b.slots {
		slot := atomic.LoadUint64(&b.slots[i])
		switch {
		case slot == 0:
			if free < 0 {
				free = i
			}
		case uint32(slot) == h && s.conns[slot>>32].wire == *t:
			atomic.StoreUint64(&b.slots[i], uint64(id)<<32|uint64(h))
			return true
		}
	}
	if free < 0 {
		return false
	}
	atomic.StoreUint64(&b.slots[free], uint64(id)<<32|uint64(h))
	return true
}

// dropFlowLocked ends what putFlowLocked began, unless another conn has the
// tuple now.
func (s *Splicer) dropFlowLocked(id uint32) {
	h := s.flowHash(&s.conns[id].wire)
	b := s.bucket(h)
	for i := range b.slots {
		atomic.CompareAndSwapUint64(&b.slots[i], uint64(id)<<32|uint64(h), 0)
	}
}
