package proxy

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/proxy/prompt"
)

const cachedTokens = "X-Inferrail-Cached-Tokens"

// cacher is a follower whose engines' caches are known by an index. Replicas are
// chosen in their order. Blocks have 4 tokens, where a test does not say otherwise.
type cacher struct {
	*follower
	index *index.Index
	told  *cacheChecks
}

// cacheChecks notes what it is told.
type cacheChecks struct {
	mu  sync.Mutex // guards all
	all []string
}

func (c *cacheChecks) Cached(m *Model, r *Replica, predicted, actual int, reported bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all = append(c.all, fmt.Sprint(m.Name, " ", r.ID, " ", predicted, " ", actual, " ", reported))
}

func (c *cacheChecks) take() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := c.all
	c.all = nil
	return all
}

func newCacher(t testing.TB, joiner Joiner, engines ...string) *cacher {
	t.Helper()
	c := &cacher{follower: newJoinedFollower(t, Limits{}, joiner, "", 1, time.Minute, engines...),
		index: index.New(index.Config{MaxBytes: 64 << 20}), told: &cacheChecks{}}
	c.s.SetIndex(c.index, c.told)
	for _, r := range c.replicas {
		c.join(r, index.SlotConfig{Model: "base", BlockSize: 4, Capacity: 1000})
	}
	c.change(func(m *Model) { m.Policy, m.CacheName, m.Blocks = inOrder{}, "base", []int{4} })
	t.Cleanup(func() {
		// Every request has given back what it had claimed.
		c.shutdown(20 * time.Second)
		for _, s := range c.index.Stats(nil) {
			if s.Claims != 0 {
				t.Errorf("slot %d has %d claims left", s.Slot, s.Claims)
			}
		}
		if n := c.s.buffered.Load(); n != 0 {
			t.Errorf("%d bytes are still held", n)
		}
	})
	return c
}

func (c *cacher) join(r *Replica, s index.SlotConfig) {
	c.index.Join(r.Slot, s)
	r.SetBlock(s.BlockSize)
}

// change publishes the model with a change made.
func (c *cacher) change(f func(m *Model)) {
	m := *c.s.fleet.Load().Listed[0]
	f(&m)
	c.s.SetFleet(&Fleet{Models: map[string]*Model{"m": &m, "alias": &m}, Listed: []*Model{&m}})
}

// words is a text of n tokens.
func words(n int) string { return strings.Repeat("a ", n) }

// completion is the body of a completions request.
func completion(text string, members ...string) string {
	return `{"prompt":"` + text + `"` + strings.Join(append([]string{""}, members...), ",") + `}`
}

// ask sends a completions request and returns the status, the replica and what
// was predicted, "-" for nothing.
func (c *cacher) ask(body string, fields ...string) string {
	c.t.Helper()
	return c.askAt("/v1/completions", body, fields...)
}

func (c *cacher) askAt(path, body string, fields ...string) string {
	c.t.Helper()
	conn := c.dial()
	defer conn.Close()
	conn.send(to(path, body, fields...))
	resp, _ := conn.answer()
	predicted := "-"
	if all := resp.Header[cachedTokens]; len(all) > 0 {
		predicted = strings.Join(all, ",")
	}
	// The claim is released after the answer.
	eventually(c.t.(*testing.T), 20*time.Second, "the request is over", func() bool { return c.s.Datapath().Running == 0 })
	return fmt.Sprint(resp.StatusCode, " ", resp.Header.Get("X-Inferrail-Replica"), " ", predicted)
}

// expect asks and compares.
func (c *cacher) expect(body, want string, fields ...string) {
	c.t.Helper()
	if got := c.ask(body, fields...); got != want {
		c.t.Errorf("%.60s... %q: %s, want %s", body, fields, got, want)
	}
}

