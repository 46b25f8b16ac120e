package index

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// slotEngine is llama.cpp's cache, by tokens and lists.
type slotEngine struct {
	held  [][]uint32
	busy  []int // by which request, -1 for none
	freed []int // when
	clock int
	line  []int
	runs  map[int][]uint32
	found map[int]int // tokens
}

func newSlotEngine(n int) *slotEngine {
	e := &slotEngine{held: make([][]uint32, n), busy: slices.Repeat([]int{-1}, n), freed: make([]int, n), runs: map[int][]uint32{}, found: map[int]int{}}
	return e
}

func alike(a, b []uint32) int {
	n := 0
	for n < min(len(a), len(b)) && a[n] == b[n] {
		n++
	}
	return n
}

// start begins a request, and reports whether it had not to wait.
func (e *slotEngine) start(id int, prompt []uint32) bool {
	e.runs[id] = prompt
	best, most, oldest := -1, 0, -1
	for i := range e.held {
		if e.busy[i] >= 0 {
			continue
		}
		if n := alike(e.held[i], prompt); n > most && float64(n) > 0.1*float64(len(prompt)) {
			best, most = i, n
		}
		if oldest < 0 || e.freed[i] <= e.freed[oldest] {
			oldest = i
		}
	}
	if best < 0 {
		best = oldest
	}
	if best < 0 {
		e.line = append(e.line, id)
		return false
	}
	e.take(id, best)
	return true
}

func (e *slotEngine) take(id, slot int) {
	e.found[id] = min(alike(e.held[slot], e.runs[id]), len(e.runs[id])-1)
	e.busy[slot], e.held[slot] = id, e.held[slot][:e.found[id]]
}

// finish ends a request that runs.
func (e *slotEngine) finish(id int, generated []uint32) {
	slot := slices.Index(e.busy, id)
	if len(generated) > 0 {
		e.held[slot] = slices.Concat(e.runs[id], generated[:len(generated)-1])
	}
	e.clock++
	e.busy[slot], e.freed[slot] = -1, e.clock
	if len(e.line) > 0 {
		next := e.line[0]
		e.line = e.line[1:]
		e.take(next, slot)
	}
}

