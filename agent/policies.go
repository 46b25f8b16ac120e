package agent

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/goccy/go-yaml"

	"github.com/inferrail/inferrail/policy"
)

// Weights are what a policy is given in place of its defaults, by name.
type Weights map[string]float64

// ShadowConfig is a policy that chooses beside a model's own, without effect. In
// the configuration file the name of a policy may stand for the whole.
type ShadowConfig struct {
	// Name tells it from the others of its model, in metrics and on debug pages;
	// that of its policy when empty.
	Name string `yaml:"name"`
	// Policy is which one, and Weights are its weights.
	Policy  string  `yaml:"policy"`
	Weights Weights `yaml:"weights"`
}

// label is what the shadow is called.
func (s *ShadowConfig) label() string {
	if s.Name == "" {
		return s.Policy
	}
	return s.Name
}

// chosenBy is how the replicas of a model are chosen: the name of its policy and
// its weights. A model has the weights of routing where it says nothing of its
// policy, or names the same; its own go first.
func (c *Config) chosenBy(m *ModelConfig) (name string, weights Weights) {
	name = c.Routing.DefaultPolicy
	if m.Policy != "" {
		name = m.Policy
	}
	weights = Weights{}
	if name == c.Routing.DefaultPolicy {
		maps.Copy(weights, c.Routing.Weights)
	}
	maps.Copy(weights, m.Weights)
	return name, weights
}

// shadowsOf are the shadows of a model: those of routing, and its own.
func (c *Config) shadowsOf(m *ModelConfig) []ShadowConfig {
	return slices.Concat(c.Routing.Shadows, m.Shadows)
}

// sessionHeader is the header by which a model's clients name sessions.
func (c *Config) sessionHeader(m *ModelConfig) string {
	if m.SessionHeader != "" {
		return m.SessionHeader
	}
	return c.Routing.SessionHeader
}

func (c *Config) validateRouting(p *problems) {
	r := &c.Routing
	p.policy("routing.default_policy", "routing.weights", r.DefaultPolicy, r.Weights)
	p.shadows("routing.shadows", r.Shadows, nil)
	p.header("routing.session_header", r.SessionHeader)
	for i := range c.Models {
		m := &c.Models[i]
		path := fmt.Sprintf("models[%d]", i)
		if m.Policy != "" || len(m.Weights) > 0 {
			name, _ := c.chosenBy(m)
			p.policy(path+".policy", path+".weights", name, m.Weights)
		}
		p.shadows(path+".shadows", m.Shadows, r.Shadows)
		p.header(path+".session_header", m.SessionHeader)
	}
}

// policy checks a policy's name, and the weights that are given for it in one place.
func (p *problems) policy(path, weightsPath, name string, weights Weights) {
	if !slices.Contains(policy.Names(), name) {
		p.oneOf(path, name, policy.Names()...)
		return
	}
	if _, err := policy.New(name, weights); err != nil {
		p.add(weightsPath, "%v", err)
	}
}

// shadows checks a list of shadows; others are those that the model has beside
// them.
func (p *problems) shadows(path string, list, others []ShadowConfig) {
	labels := map[string]bool{}
	for i := range others {
		labels[others[i].label()] = true
	}
	for i := range list {
		s := &list[i]
		each := fmt.Sprintf("%s[%d]", path, i)
		if s.Policy == "" {
			p.add(each+".policy", "is missing; want %s", strings.Join(policy.Names(), ", "))
			continue
		}
		p.policy(each+".policy", each+".weights", s.Policy, s.Weights)
		if labels[s.label()] {
			p.add(each+".name", "%q is the name of another shadow of the model; give it one of its own", s.label())
		}
		labels[s.label()] = true
	}
}

// header checks the name of a header (RFC 9110 section 5.6.2).
func (p *problems) header(path, name string) {
	const marks = "!#$%&'*+-.^_`|~"
	if strings.ContainsFunc(name, func(c rune) bool {
		return (c < '0' || c > '9') && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && !strings.ContainsRune(marks, c)
	}) {
		p.add(path, "%q is not the name of a header; want such as x-session-id", name)
	}
}

// fillWeights sets v from keys and numbers.
func (p *problems) fillWeights(path string, v reflect.Value, in any) {
	m, ok := in.(yaml.MapSlice)
	if !ok {
		p.add(path, "is %s; want names and numbers, such as {own_work: 2}", kind(path, in))
		return
	}
	weights := Weights{}
	for _, item := range m {
		name := fmt.Sprint(item.Key)
		switch n := item.Value.(type) {
		case float64:
			weights[name] = n
		case nil: // "name:" with nothing behind it leaves the default
		default:
			whole, ok := integer(n)
			if !ok {
				p.add(path+"."+name, "is %s; want a number", kind(path, n))
				continue
			}
			weights[name] = float64(whole)
		}
	}
	v.Set(reflect.ValueOf(weights))
}

// policies are those that the models of a fleet have. They are kept from one
// snapshot to the next, for as long as they are configured in the same way,
// because a shadow counts how it has done. Its owner sees to it that one call
// runs at a time. The zero value has none.
type policies struct {
	models map[string]*chosen // by the model's name
}

// chosen is what one model has.
type chosen struct {
	name    string
	weights Weights
	specs   []ShadowConfig

	live          policy.Policy
	shadows       []*policy.Shadow // as specs
	sessionHeader string
}

// of are the policies of a model. The configuration is valid.
func (p *policies) of(cfg *Config, model string) *chosen {
	mc := &ModelConfig{}
	if i := slices.IndexFunc(cfg.Models, func(m ModelConfig) bool { return m.Name == model }); i >= 0 {
		mc = &cfg.Models[i]
	}
	name, weights := cfg.chosenBy(mc)
	next := &chosen{name: name, weights: weights, specs: cfg.shadowsOf(mc), sessionHeader: cfg.sessionHeader(mc)}
	was := p.models[model]
	if was == nil || was.name != name || !maps.Equal(was.weights, weights) {
		// What shadows have counted was beside another policy.
		next.live, _ = policy.New(name, weights)
		was = &chosen{}
	} else {
		next.live = was.live
	}
	for _, spec := range next.specs {
		same := func(s ShadowConfig) bool {
			return s.label() == spec.label() && s.Policy == spec.Policy && maps.Equal(s.Weights, spec.Weights)
		}
		if i := slices.IndexFunc(was.specs, same); i >= 0 {
			next.shadows = append(next.shadows, was.shadows[i])
			continue
		}
		shadow, _ := policy.New(spec.Policy, spec.Weights)
		next.shadows = append(next.shadows, &policy.Shadow{Policy: shadow, Label: spec.Name})
	}
	if p.models == nil {
		p.models = map[string]*chosen{}
	}
	p.models[model] = next
	return next
}

// keep forgets the models that are not served any more.
func (p *policies) keep(served func(model string) bool) {
	maps.DeleteFunc(p.models, func(model string, _ *chosen) bool { return !served(model) })
}

// PolicyNames are the names of all policies.
func PolicyNames() []string { return policy.Names() }
