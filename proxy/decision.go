package proxy

import (
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/proxy/prompt"
)

// noted is what an exchange remembers of why it is at its replica. It is part of
// the exchange, used on its goroutine, and about the last attempt. The zero value is
// before any.
type noted struct {
	// policy is the name of the policy that has chosen, replica that of its choice, and
	// reason why; empty before there is one.
	policy, replica, reason string
	// record is what goes to the decision log, nil when this one does not.
	record *Decision
	// recent is the decision among the last ones, nil when it is not kept; lastFailed why
	// the attempt before has failed.
	recent     *recentEntry
	lastFailed string
}

// noteDecision is called when the request has got its place at a replica and is
// about to be sent. Candidates, places and what shadows have judged are still those
// of the choice.
func (x *exchange) noteDecision() {
	v, s := &x.noted, x.c.s
	v.policy, v.replica, v.reason = x.policy().Name(), x.replica.ID, x.choice.Reason
	s.stats.decisions.WithLabelValues(x.modelLabel(), v.policy, v.reason).Inc()
	if x.choseIn > 0 {
		s.stats.decisionTime.WithLabelValues(x.modelLabel()).Observe(x.choseIn.Seconds())
	}
	x.noteRecent()
	log := s.decisionLog.Load()
	if v.record == nil && log != nil && log.takes(x) {
		v.record = new(Decision)
	}
	if v.record == nil {
		return
	}
	if log != nil && log.Hashes {
		x.tellRequest(v.record)
		v.record.Prompt = x.promptHashes()
		return
	}
	x.tell(v.record)
	x.tellShadows(v.record)
}

// tellShadows adds to d what the shadows have judged of the choice.
func (x *exchange) tellShadows(d *Decision) {
	for i := range x.judged {
		j := &x.judged[i]
		d.Shadows = append(d.Shadows, ShadowDecision{j.shadow.Name(), x.places[j.chosen].ID, milliseconds(j.expected), j.same})
	}
}

// conclude is called once when a request is over, which may have been given to a
// replica before.
func (x *exchange) conclude(f failure, u usage, known bool) {
	v, s := &x.noted, x.c.s
	if v.replica == "" {
		if x.asked.Rand != 0 || x.asked.Turn != 0 {
			x.noteRefused(f)
		}
		return
	}
	at := x.prefill.Sent
	if at.IsZero() {
		at = x.sent // nothing is to be computed for it
	}
	if x.predicted >= 0 {
		s.stats.totals.askedTokens.Add(uint64(max(x.asked.Tokens, 0)))
		s.stats.totals.expectedTokens.Add(uint64(x.predicted - x.begunTokens()))
	}
	cached, observed := -1, x.observed
	if known && u.cachedTold {
		cached = int(min(u.cached, 1<<30))
	}
	s.journal.enter(Prediction{Time: at, Model: x.model.Name, Policy: v.policy, Replica: v.replica, Reason: v.reason,
		Outcome: f.label(), Status: x.status, Attempts: x.attempts, Exact: x.followed && x.promptReason == prompt.Exact, Tokens: x.asked.Tokens,
		CachedPredicted: x.predicted - x.begunTokens(), CachedActual: cached, Predicted: x.expected, Observed: observed}, x.id)
	if observed >= 0 {
		s.stats.predictedTime.WithLabelValues(x.modelLabel()).Observe(x.expected)
		s.stats.observedTime.WithLabelValues(x.modelLabel()).Observe(observed)
		if x.expected > 0 {
			s.stats.predictionRatio.WithLabelValues(x.modelLabel()).Observe(observed / x.expected)
		}
	}
	if v.record == nil && v.recent == nil {
		return
	}
	out := x.outcomeOf(f, u, known, cached)
	if v.recent != nil {
		s.recent.end(v.recent, out)
		v.recent = nil
	}
	if log := s.decisionLog.Load(); v.record != nil && log != nil {
		v.record.Outcome = out
		select {
		case log.to <- v.record:
		default:
			s.stats.decisionsDropped.Inc()
		}
	}
	v.record = nil // a connection may be idle for long
}

