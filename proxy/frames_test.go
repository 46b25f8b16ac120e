package proxy

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"
)

// dumbFrames reads a chunked body that lies in memory as a whole: where it
// ends, its data, and whether it is malformed. n is -1 when it does not end.
func dumbFrames(p []byte) (n int, data []byte, bad bool) {
	rest := p
	for {
		j := 0
		for j < len(rest) && strings.IndexByte("0123456789abcdefABCDEF", rest[j]) >= 0 {
			j++
		}
		if j == len(rest) {
			return -1, data, len(strings.TrimLeft(string(rest), "0")) > 14
		}
		if j == 0 || strings.IndexByte("\r; \t", rest[j]) < 0 {
			return -1, data, true
		}
		size := uint64(0)
		for _, c := range rest[:j] {
			if size >= maxChunk>>4 {
				return -1, data, true
			}
			d, _ := hexDigit(c)
			size = size<<4 | uint64(d)
		}
		i := bytes.IndexByte(rest[j:], '\n')
		if i < 0 {
			return -1, data, false
		}
		rest = rest[j+i+1:]
		if size == 0 {
			break
		}
		if uint64(len(rest)) <= size {
			return -1, append(data, rest...), false
		}
		data = append(data, rest[:size]...)
		rest = rest[size:]
		if !bytes.HasPrefix([]byte("\r\n"), rest[:min(2, len(rest))]) {
			return -1, data, true
		}
		if len(rest) < 2 {
			return -1, data, false
		}
		rest = rest[2:]
	}
	for { // the trailer
		if len(rest) == 0 {
			return -1, data, false
		}
		switch rest[0] {
		case '\n':
			return -1, data, true
		case '\r':
			if len(rest) == 1 {
				return -1, data, false
			}
			if rest[1] != '\n' {
				return -1, data, true
			}
			return len(p) - len(rest) + 2, data, false
		}
		i := bytes.IndexByte(rest, '\n')
		if i < 0 {
			return -1, data, false
		}
		rest = rest[i+1:]
	}
}

// advanceIn runs Advance and Decode over p cut at the given points and checks
// that both agree.
func advanceIn(t *testing.T, p []byte, cuts ...int) (n int, data []byte, bad bool, f Frames) {
	t.Helper()
	var d Frames
	from := 0
	for _, to := range append(cuts, len(p)) {
		k, err := f.Advance(p[from:to])
		var kd int
		var derr error
		data, kd, derr = d.Decode(data, p[from:to])
		if k != kd || (err == nil) != (derr == nil) || f != d {
			t.Fatalf("Advance and Decode differ on %q: %d %v %+v, %d %v %+v", p[from:to], k, err, f, kd, derr, d)
		}
		n += k
		if err != nil {
			if !errors.Is(err, errFraming) {
				t.Fatalf("Advance returned %v", err)
			}
			return -1, data, true, f
		}
		if k < to-from {
			break
		}
		from = to
	}
	if !f.Ended() {
		n = -1
	}
	return n, data, false, f
}

func checkFrames(t *testing.T, p []byte, cuts ...int) {
	t.Helper()
	n, data, bad, _ := advanceIn(t, p, cuts...)
	wantN, wantData, wantBad := dumbFrames(p)
	if bad != wantBad || !bad && (n != wantN || !bytes.Equal(data, wantData)) {
		t.Fatalf("%q cut at %v: got %d %q bad=%v, want %d %q bad=%v", p, cuts, n, data, bad, wantN, wantData, wantBad)
	}
}

