package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netns"

	"github.com/inferrail/inferrail/bpf"
	"github.com/inferrail/inferrail/simulator"
)

// place is where an agent stands before a real vLLM: a lab where there can be
// one, else this host's loopback, where no answer is carried by the kernel.
type place struct {
	t   *testing.T
	lab *lab // nil on loopback
	// bin is the folder of vLLM's programs, model that of the model.
	bin, model string
}

// The hosts of a place.
const (
	atClient = iota
	atProxy
	atEngine
)

// in runs f on a host.
func (p *place) in(host int, f func()) {
	if p.lab == nil {
		f()
		return
	}
	p.lab.in([]netns.NsHandle{p.lab.client, p.lab.proxy, p.lab.engine}[host], f)
}

// address of a host as the others see it.
func (p *place) address(host int) string {
	if p.lab == nil {
		return "127.0.0.1"
	}
	return []string{"10.9.1.2", "10.9.1.1", "10.9.2.2"}[host]
}

// freePort returns a port that nobody listens on.
func (p *place) freePort(host int) (port int) {
	p.t.Helper()
	var ln net.Listener
	var err error
	p.in(host, func() { ln, err = net.Listen("tcp", p.address(host)+":0") })
	if err != nil {
		p.t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().(*net.TCPAddr).Port
}

// from returns a client that connects from a host.
func (p *place) from(host int) *http.Client {
	tr := &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 64,
		DialContext: func(ctx context.Context, network, addr string) (c net.Conn, err error) {
			p.in(host, func() { c, err = (&net.Dialer{Timeout: 10 * time.Second}).DialContext(ctx, network, addr) })
			return c, err
		}}
	p.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 2 * time.Minute}
}

// program is a process on a host, and all that it started.
type program struct {
	t    *testing.T
	cmd  *exec.Cmd
	out  output
	done chan struct{} // closed when it has ended
}

// run starts a program, which is killed when the test ends.
func (p *place) run(t *testing.T, host int, env []string, path string, args ...string) *program {
	t.Helper()
	r := &program{t: t, cmd: exec.Command(path, args...), done: make(chan struct{})}
	r.cmd.Env = append(os.Environ(), env...)
	r.cmd.Stdout, r.cmd.Stderr = &r.out, &r.out
	r.cmd.WaitDelay = time.Second
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	go func() {
		// Pdeathsig follows the thread that started the process.
		runtime.LockOSThread()
		var err error
		if p.lab != nil {
			err = netns.Set([]netns.NsHandle{p.lab.client, p.lab.proxy, p.lab.engine}[host])
		}
		if err == nil {
			err = r.cmd.Start()
		}
		started <- err
		if err == nil {
			r.cmd.Wait()
		}
		close(r.done)
	}()
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.kill)
	return r
}

// kill ends the program and what it started, at once.
func (r *program) kill() {
	syscall.Kill(-r.cmd.Process.Pid, syscall.SIGKILL)
	<-r.done
}

// terminate asks it to end, and fails the test if it does not.
func (r *program) terminate(limit time.Duration) {
	r.t.Helper()
	r.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-r.done:
	case <-time.After(limit):
		r.t.Errorf("does not end:\n%s", r.tail())
		r.kill()
	}
}

// tail is the end of what it has said: enough for what vLLM's engine says of why it does
// not start, which comes before all that its server says of that.
func (r *program) tail() string {
	text := r.out.String()
	return text[max(0, len(text)-16000):]
}

// vllm is a running vLLM that serves the model as tiny and tiny-alias.
type vllm struct {
	*program
	url    string
	client *http.Client // on its host
}

const vllmLength = 4096 // --max-model-len

func (p *place) vllm(t *testing.T, args ...string) *vllm {
	t.Helper()
	port := p.freePort(atEngine)
	began := time.Now()
	v := &vllm{url: fmt.Sprintf("http://%s:%d", p.address(atEngine), port), client: p.from(atEngine)}
	v.program = p.run(t, atEngine, []string{"HF_HUB_OFFLINE=1", "VLLM_NO_USAGE_STATS=1", "DO_NOT_TRACK=1", "VLLM_CPU_KVCACHE_SPACE=1",
		"OMP_NUM_THREADS=1", "CUDA_VISIBLE_DEVICES=", "VLLM_HOST_IP=127.0.0.1"},
		filepath.Join(p.bin, "vllm"), append([]string{"serve", p.model, "--served-model-name", "tiny", "tiny-alias", "--enforce-eager",
			"--max-model-len", fmt.Sprint(vllmLength), "--host", p.address(atEngine), "--port", fmt.Sprint(port)}, args...)...)
	for end := began.Add(10 * time.Minute); ; time.Sleep(200 * time.Millisecond) {
		if resp, err := v.client.Get(v.url + "/health"); err == nil {
			resp.Body.Close()
			if resp.StatusCode == 200 {
				break
			}
		}
		select {
		case <-v.done:
			t.Fatalf("vLLM has ended:\n%s", v.tail())
		default:
		}
		if time.Now().After(end) {
			t.Fatalf("vLLM does not start:\n%s", v.tail())
		}
	}
	t.Logf("vLLM at %s started in %v", v.url, time.Since(began).Round(100*time.Millisecond))
	// The first request of a kind makes it compile kernels.
	for _, body := range []string{`{"model":"tiny","prompt":"warm","max_tokens":2}`, `{"model":"tiny","prompt":"warm","max_tokens":2,"logprobs":1,"temperature":0}`} {
		if r := pose(t, v.client, v.url, question{path: "/v1/completions", body: body}); r.status != 200 {
			t.Fatalf("vLLM answers %d: %s", r.status, r.body)
		}
	}
	return v
}

