package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/inferrail/inferrail/policy"
)

const (
	// An engine that is idle, and is sent nothing by this agent, is asked for its
	// load at this pace, or before three quarters of LoadConfig.MaxAge are over. It
	// is idle after idleAfter without anything.
	loadIdle  = time.Second
	idleAfter = 5 * time.Second
	// loadPart is which part of its time an engine may be asked for its load: its
	// page takes vLLM's front end, which has one processor for all it does, some 6
	// ms for each rank.
	loadPart = 10
	// A report that fails is tried again later each time, up to loadRetry. An
	// engine that has no page for it is asked when it is for all of its pages, and
	// after loadProbe while the agent has requests there: some have none before
	// their first request.
	loadRetry = 5 * time.Second
	loadProbe = 10 * time.Second
	// A page that is the second choice is used for loadChoice before the first one
	// is tried again.
	loadChoice = time.Minute
	// mostRequests is more than any engine has at one time.
	mostRequests = 1 << 20
	// mostVRAM is more than all of a node's GPUs have.
	mostVRAM = 1 << 50
	// mostLoads is more bytes than the loads of mostRanks have: what a page of empty
	// ones would become takes twenty times its size.
	mostLoads = 1 << 20
	// mostShare is what shares that are rounded come to.
	mostShare = 1.01
)

// loadOutcome is what has become of a look at an engine's load.
type loadOutcome int

const (
	reportOK loadOutcome = iota
	// reportUnreadable: the page lacks what it should have, or is nonsense. The
	// engine is not taken to be idle.
	reportUnreadable
	reportTimeout
	// reportRefused: no connection, or it broke, or the engine said not now.
	reportRefused
	// reportAbsent: there is no page that tells it.
	reportAbsent
	loadOutcomes
)

var loadOutcomeNames = [loadOutcomes]string{"ok", "unreadable", "timeout", "refused", "absent"}

func (o loadOutcome) String() string { return loadOutcomeNames[o] }

// errUnreadable: the page is not what it should be.
var errUnreadable = errors.New("unreadable")

// outcomeOf is what an error in reading a page is.
func outcomeOf(err error) loadOutcome {
	errno := syscall.Errno(0)
	switch {
	case err == nil:
		return reportOK
	case errors.Is(err, errUnreadable):
		return reportUnreadable
	case errors.Is(err, errUnpaged):
		return reportAbsent
	case errors.Is(err, errSilent):
		return reportTimeout
	case errors.Is(err, errNotNow), errors.As(err, &errno), errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return reportRefused
	}
	return reportUnreadable
}

// gauge is a number that may not have been told.
type gauge struct {
	told  bool
	value float64
}

func (g *gauge) add(v float64) { g.told, g.value = true, g.value+v }
func (g *gauge) max(v float64) { g.told, g.value = true, max(g.value, v) }

// gauges are what an engine, or a rank of it, has to do now. The zero value tells
// nothing.
type gauges struct {
	running, waiting, usage, hitRate, waitingTokens gauge
	// wrong is the name of what has a value that cannot be.
	wrong      string
	wrongValue float64
}

// read takes a value of a family. Of vLLM those of several models of one rank are
// told apart; of SGLang, several processes of one rank tell the same.
func (g *gauges) read(f family, v float64) {
	most := 1.0 * mostRequests
	if f == vllmUsage || f == sglangUsage || f == sglangHitRate {
		most = mostShare
	}
	if !g.sound(familyName(f), v, most) {
		return
	}
	switch f {
	case vllmRunning:
		g.running.add(v)
	case vllmWaiting:
		g.waiting.add(v)
	case vllmUsage, sglangUsage:
		g.usage.max(min(v, 1))
	case sglangHitRate:
		g.hitRate.max(min(v, 1))
	case sglangRunning, llamaRunning, tgiRunning:
		g.running.max(v)
	case sglangWaiting, llamaWaiting, tgiWaiting:
		g.waiting.max(v)
	}
}

