package proxy

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"
)

// randomBody is a chunked body of random chunks, some of which look like the
// body's end, and its data.
func randomBody(rng *rand.Rand) (framed, data []byte) {
	for range 1 + rng.IntN(20) {
		n := 1 + rng.IntN(300)
		if rng.IntN(20) == 0 {
			n = 1 + rng.IntN(100_000)
		}
		part := make([]byte, n)
		for i := range part {
			part[i] = "0\r\nabc; \n"[rng.IntN(9)]
		}
		if rng.IntN(3) == 0 {
			part = append(part, "\r\n0\r\n\r\n"...)
		}
		ext := []string{"", ";a=b", " ", ";x=\"0\""}[rng.IntN(4)]
		framed = fmt.Appendf(framed, []string{"%x%s\r\n", "%X%s\r\n", "000%x%s\r\n"}[rng.IntN(3)], len(part), ext)
		framed = append(append(framed, part...), "\r\n"...)
		data = append(data, part...)
	}
	framed = append(framed, "0\r\n"...)
	for range rng.IntN(3) {
		framed = append(framed, "Trailer: \r0\r\n"...)
	}
	return append(framed, "\r\n"...), data
}

// writeInPieces writes p in random pieces with random pauses, so that it
// arrives cut anywhere.
func writeInPieces(w io.Writer, p []byte, rng *rand.Rand) {
	for len(p) > 0 {
		n := min(len(p), 1+rng.IntN(40))
		if rng.IntN(3) == 0 {
			n = min(len(p), 1+rng.IntN(20_000))
		}
		w.Write(p[:n])
		p = p[n:]
		if rng.IntN(4) == 0 {
			time.Sleep(time.Duration(rng.IntN(300)) * time.Microsecond)
		}
	}
}

// randomResponses has clients fetch random responses over kept connections
// and compares every byte, the framing included.
func randomResponses(t *testing.T, joiner Joiner, clients, each int) *rig {
	var mu sync.Mutex
	framed := map[string][]byte{}
	e := newRawEngine(t, func(c *engineSide) {
		rng := rand.New(rand.NewPCG(uint64(c.n), 7))
		for {
			req := c.request()
			if req == nil {
				return
			}
			body, data := randomBody(rng)
			head := chunkedHead
			if rng.IntN(4) == 0 {
				body = data
				head = fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n", len(data))
			}
			mu.Lock()
			framed[req.Header.Get("X-Request-Id")] = body
			mu.Unlock()
			if rng.IntN(2) == 0 {
				io.WriteString(c, head)
				writeInPieces(c, body, rng)
			} else {
				writeInPieces(c, append([]byte(head), body...), rng)
			}
		}
	})
	r := newRig(t, Limits{}, joiner, e.url())
	var wg sync.WaitGroup
	for k := range clients {
		c := r.dial()
		c.SetDeadline(time.Now().Add(60 * time.Second))
		wg.Go(func() {
			for i := range each {
				id := fmt.Sprintf("%d-%d", k, i)
				c.send(post(hello, "X-Request-Id: "+id+"\r\n"))
				head, err := readHead(c)
				if err != nil {
					t.Errorf("response %s: %v", id, err)
					return
				}
				mu.Lock()
				want := framed[id]
				mu.Unlock()
				got := make([]byte, len(want))
				if _, err := io.ReadFull(c.br, got); err != nil || !bytes.Equal(got, want) {
					at := 0
					for at < len(got) && got[at] == want[at] {
						at++
					}
					t.Errorf("response %s differs at byte %d of %d: %v\n%s", id, at, len(want), err, head)
					return
				}
			}
		})
	}
	wg.Wait()
	eventually(t, 20*time.Second, "all are counted", func() bool { return r.s.Datapath().Running == 0 })
	return r
}

func readHead(c *client) (string, error) {
	var head strings.Builder
	for {
		line, err := c.br.ReadString('\n')
		head.WriteString(line)
		if err != nil || line == "\r\n" {
			return head.String(), err
		}
	}
}

