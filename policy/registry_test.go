package policy

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
)

// every returns all policies there are, with their default weights.
func every(t testing.TB) (all []Policy) {
	for _, name := range Names() {
		p, err := New(name, nil)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
	return all
}

func TestNew(t *testing.T) {
	f := func(name string, weights map[string]float64, want ...string) {
		t.Helper()
		p, err := New(name, weights)
		switch {
		case len(want) == 0 && (err != nil || p.Name() != name):
			t.Errorf("%s %v: %v, %v", name, weights, p, err)
		case len(want) > 0 && err == nil:
			t.Errorf("%s %v: there is no error", name, weights)
		}
		for _, w := range want {
			if err != nil && !strings.Contains(err.Error(), w) {
				t.Errorf("%s %v: %v; want %q", name, weights, err, w)
			}
		}
	}
	type w = map[string]float64
	for _, name := range Names() {
		f(name, nil)
		f(name, w{})
		f(name, Weights(name))
		f(name, w{"speed": 1}, "policy "+name, `no weight "speed"`)
	}
	f("", nil, `no policy ""`, "cost_model, kv_aware", "sticky")
	f("fastest", w{"own_work": 1}, `no policy "fastest"`, "cost_model")
	f("lmetric", w{"a": 1}, `no weight "a"; it has none`)
	f("kv_aware", w{"prefix": 0, "queue": 1e6})
	f("kv_aware", w{"prefx": 1}, `no weight "prefx"`, "prefix 3", "queue 2", "kv 2", "cpu 0.8", "disk 0.25")
	f("kv_aware", w{"prefix": math.NaN()}, "weight prefix is NaN; want a number from 0 up")
	f("kv_aware", w{"prefix": math.Inf(1)}, "weight prefix is +Inf; want a number from 0 up")
	f("kv_aware", w{"prefix": -1}, "weight prefix is -1; want a number from 0 up")
	f("kv_aware", w{"cpu": 1.5}, "weight cpu is 1.5; want a number from 0 to 1")
	f("kv_aware", w{"cpu": 1.5, "x": 1, "a": 2, "kv": -3}, "weight cpu is", `no weight "x"`, `no weight "a"`, "weight kv is -3")
	f("prefix_hash", w{"bound": 0.9}, "weight bound is 0.9; want a number from 1 up")
	f("sticky", w{"bound": 1, "spare": 0})
	f("nlms", w{"cache_bonus_ms": 200, "cache": 0})
	f("cost_model", w{"own_work": -1}, "weight own_work is -1")

	if !slices.IsSorted(Names()) || !slices.Contains(Names(), Default) {
		t.Errorf("names: %v", Names())
	}
	if Weights("fastest") != nil || Weights("random") == nil {
		t.Error("weights of no policy, and no weights of a policy, are not told apart")
	}
}

// A weight that is given must reach the field that it names, and no other one.
func TestWeightsReachTheirPolicy(t *testing.T) {
	for _, name := range Names() {
		usual, _ := New(name, nil)
		seen := map[string]string{}
		for weight, value := range Weights(name) {
			given := value/2 + 0.5 // within the bounds of any, and another number
			if given == value {
				given = 2
				if _, err := New(name, map[string]float64{weight: 2}); err != nil {
					given = 0.5
				}
			}
			p, err := New(name, map[string]float64{weight: given})
			if err != nil {
				t.Fatal(err)
			}
			was, is := numbersOf(reflect.ValueOf(usual).Elem()), numbersOf(reflect.ValueOf(p).Elem())
			changed := ""
			for i := range is {
				if was[i] != is[i] {
					changed += fmt.Sprint(" ", i)
					if was[i] != value || is[i] != given {
						t.Errorf("%s: %s of %v instead of %v changes %v to %v", name, weight, given, value, was[i], is[i])
					}
				}
			}
			if strings.Count(changed, " ") != 1 {
				t.Errorf("%s: %s changes the fields%s", name, weight, changed)
			}
			if other := seen[changed]; other != "" {
				t.Errorf("%s: %s and %s are one", name, weight, other)
			}
			seen[changed] = weight
		}
	}
}

// numbersOf are all numbers in a policy.
func numbersOf(v reflect.Value) (all []float64) {
	for i := range v.NumField() {
		if f := v.Field(i); f.Kind() == reflect.Struct {
			all = append(all, numbersOf(f)...)
		} else {
			all = append(all, f.Float())
		}
	}
	return all
}

// someCandidates are between 1 and 12, with anything in them that can be; and if
// hostile, that cannot.
func someCandidates(rng *rand.Rand, hostile bool) []Candidate {
	cs := make([]Candidate, 1+rng.IntN(12))
	number := func(x float64) float64 {
		if hostile && rng.IntN(6) == 0 {
			return []float64{math.NaN(), math.Inf(1), math.Inf(-1), -1, 1e300, -1e300, math.MaxFloat64, 0}[rng.IntN(8)]
		}
		return x
	}
	count := func(n int32) int32 {
		if hostile && rng.IntN(6) == 0 {
			return []int32{-1, math.MinInt32, math.MaxInt32, 0}[rng.IntN(4)]
		}
		return n
	}
	small := func() int32 { return rng.Int32N(1 + rng.Int32N(30)) }
	for i := range cs {
		c := &cs[i]
		c.Slot, c.Key = i, mix(uint64(i))
		if rng.IntN(2) == 0 {
			c.Cached = rng.Int32N(8000)
			c.CachedCPU = rng.Int32N(c.Cached + 1)
			c.CachedGPU = rng.Int32N(c.CachedCPU + 1)
			c.Cached, c.CachedCPU, c.CachedGPU = count(c.Cached), count(c.CachedCPU), count(c.CachedGPU)
		}
		c.Ahead = Work{number(float64(small())), number(rng.Float64() * 9000), number(rng.Float64() * 1e7)}
		c.Wait = number(rng.Float64())
		c.Speed = Speed{number(rng.Float64() * 1e-4), number(rng.Float64() * 1e-9), number(rng.Float64() * 0.01)}
		c.Decoding, c.InFlight, c.Queued = count(small()), count(small()), count(small()/4)
		if rng.IntN(4) == 0 {
			c.Begun, c.Rest = count(small()), number(10*rng.Float64())
		}
		switch rng.IntN(4) {
		case 0:
			c.Share = float32(number(rng.Float64()))
		case 1, 2:
			c.Share = 1
		}
		c.KV, c.HitRate = float32(number(rng.Float64())), float32(number(rng.Float64()))
		c.Exact, c.Large = rng.IntN(2) == 0, rng.IntN(4) == 0
		if rng.IntN(2) == 0 {
			c.VRAMTotal = float32(number(80e3))
			c.VRAMFree = float32(number(rng.Float64() * 8e3))
		}
		if rng.IntN(2) == 0 {
			c.Filter = FilterState{0.1 + rng.Float64(), 0.1 + rng.Float64(), number(rng.Float64() * 100), number(rng.Float64() * 5e3), 1 + rng.IntN(30)}
		}
	}
	return cs
}

func someRequest(rng *rand.Rand) *Request {
	r := &Request{Rand: rng.Uint64(), Turn: rng.Uint64N(1000), Tokens: rng.IntN(10000), Output: rng.IntN(3000)}
	if rng.IntN(8) == 0 {
		r.Tokens = 0
	}
	if rng.IntN(8) == 0 {
		r.Output = []int{0, math.MaxInt, math.MinInt, MostOutput}[rng.IntN(4)]
	}
	if rng.IntN(2) == 0 {
		r.Own = []int{rng.IntN(10000), r.Tokens, math.MaxInt, -1}[rng.IntN(4)]
	}
	if rng.IntN(2) == 0 {
		r.Prefix = rng.Uint64()
	}
	if rng.IntN(2) == 0 {
		r.Session = rng.Uint64()
	}
	return r
}

// Whatever a policy is given: a cost is a number, one that is excluded is not
// chosen while another can be, the same seed makes the same choice, the order of
// candidates makes no difference, and nothing is changed but the costs.
func TestPolicyProperties(t *testing.T) {
	for _, p := range every(t) {
		for _, hostile := range []bool{false, true} {
			rng := rand.New(rand.NewPCG(6, 1))
			for n := range 2000 {
				cs, r := someCandidates(rng, hostile), someRequest(rng)
				begunAmong(r, cs)
				fail := func(format string, args ...any) {
					t.Helper()
					t.Fatalf("%s, history %d of hostile %v: %s\n%+v\n%+v", p.Name(), n, hostile, fmt.Sprintf(format, args...), *r, cs)
				}
				before, asked, costs := slices.Clone(cs), *r, make([]float64, len(cs))
				slack := p.Score(r, cs, costs)
				if !(slack >= 0) {
					fail("slack %v", slack)
				}
				possible := false
				for i, c := range costs {
					if math.IsNaN(c) || math.IsInf(c, -1) {
						fail("cost %v of %d", c, i)
					}
					possible = possible || !math.IsInf(c, 1)
				}
				scratch := make([]float64, len(cs))
				choice := Choose(p, r, cs, scratch)
				if possible && math.IsInf(costs[choice.Index], 1) {
					fail("chose %d of %v", choice.Index, costs)
				}
				if again := Choose(p, r, slices.Clone(cs), scratch); again != choice {
					fail("%v, then %v", choice, again)
				}
				if hostile {
					continue // NaN equals nothing, and a sum with 1e300 in it depends on the order
				}
				if !slices.Equal(cs, before) || *r != asked {
					fail("it changed what it was given")
				}
				perm := rng.Perm(len(cs))
				moved := make([]Candidate, len(cs))
				for i, k := range perm {
					moved[i] = cs[k]
				}
				p.Score(r, moved, scratch)
				for i, k := range perm {
					if !about(scratch[i], costs[k]) {
						fail("cost %v of %d is %v when they stand as %v", costs[k], k, scratch[i], perm)
					}
				}
			}
		}
	}
}

// about reports whether sums of the same numbers in another order may be a and b.
func about(a, b float64) bool {
	return a == b || math.Abs(a-b) <= 1e-9*max(math.Abs(a), math.Abs(b))
}

// Replicas that are all alike get the same share of requests that are all different,
// by any policy.
func TestPoliciesShareFairly(t *testing.T) {
	const n, requests = 7, 21000
	for _, p := range every(t) {
		rng := rand.New(rand.NewPCG(6, 3))
		cs := make([]Candidate, n)
		for i := range cs {
			cs[i] = Candidate{Slot: 3 * i, Key: rng.Uint64(), Speed: DefaultSpeed}
		}
		got, costs := make([]int, n), make([]float64, n)
		for turn := range uint64(requests) {
			r := &Request{Rand: rng.Uint64(), Turn: turn, Tokens: 100, Prefix: rng.Uint64(), Session: rng.Uint64()}
			got[Choose(p, r, cs, costs).Index]++
		}
		// Five standard deviations.
		if off := 5 * math.Sqrt(requests/n*(1-1.0/n)); float64(slices.Max(got)) > requests/n+off || float64(slices.Min(got)) < requests/n-off {
			t.Errorf("%s: %v", p.Name(), got)
		}
	}
}

// One that has just come back gets less than the others by any policy that knows
// load, and its share of those that know none.
func TestPoliciesStartSlowly(t *testing.T) {
	const n, requests = 5, 20000
	f := func(name string, least, most float64) {
		t.Helper()
		p, _ := New(name, nil)
		rng := rand.New(rand.NewPCG(6, 4))
		cs := make([]Candidate, n)
		for i := range cs {
			cs[i] = Candidate{Slot: i, Key: rng.Uint64(), Speed: DefaultSpeed}
		}
		cs[2].Share = 0.2
		got, costs := 0, make([]float64, n)
		for turn := range uint64(requests) {
			r := &Request{Rand: rng.Uint64(), Turn: turn, Tokens: 100, Prefix: rng.Uint64(), Session: rng.Uint64()}
			if Choose(p, r, cs, costs).Index == 2 {
				got++
			}
		}
		if share := float64(got) / (requests / n); share < least || share > most {
			t.Errorf("%s: one that takes 0.2 of its share has %v of it", name, share)
		}
	}
	f("round_robin", 0.18, 0.22)
	f("random", 0.21, 0.27) // 0.2 of a share of 1 in 4.2
	f("p2c", 0, 0)
	f("least_request", 0, 0)
	f("lmetric", 0, 0)
	f("kv_aware", 0, 0)
	f("cost_model", 0, 0)
	f("nlms", 0, 0)
}

func TestPoliciesAllocNothing(t *testing.T) {
	rng := rand.New(rand.NewPCG(6, 5))
	for _, p := range every(t) {
		for _, shuffled := range []bool{false, true} {
			cs := make([]Candidate, 256)
			for i := range cs {
				cs[i] = Candidate{Slot: i, Key: rng.Uint64(), InFlight: rng.Int32N(9), Share: []float32{0, 0.5}[rng.IntN(2)], Cached: rng.Int32N(2000), Queued: rng.Int32N(2)}
			}
			if shuffled {
				rng.Shuffle(len(cs), func(i, j int) { cs[i], cs[j] = cs[j], cs[i] })
			}
			r := &Request{Tokens: 2000, Prefix: 7, Session: 8}
			costs := make([]float64, len(cs))
			if n := testing.AllocsPerRun(100, func() { r.Rand++; r.Turn++; Choose(p, r, cs, costs) }); n != 0 {
				t.Errorf("%s: %v allocations", p.Name(), n)
			}
		}
	}
}

// BenchmarkPolicies is a whole decision by each policy, with its default weights,
// among 256 candidates.
func BenchmarkPolicies(b *testing.B) {
	for _, p := range every(b) {
		b.Run(p.Name(), func(b *testing.B) {
			sets := timedSets(256, 64, 0.1, 0.03)
			costs := make([]float64, 256)
			r := Request{Tokens: 8000}
			b.ReportAllocs()
			for i := range b.N {
				n := uint64(i)
				r.Rand, r.Turn, r.Prefix, r.Session = n, n, mix(n), mix(n)
				Choose(p, &r, sets[n%64], costs)
			}
		})
	}
}

// The stories in testdata/policies have a fleet, one candidate a line, and a policy.
// choose asks once and shows the costs; send asks several times and leaves what it
// sends in flight, unless done; without and with take candidates out and back.
func TestPolicyStories(t *testing.T) {
	datadriven.Walk(t, "testdata/policies", func(t *testing.T, path string) {
		var p Policy
		var names []string
		fleet := map[string]*Candidate{}
		out := map[string]bool{}
		turn := uint64(0)
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			var cs []Candidate
			var shown []string
			here := func() {
				cs, shown = cs[:0], shown[:0]
				for _, name := range names {
					if !out[name] {
						cs, shown = append(cs, *fleet[name]), append(shown, name)
					}
				}
			}
			request := func() *Request {
				r := &Request{Rand: mix(turn), Turn: turn}
				for _, arg := range d.CmdArgs {
					if len(arg.Vals) != 1 {
						continue
					}
					v := arg.Vals[0]
					n, _ := strconv.Atoi(v)
					switch arg.Key {
					case "tokens":
						r.Tokens = n
					case "output":
						r.Output = n
					case "prefix":
						r.Prefix = nameKey(v)
					case "session":
						r.Session = nameKey(v)
					}
				}
				turn++
				return r
			}
			switch d.Cmd {
			case "policy":
				weights := map[string]float64{}
				for _, arg := range d.CmdArgs[1:] {
					x, err := strconv.ParseFloat(arg.Vals[0], 64)
					if err != nil {
						t.Fatal(err)
					}
					weights[arg.Key] = x
				}
				next, err := New(d.CmdArgs[0].Key, weights)
				if err != nil {
					return err.Error()
				}
				p, turn = next, 0
				return ""
			case "fleet":
				names, turn = nil, 0
				clear(out)
				for line := range strings.Lines(d.Input) {
					words := strings.Fields(line)
					names = append(names, words[0])
					c := &Candidate{Slot: len(names), Key: nameKey(words[0]), Speed: DefaultSpeed, Exact: true}
					for _, word := range words[1:] {
						set(t, c, word)
					}
					fleet[words[0]] = c
				}
				return ""
			case "set":
				for _, arg := range d.CmdArgs[1:] {
					set(t, fleet[d.CmdArgs[0].Key], arg.Key+"="+arg.Vals[0])
				}
				return ""
			case "without", "with":
				for _, arg := range d.CmdArgs {
					out[arg.Key] = d.Cmd == "without"
				}
				return ""
			case "choose":
				here()
				costs := make([]float64, len(cs))
				choice := Choose(p, request(), cs, costs)
				var s strings.Builder
				fmt.Fprintf(&s, "%s: %s\n", shown[choice.Index], choice.Reason)
				for i, name := range shown {
					fmt.Fprintf(&s, "  %s %.4g\n", name, costs[i])
				}
				return s.String()
			case "send":
				count := 1
				d.MaybeScanArgs(t, "count", &count)
				got, order := map[string]int{}, []string{}
				for range count {
					here()
					r := request()
					if d.HasArg("sessions") {
						r.Session = mix(turn)
					}
					if d.HasArg("prefixes") {
						r.Prefix = mix(turn)
					}
					name := shown[Choose(p, r, cs, make([]float64, len(cs))).Index]
					order = append(order, name)
					got[name]++
					if !d.HasArg("done") {
						fleet[name].InFlight++
					}
				}
				if count <= 12 {
					return strings.Join(order, " ")
				}
				var s strings.Builder
				for _, name := range slices.Sorted(maps.Keys(got)) {
					fmt.Fprintf(&s, "%s %d\n", name, got[name])
				}
				return s.String()
			}
			d.Fatalf(t, "unknown command %s", d.Cmd)
			return ""
		})
	})
}

