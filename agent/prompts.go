package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/inferrail/inferrail/proxy"
	"github.com/inferrail/inferrail/proxy/prompt"
	"github.com/inferrail/inferrail/proxy/prompt/tokenizer"
)

// noTokenizer is the ModelConfig.Tokenizer of a model that shall have none.
const noTokenizer = "none"

// defaultBlock is how many tokens a block has in most engines that do not tell.
const defaultBlock = 16

// prompts has what is needed to follow the prompts of the models that are
// served. The fleet makes it with newPrompts and ends it with close; the other
// methods may be called from any goroutine, also with the fleet's lock held. It
// calls the fleet without any lock.
//
// What a model needs is loaded on a goroutine of its own, one model at a time,
// which takes seconds and keeps nobody waiting: until then the model's prompts
// are approximate. It is loaded again when its settings change, and kept as long
// as a model of the same settings is served.
//
// Replicas' answers and checkers tell whether a model is followed as its engines
// do; see trust.
type prompts struct {
	log *slog.Logger
	// pool reads prompts for the proxy, and cache is shared by all models; nil
	// for none.
	pool  *prompt.Pool
	cache *tokenizer.Cache
	// changed tells the fleet that a model is there, or is another one.
	changed func()
	// How models are loaded and followed; tests replace them.
	load   func(prompt.Source) (*prompt.Model, error)
	verify func(*prompt.Model, *prompt.Prompt, prompt.Kind, []byte, time.Time)

	ctx     context.Context // ends with close
	stop    context.CancelFunc
	work    chan struct{}  // asks the loader to look at queue; holds one
	done    sync.WaitGroup // the loader
	loading sync.Mutex     // held while a model is loaded, which takes much memory

	// tallies count, by model and replica, the responses that have told usage.
	// The map is replaced, with mu held, when one is added.
	tallies atomic.Pointer[map[tallyKey]*tally]

	mu sync.Mutex // guards what follows
	// files is what the templates hold that the configuration names.
	files    map[string]contents
	followed map[settings]*followedModel
	byName   map[string]*followedModel // of the snapshot assigned last
	byModel  map[*prompt.Model]*followedModel
	queue    []*followedModel
	checkers map[int]*checker // by slot
	// past counts the comparisons of models and replicas that are gone, and
	// probes and samples.
	past    map[checkKey]uint64
	dropped uint64 // samples for which no checker had time
}

// settings are what a model's prompts are followed by. Models of equal settings
// share what is loaded for them.
type settings struct {
	// name is the model's; of one of an engine that serves the same under several
	// names the first of them, of an adapter that of the model it adapts. Two
	// models of one root and different names may have different templates.
	name string
	// root is where the engine has the model, when no tokenizer is configured.
	root string

	tokenizer, template, contentFormat, hubCache string
	kwargs                                       Object
	held                                         contents // what the template's file holds
}

// followedModel is what is loaded for settings, and what comparisons with
// engines have shown. It is guarded by prompts.mu.
type followedModel struct {
	settings
	// model is nil while it is loaded and when there is none; why is then why.
	model *prompt.Model
	why   string
	from  string // the tokenizer's name that was found
	how   string // the model describes itself, whatever its verdict is
	exact bool
	tried time.Time
	// generation is how many models have been loaded: those before this one have
	// been probed for themselves.
	generation int
	queued     bool
	trust      trust
	verdict    string // trust's, as told to the model
	defective  bool   // a prompt has failed, and that was told
	probes     map[int]probed
	disagreed  lastSeen // the comparison that differed last
}

// lastSeen is something that is shown to people.
type lastSeen struct {
	at   time.Time
	what string
}

// probed is what became of a replica's probes of one model.
type probed struct {
	replica    string
	generation int // of followedModel
	returns    int // of member
	at         time.Time
	comparison
	failures int // in a row
}

