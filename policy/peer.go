package policy

import (
	"slices"
	"strings"
	"time"
)

// EnoughSamples is how many observations make an estimate that is passed on.
const EnoughSamples = 20

// Unobserved is how many first tokens the others of a fleet must have told something
// while a replica, slower than they are, told nothing, until it is tried whether it
// is slow still. So at most one request of as many is spent on that.
const Unobserved = 200

// Peer is a replica among others whose speeds may be alike. The agent has one for
// each member, and the simulator one for each engine; it is used by ShareSpeeds, on
// one goroutine at a time. The zero value must be given a Standing.
type Peer struct {
	Standing *Standing
	// Models are the names of what it serves, the first of which is asked first.
	Models []string
	// Estimate is what was known of its speed when ShareSpeeds was last called.
	Estimate Estimate

	// When samples was last seen to change, which is how many observations of its
	// speed there are, the others had others.
	samples, others int
}

// sharesModel reports that both serve a model.
func (p *Peer) sharesModel(other *Peer) bool {
	return slices.ContainsFunc(p.Models, func(name string) bool { return slices.Contains(other.Models, name) })
}

// pace is the speeds that some peers have proved to have, and the ones among them of
// which the coefficients can be told apart.
type pace struct{ all, sure spread }

func (s *pace) add(e *Estimate) {
	s.all.add(e.Speed)
	if e.Determined {
		s.sure.add(e.Speed)
	}
}

// median is called when all have been added. without, if not nil, is one of them that
// is left out; ok is false when there is no other.
func (s *pace) median(without *Estimate) (usual Speed, ok bool) {
	var left *Speed
	if without != nil {
		left = &without.Speed
	}
	if without != nil && !without.Determined {
		if usual, ok = s.sure.median(nil); ok {
			return usual, true
		}
	} else if usual, ok = s.sure.median(left); ok {
		return usual, true
	}
	return s.all.median(left)
}

// spread are the coefficients of some speeds, in order once sorted is set.
type spread struct {
	of     [3][]float64
	sorted bool
}

func (s *spread) add(v Speed) {
	if !v.sound() {
		return
	}
	for i, c := range [3]float64{v.A, v.B, v.D} {
		s.of[i] = append(s.of[i], c)
	}
}

// median is the median of each coefficient, DefaultSpeed and false when there is none.
// without, if not nil, is one of the speeds, and does not count;
// those that are no speeds never do.
func (s *spread) median(without *Speed) (Speed, bool) {
	n := len(s.of[0])
	if without != nil && !without.sound() {
		without = nil
	}
	if without != nil {
		n--
	}
	if n <= 0 {
		return DefaultSpeed, false
	}
	if !s.sorted {
		for _, c := range s.of {
			slices.Sort(c)
		}
		s.sorted = true
	}
	var out [3]float64
	for i, c := range s.of {
		left := len(c)
		if without != nil {
			left, _ = slices.BinarySearch(c, [3]float64{without.A, without.B, without.D}[i])
		}
		at := func(k int) float64 {
			if k >= left {
				k++
			}
			return c[k]
		}
		out[i] = at((n-1)/2)/2 + at(n/2)/2
	}
	return Speed{out[0], out[1], out[2]}, true
}

// kin are those that serve a model: of which enough was observed, and of which a little
// was. The zero value is nobody.
type kin struct {
	known pace
	young spread
}

// optimist is the median of each coefficient, and of two in the middle the lesser one: a
// first prompt may have waited for an engine to warm up, and those that were not tried
// must not be thought slow for that. There is one at least.
func (s *spread) optimist() Speed {
	var out [3]float64
	for i, c := range s.of {
		c = slices.Sorted(slices.Values(c))
		out[i] = c[(len(c)-1)/2]
	}
	return Speed{out[0], out[1], out[2]}
}

