package proxy

import (
	"bytes"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// relay carries the rest of one response from an engine to a client: by
// copying on a shard's goroutine, or by letting the kernel carry it (Splice). It
// is embedded in its connection's exchange and used for one response after
// another.
//
// Hand-over: the goroutine fills it and calls start; from there on the two
// descriptors are read and written only under mu while state is relaying or
// settling. The goroutine gets them back when finished reports true or after
// stop, and only then may close them.
type relay struct {
	c      *conn
	counts *counts // of up's shard
	// ready is onEngine, made once.
	ready func(w *watch, events uint32)

	mu     sync.Mutex // guards the rest from start until finished or stop
	state  relayState
	result failure
	up     *engineConn
	frames Frames
	// untilClose: the body ends with the engine's connection.
	untilClose bool
	// decode: the client is sent the body without its chunk framing, or with
	// framing of the relay's own when chunked is set.
	decode, chunked bool
	// filter takes out of the body what the client has not asked for; nil for
	// none. With it decode is set, and chunked unless the client cannot.
	filter *usageFilter
	// rest is what was read and the client's socket has not taken yet, since
	// since. While it is not empty the engine is not read: so what a client
	// that stalls costs is bounded.
	rest  []byte
	since time.Time
	// splice is nil when the response is only copied. armed: the kernel may
	// take, or has taken, the rest.
	splice Splice
	armed  bool
	// prefills: the body's first token will tell that the engine has ended its
	// prefill, as the head has not: engines send that of a stream at once. The
	// kernel is offered the rest after it. prefilled: it has come, at firstAt, and
	// the goroutine does not know.
	prefills, prefilled bool
	// failed: instead of the first token there was an error, or the stream's end.
	failed  bool
	first   firstToken
	firstAt time.Time
	// gaps counts the times between parts of a stream that are copied, nil for what is
	// no stream; lastAt is when the last part came, from clockBase, and 0 before the
	// first token and after the kernel has carried some.
	gaps   *gapCounts
	lastAt time.Duration
	// surplus: the engine sent more than the response, so its connection is
	// not used again.
	surplus bool

	// told: the goroutine knows, or is being told, that the relay is over.
	told bool

	tail    []byte    // the body's last bytes, at most 2*TailBytes
	strayed time.Time // when the kernel first left bytes that it should carry
	carried uint64    // by the kernel, as far as tail knows
	counted Carried   // what the shard's counts have of the kernel's work
	// kernelTail is scratch of carriedLocked.
	kernelTail []byte
}

type relayState uint8

const (
	relayOff relayState = iota
	relaying
	// settling: the response is over, but the client has not acknowledged
	// what the kernel carried of it.
	settling
	relayDone
)

// reset makes the relay ready to be filled for a response.
func (r *relay) reset(c *conn, up *engineConn) {
	// A late call of onEngine or onWritable looks at state and up.
	r.mu.Lock()
	defer r.mu.Unlock()
	r.c, r.up, r.counts = c, up, &up.w.shard.counts
	if r.ready == nil {
		r.ready = r.onEngine
	}
	r.result, r.state = none, relayOff
	r.frames, r.untilClose, r.decode, r.chunked, r.filter = Frames{}, false, false, false, nil
	r.rest = r.rest[:0]
	r.splice, r.armed, r.surplus, r.told = nil, false, false, false
	r.prefills, r.prefilled, r.failed, r.first = false, false, false, firstToken{}
	r.gaps, r.lastAt = nil, 0
	r.tail = r.tail[:0]
	r.strayed, r.carried, r.counted = time.Time{}, 0, Carried{}
}

// start hands both descriptors to the shard. Bytes the client has not taken
// yet are in rest.
func (r *relay) start() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.state = relaying
	r.up.relayed = true
	r.goOnLocked()
}

// finished reports whether the relay is over, and how it ended.
func (r *relay) finished() (bool, failure) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.settleLocked()
	r.told = r.state == relayDone
	return r.told, r.result
}

// stop ends the relay for reason f, unless it has finished; it returns how it
// ended. Afterwards nothing touches the descriptors.
func (r *relay) stop(f failure) failure {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.state == relaying && r.armed {
		// A client that has all of its answer may leave before the kernel's
		// news of the end is read.
		r.takeLocked()
	}
	r.settleLocked()
	if r.state != relayDone {
		r.endLocked(f)
	}
	r.told = true
	return r.result
}

// takePrefilled reports, once, that prefilled has become true, and when.
func (r *relay) takePrefilled() (at time.Time, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	ok = r.prefilled
	r.prefilled = false
	return r.firstAt, ok
}

