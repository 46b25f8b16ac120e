package policy

import (
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// The stories in testdata/prewarming send requests to replicas that take 100 us for each
// token. A line of ask is
//
//	when prompt+tokens replica:cached:wait ...
//
// for a prompt that begins as others of that name do as far as one has it cached, and has so
// many tokens more; it goes where it costs least. A request loses as much as it waits longer
// where it goes than it would where nothing is cached. due is asked with when and for which
// replica, maybe with how many sequences are generated there, and holds says what of which
// prefix, named as due tells it, a replica has.
func TestPrewarming(t *testing.T) {
	speed := Speed{A: 1e-4}
	datadriven.Walk(t, "testdata/prewarming", func(t *testing.T, path string) {
		p := &Prefixes{}
		names := map[uint64]string{}
		at := func(s string) time.Time {
			d, err := time.ParseDuration(s)
			if err != nil {
				t.Fatal(err)
			}
			return time.Unix(1, 0).Add(d)
		}
		number := func(s string) float64 {
			x, err := strconv.ParseFloat(s, 64)
			if err != nil {
				t.Fatal(err)
			}
			return x
		}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			var out strings.Builder
			for line := range strings.Lines(d.Input) {
				f := strings.Fields(line)
				switch d.Cmd {
				case "ask":
					name, more, _ := strings.Cut(f[1], "+")
					var candidates []Candidate
					longest := 0
					for _, spec := range f[2:] {
						part := strings.Split(spec, ":")
						c := Candidate{Key: keyOf(part[0]), Cached: Count(int(number(part[1]))), Wait: number(part[2]), Speed: speed, Exact: true}
						candidates, longest = append(candidates, c), max(longest, int(c.Cached))
					}
					r := &Request{Tokens: longest + int(number(more))}
					costs, best := make([]float64, len(candidates)), 0
					for i, c := range candidates {
						costs[i] = c.Wait + speed.Time(Prefill(r.Tokens-int(c.Cached), int(c.Cached)))
						if costs[i] < costs[best] {
							best = i
						}
					}
					prefix := fmt.Sprint(name, "/", candidates[best].Cached)
					names[keyOf(prefix)] = prefix
					p.Chosen(r, candidates, costs, best, keyOf(prefix), make([]uint32, r.Tokens), int(candidates[best].Cached), at(f[0]))
					fmt.Fprintf(&out, "to %s\n", strings.Split(f[2+best], ":")[0])
				case "due":
					c := &Candidate{Key: keyOf(f[1]), Speed: speed}
					if len(f) > 2 {
						c.Decoding = Count(int(number(f[2])))
					}
					if x, ok := p.Due(c, at(f[0])); ok {
						fmt.Fprintln(&out, names[x.Key])
					} else {
						fmt.Fprintln(&out, "nothing")
					}
				case "holds":
					if p.Holds(keyOf(f[1]), keyOf(f[0]), int(number(f[2]))) {
						fmt.Fprintln(&out, "lacks some")
					} else {
						fmt.Fprintln(&out, "has what counts, or has lost some")
					}
				default:
					t.Fatalf("%s: unknown command %q", d.Pos, d.Cmd)
				}
			}
			return out.String()
		})
	})
}

func keyOf(name string) uint64 {
	h := fnv.New64a()
	h.Write([]byte(name))
	return h.Sum64()
}

func TestPrewarmingIdle(t *testing.T) {
	f := func(w Prewarming, c Candidate, want bool) {
		t.Helper()
		if got := w.Idle(&c); got != want {
			t.Errorf("%+v at %+v: idle is %v, want %v", w, c, got, want)
		}
	}
	w := Prewarming{Length: 0.1}
	f(w, Candidate{}, true)
	f(Prewarming{}, Candidate{}, false)
	f(Prewarming{Length: -1}, Candidate{}, false)
	f(Prewarming{Length: math.NaN()}, Candidate{}, false)
	f(w, Candidate{InFlight: 5, Decoding: 5}, true)
	f(w, Candidate{InFlight: 6, Decoding: 5}, false)
	f(w, Candidate{Wait: 1e-9}, false)
	f(w, Candidate{Wait: math.NaN()}, false)
	f(w, Candidate{Queued: 1}, false)
	f(w, Candidate{Begun: 1}, false)
	f(w, Candidate{KV: 0.4}, true)
	f(w, Candidate{KV: 0.41}, false)
	f(w, Candidate{KV: float32(math.NaN())}, false)
	f(w, Candidate{Share: 1}, true)
	f(w, Candidate{Share: 0.5}, false)
}

