package policy

import (
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// The stories in testdata/budget run one Budget with a clock of their own. A
// command may begin with after=DURATION, by which the clock moves first.
func TestBudget(t *testing.T) {
	datadriven.Walk(t, "testdata/budget", func(t *testing.T, path string) {
		now := time.Unix(1_000_000, 0)
		b := new(Budget)
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			num := func(key string) (n int64) {
				if d.HasArg(key) {
					d.ScanArgs(t, key, &n)
				}
				return n
			}
			if d.HasArg("after") {
				var s string
				d.ScanArgs(t, "after", &s)
				passed, err := time.ParseDuration(s)
				if err != nil {
					t.Fatal(err)
				}
				now = now.Add(passed)
			}
			c := Charge{Input: num("input"), Output: num("output")}
			rates := Rates{Requests: num("requests"), InputTokens: num("input"), OutputTokens: num("output")}
			switch d.Cmd {
			case "new":
				b = NewBudget(rates, now)
			case "rates":
				b.SetRates(rates, now)
			case "reserve":
				q, wait, ok := b.Reserve(now, c)
				if !ok {
					return fmt.Sprintf("no, again in %v\n%s", wait, q)
				}
				return "yes\n" + q.String()
			case "settle":
				b.Settle(now, c, Charge{Input: num("used-input"), Output: num("used-output")})
			case "refund":
				b.Refund(now, c)
			case "quotas":
			default:
				d.Fatalf(t, "unknown command %s", d.Cmd)
			}
			return b.Quotas(now).String()
		})
	})
}

// String is for the stories.
func (q Quotas) String() string {
	var s strings.Builder
	for _, x := range []struct {
		name string
		Quota
	}{{"requests", q.Requests}, {"input", q.Input}, {"output", q.Output}} {
		if x.Limit == 0 {
			fmt.Fprintf(&s, "%s: no limit\n", x.name)
		} else {
			fmt.Fprintf(&s, "%s: %d of %d, all in %v\n", x.name, x.Remaining, x.Limit, x.Reset)
		}
	}
	return s.String()
}

// budgetModel is a Budget that remembers all that ever happened and plays it
// again, in fractions, whenever it is asked.
type budgetModel struct {
	history []budgetEvent
	latest  time.Time
}

// clock is now, or the latest time that was seen.
func (m *budgetModel) clock(now time.Time) time.Time {
	if now.After(m.latest) {
		m.latest = now
	}
	return m.latest
}

type budgetEvent struct {
	at     time.Time
	limits *[3]int64 // SetRates
	add    [3]int64  // otherwise
}

// levels replays the history up to now.
func (m *budgetModel) levels(now time.Time) (limits [3]int64, levels [3]*big.Rat) {
	for i := range levels {
		levels[i] = new(big.Rat)
	}
	var last time.Time
	fill := func(to time.Time) {
		if !to.After(last) {
			return
		}
		if !last.IsZero() {
			for i := range levels {
				in := new(big.Rat).Mul(ratio(limits[i]), new(big.Rat).SetFrac64(int64(to.Sub(last)), int64(time.Minute)))
				levels[i].Add(levels[i], in)
				if full := ratio(limits[i]); levels[i].Cmp(full) > 0 {
					levels[i] = full
				}
			}
		}
		last = to
	}
	for _, e := range m.history {
		fill(e.at)
		for i := range levels {
			switch {
			case e.limits == nil && limits[i] > 0:
				levels[i].Add(levels[i], ratio(e.add[i]))
			case e.limits != nil && limits[i] > 0:
				levels[i].Add(levels[i], ratio(e.limits[i]-limits[i]))
			case e.limits != nil:
				levels[i] = ratio(e.limits[i])
			}
			if e.limits != nil {
				limits[i] = e.limits[i]
			}
			if full := ratio(limits[i]); levels[i].Cmp(full) > 0 {
				levels[i] = full
			}
		}
	}
	fill(now)
	return limits, levels
}

func ratio(n int64) *big.Rat { return new(big.Rat).SetInt64(n) }

// until is how many nanoseconds it takes to fill from level to n.
func (m *budgetModel) until(limit int64, level *big.Rat, n int64) int64 {
	missing := new(big.Rat).Sub(ratio(n), level)
	if missing.Sign() <= 0 {
		return 0
	}
	ns := missing.Mul(missing, new(big.Rat).SetFrac64(int64(time.Minute), limit))
	q, r := new(big.Int).QuoRem(ns.Num(), ns.Denom(), new(big.Int))
	if r.Sign() > 0 {
		q.Add(q, big.NewInt(1))
	}
	return q.Int64()
}

