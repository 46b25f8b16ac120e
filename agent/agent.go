package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/http"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/inferrail/inferrail/proxy"
)

// Agent is one running node. Start makes it, Stop (or Run, which ends in Stop)
// must be called once. The other methods may be called from any goroutine.
type Agent struct {
	// cfg is what is in use: an immutable snapshot that Reload replaces.
	cfg atomic.Pointer[Config]
	log *slog.Logger

	// In the order in which Start makes them; Stop goes backwards.
	certificate *certificate // nil without TLS
	listener    *listener    // its socket is owned by proxy once it serves
	tlsL        *listener    // likewise; nil unless TLS has an address of its own
	adminL      *listener    // its socket is owned by admin once it serves
	datapath    *datapath
	proxy       *proxy.Server
	fleet       *fleet
	decisions   *decisionLog
	traces      *traces
	admin       *http.Server
	adminConns  adminConns

	serving   sync.WaitGroup // the goroutines in which proxy and admin serve
	failed    chan error     // what ended one of them before Stop
	draining  atomic.Bool
	stopping  context.Context // ends when Stop begins
	stop      context.CancelFunc
	following sync.WaitGroup // the goroutines that look at files

	started time.Time
	history history
	manager *manager

	reloads reloads
	keys    []*proxy.Key // what proxy was given last; guarded by reloads.mu
}

// Start validates cfg and starts an agent. When it returns, requests are
// accepted and every replica was looked at once; those that did not answer
// join when they do. ctx bounds the start only.
func Start(ctx context.Context, cfg Config, log *slog.Logger) (_ *Agent, err error) {
	if err := cfg.Check(); err != nil {
		return nil, err
	}
	a := &Agent{log: log, failed: make(chan error, 3), manager: managerOf(os.Getenv, os.Getpid(), log)}
	a.cfg.Store(&cfg)
	a.stopping, a.stop = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			a.undoStart()
		}
	}()
	a.raiseFileLimit()

	// The listeners first: what needs them is told the real addresses, and a
	// port in use is found before anything else is set up.
	if cfg.Server.TLS.CertFile != "" {
		if a.certificate, err = openCertificate(cfg.Server.TLS, log); err != nil {
			return nil, err
		}
	}
	if a.listener, err = openListener(ctx, cfg.Listen, log); err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	if cfg.Server.TLS.Listen != "" {
		if a.tlsL, err = openListener(ctx, cfg.Server.TLS.Listen, log); err != nil {
			return nil, fmt.Errorf("server.tls.listen: %w", err)
		}
	}
	if a.adminL, err = openListener(ctx, cfg.AdminListen, log); err != nil {
		return nil, fmt.Errorf("admin_listen: %w", err)
	}
	// The datapath lives until Stop closes it, whatever becomes of ctx.
	if a.datapath, err = openDatapath(context.WithoutCancel(ctx), cfg.Datapath, log); err != nil {
		return nil, err
	}
	a.proxy = proxy.New(limitsOf(&cfg), a.datapath.Joiner(), log)
	a.proxy.LameDuck = min(lameDuck, cfg.Server.ShutdownTimeout/4)
	a.keys = keysOf(&cfg.Server, nil, time.Now())
	a.proxy.SetAccess(proxy.NewAccess(a.keys, cfg.Server.CORSOrigins))
	a.proxy.SetClasses(classesOf(&cfg))
	if a.datapath.Joiner() == nil {
		a.proxy.CopyReason = a.datapath.word()
	}
	if a.fleet, err = startFleet(&cfg, log, a.proxy.Instance(), a.proxy.SetFleet, a.datapath.Engines); err != nil {
		return nil, err
	}
	a.proxy.SetPrompts(a.fleet.prompts.pool, a.fleet.prompts)
	a.proxy.SetIndex(a.fleet.index, a.fleet)
	a.traces = &traces{log: log, proxy: a.proxy}
	if err = a.traces.configure(cfg.Observability); err != nil {
		return nil, err
	}
	a.decisions = newDecisionLog(cfg.Decisions, log)
	a.proxy.SetDecisions(a.decisions.records, a.decisions.asks())
	a.datapath.replicas = a.fleet.streams
	a.fleet.whenReleased(a.datapath.forget)
	a.started = time.Now()
	a.admin = newAdmin(a)
	a.reloads.last = a.started

	switch {
	case a.certificate == nil:
		a.serve(a.listener, a.proxy.Serve)
	case a.tlsL == nil:
		a.serve(a.listener, a.serveTLS)
	default:
		a.serve(a.listener, a.proxy.Serve)
		a.serve(a.tlsL, a.serveTLS)
	}
	a.serve(a.adminL, a.admin.Serve)
	a.following.Go(a.keepHistory)
	if a.certificate != nil {
		a.following.Go(a.watchCertificate)
	}
	a.manager.watch(func() { a.Replicas() })
	a.manager.ready(a.standing())
	return a, nil
}

// standing is what the service manager is told of an agent that serves.
func (a *Agent) standing() string {
	up, of := a.Replicas()
	return fmt.Sprintf("%s tier, %d of %d replicas up, configured %s", a.datapath.Tier(), up, of, a.reloads.when().Format(time.TimeOnly))
}

