package agent

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// shown is a publisher in a line.
func (p publisher) shown() string {
	out := p.events.String()
	if !p.replay.isZero() {
		out += " replay " + p.replay.String()
	}
	if !p.snapshot.isZero() {
		out += " snapshot " + p.snapshot.String()
	}
	if p.topic != "" {
		out += " topic " + p.topic
	}
	return out
}

func TestParseEndpoint(t *testing.T) {
	f := func(text string, rank int, want string) {
		t.Helper()
		e, err := parseEndpoint(text, "gpu-0", rank)
		got := e.String()
		if err != nil {
			got = "error: " + err.Error()
		}
		if !strings.HasPrefix(got, want) || want == "" {
			t.Errorf("%s rank %d: got %s, want %s", text, rank, got, want)
		}
	}
	f("tcp://*:5557", 0, "tcp://gpu-0:5557")
	f("tcp://0.0.0.0:5557", 3, "tcp://gpu-0:5560")
	f("tcp://[::]:5557", 1, "tcp://gpu-0:5558")
	f("tcp://:::5557", 1, "tcp://gpu-0:5558")
	f("tcp://:5557", 0, "tcp://gpu-0:5557")
	f("tcp://10.0.0.1:5557", 0, "tcp://10.0.0.1:5557")
	f("tcp://[2001:db8::1]:5557", 0, "tcp://[2001:db8::1]:5557")
	f("tcp://gpu-1.example:65535", 0, "tcp://gpu-1.example:65535")
	f("ipc:///run/kv", 2, "ipc:///run/kv")

	f("tcp://*:65535", 1, "error: there is no port 65536 for rank 1")
	f("tcp://*:0", 0, `error: "tcp://*:0" has no port`)
	f("tcp://*:-1", 0, "error: ")
	f("tcp://*", 0, "error: ")
	f("tcp://a/b:1", 0, "error: ")
	f("tcp://u@h:1", 0, "error: ")
	f("ipc://kv", 0, "error: ")
	f("inproc://kv", 0, "error: ")
	f("http://h:1", 0, "error: ")
	f("", 0, "error: ")
}

