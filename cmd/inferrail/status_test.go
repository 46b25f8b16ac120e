package main

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/cockroachdb/datadriven"
	"golang.org/x/sys/unix"

	"github.com/inferrail/inferrail/agent"
)

// statusOf runs inferrail status.
func statusOf(args ...string) (status int, stdout, stderr string) {
	var out, said output
	status = run(&env{args: append([]string{"status"}, args...), stdout: &out, stderr: &said})
	return status, out.String(), said.String()
}

// An agent as scripts and people see it: well, with an engine gone, with none, and gone
// itself.
func TestStatus(t *testing.T) {
	t.Setenv("NO_COLOR", "")
	here := simulated(t)
	dead := "http://127.0.0.1:" + freePort(t)
	p := start(t, agentArgs("--datapath", "copy", "--replica", "gpu-0="+here, "--replica", "gone="+dead)...)
	at := p.expect(`admin (http://\S+)`)
	p.expect(`replicas   (1 of 2)`)
	status, stdout, stderr := statusOf("--admin", at)
	if status != 1 || stderr != "" {
		t.Errorf("status %d: %s", status, stderr)
	}
	for _, want := range []string{"agent     DEGRADED  " + at, "\nbecause   replica gone has not come up", "\ndatapath  copy (forced by configuration)", "\nanswers   none yet", "\nmodels    sim: 1 replica, cost_model", "\nreplicas  1 of 2 up, 1 joining", "\nREPLICA ", "\ngone    joining  GET /health", "\ngpu-0   up "} {
		if !strings.Contains(stdout, want) {
			t.Errorf("no %q in\n%s", want, stdout)
		}
	}
	if strings.Contains(stdout, "\x1b") {
		t.Errorf("colours in a file:\n%q", stdout)
	}
	// For programs.
	status, stdout, _ = statusOf("--admin", at, "--json")
	var s agentStatus
	if err := json.Unmarshal([]byte(stdout), &s); err != nil || status != 1 || s.Exit != 1 || s.Health != "degraded" || len(s.Overview.Replicas) != 2 || strings.Count(stdout, "\n") != 1 {
		t.Errorf("%v, status %d: %s", err, status, stdout)
	}
	p.signals <- syscall.SIGTERM
	p.exit(0)

	well := start(t, agentArgs("--datapath", "copy", "--replica", "gpu-0="+here)...)
	at = well.expect(`admin (http://\S+)`)
	well.expect(`replicas   (1 of 1)`)
	if status, stdout, _ := statusOf("--admin", strings.TrimPrefix(at, "http://")); status != 0 || !strings.Contains(stdout, "agent     OK  ") {
		t.Errorf("status %d\n%s", status, stdout)
	}
	none := start(t, agentArgs("--datapath", "copy", "--replica", "gone="+dead)...)
	at = none.expect(`admin (http://\S+)`)
	if status, stdout, _ := statusOf("--admin", at); status != 2 || !strings.Contains(stdout, "agent     NOT READY  ") {
		t.Errorf("status %d\n%s", status, stdout)
	}
	if status, stdout, stderr := statusOf("--admin", dead); status != 2 || stdout != "" || !strings.Contains(stderr, "cannot ask the agent at "+dead) {
		t.Errorf("status %d, %q, %q", status, stdout, stderr)
	}
	if status, _, stderr := statusOf("--every", "1ms"); status != 1 || !strings.Contains(stderr, "too often") {
		t.Errorf("status %d: %s", status, stderr)
	}
}

// The token comes from a file, and what is wrong with it is told.
func TestStatusToken(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Header.Get("Authorization") != "Bearer sesame":
			http.Error(w, "no", http.StatusUnauthorized)
		case r.URL.Path == "/readyz":
			fmt.Fprintln(w, "ok")
		default:
			fmt.Fprint(w, "{}")
		}
	}))
	defer server.Close()
	f := func(want int, text string, args ...string) {
		t.Helper()
		status, stdout, stderr := statusOf(append(args, "--admin", server.URL)...)
		if status != want || !strings.Contains(stdout+stderr, text) {
			t.Errorf("%q: status %d, %q; want %d, %q", args, status, stdout+stderr, want, text)
		}
	}
	f(2, "wants its admin token")
	f(0, "agent     OK", "--token", "sesame")
	f(0, "agent     OK", "--token-file", file(t, "token", "sesame\n"))
	f(2, "is empty", "--token-file", file(t, "token", "\n"))
	f(2, "no such file", "--token-file", "/nowhere")
}

