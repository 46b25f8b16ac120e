package index

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"

	"github.com/inferrail/inferrail/index/kvevent"
)

// timedIndex is an index whose slots are fed by events if exact, and else by
// claims.
type timedIndex struct {
	*Index
	exact bool
}

const (
	timedModel = "m"
	timedBlock = 16 // tokens
)

func newTimedIndex(exact bool, slots int) timedIndex {
	x := timedIndex{New(Config{MaxBytes: 8 << 30}), exact}
	for slot := range slots {
		x.Join(slot, SlotConfig{Model: timedModel, BlockSize: timedBlock, Capacity: 1 << 22})
		if exact {
			x.SetState(slot, Exact, "")
		}
	}
	return x
}

// timedPrompt has a number of blocks, the first as in another, and one token
// more.
func timedPrompt(r *rand.Rand, blocks int, begins []uint32) *Prompt {
	p := &Prompt{}
	p.IDs = append(p.IDs, begins...)
	for len(p.IDs) < blocks*timedBlock+1 {
		p.IDs = append(p.IDs, r.Uint32N(150_000))
	}
	p.Block = timedBlock
	p.Chain = AppendTokens(nil, Root(timedModel, "", nil), p.IDs, timedBlock)
	return p
}

// hold lets a slot have blocks from one on to another. By claims it has those
// before them, too.
func (x timedIndex) hold(slot int, p *Prompt, from, to, each int) {
	now := time.Unix(1, 0)
	if !x.exact {
		part := Prompt{Chain: p.Chain[:to], IDs: p.IDs[:to*timedBlock+1], Block: timedBlock}
		var c Claim
		x.Claim(&c, slot, &part, now)
		x.Prefilled(&c, now)
		x.Release(&c, 0, now)
		return
	}
	var hashes [timedBlocks]uint64
	for ; from < to; from += each {
		end := min(from+each, to)
		e := kvevent.Event{
			Kind: kvevent.Stored, HasParent: from > 0, Hashes: hashes[:0],
			Tokens: p.IDs[from*timedBlock : end*timedBlock], BlockSize: timedBlock, AdapterID: -1, Group: -1,
		}
		if from > 0 {
			e.Parent = p.Chain[from-1].Lo
		}
		for _, h := range p.Chain[from:end] {
			e.Hashes = append(e.Hashes, h.Lo)
		}
		x.Apply(slot, []kvevent.Event{e}, now)
	}
}

// remove lets events take blocks away, the last first, each by its own event.
func (x timedIndex) remove(slot int, p *Prompt, from, to int) {
	now := time.Unix(1, 0)
	for i := to - 1; i >= from; i-- {
		x.Apply(slot, []kvevent.Event{{Kind: kvevent.Removed, Hashes: []uint64{p.Chain[i].Lo}, AdapterID: -1, Group: -1}}, now)
	}
}

// pairs is how many blocks the slots hold, all together.
func (x timedIndex) pairs() (n int) {
	for _, s := range x.Stats(nil) {
		if n += s.Blocks[GPU]; !x.exact {
			n += s.Guessed
		}
	}
	return n
}

// converse fills an index with conversations, each on so many slots at most.
func (x timedIndex) converse(r *rand.Rand, slots, most, pairs int) (prompts []*Prompt) {
	system := timedPrompt(r, timedSystem, nil)
	for slot := range slots {
		x.hold(slot, system, 0, timedSystem, 32)
	}
	for pairs > 0 {
		p := timedPrompt(r, timedBlocks, system.IDs[:timedSystem*timedBlock])
		on := r.Perm(slots)[:1+r.IntN(most)]
		for _, slot := range on {
			to := timedSystem + 1 + r.IntN(timedBlocks-timedSystem)
			x.hold(slot, p, timedSystem, to, 32)
			pairs -= to - timedSystem
		}
		prompts = append(prompts, p)
	}
	return prompts
}

