package proxy

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/index/kvevent"
	"github.com/inferrail/inferrail/policy"
)

// piecesRig is a cacher that computes prompts in pieces of 512 tokens, before engines that
// tell exactly what they hold.
type piecesRig struct {
	*cacher
	engines []*piecesEngine
}

// piecesEngine answers pieces and whole requests alike, and notes what it was asked.
type piecesEngine struct {
	raw  *rawEngine
	slot int
	// do, if not nil, is called for each request, and reports that it has seen to it.
	do   atomic.Pointer[func(c *engineSide, a *askedOf) bool]
	each atomic.Int64 // nanoseconds that a token takes

	mu    sync.Mutex // guards the rest
	index *index.Index
	asked []askedOf
	holds map[uint64]bool // blocks, by their names
	// adapter is what they are told to be of, "" for the base model.
	adapter string
}

// askedOf is one request as an engine has it. ids are those of a piece, or of what is to be
// computed ahead.
type askedOf struct {
	path, id, body string
	piece          int // its number, 0 for a whole request
	ahead          bool
	ids            []uint32
	header         http.Header
}

// pieceTokens is how many tokens each piece of the rig has.
const pieceTokens = 512

func newPiecesRig(t testing.TB, engines int) *piecesRig {
	t.Helper()
	r := &piecesRig{}
	var urls []string
	for i := range engines {
		e := &piecesEngine{slot: i, holds: map[uint64]bool{}}
		e.raw = newRawEngine(t, e.serve)
		r.engines = append(r.engines, e)
		urls = append(urls, e.raw.url())
	}
	r.cacher = newCacher(t, nil, urls...)
	for i, replica := range r.replicas {
		r.index.Join(replica.Slot, index.SlotConfig{Model: "base", BlockSize: 4, Capacity: 1 << 20})
		r.index.SetState(replica.Slot, index.Exact, "")
		r.engines[i].mu.Lock()
		r.engines[i].index = r.index
		r.engines[i].mu.Unlock()
	}
	r.takes(5 * time.Microsecond)
	r.change(func(m *Model) {
		// So short that each has the least that a piece has.
		m.Policy, m.Pieces, m.State = policy.NewCostModel(), policy.Pieces{Length: 1e-6}, &ModelState{}
	})
	return r
}

// takes says how long the engines take for a token, which is known of them.
func (r *piecesRig) takes(d time.Duration) {
	for i, e := range r.engines {
		e.each.Store(int64(d))
		r.replicas[i].standing.Calibration.SetPrior(policy.Speed{A: d.Seconds(), D: 1e-7})
	}
}

func (e *piecesEngine) serve(c *engineSide) {
	for {
		req := c.request()
		if req == nil {
			return
		}
		body, _ := io.ReadAll(req.Body)
		a := askedOf{path: req.URL.Path, id: req.Header.Get("X-Request-Id"), body: string(body), header: req.Header}
		_, number, ok := strings.Cut(a.id, "-piece")
		a.piece, _ = strconv.Atoi(number)
		if a.ahead = strings.HasPrefix(a.id, "prewarm-"); ok || a.ahead {
			var said struct{ Prompt []uint32 }
			if err := json.Unmarshal(body, &said); err != nil {
				panic(err)
			}
			a.ids = said.Prompt
		}
		e.mu.Lock()
		e.asked = append(e.asked, a)
		e.mu.Unlock()
		if do := e.do.Load(); do != nil && (*do)(c, &a) {
			continue
		}
		if _, err := io.WriteString(c, e.answer(&a)); err != nil {
			return
		}
	}
}

// does sets what the engine does with each request.
func (e *piecesEngine) does(f func(c *engineSide, a *askedOf) bool) { e.do.Store(&f) }

// answer is a whole answer. What a piece has computed is in the engine's cache, and told,
// before it.
func (e *piecesEngine) answer(a *askedOf) string {
	if a.ids == nil {
		if strings.Contains(a.body, `"stream":true`) {
			return chunkedHead + chunk("data: {\"choices\":[{\"text\":\"x\"}]}\n\n") + chunk("data: [DONE]\n\n") + "0\r\n\r\n"
		}
		return fixed(`{"choices":[{"text":"whole"}]}`)
	}
	return fixed(e.usage(a))
}

func (e *piecesEngine) usage(a *askedOf) string {
	cached := e.store(a.ids)
	time.Sleep(time.Duration(e.each.Load() * int64(len(a.ids)-cached)))
	return fmt.Sprintf(`{"usage":{"prompt_tokens":%d,"completion_tokens":1,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}}`,
		len(a.ids), len(a.ids)+1, min(cached, len(a.ids)-4))
}

// store enters the blocks of a prompt, and returns how many of its tokens there were.
func (e *piecesEngine) store(ids []uint32) (cached int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	var events []kvevent.Event
	name, parent, found := uint64(14695981039346656037), uint64(0), true
	for at := 0; at+4 <= len(ids); at += 4 {
		for _, id := range ids[at : at+4] {
			name = (name ^ uint64(id)) * 1099511628211
		}
		if found = found && e.holds[name]; found {
			cached += 4
		}
		if !e.holds[name] {
			e.holds[name] = true
			events = append(events, kvevent.Event{Kind: kvevent.Stored, Hashes: []uint64{name}, Parent: parent, HasParent: at > 0,
				Tokens: ids[at : at+4], BlockSize: 4, Adapter: e.adapter, AdapterID: -1, Group: -1})
		}
		parent = name
	}
	e.index.Apply(e.slot, events, time.Now())
	return cached
}

// ids are those of the requests that the engine was asked, in their order.
func (e *piecesEngine) ids() (ids []string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, a := range e.asked {
		ids = append(ids, a.id)
	}
	return ids
}

func (e *piecesEngine) all() []askedOf {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.asked)
}

// pieces is how many there were.
func (e *piecesEngine) pieces() (n int) {
	for _, a := range e.all() {
		n += min(a.piece, 1)
	}
	return n
}

// long is a prompt of 1,300 tokens of its own, which is computed in two pieces and a rest.
func long(name string) string { return name + " " + words(1300) }

// begins sends a request with an id, and what else its head is to have.
func (r *piecesRig) begins(id, body string, fields ...string) *client {
	r.t.Helper()
	return r.dial().sends(to("/v1/completions", body, append(fields, "X-Request-Id: "+id+"\r\n")...))
}

// has waits until the engine was asked for these, in this order.
func (r *piecesRig) has(engine int, ids ...string) {
	r.t.Helper()
	began := time.Now()
	for !slices.Equal(r.engines[engine].ids(), ids) {
		if time.Since(began) > 20*time.Second {
			r.t.Fatalf("engine %d was asked for %q, want %q", engine, r.engines[engine].ids(), ids)
		}
		time.Sleep(time.Millisecond)
	}
}

// outcomes are how many pieces there were by what came of them.
func (r *piecesRig) outcomes(outcome string) int {
	return int(counted(r.s.stats.pieces, func(name, value string) bool { return name == "outcome" && value == outcome }))
}

