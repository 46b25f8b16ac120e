package simulator

import (
	"container/list"
	"slices"

	"github.com/inferrail/inferrail/index/kvevent"
)

// blockPool is vLLM's KV cache of one full-attention model: blocks of equal
// size, a queue of those that no sequence has, and a table of the full ones by
// name.
//
// A full block comes into the table as soon as it is to be computed, and stays
// there, in the queue, when its sequence has ended, until the queue hands it
// out again. Blocks of the same name are not merged; the oldest is found.
type blockPool struct {
	naming naming
	// shares: full blocks come into the table.
	shares bool
	// blocks[0] is never handed out, as vLLM keeps one for other uses. Here it
	// is also where the queue begins and ends.
	blocks []poolBlock
	free   int // in the queue
	named  map[BlockName]int32
	// host is a copy of full blocks in the host's memory, where they stay longer.
	host hostTier
	// changed is kept when told is set.
	told    bool
	changed []Change
}

// hostTier is the memory of the host, with room for so many blocks: those that were
// copied or wanted last.
type hostTier struct {
	room   int
	blocks map[BlockName]*list.Element
	// order has the names, the one that was used last first.
	order list.List
}

// has reports whether a block is there, and counts as use.
func (h *hostTier) has(name BlockName) bool {
	e, ok := h.blocks[name]
	if ok {
		h.order.MoveToFront(e)
	}
	return ok
}

// offload copies the full blocks of the first so many tokens of s to the host.
func (p *blockPool) offload(s *Sequence, tokens int) {
	h := &p.host
	full := min(tokens/p.naming.block, s.shared)
	if h.room == 0 || full <= s.offloaded {
		return
	}
	first := -1 // of those that are new
	for i := s.offloaded; i <= full; i++ {
		fresh := i < full && !h.has(s.names[i])
		if !fresh {
			if p.told && first >= 0 {
				p.changed = append(p.changed, p.naming.stored(s, first, i, mediumCPU))
			}
			first = -1
			continue
		}
		if first < 0 {
			first = i
		}
		if len(h.blocks) == h.room {
			last := h.order.Back()
			name := h.order.Remove(last).(BlockName)
			delete(h.blocks, name)
			if p.told {
				p.changed = append(p.changed, Change{Kind: kvevent.Removed, Names: []BlockName{name}, Medium: mediumCPU})
			}
		}
		h.blocks[s.names[i]] = h.order.PushFront(s.names[i])
	}
	s.offloaded = full
}

type poolBlock struct {
	name  BlockName
	named bool
	// users are the sequences that have it. next and prev are its neighbours
	// in the queue while there are none.
	users      int32
	next, prev int32
	// twin is the next younger block of the same name, 0 if there is none.
	twin int32
}

// newBlockPool returns an empty pool. size must be at least 2: the first block
// is not used.
func newBlockPool(n naming, size, host int, shares, told bool) *blockPool {
	p := &blockPool{host: hostTier{room: host, blocks: map[BlockName]*list.Element{}}, naming: n, shares: shares, told: told, blocks: make([]poolBlock, size), named: map[BlockName]int32{}}
	for i := 1; i < size; i++ {
		p.enqueue(int32(i), 0)
	}
	return p
}

// enqueue puts a block into the queue before the one at.
func (p *blockPool) enqueue(id, at int32) {
	b := &p.blocks[id]
	b.next, b.prev = at, p.blocks[at].prev
	p.blocks[b.prev].next = id
	p.blocks[at].prev = id
	p.free++
}

func (p *blockPool) dequeue(id int32) {
	b := &p.blocks[id]
	p.blocks[b.prev].next, p.blocks[b.next].prev = b.next, b.prev
	p.free--
}

// hand gives the first block of the queue to s, and takes its name off.
func (p *blockPool) hand(s *Sequence) {
	id := p.blocks[0].next
	p.dequeue(id)
	b := &p.blocks[id]
	if b.named {
		p.unname(id)
		if p.told {
			p.changed = append(p.changed, Change{Kind: kvevent.Removed, Names: []BlockName{b.name}, Medium: mediumGPU})
		}
	}
	b.users = 1
	s.blocks = append(s.blocks, id)
}

