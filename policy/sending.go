package policy

import (
	"math"
	"time"
)

// Sending is the computing of a request's prompt at one replica, from when it is
// decided that it goes there until its first token, and what is learned of that. It
// is part of a request, for one attempt after another, and used by one goroutine at a
// time; it must not move while it is in a Backlog. The zero value is at no replica.
//
//	Promise      it will be sent to the replica
//	Foretell     what was known of the replica when it was chosen, if it was
//	Expect       it is about to be
//	First, Whole its first token is there, or an answer that does not stream
//	Told         the engine has told what it had cached
//	Leave        it is over, however; at any time
type Sending struct {
	// Tokens are those of all its prompts, Sequences how many prompts there are, of
	// which 0 stands for 1, and Cached how many of the tokens are taken to be in the
	// engine's cache. They are the caller's to set until Expect.
	Tokens, Sequences, Cached int
	// Sent is when it was sent, zero before, and Streams: its first token can be seen.
	// Exact: what is cached is known from the engine's own events, or must be nothing.
	// Expect sets them.
	Sent    time.Time
	Streams bool
	Exact   bool

	entry Entry
	// foretold is when the first token was to come, in seconds, without what is usually
	// off in such a moment, 0 when nobody has said so.
	foretold float64
	moment   int
	// beside is how many requests were at the replica, counted from 1, 0 when something
	// was to be computed before this one.
	beside int
	// to is the replica which will have promised before it in a moment: it has been
	// chosen, but there is no connection yet. nil when that is over.
	to       *Standing
	promised Work
	// at is the replica in whose backlog entry is, or is to be when it has a seat, nil
	// for none, with work.
	at      *Standing
	work    Work
	seating seating
	// again: the request was sent twice, on another connection the second time.
	again bool
	// first is how long the first token has taken since Sent, 0 when it is not
	// there, or not known to be.
	first time.Duration
	// whole: an answer has come that is no stream.
	whole bool
	// seen is what the first token has told of the replica's speed, and kept until
	// the end of the answer if waits is set: the engine will tell what it had cached.
	seen  Observation
	waits bool
}

// Promise begins a Sending to s.
func (p *Sending) Promise(s *Standing, tokens, sequences, cached int) {
	*p = Sending{Tokens: tokens, Sequences: sequences, Cached: cached}
	if w := p.Work(cached); w.Prompts > 0 {
		p.to, p.promised = s, w
		s.promises.add(w, 1)
	}
}

// Foretell notes what the replica was when it was chosen, so that it is learned by how
// much the time to first token is off that is foretold from that. It is called between
// Promise and Expect, if at all.
func (p *Sending) Foretell(r *Request, c *Candidate) {
	sooner := *c
	sooner.Late = 0
	p.foretold, p.moment = TTFT(r, &sooner), momentOf(c)
	if c.Wait == 0 && c.Queued == 0 {
		p.beside = int(max(c.InFlight, 0))
	}
}

// redeem ends what Promise has begun.
func (p *Sending) redeem() {
	if p.to != nil {
		p.to.promises.add(p.promised, -1)
		p.to = nil
	}
}

// Active reports that something is promised, or in a backlog.
func (p *Sending) Active() bool { return p.at != nil || p.to != nil }

// Waited reports that it is in a backlog.
func (p *Sending) Waited() bool { return p.at != nil }

// Expect enters the prompt, which is about to be sent, in what s has before it.
func (p *Sending) Expect(s *Standing, streams, exact bool, now time.Time) {
	if p.at != nil {
		p.at.seats.leave(p.at, p, false, now)
		p.again = true
	}
	p.at, p.Sent, p.Streams, p.Exact = s, now, streams, exact
	p.work = p.Work(p.Cached)
	if p.work == (Work{}) {
		p.at = nil // nothing is to be computed
		p.redeem()
		return
	}
	if s.disturbed.Load() && !s.load.Load().Fresh(now) {
		s.disturbed.Store(false)
		s.Backlog.Disturbed(false) // nobody tells that any more
	}
	s.seats.enter(s, p, now)
	s.Calibration.Sent()
	s.prompts.Add(p.work.Tokens)
	s.lengths.Add(float64(p.Tokens))
	p.redeem()
}

