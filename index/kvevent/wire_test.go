package kvevent

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/vmihailenco/msgpack/v5"
)

// golden is a line of testdata/payloads.txt.
type golden struct {
	name    string
	payload []byte
	want    goldenBatch
}

type goldenBatch struct {
	Time      float64       `json:"time"`
	Rank      int           `json:"rank"`
	Passed    int           `json:"passed"`
	Publisher string        `json:"publisher"`
	Events    []goldenEvent `json:"events"`
	Again     string        `json:"again"`
}

// goldenEvent is an event as testdata/payloads.py describes it. A key of which
// only a digest is known is "#".
type goldenEvent struct {
	Kind      string     `json:"kind"`
	Hashes    []string   `json:"hashes"`
	Parent    string     `json:"parent"`
	Tokens    []uint32   `json:"tokens"`
	BlockSize int        `json:"block_size"`
	Medium    string     `json:"medium"`
	AdapterID *int64     `json:"adapter_id"`
	Adapter   string     `json:"adapter"`
	Salt      string     `json:"salt"`
	Extra     [][]string `json:"extra"`
	Group     *int       `json:"group"`
	Spec      string     `json:"spec"`
	Locality  string     `json:"locality"`
	Ownership string     `json:"ownership"`
}

func readGolden(t testing.TB) []golden {
	t.Helper()
	text, err := os.ReadFile("testdata/payloads.txt")
	if err != nil {
		t.Fatal(err)
	}
	var all []golden
	for line := range strings.Lines(string(text)) {
		part := strings.Split(line, "\t")
		g := golden{name: part[0]}
		if g.payload, err = hex.DecodeString(part[1]); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal([]byte(part[2]), &g.want); err != nil {
			t.Fatal(err)
		}
		all = append(all, g)
	}
	if len(all) < 40 {
		t.Fatalf("only %d golden payloads", len(all))
	}
	return all
}

// describe says what a batch holds in the words of the golden ones.
func describe(b *Batch) goldenBatch {
	out := goldenBatch{Time: b.Time, Rank: b.Rank, Passed: b.Passed}
	if b.Publisher != [16]byte{} {
		out.Publisher = hex.EncodeToString(b.Publisher[:])
	}
	for _, e := range b.Events {
		g := goldenEvent{
			Kind:   []string{"", "stored", "removed", "cleared"}[e.Kind],
			Tokens: slices.Clone(e.Tokens), BlockSize: e.BlockSize, Medium: e.Medium, Adapter: e.Adapter, Salt: e.Salt,
			Spec: e.Spec, Locality: e.Locality, Ownership: e.Ownership,
		}
		for _, h := range e.Hashes {
			g.Hashes = append(g.Hashes, fmt.Sprint(h))
		}
		if e.HasParent {
			g.Parent = fmt.Sprint(e.Parent)
		}
		if e.AdapterID >= 0 {
			g.AdapterID = &e.AdapterID
		}
		if e.Group >= 0 {
			g.Group = &e.Group
		}
		for _, keys := range e.Extra {
			texts := []string{}
			for _, k := range keys {
				if k.Text == "" {
					texts = append(texts, "#")
				} else {
					texts = append(texts, k.Text)
				}
			}
			g.Extra = append(g.Extra, texts)
		}
		out.Events = append(out.Events, g)
	}
	return out
}

func toJSON(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return strings.NewReplacer("null", "[]").Replace(string(text))
}

// TestWireGolden: the engines' own payloads are read as they are meant, by one
// decoder that has read others before, and written again to the byte.
func TestWireGolden(t *testing.T) {
	all := readGolden(t)
	var d Decoder
	r := rand.New(rand.NewPCG(1, 1))
	forms := map[string]Form{"vllm": VLLM, "vllm-arrays": VLLMArrays, "sglang": SGLang, "sglang-arrays": SGLangArrays}
	written := map[string]int{}
	for range 5 {
		for _, i := range r.Perm(len(all)) {
			g := all[i]
			var b Batch
			if err := d.Batch(&b, g.payload); err != nil {
				t.Errorf("%s: %v", g.name, err)
				continue
			}
			again := g.want.Again
			g.want.Again = ""
			if got, want := toJSON(describe(&b)), toJSON(g.want); got != want {
				t.Errorf("%s:\n got %s\nwant %s", g.name, got, want)
			}
			if again == "" {
				continue
			}
			name, size := again, 0
			_, _ = fmt.Sscanf(again, "%s %d", &name, &size)
			written[name]++
			form, ok := forms[name]
			if !ok {
				t.Fatalf("%s: no form %q", g.name, name)
			}
			if got := AppendBatch([]byte("x"), form, size, &b); !bytes.Equal(got[1:], g.payload) {
				t.Errorf("%s: written as %s:\n got %x\nwant %x", g.name, again, got[1:], g.payload)
			}
		}
	}
	if len(written) != len(forms) {
		t.Errorf("only these forms were written: %v", written)
	}
}