// ShareSpeeds gives each peer that has no observations, or a few, the median of
// those that have: of those that serve one of its models, or else of all, or what
// nothing is known of; then whole answers tell whether it is slower. One that is slow
// and has had none for long is supposed to be as fast as the others of its models, for
// one request.
//
// In a fleet that has just begun nobody has enough of them. Then a peer without any goes
// by the few that others of its models have, and while there are none, by how long the
// prompts take already that are under way: what waits, and what has waited since, can
// be told from what it takes to compute only if both are measured alike. So it is called
// some ten times a second: each time counts then.
func ShareSpeeds(peers []*Peer, now time.Time) {
	var all pace
	byModel := map[string]*kin{}
	var lacking []*Peer
	total := 0
	for _, p := range peers {
		p.Estimate = p.Standing.Calibration.Estimate()
		e := &p.Estimate
		total += e.Samples
		few := e.Samples < EnoughSamples
		if few {
			lacking = append(lacking, p)
		} else {
			all.add(e)
		}
		if e.Samples == 0 {
			continue
		}
		for _, name := range p.Models {
			if byModel[name] == nil {
				byModel[name] = new(kin)
			}
			if few {
				byModel[name].young.add(e.Speed)
			} else {
				byModel[name].known.add(e)
			}
		}
	}
	// Those that serve the same have the same others, and themselves.
	key := func(p *Peer) string { return strings.Join(p.Models, "\x00") }
	answers := map[string][]float64{}
	slower := map[string]float64{}
	for _, p := range lacking {
		var young *spread
		usual, ok := DefaultSpeed, false
		for _, name := range p.Models {
			k := byModel[name]
			if k == nil {
				continue
			}
			if usual, ok = k.known.median(nil); ok {
				break
			}
			if young == nil {
				young = &k.young
			}
		}
		switch {
		case ok:
			usual = p.late(usual, now)
		case p.Estimate.Samples > 0:
			continue // its own few tell more
		case young != nil:
			usual = p.late(young.optimist(), now)
		default:
			if usual, ok = all.median(nil); !ok {
				usual = usual.Times(p.overdue(peers, slower, key(p), now))
			}
			usual = usual.Times(p.slowness(peers, answers, key(p)))
		}
		p.Standing.Calibration.SetPrior(usual)
	}
	typical := Prefill(1000, 1000)
	alike := map[string]*pace{}
	for _, p := range peers {
		e := &p.Estimate
		if others := total - e.Samples; e.Samples != p.samples || others < p.others {
			p.samples, p.others = e.Samples, others
		}
		if e.Samples == 0 || total-e.Samples-p.others < Unobserved {
			continue
		}
		if ahead, _ := p.Standing.Backlog.Ahead(&e.Speed, now); ahead.Prompts > 0 {
			continue
		}
		others := alike[key(p)]
		if others == nil {
			others = new(pace)
			for _, other := range peers {
				if other.Estimate.Samples >= EnoughSamples && other.sharesModel(p) {
					others.add(&other.Estimate)
				}
			}
			alike[key(p)] = others
		}
		without := e
		if e.Samples < EnoughSamples {
			without = nil // it is not among them
		}
		if usual, ok := others.median(without); ok && usual.Time(typical) < e.Speed.Time(typical) {
			p.Standing.Calibration.Suppose(usual)
		}
	}
	shareCompany(peers, key)
}

// followers is how many later requests a choice decides for, where all of a prompt is
// cached at one replica alone. With 18 agents' medians are 2 % more, and with 46 bursts'
// means.
const followers = 30

const (
	// soon is how much of those who are at a replica now counts for each follower, and
	// eachWay how much of those who are there usually: most come when others are there than
	// now. They are delayed by those and delay them as much.
	soon    = 0.3
	eachWay = 2
	// hardly is how many times as long as another a replica takes at most that may be as fast.
	hardly = 1.25
	// slowerPart is what part counts of how much longer followers' prefill takes: fast
	// replicas are soon full of those for whom all of it counts.
	slowerPart = 0.1
)

