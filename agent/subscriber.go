package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/index/kvevent"
)

// subscriber follows the KV events of one member's engine, and tells the index
// what they say. It finds where they are published, connects, and connects anew
// when it must, on one goroutine (fleet.followEvents) from when the member is
// made until it is released. Its other methods may be called from any goroutine.
type subscriber struct {
	slot   int
	index  *index.Index
	states *slotStates
	log    *slog.Logger  // names the replica
	poked  chan struct{} // asks to look anew at what is to be followed; holds one
	counts eventCounts

	// What follows belongs to the goroutine.

	follower  *kvevent.Follower // nil while nothing is followed
	options   kvevent.Options   // of follower
	learned   bool              // the fleet was told how many tokens a block has
	round     int               // that follower was made in
	past      kvevent.Stats     // of followers before
	heard     bool              // the connection has brought a message
	restarts  int               // of the publisher, one soon after the other
	restarted time.Time         // when the last was seen
	late      int               // replays in a row that brought messages which it should have
	told      eventStanding     // as the log has it; since is when that was written

	mu     sync.Mutex // guards what follows, and is held while the index is told
	closed bool       // the slot is the member's no more
	// rounds is how often what the index knew of the slot was forgotten behind
	// the follower's back. What a follower of another round tells is void.
	rounds int
	is     eventStanding
	cut    context.CancelFunc // ends the connections; nil without any
	// cursor is how far what the index was told goes, if whole is set: in between
	// it has been told more, and there may be nothing to go on from.
	cursor kvevent.Cursor
	whole  bool
	resume *kvevent.Cursor // to begin behind
}

// eventCounts are the events that were taken in, by kind, and messages that are
// none.
type eventCounts struct {
	stored, removed, cleared, malformed atomic.Uint64
}

// eventStanding is how a slot's events are followed, for people.
type eventStanding struct {
	state index.State
	why   string
	since time.Time // when state became what it is
	// from is where they are published, as far as that is known.
	from      publisher
	nowhere   bool // they are not, as far as that is known
	connected bool
	trouble   string // why the last request for what is missing has failed; "" when it has not
	stats     kvevent.Stats
}

func newSubscriber(slot int, id string, x *index.Index, states *slotStates, log *slog.Logger) *subscriber {
	return &subscriber{
		slot: slot, index: x, states: states, log: log.With("replica", id), poked: make(chan struct{}, 1),
		is: eventStanding{state: index.Approximate, since: time.Now()},
	}
}

// poke asks to look anew at what is to be followed. It never blocks.
func (s *subscriber) poke() {
	select {
	case s.poked <- struct{}{}:
	default:
	}
}

// wasPoked tells whether it was since this was asked last.
func (s *subscriber) wasPoked() bool {
	select {
	case <-s.poked:
		return true
	default:
		return false
	}
}

// anew changes what the index knows of the slot, behind the follower's back:
// what was told before is void. It is told anew, but for what was told before a
// cursor that change returns.
func (s *subscriber) anew(change func() *kvevent.Cursor) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rounds++
	s.whole = false
	s.resume = change()
	if s.cut != nil {
		s.cut()
	}
	s.poke()
}

// save has what the index knows of the slot saved while it is told nothing, and
// returns the cursor that belongs to it, nil when it cannot be gone on from.
func (s *subscriber) save(what func()) *kvevent.Cursor {
	const tries = 50
	for try := range tries {
		s.mu.Lock()
		if s.whole || try == tries-1 {
			defer s.mu.Unlock()
			break
		}
		s.mu.Unlock()
		time.Sleep(time.Millisecond)
	}
	what()
	if !s.whole {
		return nil
	}
	c := s.cursor
	return &c
}

// close is called before the slot is given back: from then on the index hears
// nothing more of it.
func (s *subscriber) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
}

// standing returns how the events are followed now.
func (s *subscriber) standing() eventStanding {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.is
}

// tell lets the index hear of the slot, unless what is told is void.
func (s *subscriber) tell(what func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed && s.round == s.rounds {
		s.whole = false
		what()
	}
}

// set says how well the slot is known from now on, and why.
func (s *subscriber) set(state index.State, why string) {
	s.mu.Lock()
	if was := s.is.state; !s.closed && (was != state || s.is.why != why) {
		if was != state {
			s.is.since = time.Now()
		}
		s.is.state, s.is.why = state, why
		s.states.follow(s.slot, state, why)
	}
	is := s.is
	s.mu.Unlock()
	s.announce(&is, time.Now())
}

