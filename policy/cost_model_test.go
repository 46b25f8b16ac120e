package policy

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// yard is a little fleet that a story sends requests to, with a clock of its own.
// Each replica prefills its prompts one after the other, in the time that its Speed
// says, and generates a token each 20 ms from then on. What was sent to a replica it
// has in its cache from then on, and for ever.
type yard struct {
	now      float64
	policy   Policy
	replicas []*stall
	rand     *rand.Rand
	tails    int
}

// stall is one replica of a yard. Its Candidate has what a story has set.
type stall struct {
	name  string
	fixed Candidate
	held  []string // prompts, as segments with a slash after each
	tier  string   // where they are
	// free is when it will have prefilled all, and visits when each request has
	// its first token and ends.
	free   float64
	visits [][2]float64
}

const yardToken = 0.020

// segments are those of a prompt such as "system:512 question:100".
func segments(t *testing.T, prompt string) (names []string, tokens []int) {
	for _, s := range strings.Fields(prompt) {
		name, n, _ := strings.Cut(s, ":")
		count, err := strconv.Atoi(n)
		if err != nil {
			t.Fatalf("segment %q: want name:tokens", s)
		}
		names, tokens = append(names, name), append(tokens, count)
	}
	return names, tokens
}

// candidate is what is known of the replica by one who asks for a prompt.
func (s *stall) candidate(t *testing.T, now float64, prompt string) Candidate {
	c := s.fixed
	names, tokens := segments(t, prompt)
	for _, h := range s.held {
		cached, path := 0, ""
		for i, name := range names {
			if path += name + "/"; !strings.HasPrefix(h, path) {
				break
			}
			cached += tokens[i]
		}
		c.Cached = max(c.Cached, Count(cached))
	}
	switch s.tier {
	case "gpu", "":
		c.CachedGPU, c.CachedCPU = c.Cached, c.Cached
	case "cpu":
		c.CachedCPU = c.Cached
	}
	if c.Wait == 0 {
		c.Wait = max(s.free-now, 0)
	}
	for _, v := range s.visits {
		if v[1] > now {
			c.InFlight++
			if v[0] <= now {
				c.Decoding++
			}
		}
	}
	return c
}

func (y *yard) candidates(t *testing.T, prompt string) []Candidate {
	var cs []Candidate
	for i, s := range y.replicas {
		c := s.candidate(t, y.now, prompt)
		c.Slot = i
		cs = append(cs, c)
	}
	return cs
}

// send sends one request, and returns where it went and why.
func (y *yard) send(t *testing.T, prompt string, tokens, own, output int) (*stall, Choice, float64) {
	cs := y.candidates(t, prompt)
	r := &Request{Rand: y.rand.Uint64(), Tokens: tokens, Own: own}
	begunAmong(r, cs)
	choice := Choose(y.policy, r, cs, make([]float64, len(cs)))
	s, c := y.replicas[choice.Index], &cs[choice.Index]
	ttft := TTFT(r, c)
	begin := max(s.free, y.now)
	s.free = begin + c.Speed.Time(Prefill(tokens-int(c.Cached), int(c.Cached)))
	s.visits = append(s.visits, [2]float64{s.free, s.free + float64(output)*yardToken})
	names, _ := segments(t, prompt)
	s.held = append(s.held, strings.Join(names, "/")+"/")
	return s, choice, ttft
}

func yardSeconds(s float64) string {
	switch {
	case math.IsInf(s, 0) || math.IsNaN(s):
		return fmt.Sprint(s)
	case s < 9.9995:
		return fmt.Sprintf("%.0f ms", s*1000)
	}
	return fmt.Sprintf("%.1f s", s)
}

// table tells what each replica would cost, term by term.
func (y *yard) table(t *testing.T, prompt string, tokens, own int) string {
	cs := y.candidates(t, prompt)
	r := &Request{Tokens: tokens, Own: own}
	begunAmong(r, cs)
	var out strings.Builder
	for i, s := range y.replicas {
		c := &cs[i]
		fmt.Fprintf(&out, "%s: %d of %d tokens cached, %d in flight:", s.name, c.Cached, tokens, c.InFlight)
		sum := 0.0
		for _, term := range y.policy.(Explainer).AppendTerms(nil, r, cs, i) {
			sum += term.Value
			if math.Abs(term.Value) >= 0.0005 {
				fmt.Fprintf(&out, " %s %s,", term.Name, yardSeconds(term.Value))
			}
		}
		fmt.Fprintf(&out, " together %s\n", yardSeconds(sum))
	}
	return out.String()
}

