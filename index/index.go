package index

import (
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
)

// Config bounds an Index.
type Config struct {
	// MaxBytes is the memory that it may hold, in all. 0 is no bound.
	MaxBytes int64
}

// Index knows what every engine holds. New makes it; its methods may be called
// from any goroutine.
//
// A slot's mutex is taken before one of the table, of the arena or of the
// lanes, and mu before a slot's. Of two slots, the second is only tried.
type Index struct {
	config Config
	table  *table
	arena  *arena
	lanes  lanes
	epochs atomic.Uint32 // how many slots have begun anew, all together
	resets atomic.Int64  // how often slots were forgotten, departed ones too

	mu    sync.Mutex              // guards the changing of slots
	slots atomic.Pointer[[]*slot] // immutable; nil where none has joined
}

// lanes hands out the lanes of the table, the lowest first. Its methods may be
// called from any goroutine.
type lanes struct {
	mu    sync.Mutex   // guards what follows
	n     atomic.Int32 // how many there have been at once; read without mu
	spare []lane
}

// maxLanes is how many there may be: laneByTier has one value for none.
const maxLanes = 1<<16 - 1

func (l *lanes) take() (lane, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if last := len(l.spare) - 1; last >= 0 {
		taken := l.spare[last]
		l.spare = l.spare[:last]
		return taken, true
	}
	n := l.n.Load()
	if n == maxLanes {
		return 0, false
	}
	l.n.Store(n + 1)
	return lane(n), true
}

// some: take would return one now.
func (l *lanes) some() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.spare) > 0 || l.n.Load() < maxLanes
}

// giveBack takes a lane that is in no set of the table any more.
func (l *lanes) giveBack(taken lane) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.spare = append(l.spare, taken)
}

// slot is one engine endpoint. Look reads the lanes of its tree, and what of
// its shadow is made for that, without the mutex.
type slot struct {
	number  int
	size    atomic.Int64 // the records of its tree, for the choice of who gives up some
	waiting atomic.Int32 // goroutines that wait for the mutex
	exact   atomic.Bool  // state is Exact

	mu     sync.Mutex // guards what follows
	gone   bool       // it has left
	epoch  uint32     // claims of another are void
	claims int        // in flight, of this epoch
	resets int        // how often it was forgotten
	short  bool       // some of what events told was given up for memory
	config SlotConfig
	state  State
	why    string
	tree   tree
	shadow shadow
	told   told
	audit  audit
}

// SlotConfig is what the index is told of an engine.
type SlotConfig struct {
	// Model names the base model in the roots of the engine's chains: what
	// Root was given for the prompts that go there.
	Model string
	// BlockSize is how many tokens a block of the engine's KV cache has.
	BlockSize int
	// Capacity is how many blocks the engine's KV cache has.
	Capacity int
	// AfterPrefill: what a request computes can be reused when its prefill has
	// ended, as SGLang has it. Else it can be as soon as it is scheduled, as
	// vLLM has it.
	AfterPrefill bool
	// Sequences is how many the engine runs at a time, where each has a cache that no
	// other finds anything in, as llama.cpp and Ollama have it; 0 where they share one.
	Sequences int
}

// State is how well the index knows a slot.
type State uint8

const (
	// Approximate: only the requests that went there are known.
	Approximate State = iota
	// Exact: the engine's events are whole.
	Exact
	// Repairing: events have been lost, and are being fetched. What is known
	// is kept, and requests are counted on as if it were approximate.
	Repairing
	// Mismatched: the engine's counts have differed from the predictions.
	Mismatched
)

// New returns an empty index.
func New(c Config) *Index {
	x := &Index{config: c, table: newTable()}
	x.arena = &arena{limit: c.MaxBytes, table: x.table}
	x.slots.Store(&[]*slot{})
	return x
}

// at is the slot of a number, nil if none has joined.
func (x *Index) at(number int) *slot {
	slots := *x.slots.Load()
	if number < 0 || number >= len(slots) {
		return nil
	}
	return slots[number]
}