// settled waits until all requests are over, and expects that nothing is left of any: no
// place, no promise, no prompt ahead or begun, no claim, no memory, and nobody waits.
func (r *piecesRig) settled() {
	r.t.Helper()
	began := time.Now()
	for ; r.s.Datapath().Running != 0; time.Sleep(time.Millisecond) {
		if time.Since(began) > 30*time.Second {
			r.t.Fatalf("%d requests go on", r.s.Datapath().Running)
		}
	}
	now := time.Now()
	for _, replica := range r.replicas {
		var c policy.Candidate
		replica.gate.mu.Lock()
		waits := replica.gate.waiting != nil
		replica.gate.mu.Unlock()
		s := &replica.standing
		s.Describe(&c, replica.InFlight(), replica.Pending(), now)
		ahead, _ := s.Backlog.Ahead(&policy.Speed{}, now)
		if c.InFlight != 0 || waits || ahead != (policy.Work{}) || s.Promised() != (policy.Work{}) || c.Begun != 0 || c.Rest != 0 {
			r.t.Errorf("%s is left with %d requests, %+v ahead, %+v promised, %d begun with %v s", replica.ID, c.InFlight, ahead, s.Promised(), c.Begun, c.Rest)
		}
	}
	for _, s := range r.index.Stats(nil) {
		if s.Claims != 0 {
			r.t.Errorf("slot %d has %d claims left", s.Slot, s.Claims)
		}
	}
	if n := r.s.buffered.Load(); n != 0 {
		r.t.Errorf("%d bytes are still held", n)
	}
	if n, waits := r.s.rooms.waiting.Load(), r.s.waits.all(); n != 0 || len(waits) != 0 {
		r.t.Errorf("%d wait in rooms, and %v", n, waits)
	}
	if m := r.s.fleet.Load().Models["m"]; m != nil {
		held := &m.State.held
		held.mu.Lock()
		moving := held.moving
		held.mu.Unlock()
		if m.State.Held() != 0 || m.State.Waiting() != 0 || held.worked() != 0 || moving != 0 {
			r.t.Errorf("%d are held, of %v, and %d are on their way", m.State.Held(), held.worked(), moving)
		}
	}
}

// A long prompt is asked for in pieces, each a beginning of it in whole blocks, and then
// whole, byte for byte as the client has sent it; and the client gets what it gets of an
// agent that computes nothing in pieces.
func TestPieces(t *testing.T) {
	const begunTokens = "X-Inferrail-Begun-Tokens"
	body := `{ "prompt" : "` + long("one") + `", "model":"alias","max_tokens":1 }`
	answered := func(c *engineSide, a *askedOf, e *piecesEngine, cached int) bool {
		if a.piece > 0 {
			time.Sleep(30 * time.Millisecond)
			return false
		}
		io.WriteString(c, fixed(fmt.Sprintf(`{"usage":{"prompt_tokens":1301,"completion_tokens":1,"total_tokens":1302,"prompt_tokens_details":{"cached_tokens":%d}}}`, cached)))
		return true
	}
	ask := func(pieces bool) (r *piecesRig, told http.Header, d *Decision, explained *Decision) {
		r = newPiecesRig(t, 1)
		e, cached := r.engines[0], 0
		if pieces {
			cached = 2 * pieceTokens
		} else {
			r.change(func(m *Model) { m.Pieces = policy.Pieces{} })
		}
		e.does(func(c *engineSide, a *askedOf) bool { return answered(c, a, e, cached) })
		log := make(chan *Decision, 10)
		r.s.SetDecisions(log, DecisionsWanted{Sample: 1})
		explained = r.explain(body)
		c := r.begins("id", body, "Authorization: Bearer secret\r\n", "X-Tenant: t\r\n")
		resp, text := c.answer()
		if resp.StatusCode != 200 || !strings.Contains(text, `"cached_tokens":`+strconv.Itoa(cached)) {
			t.Errorf("%d %s", resp.StatusCode, text)
		}
		r.settled()
		return r, resp.Header, <-log, explained
	}
	r, told, d, explained := ask(true)
	ids := r.ids(long("one"))
	asked := r.engines[0].all()
	if len(asked) != 3 {
		t.Fatalf("it was asked for %q", r.engines[0].ids())
	}
	for i, a := range asked[:2] {
		n := (i + 1) * pieceTokens
		want := `{"model":"m","max_tokens":1,"temperature":0,"stream":false,"prompt":[` + strings.Trim(strings.ReplaceAll(fmt.Sprint(ids[:n]), " ", ","), "[]") + "]}"
		if a.path != "/v1/completions" || a.id != fmt.Sprint("id-piece", i+1) || a.body != want || !slices.Equal(a.ids, ids[:n]) {
			t.Errorf("piece %d: %s %s %.100s", i+1, a.path, a.id, a.body)
		}
		if a.header.Get("Authorization") != "Bearer secret" || a.header.Get("X-Tenant") != "t" || a.header.Get("Content-Type") != "application/json" {
			t.Errorf("piece %d has %v", i+1, a.header)
		}
	}
	if a := asked[2]; a.id != "id" || a.body != strings.Replace(body, `"alias"`, `"m"`, 1) {
		t.Errorf("then %s %.100s", a.id, a.body)
	}
	if n := r.engines[0].raw.accepted(); n != 1 {
		t.Errorf("%d connections", n)
	}
	if explained.PieceTokens != pieceTokens || explained.Pieces != 0 {
		t.Errorf("explained: pieces of %d tokens, %d of them", explained.PieceTokens, explained.Pieces)
	}
	if d.Pieces != 2 || d.PredictedMS != explained.PredictedMS {
		t.Errorf("%d pieces, foretold %v ms, want 2 and %v", d.Pieces, d.PredictedMS, explained.PredictedMS)
	}
	if told.Get(cachedTokens) != "1024" || told.Get(begunTokens) != "1024" {
		t.Errorf("the client is told %q", told)
	}
	p := r.s.Predictions(nil)[0]
	if p.CachedPredicted != 0 || p.CachedActual != 0 || p.Observed < 0.06 || milliseconds(p.Predicted) != explained.PredictedMS {
		t.Errorf("the journal says %+v", p)
	}
	if out := d.Outcome; out.FirstTokenMS == nil || *out.FirstTokenMS < 60 || *out.CachedTokens != 0 {
		t.Errorf("the outcome is %+v", out)
	}
	if n := r.outcomes(pieceComputed); n != 2 {
		t.Errorf("%d pieces are counted", n)
	}
	for _, vec := range []float64{
		counted(r.s.stats.cached, func(name, _ string) bool { return name == "kind" }),
		counted(r.s.stats.tokens, func(name, value string) bool { return name == "kind" && value == "cached" }),
	} {
		if vec != 0 {
			t.Errorf("%v tokens count as cached", vec)
		}
	}
	if got := r.told.take(); !slices.Equal(got, []string{"m e0 1024 1024 true"}) {
		t.Errorf("checks are told %q", got)
	}

	whole, without, d, explained := ask(false)
	if got := whole.engines[0].ids(); !slices.Equal(got, []string{"id"}) || d.Pieces != 0 || explained.PieceTokens != 0 {
		t.Errorf("without pieces it was asked for %q, %d pieces of %d", got, d.Pieces, explained.PieceTokens)
	}
	told.Del(begunTokens)
	without.Set(cachedTokens, "1024")
	for _, h := range []http.Header{told, without} {
		h.Del("X-Inferrail-Predicted-Ms")
		h.Del("Content-Length") // it says how much is cached
	}
	if fmt.Sprint(told) != fmt.Sprint(without) {
		t.Errorf("with pieces %v, and without %v", told, without)
	}
}