func (m *budgetModel) quotas(now time.Time) (q Quotas) {
	limits, levels := m.levels(now)
	for i, to := range []*Quota{&q.Requests, &q.Input, &q.Output} {
		if limits[i] > 0 {
			floor := new(big.Int).Div(levels[i].Num(), levels[i].Denom()).Int64()
			*to = Quota{Limit: limits[i], Remaining: max(floor, 0), Reset: time.Duration(m.until(limits[i], levels[i], limits[i]))}
		}
	}
	return q
}

func (m *budgetModel) reserve(now time.Time, c Charge) (short [3]bool, wait time.Duration, ok bool) {
	limits, levels := m.levels(now)
	wants := [3]int64{1, c.Input, c.Output}
	for i, n := range wants {
		if limits[i] > 0 && n > 0 {
			until := time.Duration(m.until(limits[i], levels[i], min(n, limits[i])))
			short[i], wait = until > 0, max(wait, until)
		}
	}
	if wait > 0 {
		return short, wait, false
	}
	m.history = append(m.history, budgetEvent{at: now, add: [3]int64{-1, -c.Input, -c.Output}})
	return short, 0, true
}

// A random history must leave the same in a Budget as in the model, to the
// token and the nanosecond: rounding that added up would be tokens for free.
func TestBudgetAgainstModel(t *testing.T) {
	for seed := range uint64(40) {
		r := rand.New(rand.NewPCG(seed, 1))
		limit := func() int64 {
			return []int64{0, 1, 7, 60, 1000, 123_457, 10_000_000}[r.IntN(7)]
		}
		rates := func() (Rates, *[3]int64) {
			l := [3]int64{limit(), limit(), limit()}
			return Rates{l[0], l[1], l[2]}, &l
		}
		now := time.Unix(1_000_000, 0)
		first, limits := rates()
		b, m := NewBudget(first, now), &budgetModel{history: []budgetEvent{{at: now, limits: limits}}}
		var running []Charge
		for step := range 120 {
			switch r.IntN(5) {
			case 0:
				now = now.Add(time.Duration(r.Int64N(int64(time.Minute))))
			case 1:
				now = now.Add(time.Duration(r.Int64N(1000)))
			case 2:
				now = now.Add(-time.Duration(r.Int64N(int64(time.Second))))
			}
			seen := m.clock(now)
			switch op := r.IntN(10); {
			case op < 5:
				c := Charge{r.Int64N(200), r.Int64N(200)}
				q, wait, ok := b.Reserve(now, c)
				short, wantWait, want := m.reserve(seen, c)
				if got := [3]bool{q.Requests.Short, q.Input.Short, q.Output.Short}; got != short {
					t.Fatalf("seed %d, step %d: Reserve(%+v) finds too little left of %v, want %v", seed, step, c, got, short)
				}
				if ok != want || wait != wantWait {
					t.Fatalf("seed %d, step %d: Reserve(%+v) is %v, again in %v; want %v, %v", seed, step, c, ok, wait, want, wantWait)
				}
				if ok {
					running = append(running, c)
				}
			case op < 8 && len(running) > 0:
				c := running[0]
				running = running[1:]
				if op == 7 {
					b.Refund(now, c)
					m.history = append(m.history, budgetEvent{at: seen, add: [3]int64{1, c.Input, c.Output}})
					break
				}
				used := Charge{r.Int64N(400), r.Int64N(400)}
				b.Settle(now, c, used)
				m.history = append(m.history, budgetEvent{at: seen, add: [3]int64{0, c.Input - used.Input, c.Output - used.Output}})
			case op == 8:
				next, limits := rates()
				b.SetRates(next, now)
				m.history = append(m.history, budgetEvent{at: seen, limits: limits})
			}
			if got, want := b.Quotas(now), m.quotas(seen); got != want {
				t.Fatalf("seed %d, step %d:\n%vwant\n%v", seed, step, got, want)
			}
		}
	}
}

