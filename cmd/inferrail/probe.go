package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// probeCommand stands for curl where there is none: in a container that has only
// this program.
type probeCommand struct {
	URL     string        `arg:"" optional:"" default:"http://127.0.0.1:9090/healthz" help:"The page; /readyz tells whether requests are served, and an engine has /health."`
	Timeout time.Duration `default:"2s" help:"How long it may take."`
}

// Help is what its --help says beside the flags.
func (*probeCommand) Help() string {
	return "For health checks of containers that have only this program: it exits with 0 when the page answers 200."
}

// Run asks once.
func (c *probeCommand) Run(ctx context.Context, e *env) error {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.URL, nil)
	if err != nil {
		return err
	}
	// No proxy of the environment: what is asked is in this container.
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(io.LimitReader(resp.Body, 1024))
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s: %s", c.URL, resp.Status, strings.TrimSpace(string(body)))
	}
	fmt.Fprintln(e.stdout, strings.TrimSpace(string(body)))
	return nil
}
