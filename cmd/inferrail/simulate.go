package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/inferrail/inferrail/bench"
	"github.com/inferrail/inferrail/simulator"
	"github.com/inferrail/inferrail/simulator/virtual"
	"github.com/inferrail/inferrail/simulator/workload"
)

// simulateCommand serves a workload under several policies in virtual time, and tells
// how each did and what none can do better than.
type simulateCommand struct {
	Trace    []string `name:"trace" sep:"none" placeholder:"FILE" help:"Requests to serve: a trace of Mooncake or Azure, a ShareGPT file, or the agent's decision log; may be packed with gzip. Of a decision log all its files: repeatable, or a pattern in quotes ('decisions.jsonl*')."`
	Workload string   `name:"workload" placeholder:"NAME" help:"Requests to make and serve instead: w1 to w6, or a name (${workloads})."`
	Replicas int      `name:"replicas" default:"8" help:"Engines, unless --profile counts them."`
	Policy   []string `name:"policy" aliases:"policies" placeholder:"NAME" help:"Policy to compare, repeatable, maybe with weights (cost_model:own_work=2). Default: all of ${policies}."`
	Engine   string   `name:"engine" enum:"vllm,sglang,tgi,llamacpp,ollama" default:"vllm" help:"Whose cache and batching engines have: vllm, sglang, tgi, llamacpp or ollama."`
	Profile  []string `name:"profile" placeholder:"NAME[=N]" help:"GPU and model of the engines (${profiles}); repeatable with how many there are of each (h100-llama-8b=4). Default: h100-llama-8b."`

	TraceModel string `name:"trace-model" placeholder:"NAME" help:"Whose requests of a decision log, where it has those of several models."`

	Blocks    int `name:"blocks" default:"0" help:"Blocks of each engine's KV cache; 0 is as many as the profile has room for."`
	BlockSize int `name:"block-size" default:"0" help:"Tokens of a block; 0 is what the trace tells of, or else what the profile has."`

	Speed     float64       `name:"speed" default:"0" help:"Times faster than recorded; 0 is 1."`
	Rate      float64       `name:"rate" default:"0" help:"Requests a second, instead of --speed."`
	Requests  int           `name:"requests" default:"0" help:"Requests to serve; 0 is all of a trace, and 1,000 that are made, or 20,000 for --find-capacity."`
	MaxTokens int           `name:"max-tokens" default:"0" help:"No answer has more tokens than this; 0 is what the workload or the trace says."`
	Seed      []uint64      `name:"seed" default:"1" help:"Seed of what is random, repeatable: medians of as many runs."`
	WarmUp    time.Duration `name:"warm-up" default:"0s" help:"Leave out the requests of so long a beginning, at the recorded speed."`

	Agents   int           `name:"agents" default:"1" help:"Agents before the engines, which take the requests in turns."`
	Events   bool          `name:"events" default:"true" negatable:"" help:"Agents follow the KV events of engines that have any."`
	EventLag time.Duration `name:"event-lag" default:"1ms" help:"How long KV events take."`
	Lag      time.Duration `name:"lag" default:"250us" help:"How long anything else takes from an agent to an engine, and back."`
	Throttle []string      `name:"throttle" placeholder:"ENGINE:FACTOR:FROM:UNTIL" help:"Make an engine so many times slower for a while (0:8:60s:120s), repeatable; without UNTIL for good."`
	Slow     []string      `name:"slow" placeholder:"ENGINE:FACTOR" help:"Make an engine so many times slower from the beginning on, repeatable."`

	Hold    time.Duration `name:"hold" default:"50ms" help:"With cost_model, agents hold requests back until a replica has less than so much work before it, and send the shortest first; 0s sends each at once."`
	Pieces  time.Duration `name:"pieces" default:"500ms" help:"With cost_model, agents let prompts that take longer be computed in pieces that take so long, at engines that tell of their caches; 0s sends all whole."`
	Prewarm time.Duration `name:"prewarm" default:"100ms" help:"With cost_model, agents let engines that tell of their caches and have nothing to prefill compute what many prompts begin with, in pieces that take so long; 0s computes nothing ahead."`

	Admission string        `name:"admission" placeholder:"MODE" help:"Refuse requests: rank_only, empirical or absolute. Default: take all."`
	Budget    time.Duration `name:"budget" default:"0s" help:"Time to first token that each request grants; 0 is any."`
	Queue     int           `name:"queue" default:"0" help:"Requests that wait at each agent instead of being refused."`

	FindCapacity bool          `name:"find-capacity" help:"Find the highest rate at which each policy keeps --slo-ttft and --slo-tpot at the 99th percentile, and how many replicas each needs for what the first policy serves."`
	SLOTTFT      time.Duration `name:"slo-ttft" default:"2s" help:"Time to first token that is good."`
	SLOTPOT      time.Duration `name:"slo-tpot" default:"100ms" help:"Time per output token that is good."`

	JSON string `name:"json" placeholder:"FILE" help:"Write the results as JSON; - is stdout, and the table goes to stderr."`
	Plot string `name:"plot" placeholder:"DIR" help:"Write charts into this folder."`
}

