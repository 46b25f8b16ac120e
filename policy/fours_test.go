package policy

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// needFours skips a test where nothing is done in fours.
func needFours(t testing.TB) {
	t.Helper()
	if !inFours {
		t.Skip("this processor has no AVX2")
	}
}

// oneByOne calls f while nothing is done in fours.
func oneByOne(f func()) {
	was := inFours
	defer func() { inFours = was }()
	inFours = false
	f()
}

// sameNumber: x and y have the same bits, or neither is a number.
func sameNumber(x, y float64) bool {
	return math.Float64bits(x) == math.Float64bits(y) || x != x && y != y
}

// nearly: they are the same but for how they were rounded.
func nearly(x, y float64) bool {
	return x == y || x != x && y != y || math.Abs(x-y) <= 1e-12*math.Max(math.Abs(x), math.Abs(y))
}

// hostile makes numbers of c such as nobody has, now and then.
func hostile(rng *rand.Rand, c *Candidate) {
	for _, n := range []*int32{&c.Cached, &c.InFlight, &c.CachedGPU, &c.CachedCPU, &c.Decoding, &c.Queued} {
		if rng.IntN(8) == 0 {
			*n = []int32{0, -1, 1, 1 << 30, math.MaxInt32, math.MinInt32, math.MinInt32 + 1}[rng.IntN(7)]
		}
	}
	odd := []float64{0, math.Copysign(0, -1), math.NaN(), -math.NaN(), math.Inf(1), math.Inf(-1), -1, 1, 0x1p-1074, math.MaxFloat64}
	for _, x := range []*float64{&c.Wait, &c.Speed.A, &c.Speed.B, &c.Speed.D} {
		if rng.IntN(8) == 0 {
			*x = odd[rng.IntN(len(odd))]
		}
	}
	for _, x := range []*float32{&c.Busy, &c.Company, &c.Share, &c.KV} {
		if rng.IntN(8) == 0 {
			*x = float32(odd[rng.IntN(len(odd))])
		}
	}
}

// compareParts scores candidates in fours and one by one, and fails where what is found
// differs.
func compareParts(t *testing.T, m *CostModel, r *Request, toll toll, cs []Candidate) {
	t.Helper()
	var fours, ones scoring
	fours.begin(m, r, toll)
	ones.begin(m, r, toll)
	const behind = 12.5
	costs, want := make([]float64, len(cs)+1), make([]float64, len(cs)+1)
	costs[len(cs)], want[len(cs)] = behind, behind
	for from := 0; from < len(cs); from += scoredPart {
		to := min(from+scoredPart, len(cs))
		fours.part(cs[from:to], costs[from:to])
		oneByOne(func() { ones.part(cs[from:to], want[from:to]) })
		for i := from; i < to; i++ {
			c := &cs[i]
			byte, bit := (i-from)%scoredBlock/4*8, i%4
			found := fours.special[(i-from)/scoredBlock]>>(byte+bit)&0x11 != 0
			wanted := ones.special[(i-from)/scoredBlock]>>(byte+bit)&0x11 != 0
			// complete sees to what is found for nothing.
			if nothing := c.KV > fours.pressed || c.KV != c.KV || c.Share != c.Share; found != wanted && !nothing {
				t.Fatalf("candidate %d of %d, %+v: special %v in fours, %v by itself", i, len(cs), *c, found, wanted)
			}
			if !sameNumber(costs[i], want[i]) {
				t.Fatalf("candidate %d of %d, %+v: costs %v in fours, %v by itself", i, len(cs), *c, costs[i], want[i])
			}
		}
		for k := (to - from + scoredBlock - 1) / scoredBlock; k < scoredBlocks; k++ {
			if fours.special[k] != 0 {
				t.Fatalf("%d candidates: block %d has special ones: %x", len(cs), k, fours.special[k])
			}
		}
		fours.special, ones.special = [scoredBlocks]uint64{}, [scoredBlocks]uint64{}
	}
	if costs[len(cs)] != behind {
		t.Fatalf("%d candidates: wrote behind the costs", len(cs))
	}
	if fours.inFlight != ones.inFlight {
		t.Fatalf("%d candidates: the bits of their requests are %x in fours, %x one by one", len(cs), fours.inFlight, ones.inFlight)
	}
	var abs, absWeighed float64 // of what the sums are made of
	for i := range cs {
		abs += math.Abs(want[i])
		absWeighed += math.Abs(cs[i].Speed.A * float64(cs[i].InFlight))
	}
	if !(abs+absWeighed < 1e300) {
		return // it depends on the order what the sums are
	}
	if math.Abs(fours.costs-ones.costs) > 1e-12*abs || math.Abs(fours.weighed-ones.weighed) > 1e-12*absWeighed {
		t.Fatalf("%d candidates: the sums are %v and %v in fours, %v and %v one by one", len(cs), fours.costs, fours.weighed, ones.costs, ones.weighed)
	}
	for k := range fours.busiest {
		if got, want := slices.Max(fours.busiest[k][:]), slices.Max(ones.busiest[k][:]); got != want {
			t.Fatalf("%d candidates: the most in block %d is %v in fours, %v one by one", len(cs), k, got, want)
		}
		for lane, most := range fours.busiest[k] {
			for i := k*scoredBlock + lane; i < len(cs); i += 4 {
				if i/scoredBlock%scoredBlocks == k && cs[i].Speed.A*float64(cs[i].InFlight) > most {
					t.Fatalf("%d candidates: the most of block %d from %d on is %v, and candidate %d has more", len(cs), k, lane, most, i)
				}
			}
		}
	}
}