// outcomeOf is what came of the request: cached is what the engine has told of its
// cache, below 0 if nothing.
func (x *exchange) outcomeOf(f failure, u usage, known bool, cached int) *DecisionOutcome {
	out := &DecisionOutcome{Outcome: f.label(), Status: x.status, Attempts: x.attempts, Seconds: time.Since(x.began).Seconds()}
	if x.observed >= 0 {
		first := milliseconds(x.observed)
		out.FirstTokenMS = &first
	}
	if cached >= 0 {
		out.CachedTokens = &cached
	}
	if known {
		said := int(min(u.completion, 1<<30))
		if out.OutputTokens = &said; !u.partial {
			asked := int(min(u.prompt, 1<<30))
			out.PromptTokens = &asked
		}
	}
	return out
}

// policy is what chooses among the model's replicas.
func (x *exchange) policy() policy.Policy {
	if x.model.Policy == nil {
		return policy.LeastRequest{}
	}
	return x.model.Policy
}

// DecisionsWanted says which decisions are logged, and what is told of them. It is a
// value; the zero value is none.
type DecisionsWanted struct {
	// Sample is the part of all decisions: 1 is all. They are drawn at random.
	Sample float64
	// Hashes: what is told is the request with Decision.Prompt, so that the traffic can
	// be simulated, and not what it was chosen from. Then whole conversations are drawn,
	// and always the same, so that agents who share the traffic draw alike.
	Hashes bool
}

// takes draws whether the decision of x is logged.
func (w *DecisionsWanted) takes(x *exchange) bool {
	if w.Hashes {
		if key := x.sessionKey(); key != 0 {
			return float64(key>>11) < w.Sample*(1<<53)
		}
	}
	return rand.Float64() < w.Sample
}

// decisionLog is where a part of the decisions goes to. Immutable.
type decisionLog struct {
	DecisionsWanted
	to chan<- *Decision
}

// SetDecisions sends, from now on, the decisions that are wanted to a channel when
// their requests are over; nil ends it. What the channel has no room for is dropped and
// counted: no request waits. The receiver may keep what it gets, and calls WorkOut
// first.
func (s *Server) SetDecisions(to chan<- *Decision, wanted DecisionsWanted) {
	if to == nil || !(wanted.Sample > 0) {
		s.decisionLog.Store(nil)
		return
	}
	s.decisionLog.Store(&decisionLog{wanted, to})
}

// Decision is why a request goes where it goes, and what came of it. Explain makes
// one, and the decision log is made of them. It holds nothing of what the request
// says but its id and its model's name, and where they are wanted hashes of its prompt.
type Decision struct {
	Time      time.Time `json:"time"`
	RequestID string    `json:"request_id,omitempty"`
	// TraceID is that of the trace that the request belongs to, "" for none.
	TraceID string `json:"trace_id,omitempty"`
	Path    string `json:"path"`
	Model   string `json:"model"`
	Policy  string `json:"policy"`
	// PromptTokens is how long the prompt is; of a prompt that is not Exact it is an
	// estimate, and Why, as in the metric inferrail_prompts_total, is the reason.
	PromptTokens int    `json:"prompt_tokens"`
	Exact        bool   `json:"exact"`
	Why          string `json:"why,omitempty"`
	// Blocks is how many whole blocks the prompt has, of BlockSize tokens, or, when
	// it is not exact, bytes.
	Blocks    int `json:"blocks"`
	BlockSize int `json:"block_size"`
	// OutputTokens is how long the answer may be, 0 when that is not known.
	OutputTokens int `json:"output_tokens"`
	// OwnTokens is how much of the prompt belongs to a conversation that goes on, 0 of any
	// other.
	OwnTokens int `json:"own_tokens,omitempty"`
	// Class is the request's, and BudgetMS the time to first token that it grants, 0
	// for any.
	Class    string  `json:"class,omitempty"`
	BudgetMS float64 `json:"budget_ms,omitempty"`
	// HasPrefix and HasSession: it is known how the prompt begins, and to which
	// conversation it belongs.
	HasPrefix  bool `json:"has_prefix"`
	HasSession bool `json:"has_session"`
	// Rand and Turn are those of policy.Request, as hexadecimal and decimal numbers.
	Rand string `json:"rand"`
	Turn uint64 `json:"turn"`
	// Prompt says what the prompt shares with others, nil where that is not wanted.
	Prompt *PromptHashes `json:"prompt,omitempty"`
	// Replicas are those of the model: the candidates, and the others with the
	// reason why they are none. They are left out where Prompt is told.
	Replicas []Considered `json:"replicas,omitzero"`
	// Winner is the replica that was chosen, "" for none, and Reason says why in a
	// few words.
	Winner string `json:"winner"`
	Reason string `json:"reason"`
	// Admission is why the request is taken, or why it is not if Refused is set: then
	// it may come again after RetryAfterMS. Waits says where it waits for its turn
	// first, "" for nowhere. Only Explain sets them, but for Admission.
	Admission    string  `json:"admission,omitempty"`
	Refused      bool    `json:"refused,omitempty"`
	RetryAfterMS float64 `json:"retry_after_ms,omitempty"`
	Waits        string  `json:"waits,omitempty"`
	// HeldMS is for how long the request was held back before it was sent.
	HeldMS float64 `json:"held_ms,omitempty"`
	// Pieces is how many pieces of the prompt were sent before; what is predicted and
	// observed is from the first of them on, unless one has failed. Explain sets
	// PieceTokens, to how much of it is the first of some, 0 where it is sent whole.
	Pieces      int `json:"pieces,omitempty"`
	PieceTokens int `json:"piece_tokens,omitempty"`
	// PredictedMS is the expected time to first token there.
	PredictedMS Number           `json:"predicted_ms"`
	Shadows     []ShadowDecision `json:"shadows,omitempty"`
	// Outcome is nil as long as the request is not over.
	Outcome *DecisionOutcome `json:"outcome,omitempty"`

	// What WorkOut goes by; candidates are the first of Replicas, and held, if not
	// nil, is what these hold.
	policy     policy.Policy
	asked      policy.Request
	candidates []policy.Candidate
	held       []Held
}