// shareCompany tells each peer what first tokens are late by for each request beside
// them at those of its models, in the median, and for how many requests a choice
// decides: what is cached of a prompt at one replica alone is where an earlier choice has
// brought it, and the more of all prompts is, the more later ones go where this one does.
// What several have decides nothing. Their prefill takes longer at a slow one.
func shareCompany(peers []*Peer, key func(p *Peer) string) {
	groups := map[string]*fellows{}
	for _, p := range peers {
		g := groups[key(p)]
		if g == nil {
			g = new(fellows)
			groups[key(p)] = g
		}
		if slope, ok := p.Standing.company.seen(); ok {
			g.slopes = append(g.slopes, max(slope, 0))
		}
		if p.Estimate.Samples > 0 {
			g.firsts = append(g.firsts, firstCompany*p.Estimate.Speed.A)
		}
		if tokens := p.Standing.lengths.Get(); tokens > 0 {
			g.tokens += tokens
			g.fresh += p.Standing.prompts.Get()
			g.settled += p.Standing.settled.Get()
			g.told++
		}
	}
	for _, p := range peers {
		if g := groups[key(p)]; g.told > 0 {
			g.times = append(g.times, g.time(p))
		}
	}
	for _, g := range groups {
		if len(g.slopes) == 0 {
			g.slopes = g.firsts
		}
		slices.Sort(g.slopes)
		slices.Sort(g.times)
	}
	for _, p := range peers {
		g := groups[key(p)]
		if len(g.slopes) > 0 {
			p.Standing.company.suppose(middle(g.slopes))
		}
		if g.tokens > 0 {
			p.Standing.bind(followers*min(g.settled/g.tokens, 1), g.behind(g.time(p)))
		}
	}
}

// fellows is what some peers have who serve the same.
type fellows struct {
	slopes, firsts []float64
	// tokens, fresh and settled are how many a prompt has, in all, uncached, and cached
	// where it went and nowhere else, the sums for told of them.
	tokens, fresh, settled, told float64
	// times are how long such a prompt takes at each, in order.
	times []float64
}

// time is how long a prompt takes at p.
func (g *fellows) time(p *Peer) float64 {
	speed := p.Standing.Calibration.Speed()
	return speed.Time(Prefill(int(g.fresh/g.told), int(max(g.tokens-g.fresh, 0)/g.told)))
}

// behind is what counts of how much longer than at the faster ones a prompt takes that takes
// so long. Those that are hardly slower may be as fast: estimates differ as much.
func (g *fellows) behind(time float64) float64 {
	return slowerPart * max(time-hardly*g.times[len(g.times)/4], 0)
}

// middle is the median of what is in order, of which there is some.
func middle(of []float64) float64 {
	n := len(of)
	return of[(n-1)/2]/2 + of[n/2]/2
}

// late is the speed usual of others, or what is left of it for a peer without
// observations whose first prompt takes longer than that already: in a fleet of two
// kinds it may be of the slower one, and would be sent as much as the faster until its
// first token came. In a fleet that has just begun that stays beside its own few
// observations: before 2 H100 and 2 L4 (W2, 12 a second, 400 requests, eight seeds) the
// 99th percentile of the time to first token is 73 ms so, and 120 ms otherwise.
func (p *Peer) late(usual Speed, now time.Time) Speed {
	if p.Estimate.Samples > 0 {
		return usual
	}
	return usual.Times(min(max(1, p.Standing.Backlog.Overdue(&usual, now)), mostOverdue))
}

// overdue is how many times as long as by DefaultSpeed a prompt takes that is under way
// at one of those that serve the same, as far as it has come, at least 1 and at most
// mostOverdue. times has it by their keys.
func (p *Peer) overdue(peers []*Peer, times map[string]float64, key string, now time.Time) float64 {
	most, known := times[key]
	if !known {
		most = 1
		for _, other := range peers {
			if other.Estimate.Samples == 0 && other.sharesModel(p) {
				most = max(most, other.Standing.Backlog.Overdue(&DefaultSpeed, now))
			}
		}
		most = min(most, mostOverdue)
		times[key] = most
	}
	return most
}

// mostOverdue bounds what is concluded from a prompt whose first token does not come, for
// it may never. Processors are some 30 times as slow as DefaultSpeed.
const mostOverdue = 32

// slowness is how slow a peer is of whose models no first token was seen. answers has,
// by their keys, what others took for whole answers who serve the same.
func (p *Peer) slowness(peers []*Peer, answers map[string][]float64, key string) float64 {
	s := p.Standing.Filter.State()
	if s.Samples < fewAnswers {
		return 1
	}
	all, known := answers[key]
	if !known {
		for _, other := range peers {
			if o := other.Standing.Filter.State(); o.Samples >= fewAnswers && other.sharesModel(p) {
				all = append(all, o.Mean)
			}
		}
		slices.Sort(all)
		answers[key] = all
	}
	return s.slowness(all)
}
