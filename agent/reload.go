package agent

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/inferrail/inferrail/proxy"
)

// Source is where the configuration of an agent comes from again while it runs.
type Source struct {
	// File is watched: when it holds something else, the configuration is
	// loaded. So are the files that it names.
	File string
	// Load returns the whole configuration, made afresh from File and whatever
	// else has a say in it. It is called on one goroutine.
	Load func() (Config, error)
	// Hangup asks for a load by each signal.
	Hangup <-chan os.Signal
}

// read is Load, unless that might never end.
func (s *Source) read() (Config, error) {
	if irregular(s.File) {
		return Config{}, fmt.Errorf("%s is not a regular file", s.File)
	}
	return s.Load()
}

// reloads is what became of the configurations that were loaded while the agent
// runs. The zero value is none.
type reloads struct {
	mu       sync.Mutex // guards the rest, and is held while one is applied
	applied  int
	rejected int
	last     time.Time // when one was last applied, at first by Start
	problems int       // of the one loaded last; 0 when it is in use
}

// lookEvery is the time between two looks at the files. They are read rather
// than watched with inotify, which does not see through a symlink that is
// swapped, says nothing on network and many container file systems, and may be
// refused when the user has too many watches.
const lookEvery = time.Second

// Follow loads the configuration again, until Stop, whenever s says that it may
// have changed. It may be called once.
func (a *Agent) Follow(s Source) {
	if irregular(s.File) {
		// It was read at the start and, being a pipe, holds nothing now. The
		// files that it names are followed all the same.
		a.log.Warn("the configuration cannot be loaded again: it is not a regular file", "file", s.File)
		s.Load = func() (Config, error) { return *a.cfg.Load(), nil }
		s.File = ""
	}
	a.following.Go(func() { a.follow(s) })
}

func (a *Agent) follow(s Source) {
	look := func() map[string]contents {
		m := map[string]contents{s.File: contentsOf(s.File)}
		for _, file := range a.cfg.Load().namedFiles() {
			m[file] = contentsOf(file)
		}
		return m
	}
	loaded := look()
	before := loaded
	load := func() {
		loaded = look()
		a.load(s)
		// It may name files that were not looked at before.
		for file, now := range look() {
			if _, ok := loaded[file]; !ok {
				loaded[file] = now
			}
		}
	}
	// What changed since Start had it from the file is found now.
	if cfg, err := s.read(); err != nil || cfg.Check() != nil || len(differences(a.cfg.Load(), &cfg)) > 0 {
		load()
	}
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		select {
		case <-a.stopping.Done():
			return
		case signal := <-s.Hangup:
			a.log.Info("loading the configuration", "signal", signal, "file", s.File)
			if a.certificate != nil {
				a.certificate.look(a.cfg.Load().Server.TLS)
			}
			a.decisions.reopen()
		case <-tick.C:
			now := look()
			// Twice the same: what is still being written is not used.
			settled := maps.Equal(now, before)
			before = now
			if !settled || !changed(loaded, now) {
				continue
			}
			a.log.Info("loading the configuration: it has changed", "file", s.File)
		}
		load()
	}
}

// changed tells whether a file holds something else than when it was loaded.
func changed(loaded, now map[string]contents) bool {
	for file, c := range now {
		if loaded[file] != c {
			return true
		}
	}
	return false
}

func (a *Agent) load(s Source) {
	a.manager.reloading()
	defer func() { a.manager.ready(a.standing()) }()
	cfg, err := s.read()
	if err != nil {
		a.reject(err)
		return
	}
	_ = a.Reload(cfg) // it has logged the error, unless the agent is stopping
}

// Reload applies another configuration to the running agent, or rejects it as a
// whole and keeps the one in use; then the error says why. No request is cut.
// What needs a restart is logged and left as it is.
func (a *Agent) Reload(cfg Config) error {
	if err := cfg.Check(); err != nil {
		a.reject(err)
		return err
	}
	a.reloads.mu.Lock()
	defer a.reloads.mu.Unlock()
	if a.draining.Load() {
		return errors.New("the agent is stopping")
	}
	old := a.cfg.Load()
	asked := differences(old, &cfg)
	keepStarted(&cfg, old)
	// What is kept and what is new must go together too.
	if err := cfg.Validate(); err != nil {
		err = fmt.Errorf("it needs a restart of the agent: %w", err)
		a.rejectLocked(err)
		return err
	}
	applied := differences(old, &cfg)
	for _, d := range asked {
		if contains(applied, d.path) {
			a.log.Info("configuration changed", "key", d.path, "old", d.old, "new", d.new)
		} else {
			a.log.Warn("configuration changed, but this key is read at the start of the agent only; restart it",
				"key", d.path, "in_use", d.old, "new", d.new)
		}
	}
	if len(asked) == 0 {
		a.log.Info("the configuration says what is in use")
	}

	a.keys = keysOf(&cfg.Server, a.keys, time.Now())
	a.cfg.Store(&cfg)
	if a.certificate != nil {
		a.certificate.look(cfg.Server.TLS)
	}
	a.proxy.SetLimits(limitsOf(&cfg))
	a.proxy.SetAccess(proxy.NewAccess(a.keys, cfg.Server.CORSOrigins))
	a.proxy.SetClasses(classesOf(&cfg))
	if cfg.Decisions != old.Decisions {
		a.decisions.configure(cfg.Decisions)
		a.proxy.SetDecisions(a.decisions.records, a.decisions.asks())
	}
	a.reloads.applied++
	a.reloads.problems, a.reloads.last = 0, time.Now()
	if cfg.Observability != old.Observability {
		if err := a.traces.configure(cfg.Observability); err != nil {
			a.reloads.problems = 1
			a.log.Error("a part of the new configuration is not used", "why", err)
		}
	}
	if err := a.fleet.reconfigure(&cfg); err != nil {
		a.reloads.problems = 1
		a.log.Error("a part of the new configuration is not used", "why", err)
		return err
	}
	return nil
}

