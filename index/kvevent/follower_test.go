package kvevent

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// story is a Follower in a datadriven test: what it wants is written down, and
// what it applies is kept.
type story struct {
	f   *Follower
	now time.Time
	out strings.Builder
	all map[string]bool // blocks that are applied
	was string          // the state that was written last
}

// TestFollowerStories: each file tells of one engine and what happens to its
// messages. The commands:
//
//	new [replay] [snapshot] [pending=N] [cursor]  a follower, perhaps from the cursor of the one before
//	connect, disconnect
//	live SEQ EVENT...     a message of the subscription
//	replay SEQ EVENT...   a reply to a replay, and "end" the one behind the last
//	snapshot SEQ EVENT... | none
//	fail                  the request under way fails
//	wait DURATION         time passes, with a tick at each deadline
//	stats
//
// An event is +block, +block@medium, -block or clear; with "by=X" in front of them
// the message has a publisher's id; "run=N" sets apart messages of the same
// sequence that are not the same.
func TestFollowerStories(t *testing.T) {
	datadriven.Walk(t, "testdata/follower", func(t *testing.T, path string) {
		s := &story{now: time.Unix(1700000000, 0)}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			s.out.Reset()
			s.command(t, d)
			return s.out.String()
		})
	})
}

func (s *story) command(t *testing.T, d *datadriven.TestData) {
	switch d.Cmd {
	case "new":
		o := Options{Replay: d.HasArg("replay"), Snapshot: d.HasArg("snapshot")}
		d.MaybeScanArgs(t, "pending", &o.MaxPending)
		var from *Cursor
		if d.HasArg("cursor") {
			c, ok := s.f.Cursor()
			if !ok {
				t.Fatal("no cursor")
			}
			c, err := ParseCursor(AppendCursor(nil, c))
			if err != nil {
				t.Fatal(err)
			}
			from = &c
		} else {
			s.all = map[string]bool{}
		}
		s.f, s.was = NewFollower(o, from), ""
	case "connect":
		s.f.Connected(s.now)
	case "disconnect":
		s.f.Disconnected(s.now)
	case "live", "replay", "snapshot":
		s.message(t, d)
	case "end":
		s.f.ReplayEnd(s.f.asked.id, s.now)
	case "fail":
		s.f.Failed(s.f.asked.id, s.now)
	case "wait":
		d, err := time.ParseDuration(d.CmdArgs[0].Key)
		if err != nil {
			t.Fatal(err)
		}
		end := s.now.Add(d)
		for {
			next := s.f.Deadline()
			if next.IsZero() || next.After(end) {
				break
			}
			s.now = next
			s.f.Tick(s.now)
			if s.run(); s.f.Deadline().Equal(next) {
				t.Fatalf("nothing is done at the deadline: %+v", s.f)
			}
		}
		s.now = end
		s.f.Tick(s.now)
	case "stats":
		st := s.f.Stats()
		fmt.Fprintf(&s.out, "batches %d, gaps %d, replays %d, snapshots %d, resets %d, lost %d, duplicates %d, overflows %d, unanswered %d, lag %v\n",
			st.Batches, st.Gaps, st.Replays, st.Snapshots, st.Resets, st.Lost, st.Duplicates, st.Overflows, st.Unanswered, st.Lag)
		return
	default:
		t.Fatalf("no command %q", d.Cmd)
	}
	s.run()
	fmt.Fprintf(&s.out, "next %d, holds %v\n", s.f.next, slices.Sorted(maps.Keys(s.all)))
}

