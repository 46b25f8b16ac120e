package bench

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// caller is the worker process that plays the clients of a gateway. In an open
// loop, calls are due at times that are known in advance, at random distances
// (a Poisson process), whatever has become of the earlier ones; each takes an
// idle connection or opens one. In a closed loop, every connection calls again
// as soon as it has its answer. It follows the same commands as client, with a
// CallReport at the end, and is ready when the first answer has arrived.
type caller struct {
	poller *poller
	clock  clock
	sa     unix.Sockaddr
	call   *numbered
	answer *numbered

	arrivals *arrivals // nil in a closed loop
	limit    int       // connections
	conns    []*callConn
	idle     []*callConn // the one used last is on top
	waiting  []int64     // when calls are due, in order
	made     int         // of waiting
	open     int
	number   uint32

	ready    bool
	measured window
	failures int
	report   CallReport
	latency  histogram
	buf      [64 << 10]byte
}

// callConn is a connection of the caller, with at most one call on it.
type callConn struct {
	fd        int
	connected bool
	busy      bool
	due       int64  // of the call
	number    uint32 // of the call
	in        []byte
}

// window is the time that is measured. It is open while to is 0; the zero
// value holds nothing.
type window struct{ from, to int64 }

func (w window) holds(t int64) bool {
	return w.from != 0 && t >= w.from && (w.to == 0 || t < w.to)
}

// CallReport is what the callers saw. Calls count by the time they were due,
// Answers by the time they arrived; Bad and Lost count from the first call on.
type CallReport struct {
	Seconds float64 `json:"seconds"`
	Calls   uint64  `json:"calls"`
	Answers uint64  `json:"answers"`
	// Unanswered calls had no answer a second after the end; their latency is
	// counted as what they had waited by then.
	Unanswered uint64 `json:"unanswered,omitempty"`
	// Bad is the number of wrong answers, Lost that of calls whose connection
	// failed or was closed by the other end.
	Bad  int `json:"bad"`
	Lost int `json:"lost"`
	// Fault describes the first of them.
	Fault string `json:"fault,omitempty"`
	// Connections is the highest number of them at one time.
	Connections int     `json:"connections"`
	Latency     Latency `json:"latency_us"`
}

// arrivals are the times at which calls are due: a Poisson process.
type arrivals struct {
	random   *rand.Rand
	distance float64 // mean, in ns
	at       float64
}

func newArrivals(rate float64, seed uint64, start int64) *arrivals {
	return &arrivals{random: rand.New(rand.NewPCG(seed, 1)), distance: float64(time.Second) / rate, at: float64(start)}
}

// next returns when the next call is due.
func (a *arrivals) next() int64 {
	a.at += a.random.ExpFloat64() * a.distance
	return int64(a.at)
}

// maxFailures ends a caller whose calls keep failing.
const maxFailures = 10_000

// drainTime is how long after the end answers are waited for.
const drainTime = time.Second

// runCaller calls and follows the commands on standard input. rate 0 is a
// closed loop.
func runCaller(addr string, rate float64, connections int, seed uint64) error {
	if connections < 1 || rate < 0 {
		return fmt.Errorf("%v calls a second over %d connections: want a positive number of both", rate, connections)
	}
	c := &caller{limit: connections, call: newCall(), answer: newAnswer()}
	var err error
	if c.sa, err = socketAddr(addr); err != nil {
		return err
	}
	if c.clock, err = newClock(); err != nil {
		return err
	}
	if c.poller, err = newPoller(); err != nil {
		return err
	}
	if err := c.poller.add(0); err != nil {
		return fmt.Errorf("standard input must be a pipe: %w", err)
	}
	// Sleeps end when they should: by default they may take 50 us longer.
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("PR_SET_TIMERSLACK: %w", err)
	}
	if rate > 0 {
		c.arrivals = newArrivals(rate, seed, c.clock.now())
	}
	return c.serve()
}

func (c *caller) serve() error {
	next := int64(0)
	if c.arrivals != nil {
		next = c.arrivals.next()
	}
	for {
		now := c.clock.now()
		wait := time.Second
		switch {
		case c.measured.to != 0:
			// No further calls.
		case c.arrivals == nil:
			for c.open < c.limit && c.failures < maxFailures {
				c.due(now)
				c.make(now)
			}
		default:
			for ; next <= now; next = c.arrivals.next() {
				c.waiting = append(c.waiting, next)
				c.due(next)
			}
			wait = time.Duration(next - c.clock.now())
		}
		for c.made < len(c.waiting) && (len(c.idle) > 0 || c.open < c.limit) && c.failures < maxFailures {
			c.made++
			c.make(c.waiting[c.made-1])
		}
		if c.failures >= maxFailures || !c.ready && c.failures > 0 {
			return fmt.Errorf("%d calls failed, the first because: %s", c.failures, c.report.Fault)
		}
		if end := c.measured.to; end != 0 {
			wait = time.Duration(end + int64(drainTime) - now)
			if wait <= 0 || len(c.idle) == c.open && c.made == len(c.waiting) {
				return c.finish(now)
			}
		}
		events, err := c.poller.wait(wait)
		if err != nil {
			return err
		}
		for i := range events {
			fd := int(events[i].Fd)
			if fd != 0 {
				if conn := c.conns[fd]; conn != nil {
					c.handle(conn)
				}
				continue
			}
			switch command, err := readCommand(); {
			case err != nil:
				return err
			case command == "start":
				c.report.Calls, c.report.Answers, c.report.Connections = 0, 0, c.open
				c.latency = histogram{}
				c.measured.from = c.clock.now()
			case command == "stop":
				c.measured.to = c.clock.now()
			}
		}
	}
}

