package policy

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// anyRequest and anyCandidates are what a proxy might ask about, and what it never
// should.
func anyRequest(random *rand.Rand) *Request {
	return &Request{Rand: random.Uint64(), Turn: random.Uint64N(100), Tokens: random.IntN(30000), Output: random.IntN(MostOutput),
		Prefix: random.Uint64N(3), Session: random.Uint64N(3)}
}

func anyCandidates(random *rand.Rand, tokens int) []Candidate {
	candidates := make([]Candidate, 1+random.IntN(8))
	for i := range candidates {
		c := &candidates[i]
		c.Slot, c.Key = i, random.Uint64()
		c.Cached = random.Int32N(int32(tokens) + 1)
		c.CachedCPU = random.Int32N(c.Cached + 1)
		c.CachedGPU = random.Int32N(c.CachedCPU + 1)
		c.Speed = Speed{random.Float64() * 1e-4, random.Float64() * 1e-8, random.Float64() * 1e-2}
		c.Ahead = Work{float64(random.IntN(4)), float64(random.IntN(20000)), float64(random.IntN(1e8))}
		c.Wait = c.Speed.Time(c.Ahead)
		c.Decoding, c.InFlight, c.Queued = random.Int32N(64), random.Int32N(64), random.Int32N(8)
		c.Share, c.KV, c.HitRate = random.Float32(), random.Float32(), float32(random.Float64())
		if random.IntN(4) == 0 {
			c.KV = 1
		}
		if random.IntN(4) == 0 {
			c.Begun, c.Rest = random.Int32N(4), 5*random.Float64()
		}
		c.Exact, c.Large = random.IntN(2) == 0, random.IntN(2) == 0
		c.VRAMTotal = float32(random.IntN(2) * 80000)
		c.VRAMFree = c.VRAMTotal * random.Float32()
		if random.IntN(4) == 0 {
			c.Room = float32(c.Wait) * random.Float32()
		}
		c.Filter = FilterState{random.Float64(), random.Float64(), random.Float64() * 100, random.Float64() * 1000, random.IntN(20)}
	}
	return candidates
}

// The terms of every policy's costs add up to them, and what has no finite cost has
// a term that says so.
func TestTermsAddUp(t *testing.T) {
	random := rand.New(rand.NewPCG(6, 6))
	for _, name := range Names() {
		p, err := New(name, nil)
		if err != nil {
			t.Fatal(err)
		}
		for range 500 {
			r := anyRequest(random)
			candidates := anyCandidates(random, r.Tokens)
			begunAmong(r, candidates)
			costs := make([]float64, len(candidates))
			p.Score(r, candidates, costs)
			for i, cost := range costs {
				terms := AppendTerms([]Term{{"before", 0}}, p, r, candidates, i, cost)
				if len(terms) < 2 || terms[0] != (Term{"before", 0}) {
					t.Fatalf("%s: terms %+v", name, terms)
				}
				sum, most := 0.0, 0.0
				for _, term := range terms[1:] {
					if term.Name == "" {
						t.Fatalf("%s: a term without a name in %+v", name, terms)
					}
					sum += term.Value
					most = max(most, math.Abs(term.Value))
				}
				same := math.Abs(sum-cost) <= 1e-9*max(1, most) || math.IsInf(sum, 1) && (math.IsInf(cost, 1) || math.IsNaN(cost))
				if !same {
					t.Fatalf("%s: the terms of candidate %d are %+v, in sum %v; its cost is %v\nof %+v", name, i, terms[1:], sum, cost, candidates[i])
				}
			}
		}
	}
}

// Foresee says what Admit is going to say, however often it is asked before, and
// changes nothing of what Admit says then: one Admission is foreseen, another one
// with the same history is not.
func TestForeseeIsWithoutEffect(t *testing.T) {
	random := rand.New(rand.NewPCG(7, 7))
	for _, mode := range AdmissionModes() {
		m, err := ParseAdmissionMode(mode)
		if err != nil {
			t.Fatal(err)
		}
		rules := AdmissionRules{Mode: m}
		foreseen, other := NewAdmission(rules), NewAdmission(rules)
		now, refused := time.Unix(1_000_000, 0), 0
		for range 5000 {
			now = now.Add(time.Duration(random.IntN(200)) * time.Millisecond)
			if random.IntN(2) == 0 {
				took := time.Duration(random.IntN(4000)) * time.Millisecond
				waited := took * time.Duration(random.IntN(3)) / 3
				foreseen.Observe(now, took, waited)
				other.Observe(now, took, waited)
			}
			predicted := time.Duration(random.IntN(4000)) * time.Millisecond
			wait := predicted * time.Duration(random.IntN(3)) / 3
			budget := time.Duration(random.IntN(3)) * time.Second
			var said Verdict
			for range random.IntN(3) + 1 {
				said = foreseen.Foresee(now, predicted, wait, budget)
			}
			got, want := foreseen.Admit(now, predicted, wait, budget), other.Admit(now, predicted, wait, budget)
			if said != got || got != want {
				t.Fatalf("%s: foreseen %+v, then %+v; unasked %+v", mode, said, got, want)
			}
			if got.Refuse {
				refused++
			}
		}
		if (refused == 0) != (m == RankOnly) {
			t.Errorf("%s has refused %d requests", mode, refused)
		}
	}
}
