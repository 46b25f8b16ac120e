package policy

// Holding is the rule by which an agent holds requests back while every replica has
// enough before it: which one goes next, and in what order, is decided late, when more
// is known of who waits and of what is cached. It is a value, and used from any
// goroutine. The zero value holds nobody back.
//
// Those that are held are in a Queue, by Key. Whenever a replica is Free the first of
// them is chosen a replica for, and goes there, until none is. So nobody is held while a
// replica idles, nor longer than Longest.
//
// The order is by the time at which a request came and ageing times its prefill: the
// shortest first, but one that takes so many seconds lets nobody pass who comes more
// than ageing times as many later. So nobody waits for ever.
type Holding struct {
	// Lead is how many seconds of work a replica has before it when it is free for
	// more: as much as it needs not to idle before what is sent has come, and an engine
	// that works in steps to fill its next ones.
	Lead float64
}

// ageing is how many times its own prefill a request lets later ones pass.
const ageing = 5

// Holds reports that requests are held back at all.
func (h Holding) Holds() bool { return h.Lead > 0 }

// Free reports that a replica takes more that has so many seconds of work before it.
func (h Holding) Free(wait float64) bool { return wait < h.Lead }

// Key is the place in the order of a request that came at so many seconds, and takes
// prefill where it takes least.
func (h Holding) Key(came, prefill float64) float64 { return came + ageing*max(prefill, 0) }

// Longest is how many seconds a request is held at most: as long as was foretold when it
// came, from what replicas had before them and others that were held, and as long as it
// lets later ones pass. It is longer than that only where what is foretold is wrong, and
// then it is no use to hold it.
func (h Holding) Longest(foretold, prefill float64) float64 {
	return min(max(foretold, 0)+ageing*max(prefill, 0), MostTTFT)
}
