package index

import (
	"fmt"
	"testing"
	"time"
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

// BenchmarkClaim sends a prompt of 512 blocks, of which a slot holds all or
// none, and ends it.
func BenchmarkClaim(b *testing.B) {
	run := func(name string, state State, fresh bool) {
		b.Run(name, func(b *testing.B) {
			x := New(Config{})
			x.Join(0, SlotConfig{Model: "m", BlockSize: 16, Capacity: 64 * 512})
			x.SetState(0, state, "")
			var prompts []Prompt
			for i := range 128 {
				prompts = append(prompts, Prompt{Chain: conversation(i, 512), IDs: numbers(16*512 + 3), Block: 16})
			}
			if !fresh {
				prompts = prompts[:32]
			}
			now := time.Unix(1000, 0)
			b.ReportAllocs()
			n := 0
			for b.Loop() {
				var c Claim
				now = now.Add(time.Second)
				x.Claim(&c, 0, &prompts[n%len(prompts)], Held{}, now)
				x.Prefilled(&c, now)
				x.Release(&c, 0, now)
				n++
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/512, "ns/block")
		})
	}
	run("held", Approximate, false)
	run("evicting", Approximate, true)
	run("expected", Exact, true)
}

func walk(t *tree, refs []ref, chain []Hash) {
	last := ref(0)
	for i, h := range chain {
		last = t.add(last, h)
		refs[i] = last
	}
}