// sound reports whether v can be, and notes that it cannot.
func (g *gauges) sound(name string, v, most float64) bool {
	if v >= 0 && v <= most {
		return true
	}
	g.wrong, g.wrongValue = name, v
	return false
}

// plus adds those of another rank, of n in all.
func (g *gauges) plus(h *gauges, n int) {
	if h.wrong != "" {
		g.wrong, g.wrongValue = h.wrong, h.wrongValue
	}
	sum := func(a *gauge, b gauge, part float64) {
		if b.told {
			a.add(b.value * part)
		}
	}
	sum(&g.running, h.running, 1)
	sum(&g.waiting, h.waiting, 1)
	sum(&g.waitingTokens, h.waitingTokens, 1)
	sum(&g.usage, h.usage, 1/float64(n))
	sum(&g.hitRate, h.hitRate, 1/float64(n))
}

// missing are, by engine, the names of what must be on its page.
var missing = map[string][2]string{
	"vllm":     {"vllm:num_requests_running", "vllm:num_requests_waiting"},
	"sglang":   {"num_running_reqs", "num_queue_reqs or num_waiting_reqs"},
	"llamacpp": {"llamacpp:requests_processing", "llamacpp:requests_deferred"},
	"tgi":      {"tgi_batch_current_size", "tgi_queue_size"},
}

// problem is why the load is not known by these, "" when it is.
func (g *gauges) problem(engine string) string {
	switch {
	case g.wrong != "":
		return fmt.Sprintf("%s is %v", g.wrong, g.wrongValue)
	case !g.running.told:
		return "it lacks " + missing[engine][0]
	case !g.waiting.told:
		return "it lacks " + missing[engine][1]
	}
	return ""
}

// familyName is one of the names that a family has.
func familyName(f family) string {
	longest := ""
	for name, of := range families {
		if of == f && name > longest {
			longest = name // the names of today are behind those of before
		}
	}
	return longest
}

// loadPage is a page that tells of an engine's load. read reports false for what is
// no such page; where it is nil, the page is the engine's metrics.
type loadPage struct {
	page string
	read func(page []byte) (reading, bool)
}

var (
	onMetrics = loadPage{page: "/metrics"}
	// SGLang has the first without being started with --enable-metrics, always up
	// to date; its metrics are those of up to 40 steps ago.
	loadPages = map[string][]loadPage{
		"sglang":   {{"/v1/loads?include=core", readLoads}, onMetrics},
		"llamacpp": {onMetrics, {"/slots", readSlots}},
		"ollama":   {{"/api/ps", readResident}},
	}
	otherPages = []loadPage{onMetrics}
)

func loadPagesOf(engine string) []loadPage {
	if pages := loadPages[engine]; pages != nil {
		return pages
	}
	return otherPages
}

// readLoads reads SGLang's /v1/loads.
func readLoads(page []byte) (reading, bool) {
	var body struct {
		Loads []struct {
			Rank    *float64 `json:"dp_rank"`
			Running *float64 `json:"num_running_reqs"`
			Waiting *float64 `json:"num_waiting_reqs"`
			Tokens  *float64 `json:"num_waiting_uncached_tokens"`
			Usage   *float64 `json:"token_usage"`
			HitRate *float64 `json:"cache_hit_rate"`
		} `json:"loads"`
	}
	if len(page) > mostLoads || json.Unmarshal(page, &body) != nil || body.Loads == nil {
		return reading{}, false
	}
	r := reading{engine: "sglang"}
	for i, l := range body.Loads {
		rank := i
		if l.Rank != nil {
			rank = number(*l.Rank).upTo(mostRanks)
		}
		g := &r.rank([]byte(strconv.Itoa(rank))).gauges
		take := func(to *gauge, name string, v *float64, most float64) {
			if v != nil && g.sound(name, *v, most) {
				*to = gauge{true, *v}
			}
		}
		take(&g.running, "num_running_reqs", l.Running, mostRequests)
		take(&g.waiting, "num_waiting_reqs", l.Waiting, mostRequests)
		take(&g.waitingTokens, "num_waiting_uncached_tokens", l.Tokens, math.MaxInt32)
		take(&g.usage, "token_usage", l.Usage, mostShare)
		take(&g.hitRate, "cache_hit_rate", l.HitRate, mostShare)
	}
	return r, true
}

