package policy

import (
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"time"
)

func TestPiecesCut(t *testing.T) {
	half := Pieces{Length: 0.5}
	f := func(p Pieces, tokens, block int, c Candidate, want int) {
		t.Helper()
		if got := p.Cut(&Request{Tokens: tokens}, &c, block); got != want {
			t.Errorf("pieces of %v s, %d tokens in blocks of %d at %+v: the next ends at %d, want %d", p.Length, tokens, block, c, got, want)
		}
	}
	even := Speed{A: 1e-4} // 5,000 tokens in half a second
	f(half, 7499, 16, Candidate{Speed: even}, 0)
	f(half, 7501, 16, Candidate{Speed: even}, 4992)
	f(half, 1_000_000, 16, Candidate{Speed: even}, 4992)
	f(Pieces{}, 1_000_000, 16, Candidate{Speed: even}, 0)
	f(Pieces{Length: 2}, 100_000, 16, Candidate{Speed: even}, 20_000)

	// What is cached is behind it.
	f(half, 20_000, 16, Candidate{Speed: even, Cached: 4992}, 9984)
	f(half, 20_000, 16, Candidate{Speed: even, Cached: 12_400}, 17_392)
	f(half, 20_000, 16, Candidate{Speed: even, Cached: 12_512}, 0)
	f(half, 20_000, 16, Candidate{Speed: even, Cached: 30_000}, 0)

	// Attention takes the more the farther it is: 10,000 tokens at first, and then 4,142.
	far := Speed{B: 1e-8 * (1 - 1e-9)}
	f(half, 40_000, 16, Candidate{Speed: far}, 10_000)
	f(half, 40_000, 16, Candidate{Speed: far, Cached: 10_000}, 14_128)
	// And next to nothing where it is next to nothing.
	f(half, 20_000, 16, Candidate{Speed: Speed{A: 1e-4, B: 1e-30}}, 4992)

	// At least 512 tokens, however long they take, and at least a block.
	f(half, 20_000, 16, Candidate{Speed: Speed{A: 1e-3}}, 512)
	f(half, 20_000, 784, Candidate{Speed: Speed{A: 1e-2, D: 3}}, 3920)
	// As long as it takes to compute 15 prompts of no tokens, less one.
	f(half, 20_000, 16, Candidate{Speed: Speed{A: 1e-4, D: 0.05}}, 6992)
	f(half, 20_000, 16, Candidate{Speed: Speed{A: 1e-4, D: 3}}, 0)
	f(half, 20_000, 528, Candidate{Speed: Speed{A: 1e-3}}, 528)
	f(half, 20_000, 48, Candidate{Speed: Speed{A: 1e-3}}, 528)
	f(half, 20_000, 784, Candidate{Speed: even}, 4704)
	f(half, 20_000, 784, Candidate{Speed: Speed{A: 1e-3}}, 784)
	f(half, 20_000, 6000, Candidate{Speed: even}, 6000)
	f(half, 20_000, 20_000, Candidate{Speed: even}, 0)
	f(half, 20_000, 0, Candidate{Speed: even}, 0)
	f(half, 513, 16, Candidate{Speed: Speed{A: 1}}, 512)
	f(half, 512, 16, Candidate{Speed: Speed{A: 1}}, 0)

	// A full cache keeps nothing for the next one.
	f(half, 20_000, 16, Candidate{Speed: even, KV: 0.9}, 4992)
	f(half, 20_000, 16, Candidate{Speed: even, KV: 0.91}, 0)
	f(half, 20_000, 16, Candidate{Speed: even, KV: 0.5, Room: 1}, 0)
}

// longestPiece is where the next piece ends, found block by block.
func longestPiece(p Pieces, r *Request, c *Candidate, block int) int {
	held := min(int(c.Cached), r.Tokens)
	time := func(to int) float64 { return c.Speed.Time(Prefill(to-held, held)) }
	length := max(p.Length, 15*c.Speed.D)
	if p.Length <= 0 || c.KV > 0.9 || time(r.Tokens) <= 1.5*length {
		return 0
	}
	n := held / block * block
	for n+block < r.Tokens && (n+block-held < 512 || time(n+block) <= length) {
		n += block
	}
	for n-held < 512 {
		n += block
	}
	if n >= r.Tokens {
		return 0
	}
	return n
}