func (s *story) message(t *testing.T, d *datadriven.TestData) {
	if d.CmdArgs[0].Key == "none" {
		s.f.Snapshotted(s.f.asked.id, Snapshot{}, ErrNoSnapshot, s.now)
		return
	}
	seq := 0
	if _, err := fmt.Sscan(d.CmdArgs[0].Key, &seq); err != nil {
		t.Fatal(err)
	}
	b := Batch{Time: float64(s.now.UnixNano())/1e9 - 0.25, Rank: -1}
	if d.Cmd != "live" {
		b.Time = 1.6e9 // the same for each message
	}
	var payload []byte
	for _, arg := range d.CmdArgs[1:] {
		switch name := arg.Key; {
		case name == "by":
			b.Publisher[0] = arg.Vals[0][0]
		case name == "run":
			b.Time += float64(len(arg.Vals[0]))
		case name == "garbage":
			payload = []byte("garbage")
		case name == "clear":
			b.Events = append(b.Events, Event{Kind: Cleared})
		default:
			name, tier, ok := strings.Cut(name, "@")
			e := Event{Kind: Stored, Hashes: []uint64{uint64(name[1])}, Medium: tier, AdapterID: -1, Group: -1}
			if !ok {
				e.Medium = "gpu"
			}
			if name[0] == '-' {
				e.Kind = Removed
			}
			b.Events = append(b.Events, e)
		}
	}
	if d.Cmd != "snapshot" {
		b.Time = 1.7e9 - 0.25
		for _, arg := range d.CmdArgs[1:] {
			if arg.Key == "run" {
				b.Time += float64(arg.Vals[0][0])
			}
		}
	}
	if payload == nil {
		payload = AppendBatch(nil, VLLM, 0, &b)
	}
	m := Message{Seq: uint64(seq), Payload: payload}
	switch d.Cmd {
	case "live":
		s.f.Live(m, s.now)
	case "replay":
		s.f.Replayed(s.f.asked.id, m, s.now)
	case "snapshot":
		s.f.Snapshotted(s.f.asked.id, Snapshot{Seq: int64(seq), Publisher: b.Publisher, Chunks: [][]byte{payload}}, nil, s.now)
	}
}

// run does what the follower wants.
func (s *story) run() {
	for {
		a := s.f.Next(s.now)
		if state := fmt.Sprint(a.State, ": ", a.Why); state != s.was {
			s.was = state
			fmt.Fprintln(&s.out, strings.TrimSuffix(state, ": "))
		}
		switch a.Do {
		case Nothing:
			return
		case Apply:
			apply(s.all, a.Batch.Events)
			fmt.Fprintf(&s.out, "apply %d\n", len(a.Batch.Events))
		case Forget, Replace:
			clear(s.all)
			fmt.Fprintln(&s.out, a.Do)
		case AskReplay:
			fmt.Fprintf(&s.out, "%v from %d\n", a.Do, a.From)
		case AskSnapshot:
			fmt.Fprintln(&s.out, a.Do)
		}
	}
}

// apply keeps what blocks there are.
func apply(all map[string]bool, events []Event) {
	for _, e := range events {
		switch e.Kind {
		case Cleared:
			maps.DeleteFunc(all, func(name string, _ bool) bool { return strings.HasSuffix(name, "@gpu") })
		case Stored:
			for _, h := range e.Hashes {
				all[fmt.Sprintf("%c@%s", rune(h), e.Medium)] = true
			}
		case Removed:
			for _, h := range e.Hashes {
				delete(all, fmt.Sprintf("%c@%s", rune(h), e.Medium))
			}
		}
	}
}

// engine is a publisher with all that it has ever held.
type engine struct {
	r        *rand.Rand
	run      int
	messages []Message
	held     []map[string]bool // before each message, and after the last
	keeps    int               // messages for replays
	id       [16]byte
	lower    bool
}

func newEngine(r *rand.Rand, run, keeps int, snapshots, lower bool) *engine {
	e := &engine{r: r, run: run, keeps: keeps, held: []map[string]bool{{}}, lower: lower}
	if snapshots {
		e.id = [16]byte{1, byte(run), byte(run >> 8)}
	}
	return e
}

// step sends one message.
func (e *engine) step() Message {
	held := maps.Clone(e.held[len(e.held)-1])
	b := Batch{Time: 1e9 + float64(e.run)*1e5 + float64(len(e.messages)), Rank: 0, Publisher: e.id}
	for range e.r.IntN(4) {
		ev := Event{Kind: Stored, Hashes: []uint64{uint64('a' + e.r.IntN(20))}, Medium: "gpu", AdapterID: -1, Group: -1}
		if e.lower && e.r.IntN(3) == 0 {
			ev.Medium = "cpu"
		}
		switch e.r.IntN(12) {
		case 0, 1, 2, 3:
			ev.Kind = Removed
		case 4:
			ev = Event{Kind: Cleared}
		}
		b.Events = append(b.Events, ev)
	}
	apply(held, b.Events)
	m := Message{Seq: uint64(len(e.messages)), Payload: AppendBatch(nil, VLLM, 0, &b)}
	e.messages = append(e.messages, m)
	e.held = append(e.held, held)
	return m
}

// kept are the messages for replays, from a sequence on.
func (e *engine) kept(from uint64) []Message {
	return e.messages[min(max(int(min(from, 1<<30)), len(e.messages)-e.keeps, 0), len(e.messages)):]
}

