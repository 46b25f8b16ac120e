package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// longPrompts makes prompts of some thousand tokens that nothing else begins with, from a
// seed.
type longPrompts struct{ *rand.Rand }

func (l longPrompts) text(words int) string {
	list := make([]string, words)
	for i := range list {
		list[i] = fmt.Sprint([]string{"river", "bridge", "ferry", "valley", "market"}[l.IntN(5)], l.IntN(1000))
	}
	return strings.Join(list, " ")
}

func (l longPrompts) ids(n int) []int {
	list := make([]int, n)
	for i := range list {
		list[i] = 1000 + l.IntN(100_000)
	}
	return list
}

// pieceAnswer is what is compared of an answer.
type pieceAnswer struct {
	Choices []struct {
		Text    string
		Message struct{ Content string }
	}
	Usage struct {
		Prompt  int `json:"prompt_tokens"`
		Details struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
}

func (a *pieceAnswer) text() string { return a.Choices[0].Text + a.Choices[0].Message.Content }

// askForPieces asks for an answer that there must be.
func askForPieces(t *testing.T, client *http.Client, base, path string, body map[string]any) (a pieceAnswer, header http.Header) {
	t.Helper()
	text, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	r := pose(t, client, base, question{path: path, body: string(text)})
	if err := json.Unmarshal([]byte(r.body), &a); err != nil || r.status != 200 || len(a.Choices) != 1 {
		t.Fatalf("%s: %d %.500s (%v)", path, r.status, r.body, err)
	}
	return a, r.header
}

// pieces is how many were asked for, and how many of them were computed.
func (g *guard) pieces() (asked, computed float64) {
	g.t.Helper()
	page := string(g.page("/metrics"))
	return sumMetric(g.t, page, "inferrail_pieces_total"), sumMetric(g.t, page, "inferrail_pieces_total", `outcome="computed"`)
}

// TestVLLMPieces: an agent lets a vLLM compute long prompts in pieces, knows what each of
// them has left in its cache, and gets the answers that vLLM gives to the whole; and who
// asks for little while a long prompt is computed need not wait for it.
//
// The model is as slow as it takes for a long prompt to last, and computes with as many
// digits as it takes for the same answer by other ways. Its answers depend on all of the
// prompt.
func TestVLLMPieces(t *testing.T) {
	bin, tokenizers := os.Getenv("INFERRAIL_VLLM"), os.Getenv("INFERRAIL_TOKENIZERS")
	if bin == "" || tokenizers == "" {
		t.Skip("INFERRAIL_VLLM and INFERRAIL_TOKENIZERS name no folders with vLLM and tokenizers (make test-vllm)")
	}
	p := &place{t: t, bin: bin, model: filepath.Join(t.TempDir(), "qwen")}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	if err := command(ctx, ".", filepath.Join(bin, "python"), "testdata/vllm/model.py", p.model,
		filepath.Join(tokenizers, "tokenizer-qwen3", "models"), "128", "4096", "6", "0.2"); err != nil {
		t.Fatal(err)
	}
	const block, blocks = 32, 640
	v := p.vllm(t, "--enable-prompt-tokens-details", "--max-model-len", "16384", "--dtype", "float32",
		"--block-size", strconv.Itoa(block), "--num-gpu-blocks-override", strconv.Itoa(blocks), "--kv-events-config",
		fmt.Sprintf(`{"enable_kv_cache_events": true, "endpoint": "tcp://*:%d", "replay_endpoint": "tcp://*:%d"}`, p.freePort(atEngine), p.freePort(atEngine)))
	file := filepath.Join(t.TempDir(), "inferrail.yaml")
	if err := os.WriteFile(file, []byte("routing: {pieces: 50ms}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	g := p.agent(t, "copy", []string{v.url}, "--config", file)
	g.awaitPrompts(t, "exact", "agrees")
	g.awaitCache(t)

	k := longPrompts{rand.New(rand.NewPCG(5, 6))}
	t.Run("answers", func(t *testing.T) { piecesAnswer(t, v, g, k, block) })
	t.Run("whole", func(t *testing.T) { piecesSpared(t, g, k) })
	t.Run("between", func(t *testing.T) { piecesBetween(t, g, k) })
	if n := g.metric("inferrail_index_error_tokens_total"); n != 0 {
		t.Errorf("the metric tells of %v tokens", n)
	}
	if asked, computed := g.pieces(); asked != computed {
		t.Errorf("%v pieces were asked for, %v were computed", asked, computed)
	}
	t.Run("no room", func(t *testing.T) { piecesWithoutRoom(t, v, g) })
	t.Run("refused", func(t *testing.T) { piecesRefused(t, g, k) })

	c := g.awaitCache(t)
	t.Logf("%+v, %+v", c, c.Events)
	if c.Events.Gaps+c.Events.Lost+c.Events.Malformed+c.Events.Unknown != 0 {
		t.Errorf("events are amiss: %+v", c.Events)
	}
	g.awaitPrompts(t, "exact", "agrees")
}

// piecesAnswer: what was computed in pieces is answered as what vLLM computes at once with
// a salt that makes its cache another one; and vLLM finds cached what was predicted, all of
// the last piece, whose blocks it keeps to the last token.
func piecesAnswer(t *testing.T, v *vllm, g *guard, k longPrompts, block int) {
	chat := func(words int) map[string]any {
		return map[string]any{"messages": []any{map[string]any{"role": "user", "content": k.text(words)}}}
	}
	once := chat(1500)
	for i, q := range []struct {
		name, path string
		body       map[string]any
		pieces     float64 // at least
	}{
		{"chat", "/v1/chat/completions", once, 2},
		{"the chat again", "/v1/chat/completions", once, 0},
		{"longer chat", "/v1/chat/completions", chat(2500), 2},
		{"text", "/v1/completions", map[string]any{"prompt": k.text(1500)}, 2},
		{"ids", "/v1/completions", map[string]any{"prompt": k.ids(6000)}, 2},
		{"whole blocks", "/v1/completions", map[string]any{"prompt": k.ids(192 * block)}, 2},
	} {
		q.body["model"], q.body["max_tokens"], q.body["temperature"] = []string{"tiny", "tiny-alias"}[i%2], 12, 0
		before, _ := g.pieces()
		via, header := askForPieces(t, g.client, g.url, q.path, q.body)
		asked, _ := g.pieces()
		g.awaitCache(t)
		cached := strconv.Itoa(via.Usage.Details.Cached)
		if got := header.Get("x-inferrail-cached-tokens"); got != cached || via.Usage.Details.Cached == 0 {
			t.Errorf("%s: %q cached tokens are predicted, vLLM has found %s", q.name, got, cached)
		}
		begun := header.Get("x-inferrail-begun-tokens")
		switch n := asked - before; {
		case n < q.pieces || n > 0 && q.pieces == 0:
			t.Errorf("%s: %v pieces of %d tokens", q.name, n, via.Usage.Prompt)
		case n > 0 && begun != cached, n == 0 && begun != "":
			t.Errorf("%s: after %v pieces %q tokens were begun, %s were cached", q.name, n, begun, cached)
		default:
			t.Logf("%s: %d tokens, %v pieces, %s of them cached: %q", q.name, via.Usage.Prompt, n, cached, via.text())
		}
		q.body["cache_salt"] = "cold " + q.name
		direct, _ := askForPieces(t, v.client, v.url, q.path, q.body)
		delete(q.body, "cache_salt")
		if direct.Usage.Details.Cached != 0 || direct.text() != via.text() {
			t.Errorf("%s: the answer is %q, and of vLLM, with %d tokens cached, %q", q.name, via.text(), direct.Usage.Details.Cached, direct.text())
		}
	}
}

// piecesSpared: what no piece would be of use to is sent whole: what the next piece would not
// find, what vLLM computes whole whatever it has cached, and what is soon done.
func piecesSpared(t *testing.T, g *guard, k longPrompts) {
	for _, q := range []struct {
		name string
		body map[string]any
	}{
		{"salted", map[string]any{"prompt": k.ids(6000), "cache_salt": "of a client"}},
		{"echoed with its probabilities", map[string]any{"prompt": k.ids(2000), "echo": true, "logprobs": 1}},
		{"short", map[string]any{"prompt": k.ids(300)}},
	} {
		q.body["model"], q.body["max_tokens"], q.body["temperature"] = "tiny", 2, 0
		before, _ := g.pieces()
		via, header := askForPieces(t, g.client, g.url, "/v1/completions", q.body)
		asked, _ := g.pieces()
		if asked != before || header.Get("x-inferrail-cached-tokens") != "0" || via.Usage.Details.Cached != 0 || header.Get("x-inferrail-begun-tokens") != "" {
			t.Errorf("%s: %v pieces, %d tokens cached; %v", q.name, asked-before, via.Usage.Details.Cached, header)
		}
	}
}

// piecesBetween: short prompts that are asked for one after another while a long one is
// computed are answered before it has its first token. Sent whole, it would be computed
// before all of them.
func piecesBetween(t *testing.T, g *guard, k longPrompts) {
	long, err := json.Marshal(map[string]any{"model": "tiny", "prompt": k.ids(14000), "max_tokens": 3, "temperature": 0, "stream": true})
	if err != nil {
		t.Fatal(err)
	}
	before, _ := g.pieces()
	first := make(chan time.Duration, 1)
	began := time.Now()
	go func() {
		defer close(first)
		resp, err := g.client.Post(g.url+"/v1/completions", "application/json", strings.NewReader(string(long)))
		if err != nil {
			t.Error(err)
			return
		}
		defer resp.Body.Close()
		lines := bufio.NewReader(resp.Body)
		line, err := lines.ReadString('\n')
		if first <- time.Since(began); err != nil || !strings.HasPrefix(line, `data: {"id"`) {
			t.Errorf("the long one is answered with %q, %v", line, err)
		}
		for err == nil {
			_, err = lines.ReadString('\n')
		}
	}()
	for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		if asked, _ := g.pieces(); asked > before {
			break
		}
		if time.Now().After(end) {
			t.Fatal("no piece was asked for in a minute")
		}
	}
	var took []time.Duration
	for {
		asked := time.Now()
		askForPieces(t, g.client, g.url, "/v1/completions", map[string]any{"model": "tiny", "prompt": k.ids(200), "max_tokens": 1})
		select {
		case at, ok := <-first:
			asked, _ := g.pieces()
			t.Logf("the long one, in %v pieces, has its first token after %v; before it short ones were answered after %v", asked-before, at, took)
			if !ok || len(took) < 3 {
				t.Errorf("%d short ones were answered before the long one", len(took))
			}
			return
		default:
			took = append(took, time.Since(asked))
		}
	}
}

// piecesWithoutRoom: of prompts that come together, and that the cache has no room for, each
// drops what pieces of another have left there. That is noticed: vLLM does not compute their
// beginnings again and again.
func piecesWithoutRoom(t *testing.T, v *vllm, g *guard) {
	const clients, rounds, tokens = 4, 2, 9000
	uncached := func() float64 { return v.metric("prefix_cache_queries_total") - v.metric("prefix_cache_hits_total") }
	before, asked := uncached(), g.metric("inferrail_pieces_total")
	var all sync.WaitGroup
	for i := range clients {
		all.Go(func() {
			k := longPrompts{rand.New(rand.NewPCG(uint64(i), 7))}
			for range rounds {
				body, err := json.Marshal(map[string]any{"model": "tiny", "prompt": k.ids(tokens), "max_tokens": 1})
				if err != nil {
					t.Error(err)
					return
				}
				r, err := tryPose(t.Context(), g.client, g.url, question{path: "/v1/completions", body: string(body)})
				if err != nil || r.status != 200 {
					t.Errorf("%d %.500s (%v)", r.status, r.body, err)
				}
			}
		})
	}
	all.Wait()
	computed := uncached() - before
	t.Logf("vLLM has computed %v tokens of %d, in %v pieces and %d prompts", computed, clients*rounds*tokens, g.metric("inferrail_pieces_total")-asked, clients*rounds)
	if computed > 2*clients*rounds*tokens {
		t.Errorf("vLLM has computed %v tokens of %d", computed, clients*rounds*tokens)
	}
}

// piecesRefused: a prompt that vLLM refuses, in a piece or at the end, is its client's
// mistake, who is told what vLLM says; others' are computed in pieces as before.
func piecesRefused(t *testing.T, g *guard, k longPrompts) {
	const unknown = 151_936 // one more than there are tokens
	for _, prompt := range [][]int{append([]int{unknown}, k.ids(8000)...), append(k.ids(8000), unknown)} {
		body, err := json.Marshal(map[string]any{"model": "tiny", "prompt": prompt, "max_tokens": 1})
		if err != nil {
			t.Fatal(err)
		}
		if r := pose(t, g.client, g.url, question{path: "/v1/completions", body: string(body)}); r.status != 400 || !strings.Contains(r.body, fmt.Sprint(unknown)) {
			t.Errorf("%d %.500s", r.status, r.body)
		}
	}
	asked, before := g.pieces()
	if asked != before+1 {
		t.Errorf("%v pieces were asked for, %v were computed, and one was refused", asked, before)
	}
	askForPieces(t, g.client, g.url, "/v1/completions", map[string]any{"model": "tiny", "prompt": k.ids(8000), "max_tokens": 1})
	if _, computed := g.pieces(); computed < before+2 {
		t.Errorf("after a prompt was refused %v pieces of another are computed", computed-before)
	}
}
