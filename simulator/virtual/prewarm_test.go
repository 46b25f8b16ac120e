package virtual

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/simulator"
	"github.com/inferrail/inferrail/simulator/workload"
)

// warmScene is two replicas of the reference with blocks of 16, where prefixes are computed
// ahead in pieces of a tenth of a second.
func warmScene(w *workload.Workload) *scene {
	cfg := reference()
	cfg.BlockSize, cfg.NumGPUBlocks, cfg.MaxModelLen = 16, 20_000, 0
	return &scene{workload: w, policy: policy.NewCostModel(), fleet: Fleet{
		Engines: []simulator.Config{cfg, cfg}, Events: true, EventLag: time.Millisecond, Prewarm: 100 * time.Millisecond,
	}}
}

// herds are so many herds of requests behind one system prompt of 4,096 tokens, with 1,000
// tokens of their own, one herd a second, and before them one that is alone.
func herds(n, size int) *workload.Workload {
	a := newAuthor("herds")
	system := a.text(4096)
	a.ask(1000, 1, system)
	for range n {
		a.at += time.Second
		for range size {
			a.ask(1000, 1, system)
		}
	}
	return &a.Workload
}

// The second of each pair waits for the first where the system prompt is, some 70 ms, while
// the other replica idles: to compute it there would take 260 ms. When as much was lost, with
// what it costs others to wait, it is computed there ahead, and from then on the last of a
// herd waits less.
func TestPrewarmServesTheNext(t *testing.T) {
	f := func(agents, herdsBefore, most int) {
		t.Helper()
		size := 2 * agents
		s := warmScene(herds(16, size))
		s.fleet.Agents = agents
		o := s.serve(t)
		s.fleet.Prewarm = 0
		without := s.serve(t)
		first := o.Records[0].Replica
		for i, r := range o.Records[1:] {
			if r.Failure != "" || r.Cached != 4096 {
				t.Errorf("%d agents, request %d of herd %d: %+v", agents, i%size, i/size, r)
			}
			w := &without.Records[1+i]
			if sooner := r.First < w.First; w.Replica != first || i%size == size-1 && sooner != (i/size >= herdsBefore) || r.First > w.First {
				t.Errorf("%d agents, request %d of herd %d: %+v, with nothing computed ahead %+v", agents, i%size, i/size, r, *w)
			}
		}
		if got := o.Ahead[1-first]; got < 4096 || got > most || o.Ahead[first] != 0 || !slices.Equal(without.Ahead, []int{0, 0}) {
			t.Errorf("%d agents: %v tokens are computed ahead, and %v when nothing is to be; the system prompt is at %d", agents, o.Ahead, without.Ahead, first)
		}
	}
	f(1, 3, 4096)
	// Of several agents each knows what its own requests have lost, and what any computes.
	f(2, 2, 2*4096)
}

// Where nothing is to be computed ahead, or nothing can be worth it, all is as it is without.
func TestPrewarmNothing(t *testing.T) {
	f := func(what string, nothing bool, set func(*scene)) {
		t.Helper()
		s := warmScene(herds(12, 2))
		set(s)
		got := s.serve(t)
		s.fleet.Prewarm = 0
		if want := s.serve(t); reflect.DeepEqual(got, want) != nothing {
			t.Errorf("%s: all is as without: %v, want %v", what, !nothing, nothing)
		}
	}
	f("vllm", false, func(s *scene) {})
	f("sglang", false, func(s *scene) { s.fleet.Engines[0].Engine, s.fleet.Engines[1].Engine = "sglang", "sglang" })
	f("no events", true, func(s *scene) { s.fleet.Events = false })
	f("tgi", true, func(s *scene) { s.fleet.Engines[0].Engine, s.fleet.Engines[1].Engine = "tgi", "tgi" })
	f("one replica", true, func(s *scene) { s.fleet.Engines = s.fleet.Engines[:1] })
	f("one request", true, func(s *scene) { s.workload.Requests = s.workload.Requests[:1] })
	for _, name := range policy.Names() {
		if name == "cost_model" {
			continue
		}
		p, err := policy.New(name, nil)
		if err != nil {
			t.Fatal(err)
		}
		f(name, true, func(s *scene) { s.policy = p })
	}
	for seed := range uint64(3) {
		w, err := workload.Generate(workload.Options{Name: "w6", Seed: seed, Rate: 20, Requests: 300})
		if err != nil {
			t.Fatal(err)
		}
		f("nothing shared", true, func(s *scene) {
			s.workload, s.fleet.Hold, s.fleet.Pieces = w, 50*time.Millisecond, 500*time.Millisecond
		})
	}
}

