package proxy

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/proxy/prompt"
)

// exchange is one request and its response, top to bottom: read, route,
// choose, connect, send, first byte, relay, finish. It lives in its connection
// and is used for one request after another, on the connection's goroutine.
//
// attempt.go has its way to an engine, reply.go what it answers itself.
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

	// The prompt as the engine will see it, until giveBack; what was found out
	// stays. followed: readPrompt has looked at it. bodyShared: a worker may
	// still read body.
	prompt       *prompt.Prompt
	followed     bool
	bodyShared   bool
	promptReason prompt.Reason
	promptTokens int
	promptTook   time.Duration

	// What the index knows of it. blocks are there from lookUp until giveBack;
	// what was claimed of the replica's cache, a claim for each sequence that the
	// engine makes, from claim until undoClaims or releaseClaims. predicted is
	// how many tokens the replica has cached, -1 when that is not known.
	cache      *cache
	blocks     *blocks
	claims     []index.Claim
	oneClaim   [1]index.Claim // mostly all of claims
	predicted  int
	lookedUp   bool
	lookupTook time.Duration

	// What the key is charged. reserved is taken back or settled by finish.
	charged   bool
	reserved  policy.Charge
	asksUsage bool // the client did not, so its answer must not hold it

	// Whose it is, and what it is granted. budget is the time to its first token, 0
	// for no bound; verdict what admission has said last, retryAfter when it says
	// that there will be room.
	class      *Class
	tenant     string
	budget     time.Duration
	verdict    string
	retryAfter time.Duration

	// The choice. The request is inside replica's gate from choose until leave.
	// taken is since when admission has nothing against it; room is where it waits
	// for that or for a place, at the longest until leaveBy. moved: it gave up its
	// place in a line for a better one; displaces: it looks for a line in which
	// another one has to make room.
	taken, leaveBy time.Time
	room           *room
	waitsAs        waitKey // what it is counted as there
	moved          bool
	displaces      bool
	holding        holding
	piecing        *piecing // nil before a piece of the prompt was sent
	model          *Model
	replica        *Replica
	attempts       int        // the present one included
	tried          []*Replica // that have failed it, since the last pause
	evacuated      uint64     // the gate's evacuations when it came in
	decision       *decision  // the memory of the next three, from pick until giveBack
	candidates     []policy.Candidate
	places         []*Replica // of candidates
	costs          []float64  // of candidates
	asked          policy.Request
	// turned: asked is for this attempt; described: what does not change from one
	// to the next is in it.
	turned, described bool
	choice            policy.Choice
	pickedAt          time.Time // when replicas were looked at last
	choseIn           time.Duration
	noted             noted
	// trace is what spans are made of, nil for a request that is not traced.
	trace   *Trace
	judged  []judgement // of the policies beside the live one
	prefill policy.Sending
	// expected are the seconds from sending to the first token, and observed those
	// it took, below 0 as long as it was not seen.
	expected, observed float64

	// The response.
	until    time.Time // when its first byte must be there
	up       *engineConn
	pieces   [6][]byte // of the request, for the engine
	left     [][]byte  // of pieces: what the engine has not taken of the request
	in       []byte    // what the engine has sent up to the end of its head; pooled
	response responseHead
	out      []byte // heads are composed here; pooled
	extra    []byte // field lines of the agent's own
	// unavailable: the response says that the engine, not the request, is why
	// there is no answer.
	unavailable bool
	answered    bool // a response head is on its way to the client
	passed      bool // and it is an engine's
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

// smallBody is the first buffer of a request body; one that fits is never
// refused for the memory that others hold. keepBody is the largest that is kept
// for another body.
const (
	smallBody = 16 << 10
	keepBody  = 1 << 20
)

var (
	// bodies keep buffers by their size, up to smallBody and 4, 16 and 64 times
	// of it, so that a small body does not take the memory of a large one.
	bodies [4]sync.Pool
	heads  = sync.Pool{New: func() any { b := make([]byte, 0, 16<<10); return &b }}
)

