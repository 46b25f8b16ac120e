package proxy

import (
	"bytes"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

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
	if f == overBudget {
		x.tellBudget()
	}
	var body []byte
	if x.isMessages() {
		body = appendMessagesError(nil, f, x.message)
	} else {
		body = appendError(nil, f, x.message, x.param)
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
	out = append(append(append(out, ' '), http.StatusText(status)...), "\r\nServer: "...)
	out = append(append(out, product...), "\r\nDate: "...)
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
	case status == http.StatusServiceUnavailable && x.retryAfter > 0:
		out = appendRetryAfter(out, x.retryAfter)
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
