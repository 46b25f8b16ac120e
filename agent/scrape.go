package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/inferrail/inferrail/index/kvevent"
	"github.com/inferrail/inferrail/proxy"
)

const (
	// scrapeEvery is the time between two looks at an engine's pages, besides
	// those at its load. A tenth more or less lets those of many engines spread.
	scrapeEvery = time.Second
	// scrapeTime bounds one look, and maxScrape what is read of a page: those of
	// the largest engines have about a megabyte.
	scrapeTime = time.Second
	maxScrape  = 8 << 20
	// describeEvery is how long what an engine has said of itself holds: it may
	// be another one by then without having been seen to restart.
	describeEvery = time.Minute
	// An engine that has no pages, or does not answer, is asked later each time,
	// up to scrapeRarely.
	scrapeRarely = time.Minute
	// longOutage is how long an engine that tells nothing of itself must be down
	// to be taken for another process. Engines take longer to load a model.
	longOutage = 30 * time.Second
)

// errUnpaged: the engine has no such page.
var errUnpaged = errors.New("no such page")

// errNotNow: it may have the page at another time.
var errNotNow = errors.New("not now")

// server is an engine's HTTP server, which may answer for several data-parallel
// ranks: the members that were made of one finding. A goroutine of its own reads
// its pages (fleet.scrape), from when its first member is made until its last is
// released; a member's first checks read them too.
type server struct {
	id, url string
	end     context.CancelFunc

	busy sync.Mutex // held while its pages are read
	load loadWatch
	// replicas are those of its members, as of the last look.
	replicas atomic.Pointer[[]*proxy.Replica]

	// What follows is guarded by fleet.mu.

	members int // that belong to it, those that are leaving included
	// ranks is how many the engine was told to have last, 0 when it was not.
	ranks int
	life  life
	// description is what the engine said of itself at described.
	description description
	described   time.Time
	// at is when its pages were read last, why what was wrong then, and failures
	// how often in a row.
	at       time.Time
	why      string
	failures int
	shared   bool // that several processes answer was told
}

// serverLocked returns the server of a finding, made if there is none.
func (f *fleet) serverLocked(w finding) *server {
	for _, s := range f.servers {
		if s.id == w.ID && s.url == w.URL {
			return s
		}
	}
	s := &server{id: w.ID, url: w.URL}
	ctx, end := context.WithCancel(f.stopped)
	s.end = end
	f.servers = append(f.servers, s)
	f.done.Go(func() { f.scrape(ctx, s) })
	return s
}

// scrape is the goroutine of a server. Each LoadConfig.Interval it finds out
// whether one of its pages is due, so that one that was idle is asked as often as a
// busy one as soon as the agent sends it something.
func (f *fleet) scrape(ctx context.Context, s *server) {
	timer := time.NewTimer(jitter(f.cfg.Load().Load.Interval))
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		now := time.Now()
		if all, load := f.due(s, now); all || load {
			f.visit(ctx, s, nil, all)
		}
		interval := f.cfg.Load().Load.Interval
		timer.Reset(max(jitter(interval)-time.Since(now), interval/10))
	}
}

