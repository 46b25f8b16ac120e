package simulator

import (
	"maps"
	"slices"
	"time"
)

// Gaps counts the times between one token and the next of the sequences that are Timed,
// to the microsecond. Engines that are told to Measure fill it, several of them maybe;
// who has told them reads it when they are done. It is used on one goroutine, and its
// memory grows with how different the times are, not with how many there are. The zero
// value has none.
type Gaps struct {
	pages map[int64]*gapPage
	// page is the one of pages that was used last, and at its number.
	page *gapPage
	at   int64

	count, longest int64
	sum            float64 // picoseconds
}

// gapPage counts the times of so many microseconds one after the other.
type gapPage [1 << 10]int64

const microsecond = 1000 * picoseconds

// add counts, weight times, so many times of which the first is gap and each of the
// others drift more than the one before it, in picoseconds. None may be negative.
func (g *Gaps) add(gap, drift, times, weight int64) {
	if times <= 0 || weight <= 0 {
		return
	}
	g.count += times * weight
	last := gap + drift*(times-1)
	g.sum += float64(weight) * float64(times) * (float64(gap) + float64(last)) / 2
	g.longest = max(g.longest, gap, last)
	for times > 0 {
		rounded := (gap + microsecond/2) / microsecond
		n := times
		if drift > 0 {
			// Those before the next microsecond are the same.
			n = min(n, ((rounded+1)*microsecond-microsecond/2-gap+drift-1)/drift)
		} else if drift < 0 {
			n = 1
		}
		*g.place(rounded) += n * weight
		gap += n * drift
		times -= n
	}
}

// place is where times of so many microseconds are counted.
func (g *Gaps) place(us int64) *int64 {
	const size = int64(len(gapPage{}))
	if at := us / size; g.page == nil || g.at != at {
		if g.pages == nil {
			g.pages = map[int64]*gapPage{}
		}
		page := g.pages[at]
		if page == nil {
			page = new(gapPage)
			g.pages[at] = page
		}
		g.page, g.at = page, at
	}
	return &g.page[us%size]
}

// Count returns how many there are.
func (g *Gaps) Count() int { return int(g.count) }

// Mean returns their mean, 0 of none.
func (g *Gaps) Mean() time.Duration {
	if g.count == 0 {
		return 0
	}
	return time.Duration(g.sum / float64(g.count) / picoseconds)
}

// Longest returns the longest, 0 of none.
func (g *Gaps) Longest() time.Duration { return time.Duration(g.longest / picoseconds) }

// Quantiles returns the least times that so many percent of all are not above, one for
// each of percents, which ascend; 0 of none.
func (g *Gaps) Quantiles(percents ...int) []time.Duration {
	out := make([]time.Duration, len(percents))
	seen, k := int64(0), 0
	for _, at := range slices.Sorted(maps.Keys(g.pages)) {
		for i, n := range g.pages[at] {
			seen += n
			for k < len(percents) && n > 0 && seen*100 >= g.count*int64(percents[k]) {
				out[k] = time.Duration(at*int64(len(gapPage{}))+int64(i)) * time.Microsecond
				k++
			}
		}
	}
	return out
}

// Measure lets the engine count the times between tokens from now on. It must be idle.
func (e *Engine) Measure(g *Gaps) { e.gaps = g }

// passed counts the tokens of the first k rounds of the current step, which are over,
// before any sequence leaves because of them.
func (e *Engine) passed(p *step, k int64) {
	if e.gaps == nil || k <= 0 {
		return
	}
	end, others := p.after(1), e.timed
	for _, s := range e.joined {
		if s.member && s.Timed {
			e.gaps.add(end-s.token, 0, 1, 1)
			others--
		}
	}
	clear(e.joined)
	e.joined = e.joined[:0]
	e.gaps.add(end-e.token, 0, 1, others)
	e.gaps.add(p.base+p.drift, p.drift, k-1, e.timed)
	e.token = p.after(k)
}

// resumed counts the time from the last token of s before it was preempted, if it was,
// to the one that it has now.
func (e *Engine) resumed(s *Sequence) {
	if e.gaps != nil && s.Timed && s.from > 0 {
		e.gaps.add(e.clock-s.token, 0, 1, 1)
	}
	s.token = e.clock
}

// interrupted notes when s, which leaves with so many tokens made, had the last of them.
func (e *Engine) interrupted(s *Sequence, made int) {
	switch {
	case e.gaps == nil || s.state != Decoding:
	case e.apart:
		n := int64(made - s.from - 1)
		if s.Timed {
			e.gaps.add(s.pace, 0, n, 1)
		}
		s.token = s.joined + n*s.pace
	case s.member:
		s.token = max(s.token, e.token)
	}
}