// lock returns the slot of a number with its mutex held, nil if there is none.
func (x *Index) lock(number int) *slot {
	s := x.at(number)
	if s == nil {
		return nil
	}
	if !s.mu.TryLock() {
		s.waiting.Add(1)
		s.mu.Lock()
		s.waiting.Add(-1)
	}
	if s.gone {
		s.mu.Unlock()
		return nil
	}
	return s
}

// giveTurn ends what lock began, for one who will be back at once: whoever waits
// goes first.
func (s *slot) giveTurn() {
	s.unlock()
	if s.waiting.Load() > 0 {
		runtime.Gosched()
	}
}

// unlock ends what lock began.
func (s *slot) unlock() {
	s.size.Store(int64(s.tree.records))
	s.mu.Unlock()
}

// Join begins to know a slot, which is Approximate at first, or changes what is
// known of its engine: what is held under another model or block size, or in more
// sequences, is forgotten, and a smaller capacity evicts.
func (x *Index) Join(number int, c SlotConfig) {
	var held *tree // under what is no more
	defer func() { held.close() }()
	x.mu.Lock()
	defer x.mu.Unlock()
	if number < 0 {
		return
	}
	if s := x.lock(number); s != nil {
		defer s.unlock()
		if c.Model != s.config.Model || c.BlockSize != s.config.BlockSize || c.Sequences < s.config.Sequences || c.Sequences > 0 && s.config.Sequences == 0 {
			held = x.forgetLocked(s)
		}
		s.config = c
		s.shadow.resize(s)
		return
	}
	s := &slot{number: number, config: c, epoch: x.epochs.Add(1)}
	s.tree.makeRoom = func() int { return x.makeRoom(s) }
	s.tree.dropped = func(r ref) { s.told.dropped(&s.tree, r) }
	s.tree.init(x.arena, &x.lanes)
	s.shadow.resize(s)
	old := *x.slots.Load()
	slots := make([]*slot, max(len(old), number+1))
	copy(slots, old)
	slots[number] = s
	x.slots.Store(&slots)
}

// Leave forgets a slot, and frees what it held. Claims on it become void.
func (x *Index) Leave(number int) {
	if s := x.leave(number); s != nil {
		// It is gone, so the tree is nobody else's.
		s.tree.close()
	}
}

// leave takes a slot out of the index, with all but its tree.
func (x *Index) leave(number int) *slot {
	x.mu.Lock()
	defer x.mu.Unlock()
	s := x.lock(number)
	if s == nil {
		return nil
	}
	slots := slices.Clone(*x.slots.Load())
	slots[number] = nil
	for len(slots) > 0 && slots[len(slots)-1] == nil {
		slots = slots[:len(slots)-1]
	}
	x.slots.Store(&slots)
	s.gone = true
	s.shadow.reset(s)
	s.told.reset(s)
	s.mu.Unlock()
	return s
}

// Forget empties a slot: its engine has restarted. Claims on it become void.
func (x *Index) Forget(number int) {
	if s := x.lock(number); s != nil {
		old := x.forgetLocked(s)
		s.resets++
		x.resets.Add(1)
		s.unlock()
		old.close()
	}
}

// forgetLocked returns the tree of what was held, which is to be closed when the
// slot is unlocked: that takes half a second for a million blocks, in which
// requests go on.
func (x *Index) forgetLocked(s *slot) *tree {
	s.epoch = x.epochs.Add(1)
	s.claims = 0
	s.short = false
	s.audit.forget()
	s.shadow.reset(s)
	s.told.reset(s)
	return s.tree.partFrom()
}

// SetState says how well a slot is known from now on, and why, for people. A
// slot that becomes Exact gives up what was guessed; one that becomes
// Approximate or Mismatched keeps what events have told as guesses, and
// Approximate means that some of it is not so any more: it can become Exact
// again only when all has been told anew.
func (x *Index) SetState(number int, state State, why string) {
	s := x.lock(number)
	if s == nil {
		return
	}
	defer s.unlock()
	s.why = why
	if s.state == state {
		return
	}
	s.state = state
	s.exact.Store(state == Exact)
	s.tree.foresee(0)
	switch state {
	case Exact:
		// Claims point to what is given up.
		s.epoch, s.claims = x.epochs.Add(1), 0
		s.audit.forget()
		s.shadow.abandon(s)
		s.told.recount(s)
	case Approximate:
		s.shadow.adopt(s)
		s.told.demote(s)
	case Mismatched:
		s.shadow.adopt(s)
	}
}

