package policy

import (
	"sync"
	"time"
)

// Backlog is what this agent has sent to one replica to prefill and has no first
// byte of. It lives as long as the replica; its methods may be called from any
// goroutine and allocate nothing. The zero value is empty.
//
// Engines prefill in the order of arrival: so when a first byte comes, all that
// was sent before is taken to be prefilled too, and the time since the first byte
// before, or since the request was sent if the replica had nothing to do, is what
// its prompt has taken.
type Backlog struct {
	mu sync.Mutex // guards the rest
}

// Entry is one request's place in a Backlog. Its owner keeps it in place from
// Enter until Leave. The zero value is in none.
type Entry struct {
	work Work
}

// Observation is what a first byte has told of a replica's speed: so much Work
// took so many seconds.
type Observation struct {
	Work    Work
	Seconds float64
	// Decoding is how many sequences were generated meanwhile.
	Decoding int
}

// Enter adds a prompt that is about to be sent. streams: its first byte will come
// with its first token; otherwise nothing tells when its prefill is over but later
// ones, or due, which is when it is expected to be.
func (b *Backlog) Enter(e *Entry, w Work, streams bool, now, due time.Time) {}

// First tells that e's first token is there. ok is false when nothing can be
// concluded from it.
func (b *Backlog) First(e *Entry, decoding int, now time.Time) (o Observation, ok bool) {
	return Observation{}, false
}

// Leave takes e out, if it is in: the request has ended, or failed. It may be
// called at any time and more than once.
func (b *Backlog) Leave(e *Entry, now time.Time) {}

// Ahead is the work that is not done at now, how many prompts it is made of, and
// how long it will take at speed s, of which what has passed since the present one
// began is taken off.
func (b *Backlog) Ahead(s *Speed, now time.Time) (w Work, wait float64) { return Work{}, 0 }
