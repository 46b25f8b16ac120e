package bench

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/goccy/go-yaml"

	"github.com/inferrail/inferrail/simulator"
	"github.com/inferrail/inferrail/simulator/virtual"
	"github.com/inferrail/inferrail/simulator/workload"
)

// Contest runs the same workload under several ways to choose among engines: inferrail
// bench compare. Every run has fresh engines, a fresh gateway and cold caches, and the
// same requests at the same times. Its fields are command line flags (see
// cmd/inferrail). Run is called once.
type Contest struct {
	Traffic `embed:""`
	Asking  `embed:""`

	Policies    []string `default:"round_robin,least_request,lmetric,sticky,cost_model" aliases:"policy" help:"Policies of the agent to compare."`
	Contestants []string `placeholder:"NAME" help:"Others to compare them with: nginx, nginx-least-conn, haproxy, haproxy-leastconn, sglang-router, vllm-router. The routers are installed from PyPI."`
	Seeds       int      `default:"3" help:"Runs of each, with workloads of different seeds; the figures are medians over them."`
	Seed        uint64   `default:"1" help:"The first of the seeds."`
	Attempts    int      `default:"2" help:"How often a run is made that is doubtful; the least doubtful one counts."`

	Replicas  int           `short:"r" default:"4" help:"Engines."`
	Datapath  string        `default:"copy" help:"The tier that the agent relays answers with: auto, packet or copy."`
	Engine    string        `enum:"vllm,sglang" default:"vllm" help:"Which engines are simulated: vllm or sglang."`
	Profile   string        `placeholder:"NAME" help:"GPU and model whose times and sizes the engines have (inferrail sim --profile)."`
	KVBlocks  int           `placeholder:"N" help:"Blocks of each engine's KV cache, by default what the profile has, or 4000,"`
	BlockSize int           `placeholder:"N" help:"of so many tokens, by default 16."`
	MaxSeqs   int           `placeholder:"N" help:"Most sequences that an engine runs at the same time."`
	Set       []string      `sep:"none" placeholder:"KEY=VALUE" help:"Anything else of the engines, such as prefill_a=40: flags of inferrail sim, with _ for -. Repeatable."`
	Routing   string        `placeholder:"YAML" help:"More of the agent's routing, such as 'admission: {mode: absolute}'."`
	Budget    time.Duration `placeholder:"TIME" help:"How long first tokens may take, told to the agent with every request."`
	Events    bool          `default:"true" negatable:"" help:"Engines publish what their caches hold."`

	JSON    string `name:"json" placeholder:"FILE" type:"path" help:"Write the comparison here."`
	Records string `placeholder:"DIR" type:"path" help:"Write what became of each request into this folder, a file for each run."`
	Plot    string `placeholder:"DIR" type:"path" help:"Write charts of it into this folder."`

	// Simulated is what the engines are beyond the flags.
	Simulated simulator.Config `kong:"-"`
	// Program is how to run this program; by default the one that runs.
	Program []string `kong:"-"`
	// Stdout receives the table, Stderr the progress. Nil is the process's own.
	Stdout io.Writer `kong:"-"`
	Stderr io.Writer `kong:"-"`

	program []string
}

// contestModel is the model that the engines serve.
const contestModel = "sim"

// Run runs all, prints a table and writes the results. A contestant of others that
// cannot be had is a line that says so. Run fails when one of the agent's policies could
// not be run, and, after the table and the results, when figures are doubtful.
func (c *Contest) Run(ctx context.Context) error {
	if c.Stdout == nil {
		c.Stdout = os.Stdout
	}
	if c.Stderr == nil {
		c.Stderr = os.Stderr
	}
	rivals, err := c.check()
	if err != nil {
		return fmt.Errorf("bench compare: %w", err)
	}
	comparison := workload.Comparison{Face: "http", Replicas: c.Replicas, Speed: c.Speed, Limits: c.limits(), Engine: c.engines()}
	absent := map[string]error{}
	for i := range rivals {
		if r := &rivals[i]; r.prepare != nil {
			fmt.Fprintf(c.Stderr, "bench compare: looking for %s, or installing it\n", r.name)
			if err := r.prepare(ctx); err != nil {
				absent[r.name] = err
			}
		}
	}
	runs := map[string][]workload.Summary{}
	for k := range c.Seeds {
		seed := c.Seed + uint64(k)
		w, err := c.Traffic.load(seed)
		if err != nil {
			return fmt.Errorf("bench compare: %w", err)
		}
		if comparison.Workload == "" {
			comparison.Workload, comparison.Marks = w.Name, workload.Marks(w.Throttles)
		}
		for i := range rivals {
			// Who runs first meets another machine than who runs last.
			r := &rivals[(i+k)%len(rivals)]
			if absent[r.name] != nil {
				continue
			}
			name := fmt.Sprintf("[%d/%d] %s, seed %d", k*len(rivals)+i+1, c.Seeds*len(rivals), r.name, seed)
			s, err := c.compete(ctx, r, w, seed, name)
			if ctx.Err() != nil {
				return errors.Join(fmt.Errorf("bench compare ended early: %w", context.Cause(ctx)), c.conclude(&comparison, rivals, runs, absent))
			}
			if err != nil && r.policy != "" {
				return fmt.Errorf("bench compare: %s, seed %d: %w", r.name, seed, err)
			}
			if err != nil {
				absent[r.name] = err
				continue
			}
			runs[r.name] = append(runs[r.name], s)
		}
		comparison.Seeds = append(comparison.Seeds, seed)
	}
	return c.conclude(&comparison, rivals, runs, absent)
}

