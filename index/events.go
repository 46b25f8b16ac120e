package index

import (
	"encoding/binary"
	"errors"
	"strconv"
	"strings"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/inferrail/inferrail/index/kvevent"
)

// told is what a slot's engine has told by events: the engine's names of blocks,
// and how often it holds each and where. The mutex of the slot guards it. The
// zero value has been told nothing.
//
// The tree holds a block once for each time it was told to be stored and not
// removed since. Engines count these apart by medium, locality and ownership: a
// residency. Nearly always each tier has one only, and the tree's count is its;
// of further ones, sides has the counts.
//
// A name stays for as long as the record of its block does, so that what is
// stored behind a block that is not held itself can be entered.
type told struct {
	names       names
	group       int         // the KV cache group that counts
	chosen      chosen      // how it was chosen
	residencies []residency // of each tier the first, and then others
	sides       map[side]uint32
	others      map[uint64]uint32 // the sums of sides, by ref<<8 | tier
	aliases     map[uint64]ref    // second names of blocks
	lasting     []uint64          // names stored where no removals are told, the oldest first
	forgotten   int               // of lasting, those that were seen to
	stats       Told
	gpu, most   int    // copies of blocks on the GPU, and the most there were
	evicts      bool   // blocks have been told to be removed from there
	orphaned    bool   // there were orphans since the GPU was empty
	doubted     bool   // slot.doubt has taken something away since then
	hybrid      bool   // there are groups that do not count
	counted     int64  // bytes of all this that the arena was told of
	buf         []byte // for mixed
	kept        []ref  // by keep, during a batch
	chain       []Hash // for stored
}

// chosen is how the group that counts was chosen.
type chosen uint8

const (
	byNothing chosen = iota
	byOrder          // it was the first that was told of
	byKind           // its kind is one whose blocks are all needed
)

// residency is where an engine says that it keeps blocks.
type residency struct {
	medium, locality, ownership string
	tier                        Tier
	first                       bool // of its tier
}

// side is a name at a residency.
type side struct {
	name      uint64
	residency uint8
}

const (
	maxResidencies = 16
	maxAliases     = 1024
	// sideBytes is about what an entry of sides, others or aliases takes.
	sideBytes = 48
)

// Told counts what the events of a slot have said, since it joined.
type Told struct {
	// BlockSize is how many tokens a block of the engine has, 0 when no event has
	// said so. Prompts hashed with another find nothing.
	BlockSize int
	// Stored and Removed are blocks entered and taken out.
	Stored, Removed uint64
	// Orphans were stored behind a block that is not known, and are passed over.
	// When all events have been applied from the first on, there are none: the
	// engine holds more than is known.
	Orphans uint64
	// Unknown are removals of blocks that are not held, and stores that do not say
	// of what and whose block is not known.
	Unknown uint64
	// OtherGroups are of KV cache groups that do not count. A slot that has any is
	// of a hybrid model: a prefix is of use to the engine only when these hold
	// their part of it, too.
	OtherGroups uint64
	// Malformed are blocks whose tokens are not as many as they should be.
	Malformed uint64
	// NoMemory are blocks that there was no memory for.
	NoMemory uint64
}

// Apply enters what the events of one batch say of the slot, and returns what
// they all have said until now. They must come in the order in which the engine
// has made them.
//
// Between some blocks and others those who wait for the slot have their turn, so
// that no claim waits for a large batch.
func (x *Index) Apply(slot int, events []kvevent.Event, now time.Time) (t Told) {
	from, n := 0, 0
	for i := range events {
		if i > 0 && undescribed(&events[i]) {
			return x.apply(slot, events) // what keep keeps, it does for all of them
		}
		n += 1 + len(events[i].Hashes)
	}
	if n <= 2*portion {
		return x.apply(slot, events)
	}
	n = 0
	for i := range events {
		blocks := len(events[i].Hashes)
		if blocks > 2*portion {
			x.apply(slot, events[from:i])
			t = x.applyPieces(slot, &events[i])
			from, n = i+1, 0
		} else if n += 1 + blocks; n > portion {
			t = x.apply(slot, events[from:i+1])
			from, n = i+1, 0
		}
	}
	if from < len(events) {
		t = x.apply(slot, events[from:])
	}
	return t
}

