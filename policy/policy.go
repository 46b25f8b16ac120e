package policy

import "math"

// Request is what a Policy may know of one request. The proxy fills it on the
// goroutine of the request; a Policy must not keep it. The zero value is a request
// of which nothing is known.
type Request struct {
	// Rand is a random number drawn for this request. It breaks ties.
	Rand uint64
	// Turn counts the decisions made for the model: it is another one for each.
	Turn uint64
	// Tokens is how long the prompt is, 0 when that is not known. Of a prompt
	// whose tokens are not known exactly it is an estimate from its text, and so
	// is what candidates have cached.
	Tokens int
	// Output is how many tokens the answer may have, 0 when it is not limited. A
	// client may write any number there: it is clamped to MostOutput.
	Output int
	// Prefix stands for how the prompt begins, and Session for the conversation it
	// belongs to; 0 is not known. Equal numbers are equal beginnings, or sessions.
	Prefix, Session uint64
	// Begun: at least one of the candidates has Begun.
	Begun bool
	// Own is how many tokens, at the end of the prompt, are of a conversation that goes
	// on: from the first message of its user, if an answer follows that; 0 of anything
	// else. Nobody else will ask for them.
	Own int
}

// MostOutput is the most that Request.Output says.
const MostOutput = 32 << 10

// Candidate is one replica that may take the request: healthy, and with room for
// it. The proxy fills a slice of them for each decision, from counters that are
// always current and from what the engine has told last. Times are in seconds. The
// zero value is an idle replica of which nothing is known.
//
// What cost_model reads comes first and fills 64 bytes, and a Candidate has 192: a
// score reads one line of memory of each, where their slice begins with a line. The
// numbers in it are as narrow as that takes; Count makes one of an int.
type Candidate struct {
	// Cached is how much of the prompt the replica has in its cache, in tokens, so
	// that it has the rest to compute.
	Cached int32
	// InFlight counts the requests at the replica: this agent's, sent there and not
	// finished or in line for it, and as far as the engine tells, those of others.
	InFlight int32
	// CachedGPU is the part of Cached that is on the GPU.
	CachedGPU int32
	// Busy is which part of the last minutes the replica has had prompts of this agent to
	// compute, or, as the engine tells, requests of others.
	Busy float32
	// Decoding is how many of InFlight have their first token and are generated.
	Decoding int32
	// Company is by how many seconds first tokens come later for those who are there: this
	// one's for those of now, and those of the requests that will follow it there for those
	// who usually are, and for how slow the replica is.
	Company float32
	// Share is how much of its share the replica takes, between 0 and 1: less
	// than 1 for a while after it has come back. 0 stands for 1.
	Share float32
	// KV is how full the engine's KV cache is with sequences that run, 0 to 1; 0
	// too when that is not known.
	KV float32
	// Wait is how long the prefill of the prompts ahead of this one is taken to
	// last, by Speed, and Room: not less than 0.
	Wait float64
	// Speed is how fast the replica prefills, as far as it is known.
	Speed Speed

	// Slot is the dense number the agent gave the endpoint.
	Slot int
	// CachedCPU is the part of Cached that is on the GPU or in the host's memory. What is
	// beyond lies on disk or farther.
	CachedCPU int32
	// Queued is how many requests wait for the engine to begin with them, as it
	// says; 0 too when it does not.
	Queued int32
	// Exact: what it has cached is known from its own events.
	Exact bool
	// Large: the replica is meant for large requests (nlms).
	Large bool
	// Begun is how many prompts have been computed in part there and wait for the rest to
	// be, which takes Rest seconds of all of them. It is behind what comes now, unless that
	// goes elsewhere. Where there are some, Request.Begun is set.
	Begun int32
	Rest  float64
	// Key is a hash of the replica's name: the same for every agent and at all
	// times.
	Key uint64
	// Ahead is the work that Wait is made of, but for Room.
	Ahead Work
	// Late is by how many seconds first tokens come later there than by Wait and Speed,
	// in a moment like this, or, below 0, earlier. No policy goes by it.
	Late float64
	// VRAMFree and VRAMTotal are the GPU's memory, in MB; VRAMTotal is 0 when they
	// are not known (nlms).
	VRAMFree, VRAMTotal float32
	// Filter is what nlms has learned of it.
	Filter FilterState
	// HitRate is the share of prompt tokens that the engine has found in its cache
	// lately, 0 to 1 (nlms).
	HitRate float32
	// Room is how much of Wait passes until the request fits into the KV cache, beside the
	// sequences that run (Standing.Fit).
	Room float32
}

// Count is n as a Candidate has it: what is beyond either end of the type is that end.
func Count(n int) int32 { return int32(min(max(n, math.MinInt32), math.MaxInt32)) }

// load is what one request more would make of the candidate's load: at least 1,
// whatever the fields say. A replica that takes a tenth of its share counts ten
// times as loaded.
func (c *Candidate) load() float64 {
	return c.shared(float64(max(c.InFlight, 0)) + 1)
}

// shared is x, which counts so much more as the replica takes less of its share.
func (c *Candidate) shared(x float64) float64 {
	if c.Share < 1 && c.Share > 0 {
		return x / float64(c.Share)
	}
	return x
}

// Policy gives replicas their costs. Implementations are immutable and may be
// called from any goroutine; what they learn is in the candidates.
type Policy interface {
	// Name is the policy's name in configuration and metrics.
	Name() string
	// Score sets costs[i], for each of the candidates, to what choosing it costs:
	// any measure of which less is better; +Inf means that it should not be
	// chosen while another can be. NaN is taken for +Inf. Costs that are less than
	// slack above the least one count as equal to it. It allocates nothing.
	Score(r *Request, candidates []Candidate, costs []float64) (slack float64)
}
