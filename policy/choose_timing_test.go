package policy

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
	"time"
	"unsafe"
)

// timedTurns is how many different sets of candidates are decided among in turn: so
// many that those of 256 are neither in the processor's first caches when their turn
// comes, nor learned by heart by its branch prediction.
const timedTurns = 64

// timedShapes are fleets in different states.
var timedShapes = []struct {
	name string
	fill func(rng *rand.Rand, c *Candidate)
}{
	{"busy", func(rng *rand.Rand, c *Candidate) {}},
	{"busy, 3 % excluded", func(rng *rand.Rand, c *Candidate) {
		if rng.IntN(33) == 0 {
			c.KV, c.Queued = 0.99, 3
		}
	}},
	{"busy, a tenth of what is cached in memory", func(rng *rand.Rand, c *Candidate) {
		if rng.IntN(10) == 0 {
			c.CachedGPU /= 2
		}
	}},
	{"busy, one of 50 overloaded", func(rng *rand.Rand, c *Candidate) {
		if rng.IntN(50) == 0 {
			c.InFlight = 200
		}
	}},
	{"idle, all alike", func(rng *rand.Rand, c *Candidate) {
		*c = Candidate{Slot: c.Slot, Key: c.Key, Speed: DefaultSpeed, Share: 1, Exact: true}
	}},
	{"idle, seldom busy", func(rng *rand.Rand, c *Candidate) {
		*c = Candidate{Slot: c.Slot, Key: c.Key, Speed: DefaultSpeed, Share: 1, Exact: true, Busy: 0.05 * rng.Float32()}
	}},
}

// timedFleet is n candidates: a quarter of them have a part of the prompt, all have
// requests, and their speeds differ by up to a fifth.
func timedFleet(rng *rand.Rand, n int, fill func(rng *rand.Rand, c *Candidate)) []Candidate {
	cs := make([]Candidate, n)
	for i := range cs {
		c := &cs[i]
		c.Slot, c.Key, c.Exact, c.Share, c.Speed = i, rng.Uint64(), true, 1, DefaultSpeed
		c.Speed.A *= 0.8 + 0.4*rng.Float64()
		if rng.IntN(4) == 0 {
			c.Cached = rng.Int32N(timedTokens)
			c.CachedGPU, c.CachedCPU = c.Cached, c.Cached
		}
		c.InFlight = 16 + rng.Int32N(32)
		c.Decoding = rng.Int32N(c.InFlight)
		c.Ahead = Prefill(rng.IntN(5000), 0)
		c.Wait = c.Speed.Time(c.Ahead)
		c.KV, c.HitRate, c.Busy = 0.9*rng.Float32(), float32(rng.Float64()), 0.4+0.2*rng.Float32()
		c.Filter = FilterState{Fast: 1, Slow: 1, Offset: 50, Mean: 1000 * rng.Float64(), Samples: 100}
		fill(rng, c)
	}
	return cs
}

const timedTokens = 8000

// timedSets are fleets for a quick look by go test -bench Policies: of the cached,
// some have a part in lower tiers, and some candidates are to be excluded.
func timedSets(n, sets int, tiers, pressed float64) (out [][]Candidate) {
	rng := rand.New(rand.NewPCG(1, uint64(n)))
	for range sets {
		out = append(out, timedFleet(rng, n, func(rng *rand.Rand, c *Candidate) {
			if rng.Float64() < tiers {
				c.CachedGPU /= 2
			}
			if rng.Float64() < pressed {
				c.KV, c.Queued = 0.99, 3
			}
		}))
	}
	return out
}

// timedRow is the times of many decisions of one kind.
type timedRow struct {
	Policy     string  `json:"policy"`
	Candidates int     `json:"candidates"`
	Shape      string  `json:"shape"`
	Median     float64 `json:"p50_ns"`
	P99        float64 `json:"p99_ns"`
	// Near is the median where there are only four sets, which stay in the cache
	// next to the processor, as those do that have just been filled.
	Near   float64 `json:"near_p50_ns"`
	Allocs float64 `json:"allocations"`
}

// timedReport is bench/results/policy.json.
type timedReport struct {
	Date    string            `json:"date"`
	Machine map[string]string `json:"machine"`
	ClockNs float64           `json:"clock_ns"` // is in each decision's time
	// CandidateBytes is the size of a Candidate.
	CandidateBytes int        `json:"candidate_bytes"`
	Decisions      []timedRow `json:"decisions"`
}

// TestPolicyTiming measures whole decisions, Score and Choose, of all policies. It
// is run by make bench-policy, which names the results' file in
// INFERRAIL_BENCH_POLICY. Each decision is timed by itself, with the clock's own
// time in it.
func TestPolicyTiming(t *testing.T) {
	results := os.Getenv("INFERRAIL_BENCH_POLICY")
	if results == "" {
		t.Skip("a benchmark; make bench-policy runs it")
	}
	b := timedReport{Date: time.Now().UTC().Format(time.RFC3339), Machine: timedMachine(), CandidateBytes: int(unsafe.Sizeof(Candidate{}))}
	var none []time.Duration
	for range 10000 {
		began := time.Now()
		none = append(none, time.Since(began))
	}
	b.ClockNs = float64(percentile(none, 0.5))
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "policy\tfleet\tcandidates\tmedian ns\tp99 ns\tnear ns\tallocations\t")
	for _, name := range Names() {
		for _, shape := range timedShapes {
			for _, n := range []int{8, 64, 256, 1000} {
				row := timeDecisions(t, name, shape.fill, n)
				row.Shape = shape.name
				if name == Default && n == 256 && (row.Median >= mostDecision || row.Allocs >= 0.01) {
					t.Errorf("among 256, %s: %.0f ns and %.2f allocations; want less than %d ns and none", shape.name, row.Median, row.Allocs, mostDecision)
				}
				b.Decisions = append(b.Decisions, row)
				fmt.Fprintf(w, "%s\t%s\t%d\t%.0f\t%.0f\t%.0f\t%.2f\t\n", name, shape.name, n, row.Median, row.P99, row.Near, row.Allocs)
			}
		}
	}
	w.Flush()
	out, err := json.MarshalIndent(&b, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(results, append(out, '\n'), 0o644); err != nil {
		t.Fatal(err)
	}
}

