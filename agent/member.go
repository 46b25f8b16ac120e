package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/proxy"
)

// modelsEvery is the number of health checks after which a replica that stayed
// up is asked for its models again: adapters are loaded at run time.
const modelsEvery = 5

// maxModelsBody bounds the answer to GET /v1/models that is read.
const maxModelsBody = 4 << 20

// maxModels bounds the models that one replica may have: each is named in
// every snapshot.
const maxModels = 10_000

// pokePause is the least time between checks that failing requests ask for.
const pokePause = 50 * time.Millisecond

// A member that has left is looked at every lingerEvery, and its slot kept for
// at least leaveGrace after it was in a snapshot: a request that was routed just
// before may still be on its way to it. It stands in for at most standInFor,
// which is enough to look a name up and to check who is found.
const (
	lingerEvery = 50 * time.Millisecond
	leaveGrace  = time.Second
	standInFor  = 3 * time.Second
)

// member is one endpoint of the fleet, from when it is first wanted until it
// has left and its last request has ended. One goroutine of its own watches it
// (fleet.live), one compares its tokens (fleet.checkPrompts), one follows its KV
// events (fleet.followEvents). What is guarded is guarded by fleet.mu.
type member struct {
	id, url string
	// replica is the same in every snapshot, so that its counters and
	// connections live on when it is down for a while.
	replica *proxy.Replica
	poked   chan struct{} // asks for a check soon; holds one
	first   chan struct{} // closed after its first check
	checker *checker
	// subscriber follows its KV events (fleet.followEvents).
	subscriber *subscriber
	end        context.CancelFunc // of the checker and the subscriber, when the member is released
	server     *server

	// What follows is guarded.

	cfg    ReplicaConfig
	rank   int    // of its server's data-parallel ranks; -1 is all of them
	source string // where it was found; "static" when it is configured
	key    string // that the engine wants
	// stay ends when the member leaves. It is made anew when it comes back.
	stay  context.Context
	leave context.CancelFunc
	gone  time.Time // when it left; zero while it belongs to the fleet
	// standsIn: it has left, and is in the snapshot all the same. unrouted is
	// since when it is in none.
	standsIn bool
	unrouted time.Time

	vitals vitals
	shown  standing // the standing in the snapshot published last
	checks int      // good checks since models was read
	// returns is how often it has come up after it was not known to be, came
	// when it did last: the engine may be another process since.
	returns int
	came    time.Time
	stale   bool   // models or key are to be read at the next check
	why     string // what the last check failed with
	silent  bool   // and that it did so by getting no answer in time
	cause   string // what the last request that led to an ejection failed with
	models  []card // last known
	// unlisted is why they are not those of the last time that it was asked.
	unlisted string
	addrs    []netip.AddrPort
	cache    engineCache
	// wentDown is when it was found down last, while it is; restarts is how often
	// its engine was seen to have restarted.
	wentDown time.Time
	restarts int
	// peer is what it is to the others, as far as speeds are concerned.
	peer policy.Peer
	// told is how many seconds a usual prompt took there when that was last told in
	// the log, 0 for never, and changes how often the replica had changed then.
	told    float64
	changes int
	// reports are the looks at its load, by what became of them; loadWhy is why the
	// last one has told nothing.
	reports [loadOutcomes]uint64
	loadWhy string
	flow    flow

	// What follows is guarded by server.busy: what the agent had there at the last
	// report, and its engine's hit rate.
	own  policy.Own
	hits policy.HitRate
}

// errSilent: the engine did not answer a check in time. It may be dead, or it
// may be busy.
var errSilent = errors.New("no answer in time")

// errListLater: the engine cannot list its models now. That says nothing of
// whether it serves them.
var errListLater = errors.New("its models cannot be listed now")

// card is one entry of an engine's GET /v1/models. Of a LoRA adapter, Parent is
// the model it adapts.
type card struct {
	ID          string  `json:"id"`
	Created     float64 `json:"created"`
	OwnedBy     string  `json:"owned_by"`
	Root        string  `json:"root"`
	Parent      string  `json:"parent"`
	MaxModelLen float64 `json:"max_model_len"`
}

// poke asks for a check soon. It never blocks.
func (m *member) poke() {
	select {
	case m.poked <- struct{}{}:
	default:
	}
}

