package policy

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// realistic is a prompt of 100 to 30,000 tokens, log-normal, of which up to 90 % are
// cached.
func realistic(r *rand.Rand) Work {
	n := min(max(math.Exp(r.NormFloat64()*1.4+7.8), 100), 30000)
	cached := math.Floor(n * r.Float64() * 0.9)
	return Prefill(int(n-cached), int(cached))
}

// noisy is what w takes at speed s, give or take noise.
func noisy(s Speed, w Work, noise float64, r *rand.Rand) Observation {
	return Observation{Work: w, Seconds: s.Time(w) * math.Exp(noise*r.NormFloat64())}
}

// The stories in testdata/calibration run one Calibration of a replica whose speed
// is given by the command truth.
func TestCalibration(t *testing.T) {
	datadriven.Walk(t, "testdata/calibration", func(t *testing.T, path string) {
		k := new(Calibration)
		var truth Speed
		r := rand.New(rand.NewPCG(1, 2))
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			num := func(key string, otherwise float64) float64 {
				if !d.HasArg(key) {
					return otherwise
				}
				var s string
				d.ScanArgs(t, key, &s)
				unit := 1.0
				for suffix, x := range map[string]float64{"%": 1e-2, "ms": 1e-3, "us": 1e-6, "ns": 1e-9} {
					if number, ok := strings.CutSuffix(s, suffix); ok {
						s, unit = number, x
					}
				}
				x, err := strconv.ParseFloat(s, 64)
				if err != nil {
					d.Fatalf(t, "%s: %v", key, err)
				}
				return x * unit
			}
			speed := func() Speed { return Speed{num("a", 0), num("b", 0), num("d", 0)} }
			prompt := func() Work {
				if !d.HasArg("uncached") {
					return realistic(r)
				}
				return Prefill(int(num("uncached", 0)), int(num("cached", 0)))
			}
			switch d.Cmd {
			case "prior":
				k.SetPrior(speed())
			case "truth":
				truth = speed()
				return ""
			case "slower":
				by := num("by", 1)
				truth = Speed{truth.A * by, truth.B * by, truth.D * by}
				return ""
			case "requests":
				for range int(num("n", 1)) {
					o := noisy(truth, prompt(), num("noise", 0), r)
					if r.Float64() < num("absurd", 0) {
						o.Seconds *= num("times", 100)
					}
					k.Observe(o)
				}
			case "predict":
				w := prompt()
				s := k.Speed()
				return fmt.Sprintf("%.4g s, where it takes %.4g s", s.Time(w), truth.Time(w))
			default:
				d.Fatalf(t, "unknown command %s", d.Cmd)
			}
			e := k.Estimate()
			var out strings.Builder
			fmt.Fprintf(&out, "a %.3gus, b %.3gns, d %.3gms", e.Speed.A*1e6, e.Speed.B*1e9, e.Speed.D*1e3)
			if !e.Determined {
				out.WriteString(", not told apart")
			}
			fmt.Fprintf(&out, "\n%d samples, %.1f %% off, %d changes", e.Samples, 100*e.Error, e.Changes)
			return out.String()
		})
	})
}

// speeds are those of replicas of different kinds, from fast GPUs to a CPU.
var speeds = []Speed{
	{60e-6, 1e-9, 5e-3},
	{20e-6, 0.3e-9, 15e-3},
	{100e-6, 5e-9, 1e-3},
	{2e-3, 2e-8, 2e-2},
	{8e-6, 0.4e-9, 8e-3},
}