// Work is what the prompts are to an engine that has so many of their tokens cached.
// Several sequences are taken to be alike.
func (p *Sending) Work(cached int) Work {
	if p.Tokens == 0 {
		return Work{}
	}
	cached = min(cached, p.Tokens)
	n := max(p.Sequences, 1)
	w := Prefill((p.Tokens-cached)/n, cached/n)
	return Work{Prompts: float64(n), Tokens: float64(p.Tokens - cached), Attention: w.Attention * float64(n)}
}

// First notes that the first token was there at now, at a replica where the agent has
// so many requests inside and pending. It returns how long it took, and false when it
// is not waited for.
//
// What the replica had cached is a prediction. Where it is known from the engine's
// own events, what is learned of the replica's speed is learned now. So it is where
// the end of the answer will tell no better: tells says whether it will. Otherwise it
// is learned then, by what the engine says that it had: a prediction that is wrong
// would make the replica look fast, or slow.
func (p *Sending) First(inside, pending int, tells bool, now time.Time) (took time.Duration, ok bool) {
	if p.at == nil || p.first > 0 {
		return 0, false
	}
	p.first = max(now.Sub(p.Sent), 1)
	s := p.at
	if p.foretold > 0 && p.Streams && !p.again {
		speed := s.Calibration.Speed()
		short := speed.Time(Prefill(shortPrompt, 0))
		s.late[p.moment].Add(p.first.Seconds(), p.foretold, short)
		if p.beside > 0 {
			s.company.add(float64(p.beside), p.first.Seconds()-p.foretold, speed.Time(Prefill(1000, 0)))
		}
	}
	s.seats.began(s, p, now)
	o, ok := s.Backlog.First(&p.entry, s.decoding(inside, pending, now), now)
	switch {
	case !ok || p.again:
	case o.Own && tells && !p.Exact:
		p.seen, p.waits = o, true
	default:
		s.Calibration.Observe(o)
	}
	return p.first, true
}

// shortPrompt is how many tokens a short prompt has.
const shortPrompt = 100

// Whole notes that an answer has come that is no stream: the prompt is computed. How
// long that took can be told only from one that has nothing else. Nothing is concluded
// from this prompt, and so not from what is generated now.
func (p *Sending) Whole(now time.Time) {
	if p.at == nil || p.Streams {
		return
	}
	p.whole = true
	p.at.seats.began(p.at, p, now)
	if o, ok := p.at.Backlog.First(&p.entry, 0, now); ok && !o.Own {
		p.at.Calibration.Observe(o)
	}
}

// Leave takes the prompt out of what the replica has before it.
func (p *Sending) Leave(now time.Time) {
	p.redeem()
	if p.at != nil {
		p.at.seats.leave(p.at, p, p.first > 0 || p.whole, now)
		if p.first > 0 {
			p.at.room.left(now.Sub(p.Sent) - p.first)
		}
		p.at = nil
	}
}

// Told learns what the end of an answer has told: how many tokens the engine has
// counted in the prompt, and how many of them it had cached. known is false where it
// has told nothing that can be used.
func (p *Sending) Told(s *Standing, prompt, cached uint64, known bool) {
	if known {
		if !s.tellsCached.Load() {
			s.tellsCached.Store(true)
		}
	}
	if !p.waits {
		return
	}
	p.waits = false
	if known && prompt > 0 && max(p.Sequences, 1) == 1 {
		// A prompt's tokens may be an estimate, and are one for the next prompt, too:
		// what was cached is measured in them.
		found := float64(min(cached, prompt)) / float64(prompt) * float64(p.Tokens)
		p.seen.Work = p.seen.Work.Minus(p.work).Plus(p.Work(int(math.Round(found))))
	}
	s.Calibration.Observe(p.seen)
}

// Learn tells a Filter that an answer which began with Sent has been whole at now, of
// so many tokens with its prompt. An attempt that was sent twice tells nothing.
func (p *Sending) Learn(s *Standing, tokens int, now time.Time) {
	if !p.again {
		s.Filter.Observe(tokens, now.Sub(p.Sent).Seconds())
	}
}