// undescribed: it stores blocks without saying of what.
func undescribed(e *kvevent.Event) bool { return e.Kind == kvevent.Stored && len(e.Tokens) == 0 }

// portion is about how many blocks are entered or taken out before others have
// their turn: they take some ten microseconds.
const portion = 64

// applyPieces applies an event of many blocks as several of fewer.
func (x *Index) applyPieces(slot int, e *kvevent.Event) (t Told) {
	var piece [1]kvevent.Event
	p := &piece[0]
	stored := e.Kind == kvevent.Stored
	if stored && (e.BlockSize < 1 || len(e.Tokens) != e.BlockSize*len(e.Hashes)) {
		piece[0] = *e // it is malformed
		return x.apply(slot, piece[:])
	}
	missing := x.Told(slot).NoMemory
	for from := 0; from < len(e.Hashes); from += portion {
		to := min(from+portion, len(e.Hashes))
		*p = *e
		p.Hashes = e.Hashes[from:to]
		if stored {
			p.Tokens = e.Tokens[from*e.BlockSize : to*e.BlockSize]
			p.Extra = e.Extra[min(from, len(e.Extra)):min(to, len(e.Extra))]
			if from > 0 {
				p.Parent, p.HasParent = e.Hashes[from-1], true
			}
		}
		if t = x.apply(slot, piece[:]); t.NoMemory != missing {
			break // there is none for the others either
		}
	}
	return t
}

func (x *Index) apply(slot int, events []kvevent.Event) Told {
	s := x.lock(slot)
	if s == nil {
		return Told{}
	}
	defer s.giveTurn()
	s.told.keep(s, events)
	s.shadow.silent = 0
	touched := 0
	for i := range events {
		switch e := &events[i]; e.Kind {
		case kvevent.Stored:
			s.told.stored(s, e)
		case kvevent.Removed:
			if i >= touched {
				touched = i + s.told.touch(&s.tree, events[i:])
			}
			s.told.removed(s, e)
		case kvevent.Cleared:
			s.told.demote(s)
			if s.tree.blocks[guessed] > 0 {
				// It holds nothing of that either. Claims point to what goes.
				s.told.unkeep(s)
				s.epoch, s.claims = x.epochs.Add(1), 0
				s.shadow.abandon(s)
			}
		}
	}
	s.told.unkeep(s)
	s.told.account(s)
	s.foresee()
	return s.told.stats
}

// keep keeps the records of blocks that the batch stores without saying of what.
// In a batch what happens on the GPU comes before what connectors tell of other
// tiers, so the block may have been removed there just before. unkeep ends it.
func (d *told) keep(s *slot, events []kvevent.Event) {
	for i := range events {
		e := &events[i]
		if i == 0 || !undescribed(e) {
			continue
		}
		for _, name := range e.Hashes {
			if r := d.find(&s.tree, name); r != 0 {
				s.tree.hold(r, pinned)
				d.kept = append(d.kept, r)
			}
		}
	}
}

func (d *told) unkeep(s *slot) {
	for _, r := range d.kept {
		s.tree.release(r, pinned)
	}
	d.kept = d.kept[:0]
}

// Untell forgets all that events have told of a slot: what it holds is about to
// be told anew. When its engine has restarted, Forget is the one to call.
func (x *Index) Untell(slot int) {
	s := x.lock(slot)
	if s == nil {
		return
	}
	defer s.unlock()
	s.told.untell(s)
}

func (d *told) untell(s *slot) {
	d.reset(s)
	s.short = false
	for tier := range reason(Tiers) {
		s.tree.clear(tier)
	}
}

// Told is what the events of a slot have said.
func (x *Index) Told(slot int) Told {
	s := x.lock(slot)
	if s == nil {
		return Told{}
	}
	defer s.unlock()
	return s.told.stats
}

