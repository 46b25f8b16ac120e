package policy

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// The stories in testdata/admission run one Admission with a clock of their own. A
// command may begin with after=DURATION, by which the clock moves first.
func TestAdmission(t *testing.T) {
	datadriven.Walk(t, "testdata/admission", func(t *testing.T, path string) {
		now := time.Unix(1_000_000, 0)
		a := new(Admission)
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			duration := func(key string) (length time.Duration) {
				if d.HasArg(key) {
					var s string
					d.ScanArgs(t, key, &s)
					var err error
					if length, err = time.ParseDuration(s); err != nil {
						t.Fatal(err)
					}
				}
				return length
			}
			now = now.Add(duration("after"))
			switch d.Cmd {
			case "rules":
				var mode string
				r := AdmissionRules{Window: duration("window")}
				d.ScanArgs(t, "mode", &mode)
				if d.HasArg("p") {
					var percent int
					d.ScanArgs(t, "p", &percent)
					r.Percentile = float64(percent) / 100
				}
				var err error
				if r.Mode, err = ParseAdmissionMode(mode); err != nil {
					return err.Error()
				}
				a.SetRules(r)
			case "observe":
				n := 1
				if d.HasArg("n") {
					d.ScanArgs(t, "n", &n)
				}
				for range n {
					a.Observe(now, duration("ttft"), duration("waited"))
				}
			case "admit":
				v := a.Admit(now, duration("predicted"), duration("wait"), duration("budget"))
				s := "taken: " + v.Reason
				if v.Refuse {
					s = fmt.Sprintf("refused: %s; again in %v", v.Reason, v.RetryAfter)
				}
				if v.Over {
					s += " (over budget)"
				}
				return s
			default:
				d.Fatalf(t, "unknown command %s", d.Cmd)
			}
			s := a.State(now)
			text := fmt.Sprintf("%s: p%.0f of %d is %v", s.Mode, 100*s.Percentile, s.Samples, s.Observed)
			if s.LateFor > 0 {
				text += fmt.Sprintf("; late for %v, up to a budget of %v", s.LateFor, s.LateBudget)
			}
			return text
		})
	})
}

// overload is a fleet in virtual time: replicas that prefill one prompt after the
// other, an Admission before them, and clients who ask.
type overload struct {
	rng       *rand.Rand
	admission *Admission
	budget    time.Duration
	service   time.Duration // of a prompt, on average
	// way is how long a request takes to a replica.
	way time.Duration
	// belief is what waits and times are predicted to be, of what they are.
	belief float64
	free   []time.Time // when each replica has done what it has
	// firsts are the first tokens to come, the next one first.
	firsts []firstToken

	taken, refused, inTime int
	busy                   time.Duration
}

// firstToken is one that comes at a time. Of its time to it the request has waited so
// much before it was taken.
type firstToken struct {
	at           time.Time
	ttft, waited time.Duration
}

func newOverload(r AdmissionRules, replicas int, belief float64) *overload {
	o := &overload{rng: rand.New(rand.NewPCG(1, 2)), admission: NewAdmission(r),
		budget: time.Second, service: 200 * time.Millisecond, belief: belief}
	o.free = make([]time.Time, replicas)
	return o
}

// ask is one request that has waited for some time.
func (o *overload) ask(now time.Time, waited time.Duration) Verdict {
	for len(o.firsts) > 0 && !o.firsts[0].at.After(now) {
		o.admission.Observe(o.firsts[0].at, o.firsts[0].ttft, o.firsts[0].waited)
		o.firsts = o.firsts[1:]
	}
	best := slices.MinFunc(o.free, time.Time.Compare)
	i := slices.Index(o.free, best)
	wait := max(best.Sub(now), 0)
	service := time.Duration((0.5 + o.rng.Float64()) * float64(o.service))
	believe := func(d time.Duration) time.Duration { return time.Duration(o.belief * float64(d)) }
	v := o.admission.Admit(now, believe(wait+service), believe(wait), o.budget)
	if v.Refuse {
		o.refused++
		return v
	}
	o.taken++
	if waited+wait+service <= o.budget {
		o.inTime++
	}
	o.busy += service
	wait = max(wait, o.way)
	o.free[i] = now.Add(wait + service)
	at, _ := slices.BinarySearchFunc(o.firsts, o.free[i], func(f firstToken, at time.Time) int { return f.at.Compare(at) })
	o.firsts = slices.Insert(o.firsts, at, firstToken{o.free[i], waited + wait + service, waited})
	return v
}

