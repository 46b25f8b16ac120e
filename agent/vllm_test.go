package agent

import (
	"fmt"
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
)

// startRenderer starts vLLM's server for rendering alone, for the model in dir.
func startRenderer(t *testing.T, bin, dir string, args ...string) (url string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	l.Close()
	log := filepath.Join(t.TempDir(), "log")
	out, err := os.Create(log)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	cmd := exec.Command(filepath.Join(bin, "vllm"), append([]string{"launch", "render", dir, "--served-model-name", "m", "also",
		"--host", "127.0.0.1", "--port", strconv.Itoa(port)}, args...)...)
	cmd.Env = append(os.Environ(), "HF_HUB_OFFLINE=1", "VLLM_NO_USAGE_STATS=1", "DO_NOT_TRACK=1")
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
	url = fmt.Sprintf("http://127.0.0.1:%d", port)
	for end := time.Now().Add(10 * time.Minute); ; time.Sleep(200 * time.Millisecond) {
		if resp, err := http.Get(url + "/health"); err == nil {
			resp.Body.Close()
			if resp.StatusCode == 200 {
				return url
			}
		}
		select {
		case <-ended:
			text, _ := os.ReadFile(log)
			t.Fatalf("vLLM's renderer has ended:\n%s", text[max(0, len(text)-3000):])
		default:
		}
		if time.Now().After(end) {
			t.Fatal("vLLM's renderer does not start")
		}
	}
}

// A real vLLM that joins is asked for its tokens. The agent is told nothing but
// where it is: it finds the tokenizer where vLLM says that the model is. Then one
// joins that was started with another template. INFERRAIL_VLLM is the folder of
// vLLM's programs, INFERRAIL_TOKENIZERS one with a folder of tokenizer files for
// each model.
func TestVLLMIsAsked(t *testing.T) {
	bin, tokenizers := os.Getenv("INFERRAIL_VLLM"), os.Getenv("INFERRAIL_TOKENIZERS")
	if bin == "" || tokenizers == "" {
		t.Skip("INFERRAIL_VLLM and INFERRAIL_TOKENIZERS name no folders with vLLM and tokenizers")
	}
	dir := t.TempDir()
	for _, file := range []string{"tokenizer.json", "tokenizer_config.json"} {
		data, err := os.ReadFile(filepath.Join(tokenizers, "tokenizer-qwen3", "models", file))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, file), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(`{"architectures":["Qwen3ForCausalLM"],"model_type":"qwen3","head_dim":32,`+
		`"vocab_size":151936,"max_position_embeddings":4096,"hidden_size":64,"intermediate_size":128,"num_hidden_layers":1,`+
		`"num_attention_heads":2,"num_key_value_heads":1,"torch_dtype":"bfloat16"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	template := filepath.Join(t.TempDir(), "chat.jinja")
	if err := os.WriteFile(template, []byte("{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant:"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := DefaultConfig()
	c.Listen, c.AdminListen, c.Datapath.Mode = "127.0.0.1:0", "127.0.0.1:0", "copy"
	c.Health.Timeout = 10 * time.Second
	c.Replicas = []ReplicaConfig{{ID: "gpu-0", URL: startRenderer(t, bin, dir)}}
	a := startAgent(t, c)
	defer stopped(t, a)
	var got promptStatus
	expect := func(state string, results ...string) {
		t.Helper()
		end := time.Now().Add(time.Minute)
		for {
			got = promptPage(t, a)
			var have []string
			for _, p := range got.Probes {
				have = append(have, p.Result)
			}
			if got.State == state && slices.Equal(have, results) {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("m is %+v; want it %s and the probes: %v", got, state, results)
			}
			time.Sleep(50 * time.Millisecond)
		}
	}
	expect("exact", "agrees")
	if p := got.Probes[0]; p.Via != "render" || p.What != "compared: chat, conversation, parts, odd text, tools, completion" {
		t.Errorf("the probes: %+v", p)
	}
	if got.Tokenizer != dir {
		t.Errorf("the tokenizer is from %s", got.Tokenizer)
	}

	c.Replicas = append(c.Replicas, ReplicaConfig{ID: "gpu-1", URL: startRenderer(t, bin, dir, "--chat-template", template)})
	if err := a.Reload(c); err != nil {
		t.Fatal(err)
	}
	expect("demoted", "agrees", "differs")
	if !strings.HasPrefix(got.Why, `replica gpu-1 has other tokens: in the probe "chat" token 2 is `) {
		t.Errorf("the reason is %q", got.Why)
	}

	// Told of the template, the agent follows that one, and the other differs.
	c.Replicas = c.Replicas[1:]
	c.Models = []ModelConfig{{Name: "m", Tokenizer: dir, ChatTemplate: template}}
	if err := a.Reload(c); err != nil {
		t.Fatal(err)
	}
	expect("exact", "agrees")
}
