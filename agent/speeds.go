package agent

import (
	"time"

	"github.com/inferrail/inferrail/policy"
)

// shareSpeeds lets replicas of which little was observed have the speeds of the others
// (policy.ShareSpeeds), and tells the log of those that have changed.
func (f *fleet) shareSpeeds() {
	f.mu.Lock()
	defer f.mu.Unlock()
	peers := make([]*policy.Peer, len(f.members))
	for i, m := range f.members {
		peers[i] = &m.peer
		m.peer.Standing, m.peer.Models = m.replica.Standing(), names(m.models)
	}
	policy.ShareSpeeds(peers, time.Now())
	typical := policy.Prefill(1000, 1000)
	for _, m := range f.members {
		e := &m.peer.Estimate
		f.tellChangeLocked(m, e, e.Speed.Time(typical))
	}
}

// toldFrom is by how much a replica must have become slower or faster for a line in
// the log.
const toldFrom = 1.5

// tellChangeLocked logs that a replica has become slower or faster as a whole. now is
// how many seconds a prompt of 1,000 tokens takes there.
func (f *fleet) tellChangeLocked(m *member, e *policy.Estimate, now float64) {
	switch {
	case e.Samples < policy.EnoughSamples:
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
