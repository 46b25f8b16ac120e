package index

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/zeebo/xxh3"
)

// numbers are those that testdata/hash.py hashes.
func numbers(n int) []uint32 {
	ids := make([]uint32, n)
	x := uint64(1)
	for i := range ids {
		x = x*6364136223846793005 + 1442695040888963407
		ids[i] = uint32(x >> 32)
	}
	return ids
}

// TestHashGolden: another implementation of XXH3, in another language, has
// made the same chains.
func TestHashGolden(t *testing.T) {
	golden, err := os.ReadFile("testdata/hash.txt")
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for line := range strings.Lines(string(golden)) {
		words := strings.Fields(line)
		var got []Hash
		args := 1
		size, _ := strconv.Atoi(words[1])
		switch words[0] {
		case "root":
			args = 3
			var parts [3][]byte
			for i := range parts {
				parts[i], _ = hex.DecodeString(strings.Trim(words[1+i], "-"))
			}
			got = append(got, Root(string(parts[0]), string(parts[1]), parts[2]))
		case "tokens":
			got = AppendTokens(nil, Root("model", "", []byte("salt")), numbers(3*size+1), size)
		case "text":
			var text []byte
			for _, n := range numbers(size) {
				text = append(text, byte(n))
			}
			got = AppendText(nil, Root("model", "", []byte("salt")), text)
		}
		var shown []string
		for _, h := range got {
			shown = append(shown, fmt.Sprintf("%016x%016x", h.Hi, h.Lo))
		}
		if want := words[1+args:]; !slices.Equal(shown, want) {
			t.Errorf("%.40s: got %v, want %v", line, shown, want)
		}
		seen++
	}
	if seen < 20 {
		t.Errorf("only %d golden chains", seen)
	}
}

// plainChain is the rule without any of the ways that make it fast.
func plainChain(parent Hash, ids []uint32, block int) []Hash {
	chain := []Hash{}
	for block > 0 && len(ids) >= block {
		var b bytes.Buffer
		_ = binary.Write(&b, binary.LittleEndian, ids[:block])
		h := xxh3.HashString128Seed(b.String(), parent.Lo)
		parent = Hash{h.Hi + parent.Hi*0x9e3779b97f4a7c15, h.Lo}
		chain, ids = append(chain, parent), ids[block:]
	}
	return chain
}

func randomIDs(r *rand.Rand, n int) []uint32 {
	ids := make([]uint32, n)
	for i := range ids {
		ids[i] = r.Uint32N(200000)
	}
	return ids
}

func TestHashAgainstModel(t *testing.T) {
	native := littleEndian
	defer func() { littleEndian = native }()
	r := rand.New(rand.NewPCG(1, 2))
	for step := range 2000 {
		// The way of the other kind of machine gives the same hashes.
		littleEndian = native && step%2 == 0
		ids := randomIDs(r, r.IntN(700))
		block := r.IntN(130) - 1
		root := Hash{r.Uint64(), r.Uint64()}
		before := []Hash{{1, 2}, {3, 4}}[:r.IntN(3)]
		got := AppendTokens(slices.Clone(before), root, ids, block)
		if want := slices.Concat(before, plainChain(root, ids, block)); !slices.Equal(got, want) {
			t.Fatalf("%d ids in blocks of %d: got %v, want %v", len(ids), block, got, want)
		}
		parent := root
		for i, h := range got[len(before):] {
			if parent = Next(parent, ids[i*block:(i+1)*block]); parent != h {
				t.Fatalf("block %d: Next has %v, AppendTokens %v", i, parent, h)
			}
		}
	}
}

// TestHashNamesThePrefix: prompts that begin alike have the same hashes as far
// as they do, and no hash behind that is equal.
func TestHashNamesThePrefix(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 2000 {
		block := 1 + r.IntN(40)
		a := randomIDs(r, block*(1+r.IntN(20))+r.IntN(block))
		b := slices.Clone(a[:r.IntN(len(a)+1)])
		b = append(b, randomIDs(r, r.IntN(100))...)
		if len(b) > 0 && r.IntN(2) == 0 {
			b[r.IntN(len(b))] ^= 1 << r.IntN(32)
		}
		common := 0
		for common < min(len(a), len(b)) && a[common] == b[common] {
			common++
		}
		root := Root("m", "", nil)
		ha, hb := AppendTokens(nil, root, a, block), AppendTokens(nil, root, b, block)
		if len(ha) != len(a)/block || len(hb) != len(b)/block {
			t.Fatalf("%d and %d ids in blocks of %d have %d and %d hashes", len(a), len(b), block, len(ha), len(hb))
		}
		for i := range ha {
			for j := range hb {
				if equal := i == j && i < common/block; equal != (ha[i] == hb[j]) {
					t.Fatalf("%d tokens in common, blocks of %d: hash %d of one and %d of the other: equal %v", common, block, i, j, ha[i] == hb[j])
				}
			}
		}
	}
}

