package simulator

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"
	"time"
)

// spent is what an answer says of its tokens.
type spent struct {
	Prompt  int `json:"prompt_tokens"`
	Details *struct {
		Cached  *int `json:"cached_tokens"`
		Created *int `json:"created_cache_tokens"`
	} `json:"prompt_tokens_details"`
}

func (u *spent) cached() int {
	if u.Details == nil || u.Details.Cached == nil {
		return -1
	}
	return *u.Details.Cached
}

// said is the text of an answer and its usage.
func said(t testing.TB, res *http.Response) (text string, u spent) {
	t.Helper()
	if res.StatusCode != http.StatusOK {
		t.Fatalf("%s: %s", res.Status, readAll(t, res))
	}
	type body struct {
		Choices []struct {
			Text           string
			Message, Delta struct{ Content string }
		}
		Usage *spent
	}
	read := func(data string) {
		var b body
		if err := json.Unmarshal([]byte(data), &b); err != nil {
			t.Fatalf("%q: %v", data, err)
		}
		for _, c := range b.Choices {
			text += c.Text + c.Message.Content + c.Delta.Content
		}
		if b.Usage != nil {
			u = *b.Usage
		}
	}
	all := string(readAll(t, res))
	if !strings.HasPrefix(all, "data: ") {
		read(all)
		return text, u
	}
	for line := range strings.SplitSeq(all, "\n") {
		if data, ok := strings.CutPrefix(line, "data: "); ok && data != "[DONE]" {
			read(data)
		}
	}
	return text, u
}

// TestCachedTokens: of conversations that share their beginning, with room for
// all, usage tells exactly what a set of all full blocks computed before would.
func TestCachedTokens(t *testing.T) {
	f := func(cfg Config) {
		t.Helper()
		cfg.ZeroLatency, cfg.EnablePromptTokensDetails, cfg.LoRAModules = true, true, []string{"l"}
		s, c := start(t, cfg), client(t)
		r := rand.New(rand.NewPCG(7, uint64(cfg.BlockSize)))
		size := cfg.BlockSize
		computed := map[string]bool{}
		conversations := make([]string, 6)
		for turn := range 120 {
			i := r.IntN(len(conversations))
			if conversations[i] == "" || r.IntN(6) == 0 {
				conversations[i] = "You answer questions in few words, and truly. "[:10+r.IntN(37)]
			}
			conversations[i] += strings.Repeat("word and ", r.IntN(20)) + fmt.Sprintf("turn %d. ", turn%3)
			model, salt := [...]string{"sim", "sim", "l"}[r.IntN(3)], [...]string{"", "", "s"}[r.IntN(3)]
			n := 1 + r.IntN(40)
			stream := r.IntN(2) == 0
			body := fmt.Sprintf(`{"model":%q,"prompt":%q,"max_tokens":%d,"stream":%v`, model, conversations[i], n, stream)
			if stream {
				body += `,"stream_options":{"include_usage":true}`
			}
			if salt != "" {
				body += `,"cache_salt":"` + salt + `"`
			}
			text, u := said(t, post(t, c, s, "/v1/completions", body+"}"))

			ids := tokenIDs(conversations[i])
			all := tokenIDs(conversations[i] + text)
			key := func(to int) string { return model + salt + string(runes(all[:to])) }
			want := 0
			for want+size <= len(ids)-1 && computed[key(want+size)] {
				want += size
			}
			if cfg.sglang() && want == 0 {
				want = -1 // not told
			}
			if u.cached() != want || u.Prompt != len(ids) {
				t.Fatalf("%s turn %d %s: %d of %d tokens cached, want %d of %d", cfg.Engine, turn, body, u.cached(), u.Prompt, want, len(ids))
			}
			for to := size; to <= len(ids)+n-1; to += size {
				computed[key(to)] = true
			}
			conversations[i] += text
		}
	}
	f(Config{BlockSize: 16})
	f(Config{BlockSize: 1})
	f(Config{BlockSize: 5, Engine: "sglang"})
	f(Config{BlockSize: 1, Engine: "sglang"})
}

