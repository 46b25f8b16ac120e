package index

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// engine is a dumb model of an engine's cache, by lists, that knows all tokens.
type engine interface {
	// start begins a request and returns how many tokens of it were cached; -1
	// when there is no memory for it now.
	start(id int, prompt []uint32) int
	// prefilled says that its first token is there.
	prefilled(id int)
	// finish ends it, after it has generated some tokens.
	finish(id int, generated []uint32)
	// room is whether so many more tokens could be generated now.
	room(id int, tokens int) bool
	// memory counts the blocks that hold what can be hit and nobody uses, and
	// those that hold nothing.
	memory() (queued, free int)
}

// poolEngine is vLLM's block pool, written from its rules.
type poolEngine struct {
	block  int
	queue  []int            // ids of free blocks, the next to be taken first
	named  map[int]string   // by id: what a cached block holds, with all before it
	cached map[string][]int // its copies, in the order in which they were cached
	users  map[int]int      // by id
	runs   map[int]*poolRun
}

type poolRun struct {
	ids    []uint32
	blocks []int
}

func newPoolEngine(blocks, block int) *poolEngine {
	e := &poolEngine{block: block, named: map[int]string{}, cached: map[string][]int{}, users: map[int]int{}, runs: map[int]*poolRun{}}
	for id := 1; id < blocks; id++ { // 0 is reserved
		e.queue = append(e.queue, id)
	}
	return e
}

func (e *poolEngine) take(n int) []int {
	taken := slices.Clone(e.queue[:n])
	e.queue = slices.Clone(e.queue[n:])
	for _, id := range taken {
		if name, ok := e.named[id]; ok {
			e.cached[name] = slices.DeleteFunc(e.cached[name], func(o int) bool { return o == id })
			delete(e.named, id)
		}
		e.users[id] = 1
	}
	return taken
}

// name is what full blocks are known by.
func (e *poolEngine) name(r *poolRun, upTo int) {
	for i := 0; i < upTo/e.block; i++ {
		id := r.blocks[i]
		if _, ok := e.named[id]; ok {
			continue
		}
		name := fmt.Sprint(r.ids[:(i+1)*e.block])
		e.named[id] = name
		e.cached[name] = append(e.cached[name], id)
	}
}

func (e *poolEngine) start(id int, prompt []uint32) int {
	r := &poolRun{ids: slices.Clone(prompt)}
	evictable := 0
	for i := 0; i < (len(prompt)-1)/e.block; i++ {
		copies := e.cached[fmt.Sprint(prompt[:(i+1)*e.block])]
		if len(copies) == 0 {
			break
		}
		r.blocks = append(r.blocks, copies[0])
		if e.users[copies[0]] == 0 {
			evictable++
		}
	}
	hit := len(r.blocks)
	n := (len(prompt)+e.block-1)/e.block - hit
	if n+evictable > len(e.queue) {
		return -1
	}
	for _, b := range r.blocks {
		if e.users[b] == 0 {
			e.queue = slices.DeleteFunc(e.queue, func(o int) bool { return o == b })
		}
		e.users[b]++
	}
	r.blocks = append(r.blocks, e.take(n)...)
	e.name(r, len(prompt))
	e.runs[id] = r
	return hit * e.block
}

func (e *poolEngine) prefilled(int) {}

func (e *poolEngine) memory() (queued, free int) {
	for _, id := range e.queue {
		if _, ok := e.named[id]; ok {
			queued++
		} else {
			free++
		}
	}
	return queued, free
}

func (e *poolEngine) room(id, tokens int) bool {
	r := e.runs[id]
	return (len(r.ids)+tokens-1+e.block-1)/e.block-len(r.blocks) <= len(e.queue)
}

func (e *poolEngine) finish(id int, generated []uint32) {
	r := e.runs[id]
	delete(e.runs, id)
	if len(generated) > 0 {
		r.ids = append(r.ids, generated[:len(generated)-1]...)
		r.blocks = append(r.blocks, e.take((len(r.ids)+e.block-1)/e.block-len(r.blocks))...)
		e.name(r, len(r.ids))
	}
	var front, back []int
	for _, b := range slices.Backward(r.blocks) {
		if e.users[b]--; e.users[b] > 0 {
			continue
		}
		if _, ok := e.named[b]; ok {
			back = append(back, b)
		} else {
			front = append(front, b)
		}
	}
	e.queue = slices.Concat(front, e.queue, back)
}

