package simulator

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/inferrail/inferrail/policy"
)

// traffic is what an agent sends to one engine, in virtual time, and what it learns
// from the first bytes: prompts of 100 to 30,000 tokens, log-normal, of which up to
// 90 % are cached, in bursts, so that they queue.
type traffic struct {
	r       *rand.Rand
	engine  *Engine
	latency Latency
	// load is how much of the time the engine prefills; noise is how far a prompt
	// is off from what the engine's latency says; jitter is how late, on average,
	// a first byte is seen. Of all prompts whole do not stream, and the clients of
	// leave go away before the first byte.
	load, noise, whole, leave float64
	jitter                    time.Duration
	// slow multiplies what the prompts take, from the next to start on.
	slow float64

	backlog     policy.Backlog
	calibration policy.Calibration
	now, next   time.Duration
	present     []*sent
}

// sent is a request on its way.
type sent struct {
	policy.Entry
	Sequence
	streams  bool
	first    bool
	late     time.Duration // how late its first byte is seen
	departed time.Duration // when its client leaves, if not 0
}

// at is a moment of virtual time as a time.
func (x *traffic) at(t time.Duration) time.Time { return time.Unix(1000, 0).Add(t) }

func (x *traffic) prompt() (uncached, cached int) {
	n := min(max(math.Exp(x.r.NormFloat64()*1.4+7.8), 100), 30000)
	cached = int(n * x.r.Float64() * 0.9)
	return int(n) - cached, cached
}

// run lets time pass until so much more was observed.
func (x *traffic) run(observations int) {
	mean := 0.0
	for range 1000 {
		mean += x.latency.Prefill(x.prompt()).Seconds() / 1000
	}
	for observations > 0 {
		// The next thing that happens.
		var which *sent
		x.now = x.next
		happens := func(r *sent, t time.Duration) {
			if t < x.now {
				which, x.now = r, t
			}
		}
		if t, ok := x.engine.Next(); ok {
			happens(nil, max(t, 0))
		}
		for _, r := range x.present {
			if r.departed > 0 {
				happens(r, r.departed)
			}
			switch {
			case r.streams && !r.first && r.state >= Decoding:
				happens(r, r.First+r.late)
			case r.state == Ended:
				happens(r, r.End+r.late)
			}
		}
		x.engine.Advance(x.now)
		switch {
		case which != nil && which.departed != x.now && which.streams && !which.first:
			which.first = true
			which.departed = 0
			if o, ok := x.backlog.First(&which.Entry, 0, x.at(x.now)); ok {
				x.calibration.Observe(o)
				observations--
			}
		case which != nil:
			x.backlog.Leave(&which.Entry, x.at(x.now))
			x.engine.Depart(&which.Sequence, x.now)
			x.present = slices.DeleteFunc(x.present, func(r *sent) bool { return r == which })
		case x.now == x.next:
			for range 1 + x.r.IntN(6) {
				x.arrive()
			}
			x.next += time.Duration(x.r.ExpFloat64() * 3.5 * mean * x.slow / x.load * 1e9)
		}
	}
}

func (x *traffic) arrive() {
	r := &sent{streams: x.r.Float64() >= x.whole, late: time.Duration(x.r.ExpFloat64() * float64(x.jitter))}
	r.Uncached, r.Cached = x.prompt()
	r.Output = 1 + x.r.IntN(300)
	r.Slow = x.slow * math.Exp(x.noise*x.r.NormFloat64())
	if x.r.Float64() < x.leave {
		r.departed = x.now + time.Duration(x.r.ExpFloat64()*1e9)
	}
	w := policy.Prefill(r.Uncached, r.Cached)
	s := x.calibration.Speed()
	x.backlog.Enter(&r.Entry, w, r.streams, x.at(x.now), s.Time(w))
	x.engine.Arrive(&r.Sequence, x.now)
	x.present = append(x.present, r)
}

// off is how far the prediction of any prompt may be off.
func (x *traffic) off() (worst float64) {
	for range 100 {
		u, c := x.prompt()
		want := x.latency.Prefill(u, c).Seconds() * x.slow
		s := x.calibration.Speed()
		worst = max(worst, math.Abs(s.Time(policy.Prefill(u, c))/want-1))
	}
	return worst
}

// After 500 observations the engine's coefficients are known to 5 %, although prompts
// queue, some do not stream and some clients leave; and when the engine is throttled,
// or is fast again, its speed is known to 10 % after 20. An observation is mostly of
// one first byte, but of a batch where the engine prefills all that wait at once.
func TestCalibrationOfEngine(t *testing.T) {
	f := func(name string, set func(x *traffic)) {
		t.Helper()
		for seed := range uint64(5) {
			x := &traffic{r: rand.New(rand.NewPCG(seed, 1)), latency: Latency{A: 60, B: 0.002, D: 5000, PerToken: 10 * time.Millisecond}, load: 0.7, slow: 1}
			x.engine = NewEngine(x.latency, 1<<20)
			x.engine.apart = true
			set(x)
			x.run(500)
			e := x.calibration.Estimate()
			for _, p := range []float64{e.Speed.A * 1e6 / x.latency.A, e.Speed.B * 1e6 / x.latency.B, e.Speed.D * 1e6 / x.latency.D} {
				if p < 0.95 || p > 1.05 {
					t.Errorf("%s, seed %d: a coefficient is %.3f of the engine's: %+v", name, seed, p, e)
				}
			}
			if !e.Determined {
				t.Errorf("%s, seed %d: %+v", name, seed, e)
			}
			for _, slow := range []float64{8, 1, 2, 1} {
				for _, r := range x.present {
					if r.state == Waiting {
						r.Slow *= slow / x.slow
					}
				}
				x.slow = slow
				x.run(20)
				if off := x.off(); off > 0.1 {
					t.Errorf("%s, seed %d: %v times slower for 20: predictions are off by up to %.0f %%: %+v", name, seed, slow, 100*off, x.calibration.Estimate())
				}
				x.run(100)
			}
		}
	}
	f("as computed", func(x *traffic) {})
	f("noise", func(x *traffic) { x.noise, x.jitter = 0.03, 200*time.Microsecond })
	f("idle mostly", func(x *traffic) { x.load = 0.1; x.noise = 0.03 })
	f("overload", func(x *traffic) { x.load = 1.3; x.noise = 0.03 })
	f("some do not stream", func(x *traffic) { x.whole = 0.3; x.noise = 0.03 })
	f("clients leave", func(x *traffic) { x.leave = 0.2; x.noise = 0.03 })
	f("all at once", func(x *traffic) {
		x.engine.apart, x.engine.first, x.engine.latency.PerToken = false, true, 0
		x.noise = 0.03
	})
}
