package policy

import (
	"math"
	"slices"
	"sync"
	"sync/atomic"
)

// Pieces is the rule by which an agent lets a long prompt be computed in pieces: the
// first tokens of it are asked for as a prompt of their own, and when they are in the
// replica's cache the next, and at last the request itself, which finds all but the last
// piece cached. Between two pieces it is decided anew who goes next: engines compute a
// prompt from its beginning to its end, whatever comes meanwhile, and so a short one would
// wait for all of a long one. It is a value, and used from any goroutine. The zero value
// sends each prompt whole.
//
// What has begun stays where it is as long as that is worth it, and counts there (Rest), so
// that others go elsewhere when they can. Of several that have begun at one replica one goes
// on: two of the same length that take turns are both done when the second would be.
//
// In virtual time, with a Length of half a second, times what it is with all prompts whole:
//
//	                                  mean ttft   p50 ttft   p99 ttft   p99 a token
//	conversations                     0.96        0.96       1.02       1.00
//	conversations at 1.8x             0.92        0.86       1.00       1.00
//	synthetic trace at 1.8x           0.90        0.99       0.95       1.00
//	conversations, 4 H100             0.98        0.97       1.14       0.76
//	synthetic trace, 4 H100           0.93        0.65       0.99       0.83
//	Azure's code, 8 H200              0.98        0.97       1.03       0.97
//	documents, 2 L40S, too much (W4)  1.06        1.09       0.99       1.01
//
// Of the first two the mean is 1.13 times the bound instead of 1.17 and 1.23. A length of
// 300 ms takes up to 26 % more off medians, and adds up to 26 % to 99th percentiles.
type Pieces struct {
	// Length is how many seconds a piece takes; where each prompt takes long beside what
	// its tokens do, it is more.
	Length float64
}

const (
	// wholeUpTo is how many times a piece's length a prompt takes at most that is sent
	// whole: less is not worth another request.
	wholeUpTo = 1.5
	// perPrompt is how many times what each prompt takes beside its tokens (Speed.D) a
	// piece takes at least: so much is lost with each, which has to wait for the engine's
	// next step. Before 4 L4, of which a step with what they decode takes 60 ms, W4 has a
	// mean of 1,079 ms without it, 976 with it, and 968 with all prompts whole.
	perPrompt = 15
	// leastPiece is how many tokens a piece has at least, and then as many more as its last
	// block takes.
	leastPiece = 512
	// MostPieces is in how many pieces a prompt is computed at most, and then the rest.
	MostPieces = 64
)

// With is the rule where p chooses: the same with cost_model, which weighs what has begun.
func (p Pieces) With(by Policy) Pieces {
	if _, ok := by.(*CostModel); !ok {
		return Pieces{}
	}
	return p
}

// Cut is how many of the prompt's tokens are asked for next at the candidate, of which it
// holds Cached in blocks of so many tokens: 0 for all of them, with the request itself.
//
// Where the KV cache is nearly full, or waits for room as it is, what one piece has left
// there may be gone before the next, and so nothing is cut.
func (p Pieces) Cut(r *Request, c *Candidate, block int) int {
	held, length := max(c.held(r), 0), max(p.Length, perPrompt*c.Speed.D)
	if !(p.Length > 0) || block <= 0 || c.KV > fullCache || c.Room > 0 || !(c.Speed.fill(float64(r.Tokens), float64(held)) > wholeUpTo*length) {
		return 0
	}
	// So many more as take length, A·u + B·u·(held + u/2) + D: of the two forms of the root
	// the one that is as good where B is next to nothing, or nothing.
	a, b := c.Speed.A+c.Speed.B*float64(held), c.Speed.B/2
	left := max(length-c.Speed.D, 0)
	u := 2 * left / (a + math.Sqrt(a*a+4*b*left))
	if !(u < float64(r.Tokens)) {
		return 0
	}
	n := (held + int(max(u, 0))) / block * block
	if n-held < leastPiece {
		n = (held + leastPiece + block - 1) / block * block
	}
	if n <= held || n >= r.Tokens {
		return 0
	}
	return n
}

// fullCache is how full a KV cache is with sequences that run when nothing is cut.
const fullCache = 0.9

// Rest is what is left to compute of one prompt that has begun in pieces, and where. It is
// a part of a request, which keeps it in place, and used by one goroutine at a time; what it
// counts for there may be read by any. The zero value is nothing.
//
// Of several at one replica one goes on, and the others wait for it: were they to take turns
// all would be done when the last is.
type Rest struct {
	at      *Standing
	seconds int64 // in nanoseconds
	key     float64
}

// Stay says that the prompt has so many seconds left at s, and nothing elsewhere. key is its
// place in the order of those that have begun there (Pieces.Key).
func (r *Rest) Stay(s *Standing, seconds, key float64) {
	if !(seconds > 0) {
		seconds = 0 // of a speed that is broken
	}
	left := int64(min(seconds, MostTTFT) * 1e9)
	if r.at == s {
		s.begun.change(r, left, key)
		return
	}
	r.End()
	r.at, r.seconds, r.key = s, left, key
	s.begun.enter(r)
}

// End says that it has nothing left. It may be called at any time.
func (r *Rest) End() {
	if r.at != nil {
		r.at.begun.leave(r)
		*r = Rest{}
	}
}

// First reports that no other that has begun where it stays comes before it.
func (r *Rest) First() bool { return r.at == nil || r.at.begun.first(r) }

// Apart takes the prompt's own rest out of what c, which s was described by, has begun
// with: it keeps nobody waiting but others.
func (r *Rest) Apart(s *Standing, c *Candidate) {
	if r.at == s && c.Begun > 0 {
		c.Begun--
		c.Rest = max(c.Rest-float64(r.seconds)/1e9, 0)
	}
}

// Key is the place in the order of a prompt that came at so many seconds and has so many
// left: as Holding has it.
func (Pieces) Key(came, left float64) float64 { return Holding{}.Key(came, left) }

// begun is what prompts have left of which a replica has computed a piece. Any goroutine
// may use it. The zero value is none.
type begun struct {
	prompts, seconds atomic.Int64

	mu   sync.Mutex // guards the rest
	list []*Rest    // few, in the order in which they came
}

func (b *begun) enter(r *Rest) {
	b.prompts.Add(1)
	b.seconds.Add(r.seconds)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.list = append(b.list, r)
}

// change keeps the place of r among equals.
func (b *begun) change(r *Rest, left int64, key float64) {
	b.seconds.Add(left - r.seconds)
	b.mu.Lock()
	defer b.mu.Unlock()
	r.seconds, r.key = left, key
}

func (b *begun) leave(r *Rest) {
	b.prompts.Add(-1)
	b.seconds.Add(-r.seconds)
	b.mu.Lock()
	defer b.mu.Unlock()
	if i := slices.Index(b.list, r); i >= 0 {
		b.list = slices.Delete(b.list, i, i+1)
	}
}

// first reports that r is the first by its key, and of equals the one that is longest there.
func (b *begun) first(r *Rest) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	first := b.list[0] // r is in it
	for _, o := range b.list[1:] {
		if o.key < first.key {
			first = o
		}
	}
	return first == r
}

func (b *begun) describe(c *Candidate) {
	if n := b.prompts.Load(); n > 0 {
		c.Begun, c.Rest = Count(int(n)), float64(max(b.seconds.Load(), 0))/1e9
	}
}
