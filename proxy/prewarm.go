package proxy

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/policy"
)

// prewarmer lets replicas that have nothing to prefill compute what many prompts begin with
// ahead, by the rule of Model.Prewarming. A Server has one, whose goroutine is run; any
// goroutine may call wake. Make it with newPrewarmer.
//
// What it asks an engine for is a request like any other there: it counts as in flight, as
// work ahead, and as a claim in the index, from when it is decided on until it is over. But
// there is no client behind it, and so it blames nobody, and is tried nowhere else.
type prewarmer struct {
	s *Server
	// news: some prompt has lost by what a replica lacks, or the fleet is another one.
	// ended: a request is over.
	news, ended chan struct{}
	// within is how long a request takes at most, or longer times as long as was foretold if
	// that is more.
	within time.Duration
	longer float64

	// The rest is run's. under are the replicas that compute something ahead, and what
	// ends that; sending are the goroutines.
	under   map[*Replica]*aheadPiece
	sending sync.WaitGroup
	look    index.Lookup
}

const (
	// prewarmEvery is how often it is looked for replicas that idle, while there is
	// something for them.
	prewarmEvery = 50 * time.Millisecond
	// prewarmSoon is how soon after one is done, which may not be the only one.
	prewarmSoon = 2 * time.Millisecond
	// prewarmAgain is after how long a replica is asked again that has failed.
	prewarmAgain = 30 * time.Second
	// prewarmRefusals is how many prefixes an engine refuses that computes none.
	prewarmRefusals = 3
	// prewarmWithin and prewarmLonger are those of prewarmer.
	prewarmWithin = 10 * time.Second
	prewarmLonger = 10
)

// ahead is what a replica has to do with what it computes ahead. Other goroutines than the
// prewarmer's may read what is atomic. The zero value is a replica that was not asked.
type ahead struct {
	busy atomic.Bool // it computes something
	// refuses: its engine has refused to, and would again.
	refuses atomic.Bool
	// until is before when it is not asked, in Unix nanoseconds.
	until atomic.Int64
	// ends is when what it computes was to be there, likewise.
	ends atomic.Int64
	// refusals are how many prefixes in a row were refused, as long as none was computed;
	// able: one was. They are the prewarmer's, and the request's while it is busy.
	refusals int
	able     bool
}

func newPrewarmer(s *Server) prewarmer {
	return prewarmer{s: s, news: make(chan struct{}, 1), ended: make(chan struct{}, 1), within: prewarmWithin, longer: prewarmLonger, under: map[*Replica]*aheadPiece{}}
}

// wake tells that there may be something to do.
func (p *prewarmer) wake() { signal(p.news) }

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default: // it has not been heard yet
	}
}

// run looks for what is to be done, until the server drains; then it ends what is under way.
func (p *prewarmer) run() {
	defer p.sending.Wait()
	defer func() {
		for _, a := range p.under {
			a.cancel()
		}
	}()
	tick := time.NewTimer(prewarmEvery)
	defer tick.Stop()
	for more := false; ; more = p.round(time.Now()) {
		if !more {
			select {
			case <-p.s.drains:
				return
			case <-p.news:
			}
		}
		tick.Reset(prewarmEvery) // after news, too: there may be many
		ended := p.ended
		for waiting := true; waiting; {
			select {
			case <-p.s.drains:
				return
			case <-ended:
				ended = nil
				tick.Reset(prewarmSoon)
			case <-tick.C:
				waiting = false
			}
		}
	}
}

// round asks the replicas that idle. It reports whether there may be more to do soon.
func (p *prewarmer) round(now time.Time) (more bool) {
	fleet := p.s.fleet.Load()
	for r, a := range p.under {
		switch {
		case !r.ahead.busy.Load():
			delete(p.under, r)
		case !a.wanted(fleet):
			a.cancel()
		}
	}
	for _, m := range fleet.Listed {
		if !m.Prewarming.On() || m.State == nil || !m.State.prefixes.Pending(now) {
			continue
		}
		more = true
		if m.waits() {
			continue
		}
		for _, r := range m.Replicas {
			if r.mayComputeAhead(now) {
				p.ask(m, r, now)
			}
		}
	}
	return more || len(p.under) > 0
}

// waits reports that requests of the model wait in the agent for a replica to be free.
func (m *Model) waits() bool {
	return m.State.Waiting() > 0 || m.State.Held() > 0 ||
		slices.ContainsFunc(m.Replicas, func(r *Replica) bool { return r.parked.some() })
}

