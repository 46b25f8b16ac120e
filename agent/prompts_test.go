package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"weak"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/inferrail/inferrail/proxy"
	"github.com/inferrail/inferrail/proxy/prompt"
	"github.com/inferrail/inferrail/simulator"
)

// library is where models are loaded from in a test: what there is, and what was
// loaded. A model that is loaded follows prompts as an engine of the template
// that the library had then.
type library struct {
	*stage

	mu       sync.Mutex // guards the rest
	has      []string   // tokenizers
	template uint32
	hold     chan struct{} // when not nil, loading waits for it
	loaded   []string
	models   map[*prompt.Model]uint32
}

// newLibrary is a fleet in front of the engines, gpu-0 and so on, that finds the
// tokenizers.
func newLibrary(t *testing.T, has []string, models []ModelConfig, engines ...*fakeEngine) *library {
	t.Helper()
	c := DefaultConfig()
	c.Health.Interval, c.Health.Timeout, c.Health.UnhealthyThreshold = 10*time.Millisecond, 2*time.Second, 1
	c.Models = models
	for i, e := range engines {
		c.Replicas = append(c.Replicas, ReplicaConfig{ID: fmt.Sprint("gpu-", i), URL: e.URL})
	}
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	l := &library{has: has, template: 1, models: map[*prompt.Model]uint32{}}
	l.stage = newStageOf(t, &c, func(f *fleet) { f.prompts.load, f.prompts.verify = l.load, l.verify })
	return l
}

func (l *library) load(source prompt.Source) (*prompt.Model, error) {
	l.mu.Lock()
	hold := l.hold
	l.mu.Unlock()
	if hold != nil {
		<-hold
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if source.Tokenizer == "org/poison" {
		panic("poisoned")
	}
	if !slices.Contains(l.has, source.Tokenizer) {
		return nil, fmt.Errorf("tokenizer %q: not here", source.Tokenizer)
	}
	l.loaded = append(l.loaded, source.Tokenizer+source.Template+source.ContentFormat+source.TemplateKwargs)
	// Any model will do; verify says what it follows.
	m, err := prompt.Load(prompt.Source{})
	l.models[m] = l.template
	return m, err
}

func (l *library) verify(m *prompt.Model, p *prompt.Prompt, kind prompt.Kind, body []byte, now time.Time) {
	l.mu.Lock()
	template := l.models[m]
	l.mu.Unlock()
	verifyLetters(p, kind, body, now)
	if len(p.IDs) > 0 {
		p.IDs[0] = template
	}
}

func (l *library) set(change func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	change()
}

func (l *library) loads() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.loaded, " ")
}

// model is what the fleet published last has of that name.
func (l *library) model(name string) *proxy.Model {
	l.stage.mu.Lock()
	defer l.stage.mu.Unlock()
	return l.published.Models[name]
}

// prompts waits until a model is followed, and returns by what.
func (l *library) prompts(name string) *prompt.Model {
	l.Helper()
	eventually(l.T, func() bool { m := l.model(name); return m != nil && m.Prompts != nil }, func() string {
		return fmt.Sprintf("%s is not followed: %+v", name, l.status(name))
	})
	return l.model(name).Prompts
}

func (l *library) status(name string) promptStatus {
	if m := l.model(name); m != nil {
		return l.fleet.prompts.status(m)
	}
	return promptStatus{}
}

// told is state, verdict and the replicas' probes.
func (l *library) told(name string) string {
	s := l.status(name)
	state := s.State
	if state == "approximate" && s.Why == "" {
		state = "followed" // what a model without a tokenizer says of itself
	}
	if s.Why != "" {
		state += " (" + s.Why + ")"
	}
	for _, p := range s.Probes {
		state += ", " + p.Replica + " " + p.Result
	}
	return state
}

func (l *library) tells(name, want string) {
	l.Helper()
	var got string
	eventually(l.T, func() bool { got = l.told(name); return got == want }, func() string {
		return fmt.Sprintf("%s is %s\nwant %s", name, got, want)
	})
}

// metric is the value of a series that a collector shows, by its name and labels.
func metric(t *testing.T, c prometheus.Collector, series string) float64 {
	t.Helper()
	registry := prometheus.NewRegistry()
	if err := registry.Register(c); err != nil {
		t.Fatal(err)
	}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.Metric {
			name := f.GetName()
			for _, label := range m.Label {
				name += " " + label.GetValue()
			}
			if name == series {
				return m.GetGauge().GetValue() + m.GetCounter().GetValue()
			}
		}
	}
	return -1
}

// respond lets a replica answer n requests of a model, counting so many tokens
// more than were expected.
func (l *library) respond(name string, replica, n, more int) {
	l.Helper()
	m := l.model(name)
	r := l.fleet.members[replica].replica
	for i := range n {
		l.fleet.prompts.Counted(m, r, 55, 55+more, fmt.Appendf(nil, "req-%d", i))
	}
}

const theProbe = ` has other tokens: in the probe "chat" token 0 is 2 where 1 was expected (57 tokens, expected 57)`

