package bench

import (
	"bytes"
	"fmt"
)

// A chunk is what the engine sends per token: chunkSize bytes on the wire,
// framing included, holding one SSE event.
//
//	c2\r\ndata: {"id":"<8 hex>","n":"<8 hex>","t":"<16 hex>","x":"<filling>"}\n\n\r\n
//
// id is the stream the client asked for, n the chunk's number in the response,
// t the time it was sent. A byte that is lost, doubled, moved or delivered to
// another stream therefore shows.
const (
	chunkSize = 200
	eventSize = 0xc2 // chunkSize less "c2\r\n" and "\r\n"

	idAt    = 13
	nAt     = idAt + 8 + 7
	stampAt = nAt + 8 + 7
	fillAt  = stampAt + 16
)

// responseEnd follows the last chunk of a response.
const responseEnd = "e\r\n" + doneEvent + "\r\n0\r\n\r\n"

const doneEvent = "data: [DONE]\n\n"

// blankChunk is a chunk whose numbers are all zero.
var blankChunk = func() (c [chunkSize]byte) {
	const head = `data: {"id":"00000000","n":"00000000","t":"0000000000000000","x":"`
	const tail = "\"}\n\n"
	b := append(c[:0], "c2\r\n"...)
	b = append(b, head...)
	for i := range eventSize - len(head) - len(tail) {
		b = append(b, 'a'+byte(i%26))
	}
	b = append(b, tail...)
	b = append(b, "\r\n"...)
	if len(b) != chunkSize {
		panic(fmt.Sprintf("BUG: a chunk of %d bytes", len(b)))
	}
	return c
}()

// setChunk writes a chunk's numbers into c, a copy of blankChunk.
func setChunk(c *[chunkSize]byte, id, n uint32, stamp int64) {
	event := c[4:]
	putHex(event[idAt:], uint64(id), 8)
	putHex(event[nAt:], uint64(n), 8)
	putHex(event[stampAt:], uint64(stamp), 16)
}

func putHex(b []byte, v uint64, digits int) {
	for i := digits - 1; i >= 0; i-- {
		b[i] = "0123456789abcdef"[v&15]
		v >>= 4
	}
}

// hexIn reads digits that putHex wrote. ok is false for anything else.
func hexIn(b []byte, digits int) (v uint64, ok bool) {
	for _, c := range b[:digits] {
		d, ok := hexDigit(c)
		if !ok || c >= 'A' && c <= 'F' {
			return 0, false
		}
		v = v<<4 | d
	}
	return v, true
}

func hexDigit(c byte) (uint64, bool) {
	switch {
	case '0' <= c && c <= '9':
		return uint64(c - '0'), true
	case 'a' <= c && c <= 'f':
		return uint64(c-'a') + 10, true
	case 'A' <= c && c <= 'F':
		return uint64(c-'A') + 10, true
	}
	return 0, false
}

// checkEvent verifies every byte of an event and returns its stamp.
func checkEvent(event []byte, id, n uint32) (stamp int64, err error) {
	blank := blankChunk[4 : 4+eventSize]
	gotID, ok1 := hexIn(event[idAt:], 8)
	gotN, ok2 := hexIn(event[nAt:], 8)
	t, ok3 := hexIn(event[stampAt:], 16)
	switch {
	case !ok1 || !ok2 || !ok3,
		!bytes.Equal(event[:idAt], blank[:idAt]),
		!bytes.Equal(event[idAt+8:nAt], blank[idAt+8:nAt]),
		!bytes.Equal(event[nAt+8:stampAt], blank[nAt+8:stampAt]),
		!bytes.Equal(event[fillAt:], blank[fillAt:]):
		return 0, fmt.Errorf("wrong bytes in event %d of stream %d: %q", n, id, event)
	case gotID != uint64(id):
		return 0, fmt.Errorf("stream %d received an event of stream %d", id, gotID)
	case gotN != uint64(n):
		return 0, fmt.Errorf("stream %d received event %d instead of %d", id, gotN, n)
	}
	return int64(t), nil
}
