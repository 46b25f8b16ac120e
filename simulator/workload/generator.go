package workload

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// Options are what Generate makes a workload from. What is zero is the default of the
// kind of workload.
type Options struct {
	// Name is the kind, one of Names, or its letter and number.
	Name string
	// Seed makes the same workload again. Workloads of different seeds share no text.
	Seed uint64
	// Rate is how many requests come in a second on average, by default 4.
	Rate float64
	// Requests is how many there are at most, and Duration how long they come. By
	// default there are 1,000 and no end but that.
	Requests int
	Duration time.Duration
	// Tenants is how many there are, by default 1. Each conversation, and each request
	// that belongs to none, is one's of them, as likely as another's.
	Tenants int

	// Shared is how many tokens a text has on average that many prompts share: a
	// system prompt, a list of tools, a document. Groups is how many of them there
	// are, and Zipf how uneven their use is: the k-th is used k^-Zipf times as often
	// as the first. A negative Zipf is none: all are used alike.
	Shared, Groups int
	Zipf           float64
	// Own is how many tokens a request itself says on average, Result those of a
	// tool's result, and Output those of an answer.
	Own, Result, Output int
	// Turns is how many requests a conversation has on average, and Longest how many
	// tokens a prompt and its answer may have together before it ends.
	Turns   float64
	Longest int
	// Think is how long it takes on average until somebody who has an answer goes on.
	// Nobody waits for the answer itself: the schedule is fixed and supposes that each
	// token of it takes PerToken.
	Think, PerToken time.Duration
	// Burst is how many times as many requests come in a burst as on average.
	Burst float64
	// Throttles replace those of the kind.
	Throttles []Throttle
}

// kind is a kind of workload: its names, its defaults, and what makes it.
type kind struct {
	letter, name, about string
	defaults            Options
	make                func(*generator)
}

// kinds are all that there are. Their sizes are near what was published of real
// traffic: doc.go says where.
var kinds = []kind{
	{"w1", "system-prompts", "one question each behind one of many system prompts, some of them popular",
		Options{Shared: 2000, Groups: 32, Zipf: 1, Own: 160, Output: 130}, (*generator).questions},
	{"w6", "unshared", "questions that share nothing", Options{Own: 1000, Output: 130}, (*generator).questions},
}

// Names are the names of all kinds.
func Names() []string {
	var names []string
	for _, k := range kinds {
		names = append(names, k.name)
	}
	return names
}

// mostRequests is how many requests a workload may have.
const mostRequests = 10_000_000

// Generate makes a workload, or says everything that it cannot be made of.
func Generate(o Options) (*Workload, error) {
	i := slices.IndexFunc(kinds, func(k kind) bool { return o.Name == k.name || o.Name == k.letter && k.letter != "" })
	if i < 0 {
		return nil, fmt.Errorf("there is no workload %q; there are %s", o.Name, strings.Join(Names(), ", "))
	}
	k := &kinds[i]
	o.complete(&k.defaults)
	if err := o.check(); err != nil {
		return nil, fmt.Errorf("workload %s: %w", k.name, err)
	}
	g := &generator{Options: o, random: rand.New(rand.NewPCG(o.Seed, uint64(i))), salt: mix(o.Seed ^ mix(uint64(i)))}
	k.make(g)
	name := fmt.Sprintf("%s, seed %d, %v/s", k.name, o.Seed, o.Rate)
	return &Workload{Name: name, Requests: g.requests, Throttles: o.Throttles}, nil
}

func (o *Options) complete(by *Options) {
	fill(&o.Rate, by.Rate, 4)
	if o.Requests == 0 && o.Duration == 0 {
		o.Requests = by.Requests
		fill(&o.Requests, 1000)
	}
	fill(&o.Tenants, 1)
	fill(&o.Shared, by.Shared)
	fill(&o.Groups, by.Groups)
	fill(&o.Zipf, by.Zipf)
	fill(&o.Own, by.Own)
	fill(&o.Result, by.Result)
	fill(&o.Output, by.Output)
	fill(&o.Turns, by.Turns)
	fill(&o.Longest, by.Longest, 30_000)
	fill(&o.Think, by.Think)
	fill(&o.PerToken, by.PerToken, 25*time.Millisecond)
	fill(&o.Burst, by.Burst)
	if o.Throttles == nil {
		o.Throttles = by.Throttles
	}
}

// fill makes a field that is zero the first of values that is not.
func fill[T int | float64 | time.Duration](field *T, values ...T) {
	for _, v := range values {
		if *field == 0 {
			*field = v
		}
	}
}