var timedIndexShapes = []struct {
	name string
	fill func(r *rand.Rand, x timedIndex, slots int) []*Prompt
}{
	{"all hold all", func(r *rand.Rand, x timedIndex, slots int) []*Prompt {
		p := timedPrompt(r, timedBlocks, nil)
		for slot := range slots {
			x.hold(slot, p, 0, timedBlocks, 32)
		}
		return []*Prompt{p}
	}},
	{"each to a random depth", func(r *rand.Rand, x timedIndex, slots int) []*Prompt {
		p := timedPrompt(r, timedBlocks, nil)
		for slot := range slots {
			x.hold(slot, p, 0, 1+r.IntN(timedBlocks), 32)
		}
		return []*Prompt{p}
	}},
	{"conversations, few", func(r *rand.Rand, x timedIndex, slots int) []*Prompt {
		return x.converse(r, slots, 3, 20*timedBlocks)
	}},
	{"conversations, 1M pairs", func(r *rand.Rand, x timedIndex, slots int) []*Prompt {
		return x.converse(r, slots, 3, timedPairs)
	}},
}

// measureIndexes measures the whole index.
func (b *indexTiming) measureIndexes() {
	for _, exact := range []bool{true, false} {
		name := "index, approximate"
		if exact {
			name = "index, exact"
		}
		if b.only != "" && b.only != name {
			continue
		}
		for _, slots := range []int{64, 1000} {
			for _, shape := range timedIndexShapes {
				r := rand.New(rand.NewPCG(5, uint64(slots)))
				x := newTimedIndex(exact, slots)
				prompts := shape.fill(r, x, slots)
				for _, writers := range []int{0, timedWriters} {
					row := lookRow{Contestant: name, Slots: slots, Shape: shape.name, Writers: writers}
					b.lookIndex(row, x, prompts, false)
					row.Contestant += ", and Held of all"
					b.lookIndex(row, x, prompts, true)
				}
			}
		}
		b.changeIndex(name, exact)
	}
}

func (b *indexTiming) lookIndex(row lookRow, x timedIndex, prompts []*Prompt, held bool) {
	var l Lookup
	var sum int32
	b.look(row, len(prompts), func(i int) {
		x.Look(&l, prompts[i])
		if held {
			for slot := range row.Slots {
				h := l.Held(slot)
				sum += h[GPU]
			}
		}
	}, func(w int, done *atomic.Bool) {
		r := rand.New(rand.NewPCG(6, uint64(w)))
		var own []*Prompt
		for range 8 {
			own = append(own, timedPrompt(r, timedBlocks, nil))
		}
		for i := 0; !done.Load(); i++ {
			p := own[i%len(own)]
			if x.exact {
				x.hold(w, p, 0, timedBlocks, 32)
				x.remove(w, p, 0, timedBlocks)
			} else {
				var c Claim
				x.Claim(&c, w, p, time.Unix(1, 0))
				x.Undo(&c)
			}
		}
	})
	if held && sum == 0 {
		panic(fmt.Sprintf("%v: nothing is held", row))
	}
}

// timedBatch is what a slot's engine publishes of one step.
type timedBatch struct {
	slot    int
	payload []byte
}

// published is what engines publish that compute prompts, so many of which a step
// goes on with by so many blocks each, or that remove them, each block by an event
// of its own, as vLLM does. Prompt i is at slot i%slots.
func published(prompts []*Prompt, slots, together, each int, removed bool) (batches []timedBatch) {
	const within = 256 // events of a batch that are removals
	for slot := range slots {
		var own []*Prompt
		for i := slot; i < len(prompts); i += slots {
			own = append(own, prompts[i])
		}
		var events []kvevent.Event
		publish := func() {
			b := kvevent.Batch{Time: 1e9, Rank: slot, Events: events}
			batches = append(batches, timedBatch{slot, kvevent.AppendBatch(nil, kvevent.VLLM, 0, &b)})
			events = events[:0]
		}
		for step := range slices.Chunk(own, together) {
			for from := 0; from < timedBlocks; from += each {
				for _, p := range step {
					e := kvevent.Event{Kind: kvevent.Stored, AdapterID: -1, Group: 0, Spec: "full_attention", Medium: "gpu"}
					at := from
					if removed {
						e.Kind, at = kvevent.Removed, timedBlocks-1-from
					} else {
						e.BlockSize, e.Tokens = timedBlock, p.IDs[from*timedBlock:(from+each)*timedBlock]
						if e.HasParent = from > 0; e.HasParent {
							e.Parent = p.Chain[from-1].Lo
						}
					}
					for _, h := range p.Chain[at : at+each] {
						e.Hashes = append(e.Hashes, h.Lo)
					}
					events = append(events, e)
				}
				if !removed || len(events) >= within {
					publish()
				}
			}
			publish()
		}
	}
	return batches
}

