package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/inferrail/inferrail/simulator"
)

// TestCachedPacketTier: of conversations whose answers the kernel carries, what is
// predicted of each turn is what the engine says at the end of its stream. Of the
// body, userspace reads what tells that the prefill has ended, and no more.
func TestCachedPacketTier(t *testing.T) {
	t.Parallel()
	for _, engine := range []string{"vllm", "sglang"} {
		t.Run(engine, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, labOptions{})
			s := l.sim(simulator.Config{Engine: engine, EnablePromptTokensDetails: true, TimePerOutputToken: time.Millisecond})
			config := filepath.Join(t.TempDir(), "inferrail.yaml")
			l.check(os.WriteFile(config, []byte("models: [{name: sim, tokenizer: builtin:sim, block_size: 16}]\n"), 0o600))
			n := l.start("packet", []string{s.URL()}, "--config", config)
			c, err := l.dial(n.addr)
			l.check(err)
			defer c.Close()
			br := bufio.NewReader(c)
			const turns, talks = 5, 3
			foretold := 0
			var texts [talks]string
			for turn := range turns {
				for talk := range talks {
					c.SetDeadline(time.Now().Add(20 * time.Second))
					texts[talk] += fmt.Sprint("turn ", turn, " of talk ", talk, strings.Repeat(" and so on", 30))
					body := fmt.Sprintf(`{"model":"sim","stream":true,"stream_options":{"include_usage":true},"max_tokens":40,"prompt":%q}`, texts[talk])
					fmt.Fprintf(c, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
					resp, err := http.ReadResponse(br, &http.Request{Method: "POST"})
					l.check(err)
					answer, err := io.ReadAll(resp.Body)
					l.check(err)
					told, err := strconv.Atoi(resp.Header.Get("x-inferrail-cached-tokens"))
					if err != nil || resp.StatusCode != 200 {
						t.Fatalf("turn %d: %d, %v, %.300s", turn, resp.StatusCode, resp.Header, answer)
					}
					for line := range strings.Lines(string(answer)) {
						var chunk struct{ Choices []struct{ Text string } }
						if data, ok := strings.CutPrefix(line, "data: {"); ok {
							l.check(json.Unmarshal([]byte("{"+data), &chunk))
						}
						for _, choice := range chunk.Choices {
							texts[talk] += choice.Text
						}
					}
					foretold += told
					if want := turn * 80; turn > 0 && told < want {
						t.Errorf("turn %d: %d tokens are predicted, want at least %d", turn, told, want)
					}
				}
			}
			d := n.settled()
			t.Logf("%+v", d)
			if d.Kernel.Ended < turns*talks*9/10 {
				t.Errorf("the kernel ended %d of %d responses", d.Kernel.Ended, turns*talks)
			}
			// The head, the first of the body, and the end; some bytes more come
			// before the kernel has taken over.
			if d.Wakeups > 5*turns*talks {
				t.Errorf("userspace was woken %d times for %d responses", d.Wakeups, turns*talks)
			}
			const name = "inferrail_prompt_cached_tokens_total"
			predicted, actual, unverified := n.metric(name, `kind="predicted"`), n.metric(name, `kind="actual"`), n.metric(name, `kind="unverified"`)
			if predicted != actual || predicted+unverified != float64(foretold) || predicted == 0 {
				t.Errorf("%v tokens are predicted, %v were cached, %v are unverified; clients were told %d", predicted, actual, unverified, foretold)
			}
		})
	}
}