func TestProbesWhenReplicasJoin(t *testing.T) {
	good, bad := startFake(t, "vllm"), startFake(t, "llamacpp")
	bad.set(func(e *fakeEngine) { e.template = 2 })
	l := newLibrary(t, []string{"org/m"}, []ModelConfig{{Name: "m", Tokenizer: "org/m"}}, good)
	l.tells("m", "followed, gpu-0 agrees")
	if got := metric(t, l.fleet.prompts, "inferrail_prompt_demoted m"); got != 0 {
		t.Errorf("demoted %v", got)
	}
	// One that differs joins.
	c := *l.fleet.cfg.Load()
	c.Replicas = append(slices.Clone(c.Replicas), ReplicaConfig{ID: "gpu-1", URL: bad.URL, Engine: "llamacpp"})
	if err := l.fleet.reconfigure(&c); err != nil {
		t.Fatal(err)
	}
	l.tells("m", "demoted (replica gpu-1"+theProbe+"), gpu-0 agrees, gpu-1 differs")
	if got := strings.Join(l.fleet.ailments(), "; "); !strings.Contains(got, "the prompts of m are approximate (replica gpu-1") {
		t.Errorf("what ails it: %s", got)
	}
	for series, want := range map[string]float64{
		"inferrail_prompt_demoted m":                   1,
		"inferrail_prompt_checks_total agree probe":    1,
		"inferrail_prompt_checks_total disagree probe": 1,
		"inferrail_prompt_checks_total failed probe":   0,
		"inferrail_prompt_checks_total agree usage":    0,
	} {
		if got := metric(t, l.fleet.prompts, series); got != want {
			t.Errorf("%s is %v, want %v", series, got, want)
		}
	}
	// Its model was loaded once for the configuration, and once more because the
	// engine is younger than what was loaded.
	if got := l.loads(); got != "org/m org/m" {
		t.Errorf("loaded %s", got)
	}
	// Whoever differs leaves, and the others are right.
	c.Replicas = c.Replicas[:1]
	if err := l.fleet.reconfigure(&c); err != nil {
		t.Fatal(err)
	}
	l.tells("m", "followed, gpu-0 agrees")
}

// An engine that is started anew with the right template is believed again; as
// long as it only goes on to be there it is not.
func TestDemotionIsLiftedWhenTheEngineReturns(t *testing.T) {
	e := startFake(t, "vllm")
	e.set(func(e *fakeEngine) { e.template = 2 })
	l := newLibrary(t, []string{"m"}, nil, e)
	demoted := "demoted (replica gpu-0" + theProbe + "), gpu-0 differs"
	l.tells("m", demoted)
	asked := len(e.pages())

	e.set(func(e *fakeEngine) { e.template = 1 })
	checks := l.fleet.members[0]
	eventually(t, func() bool { l.fleet.mu.Lock(); defer l.fleet.mu.Unlock(); return checks.checks > 2 }, func() string { return "it is not checked" })
	if got := l.told("m"); got != demoted || len(e.pages()) != asked {
		t.Errorf("without having been away it became %s after %d more questions", got, len(e.pages())-asked)
	}
	e.set(func(e *fakeEngine) { e.health = 503 })
	l.expect("m=")
	e.set(func(e *fakeEngine) { e.health = 0 })
	l.expect("m=gpu-0")
	l.tells("m", "followed, gpu-0 agrees")
	// It was found right with what had been loaded.
	if got := l.loads(); got != "m" {
		t.Errorf("loaded %s", got)
	}
}

// The files have changed with the engine.
func TestModelIsLoadedAnewWithTheEngine(t *testing.T) {
	e, other := startFake(t, "vllm"), startFake(t, "vllm")
	l := newLibrary(t, []string{"m"}, nil, e, other)
	l.tells("m", "followed, gpu-0 agrees, gpu-1 agrees")
	before := l.prompts("m")

	l.set(func() { l.template = 2 })
	e.set(func(e *fakeEngine) { e.health = 503 })
	l.expect("m=gpu-1")
	e.set(func(e *fakeEngine) { e.health, e.template = 0, 2 })
	// gpu-1 still has the template of before, and is asked about the new one.
	l.tells("m", `demoted (replica gpu-1 has other tokens: in the probe "chat" token 0 is 1 where 2 was expected (57 tokens, expected 57)), gpu-0 agrees, gpu-1 differs`)
	if l.prompts("m") == before {
		t.Error("the model is that of before")
	}
	other.set(func(e *fakeEngine) { e.health = 503 })
	l.expect("m=gpu-0")
	other.set(func(e *fakeEngine) { e.health, e.template = 0, 2 })
	l.tells("m", "followed, gpu-0 agrees, gpu-1 agrees")
	if got := l.loads(); got != "m m" {
		t.Errorf("loaded %s", got)
	}
}

