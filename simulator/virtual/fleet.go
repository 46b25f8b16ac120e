package virtual

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/simulator"
	"github.com/inferrail/inferrail/simulator/workload"
)

// Fleet is what serves a workload: engines, and agents before them that see all of
// them. It is made once and shared by several runs, which do not change it. The zero
// value has no engine, which nothing can be served with.
type Fleet struct {
	// Engines are how each is set up, by number. Of a Config what belongs to HTTP is
	// not looked at.
	Engines []simulator.Config
	// Throttles make engines slower for a while, beside those of the workload.
	Throttles []workload.Throttle
	// Agents is how many there are, which take the requests in turns; 0 is one. Each
	// knows of the others' only what the engines report.
	Agents int
	// Events lets the agents follow the engines' KV events, which reach them EventLag
	// after they were told. Without it they go by what they have sent, and by what
	// answers say was cached.
	Events   bool
	EventLag time.Duration
	// Lag is how long everything takes from an agent to an engine, and back.
	Lag time.Duration
	// Admission decides what is taken, as an agent is configured to; Budget is the
	// time to first token that a request is granted, 0 for any.
	Admission Admission
}

// Admission is what an agent does with requests that are too many. The zero value
// takes them all.
type Admission struct {
	// Mode is one of policy.AdmissionModes; "" takes all.
	Mode string
	// Budget is the time to first token that each request grants, 0 for any.
	Budget time.Duration
	// Queue is how many requests wait at one time instead of being refused, at each
	// agent, and Timeout for how long each: 0 is 10 s.
	Queue   int
	Timeout time.Duration
}

// Check says what is wrong with it.
func (a *Admission) Check() error {
	if a.Mode == "" {
		return nil
	}
	_, err := policy.ParseAdmissionMode(a.Mode)
	return err
}

// What a Config has where it says nothing.
const (
	usualBlock  = 16
	usualBlocks = 16384
)

func blockSize(c *simulator.Config) int { return cmp.Or(c.BlockSize, usualBlock) }
func capacity(c *simulator.Config) int  { return cmp.Or(c.NumGPUBlocks, usualBlocks) }

// engines makes the engines anew.
func (f *Fleet) engines() ([]*simulator.Engine, error) {
	if len(f.Engines) == 0 {
		return nil, errors.New("a fleet has at least one replica")
	}
	list := make([]*simulator.Engine, len(f.Engines))
	for i, c := range f.Engines {
		c.KVEvents = simulator.KVEvents{}
		if f.Events {
			c.KVEvents.Endpoint = "tcp://127.0.0.1:0" // it is never opened
		}
		e, err := c.NewEngine()
		if err != nil {
			return nil, fmt.Errorf("replica %d: %w", i, err)
		}
		list[i] = e
	}
	return list, nil
}

// agents is how many there are.
func (f *Fleet) agents() int { return max(f.Agents, 1) }
