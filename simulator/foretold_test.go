package simulator

import (
	"cmp"
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/index/kvevent"
)

// foretelling is one engine, in virtual time, and an agent before it that knows
// its cache by package index alone: by the engine's events, or by the requests
// that it sends.
type foretelling struct {
	engine string
	block  int
	events bool
	// stream: the agent sees an answer's first token; else all of it at once.
	stream bool
	// alone: a request comes when the one before it is over, and all is told.
	alone bool
}

// foretold is what came of it.
type foretold struct {
	requests    int
	over, under int // were foretold more tokens than found, and fewer
	found, all  int // tokens
}

// lag is how long anything takes from the agent to the engine and back.
const lag = 500 * time.Microsecond

// happening is something that happens at a time.
type happening struct {
	at time.Duration
	do func()
}

// run lets talks go on that are more than the cache has room for, about 20
// requests a second.
func (f foretelling) run(t *testing.T, requests int, seed uint64) (sum foretold) {
	t.Helper()
	const blocks, rate = 600, 20
	cfg := Config{ServedModelName: []string{"m"}, Engine: f.engine, BlockSize: f.block, NumGPUBlocks: blocks * 16 / f.block}
	if f.events {
		cfg.KVEvents.Endpoint = "tcp://127.0.0.1:0"
	}
	if err := cfg.complete(); err != nil {
		t.Fatal(err)
	}
	engine, known := cfg.newEngine(), index.New(index.Config{})
	known.Join(0, index.SlotConfig{Model: "m", BlockSize: f.block, Capacity: cfg.NumGPUBlocks, AfterPrefill: cfg.sglang()})
	if f.events {
		known.SetState(0, index.Exact, "")
	}
	now := time.Duration(0)
	clock := func() time.Time { return time.Unix(1, 0).Add(now) }
	var due []happening
	after := func(d time.Duration, do func()) {
		i, _ := slices.BinarySearchFunc(due, now+d, func(h happening, at time.Duration) int {
			return cmp.Or(cmp.Compare(h.at, at), -1) // behind those of the same time
		})
		due = slices.Insert(due, i, happening{now + d, do})
	}

	rng := rand.New(rand.NewPCG(seed, 1))
	text := func(n int) []uint32 {
		ids := make([]uint32, n)
		for i := range ids {
			ids[i] = rng.Uint32N(5000)
		}
		return ids
	}
	type talk struct {
		ids  []uint32
		busy bool
	}
	systems := [][]uint32{text(208), text(210), text(250)}
	talks := make([]talk, 25)
	root := index.Root("m", "", nil)
	var look index.Lookup
	var running []func() (over bool)
	ask := func(talk *talk) {
		talk.busy = true
		if len(talk.ids) == 0 || len(talk.ids) > 1000 {
			talk.ids = systems[rng.IntN(len(systems))]
		}
		talk.ids = slices.Concat(talk.ids, text(5+rng.IntN(60)))
		s := &Sequence{Prompt: talk.ids, Output: 3 + rng.IntN(28)}
		s.Said = text(s.Output)
		p := &index.Prompt{Root: root, Chain: index.AppendTokens(nil, root, s.Prompt, f.block), IDs: s.Prompt, Block: f.block}
		known.Look(&look, p)
		h := look.Held(0)
		claim := new(index.Claim)
		known.Claim(claim, 0, p, clock())
		after(lag, func() { engine.Arrive(s, now) })
		answered := !f.stream
		running = append(running, func() bool {
			if !answered && s.state != Waiting && now >= s.First {
				answered = true
				after(lag, func() { known.Prefilled(claim, clock()) })
			}
			if s.state != Ended {
				return false
			}
			after(lag, func() {
				talk.ids, talk.busy = slices.Concat(talk.ids, s.Said), false
				sum.requests++
				sum.found, sum.all = sum.found+s.Cached, sum.all+len(s.Prompt)
				switch got := p.Cached(h); {
				case got > s.Cached:
					sum.over++
				case got < s.Cached:
					sum.under++
				}
				known.Prefilled(claim, clock())
				known.Found(claim, s.Cached)
				known.Release(claim, s.Output, clock())
			})
			return true
		})
	}
	for at := time.Duration(0); sum.requests < requests; {
		next := at
		if len(due) > 0 {
			next = min(next, due[0].at)
		}
		if e, ok := engine.Next(); ok {
			next = min(next, e)
		}
		now = max(now, next)
		engine.Advance(now)
		if told := engine.Told(); f.events && len(told) > 0 {
			events := eventsOf(told, f.block)
			after(lag, func() { known.Apply(0, events, clock()) })
		}
		running = slices.DeleteFunc(running, func(over func() bool) bool { return over() })
		for len(due) > 0 && due[0].at <= now {
			do := due[0].do
			due = due[1:]
			do()
		}
		if now < at {
			continue
		}
		at = now + time.Duration(rng.ExpFloat64()/rate*float64(time.Second))
		if f.alone && len(running)+len(due) > 0 {
			continue
		}
		for i, n := rng.IntN(len(talks)), 0; n < len(talks); n++ {
			if talk := &talks[(i+n)%len(talks)]; !talk.busy {
				ask(talk)
				break
			}
		}
	}
	return sum
}

