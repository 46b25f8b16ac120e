package simulator

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"
)

// exchange is one generating request and its answer. It lives on the goroutine
// that serves the connection; the engine holds its sequences from arrive to
// depart.
type exchange struct {
	s *Server
	// process and rank are those that the sequences are in.
	process *process
	rank    *rank
	w       http.ResponseWriter
	r       *http.Request
	http    *http.ResponseController
	// ctx ends when the client leaves or the server closes.
	ctx     context.Context
	conn    *conn
	req     *request
	*answer // nil for a raw body
	// reason is what the metrics count an answer under that is not complete.
	reason string

	timer *time.Timer
	// said: something of a stream was sent.
	said bool
	// wake holds a token when a sequence of this exchange has a new token, or is
	// otherwise not as it was.
	wake chan struct{}
	// ended: abort was called.
	ended atomic.Bool
	buf   []byte
}

// maxRequestBytes bounds a request's body.
const maxRequestBytes = 256 << 20

// infer serves the requests to an inference route whose body is JSON.
func (s *Server) infer(parse parser) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var req *request
		body, err := readBody(w, r)
		if err == nil {
			req, err = parse(&s.cfg, body)
		}
		if err != nil {
			s.refuse(w, r, err)
			return
		}
		s.serve(w, r, req)
	}
}

// readBody reads the body to its end: only then does net/http watch for the
// client's leaving.
func readBody(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxRequestBytes))
	if err == nil {
		return body, nil
	}
	status := http.StatusBadRequest
	if _, tooLarge := errors.AsType[*http.MaxBytesError](err); tooLarge {
		status = http.StatusRequestEntityTooLarge
	}
	return nil, &apiError{status: status, kind: http.StatusText(status), param: "", message: "cannot read the request's body: " + err.Error()}
}

// serve takes a checked request to the end of its answer.
func (s *Server) serve(w http.ResponseWriter, r *http.Request, req *request) {
	if !req.ownFaults {
		set := s.faults.Load()
		if req.faults = set.take(); set.Throttle != 0 {
			s.throttle()
		}
	}
	req.distort()
	arrived := s.now()
	x := &exchange{
		s: s, w: w, r: r, http: http.NewResponseController(w),
		ctx: r.Context(), conn: connOf(r.Context()), req: req,
		timer: time.NewTimer(time.Hour), wake: make(chan struct{}, 1),
		reason: "abort",
	}
	x.timer.Stop()
	x.conn.split = 0
	complete := false
	if req.api != plain {
		s.running.Add(1)
		defer func() {
			s.running.Add(-1)
			if complete {
				s.finished.Add(1)
			} else {
				s.aborted.Add(1)
			}
		}()
	}

	// A write that waits for a client who reads nothing must end when that
	// client leaves, too.
	defer context.AfterFunc(x.ctx, func() { _ = x.conn.SetWriteDeadline(time.Unix(1, 0)) })()

	if x.misbehave() {
		return
	}
	if req.raw != nil {
		complete = x.rawBody()
		return
	}
	if req.faults.SplitWrites {
		x.conn.split = s.nextSplit()
	}
	id := req.rid
	if id == "" {
		id = requestID(r, req.id)
	}
	x.answer = newAnswer(&s.cfg, req, id, s.created())
	x.arrived = arrived
	if req.refused != nil {
		complete = x.refuse(req.refused)
		return
	}
	if s.face.admit != nil && (req.api != plain || req.loads) {
		release, err := s.face.admit(x)
		if err != nil {
			complete = x.refuse(err)
			return
		}
		defer release()
	}
	if err := x.arrive(r.Header); err != nil {
		complete = x.refuse(err)
		return
	}
	defer func() { x.depart(complete) }()
	if s.cfg.sglang() {
		s.exchanges.Store(x, nil)
		defer s.exchanges.Delete(x)
	}
	if !x.pause(time.Duration(req.faults.HeadDelayUS) * time.Microsecond) {
		return
	}
	if req.stream {
		complete = x.stream()
	} else {
		complete = x.body()
	}
}