// unlock gives mu back, and then wakes the goroutine if the relay is over or it
// has to know of prefilled: not before, because it needs mu first of all. While the
// response goes on the first token is told here as far as that can be: to wake
// another thread for it costs more than all else that is done for it.
func (r *relay) unlock() {
	if r.prefilled && r.state != relayDone && r.c.x.tellPrefilled(r.firstAt) {
		r.prefilled = false
	}
	wake := r.state == relayDone && !r.told || r.prefilled
	r.told = r.told || wake
	c := r.c
	r.mu.Unlock()
	if wake {
		c.wake()
	}
}

// between reports that the relay is over, and that the client's socket was
// given, and where the kernel carried it has taken, a whole number of events,
// each in a chunk that is whole, of a body that is not over.
func (r *relay) between() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.state != relayDone || r.untilClose || r.decode || r.frames.Fixed || r.frames.Step != StepSizeStart ||
		len(r.rest) > 0 || r.armed || r.splice != nil && !r.splice.Settled() {
		return false
	}
	return len(r.tail) == 0 || bytes.HasSuffix(r.tail, []byte("\n\n\r\n")) || bytes.HasSuffix(r.tail, []byte("\r\n\r\n\r\n"))
}

// stalled reports whether the client has taken nothing for limit though
// something waits for it.
func (r *relay) stalled(limit time.Duration) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.splice != nil && r.state == relaying {
		// What the kernel has carried is owed after a pause too, and the
		// engine sends nothing new before it is acknowledged.
		k, _ := r.splice.Carried(r.kernelTail[:0])
		if k.Stalled >= limit || r.armed {
			return k.Stalled >= limit
		}
	}
	return (len(r.rest) > 0 || r.state == settling) && time.Since(r.since) >= limit
}

// onEngine runs on the shard's goroutine when the engine's socket has news.
func (r *relay) onEngine(w *watch, events uint32) {
	r.mu.Lock()
	defer r.unlock()
	if r.state == settling && r.up.w == w && events&(unix.EPOLLERR|unix.EPOLLHUP) != 0 {
		// The engine is gone, and with it what the client has not acknowledged.
		r.settleLocked()
		if r.state == settling {
			r.endLocked(engineBroke)
		}
		return
	}
	if r.state != relaying || r.up.w != w {
		return
	}
	r.counts.wakeups.Add(1)
	if r.armed && !r.takeLocked() {
		var b [1]byte
		if r.state != relaying {
			return
		}
		// The kernel carries the response, so the socket has nothing to say
		// but that the connection has broken. Should it have bytes all the
		// same, epoll would tell so for ever: the patience is bounded.
		n, errno := recv(w.fd, b[:], unix.MSG_PEEK)
		if n > 0 && r.strayed.IsZero() {
			r.strayed = time.Now()
		}
		if n == 0 && errno == 0 || errno != 0 && errno != unix.EAGAIN || n > 0 && time.Since(r.strayed) > strayTime {
			r.endLocked(engineBroke)
		}
		return
	}
	if len(r.rest) > 0 {
		// A broken connection is met again when reading goes on.
		return
	}
	buf := w.shard.buf
	n, errno := recv(w.fd, buf, 0)
	switch {
	case errno == unix.EAGAIN:
		r.armLocked()
	case errno != 0:
		r.endLocked(engineBroke)
	case n == 0 && r.untilClose:
		r.frames.Step = StepEnd
		var end []byte
		if r.filter != nil {
			end = r.refilter(nil, &w.shard.scratch)
		}
		r.passLocked(end, none)
	case n == 0:
		r.endLocked(engineBroke)
	default:
		r.forwardLocked(w.shard, buf[:n])
	}
}

// takeLocked takes an armed response back and reports whether the engine may
// be read.
func (r *relay) takeLocked() bool {
	f, hold := r.splice.Take()
	switch hold {
	case HeldHere:
		stale := r.kernelTailLocked()
		r.frames, r.armed, r.strayed, r.lastAt = f, false, time.Time{}, 0
		if stale {
			r.endLocked(engineBroke)
			return false
		}
		return true
	case HeldEnded:
		r.surplus = r.kernelTailLocked() || r.surplus
		r.frames.Step, r.armed = StepEnd, false
		r.goOnLocked()
	}
	return false
}

// kernelTailLocked takes over the last bytes the kernel has carried, if it has
// carried any since it was asked last. stale is Carried.Stale.
func (r *relay) kernelTailLocked() (stale bool) {
	k := r.carriedLocked()
	if k.Bytes == r.carried {
		return k.Stale
	}
	// Of an earlier part tail is known already.
	tail := r.kernelTail
	fresh := min(uint64(len(tail)), k.Bytes-r.carried)
	r.keepTail(tail[uint64(len(tail))-fresh:])
	r.carried = k.Bytes
	return k.Stale
}