func TestThousandResponsesAreByteExact(t *testing.T) {
	r := randomResponses(t, nil, 20, 50)
	d := r.s.Datapath()
	var n uint64
	for _, c := range d.Responses {
		if c.Tier != "copy" || c.Reason != "off" {
			t.Errorf("%+v", c)
		}
		n += c.Count
	}
	if n != 1000 || d.Wakeups == 0 || d.CopiedChunks == 0 || d.CopiedBytes == 0 || d.KernelBytes != 0 {
		t.Errorf("%+v", d)
	}
}

// TestEachReadIsForwardedAtOnce: a token that has arrived is not held back.
func TestEachReadIsForwardedAtOnce(t *testing.T) {
	next := make(chan string)
	e := newRawEngine(t, func(c *engineSide) {
		c.request()
		io.WriteString(c, chunkedHead)
		for part := range next {
			io.WriteString(c, part)
		}
	})
	r := newRig(t, Limits{}, nil, e.url())
	c := r.dial()
	c.send(post(hello))
	if _, err := readHead(c); err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{"5", "\r", "\nhe", "llo\r\n", "1\r\nx", "\r\n", "0\r\n", "\r\n"} {
		next <- part
		got := make([]byte, len(part))
		c.SetReadDeadline(time.Now().Add(time.Second))
		if _, err := io.ReadFull(c.br, got); err != nil || string(got) != part {
			t.Fatalf("sent %q, got %q: %v", part, got, err)
		}
	}
	close(next)
}

func TestRelayDoesNotAllocate(t *testing.T) {
	part := []byte(chunk(strings.Repeat("x", 200)))
	for _, decode := range []bool{false, true} {
		r := relay{decode: decode, counts: new(counts)}
		var room scratch
		if n := testing.AllocsPerRun(100, func() {
			if _, f := r.accept(part, &room); f != none {
				t.Fatal(f.label())
			}
		}); n != 0 {
			t.Errorf("%v allocations, decode %v", n, decode)
		}
	}
}

