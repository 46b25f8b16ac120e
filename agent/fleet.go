package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/proxy"
)

// modelsEvery is the number of health checks after which a replica that stayed
// up is asked for its models again: adapters are loaded at run time.
const modelsEvery = 5

// maxModelsBody bounds the answer to GET /v1/models that is read.
const maxModelsBody = 4 << 20

// fleet watches the engines, one goroutine each, and publishes an immutable
// proxy.Fleet whenever one joins, leaves or serves other models. The Agent
// makes it with startFleet and stops it with close; the other methods may be
// called from any goroutine.
type fleet struct {
	cfg     *Config
	log     *slog.Logger
	client  *http.Client
	publish func(*proxy.Fleet)
	engines func([]netip.AddrPort)

	members []*member // not changed after startFleet
	stop    context.CancelFunc
	done    sync.WaitGroup // the watching goroutines
	checked sync.WaitGroup // their first checks
	serving chan struct{}  // closed when the first replica takes requests
	served  sync.Once      // closes serving

	mu       sync.Mutex // guards what follows and what members say it guards
	slots    slots
	snapshot *proxy.Fleet
	shadowed map[string]bool // aliases already reported as hidden by a model
}

// member is one configured endpoint.
type member struct {
	cfg ReplicaConfig
	// replica is the same in every snapshot, so that its counters and
	// connections live on when it is down for a while.
	replica *proxy.Replica

	// What follows is guarded by fleet.mu and written only by the goroutine
	// that watches the member.
	up       bool
	failures int    // checks that failed since the last good one
	checks   int    // good checks since models was read
	why      string // what the last check failed with
	silent   bool   // and that it did so by getting no answer in time
	models   []card // last known
	addrs    []netip.AddrPort
}

// errSilent: the engine did not answer a check in time. It may be dead, or it
// may be busy.
var errSilent = errors.New("no answer in time")

// card is one entry of an engine's GET /v1/models.
type card struct {
	ID          string  `json:"id"`
	Created     float64 `json:"created"`
	OwnedBy     string  `json:"owned_by"`
	MaxModelLen float64 `json:"max_model_len"`
}

// startFleet starts to watch cfg.Replicas. It returns after every one of them
// was checked once, and has then published its first snapshot.
func startFleet(cfg *Config, log *slog.Logger, publish func(*proxy.Fleet), engines func([]netip.AddrPort)) (*fleet, error) {
	dialer := &net.Dialer{}
	dialer.SetMultipathTCP(false)
	f := &fleet{
		cfg: cfg, log: log, publish: publish, engines: engines,
		client: &http.Client{
			Transport: &http.Transport{
				DialContext:         dialer.DialContext,
				DisableCompression:  true,
				MaxIdleConnsPerHost: 1,
				IdleConnTimeout:     cfg.Server.UpstreamIdle,
			},
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
		shadowed: map[string]bool{},
		serving:  make(chan struct{}),
	}
	for _, rc := range cfg.Replicas {
		slot := f.slots.take()
		replica, err := proxy.NewReplica(slot, rc.ID, rc.URL)
		if err != nil {
			f.slots.release(slot)
			f.release()
			return nil, fmt.Errorf("replica %s: %w", rc.ID, err)
		}
		m := &member{cfg: rc, replica: replica}
		for _, name := range rc.Models {
			m.models = append(m.models, card{ID: name})
		}
		f.members = append(f.members, m)
	}
	f.mu.Lock()
	f.publishLocked()
	f.mu.Unlock()

	ctx, cancel := context.WithCancel(context.Background())
	f.stop = cancel
	for _, m := range f.members {
		f.checked.Add(1)
		f.done.Go(func() { f.watch(ctx, m) })
	}
	f.checked.Wait()
	return f, nil
}

// close ends the watching and closes the replicas. No request may be running.
func (f *fleet) close() {
	f.stop()
	f.done.Wait()
	f.client.CloseIdleConnections()
	f.release()
}

func (f *fleet) release() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range f.members {
		m.replica.Close()
		f.slots.release(m.replica.Slot)
	}
	f.members = nil
}

func (f *fleet) watch(ctx context.Context, m *member) {
	f.check(ctx, m)
	f.checked.Done()
	tick := time.NewTicker(f.cfg.Health.Interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			f.check(ctx, m)
		}
	}
}

