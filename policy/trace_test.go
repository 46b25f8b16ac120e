package policy

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"encoding/csv"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"testing"
	"time"
)

// traceBlock is how many tokens each of a trace's block ids stands for.
const traceBlock = 512

// arrival is one request of a trace.
type arrival struct {
	at            time.Duration
	input, output int // tokens
	// blocks name the prompt's prefixes: equal ids are equal prefixes. The last
	// one may be of a block that is not full. Without them nothing is shared.
	blocks []int32
}

// full are the blocks that an engine's cache may have: the last token of a prompt
// is computed in any case.
func (a *arrival) full() []int32 {
	return a.blocks[:min(max(a.input-1, 0)/traceBlock, len(a.blocks))]
}

// trace is the requests of one workload in the order of their arrival. ids is how
// many block ids there are, from 0 on.
type trace struct {
	name     string
	requests []arrival
	ids      int
}

// faster is the trace at x times its speed.
func (t *trace) faster(x float64) *trace {
	out := &trace{name: fmt.Sprintf("%s x%g", t.name, x), ids: t.ids, requests: make([]arrival, len(t.requests))}
	for i, r := range t.requests {
		r.at = time.Duration(float64(r.at) / x)
		out.requests[i] = r
	}
	return out
}

// first is the beginning of the trace.
func (t *trace) first(n int) *trace {
	return &trace{t.name, t.requests[:min(n, len(t.requests))], t.ids}
}

