package virtual

import (
	"context"
	"fmt"
	"math/rand/v2"
	"reflect"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/simulator"
	"github.com/inferrail/inferrail/simulator/workload"
)

// scene is a workload and a fleet, drawn from a seed.
type scene struct {
	workload *workload.Workload
	fleet    Fleet
	policy   policy.Policy
	seed     uint64
}

func (s *scene) String() string {
	return fmt.Sprintf("%s under %s: %d %s of %d blocks of %d, %d agents, events %v, hold %v, pieces of %v, ahead %v, admission %+v", s.workload.Name, s.policy.Name(), len(s.fleet.Engines),
		s.fleet.Engines[0].Engine, s.fleet.Engines[0].NumGPUBlocks, s.fleet.Engines[0].BlockSize, s.fleet.Agents, s.fleet.Events, s.fleet.Hold, s.fleet.Pieces, s.fleet.Prewarm, s.fleet.Admission)
}

// newScene draws one in which caches are full, queues are long, and now and then an engine
// is slow or requests are refused.
func newScene(t testing.TB, seed uint64) *scene {
	rng := rand.New(rand.NewPCG(seed, 9))
	pick := func(list ...string) string { return list[rng.IntN(len(list))] }
	w, err := workload.Generate(workload.Options{
		Name: pick("w1", "w2", "w3", "w4", "w5", "w6"), Seed: seed, Rate: 2 + 30*rng.Float64(), Requests: 60 + rng.IntN(100),
		Own: 50 + rng.IntN(300), Shared: 200 + rng.IntN(1000), Output: 5 + rng.IntN(60), Longest: 3000,
	})
	if err != nil {
		t.Fatal(err)
	}
	cfg := simulator.Config{
		Engine: pick("vllm", "vllm", "sglang", "sglang", "tgi", "llamacpp", "ollama"), BlockSize: 16 << rng.IntN(3), MaxNumSeqs: 2 + rng.IntN(30),
		PrefillA: 100 * rng.Float64(), PrefillB: 0.01 * rng.Float64(), PrefillD: 5000, TimePerOutputToken: time.Duration(1+rng.IntN(20)) * time.Millisecond,
	}
	cfg.NumGPUBlocks = (6000 + rng.IntN(20_000)) / cfg.BlockSize
	cfg.MaxModelLen = (cfg.NumGPUBlocks - 1) * cfg.BlockSize
	if cfg.Engine == "llamacpp" || cfg.Engine == "ollama" {
		cfg.MaxNumSeqs = max(1, cfg.MaxModelLen/4500) // each has its part of the cache
		cfg.MaxModelLen = 0
	}
	s := &scene{workload: w, seed: seed, fleet: Fleet{
		Engines: slices.Repeat([]simulator.Config{cfg}, 1+rng.IntN(5)), Agents: 1 + rng.IntN(3), Events: rng.IntN(2) == 0,
		EventLag: time.Duration(rng.IntN(5)) * time.Millisecond, Lag: time.Duration(rng.IntN(1000)) * time.Microsecond,
	}}
	if rng.IntN(3) == 0 {
		s.fleet.Throttles = []workload.Throttle{{Engine: 0, Factor: 4, At: time.Second, Until: 4 * time.Second}}
	}
	if rng.IntN(3) == 0 {
		s.fleet.Admission = Admission{Mode: pick(policy.AdmissionModes()...), Budget: time.Duration(10+rng.IntN(500)) * time.Millisecond,
			Queue: 10 * rng.IntN(3), Timeout: time.Duration(rng.IntN(3)) * time.Second}
	}
	names := policy.Names()
	if s.policy, err = policy.New(names[rng.IntN(len(names))], nil); err != nil {
		t.Fatal(err)
	}
	if s.fleet.Admission.Mode == "" && rng.IntN(2) == 0 {
		s.fleet.Hold = time.Duration(1+rng.IntN(300)) * time.Millisecond
	}
	if rng.IntN(2) == 0 {
		s.fleet.Pieces = time.Duration(5+rng.IntN(40)) * time.Millisecond
		for i := range s.fleet.Engines {
			// Or hardly any prompt would be worth cutting.
			e := &s.fleet.Engines[i]
			e.PrefillA, e.PrefillD = 100+e.PrefillA, 50
		}
		if rng.IntN(2) == 0 { // few would be cut otherwise
			s.policy, s.fleet.Events = policy.NewCostModel(), true
		}
	}
	if rng.IntN(2) == 0 {
		s.fleet.Prewarm = time.Duration(5+rng.IntN(100)) * time.Millisecond
		if rng.IntN(2) == 0 && (cfg.Engine == "vllm" || cfg.Engine == "sglang") {
			// Or hardly any prefix would be long enough, and asked for often enough.
			s.policy, s.fleet.Events = policy.NewCostModel(), true
			if s.workload, err = workload.Generate(workload.Options{
				Name: pick("w1", "w3", "w5"), Seed: seed, Rate: 20 + 20*rng.Float64(), Requests: 200, Own: 100, Shared: 1000 + rng.IntN(2000), Groups: 2, Output: 5, Longest: 4500,
			}); err != nil {
				t.Fatal(err)
			}
		}
	}
	return s
}

