package policy

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// The stories in testdata/backlog run one Backlog of a replica that takes a
// millisecond a token. A command may begin with at=DURATION, the time since the
// beginning. Every answer ends with what is ahead.
func TestBacklog(t *testing.T) {
	speed := Speed{A: 1e-3}
	datadriven.Walk(t, "testdata/backlog", func(t *testing.T, path string) {
		start := time.Unix(1_000_000, 0)
		now := start
		b := new(Backlog)
		entries := map[string]*Entry{}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			duration := func(key string) (v time.Duration) {
				if d.HasArg(key) {
					var s string
					d.ScanArgs(t, key, &s)
					var err error
					if v, err = time.ParseDuration(s); err != nil {
						t.Fatal(err)
					}
				}
				return v
			}
			if d.HasArg("at") {
				now = start.Add(duration("at"))
			}
			var out strings.Builder
			names := func() (es []*Entry) {
				for _, a := range d.CmdArgs {
					if len(a.Vals) == 0 && a.Key != "whole" {
						if entries[a.Key] == nil {
							entries[a.Key] = new(Entry)
						}
						es = append(es, entries[a.Key])
					}
				}
				return es
			}
			switch d.Cmd {
			case "enter":
				var tokens float64
				d.ScanArgs(t, "tokens", &tokens)
				for _, e := range names() {
					w := Work{1, tokens, 0}
					b.Enter(e, w, !d.HasArg("whole"), now, speed.Time(w))
				}
			case "first":
				for _, e := range names() {
					if o, ok := b.First(e, 0, now); ok {
						of := ""
						if !o.Own {
							of = "before this one "
						}
						fmt.Fprintf(&out, "observed: %s%v prompts, %v tokens in %.4gs\n", of, o.Work.Prompts, o.Work.Tokens, o.Seconds)
					} else {
						out.WriteString("nothing to conclude\n")
					}
				}
			case "leave":
				for _, e := range names() {
					b.Leave(e, now)
				}
			case "disturbed":
				b.Disturbed(true)
			case "undisturbed":
				b.Disturbed(false)
			case "ahead":
			default:
				d.Fatalf(t, "unknown command %s", d.Cmd)
			}
			w, wait := b.Ahead(&speed, now)
			fmt.Fprintf(&out, "ahead: %v prompts, %v tokens, %.4gs", w.Prompts, w.Tokens, wait)
			return out.String()
		})
	})
}

// A dumb list says what is ahead after any history in which nothing comes due.
func TestBacklogAgainstList(t *testing.T) {
	type prompt struct {
		e       *Entry
		w       Work
		streams bool
	}
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 0))
		speed := Speed{A: 1e-4, B: 1e-9, D: 1e-3}
		now := time.Unix(1000, 0)
		const never = 1800
		b := new(Backlog)
		var list []prompt
		var all []*Entry
		for step := range 500 {
			now = now.Add(time.Duration(r.IntN(1e6)))
			switch r.IntN(5) {
			case 0, 1:
				p := prompt{new(Entry), Prefill(r.IntN(30000), r.IntN(30000)), r.IntN(2) == 0}
				if r.IntN(20) == 0 {
					p.w = Work{}
				}
				b.Enter(p.e, p.w, p.streams, now, never)
				list, all = append(list, p), append(all, p.e)
			case 2:
				if len(all) > 0 {
					e := all[r.IntN(len(all))]
					b.First(e, 0, now)
					if i := slices.IndexFunc(list, func(p prompt) bool { return p.e == e }); i >= 0 {
						var rest []prompt
						for j, p := range list {
							if j > i || j < i && p.streams {
								rest = append(rest, p)
							}
						}
						list = rest
					}
				}
			case 3:
				if len(all) > 0 {
					i := r.IntN(len(all))
					b.Leave(all[i], now)
					list = slices.DeleteFunc(list, func(p prompt) bool { return p.e == all[i] })
					if r.IntN(2) == 0 {
						all = slices.Delete(all, i, i+1)
					}
				}
			}
			var want Work
			for _, p := range list {
				want = want.Plus(p.w)
			}
			got, wait := b.Ahead(&speed, now)
			if got != want {
				t.Fatalf("seed %d, step %d: %+v ahead, want %+v", seed, step, got, want)
			}
			if late := float64(now.Sub(b.epoch)-time.Duration(b.begin)) / 1e9; wait < 0 || wait > speed.Time(want)*(1+1e-12)+max(late-speed.Time(want), 0) {
				t.Fatalf("seed %d, step %d: %v s for %+v, which takes %v", seed, step, wait, want, speed.Time(want))
			}
		}
		for _, e := range all {
			b.Leave(e, now)
			b.Leave(e, now)
			if *e != (Entry{}) {
				t.Fatalf("%+v has left", e)
			}
		}
		zeroBacklog(t, b)
	}
}

