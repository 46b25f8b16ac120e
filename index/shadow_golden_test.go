package index

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

// streamOf makes the tokens of testdata/pool.py.
func streamOf(x uint64, n int) []uint32 {
	ids := make([]uint32, n)
	for i := range ids {
		x = x*6364136223846793005 + 1442695040888963407
		ids[i] = uint32(x >> 40 % 100000)
	}
	return ids
}

// TestShadowAgainstVLLM: vLLM's own cache has found, in each of many hundred
// requests, what is predicted, and has as many blocks left afterwards.
func TestShadowAgainstVLLM(t *testing.T) {
	golden, err := os.ReadFile("testdata/pool.txt")
	if err != nil {
		t.Fatal(err)
	}
	var (
		x       *Index
		block   int
		said    map[int][]uint32
		claims  map[int]*Claim
		root    = Root("m", "", nil)
		now     = time.Unix(1000, 0)
		begun   int
		cached  int
		evicted int
	)
	ids := func(parts []string) (ids []uint32) {
		for _, part := range parts {
			var n, from int
			if part[0] == '+' {
				fmt.Sscanf(part, "+%d.%d", &n, &from)
				ids = append(ids, streamOf(uint64(from), n)...)
			} else {
				fmt.Sscanf(part, "@%d/%d", &from, &n)
				ids = append(ids, said[from][:n]...)
			}
		}
		return ids
	}
	for line := range strings.Lines(string(golden)) {
		words := strings.Fields(line)
		var a, b int
		fmt.Sscan(words[1], &a)
		fmt.Sscan(words[2], &b)
		switch words[0] {
		case "pool":
			block = a
			x = New(Config{})
			x.Join(0, SlotConfig{Model: "m", BlockSize: block, Capacity: b})
			said, claims = map[int][]uint32{}, map[int]*Claim{}
		case "begin":
			said[a] = ids(words[3:])
			p := Prompt{Root: root, IDs: said[a], Block: block, Chain: AppendTokens(nil, root, said[a], block)}
			var l Lookup
			x.Look(&l, &p)
			h := l.Held(0)
			if got := p.Cached(h); got != b {
				t.Fatalf("%.60s: predicted %d", line, got)
			}
			claims[a] = new(Claim)
			x.Claim(claims[a], 0, &p, now)
			begun++
			cached += b
			if strings.HasPrefix(words[3], "@") && b+2*block < len(said[a]) {
				evicted++
			}
		case "end":
			generated := ids(words[2:3])
			x.Prefilled(claims[a], now)
			x.Release(claims[a], len(generated), now)
			delete(claims, a)
			said[a] = slices.Concat(said[a], generated)
			var queued, free int
			fmt.Sscan(words[3], &queued)
			fmt.Sscan(words[4], &free)
			if sh := &x.at(0).shadow; sh.queue.n != queued || sh.free != int64(free*block) {
				t.Fatalf("%.60s: %d blocks are queued, and %d free", line, sh.queue.n, sh.free/int64(block))
			}
		}
	}
	if begun < 1000 || cached < begun || evicted < 20 {
		t.Errorf("%d requests with %d tokens cached, and %d evicted, show little", begun, cached, evicted)
	}
}
