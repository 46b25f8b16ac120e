package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"
)

// rig is a contestant that runs between its hosts, with the engines behind it.
// Whoever made it measures with it as often as it likes, one measurement after
// another, and closes it.
type rig struct {
	dir     string
	network *network
	engine  *process
	proxy   *process // nil when the kernel forwards
}

// newRig makes the hosts and starts the engine, which answers at all of
// s.engines with rate chunks a second and stream, and the contestant. It
// returns when the contestant passes requests on. s.dir is the rig's affair.
func newRig(ctx context.Context, c *contestant, s setup, rate float64) (*rig, error) {
	r := &rig{}
	if err := r.start(ctx, c, s, rate); err != nil {
		r.close()
		return nil, err
	}
	return r, nil
}

func (r *rig) start(ctx context.Context, c *contestant, s setup, rate float64) (err error) {
	if r.dir, err = os.MkdirTemp("", "inferrail-bench-"); err != nil {
		return err
	}
	n, err := newNetwork(c.command == nil)
	if err != nil {
		return err
	}
	r.network = n
	r.engine, err = startWorker(n.engine, r.dir, "engine", "engine",
		"-listen", strings.Join(s.engines, ","), "-rate", fmt.Sprint(rate))
	if err != nil {
		return err
	}
	// A proxy that finds an engine closed may leave it out for a while.
	if err := r.engine.awaitReady(ctx); err != nil {
		return err
	}
	if c.command != nil {
		s.dir = r.dir
		command, err := c.command(s)
		if err != nil {
			return err
		}
		if r.proxy, err = start(n.proxy, r.dir, c.name, command); err != nil {
			return err
		}
	}
	if err := c.awaitReady(ctx, n, r.proxy); err != nil {
		return fmt.Errorf("did not start: %w", err)
	}
	return nil
}

// close ends everything. It reports false when the contestant had to be killed.
func (r *rig) close() (clean bool) {
	clean = true
	if r.proxy != nil {
		clean = r.proxy.stop()
	}
	if r.engine != nil {
		r.engine.stop()
	}
	if r.network != nil {
		r.network.close()
	}
	if r.dir != "" {
		os.RemoveAll(r.dir)
	}
	return clean
}

// startClient starts a worker on the client host and returns when it has been
// ready for as long as warm. The caller stops it.
func (r *rig) startClient(ctx context.Context, warm time.Duration, args ...string) (*process, error) {
	client, err := startWorker(r.network.client, r.dir, "client", args...)
	if err != nil {
		return nil, err
	}
	if err := r.warm(ctx, warm, client); err != nil {
		client.stop()
		return nil, err
	}
	return client, nil
}

func (r *rig) warm(ctx context.Context, d time.Duration, client *process) error {
	if err := client.awaitReady(ctx); err != nil {
		if r.proxy != nil {
			err = r.proxy.failed(err)
		}
		return fmt.Errorf("the load did not start: %w", err)
	}
	return r.pause(ctx, d, client)
}

// meter lets the client measure for so long. It returns what was consumed in
// that time, and the contestant's peak memory since it started.
func (r *rig) meter(ctx context.Context, client *process, measure time.Duration) (used consumed, peakKiB uint64, err error) {
	meter := meter{client: client.cmd.Process.Pid, engine: r.engine.cmd.Process.Pid}
	if r.proxy != nil {
		if meter.proxy, err = family(r.proxy.cmd.Process.Pid); err != nil {
			return used, 0, err
		}
	}
	before, err := meter.read(true)
	if err != nil {
		return used, 0, err
	}
	if err := client.command("start"); err != nil {
		return used, 0, err
	}
	if err := r.pause(ctx, measure, client); err != nil {
		return used, 0, err
	}
	if err := client.command("stop"); err != nil {
		return used, 0, err
	}
	after, err := meter.read(false)
	if err != nil {
		return used, 0, err
	}
	return after.since(before), peakMemory(meter.proxy), nil
}

// report reads the client's report, and fails when the contestant is gone.
func (r *rig) report(ctx context.Context, client *process, report any) error {
	if err := client.report(ctx, report); err != nil {
		return err
	}
	if r.proxy != nil {
		return r.proxy.running()
	}
	return nil
}

// failed is an error that says what a client saw, with the logs of those it
// may have been caused by.
func (r *rig) failed(fault string) error {
	err := r.engine.failed(errors.New(fault))
	if r.proxy != nil {
		err = r.proxy.failed(err)
	}
	return err
}

// pause lets the processes run. It fails at once when one of them ends.
func (r *rig) pause(ctx context.Context, d time.Duration, client *process) error {
	proxyEnded := (chan struct{})(nil)
	if r.proxy != nil {
		proxyEnded = r.proxy.ended
	}
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	case <-proxyEnded:
		return r.proxy.running()
	case <-r.engine.ended:
		return r.engine.running()
	case <-client.ended:
		// It may have ended because of the proxy, whose log then says why.
		if r.proxy != nil {
			return r.proxy.failed(client.running())
		}
		return client.running()
	}
}
