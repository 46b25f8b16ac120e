package simulator

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/inferrail/inferrail/index/kvevent"
)

// TestEngine tells stories: who arrives and leaves when, what each step computes, who
// starts, is preempted and ends, and what the cache tells of itself. Its engines take a
// microseconds for a token of a prompt, and the other terms of Latency likewise.
func TestEngine(t *testing.T) {
	datadriven.Walk(t, "testdata/engine", func(t *testing.T, path string) {
		var e *Engine
		var steps bool
		var seen int64 // when the step began that was shown last
		sequences := map[string]*Sequence{}
		blocks := map[BlockName]string{}
		name := func(s *Sequence) string {
			for n, other := range sequences {
				if other == s {
					return n
				}
			}
			return "?"
		}
		show := func(s *Sequence) string {
			cached := ""
			if e.cache != nil {
				cached = fmt.Sprintf(", %d cached", s.target-s.todo)
			}
			switch s.State() {
			case Prefilling:
				return fmt.Sprintf("%s: starts%s\n", name(s), cached)
			case Decoding:
				return fmt.Sprintf("%s: token %d\n", name(s), s.from)
			case Ended:
				return fmt.Sprintf("%s: ended, %d made\n", name(s), s.from)
			}
			return fmt.Sprintf("%s: waits, %d made\n", name(s), s.from)
		}
		step := func() string {
			p := &e.current
			if !steps || !p.on || p.begin == seen {
				return ""
			}
			seen = p.begin
			var parts []string
			for _, c := range p.chunks {
				parts = append(parts, fmt.Sprintf("%s %d to %d", name(c.s), c.before, c.before+c.count))
			}
			if p.rounds > 0 && !e.apart {
				var who []string
				for _, s := range e.running {
					if s.member {
						who = append(who, name(s))
					}
				}
				text := "decode " + strings.Join(who, " ")
				if p.rounds > 1 {
					text = fmt.Sprintf("%d rounds of %s", p.rounds, text)
				}
				parts = append(parts, text)
			}
			return fmt.Sprintf("  step to %v: %s\n", up(p.end()), strings.Join(parts, ", "))
		}
		told := func() string {
			var b strings.Builder
			for _, c := range e.Told() {
				b.WriteString("  " + describe(&c, blocks) + "\n")
			}
			return b.String()
		}
		// happened tells what has happened up to now.
		happened := func() string {
			out := ""
			for _, s := range e.Changed(nil) {
				out += show(s)
			}
			return out + told() + step()
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
				if out := happened(); out != "" {
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
				number := func(name string) (v float64) {
					var text string
					if d.MaybeScanArgs(t, name, &text); text != "" {
						var err error
						if v, err = strconv.ParseFloat(text, 64); err != nil {
							d.Fatalf(t, "%v", err)
						}
					}
					return v
				}
				l := Latency{A: number("a"), B: number("b"), D: number("d"), PerToken: duration("per-token"),
					Read: 1000 * number("read"), Sequence: 1000 * number("sequence"), Load: 1000 * number("load")}
				size := 4
				d.MaybeScanArgs(t, "size", &size)
				kind := ""
				d.MaybeScanArgs(t, "cache", &kind)
				n := int(number("blocks"))
				e = NewEngine(l, int(number("slots")))
				switch kind {
				case "vllm":
					e.cache = newBlockPool(naming{block: size}, n, int(number("host")), true, true)
				case "sglang":
					e.cache, e.first = newRadixCache(naming{block: size, sglang: true}, n, int(number("host")), true, true), true
				case "tgi":
					radix := newRadixCache(naming{block: 1}, n, 0, true, true)
					radix.late = true
					e.cache, e.first, e.whole, e.patient, e.reserves = radix, true, true, true, true
				case "llamacpp":
					e.cache = newSlotCache(int(number("slots")), n, true)
				}
				e.budget, e.long = int(number("budget")), int(number("long"))
				e.whole, e.mixed = e.whole || d.HasArg("whole"), d.HasArg("mixed")
				e.ahead, e.apart = d.HasArg("ahead"), d.HasArg("apart")
				steps, seen = d.HasArg("steps"), -1
				clear(sequences)
				clear(blocks)
				e.passOn()
				return told()
			case "throttle":
				at := duration("t")
				out := run(at)
				var by float64
				var text string
				d.ScanArgs(t, "by", &text)
				by, _ = strconv.ParseFloat(text, 64)
				e.Advance(at)
				e.Slow(by, at)
				return out
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
				return out + happened()
			case "depart":
				var name string
				d.ScanArgs(t, "name", &name)
				at := duration("t")
				out := run(at)
				e.Depart(sequences[name], at)
				if out += happened(); out == "" {
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
			case "counts":
				c := e.Counts()
				return fmt.Sprintf("%d of %d tokens found, %d computed in %d steps, %d preempted\n", c.Hit, c.Queried, c.Computed, c.Steps, c.Preempted)
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
