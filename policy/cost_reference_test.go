package policy

import (
	"math"
	"math/big"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"
)

// referenceCost is the cost of one candidate by what CostModel's comment says, in
// numbers of 200 bits and without a thought for speed. The numbers have to be sound.
func referenceCost(m *CostModel, r *Request, cs []Candidate, i int) (cost float64) {
	n := func(x float64) *big.Float { return new(big.Float).SetPrec(200).SetFloat64(x) }
	add := func(x, y *big.Float) *big.Float { return new(big.Float).SetPrec(200).Add(x, y) }
	sub := func(x, y *big.Float) *big.Float { return new(big.Float).SetPrec(200).Sub(x, y) }
	mul := func(x, y *big.Float) *big.Float { return new(big.Float).SetPrec(200).Mul(x, y) }
	quo := func(x, y *big.Float) *big.Float { return new(big.Float).SetPrec(200).Quo(x, y) }
	least := func(x, y *big.Float) *big.Float {
		if x.Cmp(y) < 0 {
			return x
		}
		return y
	}
	// compute is how long tokens from one on to another take: each has those before
	// it to attend to, and itself by half.
	compute := func(c *Candidate, from, to *big.Float) *big.Float {
		count := sub(to, from)
		attention := quo(sub(mul(to, to), mul(from, from)), n(2))
		return add(mul(n(c.Speed.A), count), mul(n(c.Speed.B), attention))
	}
	tokens := n(float64(r.Tokens))
	c := &cs[i]
	held := int(math.Min(float64(c.Cached), float64(r.Tokens)))
	// counted is what counts of so many tokens in the cache.
	counted := func(held int) *big.Float {
		if c.Exact {
			return n(float64(held))
		}
		return mul(n(float64(held)), n(m.Approximate))
	}
	prefill := add(compute(c, counted(held), tokens), n(c.Speed.D))

	var wait, a, b *big.Float
	fewer := func(than *big.Float, x float64) *big.Float {
		if than == nil {
			return n(x)
		}
		return least(than, n(x))
	}
	all := cs
	if len(cs) > mostCounted { // it goes by some that lie together then
		first, _ := bits.Mul64(mix(r.Rand), uint64(len(cs)-mostCounted+1))
		all = cs[first : first+mostCounted]
	}
	for k := range all {
		wait, a, b = fewer(wait, math.Max(all[k].Wait, 0)), fewer(a, all[k].Speed.A), fewer(b, all[k].Speed.B)
	}
	// each is what a token that is computed costs others.
	each := n(0)
	if wait.Sign() > 0 {
		busy := quo(wait, add(wait, quo(mul(a, tokens), n(10))))
		each = mul(mul(n(m.OwnWorkBusy), busy), add(a, mul(b, tokens)))
	}
	long := least(mul(tokens, add(a, mul(b, tokens))), n(longestOwn))
	each = add(each, mul(mul(mul(n(m.OwnWorkLong), quo(long, n(longestOwn))), add(a, mul(b, tokens))), n(float64(c.Busy))))
	times := n(m.OwnWork)
	times = add(times, mul(n(m.Crowd), n(float64(c.InFlight-c.Decoding))))

	load := n(0)
	gpu := min(int(c.CachedGPU), held)
	cpu := max(min(int(c.CachedCPU), held), gpu)
	for _, tier := range []struct {
		from, to int
		each     float64
	}{{gpu, cpu, m.LoadCPU}, {cpu, held, m.LoadDisk}} {
		from, to := counted(tier.from), counted(tier.to)
		tokens := sub(to, from)
		load = add(load, least(mul(tokens, n(tier.each)), add(mul(times, compute(c, from, to)), mul(each, tokens))))
	}

	total := add(add(n(math.Max(c.Wait, 0)), mul(times, prefill)), load)
	total = add(total, mul(each, sub(tokens, counted(held))))
	total = add(total, mul(n(m.Company), n(float64(c.Company))))
	if c.Share > 0 && c.Share < 1 {
		total = quo(total, n(float64(c.Share)))
	}
	// Each that has begun waits for this one, and all of them for no longer than they take.
	total = add(total, mul(n(m.Yield), least(mul(prefill, n(float64(c.Begun))), n(c.Rest))))
	// A conversation that goes on leaves who alone holds it.
	if r.Own > 0 {
		heldBy := func(k int) int { return min(max(int(cs[k].Cached), 0), r.Tokens) }
		holder := 0
		for k := range cs {
			if heldBy(k) > heldBy(holder) {
				holder = k
			}
		}
		others := max(r.Tokens-r.Own, 0)
		for k := range cs {
			if k != holder {
				others = max(others, heldBy(k))
			}
		}
		faster := c.Speed.A <= cs[holder].Speed.A/hardly
		if h := heldBy(holder); h > others && i != holder && !faster {
			total = add(total, least(n(m.Leave), compute(&cs[holder], n(float64(others)), n(float64(h)))))
		}
	}
	if len(cs) > 1 {
		others := n(0)
		for k := range cs {
			if k != i {
				others = add(others, mul(n(cs[k].Speed.A), n(float64(cs[k].InFlight))))
			}
		}
		allowed := add(n(8), quo(mul(n(m.Bound), quo(others, n(float64(len(cs)-1)))), n(c.Speed.A)))
		if over := sub(n(float64(c.InFlight)), allowed); over.Sign() > 0 {
			total = add(total, mul(n(m.Overload), over))
		}
	}
	if c.KV > float32(m.KVLimit) && c.Queued > 0 {
		total = add(total, n(m.KVPressure))
	}
	cost, _ = total.Float64()
	return cost
}