// zeroBacklog checks that nothing is left of what was entered.
func zeroBacklog(t *testing.T, b *Backlog) {
	t.Helper()
	if b.sum != (amount{}) || b.streams != 0 || b.spans != 0 || b.first != nil || b.last != nil || b.count.Load() != 0 || b.doubtful != nil {
		t.Fatalf("after all have left: %+v, %d that stream, spans %d, %p to %p, doubt about %p",
			b.sum, b.streams, b.spans, b.first, b.last, b.doubtful)
	}
	if w, wait := b.Ahead(&DefaultSpeed, b.epoch.Add(time.Hour)); w != (Work{}) || wait != 0 {
		t.Fatalf("after all have left: %+v ahead, %v s", w, wait)
	}
}

// worker is a replica of known speed that prefills one prompt after another,
// without pause, in an order of its own. Times are in nanoseconds.
type worker struct {
	order   func(a, b *job) int // which of two goes first
	waiting []*job
	present *job
	ends    int64
}

type job struct {
	Entry
	serial  int
	work    Work
	took    int64
	streams bool
	over    int64 // when its answer is over, once it is prefilled
}

func (k *worker) begin(t int64) {
	if k.present == nil && len(k.waiting) > 0 {
		slices.SortStableFunc(k.waiting, k.order)
		k.present, k.waiting = k.waiting[0], k.waiting[1:]
		k.ends = t + k.present.took
	}
}

