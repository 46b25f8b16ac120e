package policy

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

func TestForeign(t *testing.T) {
	f := func(l Load, requests, waiting int) {
		t.Helper()
		if r, w := l.Foreign(); r != requests || w != waiting {
			t.Errorf("%+v: %d foreign, %d of them waiting; want %d, %d", l, r, w, requests, waiting)
		}
	}
	f(Load{}, 0, 0)
	// Nobody else.
	f(Load{Running: 3, Waiting: 2, Own: 5, OwnWaiting: 2}, 0, 0)
	f(Load{Running: 3, Own: 3, OwnWaiting: 1}, 0, 0)
	// The agent has sent one that the engine has not seen yet; one that is over at
	// the engine and not yet for the agent is the same.
	f(Load{Running: 3, Own: 4, OwnWaiting: 1}, 0, 0)
	f(Load{Running: 5, Own: 4, OwnWaiting: 1}, 1, 0)
	// Others only.
	f(Load{Running: 3, Waiting: 2}, 5, 2)
	// Both; those of the agent that have no first token may wait, or be computed.
	f(Load{Running: 3, Waiting: 4, Own: 4, OwnWaiting: 2}, 3, 2)
	f(Load{Running: 3, Waiting: 4, Own: 4, OwnWaiting: 4}, 3, 0)
	f(Load{Running: 1, Waiting: 4, Own: 4, OwnWaiting: 0}, 1, 1)
	f(Load{Uncounted: true, Own: 2}, 0, 0)
}

func TestForeignOfNobody(t *testing.T) {
	var l *Load
	if r, w := l.Foreign(); r != 0 || w != 0 || l.ForeignWork(10) != (Work{}) || l.Fresh(time.Time{}) {
		t.Errorf("nil has %d foreign requests, %d waiting, %v, fresh %v", r, w, l.ForeignWork(10), l.Fresh(time.Time{}))
	}
}

func TestFresh(t *testing.T) {
	now := time.Now()
	l := &Load{Asked: now, Told: now.Add(time.Millisecond), Until: now.Add(time.Second)}
	for d, want := range map[time.Duration]bool{0: true, time.Second - 1: true, time.Second: false, time.Hour: false} {
		if l.Fresh(now.Add(d)) != want {
			t.Errorf("after %v it is fresh: %v", d, !want)
		}
	}
	if (&Load{}).Fresh(now) {
		t.Error("a report of nothing is fresh")
	}
}

func TestForeignWork(t *testing.T) {
	f := func(l Load, mean float64, want Work) {
		t.Helper()
		if w := l.ForeignWork(mean); w != want {
			t.Errorf("%+v, mean %v: %+v, want %+v", l, mean, w, want)
		}
	}
	f(Load{Running: 5, WaitingTokens: -1}, 100, Work{})
	f(Load{Waiting: 2, WaitingTokens: -1}, 100, Work{Prompts: 2, Tokens: 200, Attention: 2 * 100 * 50})
	f(Load{Waiting: 1, WaitingTokens: -1}, 0, Work{Prompts: 1, Tokens: 1000, Attention: 1000 * 500})
	f(Load{Waiting: 1, WaitingTokens: -1}, math.NaN(), Work{Prompts: 1, Tokens: 1000, Attention: 1000 * 500})
	// The engine says how many tokens wait, the agent's own among them.
	f(Load{Waiting: 3, WaitingTokens: 700, Own: 1, OwnWaiting: 1, OwnTokens: 300}, 9, Work{Prompts: 2, Tokens: 400, Attention: 2 * 200 * 100})
	f(Load{Waiting: 3, WaitingTokens: 200, Own: 1, OwnWaiting: 1, OwnTokens: 300}, 9, Work{Prompts: 2})
	// What is left of a prompt that is being computed.
	f(Load{Running: 1, WaitingTokens: 500}, 9, Work{Tokens: 500, Attention: 500 * 250})
	f(Load{Running: 1, WaitingTokens: 500, Own: 1}, 9, Work{})
}

