package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/inferrail/inferrail/agent"
	"github.com/inferrail/inferrail/bench"
	"github.com/inferrail/inferrail/simulator"
)

// demoCommand shows on simulated engines what choosing by prompt and proven speed does.
type demoCommand struct{ bench.Demo }

// demoPolicies are what it compares.
var demoPolicies = []string{"round_robin", "sticky", "cost_model"}

// demoEngines is how many each of them has.
const demoEngines = 3

// Run ends by itself in less than a minute, or at the first signal.
func (c *demoCommand) Run(ctx context.Context, e *env) error {
	ctx, cancel := e.interrupted(ctx)
	defer cancel()
	c.Stdout, c.Terminal = e.stdout, isTerminal(e.stdout) && c.Sessions <= 8
	var gateways []*demoGateway
	defer func() {
		var closing sync.WaitGroup
		for _, g := range gateways {
			closing.Go(g.close)
		}
		closing.Wait()
	}()
	for _, name := range demoPolicies {
		gateway, err := startDemoGateway(ctx, name, e.stderr)
		if err != nil {
			return err
		}
		gateways = append(gateways, gateway)
		c.Fleets = append(c.Fleets, gateway.fleet)
	}
	return c.Demo.Run(ctx)
}

// demoGateway is an agent before simulated engines, in this process.
type demoGateway struct {
	fleet   bench.DemoFleet
	engines sims
	signals chan os.Signal
	running sync.WaitGroup // of the agent
}

// startDemoGateway returns when all engines can be asked.
func startDemoGateway(ctx context.Context, name string, stderr io.Writer) (_ *demoGateway, err error) {
	g := &demoGateway{fleet: bench.DemoFleet{Policy: name}, signals: make(chan os.Signal, 2)}
	defer func() {
		if err != nil {
			g.close()
		}
	}()
	config := agent.DefaultConfig()
	config.Listen, config.AdminListen = "127.0.0.1:0", "127.0.0.1:0"
	// Three agents would have one datapath in the kernel.
	config.Datapath.Mode = "copy"
	config.Routing.DefaultPolicy = name
	config.Server.ShutdownTimeout = time.Second
	config.Models = []agent.ModelConfig{{Name: simModel, Tokenizer: "builtin:sim"}}
	for i := range demoEngines {
		server, err := simulator.Start(simulator.Config{
			ServedModelName: []string{simModel}, Seed: uint64(i), EnablePromptTokensDetails: true,
			KVEvents: simulator.KVEvents{Endpoint: "tcp://127.0.0.1:0", ReplayEndpoint: "tcp://127.0.0.1:0"},
		})
		if err != nil {
			return nil, err
		}
		g.engines = append(g.engines, server)
		g.fleet.Engines = append(g.fleet.Engines, server.URL())
		config.Replicas = append(config.Replicas, agent.ReplicaConfig{ID: fmt.Sprintf("e%d", i), URL: server.URL(), Engine: "vllm"})
	}
	a, err := agent.Start(ctx, config, slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: slog.LevelError})))
	if err != nil {
		return nil, fmt.Errorf("demo: %w", err)
	}
	g.running.Go(func() {
		if err := a.Run(g.signals); err != nil {
			fmt.Fprintf(stderr, "inferrail: the agent of %s: %v\n", name, err)
		}
	})
	g.fleet.URL = "http://" + a.Addr().String()
	for end := time.Now().Add(20 * time.Second); ; {
		up, of := a.Replicas()
		if up == of {
			return g, nil
		}
		if time.Now().After(end) {
			return nil, fmt.Errorf("demo: only %d of %d simulated engines answer the agent of %s; is the machine very busy?", up, of, name)
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("demo: interrupted")
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// close stops the agent, waits for it, and stops its engines.
func (g *demoGateway) close() {
	g.signals <- syscall.SIGTERM
	g.running.Wait()
	g.engines.close()
}

// demoColumns is how wide its table is with 8 sessions, and two more.
const demoColumns = 102

// isTerminal reports that w is a terminal on which the table can be drawn anew.
func isTerminal(w io.Writer) bool { return hasColumns(w, demoColumns) }

// hasColumns reports that w is a terminal of so many columns: a line that is broken in
// two cannot be drawn anew.
func hasColumns(w io.Writer, least int) bool {
	f, ok := w.(*os.File)
	if !ok || os.Getenv("TERM") == "dumb" {
		return false
	}
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	return err == nil && int(size.Col) >= least
}