// mayComputeAhead reports that nothing is known against it. Where a replica takes a number
// of requests and has no line, whoever comes meanwhile would be refused.
func (r *Replica) mayComputeAhead(now time.Time) bool {
	a := &r.ahead
	return !a.busy.Load() && !a.refuses.Load() && now.UnixNano() >= a.until.Load() && r.failures.Load() == 0 &&
		!r.takesWhole.Load() && !r.allChats.Load() && r.block.Load() > 0 && r.gate.free() && !r.gate.lineless()
}

// ask has the replica compute what it lacks most, if it has nothing else to prefill.
func (p *prewarmer) ask(m *Model, r *Replica, now time.Time) {
	var c policy.Candidate
	r.describe(&c, now)
	c.Exact = true
	if !m.Prewarming.Idle(&c) {
		return
	}
	for {
		x, ok := m.State.prefixes.Due(&c, now)
		if !ok || p.askFor(x, m, r, &c, now) {
			return
		}
	}
}

// askFor asks it for the next piece of a prefix. It reports false when it lacks nothing of
// it, so that there may be another one.
func (p *prewarmer) askFor(x policy.Prefix, m *Model, r *Replica, c *policy.Candidate, now time.Time) bool {
	known := p.s.cache.Load()
	if known == nil || m.CacheName == "" {
		return true
	}
	block := int(r.block.Load())
	prompt := prefixPrompt(m, x.IDs, block)
	known.index.Look(&p.look, &prompt)
	if !p.look.Exact(r.Slot) {
		return true
	}
	held := int(p.look.Held(r.Slot)[index.Tiers-1]) * block
	if !m.State.prefixes.Holds(x.Key, r.key, held) {
		return false
	}
	n := m.Prewarming.Cut(len(x.IDs), held, c, block)
	size := int64(mostDigits*n + smallPiece)
	limits := p.s.limits.Load()
	if p.s.buffered.Load()+size > limits.MaxBuffered {
		return true
	}
	asked := policy.Request{Tokens: n}
	c.Cached = policy.Count(held)
	c.CachedGPU, c.CachedCPU = c.Cached, c.Cached
	expected := policy.TTFT(&asked, c)
	limit := max(p.within, durationOf(p.longer*expected))
	ctx, cancel := context.WithTimeout(context.Background(), min(limit, limits.RequestTimeout))
	if !r.gate.enterAlone(cancel) {
		cancel()
		return true
	}
	prompt.IDs, prompt.Chain = prompt.IDs[:n], prompt.Chain[:n/block]
	piece := &aheadPiece{p: p, model: m, replica: r, index: known.index, cancel: cancel, prefix: x, prompt: prompt, at: *c,
		expected: expected, size: size}
	piece.sending.Promise(&r.standing, n, 1, held)
	p.s.buffered.Add(size)
	r.ahead.ends.Store(now.Add(durationOf(expected)).UnixNano())
	r.ahead.busy.Store(true)
	p.under[r] = piece
	p.sending.Go(func() { piece.run(ctx) })
	return true
}

// giveWay ends what the replica that was picked computes ahead if the request would have its
// first token in its budget without that, and not with it. It returns how many seconds sooner
// it has it.
func (x *exchange) giveWay(now time.Time) (sooner float64) {
	i := x.choice.Index
	if x.budget <= 0 || i < 0 {
		return 0
	}
	r, budget := x.places[i], x.budget.Seconds()
	if !r.ahead.busy.Load() || x.expected <= budget {
		return 0
	}
	left := time.Unix(0, r.ahead.ends.Load()).Sub(now).Seconds()
	if sooner = min(left, x.candidates[i].Wait); sooner <= 0 || x.expected-sooner > budget || !r.gate.endAlone() {
		return 0
	}
	return sooner
}

// prefixPrompt is what ids are to the index, where blocks have so many tokens.
func prefixPrompt(m *Model, ids []uint32, block int) index.Prompt {
	root := index.Root(m.CacheName, m.Adapter, nil)
	return index.Prompt{Root: root, Chain: index.AppendTokens(nil, root, ids, block), IDs: ids, Block: block}
}

