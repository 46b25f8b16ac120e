package main

import (
	"context"

	"github.com/inferrail/inferrail/bench"
)

type benchCommand struct {
	Datapath datapathCommand `cmd:"" help:"CPU, latency and wake-ups of streamed answers, beside nginx and haproxy. Needs root."`
	Gateway  gatewayCommand  `cmd:"" help:"Latency, CPU and memory of small requests, beside nginx, haproxy and other routers. Needs root."`
	Plot     plotCommand     `cmd:"" help:"Draw charts of what simulate and compare have written with --json."`
	Report   reportCommand   `cmd:"" help:"Run the evaluation, and write a report about it."`
	Worker   workerCommand   `cmd:"" hidden:"" passthrough:"" help:"One process of a benchmark; started by the benchmark."`
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
