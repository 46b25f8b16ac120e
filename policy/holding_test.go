package policy

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
)

// The stories in testdata/holding hold requests back from replicas. A request is written
// name:came:prefill, or with its tenant and its tokens name:came:prefill:tenant:tokens,
// and prefill is what it takes at every replica; a round is told what each replica has
// before it, and 40,000 tokens of it for each second. Each request chooses the replica
// that is free first.
func TestHolding(t *testing.T) {
	datadriven.Walk(t, "testdata/holding", func(t *testing.T, path string) {
		type request struct {
			name    string
			prefill float64
		}
		var h Holding
		var held Queue[request]
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "lead":
				fmt.Sscan(d.Input, &h.Lead)
				return ""
			case "hold":
				for field := range strings.FieldsSeq(d.Input) {
					part := strings.Split(field, ":")
					tk := &Ticket[request]{Value: request{name: part[0]}}
					var came float64
					fmt.Sscan(part[1], &came)
					fmt.Sscan(part[2], &tk.Value.prefill)
					if len(part) > 3 {
						tk.Tenant = part[3]
						fmt.Sscan(part[4], &tk.Tokens)
					}
					tk.Key = h.Key(came, tk.Value.prefill)
					held.Push(tk)
				}
				return fmt.Sprintf("%d held", held.Len())
			case "round":
				var waits []float64
				for field := range strings.FieldsSeq(d.Input) {
					var w float64
					fmt.Sscan(field, &w)
					waits = append(waits, w)
				}
				var out strings.Builder
				for held.Len() > 0 {
					best := slices.Index(waits, slices.Min(waits))
					c := &Candidate{Wait: waits[best], Ahead: Work{Tokens: 40_000 * waits[best]}}
					if !h.Free(c) {
						fmt.Fprintf(&out, "the next in %.2f s\n", h.Next(c))
						break
					}
					r := held.Pop().Value
					fmt.Fprintf(&out, "%s to replica %d\n", r.name, best)
					waits[best] += r.prefill
				}
				fmt.Fprintf(&out, "%d held", held.Len())
				return out.String()
			}
			t.Fatalf("%s: unknown command %q", d.Pos, d.Cmd)
			return ""
		})
	})
}

// A replica that computes one prompt after another in the order of Holding keeps nobody
// for longer than Longest, whatever comes: short prompts without end in front of a long
// one, or long ones before a short one.
func TestHoldingLongest(t *testing.T) {
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 1))
		h := Holding{Lead: 0.05}
		type request struct{ came, prefill, longest float64 }
		var held Queue[request]
		var sum, free float64 // of those that are held; when the replica is
		come := func(now float64) {
			r := request{came: now, prefill: 0.01 + 0.03*rng.Float64()}
			if rng.IntN(20) == 0 {
				r.prefill = 2 * rng.Float64()
			}
			r.longest = h.Longest(max(free-now, 0)+sum, r.prefill)
			held.Push(&Ticket[request]{Value: r, Key: h.Key(now, r.prefill)})
			sum += r.prefill
		}
		load := 0.5 + 0.5*rng.Float64() // of what it can do
		for now := 0.0; now < 60; {
			come(now)
			next := now + rng.ExpFloat64()*0.073/load
			for held.Len() > 0 && max(free-h.Lead, now) < next {
				now = max(free-h.Lead, now)
				r := held.Pop().Value
				// What was begun with meanwhile may last as long as it did not foresee.
				if waited := now - r.came; waited > r.longest+2 {
					t.Fatalf("seed %d at %.2f: one that takes %.2f s was held for %.2f s, and for %.2f s at most by Longest", seed, now, r.prefill, waited, r.longest)
				}
				sum -= r.prefill
				free = max(free, now) + r.prefill
			}
			now = next
		}
	}
}

func TestHoldingNumbers(t *testing.T) {
	h := Holding{}
	if h.Holds() || !(Holding{Lead: 0.1}).Holds() {
		t.Error("who holds")
	}
	if h := (Holding{Lead: 0.1}); h.With(NewCostModel()) != h || h.With(LeastRequest{}).Holds() {
		t.Error("with which policies")
	}
	f := func(wait, tokens float64, free bool, next float64) {
		t.Helper()
		h, c := Holding{Lead: 0.1}, &Candidate{Wait: wait, Ahead: Work{Tokens: tokens}}
		if h.Free(c) != free || math.Abs(h.Next(c)-next) > 1e-9 {
			t.Errorf("%v s and %v tokens: %v, the next in %v; want %v and %v", wait, tokens, h.Free(c), h.Next(c), free, next)
		}
	}
	f(0, 0, true, 0)
	f(0.09, 100_000, true, 0)   // nearly done
	f(0.1, 100_000, false, 0)   // and at once it is
	f(9, 8191, true, 0)         // slow, but all is computed in a step
	f(9, 8192, false, 0)        //
	f(3, 16384, false, 1.5)     // half of it is one
	f(3, 1_000_000, false, 2.9) //
	f(3, 0, true, 0)            // others' work, of which no tokens are known
	if got := h.Longest(-1, -1); got != 0 {
		t.Errorf("nothing is foretold, and it is held for %v", got)
	}
	if got := h.Longest(1e300, 1e300); got != MostTTFT {
		t.Errorf("held for %v", got)
	}
	if got := h.Key(3, -1); got != 3 {
		t.Errorf("key %v", got)
	}
}
