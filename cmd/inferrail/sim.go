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

// Run serves until the first signal.
func (c *simCommand) Run(ctx context.Context, e *env) error {
	server, err := simulator.Start(c.Config)
	if err != nil {
		return err
	}
	defer server.Close()
	fmt.Fprintf(e.stdout, "simulated engine at %s serves %s\n", server.URL(), strings.Join(c.ServedModelName, ", "))
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
