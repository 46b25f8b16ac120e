package policy

import (
	"math"
	"math/bits"
	"sync"
	"time"
)

// Rates are what one API key may use in a minute. 0 is no limit.
type Rates struct {
	Requests, InputTokens, OutputTokens int64
}

// Charge is a number of tokens.
type Charge struct {
	Input, Output int64
}

// Quota is the state of one limit, as told to clients. Limit 0 is no limit.
type Quota struct {
	Limit, Remaining int64
	// Reset is how long it takes until all of it is there again.
	Reset time.Duration
	// Short: a request that was refused has asked for more than is left of it.
	Short bool
}

// Quotas are the state of a Budget.
type Quotas struct {
	Requests, Input, Output Quota
}

// Budget is what one API key has left: a token bucket for each of its limits,
// which holds a minute's worth and fills evenly. The proxy reserves when it
// admits a request and settles when the request has ended; the agent changes
// the rates on reload. Its methods may be called from any goroutine and
// allocate nothing. It lives as long as its key is configured. The zero value
// limits nothing.
//
// Time is an argument. A time before one that the Budget has seen adds nothing
// and takes nothing, so callers need not agree on the order of their clocks'
// readings, and no time is counted twice.
//
// A request that asks for more than a whole limit is admitted when that limit
// is untouched, and leaves it overdrawn. It must not wait for ever, and
// refusing it for good would be wrong as well: the charge is an estimate, and
// max_tokens says how long an answer may get, not how long it will be. On
// average no more than the limit is admitted in either case.
type Budget struct {
	mu      sync.Mutex // guards the rest
	at      time.Time  // up to here the buckets have been filled
	buckets [3]bucket
}

// The buckets of a Budget.
const (
	requests = iota
	input
	output
)

// period is what Rates are given for.
const period = time.Minute

// NewBudget returns a Budget of which nothing is used.
func NewBudget(r Rates, now time.Time) *Budget {
	b := &Budget{at: now}
	b.SetRates(r, now)
	return b
}

// SetRates changes the limits. What was used of them stays used; a limit that
// is new starts untouched.
func (b *Budget) SetRates(r Rates, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.fillLocked(now)
	for i, limit := range [...]int64{r.Requests, r.InputTokens, r.OutputTokens} {
		b.buckets[i].setLimit(max(limit, 0))
	}
}

// Reserve takes one request and c's tokens, or nothing at all. q is what is
// left afterwards. When it takes nothing, retryAfter is how long it is until
// the same call would succeed if nobody else took anything: always more than 0
// and never for ever. Negative numbers of tokens count as none.
func (b *Budget) Reserve(now time.Time, c Charge) (q Quotas, retryAfter time.Duration, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.fillLocked(now)
	wants := [...]int64{1, max(c.Input, 0), max(c.Output, 0)}
	ok = true
	var short [len(wants)]bool
	for i, n := range wants {
		if need := b.buckets[i].need(n); !b.buckets[i].has(need) {
			ok, short[i] = false, true
			retryAfter = max(retryAfter, b.buckets[i].until(need))
		}
	}
	if ok {
		for i, n := range wants {
			b.buckets[i].add(-n)
		}
	}
	q = b.quotasLocked()
	q.Requests.Short, q.Input.Short, q.Output.Short = short[requests], short[input], short[output]
	return q, retryAfter, ok
}

// Settle replaces what was reserved for a request by what it has used. It may
// come long after Reserve. When more was used than is left, the next requests
// wait until the debt has been filled up.
func (b *Budget) Settle(now time.Time, reserved, actual Charge) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.fillLocked(now)
	b.buckets[input].add(max(reserved.Input, 0) - max(actual.Input, 0))
	b.buckets[output].add(max(reserved.Output, 0) - max(actual.Output, 0))
}

// Refund gives back a whole reservation, the request included: it was refused
// before an engine saw it.
func (b *Budget) Refund(now time.Time, reserved Charge) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.fillLocked(now)
	b.buckets[requests].add(1)
	b.buckets[input].add(max(reserved.Input, 0))
	b.buckets[output].add(max(reserved.Output, 0))
}