// holds is how many blocks of a text the index takes the replica to hold.
func (c *cacher) holds(r int, text string) int {
	ids := c.ids(text)
	p := index.Prompt{Root: index.Root("base", "", nil), Chain: index.AppendTokens(nil, index.Root("base", "", nil), ids, 4), IDs: ids, Block: 4}
	var l index.Lookup
	c.index.Look(&l, &p)
	return int(l.Held(c.replicas[r].Slot)[index.Tiers-1])
}

func (c *cacher) ids(text string) []uint32 {
	var p prompt.Prompt
	c.model.Follow(&p, prompt.Completion, []byte(completion(text)), time.Time{})
	if p.Reason != prompt.Exact {
		c.t.Fatalf("%q is %s", text, p.Reason)
	}
	return p.IDs
}

// scripted answers each request as its field Do says: with a status, or with a
// usage of the prompt's tokens, of which the number after it was cached.
func scripted(t testing.TB) string {
	return newRawEngine(t, func(c *engineSide) {
		for {
			r := c.request()
			if r == nil {
				return
			}
			do := strings.Fields(r.Header.Get("Do"))
			switch {
			case len(do) == 0:
				io.WriteString(c, fixed("{}"))
			case do[0] == "usage":
				io.WriteString(c, fixed(`{"usage":{`+do[1]+`}}`))
			case do[0] == "die":
				return
			default:
				var code int
				fmt.Sscan(do[0], &code)
				io.WriteString(c, status(code, "{}"))
			}
		}
	}).url()
}

// The second turn of a conversation finds the first one; what the engine says of
// it is compared once for each response.
func TestCachedSecondTurn(t *testing.T) {
	c := newCacher(t, nil, scripted(t))
	usage := func(prompt int, cached string) string {
		return fmt.Sprintf(`Do: usage "prompt_tokens":%d,"completion_tokens":1,"total_tokens":%d%s`+"\r\n", prompt, prompt+1, cached)
	}
	details := func(n int) string { return fmt.Sprintf(`,"prompt_tokens_details":{"cached_tokens":%d}`, n) }

	c.expect(completion(words(20)), "200 e0 0", usage(20, details(0)))
	// The last token is computed in any case, and with it its block.
	c.expect(completion(words(20)), "200 e0 16", usage(20, details(16)))
	c.expect(completion(words(23)), "200 e0 20", usage(23, details(12)))
	c.expect(completion(words(23)), "200 e0 20", usage(23, `,"prompt_tokens_details":null`))
	// The engine has another prompt; a request that fails; and one that tells nothing.
	c.expect(completion(words(23)), "200 e0 20", usage(22, details(3)))
	c.expect(completion(words(23)), "400 e0 -", "Do: 400\r\n")
	c.expect(completion(words(23)), "200 e0 20")
	want := []string{"m e0 0 0 true", "m e0 16 16 true", "m e0 20 12 true", "m e0 20 0 false"}
	if got := c.told.take(); !slices.Equal(got, want) {
		t.Errorf("told %q, want %q", got, want)
	}
	f := func(kind string, want float64) {
		t.Helper()
		if n := counted(c.s.stats.cached, func(name, value string) bool { return name == "kind" && value == kind }); n != want {
			t.Errorf("%v tokens are %s, want %v", n, kind, want)
		}
	}
	f("predicted", 36)
	f("actual", 28)
	f("unverified", 20)
}

