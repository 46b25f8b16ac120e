package virtual

import "container/heap"

// Ceiling returns the highest hit rate that any choice can have with caches of so many
// blocks together, requests being looked up in the order in which they come.
//
// It is that of one cache of that size which knows the future: it keeps, after each
// request, those blocks that will be found soonest (Belady 1966, with leave to keep none
// of a request's). That is a ceiling, since
//
//   - whatever blocks engines hold at one time, together they are no more different ones
//     than the one cache could hold, and a request that finds a prefix at its engine finds
//     it there, too;
//   - from one request that has a block to the next that has it there is a span of time,
//     over which to keep it saves one block if it will be looked for then, and nothing
//     if it is computed anew in any case, as the last of a prompt is. Of spans that save
//     as much, to give up those that end last loses the fewest.
//
// And it is reached. A block is of use only with all before it. But the request at the
// end of its span looks for these as well, whose spans did not begin earlier, and of spans
// that end with one request those of the later blocks are given up first.
//
// A router that lets later requests overtake earlier ones could pass it in principle.
// Engines stay below it also because sequences that run take room in the same cache.
func (c *Chains) Ceiling(blocks int) float64 {
	return c.rate(newOracle(c, blocks).run())
}

// oracle is the cache that knows the future. It lives for one run.
type oracle struct {
	chains *Chains
	room   int
	// wanted is, by block, the next request that has it and looks for it, -1 when the
	// next that has it does not, and held whether the cache has it. after is, by request
	// and block in it, what wanted is after that.
	wanted []int32
	held   []bool
	after  [][]int32
	// top is, by request, one more than the last of its blocks that may be held and
	// wanted by it, and requests a heap of those that have any, the latest first.
	top      []int32
	requests lateFirst
}

func newOracle(c *Chains, blocks int) *oracle {
	o := &oracle{chains: c, room: blocks, wanted: make([]int32, c.blocks), held: make([]bool, c.blocks),
		after: make([][]int32, len(c.of)), top: make([]int32, len(c.of))}
	next := make([]int32, c.blocks)
	for b := range next {
		next[b], o.wanted[b] = -1, -1
	}
	for k := len(c.of) - 1; k >= 0; k-- {
		o.after[k] = make([]int32, len(c.of[k]))
		for i, b := range c.of[k] {
			o.after[k][i] = next[b]
		}
		for i, b := range c.of[k] {
			if next[b] = -1; i < c.asked[k] {
				next[b] = int32(k)
			}
		}
	}
	return o
}

// run returns how many blocks were found.
func (o *oracle) run() (found int) {
	for k, blocks := range o.chains.of {
		for i := range o.chains.asked[k] {
			if !o.held[blocks[i]] {
				break
			}
			if k >= o.chains.from {
				found++
			}
		}
		o.top[k] = 0
		for i, b := range blocks {
			next := o.after[k][i]
			o.wanted[b] = next
			switch {
			case next >= 0 && !o.held[b]:
				o.held[b] = true
				o.room--
			case next < 0 && o.held[b]:
				o.held[b] = false
				o.room++
			}
			if next >= 0 {
				o.want(next, int32(i))
			}
		}
		for o.room < 0 {
			o.giveUp()
		}
	}
	return found
}

// want notes that block i of a request is held for it.
func (o *oracle) want(request, i int32) {
	if o.top[request] == 0 {
		heap.Push(&o.requests, request)
	}
	o.top[request] = max(o.top[request], i+1)
}

// giveUp gives up the block that is wanted last, of several at the same time the
// farthest from the prompt's beginning.
func (o *oracle) giveUp() {
	for {
		request := o.requests[0]
		blocks := o.chains.of[request]
		for o.top[request] > 0 {
			b := blocks[o.top[request]-1]
			if o.held[b] && o.wanted[b] == request {
				o.top[request]--
				o.held[b] = false
				o.room++
				if o.top[request] == 0 {
					heap.Pop(&o.requests)
				}
				return
			}
			o.top[request]--
		}
		heap.Pop(&o.requests)
	}
}

// lateFirst is a heap of requests, the latest first. One that was given all that it had
// may be in it again.
type lateFirst []int32

func (h lateFirst) Len() int           { return len(h) }
func (h lateFirst) Less(i, j int) bool { return h[i] > h[j] }
func (h lateFirst) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *lateFirst) Push(x any)        { *h = append(*h, x.(int32)) }
func (h *lateFirst) Pop() any {
	old := *h
	x := old[len(old)-1]
	*h = old[:len(old)-1]
	return x
}

// Pooled returns the hit rate of one cache of so many blocks that gives up, as engines
// do, what was used the longest time ago: what caches would have that lose nothing by
// being several. A good choice comes near it, and may pass it.
func (c *Chains) Pooled(blocks int) float64 {
	// A ring: entry 0 is its head, behind which lies what was used last.
	next, prev := make([]int32, c.blocks+1), make([]int32, c.blocks+1)
	held := make([]bool, c.blocks)
	unlink := func(e int32) { next[prev[e]], prev[next[e]] = next[e], prev[e] }
	room, found := blocks, 0
	for k, of := range c.of {
		for i := range c.asked[k] {
			if !held[of[i]] {
				break
			}
			if k >= c.from {
				found++
			}
		}
		for i := len(of) - 1; i >= 0; i-- {
			b, e := of[i], of[i]+1
			if held[b] {
				unlink(e)
			} else {
				held[b] = true
				room--
			}
			after := next[0]
			next[0], prev[e], next[e], prev[after] = e, 0, after, e
		}
		for room < 0 {
			last := prev[0]
			unlink(last)
			held[last-1] = false
			room++
		}
	}
	return c.rate(found)
}
