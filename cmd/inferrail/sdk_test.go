package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/inferrail/inferrail/bpf"
	"github.com/inferrail/inferrail/simulator"
)

// The SDKs that are tested, installed once into the user's cache.
const (
	pythonSDK = "3.57.0"
	nodeSDK   = "7.59.0"
)

// installTime is how long the test waits for a package registry.
const installTime = 60 * time.Second

// sdk is how one suite is run: its program, and where the SDK for it lies.
type sdk struct {
	name    string
	program []string
	module  string
}

// pythonSuite and nodeSuite install an SDK, unless it is there, and return its
// suite. They skip the test where it cannot be had.
func pythonSuite(t *testing.T) sdk {
	python := need(t, "python3")
	dir := cached(t, "sdk-python-"+pythonSDK, func(ctx context.Context, dir string) error {
		if err := command(ctx, dir, python, "-m", "venv", dir); err != nil {
			return err
		}
		return command(ctx, dir, filepath.Join(dir, "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries=1", "--timeout=15", "openai=="+pythonSDK)
	}, func(ctx context.Context, dir string) error {
		return command(ctx, dir, filepath.Join(dir, "bin/python"), "-c", "import openai; assert openai.__version__ == '"+pythonSDK+"'")
	})
	return sdk{"python", []string{filepath.Join(dir, "bin/python"), "-W", "ignore::DeprecationWarning", "testdata/sdk/openai_test.py"}, ""}
}

func nodeSuite(t *testing.T) sdk {
	node, npm := need(t, "node"), need(t, "npm")
	var major int
	if out, err := exec.CommandContext(t.Context(), node, "--version").Output(); err != nil {
		t.Skipf("node: %v", err)
	} else if _, err := fmt.Sscanf(string(out), "v%d.", &major); err != nil || major < 20 {
		t.Skipf("node is %s; the SDK needs 20", bytes.TrimSpace(out))
	}
	dir := cached(t, "sdk-node-"+nodeSDK, func(ctx context.Context, dir string) error {
		return command(ctx, dir, npm, "install", "--prefix", dir, "--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error",
			"--fetch-retries=1", "--fetch-timeout=15000", "openai@"+nodeSDK)
	}, func(ctx context.Context, dir string) error {
		return command(ctx, dir, node, "--input-type=module", "-e",
			`import { VERSION } from "`+filepath.Join(dir, "node_modules/openai/version.mjs")+`"; if (VERSION !== "`+nodeSDK+`") throw VERSION`)
	})
	return sdk{"node", []string{node, "--test-reporter=spec", "testdata/sdk/openai_test.mjs"}, "file://" + filepath.Join(dir, "node_modules/openai/index.mjs")}
}

// need returns where a program is and skips the test where it is not.
func need(t *testing.T, program string) string {
	path, err := exec.LookPath(program)
	if err != nil {
		t.Skipf("%s is not installed", program)
	}
	return path
}

// command runs a program in dir. The error holds the beginning of what it has
// said.
func command(ctx context.Context, dir, program string, args ...string) error {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = dir
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	if err != nil {
		lines := strings.Split(strings.TrimSpace(string(out)), "\n")
		return fmt.Errorf("%s: %w: %s", filepath.Base(program), err, strings.Join(lines[:min(3, len(lines))], " "))
	}
	return nil
}

// cached returns a folder of the user's cache that install has filled, by this
// run or an earlier one, and that works. The test is skipped where that fails.
func cached(t *testing.T, name string, install, works func(ctx context.Context, dir string) error) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*installTime)
	defer cancel()
	began := time.Now()
	dir, fresh, err := fill(ctx, name, install, works)
	if err != nil {
		t.Skipf("%s cannot be installed: %v", name, err)
	}
	if fresh {
		t.Logf("%s installed in %v", name, time.Since(began).Round(time.Millisecond))
	}
	return dir
}

// fill returns the folder name of the user's cache, which install has filled
// now or earlier. Runs at the same time wait for each other. What install
// leaves when it fails is removed.
func fill(ctx context.Context, name string, install, works func(ctx context.Context, dir string) error) (dir string, fresh bool, err error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", false, err
	}
	dir = filepath.Join(cache, "inferrail", name)
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return "", false, err
	}
	lock, err := os.OpenFile(dir+".lock", os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return "", false, err
	}
	defer lock.Close()
	for {
		err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			break
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return "", false, fmt.Errorf("cannot lock it: %w", err)
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return "", false, fmt.Errorf("another run installs it: %w", ctx.Err())
		}
	}
	ctx, cancel := context.WithTimeout(ctx, installTime)
	defer cancel()
	if _, err := os.Stat(dir); err == nil && works(ctx, dir) == nil {
		return dir, false, nil
	}
	err = os.RemoveAll(dir)
	if err == nil {
		err = os.MkdirAll(dir, 0o755)
	}
	if err == nil {
		err = install(ctx, dir)
	}
	if err == nil {
		err = works(ctx, dir)
	}
	if err != nil {
		os.RemoveAll(dir)
		return "", false, err
	}
	return dir, true, nil
}

