package virtual

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/inferrail/inferrail/simulator/workload"
)

// The packed form of a trace is a gzip of varints: for each request the milliseconds
// since the one before, input, output, how many runs of successive ids its blocks are, and
// each run as its distance down from the lowest id not seen yet, and its length.
func pack(w *workload.Workload) []byte {
	var p []byte
	at, fresh := time.Duration(0), int64(0)
	for i := range w.Requests {
		q := &w.Requests[i]
		p = binary.AppendUvarint(p, uint64((q.At-at)/time.Millisecond))
		p = binary.AppendUvarint(p, uint64(q.Input()))
		p = binary.AppendUvarint(p, uint64(q.Output))
		at = q.At.Truncate(time.Millisecond)
		var runs [][2]int64
		if w.Block > 0 {
			for k := range q.Parts {
				id := int64(q.Parts[k].ID) - 1
				if k > 0 && q.Parts[k].ID == q.Parts[k-1].ID+1 {
					runs[len(runs)-1][1]++
				} else {
					runs = append(runs, [2]int64{id, 1})
				}
			}
		}
		p = binary.AppendUvarint(p, uint64(len(runs)))
		for _, run := range runs {
			p = binary.AppendVarint(p, fresh-run[0])
			p = binary.AppendVarint(p, run[1])
			fresh = max(fresh, run[0]+run[1])
		}
	}
	var out bytes.Buffer
	z, _ := gzip.NewWriterLevel(&out, gzip.BestCompression)
	z.Write(p)
	z.Close()
	return out.Bytes()
}

var packTraces = flag.Bool("pack", false, "write the traces of INFERRAIL_TRACES into testdata/traces")

// TestPackedTraces compares the traces in testdata with those they were made from, where
// these are: INFERRAIL_TRACES names their folder. With -pack it makes them.
func TestPackedTraces(t *testing.T) {
	folder := os.Getenv("INFERRAIL_TRACES")
	if folder == "" {
		t.Skip("INFERRAIL_TRACES names no folder with the original traces")
	}
	f := func(name, original string, most int) {
		t.Helper()
		want, err := workload.ReadOptions{}.Read(filepath.Join(folder, original))
		if err != nil {
			t.Fatal(err)
		}
		if most > 0 {
			want = want.Limit(most)
		}
		if *packTraces {
			if err := os.WriteFile(packed(name), pack(want), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		got := readPacked(t, name)
		if len(got.Requests) != len(want.Requests) {
			t.Fatalf("%s: %d requests, want %d", name, len(got.Requests), len(want.Requests))
		}
		for i := range want.Requests {
			g, w := &got.Requests[i], &want.Requests[i]
			if d := w.At - g.At; d < 0 || d > 2*time.Millisecond || g.Input() != w.Input() || g.Output != w.Output || want.Block > 0 && !slices.Equal(g.Parts, w.Parts) {
				t.Fatalf("%s: request %d is %+v, want %+v", name, i, g, w)
			}
		}
	}
	f("conversation", "mooncake_conversation_trace.jsonl", 0)
	f("synthetic", "mooncake_synthetic_trace.jsonl", 0)
	f("azure", "azure2023_conv.csv", 8000)
}

// packed is where the trace of a name is.
func packed(name string) string { return filepath.Join("testdata", "traces", name+".gz") }

// readPacked is the trace of a name. Where its source tells nothing of what is shared,
// nothing is.
func readPacked(t testing.TB, name string) *workload.Workload {
	t.Helper()
	f, err := os.Open(packed(name))
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
