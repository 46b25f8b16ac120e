package simulator

import (
	"slices"

	"github.com/inferrail/inferrail/index/kvevent"
)

// radixCache is SGLang's KV cache: pages of equal size, and a tree of those
// that can be used again, in nodes of several pages.
//
// What a sequence computes comes into the tree when its prefill has ended, and
// what it has generated when it ends. Without room the leaf that has not been
// used for the longest time leaves, whole. With a host tier every node is
// copied there when it comes into the tree; one that leaves the GPU is then
// loaded back when it is wanted.
type radixCache struct {
	naming naming
	shares bool
	// late: a prompt comes into the tree when its sequence ends, and what it has
	// generated does not, as TGI does it.
	late  bool
	pages int
	// roots are the trees by what keeps prompts apart.
	roots map[radixSpace]*radixNode
	// free pages are nobody's, locked ones are in nodes that sequences use,
	// resting ones in nodes that none does.
	free, locked, resting int
	hostFree              int
	clock                 uint64
	told                  bool
	changed               []Change
}

type radixSpace struct{ adapter, salt string }

// radixNode is a run of pages with nothing branching off inside. The root has
// no pages.
type radixNode struct {
	parent   *radixNode
	children map[BlockName]*radixNode // by the name of their first page
	names    []BlockName
	tokens   []uint32
	space    radixSpace
	// users are the sequences that end in it or below.
	users int
	used  uint64 // when, by the cache's clock
	// gpu and host: where its pages are. A node that is in neither is in no
	// tree.
	gpu, host bool
}

// loadBack is how many tokens must be on the host to be worth loading.
const loadBack = 10

func newRadixCache(n naming, pages, hostPages int, shares, told bool) *radixCache {
	c := &radixCache{naming: n, pages: pages, free: pages, hostFree: hostPages, shares: shares, told: told}
	c.clear()
	return c
}

func (c *radixCache) clear() {
	c.roots = map[radixSpace]*radixNode{}
	c.free, c.locked, c.resting = c.free+c.resting, 0, 0
	if c.told {
		c.changed = append(c.changed, Change{Kind: kvevent.Cleared})
	}
}

// root returns that of the tree that s may use. A new one is not among the
// trees until there is something below it.
func (c *radixCache) root(s *Sequence) *radixNode {
	space := radixSpace{s.Adapter, s.Salt}
	if r := c.roots[space]; r != nil {
		return r
	}
	return &radixNode{children: map[BlockName]*radixNode{}, space: space, gpu: true}
}

// find returns the node that ends with the longest prefix of names in the
// tree, and how many pages that has. It splits a node that goes on beyond.
func (c *radixCache) find(n *radixNode, names []BlockName) (*radixNode, int) {
	c.clock++
	stamp, pages := c.clock, 0
	n.used = stamp
	for pages < len(names) {
		child := n.children[names[pages]]
		if child == nil {
			break
		}
		child.used = stamp
		same := 1
		for same < len(child.names) && pages+same < len(names) && child.names[same] == names[pages+same] {
			same++
		}
		pages += same
		if same < len(child.names) {
			return c.split(child, same), pages
		}
		n = child
	}
	return n, pages
}

// split makes the first so many pages of a node one of their own and returns
// it.
func (c *radixCache) split(n *radixNode, pages int) *radixNode {
	c.clock++
	top := &radixNode{parent: n.parent, names: n.names[:pages:pages], tokens: n.tokens[: pages*c.naming.block : pages*c.naming.block],
		space: n.space, users: n.users, used: c.clock, gpu: n.gpu, host: n.host}
	n.names, n.tokens, n.parent = n.names[pages:], n.tokens[pages*c.naming.block:], top
	top.children = map[BlockName]*radixNode{n.names[0]: n}
	top.parent.children[top.names[0]] = top
	return top
}

// lock keeps the way to a node from leaving; unlock lets it go.
func (c *radixCache) lock(n *radixNode) {
	for ; n.parent != nil; n = n.parent {
		if n.users == 0 {
			c.resting -= len(n.names)
			c.locked += len(n.names)
		}
		n.users++
	}
}

func (c *radixCache) unlock(n *radixNode) {
	for ; n.parent != nil; n = n.parent {
		n.users--
		if n.users == 0 {
			c.resting += len(n.names)
			c.locked -= len(n.names)
		}
	}
}

