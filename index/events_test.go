package index

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/inferrail/inferrail/index/kvevent"
)

// TestEventStories: what an engine tells, and what a prompt finds there then.
// Blocks have two tokens. The commands:
//
//	join [capacity=N]
//	apply        an event a line: store NAMES [behind=NAME] [tokens=1,2,...] [on=MEDIUM]
//	             [lora=NAME] [lora-id=N] [salt=TEXT] [image=BLOCK:TEXT] [group=N] [kind=KIND]
//	             [size=N] [locality=L] [ownership=O]; remove NAMES ...; clear
//	look TOKENS [lora=NAME] [salt=TEXT]   how many blocks are found, tier by tier
//	state NAME, untell, forget, told, which has the counts and the state
func TestEventStories(t *testing.T) {
	datadriven.Walk(t, "testdata/events", func(t *testing.T, path string) {
		x := New(Config{})
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "join":
				capacity := 100
				d.MaybeScanArgs(t, "capacity", &capacity)
				x.Join(0, SlotConfig{Model: "m", BlockSize: 2, Capacity: capacity})
			case "apply":
				var events []kvevent.Event
				for line := range strings.Lines(d.Input) {
					events = append(events, storyEvent(t, line))
				}
				x.Apply(0, events, time.Time{})
			case "look":
				var lora, salt string
				d.MaybeScanArgs(t, "lora", &lora)
				d.MaybeScanArgs(t, "salt", &salt)
				p := Prompt{IDs: numbersOf(t, d.CmdArgs[0].Key), Block: 2}
				p.Chain = AppendTokens(nil, Root("m", lora, []byte(salt)), p.IDs, 2)
				var l Lookup
				x.Look(&l, &p)
				return fmt.Sprintln(l.Held(0))
			case "state":
				states := map[string]State{"exact": Exact, "approximate": Approximate, "repairing": Repairing, "mismatched": Mismatched}
				x.SetState(0, states[d.CmdArgs[0].Key], "")
			case "untell":
				x.Untell(0)
			case "forget":
				x.Forget(0)
			case "told":
				st := x.Stats(nil)[0]
				said := [...]string{Exact: "exact", Approximate: "approximate", Repairing: "repairing", Mismatched: "mismatched"}[st.State]
				if st.Why != "" {
					said += ": " + st.Why
				}
				return fmt.Sprintf("%+v\n%s\n", x.Told(0), said)
			default:
				t.Fatalf("no command %q", d.Cmd)
			}
			return ""
		})
	})
}

func numbersOf(t *testing.T, list string) (ids []uint32) {
	t.Helper()
	for _, word := range strings.Split(list, ",") {
		n, err := strconv.Atoi(word)
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, uint32(n))
	}
	return ids
}

func storyEvent(t *testing.T, line string) kvevent.Event {
	words := strings.Fields(line)
	e := kvevent.Event{Medium: "gpu", Group: -1, AdapterID: -1, BlockSize: 2}
	switch words[0] {
	case "store":
		e.Kind = kvevent.Stored
	case "remove":
		e.Kind = kvevent.Removed
	case "clear":
		return kvevent.Event{Kind: kvevent.Cleared}
	default:
		t.Fatalf("no event %q", line)
	}
	for _, name := range words[1] {
		e.Hashes = append(e.Hashes, uint64(name))
	}
	for _, word := range words[2:] {
		key, value, _ := strings.Cut(word, "=")
		number, _ := strconv.Atoi(value)
		switch key {
		case "behind":
			e.Parent, e.HasParent = uint64(value[0]), true
		case "tokens":
			e.Tokens = numbersOf(t, value)
		case "on":
			e.Medium = value
		case "lora":
			e.Adapter = value
		case "lora-id":
			e.AdapterID = int64(number)
		case "salt":
			e.Salt = value
		case "image":
			block, text, _ := strings.Cut(value, ":")
			n, _ := strconv.Atoi(block)
			e.Extra = append(make([][]kvevent.Key, n), []kvevent.Key{{Text: text}})
		case "group":
			e.Group = number
		case "kind":
			e.Spec = value
		case "size":
			e.BlockSize = number
		case "locality":
			e.Locality = value
		case "ownership":
			e.Ownership = value
		default:
			t.Fatalf("no %q in an event", key)
		}
	}
	return e
}

