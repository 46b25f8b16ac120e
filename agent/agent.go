// Package agent is the running node: its configuration, the engines it knows,
// the life cycle of the kernel datapath, and the admin pages.
package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/inferrail/inferrail/proxy"
)

// Agent is one running node. Start makes it, Stop (or Run, which ends in Stop)
// must be called once. The other methods may be called from any goroutine.
type Agent struct {
	cfg Config
	log *slog.Logger

	// In the order in which Start makes them; Stop goes backwards.
	listener net.Listener // owned by proxy once it serves
	datapath *datapath
	proxy    *proxy.Server
	fleet    *fleet
	adminL   net.Listener // owned by admin once it serves
	admin    *http.Server

	serving  sync.WaitGroup // the goroutines in which proxy and admin serve
	failed   chan error     // what ended one of them before Stop
	draining atomic.Bool
}

// Start validates cfg and starts an agent. When it returns, requests are
// accepted and every replica was looked at once; those that did not answer
// join when they do. ctx bounds the start only.
func Start(ctx context.Context, cfg Config, log *slog.Logger) (_ *Agent, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	a := &Agent{cfg: cfg, log: log, failed: make(chan error, 2)}
	defer func() {
		if err != nil {
			a.undoStart()
		}
	}()
	a.raiseFileLimit()

	// The listeners first: what needs them is told the real addresses, and a
	// port in use is found before anything else is set up.
	if a.listener, err = listen(ctx, cfg.Listen); err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	if a.adminL, err = listen(ctx, cfg.AdminListen); err != nil {
		return nil, fmt.Errorf("admin_listen: %w", err)
	}
	// The datapath lives until Stop closes it, whatever becomes of ctx.
	if a.datapath, err = openDatapath(context.WithoutCancel(ctx), cfg.Datapath, log); err != nil {
		return nil, err
	}
	a.proxy = proxy.New(proxy.Limits{
		IdleTimeout:    cfg.Server.IdleTimeout,
		HeadTimeout:    cfg.Server.HeadTimeout,
		BodyTimeout:    cfg.Server.BodyTimeout,
		RequestTimeout: cfg.Server.RequestTimeout,
		StallTimeout:   cfg.Server.StallTimeout,
		ConnectTimeout: cfg.Server.ConnectTimeout,
		UpstreamIdle:   cfg.Server.UpstreamIdle,
		MaxHeadBytes:   int(cfg.Server.MaxHeadBytes),
		MaxBodyBytes:   int64(cfg.Server.MaxBodyBytes),
	}, a.datapath.Joiner(), log)
	if a.datapath.Joiner() == nil {
		a.proxy.CopyReason = a.datapath.Reason()
	}
	if a.fleet, err = startFleet(&a.cfg, log, a.proxy.SetFleet, a.datapath.Engines); err != nil {
		return nil, err
	}
	a.datapath.name = a.fleet.replicaID
	a.admin = newAdmin(a)

	a.serving.Go(func() {
		if err := a.proxy.Serve(a.listener); !errors.Is(err, proxy.ErrClosed) {
			a.failed <- fmt.Errorf("serving %s: %w", a.listener.Addr(), err)
		}
	})
	a.serving.Go(func() {
		if err := a.admin.Serve(a.adminL); err != nil && !errors.Is(err, http.ErrServerClosed) {
			a.failed <- fmt.Errorf("serving %s: %w", a.adminL.Addr(), err)
		}
	})
	return a, nil
}

// undoStart closes what a failed Start has made. Nothing serves yet.
func (a *Agent) undoStart() {
	if a.fleet != nil {
		a.fleet.close()
	}
	if a.proxy != nil {
		a.proxy.Shutdown(context.Background())
	}
	if a.datapath != nil {
		a.datapath.Close()
	}
	if a.adminL != nil {
		a.adminL.Close()
	}
	if a.listener != nil {
		a.listener.Close()
	}
}

