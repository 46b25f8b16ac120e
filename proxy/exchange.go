package proxy

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"syscall"
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

	// What is true for all of it.
	limits *Limits
	access *Access
	caller caller
	key    *Key // the API key it came with, when keys are asked for

	// The request.
	method, target []byte
	path           []byte
	route          route
	allow          string
	head           requestHead
	id             []byte // x-request-id of request and response
	idBuf          [32]byte
	body           []byte // pooled
	held           int64  // what it counts for in Server.buffered
	call           call
	edits          [2]edit // of the body, for the engine
	usageEdit      edit    // the one that asks for usage
	http10, isHead bool
	keepAlive      bool
	unread         bool // it was refused before it was read
	reset          bool // the connection is to end with a reset

	// What the key is charged. reserved is taken back or settled by finish.
	charged   bool
	reserved  policy.Charge
	asksUsage bool // the client did not, so its answer must not hold it

	// The choice. The request is inside replica's gate from choose until leave.
	model      *Model
	replica    *Replica
	tried      []*Replica // that have failed it
	evacuated  uint64     // the gate's evacuations when it came in
	candidates []policy.Candidate
	places     []*Replica // of candidates
	asked      policy.Request

	// The response.
	until  time.Time // when its first byte must be there
	up     *engineConn
	unsent bool // the engine answered before it had the whole request
	// unavailable: the response says that the engine, not the request, is why
	// there is no answer.
	unavailable bool
	in          []byte // what the engine has sent up to the end of its head; pooled
	response    responseHead
	out         []byte // heads are composed here; pooled
	extra       []byte // field lines of the agent's own
	answered    bool   // a response head is on its way to the client
	passed      bool   // and it is an engine's
	status      int
	ttfb        time.Duration
	relay       relay
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
	x.limits, x.access, x.key = x.c.s.limits.Load(), x.c.s.access.Load(), nil
	x.caller, x.charged, x.asksUsage = caller{}, false, false
	x.method, x.target, x.path = nil, nil, nil
	x.route, x.allow = routeUnknown, ""
	x.head, x.id = requestHead{}, nil
	x.call = call{}
	x.http10, x.isHead, x.keepAlive, x.unread, x.reset = false, false, false, false, false
	x.held = 0
	x.model, x.replica, x.tried = nil, nil, x.tried[:0]
	x.up, x.unsent = nil, false
	x.response, x.extra = responseHead{}, x.extra[:0]
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
	x.caller = readCaller(x.head.raw)
	x.target, x.path = originForm(h.RequestURI())
	x.route, x.allow = routeOf(x.path)
	if string(x.method) == http.MethodOptions && x.caller.preflight() {
		x.extra = x.access.appendPreflight(x.extra, &x.caller, x.allow)
	} else {
		x.extra = x.access.appendOrigin(x.extra, &x.caller)
	}
	size := int64(h.ContentLength())
	if size > x.limits.MaxBodyBytes {
		x.message = fmt.Sprintf("The request body is %d bytes; at most %d are taken.", size, x.limits.MaxBodyBytes)
		return bodyTooLarge
	}
	if x.head.encoding != nil && size != 0 && size != -2 {
		return badEncoding
	}
	if x.head.expect != nil && !x.http10 && !bytes.EqualFold(x.head.expect, []byte("100-continue")) {
		return badExpect
	}
	if size > 0 || size == -1 {
		if size == -1 || size > readAnyway || x.head.expect != nil {
			// Who may not send it need not be read first.
			if f = x.permit(); f != none {
				x.unread = true
				return f
			}
		}
		if x.head.expect != nil && !x.http10 && c.br.Buffered() == 0 {
			if c.write([]byte("HTTP/1.1 100 Continue\r\n\r\n")) != nil {
				return clientLeft
			}
		}
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

// readAnyway is the size up to which a body is read although the request is
// going to be refused: the connection can go on then.
const readAnyway = 64 << 10

// permit decides by the request's head alone whether it is taken.
func (x *exchange) permit() failure {
	options := string(x.method) == http.MethodOptions
	if x.route == routeHealth || options && (x.route != routeUnknown || string(x.path) == "*") {
		if x.route == routeHealth && !options && !x.isHead && string(x.method) != http.MethodGet {
			return badMethod
		}
		return none // asked by load balancers and browsers, which have no key
	}
	if !x.access.Open() {
		if x.key = x.access.Find(x.caller.key); x.key == nil {
			return badKey
		}
	}
	switch {
	case x.route == routeUnknown:
		x.message = "There is nothing at this path. The agent serves /v1/models, /health and the paths of engines that compute something, such as /v1/chat/completions."
		return notFound
	case x.route < routeModels && string(x.method) != http.MethodPost:
		return badMethod
	case x.route >= routeModels && !x.isHead && string(x.method) != http.MethodGet:
		return badMethod
	}
	return none
}

// serve answers a request that has been read: locally, or from an engine.
func (x *exchange) serve() failure {
	if f := x.permit(); f != none {
		return f
	}
	if string(x.method) == http.MethodOptions {
		return x.answer(http.StatusNoContent, "", nil)
	}
	fleet := x.c.s.fleet.Load()
	switch x.route {
	case routeHealth:
		return x.answer(http.StatusOK, "", nil)
	case routeModels:
		return x.answer(http.StatusOK, "application/json", appendModels(nil, fleet.Listed, x.key))
	case routeModel:
		return x.describeModel(fleet)
	}
	if f := x.findModel(fleet); f != none {
		return f
	}
	if f := x.admit(); f != none {
		return f
	}
	if x.limits.LogPrompts {
		x.c.s.log.Info("prompt", "request_id", string(x.id), "path", string(x.path), "body", string(x.body))
	}
	x.until = x.sent.Add(x.limits.RequestTimeout)
	if f := x.ask(); f != none {
		return f
	}
	return x.respond()
}

// describeModel answers for GET /v1/models/NAME.
func (x *exchange) describeModel(fleet *Fleet) failure {
	name, err := url.PathUnescape(string(x.path[len(modelPrefix):]))
	model := fleet.Models[name]
	if err != nil || model == nil || !x.key.Allows(model.Name) && !x.key.Allows(name) {
		return x.modelUnknown(name)
	}
	return x.answer(http.StatusOK, "application/json", appendCard(nil, model, name))
}

func (x *exchange) modelUnknown(name string) failure {
	x.message, x.param = "The model `"+name+"` does not exist.", "model"
	return unknownModel
}

// findModel finds which model the request wants.
func (x *exchange) findModel(fleet *Fleet) failure {
	var err error
	if x.route == routeForm {
		if x.call, err = scanForm(x.head.contentType, x.body); err != nil {
			x.message = "The request is refused: " + err.Error() + "."
			return badForm
		}
	} else if x.call, err = scanCall(x.body); err != nil {
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
				return x.modelUnknown(string(name))
			}
		}
	}
	// vLLM takes a request that names no model for the one it serves.
	if x.model == nil {
		x.model = fleet.unnamed()
	}
	switch {
	case x.model == nil:
		x.param = "model"
		return noModel
	case !x.key.Allows(x.model.Name) && !(x.call.model == memberString && x.key.Allows(string(x.call.name(x.body)))):
		x.message, x.param = fmt.Sprintf("The API key `%s` may not be used for the model `%s`.", x.key.Name, x.model.Name), "model"
		return forbiddenModel
	}
	return none
}