// What a client has sent before is cached and no piece's doing; and a chat is computed in
// pieces as a completion is.
func TestPiecesOfWhatIsCached(t *testing.T) {
	r := newPiecesRig(t, 1)
	r.engines[0].store(r.ids(long("one"))[:600])
	resp := r.begins("a", completion(long("one"))).expects(200, "whole")
	if got := r.engines[0].all(); len(got) != 2 || len(got[0].ids) != 1112 {
		t.Errorf("it was asked for %q", r.engines[0].ids())
	}
	if a, b := resp.Header.Get(cachedTokens), resp.Header.Get("X-Inferrail-Begun-Tokens"); a != "1112" || b != "512" {
		t.Errorf("cached %s, begun %s", a, b)
	}
	r.settled()

	chat := `{"messages":[{"role":"user","content":"` + long("chat") + `"}]}`
	r.dial().sends(post(chat, "X-Request-Id: chat\r\nIdempotency-Key: once\r\n")).expects(200, "whole")
	all := r.engines[0].all()[2:]
	if len(all) != 3 || all[0].path != "/v1/completions" || all[0].id != "chat-piece1" || all[2].path != "/v1/chat/completions" || all[2].body != chat {
		t.Errorf("of the chat it was asked for %q", r.engines[0].ids())
	}
	// Who answers a request once would take a piece for the request.
	for i, a := range all {
		if got, want := a.header.Get("Idempotency-Key"), map[bool]string{true: "once"}[i == 2]; got != want {
			t.Errorf("request %d for the chat is called %q, want %q", i, got, want)
		}
	}
	r.settled()
}

// An id that has no room for the number of a piece is passed on as it is.
func TestPiecesOfLongID(t *testing.T) {
	r := newPiecesRig(t, 1)
	id := strings.Repeat("i", 128)
	r.engines[0].does(func(c *engineSide, a *askedOf) bool {
		if strings.Contains(a.body, `"max_tokens":1,"temperature":0`) {
			io.WriteString(c, fixed("{}"))
			return true
		}
		return false
	})
	r.begins(id, completion(long("one"))).expects(200, "whole")
	r.has(0, id, id, id)
	r.settled()
}

// Who comes while a long prompt is computed need not wait for all of it.
func TestPiecesLetOthersGo(t *testing.T) {
	hold := func(r *piecesRig, engine int, id string) (release func()) {
		held := make(chan struct{})
		r.engines[engine].does(func(c *engineSide, a *askedOf) bool {
			if a.id == id {
				<-held
			}
			return false
		})
		release = sync.OnceFunc(func() { close(held) })
		t.Cleanup(release)
		return release
	}
	t.Run("at the same engine", func(t *testing.T) {
		r := newPiecesRig(t, 1)
		release := hold(r, 0, "long-piece1")
		c := r.begins("long", completion(long("one")))
		r.has(0, "long-piece1")
		r.begins("short", completion("short")).expects(200, "whole")
		release()
		c.expects(200, "whole")
		r.has(0, "long-piece1", "short", "long-piece2", "long")
		r.settled()
	})
	t.Run("at the other one", func(t *testing.T) {
		r := newPiecesRig(t, 2)
		both := r.replicas
		r.change(func(m *Model) { m.Replicas = both[:1] })
		release := hold(r, 0, "long-piece1")
		c := r.begins("long", completion(long("one")))
		r.has(0, "long-piece1")
		r.change(func(m *Model) { m.Replicas = both })
		r.begins("short", completion("short")).expects(200, "whole")
		release()
		c.expects(200, "whole")
		if got := r.engines[1].ids(); len(got) == 0 || got[0] != "short" {
			t.Errorf("the other one was asked for %q", got)
		}
		r.settled()
	})
	t.Run("where one is computed at a time", func(t *testing.T) {
		r := newPiecesRig(t, 1)
		r.replicas[0].SetBounds(1, 5)
		release := hold(r, 0, "long-piece1")
		c := r.begins("long", completion(long("one")))
		r.has(0, "long-piece1")
		short := r.begins("short", completion("short"))
		eventually(t, 20*time.Second, "it is in line", func() bool { return r.replicas[0].Pending() == 1 })
		release()
		short.expects(200, "whole")
		c.expects(200, "whole")
		r.has(0, "long-piece1", "short", "long-piece2", "long")
		r.settled()
	})
	t.Run("and is not refused where there is no place any more", func(t *testing.T) {
		r := newPiecesRig(t, 1)
		r.replicas[0].SetBounds(1, 1)
		finish := make(chan struct{})
		over := sync.OnceFunc(func() { close(finish) })
		t.Cleanup(over)
		first := make(chan struct{})
		r.engines[0].does(func(c *engineSide, a *askedOf) bool {
			switch a.id {
			case "long-piece1":
				<-first
			case "short":
				<-finish
			}
			return false
		})
		c := r.begins("long", completion(long("one")))
		r.has(0, "long-piece1")
		short := r.begins("short", completion("short"))
		eventually(t, 20*time.Second, "it is in line", func() bool { return r.replicas[0].Pending() == 1 })
		r.replicas[0].SetBounds(1, 0)
		close(first)
		eventually(t, 20*time.Second, "it waits for a place", func() bool { return r.s.fleet.Load().Models["m"].State.Held() == 1 })
		if s := &r.replicas[0].standing; s.Promised() != (policy.Work{}) {
			t.Errorf("%+v is promised meanwhile", s.Promised())
		}
		over()
		short.expects(200, "whole")
		c.expects(200, "whole")
		r.has(0, "long-piece1", "short", "long") // there is no line any more
		r.settled()
	})
	t.Run("and is held back until they are served", func(t *testing.T) {
		r := newPiecesRig(t, 1)
		r.takes(100 * time.Microsecond)
		r.change(func(m *Model) { m.Holding = policy.Holding{Lead: 1e-9} })
		log := make(chan *Decision, 10)
		r.s.SetDecisions(log, DecisionsWanted{Sample: 1})
		release := make(chan struct{})
		r.engines[0].does(func(c *engineSide, a *askedOf) bool {
			if a.piece == 0 {
				<-release
			}
			return false
		})
		// One with a salt is sent whole.
		first := r.begins("first", completion(words(9000), `"cache_salt":"s"`))
		r.has(0, "first")
		c := r.begins("long", completion(long("one")))
		eventually(t, 20*time.Second, "it is held", func() bool { return r.s.fleet.Load().Models["m"].State.Held() == 1 })
		time.Sleep(20 * time.Millisecond)
		release <- struct{}{}
		first.expects(200, "whole")
		r.has(0, "first", "long-piece1", "long-piece2", "long")
		release <- struct{}{}
		c.expects(200, "whole")
		for range 2 {
			if d := <-log; d.RequestID == "long" && (d.Pieces != 2 || d.HeldMS < 20) {
				t.Errorf("%d pieces, held for %v ms", d.Pieces, d.HeldMS)
			}
		}
		eventually(t, 20*time.Second, "it is measured", func() bool { return (&holdingRig{&waitingRig{rig: r.rig}}).measured() == 1 })
		r.settled()
	})
	t.Run("and is held back between two pieces", func(t *testing.T) {
		r := newPiecesRig(t, 1)
		r.takes(100 * time.Microsecond)
		r.change(func(m *Model) { m.Holding = policy.Holding{Lead: 1e-9} })
		piece, other := make(chan struct{}), make(chan struct{})
		r.engines[0].does(func(c *engineSide, a *askedOf) bool {
			switch a.id {
			case "long-piece1":
				<-piece
			case "other":
				<-other
			}
			return false
		})
		c := r.begins("long", completion(long("one")))
		r.has(0, "long-piece1")
		between := r.begins("other", completion(words(9000), `"cache_salt":"s"`))
		r.has(0, "long-piece1", "other")
		piece <- struct{}{}
		eventually(t, 20*time.Second, "it is held", func() bool { return r.s.fleet.Load().Models["m"].State.Held() == 1 })
		var s policy.Candidate
		if r.replicas[0].standing.Describe(&s, 0, 0, time.Now()); s.Begun != 1 || !(s.Rest > 0) {
			t.Errorf("%d have begun there, with %v s", s.Begun, s.Rest)
		}
		other <- struct{}{}
		between.expects(200, "whole")
		c.expects(200, "whole")
		r.has(0, "long-piece1", "other", "long-piece2", "long")
		r.settled()
	})
}

