package index

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/inferrail/inferrail/index/kvevent"
)

// grown returns an index with one slot, number 3, that holds something of a wood.
func grown(t testing.TB, r *rand.Rand, w *wood) (*Index, plainTree) {
	t.Helper()
	x := New(Config{})
	x.Join(3, SlotConfig{Model: "m", BlockSize: 16, Capacity: 1 << 20})
	s := x.lock(3)
	p := plainTree{}
	refs := map[int]ref{}
	for range 40 {
		parent := ref(0)
		for _, b := range w.path(r.IntN(len(w.before))) {
			parent = s.tree.add(parent, w.hash[b])
			refs[b] = parent
			if p[b] == nil {
				p[b] = &[reasons]int{}
			}
			if why := reason(r.IntN(int(reasons))); r.IntN(2) == 0 {
				s.tree.hold(parent, why)
				p[b][why]++
				for range r.IntN(30) {
					s.tree.hold(parent, why)
					p[b][why]++
				}
			}
		}
		s.tree.drop(parent)
	}
	for range 5 {
		b := r.IntN(len(w.before))
		if p[b] != nil && *p[b] != [reasons]int{} {
			s.tree.spareRecord(refs[b])
		}
	}
	s.unlock()
	return x, p
}

// TestSnapshot: what a restored slot holds is what the slot held, requests in
// flight aside.
func TestSnapshot(t *testing.T) {
	for seed := range uint64(30) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 2))
			w := newWood(r, 2+r.IntN(100))
			x, p := grown(t, r, w)
			data := x.AppendSnapshot([]byte("before"), 3)[len("before"):]
			y := New(Config{})
			y.Join(1, SlotConfig{Model: "m", BlockSize: 16, Capacity: 1 << 20})
			if err := y.Restore(1, data); err != nil {
				t.Fatal(err)
			}
			for _, n := range p {
				n[expected], n[pinned] = 0, 0
			}
			s := y.lock(1)
			defer s.unlock()
			spares := map[ref]int{}
			for at := s.tree.following(s.tree.top); at != s.tree.top; at = s.tree.following(at) {
				if s.tree.isSpare(at) {
					spares[at] = slices.Index(w.hash, s.tree.hash(s.tree.parent(at)))
				}
			}
			checkTree(t, &s.tree, w, p, spares)
		})
	}
}

// sealed gives a snapshot the checksum of what it holds now.
func sealed(data []byte) []byte {
	body := slices.Clone(data[:len(data)-8])
	return binary.LittleEndian.AppendUint64(body, xxh3.Hash(body))
}

func TestSnapshotRefused(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	x, _ := grown(t, r, newWood(r, 50))
	data := x.AppendSnapshot(nil, 3)
	config := SlotConfig{Model: "m", BlockSize: 16, Capacity: 100}
	f := func(name string, data []byte, c SlotConfig, want string) {
		t.Helper()
		x := New(Config{})
		x.Join(0, c)
		before := x.Totals().Bytes
		err := x.Restore(0, data)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want an error with %q", name, err, want)
		}
		if st := x.Stats(nil)[0]; st.Bytes != 0 || st.Guessed != 0 || st.Blocks != [Tiers]int{} || st.State != Approximate {
			t.Errorf("%s: the slot holds something: %+v", name, st)
		}
		if after := x.Totals().Bytes; after > before+chunkBytes {
			t.Errorf("%s: %d bytes, %d before", name, after, before)
		}
	}
	f("empty", nil, config, "not a snapshot")
	f("text", bytes.Repeat([]byte("text"), 100), config, "not a snapshot")
	other := slices.Clone(data)
	other[len(snapshotMagic)-1]++
	f("later version", other, config, "not a snapshot of this version")
	f("cut short", data[:len(data)-9], config, "checksum")
	f("cut short and sealed", sealed(data[:len(data)-1]), config, "cut short")
	f("with more at its end", sealed(append(slices.Clone(data), 0)), config, "behind its end")
	for range 100 {
		damaged := slices.Clone(data)
		damaged[len(snapshotMagic)+r.IntN(len(data)-len(snapshotMagic))] ^= 1 << r.IntN(8)
		f("a bit", damaged, config, "checksum")
	}
	f("model", data, SlotConfig{Model: "n", BlockSize: 16, Capacity: 100}, `of model "m"`)
	f("block size", data, SlotConfig{Model: "m", BlockSize: 32, Capacity: 100}, "16 tokens")

	if err := x.Restore(3, data); err == nil || !strings.Contains(err.Error(), "holds blocks already") {
		t.Errorf("a slot that holds blocks: %v", err)
	}
	if err := x.Restore(4, data); err == nil || !strings.Contains(err.Error(), "no such slot") {
		t.Errorf("an unknown slot: %v", err)
	}
	if got := x.AppendSnapshot(nil, 4); len(got) != 0 {
		t.Errorf("a snapshot of an unknown slot: %q", got)
	}
}

// TestSnapshotBeyondBound: an index that is too small for a snapshot takes some
// of it, and says that it is not whole.
func TestSnapshotBeyondBound(t *testing.T) {
	x := New(Config{})
	config := SlotConfig{Model: "m", BlockSize: 16, Capacity: 100000}
	x.Join(0, config)
	s := x.lock(0)
	ids := numbers(16 * 20000)
	last := ref(0)
	for _, h := range AppendTokens(nil, Root("m", "", nil), ids, 16) {
		last = s.tree.add(last, h)
		s.tree.hold(last, reason(GPU))
	}
	s.unlock()
	data := x.AppendSnapshot(nil, 0)
	y := New(Config{MaxBytes: x.Totals().Bytes / 2})
	y.Join(0, config)
	if err := y.Restore(0, data); err != nil {
		t.Fatal(err)
	}
	st := y.Stats(nil)[0]
	if st.Blocks[GPU] < 2000 || st.Blocks[GPU] > 15000 || !y.at(0).short {
		t.Errorf("%d blocks, not whole: %v", st.Blocks[GPU], y.at(0).short)
	}
	if y.Totals().Bytes > x.Totals().Bytes/2+chunkBytes {
		t.Errorf("%d bytes with a bound of %d", y.Totals().Bytes, x.Totals().Bytes/2)
	}
}