// Screens of made-up agents, as they look in terminals.
func TestStatusScreens(t *testing.T) {
	datadriven.RunTest(t, filepath.Join("testdata", "status", "screens.txt"), func(t *testing.T, d *datadriven.TestData) string {
		var width, height, replicas, bad int
		d.ScanArgs(t, "width", &width)
		d.ScanArgs(t, "height", &height)
		d.ScanArgs(t, "replicas", &replicas)
		d.MaybeScanArgs(t, "bad", &bad)
		s := madeUp(replicas, bad)
		size := screen{width: width, height: height, terminal: true, colours: d.HasArg("colours")}
		lines := s.lines(size)
		if len(lines) > height {
			t.Errorf("%s: %d lines on a screen of %d", d.Pos, len(lines), height)
		}
		text := string(size.text(lines))
		for _, l := range strings.Split(text, "\n") {
			if n := utf8.RuneCountInString(l); n > width && !size.colours {
				t.Errorf("%s: %d columns: %s", d.Pos, n, l)
			}
		}
		return strings.ReplaceAll(text, "\x1b", "ESC")
	})
}

// madeUp is an agent with so many replicas, of which the last are bad.
func madeUp(replicas, bad int) *agentStatus {
	number := func(v float64) *float64 { return &v }
	began := time.Date(2026, 3, 1, 12, 0, 0, 0, time.Local)
	s := &agentStatus{Admin: "http://127.0.0.1:9090", Health: "ok"}
	o := &s.Overview
	o.Version, o.Started, o.Time = "v1", began, began.Add(75*time.Minute)
	o.Tier, o.TierWhy = "packet", "self-test passed; tcx, bpf_loop"
	o.States = map[string]int{"up": replicas - bad, "down": bad}
	o.Models = []agent.ModelOverview{{Name: "meta-llama/Llama-3.1-8B-Instruct", Policy: "cost_model", Replicas: replicas - bad, Waiting: 2}}
	o.StepS, o.Columns = 2, []string{"t", "requests_per_s", "failed_per_s", "refused_per_s", "retries_per_s", "first_token_p50_ms", "first_token_p99_ms", "first_tokens_per_s", "tokens_per_s", "prompt_tokens_per_s", "hit_rate"}
	for i := range 150 {
		row := []*float64{number(float64(i)), number(12), number(0), number(.5), number(0), number(120), number(900), number(12), number(3000), number(8000), number(.61)}
		if i%2 == 0 {
			row[5], row[6], row[10] = nil, nil, nil
		}
		o.History = append(o.History, row)
	}
	o.Running, o.Waiting = 31, 2
	s.Datapath = carriedAnswers{Interfaces: []string{"eth0", "lo"}, Kernel: 900, Copied: 100, Responses: []carriedBy{{"packet", "", 90}, {"copy", "tls", 3}, {"copy", "short", 7}}}
	for i := range replicas {
		r := agent.ReplicaOverview{ID: fmt.Sprintf("gpu-%d", i), State: "up", Engine: "vllm", Running: i % 7, KV: number(.5), HitRate: number(.25), Cache: "exact",
			FirstTokenP50MS: number(100 + float64(i)), FirstTokenP99MS: number(900), TokensPerS: 123.4, PrefillTokensPerS: 23456, KernelShare: number(1)}
		if i >= replicas-bad {
			r = agent.ReplicaOverview{ID: r.ID, State: "down", Why: "GET /health: dial: connection refused\x1b[2J by a long explanation that does not fit"}
		}
		o.Replicas = append(o.Replicas, r)
	}
	if bad > 0 {
		s.Health, s.Exit = "degraded", statusDegraded
		for i := range min(bad, 20) {
			o.Degraded = append(o.Degraded, fmt.Sprintf("replica gpu-%d is down", replicas-bad+i))
		}
		s.Failures = append(s.Failures, recentDecision{Time: began, RequestID: "r-1", Model: "m", Winner: "gpu-1"})
		_ = json.Unmarshal([]byte(`{"outcome":{"outcome":"aborted","status":502}}`), &s.Failures[0])
	}
	return s
}

func TestShort(t *testing.T) {
	f := func(v float64, want string) {
		t.Helper()
		if got := short(v); got != want {
			t.Errorf("%v: %s, want %s", v, got, want)
		}
	}
	f(0, "0")
	f(0.5, "0.50")
	f(9.949, "9.95")
	f(9.96, "10.0")
	f(99.4, "99.4")
	f(99.6, "100")
	f(9999, "9999")
	f(10000, "10k")
	f(123456, "123k")
	f(12345678, "12M")
	f(math.NaN(), "-")
}