// run lets requests come for a time, at random, at a part of what the fleet can
// do. It forgets the counts of before.
func (o *overload) run(now time.Time, length time.Duration, load float64) (end time.Time) {
	o.taken, o.refused, o.inTime, o.busy = 0, 0, 0, 0
	for end = now.Add(length); ; o.ask(now, 0) {
		gap := o.rng.ExpFloat64() * float64(o.service) / (load * float64(len(o.free)))
		if now = now.Add(time.Duration(gap)); now.After(end) {
			return end
		}
	}
}

// TestAdmissionInOverload: overload comes, and what is taken is mostly in time
// while the replicas have all they can do; the overload goes, and within a second
// nobody is refused any more. So it is when waits are predicted badly, too.
func TestAdmissionInOverload(t *testing.T) {
	for _, belief := range []float64{1, 0.2, 5} {
		for _, replicas := range []int{1, 4, 32} {
			for _, load := range []float64{1.5, 3, 10} {
				t.Run(fmt.Sprintf("%v times the load, %d replicas, predicted are %v of the waits", load, replicas, belief), func(t *testing.T) {
					o := newOverload(AdmissionRules{Mode: Empirical}, replicas, belief)
					now := o.run(time.Unix(1e6, 0), 20*time.Second, 0.5)
					if o.refused > 0 {
						t.Errorf("%d refused of %d at half the load", o.refused, o.taken)
					}
					now = o.run(now, time.Minute, load)
					busy := o.busy.Seconds() / (60 * float64(replicas))
					inTime := float64(o.inTime) / float64(o.taken)
					t.Logf("overload: %d taken, %.0f %% of them in time, %d refused, replicas %.0f %% busy", o.taken, 100*inTime, o.refused, 100*busy)
					least := 0.75
					if belief < 1 {
						least = 0.25 // where observations alone have a say
					}
					if o.refused < o.taken/8 || inTime < least || busy < 0.8 {
						t.Errorf("%d taken, %.2f of them in time, %d refused, replicas busy %.2f", o.taken, inTime, o.refused, busy)
					}
					now = o.run(now, 1500*time.Millisecond, 0.3)
					o.run(now, 30*time.Second, 0.3)
					t.Logf("afterwards: %d taken, %d refused", o.taken, o.refused)
					if o.refused > (o.refused+o.taken)/8 {
						t.Errorf("%d were refused after the overload, and %d taken", o.refused, o.taken)
					}
				})
			}
		}
	}
}

// TestAdmissionOfAQueue: where requests wait instead of being refused, all that are
// served are late, and replicas have all they can do nevertheless: the next request is
// there when one is done.
func TestAdmissionOfAQueue(t *testing.T) {
	for _, replicas := range []int{1, 4, 32} {
		o := newOverload(AdmissionRules{Mode: Empirical}, replicas, 1)
		o.service, o.way, o.budget = 50*time.Millisecond, 10*time.Millisecond, 400*time.Millisecond
		now := time.Unix(1e6, 0)
		const length, step, most = time.Minute, time.Millisecond, 100
		var queue []time.Time // when those that wait have come
		owed := 0.0
		for end := now.Add(length); now.Before(end); now = now.Add(step) {
			for owed += 2 * float64(replicas) * step.Seconds() / o.service.Seconds(); owed >= 1; owed-- {
				if len(queue) < most {
					queue = append(queue, now)
				}
			}
			for len(queue) > 0 && !o.ask(now, now.Sub(queue[0])).Refuse {
				queue = queue[1:]
			}
		}
		busy := o.busy.Seconds() / (length.Seconds() * float64(replicas))
		t.Logf("%d replicas: %d taken, %d in time, replicas %.0f %% busy", replicas, o.taken, o.inTime, 100*busy)
		if busy < 0.95 || busy > 1.1 {
			t.Errorf("%d replicas are %.0f %% busy", replicas, 100*busy)
		}
	}
}

// TestAbsoluteAdmissionIsWorse: of a load that the fleet can serve in time, the
// empirical mode refuses none when predictions are off, and the absolute one a good
// part.
func TestAbsoluteAdmissionIsWorse(t *testing.T) {
	refused := map[AdmissionMode]float64{}
	for mode := range AdmissionMode(len(admissionModes)) {
		o := newOverload(AdmissionRules{Mode: mode}, 4, 3)
		o.run(time.Unix(1e6, 0), 2*time.Minute, 0.85)
		refused[mode] = float64(o.refused) / float64(o.refused+o.taken)
	}
	if refused[RankOnly] > 0 || refused[Empirical] > 0.01 || refused[Absolute] < 0.05 {
		t.Errorf("refused: %v", refused)
	}
}