// What is concluded from the first bytes of an engine that does one thing after
// another is exactly its speed, whatever happens: prompts that do not stream, whose
// end nobody sees, clients that leave, and an expectation that is off by up to 1.6.
// And if its speed is known, so is what it still has to do.
func TestBacklogObservesExactly(t *testing.T) {
	inOrder := func(a, b *job) int { return a.serial - b.serial }
	shortest := func(a, b *job) int { return int(a.took - b.took) }
	f := func(name string, keepsOrder bool, whole, leave, load, atLeast float64) {
		t.Helper()
		order := shortest
		if keepsOrder {
			order = inOrder
		}
		entered, observed := 0, 0.0
		for seed := range uint64(20) {
			r := rand.New(rand.NewPCG(seed, 7))
			speed := Speed{A: 60e-6, B: 1e-9, D: 5e-3}
			off := 1.0
			if seed%2 == 0 {
				off = math.Exp((r.Float64()*2 - 1) * math.Log(1.6))
			}
			belief := Speed{speed.A * off, speed.B * off, speed.D * off}
			epoch := time.Unix(1000, 0)
			b := new(Backlog)
			k := &worker{order: order}
			var in []*job // entered and not left
			next, now := int64(0), int64(0)
			check := func(o Observation, ok bool) {
				if !ok {
					return
				}
				observed += o.Work.Prompts
				if want := speed.Time(o.Work); math.Abs(o.Seconds-want) > 1e-6*want {
					t.Fatalf("%s, seed %d at %v: observed %+v, which takes %v s", name, seed, time.Duration(now), o, want)
				}
			}
			for range 2000 {
				// What comes next: an arrival, a prefill's end, or an answer's.
				now = next
				if k.present != nil {
					now = min(now, k.ends)
				}
				for _, j := range in {
					if j.over > 0 {
						now = min(now, j.over)
					}
				}
				at := epoch.Add(time.Duration(now))
				if w, wait := b.Ahead(&belief, at); wait < 0 || wait > belief.Time(w)*(1+1e-9)+max(float64(now-b.begin)/1e9-belief.Time(w), 0) {
					t.Fatalf("%s, seed %d: wait %v for %+v", name, seed, wait, w)
				} else if off == 1 && keepsOrder && leave == 0 {
					left := 0.0
					if k.present != nil {
						left = float64(k.ends-now) / 1e9
					}
					for _, j := range k.waiting {
						left += float64(j.took) / 1e9
					}
					if math.Abs(wait-left) > 1e-6 {
						t.Fatalf("%s, seed %d at %v: %v s ahead, but %v s are left", name, seed, time.Duration(now), wait, left)
					}
				}
				if k.present != nil && k.ends == now {
					j := k.present
					k.present = nil
					k.begin(now)
					j.over = now + 1 + int64(r.ExpFloat64()*2e9)
					if j.streams {
						check(b.First(&j.Entry, 0, at))
					}
					continue
				}
				if i := slices.IndexFunc(in, func(j *job) bool { return j.over == now }); i >= 0 {
					if !in[i].streams && r.IntN(2) == 0 {
						check(b.First(&in[i].Entry, 0, at))
					}
					b.Leave(&in[i].Entry, at)
					in = slices.Delete(in, i, i+1)
					continue
				}
				entered++
				j := &job{serial: entered, work: Prefill(1+int(math.Exp(r.NormFloat64()*1.2+6)), r.IntN(4000)), streams: r.Float64() >= whole}
				j.took = int64(speed.Time(j.work) * 1e9)
				b.Enter(&j.Entry, j.work, j.streams, at, belief.Time(j.work))
				in = append(in, j)
				k.waiting = append(k.waiting, j)
				k.begin(now)
				next = now + 1 + int64(r.ExpFloat64()*0.09e9/load)
				if i := r.IntN(len(in)); r.Float64() < leave && in[i].streams && in[i].over == 0 {
					// Its client has gone before the first byte.
					gone := in[i]
					b.Leave(&gone.Entry, at)
					in = slices.Delete(in, i, i+1)
					k.waiting = slices.DeleteFunc(k.waiting, func(j *job) bool { return j == gone })
					if k.present == gone {
						k.present = nil
						k.begin(now)
					}
				}
			}
			for _, j := range in {
				b.Leave(&j.Entry, epoch.Add(time.Duration(now)))
			}
			zeroBacklog(t, b)
		}
		share := observed / float64(entered)
		t.Logf("%s: %.0f %% of %d prompts were in observations", name, 100*share, entered)
		if share < atLeast {
			t.Errorf("%s: only %.0f %% of the prompts were in observations", name, 100*share)
		}
	}
	f("all stream", true, 0, 0, 0.7, 0.95)
	f("overload", true, 0, 0, 1.2, 0.3)
	f("half stream", true, 0.5, 0, 0.6, 0.2)
	f("one in ten streams, overload", true, 0.9, 0, 1.1, 0.1)
	f("clients leave", true, 0.3, 0.2, 0.9, 0.2)
	f("shortest first", false, 0, 0, 0.8, 0.9)
	f("shortest first, overload", false, 0, 0, 1.1, 0.3)
	f("shortest first, clients leave", false, 0, 0.1, 0.9, 0.4)
}