// cuts reports that prompts may be computed in pieces, and warms that prefixes may be
// computed ahead.
func (s *scene) cuts() bool  { return s.fleet.Pieces > 0 && s.known() }
func (s *scene) warms() bool { return s.fleet.Prewarm > 0 && s.known() }

// known reports that the policy goes by times, and that caches are known exactly.
func (s *scene) known() bool {
	e := s.fleet.Engines[0].Engine
	return s.policy.Name() == "cost_model" && s.fleet.Events && (e == "" || e == "vllm" || e == "sglang")
}

func (s *scene) serve(t testing.TB) *Outcome {
	t.Helper()
	var served atomic.Int64
	r, err := newRun(&s.fleet, s.workload, s.policy, Options{Seed: s.seed, Served: &served})
	if err == nil {
		err = r.serve(t.Context())
	}
	if err != nil {
		t.Fatalf("%v: %v", s, err)
	}
	if n := int(served.Load()); n != len(s.workload.Requests) {
		t.Errorf("%v: %d of %d requests are counted as over", s, n, len(s.workload.Requests))
	}
	s.nothingLeft(t, r)
	return r.outcome()
}

// nothingLeft checks that agents and engines have nothing any more when all is over, but what
// is computed ahead.
func (s *scene) nothingLeft(t testing.TB, r *run) {
	t.Helper()
	warming := 0
	for k, a := range r.agents {
		if a.room.Len() > 0 || a.held.Len() > 0 || a.heldWork != 0 {
			t.Errorf("%v: at agent %d %d wait and %d are held with %v s", s, k, a.room.Len(), a.held.Len(), a.heldWork)
		}
		for i := range a.slots {
			var c policy.Candidate
			if a.slots[i].warming {
				warming++
				continue
			}
			if a.slots[i].standing.Describe(&c, 0, 0, r.clock()); a.slots[i].inFlight != 0 || c.Begun != 0 || c.Rest != 0 {
				t.Errorf("%v: agent %d has %d requests at engine %d, where %d have begun with %v s left", s, k, a.slots[i].inFlight, i, c.Begun, c.Rest)
			}
		}
	}
	if len(r.visits) > warming {
		t.Errorf("%v: engines have %d sequences", s, len(r.visits))
	}
}