// serve serves a listener until Stop.
func (a *Agent) serve(l *listener, with func(net.Listener) error) {
	a.serving.Go(func() {
		err := with(l.Listener)
		if a.draining.Load() && errors.Is(err, net.ErrClosed) {
			return // Stop has closed it
		}
		if err != nil && !errors.Is(err, proxy.ErrClosed) && !errors.Is(err, http.ErrServerClosed) {
			a.failed <- fmt.Errorf("serving %s: %w", l.Addr(), err)
		}
	})
}

func (a *Agent) serveTLS(l net.Listener) error { return a.proxy.ServeTLS(l, a.certificate.config()) }

// lameDuck is how long a client that has no request running is still answered
// when the agent drains: the answer tells it to close its connection, so that
// the next request goes elsewhere. Closed without warning, a connection would
// lose the request that is on its way.
const lameDuck = 2 * time.Second

// limitsOf is what the configuration says of clients' requests.
func limitsOf(c *Config) proxy.Limits {
	s := &c.Server
	conns := s.MaxConnections
	if lim := (unix.Rlimit{}); conns == 0 && unix.Getrlimit(unix.RLIMIT_NOFILE, &lim) == nil {
		// The other half is for the connections to engines.
		conns = int(min(lim.Cur/2, math.MaxInt32))
	}
	return proxy.Limits{
		IdleTimeout:    s.IdleTimeout,
		HeadTimeout:    s.HeadTimeout,
		BodyTimeout:    s.BodyTimeout,
		RequestTimeout: s.RequestTimeout,
		StallTimeout:   s.StallTimeout,
		ConnectTimeout: s.ConnectTimeout,
		UpstreamIdle:   s.UpstreamIdle,
		MaxHeadBytes:   int(s.MaxHeadBytes),
		MaxBodyBytes:   int64(s.MaxBodyBytes),
		MaxAttempts:    c.Retry.MaxAttempts,
		Backoff:        c.Retry.Backoff,
		MaxConns:       conns,
		MaxBuffered:    int64(s.MaxBuffered),
		LogPrompts:     s.LogPrompts,
	}
}

// undoStart closes what a failed Start has made. Nothing serves yet.
func (a *Agent) undoStart() {
	a.stop()
	if a.fleet != nil {
		a.fleet.close()
	}
	if a.proxy != nil {
		a.proxy.Shutdown(context.Background())
	}
	if a.datapath != nil {
		a.datapath.Close()
	}
	for _, l := range a.listeners() {
		l.close()
		l.Close()
	}
}

// listeners are those that have been opened.
func (a *Agent) listeners() []*listener {
	return slices.DeleteFunc([]*listener{a.listener, a.tlsL, a.adminL}, func(l *listener) bool { return l == nil })
}

// Run blocks until a signal arrives, then drains for up to
// server.shutdown_timeout; a second signal cuts that short. It also stops, and
// returns the reason, when the agent cannot go on.
func (a *Agent) Run(signals <-chan os.Signal) error {
	var failure error
	select {
	case s := <-signals:
		a.log.Info("draining; a second signal ends running requests at once",
			"signal", s, "timeout", a.cfg.Load().Server.ShutdownTimeout)
	case failure = <-a.failed:
		a.log.Error("stopping", "why", failure)
	}
	ctx, cancel := context.WithTimeout(context.Background(), a.cfg.Load().Server.ShutdownTimeout)
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

// stopMargin is what all that follows the last answer may take.
const stopMargin = 10 * time.Second

// Stop refuses new connections, waits until running requests have ended or ctx
// is done, which ends them, and releases everything. The error tells that
// requests were cut.
func (a *Agent) Stop(ctx context.Context) error {
	a.reloads.mu.Lock() // one that has begun is applied as a whole
	a.draining.Store(true)
	a.reloads.mu.Unlock()
	a.manager.stopping(a.cfg.Load().Server.ShutdownTimeout + stopMargin)
	defer a.manager.close()
	a.stop()
	a.following.Wait()
	for _, l := range a.listeners() {
		l.close()
	}
	// The admin pages stay to the end, to tell that the agent drains; but a
	// successor that has their port too answers alone from now on.
	if a.adminL.given.Load() {
		a.adminL.Close()
	}
	err := a.proxy.Shutdown(ctx)
	a.decisions.close()
	a.traces.close()
	// A successor has learned for itself by now, and what this agent knows would
	// be out of date for the one after it.
	if file := a.cfg.Load().Index.Snapshot; file != "" && !a.listener.given.Load() {
		if err := a.fleet.save(file); err != nil {
			a.log.Warn("index.snapshot cannot be written: what engines hold has to be learned anew", "file", file, "why", err)
		}
	}
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
	if a.adminL.given.Load() {
		// Shutdown drops a request that it sees arrive.
		a.adminConns.wait(ctx)
	}
	if a.admin.Shutdown(ctx) != nil {
		a.admin.Close()
	}
}

// Addr is where requests are accepted.
func (a *Agent) Addr() net.Addr { return a.listener.Addr() }

// Scheme is what requests to Addr begin with: http or https.
func (a *Agent) Scheme() string {
	if a.certificate != nil && a.tlsL == nil {
		return "https"
	}
	return "http"
}

// WantsKey tells whether clients need an API key.
func (a *Agent) WantsKey() bool { return len(a.cfg.Load().Server.APIKeys) > 0 }

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