// Repairs mostly take a moment, and are in the metrics: one that does not is
// written to the log, sooner when something has failed. Further reasons for one
// state come tellAgain apart, and nothing comes before tellOften.
const moment, tellOften, tellAgain = 2 * time.Second, time.Second, time.Minute

// announce writes to the log how well the events are followed, when that has
// changed.
func (s *subscriber) announce(is *eventStanding, now time.Time) {
	was, wait := &s.told, moment
	if is.connected && is.trouble == "" {
		wait = unwell
	}
	brief := is.state == index.Repairing && now.Sub(is.since) < wait
	switch {
	case is.state == was.state && is.why == was.why && (is.trouble == "") == (was.trouble == ""):
		return
	case now.Sub(was.since) < tellOften:
		return // who flaps does not fill the log
	case is.state == index.Exact && is.trouble != "":
		s.log.Warn("KV events that go missing cannot be fetched; none is missing now", "why", is.trouble)
	case is.state == index.Exact && was.state == index.Exact:
	case is.state == index.Exact:
		s.log.Info("what the engine's cache holds is known exactly, by its KV events", "publisher", is.from.events.String())
	case is.nowhere && was.state != index.Exact:
		// That is how most engines are.
	case was.state == index.Exact:
		if brief {
			return
		}
		s.log.Warn("what the engine's cache holds is not known exactly any more", "state", indexStates[is.state], "why", is.why)
	case brief || now.Sub(was.since) < tellAgain:
		return
	default:
		s.log.Warn("the engine's KV events are not followed exactly; trying on", "state", indexStates[is.state], "why", is.why)
	}
	s.told = eventStanding{state: is.state, why: is.why, trouble: is.trouble, since: now}
}

// statsOf adds what is counted over all followers; of the rest the last holds.
func statsOf(past, last kvevent.Stats) kvevent.Stats {
	last.Batches += past.Batches
	last.Events += past.Events
	last.Passed += past.Passed
	last.Gaps += past.Gaps
	last.Replays += past.Replays
	last.Snapshots += past.Snapshots
	last.Resets += past.Resets
	last.Lost += past.Lost
	last.Duplicates += past.Duplicates
	last.Overflows += past.Overflows
	last.Unanswered += past.Unanswered
	return last
}

// eventsWanted is what a member's events are followed by. Another one ends the
// connections.
type eventsWanted struct {
	config KVEventsConfig
	engine string
	rank   int
	key    string
	// adapters: it serves LoRA adapters.
	adapters bool
}

// eventsTarget is what there is to follow of a member, now.
type eventsTarget struct {
	eventsWanted
	returns int
	// ready: the index knows the slot, and the engine answers.
	ready bool
}

func (f *fleet) eventsTarget(m *member) eventsTarget {
	f.mu.Lock()
	defer f.mu.Unlock()
	up := m.vitals.standing == up || m.vitals.standing == ejected
	return eventsTarget{
		eventsWanted{m.cfg.KVEvents, m.engine(), m.dataParallelRank(), m.key,
			slices.ContainsFunc(m.models, func(c card) bool { return c.Parent != "" })},
		m.returns,
		up && m.gone.IsZero() && m.cache.joined,
	}
}

// dataParallelRank is the rank whose events are the member's: the first of an
// engine that is one member. The fleet's mutex is held.
func (m *member) dataParallelRank() int { return max(m.rank, 0) }

// How long it takes until a connection that failed is tried again: from the
// first to the last, doubling. One that has worked begins anew.
const firstRetry, lastRetry = 100 * time.Millisecond, 10 * time.Second

// askAgain is how long an engine is taken at its word that publishes no events,
// or does not say where, when it does not return from being down before.
const askAgain = 5 * time.Minute