// Whatever a fleet serves, no request is lost, times are in order, what the engines have
// found in their caches is what the records say, no engine has done more than there was
// time for, and nothing is better than what nothing can be better than. Of prompts that are
// computed in pieces the records tell what the first has found and where the last was:
// engines were asked for more than that, and have found more. So they were where prefixes are
// computed ahead.
func TestServe(t *testing.T) {
	scenes := uint64(lessUnderRace(t, 150, 30))
	if testing.Short() {
		scenes = 30
	}
	refused, served, cut, warmed := 0, 0, 0, 0
	for seed := range scenes {
		s := newScene(t, seed)
		o := s.serve(t)
		n := len(s.fleet.Engines)
		hit, queried, worked, begin, end := make([]int, n), make([]int, n), make([]time.Duration, n), make([]time.Duration, n), make([]time.Duration, n)
		latencies := s.fleet.latencies()
		for k := range o.Records {
			r, q := &o.Records[k], &s.workload.Requests[k]
			if r.Index != k || r.Scheduled != q.At || r.Input != q.Input() {
				t.Fatalf("%v: request %d has %+v", s, k, r)
			}
			if r.Failure != "" {
				if r.Failure != workload.Refused || s.fleet.Admission.Mode == "" || r.Replica >= 0 {
					t.Fatalf("%v: request %d has failed: %+v", s, k, r)
				}
				refused++
				continue
			}
			served++
			if r.Sent != r.Scheduled || r.First < r.Sent+2*s.fleet.Lag || r.End < r.First || r.Output != q.Output || r.Cached < 0 || r.Cached >= r.Input ||
				r.Replica < 0 || r.Replica >= n || r.Computed <= 0 || r.Computed > r.First-r.Sent || r.Predicted < 0 {
				t.Fatalf("%v: request %d has %+v", s, k, r)
			}
			i := r.Replica
			hit[i], queried[i] = hit[i]+r.Cached, queried[i]+r.Input
			if worked[i] == 0 || r.Scheduled < begin[i] {
				begin[i] = r.Scheduled
			}
			worked[i] += work(&latencies[i], r.Input-r.Cached, r.Cached)
			end[i] = max(end[i], r.First)
		}
		last := time.Duration(0)
		for k := range o.Records {
			last = max(last, o.Records[k].End)
		}
		for i, c := range o.Counts {
			if computed := c.Queried - c.Hit; !s.cuts() && computed < queried[i]-hit[i]+o.Ahead[i] || o.Ahead[i] > 0 && !s.warms() {
				t.Errorf("%v: engine %d has computed %d tokens, the records say %d, and %d ahead", s, i, computed, queried[i]-hit[i], o.Ahead[i])
			}
			if o.Ahead[i] > 0 {
				warmed++
			}
			if s.cuts() || s.warms() {
				if c.Hit < hit[i] || c.Queried < queried[i] {
					t.Errorf("%v: engine %d has found %d of %d tokens, the records say %d of %d", s, i, c.Hit, c.Queried, hit[i], queried[i])
				}
				if did := (simulator.Latency{A: latencies[i].A}).Prefill(c.Queried-c.Hit, 0); did > last {
					t.Errorf("%v: engine %d has done %v of work in %v", s, i, did, last)
				}
				if c.Queried > queried[i] && s.cuts() && !s.warms() {
					cut++
				}
				continue
			}
			if c.Hit != hit[i] || c.Queried != queried[i] {
				t.Errorf("%v: engine %d has found %d of %d tokens, the records say %d of %d", s, i, c.Hit, c.Queried, hit[i], queried[i])
			}
			if worked[i] > end[i]-begin[i] {
				t.Errorf("%v: engine %d has done %v of work in %v", s, i, worked[i], end[i]-begin[i])
			}
		}
		sum := workload.Summarize(o.Records, s.workload, workload.SummaryOptions{Replicas: n, Ahead: o.Ahead})
		if sum.Refused > 0 || !s.fleet.WholeBlocks() {
			continue // what is left is served as if it were alone
		}
		chains := NewChains(s.workload, s.fleet.Engines[0].BlockSize, 0)
		least := milliseconds(s.fleet.Least(s.fleet.Bound(s.workload, chains), 0))
		if most := chains.Infinite(); sum.HitRate > most || sum.TTFT.Mean < least {
			t.Errorf("%v: hits are %v of at most %v, the mean time is %v ms of at least %v", s, sum.HitRate, most, sum.TTFT.Mean, least)
		}
	}
	t.Logf("%d scenes, %d engines computed pieces, %d ahead", scenes, cut, warmed)
	if refused == 0 || served < 10*refused || cut < int(scenes)/20 || warmed < int(scenes)/20 {
		t.Errorf("%d requests were served and %d refused, and %d engines computed pieces, %d ahead", served, refused, cut, warmed)
	}
}

// Equal arguments give equal outcomes, on any number of processors; another seed gives
// another one.
func TestServeRepeats(t *testing.T) {
	for seed := range uint64(6) {
		s := newScene(t, seed)
		first := s.serve(t)
		was := runtime.GOMAXPROCS(1)
		again := s.serve(t)
		runtime.GOMAXPROCS(was)
		if !reflect.DeepEqual(first, again) {
			t.Fatalf("%v: two runs differ", s)
		}
	}
	w, err := workload.Generate(workload.Options{Name: "w1", Rate: 40, Requests: 300})
	if err != nil {
		t.Fatal(err)
	}
	s := &scene{workload: w, policy: policy.Random{}, fleet: Fleet{Engines: slices.Repeat([]simulator.Config{reference()}, 4)}}
	first := s.serve(t)
	s.seed = 1
	if reflect.DeepEqual(first, s.serve(t)) {
		t.Error("another seed makes no difference")
	}
}

