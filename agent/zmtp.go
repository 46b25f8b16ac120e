package agent

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"time"
)

// zmtpConn is one connection to a ZeroMQ socket: the client's side of ZMTP 3.0
// with the NULL mechanism, as SUB, DEALER or REQ. dialZMTP makes it; one
// goroutine uses it and closes it. The end of the context that it was dialled
// with closes it too, which ends a call that waits.
//
// It is here because whoever is at the other end must not be able to harm the
// agent. The client of github.com/go-zeromq/zmq4 v0.17 makes room for whatever
// size a frame announces before a byte of it has come, reads beyond the end of
// a malformed READY, waits for a handshake without a limit, and dials again
// from within the read that failed: a publisher could crash it with a few
// bytes. A message is bounded here, takes memory only as it arrives, and
// what waits lies in the kernel's buffers, whose limits make the publisher drop
// instead.
type zmtpConn struct {
	conn   net.Conn
	r      *bufio.Reader
	unhook func() bool // of the context
	limits zmtpLimits

	buf    []byte // the message received last
	ends   []int  // of its frames in buf
	frames [][]byte
	out    []byte
	// waiting: receive has seen nothing of a message yet. Until patience it may.
	waiting  bool
	patience time.Time // zero is no bound
}

// zmtpLimits bound one message, and the time from its first byte to its last.
type zmtpLimits struct {
	bytes, frames int
	time          time.Duration
}

// zmtpHandshake bounds connecting and the handshake, zmtpWrite sending.
const (
	zmtpHandshake = 5 * time.Second
	zmtpWrite     = 5 * time.Second
)

// zmtpKept is the largest buffer that is kept for the next message.
const zmtpKept = 1 << 20

// maxZMTPCommand bounds a command: READY holds two properties, PING 18 bytes.
const maxZMTPCommand = 4 << 10

// The flags of a frame.
const (
	zmtpMore    = 1
	zmtpLong    = 2
	zmtpCommand = 4
)

// zmtpPeers are the sockets that each kind of ours can talk to.
var zmtpPeers = map[string][]string{
	"SUB":    {"PUB", "XPUB"},
	"DEALER": {"ROUTER", "REP", "DEALER"},
	"REQ":    {"REP", "ROUTER"},
}

var zmtpDialer = net.Dialer{
	Timeout: zmtpHandshake,
	// A publisher that is gone without a word is noticed within a minute.
	KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 20 * time.Second, Interval: 10 * time.Second, Count: 3},
}

// dialZMTP connects a socket of a kind to a peer that has bound an address.
func dialZMTP(ctx context.Context, network, address, kind string, limits zmtpLimits) (*zmtpConn, error) {
	limited, cancel := context.WithTimeout(ctx, zmtpHandshake)
	defer cancel()
	conn, err := zmtpDialer.DialContext(limited, network, address)
	if err != nil {
		return nil, plainNetError(err)
	}
	c := newZMTPConn(conn, limits)
	c.unhook = context.AfterFunc(ctx, func() { conn.Close() })
	if err = conn.SetDeadline(time.Now().Add(zmtpHandshake)); err == nil {
		if err = c.shakeHands(kind); err == nil {
			err = conn.SetDeadline(time.Time{})
		}
	}
	if err != nil {
		c.close()
		return nil, fmt.Errorf("no ZeroMQ handshake: %w", err)
	}
	return c, nil
}

func newZMTPConn(conn net.Conn, limits zmtpLimits) *zmtpConn {
	return &zmtpConn{conn: conn, r: bufio.NewReaderSize(conn, 16<<10), limits: limits}
}

// plainNetError leaves the addresses out, of which one differs each time.
func plainNetError(err error) error {
	if op := (*net.OpError)(nil); errors.As(err, &op) {
		return op.Err
	}
	return err
}

// plainReadError is plainNetError, and tells an end in words.
func plainReadError(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errors.New("the other end has closed the connection")
	}
	return plainNetError(err)
}

func (c *zmtpConn) close() {
	if c.unhook != nil {
		c.unhook()
	}
	c.conn.Close()
}

