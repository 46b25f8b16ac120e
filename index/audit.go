package index

import (
	"fmt"
	"time"
)

// How much has to differ before what is predicted of a slot is believed no more.
// To believe wrongly sends requests where they are slow; to stop wrongly gives up
// every hit there, until it proves right again. So:
//
//   - A response tells something if a block or more was predicted or found, and
//     differs if that is off by more than a block and a quarter of the larger.
//     One block is what a race or a partial answer makes.
//   - Of those that tell something, auditMost of the last auditOf must differ the
//     same way. If all differ, as they do when the engine does not reuse
//     prefixes, that is the sixteenth. If races and preemption make one in
//     twenty differ, it comes about by chance once in 10^12 responses.
//   - One counts in auditEach, so that they take more than ten seconds. A
//     restarted engine differs in all until the agent sees that it was
//     restarted, which takes a second or a few; then Forget begins the audit anew.
//   - Those that differ do not count when requests need more memory than the
//     engine has, or have within loadedFor: then they wait there, and what they
//     find depends on what happens meanwhile.
//
// It is believed again when of auditOf such responses only auditFew have differed
// since, which takes twice as long.
const (
	auditOf   = 32
	auditMost = 16
	auditFew  = 4
	auditEach = 700 * time.Millisecond
	loadedFor = 10 * time.Second
)

// Audited says how well predictions for a slot were, since it has joined. Tokens
// and responses are those of which the engine has told what it found.
type Audited struct {
	Responses, Over, Under   int64 // Over: fewer tokens were found than predicted
	Predicted, Actual, Error int64 // tokens; Error sums how far each was off
	Why                      string
}

// audit compares what was predicted for a slot with what its engine has found.
// It is pure; the mutex of the slot guards it. The zero value believes.
type audit struct {
	Audited
	ever   bool // the engine has told of cached tokens
	recent [auditOf]compared
	n      int // how many of them there are
	next   int
	last   time.Time // of the last of them
}

// compared is one response that tells something.
type compared struct {
	predicted, actual int
	way               int8 // 1 when fewer were found than predicted, -1 when more, else 0
}

// Audit enters that a response's prompt was predicted to have so many tokens
// cached, and the engine has found actual, or has not told where it is not
// reported. It returns why the slot's predictions are not to be believed, ""
// when they are, and whether that is so since this response. The caller sets the
// state.
func (x *Index) Audit(slot, predicted, actual int, reported bool, now time.Time) (why string, changed bool) {
	s := x.lock(slot)
	if s == nil {
		return "", false
	}
	defer s.unlock()
	a := &s.audit
	before := a.Why
	// SGLang tells nothing of nothing.
	if !reported && s.config.AfterPrefill && a.ever {
		reported, actual = true, 0
	}
	if reported && s.shadow.silent < mostSilent {
		loaded := !s.shadow.pressed.IsZero() && now.Sub(s.shadow.pressed) < loadedFor
		a.add(predicted, actual, max(s.config.BlockSize, 1), loaded, now)
	}
	return a.Why, (a.Why == "") != (before == "")
}

// forget begins anew: the engine is another one now.
func (a *audit) forget() {
	a.Why, a.n, a.next, a.ever = "", 0, 0, false
}

func (a *audit) add(predicted, actual, block int, loaded bool, now time.Time) {
	a.ever = true
	off := predicted - actual
	way := int8(0)
	if larger := max(predicted, actual); max(off, -off) > block+larger/4 || larger > 0 && min(predicted, actual) == 0 && larger >= block {
		way = 1
		if off < 0 {
			way = -1
		}
	}
	a.Responses++
	a.Predicted += int64(predicted)
	a.Actual += int64(actual)
	a.Error += int64(max(off, -off))
	switch {
	case off > 0:
		a.Over++
	case off < 0:
		a.Under++
	}
	if max(predicted, actual) < block || loaded && way != 0 || now.Sub(a.last) < auditEach {
		return
	}
	a.last = now
	a.recent[a.next] = compared{predicted, actual, way}
	a.next = (a.next + 1) % auditOf
	a.n = min(a.n+1, auditOf)

	var over, under spell
	for _, c := range a.recent[:a.n] {
		switch c.way {
		case 1:
			over.add(c)
		case -1:
			under.add(c)
		}
	}
	worse := over
	if under.n > over.n {
		worse = under
	}
	switch {
	case a.Why != "":
		if a.n == auditOf && over.n+under.n <= auditFew {
			a.Why = ""
		}
	case worse.n >= auditMost:
		a.Why = a.reason(worse)
		// What it is judged by from now on comes later.
		a.n, a.next = 0, 0
	}
}

// spell sums responses up.
type spell struct{ n, predicted, actual int }

func (s *spell) add(c compared) {
	s.n++
	s.predicted += c.predicted
	s.actual += c.actual
}

// reason says in words what a spell of responses is about that differ the same
// way.
func (a *audit) reason(s spell) string {
	switch {
	case s.actual == 0:
		return fmt.Sprintf("%d of its last %d responses found nothing cached where %d tokens were predicted: its prefix cache is off, or is emptied or bypassed", s.n, a.n, s.predicted)
	case s.actual < s.predicted:
		return fmt.Sprintf("%d of its last %d responses found less cached than was predicted, %d tokens instead of %d: its cache is smaller than the capacity that is assumed, or prompts have other tokens there", s.n, a.n, s.actual, s.predicted)
	}
	return fmt.Sprintf("%d of its last %d responses found more cached than was predicted, %d tokens instead of %d: its cache is larger than the capacity that is assumed, or others send it requests too", s.n, a.n, s.actual, s.predicted)
}