// Of several long prompts one goes on, and the others wait for it: the shortest first.
func TestPiecesOfSeveral(t *testing.T) {
	// begun has one of 1,300 tokens begin, which the engine computes until it is released.
	begun := func(t *testing.T, token time.Duration) (r *piecesRig, first *client, release func()) {
		r = newPiecesRig(t, 1)
		r.takes(token)
		held := make(chan struct{})
		r.engines[0].does(func(c *engineSide, a *askedOf) bool {
			if a.id == "a-piece1" {
				<-held
			}
			return false
		})
		release = sync.OnceFunc(func() { close(held) })
		t.Cleanup(release)
		first = r.begins("a", completion(long("a")))
		r.has(0, "a-piece1")
		return r, first, release
	}
	parked := func(r *piecesRig, n int) {
		r.t.Helper()
		eventually(r.t.(*testing.T), 20*time.Second, "it waits for the first", func() bool { return r.s.waits.all()[waitKey{"m", DefaultClass}] == n })
	}
	longer := "b " + words(1800)
	t.Run("a longer one waits", func(t *testing.T) {
		r, a, release := begun(t, 200*time.Microsecond)
		log := make(chan *Decision, 10)
		r.s.SetDecisions(log, DecisionsWanted{Sample: 1})
		b := r.begins("b", completion(longer, `"max_tokens":1`))
		parked(r, 1)
		time.Sleep(20 * time.Millisecond)
		release()
		a.expects(200, "whole")
		b.expects(200, "whole")
		r.settled()
		ids := r.engines[0].ids()
		if want := []string{"a-piece1", "a-piece2", "a"}; !slices.Equal(slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return id[0] == 'b' }), want) {
			t.Errorf("the first was asked for as %q", ids)
		}
		if at := slices.Index(ids, "b-piece1"); at < 2 {
			t.Errorf("the engine was asked for %q", ids)
		}
		for range 2 {
			if d := <-log; d.RequestID == "b" && d.HeldMS < 20 {
				t.Errorf("it was held for %v ms", d.HeldMS)
			}
		}
	})
	t.Run("a shorter one passes", func(t *testing.T) {
		r, a, release := begun(t, 200*time.Microsecond)
		b := r.begins("b", completion("b "+words(600)))
		r.has(0, "a-piece1", "b-piece1", "b")
		release()
		b.expects(200, "whole")
		a.expects(200, "whole")
		r.has(0, "a-piece1", "b-piece1", "b", "a-piece2", "a")
		r.settled()
	})
	t.Run("one that an engine has lost is not waited for for ever", func(t *testing.T) {
		r, a, release := begun(t, 5*time.Microsecond)
		r.begins("b", completion(longer)).expects(200, "whole")
		release()
		a.expects(200, "whole")
		r.settled()
	})
	t.Run("the first leaves", func(t *testing.T) {
		r, a, _ := begun(t, 2*time.Millisecond)
		b := r.begins("b", completion(longer))
		parked(r, 1)
		a.Close()
		eventually(t, 20*time.Second, "it begins", func() bool { return slices.Contains(r.engines[0].ids(), "b-piece1") })
		b.Close()
		r.settled()
	})
	t.Run("who waits leaves, and pays nothing", func(t *testing.T) {
		r, a, release := begun(t, 2*time.Millisecond)
		k := key("k", policy.Rates{InputTokens: 6000})
		r.s.SetAccess(NewAccess([]*Key{k}, nil))
		b := r.begins("b", completion(longer), "Authorization: Bearer K\r\n")
		parked(r, 1)
		b.Close()
		parked(r, 0)
		eventually(t, 20*time.Second, "the key has all", func() bool { return k.left().Input.Remaining == 6000 })
		var c policy.Candidate
		if r.replicas[0].standing.Describe(&c, 0, 0, time.Now()); c.Begun != 1 {
			t.Errorf("%d have begun", c.Begun)
		}
		release()
		a.expects(200, "whole")
		r.settled()
	})
	t.Run("the server stops", func(t *testing.T) {
		r, a, _ := begun(t, 2*time.Millisecond)
		b := r.begins("b", completion(longer))
		parked(r, 1)
		done := make(chan error)
		go func() { done <- r.shutdown(50 * time.Millisecond) }()
		a.expects(503, "stopping")
		b.expects(503, "stopping")
		<-done
		r.settled()
	})
}