// configureLocked makes the member what rc and source say. Its ID and URL stay.
func (m *member) configureLocked(rc ReplicaConfig, source string) {
	m.source = source
	// A file may hold another key by now.
	same := rc.APIKey == m.cfg.APIKey && rc.APIKeyFile == "" && m.cfg.APIKeyFile == "" && slices.Equal(rc.Models, m.cfg.Models)
	m.cfg = rc
	m.replica.SetBounds(rc.MaxConcurrency, rc.MaxPending)
	m.replica.SetLarge(rc.Tier == "large")
	m.replica.SetAllChats(m.allChats())
	// A key in a file is read by the check that follows; until then the
	// member goes on with the one it has.
	if rc.APIKeyFile == "" {
		m.setKeyLocked(rc.APIKey)
	}
	if len(rc.Models) > 0 {
		var cards []card
		for _, name := range rc.Models {
			known := slices.IndexFunc(m.models, func(c card) bool { return c.ID == name })
			if known >= 0 {
				cards = append(cards, m.models[known])
			} else {
				cards = append(cards, card{ID: name})
			}
		}
		m.setModelsLocked(cards)
	}
	if !same {
		m.stale = true
		m.poke()
	}
	m.subscriber.poke()
}

// setRank says which data-parallel rank of its server the member is.
func (m *member) setRank(rank int) {
	m.rank = rank
	m.replica.SetRank(rank)
}

func (m *member) setKeyLocked(key string) {
	m.key = key
	m.replica.SetKey(key)
}

func (m *member) setModelsLocked(models []card) {
	m.models = models
	m.vitals.models = names(models)
}

// readKey reads a key from a file.
func readKey(file string) (string, error) {
	text, err := readFile(file)
	if err != nil {
		return "", fmt.Errorf("api_key_file: %w", err)
	}
	key := strings.TrimSpace(string(text))
	if key == "" {
		return "", fmt.Errorf("api_key_file: %s is empty", file)
	}
	if strings.ContainsFunc(key, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return "", fmt.Errorf("api_key_file: %s holds more than a key on one line", file)
	}
	return key, nil
}

// live is the member's goroutine. It watches the member for as long as it
// belongs to the fleet, and then sees it off.
func (f *fleet) live(m *member) {
	for {
		f.mu.Lock()
		stay := m.stay
		f.mu.Unlock()
		f.watch(stay, m)
		if !f.linger(m) {
			return
		}
	}
}

// watch checks the member each interval, soon after a poke, and several times
// while requests fail there: an engine that crashes may answer a check between
// its first failed request and its end. It ends the member's ejections, and
// returns when ctx is done.
func (f *fleet) watch(ctx context.Context, m *member) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	next := time.Now()     // check
	soonest := next        // check after a poke
	pause := pokePause / 2 // doubles while requests fail
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
			return
		case <-m.poked:
			now := time.Now()
			if soonest.Before(now) {
				soonest = now
			}
			if soonest.Before(next) {
				next = soonest
			}
		case <-timer.C:
		}
		now := time.Now()
		if !now.Before(next) {
			suspect := f.check(ctx, m)
			interval := f.cfg.Load().Health.Interval
			soonest = time.Now().Add(min(pokePause, interval))
			next = now.Add(interval)
			if pause = min(2*pause, interval); !suspect {
				pause = pokePause / 2
			} else if again := time.Now().Add(pause); again.Before(next) {
				next = again
			}
		}
		wake := next
		if until := f.pass(m); !until.IsZero() && until.Before(wake) {
			wake = until
		}
		timer.Reset(max(time.Until(wake), 0))
	}
}

// pass lets the member's ejection end, when its time has come, and returns when
// it will otherwise.
func (f *fleet) pass(m *member) (until time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !m.gone.IsZero() {
		return time.Time{}
	}
	now := time.Now()
	f.health.passed(&m.vitals, now)
	f.settleLocked(now, false)
	return m.vitals.until
}

// linger waits until the last request of a member that has left has ended, and
// then releases it. It reports true when the member was called back meanwhile.
// While requests run there it goes on to check the member each interval.
func (f *fleet) linger(m *member) (back bool) {
	tick := time.NewTicker(lingerEvery)
	defer tick.Stop()
	checked := time.Now()
	for {
		select {
		case <-f.stopped.Done():
			return false // close releases it
		case <-m.poked:
		case <-tick.C:
		}
		f.mu.Lock()
		back = m.gone.IsZero()
		if m.standsIn && time.Since(m.gone) >= standInFor {
			f.publishLocked()
		}
		over := !back && !m.standsIn && time.Since(m.unrouted) >= leaveGrace && m.replica.InFlight() == 0 && m.replica.Pending() == 0
		if over {
			f.releaseLocked(m)
			f.enginesLocked()
		}
		f.mu.Unlock()
		if back || over {
			return back
		}
		if m.replica.InFlight() > 0 && time.Since(checked) >= f.cfg.Load().Health.Interval {
			f.checkLeaving(m)
			checked = time.Now()
		}
	}
}

