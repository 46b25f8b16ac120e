package proxy

import (
	"sync/atomic"
	"time"

	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/proxy/prompt"
)

// Fleet is what requests can be routed to: an immutable snapshot that the
// agent publishes (Server.SetFleet) and each request reads once.
type Fleet struct {
	// Models maps every name a client may use, aliases included, to its model.
	Models map[string]*Model
	// Listed are the models in the order GET /v1/models shows them.
	Listed []*Model
}

// unnamed is the model of a request that names none: the only one served, or
// nil. Names with the same root are names of one model, and adapters are asked
// for by name; of several names the one that most replicas have is meant.
func (f *Fleet) unnamed() *Model {
	if len(f.Listed) == 1 {
		return f.Listed[0]
	}
	var only *Model
	for _, m := range f.Listed {
		switch {
		case m.Parent != "":
		case only == nil:
			only = m
		case m.Root == "" || m.Root != only.Root:
			return nil
		case len(m.Replicas) > len(only.Replicas):
			only = m
		}
	}
	return only
}

// Model is one served model. Immutable once published.
type Model struct {
	// Name is what engines know it by. A request that used an alias has its
	// model member rewritten to Name.
	Name    string
	Aliases []string
	// Created and OwnedBy are shown in GET /v1/models, MaxModelLen when not 0.
	// Root and Parent are as the engine lists them: of a LoRA adapter, Parent
	// is the model it adapts.
	Created      int64
	OwnedBy      string
	MaxModelLen  int64
	Root, Parent string
	// Policy chooses among its replicas; nil is policy.LeastRequest. Shadows choose
	// beside it, without effect.
	Policy  policy.Policy
	Shadows []*policy.Shadow
	// State is what its decisions share, whatever snapshot they are made by; nil
	// is one that all models without their own have.
	State *ModelState
	// SessionHeader names the field that tells which conversation a request
	// belongs to; "" is x-session-id.
	SessionHeader string
	// Admission decides whether its requests are taken; nil takes all. Budget is
	// the time to first token that a request is granted that does not say, 0 is no
	// bound.
	Admission *policy.Admission
	Budget    time.Duration
	// Waiting is for requests that would be refused otherwise.
	Waiting Waiting
	// Holding is the rule by which its requests are held back; the zero value sends each
	// at once.
	Holding policy.Holding
	// Pieces is the rule by which its long prompts are computed in pieces, at replicas of
	// which it is known what they have cached; the zero value sends all whole.
	Pieces policy.Pieces
	// Prewarming is the rule by which its replicas compute what many of its prompts begin
	// with ahead, where it is known what they have cached; with the zero value they do not.
	Prewarming policy.Prewarming
	// Prompts follows its prompts; nil when there is no tokenizer. An adapter
	// has its parent's.
	Prompts *prompt.Model
	// BlockSize is how many tokens a block of its engines' KV caches has, as far
	// as that is known.
	BlockSize int
	// CacheName names the base model in the index, and Adapter the LoRA adapter,
	// "" for none: what Root of package index is given. Names of one model have
	// the same, so that they share what is cached. Without a CacheName nothing
	// is looked up.
	CacheName, Adapter string
	// Blocks are the block sizes that its replicas have (Replica.SetBlock), each
	// once. The chain of a prompt is made once for each of them.
	Blocks []int
	// Replicas that serve it and may be chosen now.
	Replicas []*Replica
}

// ModelState is what stays of a model when snapshots are replaced. The agent makes
// one for each model, and keeps it for as long as the model is listed; requests use
// it from any goroutine. The zero value is that of a model that nobody has asked for.
type ModelState struct {
	turns atomic.Uint64 // decisions
	room  room          // of those that cannot be taken
	held  room          // of those that are held back
	// prefixes are what its prompts begin with, which Model.Prewarming goes by.
	prefixes policy.Prefixes
}

// Waiting is how many of the model's requests wait instead of being refused.
func (s *ModelState) Waiting() int { return int(s.room.waiting.Load()) }

// Held is how many of the model's requests are held back until a replica is free.
func (s *ModelState) Held() int { return int(s.held.waiting.Load()) }

