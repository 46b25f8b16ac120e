package agent

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
)

var testLimits = zmtpLimits{bytes: 1 << 20, frames: 4, time: patience}

// patience is how long a test waits for what must come.
const patience = 30 * time.Second

// bound is the address that a socket of zmq4 has bound.
func bound(t *testing.T, s zmq4.Socket, endpoint string) string {
	t.Helper()
	t.Cleanup(func() { s.Close() })
	if err := s.Listen(endpoint); err != nil {
		t.Fatal(err)
	}
	return s.Addr().String()
}

func dial(t *testing.T, network, address, kind string, limits zmtpLimits) *zmtpConn {
	t.Helper()
	c, err := dialZMTP(t.Context(), network, address, kind, limits)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.close)
	if err := c.until(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	return c
}

func received(t *testing.T, c *zmtpConn) string {
	t.Helper()
	frames, err := c.receive()
	if err != nil {
		t.Fatal(err)
	}
	var texts []string
	for _, f := range frames {
		if len(f) > 100 {
			texts = append(texts, fmt.Sprintf("%d bytes", len(f)))
		} else {
			texts = append(texts, fmt.Sprintf("%q", f))
		}
	}
	return strings.Join(texts, " ")
}

// TestZMTPWithZMQ4 speaks with the sockets of another implementation.
func TestZMTPWithZMQ4(t *testing.T) {
	t.Run("SUB", func(t *testing.T) {
		for _, endpoint := range []string{"tcp://127.0.0.1:0", "tcp://[::1]:0", "ipc://" + filepath.Join(t.TempDir(), "pub")} {
			if strings.Contains(endpoint, "::1") && !hasIPv6() {
				continue
			}
			pub := zmq4.NewPub(context.Background())
			address := bound(t, pub, endpoint)
			network := "tcp"
			if strings.HasPrefix(endpoint, "ipc") {
				network, address = "unix", endpoint[len("ipc://"):]
			}
			c := dial(t, network, address, "SUB", testLimits)
			if err := c.subscribe("kv"); err != nil {
				t.Fatal(err)
			}
			// The publisher drops what it sends before it has heard of it.
			stop := make(chan struct{})
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				for {
					_ = pub.SendMulti(zmq4.NewMsgFrom([]byte("other"), []byte("x")))
					_ = pub.SendMulti(zmq4.NewMsgFrom([]byte("kv"), binary.BigEndian.AppendUint64(nil, 7), make([]byte, 70000)))
					select {
					case <-stop:
						return
					case <-time.After(10 * time.Millisecond):
					}
				}
			}()
			for range 3 {
				if got, want := received(t, c), `"kv" "\x00\x00\x00\x00\x00\x00\x00\a" 70000 bytes`; got != want {
					t.Errorf("%s: got %s, want %s", endpoint, got, want)
				}
			}
			close(stop)
			<-ended
			pub.Close()
			for {
				if _, err := c.receive(); err != nil {
					if !strings.Contains(err.Error(), "closed") && !strings.Contains(err.Error(), "reset") {
						t.Errorf("%s: %v", endpoint, err)
					}
					break
				}
			}
		}
	})
	t.Run("DEALER", func(t *testing.T) {
		router := zmq4.NewRouter(context.Background())
		c := dial(t, "tcp", bound(t, router, "tcp://127.0.0.1:0"), "DEALER", testLimits)
		for round := range 3 {
			if err := c.send(nil, []byte{byte(round)}); err != nil {
				t.Fatal(err)
			}
			msg, err := router.Recv()
			if err != nil || len(msg.Frames) != 3 || len(msg.Frames[1]) != 0 || msg.Frames[2][0] != byte(round) {
				t.Fatalf("the router has %v, %v", msg, err)
			}
			for i := range 3 {
				if err := router.SendMulti(zmq4.NewMsgFrom(msg.Frames[0], nil, []byte(fmt.Sprint(round, i)))); err != nil {
					t.Fatal(err)
				}
			}
			for i := range 3 {
				if got, want := received(t, c), fmt.Sprintf(`"" "%d %d"`, round, i); got != want {
					t.Errorf("got %s, want %s", got, want)
				}
			}
		}
	})
	t.Run("REQ", func(t *testing.T) {
		rep := zmq4.NewRep(context.Background())
		c := dial(t, "tcp", bound(t, rep, "tcp://127.0.0.1:0"), "REQ", testLimits)
		if err := c.send(nil, []byte("snapshot")); err != nil {
			t.Fatal(err)
		}
		msg, err := rep.Recv()
		if err != nil || string(msg.Bytes()) != "snapshot" {
			t.Fatalf("the other end has %v, %v", msg, err)
		}
		if err := rep.SendMulti(zmq4.NewMsgFrom([]byte("a"), []byte("b"), []byte("c"))); err != nil {
			t.Fatal(err)
		}
		if got, want := received(t, c), `"" "a" "b" "c"`; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	})
	t.Run("wrong socket", func(t *testing.T) {
		rep := zmq4.NewRep(context.Background())
		_, err := dialZMTP(t.Context(), "tcp", bound(t, rep, "tcp://127.0.0.1:0"), "SUB", testLimits)
		if err == nil || !strings.Contains(err.Error(), "REP socket") {
			t.Errorf("got %v", err)
		}
	})
}