// What an engine refuses, or fails before it answers, it will not hold; what the
// next one answers, that one will.
func TestCachedUndo(t *testing.T) {
	bad, good := scripted(t), scripted(t)
	f := func(name, do, want string, first, second int) {
		t.Run(name, func(t *testing.T) {
			c := newCacher(t, nil, bad, good)
			c.replicas[1].SetBounds(1, 1)
			if got := c.ask(completion(words(20)), do); got != want {
				t.Errorf("%s, want %s", got, want)
			}
			if a, b := c.holds(0, words(20)), c.holds(1, words(20)); a != first || b != second {
				t.Errorf("%d and %d blocks are held, want %d and %d", a, b, first, second)
			}
		})
	}
	f("answered", "", "200 e0 0", 5, 0)
	f("refused", "Do: 400\r\n", "400 e0 -", 0, 0)
	f("error", "Do: 500\r\n", "500 e0 -", 0, 0)
	f("busy everywhere", "Do: 503\r\n", "503 e0 -", 0, 0)
	f("dies everywhere", "Do: die\r\n", "502 e0 -", 0, 0)

	t.Run("elsewhere", func(t *testing.T) {
		busy := newRawEngine(t, answering(status(503, "busy")))
		c := newCacher(t, nil, busy.url(), good)
		// The second has some of it: what is told is of the one that answers.
		c.replicas[0].SetBounds(1, 0)
		c.change(func(m *Model) { m.Replicas = c.replicas[1:] })
		c.expect(completion(words(9)), "200 e1 0")
		c.change(func(m *Model) { m.Replicas = c.replicas })
		c.expect(completion(words(20)), "200 e1 8")
		if a, b := c.holds(0, words(20)), c.holds(1, words(20)); a != 0 || b != 5 {
			t.Errorf("%d and %d blocks are held", a, b)
		}
	})
	t.Run("an idle connection has died", func(t *testing.T) {
		e := newRawEngine(t, func(c *engineSide) {
			if c.request() != nil {
				io.WriteString(c, fixed("{}"))
			}
			if c.n == 0 && c.request() != nil {
				return // without an answer: it is sent again
			}
			for c.request() != nil {
				io.WriteString(c, fixed("{}"))
			}
		})
		c := newCacher(t, nil, e.url())
		c.expect(completion(words(8)), "200 e0 0")
		c.expect(completion(words(20)), "200 e0 8")
		if n := c.s.Datapath().Replays; n != 1 || c.holds(0, words(20)) != 5 {
			t.Errorf("%d replays, %d blocks", n, c.holds(0, words(20)))
		}
	})
}

// A stream's prompt is held where the engine reuses blocks after their prefill
// once the first byte of its body is there, not its head; when the client
// leaves afterwards it stays.
func TestCachedStreams(t *testing.T) {
	const body = `{"stream":true,"prompt":"`
	f := func(name string, kernel bool, leaves bool) {
		t.Run(name, func(t *testing.T) {
			next := make(chan string)
			end := sync.OnceFunc(func() { close(next) })
			e := newRawEngine(t, func(c *engineSide) {
				for c.request() != nil {
					io.WriteString(c, chunkedHead)
					for part := range next {
						io.WriteString(c, part)
						if strings.HasSuffix(part, "0\r\n\r\n") {
							break
						}
					}
				}
			})
			t.Cleanup(end) // before the engine is closed
			var joiner Joiner
			if kernel {
				joiner = newFakeKernel(t)
			}
			c := newCacher(t, joiner, e.url())
			c.join(c.replicas[0], index.SlotConfig{Model: "base", BlockSize: 4, Capacity: 1000, AfterPrefill: true})
			conn := c.dial()
			conn.send(to("/v1/completions", body+words(20)+`"}`))
			head, err := readHead(conn)
			if err != nil || !strings.Contains(head, "x-inferrail-cached-tokens: 0\r\n") {
				t.Fatalf("%v %s", err, head)
			}
			if n := c.holds(0, words(20)); n != 0 {
				t.Errorf("%d blocks are held before the prefill has ended", n)
			}
			next <- chunk("data: {}\n\n")
			eventually(t, 20*time.Second, "it is held", func() bool { return c.holds(0, words(20)) == 5 })
			if leaves {
				conn.Close()
				end()
			} else {
				for n := 0; n < 20 || kernel && c.s.Datapath().KernelChunks == 0; n++ {
					next <- chunk("data: {}\n\n")
				}
				next <- chunk(`data: {"usage":{"prompt_tokens":20,"completion_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}}`+"\n\n") + "0\r\n\r\n"
				for line := ""; line != "0\r\n"; {
					if line, err = conn.br.ReadString('\n'); err != nil {
						t.Fatal(err)
					}
				}
			}
			eventually(t, 20*time.Second, "the request is over", func() bool { return c.s.Datapath().Running == 0 })
			if n := c.holds(0, words(20)); n != 5 {
				t.Errorf("%d blocks are held at the end", n)
			}
			want := []string{"m e0 0 4 true"}
			if leaves {
				want = nil
			}
			if got := c.told.take(); !slices.Equal(got, want) {
				t.Errorf("told %q", got)
			}
		})
	}
	f("copied", false, false)
	f("copied, client leaves", false, true)
	f("carried", true, false)
	f("carried, client leaves", true, true)
}