// soundCandidates have numbers that can be. Now and then many of them are alike, or
// have tiers, or are pressed, or prompts have begun there.
func soundCandidates(rng *rand.Rand, tokens int) []Candidate {
	cs := make([]Candidate, 1+rng.IntN(1+rng.IntN(mostCounted)))
	if rng.IntN(100) == 0 {
		cs = make([]Candidate, 1+rng.IntN(500)) // of several blocks
	}
	tiers, pressed, mixed, many, idle := rng.IntN(2) == 0, rng.IntN(3), rng.IntN(2) == 0, 1+rng.Int32N(100), rng.IntN(2) == 0
	begun := rng.IntN(2) == 0
	for i := range cs {
		c := &cs[i]
		c.Slot, c.Key, c.Exact = i, rng.Uint64(), rng.IntN(2) == 0
		c.Speed = DefaultSpeed
		if mixed {
			f := math.Exp(3 * rng.Float64())
			c.Speed = Speed{f * 30e-6, f * 1e-9 * rng.Float64(), f * 5e-3 * rng.Float64()}
		}
		if rng.IntN(2) == 0 {
			c.Cached = rng.Int32N(2*int32(tokens) + 1)
			c.CachedGPU, c.CachedCPU = c.Cached, c.Cached
			if tiers {
				c.CachedCPU = rng.Int32N(c.Cached + 1)
				c.CachedGPU = rng.Int32N(c.CachedCPU + 1)
			}
		}
		if !idle || rng.IntN(4) == 0 {
			c.Wait = rng.ExpFloat64()
		}
		c.InFlight = rng.Int32N(many)
		c.Decoding = rng.Int32N(c.InFlight + 1)
		c.Company, c.Busy = 0.01*rng.Float32(), rng.Float32()
		c.Share = []float32{0, 1, 1, 1, 1, rng.Float32()}[rng.IntN(6)]
		c.KV = rng.Float32()
		if pressed > 0 && rng.IntN(3) < pressed {
			c.KV, c.Queued = 0.96, rng.Int32N(3)
		}
		if begun && rng.IntN(3) == 0 {
			c.Begun, c.Rest = 1+rng.Int32N(4), 3*rng.Float64()*rng.Float64()
		}
	}
	return cs
}