// TestEnginesTellTheirPublishers: the pages of engines, and what is made of them
// for one rank. Whatever host they name, it is the replica's that is connected to.
func TestEnginesTellTheirPublishers(t *testing.T) {
	f := func(parse func([]byte, string, int) (publisher, error), rank int, body, want string) {
		t.Helper()
		p, err := parse([]byte(body), "gpu-0", rank)
		got := p.shown()
		if err != nil {
			if _, ok := err.(errNoPublisher); !ok {
				t.Errorf("%s: %T", body, err)
			}
			got = "error: " + err.Error()
		}
		if !strings.HasPrefix(got, want) || want == "" {
			t.Errorf("%s rank %d:\ngot  %s\nwant %s", body, rank, got, want)
		}
	}
	v := parseVLLMSources
	// As vLLM 0.32 answers.
	const whole = `{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657","buffer_steps":10000,"hwm":100000,"max_queue_size":100000,"topic":"kv"}`
	f(v, 0, `{"0":`+whole+`}`, "tcp://gpu-0:5557 replay tcp://gpu-0:5657 topic kv")
	f(v, 1, `{"0":`+whole+`,"1":{"endpoint":"tcp://*:5558","replay_endpoint":null}}`, "tcp://gpu-0:5558")
	f(v, 1, `{"sources":[{"data_parallel_rank":1,"endpoint":"tcp://*:6001"},{"data_parallel_rank":0,"endpoint":"tcp://*:6000"}]}`, "tcp://gpu-0:6001")
	f(v, 0, `{"sources":[{"endpoint":"tcp://*:6000","snapshot_endpoint":"tcp://*:7000"}]}`, "tcp://gpu-0:6000 snapshot tcp://gpu-0:7000")
	f(v, 0, `{"0":{"endpoint":"tcp://169.254.169.254:80"}}`, "tcp://gpu-0:80")
	f(v, 0, `{"0":{"endpoint":"tcp://[fe80::1]:5557","replay_endpoint":"tcp://fe80::1:5657"}}`, "tcp://gpu-0:5557 replay tcp://gpu-0:5657")
	f(v, 0, `{}`, "error: the engine publishes no KV events")
	f(v, 0, `{"sources":[]}`, "error: the engine publishes no KV events")
	f(v, 0, `{"0":{"enable_kv_cache_events":false,"endpoint":"tcp://*:5557"}}`, "error: the engine publishes no KV events")
	f(v, 0, `{"0":{"endpoint":null}}`, "error: the engine publishes no KV events")
	f(v, 0, `{"0":{"endpoint":""}}`, "error: the engine publishes no KV events")
	f(v, 2, `{"0":`+whole+`}`, "error: the engine names no publisher for its rank 2")
	f(v, 0, `{"0":{"publisher":"kafka","endpoint":"tcp://*:5557"}}`, `error: the engine publishes its KV events by "kafka"`)
	f(v, 0, `{"0":{"endpoint":"ipc:///etc/passwd"}}`, "error: the engine publishes at \"ipc:///etc/passwd\", which only configuration may name")
	f(v, 0, `{"0":{"endpoint":"inproc://kv"}}`, "error: ")
	f(v, 0, `{"0":{"endpoint":"http://x:1"}}`, "error: ")
	f(v, 0, `{"0":{"endpoint":"tcp://*:0"}}`, "error: ")
	f(v, 0, `{"0":{"endpoint":"tcp://*:5557","replay_endpoint":"ipc:///x"}}`, "error: ")
	f(v, 0, `{"0":[]}`, "error: /kv_event_sources is not what vLLM answers there")
	f(v, 0, `{"sources":{}}`, "error: /kv_event_sources is not what vLLM answers there")
	f(v, 0, `[]`, "error: /kv_event_sources is not what vLLM answers there")
	f(v, 0, `<html>`, "error: /kv_event_sources is not what vLLM answers there")

	s := parseSGLangSources
	const described = `{"publisher":"zmq","endpoint_host":"*","endpoint_port_base":5557,"topic":"kv","block_size":64,"dp_size":2}`
	f(s, 0, `{"version":"0.5.21","kv_events":`+described+`}`, "tcp://gpu-0:5557 topic kv")
	f(s, 1, `{"kv_events":`+described+`}`, "tcp://gpu-0:5558 topic kv")
	f(s, 1, `{"kv_events":{"endpoint_host":"10.9.9.9","endpoint_port_base":5557,"replay_endpoint_port_base":5657}}`, "tcp://gpu-0:5558 replay tcp://gpu-0:5658")
	f(s, 2, `{"kv_events":`+described+`}`, "error: the engine names no publisher for its rank 2")
	f(s, 0, `{"kv_events":null}`, "error: the engine publishes no KV events")
	f(s, 0, `{"vllm_config":"..."}`, "error: the engine publishes no KV events")
	f(s, 0, `{"kv_events":{"publisher":"null"}}`, `error: the engine publishes its KV events by "null"`)
	f(s, 0, `{"kv_events":{"endpoint_port_base":0}}`, "error: the engine names no endpoint")
	f(s, 0, `{"kv_events":{"endpoint_port_base":70000}}`, "error: the engine names no endpoint")
	f(s, 9, `{"kv_events":{"endpoint_port_base":65530}}`, "error: the engine names no endpoint")
	f(s, 0, `{"kv_events":{"endpoint_port_base":5557,"replay_endpoint_port_base":-5}}`, "error: the engine names no endpoint")
	f(s, 0, `{"kv_events":7}`, "error: /server_info is not what SGLang answers there")
	f(s, 0, `no`, "error: /server_info is not what SGLang answers there")
}