// A client that leaves before its answer has begun has computed nothing that is
// known of.
func TestCachedAborted(t *testing.T) {
	asked := make(chan struct{})
	e := newRawEngine(t, func(c *engineSide) {
		if c.request() != nil {
			close(asked)
			c.waitClosed()
		}
	})
	c := newCacher(t, nil, e.url())
	conn := c.dial()
	conn.send(to("/v1/completions", completion(words(20))))
	<-asked
	eventually(t, 20*time.Second, "it is claimed", func() bool { return c.holds(0, words(20)) == 5 })
	conn.Close()
	eventually(t, 20*time.Second, "it is taken back", func() bool { return c.holds(0, words(20)) == 0 })
}

// What must not be shared is not; names of one model share.
func TestCachedApart(t *testing.T) {
	c := newCacher(t, nil, scripted(t))
	salt := `"cache_salt":"s"`
	c.expect(completion(words(20)), "200 e0 0")
	c.expect(completion(words(20), salt), "200 e0 0")
	c.expect(completion(words(20), salt), "200 e0 16")
	c.expect(completion(words(20), `"cache_salt":"t"`), "200 e0 0")
	c.expect(completion(words(20), `"model":"alias"`), "200 e0 16")
	c.change(func(m *Model) { m.Adapter = "lora" })
	c.expect(completion(words(20)), "200 e0 0")
	c.expect(completion(words(20)), "200 e0 16")
	c.change(func(m *Model) { m.Adapter = "" })
	c.expect(completion(words(20)), "200 e0 16")
	// Another name of the same files.
	c.change(func(m *Model) { m.Name = "other" })
	c.expect(completion(words(20)), "200 e0 16")
	c.change(func(m *Model) { m.CacheName = "" })
	c.expect(completion(words(20)), "200 e0 -")
}

// Replicas of one model have blocks of different sizes, and one of a size that
// nobody knows.
func TestCachedBlockSizes(t *testing.T) {
	c := newCacher(t, nil, scripted(t), scripted(t), scripted(t))
	c.join(c.replicas[1], index.SlotConfig{Model: "base", BlockSize: 16, Capacity: 1000})
	c.change(func(m *Model) { m.Blocks = []int{4, 16} })
	c.replicas[2].SetBlock(0)
	at := func(i int) { c.change(func(m *Model) { m.Replicas = c.replicas[i : i+1] }) }
	for i, want := range []string{"40", "32", "-"} {
		at(i)
		first := "0"
		if want == "-" {
			first = "-"
		}
		c.expect(completion(words(44)), fmt.Sprintf("200 e%d %s", i, first))
		c.expect(completion(words(44)), fmt.Sprintf("200 e%d %s", i, want))
	}
	// A policy is told how much of the prompt each has.
	asked := &asking{}
	c.change(func(m *Model) { m.Replicas, m.Policy = c.replicas, asked })
	c.expect(completion(words(44)), "200 e0 40")
	if want := "44/40/40 44/32/32 44/0/0"; asked.got() != want {
		t.Errorf("a policy is told %s, want %s", asked.got(), want)
	}
}

// asking is inOrder and notes what it is told of the prompt.
type asking struct {
	inOrder
	mu   sync.Mutex // guards last
	last string
}

func (a *asking) got() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.last
}