// readSlots reads llama.cpp's /slots. It does not tell how many wait for a slot;
// with all of them busy, those of this agent do, and who else does is unknown.
func readSlots(page []byte) (reading, bool) {
	var slots []struct {
		Busy  *bool    `json:"is_processing"`
		State *float64 `json:"state"` // of older ones: 0 is idle
	}
	if json.Unmarshal(page, &slots) != nil || len(slots) == 0 {
		return reading{}, false // it has one at least
	}
	r := reading{engine: "llamacpp"}
	for _, s := range slots {
		switch {
		case s.Busy != nil && *s.Busy, s.Busy == nil && s.State != nil && *s.State != 0:
			r.gauges.running.add(1)
		case s.Busy == nil && s.State == nil:
			return reading{}, false
		}
	}
	r.gauges.running.add(0)
	r.gauges.waiting.add(0)
	return r, true
}

// readResident reads Ollama's /api/ps: what is in memory, not what there is to do.
func readResident(page []byte) (reading, bool) {
	var body struct {
		Models []struct {
			VRAM *float64 `json:"size_vram"`
		} `json:"models"`
	}
	if json.Unmarshal(page, &body) != nil || body.Models == nil {
		return reading{}, false
	}
	r := reading{engine: "ollama", uncounted: true}
	for _, m := range body.Models {
		if m.VRAM == nil || *m.VRAM < 0 {
			return reading{}, false
		}
		r.resident += min(*m.VRAM, mostVRAM)
	}
	return r, true
}

// loadProblem is why r tells of no load at all, "" when it does of some rank.
func (r *reading) loadProblem() (why string) {
	if r.uncounted {
		return ""
	}
	if len(r.ranks) == 0 || r.gauges.running.told {
		return r.gauges.problem(r.engine)
	}
	for i := range r.ranks {
		if why = r.ranks[i].gauges.problem(r.engine); why == "" {
			break
		}
	}
	return why
}

// gaugesOf returns what is told of a rank, of several that the server has, or of
// the whole engine when rank is below 0; and what it has counted.
func (r *reading) gaugesOf(rank, ranks int) (g gauges, c counts, why string) {
	switch {
	case len(r.ranks) == 0 || r.gauges.running.told:
		if rank > 0 {
			return g, c, fmt.Sprintf("it tells nothing of rank %d", rank)
		}
		g, c = r.gauges, r.counts
	case rank < 0:
		for i := range r.ranks {
			if p := r.ranks[i].gauges.problem(r.engine); p != "" && why == "" {
				why = p
			}
			g.plus(&r.ranks[i].gauges, len(r.ranks))
			for f := range counters {
				if k := &r.ranks[i].counts; k.known[f] {
					c.add(f+firstCounter, k.value[f])
				}
			}
		}
	default:
		i := 0
		for label := strconv.Itoa(rank); i < len(r.ranks) && r.ranks[i].label != label; i++ {
		}
		if i == len(r.ranks) {
			// Engines that share one model's ranks need not count from zero.
			if i = rank; len(r.ranks) != ranks || rank >= ranks {
				return g, c, fmt.Sprintf("it tells nothing of rank %d", rank)
			}
		}
		g, c = r.ranks[i].gauges, r.ranks[i].counts
	}
	if !r.uncounted && why == "" {
		why = g.problem(r.engine)
	}
	return g, c, why
}

// tellsHits reports that they have what a hit rate is made of.
func (c *counts) tellsHits() bool {
	return c.known[vllmHits-firstCounter] && c.known[vllmQueries-firstCounter]
}

// nextRate takes the counts of now, and returns the hit rate; without counts it stays.
func nextRate(h *policy.HitRate, c *counts, now time.Time) float64 {
	if !c.tellsHits() {
		return h.Rate()
	}
	return h.Next(c.value[vllmHits-firstCounter], c.value[vllmQueries-firstCounter], now)
}

