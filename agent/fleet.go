package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/proxy"
)

// fleet is the engines: those of the configuration and those that discovery
// finds. It watches them, one goroutine each, and publishes an immutable
// proxy.Fleet whenever one joins, leaves, fails, returns or serves other
// models. The Agent makes it with startFleet and stops it with close; the other
// methods may be called from any goroutine.
type fleet struct {
	cfg       atomic.Pointer[Config]
	log       *slog.Logger
	client    *http.Client
	publish   func(*proxy.Fleet)
	engines   func([]netip.AddrPort)
	self      string // proxy.Server.Instance of this agent
	discovery *discovery
	prompts   *prompts
	// index knows what the members' engines hold.
	index      *index.Index
	states     *slotStates
	eventsIdle time.Duration // see there

	stopped context.Context
	stop    context.CancelFunc
	done    sync.WaitGroup // the goroutines of members, three each, of servers, and expire
	serving chan struct{}  // closed when the first replica takes requests
	served  sync.Once      // closes serving

	mu       sync.Mutex // guards what follows and what members say it guards
	wanted   []finding  // what apply was told last
	members  []*member  // in the order in which they were found
	leaving  []*member  // those that have left and still serve requests
	health   health     // of members
	running  bool       // every member of the start was checked once
	closed   bool
	slots    slots
	released func(slot int) // may be nil
	servers  []*server
	snapshot *proxy.Fleet
	shadowed map[string]bool // aliases already reported as hidden by a model
	policies policies        // of models
	// cacheNames are the names that base models have in the index.
	cacheNames map[string]string
	// warm is what a snapshot holds that no member has taken yet.
	warm *warmth
}

// startFleet starts to look for engines and to watch them. It returns after
// each source was asked once, and each of those it had found in time was
// checked once. self is proxy.Server.Instance of this agent.
func startFleet(cfg *Config, log *slog.Logger, self string, publish func(*proxy.Fleet), engines func([]netip.AddrPort)) (*fleet, error) {
	f := newFleet(cfg, log, publish, engines)
	f.self = self
	if file := cfg.Index.Snapshot; file != "" {
		f.load(file, int64(cfg.Index.MaxBytes)+leastIndex, time.Now())
	}
	if err := f.start(); err != nil {
		return nil, err
	}
	return f, nil
}

