package virtual

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/simulator"
	"github.com/inferrail/inferrail/simulator/workload"
)

// Plan is a comparison that is to be made: one workload before one fleet, under several
// policies. It is made by the command line or a report, and not changed while it is
// carried out; all of it must be set but what says otherwise.
type Plan struct {
	// Workloads are what is served, as fast as recorded: one for each of Seeds, or one
	// for all of them.
	Workloads []*workload.Workload
	Seeds     []uint64
	Fleet     Fleet
	// Engine says for people what the engines are.
	Engine string
	// Policies are names of policies, maybe with weights: "cost_model:own_work=2".
	Policies []string
	// Speed is how many times faster than recorded the requests come; 0 is 1.
	Speed  float64
	Limits workload.Limits
	// Warm leaves out the requests that come before, at any speed in the same place of
	// the workload: it is a time at the speed that was recorded.
	Warm time.Duration
	// Served, if not nil, counts the requests of all runs that are over.
	Served *atomic.Int64
}

// Names of policies in the order in which they are compared: simple ones first.
var usualPolicies = []string{"round_robin", "random", "least_request", "p2c", "sticky", "prefix_hash", "kv_aware", "nlms", "lmetric", "cost_model"}

// UsualPolicies are all that there are, the simplest first and the default last.
func UsualPolicies() []string { return slices.Clone(usualPolicies) }

// ParsePolicy returns the policy that a name, with or without weights, stands for.
func ParsePolicy(spec string) (policy.Policy, error) {
	name, rest, weighted := strings.Cut(spec, ":")
	weights := map[string]float64{}
	for weighted {
		var pair string
		pair, rest, weighted = strings.Cut(rest, ":")
		which, value, ok := strings.Cut(pair, "=")
		v, err := strconv.ParseFloat(value, 64)
		if !ok || err != nil || which == "" {
			return nil, fmt.Errorf("policy %q: %q is no weight, which is like own_work=2", spec, pair)
		}
		weights[which] = v
	}
	return policy.New(name, weights)
}

// job is one run of a Plan.
type job struct {
	policy   policy.Policy
	name     string
	workload *workload.Workload
	fleet    *Fleet
	seed     uint64
	warm     time.Duration
}

// do serves the job and makes its summary.
func (p *Plan) do(ctx context.Context, j *job, curves bool) (workload.Summary, error) {
	o, err := j.fleet.Serve(ctx, j.workload, j.policy, Options{Seed: j.seed, Served: p.Served, Warm: j.warm})
	if err != nil {
		return workload.Summary{}, fmt.Errorf("policy %s: %w", j.name, err)
	}
	s := p.summary(o, j)
	if curves {
		s.Curves = workload.NewCurves(o.Records, j.warm)
	}
	return s, nil
}

// summary is the summary of a job of which this came.
func (p *Plan) summary(o *Outcome, j *job) workload.Summary {
	s := workload.Summarize(o.Records, j.workload, workload.SummaryOptions{
		Policy: j.name, Replicas: len(j.fleet.Engines), Limits: p.Limits, Ahead: o.Ahead, Warm: j.warm,
	})
	s.ITL = quantilesOf(o.Gaps)
	hit, queried := 0, 0
	for _, c := range o.Counts {
		hit, queried = hit+c.Hit, queried+c.Queried
	}
	if queried > 0 {
		s.EngineHitRate = float64(hit) / float64(queried)
	}
	return s
}

// quantilesOf are those of the times between tokens.
func quantilesOf(g *simulator.Gaps) workload.Quantiles {
	q := g.Quantiles(50, 90, 99)
	return workload.Quantiles{Mean: milliseconds(g.Mean()), P50: milliseconds(q[0]), P90: milliseconds(q[1]), P99: milliseconds(q[2]), Max: milliseconds(g.Longest())}
}

// speed is Speed, or 1.
func (p *Plan) speed() float64 {
	if p.Speed > 0 {
		return p.Speed
	}
	return 1
}

// jobs are the runs of one policy at a speed, one for each seed.
func (p *Plan) jobs(name string, fleet *Fleet, speed float64) ([]job, error) {
	chosen, err := ParsePolicy(name)
	if err != nil {
		return nil, err
	}
	list := make([]job, len(p.Seeds))
	for i, seed := range p.Seeds {
		list[i] = job{chosen, name, p.workload(i).Faster(speed), fleet, seed, time.Duration(float64(p.Warm) / speed)}
	}
	return list, nil
}

// workload is that of seed i.
func (p *Plan) workload(i int) *workload.Workload {
	return p.Workloads[min(i, len(p.Workloads)-1)]
}

func (p *Plan) check() error {
	switch {
	case len(p.Policies) == 0:
		return errors.New("there is no policy to compare")
	case len(p.Seeds) == 0:
		return errors.New("a run has a seed")
	case len(p.Workloads) != 1 && len(p.Workloads) != len(p.Seeds):
		return fmt.Errorf("there are %d workloads for %d seeds", len(p.Workloads), len(p.Seeds))
	}
	for _, name := range p.Policies {
		if _, err := ParsePolicy(name); err != nil {
			return err
		}
	}
	if err := p.Fleet.Admission.Check(); err != nil {
		return err
	}
	_, err := p.Fleet.configs()
	return err
}

