package agent

import (
	"slices"

	"github.com/inferrail/inferrail/policy"
)

// speedSamples is how many observations make an estimate that is passed on.
const speedSamples = 20

// shareSpeeds gives each replica that has no observations the median of those
// that have: of those that serve one of its models, or else of all.
func (f *fleet) shareSpeeds() {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all []policy.Speed
	byModel := map[string][]policy.Speed{}
	var lacking []*member
	for _, m := range f.members {
		e := m.replica.Calibration().Estimate()
		if e.Samples == 0 {
			lacking = append(lacking, m)
		}
		if e.Samples < speedSamples {
			continue
		}
		all = append(all, e.Speed)
		for _, c := range m.models {
			byModel[c.ID] = append(byModel[c.ID], e.Speed)
		}
	}
	if len(all) == 0 {
		return
	}
	for _, m := range lacking {
		speeds := all
		if i := slices.IndexFunc(m.models, func(c card) bool { return len(byModel[c.ID]) > 0 }); i >= 0 {
			speeds = byModel[m.models[i].ID]
		}
		m.replica.Calibration().SetPrior(policy.MedianSpeed(speeds))
	}
}