// foresee takes the engine to evict soon what it has no room for beside what
// requests that were sent to it are yet to make it hold. Their events will tell so;
// others are scheduled before those come, and do not find it.
//
// The tree's order is that in which the engine would evict: what requests use is
// no leaf, and comes back to the end when they end.
func (s *slot) foresee() {
	if s.state != Exact {
		return
	}
	room := int(s.shadow.size / s.shadow.block)
	if s.told.most > room {
		// So the capacity is not what was said.
		room = s.told.most
		if !s.told.evicts {
			room = math.MaxInt
		}
	}
	wanted := s.tree.blocks[expected] + int((s.shadow.wanted+s.shadow.block-1)/s.shadow.block)
	s.tree.foresee(max(0, s.told.gpu+wanted-room))
}

// doubt takes away what events have told of a block on the GPU, as the shadow
// evicts it, in a slot where what they tell has proved wrong.
func (s *slot) doubt(r ref) {
	t := &s.tree
	if s.state != Mismatched || t.isSpare(r) {
		return
	}
	// It is guessed, so it is held as before.
	if t.zero(r, reason(GPU)) {
		t.blocks[GPU]--
		s.told.doubted = true
	}
}

// makeRoom gives up some blocks of the slot that holds the most, or one of s
// itself where that is in use by another goroutine, and returns how many. The
// mutex of s is held.
func (x *Index) makeRoom(s *slot) int {
	s.size.Store(int64(s.tree.records))
	most := s
	for _, o := range *x.slots.Load() {
		// s goes before another that holds little more: it can use at once
		// what it gives up.
		if o != nil && o != s && o.size.Load() > most.size.Load()+2*batchRecords {
			most = o
		}
	}
	if most == s {
		// Not so many that little would be left.
		return s.giveUp(min(batchRecords, s.tree.records/8+1))
	}
	if most.mu.TryLock() {
		if most.gone {
			most.mu.Unlock() // its tree is being closed
			return s.giveUp(1)
		}
		n := most.giveUp(batchRecords)
		most.unlock()
		if n > 0 {
			return n
		}
	}
	return s.giveUp(1)
}

// giveUp drops up to n blocks: those that the shadow would evict next, then
// those that events have told. It returns how many.
func (s *slot) giveUp(n int) int {
	for i := range n {
		if s.shadow.giveUp(s) {
			continue
		}
		if !s.tree.giveUp() {
			return i
		}
		s.short = true
	}
	return n
}

// Prompt is what the index needs of a prompt. The caller owns its memory, and
// may reuse it after each call.
type Prompt struct {
	// Root is what the chain begins with. The zero value will do; then what was
	// generated behind prompts shorter than a block is not known again.
	Root Hash
	// Chain are the hashes of the full blocks of Block tokens, or of TextBlock
	// bytes of text.
	Chain []Hash
	// IDs are its tokens, and nil when only its text is known.
	IDs   []uint32
	Block int
}

// Cached is how many tokens the engine will take from its cache, when it holds
// so much of the prompt: full blocks, and never the prompt's last token, which
// is computed in any case (vLLM's and SGLang's rule). Of text it is unknown, 0.
func (p *Prompt) Cached(h Held) int { return p.CachedBlocks(h[Tiers-1]) }

// CachedBlocks is Cached where so many blocks are held.
func (p *Prompt) CachedBlocks(n int32) int {
	if len(p.IDs) == 0 || p.Block < 1 {
		return 0
	}
	if tokens := int(n) * p.Block; tokens < len(p.IDs) { // mostly so, without a division
		return tokens
	}
	return (len(p.IDs) - 1) / p.Block * p.Block
}