func newFleet(cfg *Config, log *slog.Logger, publish func(*proxy.Fleet), engines func([]netip.AddrPort)) *fleet {
	dialer := &net.Dialer{}
	dialer.SetMultipathTCP(false)
	f := &fleet{
		log: log, publish: publish, engines: engines,
		client: &http.Client{
			Transport: &http.Transport{
				DialContext:        dialer.DialContext,
				DisableCompression: true,
				// A check, and a look at the engine's pages.
				MaxIdleConnsPerHost: 2,
				IdleConnTimeout:     cfg.Server.UpstreamIdle,
			},
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
		index:    index.New(index.Config{MaxBytes: int64(cfg.Index.MaxBytes)}),
		health:   health{HealthConfig: cfg.Health},
		shadowed: map[string]bool{},
		serving:  make(chan struct{}),

		eventsIdle: eventsIdle,
	}
	f.states = &slotStates{index: f.index, slots: map[int]slotState{}}
	f.cfg.Store(cfg)
	f.stopped, f.stop = context.WithCancel(context.Background())
	f.discovery = newDiscovery(log, f.apply)
	f.prompts = newPrompts(cfg, log, f.promptsChanged)
	f.prompts.configure(cfg)
	return f
}

func (f *fleet) start() error {
	f.done.Go(f.expire)
	f.mu.Lock()
	f.publishLocked()
	f.mu.Unlock()
	if err := f.discovery.configure(f.cfg.Load()); err != nil {
		f.close()
		return err
	}
	f.discovery.awaitFirst()

	// What the first checks find may be several ranks, which are checked too.
	for checked := map[*member]bool{}; ; {
		f.mu.Lock()
		m, stay := (*member)(nil), context.Context(nil)
		for _, other := range f.members {
			if !checked[other] {
				m, stay = other, other.stay
				break
			}
		}
		f.running = m == nil
		f.mu.Unlock()
		if m == nil {
			return nil
		}
		select {
		case <-m.first:
		case <-stay.Done():
		}
		checked[m] = true
	}
}

// close ends the watching and closes the replicas. No request may be running.
func (f *fleet) close() {
	f.mu.Lock()
	f.closed = true
	f.mu.Unlock()
	f.discovery.close()
	f.stop()
	f.prompts.stop()
	f.done.Wait()
	f.prompts.close()
	f.client.CloseIdleConnections()

	f.mu.Lock()
	defer f.mu.Unlock()
	f.leaving = append(f.leaving, f.members...)
	f.members, f.released = nil, nil
	for len(f.leaving) > 0 {
		f.releaseLocked(f.leaving[0])
	}
}

// reconfigure makes the fleet what cfg, which is valid, says: numbers and
// models at once, and with them the configured replicas; what discovery finds
// follows. Members that are wanted further on keep health, counters and
// connections.
func (f *fleet) reconfigure(cfg *Config) error {
	f.setConfig(cfg)
	return f.discovery.configure(cfg)
}

// setConfig replaces what the fleet knows of models, routing and health.
func (f *fleet) setConfig(cfg *Config) {
	f.prompts.configure(cfg)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.cfg.Store(cfg)
	f.health.HealthConfig = cfg.Health
	f.publishLocked()
	for _, m := range f.members {
		m.poke() // the interval may be another
		m.checker.poke()
	}
}

// promptsChanged publishes the fleet because a model's prompts are followed by
// something else from now on, and lets that be compared with the engines.
func (f *fleet) promptsChanged() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return
	}
	f.publishLocked()
	for _, m := range f.members {
		m.checker.poke()
	}
}

// apply makes the members those that are wanted, told apart by ID and URL. What
// leaves takes no more requests from now on, unless it was the last to serve a
// model (see standInLocked), and is released when its last one has ended. The error names those that cannot be members; the others are.
func (f *fleet) apply(wanted []finding) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.applyLocked(wanted)
}

func (f *fleet) applyLocked(wanted []finding) error {
	if f.closed {
		return nil
	}
	f.wanted = wanted
	now := time.Now()
	before := f.members
	type place struct{ id, url string }
	had := make(map[place]*member, len(before))
	for _, m := range before {
		had[place{m.id, m.url}] = m
	}
	f.members = make([]*member, 0, len(wanted))
	changed := false
	var problems []error
	for _, w := range f.ranksLocked(wanted, &problems) {
		if m := had[place{w.member, w.URL}]; m != nil {
			old := &m.cfg
			changed = changed || !slices.Equal(old.Models, w.Models) || old.KVBlocks != w.KVBlocks || old.Engine != w.Engine
			m.configureLocked(w.ReplicaConfig, w.source)
			m.setRank(w.rank)
			f.members = append(f.members, m)
			continue
		}
		same := func(m *member) bool { return m.id == w.member && m.url == w.URL }
		if i := slices.IndexFunc(f.leaving, same); i >= 0 {
			m := f.leaving[i]
			f.leaving = slices.Delete(f.leaving, i, i+1)
			f.joinLocked(m, w)
			continue
		}
		slot := f.slots.take()
		replica, err := proxy.NewReplica(slot, w.member, w.URL)
		if err != nil {
			f.slots.release(slot)
			problems = append(problems, err)
			continue
		}
		m := &member{
			id: w.member, url: w.URL, replica: replica, server: f.serverLocked(w.finding),
			poked: make(chan struct{}, 1), first: make(chan struct{}),
			checker: f.prompts.join(slot), subscriber: newSubscriber(slot, w.member, f.index, f.states, f.log),
		}
		m.server.members++
		life, end := context.WithCancel(f.stopped)
		m.end = end
		replica.OnFailure = func(inARow int, cause error) { f.requestFailed(m, inARow, cause) }
		f.joinLocked(m, w)
		f.done.Go(func() { f.live(m) })
		f.done.Go(func() { f.checkPrompts(life, m) })
		f.done.Go(func() { f.followEvents(life, m) })
	}
	stays := make(map[*member]bool, len(f.members))
	for _, m := range f.members {
		stays[m] = true
	}
	for _, m := range before {
		if !stays[m] {
			f.leaveLocked(m, now)
		}
	}
	// Those in line where somebody leaves are told by publishLocked.
	if changed || !slices.Equal(before, f.members) {
		f.publishLocked()
		f.enginesLocked()
	}
	f.health.reconsider(now)
	f.settleLocked(now, false)
	return errors.Join(problems...)
}

