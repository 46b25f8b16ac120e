package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// listener is a TCP socket that the agent accepts on, and the way by which the
// agent that is started to succeed this one gets the very same socket. So a
// connection is never between two sockets: while both agents live either one
// accepts it, and when the first closes its descriptor the queue of the socket
// stays, with all connections that wait in it or have not finished their
// handshake. (Two sockets that share a port by SO_REUSEPORT alone would lose
// those of the one that is closed. The kernel can move them, sysctl
// net.ipv4.tcp_migrate_req, for who has the privilege to set it.)
//
// The successor asks at a Unix socket whose name is made of the address. That
// name is of Linux's abstract kind: it lives in the network namespace, like the
// port, and goes with its last user. The successor gets that socket too.
//
// A successor that is not an agent, or cannot ask, can still bind the port:
// SO_REUSEPORT is set, which lets processes of the same user in.
//
// Make it with openListener and end it with close; whoever serves the TCP
// listener closes that.
type listener struct {
	net.Listener // TCP; Multipath TCP is off, because the kernel datapath knows plain TCP sockets only

	log    *slog.Logger
	asked  *net.UnixListener // nil when nobody can ask
	giving sync.WaitGroup    // the goroutine that answers
	given  atomic.Bool       // another agent has the socket too
}

var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 15 * time.Second, Count: 9}

// openListener takes the socket for addr over from an agent that has it, or
// binds one.
func openListener(ctx context.Context, addr string, log *slog.Logger) (*listener, error) {
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	l := &listener{log: log}
	if port != "0" {
		err := l.take(ctx, askedAt(addr))
		if err == nil {
			log.Info("another agent of this user listens there too: taking over its socket", "address", addr)
			l.give()
			return l, nil
		}
		if !errors.Is(err, syscall.ECONNREFUSED) {
			log.Warn("cannot take over the socket of another agent", "address", addr, "error", err)
		}
	}
	if l.Listener, err = bind(ctx, addr, log); err != nil {
		return nil, err
	}
	if port == "0" {
		addr = l.Addr().String()
	}
	if l.asked, err = net.ListenUnix("unix", askedAt(addr)); err != nil {
		// Of two that were started at the same time only one has the name.
		log.Debug("a later agent cannot take over this socket", "address", addr, "error", err)
		return l, nil
	}
	l.give()
	return l, nil
}

// askedAt is where an agent that listens on addr is asked for its socket.
func askedAt(addr string) *net.UnixAddr {
	return &net.UnixAddr{Net: "unix", Name: "@inferrail/listener/" + addr}
}

// bind opens a socket of its own.
func bind(ctx context.Context, addr string, log *slog.Logger) (net.Listener, error) {
	lc := net.ListenConfig{KeepAliveConfig: keepAlive}
	lc.SetMultipathTCP(false)
	// First alone: sharing hides that the port is in use.
	l, err := lc.Listen(ctx, "tcp", addr)
	if err == nil {
		raw, err := l.(*net.TCPListener).SyscallConn()
		if err == nil {
			err = sharePort(raw)
		}
		if err != nil {
			l.Close()
			return nil, fmt.Errorf("let a later agent share %s: %w", addr, err)
		}
		return l, nil
	}
	if !errors.Is(err, syscall.EADDRINUSE) {
		return nil, err
	}
	lc.Control = func(_, _ string, c syscall.RawConn) error { return sharePort(c) }
	l, shareErr := lc.Listen(ctx, "tcp", addr)
	if shareErr != nil {
		return nil, err
	}
	log.Info("another process of this user listens there too: sharing the port", "address", addr)
	return l, nil
}

func sharePort(c syscall.RawConn) (err error) {
	controlErr := c.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
	})
	return errors.Join(controlErr, err)
}

// takeTime bounds asking for a socket: the other agent may hang.
const takeTime = 2 * time.Second

