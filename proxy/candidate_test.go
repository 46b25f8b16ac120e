package proxy

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/simulator"
)

// candidatesTold is inOrder, and notes what it is told.
type candidatesTold struct {
	inOrder
	mu         sync.Mutex // guards the rest
	request    policy.Request
	candidates []policy.Candidate
}

func (p *candidatesTold) Score(r *policy.Request, candidates []policy.Candidate, costs []float64) float64 {
	p.mu.Lock()
	p.request, p.candidates = *r, append([]policy.Candidate{}, candidates...)
	p.mu.Unlock()
	return p.inOrder.Score(r, candidates, costs)
}

func (p *candidatesTold) last() (policy.Request, []policy.Candidate) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.request, p.candidates
}

// A policy is told of what the agent has at a replica at this moment, and of what
// the engine has beyond that, while its report is fresh.
func TestCandidates(t *testing.T) {
	busy, idle := newSteps(t), scripted(t)
	r := newRig(t, Limits{}, nil, busy.url(), idle)
	told := &candidatesTold{}
	r.change(func(m *Model) { m.Policy = told })
	// One generates, one waits for its first token, and of one nothing is streamed.
	var clients []*client
	ask := func(body string) {
		c := r.dial()
		c.send(post(body))
		clients = append(clients, c)
		<-busy.asked
	}
	ask(hello)
	r.aheadIs(0, 1)
	busy.parts <- chunkedHead + chunk(roleEvent)
	r.aheadIs(0, 0)
	ask(hello)
	r.aheadIs(0, 1)

	var now []policy.Candidate
	var asked policy.Request
	look := func(body string) {
		t.Helper()
		r.replicas[0].SetBounds(1, 10) // it is full, so another one is asked
		c := r.dial()
		c.send(post(body))
		if resp, _ := c.answer(); resp.Header.Get("X-Inferrail-Replica") != "e1" {
			t.Fatalf("answered by %s", resp.Header.Get("X-Inferrail-Replica"))
		}
		c.Close()
		r.replicas[0].SetBounds(0, 0)
		// What it would have been told of the full one as well.
		now = nil
		for _, replica := range r.replicas {
			var c policy.Candidate
			replica.describe(&c, time.Now())
			now = append(now, c)
		}
		var candidates []policy.Candidate
		if asked, candidates = told.last(); len(candidates) != 1 || candidates[0].Slot != 1 {
			t.Fatalf("a policy is told of %+v", candidates)
		}
	}
	look(`{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("abcd", 100) + `"}],"max_tokens":99999999}`)
	if asked.Tokens < 100 || asked.Tokens > 120 || asked.Output != policy.MostOutput {
		t.Errorf("%+v", asked)
	}
	c := &now[0]
	if c.InFlight != 2 || c.Decoding != 1 || c.Ahead.Prompts != 1 || c.Wait < 0 || c.Share != 1 || c.KV != 0 || c.Queued != 0 {
		t.Errorf("%+v", c)
	}
	if c.Key == 0 || c.Key == now[1].Key {
		t.Errorf("keys %x and %x", c.Key, now[1].Key)
	}
	other, err := NewReplica(7, "e0", "http://10.0.0.1:1")
	if err != nil || other.key != c.Key {
		t.Errorf("another agent's key for it is %x, ours %x; %v", other.key, c.Key, err)
	}
	other.Close()
	wait := c.Wait

	report := policy.Load{Asked: time.Now(), Told: time.Now(), Until: time.Now().Add(time.Hour), Running: 4, Waiting: 3, WaitingTokens: -1,
		KV: .5, HitRate: .25, VRAMFree: 1, VRAMTotal: 2, Own: 2, OwnWaiting: 1}
	r.replicas[0].SetLoad(&report)
	look(hello)
	if c := &now[0]; c.InFlight != 2+5 || c.Decoding != 1+3 || c.Ahead.Prompts != 1+2 || c.Wait <= wait || c.KV != .5 || c.Queued != 3 || c.HitRate != .25 || c.VRAMFree != 1 || c.VRAMTotal != 2 {
		t.Errorf("%+v", c)
	}
	old := report
	old.Until = time.Now()
	r.replicas[0].SetLoad(&old)
	look(hello)
	if c := &now[0]; c.InFlight != 2 || c.Decoding != 1 || c.KV != 0 || c.Queued != 0 {
		t.Errorf("an old report counts: %+v", c)
	}
	busy.parts <- chunk(textEvent) + lastChunk
	busy.parts <- chunkedHead + chunk(roleEvent) + lastChunk
	for _, c := range clients {
		c.answer()
	}
	r.over()
}

// How large a prompt is taken to be whose tokens are not known.
func TestPromptSize(t *testing.T) {
	r := newRig(t, Limits{}, nil, scripted(t))
	told := &candidatesTold{}
	r.change(func(m *Model) { m.Policy = told })
	f := func(path, body string, least, most int) {
		t.Helper()
		c := r.dial()
		defer c.Close()
		c.send(to(path, body))
		if resp, _ := c.answer(); resp.StatusCode != 200 {
			t.Fatal(resp.Status)
		}
		if asked, _ := told.last(); asked.Tokens < least || asked.Tokens > most {
			t.Errorf("%s %.40s: %d tokens, want %d to %d", path, body, asked.Tokens, least, most)
		}
	}
	f("/v1/chat/completions", `{"messages":[{"role":"user","content":"`+strings.Repeat("abcd", 1000)+`"}]}`, 1000, 1050)
	f("/v1/embeddings", `{"input":"`+strings.Repeat("abcd", 1000)+`"}`, 1000, 1050)
	f("/v1/completions", `{"prompt":[1,2,3,4,5,6,7]}`, 7, 10)
	f("/v1/completions", `{"prompt":""}`, 1, 10)
	f("/tokenize", `{"prompt":"`+strings.Repeat("abcd", 1000)+`"}`, 0, 0)
	// An engine refuses what is longer.
	r.change(func(m *Model) { m.MaxModelLen = 100 })
	f("/v1/embeddings", `{"input":"`+strings.Repeat("abcd", 1000)+`"}`, 100, 100)
}

// fleetOf starts simulated engines, and returns a cacher of them with a policy.
func fleetOf(t *testing.T, name string, configs ...simulator.Config) *cacher {
	t.Helper()
	var urls []string
	for _, cfg := range configs {
		cfg.ServedModelName, cfg.EnablePromptTokensDetails = []string{"m"}, true
		sim, err := simulator.Start(cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { sim.Close() })
		urls = append(urls, sim.URL())
	}
	c := newCacher(t, nil, urls...)
	p, err := policy.New(name, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range c.replicas {
		c.join(r, index.SlotConfig{Model: "base", BlockSize: 16, Capacity: 16384})
	}
	c.change(func(m *Model) { m.Policy, m.Blocks, m.State = p, []int{16}, &ModelState{} })
	return c
}

// stream asks for a streamed completion of a text, and returns where it came from.
func (c *cacher) stream(client *http.Client, text string, tokens int) (replica string, err error) {
	body := completion(text, `"stream":true`, fmt.Sprintf(`"max_tokens":%d`, tokens), `"ignore_eos":true`)
	resp, err := client.Post("http://"+c.addr+"/v1/completions", "application/json", strings.NewReader(body))
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != 200 {
		return "", fmt.Errorf("%d %v", resp.StatusCode, err)
	}
	return resp.Header.Get("X-Inferrail-Replica"), nil
}

// The replica that has the beginning of a prompt gets what goes on from it, while it
// is not busy; another conversation goes elsewhere, rather than behind it.
func TestCostModelKeepsConversations(t *testing.T) {
	engine := simulator.Config{TimePerOutputToken: time.Millisecond}
	c := fleetOf(t, "cost_model", engine, engine, engine)
	client := &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{}}
	t.Cleanup(client.CloseIdleConnections)
	at := map[string]int{}
	for talk := range 6 {
		text := fmt.Sprintf("talk %d ", talk) + words(4000)
		first := ""
		for turn := range 4 {
			replica, err := c.stream(client, text, 4)
			if err != nil {
				t.Fatal(err)
			}
			c.over()
			if first == "" {
				first = replica
			}
			if replica != first {
				t.Errorf("talk %d moved from %s to %s at turn %d", talk, first, replica, turn)
			}
			text += words(100)
		}
		at[first]++
	}
	for _, p := range c.over() {
		if p.Observed < 0 || p.Predicted <= 0 || p.CachedPredicted < 0 {
			t.Errorf("%+v", p)
		}
	}
}

// A prompt that all have in common is computed where it is, until waiting there
// costs more than computing it elsewhere.
func TestCostModelSpreadsWhatIsHot(t *testing.T) {
	// 400 ms for a prompt, 40 ms for what a request adds.
	engine := simulator.Config{PrefillA: 200, PrefillB: 1e-6, PrefillD: 1000, TimePerOutputToken: time.Millisecond}
	c := fleetOf(t, "cost_model", engine, engine, engine)
	client := &http.Client{Timeout: 60 * time.Second, Transport: &http.Transport{}}
	t.Cleanup(client.CloseIdleConnections)
	hot := words(2000)
	if _, err := c.stream(client, hot, 2); err != nil {
		t.Fatal(err)
	}
	c.over()
	// One after the other stays.
	for i := range 4 {
		replica, err := c.stream(client, hot+fmt.Sprintf("user %d ", i)+words(200), 2)
		if err != nil {
			t.Fatal(err)
		}
		if want := c.over()[0].Replica; replica != want {
			t.Errorf("request %d goes to %s, and %s has what it needs", i, replica, want)
		}
	}
	// Many at a time do not.
	var all sync.WaitGroup
	var mu sync.Mutex // guards at
	at := map[string]int{}
	for i := range 40 {
		all.Go(func() {
			replica, err := c.stream(client, hot+fmt.Sprintf("other %d ", i)+words(200), 2)
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			at[replica]++
			mu.Unlock()
		})
	}
	all.Wait()
	c.over()
	if len(at) < 2 {
		t.Errorf("all went to one: %v", at)
	}
}

// What has proved to be slow gets less.
func TestCostModelAvoidsWhatIsSlow(t *testing.T) {
	fast := simulator.Config{PrefillA: 50, PrefillD: 1000, TimePerOutputToken: time.Millisecond}
	slow := simulator.Config{PrefillA: 500, PrefillD: 10000, TimePerOutputToken: time.Millisecond}
	c := fleetOf(t, "cost_model", fast, slow, fast)
	client := &http.Client{Timeout: 60 * time.Second, Transport: &http.Transport{}}
	t.Cleanup(client.CloseIdleConnections)
	var all sync.WaitGroup
	for k := range 3 {
		all.Go(func() {
			for i := range 30 {
				if _, err := c.stream(client, fmt.Sprintf("client %d, request %d ", k, i)+words(300), 2); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	at := map[string]int{}
	rows := c.over()
	for _, p := range rows[len(rows)/3:] {
		at[p.Replica]++
	}
	if n := at["e1"]; n*5 > at["e0"]+at["e2"] {
		t.Errorf("the slow one of three gets %d: %v", n, at)
	}
}

// hundreds is a model with many replicas, half of which tell of their load.
func hundreds(t testing.TB, n int) *exchange {
	x := &exchange{c: &conn{s: New(Limits{}, nil, nil)}}
	t.Cleanup(func() { x.c.s.Shutdown(t.Context()) })
	p, err := policy.New("cost_model", nil)
	if err != nil {
		t.Fatal(err)
	}
	x.model = &Model{Name: "m", Policy: p, CacheName: "base", Blocks: []int{16}, State: &ModelState{}}
	kv := index.New(index.Config{MaxBytes: 64 << 20})
	for i := range n {
		r, err := NewReplica(i, fmt.Sprint("e", i), "http://127.0.0.1:1")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(r.Close)
		kv.Join(i, index.SlotConfig{Model: "base", BlockSize: 16, Capacity: 1000})
		r.SetBlock(16)
		if i%2 == 0 {
			r.SetLoad(&policy.Load{Until: time.Now().Add(time.Hour), Running: 3, Waiting: 1, WaitingTokens: -1})
		}
		entry := &policy.Entry{}
		r.standing.Backlog.Enter(entry, policy.Prefill(1000, 0), true, time.Now(), 1)
		x.model.Replicas = append(x.model.Replicas, r)
	}
	root := index.Root("base", "", nil)
	ids := make([]uint32, 2000)
	b := &blocks{sizes: x.model.Blocks, tokens: len(ids), hashes: index.AppendTokens(nil, root, ids, 16)}
	b.prompts = []index.Prompt{{Root: root, Chain: b.hashes, IDs: ids, Block: 16}}
	b.looks = make([]index.Lookup, 1)
	for i := range n {
		var c index.Claim
		kv.Claim(&c, i, &b.prompts[0], time.Now())
		kv.Release(&c, 1, time.Now())
	}
	b.look(kv, x.model.Replicas)
	x.blocks, x.path = b, []byte("/v1/completions")
	return x
}

// TestFiltersAreForThoseWhoAsk: a candidate has what nlms goes by where that chooses,
// or judges beside another, and keeps it while the request waits for its turn.
func TestFiltersAreForThoseWhoAsk(t *testing.T) {
	x := hundreds(t, 3)
	learned := x.model.Replicas[0].standing.Filter.Observe(1000, 2)
	nlms, err := policy.New("nlms", nil)
	if err != nil {
		t.Fatal(err)
	}
	model, nothing := *x.model, policy.FilterState{}
	f := func(p policy.Policy, shadows []*policy.Shadow, want policy.FilterState) {
		t.Helper()
		m := model
		m.Policy, m.Shadows = p, shadows
		x.model, x.turned = &m, false
		x.pick(false)
		if got := x.candidates[0].Filter; got != want {
			t.Errorf("%+v, want %+v", got, want)
		}
		x.choice.Index = 0
		x.expectAnew(time.Now())
		if got := x.candidates[0].Filter; got != want {
			t.Errorf("after waiting %+v, want %+v", got, want)
		}
	}
	f(model.Policy, nil, nothing)
	f(nlms, nil, learned)
	f(model.Policy, []*policy.Shadow{{Policy: model.Policy}}, nothing)
	f(model.Policy, []*policy.Shadow{{Policy: model.Policy}, {Policy: nlms}}, learned)
}

func TestPickDoesNotAllocate(t *testing.T) {
	withoutRace(t)
	x := hundreds(t, 256)
	if n := testing.AllocsPerRun(100, func() {
		x.turned, x.described = false, false
		if r, _ := x.pick(false); r == nil || x.candidates[x.choice.Index].Cached != 1984 {
			t.Errorf("%+v", x.choice)
		}
		x.putDecision()
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// BenchmarkPick is a whole decision: what is known of each replica, what it has of
// the prompt, and the policy's choice.
//
//	go test -bench Pick -run xxx ./proxy
func BenchmarkPick(b *testing.B) {
	for _, n := range []int{3, 256} {
		x := hundreds(b, n)
		b.Run(fmt.Sprintf("%d replicas", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				x.turned, x.described = false, false
				x.pick(false)
				x.putDecision()
			}
		})
		b.Run(fmt.Sprintf("%d replicas described", n), func(b *testing.B) {
			var c policy.Candidate
			now := time.Now()
			for b.Loop() {
				for _, r := range x.model.Replicas {
					r.describe(&c, now)
				}
			}
		})
		b.Run(fmt.Sprintf("%d replicas, cached", n), func(b *testing.B) {
			for b.Loop() {
				for _, r := range x.model.Replicas {
					x.blocks.at(r)
				}
			}
		})
	}
}