// metric of the engine.
func (v *vllm) metric(name string, labels ...string) float64 {
	v.t.Helper()
	resp, err := v.client.Get(v.url + "/metrics")
	if err != nil {
		v.t.Fatal(err)
	}
	defer resp.Body.Close()
	page, err := io.ReadAll(resp.Body)
	if err != nil {
		v.t.Fatal(err)
	}
	return sumMetric(v.t, string(page), "vllm:"+name, labels...)
}

// guard is an agent on the place's proxy host.
type guard struct {
	*program
	url, admin string
	client     *http.Client // on its host, for the admin pages
}

// agent starts an agent before engines and waits until all of them serve.
func (p *place) agent(t *testing.T, tier string, engines []string, args ...string) *guard {
	t.Helper()
	return p.agentAt(t, atProxy, tier, engines, args...)
}

func (p *place) agentAt(t *testing.T, host int, tier string, engines []string, args ...string) *guard {
	t.Helper()
	args = append([]string{"agent", "--listen", p.address(host) + ":0", "--admin-listen", "127.0.0.1:0", "--datapath", tier}, args...)
	for i, e := range engines {
		args = append(args, fmt.Sprintf("--replica=e%d=%s", i, e))
	}
	g := &guard{client: p.from(host)}
	g.program = p.run(t, host, []string{"INFERRAIL_RUN=1", "GORACE=halt_on_error=1"}, "/proc/self/exe", args...)
	line := regexp.MustCompile(`(?m)^listening  (\S+), admin (\S+)$`)
	serves := regexp.MustCompile(fmt.Sprintf(`(?m)^replicas   %d of %[1]d serve `, max(1, len(engines))))
	for end := time.Now().Add(time.Minute); !serves.MatchString(g.out.String()); time.Sleep(20 * time.Millisecond) {
		select {
		case <-g.done:
			t.Fatalf("the agent has ended:\n%s", g.tail())
		default:
		}
		if time.Now().After(end) {
			t.Fatalf("the agent is not ready:\n%s", g.tail())
		}
	}
	m := line.FindStringSubmatch(g.out.String())
	g.url, g.admin = "http://"+m[1], m[2]
	t.Cleanup(func() {
		g.terminate(30 * time.Second)
		if code := g.cmd.ProcessState.ExitCode(); code != 0 || t.Failed() {
			t.Logf("the agent ended with %d:\n%s", code, g.tail())
		}
	})
	return g
}

func (g *guard) page(path string) []byte {
	g.t.Helper()
	resp, err := g.client.Get(g.admin + path)
	if err != nil {
		g.t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		g.t.Fatal(err)
	}
	return body
}

func (g *guard) metric(name string, labels ...string) float64 {
	g.t.Helper()
	return sumMetric(g.t, string(g.page("/metrics")), name, labels...)
}

// question is a request. A GET has no body.
type question struct {
	name, path, body string
	key              string
	// own: the agent answers itself, with the engine's status and error type.
	own bool
}

// reply is an answer, its body whole.
type reply struct {
	status int
	header http.Header
	body   string
}

func pose(t *testing.T, client *http.Client, base string, q question) reply {
	t.Helper()
	r, err := tryPose(t.Context(), client, base, q)
	if err != nil {
		t.Fatalf("%s%s: %v", base, q.path, err)
	}
	return r
}

