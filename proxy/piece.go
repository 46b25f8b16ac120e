package proxy

import (
	"bytes"
	"errors"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/proxy/prompt"
)

// piecing is what an exchange remembers of its prompt's being computed in pieces, by the
// rule of Model.Pieces. The exchange makes one for the first piece, since few have any, and
// uses it on its goroutine until the request is over.
type piecing struct {
	// rest is what is left of the prompt at the replica at, nil for nowhere.
	rest policy.Rest
	at   *Replica
	// count is how many pieces were sent. off: what is left is sent whole. failed: a piece
	// was not computed, or the request itself failed after them, and so what was foretold
	// for all of it is void.
	count       int
	off, failed bool
	// began is when the first was sent, and expected how many seconds all of it was to
	// take then.
	began    time.Time
	expected float64
	// until is how long it waits at most for others that have begun, zero before it does.
	until time.Time
	// begun is what was computed, and where, the last of it at its end; reached is how many
	// of the prompt's tokens that was sent for. refused is who would not compute a piece,
	// with that status.
	begun   []begunAt
	reached int
	refused *Replica
	status  int
	// claim is what the piece that is computed leaves in its engine's cache.
	claim index.Claim
	// body asks for it, and id is what it is called; pooled is where body came from.
	body, id []byte
	pooled   *[]byte
}

// begunAt is what pieces of one prompt were at one replica: it had found tokens cached
// before the first of them, and has computed so many.
type begunAt struct {
	replica         *Replica
	found, computed int
}

// foretold reports that what was foretold when the first piece was sent is of all that was
// sent since. v may be nil.
func (v *piecing) foretold() bool { return v.sent() && !v.failed }

// sent reports that a piece was sent. v may be nil.
func (v *piecing) sent() bool { return v != nil && v.count > 0 }

// place takes a place at a replica for the whole request, after what is to be computed of
// its prompt in pieces before.
func (x *exchange) place() failure {
	if v := x.piecing; v != nil && x.attempts > 1 {
		v.failed = true
	}
	for {
		if f := x.choose(); f != none {
			return f
		}
		n := x.nextPiece()
		if n == 0 {
			x.endPieces()
			return none
		}
		c := &x.candidates[x.choice.Index]
		x.remain(c, int(c.Cached))
		if x.mustPark(c) {
			if f := x.park(); f != none {
				return f
			}
			continue
		}
		if stays, f := x.sendPiece(n); stays || f != none {
			x.endPieces()
			if f != none {
				// It has been at the replica, and has failed there.
				x.judged = x.judged[:0]
				x.noteDecision()
				x.traceDecision()
			}
			return f
		}
	}
}

// nextPiece is how many of the prompt's tokens the replica where the request has its place
// is asked for next, 0 for the request itself. It must be known what the replica has
// cached, and a piece must be found there by the next one.
//
// Where a replica takes a number of requests and has no line, whoever comes while a piece
// is being left would have the place, and the request be refused with a part of it
// computed. And where a piece has left nothing in the cache another one would not either.
func (x *exchange) nextPiece() int {
	v, i := x.piecing, x.choice.Index
	if x.model.Pieces.Length <= 0 || v != nil && (v.off || v.count == policy.MostPieces) || x.attempts > 1 || !x.shared() ||
		i < 0 || x.places[i] != x.replica || x.replica.takesWhole.Load() {
		return 0
	}
	if _, exact := x.blocks.at(x.replica); !exact || x.replica.gate.lineless() {
		return 0
	}
	n := x.model.Pieces.Cut(&x.asked, &x.candidates[i], int(x.replica.block.Load()))
	if n > 0 && x.c.s.buffered.Load()+int64(mostDigits*n) > x.limits.MaxBuffered {
		return 0 // bodies take all the memory that they may
	}
	if v != nil && len(v.begun) > 0 && v.begun[len(v.begun)-1].replica == x.replica && n <= v.reached {
		return 0
	}
	return n
}

// shared reports that the prompt's tokens are all known, and that whoever else asks for the
// first of them finds them cached: those of one with a salt are found by none without it.
func (x *exchange) shared() bool {
	b := x.blocks
	return b != nil && x.promptReason == prompt.Exact && b.sequences() == 1 && x.asked.Tokens == len(x.prompt.IDs) &&
		len(x.prompt.Salt) == 0 && !x.call.uncached(x.path)
}