// radixEngine is SGLang's radix cache, written from its rules.
type radixEngine struct {
	page  int
	free  int // pages
	root  *radixNode
	clock int
	runs  map[int]*radixRun
}

type radixNode struct {
	pages    []string
	parent   *radixNode
	children []*radixNode
	used     int // when
	locks    int
}

type radixRun struct {
	ids  []uint32
	own  int // pages
	last *radixNode
	tree int // pages of the prompt that are in the tree
}

func newRadixEngine(pages, page int) *radixEngine {
	return &radixEngine{page: page, free: pages, root: &radixNode{}, runs: map[int]*radixRun{}}
}

func (e *radixEngine) pagesOf(ids []uint32) (pages []string) {
	for p := range slices.Chunk(ids, e.page) {
		if len(p) == e.page {
			pages = append(pages, fmt.Sprint(p))
		}
	}
	return pages
}

// match goes as far down as the pages are there, and splits a node in which they
// end.
func (e *radixEngine) match(pages []string) (*radixNode, int) {
	e.clock++
	n, depth := e.root, 0
	for {
		var next *radixNode
		for _, c := range n.children {
			if depth < len(pages) && c.pages[0] == pages[depth] {
				next = c
			}
		}
		if next == nil {
			return n, depth
		}
		next.used = e.clock
		same := 0
		for same < len(next.pages) && depth+same < len(pages) && next.pages[same] == pages[depth+same] {
			same++
		}
		depth += same
		if same < len(next.pages) {
			head := &radixNode{pages: slices.Clone(next.pages[:same]), parent: n, children: []*radixNode{next}, used: e.clock, locks: next.locks}
			next.pages = slices.Clone(next.pages[same:])
			n.children[slices.Index(n.children, next)] = head
			next.parent = head
			return head, depth
		}
		n = next
	}
}

func (e *radixEngine) insert(pages []string) (*radixNode, int) {
	n, depth := e.match(pages)
	if depth < len(pages) {
		c := &radixNode{pages: slices.Clone(pages[depth:]), parent: n, used: e.clock}
		n.children = append(n.children, c)
		n = c
	}
	return n, depth
}

func (e *radixEngine) lock(n *radixNode, by int) {
	for ; n != e.root; n = n.parent {
		n.locks += by
	}
}

func (e *radixEngine) leaves(n *radixNode) (leaves []*radixNode) {
	if n != e.root && len(n.children) == 0 && n.locks == 0 {
		return []*radixNode{n}
	}
	for _, c := range n.children {
		leaves = append(leaves, e.leaves(c)...)
	}
	return leaves
}

func (e *radixEngine) evictable(n *radixNode) int {
	sum := 0
	for _, c := range n.children {
		sum += e.evictable(c)
	}
	if n.locks == 0 && n != e.root {
		sum += len(n.pages)
	}
	return sum
}

// take takes n pages for so many tokens, for which as many are evicted when they
// are not free.
func (e *radixEngine) take(n, tokens int) {
	if e.free*e.page < tokens {
		for got := 0; got*e.page < tokens; {
			leaves := e.leaves(e.root)
			if len(leaves) == 0 {
				break
			}
			oldest := slices.MinFunc(leaves, func(a, b *radixNode) int { return a.used - b.used })
			got += len(oldest.pages)
			e.free += len(oldest.pages)
			p := oldest.parent
			p.children = slices.DeleteFunc(p.children, func(o *radixNode) bool { return o == oldest })
		}
	}
	e.free -= n
}

func (e *radixEngine) start(id int, prompt []uint32) int {
	all := (len(prompt) + e.page - 1) / e.page
	if e.free+e.evictable(e.root) < all {
		return -1
	}
	n, depth := e.match(e.pagesOf(prompt[:len(prompt)-1]))
	e.lock(n, 1)
	r := &radixRun{ids: slices.Clone(prompt), last: n, tree: depth, own: all - depth}
	tokens := len(prompt) - depth*e.page
	if e.page > 1 {
		tokens += e.page
	}
	e.take(r.own, tokens)
	e.runs[id] = r
	return depth * e.page
}