// Compare serves the workload under each of the policies, as many runs at a time as
// there are processors, and finds what none can be better than. What it returns does
// not depend on how many there are.
func (p *Plan) Compare(ctx context.Context) (*workload.Comparison, error) {
	if err := p.check(); err != nil {
		return nil, err
	}
	speed := p.speed()
	c := &workload.Comparison{
		Workload: p.Workloads[0].Name, Face: "virtual", Replicas: len(p.Fleet.Engines), Engine: p.Engine, Speed: speed,
		Limits: p.Limits, Seeds: p.Seeds, Runs: make([]workload.Summary, len(p.Policies)),
	}
	var jobs []job
	for _, name := range p.Policies {
		more, err := p.jobs(name, &p.Fleet, speed)
		if err != nil {
			return nil, err
		}
		jobs = append(jobs, more...)
	}
	n := len(p.Seeds)
	all, limits := make([]workload.Summary, len(jobs)), make([]limit, len(p.Workloads))
	shared := make([]workload.Summary, 0, n)
	if p.Fleet.WholeBlocks() {
		shared = shared[:n]
	}
	err := inParallel(ctx, len(limits)+len(shared)+len(jobs), func(ctx context.Context, i int) (err error) {
		if i < len(limits) {
			limits[i], err = p.limit(jobs[i].workload, jobs[i].warm)
			return err
		}
		if i -= len(limits); i < len(shared) {
			shared[i], err = p.shared(ctx, jobs[i])
			return err
		}
		i -= len(shared)
		all[i], err = p.do(ctx, &jobs[i], true)
		return err
	})
	if err != nil {
		return nil, err
	}
	c.Marks = workload.Marks(slices.Concat(jobs[0].workload.Throttles, p.Fleet.Throttles))
	for i := range p.Policies {
		runs := all[i*n:][:n]
		for k := range runs {
			runs[k].Ceiling = limits[min(k, len(limits)-1)].ceiling
		}
		c.Runs[i] = workload.Medians(runs)
		c.Runs[i].Curves = runs[0].Curves
	}
	if n > 1 {
		for i := range all {
			all[i].Curves = nil
		}
		c.All = all
	}
	bounds := make([]workload.Summary, len(limits))
	for i, l := range limits {
		bounds[i] = l.bound
	}
	bound := workload.Medians(bounds)
	bound.Curves = bounds[0].Curves
	c.Bound = &bound
	if len(shared) > 0 {
		s := workload.Medians(shared)
		c.Shared = &s
	}
	c.Infinite = median(limits, func(l *limit) float64 { return l.infinite })
	c.Pooled = median(limits, func(l *limit) float64 { return l.pooled })
	c.Least = median(limits, func(l *limit) float64 { return l.least })
	return c, nil
}

// shared is the summary of the workload of j as Fleet.Shared serves it.
func (p *Plan) shared(ctx context.Context, j job) (workload.Summary, error) {
	size, _, err := p.Fleet.Blocks()
	if err != nil {
		return workload.Summary{}, err
	}
	o, err := j.fleet.Shared(ctx, j.workload, NewChains(j.workload, size, j.warm), Options{Seed: j.seed, Served: p.Served, Warm: j.warm})
	if err != nil {
		return workload.Summary{}, fmt.Errorf("shared: %w", err)
	}
	j.name = "shared"
	return p.summary(o, &j), nil
}

// limit is what no policy can be better than with one workload.
type limit struct {
	bound                            workload.Summary
	infinite, ceiling, pooled, least float64
}

func (p *Plan) limit(w *workload.Workload, warm time.Duration) (limit, error) {
	size, blocks, err := p.Fleet.Blocks()
	if err != nil {
		return limit{}, err
	}
	chains := NewChains(w, size, warm)
	records := p.Fleet.Bound(w, chains)
	bound := workload.Summarize(records, w, workload.SummaryOptions{Policy: "bound", Replicas: len(p.Fleet.Engines), Limits: p.Limits, Warm: warm})
	bound.Curves = workload.NewCurves(records, warm)
	least := time.Duration(0)
	if p.Fleet.WholeBlocks() {
		least = p.Fleet.Least(records, warm)
	}
	return limit{
		bound: bound, infinite: chains.Infinite(), ceiling: chains.Ceiling(blocks), pooled: chains.Pooled(blocks), least: milliseconds(least),
	}, nil
}

// median is the median of what f makes of each, of which there is one at least.
func median(list []limit, f func(*limit) float64) float64 {
	values := make([]float64, len(list))
	for i := range list {
		values[i] = f(&list[i])
	}
	slices.Sort(values)
	n := len(values)
	return values[(n-1)/2]/2 + values[n/2]/2
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// inParallel calls do with each number below n, on as many goroutines as there are
// processors, and returns when all have returned: the error of the lowest number. ctx
// of the others ends with the first error.
func inParallel(ctx context.Context, n int, do func(ctx context.Context, i int) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var next atomic.Int64
	var workers sync.WaitGroup
	errs := make([]error, n)
	for range min(runtime.GOMAXPROCS(0), n) {
		workers.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				if errs[i] = ctx.Err(); errs[i] == nil {
					errs[i] = do(ctx, i)
				}
				if errs[i] != nil {
					cancel()
				}
			}
		})
	}
	workers.Wait()
	var first error
	for _, err := range errs {
		// What was cancelled is not why.
		if first == nil || errors.Is(first, context.Canceled) && err != nil {
			first = err
		}
	}
	return first
}
