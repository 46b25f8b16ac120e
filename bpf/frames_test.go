package bpf

import (
	"bytes"
	"fmt"
	"math/rand"
	"strings"
	"testing"

	"github.com/inferrail/inferrail/proxy"
)

// position is where a body's framing stands.
type position struct {
	step, left uint32
	chunks     uint64
	why        Why
}

// positionAfter is the dumb model of frames.h: it reads the whole body again
// from its first byte, line by line. It goes as far as the program may: the
// rest of b is empty, or the body is over.
func positionAfter(b []byte) (p position, used int) {
	size := len(b)
	at := func(step string) (position, int) {
		for i, n := range stepNames {
			if n == step {
				p.step = uint32(i)
			}
		}
		return p, size - len(b)
	}
	for {
		p.left = 0
		digits := len(b) - len(bytes.TrimLeft(b, "0123456789abcdefABCDEF"))
		var n uint64
		for _, d := range b[:digits] {
			v := strings.IndexByte("0123456789abcdef", bytes.ToLower([]byte{d})[0])
			if n = n<<4 | uint64(v); n > maxLeft {
				p.why = whyNamed("large")
				return p, 0
			}
		}
		p.left = uint32(n)
		if len(b) == 0 {
			return at("size-start")
		}
		if digits == 0 {
			p.why = whyNamed("frames")
			return p, 0
		}
		b = b[digits:]
		if len(b) == 0 {
			return at("size")
		}
		if !bytes.ContainsRune([]byte("\r; \t"), rune(b[0])) {
			p.why = whyNamed("frames")
			return p, 0
		}
		_, rest, whole := bytes.Cut(b, []byte("\n"))
		b = rest
		if !whole {
			b = nil
			return at("ext")
		}
		p.chunks++
		if n == 0 {
			break
		}
		if uint64(len(b)) < n {
			p.left = uint32(n) - uint32(len(b))
			b = nil
			return at("data")
		}
		b = b[n:]
		p.left = 0
		if len(b) == 0 {
			return at("data-cr")
		}
		if b[0] != '\r' || len(b) > 1 && b[1] != '\n' {
			p.why = whyNamed("frames")
			return p, 0
		}
		if len(b) == 1 {
			b = nil
			return at("data-lf")
		}
		b = b[2:]
	}
	for {
		if len(b) == 0 {
			return at("trailer")
		}
		if b[0] == '\r' {
			if len(b) == 1 {
				b = nil
				return at("trailer-lf")
			}
			if b[1] != '\n' {
				p.why = whyNamed("frames")
				return p, 0
			}
			b = b[2:]
			return at("end")
		}
		if b[0] == '\n' {
			p.why = whyNamed("frames") // an empty line, or not: nobody can tell
			return p, 0
		}
		_, rest, whole := bytes.Cut(b, []byte("\n"))
		b = rest
		if !whole {
			b = nil
			return at("trailer-line")
		}
	}
}

func whyNamed(name string) Why {
	for i, n := range whyNames {
		if n == name {
			return Why(i)
		}
	}
	panic(name)
}

// bodyRunner sends bodies through ingress_ethernet on an active splice.
type bodyRunner struct {
	t *testing.T
	w *world
}

// send gives the program one body in the given cuts, and compares after every
// packet. It returns the reason of the pause, if the kernel paused.
func (r *bodyRunner) send(body []byte, cuts []int) Why {
	r.t.Helper()
	const start = 0xfffffc00 // the numbers wrap within most bodies
	*r.w.m = splice{client: r.w.cid, engine: r.w.eid, eStart: start, cStart: 5000, una: 5000, ts: 1, mss: 1460,
		word: word(stateActive, 0, 0, start)}
	r.w.s.conns[r.w.cid].shift, r.w.s.conns[r.w.eid].shift = 0, 0
	at := 0
	for _, n := range cuts {
		n = min(n, len(body)-at)
		if n == 0 {
			return 0
		}
		chunks, was := r.w.m.chunks, r.w.m.word
		f := frame{from: "engine", to: "E", win: 500, flags: 16, seq: start + uint32(at), ack: 300, payload: body[at : at+n],
			options: []byte{1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2}}
		verdict, _, _ := r.w.run(&f, f.bytes())
		want, used := positionAfter(body[:at+n])
		if want.why == 0 && used < at+n {
			want.why = whyNamed("surplus")
		}
		r.compareWithProxy(body[:at+n], want)
		describe := func() string {
			w := r.w.m.word
			return fmt.Sprintf("after %q | %q: verdict %d, %s, %s left %d next +%d, %d chunks, refused %q; want %+v",
				body[:at], body[at:at+n], verdict, stateNames[wordState(w)], stepNames[wordStep(w)], wordLeft(w),
				wordNext(w)-start, r.w.m.chunks, Why(r.w.m.refused), want)
		}
		w := r.w.m.word
		if want.why != 0 {
			// The packet is userspace's, and nothing of it has been looked at.
			state := uint32(statePaused)
			if at == 0 {
				state = stateOff // nothing carried, so settled at once
			}
			if verdict != -1 || w&^7 != was&^7 || wordState(w) != state || r.w.m.chunks != chunks || Why(r.w.m.refused) != want.why {
				r.t.Fatal(describe())
			}
			return want.why
		}
		at += n
		state := uint32(stateActive)
		if stepNames[want.step] == "end" {
			state = stateDone
		}
		if verdict != 7 || w != word(state, want.step, want.left, start+uint32(at)) || r.w.m.chunks != want.chunks || r.w.m.refused != 0 {
			r.t.Fatal(describe())
		}
		if r.w.m.bytes != uint64(at) {
			r.t.Fatalf("%d bytes counted of %d", r.w.m.bytes, at)
		}
		if state == stateDone {
			return 0
		}
	}
	return 0
}

