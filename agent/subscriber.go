package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/inferrail/inferrail/index"
)

// subscriber follows the KV events of one member's engine, and tells the index
// what they say. It finds where they are published, connects, and connects anew
// when it must, on one goroutine (fleet.followEvents) from when the member is
// made until it is released. Its other methods may be called from any goroutine.
type subscriber struct {
	slot   int
	index  *index.Index
	log    *slog.Logger  // names the replica
	poked  chan struct{} // asks to look anew at what is to be followed; holds one
	counts eventCounts

	mu     sync.Mutex // guards what follows, and is held while the index is told
	closed bool       // the slot is the member's no more
	is     eventStanding
	cut    context.CancelFunc // ends the connections; nil without any
}

// eventCounts are what has come from a publisher, since the member is there.
type eventCounts struct {
	stored, removed, cleared, unknown atomic.Uint64 // events
	batches                           atomic.Uint64
	gaps, replays, failedReplays      atomic.Uint64
	snapshots, resets, malformed      atomic.Uint64
	lost                              atomic.Uint64 // batches that could not be had again
	lag                               atomic.Int64  // of the batch applied last, in nanoseconds
}

// eventStanding is how a slot's events are followed, for people.
type eventStanding struct {
	state index.State
	why   string
	since time.Time // when state became what it is
	// from is where they are published, as far as that is known.
	from      publisher
	connected bool
	next      uint64 // sequence of the batch that is due
	known     bool   // next is
}

func newSubscriber(slot int, id string, x *index.Index, log *slog.Logger) *subscriber {
	return &subscriber{
		slot: slot, index: x, log: log.With("replica", id), poked: make(chan struct{}, 1),
		is: eventStanding{state: index.Approximate, why: "its engine was not asked yet", since: time.Now()},
	}
}

// poke asks to look anew at what is to be followed. It never blocks.
func (s *subscriber) poke() {
	select {
	case s.poked <- struct{}{}:
	default:
	}
}

// again drops the connections and what is known of the publisher, because what
// the index knew of the slot was forgotten.
func (s *subscriber) again() {
	s.mu.Lock()
	if s.cut != nil {
		s.cut()
	}
	s.mu.Unlock()
	s.poke()
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

// set says how well the slot is known from now on, and why.
func (s *subscriber) set(state index.State, why string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.setLocked(state, why)
}

func (s *subscriber) setLocked(state index.State, why string) {
	was := s.is.state
	if s.closed || was == state && s.is.why == why {
		return
	}
	if was != state {
		s.is.since = time.Now()
	}
	s.is.state, s.is.why = state, why
	s.index.SetState(s.slot, state, why)
	switch {
	case state == index.Exact:
		s.log.Info("KV events are followed: what the engine holds is known exactly", "from", s.is.from.events.String())
	case was == index.Exact:
		s.log.Warn("KV events are not whole", "why", why)
	default:
		s.log.Debug("KV events are not followed", "why", why)
	}
}

// eventsWanted is what a member's events are followed by. Another one ends the
// connections.
type eventsWanted struct {
	config KVEventsConfig
	engine string
	rank   int
	key    string
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
		eventsWanted{m.cfg.KVEvents, m.cfg.Engine, m.dataParallelRank(), m.key},
		m.returns,
		up && m.gone.IsZero() && m.cache.joined,
	}
}

// How long it takes until a connection that failed is tried again: from the
// first to the last, doubling. One that has worked begins anew.
const firstRetry, lastRetry = 100 * time.Millisecond, 10 * time.Second

// lostAfter is how long a slot stays Repairing whose publisher cannot be
// reached. What is known of it grows old meanwhile.
const lostAfter = 5 * time.Second

// followEvents is the goroutine of a member's subscriber. ctx ends when the
// member is released.
func (f *fleet) followEvents(ctx context.Context, m *member) {
	s := m.subscriber
	host, _, err := net.SplitHostPort(m.replica.Addr)
	if err != nil {
		host = m.replica.Addr
	}
	var finished eventsTarget // for which there is nothing to follow
	pause := firstRetry
	for ctx.Err() == nil {
		t := f.eventsTarget(m)
		if !t.ready || t == finished {
			select {
			case <-ctx.Done():
			case <-s.poked:
			}
			continue
		}
		p, err := f.publisherOf(ctx, m, t, host)
		var none errNoPublisher
		if errors.As(err, &none) {
			s.lose(publisher{}, none.Error())
			finished = t
			continue
		}
		if err == nil {
			began := time.Now()
			err = f.followOnce(ctx, m, t, p)
			if s.counts.worked(began) {
				pause = firstRetry
			}
		}
		if ctx.Err() != nil {
			return
		}
		s.fail(p, err)
		select {
		case <-ctx.Done():
		case <-s.poked:
		case <-time.After(pause/2 + rand.N(pause)):
		}
		pause = min(2*pause, lastRetry)
	}
}

// publisherOf finds where a member's events are published: configuration says
// so, or the engine does, which is asked each time since it may have been
// started anew.
func (f *fleet) publisherOf(ctx context.Context, m *member, t eventsTarget, host string) (publisher, error) {
	switch {
	case t.config.Mode == kvEventsOff:
		return publisher{}, errNoPublisher("kv_events is off in the configuration")
	case t.config.Endpoint != "":
		p, err := t.config.configured(host, t.rank)
		if err != nil {
			return publisher{}, errNoPublisher("kv_events: " + err.Error())
		}
		return p, nil
	}
	get := func(ctx context.Context, page string) (*http.Response, error) { return f.get(ctx, m, t.key, page) }
	p, err := findPublisher(ctx, get, t.engine, host, t.rank)
	if err != nil && !errors.As(err, new(errNoPublisher)) {
		err = fmt.Errorf("cannot ask the engine where it publishes: %w", err)
	}
	return p, err
}

// dataParallelRank is the rank whose events are the member's: the first of an
// engine that is one member. The fleet's mutex is held.
func (m *member) dataParallelRank() int { return max(m.rank, 0) }
func (s *subscriber) lose(publisher, string) {}
func (s *subscriber) fail(publisher, error) {}
func (c *eventCounts) worked(time.Time) bool { return false}
func (f *fleet) followOnce(context.Context, *member, eventsTarget, publisher) error { return nil}
