package proxy

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"
)

// lines are the gates at which requests are in line, so that those can be
// called when there is a better place for them: one has become free elsewhere,
// or the fleet has changed. A Server has one; any goroutine may call its
// methods. The zero value knows of no line.
type lines struct {
	waiting atomic.Int64 // requests in all lines; mostly 0

	mu    sync.Mutex // guards gates
	gates map[*gate]int
}

// add notes that a request is going to be in line at g. done is called when it
// is not any more.
func (l *lines) add(g *gate) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gates == nil {
		l.gates = map[*gate]int{}
	}
	l.gates[g]++
	l.waiting.Add(1)
}

func (l *lines) done(g *gate) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gates[g]--; l.gates[g] == 0 {
		delete(l.gates, g)
	}
	l.waiting.Add(-1)
}

// callAll has every request in line look for a better place.
func (l *lines) callAll() { l.call((*gate).callAll) }

// callFirst has the first of each line look for a better place: there is one.
func (l *lines) callFirst() { l.call((*gate).callFirst) }

func (l *lines) call(who func(*gate)) {
	if l.waiting.Load() == 0 {
		return
	}
	l.mu.Lock()
	gates := slices.Collect(maps.Keys(l.gates))
	l.mu.Unlock()
	for _, g := range gates {
		who(g)
	}
}