// After 500 requests of a realistic mix the coefficients are known to 5 %, with
// noise of 3 %, whatever the prior was: or as well as they can be, where one of them
// matters so little that least squares over all observations, with the right
// weights, find it no better.
func TestCalibrationRecovers(t *testing.T) {
	for _, truth := range speeds {
		worst, beyond := 0.0, 0
		const seeds = 40
		for seed := range uint64(seeds) {
			r := rand.New(rand.NewPCG(seed, 3))
			k := new(Calibration)
			if seed%2 == 0 {
				k.SetPrior(speeds[r.IntN(len(speeds))])
			}
			var best matrix
			for range 500 {
				o := noisy(truth, realistic(r), 0.03, r)
				k.Observe(o)
				of := truth.Time(o.Work)
				x := vector{o.Work.Tokens * truth.A / of, o.Work.Attention * truth.B / of, o.Work.Prompts * truth.D / of}
				for i := range x {
					for j := range x {
						best[i][j] += x[i] * x[j]
					}
				}
			}
			e := k.Estimate()
			if !e.Determined || e.Changes != 0 || e.Error > 0.04 {
				t.Errorf("%v, seed %d: %+v", truth, seed, e)
			}
			variance := best.inverseDiagonal()
			for i, p := range []float64{e.Speed.A / truth.A, e.Speed.B / truth.B, e.Speed.D / truth.D} {
				off, least := math.Abs(p-1), 0.03*math.Sqrt(variance[i])
				worst = max(worst, off)
				if off > max(0.05, 2.5*least) {
					beyond++
				}
				if off > max(0.05, 4*least) {
					t.Errorf("%v, seed %d: coefficient %d is off by %v, and must be by %v", truth, seed, i, off, least)
				}
			}
			for range 100 {
				w := realistic(r)
				if p := e.Speed.Time(w) / truth.Time(w); p < 0.97 || p > 1.03 {
					t.Errorf("%v, seed %d: %+v is predicted %v times of what it takes", truth, seed, w, p)
				}
			}
		}
		t.Logf("%v: the worst of %d is off by %.1f %%, %d by more than it should", truth, 3*seeds, worst*100, beyond)
		if beyond > 3*seeds/20 {
			t.Errorf("%v: %d of %d coefficients are off by more than they should", truth, beyond, 3*seeds)
		}
	}
}

// A replica that becomes slower or faster is predicted to 10 % after 20 requests.
func TestCalibrationFollowsChanges(t *testing.T) {
	for _, noise := range []float64{0, 0.03, 0.06} {
		for _, by := range []float64{1.5, 2, 8, 100, 0.5, 0.125} {
			for seed := range uint64(20) {
				r := rand.New(rand.NewPCG(seed, 4))
				truth := speeds[seed%uint64(len(speeds))]
				k := new(Calibration)
				for range 100 + r.IntN(500) {
					k.Observe(noisy(truth, realistic(r), noise, r))
				}
				now := Speed{truth.A * by, truth.B * by, truth.D * by}
				for range 20 {
					k.Observe(noisy(now, realistic(r), noise, r))
				}
				if e := k.Estimate(); e.Changes == 0 {
					t.Errorf("%v times, noise %v, seed %d: no change was seen: %+v", by, noise, seed, e)
				}
				for range 100 {
					w, s := realistic(r), k.Speed()
					if p := s.Time(w) / now.Time(w); p < 0.9 || p > 1.1 {
						t.Errorf("%v times, noise %v, seed %d: %+v is predicted %v times of what it takes", by, noise, seed, w, p)
					}
				}
			}
		}
	}
}

// One that becomes much slower or faster, as by being throttled, is found out by the third
// first token, whatever it was before, and predicted to 20 % then.
func TestCalibrationSeesClearChanges(t *testing.T) {
	for _, noise := range []float64{0, 0.03, 0.06} {
		for _, by := range []float64{2.6, 8, 30, 0.35, 0.03} {
			for seed := range uint64(20) {
				r := rand.New(rand.NewPCG(seed, 12))
				truth := speeds[seed%uint64(len(speeds))]
				k := new(Calibration)
				for range 100 + r.IntN(500) {
					k.Observe(noisy(truth, realistic(r), noise, r))
				}
				now := Speed{truth.A * by, truth.B * by, truth.D * by}
				for n := range fewest {
					if e := k.Estimate(); e.Changes != 0 {
						t.Errorf("%v times, noise %v, seed %d: %d first tokens were taken for a change", by, noise, seed, n)
					}
					k.Observe(noisy(now, realistic(r), noise, r))
				}
				if e := k.Estimate(); e.Changes != 1 {
					t.Errorf("%v times, noise %v, seed %d: %d changes were seen: %+v", by, noise, seed, e.Changes, e)
				}
				for range 100 {
					w, s := realistic(r), k.Speed()
					if p := s.Time(w) / now.Time(w); p < 0.8 || p > 1.25 {
						t.Errorf("%v times, noise %v, seed %d: %+v is predicted %v times of what it takes", by, noise, seed, w, p)
					}
				}
			}
		}
	}
}

