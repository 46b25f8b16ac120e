package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// knownCache is what /debug/index says of a replica.
type knownCache struct {
	State, Why string
	Tiers      map[string]int `json:"blocks_by_tier"`
	Expected   int
	Capacity   int
	BlockSize  int `json:"block_size"`
	Events     *struct {
		Endpoint  string
		Next      int `json:"next_sequence"`
		Removed   int
		Gaps      int
		Lost      int `json:"lost_batches"`
		Malformed int
		Unknown   int
	}
}

func (g *guard) caches() []knownCache {
	g.t.Helper()
	var page struct{ Slots []knownCache }
	if err := json.Unmarshal(g.page("/debug/index"), &page); err != nil {
		g.t.Fatal(err)
	}
	return page.Slots
}

// awaitCache waits until what the engines hold is known exactly, and nothing of
// it is merely expected. It returns that of the first.
func (g *guard) awaitCache(t *testing.T) knownCache {
	t.Helper()
	unsure := func(c knownCache) bool { return c.State != "exact" || c.Expected != 0 }
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		list := g.caches()
		i := slices.IndexFunc(list, unsure)
		if len(list) > 0 && i < 0 {
			return list[0]
		}
		if time.Now().After(end) {
			t.Fatalf("of %d engines' caches, that of %d is not known: %+v", len(list), i, list)
		}
	}
}

// TestVLLMCache: an agent that is told nothing but where a vLLM is finds its KV
// events, and predicts of every chat how many tokens vLLM takes from its cache,
// while that is too small for all conversations.
func TestVLLMCache(t *testing.T) {
	bin, tokenizers := os.Getenv("INFERRAIL_VLLM"), os.Getenv("INFERRAIL_TOKENIZERS")
	if bin == "" || tokenizers == "" {
		t.Skip("INFERRAIL_VLLM and INFERRAIL_TOKENIZERS name no folders with vLLM and tokenizers (make test-vllm)")
	}
	p := &place{t: t, bin: bin, model: filepath.Join(t.TempDir(), "qwen")}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	if err := command(ctx, ".", filepath.Join(bin, "python"), "testdata/vllm/model.py", p.model, filepath.Join(tokenizers, "tokenizer-qwen3", "models")); err != nil {
		t.Fatal(err)
	}
	const block, blocks = 32, 150
	events := fmt.Sprintf(`{"enable_kv_cache_events": true, "endpoint": "tcp://*:%d", "replay_endpoint": "tcp://*:%d", "topic": "kv"}`,
		p.freePort(atEngine), p.freePort(atEngine))
	v := p.vllm(t, "--enable-prompt-tokens-details", "--kv-events-config", events,
		"--block-size", strconv.Itoa(block), "--num-gpu-blocks-override", strconv.Itoa(blocks))
	g := p.agent(t, "copy", []string{v.url})
	g.awaitPrompts(t, "exact", "agrees")
	if c := g.awaitCache(t); c.BlockSize != block || c.Capacity < blocks-1 || c.Capacity > blocks || c.Events == nil {
		t.Errorf("the engine's cache is known as %+v, %+v", c, c.Events)
	}

	// Some conversations go on in turns, each a little longer every time.
	r := rand.New(rand.NewPCG(3, 4))
	k := talker{r}
	conversations := make([][]any, 10)
	start := func(i int) {
		text := strings.Repeat(k.text()+" ", 4+r.IntN(30))
		conversations[i] = []any{map[string]any{"role": "system", "content": text}}
	}
	cached, predicted := 0, 0
	for n := range 120 {
		i := r.IntN(len(conversations))
		if len(conversations[i]) == 0 || len(conversations[i]) > 12 {
			start(i)
		}
		conversations[i] = append(conversations[i], map[string]any{"role": "user", "content": k.text()})
		body := map[string]any{"model": []string{"tiny", "tiny-alias"}[r.IntN(2)], "max_tokens": 1 + r.IntN(20), "temperature": 0, "messages": conversations[i]}
		if r.IntN(8) == 0 {
			body["cache_salt"] = "salt"
		}
		text, err := json.Marshal(body)
		if err != nil {
			t.Fatal(err)
		}
		answer := pose(t, g.client, g.url, question{path: "/v1/chat/completions", body: string(text)})
		var told struct {
			Choices []struct{ Message struct{ Content string } }
			Usage   struct {
				Details struct {
					Cached int `json:"cached_tokens"`
				} `json:"prompt_tokens_details"`
			}
		}
		if err := json.Unmarshal([]byte(answer.body), &told); err != nil || answer.status != 200 || len(told.Choices) != 1 {
			t.Fatalf("request %d: %d %s (%v)", n, answer.status, answer.body, err)
		}
		if got := answer.header.Get("x-inferrail-cached-tokens"); got != strconv.Itoa(told.Usage.Details.Cached) {
			t.Errorf("request %d: %q cached tokens are predicted, vLLM has found %d", n, got, told.Usage.Details.Cached)
		} else if told.Usage.Details.Cached > 0 {
			predicted++
		}
		cached += told.Usage.Details.Cached
		conversations[i] = append(conversations[i], map[string]any{"role": "assistant", "content": told.Choices[0].Message.Content})
		// What was dropped for it may be told a moment after the answer.
		g.awaitCache(t)
	}
	c := g.awaitCache(t)
	t.Logf("%d tokens were found cached, in %d of 120 requests; %+v, %+v", cached, predicted, c, c.Events)
	if predicted < 40 || c.Events.Removed < 50 {
		t.Errorf("that proves little: %d requests found something, %d blocks were dropped", predicted, c.Events.Removed)
	}
	if c.Events.Gaps+c.Events.Lost+c.Events.Malformed+c.Events.Unknown != 0 {
		t.Errorf("events are amiss: %+v", c.Events)
	}
	if n := g.metric("inferrail_index_error_tokens_total"); n != 0 {
		t.Errorf("the metric tells of %v tokens", n)
	}
}