func newPrompts(cfg *Config, log *slog.Logger, changed func()) *prompts {
	p := &prompts{
		log: log, changed: changed,
		pool: prompt.NewPool(cfg.Tokenizer.Workers, cfg.Tokenizer.MaxWait),
		load: prompt.Load,
		verify: func(m *prompt.Model, p *prompt.Prompt, kind prompt.Kind, body []byte, now time.Time) {
			m.Verify(p, kind, body, now)
			runtime.KeepAlive(m) // see closeLater
		},
		work:     make(chan struct{}, 1),
		followed: map[settings]*followedModel{},
		byName:   map[string]*followedModel{},
		byModel:  map[*prompt.Model]*followedModel{},
		checkers: map[int]*checker{},
		past:     map[checkKey]uint64{},
	}
	if n := cfg.Tokenizer.CacheBytes; n > 0 {
		p.cache = tokenizer.NewCache(int64(n))
	}
	p.ctx, p.stop = context.WithCancel(context.Background())
	p.tallies.Store(&map[tallyKey]*tally{})
	p.done.Go(p.loadQueued)
	return p
}

// close ends the loading. The proxy has been shut down.
func (p *prompts) close() {
	p.stop()
	p.pool.Close()
	p.done.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, e := range p.followed {
		p.forgetLocked(e)
	}
}