// TestExchangeDoesNotAllocate: a whole exchange on kept connections, relay
// included, allocates nothing.
func TestExchangeDoesNotAllocate(t *testing.T) {
	withoutRace(t)
	n := testing.AllocsPerRun(200, steadyExchange(t, newPlainRig, post(hello)))
	if n > 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkExchange(b *testing.B) {
	exchange := steadyExchange(b, newPlainRig, post(hello))
	b.ReportAllocs()
	for b.Loop() {
		exchange()
	}
}

func newPlainRig(t testing.TB, url string) *rig { return newRig(t, Limits{}, nil, url) }

// steadyExchange returns a function that has a client fetch one streamed
// response over kept connections; client and engine allocate nothing.
func steadyExchange(t testing.TB, newRig func(t testing.TB, url string) *rig, ask string) func() {
	request, head := []byte(ask), []byte(chunkedHead+chunk("data: 1\n\n"))
	_, body, _ := strings.Cut(ask, "\r\n\r\n")
	end := []byte(body[max(0, len(body)-50):])
	rest := []byte(chunk("data: 2\n\n") + "0\r\n\r\n")
	e := newRawEngine(t, func(c *engineSide) {
		buf := make([]byte, 4<<10)
		for seen := 0; ; {
			n, err := c.Read(buf[seen:])
			if err != nil {
				return
			}
			if seen += n; !bytes.HasSuffix(buf[:seen], end) {
				continue
			}
			seen = 0
			c.Write(head)
			c.Write(rest)
		}
	})
	r := newRig(t, e.url())
	r.s.recent.due.Store(math.MaxInt64 / 2) // a decision that is kept allocates
	c := r.dial()
	buf := make([]byte, 4<<10)
	return func() {
		if _, err := c.Write(request); err != nil {
			t.Fatal(err)
		}
		for seen := 0; !bytes.HasSuffix(buf[:seen], []byte("\r\n0\r\n\r\n")); {
			n, err := c.Read(buf[seen:])
			if err != nil {
				t.Fatal(err)
			}
			seen += n
		}
	}
}

// TestTailKeepsTheEnd: however the body is cut, the tail ends with its last
// TailBytes and stays bounded.
func TestTailKeepsTheEnd(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 200 {
		var r relay
		var all []byte
		for range rng.IntN(40) {
			part := make([]byte, rng.IntN(1500))
			for i := range part {
				part[i] = byte(rng.Uint32())
			}
			all = append(all, part...)
			r.keepTail(part)
			want := all[max(0, len(all)-TailBytes):]
			if !bytes.HasSuffix(r.tail, want) || len(r.tail) > 2*TailBytes {
				t.Fatalf("the tail holds %d bytes of %d", len(r.tail), len(all))
			}
		}
	}
}

func TestUsageIsCounted(t *testing.T) {
	usage := `"usage":{"prompt_tokens":5,"total_tokens":9,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":2}}`
	stream := strings.Repeat(chunk(`data: {"choices":[{}]}`+"\n\n"), 200) + chunk(`data: {"choices":[],`+usage+"}\n\n") + chunk("data: [DONE]\n\n") + "0\r\n\r\n"
	n := 0
	e := newRawEngine(t, func(c *engineSide) {
		for c.request() != nil {
			switch n++; n {
			case 1:
				io.WriteString(c, fixed(`{"choices":[],`+usage+`}`))
			case 2:
				io.WriteString(c, chunkedHead)
				writeInPieces(c, []byte(stream), rand.New(rand.NewPCG(1, 2)))
			default:
				io.WriteString(c, chunkedHead+chunk("data: [DONE]\n\n")+"0\r\n\r\n")
			}
		}
	})
	r := newRig(t, Limits{}, nil, e.url())
	c := r.dial()
	for range 3 {
		c.send(post(hello))
		c.answer()
	}
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(r.s)
	value := func(name string, labels ...string) float64 {
		t.Helper()
		families, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			if f.GetName() != name {
				continue
			}
		metric:
			for _, m := range f.Metric {
				for i := 0; i < len(labels); i += 2 {
					ok := false
					for _, l := range m.Label {
						ok = ok || l.GetName() == labels[i] && l.GetValue() == labels[i+1]
					}
					if !ok {
						continue metric
					}
				}
				if m.Counter != nil {
					return m.Counter.GetValue()
				}
				return float64(m.Histogram.GetSampleCount())
			}
		}
		return -1
	}
	f := func(want float64, name string, labels ...string) {
		t.Helper()
		eventually(t, 20*time.Second, fmt.Sprint(name, labels, " is ", want, ", not ", value(name, labels...)), func() bool {
			return value(name, labels...) == want
		})
	}
	f(3, "inferrail_requests_total", "model", "m", "outcome", "ok")
	f(10, "inferrail_tokens_total", "model", "m", "kind", "prompt")
	f(8, "inferrail_tokens_total", "model", "m", "kind", "completion")
	f(4, "inferrail_tokens_total", "model", "m", "kind", "cached")
	f(1, "inferrail_responses_without_usage_total", "model", "m")
	f(3, "inferrail_responses_total", "tier", "copy", "reason", "off")
	f(3, "inferrail_time_to_first_byte_seconds", "model", "m")
	f(205, "inferrail_relay_chunks_total", "tier", "copy")
}

// TestCountsAreLive: what a stream has cost is visible while it runs, whoever
// carries it, and is not counted again at its end.
func TestCountsAreLive(t *testing.T) {
	const chunks = 300
	for _, joiner := range []Joiner{nil, newFakeKernel(t)} {
		end := make(chan struct{})
		e := newRawEngine(t, func(c *engineSide) {
			c.request()
			io.WriteString(c, chunkedHead)
			for range chunks {
				io.WriteString(c, chunk("data: x\n\n"))
				time.Sleep(200 * time.Microsecond)
			}
			<-end
			io.WriteString(c, "0\r\n\r\n")
			c.request()
		})
		r := newRig(t, Limits{}, joiner, e.url())
		c := r.dial()
		c.send(post(hello))
		const size = uint64(chunks * len("9\r\ndata: x\n\n\r\n"))
		var d Datapath
		eventually(t, 20*time.Second, "all chunks are counted", func() bool {
			d = r.s.Datapath()
			return d.CopiedChunks+d.KernelChunks == chunks && d.CopiedBytes+d.KernelBytes == size
		})
		if d.Running != 1 || len(d.Responses) != 0 {
			t.Errorf("the stream has ended: %+v", d)
		}
		if carried := d.KernelChunks > 0; carried != (joiner != nil) {
			t.Errorf("%d chunks carried by the kernel", d.KernelChunks)
		}
		// The head, and at least one read or word from the kernel more.
		if d.Wakeups < 2 {
			t.Errorf("%d wake-ups", d.Wakeups)
		}
		close(end)
		c.answer()
		eventually(t, 20*time.Second, "the response is over", func() bool { return r.s.Datapath().Running == 0 })
		if d := r.s.Datapath(); d.CopiedChunks+d.KernelChunks != chunks+1 || d.CopiedBytes+d.KernelBytes != size+uint64(len("0\r\n\r\n")) {
			t.Errorf("in the end: %+v", d)
		}
	}
}

