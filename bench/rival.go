package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// rival is one way to choose among engines: the agent under one of its policies, or a
// proxy or router of others. A Contest runs each of them before the same engines.
type rival struct {
	name string
	// policy is the agent's; empty for others, who have a command, and may need to be
	// prepared.
	policy  string
	balance string
	command func(setup) ([]string, error)
	prepare func(context.Context) error
}

// others are the rivals beside the agent, each in the way to choose that its users would
// take for engines.
func others() []rival {
	list := []rival{
		{name: "nginx", command: nginxCommand},
		{name: "nginx-least-conn", command: nginxCommand, balance: "least_conn"},
		{name: "haproxy", command: haproxyCommand},
		{name: "haproxy-leastconn", command: haproxyCommand, balance: "leastconn"},
	}
	for i := range routers {
		r := &routers[i]
		list = append(list, rival{name: r.name, command: r.command, prepare: r.install, balance: "cache_aware"})
	}
	return list
}

// rivalsOf are the agent under each policy, and those of the others that are named.
func rivalsOf(policies, contestants []string) (rivals []rival, err error) {
	for _, p := range policies {
		rivals = append(rivals, rival{name: p, policy: p})
	}
	var names []string
	all := others()
	for _, o := range all {
		names = append(names, o.name)
	}
	for _, name := range contestants {
		i := slices.Index(names, name)
		if i < 0 {
			return nil, fmt.Errorf("--contestants %s: there are %s", name, strings.Join(names, ", "))
		}
		rivals = append(rivals, all[i])
	}
	for i := range rivals {
		if slices.ContainsFunc(rivals[:i], func(r rival) bool { return r.name == rivals[i].name }) {
			return nil, fmt.Errorf("%s is named twice", rivals[i].name)
		}
	}
	if len(rivals) == 0 {
		return nil, errors.New("no policy and no contestant: nothing to compare")
	}
	return rivals, nil
}

// gate is a rival that runs, at url. Whoever starts it stops it.
type gate struct {
	process *process
	url     string
}

// startRival starts a rival and returns when it passes requests on to all engines that
// it is said to. dir is for its files.
func (c *Contest) startRival(ctx context.Context, r *rival, dir string, engines []string) (g *gate, err error) {
	g = &gate{}
	defer func() {
		if err != nil {
			g.stop()
			err = fmt.Errorf("%s did not start: %w", r.name, err)
		}
	}()
	ctx, cancel := context.WithTimeoutCause(ctx, startTimeout, fmt.Errorf("not ready after %v", startTimeout))
	defer cancel()
	if r.policy != "" {
		return g, c.startAgent(ctx, g, r, dir, engines)
	}
	s := setup{clients: 4096, streamed: true, dir: dir, host: "127.0.0.1", balance: r.balance}
	for _, url := range engines {
		s.engines = append(s.engines, strings.TrimPrefix(url, "http://"))
	}
	if s.port, err = freePort(); err != nil {
		return g, err
	}
	command, err := r.command(s)
	if err != nil {
		return g, err
	}
	if g.process, err = start(nil, dir, r.name, command); err != nil {
		return g, err
	}
	g.url = "http://" + net.JoinHostPort(s.host, s.port)
	return g, g.await(ctx, func() error {
		page, err := exchangeOnce(ctx, "GET", g.url+"/v1/models", nil)
		// sglang-router gives the models of engines that are not SGLang that name, and
		// passes requests for any other on to them.
		if err == nil && !strings.Contains(string(page), `"`+contestModel+`"`) && !strings.Contains(string(page), `"unknown"`) {
			err = fmt.Errorf("it does not serve %s: %.200q", contestModel, page)
		}
		return err
	})
}

// startAgent starts the agent under a policy.
func (c *Contest) startAgent(ctx context.Context, g *gate, r *rival, dir string, engines []string) (err error) {
	var config strings.Builder
	block, routing := "", ""
	if c.Routing != "" {
		routing = ", " + c.Routing
	}
	if n := c.Simulated.BlockSize; n > 0 {
		block = fmt.Sprint(", block_size: ", n)
	}
	fmt.Fprintf(&config, `listen: 127.0.0.1:0
admin_listen: 127.0.0.1:0
datapath: {mode: %s}
models: [{name: %s, tokenizer: "builtin:sim"%s}]
routing: {default_policy: %s%s}
replicas:
`, c.Datapath, contestModel, block, r.policy, routing)
	for i, url := range engines {
		fmt.Fprintf(&config, "  - {id: %s, url: %q, engine: %s}\n", replicaName(i), url, c.Simulated.Engine)
	}
	file := filepath.Join(dir, "agent.yaml")
	if err := os.WriteFile(file, []byte(config.String()), 0o600); err != nil {
		return err
	}
	command := append(c.program[:len(c.program):len(c.program)], "agent", "--config", file)
	if g.process, err = start(nil, dir, r.name, command); err != nil {
		return err
	}
	var admin string
	return g.await(ctx, func() error {
		if admin == "" {
			log, err := os.ReadFile(g.process.log.Name())
			if err != nil {
				return err
			}
			m := listening.FindSubmatch(log)
			if m == nil {
				return errors.New("it does not say where it listens")
			}
			g.url, admin = "http://"+string(m[1]), string(m[2])
		}
		page, err := exchangeOnce(ctx, "GET", admin+"/metrics", nil)
		if err != nil {
			return err
		}
		if up := len(replicaUp.FindAll(page, -1)); up < len(engines) {
			return fmt.Errorf("%d of %d engines are up", up, len(engines))
		}
		return nil
	})
}

// replicaName is what an agent of a Contest calls an engine.
func replicaName(i int) string { return fmt.Sprintf("e%d", i) }

// What an agent says when it has started, and of its engines.
var (
	listening = regexp.MustCompile(`(?m)^listening  (\S+), admin (http://\S+)$`)
	replicaUp = regexp.MustCompile(`(?m)^inferrail_replica_up\{[^}]*\} 1$`)
)

// await calls ready until it has no error.
func (g *gate) await(ctx context.Context, ready func() error) error {
	for {
		err := ready()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return g.process.failed(fmt.Errorf("%w: %w", context.Cause(ctx), err))
		case <-g.process.ended:
			return g.process.running()
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func (g *gate) stop() {
	if g.process != nil {
		g.process.stop()
	}
}

// freePort is a port of loopback that nobody listens at, below those that the kernel
// gives to connections.
func freePort() (string, error) {
	for range 100 {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", 20000+rand.IntN(10000)))
		if err == nil {
			_, port, err := net.SplitHostPort(l.Addr().String())
			return port, errors.Join(err, l.Close())
		}
	}
	return "", errors.New("no free port from 20000 to 29999")
}