func hasIPv6() bool {
	l, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		return false
	}
	l.Close()
	return true
}

// peer accepts one connection, and is what do makes of it. The greeting of
// another client has been read when do begins.
func peer(t *testing.T, do func(net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		do(conn)
	}()
	t.Cleanup(func() { l.Close(); <-ended })
	return l.Addr().String()
}

// greets is what a PUB socket of libzmq 4 begins with.
func greets() []byte {
	g := make([]byte, 64)
	g[0], g[8], g[9], g[10], g[11] = 0xff, 1, 0x7f, 3, 1
	copy(g[12:], "NULL")
	return append(g, readyAs("PUB")...)
}

func readyAs(kind string) []byte {
	ready := append([]byte{5}, "READY"...)
	ready = appendProperty(ready, "Identity", "")
	return appendFrame(nil, zmtpCommand, appendProperty(ready, "socket-TYPE", kind))
}

// TestZMTPHandshakeFails: each answer that is none, and what people read then.
func TestZMTPHandshakeFails(t *testing.T) {
	f := func(answer []byte, want string) {
		t.Helper()
		address := peer(t, func(c net.Conn) {
			_, _ = c.Write(answer)
			if tcp, ok := c.(*net.TCPConn); ok {
				_ = tcp.CloseWrite()
			}
			_, _ = io.Copy(io.Discard, c)
		})
		_, err := dialZMTP(t.Context(), "tcp", address, "SUB", testLimits)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.20q...: got %v, want %s", answer, err, want)
		}
	}
	whole := greets()
	with := func(at int, b ...byte) []byte {
		g := bytes.Clone(whole)
		copy(g[at:], b)
		return g
	}
	command := func(body string) []byte { return append(whole[:64:64], appendFrame(nil, zmtpCommand, []byte(body))...) }

	f(nil, "closed")
	f(whole[:30], "closed")
	f([]byte("HTTP/1.1 400 Bad Request\r\n\r\n"+strings.Repeat(" ", 64)), "does not speak ZMTP")
	f(with(10, 2), "speaks ZMTP 2; want 3")
	f(with(12, []byte("CURVE")...), `security mechanism "CURVE"`)
	f(append(whole[:64:64], readyAs("ROUTER")...), "is a ROUTER socket")
	f(command("\x05READY"), "without a socket type")
	f(command("\x05READY\x0bSocket-Type\x00\x00\x00\x09PUB"), "malformed READY")
	f(command("\x05READY\xffSocket-Type"), "malformed READY")
	f(command("\x05READY\x0bSocket-Type\xff\xff\xff\xffPUB"), "malformed READY")
	f(command("\x05ERROR\x04no!!"), `refuses: "no!!"`)
	f(command("\x05ERROR"), `refuses: ""`)
	f(command("\x05HELLO"), `"HELLO" where READY belongs`)
	f(command("\xffREADY"), "READY does not follow")
	f(command(""), "READY does not follow")
	f(append(whole[:64:64], 0, 1, 'x'), "READY does not follow")
	// A command of four exabytes.
	f(append(whole[:64:64], 6, 0x3f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff), "larger than allowed")

	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	if _, err := dialZMTP(t.Context(), "tcp", l.Addr().String(), "SUB", testLimits); err == nil || !strings.Contains(err.Error(), "refused") || strings.Contains(err.Error(), "127.0.0.1") {
		t.Errorf("got %v", err)
	}
}

