package main

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	crand "crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// output collects what a command prints while it runs.
type output struct {
	mu  sync.Mutex // guards buf
	buf bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

// process is a command line that runs in the test's own process.
type process struct {
	*testing.T
	signals        chan os.Signal
	stdout, stderr output
	status         chan int
}

func start(t *testing.T, args ...string) *process {
	p := &process{T: t, signals: make(chan os.Signal, 2), status: make(chan int, 1)}
	go func() {
		p.status <- run(&env{args: args, stdout: &p.stdout, stderr: &p.stderr, signals: p.signals})
	}()
	return p
}

// expect waits for a line of stdout and returns what the expression's first
// group matched in it.
func (p *process) expect(expr string) string {
	p.Helper()
	re := regexp.MustCompile(expr)
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if m := re.FindStringSubmatch(p.stdout.String()); m != nil {
			return m[len(m)-1]
		}
		select {
		case status := <-p.status:
			p.Fatalf("exit status %d\nstdout:\n%s\nstderr:\n%s", status, &p.stdout, &p.stderr)
		default:
		}
	}
	p.Fatalf("no line %q\nstdout:\n%s\nstderr:\n%s", expr, &p.stdout, &p.stderr)
	return ""
}

// exit waits for the end and expects a status.
func (p *process) exit(want int) {
	p.Helper()
	select {
	case got := <-p.status:
		if got != want {
			p.Errorf("exit status %d, want %d\nstdout:\n%s\nstderr:\n%s", got, want, &p.stdout, &p.stderr)
		}
	case <-time.After(20 * time.Second):
		p.Fatalf("does not end\nstderr:\n%s", &p.stderr)
	}
}

var free = []string{"--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"}

func agentArgs(args ...string) []string {
	return append(append([]string{"agent"}, free...), args...)
}

// The line that the agent prints to be pasted must work as it is, so it is
// taken apart the way a shell would.
func tryCurl(t *testing.T, line string) string {
	t.Helper()
	m := regexp.MustCompile(`^curl -N (\S+) -H '([^:]+): ([^']+)' -d '([^']+)'$`).FindStringSubmatch(line)
	if m == nil {
		t.Fatalf("not the line of a curl: %s", line)
	}
	req, err := http.NewRequestWithContext(t.Context(), "POST", m[1], strings.NewReader(m[4]))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set(m[2], m[3])
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != 200 {
		t.Fatalf("status %d, %v: %s", resp.StatusCode, err, body)
	}
	return string(body)
}

func TestAgentWithSimulatedEngines(t *testing.T) {
	p := start(t, agentArgs("--sim", "3", "--datapath", "copy")...)
	p.expect(`(?m)^replicas   (3 of 3 serve sim)$`)
	p.expect(`(?m)^listening  127\.0\.0\.1:(\d+), admin http://127`)
	p.expect(`(?m)^datapath   copy \((.+)\)$`)
	body := tryCurl(t, p.expect(`(?m)^try        (curl .*)$`))
	if !strings.HasSuffix(body, "data: [DONE]\n\n") {
		t.Errorf("the answer ends in %.80q", body[max(0, len(body)-80):])
	}
	p.signals <- syscall.SIGTERM
	p.exit(0)
	if lines := strings.Count(p.stdout.String(), "\n"); lines != 4 {
		t.Errorf("%d lines on stdout, want 4:\n%s", lines, &p.stdout)
	}
}

// With TLS and API keys the line works too, for whoever has a key.
func TestLineToTryWithTLSAndKeys(t *testing.T) {
	curl, err := exec.LookPath("curl")
	if err != nil {
		t.Skip("no curl")
	}
	private, err := ecdsa.GenerateKey(elliptic.P256(), crand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), DNSNames: []string{"gateway.example.com"}}
	certificate, err := x509.CreateCertificate(crand.Reader, template, template, private.Public(), private)
	if err != nil {
		t.Fatal(err)
	}
	key, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	hash := sha256.Sum256([]byte("sk-one"))
	config := fmt.Sprintf("server: {tls: {cert_file: %s, key_file: %s}, api_keys: [{name: one, sha256: %x}]}\n",
		file(t, "cert.pem", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate}))),
		file(t, "key.pem", string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key}))), hash)
	p := start(t, agentArgs("--config", file(t, "inferrail.yaml", config), "--sim", "1", "--datapath", "copy")...)
	line := p.expect(`(?m)^try        curl (.*)$`)
	shell := exec.CommandContext(t.Context(), "sh", "-c", curl+" -sS "+line)
	shell.Env = append(os.Environ(), "KEY=sk-one", "no_proxy=*")
	out, err := shell.CombinedOutput()
	if err != nil || !strings.HasSuffix(string(out), "data: [DONE]\n\n") {
		t.Errorf("%s: %v, %s", line, err, out)
	}
	p.signals <- syscall.SIGTERM
	p.exit(0)
}

