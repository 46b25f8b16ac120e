package workload

import "time"

// questions come by themselves, in a Poisson process, behind a system prompt if there
// are any.
func (g *generator) questions() {
	g.arrivals(g.question(), func() float64 { return g.Rate }, nil)
}

// arrivals calls ask at the times of a Poisson process whose rate changes with its
// state: next, if there is one, draws how long the state lasts and goes on to the
// next.
func (g *generator) arrivals(ask func(at time.Duration), rate func() float64, next func() time.Duration) {
	at, change := time.Duration(0), longestTime
	if next != nil {
		change = next()
	}
	for {
		wait := longestTime
		if r := rate(); r > 0 {
			wait = g.wait(1 / r)
		}
		// What is waited for has no memory, so that it can be waited for anew.
		if next != nil && wait > change-at {
			at = change
			change += next()
			if g.over(at) {
				return
			}
			continue
		}
		if at += wait; g.over(at) {
			return
		}
		ask(at)
	}
}

// question returns what asks one at a time.
func (g *generator) question() func(at time.Duration) {
	g.parts = 4
	systems, popular := g.groups("system", g.Shared), newZipf(g.Groups, g.Zipf)
	return func(at time.Duration) {
		r := Request{At: at, Tenant: g.random.IntN(g.Tenants)}
		if len(systems) > 0 {
			r.Parts = append(r.Parts, systems[popular.draw(g.random)])
		}
		r.Parts = append(r.Parts, g.part("user", g.Own, unevenly))
		r.Output = g.answer(g.Output)
		g.requests = append(g.requests, r)
	}
}

// burstLength is how many seconds a burst lasts on average.
const burstLength = 4

// bursts are questions that come in a Poisson process of two states. Half of them come
// in bursts, which have Burst times as many as there are on average. Meanwhile an
// engine is slow, if nothing else was asked for: for a third of the time.
func (g *generator) bursts() {
	if g.Throttles == nil {
		g.Throttles = []Throttle{{At: g.length() / 3, Until: g.length() * 2 / 3, Factor: 4}}
	}
	share := 0.5 / g.Burst // of the time
	burst := g.random.Float64() < share
	rate := func() float64 {
		if burst {
			return g.Rate * g.Burst
		}
		return g.Rate * 0.5 / (1 - share)
	}
	begun := false
	g.arrivals(g.question(), rate, func() time.Duration {
		if begun {
			burst = !burst
		}
		begun = true
		if burst {
			return g.wait(burstLength)
		}
		return g.wait(burstLength * (1 - share) / share)
	})
}

// mostDocuments is how many documents a question is about at most; it is about three
// on average.
const mostDocuments = 5

// retrievals are questions about documents, which stand before them in any order.
func (g *generator) retrievals() {
	system := g.part("system", 100, 0)
	documents, popular := g.groups("user", g.Shared), newZipf(g.Groups, g.Zipf)
	g.arrivals(func(at time.Duration) {
		r := Request{At: at, Tenant: g.random.IntN(g.Tenants), Parts: []Part{system}}
		found := map[int]bool{}
		for want := min(1+g.random.IntN(mostDocuments), len(documents)); len(found) < want; {
			if k := popular.draw(g.random); !found[k] {
				found[k] = true
				r.Parts = append(r.Parts, documents[k])
			}
		}
		first := len(r.Parts) - len(found)
		g.random.Shuffle(len(found), func(i, k int) {
			r.Parts[first+i], r.Parts[first+k] = r.Parts[first+k], r.Parts[first+i]
		})
		r.Parts = append(r.Parts, g.part("user", g.Own, unevenly))
		r.Output = g.answer(g.Output)
		g.requests = append(g.requests, r)
	}, func() float64 { return g.Rate }, nil)
}