// A prefix is computed as a long prompt in pieces is, and at last what is left of it.
func TestPrewarmingCut(t *testing.T) {
	f := func(tokens, held int, c Candidate, block, want int) {
		t.Helper()
		if got := (Prewarming{Length: 0.1}).Cut(tokens, held, &c, block); got != want {
			t.Errorf("%d tokens of which %d are held, in blocks of %d: the next piece ends at %d, want %d", tokens, held, block, got, want)
		}
	}
	even := Candidate{Speed: Speed{A: 1e-4}} // 1,000 tokens in a tenth of a second
	f(10_000, 0, even, 16, 992)
	f(10_000, 992, even, 16, 1984)
	f(10_000, 8512, even, 16, 10_000)
	f(1000, 0, even, 16, 1000)
	f(10_000, 0, even, 2048, 2048)
	f(10_000, 0, Candidate{Speed: Speed{A: 1e-2}}, 16, 512)
	f(10_000, 0, Candidate{}, 16, 10_000)
	// Less than is worth another piece is not left.
	f(1952, 1024, Candidate{Speed: Speed{A: 1e-2}}, 16, 1952)
	f(1536, 512, Candidate{Speed: Speed{A: 1e-2}}, 16, 1024)
	f(1535, 512, Candidate{Speed: Speed{A: 1e-2}}, 16, 1535)
	// What the candidate was described with is of another prompt.
	f(10_000, 0, Candidate{Speed: even.Speed, Cached: 9000}, 16, 992)
}

// Costs are times with cost_model alone.
func TestPrewarmingWith(t *testing.T) {
	w := Prewarming{Length: 0.1}
	for _, p := range every(t) {
		want := Prewarming{}
		if p.Name() == "cost_model" {
			want = w
		}
		if got := w.With(p); got != want {
			t.Errorf("%s: %+v, want %+v", p.Name(), got, want)
		}
	}
}

// lossScene is a request for 3,048 tokens, of which the first candidate has 2,048 cached and
// the others none, and which waits 50 ms longer at the first.
func lossScene(n int) (*Request, []Candidate, []float64) {
	r, candidates, costs := &Request{Tokens: 3048}, make([]Candidate, n), make([]float64, n)
	for i := range candidates {
		c := &candidates[i]
		*c = Candidate{Key: uint64(i), Slot: i, Exact: true, Speed: Speed{A: 1e-4}}
		if i == 0 {
			c.Cached, c.Wait = 2048, 0.05
		}
		costs[i] = c.Wait + c.Speed.Time(Prefill(r.Tokens-int(c.Cached), int(c.Cached)))
	}
	return r, candidates, costs
}

// What is not worth noting is not noted, whoever of two replicas may be at fault; what is is
// noted in full.
func TestPrefixesNotes(t *testing.T) {
	f := func(what string, want float64, set func(r *Request, c, chosen *Candidate, cost, own *float64)) {
		t.Helper()
		r, candidates, costs := lossScene(2)
		set(r, &candidates[1], &candidates[0], &costs[1], &costs[0])
		var p Prefixes
		p.Chosen(r, candidates, costs, 0, 7, make([]uint32, 3048), int(candidates[0].Cached), time.Unix(1, 0))
		got := 0.0
		if len(p.list) > 0 {
			got = p.list[0].lost()
		}
		if math.Abs(got-want) > 1e-9 {
			t.Errorf("%s: %v s are lost, want %v", what, got, want)
		}
	}
	nan, inf := math.NaN(), math.Inf(1)
	f("as it is", 0.05, func(r *Request, c, chosen *Candidate, cost, own *float64) {})
	f("in ramp-up", 0, func(r *Request, c, chosen *Candidate, cost, own *float64) { c.Share = 0.5 })
	f("with its full share", 0.05, func(r *Request, c, chosen *Candidate, cost, own *float64) { c.Share = 1 })
	f("not exactly known", 0, func(r *Request, c, chosen *Candidate, cost, own *float64) { c.Exact = false })
	f("excluded", 0, func(r *Request, c, chosen *Candidate, cost, own *float64) { *cost = inf })
	f("of no cost", 0, func(r *Request, c, chosen *Candidate, cost, own *float64) { *cost = nan })
	f("below no cost", 0, func(r *Request, c, chosen *Candidate, cost, own *float64) { *cost = -inf })
	f("sent where it costs everything", 0, func(r *Request, c, chosen *Candidate, cost, own *float64) { *own = inf })
	f("sent where it costs nobody knows what", 0, func(r *Request, c, chosen *Candidate, cost, own *float64) { *own = nan })
	f("longer than anybody waits", 0, func(r *Request, c, chosen *Candidate, cost, own *float64) { *own += 1e300 })
	f("slow", 0, func(r *Request, c, chosen *Candidate, cost, own *float64) { c.Speed = Speed{A: inf} })
	f("of no speed", 0, func(r *Request, c, chosen *Candidate, cost, own *float64) { c.Speed = Speed{A: nan} })
	f("cached nearly as much", 0, func(r *Request, c, chosen *Candidate, cost, own *float64) { *cost -= 0.1537; c.Cached = 1537 })
	f("cached much", 0.05, func(r *Request, c, chosen *Candidate, cost, own *float64) { *cost -= 0.1536; c.Cached = 1536 })
	f("cached less than nothing", 0.05, func(r *Request, c, chosen *Candidate, cost, own *float64) { c.Cached = math.MinInt32 })
	f("a short prefix", 0, func(r *Request, c, chosen *Candidate, cost, own *float64) { chosen.Cached = 511 })
	f("no time", 0, func(r *Request, c, chosen *Candidate, cost, own *float64) { *own -= 0.04995 })
}