// admit reserves what the request is taken to cost from what its key may use.
func (x *exchange) admit() failure {
	if x.key == nil || x.key.Budget == nil {
		return none
	}
	x.reserved = x.call.estimate(x.route != routeInference)
	quotas, wait, ok := x.key.Budget.Reserve(time.Now(), x.reserved)
	x.extra = appendQuotas(x.extra, &quotas)
	if !ok {
		x.extra = appendRetryAfter(x.extra, wait)
		x.message = fmt.Sprintf("The API key `%s` has used up what it may use in a minute; try again in %s.",
			x.key.Name, appendReset(nil, wait))
		return overRate
	}
	x.charged = true
	if counts := quotas.Input.Limit > 0 || quotas.Output.Limit > 0; counts && x.route == routeGenerate {
		x.usageEdit, x.asksUsage = askUsage(x.body, &x.call)
	}
	return none
}

// settle charges the key for what the request has used.
func (x *exchange) settle(f failure, u usage, known bool) {
	if !x.charged {
		return
	}
	now := time.Now()
	used := x.reserved
	switch {
	case known:
		used = u.charge(x.reserved)
	case !x.passed && (f != clientLeft || x.replica == nil):
		// No engine has answered, or been asked: it costs nothing.
		x.key.Budget.Refund(now, x.reserved)
		return
	case x.passed && x.status != http.StatusOK:
		used = policy.Charge{}
	case !x.passed && x.call.stream:
		used.Output = 0
	case x.call.stream:
		// A chunk is a token or more. Of one that the client has left it is
		// all that is known.
		used.Output = int64(x.relay.frames.Chunks + x.kernel.Chunks)
	case x.route == routeInference:
		used.Output = 0
	}
	x.key.Budget.Settle(now, x.reserved, used)
}