// bodiesOf returns the pool of buffers for bodies of a size, -1 for unknown.
func bodiesOf(size int64) *sync.Pool {
	i := 0
	for most := int64(smallBody); size > most && i < len(bodies)-1; most *= 4 {
		i++
	}
	return &bodies[i]
}

// takeBody takes a buffer for a body of a size from the pools, which may be an
// empty one.
func (x *exchange) takeBody(size int64) {
	x.pooled.body, _ = bodiesOf(size).Get().(*[]byte)
	if x.pooled.body == nil {
		x.pooled.body = new([]byte)
	}
	x.body = (*x.pooled.body)[:0]
}

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
	x.followed, x.bodyShared = false, false
	x.predicted, x.lookedUp = -1, false
	x.http10, x.isHead, x.keepAlive, x.unread, x.reset = false, false, false, false, false
	x.held = 0
	x.model, x.replica, x.attempts, x.tried = nil, nil, 0, x.tried[:0]
	x.asked, x.turned, x.described, x.choice = policy.Request{}, false, false, policy.Choice{Index: -1}
	x.trace = nil
	x.noted, x.judged, x.prefill, x.expected, x.observed = noted{}, x.judged[:0], policy.Sending{}, 0, -1
	x.class, x.tenant, x.budget, x.verdict, x.retryAfter = nil, "", 0, "", 0
	x.taken, x.room, x.displaces, x.holding = time.Time{}, nil, false, holding{}
	x.piecing = nil
	x.up, x.left = nil, nil
	x.response, x.extra = responseHead{}, x.extra[:0]
	x.answered, x.passed, x.status, x.ttfb = false, false, 0, 0
	x.packet, x.why, x.kernel = false, "", Carried{}
	x.cause, x.message, x.param = nil, "", ""
	x.began = time.Now()
	x.c.s.stats.running.Add(1)
	x.pooled.in, x.pooled.out = heads.Get().(*[]byte), heads.Get().(*[]byte)
	x.body, x.in, x.out = nil, (*x.pooled.in)[:0], (*x.pooled.out)[:0]
}

// read reads the whole request, or as little of one that is not permitted as
// lets the connection go on.
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
	x.beginTrace()
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
	refused := x.permit()
	if size > 0 || size == -1 {
		if refused != none && (size == -1 || size > readAnyway || x.head.expect != nil) {
			x.unread = true
			return refused
		}
		if x.head.expect != nil && !x.http10 && c.br.Buffered() == 0 {
			if c.write([]byte("HTTP/1.1 100 Continue\r\n\r\n")) != nil {
				return clientLeft
			}
		}
		x.takeBody(size)
		if !c.hold(int64(cap(x.body))) {
			return buffersFull
		}
		if x.body, f = c.readBody(x.body, size); f != none {
			return f
		}
	}
	x.keepAlive = !x.head.options.has([]byte("close")) &&
		(!x.http10 || x.head.options.has([]byte("keep-alive")))
	x.sent = time.Now()
	return refused
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
	if string(x.method) == http.MethodOptions {
		return x.answer(http.StatusNoContent, "", nil)
	}
	fleet := x.c.s.fleet.Load()
	switch x.route {
	case routeHealth:
		x.extra = appendField(x.extra, []byte(InstanceField), []byte(x.c.s.instance))
		return x.answer(http.StatusOK, "", nil)
	case routeModels:
		return x.answer(http.StatusOK, "application/json", appendModels(nil, fleet.Listed, x.key))
	case routeModel:
		return x.describeModel(fleet)
	}
	if f := x.findModel(fleet); f != none {
		return f
	}
	if f := x.classify(); f != none {
		return f
	}
	if f := x.admit(); f != none {
		return f
	}
	x.readPrompt()
	x.lookUp()
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
		x.c.s.stats.overRate(x.keyLabel(), &quotas)
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
	case !x.passed && (f != clientLeft || x.replica == nil && !x.piecing.sent()):
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

