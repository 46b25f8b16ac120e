package virtual

import (
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/simulator"
	"github.com/inferrail/inferrail/simulator/workload"
)

// agent is one agent of a run. It does what the proxy does for a request and the
// agent around it, in the same order and with the same code: package index knows what
// is cached, package policy describes the replicas, chooses, admits and learns. It
// belongs to its run.
type agent struct {
	run    *run
	policy policy.Policy
	// learns: the policy goes by Candidate.Filter.
	learns bool
	index  *index.Index
	slots  []slot
	peers  []*policy.Peer
	turns  uint64
	random *rand.Rand
	// admission is nil when all are taken.
	admission *policy.Admission
	room      policy.Queue[*visit]
	// held are the requests that were taken and wait by the rule of holding until a
	// replica is free,
	// and heldWork how many seconds they take. They are looked at again at releases.
	holding  policy.Holding
	held     policy.Queue[*visit]
	heldWork float64
	releases time.Duration
	pieces   policy.Pieces
	parked   []*visit // in the order in which they came there
	// prefixes are what prewarming computes ahead.
	prewarming policy.Prewarming
	prefixes   policy.Prefixes

	// The memory of one decision.
	candidates []policy.Candidate
	costs      []float64
	looks      []index.Lookup // by size of blocks
	prompts    []index.Prompt
	hashes     []index.Hash
}

// slot is what an agent knows of one engine.
type slot struct {
	standing policy.Standing
	peer     policy.Peer
	inFlight int
	own      policy.Own
	hits     policy.HitRate
	// loads are the last report and the one before, as reported says: a Load stays as
	// it is while it is known.
	loads    [2]policy.Load
	reported int
	// warming: it computes a piece of a prefix ahead.
	warming bool
	// mismatch is why what is predicted of its cache is not believed.
	mismatch string
}

// model is the name of what all engines serve.
const model = "m"

// root is what all chains begin with.
var root = index.Root(model, "", nil)

func newAgent(r *run, number int, p policy.Policy, seed uint64) (*agent, error) {
	n := len(r.engines)
	a := &agent{
		run: r, policy: p, index: index.New(index.Config{}), slots: make([]slot, n),
		random:     rand.New(rand.NewPCG(seed, uint64(number))),
		candidates: make([]policy.Candidate, n), costs: make([]float64, n),
		looks: make([]index.Lookup, len(r.sizes)), prompts: make([]index.Prompt, len(r.sizes)),
	}
	_, a.learns = p.(*policy.NLMS)
	a.holding = policy.Holding{Lead: r.fleet.Hold.Seconds()}.With(p)
	a.pieces = policy.Pieces{Length: r.fleet.Pieces.Seconds()}.With(p)
	a.prewarming = policy.Prewarming{Length: r.fleet.Prewarm.Seconds()}.With(p)
	if r.fleet.Admission.Mode != "" {
		mode, err := policy.ParseAdmissionMode(r.fleet.Admission.Mode)
		if err != nil {
			return nil, err
		}
		a.admission = policy.NewAdmission(policy.AdmissionRules{Mode: mode})
	}
	for i := range a.slots {
		c := &r.configs[i]
		s := &a.slots[i]
		cache := index.SlotConfig{Model: model, BlockSize: c.BlockSize, Capacity: c.NumGPUBlocks, AfterPrefill: c.Engine == "sglang"}
		if c.Engine == "llamacpp" || c.Engine == "ollama" {
			cache.Sequences = c.MaxNumSeqs
			s.standing.SetSequences(c.MaxNumSeqs, false, r.clock())
		} else {
			s.standing.SetRoom(c.NumGPUBlocks * c.BlockSize)
		}
		a.index.Join(i, cache)
		s.peer = policy.Peer{Standing: &s.standing, Models: []string{model}}
		a.peers = append(a.peers, &s.peer)
		a.believe(i, "")
	}
	return a, nil
}