// checkLeaving looks whether a member that has left still answers. Only silence
// counts: an engine that refuses connections may have been told to stop, and
// then finishes what it has; had it died, its connections would be reset. When
// it is found down, the requests that wait there for a first byte are sent
// elsewhere.
func (f *fleet) checkLeaving(m *member) {
	f.mu.Lock()
	key := m.key
	f.mu.Unlock()
	began := time.Now()
	_, err := f.checkHealth(f.stopped, m, key, true)
	if err != nil && !errors.Is(err, errSilent) {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if m.gone.IsZero() {
		return
	}
	was := m.vitals.standing
	f.health.checked(&m.vitals, began, time.Now(), err == nil)
	if is := m.vitals.standing; is == down && was != down {
		f.log.Warn("replica that leaves is down", "replica", m.id, "url", m.url, "in_flight", m.replica.InFlight(), "why", err)
		f.moveLocked()
	}
}

// check asks a replica whether it is well and, when that may have changed,
// what it serves. The result is published when it differs from what was known.
// It reports that the replica answers and requests fail there all the same.
func (f *fleet) check(ctx context.Context, m *member) (suspect bool) {
	began := time.Now()
	f.mu.Lock()
	cfg, key, configured := m.cfg, m.key, m.source == "static"
	// A replica that comes up, or that failed a check and may be another
	// process now, is asked for its models at once.
	curious := m.stale || m.vitals.standing == joining || m.vitals.standing == down ||
		m.vitals.failedChecks > 0 || m.checks+1 >= modelsEvery
	known := m.vitals.standing == up && len(m.models) > 0
	// Whether it has restarted is found out before it gets further requests.
	doubtful := m.vitals.standing == joining || m.vitals.standing == down || m.vitals.failedChecks > 0 || m.replica.Failures() > 0
	m.stale = false // what makes it so from now on, this check may miss
	f.mu.Unlock()

	var err error
	if curious && cfg.APIKeyFile != "" {
		// A file that is being replaced leaves the engine the key that it took
		// before; that the file is bad, the configuration's problems tell.
		if text, readErr := readKey(cfg.APIKeyFile); readErr == nil {
			key = text
		} else if key == "" {
			err = readErr
		}
	}
	well := false
	if err == nil {
		well, err = f.checkHealth(ctx, m, key, configured)
	}
	if doubtful && err == nil {
		// So is what it has for a cache.
		f.look(ctx, m.server, m)
	}
	var models []card
	var addrs []netip.AddrPort
	unlisted := ""
	if err == nil && curious {
		addrs = f.resolve(ctx, m)
		if len(cfg.Models) == 0 {
			models, err = f.fetchModels(ctx, m, key)
		}
		// One that is well and serves goes on with the models that it had.
		if well && known && errors.Is(err, errListLater) {
			unlisted, err = err.Error(), nil
		}
	}

	f.mu.Lock()
	defer f.mu.Unlock()
	defer func() {
		select {
		case <-m.first:
		default:
			close(m.first)
		}
	}()
	if ctx.Err() != nil {
		return false // it has left; the failure is not the engine's
	}
	if m.cfg.APIKeyFile != cfg.APIKeyFile || m.cfg.APIKey != cfg.APIKey {
		return false // it was asked with a key that is no longer right; a poke is on its way
	}
	now := time.Now()
	f.health.requests(&m.vitals, m.replica.Failures(), now)
	f.health.checked(&m.vitals, began, now, err == nil)
	if err != nil {
		f.failedLocked(m, err, now)
		return false
	}
	m.why, m.silent = "", false
	m.checks++
	changed := false
	if curious {
		m.checks = 0
		if unlisted != m.unlisted {
			m.unlisted = unlisted
			if unlisted != "" {
				f.log.Warn("replica does not list its models; those known last stay", "replica", m.id, "url", m.url, "why", unlisted)
			}
		}
		if key != m.key {
			m.setKeyLocked(key)
		}
		if addrs != nil && !slices.Equal(addrs, m.addrs) {
			m.addrs = addrs
			f.enginesLocked()
		}
		// vLLM says that its models were created just now, whenever it is asked.
		sameCard := func(a, b card) bool { a.Created = b.Created; return a == b }
		if models != nil && len(m.cfg.Models) == 0 && !slices.EqualFunc(models, m.models, sameCard) {
			m.setModelsLocked(models)
			m.checker.poke()
			changed = true
		}
	}
	if changed && m.shown == up {
		f.log.Info("replica serves other models", "replica", m.id, "models", someNames(m.models))
	}
	f.settleLocked(now, changed)
	return !m.vitals.suspect.IsZero()
}

func (f *fleet) failedLocked(m *member, err error, now time.Time) {
	if why := err.Error(); why != m.why {
		m.why = why
		if m.shown == joining || m.shown == down {
			f.log.Warn("replica takes no requests", "replica", m.id, "url", m.url, "why", why)
		}
	}
	silent := errors.Is(err, errSilent)
	changed := silent != m.silent && m.vitals.standing != up
	m.silent = silent
	f.settleLocked(now, changed)
}

// checkHealth fails when the engine does not answer or says that it is dead.
// well tells that it says that it is not: an engine without the page passes as
// well, but whether that one serves, its models tell.
//
// An agent is no engine. It lists the models of its engines as its own, and requests
// that went to this one, or to another that has this one for an engine, would go round
// until none has a place left. Whoever configures another agent by its address knows
// what is behind it; a selector or a name finds agents by mistake.
func (f *fleet) checkHealth(ctx context.Context, m *member, key string, configured bool) (well bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, f.cfg.Load().Health.Timeout)
	defer cancel()
	resp, err := f.get(ctx, m, key, "/health")
	if err != nil {
		return false, err
	}
	defer resp.Body.Close()
	// A short body is read to its end, so that the connection can be reused.
	_, _ = io.CopyN(io.Discard, resp.Body, 4<<10)
	switch of := resp.Header.Get(proxy.InstanceField); {
	case of == "":
	case of == f.self:
		return false, errors.New("this is the agent itself; name engines, or a selector that picks engines alone")
	case !configured:
		return false, errors.New("this is another agent, and no engine; let discovery find engines alone, or configure the agent's address among the replicas")
	}
	if resp.StatusCode >= 500 {
		return false, fmt.Errorf("GET /health: status %d", resp.StatusCode)
	}
	return resp.StatusCode == http.StatusOK, nil
}

