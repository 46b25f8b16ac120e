package agent

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/inferrail/inferrail/proxy"
	"github.com/inferrail/inferrail/proxy/prompt"
)

// tallyKey names the responses of one replica to prompts that one model followed.
type tallyKey struct {
	model *prompt.Model
	slot  int
}

// tally counts those responses. Requests add to it without a lock.
type tally struct {
	compared atomic.Uint64
	differed atomic.Uint64
	sampled  atomic.Uint64
}

// checkKey is a kind of comparison and what came out, as metrics name them.
type checkKey struct{ source, result string }

const (
	fromProbe  = "probe"
	fromSample = "sample"
	fromUsage  = "usage"

	resultAgree    = "agree"
	resultDisagree = "disagree"
	resultFailed   = "failed"
)

// Counted implements proxy.PromptChecks. While engines agree it is one addition.
func (p *prompts) Counted(m *proxy.Model, r *proxy.Replica, ours, theirs int, requestID []byte) {
	t := p.tally(m.Prompts, r.Slot)
	if t == nil {
		return
	}
	place := t.compared.Add(1)
	if ours == theirs {
		return
	}
	t.differed.Add(1)
	what := fmt.Sprintf("replica %s counted %d prompt tokens where %d were expected (request %s)", r.ID, theirs, ours, requestID)
	p.mu.Lock()
	defer p.mu.Unlock()
	if e := p.byModel[m.Prompts]; e != nil {
		e.disagreed = lastSeen{time.Now(), what}
		e.trust.counted(r.Slot, place, what)
		p.judgeLocked(e)
	}
}

// tally returns the tally of a model that is followed; nil when it is followed no
// more.
func (p *prompts) tally(m *prompt.Model, slot int) *tally {
	key := tallyKey{m, slot}
	if t := (*p.tallies.Load())[key]; t != nil || m == nil {
		return t
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	old := *p.tallies.Load()
	if t := old[key]; t != nil || p.byModel[m] == nil || p.checkers[slot] == nil {
		return t
	}
	tallies := maps.Clone(old)
	t := new(tally)
	tallies[key] = t
	p.tallies.Store(&tallies)
	return t
}

// dropTalliesLocked takes tallies away. What is added to them at this moment is
// lost to the metric.
func (p *prompts) dropTalliesLocked(which func(tallyKey) bool) {
	tallies := maps.Clone(*p.tallies.Load())
	for key, t := range tallies {
		if which(key) {
			compared, differed := t.compared.Load(), t.differed.Load()
			p.past[checkKey{fromUsage, resultDisagree}] += differed
			p.past[checkKey{fromUsage, resultAgree}] += compared - min(differed, compared)
			delete(tallies, key)
		}
	}
	p.tallies.Store(&tallies)
}

// judgeLocked does what follows when the verdict has changed.
func (p *prompts) judgeLocked(e *followedModel) {
	verdict := e.trust.verdict()
	if verdict == e.verdict {
		return
	}
	was := e.verdict
	e.verdict = verdict
	if e.model != nil {
		e.model.Demote(verdict)
	}
	switch {
	case was == "":
		p.log.Warn("prompts are approximate from now on: an engine has other tokens; start it anew or change the model's settings when the cause is known",
			"model", e.name, "why", verdict)
	case verdict == "":
		p.log.Info("prompts are followed again: the engines agree", "model", e.name)
	}
}

// sample is one request that an engine has taken, to be looked at.
type sample struct {
	model *prompt.Model
	name  string // that the engine knows the model by
	kind  prompt.Kind
	body  []byte
	ids   []uint32 // that were followed
}

// Sampled implements proxy.PromptChecks. It does not wait: a sample is dropped
// when the replica's checker is busy.
func (p *prompts) Sampled(m *proxy.Model, r *proxy.Replica, kind prompt.Kind, body []byte, ids []uint32) {
	p.mu.Lock()
	c := p.checkers[r.Slot]
	if c == nil || len(body) > maxSample || len(c.samples) == cap(c.samples) {
		p.dropped++
		p.mu.Unlock()
		return
	}
	p.mu.Unlock()
	s := sample{m.Prompts, m.Name, kind, slices.Clone(body), slices.Clone(ids)}
	select {
	case c.samples <- s:
	default: // another was quicker
		p.mu.Lock()
		p.dropped++
		p.mu.Unlock()
	}
}

// checker compares what is followed with what one replica makes of it: with
// probes when the replica has joined or come back, or a model was loaded, and
// with samples of what it was sent. It does one thing at a time, on a goroutine
// of its own (fleet.checkPrompts), from when the member is made until it is
// released.
type checker struct {
	poked   chan struct{} // asks whether probes are due; holds one
	samples chan sample   // holds one
}

// poke asks whether probes are due. It never blocks.
func (c *checker) poke() {
	select {
	case c.poked <- struct{}{}:
	default:
	}
}

// join makes the checker of a replica.
func (p *prompts) join(slot int) *checker {
	c := &checker{poked: make(chan struct{}, 1), samples: make(chan sample, 1)}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.checkers[slot] = c
	return c
}

// leave takes a replica that gets no more requests out of what is judged. What
// its engine was accused of goes with it; should it come back, it is probed.
func (p *prompts) leave(slot int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.acquitLocked(slot)
}

// release forgets a replica that has left, of which the last request is over.
func (p *prompts) release(slot int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.checkers, slot)
	p.dropTalliesLocked(func(k tallyKey) bool { return k.slot == slot })
	p.acquitLocked(slot)
}

