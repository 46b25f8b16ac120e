package proxy

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/inferrail/inferrail/policy"
)

// exchange is one request and its response, top to bottom: read, route,
// choose, connect, send, first byte, relay, finish. It lives in its connection
// and is used for one request after another, on the connection's goroutine.
type exchange struct {
	c     *conn
	began time.Time // the request's first byte was there
	sent  time.Time // the request was read: now it is the engine's time

	// The request.
	method, target []byte
	route          route
	allow          string
	head           requestHead
	id             []byte // x-request-id of request and response
	idBuf          [32]byte
	body           []byte // pooled
	call           call
	http10, isHead bool
	keepAlive      bool
	unread         bool // it was refused before it was read
	reset          bool // the connection is to end with a reset

	// The choice.
	model      *Model
	replica    *Replica
	candidates []policy.Candidate
	asked      policy.Request

	// The response.
	until    time.Time // when its first byte must be there
	up       *engineConn
	unsent   bool   // the engine answered before it had the whole request
	in       []byte // what the engine has sent up to the end of its head; pooled
	response responseHead
	out      []byte // heads are composed here; pooled
	answered bool   // a response head is on its way to the client
	passed   bool   // and it is an engine's
	status   int
	ttfb     time.Duration
	relay    relay
	// pooled are where body, in and out came from.
	pooled  struct{ body, in, out *[]byte }
	packet  bool   // the kernel carried at least one byte
	why     string // why not a better tier
	kernel  Carried
	cause   error  // of a failure, for the log
	message string // of a refusal, when there is a better one than the table's
	param   string
}

// spliceWorth is how many bytes of a Content-Length body must be left for the
// kernel to be offered them: joining and settling cost about as much as
// copying this many in one read.
const spliceWorth = 16 << 10

// keepBody is the largest request body whose buffer is kept for another.
const keepBody = 1 << 20

var (
	bodies = sync.Pool{New: func() any { return new([]byte) }}
	heads  = sync.Pool{New: func() any { b := make([]byte, 0, 16<<10); return &b }}
)

// run serves one request and reports whether the connection can serve another.
func (x *exchange) run() (goOn bool) {
	x.begin()
	f := x.read()
	defer func() { x.finish(f) }()
	if f == none {
		f = x.serve()
	}
	if f != none {
		x.refuse(f)
	}
	return x.keepAlive
}

func (x *exchange) begin() {
	x.method, x.target = nil, nil
	x.route, x.allow = routeUnknown, ""
	x.head, x.id = requestHead{}, nil
	x.call = call{}
	x.http10, x.isHead, x.keepAlive, x.unread, x.reset = false, false, false, false, false
	x.model, x.replica, x.candidates = nil, nil, x.candidates[:0]
	x.up, x.unsent = nil, false
	x.response = responseHead{}
	x.answered, x.passed, x.status, x.ttfb = false, false, 0, 0
	x.packet, x.why, x.kernel = false, "", Carried{}
	x.cause, x.message, x.param = nil, "", ""
	x.began = time.Now()
	x.c.s.stats.running.Add(1)
	x.pooled.body = bodies.Get().(*[]byte)
	x.pooled.in, x.pooled.out = heads.Get().(*[]byte), heads.Get().(*[]byte)
	x.body, x.in, x.out = (*x.pooled.body)[:0], (*x.pooled.in)[:0], (*x.pooled.out)[:0]
}

// read reads the whole request.
func (x *exchange) read() failure {
	c := x.c
	f, why := c.readHead()
	if f != none {
		x.message = why
		return f
	}
	h := &c.h
	x.http10 = !h.IsHTTP11()
	x.method, x.isHead = h.Method(), h.IsHead()
	if proto := string(h.Protocol()); proto != "HTTP/1.1" && proto != "HTTP/1.0" {
		return badVersion
	}
	if why := x.head.read(h.RawHeaders()); why != "" {
		x.message = why
		return badRequest
	}
	x.takeID()
	size := int64(h.ContentLength())
	if size > c.s.limits.Load().MaxBodyBytes {
		x.message = fmt.Sprintf("The request body is %d bytes; at most %d are taken.", size, c.s.limits.Load().MaxBodyBytes)
		return bodyTooLarge
	}
	if x.head.expect != nil && !x.http10 {
		if !bytes.EqualFold(x.head.expect, []byte("100-continue")) {
			return badExpect
		}
		if size != -2 && size != 0 && c.br.Buffered() == 0 {
			if c.write([]byte("HTTP/1.1 100 Continue\r\n\r\n")) != nil {
				return clientLeft
			}
		}
	}
	var path []byte
	x.target, path = originForm(h.RequestURI())
	x.route, x.allow = routeOf(path)
	if size > 0 || size == -1 {
		if x.body, f = c.readBody(x.body, size); f != none {
			return f
		}
	}
	x.keepAlive = !x.head.options.has([]byte("close")) &&
		(!x.http10 || x.head.options.has([]byte("keep-alive")))
	x.sent = time.Now()
	return none
}