// Noise and absurd observations are no change of the replica's speed.
func TestCalibrationRaisesNoFalseAlarm(t *testing.T) {
	for _, noise := range []float64{0, 0.03, 0.1, 0.2} {
		r := rand.New(rand.NewPCG(5, 5))
		truth := speeds[0]
		k := new(Calibration)
		worst := 0.0
		n := 100_000
		if noise != 0.1 {
			n = 20_000
		}
		for i := range n {
			o := noisy(truth, realistic(r), noise, r)
			if r.Float64() < 0.05 {
				o.Seconds *= math.Exp((r.Float64()*2 - 0.5) * math.Log(100))
			}
			k.Observe(o)
			if w, s := realistic(r), k.Speed(); i > 200 {
				worst = max(worst, math.Abs(s.Time(w)/truth.Time(w)-1))
			}
		}
		e := k.Estimate()
		t.Logf("noise %v: predictions are off by %.1f %% at most, %+v", noise, 100*worst, e)
		if e.Changes != 0 || worst > 0.01+noise {
			t.Errorf("noise %v: predictions are off by up to %v, %+v", noise, worst, e)
		}
	}
}

// A replica that is nothing like the prior is known for what it is after three
// requests, give or take what the prior has wrong of the proportions.
func TestCalibrationBegins(t *testing.T) {
	for _, by := range []float64{0.02, 0.3, 3, 50, 300} {
		for seed := range uint64(20) {
			r := rand.New(rand.NewPCG(seed, 10))
			truth := Speed{DefaultSpeed.A * by, DefaultSpeed.B * by * 1.3, DefaultSpeed.D * by * 0.8}
			k := new(Calibration)
			for range fewest {
				k.Observe(noisy(truth, realistic(r), 0.03, r))
			}
			for range 50 {
				w, s := realistic(r), k.Speed()
				if p := s.Time(w) / truth.Time(w); p < 0.75 || p > 1.35 {
					t.Errorf("%v times, seed %d: %+v is predicted %v times of what it takes", by, seed, w, p)
				}
			}
		}
	}
}

// One absurd request moves predictions by less than 1 %, and after ten more nothing
// is left of it.
func TestCalibrationWithoutCrater(t *testing.T) {
	for _, times := range []float64{100, 10, 6, 0.01, 1e6} {
		for _, before := range []int{30, 100, 500} {
			if before < 100 && times < 10 && times > 0.1 {
				continue
			}
			for seed := range uint64(20) {
				r := rand.New(rand.NewPCG(seed, 6))
				truth := speeds[seed%uint64(len(speeds))]
				k, twin := new(Calibration), new(Calibration)
				both := func() {
					o := noisy(truth, realistic(r), 0.03, r)
					k.Observe(o)
					twin.Observe(o)
				}
				check := func(when string, most float64) {
					t.Helper()
					a, b := k.Speed(), twin.Speed()
					for range 50 {
						w := realistic(r)
						if p := a.Time(w)/b.Time(w) - 1; math.Abs(p) > most {
							t.Errorf("%v times, %d before, seed %d: predictions are off by %v %s", times, before, seed, p, when)
						}
					}
				}
				for range before {
					both()
				}
				o := noisy(truth, realistic(r), 0, r)
				o.Seconds *= times
				k.Observe(o)
				check("after it", 0.01)
				for range 10 {
					both()
				}
				later := 0.002
				if before < 100 {
					later = 0.01
				}
				check("later", later)
			}
		}
	}
}

// Prompts that are all alike, for a long time, leave the coefficients as they were
// to each other, and the predictions right.
func TestCalibrationOfOneLength(t *testing.T) {
	for _, before := range []int{0, 500} {
		r := rand.New(rand.NewPCG(7, 7))
		truth := Speed{90e-6, 2e-9, 9e-3}
		k := new(Calibration)
		for range before {
			k.Observe(noisy(truth, realistic(r), 0.03, r))
		}
		known := k.Speed()
		for i := range 20_000 {
			w := Prefill(2000+r.IntN(3), 500)
			k.Observe(noisy(truth, w, 0.05, r))
			s := k.Speed()
			if p := s.Time(w) / truth.Time(w); i > 200 && (p < 0.95 || p > 1.05) {
				t.Fatalf("%d before, %d: predicted %v times of what it takes", before, i, p)
			}
		}
		e := k.Estimate()
		if e.Determined || e.Changes != 0 {
			t.Errorf("%d before: %+v", before, e)
		}
		// With nothing before, the proportions are DefaultSpeed's.
		if before == 0 {
			known = DefaultSpeed
		}
		for _, p := range []float64{e.Speed.B / e.Speed.A / (known.B / known.A), e.Speed.D / e.Speed.A / (known.D / known.A)} {
			if p < 0.7 || p > 1.4 {
				t.Errorf("%d before: %+v has other proportions than %+v", before, e.Speed, known)
			}
		}
	}
}