// ask sends the request to a replica and reads the head of its response. While
// nothing has been passed on to the client, a request that failed is sent to
// another one: first to those that have not failed it, and when all have, after
// a pause, to any.
func (x *exchange) ask() failure {
	if s := x.c.s; s.joiner != nil && !x.c.entered {
		x.c.entered = true
		x.c.handle, x.c.why = s.joiner.Enter(x.c.fd, -1)
	}
	for attempt := 1; ; attempt++ {
		if f := x.choose(); f != none {
			return f
		}
		f := x.attempt()
		if x.unavailable = false; f == none {
			x.unavailable, f = x.saysUnavailable()
		}
		x.replica.gate.answered(x.c)
		again := f.retried() || x.unavailable
		if again {
			x.replica.failed(x.failedWith(f))
		}
		if !again || attempt >= x.limits.MaxAttempts {
			return f
		}
		x.tried = append(x.tried, x.replica)
		pause := time.Duration(0)
		if !x.elsewhere() {
			// The pause is drawn from its second half, so that requests that
			// failed together do not come back together.
			pause = x.limits.Backoff << (attempt - 1)
			pause = pause/2 + rand.N(pause/2+1)
			if time.Until(x.until) < pause {
				return f
			}
			x.tried = x.tried[:0]
		}
		x.c.s.stats.retries.WithLabelValues(x.model.Name, x.outcome(f)).Inc()
		x.leave()
		if f := x.c.pause(pause); f != none {
			return f
		}
	}
}

// saysUnavailable reports that the response says that the engine, not the
// request, is why there is no answer: by its status, or by being what vLLM's
// server says while its engine process is dead or ends. Any other 500 may be
// the request's own doing. All of a body that is looked at is then in x.in.
func (x *exchange) saysUnavailable() (bool, failure) {
	const maxVerdict = 4 << 10
	h := &x.response
	if h.status != http.StatusInternalServerError || h.body != bodyFixed || h.length > maxVerdict {
		return h.status >= 502 && h.status <= 504, none
	}
	body := bytes.Index(x.in, crlfcrlf) + 4
	for len(x.in) < body+int(h.length) {
		if f := x.readMore(); f != none {
			return false, f
		}
	}
	for _, text := range engineGone {
		if bytes.Contains(x.in[body:], text) {
			return true, none
		}
	}
	return false, none
}

// engineGone is what vLLM's server answers with status 500 when its engine
// process has died, and while it ends: first it has no thread left to read a
// prompt, then no engine.
var engineGone = [][]byte{
	[]byte(`"message":"EngineCore encountered an issue`),
	[]byte(`"message":"cannot schedule new futures after shutdown"`),
}

// failedWith is what those who watch the replica are told of a failed attempt.
func (x *exchange) failedWith(f failure) error {
	switch {
	case f == none:
		return fmt.Errorf("status %d", x.response.status)
	case x.cause != nil:
		return fmt.Errorf("%s: %w", f.label(), x.cause)
	}
	return errors.New(f.label())
}