// What responses count is believed when it differs often enough, and not before.
func TestCountsThatDifferDemote(t *testing.T) {
	e := startFake(t, "ollama")
	l := newLibrary(t, []string{"m"}, nil, e)
	l.tells("m", "followed, gpu-0 cannot be checked")
	l.prompts("m")
	l.respond("m", 0, 100, 0)
	l.respond("m", 0, usageMost-1, 2)
	if got := l.told("m"); !strings.HasPrefix(got, "followed") {
		t.Errorf("after %d that differ: %s", usageMost-1, got)
	}
	l.respond("m", 0, 5, 0)
	l.respond("m", 0, 1, 2)
	l.tells("m", "demoted (replica gpu-0 counted 57 prompt tokens where 55 were expected (request req-0); so did 8 of its last 13 responses), gpu-0 cannot be checked")
	if got := l.status("m").Disagreed; !strings.HasPrefix(got, "replica gpu-0 counted 57") {
		t.Errorf("the last that differed: %q", got)
	}
	for series, want := range map[string]float64{
		"inferrail_prompt_checks_total agree usage":    105,
		"inferrail_prompt_checks_total disagree usage": 8,
	} {
		if got := metric(t, l.fleet.prompts, series); got != want {
			t.Errorf("%s is %v, want %v", series, got, want)
		}
	}
	// It cannot be probed, so that after it was away its responses tell again.
	e.set(func(e *fakeEngine) { e.health = 503 })
	l.expect("m=")
	e.set(func(e *fakeEngine) { e.health = 0 })
	l.tells("m", "followed, gpu-0 cannot be checked")
	l.respond("m", 0, usageMost-1, 2)
	if got := l.told("m"); !strings.HasPrefix(got, "followed") {
		t.Errorf("at its second trial after %d that differ: %s", usageMost-1, got)
	}
	l.respond("m", 0, 1, 2)
	l.tells("m", "demoted (replica gpu-0 counted 57 prompt tokens where 55 were expected (request req-0); so did 8 of its last 8 responses), gpu-0 cannot be checked")
}

// A probe that fails is repeated, and says nothing until it does not.
func TestProbesThatFailAreRepeated(t *testing.T) {
	e := startFake(t, "vllm")
	e.set(func(e *fakeEngine) { e.status = 500 })
	l := newLibrary(t, []string{"m"}, nil, e)
	l.tells("m", "followed, gpu-0 failed")
	if got := l.status("m").Probes[0].What; got != `the probe "chat" failed: POST /v1/chat/completions/render: status 500` {
		t.Errorf("says %q", got)
	}
	e.set(func(e *fakeEngine) { e.status = 0 })
	l.tells("m", "followed, gpu-0 agrees")
}

func TestProbePauses(t *testing.T) {
	var got []string
	for n := range 12 {
		got = append(got, probePause(n+1).String())
	}
	if s := strings.Join(got, " "); s != "1s 2s 4s 8s 16s 32s 1m4s 2m8s 4m16s 5m0s 5m0s 5m0s" || probePause(1_000_000) != retryProbesMost {
		t.Error(s)
	}
}

// Requests that were sampled are compared; those that differ often demote.
func TestSamples(t *testing.T) {
	e := startFake(t, "vllm")
	l := newLibrary(t, []string{"m"}, []ModelConfig{{Name: "m", Aliases: []string{"alias"}}}, e)
	l.tells("m", "followed, gpu-0 agrees")
	model := l.prompts("m")
	r := l.fleet.members[0].replica
	sample := func(text string) {
		t.Helper()
		body := fmt.Appendf(nil, `{"model":"alias","messages":[{"content":%q}]}`, text)
		var p prompt.Prompt
		l.verify(model, &p, prompt.Chat, body, time.Now())
		before := metric(t, l.fleet.prompts, "inferrail_prompt_checks_total agree sample") + metric(t, l.fleet.prompts, "inferrail_prompt_checks_total disagree sample")
		l.fleet.prompts.Sampled(l.model("m"), r, prompt.Chat, body, p.IDs)
		clear(body) // it is the request's, which is over
		clear(p.IDs)
		eventually(t, func() bool {
			return metric(t, l.fleet.prompts, "inferrail_prompt_checks_total agree sample")+metric(t, l.fleet.prompts, "inferrail_prompt_checks_total disagree sample") > before
		}, func() string { return "the sample is not compared" })
	}
	sample("one")
	if got := metric(t, l.fleet.prompts, "inferrail_prompt_checks_total agree sample"); got != 1 {
		t.Errorf("%v agree", got)
	}
	e.set(func(e *fakeEngine) { e.template = 2 })
	sample("two")
	sample("three")
	if got := l.told("m"); got != "followed, gpu-0 agrees" {
		t.Errorf("after two it is %s", got)
	}
	sample("four")
	l.tells("m", "demoted (replica gpu-0 has other tokens for a request it was sent: token 0 is another one (22 tokens, expected 22); "+
		"so it was with 3 of the last 3 requests that were looked at), gpu-0 agrees")
}

// What a request was routed by is compared, not only what would be followed now.
func TestSampleIsWhatWasFollowed(t *testing.T) {
	e := startFake(t, "vllm")
	l := newLibrary(t, []string{"m"}, nil, e)
	l.tells("m", "followed, gpu-0 agrees")
	l.prompts("m")
	o := e.oracle(t, "vllm")
	asked := len(e.pages())
	s := sample{l.model("m").Prompts, "m", prompt.Completion, []byte(`{"prompt":"x"}`), []uint32{1, 'y', 0}}
	l.fleet.prompts.checkSample(t.Context(), o, l.fleet.members[0], s)
	if n := len(e.pages()) - asked; n != 2 { // it is followed anew, and agrees then
		t.Errorf("asked %d times", n)
	}
	s.ids = []uint32{1, 'x', 0}
	l.fleet.prompts.checkSample(t.Context(), o, l.fleet.members[0], s)
	if n := len(e.pages()) - asked; n != 3 {
		t.Errorf("asked %d times", n)
	}
}