// eventsOf are changes as the agent decodes them.
func eventsOf(changes []Change, block int) (events []kvevent.Event) {
	name := func(n BlockName) uint64 { return binary.BigEndian.Uint64(n[:]) }
	for _, c := range changes {
		e := kvevent.Event{Kind: c.Kind, AdapterID: -1, Group: -1, Parent: name(c.Parent), HasParent: c.HasParent}
		for _, n := range c.Names {
			e.Hashes = append(e.Hashes, name(n))
		}
		if c.Kind == kvevent.Stored {
			e.Tokens, e.BlockSize = c.Tokens, block
		}
		events = append(events, e)
	}
	return events
}

// TestForetoldAlone: of requests that come one after the other, package index
// foretells exactly what the engine finds, while it evicts.
func TestForetoldAlone(t *testing.T) {
	f := func(name string, what foretelling) {
		t.Run(name, func(t *testing.T) {
			what.alone = true
			sum := what.run(t, 600, 1)
			if sum.over+sum.under > 0 || sum.found < sum.all/2 || sum.found > sum.all*9/10 {
				t.Errorf("%+v", sum)
			}
		})
	}
	f("vllm", foretelling{engine: "vllm", block: 16, stream: true})
	f("vllm, small blocks", foretelling{engine: "vllm", block: 4})
	f("vllm by events", foretelling{engine: "vllm", block: 16, events: true, stream: true})
	f("vllm by events, small blocks", foretelling{engine: "vllm", block: 4, events: true})
	f("sglang", foretelling{engine: "sglang", block: 16, stream: true})
	f("sglang, single tokens", foretelling{engine: "sglang", block: 1})
	f("sglang by events", foretelling{engine: "sglang", block: 16, events: true, stream: true})
	f("sglang by events, single tokens", foretelling{engine: "sglang", block: 1, events: true})
}

// TestForetoldTogether: where several run beside each other and a block is evicted
// after a few seconds, what is foretold is what those that were sent before leave.
// When the engine takes memory for what it generates, the agent learns at the end of
// the step or not at all, so here and there it is a block off.
func TestForetoldTogether(t *testing.T) {
	f := func(name string, what foretelling, most int) {
		t.Run(name, func(t *testing.T) {
			const requests = 4000
			sum := what.run(t, requests, 1)
			t.Logf("%+v", sum)
			if sum.over+sum.under > most || sum.found < sum.all/2 || sum.found > sum.all*9/10 {
				t.Errorf("%+v, want at most %d wrong", sum, most)
			}
		})
	}
	f("vllm", foretelling{engine: "vllm", block: 16, stream: true}, 100)
	f("vllm, no streams", foretelling{engine: "vllm", block: 16}, 100)
	f("vllm by events", foretelling{engine: "vllm", block: 16, events: true, stream: true}, 100)
	f("vllm by events, no streams", foretelling{engine: "vllm", block: 16, events: true}, 100)
	f("sglang", foretelling{engine: "sglang", block: 16, stream: true}, 100)
	f("sglang, no streams", foretelling{engine: "sglang", block: 16}, 100)
	f("sglang by events", foretelling{engine: "sglang", block: 16, events: true, stream: true}, 100)
	f("sglang by events, no streams", foretelling{engine: "sglang", block: 16, events: true}, 100)
}