// Turns are as in the proxy: the first is number 1, and a request that is refused and
// waits keeps the one it has.
func TestServeInTurns(t *testing.T) {
	w := &workload.Workload{}
	for i := range 40 {
		w.Requests = append(w.Requests, workload.Request{At: time.Duration(i) * time.Millisecond, Parts: []workload.Part{{ID: uint64(i), Tokens: 3000}}, Output: 50})
	}
	cfg := reference()
	cfg.MaxNumSeqs = 2
	for _, admission := range []Admission{{}, {Mode: policy.AdmissionModes()[0], Budget: 500 * time.Millisecond, Queue: 40, Timeout: time.Hour}} {
		fleet := Fleet{Engines: slices.Repeat([]simulator.Config{cfg}, 3), Admission: admission}
		o := (&scene{workload: w, policy: inTurns{}, fleet: fleet}).serve(t)
		for k := range o.Records {
			if got := o.Records[k].Replica; got != k%3 {
				t.Fatalf("admission %q: request %d is served by replica %d, want %d", admission.Mode, k, got, k%3)
			}
		}
	}
}

// When first tokens come is foretold also of engines that let prompts wait for the steps
// that are under way while they generate, and seldom do.
func TestServeForetells(t *testing.T) {
	w, err := workload.Generate(workload.Options{Name: "w2", Requests: 1000})
	if err != nil {
		t.Fatal(err)
	}
	fleet := Fleet{Engines: slices.Repeat([]simulator.Config{{Profile: "h100-llama-8b"}}, 8), Events: true}
	for _, p := range []policy.Policy{policy.LMetric{}, policy.NewCostModel()} {
		o := (&scene{workload: w, policy: p, fleet: fleet}).serve(t)
		s := workload.Summarize(o.Records, w, workload.SummaryOptions{Replicas: 8})
		t.Logf("%s: foretold %.2f of what it was, off by %.2f", p.Name(), s.Prediction, s.PredictionError)
		if s.Prediction < 0.9 || s.Prediction > 1.1 || s.PredictionError > 0.2 {
			t.Errorf("%s: foretold %.2f of what it was, off by %.2f", p.Name(), s.Prediction, s.PredictionError)
		}
	}
}

// An engine that is slow for good is so when it is throttled for a while, and after that.
func TestServeThrottlesTogether(t *testing.T) {
	cfg := reference()
	w := &workload.Workload{}
	for i := range 3 {
		w.Requests = append(w.Requests, workload.Request{At: time.Duration(i) * 10 * time.Second, Parts: []workload.Part{{ID: uint64(i), Tokens: 1000}}, Output: 1})
	}
	took := func(throttles ...workload.Throttle) (list [3]time.Duration) {
		o := (&scene{workload: w, policy: policy.RoundRobin{}, fleet: Fleet{Engines: []simulator.Config{cfg}, Throttles: throttles}}).serve(t)
		for i := range list {
			list[i] = (o.Records[i].First - o.Records[i].Sent).Round(time.Microsecond)
		}
		return list
	}
	alone := took()[0]
	got := took(workload.Throttle{Factor: 3}, workload.Throttle{Factor: 2, At: 5 * time.Second, Until: 15 * time.Second})
	if want := [3]time.Duration{3 * alone, 6 * alone, 3 * alone}; got != want {
		t.Errorf("first tokens after %v, want %v", got, want)
	}
}

// Before one replica there is nothing to choose.
func TestServeOneReplica(t *testing.T) {
	w, err := workload.Generate(workload.Options{Name: "w2", Rate: 5, Requests: 200, Longest: 4000})
	if err != nil {
		t.Fatal(err)
	}
	var want *Outcome
	for _, name := range policy.Names() {
		p, err := policy.New(name, nil)
		if err != nil {
			t.Fatal(err)
		}
		got := (&scene{workload: w, policy: p, fleet: Fleet{Engines: []simulator.Config{reference()}, Events: true}}).serve(t)
		if want == nil {
			want = got
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s serves otherwise than %s", name, policy.Names()[0])
		}
	}
}

