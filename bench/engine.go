package bench

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// engine is the worker process that answers: an OpenAI-speaking server that
// sends every running stream one chunk per period, and answers at once when a
// stream is not asked for. The period is divided into slots of about a
// millisecond; a stream sends in its slot. Everything runs on one thread. The
// process ends by SIGTERM.
type engine struct {
	poller    *poller
	clock     clock
	listeners []int
	conns     []*engineConn // by fd
	slots     [][]*engineConn
	current   int // slot to send next
	fresh     int // where to look first for an empty slot
	running   int // streams
	chunk     [chunkSize]byte
	whole     *numbered
	buf       [64 << 10]byte
}

// engineConn is a connection from a proxy or a client. It lives until the peer
// closes it or sends something the engine does not understand.
type engineConn struct {
	fd     int
	in     []byte // received and not yet parsed
	active bool   // a response is running: the fields below
	slot   int    // index into engine.slots
	at     int    // index into that slot
	id     uint32
	n      uint32 // chunks sent
	want   uint32
	stamp  int64
	part   int // bytes sent of the chunk, or of responseEnd when n == want
}

// runEngine serves on all addrs until the process is killed, and says "ready"
// when it does. Each stream gets rate chunks a second.
func runEngine(addrs []string, rate float64) error {
	if !(rate > 0 && rate <= 1000) {
		return fmt.Errorf("rate %v: must be above 0 and at most 1000 chunks a second", rate)
	}
	clock, err := newClock()
	if err != nil {
		return err
	}
	poller, err := newPoller()
	if err != nil {
		return err
	}
	period := int64(float64(time.Second) / rate)
	slots := max(period/int64(time.Millisecond), 1)
	e := &engine{poller: poller, clock: clock, chunk: blankChunk, whole: newAnswer(), slots: make([][]*engineConn, slots)}
	for _, addr := range addrs {
		if err := e.listen(addr); err != nil {
			return err
		}
	}
	fmt.Println("ready")
	return e.serve(period / slots)
}

func (e *engine) listen(addr string) error {
	sa, err := socketAddr(addr)
	if err != nil {
		return err
	}
	listener, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("socket: %w", err)
	}
	if err := unix.SetsockoptInt(listener, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return fmt.Errorf("SO_REUSEADDR: %w", err)
	}
	if err := unix.Bind(listener, sa); err != nil {
		return fmt.Errorf("bind %s: %w", addr, err)
	}
	if err := unix.Listen(listener, 4096); err != nil {
		return fmt.Errorf("listen on %s: %w", addr, err)
	}
	if err := e.poller.add(listener); err != nil {
		return fmt.Errorf("epoll_ctl: %w", err)
	}
	e.listeners = append(e.listeners, listener)
	return nil
}

func (e *engine) serve(tick int64) error {
	next := e.clock.now() + tick
	for {
		// One slot per turn, so that an engine that falls behind still reads.
		if now := e.clock.now(); now >= next {
			e.sendSlot()
			next += tick
		}
		idle := e.running == 0
		wait := time.Duration(next - e.clock.now())
		if idle {
			wait = time.Minute // no slot has anything to send
		}
		events, err := e.poller.wait(wait)
		if err != nil {
			return err
		}
		if idle {
			next = e.clock.now() + tick
		}
		for i := range events {
			if fd := int(events[i].Fd); slices.Contains(e.listeners, fd) {
				e.accept(fd)
			} else if c := e.conns[fd]; c != nil {
				e.read(c)
			}
		}
	}
}

func (e *engine) sendSlot() {
	// Backwards, because a response that ends is replaced by the last one.
	slot := e.current
	for i := len(e.slots[slot]) - 1; i >= 0; i-- {
		if i < len(e.slots[slot]) {
			e.emit(e.slots[slot][i])
		}
	}
	e.current = (slot + 1) % len(e.slots)
}

// emit sends a response's next chunk, or what is left of one that did not fit
// into the socket: a peer that does not read holds up its own stream.
func (e *engine) emit(c *engineConn) {
	if c.n < c.want {
		if c.part == 0 {
			c.stamp = e.clock.now()
		}
		setChunk(&e.chunk, c.id, c.n, c.stamp)
		if !e.sendRest(c, e.chunk[:]) {
			return
		}
		c.n++
	}
	if c.n < c.want || !e.sendRest(c, endBytes) {
		return
	}
	e.finish(c)
	e.handle(c)
}

var endBytes = []byte(responseEnd)

// sendRest reports whether all of unit has now been sent.
func (e *engine) sendRest(c *engineConn, unit []byte) bool {
	n, errno := send(c.fd, unit[c.part:])
	switch errno {
	case 0:
		c.part += n
		if c.part < len(unit) {
			return false
		}
		c.part = 0
		return true
	case unix.EAGAIN, unix.EINTR:
		return false
	}
	e.close(c)
	return false
}