// due counts a call by when it is due.
func (c *caller) due(t int64) {
	if c.measured.holds(t) {
		c.report.Calls++
	}
}

// make makes a call over an idle connection, or a new one, which must be
// allowed.
func (c *caller) make(due int64) {
	if n := len(c.idle); n > 0 {
		conn := c.idle[n-1]
		c.idle = c.idle[:n-1]
		c.send(conn, due)
		return
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	}
	if err == nil {
		if err = unix.Connect(fd, c.sa); err == unix.EINPROGRESS {
			err = nil
		}
	}
	if err == nil {
		err = c.poller.addOutput(fd)
	}
	if err != nil {
		if fd >= 0 {
			unix.Close(fd)
		}
		c.fail(&c.report.Lost, due, fmt.Sprintf("cannot connect: %v", err))
		return
	}
	for len(c.conns) <= fd {
		c.conns = append(c.conns, nil)
	}
	c.open++
	c.report.Connections = max(c.report.Connections, c.open)
	c.conns[fd] = &callConn{fd: fd, busy: true, due: due, in: make([]byte, 0, 2048)}
}

// send puts a call on a connection.
func (c *caller) send(conn *callConn, due int64) {
	c.number = (c.number + 1) % callNumbers
	conn.busy, conn.due, conn.number = true, due, c.number+100_000_000
	text := c.call.with(conn.number)
	if n, errno := send(conn.fd, text); errno != 0 || n != len(text) {
		c.lose(conn, &c.report.Lost, fmt.Sprintf("sent %d of %d bytes of a call: %v", n, len(text), errno))
	}
}

// handle takes what has happened on a connection.
func (c *caller) handle(conn *callConn) {
	if !conn.connected {
		errno, err := unix.GetsockoptInt(conn.fd, unix.SOL_SOCKET, unix.SO_ERROR)
		if err == nil && errno != 0 {
			err = unix.Errno(errno)
		}
		if err == nil {
			err = c.poller.inputOnly(conn.fd)
		}
		if err != nil {
			c.lose(conn, &c.report.Lost, fmt.Sprintf("cannot connect: %v", err))
			return
		}
		conn.connected = true
		c.send(conn, conn.due)
		return
	}
	n, errno := recv(conn.fd, c.buf[:])
	if errno == unix.EAGAIN || errno == unix.EINTR {
		return
	}
	now := c.clock.now()
	if errno != 0 || n == 0 {
		c.lose(conn, &c.report.Lost, fmt.Sprintf("connection ended after %d bytes of an answer: %v", len(conn.in), errno))
		return
	}
	conn.in = append(conn.in, c.buf[:n]...)
	a, length, err := parseAnswer(conn.in)
	if err == nil && length == 0 && len(conn.in) <= maxAnswer {
		return
	}
	want := c.answer.with(conn.number)[c.answer.body:]
	switch {
	case !conn.busy || err == nil && length != len(conn.in):
		err = fmt.Errorf("bytes that belong to no answer: %.300q", conn.in)
	case err == nil && (a.status != 200 || !bytes.Equal(a.body, want)):
		err = fmt.Errorf("wrong answer to call %d: %.1000q", conn.number, conn.in)
	}
	if err != nil {
		c.lose(conn, &c.report.Bad, err.Error())
		return
	}
	c.answered(conn.due, now)
	conn.in = conn.in[:0]
	if a.close {
		c.close(conn)
		return
	}
	c.release(conn, now)
}

// answered counts an answer.
func (c *caller) answered(due, now int64) {
	if !c.ready {
		c.ready = true
		fmt.Println("ready")
	}
	if c.measured.holds(now) {
		c.report.Answers++
	}
	if c.measured.holds(due) {
		c.latency.record((now - due) / 1000)
	}
}

// release gives a connection its next call, or none.
func (c *caller) release(conn *callConn, now int64) {
	switch {
	case c.made < len(c.waiting):
		due := c.waiting[c.made]
		c.made++
		c.send(conn, due)
	case c.arrivals == nil && c.measured.to == 0:
		c.due(now)
		c.send(conn, now)
	default:
		conn.busy = false
		c.idle = append(c.idle, conn)
	}
}

// lose gives a connection up. It is a fault only when there is a call on it.
func (c *caller) lose(conn *callConn, count *int, why string) {
	busy, due := conn.busy, conn.due
	c.close(conn)
	if busy || count == &c.report.Bad {
		c.fail(count, due, why)
	}
}

func (c *caller) close(conn *callConn) {
	for i, idle := range c.idle {
		if idle == conn {
			c.idle = append(c.idle[:i], c.idle[i+1:]...)
			break
		}
	}
	c.conns[conn.fd] = nil
	unix.Close(conn.fd)
	c.open--
}

// fail counts a call that has failed.
func (c *caller) fail(count *int, due int64, why string) {
	if c.report.Fault == "" {
		c.report.Fault = why
		fmt.Fprintf(os.Stderr, "caller: %s\n", why)
	}
	*count++
	c.failures++
}

func (c *caller) finish(now int64) error {
	unanswered := func(due int64) {
		if c.measured.holds(due) {
			c.report.Unanswered++
			c.latency.record((now - due) / 1000)
		}
	}
	for _, conn := range c.conns {
		if conn != nil && conn.busy {
			unanswered(conn.due)
		}
	}
	for _, due := range c.waiting[c.made:] {
		unanswered(due)
	}
	c.report.Seconds = float64(c.measured.to-c.measured.from) / 1e9
	c.report.Latency = c.latency.summary()
	if err := json.NewEncoder(os.Stdout).Encode(&c.report); err != nil {
		return err
	}
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}
