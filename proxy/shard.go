package proxy

import (
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// shard is one epoll set and the goroutine that serves it. Bodies are relayed by
// shards, not by the goroutines of their requests: waking one for every token
// costs twice the whole relaying, and a joined socket must not be woken for at
// all. Any goroutine may add and arm watches; what they call runs on the
// shard's goroutine.
//
// What is on the netpoller is the epoll set itself. A thread that blocks in
// epoll_wait of its own would make the scheduler's monitor look for it every
// 20 microseconds, to take its P away, which costs several times what the agent
// does for a response.
type shard struct {
	epoll int
	file  *os.File // owns epoll
	raw   syscall.RawConn
	done  chan struct{}

	// buf and scratch are for what runs on the goroutine.
	buf     []byte
	scratch scratch

	counts counts

	mu    sync.Mutex // guards table, free
	table []*watch
	free  []freePlace
}

// freePlace is a place in a shard's table that nothing has. gen is the
// generation it has come to: events of whatever had it before are of earlier
// ones, and may still be on their way.
type freePlace struct{ slot, gen uint32 }

// counts are what was done for the responses of a shard's engine connections,
// up to date while they last. Mostly one thread adds to them.
type counts struct {
	// wakeups is how often userspace was woken for a response.
	wakeups                                  atomic.Uint64
	bytes, chunks                            atomic.Uint64 // copied
	kernelBytes, kernelChunks, kernelPackets atomic.Uint64
}

// watch is one file descriptor's place in a shard. It lives as long as the
// descriptor is watched at all: forget it before the descriptor is closed.
type watch struct {
	shard *shard
	fd    int
	slot  uint32

	mu    sync.Mutex // guards the rest
	gen   uint32     // tells an event that was armed before from the present one
	added bool
	wakes *conn
	ready func(w *watch, events uint32)
}

// readSize is how much is read from an engine at once.
const readSize = 64 << 10

func newShard() (*shard, error) {
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create an epoll set: %w", err)
	}
	if err := unix.SetNonblock(epoll, true); err != nil {
		unix.Close(epoll)
		return nil, fmt.Errorf("make an epoll set non-blocking: %w", err)
	}
	s := &shard{epoll: epoll, file: os.NewFile(uintptr(epoll), "epoll"), done: make(chan struct{}), buf: make([]byte, readSize)}
	// Fails when the netpoller has not taken it.
	if err := s.file.SetReadDeadline(time.Time{}); err != nil {
		s.file.Close()
		return nil, fmt.Errorf("watch an epoll set: %w", err)
	}
	if s.raw, err = s.file.SyscallConn(); err != nil {
		s.file.Close()
		return nil, fmt.Errorf("watch an epoll set: %w", err)
	}
	go s.run()
	return s, nil
}

// epollEvent carries slot and generation where epoll keeps the caller's data:
// never a pointer, which the collector could not follow.
func epollEvent(events, slot, gen uint32) unix.EpollEvent {
	return unix.EpollEvent{Events: events, Fd: int32(slot), Pad: int32(gen)}
}

// close ends the goroutine and waits for it. No watch may be armed afterwards.
func (s *shard) close() {
	s.file.Close()
	<-s.done
}

// busyBatches is after how many batches without a pause the shard lets other
// goroutines run.
const busyBatches = 64

func (s *shard) run() {
	defer close(s.done)
	var events [256]unix.EpollEvent
	busy := 0
	// It returns when the file is closed.
	_ = s.raw.Read(func(uintptr) (done bool) {
		for {
			wait := syscall.RawSyscall6
			if busy++; busy == busyBatches {
				// A call that the scheduler knows of wakes its monitor, which
				// looks after the other goroutines while this one is busy.
				busy, wait = 0, syscall.Syscall6
				runtime.Gosched()
			}
			n, _, errno := wait(unix.SYS_EPOLL_PWAIT, uintptr(s.epoll),
				uintptr(unsafe.Pointer(&events[0])), uintptr(len(events)), 0, 0, 0)
			if errno == unix.EINTR {
				continue
			}
			if errno != 0 {
				panic(fmt.Sprintf("BUG: epoll_pwait: %v", errno))
			}
			if n == 0 {
				busy = 0
				return false
			}
			for i := range events[:n] {
				e := &events[i]
				s.dispatch(uint32(e.Fd), uint32(e.Pad), e.Events)
			}
		}
	})
}