// noteLost notes what the request, which has its place at the replica that was picked, as
// x.candidates[i], would have cost less had others held as much of its prompt. costs are
// still the policy's own: those of shadows are not asked for yet.
func (x *exchange) noteLost(i int) {
	m := x.model
	if !m.Prewarming.On() || m.State == nil || x.attempts > 1 || !x.candidates[i].Exact || !x.shared() || x.places[i] != x.replica {
		return
	}
	k := x.blocks.of(x.replica)
	if k < 0 {
		return
	}
	p := &x.blocks.prompts[k]
	n := min(int(x.candidates[i].Cached)/p.Block, len(p.Chain))
	if n > 0 && m.State.prefixes.Chosen(&x.asked, x.candidates, x.costs, i, p.Chain[n-1].Lo, p.IDs, n*p.Block, x.pickedAt) {
		x.c.s.prewarmer.wake()
	}
}

// aheadPiece is one request for the next piece of a prefix. The prewarmer makes it, and has
// run run on a goroutine of its own.
type aheadPiece struct {
	p       *prewarmer
	model   *Model
	replica *Replica
	index   *index.Index
	cancel  context.CancelFunc
	prefix  policy.Prefix
	// prompt is the prefix up to the end of the piece; at is what the replica was when it
	// was asked, and expected how many seconds it takes then; size is what is counted for
	// its body.
	prompt   index.Prompt
	at       policy.Candidate
	expected float64
	size     int64

	sending policy.Sending
	claim   index.Claim
	found   int // tokens that the engine had cached
}

// What comes of what is computed ahead.
const (
	prewarmComputed    = "computed"
	prewarmRefused     = "refused"     // by a status that says that the same would be again
	prewarmUnavailable = "unavailable" // by another status
	prewarmFailed      = "failed"      // no answer came
	prewarmTimeout     = "timeout"
	prewarmStopped     = "stopped" // it was in the way of a client, or is not wanted any more
)

var prewarmOutcomes = [...]string{prewarmComputed, prewarmRefused, prewarmUnavailable, prewarmFailed, prewarmTimeout, prewarmStopped}

// wanted reports that the model is prewarmed at the replica by the fleet.
func (a *aheadPiece) wanted(f *Fleet) bool {
	m := f.Models[a.model.Name]
	return m != nil && m.Name == a.model.Name && m.Prewarming.On() && slices.Contains(m.Replicas, a.replica)
}

// run asks for it, and takes down all that it counts for.
func (a *aheadPiece) run(ctx context.Context) {
	s, r, began := a.p.s, a.replica, time.Now()
	status, err := a.compute(ctx)
	outcome := prewarmComputed
	switch {
	case err == nil && status == http.StatusOK:
	case err == nil && status/100 == 4 && status != http.StatusTooManyRequests && status != http.StatusRequestTimeout:
		outcome = prewarmRefused
	case err == nil:
		outcome = prewarmUnavailable
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		outcome = prewarmTimeout
	case ctx.Err() != nil:
		outcome = prewarmStopped
	default:
		outcome = prewarmFailed
	}
	a.cancel()
	now := time.Now()
	a.sending.Leave(now)
	a.conclude(outcome, status, now)
	log := s.log
	if err != nil {
		log = log.With("error", err)
	}
	log.Debug("prewarm", "model", a.model.Name, "replica", r.ID, "outcome", outcome, "status", status,
		"tokens", len(a.prompt.IDs), "cached_tokens", a.found, "of", len(a.prefix.IDs), "expected_seconds", a.expected, "seconds", now.Sub(began).Seconds())
	s.buffered.Add(-a.size)
	r.gate.leaveAlone()
	if r.gate.free() {
		s.lines.callFirst()
	}
	s.rooms.call()
	r.ahead.busy.Store(false)
	signal(a.p.ended)
}

// conclude says what follows from it for what is asked next.
func (a *aheadPiece) conclude(outcome string, status int, now time.Time) {
	s, r, n := a.p.s, a.replica, len(a.prompt.IDs)
	label := s.modelLabel(a.model)
	s.stats.prewarms.WithLabelValues(label, outcome).Inc()
	switch outcome {
	case prewarmComputed:
		r.ahead.able = true
		s.stats.prewarmed.WithLabelValues(label).Add(float64(max(n-a.found, 0)))
		a.model.State.prefixes.Holds(a.prefix.Key, r.key, n)
	case prewarmStopped:
	case prewarmRefused:
		if !a.refusesAll(status) {
			a.model.State.prefixes.Forget(a.prefix.Key, r.key)
			r.ahead.until.Store(now.Add(prewarmAgain).UnixNano())
			return
		}
		if !r.ahead.refuses.Swap(true) {
			what := "its log says why; if it is to be so, set routing.prewarm, or the model's, to off"
			if status == http.StatusUnauthorized || status == http.StatusForbidden {
				what = "there is no client whose key could be sent: give the replica the engine's (api_key or api_key_file)"
			}
			s.log.Warn("the engine refuses to compute prompts ahead, and is not asked again", "replica", r.ID, "status", status, "what_to_do", what)
		}
	default:
		r.ahead.until.Store(now.Add(prewarmAgain).UnixNano())
	}
}

