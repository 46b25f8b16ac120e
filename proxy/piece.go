package proxy

import (
	"bytes"
	"errors"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/proxy/prompt"
)

// piecing is what an exchange remembers of its prompt's being computed in pieces, by the
// rule of Model.Pieces. The exchange makes one for the first piece, since few have any, and
// uses it on its goroutine until the request is over.
type piecing struct {
	// rest is what is left of the prompt, and where.
	rest policy.Rest
	// count is how many pieces were sent. off: what is left is sent whole.
	count int
	off   bool
	// began is when the first was sent, found how much of the prompt was cached there
	// then, and expected how many seconds all of it was to take.
	began    time.Time
	found    int
	expected float64
	// claim is what the piece that is computed leaves in its engine's cache.
	claim index.Claim
	// body asks for it, and id is what it is called; pooled is where body came from.
	body, id []byte
	pooled   *[]byte
}

// place takes a place at a replica for the whole request, after what is to be computed of
// its prompt in pieces before.
func (x *exchange) place() failure {
	for {
		if f := x.choose(); f != none {
			return f
		}
		n := x.nextPiece()
		if n == 0 {
			if v := x.piecing; v != nil {
				v.rest.End()
				x.expected = v.expected
			}
			return none
		}
		if f := x.sendPiece(n); f != none {
			return f
		}
	}
}

// nextPiece is how many of the prompt's tokens the replica where the request has its place
// is asked for next, 0 for the request itself. It must be known what the replica has
// cached, and a piece must be found there by the next one: one with a salt would be by
// none that has no salt.
func (x *exchange) nextPiece() int {
	v, b, i := x.piecing, x.blocks, x.choice.Index
	if x.model.Pieces.Length <= 0 || v != nil && (v.off || v.count == policy.MostPieces) || x.attempts > 1 || b == nil ||
		x.promptReason != prompt.Exact || b.sequences() != 1 || x.asked.Tokens != len(x.prompt.IDs) ||
		len(x.prompt.Salt) > 0 || x.call.uncached(x.path) || i < 0 || x.places[i] != x.replica || x.replica.takesWhole.Load() {
		return 0
	}
	if _, exact := b.at(x.replica); !exact {
		return 0
	}
	n := x.model.Pieces.Cut(&x.asked, &x.candidates[i], int(x.replica.block.Load()))
	if n > 0 && x.c.s.buffered.Load()+int64(mostDigits*n) > x.limits.MaxBuffered {
		return 0 // bodies take all the memory that they may
	}
	return n
}

// mostDigits is how many bytes a token takes in a body that names it by its number.
const mostDigits = 7

// sendPiece lets the replica compute the first n tokens of the prompt, and leaves it. When
// that does not go well the whole request is sent next, and what comes of that is what the
// client is told; an error is told only where the request is over.
func (x *exchange) sendPiece(n int) failure {
	r, c := x.replica, &x.candidates[x.choice.Index]
	if x.piecing == nil {
		x.piecing = &piecing{began: time.Now(), found: int(c.Cached), expected: x.expected}
	}
	v := x.piecing
	v.count++
	v.rest.Stay(&r.standing, c.Speed.Time(policy.Prefill(x.asked.Tokens-n, n)), 0)
	f := x.computePiece(n, c)
	outcome := pieceComputed
	switch {
	case f.retried():
		v.off, outcome = true, f.label()
	case f != none:
		outcome = f.label()
		if failureTable[f].blame == byEngine {
			r.failed(x.failedWith(f))
		}
	case x.response.status != http.StatusOK:
		v.off, outcome = true, pieceRefused
		if x.response.status/100 == 4 && x.response.status != http.StatusTooManyRequests && !r.takesWhole.Swap(true) {
			x.c.s.log.Warn("the engine does not compute prompts in pieces; it is sent all whole", "replica", r.ID, "status", x.response.status)
		}
	}
	x.c.s.stats.pieces.WithLabelValues(x.modelLabel(), outcome).Inc()
	if v.off || f != none {
		v.rest.End()
	}
	r.gate.answered(x.c)
	x.leave()
	// What it was held for is over; where it comes in the order now is by what is left.
	x.holding = holding{before: x.holding.took}
	x.ttfb, x.cause, x.in, x.response = 0, nil, x.in[:0], responseHead{}
	x.lookAgain()
	return f
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
	if u, known := findUsage(x.in[max(len(x.in)-TailBytes, 0):]); known {
		cached := int(min(u.cached, 1<<30))
		if u.cachedTold {
			x.cache.index.Found(&v.claim, cached)
			if v.count == 1 {
				v.found = min(v.found, cached)
			}
		}
		p.Told(&r.standing, u.prompt, u.cached, u.cachedTold && !u.partial)
	}
	x.cache.index.Release(&v.claim, 1, now)
	r.succeeded()
	return none
}

// claimPiece enters in the index what the first n tokens leave in the replica's cache.
func (x *exchange) claimPiece(n int, now time.Time) {
	b := x.blocks
	k := b.of(x.replica)
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
		id: v.id, length: len(v.body), hideKey: !x.access.Open()})
	x.left = append(x.pieces[:0], x.out, v.body)
	return x.sendLeft()
}

// What comes of a piece, beside failures.
const (
	pieceComputed = "computed"
	pieceRefused  = "refused"
)

// endPieces says that nothing is left to compute in pieces.
func (x *exchange) endPieces() {
	if x.piecing != nil {
		x.piecing.rest.End()
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
// request just before.
func (x *exchange) begunTokens() int {
	if x.piecing == nil {
		return 0
	}
	return max(x.predicted-x.piecing.found, 0)
}
