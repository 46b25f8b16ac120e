package virtual

import (
	"context"

	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/simulator/workload"
)

// Shared returns how the default policy would serve the requests of a workload if the
// fleet's engines kept nothing of their own, and found in one store whatever was in a request
// or an answer before: at once, and without need of room for it or for what they compute. One
// agent sees all, and takes all that an engine could ever serve. chains are those of w in the
// engines' blocks, the smallest if there are several sizes.
//
// It parts what lies between the default and the Bound. As far as this it is what caches cost
// that are several, forget, and have room for so many sequences at one time. The rest is that
// engines compute in steps, with a token of each answer in every one, which no choice takes
// away. It is no proven bound: by luck, or where nothing comes of caches, another policy may be
// as good or better.
func (f *Fleet) Shared(ctx context.Context, w *workload.Workload, chains *Chains, o Options) (*Outcome, error) {
	fleet := *f
	// Of prefixes that all find there is nothing to compute ahead.
	fleet.Agents, fleet.Prewarm, fleet.Admission = 1, 0, Admission{}
	o.stored = chains.seen()
	for k := range o.stored {
		o.stored[k] *= chains.size
	}
	return fleet.Serve(ctx, w, policy.NewCostModel(), o)
}
