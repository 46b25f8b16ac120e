package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/inferrail/inferrail/index/kvevent"
)

// feed is the sockets by which one publisher is followed: its messages as they
// are published, and at request those from before, and all that is held. openFeed
// makes it; one goroutine uses it and closes it. Nothing is queued in it: while
// nobody reads, messages wait in the kernel's buffers and at the publisher, which
// drops what is too much, and that is a gap like any other.
type feed struct {
	ctx    context.Context
	from   publisher
	opened time.Time
	sub    *zmtpConn
	dealer *zmtpConn // for replays; nil until there was one, and after one that failed
}

// What a publisher may send at once, and how long it may take. A step of an engine
// takes a megabyte at most: some ten thousand tokens of 5 bytes, the names of
// their blocks and of those that they replace. vLLM looks for
// requests between two messages, every 100 ms while it has none to publish;
// SGLang after each.
const (
	maxEventParts     = 4
	maxEventBytes     = 16 << 20
	messageTime       = 30 * time.Second
	maxSnapshotBytes  = 300 << 20
	maxSnapshotChunks = 1 << 16
	replyTime         = 10 * time.Second // to the first reply
	nextReplyTime     = 2 * time.Second  // to each further one
	replayTime        = 2 * time.Minute  // the whole
	snapshotTime      = time.Minute
)

var eventLimits = zmtpLimits{bytes: maxEventBytes, frames: maxEventParts, time: messageTime}

// snapshots lets one snapshot be in memory at one time: it is the largest thing
// that is ever held of a publisher.
var snapshots = make(chan struct{}, 1)

// openFeed subscribes to a publisher. The feed ends with ctx.
func openFeed(ctx context.Context, from publisher) (*feed, error) {
	sub, err := dialZMTP(ctx, from.events.network, from.events.address, "SUB", eventLimits)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", from.events, err)
	}
	f := &feed{ctx: ctx, from: from, opened: time.Now(), sub: sub}
	if err := sub.subscribe(from.topic); err != nil {
		f.close()
		return nil, fmt.Errorf("%s: cannot subscribe: %w", from.events, err)
	}
	return f, nil
}

func (f *feed) close() {
	f.sub.close()
	if f.dealer != nil {
		f.dealer.close()
	}
}

// errQuiet is that nothing was published for a while.
var errQuiet = errors.New("nothing was published")

// errMalformed is a message that is none. Those behind it may be good.
type errMalformed struct{ error }

// next returns the next message, whose payload is valid until the next call,
// and errQuiet when none comes for so long.
func (f *feed) next(patience time.Duration) (kvevent.Message, error) {
	if err := f.sub.until(time.Now().Add(patience)); err != nil {
		return kvevent.Message{}, err
	}
	frames, err := f.sub.receive()
	switch {
	case err == nil:
	case f.ctx.Err() != nil:
		return kvevent.Message{}, f.ctx.Err()
	case errors.Is(err, os.ErrDeadlineExceeded):
		if !f.sub.waiting {
			return kvevent.Message{}, fmt.Errorf("%s: a message stops halfway", f.from.events)
		}
		return kvevent.Message{}, errQuiet
	default:
		return kvevent.Message{}, fmt.Errorf("%s: %w", f.from.events, err)
	}
	m, err := kvevent.ParseMessage(frames)
	if err != nil {
		return m, errMalformed{err}
	}
	return m, nil
}

// replay asks for all messages that the publisher still has from a sequence on,
// and hands them to each, which must not keep them, in their order. The first
// may be a later one than was asked for, when those before are gone; after it
// none is missing. An error of each ends it and is returned.
//
// A publisher sends all replies at once, and its socket drops what its queue,
// of a thousand usually, has no room for: any of them, the last included, which
// says that it was the last. So what is missing is asked for anew, for as long
// as that brings something.
func (f *feed) replay(from uint64, each func(kvevent.Message) error) error {
	if f.from.replay.isZero() {
		return errors.New("there is no replay endpoint")
	}
	r := replay{next: from, last: time.Now().Add(replayTime), each: each}
	for {
		before := r.next
		err := f.replayOnce(&r)
		if err != nil && f.dealer != nil {
			// What comes late must not answer another request.
			f.dealer.close()
			f.dealer = nil
		}
		switch {
		case f.ctx.Err() != nil:
			return f.ctx.Err()
		case err == nil, r.refused:
			return err
		case !r.begun || r.next == before, time.Now().After(r.last):
			return fmt.Errorf("replay endpoint %s: %w", f.from.replay, err)
		}
	}
}

// replay is the state of one.
type replay struct {
	next    uint64 // is due
	begun   bool   // something has come
	last    time.Time
	each    func(kvevent.Message) error
	refused bool // by each
}

// replayOnce asks once, for what is due. It returns nil when the publisher has
// said that it was all.
func (f *feed) replayOnce(r *replay) (err error) {
	if f.dealer == nil {
		if f.dealer, err = dialZMTP(f.ctx, f.from.replay.network, f.from.replay.address, "DEALER", eventLimits); err != nil {
			f.dealer = nil
			return err
		}
	}
	if err := f.dealer.send(kvevent.ReplayRequest(r.next)...); err != nil {
		return err
	}
	patience := replyTime
	for {
		if time.Now().After(r.last) {
			return errors.New("its replies have no end")
		}
		if err := f.dealer.until(time.Now().Add(min(patience, time.Until(r.last)))); err != nil {
			return err
		}
		frames, err := f.dealer.receive()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			err = errors.New("no answer in time")
		}
		if err != nil {
			return err
		}
		m, end, err := kvevent.ParseReplay(frames)
		switch {
		case err != nil:
			return err
		case end:
			return nil
		case m.Seq < r.next:
			continue // the publisher sends more than was asked for
		case m.Seq > r.next && r.begun:
			return fmt.Errorf("its replies go on with %d where %d was due", m.Seq, r.next)
		}
		if err := r.each(m); err != nil {
			r.refused = true
			return err
		}
		r.next, r.begun, patience = m.Seq+1, true, nextReplyTime
	}
}

// snapshot asks for all that is held.
func (f *feed) snapshot() (s kvevent.Snapshot, err error) {
	if f.from.snapshot.isZero() {
		return s, errors.New("there is no snapshot endpoint")
	}
	select {
	case snapshots <- struct{}{}:
		defer func() { <-snapshots }()
	case <-f.ctx.Done():
		return s, f.ctx.Err()
	}
	wrong := func(err error) (kvevent.Snapshot, error) {
		if f.ctx.Err() != nil {
			return s, f.ctx.Err()
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			err = errors.New("no answer in time")
		}
		return s, fmt.Errorf("snapshot endpoint %s: %w", f.from.snapshot, err)
	}
	c, err := dialZMTP(f.ctx, f.from.snapshot.network, f.from.snapshot.address, "REQ", zmtpLimits{maxSnapshotBytes, maxSnapshotChunks, snapshotTime})
	if err != nil {
		return wrong(err)
	}
	defer c.close()
	if err := c.send(append([][]byte{nil}, kvevent.SnapshotRequest()...)...); err != nil {
		return wrong(err)
	}
	if err := c.until(time.Now().Add(snapshotTime)); err != nil {
		return wrong(err)
	}
	frames, err := c.receive()
	if err != nil {
		return wrong(err)
	}
	if s, err = kvevent.ParseSnapshot(frames); err != nil {
		return wrong(err)
	}
	return s, nil
}