// remain says that what is behind the first n tokens of the prompt is left to compute at the
// replica where the request has its place, which c was described of.
func (x *exchange) remain(c *policy.Candidate, n int) {
	if x.piecing == nil {
		x.piecing = &piecing{}
	}
	v, r := x.piecing, x.replica
	if v.at != r {
		v.leave()
	}
	left := c.Speed.Time(policy.Prefill(x.asked.Tokens-n, n))
	v.rest.Stay(&r.standing, left, x.model.Pieces.Key(x.sent.Sub(epoch).Seconds(), left))
	v.at = r
}

// leave says that nothing is left anywhere, and tells those who have waited for that.
func (v *piecing) leave() {
	v.rest.End()
	if v.at != nil {
		v.at.parked.wake()
		v.at = nil
	}
}

// mustPark reports that another prompt has begun at the replica that comes first. It is
// waited for as long as was foretold, and as this one lets later ones pass: where it takes
// longer the engine may have lost it, and others are not to wait for that.
func (x *exchange) mustPark(c *policy.Candidate) bool {
	v := x.piecing
	if v.rest.First() || !x.goesOn() {
		return false
	}
	now := time.Now()
	if v.until.IsZero() {
		left := c.Speed.Time(policy.Prefill(x.asked.Tokens-int(c.Cached), int(c.Cached)))
		v.until = now.Add(durationOf(policy.Holding{}.Longest(c.Wait+c.Rest, left)))
	}
	return now.Before(v.until)
}

// park leaves the replica, where another prompt has begun that comes first, and waits until
// that is done, or for so long that there may be a better replica by now.
func (x *exchange) park() failure {
	c, r, began := x.c, x.replica, time.Now()
	x.leave()
	k := x.waitKey()
	c.s.waits.add(k, 1)
	defer func() {
		c.s.waits.add(k, -1)
		held := x.holding.took + time.Since(began)
		x.holding = holding{before: held, took: held}
	}()
	c.expect(earlier(x.until, earlier(x.piecing.until, began.Add(roomTick))))
	r.parked.enter(c)
	defer r.parked.leave(c)
	// After expect no news is lost; what came before it is looked for.
	if !x.piecing.rest.First() {
		if f := c.wait(none); f != none {
			return f
		}
	}
	if !time.Now().Before(x.until) {
		return queueTimeout
	}
	x.lookAgain()
	return none
}

// parking is where requests wait whose prompts have begun at a replica until those that
// come before them are done. Any goroutine may call its methods. The zero value is empty.
type parking struct {
	mu    sync.Mutex // guards conns
	conns []*conn
}

func (p *parking) enter(c *conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conns = append(p.conns, c)
}

func (p *parking) leave(c *conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if i := slices.Index(p.conns, c); i >= 0 {
		p.conns = slices.Delete(p.conns, i, i+1)
	}
}

// some reports that one waits.
func (p *parking) some() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.conns) > 0
}

// wake lets all look whether it is their turn.
func (p *parking) wake() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		c.wake()
	}
}

// mostDigits is how many bytes a token takes in a body that names it by its number.
const mostDigits = 7

// sendPiece lets the replica compute the first n tokens of the prompt, and leaves it. When
// that does not go well the whole request is sent next, to another replica if there is one
// and this one has failed, and what comes of that is what the client is told; an error is
// told only where the request is over, which ends with its place and all else then.
//
// stays: it still has its place, and is sent whole there, for there is none elsewhere. The
// replica is about to leave the fleet, and finishes what it has.
func (x *exchange) sendPiece(n int) (stays bool, f failure) {
	r, c, v := x.replica, &x.candidates[x.choice.Index], x.piecing
	if v.count++; v.count == 1 {
		v.began, v.expected = time.Now(), x.expected
	}
	x.remain(c, n)
	f = x.computePiece(n, c)
	outcome, computed := pieceComputed, f == none && x.response.status == http.StatusOK
	if !computed {
		v.off, v.failed, outcome = true, true, pieceRefused
		if f != none {
			outcome = f.label()
		}
		v.leave()
	}
	x.c.s.stats.pieces.WithLabelValues(x.modelLabel(), outcome).Inc()
	switch {
	case f.retried():
		if failureTable[f].blame == byEngine {
			r.failed(x.failedWith(f))
		}
		if x.elsewhere() {
			x.tried = append(x.tried, r)
		}
	case f != none:
		return false, f
	case x.response.status/100 == 4 && x.response.status != http.StatusTooManyRequests:
		v.refused, v.status = r, x.response.status
	}
	if f == none && !x.goesOn() {
		v.off = true
		x.leaveBacklog(time.Now())
		x.lookAgain()
		found, _ := x.blocks.at(r)
		c.Cached = policy.Count(found.any)
		x.promise()
		return true, none
	}
	r.gate.answered(x.c)
	x.leave()
	// What it was held for is over; where it comes in the order now is by what is left.
	x.holding = holding{before: x.holding.took, took: x.holding.took}
	x.ttfb, x.cause, x.in, x.response = 0, nil, x.in[:0], responseHead{}
	x.lookAgain()
	return false, none
}