// Of several that would have been better without what they lack the best has lost all.
func TestPrefixesNoteTheBest(t *testing.T) {
	r, candidates, costs := lossScene(4)
	costs[2] -= 0.01
	costs[3] += 1
	var p Prefixes
	p.Chosen(r, candidates, costs, 0, 7, make([]uint32, 3048), 2048, time.Unix(1, 0))
	if l := p.list[0].losses; len(l) != 1 || l[0].replica != 2 || math.Abs(l[0].seconds-0.06) > 1e-9 {
		t.Errorf("noted %+v, want 60 ms at replica 2", l)
	}
}

// IDs are of whoever wrote them: they are copied, and what is given out stays as it is.
func TestPrefixesCopy(t *testing.T) {
	r, candidates, costs := lossScene(2)
	ids := make([]uint32, 3048)
	for i := range ids {
		ids[i] = uint32(i)
	}
	var p Prefixes
	for range 5 {
		p.Chosen(r, candidates, costs, 0, 7, ids, 2048, time.Unix(1, 0))
	}
	clear(ids)
	x, ok := p.Due(&Candidate{Key: 1, Speed: Speed{A: 1e-4}}, time.Unix(1, 0))
	if !ok || x.Key != 7 || len(x.IDs) != 2048 || x.IDs[2047] != 2047 {
		t.Fatalf("due is %v, %d tokens of %d", ok, len(x.IDs), x.Key)
	}
}

// When all places are taken who comes has that of the prefix by which least was lost, by what
// that is worth now.
func TestPrefixesFull(t *testing.T) {
	r, candidates, costs := lossScene(2)
	var p Prefixes
	now := time.Unix(1, 0)
	ask := func(key uint64, lost float64) {
		costs[0] = costs[1] - 0.2048 + lost
		p.Chosen(r, candidates, costs, 0, key, make([]uint32, 3048), 2048, now)
	}
	has := func(key uint64) bool {
		for i := range p.list {
			if p.list[i].Key == key {
				return true
			}
		}
		return false
	}
	for key := range uint64(mostPrefixes) {
		ask(key, 0.1+float64(key)/1000)
	}
	ask(1000, 0.15)
	if len(p.list) != mostPrefixes || !has(1000) || has(0) || !has(1) {
		t.Errorf("%d prefixes; the least is left: %v", len(p.list), has(0))
	}
	ask(1, 0.1) // 0.201
	ask(1001, 0.15)
	if !has(1) || has(2) {
		t.Error("what was lost by later requests does not count")
	}
	// After a minute 0.355 s are 0.048.
	now = now.Add(time.Minute)
	ask(1002, 0.1)
	ask(1003, 0.09)
	ask(1004, 0.09)
	if len(p.list) != mostPrefixes || !has(1002) || has(3) || has(4) || has(5) || !has(6) {
		t.Error("what was lost long ago counts as much")
	}
}