// Held is how many leading blocks of a prompt a slot holds, by tier: in that
// one and the faster ones together. So the numbers do not fall.
type Held [Tiers]int32

// Lookup is the answer for one prompt at all slots, and the memory for it. A
// request keeps one and uses it again; it is not for several goroutines. The
// zero value is ready for Look.
type Lookup struct {
	prompt *Prompt
	slots  []*slot
	depth  []int32 // by lane
}

// Look finds what every slot holds of the prompt, which must stay as it is while
// l is asked. It waits for no writer and allocates only to grow l.
func (x *Index) Look(l *Lookup, p *Prompt) {
	l.prompt, l.slots = p, *x.slots.Load()
	n := int(x.lanes.n.Load())
	l.depth = slices.Grow(l.depth[:0], n)[:n]
	clear(l.depth)
	x.table.match(l.depth, p.Chain)
}

// Held is what a slot holds of the prompt looked up.
func (l *Lookup) Held(number int) (h Held) {
	l.HeldAt(&h, number)
	return h
}

// HeldAt sets h, which is zero, to what Held is: who asks for all slots in turn saves
// the time that copying it takes.
func (l *Lookup) HeldAt(h *Held, number int) {
	if number < 0 || number >= len(l.slots) || l.slots[number] == nil {
		return
	}
	s := l.slots[number]
	lanes, depth := s.tree.lane.packed.Load(), int32(0)
	for tier := range h {
		// A lane may have been made since Look.
		if n := int(uint16(lanes)); n != 0 && n <= len(l.depth) {
			depth = max(depth, l.depth[n-1])
		}
		lanes >>= 16
		h[tier] = depth
	}
	if s.shadow.answers.some() {
		s.shadow.beyond(l.prompt, h)
	}
}

// Exact reports that a slot is in the state Exact.
func (l *Lookup) Exact(number int) bool {
	return number >= 0 && number < len(l.slots) && l.slots[number] != nil && l.slots[number].exact.Load()
}

// SlotStats is what there is to say of a slot.
type SlotStats struct {
	Slot     int
	State    State
	Why      string
	Blocks   [Tiers]int // by the tier that events have told
	Guessed  int        // blocks that its engine is taken to hold
	Expected int        // blocks on their way
	Capacity int        // in blocks
	Block    int        // tokens in a block
	Bytes    int64      // of the tree's records
	Claims   int        // in flight
	Resets   int        // how often it was forgotten
	Audited  Audited
}

// Stats appends what there is to say of each slot.
func (x *Index) Stats(dst []SlotStats) []SlotStats {
	for number := range *x.slots.Load() {
		s := x.lock(number)
		if s == nil {
			continue
		}
		st := SlotStats{
			Slot: number, State: s.state, Why: s.why,
			Guessed: s.tree.blocks[guessed], Expected: s.tree.blocks[expected],
			Capacity: s.config.Capacity, Block: s.config.BlockSize,
			Bytes:  int64(s.tree.records) * recordBytes,
			Claims: s.claims, Resets: s.resets, Audited: s.audit.Audited,
		}
		copy(st.Blocks[:], s.tree.blocks[:Tiers])
		if s.short && s.state == Exact {
			st.State, st.Why = Approximate, "index.max_bytes is too small"
		} else if why := s.told.inexact(); why != "" && s.state == Exact {
			st.State, st.Why = Approximate, why
		}
		s.unlock()
		dst = append(dst, st)
	}
	return dst
}

// Totals is what there is to say of the whole index.
type Totals struct {
	Slots   int
	Entries int64 // blocks, counted at each slot that has a record of them
	Bytes   int64 // the memory held
	Limit   int64 // Config.MaxBytes
	Resets  int64 // how often slots were forgotten
}

// Totals waits for nobody.
func (x *Index) Totals() Totals {
	t := Totals{Bytes: x.arena.bytes(), Limit: x.config.MaxBytes, Resets: x.resets.Load()}
	for _, s := range *x.slots.Load() {
		if s != nil {
			t.Slots++
			t.Entries += s.size.Load()
		}
	}
	return t
}