// Whatever numbers the candidates have, and however many there are, in fours they cost to
// the bit what each costs by itself, and nothing of what is found besides gets lost.
func TestFoursScoreAsOnes(t *testing.T) {
	needFours(t)
	rng := rand.New(rand.NewPCG(9, 1))
	for k := range 8000 {
		n := k % 71
		if k%100 == 99 {
			n = rng.IntN(4 * scoredPart)
		}
		m, r := costModels(rng), soundRequest(rng)
		if rng.IntN(20) == 0 {
			r.Tokens = math.MaxInt32 - rng.IntN(2)
		}
		m.KVLimit = []float64{m.KVLimit, m.KVLimit, m.KVLimit, 0, 1e300}[rng.IntN(5)]
		var cs []Candidate
		for len(cs) < n {
			cs = append(cs, soundCandidates(rng, min(r.Tokens, 1<<20))...)
		}
		cs = slices.Clone(cs[:n]) // nothing is behind them
		if k%3 == 0 {
			for i := range cs {
				if k%2 == 0 || rng.IntN(n) == 0 {
					hostile(rng, &cs[i])
				}
			}
		}
		compareParts(t, m, r, toll{1e-4 * rng.Float64(), 1e-4 * rng.Float64()}, cs)
	}
}

// One that is special among others is found wherever it is, and so is one that has most.
func TestFoursFindTheOne(t *testing.T) {
	needFours(t)
	m, r := NewCostModel(), &Request{Tokens: 1000}
	costs := make([]float64, 70)
	for what, change := range map[string]func(c *Candidate){
		"in memory":  func(c *Candidate) { c.CachedGPU-- },
		"half share": func(c *Candidate) { c.Share = 0.5 },
		"no share":   func(c *Candidate) { c.Share = 0 },
		"nearly":     func(c *Candidate) { c.Share = math.Nextafter32(1, 0) },
		"full":       func(c *Candidate) { c.KV, c.Queued = 0.91, 1 },
	} {
		for n := 1; n <= len(costs); n++ {
			for at := range n {
				cs := make([]Candidate, n)
				for i := range cs {
					cs[i] = Candidate{Speed: DefaultSpeed, Share: 1, KV: 0.9, Cached: 900, CachedGPU: 900, CachedCPU: 900, InFlight: 1}
				}
				change(&cs[at])
				cs[at].InFlight = 2
				var s scoring
				s.begin(m, r, toll{})
				s.part(cs, costs[:n])
				for k, bits := range s.special {
					want := uint64(0)
					if k == at/scoredBlock {
						want = 1 << (at % scoredBlock / 4 * 8) << (at % 4)
					}
					if bits = (bits | bits>>4) & 0x0f0f_0f0f_0f0f_0f0f; bits != want {
						t.Fatalf("%s, %d of %d: block %d has the special ones %x, want %x", what, at, n, k, bits, want)
					}
				}
				if got := s.busiest[at/scoredBlock][at%4]; got != 2*DefaultSpeed.A {
					t.Fatalf("%d of %d: the most that one has is %v", at, n, got)
				}
			}
		}
	}
}