func (a *asking) Score(r *policy.Request, candidates []policy.Candidate, costs []float64) float64 {
	var all []string
	for _, c := range candidates {
		all = append(all, fmt.Sprintf("%d/%d/%d", r.Tokens, c.Cached, c.CachedGPU))
	}
	a.mu.Lock()
	a.last = strings.Join(all, " ")
	a.mu.Unlock()
	return a.inOrder.Score(r, candidates, costs)
}

// Of several sequences nothing is foretold, unless it must be nothing; they are
// entered all the same.
func TestCachedSequences(t *testing.T) {
	c := newCacher(t, nil, scripted(t))
	asked := &asking{}
	c.change(func(m *Model) { m.Policy = asked })
	c.expect(completion(words(20), `"n":2`), "200 e0 -")
	c.expect(completion(words(20)), "200 e0 16")
	c.expect(`{"prompt":["b `+words(20)+`","c `+words(40)+`"]}`, "200 e0 -")
	c.expect(completion("c "+words(40)), "200 e0 40")
	c.expect(completion("b "+words(20)), "200 e0 20")
	c.expect(`{"prompt":["b `+words(20)+`","c `+words(40)+`","d "]}`, "200 e0 -")
	if want := "63/60/60"; asked.got() != want {
		t.Errorf("a policy is told %s, want %s", asked.got(), want)
	}
	// Nothing of these can be cached.
	c.expect(completion(words(4), `"n":3`), "200 e0 0")
	c.expect(`{"prompt":["a b c d ","e f g h "]}`, "200 e0 0")
	c.expect(completion(words(20), `"use_beam_search":true`), "200 e0 -")
}

// What all bodies may take bounds the hashes too: a prompt is sent on without.
func TestCachedMemory(t *testing.T) {
	c := newCacher(t, nil, scripted(t))
	c.join(c.replicas[0], index.SlotConfig{Model: "base", BlockSize: 1, Capacity: 100_000})
	c.change(func(m *Model) { m.Blocks = []int{1} })
	c.expect(completion(words(20_000)), "200 e0 0")
	c.s.SetLimits(Limits{MaxBuffered: 400 << 10})
	c.expect(completion(words(20_001)), "200 e0 -")
	c.expect(completion(words(10_000)), "200 e0 9999")
}

// How many choices are entered is the client's word: as many as are cheap.
func TestCachedManyChoices(t *testing.T) {
	var c *cacher
	claims := make(chan int, 1)
	e := newRawEngine(t, func(side *engineSide) {
		for side.request() != nil {
			claims <- c.index.Stats(nil)[0].Claims
			io.WriteString(side, fixed("{}"))
		}
	})
	c = newCacher(t, nil, e.url())
	f := func(tokens, n, want int) {
		t.Helper()
		c.expect(completion(words(tokens), fmt.Sprintf(`"n":%d`, n)), "200 e0 -")
		if got := <-claims; got != want {
			t.Errorf("%d choices of %d tokens: %d claims, want %d", n, tokens, got, want)
		}
	}
	f(40, 3, 3)
	f(40, 1<<40, mostClaims)
	f(40_000, 100, mostClaimed/10_000)
	f(40_000, 1<<40, mostClaimed/10_000)
}

// Of prompts whose tokens' probabilities are asked for, engines read nothing
// from their caches.
func TestCachedScored(t *testing.T) {
	c := newCacher(t, nil, scripted(t))
	asked := &asking{}
	c.change(func(m *Model) { m.Policy = asked })
	f := func(want string, members ...string) {
		t.Helper()
		c.expect(completion(words(20), members...), "200 e0 "+want)
		if told := "20/" + want + "/" + want; asked.got() != told {
			t.Errorf("%q: a policy is told %s, want %s", members, asked.got(), told)
		}
	}
	f("0", `"prompt_logprobs":0`)
	f("16") // it has entered what it computes
	f("0", `"prompt_logprobs":1`)
	f("16", `"prompt_logprobs":null`)
	f("0", `"echo":true`, `"logprobs":1`)
	f("16", `"echo":true`)
	f("16", `"logprobs":1`)
	f("16", `"echo":true`, `"logprobs":1`, `"echo":false`)

	const chat = `{"messages":[{"role":"user","content":"one two three four five six seven eight "}]`
	for _, ask := range []struct{ body, want string }{{chat + "}", "0"}, {chat + `,"echo":true}`, "0"}, {chat + `,"logprobs":true}`, "16"}} {
		if got := c.askAt("/v1/chat/completions", ask.body); got != "200 e0 "+ask.want {
			t.Errorf("%s: %s", ask.body, got)
		}
	}
}