// Long prefixes that nobody asks for any more make room for those that are asked for.
func TestPrefixesMakeRoom(t *testing.T) {
	const long = 1 << 20
	ids := make([]uint32, long+1)
	var p Prefixes
	now := time.Unix(1, 0)
	ask := func(key uint64, times int, lost float64) (ok bool) {
		r := &Request{Tokens: len(ids)}
		candidates := []Candidate{{Cached: long, Exact: true, Speed: Speed{A: 1e-6}}, {Key: 1, Exact: true, Speed: Speed{A: 1e-6}}}
		costs := []float64{lost, candidates[1].Speed.fill(float64(r.Tokens), 0)}
		costs[0] += candidates[1].Speed.fill(float64(r.Tokens), long)
		for range times {
			p.Chosen(r, candidates, costs, 0, key, ids, long, now)
		}
		x, ok := p.Due(&candidates[1], now)
		return ok && x.Key == key
	}
	if !ask(1, 3, 0.9) || !ask(2, 3, 1) {
		t.Fatal("two that there is room for are not due")
	}
	if ask(3, 3, 0.8) {
		t.Error("one by which less was lost has their place")
	}
	now = now.Add(20 * time.Second)
	if !ask(3, 3, 1.1) {
		t.Error("there is no place for one that is asked for now")
	}
	if p.tokens != 2*long {
		t.Errorf("%d tokens", p.tokens)
	}
}

// modelPrefixes is Prefixes in plain words: of each request what it has lost where and when,
// and everything is added up when it is asked for.
type modelPrefixes struct {
	list []*modelPrefix
}

type modelPrefix struct {
	key    uint64
	tokens int // 0 before it is kept
	asks   []time.Time
	losses []modelLoss
	held   map[uint64]int
}

type modelLoss struct {
	replica uint64
	at      time.Time
	seconds float64
}

func (e *modelPrefix) lost(now time.Time, counts func(replica uint64) bool) (sum float64) {
	for _, l := range e.losses {
		if counts(l.replica) {
			sum += l.seconds * math.Exp(-now.Sub(l.at).Seconds()/30)
		}
	}
	return sum
}

func (e *modelPrefix) forget(replica uint64) {
	var left []modelLoss
	for _, l := range e.losses {
		if l.replica != replica {
			left = append(left, l)
		}
	}
	e.losses = left
	delete(e.held, replica)
}

func anyReplica(uint64) bool { return true }

// least is the one by which least was lost, of those that there are.
func (m *modelPrefixes) least(now time.Time, but *modelPrefix, of func(*modelPrefix) bool) (least *modelPrefix) {
	for _, e := range m.list {
		if e != but && of(e) && (least == nil || e.lost(now, anyReplica) < least.lost(now, anyReplica)) {
			least = e
		}
	}
	return least
}

func (m *modelPrefixes) find(key uint64) *modelPrefix {
	for _, e := range m.list {
		if e.key == key {
			return e
		}
	}
	return nil
}

func (m *modelPrefixes) tokens() (sum int) {
	for _, e := range m.list {
		sum += e.tokens
	}
	return sum
}

func (m *modelPrefixes) chosen(key uint64, tokens int, replica uint64, held int, seconds float64, now time.Time) {
	e := m.find(key)
	if e == nil {
		e = &modelPrefix{key: key, held: map[uint64]int{}}
		if len(m.list) == 256 {
			*m.least(now, nil, func(*modelPrefix) bool { return true }) = *e
			e = m.find(key)
		} else {
			m.list = append(m.list, e)
		}
	}
	for replica := range e.held { // what is next to nothing is forgotten
		if e.lost(now, func(r uint64) bool { return r == replica }) < 1e-4 {
			e.forget(replica)
		}
	}
	if held < e.held[replica] {
		e.forget(replica)
	}
	e.held[replica] = held
	e.asks = append(e.asks, now)
	e.losses = append(e.losses, modelLoss{replica, now, seconds})
	if e.asked(now) > 1 && e.tokens == 0 {
		for m.tokens()+tokens > 2<<20 {
			out := m.least(now, e, func(o *modelPrefix) bool { return o.tokens > 0 })
			if out == nil || out.lost(now, anyReplica) >= e.lost(now, anyReplica) {
				return
			}
			out.tokens = 0
		}
		e.tokens = tokens
	}
}

func (e *modelPrefix) asked(now time.Time) (n float64) {
	for _, at := range e.asks {
		n += math.Exp(-now.Sub(at).Seconds() / 30)
	}
	return n
}

func (m *modelPrefixes) worth(key, replica uint64, speed Speed, decoding int, now time.Time) float64 {
	e := m.find(key)
	if e == nil || e.tokens == 0 || e.asked(now) < 2 {
		return 0
	}
	price := speed.Time(Prefill(e.tokens-e.held[replica], e.held[replica])) * (1 + 0.01*float64(decoding))
	return e.lost(now, func(r uint64) bool { return r == replica }) / price
}

