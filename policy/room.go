package policy

import (
	"sync/atomic"
	"time"
)

// A room is the KV cache that the sequences of an engine share. The engine begins with a
// prompt when all of it fits beside those that run, however short it is and whatever is to
// be prefilled before it; until then it waits for the ends of others' answers, and so do
// those behind it.
//
// What is free is known from the engine's last report, less what has been sent there and
// is not computed yet. What a prompt takes of it are the tokens that are not cached: the
// others it is taken to share with sequences that run. Where nobody else has them now, they
// count as free and are not, so that some waits are not foreseen. To count them would
// foresee many that are none, and send prompts away from what they begin with.
//
// In virtual time, times what it is without, of 16 seeds other than those that firstEnd was
// chosen by. Where caches are roomy nothing changes.
//
//	                                   mean ttft  p50 ttft  p99 ttft  mean answer
//	agents, 4 L4 (W3, 0.5/s)           0.64       0.92      0.49      0.93
//	agents, 4 L4 (W3, 1/s: too much)   0.43       0.37      0.63      0.67
//	documents, 4 L4 (W4, 0.8/s)        0.99       1.00      0.95      1.00
//	chats, 8 L4 (W2, 3/s)              0.95       1.00      0.87      1.00
//	unshared, 8 L4 (W6, 4/s)           0.77       0.99      0.45      0.99
//	system prompts, 4 L4 (W1, 1.8/s)   0.73       0.98      0.64      0.98
//
// It loses where all caches are always full, and to go where there is a little room costs what
// is cached elsewhere: documents before 2 L40S at the limit of what those can do (W4, 6/s) have
// 7 % more of the mean, of eight seeds, and 10 % of the 99th percentile; at 5.5/s 1 and 4 %.
// Chats, as TestDefaultWithFullCaches has them, have 1 % less to 2 % more of the mean, and 3 to
// 10 % less of the median. Were no cached token taken to be shared, agents would have more of
// the mean than without all this.
//
// A Standing has one. Any goroutine may use it; it allocates nothing and waits for nobody.
// The zero value has room for any number of tokens.
type room struct {
	tokens atomic.Int64 // that there is room for in all, 0: not known, or shared by nobody
	stay   RecentMean   // how long answers take from their first token to their end, in seconds
}

// shortStay is how long an answer takes at least that tells how long others do. Those of
// one token are mostly pieces of prompts.
const shortStay = 20 * time.Millisecond

// left notes that a sequence has ended so long after its first token.
func (m *room) left(stay time.Duration) {
	if stay >= shortStay {
		m.stay.Add(stay.Seconds())
	}
}

// wait is how many seconds it takes until there are so many tokens more than are free now,
// of so many in all: until one more answer has ended, and then as long as others take. In
// the time that an answer takes as many become free as there are.
func (m *room) wait(lacking, tokens float64) float64 {
	return m.stay.Get() * (firstEnd + lacking/tokens)
}

// firstEnd is after what part of the time that an answer takes the next of a few ends.
const firstEnd = 0.25

// SetRoom says how many tokens the engine's KV cache has room for, of all sequences that
// run together: 0 where that is not known, or each has a cache of its own.
func (s *Standing) SetRoom(tokens int) { s.room.tokens.Store(int64(max(tokens, 0))) }

// Room is what SetRoom was told last.
func (s *Standing) Room() int { return int(s.room.tokens.Load()) }

// Fit adds to the candidate's Wait how long the request has to wait there for room in the
// KV cache, and says so in Room. The candidate is one that Describe has filled, and what it
// has cached of the request is known. Nothing is added where there is room, where it is
// unknown how much there is or how much of it is taken, or no answer has ended yet.
func (s *Standing) Fit(c *Candidate, r *Request) {
	tokens := float64(s.room.tokens.Load())
	if tokens == 0 || !(c.KV > 0) {
		return
	}
	taken := float64(c.KV)*tokens + float64(max(r.Tokens-max(int(c.Cached), 0), 0))
	if taken+c.Ahead.Tokens <= tokens {
		return
	}
	// What is ahead has its room when it is computed. So far it has been to the part of its
	// time that has passed.
	ahead := c.Ahead.Tokens
	if all := c.Speed.Time(c.Ahead); all > c.Wait {
		ahead *= max(c.Wait, 0) / all
	}
	if lacking := taken + ahead - tokens; lacking > 0 {
		wait := float32(s.room.wait(lacking, tokens))
		c.Room = wait
		c.Wait += float64(wait)
	}
}