func (c *zmtpConn) shakeHands(kind string) error {
	// Signature, version 3.0, mechanism NULL, as client; the rest is zero.
	greeting := make([]byte, 64)
	greeting[0], greeting[9], greeting[10] = 0xff, 0x7f, 3
	copy(greeting[12:], "NULL")
	ready := append([]byte{zmtpCommand, 0, 5}, "READY"...)
	ready = appendProperty(ready, "Socket-Type", kind)
	ready[1] = byte(len(ready) - 2)
	if _, err := c.conn.Write(append(greeting, ready...)); err != nil {
		return plainNetError(err)
	}
	var theirs [64]byte
	if _, err := io.ReadFull(c.r, theirs[:]); err != nil {
		return plainReadError(err)
	}
	if theirs[0] != 0xff || theirs[9] != 0x7f {
		return errors.New("the other end does not speak ZMTP")
	}
	if theirs[10] < 3 {
		return fmt.Errorf("the other end speaks ZMTP %d; want 3 (libzmq 4)", theirs[10])
	}
	if mechanism := cString(theirs[12:32]); mechanism != "NULL" {
		return fmt.Errorf("the other end wants the security mechanism %q; only NULL is spoken", mechanism)
	}
	flags, body, err := c.readFrame(nil, maxZMTPCommand)
	if err != nil {
		return plainReadError(err)
	}
	name, properties, ok := splitCommand(body)
	switch {
	case flags&zmtpCommand == 0 || flags&zmtpMore != 0 || !ok:
		return errors.New("the other end breaks the protocol: READY does not follow its greeting")
	case name == "ERROR":
		return fmt.Errorf("the other end refuses: %.200q", cString(properties[min(1, len(properties)):]))
	case name != "READY":
		return fmt.Errorf("the other end breaks the protocol: %.20q where READY belongs", name)
	}
	peer, err := socketType(properties)
	if err != nil {
		return err
	}
	if !slices.Contains(zmtpPeers[kind], peer) {
		return fmt.Errorf("the other end is a %.20s socket; want one of %v", peer, zmtpPeers[kind])
	}
	return nil
}

func cString(b []byte) string {
	if i := slices.Index(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}

func appendProperty(dst []byte, name, value string) []byte {
	dst = append(append(dst, byte(len(name))), name...)
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(value)))
	return append(dst, value...)
}

// splitCommand returns the name of a command and what follows it.
func splitCommand(body []byte) (name string, rest []byte, ok bool) {
	if len(body) == 0 || len(body) < 1+int(body[0]) {
		return "", nil, false
	}
	n := 1 + int(body[0])
	return string(body[1:n]), body[n:], true
}

// socketType finds the kind of socket among the properties of READY, whose names
// are in any case.
func socketType(p []byte) (string, error) {
	for len(p) > 0 {
		name, rest, ok := splitCommand(p)
		if !ok || len(rest) < 4 || uint64(len(rest)-4) < uint64(binary.BigEndian.Uint32(rest)) {
			return "", errors.New("the other end breaks the protocol: malformed READY")
		}
		n := 4 + int(binary.BigEndian.Uint32(rest))
		if equalFoldASCII(name, "socket-type") {
			return string(rest[4:n]), nil
		}
		p = rest[n:]
	}
	return "", errors.New("the other end breaks the protocol: READY without a socket type")
}

func equalFoldASCII(a, b string) bool {
	return slices.EqualFunc([]byte(a), []byte(b), func(x, y byte) bool {
		if 'A' <= x && x <= 'Z' {
			x += 'a' - 'A'
		}
		return x == y
	})
}

// subscribe asks a PUB socket for what begins with a topic. ZMTP 3.0 has it as a
// message.
func (c *zmtpConn) subscribe(topic string) error {
	return c.send(append([]byte{1}, topic...))
}

// send sends one message.
func (c *zmtpConn) send(frames ...[]byte) error {
	c.out = c.out[:0]
	for i, f := range frames {
		flags := byte(0)
		if i < len(frames)-1 {
			flags = zmtpMore
		}
		c.out = appendFrame(c.out, flags, f)
	}
	return c.write()
}

func appendFrame(dst []byte, flags byte, body []byte) []byte {
	if len(body) > 255 {
		dst = append(dst, flags|zmtpLong)
		dst = binary.BigEndian.AppendUint64(dst, uint64(len(body)))
	} else {
		dst = append(dst, flags, byte(len(body)))
	}
	return append(dst, body...)
}

