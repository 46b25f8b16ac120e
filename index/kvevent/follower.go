package kvevent

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/zeebo/xxh3"
)

// Follower follows one publisher, which is one rank of one engine: it brings
// its messages into order, finds out which are missing, has them fetched, and
// knows how much of what it has told is true.
//
// It does nothing by itself. The one who reads the sockets calls, from one
// goroutine and with the time of each:
//
//	Connected, Disconnected    of the subscription
//	Live                       for each message of it
//	Replayed, ReplayEnd        for the replies to a replay
//	Snapshotted                for the reply to a request for a snapshot
//	Failed                     when a request could not be made, or its socket broke
//	Tick                       at Deadline
//
// and after each of them Next, until there is nothing more to do. NewFollower
// makes it.
//
// # When what was told is exact
//
// The messages of a publisher are numbered from 0 without holes, so what has
// been applied is all of them up to the cursor. Exact is then that none is known
// behind the cursor, and that it is still the same publisher. It is known for
// the same by the digest of its latest messages: they have the time in them, so
// no other sends the same. After every break of the connection, and when nothing
// has come for a while, the message before the cursor is asked for again; what
// comes with it shows both that the publisher is the same and what was missed.
//
// Messages that cannot be fetched any more leave blocks that the engine holds
// unknown, and blocks that it has evicted known. Neither mends by itself, however
// many blocks are stored afterwards: one that is used again and again is never
// evicted, and so never told again. So the rank is approximate until the engine
// clears its cache, restarts, or gives a snapshot. Clearing is of the GPU only: it
// does not mend a rank that has told of other tiers; when one tells of them for
// the first time afterwards, some may have been told in what was lost.
type Follower struct {
	options Options
	decoder Decoder
	batch   Batch
	stats   Stats

	state     State // as of the last Next that had nothing to apply
	why       string
	connected bool
	next      uint64 // the cursor: the message wanted next
	seen      uint64 // 1 + the latest message known to have been sent
	lastLive  uint64 // 1 + the latest message of this connection
	publisher [16]byte
	lower     bool   // it has told of other tiers than the GPU
	taint     string // why what was told is not exact
	healed    string // what that was before the GPU was cleared, if another tier may still be
	// unsure: there may be messages that were sent before the subscription.
	// doubt: it may be another publisher. Nothing is applied in doubt.
	unsure, doubt bool
	settled       bool            // it was asked since the subscription has reached the publisher
	deaf          bool            // its replays lack messages that it has sent
	digests       [digests]digest // of the latest messages applied, by sequence

	ready        []Message // to be applied, in order
	live         bool      // those are of the subscription
	pending      []Message // live ones behind a gap, by sequence
	pendingBytes int
	forget       bool
	replace      bool
	chunks       [][]byte // of a snapshot, to be applied

	asked      request
	requests   uint64    // made until now
	attempts   int       // requests in a row that brought nothing
	retryAt    time.Time // no request before that
	checkAt    time.Time // to ask whether something was missed
	noSnapshot int       // requests for a snapshot in a row that brought none
	snapshotAt time.Time // no request for a snapshot before that
}

// digests is how many of the latest messages are known again.
const digests = 256

type digest struct{ seq, sum uint64 } // seq is 1 + the sequence

// request is one that is under way.
type request struct {
	verb     Verb // Nothing when there is none
	id       uint64
	from     uint64
	deadline time.Time
	known    bool // it begins with a message that was applied
	replies  int
	progress bool // it has brought a message that was wanted
}

// Options say what there is to ask, and the bounds. Zero values are defaults.
type Options struct {
	// Replay and Snapshot: the engine has an endpoint for it.
	Replay, Snapshot bool
	// MaxPending messages of MaxPendingBytes in all are kept while others are
	// being fetched; further ones are fetched later. The defaults are 10,000, as
	// many as vLLM keeps for replays, and 32 MiB.
	MaxPending, MaxPendingBytes int
	// Timeout is how long a request may go without a reply: 5 s.
	Timeout time.Duration
	// Idle is how long nothing may come before it is asked whether something was
	// missed: 30 s.
	Idle time.Duration
}

