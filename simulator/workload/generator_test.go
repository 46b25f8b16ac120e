package workload

import (
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

func generated(t *testing.T, o Options) *Workload {
	t.Helper()
	w, err := Generate(o)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// chiSquare tells whether counts are as expected. Of a generator that is right it
// fails for one seed in a thousand; the seeds of the tests are fixed.
func chiSquare(t *testing.T, what string, counts, expected []float64) {
	t.Helper()
	x, free := 0.0, -1.0
	for i := range counts {
		if expected[i] < 5 {
			t.Fatalf("%s: cell %d is too small: %v", what, i, expected[i])
		}
		x += (counts[i] - expected[i]) * (counts[i] - expected[i]) / expected[i]
		free++
	}
	// Wilson and Hilferty: the cube root is about normal.
	z := (math.Cbrt(x/free) - (1 - 2/(9*free))) / math.Sqrt(2/(9*free))
	if z > 3.1 {
		t.Errorf("%s: chi-square is %.0f at %.0f degrees of freedom\n%.0f\n%.0f", what, x, free, counts, expected)
	}
}

// within tells whether a mean is what it should be, to so many parts.
func within(t *testing.T, what string, got, want, part float64) {
	t.Helper()
	if !(math.Abs(got-want) <= part*math.Abs(want)) {
		t.Errorf("%s is %.4g, want %.4g ± %.0f %%", what, got, want, part*100)
	}
}

// poisson tests that requests come in a Poisson process of a rate: the gaps are
// exponential, and so many come in one second however many came in the one before.
func poisson(t *testing.T, w *Workload, rate float64) {
	t.Helper()
	const bins = 20
	counts, expected := make([]float64, bins), make([]float64, bins)
	last := time.Duration(0)
	for _, r := range w.Requests {
		u := 1 - math.Exp(-rate*(r.At-last).Seconds()) // uniform
		counts[min(int(u*bins), bins-1)]++
		last = r.At
	}
	for i := range expected {
		expected[i] = float64(len(w.Requests)) / bins
	}
	chiSquare(t, w.Name+": gaps", counts, expected)
	if d := dispersion(w, time.Second); d < 0.9 || d > 1.1 {
		t.Errorf("%s: the variance of the requests in a second is %.2f times their mean", w.Name, d)
	}
}

// dispersion is the variance over the mean of the requests in a window.
func dispersion(w *Workload, window time.Duration) float64 {
	counts := make([]float64, w.Requests[len(w.Requests)-1].At/window)
	for _, r := range w.Requests {
		if i := int(r.At / window); i < len(counts) {
			counts[i]++
		}
	}
	mean, square := 0.0, 0.0
	for _, c := range counts {
		mean += c / float64(len(counts))
		square += c * c / float64(len(counts))
	}
	return (square - mean*mean) / mean
}

// steady tests that conversations are in full course from the beginning on: as many
// requests come in the first seconds as in later ones.
func steady(t *testing.T, o Options) {
	t.Helper()
	o.Duration = 60 * time.Second
	const runs, windows = 100, 6
	var counts [windows]float64
	for o.Seed = range runs {
		for _, r := range generated(t, o).Requests {
			counts[int(r.At*windows/o.Duration)]++
		}
	}
	for i, n := range counts {
		within(t, o.Name+": rate in window "+string(rune('0'+i)), n/runs/(o.Duration.Seconds()/windows), o.Rate, 0.08)
	}
}

// reuse is what part of all tokens is a beginning that some prompt before had too.
func reuse(w *Workload) float64 {
	type node struct{ next map[Part]*node }
	root, shared, all := &node{map[Part]*node{}}, 0, 0
	for i := range w.Requests {
		n, known := root, true
		for _, p := range w.Requests[i].Parts {
			all += p.Tokens
			next := n.next[p]
			if next == nil {
				known = false
				next = &node{map[Part]*node{}}
				n.next[p] = next
			}
			if known {
				shared += p.Tokens
			}
			n = next
		}
		// What was said is there too.
		if a := w.Requests[i].answer(); a.ID != 0 && n.next[a] == nil {
			n.next[a] = &node{map[Part]*node{}}
		}
	}
	return float64(shared) / float64(all)
}

// sizes tests a mean, and the spread of the logarithm.
func sizes(t *testing.T, what string, tokens []float64, mean, spread, part float64) {
	t.Helper()
	sum, logs, squares := 0.0, 0.0, 0.0
	n := float64(len(tokens))
	for _, x := range tokens {
		sum += x
		logs += math.Log(x)
		squares += math.Log(x) * math.Log(x)
	}
	within(t, what+": mean", sum/n, mean, part)
	within(t, what+": spread of the logarithm", math.Sqrt(squares/n-logs/n*logs/n), spread, part)
}

// parts are the sizes of the last parts of all prompts with a role.
func (w *Workload) lastParts(role string) (tokens []float64) {
	for _, r := range w.Requests {
		if p := r.Parts[len(r.Parts)-1]; p.Role == role {
			tokens = append(tokens, float64(p.Tokens))
		}
	}
	return tokens
}

func (w *Workload) outputs() (tokens []float64) {
	for _, r := range w.Requests {
		tokens = append(tokens, float64(r.Output))
	}
	return tokens
}

func TestSystemPrompts(t *testing.T) {
	w := generated(t, Options{Name: "w1", Seed: 1, Requests: 20_000, Rate: 10, Tenants: 3})
	poisson(t, w, 10)
	uses, sizes1, tenants := map[uint64]float64{}, map[uint64]float64{}, make([]float64, 3)
	for _, r := range w.Requests {
		if len(r.Parts) != 2 || r.Parts[0].Role != "system" || r.Parts[1].Role != "user" || r.Session != 0 {
			t.Fatalf("%+v", r)
		}
		uses[r.Parts[0].ID]++
		sizes1[r.Parts[0].ID] = float64(r.Parts[0].Tokens)
		tenants[r.Tenant]++
	}
	var counts, expected, all []float64
	sum := 0.0
	for k := range 32 {
		sum += 1 / float64(k+1)
	}
	for _, n := range uses {
		counts = append(counts, n)
	}
	slices.Sort(counts)
	slices.Reverse(counts)
	for k := range 32 {
		expected = append(expected, 20_000/float64(k+1)/sum)
	}
	if len(counts) != 32 {
		t.Fatalf("%d system prompts, want 32", len(counts))
	}
	chiSquare(t, "system prompts", counts, expected)
	chiSquare(t, "tenants", tenants, []float64{20_000 / 3.0, 20_000 / 3.0, 20_000 / 3.0})
	sizes(t, "questions", w.lastParts("user"), 160, 1, 0.03)
	sizes(t, "answers", w.outputs(), 210, 1, 0.03)
	for _, s := range sizes1 {
		all = append(all, s)
	}
	sizes(t, "system prompts", all, 2000, 0.5, 0.25)
	// All but the questions, and the first use of each.
	first, tokens := 0.0, 0.0
	for _, s := range all {
		first += s
	}
	for _, r := range w.Requests {
		for _, p := range r.Parts {
			tokens += float64(p.Tokens)
			if p.Role == "user" {
				first += float64(p.Tokens)
			}
		}
	}
	within(t, "reuse", reuse(w), 1-first/tokens, 1e-9)
	if r := reuse(w); r < 0.85 || r > 0.97 {
		t.Errorf("reuse %.3f", r)
	}
}

func TestUnshared(t *testing.T) {
	w := generated(t, Options{Name: "unshared", Seed: 2, Requests: 20_000, Rate: 3})
	poisson(t, w, 3)
	// Of the longest there is no room for, which takes 3 % off.
	sizes(t, "questions", w.lastParts("user"), 1120, 1, 0.03)
	sizes(t, "answers", w.outputs(), 210, 1, 0.03)
	if r := reuse(w); r != 0 {
		t.Errorf("reuse %.3f", r)
	}
}

// Conversations come in a Poisson process, are in full course from the beginning on,
// have a geometric number of turns, and grow by what was said.
func TestChat(t *testing.T) {
	const seconds, rate = 20_000, 2
	w := generated(t, Options{Name: "w2", Seed: 3, Duration: seconds * time.Second, Rate: rate})
	within(t, "rate", float64(len(w.Requests))/seconds, rate, 0.04)
	steady(t, Options{Name: "w2", Rate: rate})
	sizes(t, "what people say", w.lastParts("user"), 100, 1, 0.03)
	sizes(t, "answers", w.outputs(), 210, 1, 0.03)
	grow(t, w, 25*time.Millisecond)
	begin, turns := map[int]time.Duration{}, map[int]int{}
	thought, gaps := 0.0, 0.0
	last := map[int]*Request{}
	for i := range w.Requests {
		r := &w.Requests[i]
		if r.Turn == 0 {
			begin[r.Session] = r.At
		} else {
			before := last[r.Session]
			thought += (r.At - before.At - time.Duration(before.Output)*25*time.Millisecond).Seconds()
			gaps++
			if len(r.Parts) != len(before.Parts)+2 {
				t.Errorf("turn %d has %d parts behind %d", r.Turn, len(r.Parts), len(before.Parts))
			}
		}
		turns[r.Session]++
		last[r.Session] = r
	}
	within(t, "thinking", thought/gaps, 20, 0.03)
	// Those that begin late may not be over in time.
	counts, expected, n := make([]float64, 12), make([]float64, 12), 0.0
	for session, at := range begin {
		if at < (seconds-2000)*time.Second {
			counts[min(turns[session], len(counts))-1]++
			n++
		}
	}
	rest := n
	for k := range expected {
		expected[k] = rest / 5
		if k == len(expected)-1 {
			expected[k] = rest
		}
		rest -= expected[k]
	}
	chiSquare(t, "turns", counts, expected)
	if r := reuse(w); r < 0.80 || r > 0.95 {
		t.Errorf("reuse %.3f", r)
	}
}

// grow tests that whatever an assistant or tool that was asked has said in a prompt is
// the answer to a request before, which is taken to be there by then, behind just what
// was asked.
func grow(t *testing.T, w *Workload, perToken time.Duration) {
	t.Helper()
	asked := map[uint64]*Request{}
	answers := 0
	for i := range w.Requests {
		r := &w.Requests[i]
		for k, p := range r.Parts {
			if p.Role != "assistant" {
				continue
			}
			q := asked[p.ID]
			if q == nil || q.Output != p.Tokens {
				t.Fatalf("request %d goes on with an answer that nobody was asked for", i)
			}
			if end := q.At + time.Duration(q.Output)*perToken; end > r.At {
				t.Fatalf("request %d at %v goes on with an answer that is there at %v", i, r.At, end)
			}
			if !slices.Equal(q.Parts, r.Parts[:k]) || q.Session != r.Session {
				t.Fatalf("request %d goes on with the answer to other parts", i)
			}
			answers++
		}
		asked[r.Answer] = r
	}
	if answers < len(w.Requests) {
		t.Errorf("%d answers in the prompts of %d requests", answers, len(w.Requests))
	}
}

func TestAgents(t *testing.T) {
	const seconds, rate = 10_000, 5
	w := generated(t, Options{Name: "agents", Seed: 4, Duration: seconds * time.Second, Rate: rate})
	within(t, "rate", float64(len(w.Requests))/seconds, rate, 0.04)
	steady(t, Options{Name: "agents", Rate: rate})
	grow(t, w, 25*time.Millisecond)
	results, asked := w.lastParts("tool"), map[uint64]bool{}
	sizes(t, "results", results, 600, 1, 0.15) // one in ten is what another agent has said
	lists := map[Part]bool{}
	steps, forks, calls := map[int]float64{}, 0.0, make([]float64, 5)
	sum, n := 0.0, 0.0
	for i := range w.Requests {
		r := &w.Requests[i]
		if r.Parts[0].Role != "tools" || r.Parts[1].Role != "system" || r.Parts[2].Role != "user" {
			t.Fatalf("%+v", r.Parts[:3])
		}
		lists[r.Parts[0]] = true
		asked[r.Answer] = true
		switch last := r.Parts[len(r.Parts)-1]; {
		case last.Role == "tool":
			k := 0
			for r.Parts[len(r.Parts)-1-k].Role == "tool" {
				k++
			}
			if asked[last.ID] {
				forks++
			} else {
				calls[k]++
			}
			steps[r.Session]++
		case len(r.Parts) == 3:
			steps[r.Session]++
		}
		sum += float64(r.Input())
		n++
	}
	if len(lists) != 4 {
		t.Errorf("%d lists of tools, want 4", len(lists))
	}
	all := forks + calls[1] + calls[2] + calls[3] + calls[4]
	chiSquare(t, "calls", []float64{forks, calls[1], calls[2], calls[3], calls[4]},
		[]float64{all / 10, all * 0.75, all * 0.05, all * 0.05, all * 0.05})
	total := 0.0
	for _, k := range steps {
		total += k
	}
	within(t, "steps", total/float64(len(steps)), 10, 0.06)
	if mean := sum / n; mean < 6_000 || mean > 14_000 {
		t.Errorf("prompts have %.0f tokens on average", mean)
	}
	if r := reuse(w); r < 0.88 || r > 0.98 {
		t.Errorf("reuse %.3f", r)
	}
}

func TestDocuments(t *testing.T) {
	w := generated(t, Options{Name: "w4", Seed: 5, Requests: 20_000, Rate: 10})
	poisson(t, w, 10)
	uses, pairs := map[uint64]float64{}, map[[2]uint64]bool{}
	number, all, both := make([]float64, 5), 0.0, 0
	for _, r := range w.Requests {
		documents := r.Parts[1 : len(r.Parts)-1]
		number[len(documents)-1]++
		seen := map[uint64]bool{}
		for _, d := range documents {
			if seen[d.ID] {
				t.Fatal("a document stands twice in a prompt")
			}
			seen[d.ID] = true
			uses[d.ID]++
			all++
		}
		if len(documents) > 1 {
			a, b := documents[0].ID, documents[1].ID
			pairs[[2]uint64{a, b}] = true
			if pairs[[2]uint64{b, a}] {
				both++
			}
		}
	}
	chiSquare(t, "documents in a prompt", number, []float64{4000, 4000, 4000, 4000, 4000})
	var counts []float64
	for _, n := range uses {
		counts = append(counts, n)
	}
	slices.Sort(counts)
	slices.Reverse(counts)
	top := 0.0
	for _, n := range counts[:30] {
		top += n
	}
	// Three documents in a hundred are six in ten of what is asked for (RAGCache).
	within(t, "the use of popular documents", top/all, 0.6, 0.1)
	if both < 1000 {
		t.Errorf("%d times two documents stand the other way round", both)
	}
	if r := reuse(w); r < 0.2 || r > 0.7 {
		t.Errorf("reuse %.3f", r)
	}
}

func TestBursts(t *testing.T) {
	const seconds, rate = 20_000, 10
	w := generated(t, Options{Name: "w5", Seed: 6, Duration: seconds * time.Second, Rate: rate})
	within(t, "rate", float64(len(w.Requests))/seconds, rate, 0.05)
	if d := dispersion(w, time.Second); d < 8 || d > 25 {
		t.Errorf("the variance of the requests in a second is %.1f times their mean", d)
	}
	// Half of the requests come in the tenth of the time in which bursts are.
	counts := make([]float64, seconds)
	for _, r := range w.Requests {
		counts[int(r.At.Seconds())]++
	}
	slices.Sort(counts)
	busy := 0.0
	for _, n := range counts[seconds*9/10:] {
		busy += n
	}
	within(t, "what comes in the busiest tenth", busy/float64(len(w.Requests)), 0.48, 0.1)
	want := []Throttle{{Engine: 0, At: seconds * time.Second / 3, Until: seconds * time.Second * 2 / 3, Factor: 4}}
	if !reflect.DeepEqual(w.Throttles, want) {
		t.Errorf("%+v", w.Throttles)
	}
	calm := generated(t, Options{Name: "w5", Seed: 6, Requests: 10_000, Rate: rate, Burst: 1, Throttles: []Throttle{}})
	poisson(t, calm, rate)
	if len(calm.Throttles) != 0 {
		t.Errorf("%+v", calm.Throttles)
	}
}

func TestSwarm(t *testing.T) {
	w := generated(t, Options{Name: "dio-swarm", Seed: 7})
	if len(w.Requests) != 240 || len(w.Throttles) != 1 || w.Throttles[0] != (Throttle{At: 20 * time.Second, Factor: 8}) {
		t.Errorf("%d requests, %+v", len(w.Requests), w.Throttles)
	}
	grow(t, w, 25*time.Millisecond)
	counts := map[int]int{}
	for _, r := range w.Requests {
		counts[r.Session]++
	}
	for s, n := range counts {
		if s < 1 || s > 8 || n < 15 {
			t.Errorf("session %d has %d requests", s, n)
		}
	}
	long := generated(t, Options{Name: "dio-swarm", Seed: 8, Requests: 20_000, Rate: 2})
	within(t, "rate", 20_000/long.Requests[19_999].At.Seconds(), 2, 0.03)
}

// The same options make the same, another seed nothing alike.
func TestSeeds(t *testing.T) {
	for _, name := range Names() {
		o := Options{Name: name, Seed: 1, Requests: 300, Rate: 20}
		a, again := generated(t, o), generated(t, o)
		if !reflect.DeepEqual(a, again) {
			t.Errorf("%s: the same seed makes two workloads", name)
		}
		o.Seed = 2
		b := generated(t, o)
		ids := map[uint64]bool{}
		for _, r := range a.Requests {
			for _, p := range r.Parts {
				ids[p.ID] = true
			}
			ids[r.Answer] = true
		}
		for _, r := range b.Requests {
			for _, p := range r.Parts {
				if ids[p.ID] {
					t.Fatalf("%s: a text of two seeds", name)
				}
			}
		}
	}
}

// Whatever is asked for, requests are in order, within the limits, and no longer than
// an engine takes.
func TestLimits(t *testing.T) {
	f := func(o Options) {
		t.Helper()
		for _, o.Name = range Names() {
			w := generated(t, o)
			if o.Requests > 0 && o.Duration == 0 && len(w.Requests) != o.Requests {
				t.Errorf("%s: %d requests", o.Name, len(w.Requests))
			}
			longest := o.Longest
			if longest == 0 {
				longest = 30_000
			}
			last, turns := time.Duration(0), map[int]int{}
			for i := range w.Requests {
				r := &w.Requests[i]
				if r.At < last || o.Duration > 0 && r.At >= o.Duration || o.Requests > 0 && i >= o.Requests {
					t.Fatalf("%s: request %d at %v behind %v", o.Name, i, r.At, last)
				}
				if r.Output < 1 || r.Input()+r.Output > longest || i%32 == 0 && len(r.AppendPrompt(nil)) != r.Input() {
					t.Fatalf("%s: request %d has %d tokens and %d", o.Name, i, r.Input(), r.Output)
				}
				if r.Session > 0 && r.Turn != turns[r.Session] {
					t.Fatalf("%s: turn %d behind %d", o.Name, r.Turn, turns[r.Session])
				}
				turns[r.Session]++
				last = r.At
			}
		}
	}
	f(Options{Requests: 1})
	f(Options{Requests: 500, Rate: 1000})
	f(Options{Requests: 500, Duration: time.Minute, Rate: 5})
	f(Options{Duration: 20 * time.Second, Rate: 30})
	f(Options{Requests: 500, Rate: 0.001})
	f(Options{Requests: 500, Longest: leastLongest})
	f(Options{Requests: 500, Longest: 2000, Shared: 100_000, Own: 100_000, Output: 100_000, Result: 100_000, Turns: 50})
	f(Options{Requests: 500, Turns: 1, Groups: 1, Zipf: -1, Sessions: 1})
	f(Options{Requests: 500, Think: time.Millisecond, PerToken: time.Nanosecond, Burst: 1000, Tenants: 7})
}

// Answers that are cut are so in the prompts that have them, too: a conversation goes on
// with what was said.
func TestMaxTokens(t *testing.T) {
	for _, name := range []string{"w1", "w2", "w3", "w4", "w5", "w6", "dio-chat", "dio-swarm"} {
		w := generated(t, Options{Name: name, Seed: 1, Requests: 300, MaxTokens: 50})
		said, cut := map[uint64]int{}, 0
		for i := range w.Requests {
			r := &w.Requests[i]
			if r.Output > 50 || r.Output < 1 {
				t.Fatalf("%s: an answer of %d tokens", name, r.Output)
			}
			if r.Output == 50 {
				cut++
			}
			if r.Answer != 0 {
				said[r.Answer] = r.Output
			}
			for _, p := range r.Parts {
				if n, ok := said[p.ID]; ok && n != p.Tokens {
					t.Fatalf("%s: an answer of %d tokens is %d in a later prompt", name, n, p.Tokens)
				}
			}
		}
		if cut < 30 {
			t.Errorf("%s: only %d of %d answers are cut", name, cut, len(w.Requests))
		}
	}
}

func TestBadOptions(t *testing.T) {
	f := func(o Options, want string) {
		t.Helper()
		_, err := Generate(o)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: got %v, want %s", o, err, want)
		}
	}
	f(Options{}, `there is no workload ""; there are w1 to w6, by name system-prompts, chat,`)
	f(Options{Name: "w9"}, `there is no workload "w9"`)
	f(Options{Name: "w1", Rate: -1}, "workload system-prompts: the rate must be above 0")
	f(Options{Name: "w1", Rate: math.NaN()}, "the rate must be above 0")
	f(Options{Name: "w1", Requests: -1}, "requests must be")
	f(Options{Name: "w1", Duration: -1}, "the duration must not be negative")
	f(Options{Name: "w1", Rate: 1e6, Duration: time.Hour}, "are more than 10000000 requests")
	f(Options{Name: "w1", Shared: -1, Zipf: math.NaN()}, "shared must be 1 to 16777216 tokens, not -1; zipf must be at most 10")
	f(Options{Name: "w2", Turns: 0.5}, "turns must be 1 to 1000")
	f(Options{Name: "w5", Burst: 0.5}, "a burst must be at least 1")
	f(Options{Name: "w5", Longest: 10}, "longest must be at least 1000 tokens")
	f(Options{Name: "w5", Throttles: []Throttle{{Factor: 0}}}, "needs an engine from 0 on")
}