// loadWatch is what is known of how a server tells its load. The zero value is
// before the first report.
type loadWatch struct {
	// What follows is guarded by server.busy.

	engine string    // which one it is, as far as its pages have told
	choice int       // of loadPagesOf(engine)
	chosen time.Time // when it was

	// What follows is guarded by fleet.mu.

	page     string        // that was read last
	at       time.Time     // when it was asked, or has failed to answer
	took     time.Duration // from asking to the answer, lately
	slow     bool          // it tells nothing that changes with each request
	outcome  loadOutcome
	why      string
	failures int         // in a row
	busy     time.Time   // when it, or the agent's traffic to it, was last
	told     loadOutcome // what the log says
}

// watched is a member whose load is being asked for.
type watched struct {
	*member
	rank int
	vram float64 // MB
	own  policy.Own
	why  string // it is not known now
}

// watchedLocked are the members of a server.
func (f *fleet) watchedLocked(s *server, now time.Time) (list []watched) {
	for _, m := range f.membersOfLocked(s) {
		list = append(list, watched{member: m, rank: m.rank, vram: float64(m.cfg.VRAM) / (1 << 20), own: m.replica.Own(now)})
	}
	return list
}

// askLoad asks an engine for its load, on the page that has told it before, or else
// on the first one that does. metrics reads the engine's metrics, or has done so.
// The caller holds s.busy.
func (f *fleet) askLoad(ctx context.Context, s *server, m *member, list []watched, key, engine string, metrics func() (reading, error)) (r reading, page string, err error) {
	if engine == "" {
		engine = s.load.engine
	}
	if engine == "ollama" && !slices.ContainsFunc(list, func(w watched) bool { return w.vram > 0 }) {
		// It would write a line to its log each time.
		return r, "", fmt.Errorf("ollama does not tell how many requests it has; %w", errUnpaged)
	}
	pages := loadPagesOf(engine)
	if now := time.Now(); s.load.choice >= len(pages) || now.Sub(s.load.chosen) >= loadChoice {
		s.load.choice, s.load.chosen = 0, now
	}
	var first error
	for range pages {
		p := pages[s.load.choice]
		if p.read == nil {
			r, err = metrics()
		} else {
			r, err = f.readLoadPage(ctx, m, key, p)
		}
		if err == nil && r.engine != "" {
			s.load.engine = r.engine
		}
		if why := r.loadProblem(); err == nil && why != "" {
			err = fmt.Errorf("GET %s: %s; %w", p.page, why, errUnreadable)
		}
		if o := outcomeOf(err); o != reportAbsent && o != reportUnreadable {
			return r, p.page, err
		}
		if page = p.page; first == nil {
			first = err
		} else {
			first = fmt.Errorf("%w; %w", first, err)
		}
		s.load.choice, s.load.chosen = (s.load.choice+1)%len(pages), time.Now()
	}
	return r, page, first
}

func (f *fleet) readLoadPage(ctx context.Context, m *member, key string, p loadPage) (reading, error) {
	ctx, cancel := context.WithTimeout(ctx, f.cfg.Load().Load.Timeout)
	defer cancel()
	b := pageBuffers.Get().(*pageBuffer)
	defer b.give()
	if _, err := f.readPage(ctx, &b.body, m, key, p.page); err != nil {
		return reading{}, err
	}
	r, ok := p.read(b.body.Bytes())
	if !ok {
		return reading{}, fmt.Errorf("GET %s: it is not what was expected; %w", p.page, errUnreadable)
	}
	return r, nil
}