// compareWithProxy: userspace goes on where the kernel stops, and the other way
// round, so both have to stand at the same place after any byte.
func (r *bodyRunner) compareWithProxy(b []byte, want position) {
	r.t.Helper()
	var f proxy.Frames
	n, err := f.Advance(b)
	switch want.why.String() {
	case "large": // userspace counts further
	case "frames":
		if err == nil {
			r.t.Fatalf("%q: the proxy takes it: %+v", b, f)
		}
	case "surplus":
		if err != nil || n == len(b) || !f.Ended() {
			r.t.Fatalf("%q: the proxy ends after %d bytes, %v: %+v", b, n, err, f)
		}
	default:
		if err != nil || n != len(b) || uint32(f.Step) != want.step || f.Left != uint64(want.left) || f.Chunks != want.chunks {
			r.t.Fatalf("%q: the proxy is at %+v after %d bytes, %v; want %+v", b, f, n, err, want)
		}
	}
}

func TestTailIsTheProxys(t *testing.T) {
	if tailBytes != proxy.TailBytes {
		t.Errorf("the programs keep %d bytes, the proxy expects %d", tailBytes, proxy.TailBytes)
	}
}

// eachLoop runs f with bpf_loop and with the bounded loop.
func eachLoop(t *testing.T, f func(t *testing.T, r *bodyRunner)) {
	for _, bounded := range []bool{false, true} {
		t.Run(fmt.Sprintf("bounded=%v", bounded), func(t *testing.T) {
			s := newSplicer(t, Options{MaxSplices: 16, BoundedLoop: bounded})
			w := newWorld(t, s)
			w.t = t
			w.pair()
			f(t, &bodyRunner{t, w})
		})
	}
}

// TestFramesForms cuts each form at every place.
func TestFramesForms(t *testing.T) {
	eachLoop(t, func(t *testing.T, r *bodyRunner) {
		f := func(body, want string) {
			t.Helper()
			for first := 1; first <= len(body); first++ {
				if why := r.send([]byte(body), []int{first, len(body)}); why.String() != want {
					t.Fatalf("%q cut at %d: paused by %q, want %q", body, first, why, want)
				}
			}
			cuts := bytes.Repeat([]byte{1}, len(body))
			ones := make([]int, len(cuts))
			for i := range ones {
				ones[i] = 1
			}
			// Byte by byte nothing is ever behind the end of the body.
			if why := r.send([]byte(body), ones); why.String() != want && want != "surplus" {
				t.Fatalf("%q byte by byte: paused by %q, want %q", body, why, want)
			}
		}
		f("0\r\n\r\n", "")
		f("5\r\nhello\r\n0\r\n\r\n", "")
		f("A\r\n0123456789\r\na\r\n0123456789\r\n0\r\n\r\n", "")
		f("5;name=value;other=\"quoted\"\r\nhello\r\n0;last\r\n\r\n", "")
		f("5 \t\r\nhello\r\n0 \r\n\r\n", "")
		f("0000000000000005\r\nhello\r\n000\r\n\r\n", "")
		f("0\r\nTrailer: one\r\nAnother: two, longer than a window\r\n\r\n", "")
		f("0\r\nbare line feed\n\r\n", "")
		f("5;x\nhello\r\n0\r\n\r\n", "")
		// Data that looks like framing.
		f("7\r\n\r\n0\r\n\r\n\r\n0\r\n\r\n", "")
		f("5\r\n0\r\n\r\n\r\n5\r\n0\r\n\r\n\r\n0\r\n\r\n", "")
		// The largest chunk that can be counted.
		f("1FFFFFF\r\nx", "")
		f("01fffffF;ext\r\nx", "")

		f("\r\n", "frames")
		f("\nhello", "frames")
		f("g\r\n", "frames")
		f("-1\r\n", "frames")
		f("+5\r\nhello", "frames")
		f(" 5\r\nhello", "frames")
		f(";x\r\n", "frames")
		f("0x5\r\nhello", "frames")
		f("5\nhello", "frames")
		f("5,\r\nhello", "frames")
		f("5\x00\r\nhello", "frames")
		f("5:\r\n", "frames")
		f("5/\r\n", "frames")
		f("5@\r\n", "frames")
		f("5`\r\n", "frames")
		f("5\r\nhelloX\n", "frames")
		f("5\r\nhello\n", "frames")
		f("5\r\nhello\rX", "frames")
		f("5\r\nhello\r\r", "frames")
		f("5\r\nhello\r\n\r\n", "frames")
		f("5\r\nhello\r\nHTTP/1.1", "frames")
		f("0\r\n\n\r\n", "frames")
		f("0\r\nTrailer: x\r\n\n\r\n", "frames")
		f("0\r\n\rX", "frames")
		f("0\r\nTrailer: x\r\n\r\r", "frames")
		f("2000000\r\nx", "large")
		f("fffffffffffffffff\r\nx", "large")
		f("5\r\nhello\r\n123456789\r\n", "large")
		f("5\r\nhello\r\n20000000g", "large")
	})
}

