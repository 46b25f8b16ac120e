package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"
)

// ErrNotSupported is wrapped by errors that say the kernel lacks a feature.
var ErrNotSupported = ebpf.ErrNotSupported

// Options configures Load. The zero value loads for a recent kernel.
type Options struct {
	// Mark is put on rewritten packets; 0 means the default. Agents on one
	// node need different ones.
	Mark uint32
	// BoundedLoop walks frames with a bounded loop instead of bpf_loop, for
	// kernels before 5.17.
	BoundedLoop bool
	// MaxSplices is how many responses the kernel can carry at once; 0 means
	// 16384. Connections are twice as many. About 1.3 KiB of kernel memory each.
	MaxSplices int
}

// Splicer owns the programs and maps of the packet splice. The agent makes one
// and attaches it to interfaces; the proxy enters sockets and joins them for
// single responses. All methods may be called from any goroutine.
type Splicer struct {
	programs [4]*ebpf.Program // by hookIndex
	remains  *ebpf.Program
	colls    []*ebpf.Collection

	flows, wires, arrivals, engines *ebpf.Map

	memory  [][]byte
	conns   []conn   // shared with the programs
	splices []splice // shared with the programs
	tails   []tail   // shared with the programs

	live []atomic.Pointer[Splice] // by splice id

	events *ringbuf.Reader
	stop   chan struct{}
	wait   sync.WaitGroup

	// Wakeups counts events read from the ring buffer.
	wakeups atomic.Uint64

	pinDir string

	// mu guards what follows, and the flows map against concurrent changes
	// from userspace.
	mu          sync.Mutex
	devices     map[uint32]device
	freeConns   queue
	freeSplices queue
	closing     []uint32                   // left conns whose kernel socket may still exist
	carried     map[uint32]*EngineCounters // by slot: what parted splices carried
	generation  uint32
	closed      bool
}

// device is an interface the programs watch.
type device struct {
	flags uint32 // connLoopback, connLayer3
	links []link.Link
}

// queue hands out ids first in, first out, so that an id rests as long as
// possible before it is used again: a program on another CPU may still be
// looking at its last use.
type queue struct {
	ids  []uint32
	head int
}

func (q *queue) put(id uint32) { q.ids = append(q.ids, id) }
func (q *queue) len() int      { return len(q.ids) - q.head }
func (q *queue) take() (uint32, bool) {
	if q.len() == 0 {
		return 0, false
	}
	id := q.ids[q.head]
	q.head++
	if q.head > 4096 && q.head*2 > len(q.ids) {
		q.ids = append(q.ids[:0], q.ids[q.head:]...)
		q.head = 0
	}
	return id, true
}

const (
	ingressEthernet = iota
	ingressLayer3
	egressEthernet
	egressLayer3
)

// Load loads the programs and makes their maps. It needs CAP_BPF,
// CAP_NET_ADMIN, CAP_PERFMON, BTF and Linux 5.15.
func Load(o Options) (*Splicer, error) {
	if o.MaxSplices == 0 {
		o.MaxSplices = 1 << 14
	}
	if o.Mark == 0 {
		o.Mark = 0x1f5a0001
	}
	s := &Splicer{
		devices: make(map[uint32]device),
		carried: make(map[uint32]*EngineCounters),
		stop:    make(chan struct{}),
	}
	if err := s.load(o); err != nil {
		s.Close()
		return nil, err
	}
	for i := 1; i < len(s.conns); i++ {
		s.freeConns.put(uint32(i))
	}
	for i := 1; i < len(s.splices); i++ {
		s.freeSplices.put(uint32(i))
	}
	s.live = make([]atomic.Pointer[Splice], len(s.splices))
	s.wait.Add(2)
	go s.readEvents()
	go s.sweep()
	return s, nil
}