// What is found of costs in fours is what one finds who looks at each.
func TestFoursOfCosts(t *testing.T) {
	needFours(t)
	rng := rand.New(rand.NewPCG(9, 2))
	for k := range 6000 {
		n := k % 71
		if k%50 == 49 {
			n = rng.IntN(3 * 64 * nearWords)
		}
		costs := make([]float64, n)
		for i := range costs {
			costs[i] = math.Floor(100*rng.Float64()) / 10
			switch x := rng.IntN(12); {
			case k%3 == 1 && x == 0, k%3 == 2 && x > 0:
				costs[i] = []float64{math.NaN(), -math.NaN(), math.Inf(1), math.Inf(-1), -1, math.MaxFloat64}[rng.IntN(1+rng.IntN(6))]
			}
		}
		least := math.Inf(1)
		for _, cost := range costs {
			if cost < least {
				least = cost
			}
		}
		if got := lowest(costs); got != least {
			t.Fatalf("the least of %v is %v", costs, got)
		}
		slack := []float64{0, 0.3, 5, math.MaxFloat64}[rng.IntN(4)]
		var f finalists
		f.lowest(costs, slack)
		var near []int32
		for i, cost := range costs {
			if cost <= min(least+slack, math.MaxFloat64) {
				near = append(near, int32(i))
			}
		}
		if f.least != least || f.many != (len(near) > len(f.near)) || !f.many && !slices.Equal(f.near[:f.n], near) {
			t.Fatalf("%v with slack %v: found %+v, want %v and %v", costs, slack, f, least, near)
		}
	}
}

// A fleet that is alike in all is seen to be so, and one that differs anywhere is not.
func TestFoursSeeWhatIsAlike(t *testing.T) {
	needFours(t)
	for n := 2; n <= 70; n++ {
		cs, costs := make([]Candidate, n), make([]float64, n)
		for i := range cs {
			cs[i] = Candidate{Cached: 7, InFlight: 3, Share: 0.5, Slot: i, Key: uint64(i), KV: float32(i), Company: float32(i), Decoding: int32(i), CachedGPU: int32(i), CachedCPU: int32(i), Busy: float32(i)}
			costs[i] = 2
		}
		if !indifferent(cs, costs) {
			t.Fatalf("%d that are alike differ", n)
		}
		for at := range n {
			for what, c := range map[string]Candidate{"cached": {Cached: 8, InFlight: 3, Share: 0.5}, "requests": {Cached: 7, InFlight: 4, Share: 0.5}, "share": {Cached: 7, InFlight: 3, Share: 0.25}} {
				was := cs[at]
				if cs[at] = c; indifferent(cs, costs) {
					t.Errorf("%d of %d differs by its %s, and is not seen", at, n, what)
				}
				cs[at] = was
			}
			if costs[at] = math.Nextafter(2, 3); indifferent(cs, costs) {
				t.Errorf("%d of %d costs more, and is not seen", at, n)
			}
			costs[at] = 2
		}
		for _, cost := range []float64{math.Inf(1), math.NaN()} {
			for i := range costs {
				costs[i] = cost
			}
			if indifferent(cs, costs) {
				t.Errorf("%d that cost %v are taken for ones to choose among", n, cost)
			}
		}
	}
}

