package agent

import (
	"fmt"
	"math"
	"reflect"
	"time"

	"github.com/inferrail/inferrail/policy"
)

// Hold is how much work a replica has before it, in time, when requests are held back
// until it has less. In the configuration file it is a duration, or off. The zero value
// is that nothing was said: a model is as RoutingConfig says then, and that is off.
type Hold time.Duration

// holdOff sends each request at once.
const holdOff Hold = math.MinInt64

// The bounds of a Hold: less is a wait for engines that have nothing to do, and with
// more hardly anything is held.
const (
	leastHold = Hold(time.Millisecond)
	mostHold  = Hold(10 * time.Second)
)

// String is as it is written.
func (h Hold) String() string {
	switch h {
	case 0:
		return ""
	case holdOff:
		return "off"
	}
	return time.Duration(h).String()
}

// rule is what requests are held back by that p chooses for.
func (h Hold) rule(p policy.Policy) policy.Holding {
	return policy.Holding{Lead: max(time.Duration(h), 0).Seconds()}.With(p)
}

func (p *problems) fillHold(path string, v reflect.Value, in any) {
	if off, ok := in.(bool); ok && !off || in == "off" { // as YAML 1.1 reads off, and as it is
		v.Set(reflect.ValueOf(holdOff))
		return
	}
	s, ok := in.(string)
	d, err := time.ParseDuration(s)
	switch {
	case !ok || err != nil:
		p.add(path, "is %s; want a duration such as 50ms, or off", kind(path, in))
	case d == 0:
		v.Set(reflect.ValueOf(holdOff))
	default:
		v.SetInt(int64(d))
	}
}

func (c *Config) validateHold(p *problems) {
	check := func(path string, h Hold) {
		if h != 0 && h != holdOff && (h < leastHold || h > mostHold) {
			p.add(path, "%v is outside %v to %v; off sends each request at once", h, leastHold, mostHold)
		}
	}
	check("routing.hold", c.Routing.Hold)
	for i := range c.Models {
		check(fmt.Sprintf("models[%d].hold", i), c.Models[i].Hold)
	}
}