// changeIndex times what fills an index with a million pairs, and empties it.
// Events are decoded first, which counts.
func (b *indexTiming) changeIndex(name string, exact bool) {
	const slots = 64
	r := rand.New(rand.NewPCG(7, 7))
	var prompts []*Prompt
	for range timedPairs / timedBlocks {
		prompts = append(prompts, timedPrompt(r, timedBlocks, nil))
	}
	n := len(prompts) * timedBlocks
	x := newTimedIndex(exact, slots)
	size := func() (int64, int) { return x.Totals().Bytes, x.pairs() }
	now := time.Unix(1, 0)
	if !exact {
		b.change(name, "1M blocks claimed, 512 a request", n, func() {
			for i, p := range prompts {
				x.hold(i%slots, p, 0, timedBlocks, 0)
			}
		}, size)
	} else {
		follow := func(what string, batches []timedBatch) {
			var d kvevent.Decoder
			var batch kvevent.Batch
			b.change(name, what, n, func() {
				for _, o := range batches {
					if err := d.Batch(&batch, o.payload); err != nil {
						panic(err)
					}
					x.Apply(o.slot, batch.Events, now)
				}
			}, size)
		}
		follow("1M blocks stored, 32 an event, 1 a batch", published(prompts, slots, 1, 32, false))
		follow("1M removed, one an event, 256 a batch", published(prompts, slots, 1, 1, true))
		follow("1M stored, one an event, 16 a batch", published(prompts, slots, 16, 1, false))
	}
	claim := func(p *Prompt, i int) {
		var c Claim
		x.Claim(&c, i%slots, p, now)
		x.Prefilled(&c, now)
		x.Release(&c, 0, now)
	}
	none := func() (int64, int) { return 1, 0 }
	b.change(name, "a claim of 512 blocks held, and its end", 10*len(prompts), func() {
		for range 10 {
			for i, p := range prompts {
				claim(p, i)
			}
		}
	}, none)
	if !exact {
		x = newTimedIndex(false, 1)
		x.Join(0, SlotConfig{Model: timedModel, BlockSize: timedBlock, Capacity: 50_000})
		for _, p := range prompts {
			x.hold(0, p, 0, timedBlocks, 0)
		}
		b.change(name, "a claim of 512 blocks not held, and its end", len(prompts), func() {
			for _, p := range prompts {
				x.hold(0, p, 0, timedBlocks, 0)
			}
		}, none)
	}

	// One slot, for what is done with all of one.
	x = newTimedIndex(exact, 1)
	for _, p := range prompts {
		x.hold(0, p, 0, timedBlocks, 32)
	}
	var snapshot []byte
	b.change(name, "1M blocks of a slot written to a snapshot", n, func() { snapshot = x.AppendSnapshot(nil, 0) }, none)
	b.change(name, "1M forgotten", n, func() { x.Forget(0) }, none)
	b.change(name, "1M restored", n, func() {
		if err := x.Restore(0, snapshot); err != nil {
			panic(err)
		}
	}, none)
	b.change(name, "1M leave with their slot", n, func() { x.Leave(0) }, none)

	for _, most := range []int{1, 3} {
		x = newTimedIndex(exact, slots)
		x.converse(r, slots, most, timedPairs)
		bytes, pairs := size()
		b.Changes = append(b.Changes, changeRow{
			Contestant: name, What: fmt.Sprintf("conversations on 1 to %d slots", most), PairBytes: float64(bytes) / float64(pairs),
		})
	}
}