// A checker does one thing at a time; what comes meanwhile is dropped, and
// nobody waits.
func TestSamplesAreDroppedWhenBusy(t *testing.T) {
	e := startFake(t, "vllm")
	l := newLibrary(t, []string{"m"}, nil, e)
	l.tells("m", "followed, gpu-0 agrees")
	l.prompts("m")
	asked := len(e.pages())
	e.set(func(e *fakeEngine) { e.hang = true })
	r, m := l.fleet.members[0].replica, l.model("m")
	dropped := func() float64 { return metric(t, l.fleet.prompts, "inferrail_prompt_samples_dropped_total") }
	// One is being compared and one waits.
	body := []byte(`{"prompt":"x"}`)
	l.fleet.prompts.Sampled(m, r, prompt.Completion, body, nil)
	eventually(t, func() bool { return len(e.pages()) > asked }, func() string { return "it is not compared" })
	l.fleet.prompts.Sampled(m, r, prompt.Completion, body, nil)
	if got := dropped(); got != 0 {
		t.Errorf("%v dropped at first", got)
	}
	for range 10 {
		l.fleet.prompts.Sampled(m, r, prompt.Completion, body, nil)
	}
	l.fleet.prompts.Sampled(m, r, prompt.Completion, make([]byte, maxSample+1), nil)
	if got := dropped(); got != 11 {
		t.Errorf("%v dropped", got)
	}
}

// Names of one engine for one model share what was loaded for it, and an adapter
// has its model's; what is configured for itself does not.
func TestWhoSharesWhatIsLoaded(t *testing.T) {
	e := startFake(t, "vllm")
	e.set(func(e *fakeEngine) {
		e.cards = `{"id":"base","root":"org/base"},{"id":"also","root":"org/base"},{"id":"own","root":"org/base"},` +
			`{"id":"lora","root":"/loras/x","parent":"base"},{"id":"orphan","root":"/loras/y","parent":"gone"}`
	})
	other := startFake(t, "vllm")
	other.set(func(e *fakeEngine) { e.cards = `{"id":"other","root":"org/base"}` })
	l := newLibrary(t, []string{"org/base"}, []ModelConfig{{Name: "own", ContentFormat: "string"}, {Name: "lora", BlockSize: 32}, {Name: "off", Tokenizer: "none"}}, e, other)
	base := l.prompts("base")
	own := l.prompts("own")
	elsewhere := l.prompts("other")
	if l.prompts("also") != base || l.prompts("lora") != base {
		t.Error("names of one model do not share it")
	}
	// Two engines with one model may have been started with different templates.
	if own == base || elsewhere == base {
		t.Error("others share it too")
	}
	eventually(t, func() bool { return strings.HasPrefix(l.told("orphan"), "approximate (tokenizer \"gone\": not here") }, func() string { return l.told("orphan") })
	if got := l.told("off"); got != "approximate (no tokenizer, by configuration)" {
		t.Errorf("off is %s", got)
	}
	// One engine has one cache.
	if l.model("lora").BlockSize != 32 || l.model("base").BlockSize != 32 || l.model("other").BlockSize != defaultBlock {
		t.Errorf("block sizes %d, %d, %d", l.model("lora").BlockSize, l.model("base").BlockSize, l.model("other").BlockSize)
	}
	if got := strings.Fields(l.loads()); len(got) != 3 || !slices.Contains(got, "org/basestring") {
		t.Errorf("loaded %q", got)
	}
	// One that differs takes nothing from the other.
	eventually(t, func() bool {
		return l.told("base") == "followed, gpu-0 agrees" && l.told("other") == "followed, gpu-1 agrees"
	}, func() string {
		return l.told("base") + "; " + l.told("other")
	})
	l.respond("lora", 0, usageMost, 1)
	for name, want := range map[string]string{"base": "demoted", "also": "demoted", "lora": "demoted", "own": "followed", "other": "followed"} {
		if got := l.told(name); !strings.HasPrefix(got, want) {
			t.Errorf("%s is %s, want it %s", name, got, want)
		}
	}
}

// Where the engine has the model is looked at first, if it can be a place here,
// then the model's name.
func TestWhereTokenizersAreLookedFor(t *testing.T) {
	dir := t.TempDir()
	f := func(s settings, want ...string) {
		t.Helper()
		var got []string
		for _, source := range s.sources() {
			got = append(got, source.Tokenizer)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%+v: looks for %q, want %q", s, got, want)
		}
	}
	f(settings{name: "m", root: dir}, dir, "m")
	f(settings{name: dir, root: dir}, dir)
	f(settings{name: "org/m", root: "org/m"}, "org/m")
	f(settings{name: "m", root: "org/m"}, "org/m", "m")
	f(settings{name: "m", root: "/nowhere/m"}, "m")
	f(settings{name: "m", root: "../" + filepath.Base(dir)}, "m")
	f(settings{name: "m", root: "a/b/c"}, "m")
	f(settings{name: "a:b", root: ""})
	f(settings{name: "m", root: dir, tokenizer: "org/m"}, "org/m")
	f(settings{name: "m", tokenizer: noTokenizer}, "")
}