// begunAmong says in the request whether any of the candidates has begun, as its caller does.
func begunAmong(r *Request, cs []Candidate) {
	r.Begun = slices.ContainsFunc(cs, func(c Candidate) bool { return c.Begun > 0 })
}

func soundRequest(rng *rand.Rand) *Request {
	r := &Request{Rand: rng.Uint64(), Tokens: rng.IntN(8) * rng.IntN(6000)}
	if rng.IntN(2) == 0 {
		r.Own = rng.IntN(r.Tokens + 1)
	}
	return r
}

// costModels are the default, and some with weights drawn at random.
func costModels(rng *rand.Rand) *CostModel {
	m := NewCostModel()
	if rng.IntN(3) == 0 {
		*m = CostModel{1 + rng.Float64(), 5 * rng.Float64(), 5 * rng.Float64(), 1e-4 * rng.Float64(), 1e-4 * rng.Float64(), rng.Float64(), rng.Float64(),
			rng.Float64(), 1 + rng.Float64(), 0.1 * rng.Float64(), 3 * rng.Float64(), 0.1 * rng.Float64(), rng.Float64(), rng.Float64(), 0.01 * rng.Float64(), 0.1 * rng.Float64()}
	}
	return m
}

// The costs are those of the reference, and so is the choice.
func TestCostModelReference(t *testing.T) {
	rng := rand.New(rand.NewPCG(6, 2))
	pressed, yields, ends, left := 0, 0, 0, 0
	for range 1500 {
		m, r := costModels(rng), soundRequest(rng)
		cs := soundCandidates(rng, r.Tokens)
		begunAmong(r, cs)
		costs, want := make([]float64, len(cs)), make([]float64, len(cs))
		for i := range cs {
			want[i] = referenceCost(m, r, cs, i)
			if m.pressure(&cs[i]) > 0 {
				pressed++
			}
			if m.leaves(r, cs, i) > 0 {
				left++
			}
			switch y := m.yield(r, &cs[i]); {
			case y > 0 && y < m.Yield*cs[i].Rest:
				yields++
			case y > 0:
				ends++
			}
		}
		choice := Choose(m, r, cs, costs)
		for i := range cs {
			if math.IsInf(want[i], 1) != math.IsInf(costs[i], 1) || math.Abs(costs[i]-want[i]) > 1e-9*want[i] {
				t.Fatalf("%+v\n%+v\n%+v: candidate %d costs %v, want %v", *m, *r, cs, i, costs[i], want[i])
			}
		}
		least := slices.Min(want)
		slack := math.Max(m.Slack, m.SlackShare*least)
		if math.IsInf(want[choice.Index], 1) || want[choice.Index] > (least+slack)*(1+1e-9) {
			t.Fatalf("%+v: chose %+v of %v", cs, choice, want)
		}
	}
	if pressed == 0 {
		t.Error("none was pressed")
	}
	if left < 500 {
		t.Errorf("at %d replicas a conversation would leave another", left)
	}
	if yields < 500 || ends < 500 {
		t.Errorf("at %d replicas what has begun waits for the prompt, and at %d the prompt takes longer", yields, ends)
	}
}

