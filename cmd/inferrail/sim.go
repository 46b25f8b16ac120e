package main

import (
	"context"
	"fmt"
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

// maxSims bounds --sim: more would measure the machine, not the agent.
const maxSims = 64

// sims are the simulated engines that the agent command runs beside the agent.
type sims []*simulator.Server

// startSims starts n engines of one model on free loopback ports, slow enough
// that a person sees the tokens come.
func startSims(n int) (sims, error) {
	var s sims
	for i := range n {
		server, err := simulator.Start(simulator.Config{
			ServedModelName:    []string{"sim"},
			TimePerOutputToken: 25 * time.Millisecond,
			Seed:               uint64(i),
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

func (s sims) replicas() []agent.ReplicaConfig {
	var list []agent.ReplicaConfig
	for i, server := range s {
		list = append(list, agent.ReplicaConfig{ID: fmt.Sprintf("sim-%d", i), URL: server.URL()})
	}
	return list
}