// State is how well the publisher is followed.
type State uint8

// The states. Their order is from the best to the worst.
const (
	// Exact: what was told is what the engine holds.
	Exact State = iota
	// Repairing: messages are missing, or may be, and are being fetched.
	Repairing
	// Approximate: messages are lost. What is told further on is applied.
	Approximate
)

func (s State) String() string { return [...]string{"exact", "repairing", "approximate"}[s] }

// Verb is what a Follower wants to be done.
type Verb uint8

// The verbs.
const (
	Nothing Verb = iota
	// Apply the events of Batch, in their order.
	Apply
	// Forget all that is known of the engine: another one is in its place.
	Forget
	// Replace: forget what events have told; a snapshot of it follows.
	Replace
	// AskReplay of the messages from From on.
	AskReplay
	// AskSnapshot of what the engine holds.
	AskSnapshot
)

func (v Verb) String() string {
	return [...]string{"nothing", "apply", "forget", "replace", "ask replay", "ask snapshot"}[v]
}

// Action is what is to be done next. First its state is to be said where it is
// another than before: what was told before messages were lost is less sure than
// what is told after.
type Action struct {
	Do    Verb
	State State
	Why   string // for people; empty when exact
	Batch *Batch // valid until the next call of Next
	From  uint64
	// Request is the number of what is asked, which goes with each reply: those
	// to a request that was given up may still come.
	Request uint64
}

// Stats count what a Follower has met.
type Stats struct {
	Batches      uint64        // applied, snapshots aside
	Events       uint64        // applied
	Passed       uint64        // events of unknown kinds
	Gaps         uint64        // times that messages were found missing
	Replays      uint64        // requests
	Snapshots    uint64        // applied
	NoSnapshot   uint64        // requests for a snapshot that brought none
	Resets       uint64        // restarts of the publisher
	Lost         uint64        // batches that could not be fetched, or not be read
	Duplicates   uint64        // messages that were there already
	Overflows    uint64        // messages that were not kept until a gap is closed
	Unanswered   uint64        // requests without an answer
	Lag          time.Duration // from the time of the last live batch to its arrival
	Next         uint64        // the cursor
	PendingBytes int           // kept behind a gap
}

// Cursor is how far a publisher was followed: what a warm restart needs beside
// what was applied.
type Cursor struct {
	Next      uint64
	Digest    uint64 // of the message before
	Publisher [16]byte
	Lower     bool   // it has told of other tiers than the GPU
	Taint     string // why what was told is not exact
	Healed    string // what that was before the GPU was cleared
}

// NewFollower returns a Follower that starts behind a cursor, which is nil when
// nothing is known yet.
func NewFollower(o Options, c *Cursor) *Follower {
	if o.MaxPending <= 0 {
		o.MaxPending = 10_000
	}
	if o.MaxPendingBytes <= 0 {
		o.MaxPendingBytes = 32 << 20
	}
	if o.Timeout <= 0 {
		o.Timeout = 5 * time.Second
	}
	if o.Idle <= 0 {
		o.Idle = 30 * time.Second
	}
	f := &Follower{options: o, state: Repairing, why: "its events are not connected", unsure: true}
	if c != nil {
		f.next, f.seen, f.publisher, f.lower = c.Next, c.Next, c.Publisher, c.Lower
		f.taint, f.healed = c.Taint, c.Healed
		if c.Next > 0 {
			f.digests[(c.Next-1)%digests] = digest{c.Next, c.Digest}
		}
	}
	return f
}

// Cursor is how far the publisher is followed. It goes with what was applied
// when Next has nothing more to do. ok is false when that could not be gone on
// from: it is not known by which message to know the publisher again.
func (f *Follower) Cursor() (c Cursor, ok bool) {
	c = Cursor{Next: f.next, Publisher: f.publisher, Lower: f.lower, Taint: f.taint, Healed: f.healed}
	if f.next > 0 {
		c.Digest, ok = f.digest(f.next - 1)
	}
	return c, ok
}