// takeID takes the client's request id, or makes one.
func (x *exchange) takeID() {
	if x.id = x.head.id; x.id != nil {
		return
	}
	var random [16]byte
	binary.LittleEndian.PutUint64(random[:], rand.Uint64())
	binary.LittleEndian.PutUint64(random[8:], rand.Uint64())
	hex.Encode(x.idBuf[:], random[:])
	x.id = x.idBuf[:]
}

// serve answers a request that has been read: locally, or from an engine.
func (x *exchange) serve() failure {
	fleet := x.c.s.fleet.Load()
	switch x.route {
	case routeUnknown:
		x.message = "There is nothing at this path. The agent serves /v1/chat/completions, /v1/completions, /v1/models and /health."
		return notFound
	case routeModels, routeHealth:
		if !x.isHead && string(x.method) != http.MethodGet {
			return badMethod
		}
		var body []byte
		kind := "application/json"
		if x.route == routeModels {
			body = appendModels(nil, fleet.Listed)
		}
		return x.answer(http.StatusOK, kind, body)
	}
	if string(x.method) != http.MethodPost {
		return badMethod
	}
	if f := x.findModel(fleet); f != none {
		return f
	}
	if f := x.choose(); f != none {
		return f
	}
	x.until = x.sent.Add(x.c.s.limits.Load().RequestTimeout)
	if f := x.ask(); f != none {
		return f
	}
	return x.respond()
}

// findModel finds which model the request wants.
func (x *exchange) findModel(fleet *Fleet) failure {
	var err error
	if x.call, err = scanCall(x.body); err != nil {
		x.message = "The request is refused: " + err.Error() + "."
		return badJSON
	}
	switch x.call.model {
	case memberOther:
		x.param = "model"
		return badModel
	case memberString:
		if name := x.call.name(x.body); len(name) > 0 {
			if x.model = fleet.Models[string(name)]; x.model == nil {
				x.message, x.param = "The model `"+string(name)+"` does not exist.", "model"
				return unknownModel
			}
			return none
		}
	}
	// vLLM takes a request that names no model for the one it serves.
	if len(fleet.Listed) == 1 {
		x.model = fleet.Listed[0]
		return none
	}
	x.param = "model"
	return noModel
}

// choose picks the replica and counts the request there. finish takes the
// count back.
func (x *exchange) choose() failure {
	for _, r := range x.model.Replicas {
		x.candidates = append(x.candidates, policy.Candidate{Slot: r.Slot, InFlight: r.InFlight()})
	}
	var p policy.Policy = policy.LeastRequest{}
	if x.model.Policy != nil {
		p = x.model.Policy
	}
	x.asked = policy.Request{Rand: rand.Uint64()}
	i, _ := p.Pick(&x.asked, x.candidates)
	if i < 0 || i >= len(x.model.Replicas) {
		x.message = fmt.Sprintf("No engine that serves the model `%s` is available.", x.model.Name)
		return noReplica
	}
	x.replica = x.model.Replicas[i]
	x.replica.gate.enter()
	return none
}

// ask sends the request and reads the head of its response. A connection that
// has been idle may have been closed by the engine just then; if it dies before
// the first byte of a response, the request is sent once more on a new one.
func (x *exchange) ask() failure {
	if s := x.c.s; s.joiner != nil && !x.c.entered {
		x.c.entered = true
		x.c.handle, x.c.why = s.joiner.Enter(x.c.fd, -1)
	}
	x.up = x.replica.take()
	for {
		var f failure
		if x.up == nil {
			if x.up, f, x.cause = x.c.dial(x.replica, x.until); f != none {
				return f
			}
		}
		if f = x.send(); f == none {
			f = x.readResponseHead()
		}
		if f == engineDied && x.up.reused && len(x.in) == 0 && x.ttfb == 0 {
			x.up.abort()
			x.up, x.unsent, x.cause = nil, false, nil
			x.c.s.stats.replays.Add(1)
			continue
		}
		return f
	}
}