// TestVLLMCacheTogether: of chats that are asked of a real vLLM at the same time,
// which has no room for all of them, what is predicted is found, with its events
// and without, and with small blocks and those that it has by itself.
//
// It generates while others wait, which the agent learns when it is told, or at the
// end. So there are few that differ, by a block or two.
func TestVLLMCacheTogether(t *testing.T) {
	bin, tokenizers := os.Getenv("INFERRAIL_VLLM"), os.Getenv("INFERRAIL_TOKENIZERS")
	if bin == "" || tokenizers == "" {
		t.Skip("INFERRAIL_VLLM and INFERRAIL_TOKENIZERS name no folders with vLLM and tokenizers (make test-vllm)")
	}
	f := func(name string, events bool, block, blocks int) {
		t.Run(name, func(t *testing.T) {
			p := &place{t: t, bin: bin, model: filepath.Join(t.TempDir(), "qwen")}
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
			defer cancel()
			if err := command(ctx, ".", filepath.Join(bin, "python"), "testdata/vllm/model.py", p.model, filepath.Join(tokenizers, "tokenizer-qwen3", "models")); err != nil {
				t.Fatal(err)
			}
			args := []string{"--enable-prompt-tokens-details", "--num-gpu-blocks-override", strconv.Itoa(blocks)}
			if block > 0 {
				args = append(args, "--block-size", strconv.Itoa(block))
			}
			if events {
				args = append(args, "--kv-events-config", fmt.Sprintf(`{"enable_kv_cache_events": true, "endpoint": "tcp://*:%d", "replay_endpoint": "tcp://*:%d"}`,
					p.freePort(atEngine), p.freePort(atEngine)))
			}
			v := p.vllm(t, args...)
			g := p.agent(t, "copy", []string{v.url})
			g.awaitPrompts(t, "exact", "agrees")
			if events {
				g.awaitCache(t)
			} else {
				// What it has computed before the agent came is not known to it. It
				// goes when others have taken its place.
				fillCache(t, g)
			}
			var mu sync.Mutex // guards what follows
			wrong, found, sent := 0, 0, 0
			var all sync.WaitGroup
			for n := range 4 {
				all.Go(func() {
					r := rand.New(rand.NewPCG(uint64(n), 4))
					k := talker{r}
					var talks [3][]any
					for range 60 {
						i := r.IntN(len(talks))
						if len(talks[i]) > 12 {
							talks[i] = nil
						}
						if talks[i] == nil {
							text := strings.Repeat(k.text()+" ", 4+r.IntN(30))
							talks[i] = []any{map[string]any{"role": "system", "content": text}}
						}
						talks[i] = append(talks[i], map[string]any{"role": "user", "content": k.text()})
						text, err := json.Marshal(map[string]any{"model": "tiny", "max_tokens": 1 + r.IntN(20), "temperature": 0, "messages": talks[i]})
						if err != nil {
							t.Error(err)
							return
						}
						answer, err := tryPose(t.Context(), g.client, g.url, question{path: "/v1/chat/completions", body: string(text)})
						var told struct {
							Choices []struct{ Message struct{ Content string } }
							Usage   struct {
								Details struct {
									Cached int `json:"cached_tokens"`
								} `json:"prompt_tokens_details"`
							}
						}
						if err == nil {
							err = json.Unmarshal([]byte(answer.body), &told)
						}
						if err != nil || answer.status != 200 || len(told.Choices) != 1 {
							t.Errorf("%d %s (%v)", answer.status, answer.body, err)
							return
						}
						predicted := answer.header.Get("x-inferrail-cached-tokens")
						mu.Lock()
						sent++
						if told.Usage.Details.Cached > 0 {
							found++
						}
						if predicted != strconv.Itoa(told.Usage.Details.Cached) {
							wrong++
							t.Logf("request %d: %q cached tokens are predicted, vLLM has found %d", sent, predicted, told.Usage.Details.Cached)
						}
						mu.Unlock()
						talks[i] = append(talks[i], map[string]any{"role": "assistant", "content": told.Choices[0].Message.Content})
					}
				})
			}
			all.Wait()
			t.Logf("%d of %d are wrong, %d have found something", wrong, sent, found)
			if wrong > sent/20 || found < sent/4 {
				t.Errorf("%d of %d are wrong, %d have found something", wrong, sent, found)
			}
		})
	}
	f("events, blocks of 32", true, 32, 150)
	f("events, its own blocks", true, 0, 45)
	f("no events, blocks of 32", false, 32, 150)
}

// fillCache asks for prompts that nothing else begins with, until the engine's cache
// holds nothing that was there before.
func fillCache(t *testing.T, g *guard) {
	t.Helper()
	for i := range 40 {
		body := fmt.Sprintf(`{"model":"tiny","max_tokens":1,"prompt":%q}`, strings.Repeat(fmt.Sprint("number ", i, " "), 60))
		if r := pose(t, g.client, g.url, question{path: "/v1/completions", body: body}); r.status != 200 {
			t.Fatalf("%d: %s", r.status, r.body)
		}
	}
}