// AppendCursor appends a cursor as ParseCursor reads it.
func AppendCursor(dst []byte, c Cursor) []byte {
	dst = binary.BigEndian.AppendUint64(dst, c.Next)
	dst = binary.BigEndian.AppendUint64(dst, c.Digest)
	dst = append(dst, c.Publisher[:]...)
	lower := byte(0)
	if c.Lower {
		lower = 1
	}
	dst = binary.BigEndian.AppendUint32(append(dst, lower), uint32(len(c.Taint)))
	return append(append(dst, c.Taint...), c.Healed...)
}

// ParseCursor reads what AppendCursor has written.
func ParseCursor(data []byte) (Cursor, error) {
	const head = 8 + 8 + 16 + 1 + 4
	if len(data) < head || data[head-5] > 1 {
		return Cursor{}, errors.New("cursor of events: damaged")
	}
	taint := int64(binary.BigEndian.Uint32(data[head-4:]))
	if taint > int64(len(data)-head) {
		return Cursor{}, errors.New("cursor of events: damaged")
	}
	c := Cursor{
		Next: binary.BigEndian.Uint64(data), Digest: binary.BigEndian.Uint64(data[8:]), Lower: data[head-5] == 1,
		Taint: string(data[head : head+taint]), Healed: string(data[head+taint:]),
	}
	copy(c.Publisher[:], data[16:])
	if c.Next > 1<<62 {
		return Cursor{}, fmt.Errorf("cursor of events: message %d", c.Next)
	}
	return c, nil
}

// Stats are the counts until now.
func (f *Follower) Stats() Stats {
	s := f.stats
	s.Next, s.PendingBytes = f.next, f.pendingBytes
	return s
}

// Connected says that the subscription stands. From now on messages come, if
// not at once.
func (f *Follower) Connected(now time.Time) {
	f.connected, f.lastLive = true, 0
	f.asked, f.attempts, f.retryAt = request{}, 0, time.Time{}
	f.noSnapshot, f.snapshotAt = 0, time.Time{}
	f.unsure, f.settled = true, false
	f.doubt = f.next > 0
	// What was kept may be another's.
	f.unpend(len(f.pending))
	f.seen = f.next
	if f.doubt && !f.replays() && !f.options.Snapshot {
		f.doubt = false
		f.lose("the connection was broken, and without replays it is not known what was missed")
	}
}

// settle is the time after which a subscription has reached the publisher.
// Messages sent before that, and after a replay, are missed.
const settle = time.Second

// replays: there is an endpoint for them that is of use.
func (f *Follower) replays() bool { return f.options.Replay && !f.deaf }

// snapshots: there is an endpoint for them, which has not failed so often that
// it is not waited for.
func (f *Follower) snapshots() bool { return f.options.Snapshot && f.noSnapshot < maxAttempts }

// Disconnected says that the subscription is broken.
func (f *Follower) Disconnected(now time.Time) {
	f.connected = false
	f.asked = request{}
}

// Live takes a message of the subscription. Its payload is the follower's.
func (f *Follower) Live(m Message, now time.Time) {
	if m.Seq >= 1<<62 {
		return // no publisher has come so far
	}
	last := f.lastLive
	f.lastLive = max(last, m.Seq+1)
	switch {
	case m.Seq < f.next:
		if f.doubt {
			return // the replies to the request will tell
		}
		switch who := f.sender(m); {
		case who == same:
			f.stats.Duplicates++
		case who == another:
			f.restart()
			f.Live(m, now)
		case m.Seq >= last && (f.replays() || f.snapshots()):
			// They were faster than the subscription.
			f.stats.Duplicates++
		case f.replays():
			// It has begun to count anew, or this one came twice.
			f.doubt = true
		default:
			f.restart()
			f.Live(m, now)
		}
	case m.Seq == f.next && !f.doubt && len(f.ready) == 0:
		f.seen = max(f.seen, m.Seq+1)
		f.unsure = false
		f.live = true
		f.ready = append(f.ready, m)
		f.checkAt = now.Add(f.options.Idle)
	default:
		if m.Seq > f.next && f.seen <= f.next && !f.doubt {
			f.stats.Gaps++
		}
		f.seen = max(f.seen, m.Seq+1)
		f.keep(m)
	}
}

