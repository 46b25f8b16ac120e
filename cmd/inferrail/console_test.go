package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
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

	"github.com/inferrail/inferrail/simulator"
)

// What drives the browser, and what looks for faults that people would meet who see
// little or use no mouse; installed once into the user's cache.
const (
	playwright = "1.65.1"
	axe        = "4.14.1"
)

// browser returns where a Chromium is that runs, and skips the test where there is
// none. Ubuntu's package of that name is a script that asks for another one.
func browser(t *testing.T) string {
	names := []string{"chromium", "chromium-browser", "google-chrome", "google-chrome-stable"}
	if name := os.Getenv("INFERRAIL_CHROMIUM"); name != "" {
		names = []string{name}
	}
	why := "no Chromium is installed"
	for _, name := range names {
		path, err := exec.LookPath(name)
		if err != nil {
			continue
		}
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		out, err := exec.CommandContext(ctx, path, "--version").Output()
		cancel()
		if err == nil && bytes.Contains(out, []byte("Chrom")) {
			return path
		}
		why = fmt.Sprintf("%s does not run: %v", path, err)
	}
	t.Skip(why)
	return ""
}

// consoleModules installs what the suite imports.
func consoleModules(t *testing.T, node string) string {
	npm := need(t, "npm")
	dir := cached(t, "console-"+playwright+"-"+axe, func(ctx context.Context, dir string) error {
		return command(ctx, dir, npm, "install", "--prefix", dir, "--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error", "--ignore-scripts",
			"--fetch-retries=1", "--fetch-timeout=15000", "playwright-core@"+playwright, "axe-core@"+axe)
	}, func(ctx context.Context, dir string) error {
		return command(ctx, dir, node, "--input-type=module", "-e",
			`await import("`+filepath.Join(dir, "node_modules/playwright-core/index.mjs")+`"); await import("`+filepath.Join(dir, "node_modules/axe-core/axe.min.js")+`")`)
	})
	return filepath.Join(dir, "node_modules")
}

// consoleAgent is an agent that is ended and started anew at the same addresses. Its
// methods are called by one goroutine at a time.
type consoleAgent struct {
	data, admin string
	args        []string
	running     *child
}

func (a *consoleAgent) start() error {
	if a.running != nil {
		return nil
	}
	c, err := spawn(thisTest(), a.args...)
	if err != nil {
		return err
	}
	a.running = c
	for end := time.Now().Add(60 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if resp, err := http.Get("http://" + a.admin + "/readyz"); err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return nil
			}
		}
	}
	return fmt.Errorf("the agent does not become ready:\n%s", c.out)
}

func (a *consoleAgent) end() {
	if a.running != nil {
		a.running.end()
		a.running = nil
	}
}

// hostileModel and hostileReplica are names that would do something if the page took
// them for HTML.
const (
	hostileModel   = `<img src=x onerror="window.taken=1"><script>window.taken=1</script>`
	hostileReplica = `"><svg/onload=window.taken=1>`
)