// Where the engine has the model may be no place here. That is told first: the
// model's name, which is looked for then, is mostly of the engine's making.
func TestEngineHasItElsewhere(t *testing.T) {
	e := startFake(t, "vllm")
	e.set(func(e *fakeEngine) { e.cards = `{"id":"m","root":"/nowhere/m"}` })
	l := newLibrary(t, nil, nil, e)
	l.tells("m", `approximate (the engine has the model in "/nowhere/m", which is no directory here: `+
		`name one that is as the model's tokenizer in the configuration; tokenizer "m": not here)`)
}

// What was not there when it was looked for is looked for again when the engine
// comes back: it may have fetched it.
func TestTokenizerThatComesLater(t *testing.T) {
	e := startFake(t, "vllm")
	e.set(func(e *fakeEngine) { e.cards = `{"id":"m","root":"org/m"}` })
	l := newLibrary(t, nil, nil, e)
	l.tells("m", `approximate (tokenizer "org/m": not here; tokenizer "m": not here)`)
	l.set(func() { l.has = []string{"org/m"} })
	e.set(func(e *fakeEngine) { e.health = 503 })
	l.expect("m=")
	e.set(func(e *fakeEngine) { e.health = 0 })
	l.tells("m", "followed, gpu-0 agrees")
}

// A reload keeps what was loaded, unless its settings have changed; a template's
// settings are what its file holds.
func TestReloadKeepsModels(t *testing.T) {
	template := filepath.Join(t.TempDir(), "chat.jinja")
	if err := os.WriteFile(template, []byte("one"), 0o600); err != nil {
		t.Fatal(err)
	}
	e := startFake(t, "vllm")
	l := newLibrary(t, []string{"org/m", "m"}, []ModelConfig{{Name: "m", Tokenizer: "org/m", ChatTemplate: template}}, e)
	l.tells("m", "followed, gpu-0 agrees")
	kept := l.prompts("m")
	f := func(keeps bool, loads int, change func(*Config)) {
		t.Helper()
		c := *l.fleet.cfg.Load()
		c.Models = slices.Clone(c.Models)
		change(&c)
		if err := l.fleet.reconfigure(&c); err != nil {
			t.Fatal(err)
		}
		l.tells("m", "followed, gpu-0 agrees")
		if now := l.prompts("m"); (now == kept) != keeps {
			t.Errorf("kept is %v, want %v", now == kept, keeps)
		} else {
			kept = now
		}
		if n := len(strings.Fields(l.loads())); n != loads {
			t.Errorf("loaded %d times, want %d", n, loads)
		}
	}
	f(true, 1, func(*Config) {})
	f(true, 1, func(c *Config) { c.Models[0].Aliases = []string{"x"}; c.Models[0].BlockSize = 64 })
	f(true, 1, func(c *Config) { c.Models[0].ContentFormat = "auto" })
	// A model that nobody serves is loaded beside it.
	f(true, 2, func(c *Config) {
		c.Models = append(c.Models, ModelConfig{Name: "absent", Tokenizer: "m"})
		l.awaitLoads(2, c)
	})
	f(false, 3, func(c *Config) { c.Models = c.Models[:1]; c.Models[0].TemplateKwargs = `{"a":1}` })
	f(false, 4, func(*Config) {
		if err := os.WriteFile(template, []byte("two"), 0o600); err != nil {
			t.Fatal(err)
		}
	})
	f(false, 5, func(c *Config) { c.Tokenizer.HubCache = "/elsewhere" })

	// Settings that have changed are another trial.
	l.respond("m", 0, usageMost, 1)
	if got := l.told("m"); !strings.HasPrefix(got, "demoted") {
		t.Fatalf("it is %s", got)
	}
	f(false, 6, func(c *Config) { c.Models[0].ContentFormat = "openai" })
}

// A model that was replaced is let go by everybody, however it was used.
func TestReplacedModelIsReleased(t *testing.T) {
	e := startFake(t, "vllm")
	l := newLibrary(t, []string{"m"}, nil, e)
	l.tells("m", "followed, gpu-0 agrees")
	old := weak.Make(l.prompts("m"))
	l.respond("m", 0, 3, 0)
	l.respond("m", 0, 1, 1)
	c := *l.fleet.cfg.Load()
	c.Models = []ModelConfig{{Name: "m", ContentFormat: "string"}}
	if err := l.fleet.reconfigure(&c); err != nil {
		t.Fatal(err)
	}
	l.tells("m", "followed, gpu-0 agrees")
	now := l.prompts("m")
	l.set(func() {
		for m := range l.models {
			if m != now {
				delete(l.models, m)
			}
		}
	})
	eventually(t, func() bool { runtime.GC(); return old.Value() == nil }, func() string { return "it is still held" })
}

// awaitLoads applies the configuration and waits until so many were loaded.
func (l *library) awaitLoads(n int, c *Config) {
	l.Helper()
	if err := l.fleet.reconfigure(c); err != nil {
		l.Fatal(err)
	}
	eventually(l.T, func() bool { return len(strings.Fields(l.loads())) >= n }, func() string { return "loaded " + l.loads() })
}