// keep keeps a message until those before it are there.
func (f *Follower) keep(m Message) {
	i, found := slices.BinarySearchFunc(f.pending, m.Seq, func(p Message, seq uint64) int {
		if p.Seq < seq {
			return -1
		} else if p.Seq > seq {
			return 1
		}
		return 0
	})
	if found {
		f.stats.Duplicates++
		return
	}
	if len(f.pending) >= f.options.MaxPending || f.pendingBytes+len(m.Payload) > f.options.MaxPendingBytes {
		f.stats.Overflows++
		return
	}
	f.pending = slices.Insert(f.pending, i, m)
	f.pendingBytes += len(m.Payload)
}

// Replayed takes a reply to a replay. Its payload is the follower's.
func (f *Follower) Replayed(id uint64, m Message, now time.Time) {
	if !f.asks(AskReplay, id) || m.Seq >= 1<<62 {
		return
	}
	f.asked.deadline = now.Add(f.options.Timeout)
	f.asked.replies++
	if m.Seq < f.next {
		switch f.sender(m) {
		case same:
			f.doubt = false
			f.stats.Duplicates++
		case another:
			// The rest is of the new publisher, but not from its beginning on.
			f.restart()
		}
		return
	}
	f.seen = max(f.seen, m.Seq+1)
	if m.Seq > f.next && f.asked.replies > 1 && !f.doubt {
		// A hole behind others: what its socket could not hold is dropped by the
		// publisher. The next request is for that.
		f.asked = request{}
		return
	}
	if m.Seq > f.next || f.doubt {
		if f.doubt {
			f.lose("it is not known whether the engine has restarted: what it sent before cannot be replayed any more")
		}
		if f.snapshots() {
			f.lose(lost(f.next, m.Seq, expired))
			f.asked = request{}
			return
		}
		f.doubt = false
		f.skip(m.Seq, expired)
	}
	f.asked.progress = true
	f.live = false
	f.ready = append(f.ready, m)
}

// ReplayEnd takes the reply behind the last one of a replay.
func (f *Follower) ReplayEnd(id uint64, now time.Time) {
	if !f.asks(AskReplay, id) {
		return
	}
	asked := f.asked
	f.asked = request{}
	f.checkAt = now.Add(f.options.Idle)
	if !f.settled {
		f.settled = true
		f.checkAt = now.Add(settle)
	}
	if asked.replies == 0 && asked.known {
		// It has never sent what was applied last.
		f.restart()
		return
	}
	if f.doubt {
		f.doubt = false
		f.lose("it is not known whether the engine has restarted: what it has sent before is not known for the same")
	}
	f.unsure = false
	if !f.gap() || f.nextIsThere() || asked.progress {
		f.attempts = 0
		return
	}
	// Messages were sent, and none of them is kept for replays.
	if f.again(now); f.attempts >= maxAttempts {
		f.deaf = true
	}
}

// asks: that is the request under way.
func (f *Follower) asks(verb Verb, id uint64) bool {
	return f.asked.verb == verb && f.asked.id == id
}

// Failed says that a request could not be made, or that its socket broke.
func (f *Follower) Failed(id uint64, now time.Time) {
	if f.asked.id != id {
		return
	}
	switch f.asked.verb {
	case AskReplay:
		if f.asked.progress {
			f.attempts = 0
		}
		f.asked = request{}
		f.stats.Unanswered++
		f.again(now)
	case AskSnapshot:
		f.asked = request{}
		f.stats.Unanswered++
		f.noSnapshotNow(now)
	}
}

// maxAttempts is how often in a row a request may bring nothing before what it
// was for is given up.
const maxAttempts = 6