// stored enters blocks.
func (d *told) stored(s *slot, e *kvevent.Event) {
	if !d.counts(s, e.Group, e.Spec) {
		d.stats.OtherGroups += uint64(len(e.Hashes))
		d.hybrid = true
		return
	}
	t, size := &s.tree, e.BlockSize
	where := d.residency(e)
	described := len(e.Tokens) > 0
	if described && (size < 1 || len(e.Tokens) != size*len(e.Hashes)) {
		d.stats.Malformed += uint64(len(e.Hashes))
		described = false
	}
	var at ref
	var before Hash
	switch {
	case !described:
	case e.HasParent:
		if at = d.find(t, e.Parent); at != 0 {
			t.stay(at)
			before = t.hash(at)
		}
	default:
		before = d.root(s, e)
	}
	d.chain = d.chain[:0]
	if described {
		d.stats.BlockSize = max(d.stats.BlockSize, size)
		if before != (Hash{}) {
			d.chain = d.hashes(d.chain, before, e)
		}
		// As touch does.
		for i, name := range e.Hashes {
			if d.names.n > 0 {
				t.fetched += uint64(d.names.cells[d.names.home(name)])
			}
			if i < len(d.chain) {
				t.fetch(d.chain[i])
			}
		}
	}
	start := before
	for i, name := range e.Hashes {
		r := d.find(t, name)
		if r == 0 {
			switch {
			case !described:
				d.stats.Unknown++
				continue
			case before == Hash{}:
				d.stats.Orphans++
				d.orphaned = true
				continue
			}
			// Nearly always the blocks are the chain. Of a name that is known, the
			// block may be another.
			var h Hash
			if i < len(d.chain) && (i == 0 && before == start || i > 0 && before == d.chain[i-1]) {
				h = d.chain[i]
			} else {
				h = d.next(before, e, i)
			}
			if r = t.add(at, h); r == 0 {
				d.stats.NoMemory += uint64(len(e.Hashes) - i)
				s.short = true
				return
			}
			if !d.name(t, name, r) {
				t.drop(r)
				d.stats.Malformed++
				before = Hash{}
				continue
			}
		}
		d.stats.Stored++
		if at != 0 && s.state == Exact && t.at(r).state&otherBits == 0 {
			// It was generated: what follows the request goes on to it.
			t.moveSpare(at, r)
		}
		d.hold(s, name, r, where)
		at, before = r, t.hash(r)
	}
}

// touch reads what the removals that events begin with will change, so that the
// processor waits for many places of memory at a time and not for one after the
// other. It returns how many events it has looked at.
func (d *told) touch(t *tree, events []kvevent.Event) (n int) {
	var refs [64]ref
	found := 0
	for n < len(events) && events[n].Kind == kvevent.Removed && found < len(refs) {
		for _, name := range events[n].Hashes {
			if found < len(refs) && d.names.n > 0 {
				refs[found] = d.names.cells[d.names.home(name)]
				found++
			}
		}
		n++
	}
	// A cell may be another name's; then little is lost.
	var hashes [64]Hash
	for i, r := range refs[:found] {
		if r != 0 {
			hashes[i] = t.at(r).hash()
		}
	}
	for _, h := range hashes[:found] {
		t.fetch(h)
	}
	return max(n, 1)
}

// removed takes blocks out.
func (d *told) removed(s *slot, e *kvevent.Event) {
	if e.Group >= 0 && d.chosen != byNothing && e.Group != d.group {
		d.stats.OtherGroups += uint64(len(e.Hashes))
		return
	}
	t := &s.tree
	where := d.residency(e)
	gpu := d.residencies[where].tier == GPU
	for _, name := range e.Hashes {
		r := d.find(t, name)
		if r == 0 {
			d.stats.Unknown++
			continue
		}
		guess := gpu && t.holds(r, guessed) > 0
		if d.release(s, name, r, where) {
			d.stats.Removed++
		} else {
			d.stats.Unknown++
		}
		// What is told goes before what is guessed.
		if guess && t.holds(r, reason(GPU)) == 0 && t.linked(&s.shadow.queue, r) {
			s.shadow.evict(s, r)
			s.shadow.account(t)
		}
	}
}