// check fills in what the flags leave open and returns who competes.
func (c *Contest) check() ([]rival, error) {
	if c.Replicas < 1 || c.Replicas > 64 {
		return nil, fmt.Errorf("--replicas must be 1 to 64, got %d; inferrail simulate takes more", c.Replicas)
	}
	if c.Seeds < 1 || c.Attempts < 1 {
		return nil, fmt.Errorf("--seeds and --attempts must be at least 1, got %d and %d", c.Seeds, c.Attempts)
	}
	if err := c.Asking.check(); err != nil {
		return nil, err
	}
	for _, name := range c.Policies {
		if _, err := virtual.ParsePolicy(name); err != nil {
			return nil, fmt.Errorf("--policies: %w", err)
		}
		if strings.Contains(name, ":") {
			return nil, fmt.Errorf("--policies %s: weights are for --routing", name)
		}
	}
	// Long runs must not end in a file that cannot be written.
	if err := CanWrite(c.JSON); err != nil {
		return nil, fmt.Errorf("--json: %w", err)
	}
	for _, dir := range []string{c.Records, c.Plot} {
		if dir == "" {
			continue
		}
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, err
		}
	}
	e := &c.Simulated
	e.Engine = cmp.Or(e.Engine, c.Engine, "vllm")
	e.NumGPUBlocks, e.BlockSize = cmp.Or(e.NumGPUBlocks, c.KVBlocks), cmp.Or(e.BlockSize, c.BlockSize)
	e.MaxNumSeqs = cmp.Or(e.MaxNumSeqs, c.MaxSeqs)
	if err := c.set(e); err != nil {
		return nil, err
	}
	if _, err := (simulator.Config{Profile: e.Profile}).Completed(); err != nil {
		return nil, fmt.Errorf("--profile: %w", err)
	}
	if c.Profile == "" {
		e.NumGPUBlocks, e.BlockSize = cmp.Or(e.NumGPUBlocks, 4000), cmp.Or(e.BlockSize, 16)
	}
	e.Port, e.ServedModelName, e.EnablePromptTokensDetails = 0, []string{contestModel}, true
	if c.Events {
		e.KVEvents.Endpoint, e.KVEvents.ReplayEndpoint = "tcp://127.0.0.1:0", "tcp://127.0.0.1:0"
	}
	if c.program = c.Program; len(c.program) == 0 {
		self, err := os.Executable()
		if err != nil {
			return nil, err
		}
		c.program = []string{self}
	}
	return rivalsOf(c.Policies, c.Contestants)
}

// set sets keys of the engines' configuration.
func (c *Contest) set(e *simulator.Config) error {
	keys := c.Set
	if c.Profile != "" {
		keys = append([]string{"profile=" + c.Profile}, keys...)
	}
	for _, key := range keys {
		name, value, ok := strings.Cut(key, "=")
		if !ok {
			return fmt.Errorf("--set %s: want KEY=VALUE", key)
		}
		if err := yaml.UnmarshalWithOptions([]byte(name+": "+value), e, yaml.Strict()); err != nil {
			first, _, _ := strings.Cut(err.Error(), "\n")
			return fmt.Errorf("the engines' %s: %s", key, first)
		}
	}
	return nil
}

// engines says what the engines are.
func (c *Contest) engines() string {
	e := &c.Simulated
	said := e.Engine
	if c.Profile != "" {
		said += ", " + c.Profile
	}
	if e.NumGPUBlocks > 0 {
		said += fmt.Sprintf(", %d blocks of %d tokens", e.NumGPUBlocks, cmp.Or(e.BlockSize, 16))
	}
	for _, key := range c.Set {
		said += ", " + key
	}
	return said
}

