package workload

import "testing"

// BenchmarkAppendPrompt is what a token of a prompt costs in virtual time.
func BenchmarkAppendPrompt(b *testing.B) {
	for _, name := range []string{"w1", "w3"} {
		w, err := Generate(Options{Name: name, Requests: 200})
		if err != nil {
			b.Fatal(err)
		}
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			var ids []uint32
			tokens := 0
			for i := 0; b.Loop(); i++ {
				ids = w.Requests[i%len(w.Requests)].AppendPrompt(ids[:0])
				tokens += len(ids)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(tokens), "ns/token")
		})
	}
}

func BenchmarkGenerate(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Generate(Options{Name: "w3", Requests: 10_000}); err != nil {
			b.Fatal(err)
		}
	}
}