// TestStalledAfterAPause: a client that acknowledges nothing of what the kernel
// has carried is cut, though userspace holds the rest of its answer and has
// nothing to send.
func TestStalledAfterAPause(t *testing.T) {
	e := newRawEngine(t, func(c *engineSide) {
		if c.request() != nil {
			io.WriteString(c, chunkedHead+chunk("data: 1\n\n"))
			c.waitClosed()
		}
	})
	r := newRig(t, Limits{StallTimeout: 50 * time.Millisecond}, pausedKernel{}, e.url())
	c := r.dial()
	c.send(post(hello))
	eventually(t, 10*time.Second, "the client is cut", func() bool { return r.outcome("client_stalled") == 1 })
}

// pausedKernel is a Joiner whose splices are paused: they owe the client what
// they have carried, and carry nothing more.
type pausedKernel struct{}

func (pausedKernel) Enter(int, int) (uint32, string)                    { return 1, "" }
func (pausedKernel) Leave(uint32)                                       {}
func (pausedKernel) Segment(bool) int                                   { return 0 }
func (pausedKernel) Join(uint32, uint32, func()) (s Splice, why string) { return pausedSplice{}, "" }

type pausedSplice struct{}

func (pausedSplice) Arm(Frames) bool      { return false }
func (pausedSplice) Take() (Frames, Hold) { panic("it is not armed") }
func (pausedSplice) Stop()                {}
func (pausedSplice) Settled() bool        { return false }
func (pausedSplice) Part()                {}
func (pausedSplice) Carried(tail []byte) (Carried, []byte) {
	return Carried{Bytes: 100, Stalled: time.Hour}, tail
}

// fakeKernel is a Joiner whose kernel is a goroutine: it reads an armed
// engine's socket and writes to the client's, as the programs would, and checks
// that the relay keeps the order the contract asks for.
type fakeKernel struct {
	t      *testing.T
	refuse string // of engines

	mu      sync.Mutex
	entered map[uint32]int // handle -> fd
	last    uint32
	splices map[*fakeSplice]bool
	wg      sync.WaitGroup
	parted  int
	carried int
}

func newFakeKernel(t *testing.T) *fakeKernel {
	k := &fakeKernel{t: t, entered: map[uint32]int{}, splices: map[*fakeSplice]bool{}}
	patience := strayTime
	strayTime = time.Hour // on a busy machine this kernel leaves bytes for as long as it does not run
	t.Cleanup(func() {
		strayTime = patience
		k.wg.Wait()
		k.mu.Lock()
		defer k.mu.Unlock()
		if len(k.entered) > 0 || len(k.splices) > 0 {
			t.Errorf("%d sockets never left, %d splices never parted", len(k.entered), len(k.splices))
		}
	})
	return k
}

func (k *fakeKernel) Enter(fd, engine int) (uint32, string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if engine >= 0 && k.refuse != "" {
		return 0, k.refuse
	}
	for h, other := range k.entered {
		if other == fd {
			k.t.Errorf("fd %d enters again, as %d", fd, h)
		}
	}
	k.last++
	k.entered[k.last] = fd
	return k.last, ""
}