// TestFramesSurplus puts bytes behind the end into the packet that ends the
// body, and into the next.
func TestFramesSurplus(t *testing.T) {
	eachLoop(t, func(t *testing.T, r *bodyRunner) {
		for _, rest := range []string{"x", "\r\n", "0\r\n\r\n", "HTTP/1.1 200 OK\r\n"} {
			if why := r.send([]byte("5\r\nhello\r\n0\r\n\r\n"+rest), []int{10, 100}); why.String() != "surplus" {
				t.Fatalf("%q: paused by %q", rest, why)
			}
		}
	})
}

// TestFramesRandom sends random bodies, whole, damaged and cut anywhere.
func TestFramesRandom(t *testing.T) {
	eachLoop(t, func(t *testing.T, r *bodyRunner) {
		rnd := rand.New(rand.NewSource(2))
		seen := make(map[string]int)
		for range 2000 {
			var body bytes.Buffer
			for range rnd.Intn(12) {
				n := 1 + rnd.Intn(1<<rnd.Intn(10))
				size := fmt.Sprintf([]string{"%x", "%X", "0%x"}[rnd.Intn(3)], n)
				ext := []string{"", "", "", ";a", ";a=\"b\"", " ", "\t;x=0\r"}[rnd.Intn(7)]
				body.WriteString(size + ext + "\r\n")
				for range n {
					body.WriteByte("0\r\n\r\n;aF"[rnd.Intn(8)])
				}
				body.WriteString("\r\n")
			}
			body.WriteString([]string{"0\r\n", "000\r\n", "0;x\r\n"}[rnd.Intn(3)])
			for range rnd.Intn(3) {
				body.WriteString("Server-Timing: " + strings.Repeat("x", rnd.Intn(40)) + "\r\n")
			}
			body.WriteString("\r\n")
			b := body.Bytes()
			if rnd.Intn(3) == 0 { // damage
				for range 1 + rnd.Intn(2) {
					b[rnd.Intn(len(b))] = "0123456789abcdefgG\r\n; \x00\xff"[rnd.Intn(24)]
				}
			}
			if rnd.Intn(8) == 0 {
				b = append(b, "0\r\n"[:1+rnd.Intn(3)]...)
			}
			var cuts []int
			limit := 1 + rnd.Intn(1<<rnd.Intn(11))
			for left := len(b); left > 0; {
				n := 1 + rnd.Intn(limit)
				cuts = append(cuts, n)
				left -= n
			}
			why := r.send(b, cuts)
			seen[why.String()]++
		}
		t.Logf("pauses: %v", seen)
		if seen[""] == 0 || seen["frames"] == 0 || seen["surplus"] == 0 {
			t.Fatalf("pauses: %v: the bodies have not tried everything", seen)
		}
	})
}

// TestFramesManyInOnePacket: with bpf_loop a packet may hold any number of
// chunks; the bounded loop gives up beyond what its comment says it can walk.
func TestFramesManyInOnePacket(t *testing.T) {
	eachLoop(t, func(t *testing.T, r *bodyRunner) {
		bounded := strings.HasSuffix(t.Name(), "true")
		for _, c := range []struct {
			chunks  int
			bounded string
		}{
			{85, ""},
			{500, "loop"},
		} {
			body := []byte(strings.Repeat("1\r\nx\r\n", c.chunks) + "0\r\n\r\n")
			r.w.m.refused = 0
			why := r.sendUnchecked(body)
			want := ""
			if bounded {
				want = c.bounded
			}
			if why.String() != want {
				t.Fatalf("%d chunks: paused by %q, want %q", c.chunks, why, want)
			}
			if want == "" && (wordState(r.w.m.word) != stateDone || r.w.m.chunks != uint64(c.chunks)+1) {
				t.Fatalf("%d chunks: %s after %d chunks", c.chunks, stateNames[wordState(r.w.m.word)], r.w.m.chunks)
			}
		}
	})
}

// sendUnchecked sends the body in one merged packet.
func (r *bodyRunner) sendUnchecked(body []byte) Why {
	*r.w.m = splice{client: r.w.cid, engine: r.w.eid, eStart: 1000, cStart: 5000, una: 5000, mss: 1460, word: word(stateActive, 0, 0, 1000)}
	f := frame{from: "engine", to: "E", flags: 16, seq: 1000, ack: 300, payload: body, gso: 1460}
	r.w.run(&f, f.bytes())
	return Why(r.w.m.refused)
}