// Replica is one engine endpoint. The agent makes it with NewReplica, keeps it
// across snapshots for as long as the endpoint is a member, and closes it when
// it has left and its last request has ended. Its methods may be called from
// any goroutine.
type Replica struct {
	// Slot is the agent's dense number for the endpoint.
	Slot int
	// ID names it to people: header x-inferrail-replica, metric labels.
	ID string
	// Addr is host:port to dial; Host is sent as the Host field; BasePath is
	// put before the request's path ("" for none).
	Addr, Host, BasePath string
	// OnFailure is told of each request that failed at the replica through
	// the replica's fault, on that request's goroutine, with the number of
	// requests in a row that have. It must not block. nil tells nobody. It is
	// set before the first snapshot that holds the replica.
	OnFailure func(inARow int, cause error)

	key      uint64 // of policy.Candidate
	auth     atomic.Pointer[string]
	block    atomic.Int32 // tokens; 0 is not known
	rank     atomic.Int32 // +1; 0 is none
	large    atomic.Bool
	allChats atomic.Bool
	// parked are requests that wait for others that have begun there.
	parked parking
	// takesWhole: it has refused a piece of a prompt.
	takesWhole atomic.Bool
	ahead      ahead
	gate       gate
	warmth     warmth
	failures   atomic.Int64 // in a row
	// standing is what is known of it but for its cache.
	standing policy.Standing
	stays    policy.RecentMean // seconds that requests have been there
	gaps     gapCounts
	lately   lately
	upstream upstream
	// addresses is where it can be dialled.
	addresses *addresses
}

// SetAllChats tells that the engine makes a chat of what /v1/completions sends it,
// as Ollama does: its count of such a prompt is not that of the prompt, and says
// nothing of how others are followed.
func (r *Replica) SetAllChats(all bool) { r.allChats.Store(all) }

// SetKey sets the API key that the engine wants; it replaces the client's.
// Empty passes the client's on.
func (r *Replica) SetKey(key string) {
	if key != "" {
		key = "Bearer " + key
	}
	if was := r.auth.Swap(&key); was == nil && key != "" || was != nil && *was != key {
		r.ahead.refuses.Store(false) // it was the key, perhaps
	}
}

// SetBlock says how many tokens a block of the engine's KV cache has. 0, which
// is so at first, means that it is not known: nothing is looked up then.
func (r *Replica) SetBlock(tokens int) { r.block.Store(int32(tokens)) }

// SetRank says which data-parallel rank of the engine the replica is; below 0 it
// is the whole engine, as it is at first.
func (r *Replica) SetRank(rank int) { r.rank.Store(int32(max(rank, -1) + 1)) }

// SetLarge says whether the replica is meant for large requests.
func (r *Replica) SetLarge(large bool) { r.large.Store(large) }

// Large is what SetLarge was told last.
func (r *Replica) Large() bool { return r.large.Load() }

// SetBounds bounds the requests the replica is sent at one time (0: no bound),
// and those that wait in the agent for their turn there.
func (r *Replica) SetBounds(concurrency, pending int) { r.gate.bound(concurrency, pending) }

// SlowStart lets the replica, from now on and for a time, take less than its
// share of the requests.
func (r *Replica) SlowStart(now time.Time, d time.Duration) {
	r.warmth.begin(now, d)
}

// Share is the part of its share that the replica takes now: 1 unless it is in
// a slow start.
func (r *Replica) Share(now time.Time) float64 { return r.warmth.share(now) }

// SetLoad says what the engine has told of its load; nil that nothing is known.
func (r *Replica) SetLoad(l *policy.Load) { r.standing.SetLoad(l) }

// Load is what SetLoad was told last.
func (r *Replica) Load() *policy.Load { return r.standing.Load() }

// Standing is what is known of the replica but for its cache.
func (r *Replica) Standing() *policy.Standing { return &r.standing }

// Own is what the agent has at the replica at now.
func (r *Replica) Own(now time.Time) policy.Own { return r.standing.Own(r.InFlight(), now) }

// Backlog is what the agent has sent to the replica and is not prefilled yet.
func (r *Replica) Backlog() *policy.Backlog { return &r.standing.Backlog }

// Calibration is what is known of the replica's speed.
func (r *Replica) Calibration() *policy.Calibration { return &r.standing.Calibration }

// Filter is what nlms has learned of the replica.
func (r *Replica) Filter() *policy.Filter { return &r.standing.Filter }

// Evacuate sends the requests that wait for their first byte to other
// replicas, as far as there are others: this one has failed its health check.
func (r *Replica) Evacuate() { r.gate.evacuate() }

// InFlight is the number of requests sent to the replica and not finished.
func (r *Replica) InFlight() int { return int(r.gate.inside.Load()) }

// Pending is the number of requests that wait for their turn at the replica.
func (r *Replica) Pending() int { return int(r.gate.pending.Load()) }

// Failures is how many requests in a row have failed through the replica's
// fault. One that is answered sets it to 0.
func (r *Replica) Failures() int { return int(r.failures.Load()) }

// Forgive forgets the failures: the replica is tried afresh.
func (r *Replica) Forgive() { r.failures.Store(0) }

// AskAhead lets the replica be asked to compute prompts ahead although it has refused that:
// it joins anew.
func (r *Replica) AskAhead() { r.ahead.refuses.Store(false) }

func (r *Replica) failed(cause error) {
	n := r.failures.Add(1)
	if r.OnFailure != nil {
		r.OnFailure(int(n), cause)
	}
}

func (r *Replica) succeeded() {
	if r.failures.Load() != 0 { // mostly 0: reading shares the cache line
		r.failures.Store(0)
	}
}