func contains(list []difference, path string) bool {
	for _, d := range list {
		if d.path == path {
			return true
		}
	}
	return false
}

// keepStarted puts into cfg what is read at the start of an agent only.
func keepStarted(cfg, started *Config) {
	cfg.Listen, cfg.AdminListen, cfg.Datapath = started.Listen, started.AdminListen, started.Datapath
	hub := cfg.Tokenizer.HubCache
	cfg.Tokenizer = started.Tokenizer
	cfg.Tokenizer.HubCache = hub
	cfg.Index.MaxBytes, cfg.Index.Snapshot = started.Index.MaxBytes, started.Index.Snapshot
	now, then := &cfg.Server.TLS, &started.Server.TLS
	now.Listen = then.Listen
	if (now.CertFile == "") != (then.CertFile == "") {
		*now = *then
	}
}

// reject notes that a configuration cannot be used.
func (a *Agent) reject(err error) {
	a.reloads.mu.Lock()
	defer a.reloads.mu.Unlock()
	a.rejectLocked(err)
}

func (a *Agent) rejectLocked(err error) {
	list := Problems{err.Error()}
	errors.As(err, &list)
	a.reloads.rejected++
	a.reloads.problems = len(list)
	a.log.Error("the new configuration is not used; the last good one stays", "problems", len(list))
	for _, problem := range list {
		a.log.Error("configuration: " + strings.ReplaceAll(problem, "\n", " "))
	}
}

// when tells since when the configuration in use is.
func (r *reloads) when() time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.last
}

// problem is what people are told while the configuration loaded last is not
// the one in use.
func (r *reloads) problem() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch r.problems {
	case 0:
		return ""
	case 1:
		return "config: 1 problem, the last good one is in use"
	}
	return fmt.Sprintf("config: %d problems, the last good one is in use", r.problems)
}

var (
	reloadsDesc = prometheus.NewDesc("inferrail_config_reloads_total",
		"Configurations loaded while the agent runs, by what became of them.", []string{"outcome"}, nil)
	lastReloadDesc = prometheus.NewDesc("inferrail_config_last_reload_success_timestamp_seconds",
		"When the configuration in use was loaded, in seconds since 1970.", nil, nil)
	reloadGoodDesc = prometheus.NewDesc("inferrail_config_last_reload_successful",
		"1 when the configuration that was loaded last is in use.", nil, nil)
)

// Describe implements prometheus.Collector.
func (r *reloads) Describe(ch chan<- *prometheus.Desc) {
	ch <- reloadsDesc
	ch <- lastReloadDesc
	ch <- reloadGoodDesc
}

// Collect implements prometheus.Collector.
func (r *reloads) Collect(ch chan<- prometheus.Metric) {
	r.mu.Lock()
	defer r.mu.Unlock()
	good := 0.0
	if r.problems == 0 {
		good = 1
	}
	ch <- prometheus.MustNewConstMetric(reloadsDesc, prometheus.CounterValue, float64(r.applied), "applied")
	ch <- prometheus.MustNewConstMetric(reloadsDesc, prometheus.CounterValue, float64(r.rejected), "rejected")
	ch <- prometheus.MustNewConstMetric(lastReloadDesc, prometheus.GaugeValue, float64(r.last.UnixNano())/1e9)
	ch <- prometheus.MustNewConstMetric(reloadGoodDesc, prometheus.GaugeValue, good)
}

// watchCertificate looks at the certificate's files until Stop.
func (a *Agent) watchCertificate() {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		select {
		case <-a.stopping.Done():
			return
		case <-tick.C:
			a.certificate.look(a.cfg.Load().Server.TLS)
		}
	}
}
