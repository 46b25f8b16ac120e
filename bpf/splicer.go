package bpf

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
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

	wires, arrivals, engines *ebpf.Map
	routes                   *ebpf.Variable // route_generation

	memory  [][]byte
	conns   []conn   // shared with the programs
	splices []splice // shared with the programs
	tails   []tail   // shared with the programs
	flows   []bucket // shared with the programs; the length is a power of two

	flowSeed uint32

	live []atomic.Pointer[Splice] // by splice id

	events *ringbuf.Reader
	// ready is the ring buffer's descriptor on Go's netpoller.
	ready *os.File
	stop  chan struct{}
	wait  sync.WaitGroup

	// Wakeups counts events read from the ring buffer.
	wakeups atomic.Uint64

	pinDir string

	// mu guards what follows, and flows against concurrent changes
	// from userspace.
	mu              sync.Mutex
	devices         map[uint32]device
	freeConns       queue
	freeSplices     queue
	closing         []uint32                   // left conns whose kernel socket may still exist
	carried         map[uint32]*EngineCounters // by slot: what parted splices carried
	generation      uint32
	routeGeneration uint32
	closed          bool
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
	buckets := uint32(1)
	for buckets*uint32(len(bucket{}.slots)) < uint32(8*o.MaxSplices) {
		buckets *= 2
	}
	s.flowSeed = rand.Uint32()
	for _, spec := range []*ebpf.CollectionSpec{in, out, rem} {
		if err := checkMirrors(spec.Maps); err != nil {
			return err
		}
		spec.Maps["conns"].MaxEntries = uint32(2 * o.MaxSplices)
		spec.Maps["splices"].MaxEntries = uint32(o.MaxSplices)
		spec.Maps["tails"].MaxEntries = uint32(o.MaxSplices)
		// A quarter of the slots is used at most, so that hardly a bucket fills.
		spec.Maps["flows"].MaxEntries = buckets
		for name, value := range map[string]uint32{"flow_mask": buckets - 1, "flow_seed": s.flowSeed} {
			if v := spec.Variables[name]; v != nil {
				if err := v.Set(value); err != nil {
					return err
				}
			}
		}
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
	if s.routes = first.Variables["route_generation"]; s.routes == nil {
		return errors.New("bpf object has no variable route_generation: run make generate")
	}
	s.wires, s.arrivals, s.engines = first.Maps["wires"], first.Maps["arrivals"], first.Maps["engines"]
	if s.conns, err = mapped[conn](s, first.Maps["conns"]); err != nil {
		return err
	}
	if s.splices, err = mapped[splice](s, first.Maps["splices"]); err != nil {
		return err
	}
	if s.flows, err = mapped[bucket](s, first.Maps["flows"]); err != nil {
		return err
	}
	if s.tails, err = mapped[tail](s, first.Maps["tails"]); err != nil {
		return err
	}
	if s.events, err = ringbuf.NewReader(first.Maps["events"]); err != nil {
		return fmt.Errorf("open events: %w", err)
	}
	// The Reader would block in epoll_wait. A thread that does so makes the
	// scheduler's monitor look after its P every 20 microseconds, which costs
	// more than all else the agent does for a response. So it is only asked
	// when there is something, and never waits.
	s.events.SetDeadline(time.Unix(1, 0))
	fd, err := unix.FcntlInt(uintptr(first.Maps["events"].FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open events: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return fmt.Errorf("open events: %w", err)
	}
	s.ready = os.NewFile(uintptr(fd), "events")
	// Fails when the netpoller has not taken it.
	if err := s.ready.SetReadDeadline(time.Time{}); err != nil {
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

// Abandon frees what this process has and leaves the programs attached, as if
// it had been killed: pinned links and clsact filters stay, for the next agent
// to remove.
func (s *Splicer) Abandon() {
	s.mu.Lock()
	for i, d := range s.devices {
		for _, l := range d.links {
			l.Close()
		}
		delete(s.devices, i)
	}
	s.pinDir = ""
	s.mu.Unlock()
	s.Close()
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
	if s.ready != nil {
		s.ready.Close()
	}
	s.wait.Wait()
	if s.events != nil {
		s.events.Close()
	}
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

// RoutesChanged tells the programs that a route or an interface has changed, so
// that they look for themselves where packets have to go. Splices that start
// later note the new ways.
func (s *Splicer) RoutesChanged() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.routeGeneration++
	if err := s.routes.Set(s.routeGeneration + 1); err != nil {
		return fmt.Errorf("tell the programs of a route change: %w", err)
	}
	return nil
}

func (s *Splicer) readEvents() {
	defer s.wait.Done()
	raw, err := s.ready.SyscallConn()
	if err != nil {
		return
	}
	var r ringbuf.Record
	for {
		// It fails when ready is closed.
		if raw.Read(func(uintptr) bool { return s.events.AvailableBytes() > 0 }) != nil {
			return
		}
		if err := s.events.ReadInto(&r); err != nil {
			if errors.Is(err, os.ErrDeadlineExceeded) {
				continue // all is read
			}
			time.Sleep(10 * time.Millisecond) // sweep makes up for what is lost
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
