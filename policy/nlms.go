package policy

import (
	"math"
	"sync"
	"sync/atomic"
)

// NLMS is the joint cost of DIO (dio-serve 0.4), in milliseconds:
//
//	cost = wait + y + tier + vram + kv_ms·KV + queue_ms·waiting - prefix_ms·hit rate - cache
//
//	y      what the replica's Filter expects of a response to N tokens, whole
//	wait   requests in flight, for its share, / batch · the mean of its responses
//	       (y before there was one)
//	tier   tier_ms when a small request would go to a large replica; a large one is
//	       not sent to a small replica. Large is what the configuration calls so, and
//	       a request of large_tokens tokens or more. Where no candidate is large
//	       there are no tiers
//	vram   vram_ms·(1 - free/total) when less than 4,096 MB are free; with less than
//	       2,400 MB, though not with 0, which some report that cannot tell, a request
//	       of more than 1,000 tokens is not sent there. Nothing where the memory is
//	       not known
//	KV     how full the KV cache is; waiting and hit rate are as the engine says
//	cache  what is saved by the tokens that the replica has in its cache, by its
//	       measured speed, times cache; and cache_bonus_ms if it has any
//
//	batch 8, tier_ms 500, vram_ms 1000, kv_ms 800, queue_ms 50, prefix_ms 150,
//	cache 1, cache_bonus_ms 0, large_tokens 4096
//
// DIO gives 200 ms to the replica that was last sent a prompt with the same first
// 100 characters, and that alone is 194 times its other terms; with cache 0 and
// cache_bonus_ms 200 it is so here too, for what is really cached.
//
// N counts the answer as well, and a response's time its queueing and its length:
// so the slope means less than cost_model's, which is taken from first tokens, and
// what is learned of one long answer outweighs what is cached: in inferrail simulate
// --profile reference --replicas 8 --rate 40 --requests 2000 its mean time to first token
// is 1.3 times that of random for w1, 1.4 for w2 and 0.8 for w4. Use it to compare. The zero value weighs nothing:
// New returns one with weights.
type NLMS struct {
	batch                      float64
	tier, vram                 float64
	kv, queue, prefix          float64
	cache, bonus, largeRequest float64
}

var nlmsWeights = []weight{
	{"batch", 8, 1, math.Inf(1)},
	{"tier_ms", 500, 0, math.Inf(1)},
	{"vram_ms", 1000, 0, math.Inf(1)},
	{"kv_ms", 800, 0, math.Inf(1)},
	{"queue_ms", 50, 0, math.Inf(1)},
	{"prefix_ms", 150, 0, math.Inf(1)},
	{"cache", 1, 0, math.Inf(1)},
	{"cache_bonus_ms", 0, 0, math.Inf(1)},
	{"large_tokens", 4096, 1, math.Inf(1)},
}

func newNLMS(w []float64) Policy {
	return &NLMS{w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8]}
}

// MB of GPU memory: with less than scarceVRAM free a replica costs more, and with
// less than leastVRAM it takes no request of more than someTokens.
const (
	scarceVRAM = 4096
	leastVRAM  = 2400
	someTokens = 1000
)

// Name implements Policy.
func (*NLMS) Name() string { return "nlms" }

// Score implements Policy.
func (p *NLMS) Score(r *Request, candidates []Candidate, costs []float64) float64 {
	n, tiers := float64(Total(r)), tiered(candidates)
	var t [8]float64
	for i := range candidates {
		p.terms(&t, r, n, tiers, &candidates[i])
		cost := t[0] + t[1] + t[2] + t[3] + t[4] + t[5] + t[6] + t[7]
		if math.IsNaN(cost) || math.IsInf(cost, -1) {
			cost = math.Inf(1)
		}
		costs[i] = cost
	}
	return 0
}

// AppendTerms implements Explainer.
func (p *NLMS) AppendTerms(dst []Term, r *Request, candidates []Candidate, i int) []Term {
	var t [8]float64
	p.terms(&t, r, float64(Total(r)), tiered(candidates), &candidates[i])
	for k, name := range [...]string{"wait", "response", "tier", "vram", "kv", "queue", "prefix", "cache"} {
		dst = append(dst, Term{name, t[k]})
	}
	return dst
}

// terms sets t to the parts of the candidate's cost, as AppendTerms names them, for
// a request of n tokens.
func (p *NLMS) terms(t *[8]float64, r *Request, n float64, tiers bool, c *Candidate) {
	*t = [8]float64{}
	y := c.Filter.predict(n)
	mean := c.Filter.Mean
	if c.Filter.Samples == 0 {
		mean = y
	}
	if p.batch > 0 {
		t[0] = max(c.load()-1, 0) / p.batch * mean
	}
	t[1] = y
	switch large := n >= p.largeRequest; {
	case !tiers || large == c.Large:
	case large:
		t[2] = math.Inf(1)
	default:
		t[2] = p.tier
	}
	if free := float64(c.VRAMFree); c.VRAMTotal > 0 && free < scarceVRAM {
		t[3] = p.vram * part(1-free/float64(c.VRAMTotal))
		if free > 0 && free < leastVRAM && n > someTokens {
			t[3] = math.Inf(1)
		}
	}
	t[4] = p.kv * part(float64(c.KV))
	t[5] = p.queue * float64(max(c.Queued, 0))
	t[6] = -p.prefix * part(float64(c.HitRate))
	if cached := float64(min(int(c.Cached), r.Tokens)); cached > 0 {
		// Of a prompt's Work it is cached tokens, and their attention among
		// themselves.
		saved := c.Speed.A*cached + c.Speed.B*cached*cached/2
		t[7] = -p.bonus
		if saved > 0 && !math.IsInf(saved, 1) {
			t[7] -= p.cache * saved * 1e3
		}
	}
}

