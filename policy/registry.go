package policy

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
)

// Default is the policy where none is configured.
const Default = "cost_model"

// kind is a policy that New can make.
type kind struct {
	name    string
	weights []weight
	// make returns the policy with these weights: one number for each of weights,
	// in their order.
	make func(w []float64) Policy
}

// weight is a number of a policy that can be configured: what it is unless
// something else is given, and between which bounds that makes sense.
type weight struct {
	name        string
	value       float64
	least, most float64
}

// kinds are all policies, by name.
var kinds = []kind{
	{"cost_model", costModelWeights(), newCostModel},
	{"kv_aware", kvAwareWeights, newKVAware},
	{"least_request", nil, func([]float64) Policy { return LeastRequest{} }},
	{"lmetric", nil, func([]float64) Policy { return LMetric{} }},
	{"nlms", nlmsWeights, newNLMS},
	{"p2c", nil, func([]float64) Policy { return P2C{} }},
	{"prefix_hash", prefixHashWeights, newPrefixHash},
	{"random", nil, func([]float64) Policy { return Random{} }},
	{"round_robin", nil, func([]float64) Policy { return RoundRobin{} }},
	{"sticky", stickyWeights, newSticky},
}

// costModelWeights are the fields of a CostModel, in their order.
func costModelWeights() []weight {
	m, inf := NewCostModel(), math.Inf(1)
	return []weight{
		{"own_work", m.OwnWork, 0, inf},
		{"own_work_busy", m.OwnWorkBusy, 0, inf},
		{"own_work_long", m.OwnWorkLong, 0, inf},
		{"load_cpu", m.LoadCPU, 0, inf},
		{"load_disk", m.LoadDisk, 0, inf},
		{"crowd", m.Crowd, 0, inf},
		{"company", m.Company, 0, inf},
		{"approximate", m.Approximate, 0, 1},
		{"bound", m.Bound, 1, inf},
		{"overload", m.Overload, 0, inf},
		{"yield", m.Yield, 0, inf},
		{"leave", m.Leave, 0, inf},
		{"kv_limit", m.KVLimit, 0, inf},
		{"kv_pressure", m.KVPressure, 0, inf},
		{"slack", m.Slack, 0, inf},
		{"slack_share", m.SlackShare, 0, inf},
	}
}

func newCostModel(w []float64) Policy {
	return &CostModel{w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11], w[12], w[13], w[14], w[15]}
}

// New returns the policy of a name, with the weights that are given in place of
// its defaults. An error tells all that is wrong, and which names or weights there
// are.
func New(name string, weights map[string]float64) (Policy, error) {
	k := kindOf(name)
	if k == nil {
		return nil, fmt.Errorf("no policy %q; there are %s", name, strings.Join(Names(), ", "))
	}
	values := make([]float64, len(k.weights))
	for i, w := range k.weights {
		values[i] = w.value
	}
	var problems []string
	for _, given := range slices.Sorted(maps.Keys(weights)) {
		i := slices.IndexFunc(k.weights, func(w weight) bool { return w.name == given })
		if i < 0 {
			problems = append(problems, fmt.Sprintf("no weight %q; %s", given, k.known()))
			continue
		}
		w, v := k.weights[i], weights[given]
		// NaN is not between any bounds.
		if !(v >= w.least && v <= w.most) || math.IsInf(v, 0) {
			problems = append(problems, fmt.Sprintf("weight %s is %v; want %s", given, v, w.bounds()))
		}
		values[i] = v
	}
	if problems != nil {
		return nil, fmt.Errorf("policy %s: %s", name, strings.Join(problems, "; "))
	}
	return k.make(values), nil
}

// Names are the names that New takes, in alphabetical order.
func Names() []string {
	names := make([]string, len(kinds))
	for i, k := range kinds {
		names[i] = k.name
	}
	return names
}

// Weights are the weights of a policy and what they are unless others are given:
// none of a policy that has none, and nil when there is no such policy.
func Weights(name string) map[string]float64 {
	k := kindOf(name)
	if k == nil {
		return nil
	}
	weights := make(map[string]float64, len(k.weights))
	for _, w := range k.weights {
		weights[w.name] = w.value
	}
	return weights
}

func kindOf(name string) *kind {
	for i := range kinds {
		if kinds[i].name == name {
			return &kinds[i]
		}
	}
	return nil
}

// known tells the weights there are, for a message.
func (k *kind) known() string {
	if len(k.weights) == 0 {
		return "it has none"
	}
	var all []string
	for _, w := range k.weights {
		all = append(all, fmt.Sprintf("%s %v", w.name, w.value))
	}
	return "its weights and their defaults are " + strings.Join(all, ", ")
}

// bounds tells what the weight may be, for a message.
func (w *weight) bounds() string {
	if math.IsInf(w.most, 1) {
		return fmt.Sprintf("a number from %v up", w.least)
	}
	return fmt.Sprintf("a number from %v to %v", w.least, w.most)
}