// An engine that is looked at each half millisecond, whether it has something to do or
// not, gives each request its tokens when one does that is looked at only then.
func TestServeAsInSmallSteps(t *testing.T) {
	for seed := range uint64(12) {
		s := newScene(t, 100+seed)
		// What is held, or computed in pieces or ahead, comes to engines at times that no record has.
		s.fleet.Throttles, s.workload.Throttles, s.fleet.Admission, s.fleet.Hold, s.fleet.Pieces, s.fleet.Prewarm = nil, nil, Admission{}, 0, 0, 0
		o := s.serve(t)
		for i, c := range s.fleet.Engines {
			e, err := c.NewEngine()
			if err != nil {
				t.Fatal(err)
			}
			now := time.Duration(0)
			until := func(at time.Duration) {
				for ; now < at; now += 500 * time.Microsecond {
					e.Advance(now)
					if e.Load(now); seed%2 == 0 {
						e.Told()
					}
				}
			}
			sequences := map[int]*simulator.Sequence{}
			end := time.Duration(0)
			for k := range o.Records {
				r := &o.Records[k]
				if r.Replica != i {
					continue
				}
				q := &s.workload.Requests[k]
				at := r.Sent + s.fleet.Lag
				until(at)
				sequences[k] = &simulator.Sequence{Prompt: q.AppendPrompt(nil), Said: q.AppendAnswer(nil, k), Output: q.Output}
				e.Arrive(sequences[k], at)
				end = max(end, r.End)
			}
			until(end + time.Second)
			for k, seq := range sequences {
				r := &o.Records[k]
				if !seq.Ended() || seq.First+s.fleet.Lag != r.First || seq.End+s.fleet.Lag != r.End || seq.Cached != r.Cached {
					t.Fatalf("%v: request %d has its tokens from %v to %v with %d cached; in small steps from %v to %v with %d", s, k,
						r.First-s.fleet.Lag, r.End-s.fleet.Lag, r.Cached, seq.First, seq.End, seq.Cached)
				}
			}
		}
	}
}

// A request that its engine never has room for fails by itself, and leaves nothing behind.
func TestServeTooLong(t *testing.T) {
	cfg := reference()
	cfg.BlockSize, cfg.NumGPUBlocks, cfg.MaxModelLen = 16, 101, 1600
	ask := func(at time.Duration, tokens int) workload.Request {
		return workload.Request{At: at, Parts: []workload.Part{{ID: uint64(tokens), Tokens: tokens}}, Output: 10}
	}
	w := &workload.Workload{Requests: []workload.Request{ask(0, 100), ask(1, 2000), ask(2, 1590), ask(3, 0), ask(4, 1591), ask(time.Second, 200)}}
	s := &scene{workload: w, policy: policy.NewCostModel(), fleet: Fleet{Engines: slices.Repeat([]simulator.Config{cfg}, 2)}}
	o := s.serve(t)
	var got []string
	for i := range o.Records {
		got = append(got, o.Records[i].Failure)
	}
	if want := []string{"", "longer than an engine has room for", "", "its prompt is empty", "longer than an engine has room for", ""}; !slices.Equal(got, want) {
		t.Errorf("failures are %q, want %q", got, want)
	}
	if last := o.Records[5]; last.First-last.Sent > 100*time.Millisecond {
		t.Errorf("the last request waited %v for nobody", last.First-last.Sent)
	}
}

// Who calls it may end it.
func TestServeEnds(t *testing.T) {
	s := newScene(t, 3)
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := fmt.Errorf("enough")
	cancel(cause)
	if _, err := s.fleet.Serve(ctx, s.workload, s.policy, Options{}); err != cause {
		t.Errorf("it ends with %v", err)
	}
}

// The times between tokens are those of all answers that count: as many as there are
// further tokens, and together as long as it is from first tokens to last ones.
func TestGapsAreOfAnswers(t *testing.T) {
	w, err := workload.Generate(workload.Options{Name: "w3", Seed: 3, Rate: 20, Requests: 400})
	if err != nil {
		t.Fatal(err)
	}
	p, err := policy.New("cost_model", nil)
	if err != nil {
		t.Fatal(err)
	}
	warm := w.Requests[100].At
	f := Fleet{Engines: []simulator.Config{{Profile: "h100-llama-8b"}, {Engine: "sglang", Profile: "h100-llama-8b", NumGPUBlocks: 4000}}, Events: true}
	o, err := f.Serve(t.Context(), w, p, Options{Seed: 1, Warm: warm})
	if err != nil {
		t.Fatal(err)
	}
	further, took := 0, time.Duration(0)
	for i := range o.Records {
		if r := &o.Records[i]; r.Scheduled >= warm {
			if r.Failure != "" {
				t.Fatalf("request %d: %s", i, r.Failure)
			}
			further, took = further+r.Output-1, took+r.End-r.First
		}
	}
	if got := time.Duration(o.Gaps.Count()) * o.Gaps.Mean(); o.Gaps.Count() != further || further < 10_000 || (got-took).Abs() > time.Duration(further) {
		t.Errorf("%d times between tokens that take %v; want %d that take %v", o.Gaps.Count(), got, further, took)
	}
}