// rankedFinding is a member that is wanted: a data-parallel rank of a finding, or
// the whole of it, when rank is -1.
type rankedFinding struct {
	finding
	member string // its ID
	rank   int
}

// ranksLocked makes one of each data-parallel rank of the findings, as many as are
// configured, or as the engine has said that it has.
func (f *fleet) ranksLocked(wanted []finding, problems *[]error) []rankedFinding {
	ids := make(map[string]bool, len(wanted))
	for _, w := range wanted {
		ids[w.ID] = true
	}
	told := make(map[[2]string]int, len(f.servers))
	for _, s := range f.servers {
		told[[2]string{s.id, s.url}] = s.ranks
	}
	list := make([]rankedFinding, 0, len(wanted))
	for _, w := range wanted {
		n := w.DataParallel
		if n == 0 {
			n = told[[2]string{w.ID, w.URL}]
		}
		if n < 2 {
			list = append(list, rankedFinding{w, w.ID, -1})
			continue
		}
		for rank := range min(n, mostRanks) {
			id := w.ID + "/" + strconv.Itoa(rank)
			if ids[id] {
				*problems = append(*problems, fmt.Errorf("replica %s: rank %d would be called %s, as another replica is; give that one another id", w.ID, rank, id))
				continue
			}
			list = append(list, rankedFinding{w, id, rank})
		}
	}
	return list
}

func (f *fleet) joinLocked(m *member, w rankedFinding) {
	if f.running {
		f.log.Info("replica joins", "replica", m.id, "url", w.URL, "source", w.source)
	}
	m.gone, m.standsIn, m.shown = time.Time{}, false, joining
	m.stay, m.leave = context.WithCancel(f.stopped)
	f.health.joined(&m.vitals)
	m.replica.AskAhead()
	m.configureLocked(w.ReplicaConfig, w.source)
	m.setRank(w.rank)
	f.members = append(f.members, m)
	m.poke()
}

func (f *fleet) leaveLocked(m *member, now time.Time) {
	f.log.Info("replica leaves", "replica", m.id, "url", m.url, "source", m.source, "in_flight", m.replica.InFlight())
	f.health.left(&m.vitals, now)
	f.prompts.leave(m.replica.Slot)
	m.gone, m.unrouted, m.standsIn = now, now, false
	m.leave()
	f.leaving = append(f.leaving, m)
}

// releaseLocked gives back what a member holds that has left.
func (f *fleet) releaseLocked(m *member) {
	m.leave()
	m.end()
	m.replica.Close()
	f.prompts.release(m.replica.Slot)
	m.subscriber.close()
	f.index.Leave(m.replica.Slot)
	f.states.left(m.replica.Slot)
	if m.server.members--; m.server.members == 0 {
		m.server.end()
		f.servers = slices.DeleteFunc(f.servers, func(s *server) bool { return s == m.server })
	}
	if f.released != nil {
		f.released(m.replica.Slot)
	}
	f.slots.release(m.replica.Slot)
	f.leaving = slices.DeleteFunc(f.leaving, func(other *member) bool { return other == m })
}

// requestFailed hears of each request that failed through a member's fault, on
// that request's goroutine. When it returns, a member that is ejected is in no
// snapshot any more.
func (f *fleet) requestFailed(m *member, inARow int, cause error) {
	if n := f.cfg.Load().Health.EjectionFailures; n <= 0 || inARow < n {
		return
	}
	f.mu.Lock()
	if m.gone.IsZero() {
		if m.vitals.standing == up && cause != nil {
			m.cause = cause.Error()
		}
		now := time.Now()
		f.health.requests(&m.vitals, inARow, now)
		f.settleLocked(now, false)
	}
	f.mu.Unlock()
	m.poke()
}