// send writes the request to the engine.
func (x *exchange) send() failure {
	body := [3][]byte{x.body}
	length := len(x.body)
	if x.model != nil && x.call.model == memberString && x.call.end-x.call.start > 2 &&
		string(x.call.name(x.body)) != x.model.Name {
		// An alias: the engine knows the model by its own name. The rest of
		// the body stays what it is.
		name := appendJSONString(nil, x.model.Name)
		body = [3][]byte{x.body[:x.call.start], name, x.body[x.call.end:]}
		length += len(name) - (x.call.end - x.call.start)
	}
	x.out = x.head.appendTo(x.out[:0], x.method, x.target, x.replica, x.id, length)
	bufs := [4][]byte{x.out, body[0], body[1], body[2]}
	left, errno := sendAll(x.up.fd, bufs[:])
	for errno == unix.EAGAIN {
		// An engine that answers before it has read the whole request, to
		// refuse it, is heard.
		if f := x.c.waitEngine(x.up, unix.EPOLLOUT|unix.EPOLLIN, x.until); f != none {
			return f
		}
		var b [1]byte
		if n, _ := recv(x.up.fd, b[:], unix.MSG_PEEK); n > 0 {
			x.unsent = true
			return none
		}
		left, errno = sendAll(x.up.fd, left)
	}
	if errno != 0 {
		// What the engine said before it closed may still be there to read.
		x.unsent = true
		x.cause = errno
	}
	return none
}

// readResponseHead reads up to the end of the response's head into x.in, which
// may hold the first bytes of the body as well.
func (x *exchange) readResponseHead() failure {
	x.in = x.in[:0]
	if !x.unsent {
		// Nothing can be there yet.
		if f := x.waitHead(); f != none {
			return f
		}
	}
	interim := 0
	for {
		if i := bytes.Index(x.in, crlfcrlf); i >= 0 {
			if x.ttfb == 0 {
				x.ttfb = time.Since(x.sent)
			}
			err := x.response.read(x.in[:i+4])
			switch {
			case err != nil:
				x.cause = err
				return engineHead
			case x.response.status >= 200:
				return none
			case x.response.status == 101 || interim == 16:
				x.cause = fmt.Errorf("unexpected status %d", x.response.status)
				return engineHead
			}
			// An interim response (RFC 9110 section 15.2).
			interim++
			x.in = x.in[:copy(x.in, x.in[i+4:])]
			continue
		}
		if len(x.in) >= maxEngineHead {
			x.cause = errors.New("the head is too large")
			return engineHead
		}
		if len(x.in) == cap(x.in) {
			x.in = append(x.in, make([]byte, len(x.in))...)[:len(x.in)]
		}
		n, errno := recv(x.up.fd, x.in[len(x.in):cap(x.in)], 0)
		switch {
		case errno == unix.EAGAIN && x.unsent && x.cause != nil:
			return engineDied
		case errno == unix.EAGAIN:
			if f := x.waitHead(); f != none {
				return f
			}
		case errno != 0:
			x.cause = errno
			return engineDied
		case n == 0:
			if x.cause == nil {
				x.cause = errors.New("the connection was closed")
			}
			return engineDied
		default:
			x.in = x.in[:len(x.in)+n]
		}
	}
}

func (x *exchange) waitHead() failure {
	f := x.c.waitEngine(x.up, unix.EPOLLIN, x.until)
	x.up.w.shard.counts.wakeups.Add(1)
	return f
}

// respond passes the response on.
func (x *exchange) respond() failure {
	c, h, r := x.c, &x.response, &x.relay
	r.reset(c, x.up)
	x.keepAlive = x.keepAlive && !c.s.draining.Load() && h.body != bodyUntilClose && !(x.http10 && h.body == bodyChunked)
	x.status = h.status
	x.out = h.appendTo(x.out[:0], asClient{http10: x.http10, keepAlive: x.keepAlive, id: x.id, replica: x.replica.ID})

	early := x.in[bytes.Index(x.in, crlfcrlf)+4:]
	switch h.body {
	case bodyNone:
		r.frames = fixedFrames(0)
	case bodyFixed:
		r.frames = fixedFrames(h.length)
	case bodyChunked:
		r.decode = x.http10
	case bodyUntilClose:
		r.untilClose = true
	}
	var decoded []byte
	body, f := r.accept(early, &decoded)
	if f != none {
		// Nothing has been passed on yet, so the client can be told.
		x.cause = errFraming
		return engineHead
	}
	x.out = append(x.out, body...)
	x.answered, x.passed = true, true
	x.why = x.join()
	if f = r.writeNow(x.out); f == none && (!r.frames.Ended() || len(r.rest) > 0) {
		f = x.waitRelay()
	}
	x.account()
	if f == none && !h.close && !r.surplus && !x.unsent {
		x.up.put()
		x.up = nil
	}
	return f
}

