package bench

import (
	"fmt"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// poller is an epoll instance of a worker process. A worker has one thread and
// makes its system calls without telling the Go scheduler (RawSyscall), so that
// waiting in the kernel costs what it costs a C program. That is sound because
// nothing else runs in the process: one goroutine, no garbage collection, no
// preemption signals (see startWorker).
type poller struct {
	fd     int
	events [512]unix.EpollEvent
}

func newPoller() (*poller, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("epoll_create1: %w", err)
	}
	return &poller{fd: fd}, nil
}

// add watches fd for input, level-triggered. Events carry the fd. A closed fd
// leaves by itself.
func (p *poller) add(fd int) error {
	return unix.EpollCtl(p.fd, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)})
}

// addOutput watches fd until it is connected, or cannot be; then it is for
// inputOnly.
func (p *poller) addOutput(fd int) error {
	return unix.EpollCtl(p.fd, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLOUT, Fd: int32(fd)})
}

// inputOnly watches fd, of addOutput, as add would.
func (p *poller) inputOnly(fd int) error {
	return unix.EpollCtl(p.fd, unix.EPOLL_CTL_MOD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)})
}

// wait returns the ready events, valid until the next call, or none after
// timeout or a signal.
func (p *poller) wait(timeout time.Duration) ([]unix.EpollEvent, error) {
	ts := unix.NsecToTimespec(int64(max(timeout, 0)))
	n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT2, uintptr(p.fd),
		uintptr(unsafe.Pointer(&p.events[0])), uintptr(len(p.events)), uintptr(unsafe.Pointer(&ts)), 0, 0)
	switch errno {
	case 0:
		return p.events[:n], nil
	case unix.EINTR:
		return nil, nil
	}
	return nil, fmt.Errorf("epoll_pwait2: %w", errno)
}

// recv reads from a socket without blocking. 0 bytes without an error is the
// end of the stream.
func recv(fd int, b []byte) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd),
		uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), unix.MSG_DONTWAIT, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), 0
}

// send writes to a socket without blocking and may write less than b.
func send(fd int, b []byte) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd),
		uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), 0
}

// clock reads CLOCK_MONOTONIC, which all processes share, without a system
// call. The zero value is not usable; see newClock.
type clock struct {
	start time.Time
	base  int64
}

func newClock() (clock, error) {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return clock{}, fmt.Errorf("clock_gettime: %w", err)
	}
	return clock{start: time.Now(), base: ts.Nano()}, nil
}

// now is in nanoseconds.
func (c clock) now() int64 { return c.base + int64(time.Since(c.start)) }