// Whatever the prior was, in scale and proportions, and whatever the traffic is like,
// its requests are predicted after 300 of them, and after the traffic has become
// another so are those.
func TestCalibrationOfAnything(t *testing.T) {
	worst := 0.0
	for seed := range uint64(150) {
		r := rand.New(rand.NewPCG(seed, 11))
		scaled := func(s Speed, by float64) Speed {
			f := func(x float64) float64 { return x * math.Exp((r.Float64()*2-1)*math.Log(by)) }
			return Speed{f(s.A), f(s.B), f(s.D)}
		}
		truth := scaled(DefaultSpeed, 30)
		k := new(Calibration)
		k.SetPrior(scaled(DefaultSpeed, 30))
		noise := r.Float64() * 0.1
		for range 3 {
			mean, width, reuse := 4+r.Float64()*6, r.Float64()*1.5, r.Float64()
			prompt := func() Work {
				n := min(math.Exp(r.NormFloat64()*width+mean), 100_000)
				cached := n * r.Float64() * reuse
				return Prefill(int(n-cached)+1, int(cached))
			}
			for range 300 {
				k.Observe(noisy(truth, prompt(), noise, r))
			}
			off := make([]float64, 100)
			for i := range off {
				w, s := prompt(), k.Speed()
				off[i] = math.Abs(s.Time(w)/truth.Time(w) - 1)
			}
			slices.Sort(off)
			worst = max(worst, off[50])
			if off[50] > 0.05 || off[90] > 0.15 {
				t.Errorf("seed %d, noise %.3f: predictions are off by %.3f in the median, %.3f at the 90th percentile: %+v for %+v", seed, noise, off[50], off[90], k.Estimate(), truth)
			}
		}
	}
	t.Logf("the worst median is %.3f", worst)
}

// Prompts that are unlike the others, and predicted badly, are learned although
// they are few: they are no outliers.
func TestCalibrationOfFew(t *testing.T) {
	for _, truth := range []Speed{{60e-6, 1e-9, 100e-3}, {20e-6, 20e-9, 5e-3}, {60e-6, 0, 0}, {60e-6, 1e-9, 1}} {
		for seed := range uint64(5) {
			r := rand.New(rand.NewPCG(seed, 12))
			k := new(Calibration)
			for range 1000 {
				k.Observe(noisy(truth, Prefill(2000, 500), 0.03, r))
			}
			before := k.Speed()
			few := []Work{Prefill(50, 500), Prefill(30000, 0), Prefill(300, 60000)}
			for range 1000 {
				w := Prefill(2000, 500)
				if r.IntN(10) == 0 {
					w = few[r.IntN(len(few))]
				}
				k.Observe(noisy(truth, w, 0.03, r))
			}
			for _, w := range few {
				s := k.Speed()
				if p := s.Time(w) / truth.Time(w); p < 0.9 || p > 1.1 {
					t.Errorf("%v, seed %d: %+v is predicted %v times of what it takes, before it was %v: %+v", truth, seed, w, p, before.Time(w)/truth.Time(w), k.Estimate())
				}
			}
		}
	}
}

// Coefficients that are 0 are found to be, and the others are right.
func TestCalibrationOfNothing(t *testing.T) {
	for _, truth := range []Speed{{1e-4, 0, 0}, {0, 0, 1e-2}, {0, 1e-9, 0}, {1e-4, 0, 1e-2}} {
		r := rand.New(rand.NewPCG(8, 8))
		k := new(Calibration)
		for range 1000 {
			k.Observe(noisy(truth, realistic(r), 0.02, r))
		}
		s := k.Speed()
		for range 100 {
			w := realistic(r)
			if p := s.Time(w) / truth.Time(w); p < 0.9 || p > 1.1 {
				t.Errorf("%+v, taken for %+v: %+v is predicted %v times of what it takes", truth, s, w, p)
			}
		}
	}
}