// The terms add up to the cost, the usual way and the plain way to score agree, also
// for numbers that cannot be, and nothing of it is NaN.
func TestCostModelTerms(t *testing.T) {
	rng := rand.New(rand.NewPCG(6, 3))
	for k := range 4000 {
		m, r := costModels(rng), soundRequest(rng)
		cs := soundCandidates(rng, r.Tokens)
		if k%2 == 0 {
			r, cs = someRequest(rng), someCandidates(rng, true)
			for k%100 == 0 && len(cs) < 200 { // blocks of several
				cs = append(cs, someCandidates(rng, len(cs) > 150)...)
			}
			for i := range cs {
				if rng.IntN(10) == 0 {
					cs[i].Speed.A = -cs[i].Speed.A
				}
			}
		}
		begunAmong(r, cs)
		costs, plain := make([]float64, len(cs)), make([]float64, len(cs))
		m.Score(r, cs, costs)
		m.plain(r, cs, plain, m.toll(r, cs))
		for i, cost := range costs {
			if cost > 1e300 && !math.IsInf(cost, 1) {
				continue // what is added in another order may be infinite
			}
			sum, abs, infinite := 0.0, 0.0, ""
			for _, term := range m.AppendTerms(nil, r, cs, i) {
				abs += math.Abs(term.Value)
				if sum += term.Value; math.IsInf(term.Value, 1) {
					infinite = term.Name
				}
			}
			near := func(x, y float64) bool {
				return x == y || math.Abs(x-y) <= 1e-9*math.Max(math.Abs(x), math.Abs(y))+1e-12 || math.Abs(x-y) <= 1e-15*abs
			}
			plain[i] += m.yield(r, &cs[i]) + m.leaves(r, cs, i)
			if !(cost >= 0) || !near(sum, cost) || !near(plain[i], cost) || math.IsInf(cost, 1) != (infinite != "") {
				t.Fatalf("candidate %d costs %v, plainly %v, the terms %v\n%+v\n%+v\n%+v", i, cost, plain[i], m.AppendTerms(nil, r, cs, i), *m, *r, cs)
			}
			if ttft := TTFT(r, &cs[i]); !(ttft >= 0 && ttft <= MostTTFT) {
				t.Fatalf("%+v: expected after %v", cs[i], ttft)
			}
		}
	}
}

// Where nothing has begun, as the request says, a decision does not look for what has:
// Begun and Rest make no difference then.
func TestCostModelNothingBegun(t *testing.T) {
	rng := rand.New(rand.NewPCG(6, 8))
	told := 0
	for range 500 {
		m, r := costModels(rng), soundRequest(rng)
		cs := soundCandidates(rng, r.Tokens)
		costs, other := make([]float64, len(cs)), make([]float64, len(cs))
		for i := range cs {
			cs[i].Begun, cs[i].Rest = 1, 5
		}
		slack := m.Score(r, cs, costs)
		for i := range cs {
			cs[i].Begun, cs[i].Rest = 0, math.NaN()
		}
		if got := m.Score(r, cs, other); got != slack || !slices.Equal(costs, other) {
			t.Fatalf("%+v: costs %v with slack %v, and %v with %v when something else has begun", *r, costs, slack, other, got)
		}
		for i := range cs {
			cs[i].Begun, cs[i].Rest = 1, 5
		}
		r.Begun = true
		if m.Score(r, cs, other); r.Tokens > 0 && other[0] > costs[0] {
			told++
		}
	}
	if told < 300 {
		t.Errorf("only %d of 500 go by what has begun when they are told", told)
	}
}

// A prefill below zero excludes a replica, whatever else it would cost.
func TestCostModelBelowZero(t *testing.T) {
	cs := []Candidate{{Speed: DefaultSpeed, Share: 1, Decoding: 40, KV: 0.99, Queued: 1}, {Speed: DefaultSpeed, Share: 1}}
	costs := make([]float64, len(cs))
	if NewCostModel().Score(&Request{Tokens: 1000}, cs, costs); costs[0] != math.Inf(1) || !(costs[1] > 0 && costs[1] < 1) {
		t.Errorf("%v", costs)
	}
}