// teller is an engine that tells what it does, and a plain count of what it holds.
type teller struct {
	r      *rand.Rand
	blocks []tellerBlock
	held   map[tellerHold]int
}

type tellerBlock struct {
	parent int // -1 for none
	tokens []uint32
	lora   string
	salt   string
	image  string
	names  []uint64 // the engine's
	chain  []Hash   // ours
	plain  bool     // it and all before it are of tokens only
}

// tellerHold is a name at a place.
type tellerHold struct {
	name                        uint64
	medium, locality, ownership string
}

var tellerPlaces = []tellerHold{
	{medium: "gpu"}, {medium: "gpu"}, {medium: "gpu"}, {medium: "cpu"}, {medium: "cpu_pinned"},
	{medium: "storage"}, {medium: "storage", ownership: "a"}, {medium: "storage", locality: "REMOTE"}, {medium: "external"}, {medium: "what"},
}

func newTeller(r *rand.Rand) *teller {
	e := &teller{r: r, held: map[tellerHold]int{}}
	small := uint64(0)
	for range 60 {
		b := tellerBlock{parent: r.IntN(len(e.blocks)+1) - 1, tokens: randomIDs(r, 2), plain: true}
		if b.parent < 0 {
			b.lora, b.salt = []string{"", "sql"}[r.IntN(2)], []string{"", "pepper"}[r.IntN(2)]
			b.chain = AppendTokens(nil, Root("m", b.lora, []byte(b.salt)), b.tokens, 2)
		} else {
			p := e.blocks[b.parent]
			b.lora, b.salt, b.plain = p.lora, p.salt, p.plain
			b.chain = append(append([]Hash{}, p.chain...), Next(p.chain[len(p.chain)-1], b.tokens))
		}
		if r.IntN(8) == 0 {
			b.image, b.plain = "image", false
		}
		for range 1 + r.IntN(8)/7 {
			// Some are next to each other, and one is 0.
			name := r.Uint64()
			if r.IntN(4) == 0 {
				name = small
				small++
			}
			b.names = append(b.names, name)
		}
		e.blocks = append(e.blocks, b)
	}
	return e
}

// holds tells whether a block is held at a tier or a faster one.
func (e *teller) holds(b *tellerBlock, tier Tier) bool {
	for _, p := range tellerPlaces {
		for _, name := range b.names {
			p.name = name
			if e.held[p] > 0 && tierOf(p.medium, p.locality) <= tier {
				return true
			}
		}
	}
	return false
}

// events makes some, and counts them.
func (e *teller) events() (events []kvevent.Event) {
	r := e.r
	for range 1 + r.IntN(4) {
		p := tellerPlaces[r.IntN(len(tellerPlaces))]
		tier := tierOf(p.medium, p.locality)
		ev := kvevent.Event{Medium: p.medium, Locality: p.locality, Ownership: p.ownership, Group: 0, AdapterID: -1}
		switch r.IntN(20) {
		case 0:
			if r.IntN(5) == 0 {
				events = append(events, kvevent.Event{Kind: kvevent.Cleared})
				for h := range e.held {
					if tierOf(h.medium, h.locality) == GPU {
						delete(e.held, h)
					}
				}
			}
		case 1:
			// Another group tells of the same names.
			ev.Kind, ev.Group, ev.Spec = kvevent.Stored, 1, "sliding_window"
			ev.Hashes = e.blocks[r.IntN(len(e.blocks))].names[:1]
			events = append(events, ev)
		case 2, 3, 4, 5, 6, 7, 8, 9:
			ev.Kind = kvevent.Removed
			for range 1 + r.IntN(3) {
				b := &e.blocks[r.IntN(len(e.blocks))]
				p.name = b.names[r.IntN(len(b.names))]
				if r.IntN(10) == 0 {
					p.name++ // of none
				}
				ev.Hashes = append(ev.Hashes, p.name)
				if e.held[p] > 0 {
					e.held[p]--
				}
			}
			events = append(events, ev)
		default:
			at := r.IntN(len(e.blocks))
			if parent := e.blocks[at].parent; parent >= 0 && !e.holds(&e.blocks[parent], Remote) {
				continue
			}
			b := &e.blocks[at]
			ev.Kind, ev.BlockSize, ev.Spec = kvevent.Stored, 2, "full_attention"
			ev.Adapter = b.lora
			if b.parent >= 0 {
				q := &e.blocks[b.parent]
				ev.HasParent = true
				for _, name := range q.names {
					for _, o := range tellerPlaces {
						if o.name = name; e.held[o] > 0 {
							ev.Parent = name
						}
					}
				}
			} else {
				ev.Salt = b.salt
			}
			// As far down as it goes.
			for {
				b = &e.blocks[at]
				p.name = b.names[r.IntN(len(b.names))]
				ev.Hashes = append(ev.Hashes, p.name)
				ev.Tokens = append(ev.Tokens, b.tokens...)
				if b.image != "" {
					for len(ev.Extra) < len(ev.Hashes) {
						ev.Extra = append(ev.Extra, nil)
					}
					ev.Extra[len(ev.Hashes)-1] = []kvevent.Key{{Text: b.image}}
				}
				if e.held[p]++; tier >= Disk {
					e.held[p] = 1
				}
				next := -1
				for i := range e.blocks {
					if e.blocks[i].parent == at && r.IntN(2) == 0 {
						next = i
					}
				}
				if next < 0 {
					break
				}
				at = next
			}
			events = append(events, ev)
			if r.IntN(4) == 0 {
				// Once more, without saying of what.
				ev.Tokens, ev.Extra, ev.BlockSize, ev.HasParent = nil, nil, 0, false
				for _, name := range ev.Hashes {
					if p.name = name; tier < Disk {
						e.held[p]++
					}
				}
				events = append(events, ev)
			}
		}
	}
	return events
}

