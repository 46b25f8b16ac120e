package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// client is the worker process that plays all clients: each stream is one
// connection that asks for a response, reads and verifies it, and asks again.
// It is told when to measure through its standard input and reports through
// its standard output:
//
//	-> ready     every stream has received an event
//	<- start
//	<- stop
//	-> a ClientReport as one line of JSON
//
// Then it does nothing more, so that its CPU time can be read, and ends when
// its standard input does.
type client struct {
	poller  *poller
	clock   clock
	streams []stream
	byFD    []*stream
	chunks  uint32 // per response
	began   int    // streams with an event
	tally   tally
	report  ClientReport
	out     []byte
	buf     [64 << 10]byte
}

// stream is one connection of the client. It is not opened again when it is
// lost: a lost stream fails the measurement.
type stream struct {
	fd       int
	id       uint32
	began    bool
	response response
}

// tally counts what arrives. The client empties it when measuring starts.
type tally struct {
	chunks  uint64
	latency histogram
}

// ClientReport is what the clients saw while measuring; Bad and Lost count
// from the first request on.
type ClientReport struct {
	Seconds   float64 `json:"seconds"`
	Chunks    uint64  `json:"chunks"`
	Responses uint64  `json:"responses"`
	Reads     uint64  `json:"reads"`
	// Bad is the number of streams that received a wrong byte, Lost that of
	// connections that failed or were closed by the other end.
	Bad  int `json:"bad"`
	Lost int `json:"lost"`
	// Fault describes the first of them.
	Fault   string  `json:"fault,omitempty"`
	Latency Latency `json:"latency_us"`
}

// Latency is the time from the engine's send of a chunk to the client's
// receive, or from when a call was due to the end of its answer.
type Latency struct {
	P50  uint64 `json:"p50"`
	P99  uint64 `json:"p99"`
	P999 uint64 `json:"p999"`
	Max  uint64 `json:"max"`
}

// runClient opens the streams and follows the commands on standard input.
func runClient(addr string, streams int, chunks int) error {
	if streams < 1 || chunks < 1 {
		return fmt.Errorf("%d streams of %d chunks: both must be at least 1", streams, chunks)
	}
	sa, err := socketAddr(addr)
	if err != nil {
		return err
	}
	clock, err := newClock()
	if err != nil {
		return err
	}
	poller, err := newPoller()
	if err != nil {
		return err
	}
	if err := poller.add(0); err != nil {
		return fmt.Errorf("standard input must be a pipe: %w", err)
	}
	c := &client{poller: poller, clock: clock, chunks: uint32(chunks), streams: make([]stream, streams)}
	for i := range c.streams {
		// First responses are shortened by different amounts.
		first := 1 + (int64(chunks)*int64(i)/int64(streams)+int64(chunks)-1)%int64(chunks)
		if err := c.open(&c.streams[i], sa, uint32(i), uint32(first)); err != nil {
			return fmt.Errorf("stream %d of %d to %s: %w", i, streams, addr, err)
		}
	}
	return c.serve()
}

func (c *client) open(s *stream, sa unix.Sockaddr, id, first uint32) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("socket: %w", err)
	}
	if err := unix.Connect(fd, sa); err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1); err != nil {
		return fmt.Errorf("TCP_NODELAY: %w", err)
	}
	for len(c.byFD) <= fd {
		c.byFD = append(c.byFD, nil)
	}
	c.byFD[fd] = s
	s.fd, s.id = fd, id
	s.response.head = make([]byte, 0, 1024)
	c.ask(s, first)
	return c.poller.add(fd)
}

// ask sends a request for want chunks.
func (c *client) ask(s *stream, want uint32) {
	s.response.begin(s.id, want)
	c.out = appendRequest(c.out[:0], s.id, want)
	if n, errno := send(s.fd, c.out); errno != 0 || n != len(c.out) {
		c.lose(s, fmt.Sprintf("stream %d: sent %d of %d bytes of a request: %v", s.id, n, len(c.out), errno))
	}
}

// lose gives a stream up.
func (c *client) lose(s *stream, why string) {
	if c.report.Fault == "" {
		c.report.Fault = why
		fmt.Fprintf(os.Stderr, "client: %s\n", why)
	}
	c.report.Lost++
	c.byFD[s.fd] = nil
	unix.Close(s.fd)
}

func (c *client) serve() error {
	var start int64
	for {
		events, err := c.poller.wait(time.Second)
		if err != nil {
			return err
		}
		for i := range events {
			fd := int(events[i].Fd)
			if fd != 0 {
				if s := c.byFD[fd]; s != nil {
					c.read(s)
				}
				continue
			}
			switch command, err := readCommand(); {
			case err != nil:
				return err
			case command == "start":
				c.tally, c.report.Responses, c.report.Reads = tally{}, 0, 0
				start = c.clock.now()
			case command == "stop":
				return c.finish(c.clock.now() - start)
			}
		}
		if c.report.Lost+c.report.Bad == len(c.streams) {
			return fmt.Errorf("all streams are lost, the first because: %s", c.report.Fault)
		}
	}
}

func (c *client) read(s *stream) {
	n, errno := recv(s.fd, c.buf[:])
	if errno == unix.EAGAIN || errno == unix.EINTR {
		return
	}
	if errno != 0 || n == 0 {
		c.lose(s, fmt.Sprintf("stream %d: connection ended after event %d of %d: %v", s.id, s.response.n, s.response.want, errno))
		return
	}
	c.report.Reads++
	over, err := s.response.feed(c.buf[:n], c.clock.now(), &c.tally)
	if err != nil {
		c.lose(s, err.Error())
		c.report.Lost--
		c.report.Bad++
		return
	}
	if !s.began && s.response.n > 0 {
		s.began = true
		if c.began++; c.began == len(c.streams) {
			fmt.Println("ready")
		}
	}
	if over {
		c.report.Responses++
		c.ask(s, c.chunks)
	}
}

func (c *client) finish(nanoseconds int64) error {
	r := &c.report
	r.Seconds = float64(nanoseconds) / 1e9
	r.Chunks = c.tally.chunks
	r.Latency = c.tally.latency.summary()
	if err := json.NewEncoder(os.Stdout).Encode(r); err != nil {
		return err
	}
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}
