package index

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// story is an index with one slot, and requests by name.
type story struct {
	t      *testing.T
	x      *Index
	config SlotConfig
	claims map[string]*Claim
	names  map[Hash]string // of blocks: the prompt up to there
	now    time.Time
}

// prompt reads words of a letter and how often its token comes, a block's worth
// when that is not said.
func (s *story) prompt(words []string) *Prompt {
	p := &Prompt{Root: Root("m", "", nil), Block: s.config.BlockSize}
	if words[0] == "text" {
		text := []byte(strings.Repeat(words[1], TextBlock))
		p.Chain = AppendText(nil, p.Root, text)
		for i, h := range p.Chain {
			s.names[h] = "text " + words[1][:i+1]
		}
		return p
	}
	for _, w := range words {
		n := p.Block
		if len(w) > 1 {
			fmt.Sscan(w[1:], &n)
		}
		for range n {
			p.IDs = append(p.IDs, uint32(w[0]))
		}
	}
	p.Chain = AppendTokens(nil, p.Root, p.IDs, p.Block)
	for i, h := range p.Chain {
		name := ""
		for b := range i + 1 {
			block := p.IDs[b*p.Block : (b+1)*p.Block]
			for j, id := range block {
				if j == 0 || id != block[j-1] {
					name += string(rune(id))
				}
			}
		}
		s.names[h] = name
	}
	return p
}

func (s *story) held(p *Prompt) string {
	var l Lookup
	s.x.Look(&l, p)
	h := l.Held(0)
	if len(p.IDs) == 0 {
		return fmt.Sprintf("held %d of %d\n", h[GPU], len(p.Chain))
	}
	return fmt.Sprintf("held %d of %d, cached %d of %d tokens\n", h[GPU], len(p.Chain), p.Cached(h), len(p.IDs))
}

// told does what events do: it holds, or releases, a prompt's last block.
func (s *story) told(p *Prompt, gone bool) {
	slot := s.x.lock(0)
	defer slot.unlock()
	r := ref(0)
	for i, h := range p.Chain {
		q := slot.tree.add(r, h)
		if last := i == len(p.Chain)-1; last && gone {
			slot.tree.release(q, reason(GPU))
		} else if last {
			slot.tree.hold(q, reason(GPU))
			slot.tree.release(q, expected)
		}
		r = q
	}
}

func (s *story) show() string {
	slot := s.x.lock(0)
	if slot == nil {
		return "no slot\n"
	}
	defer slot.unlock()
	t, sh := &slot.tree, &slot.shadow
	var b strings.Builder
	fmt.Fprintf(&b, "%d of %d tokens free; queue:", sh.free, sh.size)
	for x := sh.queue.first; x != 0; x = t.after(x) {
		switch h := t.hash(x); {
		case !t.isSpare(x):
			fmt.Fprintf(&b, " %s", s.names[h])
		case h.Hi == kindCopy:
			fmt.Fprintf(&b, " copy-of-%s", s.names[t.hash(t.parent(x))])
		default:
			b.WriteString(" answer")
		}
	}
	fmt.Fprintf(&b, "\n%d guessed, %d expected, %d pinned, %d records\n", t.blocks[guessed], t.blocks[expected], t.blocks[pinned], t.records)
	return b.String()
}

func (s *story) run(d *datadriven.TestData) string {
	var out strings.Builder
	for line := range strings.Lines(d.Input) {
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		fmt.Fprintf(&out, "%s: ", strings.Join(words, " "))
		n := 0
		if len(words) > 2 {
			fmt.Sscan(words[2], &n)
		}
		switch words[0] {
		case "held":
			out.WriteString(s.held(s.prompt(words[1:])))
			continue
		case "claim":
			p := s.prompt(words[2:])
			out.WriteString(s.held(p))
			s.claims[words[1]] = new(Claim)
			s.x.Claim(s.claims[words[1]], 0, p, s.now)
			continue
		case "prefilled":
			s.x.Prefilled(s.claims[words[1]], s.now)
		case "found":
			s.x.Found(s.claims[words[1]], n)
		case "release":
			s.x.Release(s.claims[words[1]], n, s.now)
		case "undo":
			s.x.Undo(s.claims[words[1]])
		case "stored", "removed":
			s.told(s.prompt(words[1:]), words[0] == "removed")
		case "state":
			states := map[string]State{"exact": Exact, "approximate": Approximate, "repairing": Repairing}
			s.x.SetState(0, states[words[1]], "the story says so")
		case "forget":
			s.x.Forget(0)
		case "leave":
			s.x.Leave(0)
		case "capacity":
			fmt.Sscan(words[1], &s.config.Capacity)
			s.x.Join(0, s.config)
		case "wait":
			wait, err := time.ParseDuration(words[1])
			if err != nil {
				d.Fatalf(s.t, "%v", err)
			}
			s.now = s.now.Add(wait)
			s.x.Expire(s.now)
		case "show":
		default:
			d.Fatalf(s.t, "unknown step %q", words[0])
		}
		out.WriteString(s.show())
		if slot := s.x.lock(0); slot != nil {
			slot.unlock()
			checkShadow(s.t, slot)
		}
	}
	return out.String()
}

// TestShadowStories: what claims make of a slot. Each file begins with a new
// index; a story has one step a line, and what it leads to.
func TestShadowStories(t *testing.T) {
	datadriven.Walk(t, "testdata/shadow", func(t *testing.T, path string) {
		s := &story{t: t, now: time.Unix(1000, 0)}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			s.t = t
			switch d.Cmd {
			case "engine":
				s.config = SlotConfig{Model: "m"}
				d.ScanArgs(t, "block", &s.config.BlockSize)
				d.ScanArgs(t, "capacity", &s.config.Capacity)
				s.config.AfterPrefill = d.HasArg("sglang")
				s.x, s.claims, s.names = New(Config{}), map[string]*Claim{}, map[Hash]string{}
				s.x.Join(0, s.config)
				return s.run(d)
			case "then":
				return s.run(d)
			}
			d.Fatalf(t, "unknown command %q", d.Cmd)
			return ""
		})
	})
}
