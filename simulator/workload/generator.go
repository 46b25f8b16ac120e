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
	// MaxTokens is the most tokens that an answer has, as if each request asked for no
	// more; 0 is any number.
	MaxTokens int
	// Sessions is how many conversations a swarm has, which all last as long as it does.
	Sessions int
	// Turns is how many requests a conversation has on average, and Longest how many
	// tokens a prompt and its answer may have together: then its history is replaced by
	// a summary.
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

// kind is a kind of workload: its names, what people are told of it, its defaults, and
// what makes it.
type kind struct {
	letter, name, about string
	defaults            Options
	make                func(*generator)
}

// kinds are all that there are. Their sizes are near what was published of real
// traffic: doc.go says where.
var kinds = []kind{
	{"w1", "system-prompts", "one question each behind one of many system prompts, some of them popular",
		Options{Shared: 2000, Groups: 32, Zipf: 1, Own: 160, Output: 210}, (*generator).questions},
	{"w2", "chat", "conversations whose history grows by each answer",
		Options{Shared: 500, Groups: 4, Zipf: 1, Own: 100, Output: 210, Turns: 5, Think: 20 * time.Second}, (*generator).chats},
	{"w3", "agents", "agents with tools: growing contexts, short answers, calls side by side",
		Options{Shared: 2400, Groups: 4, Zipf: 1, Own: 300, Result: 600, Output: 80, Turns: 10, Think: 2 * time.Second}, (*generator).agents},
	{"w4", "documents", "questions about some of many documents, in changing order",
		Options{Shared: 1000, Groups: 1000, Zipf: 1.1, Own: 60, Output: 100}, (*generator).retrievals},
	{"w5", "bursts", "system-prompts in bursts, while one engine is slow for a time",
		Options{Shared: 2000, Groups: 32, Zipf: 1, Own: 160, Output: 210, Burst: 5}, (*generator).bursts},
	{"w6", "unshared", "questions that share nothing", Options{Own: 1150, Output: 210}, (*generator).questions},

	{"", "dio-matched", "DIO's matched backends: short questions that share nothing",
		Options{Rate: 1, Own: 200, Output: 64}, (*generator).questions},
	{"", "dio-asymmetry", "the same while engine 1 takes twice as long",
		Options{Rate: 1, Own: 200, Output: 64, Throttles: []Throttle{{Engine: 1, Factor: 2}}}, (*generator).questions},
	{"", "dio-chat", "DIO's conversations of several turns",
		Options{Rate: 1, Shared: 200, Groups: 1, Own: 100, Output: 64, Turns: 6, Think: 5 * time.Second}, (*generator).chats},
	{"", "dio-swarm", "DIO's swarm: eight agents at a time, while engine 0 takes eight times as long from the first third on",
		Options{Rate: 4, Requests: 240, Sessions: 8, Shared: 800, Groups: 1, Own: 200, Result: 200, Output: 40}, (*generator).swarm},
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

// templates is room for what stands around the parts of a prompt.
const templates = 250

// leastLongest has room for what any kind asks at least.
const leastLongest = 1000

// Generate makes a workload, or says everything that it cannot be made of.
func Generate(o Options) (*Workload, error) {
	i := slices.IndexFunc(kinds, func(k kind) bool { return o.Name == k.name || o.Name == k.letter && k.letter != "" })
	if i < 0 {
		return nil, fmt.Errorf("there is no workload %q; there are w1 to w6, by name %s", o.Name, strings.Join(Names(), ", "))
	}
	k := &kinds[i]
	o.complete(&k.defaults)
	if err := o.check(); err != nil {
		return nil, fmt.Errorf("workload %s: %w", k.name, err)
	}
	g := &generator{Options: o, random: rand.New(rand.NewPCG(o.Seed, uint64(i))), salt: mix(o.Seed ^ mix(uint64(i))), parts: 8}
	k.make(g)
	w := &Workload{Name: strings.TrimSpace(k.letter + " " + k.name), Requests: g.requests, Throttles: g.Throttles}
	w.order()
	g.limit(w)
	return w, nil
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
	fill(&o.Sessions, by.Sessions)
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
	}{{"shared", o.Shared}, {"own", o.Own}, {"result", o.Result}, {"output", o.Output}, {"longest", o.Longest}, {"max-tokens", o.MaxTokens}} {
		bad(size.value < 0 || size.value > mostTokens, "%s must be 1 to %d tokens, not %d", size.name, mostTokens, size.value)
	}
	bad(o.Longest < leastLongest, "longest must be at least %d tokens, not %d", leastLongest, o.Longest)
	bad(o.Groups < 0 || o.Groups > 1_000_000, "groups must be 1 to a million, not %d", o.Groups)
	bad(!(o.Zipf <= 10), "zipf must be at most 10, not %v", o.Zipf)
	bad(o.Sessions < 0 || o.Sessions > 1_000_000, "sessions must be 1 to a million, not %d", o.Sessions)
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
	ids      uint64  // numbers that were given out
	parts    float64 // how many of the longest have room in a prompt
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
// standard deviation; it is at least 1 and at most what a part may have so that all
// that a prompt is made of at once has room.
func (g *generator) size(mean int, spread float64) int {
	x := math.Exp(math.Log(float64(mean)) - spread*spread/2 + spread*g.random.NormFloat64())
	return max(1, int(math.Round(min(x, float64(g.Longest-templates)/g.parts))))
}

// answer draws how many tokens an answer has.
func (g *generator) answer(mean int) int {
	n := g.size(mean, unevenly)
	if g.MaxTokens > 0 {
		n = min(n, g.MaxTokens)
	}
	return n
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
func (g *generator) groups(role string, mean int) []Part {
	parts := make([]Part, g.Groups)
	for k := range parts {
		parts[k] = g.part(role, mean, evenly)
	}
	return parts
}

// length is how long the requests are expected to come.
func (g *generator) length() time.Duration {
	if g.Requests == 0 {
		return g.Duration
	}
	d := time.Duration(min(float64(g.Requests)/g.Rate, longestTime.Seconds()) * float64(time.Second))
	if g.Duration > 0 {
		d = min(d, g.Duration)
	}
	return d
}

// limit leaves out the requests that are too many or too late.
func (g *generator) limit(w *Workload) {
	if g.Requests > 0 && len(w.Requests) > g.Requests {
		w.Requests = w.Requests[:g.Requests]
	}
	if g.Duration > 0 {
		w.Requests = w.Requests[:w.before(g.Duration)]
	}
}