// dueRun is a run whose agent has a prefix of 4,096 tokens to compute ahead at replica 1.
func dueRun(t *testing.T) (*run, *agent) {
	t.Helper()
	s := warmScene(herds(1, 1))
	r, err := newRun(&s.fleet, s.workload, s.policy, Options{})
	if err != nil {
		t.Fatal(err)
	}
	a := r.agents[0]
	speed := policy.DefaultSpeed
	candidates := []policy.Candidate{{Key: r.keys[0], Cached: 4096, Exact: true, Speed: speed}, {Key: r.keys[1], Exact: true, Speed: speed}}
	for range 3 {
		a.prefixes.Chosen(&policy.Request{Tokens: 5000}, candidates, []float64{1, 1}, 0, 7, make([]uint32, 5000), 4096, r.clock())
	}
	return r, a
}

// Nothing is computed ahead while anybody waits, or where a replica has something to do or is
// not known exactly; one that is lets it be computed once at a time.
func TestPrewarmOnlyIdle(t *testing.T) {
	f := func(what string, want int, set func(r *run, a *agent)) {
		t.Helper()
		r, a := dueRun(t)
		set(r, a)
		a.prewarm()
		a.prewarm()
		if got := a.slots[0].inFlight + a.slots[1].inFlight; got != want {
			t.Errorf("%s: %d pieces are asked for, want %d", what, got, want)
		}
	}
	f("idle", 1, func(r *run, a *agent) {})
	f("one is held", 0, func(r *run, a *agent) { a.held.Push(&policy.Ticket[*visit]{Value: &visit{}}) })
	f("one is in the room", 0, func(r *run, a *agent) { a.room.Push(&policy.Ticket[*visit]{Value: &visit{}}) })
	f("one is parked", 0, func(r *run, a *agent) { a.park(&visit{}) })
	f("it has a request without a token", 0, func(r *run, a *agent) {
		var v policy.Sending
		v.Promise(&a.slots[1].standing, 1000, 1, 0)
	})
	f("it has begun with one", 0, func(r *run, a *agent) {
		var rest policy.Rest
		rest.Stay(&a.slots[1].standing, 1, 0)
	})
	f("another has much to do", 1, func(r *run, a *agent) {
		var v policy.Sending
		v.Promise(&a.slots[0].standing, 1000, 1, 0)
	})
	f("what runs takes half of its cache", 0, func(r *run, a *agent) {
		a.slots[1].standing.SetLoad(&policy.Load{Told: r.clock(), Until: r.clock().Add(time.Second), KV: 0.5})
	})
	f("it has told something wrong", 0, func(r *run, a *agent) { a.believe(1, "for the sake of it") })
	f("off", 0, func(r *run, a *agent) { a.prewarming = policy.Prewarming{} })
}