// TestConsole drives the web console of an agent with simulated engines in a browser.
func TestConsole(t *testing.T) {
	t.Parallel() // it waits more than it computes
	node, chromium := need(t, "node"), browser(t)
	modules := consoleModules(t, node)

	var engines []*simulator.Server
	config := "models: [{name: sim, tokenizer: \"builtin:sim\"}]\n" +
		"datapath: {mode: copy}\n" +
		"health: {interval: 200ms}\n" +
		"routing: {shadows: [round_robin, least_request], admission: {budget: 10s}, queue: {max: 10}}\n" +
		"replicas:\n"
	for i := range 4 {
		c := simulator.Config{PrefillA: 20, PrefillD: 2000, TimePerOutputToken: time.Millisecond, DefaultOutputTokens: 20, EnablePromptTokensDetails: true, Seed: uint64(i)}
		id := fmt.Sprintf("engine-%d", i)
		if i == 3 {
			c.ServedModelName, id = []string{hostileModel}, hostileReplica
		}
		e, err := simulator.Start(c)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { e.Close() })
		engines = append(engines, e)
		config += fmt.Sprintf("- {id: %s, url: %q}\n", singleQuoted(id), e.URL())
	}
	newAgent := func(more string) *consoleAgent {
		a := &consoleAgent{data: "127.0.0.1:" + freePort(t), admin: "127.0.0.1:" + freePort(t)}
		file := filepath.Join(t.TempDir(), "inferrail.yaml")
		if err := os.WriteFile(file, []byte(config+more), 0o600); err != nil {
			t.Fatal(err)
		}
		a.args = []string{"agent", "--config", file, "--listen", a.data, "--admin-listen", a.admin}
		t.Cleanup(a.end)
		if err := a.start(); err != nil {
			t.Fatal(err)
		}
		return a
	}
	const token = "token-of-the-suite"
	open, guarded := newAgent(""), newAgent("admin_token_sha256: "+sha256Hex(token)+"\n")

	told, err := json.Marshal(map[string]any{
		"admin": "http://" + open.admin, "guarded": "http://" + guarded.admin, "token": token, "control": consoleControl(t, open, engines),
		"chromium": chromium, "sandbox": os.Getuid() != 0, "modules": modules, "shots": os.Getenv("INFERRAIL_CONSOLE_SHOTS"),
		"hostile_model": hostileModel, "hostile_replica": hostileReplica,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, node, "--test-reporter=spec", "testdata/console/console_test.mjs")
	cmd.Env = append(os.Environ(), "INFERRAIL_CONSOLE="+string(told), "NO_COLOR=1", "NO_PROXY=*", "no_proxy=*")
	// The browser is ended with what has started it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	began := time.Now()
	err = launch(cmd)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		t.Errorf("%v, %v\n%s", err, ctx.Err(), &out)
		return
	}
	if ran := regexp.MustCompile(`(?m)^. pass (\d+)$`).FindSubmatch(out.Bytes()); ran == nil || string(ran[1]) == "0" {
		t.Errorf("the suite ran no test:\n%s", &out)
	}
	t.Logf("%v\n%s", time.Since(began).Round(time.Millisecond), &out)
}

// singleQuoted is text as YAML has it between single quotes.
func singleQuoted(text string) string { return "'" + strings.ReplaceAll(text, "'", "''") + "'" }

// consoleControl serves what the suite asks for past the page: POST /engine
// {engine, sick} has an engine fail its health checks or not, /requests {n} sends
// requests to the agent and answers when they are over, and /agent {run} kills the agent
// or starts it anew.
func consoleControl(t *testing.T, a *consoleAgent, engines []*simulator.Server) string {
	var mu sync.Mutex // guards a
	mux := http.NewServeMux()
	handle := func(path string, do func(body []byte) error) {
		mux.HandleFunc("POST "+path, func(w http.ResponseWriter, r *http.Request) {
			body, err := io.ReadAll(r.Body)
			if err == nil {
				err = do(body)
			}
			if err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
			io.WriteString(w, "{}")
		})
	}
	handle("/engine", func(body []byte) error {
		var told struct {
			Engine int
			Sick   bool
		}
		if err := json.Unmarshal(body, &told); err != nil {
			return err
		}
		faults := simulator.Faults{}
		if told.Sick {
			faults.HealthStatus = http.StatusServiceUnavailable
		}
		return engines[told.Engine].SetFaults(faults)
	})
	handle("/requests", func(body []byte) error {
		var told struct{ N int }
		if err := json.Unmarshal(body, &told); err != nil {
			return err
		}
		for i := range told.N {
			text := fmt.Sprintf(`{"model":"sim","stream":true,"stream_options":{"include_usage":true},"max_tokens":8,"messages":[{"role":"system","content":%q},{"role":"user","content":"%d"}]}`,
				strings.Repeat("what is shared ", 60), i)
			resp, err := http.Post("http://"+a.data+"/v1/chat/completions", "application/json", strings.NewReader(text))
			if err != nil {
				return err
			}
			answer, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if err != nil || resp.StatusCode != http.StatusOK {
				return fmt.Errorf("status %d, %v: %s", resp.StatusCode, err, answer)
			}
		}
		return nil
	})
	handle("/agent", func(body []byte) error {
		var told struct{ Run bool }
		if err := json.Unmarshal(body, &told); err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		if told.Run {
			return a.start()
		}
		a.end()
		return nil
	})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: mux}
	done := make(chan error, 1)
	go func() { done <- server.Serve(ln) }()
	t.Cleanup(func() {
		server.Close()
		<-done
	})
	return "http://" + ln.Addr().String()
}