// tiered reports whether one of the candidates is meant for large requests.
func tiered(candidates []Candidate) bool {
	for i := range candidates {
		if candidates[i].Large {
			return true
		}
	}
	return false
}

// usualOutput is how many tokens an answer is taken to have that is not limited,
// and mostTokens the most that a request is taken to have in all.
const (
	usualOutput = 64
	mostTokens  = 128 << 10
)

// Total is how many tokens nlms takes the request and its answer to have: what
// Filter.Observe is given when the engine has not told. It is between 1 and
// mostTokens: a number for prediction, whatever a client writes.
func Total(r *Request) int {
	out := r.Output
	if out <= 0 {
		out = usualOutput
	}
	return min(min(max(r.Tokens, 1), mostTokens)+min(out, mostTokens), mostTokens)
}

// FilterState is what nlms has learned of a replica: milliseconds a token, fast
// and slow, an offset, and the mean of what was seen. It is a value; the zero
// value has learned nothing.
type FilterState struct {
	Fast, Slow, Offset, Mean float64
	Samples                  int
}

// What a filter starts from, and the least that it comes to: milliseconds a token
// and milliseconds.
const (
	firstSlope  = 0.1
	firstOffset = 50
	leastSlope  = 0.1
	leastOffset = 0.1
)

// predict is how many milliseconds a response to n tokens is expected to take.
func (s *FilterState) predict(n float64) float64 {
	if s.Samples == 0 {
		return firstSlope*n + firstOffset
	}
	return (0.8*s.Fast+0.2*s.Slow)*n + s.Offset
}

// observe is what is known after a response to n tokens has taken y milliseconds.
func (s FilterState) observe(n, y float64) FilterState {
	if s.Samples == 0 {
		s.Fast, s.Slow, s.Offset, s.Mean = firstSlope, firstSlope, firstOffset, y
	}
	e := y - s.predict(n)
	s.Fast = max(s.Fast+0.1*e/n, leastSlope)
	s.Slow = max(s.Slow+0.01*e/n, leastSlope)
	s.Offset = max(s.Offset+0.005*e, leastOffset)
	s.Mean = 0.9*s.Mean + 0.1*y
	s.Samples++
	return s
}

// Filter learns, for nlms, how long a replica takes for whole responses: a line
// through tokens and time whose slope is the mean of one that follows fast and one
// that follows slowly (normalised least mean squares). It lives as long as the
// replica; its methods may be called from any goroutine and allocate nothing. The
// zero value has learned nothing.
type Filter struct {
	mu sync.Mutex // held to write: one at a time
	// The state is in states[version%2]. A writer fills the other one and then
	// counts version up, so that one which is read is not written to until version
	// has changed, and readers wait for no writer.
	version atomic.Uint64
	states  [2]filterWords
}

// filterWords are the numbers of a FilterState.
type filterWords [5]atomic.Uint64

// Observe takes a response that has succeeded: how many tokens the prompt and the
// answer had together, by the engine's count or else Total, and how many seconds it
// has taken from the request on. What cannot be, more than MostTTFT included, is left
// out.
func (f *Filter) Observe(tokens int, seconds float64) FilterState {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.State()
	if !(seconds >= 0 && seconds <= MostTTFT) || tokens < 1 {
		return s
	}
	s = s.observe(float64(min(tokens, mostTokens)), seconds*1e3)
	v := f.version.Load() + 1
	w := &f.states[v%2]
	w[0].Store(math.Float64bits(s.Fast))
	w[1].Store(math.Float64bits(s.Slow))
	w[2].Store(math.Float64bits(s.Offset))
	w[3].Store(math.Float64bits(s.Mean))
	w[4].Store(uint64(s.Samples))
	f.version.Store(v)
	return s
}

// State is what was learned. It waits for nobody.
func (f *Filter) State() FilterState {
	for {
		v := f.version.Load()
		w := &f.states[v%2]
		s := FilterState{
			Fast:    math.Float64frombits(w[0].Load()),
			Slow:    math.Float64frombits(w[1].Load()),
			Offset:  math.Float64frombits(w[2].Load()),
			Mean:    math.Float64frombits(w[3].Load()),
			Samples: int(w[4].Load()),
		}
		if f.version.Load() == v {
			return s
		}
	}
}
