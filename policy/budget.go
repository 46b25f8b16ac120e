package policy

import (
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
}

// Quotas are the state of a Budget.
type Quotas struct {
	Requests, Input, Output Quota
}

// Budget is what one API key has left. Its methods may be called from any
// goroutine.
type Budget struct {
	mu sync.Mutex
}
