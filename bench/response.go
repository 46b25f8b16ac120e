package bench

import (
	"bytes"
	"fmt"
)

// response reads and verifies one answer of the engine, in whatever pieces it
// arrives and however a proxy has chunked it anew. It belongs to one stream of
// the client, which calls begin for each request it sends.
type response struct {
	id, want uint32 // what was asked for
	n        uint32 // events seen
	done     bool   // [DONE] seen
	step     responseStep
	digits   int    // of the chunk size so far
	left     uint64 // data bytes left in this chunk, or the size so far
	have     int    // bytes of event seen
	event    [eventSize]byte
	head     []byte
}

type responseStep uint8

const (
	stepHead responseStep = iota
	stepSize
	stepSizeLF
	stepData
	stepDataCR
	stepDataLF
	stepEndCR
	stepEndLF
	stepOver
)

// maxResponseHead is far above what any contestant adds to the engine's head.
const maxResponseHead = 8 << 10

// begin prepares for the answer to a request for want chunks.
func (r *response) begin(id, want uint32) {
	*r = response{id: id, want: want, head: r.head[:0]}
}

// feed takes the bytes received at time now, counts complete chunks in t and
// reports whether the response has come to its end. An error is final.
func (r *response) feed(b []byte, now int64, t *tally) (over bool, err error) {
	for len(b) > 0 {
		switch r.step {
		case stepHead:
			before := len(r.head)
			r.head = append(r.head, b[:min(len(b), maxResponseHead-before)]...)
			end := bytes.Index(r.head, []byte("\r\n\r\n"))
			if end < 0 {
				if len(r.head) == maxResponseHead {
					return false, fmt.Errorf("stream %d: a response head over %d bytes: %.200q", r.id, maxResponseHead, r.head)
				}
				return false, nil
			}
			b = b[end+4-before:]
			if err := checkHead(r.head[:end+2]); err != nil {
				return false, fmt.Errorf("stream %d: wrong head: %w: %.600q", r.id, err, append(r.head, b...))
			}
			r.step = stepSize
		case stepSize:
			d, ok := hexDigit(b[0])
			switch {
			case ok && r.digits < 15:
				r.left = r.left<<4 | d
				r.digits++
			case b[0] == '\r' && r.digits > 0:
				r.step = stepSizeLF
			default:
				return false, r.framing(b)
			}
			b = b[1:]
		case stepData:
			expect := eventSize
			if r.n == r.want {
				expect = len(doneEvent)
			}
			if r.done {
				return false, fmt.Errorf("stream %d: data after [DONE]: %.100q", r.id, b)
			}
			m := copy(r.event[r.have:expect], b[:min(uint64(len(b)), r.left)])
			b, r.left, r.have = b[m:], r.left-uint64(m), r.have+m
			if r.have == expect {
				r.have = 0
				if err := r.finishEvent(now, t); err != nil {
					return false, err
				}
			}
			if r.left == 0 {
				r.step = stepDataCR
			}
		case stepSizeLF, stepDataCR, stepDataLF, stepEndCR, stepEndLF:
			want := byte('\n')
			if r.step == stepDataCR || r.step == stepEndCR {
				want = '\r'
			}
			if b[0] != want {
				return false, r.framing(b)
			}
			b = b[1:]
			switch r.step {
			case stepSizeLF:
				r.step = stepData
				if r.left == 0 {
					r.step = stepEndCR
				}
			case stepDataCR:
				r.step = stepDataLF
			case stepDataLF:
				r.step, r.digits = stepSize, 0
			case stepEndCR:
				r.step = stepEndLF
			case stepEndLF:
				r.step = stepOver
				if !r.done {
					return false, fmt.Errorf("stream %d ended after %d of %d events", r.id, r.n, r.want)
				}
			}
		case stepOver:
			return false, fmt.Errorf("stream %d: bytes after the response: %.100q", r.id, b)
		}
	}
	return r.step == stepOver, nil
}

func (r *response) finishEvent(now int64, t *tally) error {
	if r.n == r.want {
		if string(r.event[:len(doneEvent)]) != doneEvent {
			return fmt.Errorf("stream %d: wrong end: %q instead of [DONE]", r.id, r.event[:len(doneEvent)])
		}
		r.done = true
		return nil
	}
	stamp, err := checkEvent(r.event[:], r.id, r.n)
	if err != nil {
		return err
	}
	r.n++
	t.chunks++
	t.latency.record((now - stamp) / 1000)
	return nil
}

func (r *response) framing(b []byte) error {
	return fmt.Errorf("stream %d: wrong framing after event %d (step %d, %d left): %.100q", r.id, r.n, r.step, r.left, b)
}

// checkHead takes a response head, its last line's CRLF included.
func checkHead(head []byte) error {
	if !bytes.HasPrefix(head, []byte("HTTP/1.1 200 ")) {
		return fmt.Errorf("not a 200")
	}
	if v, ok := field(head, "transfer-encoding"); !ok || !bytes.EqualFold(v, []byte("chunked")) {
		return fmt.Errorf("not chunked")
	}
	if v, _ := field(head, "connection"); bytes.EqualFold(v, []byte("close")) {
		return fmt.Errorf("connection closed by the proxy")
	}
	return nil
}