func (o *Options) check() error {
	var wrong []string
	bad := func(is bool, format string, args ...any) {
		if is {
			wrong = append(wrong, fmt.Sprintf(format, args...))
		}
	}
	bad(!(o.Rate > 0 && o.Rate <= 1e6), "the rate must be above 0 and at most a million requests a second, not %v", o.Rate)
	bad(o.Requests < 0 || o.Requests > mostRequests, "requests must be 1 to %d, not %d", mostRequests, o.Requests)
	bad(o.Duration < 0, "the duration must not be negative, and is %v", o.Duration)
	bad(o.Requests == 0 && o.Rate*o.Duration.Seconds() > mostRequests, "%v at %v/s are more than %d requests", o.Duration, o.Rate, mostRequests)
	bad(o.Tenants < 0, "tenants must be at least 1, not %d", o.Tenants)
	for _, size := range []struct {
		name  string
		value int
	}{{"shared", o.Shared}, {"own", o.Own}, {"result", o.Result}, {"output", o.Output}, {"longest", o.Longest}} {
		bad(size.value < 0 || size.value > mostTokens, "%s must be 1 to %d tokens, not %d", size.name, mostTokens, size.value)
	}
	bad(o.Groups < 0 || o.Groups > 1_000_000, "groups must be 1 to a million, not %d", o.Groups)
	bad(!(o.Zipf <= 10), "zipf must be at most 10, not %v", o.Zipf)
	bad(o.Turns != 0 && !(o.Turns >= 1 && o.Turns <= 1000), "turns must be 1 to 1000, not %v", o.Turns)
	bad(o.Think < 0 || o.PerToken < 0, "times must not be negative: think is %v, per token %v", o.Think, o.PerToken)
	bad(o.Burst != 0 && !(o.Burst >= 1), "a burst must be at least 1, not %v", o.Burst)
	for _, t := range o.Throttles {
		bad(t.Engine < 0 || !(t.Factor > 0) || t.At < 0 || t.Until != 0 && t.Until <= t.At, "the throttle %+v needs an engine from 0 on, a factor above 0 and a time that ends after it begins", t)
	}
	if wrong != nil {
		return fmt.Errorf("%s", strings.Join(wrong, "; "))
	}
	return nil
}

// generator makes one workload. It is used by Generate alone.
type generator struct {
	Options
	random   *rand.Rand
	salt     uint64
	ids      uint64 // numbers that were given out
	requests []Request
}

// id is a number for a new part.
func (g *generator) id() uint64 {
	g.ids++
	return mix(g.salt+g.ids*golden)>>1 | 1
}

// part is a new part of about so many tokens.
func (g *generator) part(role string, mean int, spread float64) Part {
	return Part{ID: g.id(), Tokens: g.size(mean, spread), Role: role}
}

// size draws from a log-normal distribution of that mean, whose logarithm has that
// standard deviation; it is at least 1, and never above 20 times the mean.
func (g *generator) size(mean int, spread float64) int {
	m := float64(mean)
	x := math.Exp(math.Log(m) - spread*spread/2 + spread*g.random.NormFloat64())
	return max(1, int(math.Round(min(x, 20*m))))
}

// wait draws from an exponential distribution.
func (g *generator) wait(mean float64) time.Duration {
	return time.Duration(g.random.ExpFloat64() * mean * float64(time.Second))
}

// over reports that a request at that time is one too many.
func (g *generator) over(at time.Duration) bool {
	return g.Requests > 0 && len(g.requests) >= g.Requests || g.Duration > 0 && at >= g.Duration || at < 0
}

// zipf draws numbers from 0 on, the k-th, from 1 on, k^-exponent times as often as the
// first.
type zipf []float64 // the sums of the probabilities

func newZipf(n int, exponent float64) zipf {
	z, sum := make(zipf, n), 0.0
	for k := range z {
		sum += math.Pow(float64(k+1), -max(exponent, 0))
		z[k] = sum
	}
	for k := range z {
		z[k] /= sum
	}
	return z
}

func (z zipf) draw(r *rand.Rand) int {
	k, _ := slices.BinarySearch(z, r.Float64())
	return min(k, len(z)-1)
}

// Spreads of sizes, as standard deviations of their logarithms.
const (
	evenly   = 0.5 // texts that somebody has edited: system prompts, documents
	unevenly = 1.0 // what people and models say
)

// groups are the shared texts.
func (g *generator) groups(role string) []Part {
	parts := make([]Part, g.Groups)
	for k := range parts {
		parts[k] = g.part(role, g.Shared, evenly)
	}
	return parts
}

// questions come by themselves, in a Poisson process, behind a system prompt if there
// are any.
func (g *generator) questions() {
	systems, popular := g.groups("system"), newZipf(g.Groups, g.Zipf)
	for at := g.wait(1 / g.Rate); !g.over(at); at += g.wait(1 / g.Rate) {
		g.requests = append(g.requests, g.question(at, systems, popular))
	}
}

func (g *generator) question(at time.Duration, systems []Part, popular zipf) Request {
	r := Request{At: at, Tenant: g.random.IntN(g.Tenants)}
	if len(systems) > 0 {
		r.Parts = append(r.Parts, systems[popular.draw(g.random)])
	}
	r.Parts = append(r.Parts, g.part("user", g.Own, unevenly))
	r.Output = g.size(g.Output, unevenly)
	return r
}
