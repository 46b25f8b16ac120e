package virtual

import (
	"context"

	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/simulator/workload"
)

// Shared returns how the default policy would serve the requests of a workload if the
// fleet's engines kept nothing of their own, and found in one store whatever any of them was
// ever asked for: at once, and with room for all. Prompts are sent whole. chains are those of w
// in the engines' blocks.
//
// It tells apart what lies between a policy and the Bound. To here it is what caches cost
// that are several and forget; the rest is what engines do that compute in steps, with a
// token of each answer in every one, and no choice takes it away. So it is also the most that
// a store would bring which engines share over a network. It is no proven bound: with so
// little between the replicas, another choice may by luck be better.
func (f *Fleet) Shared(ctx context.Context, w *workload.Workload, chains *Chains, o Options) (*Outcome, error) {
	fleet := *f
	// One agent sees all, and all are served, as in the Bound. There is nothing to compute
	// ahead.
	fleet.Agents, fleet.Pieces, fleet.Prewarm, fleet.Admission = 1, 0, 0, Admission{}
	o.found = chains.seen()
	for k := range o.found {
		o.found[k] *= chains.size
	}
	return fleet.Serve(ctx, w, policy.NewCostModel(), o)
}