// TestWhichPagesAreAsked: by the kind of engine, and what their failures mean.
func TestWhichPagesAreAsked(t *testing.T) {
	type answer struct {
		status int
		body   string
	}
	f := func(engine string, pages map[string]answer, wantAsked, want string, final bool) {
		t.Helper()
		asked := ""
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			asked += r.URL.Path + " "
			a, ok := pages[r.URL.Path]
			if !ok {
				a.status = 404
			}
			w.WriteHeader(a.status)
			fmt.Fprint(w, a.body)
		}))
		defer server.Close()
		get := func(ctx context.Context, page string) (*http.Response, error) {
			req, err := http.NewRequestWithContext(ctx, "GET", server.URL+page, nil)
			if err != nil {
				return nil, err
			}
			return server.Client().Do(req)
		}
		p, err := findPublisher(t.Context(), get, engine, "gpu-0", 0)
		got := p.shown()
		if err != nil {
			got = err.Error()
			if _, ok := err.(errNoPublisher); ok != final {
				t.Errorf("%s: %q is final: %v", engine, got, ok)
			}
		}
		if asked != wantAsked || !strings.Contains(got, want) {
			t.Errorf("%q: asked %q, want %q; got %q, want %q", engine, asked, wantAsked, got, want)
		}
	}
	vllm := answer{200, `{"0":{"endpoint":"tcp://*:5557"}}`}
	sglang := answer{200, `{"kv_events":{"endpoint_port_base":5558}}`}
	f("", map[string]answer{"/kv_event_sources": vllm}, "/kv_event_sources ", "tcp://gpu-0:5557", true)
	f("", map[string]answer{"/server_info": sglang}, "/kv_event_sources /server_info ", "tcp://gpu-0:5558", true)
	f("", nil, "/kv_event_sources /server_info ", "does not say where it publishes", true)
	f("", map[string]answer{"/kv_event_sources": {200, "{}"}}, "/kv_event_sources /server_info ", "publishes no KV events", true)
	f("vllm", map[string]answer{"/server_info": sglang}, "/kv_event_sources ", "configure replicas[].kv_events", true)
	f("sglang", map[string]answer{"/get_server_info": sglang}, "/server_info /get_server_info ", "tcp://gpu-0:5558", true)
	f("ollama", nil, "", "this kind of engine publishes no KV events", true)
	f("vllm", map[string]answer{"/kv_event_sources": {401, ""}}, "/kv_event_sources ", "api_key", true)
	// These may pass.
	f("vllm", map[string]answer{"/kv_event_sources": {503, ""}}, "/kv_event_sources ", "status 503", false)
	f("", map[string]answer{"/kv_event_sources": {429, ""}}, "/kv_event_sources ", "status 429", false)
	f("vllm", map[string]answer{"/kv_event_sources": {200, strings.Repeat(" ", maxSources+1)}}, "/kv_event_sources ", "larger than 4MiB", false)
}

// FuzzSources: whatever an engine answers, nothing but a port of the replica's
// own host comes of it.
func FuzzSources(f *testing.F) {
	f.Add([]byte(`{"0":{"endpoint":"tcp://*:5557","replay_endpoint":"tcp://x:1"}}`), 0)
	f.Add([]byte(`{"sources":[{"data_parallel_rank":1,"endpoint":"tcp://[::]:6001"}]}`), 1)
	f.Add([]byte(`{"kv_events":{"endpoint_port_base":5557,"dp_size":2}}`), 1)
	f.Fuzz(func(t *testing.T, body []byte, rank int) {
		for _, parse := range []func([]byte, string, int) (publisher, error){parseVLLMSources, parseSGLangSources} {
			p, err := parse(body, "gpu-0", rank)
			if err != nil {
				continue
			}
			if p.events.isZero() {
				t.Fatal("a publisher without an endpoint")
			}
			for _, e := range []endpoint{p.events, p.replay, p.snapshot} {
				if host, _, err := splitEndpoint(e.address); !e.isZero() && (e.network != "tcp" || host != "gpu-0" || err != nil) {
					t.Fatalf("%v", e)
				}
			}
		}
	})
}