// Where tokens are not known, text is held, and nothing is foretold.
func TestCachedTexts(t *testing.T) {
	c := newCacher(t, nil, scripted(t))
	asked := &asking{}
	c.change(func(m *Model) { m.Policy = asked })
	f := func(path, body, told string) {
		t.Helper()
		if got := c.askAt(path, body); got != "200 e0 -" || asked.got() != told {
			t.Errorf("%s %.40s: %s, a policy is told %s, want %s", path, body, got, asked.got(), told)
		}
	}
	responses := `{"input":"` + words(300) + `"}`
	f("/v1/responses", responses, "150/0/0")
	f("/v1/responses", responses, "150/128/128")
	f("/v1/responses", `{"input":"`+words(150)+`"}`, "75/64/64")
	f("/v1/responses", `{"input":"`+words(100)+`"}`, "50/0/0") // no block
	messages := `{"messages":[{"role":"user","content":"` + words(300) + `"}]}`
	f("/v1/messages", messages, "151/0/0")
	f("/v1/messages", messages, "151/128/128")
	c.change(func(m *Model) { m.Prompts = nil })
	f("/v1/completions", completion(words(300)), "150/128/128") // the same text as the first
	f("/v1/completions", completion("c "+words(300)), "150/0/0")
	f("/v1/embeddings", responses, "151/0/0") // by the body's strings
	if got := c.told.take(); len(got) > 0 {
		t.Errorf("told %q", got)
	}
}

// Every way in is the same.
func TestCachedTongues(t *testing.T) {
	c := newCacher(t, nil, scripted(t))
	c.expect(completion(words(20)), "200 e0 0")
	for _, to := range tongues {
		t.Run(to.name, func(t *testing.T) {
			resp, err := c.speak(to).do(t, http.MethodPost, "/v1/completions", strings.NewReader(completion(words(20))), nil)
			if err != nil {
				t.Fatal(err)
			}
			io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
			if got := resp.Header[cachedTokens]; !slices.Equal(got, []string{"16"}) {
				t.Errorf("predicted %q", got)
			}
		})
	}
}

// An engine's own field of that name is not told.
func TestCachedHeaderIsOurs(t *testing.T) {
	e := newRawEngine(t, answering("HTTP/1.1 200 OK\r\nX-Inferrail-Cached-Tokens: 7\r\nContent-Length: 2\r\n\r\n{}"))
	c := newCacher(t, nil, e.url())
	c.expect(completion(words(20)), "200 e0 0")
	c.s.SetIndex(nil, nil)
	c.expect(completion(words(20)), "200 e0 -")
}

// The index is replaced while requests run: each ends with the one that it began
// with.
func TestCachedIndexReplaced(t *testing.T) {
	asked, answer := make(chan struct{}), make(chan struct{})
	e := newRawEngine(t, func(c *engineSide) {
		for c.request() != nil {
			asked <- struct{}{}
			<-answer
			io.WriteString(c, fixed("{}"))
		}
	})
	c := newCacher(t, nil, e.url())
	done := make(chan string)
	go func() { done <- c.ask(completion(words(20))) }()
	<-asked
	c.s.SetIndex(nil, nil)
	answer <- struct{}{}
	if got := <-done; got != "200 e0 0" || c.holds(0, words(20)) != 5 {
		t.Errorf("%s, %d blocks", got, c.holds(0, words(20)))
	}
}

