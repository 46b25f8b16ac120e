package bpf

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Enter makes a connected socket known to the programs. engine is the slot of
// the engine at its other end, -1 for a client. The id is 0 when the socket
// cannot be spliced; why is the reason then.
func (s *Splicer) Enter(fd, engine int) (id uint32, why string) {
	sock, cookie, err := socketTuple(fd)
	if err != nil {
		return 0, WhySystem
	}
	var w wire
	if s.wires.Lookup(unsafe.Pointer(&cookie), unsafe.Pointer(&w)) != nil {
		return 0, WhyUnseen
	}
	var arrival uint32
	if s.arrivals.Lookup(unsafe.Pointer(&w.tuple), unsafe.Pointer(&arrival)) != nil {
		return 0, WhyUnseen
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	d, ok := s.devices[w.ifindex]
	if !ok {
		return 0, WhyUnseen
	}
	if _, ok := s.devices[arrival]; !ok {
		return 0, WhyUnseen
	}
	c := conn{wire: w.tuple, sock: sock, flags: d.flags, ifindex: w.ifindex}
	if w.tuple.v6() {
		c.flags |= connV6
	}
	if sock.v6() {
		c.flags |= connSockV6
	}
	if engine >= 0 {
		c.flags |= connEngine
		c.engine = uint32(engine)
		if err := s.countEngineLocked(c.engine); err != nil {
			return 0, WhySystem
		}
	}
	id, ok = s.freeConns.take()
	if !ok {
		return 0, WhyFull
	}
	s.conns[id] = c
	if !s.putFlowLocked(id) {
		s.freeConns.put(id)
		return 0, WhyFull
	}
	return id, ""
}

func (s *Splicer) countEngineLocked(slot uint32) error {
	if s.carried[slot] != nil {
		return nil
	}
	zero := make([]refusals, ebpf.MustPossibleCPU())
	if err := s.engines.Update(slot, zero, ebpf.UpdateNoExist); err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
		return err
	}
	s.carried[slot] = &EngineCounters{Slot: int(slot)}
	return nil
}

func socketTuple(fd int) (t tuple, cookie uint64, err error) {
	cookie, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	if err != nil {
		return t, 0, err
	}
	local, err := unix.Getsockname(fd)
	if err != nil {
		return t, 0, err
	}
	remote, err := unix.Getpeername(fd)
	if err != nil {
		return t, 0, err
	}
	return newTuple(addrPort(remote), addrPort(local)), cookie, nil
}

func addrPort(a unix.Sockaddr) netip.AddrPort {
	switch a := a.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr), uint16(a.Port))
	}
	return netip.AddrPort{}
}

// Leave is called just before the caller closes a socket it has entered, with
// every splice on it parted. The programs go on correcting the socket's
// segments until the kernel has forgotten it.
func (s *Splicer) Leave(id uint32) {
	if id == 0 {
		return
	}
	c := &s.conns[id]
	s.mu.Lock()
	defer s.mu.Unlock()
	if atomic.LoadUint32(&c.shift) == 0 {
		s.freeConnLocked(id)
		return
	}
	atomic.StoreUint32(&c.flags, c.flags|connClosed)
	s.closing = append(s.closing, id)
}

func (s *Splicer) freeConnLocked(id uint32) {
	s.dropFlowLocked(id)
	s.freeConns.put(id)
}

func (s *Splicer) sweepClosing() {
	s.mu.Lock()
	ids := append([]uint32(nil), s.closing...)
	s.mu.Unlock()
	var gone []uint32
	for _, id := range ids {
		if s.socketState(id) == 0 {
			gone = append(gone, id)
		}
	}
	if len(gone) == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	dead := make(map[uint32]bool, len(gone))
	for _, id := range gone {
		dead[id] = true
		s.freeConnLocked(id)
	}
	kept := s.closing[:0]
	for _, id := range s.closing {
		if !dead[id] {
			kept = append(kept, id)
		}
	}
	s.closing = kept
}

// closeTime is how long LetClose waits for clients to acknowledge the end of
// their connections.
const closeTime = 2 * time.Second

// LetClose gives the kernel a moment to close the connections that were left,
// and reports whether it has. Call it before the programs are detached: without
// them what a socket still has to send goes out with wrong numbers, and the
// client misses bytes without noticing. If it reports false call Abandon, not
// Close.
func (s *Splicer) LetClose() bool {
	for until := time.Now().Add(closeTime); time.Now().Before(until); time.Sleep(10 * time.Millisecond) {
		s.mu.Lock()
		ids := append([]uint32(nil), s.closing...)
		s.mu.Unlock()
		waiting := false
		for _, id := range ids {
			switch s.socketState(id) {
			case unix.BPF_TCP_FIN_WAIT1, unix.BPF_TCP_CLOSING, unix.BPF_TCP_LAST_ACK:
				waiting = true // its end is not acknowledged
			}
		}
		if !waiting {
			return true
		}
	}
	return false
}

// socketState asks the kernel for the TCP state of a conn's socket, 0 when it
// has none.
func (s *Splicer) socketState(id uint32) uint32 {
	// The program finds the id behind an Ethernet header.
	var packet [64]byte
	binary.NativeEndian.PutUint32(packet[14:], id)
	state, err := s.remains.Run(&ebpf.RunOptions{Data: packet[:]})
	if err != nil {
		return unix.BPF_TCP_CLOSE // not known, so not forgotten
	}
	return state
}
