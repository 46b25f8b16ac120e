package index

import (
	"fmt"
	"testing"
)

// BenchmarkTree holds and releases blocks, and walks chains that are there
// already; the time a block is what counts.
func BenchmarkTree(b *testing.B) {
	const length, chains = 512, 64
	var all [][]Hash
	for i := range chains {
		all = append(all, AppendTokens(nil, Root("m", fmt.Sprint(i), nil), numbers(16*length), 16))
	}
	run := func(name string, f func(t *tree, refs []ref, chain []Hash)) {
		b.Run(name, func(b *testing.B) {
			t := newTree(b, 0)
			refs := make([]ref, length)
			for _, chain := range all {
				walk(t, refs, chain)
				for _, r := range refs {
					t.hold(r, reason(GPU))
				}
			}
			b.ReportAllocs()
			n := 0
			for b.Loop() {
				f(t, refs, all[n%chains])
				n++
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/length, "ns/block")
		})
	}
	run("walk", walk)
	run("hold", func(t *tree, refs []ref, chain []Hash) {
		walk(t, refs, chain)
		for _, r := range refs {
			t.hold(r, guessed)
		}
		for _, r := range refs {
			t.release(r, guessed)
		}
	})
	run("come-and-go", func(t *tree, refs []ref, chain []Hash) {
		walk(t, refs, chain)
		for i := len(refs) - 1; i >= 0; i-- {
			t.release(refs[i], reason(GPU))
		}
		last := ref(0)
		for _, h := range chain {
			last = t.add(last, h)
			t.hold(last, reason(GPU))
		}
	})
}

func walk(t *tree, refs []ref, chain []Hash) {
	last := ref(0)
	for i, h := range chain {
		last = t.add(last, h)
		refs[i] = last
	}
}
