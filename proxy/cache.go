package proxy

import (
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/proxy/prompt"
)

// CacheChecks is told what engines have taken from their caches, beside what
// the index has predicted. Its methods are called on requests' goroutines and
// must not block; their arguments are valid during the call only.
type CacheChecks interface {
	// Cached: of a prompt that was followed exactly, predicted tokens were
	// expected in the replica's cache when the request was sent, and the engine
	// has found actual there. reported is false when it does not say so; actual is
	// 0 then. SGLang does not when it has found none, other engines when they are
	// not set up to. Called once for every response that ended well, tells its
	// usage and counts the prompt's tokens as the agent does.
	Cached(m *Model, r *Replica, predicted, actual int, reported bool)
}

// cache is what a Server knows the engines' caches by. Immutable.
type cache struct {
	index  *index.Index
	checks CacheChecks // nil for none
}

// SetIndex lets prompts be looked up in x from now on, and requests be entered
// there; nil ends it. checks may be nil. Requests that have begun keep the index
// that they began with.
func (s *Server) SetIndex(x *index.Index, checks CacheChecks) {
	if x == nil {
		s.cache.Store(nil)
		return
	}
	s.cache.Store(&cache{x, checks})
}

// blocks are those of one request's prompt, and where they are. An exchange has
// them from lookUp until giveBack, on its goroutine, and points into its Prompt
// with them; they are pooled then. The zero value is ready to be filled.
type blocks struct {
	hashes []index.Hash
	// sizes are those of the blocks that chains were made of, in tokens: the
	// model's. Of a text, which has blocks of one size at every replica, it is
	// nil.
	sizes []int
	// prompts are those of each sequence in turn, one for each of sizes.
	prompts []index.Prompt
	// looks, one for each of sizes, say what is held of the last sequence that
	// was looked up; found, by slot, what of all of them together. The latter
	// is used with several only. looked: look has been called.
	looks  []index.Lookup
	found  []cached
	looked bool
	// tokens is how long the prompt is.
	tokens int
}

// cached is how many tokens of a prompt a replica has in its cache, in the part of
// it that is on the GPU, and in that with the host's memory.
type cached struct{ any, gpu, cpu int }

// bytesPerToken is what a token of a text is taken to have, as in call.estimate.
const bytesPerToken = 4

// keepBlocks is the most hashes for which there is room in blocks that are kept
// for another prompt: a megabyte. Longer prompts bring their own.
const keepBlocks = 64 << 10

var blocksPool = sync.Pool{New: func() any { return new(blocks) }}

// fill makes the chains of a prompt under root. It reports false when there is
// nothing of it to know or to enter anywhere.
func (b *blocks) fill(root index.Hash, p *prompt.Prompt, sizes []int) bool {
	b.hashes, b.prompts, b.looked = b.hashes[:0], b.prompts[:0], false
	if p.Reason == prompt.Exact {
		b.fillTokens(root, p, sizes)
	} else {
		b.fillText(root, p)
	}
	for len(b.looks) < b.stride() {
		b.looks = append(b.looks, index.Lookup{})
	}
	return len(b.prompts) > 0
}

// hashesOf is how many hashes there are of a prompt, at most.
func hashesOf(p *prompt.Prompt, sizes []int) (n int) {
	if p.Reason != prompt.Exact {
		return len(p.Text) / index.TextBlock
	}
	for _, size := range sizes {
		n += len(p.IDs) / max(size, 1)
	}
	return n
}

func (b *blocks) fillTokens(root index.Hash, p *prompt.Prompt, sizes []int) {
	b.sizes, b.tokens = sizes, len(p.IDs)
	// Chains lie in one piece of memory, which must not move.
	b.hashes = slices.Grow(b.hashes, hashesOf(p, sizes))
	start := 0
	for _, end := range p.Ends {
		for _, size := range sizes {
			from := len(b.hashes)
			b.hashes = index.AppendTokens(b.hashes, root, p.IDs[start:end], size)
			b.prompts = append(b.prompts, index.Prompt{Root: root, Chain: b.hashes[from:], IDs: p.IDs[start:end], Block: size})
		}
		start = end
	}
}