// somePrompt is one that may be worth cutting, at a replica whose numbers can be.
func somePrompt(rng *rand.Rand) (Pieces, *Request, *Candidate, int) {
	block := []int{1, 16, 32, 48, 64, 512, 528, 784, 2048}[rng.IntN(9)]
	r := &Request{Tokens: rng.IntN(1 << (1 + rng.IntN(17)))}
	c := &Candidate{Speed: Speed{3e-4 * rng.Float64(), 3e-8 * rng.Float64(), 0.1 * rng.Float64()}, KV: rng.Float32()}
	for _, x := range []*float64{&c.Speed.A, &c.Speed.B, &c.Speed.D} {
		if rng.IntN(4) == 0 {
			*x *= math.Pow(10, 1-20*rng.Float64()) // of one that was learned from other prompts
		}
	}
	if rng.IntN(2) == 0 {
		c.Cached = Count(rng.IntN(r.Tokens+1) / block * block)
	}
	return Pieces{Length: 1.5 * rng.Float64()}, r, c, block
}

// A piece is as long as whole blocks can be that take no longer than Length. Cut again and
// again a prompt comes to its end, in no more pieces than there are times 512 tokens in it,
// and what is left then is not worth one.
func TestPiecesCutAsModel(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 1))
	cut := 0
	for range 20_000 {
		p, r, c, block := somePrompt(rng)
		first := int(c.Cached)
		for k := 0; ; k++ {
			held := int(c.Cached)
			took := func(to int) float64 { return c.Speed.Time(Prefill(to-held, held)) }
			got, want := p.Cut(r, c, block), longestPiece(p, r, c, block)
			near := func(took, limit float64) bool { return math.Abs(took-limit) <= 1e-9*limit }
			length := max(p.Length, 15*c.Speed.D)
			if got != want && !near(took(max(got, want)), length) && !near(took(r.Tokens), 1.5*length) {
				t.Fatalf("pieces of %v s, %d tokens in blocks of %d at %+v: the next ends at %d, want %d", p.Length, r.Tokens, block, *c, got, want)
			}
			if got == 0 {
				break
			}
			if cut++; got%block != 0 || got-held < 512 || got >= r.Tokens || k > (r.Tokens-first)/512 {
				t.Fatalf("pieces of %v s, %d tokens in blocks of %d at %+v: piece %d ends at %d", p.Length, r.Tokens, block, *c, k, got)
			}
			c.Cached = Count(got)
		}
	}
	if cut < 10_000 {
		t.Errorf("only %d pieces", cut)
	}
}

// Whatever the numbers are, a piece is of whole blocks, begins behind what is cached and
// ends before the prompt does.
func TestPiecesCutAnyNumbers(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 2))
	number := func(usual float64) float64 {
		return []float64{math.NaN(), 0, math.Inf(1), math.Inf(-1), -usual, 1e300, 1e-300, math.MaxFloat64, usual, usual, usual}[rng.IntN(11)]
	}
	count := func(list ...int) int { return list[rng.IntN(len(list))] }
	cut := 0
	for range 200_000 {
		p := Pieces{Length: number(0.5)}
		r := &Request{Tokens: count(0, -5, math.MinInt, math.MaxInt, math.MaxInt-100, 512, 20_000, 20_000, 1_000_000)}
		block := count(0, -16, 1, 16, 16, 528, math.MaxInt, math.MinInt)
		c := &Candidate{
			Speed: Speed{number(1e-4), number(1e-9), number(5e-3)}, KV: float32(number(0.5)),
			Cached: Count(count(0, 0, -600, math.MinInt, math.MaxInt, 16, 1000)),
		}
		switch got := p.Cut(r, c, block); {
		case got == 0:
		case block <= 0 || got%block != 0 || got <= max(min(int(c.Cached), r.Tokens), 0) || got >= r.Tokens:
			t.Fatalf("pieces of %v s, %d tokens in blocks of %d at %+v: the next ends at %d", p.Length, r.Tokens, block, *c, got)
		default:
			cut++
		}
	}
	if cut < 1000 {
		t.Errorf("only %d pieces", cut)
	}
}

// Only cost_model weighs what has begun.
func TestPiecesWith(t *testing.T) {
	p := Pieces{Length: 0.5}
	for _, by := range every(t) {
		want := Pieces{}
		if by.Name() == "cost_model" {
			want = p
		}
		if got := p.With(by); got != want {
			t.Errorf("%s: %+v, want %+v", by.Name(), got, want)
		}
	}
}

// begunAt is what a replica has begun with, as a candidate tells.
func begunAt(s *Standing) Candidate {
	var c Candidate
	s.Describe(&c, 0, 0, time.Unix(1_700_000_000, 0))
	return c
}