// demote takes away what was told to be on the GPU, and keeps the names: some of
// it is not true any more, and not known which, and nothing would ever correct
// it. The shadow has taken it as guesses, which go when the engine has had as many
// others. Of the other tiers there are no guesses, so they stay as they were told.
// And a cleared GPU holds nothing.
func (d *told) demote(s *slot) {
	for k := range d.sides {
		if d.residencies[k.residency].tier == GPU {
			delete(d.sides, k)
		}
	}
	for k := range d.others {
		if Tier(k&0xff) == GPU {
			delete(d.others, k)
		}
	}
	s.tree.clear(reason(GPU))
	d.orphaned, d.doubted, d.gpu = false, false, 0
}

// recount counts the copies on the GPU anew.
func (d *told) recount(s *slot) {
	t := &s.tree
	d.gpu = 0
	for r := t.following(t.top); r != t.top; r = t.following(r) {
		d.gpu += t.holds(r, reason(GPU))
		t.at(r).state &^= comingBit
	}
	d.most = max(d.most, d.gpu)
}

// inexact says why what is held is not exact though all events have been applied;
// it is empty where it is.
func (d *told) inexact() string {
	switch {
	case d.orphaned:
		return "the engine stores blocks behind others that it has not told of"
	case d.doubted:
		return "some of what its events told was given up while they were not believed"
	case d.hybrid:
		return "a hybrid model: only the blocks of full attention are looked at"
	}
	return ""
}

// root is what the chain of a prompt's first block begins with.
func (d *told) root(s *slot, e *kvevent.Event) Hash {
	adapter := e.Adapter
	if adapter == "" && e.AdapterID >= 0 {
		// Its name is not known, so no prompt can ask for it.
		adapter = "\x00" + strconv.FormatInt(e.AdapterID, 10)
	}
	d.buf = append(d.buf[:0], e.Salt...)
	return Root(s.config.Model, adapter, d.buf)
}

// hashes appends the hashes of the event's blocks behind one.
func (d *told) hashes(dst []Hash, before Hash, e *kvevent.Event) []Hash {
	if len(e.Extra) == 0 {
		return AppendTokens(dst, before, e.Tokens, e.BlockSize)
	}
	for i := range e.Hashes {
		before = d.next(before, e, i)
		dst = append(dst, before)
	}
	return dst
}

// next is the hash of one block of the event behind another.
func (d *told) next(before Hash, e *kvevent.Event, i int) Hash {
	h := Next(before, e.Tokens[i*e.BlockSize:(i+1)*e.BlockSize])
	if i < len(e.Extra) && len(e.Extra[i]) > 0 {
		h = d.mixed(h, e.Extra[i])
	}
	return h
}

// extraSeed sets the hashes of blocks with extra keys apart.
const extraSeed = 0x6578747261736565

// mixed is the hash of a block whose content depends on more than its tokens, as
// on an image. No block of tokens alone has it, nor one behind another such.
func (d *told) mixed(h Hash, keys []kvevent.Key) Hash {
	b := d.buf[:0]
	for _, k := range keys {
		b = binary.LittleEndian.AppendUint64(b, uint64(len(k.Text)))
		b = append(b, k.Text...)
		b = binary.LittleEndian.AppendUint64(b, k.Digest)
	}
	d.buf = b
	m := xxh3.Hash128Seed(b, h.Lo^extraSeed)
	return Hash{m.Hi + h.Hi*spread, m.Lo}
}