// While a model is loaded its prompts are approximate, and nobody waits for it.
func TestLoadingKeepsNobodyWaiting(t *testing.T) {
	e := startFake(t, "vllm")
	hold := make(chan struct{})
	l := &library{has: []string{"m"}, template: 1, hold: hold, models: map[*prompt.Model]uint32{}}
	c := DefaultConfig()
	c.Health.Interval = 10 * time.Millisecond
	c.Replicas = []ReplicaConfig{{ID: "gpu-0", URL: e.URL}}
	l.stage = newStageOf(t, &c, func(f *fleet) { f.prompts.load, f.prompts.verify = l.load, l.verify })
	l.expect("m=gpu-0")
	if got := l.told("m"); got != "loading (it is being loaded)" || l.model("m").Prompts != nil {
		t.Errorf("it is %s", got)
	}
	if err := l.fleet.reconfigure(&c); err != nil {
		t.Fatal(err)
	}
	close(hold)
	l.tells("m", "followed, gpu-0 agrees")
}

// Every goroutine that calls in at the same time, while replicas and models come
// and go, finds the books in order: what was counted is counted once.
func TestCountsAreKeptWhenModelsGo(t *testing.T) {
	a, b := startFake(t, "vllm"), startFake(t, "vllm")
	l := newLibrary(t, []string{"m"}, nil, a, b)
	l.tells("m", "followed, gpu-0 agrees, gpu-1 agrees")
	l.prompts("m")
	m := l.model("m")
	members := slices.Clone(l.fleet.members)
	var counting sync.WaitGroup
	for g := range 4 {
		counting.Go(func() {
			random := rand.New(rand.NewPCG(uint64(g), 0))
			for range 1000 {
				l.fleet.prompts.Counted(m, members[random.IntN(2)].replica, 5, 5, nil)
			}
		})
	}
	counting.Wait()
	c := *l.fleet.cfg.Load()
	c.Replicas = c.Replicas[:1]
	if err := l.fleet.reconfigure(&c); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() bool { return len(*l.fleet.prompts.tallies.Load()) == 1 }, func() string { return "the replica that has left is still counted" })
	if got := metric(t, l.fleet.prompts, "inferrail_prompt_checks_total agree usage"); got != 4000 {
		t.Errorf("%v responses counted", got)
	}
	// Who has left counts no more.
	l.fleet.prompts.Counted(m, members[1].replica, 5, 6, nil)
	if got := metric(t, l.fleet.prompts, "inferrail_prompt_checks_total disagree usage"); got != 0 {
		t.Errorf("%v differ", got)
	}
}

// Responses and samples arrive while replicas join, leave, fail and return, and
// settings change. Nothing is lost that was counted at a replica that stays, and
// in the end the model is followed.
func TestPromptsUnderChange(t *testing.T) {
	stays, comes := startFake(t, "vllm"), startFake(t, "llamacpp")
	l := newLibrary(t, []string{"m"}, nil, stays)
	l.tells("m", "followed, gpu-0 agrees")
	l.prompts("m")
	stop := make(chan struct{})
	var traffic sync.WaitGroup
	for g := range 4 {
		traffic.Go(func() {
			random := rand.New(rand.NewPCG(uint64(g), 3))
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				m := l.model("m")
				if m == nil || m.Prompts == nil || len(m.Replicas) == 0 {
					runtime.Gosched()
					continue
				}
				r := m.Replicas[random.IntN(len(m.Replicas))]
				// One in a hundred is odd.
				l.fleet.prompts.Counted(m, r, 5, 5+n%100/99, []byte("x"))
				if n%50 == 0 {
					l.fleet.prompts.Sampled(m, r, prompt.Completion, []byte(`{"prompt":"x"}`), []uint32{1, 'x', 0})
				}
				if n%200 == 0 {
					l.fleet.prompts.status(m)
					l.fleet.prompts.ailments()
				}
			}
		})
	}
	for i := range 12 {
		c := *l.fleet.cfg.Load()
		c.Replicas = slices.Clone(c.Replicas[:1])
		if i%2 == 0 {
			c.Replicas = append(c.Replicas, ReplicaConfig{ID: "gpu-1", URL: comes.URL})
		}
		if i%4 > 1 {
			c.Models = []ModelConfig{{Name: "m", BlockSize: 8 * (1 + i), TemplateKwargs: Object(fmt.Sprintf(`{"n":%d}`, i))}}
		}
		if err := l.fleet.reconfigure(&c); err != nil {
			t.Fatal(err)
		}
		if i%3 == 0 {
			comes.set(func(e *fakeEngine) { e.health = 503 - e.health })
		}
		l.prompts("m")
	}
	c := *l.fleet.cfg.Load()
	c.Models, c.Replicas = []ModelConfig{{Name: "m", ContentFormat: "string"}}, c.Replicas[:1]
	if err := l.fleet.reconfigure(&c); err != nil {
		t.Fatal(err)
	}
	l.tells("m", "followed, gpu-0 agrees")
	close(stop)
	traffic.Wait()
	eventually(t, func() bool { l.fleet.mu.Lock(); defer l.fleet.mu.Unlock(); return len(l.fleet.leaving) == 0 }, func() string { return "a replica does not leave" })
	p := l.fleet.prompts
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.followed) != 1 || len(p.byModel) != 1 || len(p.checkers) != 1 || len(*p.tallies.Load()) > 1 {
		t.Errorf("books of what is gone are kept: %d settings, %d models, %d checkers, %d tallies", len(p.followed), len(p.byModel), len(p.checkers), len(*p.tallies.Load()))
	}
}

