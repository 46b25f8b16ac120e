// Command inferrail routes OpenAI requests to self-hosted LLM engines. Each
// command is in a file of its name.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/alecthomas/kong"

	"github.com/inferrail/inferrail/simulator"
	"github.com/inferrail/inferrail/simulator/virtual"
	"github.com/inferrail/inferrail/simulator/workload"
)

// env is what a command may use of the process it runs in, so that tests run
// commands in their own process.
type env struct {
	args           []string
	stdout, stderr io.Writer
	// stdin stands for the process's own when it is nil.
	stdin   io.Reader
	signals <-chan os.Signal
	// hangups are the signals upon which the agent loads its configuration
	// again; nil stands for the process's own.
	hangups <-chan os.Signal
}

// commands is the grammar of the command line.
type commands struct {
	Agent    agentCommand    `cmd:"" help:"Route requests to engines: the node agent."`
	Status   statusCommand   `cmd:"" help:"Tell how a running agent and its replicas are, on one screen."`
	Explain  explainCommand  `cmd:"" help:"Tell where a request would go now, and why."`
	Init     initCommand     `cmd:"" help:"Find the engines of this node and write a configuration for them."`
	Check    checkCommand    `cmd:"" help:"Tell what is wrong with a configuration file."`
	Sim      simCommand      `cmd:"" help:"Be an engine: a simulated vLLM, SGLang, TGI, llama.cpp or Ollama."`
	Simulate simulateCommand `cmd:"" help:"Serve a trace in virtual time under each policy: what would it have been?"`
	Bench    benchCommand    `cmd:"" help:"Measure inferrail beside others."`
	Demo     demoCommand     `cmd:"" help:"See it choose: sessions over simulated engines of which one becomes slow. Needs no GPU, and under a minute."`
	Probe    probeCommand    `cmd:"" help:"Ask a page whether it is well: the health check of a container."`
	MCP      mcpCommand      `cmd:"" name:"mcp" help:"Let assistants ask a running agent, by the Model Context Protocol."`
	Version  versionCommand  `cmd:"" help:"Print the version."`
}

func main() {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	os.Exit(run(&env{args: os.Args[1:], stdout: os.Stdout, stderr: os.Stderr, signals: signals}))
}

// run runs one command line and returns the process's exit status: 1 when the
// command failed, 2 when the command line is wrong, and what a command says with a
// verdict.
func run(e *env) (status int) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case exit:
			status = int(r)
		default:
			panic(r)
		}
	}()
	parser := newParser(&commands{}, e)
	args := e.args
	if len(args) == 0 {
		args = []string{"--help"}
	}
	command, err := parser.Parse(args)
	if err != nil {
		fmt.Fprintf(e.stderr, "inferrail: %v\n", err)
		if parse := (*kong.ParseError)(nil); errors.As(err, &parse) && parse.Context.Command() != "" {
			fmt.Fprintf(e.stderr, "try: inferrail %s --help\n", parse.Context.Command())
		} else {
			fmt.Fprintln(e.stderr, "try: inferrail --help")
		}
		return 2
	}
	said := verdict(0)
	switch err := command.Run(); {
	case errors.As(err, &said):
		return int(said)
	case errors.Is(err, errTold):
		return 1
	case err != nil:
		fmt.Fprintf(e.stderr, "inferrail: %v\n", err)
		return 1
	}
	return 0
}

// errTold is the error of a command that has said on stdout why it fails.
var errTold = errors.New("told already")

// exit unwinds to run when kong asks to exit, which it does after help. So the
// process of a test goes on.
type exit int

func newParser(c *commands, e *env) *kong.Kong {
	parser, err := kong.New(c,
		kong.Name("inferrail"),
		kong.Description("Routes OpenAI traffic to self-hosted LLM engines; the kernel streams the answers."),
		kong.Writers(e.stdout, e.stderr),
		kong.Exit(func(code int) { panic(exit(code)) }),
		kong.Vars{"workloads": strings.Join(workload.Names(), ", "), "policies": strings.Join(virtual.UsualPolicies(), ", "),
			"profiles": strings.Join(simulator.Profiles(), ", ")},
		kong.ConfigureHelp(kong.HelpOptions{Compact: true}),
		kong.BindTo(context.Background(), (*context.Context)(nil)),
		kong.Bind(e))
	if err != nil {
		panic("BUG: the grammar of the command line: " + err.Error())
	}
	return parser
}

// errInterrupted is the cause of a context that a signal has ended.
var errInterrupted = errors.New("interrupted")

// interrupted returns a context that ends with the first signal, of which
// errInterrupted is the cause then. For commands that have nothing to drain.
func (e *env) interrupted(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		select {
		case <-e.signals:
			cancel(errInterrupted)
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(nil) }
}