// counts tells whether the blocks of a group count. One group does: the first
// that is told to have full attention, of which every block of a prefix is needed.
// Where no kind is told, it is the first of all.
func (d *told) counts(s *slot, group int, kind string) bool {
	if group < 0 {
		return true
	}
	full := kind == "full_attention" || kind == "mla_attention" || kind == "sink_full_attention"
	switch {
	case kind != "" && !full:
		if d.chosen != byOrder || d.group != group {
			return false
		}
		d.untell(s)
		return false
	case d.chosen == byNothing:
	case d.group == group:
		if full {
			d.chosen = byKind
		}
		return true
	case !full || d.chosen == byKind:
		return false
	default:
		d.untell(s)
	}
	d.group, d.chosen = group, byOrder
	if full {
		d.chosen = byKind
	}
	return true
}

// tierOf is the tier that a medium is of. Whatever is not known is slow.
func tierOf(medium, locality string) Tier {
	tier := Remote
	switch medium {
	case "", "gpu":
		return GPU
	case "cpu", "cpu_pinned", "host":
		tier = CPU
	case "disk", "storage", "fs":
		tier = Disk
	}
	if strings.EqualFold(locality, "remote") {
		return Remote
	}
	return tier
}

// residency is the number of the one that an event is about.
func (d *told) residency(e *kvevent.Event) uint8 {
	for i := range d.residencies {
		if o := &d.residencies[i]; o.medium == e.Medium && o.locality == e.Locality && o.ownership == e.Ownership {
			return uint8(i)
		}
	}
	tier := tierOf(e.Medium, e.Locality)
	first := true
	for i := range d.residencies {
		if d.residencies[i].tier == tier {
			if first = false; len(d.residencies) >= maxResidencies-int(Tiers) {
				// More than any engine has. Each tier keeps one place.
				return uint8(i)
			}
		}
	}
	const most = 64
	cut := func(s string) string { return strings.Clone(s[:min(len(s), most)]) }
	d.residencies = append(d.residencies, residency{cut(e.Medium), cut(e.Locality), cut(e.Ownership), tier, first})
	return uint8(len(d.residencies) - 1)
}

// find is the record of a name, 0 if there is none.
func (d *told) find(t *tree, name uint64) ref {
	if r := d.names.find(t, name); r != 0 || len(d.aliases) == 0 {
		return r
	}
	return d.aliases[name]
}

// name gives a record a name. One that has another gets a second one: an adapter
// that was loaded again from another place has the same name for us, and others
// for the engine. It reports false when there are too many of these.
func (d *told) name(t *tree, name uint64, r ref) bool {
	if d.names.find(t, t.at(r).toldName()) != r {
		d.names.insert(t, name, r)
		return true
	}
	if len(d.aliases) >= maxAliases {
		return false
	}
	if d.aliases == nil {
		d.aliases = map[uint64]ref{}
	}
	d.aliases[name] = r
	return true
}

// apart tells whether the count of a name at a residency is in sides.
func (d *told) apart(name uint64, where uint8) bool {
	if !d.residencies[where].first {
		return true
	}
	if len(d.aliases) == 0 {
		return false
	}
	_, alias := d.aliases[name]
	return alias
}

// count is how often a name is held at a residency.
func (d *told) count(t *tree, name uint64, r ref, where uint8) int {
	if d.apart(name, where) {
		return int(d.sides[side{name, where}])
	}
	tier := d.residencies[where].tier
	n := t.holds(r, reason(tier))
	if len(d.others) > 0 {
		n -= int(d.others[uint64(r)<<8|uint64(tier)])
	}
	return n
}

// hold holds a block once more. Of disks and what is further away, engines tell
// no removals, or tell what they hold again: there, a block is held or not.
func (d *told) hold(s *slot, name uint64, r ref, where uint8) {
	t, tier := &s.tree, d.residencies[where].tier
	if tier >= Disk {
		if d.count(t, name, r, where) > 0 {
			return
		}
		d.lasting = append(d.lasting, name)
	}
	t.hold(r, reason(tier))
	if d.apart(name, where) {
		if d.sides == nil {
			d.sides, d.others = map[side]uint32{}, map[uint64]uint32{}
		}
		d.sides[side{name, where}]++
		d.others[uint64(r)<<8|uint64(tier)]++
	}
	switch {
	case tier == GPU:
		d.gpu++
		d.most = max(d.most, d.gpu)
		t.release(r, expected)
		s.shadow.comes(t, r)
	case tier >= Disk:
		d.outlive(s)
	}
}