// TestSequencesAgainstEngine: of thousands of requests that run beside each other, wait,
// fail, and go on with conversations, what is predicted is what the engine finds, in
// whole blocks; and a warm restart changes nothing.
func TestSequencesAgainstEngine(t *testing.T) {
	for seed := range uint64(12) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 5))
			block, n := []int{1, 2, 4, 16}[r.IntN(4)], 1+r.IntN(5)
			config := SlotConfig{Model: "m", BlockSize: block, Capacity: 10_000, Sequences: n}
			e, x := newSlotEngine(n), New(Config{})
			x.Join(0, config)
			type run struct {
				claim  Claim
				prompt []uint32
				waited bool
			}
			runs := map[int]*run{}
			var talks [][]uint32
			systems := [][]uint32{randomIDs(r, 3*block), randomIDs(r, block*(1+r.IntN(4))+r.IntN(block))}
			root, now := Root("m", "", nil), time.Unix(1000, 0)
			asked, hits, lost, waited, restarts := 0, 0, 0, 0, 0
			for requests := lessUnderRace(t, 3000, 400); asked < requests; {
				if len(runs) == 0 && r.IntN(4) == 0 {
					y := New(Config{})
					y.Join(0, config)
					if err := y.Restore(0, x.AppendSnapshot(nil, 0)); err != nil {
						t.Fatal(err)
					}
					x = y
					restarts++
				}
				if r.IntN(2) == 0 && len(runs) < n+2 {
					prompt, from := slices.Concat(systems[r.IntN(2)], randomIDs(r, 1+r.IntN(6*block))), -1
					if len(talks) > 0 && r.IntN(2) == 0 {
						from = len(talks) - 1 - r.IntN(min(len(talks), 2*n))
						prompt = slices.Concat(talks[from], randomIDs(r, 1+r.IntN(2*block)))
					}
					// What part of a block makes of the choice cannot be known.
					longest := 0
					for i, h := range e.held {
						if e.busy[i] < 0 {
							longest = max(longest, alike(h, prompt))
						}
					}
					if slices.ContainsFunc(e.held, func(h []uint32) bool {
						n, tenth := alike(h, prompt), 0.1*float64(len(prompt))
						return float64(n) > tenth && float64(n/block*block) <= tenth || n < longest && n/block == longest/block
					}) || len(prompt) > 400*block {
						talks = nil
						continue
					}
					p := Prompt{Root: root, IDs: prompt, Block: block, Chain: AppendTokens(nil, root, prompt, block)}
					var l Lookup
					x.Look(&l, &p)
					predicted := p.Cached(l.Held(0))
					runs[asked] = &run{prompt: prompt}
					begun := e.start(asked, prompt)
					x.Claim(&runs[asked].claim, 0, &p, now)
					if tenth := 0.1 * float64(len(prompt)); !begun {
						waited++
						runs[asked].waited = true
						if predicted != 0 {
							t.Fatalf("request %d waits, and %d tokens are predicted", asked, predicted)
						}
					} else if actual := e.found[asked] / block * block; predicted < actual || predicted > actual && float64(predicted) > tenth {
						// Up to a tenth of the prompt may lie in a cache that is not chosen.
						t.Fatalf("request %d of %d tokens: predicted %d, cached %d", asked, len(prompt), predicted, e.found[asked])
					}
					if begun {
						x.Found(&runs[asked].claim, e.found[asked])
					}
					if e.found[asked] > 0 {
						hits++
					}
					if from >= 0 && begun && e.found[asked] < len(talks[from])-1 {
						lost++
					}
					asked++
				} else if id := slices.IndexFunc(e.busy, func(id int) bool { return id >= 0 }); id >= 0 {
					id := e.busy[id]
					if k := e.busy[r.IntN(n)]; k >= 0 {
						id = k
					}
					o := runs[id]
					delete(runs, id)
					if !o.waited && r.IntN(8) == 0 {
						e.finish(id, nil) // before its prompt was computed
						x.Undo(&o.claim)
						if got := x.at(0).shadow.sequences.line; len(got) != len(e.line) {
							t.Fatalf("%d wait, want %d", len(got), len(e.line))
						}
						continue
					}
					generated := randomIDs(r, 1+r.IntN(3*block))
					x.Prefilled(&o.claim, now)
					e.finish(id, generated)
					x.Release(&o.claim, len(generated), now)
					talks = append(talks, slices.Concat(o.prompt, generated))
				}
			}
			if hits < asked/10 || lost == 0 || waited == 0 || restarts == 0 {
				t.Errorf("%d hits, %d lost, %d waited and %d restarts in %d requests show nothing", hits, lost, waited, restarts, asked)
			}
		})
	}
}

// What sequences hold is given up where the index has no memory, and all of it when the
// slot is forgotten or becomes one that shares; nothing is left behind.
func TestSequencesGiveUp(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 5))
	x := New(Config{MaxBytes: 1 << 20})
	root, now := Root("m", "", nil), time.Unix(1000, 0)
	x.Join(0, SlotConfig{Model: "m", BlockSize: 1, Sequences: 4})
	var claims [6]Claim
	for round := range 30 {
		for i := range claims {
			ids := randomIDs(r, 4000)
			p := Prompt{Root: root, IDs: ids, Block: 1, Chain: AppendTokens(nil, root, ids, 1)}
			x.Claim(&claims[i], 0, &p, now)
		}
		for i := range claims {
			x.Prefilled(&claims[i], now)
			x.Release(&claims[i], 5, now)
		}
		if got := x.Totals().Bytes; got > 3<<20 {
			t.Fatalf("round %d: %d bytes", round, got)
		}
	}
	s := x.at(0)
	held := 0
	for _, o := range s.shadow.sequences.all {
		held += len(o.chain)
	}
	if s.tree.blocks[pinned] != 0 || s.tree.records > held || held == 0 {
		t.Errorf("%d records and %d pinned, with %d blocks held", s.tree.records, s.tree.blocks[pinned], held)
	}
	x.Join(0, SlotConfig{Model: "m", BlockSize: 1, Sequences: 2})
	if s.tree.records != 0 || len(s.shadow.sequences.all) != 2 {
		t.Errorf("%d records are left, and %d sequences", s.tree.records, len(s.shadow.sequences.all))
	}
}