// goesOn reports that a replica could be chosen for the request if it left its own.
func (x *exchange) goesOn() bool {
	served := x.follow()
	return served && slices.Contains(x.model.Replicas, x.replica) || served && x.elsewhere()
}

// computePiece asks the replica for a token after the first n of the prompt, and reads its
// answer. c is what the replica was chosen by.
func (x *exchange) computePiece(n int, c *policy.Candidate) (f failure) {
	v, p, r := x.piecing, &x.prefill, x.replica
	asked := policy.Request{Tokens: n}
	p.Leave(time.Now()) // the whole prompt was promised
	p.Promise(&r.standing, n, 1, int(c.Cached))
	x.in, x.left, x.cause, x.ttfb = x.in[:0], nil, nil, 0
	v.takeBody(n)
	size := int64(cap(v.body))
	x.c.s.buffered.Add(size)
	defer func() {
		x.c.s.buffered.Add(-size)
		v.putBody()
	}()
	v.body = appendPiece(v.body, x.model.Name, x.prompt.IDs[:n])
	claimed := false
	for x.up = r.take(); ; {
		if x.up == nil {
			if x.up, f, x.cause = x.c.dial(r, x.until); f != none {
				break
			}
		}
		now := time.Now()
		if !claimed {
			claimed = true
			x.claimPiece(n, now)
		}
		p.Foretell(&asked, c)
		p.Expect(&r.standing, true, true, now)
		if f = x.writePiece(); f == none {
			f = x.readResponseHead()
		}
		if f != engineDied || !x.up.reused || len(x.in) > 0 || x.ttfb > 0 {
			break
		}
		x.up.abort()
		x.up, x.left, x.cause = nil, nil, nil
		x.c.s.stats.replays.Add(1)
	}
	now := time.Now()
	if f == none && x.response.status == http.StatusOK {
		// Its one token is its first.
		p.First(r.InFlight(), r.Pending(), r.standing.TellsCached(), now)
		x.cache.index.Prefilled(&v.claim, now)
	}
	if f == none {
		f = x.readPieceAnswer()
	}
	if f != none || x.response.status != http.StatusOK {
		x.cache.index.Undo(&v.claim)
		return f
	}
	found := p.Cached
	if u, known := findUsage(x.in[max(len(x.in)-TailBytes, 0):]); known {
		if u.cachedTold {
			found = int(min(u.cached, uint64(n)))
			x.cache.index.Found(&v.claim, found)
		}
		p.Told(&r.standing, u.prompt, u.cached, u.cachedTold && !u.partial)
	}
	v.compute(r, n, found)
	x.cache.index.Release(&v.claim, 1, now)
	r.succeeded()
	return none
}

// compute notes that the replica has computed the first n tokens, of which it had found
// some in its cache.
func (v *piecing) compute(r *Replica, n, found int) {
	at := begunAt{replica: r, found: found}
	if i := slices.IndexFunc(v.begun, func(b begunAt) bool { return b.replica == r }); i >= 0 {
		at = v.begun[i]
		v.begun = slices.Delete(v.begun, i, i+1)
	}
	at.computed += max(n-found, 0)
	v.begun, v.reached = append(v.begun, at), n
}

// claimPiece enters in the index what the first n tokens leave in the replica's cache.
func (x *exchange) claimPiece(n int, now time.Time) {
	b := x.blocks
	k := b.of(x.replica)
	if k < 0 {
		return // the size of its blocks is another one since it was chosen
	}
	p := b.prompts[k] // of the one sequence
	p.IDs, p.Chain = p.IDs[:n], p.Chain[:n/p.Block]
	x.cache.index.Look(&b.looks[k], &p)
	h := b.looks[k].Held(x.replica.Slot)
	x.prefill.Cached = cachedOf(&p, &h).any
	x.cache.index.Claim(&x.piecing.claim, x.replica.Slot, &p, now)
}

