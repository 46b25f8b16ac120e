package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/inferrail/inferrail/agent"
	"github.com/inferrail/inferrail/simulator"
)

type simCommand struct{ simulator.Config }

// Help is what its --help says beside the flags.
func (*simCommand) Help() string {
	return `It speaks as the engine does: routes, errors, pages of metrics, counts of cached
tokens, and KV cache events of vLLM and SGLang. It takes time as the engine would and
says words that mean nothing, the same ones to the same prompt.

  inferrail sim --port 8001
  inferrail sim --engine sglang --block-size 1 --kv-events-endpoint tcp://127.0.0.1:5557
  inferrail sim --engine tgi --fault-throttle 4 --fault-after-ms 30000 --fault-for-ms 60000

While it runs, whatever the engine:

  GET  /sim/stats     requests, tokens, hits, preemptions and blocks, as JSON
  GET  /sim/faults    its faults; POST replaces them, PATCH changes some:
                      curl -X PATCH -d '{"throttle":4}' localhost:8001/sim/faults
  POST /sim/restart   as if its process had died and been started again
  POST /sim/raw       a body of bytes that can be foretold

A request has faults of its own as "vllm_xargs":{"sim":{"break":"rst","break_after":3}}.`
}

// Run serves until the first signal.
func (c *simCommand) Run(ctx context.Context, e *env) error {
	cfg, err := c.Completed()
	if err != nil {
		return fmt.Errorf("simulated engine: %w", err)
	}
	server, err := simulator.Start(cfg)
	if err != nil {
		return err
	}
	defer server.Close()
	fmt.Fprintf(e.stdout, "simulated %s at %s serves %s; %s/sim/stats counts\n", cfg.Engine, server.URL(), strings.Join(cfg.ServedModelName, ", "), server.URL())
	ctx, cancel := e.interrupted(ctx)
	defer cancel()
	<-ctx.Done()
	return nil
}

// simModel is the model of the engines that --sim starts.
const simModel = "sim"

// maxSims bounds --sim: more would measure the machine, not the agent.
const maxSims = 64

// sims are the simulated engines that the agent command runs beside the agent.
type sims []*simulator.Server

// startSims starts n engines of one model on free loopback ports, slow enough
// that a person sees the tokens come. They tell all that an engine can tell of
// its cache.
func startSims(n int) (sims, error) {
	var s sims
	for i := range n {
		server, err := simulator.Start(simulator.Config{
			ServedModelName:    []string{simModel},
			TimePerOutputToken: 25 * time.Millisecond,
			Seed:               uint64(i),

			EnablePromptTokensDetails: true,
			KVEvents:                  simulator.KVEvents{Endpoint: "tcp://127.0.0.1:0", ReplayEndpoint: "tcp://127.0.0.1:0"},
		})
		if err != nil {
			s.close()
			return nil, err
		}
		s = append(s, server)
	}
	return s, nil
}

func (s sims) close() {
	for _, server := range s {
		server.Close()
	}
}

// addTo adds the engines to a configuration, and what tokenizer they have, unless
// it says so itself.
func (s sims) addTo(c *agent.Config) {
	for i, server := range s {
		c.Replicas = append(c.Replicas, agent.ReplicaConfig{ID: fmt.Sprintf("sim-%d", i), URL: server.URL()})
	}
	if len(s) == 0 {
		return
	}
	i := slices.IndexFunc(c.Models, func(m agent.ModelConfig) bool { return m.Name == simModel || slices.Contains(m.Aliases, simModel) })
	if i >= 0 && c.Models[i].Name != simModel {
		return // the name is another model's, and the engines' model is not asked for by it
	}
	if i < 0 {
		i = len(c.Models)
		c.Models = append(c.Models, agent.ModelConfig{Name: simModel})
	}
	if m := &c.Models[i]; m.Tokenizer == "" {
		m.Tokenizer = "builtin:sim"
	}
}
