package virtual

import (
	"bufio"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/inferrail/inferrail/simulator/workload"
)

// readPacked is a trace of Mooncake as package policy keeps it for its own replay, which
// says there how it is packed.
func readPacked(t testing.TB, name string) *workload.Workload {
	t.Helper()
	f, err := os.Open(filepath.Join("..", "..", "policy", "testdata", "traces", name+".gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	in := bufio.NewReader(z)
	number := func() int {
		n, err := binary.ReadUvarint(in)
		if err != nil {
			t.Fatalf("%s: %v", f.Name(), err)
		}
		return int(n)
	}
	signed := func() int64 {
		n, err := binary.ReadVarint(in)
		if err != nil {
			t.Fatalf("%s: %v", f.Name(), err)
		}
		return n
	}
	const block = 512
	w := &workload.Workload{Name: name, Block: block}
	fresh, at := int64(0), time.Duration(0)
	for {
		if _, err := in.Peek(1); errors.Is(err, io.EOF) {
			return w
		}
		at += time.Duration(number()) * time.Millisecond
		input := number()
		q := workload.Request{At: at, Output: max(number(), 1)}
		for range number() {
			id := fresh - signed()
			for range signed() {
				q.Parts = append(q.Parts, workload.Part{ID: uint64(id) + 1, Tokens: min(block, input-len(q.Parts)*block)})
				id++
			}
			fresh = max(fresh, id)
		}
		if len(q.Parts) == 0 { // nothing is known to be shared
			q.Parts = []workload.Part{{ID: 1<<40 + uint64(len(w.Requests)), Tokens: max(input, 1)}}
		}
		w.Requests = append(w.Requests, q)
	}
}