func (m *modelPrefixes) holds(key, replica uint64, tokens int) bool {
	e := m.find(key)
	if e == nil {
		return false
	}
	if _, ok := e.held[replica]; !ok {
		return false
	}
	if e.tokens-tokens >= 512 && tokens >= e.held[replica] {
		e.held[replica] = tokens
		return true
	}
	e.forget(replica)
	return false
}

// Over any history the same is due as in plain words, and no more tokens are kept than
// mostPrefixTokens, nor more prefixes than mostPrefixes.
func TestPrefixesAsModel(t *testing.T) {
	withoutRace(t)
	ids := make([]uint32, 600_000)
	due, full, crowded := 0, 0, 0
	for seed := range uint64(8) {
		rng := rand.New(rand.NewPCG(seed, 11))
		speed := Speed{A: 1e-6 + 1e-5*rng.Float64(), B: 1e-12 * rng.Float64(), D: 5e-3 * rng.Float64()}
		keys := []int{5, 40, 400, 400}[seed%4]
		longest := []int{2000, 600_000}[seed/4]
		lengths := make([]int, keys)
		for k := range lengths {
			lengths[k] = 512 + rng.IntN(longest-512)
		}
		var p Prefixes
		var m modelPrefixes
		now := time.Unix(1, 0)
		for step := range 4000 {
			now = now.Add(time.Duration(rng.ExpFloat64() * float64(5*time.Millisecond)))
			k := min(int(rng.ExpFloat64()*float64(keys)/4), keys-1)
			key, tokens, replica := uint64(k), lengths[k], uint64(1+rng.IntN(3))
			switch {
			case rng.IntN(10) > 0:
				held := 0
				if tokens > 1024 && rng.IntN(3) == 0 {
					held = rng.IntN(tokens - 512)
				}
				r := &Request{Tokens: tokens}
				lost := (0.5 + rng.ExpFloat64()) * speed.fill(float64(tokens), 0) / 4
				candidates := []Candidate{{Cached: Count(tokens), Speed: speed}, {Key: replica, Cached: Count(held), Speed: speed, Exact: true}}
				costs := []float64{1 + lost, 1 - speed.D + speed.fill(float64(tokens), float64(held))}
				p.Chosen(r, candidates, costs, 0, key, ids, tokens, now)
				m.chosen(key, tokens, replica, held, lost, now)
			case rng.IntN(2) == 0:
				held := rng.IntN(tokens + 1)
				if got, want := p.Holds(key, replica, held), m.holds(key, replica, held); got != want {
					t.Fatalf("seed %d step %d: replica %d with %d of %d tokens lacks some: %v, want %v", seed, step, replica, held, tokens, got, want)
				}
			default:
				now = now.Add(time.Duration(rng.IntN(int(time.Second))))
			}
			decoding := rng.IntN(50)
			x, ok := p.Due(&Candidate{Key: replica, Speed: speed, Decoding: Count(decoding)}, now)
			best := 0.0
			for _, e := range m.list {
				best = max(best, m.worth(e.key, replica, speed, decoding, now))
			}
			if ok != (best >= 1) && math.Abs(best-1) > 1e-6 {
				t.Fatalf("seed %d step %d: at replica %d something is due: %v, and what is worth most is worth %v", seed, step, replica, ok, best)
			}
			if ok {
				due++
				if got := m.worth(x.Key, replica, speed, decoding, now); len(x.IDs) != lengths[x.Key] || math.Abs(got-best) > 1e-6*best {
					t.Fatalf("seed %d step %d: due is prefix %d of %d tokens, worth %v; want %d tokens, and one worth %v", seed, step, x.Key, len(x.IDs), got, lengths[x.Key], best)
				}
			}
			sum := 0
			for i := range p.list {
				sum += len(p.list[i].IDs)
			}
			if sum != p.tokens || sum != m.tokens() || sum > 2<<20 || len(p.list) > 256 {
				t.Fatalf("seed %d step %d: %d prefixes of %d tokens, counted as %d, want %d", seed, step, len(p.list), sum, p.tokens, m.tokens())
			}
			if len(p.list) == 256 {
				full++
			}
			if sum > 1<<20 {
				crowded++
			}
		}
	}
	if due < 1000 || full < 1000 || crowded < 1000 {
		t.Errorf("something was due %d times, all places were taken %d times, most room for tokens %d times", due, full, crowded)
	}
}

