package proxy

import (
	"bytes"
	"slices"
	"time"
)

// DefaultClass is the name of the class of requests that name none, or one that is
// not known. There is always one, of rank DefaultRank unless it is given another.
const (
	DefaultClass = "default"
	DefaultRank  = 5
)

// Class is a class of requests: while requests wait, those of the lowest Rank go
// first (policy.Queue).
type Class struct {
	Name string
	Rank int
}

// Classes are the classes that requests may have. The agent makes them with
// NewClasses and gives them to Server.SetClasses; from then on they are immutable.
type Classes struct {
	list   []Class // the best first; never empty
	byName map[string]*Class
}

// NewClasses makes Classes of those that are listed, and the default one.
func NewClasses(list []Class) *Classes {
	k := &Classes{list: slices.Clone(list), byName: map[string]*Class{}}
	if !slices.ContainsFunc(list, func(c Class) bool { return c.Name == DefaultClass }) {
		k.list = append(k.list, Class{DefaultClass, DefaultRank})
	}
	slices.SortStableFunc(k.list, func(a, b Class) int { return a.Rank - b.Rank })
	for i := range k.list {
		k.byName[k.list[i].Name] = &k.list[i]
	}
	return k
}

// SetClasses says which classes requests may have from now on; nil is the default
// one alone. Requests that have begun keep theirs.
func (s *Server) SetClasses(k *Classes) {
	if k == nil {
		k = NewClasses(nil)
	}
	s.classes.Store(k)
}

// of is the class of a request that names one, by a key, which may be nil. A key
// has a class of its own, the default one if it is given none. A request with a key
// may name one that is as good or worse: nobody promotes himself where keys are in
// use. Without a key it may name any.
func (k *Classes) of(named []byte, key *Key) *Class {
	class := k.byName[DefaultClass]
	own := class
	if key != nil {
		if c := k.byName[key.Class]; c != nil {
			own = c
		}
	}
	if len(named) == 0 {
		return own
	}
	if c := k.byName[string(named)]; c != nil {
		class = c
	}
	if key != nil && class.Rank < own.Rank {
		return own
	}
	return class
}

// classify finds out whose the request is and which class and budget it has.
// Without keys all requests are one tenant's: a field that anybody may set would
// give the most to who names himself differently each time.
func (x *exchange) classify() failure {
	x.class, x.tenant, x.budget = x.c.s.classes.Load().of(x.head.priority, x.key), "", 0
	if x.key != nil {
		x.tenant = x.key.Name
	}
	x.c.place.ticket.Class, x.c.place.ticket.Tenant = x.class.Rank, x.tenant
	if !x.computes() {
		return none
	}
	x.budget = x.model.Budget
	if x.head.budget == nil {
		return none
	}
	var ok bool
	if x.budget, ok = parseBudget(x.head.budget); !ok || x.head.budgetTwice {
		x.message, x.param = "The field x-inferrail-budget-ms is to be given once, as a whole number of milliseconds: how long the first token may take; 0 is no bound.", "x-inferrail-budget-ms"
		return badBudget
	}
	return none
}

// mostBudget is what a longer budget counts as: nobody waits for a first token any
// longer, and sums of it cannot overflow.
const mostBudget = time.Hour

// parseBudget reads a number of milliseconds: digits alone.
func parseBudget(value []byte) (d time.Duration, ok bool) {
	if len(value) == 0 {
		return 0, false
	}
	for _, c := range bytes.TrimLeft(value, "0") {
		if c < '0' || c > '9' {
			return 0, false
		}
		d = min(10*d+time.Duration(c-'0')*time.Millisecond, mostBudget)
	}
	return d, true
}
