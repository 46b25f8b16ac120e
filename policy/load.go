package policy

import (
	"math"
	"time"
)

// Load is what an engine, or a rank of it, has told of its load at one time. The
// agent makes one for each report and publishes it; it is immutable, and lives as
// long as somebody looks at it. The zero value tells nothing and is never fresh.
//
// What the engine counts is the load of all who send to it, the agent's own
// included, as it was a while ago. What the agent counts itself is always
// current. So the two are not added: Foreign is what the engine had beyond the
// agent's own, and that is added to what the agent has there now.
//
// Of the agent's own the largest number is taken that it had while the report can
// have been made (see Own). For a request that is sent and not yet seen by the
// engine, or over at the engine and not yet for the agent, one of others' goes
// unseen until the next report; the other way round one would be counted twice,
// and a replica that has just been given up by a client would look busy to the
// agent that has made it free. An error of either kind fades within a few reports:
// nothing is summed up from one to another. A request that an engine makes
// several sequences of (n) is one of the agent's own, and the rest of it looks like
// others': together they are what the engine has.
//
// Several agents before one engine each see the other's requests as foreign, up to
// a report's age ago. No two can count the same request as their own.
type Load struct {
	// Asked and Told are when the agent asked for it and when it had the answer;
	// after Until it is too old to be used.
	Asked, Told, Until time.Time
	// Uncounted: the engine does not tell how many requests it has. Running and
	// Waiting are 0 then, and nothing is foreign.
	Uncounted bool
	// Running and Waiting are the requests in the batch and before it.
	Running, Waiting int
	// WaitingTokens is how many uncached tokens those that wait have together, -1
	// when the engine does not say.
	WaitingTokens int
	// KV is how full the KV cache is with sequences that run, 0 to 1.
	KV float64
	// HitRate is the share of prompt tokens found in the cache lately, 0 to 1.
	HitRate float64
	// KVTold and HitsTold: the engine tells of these two. They are 0 when it does not.
	KVTold, HitsTold bool
	// VRAMFree and VRAMTotal are as in Candidate.
	VRAMFree, VRAMTotal float64
	// Own is how many requests this agent had there, OwnWaiting how many of them
	// had no first token, and OwnTokens how many uncached tokens those had: the
	// largest numbers of when it asked, when it was told, and when it was told the
	// last time, if that was just before. An engine may count one for a moment
	// longer than the agent does.
	Own, OwnWaiting, OwnTokens int

	// What Follow has made of it, if it was called.
	followed                           bool
	others, othersWaiting, othersToken float64
}

// Fresh reports whether l may be used at now. l may be nil: nothing was told.
func (l *Load) Fresh(now time.Time) bool { return l != nil && now.Before(l.Until) }

// foreignFor is how long it takes until what is new in a report counts for two
// thirds. Agents that all went by the last report would send what comes next to the
// same replica, and the report after that would send them all away again. With
// reports each 100 ms and many requests between two of them, two agents let the
// fullest of four engines have 1.28 requests above the mean without this, 1.08 with
// it, and 0.99 when they look at their own requests only; with few requests, where
// these alone mislead, 0.85, 0.89 and 0.95 (TestAgentsDoNotSwing). Longer is no
// better.
const foreignFor = 150 * time.Millisecond

// Follow evens out what is foreign with the report before, which may be nil. The
// agent calls it once, before anybody else knows l.
func (l *Load) Follow(before *Load) {
	requests, waiting, tokens := l.beyond()
	old := 0.0
	if before != nil {
		if passed := l.Told.Sub(before.Told); passed < 0 {
			before = nil // of another time
		} else {
			old = math.Exp(-float64(passed) / float64(foreignFor))
		}
	}
	if before != nil {
		r, w, t := before.foreign()
		requests += old * (r - requests)
		waiting += old * (w - waiting)
		tokens += old * (t - tokens)
	}
	l.followed = true
	l.others, l.othersWaiting, l.othersToken = requests, waiting, tokens
}

// beyond is what the report alone has beyond the agent's own.
//
// Which of those that wait are whose, the engine does not say. The agent's own
// without a first token are taken to be among them, though the engine may have
// begun with one: fewer of others' are supposed to wait then than do.
func (l *Load) beyond() (requests, waiting, tokens float64) {
	n := max(l.Running+l.Waiting-l.Own, 0)
	w := min(max(l.Waiting-l.OwnWaiting, 0), n)
	if n > 0 {
		tokens = float64(max(l.WaitingTokens-l.OwnTokens, 0))
	}
	return float64(n), float64(w), tokens
}

func (l *Load) foreign() (requests, waiting, tokens float64) {
	if l.followed {
		return l.others, l.othersWaiting, l.othersToken
	}
	return l.beyond()
}

// Foreign is what the engine had beyond the agent's own: requests in all, and
// those of them that waited. l may be nil: nothing is known then.
func (l *Load) Foreign() (requests, waiting int) {
	if l == nil {
		return 0, 0
	}
	r, w, _ := l.foreign()
	return int(math.Round(r)), int(math.Round(w))
}

// meanPrompt is how many uncached tokens a prompt is taken to have of which nothing
// is known.
const meanPrompt = 1000

// ForeignWork is what others' requests that wait at the engine have to be computed
// for before one that is sent there now. mean is how many uncached tokens a prompt
// there has lately had; meanPrompt is taken when it is 0 or less. Where the engine
// says how many tokens wait, they are believed instead, less the agent's own. l may
// be nil: none is known then.
//
// What of their prompts is cached is not known, so that the attention to it is
// left out.
func (l *Load) ForeignWork(mean float64) Work {
	if l == nil {
		return Work{}
	}
	_, n, tokens := l.foreign()
	// Where the engine tells them, the rest of a prompt that is being computed in
	// chunks is among them, and none of those that wait has it.
	if l.WaitingTokens < 0 {
		if !(mean > 0) {
			mean = meanPrompt
		}
		tokens = n * mean
	}
	return Work{Prompts: n, Tokens: tokens, Attention: tokens * tokens / max(n, 1) / 2}
}
