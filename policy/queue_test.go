package policy

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
)

// The stories in testdata/queue put tickets into one Queue and take them out.
// A ticket is written name:class:tenant:tokens, or with its key name:class:tenant:tokens:key.
func TestQueue(t *testing.T) {
	datadriven.Walk(t, "testdata/queue", func(t *testing.T, path string) {
		q := new(Queue[string])
		tickets := map[string]*Ticket[string]{}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			var out []string
			switch d.Cmd {
			case "push":
				for line := range strings.Lines(d.Input) {
					for _, field := range strings.Fields(line) {
						var class, tokens int
						part := strings.Split(field, ":")
						fmt.Sscan(part[1], &class)
						fmt.Sscan(part[3], &tokens)
						tk := &Ticket[string]{Value: part[0], Class: class, Tenant: part[2], Tokens: tokens}
						if len(part) == 5 {
							fmt.Sscan(part[4], &tk.Key)
						}
						tickets[part[0]] = tk
						q.Push(tk)
					}
				}
				return fmt.Sprintf("%d wait", q.Len())
			case "pop":
				n := 1
				if d.HasArg("n") {
					d.ScanArgs(t, "n", &n)
				}
				for range n {
					if tk := q.Pop(); tk != nil {
						out = append(out, tk.Value)
					}
				}
			case "take", "remove":
				for _, arg := range d.CmdArgs {
					if tk := tickets[arg.Key]; d.Cmd == "take" {
						q.Take(tk)
					} else if !q.Remove(tk) {
						out = append(out, arg.Key+" is not in")
					}
				}
				return strings.Join(append(out, fmt.Sprintf("%d wait", q.Len())), "\n")
			case "yields":
				var class int
				var tenant string
				d.ScanArgs(t, "class", &class)
				d.ScanArgs(t, "tenant", &tenant)
				if tk := q.Yields(class, tenant); tk != nil {
					return tk.Value
				}
				return "nobody"
			case "all":
				for tk := range q.All() {
					out = append(out, tk.Value)
				}
			default:
				d.Fatalf(t, "unknown command %s", d.Cmd)
			}
			return strings.Join(out, " ")
		})
	})
}

// TestQueueAgainstModel plays random histories to a queue and to a list that is sorted
// by key. Whoever is served must be the first of his tenant, in the class that the rule
// names; nobody is lost or served twice.
func TestQueueAgainstModel(t *testing.T) {
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 3))
		var q Queue[int]
		var model []*Ticket[int]
		credit := map[int]int{} // by class
		take := func(tk *Ticket[int]) {
			i := slices.Index(model, tk)
			if i < 0 {
				t.Fatalf("seed %d: %v does not wait", seed, tk.Value)
			}
			model = slices.Delete(model, i, i+1)
		}
		present := func(class int) bool {
			return slices.ContainsFunc(model, func(tk *Ticket[int]) bool { return tk.Class == class })
		}
		served := func(tk *Ticket[int]) {
			cost := min(max(tk.Tokens, leastCost), mostCost)
			take(tk)
			credit[tk.Class] = max(credit[tk.Class]-lowerShare*cost, 0)
			for class := range 4 {
				if class > tk.Class {
					credit[class] = min(credit[class]+cost, lowerShare*mostCost)
				}
				if !present(class) {
					credit[class] = 0
				}
			}
		}
		for step := range 400 {
			switch k := rng.IntN(10); {
			case k < 5:
				tk := &Ticket[int]{Value: step, Class: rng.IntN(4), Tenant: fmt.Sprint(rng.IntN(4)), Tokens: rng.IntN(1 << rng.IntN(19))}
				if seed%2 == 0 {
					tk.Key = float64(rng.IntN(5)) // often alike
				}
				q.Push(tk)
				model = append(model, tk)
				slices.SortStableFunc(model, func(a, b *Ticket[int]) int { return cmp.Compare(a.Key, b.Key) })
			case k < 8:
				head := q.Peek()
				tk := q.Pop()
				if tk != head || (tk == nil) != (len(model) == 0) {
					t.Fatalf("seed %d, step %d: popped %v after %v, %d wait", seed, step, tk, head, len(model))
				}
				if tk == nil {
					continue
				}
				first := slices.IndexFunc(model, func(o *Ticket[int]) bool { return o.Class == tk.Class && o.Tenant == tk.Tenant })
				if model[first] != tk {
					t.Fatalf("seed %d, step %d: %d goes before %d of the same tenant", seed, step, tk.Value, model[first].Value)
				}
				for class := range tk.Class {
					// A worse class goes first with the credit for it only.
					if present(class) && credit[tk.Class] < lowerShare*tk.cost() {
						t.Fatalf("seed %d, step %d: class %d goes before %d with credit %d", seed, step, tk.Class, class, credit[tk.Class])
					}
				}
				served(tk)
			case k == 8 && len(model) > 0:
				tk := model[rng.IntN(len(model))]
				q.Take(tk)
				served(tk)
			case k == 9 && len(model) > 0:
				tk := model[rng.IntN(len(model))]
				if !q.Remove(tk) || q.Remove(tk) {
					t.Fatalf("seed %d, step %d: removed not at all, or twice", seed, step)
				}
				take(tk)
				if !present(tk.Class) {
					credit[tk.Class] = 0
				}
			}
			tokens := 0
			for t := range q.All() {
				tokens += max(t.Tokens, 0)
			}
			if q.Tokens() != tokens {
				t.Fatalf("seed %d, step %d: %d tokens, want %d", seed, step, q.Tokens(), tokens)
			}
			if q.Len() != len(model) {
				t.Fatalf("seed %d, step %d: %d wait, want %d", seed, step, q.Len(), len(model))
			}
			all := map[*Ticket[int]]bool{}
			for tk := range q.All() {
				all[tk] = true
			}
			if len(all) != len(model) {
				t.Fatalf("seed %d, step %d: All has %d of %d", seed, step, len(all), len(model))
			}
		}
	}
}