// check compares what prompts find with what is held.
func (e *teller) check(t *testing.T, x *Index) {
	t.Helper()
	var l Lookup
	for i := range e.blocks {
		b := &e.blocks[i]
		x.Look(&l, &Prompt{Chain: b.chain})
		got := l.Held(0)
		var want Held
		path := make([]*tellerBlock, len(b.chain))
		for j, at := len(path)-1, i; j >= 0; j-- {
			path[j], at = &e.blocks[at], e.blocks[at].parent
		}
		for tier := range Tier(Tiers) {
			for _, on := range path {
				if !on.plain || !e.holds(on, tier) {
					break
				}
				want[tier]++
			}
		}
		if got != want {
			t.Fatalf("block %d: got %v, want %v", i, got, want)
		}
	}
}

// TestEventsAgainstModel: after any history of stores, removals and clears, of
// copies, tiers, owners, groups and second names, a prompt finds what the engine
// holds; also when the index was saved and restored in between.
func TestEventsAgainstModel(t *testing.T) {
	for seed := range uint64(lessUnderRace(t, 40, 10)) {
		r := rand.New(rand.NewPCG(seed, 21))
		e := newTeller(r)
		config := SlotConfig{Model: "m", BlockSize: 2, Capacity: 1000}
		x := New(Config{})
		x.Join(0, config)
		x.SetState(0, Exact, "")
		for range 150 {
			told := x.Apply(0, e.events(), time.Time{})
			if told.Orphans+told.Malformed+told.NoMemory > 0 || told.BlockSize > 2 {
				t.Fatalf("seed %d: %+v", seed, told)
			}
			if r.IntN(40) == 0 {
				before := x.Stats(nil)[0]
				saved := x.AppendSnapshot(nil, 0)
				x = New(Config{})
				x.Join(0, config)
				if err := x.Restore(0, saved); err != nil {
					t.Fatalf("seed %d: %v", seed, err)
				}
				x.SetState(0, Exact, "")
				if after := x.Stats(nil)[0]; after.State != before.State || after.Why != before.Why {
					t.Fatalf("seed %d: %d, %q, and it was %d, %q", seed, after.State, after.Why, before.State, before.Why)
				}
			}
			e.check(t, x)
		}
		// What is left of it goes, too.
		if r.IntN(2) == 0 {
			x.Untell(0)
			clear(e.held)
			e.check(t, x)
		}
		if s := x.at(0); s.tree.records == 0 && len(s.told.sides)+len(s.told.others)+len(s.told.aliases)+s.told.names.n > 0 {
			t.Fatalf("seed %d: names of nothing: %+v", seed, s.told)
		}
		x.Leave(0)
		if n := x.arena.maps.Load(); n != 0 {
			t.Fatalf("seed %d: %d bytes are left beside records", seed, n)
		}
	}
}