// All else the same, more cached never costs more, and more wait, requests, sequences,
// prompts that have begun or a smaller share never costs less; the same of the time to first token.
func TestCostModelMonotone(t *testing.T) {
	rng := rand.New(rand.NewPCG(6, 4))
	for range 8000 {
		m, r := costModels(rng), soundRequest(rng)
		cs := soundCandidates(rng, r.Tokens)
		i := rng.IntN(len(cs))
		c := &cs[i]
		c.Rest = max(c.Rest, 0.1*rng.Float64()) // so that one more that has begun has something left
		begunAmong(r, cs)
		before, costs := make([]float64, len(cs)), make([]float64, len(cs))
		m.Score(r, cs, before)
		first, was := TTFT(r, c), *c
		worse := true
		switch rng.IntN(8) {
		case 0:
			c.Cached += rng.Int32N(3000)
			worse = false
		case 1: // what was on disk, or nowhere, is on the GPU now
			c.Cached += rng.Int32N(3000)
			c.CachedCPU = max(c.CachedCPU, c.CachedGPU)
			c.CachedGPU = min(c.CachedGPU+rng.Int32N(3000), c.Cached)
			c.CachedCPU = max(c.CachedCPU, c.CachedGPU)
			worse = false
		case 2:
			c.Wait += rng.Float64()
		case 3:
			c.InFlight += rng.Int32N(100)
		case 4:
			n := rng.Int32N(100)
			c.InFlight, c.Decoding = c.InFlight+n, c.Decoding+n
		case 5:
			c.Share = cmpShare(c.Share) * rng.Float32()
		case 6:
			c.Begun++
			r.Begun = true
		case 7:
			c.Rest += rng.Float64()
		}
		m.Score(r, cs, costs)
		less, more := costs[i], before[i]
		ttftLess, ttftMore := TTFT(r, c), first
		if worse {
			less, more, ttftLess, ttftMore = more, less, ttftMore, ttftLess
		}
		if less > more*(1+1e-9) || ttftLess > ttftMore*(1+1e-9) {
			t.Fatalf("%+v\n%+v\nfrom %+v\nto %+v: cost from %v to %v, time to first token from %v to %v", *m, *r, was, *c, before[i], costs[i], first, TTFT(r, c))
		}
	}
}

// cmpShare is what a share stands for.
func cmpShare(s float32) float32 {
	if s > 0 && s < 1 {
		return s
	}
	return 1
}

// A replica by itself is chosen whatever it costs, and the time that it is expected to
// take is what it takes without anything else in the way.
func TestTTFT(t *testing.T) {
	f := func(tokens int, c Candidate, want float64) {
		t.Helper()
		if got := TTFT(&Request{Tokens: tokens}, &c); math.Abs(got-want) > 1e-9 {
			t.Errorf("%d tokens, %+v: %v, want %v", tokens, c, got, want)
		}
	}
	s := Speed{A: 1e-4, B: 1e-8, D: 0.01}
	f(0, Candidate{Speed: s}, 0.01)
	f(1000, Candidate{Speed: s}, 0.1+0.005+0.01)
	f(1000, Candidate{Speed: s, Wait: 2}, 2+0.1+0.005+0.01)
	f(1000, Candidate{Speed: s, Wait: -2}, 0.1+0.005+0.01)
	f(1000, Candidate{Speed: s, Cached: 900, CachedGPU: 900, CachedCPU: 900}, 0.01+1e-8*100*950+0.01)
	f(1000, Candidate{Speed: s, Cached: 900, CachedGPU: 100, CachedCPU: 500}, 0.01+1e-8*100*950+0.01+400*6e-6+400*25e-6)
	f(1000, Candidate{Speed: s, Cached: 5000, CachedGPU: 5000}, 0.01)
	f(1000, Candidate{Speed: s, Share: 0.1, Decoding: 50, InFlight: 99}, 0.1+0.005+0.01)
	f(1000, Candidate{Speed: s, Wait: math.NaN()}, MostTTFT)
	f(1000, Candidate{Speed: s, Wait: math.Inf(1)}, MostTTFT)
	f(1000, Candidate{Speed: Speed{A: -1}}, MostTTFT)
	f(math.MaxInt, Candidate{Speed: s}, MostTTFT)
	f(math.MinInt, Candidate{Speed: s}, 0.01)
}
