package policy

import (
	"cmp"
	"math"
	"slices"
	"sync"
	"time"
)

// Prewarming is the rule by which an agent lets replicas that have nothing else to prefill
// compute the beginning of prompts ahead, for requests that are still to come. It is a
// value, and used from any goroutine. The zero value prewarms nothing.
//
// Where many prompts begin alike, as behind a system prompt, a few replicas have the
// beginning, and new requests go there though others are less busy, or compute it elsewhere
// while their clients wait. Prefixes notes of each request what it would have cost less had
// another replica held what the chosen one did. When that adds up to what it takes to
// compute it there, it is computed there: so all that is computed ahead costs no more than
// was lost without it, as who has paid as much rent as a thing costs buys it (ski rental:
// Karlin, Manasse, Rudolph, Sleator 1988).
//
// In virtual time, with a Length of 100 ms, times what it is with nothing computed ahead, of
// three seeds, of the bursts nine and of the sessions twelve:
//
//	                                   mean ttft   p50 ttft   p99 ttft   mean answer
//	agents, 8 H100 (W3, 8/s)           0.96        0.95       0.98       0.97
//	agents, 8 H100 (W3, 16/s)          0.99        0.97       1.01       0.98
//	agents, 8 H100 (W3, 28/s)          0.97        0.98       1.00       0.97
//	agents, 8 H100 (W3), 400 requests  0.88        0.87       1.01       0.92
//	agents, 4 H100 and 4 L40S (W3)     0.96        1.00       0.90       0.97
//	system prompts, 8 H200 (W1, 48/s)  1.00        1.00       0.96       1.00
//	system prompts, 8 H200 (W1, 76/s)  0.97        0.98       0.99       0.99
//	bursts, a slow engine (W5, 44/s)   0.93        0.94       0.96       0.98
//	sessions, one throttled of 3       0.94        0.99       1.02       0.97
//
// Of Mooncake's traces nothing
// is computed ahead, or hardly anything. What requests have lost is by costs, in which a
// prefill where replicas idle, and usually do, is a little cheaper than its time
// (CostModel.OwnWork): by its time alone half of what agents gain is gone.
type Prewarming struct {
	// Length is how many seconds a piece takes at most in which it is computed: whoever
	// comes meanwhile waits for no more.
	Length float64
}

const (
	// leastPrefix is how many tokens of a prefix a replica must lack for it to be worth
	// anything.
	leastPrefix = 512
	// prefixMemory is after how long what requests have lost has a third of its weight left:
	// what nobody asks for any more is soon worth nothing.
	prefixMemory = 30 * time.Second
	// leastAsked is how many requests, of which old ones count less, must have lost by it.
	// One may have lost as much alone, and would be the last.
	leastAsked = 2
	// forgotten is of how many requests, of which old ones count less, nothing is kept.
	forgotten = 0.01
	// mostPrefixes is how many prefixes are remembered, and mostPrefixTokens how many tokens
	// of all of them.
	mostPrefixes     = 256
	mostPrefixTokens = 2 << 20
	// roomyCache is how full a KV cache is with sequences that run at most: where there is
	// less beside them, conversations that pause are pushed out by what is computed ahead.
	// Before 4 L4, of which contexts of agents take most of the cache (W3 at 0.5/s), the mean
	// is 2.6 s without it, and 1.8 s with it and with nothing computed ahead.
	roomyCache = 0.4
	// muchSlower is how many times as long as the chosen one a replica may take for what is
	// left of the prompt: to compute something ahead at a slower one draws requests there.
	muchSlower = 2
	// priceEach is how much more it costs to compute a prefix for each sequence that is
	// generated meanwhile, which it is in the way of.
	priceEach = 0.01
	// leastLoss is how many seconds all that requests have lost must be to be remembered.
	leastLoss = 1e-4
)

// With is the rule where p chooses: the same with cost_model, whose costs are times.
func (w Prewarming) With(p Policy) Prewarming {
	if _, ok := p.(*CostModel); !ok {
		return Prewarming{}
	}
	return w
}

// On reports whether anything is prewarmed.
func (w Prewarming) On() bool { return w.Length > 0 }

// Idle reports that the replica has nothing to prefill, and room for more: what it
// generates goes on meanwhile, as slowly as beside any other prompt.
func (w Prewarming) Idle(c *Candidate) bool {
	return w.On() && c.Wait <= 0 && c.InFlight <= c.Decoding && c.Queued <= 0 && c.Begun <= 0 && c.KV <= roomyCache &&
		(c.Share <= 0 || c.Share >= 1)
}

// Cut is how many of a prefix's tokens the candidate is let compute next, of which it has so
// many in blocks: no piece leaves less than is worth another one.
func (w Prewarming) Cut(tokens, held int, c *Candidate, block int) int {
	at := *c
	at.Cached = Count(held)
	if n := Pieces(w).Cut(&Request{Tokens: tokens}, &at, block); n > 0 && tokens-n >= leastPrefix {
		return n
	}
	return tokens
}

