// Package policy chooses where a request goes. It does no I/O, starts no
// goroutine and reads no clock: time and randomness are arguments, so that a
// decision can be replayed.
package policy

// Request is what a Policy may know of one request. The proxy fills it on the
// goroutine of the request; a Policy must not keep it.
type Request struct {
	// Rand is a random number drawn for this request. It breaks ties.
	Rand uint64
}

// Candidate is one replica that may take the request. The proxy fills a slice
// of them for each decision from counters that are always current.
type Candidate struct {
	// Slot is the dense number the agent gave the endpoint.
	Slot int
	// InFlight counts the requests this agent has sent there and not finished,
	// and those that wait for their turn there.
	InFlight int
	// Share is how much of its share the replica takes, between 0 and 1: less
	// than 1 for a while after it has come back. 0 stands for 1.
	Share float64
	// Tokens is how long the prompt is, 0 when that is not known, and Cached how
	// much of it the replica has in its cache, so that it has the rest to
	// compute. CachedGPU is the part of Cached that is on the GPU; what is beyond
	// it lies on slower tiers. Of a prompt whose tokens are not known exactly, all
	// three are estimates from its text.
	Tokens, Cached, CachedGPU int
}

// load is what one request more would make of the candidate's load. A replica
// that takes a tenth of its share counts ten times as loaded.
func (c *Candidate) load() float64 {
	if c.Share > 0 {
		return float64(c.InFlight+1) / c.Share
	}
	return float64(c.InFlight + 1)
}

// Policy picks a replica. Implementations are immutable and may be called from
// any goroutine.
type Policy interface {
	// Name is the policy's name in configuration and metrics.
	Name() string
	// Pick returns the index into candidates of the replica to use and a
	// short reason for people, or -1 when there is no candidate.
	Pick(r *Request, candidates []Candidate) (index int, reason string)
}

// LeastRequest picks the replica with the fewest requests in flight for its
// share. Ties are
// broken by Request.Rand, so that idle replicas share the load.
type LeastRequest struct{}

// Name implements Policy.
func (LeastRequest) Name() string { return "least_request" }

// Pick implements Policy in one pass: among equals each is chosen with the
// same probability.
func (LeastRequest) Pick(r *Request, candidates []Candidate) (int, string) {
	best, ties, least := -1, uint64(0), 0.0
	rand := r.Rand
	for i := range candidates {
		load := candidates[i].load()
		switch {
		case best < 0 || load < least:
			best, ties, least = i, 1, load
		case load == least:
			ties++
			// splitmix64's increment gives each tie a fresh draw.
			rand += 0x9e3779b97f4a7c15
			if mix(rand)%ties == 0 {
				best = i
			}
		}
	}
	if best < 0 {
		return -1, "no candidate"
	}
	if ties > 1 {
		return best, "least in flight, tie"
	}
	return best, "least in flight"
}

// mix is the finaliser of splitmix64 (Steele, Lea, Flood 2014).
func mix(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}