// A client that waits as long as it was told gets in, and not a nanosecond
// earlier.
func TestBudgetRetryAfterIsExact(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 7))
	for range 500 {
		now := time.Unix(1_000_000, 0)
		rates := Rates{1 + r.Int64N(100), 1 + r.Int64N(5000), 1 + r.Int64N(5000)}
		c := Charge{r.Int64N(9000), r.Int64N(9000)}
		early, late := NewBudget(rates, now), NewBudget(rates, now)
		early.Reserve(now, c)
		late.Reserve(now, c)
		early.Settle(now, c, Charge{r.Int64N(20000), r.Int64N(20000)})
		late.mu.Lock()
		late.buckets = early.buckets
		late.mu.Unlock()
		_, wait, ok := early.Reserve(now, c)
		if ok {
			continue
		}
		if wait <= 0 {
			t.Fatalf("refused, and told to come back in %v", wait)
		}
		if _, _, ok := early.Reserve(now.Add(wait-1), c); ok {
			t.Fatalf("%+v of %+v: let in before %v had passed", c, rates, wait)
		}
		if _, again, ok := late.Reserve(now.Add(wait), c); !ok {
			t.Fatalf("%+v of %+v: after %v told to wait for %v more", c, rates, wait, again)
		}
	}
}

func TestBudgetIsNotOverdrawnByRaces(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	b := NewBudget(Rates{Requests: 1000, InputTokens: 7001, OutputTokens: 100_000}, now)
	var in atomic.Int64
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 300 {
				if _, _, ok := b.Reserve(now, Charge{Input: 10, Output: 20}); ok {
					in.Add(1)
				}
				b.Quotas(now.Add(-time.Second))
			}
		})
	}
	all.Wait()
	// The input tokens are what runs out first.
	if in.Load() != 700 {
		t.Errorf("%d were let in, want 700", in.Load())
	}
	if q := b.Quotas(now); q.Input.Remaining != 1 || q.Requests.Remaining != 300 {
		t.Errorf("left: %v", q)
	}
}

// Numbers at the edge must neither wrap nor crash.
func TestBudgetSaturates(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	for _, limit := range []int64{1, math.MaxInt64 - 1, math.MaxInt64, math.MinInt64, -1} {
		b := NewBudget(Rates{limit, limit, limit}, now)
		for _, c := range []Charge{{math.MaxInt64, math.MaxInt64}, {math.MinInt64, math.MinInt64}, {1, math.MaxInt64}} {
			b.Reserve(now, c)
			for range 3 {
				b.Settle(now, Charge{}, Charge{math.MaxInt64, math.MaxInt64})
			}
			q := b.Quotas(now)
			if limit <= 0 && q != (Quotas{}) {
				t.Errorf("limit %d: %v", limit, q)
			}
			if limit > 0 && (q.Input.Remaining != 0 || q.Input.Reset <= 0) {
				t.Errorf("limit %d: overdrawn, but %v", limit, q)
			}
			b.Settle(now, Charge{math.MaxInt64, math.MaxInt64}, Charge{math.MinInt64, math.MinInt64})
			b.Refund(now, Charge{math.MaxInt64, math.MaxInt64})
			b.Refund(now, Charge{math.MaxInt64, math.MaxInt64})
			b.Refund(now, Charge{math.MaxInt64, math.MaxInt64})
			if q := b.Quotas(now); limit > 0 && (q.Input.Remaining != limit || q.Input.Reset != 0) {
				t.Errorf("limit %d: given back, but %v", limit, q)
			}
		}
		b.SetRates(Rates{math.MaxInt64, 1, 5}, now.Add(math.MaxInt64))
		b.SetRates(Rates{}, time.Time{})
	}
	var zero Budget
	if q, _, ok := zero.Reserve(now, Charge{math.MaxInt64, 1}); !ok || q != (Quotas{}) {
		t.Errorf("the zero value limits: %v", q)
	}
}

func TestBudgetAllocatesNothing(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	b := NewBudget(Rates{1000, 1000, 1000}, now)
	c := Charge{10, 10}
	if n := testing.AllocsPerRun(100, func() {
		now = now.Add(time.Millisecond)
		b.Reserve(now, c)
		b.Settle(now, c, Charge{5, 15})
		b.Refund(now, c)
		b.Quotas(now)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// BenchmarkBudget reserves and settles, as every request of a limited key does.
// go test -bench Budget ./policy
func BenchmarkBudget(b *testing.B) {
	now := time.Unix(1_000_000, 0)
	k := NewBudget(Rates{1 << 40, 1 << 40, 1 << 40}, now)
	b.ReportAllocs()
	for b.Loop() {
		now = now.Add(time.Microsecond)
		k.Reserve(now, Charge{100, 256})
		k.Settle(now, Charge{100, 256}, Charge{90, 200})
	}
}
