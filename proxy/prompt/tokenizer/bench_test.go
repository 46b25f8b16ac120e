package tokenizer

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// corpus is English and code that every machine with Go has, in windows of so
// many bytes.
func corpus(t testing.TB, window, windows int) (texts []string) {
	t.Helper()
	root, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		t.Skip("go env GOROOT: ", err)
	}
	var b strings.Builder
	for _, name := range []string{"net/http/server.go", "go/types/stmt.go", "encoding/json/decode.go", "reflect/type.go", "runtime/malloc.go", "cmd/go/alldocs.go", "runtime/mgc.go", "net/http/transport.go", "html/entity.go", "time/format.go", "cmd/compile/README.md", "database/sql/sql.go"} {
		data, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(root)), "src", name))
		if err != nil {
			t.Skip("the Go source is not there: ", err)
		}
		b.Write(data)
	}
	all := b.String()
	for range windows {
		if len(all) < window {
			break
		}
		texts = append(texts, strings.ToValidUTF8(all[:window], ""))
		all = all[window:]
	}
	return texts
}

// BenchmarkEncode encodes text that it has not seen before, but whose words it
// may have, as a process that has run for a while does: ns/token, and the time
// that 8,000 tokens take.
func BenchmarkEncode(b *testing.B) {
	for _, model := range npmModels {
		b.Run(model, func(b *testing.B) {
			data := tokenizerJSON(b, model)
			tok, err := loadJSON(data, Options{})
			if err != nil {
				b.Fatal(err)
			}
			texts := corpus(b, 30_000, 24)
			half := len(texts) / 2
			ids := make([]uint32, 0, 40_000)
			for _, text := range texts[:half] {
				ids = tok.Append(ids[:0], text, false)
			}
			tokens := 0
			b.ResetTimer()
			for i := 0; i < b.N; i++ {
				if i%half == 0 && i > 0 {
					b.StopTimer()
					tok.pipeline.(*native).forget()
					for _, text := range texts[:half] {
						ids = tok.Append(ids[:0], text, false)
					}
					b.StartTimer()
				}
				ids = tok.Append(ids[:0], texts[half+i%half], false)
				tokens += len(ids)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(tokens), "ns/token")
			b.ReportMetric(8000*b.Elapsed().Seconds()*1e3/float64(tokens), "ms/8k")
		})
	}
}

// forget empties the cache of words.
func (n *native) forget() {
	if n.bytes != nil {
		n.bytes.words = newWords()
	} else {
		n.sentence.words = newWords()
	}
}

func BenchmarkLoad(b *testing.B) {
	for _, model := range npmModels {
		b.Run(model, func(b *testing.B) {
			data := tokenizerJSON(b, model)
			b.ReportAllocs()
			for range b.N {
				if _, err := loadJSON(data, Options{}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