// followEvents is the goroutine of a member's subscriber. ctx ends when the
// member is released.
func (f *fleet) followEvents(ctx context.Context, m *member) {
	s := m.subscriber
	host, _, err := net.SplitHostPort(m.replica.Addr)
	if err != nil {
		host = m.replica.Addr
	}
	var finished eventsTarget // for which there is nothing to follow
	var asked time.Time
	pause := firstRetry
	for ctx.Err() == nil {
		t := f.eventsTarget(m)
		if !t.ready || t == finished && time.Since(asked) < askAgain {
			s.wait(ctx, askAgain)
			continue
		}
		finished = eventsTarget{}
		p, err := f.publisherOf(ctx, m, t, host)
		if none := errNoPublisher(""); errors.As(err, &none) {
			s.drop(none.Error())
			finished, asked = t, time.Now()
			continue
		}
		if err == nil {
			var worked bool
			if worked, err = f.followOnce(ctx, m, t, p); worked {
				pause = firstRetry
			}
		}
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			// Something else is to be followed. Whoever has brought that about
			// cannot do so all the time, be it the engine itself.
			sleep(ctx, firstRetry)
			continue
		}
		s.fail(p, err)
		s.wait(ctx, pause/2+rand.N(pause))
		pause = min(2*pause, lastRetry)
	}
}

// sleep waits for a while, whoever pokes.
func sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// wait waits for a while, or until it is to look anew.
func (s *subscriber) wait(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-s.poked:
	case <-timer.C:
	}
}

// drop ends the following: there is nobody to follow. What was told by now is
// kept as a guess.
func (s *subscriber) drop(why string) {
	s.begin(nil)
	s.mu.Lock()
	s.is.from, s.is.nowhere = publisher{}, true
	s.mu.Unlock()
	s.set(index.Approximate, why)
}

// fail tells that a publisher cannot be found or reached.
func (s *subscriber) fail(p publisher, err error) {
	s.mu.Lock()
	s.is.nowhere = false
	if !p.events.isZero() {
		s.is.from = p
	}
	known := s.follower != nil && s.round == s.rounds && s.is.stats.Next > 0
	s.mu.Unlock()
	if known {
		s.set(index.Repairing, err.Error()) // it is gone on from when it is back
	} else {
		s.set(index.Approximate, err.Error())
	}
}

// publisherOf finds where a member's events are published: configuration says
// so, or the engine does, which is asked each time since it may have been
// started anew.
func (f *fleet) publisherOf(ctx context.Context, m *member, t eventsTarget, host string) (publisher, error) {
	switch {
	case t.config.Mode == kvEventsOff:
		return publisher{}, errNoPublisher("kv_events is off in the configuration")
	case t.engine == "sglang" && t.adapters:
		// It gives a prompt's blocks the same names whoever computes them.
		return publisher{}, errNoPublisher("SGLang's KV events do not tell which LoRA adapter has computed a block, and this one serves adapters")
	case t.config.Endpoint != "":
		p, err := t.config.configured(host, t.rank)
		if err != nil {
			return publisher{}, errNoPublisher("kv_events: " + err.Error())
		}
		return p, nil
	}
	get := func(ctx context.Context, page string) (*http.Response, error) { return f.get(ctx, m, t.key, page) }
	p, err := findPublisher(ctx, get, t.engine, host, t.rank)
	f.learnRanks(m, p.ranks)
	if err != nil && !errors.As(err, new(errNoPublisher)) {
		err = fmt.Errorf("cannot ask the engine where it publishes KV events: %w", err)
	}
	return p, err
}

// begin makes a follower for what is published with such options: none, the one
// that there is, one that goes on where that was, or a new one.
func (s *subscriber) begin(o *kvevent.Options) {
	s.mu.Lock()
	defer s.mu.Unlock()
	stale := s.round != s.rounds
	if s.follower != nil && !stale && o != nil && s.options == *o {
		return
	}
	var cursor *kvevent.Cursor
	if s.follower != nil {
		if c, ok := s.follower.Cursor(); ok && !stale && o != nil {
			cursor = &c
		}
		s.past = statsOf(s.past, s.follower.Stats())
		s.follower = nil
	} else {
		cursor = s.resume
	}
	s.round, s.resume, s.whole, s.learned = s.rounds, nil, false, false
	if o == nil {
		return
	}
	s.options, s.follower = *o, kvevent.NewFollower(*o, cursor)
	if cursor == nil && !s.closed {
		s.index.Untell(s.slot)
	}
}

// eventsIdle is how long nothing may come before it is asked whether something
// was missed: the last of what is published may be lost like any other.
const eventsIdle = 10 * time.Second

// lookAround is how often it is looked whether something else is to be followed.
const lookAround = time.Second