// What others have is believed after a few reports, and forgotten after a few;
// the longer the pause between them, the fewer.
func TestFollow(t *testing.T) {
	now := time.Now()
	at := func(d time.Duration, requests int) *Load {
		return &Load{Told: now.Add(d), Running: requests / 2, Waiting: requests - requests/2, WaitingTokens: -1}
	}
	follow := func(every time.Duration, requests ...int) (seen []int) {
		var before *Load
		for i, n := range requests {
			l := at(time.Duration(i)*every, n)
			l.Follow(before)
			r, _ := l.Foreign()
			seen, before = append(seen, r), l
		}
		return seen
	}
	f := func(every time.Duration, requests, want []int) {
		t.Helper()
		if got := follow(every, requests...); !slices.Equal(got, want) {
			t.Errorf("each %v, of %v: %v, want %v", every, requests, got, want)
		}
	}
	f(100*time.Millisecond, []int{10, 10, 10}, []int{10, 10, 10}) // the first is all that is known
	f(100*time.Millisecond, []int{0, 10, 10, 10, 10, 10, 10, 0, 0, 0, 0, 0, 0}, []int{0, 5, 7, 9, 9, 10, 10, 5, 3, 1, 1, 0, 0})
	f(time.Second, []int{0, 10, 0}, []int{0, 10, 0})
	// A clock that was set back.
	l, before := at(0, 4), at(time.Hour, 100)
	l.Follow(before)
	if r, w := l.Foreign(); r != 4 || w != 2 {
		t.Errorf("%d, %d", r, w)
	}
	// Several at a time do not share anything.
	before = at(0, 10)
	before.Follow(nil)
	l = at(50*time.Millisecond, 0)
	l.Follow(before)
	if r, _ := before.Foreign(); r != 10 {
		t.Errorf("the report before has %d now", r)
	}
}

// The world of TestAgentsDoNotSwing: agents that send to the same engines, in
// virtual time. A request is at an engine later than its agent has sent it, and
// over there before the agent knows.
type crowd struct {
	rng     *rand.Rand
	now     time.Duration
	events  []crowdEvent // by time
	engines []crowdEngine
	agents  []crowdAgent
	// view makes of a report what the agent goes by.
	view func(l *Load, before *Load) *Load

	decisions          int
	excess             float64 // of the fullest engine above the mean
	error, errorAmount float64 // of the agents' estimates
	worst              float64
}

type crowdEvent struct {
	at time.Duration
	do func()
}

type crowdEngine struct {
	running int
	waiting []func() // begin
}

type crowdAgent struct {
	own    []int
	before []int // own when it was told last
	loads  []*Load
}

const (
	crowdWay     = 2 * time.Millisecond // from an agent to an engine
	crowdPage    = 6 * time.Millisecond // from asking to being told
	crowdBatch   = 8
	crowdEngines = 4
)

func (w *crowd) after(d time.Duration, do func()) {
	at := w.now + d
	i, _ := slices.BinarySearchFunc(w.events, at, func(e crowdEvent, at time.Duration) int {
		if e.at <= at {
			return -1
		}
		return 1
	})
	w.events = slices.Insert(w.events, i, crowdEvent{at, do})
}

// estimate is how many requests an agent takes an engine to have.
func (w *crowd) estimate(a *crowdAgent, engine int) float64 {
	n := float64(a.own[engine])
	if l := a.loads[engine]; l != nil {
		others, _ := l.Foreign()
		n += float64(others)
	}
	return n
}

func (w *crowd) send(a *crowdAgent, length time.Duration) {
	best, least := 0, math.Inf(1)
	total, most := 0.0, 0.0
	first := w.rng.IntN(crowdEngines)
	for i := range crowdEngines {
		i = (i + first) % crowdEngines
		if n := w.estimate(a, i); n < least {
			best, least = i, n
		}
		has := float64(w.engines[i].running + len(w.engines[i].waiting))
		total, most = total+has, max(most, has)
		off := w.estimate(a, i) - has
		w.error += off / crowdEngines
		w.errorAmount += math.Abs(off) / crowdEngines
		w.worst = max(w.worst, math.Abs(off))
	}
	w.decisions++
	w.excess += most - total/crowdEngines
	a.own[best]++
	e := &w.engines[best]
	begin := func() {
		e.running++
		w.after(length, func() {
			e.running--
			if len(e.waiting) > 0 {
				next := e.waiting[0]
				e.waiting = e.waiting[1:]
				next()
			}
			w.after(crowdWay, func() { a.own[best]-- })
		})
	}
	w.after(crowdWay, func() {
		if e.running < crowdBatch {
			begin()
		} else {
			e.waiting = append(e.waiting, begin)
		}
	})
}