// What is sent whole.
func TestPiecesOfNothing(t *testing.T) {
	f := func(name, path, body string, change func(r *piecesRig)) {
		t.Run(name, func(t *testing.T) {
			r := newPiecesRig(t, 1)
			if change != nil {
				change(r)
			}
			r.dial().sends(to(path, body, "X-Request-Id: id\r\n")).expects(200, "")
			r.has(0, "id")
			r.settled()
		})
	}
	model := func(f func(m *Model)) func(r *piecesRig) { return func(r *piecesRig) { r.change(f) } }
	const path = "/v1/completions"
	f("off", path, completion(long("a")), model(func(m *Model) { m.Pieces = policy.Pieces{} }))
	f("another policy", path, completion(long("a")), model(func(m *Model) { m.Policy = inOrder{}; m.Pieces = m.Pieces.With(inOrder{}) }))
	f("a cache that is not followed", path, completion(long("a")), func(r *piecesRig) { r.index.SetState(0, index.Approximate, "") })
	f("one whose events were wrong", path, completion(long("a")), func(r *piecesRig) { r.index.SetState(0, index.Mismatched, "") })
	f("no index", path, completion(long("a")), func(r *piecesRig) { r.s.SetIndex(nil, nil) })
	f("blocks of another size", path, completion(long("a")), func(r *piecesRig) { r.replicas[0].SetBlock(16) })
	f("a salt", path, completion(long("a"), `"cache_salt":"s"`), nil)
	f("several prompts", path, `{"prompt":["`+long("a")+`","`+long("b")+`"]}`, nil)
	f("one that is scored", path, completion(long("a"), `"echo":true`, `"logprobs":1`), nil)
	f("logprobs of the prompt", path, completion(long("a"), `"prompt_logprobs":1`), nil)
	f("one that no engine takes", path, completion(long("a")), model(func(m *Model) { m.MaxModelLen = 1000 }))
	f("a short one", path, completion(words(500)), nil)
	f("no line where places are few", path, completion(long("a")), func(r *piecesRig) { r.replicas[0].SetBounds(3, 0) })
	f("a text", path, completion(long("a")), model(func(m *Model) { m.Prompts = nil }))
	f("counting", "/tokenize", completion(long("a")), nil)
	f("no memory", path, completion(long("a")), func(r *piecesRig) {
		others := r.s.limits.Load().MaxBuffered - 3000
		r.s.buffered.Add(others)
		r.engines[0].does(func(c *engineSide, a *askedOf) bool {
			r.s.buffered.Add(-others)
			return false
		})
	})

	t.Run("one that has failed before", func(t *testing.T) {
		r := newPiecesRig(t, 1)
		limits := *r.s.limits.Load()
		limits.Backoff = time.Millisecond
		r.s.SetLimits(limits)
		var failed atomic.Int64
		r.engines[0].does(func(c *engineSide, a *askedOf) bool {
			if a.piece == 0 && failed.Add(1) == 1 {
				io.WriteString(c, status(503, "busy"))
				return true
			}
			return false
		})
		resp := r.begins("id", completion(long("a"))).expects(200, "whole")
		r.has(0, "id-piece1", "id-piece2", "id", "id")
		if n := resp.Header.Get("X-Inferrail-Begun-Tokens"); n != "1024" {
			t.Errorf("%s tokens have begun", n)
		}
		r.settled()
		if p := r.s.Predictions(nil)[0]; p.Attempts != 2 {
			t.Errorf("%+v", p)
		}
	})
}