// lived returns the snapshot of a slot that events and claims have fed.
func lived(r *rand.Rand, c SlotConfig, state State) []byte {
	x := New(Config{})
	x.Join(0, c)
	x.SetState(0, state, "why")
	e := newTeller(r)
	for range 20 {
		if state != Approximate {
			x.Apply(0, e.events(), time.Time{})
		}
		live(x, r)
	}
	return x.AppendSnapshot(nil, 0)
}

// live sends some requests of a conversation to slot 0.
func live(x *Index, r *rand.Rand) {
	now := time.Unix(int64(r.IntN(1000)), 0)
	for _, p := range turns(rand.New(rand.NewPCG(r.Uint64N(5), 1)), 3, 7, 2) {
		var c Claim
		x.Claim(&c, 0, p, now)
		if r.IntN(3) > 0 {
			x.Prefilled(&c, now)
		}
		x.Found(&c, r.IntN(10))
		if r.IntN(5) == 0 {
			x.Undo(&c)
		} else {
			x.Release(&c, r.IntN(9)-1, now)
		}
	}
}

// FuzzSnapshot: whatever a snapshot holds, sealed or not, it is refused, or gives
// a slot that can be written, read again, used as any other and emptied.
func FuzzSnapshot(f *testing.F) {
	config := SlotConfig{Model: "m", BlockSize: 2, Capacity: 40}
	for seed := range uint64(6) {
		r := rand.New(rand.NewPCG(seed, 2))
		config.AfterPrefill = seed%2 == 1
		f.Add(lived(r, config, State(seed%3)), true, config.AfterPrefill)
	}
	f.Add([]byte(snapshotMagic+"\x01m\x00\x02\x00\x00\xff\xff\xff\xff\x0f........"), true, false)
	f.Fuzz(func(t *testing.T, data []byte, seal, radix bool) {
		if seal && len(data) >= 8 {
			data = sealed(data)
		}
		config := SlotConfig{Model: "m", BlockSize: 2, Capacity: 40, AfterPrefill: radix}
		x := New(Config{})
		x.Join(0, config)
		before := x.Totals().Bytes
		if err := x.Restore(0, data); err != nil {
			if s := x.at(0); s.tree.records != 0 || s.tree.blocks != [reasons]int{} {
				t.Fatalf("refused (%v), and the slot holds something", err)
			}
		}
		if grown := x.Totals().Bytes - before; grown > chunkBytes+1000*int64(len(data)) {
			t.Fatalf("%d bytes of snapshot took %d", len(data), grown)
		}
		y := New(Config{})
		y.Join(0, config)
		if err := y.Restore(0, x.AppendSnapshot(nil, 0)); err != nil {
			t.Fatalf("what was restored cannot be restored again: %v", err)
		}
		if a, b := x.at(0).tree.blocks, y.at(0).tree.blocks; a != b {
			t.Fatalf("restored again there are %v, before %v", b, a)
		}
		r := rand.New(rand.NewPCG(1, 1))
		e := newTeller(r)
		for _, state := range []State{Repairing, Exact, Mismatched, Approximate} {
			live(x, r)
			x.Apply(0, e.events(), time.Time{})
			x.Expire(time.Unix(int64(r.IntN(1000)), 0))
			x.SetState(0, state, "")
			x.Apply(0, e.events(), time.Time{})
			s := x.lock(0)
			s.giveUp(3)
			s.unlock()
		}
		config.Capacity = 5
		x.Join(0, config)
		live(x, r)
		x.Leave(0)
		if n := x.table.bytes() + x.arena.maps.Load(); n != 0 {
			t.Fatalf("%d bytes are left", n)
		}
	})
}

// TestSnapshotOfManyBlocks: entering a snapshot takes about what it took to learn
// what is in it, however many blocks that are, and in whatever order they lie in
// it. The names of blocks do so by the place that they have in their table.
func TestSnapshotOfManyBlocks(t *testing.T) {
	withoutRace(t)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	const blocks = 200_000
	r := rand.New(rand.NewPCG(1, 3))
	e := kvevent.Event{Kind: kvevent.Stored, Tokens: randomIDs(r, blocks), BlockSize: 1, AdapterID: -1, Group: -1}
	for range blocks {
		e.Hashes = append(e.Hashes, r.Uint64())
	}
	x := New(Config{})
	x.Join(0, SlotConfig{Model: "m", BlockSize: 1, Capacity: blocks + 1})
	began := threadTime()
	x.Apply(0, []kvevent.Event{e}, time.Time{})
	learned := threadTime() - began

	data := x.AppendSnapshot(nil, 0)
	y := New(Config{})
	y.Join(0, SlotConfig{Model: "m", BlockSize: 1, Capacity: blocks + 1})
	began = threadTime()
	if err := y.Restore(0, data); err != nil {
		t.Fatal(err)
	}
	if restored := threadTime() - began; restored > 20*learned+time.Second {
		t.Errorf("learning %d blocks took %v, and restoring them %v", blocks, learned, restored)
	}
	if got := y.Stats(nil)[0].Blocks[GPU]; got != blocks {
		t.Errorf("%d blocks are restored, want %d", got, blocks)
	}
}