// due tells whether a server is to be asked for all of its pages now, or for its
// load.
func (f *fleet) due(s *server, now time.Time) (all, load bool) {
	own := false
	if list := s.replicas.Load(); list != nil {
		own = slices.ContainsFunc(*list, func(r *proxy.Replica) bool { return r.InFlight() > 0 })
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	c := &f.cfg.Load().Load
	// What is due before half of the time to the next look has passed is due now.
	now = now.Add(c.Interval / 2)
	load = !now.Before(s.loadDueLocked(c, own, now))
	pause := min(scrapeEvery<<min(s.failures, 10), scrapeRarely)
	if load {
		pause = pause * 3 / 4 // they are on one page, mostly
	}
	return !now.Before(s.at.Add(pause)), load
}

func jitter(d time.Duration) time.Duration {
	return d - d/10 + rand.N(d/5+1)
}

// look reads all the pages of a server one of whose members is up, or of which m,
// which is not up yet, is one, and does what follows from them. When another
// look has just ended, it stands for this one.
func (f *fleet) look(ctx context.Context, s *server, m *member) { f.visit(ctx, s, m, true) }

// visit is look for all pages, or for what tells of the load.
func (f *fleet) visit(ctx context.Context, s *server, m *member, all bool) {
	asked := time.Now()
	s.busy.Lock()
	defer s.busy.Unlock()
	f.mu.Lock()
	for _, other := range f.members {
		if m == nil && other.server == s && other.takesRequests() {
			m = other
		}
	}
	if m == nil || s.at.After(asked) {
		f.mu.Unlock()
		return
	}
	key, engine, d := m.key, m.cfg.Engine, s.description
	if engine == "" && m.cfg.VRAM > 0 {
		engine = "ollama" // no other engine tells how much is in use
	}
	fresh := !s.described.IsZero() && asked.Sub(s.described) < describeEvery && m.takesRequests()
	cfg := f.cfg.Load().Load
	asked = time.Now()
	list := f.watchedLocked(s, asked)
	f.mu.Unlock()
	replicas := make([]*proxy.Replica, len(list))
	for i := range list {
		replicas[i] = list[i].replica
	}
	s.replicas.Store(&replicas)

	limit := cfg.Timeout
	if all {
		limit = max(limit, scrapeTime)
	}
	r, err := reading{}, error(nil)
	read := false
	metrics := func() (reading, error) {
		if !read {
			read = true
			ctx, cancel := context.WithTimeout(ctx, limit)
			defer cancel()
			r, err = f.readPages(ctx, m, key, engine)
		}
		return r, err
	}
	load, page, loadErr := f.askLoad(ctx, s, m, list, key, engine, metrics)
	told := time.Now()
	busy := false
	if loadErr == nil {
		busy, loadErr = publishLoad(list, &load, asked, told, page, cfg.MaxAge)
	}
	if all {
		r, err = metrics()
	}
	described := false
	if all && !fresh && (err == nil || errors.Is(err, errUnpaged)) {
		ctx, cancel := context.WithTimeout(ctx, scrapeTime)
		defer cancel()
		if found, told := f.describe(ctx, m, key, &r, engine); told {
			d, described = found, true
		}
	}
	if ctx.Err() == context.Canceled {
		return
	}
	d.add(&r)
	if r.engine != "" {
		err = nil
	}
	if described && s.load.engine == "" {
		s.load.engine = r.engine
	}

	f.mu.Lock()
	defer f.mu.Unlock()
	f.loadToldLocked(s, list, page, busy, load.uncounted, loadErr, asked, told)
	if !all {
		return
	}
	s.at = time.Now()
	if described {
		s.description, s.described = d, s.at
	}
	s.why = ""
	if err != nil {
		s.why = err.Error()
		s.failures++
		return
	}
	s.failures = 0
	f.toldLocked(s, &r)
}

// pageBuffer is the memory for one page. Engines are asked at different times, so
// that there are few.
type pageBuffer struct {
	body   bytes.Buffer
	points []point
}

var pageBuffers = sync.Pool{New: func() any { return new(pageBuffer) }}

// keepPage is the size of the largest page whose memory is kept for others.
const keepPage = 1 << 20

func (b *pageBuffer) give() {
	if b.body.Cap() <= keepPage {
		clear(b.points) // they point into the page
		pageBuffers.Put(b)
	}
}

// readPages reads what changes while an engine runs.
func (f *fleet) readPages(ctx context.Context, m *member, key, engine string) (r reading, err error) {
	if engine == "ollama" {
		return r, errUnpaged
	}
	b := pageBuffers.Get().(*pageBuffer)
	defer b.give()
	header, err := f.readPage(ctx, &b.body, m, key, "/metrics")
	if err != nil {
		return r, err
	}
	b.points = appendPoints(b.points[:0], b.body.Bytes())
	r = readMetrics(b.points)
	if r.engine == "llamacpp" && r.started == 0 {
		// A number that stands for the process, if not for a time.
		if v, err := strconv.ParseFloat(header.Get("Process-Start-Time-Unix"), 64); err == nil && finite(v) {
			r.started = v
		}
	}
	if r.engine == "" {
		// Somebody else's, or none was asked for yet.
		return r, fmt.Errorf("GET /metrics: nothing of an engine that is known; %w, %w", errUnreadable, errUnpaged)
	}
	return r, nil
}

// describe asks an engine for the page on which it tells what its metrics do
// not. told is false when none was read and it may be asked again.
func (f *fleet) describe(ctx context.Context, m *member, key string, r *reading, engine string) (d description, told bool) {
	if r.engine != "" {
		engine = r.engine
	}
	told = true
	var body bytes.Buffer
	for _, page := range describers {
		if engine != "" && engine != page.engine {
			continue
		}
		body.Reset()
		if _, err := f.readPage(ctx, &body, m, key, page.page); err != nil {
			told = told && errors.Is(err, errUnpaged)
			continue
		}
		if d, ok := page.read(body.Bytes()); ok {
			return d, true
		}
	}
	return description{}, told
}

// readPage reads a page into body.
func (f *fleet) readPage(ctx context.Context, body *bytes.Buffer, m *member, key, page string) (http.Header, error) {
	resp, err := f.get(ctx, m, key, page)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	switch {
	case resp.StatusCode == http.StatusOK:
	case resp.StatusCode == http.StatusTooManyRequests, resp.StatusCode >= 500 && resp.StatusCode != http.StatusNotImplemented:
		return nil, fmt.Errorf("GET %s: status %d; %w", page, resp.StatusCode, errNotNow)
	default:
		return nil, fmt.Errorf("GET %s: status %d; %w", page, resp.StatusCode, errUnpaged)
	}
	body.Reset()
	if _, err := body.ReadFrom(io.LimitReader(resp.Body, maxScrape)); err != nil {
		return nil, fmt.Errorf("GET %s: %w", page, plainError(err))
	}
	if body.Len() == maxScrape {
		return nil, fmt.Errorf("GET %s: it has %v or more; %w", page, Bytes(maxScrape), errUnreadable)
	}
	return resp.Header, nil
}

// toldLocked does what follows from what an engine's pages tell now.
func (f *fleet) toldLocked(s *server, r *reading) {
	restarted, all, why := s.life.next(r)
	if s.life.shared != s.shared {
		if s.shared = s.life.shared; s.shared {
			f.log.Warn("several processes answer at one URL in turns; give each a URL of its own: what one of them has in its cache is unknown",
				"replica", s.id, "url", s.url)
		}
	}
	changed := false
	for _, m := range f.membersOfLocked(s) {
		if all || m.rank < 0 && len(restarted) > 0 || slices.Contains(restarted, m.rank) {
			changed = changed || m.cache.published > 0
			f.restartedLocked(m, why)
		}
	}
	if n := len(r.ranks); n > 0 {
		f.ranksToldLocked(s, n)
	}
	for _, m := range f.membersOfLocked(s) {
		i := max(m.rank, 0)
		if i >= len(r.ranks) {
			continue
		}
		k := &r.ranks[i]
		now := engineCache{engine: r.engine, block: k.block, blocks: k.blocks, uncached: k.uncached, sequences: k.sequences}
		if m.rank < 0 && len(r.ranks) > 1 {
			now.blocks *= len(r.ranks) // the configuration takes them for one
		}
		was := &m.cache
		if was.engine == now.engine && was.block == now.block && was.blocks == now.blocks && was.uncached == now.uncached && was.sequences == now.sequences {
			continue
		}
		was.engine, was.block, was.blocks, was.uncached, was.sequences = now.engine, now.block, now.blocks, now.uncached, now.sequences
		m.replica.SetAllChats(m.allChats())
		changed = true
		f.log.Debug("replica's KV cache", "replica", m.id, "engine", now.engine, "block_size", now.block, "blocks", now.blocks, "prefix_caching", !now.uncached, "sequences", now.sequences)
	}
	if changed {
		f.publishLocked()
	}
	for _, m := range f.membersOfLocked(s) {
		if m.cache.joined {
			f.restoreLocked(m)
		}
	}
}

// ranksToldLocked makes the members of a server those ranks that it is said to
// have, where the configuration does not say how many.
func (f *fleet) ranksToldLocked(s *server, n int) {
	if n = min(n, mostRanks); n == s.ranks {
		return
	}
	one := max(n, s.ranks) < 2 // as was supposed; most engines tell that when they join
	if s.ranks = n; n > 1 {
		f.log.Info("the engine has several data-parallel ranks; each is a replica of its own", "replica", s.id, "url", s.url, "ranks", n)
	}
	for _, w := range f.wanted {
		if w.ID == s.id && w.URL == s.url && w.DataParallel > 0 && w.DataParallel != n {
			f.log.Warn("data_parallel is not what the engine tells; requests for ranks that it does not have fail there",
				"replica", s.id, "url", s.url, "configured", w.DataParallel, "told", n)
		}
	}
	if one {
		return
	}
	if err := f.applyLocked(f.wanted); err != nil {
		f.log.Warn("not every rank of an engine can be a replica", "replica", s.id, "why", err)
	}
}

// learnRanks tells how many data-parallel ranks publish the events of a member's
// engine. Where its other pages tell how many there are, they are believed.
func (f *fleet) learnRanks(m *member, n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if m.gone.IsZero() && n > 0 && len(m.server.life.ranks) == 0 {
		f.ranksToldLocked(m.server, n)
	}
}

// learnBlock tells how many tokens the blocks have that a member's engine tells
// of by events, which no other number outweighs. What its slot holds under
// another is forgotten.
func (f *fleet) learnBlock(m *member, tokens int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if m.gone.IsZero() && tokens > 0 && tokens <= mostBlockTokens && m.cache.published != tokens {
		m.cache.published = tokens
		f.publishLocked()
	}
}

// membersOfLocked are the members of a server, those that are leaving included.
func (f *fleet) membersOfLocked(s *server) (list []*member) {
	for _, m := range f.members {
		if m.server == s {
			list = append(list, m)
		}
	}
	for _, m := range f.leaving {
		if m.server == s {
			list = append(list, m)
		}
	}
	return list
}

// restartedLocked forgets what a member's engine had in its cache, and how large
// its blocks were: it may have been started with others. The caller publishes the
// fleet.
func (f *fleet) restartedLocked(m *member, why string) {
	m.restarts++
	m.cache.published = 0
	f.log.Info("the engine has restarted; what it had in its cache is forgotten", "replica", m.id, "url", m.url, "why", why)
	m.subscriber.anew(func() *kvevent.Cursor {
		f.index.Forget(m.replica.Slot)
		return nil
	})
	f.states.contradict(m.replica.Slot, "")
}

// cameUpLocked tells that a member is up. One that tells nothing of its process
// and was down for long is taken to have restarted; of the others their counts
// tell.
func (f *fleet) cameUpLocked(m *member, now time.Time) {
	away := m.wentDown
	m.wentDown = time.Time{}
	if away.IsZero() || now.Sub(away) < longOutage {
		return
	}
	if !m.server.life.tells() {
		f.restartedLocked(m, fmt.Sprintf("it was down for %v and tells nothing of its process", now.Sub(away).Round(time.Second)))
	}
}
