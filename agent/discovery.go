package agent

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// firstFindings bounds how long a start waits for sources that do not answer.
const firstFindings = 3 * time.Second

// finding is an engine that somebody knows of.
type finding struct {
	ReplicaConfig
	// source is who: "static" is the configuration.
	source string
	// also are further host:ports at which the same engine is reached.
	also []string
	// hints are what it says of itself, above what its source is configured with.
	hints map[string]string
}

// discovery merges the configured replicas with what its sources find, and
// hands the whole to apply, one call at a time, whenever it has changed. The
// fleet makes it with newDiscovery and ends it with close; its methods may be
// called from any goroutine.
//
// A source has one goroutine, which reports what it finds. A report without
// findings leaves those of the report before: a name server that fails, or for
// a while knows no address, takes no engine away. Whether those still answer,
// their health checks tell.
type discovery struct {
	log   *slog.Logger
	apply func([]finding) error
	// How sources look at the world; tests replace them before configure.
	resolver resolver
	sockets  sockets

	ctx  context.Context
	stop context.CancelFunc
	done sync.WaitGroup // the sources' goroutines

	mu      sync.Mutex // guards what follows, and what sources say it guards
	static  []finding
	sources []*source // in the order of the configuration
}

// source is one way to find engines, and what it has found.
type source struct {
	name   string
	config any // DNSConfig, kubernetesConfig or localConfig, by which it is known again
	stop   context.CancelFunc
	ended  chan struct{} // closed when its goroutine has
	first  chan struct{} // closed after its first report

	// What follows is guarded by discovery.mu.
	reported  bool
	gone      bool
	found     []finding
	failure   string // of the last report
	succeeded time.Time
}

// kubernetesConfig is a part of the cluster, and what the kubeconfig holds.
type kubernetesConfig struct {
	KubernetesConfig
	kubeconfig contents
}

// localConfig are the ports that are the agent's own.
type localConfig struct{ listen, admin, tls string }

func newDiscovery(log *slog.Logger, apply func([]finding) error) *discovery {
	d := &discovery{log: log, apply: apply, resolver: resolver{config: systemResolver}, sockets: systemSockets()}
	d.ctx, d.stop = context.WithCancel(context.Background())
	return d
}

// configure replaces the static replicas and the sources. A source whose
// configuration is the same goes on with what it has found.
func (d *discovery) configure(cfg *Config) error {
	d.mu.Lock()
	if d.ctx.Err() != nil {
		d.mu.Unlock()
		return nil // it is closed
	}
	d.static = d.static[:0:0]
	for _, rc := range cfg.Replicas {
		d.static = append(d.static, finding{ReplicaConfig: rc, source: "static"})
	}
	before := d.sources
	d.sources = nil
	for _, c := range cfg.Discovery.DNS {
		name := "dns:" + strings.TrimSuffix(c.Name, ".")
		d.keepLocked(before, name, c, func(ctx context.Context, report func([]finding, error)) {
			d.resolver.watch(ctx, c, report)
		})
	}
	for _, c := range cfg.Discovery.Kubernetes {
		d.keepLocked(before, "kubernetes:"+c.Name(), kubernetesConfig{c, contentsOf(c.Kubeconfig)}, func(ctx context.Context, report func([]finding, error)) {
			(&kubernetes{KubernetesConfig: c}).watch(ctx, report)
		})
	}
	if cfg.Discovery.Local {
		c := localConfig{cfg.Listen, cfg.AdminListen, cfg.Server.TLS.Listen}
		d.keepLocked(before, "local", c, func(ctx context.Context, report func([]finding, error)) {
			d.sockets.watch(ctx, c, report)
		})
	}
	var gone []*source
	for _, s := range before {
		if !slices.Contains(d.sources, s) {
			s.gone = true
			s.stop()
			gone = append(gone, s)
		}
	}
	err := d.apply(d.mergeLocked())
	d.mu.Unlock()
	for _, s := range gone {
		<-s.ended
	}
	return err
}

// keepLocked adds a source: the one of before that has the same configuration,
// or a new one. A new one begins with what its namesake had found, until it has
// found something itself. Sources of one name get numbers.
func (d *discovery) keepLocked(before []*source, name string, config any, watch func(context.Context, func([]finding, error))) {
	unique := name
	for n := 2; slices.ContainsFunc(d.sources, func(s *source) bool { return s.name == unique }); n++ {
		unique = name + "#" + strconv.Itoa(n)
	}
	same := func(s *source) bool { return s.name == unique && reflect.DeepEqual(s.config, config) }
	if i := slices.IndexFunc(before, same); i >= 0 {
		d.sources = append(d.sources, before[i])
		return
	}
	s := &source{name: unique, config: config, ended: make(chan struct{}), first: make(chan struct{})}
	for _, old := range before {
		if old.name != unique {
			continue
		}
		switch is := config.(type) {
		case DNSConfig:
			if was, ok := old.config.(DNSConfig); ok {
				s.found = is.findings(was.addrs(old.found, is.Port))
			}
		case kubernetesConfig:
			// Of other ports, or of other nodes, are other engines.
			if was, ok := old.config.(kubernetesConfig); ok && is.sameEngines(&was.KubernetesConfig) {
				s.found = slices.Clone(old.found)
				for i := range s.found {
					is.set(&s.found[i])
				}
			}
		}
	}
	ctx, cancel := context.WithCancel(d.ctx)
	s.stop = cancel
	d.sources = append(d.sources, s)
	d.done.Go(func() {
		defer close(s.ended)
		defer cancel()
		watch(ctx, func(found []finding, err error) { d.report(s, found, err) })
	})
}

