package simulator

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestBlockPoolAgainstVLLM goes through random histories that vLLM's own cache
// has gone through: testdata/vllm/pool.py makes them and says what they mean.
func TestBlockPoolAgainstVLLM(t *testing.T) {
	golden, err := os.ReadFile("testdata/vllm/pool.txt")
	if err != nil {
		t.Fatal(err)
	}
	var p *blockPool
	var sequences map[string]*Sequence
	var numbers map[BlockName]string
	histories := 0
	for i, line := range strings.Split(strings.TrimSpace(string(golden)), "\n") {
		did, want, _ := strings.Cut(line, " = ")
		words := strings.Fields(did)
		if words[0] == "pool" {
			size, _ := strconv.Atoi(words[1])
			blocks, _ := strconv.Atoi(words[2])
			p = newBlockPool(naming{block: size}, blocks, 0, words[3] == "1", true)
			sequences, numbers = map[string]*Sequence{}, map[BlockName]string{}
			histories++
			continue
		}
		result := ""
		admit := func(s *Sequence) {
			result = "full"
			if cached, ok := p.admit(s, len(s.Prompt)+len(s.Said), len(s.Prompt)+len(s.Said)); ok {
				result = strconv.Itoa(cached)
			}
		}
		switch words[0] {
		case "admit":
			s := &Sequence{Prompt: letters(words[2])}
			s.Salt, s.Adapter = strings.Trim(words[3], "-"), strings.Trim(words[4], "-")
			sequences[words[1]] = s
			admit(s)
		case "again":
			admit(sequences[words[1]])
		case "grow":
			s := sequences[words[1]]
			s.Said = append(s.Said, letters(words[2])...)
			result = "ok"
			if !p.grow(s, len(s.Prompt)+len(s.Said), len(s.Prompt)+len(s.Said)) {
				result = "full"
			}
		case "free":
			p.release(sequences[words[1]], 0, true)
		case "reset":
			result = strconv.FormatBool(p.reset())
		default:
			t.Fatalf("line %d: %q", i+1, line)
		}
		for _, c := range p.take() {
			c.Adapter, c.Salt = "", ""
			result += " | " + describe(&c, numbers)
		}
		used, of := p.usage()
		result += fmt.Sprintf(" | %d free", of-used)
		if result != want {
			t.Fatalf("line %d: %s\n got %s\nwant %s", i+1, did, result, want)
		}
		p.check(t)
	}
	if histories < 20 {
		t.Errorf("only %d histories", histories)
	}
}

// check compares the queue, the users and the table with each other.
func (p *blockPool) check(t *testing.T) {
	t.Helper()
	queued := map[int32]bool{}
	for id := p.blocks[0].next; id != 0; id = p.blocks[id].next {
		if p.blocks[id].users != 0 || queued[id] {
			t.Fatalf("block %d of %d users is in the queue, twice: %v", id, p.blocks[id].users, queued[id])
		}
		queued[id] = true
	}
	named := 0
	for name, id := range p.named {
		var twins []int32
		for ; id != 0; id = p.blocks[id].twin {
			if b := p.blocks[id]; !b.named || b.name != name || slices.Contains(twins, id) {
				t.Fatalf("block %d is in the table under a name that it has not", id)
			}
			twins = append(twins, id)
		}
		named += len(twins)
	}
	for id, b := range p.blocks[1:] {
		if b.named {
			named--
		}
		if (b.users == 0) != queued[int32(id+1)] {
			t.Fatalf("block %d has %d users, is in the queue: %v", id+1, b.users, queued[int32(id+1)])
		}
	}
	if named != 0 || len(queued) != p.free {
		t.Fatalf("%d blocks too many in the table, %d in the queue, counted %d", named, len(queued), p.free)
	}
}

// TestEngineAgainstVLLM: requests that come one after the other find in the
// cache what they find in that of vLLM's two schedulers, and the cache tells the
// same in the same order: testdata/vllm/scheduler.py says how they were asked.
func TestEngineAgainstVLLM(t *testing.T) {
	golden, err := os.ReadFile("testdata/vllm/scheduler.txt")
	if err != nil {
		t.Fatal(err)
	}
	var e *Engine
	var numbers map[BlockName]string
	now := time.Duration(0)
	schedulers := map[string]int{}
	for i, line := range strings.Split(strings.TrimSpace(string(golden)), "\n") {
		did, want, _ := strings.Cut(line, " = ")
		words := strings.Fields(did)
		if words[0] == "scheduler" {
			size, _ := strconv.Atoi(words[2])
			blocks, _ := strconv.Atoi(words[3])
			e = NewEngine(Latency{D: 1000, PerToken: time.Millisecond}, 10)
			e.cache, e.ahead = newBlockPool(naming{block: size}, blocks, 0, true, true), words[1] == "AsyncScheduler"
			schedulers[words[1]]++
			numbers = map[BlockName]string{}
			continue
		}
		s := &Sequence{Prompt: letters(words[0]), Said: letters(words[1]), Output: len(words[1]), Stops: words[2] == "stop"}
		e.Arrive(s, now)
		now += time.Second
		e.Advance(now)
		got := strconv.Itoa(s.Cached)
		for _, c := range e.Told() {
			got += " | " + describe(&c, numbers)
		}
		if got != want {
			t.Fatalf("line %d: %s\n got %s\nwant %s", i+1, did, got, want)
		}
	}
	if schedulers["Scheduler"] == 0 || schedulers["AsyncScheduler"] == 0 {
		t.Errorf("histories of %v", schedulers)
	}
}