func (p *prompts) acquitLocked(slot int) {
	for _, e := range p.followed {
		delete(e.probes, slot)
		e.trust.left(slot)
		p.judgeLocked(e)
	}
}

// checkPrompts is the goroutine of a member's checker. ctx ends when the member
// is released.
func (f *fleet) checkPrompts(ctx context.Context, m *member) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	var o *oracle
	for {
		select {
		case <-ctx.Done():
			return
		case s := <-m.checker.samples:
			if o != nil {
				f.mu.Lock()
				o.key = m.key
				f.mu.Unlock()
			}
			f.prompts.checkSample(ctx, o, m, s)
			continue
		case <-m.checker.poked:
		case <-timer.C:
		}
		var again time.Duration
		o, again = f.probeDue(ctx, m, o)
		timer.Reset(again)
	}
}

// notDue is when a checker looks again that is not poked before.
const notDue = 24 * time.Hour

// probeDue sends the probes that are due, and returns the oracle for samples of
// the same process of the engine, and when to look again.
func (f *fleet) probeDue(ctx context.Context, m *member, o *oracle) (*oracle, time.Duration) {
	f.mu.Lock()
	standing, returns, came, key, engine := m.vitals.standing, m.returns, m.came, m.key, m.cfg.Engine
	here := m.gone.IsZero()
	var names []string
	for _, c := range m.models {
		if c.Parent == "" { // what an adapter has is its parent's
			names = append(names, c.ID)
		}
	}
	f.mu.Unlock()
	if !here || standing != up && standing != ejected {
		return nil, notDue
	}
	if o == nil || o.returns != returns || o.engine != engine {
		o = &oracle{client: f.client, replica: m.replica, engine: engine, returns: returns}
	}
	o.key = key
	wait := notDue
	seen := map[*followedModel]bool{}
	for _, name := range names {
		e := f.prompts.of(name)
		if e == nil || seen[e] {
			continue
		}
		seen[e] = true
		wait = min(wait, f.prompts.probe(ctx, o, m, e, name, came))
		if ctx.Err() != nil {
			break
		}
	}
	return o, wait
}

// of returns what a model of the snapshot published last is followed by.
func (p *prompts) of(name string) *followedModel {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.byName[name]
}

// Probes that failed are sent again after a time that doubles from retryProbes
// to retryProbesMost.
const retryProbes, retryProbesMost = time.Second, 5 * time.Minute