// join offers the response to the kernel if it is worth it, and returns why
// not.
func (x *exchange) join() (why string) {
	s, r := x.c.s, &x.relay
	switch {
	case s.joiner == nil:
		if s.CopyReason == "" {
			return "off"
		}
		return s.CopyReason
	case r.frames.Ended():
		return "with_head"
	case r.untilClose:
		return "until_close"
	case r.decode:
		return "http10"
	case r.frames.Fixed && r.frames.Left <= spliceWorth:
		return "small"
	case x.c.handle == 0:
		return x.c.why
	case x.up.handle == 0:
		return x.up.why
	}
	r.splice, why = s.joiner.Join(x.c.handle, x.up.handle, r.onChanged)
	return why
}

// waitRelay hands the connections to the shard and waits for the end of the
// response, watching the client.
func (x *exchange) waitRelay() failure {
	c, r := x.c, &x.relay
	// The relay needs neither: a stream may last for an hour.
	x.giveBack()
	limit := c.s.limits.Load().StallTimeout
	c.expect(time.Now().Add(limit))
	r.start()
	for {
		if over, f := r.finished(); over {
			return f
		}
		f := c.wait(clientStalled)
		if f == clientStalled && !r.stalled(limit) {
			f = none
		}
		if f != none {
			return r.stop(f)
		}
		c.expect(time.Now().Add(limit))
	}
}

// account sums up what the relay and the kernel have done. The relay is over.
func (x *exchange) account() {
	if r := &x.relay; r.splice != nil {
		x.kernel = r.part()
		x.packet = x.kernel.Bytes > 0
		x.why = x.kernel.Refused
		if x.packet {
			x.why = ""
		} else if x.why == "" {
			x.why = "never_quiet"
		}
	}
}

// refuse answers a request that cannot be served, or cuts an answer that
// cannot be finished.
func (x *exchange) refuse(f failure) {
	row := &failureTable[f]
	if row.blame != byClient {
		x.c.s.failed(x, f, x.cause)
	}
	if row.status == 0 || x.answered {
		x.keepAlive = false
		// A reset: what the client has must not pass for the whole answer,
		// and what it has not taken is dropped.
		x.reset = true
		x.c.tcp.SetLinger(0)
		return
	}
	if f.fatal() {
		x.keepAlive, x.unread = false, true
	}
	if x.id == nil {
		x.takeID()
	}
	body := appendError(nil, f, x.message, x.param)
	x.answer(row.status, "application/json", body)
}

// answer sends a response of the agent's own.
func (x *exchange) answer(status int, kind string, body []byte) failure {
	x.status, x.answered = status, true
	x.keepAlive = x.keepAlive && !x.c.s.draining.Load()
	out := append(x.out[:0], "HTTP/1.1 "...)
	out = strconv.AppendInt(out, int64(status), 10)
	out = append(append(append(out, ' '), http.StatusText(status)...), "\r\nDate: "...)
	out = time.Now().UTC().AppendFormat(out, http.TimeFormat)
	if len(body) > 0 {
		out = append(append(out, "\r\nContent-Type: "...), kind...)
	}
	out = append(out, "\r\nContent-Length: "...)
	out = append(strconv.AppendInt(out, int64(len(body)), 10), crlf...)
	out = appendField(out, []byte("x-request-id"), x.id)
	if x.replica != nil {
		out = append(append(append(out, "x-inferrail-replica: "...), x.replica.ID...), crlf...)
	}
	switch status {
	case http.StatusMethodNotAllowed:
		out = append(append(append(out, "Allow: "...), x.allow...), crlf...)
	case http.StatusServiceUnavailable:
		out = append(out, "Retry-After: 1\r\n"...)
	}
	out = append(appendConnection(out, asClient{http10: x.http10, keepAlive: x.keepAlive}), crlf...)
	if !x.isHead {
		out = append(out, body...)
	}
	x.out = out
	if x.c.write(out) != nil {
		x.keepAlive = false
		return clientLeft
	}
	return none
}

// giveBack returns the exchange's buffers to their pools.
func (x *exchange) giveBack() {
	p := &x.pooled
	if p.body == nil {
		return
	}
	*p.in, *p.out = x.in, x.out
	heads.Put(p.in)
	heads.Put(p.out)
	if cap(x.body) <= keepBody {
		*p.body = x.body
		bodies.Put(p.body)
	}
	p.body, p.in, p.out = nil, nil, nil
	x.body, x.in, x.out = nil, nil, nil
}

// finish releases everything the exchange holds and counts it.
func (x *exchange) finish(f failure) {
	if x.up != nil {
		// Cut off, or not to be used again. A reset stops an engine that is
		// still generating.
		if f == none {
			x.up.close()
		} else {
			x.up.abort()
		}
		x.up = nil
	}
	if x.replica != nil {
		x.replica.gate.leave()
	}
	x.giveBack()
	x.c.s.stats.finished(x, f)
}