// Considered is one replica in a Decision. Times are expected ones.
type Considered struct {
	Replica string `json:"replica"`
	Slot    int    `json:"slot"`
	// Excluded is why it is not to be chosen, "" when it may be. Of one that was no
	// candidate nothing that follows but InFlight and Pending is known.
	Excluded string `json:"excluded,omitempty"`
	// InFlight and Pending are the requests there, and in line for it.
	InFlight int `json:"in_flight"`
	Pending  int `json:"pending"`
	// CachedTokens need not be computed there; Blocks are those that each tier of
	// its cache has, without what a faster one has too. CacheExact: that is known
	// from its own events.
	CachedTokens int            `json:"cached_tokens"`
	Blocks       map[string]int `json:"blocks,omitempty"`
	CacheExact   bool           `json:"cache_exact"`
	// WaitMS is for the prompts ahead, whose uncached tokens are AheadTokens, and for
	// room in the KV cache, PrefillMS for this one, and ExpectedMS the time to first token.
	AheadTokens float64 `json:"ahead_tokens"`
	WaitMS      Number  `json:"wait_ms"`
	PrefillMS   Number  `json:"prefill_ms"`
	ExpectedMS  Number  `json:"expected_ms"`
	Decoding    int     `json:"decoding"`
	Queued      int     `json:"queued"`
	KV          float64 `json:"kv"`
	Share       float64 `json:"share"`
	// Speed is what its prefill is taken to cost, in microseconds a token, in
	// nanoseconds a token and token before it, and in milliseconds a prompt.
	Speed ConsideredSpeed `json:"speed"`
	// Terms add up to Cost, in the policy's measure; null stands for infinity.
	Terms []CostTerm `json:"terms,omitempty"`
	Cost  Number     `json:"cost"`
}

// ConsideredSpeed is a policy.Speed in units that people can read.
type ConsideredSpeed struct {
	TokenUS     float64 `json:"us_per_token"`
	AttentionNS float64 `json:"ns_per_pair"`
	PromptMS    float64 `json:"ms_per_prompt"`
}

// CostTerm is a policy.Term.
type CostTerm struct {
	Name  string `json:"name"`
	Value Number `json:"value"`
}