// runes packs tokens, of which there are less than a million, into text.
func runes(ids []int) []rune {
	out := make([]rune, len(ids))
	for i, id := range ids {
		out[i] = 0x10000 + rune(id)
	}
	return out
}

// TestChatCached: the next turn of a chat finds the answer that it repeats.
func TestChatCached(t *testing.T) {
	s, c := start(t, Config{ZeroLatency: true, EnablePromptTokensDetails: true, BlockSize: 4}), client(t)
	const question = `{"role":"user","content":"Tell me of the sea, at some length."}`
	text, u := said(t, post(t, c, s, "/v1/chat/completions", `{"messages":[`+question+`],"max_tokens":50}`))
	if full := u.Prompt / 4 * 4; u.cached() != 0 || *u.Details.Created != full {
		t.Errorf("the first turn: %d cached, %d created, want 0 and %d", u.cached(), *u.Details.Created, full)
	}
	answer, _ := json.Marshal(text)
	_, next := said(t, post(t, c, s, "/v1/chat/completions",
		`{"messages":[`+question+`,{"role":"assistant","content":`+string(answer)+`},{"role":"user","content":"More."}],"max_tokens":5}`))
	if want := (u.Prompt + 50 - 1) / 4 * 4; next.cached() != want {
		t.Errorf("the second turn: %d of %d cached, want %d", next.cached(), next.Prompt, want)
	}
	// The other APIs count the same cache.
	res := string(readAll(t, post(t, c, s, "/v1/messages", `{"model":"sim","max_tokens":5,"messages":[`+question+`]}`)))
	want := fmt.Sprintf(`"usage":{"input_tokens":%d,"output_tokens":5,"cache_creation_input_tokens":%d,"cache_read_input_tokens":%d}`,
		u.Prompt-u.Prompt/4*4, max(0, u.Prompt/4*4-(u.Prompt-1)/4*4), (u.Prompt-1)/4*4)
	if !strings.Contains(res, want) {
		t.Errorf("no %s in %s", want, res)
	}
}

// TestCachedIsTold: nobody is told who has not asked for it, and SGLang leaves
// out a zero.
func TestCachedIsTold(t *testing.T) {
	c := client(t)
	f := func(cfg Config, body, first, second string) {
		t.Helper()
		cfg.ZeroLatency = true
		s := start(t, cfg)
		for _, want := range []string{first, second} {
			got := string(readAll(t, post(t, c, s, "/v1/completions", body)))
			i := strings.LastIndex(got, `"usage":`)
			if i < 0 || !strings.HasPrefix(got[i+len(`"usage":`):], want) {
				t.Errorf("%+v %s: usage is %s, want %s", cfg.Engine, body, got[max(0, i):], want)
			}
		}
	}
	const whole = `{"prompt":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17],"max_tokens":1}`
	const stream = `{"prompt":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17],"max_tokens":1,"stream":true,"stream_options":{"include_usage":true}}`
	const count = `{"prompt_tokens":17,"total_tokens":18,"completion_tokens":1`
	f(Config{}, whole, count+`,"prompt_tokens_details":null,`, count+`,"prompt_tokens_details":null,`)
	f(Config{}, stream, count+`}`, count+`}`)
	f(Config{EnablePromptTokensDetails: true}, whole,
		count+`,"prompt_tokens_details":{"cached_tokens":0,"created_cache_tokens":null,"multimodal_tokens":null},"completion_tokens_details":null}`,
		count+`,"prompt_tokens_details":{"cached_tokens":16,"created_cache_tokens":null,"multimodal_tokens":null},"completion_tokens_details":null}`)
	f(Config{EnablePromptTokensDetails: true}, stream, count+`,"prompt_tokens_details":{"cached_tokens":0}}`, count+`,"prompt_tokens_details":{"cached_tokens":16}}`)
	f(Config{EnablePromptTokensDetails: true, NoEnablePrefixCaching: true}, stream, count+`,"prompt_tokens_details":{"cached_tokens":0}}`, count+`,"prompt_tokens_details":{"cached_tokens":0}}`)
	f(Config{Engine: "sglang"}, whole, count+`}`, count+`}`)
	f(Config{Engine: "sglang", EnablePromptTokensDetails: true}, whole, count+`}`, count+`,"prompt_tokens_details":{"cached_tokens":16}}`)
	f(Config{Engine: "sglang", EnablePromptTokensDetails: true}, stream, count+`}`, count+`,"prompt_tokens_details":{"cached_tokens":16}}`)
}