func (c *radixCache) admit(s *Sequence, tokens, _ int) (int, bool) {
	c.naming.extend(s, tokens)
	node, hits := c.root(s), 0
	if c.shares && !s.NoRead {
		// The last token is computed in any case, for what comes after it.
		node, hits = c.find(node, s.names[:(tokens-1)/c.naming.block])
	}
	// The end of it may be on the host only.
	var hosted []*radixNode
	back := 0
	for ; !node.gpu; node = node.parent {
		hosted = append(hosted, node)
		back += len(node.names)
	}
	fresh := ceilDiv(tokens, c.naming.block) - (hits - back)
	c.lock(node)
	// One more is for the first token that is generated.
	if fresh+1 > c.free+c.resting {
		c.unlock(node)
		return 0, false
	}
	if back*c.naming.block <= loadBack {
		hosted, hits, back = nil, hits-back, 0
	}
	// Pages that come back take the place of fresh ones, so there is room.
	for _, n := range slices.Backward(hosted) {
		c.vacate(len(n.names))
		c.free -= len(n.names)
		c.resting += len(n.names)
		n.gpu = true
		c.tell(n, mediumGPU, kvevent.Stored)
		c.lock(n)
		c.unlock(node)
		node = n
	}
	fresh -= back
	c.vacateTokens(tokens - hits*c.naming.block)
	c.free -= fresh
	s.node, s.shared, s.own, s.loaded = node, hits, fresh, back*c.naming.block
	return hits * c.naming.block, true
}

// vacateTokens makes room for so many tokens of one sequence. SGLang reckons with
// a page more than they take, where a page has several.
func (c *radixCache) vacateTokens(tokens int) {
	if c.naming.block > 1 {
		tokens += c.naming.block
	}
	if c.free*c.naming.block < tokens {
		c.evict(ceilDiv(tokens, c.naming.block))
	}
}

// vacate makes room for so many pages.
func (c *radixCache) vacate(pages int) {
	if c.free < pages {
		c.evict(pages)
	}
}

// evict evicts so many pages, or more as nodes leave whole. SGLang evicts as many
// as it wants to have room for, not as are short.
func (c *radixCache) evict(pages int) {
	for enough := c.free + pages; c.free < enough; {
		var oldest *radixNode
		for _, r := range c.roots {
			oldest = r.oldest(oldest, func(n *radixNode) bool { return n.gpu && n.users == 0 && !n.gpuBelow() })
		}
		if oldest == nil {
			return
		}
		oldest.gpu = false
		c.free += len(oldest.names)
		c.resting -= len(oldest.names)
		c.tell(oldest, mediumGPU, kvevent.Removed)
		if !oldest.host {
			c.drop(oldest)
		}
	}
}

// vacateHost does so on the host.
func (c *radixCache) vacateHost(pages int) {
	for c.hostFree < pages {
		var oldest *radixNode
		for _, r := range c.roots {
			oldest = r.oldest(oldest, func(n *radixNode) bool { return n.host && !n.gpu && len(n.children) == 0 })
		}
		if oldest == nil {
			return
		}
		oldest.host = false
		c.hostFree += len(oldest.names)
		c.tell(oldest, mediumHost, kvevent.Removed)
		c.drop(oldest)
	}
}

// drop takes a node out of its tree.
func (c *radixCache) drop(n *radixNode) {
	delete(n.parent.children, n.names[0])
	if n.parent.parent == nil && len(n.parent.children) == 0 {
		delete(c.roots, n.space)
	}
}

// gpuBelow reports whether a node right below n is on the GPU.
func (n *radixNode) gpuBelow() bool {
	for _, child := range n.children {
		if child.gpu {
			return true
		}
	}
	return false
}

// oldest returns the node, of found and those below n that may leave, that has
// not been used for the longest time.
func (n *radixNode) oldest(found *radixNode, may func(*radixNode) bool) *radixNode {
	if n.parent != nil && (found == nil || n.used < found.used) && may(n) {
		found = n
	}
	for _, child := range n.children {
		found = child.oldest(found, may)
	}
	return found
}