// set sets a field of a candidate by its name in stories.
func set(t *testing.T, c *Candidate, word string) {
	key, value, _ := strings.Cut(word, "=")
	x, err := strconv.ParseFloat(value, 64)
	if err != nil {
		t.Fatal(err)
	}
	switch key {
	case "in-flight":
		c.InFlight = Count(int(x))
	case "queued":
		c.Queued = Count(int(x))
	case "ahead":
		c.Ahead.Tokens = x
	case "waiting":
		c.Ahead.Prompts = x
	case "kv":
		c.KV = float32(x)
	case "cached":
		c.Cached, c.CachedGPU, c.CachedCPU = Count(int(x)), Count(int(x)), Count(int(x))
	case "cached-gpu":
		c.CachedGPU = Count(int(x))
	case "cached-cpu":
		c.CachedCPU = Count(int(x))
	case "share":
		c.Share = float32(x)
	case "large":
		c.Large = x > 0
	case "vram-free":
		c.VRAMFree = float32(x)
	case "vram":
		c.VRAMTotal = float32(x)
	case "hit-rate":
		c.HitRate = float32(x)
	case "slope":
		c.Filter.Fast, c.Filter.Slow, c.Filter.Samples = x, x, 100
	case "offset":
		c.Filter.Offset = x
	case "mean":
		c.Filter.Mean = x
	default:
		t.Fatalf("a candidate has no %q", key)
	}
}

// nameKey is a key for a name.
func nameKey(name string) (k uint64) {
	for _, b := range []byte(name) {
		k = mix(k ^ uint64(b))
	}
	return k
}

// named is the policy of a name with weights.
func named(t testing.TB, name string, weights map[string]float64) Policy {
	t.Helper()
	p, err := New(name, weights)
	if err != nil {
		t.Fatal(err)
	}
	return p
}