// maxPendingBytes bounds what is kept of one publisher behind a gap. What does
// not fit is fetched again, and there are hundreds of publishers.
const maxPendingBytes = 4 << 20

// manyBad is how many messages in a row that are none end a connection.
const manyBad = 100

// errOther ends a replay because something else is wanted.
var errOther = errors.New("something else is wanted")

// followOnce follows a publisher by one set of connections, until they fail or,
// without an error, until something else is to be followed. worked tells that
// the publisher has answered.
func (f *fleet) followOnce(ctx context.Context, m *member, t eventsTarget, p publisher) (worked bool, err error) {
	s := m.subscriber
	s.begin(&kvevent.Options{Replay: !p.replay.isZero(), Snapshot: !p.snapshot.isZero(), Idle: f.eventsIdle, MaxPendingBytes: maxPendingBytes})
	ctx, cut := context.WithCancel(ctx)
	defer cut()
	s.mu.Lock()
	stale := s.round != s.rounds
	s.cut, s.is.from, s.is.nowhere = cut, p, false
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		if s.round != s.rounds {
			err = nil // to be told anew is no failure
		}
		s.cut, s.is.connected = nil, false
		s.mu.Unlock()
	}()
	if stale {
		return false, nil
	}

	in, err := openFeed(ctx, p)
	if err != nil {
		return false, err
	}
	defer in.close()
	s.mu.Lock()
	s.is.connected = true
	s.mu.Unlock()
	s.heard, s.late = false, 0
	s.follower.Connected(time.Now())
	defer func() { s.follower.Disconnected(time.Now()) }()
	learn := func(tokens int) { f.learnBlock(m, tokens) }
	bad, looked := 0, time.Now()
	for {
		if err := s.act(in, learn); err != nil {
			return !errors.Is(err, errRestless), err
		}
		// Not for each message: the fleet's mutex is everybody's.
		if now := time.Now(); now.Sub(looked) >= lookAround || s.wasPoked() {
			if looked = now; f.eventsTarget(m).eventsWanted != t.eventsWanted {
				return true, nil
			}
		}
		message, err := in.next(s.patience())
		now := time.Now()
		switch {
		case err == nil:
			bad, s.heard, s.late = 0, true, 0
			message.Payload = bytes.Clone(message.Payload)
			s.follower.Live(message, now)
		case errors.Is(err, errQuiet):
			s.follower.Tick(now)
		case errors.As(err, new(errMalformed)):
			s.counts.malformed.Add(1)
			if bad++; bad == manyBad {
				return true, fmt.Errorf("%s: %d messages in a row are none: %w", p.events, bad, err)
			}
		default:
			return true, err
		}
	}
}

// patience is how long there is nothing to do but to wait for messages.
func (s *subscriber) patience() time.Duration {
	at := s.follower.Deadline()
	if at.IsZero() {
		return lookAround
	}
	return max(time.Millisecond, min(lookAround, time.Until(at)))
}

// act does what the follower wants, until that is nothing.
func (s *subscriber) act(in *feed, learn func(tokens int)) error {
	began := time.Now()
	a := s.carryOut(learn)
	for {
		switch {
		case s.restarts > mostRestarts:
			s.restarts = 0
			return errRestless
		case time.Since(began) > replayTime:
			return errors.New("what it sends anew has no end")
		}
		switch a.Do {
		case kvevent.AskReplay:
			var other *kvevent.Action
			asked, applied := a.Request, s.follower.Stats().Batches
			err := in.replay(a.From, func(m kvevent.Message) error {
				m.Payload = bytes.Clone(m.Payload)
				s.follower.Replayed(asked, m, time.Now())
				if a := s.carryOut(learn); a.Do != kvevent.Nothing {
					other = &a
					return errOther
				}
				return nil
			})
			if other != nil {
				a = *other
				continue
			}
			if err == nil {
				s.troubled("")
				s.follower.ReplayEnd(asked, time.Now())
				if !s.heard && time.Since(in.opened) > s.options.Idle && s.follower.Stats().Batches > applied {
					s.late++
				}
			} else if err := s.failed(in, asked, err); err != nil {
				return err
			}
		case kvevent.AskSnapshot:
			snapshot, err := in.snapshot()
			if err != nil && !errors.Is(err, kvevent.ErrNoSnapshot) {
				if err := s.failed(in, a.Request, err); err != nil {
					return err
				}
				break
			}
			s.troubled("")
			s.follower.Snapshotted(a.Request, snapshot, err, time.Now())
		default:
			return nil
		}
		a = s.carryOut(learn)
	}
}

