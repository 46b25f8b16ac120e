package bench

import (
	"slices"

	"github.com/inferrail/inferrail/simulator/workload"
)

// hue is the colour of one policy, on white and on black.
type hue struct{ light, dark string }

// look is how a policy is drawn wherever it is.
type look struct {
	policy string
	// dash is an SVG dash pattern, "" for a whole line: lines that only a colour
	// tells apart are one line to some.
	dash string
}

// looks are the policies in the order in which every chart and table names them:
// the default, what it is to be compared with, what chooses without knowing, and
// what no policy reaches. The last two are for a policy that has no place here and
// for the bound.
var looks = []look{
	{policy: "cost_model"},
	{policy: "lmetric"},
	{policy: "kv_aware", dash: "7 3"},
	{policy: "nlms", dash: "2 3"},
	{policy: "prefix_hash"},
	{policy: "sticky", dash: "7 3"},
	{policy: "least_request"},
	{policy: "p2c", dash: "2 3"},
	{policy: "round_robin"},
	{policy: "random", dash: "7 3"},
	{policy: "", dash: "4 2 1 2"},
	{policy: boundName, dash: "5 4"},
}

// hues are the colours of looks, after those of Okabe and Ito, which people who confuse
// red and green tell apart. The default's is the strongest. Those for dark surroundings
// are lighter.
var hues = []hue{
	{"#0059b8", "#58a6ff"},
	{"#d55e00", "#f0883e"},
	{"#c9930a", "#e3b341"},
	{"#7d5fb2", "#b89cf0"},
	{"#009e73", "#3fc79a"},
	{"#4f9e2f", "#8ccf6a"},
	{"#b5548a", "#e08fbd"},
	{"#a07a5c", "#c9a98c"},
	{"#6b7785", "#a9b4bf"},
	{"#9aa5b0", "#7d8893"},
	{"#3f8fa8", "#6fbdd4"},
	{"#1b2530", "#e4e9ee"},
}

// boundName is what charts and tables call Comparison.Bound.
const boundName = "bound"

// defaultPolicy is the one that charts emphasise.
const defaultPolicy = "cost_model"

// lookOf is the place of a policy in looks.
func lookOf(policy string) int {
	if i := slices.IndexFunc(looks, func(l look) bool { return l.policy == policy }); i >= 0 {
		return i
	}
	return len(looks) - 2
}

// inOrder returns runs in the order of looks.
func inOrder(runs []workload.Summary) []*workload.Summary {
	ordered := make([]*workload.Summary, len(runs))
	for i := range runs {
		ordered[i] = &runs[i]
	}
	slices.SortStableFunc(ordered, func(a, b *workload.Summary) int { return lookOf(a.Policy) - lookOf(b.Policy) })
	return ordered
}