// TestEventsWithoutMemory: an index that is too small for what is told holds
// nothing that is not so, and stays within its bound.
func TestEventsWithoutMemory(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 22))
	const limit = 8 << 20
	x := New(Config{MaxBytes: limit})
	x.Join(0, SlotConfig{Model: "m", BlockSize: 4, Capacity: 1000})
	x.SetState(0, Exact, "")
	held := map[uint64]bool{}
	var events []kvevent.Event
	for range 1500 {
		e := kvevent.Event{Kind: kvevent.Stored, BlockSize: 4, Tokens: randomIDs(r, 4*64), Group: -1, AdapterID: -1, Medium: []string{"gpu", "storage"}[r.IntN(2)]}
		for range 64 {
			e.Hashes = append(e.Hashes, r.Uint64())
			held[e.Hashes[len(e.Hashes)-1]] = true
		}
		events = append(events, e)
		x.Apply(0, events[len(events)-1:], time.Time{})
		if n := x.arena.bytes(); n > limit+limit/8 {
			t.Fatalf("%d bytes", n)
		}
	}
	s := x.at(0)
	if s.told.names.n == 0 || s.told.names.n > s.tree.records {
		t.Errorf("%d names of %d records", s.told.names.n, s.tree.records)
	}
	for _, c := range s.told.names.cells {
		if c != 0 && !held[s.tree.at(c).toldName()] {
			t.Fatal("a name that was never told")
		}
	}
	if st := x.Stats(nil); st[0].State == Exact {
		t.Error("exact, though some of it had to be given up")
	}
	// All of it can be taken out, given up or not.
	for i := range events {
		events[i].Kind = kvevent.Removed
	}
	x.Apply(0, events, time.Time{})
	if s.tree.records != 0 || s.told.names.n != 0 {
		t.Errorf("%d records and %d names are left", s.tree.records, s.told.names.n)
	}
}

// TestEventsOfManySlots: engines tell at the same time, are asked meanwhile, and
// take memory from each other.
func TestEventsOfManySlots(t *testing.T) {
	const slots, limit = 4, 8 << 20
	x := New(Config{MaxBytes: limit})
	var engines [slots]*steady
	for slot := range engines {
		engines[slot] = newSteady(x, slot, 8)
	}
	var tellers, readers sync.WaitGroup
	var stop atomic.Bool
	for range 2 {
		readers.Go(func() {
			r := rand.New(rand.NewPCG(6, 26))
			chain := AppendTokens(nil, Root("m", "", nil), randomIDs(r, 16*steadyBlocks), 16)
			var l Lookup
			for !stop.Load() {
				x.Look(&l, &Prompt{Chain: chain})
				l.Held(r.IntN(slots))
				runtime.Gosched()
			}
		})
	}
	for slot, e := range engines {
		tellers.Go(func() {
			for i := range 400 {
				// They store more than they remove, in turns.
				events := e.step()
				if (i/100+slot)%2 == 0 {
					events = events[:1]
				}
				x.Apply(slot, events, time.Time{})
			}
		})
	}
	tellers.Wait()
	stop.Store(true)
	readers.Wait()
	if n := x.arena.bytes(); n > limit+limit/8 {
		t.Errorf("%d bytes", n)
	}
	for slot := range slots {
		s := x.at(slot)
		n := 0
		for _, c := range s.told.names.cells {
			if c != 0 {
				n++
				if s.tree.holds(c, reason(GPU)) != 1 {
					t.Fatalf("slot %d: a name of a block that is held %d times", slot, s.tree.holds(c, reason(GPU)))
				}
			}
		}
		if n != s.told.names.n || n == 0 || n > s.tree.blocks[GPU] {
			t.Errorf("slot %d: %d names, said to be %d, of %d blocks", slot, n, s.told.names.n, s.tree.blocks[GPU])
		}
		x.Leave(slot)
	}
	if n := x.arena.maps.Load(); n != 0 {
		t.Errorf("%d bytes are left beside records", n)
	}
}