func TestFramesAtEverySplit(t *testing.T) {
	f := func(body string, wantData string) {
		t.Helper()
		p := []byte(body)
		n, data, bad, _ := advanceIn(t, p)
		if bad || string(data) != wantData {
			t.Fatalf("%q: got %d %q bad=%v", body, n, data, bad)
		}
		// With bytes of a next response behind it.
		p = append(p, "HTTP/1.1 200"...)
		for i := range len(p) {
			checkFrames(t, p, i)
			for j := i; j < len(p); j++ {
				checkFrames(t, p, i, j)
			}
			checkFrames(t, p[:i])
		}
	}
	f("0\r\n\r\n", "")
	f("5\r\nhello\r\n0\r\n\r\n", "hello")
	f("5\r\nhello\r\n1\r\n!\r\n0\r\n\r\n", "hello!")
	f("5;name=value\r\nhello\r\n0;x\r\n\r\n", "hello")
	f("5 \r\nhello\r\n0\t\r\n\r\n", "hello")
	f("0005\r\nhello\r\n000\r\n\r\n", "hello")
	f("9\r\n0\r\n\r\n0\r\n\r\r\n0\r\n\r\n", "0\r\n\r\n0\r\n\r")
	f("3\r\nabc\r\n0\r\nDigest: x\r\nB: y\r\n\r\n", "abc")
	f("1F\r\n"+strings.Repeat("x", 31)+"\r\n0\r\n\r\n", strings.Repeat("x", 31))
}

func TestFramesMalformed(t *testing.T) {
	f := func(body string) {
		t.Helper()
		p := []byte(body)
		if _, _, bad, _ := advanceIn(t, p); !bad {
			t.Errorf("%q is taken", body)
		}
		for i := range len(p) {
			checkFrames(t, p, i)
		}
	}
	f("\r\n")
	f("\n")
	f(" 5\r\nhello\r\n")
	f("x\r\n")
	f("-1\r\n")
	f("+5\r\nhello\r\n")
	f("0x5\r\nhello\r\n")
	f("5\nhello\r\n")
	f("5,\r\nhello\r\n")
	f("5\r\nhello0\r\n\r\n")
	f("5\r\nhello\n0\r\n\r\n")
	f("5\r\nhello\rx")
	f("5\r\nhelloworld\r\n0\r\n\r\n")
	f("0\r\n\n")
	f("0\r\n\rx")
	f("0\r\nA: b\r\n\n")
	f("ffffffffffffffff\r\n")
	f("100000000000000\r\n")
	f("99999999999999999999999999\r\n")
}

func TestFramesFixed(t *testing.T) {
	f := func(n int, p string, wantN int, wantEnd bool) {
		t.Helper()
		frames := fixedFrames(uint64(n))
		k, err := frames.Advance([]byte(p))
		if err != nil || k != wantN || frames.Ended() != wantEnd {
			t.Errorf("%d bytes of %q: %d %v, ended %v", n, p, k, err, frames.Ended())
		}
	}
	f(0, "x", 0, true)
	f(1, "", 0, false)
	f(3, "ab", 2, false)
	f(3, "abc", 3, true)
	f(3, "abcd", 3, true)
}

func TestFramesCountsChunks(t *testing.T) {
	_, _, _, f := advanceIn(t, []byte("1\r\na\r\n2\r\nbc\r\n0\r\n\r\n"))
	if f.Chunks != 3 {
		t.Errorf("%d chunks", f.Chunks)
	}
}

func TestFramesDoesNotAllocate(t *testing.T) {
	p := []byte("5;a=b\r\nhello\r\n0\r\nA: b\r\n\r\n")
	if n := testing.AllocsPerRun(100, func() {
		var f Frames
		f.Advance(p)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func FuzzFrames(f *testing.F) {
	for _, s := range []string{"5\r\nhello\r\n0\r\n\r\n", "0\r\nA: b\r\n\r\n", "5;x\r\nhello\r\n", "10000000000000000"} {
		f.Add([]byte(s), uint64(3))
	}
	f.Fuzz(func(t *testing.T, p []byte, seed uint64) {
		rng := rand.New(rand.NewPCG(seed, 1))
		var cuts []int
		for at := 0; at < len(p); at += 1 + rng.IntN(7) {
			cuts = append(cuts, at)
		}
		checkFrames(t, p, cuts...)
	})
}