// insert puts the full pages of the first so many tokens of s, which the
// sequence has, into the tree.
func (c *radixCache) insert(s *Sequence, tokens int) {
	full := tokens / c.naming.block
	if !c.shares || full <= s.shared {
		return
	}
	c.naming.extend(s, tokens)
	node, there := c.find(c.root(s), s.names[:full])
	// The sequence's own copy becomes the node's where that was on the host
	// only, and is not needed where the node was on the GPU.
	var hosted []*radixNode
	for n := node; !n.gpu; n = n.parent {
		hosted = append(hosted, n)
	}
	twice := there - s.shared
	for _, n := range slices.Backward(hosted) {
		n.gpu = true
		c.resting += len(n.names)
		twice -= len(n.names)
		c.tell(n, mediumGPU, kvevent.Stored)
	}
	c.free += twice
	if full > there {
		child := &radixNode{parent: node, children: map[BlockName]*radixNode{}, names: slices.Clone(s.names[there:full]),
			tokens: s.appendTokens(nil, there*c.naming.block, full*c.naming.block), space: node.space, used: c.clock, gpu: true}
		node.children[child.names[0]] = child
		if node.parent == nil {
			c.roots[node.space] = node
		}
		c.resting += len(child.names)
		c.tell(child, mediumGPU, kvevent.Stored)
		c.backUp(child)
		node = child
	}
	s.own -= full - s.shared
	c.lock(node)
	c.unlock(s.node)
	s.node, s.shared = node, full
}

// backUp copies a node to the host, if there is room for it and all above it
// are there.
func (c *radixCache) backUp(n *radixNode) {
	if n.parent.parent != nil && !n.parent.host {
		return
	}
	c.vacateHost(len(n.names))
	if c.hostFree < len(n.names) {
		return
	}
	c.hostFree -= len(n.names)
	n.host = true
	c.tell(n, mediumHost, kvevent.Stored)
}

func (c *radixCache) computed(s *Sequence, tokens int) {
	if !c.late {
		c.insert(s, tokens)
	}
}

func (c *radixCache) grow(s *Sequence, room, _ int) bool {
	more := ceilDiv(room, c.naming.block) - s.shared - s.own
	if more <= 0 {
		return true
	}
	c.vacate(more)
	if c.free < more {
		return false
	}
	c.free -= more
	s.own += more
	return true
}

func (c *radixCache) release(s *Sequence, tokens int, drop bool) {
	if c.late {
		tokens = min(tokens, s.prompt())
	}
	if !drop {
		c.insert(s, tokens)
	}
	c.free += s.own
	c.unlock(s.node)
	s.node, s.shared, s.own = nil, 0, 0
}

func (c *radixCache) reset() bool {
	if c.locked > 0 || c.free+c.resting != c.pages {
		return false
	}
	for _, r := range c.roots {
		c.hostFree += r.hosted()
	}
	c.clear()
	return true
}

// hosted is how many pages of n and those below are on the host.
func (n *radixNode) hosted() int {
	pages := 0
	if n.host {
		pages = len(n.names)
	}
	for _, child := range n.children {
		pages += child.hosted()
	}
	return pages
}

// size leaves out the page that admit wants beyond the prompt's.
func (c *radixCache) size() (block, most int) {
	return c.naming.block, c.naming.block * (c.pages - 1)
}

func (c *radixCache) usage() (used, of int) { return c.pages - c.free - c.resting, c.pages }

// mostPages is how many pages SGLang tells of in one event.
const mostPages = 64

// tell notes that a node has come to a medium, or has left it.
func (c *radixCache) tell(n *radixNode, medium string, kind kvevent.Kind) {
	if !c.told {
		return
	}
	if kind == kvevent.Removed {
		c.changed = append(c.changed, Change{Kind: kind, Names: n.names, Medium: medium})
		return
	}
	var parent BlockName
	if len(n.parent.names) > 0 {
		parent = n.parent.names[len(n.parent.names)-1]
	}
	hasParent := len(n.parent.names) > 0
	for from := 0; from < len(n.names); from += mostPages {
		to := min(from+mostPages, len(n.names))
		c.changed = append(c.changed, Change{Kind: kind, Names: n.names[from:to], Parent: parent, HasParent: hasParent,
			Tokens: n.tokens[from*c.naming.block : to*c.naming.block], Medium: medium, Adapter: n.space.adapter, Salt: n.space.salt})
		parent, hasParent = n.names[to-1], true
	}
}

func (c *radixCache) tells() bool { return len(c.changed) > 0 }

func (c *radixCache) take() []Change {
	changed := c.changed
	c.changed = nil
	return changed
}