// A replica that has no room for a prefix refuses it, and is asked for others as before.
func TestPrewarmRefused(t *testing.T) {
	r, a := dueRun(t)
	a.prewarm()
	if len(r.notes) != 1 || !a.slots[1].warming {
		t.Fatalf("%d things are under way", len(r.notes))
	}
	v := r.notes[0].visit
	v.seq.Prompt = make([]uint32, 400_000)
	r.arrive(v)
	if a.slots[1].warming || a.slots[1].inFlight != 0 || r.ahead[1] != 0 {
		t.Errorf("after it was refused: under way %v, %d requests, %v tokens are computed ahead", a.slots[1].warming, a.slots[1].inFlight, r.ahead)
	}
	if a.prewarm(); a.slots[1].inFlight != 0 {
		t.Error("it is asked again at once")
	}

	// A system prompt of 8,192 tokens has room at one of two replicas only: what cannot be
	// there is served where it is.
	author := newAuthor("long")
	system := author.text(8192)
	for i := range 30 {
		author.at = time.Duration(i/2) * time.Second
		author.ask(100, 1, system)
	}
	s := warmScene(&author.Workload)
	s.fleet.Engines[1].NumGPUBlocks = 8192/16 + 1
	s.fleet.Engines[1].MaxModelLen = 8192
	failed := func() (n int) {
		for _, r := range s.serve(t).Records {
			if r.Failure != "" {
				n++
			}
		}
		return n
	}
	got := failed()
	s.fleet.Prewarm = 0
	if want := failed(); got > want || want == 30 {
		t.Errorf("%d requests are longer than what there is room for, and %d where nothing is computed ahead", got, want)
	}
}

// Agents (W3) behind caches that are empty are no worse off than with lmetric, in the median to
// what seeds differ by and in the mean by far, and better than where nothing is computed ahead.
func TestPrewarmColdAgents(t *testing.T) {
	withoutRace(t)
	fleet := Fleet{Engines: slices.Repeat([]simulator.Config{{Profile: "h100-llama-8b"}}, 8), Events: true, EventLag: time.Millisecond, Lag: 250 * time.Microsecond}
	lmetric, mean, off := 0.0, 0.0, 0.0
	const seeds = 12
	for seed := uint64(1); seed <= seeds; seed++ {
		w, err := workload.Generate(workload.Options{Name: "w3", Seed: seed, Rate: 8, Requests: 400})
		if err != nil {
			t.Fatal(err)
		}
		fleet.Hold, fleet.Pieces, fleet.Prewarm = 50*time.Millisecond, 500*time.Millisecond, 100*time.Millisecond
		ttft := func(p policy.Policy) workload.Quantiles {
			o, err := fleet.Serve(t.Context(), w, p, Options{Seed: seed})
			if err != nil {
				t.Fatal(err)
			}
			s := workload.Summarize(o.Records, w, workload.SummaryOptions{Replicas: 8, Ahead: o.Ahead})
			if s.Ahead > 0.03 {
				t.Errorf("seed %d: %.1f %% of all tokens are computed ahead", seed, 100*s.Ahead)
			}
			return s.TTFT
		}
		got, other := ttft(policy.NewCostModel()), ttft(policy.LMetric{})
		lmetric += math.Log(got.P50/other.P50) / seeds
		mean += math.Log(got.Mean/other.Mean) / seeds
		fleet.Prewarm = 0
		off += math.Log(got.P50/ttft(policy.NewCostModel()).P50) / seeds
	}
	told := fmt.Sprintf("the median is %.3f times lmetric's and the mean %.3f times, and the median %.3f times what it is with nothing computed ahead",
		math.Exp(lmetric), math.Exp(mean), math.Exp(off))
	t.Log(told)
	if math.Exp(lmetric) > 1.02 || math.Exp(mean) > 0.95 || math.Exp(off) > 0.95 {
		t.Error(told)
	}
}

