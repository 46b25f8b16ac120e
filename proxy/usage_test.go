package proxy

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/inferrail/inferrail/policy"
)

func TestFindUsage(t *testing.T) {
	// untold: what was cached is not said.
	const untold = -1
	f := func(tail string, prompt, completion uint64, cached int) {
		t.Helper()
		want := usage{prompt: prompt, completion: completion, cached: uint64(max(cached, 0)), cachedTold: cached != untold}
		if got, ok := findUsage([]byte(tail)); got != want || !ok {
			t.Errorf("%q: %+v %v, want %+v", tail, got, ok, want)
		}
	}
	// Chat and completions.
	f(`"usage":{"prompt_tokens":5,"total_tokens":9,"completion_tokens":4}`, 5, 4, untold)
	f(`{"usage" : { "prompt_tokens" : 5, "completion_tokens" : 4, "prompt_tokens_details": {"cached_tokens": 3} } }`, 5, 4, 3)
	f("}],\"usage\":{\"prompt_tokens\":5,\"total_tokens\":9,\"completion_tokens\":4,\"prompt_tokens_details\":null}}\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n", 5, 4, untold)
	f(`{"usage":{"prompt_tokens":1,"completion_tokens":1}} {"usage":{"prompt_tokens":1,"completion_tokens":2}}`, 1, 2, untold)
	f(`{"usage":{"prompt_tokens":1,"completion_tokens":2}} {"usage":null}`, 1, 2, untold)
	f(`{"usage":{"prompt_tokens":0,"completion_tokens":0}}`, 0, 0, untold)
	// What is nested is no count of the whole, wherever it stands.
	f(`"usage":{"completion_tokens_details":{"reasoning_tokens":7,"cached_tokens":9,"completion_tokens":1,"prompt_tokens":1},`+
		`"prompt_tokens_details":{"audio_tokens":0,"cached_tokens":3,"created_cache_tokens":1,"more":{"cached_tokens":8},"cached_tokens_of":2},`+
		`"prompt_tokens":5,"completion_tokens":4}`, 5, 4, 3)
	f(`"usage":{"cached_tokens":9,"prompt_tokens":5,"completion_tokens":4,"completion_tokens_details":null,"queue":[{"prompt_tokens":1}],"x":"} \" {"}`, 5, 4, untold)
	f(`"usage":{"prompt_tokens_details":{"cached_tokens":null},"prompt_tokens":5,"completion_tokens":4}`, 5, 4, untold)
	f(`"usage":{"prompt_tokens_details":[{"cached_tokens":2}],"prompt_tokens":5,"completion_tokens":4}`, 5, 4, untold)
	// Embeddings, rerank and score.
	f(`],"model":"m","usage":{"prompt_tokens":8,"total_tokens":8}}`, 8, 0, untold)
	f(`"usage":{"prompt_tokens":8,"total_tokens":8,"completion_tokens":0,"prompt_tokens_details":null}`, 8, 0, untold)
	f(`"usage":{"total_tokens":56},"results":[]`, 56, 0, untold)
	f(`"usage":{"prompt_tokens":null,"completion_tokens":4,"total_tokens":9}`, 5, 4, untold)
	// Responses and transcriptions.
	f(`"usage":{"input_tokens":36,"input_tokens_details":{"cached_tokens":16},"output_tokens":87,"output_tokens_details":{"reasoning_tokens":64},"total_tokens":123},"user":null`, 36, 87, 16)
	f(`"usage":{"type":"tokens","input_tokens":14,"input_token_details":{"audio_tokens":14},"output_tokens":101,"total_tokens":115}`, 14, 101, untold)
	f(`"usage":{"input_tokens":36,"input_tokens_details":{"cached_tokens":0},"output_tokens":87}`, 36, 87, 0)
	// vLLM tells of a miss, too; SGLang leaves the details out then.
	f(`"usage":{"prompt_tokens":5,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":0}}`, 5, 4, 0)
	// No more is cached than there is, and no engine counts a billion.
	f(`"usage":{"prompt_tokens":5,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":999999999}}`, 5, 4, 5)
	f(`"usage":{"prompt_tokens":5,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":1000000000}}`, 5, 4, untold)
	f(`"usage":{"prompt_tokens":5,"completion_tokens":1000000000,"total_tokens":9}`, 5, 4, untold)
	// Messages: what the cache held is not in input_tokens.
	f(`"usage":{"cache_creation_input_tokens":4,"cache_read_input_tokens":50,"input_tokens":6,"output_tokens":20}`, 60, 20, 50)
	f(`"usage":{"input_tokens":6,"cache_read_input_tokens":null,"output_tokens":20,"service_tier":"standard"}`, 6, 20, untold)
	// A stream of messages: the prompt at its start, the answer at its end.
	f(`event: message_start
data: {"type":"message_start","message":{"usage":{"input_tokens":25,"cache_read_input_tokens":3,"output_tokens":1}}}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":15}}

`, 28, 15, 3)
	// llama.cpp.
	f(`"timings":{"cache_n":236,"prompt_n":1,"prompt_ms":30.958,"predicted_n":35,"predicted_ms":661.064}`, 237, 35, 236)
	f(`"usage":{"completion_tokens":35,"prompt_tokens":237,"total_tokens":272},"timings":{"cache_n":236,"prompt_n":1,"predicted_n":35}`, 237, 35, 236)
	f(`"usage":{"output_tokens":35},"timings":{"cache_n":236,"prompt_n":1,"predicted_n":35}`, 237, 35, 236)
	f(`"usage":null,"timings":{"prompt_n":4,"predicted_n":2}`, 4, 2, untold)
	// What the engine has written is not what it has counted.
	f(`{"choices":[{"message":{"content":"\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":1}"}}],"usage":{"prompt_tokens":5,"completion_tokens":4},"note":"\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":1}"}`, 5, 4, untold)
	f(`"usage":{"prompt_tokens":5,"completion_tokens":4},"tools":[{"properties":{"usage":{"type":"string"}}}]`, 5, 4, untold)
}