// believe says how well the index knows an engine: why is what speaks against it.
func (a *agent) believe(i int, why string) {
	a.slots[i].mismatch = why
	switch {
	case why != "":
		a.index.SetState(i, index.Mismatched, why)
	case a.run.tells(i):
		a.index.SetState(i, index.Exact, "")
	default:
		a.index.SetState(i, index.Approximate, "it tells no events")
	}
}

// ask takes a request: to an engine, to be held back, into the room, or not at all.
func (a *agent) ask(v *visit) {
	v.agent = a
	if a.room.Len() > 0 || !a.try(v) {
		a.wait(v)
	}
}

// try chooses a replica for the request and sends it there, or holds it, unless it is
// refused.
func (a *agent) try(v *visit) bool {
	now := a.run.clock()
	a.describe(v, now)
	hold, ahead := a.mustHold(), 0.0
	if hold {
		ahead = a.heldAhead()
	}
	if a.admission != nil && v.taken.IsZero() {
		wait, budget := a.candidates[v.choice].Wait+ahead, a.run.fleet.Admission.Budget
		if a.admission.Admit(now, seconds(v.expected+ahead), seconds(wait), budget).Refuse {
			return false
		}
	}
	v.taken = now
	if hold {
		a.hold(v)
	} else {
		a.send(v, now)
	}
	return true
}

// describe fills the candidates and chooses among them.
func (a *agent) describe(v *visit, now time.Time) {
	r := a.run
	a.look(v)
	if !v.turned {
		// As in the proxy, the first turn is 1, and who waits keeps the one it had.
		a.turns++
		v.turned, v.asked.Rand, v.asked.Turn = true, a.random.Uint64(), a.turns
	}
	v.asked.Begun = false
	for i := range a.slots {
		s, c := &a.slots[i], &a.candidates[i]
		s.standing.Describe(c, s.inFlight, 0, now)
		v.rest.Apart(&s.standing, c)
		v.asked.Begun = v.asked.Begun || c.Begun > 0
		c.Slot, c.Key = i, r.keys[i]
		if a.learns {
			c.Filter = s.standing.Filter.State()
		}
		size := r.sizeOf[i]
		l, p := &a.looks[size], &a.prompts[size]
		var h index.Held
		l.HeldAt(&h, i)
		c.Exact = l.Exact(i)
		c.Cached = policy.Count(p.CachedBlocks(h[index.Tiers-1]))
		c.CachedGPU, c.CachedCPU = c.Cached, c.Cached
		if h[index.GPU] != h[index.Tiers-1] {
			c.CachedGPU, c.CachedCPU = policy.Count(p.CachedBlocks(h[index.GPU])), policy.Count(p.CachedBlocks(h[index.CPU]))
		}
		if r.stored != nil {
			c.Exact, c.Cached = true, policy.Count(v.stored)
			c.CachedGPU, c.CachedCPU = c.Cached, c.Cached
		}
		s.standing.Fit(c, &v.asked)
	}
	v.choice = policy.Choose(a.policy, &v.asked, a.candidates, a.costs).Index
	v.expected = policy.TTFT(&v.asked, &a.candidates[v.choice])
}

// prefixTokens is how much of a prompt's beginning policy.Request.Prefix stands for, as
// in the proxy.
const prefixTokens = 1024

// look makes the chains of the prompt, one for each size of blocks, and finds who holds
// how much of it.
func (a *agent) look(v *visit) {
	ids := v.seq.Prompt
	n := 0
	for _, size := range a.run.sizes {
		n += len(ids) / size
	}
	a.hashes = slices.Grow(a.hashes[:0], n)
	for i, size := range a.run.sizes {
		if v.prompts != nil {
			a.prompts[i] = v.prompts[i]
			a.index.Look(&a.looks[i], &a.prompts[i])
			continue
		}
		from := len(a.hashes)
		a.hashes = index.AppendTokens(a.hashes, root, ids, size)
		a.prompts[i] = index.Prompt{Root: root, Chain: a.hashes[from:], IDs: ids, Block: size}
		a.index.Look(&a.looks[i], &a.prompts[i])
	}
	v.asked.Tokens, v.asked.Output = len(ids), min(v.request.Output, policy.MostOutput)
	v.asked.Own = ownOf(v.request, len(ids))
	v.asked.Prefix = 0
	p := &a.prompts[0]
	if n := min(max(prefixTokens/p.Block, 1), len(p.Chain)); n > 0 {
		v.asked.Prefix = p.Chain[n-1].Lo
	}
	v.asked.Session = sessionOf(v.request)
	if v.asked.Session == 0 {
		v.asked.Session = v.asked.Prefix
	}
}