// outcome is a failed attempt's metric label.
func (x *exchange) outcome(f failure) string {
	if f == none {
		return "status_" + strconv.Itoa(x.response.status)
	}
	return f.label()
}

// attempt sends the request to the chosen replica and reads the head of its
// response. A connection that has been idle may have been closed by the engine
// just then; if it dies before the first byte of a response, the request is
// sent once more on a new one.
func (x *exchange) attempt() failure {
	x.in, x.unsent, x.cause, x.ttfb = x.in[:0], false, nil, 0
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

// leave gives up what the request has at its replica: after a failed attempt,
// and at the end.
func (x *exchange) leave() {
	if x.up != nil {
		// A reset stops an engine that is still generating.
		x.up.abort()
		x.up = nil
	}
	if x.replica != nil {
		x.replica.gate.leave(x.c)
		x.replica = nil
	}
}

// usedAlias reports that the body names the model otherwise than the engine
// does.
func (x *exchange) usedAlias() bool {
	if x.call.model != memberString {
		return false
	}
	name := x.call.name(x.body)
	return len(name) > 0 && string(name) != x.model.Name
}

// send writes the request to the engine.
func (x *exchange) send() failure {
	edits := x.edits[:0]
	if x.usedAlias() {
		// The engine knows the model by its own name. The rest of the body
		// stays what it is.
		name := []byte(x.model.Name)
		if !x.call.form {
			name = appendJSONString(nil, x.model.Name)
		}
		edits = append(edits, edit{x.call.start, x.call.end, name})
	}
	if x.asksUsage {
		edits = append(edits, x.usageEdit)
	}
	var pieces [1 + 2*len(x.edits) + 1][]byte // the head goes first
	bufs, length := cut(pieces[:1], x.body, edits)
	x.out = x.head.appendTo(x.out[:0], asEngine{method: x.method, target: x.target, replica: x.replica,
		id: x.id, length: length, hideKey: !x.access.Open()})
	bufs[0] = x.out
	left, errno := sendAll(x.up.fd, bufs)
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
		if f := x.readMore(); f != none {
			return f
		}
	}
}

// readMore appends to x.in what the engine sends next.
func (x *exchange) readMore() failure {
	if len(x.in) == cap(x.in) {
		x.in = append(x.in, make([]byte, len(x.in))...)[:len(x.in)]
	}
	n, errno, f := x.recvHead(x.in[len(x.in):cap(x.in)])
	switch {
	case f != none:
		return f
	case errno == unix.EAGAIN:
		return engineDied // it has closed while the request was sent
	case errno != 0:
		x.cause = errno
		return engineDied
	case n == 0:
		if x.cause == nil {
			x.cause = errors.New("the connection was closed")
		}
		return engineDied
	}
	x.in = x.in[:len(x.in)+n]
	return none
}

// recvHead reads from the engine's socket, and waits for bytes. After a failed
// sending, errno is EAGAIN when there are none.
func (x *exchange) recvHead(p []byte) (n int, errno syscall.Errno, f failure) {
	if x.unsent && x.cause != nil {
		n, errno = recv(x.up.fd, p, 0)
		return n, errno, none
	}
	for {
		x.c.expect(x.until)
		if x.sentAway() {
			return 0, 0, engineDown
		}
		x.up.w.shard.counts.wakeups.Add(1)
		n, errno, woken := x.c.recvEngine(x.up, p)
		if !woken {
			return n, errno, none
		}
		if f = x.c.news(engineTimeout); f != none {
			return 0, 0, f
		}
	}
}