// TestStorageIsBounded: media that tell no removals do not grow for ever.
func TestStorageIsBounded(t *testing.T) {
	r := rand.New(rand.NewPCG(4, 23))
	x := New(Config{})
	x.Join(0, SlotConfig{Model: "m", BlockSize: 4, Capacity: 10})
	var e kvevent.Event
	for range 1200 {
		e = kvevent.Event{Kind: kvevent.Stored, BlockSize: 4, Tokens: randomIDs(r, 4*64), Group: -1, AdapterID: -1, Medium: "storage"}
		for range 64 {
			e.Hashes = append(e.Hashes, r.Uint64())
		}
		x.Apply(0, []kvevent.Event{e}, time.Time{})
	}
	if st := x.Stats(nil); st[0].Blocks[Disk] != 1<<16 {
		t.Errorf("%d blocks on disk", st[0].Blocks[Disk])
	}
	var l Lookup
	x.Look(&l, &Prompt{Chain: AppendTokens(nil, Root("m", "", nil), e.Tokens, 4)})
	if got := l.Held(0); got[Disk] != 64 || got[CPU] != 0 {
		t.Errorf("the latest: %v", got)
	}
}

// TestToldSnapshotDamaged: whatever is in it, restoring does no harm.
func TestToldSnapshotDamaged(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 24))
	e := newTeller(r)
	x := New(Config{})
	x.Join(0, SlotConfig{Model: "m", BlockSize: 2, Capacity: 1000})
	for range 100 {
		x.Apply(0, e.events(), time.Time{})
	}
	s := x.at(0)
	refs := map[ref]uint32{}
	back := []ref{0}
	for c := s.tree.following(s.tree.top); c != s.tree.top; c = s.tree.following(c) {
		back = append(back, c)
		refs[c] = uint32(len(back) - 1)
	}
	good := s.told.appendSnapshot(nil, s, func(c ref) uint32 { return refs[c] })
	at := func(n uint32) ref {
		if int(n) < len(back) {
			return back[n]
		}
		return 0
	}
	damaged := 0
	for range 3000 {
		data := append([]byte{}, good[:len(good)-r.IntN(2)*r.IntN(len(good))]...)
		for range r.IntN(4) {
			data[r.IntN(len(data))] = byte(r.Uint32())
		}
		s.told.reset(s)
		if s.told.restore(s, data, at) != nil {
			damaged++
			s.told.reset(s)
		}
	}
	if damaged < 1000 {
		t.Errorf("only %d of 3000 were seen to be damaged", damaged)
	}
	s.told.reset(s)
	if err := s.told.restore(s, good, at); err != nil {
		t.Fatal(err)
	}
	e.check(t, x)
	for range 50 {
		x.Apply(0, e.events(), time.Time{})
		e.check(t, x)
	}
}

// What was taken away while the events were not believed is not there when they
// are again: that is told, until the cache is empty.
func TestEventsBelievedAgain(t *testing.T) {
	x := New(Config{})
	x.Join(0, SlotConfig{Model: "m", BlockSize: 4, Capacity: 9})
	x.SetState(0, Exact, "")
	tokens := make([]uint32, 24)
	e := kvevent.Event{Kind: kvevent.Stored, Hashes: []uint64{1, 2, 3, 4, 5, 6}, Tokens: tokens, BlockSize: 4, Medium: "gpu", Group: -1, AdapterID: -1}
	x.Apply(0, []kvevent.Event{e}, time.Time{})
	expect := func(state State, blocks int, why string) {
		t.Helper()
		if st := x.Stats(nil)[0]; st.State != state || st.Blocks[GPU] != blocks || st.Why != why {
			t.Errorf("it is %v, %d blocks, %q; want %v, %d, %q", st.State, st.Blocks[GPU], st.Why, state, blocks, why)
		}
	}
	expect(Exact, 6, "")
	x.SetState(0, Mismatched, "no")
	ids := []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17}
	root := Root("m", "", nil)
	p := &Prompt{Root: root, Chain: AppendTokens(nil, root, ids, 4), IDs: ids, Block: 4}
	var c Claim
	x.Claim(&c, 0, p, time.Unix(1, 0))
	x.Release(&c, 0, time.Unix(2, 0))
	expect(Mismatched, 3, "no")
	x.SetState(0, Exact, "")
	const why = "some of what its events told was given up while they were not believed"
	expect(Approximate, 3, why)
	data := x.AppendSnapshot(nil, 0)
	y := New(Config{})
	y.Join(0, SlotConfig{Model: "m", BlockSize: 4, Capacity: 9})
	if err := y.Restore(0, data); err != nil {
		t.Fatal(err)
	}
	y.SetState(0, Exact, "")
	if st := y.Stats(nil)[0]; st.Why != why {
		t.Errorf("after a restart it is %v, %q", st.State, st.Why)
	}
	x.Apply(0, []kvevent.Event{{Kind: kvevent.Cleared, AdapterID: -1, Group: -1}}, time.Time{})
	expect(Exact, 0, "")
}