// The response that agrees costs next to nothing.
func TestCountedAlloc(t *testing.T) {
	withoutRace(t)
	e := startFake(t, "vllm")
	l := newLibrary(t, []string{"m"}, nil, e)
	l.tells("m", "followed, gpu-0 agrees")
	l.prompts("m")
	m, r := l.model("m"), l.fleet.members[0].replica
	id := []byte("req")
	if n := testing.AllocsPerRun(100, func() { l.fleet.prompts.Counted(m, r, 7, 7, id) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkCounted(b *testing.B) {
	p := newPrompts(&Config{}, nil, func() {})
	defer p.close()
	r, err := proxy.NewReplica(0, "gpu-0", "http://127.0.0.1:1")
	if err != nil {
		b.Fatal(err)
	}
	defer r.Close()
	p.join(0)
	followed, err := prompt.Load(prompt.Source{})
	if err != nil {
		b.Fatal(err)
	}
	m := &proxy.Model{Prompts: followed}
	p.byModel[m.Prompts] = &followedModel{}
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			p.Counted(m, r, 7, 7, nil)
		}
	})
}

// promptPage is what /debug/fleet says of how the model m is followed.
func promptPage(t *testing.T, a *Agent) promptStatus {
	t.Helper()
	_, body := page(t, a, "/debug/fleet")
	var fleet struct {
		Models []struct {
			Name    string
			Prompts promptStatus
		}
	}
	if err := json.Unmarshal([]byte(body), &fleet); err != nil {
		t.Fatal(err)
	}
	for _, m := range fleet.Models {
		if m.Name == "m" {
			return m.Prompts
		}
	}
	return promptStatus{}
}

// askWhole sends a chat that is answered as a whole, and returns how many tokens
// the agent has told and how many the engine has counted.
func askWhole(t *testing.T, a *Agent, text string) (told string, counted int) {
	t.Helper()
	body := fmt.Sprintf(`{"model":"m","max_tokens":1,"messages":[{"role":"system","content":"Be brief."},{"role":"user","content":%q}]}`, text)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}
	resp, err := client.Post("http://"+a.Addr().String()+"/v1/chat/completions", "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var answer struct {
		Usage struct {
			Prompt int `json:"prompt_tokens"`
		}
	}
	if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil || resp.StatusCode != 200 {
		t.Fatalf("status %d, %v", resp.StatusCode, err)
	}
	return resp.Header.Get("x-inferrail-prompt-tokens"), answer.Usage.Prompt
}

// The whole way: a simulated engine whose prompts are followed exactly; then it
// counts otherwise, which its responses show; and when it has been away and is as
// it was, it is believed again.
func TestAgentFollowsPrompts(t *testing.T) {
	engine := startEngine(t, 0, "m")
	c := testConfig(engine)
	c.Models = []ModelConfig{{Name: "m", Tokenizer: "builtin:sim"}}
	a := startAgent(t, c)
	defer stopped(t, a)
	var got promptStatus
	expect := func(state, result string) {
		t.Helper()
		eventually(t, func() bool {
			got = promptPage(t, a)
			return got.State == state && len(got.Probes) == 1 && got.Probes[0].Result == result
		}, func() string { return fmt.Sprintf("m is %+v; want it %s and the probes: %s", got, state, result) })
	}
	expect("exact", "agrees")
	if want := "compared: chat, conversation, parts, odd text, tools, completion"; got.Probes[0].What != want || got.Probes[0].Via != "render" {
		t.Errorf("probes %+v", got.Probes[0])
	}
	for i := range 3 {
		told, counted := askWhole(t, a, strings.Repeat("Hello there! ", 1+100*i))
		if told != fmt.Sprint(counted) {
			t.Errorf("%q tokens were told, %d counted", told, counted)
		}
	}
	const agree = `inferrail_prompt_checks_total{result="agree",source="usage"} 3`
	eventually(t, func() bool { _, body := page(t, a, "/metrics"); return strings.Contains(body, agree) }, func() string {
		return "/metrics lacks " + agree
	})

	if err := engine.SetFaults(simulator.Faults{Tokenizer: "token"}); err != nil {
		t.Fatal(err)
	}
	for range usageMost {
		askWhole(t, a, "Hello!")
	}
	expect("demoted", "agrees")
	if want := regexp.MustCompile(`^replica r0 counted (\d+) prompt tokens where (\d+) were expected \(request [^ ]+\); so did 8 of its last 8 responses$`); !want.MatchString(got.Why) {
		t.Errorf("the reason is %q", got.Why)
	}
	if told, _ := askWhole(t, a, "Hello!"); told != "" {
		t.Errorf("%q tokens were told while nobody believes it", told)
	}
	if _, body := page(t, a, "/metrics"); !strings.Contains(body, `inferrail_prompt_demoted{model="m"} 1`) {
		t.Error("/metrics does not tell")
	}
	if status, body := page(t, a, "/readyz"); status != 200 || !strings.Contains(body, "degraded: the prompts of m are approximate (replica r0 counted") {
		t.Errorf("readyz: %d %s", status, body)
	}

	// It comes back as it is: its probes differ.
	away := func(f simulator.Faults) {
		t.Helper()
		f.HealthStatus = 503
		if err := engine.SetFaults(f); err != nil {
			t.Fatal(err)
		}
		eventually(t, func() bool { up, _ := a.Replicas(); return up == 0 }, func() string { return "it stays up" })
		f.HealthStatus = 0
		if err := engine.SetFaults(f); err != nil {
			t.Fatal(err)
		}
	}
	away(simulator.Faults{Tokenizer: "template"})
	expect("demoted", "differs")
	away(simulator.Faults{})
	expect("exact", "agrees")
	if told, counted := askWhole(t, a, "Hello!"); told != fmt.Sprint(counted) {
		t.Errorf("%q tokens were told, %d counted", told, counted)
	}
}