// release takes away one hold, and reports whether there was one.
func (d *told) release(s *slot, name uint64, r ref, where uint8) bool {
	t, tier := &s.tree, d.residencies[where].tier
	if d.count(t, name, r, where) < 1 {
		return false
	}
	if d.apart(name, where) {
		subtract(d.sides, side{name, where})
		subtract(d.others, uint64(r)<<8|uint64(tier))
	}
	if tier == GPU {
		d.gpu--
		d.evicts = true
	}
	return t.release(r, reason(tier))
}

func subtract[K comparable](counts map[K]uint32, k K) {
	if n := counts[k]; n > 1 {
		counts[k] = n - 1
	} else {
		delete(counts, k)
	}
}

// lastingBlocks is how many blocks are remembered where no removals are told, as
// a multiple of the blocks on the GPU.
//
// An engine's disks and what is further away are larger than its GPU, and nobody
// tells how large, nor what is deleted there. What cleans them up goes by age, and
// so does this: a block goes when so many others were stored behind it. What is
// remembered beyond what is there costs little: a block that is not there is
// computed, as it would have been. How much of it there is, index.max_bytes
// bounds in any case.
const lastingBlocks = 16

// outlive forgets the oldest blocks of lasting beyond the bound.
func (d *told) outlive(s *slot) {
	most := max(lastingBlocks*s.config.Capacity, 1<<16)
	for len(d.lasting)-d.forgotten > most {
		name := d.lasting[d.forgotten]
		d.forgotten++
		for where := range d.residencies {
			if d.residencies[where].tier < Disk {
				continue
			}
			if r := d.find(&s.tree, name); r != 0 {
				d.release(s, name, r, uint8(where))
			}
		}
	}
	if d.forgotten > len(d.lasting)/2 {
		d.lasting = d.lasting[:copy(d.lasting, d.lasting[d.forgotten:])]
		d.forgotten = 0
	}
}

// dropped forgets the names of a record that the tree has dropped.
func (d *told) dropped(t *tree, r ref) {
	if d.names.n == 0 {
		return
	}
	name := t.at(r).toldName()
	if d.names.find(t, name) != r {
		return
	}
	d.names.remove(t, name)
	d.forget(r, name)
	for alias, of := range d.aliases {
		if of == r {
			delete(d.aliases, alias)
			d.forget(r, alias)
		}
	}
}

// forget takes away the counts of a name.
func (d *told) forget(r ref, name uint64) {
	if len(d.sides) == 0 {
		return
	}
	for where := range d.residencies {
		delete(d.sides, side{name, uint8(where)})
	}
	for tier := range uint64(Tiers) {
		delete(d.others, uint64(r)<<8|tier)
	}
}

// reset forgets all names; the tree is emptied by the caller.
func (d *told) reset(s *slot) {
	*d = told{stats: d.stats, counted: d.counted, buf: d.buf, kept: d.kept, chain: d.chain}
	d.stats.BlockSize = 0
	d.account(s)
}

// account tells the arena what is held beside records.
func (d *told) account(s *slot) {
	n := 4*int64(len(d.names.cells)) + 8*int64(cap(d.lasting)) + sideBytes*int64(len(d.sides)+len(d.others)+len(d.aliases))
	if n != d.counted {
		s.tree.arena.count(n - d.counted)
		d.counted = n
	}
}

// names finds the records of a tree by the names that the engine has for them,
// which are in the records. It is a table with open addressing, of 4 bytes a
// cell. The zero value is empty.
type names struct {
	cells []ref
	n     int
}

// home is the cell that a name should be in.
func (n *names) home(name uint64) uint32 {
	return uint32((name * spread >> 32) * uint64(len(n.cells)) >> 32)
}