// respond passes the response on.
func (x *exchange) respond() failure {
	c, h, r := x.c, &x.response, &x.relay
	r.reset(c, x.up)
	if x.asksUsage && h.events && h.status == http.StatusOK {
		r.filter = &usageFilter{}
	}
	reframed := r.filter != nil
	x.keepAlive = x.keepAlive && !c.s.draining.Load() && (h.body != bodyUntilClose || reframed) &&
		!(x.http10 && (h.body == bodyChunked || reframed))
	x.status = h.status
	x.out = h.appendTo(x.out[:0], asClient{http10: x.http10, keepAlive: x.keepAlive, id: x.id, replica: x.replica.ID,
		extra: x.extra, dropCORS: x.access.Scripts(), dropLimits: x.charged, reframed: reframed})

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
	r.decode = r.decode || reframed
	r.chunked = reframed && !x.http10
	var decoded []byte
	body, f := r.accept(early, &decoded)
	if f != none {
		// Nothing has been passed on yet, so the client can be told.
		x.cause = errFraming
		x.replica.failed(x.failedWith(engineHead))
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
	case r.filter != nil:
		return "usage"
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
		if x.answered && row.blame != byClient && x.tellBroken(f) {
			return
		}
		// A reset: what the client has must not pass for the whole answer,
		// and what it has not taken is dropped.
		x.reset = true
		x.c.tcp.SetLinger(0)
		return
	}
	if f.fatal() || x.unread {
		x.keepAlive, x.unread = false, true
	}
	if x.id == nil {
		x.takeID()
	}
	body := []byte(nil)
	if x.isMessages() {
		body = appendMessagesError(body, f, x.message)
	} else {
		body = appendError(body, f, x.message, x.param)
	}
	x.answer(row.status, "application/json", body)
}

// isMessages reports that the client speaks Anthropic's Messages API. Its
// libraries heed an error in a stream only as an event of that name.
func (x *exchange) isMessages() bool { return bytes.HasPrefix(x.path, []byte("/v1/messages")) }

// tellBroken ends a stream of events that has broken with an error event, as
// vLLM does, when it is a whole number of events so far: a client library shows
// the message then. The chunk that ends a body does not follow, so that nobody
// takes the answer for complete. It reports false when nothing was sent.
func (x *exchange) tellBroken(f failure) bool {
	if !x.response.events || !x.relay.between() {
		return false
	}
	var event []byte
	if x.isMessages() {
		event = appendMessagesError([]byte("event: error\ndata: "), f, x.message)
	} else {
		event = appendError([]byte("data: "), f, x.message, "")
	}
	event = append(event, "\n\n"...)
	chunk := fmt.Appendf(nil, "%x\r\n%s\r\n", len(event), event)
	n, errno := send(x.c.fd, chunk, unix.MSG_EOR)
	return errno == 0 && n == len(chunk)
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
	if status != http.StatusNoContent {
		out = append(out, "\r\nContent-Length: "...)
		out = strconv.AppendInt(out, int64(len(body)), 10)
	}
	out = append(out, crlf...)
	out = appendField(out, []byte("x-request-id"), x.id)
	if x.replica != nil {
		out = append(append(append(out, "x-inferrail-replica: "...), x.replica.ID...), crlf...)
	}
	out = append(out, x.extra...)
	switch {
	case status == http.StatusMethodNotAllowed, status == http.StatusNoContent && x.allow != "":
		out = append(append(append(out, "Allow: "...), x.allow...), ", OPTIONS\r\n"...)
	case status == http.StatusUnauthorized:
		out = append(out, "WWW-Authenticate: Bearer\r\n"...)
	case status == http.StatusServiceUnavailable:
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
	x.c.s.buffered.Add(-x.held)
	x.held = 0
	p.body, p.in, p.out = nil, nil, nil
	x.body, x.in, x.out = nil, nil, nil
}

// finish releases everything the exchange holds and counts it.
func (x *exchange) finish(f failure) {
	if x.up != nil && f == none {
		x.up.close() // not to be used again
		x.up = nil
	}
	if r := x.replica; r != nil {
		switch {
		case f >= engineTimeout && f <= engineFraming && failureTable[f].blame == byEngine && !f.retried():
			r.failed(x.failedWith(f))
		case f == none && x.passed && !x.unavailable:
			r.succeeded()
		}
	}
	u, known := usage{}, false
	if x.passed && x.status == http.StatusOK {
		if fl := x.relay.filter; fl != nil && fl.found {
			u, known = fl.usage, true
		} else {
			u, known = findUsage(x.relay.tail)
		}
	}
	x.settle(f, u, known)
	x.c.s.requestDone(x, f)
	x.leave()
	x.giveBack()
	x.c.s.stats.finished(x, f, u, known)
}
