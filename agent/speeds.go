package agent

import (
	"slices"
	"time"

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

// unobserved is how many first tokens the others of a fleet must have told something
// while a replica, slower than they are, told nothing, until it is tried whether it
// is slow still. So at most one request of as many is spent on that.
const unobserved = 200

// shareSpeeds gives each replica that has no observations, or a few, the median of
// those that have: of those that serve one of its models, or else of all, or what
// nothing is known of; then whole answers tell whether it is slower. One that is slow
// and has had none for long is supposed to be as fast as the others of its model, for
// one request.
func (f *fleet) shareSpeeds() {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all speeds
	byModel := map[string]*speeds{}
	var lacking []*member
	total := 0
	estimates := make([]policy.Estimate, len(f.members))
	for i, m := range f.members {
		e := m.replica.Calibration().Estimate()
		estimates[i], total = e, total+e.Samples
		if e.Samples < leastSamples {
			lacking = append(lacking, m)
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
	for _, m := range lacking {
		if i := slices.IndexFunc(m.models, func(c card) bool { return byModel[c.ID] != nil }); i >= 0 {
			m.replica.Calibration().SetPrior(byModel[m.models[i].ID].median())
		} else {
			m.replica.Calibration().SetPrior(all.median().Times(f.slownessLocked(m)))
		}
	}
	now, typical := time.Now(), policy.Prefill(1000, 1000)
	for i, m := range f.members {
		e := &estimates[i]
		f.tellChangeLocked(m, e, e.Speed.Time(typical))
		if others := total - e.Samples; e.Samples != m.samples || others < m.others {
			m.samples, m.others = e.Samples, others
		}
		if ahead, _ := m.replica.Backlog().Ahead(&e.Speed, now); e.Samples == 0 || total-e.Samples-m.others < unobserved || ahead.Prompts > 0 {
			continue
		}
		var others speeds
		for k, other := range f.members {
			if k != i && estimates[k].Samples >= leastSamples && other.sharesModel(m) {
				others.add(&estimates[k])
			}
		}
		if usual := others.median(); len(others.all) > 0 && usual.Time(typical) < e.Speed.Time(typical) {
			m.replica.Calibration().Suppose(usual)
		}
	}
}

// slownessLocked is how slow a replica is of whose model no first token was seen.
func (f *fleet) slownessLocked(m *member) float64 {
	var others []policy.FilterState
	for _, other := range f.members {
		if other != m && other.sharesModel(m) {
			others = append(others, other.replica.Filter().State())
		}
	}
	return policy.Slowness(m.replica.Filter().State(), others)
}

// toldFrom is by how much a replica must have become slower or faster for a line in
// the log.
const toldFrom = 1.5

// tellChangeLocked logs that a replica has become slower or faster as a whole. now is
// how many seconds a prompt of 1,000 tokens takes there.
func (f *fleet) tellChangeLocked(m *member, e *policy.Estimate, now float64) {
	switch {
	case e.Samples < leastSamples:
		return
	case m.told == 0:
	case e.Changes == m.changes || now < m.told*toldFrom && now > m.told/toldFrom:
		return
	case now > m.told:
		f.log.Warn("replica has become slower", "replica", m.id, "url", m.url, "times", thousandths(now/m.told), "ms_for_1000_tokens", thousandths(now*1e3))
	default:
		f.log.Info("replica has become faster", "replica", m.id, "url", m.url, "times", thousandths(m.told/now), "ms_for_1000_tokens", thousandths(now*1e3))
	}
	m.told, m.changes = now, e.Changes
}

// sharesModel reports that both serve a model.
func (m *member) sharesModel(other *member) bool {
	return slices.ContainsFunc(m.models, func(c card) bool {
		return slices.ContainsFunc(other.models, func(o card) bool { return o.ID == c.ID })
	})
}