// A piece that is refused, or that an engine fails to compute, is not what the client is
// told: the whole request is sent then.
func TestPiecesFail(t *testing.T) {
	refused := func(code int, again int) {
		t.Run(fmt.Sprint("status ", code), func(t *testing.T) {
			r := newPiecesRig(t, 1)
			r.engines[0].does(func(c *engineSide, a *askedOf) bool {
				if a.piece > 0 {
					io.WriteString(c, status(code, `{"error":{"message":"no"}}`))
				}
				return a.piece > 0
			})
			for i := range 2 {
				resp := r.begins(fmt.Sprint(i), completion(long(fmt.Sprint("p", i)))).expects(200, "whole")
				if n := resp.Header.Get("X-Inferrail-Begun-Tokens"); n != "" {
					t.Errorf("%s tokens have begun", n)
				}
				r.settled()
			}
			if n := r.engines[0].pieces(); n != again || r.outcomes(pieceRefused) != again {
				t.Errorf("%d pieces were sent, %d counted, want %d", n, r.outcomes(pieceRefused), again)
			}
			if n := r.engines[0].raw.accepted(); n != 1 {
				t.Errorf("%d connections", n)
			}
			if n := r.replicas[0].Failures(); n != 0 {
				t.Errorf("%d failures", n)
			}
		})
	}
	for _, code := range []int{400, 404, 405, 422} {
		refused(code, 1)
	}
	for _, code := range []int{429, 500, 502, 503} {
		refused(code, 2)
	}

	t.Run("because of what the client is", func(t *testing.T) {
		r := newPiecesRig(t, 1)
		r.engines[0].does(func(c *engineSide, a *askedOf) bool {
			if a.header.Get("Authorization") != "Bearer good" {
				io.WriteString(c, status(401, "who are you"))
				return true
			}
			return false
		})
		r.begins("bad", completion(long("a"))).expects(401, "who are you")
		r.begins("good", completion(long("a")), "Authorization: Bearer good\r\n").expects(200, "whole")
		r.has(0, "bad-piece1", "bad", "good-piece1", "good-piece2", "good")
		r.settled()
	})

	f := func(name, outcome string, failures int, do func(e *piecesEngine, c *engineSide, a *askedOf)) {
		t.Run(name, func(t *testing.T) {
			r := newPiecesRig(t, 1)
			e := r.engines[0]
			var told atomic.Int64
			r.replicas[0].OnFailure = func(int, error) { told.Add(1) }
			r.change(func(m *Model) {}) // it is set before the replica is published
			e.does(func(c *engineSide, a *askedOf) bool {
				if a.piece > 0 {
					do(e, c, a)
				}
				return a.piece > 0
			})
			r.begins("id", completion(long("a"))).expects(200, "whole")
			r.settled()
			pieces := 1
			if outcome == pieceComputed {
				pieces = 2
			}
			if got := r.outcomes(outcome); got != pieces || e.pieces() != pieces {
				t.Errorf("%d pieces are %s, of %d", got, outcome, e.pieces())
			}
			if told.Load() != int64(failures) || r.replicas[0].Failures() != 0 {
				t.Errorf("%d failures were told, and %d are left", told.Load(), r.replicas[0].Failures())
			}
			// Nothing of it is in the way of what comes next.
			r.begins("next", completion("short")).expects(200, "whole")
			r.settled()
		})
	}
	says := func(s string) func(e *piecesEngine, c *engineSide, a *askedOf) {
		return func(e *piecesEngine, c *engineSide, a *askedOf) { io.WriteString(c, s) }
	}
	closes := func(s string) func(e *piecesEngine, c *engineSide, a *askedOf) {
		return func(e *piecesEngine, c *engineSide, a *askedOf) { io.WriteString(c, s); c.Close() }
	}
	f("it closes", "engine_died", 1, closes(""))
	f("it closes within the head", "engine_died", 1, closes("HTTP/1.1 200 OK\r\nContent-"))
	f("it closes after the head", "engine_died", 1, closes("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"))
	f("it closes within the body", "engine_died", 1, closes("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"))
	f("it closes within a chunk", "engine_died", 1, closes("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n{"))
	f("garbage", "engine_head", 1, says("no HTTP at all\r\n\r\n"))
	f("garbage for a chunk", "engine_head", 1, says("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n"))
	f("another protocol", "engine_head", 1, says("HTTP/1.1 101 Switching Protocols\r\n\r\n"))
	f("an endless head", "engine_head", 1, says("HTTP/1.1 200 OK\r\nA: "+strings.Repeat("a", 2*maxEngineHead)))
	f("a body that is too long", "engine_head", 1, says("HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"+strings.Repeat("a", 2*mostPieceAnswer)))
	f("an endless body", "engine_head", 1, func(e *piecesEngine, c *engineSide, a *askedOf) {
		io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
		for {
			if _, err := io.WriteString(c, chunk(strings.Repeat("a", 1000))); err != nil {
				return
			}
		}
	})
	f("an answer in chunks", pieceComputed, 0, func(e *piecesEngine, c *engineSide, a *askedOf) {
		body := e.usage(a)
		io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"+chunk(body[:20]))
		time.Sleep(5 * time.Millisecond)
		io.WriteString(c, chunk(body[20:])+"0\r\n")
		time.Sleep(5 * time.Millisecond)
		io.WriteString(c, "\r\n")
	})
	f("one that lasts until the end", pieceComputed, 0, func(e *piecesEngine, c *engineSide, a *askedOf) {
		io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
		body := e.usage(a)
		time.Sleep(5 * time.Millisecond)
		io.WriteString(c, body)
		c.Close()
	})
	f("one that is followed by something", pieceComputed, 0, func(e *piecesEngine, c *engineSide, a *askedOf) {
		io.WriteString(c, fixed(e.usage(a))+"HTTP/1.1 200 OK\r\n")
	})
	f("one that says that it closes", pieceComputed, 0, func(e *piecesEngine, c *engineSide, a *askedOf) {
		body := e.usage(a)
		io.WriteString(c, fmt.Sprintf("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", len(body), body))
		c.Close()
	})
	f("one without a body", pieceComputed, 0, func(e *piecesEngine, c *engineSide, a *askedOf) {
		e.store(a.ids)
		io.WriteString(c, fixed(""))
	})
	f("after others that are interim", pieceComputed, 0, func(e *piecesEngine, c *engineSide, a *askedOf) {
		io.WriteString(c, "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n")
		time.Sleep(5 * time.Millisecond)
		io.WriteString(c, fixed(e.usage(a)))
	})
	f("no content", pieceRefused, 0, says("HTTP/1.1 204 No Content\r\n\r\n"))

	t.Run("nothing, until the request's time is over", func(t *testing.T) {
		for _, begun := range []string{"", "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"} {
			r := newPiecesRig(t, 1)
			limits := *r.s.limits.Load()
			limits.RequestTimeout = 150 * time.Millisecond
			r.s.SetLimits(limits)
			closed := make(chan time.Duration, 1)
			r.engines[0].does(func(c *engineSide, a *askedOf) bool {
				io.WriteString(c, begun)
				closed <- c.waitClosed()
				return true
			})
			resp := r.begins("id", completion(long("a"))).expects(504, "did not answer in time")
			if got := resp.Header.Get("X-Inferrail-Replica"); got != "e0" {
				t.Errorf("the replica is %q", got)
			}
			<-closed
			r.settled()
			if n := r.replicas[0].Failures(); n != 1 || r.outcomes("engine_timeout") != 1 {
				t.Errorf("%d failures, %d pieces that took too long", n, r.outcomes("engine_timeout"))
			}
			if p := r.s.Predictions(nil); len(p) != 1 || p[0].Outcome != "engine_timeout" || p[0].Replica != "e0" || p[0].Status != 504 || p[0].Observed >= 0 {
				t.Errorf("the journal says %+v", p)
			}
		}
	})
	t.Run("an idle connection has died", func(t *testing.T) {
		r := newPiecesRig(t, 1)
		r.engines[0].does(func(c *engineSide, a *askedOf) bool {
			if c.n == 0 && a.piece > 0 {
				c.Close()
				return true
			}
			return false
		})
		r.begins("short", completion("short")).expects(200, "whole")
		r.settled() // its connection is idle
		r.begins("id", completion(long("a"))).expects(200, "whole")
		r.has(0, "short", "id-piece1", "id-piece1", "id-piece2", "id")
		if n := r.s.Datapath().Replays; n != 1 || r.outcomes(pieceComputed) != 2 {
			t.Errorf("%d replays, %d pieces", n, r.outcomes(pieceComputed))
		}
		r.settled()
	})
	t.Run("an answer before all was read", func(t *testing.T) {
		withoutRace(t) // it takes a prompt of megabytes
		r := newPiecesRig(t, 1)
		r.replicas[0].standing.Calibration.SetPrior(policy.Speed{A: 1e-6})
		r.change(func(m *Model) { m.Pieces = policy.Pieces{Length: 2} })
		var early atomic.Int64
		e := newRawEngine(t, func(c *engineSide) {
			if early.Add(1) == 1 {
				c.SetReadBuffer(4 << 10)
				io.WriteString(c, status(413, "too large"))
				time.Sleep(50 * time.Millisecond)
				return
			}
			for c.request() != nil {
				io.WriteString(c, fixed("whole"))
			}
		})
		replica, err := NewReplica(0, "early", e.url())
		if err != nil {
			t.Fatal(err)
		}
		replica.SetBlock(4)
		replica.standing.Calibration.SetPrior(policy.Speed{A: 1e-6})
		r.replicas[0].Close()
		r.replicas[0] = replica
		r.change(func(m *Model) { m.Replicas = r.replicas })
		r.begins("id", completion("a "+words(3_500_000))).expects(200, "whole")
		r.settled()
		if n := r.outcomes(pieceRefused) + r.outcomes("engine_died"); n != 1 || early.Load() != 2 {
			t.Errorf("%d pieces were refused, %d connections", n, early.Load())
		}
	})
	t.Run("nobody listens", func(t *testing.T) {
		r := newPiecesRig(t, 2)
		dead, err := NewReplica(0, "dead", refusing(t))
		if err != nil {
			t.Fatal(err)
		}
		dead.SetBlock(4)
		r.replicas[0].Close()
		r.replicas[0] = dead
		r.replicas[1].standing.Calibration.SetPrior(policy.Speed{A: 1})
		dead.standing.Calibration.SetPrior(policy.Speed{A: 1e-4})
		r.change(func(m *Model) { m.Replicas = r.replicas })
		resp := r.begins("id", completion(long("a"))).expects(200, "whole")
		// It is not asked again, and counts.
		if resp.Header.Get("X-Inferrail-Replica") != "e1" || r.retries() != 0 || dead.Failures() != 1 || r.outcomes("connect_failed") != 1 {
			t.Errorf("%s answers after %d retries, with %d failures and %d pieces", resp.Header.Get("X-Inferrail-Replica"), r.retries(), dead.Failures(), r.outcomes("connect_failed"))
		}
		r.has(1, "id")
		r.settled()
	})
	t.Run("what another engine holds has not begun", func(t *testing.T) {
		r := newPiecesRig(t, 2)
		r.engines[1].store(r.ids(long("a"))[:800])
		r.replicas[1].standing.Calibration.SetPrior(policy.Speed{A: 1})
		r.engines[0].does(func(c *engineSide, a *askedOf) bool { c.Close(); return true })
		resp := r.begins("id", completion(long("a"))).expects(200, "whole")
		if h := resp.Header; h.Get("X-Inferrail-Replica") != "e1" || h.Get(cachedTokens) != "800" || h.Get("X-Inferrail-Begun-Tokens") != "" {
			t.Errorf("%v", h)
		}
		r.settled()
	})
	t.Run("an engine that keeps nothing is not asked over and over", func(t *testing.T) {
		r := newPiecesRig(t, 1)
		e := r.engines[0]
		e.does(func(c *engineSide, a *askedOf) bool {
			if a.piece > 0 {
				body := e.usage(a)
				e.mu.Lock()
				clear(e.holds)
				e.mu.Unlock()
				r.index.Apply(0, []kvevent.Event{{Kind: kvevent.Cleared}}, time.Now())
				io.WriteString(c, fixed(body))
			}
			return a.piece > 0
		})
		r.begins("id", completion(long("a"))).expects(200, "whole")
		r.has(0, "id-piece1", "id")
		r.settled()
	})
}