// sessionOf stands for the conversation that a request belongs to, as the proxy finds
// it: by how it began, up to the first message of the user. 0 is not known.
func sessionOf(q *workload.Request) uint64 {
	h := uint64(0)
	for i := range q.Parts {
		p := &q.Parts[i]
		h = mix(h ^ p.ID)
		h = mix(h ^ uint64(p.Tokens))
		if p.Role == "user" {
			return h
		}
	}
	return 0
}

// ownOf is policy.Request.Own of a prompt of so many tokens, as the proxy finds it: by what
// part of the text there is from the first message of the user on, where an answer follows.
func ownOf(q *workload.Request, tokens int) int {
	before, all := 0, 0
	own := false
	for i := range q.Parts {
		p := &q.Parts[i]
		if !own && p.Role == "user" {
			if i+1 == len(q.Parts) || q.Parts[i+1].Role != "assistant" {
				return 0
			}
			own, before = true, all
		}
		all += p.Tokens
	}
	if !own {
		return 0
	}
	return int(int64(tokens) * int64(all-before) / int64(max(all, 1)))
}

// send sends the request to the replica that was chosen, or the next piece of its prompt.
func (a *agent) send(v *visit, now time.Time) {
	i := v.choice
	if n := a.cut(v); n > 0 {
		if a.stay(v, int(a.candidates[i].Cached)); v.rest.First() {
			a.sendPiece(v, n, now)
		} else {
			a.park(v)
		}
		return
	}
	if v.rest.End(); len(a.parked) > 0 {
		a.run.after(0, note{kind: noteParked, agent: a})
	}
	a.sendWhole(v, now)
}

// sendWhole sends all of the prompt that there is to the replica that was chosen.
func (a *agent) sendWhole(v *visit, now time.Time) {
	r, i := a.run, v.choice
	s, p := &a.slots[i], &a.prompts[r.sizeOf[i]]
	s.inFlight++
	v.engine = i
	cached := p.Cached(a.looks[r.sizeOf[i]].Held(i))
	if r.stored != nil {
		cached = v.stored
	}
	v.record.Replica = i
	v.foresee(cached)
	if v.of == nil && v.ahead == nil && v.cuts == 0 {
		a.noteWarm(v, now)
		s.standing.Settled(&v.asked, a.candidates, i)
	}
	v.sending.Promise(&s.standing, v.asked.Tokens, 1, int(a.candidates[i].Cached))
	v.sending.Foretell(&v.asked, &a.candidates[i])
	a.index.Claim(&v.claim, i, p, now)
	v.sending.Expect(&s.standing, true, a.candidates[i].Exact, now)
	r.after(r.fleet.Lag, note{kind: noteArrival, visit: v})
}

// first notes that the first token of a request has come.
func (a *agent) first(v *visit) {
	now := a.run.clock()
	v.record.First = a.run.now
	s := &a.slots[v.engine]
	v.sending.First(s.inFlight, 0, s.standing.TellsCached(), now)
	if budget := a.run.fleet.Admission.Budget; a.admission != nil && budget > 0 && v.of == nil && v.ahead == nil {
		a.admission.Observe(now, now.Sub(v.came), v.taken.Sub(v.came))
	}
	a.index.Prefilled(&v.claim, now)
	a.news()
}