// site is a place where an agent stands before two engines.
type site struct {
	t       *testing.T
	engines []*simulator.Server
	base    string
	// listen makes a listener, and run starts a process, where clients are.
	listen func() (net.Listener, error)
	run    func(*exec.Cmd) error
	tier   func() // checks the tier that has served
}

const (
	sdkKey        = "sk-of-the-suite"
	sdkLimitedKey = "sk-of-few-requests"
	sdkBodyBytes  = 1 << 20
)

// sha256Hex is a key as the configuration has it.
func sha256Hex(key string) string {
	sum := sha256.Sum256([]byte(key))
	return hex.EncodeToString(sum[:])
}

// sdkConfig writes the agent's configuration file.
func sdkConfig(t *testing.T) string {
	// Engines that are told to fail are not to be taken out.
	text := fmt.Sprintf("models: [{name: sim, tokenizer: \"builtin:sim\"}]\nhealth: {ejection_failures: 100000}\nserver:\n  max_body_bytes: %d\n"+
		"  api_keys:\n  - {name: suite, sha256: %s}\n  - {name: few, sha256: %s, requests_per_minute: 60}\n",
		sdkBodyBytes, sha256Hex(sdkKey), sha256Hex(sdkLimitedKey))
	file := filepath.Join(t.TempDir(), "inferrail.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// newSite starts engines and an agent: in a lab where there can be one, else
// on loopback, where the agent serves as well as it can.
func newSite(t *testing.T, tier string) *site {
	config := simulator.Config{PrefillA: 1, PrefillD: 100, TimePerOutputToken: 200 * time.Microsecond, DefaultOutputTokens: 40, EnablePromptTokensDetails: true}
	s := &site{t: t}
	var urls []string
	engine := func(e *simulator.Server) {
		s.engines = append(s.engines, e)
		urls = append(urls, e.URL())
	}
	if os.Getuid() == 0 && bpf.Probe() == nil || os.Getenv("INFERRAIL_NEED_BPF") == "1" {
		l := newLab(t, labOptions{})
		engine(l.sim(config))
		engine(l.sim(config))
		n := l.start(tier, urls, "--config", sdkConfig(t))
		s.base = "http://" + n.addr + "/v1"
		s.listen = func() (ln net.Listener, err error) {
			l.in(l.client, func() { ln, err = net.Listen("tcp", "127.0.0.1:0") })
			return ln, err
		}
		s.run = func(cmd *exec.Cmd) (err error) {
			l.in(l.client, func() { err = cmd.Start() })
			return err
		}
		s.tier = func() {
			if d := n.datapath(); tier == "auto" && (d.Tier != "packet" || d.Kernel.Splices == 0) {
				t.Errorf("tier %s (%s) with %d splices, want packet", d.Tier, d.Reason, d.Kernel.Splices)
			} else {
				t.Logf("tier %s, %d splices", d.Tier, d.Kernel.Splices)
			}
		}
		return s
	}
	for range 2 {
		e, err := simulator.Start(config)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { e.Close() })
		engine(e)
	}
	args := agentArgs("--datapath", tier, "--config", sdkConfig(t))
	for i, u := range urls {
		args = append(args, "--replica", fmt.Sprintf("e%d=%s", i, u))
	}
	p := start(t, args...)
	p.expect(`(?m)^replicas   (2 of 2 serve sim)$`)
	s.base = "http://" + p.expect(`(?m)^listening  (127\.0\.0\.1:\d+), admin`) + "/v1"
	t.Cleanup(func() {
		p.signals <- syscall.SIGTERM
		p.exit(0)
	})
	s.listen = func() (net.Listener, error) { return net.Listen("tcp", "127.0.0.1:0") }
	s.run = (*exec.Cmd).Start
	s.tier = func() {}
	return s
}

// control serves what the suites ask of the engines past the agent: POST
// /faults, the body being simulator.Faults and, in "only", the number of the
// engine if not of all; GET /counts of all engines together.
func (s *site) control() string {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /faults", func(w http.ResponseWriter, r *http.Request) {
		var body struct {
			simulator.Faults
			Only *int `json:"only"`
		}
		err := json.NewDecoder(r.Body).Decode(&body)
		for i, e := range s.engines {
			f := body.Faults
			if body.Only != nil && *body.Only != i {
				f = simulator.Faults{}
			}
			if err == nil {
				err = e.SetFaults(f)
			}
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		io.WriteString(w, "{}")
	})
	mux.HandleFunc("GET /counts", func(w http.ResponseWriter, _ *http.Request) {
		counts := map[string]int{"running": 0, "aborted": 0, "finished": 0, "accepted": 0}
		for _, e := range s.engines {
			counts["running"] += e.Running()
			counts["aborted"] += e.Aborted()
			counts["finished"] += e.Finished()
			counts["accepted"] += e.Accepted()
		}
		json.NewEncoder(w).Encode(counts)
	})
	ln, err := s.listen()
	if err != nil {
		s.t.Fatal(err)
	}
	server := &http.Server{Handler: mux}
	done := make(chan error, 1)
	go func() { done <- server.Serve(ln) }()
	s.t.Cleanup(func() {
		server.Close()
		<-done
	})
	return "http://" + ln.Addr().String()
}

