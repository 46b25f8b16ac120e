package policy

import (
	"math"
	"math/rand/v2"
	"testing"
)

// endpointPicker is the score of llm-d's endpoint picker for each of the pods, by
// its default weights: the more the better. Prefixes are matched in blocks, here of
// one token, and the queue is what pods report.
func endpointPicker(tokens int, pods []Candidate) (scores []float64) {
	longest, shortest := int32(0), int32(math.MaxInt32)
	for _, pod := range pods {
		longest, shortest = max(longest, pod.Queued), min(shortest, pod.Queued)
	}
	for _, pod := range pods {
		queue := 1.0
		if longest != shortest {
			queue = float64(longest-pod.Queued) / float64(longest-shortest)
		}
		prefix := float64(pod.CachedGPU) / float64(tokens)
		prefix += 0.8 * float64(pod.CachedCPU-pod.CachedGPU) / float64(tokens)
		scores = append(scores, 2*queue+2*(1-float64(pod.KV))+3*prefix)
	}
	return scores
}

// Where the engines' reports are not late and nothing is on disk, kv_aware is what
// users of llm-d have.
func TestKVAwareIsAnEndpointPicker(t *testing.T) {
	p, _ := New("kv_aware", nil)
	rng := rand.New(rand.NewPCG(6, 14))
	for range 3000 {
		r := &Request{Tokens: 1 + rng.IntN(5000)}
		cs := make([]Candidate, 1+rng.IntN(8))
		for i := range cs {
			c := &cs[i]
			c.Cached = rng.Int32N(int32(r.Tokens) + 1)
			c.CachedCPU = c.Cached
			c.CachedGPU = rng.Int32N(c.Cached + 1)
			c.KV, c.Queued = rng.Float32(), rng.Int32N(4)
			c.Ahead.Prompts = float64(rng.Int32N(c.Queued + 1))
		}
		scores, costs := endpointPicker(r.Tokens, cs), make([]float64, len(cs))
		p.Score(r, cs, costs)
		for i := range cs {
			if want := 7 - scores[i]; math.Abs(costs[i]-want) > 1e-9 {
				t.Fatalf("cost %v where the score is %v: %+v", costs[i], scores[i], cs)
			}
		}
	}
}

func TestKVAwareQueue(t *testing.T) {
	f := func(c Candidate, want float64) {
		t.Helper()
		if got := c.queue(); math.Abs(got-want) > 1e-9 {
			t.Errorf("%+v: %v, want %v", c, got, want)
		}
	}
	f(Candidate{}, 1)
	f(Candidate{Queued: 3}, 4)
	f(Candidate{Ahead: Work{Prompts: 5}}, 6)
	f(Candidate{Queued: 3, Ahead: Work{Prompts: 5}}, 6)
	f(Candidate{Queued: 5, Ahead: Work{Prompts: 3}}, 6)
	f(Candidate{Queued: 1, Share: 0.5}, 4)
	f(Candidate{Queued: 1, Share: 1}, 2)
	f(Candidate{Queued: -4}, 1)
	f(Candidate{Queued: 2, Ahead: Work{Prompts: math.NaN()}}, 3)
	f(Candidate{Queued: 2, Ahead: Work{Prompts: math.Inf(1)}}, 3)
	f(Candidate{Queued: 2, Share: float32(math.NaN())}, 3)
	f(Candidate{Queued: 2, Share: -1}, 3)
}