func (b *blocks) fillText(root index.Hash, p *prompt.Prompt) {
	b.sizes, b.tokens = nil, len(p.Text)/bytesPerToken
	b.hashes = slices.Grow(b.hashes, hashesOf(p, nil))
	start := 0
	for _, end := range p.TextEnds {
		from := len(b.hashes)
		b.hashes = index.AppendText(b.hashes, root, p.Text[start:end])
		if len(b.hashes) > from {
			b.prompts = append(b.prompts, index.Prompt{Root: root, Chain: b.hashes[from:]})
		}
		start = end
	}
}

// hashBytes is the memory of a hash.
const hashBytes = 16

// memory is how much the hashes take.
func (b *blocks) memory() int64 { return hashBytes * int64(cap(b.hashes)) }

// stride is how many prompts there are for each sequence, sequences how many
// sequences.
func (b *blocks) stride() int    { return max(len(b.sizes), 1) }
func (b *blocks) sequences() int { return len(b.prompts) / b.stride() }

// of returns which of a sequence's prompts is that of the replica, -1 when the
// size of its blocks is not known or was not when the chains were made.
func (b *blocks) of(r *Replica) int {
	if b.sizes == nil {
		return 0
	}
	return slices.Index(b.sizes, int(r.block.Load()))
}

// look finds what the replicas hold of the prompt.
func (b *blocks) look(x *index.Index, replicas []*Replica) {
	n := b.stride()
	b.looked = true
	if len(b.prompts) == n {
		for i := range b.prompts {
			x.Look(&b.looks[i], &b.prompts[i])
		}
		return
	}
	clear(b.found)
	for first := 0; first < len(b.prompts); first += n {
		for i := range n {
			x.Look(&b.looks[i], &b.prompts[first+i])
		}
		for _, r := range replicas {
			if i := b.of(r); i >= 0 {
				for len(b.found) <= r.Slot {
					b.found = append(b.found, cached{})
				}
				var h index.Held
				b.looks[i].HeldAt(&h, r.Slot)
				c := cachedOf(&b.prompts[first+i], &h)
				b.found[r.Slot].any += c.any
				b.found[r.Slot].gpu += c.gpu
				b.found[r.Slot].cpu += c.cpu
			}
		}
	}
}

// at is what look has found at a replica: nothing when it was not called, or at
// one that has joined since. exact: it is known from the engine's events.
func (b *blocks) at(r *Replica) (c cached, exact bool) {
	i := b.of(r)
	if !b.looked || i < 0 {
		return cached{}, false
	}
	l := &b.looks[i]
	exact = b.sizes != nil && l.Exact(r.Slot)
	switch {
	case len(b.prompts) == b.stride():
		var h index.Held
		l.HeldAt(&h, r.Slot)
		return cachedOf(&b.prompts[i], &h), exact
	case r.Slot < len(b.found):
		return b.found[r.Slot], exact
	}
	return cached{}, exact
}

// cachedOf is what an engine that holds so much of a prompt need not compute.
func cachedOf(p *index.Prompt, h *index.Held) cached {
	if p.IDs == nil {
		const tokens = index.TextBlock / bytesPerToken
		return cached{int(h[index.Tiers-1]) * tokens, int(h[index.GPU]) * tokens, int(h[index.CPU]) * tokens}
	}
	all := p.CachedBlocks(h[index.Tiers-1])
	if h[index.GPU] == h[index.Tiers-1] { // mostly so
		return cached{all, all, all}
	}
	return cached{all, p.CachedBlocks(h[index.GPU]), p.CachedBlocks(h[index.CPU])}
}

// Held is how much of a prompt a replica has in its cache.
type Held struct {
	Replica *Replica
	Tokens  int // that it need not compute
	// Blocks are those that each tier has, without what a faster one has too.
	Blocks [index.Tiers]int
}

// HeldOf tells what the model's replicas hold of a prompt, as a request that has
// it would find it.
func HeldOf(x *index.Index, m *Model, p *prompt.Prompt) []Held {
	var b blocks
	if !b.fill(index.Root(m.CacheName, m.Adapter, p.Salt), p, m.Blocks) {
		return nil
	}
	return b.held(x, m.Replicas)
}

