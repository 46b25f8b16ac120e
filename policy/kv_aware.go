package policy

import "math"

// KVAware is the weighted sum that llm-d and the Gateway API's endpoint picker have
// by default, turned around so that less is better:
//
//	cost = prefix·(1 - P) + queue·(1 - Q) + kv·(1 - K)
//
//	P  the part of the prompt that the replica has in its cache: on the GPU in full,
//	   in the host's memory times cpu, beyond that times disk
//	Q  1 for the replica with the shortest queue, 0 for the longest, linear between;
//	   1 for all if they are alike
//	K  how much of the KV cache is free of sequences that run
//
//	prefix 3, queue 2, kv 2   as there
//	cpu 0.8, disk 0.25        credits of the slower tiers, as llm-d and Dynamo have
//
// The queue is the prompts without a first token: as many as the engine says that
// wait or as this agent counts, whichever are more, because reports are late; with
// this one, for the replica's share. Q knows only who is the longest: one request
// more counts as much as a hundred where there is no other difference. Nor does the
// sum know what a cached token saves, in time. Use it to compare with those routers,
// or to move from one with the weights found there. The zero value weighs nothing:
// New returns one with weights.
type KVAware struct {
	prefix, queue, kv float64
	cpu, disk         float64
}

var kvAwareWeights = []weight{
	{"prefix", 3, 0, math.Inf(1)},
	{"queue", 2, 0, math.Inf(1)},
	{"kv", 2, 0, math.Inf(1)},
	{"cpu", 0.8, 0, 1},
	{"disk", 0.25, 0, 1},
}

func newKVAware(w []float64) Policy { return &KVAware{w[0], w[1], w[2], w[3], w[4]} }

// Name implements Policy.
func (*KVAware) Name() string { return "kv_aware" }

// Score implements Policy.
func (p *KVAware) Score(r *Request, candidates []Candidate, costs []float64) float64 {
	least, most := math.Inf(1), 0.0
	for i := range candidates {
		q := candidates[i].queue()
		least, most = min(least, q), max(most, q)
		costs[i] = q
	}
	for i := range candidates {
		prefix, queue, kv := p.terms(r, &candidates[i], costs[i]-least, most-least)
		costs[i] = prefix + queue + kv
	}
	return 0
}

// AppendTerms implements Explainer.
func (p *KVAware) AppendTerms(dst []Term, r *Request, candidates []Candidate, i int) []Term {
	least, most := math.Inf(1), 0.0
	for k := range candidates {
		q := candidates[k].queue()
		least, most = min(least, q), max(most, q)
	}
	prefix, queue, kv := p.terms(r, &candidates[i], candidates[i].queue()-least, most-least)
	return append(dst, Term{"prefix", prefix}, Term{"queue", queue}, Term{"kv", kv})
}

// terms are the parts of the candidate's cost. Its queue is longer than the shortest
// one by longer, and the longest one by span.
func (p *KVAware) terms(r *Request, c *Candidate, longer, span float64) (prefix, queue, kv float64) {
	prefix = p.prefix * (1 - p.cached(r, c))
	if span > 0 {
		queue = p.queue * part(longer/span)
	}
	return prefix, queue, p.kv * part(float64(c.KV))
}

// cached is the part of the prompt that is cached, less where it is farther away.
func (p *KVAware) cached(r *Request, c *Candidate) float64 {
	if r.Tokens <= 0 {
		return 0
	}
	any := min(max(int(c.Cached), 0), r.Tokens)
	cpu := min(max(int(c.CachedCPU), 0), any)
	gpu := min(max(int(c.CachedGPU), 0), cpu)
	return (float64(gpu) + p.cpu*float64(cpu-gpu) + p.disk*float64(any-cpu)) / float64(r.Tokens)
}

// queue is how many prompts would wait for their first token, with one more, for
// the candidate's share.
func (c *Candidate) queue() float64 {
	q := float64(max(c.Queued, 0)) + 1
	if own := c.Ahead.Prompts + 1; own > q && own <= math.MaxInt32 {
		q = own
	}
	return q / c.share()
}

// part is x, no less than 0 and no more than 1; 0 when it is not a number.
func part(x float64) float64 {
	if !(x > 0) {
		return 0
	}
	return min(x, 1)
}