// take asks for the socket. The error is ECONNREFUSED when there is nobody.
func (l *listener) take(ctx context.Context, name *net.UnixAddr) error {
	ctx, cancel := context.WithTimeout(ctx, takeTime)
	defer cancel()
	nc, err := new(net.Dialer).DialContext(ctx, "unix", name.Name)
	if err != nil {
		return err
	}
	defer nc.Close()
	c := nc.(*net.UnixConn)
	if err := sameUser(c); err != nil {
		return err
	}
	deadline, _ := ctx.Deadline()
	c.SetDeadline(deadline)
	data, rights := make([]byte, 1), make([]byte, unix.CmsgSpace(2*4))
	_, n, _, _, err := c.ReadMsgUnix(data, rights)
	if err != nil {
		return err
	}
	fds, err := parseRights(rights[:n])
	if err != nil {
		return err
	}
	var files []*os.File
	for _, fd := range fds {
		f := os.NewFile(uintptr(fd), "listener")
		defer f.Close()
		files = append(files, f)
	}
	if len(files) != 2 {
		return fmt.Errorf("got %d sockets, want 2", len(files))
	}
	tcp, err := net.FileListener(files[0])
	if err != nil {
		return err
	}
	asked, err := net.FileListener(files[1])
	if err != nil {
		tcp.Close()
		return err
	}
	_, isTCP := tcp.(*net.TCPListener)
	unixListener, isUnix := asked.(*net.UnixListener)
	if !isTCP || !isUnix {
		tcp.Close()
		asked.Close()
		return fmt.Errorf("got sockets of the kinds %T and %T", tcp, asked)
	}
	l.Listener, l.asked = tcp, unixListener
	return nil
}

func parseRights(b []byte) (fds []int, err error) {
	messages, err := unix.ParseSocketControlMessage(b)
	if err != nil {
		return nil, err
	}
	for i := range messages {
		got, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			return nil, err
		}
		for _, fd := range got {
			unix.CloseOnExec(fd)
		}
		fds = append(fds, got...)
	}
	return fds, nil
}

// sameUser: sockets pass between processes of one user only, as SO_REUSEPORT
// has it.
func sameUser(c *net.UnixConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var peer *unix.Ucred
	var optErr error
	if err := raw.Control(func(fd uintptr) { peer, optErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return err
	}
	if optErr != nil {
		return optErr
	}
	if me := os.Geteuid(); int(peer.Uid) != me {
		return fmt.Errorf("the other process is of user %d, this one of %d", peer.Uid, me)
	}
	return nil
}

// give answers those who ask until close.
func (l *listener) give() {
	// The name may be shared with the agent that it was taken from.
	l.asked.SetUnlinkOnClose(false)
	l.giving.Go(func() {
		for {
			c, err := l.asked.AcceptUnix()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				l.log.Warn("cannot hear an agent that wants to take over", "address", l.Addr(), "error", err)
				time.Sleep(100 * time.Millisecond) // out of descriptors, most likely
				continue
			}
			c.SetDeadline(time.Now().Add(takeTime))
			if err := l.giveTo(c); err != nil {
				l.log.Warn("cannot hand over the socket", "address", l.Addr(), "error", err)
			} else {
				l.given.Store(true)
				l.log.Info("another agent takes over", "address", l.Addr())
			}
			c.Close()
		}
	})
}

func (l *listener) giveTo(c *net.UnixConn) error {
	if err := sameUser(c); err != nil {
		return err
	}
	tcp, err := l.Listener.(*net.TCPListener).SyscallConn()
	if err != nil {
		return err
	}
	asked, err := l.asked.SyscallConn()
	if err != nil {
		return err
	}
	// Not File, which would make the sockets block for a moment.
	var sent error
	err = tcp.Control(func(tcpFD uintptr) {
		err := asked.Control(func(askedFD uintptr) {
			_, _, sent = c.WriteMsgUnix([]byte{0}, unix.UnixRights(int(tcpFD), int(askedFD)), nil)
		})
		sent = errors.Join(sent, err)
	})
	return errors.Join(err, sent)
}

// close stops to hand the socket over. It is called before the TCP listener is
// closed.
func (l *listener) close() {
	if l.asked != nil {
		l.asked.Close()
		l.giving.Wait()
	}
}