// rented is a fleet in which prompts begin alike: what each replica has of each prefix, what
// requests have lost because it had no more, and what was computed for it ahead.
type rented struct {
	rng           *rand.Rand
	prefixes      Prefixes
	rule          Prewarming
	speeds        []Speed
	lengths       []int
	held          [][]int // by replica and prefix
	lost, seconds [][]float64
	pieces        int
}

// ask sends a request to the replica that has all of a prefix, as far as one has.
func (f *rented) ask(k int, now time.Time) {
	n := len(f.speeds)
	r := &Request{Tokens: f.lengths[k] + 1 + f.rng.IntN(500)}
	candidates, costs, chosen := make([]Candidate, n), make([]float64, n), -1
	for i := range candidates {
		c := &candidates[i]
		*c = Candidate{Key: uint64(i), Cached: Count(f.held[i][k]), Wait: f.rng.ExpFloat64() / 10, Exact: true, Speed: f.speeds[i]}
		costs[i] = c.Wait + 0.9*c.Speed.Time(Prefill(r.Tokens-int(c.Cached), int(c.Cached))) + c.Speed.Time(Prefill(r.Tokens-int(c.Cached), int(c.Cached)))
		if chosen < 0 || costs[i] < costs[chosen] {
			chosen = i
		}
	}
	if tokens := f.held[chosen][k]; tokens >= 512 {
		at, most := -1, 1e-4
		rest := func(c *Candidate) float64 { return c.Speed.Time(Prefill(r.Tokens-tokens, tokens)) }
		for i := range candidates {
			c := &candidates[i]
			saved := c.Speed.Time(Prefill(r.Tokens-int(c.Cached), int(c.Cached))) - c.Speed.Time(Prefill(r.Tokens-tokens, tokens))
			if lost := costs[chosen] - costs[i] + saved; int(c.Cached)+512 <= tokens && lost > most && rest(c) < 2*rest(&candidates[chosen]) {
				at, most = i, lost
			}
		}
		if at >= 0 {
			f.lost[at][k] += most
		}
		f.prefixes.Chosen(r, candidates, costs, chosen, uint64(k)<<32|uint64(tokens), make([]uint32, r.Tokens), tokens, now)
	}
	f.held[chosen][k] = f.lengths[k]
}

// prewarm lets a replica compute the next piece of what is due.
func (f *rented) prewarm(i int, now time.Time) {
	c := &Candidate{Key: uint64(i), Speed: f.speeds[i]}
	for x, ok := f.prefixes.Due(c, now); ok; x, ok = f.prefixes.Due(c, now) {
		k := int(x.Key >> 32)
		held := min(f.held[i][k], len(x.IDs))
		if !f.prefixes.Holds(x.Key, uint64(i), held) {
			continue
		}
		n := f.rule.Cut(len(x.IDs), held, c, 16)
		f.seconds[i][k] += c.Speed.Time(Prefill(n-held, held))
		f.pieces++
		f.held[i][k] = n
		f.prefixes.Holds(x.Key, uint64(i), n)
		return
	}
}

// Where a replica takes more than twice as long as the chosen one for what is left of the prompt,
// nothing is computed ahead: it would draw requests there that are better off elsewhere.
func TestPrefixesLeaveTheSlow(t *testing.T) {
	f := func(times float64, want bool) {
		t.Helper()
		var p Prefixes
		now, ids := time.Unix(1, 0), make([]uint32, 4096)
		chosen, other := Candidate{Key: 1, Cached: 2048, Wait: 1, Exact: true, Speed: Speed{A: 1e-4}}, Candidate{Key: 2, Exact: true, Speed: Speed{A: times * 1e-4}}
		for range 5 {
			r := &Request{Tokens: 4096}
			candidates, costs := []Candidate{chosen, other}, make([]float64, 2)
			NewCostModel().Score(r, candidates, costs)
			p.Chosen(r, candidates, costs, 0, 7, ids, 2048, now)
		}
		if _, got := p.Due(&other, now); got != want {
			t.Errorf("at one that takes %v times as long something is due: %v, want %v", times, got, want)
		}
	}
	f(1, true)
	f(1.9, true)
	f(2.1, false)
	f(0.5, true)
}

