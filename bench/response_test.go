package bench

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
)

const responseHead = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"

// answer is what the engine sends for n chunks to stream id.
func answer(id, n uint32) string {
	var b strings.Builder
	b.WriteString(responseHead)
	for i := range n {
		c := blankChunk
		setChunk(&c, id, i, 1000+int64(i))
		b.Write(c[:])
	}
	b.WriteString(responseEnd)
	return b.String()
}

// read feeds the pieces to a fresh response.
func read(id, want uint32, pieces ...string) (over bool, chunks uint64, err error) {
	var r response
	var seen tally
	r.begin(id, want)
	for _, p := range pieces {
		if over, err = r.feed([]byte(p), 5000, &seen); err != nil {
			break
		}
	}
	return over, seen.chunks, err
}

func TestResponseInAnyPieces(t *testing.T) {
	whole := answer(7, 3)
	for i := range len(whole) {
		over, chunks, err := read(7, 3, whole[:i], whole[i:])
		if !over || chunks != 3 || err != nil {
			t.Fatalf("split at %d: over %v, %d chunks, %v", i, over, chunks, err)
		}
	}
	if over, chunks, err := read(7, 3, strings.Split(whole, "")...); !over || chunks != 3 || err != nil {
		t.Fatalf("byte by byte: over %v, %d chunks, %v", over, chunks, err)
	}
	for i := range len(whole) {
		if over, _, err := read(7, 3, whole[:i]); over || err != nil {
			t.Fatalf("cut off at %d: over %v, %v", i, over, err)
		}
	}
}

// rechunk frames an answer's data anew, with random chunk sizes.
func rechunk(whole string, rng *rand.Rand) string {
	data := strings.ReplaceAll(strings.TrimSuffix(whole[len(responseHead):], responseEnd), "c2\r\n", "")
	data = strings.ReplaceAll(data, "\n\n\r\n", "\n\n") + doneEvent
	b := responseHead
	for len(data) > 0 {
		n := 1 + rng.IntN(min(len(data), 400))
		b += fmt.Sprintf("%X\r\n%s\r\n", n, data[:n])
		data = data[n:]
	}
	return b + "0\r\n\r\n"
}

func TestResponseChunkedAnewByAProxy(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		whole := rechunk(answer(7, 5), rng)
		if over, chunks, err := read(7, 5, whole); !over || chunks != 5 || err != nil {
			t.Fatalf("over %v, %d chunks, %v in %q", over, chunks, err, whole)
		}
	}
}

// Any changed byte of the body must show, except in the stamps, which may be
// any number.
func TestResponseNoticesEveryByte(t *testing.T) {
	whole := []byte(answer(7, 2))
	for i := len(responseHead); i < len(whole); i++ {
		in := (i - len(responseHead)) % chunkSize
		if i < len(responseHead)+2*chunkSize && in >= 4+stampAt && in < 4+fillAt {
			continue
		}
		was := whole[i]
		whole[i] ^= 1
		over, _, err := read(7, 2, string(whole)+"!") // more bytes, in case the change makes it longer
		if over || err == nil {
			t.Fatalf("byte %d changed from %q to %q: over %v, %v", i, was, whole[i], over, err)
		}
		whole[i] = was
	}
}

func TestResponseFailure(t *testing.T) {
	f := func(id, want uint32, in, wantErr string) {
		t.Helper()
		over, _, err := read(id, want, in)
		if over || err == nil || !strings.Contains(err.Error(), wantErr) {
			t.Errorf("over %v, error %v, want %q", over, err, wantErr)
		}
	}
	whole := answer(7, 3)
	at := func(n int) int { return len(responseHead) + n*chunkSize }
	f(8, 3, whole, "stream 8 received an event of stream 7")
	f(7, 3, whole[:at(1)]+whole[at(2):], "received event 2 instead of 1")
	f(7, 3, whole[:at(2)]+whole[at(1):], "received event 1 instead of 2")
	f(7, 2, whole, "instead of [DONE]")
	f(7, 4, whole, "after 3 of 4 events")
	f(7, 3, whole[:at(2)]+"0\r\n\r\n", "after 2 of 3 events")
	f(7, 3, whole+"x", "bytes after the response")
	f(7, 3, strings.TrimSuffix(whole, "0\r\n\r\n")+"1\r\nx\r\n", "data after [DONE]")
	f(7, 3, whole[:at(1)]+"\r\n", "wrong framing")
	f(7, 3, whole[:at(1)]+"fffffffffffffffff\r\n", "wrong framing")
	f(7, 3, strings.Replace(whole, "200 OK", "502 Bad Gateway", 1), "not a 200")
	f(7, 3, strings.Replace(whole, "chunked", "identity", 1), "not chunked")
	f(7, 3, strings.Replace(whole, "Transfer", "Connection: close\r\nTransfer", 1), "closed by the proxy")
	f(7, 3, strings.Repeat("x", maxResponseHead), "a response head over")
}

func TestResponseDoesNotAllocate(t *testing.T) {
	whole := []byte(answer(7, 3))
	var r response
	var seen tally
	r.head = make([]byte, 0, 1024)
	out := make([]byte, 0, 1024)
	if n := testing.AllocsPerRun(100, func() {
		r.begin(7, 3)
		if over, err := r.feed(whole, 5000, &seen); !over || err != nil {
			t.Fatal(over, err)
		}
		out = appendRequest(out[:0], 7, 3)
	}); n != 0 {
		t.Errorf("%v allocations a response", n)
	}
}

func FuzzResponse(f *testing.F) {
	f.Add([]byte(answer(7, 2)), uint16(100))
	f.Add([]byte(responseHead+"5\r\nhello\r\n0\r\n\r\n"), uint16(3))
	f.Fuzz(func(t *testing.T, b []byte, split uint16) {
		i := min(int(split), len(b))
		over1, n1, err1 := read(7, 2, string(b))
		over2, n2, err2 := read(7, 2, string(b[:i]), string(b[i:]))
		if over1 != over2 || n1 != n2 || (err1 == nil) != (err2 == nil) {
			t.Fatalf("whole: %v %d %v; split at %d: %v %d %v", over1, n1, err1, i, over2, n2, err2)
		}
		if over1 && n1 != 2 {
			t.Fatalf("over after %d chunks", n1)
		}
	})
}