func (n *names) find(t *tree, name uint64) ref {
	if n.n == 0 {
		return 0
	}
	for i := n.home(name); ; {
		r := n.cells[i]
		if r == 0 || t.at(r).toldName() == name {
			return r
		}
		if i++; i == uint32(len(n.cells)) {
			i = 0
		}
	}
}

// insert gives a record a name, which is not there. The cells are never more than
// half full: each that is passed over is a record to be read.
func (n *names) insert(t *tree, name uint64, r ref) {
	if 2*(n.n+1) > len(n.cells) {
		n.resize(t, max(64, len(n.cells)*3/2))
	}
	t.at(r).setToldName(name)
	n.put(name, r)
	n.n++
}

// reserve makes room for so many names. Names that come in the order of another
// table need it: in a smaller one they would all lie side by side.
func (n *names) reserve(t *tree, most int) {
	if 2*most > len(n.cells) {
		n.resize(t, max(64, 2*most))
	}
}

func (n *names) put(name uint64, r ref) {
	i := n.home(name)
	for n.cells[i] != 0 {
		if i++; i == uint32(len(n.cells)) {
			i = 0
		}
	}
	n.cells[i] = r
}

func (n *names) resize(t *tree, size int) {
	old := n.cells
	n.cells = make([]ref, size)
	for _, r := range old {
		if r != 0 {
			n.put(t.at(r).toldName(), r)
		}
	}
}

// remove takes out a name that is there, and moves those behind it up.
func (n *names) remove(t *tree, name uint64) {
	size := uint32(len(n.cells))
	i := n.home(name)
	for t.at(n.cells[i]).toldName() != name {
		if i++; i == size {
			i = 0
		}
	}
	for j := i; ; {
		if j++; j == size {
			j = 0
		}
		o := n.cells[j]
		if o == 0 {
			break
		}
		// It may move to i unless its home is behind i, up to j.
		if home := n.home(t.at(o).toldName()); (j+size-home)%size >= (j+size-i)%size {
			n.cells[i] = o
			i = j
		}
	}
	n.cells[i] = 0
	if n.n--; size > 64 && 8*n.n < int(size) {
		n.resize(t, max(64, int(size)/4))
	}
}

// appendSnapshot appends what a warm restart needs of what events have told:
//
//	the group and how it was chosen, the block size, what makes it inexact
//	the residencies: count; of each its three words
//	the names: count; of each the number of its record and the name
//	the aliases: likewise
//	the sides: count; of each its name, residency and count
//	lasting: count and names
//
// Names are 8 bytes, the rest are varints.
func (d *told) appendSnapshot(dst []byte, s *slot, number func(ref) uint32) []byte {
	t := &s.tree
	dst = binary.AppendUvarint(dst, uint64(d.group))
	dst = binary.AppendUvarint(dst, uint64(d.chosen))
	dst = binary.AppendUvarint(dst, uint64(d.stats.BlockSize))
	inexact := uint64(0)
	if d.orphaned {
		inexact |= toldOrphaned
	}
	if d.hybrid {
		inexact |= toldHybrid
	}
	if d.doubted {
		inexact |= toldDoubted
	}
	dst = binary.AppendUvarint(dst, inexact)
	dst = binary.AppendUvarint(dst, uint64(len(d.residencies)))
	for _, o := range d.residencies {
		dst = appendString(appendString(appendString(dst, o.medium), o.locality), o.ownership)
	}
	named := 0
	for _, r := range d.names.cells {
		if r != 0 && number(r) != 0 {
			named++
		}
	}
	dst = binary.AppendUvarint(dst, uint64(named))
	for _, r := range d.names.cells {
		if r != 0 && number(r) != 0 {
			dst = binary.AppendUvarint(dst, uint64(number(r)))
			dst = binary.LittleEndian.AppendUint64(dst, t.at(r).toldName())
		}
	}
	dst = binary.AppendUvarint(dst, uint64(len(d.aliases)))
	for name, r := range d.aliases {
		dst = binary.AppendUvarint(dst, uint64(number(r)))
		dst = binary.LittleEndian.AppendUint64(dst, name)
	}
	dst = binary.AppendUvarint(dst, uint64(len(d.sides)))
	for k, n := range d.sides {
		dst = binary.LittleEndian.AppendUint64(dst, k.name)
		dst = binary.AppendUvarint(dst, uint64(k.residency))
		dst = binary.AppendUvarint(dst, uint64(n))
	}
	lasting := d.lasting[d.forgotten:]
	dst = binary.AppendUvarint(dst, uint64(len(lasting)))
	for _, name := range lasting {
		dst = binary.LittleEndian.AppendUint64(dst, name)
	}
	return dst
}

