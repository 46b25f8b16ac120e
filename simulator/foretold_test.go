package simulator

import (
	"container/heap"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/index/kvevent"
)

// happening is something that an agent before an engine is to see at a time.
type happening struct {
	at     time.Duration
	serial int
	do     func()
}

type happenings []happening

func (h happenings) Len() int { return len(h) }
func (h happenings) Less(i, j int) bool {
	return h[i].at < h[j].at || h[i].at == h[j].at && h[i].serial < h[j].serial
}
func (h happenings) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *happenings) Push(x any)   { *h = append(*h, x.(happening)) }
func (h *happenings) Pop() any {
	old := *h
	last := old[len(old)-1]
	*h = old[:len(old)-1]
	return last
}

// foretelling is one engine, in virtual time, and an agent before it that knows
// its cache by package index alone.
type foretelling struct {
	cfg    Config
	events bool // the agent is told of the cache
	stream bool // it sees the first token
	// rate is how many requests come in a second, of so many talks.
	rate     float64
	talks    int
	requests int
	seed     uint64

	engine  *Engine
	index   *index.Index
	now     time.Duration
	serial  int
	pending happenings
	epoch   time.Time
}

func (f *foretelling) after(d time.Duration, do func()) {
	f.serial++
	heap.Push(&f.pending, happening{f.now + d, f.serial, do})
}

// lag is how long anything takes between the agent and the engine.
const lag = 500 * time.Microsecond

// run returns how many requests were wrongly foretold: with more than the engine
// found, and with less; and how many tokens were found of how many.
func (f *foretelling) run(t *testing.T) (over, under, found, all int) {
	c := f.cfg
	c.ServedModelName = []string{"m"}
	if f.events {
		c.KVEvents.Endpoint = "tcp://127.0.0.1:0"
	}
	if err := c.complete(); err != nil {
		t.Fatal(err)
	}
	f.engine = c.newEngine()
	f.index = index.New(index.Config{})
	f.epoch = time.Unix(1, 0)
	f.index.Join(0, index.SlotConfig{Model: "m", BlockSize: c.BlockSize, Capacity: c.NumGPUBlocks, AfterPrefill: c.sglang()})
	if f.events {
		f.index.SetState(0, index.Exact, "")
	}
	rng := rand.New(rand.NewPCG(f.seed, 1))
	clock := func() time.Time { return f.epoch.Add(f.now) }
	token := func() uint32 { return rng.Uint32N(5000) }
	text := func(n int) (ids []uint32) {
		for range n {
			ids = append(ids, token())
		}
		return ids
	}
	systems := [][]uint32{text(208), text(210), text(250)}
	talks := make([][]uint32, f.talks)
	busy := make([]bool, f.talks)
	root := index.Root("m", "", nil)

	var lookup index.Lookup
	running := map[*Sequence]func(){}
	ask := func() {
		i := rng.IntN(len(talks))
		for busy[i] {
			i = (i + 1) % len(talks)
		}
		busy[i] = true
		if len(talks[i]) == 0 || len(talks[i]) > 1000 {
			talks[i] = append([]uint32(nil), systems[rng.IntN(len(systems))]...)
		}
		talks[i] = append(talks[i], text(5+rng.IntN(60))...)
		prompt := append([]uint32(nil), talks[i]...)
		output := 3 + rng.IntN(28)
		s := &Sequence{Prompt: prompt, Said: text(output), Output: output}
		p := &index.Prompt{Root: root, Chain: index.AppendTokens(nil, root, prompt, c.BlockSize), IDs: prompt, Block: c.BlockSize}
		claim := new(index.Claim)
		f.index.Look(&lookup, p)
		h := lookup.Held(0)
		foretold := p.Cached(h)
		f.index.Claim(claim, 0, p, h, clock())
		f.after(lag, func() { f.engine.Arrive(s, f.now) })
		first, ended := false, false
		running[s] = func() {
			if f.stream && !first && s.state != waiting && f.now >= s.First {
				first = true
				f.after(lag, func() { f.index.Prefilled(claim, clock()) })
			}
			if !ended && s.state == 2 {
				ended = true
				delete(running, s)
				f.after(lag, func() {
					found, all = found+s.Cached, all+len(prompt)
					switch {
					case s.Cached < foretold:
						over++
					case s.Cached > foretold:
						under++
					}
					if testing.Verbose() && s.Cached != foretold {
						fmt.Println(f.now, "foretold", foretold, "found", s.Cached, "of", len(prompt))
					}
					f.index.Found(claim, s.Cached)
					f.index.Prefilled(claim, clock())
					f.index.Release(claim, s.Output, clock())
					talks[i] = append(talks[i], s.Said...)
					busy[i] = false
				})
			}
		}
	}
	at := time.Duration(0)
	for n := 0; n < f.requests; {
		next := at
		if len(f.pending) > 0 && f.pending[0].at < next {
			next = f.pending[0].at
		}
		if e, ok := f.engine.Next(); ok && e < next {
			next = e
		}
		f.now = max(f.now, next)
		f.engine.Advance(f.now)
		if told := f.engine.Told(); f.events && len(told) > 0 {
			events := eventsOf(told, c.BlockSize)
			f.after(lag, func() { f.index.Apply(0, events, clock()) })
		}
		for s, look := range running {
			if s.state == 2 || !f.stream || f.now >= s.First {
				look()
			}
		}
		for len(f.pending) > 0 && f.pending[0].at <= f.now {
			heap.Pop(&f.pending).(happening).do()
		}
		if f.now >= at {
			free := 0
			for _, b := range busy {
				if !b {
					free++
				}
			}
			if free > 0 {
				ask()
				n++
			}
			at = f.now + time.Duration(rng.ExpFloat64()/f.rate*float64(time.Second))
		}
	}
	return over, under, found, all
}

func eventsOf(changes []change, block int) (events []kvevent.Event) {
	name := func(n blockName) uint64 { return binary.BigEndian.Uint64(n[:]) }
	for _, c := range changes {
		e := kvevent.Event{Kind: c.kind, AdapterID: -1, Group: -1, Medium: "gpu"}
		if c.medium == mediumHost {
			e.Medium = "cpu_pinned"
		}
		for _, n := range c.names {
			e.Hashes = append(e.Hashes, name(n))
		}
		if c.kind == kvevent.Stored {
			e.Tokens, e.BlockSize = c.tokens, block
			if c.hasParent {
				e.Parent, e.HasParent = name(c.parent), true
			}
		}
		events = append(events, e)
	}
	return events
}

func TestForetold(t *testing.T) {
	for _, engine := range []string{"vllm", "sglang"} {
		for _, events := range []bool{true, false} {
			for _, stream := range []bool{true, false} {
				t.Run(fmt.Sprint(engine, events, stream), func(t *testing.T) {
					f := foretelling{cfg: Config{Engine: engine, BlockSize: 16, NumGPUBlocks: 600}, events: events, stream: stream, rate: 20, talks: 25, requests: 10000, seed: 1}
					over, under, found, all := f.run(t)
					t.Logf("over %d under %d hit rate %.3f", over, under, float64(found)/float64(all))
				})
			}
		}
	}
}