// A client that leaves, a server that stops and a replica that goes while a piece is
// computed leave nothing behind.
func TestPiecesEnd(t *testing.T) {
	// hangs lets the first engine compute the first piece until it is released, and tells
	// when the connection is closed before.
	hangs := func(r *piecesRig) (release chan struct{}, closed chan struct{}) {
		release, closed = make(chan struct{}), make(chan struct{}, 1)
		r.engines[0].does(func(c *engineSide, a *askedOf) bool {
			if a.id != "id-piece1" {
				return false
			}
			gone := make(chan struct{})
			go func() { c.br.Peek(1); close(gone) }()
			select {
			case <-release:
				c.SetReadDeadline(past)
				<-gone
				c.SetReadDeadline(time.Time{})
				return false
			case <-gone:
				closed <- struct{}{}
				c.Close()
				return true
			}
		})
		return release, closed
	}
	within := func(t *testing.T, what string, ch chan struct{}) {
		t.Helper()
		select {
		case <-ch:
		case <-time.After(20 * time.Second):
			t.Fatalf("not within 20 s: %s", what)
		}
	}
	t.Run("the client leaves", func(t *testing.T) {
		r := newPiecesRig(t, 1)
		k := key("k", policy.Rates{InputTokens: 6000})
		r.s.SetAccess(NewAccess([]*Key{k}, nil))
		_, closed := hangs(r)
		c := r.begins("id", completion(long("a")), "Authorization: Bearer K\r\n")
		r.has(0, "id-piece1")
		if got := r.engines[0].all()[0].header.Get("Authorization"); got != "" {
			t.Errorf("the engine is told the key %q", got)
		}
		c.Close()
		within(t, "the engine sees it", closed)
		r.settled()
		if n := r.outcomes("client_left"); n != 1 || r.replicas[0].Failures() != 0 {
			t.Errorf("%d pieces, %d failures", n, r.replicas[0].Failures())
		}
		if n := k.left().Input.Remaining; n > 6000-300 {
			t.Errorf("the key has %d tokens left, and has had an engine compute", n)
		}
		if n := r.holds(0, long("a")); n != 0 {
			t.Errorf("%d blocks are taken to be held", n)
		}
	})
	t.Run("the server is stopped", func(t *testing.T) {
		r := newPiecesRig(t, 1)
		_, closed := hangs(r)
		c := r.begins("id", completion(long("a")))
		r.has(0, "id-piece1")
		done := make(chan error)
		go func() { done <- r.shutdown(50 * time.Millisecond) }()
		c.expects(503, "stopping")
		within(t, "the engine sees it", closed)
		<-done
		r.settled()
	})
	t.Run("the server stops when it is done", func(t *testing.T) {
		r := newPiecesRig(t, 1)
		release, _ := hangs(r)
		c := r.begins("id", completion(long("a")))
		r.has(0, "id-piece1")
		done := make(chan error)
		go func() { done <- r.shutdown(20 * time.Second) }()
		eventually(t, 20*time.Second, "it drains", r.s.draining.Load)
		close(release)
		c.expects(200, "whole")
		if err := <-done; err != nil {
			t.Error(err)
		}
		r.has(0, "id-piece1", "id-piece2", "id")
		r.settled()
	})
	t.Run("the replica leaves", func(t *testing.T) {
		r := newPiecesRig(t, 2)
		both := r.replicas
		r.change(func(m *Model) { m.Replicas = both[:1] })
		release, _ := hangs(r)
		c := r.begins("id", completion(long("a")))
		r.has(0, "id-piece1")
		r.change(func(m *Model) { m.Replicas = both[1:] })
		close(release)
		resp := c.expects(200, "whole")
		r.has(0, "id-piece1")
		r.has(1, "id-piece2", "id-piece3", "id")
		if n := resp.Header.Get("X-Inferrail-Begun-Tokens"); n != "1024" {
			t.Errorf("%s tokens have begun there", n)
		}
		r.settled()
	})
	for name, none := range map[string]func(r *piecesRig){
		"the only replica leaves": func(r *piecesRig) { r.change(func(m *Model) { m.Replicas = nil }) },
		"the model is not served": func(r *piecesRig) { r.s.SetFleet(&Fleet{}) },
	} {
		t.Run(name, func(t *testing.T) {
			r := newPiecesRig(t, 1)
			release, _ := hangs(r)
			c := r.begins("id", completion(long("a")))
			r.has(0, "id-piece1")
			none(r)
			close(release)
			resp := c.expects(200, "whole")
			r.has(0, "id-piece1", "id")
			if n := resp.Header.Get("X-Inferrail-Begun-Tokens"); n != "512" {
				t.Errorf("%s tokens have begun", n)
			}
			r.settled()
		})
	}
	t.Run("the replica fails its health check", func(t *testing.T) {
		r := newPiecesRig(t, 2)
		both := r.replicas
		r.change(func(m *Model) { m.Replicas = both[:1] })
		_, closed := hangs(r)
		c := r.begins("id", completion(long("a")))
		r.has(0, "id-piece1")
		r.change(func(m *Model) { m.Replicas = both[1:] })
		both[0].Evacuate()
		c.expects(200, "whole")
		within(t, "the engine sees it", closed)
		r.has(1, "id")
		if n := r.outcomes("engine_down"); n != 1 {
			t.Errorf("%d pieces", n)
		}
		r.settled()
	})
	t.Run("pieces are turned off", func(t *testing.T) {
		r := newPiecesRig(t, 1)
		release, _ := hangs(r)
		c := r.begins("id", completion(long("a")))
		r.has(0, "id-piece1")
		r.change(func(m *Model) { m.Pieces = policy.Pieces{} })
		close(release)
		c.expects(200, "whole")
		r.has(0, "id-piece1", "id")
		r.settled()
	})
	t.Run("the engine has other blocks", func(t *testing.T) {
		r := newPiecesRig(t, 1)
		release, _ := hangs(r)
		c := r.begins("id", completion(long("a")))
		r.has(0, "id-piece1")
		r.join(r.replicas[0], index.SlotConfig{Model: "base", BlockSize: 16, Capacity: 1000})
		close(release)
		c.expects(200, "whole")
		r.has(0, "id-piece1", "id")
		r.settled()
	})
}