func (s *Splicer) load(o Options) error {
	in, err := loadIngress()
	if err != nil {
		return err
	}
	out, err := loadEgress()
	if err != nil {
		return err
	}
	rem, err := loadRemains()
	if err != nil {
		return err
	}
	for _, spec := range []*ebpf.CollectionSpec{in, out, rem} {
		if err := checkMirrors(spec.Maps); err != nil {
			return err
		}
		spec.Maps["conns"].MaxEntries = uint32(2 * o.MaxSplices)
		spec.Maps["splices"].MaxEntries = uint32(o.MaxSplices)
		spec.Maps["tails"].MaxEntries = uint32(o.MaxSplices)
		spec.Maps["flows"].MaxEntries = uint32(4 * o.MaxSplices)
		if v := spec.Variables["mark"]; v != nil {
			if err := v.Set(o.Mark); err != nil {
				return err
			}
		}
		if v := spec.Variables["use_bpf_loop"]; v != nil {
			loop := uint8(1)
			if o.BoundedLoop {
				loop = 0
			}
			if err := v.Set(loop); err != nil {
				return err
			}
		}
	}
	first, err := ebpf.NewCollection(in)
	if err != nil {
		return fmt.Errorf("load ingress: %w", err)
	}
	s.colls = append(s.colls, first)
	shared := make(map[string]*ebpf.Map)
	for name := range rem.Maps {
		if m := first.Maps[name]; m != nil && name[0] != '.' {
			shared[name] = m
		}
	}
	for name, spec := range map[string]*ebpf.CollectionSpec{"egress": out, "remains": rem} {
		c, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: shared})
		if err != nil {
			return fmt.Errorf("load %s: %w", name, err)
		}
		s.colls = append(s.colls, c)
		for n, p := range c.Programs {
			switch n {
			case "egress_ethernet":
				s.programs[egressEthernet] = p
			case "egress_layer3":
				s.programs[egressLayer3] = p
			case "remains":
				s.remains = p
			}
		}
	}
	s.programs[ingressEthernet] = first.Programs["ingress_ethernet"]
	s.programs[ingressLayer3] = first.Programs["ingress_layer3"]
	s.flows, s.wires, s.arrivals, s.engines = first.Maps["flows"], first.Maps["wires"], first.Maps["arrivals"], first.Maps["engines"]
	if s.conns, err = mapped[conn](s, first.Maps["conns"]); err != nil {
		return err
	}
	if s.splices, err = mapped[splice](s, first.Maps["splices"]); err != nil {
		return err
	}
	if s.tails, err = mapped[tail](s, first.Maps["tails"]); err != nil {
		return err
	}
	if s.events, err = ringbuf.NewReader(first.Maps["events"]); err != nil {
		return fmt.Errorf("open events: %w", err)
	}
	return nil
}

// mapped maps an array's values into memory. T's size is a multiple of 8, as
// the kernel lays elements out.
func mapped[T any](s *Splicer, m *ebpf.Map) ([]T, error) {
	var t T
	size := (uint64(unsafe.Sizeof(t)) + 7) &^ 7
	if size != uint64(unsafe.Sizeof(t)) {
		return nil, fmt.Errorf("BUG: element of %T is %d bytes, not a multiple of 8", t, unsafe.Sizeof(t))
	}
	n := uint64(m.MaxEntries())
	page := uint64(os.Getpagesize())
	b, err := unix.Mmap(m.FD(), 0, int((n*size+page-1)&^(page-1)), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %s into memory: %w", m, err)
	}
	s.memory = append(s.memory, b)
	return unsafe.Slice((*T)(unsafe.Pointer(&b[0])), n), nil
}

// Close detaches the programs and frees everything. No Splice may be in use.
func (s *Splicer) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	devices := s.devices
	s.devices = map[uint32]device{}
	s.mu.Unlock()
	for _, d := range devices {
		closeLinks(d.links)
	}
	close(s.stop)
	if s.events != nil {
		s.events.Close()
	}
	s.wait.Wait()
	for _, c := range s.colls {
		c.Close()
	}
	for _, b := range s.memory {
		unix.Munmap(b)
	}
	if s.pinDir != "" {
		return Unpin(s.pinDir)
	}
	return nil
}

// closeTime is how long LetClose waits for clients to acknowledge the end of
// their connections.
const closeTime = 2 * time.Second

// LetClose gives the kernel a moment to close the connections that were left.
// Call it before the programs are detached: without them the last segments
// would have wrong numbers.
func (s *Splicer) LetClose() {
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
			return
		}
	}
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

func closeLinks(links []link.Link) {
	for _, l := range links {
		l.Unpin()
		l.Close()
	}
}

// Pin pins programs and maps below dir, and every link made later by Attach,
// so that they outlive a killed agent until its sockets are closed. dir must
// be on a BPF file system. Call it before Attach.
func (s *Splicer) Pin(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("pin directory: %w", err)
	}
	for _, c := range s.colls {
		for name, p := range c.Programs {
			if err := p.Pin(filepath.Join(dir, "program_"+name)); err != nil {
				return fmt.Errorf("pin program %s: %w", name, err)
			}
		}
	}
	for name, m := range s.colls[0].Maps {
		if name[0] == '.' {
			continue
		}
		if err := m.Pin(filepath.Join(dir, "map_"+name)); err != nil {
			return fmt.Errorf("pin map %s: %w", name, err)
		}
	}
	s.pinDir = dir
	return nil
}