// Help is what kong shows behind the flags.
func (c *simulateCommand) Help() string {
	return `The policies and what is known of caches are the agent's own code; engines and
time are models. Equal flags give equal results.

  inferrail simulate --trace mooncake_conversation_trace.jsonl --plot charts
  inferrail simulate --trace 'decisions.jsonl*' --policy round_robin --policy cost_model
  inferrail simulate --workload w2 --profile l4-llama-8b=4 --profile h100-llama-8b=2
  inferrail simulate --workload w1 --find-capacity --policy round_robin,cost_model

The columns: hit is the part of prompt tokens that were cached, without as many as
were computed ahead (--prewarm), of max is of what caches of this size allow; of bound is the mean time to first token over that of a
fleet in which every engine holds everything and the earliest free one serves; shared
is the default policy before engines that find all that was in any request before, and
have room for it;
TPOT is the mean time between the tokens of an answer and ITL the time between any
two, in ms; hotspot is the work of the busiest engine over the mean; foretold is how
long first tokens were expected to take, over how long they took.`
}

// Run ends early at the first signal.
func (c *simulateCommand) Run(ctx context.Context, e *env) error {
	ctx, cancel := e.interrupted(ctx)
	defer cancel()
	plan, err := c.plan()
	if err != nil {
		return err
	}
	var served atomic.Int64
	plan.Served = &served
	stop := showProgress(e.stderr, &served)
	comparison, err := plan.Compare(ctx)
	if err == nil && c.FindCapacity {
		comparison.Capacity, err = plan.FindCapacity(ctx)
	}
	stop()
	switch {
	case errors.Is(context.Cause(ctx), errInterrupted):
		return fmt.Errorf("%w; nothing was written", errInterrupted)
	case err != nil:
		return err
	}
	return c.write(e, plan, comparison)
}

// write writes what has come out, wherever it is wanted.
func (c *simulateCommand) write(e *env, plan *virtual.Plan, comparison *workload.Comparison) error {
	var none error
	if allFailed(comparison) {
		none = errors.New("no policy served any request: prompts with their answers are longer than an engine has room for (--blocks, --block-size, --profile), or admission refused them")
	}
	table := e.stdout
	if c.JSON == "-" {
		table = e.stderr
	}
	if err := virtual.WriteTable(table, comparison); err != nil {
		return err
	}
	for _, k := range comparison.Capacity {
		if lasts := plan.Lasts(k.Rate); k.Rate > 0 && lasts < time.Minute {
			fmt.Fprintf(table, "\n%s was found with only %v of traffic, which fills queues more than it loads engines; more --requests tell more\n", k.Policy, lasts.Round(time.Second))
			break
		}
	}
	if c.JSON != "" {
		if err := writeJSON(e, c.JSON, comparison); err != nil {
			return err
		}
	}
	if c.Plot != "" {
		if err := bench.WriteCharts(c.Plot, bench.Charts(bench.ChartName(comparison), comparison)); err != nil {
			return err
		}
	}
	return none
}

// allFailed reports that nothing was served, whatever the policy.
func allFailed(c *workload.Comparison) bool {
	for i := range c.Runs {
		if s := &c.Runs[i]; s.Requests == 0 || s.Failed+s.Refused < s.Requests {
			return false
		}
	}
	return len(c.Runs) > 0
}