func TestFindUsageFindsNone(t *testing.T) {
	f := func(tail string) {
		t.Helper()
		if got, ok := findUsage([]byte(tail)); ok {
			t.Errorf("%q: %+v", tail, got)
		}
	}
	f(``)
	f(`"usage"`)
	f(`"usage":`)
	f(`"usage":{`)
	f(`{"usage":null}`)
	f(`{"usage":{}}`)
	f(`{"usage":[{"prompt_tokens":5,"completion_tokens":4}]}`)
	f(`{"usage":{"prompt_tokens":5}}`)
	f(`{"usage":{"completion_tokens":5}}`)
	f(`{"usage":{"prompt_tokens":5,"completion_tokens":4`)
	f(`{"usage":{"prompt_tokens":5,"completion_tokens":4]`)
	f(`{"usage":{"prompt_tokens":"5","completion_tokens":4}}`)
	f(`{"usage":{"prompt_tokens":-5,"completion_tokens":4}}`)
	f(`{"usage":{"prompt_tokens":5.5,"completion_tokens":4}}`)
	f(`{"usage":{"prompt_tokens":12345678901234567890,"completion_tokens":4}}`)
	f(`{"usage":{"type":"duration","seconds":9}}`)
	f(`{"content":"\"usage\":"}`)
	f(`{"content":"\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":1}"}`)
	f(`{"\"usage":{"prompt_tokens":5,"completion_tokens":4}}`)
	f(`{"timings":{"cache_n":1}}`)
	f(`{"timings":{"prompt_n":1,"predicted_n":`)
}

// A stream whose prompt was counted too long ago to be in the tail.
func TestFindUsageOfTheAnswerAlone(t *testing.T) {
	u, ok := findUsage([]byte(`data: {"type":"message_delta","usage":{"output_tokens":15}}`))
	if !ok || u != (usage{completion: 15, partial: true}) {
		t.Errorf("%+v %v", u, ok)
	}
	if c := u.charge(policy.Charge{Input: 7, Output: 100}); c != (policy.Charge{Input: 7, Output: 15}) {
		t.Errorf("charged %+v", c)
	}
	if c := (usage{prompt: 9, completion: 2, cached: 9}).charge(policy.Charge{Input: 7, Output: 100}); c != (policy.Charge{Input: 9, Output: 2}) {
		t.Errorf("charged %+v", c)
	}
}

// Wherever an engine ends a chunk, the counts are the same.
func TestFindUsageAcrossChunks(t *testing.T) {
	const body = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":1234,\"completion_tokens\":567,\"prompt_tokens_details\":{\"cached_tokens\":89}}}\r\n\r\ndata: [DONE]\r\n\r\n"
	want := usage{prompt: 1234, completion: 567, cached: 89, cachedTold: true}
	chunk := func(s string) string {
		if s == "" {
			return ""
		}
		return fmt.Sprintf("%X\r\n%s\r\n", len(s), s)
	}
	before := chunk("data: {\"choices\":[{}]}\r\n\r\n")
	for i := range len(body) {
		for _, width := range []int{0, 1, 3} {
			j := min(i+width, len(body))
			tail := before[5:] + chunk(body[:i]) + chunk(body[i:j]) + chunk(body[j:]) + "0\r\n\r\n"
			if got, ok := findUsage([]byte(tail)); got != want || !ok {
				t.Fatalf("%q: %+v %v", tail, got, ok)
			}
		}
	}
}

func TestFindUsageDoesNotAllocate(t *testing.T) {
	tail := []byte(strings.Repeat("data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n\r\n30\r\n", 20) +
		"data: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":4}}\n\n\r\n0\r\n\r\n")
	if n := testing.AllocsPerRun(100, func() {
		if _, ok := findUsage(tail); !ok {
			t.Fatal("none found")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestLastIndex(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	for range 20_000 {
		b := make([]byte, rng.IntN(200))
		for i := range b {
			b[i] = "ab"[rng.IntN(2)]
		}
		text := []byte("aabaaba"[:1+rng.IntN(7)])
		if got, want := lastIndex(b, text), bytes.LastIndex(b, text); got != want {
			t.Fatalf("%q in %q: %d, want %d", text, b, got, want)
		}
	}
}