// respond passes the response on.
func (x *exchange) respond() failure {
	c, h, r := x.c, &x.response, &x.relay
	r.reset(c, x.up)
	if r.prefills = h.events && h.status/100 == 2; r.prefills {
		r.gaps = &x.replica.gaps
	}
	if x.asksUsage && h.events && h.status == http.StatusOK {
		r.filter = &usageFilter{}
	}
	reframed := r.filter != nil
	x.keepAlive = x.keepAlive && !c.s.draining.Load() && (h.body != bodyUntilClose || reframed) &&
		!(x.http10 && (h.body == bodyChunked || reframed))
	x.status = h.status
	x.samplePrompt()
	x.tellCached()
	x.tellBudget()
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
	var room scratch
	body, _ := r.accept(early, &room) // readResponseHead has seen that it is framed rightly
	x.out = append(x.out, body...)
	if !h.events {
		// It has ended what is asked for here.
		now := time.Now()
		x.prefilled(now)
		x.prefilledWhole(now)
	}
	x.takePrefilled()
	x.answered, x.passed = true, true
	if x.why = x.join(); x.trace != nil && r.splice != nil {
		x.trace.Offered = time.Now()
	}
	f := r.writeNow(x.out)
	if f == none && (!r.frames.Ended() || len(r.rest) > 0) {
		f = x.waitRelay()
		x.takePrefilled()
	}
	x.account()
	if f == none && !h.close && !r.surplus && len(x.left) == 0 {
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
		x.takePrefilled()
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

// takePrefilled tells, once the relay has seen the first token, all who want to
// know of it.
func (x *exchange) takePrefilled() {
	if at, ok := x.relay.takePrefilled(); ok {
		x.prefilled(at)
		x.firstToken(at)
	}
}

// tellPrefilled does the same for the relay, on the shard's goroutine and under the
// relay's mu, while the exchange's goroutine waits for the end of the response. It
// reports false when that would keep other responses waiting: it is left to the
// exchange then.
func (x *exchange) tellPrefilled(at time.Time) bool {
	switch len(x.claims) {
	case 0:
	case 1:
		if !x.cache.index.TryPrefilled(&x.claims[0], at) {
			return false
		}
	default:
		return false
	}
	x.firstToken(at)
	return true
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

// giveBack returns the exchange's buffers to their pools.
func (x *exchange) giveBack() {
	p := &x.pooled
	if p.in == nil {
		return
	}
	x.putDecision()
	x.putBlocks()
	x.putPrompt()
	*p.in, *p.out = x.in, x.out
	heads.Put(p.in)
	heads.Put(p.out)
	if p.body != nil && cap(x.body) <= keepBody && !x.bodyShared {
		*p.body = x.body
		bodiesOf(int64(cap(x.body))).Put(p.body)
	}
	x.c.s.buffered.Add(-x.held)
	x.held = 0
	p.body, p.in, p.out = nil, nil, nil
	x.body, x.in, x.out = nil, nil, nil
	clear(x.pieces[:])
}

// finish releases everything the exchange holds and counts it.
func (x *exchange) finish(f failure) {
	if x.up != nil && f == none {
		x.up.close() // not to be used again
		x.up = nil
	}
	if r := x.replica; r != nil {
		switch {
		case x.passed && x.unavailable: // ask has told it
		case f >= engineTimeout && f <= engineFraming && failureTable[f].blame == byEngine && !f.retried():
			r.failed(x.failedWith(f))
		case f == none && x.passed && x.status < http.StatusInternalServerError && !x.relay.tokenless():
			// A 500 may be the request's fault or the engine's, and so may an error that
			// is all of a stream: it says nothing.
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
	if known && f == none {
		x.comparePrompt(u)
		x.compareCached(u)
	}
	now := time.Now() // once for all: a request reads the clock often enough
	x.learn(f, u, known, now)
	x.endPieces()
	x.takesWhole()
	u.cached -= min(u.cached, uint64(x.begunTokens()))
	x.releaseClaims(x.generated(u, known, f == none), now)
	x.settle(f, u, known)
	x.conclude(f, u, known)
	x.c.s.requestDone(x, f, u)
	x.leave()
	x.traceBody()
	x.giveBack()
	x.c.s.stats.finished(x, f, u, known, now)
	x.endTrace(f, u, known, now)
	x.piecing = nil // a connection may be idle for long
}