// held tells in detail what replicas hold of the prompt: what look has found, unless
// there are several sequences, which are looked up anew.
func (b *blocks) held(x *index.Index, replicas []*Replica) []Held {
	list := make([]Held, len(replicas))
	n := b.stride()
	for i := range b.prompts {
		if !b.looked || len(b.prompts) > n {
			x.Look(&b.looks[i%n], &b.prompts[i])
		}
		for k, r := range replicas {
			list[k].Replica = r
			if b.of(r) != i%n {
				continue
			}
			h := b.looks[i%n].Held(r.Slot)
			list[k].Tokens += cachedOf(&b.prompts[i], &h).any
			faster := 0
			for tier, depth := range h {
				list[k].Blocks[tier] += int(depth) - faster
				faster = int(depth)
			}
		}
	}
	return list
}

// most is how many tokens of the prompt could be in a cache whose blocks have
// the size i.
func (b *blocks) most(i int) (tokens int) {
	for ; i < len(b.prompts); i += b.stride() {
		p := &b.prompts[i]
		tokens += p.CachedBlocks(int32(len(p.Chain)))
	}
	return tokens
}

// give gives the blocks back to the pool.
func (b *blocks) give() {
	if cap(b.hashes) > keepBlocks {
		return
	}
	clear(b.prompts) // they point into memory of others
	b.prompts, b.sizes = b.prompts[:0], nil
	blocksPool.Put(b)
}

// lookUp finds what the engines hold of the prompt that readPrompt has read. It
// cannot fail.
//
// A prompt of which only a text is known has blocks of that text, whatever the
// reason is: late prompts too. A model's prompts that come late are mostly the
// long ones, which come late again, and the memory that they take in the engine
// is taken in any case.
func (x *exchange) lookUp() {
	if x.cache = x.c.s.cache.Load(); x.cache == nil || x.prompt == nil || x.model.CacheName == "" {
		return
	}
	// A prompt of a few bytes a token, in blocks of one, has hashes that are many
	// times as large as its body: what all bodies may take bounds them too.
	if n := hashBytes * int64(hashesOf(x.prompt, x.model.Blocks)); n > smallBody && x.c.s.buffered.Load()+n > x.limits.MaxBuffered {
		return
	}
	began := time.Now()
	b := blocksPool.Get().(*blocks)
	if !b.fill(index.Root(x.model.CacheName, x.model.Adapter, x.prompt.Salt), x.prompt, x.model.Blocks) {
		b.give()
		return
	}
	x.blocks, x.lookedUp = b, true
	x.lookAgain()
	x.lookupTook = time.Since(began)
	if n := b.memory(); n > smallBody {
		x.held += n
		x.c.s.buffered.Add(n)
	}
}

// lookAgain finds what the engines hold by now, if what they hold is of use.
func (x *exchange) lookAgain() {
	if x.blocks != nil && !x.call.uncached(x.path) {
		x.blocks.look(x.cache.index, x.model.Replicas)
	}
}

// mostClaims bounds the sequences of one request that are entered in the index,
// and mostClaimed the blocks of all of them where there are several choices of
// each: n is a number that a client may write, and no engine has had its say yet.
const (
	mostClaims  = 4096
	mostClaimed = 1 << 17
)

// claim enters what the request, which is about to be sent to the replica, will
// leave in its engine's cache.
//
// It comes before sending: the engine may tell by events what the request has
// computed before this goroutine runs again. Requests that are
// chosen for between this one's look-up and its claim do not see it: a burst of
// one prompt may so be spread over as many replicas as there are processors,
// or, where connections have to be opened first, as requests within that time.
// Where it goes from the second on is what is claimed by then. The engine's cache is
// looked at again here, since what it holds when it gets the request is what it
// will find there: those that were sent there meanwhile count.
func (x *exchange) claim() {
	b := x.blocks
	if b == nil || len(x.claims) > 0 {
		return // it was sent once more, on another connection
	}
	first := b.of(x.replica)
	if first < 0 {
		return
	}
	wanted := max(x.call.limits[limitChoices], 1)
	choices := int(min(wanted, max(mostClaimed/max(int64(len(b.hashes)), 1), 1)))
	n := min(b.sequences()*choices, mostClaims)
	if x.claims = x.oneClaim[:]; n > 1 {
		x.claims = make([]index.Claim, n)
	}
	now, look := time.Now(), &b.looks[first]
	for i := range x.claims {
		p := &b.prompts[first+i/choices*b.stride()]
		if i == 0 {
			x.cache.index.Look(look, p)
			h := look.Held(x.replica.Slot)
			x.predict(p, h, n > 1 || wanted > 1 || x.call.beams, b.most(first))
			if b.sequences() == 1 && !x.call.uncached(x.path) {
				x.prefill.Cached = cachedOf(p, &h).any
			}
		}
		x.cache.index.Claim(&x.claims[i], x.replica.Slot, p, now)
	}
}