// An engine as vLLM is: in each step it computes at most so many tokens, of the
// prompts that wait in their order, the last of them in part, and one token of each
// sequence that it generates, whose time goes with their number. Nothing of that is
// in the formula, but what is learned of it predicts when first tokens come.
func TestCalibrationOfSteps(t *testing.T) {
	const most, step = 2048, 8e-3
	type request struct {
		Entry
		left, before, sent, predicted float64
		output                        int
	}
	for _, load := range []float64{0.2, 0.5, 0.8} {
		r := rand.New(rand.NewPCG(1, 1))
		b, k := new(Backlog), new(Calibration)
		at := func(t float64) time.Time { return time.Unix(1000, 0).Add(time.Duration(t * 1e9)) }
		now, next := 0.0, 0.0
		var waiting, decoding []*request
		var errors []float64
		for firsts := 0; firsts < 3000; {
			if len(waiting)+len(decoding) == 0 {
				now = max(now, next)
			}
			for ; next <= now; next += r.ExpFloat64() * 0.25 / load {
				w := realistic(r)
				s := k.Speed()
				_, wait := b.Ahead(&s, at(next))
				q := &request{left: w.Tokens, before: w.Attention/w.Tokens - w.Tokens/2, sent: next, predicted: wait + s.Time(w), output: 1 + r.IntN(200)}
				b.Enter(&q.Entry, w, true, at(next), s.Time(w))
				waiting = append(waiting, q)
			}
			now += step + 50e-6*float64(len(decoding))
			decoding = slices.DeleteFunc(decoding, func(q *request) bool {
				if q.output--; q.output > 0 {
					return false
				}
				b.Leave(&q.Entry, at(now))
				return true
			})
			var done []*request
			for room := float64(most); room > 0 && len(waiting) > 0; {
				q := waiting[0]
				n := min(q.left, room)
				now += 60e-6*n + 1e-9*n*(q.before+n/2)
				q.before, q.left, room = q.before+n, q.left-n, room-n
				if q.left == 0 {
					done, waiting = append(done, q), waiting[1:]
				}
			}
			for _, q := range done {
				if firsts++; firsts > 500 {
					took := now - q.sent
					errors = append(errors, math.Abs(q.predicted-took)/took)
				}
				if o, ok := b.First(&q.Entry, len(decoding), at(now)); ok {
					k.Observe(o)
				}
				decoding = append(decoding, q)
			}
		}
		slices.Sort(errors)
		half, most := errors[len(errors)/2], errors[len(errors)*9/10]
		t.Logf("load %v: half of the predictions are off by less than %.1f %%, nine in ten by less than %.1f %%; %+v", load, 100*half, 100*most, k.Estimate())
		if half > 0.1 || most > 0.3 {
			t.Errorf("load %v: predictions are off by %v in the median, %v at the 90th percentile", load, half, most)
		}
	}
}

func TestCalibrationPrior(t *testing.T) {
	k := new(Calibration)
	f := func(s, want Speed) {
		t.Helper()
		k.SetPrior(s)
		got := k.Speed()
		for _, p := range []float64{got.A - want.A, got.B - want.B, got.D - want.D} {
			if math.Abs(p) > 1e-12 {
				t.Errorf("prior %+v: %+v, want %+v", s, got, want)
			}
		}
	}
	if got := k.Speed(); got != DefaultSpeed {
		t.Errorf("nothing is known: %+v", got)
	}
	if e := k.Estimate(); e != (Estimate{Speed: DefaultSpeed}) {
		t.Errorf("nothing is known: %+v", e)
	}
	f(Speed{}, DefaultSpeed)
	f(Speed{A: math.NaN()}, DefaultSpeed)
	f(Speed{A: 1e-3, B: 2e-8, D: 3e-2}, Speed{A: 1e-3, B: 2e-8, D: 3e-2})
	f(Speed{A: -1, B: 1, D: 1}, Speed{A: 1e-3, B: 2e-8, D: 3e-2})
	f(Speed{A: 1, B: 1, D: math.Inf(1)}, Speed{A: 1e-3, B: 2e-8, D: 3e-2})
	f(Speed{A: 2e-3, D: 1e-2}, Speed{A: 2e-3, D: 1e-2})
	f(Speed{A: 1e9, B: 1e9, D: 1e9}, Speed{A: 1, B: 1e-4, D: 60})

	// A better prior that comes when there is an observation counts as well, but
	// not any more when there are many.
	truth := Speed{A: 1e-3, B: 2e-8, D: 3e-2}
	k.Observe(Observation{Work: Prefill(1000, 0), Seconds: truth.Time(Prefill(1000, 0))})
	f(truth, truth)
	for range 10 {
		k.Observe(Observation{Work: Prefill(1000, 0), Seconds: truth.Time(Prefill(1000, 0))})
	}
	f(Speed{A: 7e-3, B: 7e-8, D: 7e-2}, truth)
}

