package policy

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
)

// The stories in testdata/holding hold requests back from replicas. A request is written
// name:came:prefill, and prefill is what it takes at every replica; a round is told what
// each replica has before it. Each request chooses the replica that is free first.
func TestHolding(t *testing.T) {
	datadriven.Walk(t, "testdata/holding", func(t *testing.T, path string) {
		type request struct {
			name          string
			came, prefill float64
		}
		h := &Holding[request]{}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "lead":
				fmt.Sscan(d.Input, &h.Lead)
				return ""
			case "hold":
				for field := range strings.FieldsSeq(d.Input) {
					part := strings.Split(field, ":")
					r := request{name: part[0]}
					fmt.Sscan(part[1], &r.came)
					fmt.Sscan(part[2], &r.prefill)
					h.Hold(r, r.came, r.prefill)
				}
				return fmt.Sprintf("%d held", h.Len())
			case "round":
				var waits []float64
				for field := range strings.FieldsSeq(d.Input) {
					var w float64
					fmt.Sscan(field, &w)
					waits = append(waits, w)
				}
				var out strings.Builder
				h.Begin(len(waits))
				for r, ok := h.Next(); ok; r, ok = h.Next() {
					best, least := 0, 0.0
					for i, w := range waits {
						if w += h.Planned(i); i == 0 || w < least {
							best, least = i, w
						}
					}
					if h.Place(best, least, r.prefill) {
						fmt.Fprintf(&out, "%s to replica %d\n", r.name, best)
						waits[best] += r.prefill
					} else {
						fmt.Fprintf(&out, "%s is held for replica %d\n", r.name, best)
					}
				}
				return out.String()
			}
			t.Fatalf("%s: unknown command %q", d.Pos, d.Cmd)
			return ""
		})
	})
}

// After any history the same are held, in the same order, and sent to the same replicas
// as by one that sorts all that are left in each round.
func TestHoldingAsModel(t *testing.T) {
	type request struct {
		number int
		key    float64
		took   []float64
	}
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 1))
		replicas := 1 + rng.IntN(4)
		h := &Holding[*request]{Lead: rng.Float64()}
		var model []*request
		waits := make([]float64, replicas)
		number := 0
		for now := 0.0; now < 40; now += rng.Float64() {
			for range rng.IntN(5) {
				r := &request{number: number, took: make([]float64, replicas)}
				for i := range r.took {
					r.took[i] = float64(rng.IntN(4)) // often alike
				}
				number++
				r.key = now + ageing*slices.Min(r.took)
				h.Hold(r, now, slices.Min(r.took))
				model = append(model, r)
			}
			best := func(r *request, planned func(i int) float64) (i int, wait float64) {
				for k := range waits {
					if k == 0 || waits[k]+planned(k)+r.took[k] < wait+r.took[i] {
						i, wait = k, waits[k]+planned(k)
					}
				}
				return i, wait
			}
			before := slices.Clone(waits)
			var got, want []string
			h.Begin(replicas)
			for r, ok := h.Next(); ok; r, ok = h.Next() {
				i, wait := best(r, h.Planned)
				if h.Place(i, wait, r.took[i]) {
					got = append(got, fmt.Sprint(r.number, i))
					waits[i] += r.took[i]
				}
			}
			after := waits
			waits = before
			slices.SortStableFunc(model, func(a, b *request) int {
				switch {
				case a.key < b.key:
					return -1
				case a.key > b.key:
					return 1
				}
				return a.number - b.number
			})
			planned := make([]float64, replicas)
			var left []*request
			looked := 0
			for _, r := range model {
				i, wait := best(r, func(i int) float64 { return planned[i] })
				switch {
				case looked == mostLooked:
					left = append(left, r)
				case wait < h.Lead:
					want = append(want, fmt.Sprint(r.number, i))
					waits[i] += r.took[i]
				default:
					looked++
					planned[i] += r.took[i]
					left = append(left, r)
				}
			}
			model = left
			if !slices.Equal(got, want) || !slices.Equal(waits, after) || h.Len() != len(model) {
				t.Fatalf("seed %d at %.2f: sent %v, want %v; %d are held, want %d", seed, now, got, want, h.Len(), len(model))
			}
			for i := range waits {
				waits[i] = max(waits[i]-rng.Float64(), 0)
			}
		}
	}
}

// What has held as many before allocates nothing.
func TestHoldingAllocatesNothing(t *testing.T) {
	h := &Holding[*Request]{Lead: 1}
	r := &Request{}
	turn := func() {
		for i := range 100 {
			h.Hold(r, float64(i), float64(i%7))
		}
		for _, wait := range []float64{2, 0} { // none goes, then all
			h.Begin(8)
			for _, ok := h.Next(); ok; _, ok = h.Next() {
				h.Place(3, wait, 1)
			}
		}
	}
	turn()
	if n := testing.AllocsPerRun(10, turn); n > 0 {
		t.Errorf("%v allocations", n)
	}
	if h.Len() != 0 {
		t.Errorf("%d are held", h.Len())
	}
}