// enter puts what a request has computed into the tree.
func (e *radixEngine) enter(r *radixRun) {
	pages := e.pagesOf(r.ids)
	n, depth := e.insert(pages)
	e.free += max(depth-r.tree, 0) // copies
	r.own -= len(pages) - r.tree
	r.tree = len(pages)
	e.lock(n, 1)
	e.lock(r.last, -1)
	r.last = n
}

func (e *radixEngine) memory() (queued, free int) { return e.evictable(e.root), e.free }

func (e *radixEngine) prefilled(id int) { e.enter(e.runs[id]) }

func (e *radixEngine) room(id, tokens int) bool {
	r := e.runs[id]
	return (len(r.ids)+tokens-1+e.page-1)/e.page-(len(r.ids)+e.page-1)/e.page <= e.free+e.evictable(e.root)
}

func (e *radixEngine) finish(id int, generated []uint32) {
	r := e.runs[id]
	delete(e.runs, id)
	if len(generated) > 0 {
		had := (len(r.ids) + e.page - 1) / e.page
		r.ids = append(r.ids, generated[:len(generated)-1]...)
		more := (len(r.ids)+e.page-1)/e.page - had
		for range more {
			e.take(1, e.page)
		}
		r.own += more
		e.enter(r)
	}
	e.lock(r.last, -1)
	e.free += r.own
}

// TestShadowAgainstEngine: of thousands of requests that run beside each other
// under eviction pressure, what is predicted is what the engine finds.
func TestShadowAgainstEngine(t *testing.T) {
	for _, radix := range []bool{false, true} {
		for seed := range uint64(12) {
			name := map[bool]string{false: "pool", true: "radix"}[radix]
			t.Run(fmt.Sprintf("%s/%d", name, seed), func(t *testing.T) {
				r := rand.New(rand.NewPCG(seed, 1))
				block := []int{1, 2, 4, 16}[r.IntN(4)]
				blocks := 20 + r.IntN(200)
				var e engine = newPoolEngine(blocks, block)
				if radix {
					e = newRadixEngine(blocks, block)
				}
				compare(t, r, e, radix, blocks, block, lessUnderRace(t, 3000, 400))
			})
		}
	}
}