func (s *shard) dispatch(slot, gen, events uint32) {
	s.mu.Lock()
	w := s.table[slot]
	s.mu.Unlock()
	if w == nil {
		return
	}
	w.mu.Lock()
	if w.gen != gen {
		w.mu.Unlock()
		return
	}
	wakes, ready := w.wakes, w.ready
	w.mu.Unlock()
	if wakes != nil {
		wakes.wake()
	}
	if ready != nil {
		ready(w, events)
	}
}

// watch gives fd a place in the shard. Nothing is watched before arm.
func (s *shard) watch(fd int) *watch {
	w := &watch{shard: s, fd: fd}
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := len(s.free); n > 0 {
		w.slot, w.gen, s.free = s.free[n-1].slot, s.free[n-1].gen, s.free[:n-1]
		s.table[w.slot] = w
	} else {
		w.slot = uint32(len(s.table))
		s.table = append(s.table, w)
	}
	return w
}

// arm watches for events and has ready called on the shard's goroutine. What was
// armed before is forgotten, but a call of it that has already begun may still
// be running: ready functions look for themselves whether they are meant.
func (w *watch) arm(events uint32, ready func(w *watch, events uint32)) error {
	return w.set(events, nil, ready)
}

// armWake has c woken once, by the first of events. A wake that has begun may
// still come after the next arm or forget.
func (w *watch) armWake(events uint32, c *conn) error {
	return w.set(events|unix.EPOLLONESHOT, c, nil)
}

func (w *watch) set(events uint32, wakes *conn, ready func(w *watch, events uint32)) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.gen++
	w.wakes, w.ready = wakes, ready
	op := unix.EPOLL_CTL_MOD
	if !w.added {
		op = unix.EPOLL_CTL_ADD
	}
	event := epollEvent(events, w.slot, w.gen)
	if errno := epollCtl(w.shard.epoll, op, w.fd, &event); errno != 0 {
		return fmt.Errorf("watch fd %d: %w", w.fd, errno)
	}
	w.added = true
	return nil
}

// forget gives the place back. The caller closes the descriptor next, which
// takes it out of the epoll set.
func (w *watch) forget() {
	w.mu.Lock()
	w.gen++
	gen := w.gen
	w.wakes, w.ready = nil, nil
	w.mu.Unlock()
	s := w.shard
	s.mu.Lock()
	defer s.mu.Unlock()
	s.table[w.slot] = nil
	s.free = append(s.free, freePlace{w.slot, gen})
}

// The calls below never block, so they keep the P (RawSyscall).

func epollCtl(epoll, op, fd int, event *unix.EpollEvent) syscall.Errno {
	_, _, errno := syscall.RawSyscall6(unix.SYS_EPOLL_CTL, uintptr(epoll), uintptr(op), uintptr(fd),
		uintptr(unsafe.Pointer(event)), 0, 0)
	return errno
}

// recv reads what is there: 0 and no error is the end of the stream.
func recv(fd int, p []byte, flags int) (int, syscall.Errno) {
	for {
		n, _, errno := syscall.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))),
			uintptr(len(p)), uintptr(flags|unix.MSG_DONTWAIT), 0, 0)
		if errno != unix.EINTR {
			return int(n), errno
		}
	}
}

// send writes what fits. It returns 0 and EAGAIN when nothing does. MSG_EOR as
// a flag keeps the kernel from ever sending the last byte in one segment with
// what is written later.
func send(fd int, p []byte, flags int) (int, syscall.Errno) {
	for {
		n, _, errno := syscall.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))),
			uintptr(len(p)), uintptr(flags|unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL), 0, 0)
		if errno == 0 {
			return int(n), 0
		}
		if errno != unix.EINTR {
			return 0, errno
		}
	}
}

// sendAll writes the buffers as one message, as far as it fits, and returns
// what is left of them.
func sendAll(fd int, bufs [][]byte) ([][]byte, syscall.Errno) {
	var iov [4]unix.Iovec
	for {
		for len(bufs) > 0 && len(bufs[0]) == 0 {
			bufs = bufs[1:]
		}
		if len(bufs) == 0 {
			return nil, 0
		}
		k := min(len(bufs), len(iov))
		for i := range k {
			iov[i].Base = unsafe.SliceData(bufs[i])
			iov[i].SetLen(len(bufs[i]))
		}
		msg := unix.Msghdr{Iov: &iov[0]}
		msg.SetIovlen(k)
		n, _, errno := syscall.RawSyscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(&msg)),
			unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 {
			return bufs, errno
		}
		for left := int(n); left > 0; {
			if left < len(bufs[0]) {
				bufs[0] = bufs[0][left:]
				break
			}
			left -= len(bufs[0])
			bufs = bufs[1:]
		}
	}
}
