package agent

import (
	"slices"

	"github.com/inferrail/inferrail/policy"
)

// leastSamples is how many observations make an estimate that is passed on.
const leastSamples = 20

// speeds are those that some replicas have proved to have, and the ones among
// them of which the coefficients can be told apart.
type speeds struct{ all, sure []policy.Speed }

func (s *speeds) add(e *policy.Estimate) {
	s.all = append(s.all, e.Speed)
	if e.Determined {
		s.sure = append(s.sure, e.Speed)
	}
}

func (s *speeds) median() policy.Speed {
	if len(s.sure) > 0 {
		return policy.MedianSpeed(s.sure)
	}
	return policy.MedianSpeed(s.all)
}

// shareSpeeds gives each replica that has no observations the median of those
// that have: of those that serve one of its models, or else of all.
func (f *fleet) shareSpeeds() {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all speeds
	byModel := map[string]*speeds{}
	var lacking []*member
	for _, m := range f.members {
		e := m.replica.Calibration().Estimate()
		if e.Samples == 0 {
			lacking = append(lacking, m)
		}
		if e.Samples < leastSamples {
			continue
		}
		all.add(&e)
		for _, c := range m.models {
			if byModel[c.ID] == nil {
				byModel[c.ID] = new(speeds)
			}
			byModel[c.ID].add(&e)
		}
	}
	if len(all.all) == 0 {
		return
	}
	for _, m := range lacking {
		of := &all
		if i := slices.IndexFunc(m.models, func(c card) bool { return byModel[c.ID] != nil }); i >= 0 {
			of = byModel[m.models[i].ID]
		}
		m.replica.Calibration().SetPrior(of.median())
	}
}