// TestQueueIsFair: tenants that never stop waiting are served the same number of
// tokens, give or take a quantum and the largest ticket, whatever each asks for.
func TestQueueIsFair(t *testing.T) {
	for seed := range uint64(50) {
		rng := rand.New(rand.NewPCG(seed, 4))
		var q Queue[int]
		largest, tenants := 0, 2+rng.IntN(6)
		push := func(tenant int) {
			// Each tenant has prompts of a length of its own, up to 64 k tokens.
			n := 1 + rng.IntN(1<<(1+(3*tenant+int(seed))%16))
			largest = max(largest, n, leastCost)
			q.Push(&Ticket[int]{Value: tenant, Tenant: fmt.Sprint(tenant), Tokens: n})
		}
		for tenant := range tenants {
			for range 2 + rng.IntN(100) { // one that has none left is no tenant
				push(tenant)
			}
		}
		tokens := map[int]int{}
		for range 3000 {
			tk := q.Pop()
			tokens[tk.Value] += tk.cost()
			push(tk.Value)
			var sums []int
			for tenant := range tenants {
				sums = append(sums, tokens[tenant])
			}
			if apart := slices.Max(sums) - slices.Min(sums); apart > quantum+largest {
				t.Fatalf("seed %d: %v are %d apart, the largest prompt has %d", seed, tokens, apart, largest)
			}
		}
	}
}

// TestQueueStarvesNobody: beside a class that never stops, the worse ones are
// served the share of tokens that they are promised, and not more.
func TestQueueStarvesNobody(t *testing.T) {
	var q Queue[int]
	push := func(class, tokens int) {
		q.Push(&Ticket[int]{Value: class, Class: class, Tenant: "t", Tokens: tokens})
	}
	for range 10 {
		push(0, 500)
		push(5, 300)
		push(9, 40_000)
	}
	tokens := map[int]int{}
	for range 100_000 {
		tk := q.Pop()
		tokens[tk.Value] += tk.Tokens
		push(tk.Value, tk.Tokens)
	}
	for _, class := range slices.Sorted(maps.Keys(tokens)) {
		want := 1.0
		if class > 0 {
			want = 1.0 / lowerShare
		}
		if share := float64(tokens[class]) / float64(tokens[0]); share < 0.99*want || share > 1.2*want {
			t.Errorf("class %d had %.4f of the tokens of the best, want %.4f", class, share, want)
		}
	}
	if len(tokens) != 3 {
		t.Errorf("served: %v", tokens)
	}
}

// BenchmarkQueue is a push and a pop with a hundred tenants waiting.
// go test -bench Queue ./policy
func BenchmarkQueue(b *testing.B) {
	var q Queue[int]
	tickets := make([]Ticket[int], 1000)
	for i := range tickets {
		tickets[i] = Ticket[int]{Tenant: fmt.Sprint(i % 100), Tokens: 100 * (i % 97)}
		q.Push(&tickets[i])
	}
	b.ReportAllocs()
	for b.Loop() {
		q.Push(q.Pop())
	}
}