// Who has paid as much rent as a thing costs buys it: whatever is asked, and however often
// caches lose what they have, no more is computed ahead at a replica than requests have lost
// because it was not there.
func TestPrefixesPayRentFirst(t *testing.T) {
	withoutRace(t)
	pieces := 0
	for seed := range uint64(100) {
		rng := rand.New(rand.NewPCG(seed, 12))
		f := &rented{rng: rng, rule: Prewarming{Length: 0.02 + 0.2*rng.Float64()}}
		keys := 1 + rng.IntN(6)
		for range keys {
			f.lengths = append(f.lengths, 16*(32+rng.IntN(600)))
		}
		for range 2 + rng.IntN(4) {
			f.speeds = append(f.speeds, Speed{A: 1e-4 * (0.7 + 0.3*rng.Float64()), B: 1e-8 * rng.Float64()})
			f.held = append(f.held, make([]int, keys))
			f.lost, f.seconds = append(f.lost, make([]float64, keys)), append(f.seconds, make([]float64, keys))
		}
		now := time.Unix(1, 0)
		loses := rng.IntN(8)
		for step := range 2000 {
			now = now.Add(time.Duration(rng.ExpFloat64() * float64(100*time.Millisecond)))
			f.ask(rng.IntN(keys), now)
			i := rng.IntN(len(f.speeds))
			f.prewarm(i, now)
			if rng.IntN(10) < loses {
				k := rng.IntN(keys)
				f.held[i][k] = f.held[i][k] * rng.IntN(3) / 2 / 16 * 16
				f.held[i][k] = min(f.held[i][k], f.lengths[k])
			}
			for i := range f.seconds {
				for k, seconds := range f.seconds[i] {
					if lost := f.lost[i][k]; seconds > lost+1e-9 {
						t.Fatalf("seed %d step %d: replica %d has computed %.3f s of prefix %d ahead, and %.3f s were lost", seed, step, i, seconds, k, lost)
					}
				}
			}
		}
		pieces += f.pieces
	}
	if pieces < 500 {
		t.Errorf("only %d pieces", pieces)
	}
}

// Whatever the numbers are, nothing is kept that is no number, and what is due is one of those
// that were asked for.
func TestPrefixesAnyNumbers(t *testing.T) {
	withoutRace(t)
	rng := rand.New(rand.NewPCG(7, 13))
	ids := make([]uint32, 4096)
	number := func(usual float64) float64 {
		return []float64{math.NaN(), 0, math.Inf(1), math.Inf(-1), -usual, 1e300, 1e-300, math.MaxFloat64, usual, usual, usual}[rng.IntN(11)]
	}
	count := func(list ...int) int { return list[rng.IntN(len(list))] }
	candidate := func() Candidate {
		return Candidate{
			Key: uint64(rng.IntN(4)), Cached: Count(count(0, 0, -600, math.MinInt, math.MaxInt, 600, 2048)), Exact: rng.IntN(4) > 0,
			Speed: Speed{number(1e-4), number(1e-9), number(5e-3)}, Share: float32(number(1)), Decoding: Count(count(0, 5, -5, math.MinInt, math.MaxInt)),
		}
	}
	var p Prefixes
	noted, due := 0, 0
	for range 100_000 {
		now := time.Unix(int64(rng.IntN(100)), 0) // clocks go back, too
		candidates := []Candidate{candidate(), candidate(), candidate()}
		costs := []float64{number(1), number(1), number(1)}
		r := &Request{Tokens: count(0, -5, math.MinInt, math.MaxInt, 4096, 4096)}
		key := uint64(rng.IntN(300))
		p.Chosen(r, candidates, costs, rng.IntN(4)-1, key, ids[:count(0, 600, 4096, 4096)], count(0, -1, 512, 2048, 2048, math.MaxInt), now)
		c := candidate()
		if x, ok := p.Due(&c, now); ok {
			if due++; len(x.IDs) < 512 || x.Key >= 300 {
				t.Fatalf("due is prefix %d of %d tokens", x.Key, len(x.IDs))
			}
			p.Holds(x.Key, c.Key, count(0, math.MinInt, math.MaxInt, 512, len(x.IDs)))
		}
		sum := 0
		for i := range p.list {
			e := &p.list[i]
			if lost := e.lost(); !(lost >= 0 && lost < math.MaxFloat64) || !(e.asked >= 1) {
				t.Fatalf("prefix %d: %v s are lost by %v requests", e.Key, lost, e.asked)
			}
			sum += len(e.IDs)
		}
		if noted = max(noted, len(p.list)); sum != p.tokens || sum > mostPrefixTokens || noted > mostPrefixes {
			t.Fatalf("%d prefixes of %d tokens, counted as %d", len(p.list), sum, p.tokens)
		}
	}
	if noted < 200 || due < 1000 {
		t.Errorf("%d prefixes, and something was due %d times", noted, due)
	}
}