func (e *engine) accept(listener int) {
	for {
		fd, _, err := unix.Accept4(listener, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
		if err != nil {
			if err != unix.EAGAIN {
				fmt.Fprintf(os.Stderr, "engine: accept: %v\n", err)
			}
			return
		}
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1); err != nil {
			fmt.Fprintf(os.Stderr, "engine: TCP_NODELAY: %v\n", err)
		}
		if err := e.poller.add(fd); err != nil {
			fmt.Fprintf(os.Stderr, "engine: epoll_ctl: %v\n", err)
			unix.Close(fd)
			continue
		}
		for len(e.conns) <= fd {
			e.conns = append(e.conns, nil)
		}
		e.conns[fd] = &engineConn{fd: fd}
	}
}

func (e *engine) close(c *engineConn) {
	if c.active {
		e.finish(c)
	}
	e.conns[c.fd] = nil
	unix.Close(c.fd)
}

func (e *engine) read(c *engineConn) {
	n, errno := recv(c.fd, e.buf[:])
	if errno == unix.EAGAIN || errno == unix.EINTR {
		return
	}
	if errno != 0 || n == 0 {
		e.close(c)
		return
	}
	c.in = append(c.in, e.buf[:n]...)
	if len(c.in) > 2*maxRequest {
		fmt.Fprintf(os.Stderr, "engine: %d bytes behind a running response\n", len(c.in))
		e.close(c)
		return
	}
	if !c.active {
		e.handle(c)
	}
}

// handle answers the requests that have arrived, up to the first one that
// starts a stream.
func (e *engine) handle(c *engineConn) {
	for !c.active && len(c.in) > 0 {
		r, n, err := parseRequest(c.in)
		if err != nil {
			fmt.Fprintf(os.Stderr, "engine: %v\n", err)
			e.close(c)
			return
		}
		if n == 0 || !e.answer(c, r) {
			return
		}
		c.in = append(c.in[:0], c.in[n:]...)
	}
}

// answer reports false when it had to close the connection.
func (e *engine) answer(c *engineConn, r request) bool {
	if string(r.method) == "POST" && string(r.path) == "/v1/chat/completions" {
		id, ok2 := member(r.body, `"seed":`)
		if ok2 && !bytes.Contains(r.body, []byte(`"stream":true`)) {
			return e.sendWhole(c, e.whole.with(uint32(id)))
		}
		want, ok1 := member(r.body, `"max_tokens":`)
		if ok1 && ok2 && want > 0 {
			c.id, c.want, c.n, c.part = uint32(id), uint32(want), 0, 0
			return e.sendWhole(c, []byte("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n")) &&
				e.start(c)
		}
		fmt.Fprintf(os.Stderr, "engine: a request without max_tokens or seed: %.300q\n", r.body)
		return e.sendWhole(c, plain("400 Bad Request", "application/json", `{"error":{"message":"max_tokens and seed are required","type":"BadRequestError","param":null,"code":400}}`))
	}
	path, _, _ := bytes.Cut(r.path, []byte("?"))
	if string(r.method) == "GET" {
		switch string(path) {
		case "/v1/models":
			return e.sendWhole(c, plain("200 OK", "application/json",
				`{"object":"list","data":[{"id":"`+model+`","object":"model","created":1700000000,"owned_by":"bench","max_model_len":131072}]}`))
		case "/server_info":
			// Without it sglang-router calls the model "unknown".
			return e.sendWhole(c, plain("200 OK", "application/json", `{"served_model_name":"`+model+`"}`))
		case "/health":
			return e.sendWhole(c, plain("200 OK", "text/plain", ""))
		case "/metrics":
			return e.sendWhole(c, plain("200 OK", "text/plain; version=0.0.4", fmt.Sprintf(
				"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name=%q} %d\n"+
					"# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{model_name=%q} 0\n", model, e.running, model)))
		}
	}
	return e.sendWhole(c, plain("404 Not Found", "application/json", `{"detail":"Not Found"}`))
}

func plain(status, contentType, body string) []byte {
	return fmt.Appendf(nil, "HTTP/1.1 %s\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s", status, contentType, len(body), body)
}

// sendWhole sends what fits into any socket that has nothing in flight.
func (e *engine) sendWhole(c *engineConn, b []byte) bool {
	if n, errno := send(c.fd, b); errno != 0 || n != len(b) {
		fmt.Fprintf(os.Stderr, "engine: sent %d of %d bytes: %v\n", n, len(b), errno)
		e.close(c)
		return false
	}
	return true
}

// start puts a response into the emptiest slot, the first one from fresh on.
func (e *engine) start(c *engineConn) bool {
	best := e.fresh
	for i := range e.slots {
		if s := (e.fresh + i) % len(e.slots); len(e.slots[s]) < len(e.slots[best]) {
			best = s
		}
	}
	e.fresh = (best + 1) % len(e.slots)
	c.active, c.slot, c.at = true, best, len(e.slots[best])
	e.slots[best] = append(e.slots[best], c)
	e.running++
	return true
}

// finish takes a response out of its slot.
func (e *engine) finish(c *engineConn) {
	slot := e.slots[c.slot]
	last := len(slot) - 1
	slot[c.at] = slot[last]
	slot[c.at].at = c.at
	slot[last] = nil
	e.slots[c.slot] = slot[:last]
	c.active = false
	e.running--
}