// carriedLocked returns what the kernel has carried and the end of it in
// kernelTail, and adds what is new to the counts.
func (r *relay) carriedLocked() Carried {
	var k Carried
	k, r.kernelTail = r.splice.Carried(r.kernelTail[:0])
	n := r.counts
	n.kernelBytes.Add(k.Bytes - r.counted.Bytes)
	n.kernelChunks.Add(k.Chunks - r.counted.Chunks)
	n.kernelPackets.Add(k.Packets - r.counted.Packets)
	r.counted = k
	return k
}

// count brings the counts up to date while the kernel carries the response.
func (r *relay) count() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if (r.state == relaying || r.state == settling) && r.splice != nil {
		r.carriedLocked()
	}
}

// part ends the use of the kernel, and returns what it has carried. The relay
// is over, or was never started.
func (r *relay) part() Carried {
	r.mu.Lock()
	k, splice := r.carriedLocked(), r.splice
	r.splice = nil
	r.mu.Unlock()
	// Not under mu: Part may wait for a running onChanged.
	splice.Part()
	return k
}

// strayTime is far more than any race between epoll and the kernel's taking
// over can explain. Tests whose kernel is a goroutine, which takes its bytes from
// the socket whenever it runs, change it.
var strayTime = 2 * time.Second

// eor is the flag for writes to the client. What the kernel carries comes
// between two writes of ours, and the socket may never send bytes from before
// and after it in one segment.
func (r *relay) eor() int {
	if r.splice != nil {
		return unix.MSG_EOR
	}
	return 0
}

// forwardLocked passes p, just read from the engine, to the client. Each read
// is forwarded at once.
func (r *relay) forwardLocked(s *shard, p []byte) {
	out, f := r.accept(p, &s.scratch)
	r.passLocked(out, f)
}

// passLocked sends bytes to the client, and ends the relay if f says so.
func (r *relay) passLocked(out []byte, f failure) {
	n, errno := send(r.c.fd, out, r.eor())
	if errno != 0 && errno != unix.EAGAIN {
		r.endLocked(clientLeft)
		return
	}
	if f != none {
		r.endLocked(f)
		return
	}
	if n < len(out) {
		r.rest = append(r.rest[:0], out[n:]...)
		r.since = time.Now()
		r.c.wantWritable(true)
		// Errors only, and once: reading goes on when rest is empty.
		if err := r.up.w.arm(unix.EPOLLONESHOT, r.ready); err != nil {
			r.endLocked(engineBroke)
		}
		return
	}
	if r.frames.Ended() {
		r.goOnLocked()
		return
	}
	r.armLocked()
}

// scratch is room for what a relay makes of the bytes at hand. The zero value
// is ready.
type scratch struct{ decoded, filtered, framed []byte }

// accept advances the framing over p and returns the bytes for the client,
// which may be in t.
func (r *relay) accept(p []byte, t *scratch) (out []byte, f failure) {
	var n int
	var err error
	before := r.frames
	switch {
	case r.untilClose:
		n, out = len(p), p
	case r.decode && !r.frames.Fixed:
		t.decoded, n, err = r.frames.Decode(t.decoded[:0], p)
		out = t.decoded
	default:
		n, err = r.frames.Advance(p)
		out = p[:n]
	}
	r.counts.bytes.Add(uint64(n))
	if r.prefills {
		r.lookFor(before, p[:n])
	}
	if more := r.frames.Chunks - before.Chunks; more > 0 {
		r.counts.chunks.Add(more)
		if r.gaps != nil && !r.prefills {
			r.countGap(more)
		}
	}
	r.keepTail(p[:n])
	if r.filter != nil {
		out = r.refilter(out, t)
	}
	if err != nil {
		return out, engineFraming
	}
	r.surplus = r.surplus || n < len(p)
	return out, none
}

// clockBase is what lastAt is counted from: one reading of the monotonic clock is all
// that a token costs.
var clockBase = time.Now()

// countGap notes that a part of the stream is there now, of so many chunks.
func (r *relay) countGap(chunks uint64) {
	now := time.Since(clockBase)
	r.gaps.chunks.Add(chunks)
	if r.lastAt > 0 {
		r.gaps.add(now - r.lastAt)
	}
	r.lastAt = now
}

// tokenless reports, once the response is over, that it was a stream without a token.
func (r *relay) tokenless() bool { return r.prefills || r.failed }

