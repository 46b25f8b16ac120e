package proxy

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/proxy/prompt"
	"github.com/inferrail/inferrail/proxy/prompt/tokenizer"
)

// BenchmarkShortAnswer is one client fetching small answers over one kept
// connection: what an exchange costs beside its relaying. The client and the
// engine allocate nothing, so allocations are the proxy's. Beside the time it
// tells the processor time of all three. Prompts are chats of 200 tokens that are
// not looked at, have no tokenizer, are followed by the simulator's, and, where
// INFERRAIL_BENCH_TOKENIZER names a model's directory, by that. Then they are
// looked up, too, and entered, with a cache of which they fill a part; so are
// some of 8,000 tokens.
//
//	go test -bench ShortAnswer -run xxx ./proxy
func BenchmarkShortAnswer(b *testing.B) {
	b.Run("not followed", func(b *testing.B) { benchmarkShortAnswer(b, "", 7, false, 1) })
	b.Run("no tokenizer", func(b *testing.B) { benchmarkShortAnswer(b, "none", 7, false, 1) })
	b.Run("simulated", func(b *testing.B) { benchmarkShortAnswer(b, "builtin:sim", 7, false, 1) })
	b.Run("long", func(b *testing.B) { benchmarkShortAnswer(b, "builtin:sim", 480, false, 1) })
	if source := os.Getenv("INFERRAIL_BENCH_TOKENIZER"); source != "" {
		b.Run("real", func(b *testing.B) { benchmarkShortAnswer(b, source, 7, false, 1) })
	}
	b.Run("no tokenizer, looked up", func(b *testing.B) { benchmarkShortAnswer(b, "none", 7, true, 1) })
	b.Run("simulated, looked up", func(b *testing.B) { benchmarkShortAnswer(b, "builtin:sim", 7, true, 1) })
	b.Run("3 replicas, cost model", func(b *testing.B) { benchmarkShortAnswer(b, "none", 7, true, 3) })
	b.Run("long, looked up", func(b *testing.B) { benchmarkShortAnswer(b, "builtin:sim", 480, true, 1) })
}

// BenchmarkTraces is what traces cost of such a short answer: without a collector, and
// with a part of the requests traced, which nobody makes spans of here.
//
//	go test -bench Traces -run xxx ./proxy
func BenchmarkTraces(b *testing.B) {
	b.Run("off", func(b *testing.B) { benchmarkShortAnswer(b, "none", 7, true, 3) })
	for _, ratio := range []float64{0, 0.01, 1} {
		b.Run(fmt.Sprint(ratio), func(b *testing.B) {
			benchmarkShortAnswer(b, "none", 7, true, 3, func(s *Server) {
				traces := make(chan *Trace, 64)
				s.SetTraces(traces, TracesWanted{Ratio: ratio})
				go func() {
					for range traces {
					}
				}()
				b.Cleanup(func() { close(traces) })
			})
		})
	}
}

func benchmarkShortAnswer(b *testing.B, source string, sentences int, lookedUp bool, replicas int, prepare ...func(*Server)) {
	el, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer el.Close()
	response := []byte(fixed(`{"usage":{"prompt_tokens":201,"completion_tokens":38,"total_tokens":239},"ok":true}`))
	go func() {
		for {
			c, err := el.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				buf := make([]byte, 64<<10)
				for n := 0; ; {
					k, err := c.Read(buf[n:])
					if err != nil {
						return
					}
					// A request ends with the body's brace.
					if n += k; bytes.HasSuffix(buf[:n], []byte(`"}]}`)) {
						n = 0
						c.Write(response)
					}
				}
			}()
		}
	}()
	s := New(Limits{}, nil, nil)
	for _, f := range prepare {
		f(s)
	}
	m := &Model{Name: "m", Policy: policy.LeastRequest{}}
	if replicas > 1 {
		m.Policy = policy.NewCostModel()
	}
	for i := range replicas {
		replica, err := NewReplica(i, fmt.Sprint("e", i), "http://"+el.Addr().String())
		if err != nil {
			b.Fatal(err)
		}
		m.Replicas = append(m.Replicas, replica)
	}
	if lookedUp {
		x := index.New(index.Config{MaxBytes: 64 << 20})
		for _, replica := range m.Replicas {
			x.Join(replica.Slot, index.SlotConfig{Model: "m", BlockSize: 16, Capacity: 4096})
			replica.SetBlock(16)
		}
		m.CacheName, m.Blocks = "m", []int{16}
		s.SetIndex(x, nil)
	}
	if source != "" {
		if source != "none" {
			if m.Prompts, err = prompt.Load(prompt.Source{Tokenizer: source, Cache: tokenizer.NewCache(64 << 20)}); err != nil {
				b.Fatal(err)
			}
		}
		pool := prompt.NewPool(2, time.Second)
		defer pool.Close()
		s.SetPrompts(pool, &noChecks{})
	}
	s.SetFleet(&Fleet{Models: map[string]*Model{"m": m}, Listed: []*Model{m}})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	go s.Serve(l)
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	// Each request ends with a number of its own: no prompt comes twice.
	request := []byte(post(`{"model":"m","temperature":0.7,"messages":[{"role":"system","content":"` + strings.Repeat("Answer briefly, and say so when you do not know. ", sentences) +
		`"},{"role":"user","content":"` + strings.Repeat("I am looking for an introduction. ", sentences) + `"},{"role":"user","content":"Number 0000000000"}]}`))
	number, buf := request[bytes.Index(request, []byte("Number "))+7:][:10], make([]byte, 4096)
	b.ReportAllocs()
	began := processorTime()
	n := 0
	for ; b.Loop(); n++ {
		for i, left := len(number)-1, n; left > 0; i, left = i-1, left/10 {
			number[i] = '0' + byte(left%10)
		}
		if _, err := c.Write(request); err != nil {
			b.Fatal(err)
		}
		for n := 0; !bytes.HasSuffix(buf[:n], []byte(`"ok":true}`)); {
			k, err := c.Read(buf[n:])
			if err != nil {
				b.Fatal(err)
			}
			n += k
		}
	}
	b.ReportMetric(float64(processorTime()-began)/float64(n), "cpu-ns/op")
	c.Close()
	s.Shutdown(b.Context())
	for _, replica := range m.Replicas {
		replica.Close()
	}
}

// noChecks is told of prompts and does nothing.
type noChecks struct{}

func (*noChecks) Counted(*Model, *Replica, int, int, []byte)              {}
func (*noChecks) Sampled(*Model, *Replica, prompt.Kind, []byte, []uint32) {}

// processorTime is what this process has used.
func processorTime() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &t); err != nil {
		panic(err)
	}
	return time.Duration(t.Nano())
}