// probe sends a replica's probes of one model if they are due, and returns in
// what time they may be.
func (p *prompts) probe(ctx context.Context, o *oracle, m *member, e *followedModel, name string, came time.Time) time.Duration {
	slot := m.replica.Slot
	p.mu.Lock()
	model, generation := e.model, e.generation
	before := e.probes[slot]
	if p.followed[e.settings] != e || p.checkers[slot] != m.checker {
		p.mu.Unlock()
		return notDue
	}
	if model == nil {
		// What was not there may have come with the engine.
		if !e.tried.IsZero() && e.tried.Before(came) {
			p.enqueueLocked(e)
		}
		p.mu.Unlock()
		return notDue
	}
	fresh := before.outcome == unasked || before.returns != o.returns || before.generation != generation
	if !fresh {
		if before.outcome != failed {
			p.mu.Unlock()
			return notDue
		}
		if left := time.Until(before.at.Add(probePause(before.failures))); left > 0 {
			p.mu.Unlock()
			return left
		}
	}
	tried := e.tried
	p.mu.Unlock()

	c := o.probeAll(ctx, p.verifier(model), name)
	if c.outcome == differs && tried.Before(came) && ctx.Err() == nil {
		// The engine is younger than what was loaded: its files may be others.
		began := time.Now()
		if other, from, err := p.find(&e.settings); err == nil {
			c2 := o.probeAll(ctx, p.verifier(other), name)
			if c2.outcome == agrees && p.found(e, other, from, nil, began) {
				c, generation = c2, generation+1
			} else {
				p.mu.Lock()
				e.tried = began // not again for each replica
				p.mu.Unlock()
			}
		}
	}
	if ctx.Err() != nil {
		return notDue
	}
	return p.probed(o, m, e, generation, c)
}

func (p *prompts) verifier(m *prompt.Model) verifier {
	return func(into *prompt.Prompt, kind prompt.Kind, body []byte, now time.Time) {
		p.verify(m, into, kind, body, now)
	}
}

func probePause(failures int) time.Duration {
	return min(retryProbes<<min(failures-1, 20), retryProbesMost)
}

// probed notes what has become of a replica's probes.
func (p *prompts) probed(o *oracle, m *member, e *followedModel, generation int, c comparison) time.Duration {
	slot, now := m.replica.Slot, time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.followed[e.settings] != e || p.checkers[slot] != m.checker {
		return notDue
	}
	if e.generation != generation {
		return 0 // another model was loaded meanwhile
	}
	before := e.probes[slot]
	record := probed{m.id, generation, o.returns, now, c, 0}
	wait := notDue
	switch c.outcome {
	case agrees:
		p.past[checkKey{fromProbe, resultAgree}]++
	case differs:
		p.past[checkKey{fromProbe, resultDisagree}]++
		c.what = "replica " + m.id + " has other tokens: " + c.what
		e.disagreed = lastSeen{now, c.what}
	case failed:
		p.past[checkKey{fromProbe, resultFailed}]++
		record.failures = 1
		if before.outcome == failed && before.returns == o.returns && before.generation == generation {
			record.failures += before.failures
		}
		wait = probePause(record.failures)
	}
	e.probes[slot] = record
	e.trust.probed(slot, c.outcome, c.what)
	p.judgeLocked(e)
	if before.outcome != c.outcome || before.what != record.what {
		p.log.Debug("prompts are probed", "model", e.name, "replica", m.id, "result", c.outcome.String(), "via", c.way, "what", c.what)
	}
	return wait
}

// checkSample compares a request that the replica was sent. o is nil while the
// replica is away.
func (p *prompts) checkSample(ctx context.Context, o *oracle, m *member, s sample) {
	if o == nil {
		p.mu.Lock()
		p.dropped++
		p.mu.Unlock()
		return
	}
	verify := p.verifier(s.model)
	given := false
	c := o.compare(ctx, func(into *prompt.Prompt, kind prompt.Kind, body []byte, now time.Time) {
		if kind == s.kind && !given {
			// What the request was routed by. If that differs it is followed anew.
			given = true
			*into = prompt.Prompt{IDs: s.ids}
			return
		}
		verify(into, kind, body, now)
	}, request{kind: s.kind, body: s.body, private: true}, s.name)
	if ctx.Err() != nil {
		return
	}
	t := p.tally(s.model, m.replica.Slot)
	p.mu.Lock()
	defer p.mu.Unlock()
	e := p.byModel[s.model]
	if e == nil || t == nil {
		return
	}
	switch c.outcome {
	case agrees:
		p.past[checkKey{fromSample, resultAgree}]++
		t.sampled.Add(1)
	case differs:
		p.past[checkKey{fromSample, resultDisagree}]++
		what := "replica " + m.id + " has other tokens for a request it was sent: " + c.what
		e.disagreed = lastSeen{time.Now(), what}
		e.trust.sampled(m.replica.Slot, t.sampled.Add(1), what)
		p.judgeLocked(e)
	case failed:
		p.past[checkKey{fromSample, resultFailed}]++
	}
}

