package agent

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/proxy"
)

// AdmissionConfig says which requests are taken. What a model leaves out is as in
// RoutingConfig.
type AdmissionConfig struct {
	// Mode is one of policy.AdmissionModes.
	Mode string `yaml:"mode"`
	// Budget is the time to first token that a request is granted that does not say
	// (x-inferrail-budget-ms); 0 is no bound.
	Budget time.Duration `yaml:"budget"`
	// Percentile, in percent, of the observed times is compared with the budget;
	// an observation counts for Window.
	Percentile int           `yaml:"percentile"`
	Window     time.Duration `yaml:"window"`
}

// QueueConfig says how many requests of a model wait at one time instead of being
// refused, and for how long each. What a model leaves out is as in RoutingConfig.
type QueueConfig struct {
	Max     int           `yaml:"max"`
	Timeout time.Duration `yaml:"timeout"`
}

// ClassConfig is a class of requests: of those that wait, the classes of the lowest
// rank go first.
type ClassConfig struct {
	Name string `yaml:"name"`
	Rank int    `yaml:"rank"`
}

// setDefaults sets what the configuration file may leave out.
func (c *ClassConfig) setDefaults() { c.Rank = proxy.DefaultRank }

// mostClasses bounds the classes: each is a series for every model.
const mostClasses = 16

// grantOf is what the requests of a model are granted, when they are held back, and in
// which pieces long prompts are computed, and what many begin with ahead.
func (c *Config) grantOf(model string) (a AdmissionConfig, q QueueConfig, hold, pieces, prewarm DurationOrOff) {
	mc := &ModelConfig{}
	if i := slices.IndexFunc(c.Models, func(m ModelConfig) bool { return m.Name == model }); i >= 0 {
		mc = &c.Models[i]
	}
	r := &c.Routing
	a = AdmissionConfig{
		Mode:       cmp.Or(mc.Admission.Mode, r.Admission.Mode),
		Budget:     cmp.Or(mc.Admission.Budget, r.Admission.Budget),
		Percentile: cmp.Or(mc.Admission.Percentile, r.Admission.Percentile),
		Window:     cmp.Or(mc.Admission.Window, r.Admission.Window),
	}
	q = QueueConfig{cmp.Or(mc.Queue.Max, r.Queue.Max), cmp.Or(mc.Queue.Timeout, r.Queue.Timeout)}
	return a, q, cmp.Or(mc.Hold, r.Hold), cmp.Or(mc.Pieces, r.Pieces), cmp.Or(mc.Prewarm, r.Prewarm)
}

// grant sets what the requests of m are granted, which has its policy. was is the model in the snapshot
// before, nil for none: what was observed of it is kept.
func (c *Config) grant(m, was *proxy.Model) {
	a, q, hold, pieces, prewarm := c.grantOf(m.Name)
	mode, _ := policy.ParseAdmissionMode(a.Mode)
	rules := policy.AdmissionRules{Mode: mode, Percentile: float64(a.Percentile) / 100, Window: a.Window}
	if was != nil && was.Admission != nil {
		m.Admission = was.Admission
		m.Admission.SetRules(rules)
	} else {
		m.Admission = policy.NewAdmission(rules)
	}
	m.Budget = a.Budget
	m.Waiting = proxy.Waiting{Max: q.Max, Timeout: q.Timeout}
	m.Holding = holdingOf(hold, m.Policy)
	m.Pieces = piecesOf(pieces, m.Policy)
	m.Prewarming = prewarmingOf(prewarm, m.Policy)
}

// classesOf are the classes of requests.
func classesOf(c *Config) *proxy.Classes {
	var list []proxy.Class
	for _, k := range c.Classes {
		list = append(list, proxy.Class{Name: k.Name, Rank: k.Rank})
	}
	return proxy.NewClasses(list)
}

func (c *Config) validateAdmission(p *problems) {
	p.admission("routing.admission", &c.Routing.Admission, true)
	p.queue("routing.queue", &c.Routing.Queue, true)
	for i := range c.Models {
		path := fmt.Sprintf("models[%d]", i)
		p.admission(path+".admission", &c.Models[i].Admission, false)
		p.queue(path+".queue", &c.Models[i].Queue, false)
	}
	c.validateClasses(p)
}

// admission checks one section; whole: it must say everything.
func (p *problems) admission(path string, a *AdmissionConfig, whole bool) {
	if whole || a.Mode != "" {
		p.oneOf(path+".mode", a.Mode, policy.AdmissionModes()...)
	}
	if a.Budget < 0 {
		p.add(path+".budget", "%v is negative; leave it out for no bound", a.Budget)
	}
	if n := a.Percentile; n < 1 && (whole || n != 0) || n > 99 {
		p.add(path+".percentile", "%d is outside 1 to 99", n)
	}
	if whole || a.Window != 0 {
		if p.positive(path+".window", a.Window); a.Window < time.Second {
			p.add(path+".window", "%v is below 1s, in which there are too few requests to tell anything", a.Window)
		}
	}
}

func (p *problems) queue(path string, q *QueueConfig, whole bool) {
	if q.Max < 0 {
		p.add(path+".max", "%d is negative; 0 is that none waits", q.Max)
	}
	if whole || q.Timeout != 0 {
		p.positive(path+".timeout", q.Timeout)
	}
}

func (c *Config) validateClasses(p *problems) {
	if n := len(c.Classes); n > mostClasses {
		p.add("classes", "are %d; at most %d are taken", n, mostClasses)
	}
	known := map[string]string{proxy.DefaultClass: ""} // -> path
	names := []string{proxy.DefaultClass}
	for i, k := range c.Classes {
		path := fmt.Sprintf("classes[%d]", i)
		switch {
		case k.Name == "":
			p.add(path+".name", "is missing; want the name that requests give in x-inferrail-priority")
		case strings.ContainsFunc(k.Name, func(c rune) bool { return c <= ' ' || c >= 0x7f }):
			p.add(path+".name", "%q has a blank or a character that is not ASCII", k.Name)
		case known[k.Name] != "":
			p.add(path+".name", "%q is already %s", k.Name, known[k.Name])
		default:
			if _, ok := known[k.Name]; !ok {
				names = append(names, k.Name)
			}
			known[k.Name] = path + ".name"
		}
		if n := k.Rank; n < -mostRank || n > mostRank {
			p.add(path+".rank", "%d is outside %d to %d", n, -mostRank, mostRank)
		}
	}
	for i, k := range c.Server.APIKeys {
		if _, ok := known[k.Class]; !ok && k.Class != "" {
			p.oneOf(fmt.Sprintf("server.api_keys[%d].class", i), k.Class, names...)
		}
	}
}

// mostRank bounds ranks.
const mostRank = 1000