func tryPose(ctx context.Context, client *http.Client, base string, q question) (reply, error) {
	method := "POST"
	if q.body == "" {
		method = "GET"
	}
	req, err := http.NewRequestWithContext(ctx, method, base+q.path, strings.NewReader(q.body))
	if err != nil {
		return reply{}, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Id", "0123456789abcdef")
	if q.key != "" {
		req.Header.Set("Authorization", "Bearer "+q.key)
	}
	resp, err := client.Do(req)
	if err != nil {
		return reply{}, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return reply{resp.StatusCode, resp.Header, string(body)}, err
}

var (
	vllmTimes = regexp.MustCompile(`"created(_at)?":\d+`)
	// fingerprint is the member of a chunk or a body.
	fingerprint  = regexp.MustCompile(`,"system_fingerprint":"[^"]*"`)
	vllmText     = regexp.MustCompile(`("content":|"text":|"delta":|"arguments":)"((?:[^"\\]|\\.)*)"`)
	vllmChoice   = regexp.MustCompile(`"index":(\d+)`)
	vllmSequence = regexp.MustCompile(`"sequence_number":\d+`)
	vllmIDs      = regexp.MustCompile(`"(msg_|resp_|call_|chatcmpl-tool-|modelperm-)[0-9a-f]+"`)
)

// plain is the body without what differs from answer to answer. Of a stream it
// is the events without their text, and then the text: how many tokens share
// an event is a matter of vLLM's load.
func (r reply) plain() string {
	body := vllmIDs.ReplaceAllString(vllmTimes.ReplaceAllString(r.body, `"created$1":0`), `"${1}0"`)
	if !strings.HasPrefix(r.header.Get("Content-Type"), "text/event-stream") {
		return body
	}
	texts := map[string]string{} // by choice
	events := strings.SplitAfter(body, "\n\n")
	for i, e := range events {
		choice := ""
		if m := vllmChoice.FindStringSubmatch(e); m != nil {
			choice = m[1]
		}
		events[i] = vllmSequence.ReplaceAllString(vllmText.ReplaceAllStringFunc(e, func(member string) string {
			m := vllmText.FindStringSubmatch(member)
			texts[choice] += m[2]
			return m[1] + `"…"`
		}), `"sequence_number":0`)
	}
	if len(texts) > 1 {
		slices.Sort(events) // those of several choices come in any order
	}
	out := strings.Join(slices.Compact(events), "")
	for _, choice := range slices.Sorted(maps.Keys(texts)) {
		out += fmt.Sprintf("text of %q: %s\n", choice, texts[choice])
	}
	return out
}

// difference tells where two texts differ first.
func difference(got, want string) string {
	g, w := strings.Split(got, "\n"), strings.Split(want, "\n")
	for i := range max(len(g), len(w)) {
		switch {
		case i >= len(g):
			return fmt.Sprintf("line %d is missing: %s", i+1, w[i])
		case i >= len(w):
			return fmt.Sprintf("line %d is more: %s", i+1, g[i])
		case g[i] != w[i]:
			return fmt.Sprintf("line %d\n got %s\nwant %s", i+1, g[i], w[i])
		}
	}
	return ""
}

// compare asks vLLM and asks the agent, and tells how the answers differ. A
// difference that comes from how tokens share events does not come each time.
func compare(t *testing.T, direct, via func() reply, same func(direct, via reply) string) {
	t.Helper()
	for try := 1; ; try++ {
		d, v := direct(), via()
		diff := same(d, v)
		if diff == "" {
			return
		}
		if try == 8 || !strings.HasPrefix(d.header.Get("Content-Type"), "text/event-stream") {
			t.Error(diff)
			return
		}
	}
}

// fields are the header without what differs from answer to answer, and
// without what the agent adds.
func (r reply) fields() http.Header {
	h := maps.Clone(r.header)
	maps.DeleteFunc(h, func(name string, _ []string) bool {
		return name == "Date" || name == "X-Request-Id" || strings.HasPrefix(name, "X-Inferrail-") || strings.HasPrefix(name, "X-Ratelimit-")
	})
	return h
}

const (
	vllmModel  = `"model":"tiny","temperature":0,"seed":1`
	vllmChat   = vllmModel + `,"messages":[{"role":"user","content":"Tell me about the river."}]`
	vllmStream = `,"stream":true,"stream_options":{"include_usage":true}`
	vllmTool   = `"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}}}]`
)

// vllmQuestions are asked of vLLM, and of vLLM through an agent.
func vllmQuestions() []question {
	chat, text := "/v1/chat/completions", "/v1/completions"
	long := strings.Repeat("river ", 2*vllmLength)
	return []question{
		{name: "chat", path: chat, body: `{` + vllmChat + `,"max_tokens":40}`},
		{name: "chat stream", path: chat, body: `{` + vllmChat + `,"max_tokens":40,"stream":true}`},
		{name: "chat stream usage", path: chat, body: `{` + vllmChat + `,"max_tokens":40` + vllmStream + `}`},
		{name: "chat stream continuous usage", path: chat, body: `{` + vllmChat + `,"max_tokens":5,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}`},
		{name: "chat until it ends", path: chat, body: `{` + vllmChat + `,"max_tokens":300,"stream":true}`},
		{name: "chat two choices", path: chat, body: `{` + vllmChat + `,"temperature":0.7,"max_tokens":5,"n":2}`},
		{name: "chat two choices stream", path: chat, body: `{` + vllmChat + `,"temperature":0.7,"max_tokens":5,"n":2,"stream":true}`},
		{name: "chat logprobs", path: chat, body: `{` + vllmChat + `,"max_tokens":3,"logprobs":true,"top_logprobs":2}`},
		{name: "chat logprobs stream", path: chat, body: `{` + vllmChat + `,"max_tokens":3,"logprobs":true,"top_logprobs":2,"stream":true}`},
		{name: "chat token ids", path: chat, body: `{` + vllmChat + `,"max_tokens":3,"return_token_ids":true,"stream":true}`},
		{name: "chat alias", path: chat, body: strings.Replace(`{`+vllmChat+`,"max_tokens":3}`, `"tiny"`, `"tiny-alias"`, 1)},
		{name: "chat without model", path: chat, body: strings.Replace(`{`+vllmChat+`,"max_tokens":3}`, `"model":"tiny",`, ``, 1)},
		{name: "chat null model", path: chat, body: strings.Replace(`{`+vllmChat+`,"max_tokens":3}`, `"tiny"`, `null`, 1)},
		{name: "chat unicode", path: chat, body: `{` + vllmModel + `,"messages":[{"role":"system","content":"Grüße 🙂"},{"role":"user","content":[{"type":"text","text":"a\u0000b"}]}],"max_tokens":9,"stream":true}`},
		{name: "chat json schema", path: chat, body: `{` + vllmChat + `,"max_tokens":30,"response_format":{"type":"json_schema","json_schema":{"name":"s","schema":{"type":"object","properties":{"a":{"type":"boolean"}},"required":["a"],"additionalProperties":false}}}}`},
		{name: "chat named tool", path: chat, body: `{` + vllmChat + `,"max_tokens":20,` + vllmTool + `,"tool_choice":{"type":"function","function":{"name":"f"}}}`},
		{name: "chat named tool stream", path: chat, body: `{` + vllmChat + `,"max_tokens":20,"stream":true,` + vllmTool + `,"tool_choice":{"type":"function","function":{"name":"f"}}}`},
		{name: "chat any tool", path: chat, body: `{` + vllmChat + `,` + vllmTool + `}`},
		{name: "chat no tools", path: chat, body: `{` + vllmChat + `,"tools":[]}`},
		{name: "chat tool choice alone", path: chat, body: `{` + vllmChat + `,"tool_choice":"auto"}`},
		{name: "chat no messages", path: chat, body: `{` + vllmModel + `,"messages":[]}`},
		{name: "chat messages missing", path: chat, body: `{` + vllmModel + `}`},
		{name: "chat wrong type", path: chat, body: `{` + vllmChat + `,"max_tokens":"many"}`},
		{name: "chat wrong content", path: chat, body: `{` + vllmModel + `,"messages":[{"role":"user","content":3}]}`},
		{name: "chat image", path: chat, body: `{` + vllmModel + `,"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}]}]}`},
		{name: "chat negative", path: chat, body: `{` + vllmChat + `,"max_tokens":-1}`},
		{name: "chat greedy twice", path: chat, body: `{` + vllmChat + `,"n":2}`},
		{name: "chat options without stream", path: chat, body: `{` + vllmChat + `,"stream_options":{"include_usage":true}}`},
		{name: "chat template", path: chat, body: `{` + vllmChat + `,"chat_template":"x"}`},
		{name: "chat too long", path: chat, body: `{` + vllmModel + `,"messages":[{"role":"user","content":"` + long + `"}]}`},
		{name: "chat too long stream", path: chat, body: `{` + vllmModel + `,"stream":true,"messages":[{"role":"user","content":"` + long + `"}]}`},
		{name: "chat too much", path: chat, body: `{` + vllmChat + `,"max_tokens":1000000}`},
		{name: "text", path: text, body: `{` + vllmModel + `,"prompt":"The river"}`},
		{name: "text stream", path: text, body: `{` + vllmModel + `,"prompt":"The river","max_tokens":40,"stream":true}`},
		{name: "text stream usage", path: text, body: `{` + vllmModel + `,"prompt":"The river","max_tokens":40` + vllmStream + `}`},
		{name: "text echo", path: text, body: `{` + vllmModel + `,"prompt":"The river","max_tokens":3,"echo":true,"logprobs":2}`},
		{name: "text stop", path: text, body: `{` + vllmModel + `,"prompt":"The river","max_tokens":99,"stop":["e","a","o"],"stream":true}`},
		{name: "text prompts", path: text, body: `{` + vllmModel + `,"prompt":["The river","A house"],"max_tokens":4}`},
		{name: "text ids", path: text, body: `{` + vllmModel + `,"prompt":[40,50,60],"max_tokens":4}`},
		{name: "text empty", path: text, body: `{` + vllmModel + `,"prompt":""}`},
		{name: "text too long", path: text, body: `{` + vllmModel + `,"prompt":"` + long + `"}`},
		{name: "responses", path: "/v1/responses", body: `{"model":"tiny","input":"Hello","max_output_tokens":9,"temperature":0}`},
		{name: "responses stream", path: "/v1/responses", body: `{"model":"tiny","input":"Hello","max_output_tokens":9,"temperature":0,"stream":true}`},
		{name: "messages", path: "/v1/messages", body: `{` + vllmChat + `,"max_tokens":9}`},
		{name: "messages stream", path: "/v1/messages", body: `{` + vllmChat + `,"max_tokens":9,"stream":true}`},
		{name: "messages without limit", path: "/v1/messages", body: `{` + vllmChat + `}`},
		{name: "count tokens", path: "/v1/messages/count_tokens", body: `{` + vllmChat + `}`},
		{name: "tokenize", path: "/tokenize", body: `{"model":"tiny","prompt":"The river","return_token_strs":true}`},
		{name: "tokenize chat", path: "/tokenize", body: `{` + vllmChat + `}`},
		{name: "detokenize", path: "/detokenize", body: `{"model":"tiny","tokens":[40,50,60]}`},
		{name: "embeddings", path: "/v1/embeddings", body: `{"model":"tiny","input":"x"}`},
		{name: "score", path: "/score", body: `{"model":"tiny","text_1":"x","text_2":"y"}`},
		{name: "health", path: "/health"},
		{name: "unknown model", path: chat, body: strings.Replace(`{`+vllmChat+`}`, `"tiny"`, `"nope"`, 1), own: true},
		{name: "messages unknown model", path: "/v1/messages", body: strings.Replace(`{`+vllmChat+`,"max_tokens":3}`, `"tiny"`, `"nope"`, 1), own: true},
		{name: "not json", path: chat, body: `{"model":"tiny",`, own: true},
		{name: "an array", path: chat, body: `[]`, own: true},
	}
}

// TestVLLM runs agents before a real vLLM. INFERRAIL_VLLM is the folder of its
// programs, such as the bin of a virtual environment: make test-vllm.
func TestVLLM(t *testing.T) {
	bin := os.Getenv("INFERRAIL_VLLM")
	if bin == "" {
		t.Skip("INFERRAIL_VLLM names no folder with vLLM (make test-vllm)")
	}
	p := &place{t: t, bin: bin, model: filepath.Join(t.TempDir(), "tiny")}
	if os.Getuid() == 0 && bpf.Probe() == nil || os.Getenv("INFERRAIL_NEED_BPF") == "1" {
		p.lab = newLab(t, labOptions{})
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	if err := command(ctx, ".", filepath.Join(bin, "python"), "testdata/vllm/model.py", p.model); err != nil {
		t.Fatal(err)
	}
	v := p.vllm(t)
	t.Run("found on its node", func(t *testing.T) { p.found(t, v) })
	for _, tier := range []string{"copy", "auto"} {
		t.Run("same bytes/"+tier, func(t *testing.T) { p.sameBytes(t, v, tier) })
		t.Run("client leaves/"+tier, func(t *testing.T) { p.clientLeaves(t, v, tier) })
		t.Run("tokens as they come/"+tier, func(t *testing.T) { p.tokensCome(t, v, tier) })
	}
	t.Run("tokens are charged", func(t *testing.T) { p.charged(t, v) })
	t.Run("idle connections", func(t *testing.T) { p.idle(t, v) })
	t.Run("replaced under load", func(t *testing.T) { p.replaced(t, v) })
	t.Run("killed", func(t *testing.T) { p.killed(t, p.vllm(t)) })
}

// An agent on the engine's node finds it and knows what it is.
func (p *place) found(t *testing.T, v *vllm) {
	g := p.agentAt(t, atEngine, "copy", nil, "--discover-local")
	var fleet struct {
		Replicas []struct {
			URL, Engine string
			Models      []string
		}
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		page := g.page("/debug/fleet")
		if err := json.Unmarshal(page, &fleet); err != nil {
			t.Fatal(err)
		}
		for _, r := range fleet.Replicas {
			if r.URL == v.url && len(r.Models) > 0 {
				if r.Engine != "vllm" || !slices.Equal(r.Models, []string{"tiny", "tiny-alias"}) {
					t.Errorf("found as %+v", r)
				}
				return
			}
		}
		if time.Now().After(end) {
			t.Fatalf("not found: %s", page)
		}
	}
}

// What a client gets through the agent is what it gets from vLLM.
func (p *place) sameBytes(t *testing.T, v *vllm, tier string) {
	g := p.agent(t, tier, []string{v.url})
	client := p.from(atClient)
	for _, q := range vllmQuestions() {
		t.Run(q.name, func(t *testing.T) {
			compare(t, func() reply { return pose(t, v.client, v.url, q) }, func() reply { return pose(t, client, g.url, q) }, func(direct, via reply) string {
				switch {
				case via.status != direct.status:
					return fmt.Sprintf("status %d, want %d", via.status, direct.status)
				case q.own:
					want, got := errorMembers(t, direct.body), errorMembers(t, via.body)
					if !slices.Equal(want, got) {
						return fmt.Sprintf("an error with %v: %s\nwant %v: %s", got, via.body, want, direct.body)
					}
				case via.plain() != direct.plain():
					return difference(via.plain(), direct.plain())
				case q.path != "/health" && !maps.EqualFunc(direct.fields(), via.fields(), slices.Equal):
					return fmt.Sprintf("header %v\nwant   %v", via.fields(), direct.fields())
				}
				return ""
			})
		})
	}
	if tier != "copy" && p.lab != nil {
		var d datapathPage
		if err := json.Unmarshal(g.page("/debug/datapath"), &d); err != nil {
			t.Fatal(err)
		}
		if d.Tier != "packet" || d.Kernel.Splices == 0 {
			t.Errorf("tier %s (%s) with %d splices", d.Tier, d.Reason, d.Kernel.Splices)
		}
		t.Logf("tier %s, %d splices, %d packets", d.Tier, d.Kernel.Splices, d.Kernel.Packets)
	}
}

// errorMembers are the names of the members of an error's body.
func errorMembers(t *testing.T, body string) []string {
	t.Helper()
	var b map[string]json.RawMessage
	if err := json.Unmarshal([]byte(body), &b); err != nil {
		t.Fatalf("%v: %s", err, body)
	}
	names := slices.Collect(maps.Keys(b))
	var inner map[string]json.RawMessage
	if err := json.Unmarshal(b["error"], &inner); err != nil {
		t.Fatalf("%v: %s", err, body)
	}
	names = slices.AppendSeq(names, maps.Keys(inner))
	slices.Sort(names)
	return names
}

// endless is a request for as many tokens as there can be.
func endless(stream bool) string {
	return fmt.Sprintf(`{%s,"ignore_eos":true,"max_tokens":%d,"stream":%v}`, vllmChat, vllmLength-200, stream)
}

// When the client leaves, vLLM stops.
func (p *place) clientLeaves(t *testing.T, v *vllm, tier string) {
	g := p.agent(t, tier, []string{v.url})
	client := p.from(atClient)
	for _, stream := range []bool{true, false} {
		made := v.metric("generation_tokens_total")
		ctx, leave := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		began := make(chan struct{})
		go func() {
			req, err := http.NewRequestWithContext(ctx, "POST", g.url+"/v1/chat/completions", strings.NewReader(endless(stream)))
			if err != nil {
				ended <- err
				return
			}
			req.Header.Set("Content-Type", "application/json")
			resp, err := client.Do(req)
			if err == nil {
				defer resp.Body.Close()
				lines := bufio.NewScanner(resp.Body)
				for range 20 {
					lines.Scan()
				}
				close(began)
				for lines.Scan() {
				}
				err = lines.Err()
			}
			ended <- err
		}()
		if stream {
			<-began
		}
		p.until(t, "it runs", func() bool { return v.metric("num_requests_running") == 1 })
		left := time.Now()
		leave()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("the client ends with %v", err)
		}
		p.until(t, "it is stopped", func() bool { return v.metric("num_requests_running") == 0 })
		t.Logf("stream %v: stopped %v after the client had left", stream, time.Since(left).Round(time.Millisecond))
		if n := v.metric("generation_tokens_total") - made; n >= vllmLength-200 {
			t.Errorf("stream %v: vLLM has made all %v tokens", stream, n)
		}
	}
	p.until(t, "the agent has forgotten them", func() bool {
		var fleet struct {
			Replicas []struct {
				InFlight int `json:"in_flight"`
			}
		}
		if err := json.Unmarshal(g.page("/debug/fleet"), &fleet); err != nil {
			t.Fatal(err)
		}
		return fleet.Replicas[0].InFlight == 0
	})
}

func (p *place) until(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !condition(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not before 30 s: %s", what)
		}
	}
}

// Tokens reach the client one after the other, while vLLM makes more.
func (p *place) tokensCome(t *testing.T, v *vllm, tier string) {
	g := p.agent(t, tier, []string{v.url})
	const tokens = 200
	arrivals := func(client *http.Client, base string) []time.Duration {
		t.Helper()
		body := fmt.Sprintf(`{%s,"ignore_eos":true,"max_tokens":%d,"stream":true}`, vllmChat, tokens)
		began := time.Now()
		resp, err := client.Post(base+"/v1/chat/completions", "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		var times []time.Duration
		for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
			if strings.HasPrefix(lines.Text(), "data: ") {
				times = append(times, time.Since(began))
			}
		}
		return times
	}
	client := p.from(atClient)
	var first, gaps [2][]time.Duration
	for range 5 {
		for i, times := range [][]time.Duration{arrivals(v.client, v.url), arrivals(client, g.url)} {
			if len(times) < tokens/4 {
				t.Fatalf("%d events", len(times))
			}
			// An answer that was held back comes all at once.
			if spread := times[len(times)-1] - times[0]; spread < times[len(times)-1]/3 {
				t.Errorf("the first event comes after %v, the last after %v", times[0], times[len(times)-1])
			}
			first[i] = append(first[i], times[0])
			for k := range times[1:] {
				gaps[i] = append(gaps[i], times[k+1]-times[k])
			}
		}
	}
	quantile := func(list []time.Duration, q float64) time.Duration {
		slices.Sort(list)
		return list[int(q*float64(len(list)-1))].Round(10 * time.Microsecond)
	}
	for i, name := range []string{"direct", "agent"} {
		t.Logf("%-6s first token %v; between tokens p50 %v, p99 %v", name, quantile(first[i], .5), quantile(gaps[i], .5), quantile(gaps[i], .99))
	}
}

// vllmKeys writes a configuration with one key that has limits of tokens.
func vllmKeys(t *testing.T, key string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "inferrail.yaml")
	text := fmt.Sprintf("server:\n  api_keys:\n  - {name: k, sha256: %s, input_tokens_per_minute: 1000000, output_tokens_per_minute: 1000000}\n", sha256Hex(key))
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// A key pays for what vLLM counts. A stream is as without limits: the usage
// that the agent asks for is not shown to a client who has not.
func (p *place) charged(t *testing.T, v *vllm) {
	const key = "sk-of-the-test"
	g := p.agent(t, "auto", []string{v.url}, "--config", vllmKeys(t, key))
	client := p.from(atClient)
	for _, q := range []question{
		{name: "body", path: "/v1/chat/completions", body: `{` + vllmChat + `,"max_tokens":40}`},
		{name: "stream", path: "/v1/chat/completions", body: `{` + vllmChat + `,"max_tokens":40,"stream":true}`},
		{name: "stream with null options", path: "/v1/chat/completions", body: `{` + vllmChat + `,"max_tokens":7,"stream":true,"stream_options":null}`},
		{name: "stream with other options", path: "/v1/chat/completions", body: `{` + vllmChat + `,"max_tokens":7,"stream":true,"stream_options":{"include_usage":false}}`},
		{name: "stream with usage", path: "/v1/chat/completions", body: `{` + vllmChat + `,"max_tokens":40` + vllmStream + `}`},
		{name: "stream with continuous usage", path: "/v1/chat/completions", body: `{` + vllmChat + `,"max_tokens":5,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}`},
		{name: "two choices", path: "/v1/chat/completions", body: `{` + vllmChat + `,"temperature":0.7,"max_tokens":6,"n":2,"stream":true}`},
		{name: "text", path: "/v1/completions", body: `{` + vllmModel + `,"prompt":["The river","A house"],"max_tokens":6}`},
		{name: "text stream", path: "/v1/completions", body: `{` + vllmModel + `,"prompt":"The river","max_tokens":40,"stream":true}`},
		{name: "responses", path: "/v1/responses", body: `{"model":"tiny","input":"Hello","max_output_tokens":9,"temperature":0}`},
		{name: "responses stream", path: "/v1/responses", body: `{"model":"tiny","input":"Hello","max_output_tokens":9,"temperature":0,"stream":true}`},
		{name: "messages", path: "/v1/messages", body: `{` + vllmChat + `,"max_tokens":9}`},
		{name: "messages stream", path: "/v1/messages", body: `{` + vllmChat + `,"max_tokens":9,"stream":true}`},
		{name: "refused", path: "/v1/chat/completions", body: `{` + vllmChat + `,"max_tokens":-1}`},
	} {
		t.Run(q.name, func(t *testing.T) {
			counts := func() [4]float64 {
				return [4]float64{v.metric("prompt_tokens_total"), v.metric("generation_tokens_total"),
					g.metric("inferrail_key_tokens_total", `key="k"`, `kind="prompt"`), g.metric("inferrail_key_tokens_total", `key="k"`, `kind="completion"`)}
			}
			withKey := q
			withKey.key = key
			var before [4]float64
			compare(t, func() reply { return pose(t, v.client, v.url, q) }, func() reply {
				before = counts()
				return pose(t, client, g.url, withKey)
			}, func(direct, via reply) string {
				if via.status != direct.status {
					return fmt.Sprintf("status %d, want %d: %s", via.status, direct.status, via.body)
				}
				// In a stream the fingerprint stands in the last chunk, which is
				// the one that the agent takes out.
				return difference(fingerprint.ReplaceAllString(via.plain(), ""), fingerprint.ReplaceAllString(direct.plain(), ""))
			})
			var used [4]float64
			charged := func() bool {
				after := counts()
				for i := range used {
					used[i] = after[i] - before[i]
				}
				// vLLM counts a prompt once for each of its choices, but
				// tells, and the agent charges, it once.
				prompt := used[0]
				if strings.Contains(q.body, `"n":2`) {
					prompt /= 2
				}
				return used[2] == prompt && used[3] == used[1]
			}
			for end := time.Now().Add(10 * time.Second); !charged(); time.Sleep(20 * time.Millisecond) {
				if time.Now().After(end) {
					t.Fatalf("charged %v and %v, vLLM has counted %v and %v", used[2], used[3], used[0], used[1])
				}
			}
			t.Logf("%v prompt, %v output", used[2], used[3])
		})
	}
}

// uvicorn closes a connection that is idle for 5 seconds. No request may be
// lost to that, even where the agent keeps connections longer.
func (p *place) idle(t *testing.T, v *vllm) {
	file := filepath.Join(t.TempDir(), "inferrail.yaml")
	if err := os.WriteFile(file, []byte("server: {upstream_idle: 1m}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	usual := p.agent(t, "auto", []string{v.url})
	eager := p.agent(t, "auto", []string{v.url}, "--config", file)
	var group sync.WaitGroup
	var lost, asked atomic.Int64
	for i := range 20 {
		for _, g := range []*guard{usual, eager} {
			client := p.from(atClient)
			group.Go(func() {
				for range 4 {
					r, err := tryPose(t.Context(), client, g.url, question{path: "/v1/completions", body: `{` + vllmModel + `,"prompt":"The river","max_tokens":1}`})
					asked.Add(1)
					if err != nil || r.status != 200 {
						lost.Add(1)
						t.Errorf("status %d, %v: %s", r.status, err, r.body)
					}
					time.Sleep(4900*time.Millisecond + time.Duration(i)*10*time.Millisecond)
				}
			})
		}
	}
	group.Wait()
	t.Logf("%d requests, %d lost; retries %v and %v", asked.Load(), lost.Load(), usual.metric("inferrail_retries_total"), eager.metric("inferrail_retries_total"))
}

// When vLLM is asked to end, a second engine takes over. A stream that it has
// begun and breaks off is told as broken; nothing else is lost.
func (p *place) replaced(t *testing.T, v *vllm) {
	var other *simulator.Server
	var err error
	p.in(atEngine, func() {
		other, err = simulator.Start(simulator.Config{Host: p.address(atEngine), ServedModelName: []string{"tiny"}, TimePerOutputToken: time.Millisecond})
	})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	g := p.agent(t, "auto", []string{v.url, other.URL()})
	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	defer func() {
		cancel()
		group.Wait()
	}()
	var fine, broken [2]atomic.Int64
	for i := range 8 {
		stream := i % 2
		client := p.from(atClient)
		group.Go(func() {
			for ctx.Err() == nil {
				q := question{path: "/v1/chat/completions", body: fmt.Sprintf(`{%s,"max_tokens":30,"stream":%v}`, vllmChat, stream == 1)}
				r, err := tryPose(t.Context(), client, g.url, q)
				ended := stream == 0 || strings.HasSuffix(r.body, "data: [DONE]\n\n")
				failed := strings.Contains(r.body, `"error"`)
				switch {
				case err == nil && r.status == 200 && ended && !failed:
					fine[stream].Add(1)
				case stream == 1 && r.status == 200 && (err != nil || failed):
					// vLLM ends at once and breaks off what it has begun.
					broken[stream].Add(1)
				default:
					broken[stream].Add(1)
					t.Errorf("stream %d: status %d, %v: %s", stream, r.status, err, r.body[max(0, len(r.body)-500):])
				}
			}
		})
	}
	served := func(n int64) func() bool {
		return func() bool { return fine[0].Load() >= n && fine[1].Load() >= n }
	}
	p.until(t, "40 answers of each kind", served(40))
	// It is given the time that Kubernetes gives it, and then ended.
	v.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-v.done:
	case <-time.After(30 * time.Second):
		t.Logf("vLLM does not end by itself:\n%s", v.tail())
		v.kill()
	}
	before := max(fine[0].Load(), fine[1].Load())
	p.until(t, "40 answers more", served(before+40))
	cancel()
	group.Wait()
	t.Logf("bodies: %d whole, %d not; streams: %d whole, %d broken off by vLLM", fine[0].Load(), broken[0].Load(), fine[1].Load(), broken[1].Load())
}

// A stream whose engine is killed is not taken for a whole one.
func (p *place) killed(t *testing.T, v *vllm) {
	var guards []*guard
	var streams []*bufio.Reader
	tiers := []string{"copy", "auto"}
	for _, tier := range tiers {
		guards = append(guards, p.agent(t, tier, []string{v.url}))
	}
	// A stream lasts some seconds, which an agent may take to start.
	for _, g := range guards {
		resp, err := p.from(atClient).Post(g.url+"/v1/chat/completions", "application/json", strings.NewReader(endless(true)))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		streams = append(streams, bufio.NewReader(resp.Body))
	}
	for _, s := range streams {
		for range 40 {
			if _, err := s.ReadString('\n'); err != nil {
				t.Fatal(err)
			}
		}
	}
	v.kill()
	for i, s := range streams {
		rest, err := io.ReadAll(s)
		if err == nil || !bytes.Contains(rest, []byte(`data: {"error":`)) || bytes.Contains(rest, []byte("[DONE]")) {
			t.Errorf("%s: %v; the stream ends in %q", tiers[i], err, rest[max(0, len(rest)-300):])
		}
		r := pose(t, p.from(atClient), guards[i].url, question{path: "/v1/chat/completions", body: `{` + vllmChat + `}`})
		if r.status != http.StatusServiceUnavailable && r.status != http.StatusBadGateway {
			t.Errorf("%s: without an engine the agent answers %d: %s", tiers[i], r.status, r.body)
		}
	}
}
