package bench

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/inferrail/inferrail/simulator/workload"
)

// exchange is one request of a load and its answer. The load's preparer makes it before
// the request is due; from then on it belongs to the goroutine that runs it, which the
// load waits for.
type exchange struct {
	load    *load
	request *http.Request
	// record is what becomes of it. replica is who says that it has answered, and
	// detail is the error of one that has failed.
	record  workload.Record
	replica string
	detail  string

	// stop ends it, and last is when the latest token came.
	stop func()
	last time.Duration
	// counted: the engine has told how many tokens there are.
	counted bool
	// told: it has told how many of the prompt's it had cached, if only none.
	told bool
	// begun is how many of those the agent has had computed for this request before; they
	// do not count as cached.
	begun int
}

// errTooLong ends an exchange.
var errTooLong = errors.New("it takes longer than a request may")

// readers are the buffers of answers that are read.
var readers = sync.Pool{New: func() any { return bufio.NewReaderSize(nil, 4<<10) }}

// run sends the request and reads its answer.
func (x *exchange) run(ctx context.Context) {
	ctx, cancel := context.WithTimeoutCause(ctx, x.load.endpoint.timeout, errTooLong)
	defer cancel()
	x.stop = cancel
	r := &x.record
	r.Sent = x.load.now()
	resp, err := x.load.endpoint.client.Do(x.request.WithContext(ctx))
	if err == nil {
		err = x.read(resp)
		resp.Body.Close()
	}
	if err != nil {
		if cause := context.Cause(ctx); cause != nil && !errors.Is(err, errAnswered) {
			err = fmt.Errorf("%w: %w", cause, err)
		}
		x.fail(err)
	}
	x.request = nil
}

// fail notes why the request has failed.
func (x *exchange) fail(err error) {
	x.record.Failure, x.detail = failureOf(err), err.Error()
}

// errAnswered is of answers that serve nothing, errCut of one that stopped before it was
// whole, errNothing of one that is whole and empty.
var (
	errAnswered = errors.New("answered")
	errCut      = errors.New("the answer ended before it was whole")
	errNothing  = errors.New("the answer has no token")
)

// statusError is an answer that serves nothing.
type statusError struct {
	status int
	// later: the server says when to try again.
	later bool
	body  []byte
}

func (e *statusError) Error() string { return fmt.Sprintf("status %d: %.300q", e.status, e.body) }

func (e *statusError) Unwrap() error { return errAnswered }

// failureOf is what a Record calls an error. There are few of them, so that they can be
// counted.
func failureOf(err error) string {
	status, said := errors.AsType[*statusError](err)
	var netErr net.Error
	switch {
	case said && (status.status == http.StatusTooManyRequests || status.status == http.StatusServiceUnavailable && status.later):
		return workload.Refused
	case said:
		return "status " + strconv.Itoa(status.status)
	case errors.Is(err, errTooMany):
		return tooMany
	case errors.Is(err, errTooLong):
		return "timeout"
	case errors.Is(err, context.Canceled):
		return "interrupted"
	case errors.Is(err, errErrorEvent):
		return "error event"
	case errors.Is(err, errGarbage):
		return "garbage"
	case errors.Is(err, errNothing):
		return "no token"
	case errors.Is(err, errCut):
		return "cut off"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "connection refused"
	case errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.EADDRNOTAVAIL):
		return "no socket"
	case errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE):
		return "connection reset"
	case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
		return "connection closed"
	case errors.As(err, &netErr) && netErr.Timeout() || errors.Is(err, os.ErrDeadlineExceeded):
		return "cannot connect"
	}
	return "connection failed"
}

// read reads the answer into the record.
func (x *exchange) read(resp *http.Response) error {
	x.readHead(resp.Header)
	if resp.StatusCode != http.StatusOK {
		body, _ := io.ReadAll(io.LimitReader(resp.Body, 4<<10))
		return &statusError{resp.StatusCode, resp.Header.Get("Retry-After") != "", bytes.TrimSpace(body)}
	}
	buffer := readers.Get().(*bufio.Reader)
	buffer.Reset(resp.Body)
	defer func() {
		buffer.Reset(nil)
		readers.Put(buffer)
	}()
	if kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type")); kind == "text/event-stream" {
		return x.readStream(&events{r: buffer})
	}
	return x.readWhole(buffer)
}