// A template that is written anew, while the configuration stays as it is, is
// taken over; one that is gone is a problem of the configuration, and what was
// loaded stays.
func TestTemplateIsFollowed(t *testing.T) {
	engine := startEngine(t, 0, "m")
	template := filepath.Join(t.TempDir(), "chat.jinja")
	write(t, template, []byte("{{ messages[0].content }}"))
	l := followed(t, testConfig(engine), fmt.Sprintf("models: [{name: m, tokenizer: builtin:sim, chat_template: %s}]\n", template))
	differs := func(at string) {
		t.Helper()
		eventually(t, func() bool {
			got := promptPage(t, l.Agent)
			return got.State == "demoted" && strings.Contains(got.Why, at)
		}, func() string { return fmt.Sprintf("m is %+v, want it to differ %s", promptPage(t, l.Agent), at) })
	}
	// The probes tell how many tokens the template makes: it is seen which one it is.
	differs("tokens, expected 6)")
	write(t, template, []byte("{{ messages[0].content }}{{ messages[0].content }}"))
	differs("tokens, expected 12)")
	if err := os.Remove(template); err != nil {
		t.Fatal(err)
	}
	l.says("models[0].chat_template: cannot be read")
	differs("tokens, expected 12)")
}

// Without a tokenizer an agent serves as ever, and shows that it has none.
func TestAgentWithoutTokenizer(t *testing.T) {
	a := startAgent(t, testConfig(startEngine(t, 0, "m")))
	defer stopped(t, a)
	if told, _ := askWhole(t, a, "Hello!"); told != "" {
		t.Errorf("%q tokens were told", told)
	}
	var got promptStatus
	eventually(t, func() bool {
		got = promptPage(t, a)
		return got.State == "approximate" && got.Why != "" && got.BlockSize == 16
	}, func() string {
		return fmt.Sprintf("m is %+v", got)
	})
	_, body := page(t, a, "/metrics")
	if want := `inferrail_prompt_checks_total{result="disagree",source="usage"} 0`; !strings.Contains(body, want) {
		t.Errorf("/metrics lacks %s", want)
	}
}

// A tokenizer that is asked for and cannot be loaded does not keep the agent from
// serving, and people are told.
func TestConfiguredTokenizerIsMissing(t *testing.T) {
	e := startFake(t, "vllm")
	l := newLibrary(t, nil, []ModelConfig{{Name: "m", Tokenizer: "org/absent"}}, e)
	l.expect("m=gpu-0")
	l.tells("m", `approximate (tokenizer "org/absent": not here)`)
	if got := fmt.Sprint(l.fleet.ailments()); got != `[the prompts of m are approximate (tokenizer "org/absent": not here)]` {
		t.Errorf("what ails it: %s", got)
	}
}

// Files that are not as any should be harm only their own model.
func TestLoadingThatPanics(t *testing.T) {
	e := startFake(t, "vllm")
	e.set(func(e *fakeEngine) { e.cards = `{"id":"m","root":"org/m"},{"id":"bad","root":"org/poison"}` })
	l := newLibrary(t, []string{"org/m"}, nil, e)
	l.tells("m", "followed, gpu-0 agrees")
	eventually(t, func() bool {
		return strings.HasPrefix(l.told("bad"), `approximate (BUG: loading "org/poison" has failed: poisoned;`)
	}, func() string {
		return l.told("bad")
	})
}

func TestCheckFiles(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	c := DefaultConfig()
	c.Replicas = []ReplicaConfig{{URL: "http://gpu:1"}}
	c.Models = []ModelConfig{{Name: "a", Tokenizer: dir, ChatTemplate: file}, {Name: "b", Tokenizer: file}, {Name: "c", Tokenizer: "/nowhere", ChatTemplate: dir},
		{Name: "d", Tokenizer: "org/absent"}}
	err := c.Check()
	var list Problems
	errors.As(err, &list)
	want := []string{
		"models[1].tokenizer: " + file + " is not a directory; want the one that holds tokenizer.json",
		"models[2].tokenizer: cannot be read: stat /nowhere: no such file or directory",
		"models[2].chat_template: cannot be read: read " + dir + ": is a directory",
	}
	if !slices.Equal(list, want) {
		t.Errorf("got %q", list)
	}
}