// publishLoad gives each member of a server what r, which was read on page, tells
// of its load. asked and told are when. It reports whether the engine has
// something to do, and fails when r tells of none of them; of one that it does not
// tell of, list has why. The caller holds the server's busy.
func publishLoad(list []watched, r *reading, asked, told time.Time, page string, maxAge time.Duration) (busy bool, err error) {
	ranks, lacking := 0, 0
	for i := range list {
		if list[i].rank >= 0 {
			ranks++
		}
	}
	for i := range list {
		w := &list[i]
		now := w.replica.Own(told)
		own := policy.While(w.own, now, w.member.own)
		w.member.own = now
		g, c, problem := r.gaugesOf(w.rank, ranks)
		if problem != "" {
			w.why = "GET " + page + ": " + problem
			lacking++
			continue
		}
		l := &policy.Load{
			Asked: asked, Told: told, Until: asked.Add(maxAge),
			Uncounted: r.uncounted,
			Running:   int(g.running.value), Waiting: int(g.waiting.value), WaitingTokens: -1,
			KV: min(g.usage.value, 1), KVTold: g.usage.told,
			Own: own.Requests, OwnWaiting: own.Waiting, OwnTokens: own.Tokens,
		}
		if g.waitingTokens.told {
			l.WaitingTokens = int(g.waitingTokens.value)
		}
		if l.HitsTold = g.hitRate.told || c.tellsHits(); g.hitRate.told {
			l.HitRate = min(g.hitRate.value, 1)
		} else {
			l.HitRate = nextRate(&w.member.hits, &c, told)
		}
		if r.uncounted && w.vram > 0 {
			l.VRAMTotal = w.vram
			l.VRAMFree = max(w.vram-r.resident/(1<<20), 0)
		}
		l.Follow(w.replica.Load())
		w.replica.SetLoad(l)
		busy = busy || l.Running+l.Waiting > 0
	}
	if lacking > 0 && lacking == len(list) {
		return busy, fmt.Errorf("%s; %w", list[0].why, errUnreadable)
	}
	return busy, nil
}

// loadToldLocked notes what has become of a look at a server's load. The caller
// holds its busy too.
func (f *fleet) loadToldLocked(s *server, list []watched, page string, busy, slow bool, err error, asked, told time.Time) {
	w := &s.load
	o := outcomeOf(err)
	why := ""
	if err != nil {
		why = err.Error()
	}
	w.page, w.at = page, asked
	if busy {
		w.busy = told
	}
	if w.outcome, w.why = o, why; o == reportOK {
		w.failures, w.slow = 0, slow
		w.took += (told.Sub(asked) - w.took) / 4
	} else {
		w.at = told
		w.failures++
	}
	known := false
	for i := range list {
		m, is := list[i].member, o
		if o == reportOK && list[i].why != "" {
			is = reportUnreadable
		}
		m.reports[is]++
		if m.loadWhy = list[i].why; o != reportOK {
			m.loadWhy = why
		}
		known = known || m.replica.Load().Fresh(told)
	}
	if o == w.told || o != reportOK && known {
		return
	}
	switch {
	case o == reportOK:
		f.log.Info("the engine tells its load", "replica", s.id, "page", page)
	case s.load.engine == "":
		// It is none of those that do.
	case o == reportAbsent:
		f.log.Info("the engine does not tell its load; of what is sent there the agent's own is all that is known", "replica", s.id, "url", s.url, "why", why)
	default:
		f.log.Warn("the engine's load is not known; of what is sent there the agent's own is all that is known", "replica", s.id, "url", s.url, "outcome", o.String(), "why", why)
	}
	w.told = o
}

// loadDueLocked is when a server is to be asked for its load next. own: the agent
// has requests there.
func (s *server) loadDueLocked(c *LoadConfig, own bool, now time.Time) time.Time {
	w := &s.load
	if own {
		w.busy = now
	}
	pause := c.Interval
	most := c.MaxAge*3/4 - w.took // the next report is there before this one is too old
	switch {
	case w.outcome == reportAbsent:
		if pause = max(loadProbe, pause); !own {
			pause = scrapeRarely
		}
	case w.failures > 0:
		pause = max(min(pause<<min(w.failures, 10), loadRetry), pause)
	case now.Sub(w.busy) >= idleAfter, w.slow:
		pause = max(min(loadIdle, most), pause)
	default:
		pause = max(min(loadPart*w.took, most), pause)
	}
	return w.at.Add(pause)
}