// ShadowDecision is what a shadow would have done.
type ShadowDecision struct {
	Policy      string `json:"policy"`
	Winner      string `json:"winner"`
	PredictedMS Number `json:"predicted_ms"`
	Same        bool   `json:"same"`
}

// DecisionOutcome is what came of a decision.
type DecisionOutcome struct {
	Outcome  string  `json:"outcome"`
	Status   int     `json:"status"`
	Attempts int     `json:"attempts"`
	Seconds  float64 `json:"seconds"`
	// FirstTokenMS is nil when it was not seen, and the tokens are when the engine has
	// not told them: those of the prompt, what was cached of them, and those it has
	// generated.
	FirstTokenMS *Number `json:"first_token_ms"`
	PromptTokens *int    `json:"prompt_tokens"`
	CachedTokens *int    `json:"cached_tokens"`
	OutputTokens *int    `json:"output_tokens"`
}

// Number is a float64 that JSON has as null when it is no finite number, which is
// read as infinity.
type Number float64

// MarshalJSON implements json.Marshaler.
func (n Number) MarshalJSON() ([]byte, error) {
	if math.IsNaN(float64(n)) || math.IsInf(float64(n), 0) {
		return []byte("null"), nil
	}
	return strconv.AppendFloat(nil, float64(n), 'g', -1, 64), nil
}

// UnmarshalJSON implements json.Unmarshaler.
func (n *Number) UnmarshalJSON(text []byte) error {
	if string(text) == "null" {
		*n = Number(math.Inf(1))
		return nil
	}
	f, err := strconv.ParseFloat(string(text), 64)
	*n = Number(f)
	return err
}

// milliseconds are those of so many seconds, to the microsecond.
func milliseconds(seconds float64) Number { return Number(math.Round(seconds*1e6) / 1e3) }

// tiers are those of the caches, as people are told them.
var tiers = [index.Tiers]string{index.GPU: "gpu", index.CPU: "cpu", index.Disk: "disk", index.Remote: "remote"}

// tellRequest fills d with what was decided, and with x.replica, if there is one, as the
// winner; but not with what it was chosen from.
func (x *exchange) tellRequest(d *Decision) {
	p, asked := x.policy(), &x.asked
	*d = Decision{
		Time: time.Now(), RequestID: string(x.id), TraceID: x.traceID(), Path: string(x.path), Model: x.model.Name, Policy: p.Name(),
		PromptTokens: asked.Tokens, Exact: x.followed && x.promptReason == prompt.Exact,
		BlockSize: x.model.BlockSize, OutputTokens: asked.Output, OwnTokens: asked.Own,
		HasPrefix: asked.Prefix != 0, HasSession: asked.Session != 0,
		Rand: strconv.FormatUint(asked.Rand, 16), Turn: asked.Turn,
		Reason: x.choice.Reason, PredictedMS: Number(math.Inf(1)),
		BudgetMS: float64(x.budget) / float64(time.Millisecond), Admission: x.verdict,
		HeldMS: float64(x.holding.took) / float64(time.Millisecond),
	}
	if x.piecing != nil {
		d.Pieces = x.piecing.count
	}
	if x.class != nil {
		d.Class = x.class.Name
	}
	if !d.Exact {
		d.BlockSize = index.TextBlock
		if d.Why = prompt.Route.String(); x.followed {
			d.Why = x.promptReason.String()
		}
	}
	if b := x.blocks; b != nil {
		if len(b.sizes) > 0 {
			d.BlockSize = b.sizes[0]
		}
		for i := 0; i < len(b.prompts); i += b.stride() {
			d.Blocks += len(b.prompts[i].Chain)
		}
	}
	if i := slices.Index(x.places, x.replica); x.replica != nil && i >= 0 {
		d.Winner, d.PredictedMS = x.replica.ID, milliseconds(policy.TTFT(asked, &x.candidates[i]))
		if x.piecing.foretold() {
			d.PredictedMS = milliseconds(x.piecing.expected)
		}
	}
}