// fetchModels returns what the engine lists, never an empty list without an
// error.
func (f *fleet) fetchModels(ctx context.Context, m *member, key string) ([]card, error) {
	// An engine under load answers this page later than the other.
	ctx, cancel := context.WithTimeout(ctx, max(f.cfg.Load().Health.Timeout, 2*time.Second))
	defer cancel()
	resp, err := f.get(ctx, m, key, "/v1/models")
	if errors.Is(err, errSilent) {
		return nil, fmt.Errorf("%w, %w", err, errListLater)
	}
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	switch status := resp.StatusCode; {
	case status == http.StatusOK:
	case status >= 500 || status == http.StatusTooManyRequests:
		return nil, fmt.Errorf("GET /v1/models: status %d; %w", status, errListLater)
	case status == http.StatusUnauthorized || status == http.StatusForbidden:
		return nil, fmt.Errorf("GET /v1/models: status %d; give its api_key or api_key_file in the configuration", resp.StatusCode)
	default:
		return nil, fmt.Errorf("GET /v1/models: status %d; if it stays so, list its models in the configuration", resp.StatusCode)
	}
	models, err := parseModels(io.LimitReader(resp.Body, maxModelsBody))
	if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		// The read itself may fail with the connection's being closed.
		err = fmt.Errorf("%w, %w", errSilent, errListLater)
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
	switch {
	case len(models) == 0:
		return nil, errors.New("lists no model")
	case len(models) > maxModels:
		return nil, fmt.Errorf("lists %d models, and at most %d are taken; list those to serve in the configuration", len(models), maxModels)
	}
	return models, nil
}

func (f *fleet) get(ctx context.Context, m *member, key, page string) (*http.Response, error) {
	r := m.replica
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+r.Addr+r.BasePath+page, nil)
	if err != nil {
		return nil, err
	}
	req.Host = r.Host
	req.Header.Set("User-Agent", "inferrail")
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	resp, err := f.client.Do(req)
	if err != nil {
		return nil, fmt.Errorf("GET %s: %w", page, plainError(err))
	}
	return resp, nil
}

// plainError leaves out of an HTTP client's error the addresses: the log line
// has the URL, and a local port that differs each time would make each failure
// look new. No answer in time becomes errSilent.
func plainError(err error) error {
	if op := (*net.OpError)(nil); errors.As(err, &op) && !op.Timeout() {
		err = fmt.Errorf("%s: %w", op.Op, op.Err)
	} else if inner := errors.Unwrap(err); inner != nil {
		err = inner
	}
	if errors.Is(err, context.DeadlineExceeded) {
		err = errSilent
	}
	return err
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