// failed notes a request that failed. It returns an error when the connections
// are at their end.
func (s *subscriber) failed(in *feed, request uint64, err error) error {
	if in.ctx.Err() != nil {
		return in.ctx.Err()
	}
	s.troubled(err.Error())
	s.follower.Failed(request, time.Now())
	return nil
}

// troubled says why a request has failed, and that it has not when why is empty.
func (s *subscriber) troubled(why string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.is.trouble = why
}

// An engine takes longer than restartsApart to restart. What looks like more than
// mostRestarts in less is something else, which is left alone for a while: it must
// not keep the agent busy, nor fill its log.
const restartsApart, mostRestarts = time.Second, 3

var errRestless = errors.New("it seems to restart again and again")

// manyLate replays in a row that bring messages, where the subscription brings
// none, are no accident.
const manyLate = 2

// carryOut does what the follower wants to be done with the index, and returns
// what else it wants. learn is told how many tokens a block has; when that is
// news, what the index knew is forgotten and told anew.
func (s *subscriber) carryOut(learn func(tokens int)) kvevent.Action {
	for {
		now := time.Now()
		a := s.follower.Next(now)
		s.say(&a)
		switch a.Do {
		case kvevent.Apply:
			s.count(a.Batch.Events)
			if n := blockSize(a.Batch.Events); n > 0 && !s.learned {
				s.learned = true
				learn(n)
			}
			s.tell(func() { s.index.Apply(s.slot, a.Batch.Events, now) })
		case kvevent.Forget:
			if now.Sub(s.restarted) > restartsApart {
				s.restarts = 0
			}
			s.restarts, s.restarted = s.restarts+1, now
			s.log.Info("the engine publishes its KV events anew: it has restarted, and what it had in its cache is forgotten")
			s.learned = false
			s.tell(func() {
				s.index.Forget(s.slot)
				s.states.contradict(s.slot, "")
			})
		case kvevent.Replace:
			s.tell(func() { s.index.Untell(s.slot) })
		default:
			stats := statsOf(s.past, s.follower.Stats())
			cursor, whole := s.follower.Cursor()
			s.mu.Lock()
			s.is.stats = stats
			s.cursor, s.whole = cursor, whole && s.round == s.rounds
			s.mu.Unlock()
			return a
		}
	}
}

// eventStates are the states of followers as the index has them.
var eventStates = [...]index.State{
	kvevent.Exact:       index.Exact,
	kvevent.Repairing:   index.Repairing,
	kvevent.Approximate: index.Approximate,
}

// say says how well the publisher is followed.
func (s *subscriber) say(a *kvevent.Action) {
	state, why := eventStates[a.State], a.Why
	if state == index.Repairing && !s.options.Replay && !s.options.Snapshot && s.follower.Stats().Next == 0 {
		state, why = index.Approximate, "nothing was published since the agent has subscribed, and there is no replay endpoint to ask for what was before"
	}
	switch {
	case state == index.Exact && s.late >= manyLate:
		state, why = index.Repairing, fmt.Sprintf("messages come by replay only: is %q the topic that the engine publishes with?", s.is.from.topic)
	case state != index.Exact && s.is.trouble != "":
		why += " (" + s.is.trouble + ")"
	}
	s.set(state, why)
}

// blockSize is how many tokens the blocks have that a batch stores, 0 when it
// stores none that prompts are looked up by.
func blockSize(events []kvevent.Event) int {
	for i := range events {
		e := &events[i]
		if e.Kind == kvevent.Stored && e.BlockSize > 0 && len(e.Tokens) > 0 && e.Group <= 0 && (e.Spec == "" || e.Spec == "full_attention" || e.Spec == "mla_attention") {
			return e.BlockSize
		}
	}
	return 0
}

func (s *subscriber) count(events []kvevent.Event) {
	for i := range events {
		switch events[i].Kind {
		case kvevent.Stored:
			s.counts.stored.Add(1)
		case kvevent.Removed:
			s.counts.removed.Add(1)
		case kvevent.Cleared:
			s.counts.cleared.Add(1)
		}
	}
}
