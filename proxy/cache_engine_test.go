package proxy

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/inferrail/inferrail/index"
	"github.com/inferrail/inferrail/policy"
	"github.com/inferrail/inferrail/simulator"
)

// drawn is a policy that goes by the request's random number alone.
type drawn struct{}

func (drawn) Name() string { return "drawn" }

func (drawn) Score(r *policy.Request, candidates []policy.Candidate, costs []float64) float64 {
	for i := range candidates {
		costs[i] = 1
	}
	costs[r.Rand%uint64(len(candidates))] = 0
	return 0
}

// talk is a conversation: what the client has of it.
type talk struct{ text, salt string }

// say is one request of a talk. It returns what the engine has answered.
func (c *cacher) say(client *http.Client, t talk, roomy bool, rng *rand.Rand) (text string, err error) {
	// The index cannot take back that a refused request would have evicted
	// something.
	refused := roomy && rng.IntN(20) == 0
	stream := rng.IntN(2) == 0
	counted := rng.IntN(3) > 0
	body := map[string]any{"prompt": t.text, "max_tokens": 1 + rng.IntN(40), "stream": stream}
	if t.salt != "" {
		body["cache_salt"] = t.salt
	}
	switch {
	case stream && counted:
		body["stream_options"] = map[string]any{"include_usage": true}
	case stream:
	case refused:
		body["max_tokens"] = -1
	}
	raw, err := json.Marshal(body)
	if err != nil {
		return "", err
	}
	resp, err := client.Post("http://"+c.addr+"/v1/completions", "application/json", strings.NewReader(string(raw)))
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	if body["max_tokens"] == -1 {
		if resp.StatusCode != http.StatusBadRequest {
			return "", fmt.Errorf("status %d", resp.StatusCode)
		}
		return "", nil
	}
	if resp.StatusCode != http.StatusOK {
		return "", fmt.Errorf("status %d", resp.StatusCode)
	}
	type answer struct{ Choices []struct{ Text string } }
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		line := strings.TrimPrefix(lines.Text(), "data: ")
		if line == "" || line == "[DONE]" {
			continue
		}
		var a answer
		if err := json.Unmarshal([]byte(line), &a); err != nil {
			return "", err
		}
		if len(a.Choices) > 0 {
			text += a.Choices[0].Text
		}
	}
	return text, nil
}

// What is predicted is what the engines find, on every request of conversations
// that are more than their caches hold.
func TestCachedAgainstEngines(t *testing.T) {
	f := func(name, engine string, blockSize, blocks, requests int, roomy bool) {
		t.Run(name, func(t *testing.T) {
			var urls []string
			for range 2 {
				sim, err := simulator.Start(simulator.Config{ServedModelName: []string{"m"}, Engine: engine, ZeroLatency: true,
					BlockSize: blockSize, NumGPUBlocks: blocks, EnablePromptTokensDetails: true})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { sim.Close() })
				urls = append(urls, sim.URL())
			}
			c := newCacher(t, nil, urls...)
			for _, r := range c.replicas {
				c.join(r, index.SlotConfig{Model: "base", BlockSize: blockSize, Capacity: blocks, AfterPrefill: engine == "sglang"})
			}
			c.change(func(m *Model) { m.Policy, m.Blocks = drawn{}, []int{blockSize} })
			client := &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{}}
			t.Cleanup(client.CloseIdleConnections)

			rng := rand.New(rand.NewPCG(1, uint64(blockSize)))
			words := func() string {
				var b strings.Builder
				for range 1 + rng.IntN(40) {
					fmt.Fprintf(&b, "w%d ", rng.IntN(1000))
				}
				return b.String()
			}
			system := words()
			talks := make([]talk, 12)
			compared, hits := 0, 0
			for n := range requests {
				i := rng.IntN(len(talks))
				if talks[i].text == "" || len(talks[i].text) > 2000 {
					talks[i] = talk{text: system}
					if rng.IntN(5) == 0 {
						talks[i].salt = "s"
					}
				}
				talks[i].text += words()
				text, err := c.say(client, talks[i], roomy, rng)
				if err != nil {
					t.Fatalf("request %d: %v", n, err)
				}
				talks[i].text += text
				eventually(t, 20*time.Second, "the request is over", func() bool { return c.s.Datapath().Running == 0 })
				for _, told := range c.told.take() {
					var m, r string
					var predicted, actual int
					var reported bool
					fmt.Sscan(told, &m, &r, &predicted, &actual, &reported)
					if predicted != actual || !reported && engine == "vllm" {
						t.Fatalf("request %d: %s", n, told)
					}
					compared++
					if actual > 0 {
						hits++
					}
				}
			}
			t.Logf("%d compared, %d of them hits", compared, hits)
			if compared < requests/2 || hits < compared/4 {
				t.Errorf("of %d requests %d were compared, %d of them hits", requests, compared, hits)
			}
		})
	}
	f("vllm", "vllm", 16, 150, 400, false)
	f("vllm, small blocks", "vllm", 3, 800, 400, false)
	f("vllm, nothing evicted", "vllm", 16, 100_000, 400, true)
	f("sglang", "sglang", 1, 100_000, 400, true)
	f("sglang, pages", "sglang", 16, 100_000, 400, true)
}

// A burst of one prompt: those that come after the first has been sent to an
// engine find there what it is going to compute, though nothing is answered yet.
func TestCachedBurst(t *testing.T) {
	const others = 15
	answer := make(chan struct{})
	e := newRawEngine(t, func(c *engineSide) {
		for c.request() != nil {
			<-answer
			io.WriteString(c, fixed(`{"usage":{"prompt_tokens":512,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":508}}}`))
		}
	})
	free := sync.OnceFunc(func() { close(answer) })
	c := newCacher(t, nil, e.url())
	t.Cleanup(free) // before the server ends
	var clients []*client
	ask := func() {
		conn := c.dial()
		conn.send(to("/v1/completions", completion(words(512))))
		clients = append(clients, conn)
	}
	ask()
	eventually(t, 20*time.Second, "the first has claimed its blocks", func() bool { return c.holds(0, words(512)) == 128 })
	for range others {
		ask()
	}
	eventually(t, 20*time.Second, "all are sent", func() bool { return c.index.Stats(nil)[0].Claims == 1+others })
	free()
	for i, conn := range clients {
		want := "508"
		if i == 0 {
			want = "0"
		}
		if resp, _ := conn.answer(); resp.Header.Get(cachedTokens) != want {
			t.Errorf("request %d: %q is predicted, want %s", i, resp.Header.Get(cachedTokens), want)
		}
	}
}