// Run blocks until a signal arrives, then drains for up to
// server.shutdown_timeout; a second signal cuts that short. It also stops, and
// returns the reason, when the agent cannot go on.
func (a *Agent) Run(signals <-chan os.Signal) error {
	var failure error
	select {
	case s := <-signals:
		a.log.Info("draining; a second signal ends running requests at once",
			"signal", s, "timeout", a.cfg.Server.ShutdownTimeout)
	case failure = <-a.failed:
		a.log.Error("stopping", "why", failure)
	}
	ctx, cancel := context.WithTimeout(context.Background(), a.cfg.Server.ShutdownTimeout)
	defer cancel()
	stopped := make(chan error, 1)
	go func() { stopped <- a.Stop(ctx) }()
	for {
		select {
		case <-signals:
			cancel()
		case err := <-stopped:
			return errors.Join(failure, err)
		}
	}
}

// Stop refuses new connections, waits until running requests have ended or ctx
// is done, which ends them, and releases everything. The error tells that
// requests were cut.
func (a *Agent) Stop(ctx context.Context) error {
	a.draining.Store(true)
	err := a.proxy.Shutdown(ctx)
	// The admin pages stay until now: they tell that the agent drains.
	a.closeAdmin()
	a.serving.Wait()
	a.fleet.close()
	a.datapath.Close()
	if err != nil {
		return fmt.Errorf("requests were cut: %w", err)
	}
	a.log.Info("drained")
	return nil
}

// closeAdmin waits for requests that are being answered: they read the
// datapath's maps, which are gone soon.
func (a *Agent) closeAdmin() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if a.admin.Shutdown(ctx) != nil {
		a.admin.Close()
	}
}

// Addr is where requests are accepted.
func (a *Agent) Addr() net.Addr { return a.listener.Addr() }

// AdminAddr is where the admin pages are.
func (a *Agent) AdminAddr() net.Addr { return a.adminL.Addr() }

// Tier names the datapath tier in use and says why it is that one.
func (a *Agent) Tier() (tier, reason string) { return a.datapath.Tier(), a.datapath.Reason() }

// Replicas tells how many replicas are up, and of how many.
func (a *Agent) Replicas() (up, of int) { return a.fleet.upCount() }

// Models are the names of the models that are known to be served.
func (a *Agent) Models() []string {
	var list []string
	for _, m := range a.fleet.current().Listed {
		list = append(list, m.Name)
	}
	return list
}

// Serving is closed when the first replica takes requests.
func (a *Agent) Serving() <-chan struct{} { return a.fleet.serving }

// listen opens a TCP listener. Multipath TCP is off, because the kernel
// datapath knows plain TCP sockets only.
func listen(ctx context.Context, addr string) (net.Listener, error) {
	lc := net.ListenConfig{KeepAliveConfig: net.KeepAliveConfig{
		Enable: true, Idle: 15 * time.Second, Interval: 15 * time.Second, Count: 9,
	}}
	lc.SetMultipathTCP(false)
	return lc.Listen(ctx, "tcp", addr)
}

// manyFiles is enough for any node: each running request holds two
// descriptors. fewFiles is what a busy one exceeds.
const manyFiles, fewFiles = 1 << 20, 1 << 16

// raiseFileLimit raises the limit of open files: above the hard limit with the
// privilege to, else up to it.
func (a *Agent) raiseFileLimit() {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		a.log.Warn("cannot read the limit of open files", "error", err)
		return
	}
	if lim.Max < manyFiles && unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: manyFiles, Max: manyFiles}) == nil {
		return
	}
	lim.Cur = lim.Max
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		a.log.Warn("cannot raise the limit of open files", "to", lim.Max, "error", err)
	}
	if lim.Max < fewFiles {
		a.log.Warn("few open files are allowed; raise the hard limit (ulimit -Hn)",
			"limit", lim.Max, "requests_at_once", lim.Max/2)
	}
}