// What large batches say is what they say as a whole, though others have their turn
// in between.
func TestEventsOfLargeBatches(t *testing.T) {
	r := rand.New(rand.NewPCG(12, 8))
	whole, parts := New(Config{}), New(Config{})
	for _, x := range []*Index{whole, parts} {
		x.Join(0, SlotConfig{Model: "m", BlockSize: 4, Capacity: 1 << 20})
		x.SetState(0, Exact, "")
	}
	base := kvevent.Event{Medium: "gpu", Group: -1, AdapterID: -1, BlockSize: 4}
	var known []uint64 // in the order of the chain that they are in
	next := uint64(1)
	for round := range 60 {
		var events []kvevent.Event
		for range 1 + r.IntN(3) {
			e := base
			e.Kind = kvevent.Stored
			for range r.IntN(5 * portion) {
				name := next * spread
				if len(known) > 0 && r.IntN(50) == 0 {
					name = known[r.IntN(len(known))]
				}
				next++
				e.Hashes = append(e.Hashes, name)
				if r.IntN(3) == 0 {
					e.Extra = append(e.Extra, []kvevent.Key{{Text: fmt.Sprint(next)}})
				} else {
					e.Extra = append(e.Extra, nil)
				}
			}
			e.Extra = e.Extra[:r.IntN(len(e.Extra)+1)]
			e.Tokens = randomIDs(r, 4*len(e.Hashes))
			switch n := r.IntN(10); {
			case n < 6 && len(known) > 0:
				e.HasParent, e.Parent = true, known[r.IntN(len(known))]
			case n == 6:
				e.HasParent, e.Parent = true, 12345 // nobody's
			case n == 7:
				e.Salt = "pepper"
			case n == 8 && len(e.Tokens) > 0:
				e.Tokens = e.Tokens[1:]
			}
			known = append(known, e.Hashes...)
			events = append(events, e)
		}
		if round%3 > 0 {
			e := base
			e.Kind = kvevent.Removed
			for range r.IntN(4 * portion) {
				e.Hashes = append(e.Hashes, known[r.IntN(len(known))])
				if r.IntN(2) == 0 {
					events = append(events, e)
					e.Hashes = nil
				}
			}
			events = append(events, e)
		}
		if r.IntN(6) == 0 {
			// Of a block that the batch removes, its connector tells without saying what it is.
			name := known[r.IntN(len(known))]
			gone, below := base, base
			gone.Kind, gone.Hashes = kvevent.Removed, []uint64{name}
			below.Kind, below.Hashes, below.Medium = kvevent.Stored, []uint64{name}, "cpu"
			events = append(append([]kvevent.Event{gone, gone, gone}, events...), below)
		}
		if got, want := parts.Apply(0, events, time.Time{}), whole.apply(0, events); got != want {
			t.Fatalf("round %d: %+v, want %+v", round, got, want)
		}
		if !bytes.Equal(parts.AppendSnapshot(nil, 0), whole.AppendSnapshot(nil, 0)) {
			t.Fatalf("round %d: what is held differs", round)
		}
	}
	if told := parts.Told(0); told.Stored < 1000 || told.Removed < 1000 || told.Orphans == 0 || told.Malformed == 0 {
		t.Errorf("%+v", told)
	}
}

// steady is an engine in steady state: it stores a prompt of 32 blocks behind a
// prefix of 32 that is held, and removes as many that were stored long ago.
type steady struct {
	r      *rand.Rand
	shared []uint64
	queue  []uint64
	batch  []kvevent.Event
	next   uint64
}