// tell fills d with what was decided: from candidates and places, which pick has
// left, and with x.replica, if there is one, as the winner.
func (x *exchange) tell(d *Decision) {
	x.tellRequest(d)
	if b := x.blocks; b != nil && b.looked {
		d.held = b.held(x.cache.index, x.places)
	}
	d.policy, d.asked, d.candidates = x.policy(), x.asked, slices.Clone(x.candidates)
	// The fleet may have changed while the request was in line.
	d.Replicas = make([]Considered, len(x.places), max(len(x.places), len(x.model.Replicas)))
	for i, r := range x.places {
		row := &d.Replicas[i]
		row.Replica, row.Slot, row.Pending = r.ID, r.Slot, r.Pending()
	}
	next := 0 // of places, which are in the same order mostly
	for _, r := range x.model.Replicas {
		if next < len(x.places) && x.places[next] == r {
			next++
			continue
		}
		if slices.Contains(x.places, r) {
			continue
		}
		why := "it has as many requests as it may"
		if slices.Contains(x.tried, r) {
			why = "it has failed this request"
		}
		d.Replicas = append(d.Replicas, Excluded(r, why))
	}
}

// WorkOut works out what the candidates' costs are made of. Who gets a Decision from
// the channel of SetDecisions calls it once, before anything of Replicas is read:
// for many replicas it takes long, which no request should wait for. Explain has
// called it.
func (d *Decision) WorkOut() {
	p, asked, candidates := d.policy, &d.asked, d.candidates
	if p == nil {
		return
	}
	costs := make([]float64, len(candidates))
	p.Score(asked, candidates, costs)
	var terms []policy.Term
	for i := range candidates {
		c, row := &candidates[i], &d.Replicas[i]
		if d.held != nil {
			for tier, n := range d.held[i].Blocks {
				if n > 0 {
					if row.Blocks == nil {
						row.Blocks = map[string]int{}
					}
					row.Blocks[tiers[tier]] = n
				}
			}
		}
		row.InFlight, row.Decoding, row.Queued = int(c.InFlight), int(c.Decoding), int(c.Queued)
		row.KV, row.Share = round(float64(c.KV)), round(float64(c.Share))
		row.CachedTokens, row.CacheExact = int(c.Cached), c.Exact
		row.AheadTokens, row.WaitMS = math.Round(c.Ahead.Tokens), milliseconds(c.Wait)
		row.PrefillMS = milliseconds(c.Speed.Time(policy.Prefill(asked.Tokens-int(c.Cached), int(c.Cached))))
		row.ExpectedMS = milliseconds(policy.TTFT(asked, c))
		row.Speed = ConsideredSpeed{round(c.Speed.A * 1e6), round(c.Speed.B * 1e9), round(c.Speed.D * 1e3)}
		row.Cost = Number(costs[i])
		if row.Share == 0 {
			row.Share = 1
		}
		terms = policy.AppendTerms(terms[:0], p, asked, candidates, i, costs[i])
		row.Terms = make([]CostTerm, 0, len(terms))
		for _, t := range terms {
			row.Terms = append(row.Terms, CostTerm{t.Name, Number(t.Value)})
			if row.Excluded == "" && math.IsInf(t.Value, 1) {
				row.Excluded = "by the policy: " + t.Name
			}
		}
		if row.Excluded == "" && !(costs[i] < math.Inf(1)) {
			row.Excluded = "by the policy"
		}
	}
	d.policy, d.candidates, d.held = nil, nil, nil
}

// Excluded is a replica that was no candidate, and why.
func Excluded(r *Replica, why string) Considered {
	unknown := Number(math.Inf(1))
	return Considered{Replica: r.ID, Slot: r.Slot, Excluded: why, InFlight: r.InFlight(), Pending: r.Pending(),
		Share: r.Share(time.Now()), Cost: unknown, WaitMS: unknown, PrefillMS: unknown, ExpectedMS: unknown}
}

// round leaves six digits.
func round(f float64) float64 {
	g, err := strconv.ParseFloat(strconv.FormatFloat(f, 'g', 6, 64), 64)
	if err != nil {
		return f
	}
	return g
}

// Refusal is why a request would not come so far that a replica is chosen for it.
type Refusal struct {
	// Status is what it would be answered with, and Message what it would be told.
	Status  int
	Message string
}

// Error implements error.
func (r *Refusal) Error() string {
	return "the request would be refused with status " + strconv.Itoa(r.Status) + " (" + http.StatusText(r.Status) + "): " + r.Message
}
