package simulator

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// TestEngine tells stories: who arrives and leaves when, and what is planned.
func TestEngine(t *testing.T) {
	datadriven.Walk(t, "testdata/engine", func(t *testing.T, path string) {
		var e *Engine
		sequences := map[string]*Sequence{}
		nameOf := func(s *Sequence) string {
			for name, other := range sequences {
				if other == s {
					return name
				}
			}
			return "?"
		}
		show := func(s *Sequence) string {
			return fmt.Sprintf("%s: start %v, first %v, end %v\n", nameOf(s), s.Start, s.First, s.End)
		}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			at := func() time.Duration {
				var text string
				d.ScanArgs(t, "t", &text)
				v, err := time.ParseDuration(text)
				if err != nil {
					d.Fatalf(t, "%v", err)
				}
				return v
			}
			switch d.Cmd {
			case "engine":
				var a, b, c, slots int
				var perToken string
				d.ScanArgs(t, "a", &a)
				d.ScanArgs(t, "b", &b)
				d.ScanArgs(t, "d", &c)
				d.ScanArgs(t, "per-token", &perToken)
				d.ScanArgs(t, "slots", &slots)
				pace, err := time.ParseDuration(perToken)
				if err != nil {
					d.Fatalf(t, "%v", err)
				}
				e = NewEngine(Latency{A: float64(a), B: float64(b), D: float64(c), PerToken: pace}, slots)
				clear(sequences)
				return ""
			case "arrive":
				s := &Sequence{}
				var name string
				d.ScanArgs(t, "name", &name)
				d.ScanArgs(t, "uncached", &s.Uncached)
				d.MaybeScanArgs(t, "cached", &s.Cached)
				d.ScanArgs(t, "output", &s.Output)
				if d.HasArg("slow") {
					var slow int
					d.ScanArgs(t, "slow", &slow)
					s.Slow = float64(slow)
				}
				sequences[name] = s
				e.Arrive(s, at())
				return show(s)
			case "depart":
				var name string
				d.ScanArgs(t, "name", &name)
				moved := e.Depart(sequences[name], at(), nil)
				var b strings.Builder
				for _, s := range moved {
					b.WriteString("moved " + show(s))
				}
				if len(moved) == 0 {
					return "nobody moved\n"
				}
				return b.String()
			case "load":
				l := e.Load(at())
				return fmt.Sprintf("running %d, waiting %d, tokens %d\n", l.Running, l.Waiting, l.Tokens)
			}
			d.Fatalf(t, "unknown command %q", d.Cmd)
			return ""
		})
	})
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
				before := map[*Sequence]time.Duration{}
				for _, l := range live {
					before[l] = l.Start
				}
				moved := e.Depart(s, now, nil)
				model.depart(s, now)
				for _, l := range live {
					if (l.Start != before[l]) != slices.Contains(moved, l) || l.Start > before[l] {
						t.Fatalf("seed %d step %d: moved from %v to %v, reported %v", seed, step, before[l], l.Start, moved)
					}
				}
			} else {
				s := &Sequence{Uncached: r.IntN(20), Output: 1 + r.IntN(20)}
				live = append(live, s)
				e.Arrive(s, now)
				model.arrive(s, now)
			}
			starts := model.run(now)
			running, waiting := 0, 0
			for _, s := range live {
				if s.Start != starts[s] {
					t.Fatalf("seed %d step %d at %v: start %v, model %v", seed, step, now, s.Start, starts[s])
				}
				if s.First != s.Start+latency.Prefill(s.Uncached, s.Cached) || s.End != s.Token(s.Output-1) {
					t.Fatalf("seed %d step %d: first %v, end %v do not follow from start %v", seed, step, s.First, s.End, s.Start)
				}
				if s.Start > now {
					waiting++
				} else if s.End > now {
					running++
				}
			}
			if l := e.Load(now); l.Running != running || l.Waiting != waiting || running > slots {
				t.Fatalf("seed %d step %d: load %+v, want %d running of %d, %d waiting", seed, step, l, running, slots, waiting)
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

const never = time.Duration(1 << 62)

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