// configure looks at the files that cfg names. The snapshot that is assigned
// next is by what they hold now.
func (p *prompts) configure(cfg *Config) {
	files := map[string]contents{}
	for _, m := range cfg.Models {
		if m.ChatTemplate != "" {
			files[m.ChatTemplate] = contentsOf(m.ChatTemplate)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.files = files
}

// assign gives the models of a snapshot that is about to be published what
// follows their prompts, as far as it is there, and has the rest loaded. first
// maps the names under which an engine serves the same model to one of them.
func (p *prompts) assign(cfg *Config, s *proxy.Fleet, first map[string]string) {
	configured := make(map[string]*ModelConfig, len(cfg.Models))
	for i := range cfg.Models {
		configured[cfg.Models[i].Name] = &cfg.Models[i]
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.byName = make(map[string]*followedModel, len(s.Models))
	wanted := map[*followedModel]bool{}
	for name, model := range s.Models {
		if name != model.Name {
			continue // an alias
		}
		key, ok := p.settingsLocked(cfg, s, model, configured, first)
		model.BlockSize = defaultBlock
		if mc := configured[name]; mc != nil && mc.BlockSize > 0 {
			model.BlockSize = mc.BlockSize
		}
		if !ok {
			continue
		}
		e := p.followed[key]
		if e == nil {
			e = &followedModel{settings: key, why: "it is being loaded", probes: map[int]probed{}}
			p.followed[key] = e
			p.enqueueLocked(e)
		}
		wanted[e] = true
		p.byName[name] = e
		model.Prompts = e.model
	}
	for _, e := range p.followed {
		if !wanted[e] {
			p.forgetLocked(e)
		}
	}
}

// settingsLocked returns by what a model is followed; ok is false when it has no
// tokenizer by its configuration.
func (p *prompts) settingsLocked(cfg *Config, s *proxy.Fleet, model *proxy.Model, configured map[string]*ModelConfig, first map[string]string) (_ settings, ok bool) {
	name, root := model.Name, model.Root
	mc := configured[name]
	if mc == nil || !mc.followsItself() {
		switch other := first[name]; {
		case model.Parent != "":
			// An adapter's own root is where the adapter is.
			name, root = model.Parent, ""
			if parent := s.Models[name]; parent != nil {
				root = parent.Root
				if f := first[name]; f != "" {
					name = f
				}
			}
		case other != "":
			name = other
		}
		mc = configured[name]
	}
	key := settings{name: name, hubCache: cfg.Tokenizer.HubCache}
	if mc != nil {
		if mc.Tokenizer == noTokenizer && mc.ChatTemplate == "" {
			return key, false
		}
		key.tokenizer, key.template, key.kwargs = mc.Tokenizer, mc.ChatTemplate, mc.TemplateKwargs
		key.contentFormat = strings.TrimPrefix(mc.ContentFormat, "auto")
		key.held = p.files[mc.ChatTemplate]
	}
	if key.tokenizer == "" {
		key.root = root
	}
	return key, true
}

// followsItself reports that the entry says how the model's prompts are followed.
func (m *ModelConfig) followsItself() bool {
	return m.Tokenizer != "" || m.ChatTemplate != "" || m.ContentFormat != "" || m.TemplateKwargs != ""
}

// sources are where the tokenizer may be, the likeliest first.
func (s *settings) sources() []prompt.Source {
	source := prompt.Source{HubCache: s.hubCache, Template: s.template, ContentFormat: s.contentFormat, TemplateKwargs: string(s.kwargs)}
	if s.tokenizer == noTokenizer {
		return []prompt.Source{source}
	}
	names := []string{s.tokenizer}
	if s.tokenizer == "" {
		// What an engine says must not lead elsewhere: it is a name, or the whole
		// path of a directory.
		names = slices.DeleteFunc([]string{s.root, s.name}, func(name string) bool {
			if filepath.IsAbs(name) {
				info, err := os.Stat(name)
				return err != nil || !info.IsDir()
			}
			return !isHubName(name)
		})
	}
	var list []prompt.Source
	for _, name := range slices.Compact(names) {
		source.Tokenizer = name
		list = append(list, source)
	}
	return list
}

// find loads the first of the sources that is there.
func (p *prompts) find(s *settings) (m *prompt.Model, from string, err error) {
	p.loading.Lock()
	defer p.loading.Unlock()
	sources := s.sources()
	var errs []error
	if root := s.root; root != "" && !slices.ContainsFunc(sources, func(o prompt.Source) bool { return o.Tokenizer == root }) {
		errs = append(errs, fmt.Errorf("the engine has the model in %q, which is no directory here: name one that is as the model's tokenizer in the configuration", root))
	}
	for _, source := range sources {
		if p.ctx.Err() != nil {
			return nil, "", p.ctx.Err()
		}
		source.Cache = p.cache
		m, err := p.loadOne(source)
		if err == nil && m != nil {
			closeLater(m)
			return m, source.Tokenizer, nil
		}
		errs = append(errs, err)
	}
	if len(errs) == 0 {
		return nil, "", errors.New("no tokenizer is configured, and the model's name is neither a directory here nor what one in the Hugging Face cache can be called")
	}
	return nil, "", errors.Join(errs...)
}

// loadOne loads a model. What is in its files is not the agent's: should the
// loading panic, the model is approximate and the others go on.
func (p *prompts) loadOne(source prompt.Source) (m *prompt.Model, err error) {
	defer func() {
		if what := recover(); what != nil {
			m, err = nil, fmt.Errorf("BUG: loading %q has failed: %v\n%s", source.Tokenizer, what, debug.Stack())
		}
	}()
	return p.load(source)
}

// closeLater closes a model some time after nobody refers to it any more. Only
// the library of package tokenizer's hf.go holds more than memory, and what it
// holds is memory too, so that it does not matter when. Requests refer to the
// model through the snapshot that they have read, so that none can begin to use
// it from then on; but one that has begun may be inside the library, when what is
// left to do no longer refers to the model. It ends long before closeAfter.
func closeLater(m *prompt.Model) {
	runtime.SetFinalizer(m, nil)
	runtime.SetFinalizer(m, func(m *prompt.Model) { time.AfterFunc(closeAfter, m.Close) })
}

const closeAfter = time.Minute

func (p *prompts) enqueueLocked(e *followedModel) {
	if e.queued {
		return
	}
	e.queued = true
	p.queue = append(p.queue, e)
	select {
	case p.work <- struct{}{}:
	default:
	}
}

// loadQueued is the loader.
func (p *prompts) loadQueued() {
	tick := time.NewTicker(10 * time.Second)
	defer tick.Stop()
	for p.ctx.Err() == nil {
		p.mu.Lock()
		var e *followedModel
		if len(p.queue) > 0 {
			e, p.queue = p.queue[0], p.queue[1:]
			e.queued = false
		}
		wanted := e != nil && p.followed[e.settings] == e
		p.mu.Unlock()
		switch {
		case wanted:
			began := time.Now()
			m, from, err := p.find(&e.settings)
			p.found(e, m, from, err, began)
		case e == nil:
			select {
			case <-p.ctx.Done():
			case <-p.work:
			case <-tick.C:
				p.tellDefects()
			}
		}
	}
}

// tellDefects logs once for each model that following a prompt has panicked.
// Requests only find that it has failed, and the model keeps what with.
func (p *prompts) tellDefects() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, e := range p.followed {
		if e.model == nil || e.defective {
			continue
		}
		if what := e.model.Defect(); what != "" {
			e.defective = true
			p.log.Error("BUG: following a prompt has failed; such prompts are approximate", "model", e.name, "what", what)
		}
	}
}

// found takes over a model that was loaded, or the reason why there is none. It
// reports false when it is not wanted any more.
func (p *prompts) found(e *followedModel, m *prompt.Model, from string, err error, began time.Time) bool {
	p.mu.Lock()
	if p.followed[e.settings] != e || p.ctx.Err() != nil {
		p.mu.Unlock()
		return false
	}
	e.tried = began
	if err != nil {
		why := strings.ReplaceAll(err.Error(), "\n", "; ")
		known := why == e.why
		e.why = why
		p.mu.Unlock()
		switch {
		case known:
		case e.configured():
			p.log.Warn("prompts are only approximate: the tokenizer cannot be loaded", "model", e.name, "why", why)
		default:
			p.log.Info("prompts are only approximate: no tokenizer was found", "model", e.name, "why", why)
		}
		return true
	}
	how, exact := m.Describe()
	e.retireLocked(p)
	e.model, e.from, e.why = m, from, ""
	e.how, e.exact, e.defective = how, exact, false
	e.generation++
	p.byModel[m] = e
	e.trust.renewed()
	if e.verdict != "" {
		m.Demote(e.verdict)
	}
	p.mu.Unlock()
	switch {
	case exact:
		p.log.Info("prompts are followed", "model", e.name, "tokenizer", from, "how", how, "took", time.Since(began).Round(time.Millisecond))
	case e.configured():
		p.log.Warn("prompts are only approximate", "model", e.name, "tokenizer", from, "why", how)
	default:
		p.log.Info("prompts are only approximate", "model", e.name, "tokenizer", from, "why", how)
	}
	p.changed()
	return true
}

// configured reports that a person has said what the tokenizer is.
func (s *settings) configured() bool { return s.tokenizer != "" }

// retireLocked takes the model out of what is counted.
func (e *followedModel) retireLocked(p *prompts) {
	if e.model == nil {
		return
	}
	delete(p.byModel, e.model)
	p.dropTalliesLocked(func(k tallyKey) bool { return k.model == e.model })
}

// forgetLocked drops what nothing is served of any more.
func (p *prompts) forgetLocked(e *followedModel) {
	e.retireLocked(p)
	delete(p.followed, e.settings)
}

// CheckPrompts loads the tokenizers and templates that the configuration names
// and tells for each model how its prompts are followed. The error, Problems,
// names those that cannot be loaded. It takes seconds for each.
func (c *Config) CheckPrompts() (lines []string, err error) {
	var bad problems
	p := &prompts{load: prompt.Load, ctx: context.Background()}
	for i := range c.Models {
		mc := &c.Models[i]
		if mc.Tokenizer == noTokenizer && mc.ChatTemplate == "" {
			lines = append(lines, mc.Name+": no tokenizer; prompts are approximate")
			continue
		}
		s := settings{name: mc.Name, tokenizer: mc.Tokenizer, template: mc.ChatTemplate,
			contentFormat: strings.TrimPrefix(mc.ContentFormat, "auto"), hubCache: c.Tokenizer.HubCache, kwargs: mc.TemplateKwargs}
		m, from, err := p.find(&s)
		switch {
		case err == nil:
			how, _ := m.Describe()
			name := mc.Name
			if from != "" && from != name {
				name += " (" + from + ")"
			}
			lines = append(lines, name+": "+how)
			runtime.SetFinalizer(m, nil)
			m.Close()
		case s.configured():
			bad.add(fmt.Sprintf("models[%d].tokenizer", i), "%v", err)
		default:
			why := strings.ReplaceAll(err.Error(), "\n", "; ")
			lines = append(lines, mc.Name+": not known before an engine says where it has the model ("+why+")")
		}
	}
	return lines, bad.err()
}

// ailments names, each in a few words, the models of which a person would think
// that they are followed, and that are not.
func (p *prompts) ailments() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []string
	for _, e := range p.followed {
		switch {
		case e.verdict != "":
			out = append(out, "the prompts of "+e.name+" are approximate ("+e.verdict+")")
		case e.model == nil && e.configured() && !e.tried.IsZero():
			out = append(out, "the prompts of "+e.name+" are approximate ("+e.why+")")
		}
	}
	slices.Sort(out)
	return out
}

// promptStatus is what /debug/fleet shows of how a model's prompts are followed.
type promptStatus struct {
	// State is exact, approximate, demoted or loading.
	State     string `json:"state"`
	How       string `json:"how,omitempty"`
	Tokenizer string `json:"tokenizer,omitempty"`
	// Why it is not exact.
	Why string `json:"why,omitempty"`
	// Defect is the first panic of following a prompt.
	Defect    string        `json:"defect,omitempty"`
	BlockSize int           `json:"block_size,omitempty"`
	Probes    []probeStatus `json:"probes,omitempty"`
	// Disagreed is the comparison with an engine that differed last.
	Disagreed string     `json:"last_disagreement,omitempty"`
	At        *time.Time `json:"last_disagreement_at,omitempty"`
}

// probeStatus is what has become of a replica's probes.
type probeStatus struct {
	Replica string    `json:"replica"`
	Result  string    `json:"result"`
	Via     string    `json:"via,omitempty"`
	What    string    `json:"what,omitempty"`
	At      time.Time `json:"at"`
}

// status is how the prompts of a model of the snapshot are followed.
func (p *prompts) status(model *proxy.Model) promptStatus {
	p.mu.Lock()
	defer p.mu.Unlock()
	e := p.byName[model.Name]
	if e == nil {
		return promptStatus{State: "approximate", Why: "no tokenizer, by configuration", BlockSize: model.BlockSize}
	}
	s := promptStatus{Tokenizer: e.from, BlockSize: model.BlockSize}
	switch {
	case e.model == nil && e.tried.IsZero():
		s.State, s.Why = "loading", e.why
	case e.model == nil:
		s.State, s.Why = "approximate", e.why
	default:
		s.How, s.State, s.Defect = e.how, "exact", e.model.Defect()
		if !e.exact {
			s.State = "approximate"
		}
		if e.verdict != "" {
			s.State, s.Why = "demoted", e.verdict
		}
	}
	for _, slot := range slices.Sorted(maps.Keys(e.probes)) {
		r := e.probes[slot]
		s.Probes = append(s.Probes, probeStatus{r.replica, r.outcome.String(), r.way, r.what, r.at})
	}
	if at := e.disagreed.at; !at.IsZero() {
		s.Disagreed, s.At = e.disagreed.what, &at
	}
	return s
}