// TestSmallCache: many streams over a cache that holds a few of them wait, are
// preempted, and all come to their end.
func TestSmallCache(t *testing.T) {
	for _, engine := range []string{"vllm", "sglang"} {
		s, c := start(t, Config{Engine: engine, NumGPUBlocks: 24, BlockSize: 4, PrefillD: 1, TimePerOutputToken: 200 * time.Microsecond}), client(t)
		done := make(chan string, 40)
		for i := range cap(done) {
			go func() {
				body := fmt.Sprintf(`{"prompt":"number %d of many","max_tokens":%d,"stream":%v}`, i, 10+i, i%2 == 0)
				res, err := c.Post(s.URL()+"/v1/completions", "application/json", strings.NewReader(body))
				if err != nil {
					done <- err.Error()
					return
				}
				defer res.Body.Close()
				all, err := io.ReadAll(res.Body)
				whole := strings.Contains(string(all), fmt.Sprintf(`"completion_tokens":%d`, 10+i))
				if i%2 == 0 {
					whole = strings.Count(string(all), "data: ") == 10+i+1 && strings.HasSuffix(string(all), "data: [DONE]\n\n")
				}
				if err == nil && !whole {
					err = fmt.Errorf("%s: %s", body, all)
				}
				if err != nil {
					done <- err.Error()
					return
				}
				done <- ""
			}()
		}
		for range cap(done) {
			if problem := <-done; problem != "" {
				t.Error(engine, problem)
			}
		}
		eventually(t, 20*time.Second, engine+": all have finished", func() bool { return s.Finished() == cap(done) && s.Load() == (Load{}) })
		s.mu.Lock()
		used, _ := s.process.ranks[0].engine.cache.usage()
		preempted := s.process.ranks[0].engine.counts.Preempted
		s.mu.Unlock()
		if used != 0 || preempted == 0 {
			t.Errorf("%s: %d blocks in use at the end, %d preempted", engine, used, preempted)
		}
		page := get(t, c, s, "/metrics")
		if !strings.Contains(page, map[string]string{"vllm": "vllm:num_preemptions_total{", "sglang": "sglang:num_retracted_requests_total{"}[engine]) {
			t.Errorf("%s: no preemptions on %s", engine, page)
		}
	}
}

func get(t testing.TB, c *http.Client, s *Server, path string) string {
	t.Helper()
	res, err := c.Get(s.URL() + path)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	return string(readAll(t, res))
}

// TestTooLargeForCache: nothing is taken in for which there never is room.
func TestTooLargeForCache(t *testing.T) {
	s, c := start(t, Config{NumGPUBlocks: 5, BlockSize: 4, ZeroLatency: true}), client(t)
	f := func(body string, status int) {
		t.Helper()
		if res := post(t, c, s, "/v1/completions", body); res.StatusCode != status {
			t.Errorf("%s: %s", body, res.Status)
		}
	}
	f(`{"prompt":[1,2,3,4,5,6,7,8,9],"max_tokens":7}`, http.StatusOK)
	f(`{"prompt":[1,2,3,4,5,6,7,8,9],"max_tokens":8}`, http.StatusBadRequest)
	// The engine adds a token that the agent does not expect.
	f(`{"prompt":[1,2,3,4,5,6,7,8,9],"max_tokens":7,"vllm_xargs":{"sim":{"tokenizer":"token"}}}`, http.StatusBadRequest)
	// The handler of the one that was taken ends behind its answer.
	eventually(t, 20*time.Second, "nothing left", func() bool { return s.Load() == Load{} })
}