// compete makes one run, again if it is doubtful, and returns the least doubtful.
func (c *Contest) compete(ctx context.Context, r *rival, w *workload.Workload, seed uint64, name string) (best workload.Summary, err error) {
	for attempt := 1; ; attempt++ {
		s, err := c.once(ctx, r, w, seed, name)
		if err != nil {
			return s, err
		}
		line := fmt.Sprintf("%s: first token p50 %.0f ms, p99 %.0f ms, %.1f %% cached", name, s.TTFT.P50, s.TTFT.P99, 100*s.HitRate)
		if s.Failed+s.Refused > 0 {
			line += fmt.Sprintf(", %d of %d not served", s.Failed+s.Refused, s.Requests)
		}
		if len(s.Doubts) > 0 {
			line += "; doubtful: " + strings.Join(s.Doubts, "; ")
		}
		fmt.Fprintln(c.Stderr, line)
		if attempt == 1 || len(s.Doubts) < len(best.Doubts) || len(s.Doubts) == len(best.Doubts) && s.Lag.P99 < best.Lag.P99 {
			best = s
		}
		if len(best.Doubts) == 0 || attempt >= c.Attempts {
			return best, nil
		}
	}
}

// once makes one run.
func (c *Contest) once(ctx context.Context, r *rival, w *workload.Workload, seed uint64, name string) (s workload.Summary, err error) {
	dir, err := os.MkdirTemp("", "inferrail-bench-")
	if err != nil {
		return s, err
	}
	defer os.RemoveAll(dir)
	engine := c.Simulated
	if n := longest(w); engine.MaxModelLen == 0 && n > usualLength(&engine) {
		engine.MaxModelLen = n // An engine without room for that says so.
	}
	engines, err := startSimulators(ctx, c.program, dir, c.Replicas, engine)
	if err != nil {
		return s, err
	}
	defer engines.stop()
	gate, err := c.startRival(ctx, r, dir, engines.urls)
	if err != nil {
		return s, err
	}
	defer gate.stop()
	e, err := newEndpoint(EndpointOptions{URL: gate.url, Budget: c.Budget}, c.Timeout)
	if err != nil {
		return s, err
	}
	defer e.close()
	l := c.Asking.newLoad(e, w, workload.BodyOptions{Model: contestModel, Say: true})
	if r.policy != "" {
		for i := range engines.urls {
			l.replicas = append(l.replicas, replicaName(i)) // throttles are of numbers
		}
	}
	throttled, endThrottles := context.WithCancel(ctx)
	var throttling sync.WaitGroup
	var throttleErr error
	throttling.Go(func() { throttleErr = throttle(throttled, w.Throttles, engines.urls, time.Now()) })
	result, err := l.runShown(ctx, c.Stderr, name)
	endThrottles()
	throttling.Wait()
	if err = errors.Join(err, throttleErr, gate.process.running(), engines.process.running()); err != nil {
		return s, err
	}
	s = workload.Summarize(result.records, w, workload.SummaryOptions{Policy: r.name, Replicas: c.Replicas, Limits: c.limits(), Warm: c.Warm.of(w.Requests)})
	s.Doubts, s.Curves = c.doubts(result), workload.NewCurves(result.records, c.Warm.of(w.Requests))
	if c.Records != "" {
		if err := os.MkdirAll(c.Records, 0o755); err != nil {
			return s, err
		}
		if err := writeRecords(filepath.Join(c.Records, fmt.Sprintf("%s-%d.jsonl", r.name, seed)), result); err != nil {
			return s, err
		}
	}
	var all counters
	for _, url := range engines.urls {
		one, err := readCounters(ctx, url)
		if err != nil {
			return s, err
		}
		all.queried, all.hit = all.queried+one.queried, all.hit+one.hit
	}
	if all.queried > 0 {
		s.EngineHitRate = all.hit / all.queried
	}
	if s.Failed > 0 {
		for _, why := range failuresOf(s.Failures) {
			fmt.Fprintf(c.Stderr, "%s: %d %s, such as: %.300s\n", name, s.Failures[why], why, result.why[why])
		}
	}
	return s, nil
}

// usualLength is how many tokens an engine takes that is not told.
func usualLength(e *simulator.Config) int {
	return min(32768, (cmp.Or(e.NumGPUBlocks, 16384)-1)*cmp.Or(e.BlockSize, 16))
}

// longest is how many tokens the longest prompt and its answer have.
func longest(w *workload.Workload) (n int) {
	for i := range w.Requests {
		r := &w.Requests[i]
		n = max(n, r.Input()+r.Output)
	}
	return n
}