// TestRetryAfterIsHonest: in the overload, a client that comes back when he was told
// to is taken: nearly always the first time, when the load is over by then.
func TestRetryAfterIsHonest(t *testing.T) {
	o := newOverload(AdmissionRules{Mode: Empirical}, 4, 1)
	now := o.run(time.Unix(1e6, 0), 10*time.Second, 0.5)
	// The agent has let a pile come up before first tokens have told it.
	for range 200 {
		o.ask(now, 0)
		now = now.Add(5 * time.Millisecond)
	}
	var told []time.Time
	for range 100 {
		if v := o.ask(now, 0); v.Refuse {
			told = append(told, now.Add(v.RetryAfter))
			if v.RetryAfter < leastRetry {
				t.Errorf("again in %v", v.RetryAfter)
			}
		}
		now = now.Add(20 * time.Millisecond)
	}
	if len(told) < 50 {
		t.Fatalf("%d were refused", len(told))
	}
	slices.SortFunc(told, time.Time.Compare)
	// A few come; all together would be an overload again.
	asked, again := 0, 0
	for i := 0; i < len(told); i += 5 {
		asked++
		if o.ask(told[i], 0).Refuse {
			again++
		}
	}
	if again > asked/10 {
		t.Errorf("%d of %d were refused again", again, asked)
	}
}

func TestAdmissionAllocatesNothing(t *testing.T) {
	a := NewAdmission(AdmissionRules{Mode: Empirical})
	now := time.Unix(1e6, 0)
	if n := testing.AllocsPerRun(1000, func() {
		now = now.Add(time.Millisecond)
		a.Observe(now, 2*time.Second, 0)
		a.Admit(now, time.Second, time.Second, time.Second)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestAdmissionUnderRaces is for the race detector.
func TestAdmissionUnderRaces(t *testing.T) {
	a := NewAdmission(AdmissionRules{Mode: Empirical})
	now := time.Unix(1e6, 0)
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for j := range 500 {
				at := now.Add(time.Duration(j) * time.Millisecond)
				switch i {
				case 0:
					a.Observe(at, time.Second, 0)
				case 1:
					a.SetRules(AdmissionRules{Mode: AdmissionMode(j % 3)})
				case 2:
					a.Admit(at, time.Second, time.Second, time.Millisecond)
				case 3:
					a.State(at)
				}
			}
		})
	}
	wg.Wait()
	if s := a.State(now.Add(time.Second)); s.Samples != admissionSamples {
		t.Errorf("%+v", s)
	}
}

// BenchmarkAdmission is a decision with all samples there.
// go test -bench Admission ./policy
func BenchmarkAdmission(b *testing.B) {
	a := NewAdmission(AdmissionRules{Mode: Empirical})
	now := time.Unix(1e6, 0)
	for range admissionSamples {
		a.Observe(now, 2*time.Second, 0)
	}
	b.ReportAllocs()
	for b.Loop() {
		a.Admit(now, time.Second, time.Second/8, time.Second)
	}
}

// TestAdmissionFavoursPatience: whatever was observed and asked for before, a request
// that grants more, or would wait less, is not refused where another one is taken.
func TestAdmissionFavoursPatience(t *testing.T) {
	for seed := range uint64(300) {
		// Two that have seen the same.
		var twins [2]*Admission
		for i := range twins {
			rng := rand.New(rand.NewPCG(seed, 6))
			a := NewAdmission(AdmissionRules{Mode: AdmissionMode(rng.IntN(len(admissionModes))), Percentile: rng.Float64()})
			now := time.Unix(1e6, 0)
			for range 50 + rng.IntN(300) {
				now = now.Add(time.Duration(rng.ExpFloat64() * float64(200*time.Millisecond)))
				if rng.IntN(2) == 0 {
					a.Observe(now, time.Duration(rng.ExpFloat64()*float64(time.Second)), 0)
				} else {
					wait := time.Duration(rng.IntN(3)) * time.Duration(rng.ExpFloat64()*float64(time.Second))
					a.Admit(now, wait+time.Second/4, wait, time.Duration(1+rng.IntN(3000))*time.Millisecond)
				}
			}
			a.observed = false // none is taken in spite of all
			twins[i] = a
			if i == 0 {
				continue
			}
			wait, budget := time.Duration(rng.IntN(2))*time.Duration(rng.ExpFloat64()*float64(time.Second)), time.Duration(1+rng.IntN(3000))*time.Millisecond
			fill := time.Duration(rng.IntN(500)) * time.Millisecond
			less := time.Duration(rng.Float64() * float64(wait))
			more := budget + time.Duration(rng.IntN(3000))*time.Millisecond
			one := twins[0].Admit(now, wait+fill, wait, budget)
			other := twins[1].Admit(now, less+fill, less, more)
			if !one.Refuse && other.Refuse {
				t.Fatalf("seed %d: wait %v, budget %v is taken (%s), and %v, %v refused (%s)", seed, wait, budget, one.Reason, less, more, other.Reason)
			}
		}
	}
}
