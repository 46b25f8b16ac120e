package virtual

import (
	"bytes"
	"encoding/json"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/inferrail/inferrail/simulator"
	"github.com/inferrail/inferrail/simulator/workload"
)

// smallPlan compares two policies with a workload that one of them serves better.
func smallPlan(t testing.TB, seeds ...uint64) *Plan {
	t.Helper()
	cfg := reference()
	cfg.BlockSize, cfg.NumGPUBlocks, cfg.MaxModelLen = 16, 6001, 96000
	p := &Plan{Seeds: seeds, Policies: []string{"round_robin", "cost_model:own_work=1"}, Engine: "reference",
		Fleet: Fleet{Engines: slices.Repeat([]simulator.Config{cfg}, 3)}, Limits: workload.Limits{TTFT: 2000, TPOT: 100}}
	for _, seed := range seeds {
		w, err := workload.Generate(workload.Options{Name: "w1", Seed: seed, Rate: 20, Requests: 200})
		if err != nil {
			t.Fatal(err)
		}
		p.Workloads = append(p.Workloads, w)
	}
	return p
}

// A comparison is the same however many processors make it, and its runs are in the
// order in which they were asked for.
func TestCompare(t *testing.T) {
	p := smallPlan(t, 1, 2, 3)
	var texts [2][]byte
	for i := range texts {
		was := runtime.GOMAXPROCS(1 + 3*i)
		c, err := p.Compare(t.Context())
		runtime.GOMAXPROCS(was)
		if err != nil {
			t.Fatal(err)
		}
		if texts[i], err = json.Marshal(c); err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, s := range slices.Concat(c.Runs, c.All) {
			names = append(names, s.Policy)
		}
		if got, want := strings.Join(names, " "), "round_robin cost_model:own_work=1"+strings.Repeat(" round_robin", 3)+strings.Repeat(" cost_model:own_work=1", 3); got != want {
			t.Errorf("runs are %s", got)
		}
		first, second := &c.Runs[0], &c.Runs[1]
		if !(first.HitRate < second.HitRate && second.HitRate < second.Ceiling && second.Ceiling <= c.Infinite) || first.EngineHitRate != first.HitRate ||
			!(c.Least <= c.Bound.TTFT.Mean && c.Bound.TTFT.Mean < second.TTFT.Mean && second.TTFT.Mean < first.TTFT.Mean) || first.Curves == nil {
			t.Errorf("%+v, %+v; bound %+v, least %v, infinite %v", first, second, c.Bound, c.Least, c.Infinite)
		}
		var table bytes.Buffer
		if err := WriteTable(&table, c); err != nil {
			t.Fatal(err)
		}
		for _, l := range strings.Split(table.String(), "\n") {
			if n := len([]rune(l)); n > 120 {
				t.Errorf("a line has %d columns: %s", n, l)
			}
		}
	}
	if !bytes.Equal(texts[0], texts[1]) {
		t.Error("on four processors it is another comparison than on one")
	}
}

// What can be served is where the limits are just kept.
func TestFindCapacity(t *testing.T) {
	withoutRace(t)
	p := smallPlan(t, 1)
	p.Limits.TTFT = 500
	found, err := p.FindCapacity(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	w := p.Workloads[0]
	recorded := float64(len(w.Requests)) / w.Requests[len(w.Requests)-1].At.Seconds()
	for i, k := range found {
		f := func(speed float64, want bool) {
			t.Helper()
			if ok, err := p.keeps(t.Context(), p.Policies[i], &p.Fleet, speed); err != nil || ok != want {
				t.Errorf("%s finds %v/s, and at %v times as recorded it keeps the limits: %v, %v", k.Policy, k.Rate, speed, ok, err)
			}
		}
		f(k.Rate/recorded, true)
		f(k.Rate/recorded*1.3, false) // by chance it is kept at a little more than what it ends with
		g := func(replicas int, want bool) {
			t.Helper()
			if ok, err := p.keeps(t.Context(), p.Policies[i], p.Fleet.of(replicas), found[0].Rate/recorded); err != nil || ok != want {
				t.Errorf("%s needs %v replicas, and keeps the limits with %d: %v, %v", k.Policy, k.GPUs, replicas, ok, err)
			}
		}
		g(int(k.GPUs), true)
		if i > 0 && k.GPUs > 1 {
			g(int(k.GPUs)-1, false)
		}
	}
	if found[0].GPUs != 3 || !(found[1].Rate > found[0].Rate) || found[1].GPUs > 3 {
		t.Errorf("%+v", found)
	}

	// Not to be kept by anybody.
	p.Limits.TTFT = 1
	if found, err = p.FindCapacity(t.Context()); err != nil || found[0].Rate != 0 || found[1].GPUs != 0 {
		t.Errorf("%+v, %v", found, err)
	}
	p.Limits = workload.Limits{}
	if _, err = p.FindCapacity(t.Context()); err == nil {
		t.Error("without limits there is a capacity")
	}
}

// A plan that cannot be carried out says why.
func TestPlanFailure(t *testing.T) {
	f := func(want string, change func(p *Plan)) {
		t.Helper()
		p := smallPlan(t, 1)
		change(p)
		if _, err := p.Compare(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	f("no policy", func(p *Plan) { p.Policies = nil })
	f(`no policy "x"`, func(p *Plan) { p.Policies = []string{"x"} })
	f(`no weight "x"`, func(p *Plan) { p.Policies = []string{"cost_model:x=1"} })
	f(`"own_work" is no weight`, func(p *Plan) { p.Policies = []string{"cost_model:own_work"} })
	f("has a seed", func(p *Plan) { p.Seeds = nil })
	f("2 workloads for 1 seeds", func(p *Plan) { p.Workloads = append(p.Workloads, p.Workloads[0]) })
	f("at least one replica", func(p *Plan) { p.Fleet.Engines = nil })
	f("replica 1: block-size", func(p *Plan) { p.Fleet.Engines[1].BlockSize = -1 })
	f("no admission mode", func(p *Plan) { p.Fleet.Admission.Mode = "x" })
}

// A thousand replicas and an hour of traffic take seconds.
func BenchmarkServe1000(b *testing.B) {
	w, err := workload.Generate(workload.Options{Name: "w2", Rate: 100, Requests: 20_000})
	if err != nil {
		b.Fatal(err)
	}
	p := &Plan{Seeds: []uint64{1}, Policies: []string{"cost_model"}, Workloads: []*workload.Workload{w},
		Fleet: Fleet{Engines: slices.Repeat([]simulator.Config{reference()}, 1000), Events: true, EventLag: time.Millisecond}}
	b.ResetTimer()
	for b.Loop() {
		if _, err := p.do(b.Context(), &jobsOf(b, p)[0], false); err != nil {
			b.Fatal(err)
		}
	}
}

func jobsOf(t testing.TB, p *Plan) []job {
	t.Helper()
	jobs, err := p.jobs(p.Policies[0], &p.Fleet, 1)
	if err != nil {
		t.Fatal(err)
	}
	return jobs
}