func compare(t *testing.T, r *rand.Rand, e engine, radix bool, blocks, block, requests int) {
	t.Helper()
	x := New(Config{})
	config := SlotConfig{Model: "m", BlockSize: block, Capacity: blocks, AfterPrefill: radix}
	x.Join(0, config)
	type run struct {
		claim     Claim
		prompt    []uint32
		prefilled bool
	}
	runs := map[int]*run{}
	var talks [][]uint32 // what was said so far in conversations
	systems := [][]uint32{randomIDs(r, 3*block), randomIDs(r, block*(1+r.IntN(4))+r.IntN(block))}
	now := time.Unix(1000, 0)
	what := ""
	next, asked, hits, evicted, restarts := 0, 0, 0, 0, 0
	for step := 0; asked < requests; step++ {
		if step%16 == 0 {
			checkShadow(t, x.at(0))
		}
		sh := &x.at(0).shadow
		if queued, free := e.memory(); sh.queue.n != queued || sh.free != int64(free*block) {
			t.Fatalf("%s: %d blocks queued and %d tokens free, want %d and %d", what, sh.queue.n, sh.free, queued, free*block)
		}
		if len(runs) == 0 && r.IntN(4) == 0 {
			// A warm restart changes nothing.
			y := New(Config{})
			y.Join(0, config)
			if err := y.Restore(0, x.AppendSnapshot(nil, 0)); err != nil {
				t.Fatal(err)
			}
			x, what = y, what+", and the index was restarted"
			restarts++
		}
		switch k := r.IntN(10); {
		case k < 5 && len(runs) < 6:
			var prompt []uint32
			from := -1
			switch k := r.IntN(10); {
			case k < 5 && len(talks) > 0:
				from = r.IntN(len(talks))
				if r.IntN(2) == 0 {
					from = len(talks) - 1
				}
				prompt = slices.Concat(talks[from], randomIDs(r, 1+r.IntN(2*block)))
			case k < 6 && len(talks) > 0:
				// The same again, cut to whole blocks. What goes on behind it
				// in another way is not asked again: it cannot be told apart
				// from what is generated now.
				prompt = talks[r.IntN(len(talks))]
				prompt = prompt[:max(len(prompt)-len(prompt)%block, 1)]
				begins := func(ids []uint32) bool {
					return len(ids) >= len(prompt) && slices.Equal(ids[:len(prompt)], prompt)
				}
				if slices.ContainsFunc(systems, begins) || slices.ContainsFunc(slices.Collect(maps.Values(runs)), func(n *run) bool { return begins(n.prompt) }) {
					continue
				}
				talks = slices.DeleteFunc(talks, begins)
			default:
				prompt = slices.Concat(systems[r.IntN(2)], randomIDs(r, 1+r.IntN(6*block)))
			}
			if len(prompt) > blocks*block/4 {
				if from >= 0 {
					talks = slices.Delete(talks, from, from+1)
				}
				continue
			}
			root := Root("m", "", nil)
			p := Prompt{Root: root, IDs: prompt, Block: block, Chain: AppendTokens(nil, root, prompt, block)}
			var l Lookup
			x.Look(&l, &p)
			h := l.Held(0)
			actual := e.start(next, prompt)
			if actual < 0 {
				if len(runs) == 0 {
					t.Fatal("no request runs, and there is no memory for one")
				}
				continue
			}
			if got := p.Cached(h); got != actual {
				t.Fatalf("request %d of %d tokens: predicted %d, cached %d", next, len(prompt), got, actual)
			}
			if actual > 0 {
				hits++
			}
			if from >= 0 && actual+block < len(talks[from]) {
				evicted++
			}
			n := &run{prompt: prompt}
			what = fmt.Sprintf("request %d of %d tokens, of which %d are cached, has begun", next, len(prompt), actual)
			x.Claim(&n.claim, 0, &p, now)
			x.Found(&n.claim, actual)
			runs[next] = n
			next++
			asked++
		case len(runs) > 0:
			id := -1
			for i := range next {
				if runs[i] != nil && (id < 0 || r.IntN(2) == 0) {
					id = i
				}
			}
			n := runs[id]
			if !n.prefilled {
				n.prefilled = true
				what = fmt.Sprintf("request %d has its first token", id)
				e.prefilled(id)
				if !x.TryPrefilled(&n.claim, now) {
					x.Prefilled(&n.claim, now)
				}
				continue
			}
			generated := randomIDs(r, 1+r.IntN(3*block))
			if !e.room(id, len(generated)) {
				generated = generated[:1]
			}
			e.finish(id, generated)
			what = fmt.Sprintf("request %d has generated %d tokens", id, len(generated))
			x.Release(&n.claim, len(generated), now)
			delete(runs, id)
			talks = append(talks, slices.Concat(n.prompt, generated))
			if len(talks) > 40 {
				talks = slices.Delete(talks, 0, 1+r.IntN(20))
			}
		}
	}
	if hits < requests/10 || evicted == 0 || restarts == 0 {
		t.Errorf("%d hits, %d evictions and %d restarts in %d requests show nothing", hits, evicted, restarts, requests)
	}
}

