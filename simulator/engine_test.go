package simulator

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/inferrail/inferrail/index/kvevent"
)

// TestEngine tells stories: who arrives and leaves when, who starts, is
// preempted and ends, and what the cache tells of itself.
func TestEngine(t *testing.T) {
	datadriven.Walk(t, "testdata/engine", func(t *testing.T, path string) {
		var e *Engine
		sequences := map[string]*Sequence{}
		names := map[BlockName]string{}
		show := func(s *Sequence) string {
			name := "?"
			for n, other := range sequences {
				if other == s {
					name = n
				}
			}
			cached := ""
			if e.cache != nil {
				cached = fmt.Sprintf("%d cached, ", s.Cached)
			}
			switch {
			case s.State() == Prefilling && s.from > 0:
				return fmt.Sprintf("%s: %stoken %d at %v, end %v\n", name, cached, s.from, s.at, s.End)
			case s.State() == Prefilling:
				return fmt.Sprintf("%s: %sstart %v, first %v, end %v\n", name, cached, s.Start, s.First, s.End)
			case s.state == Ended:
				return name + ": ended\n"
			}
			return fmt.Sprintf("%s: waits, %d made\n", name, s.from)
		}
		told := func() string {
			var b strings.Builder
			if e.cache == nil {
				return ""
			}
			for _, c := range e.Told() {
				b.WriteString("  " + describe(&c, names) + "\n")
			}
			return b.String()
		}
		// run lets time pass, instant by instant.
		run := func(until time.Duration) string {
			var b strings.Builder
			for {
				next, ok := e.Next()
				if !ok || next > until {
					return b.String()
				}
				e.Advance(next)
				out := ""
				for _, s := range e.Changed(nil) {
					if s.State() != Decoding { // the first token's time is known
						out += show(s)
					}
				}
				if out += told(); out != "" {
					fmt.Fprintf(&b, "%v\n%s", next, out)
				}
			}
		}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			duration := func(name string) time.Duration {
				var text string
				d.ScanArgs(t, name, &text)
				v, err := time.ParseDuration(text)
				if err != nil {
					d.Fatalf(t, "%v", err)
				}
				return v
			}
			switch d.Cmd {
			case "engine":
				var a, b, c, slots, blocks, host int
				kind, size := "", 4
				d.ScanArgs(t, "a", &a)
				d.ScanArgs(t, "b", &b)
				d.ScanArgs(t, "d", &c)
				d.ScanArgs(t, "slots", &slots)
				d.MaybeScanArgs(t, "cache", &kind)
				d.MaybeScanArgs(t, "blocks", &blocks)
				d.MaybeScanArgs(t, "size", &size)
				d.MaybeScanArgs(t, "host", &host)
				e = NewEngine(Latency{A: float64(a), B: float64(b), D: float64(c), PerToken: duration("per-token")}, slots)
				switch kind {
				case "vllm":
					e.cache = newBlockPool(naming{block: size}, blocks, true, true)
				case "sglang":
					e.cache, e.batches = newRadixCache(naming{block: size, sglang: true}, blocks, host, true, true), true
				}
				e.ahead = d.HasArg("ahead")
				clear(sequences)
				clear(names)
				if e.cache != nil {
					e.passOn()
				}
				return told()
			case "arrive":
				s := &Sequence{}
				var name, prompt, said string
				d.ScanArgs(t, "name", &name)
				d.MaybeScanArgs(t, "uncached", &s.Uncached)
				d.MaybeScanArgs(t, "cached", &s.Cached)
				d.MaybeScanArgs(t, "prompt", &prompt)
				d.MaybeScanArgs(t, "said", &said)
				d.MaybeScanArgs(t, "salt", &s.Salt)
				d.MaybeScanArgs(t, "adapter", &s.Adapter)
				if prompt != "" {
					s.Prompt, s.Said, s.Output = letters(prompt), letters(said), len(said)+1
				} else {
					d.ScanArgs(t, "output", &s.Output)
				}
				s.Stops = d.HasArg("stops")
				if d.HasArg("slow") {
					var slow int
					d.ScanArgs(t, "slow", &slow)
					s.Slow = float64(slow)
				}
				sequences[name] = s
				at := duration("t")
				out := run(at)
				e.Arrive(s, at)
				changed := e.Changed(nil)
				if !slices.Contains(changed, s) {
					changed = append(changed, s)
				}
				for _, c := range changed {
					if c.State() != Decoding {
						out += show(c)
					}
				}
				return out + told()
			case "depart":
				var name string
				d.ScanArgs(t, "name", &name)
				at := duration("t")
				out := run(at)
				e.Depart(sequences[name], at)
				for _, s := range e.Changed(nil) {
					out += show(s)
				}
				if out += told(); out == "" {
					return "nothing\n"
				}
				return out
			case "advance":
				if out := run(duration("t")); out != "" {
					return out
				}
				return "nothing\n"
			case "load":
				at := duration("t")
				out := run(at)
				l := e.Load(at)
				out += fmt.Sprintf("running %d, waiting %d, tokens %d\n", l.Running, l.Waiting, l.Tokens)
				if e.cache != nil {
					used, of := e.cache.usage()
					out += fmt.Sprintf("%d of %d blocks used\n", used, of)
				}
				return out
			case "reset":
				return fmt.Sprintf("%v\n", e.Reset()) + told()
			}
			d.Fatalf(t, "unknown command %q", d.Cmd)
			return ""
		})
	})
}