// TestZMTPBoundsMessages: what is too large ends the connection before memory
// is taken for it, and what is announced takes none before it comes.
func TestZMTPBoundsMessages(t *testing.T) {
	f := func(frames []byte, limits zmtpLimits, want string) {
		t.Helper()
		address := peer(t, func(c net.Conn) {
			_, _ = c.Write(append(greets(), frames...))
			if tcp, ok := c.(*net.TCPConn); ok {
				_ = tcp.CloseWrite()
			}
			_, _ = io.Copy(io.Discard, c)
		})
		c := dial(t, "tcp", address, "SUB", limits)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := c.receive()
		runtime.ReadMemStats(&after)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
		if grown := after.TotalAlloc - before.TotalAlloc; grown > 8<<20 {
			t.Errorf("%s: took %d bytes", want, grown)
		}
	}
	huge := []byte{zmtpLong, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	f(huge, testLimits, "larger than allowed")
	f([]byte{zmtpLong, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, testLimits, "larger than allowed")
	// Many parts that are each small enough.
	f(bytes.Repeat([]byte{zmtpMore, 1, 'x'}, 10), testLimits, "more than 4 parts")
	part := appendFrame(nil, zmtpMore, make([]byte, 400<<10))
	f(bytes.Repeat(part, 3), testLimits, "larger than allowed")
	// A gigabyte is allowed and announced, and three bytes of it come.
	f([]byte{zmtpLong, 0, 0, 0, 0, 0x40, 0, 0, 0, 1, 2, 3}, zmtpLimits{2 << 30, 4, patience}, "closed")
	f([]byte{0x80, 1, 'x'}, testLimits, "flags 0x80")
	f([]byte{zmtpCommand, 0}, testLimits, "malformed command")
	f(append([]byte{zmtpCommand | zmtpLong}, huge[1:]...), testLimits, "larger than allowed")
}

// TestZMTPKeepsNoLargeBuffer: one large message does not stay in memory.
func TestZMTPKeepsNoLargeBuffer(t *testing.T) {
	stream := appendFrame(nil, 0, make([]byte, 8<<20))
	stream = appendFrame(stream, 0, []byte("x"))
	c := &zmtpConn{r: bufio.NewReader(bytes.NewReader(stream)), limits: zmtpLimits{16 << 20, 1, patience}, conn: deaf{}}
	for range 2 {
		if _, err := c.receive(); err != nil {
			t.Fatal(err)
		}
	}
	if n := cap(c.buf); n > zmtpKept {
		t.Errorf("%d bytes are kept", n)
	}
}

// TestZMTPAnswersPing: a PING between the parts of a message is answered with
// its context, and changes nothing.
func TestZMTPAnswersPing(t *testing.T) {
	pong := make(chan string, 1)
	address := peer(t, func(c net.Conn) {
		out := greets()
		out = appendFrame(out, zmtpMore, []byte("a"))
		out = appendFrame(out, zmtpCommand, []byte("\x04PING\x00\x0acontext"))
		out = appendFrame(out, zmtpCommand, []byte("\x05OTHER"))
		out = appendFrame(out, 0, []byte("b"))
		_, _ = c.Write(out)
		got := make([]byte, 64+2+6+27-5+2+5+7)
		_ = c.SetReadDeadline(time.Now().Add(patience))
		n, _ := io.ReadFull(c, got)
		pong <- string(got[:n])
	})
	c := dial(t, "tcp", address, "SUB", testLimits)
	if got, want := received(t, c), `"a" "b"`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	c.close()
	if got, want := <-pong, "\x04\x0c\x04PONGcontext"; !strings.HasSuffix(got, want) {
		t.Errorf("the other end has %q", got)
	}
}

// TestZMTPWaitsInSpiteOfPings: a peer that sends commands and no message, now and
// then or without a pause, does not hold up whoever waits for a time.
func TestZMTPWaitsInSpiteOfPings(t *testing.T) {
	for _, pause := range []time.Duration{0, time.Millisecond} {
		address := peer(t, func(c net.Conn) {
			_, _ = c.Write(greets())
			go func() { _, _ = io.Copy(io.Discard, c) }()
			ping := appendFrame(nil, zmtpCommand, []byte("\x04PING\x00\x0a"))
			for {
				if _, err := c.Write(ping); err != nil {
					return
				}
				time.Sleep(pause)
			}
		})
		c := dial(t, "tcp", address, "SUB", testLimits)
		for range 3 {
			_ = c.until(time.Now().Add(20 * time.Millisecond))
			ended := make(chan error, 1)
			go func() { _, err := c.receive(); ended <- err }()
			select {
			case err := <-ended:
				if !errors.Is(err, os.ErrDeadlineExceeded) || !c.waiting {
					t.Errorf("got %v, waiting: %v", err, c.waiting)
				}
			case <-time.After(patience):
				t.Error("the wait has no end")
			}
		}
		c.close()
	}
}

// TestZMTPMessageInTime: a message that stops halfway does not hold anybody for
// longer than one may take, though the wait for one has no end.
func TestZMTPMessageInTime(t *testing.T) {
	address := peer(t, func(c net.Conn) {
		_, _ = c.Write(append(greets(), 0, 10, 'x'))
		_, _ = io.Copy(io.Discard, c)
	})
	c := dial(t, "tcp", address, "SUB", zmtpLimits{100, 1, 10 * time.Millisecond})
	_ = c.until(time.Time{})
	if _, err := c.receive(); !errors.Is(err, os.ErrDeadlineExceeded) || c.waiting {
		t.Errorf("got %v, waiting: %v", err, c.waiting)
	}
}

// TestZMTPGivesUp: waits end in time, a wait that is given up loses nothing,
// and the end of the context ends one that waits.
func TestZMTPGivesUp(t *testing.T) {
	more := make(chan struct{})
	address := peer(t, func(c net.Conn) {
		_, _ = c.Write(greets())
		<-more
		_, _ = c.Write(appendFrame(nil, 0, []byte("late")))
		_, _ = io.Copy(io.Discard, c)
	})
	ctx, cancel := context.WithCancel(t.Context())
	c, err := dialZMTP(ctx, "tcp", address, "SUB", testLimits)
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	_ = c.until(time.Now().Add(time.Millisecond))
	if _, err := c.receive(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	close(more)
	_ = c.until(time.Now().Add(patience))
	if got := received(t, c); got != `"late"` {
		t.Errorf("got %s", got)
	}
	_ = c.until(time.Time{})
	ended := make(chan error, 1)
	go func() { _, err := c.receive(); ended <- err }()
	cancel()
	select {
	case err := <-ended:
		if err == nil {
			t.Error("a message came")
		}
	case <-time.After(patience):
		t.Error("the end of the context does not end the wait")
	}
}

// FuzzZMTP: whatever comes, nothing is read beyond it and memory stays bounded.
func FuzzZMTP(f *testing.F) {
	f.Add(greets())
	f.Add(append(greets(), appendFrame(appendFrame(nil, zmtpMore, []byte("topic")), 0, make([]byte, 300))...))
	f.Add(append(greets(), appendFrame(nil, zmtpCommand, []byte("\x04PING\x00\x0a"))...))
	f.Fuzz(func(t *testing.T, stream []byte) {
		limits := zmtpLimits{bytes: 1000, frames: 3, time: patience}
		c := &zmtpConn{conn: deaf{}, r: bufio.NewReader(bytes.NewReader(stream)), limits: limits}
		if c.shakeHands("SUB") != nil {
			return
		}
		for {
			frames, err := c.receive()
			if err != nil {
				return
			}
			size := 0
			for _, f := range frames {
				size += len(f)
			}
			if len(frames) == 0 || len(frames) > limits.frames || size > limits.bytes {
				t.Fatalf("%d parts of %d bytes", len(frames), size)
			}
		}
	})
}

// deaf takes whatever is sent.
type deaf struct{ net.Conn }

func (deaf) Write(b []byte) (int, error)      { return len(b), nil }
func (deaf) SetWriteDeadline(time.Time) error { return nil }
func (deaf) SetReadDeadline(time.Time) error  { return nil }