// What cannot be an observation is not taken for one.
func TestCalibrationRefuses(t *testing.T) {
	k := new(Calibration)
	f := func(w Work, seconds float64, want int) {
		t.Helper()
		k.Observe(Observation{Work: w, Seconds: seconds})
		if got := k.Estimate().Samples; got != want {
			t.Errorf("%+v in %v s: %d samples, want %d", w, seconds, got, want)
		}
	}
	nan, inf := math.NaN(), math.Inf(1)
	for _, x := range []float64{nan, inf, -inf, -1} {
		f(Work{x, 100, 5000}, 0.1, 0)
		f(Work{1, x, 5000}, 0.1, 0)
		f(Work{1, 100, x}, 0.1, 0)
		f(Work{1, 100, 5000}, x, 0)
	}
	f(Work{}, 0.1, 0)
	f(Work{1, 100, 5000}, 0, 0)
	f(Work{0, 100, 5000}, 0.1, 0)
	f(Work{1, 0, 5000}, 0.1, 0)
	f(Work{1, 100, 5000}, 1e6, 0)
	f(Work{1, 100, 5000}, 0.1, 1)
	f(Work{1, 0, 0}, 0.01, 2)
}

func TestSlowness(t *testing.T) {
	mean := func(m float64) FilterState { return FilterState{Mean: m, Samples: 100} }
	f := func(s FilterState, want float64, others ...FilterState) {
		t.Helper()
		var all []float64
		for _, o := range append(others, s) {
			if o.Samples >= fewAnswers {
				all = append(all, o.Mean)
			}
		}
		slices.Sort(all)
		if got := s.slowness(all); math.Abs(got-want) > 1e-9 {
			t.Errorf("%+v among %+v: %v, want %v", s, others, got, want)
		}
	}
	f(mean(100), 1)
	f(mean(100), 1, mean(100), mean(120))
	f(mean(290), 1, mean(100), mean(100))
	f(mean(400), 4, mean(100), mean(100))
	f(mean(100), 0.25, mean(400), mean(400))
	f(mean(100), 0.25, mean(400))
	f(mean(400), 1, mean(100))                                      // the faster one of two is the one that is fast
	f(FilterState{Mean: 400, Samples: 19}, 1, mean(100), mean(100)) // few
	f(mean(400), 1, FilterState{Mean: 100, Samples: 19})
	f(mean(0), 1, mean(100), mean(0))
}