// again waits before the next request, and goes on without what is missing when
// there were too many.
func (f *Follower) again(now time.Time) {
	f.attempts++
	f.retryAt = now.Add(min(100*time.Millisecond<<min(f.attempts, 20), 30*time.Second))
	if f.attempts < maxAttempts {
		return
	}
	switch {
	case f.doubt:
		f.lose("it is not known whether the engine has restarted: its replay endpoint does not answer")
	case f.unsure:
		f.lose("it is not known what was sent before the subscription: its replay endpoint does not answer")
	}
	if f.snapshots() {
		f.lose(lost(f.next, f.seen, unanswered))
		return
	}
	f.doubt, f.unsure = false, false
	f.skip(f.firstKept(), unanswered)
}

// noSnapshotNow waits before the next request for a snapshot.
func (f *Follower) noSnapshotNow(now time.Time) {
	f.noSnapshot++
	f.stats.NoSnapshot++
	f.snapshotAt = now.Add(min(time.Second<<min(f.noSnapshot, 20), time.Minute))
	f.retryAt = now
}

// Snapshotted takes the reply to a request for a snapshot, or the error with
// which it could not be read.
func (f *Follower) Snapshotted(id uint64, s Snapshot, err error, now time.Time) {
	if !f.asks(AskSnapshot, id) {
		return
	}
	f.asked = request{}
	known := f.publisher != [16]byte{}
	followed := known && f.publisher == s.Publisher || !known && !f.doubt
	if err == nil && followed && s.Seq+1 < int64(f.next) {
		err = fmt.Errorf("it is as of message %d, and %d is applied already", s.Seq, f.next-1)
	}
	for _, payload := range s.Chunks {
		if err != nil {
			break
		}
		var b Batch
		if err = f.decoder.Batch(&b, payload); err == nil && b.Publisher != [16]byte{} && b.Publisher != s.Publisher {
			err = errors.New("a part of it is of another publisher")
		}
	}
	if err != nil {
		f.noSnapshotNow(now)
		return
	}
	if !followed {
		f.restart()
	}
	f.stats.Snapshots++
	f.noSnapshot, f.attempts = 0, 0
	f.snapshotAt = now.Add(settle)
	f.replace, f.chunks = true, s.Chunks
	f.ready = f.ready[:0]
	f.next = uint64(s.Seq + 1)
	f.seen = max(f.seen, f.next)
	f.publisher = s.Publisher
	f.taint, f.healed, f.lower, f.doubt, f.unsure = "", "", false, false, false
	f.digests = [digests]digest{}
	f.retryAt = now
	f.checkAt = now.Add(f.options.Idle)
}

// Deadline is when Tick is to be called, zero when it need not be.
func (f *Follower) Deadline() time.Time {
	switch {
	case !f.connected:
		return time.Time{}
	case f.asked.verb != Nothing:
		return f.asked.deadline
	case f.wantsSnapshot() && (f.snapshots() || !f.replays()):
		return f.snapshotAt
	case !f.replays():
		return time.Time{}
	}
	next := f.retryAt
	if !f.missing() && f.checkAt.After(next) {
		next = f.checkAt
	}
	if f.wantsSnapshot() && f.snapshotAt.Before(next) {
		next = f.snapshotAt
	}
	return next
}

// Tick says that time has passed.
func (f *Follower) Tick(now time.Time) {
	if f.asked.verb != Nothing && !now.Before(f.asked.deadline) {
		f.Failed(f.asked.id, now)
	}
}

// Next is what to do next: to be called, and its answer to be done, until it is
// Nothing.
func (f *Follower) Next(now time.Time) Action {
	for {
		switch {
		case f.forget:
			f.forget = false
			return f.action(Action{Do: Forget})
		case f.replace:
			f.replace = false
			return f.action(Action{Do: Replace})
		case len(f.chunks) > 0:
			payload := f.chunks[0]
			f.chunks = f.chunks[1:]
			// It was read before, so there is no error.
			if err := f.decoder.Batch(&f.batch, payload); err == nil && f.note(&f.batch) {
				return f.action(Action{Do: Apply, Batch: &f.batch})
			}
			continue
		case len(f.ready) > 0:
			m := f.ready[0]
			f.ready[0].Payload = nil
			if f.ready = f.ready[1:]; len(f.ready) == 0 {
				f.ready = nil
			}
			if f.take(m, now) {
				return f.action(Action{Do: Apply, Batch: &f.batch})
			}
			continue
		}
		if f.drain() || f.goOn() {
			continue
		}
		a := f.ask(now)
		f.judge()
		return f.action(a)
	}
}