// Every policy chooses the same in fours and one by one, in any fleet.
func TestFoursChooseAsOnes(t *testing.T) {
	needFours(t)
	rng := rand.New(rand.NewPCG(9, 3))
	policies := every(t)
	reasons := map[string]int{}
	for k := range 6000 {
		r := soundRequest(rng)
		r.Turn, r.Prefix, r.Session = rng.Uint64(), rng.Uint64N(3), rng.Uint64N(3)
		var cs []Candidate
		switch {
		case k%4 == 0:
			cs = timedFleet(rng, 1+rng.IntN(3*scoredPart), timedShapes[k/4%len(timedShapes)].fill)
		default:
			for n := 1 + rng.IntN(150); len(cs) < n; {
				cs = append(cs, soundCandidates(rng, r.Tokens)...)
			}
		}
		if k%4 == 3 {
			for i := range cs {
				if rng.IntN(len(cs)) == 0 {
					hostile(rng, &cs[i])
				}
			}
		}
		for i := range cs {
			if k%100 == 3 { // all are excluded
				cs[i].Wait = math.NaN()
			}
		}
		begunAmong(r, cs)
		var p Policy = costModels(rng)
		if rng.IntN(4) == 0 {
			p = policies[rng.IntN(len(policies))]
		}
		costs, want := make([]float64, len(cs)), make([]float64, len(cs))
		got := Choose(p, r, cs, costs)
		var choice Choice
		oneByOne(func() { choice = Choose(p, r, cs, want) })
		if got.Index != choice.Index || got.Reason != choice.Reason || !nearly(got.Cost, choice.Cost) {
			t.Fatalf("%s among %d, %+v: chose %+v in fours, %+v one by one", p.Name(), len(cs), *r, got, choice)
		}
		for i := range costs {
			if !nearly(costs[i], want[i]) {
				t.Fatalf("%s: candidate %d of %d, %+v, costs %v in fours, %v by itself", p.Name(), i, len(cs), cs[i], costs[i], want[i])
			}
		}
		reasons[got.Reason]++
	}
	for _, reason := range Reasons() {
		if reasons[reason] == 0 {
			t.Errorf("nothing was chosen by %s: %v", reason, reasons)
		}
	}
}

// FuzzFours takes bytes for candidates, of which each 64 are what is scored of one.
func FuzzFours(f *testing.F) {
	rng := rand.New(rand.NewPCG(9, 4))
	for n := range 9 {
		data := make([]byte, 64*n+rng.IntN(64))
		for i := range data {
			data[i] = byte(rng.Uint32())
		}
		f.Add(int32(1000*n), data)
	}
	f.Fuzz(func(t *testing.T, tokens int32, data []byte) {
		needFours(t)
		var cs []Candidate
		for ; len(data) >= 64; data = data[64:] {
			word := func(i int) uint32 { return binary.LittleEndian.Uint32(data[4*i:]) }
			number := func(i int) float64 { return math.Float64frombits(binary.LittleEndian.Uint64(data[32+8*i:])) }
			cs = append(cs, Candidate{
				Cached: int32(word(0)), InFlight: int32(word(1)), CachedGPU: int32(word(2)), Busy: math.Float32frombits(word(3)), Decoding: int32(word(4)), CachedCPU: int32(word(4)),
				Company: math.Float32frombits(word(5)), Share: math.Float32frombits(word(6)), KV: math.Float32frombits(word(7)),
				Wait: number(0), Speed: Speed{number(1), number(2), number(3)}, Queued: int32(word(0) % 3),
			})
		}
		compareParts(t, NewCostModel(), &Request{Tokens: int(tokens)}, toll{1e-5, 1e-4}, cs)
	})
}
