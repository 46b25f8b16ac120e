package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/inferrail/inferrail/simulator"
)

// simulators are simulated engines in a process of their own, so that neither their
// work nor their garbage is the load's. Whoever starts them stops them.
type simulators struct {
	process *process
	urls    []string
}

// simulatorsConfig is what the worker is told.
type simulatorsConfig struct {
	Count  int
	Engine simulator.Config
}

// startSimulators starts so many engines, which differ in their seeds, with what program
// runs this program.
func startSimulators(ctx context.Context, program []string, dir string, n int, engine simulator.Config) (*simulators, error) {
	config, err := json.Marshal(simulatorsConfig{n, engine})
	if err != nil {
		return nil, err
	}
	// Workers are usually started without preemption of goroutines, which servers need.
	command := append([]string{"env", "GODEBUG="}, program...)
	command = append(command, "bench", "worker", "simulators", string(config))
	p, err := startWith(nil, dir, "engines", command, true)
	if err != nil {
		return nil, err
	}
	s := &simulators{process: p}
	line, err := p.line(ctx, startTimeout)
	if err != nil {
		p.stop()
		return nil, err
	}
	if s.urls = strings.Fields(line); len(s.urls) != n {
		p.stop()
		return nil, p.failed(fmt.Errorf("the engines said %q instead of their addresses", line))
	}
	return s, nil
}

func (s *simulators) stop() { s.process.stop() }

// runSimulators is the worker: it starts engines, writes their addresses, and serves
// until its standard input ends.
func runSimulators(args []string, stdin io.Reader, stdout io.Writer) (err error) {
	// A worker has nothing to save: SIGTERM ends it, whatever main had in mind.
	signal.Reset(syscall.SIGTERM)
	var config simulatorsConfig
	if len(args) != 1 {
		return fmt.Errorf("bench worker simulators: a configuration expected, got %d arguments", len(args))
	}
	if err := json.Unmarshal([]byte(args[0]), &config); err != nil {
		return fmt.Errorf("bench worker simulators: %w", err)
	}
	var urls []string
	for i := range config.Count {
		one := config.Engine
		one.Seed += uint64(i)
		server, err := simulator.Start(one)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, server.Close()) }()
		urls = append(urls, server.URL())
	}
	fmt.Fprintln(stdout, strings.Join(urls, " "))
	_, err = io.Copy(io.Discard, stdin)
	return err
}

// slow makes an engine that many times slower; 1 is its own speed.
func slow(ctx context.Context, url string, factor float64) error {
	body, err := json.Marshal(simulator.Faults{Slow: factor})
	if err != nil {
		return err
	}
	_, err = exchangeOnce(ctx, http.MethodPost, url+"/sim/faults", body)
	return err
}

// exchangeOnce asks for one page on a connection of its own.
func exchangeOnce(ctx context.Context, method, url string, body []byte) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s %s: status %d: %.200q", method, url, resp.StatusCode, answer)
	}
	return answer, err
}

// counters are what an engine has counted of its prompts' tokens.
type counters struct{ queried, hit float64 }

// readCounters reads an engine's metrics page.
func readCounters(ctx context.Context, url string) (counters, error) {
	page, err := exchangeOnce(ctx, http.MethodGet, url+"/metrics", nil)
	if err != nil {
		return counters{}, err
	}
	return parseCounters(page), nil
}

// parseCounters sums the counters of vLLM or SGLang over an engine's ranks.
func parseCounters(page []byte) (c counters) {
	for line := range bytes.Lines(page) {
		name, rest, _ := strings.Cut(string(bytes.TrimSpace(line)), "{")
		i := strings.LastIndexByte(rest, '}')
		if i < 0 {
			continue
		}
		value, err := strconv.ParseFloat(strings.TrimSpace(rest[i+1:]), 64)
		if err != nil {
			continue
		}
		switch name {
		case "vllm:prefix_cache_queries_total", "sglang:prompt_tokens_total":
			c.queried += value
		case "vllm:prefix_cache_hits_total", "sglang:cached_tokens_total":
			c.hit += value
		}
	}
	return c
}
