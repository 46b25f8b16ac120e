package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

func file(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// What the command says of a file, FILE standing for its name.
func TestCheck(t *testing.T) {
	const look = "to see the prompt of a request: POST its body to /debug/prompt?path=/v1/chat/completions of the running agent (127.0.0.1:9090)\n"
	t.Setenv("HF_HUB_CACHE", "/nowhere/hub")
	f := func(text string, status int, want string) {
		t.Helper()
		path := file(t, "inferrail.yaml", text)
		p := start(t, "check", path)
		p.exit(status)
		if got := strings.ReplaceAll(p.stdout.String(), path, "FILE"); got != want {
			t.Errorf("got:\n%swant:\n%s", got, want)
		}
		if p.stderr.String() != "" {
			t.Errorf("stderr: %s", &p.stderr)
		}
	}
	f("replicas: [{url: http://gpu:8000}]\n", 0,
		"FILE: ok\n1 replica; 0 models; sources: replicas; policy cost_model; no API key: anybody may send requests\n")
	f(`
models: [{name: m, policy: sticky}, {name: n, policy: cost_model}]
discovery: {local: true, dns: [{name: engines.svc, port: 8000}]}
server:
  api_keys:
    - {name: web, sha256: 60303ae22b998861bce3b28f33eec1be758a213c86c93c076dbe9f558c11c752}
`, 0, "FILE: ok\n0 replicas; 2 models; sources: dns engines.svc, local; policy cost_model, sticky; 1 API key\n"+
		`m: not known before an engine says where it has the model (tokenizer "m": there is no such directory, and the Hugging Face cache has no /nowhere/hub/models--m; fetch it with "hf download m", or name a directory)`+"\n"+
		`n: not known before an engine says where it has the model (tokenizer "n": there is no such directory, and the Hugging Face cache has no /nowhere/hub/models--n; fetch it with "hf download n", or name a directory)`+"\n"+look)
	f("replicas: [{url: http://gpu:8000}]\nmodels: [{name: m, tokenizer: none}, {name: s, tokenizer: builtin:sim}]\n", 0,
		"FILE: ok\n1 replica; 2 models; sources: replicas; policy cost_model; no API key: anybody may send requests\n"+
			"m: no tokenizer; prompts are approximate\n"+
			"s (builtin:sim): exact: that of the simulated engine, chat template, contents as string\n"+look)
	f("replicas: [{url: http://gpu:8000}]\nmodels: [{name: m, tokenizer: /nowhere, chat_template: /nowhere/t.jinja}]\n", 1,
		"FILE: models[0].tokenizer: cannot be read: stat /nowhere: no such file or directory\n"+
			"FILE: models[0].chat_template: cannot be read: open /nowhere/t.jinja: no such file or directory\n")
	f("listne: :80\nreplicas: [{url: ftp://h, api_key_file: /nowhere/key}]\nserver: {tls: {cert_file: /nowhere/a, key_file: /nowhere/b}}\n", 1,
		`FILE: listne: is unknown; known here: listen, admin_listen, admin_token_sha256, models, replicas, discovery, datapath, routing, classes, health, load, retry, tokenizer, index, server, decisions, observability
FILE: replicas[0].url: "ftp://h": engines are reached over http only; want http://host:port
FILE: server.tls: cannot read the certificate: open /nowhere/a: no such file or directory
FILE: replicas[0].api_key_file: cannot be read: open /nowhere/key: no such file or directory
`)
	f("", 1, "FILE: replicas: are missing; name an engine here or with --replica http://host:port, let discovery.dns, discovery.kubernetes or discovery.local (--discover-local) find some, or try --sim 3\n")
	f("replicas: [\n", 1, "FILE: not YAML: [1:11] sequence end token ']' not found\n>  1 | replicas: [\n                 ^\n")
}

func TestCheckWithoutAFile(t *testing.T) {
	p := start(t, "check", filepath.Join(t.TempDir(), "absent.yaml"))
	p.exit(1)
	if !strings.Contains(p.stderr.String(), "no such file") {
		t.Errorf("says %q", &p.stderr)
	}
	p = start(t, "check")
	p.exit(2)
	if !strings.Contains(p.stderr.String(), "<file>") {
		t.Errorf("says %q", &p.stderr)
	}
}

// A hangup loads the file again, and flags still have the last word.
func TestAgentReloads(t *testing.T) {
	path := file(t, "inferrail.yaml", "admin_listen: 127.0.0.1:0\nretry: {max_attempts: 2}\n")
	hangups := make(chan os.Signal, 1)
	p := &process{T: t, signals: make(chan os.Signal, 2), status: make(chan int, 1)}
	go func() {
		p.status <- run(&env{
			args:   []string{"agent", "--config", path, "--listen", "127.0.0.1:0", "--sim", "1", "--datapath", "copy"},
			stdout: &p.stdout, stderr: &p.stderr, signals: p.signals, hangups: hangups,
		})
	}()
	p.expect(`(?m)^try        (curl .*)$`)
	says := func(want string) {
		t.Helper()
		for end := time.Now().Add(20 * time.Second); !strings.Contains(p.stderr.String(), want); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("does not say %q:\n%s", want, &p.stderr)
			}
		}
	}
	if err := os.WriteFile(path, []byte("admin_listen: 127.0.0.1:0\nretry: {max_attempts: 5}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	hangups <- syscall.SIGHUP
	says("key=retry.max_attempts old=2 new=5")
	if strings.Contains(p.stderr.String(), "key=listen") || strings.Contains(p.stderr.String(), "key=replicas") {
		t.Errorf("the flags are forgotten:\n%s", &p.stderr)
	}
	if err := os.WriteFile(path, []byte("retry: {max_attempts: 0}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	hangups <- syscall.SIGHUP
	says("configuration: retry.max_attempts: 0 is below 1")
	p.signals <- syscall.SIGTERM
	p.exit(0)
}

// What the command says of models whose tokenizers it finds: in the Hugging Face
// cache, whose snapshots are links to blobs, and in directories.
func TestCheckModels(t *testing.T) {
	hub, empty := t.TempDir(), t.TempDir()
	put := func(name, text string) {
		t.Helper()
		path := filepath.Join(hub, "models--org--w", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put("refs/main", "0123abcd")
	put("refs/pr/1", "4567cdef") // was not fetched
	put("blobs/1", `{"version":"1.0","added_tokens":[],"normalizer":{"type":"BertNormalizer","lowercase":true},"model":{"type":"WordPiece","vocab":{"a":0}}}`)
	put("snapshots/0123abcd/tokenizer_config.json", `{"tokenizer_class":"PreTrainedTokenizerFast"}`)
	if err := os.Symlink("../../blobs/1", filepath.Join(hub, "models--org--w/snapshots/0123abcd/tokenizer.json")); err != nil {
		t.Fatal(err)
	}
	f := func(models string, status int, want ...string) {
		t.Helper()
		p := start(t, "check", file(t, "inferrail.yaml", fmt.Sprintf("replicas: [{url: http://gpu:8000}]\ntokenizer: {hub_cache: %s}\nmodels:\n%s", hub, models)))
		p.exit(status)
		got := strings.NewReplacer(hub, "HUB", empty, "EMPTY").Replace(p.stdout.String())
		for _, line := range want {
			if !strings.Contains(got, line+"\n") {
				t.Errorf("lacks %q:\n%s", line, got)
			}
		}
	}
	const why = `approximate: tokenizer: HUB/models--org--w/snapshots/0123abcd/tokenizer.json: normalizer BertNormalizer: unknown object member name lowercase: not followed natively; ` +
		`this inferrail has been built without the Hugging Face tokenizers library: build one that has it by make build TOKENIZERS=hf`
	f("- {name: w, tokenizer: org/w}\n- {name: org/w}\n- {name: c, tokenizer: org/w@0123abcd}\n- {name: e, tokenizer: "+empty+"}\n", 0,
		"w (org/w): "+why, "org/w: "+why, "c (org/w@0123abcd): "+why,
		"e (EMPTY): approximate: there is neither tokenizer.json nor tekken.json in EMPTY")
	f("- {name: w, tokenizer: org/w@pr/1}\n- {name: x, tokenizer: org/w@v2}\n", 1,
		`models[0].tokenizer: tokenizer "org/w@pr/1": HUB/models--org--w has no revision pr/1 (it has main, 0123abcd); fetch it with "hf download org/w --revision pr/1"`,
		`models[1].tokenizer: tokenizer "org/w@v2": HUB/models--org--w has no revision v2 (it has main, 0123abcd); fetch it with "hf download org/w --revision v2"`)
}