// mostDecision is what a decision of the default among 256 candidates may take, in ns.
const mostDecision = 1000

// A decision of the default among 256 candidates takes less than a microsecond on the
// machine that bench/results/policy.json names, in every state of a fleet. On any
// machine, busy or not, it takes so many times as long as a sum of one number of each of
// the candidates: three to six, or seven and a half where nothing is done in fours. Both are
// the shortest of many rounds in turn, and twice as slow fails.
func TestDecisionIsShort(t *testing.T) {
	withoutRace(t)
	if inFours {
		t.Run("in fours", func(t *testing.T) { decisionIsShort(t, 7) })
	}
	t.Run("one by one", func(t *testing.T) { oneByOne(func() { decisionIsShort(t, 12) }) })
}

func decisionIsShort(t *testing.T, most float64) {
	p, costs := NewCostModel(), make([]float64, 256)
	for _, shape := range timedShapes {
		rng := rand.New(rand.NewPCG(1, 2))
		var sets [timedTurns][]Candidate
		for i := range sets {
			sets[i] = timedFleet(rng, 256, shape.fill)
		}
		chosen, sum, r := 0, 0.0, Request{Tokens: timedTokens}
		decision, read := time.Duration(math.MaxInt64), time.Duration(math.MaxInt64)
		for range 200 {
			began := time.Now()
			for _, cs := range sets {
				r.Rand++
				chosen += Choose(p, &r, cs, costs).Index
			}
			decided := time.Now()
			for _, cs := range sets {
				for i := range cs {
					sum += cs[i].Wait
				}
			}
			decision, read = min(decision, decided.Sub(began)), min(read, time.Since(decided))
		}
		if ratio := float64(decision) / float64(read); ratio > most {
			t.Errorf("%s: a decision takes %v, %.1f times a sum; want %v (%d, %v)", shape.name, decision/timedTurns, ratio, most, chosen, sum)
		} else {
			t.Logf("%s: a decision takes %v, %.2f times a sum (%d, %v)", shape.name, decision/timedTurns, ratio, chosen, sum)
		}
	}
}

func timeDecisions(t *testing.T, name string, fill func(*rand.Rand, *Candidate), n int) timedRow {
	far, allocs := timeTurns(t, name, fill, n, timedTurns)
	near, _ := timeTurns(t, name, fill, n, 4)
	return timedRow{
		Policy: name, Candidates: n,
		Median: float64(percentile(far, 0.5)), P99: float64(percentile(far, 0.99)), Near: float64(percentile(near, 0.5)),
		Allocs: allocs,
	}
}

// timeTurns returns how long each of many decisions has taken, and how many times
// each has allocated.
func timeTurns(t *testing.T, name string, fill func(*rand.Rand, *Candidate), n, turns int) ([]time.Duration, float64) {
	rng := rand.New(rand.NewPCG(1, uint64(n)))
	sets := make([][]Candidate, turns)
	for i := range sets {
		sets[i] = timedFleet(rng, n, fill)
	}
	p, costs := named(t, name, nil), make([]float64, n)
	took := make([]time.Duration, 0, 20_000)
	runtime.GC()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	var r Request
	for k := range cap(took) {
		r = Request{Rand: rng.Uint64(), Turn: uint64(k), Tokens: timedTokens, Own: timedTokens / 2, Output: 200, Prefix: uint64(k % 7), Session: uint64(k % 1000)}
		began := time.Now()
		Choose(p, &r, sets[k%turns], costs)
		took = append(took, time.Since(began))
	}
	runtime.ReadMemStats(&after)
	return took, float64(after.Mallocs-before.Mallocs) / float64(len(took))
}

// percentile sorts d.
func percentile(d []time.Duration, p float64) time.Duration {
	slices.Sort(d)
	return d[min(int(p*float64(len(d))), len(d)-1)]
}

// timedMachine tells what it was measured on.
func timedMachine() map[string]string {
	m := map[string]string{"go": runtime.Version(), "cpus": fmt.Sprint(runtime.NumCPU()), "arch": runtime.GOARCH}
	if out, err := exec.Command("git", "rev-parse", "HEAD").Output(); err == nil {
		m["commit"] = strings.TrimSpace(string(out))
	}
	if info, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		if found := regexp.MustCompile(`(?m)^model name\s*:\s*(.*)$`).FindSubmatch(info); found != nil {
			m["cpu"] = string(found[1])
		}
	}
	if load, err := os.ReadFile("/proc/loadavg"); err == nil {
		m["load before"], _, _ = strings.Cut(string(load), " ")
	}
	return m
}

// What cost_model reads of a candidate is in one line of memory.
func TestCandidateFillsLines(t *testing.T) {
	var c Candidate
	if size, rest := unsafe.Sizeof(c), unsafe.Offsetof(c.Slot); size%64 != 0 || rest != 64 {
		t.Errorf("a candidate has %d bytes, and what is not scored begins at %d; want whole lines of 64, and the second", size, rest)
	}
}
