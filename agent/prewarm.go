package agent

import (
	"fmt"
	"net/http"
	"time"

	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/proxy"
)

// The bounds of RoutingConfig.Prewarm: of less most is what a request costs by itself, and
// with more whoever comes meanwhile waits for long.
const (
	leastPrewarm = DurationOrOff(20 * time.Millisecond)
	mostPrewarm  = DurationOrOff(10 * time.Second)
)

// prewarmingOf is what is computed ahead by where p chooses.
func prewarmingOf(prewarm DurationOrOff, p policy.Policy) policy.Prewarming {
	return policy.Prewarming{Length: prewarm.seconds()}.With(p)
}

func (c *Config) validatePrewarm(p *problems) {
	const off = "computes nothing ahead"
	p.within("routing.prewarm", c.Routing.Prewarm, leastPrewarm, mostPrewarm, off)
	for i := range c.Models {
		p.within(fmt.Sprintf("models[%d].prewarm", i), c.Models[i].Prewarm, leastPrewarm, mostPrewarm, off)
	}
}

// prewarm shows what prompts of each model begin with, or of the one that ?model= names,
// what was lost by that where it is not cached, and which replicas compute it ahead.
func (ad *admin) prewarm(w http.ResponseWriter, r *http.Request) {
	fleet, only := ad.agent.fleet.current(), r.URL.Query().Get("model")
	list := []proxy.PrewarmReport{}
	for _, m := range fleet.Listed {
		if only == "" || fleet.Models[only] == m {
			list = append(list, ad.agent.proxy.Prewarm(m, time.Now()))
		}
	}
	ad.write(w, list)
}