// TestLeavingFrees: a client that leaves gives its blocks back at once.
func TestLeavingFrees(t *testing.T) {
	for _, engine := range []string{"vllm", "sglang"} {
		s, c := start(t, Config{Engine: engine, TimePerOutputToken: time.Hour, PrefillD: 1}), client(t)
		ctx, leave := context.WithCancel(context.Background())
		req, _ := http.NewRequestWithContext(ctx, "POST", s.URL()+"/v1/completions", strings.NewReader(`{"prompt":"once upon a time","stream":true}`))
		res, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		used := func() int {
			s.mu.Lock()
			defer s.mu.Unlock()
			n, _ := s.process.ranks[0].engine.cache.usage()
			return n
		}
		eventually(t, 20*time.Second, "a block in use", func() bool { return used() > 0 })
		leave()
		eventually(t, 20*time.Second, "no block in use", func() bool { return used() == 0 })
	}
}

// TestRanks: each rank has a cache of its own; a request may ask for one, else
// the one with the least to do has it.
func TestRanks(t *testing.T) {
	s, c := start(t, Config{DataParallelSize: 3, PrefillD: 1, TimePerOutputToken: time.Microsecond, EnablePromptTokensDetails: true}), client(t)
	ask := func(rank string) *http.Response {
		t.Helper()
		req, _ := http.NewRequest("POST", s.URL()+"/v1/completions", strings.NewReader(`{"prompt":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17],"max_tokens":2}`))
		if rank != "" {
			req.Header.Set("X-Data-Parallel-Rank", rank)
		}
		res, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { res.Body.Close() })
		return res
	}
	f := func(rank string, want int) {
		t.Helper()
		if _, u := said(t, ask(rank)); u.cached() != want {
			t.Errorf("rank %q: %d cached, want %d", rank, u.cached(), want)
		}
	}
	f("1", 0)
	f("1", 16)
	f(" 2 ", 0)
	f("1", 16)
	f("0", 0)
	// What is no number is no wish.
	f("x", 16)
	for _, rank := range []string{"3", "-1"} {
		res := ask(rank)
		if body := string(readAll(t, res)); res.StatusCode != http.StatusBadRequest || !strings.Contains(body, "data_parallel_rank "+rank+" is out of range [0, 3).") {
			t.Errorf("rank %s: %s %s", rank, res.Status, body)
		}
	}
	page := get(t, c, s, "/metrics")
	for _, want := range []string{
		`vllm:prefix_cache_hits_total{engine="1",model_name="sim"} 32`,
		`vllm:prefix_cache_queries_total{engine="2",model_name="sim"} `,
		`vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="True",engine="2",`,
	} {
		if !strings.Contains(page, "\n"+want) {
			t.Errorf("no %s in\n%s", want, page)
		}
	}

	// Three at a time, none of which ends, are on three ranks.
	slow := start(t, Config{DataParallelSize: 3, PrefillD: 1, TimePerOutputToken: time.Hour})
	for range 3 {
		post(t, c, slow, "/v1/completions", `{"prompt":"x","stream":true}`)
	}
	slow.mu.Lock()
	defer slow.mu.Unlock()
	for _, r := range slow.process.ranks {
		if l := r.engine.Load(slow.now()); l.Running+l.Waiting != 1 {
			t.Errorf("rank %d: %+v", r.number, l)
		}
	}
}