// ask asks an engine for its load, and again and again.
func (w *crowd) ask(a *crowdAgent, engine int) {
	own := a.own[engine]
	l := &Load{WaitingTokens: -1}
	w.after(crowdPage/2, func() { l.Running, l.Waiting = w.engines[engine].running, len(w.engines[engine].waiting) })
	w.after(crowdPage, func() {
		l.Told = time.Unix(0, 0).Add(w.now)
		l.Own = max(own, a.own[engine], a.before[engine])
		a.before[engine] = a.own[engine]
		a.loads[engine] = w.view(l, a.loads[engine])
	})
	w.after(90*time.Millisecond+time.Duration(w.rng.Int64N(int64(20*time.Millisecond))), func() { w.ask(a, engine) })
}

// runCrowd lets agents send rate requests a second in all, which keep the engines
// busy for load of the time.
func runCrowd(seed uint64, agents int, rate, load float64, view func(l, before *Load) *Load) *crowd {
	w := &crowd{rng: rand.New(rand.NewPCG(seed, 1)), engines: make([]crowdEngine, crowdEngines), agents: make([]crowdAgent, agents), view: view}
	length := crowdEngines * crowdBatch / rate * load
	seconds := func(mean float64) time.Duration {
		return time.Duration(mean * w.rng.ExpFloat64() * float64(time.Second))
	}
	for i := range w.agents {
		a := &w.agents[i]
		a.own, a.before, a.loads = make([]int, crowdEngines), make([]int, crowdEngines), make([]*Load, crowdEngines)
		var next func()
		next = func() {
			w.send(a, seconds(length))
			w.after(seconds(float64(agents)/rate), next)
		}
		w.after(seconds(float64(agents)/rate), next)
		for e := range crowdEngines {
			w.after(time.Duration(w.rng.Int64N(int64(100*time.Millisecond))), func() { w.ask(a, e) })
		}
	}
	for w.now < time.Minute {
		e := w.events[0]
		w.events = w.events[1:]
		w.now = e.at
		e.do()
	}
	return w
}

// Several agents before the same engines do not count a request twice, nor do they
// all run after the same report.
func TestAgentsDoNotSwing(t *testing.T) {
	views := map[string]func(l, before *Load) *Load{
		"own":      func(*Load, *Load) *Load { return nil },
		"reports":  func(l, _ *Load) *Load { return l },
		"followed": func(l, before *Load) *Load { l.Follow(before); return l },
	}
	for _, agents := range []int{1, 2, 4} {
		for _, rate := range []float64{20, 80} {
			t.Run(fmt.Sprintf("%d agents, %v a second", agents, rate), func(t *testing.T) {
				excess := map[string]float64{}
				for name, view := range views {
					var n, errs, amount, worst float64
					for seed := range uint64(3) {
						w := runCrowd(seed, agents, rate, 0.85, view)
						n += float64(w.decisions)
						errs, amount, worst = errs+w.error, amount+w.errorAmount, max(worst, w.worst)
						excess[name] += w.excess
					}
					excess[name] /= n
					t.Logf("%-8s the fullest engine has %.2f above the mean; estimates are off by %.2f, %.2f on the whole, %v at most",
						name, excess[name], amount/n, errs/n, worst)
					if name != "followed" {
						continue
					}
					// On average less than half a request is counted twice or missed.
					if math.Abs(errs/n) > 0.5 || amount/n > 1.5 {
						t.Errorf("estimates are off by %.2f, %.2f on the whole", amount/n, errs/n)
					}
				}
				if excess["followed"] > 1.05*min(excess["own"], excess["reports"])+0.1 {
					t.Errorf("the fullest engine has more above the mean with reports than by another view: %v", excess)
				}
			})
		}
	}
}

// What the agent had there counts from when it asked for a report until it was told, and
// from the report before, if that was just before: engines tell of what was there a little
// earlier.
func TestWhile(t *testing.T) {
	now := time.Unix(1000, 0)
	f := func(asked, told, before Own, want int) {
		t.Helper()
		asked.At, told.At = now, now.Add(time.Millisecond)
		if got := While(asked, told, before); got.Requests != want || got.Waiting != want+1 || got.Tokens != want+2 {
			t.Errorf("%+v, %+v, before %+v: %+v, want %d requests", asked, told, before, got, want)
		}
	}
	n := func(requests int) Own { return Own{Requests: requests, Waiting: requests + 1, Tokens: requests + 2} }
	at := func(o Own, ago time.Duration) Own {
		o.At = now.Add(-ago)
		return o
	}
	f(n(3), n(5), Own{}, 5)
	f(n(5), n(3), Own{}, 5)
	f(n(3), n(5), at(n(7), ownLag-time.Millisecond), 7)
	f(n(3), n(5), at(n(7), ownLag), 5)
	f(n(3), n(5), at(n(2), time.Millisecond), 5)
}
