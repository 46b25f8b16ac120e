package main

import (
	"context"

	"github.com/inferrail/inferrail/bench"
)

type benchCommand struct {
	Run      trialCommand    `cmd:"" help:"Ask a gateway or an engine for a workload, at its times, and tell how it was served."`
	Compare  contestCommand  `cmd:"" help:"Ask simulated engines for the same workload under each policy, and tell what that makes of it."`
	Datapath datapathCommand `cmd:"" help:"CPU, latency and wake-ups of streamed answers, beside nginx and haproxy. Needs root."`
	Gateway  gatewayCommand  `cmd:"" help:"Latency, CPU and memory of small requests, beside nginx, haproxy and other routers. Needs root."`
	Plot     plotCommand     `cmd:"" help:"Draw charts of what simulate and compare have written with --json."`
	Report   reportCommand   `cmd:"" help:"Run the evaluation, and write a report about it."`
	Worker   workerCommand   `cmd:"" hidden:"" passthrough:"" help:"One process of a benchmark; started by the benchmark."`
}

type trialCommand struct{ bench.Trial }

// Run stops at the first signal and tells of what there was until then.
func (c *trialCommand) Run(ctx context.Context, e *env) error {
	ctx, cancel := e.interrupted(ctx)
	defer cancel()
	c.Stdout, c.Stderr = e.stdout, e.stderr
	return c.Trial.Run(ctx)
}

type contestCommand struct{ bench.Contest }

// Run stops at the first signal and tells of the runs that were over.
func (c *contestCommand) Run(ctx context.Context, e *env) error {
	ctx, cancel := e.interrupted(ctx)
	defer cancel()
	c.Stdout, c.Stderr = e.stdout, e.stderr
	return c.Contest.Run(ctx)
}

type datapathCommand struct{ bench.Datapath }

// Run stops at the first signal.
func (c *datapathCommand) Run(ctx context.Context, e *env) error {
	ctx, cancel := e.interrupted(ctx)
	defer cancel()
	c.Stdout, c.Stderr = e.stdout, e.stderr
	return c.Datapath.Run(ctx)
}

type gatewayCommand struct{ bench.Gateway }

// Run stops at the first signal.
func (c *gatewayCommand) Run(ctx context.Context, e *env) error {
	ctx, cancel := e.interrupted(ctx)
	defer cancel()
	c.Stdout, c.Stderr = e.stdout, e.stderr
	return c.Gateway.Run(ctx)
}

type plotCommand struct{ bench.Plot }

func (c *plotCommand) Run(e *env) error {
	c.Stdout = e.stdout
	return c.Plot.Run()
}

type reportCommand struct{ bench.Evaluation }

// Run stops at the first signal, and keeps what was found until then.
func (c *reportCommand) Run(ctx context.Context, e *env) error {
	ctx, cancel := e.interrupted(ctx)
	defer cancel()
	c.Stdout, c.Stderr = e.stdout, e.stderr
	return c.Evaluation.Run(ctx)
}

type workerCommand struct {
	Args []string `arg:"" optional:""`
}

// Run leaves signals to the benchmark, which ends its workers itself.
func (c *workerCommand) Run() error { return bench.Worker(c.Args) }
