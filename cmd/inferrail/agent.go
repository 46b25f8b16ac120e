package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"

	"github.com/inferrail/inferrail/agent"
)

// agentCommand's flags overwrite the keys of the configuration file that they
// name; replicas given here are added to the file's.
type agentCommand struct {
	Config        string   `short:"c" placeholder:"FILE" env:"INFERRAIL_CONFIG" help:"Configuration file (YAML)."`
	Listen        string   `placeholder:"ADDR" env:"INFERRAIL_LISTEN" help:"Where clients connect, by default :8080."`
	AdminListen   string   `placeholder:"ADDR" env:"INFERRAIL_ADMIN_LISTEN" help:"Metrics, health and debug pages, by default 127.0.0.1:9090."`
	Replica       []string `placeholder:"[ID=]URL" env:"INFERRAIL_REPLICAS" help:"An engine, such as http://10.0.0.10:8000. Repeatable."`
	DiscoverLocal bool     `env:"INFERRAIL_DISCOVERY_LOCAL" help:"Find engines that listen on this node."`
	Sim           int      `placeholder:"N" env:"INFERRAIL_SIM" help:"Start N simulated engines in this process and route to them too."`
	Iface         []string `placeholder:"NAME" env:"INFERRAIL_DATAPATH_INTERFACES" help:"Interface to attach the kernel datapath to, name or glob. Repeatable. By default loopback and those with a route to an engine or a client."`
	Datapath      string   `placeholder:"TIER" env:"INFERRAIL_DATAPATH_MODE" help:"auto (default), packet or copy. A tier that is asked for and cannot be had is an error."`
	LogLevel      string   `enum:"debug,info,warn,error" default:"info" env:"INFERRAIL_LOG_LEVEL" help:"debug, info, warn or error."`

	DatapathHook string `hidden:"" placeholder:"HOOK" env:"INFERRAIL_DATAPATH_HOOK" help:"auto, tcx or clsact."`
	DatapathLoop string `hidden:"" placeholder:"LOOP" env:"INFERRAIL_DATAPATH_LOOP" help:"auto, bpf_loop or bounded."`
}

// Run runs the agent until a signal has drained it.
func (c *agentCommand) Run(ctx context.Context, e *env) error {
	var level slog.Level
	if err := level.UnmarshalText([]byte(c.LogLevel)); err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(e.stderr, &slog.HandlerOptions{Level: level}))

	hangups := e.hangups
	if hangups == nil {
		// From now on, so that a hangup during the start does not end it.
		own := make(chan os.Signal, 1)
		signal.Notify(own, syscall.SIGHUP)
		defer signal.Stop(own)
		hangups = own
	}

	config, err := c.config()
	if err != nil {
		return err
	}
	sims, err := startSims(c.Sim)
	if err != nil {
		return err
	}
	defer sims.close()
	sims.addTo(&config)
	if err := config.Validate(); err != nil && c.Config != "" {
		return fmt.Errorf("%s: %w", c.Config, err)
	} else if err != nil {
		return err
	}

	a, err := agent.Start(ctx, config, log)
	if err != nil {
		return err
	}
	a.Follow(agent.Source{
		File: c.Config,
		Load: func() (agent.Config, error) {
			config, err := c.config()
			sims.addTo(&config)
			return config, err
		},
		Hangup: hangups,
	})
	stopped, stop := context.WithCancel(ctx)
	var told sync.WaitGroup
	told.Go(func() { announce(stopped, e.stdout, a) })
	err = a.Run(e.signals)
	stop()
	told.Wait()
	return err
}

// config is the file's configuration with the flags laid over it.
func (c *agentCommand) config() (agent.Config, error) {
	config := agent.DefaultConfig()
	if c.Config != "" {
		if err := config.ReadConfig(c.Config); err != nil {
			return config, err
		}
	}
	override := func(key *string, flag string) {
		if flag != "" {
			*key = flag
		}
	}
	override(&config.Listen, c.Listen)
	override(&config.AdminListen, c.AdminListen)
	override(&config.Datapath.Mode, c.Datapath)
	override(&config.Datapath.Hook, c.DatapathHook)
	override(&config.Datapath.Loop, c.DatapathLoop)
	if len(c.Iface) > 0 {
		config.Datapath.Interfaces = c.Iface
	}
	config.Discovery.Local = config.Discovery.Local || c.DiscoverLocal
	for _, r := range c.Replica {
		config.Replicas = append(config.Replicas, agent.ParseReplica(r))
	}
	if c.Sim < 0 || c.Sim > maxSims {
		return config, fmt.Errorf("--sim %d: want 0 to %d", c.Sim, maxSims)
	}
	return config, nil
}

// announce tells a person what runs, and how to try it as soon as there is an
// engine to answer.
func announce(ctx context.Context, w io.Writer, a *agent.Agent) {
	tier, reason := a.Tier()
	if reason != "" {
		tier += " (" + reason + ")"
	}
	fmt.Fprintf(w, "listening  %s, admin http://%s\n", a.Addr(), a.AdminAddr())
	fmt.Fprintf(w, "datapath   %s\n", tier)
	up, of := a.Replicas()
	if up == 0 {
		fmt.Fprintf(w, "replicas   none of %d answers yet; waiting for them\n", of)
		select {
		case <-ctx.Done():
			return
		case <-a.Serving():
			up, of = a.Replicas()
		}
	}
	models := a.Models()
	fmt.Fprintf(w, "replicas   %d of %d serve %s\n", up, of, strings.Join(models, ", "))
	if len(models) > 0 {
		fmt.Fprintf(w, "try        %s\n", curl(a, models[0]))
	}
}

// curl is a command line that asks for a streamed answer. What only its user
// has, the key, it takes from the environment; a certificate that was made for
// a name is not checked, because the address is what is known here.
func curl(a *agent.Agent, model string) string {
	host, port, err := net.SplitHostPort(a.Addr().String())
	if ip := net.ParseIP(host); err == nil && ip != nil && ip.IsUnspecified() {
		host = "localhost"
	}
	body := fmt.Sprintf(`{"model":%q,"stream":true,"messages":[{"role":"user","content":"Tell me a story"}]}`, model)
	options := "-N"
	if a.Scheme() == "https" {
		options += "k"
	}
	key := ""
	if a.WantsKey() {
		key = ` -H "authorization: Bearer $KEY"`
	}
	return fmt.Sprintf("curl %s %s://%s/v1/chat/completions -H 'content-type: application/json'%s -d '%s'",
		options, a.Scheme(), net.JoinHostPort(host, port), key, strings.ReplaceAll(body, "'", `'\''`))
}