func TestAgentWaitsForItsEngine(t *testing.T) {
	// A port that nothing listens on, until the engine is started on it.
	sim := start(t, "sim", "--port", "0", "--served-model-name", "m")
	url := sim.expect(`(?m)^simulated vllm at (http://\S+) serves m; `)
	sim.signals <- syscall.SIGINT
	sim.exit(0)

	p := start(t, agentArgs("--datapath", "copy", "--replica", "e0="+url)...)
	p.expect(`replicas   none of 1 answers yet`)
	_, port, _ := strings.Cut(strings.TrimPrefix(url, "http://"), ":")
	sim = start(t, "sim", "--port", port, "--served-model-name", "m", "--zero-latency")
	p.expect(`(?m)^replicas   1 of 1 serve m$`)
	tryCurl(t, p.expect(`(?m)^try        (curl .*)$`))
	p.signals <- syscall.SIGTERM
	p.exit(0)
	sim.signals <- syscall.SIGTERM
	sim.exit(0)
}

// An agent that still waits for its engines ends with a signal, too.
func TestAgentStopsWhileItWaits(t *testing.T) {
	p := start(t, agentArgs("--datapath", "copy", "--replica", "http://127.0.0.1:1")...)
	p.expect(`replicas   none of 1 answers yet`)
	p.signals <- syscall.SIGTERM
	p.exit(0)
}

func TestFlagsOverwriteVariablesOverwriteFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "inferrail.yaml")
	text := "listen: 127.0.0.1:1\nadmin_listen: 127.0.0.1:2\ndatapath: {mode: packet, interfaces: [a]}\n" +
		"replicas: [{url: \"http://127.0.0.1:3\"}]\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("INFERRAIL_LISTEN", "127.0.0.1:4")
	t.Setenv("INFERRAIL_DATAPATH_MODE", "auto")
	parse := func(args ...string) agentCommand {
		t.Helper()
		var c commands
		if _, err := newParser(&c, &env{stdout: io.Discard, stderr: io.Discard}).Parse(args); err != nil {
			t.Fatal(err)
		}
		return c.Agent
	}
	c := parse("agent", "--config", file, "--datapath", "copy", "--iface", "b", "--iface", "c*", "--replica", "x=http://127.0.0.1:5")
	got, err := c.config()
	if err != nil {
		t.Fatal(err)
	}
	f := func(name string, got, want any) {
		t.Helper()
		if got != want {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
	f("listen", got.Listen, "127.0.0.1:4")            // the variable
	f("admin_listen", got.AdminListen, "127.0.0.1:2") // the file
	f("datapath.mode", got.Datapath.Mode, "copy")     // the flag
	f("datapath.interfaces", strings.Join(got.Datapath.Interfaces, " "), "b c*")
	f("replicas", len(got.Replicas), 2)
	f("replicas[1].id", got.Replicas[1].ID, "x")
	f("health.interval", got.Health.Interval, time.Second)
}

func TestWrongCommandLines(t *testing.T) {
	dir := t.TempDir()
	bad := filepath.Join(dir, "bad.yaml")
	if err := os.WriteFile(bad, []byte("lisen: :80\nreplicas: [{url: ftp://h}]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	f := func(status int, want string, args ...string) {
		t.Helper()
		p := start(t, args...)
		p.exit(status)
		if !strings.Contains(p.stderr.String(), want) {
			t.Errorf("%v says %q, want %q", args, &p.stderr, want)
		}
	}
	f(2, "unexpected argument nonsense", "nonsense")
	f(2, "unknown flag --nonsense", "agent", "--nonsense")
	f(2, "--sim", "agent", "--sim", "many")
	f(2, "--log-level", "agent", "--log-level", "loud")
	f(2, "expected", "bench")
	f(1, "--sim -1: want 0 to 64", "agent", "--sim=-1")
	f(1, "replicas: are missing", "agent")
	f(1, `datapath.mode: "fast" is unknown; want auto, packet, copy`, "agent", "--datapath", "fast", "--sim", "1")
	f(1, "no such file", "agent", "--config", filepath.Join(dir, "absent.yaml"))
	f(1, bad+":", "agent", "--config", bad)
	f(1, "lisen: is unknown", "agent", "--config", bad)
	f(1, "replicas[0].url:", "agent", "--config", bad)
	f(1, "listen: ", "agent", "--listen", "192.0.2.1:80", "--sim", "1")
	f(1, "port must be between", "sim", "--port", "70000")
	f(1, "engine, client, caller or simulators expected", "bench", "worker", "nonsense", "-x")
}

func TestHelpAndVersion(t *testing.T) {
	f := func(want string, args ...string) {
		t.Helper()
		p := start(t, args...)
		p.exit(0)
		if !strings.Contains(p.stdout.String(), want) {
			t.Errorf("%v says %q, want %q", args, &p.stdout, want)
		}
	}
	f("Usage: inferrail <command>")
	f("Usage: inferrail <command>", "--help")
	f("--replica=[ID=]URL", "agent", "--help")
	f("--served-model-name", "sim", "--help")
	f("bench datapath", "--help")
	f("inferrail ", "version")
}
