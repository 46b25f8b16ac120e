package proxy

import "github.com/inferrail/inferrail/index"

// CacheChecks is told what engines have taken from their caches, beside what
// the index has predicted. Its methods are called on requests' goroutines and
// must not block; their arguments are valid during the call only.
type CacheChecks interface {
	// Cached: of a prompt that was followed exactly, predicted tokens were
	// expected in the replica's cache when the request was sent, and the engine
	// has found actual there. reported is false when it does not tell; actual is
	// 0 then. Called once for every response that ended well and tells its usage.
	Cached(m *Model, r *Replica, predicted, actual int, reported bool)
}

// cache is what a Server knows the engines' caches by. Immutable.
type cache struct {
	index  *index.Index
	checks CacheChecks // nil for none
}

// SetIndex lets prompts be looked up in x from now on, and requests be entered
// there; nil ends it. checks may be nil. Requests that have begun keep the index
// that they began with.
func (s *Server) SetIndex(x *index.Index, checks CacheChecks) {
	if x == nil {
		s.cache.Store(nil)
		return
	}
	s.cache.Store(&cache{x, checks})
}