// TestWireKeysAreApart: images that differ in what they are or where they are
// have other digests, and the same one has the same.
func TestWireKeysAreApart(t *testing.T) {
	digests := map[uint64]string{}
	for _, key := range []any{[]any{"a", 1}, []any{"a", 2}, []any{"b", 1}, []any{"a"}, []byte("a"), []any{[]byte("a"), 1}, 7, nil} {
		var last uint64
		for range 2 {
			payload, err := msgpack.Marshal([]any{1.5, []any{map[string]any{
				"type": "BlockStored", "block_hashes": []int{1}, "token_ids": []int{1}, "block_size": 1, "extra_keys": []any{[]any{key}},
			}}})
			if err != nil {
				t.Fatal(err)
			}
			var d Decoder
			var b Batch
			if err := d.Batch(&b, payload); err != nil {
				t.Fatal(err)
			}
			got := b.Events[0].Extra[0][0].Digest
			if last != 0 && got != last {
				t.Errorf("%v has two digests", key)
			}
			last = got
		}
		if other, ok := digests[last]; ok {
			t.Errorf("%v and %s have one digest", key, other)
		}
		digests[last] = fmt.Sprint(key)
	}
}

// TestWireNoTokens: what stands for an image among the token ids is no token.
func TestWireNoTokens(t *testing.T) {
	ids := []any{-1, int64(-7000000), uint64(1) << 40, uint64(1) << 41, uint32(5), uint8(200)}
	payload, err := msgpack.Marshal([]any{1.5, []any{[]any{"BlockStored", []int{1}, nil, ids, 6, nil, "GPU"}}, nil})
	if err != nil {
		t.Fatal(err)
	}
	var d Decoder
	var b Batch
	if err := d.Batch(&b, payload); err != nil {
		t.Fatal(err)
	}
	got := slices.Clone(b.Events[0].Tokens)
	for _, id := range got[:4] {
		if id>>31 == 0 {
			t.Errorf("%d may be a token", id)
		}
	}
	if !slices.Equal(got[4:], []uint32{5, 200}) {
		t.Errorf("tokens behind it: %v", got[4:])
	}
	slices.Sort(got)
	if len(slices.Compact(got)) != len(ids) {
		t.Errorf("two of them are taken for one: %v", got)
	}
}

func TestWireErrors(t *testing.T) {
	f := func(v any, want string) {
		t.Helper()
		payload, ok := v.([]byte)
		if !ok {
			var err error
			if payload, err = msgpack.Marshal(v); err != nil {
				t.Fatal(err)
			}
		}
		var d Decoder
		var b Batch
		err := d.Batch(&b, payload)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%x: error %v, want %q", payload, err, want)
		}
		if len(b.Events) != 0 {
			t.Errorf("%x: there are events beside the error", payload)
		}
	}
	type a = []any
	type m = map[string]any
	f([]byte{}, "ends too early")
	f(a{}, "want a time and events")
	f(a{1.5}, "want a time and events")
	f(m{"ts": 1.5}, "decoding array length")
	f(a{"now", a{}}, "time:")
	f(a{1.5, 7}, "events:")
	f(a{1.5, a{7}}, "event 0: neither an array nor a map")
	f(a{1.5, a{a{"AllBlocksCleared"}, a{}}}, "event 1: an empty array")
	f(a{1.5, a{}, "first"}, "rank:")
	f(a{1.5, a{}, 0, 7}, "publisher id:")
	f(a{1.5, a{a{"BlockStored", a{1, "x", nil}}}}, "event 0: block_hashes: number 2: is null")
	f(a{1.5, a{a{"BlockRemoved", a{1.5}}}}, "block_hashes: number 0:")
	f(a{1.5, a{m{"type": "BlockStored", "token_ids": a{1, 2, true}}}}, "token_ids: number 2:")
	f(a{1.5, a{m{"type": "BlockStored", "token_ids": a{a{}}}}}, "token_ids: number 0: an empty array")
	f(a{1.5, a{m{"type": "BlockStored", "block_size": -1}}}, "block_size: -1 is none")
	f(a{1.5, a{m{"type": "BlockStored", "medium": 7}}}, "medium:")
	f(a{1.5, a{m{"type": "BlockStored", "extra_keys": a{nil}}}}, "extra_keys: 1 for 0 blocks")
	f(a{1.5, a{m{"type": "BlockStored", "block_hashes": a{1}, "extra_keys": 7}}}, "extra_keys:")
	f(a{1.5, a{m{"type": 7}}}, "type:")
	good, _ := msgpack.Marshal(a{1.5, a{}})
	f(append(good, 0xc0), "1 bytes follow")
	f([]byte{0x92, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0x91, 0x81, 0xa1, 'x', 0xc1}, "code 0xc1 is none of msgpack")
	f(make([]byte, MaxPayload+1), "larger than")

	// Cut anywhere, every golden payload is an error.
	for _, g := range readGolden(t) {
		for n := range g.payload {
			var d Decoder
			var b Batch
			if err := d.Batch(&b, g.payload[:n]); err == nil {
				t.Fatalf("%s: no error with %d of %d bytes", g.name, n, len(g.payload))
			}
		}
	}
}

