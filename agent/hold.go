package agent

import (
	"fmt"
	"time"

	"github.com/inferrail/inferrail/policy"
)

// The bounds of RoutingConfig.Hold: less is a wait for engines that have nothing to do, and
// with more hardly anything is held.
const (
	leastHold = DurationOrOff(time.Millisecond)
	mostHold  = DurationOrOff(10 * time.Second)
)

// holdingOf is what requests are held back by that p chooses for.
func holdingOf(hold DurationOrOff, p policy.Policy) policy.Holding {
	return policy.Holding{Lead: hold.seconds()}.With(p)
}

func (c *Config) validateHold(p *problems) {
	const off = "sends each request at once"
	p.within("routing.hold", c.Routing.Hold, leastHold, mostHold, off)
	for i := range c.Models {
		p.within(fmt.Sprintf("models[%d].hold", i), c.Models[i].Hold, leastHold, mostHold, off)
	}
}
