package policy

import (
	"testing"
	"time"
)

// loses lets n requests that begin with ids lose by what the replica of key 2 lacks, so
// many seconds each.
func (p *Prefixes) loses(t testing.TB, n int, key uint64, ids []uint32, seconds float64, now time.Time) {
	t.Helper()
	speed := Speed{A: 1e-6}
	candidates := []Candidate{
		{Key: 1, Cached: Count(len(ids)), Exact: true, Share: 1, Speed: speed},
		{Key: 2, Exact: true, Share: 1, Speed: speed},
	}
	costs := []float64{seconds, speed.fill(float64(len(ids)), 0)}
	for range n {
		if !p.Chosen(&Request{Tokens: len(ids) + 10}, candidates, costs, 0, key, ids, len(ids), now) {
			t.Fatal("nothing was lost")
		}
	}
}

// What was lost long ago makes room for what is lost now, though there are few of them: they
// are remembered up to a number of tokens.
func TestPrefixesForgetWhatIsOld(t *testing.T) {
	var p Prefixes
	now := time.Unix(1e9, 0)
	ids := make([]uint32, 100_000)
	for key := range uint64(30) {
		p.loses(t, 3, key, ids, 1, now)
	}
	later := now.Add(time.Hour)
	p.loses(t, 3, 1000, ids, 1, later)
	c := Candidate{Key: 2, Exact: true, Share: 1, Speed: Speed{A: 1e-6}}
	if x, ok := p.Due(&c, later); !ok || x.Key != 1000 {
		t.Errorf("due is %d, %v", x.Key, ok)
	}
	// By what least is lost of it takes no room of others.
	p.loses(t, 3, 1000, ids, 1, later)
	for key := range uint64(30) {
		p.loses(t, 3, 2000+key, ids, 0.5, later)
	}
	tokens := 0
	for _, l := range p.All(later) {
		tokens += len(l.IDs)
	}
	if x, ok := p.Due(&c, later); !ok || x.Key != 1000 || tokens > mostPrefixTokens || tokens < mostPrefixTokens-len(ids) || tokens != p.tokens {
		t.Errorf("due is %d, %v, and there are %d tokens, by count %d", x.Key, ok, tokens, p.tokens)
	}

	if !p.Pending(later) || len(p.All(later)) < 31 {
		t.Errorf("of what is asked for now %d are left", len(p.All(later)))
	}
	later = later.Add(time.Hour)
	if p.Pending(later) || len(p.All(later)) != 0 || p.tokens != 0 {
		t.Errorf("an hour later %d are left, with %d tokens", len(p.All(later)), p.tokens)
	}
	p.loses(t, 3, 1, ids, 1, later)
	if x, ok := p.Due(&c, later); !ok || x.Key != 1 {
		t.Errorf("then due is %d, %v", x.Key, ok)
	}
}

func BenchmarkPrefixesDue(b *testing.B) {
	for _, replicas := range []int{8, 64, 500} {
		b.Run(time.Duration(replicas).String(), func(b *testing.B) {
			var p Prefixes
			now := time.Unix(1e9, 0)
			ids := make([]uint32, 4000)
			speed := Speed{A: 1e-6}
			for key := range uint64(mostPrefixes) {
				for r := range min(replicas, 64) {
					candidates := []Candidate{
						{Key: 1 << 20, Cached: 4000, Exact: true, Share: 1, Speed: speed},
						{Key: (key*7 + uint64(r)) % uint64(replicas), Exact: true, Share: 1, Speed: speed},
					}
					p.Chosen(&Request{Tokens: 4010}, candidates, []float64{0.006, 0.004}, 0, key, ids, 4000, now)
				}
			}
			for b.Loop() {
				for r := range replicas {
					c := Candidate{Key: uint64(r), Exact: true, Share: 1, Speed: Speed{A: 1e-2}}
					p.Due(&c, now)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N), "µs/round")
		})
	}
}

func BenchmarkPrefixesChosen(b *testing.B) {
	var p Prefixes
	now := time.Unix(1e9, 0)
	ids := make([]uint32, 4000)
	speed := Speed{A: 1e-6}
	candidates := make([]Candidate, 500)
	costs := make([]float64, 500)
	for i := range candidates {
		candidates[i] = Candidate{Key: uint64(i), Exact: true, Share: 1, Speed: speed}
		costs[i] = 0.004
	}
	candidates[0].Cached, costs[0] = 4000, 0.006
	key := uint64(0)
	for b.Loop() {
		key++
		p.Chosen(&Request{Tokens: 4010}, candidates, costs, 0, key/2%1000, ids, 4000, now)
	}
}