func (k *fakeKernel) Leave(handle uint32) {
	if handle == 0 {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if _, ok := k.entered[handle]; !ok {
		k.t.Errorf("handle %d leaves and had not entered", handle)
	}
	delete(k.entered, handle)
	for s := range k.splices {
		if s.client == handle || s.engine == handle {
			k.t.Errorf("handle %d leaves before its splice has parted", handle)
		}
	}
}

func (k *fakeKernel) Segment(bool) int { return 0 }

func (k *fakeKernel) Join(client, engine uint32, changed func()) (Splice, string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	s := &fakeSplice{k: k, client: client, engine: engine, changed: changed, done: make(chan struct{}),
		rng: rand.New(rand.NewPCG(uint64(len(k.entered)), uint64(k.last)))}
	var ok, ok2 bool
	s.cfd, ok = k.entered[client]
	s.efd, ok2 = k.entered[engine]
	if !ok || !ok2 {
		k.t.Errorf("join of %d and %d, which have not entered", client, engine)
	}
	k.splices[s] = true
	k.wg.Go(s.run)
	return s, ""
}

type fakeSplice struct {
	k              *fakeKernel
	client, engine uint32
	cfd, efd       int
	changed        func()
	rng            *rand.Rand
	done           chan struct{}

	mu      sync.Mutex
	hold    Hold
	armed   bool
	stopped bool
	settled bool
	frames  Frames
	tail    []byte
	carried Carried
	calling sync.WaitGroup
}

func (s *fakeSplice) run() {
	buf := make([]byte, 4096)
	pause := rand.New(rand.NewPCG(uint64(s.client), uint64(s.engine)))
	for {
		select {
		case <-s.done:
			return
		case <-time.After(time.Duration(20+pause.IntN(100)) * time.Microsecond):
		}
		changed := false
		s.mu.Lock()
		switch {
		case s.stopped:
		case s.hold == HeldByKernel && s.rng.IntN(10) == 0: // pause
			s.hold, s.settled, changed = HeldHere, true, true
		case s.armed && s.hold != HeldEnded:
			// A response's bytes only: look first, then take what belongs to it.
			n, errno := recv(s.efd, buf, unix.MSG_PEEK)
			if errno != 0 || n == 0 {
				break
			}
			f := s.frames
			n, err := f.Advance(buf[:n])
			if err != nil || n == 0 {
				break
			}
			// The client must take it all: as in the kernel, what it has not
			// room for is not taken.
			sent, errno := send(s.cfd, buf[:n], 0)
			if errno != 0 {
				break
			}
			recv(s.efd, buf[:sent], 0)
			k := s.frames.Chunks
			s.frames.Advance(buf[:sent])
			s.carried.Chunks += s.frames.Chunks - k
			s.frames.Chunks = k
			s.carried.Bytes += uint64(sent)
			s.carried.Packets++
			s.tail = append(s.tail, buf[:sent]...)
			s.tail = s.tail[max(0, len(s.tail)-TailBytes):]
			s.hold, s.settled = HeldByKernel, false
			if s.frames.Ended() {
				s.hold, changed = HeldEnded, true
			}
		case s.hold == HeldEnded && !s.settled && s.rng.IntN(5) == 0:
			s.settled, changed = true, true
		}
		if changed {
			s.calling.Add(1)
		}
		s.mu.Unlock()
		if changed {
			s.changed()
			s.calling.Done()
		}
	}
}

func (s *fakeSplice) Arm(f Frames) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.armed || s.stopped || f.Ended() {
		s.k.t.Errorf("Arm(%+v), armed %v, stopped %v", f, s.armed, s.stopped)
	}
	if s.rng.IntN(5) == 0 {
		return false
	}
	s.armed, s.frames, s.hold = true, f, HeldHere
	return true
}

func (s *fakeSplice) Take() (Frames, Hold) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.armed || s.stopped {
		s.k.t.Errorf("Take, armed %v, stopped %v", s.armed, s.stopped)
	}
	if s.hold == HeldHere {
		s.armed = false
	}
	return s.frames, s.hold
}

func (s *fakeSplice) Stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopped = true
}

func (s *fakeSplice) Settled() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.settled || s.carried.Bytes == 0
}