// appendPiece appends the body that asks for a token after ids. vLLM and SGLang take the
// numbers of tokens for a completion's prompt.
func appendPiece(dst []byte, model string, ids []uint32) []byte {
	dst = append(dst, `{"model":`...)
	dst = appendJSONString(dst, model)
	dst = append(dst, `,"max_tokens":1,"temperature":0,"stream":false,"prompt":[`...)
	for i, id := range ids {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendUint(dst, uint64(id), 10)
	}
	return append(dst, "]}"...)
}

// writePiece sends it, with the fields of the request's head: whoever asks for the whole
// asks for its parts. Its id is the request's, with the number of the piece.
func (x *exchange) writePiece() failure {
	v := x.piecing
	v.id = append(v.id[:0], x.id...)
	if id := strconv.AppendInt(append(v.id, "-piece"...), int64(v.count), 10); wellFormedID(id) {
		v.id = id
	}
	x.out = x.head.appendTo(x.out[:0], asEngine{method: []byte(http.MethodPost), target: []byte("/v1/completions"), replica: x.replica,
		id: v.id, length: len(v.body), hideKey: !x.access.Open(), piece: true})
	x.left = append(x.pieces[:0], x.out, v.body)
	return x.sendLeft()
}

// What comes of a piece, beside failures.
const (
	pieceComputed = "computed"
	pieceRefused  = "refused"
)

// endPieces says that nothing is left to compute in pieces. What is expected of all is
// what was when it began.
func (x *exchange) endPieces() {
	v := x.piecing
	if v == nil {
		return
	}
	v.leave()
	if v.foretold() {
		x.expected = v.expected
	}
}

// takesWhole lets a replica be sent no piece any more that has refused one and has then
// answered the whole request: what it has refused was nothing of the client's.
func (x *exchange) takesWhole() {
	v := x.piecing
	if v == nil || v.refused == nil || v.refused != x.replica || !x.passed || x.status != http.StatusOK {
		return
	}
	if !x.replica.takesWhole.Swap(true) {
		x.c.s.log.Warn("the engine does not compute prompts in pieces; it is sent all whole", "replica", x.replica.ID, "status", v.status)
	}
}

// mostPieceAnswer bounds what is read of the answer to a piece.
const mostPieceAnswer = 64 << 10

// readPieceAnswer reads the rest of the answer, of which readResponseHead has the
// beginning, into x.in, and keeps the connection for others.
func (x *exchange) readPieceAnswer() failure {
	h, frames := &x.response, Frames{}
	switch h.body {
	case bodyNone, bodyUntilClose: // of the latter the head will do
		frames = fixedFrames(0)
	case bodyFixed:
		frames = fixedFrames(h.length)
	}
	at := bytes.Index(x.in, crlfcrlf) + 4
	for !frames.Ended() {
		n, err := frames.Advance(x.in[at:])
		if at += n; err == nil && !frames.Ended() && len(x.in) > mostPieceAnswer {
			err = errLongAnswer
		}
		if err != nil {
			x.cause = err
			return engineHead
		}
		if frames.Ended() {
			break
		}
		if f := x.readMore(); f != none {
			return f
		}
	}
	if h.close || at < len(x.in) || len(x.left) > 0 {
		x.up.close()
	} else {
		x.up.put()
	}
	x.up = nil
	return none
}

var errLongAnswer = errors.New("the answer to a request for one token is too long")

// takeBody takes a buffer for the body of a piece of n tokens from the pools, and putBody
// gives it back.
func (v *piecing) takeBody(n int) {
	size := int64(mostDigits * n)
	v.pooled, _ = bodiesOf(size).Get().(*[]byte)
	if v.pooled == nil {
		v.pooled = new([]byte)
	}
	v.body = slices.Grow((*v.pooled)[:0], int(size)+smallPiece)
}

func (v *piecing) putBody() {
	if cap(v.body) <= keepBody {
		*v.pooled = v.body
		bodiesOf(int64(cap(v.body))).Put(v.pooled)
	}
	v.pooled, v.body = nil, nil
}

// smallPiece is what the body of a piece has beside its tokens.
const smallPiece = 256

// begunTokens is how much of what the engine had cached of the prompt was computed for this
// request just before: by it, and not by one where the request was in between.
func (x *exchange) begunTokens() int {
	if x.piecing == nil || x.replica == nil {
		return 0
	}
	for _, b := range x.piecing.begun {
		if b.replica == x.replica {
			return max(min(x.predicted-b.found, b.computed), 0)
		}
	}
	return 0
}