const steadyBlocks = 32

func newSteady(x *Index, slot, prompts int) *steady {
	e := &steady{r: rand.New(rand.NewPCG(uint64(slot), 25)), next: uint64(slot) << 40}
	x.Join(slot, SlotConfig{Model: "m", BlockSize: 16, Capacity: 1 << 20})
	x.SetState(slot, Exact, "")
	root := kvevent.Event{Kind: kvevent.Stored, BlockSize: 16, Medium: "gpu", Group: 0, Spec: "full_attention", AdapterID: -1, Tokens: randomIDs(e.r, 16*steadyBlocks)}
	for range steadyBlocks {
		root.Hashes = append(root.Hashes, e.name())
	}
	e.shared = root.Hashes
	x.Apply(slot, []kvevent.Event{root}, time.Time{})
	e.batch = []kvevent.Event{root}
	e.batch[0].HasParent, e.batch[0].Parent = true, e.shared[steadyBlocks-1]
	e.batch[0].Hashes = make([]uint64, steadyBlocks)
	e.batch[0].Tokens = make([]uint32, 16*steadyBlocks)
	for range steadyBlocks {
		e.batch = append(e.batch, kvevent.Event{Kind: kvevent.Removed, Medium: "gpu", Group: 0, Hashes: make([]uint64, 1)})
	}
	e.queue = make([]uint64, 0, prompts*steadyBlocks)
	for len(e.queue) < cap(e.queue) {
		e.store()
		e.queue = append(e.queue, e.batch[0].Hashes...)
		x.Apply(slot, e.batch[:1], time.Time{})
	}
	return e
}

func (e *steady) name() uint64 {
	e.next++
	return e.next * spread
}

func (e *steady) store() {
	for i := range e.batch[0].Hashes {
		e.batch[0].Hashes[i] = e.name()
	}
	for i := range e.batch[0].Tokens {
		e.batch[0].Tokens[i] = e.r.Uint32N(150000)
	}
}

// step makes the next batch. The end of a prompt is removed before its beginning.
func (e *steady) step() []kvevent.Event {
	e.store()
	for i := range steadyBlocks {
		e.batch[1+i].Hashes[0] = e.queue[steadyBlocks-1-i]
	}
	copy(e.queue, e.queue[steadyBlocks:])
	copy(e.queue[len(e.queue)-steadyBlocks:], e.batch[0].Hashes)
	return e.batch
}

func TestEventsAllocateNothing(t *testing.T) {
	withoutRace(t)
	x := New(Config{})
	// So many that the table, which is made anew from time to time, does so seldom.
	e := newSteady(x, 0, 2048)
	for range 2000 {
		x.Apply(0, e.step(), time.Time{})
	}
	if n := testing.AllocsPerRun(1000, func() { x.Apply(0, e.step(), time.Time{}) }); n != 0 {
		t.Errorf("%v allocations a batch", n)
	}
}

// BenchmarkApply applies batches of an engine in steady state: 32 blocks stored
// behind a prefix, and 32 removed. The time a block event is what counts. held is
// how many blocks the engines hold in all.
func BenchmarkApply(b *testing.B) {
	for _, held := range []int{1 << 14, 1 << 20} {
		b.Run(fmt.Sprintf("held=%d", held), func(b *testing.B) {
			x := New(Config{})
			slots := max(1, held>>16)
			var engines []*steady
			for slot := range slots {
				engines = append(engines, newSteady(x, slot, min(held, 1<<16)/steadyBlocks))
			}
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			b.ReportAllocs()
			b.ResetTimer()
			var spent time.Duration
			for i := range b.N {
				slot := i % slots
				events := engines[slot].step()
				start := threadTime()
				x.Apply(slot, events, time.Time{})
				spent += threadTime() - start
			}
			perBlock := float64(spent.Nanoseconds()) / float64(b.N) / (2 * steadyBlocks)
			b.ReportMetric(perBlock, "ns/block")
			b.ReportMetric(1e9/perBlock, "blocks/s")
			b.ReportMetric(float64(x.arena.bytes())/float64(slots*min(held, 1<<16)), "B/held")
		})
	}
}
