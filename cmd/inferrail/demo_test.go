package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/inferrail/inferrail/bench"
)

// The demo shows what it is there to show, in less time here than for people: when an
// engine becomes slow, the default's sessions wait less than those of round robin, and
// change their engines less often.
func TestDemo(t *testing.T) {
	file := filepath.Join(t.TempDir(), "demo.json")
	p := start(t, "demo", "--sessions", "6", "--turns", "10", "--pace", "400ms", "--json", file)
	select {
	case status := <-p.status:
		if status != 0 {
			t.Fatalf("exit status %d\n%s\n%s", status, &p.stdout, &p.stderr)
		}
	case <-time.After(90 * time.Second): // it says that it takes less than a minute
		t.Fatalf("does not end:\n%s\n%s", &p.stdout, &p.stderr)
	}
	t.Log(&p.stdout)
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var report bench.DemoReport
	if err := json.Unmarshal(data, &report); err != nil {
		t.Fatal(err)
	}
	if len(report.Policies) != 3 || len(report.Runs) != 3 || len(report.Marks) != 1 || report.Seconds != 1.6 {
		t.Fatalf("%s", data)
	}
	results := map[string]bench.DemoResult{}
	for i, p := range report.Policies {
		results[p.Policy] = p
		if report.Runs[i].Policy != p.Policy || p.Before.Turns+p.After.Turns+p.Failed != 60 || p.After.Turns < 30 || p.HitRate != report.Runs[i].HitRate || !(p.HitRate > 0 && p.HitRate < 1) || p.Before.TTFT > p.Before.E2E || p.Before.TTFT <= 0 {
			t.Errorf("%+v of %+v", p, report.Runs[i])
		}
	}
	ours, turns, sticky := results["cost_model"], results["round_robin"], results["sticky"]
	if ours.Failed != 0 || !(ours.After.E2E < 0.9*turns.After.E2E && ours.After.TTFT < 0.9*turns.After.TTFT) {
		t.Errorf("after the throttle the default took %v, round robin %v", ours.After, turns.After)
	}
	if !(ours.Switches < turns.Switches/2) || sticky.Switches != 0 {
		t.Errorf("switches: %v, of round robin %v, of sticky %v", ours.Switches, turns.Switches, sticky.Switches)
	}
	if !strings.Contains(p.stdout.String(), "With cost_model an answer took") {
		t.Errorf("no words at the end:\n%s", &p.stdout)
	}
	if turns.After.E2E < 2*turns.Before.E2E {
		t.Errorf("no engine became slow: round robin took %v before and %v after", turns.Before, turns.After)
	}
}

// A signal ends it at once, with its engines and agents.
func TestDemoInterrupted(t *testing.T) {
	p := start(t, "demo")
	p.expect(`(waiting)`)
	p.signals <- syscall.SIGINT
	p.exit(1)
	if !strings.Contains(p.stderr.String(), "interrupted") {
		t.Errorf("it says %q", p.stderr.String())
	}
}

func TestDemoRefuses(t *testing.T) {
	f := func(want string, args ...string) {
		t.Helper()
		p := start(t, append([]string{"demo"}, args...)...)
		p.exit(1)
		if !strings.Contains(p.stderr.String(), want) {
			t.Errorf("%v: %q, want %s", args, p.stderr.String(), want)
		}
	}
	f("--sessions 0: want 1 to 64", "--sessions", "0")
	f("--turns 1: want 2 to 24", "--turns", "1")
	f("--pace 1m0s: want at least 0, and with 12 turns at most", "--pace", "1m")
	f("--slow 0.5: want 1 to 1000", "--slow", "0.5")
}