// Unpin removes what Pin left in dir, this agent's or an earlier one's. Links
// that were pinned there detach.
func Unpin(dir string) error {
	names, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, n := range names {
		if err := os.Remove(filepath.Join(dir, n.Name())); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return os.Remove(dir)
}

// Defunct reports whether dir holds links that Pin's Splicer has made and none
// of them is attached any more, because their network namespace is gone.
func Defunct(dir string) bool {
	names, err := filepath.Glob(filepath.Join(dir, "link_*"))
	if err != nil || len(names) == 0 {
		return false
	}
	for _, name := range names {
		l, err := link.LoadPinnedLink(name, nil)
		if err != nil {
			return false
		}
		info, err := l.Info()
		l.Close()
		if err != nil || info.TCX() == nil || info.TCX().Ifindex != 0 {
			return false
		}
	}
	return true
}

// Attach attaches the programs to an interface through tcx (Linux 6.6). The
// error wraps ErrNotSupported on older kernels. Attaching twice does nothing.
func (s *Splicer) Attach(ifindex int, layer3, loopback bool) error {
	d := newDevice(layer3, loopback)
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.devices[uint32(ifindex)]; ok {
		return nil
	}
	in, out := s.hooks(layer3)
	for name, a := range map[string]link.TCXOptions{
		"ingress": {Program: in, Attach: ebpf.AttachTCXIngress},
		"egress":  {Program: out, Attach: ebpf.AttachTCXEgress},
	} {
		a.Interface = ifindex
		// The programs stand where the wire is: first in, last out.
		a.Anchor = link.Head()
		if name == "egress" {
			a.Anchor = link.Tail()
		}
		l, err := link.AttachTCX(a)
		if err != nil {
			closeLinks(d.links)
			return fmt.Errorf("attach tcx %s to interface %d: %w", name, ifindex, err)
		}
		d.links = append(d.links, l)
		if s.pinDir != "" {
			if err := l.Pin(filepath.Join(s.pinDir, "link_"+strconv.Itoa(ifindex)+"_"+name)); err != nil {
				closeLinks(d.links)
				return fmt.Errorf("pin tcx link of interface %d: %w", ifindex, err)
			}
		}
	}
	s.devices[uint32(ifindex)] = d
	return nil
}

// Programs returns the descriptors of the two programs for an interface, for a
// caller that attaches them itself (clsact filters on kernels before 6.6) and
// then calls Attached. They stay owned by the Splicer.
func (s *Splicer) Programs(layer3 bool) (ingress, egress int) {
	in, out := s.hooks(layer3)
	return in.FD(), out.FD()
}

// Attached notes that the caller has attached the programs to an interface.
func (s *Splicer) Attached(ifindex int, layer3, loopback bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.devices[uint32(ifindex)] = newDevice(layer3, loopback)
}

// Detach detaches the programs from an interface, or notes that it is gone.
func (s *Splicer) Detach(ifindex int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	closeLinks(s.devices[uint32(ifindex)].links)
	delete(s.devices, uint32(ifindex))
}

func newDevice(layer3, loopback bool) (d device) {
	if layer3 {
		d.flags |= connLayer3
	}
	if loopback {
		d.flags |= connLoopback
	}
	return d
}

func (s *Splicer) hooks(layer3 bool) (ingress, egress *ebpf.Program) {
	if layer3 {
		return s.programs[ingressLayer3], s.programs[egressLayer3]
	}
	return s.programs[ingressEthernet], s.programs[egressEthernet]
}

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
	if s.flows.Put(unsafe.Pointer(&c.wire), unsafe.Pointer(&id)) != nil {
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
	c := &s.conns[id]
	var owner uint32
	if s.flows.Lookup(unsafe.Pointer(&c.wire), unsafe.Pointer(&owner)) == nil && owner == id {
		s.flows.Delete(unsafe.Pointer(&c.wire))
	}
	s.freeConns.put(id)
}

// sweep frees the ids of connections the kernel is done with, and wakes the
// owners of settled splices whose event found the ring buffer full.
func (s *Splicer) sweep() {
	defer s.wait.Done()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-s.stop:
			return
		case <-tick.C:
		}
		s.sweepClosing()
		for i := range s.live {
			if p := s.live[i].Load(); p != nil && p.settledUnseen() {
				p.changed()
			}
		}
	}
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

func (s *Splicer) readEvents() {
	defer s.wait.Done()
	var r ringbuf.Record
	for {
		if err := s.events.ReadInto(&r); err != nil {
			if errors.Is(err, ringbuf.ErrClosed) {
				return
			}
			continue
		}
		s.wakeups.Add(1)
		if len(r.RawSample) < int(unsafe.Sizeof(event{})) {
			continue
		}
		ev := (*event)(unsafe.Pointer(&r.RawSample[0]))
		if ev.splice == 0 || int(ev.splice) >= len(s.live) {
			continue
		}
		if p := s.live[ev.splice].Load(); p != nil && p.m.generation == ev.generation {
			p.changed()
		}
	}
}