// readHead reads what the agent tells of its decision.
func (x *exchange) readHead(h http.Header) {
	x.replica = h.Get("X-Inferrail-Replica")
	if ms, err := strconv.ParseInt(h.Get("X-Inferrail-Predicted-Ms"), 10, 64); err == nil && ms > 0 {
		x.record.Predicted = time.Duration(min(ms, 1<<40)) * time.Millisecond
	}
	if n, err := strconv.Atoi(h.Get("X-Inferrail-Cached-Tokens")); err == nil {
		x.record.PredictedCached = n
	}
	if n, err := strconv.Atoi(h.Get("X-Inferrail-Begun-Tokens")); err == nil && n > 0 {
		x.begun = n
		x.record.PredictedCached = max(x.record.PredictedCached-n, 0)
	}
}

// readStream reads an answer that is streamed. It is whole when it says so, or when a
// choice has ended and the body does too.
func (x *exchange) readStream(e *events) error {
	r, finished := &x.record, false
	for {
		event, err := e.next(r.First != 0)
		switch {
		case errors.Is(err, io.EOF) && !finished:
			return errCut
		case errors.Is(err, io.ErrUnexpectedEOF) || err != nil && isReset(err):
			return fmt.Errorf("%w: %w", errCut, err)
		case err != nil && !errors.Is(err, io.EOF):
			return err
		case err == nil && !event.done:
			x.take(&event)
			finished = finished || event.finished
			continue
		}
		if r.First == 0 {
			return errNothing
		}
		if err == nil {
			x.drain(e.r)
		}
		return nil
	}
}

func isReset(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

// take notes an event.
func (x *exchange) take(e *event) {
	r := &x.record
	if e.token {
		now := x.load.now()
		if r.First == 0 {
			r.First = now
		} else {
			r.Gaps = append(r.Gaps, now-x.last)
		}
		r.End, x.last = now, now
		if !x.counted {
			r.Output++
		}
	} else if e.finished && r.First != 0 {
		// The last tokens had no text of their own.
		r.End = x.load.now()
	}
	x.note(e.usage, e.fingerprint)
}

// note takes the engine's own counts, and who it is where no agent tells.
func (x *exchange) note(u *tokens, fingerprint string) {
	if u != nil {
		x.counted, x.told = true, u.Details != nil
		x.record.Input, x.record.Output, x.record.Cached = u.Input, max(u.Output, x.record.Output), max(u.cached()-x.begun, 0)
	}
	if x.replica == "" && fingerprint != "" {
		x.replica = fingerprint
	}
}

// drain reads what follows the last event, so that the connection can be used again. A
// server that does not end the answer is left.
func (x *exchange) drain(r io.Reader) {
	timer := time.AfterFunc(drainTime, x.stop)
	defer timer.Stop()
	_, _ = io.Copy(io.Discard, r)
}

// readWhole reads an answer in one piece: its first token comes with the last.
func (x *exchange) readWhole(r io.Reader) error {
	body, err := io.ReadAll(io.LimitReader(r, maxWhole+1))
	switch {
	case err != nil:
		return fmt.Errorf("%w: %w", errCut, err)
	case len(body) > maxWhole:
		return fmt.Errorf("%w: a body over %d bytes", errGarbage, maxWhole)
	}
	part, err := parsePart(body)
	if err != nil {
		return err
	}
	e := part.event()
	if !e.token {
		return errNothing
	}
	x.record.Output = 1
	now := x.load.now()
	x.record.First, x.record.End = now, now
	x.note(e.usage, e.fingerprint)
	return nil
}

// maxWhole bounds an answer in one piece.
const maxWhole = 64 << 20