// report takes what a source has found: nil leaves what it had found before. It
// may have failed in part.
func (d *discovery) report(s *source, found []finding, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if s.gone {
		return
	}
	failure := ""
	if err != nil {
		failure = err.Error()
	} else {
		s.succeeded = time.Now()
	}
	if failure != s.failure {
		if err != nil {
			d.log.Warn("discovery fails; what it had found stays", "source", s.name, "replicas", len(s.found), "why", failure)
		} else {
			d.log.Info("discovery works again", "source", s.name)
		}
	}
	s.failure = failure
	if found != nil && !slices.EqualFunc(found, s.found, func(a, b finding) bool { return reflect.DeepEqual(a, b) }) {
		s.found = found
		if err := d.apply(d.mergeLocked()); err != nil {
			d.log.Warn("discovery found what cannot be a replica", "source", s.name, "why", err)
		}
	}
	if !s.reported {
		s.reported = true
		close(s.first)
	}
}

// awaitFirst waits until every source has reported once, or firstFindings.
func (d *discovery) awaitFirst() {
	d.mu.Lock()
	sources := slices.Clone(d.sources)
	d.mu.Unlock()
	late := time.After(firstFindings)
	for _, s := range sources {
		select {
		case <-s.first:
		case <-late:
			d.log.Warn("the agent starts without having heard from every source of discovery", "first", s.name)
			return
		}
	}
}

// close ends the sources.
func (d *discovery) close() {
	d.mu.Lock()
	d.stop()
	d.mu.Unlock()
	d.done.Wait()
}

func (d *discovery) mergeLocked() []finding {
	lists := [][]finding{d.static}
	for _, s := range d.sources {
		named := slices.Clone(s.found)
		for i := range named {
			named[i].source = s.name
		}
		lists = append(lists, named)
	}
	return merge(lists...)
}

// merge returns the engines of all lists. Of one that is found several times
// the first stays, and learns from the others which engine it is. An ID that
// another has already gets a number.
func merge(lists ...[]finding) []finding {
	var out []finding
	where := map[string]int{} // host:port and path -> index in out
	ids := map[string]bool{}
	for _, list := range lists {
		for _, f := range list {
			keys := f.keys()
			known := -1
			for _, key := range keys {
				if i, ok := where[key]; ok && (known < 0 || i < known) {
					known = i
				}
			}
			if known >= 0 {
				if out[known].Engine == "" {
					out[known].Engine = f.Engine
				}
				continue
			}
			id := f.ID
			for n := 2; ids[id]; n++ {
				id = f.ID + "#" + strconv.Itoa(n)
			}
			f.ID = id
			ids[id] = true
			for _, key := range keys {
				where[key] = len(out)
			}
			out = append(out, f)
		}
	}
	return out
}

// keys are the ways to write where the engine is.
func (f *finding) keys() []string {
	u, err := url.Parse(f.URL)
	if err != nil {
		return []string{f.URL}
	}
	host, port := strings.ToLower(strings.TrimSuffix(u.Hostname(), ".")), u.Port()
	if port == "" {
		port = "80"
	}
	hosts := []string{host}
	if host == "localhost" {
		hosts = []string{"127.0.0.1", "::1"}
	} else if ip, err := netip.ParseAddr(host); err == nil {
		hosts = []string{ip.Unmap().String()}
	}
	path := strings.TrimRight(u.Path, "/")
	var keys []string
	for _, host := range hosts {
		keys = append(keys, net.JoinHostPort(host, port)+path)
	}
	for _, address := range f.also {
		keys = append(keys, address+path)
	}
	return keys
}

// sourceStatus is what /debug/fleet shows of a source.
type sourceStatus struct {
	Source   string     `json:"source"`
	Success  *time.Time `json:"last_success,omitempty"`
	Error    string     `json:"error,omitempty"`
	Replicas []string   `json:"replicas"`
}

func (d *discovery) status() []sourceStatus {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := []sourceStatus{}
	for _, s := range d.sources {
		row := sourceStatus{Source: s.name, Error: s.failure, Replicas: []string{}}
		if at := s.succeeded; !at.IsZero() {
			row.Success = &at
		}
		for _, f := range s.found {
			row.Replicas = append(row.Replicas, f.ID)
		}
		out = append(out, row)
	}
	return out
}