// The stories in testdata/cost_model send requests to a fleet:
//
//	fleet [weight=...]    replicas, one a line, with what set takes
//	set                   the same, of replicas that there are
//	hold                  replica prompt: it has that in its cache
//	costs prompt=(...)    what each replica would cost for a prompt
//	send prompt=(...)     sends it; n, every: so many times, at intervals; tail: with so
//	                      many tokens more, others each time; output: so many tokens;
//	                      own: so many of a conversation that goes on, as for costs
//	pass time=1s          lets time pass
//
// A send tells where each request went, in order, and of the last one why and how
// long it was expected to take.
func TestCostModelStories(t *testing.T) {
	datadriven.Walk(t, "testdata/cost_model", func(t *testing.T, path string) {
		y := &yard{rand: rand.New(rand.NewPCG(1, 1))}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			arg := func(name string) string {
				for _, a := range d.CmdArgs {
					if a.Key == name {
						return strings.Join(a.Vals, " ")
					}
				}
				return ""
			}
			number := func(name string, otherwise int) int {
				if n, err := strconv.Atoi(arg(name)); err == nil {
					return n
				}
				return otherwise
			}
			duration := func(name string) float64 {
				v, err := time.ParseDuration(arg(name))
				if arg(name) != "" && err != nil {
					d.Fatalf(t, "%v", err)
				}
				return v.Seconds()
			}
			_, counts := segments(t, arg("prompt"))
			tokens := 0
			for _, n := range counts {
				tokens += n
			}
			switch d.Cmd {
			case "fleet":
				weights := map[string]float64{}
				for _, a := range d.CmdArgs {
					v, err := strconv.ParseFloat(a.Vals[0], 64)
					if err != nil {
						d.Fatalf(t, "%v", err)
					}
					weights[a.Key] = v
				}
				y.policy, y.replicas, y.now = named(t, "cost_model", weights), nil, 0
				for line := range strings.Lines(d.Input) {
					name, _, _ := strings.Cut(strings.TrimSpace(line), " ")
					y.replicas = append(y.replicas, &stall{name: name, fixed: Candidate{Speed: DefaultSpeed, Share: 1, Exact: true}})
				}
				fallthrough
			case "set":
				for line := range strings.Lines(d.Input) {
					y.set(t, line)
				}
			case "hold":
				for line := range strings.Lines(d.Input) {
					name, prompt, _ := strings.Cut(strings.TrimSpace(line), " ")
					s := y.named(t, name)
					names, _ := segments(t, prompt)
					s.held = append(s.held, strings.Join(names, "/")+"/")
				}
			case "costs":
				return y.table(t, arg("prompt"), tokens, number("own", 0))
			case "pass":
				y.now += duration("time")
			case "send":
				return y.sends(t, arg("prompt"), tokens, number("own", 0), number("tail", 0), number("output", 100), number("n", 1), duration("every"))
			default:
				d.Fatalf(t, "unknown command %s", d.Cmd)
			}
			return ""
		})
	})
}

// sends sends n requests and tells how they went.
func (y *yard) sends(t *testing.T, prompt string, tokens, own, tail, output, n int, every float64) string {
	var where []string
	var choice Choice
	var ttft float64
	counts := map[string]int{}
	for i := range n {
		p := prompt
		if tail > 0 {
			y.tails++
			p += fmt.Sprintf(" tail%d:%d", y.tails, tail)
		}
		var s *stall
		s, choice, ttft = y.send(t, p, tokens+tail, own, output)
		where = append(where, s.name)
		counts[s.name]++
		if i < n-1 {
			y.now += every
		}
	}
	if n == 1 {
		return fmt.Sprintf("%s: %s, first token after %s\n", where[0], choice.Reason, yardSeconds(ttft))
	}
	var out strings.Builder
	for i := 0; i < len(where); {
		k := i
		for k < len(where) && where[k] == where[i] {
			k++
		}
		if i > 0 {
			out.WriteByte(' ')
		}
		if out.WriteString(where[i]); k > i+1 {
			fmt.Fprintf(&out, "×%d", k-i)
		}
		i = k
	}
	if n > 20 {
		out.Reset()
	} else {
		out.WriteByte('\n')
	}
	for i, s := range y.replicas {
		if i > 0 {
			out.WriteString(", ")
		}
		fmt.Fprintf(&out, "%s %d", s.name, counts[s.name])
	}
	fmt.Fprintf(&out, "\nthe last: %s, first token after %s\n", choice.Reason, yardSeconds(ttft))
	return out.String()
}

func (y *yard) named(t *testing.T, name string) *stall {
	i := slices.IndexFunc(y.replicas, func(s *stall) bool { return s.name == name })
	if i < 0 {
		t.Fatalf("no replica %q", name)
	}
	return y.replicas[i]
}

// set takes a line such as "a slower=3 kv=0.97".
func (y *yard) set(t *testing.T, line string) {
	fields := strings.Fields(line)
	s := y.named(t, fields[0])
	for _, f := range fields[1:] {
		key, value, _ := strings.Cut(f, "=")
		if key == "tier" {
			s.tier = value
			continue
		}
		x, err := strconv.ParseFloat(value, 64)
		if err != nil {
			t.Fatalf("%q: %v", f, err)
		}
		c := &s.fixed
		switch key {
		case "slower":
			c.Speed = Speed{DefaultSpeed.A * x, DefaultSpeed.B * x, DefaultSpeed.D * x}
		case "kv":
			c.KV = float32(x)
		case "queued":
			c.Queued = Count(int(x))
		case "share":
			c.Share = float32(x)
		case "wait":
			c.Wait = x
		case "inflight":
			c.InFlight = Count(int(x))
		case "decoding":
			c.Decoding = Count(int(x))
		case "busy":
			c.Busy = float32(x)
		case "begun":
			c.Begun = Count(int(x))
		case "rest":
			c.Rest = x
		case "exact":
			c.Exact = x != 0
		case "cached":
			c.Cached = Count(int(x))
		default:
			t.Fatalf("unknown key %q", key)
		}
	}
}