// Prefix is the beginning of prompts, in whole blocks of those who hold it. Key stands for
// it. IDs are its tokens, which nobody changes.
type Prefix struct {
	Key uint64
	IDs []uint32
}

// Prefixes are the beginnings of prompts that requests of one model have found cached, and
// what they would have saved had other replicas held them too. Any goroutine may use them.
// The zero value is none.
type Prefixes struct {
	mu     sync.Mutex // guards the rest
	list   []prefixed // in no order
	tokens int        // of all their IDs
}

// prefixed is one of them, as it was at a time; asked is how many requests have lost by it,
// and losses what, by replica. IDs are there from the second request on.
type prefixed struct {
	Prefix
	at     time.Time
	asked  float64
	losses []loss
}

// loss is how many seconds requests have lost because a replica, of that Candidate.Key, held
// only the first so many tokens of a prefix.
type loss struct {
	replica uint64
	held    int
	seconds float64
}

// Chosen notes that a request, of which the prompt is ids, was sent to the chosen one of the
// candidates, which has the first tokens of it cached, in whole blocks; key stands for those.
// costs are what CostModel gave the candidates. ids are copied if they are kept.
//
// What a replica would have cost with as much cached is its cost without what it takes to
// compute that, once: the cost counts it more than once where others wait or usually compute,
// where less is computed ahead. Agents have 1 % more of the mean if that is taken off as well.
// All that was lost is lost by who would have been the best: one more that holds it would be
// enough. It reports whether there was any.
func (p *Prefixes) Chosen(r *Request, candidates []Candidate, costs []float64, chosen int, key uint64, ids []uint32, tokens int, now time.Time) bool {
	tokens = min(tokens, len(ids))
	if tokens < leastPrefix || chosen < 0 {
		return false
	}
	least, at := leastLoss, -1
	own, all, held := costs[chosen], float64(max(r.Tokens, 0)), float64(tokens)
	slow := muchSlower * candidates[chosen].Speed.fill(all, held)
	for i := range candidates {
		c := &candidates[i]
		if int(c.Cached) > tokens-leastPrefix || c.Share > 0 && c.Share < 1 {
			continue
		}
		fill := c.Speed.fill(all, held)
		if !(fill < slow) {
			continue
		}
		with := costs[i] - c.Speed.fill(all, float64(max(c.Cached, 0))) + fill
		// Exact is in another line of memory.
		if lost := own - with; lost > least && lost < MostTTFT && c.Exact {
			least, at = lost, i
		}
	}
	if at < 0 {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	e := p.findLocked(key, now)
	c := &candidates[at]
	l := e.of(c.Key)
	if int(c.Cached) < l.held {
		l.seconds = 0 // as Holds has it
	}
	l.held, l.seconds = int(max(c.Cached, 0)), l.seconds+least
	if e.asked++; e.asked > 1 && e.IDs == nil && p.roomLocked(e, tokens, now) {
		e.IDs = slices.Clone(ids[:tokens])
		p.tokens += tokens
	}
	return true
}

// roomLocked makes room for so many tokens of e, in place of those of others by which less
// was lost, and reports that there is some.
func (p *Prefixes) roomLocked(e *prefixed, tokens int, now time.Time) bool {
	most := e.lost()
	for tokens <= mostPrefixTokens && p.tokens+tokens > mostPrefixTokens {
		var out *prefixed
		least := most
		for i := range p.list {
			o := &p.list[i]
			if lost := o.lost() * fading(now.Sub(o.at)); o.IDs != nil && o != e && lost < least {
				least, out = lost, o
			}
		}
		if out == nil {
			return false
		}
		p.tokens -= len(out.IDs)
		out.IDs = nil
	}
	return tokens <= mostPrefixTokens
}

// findLocked is the one of that key, as it is now, if need be in place of the one that
// least was lost by.
func (p *Prefixes) findLocked(key uint64, now time.Time) *prefixed {
	for i := range p.list {
		if e := &p.list[i]; e.Key == key {
			e.fade(now)
			return e
		}
	}
	at := len(p.list)
	if at < mostPrefixes {
		p.list = append(p.list, prefixed{})
	} else {
		least := math.Inf(1)
		for i := range p.list {
			e := &p.list[i]
			if lost := e.lost() * fading(now.Sub(e.at)); lost < least {
				least, at = lost, i
			}
		}
	}
	e := &p.list[at]
	p.tokens -= len(e.IDs)
	*e = prefixed{Prefix: Prefix{Key: key}, at: now, losses: e.losses[:0]}
	return e
}

// fading is what is left of a number after a time.
func fading(d time.Duration) float64 {
	return math.Exp(-max(d.Seconds(), 0) / prefixMemory.Seconds())
}

// fade makes it what it is now.
func (e *prefixed) fade(now time.Time) {
	left := fading(now.Sub(e.at))
	e.at = now
	e.asked *= left
	for i := range e.losses {
		e.losses[i].seconds *= left
	}
	e.losses = slices.DeleteFunc(e.losses, func(l loss) bool { return l.seconds < leastLoss })
}

// lost is what was lost in all.
func (e *prefixed) lost() (seconds float64) {
	for i := range e.losses {
		seconds += e.losses[i].seconds
	}
	return seconds
}

// of is the loss at one replica.
func (e *prefixed) of(replica uint64) *loss {
	i := slices.IndexFunc(e.losses, func(l loss) bool { return l.replica == replica })
	if i < 0 {
		e.losses = append(e.losses, loss{replica: replica})
		i = len(e.losses) - 1
	}
	return &e.losses[i]
}

// Due is the prefix by which most was lost, for what it takes to compute it, because the
// candidate did not hold it: at least that much. false: there is none.
func (p *Prefixes) Due(c *Candidate, now time.Time) (x Prefix, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	most := 1.0
	for i := range p.list {
		e := &p.list[i]
		if e.IDs == nil {
			continue
		}
		for k := range e.losses {
			l := &e.losses[k]
			if l.replica != c.Key {
				continue
			}
			left := fading(now.Sub(e.at))
			// Each sequence that is generated there has its next token as much later.
			price := c.Speed.fill(float64(len(e.IDs)), float64(l.held)) * (1 + priceEach*float64(max(c.Decoding, 0)))
			if worth := l.seconds * left / price; e.asked*left >= leastAsked && worth >= most {
				most, x, ok = worth, e.Prefix, true
			}
		}
	}
	return x, ok
}

// Pending reports that something may be due for a replica, now or when it is idle. It
// forgets what nobody asks for any more.
func (p *Prefixes) Pending(now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	pending := false
	p.list = slices.DeleteFunc(p.list, func(e prefixed) bool {
		asked := e.asked * fading(now.Sub(e.at))
		if asked < forgotten {
			p.tokens -= len(e.IDs)
			return true
		}
		pending = pending || e.IDs != nil && len(e.losses) > 0 && asked >= leastAsked
		return false
	})
	return pending
}

// Holds says that a replica of that Candidate.Key has the first tokens of the prefix, and
// reports whether it lacks some that are worth it. What was lost before it had them all
// counts no longer, nor does what was lost before it had more than now: that has paid for
// what is gone from its cache, and would pay for it again and again where caches are full.
func (p *Prefixes) Holds(key, replica uint64, tokens int) (lacks bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.list {
		e := &p.list[i]
		if e.Key != key {
			continue
		}
		for k := range e.losses {
			if l := &e.losses[k]; l.replica == replica {
				if len(e.IDs)-tokens >= leastPrefix && tokens >= l.held {
					l.held = tokens
					return true
				}
				e.losses = slices.Delete(e.losses, k, k+1)
				return false
			}
		}
	}
	return false
}

// Forget says that a replica of that Candidate.Key is not to have the prefix: what was lost
// before counts no longer.
func (p *Prefixes) Forget(key, replica uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if i := slices.IndexFunc(p.list, func(e prefixed) bool { return e.Key == key }); i >= 0 {
		e := &p.list[i]
		e.losses = slices.DeleteFunc(e.losses, func(l loss) bool { return l.replica == replica })
	}
}

// Lost is what requests have lost by one prefix, as people are told it. It is a value.
// IDs, which nobody changes, are nil as long as one request alone has lost by it.
type Lost struct {
	Prefix
	// Asked is how many requests have, of which old ones count less.
	Asked float64
	At    []LostAt
}

// LostAt is how many seconds were lost because a replica, of that Candidate.Key, did not
// hold the prefix, but only the first tokens of it when the last of them was sent.
type LostAt struct {
	Replica uint64
	Held    int
	Seconds float64
}

// All is a copy of what is remembered, of which most was lost first.
func (p *Prefixes) All(now time.Time) []Lost {
	p.mu.Lock()
	defer p.mu.Unlock()
	list := make([]Lost, 0, len(p.list))
	lost := make(map[uint64]float64, len(p.list))
	for i := range p.list {
		e := &p.list[i]
		left := fading(now.Sub(e.at))
		l := Lost{Prefix: e.Prefix, Asked: e.asked * left}
		for _, at := range e.losses {
			l.At = append(l.At, LostAt{at.replica, at.held, at.seconds * left})
		}
		list, lost[e.Key] = append(list, l), e.lost()*left
	}
	slices.SortFunc(list, func(a, b Lost) int {
		return cmp.Or(cmp.Compare(lost[b.Key], lost[a.Key]), cmp.Compare(a.Key, b.Key))
	})
	return list
}