// predict sets predicted to what the engine will say that it had cached of the
// prompt, if that can be known. Of several sequences, most tokens of which can
// be cached together, vLLM tells what it had of one of them, now the first now
// the last, and SGLang the sum.
func (x *exchange) predict(p *index.Prompt, h index.Held, several bool, most int) {
	switch {
	case x.promptReason != prompt.Exact:
	case x.call.uncached(x.path) || most == 0:
		x.predicted = 0
	case !several:
		x.predicted = p.Cached(h)
	}
}

// undoClaims takes back what was claimed: the engine has not taken the request.
func (x *exchange) undoClaims() {
	for i := range x.claims {
		x.cache.index.Undo(&x.claims[i])
	}
	x.claims = nil
}

// prefilled tells the index that the engine has begun to answer. It does not run
// on the relay's goroutine, which must not wait for whoever changes the index; see
// tellPrefilled.
func (x *exchange) prefilled(now time.Time) {
	for i := range x.claims {
		x.cache.index.Prefilled(&x.claims[i], now)
	}
}

// releaseClaims tells the index that the request is over, whose answer had so
// many tokens; -1 is not known.
func (x *exchange) releaseClaims(tokens int, now time.Time) {
	if len(x.claims) == 0 {
		return
	}
	if tokens > 0 {
		// How many each of several choices had is not told.
		tokens /= len(x.claims)
	}
	for i := range x.claims {
		x.cache.index.Release(&x.claims[i], tokens, now)
	}
	x.claims = nil
}

// generated is how many tokens the answer had, as far as that can be told: whole
// says that it has come to its end.
//
// A stream that does not count them has a chunk for each, as vLLM sends it as
// long as the client is no slower. Others are one before them in a chat, with the
// role, and two behind them: [DONE], and the empty one that ends the body.
func (x *exchange) generated(u usage, known, whole bool) int {
	switch {
	case known:
		return int(min(u.completion, 1<<30))
	case !x.call.stream:
		return -1
	}
	n := int(min(x.relay.frames.Chunks+x.kernel.Chunks, 1<<30))
	if promptKind(x.path) == prompt.Chat {
		n--
	}
	if whole {
		n -= 2
	}
	return max(n, 0)
}

// tellCached tells the client what was predicted for the engine that answers, and how
// much of that was computed for this request just before. One that refuses has looked for
// nothing.
func (x *exchange) tellCached() {
	if x.predicted >= 0 && x.status < http.StatusMultipleChoices {
		x.extra = append(x.extra, "x-inferrail-cached-tokens: "...)
		x.extra = append(strconv.AppendInt(x.extra, int64(x.predicted), 10), crlf...)
		if n := x.begunTokens(); n > 0 {
			x.extra = append(x.extra, "x-inferrail-begun-tokens: "...)
			x.extra = append(strconv.AppendInt(x.extra, int64(n), 10), crlf...)
		}
	}
}

// compareCached compares what was predicted with what the engine had cached, if
// it counts the same prompt: what it had of another one says nothing of the
// index, and comparePrompt tells of it.
func (x *exchange) compareCached(u usage) {
	if x.predicted < 0 || u.partial || u.prompt != uint64(x.promptTokens) {
		return
	}
	actual := int(min(u.cached, 1<<30))
	if u.cachedTold {
		// There is a prediction for one sequence alone.
		for i := range x.claims {
			x.cache.index.Found(&x.claims[i], actual)
		}
	}
	begun := x.begunTokens()
	x.c.s.stats.cachedTokens(x.modelLabel(), x.predicted-begun, max(actual-begun, 0), u.cachedTold)
	if x.cache.checks != nil {
		x.cache.checks.Cached(x.model, x.replica, x.predicted, actual, u.cachedTold)
	}
}

// putBlocks gives the memory of the look-up back. It comes before putPrompt.
func (x *exchange) putBlocks() {
	if x.blocks != nil {
		x.blocks.give()
		x.blocks = nil
	}
}
