package index

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// plainSlot is what an index should know of a slot: sets of blocks, by their
// number in a wood.
type plainSlot struct {
	state  State
	life   int                 // claims of another are void
	told   map[int]*[Tiers]int // how often
	guess  map[int]bool
	shared map[int]bool // of those: another than who added it has used it
	expect map[int]bool
	pins   map[int]int
	due    []plainDue
}

type plainDue struct {
	at     time.Time
	blocks []int
}

type plainClaim struct {
	claim Claim
	slot  int
	life  int
	exact bool  // it awaits events
	all   []int // blocks that it uses, from the beginning on
	added []int // and those that it has added
	over  bool  // events are being waited for without it
}

func (p *plainSlot) gpu(b int) bool {
	return p.guess[b] || p.expect[b] || p.told[b] != nil && p.told[b][GPU] > 0
}

func (p *plainSlot) heldAt(b int, tier Tier) bool {
	if p.gpu(b) {
		return true
	}
	for t := range tier + 1 {
		if p.told[b] != nil && p.told[b][t] > 0 {
			return true
		}
	}
	return false
}

// reset forgets all.
func (p *plainSlot) reset(life int) {
	*p = plainSlot{state: p.state, life: life, told: map[int]*[Tiers]int{}, guess: map[int]bool{},
		shared: map[int]bool{}, expect: map[int]bool{}, pins: map[int]int{}}
}

// unawait gives up blocks of which events should have told.
func (p *plainSlot) unawait(blocks []int) {
	for _, b := range slices.Backward(blocks) {
		if p.pins[b] == 1 {
			delete(p.expect, b)
		}
		p.pins[b]--
	}
}

func (p *plainSlot) expire(now time.Time) {
	for len(p.due) > 0 && !p.due[0].at.After(now) {
		p.unawait(p.due[0].blocks)
		p.due = p.due[1:]
	}
}

func (p *plainSlot) claim(c *plainClaim, path []int) {
	c.life, c.exact = p.life, p.state == Exact
	hit := 0
	for hit < len(path) && p.gpu(path[hit]) && (!c.exact || p.told[path[hit]] != nil && p.told[path[hit]][GPU] > 0) {
		hit++
	}
	if c.exact {
		c.added = path[hit:]
		for _, b := range c.added {
			if !p.gpu(b) {
				p.expect[b] = true
			}
			p.pins[b]++
		}
		return
	}
	c.all, c.added = path, path[hit:]
	for i, b := range path {
		p.shared[b] = i < hit || p.guess[b]
		p.guess[b] = true
		p.pins[b]++
	}
}

// end ends a claim: it is taken back or the request has ended.
func (p *plainSlot) end(c *plainClaim, undo bool, now time.Time) {
	switch {
	case c.over:
	case c.exact && undo:
		p.unawait(c.added)
	case c.exact:
		p.due = append(p.due, plainDue{now.Add(eventsWithin), c.added})
	default:
		if undo {
			for _, b := range c.added {
				if p.pins[b] == 1 && !p.shared[b] {
					delete(p.guess, b)
				}
			}
		}
		for _, b := range c.all {
			p.pins[b]--
		}
	}
}

// state changes it, as SetState does.
func (p *plainSlot) set(s State, life int) {
	if p.state == s {
		return
	}
	p.state = s
	switch s {
	case Exact:
		told := p.told
		p.reset(life)
		p.told = told
	case Approximate, Mismatched:
		for b, n := range p.told {
			if n[GPU] > 0 && !p.guess[b] {
				p.guess[b], p.shared[b] = true, false
			}
			if s == Approximate {
				n[GPU] = 0
				p.told[b] = n
			}
		}
	}
}

// recordOf finds the record of a block.
func recordOf(t *tree, w *wood, b int) ref {
	r := ref(0)
	for _, h := range w.chain(b) {
		if r = t.find(r, h); r == 0 {
			return 0
		}
	}
	return r
}