func (s *fakeSplice) Carried(tail []byte) (Carried, []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.carried, append(tail, s.tail...)
}

func (s *fakeSplice) Part() {
	s.mu.Lock()
	if !s.stopped && !s.settled && s.carried.Bytes > 0 {
		s.k.t.Error("Part before the splice has settled")
	}
	bytes := s.carried.Bytes
	s.mu.Unlock()
	close(s.done)
	s.calling.Wait()
	s.k.mu.Lock()
	defer s.k.mu.Unlock()
	delete(s.k.splices, s)
	s.k.parted++
	s.k.carried += int(bytes)
}

// TestKernelAndCopyTakeTurns: responses that pass between the kernel and
// userspace at random points are byte exact, and every splice is parted.
func TestKernelAndCopyTakeTurns(t *testing.T) {
	k := newFakeKernel(t)
	r := randomResponses(t, k, 10, 50)
	d := r.s.Datapath()
	tiers := map[string]uint64{}
	for _, c := range d.Responses {
		tiers[c.Tier] += c.Count
	}
	if tiers["packet"] == 0 || tiers["packet"]+tiers["copy"] != 500 || d.KernelBytes == 0 || d.CopiedBytes == 0 || d.KernelChunks == 0 {
		t.Errorf("%+v", d)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.carried != int(d.KernelBytes) {
		t.Errorf("the kernel carried %d bytes, %d are counted", k.carried, d.KernelBytes)
	}
}

// TestWhyNotSpliced: every copied response says why.
func TestWhyNotSpliced(t *testing.T) {
	f := func(want string, k *fakeKernel, request, response string, engineCloses bool) {
		t.Run(want, func(t *testing.T) {
			k.t = t
			e := newRawEngine(t, func(c *engineSide) {
				if c.request() == nil {
					return
				}
				head, body, _ := strings.Cut(response, "\r\n\r\n")
				io.WriteString(c, head+"\r\n\r\n")
				time.Sleep(10 * time.Millisecond)
				io.WriteString(c, body)
				if !engineCloses {
					c.waitClosed()
				}
			})
			r := newRig(t, Limits{}, k, e.url())
			c := r.dial()
			c.send(request)
			if strings.Contains(request, "HTTP/1.0") || engineCloses {
				io.ReadAll(c.br)
			} else {
				c.answer()
			}
			eventually(t, 20*time.Second, "it is counted", func() bool { return len(r.s.Datapath().Responses) > 0 })
			if d := r.s.Datapath().Responses; len(d) != 1 || d[0] != (TierCount{"copy", want, 1}) {
				t.Errorf("%+v", d)
			}
		})
	}
	stream := chunkedHead + chunk("x") + "0\r\n\r\n"
	f("small", newFakeKernel(t), post(hello), fixed(strings.Repeat("x", spliceWorth)), false)
	f("http10", newFakeKernel(t), "POST /v1/completions HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}", stream, false)
	f("until_close", newFakeKernel(t), post(hello), "HTTP/1.1 200 OK\r\n\r\nabc", true)
	f("with_head", newFakeKernel(t), post(hello), "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", false)
	refusing := newFakeKernel(t)
	refusing.refuse = "no_interface"
	f("no_interface", refusing, post(hello), stream, false)
}

// TestClientLeavesWhileTheKernelCarries: the splice is stopped and both
// sockets leave.
func TestClientLeavesWhileTheKernelCarries(t *testing.T) {
	k := newFakeKernel(t)
	e := newRawEngine(t, func(c *engineSide) {
		c.request()
		io.WriteString(c, chunkedHead)
		for range 100 {
			if _, err := io.WriteString(c, chunk("token")); err != nil {
				return
			}
			time.Sleep(time.Millisecond)
		}
		c.waitClosed()
	})
	r := newRig(t, Limits{}, k, e.url())
	for range 20 {
		c := r.dial()
		c.send(post(hello))
		io.ReadFull(c.br, make([]byte, 300))
		c.Close()
	}
	eventually(t, 20*time.Second, "nothing is in flight", func() bool { return r.replicas[0].InFlight() == 0 })
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.parted != 20 {
		t.Errorf("%d splices parted", k.parted)
	}
}
