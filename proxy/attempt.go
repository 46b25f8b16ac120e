package proxy

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// ask sends the request to a replica and reads the head of its response. While
// nothing has been passed on to the client, a request that failed is sent to
// another one: first to those that have not failed it, and when all have, after
// a pause, to any.
func (x *exchange) ask() failure {
	if s := x.c.s; s.joiner != nil && !x.c.entered {
		x.c.entered = true
		x.c.handle, x.c.why = s.joiner.Enter(x.c.fd, -1)
	}
	backoff := x.limits.Backoff
	for x.attempts = 1; ; x.attempts++ {
		x.traceAttempt()
		if f := x.place(); f != none {
			x.traceAnswer(f)
			return f
		}
		x.decided()
		x.noteDecision()
		x.traceDecision()
		f := x.attempt()
		if x.unavailable = false; f == none {
			x.unavailable, f = x.saysUnavailable()
		}
		x.traceAnswer(f)
		if f != none || x.response.status/100 != 2 {
			x.undoClaims()
			x.leaveBacklog(time.Now())
		}
		x.replica.gate.answered(x.c)
		again := f.retried() || x.unavailable
		if again {
			x.replica.failed(x.failedWith(f))
		}
		if !again || x.attempts >= x.limits.MaxAttempts || !time.Now().Before(x.until) {
			return f
		}
		x.tried = append(x.tried, x.replica)
		pause := time.Duration(0)
		if !x.elsewhere() {
			// The pause is drawn from its second half, so that requests that
			// failed together do not come back together.
			pause = backoff/2 + rand.N(backoff/2+1)
			if backoff < math.MaxInt64/2 {
				backoff *= 2
			}
			if time.Until(x.until) < pause {
				return f
			}
			x.tried = x.tried[:0]
		}
		x.noted.lastFailed = x.outcome(f)
		x.c.s.stats.totals.retried.Add(1)
		x.c.s.stats.retries.WithLabelValues(x.modelLabel(), x.noted.lastFailed).Inc()
		x.leave()
		if f := x.c.pause(pause); f != none {
			return f
		}
		if pause > 0 {
			x.lookAgain()
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
	x.in, x.left, x.cause, x.ttfb = x.in[:0], nil, nil, 0
	x.predicted = -1
	x.up = x.replica.take()
	for {
		var f failure
		if x.up == nil {
			if x.up, f, x.cause = x.c.dial(x.replica, x.until); f != none {
				return f
			}
		}
		x.claim()
		x.expectPrefill()
		if f = x.send(); f == none {
			f = x.readResponseHead()
		}
		if f == engineDied && x.up.reused && len(x.in) == 0 && x.ttfb == 0 {
			x.up.abort()
			x.up, x.left, x.cause = nil, nil, nil
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
	if x.prefill.Active() {
		x.leaveBacklog(time.Now())
	}
	x.turned = false
	if x.replica != nil {
		gate := &x.replica.gate
		gate.leave(x.c)
		x.replica = nil
		if gate.free() {
			x.c.s.lines.callFirst()
		}
		x.c.s.rooms.call()
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
	bufs, length := cut(x.pieces[:1], x.body, edits) // the head goes first
	x.out = x.head.appendTo(x.out[:0], asEngine{method: x.method, target: x.target, replica: x.replica,
		id: x.id, length: length, hideKey: !x.access.Open(), trace: x.trace})
	x.traceSent()
	bufs[0] = x.out
	x.left = bufs
	return x.sendLeft()
}

// sendLeft goes on to write the request, until the engine has taken it or says
// something: one that answers before it has read the whole request, to refuse
// it, is heard.
func (x *exchange) sendLeft() failure {
	for {
		var errno syscall.Errno
		x.left, errno = sendAll(x.up.fd, x.left)
		switch errno {
		case 0:
			return none
		case unix.EAGAIN:
		default:
			// What the engine said before it closed may still be there to read.
			x.cause = errno
			return none
		}
		if f := x.c.waitEngine(x.up, unix.EPOLLOUT|unix.EPOLLIN, x.until); f != none {
			return f
		}
		var b [1]byte
		switch n, errno := recv(x.up.fd, b[:], unix.MSG_PEEK); {
		case n > 0:
			return none
		case errno == 0:
			// It may still read, but it cannot answer any more.
			x.cause = errClosed
			return engineDied
		}
	}
}

var errClosed = errors.New("the connection was closed")

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
				if x.response.body == bodyChunked {
					// What comes with the head is looked at before anything
					// is passed on: another engine can still answer.
					var early Frames
					if _, err := early.Advance(x.in[i+4:]); err != nil {
						x.cause = err
						return engineHead
					}
				}
				return none
			case x.response.status == 101 || interim == 16:
				x.cause = fmt.Errorf("unexpected status %d", x.response.status)
				return engineHead
			}
			// An interim response (RFC 9110 section 15.2).
			interim++
			x.in = x.in[:copy(x.in, x.in[i+4:])]
			if len(x.in) == 0 && len(x.left) > 0 && x.cause == nil {
				if f := x.sendLeft(); f != none {
					return f
				}
			}
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
			x.cause = errClosed
		}
		return engineDied
	}
	x.in = x.in[:len(x.in)+n]
	return none
}

// recvHead reads from the engine's socket, and waits for bytes. After a failed
// sending, errno is EAGAIN when there are none.
func (x *exchange) recvHead(p []byte) (n int, errno syscall.Errno, f failure) {
	if len(x.left) > 0 && x.cause != nil {
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