// lookFor looks for the first token in bytes of the body, of which f is the framing
// before them.
func (r *relay) lookFor(f Frames, p []byte) {
	found := notYet
	if r.untilClose {
		found = r.first.find(p)
	} else {
		found = r.first.findFramed(f, p)
	}
	switch found {
	case tokenThere:
		r.prefills, r.prefilled, r.firstAt = false, true, time.Now()
	case tokenNever:
		r.prefills, r.failed = false, true
	}
}

// refilter passes a part of the body through the filter, and what stays
// through chunk framing of the relay's own. At the body's end it returns what
// ends it.
func (r *relay) refilter(p []byte, t *scratch) []byte {
	t.filtered = r.filter.Append(t.filtered[:0], p)
	ended := r.frames.Ended()
	if ended {
		t.filtered = r.filter.Flush(t.filtered)
	}
	if !r.chunked {
		return t.filtered
	}
	t.framed = t.framed[:0]
	if len(t.filtered) > 0 {
		t.framed = append(strconv.AppendInt(t.framed, int64(len(t.filtered)), 16), crlf...)
		t.framed = append(append(t.framed, t.filtered...), crlf...)
	}
	if ended {
		t.framed = append(t.framed, "0\r\n\r\n"...)
	}
	return t.framed
}

func (r *relay) keepTail(p []byte) {
	if len(p) >= TailBytes {
		r.tail = append(r.tail[:0], p[len(p)-TailBytes:]...)
		return
	}
	if len(r.tail)+len(p) > 2*TailBytes {
		keep := TailBytes - len(p)
		r.tail = append(r.tail[:0], r.tail[len(r.tail)-keep:]...)
	}
	r.tail = append(r.tail, p...)
}

// onWritable runs on a shard's goroutine when the client's socket takes bytes.
func (r *relay) onWritable() {
	r.mu.Lock()
	defer r.unlock()
	if r.state != relaying || len(r.rest) == 0 {
		return
	}
	r.counts.wakeups.Add(1)
	n, errno := send(r.c.fd, r.rest, r.eor())
	if errno == unix.EAGAIN {
		return
	}
	if errno != 0 {
		r.endLocked(clientLeft)
		return
	}
	if n < len(r.rest) {
		r.rest = r.rest[:copy(r.rest, r.rest[n:])]
		r.since = time.Now()
		return
	}
	r.rest = r.rest[:0]
	if cap(r.rest) > keepRest {
		r.rest = nil
	}
	r.c.wantWritable(false)
	r.goOnLocked()
}

// keepRest is how large a buffer for what a client has not taken is kept for
// its next response.
const keepRest = 4 << 10

// goOnLocked does what comes next when something has changed: wait for the
// client, end, or read on.
func (r *relay) goOnLocked() {
	switch {
	case len(r.rest) > 0:
		r.since = time.Now()
		r.c.wantWritable(true)
	case r.frames.Ended():
		r.state = settling
		r.since = time.Now()
		r.settleLocked()
		if r.state == settling {
			// An end of the engine's connection would be reported for ever.
			_ = r.up.w.arm(unix.EPOLLONESHOT, r.ready)
		}
	default:
		r.armLocked()
		if err := r.up.w.arm(unix.EPOLLIN|unix.EPOLLRDHUP, r.ready); err != nil {
			r.endLocked(engineBroke)
		}
	}
}

// settleLocked ends a response that is over once the client has acknowledged
// what the kernel carried of it: only then may the engine's connection serve
// another.
func (r *relay) settleLocked() {
	if r.state == settling && (r.splice == nil || r.splice.Settled()) {
		r.endLocked(none)
	}
}

// armLocked offers the rest to the kernel, once prefills is settled. Everything
// read has been written.
func (r *relay) armLocked() {
	if r.splice != nil && !r.armed && !r.prefills {
		r.armed = r.splice.Arm(r.frames)
	}
}

// onChanged is called by the Joiner when the kernel's hold changed.
func (r *relay) onChanged() {
	r.mu.Lock()
	defer r.unlock()
	if r.state == relaying || r.state == settling {
		r.counts.wakeups.Add(1)
	}
	if r.state == relaying && r.armed && r.takeLocked() {
		// Paused. What made it pause is read when the shard sees it.
		r.armLocked()
	}
	r.settleLocked()
}

// endLocked ends the relay. unlock tells the goroutine.
func (r *relay) endLocked(f failure) {
	r.state, r.result = relayDone, f
	if r.splice != nil && f != none {
		r.splice.Stop()
	}
}

// writeNow sends what the client's socket takes at once and keeps the rest.
// Only before start.
func (r *relay) writeNow(p []byte) failure {
	n, errno := send(r.c.fd, p, r.eor())
	if errno != 0 && errno != syscall.EAGAIN {
		return clientLeft
	}
	r.rest = append(r.rest[:0], p[n:]...)
	return none
}