// action completes an action with the state.
func (f *Follower) action(a Action) Action {
	a.State, a.Why = f.state, f.why
	switch {
	case f.taint != "":
		a.State, a.Why = Approximate, f.taint
	case a.State == Approximate:
		a.State, a.Why = Repairing, "it is being mended"
	}
	return a
}

// judge sets the state when nothing is left to be applied.
func (f *Follower) judge() {
	f.state = Repairing
	switch {
	case f.taint != "":
		f.state, f.why = Approximate, f.taint
	case !f.connected:
		f.why = "its events are not connected"
	case f.doubt:
		f.why = "asking whether it is the same engine as before"
	case f.gap():
		f.why = "fetching messages that were missed"
	case f.unsure && !f.replays() && !f.snapshots():
		f.why = "waiting for its first message"
	case f.unsure:
		f.why = "fetching what it has told before"
	default:
		f.state, f.why = Exact, ""
	}
}

// gap: messages were sent that are not applied.
func (f *Follower) gap() bool { return f.seen > f.next }

// firstKept is the first message that is kept, else the one behind all that
// were sent.
func (f *Follower) firstKept() uint64 {
	if len(f.pending) > 0 {
		return f.pending[0].Seq
	}
	return f.seen
}

func (f *Follower) nextIsThere() bool { return len(f.pending) > 0 && f.pending[0].Seq == f.next }

// drain makes the pending message that is next ready, and drops those before it.
func (f *Follower) drain() bool {
	for len(f.pending) > 0 && !f.doubt && f.pending[0].Seq <= f.next {
		m := f.pending[0]
		f.unpend(1)
		if m.Seq == f.next {
			f.unsure = false
			f.live = false
			f.ready = append(f.ready, m)
			return true
		}
	}
	return false
}

func (f *Follower) unpend(n int) {
	for i := range n {
		f.pendingBytes -= len(f.pending[i].Payload)
		f.pending[i].Payload = nil
	}
	if f.pending = f.pending[n:]; len(f.pending) == 0 {
		f.pending = nil
	}
}

// take decodes the message that is next, and reports whether it is to be
// applied.
func (f *Follower) take(m Message, now time.Time) bool {
	if m.Seq != f.next {
		return false // another was faster
	}
	err := f.decoder.Batch(&f.batch, m.Payload)
	if err == nil && f.batch.Publisher != [16]byte{} {
		if f.publisher != [16]byte{} && f.batch.Publisher != f.publisher {
			f.restart()
			f.Live(m, now)
			return false
		}
		f.publisher = f.batch.Publisher
	}
	f.digests[m.Seq%digests] = digest{m.Seq + 1, xxh3.Hash(m.Payload)}
	f.next++
	if err != nil {
		f.stats.Lost++
		f.lose(fmt.Sprintf("message %d cannot be read: %v", m.Seq, err))
		return false
	}
	f.stats.Batches++
	if f.live {
		f.stats.Lag = max(0, min(time.Hour, now.Sub(time.UnixMicro(int64(max(0, min(f.batch.Time, 1e11))*1e6)))))
	}
	return f.note(&f.batch)
}

// note looks at what a batch says, and reports whether it says something.
func (f *Follower) note(b *Batch) bool {
	f.stats.Passed += uint64(b.Passed)
	f.stats.Events += uint64(len(b.Events))
	for i := range b.Events {
		switch e := &b.Events[i]; {
		case e.Kind != Cleared:
			if e.Medium != "gpu" && !f.lower {
				f.lower = true
				if f.healed != "" {
					f.lose(f.healed)
				}
			}
		case !f.lower && f.taint != "":
			f.taint, f.healed = "", f.taint
		}
	}
	return len(b.Events) > 0
}

// digest is that of a message that was applied, if it is still known.
func (f *Follower) digest(seq uint64) (sum uint64, ok bool) {
	d := f.digests[seq%digests]
	return d.sum, d.seq == seq+1
}