// end notes that an answer is over, which has told how much of the prompt was cached.
func (a *agent) end(v *visit) {
	now := a.run.clock()
	v.record.End, v.record.Output = a.run.now, v.seq.Output
	i, s := v.engine, &a.slots[v.engine]
	s.inFlight--
	v.sending.Leave(now)
	v.sending.Learn(&s.standing, v.asked.Tokens+v.seq.Output, now)
	v.sending.Told(&s.standing, uint64(v.asked.Tokens), uint64(v.record.Cached), true)
	a.index.Found(&v.claim, v.record.Cached)
	if why, changed := a.index.Audit(i, v.predicted, v.record.Cached, true, now); changed {
		a.believe(i, why)
	}
	a.index.Release(&v.claim, v.seq.Output, now)
	switch {
	case v.ahead != nil:
		a.warmed(v)
	case v.of != nil:
		a.goOn(v)
	case v.cuts > 0:
		v.record.Cached = min(v.record.Cached, v.found)
	}
	a.news()
}

// lose takes back what a request has claimed that its engine has refused.
func (a *agent) lose(v *visit) {
	a.slots[v.engine].inFlight--
	v.sending.Leave(a.run.clock())
	a.index.Undo(&v.claim)
}

// wait lets a request wait that was refused, if there is room.
func (a *agent) wait(v *visit) {
	w := &a.run.fleet.Admission
	if a.room.Len() >= w.Queue {
		a.refuse(v)
		return
	}
	v.ticket = policy.Ticket[*visit]{Value: v, Tokens: len(v.seq.Prompt)}
	a.room.Push(&v.ticket)
	timeout := w.Timeout
	if timeout <= 0 {
		timeout = roomTime
	}
	a.run.after(timeout, note{kind: notePatience, visit: v})
	a.tick()
}

const (
	// roomTime is Admission.Timeout where there is none.
	roomTime = 10 * time.Second
	// roomTick is how long after it has tried the first in the room tries again
	// without news.
	roomTick = 50 * time.Millisecond
)

// tick lets the first in the room try again in a while.
func (a *agent) tick() { a.run.after(roomTick, note{kind: noteTick, agent: a}) }

// news sends what is held and can go, and lets those in the room try, in their order,
// until one is refused.
func (a *agent) news() {
	a.unpark()
	a.release()
	a.prewarm()
	for t := a.room.Peek(); t != nil; t = a.room.Peek() {
		if !a.try(t.Value) {
			return
		}
		a.room.Take(t)
	}
}

// leave refuses a request that has waited for too long.
func (a *agent) leave(v *visit) {
	if a.room.Remove(&v.ticket) {
		a.refuse(v)
	}
}

func (a *agent) refuse(v *visit) {
	v.record.Failure = workload.Refused
	a.run.over(v)
}

// report takes what an engine tells of its load: it holds so many requests, and used
// of its blocks are those of sequences that run.
func (a *agent) report(i int, e *simulator.Engine, now time.Time) {
	s := &a.slots[i]
	l, used := e.Load(a.run.now), 0.0
	if n, of := e.Usage(); of > 0 {
		used = float64(n) / float64(of)
	}
	counts := e.Counts()
	own := s.standing.Own(s.inFlight, now)
	before := s.standing.Load()
	s.reported ^= 1
	told := &s.loads[s.reported]
	most := policy.While(own, own, s.own)
	s.own = own
	*told = policy.Load{
		Asked: now, Told: now, Until: now.Add(reportsAge),
		Running: l.Running, Waiting: l.Waiting, WaitingTokens: -1, KV: used,
		HitRate: s.hits.Next(float64(counts.Hit), float64(counts.Queried), now),
		Own:     most.Requests, OwnWaiting: most.Waiting, OwnTokens: most.Tokens,
	}
	if l.Running+l.Waiting == 0 {
		// It is told the same until it has something to do.
		told.Until = now.Add(math.MaxInt64 / 4)
	}
	told.Follow(before)
	s.standing.SetLoad(told)
}

// expire lets the index give up what engines should have told.
func (a *agent) expire(now time.Time) {
	for _, i := range a.index.Expire(now) {
		a.believe(i, index.Silent)
	}
}

// seconds is a number of seconds, as far as it is one.
func seconds(s float64) time.Duration {
	if d := s * float64(time.Second); d > 0 {
		return time.Duration(min(d, float64(policy.MostTTFT*time.Second)))
	}
	return 0
}
