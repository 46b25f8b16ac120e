package policy

import (
	"iter"
	"slices"
)

// Queue is the order in which those that wait are served: classes by their rank,
// within one the tenants in turn, by deficit round robin in uncached tokens
// (Shreedhar, Varghese 1995), and of a tenant the one with the least key, of equal
// ones the first come. It is not safe for concurrent use: its owner has a lock. The
// zero value is empty.
//
// No class waits for ever: for every lowerShare tokens that better classes are
// served, one that waits behind them has a token of credit, and comes first when
// it has as much as its next ticket costs.
//
// Each operation takes constant time on average: a ticket that costs n quanta
// takes n visits of its tenant. Push looks at those of the tenant that have a larger
// key, of which there are none where all are alike, and Yields and All at every tenant.
type Queue[T any] struct {
	n       int
	tokens  int         // of all tickets
	classes []*class[T] // in which somebody waits, the best first
}

// Ticket is what is queued. Its owner keeps it in place while it is in a Queue; it
// is in one at most. The zero value is in none.
type Ticket[T any] struct {
	Value T
	// Class is the rank of its class, the lowest first. Tenant is whose it is, Tokens
	// what it costs, and Key its place among those of the tenant. They do not change
	// while it is queued.
	Class  int
	Tenant string
	Tokens int
	Key    float64

	flow           *flow[T] // nil: it is in no queue
	previous, next *Ticket[T]
}

const (
	// quantum is how many tokens a tenant is given each time it comes round.
	quantum = 2048
	// leastCost is what a ticket costs at least, as no prompt takes no time, and
	// mostCost at most, so that a length that nobody has checked holds up nothing
	// for long.
	leastCost = 64
	mostCost  = 64 * quantum
	// lowerShare is how many tokens better classes are served for one of a class
	// that waits behind them.
	lowerShare = 16
)

func (t *Ticket[T]) cost() int { return min(max(t.Tokens, leastCost), mostCost) }

// Queued reports that t is in a queue.
func (t *Ticket[T]) Queued() bool { return t.flow != nil }

// class holds the tickets of one rank.
type class[T any] struct {
	rank  int
	flows map[string]*flow[T]
	// turn is the flow that is served, in a ring of all.
	turn *flow[T]
	// credit is what better classes were served while this one waited: tokens
	// times lowerShare.
	credit int
}

// flow holds the tickets of one tenant in a class, at least one.
type flow[T any] struct {
	class       *class[T]
	tenant      string
	first, last *Ticket[T]
	n           int
	// deficit is what it may be served yet; below 0 when it was served out of
	// turn. visited: it was given its quantum, and its turn lasts.
	deficit        int
	visited        bool
	previous, next *flow[T]
}

// Len is how many wait.
func (q *Queue[T]) Len() int { return q.n }

// Tokens is what all tickets in it cost together.
func (q *Queue[T]) Tokens() int { return q.tokens }

// Push adds t, behind those of its tenant whose keys are not larger.
func (q *Queue[T]) Push(t *Ticket[T]) {
	if t.flow != nil {
		panic("BUG: a ticket was queued twice")
	}
	f := q.flowOf(t.Class, t.Tenant)
	before := f.last
	for before != nil && before.Key > t.Key {
		before = before.previous
	}
	t.flow, t.previous, t.next = f, before, f.first
	if before != nil {
		t.next = before.next
		before.next = t
	} else {
		f.first = t
	}
	if t.next != nil {
		t.next.previous = t
	} else {
		f.last = t
	}
	f.n++
	q.n++
	q.tokens += max(t.Tokens, 0)
}

// flowOf finds the flow of a tenant, or makes it: the last of the round.
func (q *Queue[T]) flowOf(rank int, tenant string) *flow[T] {
	i, found := slices.BinarySearchFunc(q.classes, rank, func(k *class[T], rank int) int {
		switch {
		case k.rank < rank:
			return -1
		case k.rank > rank:
			return 1
		}
		return 0
	})
	if !found {
		q.classes = slices.Insert(q.classes, i, &class[T]{rank: rank, flows: map[string]*flow[T]{}})
	}
	k := q.classes[i]
	f := k.flows[tenant]
	if f != nil {
		return f
	}
	f = &flow[T]{class: k, tenant: tenant}
	k.flows[tenant] = f
	if k.turn == nil {
		k.turn, f.previous, f.next = f, f, f
	} else {
		f.previous, f.next = k.turn.previous, k.turn
		f.previous.next, f.next.previous = f, f
	}
	return f
}

