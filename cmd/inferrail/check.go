package main

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/inferrail/inferrail/agent"
)

type checkCommand struct {
	File string `arg:"" placeholder:"FILE" help:"Configuration file (YAML)."`
}

// Run tells everything that is wrong with the file, a line each, or that
// nothing is and what the file sets up: on one line, one for each model, and one
// that tells how to look at a prompt. For that it loads the models' tokenizers.
// Flags and variables have no say.
func (c *checkCommand) Run(e *env) error {
	config := agent.DefaultConfig()
	err := config.ReadConfig(c.File)
	if err == nil {
		err = config.Check()
	}
	var models []string
	if err == nil {
		models, err = config.CheckPrompts()
	}
	var list agent.Problems
	switch {
	case errors.As(err, &list):
		for _, problem := range list {
			fmt.Fprintf(e.stdout, "%s: %s\n", c.File, problem)
		}
		return errTold
	case errors.As(err, new(*fs.PathError)):
		return err
	case err != nil:
		fmt.Fprintln(e.stdout, err)
		return errTold
	}
	fmt.Fprintf(e.stdout, "%s: ok\n%s\n", c.File, summary(&config))
	for _, line := range models {
		fmt.Fprintln(e.stdout, line)
	}
	if len(models) > 0 {
		fmt.Fprintf(e.stdout, "to see the prompt of a request: POST its body to /debug/prompt?path=/v1/chat/completions of the running agent (%s)\n", config.AdminListen)
	}
	return nil
}

// summary is what a configuration sets up, on one line.
func summary(c *agent.Config) string {
	parts := []string{
		count(len(c.Replicas), "replica"),
		count(len(c.Models), "model"),
		"sources: " + strings.Join(sources(c), ", "),
		"policy " + strings.Join(policies(c), ", "),
	}
	if n := len(c.Server.APIKeys); n > 0 {
		parts = append(parts, count(n, "API key"))
	} else {
		parts = append(parts, "no API key: anybody may send requests")
	}
	if c.Server.TLS.CertFile != "" {
		parts = append(parts, "TLS")
	}
	return strings.Join(parts, "; ")
}

// policies are those by which replicas are chosen, the default one first.
func policies(c *agent.Config) []string {
	list := []string{c.Routing.DefaultPolicy}
	for _, m := range c.Models {
		if m.Policy != "" && !slices.Contains(list, m.Policy) {
			list = append(list, m.Policy)
		}
	}
	return list
}

// sources are where engines come from.
func sources(c *agent.Config) (list []string) {
	if len(c.Replicas) > 0 {
		list = append(list, "replicas")
	}
	for _, d := range c.Discovery.DNS {
		list = append(list, "dns "+d.Name)
	}
	for _, k := range c.Discovery.Kubernetes {
		list = append(list, "kubernetes "+k.Name())
	}
	if c.Discovery.Local {
		list = append(list, "local")
	}
	return list
}

func count(n int, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return fmt.Sprintf("%d %s", n, noun)
}
