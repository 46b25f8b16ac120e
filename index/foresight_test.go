package index

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/inferrail/inferrail/index/kvevent"
)

// TestForeseen: what an engine whose events are known has to evict, for requests
// that it has not told of yet, is not counted; and is again when it does not come
// to that.
func TestForeseen(t *testing.T) {
	const block = 4
	root := Root("m", "", nil)
	now := time.Unix(1000, 0)
	x := New(Config{})
	x.Join(0, SlotConfig{Model: "m", BlockSize: block, Capacity: 9}) // one is reserved
	x.SetState(0, Exact, "")

	// A prompt is named by a letter for each block, and n more tokens.
	prompt := func(blocks string, n int) *Prompt {
		p := &Prompt{Root: root, Block: block}
		for _, b := range blocks {
			p.IDs = append(p.IDs, uint32(b), uint32(b), uint32(b), uint32(b))
		}
		p.Chain = AppendTokens(nil, root, p.IDs, block)
		for range n {
			p.IDs = append(p.IDs, 1)
		}
		return p
	}
	// An engine names a block by its letter.
	name := func(blocks string) (names []uint64) {
		for _, b := range blocks {
			names = append(names, uint64(b))
		}
		return names
	}
	stored := func(behind, blocks string) kvevent.Event {
		e := kvevent.Event{Kind: kvevent.Stored, Hashes: name(blocks), Tokens: prompt(blocks, 0).IDs, BlockSize: block, AdapterID: -1, Group: -1}
		if behind != "" {
			e.Parent, e.HasParent = name(behind)[0], true
		}
		return e
	}
	removed := func(blocks string) kvevent.Event {
		return kvevent.Event{Kind: kvevent.Removed, Hashes: name(blocks), AdapterID: -1, Group: -1}
	}
	apply := func(events ...kvevent.Event) { x.Apply(0, events, now) }
	claim := func(p *Prompt) *Claim {
		c := new(Claim)
		x.Claim(c, 0, p, now)
		return c
	}
	f := func(want string) {
		t.Helper()
		var got []string
		for _, blocks := range []string{"abcd", "efgh", "ijkl"} {
			var l Lookup
			p := prompt(blocks, 1)
			x.Look(&l, p)
			got = append(got, fmt.Sprint(l.Held(0)[GPU]))
		}
		if got := strings.Join(got, " "); got != want {
			t.Errorf("%s blocks are held, want %s", got, want)
		}
	}

	apply(stored("", "abcd"), stored("", "efgh"))
	f("4 4 0")
	// Three blocks are wanted, and none is free: the oldest prompt loses its end.
	c := claim(prompt("ijk", 0))
	f("1 4 3")
	// It was refused.
	x.Undo(c)
	f("4 4 0")
	// What begins within a block takes another.
	c = claim(prompt("ij", 1))
	f("1 4 2")
	// What was foreseen is told.
	apply(removed("d"), removed("c"), removed("b"), stored("", "ij"))
	f("1 4 2")
	x.Prefilled(c, now)
	f("1 4 2")
	// What it has generated is told, and evicts; what the engine would evict next is
	// foreseen, as it has begun another.
	apply(stored("j", "k"))
	f("0 4 3")
	apply(removed("a"))
	f("0 4 3")
	// It gives back what is not full.
	x.Release(c, 4, now)
	f("0 4 3")
	// What a request uses stays, and what it used comes after others.
	c = claim(prompt("efgh", 0))
	d := claim(prompt("xyz", 0))
	f("0 4 1")
	x.Undo(d)
	x.Release(c, 1, now)
	d = claim(prompt("xyz", 0))
	f("0 4 1")
	// It still has what it should have lost, and goes on from it: another goes.
	apply(stored("k", "l"))
	f("0 1 4")
	x.Undo(d)
	f("0 4 4")
	// A larger cache than was said is learnt from what is told.
	apply(stored("", "abcd"), stored("d", "mnopq"))
	f("4 4 4")
	d = claim(prompt("xyz", 0))
	f("4 1 4")
	// What was wanted and is not told of is given up.
	x.Prefilled(d, now)
	f("4 0 4")
	now = now.Add(time.Hour)
	x.Expire(now)
	f("4 3 4")
	x.Release(d, 4, now)
	f("4 4 4")
}

// TestSilentEngine: an engine that answers and tells nothing is not believed to be
// known exactly, until it tells something again.
func TestSilentEngine(t *testing.T) {
	now := time.Unix(1000, 0)
	x := New(Config{})
	x.Join(0, SlotConfig{Model: "m", BlockSize: 1, Capacity: 100})
	x.SetState(0, Exact, "")
	ask := func(n uint32) {
		p := &Prompt{IDs: []uint32{n, n + 1}, Block: 1}
		p.Chain = AppendTokens(nil, Root("m", "", nil), p.IDs, 1)
		var c Claim
		x.Claim(&c, 0, p, now)
		x.Prefilled(&c, now)
		x.Release(&c, 1, now)
	}
	f := func(n int, silent bool) {
		t.Helper()
		for i := range n {
			ask(uint32(100 * i))
		}
		now = now.Add(time.Minute)
		if got := x.Expire(now); (len(got) > 0) != silent {
			t.Errorf("silent are %v, want %v", got, silent)
		}
	}
	tell := func() {
		x.Apply(0, []kvevent.Event{{Kind: kvevent.Stored, Hashes: []uint64{1}, Tokens: []uint32{1}, BlockSize: 1, AdapterID: -1, Group: -1}}, now)
	}
	f(0, false)
	f(mostSilent-1, false)
	tell()
	f(mostSilent-1, false)
	f(1, true)
	x.SetState(0, Mismatched, Silent)
	believed := func() bool {
		for range 2 * auditOf {
			now = now.Add(time.Second)
			if why, changed := x.Audit(0, 1, 1, true, now); changed {
				return why == ""
			}
		}
		return false
	}
	if believed() {
		t.Error("it is believed though it tells nothing")
	}
	tell()
	if !believed() {
		t.Error("it is not believed though it tells again")
	}
}