// check asks a replica whether it is well and, when that may have changed,
// what it serves. The result is published when it differs from what was known.
func (f *fleet) check(ctx context.Context, m *member) {
	err := f.checkHealth(ctx, m)
	var models []card
	var addrs []netip.AddrPort
	if err == nil && f.wantsModels(m) {
		addrs = f.resolve(ctx, m)
		if len(m.cfg.Models) == 0 {
			models, err = f.fetchModels(ctx, m)
		}
	}
	if ctx.Err() != nil {
		return // the agent is stopping; the failure is not the engine's
	}

	f.mu.Lock()
	defer f.mu.Unlock()
	if err != nil {
		f.failedLocked(m, err)
		return
	}
	changed := !m.up
	m.up, m.failures, m.why, m.silent = true, 0, "", false
	m.checks++
	if addrs != nil {
		m.checks = 0
		if !slices.Equal(addrs, m.addrs) {
			m.addrs = addrs
			f.enginesLocked()
		}
	}
	// vLLM says that its models were created just now, whenever it is asked.
	sameCard := func(a, b card) bool { a.Created = b.Created; return a == b }
	if models != nil && !slices.EqualFunc(models, m.models, sameCard) {
		m.models = models
		changed = true
	}
	if !changed {
		return
	}
	f.log.Info("replica serves", "replica", m.cfg.ID, "url", m.cfg.URL, "models", names(m.models))
	f.publishLocked()
	f.served.Do(func() { close(f.serving) })
}

func (f *fleet) failedLocked(m *member, err error) {
	m.failures++
	if why := err.Error(); why != m.why {
		m.why = why
		if !m.up {
			f.log.Warn("replica takes no requests", "replica", m.cfg.ID, "url", m.cfg.URL, "why", why)
		}
	}
	changed := false
	if silent := errors.Is(err, errSilent); silent != m.silent {
		m.silent = silent
		changed = !m.up
	}
	if m.up && m.failures >= f.cfg.Health.UnhealthyThreshold {
		m.up = false
		changed = true
		f.log.Warn("replica is down", "replica", m.cfg.ID, "url", m.cfg.URL, "failed_checks", m.failures, "why", m.why)
	}
	if changed {
		f.publishLocked()
	}
}

// wantsModels: a replica that comes up, or that failed a check and may be
// another process now, is asked at once.
func (f *fleet) wantsModels(m *member) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return !m.up || m.failures > 0 || m.checks+1 >= modelsEvery
}

// checkHealth fails when the engine does not answer or says that it is dead.
// An engine without the page is well; whether it serves, its models tell.
func (f *fleet) checkHealth(ctx context.Context, m *member) error {
	ctx, cancel := context.WithTimeout(ctx, f.cfg.Health.Timeout)
	defer cancel()
	resp, err := f.get(ctx, m, "/health")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	// A short body is read to its end, so that the connection can be reused.
	_, _ = io.CopyN(io.Discard, resp.Body, 4<<10)
	if resp.StatusCode >= 500 {
		return fmt.Errorf("GET /health: status %d", resp.StatusCode)
	}
	return nil
}

// fetchModels returns what the engine lists, never an empty list without an
// error.
func (f *fleet) fetchModels(ctx context.Context, m *member) ([]card, error) {
	// An engine under load answers this page later than the other.
	ctx, cancel := context.WithTimeout(ctx, max(f.cfg.Health.Timeout, 2*time.Second))
	defer cancel()
	resp, err := f.get(ctx, m, "/v1/models")
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("GET /v1/models: status %d; if it stays so, list its models in the configuration", resp.StatusCode)
	}
	models, err := parseModels(io.LimitReader(resp.Body, maxModelsBody))
	if errors.Is(err, context.DeadlineExceeded) {
		err = errSilent
	}
	if err != nil {
		return nil, fmt.Errorf("GET /v1/models: %w", err)
	}
	return models, nil
}

// parseModels reads the body of GET /v1/models. Models without a name and
// repeated ones are left out.
func parseModels(body io.Reader) ([]card, error) {
	var page struct {
		Data []card `json:"data"`
	}
	err := json.NewDecoder(body).Decode(&page)
	// A member of an unexpected type is left zero; what matters is the id.
	if typeError := (*json.UnmarshalTypeError)(nil); err != nil && !errors.As(err, &typeError) {
		return nil, fmt.Errorf("not JSON: %w", err)
	}
	seen := map[string]bool{"": true}
	models := slices.DeleteFunc(page.Data, func(c card) bool {
		double := seen[c.ID]
		seen[c.ID] = true
		return double
	})
	if len(models) == 0 {
		return nil, errors.New("lists no model")
	}
	return models, nil
}