// The rank of a replica goes to the engine, and no other does.
func TestRank(t *testing.T) {
	r, err := NewReplica(0, "e", "http://10.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	f := func(rank int, client, want string) {
		t.Helper()
		r.SetRank(rank)
		raw := []byte(client + "\r\n")
		var h requestHead
		if why := h.read(raw); why != "" {
			t.Fatal(why)
		}
		head := h.appendTo(nil, asEngine{method: []byte("POST"), target: []byte("/"), replica: r, id: []byte("i")})
		var got []string
		for line := range bytes.SplitSeq(head, crlf) {
			if bytes.HasPrefix(bytes.ToLower(line), []byte("x-data-parallel-rank")) {
				got = append(got, string(line))
			}
		}
		if strings.Join(got, "|") != want {
			t.Errorf("rank %d, %q: %q, want %q", rank, client, got, want)
		}
	}
	f(-1, "", "")
	f(-1, "x-Data-Parallel-Rank: 3\r\n", "x-Data-Parallel-Rank: 3")
	f(0, "", "X-data-parallel-rank: 0")
	f(2, "x-Data-Parallel-Rank: 3\r\n", "X-data-parallel-rank: 2")
	f(-7, "X-data-parallel-rank: x\r\n", "X-data-parallel-rank: x")
}

// The chains are those of package index, each in its place, however much the
// memory was used before.
func TestBlocksAgainstModel(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var b blocks
	for range 300 {
		root := index.Root(fmt.Sprint(rng.IntN(3)), "", nil)
		var p prompt.Prompt
		var want []index.Prompt
		sizes := [][]int{nil, {4}, {16, 3}, {1, 0, 64}}[rng.IntN(4)]
		exact := rng.IntN(3) > 0
		for range rng.IntN(4) {
			if exact {
				ids := make([]uint32, rng.IntN(100))
				for i := range ids {
					ids[i] = rng.Uint32N(9)
				}
				p.IDs = append(p.IDs, ids...)
				p.Ends = append(p.Ends, len(p.IDs))
				for _, size := range sizes {
					want = append(want, index.Prompt{Chain: index.AppendTokens(nil, root, ids, size), IDs: ids, Block: size})
				}
			} else {
				p.Reason = prompt.Late
				text := bytes.Repeat([]byte{byte(rng.IntN(3))}, rng.IntN(1000))
				p.Text = append(p.Text, text...)
				p.TextEnds = append(p.TextEnds, len(p.Text))
				if chain := index.AppendText(nil, root, text); len(chain) > 0 {
					want = append(want, index.Prompt{Chain: chain})
				}
			}
		}
		if ok := b.fill(root, &p, sizes); ok != (len(want) > 0) || len(b.prompts) != len(want) {
			t.Fatalf("fill is %v, %d prompts, want %d", ok, len(b.prompts), len(want))
		}
		for i := range want {
			got := b.prompts[i]
			if !slices.Equal(got.Chain, want[i].Chain) || !slices.Equal(got.IDs, want[i].IDs) || got.Block != want[i].Block {
				t.Fatalf("prompt %d is %+v, want %+v", i, got, want[i])
			}
		}
	}
}

// TestCachedExchangeDoesNotAllocate: looking a prompt up and entering it
// allocates nothing, be its tokens known or its text only.
func TestCachedExchangeDoesNotAllocate(t *testing.T) {
	withoutRace(t)
	f := func(name string, tokens bool) {
		t.Run(name, func(t *testing.T) {
			measure := func(lookedUp bool) float64 {
				return testing.AllocsPerRun(200, steadyExchange(t, func(t testing.TB, url string) *rig {
					c := newCacher(t, nil, url)
					if !tokens {
						c.change(func(m *Model) { m.Prompts = nil })
					}
					if !lookedUp {
						c.s.SetIndex(nil, nil)
					}
					return c.rig
				}, to("/v1/completions", `{"stream":true,"prompt":"`+words(600)+`"}`)))
			}
			if without, with := measure(false), measure(true); with > without {
				t.Errorf("%v allocations, and %v without an index", with, without)
			}
		})
	}
	f("tokens", true)
	f("text", false)
}