// sender is who may have sent a message.
type sender uint8

const (
	unknown sender = iota
	same           // the publisher that is followed
	another
)

// sender is who has sent a message of a sequence that was applied already.
func (f *Follower) sender(m Message) sender {
	if sum, ok := f.digest(m.Seq); ok {
		if sum == xxh3.Hash(m.Payload) {
			return same
		}
		return another
	}
	var b Batch
	if f.publisher == [16]byte{} || f.decoder.Batch(&b, m.Payload) != nil || b.Publisher == [16]byte{} {
		return unknown
	}
	if b.Publisher == f.publisher {
		return same
	}
	return another
}

// restart begins with a new publisher in the place of the one before.
func (f *Follower) restart() {
	f.stats.Resets++
	f.forget, f.replace, f.chunks = true, false, nil
	f.state, f.why = Repairing, "the engine has restarted"
	f.next, f.seen, f.lastLive = 0, 0, 0
	f.publisher, f.lower, f.taint, f.healed = [16]byte{}, false, "", ""
	f.doubt, f.unsure = false, true
	f.digests = [digests]digest{}
	f.ready = nil
	f.unpend(len(f.pending))
	f.asked, f.attempts, f.retryAt = request{}, 0, time.Time{}
	f.noSnapshot, f.snapshotAt = 0, time.Time{}
}

// Why messages are lost.
const (
	expired    = "cannot be replayed any more"
	unanswered = "did not come with a replay"
	noReplay   = "cannot be fetched, as there is no replay endpoint"
)

func lost(from, to uint64, why string) string {
	if to == from+1 {
		return fmt.Sprintf("message %d %s", from, why)
	}
	return fmt.Sprintf("messages %d to %d %s", from, to-1, why)
}

// skip goes on at a message when those before it cannot be had.
func (f *Follower) skip(to uint64, why string) {
	if to <= f.next {
		return
	}
	f.stats.Lost += to - f.next
	f.lose(lost(f.next, to, why))
	f.next = to
}

// lose says that what was told is not exact from now on. The first reason
// stays until all is well.
func (f *Follower) lose(why string) {
	if f.taint == "" {
		f.taint = why
	}
}

// goOn goes on behind a gap that nothing can close, and reports whether it has.
func (f *Follower) goOn() bool {
	if f.replays() || f.snapshots() || f.asked.verb != Nothing || !f.connected {
		return false
	}
	if f.doubt {
		f.doubt = false
		f.lose("it is not known whether the engine has restarted")
		return true
	}
	if !f.gap() {
		return false
	}
	f.skip(f.firstKept(), noReplay)
	return true
}

// missing: messages are missing, or may be.
func (f *Follower) missing() bool { return f.gap() || f.doubt || f.unsure }

// wantsSnapshot: it would make things well, and nothing else may.
func (f *Follower) wantsSnapshot() bool {
	return f.options.Snapshot && (f.taint != "" || f.missing() && !f.replays())
}

// ask decides on the next request.
func (f *Follower) ask(now time.Time) Action {
	if !f.connected || f.asked.verb != Nothing {
		return Action{}
	}
	if f.wantsSnapshot() && now.Before(f.snapshotAt) && f.snapshots() {
		return Action{}
	}
	if f.wantsSnapshot() && !now.Before(f.snapshotAt) {
		f.requests++
		f.asked = request{verb: AskSnapshot, id: f.requests, deadline: now.Add(4 * f.options.Timeout)}
		return Action{Do: AskSnapshot, Request: f.requests}
	}
	if !f.replays() || now.Before(f.retryAt) || !f.missing() && now.Before(f.checkAt) {
		return Action{}
	}
	f.requests++
	f.asked = request{verb: AskReplay, id: f.requests, from: f.next, deadline: now.Add(f.options.Timeout)}
	if f.next > 0 && (f.doubt || !f.gap()) {
		// What was applied last shows whether it is the same publisher.
		f.asked.from--
		_, f.asked.known = f.digest(f.asked.from)
	}
	f.stats.Replays++
	return Action{Do: AskReplay, From: f.asked.from, Request: f.requests}
}