func (f *fleet) get(ctx context.Context, m *member, page string) (*http.Response, error) {
	r := m.replica
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+r.Addr+r.BasePath+page, nil)
	if err != nil {
		return nil, err
	}
	req.Host = r.Host
	req.Header.Set("User-Agent", "inferrail")
	resp, err := f.client.Do(req)
	if err != nil {
		// The addresses in it are left out: the log line has the URL, and a
		// local port that differs each time would make each failure look new.
		if op := (*net.OpError)(nil); errors.As(err, &op) && !op.Timeout() {
			err = fmt.Errorf("%s: %w", op.Op, op.Err)
		} else if inner := errors.Unwrap(err); inner != nil {
			err = inner
		}
		if errors.Is(err, context.DeadlineExceeded) {
			err = errSilent
		}
		return nil, fmt.Errorf("GET %s: %w", page, err)
	}
	return resp, nil
}

// resolve returns the addresses behind the member's name, in order, or nil.
func (f *fleet) resolve(ctx context.Context, m *member) []netip.AddrPort {
	host, port, err := net.SplitHostPort(m.replica.Addr)
	if err != nil {
		return nil
	}
	if ap, err := netip.ParseAddrPort(m.replica.Addr); err == nil {
		return []netip.AddrPort{ap}
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	n, err := net.DefaultResolver.LookupPort(ctx, "tcp", port)
	if err != nil {
		return nil
	}
	ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return nil
	}
	var addrs []netip.AddrPort
	for _, ip := range ips {
		addrs = append(addrs, netip.AddrPortFrom(ip.Unmap(), uint16(n)))
	}
	slices.SortFunc(addrs, netip.AddrPort.Compare)
	return slices.Compact(addrs)
}

func (f *fleet) enginesLocked() {
	var all []netip.AddrPort
	for _, m := range f.members {
		all = append(all, m.addrs...)
	}
	slices.SortFunc(all, netip.AddrPort.Compare)
	f.engines(slices.Compact(all))
}

// publishLocked makes a snapshot of what the members are known to serve. A
// model whose replicas are all down stays in it without replicas: a request
// for it is answered "unavailable", not "unknown".
func (f *fleet) publishLocked() {
	s := &proxy.Fleet{Models: map[string]*proxy.Model{}}
	defaultPolicy := policies[f.cfg.Routing.DefaultPolicy]
	for _, mc := range f.cfg.Models {
		choose := defaultPolicy
		if mc.Policy != "" {
			choose = policies[mc.Policy]
		}
		s.Models[mc.Name] = &proxy.Model{Name: mc.Name, Policy: choose}
	}
	for _, m := range f.members {
		for _, c := range m.models {
			model := s.Models[c.ID]
			if model == nil {
				model = &proxy.Model{Name: c.ID, Policy: defaultPolicy}
				s.Models[c.ID] = model
			}
			if !slices.Contains(s.Listed, model) {
				s.Listed = append(s.Listed, model)
			}
			if model.Created == 0 {
				model.Created = int64(c.Created)
			}
			if model.OwnedBy == "" {
				model.OwnedBy = c.OwnedBy
			}
			// What fits every replica.
			if n := int64(c.MaxModelLen); n > 0 && (model.MaxModelLen == 0 || n < model.MaxModelLen) {
				model.MaxModelLen = n
			}
			if m.up {
				model.Replicas = append(model.Replicas, m.replica)
			}
		}
	}
	f.addSilentLocked(s)
	slices.SortFunc(s.Listed, func(a, b *proxy.Model) int { return strings.Compare(a.Name, b.Name) })
	for _, mc := range f.cfg.Models {
		for _, alias := range mc.Aliases {
			if s.Models[alias] == nil {
				s.Models[mc.Name].Aliases = append(s.Models[mc.Name].Aliases, alias)
				s.Models[alias] = s.Models[mc.Name]
			} else if !f.shadowed[alias] {
				f.shadowed[alias] = true
				f.log.Warn("an engine serves a model that is named like an alias; the alias is off", "alias", alias, "of", mc.Name)
			}
		}
	}
	f.snapshot = s
	f.publish(s)
}