// Entries come, are answered and leave from many goroutines; readers look at what
// is ahead meanwhile.
func TestBacklogConcurrently(t *testing.T) {
	b := new(Backlog)
	stop := make(chan struct{})
	var readers, writers sync.WaitGroup
	start := time.Now()
	for range 2 {
		readers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				w, wait := b.Ahead(&DefaultSpeed, time.Now())
				// All prompts are alike, so a torn reading shows. Where a writer has not come
				// to its turn for long, the silence is wait as well.
				most := DefaultSpeed.Time(w)*(1+1e-9) + time.Since(start).Seconds()
				if w.Tokens != 1000*w.Prompts || w.Prompts < 0 || w.Prompts > 4 || wait < 0 || wait > most {
					t.Errorf("%+v ahead, %v s", w, wait)
					return
				}
			}
		})
	}
	for i := range 4 {
		writers.Go(func() {
			var e Entry
			r := rand.New(rand.NewPCG(uint64(i), 1))
			for range 2000 {
				now := time.Now()
				b.Enter(&e, Work{1, 1000, 0}, r.IntN(3) > 0, now, r.Float64()*1e-4)
				if r.IntN(2) == 0 {
					b.First(&e, 1, time.Now())
				}
				b.Disturbed(r.IntN(9) == 0)
				b.Leave(&e, time.Now())
			}
		})
	}
	writers.Wait()
	close(stop)
	readers.Wait()
	b.Ahead(&DefaultSpeed, start)
	zeroBacklog(t, b)
}

// Whatever number a Work has, what is ahead are numbers, and nothing is left.
func TestBacklogOddWork(t *testing.T) {
	odd := []float64{math.NaN(), math.Inf(1), math.Inf(-1), -1, 0, 1e300, 0.1, math.SmallestNonzeroFloat64}
	b := new(Backlog)
	now := time.Unix(1, 0)
	var entries []*Entry
	for _, x := range odd {
		for _, y := range odd {
			e := new(Entry)
			b.Enter(e, Work{x, y, x}, true, now, y)
			entries = append(entries, e)
		}
	}
	w, wait := b.Ahead(&DefaultSpeed, now)
	if !(w.Prompts > 0 && w.Tokens > 0 && wait > 0) || math.IsInf(wait, 0) {
		t.Errorf("%+v ahead, %v s", w, wait)
	}
	for _, e := range entries {
		b.First(e, 0, now)
		b.Leave(e, now)
	}
	zeroBacklog(t, b)
}

func TestBacklogAllocatesNothing(t *testing.T) {
	b := new(Backlog)
	es := make([]Entry, 8)
	now := time.Unix(1, 0)
	if n := testing.AllocsPerRun(100, func() {
		for i := range es {
			b.Enter(&es[i], Work{1, 100, 100}, i%2 == 0, now, 1e-3)
		}
		now = now.Add(time.Second)
		b.Ahead(&DefaultSpeed, now)
		for i := range es {
			b.First(&es[i], 1, now)
			b.Leave(&es[i], now)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// The benchmarks are of single calls on one goroutine: go test -bench Backlog ./policy
func BenchmarkBacklogAheadEmpty(b *testing.B) {
	bs := make([]Backlog, 256)
	now := time.Now()
	for i := range b.N {
		bs[i&255].Ahead(&DefaultSpeed, now)
	}
}

func BenchmarkBacklogAhead(b *testing.B) {
	bs, es := make([]Backlog, 256), make([][3]Entry, 256)
	now := time.Now()
	for i := range bs {
		for j := range es[i] {
			bs[i].Enter(&es[i][j], Work{1, 1000, 1e6}, true, now, 1)
		}
	}
	now = now.Add(time.Millisecond)
	for i := range b.N {
		bs[i&255].Ahead(&DefaultSpeed, now)
	}
}

func BenchmarkBacklogEnterFirstLeave(b *testing.B) {
	var l Backlog
	var e Entry
	now := time.Now()
	for range b.N {
		now = now.Add(3 * time.Millisecond)
		l.Enter(&e, Work{1, 1000, 1e6}, true, now, 1)
		l.First(&e, 1, now.Add(time.Millisecond))
		l.Leave(&e, now.Add(time.Millisecond))
	}
}