// hostile are payloads that declare more than they carry.
func hostile() [][]byte {
	head := []byte{0x92, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0}
	long := func(code byte) []byte { return []byte{code, 0xff, 0xff, 0xff, 0xff} }
	stored := append([]byte{0x91, 0x9c, 0xab}, "BlockStored"...)
	var all [][]byte
	add := func(parts ...[]byte) { all = append(all, slices.Concat(append([][]byte{head}, parts...)...)) }
	add(long(0xdd))
	add(long(0xdd), bytes.Repeat([]byte{0x80}, 1000))
	add(stored, long(0xdd))
	add(stored, long(0xdd), bytes.Repeat([]byte{1}, 1000))
	add(stored, []byte{0x90, 0xc0}, long(0xdd), bytes.Repeat([]byte{1}, 1000))
	add(stored, []byte{0x91}, long(0xc6), []byte("short"))
	add([]byte{0x91}, long(0xdf))
	add([]byte{0x91, 0x81, 0xa1, 'x'}, long(0xdf), bytes.Repeat([]byte{0xdd, 0xff, 0xff, 0xff, 0xff}, 1000))
	// Deeper than any stack.
	add([]byte{0x91, 0x81, 0xa1, 'x'}, bytes.Repeat([]byte{0x91}, 10<<20))
	return all
}

func TestWireHostileLengths(t *testing.T) {
	for i, payload := range hostile() {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		var d Decoder
		var b Batch
		if err := d.Batch(&b, payload); err == nil {
			t.Errorf("payload %d: no error", i)
		}
		runtime.ReadMemStats(&after)
		if got := after.TotalAlloc - before.TotalAlloc; got > 1<<20 {
			t.Errorf("payload %d of %d bytes: %d bytes allocated", i, len(payload), got)
		}
	}
}

// TestWireLargeBatchIsGivenUp: one batch of many blocks binds no memory when
// small ones follow it.
func TestWireLargeBatchIsGivenUp(t *testing.T) {
	var d Decoder
	var b Batch
	large := Batch{Rank: -1, Events: []Event{{Kind: Stored, Hashes: make([]uint64, 200000), Tokens: make([]uint32, 400000), AdapterID: -1, Group: -1}}}
	small := Batch{Rank: -1, Events: []Event{{Kind: Cleared}}}
	for _, in := range []*Batch{&large, &small, &small} {
		if err := d.Batch(&b, AppendBatch(nil, SGLang, 0, in)); err != nil {
			t.Fatal(err)
		}
	}
	if cap(d.hashes) > 1<<16 || cap(d.tokens) > 1<<16 {
		t.Errorf("room for %d hashes and %d tokens is kept", cap(d.hashes), cap(d.tokens))
	}
}

// TestWireRoundTrip: a batch of anything that a form can say is read as it was
// written.
func TestWireRoundTrip(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	var d Decoder
	for step := range 3000 {
		form := Form(step % 4)
		vllm := form == VLLM || form == VLLMArrays
		in := Batch{Time: float64(r.IntN(1 << 30)), Rank: r.IntN(4) - 1}
		if form == VLLM && r.IntN(3) == 0 {
			in.Publisher[r.IntN(16)] = 1
		}
		for range r.IntN(4) {
			in.Events = append(in.Events, randomEvent(r, form))
		}
		size := 0
		if vllm && r.IntN(3) == 0 {
			size = 8 + r.IntN(33)
		}
		var out Batch
		if err := d.Batch(&out, AppendBatch(nil, form, size, &in)); err != nil {
			t.Fatal(err)
		}
		if len(in.Events) == 0 {
			out.Events = nil
		}
		got, want := fmt.Sprintf("%+v", out), fmt.Sprintf("%+v", in)
		if got != want {
			t.Fatalf("form %d:\n got %s\nwant %s", form, got, want)
		}
	}
}