// refuse answers a request for which there is no room, and reports whether the
// answer has ended as one of its kind does.
func (x *exchange) refuse(err error) bool {
	if (x.s.face.refusesInStream || x.req.refused != nil) && x.req.stream {
		x.failed = asAPIError(err)
		x.s.current().metrics.refused(x.failed)
		x.head(x.w.Header())
		return x.sendEvents(x.appendFailure(x.buf[:0]))
	}
	x.s.refuse(x.w, x.r, err)
	return false
}

// arrive enters the sequences into an engine.
func (x *exchange) arrive(h http.Header) error {
	block := naming{block: x.s.cfg.BlockSize, sglang: x.s.cfg.sglang()}
	for i := range x.choices {
		block.extend(&x.choices[i].seq, len(x.choices[i].seq.Prompt))
	}
	x.s.mu.Lock()
	defer x.s.mu.Unlock()
	now := x.s.now()
	x.process = x.s.process
	var err error
	if x.rank, err = x.process.pickLocked(h, now); err != nil {
		return err
	}
	for i := range x.choices {
		seq := &x.choices[i].seq
		if !x.rank.engine.Fits(seq.prompt() + seq.Output) {
			return badParameter("input_tokens", "The prompt of %d tokens and the %d that follow have no room in the KV cache.", seq.prompt(), seq.Output)
		}
	}
	for i := range x.choices {
		seq := &x.choices[i].seq
		seq.watch = &watch{wake: x.wake, whole: !x.req.stream}
		x.choices[i].watch = seq.watch
		x.rank.engine.Arrive(seq, now)
		x.rank.sequences, x.rank.prompted = x.rank.sequences+1, x.rank.prompted+seq.prompt()
	}
	x.process.settle(x.rank, now)
	x.process.metrics.arrived(x.answer, x.rank)
	return nil
}

// depart takes the sequences out of the engine.
func (x *exchange) depart(complete bool) {
	x.s.mu.Lock()
	defer x.s.mu.Unlock()
	now := x.s.now()
	for i := range x.choices {
		seq := &x.choices[i].seq
		if x.req.api.generates() {
			x.rank.generated += x.rank.engine.Made(seq)
		}
		x.rank.engine.Depart(seq, now)
	}
	x.process.settle(x.rank, now)
	for i := range x.choices {
		x.process.metrics.ended(x, &x.choices[i], complete)
	}
}

// stream sends the answer as server-sent events and reports whether it was
// sent to its end. Each event is written and flushed by itself: one chunk, and
// at most one token.
func (x *exchange) stream() bool {
	if x.req.opens == withStart && !x.begun() {
		return false
	}
	x.head(x.w.Header())
	if !x.req.faults.HeadWithToken && x.req.opens != withToken {
		x.w.WriteHeader(http.StatusOK)
		if x.said = true; x.http.Flush() != nil {
			return false
		}
	}
	x.clock = x.s.now()
	if !x.sendEvents(x.appendPrelude(x.buf[:0])) {
		return false
	}
	total := 0
	for i := range x.choices {
		total += x.choices[i].seq.Output
	}
	for tokens := 0; ; tokens++ {
		if x.req.faults.Break != "" && tokens == x.req.faults.BreakAfter {
			x.breakOff(x.req.faults.Break)
			return false
		}
		if tokens == total {
			break
		}
		i := x.nextToken()
		if i < 0 && x.ended.Load() {
			x.aborted, x.clock = true, x.s.now()
			return x.sendEvents(x.appendFailure(x.buf[:0]))
		}
		if i < 0 {
			return false
		}
		x.clock = x.s.now()
		if tokens == 0 && !x.sendEvents(x.appendOpening(x.buf[:0])) {
			return false
		}
		if !x.sendEvents(x.appendToken(x.buf[:0], i)) {
			return false
		}
		x.process.metrics.token(x, &x.choices[i], x.s.now())
	}
	return x.sendEvents(x.appendClosing(x.buf[:0]))
}