// writeJSON writes v to a file, or to stdout for -.
func writeJSON(e *env, file string, v any) error {
	text, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	text = append(text, '\n')
	if file == "-" {
		_, err = e.stdout.Write(text)
		return err
	}
	return os.WriteFile(file, text, 0o644)
}

// showProgress shows, where w is a terminal, how many requests have been served, until
// the function that it returns is called.
func showProgress(w io.Writer, served *atomic.Int64) (stop func()) {
	if !hasColumns(w, 40) {
		return func() {}
	}
	over := make(chan struct{})
	var shown sync.WaitGroup
	began := time.Now()
	shown.Go(func() {
		tick := time.NewTicker(200 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				fmt.Fprintf(w, "\r\x1b[K%d requests served, %.0f s", served.Load(), time.Since(began).Seconds())
			case <-over:
				fmt.Fprint(w, "\r\x1b[K")
				return
			}
		}
	})
	return func() {
		close(over)
		shown.Wait()
	}
}

// plan is what the flags ask for, or all that is wrong with them.
func (c *simulateCommand) plan() (*virtual.Plan, error) {
	var errs []error
	bad := func(wrong bool, format string, args ...any) {
		if wrong {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	bad(len(c.Trace) == 0 && c.Workload == "", "say what is to be served: --trace FILE or --workload NAME")
	bad(len(c.Trace) > 0 && c.Workload != "", "--trace and --workload exclude each other")
	bad(c.Replicas < 1, "--replicas must be at least 1, got %d", c.Replicas)
	bad(c.Replicas > mostReplicas, "--replicas must be at most %d, got %d", mostReplicas, c.Replicas)
	bad(c.Speed != 0 && c.Rate != 0, "--speed and --rate exclude each other")
	bad(!(c.Speed >= 0) || c.Speed > 1e6, "--speed must be above 0, and at most a million, got %v", c.Speed)
	bad(!(c.Rate >= 0) || c.Rate > 1e6, "--rate must be above 0, and at most a million, got %v", c.Rate)
	bad(c.Requests < 0, "--requests must not be negative, got %d", c.Requests)
	bad(c.MaxTokens < 0, "--max-tokens must not be negative, got %d", c.MaxTokens)
	bad(c.Blocks < 0 || c.Blocks == 1 || c.Blocks > mostBlocks, "--blocks must be at least 2 and at most %d, got %d", mostBlocks, c.Blocks)
	bad(c.BlockSize < 0 || c.BlockSize > mostBlockSize, "--block-size must be at least 1 and at most %d, got %d", mostBlockSize, c.BlockSize)
	bad(c.Agents < 1 || c.Agents > 1000, "--agents must be between 1 and 1000, got %d", c.Agents)
	bad(c.WarmUp < 0, "--warm-up must not be negative, got %v", c.WarmUp)
	bad(c.Lag < 0 || c.EventLag < 0, "--lag and --event-lag must not be negative, got %v and %v", c.Lag, c.EventLag)
	bad(c.Budget < 0, "--budget must not be negative, got %v", c.Budget)
	bad(c.Hold < 0, "--hold must not be negative, got %v", c.Hold)
	bad(c.Prewarm < 0, "--prewarm must not be negative, got %v", c.Prewarm)
	bad(c.Pieces < 0, "--pieces must not be negative, got %v", c.Pieces)
	bad(c.Queue < 0, "--queue must not be negative, got %d", c.Queue)
	bad(c.SLOTTFT < 0 || c.SLOTPOT < 0, "--slo-ttft and --slo-tpot must not be negative, got %v and %v", c.SLOTTFT, c.SLOTPOT)
	bad(c.FindCapacity && c.SLOTTFT == 0 && c.SLOTPOT == 0, "--find-capacity needs --slo-ttft or --slo-tpot")
	bad((c.Budget > 0 || c.Queue > 0) && c.Admission == "", "--budget and --queue are of use with --admission only")
	admission := virtual.Admission{Mode: c.Admission, Budget: c.Budget, Queue: c.Queue}
	if err := admission.Check(); err != nil {
		errs = append(errs, fmt.Errorf("--admission: %w", err))
	}
	policies := c.Policy
	if len(policies) == 0 {
		policies = virtual.UsualPolicies()
	}
	for i, spec := range policies {
		if _, err := virtual.ParsePolicy(spec); err != nil {
			errs = append(errs, fmt.Errorf("--policy: %w", err))
		}
		for _, other := range policies[:i] {
			bad(other == spec, "--policy %s is given twice", spec)
		}
	}
	bad(c.TraceModel != "" && c.Workload != "", "--trace-model is of use with --trace only")
	// A long search must not end in a file that cannot be written.
	if err := bench.CanWrite(c.JSON); err != nil {
		errs = append(errs, fmt.Errorf("--json: %w", err))
	}
	if c.Plot != "" {
		if err := os.MkdirAll(c.Plot, 0o755); err != nil {
			errs = append(errs, fmt.Errorf("--plot: %w", err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}

	p := &virtual.Plan{
		Seeds: c.Seed, Policies: policies, Speed: c.Speed, Warm: c.WarmUp,
		Limits: workload.Limits{TTFT: milliseconds(c.SLOTTFT), TPOT: milliseconds(c.SLOTPOT)},
		Fleet: virtual.Fleet{
			Agents: c.Agents, Lag: c.Lag, EventLag: c.EventLag, Events: c.Events && (c.Engine == "vllm" || c.Engine == "sglang"),
			Hold: c.Hold, Pieces: c.Pieces, Prewarm: c.Prewarm, Admission: admission,
		},
	}
	if err := c.requests(p); err != nil {
		return nil, err
	}
	if err := c.engines(p); err != nil {
		return nil, err
	}
	for _, spec := range c.Slow {
		t, err := parseThrottle(spec, 2, len(p.Fleet.Engines))
		if err != nil {
			return nil, fmt.Errorf("--slow %s: %w", spec, err)
		}
		p.Fleet.Throttles = append(p.Fleet.Throttles, t)
	}
	for _, spec := range c.Throttle {
		t, err := parseThrottle(spec, 4, len(p.Fleet.Engines))
		if err != nil {
			return nil, fmt.Errorf("--throttle %s: %w", spec, err)
		}
		p.Fleet.Throttles = append(p.Fleet.Throttles, t)
	}
	return p, nil
}

// mostReplicas and mostBlocks bound a fleet: each replica has the memory of its cache.
const (
	mostReplicas = 10_000
	mostBlocks   = 1 << 26
	// Of a larger block no prompt has one.
	mostBlockSize = 1 << 30
)

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// requests sets the workloads of a plan, and its speed.
func (c *simulateCommand) requests(p *virtual.Plan) error {
	if c.Workload != "" {
		n := c.Requests
		if n == 0 && c.FindCapacity {
			n = 20_000
		}
		for _, seed := range c.Seed {
			w, err := workload.Generate(workload.Options{Name: c.Workload, Seed: seed, Rate: c.Rate, Requests: n, MaxTokens: c.MaxTokens})
			if err != nil {
				return err
			}
			if err := c.warm(w); err != nil {
				return err
			}
			p.Workloads = append(p.Workloads, w)
		}
		return nil
	}
	options := workload.ReadOptions{Rate: c.Rate, Seed: c.Seed[0], Model: c.TraceModel}
	w, err := options.Read(c.Trace...)
	if err != nil {
		return err
	}
	if c.MaxTokens > 0 {
		w = w.Shorter(c.MaxTokens)
	}
	if c.Requests > 0 {
		w = w.Limit(c.Requests)
	}
	last := w.Requests[len(w.Requests)-1].At
	if c.Rate > 0 {
		if last <= 0 {
			return fmt.Errorf("--rate: all requests of %s come at once", w.Name)
		}
		p.Speed = c.Rate * last.Seconds() / float64(len(w.Requests))
	}
	if err := c.warm(w); err != nil {
		return err
	}
	p.Workloads = []*workload.Workload{w}
	return nil
}

// warm says so when the warm-up leaves nothing of a workload.
func (c *simulateCommand) warm(w *workload.Workload) error {
	if last := w.Requests[len(w.Requests)-1].At; c.WarmUp > 0 && c.WarmUp > last {
		return fmt.Errorf("--warm-up is %v, and the last request comes after %v", c.WarmUp, last)
	}
	return nil
}

// engines sets those of a plan.
func (c *simulateCommand) engines(p *virtual.Plan) error {
	profiles := c.Profile
	if len(profiles) == 0 {
		profiles = []string{defaultProfile}
	}
	var names []string
	for _, spec := range profiles {
		name, count, counted := strings.Cut(spec, "=")
		n := c.Replicas
		if counted {
			var err error
			if n, err = strconv.Atoi(count); err != nil || n < 1 || n > mostReplicas {
				return fmt.Errorf("--profile %s: %q is not a number of replicas from 1 to %d", spec, count, mostReplicas)
			}
		} else if len(profiles) > 1 {
			return fmt.Errorf("--profile %s: of several profiles each says how many there are, like %s=4", spec, spec)
		}
		cfg := simulator.Config{Engine: c.Engine, Profile: name}
		usual, err := cfg.Completed()
		if err != nil {
			return fmt.Errorf("--profile %s: %w", spec, err)
		}
		size, tokens := usual.BlockSize, usual.BlockSize*usual.NumGPUBlocks
		switch {
		case c.BlockSize > 0:
			size = c.BlockSize
		case p.Workloads[0].Block > 0:
			size = p.Workloads[0].Block
		}
		cfg.BlockSize, cfg.NumGPUBlocks = size, max(tokens/size, 2)
		if c.Blocks > 0 {
			cfg.NumGPUBlocks = c.Blocks
		}
		cfg.MaxModelLen = (cfg.NumGPUBlocks - 1) * size
		if c.Engine == "llamacpp" || c.Engine == "ollama" {
			cfg.MaxModelLen = cfg.NumGPUBlocks * size / usual.MaxNumSeqs // of each slot
		}
		for range n {
			p.Fleet.Engines = append(p.Fleet.Engines, cfg)
		}
		if len(profiles) > 1 {
			name = spec
		}
		names = append(names, name)
	}
	if n := len(p.Fleet.Engines); n > mostReplicas {
		return fmt.Errorf("--profile: %d replicas are more than %d", n, mostReplicas)
	}
	blocks := 0
	for i := range p.Fleet.Engines {
		blocks += p.Fleet.Engines[i].NumGPUBlocks
	}
	if blocks > mostBlocks {
		return fmt.Errorf("%d replicas with %d blocks in all are more than fit into memory here; give fewer --replicas or --blocks, at most %d in all", len(p.Fleet.Engines), blocks, mostBlocks)
	}
	first := &p.Fleet.Engines[0]
	p.Engine = fmt.Sprintf("%s %s, %d blocks of %d", c.Engine, strings.Join(names, " and "), first.NumGPUBlocks, first.BlockSize)
	return nil
}

// defaultProfile is a common GPU with a common model.
const defaultProfile = "h100-llama-8b"

// parseThrottle reads ENGINE:FACTOR:FROM:UNTIL, of which there are at most so many parts.
func parseThrottle(spec string, parts, engines int) (t workload.Throttle, err error) {
	list := strings.Split(spec, ":")
	if len(list) < 2 || len(list) > parts || parts == 4 && len(list) < 3 {
		return t, errors.New([...]string{2: "want ENGINE:FACTOR, like 0:2", 4: "want ENGINE:FACTOR:FROM:UNTIL, like 0:8:60s:120s"}[parts])
	}
	if t.Engine, err = strconv.Atoi(list[0]); err != nil || t.Engine < 0 || t.Engine >= engines {
		return t, fmt.Errorf("%q is no engine; they are 0 to %d", list[0], engines-1)
	}
	if t.Factor, err = strconv.ParseFloat(list[1], 64); err != nil || !(t.Factor >= 1e-3 && t.Factor <= 1e3) {
		return t, fmt.Errorf("%q is no factor between 0.001 and 1000", list[1])
	}
	for i, to := range []*time.Duration{&t.At, &t.Until} {
		if len(list) > 2+i {
			if *to, err = time.ParseDuration(list[2+i]); err != nil || *to < 0 {
				return t, fmt.Errorf("%q is no time from the beginning, like 60s", list[2+i])
			}
		}
	}
	if len(list) == 4 && t.Until <= t.At {
		return t, fmt.Errorf("it ends at %v, before it begins", t.Until)
	}
	return t, nil
}