// It harms nobody where an engine is slow, for good or for a while, where engines have blocks
// of several sizes, and where there are several agents.
func TestPrewarmHarmsNobody(t *testing.T) {
	withoutRace(t)
	f := func(what, name string, rate float64, set func(*Fleet)) {
		t.Helper()
		var ratio [2]float64
		ahead := 0.0
		const seeds = 5
		for seed := uint64(1); seed <= seeds; seed++ {
			w, err := workload.Generate(workload.Options{Name: name, Seed: seed, Rate: rate, Requests: 600})
			if err != nil {
				t.Fatal(err)
			}
			fleet := Fleet{
				Engines: slices.Repeat([]simulator.Config{{Profile: "h100-llama-8b"}}, 4), Events: true, EventLag: time.Millisecond, Lag: 250 * time.Microsecond,
				Hold: 50 * time.Millisecond, Pieces: 500 * time.Millisecond,
			}
			set(&fleet)
			run := func(prewarm time.Duration) workload.Summary {
				fleet.Prewarm = prewarm
				o, err := fleet.Serve(t.Context(), w, policy.NewCostModel(), Options{Seed: seed})
				if err != nil {
					t.Fatal(err)
				}
				s := workload.Summarize(o.Records, w, workload.SummaryOptions{Replicas: 4, Ahead: o.Ahead})
				if s.Failed > 0 {
					t.Errorf("%s, seed %d: %v", what, seed, s.Failures)
				}
				return s
			}
			with, without := run(100*time.Millisecond), run(0)
			ahead += with.Ahead / seeds
			for i, of := range [2][2]float64{{with.TTFT.Mean, without.TTFT.Mean}, {with.TTFT.P99, without.TTFT.P99}} {
				ratio[i] += math.Log(of[0]/of[1]) / seeds
			}
		}
		t.Logf("%s: mean %.3f, p99 %.3f; %.2f %% are computed ahead", what, math.Exp(ratio[0]), math.Exp(ratio[1]), 100*ahead)
		if math.Exp(ratio[0]) > 1.01 || math.Exp(ratio[1]) > 1.1 || ahead == 0 || ahead > 0.03 {
			t.Errorf("%s: mean %.3f, p99 %.3f; %.2f %% are computed ahead", what, math.Exp(ratio[0]), math.Exp(ratio[1]), 100*ahead)
		}
	}
	f("one slow", "w1", 15, func(f *Fleet) { f.Throttles = []workload.Throttle{{Engine: 0, Factor: 2}} })
	f("one slow for a while", "w1", 15, func(f *Fleet) {
		f.Throttles = []workload.Throttle{{Engine: 0, Factor: 8, At: 10 * time.Second, Until: 20 * time.Second}}
	})
	f("two sizes of blocks", "w3", 4, func(f *Fleet) { f.Engines[0].BlockSize, f.Engines[1].BlockSize = 128, 128 })
	f("blocks that are longer than what is worth it", "w3", 4, func(f *Fleet) { f.Engines[0].BlockSize, f.Engines[1].BlockSize = 784, 784 })
	f("three agents", "w3", 4, func(f *Fleet) { f.Agents = 3 })
	f("small caches", "w1", 15, func(f *Fleet) {
		for i := range f.Engines {
			f.Engines[i].NumGPUBlocks = 3000
		}
	})
}

// A comparison of several seeds has the median of what was computed ahead, in its table, too,
// where any was.
func TestPrewarmCompared(t *testing.T) {
	p := smallPlan(t, 1, 2, 3)
	p.Fleet.Events = true
	f := func(prewarm time.Duration) (c *workload.Comparison, text string) {
		t.Helper()
		p.Fleet.Prewarm = prewarm
		c, err := p.Compare(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var table bytes.Buffer
		if err := WriteTable(&table, c); err != nil {
			t.Fatal(err)
		}
		return c, table.String()
	}
	c, table := f(100 * time.Millisecond)
	var list []float64
	for _, s := range c.All[3:] {
		list = append(list, s.Ahead)
	}
	slices.Sort(list)
	ours := &c.Runs[1]
	if ours.Ahead != list[1] || list[1] == 0 || c.Runs[0].Ahead != 0 || ours.HitRate >= ours.Ceiling {
		t.Errorf("%v of the tokens are computed ahead, of the runs %v, of round robin's %v; hits %v of %v", ours.Ahead, list, c.Runs[0].Ahead, ours.HitRate, ours.Ceiling)
	}
	if want := fmt.Sprintf("\ncost_model:own_work=1: %.1f %% of all prompts' tokens were computed ahead", 100*ours.Ahead); strings.Count(table, "ahead") != 1 || !strings.Contains(table, want) {
		t.Errorf("no %q:\n%s", want, table)
	}
	for l := range strings.Lines(table) {
		if n := len([]rune(l)); n > 121 {
			t.Errorf("a line has %d columns: %s", n, l)
		}
	}
	c, table = f(0)
	if text, err := json.Marshal(c); err != nil || strings.Contains(string(text), "ahead") || strings.Contains(table, "ahead") {
		t.Errorf("nothing is computed ahead, error %v:\n%s", err, table)
	}
}