// addSilentLocked gives models that have no replica those that do not answer
// checks in time: an engine under full load looks like that, and to try it is
// better than to refuse every request.
func (f *fleet) addSilentLocked(s *proxy.Fleet) {
	for _, model := range s.Listed {
		if len(model.Replicas) > 0 {
			continue
		}
		for _, m := range f.members {
			if m.silent && slices.ContainsFunc(m.models, func(c card) bool { return c.ID == model.Name }) {
				model.Replicas = append(model.Replicas, m.replica)
			}
		}
	}
}

// current returns the snapshot published last.
func (f *fleet) current() *proxy.Fleet {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.snapshot
}

// upCount returns how many replicas are up, and of how many.
func (f *fleet) upCount() (up, of int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range f.members {
		if m.up {
			up++
		}
	}
	return up, len(f.members)
}

// routes tells whether a request for any model can be sent on.
func (f *fleet) routes() bool {
	return slices.ContainsFunc(f.current().Listed, func(m *proxy.Model) bool { return len(m.Replicas) > 0 })
}

// replicaID names the replica that has a slot, for people.
func (f *fleet) replicaID(slot int) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range f.members {
		if m.replica.Slot == slot {
			return m.cfg.ID
		}
	}
	return strconv.Itoa(slot)
}

// status is what /debug/fleet shows.
func (f *fleet) status() any {
	type replica struct {
		Slot     int      `json:"slot"`
		ID       string   `json:"id"`
		URL      string   `json:"url"`
		Up       bool     `json:"up"`
		Why      string   `json:"why,omitempty"`
		Failures int      `json:"failed_checks"`
		InFlight int      `json:"in_flight"`
		Models   []string `json:"models"`
	}
	type model struct {
		Name     string   `json:"name"`
		Aliases  []string `json:"aliases"`
		Policy   string   `json:"policy"`
		Replicas []string `json:"replicas"`
	}
	out := struct {
		Replicas []replica `json:"replicas"`
		Models   []model   `json:"models"`
	}{[]replica{}, []model{}}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range f.members {
		out.Replicas = append(out.Replicas, replica{
			m.replica.Slot, m.cfg.ID, m.cfg.URL, m.up, m.why, m.failures, m.replica.InFlight(), names(m.models)})
	}
	for _, m := range f.snapshot.Listed {
		row := model{m.Name, append([]string{}, m.Aliases...), policyName(m.Policy), []string{}}
		for _, r := range m.Replicas {
			row.Replicas = append(row.Replicas, r.ID)
		}
		out.Models = append(out.Models, row)
	}
	return out
}

func policyName(p policy.Policy) string {
	if p == nil {
		return ""
	}
	return p.Name()
}

func names(cards []card) []string {
	out := make([]string, len(cards))
	for i, c := range cards {
		out[i] = c.ID
	}
	return out
}

var replicaUpDesc = prometheus.NewDesc("inferrail_replica_up",
	"1 when the replica takes requests.", []string{"replica"}, nil)

// Describe implements prometheus.Collector.
func (f *fleet) Describe(ch chan<- *prometheus.Desc) { ch <- replicaUpDesc }

// Collect implements prometheus.Collector.
func (f *fleet) Collect(ch chan<- prometheus.Metric) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range f.members {
		up := 0.0
		if m.up {
			up = 1
		}
		ch <- prometheus.MustNewConstMetric(replicaUpDesc, prometheus.GaugeValue, up, m.cfg.ID)
	}
}

// slots hands out the dense numbers that stand for endpoints. The zero value
// has none taken. Its owner sees to it that one call runs at a time.
type slots struct{ taken []bool }

// take returns the lowest number that is not taken.
func (s *slots) take() int {
	slot := slices.Index(s.taken, false)
	if slot < 0 {
		slot = len(s.taken)
		s.taken = append(s.taken, false)
	}
	s.taken[slot] = true
	return slot
}

// release frees a number that take returned. The endpoint's last request has
// ended.
func (s *slots) release(slot int) {
	if !s.taken[slot] {
		panic(fmt.Sprintf("BUG: slot %d released twice", slot))
	}
	s.taken[slot] = false
}