// The size of an engine's blocks may become another one between the choice and the claim.
func TestPieceOfOtherBlocks(t *testing.T) {
	r := newPiecesRig(t, 1)
	x := r.s.explained("/v1/completions", nil, []byte(completion(long("a"))))
	defer x.giveBack()
	if f := x.understand(); f != none {
		t.Fatal(f.label())
	}
	x.readPrompt()
	x.lookUp()
	x.replica, _ = x.pick(false)
	if n := x.nextPiece(); n != pieceTokens {
		t.Fatalf("a piece has %d tokens", n)
	}
	x.piecing = &piecing{}
	r.replicas[0].SetBlock(16)
	x.claimPiece(pieceTokens, time.Now())
	x.cache.index.Undo(&x.piecing.claim)
	x.replica = nil
}

// TestPiecesUnderRaces: engines that misbehave in every way, clients that leave, replicas
// that come and go. Whoever stays is answered, and at the end nothing is left.
func TestPiecesUnderRaces(t *testing.T) {
	r := newPiecesRig(t, 3)
	limits := *r.s.limits.Load()
	limits.Backoff, limits.MaxAttempts = time.Millisecond, 8
	r.s.SetLimits(limits)
	for i, e := range r.engines {
		e.does(func(c *engineSide, a *askedOf) bool {
			time.Sleep(time.Duration(rand.IntN(2000)) * time.Microsecond)
			if i == 0 && a.piece == 0 || rand.IntN(3) > 0 {
				return false // one engine answers whatever is whole
			}
			n := rand.IntN(10)
			if a.piece == 0 {
				n = rand.IntN(3)
			}
			switch n {
			case 0:
				c.Close()
			case 1:
				io.WriteString(c, status(503, "busy"))
			case 2:
				io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Le")
				c.Close()
			case 3:
				io.WriteString(c, status(400+rand.IntN(30), "no"))
			case 4:
				io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n{}")
				c.Close()
			case 5:
				io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"+chunk(strings.Repeat("a", 2*mostPieceAnswer)))
				c.Close()
			case 6:
				io.WriteString(c, fixed("{}")+"more")
				c.Close()
			case 7:
				time.Sleep(30 * time.Millisecond)
				io.WriteString(c, fixed("{}"))
			case 8:
				io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
				c.waitClosedWithin(50 * time.Millisecond)
				c.Close()
			default:
				io.WriteString(c, "HTTP/1.1 100 Continue\r\n\r\n"+fixed(e.usage(a)))
			}
			return true
		})
	}
	all := r.replicas
	all[1].SetBounds(2, 2)
	all[2].SetBounds(1, 1)
	r.change(func(m *Model) { m.Holding = policy.Holding{Lead: 1e-9} })
	over := make(chan struct{})
	var watched sync.WaitGroup
	watched.Go(func() {
		for {
			select {
			case <-over:
				return
			case <-time.After(10 * time.Millisecond):
			}
			n := 1 + rand.IntN(3)
			r.change(func(m *Model) { m.Replicas = all[:n] })
			for _, gone := range all[n:] {
				gone.Evacuate()
			}
			for _, replica := range all {
				replica.takesWhole.Store(false)
			}
		}
	})
	var clients sync.WaitGroup
	var answered, left atomic.Int64
	for i := range 16 {
		clients.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(i), 2))
			for k := range 12 {
				c := r.begins(fmt.Sprint(i, "-", k), completion(fmt.Sprint("w", rng.IntN(20), " ")+words(rng.IntN(4000))))
				if rng.IntN(6) == 0 {
					time.Sleep(time.Duration(rng.IntN(10)) * time.Millisecond)
					c.Close()
					left.Add(1)
					continue
				}
				c.SetReadDeadline(time.Now().Add(60 * time.Second))
				resp, err := http.ReadResponse(c.br, nil)
				if err != nil {
					t.Errorf("no answer: %v", err)
					return
				}
				io.Copy(io.Discard, resp.Body)
				if resp.StatusCode == 200 {
					answered.Add(1)
				}
				c.Close()
			}
		})
	}
	clients.Wait()
	close(over)
	watched.Wait()
	r.settled()
	t.Logf("%d were answered, %d have left; %d pieces computed, %d died, %d refused", answered.Load(), left.Load(),
		r.outcomes(pieceComputed), r.outcomes("engine_died"), r.outcomes(pieceRefused))
	if answered.Load() < 100 || r.outcomes(pieceComputed) < 20 || r.outcomes("engine_died")+r.outcomes("engine_head")+r.outcomes(pieceRefused) == 0 {
		t.Errorf("%d were answered, of whom %d pieces were computed, and %d died", answered.Load(), r.outcomes(pieceComputed), r.outcomes("engine_died"))
	}
}

// waitClosedWithin waits until the proxy has closed the connection, but not for long.
func (c *engineSide) waitClosedWithin(d time.Duration) {
	c.SetReadDeadline(time.Now().Add(d))
	c.br.Peek(1)
}

// TestWholeExchangeDoesNotAllocate: a prompt that might be computed in pieces, and is not,
// costs no allocation for that, nor one of which nobody has lost anything.
func TestWholeExchangeDoesNotAllocate(t *testing.T) {
	withoutRace(t)
	measure := func(pieces, prewarming bool) float64 {
		return testing.AllocsPerRun(200, steadyExchange(t, func(t testing.TB, url string) *rig {
			c := newCacher(t, nil, url)
			c.index.SetState(0, index.Exact, "")
			c.change(func(m *Model) {
				m.Policy = policy.NewCostModel()
				if pieces {
					m.Pieces = policy.Pieces{Length: 1e-6}
				}
				m.State = &ModelState{}
				if prewarming {
					m.Prewarming = policy.Prewarming{Length: 1e-6}
				}
			})
			return c.rig
		}, to("/v1/completions", `{"stream":true,"prompt":"`+words(400)+`"}`)))
	}
	without := measure(false, false)
	if with := measure(true, false); with > without {
		t.Errorf("%v allocations, and %v without pieces", with, without)
	}
	if with := measure(false, true); with > without {
		t.Errorf("%v allocations, and %v where nothing is computed ahead", with, without)
	}
}