func (c *zmtpConn) write() error {
	if err := c.conn.SetWriteDeadline(time.Now().Add(zmtpWrite)); err != nil {
		return err
	}
	if _, err := c.conn.Write(c.out); err != nil {
		return plainNetError(err)
	}
	return nil
}

// until bounds how long the next receive waits for a message to begin; zero is
// no bound.
func (c *zmtpConn) until(t time.Time) error {
	c.patience = t
	return c.conn.SetReadDeadline(t)
}

// receive returns the frames of the next message. They are valid until the next
// call. After an error the connection is of no more use, but for
// os.ErrDeadlineExceeded before anything of a message has come.
func (c *zmtpConn) receive() ([][]byte, error) {
	if cap(c.buf) > zmtpKept {
		c.buf = nil
	}
	c.buf, c.ends = c.buf[:0], c.ends[:0]
	for {
		was := len(c.buf)
		if was == 0 && len(c.ends) == 0 {
			// Waiting takes nothing away, so that it can be given up.
			c.waiting = true
			if _, err := c.r.Peek(1); err != nil {
				return nil, plainReadError(err)
			}
			c.waiting = false
			if err := c.conn.SetReadDeadline(time.Now().Add(c.limits.time)); err != nil {
				return nil, err
			}
		}
		flags, buf, err := c.readFrame(c.buf, c.limits.bytes-was)
		if err != nil {
			return nil, fmt.Errorf("in a message: %w", plainReadError(err))
		}
		c.buf = buf
		if flags&zmtpCommand != 0 {
			if err := c.obey(c.buf[was:]); err != nil {
				return nil, err
			}
			c.buf = c.buf[:was]
			if len(c.ends) == 0 {
				// It is still waited for a message, and not for longer, however
				// many commands come: a publisher may send a PING each second.
				c.waiting = true
				if !c.patience.IsZero() && time.Now().After(c.patience) {
					return nil, os.ErrDeadlineExceeded
				}
				if err := c.until(c.patience); err != nil {
					return nil, err
				}
			}
			continue
		}
		c.ends = append(c.ends, len(c.buf))
		if flags&zmtpMore == 0 {
			break
		}
		if len(c.ends) >= c.limits.frames {
			return nil, fmt.Errorf("a message has more than %d parts", c.limits.frames)
		}
	}
	c.frames = c.frames[:0]
	from := 0
	for _, end := range c.ends {
		c.frames = append(c.frames, c.buf[from:end:end])
		from = end
	}
	return c.frames, nil
}

// obey does what a command between messages asks for: PING wants a PONG with the
// same context behind two bytes of a time.
func (c *zmtpConn) obey(body []byte) error {
	name, rest, ok := splitCommand(body)
	if !ok {
		return errors.New("the other end breaks the protocol: malformed command")
	}
	if name != "PING" {
		return nil
	}
	pong := append([]byte{4}, "PONG"...)
	pong = append(pong, rest[min(2, len(rest)):]...)
	c.out = appendFrame(c.out[:0], zmtpCommand, pong[:min(len(pong), 5+16)])
	return c.write()
}

// readFrame appends the body of the next frame to dst, growing it as the bytes
// arrive.
func (c *zmtpConn) readFrame(dst []byte, most int) (flags byte, _ []byte, err error) {
	var head [9]byte
	if _, err := io.ReadFull(c.r, head[:2]); err != nil {
		return 0, dst, err
	}
	flags = head[0]
	size := uint64(head[1])
	if flags&zmtpLong != 0 {
		if _, err := io.ReadFull(c.r, head[2:9]); err != nil {
			return 0, dst, err
		}
		size = binary.BigEndian.Uint64(head[1:9])
	}
	if flags&zmtpCommand != 0 {
		most = maxZMTPCommand
	}
	if flags&^(zmtpMore|zmtpLong|zmtpCommand) != 0 {
		return 0, dst, fmt.Errorf("the other end breaks the protocol: flags %#x", flags)
	}
	if size > uint64(max(most, 0)) {
		return 0, dst, fmt.Errorf("a message is larger than allowed: %d more bytes, at most %d", size, most)
	}
	for left := int(size); left > 0; {
		n := min(left, max(64<<10, len(dst)))
		was := len(dst)
		dst = slices.Grow(dst, n)[:was+n]
		if _, err := io.ReadFull(c.r, dst[was:]); err != nil {
			return 0, dst[:was], err
		}
		left -= n
	}
	return flags, dst, nil
}
