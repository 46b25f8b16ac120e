package policy

import (
	"math"
	"sync/atomic"
	"time"
)

// Standing is what one agent knows of one replica, but for what is in its cache: what
// it has sent there, how fast the replica has proved to be, and what its engine has
// told of its load. The proxy has one for each replica, and the simulator one for each
// agent and engine; it lives as long as the replica is a member and must not be
// copied. Its methods may be called from any goroutine, wait for nobody for long, and
// allocate nothing. The zero value knows nothing.
type Standing struct {
	// Backlog is what the agent has sent there and is not prefilled, Calibration what
	// was learned of the replica's speed, and Filter what nlms has.
	Backlog     Backlog
	Calibration Calibration
	Filter      Filter

	load        atomic.Pointer[Load] // what was told last, nil for nothing yet
	promises    promises
	seats       seats
	room        room
	prompts     RecentMean  // uncached tokens of prompts that were sent there
	disturbed   atomic.Bool // Backlog was told so
	tellsCached atomic.Bool // the engine has told what it had cached of a prompt
	late        [moments]Lateness
	company     company       // what each request beside it delays a first token by
	habit       habit         // what who comes has met there for some time
	busy        busy          // and how long there were prompts to compute
	begun       begun         // prompts that are computed there in pieces
	lengths     RecentMean    // tokens of those prompts, cached ones included
	settled     RecentMean    // and what of them was cached there alone
	binding     atomic.Uint64 // bits of what bind was told
	behind      atomic.Uint64 // so, too
}

// SetLoad says what the engine has told of its load; nil that nothing is known.
func (s *Standing) SetLoad(l *Load) {
	s.load.Store(l)
	_, waiting := l.Foreign()
	s.Backlog.Disturbed(waiting > 0)
	s.disturbed.Store(waiting > 0)
}

// SetSequences says how many sequences the engine runs at the same time, where those
// are few: further ones wait until another has ended. 0 is any number. supposed: that
// is a guess, and grows when more are seen to run.
func (s *Standing) SetSequences(n int, supposed bool, now time.Time) {
	s.seats.set(s, n, supposed, now)
}

// Sequences is how many sequences the engine is taken to run at the same time, 0 for
// any number.
func (s *Standing) Sequences() int { return int(s.seats.limit.Load()) }

// begin lets a prompt into the backlog: the engine can begin with it.
func (s *Standing) begin(p *Sending, now time.Time) {
	speed := s.Calibration.Speed()
	s.Backlog.Enter(&p.entry, p.work, p.Streams, now, speed.Time(p.work))
}

// Load is what SetLoad was told last.
func (s *Standing) Load() *Load { return s.load.Load() }

// TellsCached reports that the engine has told what it had cached of a prompt, as it
// is expected to do again.
func (s *Standing) TellsCached() bool { return s.tellsCached.Load() }

// Promised is what requests will be to the replica that are about to be sent there.
func (s *Standing) Promised() Work { return s.promises.get() }

// Describe fills c with what is known of the replica at now, whatever the request is:
// all but its names, its cache, its share and its Filter, and what Fit adds. inside is how many requests
// the agent has there, and pending how many are in line for it.
func (s *Standing) Describe(c *Candidate, inside, pending int, now time.Time) {
	speed := s.Calibration.Speed()
	ahead, wait := s.Backlog.Ahead(&speed, now)
	l := s.load.Load()
	fresh := l.Fresh(now)
	requests, waiting := 0, 0
	if fresh {
		requests, waiting = l.Foreign()
	}
	line, longer := s.seats.ahead(pending+requests, now)
	ahead, wait = ahead.Plus(line), wait+longer
	if w := s.promises.get(); w.Prompts > 0 {
		ahead, wait = ahead.Plus(w), wait+speed.Time(w)
	}
	*c = Candidate{}
	c.Speed, c.Ahead, c.Wait = speed, ahead, wait
	s.begun.describe(c)
	inFlight, decoding := inside+pending, max(inside-int(ahead.Prompts), 0)
	c.InFlight, c.Decoding = Count(inFlight), Count(decoding)
	if requests > 0 {
		others := l.ForeignWork(s.prompts.Get())
		c.Ahead, c.Wait = ahead.Plus(others), wait+speed.Time(others)
		c.InFlight, c.Decoding = Count(inFlight+requests), Count(decoding+requests-waiting)
	}
	c.Late = s.late[momentOf(c)].Get()
	c.Company = float32(s.delay(c, now))
	s.busy.add(&s.Backlog, requests > 0, now)
	c.Busy = float32(s.busy.get())
	if fresh {
		c.KV, c.Queued, c.HitRate = float32(l.KV), Count(l.Waiting), float32(l.HitRate)
		c.VRAMFree, c.VRAMTotal = float32(l.VRAMFree), float32(l.VRAMTotal)
	}
}

// delay is Candidate.Company of the candidate that has been described at now.
func (s *Standing) delay(c *Candidate, now time.Time) float64 {
	n := float64(c.InFlight)
	s.habit.add(n, now)
	each, followers := s.company.get(), math.Float64frombits(s.binding.Load())
	return each*(n+followers*(soon*n+eachWay*s.habit.get())) + followers*math.Float64frombits(s.behind.Load())
}

