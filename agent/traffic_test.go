package agent

import (
	"bytes"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/inferrail/inferrail/simulator/workload"
)

// What an agent has served can be simulated from its log: the requests that are read
// are those that were sent, they share what those shared, to 512 tokens, and belong to
// the same conversations.
func TestTrafficIsRead(t *testing.T) {
	for _, kind := range []string{"chat", "agents", "system-prompts"} {
		t.Run(kind, func(t *testing.T) {
			sent, file := servedTraffic(t, kind, "builtin:sim")
			read, err := (workload.ReadOptions{}).Read(file)
			if err != nil {
				t.Fatal(err)
			}
			if len(read.Requests) != len(sent.Requests) || read.Block != 512 {
				t.Fatalf("%d requests of blocks of %d are read, %d were sent", len(read.Requests), read.Block, len(sent.Requests))
			}
			sessions, begins := newPairs[int, int](), newPairs[string, uint64]()
			shared := 0
			for i := range sent.Requests {
				s, r := &sent.Requests[i], &read.Requests[i]
				if r.Input() != s.Input() || r.Output != s.Output {
					t.Errorf("request %d: %d and %d tokens are read, %d and %d were sent", i, r.Input(), r.Output, s.Input(), s.Output)
				}
				if s.Session > 0 && !sessions.equal(s.Session, r.Session) {
					t.Errorf("request %d of conversation %d is one of %d", i, s.Session, r.Session)
				}
				var begin []byte
				for k, id := range s.AppendPrompt(nil) {
					begin = append(begin, byte(id), byte(id>>8), byte(id>>16), byte(id>>24))
					if (k+1)%512 != 0 {
						continue
					}
					p := r.Parts[k/512]
					if begins.left[string(begin)] != 0 {
						shared++
					}
					if p.Tokens != 512 || !begins.equal(string(begin), p.ID) {
						t.Fatalf("request %d: the part %+v is not what the first %d tokens are elsewhere", i, p, k+1)
					}
				}
			}
			if shared < 20 {
				t.Errorf("only %d parts are shared", shared)
			}
			if info, err := os.Stat(file); err != nil || info.Size() > int64(1500*len(sent.Requests)) {
				t.Errorf("%v: %d bytes", err, info.Size())
			}
		})
	}
}

// An agent that has no tokenizer estimates what prompts share from their text.
func TestTrafficIsReadFromText(t *testing.T) {
	sent, file := servedTraffic(t, "agents", "none")
	read, err := (workload.ReadOptions{}).Read(file)
	if err != nil {
		t.Fatal(err)
	}
	if len(read.Requests) != len(sent.Requests) {
		t.Fatalf("%d requests are read, %d were sent", len(read.Requests), len(sent.Requests))
	}
	reuse := func(w *workload.Workload) float64 {
		seen, shared, all := map[string]bool{}, 0, 0
		for i := range w.Requests {
			var begin []byte
			ids := w.Requests[i].AppendPrompt(nil)
			all += len(ids)
			for k, id := range ids {
				begin = append(begin, byte(id), byte(id>>8), byte(id>>16), byte(id>>24))
				if (k+1)%16 == 0 {
					if seen[string(begin)] {
						shared += 16
					}
					seen[string(begin)] = true
				}
			}
		}
		return float64(shared) / float64(all)
	}
	for i := range sent.Requests {
		if s, r := &sent.Requests[i], &read.Requests[i]; r.Input() != s.Input() || r.Output != s.Output {
			t.Errorf("request %d: %d and %d tokens are read, %d and %d were sent", i, r.Input(), r.Output, s.Input(), s.Output)
		}
	}
	// What lies behind the last hash is lost: half of 500 tokens of each prompt.
	if was, is := reuse(sent), reuse(read); is > was+0.02 || is < was-0.1 {
		t.Errorf("the reuse is %.3f, and was %.3f", is, was)
	}
}

// servedTraffic is what an agent has served, and the log that it has written.
func servedTraffic(t *testing.T, kind, tokenizer string) (sent *workload.Workload, file string) {
	t.Helper()
	sent, err := workload.Generate(workload.Options{Name: kind, Seed: 5, Requests: 60, Rate: 20, Output: 20})
	if err != nil {
		t.Fatal(err)
	}
	file = filepath.Join(t.TempDir(), "decisions.jsonl")
	c := testConfig(startEngine(t, 0, "m"), startEngine(t, 0, "m"))
	c.Models = []ModelConfig{{Name: "m", Tokenizer: tokenizer}}
	c.Decisions = DecisionsConfig{File: file, Sample: 1, Prompts: promptHashes}
	a := startAgent(t, c)
	client := &http.Client{Timeout: 30 * time.Second}
	defer client.CloseIdleConnections()
	for i := range sent.Requests {
		r := &sent.Requests[i]
		body := workload.AppendBody(nil, r, workload.BodyOptions{Model: "m", Index: i, Stream: i%2 == 0, Exact: true, Say: true})
		resp, err := client.Post("http://"+a.Addr().String()+r.Path(), "application/json", bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(resp.Body)
		if resp.Body.Close(); err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%v, status %d: %s", err, resp.StatusCode, text)
		}
	}
	stopped(t, a)
	return sent, file
}

// pairs says which of two kinds of names stand for the same.
type pairs[A, B comparable] struct {
	left  map[A]B
	right map[B]A
}

func newPairs[A, B comparable]() *pairs[A, B] { return &pairs[A, B]{map[A]B{}, map[B]A{}} }

// equal reports that a and b stand for the same, as far as is known until now.
func (p *pairs[A, B]) equal(a A, b B) bool {
	wasB, knownA := p.left[a]
	wasA, knownB := p.right[b]
	p.left[a], p.right[b] = b, a
	return (!knownA || wasB == b) && (!knownB || wasA == a)
}