// settleLocked does what follows from the standings that have changed, and
// publishes the fleet then, or when it is told that something else has.
func (f *fleet) settleLocked(now time.Time, changed bool) {
	slow := f.health.SlowStart
	for _, m := range f.members {
		was, is := m.shown, m.vitals.standing
		if was == is {
			continue
		}
		changed = true
		m.shown = is
		switch is {
		case up:
			if was != ejected {
				m.returns, m.came = m.returns+1, now
			}
			m.checker.poke()
			m.subscriber.poke()
			f.cameUpLocked(m, now)
			m.replica.Forgive()
			// An agent that starts meets engines that are at work already.
			if was != joining || f.running {
				m.replica.SlowStart(now, slow)
			}
			f.log.Info("replica serves", "replica", m.id, "url", m.url, "models", someNames(m.models), "was", was.String())
			f.served.Do(func() { close(f.serving) })
		case ejected:
			f.log.Warn("replica is ejected", "replica", m.id, "url", m.url,
				"failed_requests", m.vitals.failedRequests, "for", m.vitals.until.Sub(now), "why", m.cause)
		case down:
			m.wentDown = now
			f.log.Warn("replica is down", "replica", m.id, "url", m.url, "failed_checks", m.vitals.failedChecks, "why", m.why)
		}
	}
	if changed {
		f.publishLocked()
	}
}

// moveLocked lets the requests that wait for a first byte leave a replica that
// is down, be it long since, when one of its models has a replica that is up in
// the snapshot published last. At others that are merely silent they would fare
// no better, and would lose the places that they have in the engine's queue.
func (f *fleet) moveLocked() {
	served := map[string]bool{}
	for _, m := range f.members {
		for _, c := range m.models {
			served[c.ID] = served[c.ID] || m.takesRequests()
		}
	}
	for _, m := range slices.Concat(f.members, f.leaving) {
		if m.vitals.standing == down && slices.ContainsFunc(m.models, func(c card) bool { return served[c.ID] }) {
			m.replica.Evacuate()
		}
	}
}