func randomEvent(r *rand.Rand, form Form) Event {
	vllm := form == VLLM || form == VLLMArrays
	pick := func(s ...string) string { return s[r.IntN(len(s))] }
	e := Event{Kind: Kind(1 + r.IntN(3)), AdapterID: -1, Group: -1, Medium: "gpu"}
	if e.Kind == Cleared {
		return e
	}
	for range 1 + r.IntN(5) {
		e.Hashes = append(e.Hashes, r.Uint64()>>r.IntN(64))
	}
	e.Medium = pick("gpu", "cpu", "cpu_pinned", "disk")
	if vllm && r.IntN(2) == 0 {
		e.Group = r.IntN(300)
	}
	if form == VLLM {
		e.Locality, e.Ownership = pick("", "LOCAL"), pick("", "tier")
	}
	if e.Kind == Removed {
		return e
	}
	if e.HasParent = r.IntN(2) == 0; e.HasParent {
		e.Parent = r.Uint64()
	}
	e.BlockSize = 1 + r.IntN(20)
	for range e.BlockSize * len(e.Hashes) {
		e.Tokens = append(e.Tokens, r.Uint32()>>r.IntN(32))
	}
	if !vllm {
		e.Salt = pick("", "pepper")
		return e
	}
	e.Spec = pick("", "full_attention")
	if r.IntN(2) == 0 {
		e.Adapter, e.AdapterID = "sql", 4
	}
	if !e.HasParent {
		e.Salt = pick("", "pepper")
	}
	if r.IntN(3) == 0 && len(e.Hashes) > 1 {
		e.Extra = append(make([][]Key, r.IntN(len(e.Hashes)-1)+1), []Key{{Text: "image"}})
	}
	return e
}

func TestFrames(t *testing.T) {
	m := Message{Seq: 1<<40 + 5, Payload: []byte("payload")}
	if got, err := ParseMessage(AppendMessage(nil, "kv", m)); err != nil || !reflect.DeepEqual(got, m) {
		t.Errorf("message: %v, %v", got, err)
	}
	for _, topic := range []bool{true, false} {
		got, end, err := ParseReplay(AppendReplay(nil, "kv", topic, m))
		if err != nil || end || !reflect.DeepEqual(got, m) {
			t.Errorf("reply with topic %v: %v, %v, %v", topic, got, end, err)
		}
		// As a REQ gets it.
		got, end, err = ParseReplay(AppendReplay(nil, "kv", topic, m)[1:])
		if err != nil || end || !reflect.DeepEqual(got, m) {
			t.Errorf("reply with topic %v to a REQ: %v, %v, %v", topic, got, end, err)
		}
		if _, end, err := ParseReplay(AppendReplayEnd(nil, topic)); err != nil || !end {
			t.Errorf("end with topic %v: %v, %v", topic, end, err)
		}
	}
	who, from, err := ParseReplayRequest(append([][]byte{[]byte("id")}, ReplayRequest(77)...))
	if err != nil || string(who) != "id" || from != 77 {
		t.Errorf("request: %q, %d, %v", who, from, err)
	}

	f := func(frames ...string) {
		t.Helper()
		var b [][]byte
		for _, s := range frames {
			b = append(b, []byte(s))
		}
		if _, _, err := ParseReplay(b); err == nil {
			t.Errorf("%q is a reply to a replay", frames)
		}
		if len(b) != 3 || len(b[1]) != 8 {
			if _, err := ParseMessage(b); err == nil {
				t.Errorf("%q is a message", frames)
			}
		}
		if _, _, err := ParseReplayRequest(b); err == nil {
			t.Errorf("%q is a request for a replay", frames)
		}
	}
	f()
	f("")
	f("", "")
	f("", "12345678")
	f("", "1234567", "")
	f("topic", "123456789", "payload")
	f("", "", "", "12345678", "")
}