// Settled notes of a request that is sent to the candidate which was chosen, of this
// replica, how much of its prompt is cached there and nowhere else: what an earlier choice
// has decided for it. Of requests with many candidates one in eight tells.
func (s *Standing) Settled(r *Request, candidates []Candidate, chosen int) {
	if len(candidates) > mostCounted && r.Rand%8 != 0 {
		return
	}
	most := 0
	for i := range candidates {
		if i != chosen {
			most = max(most, candidates[i].held(r))
		}
	}
	s.settled.Add(float64(max(candidates[chosen].held(r)-most, 0)))
}

// bind says how many later requests a choice decides for, and how many seconds it counts
// that the prefill of one takes longer here than elsewhere. What was said before of how
// many fades.
func (s *Standing) bind(requests, behind float64) {
	before := math.Float64frombits(s.binding.Load())
	s.binding.Store(math.Float64bits(before + (requests-before)/2))
	if behind >= 0 && behind < MostTTFT {
		s.behind.Store(math.Float64bits(behind))
	}
}

// decoding is how many sequences the replica generates at now.
func (s *Standing) decoding(inside, pending int, now time.Time) int {
	var c Candidate
	s.Describe(&c, inside, pending, now)
	return int(c.Decoding)
}

// moments is of how many kinds momentOf is.
const moments = 4

// momentOf says what a prompt meets that is sent to the candidate: whether others are
// before it, and whether sequences are generated, each of which makes it wait for steps
// of the engine that are under way.
func momentOf(c *Candidate) (moment int) {
	if c.Wait > 0 {
		moment = 1
	}
	if c.Decoding > 0 {
		moment += 2
	}
	return moment
}

// promises are what requests will be to a replica that are going to be sent there,
// so that those which are chosen for meanwhile know of them. Any goroutine may call
// its methods. The zero value is none.
type promises struct{ prompts, tokens, attention atomic.Int64 }

// add adds w, times 1 or -1.
func (s *promises) add(w Work, sign int64) {
	s.tokens.Add(sign * int64(w.Tokens))
	s.attention.Add(sign * int64(w.Attention))
	s.prompts.Add(sign * int64(w.Prompts))
}

func (s *promises) get() Work {
	if s.prompts.Load() == 0 {
		return Work{}
	}
	return Work{Prompts: float64(s.prompts.Load()), Tokens: float64(max(s.tokens.Load(), 0)), Attention: float64(max(s.attention.Load(), 0))}
}

// A Lateness is by how many seconds first tokens are later than foretold, in the
// median: one that is absurd counts as one that is a little off. Any goroutine may use
// it. The zero value is none.
type Lateness struct{ bits atomic.Uint64 }

// Add takes a first token that took so many seconds, foretold without what is said by
// Get, where a short prompt takes as long as short. Of several at once one may be lost.
func (l *Lateness) Add(took, foretold, short float64) {
	late := math.Float64frombits(l.bits.Load())
	most := min(lateStep*(short+math.Abs(late)), 0.01*foretold)
	if took > absurdly*foretold {
		most /= 4
	}
	next := late + min(max((took-foretold-late)*lateStep, -most), most)
	if math.Abs(next) < MostTTFT {
		l.bits.Store(math.Float64bits(next))
	}
}

// lateStep is what part of what it is off a Lateness goes at most with one first token.
const lateStep = 0.05

// absurdly: what takes so many times as long as foretold moves a Lateness little.
const absurdly = 8

// Get is the lateness.
func (l *Lateness) Get() float64 { return math.Float64frombits(l.bits.Load()) }

// meanOver is over how many numbers a RecentMean is taken.
const meanOver = 16

// RecentMean is the mean of the last of some numbers. Any goroutine may use it. The
// zero value has seen none.
type RecentMean struct{ bits atomic.Uint64 }

// Add takes another number. Of several at once one may be lost.
func (m *RecentMean) Add(x float64) {
	mean := math.Float64frombits(m.bits.Load())
	if mean == 0 {
		mean = x
	}
	m.bits.Store(math.Float64bits(mean + (x-mean)/meanOver))
}

// Get is the mean, 0 when there was no number.
func (m *RecentMean) Get() float64 { return math.Float64frombits(m.bits.Load()) }

// Own is what an agent has at a replica at one time. It is a value.
type Own struct {
	At time.Time
	// Requests are there, Waiting of them have no first token, and Tokens is how many
	// uncached ones those have.
	Requests, Waiting, Tokens int
}

// ownLag is how long an engine may count a request after the agent has given it up.
const ownLag = 250 * time.Millisecond

// Own is what the agent has there at now, of whose requests so many are inside.
func (s *Standing) Own(inside int, now time.Time) Own {
	speed := s.Calibration.Speed()
	w, _ := s.Backlog.Ahead(&speed, now)
	line, _ := s.seats.ahead(0, now)
	w = w.Plus(line)
	return Own{now, inside, int(math.Round(w.Prompts)), int(math.Round(w.Tokens))}
}

// most is the larger of each.
func (o Own) most(p Own) Own {
	return Own{o.At, max(o.Requests, p.Requests), max(o.Waiting, p.Waiting), max(o.Tokens, p.Tokens)}
}

// While is the most that the agent can have had there while an engine's report was
// made: asked is what it had when it asked for it, told when it had the answer, and
// before when it had the one before, which counts if that was just before.
func While(asked, told, before Own) Own {
	own := asked.most(told)
	if asked.At.Sub(before.At) < ownLag {
		own = own.most(before)
	}
	return own
}