// Quotas returns what is left.
func (b *Budget) Quotas(now time.Time) Quotas {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.fillLocked(now)
	return b.quotasLocked()
}

func (b *Budget) quotasLocked() Quotas {
	return Quotas{
		Requests: b.buckets[requests].quota(),
		Input:    b.buckets[input].quota(),
		Output:   b.buckets[output].quota(),
	}
}

func (b *Budget) fillLocked(now time.Time) {
	passed := now.Sub(b.at)
	if passed <= 0 {
		return
	}
	b.at = now
	for i := range b.buckets {
		b.buckets[i].fill(passed)
	}
}

// bucket is one limit. What it holds is level plus part/period, exactly: many
// short intervals fill it as much as one long one.
type bucket struct {
	limit int64 // 0: there is no limit, and nothing is counted
	level int64 // at most limit; negative when overdrawn
	part  int64 // in [0, period), 0 when the bucket is full
}

func (k *bucket) setLimit(limit int64) {
	used := satSub(k.limit, k.level)
	if k.limit == 0 || limit == 0 {
		*k, used = bucket{}, 0
	}
	k.limit = limit
	k.level = satSub(limit, used)
	k.clamp()
}

func (k *bucket) clamp() {
	if k.level >= k.limit {
		k.level, k.part = k.limit, 0
	}
}

// fill adds what flows in while time passes.
func (k *bucket) fill(passed time.Duration) {
	if k.limit == 0 || k.level == k.limit {
		return
	}
	hi, lo := bits.Mul64(uint64(passed), uint64(k.limit))
	lo, carry := bits.Add64(lo, uint64(k.part), 0)
	hi += carry
	if hi >= uint64(period) {
		// More than 2^64: whatever the level was, it is full.
		k.level = k.limit
		k.clamp()
		return
	}
	tokens, part := bits.Div64(hi, lo, uint64(period))
	k.part = int64(part)
	k.level = satAdd(k.level, int64(min(tokens, math.MaxInt64)))
	k.clamp()
}

// add gives n back, or takes -n.
func (k *bucket) add(n int64) {
	if k.limit == 0 {
		return
	}
	k.level = satAdd(k.level, n)
	k.clamp()
}

// need is the level that must be there for n to be taken.
func (k *bucket) need(n int64) int64 { return min(n, k.limit) }

// has reports whether the level need is there. A request that takes nothing of
// a limit does not wait for the debts of others.
func (k *bucket) has(need int64) bool { return need == 0 || k.level >= need }

// until is how long it takes to fill up to level, which is at most limit.
func (k *bucket) until(level int64) time.Duration {
	if k.level >= level {
		return 0
	}
	// missing*period - part, divided by limit and rounded up.
	hi, lo := bits.Mul64(uint64(level)-uint64(k.level), uint64(period))
	lo, borrow := bits.Sub64(lo, uint64(k.part), 0)
	hi -= borrow
	lo, carry := bits.Add64(lo, uint64(k.limit-1), 0)
	hi += carry
	if hi >= uint64(k.limit) {
		return math.MaxInt64
	}
	d, _ := bits.Div64(hi, lo, uint64(k.limit))
	return time.Duration(min(d, math.MaxInt64))
}

func (k *bucket) quota() Quota {
	if k.limit == 0 {
		return Quota{}
	}
	return Quota{Limit: k.limit, Remaining: max(k.level, 0), Reset: k.until(k.limit)}
}

// satAdd is a+b, or the nearest number that there is.
func satAdd(a, b int64) int64 {
	c := a + b
	switch {
	case a > 0 && b > 0 && c < 0:
		return math.MaxInt64
	case a < 0 && b < 0 && c >= 0:
		return math.MinInt64
	}
	return c
}

// satSub is a-b, or the nearest number that there is.
func satSub(a, b int64) int64 {
	c := a - b
	switch {
	case a >= 0 && b < 0 && c < 0:
		return math.MaxInt64
	case a < 0 && b > 0 && c >= 0:
		return math.MinInt64
	}
	return c
}