// TestReset: an engine forgets its cache when nobody uses it.
func TestReset(t *testing.T) {
	f := func(cfg Config, path, while, after string, status int) {
		t.Helper()
		cfg.PrefillD, cfg.TimePerOutputToken, cfg.EnablePromptTokensDetails = 1, 20*time.Millisecond, true
		s, c := start(t, cfg), client(t)
		const body = `{"prompt":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17],"max_tokens":1}`
		said(t, post(t, c, s, "/v1/completions", body))
		ctx, leave := context.WithCancel(context.Background())
		defer leave()
		req, _ := http.NewRequestWithContext(ctx, "POST", s.URL()+"/v1/completions", strings.NewReader(`{"prompt":"x","max_tokens":20000,"stream":true}`))
		res, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		if res := post(t, c, s, path, ""); res.StatusCode != status || !strings.HasPrefix(string(readAll(t, res)), while) {
			t.Errorf("%s while one runs: %s", path, res.Status)
		}
		if _, u := said(t, post(t, c, s, "/v1/completions", body)); u.cached() != 16 {
			t.Errorf("after a %s that failed %d tokens are cached", path, u.cached())
		}
		leave()
		eventually(t, 20*time.Second, path, func() bool {
			res := post(t, c, s, path, "")
			return strings.HasPrefix(string(readAll(t, res)), after) && res.StatusCode == http.StatusOK
		})
		if _, u := said(t, post(t, c, s, "/v1/completions", body)); u.cached() > 0 {
			t.Errorf("after %s %d tokens are cached", path, u.cached())
		}
	}
	f(Config{}, "/reset_prefix_cache", `{"success":false}`, `{"success":true}`, http.StatusOK)
	f(Config{Engine: "sglang"}, "/flush_cache", "", "Cache flushed.", http.StatusBadRequest)
}

// TestRestart: an engine that begins anew has cut off all answers, knows nothing
// and counts from 0.
func TestRestart(t *testing.T) {
	s, c := start(t, Config{PrefillD: 1, TimePerOutputToken: 10 * time.Millisecond, EnablePromptTokensDetails: true}), client(t)
	const body = `{"prompt":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17],"max_tokens":1}`
	said(t, post(t, c, s, "/v1/completions", body))
	began := s.current().began
	res := post(t, c, s, "/v1/completions", `{"prompt":"once","stream":true,"max_tokens":10000}`)
	if res := post(t, c, s, "/sim/restart", ""); res.StatusCode != http.StatusOK {
		t.Fatal(res.Status)
	}
	if all, err := io.ReadAll(res.Body); err == nil {
		t.Errorf("the stream was not cut off: %d bytes", len(all))
	}
	page := get(t, c, s, "/metrics")
	for _, want := range []string{
		`vllm:prompt_tokens_total{engine="0",model_name="sim"} 0`,
		`vllm:prefix_cache_queries_total{engine="0",model_name="sim"} 0`,
		`vllm:num_requests_running{engine="0",model_name="sim"} 0`,
	} {
		if !strings.Contains(page, "\n"+want+"\n") {
			t.Errorf("no %s in\n%s", want, page)
		}
	}
	if !s.current().began.After(began) {
		t.Error("the process has not begun anew")
	}
	if _, u := said(t, post(t, c, s, "/v1/completions", body)); u.cached() != 0 {
		t.Errorf("%d tokens are cached after the restart", u.cached())
	}
	if res := post(t, c, s, "/sim/restart?refuse_ms=x", ""); res.StatusCode != http.StatusBadRequest {
		t.Error(res.Status)
	}
	if res := post(t, c, s, "/sim/restart?refuse_ms=300", ""); res.StatusCode != http.StatusOK {
		t.Error(res.Status)
	}
	began = time.Now()
	eventually(t, 20*time.Second, "it listens again", func() bool {
		res, err := c.Get(s.URL() + "/health")
		if err == nil {
			res.Body.Close()
		}
		return err == nil
	})
	if d := time.Since(began); d < 100*time.Millisecond {
		t.Errorf("it listened again after %v", d)
	}
}