// Prompts begin at replicas, go on at others and end, in any order: at any time each
// replica has those that are there, and to each prompt those but itself. At the end there
// are none, to the last nanosecond.
func TestRestAddsUp(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 3))
	for range 100 {
		standings := make([]Standing, 4)
		rests := make([]Rest, 1+rng.IntN(10))
		type place struct {
			at           *Standing
			seconds, key float64
			since        int // when it came there
		}
		want := make([]place, len(rests))
		for step := range 100 {
			k := rng.IntN(len(rests))
			if rng.IntN(3) == 0 {
				rests[k].End()
				want[k] = place{}
			} else {
				s := &standings[rng.IntN(len(standings))]
				seconds := []float64{20 * rng.Float64(), 20 * rng.Float64(), 0, -1, math.NaN(), math.Inf(1), math.Inf(-1), 1e300}[rng.IntN(8)]
				key, since := float64(rng.IntN(3)), step
				if want[k].at == s {
					since = want[k].since
				}
				rests[k].Stay(s, seconds, key)
				want[k] = place{s, 0, key, since}
				if seconds > 0 {
					want[k].seconds = min(seconds, MostTTFT)
				}
			}
			for k := range rests {
				first := true
				for _, o := range want {
					w := want[k]
					first = first && !(w.at != nil && o.at == w.at && (o.key < w.key || o.key == w.key && o.since < w.since))
				}
				if got := rests[k].First(); got != first {
					t.Fatalf("prompt %d of %+v is the first: %v, want %v", k, want, got, first)
				}
			}
			for i := range standings {
				s := &standings[i]
				count := func(but int) (n int32, sum float64) {
					for k, p := range want {
						if p.at == s && k != but {
							n, sum = n+1, sum+p.seconds
						}
					}
					return n, sum
				}
				check := func(c *Candidate, but int) {
					if n, sum := count(but); c.Begun != n || math.Abs(c.Rest-sum) > 1e-7 {
						t.Fatalf("%d prompts with %v s without prompt %d, want %d with %v s", c.Begun, c.Rest, but, n, sum)
					}
				}
				c := begunAt(s)
				check(&c, -1)
				for k := range rests {
					apart := c
					rests[k].Apart(s, &apart)
					check(&apart, k)
				}
			}
		}
		for k := range rests {
			rests[k].End()
			rests[k].End()
			if rests[k] != (Rest{}) {
				t.Fatalf("a prompt that has ended has left %+v", rests[k])
			}
		}
		for i := range standings {
			if b := &standings[i].begun; b.prompts.Load() != 0 || b.seconds.Load() != 0 {
				t.Fatalf("when all is over there are %d prompts with %d ns", b.prompts.Load(), b.seconds.Load())
			}
		}
	}
}

// One that describes the replica while a prompt begins or ends there never sees less than
// none, and nothing is lost between many of them.
func TestRestFromManyGoroutines(t *testing.T) {
	standings := make([]Standing, 3)
	var all sync.WaitGroup
	for g := range uint64(8) {
		all.Go(func() {
			rng := rand.New(rand.NewPCG(g, 4))
			var r Rest
			for range 2000 {
				s := &standings[rng.IntN(len(standings))]
				if r.Stay(s, rng.Float64(), rng.Float64()); rng.IntN(3) == 0 {
					r.End()
				}
				c := begunAt(s)
				if r.Apart(s, &c); c.Begun < 0 || c.Begun > 7 || c.Rest < 0 || c.Rest > 8 {
					t.Errorf("%d others with %v s", c.Begun, c.Rest)
					break
				}
			}
			r.End()
		})
	}
	all.Wait()
	for i := range standings {
		if c := begunAt(&standings[i]); c.Begun != 0 || c.Rest != 0 {
			t.Errorf("replica %d is left with %d prompts and %v s", i, c.Begun, c.Rest)
		}
	}
}

func TestPiecesAllocNothing(t *testing.T) {
	var s Standing
	var rest Rest
	p, r, c := Pieces{Length: 0.5}, &Request{Tokens: 50_000}, &Candidate{Speed: DefaultSpeed, Cached: 512}
	if n := testing.AllocsPerRun(100, func() {
		if p.Cut(r, c, 16) == 0 {
			t.Error("nothing is cut")
		}
		rest.Stay(&s, 1, 1)
		s.begun.describe(c)
		rest.Apart(&s, c)
		rest.End()
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