// On a terminal the screen is drawn again and again. The agent goes and another comes in
// its place: both are seen. q ends it, and the terminal is as it was.
func TestStatusWatch(t *testing.T) {
	port := freePort(t)
	run := func() *process {
		return start(t, "agent", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:"+port, "--sim", "1", "--datapath", "copy")
	}
	p := run()
	p.expect(`replicas   (1 of 1)`)
	master, name := openPTY(t)
	tty, err := os.OpenFile(name, os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer tty.Close()
	modes := func() unix.Termios {
		m, err := unix.IoctlGetTermios(int(tty.Fd()), unix.TCGETS)
		if err != nil {
			t.Fatal(err)
		}
		return *m
	}
	before := modes()
	cmd := exec.Command(thisTest(), "status", "--admin", "http://127.0.0.1:"+port, "--watch", "--every", "100ms")
	cmd.Env = append(os.Environ(), "INFERRAIL_RUN=1", "TERM=xterm", "NO_COLOR=")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = tty, tty, tty
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true, Pdeathsig: syscall.SIGKILL}
	if err := launch(cmd); err != nil {
		t.Fatal(err)
	}
	var shown output
	read := make(chan struct{})
	go func() {
		defer close(read)
		var b [4096]byte
		for {
			n, err := master.Read(b[:])
			_, _ = shown.Write(b[:n])
			if err != nil {
				return
			}
		}
	}()
	seen := 0
	await := func(what string) {
		t.Helper()
		for end := time.Now().Add(30 * time.Second); ; time.Sleep(5 * time.Millisecond) {
			text := shown.String()
			if i := strings.Index(text[seen:], what); i >= 0 {
				seen += i + len(what)
				return
			}
			if time.Now().After(end) {
				t.Fatalf("no %q in %q", what, text[seen:])
			}
		}
	}
	await("\x1b[?1049h")
	await("\x1b[32mOK\x1b[0m")
	if modes().Lflag&unix.ICANON != 0 {
		t.Error("keys wait for a line")
	}
	p.signals <- syscall.SIGTERM
	p.exit(0)
	await("\x1b[31mDOES NOT ANSWER\x1b[0m")
	await("it was so")
	p = run()
	await("\x1b[32mOK\x1b[0m")
	if _, err := master.WriteString("xq"); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("it ends with %v", err)
		}
	case <-time.After(20 * time.Second):
		_ = cmd.Process.Kill()
		t.Fatal("q does not end it")
	}
	await("\x1b[?25h\x1b[?1049l")
	if after := modes(); after.Lflag != before.Lflag {
		t.Errorf("the terminal is left at %x, was %x", after.Lflag, before.Lflag)
	}
	p.signals <- syscall.SIGTERM
	p.exit(0)
	tty.Close()
	master.Close()
	<-read
}

// In a pipe each look is printed below the one before, and a signal ends it with the
// status of the last.
func TestStatusWatchInAPipe(t *testing.T) {
	p := start(t, agentArgs("--sim", "1", "--datapath", "copy")...)
	at := p.expect(`admin (http://\S+)`)
	p.expect(`replicas   (1 of 1)`)
	w := start(t, "status", "--admin", at, "--watch", "--every", "100ms")
	w.expect(`(?s)(agent     OK.*agent     OK)`)
	w.signals <- os.Interrupt
	w.exit(0)
	j := start(t, "status", "--admin", at, "--watch", "--every", "100ms", "--json")
	j.expect(`(?s)("health":"ok".*\n.*"health":"ok")`)
	p.signals <- syscall.SIGTERM
	p.exit(0)
	j.expect(`("health":"unreachable")`)
	j.signals <- os.Interrupt
	j.exit(2)
	for _, text := range strings.Split(strings.TrimSpace(j.stdout.String()), "\n") {
		if !json.Valid([]byte(text)) {
			t.Errorf("no JSON: %s", text)
		}
	}
}

// openPTY opens a terminal of 80 columns and 24 lines, and returns the name of its other
// end.
func openPTY(t *testing.T) (master *os.File, name string) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Skipf("no terminal can be opened: %v", err)
	}
	t.Cleanup(func() { master.Close() })
	raw, err := master.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	err = raw.Control(func(fd uintptr) {
		if err := unix.IoctlSetPointerInt(int(fd), unix.TIOCSPTLCK, 0); err != nil {
			t.Error(err)
		}
		n, err := unix.IoctlGetInt(int(fd), unix.TIOCGPTN)
		if err != nil {
			t.Error(err)
		}
		name = "/dev/pts/" + strconv.Itoa(n)
		if err := unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: 80}); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return master, name
}