func TestSnapshotFrames(t *testing.T) {
	if !IsSnapshotRequest(SnapshotRequest()) || IsSnapshotRequest(nil) || IsSnapshotRequest([][]byte{[]byte("other")}) {
		t.Error("the request for a snapshot is not known for one")
	}
	for _, s := range []Snapshot{
		{Seq: 12, Publisher: [16]byte{1, 2}, Chunks: [][]byte{[]byte("a"), []byte("b")}},
		{Seq: -1, Publisher: [16]byte{3}, Chunks: [][]byte{}},
	} {
		got, err := ParseSnapshot(AppendSnapshot(nil, &s))
		if err != nil || !reflect.DeepEqual(got, s) {
			t.Errorf("got %v, %v, want %v", got, err, s)
		}
		got, err = ParseSnapshot(AppendSnapshot([][]byte{{}}, &s))
		if err != nil || !reflect.DeepEqual(got, s) {
			t.Errorf("behind an empty frame: got %v, %v, want %v", got, err, s)
		}
	}
	seq := func(n int64) []byte { return binary.BigEndian.AppendUint64(nil, uint64(n)) }
	for _, frames := range [][][]byte{nil, {{}}, {seq(3)}, {seq(3), []byte("id")}, {seq(-3), make([]byte, 16)}, {[]byte("5")}} {
		if got, err := ParseSnapshot(frames); err == nil {
			t.Errorf("%q is the snapshot %v", frames, got)
		}
	}
	if _, err := ParseSnapshot([][]byte{seq(-2)}); err != ErrNoSnapshot {
		t.Errorf("unavailable: %v", err)
	}
}

func FuzzDecoder(f *testing.F) {
	for _, g := range readGolden(f) {
		f.Add(g.payload)
	}
	for _, payload := range hostile() {
		if len(payload) < 1<<16 {
			f.Add(payload)
		}
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		var d Decoder
		var b Batch
		if d.Batch(&b, payload) != nil {
			return
		}
		// What is held is of the size of what was carried.
		held := 0
		for _, e := range b.Events {
			held += len(e.Hashes) + len(e.Tokens) + len(e.Extra) + 1
			for _, keys := range e.Extra {
				held += len(keys)
			}
		}
		if held > 2*len(payload) {
			t.Fatalf("%d bytes hold %d", len(payload), held)
		}
		// What it says in the form that says most is read as it is.
		again := AppendBatch(nil, VLLM, 0, &b)
		var b2 Batch
		var d2 Decoder
		if err := d2.Batch(&b2, again); err != nil {
			t.Fatalf("written again: %v", err)
		}
		if len(b.Events) != len(b2.Events) {
			t.Fatalf("%d events, then %d", len(b.Events), len(b2.Events))
		}
		for i := range b.Events {
			x, y := &b.Events[i], &b2.Events[i]
			if x.Kind != y.Kind || !slices.Equal(x.Hashes, y.Hashes) || !slices.Equal(x.Tokens, y.Tokens) || x.HasParent != y.HasParent || x.Parent != y.Parent {
				t.Fatalf("event %d: %+v, then %+v", i, x, y)
			}
		}
	})
}

// stores is a batch as a busy engine has it: a store of 32 blocks of 16 tokens
// and the removals of as many.
func stores() *Batch {
	b := &Batch{Time: 1.7e9, Rank: 0}
	e := Event{Kind: Stored, AdapterID: -1, Group: 0, Medium: "gpu", BlockSize: 16, HasParent: true, Parent: 1 << 63}
	r := rand.New(rand.NewPCG(7, 8))
	for range 32 {
		e.Hashes = append(e.Hashes, r.Uint64())
		b.Events = append(b.Events, Event{Kind: Removed, Hashes: []uint64{r.Uint64()}, Group: 0, AdapterID: -1, Medium: "gpu"})
	}
	for range 32 * 16 {
		e.Tokens = append(e.Tokens, r.Uint32N(150000))
	}
	b.Events = append(b.Events, e)
	return b
}

func TestDecodeAllocatesNothing(t *testing.T) {
	withoutRace(t)
	var d Decoder
	var b Batch
	payloads := [][]byte{AppendBatch(nil, VLLM, 0, stores()), AppendBatch(nil, SGLangArrays, 0, stores())}
	for _, g := range readGolden(t) {
		payloads = append(payloads, g.payload)
	}
	if n := testing.AllocsPerRun(100, func() {
		for _, payload := range payloads {
			if err := d.Batch(&b, payload); err != nil {
				t.Fatal(err)
			}
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// BenchmarkDecode decodes batches of 32 stored blocks and as many removals; the
// time a block event is what counts.
func BenchmarkDecode(b *testing.B) {
	for name, form := range map[string]Form{"vllm": VLLM, "sglang": SGLang} {
		payload := AppendBatch(nil, form, 0, stores())
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			var d Decoder
			var out Batch
			for b.Loop() {
				if err := d.Batch(&out, payload); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/64, "ns/block")
		})
	}
}