// What makes it inexact, in a snapshot.
const (
	toldOrphaned = 1 << iota
	toldHybrid
	toldDoubted
)

var errToldSnapshot = errors.New("what events have told: damaged")

// restore reads that again. Records that there was no memory for are left out.
func (d *told) restore(s *slot, data []byte, record func(uint32) ref) error {
	if len(data) == 0 {
		return nil
	}
	t := &s.tree
	r := snapshotReader{rest: data}
	name := func() uint64 {
		if len(r.rest) < 8 {
			r.fail()
			return 0
		}
		b := r.rest[:8]
		r.rest = r.rest[8:]
		return binary.LittleEndian.Uint64(b)
	}
	d.group = int(r.number(1 << 31))
	d.chosen = chosen(r.number(uint64(byKind)))
	d.stats.BlockSize = int(r.number(1 << 31))
	inexact := r.number(toldOrphaned | toldHybrid | toldDoubted)
	d.orphaned, d.hybrid, d.doubted = inexact&toldOrphaned != 0, inexact&toldHybrid != 0, inexact&toldDoubted != 0
	for range r.number(maxResidencies) {
		e := kvevent.Event{Medium: string(r.bytes()), Locality: string(r.bytes()), Ownership: string(r.bytes())}
		d.residency(&e)
	}
	named := r.number(uint64(len(r.rest) / 9))
	d.names.reserve(t, min(int(named), t.records))
	for range named {
		at := record(uint32(r.number(1<<32 - 1)))
		n := name()
		if r.err != nil {
			break
		}
		if at == 0 || t.isSpare(at) {
			continue
		}
		if d.names.find(t, n) != 0 || d.names.find(t, t.at(at).toldName()) == at {
			return errToldSnapshot
		}
		d.names.insert(t, n, at)
	}
	for range r.number(uint64(min(maxAliases, len(r.rest)/9))) {
		at := record(uint32(r.number(1<<32 - 1)))
		n := name()
		if r.err == nil && at != 0 && !t.isSpare(at) && (d.find(t, n) != 0 || !d.name(t, n, at)) {
			return errToldSnapshot
		}
	}
	for range r.number(uint64(len(r.rest) / 10)) {
		k := side{name(), uint8(r.number(maxResidencies - 1))}
		n := uint32(r.number(maxCount))
		if r.err != nil {
			break
		}
		at := d.find(t, k.name)
		if at == 0 {
			continue
		}
		if int(k.residency) >= len(d.residencies) || !d.apart(k.name, k.residency) || n == 0 || d.sides[k] != 0 {
			return errToldSnapshot
		}
		if d.sides == nil {
			d.sides, d.others = map[side]uint32{}, map[uint64]uint32{}
		}
		tier := d.residencies[k.residency].tier
		key := uint64(at)<<8 | uint64(tier)
		if int(d.others[key]+n) > t.holds(at, reason(tier)) {
			return errToldSnapshot
		}
		d.sides[k] = n
		d.others[key] += n
	}
	for range r.number(uint64(len(r.rest) / 8)) {
		d.lasting = append(d.lasting, name())
	}
	if r.err != nil || len(r.rest) > 0 {
		return errToldSnapshot
	}
	d.account(s)
	return nil
}