// letters makes tokens of text.
func letters(text string) []uint32 {
	var ids []uint32
	for _, c := range text {
		ids = append(ids, uint32(c))
	}
	return ids
}

// describe writes a change with short names for blocks, made up as they come.
func describe(c *Change, names map[BlockName]string) string {
	short := func(n BlockName) string {
		if names[n] == "" {
			names[n] = strconv.Itoa(len(names))
		}
		return names[n]
	}
	var list []string
	for _, n := range c.Names {
		list = append(list, short(n))
	}
	out := strings.Join(list, ",")
	switch c.Kind {
	case kvevent.Stored:
		text := ""
		for _, id := range c.Tokens {
			text += string(rune(id))
		}
		out = "stored " + out + " " + text
		if c.HasParent {
			out += " after " + short(c.Parent)
		}
		if c.Adapter != "" {
			out += " adapter " + c.Adapter
		}
		if c.Salt != "" {
			out += " salt " + c.Salt
		}
	case kvevent.Removed:
		out = "removed " + out
	case kvevent.Cleared:
		return "cleared"
	}
	if c.Medium != mediumGPU {
		out += " on " + c.Medium
	}
	return out
}

// TestEngineAgainstModel compares the planned times of random histories with a
// model that goes through time event by event and plans nothing.
func TestEngineAgainstModel(t *testing.T) {
	for seed := range uint64(150) {
		r := rand.New(rand.NewPCG(seed, 1))
		latency := Latency{A: 1000, D: float64(r.IntN(2)) * 5000, PerToken: time.Duration(r.IntN(3)) * time.Millisecond}
		slots := 1 + r.IntN(5)
		e := NewEngine(latency, slots)
		model := &naiveEngine{latency: latency, slots: slots}
		var live []*Sequence
		now := time.Duration(0)
		for step := range 60 {
			now += time.Duration(r.IntN(12)) * time.Millisecond
			if len(live) > 0 && r.IntN(3) == 0 {
				k := r.IntN(len(live))
				s := live[k]
				live = slices.Delete(live, k, k+1)
				e.Depart(s, now)
				model.depart(s, now)
			} else {
				s := &Sequence{Uncached: r.IntN(20), Output: 1 + r.IntN(20)}
				live = append(live, s)
				e.Arrive(s, now)
				model.arrive(s, now)
			}
			starts := model.run(now)
			busy, queued := 0, 0
			for _, s := range live {
				if started := starts[s] <= now; started != (s.state != Waiting) || started && s.Start != starts[s] {
					t.Fatalf("seed %d step %d at %v: start %v, state %v, model %v", seed, step, now, s.Start, s.state, starts[s])
				}
				switch {
				case s.state == Waiting:
					queued++
				case s.First != s.Start+latency.Prefill(s.Uncached, s.Cached):
					t.Fatalf("seed %d step %d: first %v does not follow from start %v", seed, step, s.First, s.Start)
				case s.End > now:
					busy++
				}
			}
			if l := e.Load(now); l.Running != busy || l.Waiting != queued || busy > slots {
				t.Fatalf("seed %d step %d: load %+v, want %d running of %d, %d waiting", seed, step, l, busy, slots, queued)
			}
		}
		starts := model.run(now)
		e.Advance(now + time.Hour)
		for _, s := range live {
			if s.Start != starts[s] || !s.Ended() {
				t.Fatalf("seed %d: at the end start %v, state %v, model %v", seed, s.Start, s.state, starts[s])
			}
		}
	}
}

// naiveEngine goes through the whole history again for every question.
type naiveEngine struct {
	latency Latency
	slots   int
	history []*naiveSequence
}

type naiveSequence struct {
	s                *Sequence
	arrived, departs time.Duration
	start            time.Duration // -1 while waiting
}

func (m *naiveEngine) arrive(s *Sequence, t time.Duration) {
	m.history = append(m.history, &naiveSequence{s: s, arrived: t, departs: never})
}

func (m *naiveEngine) depart(s *Sequence, t time.Duration) {
	for _, n := range m.history {
		if n.s == s {
			n.departs = t
		}
	}
}

// run moves from millisecond to millisecond, starting whoever is first in the
// queue when the prefill and a slot are free, until everybody has started.
func (m *naiveEngine) run(time.Duration) map[*Sequence]time.Duration {
	starts := map[*Sequence]time.Duration{}
	for _, n := range m.history {
		n.start = -1
	}
	for now := time.Duration(0); ; now += time.Millisecond {
		waiting := 0
		for _, n := range m.history {
			if n.start >= 0 || n.departs <= now {
				continue
			}
			prefilling, busy := false, 0
			for _, o := range m.history {
				if o.start < 0 || o.departs <= now {
					continue
				}
				first := o.start + m.latency.Prefill(o.s.Uncached, o.s.Cached)
				end := first + time.Duration(o.s.Output-1)*m.latency.PerToken
				prefilling = prefilling || now < first
				if now < end {
					busy++
				}
			}
			// Nobody overtakes the first who must wait.
			if now < n.arrived || prefilling || busy >= m.slots {
				waiting++
				break
			}
			n.start = now
			starts[n.s] = now
		}
		if waiting == 0 {
			return starts
		}
	}
}