func (e *engine) snapshot() Snapshot {
	b := Batch{Rank: 0}
	for name := range e.held[len(e.messages)] {
		b.Events = append(b.Events, Event{Kind: Stored, Hashes: []uint64{uint64(name[0])}, Medium: name[2:], AdapterID: -1, Group: -1})
	}
	return Snapshot{Seq: int64(len(e.messages)) - 1, Publisher: e.id, Chunks: [][]byte{AppendBatch(nil, VLLM, 0, &b)}}
}

// TestFollowerTellsTheTruth: whatever is lost, doubled, late or restarted, when
// the follower says exact, what was applied is what the engine held as of the
// last message that was applied. And when the network is well again, it follows
// to the last message; where nothing was lost for good, exactly.
func TestFollowerTellsTheTruth(t *testing.T) {
	exact, approximate, forgets, snapshots := 0, 0, 0, 0
	for seed := range uint64(250) {
		h := newHistory(t, seed)
		for range 300 {
			h.step()
		}
		h.calm()
		exact += h.exact
		approximate += h.approximate
		forgets += h.forgets
		snapshots += int(h.f.stats.Snapshots)
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
	if exact < 1000 || approximate < 1000 || forgets < 50 || snapshots < 50 {
		t.Errorf("exact %d, approximate %d, forgets %d, snapshots %d times: the histories are too tame", exact, approximate, forgets, snapshots)
	}
}

// history is one random life of an engine and its follower.
type history struct {
	t                           *testing.T
	r                           *rand.Rand
	f                           *Follower
	e                           *engine
	o                           Options
	now                         time.Time
	loss                        float64
	keeps                       int
	restarts, lower             bool
	connected                   bool
	wire                        []Message // of the subscription
	replies                     []func()  // to requests, in order
	all                         map[string]bool
	of                          *engine // whose messages were applied last
	gone                        []*engine
	exact, approximate, forgets int
}

func newHistory(t *testing.T, seed uint64) *history {
	r := rand.New(rand.NewPCG(seed, 11))
	h := &history{t: t, r: r, now: time.Unix(1700000000, 0), all: map[string]bool{}}
	h.o = Options{Replay: r.IntN(5) > 0, Snapshot: r.IntN(3) == 0, MaxPending: 1 + r.IntN(40)}
	h.loss = []float64{0, 0.05, 0.3}[r.IntN(3)]
	h.keeps = []int{3, 30, 1 << 20}[r.IntN(3)]
	h.restarts, h.lower = r.IntN(2) == 0, r.IntN(3) == 0
	h.e = newEngine(r, 0, h.keeps, h.o.Snapshot, h.lower)
	for range r.IntN(50) {
		h.e.step()
	}
	h.of = h.e
	h.f = NewFollower(h.o, nil)
	return h
}

func (h *history) step() {
	r := h.r
	h.now = h.now.Add(time.Duration(r.IntN(300)) * time.Millisecond)
	switch n := r.IntN(100); {
	case n < 40:
		m := h.e.step()
		for range 1 + r.IntN(20)/19 {
			if h.connected && r.Float64() >= h.loss {
				h.wire = append(h.wire, m)
			}
		}
	case n < 70 && len(h.wire) > 0:
		m := h.wire[0]
		h.wire = h.wire[1:]
		h.f.Live(m, h.now)
	case n < 90 && len(h.replies) > 0:
		reply := h.replies[0]
		h.replies = h.replies[1:]
		reply()
	case n < 92:
		h.connect()
	case n < 93 && h.connected:
		h.disconnect()
	case n < 94 && h.restarts:
		h.disconnect()
		h.gone = append(h.gone, h.e)
		h.e = newEngine(r, len(h.gone), h.keeps, h.o.Snapshot, h.lower)
		for range r.IntN(60) {
			h.e.step()
		}
	case n < 95 && h.connected && len(h.wire) == 0 && len(h.replies) == 0:
		// The one who follows restarts.
		if c, ok := h.f.Cursor(); ok && len(h.f.chunks) == 0 {
			h.f = NewFollower(h.o, &c)
			h.f.Connected(h.now)
		}
	default:
		h.now = h.now.Add(time.Duration(r.IntN(3000)) * time.Millisecond)
	}
	h.run()
}

func (h *history) connect() {
	if !h.connected {
		h.connected = true
		h.wire, h.replies = nil, nil
		h.f.Connected(h.now)
	}
}

func (h *history) disconnect() {
	h.connected = false
	h.f.Disconnected(h.now)
	h.wire, h.replies = nil, nil
}

func (h *history) run() {
	h.f.Tick(h.now)
	for {
		a := h.f.Next(h.now)
		if (a.Why == "") != (a.State == Exact) {
			h.t.Errorf("%v because of %q", a.State, a.Why)
		}
		switch a.Do {
		case Nothing:
			if time := h.f.batch.Time; time > 0 && h.f.next > 0 { // not of a snapshot
				h.of = append(slices.Clone(h.gone), h.e)[int(time-1e9)/1e5]
			}
			if a.State == Exact {
				h.exact++
				h.check(a)
			} else if a.State == Approximate {
				h.approximate++
				if h.keeps > 1<<10 && h.o.Replay && h.f.Stats().Unanswered < maxAttempts {
					h.t.Errorf("approximate with all replays to be had: %s", a.Why)
				}
			}
			if d := h.f.Deadline(); !d.IsZero() && !d.After(h.now) {
				h.t.Errorf("the deadline is over and nothing is done: %v, %v", a.State, a.Why)
			}
			return
		case Apply:
			apply(h.all, a.Batch.Events)
		case Forget:
			h.forgets++
			clear(h.all)
			h.of = h.e
			if h.keeps > 1<<10 && len(h.gone) == 0 {
				h.t.Error("forgotten without a restart")
			}
		case Replace:
			clear(h.all)
			h.of = h.e
		case AskReplay:
			h.replay(a.From, a.Request)
		case AskSnapshot:
			h.replies = append(h.replies, func() {
				if h.r.IntN(3) == 0 {
					h.f.Snapshotted(a.Request, Snapshot{}, ErrNoSnapshot, h.now)
				} else {
					h.f.Snapshotted(a.Request, h.e.snapshot(), nil, h.now)
				}
			})
		}
	}
}

// replay answers as the engine of the time when the request arrives.
func (h *history) replay(from, request uint64) {
	if h.loss > 0 && h.r.IntN(5) == 0 {
		return
	}
	h.replies = append(h.replies, func() {
		var answers []func()
		for _, m := range h.e.kept(from) {
			if len(answers) > 0 && h.r.Float64() < h.loss/10 {
				continue // the publisher's socket was full
			}
			answers = append(answers, func() { h.f.Replayed(request, m, h.now) })
		}
		answers = append(answers, func() { h.f.ReplayEnd(request, h.now) })
		if h.loss > 0 && h.r.IntN(8) == 0 {
			answers = append(answers[:h.r.IntN(len(answers))], func() { h.f.Failed(request, h.now) })
		}
		h.replies = append(answers, h.replies...)
	})
}

func (h *history) check(a Action) {
	h.t.Helper()
	next := int(h.f.next)
	if next >= len(h.of.held) {
		h.t.Fatalf("exact as of message %d of run %d, which has only %d", next, h.of.run, len(h.of.held)-1)
	}
	held := maps.Clone(h.of.held[next])
	if !h.f.lower {
		// It has not told of other tiers since some messages were lost.
		maps.DeleteFunc(held, func(name string, _ bool) bool { return !strings.HasSuffix(name, "@gpu") })
	}
	if !maps.Equal(held, h.all) {
		h.t.Errorf("%v as of message %d of run %d: %v, and it held %v", a.State, next, h.of.run, h.all, held)
	}
}

// calm lets the network be well until all is done.
func (h *history) calm() {
	h.loss = 0
	h.connect()
	for i := range 1600 {
		if i == 800 {
			h.wire = append(h.wire, h.e.step())
		}
		switch {
		case len(h.replies) > 0:
			reply := h.replies[0]
			h.replies = h.replies[1:]
			reply()
		case len(h.wire) > 0:
			h.f.Live(h.wire[0], h.now)
			h.wire = h.wire[1:]
		default:
			h.now = h.now.Add(250 * time.Millisecond)
		}
		h.run()
		if h.t.Failed() {
			return
		}
	}
	if int(h.f.next) != len(h.e.messages) {
		h.t.Errorf("%d of %d messages are applied: %+v", h.f.next, len(h.e.messages), h.f)
	}
	if h.f.state == Repairing {
		h.t.Errorf("repairing without an end: %s", h.f.why)
	}
	if h.f.state == Exact && h.of != h.e {
		h.t.Errorf("exact as of run %d, and this is %d", h.of.run, h.e.run)
	}
}
