package main

import (
	"bufio"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The systemd unit lets through every system call that an agent makes, from its
// start over a reload and traffic to its end, in the packet tier where this
// machine has it.
func TestUnitLetsSystemCallsThrough(t *testing.T) {
	strace, err := exec.LookPath("strace")
	if err != nil {
		t.Skip("no strace")
	}
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("no systemd-analyze")
	}
	filter := regexp.MustCompile(`(?m)^SystemCallFilter=(.*)$`).FindStringSubmatch(read(t, "deploy/systemd/inferrail.service"))
	if filter == nil {
		t.Fatal("the unit has no filter")
	}
	allowed := systemCalls(t, analyze, strings.Fields(filter[1]))
	sim := start(t, "sim", "--port", "0", "--zero-latency")
	engine := sim.expect(`(?m)^simulated vllm at (http://\S+) serves sim; `)
	defer func() {
		sim.signals <- syscall.SIGTERM
		sim.exit(0)
	}()
	dir := t.TempDir()
	trace := filepath.Join(dir, "trace")
	config := file(t, "inferrail.yaml", "listen: 127.0.0.1:0\nadmin_listen: 127.0.0.1:0\nreplicas: [{url: \""+engine+"\"}]\ndecisions: {file: "+filepath.Join(dir, "decisions.jsonl")+", sample: 1}\n")
	c := startChild(t, strace, "-f", "-qq", "-o", trace, "-e", "trace=all", "-e", "signal=none", asUsed(t), "agent", "--config", config)
	await := func(expr string) string {
		t.Helper()
		for began := time.Now(); time.Since(began) < 2*time.Minute; time.Sleep(50 * time.Millisecond) {
			if m := regexp.MustCompile(expr).FindStringSubmatch(c.out.String()); m != nil {
				return m[1]
			}
			select {
			case <-c.ended:
				t.Fatalf("the agent has ended: %v\n%s", c.err, c.out)
			default:
			}
		}
		t.Fatalf("no %s in\n%s", expr, c.out)
		return ""
	}
	await(`(?m)^replicas   1 of 1 (serve)`)
	t.Log("the tier is ", await(`(?m)^datapath   (.*)$`))
	listening := await(`(?m)^listening  (\S+),`)
	for range 5 {
		resp, err := http.Post("http://"+listening+"/v1/chat/completions", "application/json", strings.NewReader(`{"model":"sim","stream":true,"max_tokens":40,"messages":[{"role":"user","content":"hello"}]}`))
		if err != nil {
			t.Fatal(err)
		}
		for s := bufio.NewScanner(resp.Body); s.Scan(); {
		}
		resp.Body.Close()
	}
	// strace passes no signal on to what it runs.
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", c.cmd.Process.Pid, c.cmd.Process.Pid))
	if err != nil {
		t.Skip(err)
	}
	var agent int
	if _, err := fmt.Sscan(string(children), &agent); err != nil {
		t.Fatalf("%v in %q", err, children)
	}
	syscall.Kill(agent, syscall.SIGHUP)
	await(`(the configuration says what is in use)`)
	syscall.Kill(agent, syscall.SIGTERM)
	select {
	case <-c.ended:
	case <-time.After(2 * time.Minute):
		t.Fatalf("the agent does not end:\n%s", c.out)
	}
	made := map[string]bool{}
	text, err := os.ReadFile(trace)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`(?m)^\d+ +(\w+)\(`).FindAllStringSubmatch(string(text), -1) {
		made[m[1]] = true
	}
	if len(made) < 30 {
		t.Errorf("only %d system calls were seen", len(made))
	}
	for name := range made {
		if !slices.Contains(allowed, name) {
			t.Errorf("the unit does not let %s through", name)
		}
	}
}

// systemCalls are the system calls that the unit's filter lets through.
func systemCalls(t *testing.T, analyze string, filter []string) []string {
	t.Helper()
	var all []string
	for _, word := range filter {
		if !strings.HasPrefix(word, "@") {
			all = append(all, word)
			continue
		}
		out, err := exec.Command(analyze, "syscall-filter", word).Output()
		if err != nil {
			t.Skipf("systemd-analyze syscall-filter %s: %v", word, err)
		}
		var inner []string
		for line := range strings.Lines(string(out)) {
			line = strings.TrimSpace(line)
			if line != "" && line != word && !strings.HasPrefix(line, "#") {
				inner = append(inner, line)
			}
		}
		all = append(all, systemCalls(t, analyze, inner)...)
	}
	slices.Sort(all)
	return slices.Compact(all)
}
