package virtual

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
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
	// Events lets the agents follow the KV events of the engines that have any, vLLM's
	// and SGLang's, which reach them EventLag after they were told. Without it they go by what they have sent, and by what
	// answers say was cached.
	Events   bool
	EventLag time.Duration
	// Lag is how long everything takes from an agent to an engine, and back.
	Lag time.Duration
	// Hold is the lead of policy.Holding, by which agents hold requests back, where the
	// policy is one that they are held back with; 0 sends all at once.
	Hold time.Duration
	// Pieces is the length of policy.Pieces, by which agents let long prompts be computed in
	// pieces, where the policy is one that they are with and the engine tells of its cache; 0
	// sends all whole.
	Pieces time.Duration
	// Prewarm is the length of policy.Prewarming, by which agents let idle engines compute
	// prefixes ahead; 0 for none.
	Prewarm time.Duration
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

// configs are the engines' configurations, with what they leave open filled in.
func (f *Fleet) configs() ([]simulator.Config, error) {
	if len(f.Engines) == 0 {
		return nil, errors.New("a fleet has at least one replica")
	}
	list := make([]simulator.Config, len(f.Engines))
	for i, c := range f.Engines {
		if i > 0 && reflect.DeepEqual(c, f.Engines[i-1]) {
			list[i] = list[i-1]
			continue
		}
		c.KVEvents = simulator.KVEvents{}
		if f.Events && (c.Engine == "" || c.Engine == "vllm" || c.Engine == "sglang") {
			c.KVEvents.Endpoint = "tcp://127.0.0.1:0" // it is never opened
		}
		var err error
		if list[i], err = c.Completed(); err != nil {
			return nil, fmt.Errorf("replica %d: %w", i, err)
		}
	}
	return list, nil
}

// Blocks returns how large a block is by which the hits of a fleet are counted, the
// smallest that an engine has, and how many of them all have room for, the host's memory
// included. Without WholeBlocks the most hits of such blocks are only near what can be.
func (f *Fleet) Blocks() (size, count int, err error) {
	configs, err := f.configs()
	if err != nil {
		return 0, 0, err
	}
	tokens := 0
	for i := range configs {
		c := &configs[i]
		if size == 0 || c.BlockSize < size {
			size = c.BlockSize
		}
		// One block is not for tokens.
		tokens += (c.NumGPUBlocks - 1 + c.HostBlocks) * c.BlockSize
	}
	return size, tokens / size, nil
}

// WholeBlocks reports that all engines share whole blocks, as vLLM and SGLang do, so that
// what is reckoned by blocks is exact. The others share single tokens: up to a block of
// each prompt more than blocks tell.
func (f *Fleet) WholeBlocks() bool {
	return !slices.ContainsFunc(f.Engines, func(c simulator.Config) bool {
		return c.Engine == "tgi" || c.Engine == "llamacpp" || c.Engine == "ollama"
	})
}

// agents is how many there are.
func (f *Fleet) agents() int { return max(f.Agents, 1) }