func (f *fleet) enginesLocked() {
	var all []netip.AddrPort
	for _, m := range f.members {
		all = append(all, m.addrs...)
	}
	// What has left is still sent to by those that it answers.
	for _, m := range f.leaving {
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
	cfg := f.cfg.Load()
	newModel := func(name string) *proxy.Model {
		chosen := f.policies.of(cfg, name)
		model := &proxy.Model{Name: name, Policy: chosen.live, Shadows: chosen.shadows, SessionHeader: chosen.sessionHeader}
		s.Models[name] = model
		return model
	}
	for _, mc := range cfg.Models {
		newModel(mc.Name)
	}
	listed := map[*proxy.Model]bool{}
	add := func(m *member, c card, serves bool) {
		model := s.Models[c.ID]
		if model == nil {
			model = newModel(c.ID)
		}
		if !listed[model] {
			listed[model] = true
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
		if model.Root == "" {
			model.Root, model.Parent = c.Root, c.Parent
		}
		if serves {
			model.Replicas = append(model.Replicas, m.replica)
		}
	}
	for _, m := range f.members {
		for _, c := range m.models {
			add(m, c, m.takesRequests())
		}
	}
	f.standInLocked(s, add)
	f.addLastResortLocked(s)
	f.prompts.assign(cfg, s, f.sameLocked())
	f.cachesLocked(cfg, s)
	for name, model := range s.Models {
		var was *proxy.Model
		if f.snapshot != nil && f.snapshot.Models[name] != nil && f.snapshot.Models[name].Name == name {
			was = f.snapshot.Models[name]
			model.State = was.State
		} else {
			model.State = &proxy.ModelState{}
		}
		cfg.grant(model, was)
		if f.makeshiftLocked(model) {
			model.Prewarming = policy.Prewarming{}
		}
	}
	slices.SortFunc(s.Listed, func(a, b *proxy.Model) int { return strings.Compare(a.Name, b.Name) })
	for _, mc := range cfg.Models {
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
	f.policies.keep(func(name string) bool { return s.Models[name] != nil })
	f.snapshot = s
	f.publish(s)
	f.moveLocked()
}

// sameLocked maps the names under which an engine serves one model, which have
// one root, to the first of them.
func (f *fleet) sameLocked() map[string]string {
	first := map[string]string{}
	for _, m := range f.members {
		byRoot := map[string]string{}
		for _, c := range m.models {
			if c.Root == "" || c.Parent != "" {
				continue
			}
			if byRoot[c.Root] == "" {
				byRoot[c.Root] = c.ID
			}
			if first[c.ID] == "" {
				first[c.ID] = byRoot[c.Root]
			}
		}
	}
	return first
}

// standInLocked adds to models that nobody serves those who did and have just
// left. Who replaces them has to be looked for and checked first, and nobody
// should be told meanwhile that the model is not there.
func (f *fleet) standInLocked(s *proxy.Fleet, add func(m *member, c card, serves bool)) {
	now := time.Now()
	unserved := map[string]bool{}
	for _, m := range f.leaving {
		for _, c := range m.models {
			unserved[c.ID] = s.Models[c.ID] == nil || len(s.Models[c.ID].Replicas) == 0
		}
	}
	for _, m := range f.leaving {
		did := m.standsIn
		m.standsIn = false
		if m.takesRequests() && now.Sub(m.gone) < standInFor {
			for _, c := range m.models {
				if unserved[c.ID] {
					add(m, c, true)
					m.standsIn = true
				}
			}
		}
		if did && !m.standsIn {
			m.unrouted = now
		}
	}
}

// addLastResortLocked gives models that have no replica those that may be well
// all the same, because to try them is better than to refuse every request:
// replicas that are ejected, and if there is none, those that do not answer
// checks in time, as an engine under full load.
func (f *fleet) addLastResortLocked(s *proxy.Fleet) {
	for _, may := range []func(m *member) bool{
		func(m *member) bool { return m.vitals.standing == ejected },
		func(m *member) bool { return m.silent },
	} {
		lacking := map[*proxy.Model]bool{}
		for _, model := range s.Listed {
			if len(model.Replicas) == 0 {
				lacking[model] = true
			}
		}
		if len(lacking) == 0 {
			return
		}
		for _, m := range f.members {
			if !may(m) {
				continue
			}
			for _, c := range m.models {
				if model := s.Models[c.ID]; lacking[model] {
					model.Replicas = append(model.Replicas, m.replica)
				}
			}
		}
	}
}

// makeshiftLocked reports that a model has a replica that should take no request: a stand-in,
// or one of last resort.
func (f *fleet) makeshiftLocked(model *proxy.Model) bool {
	if len(model.Replicas) == 0 {
		return false
	}
	// All of a model's are, or none.
	first := model.Replicas[0]
	i := slices.IndexFunc(f.members, func(m *member) bool { return m.replica == first })
	return i < 0 || !f.members[i].takesRequests()
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
		if m.takesRequests() {
			up++
		}
	}
	return up, len(f.members)
}

func (m *member) takesRequests() bool { return m.vitals.standing == up }

// routes tells whether a request for any model can be sent on.
func (f *fleet) routes() bool {
	return slices.ContainsFunc(f.current().Listed, func(m *proxy.Model) bool { return len(m.Replicas) > 0 })
}

// ailments names, each in a few words, the replicas that take no requests and
// the sources of discovery that fail.
func (f *fleet) ailments() []string {
	var out []string
	f.mu.Lock()
	now := time.Now()
	for _, m := range f.members {
		state := ""
		switch m.vitals.standing {
		case up:
			continue
		case ejected:
			state = fmt.Sprintf("is ejected for %v", max(m.vitals.until.Sub(now), 0).Round(100*time.Millisecond))
		case down:
			state = "is down"
		case joining:
			state = "has not come up"
		}
		if why := m.reason(); why != "" {
			state += " (" + why + ")"
		}
		out = append(out, "replica "+m.id+" "+state)
	}
	for _, m := range f.members {
		if why := f.states.mismatch(m.replica.Slot); why != "" {
			out = append(out, "what replica "+m.id+" has in its cache is not known ("+why+")")
		}
		if why := m.subscriber.ailment(now); why != "" && m.takesRequests() {
			out = append(out, "replica "+m.id+": "+why)
		}
	}
	for _, s := range f.servers {
		if s.life.shared {
			out = append(out, "what replica "+s.id+" has in its cache is unknown (several processes answer at "+s.url+" in turns; give each a URL)")
		}
	}
	f.mu.Unlock()
	out = append(out, f.prompts.ailments()...)
	for _, s := range f.discovery.status() {
		if s.Error != "" {
			out = append(out, "discovery "+s.Source+" fails ("+s.Error+")")
		}
	}
	return out
}

// reason is why the member takes no requests, for people.
func (m *member) reason() string {
	if m.vitals.standing == ejected {
		return m.cause
	}
	return m.why
}

// streams is what userspace has copied of streams, and whose it is. A replica that has
// left may have its successor's id.
type streams struct {
	slot int
	id   string
	gaps proxy.Gaps
}

// streams tells of the replicas that requests may be at.
func (f *fleet) streams() []streams {
	f.mu.Lock()
	defer f.mu.Unlock()
	list := make([]streams, 0, len(f.members)+len(f.leaving))
	for _, from := range [][]*member{f.members, f.leaving} {
		for _, m := range from {
			list = append(list, streams{m.replica.Slot, m.id, m.replica.Gaps()})
		}
	}
	return list
}

// whenReleased has tell called, which must not block, when a slot is given back.
func (f *fleet) whenReleased(tell func(slot int)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.released = tell
}

// status is what /debug/fleet shows, of one replica or, when only is empty, of all.
func (f *fleet) status(only string) any {
	type replica struct {
		Slot     int        `json:"slot"`
		ID       string     `json:"id"`
		URL      string     `json:"url"`
		Source   string     `json:"source"`
		Engine   string     `json:"engine"`
		State    string     `json:"state"`
		Up       bool       `json:"up"`
		Why      string     `json:"why,omitempty"`
		Until    *time.Time `json:"ejected_until,omitempty"`
		Ejected  int        `json:"ejections"`
		Checks   int        `json:"failed_checks"`
		Requests int        `json:"failed_requests"`
		Share    float64    `json:"share"`
		InFlight int        `json:"in_flight"`
		Pending  int        `json:"pending"`
		Models   []string   `json:"models"`
		// Cache is what is known of the engine's KV cache.
		Cache cacheStatus `json:"kv_cache"`
		// Load is what it tells of its load.
		Load loadStatus `json:"load"`
	}
	type model struct {
		Name     string   `json:"name"`
		Aliases  []string `json:"aliases"`
		Policy   string   `json:"policy"`
		Replicas []string `json:"replicas"`
		// Prompts is how they are followed.
		Prompts promptStatus `json:"prompts"`
	}
	out := struct {
		Replicas  []replica      `json:"replicas"`
		Models    []model        `json:"models"`
		Discovery []sourceStatus `json:"discovery"`
	}{[]replica{}, []model{}, f.discovery.status()}
	type cache struct{ state, why string }
	caches := map[int]cache{}
	for _, st := range f.index.Stats(nil) {
		caches[st.Slot] = cache{indexStates[st.State], st.Why}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	now := time.Now()
	for _, m := range slices.Concat(f.members, f.leaving) {
		if only != "" && m.id != only {
			continue
		}
		row := replica{
			m.replica.Slot, m.id, m.url, m.source, m.cfg.Engine, m.vitals.standing.String(), m.takesRequests(),
			m.reason(), nil, m.vitals.ejections, m.vitals.failedChecks, m.replica.Failures(),
			m.replica.Share(now), m.replica.InFlight(), m.replica.Pending(), names(m.models), m.cacheStatusLocked(), m.loadStatusLocked(now)}
		row.Cache.State, row.Cache.StateWhy = caches[m.replica.Slot].state, caches[m.replica.Slot].why
		if until := m.vitals.until; !until.IsZero() {
			row.Until = &until
		}
		if !m.gone.IsZero() {
			row.State, row.Up, row.Why, row.Until = "leaving", false, "", nil
		}
		out.Replicas = append(out.Replicas, row)
	}
	for _, m := range f.snapshot.Listed {
		row := model{m.Name, append([]string{}, m.Aliases...), policyName(m.Policy), []string{}, f.prompts.status(m)}
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

// someNames are the names for a line of the log.
func someNames(cards []card) []string {
	const most = 20
	if len(cards) <= most {
		return names(cards)
	}
	return append(names(cards[:most]), fmt.Sprintf("and %d more", len(cards)-most))
}

var (
	replicaUpDesc = prometheus.NewDesc("inferrail_replica_up",
		"1 when the replica takes requests.", []string{"replica"}, nil)
	replicaStateDesc = prometheus.NewDesc("inferrail_replica_state",
		"1 for the state the replica is in, 0 for the others.", []string{"replica", "state"}, nil)
	replicaEjectionsDesc = prometheus.NewDesc("inferrail_replica_ejections_total",
		"Times that the replica was ejected because requests failed there.", []string{"replica"}, nil)
	replicaRunningDesc = prometheus.NewDesc("inferrail_replica_requests_running",
		"Requests sent to a replica and not finished.", []string{"replica"}, nil)
	replicaPendingDesc = prometheus.NewDesc("inferrail_replica_requests_pending",
		"Requests that wait in the agent for their turn at a replica.", []string{"replica"}, nil)
	replicaRestartsDesc = prometheus.NewDesc("inferrail_replica_restarts_total",
		"Times that the replica's engine was seen to have started anew, with nothing in its KV cache.", []string{"replica"}, nil)
	discoveryUpDesc = prometheus.NewDesc("inferrail_discovery_up",
		"1 when the source of discovery answered when it was asked last.", []string{"source"}, nil)
)

// Describe implements prometheus.Collector.
func (f *fleet) Describe(ch chan<- *prometheus.Desc) {
	ch <- replicaUpDesc
	ch <- replicaStateDesc
	ch <- replicaEjectionsDesc
	ch <- replicaRunningDesc
	ch <- replicaPendingDesc
	ch <- replicaRestartsDesc
	ch <- discoveryUpDesc
}

// Collect implements prometheus.Collector. A replica that has left has only the
// series of its requests, until the last has ended.
func (f *fleet) Collect(ch chan<- prometheus.Metric) {
	one := func(ok bool) float64 {
		if ok {
			return 1
		}
		return 0
	}
	gauge := func(desc *prometheus.Desc, value float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, labels...)
	}
	for _, s := range f.discovery.status() {
		gauge(discoveryUpDesc, one(s.Error == ""), s.Source)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range f.members {
		gauge(replicaUpDesc, one(m.takesRequests()), m.id)
		for _, s := range standings {
			gauge(replicaStateDesc, one(m.vitals.standing == s), m.id, s.String())
		}
		ch <- prometheus.MustNewConstMetric(replicaEjectionsDesc, prometheus.CounterValue, float64(m.vitals.ejections), m.id)
		ch <- prometheus.MustNewConstMetric(replicaRestartsDesc, prometheus.CounterValue, float64(m.restarts), m.id)
	}
	// One that has left may have its successor's name.
	running, pending := map[string]int{}, map[string]int{}
	for _, m := range slices.Concat(f.members, f.leaving) {
		running[m.id] += m.replica.InFlight()
		pending[m.id] += m.replica.Pending()
	}
	for id := range running {
		gauge(replicaRunningDesc, float64(running[id]), id)
		gauge(replicaPendingDesc, float64(pending[id]), id)
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