// sendEvents sends events one by one and keeps their memory for the next.
func (x *exchange) sendEvents(events []byte) bool {
	x.buf = events
	for len(events) > 0 {
		x.said = true
		end := bytes.Index(events, x.eventEnd) + len(x.eventEnd)
		if _, err := x.w.Write(events[:end]); err != nil || x.http.Flush() != nil {
			return false
		}
		events = events[end:]
	}
	return true
}

// send writes and flushes a part of a body and keeps its memory for the next.
func (x *exchange) send(part []byte) bool {
	x.buf = part
	if _, err := x.w.Write(part); err != nil {
		return false
	}
	return x.http.Flush() == nil
}

// abort makes the exchange end with what there is. It may be called from any
// goroutine.
func (x *exchange) abort() {
	x.ended.Store(true)
	select {
	case x.wake <- struct{}{}:
	default:
	}
}

// begun waits until the engine has begun with a choice, and reports false if the
// client left before.
func (x *exchange) begun() bool {
	for {
		for i := range x.choices {
			if x.look(&x.choices[i]); x.choices[i].planned {
				return true
			}
		}
		if _, ok := x.until(false, 0); !ok {
			return false
		}
	}
}

// nextToken waits until a token is ready and returns its choice, or -1 if the
// client left before. Of several that are ready it is the one of which least was
// sent.
func (x *exchange) nextToken() int {
	for {
		if x.ended.Load() {
			return -1
		}
		i := x.earliest()
		ready, ok := x.until(i >= 0, 0)
		if !ok {
			return -1
		}
		if ready {
			return i
		}
	}
}

// earliest returns the choice with a token that is ready and was not sent, or -1.
func (x *exchange) earliest() int {
	best := -1
	for i := range x.choices {
		c := &x.choices[i]
		if c.sent < int(c.watch.made.Load()) && (best < 0 || c.sent < x.choices[best].sent) {
			best = i
		}
	}
	if best >= 0 && x.choices[best].sent == 0 {
		x.look(&x.choices[best])
	}
	return best
}

// watch is what an exchange sees of one of its sequences. The goroutine that lets the
// engine's time pass, or who else calls the engine, writes to it; the exchange reads.
type watch struct {
	// made is how many tokens are ready.
	made atomic.Int64
	// wake is told when there is something to see; of a sequence that is wanted as a
	// whole, not each of its tokens.
	wake  chan struct{}
	whole bool
}

// see notes how many tokens are ready; changed: there is more to see than that.
func (w *watch) see(made int, changed bool) {
	if int64(made) != w.made.Load() {
		w.made.Store(int64(made))
		changed = changed || !w.whole
	}
	if changed {
		select {
		case w.wake <- struct{}{}:
		default:
		}
	}
}

// look reads what the engine says of a choice.
func (x *exchange) look(c *choice) {
	x.s.mu.Lock()
	defer x.s.mu.Unlock()
	c.cached, c.planned = c.seq.Cached, c.seq.state != Waiting
	c.began, c.computed = c.seq.Start, c.seq.First
	if slots := x.process.metrics.slotsOf(x.rank); slots != nil {
		slots.follow(x.s.now())
		c.slot = c.seq.seat
	}
}

// until waits for the time due, if that is known. It reports ready when that
// has come, not ready when a sequence has changed before, and not ok when the
// client has left.
func (x *exchange) until(known bool, due time.Duration) (ready, ok bool) {
	if x.ctx.Err() != nil {
		return false, false
	}
	now := x.s.now()
	if known && (due <= now || x.s.cfg.ZeroLatency) {
		return true, true
	}
	// What a stream says while there is no token comes first.
	interim := x.req.stream && x.interim != 0 && (!known || x.interim < due)
	switch {
	case interim:
		x.timer.Reset(x.interim - now)
	case known:
		x.timer.Reset(due - now)
	default:
		x.timer.Stop()
	}
	select {
	case <-x.timer.C:
		if interim {
			x.clock = x.s.now()
			return false, x.sendEvents(x.req.dialect.appendPart(x.buf[:0], x.answer, atInterim, 0))
		}
		return true, true
	case <-x.wake:
		return false, true
	case <-x.ctx.Done():
		return false, false
	}
}