var (
	promptDemotedDesc = prometheus.NewDesc("inferrail_prompt_demoted",
		"1 when the model's prompts are approximate because an engine has other tokens than were expected.", []string{"model"}, nil)
	promptChecksDesc = prometheus.NewDesc("inferrail_prompt_checks_total",
		"Comparisons of prompts with what an engine makes of them, by what was compared and what came out.", []string{"source", "result"}, nil)
	promptWorkersDesc = prometheus.NewDesc("inferrail_prompt_workers_busy",
		"Workers that read a large prompt now.", nil, nil)
	promptQueueDesc = prometheus.NewDesc("inferrail_prompt_queue",
		"Large prompts that wait for a worker.", nil, nil)
	cacheBytesDesc = prometheus.NewDesc("inferrail_prompt_cache_bytes",
		"Memory that the tokens of texts seen before have taken.", nil, nil)
	cacheEntriesDesc = prometheus.NewDesc("inferrail_prompt_cache_entries",
		"Texts of which the tokens are kept.", nil, nil)
	cacheLookupsDesc = prometheus.NewDesc("inferrail_prompt_cache_lookups_total",
		"Texts that were looked for among those seen before.", []string{"result"}, nil)
	cacheEvictionsDesc = prometheus.NewDesc("inferrail_prompt_cache_evictions_total",
		"Texts that made room for others.", nil, nil)
	promptDroppedDesc = prometheus.NewDesc("inferrail_prompt_samples_dropped_total",
		"Requests that were to be compared and were not: one before was still being compared, or they were too large.", nil, nil)
)

// Describe implements prometheus.Collector.
func (p *prompts) Describe(ch chan<- *prometheus.Desc) {
	ch <- promptDemotedDesc
	ch <- promptChecksDesc
	ch <- promptDroppedDesc
	ch <- promptWorkersDesc
	ch <- promptQueueDesc
	ch <- cacheBytesDesc
	ch <- cacheEntriesDesc
	ch <- cacheLookupsDesc
	ch <- cacheEvictionsDesc
}

// Collect implements prometheus.Collector. A model that is not followed has no
// series.
func (p *prompts) Collect(ch chan<- prometheus.Metric) {
	value := func(desc *prometheus.Desc, kind prometheus.ValueType, n int64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(desc, kind, float64(n), labels...)
	}
	pool, cache := p.pool.Stats(), p.cache.Stats()
	value(promptWorkersDesc, prometheus.GaugeValue, int64(pool.Busy))
	value(promptQueueDesc, prometheus.GaugeValue, int64(pool.Queued))
	value(cacheBytesDesc, prometheus.GaugeValue, cache.Bytes)
	value(cacheEntriesDesc, prometheus.GaugeValue, cache.Entries)
	value(cacheLookupsDesc, prometheus.CounterValue, cache.Hits, "hit")
	value(cacheLookupsDesc, prometheus.CounterValue, cache.Misses, "miss")
	value(cacheEvictionsDesc, prometheus.CounterValue, cache.Evictions)
	p.mu.Lock()
	defer p.mu.Unlock()
	demoted := map[string]float64{}
	for _, e := range p.followed {
		if e.model == nil {
			continue
		}
		demoted[e.name] += 0
		if e.verdict != "" {
			demoted[e.name] = 1
		}
	}
	for name, value := range demoted {
		ch <- prometheus.MustNewConstMetric(promptDemotedDesc, prometheus.GaugeValue, value, name)
	}
	counts := maps.Clone(p.past)
	for _, t := range *p.tallies.Load() {
		compared, differed := t.compared.Load(), t.differed.Load()
		counts[checkKey{fromUsage, resultDisagree}] += differed
		counts[checkKey{fromUsage, resultAgree}] += compared - min(differed, compared)
	}
	for _, source := range []string{fromProbe, fromSample, fromUsage} {
		for _, result := range []string{resultAgree, resultDisagree, resultFailed} {
			if source == fromUsage && result == resultFailed {
				continue // there is no such thing
			}
			ch <- prometheus.MustNewConstMetric(promptChecksDesc, prometheus.CounterValue, float64(counts[checkKey{source, result}]), source, result)
		}
	}
	ch <- prometheus.MustNewConstMetric(promptDroppedDesc, prometheus.CounterValue, float64(p.dropped))
}
