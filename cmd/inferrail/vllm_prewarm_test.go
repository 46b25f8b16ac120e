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
	"sync"
	"testing"
	"time"
)

// prewarmAnswer is what is compared of an answer, who gave it, and how many tokens were
// predicted to be cached there.
type prewarmAnswer struct {
	pieceAnswer
	body               map[string]any
	replica, predicted string
}

// askTogether asks n different things at once, all behind one system prompt.
func (g *guard) askTogether(t *testing.T, k longPrompts, system string, n int) []prewarmAnswer {
	t.Helper()
	list := make([]prewarmAnswer, n)
	var all sync.WaitGroup
	for i := range list {
		a := &list[i]
		a.body = map[string]any{"model": "tiny", "max_tokens": 8, "temperature": 0, "messages": []any{
			map[string]any{"role": "system", "content": system}, map[string]any{"role": "user", "content": k.text(75)}}}
		text, err := json.Marshal(a.body)
		if err != nil {
			t.Fatal(err)
		}
		all.Go(func() {
			r, err := tryPose(t.Context(), g.client, g.url, question{path: "/v1/chat/completions", body: string(text)})
			if err == nil {
				err = json.Unmarshal([]byte(r.body), &a.pieceAnswer)
			}
			if err != nil || r.status != 200 || len(a.Choices) != 1 {
				t.Errorf("%d %.500s (%v)", r.status, r.body, err)
				return
			}
			a.replica, a.predicted = r.header.Get("x-inferrail-replica"), r.header.Get("x-inferrail-cached-tokens")
			if a.predicted != strconv.Itoa(a.Usage.Details.Cached) {
				t.Errorf("%q cached tokens are predicted at %s, vLLM has found %d", a.predicted, a.replica, a.Usage.Details.Cached)
			}
		})
	}
	all.Wait()
	if t.Failed() {
		t.FailNow()
	}
	return list
}

// prewarms is how many requests asked for something ahead, and how many of them had it
// computed.
func (g *guard) prewarms() (asked, computed float64) {
	g.t.Helper()
	page := string(g.page("/metrics"))
	return sumMetric(g.t, page, "inferrail_prewarm_total"), sumMetric(g.t, page, "inferrail_prewarm_total", `outcome="computed"`)
}

// TestVLLMPrewarm: while one vLLM is asked several things behind one system prompt, an agent
// lets another one, which idles, compute that ahead. Who is sent there later finds it cached,
// as is predicted, and has the answer that it gives with nothing cached.
func TestVLLMPrewarm(t *testing.T) {
	bin, tokenizers := os.Getenv("INFERRAIL_VLLM"), os.Getenv("INFERRAIL_TOKENIZERS")
	if bin == "" || tokenizers == "" {
		t.Skip("INFERRAIL_VLLM and INFERRAIL_TOKENIZERS name no folders with vLLM and tokenizers (make test-vllm)")
	}
	p := &place{t: t, bin: bin, model: filepath.Join(t.TempDir(), "qwen")}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	// As of TestVLLMPieces: slow, and exact.
	if err := command(ctx, ".", filepath.Join(bin, "python"), "testdata/vllm/model.py", p.model,
		filepath.Join(tokenizers, "tokenizer-qwen3", "models"), "128", "4096", "6", "0.2"); err != nil {
		t.Fatal(err)
	}
	engines, urls := map[string]*vllm{}, []string{}
	for i := range 2 {
		v := p.vllm(t, "--enable-prompt-tokens-details", "--dtype", "float32", "--block-size", "32", "--num-gpu-blocks-override", "1280", "--kv-events-config",
			fmt.Sprintf(`{"enable_kv_cache_events": true, "endpoint": "tcp://*:%d", "replay_endpoint": "tcp://*:%d"}`, p.freePort(atEngine), p.freePort(atEngine)))
		engines[fmt.Sprint("e", i)], urls = v, append(urls, v.url)
	}
	g := p.agent(t, "copy", urls)
	g.awaitPrompts(t, "exact", "agrees")
	g.awaitCache(t)

	// Where one of the first was sent to the other engine, it was not computed ahead there, and
	// where they have waited for too little it is not worth it: then the next prompt is tried.
	k := longPrompts{rand.New(rand.NewPCG(8, 9))}
	for round := range 10 {
		system := k.text(500)
		holder := g.askTogether(t, k, system, 1)[0].replica
		elsewhere := func(a prewarmAnswer) bool { return a.replica != holder }
		_, before := g.prewarms()
		if slices.ContainsFunc(g.askTogether(t, k, system, 5), elsewhere) {
			continue
		}
		_, computed := g.prewarms()
		for end := time.Now().Add(time.Second); computed == before && time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
			_, computed = g.prewarms()
		}
		if computed == before {
			continue
		}
		g.awaitCache(t)
		list := g.askTogether(t, k, system, 5)
		i := slices.IndexFunc(list, elsewhere)
		if i < 0 {
			t.Fatalf("all of 5 went to %s, though %v pieces were computed ahead at the other", holder, computed-before)
		}
		a := list[i]
		v := engines[a.replica]
		a.body["cache_salt"] = "cold"
		direct, _ := askForPieces(t, v.client, v.url, "/v1/chat/completions", a.body)
		t.Logf("round %d: %s computed it ahead in %v pieces, and found %d of %d tokens cached: %q", round, a.replica, computed-before, a.Usage.Details.Cached, a.Usage.Prompt, a.text())
		if a.Usage.Details.Cached < 512 {
			t.Errorf("%d tokens were cached", a.Usage.Details.Cached)
		}
		if direct.Usage.Details.Cached != 0 || direct.text() != a.text() {
			t.Errorf("the answer is %q, and with %d tokens cached %q", a.text(), direct.Usage.Details.Cached, direct.text())
		}
		asked, computed := g.prewarms()
		if n := g.metric("inferrail_prewarmed_tokens_total"); asked != computed || int(n) < a.Usage.Details.Cached {
			t.Errorf("%v were asked for, %v were computed, of %v tokens", asked, computed, n)
		}
		return
	}
	t.Errorf("nothing was computed ahead: %s", g.page("/debug/prewarm"))
}