// pause waits for d and reports false if the client left before.
func (x *exchange) pause(d time.Duration) bool {
	if d > 0 {
		x.timer.Reset(d)
		select {
		case <-x.timer.C:
		case <-x.ctx.Done():
		}
	}
	return x.ctx.Err() == nil
}

// body sends the answer in one piece when its last token is ready, and reports
// whether it was sent.
func (x *exchange) body() bool {
	for !x.ended.Load() {
		ready, ok := x.until(x.done(), 0)
		if !ok {
			return false
		}
		if ready {
			break
		}
	}
	if x.ended.Load() {
		return x.cutBody()
	}
	f := &x.req.faults
	if f.Break == "error" {
		x.reason = "error"
		x.s.refuse(x.w, x.r, statusError(x.s.face.failure))
		return false
	}
	if x.req.defect != nil {
		x.reason = "error"
		x.s.refuse(x.w, x.r, x.req.defect)
		return false
	}
	x.process.metrics.whole(x)
	x.clock = x.s.now()
	x.buf = x.appendPaddedBody(x.buf[:0])
	x.head(x.w.Header())
	if f.Break != "chunk" {
		x.w.Header().Set("Content-Length", strconv.Itoa(len(x.buf)+f.LengthExcess))
	}
	if f.Break != "" && f.BreakAfter < len(x.buf) {
		if f.BreakAfter > 0 || f.Break == "chunk" {
			x.send(x.buf[:f.BreakAfter])
		}
		x.breakOff(f.Break)
		return false
	}
	if !x.send(x.buf) {
		return false
	}
	if f.LengthExcess > 0 {
		x.breakOff("fin")
	}
	return true
}

// cutBody sends what there was of an answer when it was aborted. Where the API
// has no words for that it is an error.
func (x *exchange) cutBody() bool {
	if _, ok := x.req.dialect.(*generated); !ok {
		x.s.refuse(x.w, x.r, &apiError{status: http.StatusServiceUnavailable, kind: "abort", message: "The request was aborted."})
		return false
	}
	x.aborted, x.clock = true, x.s.now()
	x.s.mu.Lock()
	for i := range x.choices {
		c := &x.choices[i]
		c.made = x.rank.engine.Made(&c.seq)
	}
	x.s.mu.Unlock()
	x.head(x.w.Header())
	return x.send(x.appendPaddedBody(x.buf[:0]))
}

// done reports whether all choices have their last token.
func (x *exchange) done() bool {
	for i := range x.choices {
		c := &x.choices[i]
		if int(c.watch.made.Load()) < c.seq.Output {
			return false
		}
		x.look(c)
	}
	return true
}

// rawBody sends what Raw asks for and reports whether all was sent. The engine
// has no part in it.
func (x *exchange) rawBody() bool {
	raw := x.req.raw
	if raw.Split {
		x.conn.split = 1 | mix(raw.Seed)
	}
	if raw.Length == "fixed" {
		total := 0
		for i := range raw.Chunks {
			total += raw.size(i)
		}
		x.w.Header().Set("Content-Type", "application/octet-stream")
		x.w.Header().Set("Content-Length", strconv.Itoa(total))
	} else {
		x.w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	}
	x.w.WriteHeader(http.StatusOK)
	if x.http.Flush() != nil {
		return false
	}
	for i := 0; ; i++ {
		if raw.Break != "" && i == raw.BreakAfter {
			x.breakOff(raw.Break)
			return false
		}
		if i == raw.Chunks {
			return true
		}
		if !x.pause(time.Duration(raw.IntervalUS)*time.Microsecond) || !x.send(raw.appendPiece(x.buf[:0], i)) {
			return false
		}
	}
}