// Peek is what Pop would take, nil when nobody waits. It stays so until a ticket
// is taken or removed, or one of a better class or with a smaller key is pushed.
func (q *Queue[T]) Peek() *Ticket[T] {
	if q.n == 0 {
		return nil
	}
	for _, k := range q.classes[1:] {
		if t := k.head(); k.credit >= lowerShare*t.cost() {
			return t
		}
	}
	return q.classes[0].head()
}

// head is the class's next, up to which the round goes on.
func (k *class[T]) head() *Ticket[T] {
	for {
		f := k.turn
		if !f.visited {
			f.visited = true
			f.deficit += quantum
		}
		if f.first.cost() <= f.deficit {
			return f.first
		}
		f.visited = false
		k.turn = f.next
	}
}

// Pop takes the next to be served out, nil when nobody waits.
func (q *Queue[T]) Pop() *Ticket[T] {
	t := q.Peek()
	if t != nil {
		q.Take(t)
	}
	return t
}

// Take takes out t, which is queued and is served, whether or not it is the next:
// what it costs is its tenant's and its class's to pay.
func (q *Queue[T]) Take(t *Ticket[T]) {
	f, cost := t.flow, t.cost()
	f.deficit -= cost
	f.class.credit = max(f.class.credit-lowerShare*cost, 0)
	for _, k := range q.classes {
		if k.rank > f.class.rank {
			k.credit = min(k.credit+cost, lowerShare*mostCost)
		}
	}
	q.Remove(t)
}

// Remove takes t out: it is not served. It reports whether t was in.
func (q *Queue[T]) Remove(t *Ticket[T]) bool {
	f := t.flow
	if f == nil {
		return false
	}
	if t.previous != nil {
		t.previous.next = t.next
	} else {
		f.first = t.next
	}
	if t.next != nil {
		t.next.previous = t.previous
	} else {
		f.last = t.previous
	}
	t.flow, t.previous, t.next = nil, nil, nil
	f.n--
	q.n--
	q.tokens -= max(t.Tokens, 0)
	if f.n > 0 {
		return true
	}
	// A tenant that does not wait saves nothing up.
	k := f.class
	delete(k.flows, f.tenant)
	f.previous.next, f.next.previous = f.next, f.previous
	if k.turn == f {
		k.turn = f.next
	}
	if len(k.flows) == 0 {
		q.classes = slices.DeleteFunc(q.classes, func(other *class[T]) bool { return other == k })
	}
	return true
}

// Yields is who of those that wait is to make room for one more of that class and
// tenant, nil for nobody: the last of the worst class, if that is a worse one, of
// the tenant that has most waiting there; or the last of a tenant in the same class
// that would still have as many waiting as the other.
func (q *Queue[T]) Yields(rank int, tenant string) *Ticket[T] {
	if q.n == 0 {
		return nil
	}
	k := q.classes[len(q.classes)-1]
	if k.rank < rank {
		return nil
	}
	most := k.turn
	for f := k.turn.next; f != k.turn; f = f.next {
		if f.n > most.n {
			most = f
		}
	}
	if k.rank > rank {
		return most.last
	}
	own := 0
	if f := k.flows[tenant]; f != nil {
		own = f.n
	}
	if most.n-1 < own+1 {
		return nil
	}
	return most.last
}

// All are those that wait: the classes in order, in each the tenants from the one
// whose turn it is, of each those in the order in which they are served. Nobody may be pushed or taken out
// meanwhile.
func (q *Queue[T]) All() iter.Seq[*Ticket[T]] {
	return func(yield func(*Ticket[T]) bool) {
		for _, k := range q.classes {
			for f, more := k.turn, true; more; f, more = f.next, f.next != k.turn {
				for t := f.first; t != nil; t = t.next {
					if !yield(t) {
						return
					}
				}
			}
		}
	}
}