// TestIndexAgainstModel: after any sequence of claims, of what engines tell, of
// state changes, arrivals and departures, each slot holds of each prompt what
// sets of blocks say.
func TestIndexAgainstModel(t *testing.T) {
	for seed := range uint64(40) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			const numbers = 4
			r := rand.New(rand.NewPCG(seed, 5))
			w := newWood(r, 5+r.IntN(60))
			x := New(Config{})
			config := SlotConfig{Model: "m", BlockSize: 16, Capacity: 1 << 20}
			slots := [numbers]*plainSlot{}
			var claims []*plainClaim
			now := time.Unix(1000, 0)
			life := 0
			var l Lookup
			check := func() {
				t.Helper()
				for b := range w.before {
					path := w.path(b)
					x.Look(&l, &Prompt{Chain: w.chain(b)})
					for number := range numbers {
						var want Held
						if p := slots[number]; p != nil {
							for tier := range want {
								for int(want[tier]) < len(path) && p.heldAt(path[want[tier]], Tier(tier)) {
									want[tier]++
								}
							}
						}
						if got := l.Held(number); got != want {
							t.Fatalf("slot %d holds %v of the path %v, want %v", number, got, path, want)
						}
					}
				}
			}
			for step := range 400 {
				number := r.IntN(numbers)
				p := slots[number]
				b := r.IntN(len(w.before))
				path := w.path(b)
				now = now.Add(time.Duration(r.IntN(300)) * time.Millisecond)
				life++
				switch k := r.IntN(100); {
				case k < 6:
					x.Join(number, config)
					if p == nil {
						slots[number] = &plainSlot{}
						slots[number].reset(life)
					}
				case k < 7:
					x.Leave(number)
					slots[number] = nil
				case k < 9:
					x.Forget(number)
					if p != nil {
						p.reset(life)
					}
				case k < 15:
					state := State(r.IntN(4))
					x.SetState(number, state, "")
					if p != nil {
						p.set(state, life)
					}
				case k < 40:
					c := &plainClaim{slot: number}
					chain := w.chain(b)
					x.Claim(&c.claim, number, &Prompt{Chain: chain}, now)
					clear(chain) // the prompt's memory is another's now
					if p == nil {
						break
					}
					p.expire(now)
					p.claim(c, path)
					claims = append(claims, c)
				case k < 65:
					if len(claims) == 0 {
						break
					}
					i := r.IntN(len(claims))
					c := claims[i]
					p := slots[c.slot]
					if p != nil && p.life != c.life {
						p = nil
					}
					switch k % 3 {
					case 0: // it goes on
						if r.IntN(2) == 0 || !x.TryPrefilled(&c.claim, now) {
							x.Prefilled(&c.claim, now)
						}
						if p != nil && c.exact && !c.over {
							p.end(c, false, now)
							c.over = true
						}
						continue
					case 1:
						x.Undo(&c.claim)
					case 2:
						x.Release(&c.claim, 0, now)
					}
					if p != nil {
						p.end(c, k%3 == 1, now)
					}
					if c.claim != (Claim{}) {
						t.Fatalf("the claim is not void: %+v", c.claim)
					}
					claims = slices.Delete(claims, i, i+1)
				case k < 80: // the engine stores some
					tier := Tier(0)
					if k%3 == 0 {
						tier = Tier(r.IntN(Tiers))
					}
					s := x.lock(number)
					if s == nil {
						break
					}
					at := ref(0)
					for _, b := range path {
						at = s.tree.add(at, w.hash[b])
						s.tree.hold(at, reason(tier))
						if tier == GPU {
							for s.tree.release(at, expected) {
							}
							delete(p.expect, b)
						}
						if p.told[b] == nil {
							p.told[b] = &[Tiers]int{}
						}
						p.told[b][tier]++
					}
					s.unlock()
				case k < 95: // and removes others
					s := x.lock(number)
					if s == nil {
						break
					}
					for _, b := range r.Perm(len(w.before))[:r.IntN(len(w.before))] {
						tier := Tier(r.IntN(Tiers))
						if r.IntN(2) == 0 {
							tier = GPU
						}
						had := p.told[b] != nil && p.told[b][tier] > 0
						if at := recordOf(&s.tree, w, b); at != 0 && s.tree.release(at, reason(tier)) != had {
							t.Fatalf("block %d at tier %d: want it to be told: %v", b, tier, had)
						}
						if had {
							p.told[b][tier]--
						}
					}
					s.unlock()
				case k < 97:
					s := x.lock(number)
					if s == nil {
						break
					}
					s.tree.clear(reason(GPU))
					for _, n := range p.told {
						n[GPU] = 0
					}
					s.unlock()
				case k < 98:
					x.Expire(now)
					for _, p := range slots {
						if p != nil {
							p.expire(now)
						}
					}
				}
				if step%8 == 0 {
					check()
				}
			}
			check()
			for number := range numbers {
				x.Leave(number)
			}
			if n := x.table.bytes() + x.arena.maps.Load(); n != 0 {
				t.Errorf("%d bytes are left", n)
			}
		})
	}
}