// TestHashOfWholeParent: each of the parent's bits bears on the hash.
func TestHashOfWholeParent(t *testing.T) {
	parent := Root("m", "", nil)
	for _, block := range [][]uint32{{7}, numbers(16), numbers(128)} {
		seen := map[Hash]int{Next(parent, block): -1}
		for bit := range 128 {
			p := parent
			if bit < 64 {
				p.Lo ^= 1 << bit
			} else {
				p.Hi ^= 1 << (bit - 64)
			}
			h := Next(p, block)
			if other, ok := seen[h]; ok {
				t.Errorf("bits %d and %d give the same hash", bit, other)
			}
			seen[h] = bit
			// And on that of the block behind, too.
			h = Next(h, block)
			if other, ok := seen[h]; ok {
				t.Errorf("bits %d and %d give the same hash one later", bit, other)
			}
			seen[h] = bit
		}
	}
}

func TestRootsAreApart(t *testing.T) {
	// The same bytes in other parts, and parts that look like lengths.
	eight := string(binary.LittleEndian.AppendUint64(nil, 1))
	parts := []string{"", "a", "aa", "b", "\x00", eight, eight + "a", "a" + eight, strings.Repeat("a", 300)}
	seen := map[Hash]string{{}: "zero"}
	for _, model := range parts {
		for _, adapter := range parts {
			for _, salt := range parts {
				name := fmt.Sprintf("%.20q, %.20q, %.20q", model, adapter, salt)
				h := Root(model, adapter, []byte(salt))
				if other, ok := seen[h]; ok {
					t.Errorf("%s and %s share a root", name, other)
				}
				seen[h] = name
				// What is below a root is nowhere else either.
				for _, below := range AppendTokens(nil, h, []uint32{1, 2, 3, 4}, 4) {
					if other, ok := seen[below]; ok {
						t.Errorf("%s and %s share a block", name, other)
					}
					seen[below] = name
				}
			}
		}
	}
	if Root("m", "", nil) != Root("m", "", []byte{}) {
		t.Error("no salt and an empty one are different")
	}
}

// TestTextIsNoTokens: the same bytes, as text and as the token ids that they
// are in memory.
func TestTextIsNoTokens(t *testing.T) {
	ids := numbers(1024)
	text := bytesOf(ids)
	root := Root("m", "", nil)
	tokens := AppendTokens(nil, root, ids, TextBlock/4)
	for i, h := range AppendText(nil, root, text) {
		if slices.Contains(tokens, h) {
			t.Errorf("the hash of text block %d is one of tokens", i)
		}
	}
	if n := len(AppendText(nil, root, text[:TextBlock*3-1])); n != 2 {
		t.Errorf("three blocks less one byte have %d hashes", n)
	}
}

func TestHashAllocatesNothing(t *testing.T) {
	withoutRace(t)
	ids, salt := numbers(8192), []byte("salt")
	text := bytesOf(ids)
	dst := make([]Hash, 0, 8192)
	allocs := testing.AllocsPerRun(100, func() {
		root := Root("model", "adapter", salt)
		dst = AppendTokens(dst[:0], root, ids, 16)
		dst = AppendTokens(dst[:0], root, ids, 1)
		dst = AppendText(dst[:0], root, text)
		dst[0] = Next(root, ids[:16])
	})
	if allocs != 0 {
		t.Errorf("%v allocations", allocs)
	}
}

// FuzzHash: whatever the ids and the block, the chain is that of the model.
func FuzzHash(f *testing.F) {
	f.Add([]byte("abcdefgh"), 1, uint64(0), uint64(0))
	f.Add(bytes.Repeat([]byte("0123456789abcdef"), 64), 16, uint64(1), uint64(2))
	f.Add([]byte{}, 0, uint64(1), uint64(2))
	f.Add([]byte{1, 2, 3}, -5, uint64(1), uint64(2))
	f.Fuzz(func(t *testing.T, data []byte, block int, hi, lo uint64) {
		ids := make([]uint32, len(data)/4)
		for i := range ids {
			ids[i] = binary.LittleEndian.Uint32(data[4*i:])
		}
		root := Hash{hi, lo}
		got := AppendTokens([]Hash{}, root, ids, block)
		if want := plainChain(root, ids, block); !slices.Equal(got, want) {
			t.Fatalf("got %v, want %v", got, want)
		}
		text := AppendText(nil, root, data)
		if len(text) != len(data)/TextBlock {
			t.Fatalf("%d bytes of text have %d hashes", len(data), len(text))
		}
		for _, h := range text {
			if slices.Contains(got, h) {
				t.Fatal("text has a hash of tokens")
			}
		}
	})
}

// BenchmarkHash hashes the prompt of 8,192 tokens, or 32 KiB of text; the time
// a block is what counts.
func BenchmarkHash(b *testing.B) {
	ids := numbers(8192)
	text := bytesOf(ids)
	root := Root("model", "", nil)
	dst := make([]Hash, 0, 8192)
	run := func(name string, f func()) {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				f()
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(dst)), "ns/block")
		})
	}
	for _, block := range []int{1, 16, 32, 64, 128} {
		run(fmt.Sprintf("tokens=%d", block), func() { dst = AppendTokens(dst[:0], root, ids, block) })
	}
	run("text", func() { dst = AppendText(dst[:0], root, text) })
}