// suite runs one of the suites to its end.
func (s *site) suite(k sdk) {
	t := s.t
	audio := filepath.Join(t.TempDir(), "speech.wav")
	if err := os.WriteFile(audio, simulator.WAV(1, 7), 0o600); err != nil {
		t.Fatal(err)
	}
	told, err := json.Marshal(map[string]any{
		"base_url": s.base, "control": s.control(), "key": sdkKey, "limited_key": sdkLimitedKey,
		"audio": audio, "max_body_bytes": sdkBodyBytes, "replicas": []string{"e0", "e1"}, "module": k.module,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, k.program[0], k.program[1:]...)
	cmd.Env = append(os.Environ(), "INFERRAIL_SDK="+string(told), "PYTHONDONTWRITEBYTECODE=1", "NO_COLOR=1", "NO_PROXY=*", "no_proxy=*")
	cmd.WaitDelay = time.Second
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	began := time.Now()
	if err = s.run(cmd); err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		t.Errorf("%v, %v\n%s", err, ctx.Err(), &out)
		return
	}
	t.Logf("%v\n%s", time.Since(began).Round(time.Millisecond), &out)
	s.tier()
}

// TestOpenAISDK runs the official SDKs against an agent, once for each tier of
// the datapath.
func TestOpenAISDK(t *testing.T) {
	t.Parallel()
	for _, install := range []struct {
		name string
		sdk  func(*testing.T) sdk
	}{{"python", pythonSuite}, {"node", nodeSuite}} {
		t.Run(install.name, func(t *testing.T) {
			t.Parallel()
			k := install.sdk(t)
			for _, tier := range []string{"copy", "auto"} {
				t.Run(tier, func(t *testing.T) {
					t.Parallel()
					newSite(t, tier).suite(k)
				})
			}
		})
	}
}

// Installing is done once, however many runs there are, is done again where it
// has left something that does not work, and leaves nothing where it fails.
func TestPackagesAreCached(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	var installed atomic.Int32
	install := func(_ context.Context, dir string) error {
		installed.Add(1)
		return os.WriteFile(filepath.Join(dir, "package"), nil, 0o600)
	}
	works := func(_ context.Context, dir string) error {
		_, err := os.Stat(filepath.Join(dir, "package"))
		return err
	}
	get := func() (string, error) {
		dir, _, err := fill(t.Context(), "p", install, works)
		if err == nil {
			err = works(t.Context(), dir)
		}
		return dir, err
	}
	var runs sync.WaitGroup
	for range 8 {
		runs.Go(func() {
			if _, err := get(); err != nil {
				t.Error(err)
			}
		})
	}
	runs.Wait()
	if n := installed.Load(); n != 1 {
		t.Errorf("installed %d times", n)
	}
	dir, err := get()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(dir, "package")); err != nil {
		t.Fatal(err)
	}
	if _, err := get(); err != nil || installed.Load() != 2 {
		t.Errorf("%v, installed %d times, want once more", err, installed.Load())
	}
	broken := func(context.Context, string) error { return errors.New("no registry") }
	if _, _, err := fill(t.Context(), "q", broken, works); err == nil || err.Error() != "no registry" {
		t.Errorf("got %v", err)
	}
	if _, err := os.Stat(filepath.Join(filepath.Dir(dir), "q")); !os.IsNotExist(err) {
		t.Errorf("a failure leaves its folder: %v", err)
	}
}