// Whatever is observed, the speed is one. The bytes are histories of observations.
func FuzzCalibration(f *testing.F) {
	add := func(xs ...float64) {
		var b []byte
		for _, x := range xs {
			b = binary.LittleEndian.AppendUint64(b, math.Float64bits(x))
		}
		f.Add(b)
	}
	add(1, 100, 5000, 0.01, 1, 1000, 500000, 0.1)
	add(math.NaN(), 1, 1, 1, 1, math.Inf(1), 1, 1, 1, 1, 1, math.NaN(), -1, 1, 1, 1)
	add(1, 1, 0, 3600, 1, 1, 0, 3600, 1, 1, 0, 3600, 1, 1e-300, 0, 3600)
	add(1e6, 1e9, 1e16, 1e-6, 1e6, 1e9, 1e16, 1e-6, 1, 1e-9, 1e-3, 1e-6, 1, 0, 0, 3600)
	f.Fuzz(func(t *testing.T, b []byte) {
		k := new(Calibration)
		for rounds := 0; rounds < 20; rounds++ {
			for at := 0; at+32 <= len(b); at += 32 {
				var x [4]float64
				for i := range x {
					x[i] = math.Float64frombits(binary.LittleEndian.Uint64(b[at+8*i:]))
				}
				if rounds == 0 && at%64 == 32 {
					k.SetPrior(Speed{x[0], x[1], x[2]})
				}
				k.Observe(Observation{Work: Work{x[0], x[1], x[2]}, Seconds: x[3]})
				s := k.Speed()
				for i, c := range []float64{s.A, s.B, s.D} {
					if !(c >= 0 && c <= slowest[i]*(1+1e-9)) {
						t.Fatalf("after %v: %+v", x, s)
					}
				}
				if e := k.Estimate(); !(e.Error >= 0) || e.Speed != s {
					t.Fatalf("after %v: %+v beside %+v", x, e, s)
				}
			}
		}
		// And it learns again.
		truth := speeds[0]
		r := rand.New(rand.NewPCG(9, 9))
		for range 20 * memory {
			k.Observe(noisy(truth, realistic(r), 0.01, r))
		}
		for range 20 {
			w, s := realistic(r), k.Speed()
			if p := s.Time(w) / truth.Time(w); p < 0.9 || p > 1.1 {
				t.Fatalf("%+v afterwards: %+v is predicted %v times of what it takes", s, w, p)
			}
		}
	})
}

func TestCalibrationAllocatesNothing(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	k := new(Calibration)
	k.SetPrior(speeds[1])
	for range 100 {
		k.Observe(noisy(speeds[0], realistic(r), 0.1, r))
	}
	i := 0
	if n := testing.AllocsPerRun(500, func() {
		i++
		k.Observe(noisy(speeds[i/100%2], realistic(r), 0.1, r))
		k.Speed()
		k.Estimate()
		k.SetPrior(speeds[1])
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// go test -bench Calibration ./policy
func BenchmarkCalibrationSpeed(b *testing.B) {
	ks := make([]Calibration, 256)
	for i := range ks {
		ks[i].SetPrior(DefaultSpeed)
	}
	sum := 0.0
	for i := range b.N {
		s := ks[i&255].Speed()
		sum += s.A
	}
	_ = sum
}

func BenchmarkCalibrationObserve(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 1))
	var os [256]Observation
	for i := range os {
		os[i] = noisy(speeds[0], realistic(r), 0.05, r)
	}
	k := new(Calibration)
	b.ReportAllocs()
	for i := range b.N {
		k.Observe(os[i&255])
	}
}

// What is supposed of a slow replica holds for one prompt. Still slow, all is as
// before; fast again, the next one is supposed to be so too, until that is known.
func TestCalibrationSupposes(t *testing.T) {
	slow, fast := Speed{600e-6, 0, 50e-3}, Speed{60e-6, 0, 5e-3}
	var k Calibration
	observe := func(s Speed, tokens int) {
		w := Prefill(tokens, 0)
		k.Observe(Observation{Work: w, Seconds: s.Time(w)})
	}
	seconds := func() float64 { s := k.Speed(); return s.Time(Prefill(1000, 0)) }
	expect := func(when string, s Speed) {
		t.Helper()
		if got, want := seconds(), s.Time(Prefill(1000, 0)); got < 0.8*want || got > 1.25*want {
			t.Fatalf("%s: %v s for a prompt, want %v", when, got, want)
		}
	}
	k.Suppose(fast)
	expect("nothing was observed", DefaultSpeed)
	for i := range 200 {
		observe(slow, 200+100*(i%20))
	}
	expect("slow", slow)
	k.Suppose(Speed{})
	expect("nothing is supposed", slow)
	k.Suppose(fast)
	expect("supposed", fast)
	k.Sent()
	expect("one is under way", slow)
	observe(slow, 900)
	expect("slow still", slow)
	k.Suppose(fast)
	for i := range 2 * window {
		expect("supposed again", fast)
		k.Sent()
		observe(fast, 200+100*i)
	}
	k.Suppose(Speed{A: math.NaN()})
	expect("fast", fast)
}