// throttle makes engines slow when it is due, until ctx ends.
func throttle(ctx context.Context, throttles []workload.Throttle, urls []string, began time.Time) error {
	type change struct {
		at     time.Duration
		engine int
	}
	var changes []change
	for _, t := range throttles {
		if t.Engine >= len(urls) {
			continue
		}
		changes = append(changes, change{t.At, t.Engine})
		if t.Until > 0 {
			changes = append(changes, change{t.Until, t.Engine})
		}
	}
	slices.SortStableFunc(changes, func(a, b change) int { return cmp.Compare(a.at, b.at) })
	for _, c := range changes {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(time.Until(began.Add(c.at))):
		}
		if err := slow(ctx, urls[c.engine], workload.FactorAt(throttles, c.engine, c.at)); err != nil && ctx.Err() == nil {
			return fmt.Errorf("cannot make engine %d slow: %w", c.engine, err)
		}
	}
	return nil
}

// conclude prints and writes what there is.
func (c *Contest) conclude(comparison *workload.Comparison, rivals []rival, runs map[string][]workload.Summary, absent map[string]error) error {
	doubtful := false
	for _, r := range rivals {
		if of := runs[r.name]; len(of) > 0 {
			medians := workload.Medians(of)
			medians.Curves = of[0].Curves
			for i := range of {
				of[i].Curves = nil
			}
			comparison.Runs = append(comparison.Runs, medians)
			comparison.All = append(comparison.All, of...)
			doubtful = doubtful || len(comparison.Runs[len(comparison.Runs)-1].Doubts) > 0
		}
	}
	if len(comparison.Runs) > 0 {
		if err := writeComparison(c.Stdout, comparison); err != nil {
			return err
		}
	}
	for _, r := range rivals {
		if err := absent[r.name]; err != nil {
			fmt.Fprintf(c.Stdout, "%s is left out: %v\n", r.name, err)
		}
	}
	if len(comparison.Runs) == 0 {
		return errors.New("no run was finished")
	}
	if c.JSON != "" {
		if err := writeJSON(c.JSON, comparison); err != nil {
			return err
		}
	}
	if c.Plot != "" {
		if err := WriteCharts(c.Plot, Charts(ChartName(comparison), comparison)); err != nil {
			return err
		}
	}
	if doubtful {
		return errDoubtful
	}
	return nil
}

// writeComparison prints the medians, and in brackets the least and the most of all
// seeds.
func writeComparison(to io.Writer, c *workload.Comparison) error {
	w := bufio.NewWriter(to)
	fmt.Fprintf(w, "%s; %d engines: %s\n", c.Workload, c.Replicas, c.Engine)
	fmt.Fprintf(w, "medians over %d seeds [least to most], times to the first token in ms; good: first token within %v, %v for each further one\n\n",
		len(c.Seeds), milliseconds(c.Limits.TTFT), milliseconds(c.Limits.TPOT))
	fmt.Fprintf(w, "%-18s %9s  %-17s %9s  %-17s %9s %7s %7s %8s %7s %7s %6s\n", "", "p50", "", "p99", "", "mean", "tpot", "cached", "engines", "hotspot", "good", "failed")
	for i := range c.Runs {
		s := &c.Runs[i]
		var p50, p99 []float64
		failed, refused := 0, 0
		for k := range c.All {
			if one := &c.All[k]; one.Policy == s.Policy {
				p50, p99 = append(p50, one.TTFT.P50), append(p99, one.TTFT.P99)
				failed, refused = failed+one.Failed, refused+one.Refused
			}
		}
		spread := func(values []float64) string {
			if len(values) < 2 {
				return ""
			}
			return fmt.Sprintf("[%.0f to %.0f]", slices.Min(values), slices.Max(values))
		}
		hotspot := "-"
		if s.Hotspot > 0 {
			hotspot = fmt.Sprintf("%.2f", s.Hotspot)
		}
		fmt.Fprintf(w, "%-18s %9.0f  %-17s %9.0f  %-17s %9.0f %7.1f %6.1f%% %7.1f%% %7s %6.1f%% %6d\n", s.Policy, s.TTFT.P50, spread(p50), s.TTFT.P99, spread(p99), s.TTFT.Mean,
			s.TPOT.P50, 100*s.HitRate, 100*s.EngineHitRate, hotspot, 100*s.Good, failed+refused)
	}
	for i := range c.Runs {
		for _, doubt := range c.Runs[i].Doubts {
			fmt.Fprintf(w, "DOUBTFUL: %s: %s\n", c.Runs[i].Policy, doubt)
		}
	}
	return w.Flush()
}