// checkShadow counts what the shadow keeps counts of. It returns how many tokens
// of memory claims have beside blocks.
func checkShadow(t *testing.T, s *slot) int64 {
	t.Helper()
	sh, tr := &s.shadow, &s.tree
	inUse := int64(0)
	for r := tr.lowest(tr.top); r != tr.top; {
		rec := tr.at(r)
		spare := tr.isSpare(r)
		if spare && tr.hash(r).Hi != 0 || tr.holds(r, guessed) > 0 {
			if c, ok := sh.copies[r]; !ok || !c.evicted {
				inUse += sh.cost(tr, r)
			}
			if linked := tr.linked(&sh.queue, r); linked == (tr.holds(r, pinned) > 0) && !sh.copies[r].evicted {
				t.Fatalf("record %d: in the queue %v, pinned %d times", r, linked, tr.holds(r, pinned))
			}
		}
		if on := rec.next; on != 0 {
			r = tr.lowest(on)
		} else {
			r = rec.parent
		}
	}
	n := 0
	for x := sh.queue.first; x != 0; x = tr.after(x) {
		n++
	}
	if n != sh.queue.n {
		t.Fatalf("%d in the queue, which says %d", n, sh.queue.n)
	}
	own := sh.size - sh.free - inUse - sh.generating.taken
	if own < 0 || s.claims == 0 && own != 0 {
		t.Fatalf("size %d, free %d, held %d, with %d claims", sh.size, sh.free, inUse, s.claims)
	}
	return own
}

// grow generates one token of a request.
func (e *poolEngine) grow(id int, token uint32) {
	r := e.runs[id]
	r.ids = append(r.ids, token)
	if n := (len(r.ids)+e.block-1)/e.block - len(r.blocks); n > 0 {
		r.blocks = append(r.blocks, e.take(n)...)
	}
	e.name(r, len(r.ids))
}

// TestShadowOfBusyEngine: sixteen requests at a time generate token after token,
// which nobody tells of before they end, and take half of the engine's memory.
// Hardly a prediction is wrong. Without a guess of what they have generated one in
// twenty-five is.
func TestShadowOfBusyEngine(t *testing.T) {
	const block, blocks = 16, 1500
	requests := lessUnderRace(t, 600, 150)
	r := rand.New(rand.NewPCG(1, 1))
	e := newPoolEngine(blocks, block)
	x := New(Config{})
	x.Join(0, SlotConfig{Model: "m", BlockSize: block, Capacity: blocks})
	type run struct {
		claim             Claim
		prompt, generated []uint32
		want              int
	}
	runs := map[int]*run{}
	var talks [][]uint32
	root, system := Root("m", "", nil), randomIDs(r, 200)
	now := time.Unix(1000, 0)
	wrong, again := 0, 0
	for next := 0; next < requests; {
		for len(runs) < 16 {
			prompt := slices.Concat(system, randomIDs(r, 1+r.IntN(300)))
			if len(talks) > 0 && r.IntN(10) < 7 {
				i := r.IntN(len(talks))
				prompt = slices.Concat(talks[i], randomIDs(r, 1+r.IntN(60)))
				talks = slices.Delete(talks, i, i+1)
			}
			if len(prompt) > 1500 {
				continue
			}
			p := Prompt{Root: root, IDs: prompt, Block: block, Chain: AppendTokens(nil, root, prompt, block)}
			var l Lookup
			x.Look(&l, &p)
			h := l.Held(0)
			actual := e.start(next, prompt)
			if actual < 0 {
				break
			}
			if actual > len(system) {
				again++
			}
			if p.Cached(h) != actual {
				wrong++
			}
			n := &run{prompt: prompt, want: 50 + r.IntN(300)}
			x.Claim(&n.claim, 0, &p, now)
			x.Prefilled(&n.claim, now)
			runs[next] = n
			next++
		}
		now = now.Add(10 * time.Millisecond)
		for id := range next {
			n := runs[id]
			if n == nil {
				continue
			}
			token := r.Uint32N(200000)
			n.generated = append(n.generated, token)
			if len(n.generated) < n.want && len(e.queue) > 4 {
				e.grow(id, token)
				continue
			}
			e.finish(id, []uint32{token})
			x.Release(&n.claim, len(n.generated), now)
			delete(runs, id)
			talks = append(talks, slices.Concat(n.prompt, n.generated))
			if len(talks) > 60 {
				talks = slices.Delete(talks, 0, 1)
			}
		}
	}
	checkShadow(t, x.at(0))
	t.Logf("%d of %d predictions are wrong; %d went on with a conversation", wrong, requests, again)
	if wrong*100 > 3*requests || again < requests/8 {
		t.Errorf("%d of %d predictions are wrong; %d went on with a conversation", wrong, requests, again)
	}
}