// Requests are sent and replicas looked at from many goroutines.
func TestPrefixesFromManyGoroutines(t *testing.T) {
	var p Prefixes
	var all sync.WaitGroup
	due := make([]int, 8)
	for g := range due {
		all.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 14))
			r, candidates, costs := lossScene(4)
			ids := make([]uint32, 3048)
			for step := range 3000 {
				now := time.Unix(1, int64(step)*1e6)
				p.Chosen(r, candidates, costs, 0, uint64(rng.IntN(400)), ids, 1024+rng.IntN(1024), now)
				c := &candidates[1+rng.IntN(3)]
				if x, ok := p.Due(c, now); ok {
					due[g]++
					if len(x.IDs) < 512 || x.IDs[len(x.IDs)-1] != 0 {
						t.Errorf("due is prefix %d of %d tokens", x.Key, len(x.IDs))
					}
					p.Holds(x.Key, c.Key, rng.IntN(len(x.IDs)+1))
				}
			}
		})
	}
	all.Wait()
	sum := 0
	for i := range p.list {
		sum += len(p.list[i].IDs)
	}
	if sum != p.tokens || len(p.list) > mostPrefixes {
		t.Errorf("%d prefixes of %d tokens, counted as %d", len(p.list), sum, p.tokens)
	}
	for g, n := range due {
		if n == 0 {
			t.Errorf("to goroutine %d nothing was ever due", g)
		}
	}
}

// A request that has lost nothing, and one behind a prefix that is known, are noted without
// an allocation, also in the place of another.
func TestPrefixesAllocNothing(t *testing.T) {
	r, candidates, costs := lossScene(8)
	ids := make([]uint32, 3048)
	now := time.Unix(1, 0)
	var p Prefixes
	for key := range uint64(mostPrefixes) {
		for range 2 {
			p.Chosen(r, candidates, costs, 0, key, ids, 2048, now)
		}
	}
	f := func(what string, do func()) {
		t.Helper()
		if n := testing.AllocsPerRun(100, do); n != 0 {
			t.Errorf("%s: %v allocations", what, n)
		}
	}
	f("a known prefix", func() { p.Chosen(r, candidates, costs, 0, 7, ids, 2048, now) })
	f("a short prefix", func() { p.Chosen(r, candidates, costs, 0, 7, ids, 500, now) })
	key := uint64(1000)
	f("another one", func() { key++; p.Chosen(r, candidates, costs, 0, key, ids, 2048, now) })
	f("what is due", func() { p.Due(&candidates[1], now) })
	f("what it holds", func() { p.Holds(8, 1, 512) })
	costs[0] = 0
	f("nothing lost", func() { p.Chosen(r, candidates, costs, 0, 7, ids, 2048, now) })
}

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
	f := func(name string, ask func(p *Prefixes, i int, r *Request, candidates []Candidate, costs []float64, ids []uint32)) {
		b.Run(name, func(b *testing.B) {
			r, candidates, costs := lossScene(256)
			ids := make([]uint32, 3048)
			var p Prefixes
			for key := range uint64(mostPrefixes) {
				for i := 1; i < len(candidates); i += 32 {
					costs[i] -= 0.01
					p.Chosen(r, candidates, costs, 0, key, ids, 2048, time.Unix(1, 0))
					costs[i] += 0.01
				}
			}
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				i++
				ask(&p, i, r, candidates, costs, ids)
			}
		})
	}
	now := time.Unix(1, 0)
	f("nothing lost", func(p *Prefixes, i int, r *Request, candidates []Candidate, costs []float64, ids []uint32) {
		costs[0] = 0
		p.Chosen(r, candidates, costs, 0, 7, ids, 2048, now)
	})
	f("known", func(p *Prefixes, i int, r *Request, candidates []Candidate, costs []float64, ids []uint32) {
		p.Chosen(r, candidates, costs, 0, uint64(i%mostPrefixes), ids, 2048, now)
	})
	f("another", func(p *Prefixes, i int, r *Request, candidates []Candidate, costs []float64, ids []uint32) {
		p.Chosen(r, candidates, costs, 0, uint64(1000+i), ids, 2048, now)
	})
	f("due", func(p *Prefixes, i int, r *Request, candidates []Candidate, costs []float64, ids []uint32) {
		p.Due(&candidates[1+i%255], now)
	})
}