// The packed form of a trace is a gzip of varints: for each request the
// milliseconds since the one before, input, output, how many runs of successive
// ids its blocks are, and each run as its distance down from the lowest id not
// seen yet, and its length.
func (t *trace) pack() []byte {
	var p []byte
	at, fresh := time.Duration(0), int64(0)
	for _, r := range t.requests {
		p = binary.AppendUvarint(p, uint64((r.at-at)/time.Millisecond))
		p = binary.AppendUvarint(p, uint64(r.input))
		p = binary.AppendUvarint(p, uint64(r.output))
		at = r.at
		var runs [][2]int64
		for i, b := range r.blocks {
			if i > 0 && b == r.blocks[i-1]+1 {
				runs[len(runs)-1][1]++
			} else {
				runs = append(runs, [2]int64{int64(b), 1})
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
	w, _ := gzip.NewWriterLevel(&out, gzip.BestCompression)
	w.Write(p)
	w.Close()
	return out.Bytes()
}

// readPacked is the trace that testdata/traces has under the name.
func readPacked(t testing.TB, name string) *trace {
	t.Helper()
	f, err := os.Open(filepath.Join("testdata", "traces", name+".gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	in := bufio.NewReader(z)
	number := func() int64 {
		n, err := binary.ReadUvarint(in)
		if err != nil {
			t.Fatalf("%s: %v", f.Name(), err)
		}
		return int64(n)
	}
	signed := func() int64 {
		n, err := binary.ReadVarint(in)
		if err != nil {
			t.Fatalf("%s: %v", f.Name(), err)
		}
		return n
	}
	out := &trace{name: name}
	at := time.Duration(0)
	for {
		if _, err := in.Peek(1); errors.Is(err, io.EOF) {
			return out
		}
		at += time.Duration(number()) * time.Millisecond
		r := arrival{at: at, input: int(number()), output: int(number())}
		for range number() {
			id := int64(out.ids) - signed()
			for range signed() {
				r.blocks = append(r.blocks, int32(id))
				id++
			}
			out.ids = max(out.ids, int(id))
		}
		out.requests = append(out.requests, r)
	}
}

var packTraces = flag.Bool("pack", false, "write the traces of INFERRAIL_TRACES into testdata/traces")

// TestPackedTraces compares the traces in testdata with those they were made
// from, where these are: INFERRAIL_TRACES names their folder. With -pack it makes
// them.
func TestPackedTraces(t *testing.T) {
	folder := os.Getenv("INFERRAIL_TRACES")
	if folder == "" {
		t.Skip("INFERRAIL_TRACES names no folder with the original traces")
	}
	f := func(name string, want *trace) {
		t.Helper()
		if *packTraces {
			if err := os.WriteFile(filepath.Join("testdata", "traces", name+".gz"), want.pack(), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		got := readPacked(t, name)
		if len(got.requests) != len(want.requests) || got.ids != want.ids {
			t.Fatalf("%s: %d requests of %d blocks, want %d of %d", name, len(got.requests), got.ids, len(want.requests), want.ids)
		}
		for i := range want.requests {
			if !reflect.DeepEqual(got.requests[i], want.requests[i]) {
				t.Fatalf("%s: request %d is %+v, want %+v", name, i, got.requests[i], want.requests[i])
			}
		}
	}
	f("conversation", readMooncake(t, filepath.Join(folder, "mooncake_conversation_trace.jsonl")))
	f("synthetic", readMooncake(t, filepath.Join(folder, "mooncake_synthetic_trace.jsonl")))
	f("azure", readAzure(t, filepath.Join(folder, "azure2023_conv.csv")).first(8000))
	f("azure_code", readAzure(t, filepath.Join(folder, "azure2023_code.csv")))
}

func readMooncake(t *testing.T, file string) *trace {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	out := &trace{}
	for dec := json.NewDecoder(f); ; {
		var line struct {
			Timestamp    int64   `json:"timestamp"`
			InputLength  int     `json:"input_length"`
			OutputLength int     `json:"output_length"`
			HashIDs      []int32 `json:"hash_ids"`
		}
		if err := dec.Decode(&line); errors.Is(err, io.EOF) {
			return out
		} else if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		for _, id := range line.HashIDs {
			out.ids = max(out.ids, int(id)+1)
		}
		out.requests = append(out.requests, arrival{time.Duration(line.Timestamp) * time.Millisecond, line.InputLength, line.OutputLength, line.HashIDs})
	}
}

func readAzure(t *testing.T, file string) *trace {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	rows, err := csv.NewReader(f).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	out := &trace{}
	var begin time.Time
	for i, row := range rows[1:] {
		at, err := time.Parse("2006-01-02 15:04:05.0000000", row[0])
		if err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			begin = at
		}
		input, _ := strconv.Atoi(row[1])
		output, _ := strconv.Atoi(row[2])
		out.requests = append(out.requests, arrival{at: at.Sub(begin).Truncate(time.Millisecond), input: input, output: output})
	}
	return out
}

// writer makes a trace by hand: each prompt is prefixes, that others may have too,
// and a rest of its own.
type writer struct {
	trace
	rand *rand.Rand
	at   time.Duration
}

func newWriter(name string) *writer {
	return &writer{trace: trace{name: name}, rand: rand.New(rand.NewPCG(1, 2))}
}

// wait is until the next arrival, at a mean rate of so many a second.
func (w *writer) wait(rate float64) { w.at += time.Duration(w.rand.ExpFloat64() / rate * 1e9) }

// prefix makes one of so many tokens, rounded to blocks.
func (w *writer) prefix(tokens int) []int32 {
	var ids []int32
	for range tokens / traceBlock {
		ids = append(ids, int32(w.ids))
		w.ids++
	}
	return ids
}

// ask adds a request now that begins with prefix and has so many tokens more. It
// returns its blocks.
func (w *writer) ask(prefix []int32, own, output int) []int32 {
	input := len(prefix)*traceBlock + own
	blocks := append(append([]int32(nil), prefix...), w.prefix(own+traceBlock-1)...)
	w.requests = append(w.requests, arrival{w.at, input, output, blocks})
	return blocks
}

// lognormal draws a length with the median.
func (w *writer) lognormal(median, sigma float64) int {
	return max(1, min(int(median*math.Exp(sigma*w.rand.NormFloat64())), 100_000))
}

// unshared has prompts of which none begins like another.
func unshared() *trace {
	w := newWriter("unshared")
	for range 6000 {
		w.wait(24)
		w.ask(nil, w.lognormal(2000, 1), w.lognormal(150, 0.8))
	}
	return &w.trace
}

// systemPrompt has prompts that all begin with the same block, and share nothing
// beyond it.
func systemPrompt() *trace {
	w := newWriter("shared first block")
	system := w.prefix(traceBlock)
	for range 6000 {
		w.wait(24)
		w.ask(system, w.lognormal(2000, 1), w.lognormal(150, 0.8))
	}
	return &w.trace
}

// hotPrefix has one document that half of all requests are about, more than one
// replica can serve.
func hotPrefix() *trace {
	w := newWriter("hot prefix")
	hot := w.prefix(16 << 10)
	for range 6000 {
		w.wait(36)
		if w.rand.IntN(2) == 0 {
			w.ask(hot, w.lognormal(1200, 0.5), w.lognormal(100, 0.8))
		} else {
			w.ask(nil, w.lognormal(1500, 1), w.lognormal(150, 0.8))
		}
	}
	return &w.trace
}

// bursts has documents that nobody has asked about before and many ask about at
// once, beside other traffic.
func bursts() *trace {
	w := newWriter("cold bursts")
	for range 150 {
		document := w.prefix(w.lognormal(12_000, 0.7))
		for range 1 + w.rand.IntN(32) {
			w.at += time.Duration(w.rand.IntN(int(20 * time.Millisecond)))
			w.ask(document, w.lognormal(300, 0.8), w.lognormal(100, 0.8))
		}
		for range 12 {
			w.wait(8)
			w.ask(nil, w.lognormal(1500, 1), w.lognormal(150, 0.8))
		}
	}
	return &w.trace
}

// chats has conversations, each turn of which has all before it. They share a
// system prompt.
func chats() *trace {
	w := newWriter("chats")
	system := w.prefix(2 * traceBlock)
	type chat struct {
		blocks []int32
		turns  int
	}
	var open []*chat
	for len(w.requests) < 6000 {
		w.wait(30)
		if len(open) < 400 {
			open = append(open, &chat{system, 1 + w.rand.IntN(20)})
		}
		i := w.rand.IntN(len(open))
		c := open[i]
		c.blocks = w.ask(c.blocks, w.lognormal(700, 0.8), w.lognormal(200, 0.8))
		if c.turns--; c.turns == 0 {
			open[i] = open[len(open)-1]
			open = open[:len(open)-1]
		}
	}
	return &w.trace
}