func (p *blockPool) unname(id int32) {
	b := &p.blocks[id]
	first := p.named[b.name]
	switch {
	case first != id:
		for p.blocks[first].twin != id {
			first = p.blocks[first].twin
		}
		p.blocks[first].twin = b.twin
	case b.twin != 0:
		p.named[b.name] = b.twin
	default:
		delete(p.named, b.name)
	}
	b.named, b.twin = false, 0
}

func (p *blockPool) admit(s *Sequence, tokens, first int) (int, bool) {
	p.naming.extend(s, tokens)
	hits, needed := 0, ceilDiv(tokens, p.naming.block)
	// The last token is computed in any case, for what comes after it.
	for p.shares && !s.NoRead && hits < (tokens-1)/p.naming.block {
		id, ok := p.named[s.names[hits]]
		if !ok {
			break
		}
		hits++
		if p.blocks[id].users > 0 {
			needed--
		}
	}
	back := 0
	for p.host.room > 0 && p.shares && !s.NoRead && hits+back < (tokens-1)/p.naming.block && p.host.has(s.names[hits+back]) {
		back++
	}
	if needed > p.free {
		return 0, false
	}
	for _, name := range s.names[:hits] {
		id := p.named[name]
		if p.blocks[id].users == 0 {
			p.dequeue(id)
		}
		p.blocks[id].users++
		s.blocks = append(s.blocks, id)
	}
	cached := (hits + back) * p.naming.block
	s.shared, s.offloaded, s.loaded = hits, 0, back*p.naming.block
	known := min(tokens, cached+first)
	for ceilDiv(known, p.naming.block) > len(s.blocks) {
		p.hand(s)
	}
	p.share(s, known)
	return cached, true
}

// share names the full blocks of s.
func (p *blockPool) share(s *Sequence, tokens int) {
	full := tokens / p.naming.block
	if !p.shares || full <= s.shared {
		return
	}
	p.naming.extend(s, tokens)
	for i := s.shared; i < full; i++ {
		id := s.blocks[i]
		b := &p.blocks[id]
		b.name, b.named = s.names[i], true
		last, found := p.named[b.name]
		if !found {
			p.named[b.name] = id
			continue
		}
		for p.blocks[last].twin != 0 {
			last = p.blocks[last].twin
		}
		p.blocks[last].twin = id
	}
	if p.told {
		p.changed = append(p.changed, p.naming.stored(s, s.shared, full, mediumGPU))
	}
	s.shared = full
}

func (p *blockPool) computed(s *Sequence, tokens int) { p.offload(s, tokens) }

func (p *blockPool) grow(s *Sequence, room, known int) bool {
	needed := ceilDiv(room, p.naming.block) - len(s.blocks)
	if needed > p.free {
		return false
	}
	for range needed {
		p.hand(s)
	}
	p.share(s, known)
	p.offload(s, min(known, room-1))
	return true
}

// release puts the blocks into the queue, the last first: those without a name
// at its beginning, the others at its end.
func (p *blockPool) release(s *Sequence, tokens int, drop bool) {
	if !drop {
		p.share(s, tokens)
		p.offload(s, tokens)
	}
	at := p.blocks[0].next
	for _, id := range slices.Backward(s.blocks) {
		b := &p.blocks[id]
		b.users--
		switch {
		case b.users > 0:
		case b.named:
			p.enqueue(id, 0)
			if at == 0 {
				at = id
			}
		default:
			p.enqueue(id, at)
		}
	}
	s.blocks, s.shared = s.blocks[:0], 0
}

func (p *blockPool) reset() bool {
	if p.free != len(p.blocks)-1 {
		return false
	}
	clear(p.named)
	for i := range p.blocks {
		p.blocks[i].named, p.blocks[i].twin = false, 0
	}
	if p.told {
		p.changed = append(p.changed, Change{Kind: kvevent.Cleared})
	}
	return true
}

func (p *blockPool) size() (block, most int) {
	return p.naming.block, p.naming.block * (len(p.blocks) - 1)
}

func (p *blockPool) usage() (used, of int) { return len(p.blocks) - 1 - p.free, len(p.blocks) - 1 }

func (p *blockPool) tells() bool { return len(p.changed) > 0 }

func (p *blockPool) take() []Change {
	c := p.changed
	p.changed = nil
	return c
}