// refusesAll reports that an engine which has refused the piece with that status would
// refuse others too. It may be the prefix alone: the prompts of one model are longer at some
// engines than others take, and adapters come and go.
func (a *aheadPiece) refusesAll(status int) bool {
	switch status {
	case http.StatusUnauthorized, http.StatusForbidden:
		return true
	case http.StatusNotFound, http.StatusMethodNotAllowed:
		return a.model.Parent == "" && !a.replica.ahead.able
	}
	a.replica.ahead.refusals++
	return !a.replica.ahead.able && a.replica.ahead.refusals >= prewarmRefusals
}

// compute asks the engine for a token after the piece, and reads its answer.
func (a *aheadPiece) compute(ctx context.Context) (status int, err error) {
	s, r, p, n := a.p.s, a.replica, &a.sending, len(a.prompt.IDs)
	dialer := net.Dialer{Timeout: s.limits.Load().ConnectTimeout, Resolver: r.addresses.resolver}
	dialer.SetMultipathTCP(false)
	conn, err := dialer.DialContext(ctx, "tcp", r.Addr)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.SetDeadline(past) })()
	defer func() {
		if err != nil {
			conn.(*net.TCPConn).SetLinger(0) // a reset stops an engine that computes
		}
	}()
	body := appendPiece(make([]byte, 0, a.size), a.model.Name, a.prompt.IDs)
	head := requestHead{raw: []byte("Content-Type: application/json\r\nUser-Agent: " + product + "\r\n")}
	id := "prewarm-" + strconv.FormatUint(rand.Uint64(), 16)
	out := head.appendTo(nil, asEngine{method: []byte(http.MethodPost), target: []byte("/v1/completions"), replica: r,
		id: []byte(id), length: len(body), piece: true})

	now, asked := time.Now(), policy.Request{Tokens: n}
	var look index.Lookup
	a.index.Look(&look, &a.prompt)
	h := look.Held(r.Slot)
	p.Cached = a.prompt.Cached(h)
	a.found = p.Cached
	a.index.Claim(&a.claim, r.Slot, &a.prompt, now)
	defer a.index.Undo(&a.claim) // unless it was released
	p.Foretell(&asked, &a.at)
	p.Expect(&r.standing, true, true, now)
	bufs := net.Buffers{out, body}
	_, failed := bufs.WriteTo(conn)
	// One that answers before it has read all, to refuse it, is heard.
	resp, err := readShortAnswer(conn)
	if err != nil {
		return 0, errors.Join(failed, err)
	}
	now = time.Now()
	if resp.StatusCode == http.StatusOK {
		// Its one token is its first.
		p.First(r.InFlight(), r.Pending(), r.standing.TellsCached(), now)
		a.index.Prefilled(&a.claim, now)
	}
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, withoutAnswer(err)
	}
	if resp.StatusCode != http.StatusOK {
		return resp.StatusCode, nil
	}
	if u, known := findUsage(text[max(len(text)-TailBytes, 0):]); known {
		if u.cachedTold {
			a.found = int(min(u.cached, uint64(n)))
			a.index.Found(&a.claim, a.found)
		}
		p.Told(&r.standing, u.prompt, u.cached, u.cachedTold && !u.partial)
	}
	a.index.Release(&a.claim, 1, now)
	return resp.StatusCode, nil
}

// readShortAnswer reads the head of an answer, which is short, as its body is.
func readShortAnswer(conn net.Conn) (*http.Response, error) {
	br := bufio.NewReader(io.LimitReader(conn, maxEngineHead+mostPieceAnswer))
	for range 16 {
		resp, err := http.ReadResponse(br, &http.Request{Method: http.MethodPost})
		if err != nil {
			return nil, withoutAnswer(err)
		}
		if resp.StatusCode >= 200 || resp.StatusCode == http.StatusSwitchingProtocols {
			return resp, nil
		}
	}
	return nil, errors.New("more than 16 interim answers")
}

// withoutAnswer is an error of reading an answer without what the engine has sent, which is
// nothing for the log.
func withoutAnswer(err error) error {
	if _, ok := errors.AsType[net.Error](err); ok || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("read the answer: %w", err)
	}
	return errors.New("the answer is not valid HTTP/1.1")
}
